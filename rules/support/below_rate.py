"""Operators far below the device's rates: one check for products, convolutions, attention and
memory-bound operators."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Finding, Outcomes, SkippedCheck
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.core.text import format_share
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import name_matches
from advisor.measure.host.operators import operator_mask, shape_text, shares_of_operators
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import SAM_PAIR, TRIED_ON_TRACES
from advisor.rules.support.common import amount_per_step
from advisor.rules.support.kernel_work import inputs_if_known, is_unfused_attention

MIN_UNFUSED_SHARE = 0.5
"""Minimum share of an operator's time in unfused attention at which only that rule reports it."""
ON_ROCM = "on ROCm"
"""Name of the case about what ROCm's libraries need."""


class SlowCause(NamedTuple):
    """Cause that makes an operator slow."""

    text: str
    """Text for the summary, or ``""`` if there is only advice."""
    case: str = ""
    """Case of the rule with the advice, or ``""`` for the rule's own advice."""
    searched: bool = False
    """Whether only a search in the library can tell if a faster kernel exists."""


class BelowRate(Rule):
    """Base of the rules about operators far below the device's rates."""

    families: ClassVar[tuple[str, ...]]
    """Kernel families that the rule judges."""
    max_efficiency: ClassVar[Threshold[float]]
    """Share of the attainable rate. Slower operators are reported."""
    attained_share: ClassVar[Factor[float]]
    """Share of the attainable rate that a better kernel reaches."""
    best_attained_share: ClassVar[Factor[float]]
    worst_attained_share: ClassVar[Factor[float]]

    min_share = Threshold(
        0.05, "of kernel time: below it another rule's finding always saves more", TRIED_ON_TRACES
    )
    min_busy = Threshold(
        0.2,
        "share of the step the device is busy: below it the host is the bottleneck",
        TRIED_ON_TRACES,
    )
    speedup = Factor(
        4.0,
        "times faster at most, whatever the rates allow: an operator a hundred times below them "
        "often has a reason that its shapes do not show",
        SAM_PAIR,
    )
    best_speedup = Factor(10.0, "times faster, at best", TRIED_ON_TRACES)
    worst_speedup = Factor(2.0, "times faster, at worst", TRIED_ON_TRACES)

    assumptions = (
        "the operators reach {attained_share:.0%} of the attainable rate "
        "({worst_attained_share:.0%} to {best_attained_share:.0%}), and none gets more than "
        "{speedup:g} times faster ({worst_speedup:g} to {best_speedup:g})",
    )
    confidence: ClassVar[float] = 0.6

    _work: ClassVar[str]
    """Name of the operators, in the plural."""
    _rate: ClassVar[str] = "the attainable rate"
    _matrix_work: ClassVar[bool] = False
    """Whether to leave out full FP32 on a device with faster formats: another rule reports it."""
    _names_costliest: ClassVar[bool] = False
    """Whether the summary names the costliest operator and its shapes."""

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        slow = self._keep_suitable(
            a, find_slow(a, self.families, self.max_efficiency, self._matrix_work)
        )
        share = float(slow["share"].sum()) if slow.height else 0.0
        if slow.is_empty() or share < self.min_share:
            yield from self._report_unknown_rates(a)
            return
        worst = slow.sort("saved", descending=True).row(0, named=True)
        causes = self._find_causes(a, worst, inputs_if_known(a, worst["inputs"]))
        reasons = "; ".join(cause.text for cause in causes if cause.text)
        advice = self._advise([cause.case for cause in causes if cause.case])
        if not advice["fix"]:
            return  # what helps is done already
        change, rows = self._build_edit(a, slow, searched=any(cause.searched for cause in causes))
        reached = float((slow["dur"] * slow["efficiency"]).sum()) / max(int(slow["dur"].sum()), 1)
        name = f", {worst['op']} {shapes_of(a, worst['inputs'])}," if self._names_costliest else ""
        if self._names_costliest:
            advice["fix"] = advice["fix"].replace("around the operator", f"around {worst['op']}")
        yield Finding(
            summary=(
                f"Slow {self._work}{self._name_other(a, slow)} take "
                f"{kernel_work.of_kernel_time(a, float(slow['dur'].sum()), share)}, at "
                f"{format_share(reached)} of {self._rate}. "
                f"The costliest{name} reaches "
                f"{format_share(worst['efficiency'])} of {self._rate}: {reasons}."
            ),
            evidence=self._list_evidence(a, slow),
            where=kernel_work.kernel_locations(a, rows),
            edits=[change],
            **advice,
        )

    def _report_unknown_rates(self, a: Analysis) -> Iterator[SkippedCheck]:
        """Report that the rates of much of the rule's work are unknown."""
        return kernel_work.report_unknown_rates(a, self.families, self._work)

    def _name_other(self, a: Analysis, slow: pl.DataFrame) -> str:
        """Describe other work that is part of the operators' time."""
        return ""

    def _keep_suitable(self, a: Analysis, slow: pl.DataFrame) -> pl.DataFrame:
        """Return only the slow operators that the rule is about."""
        return slow

    def _find_causes(
        self, a: Analysis, worst: dict[str, Any], inputs: OpInputs | None
    ) -> list[SlowCause]:
        """Find why the costliest operator is slow; at least one cause."""
        raise NotImplementedError

    def _advise(self, cases: Sequence[str]) -> dict[str, Any]:
        """Join fix and code of the cases. The rule's own are added where no case but the vendor's
        has code."""
        texts = [self.case(name) for name in cases]
        if not any("code" in self.case(name) for name in cases if name != ON_ROCM):
            texts.append({"fix": self.fix, "code": self.code})
        assumptions = [text for case in texts for text in case.get("assumptions", ())]
        return {
            "fix": " ".join(text["fix"] for text in texts if text.get("fix")),
            "code": "\n".join(dict.fromkeys(text["code"] for text in texts if text.get("code"))),
            **({"assumptions": assumptions} if assumptions else {}),
        }

    def _list_evidence(self, a: Analysis, slow: pl.DataFrame) -> list[Evidence]:
        """List share, time, efficiency, and the three operators with most to save."""
        share, dur = float(slow["share"].sum()), int(slow["dur"].sum())
        reached = float((slow["dur"] * slow["efficiency"]).sum() / max(dur, 1))
        lines = [
            self.compare("slow operators, share of kernel time", share, "min_share"),
            amount_per_step(a, "slow operators", dur),
            self.compare(f"share of {self._rate}", reached, "max_efficiency"),
        ]
        for row in slow.sort("saved", descending=True).head(3).iter_rows(named=True):
            rate_column = "flops_per_s" if row["bound"] == "compute" else "bytes_per_s"
            unit, scale = ("TFLOP/s", 1e12) if rate_column == "flops_per_s" else ("GB/s", 1e9)
            rate, attainable_rate = row[rate_column] or 0.0, row[f"attainable_{rate_column}"]
            lines.append(
                Evidence(
                    "operator",
                    f"{row['op']} {shapes_of(a, row['inputs'])}: {rate / scale:,.0f} of "
                    f"{attainable_rate / scale:,.0f} {unit}",
                )
            )
        return lines

    def _build_edit(
        self, a: Analysis, slow: pl.DataFrame, *, searched: bool = False
    ) -> tuple[Edit, kernel_work.Mask]:
        """Return the edit that brings the operators' kernels to an efficiency, and a mask of these
        kernels. Where a kernel has to be ``searched`` for, not even the size of the gain is known:
        the estimate is the geometric mean of the best and worst case.

        The edit names kernels: where another operator runs the same kernels, its time stays."""
        rows = operator_mask(a, slow) & kernel_work.compute_mask(a)
        names = a.trace.gpu["name"].gather(np.flatnonzero(rows)).cast(pl.String).unique().sort()
        select = kernel_work.select_kernels(names.to_list())
        selected = (
            kernel_work.kernel_mask(a) & name_matches(a.trace.gpu["name"], select.name).to_numpy()
        )
        saved, best, worst = (
            saved_time(slow, efficiency, speedup)
            for efficiency, speedup in (
                (self.attained_share, self.speedup),
                (self.best_attained_share, self.best_speedup),
                (self.worst_attained_share, self.worst_speedup),
            )
        )
        if searched:
            saved = (best * worst) ** 0.5
        saved_times = (saved, best, worst)
        return kernel_work.scale_kernels(a, selected, saved_times, select), rows


