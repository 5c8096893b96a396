"""Items of a dataset that are computed from a whole record, of which they keep a part."""

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import dimension_taken, inputs_at, range_taken
from advisor.measure.device.shapes import OpInputs
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    impact_per_step,
    of_step,
    outermost_in_steps,
    scale_edit,
)
from advisor.rules.support.loader_waits import SINGLE_PROCESS, find_waits
from advisor.testing import Examples, TraceBuilder

VIEWS = frozenset(
    f"aten::{name}"
    for name in "select slice narrow expand view reshape transpose permute unsqueeze t".split()
)
"""Operators that compute nothing."""


class _WholeRecords(NamedTuple):
    """Operators of the loader on whole records."""

    rows: NDArray[np.int64]
    """Rows of ``trace.cpu``."""
    share: float
    """Share of the time of all operators in the loader."""
    length: int
    """Length of a record."""
    kept_length: int
    """Length of the longest part that an item keeps."""


class WholeRecordItems(Rule):
    """``__getitem__`` computes features of a whole record, such as a year of readings or a long
    recording, and returns a part of them: ``build(series)[start:stop]``. Each of the record's items
    computes them again.

    The rule needs a loader without workers, whose operators are in the trace. It finds slices that
    keep at most a quarter of a long dimension, and the other operators in the loader on tensors of
    that length. A dataset that only slices what it stores computes nothing on them.

    The gain is the share of these operators in the time of the loader."""

    id = "whole-record-items"
    title = "Items are computed from a whole record, and keep a part of it"
    found_in = ("recorded/year_windows.slow",)
    silent_in = CURED_RECORDINGS
    references = ("https://docs.pytorch.org/docs/stable/data.html#map-style-datasets",)
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 2.5 ms predicted, 3.3 ms measured. Others, not "
        "in the tests: 16 ms predicted, 17 ms measured; 138 ms predicted, 155 ms measured"
    )

    min_share = Threshold(0.05, "of the step in work on whole records", XPROF)
    min_length = Threshold(256, "elements of the long dimension: shorter ones are cheap", CHOSEN)
    max_kept_share = Threshold(0.25, "of the long dimension is kept by an item", CHOSEN)
    min_length_share = Threshold(
        0.9, "of the length in an operator's tensor: padding and differences change it", CHOSEN
    )
    saved_share = Factor(0.9, "of the time is saved: a slice and the join of items stay", CHOSEN)
    worst_saved_share = Factor(
        0.5, "of the time is saved, if only the part is computed for each item", CHOSEN
    )

    fix = (
        "Compute once what all items of a record share, in __init__, and slice it in __getitem__. "
        "What is random for each item, compute on the part: slice first."
    )
    code = (
        "# in __init__: once for each record\n"
        "self.features = [build(record) for record in records]\n"
        "# in __getitem__: the part only, not build(record)[start:stop]\n"
        "item = self.features[number][start:stop]"
    )
    verify = "Record again: loading is shorter. The items are the same."
    falsified_by = "records that change from item to item"
    assumptions = ("the features of all records fit into memory",)
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        waits = find_waits(a, SINGLE_PROCESS)
        if waits is None:
            return
        records = self._find_whole_records(a, waits.host)
        if records is None:
            return
        ns = records.share * waits.exposed
        if ns < self.min_share * a.span_ns:
            return
        yield Finding(
            summary=(
                f"Items keep {records.kept_length:,} of {records.length:,} elements of a record, "
                f"and compute on all of it. This takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "loading", waits.exposed),
                Evidence("operators on whole records, share of loading", records.share, "share"),
                self.compare("length of a record", records.length, "min_length", "count"),
                self.compare(
                    "part that an item keeps",
                    records.kept_length / records.length,
                    "max_kept_share",
                ),
                self.compare_share(a, "work on whole records", ns),
            ],
            where=costliest_places(a, records.rows, top=1),
            **self._estimate(a, records.share),
        )

    def _estimate(self, a: Analysis, share: float) -> dict[str, Any]:
        """Return the gain of the run's steps if they are recorded, as the profiler slows down small
        operators, or else the edit of the window."""
        run_steps = a.run_steps
        loading = None if run_steps is None else run_steps.share("data")
        step = None if run_steps is None else run_steps.reference
        if run_steps is None or loading is None or not step or a.device_id is not None:
            worst = 1 - self.worst_saved_share * share
            select = Select(on="host", name=SINGLE_PROCESS)
            return {"edits": [scale_edit(select, 1 - share, 1 - share, worst)]}
        ns = share * loading * step
        low = self.worst_saved_share * ns
        impact = impact_per_step(
            a, self.saved_share * ns, low=low, high=ns, of_median=not run_steps.varies
        )
        return {"impact": impact}

    def _find_whole_records(self, a: Analysis, loading: NDArray[np.int64]) -> _WholeRecords | None:
        cpu = a.trace.cpu
        begin = np.sort(cpu["ts"].to_numpy()[loading])
        end = np.sort((cpu["ts"] + cpu["dur"]).to_numpy()[loading])
        table = outermost_in_steps(a)
        at = np.searchsorted(begin, table["ts"].to_numpy(), side="right") - 1
        is_loading = (at >= 0) & (table["ts"].to_numpy() < end[np.maximum(at, 0)])
        table = table.filter(is_loading)
        inputs = {i: inputs_at(a, i) for i in table["inputs"].drop_nulls().unique()}
        parts = [
            part
            for name, i in table.select("name", "inputs").unique().drop_nulls().iter_rows()
            if (part := _read_part(name, inputs[i])) is not None
            if part[0] >= self.min_length and part[1] <= self.max_kept_share * part[0]
        ]
        if not parts:
            return None
        length, kept = max(parts)
        least = self.min_length_share * length
        long = {i for i, x in inputs.items() if _longest(x) >= least}
        names, indices = table["name"].to_list(), table["inputs"].to_list()
        is_whole = [i in long and name not in VIEWS for name, i in zip(names, indices, strict=True)]
        on_records = table.filter(is_whole)
        computing = table.filter([name not in VIEWS for name in names])
        if on_records.is_empty():
            return None
        share = float(on_records["ns"].sum()) / max(1, int(computing["ns"].sum()))
        return _WholeRecords(on_records["row"].to_numpy(), share, length, kept)

    @staticmethod
    def examples() -> Examples:
        return {
            "windows of a year": _build_windows(),
            "in a recorded run": _build_windows(recorded=True),
            "stored features": (_build_windows(computes=False), "records is None"),
            "most of a record": (_build_windows(kept=6000), "max_kept_share"),
            "short records": (_build_windows(length=200, kept=20), "min_length"),
            "worker processes": (_build_windows(workers=True), "waits is None"),
            "a long step": (_build_windows(other_us=200_000), "min_share"),
        }


