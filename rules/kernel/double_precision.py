"""Matrix products in double precision on the CPU."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, Select, SkippedCheck
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.optree import own_time, time_inside
from advisor.measure.host.stacks import is_operator
from advisor.rules.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.common import amount_per_step, costliest_places, of_step, scale_edit
from advisor.rules.kernel.kernel_common import exact_pattern
from advisor.testing import Examples, TraceBuilder


class DoublePrecision(Rule):
    """Where the training computes on the CPU, matrix products and convolutions take doubles
    (float64): NumPy's arrays are doubles by default, and ``model.double()`` or
    ``torch.set_default_dtype`` make a model of them. A vector register of the CPU holds half as
    many doubles as floats, and memory moves twice the bytes.

    Counted is the own time of operators of which (nearly) all calls have double inputs, once
    products among them take enough of the step. In float32 they take about half: 0.4 to 0.75, by
    how much of it is arithmetic, memory or overhead. On a GPU this rule is silent.
    """

    id = "double-precision"
    title = "The step computes in double precision (float64)"
    validation_note = (
        "CPU recordings, torch 2.13: two layers on a NumPy array, steps of 21 ms in float64 and "
        "8.8 ms in float32; silent in float32"
    )
    found_in: ClassVar[tuple[str, ...]] = ("recorded/float64.slow",)
    silent_in: ClassVar[tuple[str, ...]] = ("recorded/float64.cured", *CURED_RECORDINGS)
    references: ClassVar[tuple[str, ...]] = (
        "https://docs.pytorch.org/docs/stable/generated/torch.set_default_dtype.html",
    )

    min_share = Threshold(
        0.10, "of the step in products of doubles; twice XProf's for input", XPROF
    )
    same = Threshold(0.9, "of an operator's time with double inputs", CHOSEN)
    factor = Threshold(0.5, "of the time in float32: half the bytes, twice the rate", CHOSEN)
    least, longest = (
        Threshold(0.4, "of the time in float32, where caches hold twice as much", CHOSEN),
        Threshold(0.75, "of the time in float32, where overhead is a half", CHOSEN),
    )

    fix = (
        "Convert data and model to float32: NumPy's arrays are float64 by default. Keep float64 "
        "where the result needs it, such as sums over many values."
    )
    code = (
        "x = torch.as_tensor(array, dtype=torch.float32)   # once, where data is loaded\n"
        "model = model.float()"
    )
    verify = "Record again: the inputs of aten::mm and aten::addmm are float."
    falsified_by = "the same step time in float32"
    assumptions = ("float32 is accurate enough for this model",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        """Own time of operators with double inputs, and of the products among them."""
        if not a.trains_on_host or not a.span_ns:
            return
        if a.trace.inputs.is_empty():
            if a.trace.cpu["name"].cast(pl.String).is_in(_PRODUCTS).any():
                yield SkippedCheck(
                    what="double precision",
                    why="no input shapes and types",
                    record="record_shapes=True",
                )
            return
        table = _operators(a)
        double = (
            table.group_by("name")
            .agg(pl.col("ns").sum(), pl.col("ns").filter("double").sum().alias("own"))
            .filter((pl.col("own") >= self.same * pl.col("ns")) & (pl.col("own") > 0))
        )
        products = table.filter(pl.col("double") & pl.col("name").is_in(_PRODUCTS))
        ns = int(products["ns"].sum())
        if ns < self.min_share * a.span_ns:
            return
        rows = products["row"].to_numpy()
        yield Finding(
            summary=f"Matrix products and convolutions of doubles take {of_step(a, ns)}.",
            evidence=[
                amount_per_step(a, "products of doubles", ns),
                self.compare("share", ns / a.span_ns, "min_share", per=a.per),
                amount_per_step(a, "all operators on doubles", int(double["own"].sum())),
            ],
            where=costliest_places(a, rows, products["ns"].to_numpy()),
            edits=[
                scale_edit(
                    Select(on="host", kind=("op",), name=exact_pattern(double["name"].to_list())),
                    self.factor,
                    self.least,
                    self.longest,
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a model of doubles": _products("double"),
            "a model of floats": (_products("float"), "ns < self.min_share * a.span_ns"),
            "a few doubles": (_products("double", us=100, rest=6000), "min_share"),
            "on a GPU": (_products("double", gpu="A100"), "not a.trains_on_host"),
        }


_PRODUCTS = [
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_addmm_activation"),
        *("mkldnn_convolution", "_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv3d"),
        *("convolution_backward", "thnn_conv2d", "_thnn_fused_lstm_cell"),
    )
]


def _operators(a: Analysis) -> pl.DataFrame:
    """Operators that run in the analysed steps: ``row``, ``name``, own time ``ns``, ``double`` (an
    input is of doubles)."""
    cpu, inside = a.trace.cpu, time_inside(a)
    rows = np.flatnonzero(is_operator(a.trace) & (inside > 0))
    doubles = a.trace.inputs["types"].str.contains('"double"', literal=True)
    of = cpu["inputs"].gather(rows)
    return pl.DataFrame(
        {
            "row": rows,
            "name": cpu["name"].gather(rows).cast(pl.String),
            "ns": np.maximum(own_time(a, inside)[rows], 0).astype(np.int64),
            "double": doubles.gather(of).fill_null(False),
        }
    )


def _products(
    dtype: str, *, us: float = 3000, rest: float = 2000, gpu: str | None = None
) -> TraceBuilder:
    b = TraceBuilder(gpu)
    for _ in b.steps():
        with b.op("aten::mm", [[128, 600], [600, 1200]], dtype, host_us=us):
            if gpu is not None:
                b.launch("ampere_dgemm_128x64_nn", 300)
        b.on_host("aten::relu", rest)
    return b