def find_slow(
    a: Analysis, families: Sequence[str], max_efficiency: float, matrix_work: bool = False
) -> pl.DataFrame:
    """Return rows of ``Analysis.rooflines`` of these families that are bound by compute or memory
    and reach less than ``max_efficiency``. Empty if there are none, or the rates are unknown.
    ``matrix_work`` leaves out matrix work in full FP32 on a device that has faster formats. Unfused
    attention is always left out. Other rules report both."""
    table = a.rooflines
    if table.is_empty() or a.hardware is None:
        return table.clear()
    judged = pl.col("family").is_in(list(families)) & (pl.col("efficiency") < max_efficiency)
    slow = table.filter(judged & pl.col("op").is_not_null())
    if matrix_work and a.hardware.peak("fp16") not in (None, a.hardware.peak("fp32")):
        fp32 = (pl.col("dtype") == "fp32").fill_null(False) & ~pl.col("tensor_core").fill_null(True)
        slow = slow.filter(~fp32)
    if slow.is_empty():
        return slow
    # unfused attention is slow because it is unfused: once fused, these operators are gone
    unfused_shares = shares_of_operators(a, is_unfused_attention(a))
    return (
        slow.join(unfused_shares, on=["op", "inputs"], how="left", nulls_equal=True)
        .filter(pl.col("part").fill_null(0.0) < MIN_UNFUSED_SHARE)
        .drop("part")
        .sort("dur", descending=True)
    )


def shapes_of(a: Analysis, row: int | None) -> str:
    """Return the shapes of the inputs as text."""
    dims = None if row is None else a.trace.inputs["dims"][row]
    return shape_text(dims) or ""


def saved_time(table: pl.DataFrame, efficiency: float, speedup: float) -> float:
    """Return the time that rows below an efficiency save by reaching it, ns. None becomes more than
    ``speedup`` times faster."""
    saved_share = (1 - pl.col("efficiency") / efficiency).clip(0.0, 1 - 1 / speedup)
    return float(table.select((pl.col("dur") * saved_share).sum()).item() or 0.0)