def _read_part(name: str, x: OpInputs) -> tuple[int, int] | None:
    """Return the size of a dimension and how much of it an operator keeps. ``None`` if it takes no
    part, or a single element."""
    dimension = dimension_taken(name, x)
    if dimension is None or not prod(dimension[0]):
        return None
    shape, dim = dimension
    size = shape[dim]
    taken = range_taken(name, x, x.argument(1), size)
    if taken is None or taken[1] - taken[0] < 2:
        return None
    return size, taken[1] - taken[0]


def _longest(x: OpInputs) -> int:
    """Return the largest dimension of an operator's tensors."""
    shapes = [tensor.shape for tensor in x.tensors]
    for position in range(len(x)):
        shapes += x.shapes(position)
    return max((size for shape in shapes for size in shape), default=0)


def _build_windows(
    *,
    length: int = 8736,
    kept: int = 168,
    computes: bool = True,
    workers: bool = False,
    recorded: bool = False,
    other_us: float = 3000,
) -> TraceBuilder:
    """Build steps on windows of a record, whose features the loader computes for each item."""
    b = TraceBuilder(gpu=None)
    kind = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
    for _ in b.steps():
        with b.range(f"enumerate(DataLoader)#{kind}.__next__"):
            for number in range(4):
                if computes:
                    b.on_host("aten::log1p", 200, [[length]])
                    b.on_host("aten::cumsum", 300, [[length + 24], [], []])
                part = ["", "0", str(number), str(number + kept), "1"]
                b.on_host("aten::slice", 5, [[length, 12], [], [], [], []], concrete=part)
            b.on_host("aten::stack", 100, [[[kept, 12]] * 4, []], ["TensorList", "Scalar"])
        b.on_host("aten::linear", other_us, [[4, kept], [8, kept]])
    if recorded:
        b.record_of_run().steps(60, 5, data=2, forward=3)
    return b
