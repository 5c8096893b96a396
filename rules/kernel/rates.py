"""What rules about operators far from the device's rates share: which ones, the edit, the words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Evidence, NotMeasured, Rule, Select, Threshold
from advisor.measure import Analysis
from advisor.measure.device.rooflines import shape_text
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import matches
from advisor.measure.host.operators import rows_of, share_in
from advisor.rules.common import figure
from advisor.rules.kernel import facts
from advisor.rules.kernel.attention import unfused
from advisor.rules.sources import OURS, SAM_PAIR

UNKNOWN_SHARE = 0.20
"""Of kernel time whose rate is not known, from which it is worth saying."""


MOSTLY = 0.5
"""Of an operator's time in attention that is not fused, from which it is that rule's business."""
REACHES = (
    "they come to {reach:.0%} of the attainable rate ({worst_reach:.0%} to {best_reach:.0%}), and "
    "none gets more than {faster:g} times faster ({worst_faster:g} to {best_faster:g})"
)
"""What the edit takes for granted."""


class Rated(Rule):
    """What rules about operators far below the device's rates have in common: the thresholds, the
    evidence, the edit."""

    max_efficiency: ClassVar[Threshold[float]]
    """Of the attainable rate: slower operators are reported."""
    reach: ClassVar[Threshold[float]]
    """Of the attainable rate: what a better kernel comes to."""
    best_reach: ClassVar[Threshold[float]]
    worst_reach: ClassVar[Threshold[float]]

    min_share = Threshold(
        0.05, "of kernel time: below it another rule's finding is always worth more", OURS
    )
    min_busy = Threshold(
        0.2, "share of the step the device is busy: below it the host is what to look at", OURS
    )
    faster = Threshold(
        4.0,
        "times faster at most, whatever the rates would allow: what is a hundred times below them "
        "often has a reason that its shapes do not tell",
        SAM_PAIR,
    )
    best_faster = Threshold(10.0, "times faster, at best", OURS)
    worst_faster = Threshold(2.0, "times faster, at worst", OURS)

    assumptions: ClassVar[tuple[str, ...]] = (REACHES,)
    confidence: ClassVar[float] = 0.6

    def told(self, cases: Sequence[str], *, own: bool) -> dict[str, Any]:
        """Fix and code of several cases, one after the other; ``own``: and the rule's own."""
        texts = [self.case(name) for name in cases]
        if own:
            texts.append({"fix": self.fix, "code": self.code})
        return {
            "fix": " ".join(text["fix"] for text in texts if "fix" in text),
            "code": "\n".join(dict.fromkeys(text["code"] for text in texts if "code" in text)),
        }

    def evidence(self, a: Analysis, table: pl.DataFrame) -> list[Evidence]:
        """Share, time, efficiency, and the three operators with most to save."""
        share, dur = float(table["share"].sum()), int(table["dur"].sum())
        reached = float((table["dur"] * table["efficiency"]).sum() / max(dur, 1))
        lines = [
            Evidence(
                "such operators, share of kernel time", share, "share", *self.limit("min_share")
            ),
            figure(a, "such operators", dur),
            Evidence("of the attainable rate", reached, "share", *self.limit("max_efficiency")),
        ]
        for row in table.sort("saved", descending=True).head(3).iter_rows(named=True):
            by = "flops_per_s" if row["bound"] == "compute" else "bytes_per_s"
            unit, scale = ("TFLOP/s", 1e12) if by == "flops_per_s" else ("GB/s", 1e9)
            rate, roof = row[by] or 0.0, row[f"attainable_{by}"]
            lines.append(
                Evidence(
                    "operator",
                    f"{row['op']} {shapes_of(a, row['inputs'])}: {rate / scale:,.0f} of "
                    f"{roof / scale:,.0f} {unit}",
                )
            )
        return lines

    def edit(self, a: Analysis, table: pl.DataFrame) -> tuple[Edit, facts.Mask]:
        """The rows' kernels come to an efficiency; and which kernels these are.

        Kernels are named: where another operator runs the same ones, its time stays."""
        rows = rows_of(a, table) & facts.compute_rows(a)
        names = a.trace.gpu["name"].gather(np.flatnonzero(rows)).cast(pl.String).unique().sort()
        name = facts.exactly(names.to_list())
        selected = facts.kernel_rows(a) & matches(a.trace.gpu["name"], name).to_numpy()
        likely, best, worst = (
            facts.diluted(a, selected, saved(table, efficiency, faster))
            for efficiency, faster in (
                (self.reach, self.faster),
                (self.best_reach, self.best_faster),
                (self.worst_reach, self.worst_faster),
            )
        )
        return (
            Edit(
                op="scale",
                select=Select(on="gpu", kind=("kernel",), name=name),
                factor=likely,
                factor_low=best,
                factor_high=worst,
            ),
            rows,
        )


