"""A tensor that grows by concatenation is copied as a whole each time."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at, range_taken, readers_behind
from advisor.measure.device.shapes import MAX_LISTED
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import outermost_rows
from advisor.measure.steps.steps import rows_in_steps
from advisor.replay.selection import mask_under
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    impact_per_step,
    of_step,
    outermost_in_steps,
    scale_edit,
)
from advisor.rules.support.kernel_work import exact_pattern, scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

CAT = r"^aten::cat$"
_MAX_CALLS = 100_000


class GrowingConcatenation(Rule):
    """A tensor grows by ``torch.cat`` in each pass: keys and values of a cache, a list of results.
    Each call allocates the whole tensor again and copies all earlier parts, so the cost grows with
    the length. A tensor allocated once takes the new part by index.

    The recorded shapes show it: concatenations of two tensors whose first is longer by just the
    second each time, and equal in all other dimensions. Or the first is as long each time, because
    the oldest entries are sliced off the result: a replay memory, a window of past values.

    The gain is the time of these concatenations in the recorded passes. It is larger later in the
    sequence."""

    id = "growing-concatenation"
    title = "A tensor grows by concatenation and is copied whole each time"
    found_in = (
        "recorded/grown_cache.slow",
        "recorded/sliding_window.slow",
    )
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://huggingface.co/docs/transformers/kv_cache#fixed-size-cache",
        "https://docs.pytorch.org/docs/stable/generated/torch.cat.html",
    )

    min_lengths = Threshold(
        3, "lengths in a row, each longer by what was appended; or calls that slide", CHOSEN
    )
    min_share = Threshold(0.05, "of the step in these concatenations", XPROF)
    factor = Factor(0.1, "of their time, to copy the new part alone", CHOSEN)
    worst_factor = Factor(0.5, "of it, where launches or allocations are most of it", CHOSEN)

    fix = (
        "Allocate the tensor once with its largest length, and write each new part at its place. "
        "Read the part that is filled."
    )
    code = (
        "cache = k.new_empty(batch, heads, max_length, head_size)   # once\n"
        "cache[:, :, length : length + 1] = k   # not torch.cat([cache, k], dim=2)\n"
        "length += 1\n"
        "keys = cache[:, :, :length]"
    )
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "the oldest entries are dropped": {
            "fix": "Allocate the tensor once with its capacity, and write each new part over the "
            "oldest, at a place that goes round. Entries are then not in the order of their age: "
            "the oldest is at the place to be written next.",
            "code": "memory = new.new_empty(capacity, *new.shape[1:])   # once\n"
            "rows = (place + torch.arange(len(new))) % capacity\n"
            "memory[rows] = new   # not torch.cat([memory, new])[-capacity:]\n"
            "place = (place + len(new)) % capacity\n"
            "filled = min(filled + len(new), capacity)",
            "verify": "Profile again: aten::cat takes no share of the step.",
            "falsified_by": "the same time per pass at a tenth of the capacity",
            "assumptions": ("code that reads the tensor can index it by place",),
        }
    }
    verify = "Profile again late in the sequence: aten::cat takes no share of the step."
    falsified_by = "the same time per pass at ten times the length"
    assumptions = ("the largest length is known when the loop begins",)
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        appends = [kind for kind in _find_appends(a) if kind.evidence >= self.min_lengths]
        if not appends:
            return
        calls = rows_in_steps(a, np.sort(np.concatenate([kind.calls for kind in appends])))
        ns = time_of_operators(a, calls)
        if ns < self.min_share * a.span_ns:
            return
        rows = rows_in_steps(a, np.sort(np.concatenate([calls, *(x.slices for x in appends)])))
        longest = max(appends, key=lambda kind: (len(kind.calls), kind.lengths[-1]))
        tensors = "a tensor" if len(appends) == 1 else f"{len(appends)} kinds of tensor"
        last = longest.lengths[-1]
        lengths = (
            f"{last:,}, the oldest of which are sliced off again"
            if longest.drops_oldest
            else f"{longest.lengths[0]:,} in the first recorded pass, {last:,} in the last"
        )
        yield Finding(
            summary=(
                f"In each pass torch.cat appends to {tensors} and copies all entries: {lengths}. "
                f"This takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "growing concatenations", len(calls), "count"),
                amount_per_step(a, "time of growing concatenations", ns),
                self.compare(
                    "calls that slide" if longest.drops_oldest else "lengths in a row",
                    longest.evidence,
                    "min_lengths",
                    "count",
                ),
                self.compare_share(a, "time of growing concatenations", ns),
            ],
            where=costliest_places(a, calls),
            edits=[
                scale_operators(a, rows, ((1 - self.factor) * ns, ns, (1 - self.worst_factor) * ns))
            ],
            **(self.case("the oldest entries are dropped") if longest.drops_oldest else {}),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "keys and values": _build_cache(range(100, 105)),
            "on a CPU": _build_cache(range(100, 105), gpu=None),
            "a cache of one length": (_build_cache([100] * 5), "not appends"),
            "a window that slides": _build_cache([100] * 5, dropped=1),
            "an end is read": (_build_cache([100] * 5, dropped=101 - 8), "not appends"),
            "two outputs joined": (_build_cache([100, 90, 104, 88]), "not appends"),
            "two passes": (_build_cache([100, 101]), "not appends"),
            "hardly any time": (_build_cache(range(100, 105), us=4), "min_share"),
        }


class JoinedList(Rule):
    """A Python list of tensors holds entries, such as a memory bank or a replay buffer. In each
    step ``torch.stack`` or ``torch.cat`` joins them again. Each entry costs the host its checks,
    and its values are copied. One tensor, allocated once, holds them in place.

    PyTorch's profiler does not write the shapes of lists of more than 30 tensors, which tells them
    from others, if it writes any. The rule is silent where a step itself makes as many tensors: it
    collects results (see unbatched-calls). Lists in the backward pass, the optimizer and the loader
    do not count.

    The gain is the time of these calls. On a CPU, the time right before each call counts too: the
    list is read then. It counts for at most as long as the call."""

    id = "joined-list"
    title = "A long list of tensors is joined into one in each step"
    found_in = ("recorded/joined_list.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording of a memory bank, torch 2.13, and its cure"
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.stack.html",)

    min_share = Threshold(0.05, "of the step in these calls", XPROF)
    max_repeats = Threshold(MAX_LISTED, "calls of one operator in a step with equal inputs", CHOSEN)
    factor = Factor(0.1, "of their time, to write the new entries", CHOSEN)
    best_factor = Factor(0.0, "of it, at best", CHOSEN)
    worst_factor = Factor(0.5, "of it, where other code needs a copy", CHOSEN)

    fix = (
        "Keep the entries in one tensor, allocated once, and write new ones over the oldest, at a "
        "place that goes round. Read the tensor as it is: no list, no copy."
    )
    code = (
        "bank = first.new_empty(capacity, *first.shape[1:])   # once\n"
        "rows = (place + torch.arange(len(new))) % capacity\n"
        "bank[rows] = new.detach()   # not list.extend(new.unbind(0))\n"
        "place = (place + len(new)) % capacity\n"
        "scores = query @ bank.T     # not torch.stack(list)"
    )
    verify = "Profile again: aten::stack and aten::cat take no share of the step."
    falsified_by = "the same step time with a tenth of the entries"
    assumptions = ("most entries stay from step to step",)
    needs_shapes = True
    confidence = 0.8
    alternatives = "forward code"

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        outermost = outermost_in_steps(a)
        joins = outermost.filter(pl.col("name").is_in(_JOINS), pl.col("inputs").is_not_null())
        inputs = joins["inputs"].unique().to_list()
        long_lists = [index for index in inputs if inputs_at(a, index).is_long_list(0)]
        if len(long_lists) == len(inputs):
            return  # this version of the profiler may write no list
        joins = joins.filter(pl.col("inputs").is_in(long_lists))
        if joins.is_empty():
            return
        rows = joins["row"].to_numpy()
        excluded = mask_under(a, _EXCLUDED)[:-1][rows]
        joins = joins.filter(pl.Series(~excluded, dtype=pl.Boolean))
        rows = joins["row"].to_numpy()
        work_ns = time_of_operators(a, rows)
        ns = max(work_ns, int(joins["ns"].sum()))
        before_ns = _time_before(a, rows) if a.device_id is None else 0
        if ns + before_ns < self.min_share * a.span_ns:
            return
        others = outermost.filter(~pl.col("name").is_in(_JOINS))
        repeats = others.group_by("name", "inputs").len()["len"].to_numpy()
        if repeats.max(initial=0) > self.max_repeats * a.step_count:
            return
        per_step, before = ns / a.step_count, before_ns / a.step_count
        run_time = None if a.run_steps is None else a.run_steps.step_time
        in_run = 1.0 if run_time is None else min(1.0, run_time.reference_ns / a.step_ns)
        edits: list[Edit] = []
        if a.device_id is not None:
            factors = self.range_of("factor")
            names = exact_pattern(joins["name"].unique().to_list())
            on_host = Select(on="host", kind=("op",), name=names)
            on_device = scale_operators(a, rows, [(1 - factor) * work_ns for factor in factors])
            edits = [on_device, scale_edit(on_host, *factors)]
        yield Finding(
            summary=(
                f"{_name_calls(joins)} of more than {MAX_LISTED} tensors takes "
                f"{of_step(a, ns + before_ns)}, although few of them are new in a step."
            ),
            evidence=[
                amount_per_step(a, "such calls", len(rows), "count"),
                amount_per_step(a, "time in and right before them", ns + before_ns),
                amount_per_step(a, "time right before them", before_ns),
                self.compare("share", (ns + before_ns) / a.span_ns, "min_share", per=a.per),
            ],
            where=costliest_places(a, rows),
            edits=edits,
            impact=None
            if edits
            else impact_per_step(
                a,
                in_run * (1 - self.factor) * (per_step + before),
                low=in_run * (1 - self.worst_factor) * per_step,
                high=(1 - self.best_factor) * (per_step + before),
                method="recorded time of these calls",
                of_median=True,
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a memory bank": _build_bank(),
            "a memory bank on a GPU": _build_bank(gpu="A100"),
            "a short list": (_build_bank(entries=8), "joins.is_empty()"),
            "no list is written": (_build_bank(short=False), "len(long_lists) == len(inputs)"),
            "results of this step": (_build_bank(made=64), "max_repeats"),
            "in the backward pass": (
                _build_bank(around="autograd::engine::evaluate_function: UnbindBackward0"),
                "ns + before_ns < self.min_share * a.span_ns",
            ),
            "hardly any time": (_build_bank(us=9), "ns + before_ns < self.min_share * a.span_ns"),
        }


_JOINS = ("aten::stack", "aten::cat")
_EXCLUDED = r"^autograd::|^Optimizer|^enumerate\(DataLoader\)"


def _name_calls(joins: pl.DataFrame) -> str:
    names = joins["name"].unique().sort().str.replace("aten::", "torch.").to_list()
    return " and ".join(names)


def _time_before(a: Analysis, rows: Rows) -> int:
    """Return the time between these calls and the work before each on its thread, ns. Each counts
    for at most as long as the call."""
    cpu = a.trace.cpu
    order = outermost_rows(a.trace)
    table = pl.DataFrame(
        {
            "row": order,
            "thread": cpu["thread"].gather(order),
            "ts": cpu["ts"].gather(order),
            "dur": cpu["dur"].gather(order),
        }
    ).sort("thread", "ts", maintain_order=True)
    end = (pl.col("ts") + pl.col("dur")).shift().over("thread")
    gaps = table.with_columns(gap=pl.min_horizontal(pl.col("ts") - end, "dur").clip(lower_bound=0))
    return int(gaps.filter(pl.col("row").is_in(rows.tolist()))["gap"].fill_null(0).sum())


def _build_bank(
    *,
    gpu: str | None = None,
    us: float = 900,
    entries: int = 4096,
    made: int = 1,
    around: str = "",
    short: bool = True,
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)
    b.record_of_run().steps(60, 5, forward=2)
    lists = [[[96]] * entries if entries <= MAX_LISTED else [], []]
    for _ in b.steps(5):
        for _ in range(made):
            b.compute("aten::linear", 60, [[32, 96], [96, 96], [96]])
        b.compute("aten::mm", 3000, [[512, 512], [512, 512]])
        if short:
            b.compute("aten::cat", 5, [[[32, 1], [32, 64]], []], ["TensorList", "Scalar"])
        with b.range(around) if around else nullcontext():
            b.compute("aten::stack", us, lists, ["TensorList", "Scalar"])
    return b


class _AppendKind(NamedTuple):
    """Concatenations that may append to one tensor."""

    axis: int
    others: tuple[int, ...]
    """All dimensions, 0 for the dimension of the axis."""
    appended: int


class _Appends(NamedTuple):
    lengths: list[int]
    calls: Rows
    slices: Rows
    """Calls that slice the oldest entries off again, so that the tensor is as long each time."""

    @property
    def drops_oldest(self) -> bool:
        """Whether the oldest entries are sliced off each time."""
        return bool(len(self.slices))

    @property
    def evidence(self) -> int:
        """Number of lengths, or of calls if the oldest entries are dropped."""
        return len(self.calls) if self.drops_oldest else len(self.lengths)


def _find_appends(a: Analysis) -> list[_Appends]:
    """Find concatenations in the trace whose first input grows by the second."""
    cpu = a.trace.cpu
    calls = np.flatnonzero(name_matches(cpu["name"], CAT).to_numpy())[:_MAX_CALLS]
    shapes_by_index: dict[int, list[tuple[int, ...]]] = {}
    kinds: dict[_AppendKind, list[tuple[int, int]]] = defaultdict(list)
    for row, index in zip(calls.tolist(), cpu["inputs"].gather(calls).to_list(), strict=True):
        if index is None:
            continue
        if index not in shapes_by_index:
            shapes_by_index[index] = inputs_at(a, index).shapes(0)
        shapes = shapes_by_index[index]
        if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
            continue
        differing_axes = [axis for axis, (x, y) in enumerate(zip(*shapes, strict=True)) if x != y]
        if len(differing_axes) != 1:
            continue
        axis = differing_axes[0]
        length, appended = shapes[0][axis], shapes[1][axis]
        if 0 < appended < length:
            others = (*shapes[0][:axis], 0, *shapes[0][axis + 1 :])
            kinds[_AppendKind(axis, others, appended)].append((row, length))
    return [_longest_run(a, kind, rows) for kind, rows in kinds.items()]


def _longest_run(a: Analysis, kind: _AppendKind, rows: list[tuple[int, int]]) -> _Appends:
    """Find the run of most lengths, in order of time. Each is equal to the one before, or longer by
    the appended part."""
    runs: list[list[tuple[int, int]]] = [rows[:1]]
    for previous, (row, length) in pairwise(rows):
        if length - previous[1] not in (0, kind.appended):
            runs.append([])
        runs[-1].append((row, length))
    longest = max(runs, key=lambda run: (len({length for _, length in run}), len(run)))
    lengths = sorted({length for _, length in longest})
    calls = np.array([row for row, _ in longest], dtype=np.int64)
    slices = _find_slices(a, kind, calls, lengths[0]) if len(lengths) == 1 else []
    return _Appends(lengths, calls, np.array(slices, dtype=np.int64))


def _find_slices(a: Analysis, kind: _AppendKind, calls: Rows, length: int) -> list[int]:
    """Find the first readers of the results, if each takes all but the oldest entries of one."""
    full_length = length + kind.appended
    shape = (*kind.others[: kind.axis], full_length, *kind.others[kind.axis + 1 :])
    readers = []
    for row in calls.tolist():
        reader, name, x = next(readers_behind(a, row, shape), (0, "", None))
        taken_range = None if x is None else range_taken(name, x, kind.axis, full_length)
        if taken_range != (kind.appended, full_length):
            return []
        readers.append(reader)
    return readers


def _build_cache(
    lengths: Sequence[int], *, gpu: str | None = "A100", us: float = 400, dropped: int = 0
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)
    for _, length in zip(b.steps(len(lengths)), lengths, strict=False):
        for _ in range(4):
            b.compute("aten::linear", 300)
            lists = [[[8, 16, length, 64], [8, 16, 1, 64]], []]
            types = ["TensorList", "Scalar"]
            b.compute("aten::cat", us, lists, types, kernel="CatArrayBatchedCopy")
            if dropped:
                dims = [[8, 16, length + 1, 64], [], [], [], []]
                types = ["float", "Scalar", "Scalar", "Scalar", "Scalar"]
                b.on_host("aten::slice", 2, dims, types, concrete=["", "2", str(dropped), "", "1"])
    return b