def far_below(
    a: Analysis, families: Sequence[str], max_efficiency: float, tensor: bool = False
) -> pl.DataFrame:
    """Rows of ``Analysis.rooflines`` of these families that are bound by compute or memory and
    reach less than ``max_efficiency``; empty: none, or not known. ``tensor``: matrix work in full
    fp32 on a device that has faster formats is left out, and so is attention in separate kernels:
    both are other rules' business."""
    table = a.rooflines
    if table.is_empty() or a.hardware is None:
        return table.clear()
    judged = pl.col("family").is_in(list(families)) & (pl.col("efficiency") < max_efficiency)
    found = table.filter(judged & pl.col("op").is_not_null())
    if tensor and a.hardware.peak("fp16") not in (None, a.hardware.peak("fp32")):
        full = (pl.col("dtype") == "fp32").fill_null(False) & ~pl.col("tensor_core").fill_null(True)
        found = found.filter(~full)
    if found.is_empty():
        return found
    # attention in separate kernels is slow for being so: fused, these operators are gone
    part = share_in(a, unfused(a))
    return (
        found.join(part, on=["op", "inputs"], how="left", nulls_equal=True)
        .filter(pl.col("part").fill_null(0.0) < MOSTLY)
        .drop("part")
        .sort("dur", descending=True)
    )


def unknown(a: Analysis, families: Sequence[str], what: str) -> Iterator[NotMeasured]:
    """Says so where the families take much time and nothing is known of their rates."""
    table = a.rooflines.filter(pl.col("family").is_in(list(families)))
    blind = table.filter(pl.col("bound") == "unknown")
    if blind["share"].sum() < UNKNOWN_SHARE or blind["dur"].sum() < 0.8 * float(table["dur"].sum()):
        return
    if a.hardware is None:
        why, record = "what this device attains is not known", ""
    elif a.trace.meta.record_shapes is not True and not a.trace.inputs.height:
        why, record = "the trace has no input shapes", "record_shapes=True"
    else:
        return
    yield NotMeasured(what=f"how near {what} come to the device's rates", why=why, record=record)


def inputs_of(a: Analysis, row: int | None) -> OpInputs | None:
    """The inputs of a row of ``Analysis.rooflines``."""
    if row is None:
        return None
    given = a.trace.inputs.row(row, named=True)
    return OpInputs(*(given[name] or "" for name in ("dims", "types", "strides", "concrete")))


def shapes_of(a: Analysis, row: int | None) -> str:
    """Their shapes in words."""
    dims = None if row is None else a.trace.inputs["dims"][row]
    return shape_text(dims) or ""


def saved(table: pl.DataFrame, efficiency: float, faster: float) -> float:
    """Time that rows below an efficiency save by coming to it, ns; none becomes more than
    ``faster`` times faster."""
    short = (1 - pl.col("efficiency") / efficiency).clip(0.0, 1 - 1 / faster)
    return float(table.select((pl.col("dur") * short).sum()).item() or 0.0)
