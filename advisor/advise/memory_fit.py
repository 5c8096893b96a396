"""Fit of a program in a GPU's memory: the cheapest changes that make it fit, in bytes by the
snapshot's history, in time by the trace."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.advise.memory import does_train, is_new
from advisor.core import text as t
from advisor.core.gpus import GpuSpec
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import BACKWARD, innermost_ancestor, parent_rows
from advisor.measure.memory.memory_savings import (
    MemoryChange,
    count_needed_bytes,
    find_changes,
    shard_changes,
)
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.replay.project.device_scaling import host_rate, memory_rate, peer_rate
from advisor.replay.selection import rows_launched_under

CUDA_CONTEXT_BYTES = 600 << 20
"""GPU memory of the CUDA context and libraries, bytes; the snapshot does not show it. 200 to 700
MiB were measured (github.com/pytorch/pytorch/issues/28113, 107667); 1 GiB before CUDA 11.7."""
DRIVER_SHARE = 0.022
"""Share of the memory in an NVIDIA GPU's name that the driver keeps, at most: totalGlobalMem of the
traces in tests/corpus is 97.8% (RTX 2080 Ti) to 99.2% (V100 32GB) of it."""
MARGIN_SHARE = 0.05
"""Share of the reserved bytes by which they may differ from an estimate: the same training had 4.4%
beside its tensors at the peak of one recording (tests/corpus/memory/h100_training), 9.3% in the
other (h100_leak)."""
MAX_CHANGES = 4
"""Largest number of changes in a set."""
CHANGE_EFFORT = {
    "references": 0, "set_to_none": 0, "fused optimizer": 0, "share graph pools": 0,
    "16-bit weights": 1, "smaller logits": 1, "fused attention": 1, "autocast without cache": 1,
    "ZeRO 1": 1, "ZeRO 2": 1, "BF16 autocast": 2,
    "16-bit optimizer state": 2, "8-bit optimizer": 2, "checkpointing": 2, "ZeRO 3": 2,
    "half the batch": 3, "offload optimizer state": 4, "offload activations": 4,
}  # fmt: skip
"""Effort of a change, to order those of equal or unknown time: a line, a dependency, other numbers,
another loop, the link."""
CHANGE_EXPLANATIONS = {
    "8-bit optimizer": "less is read and written; other numbers, so compare the loss",
    "16-bit optimizer state": "less is read and written; other numbers, so compare the loss",
    "BF16 autocast": "products take less time; other numbers, so compare the loss",
    "16-bit weights": "less is read; other numbers, so compare the results",
    "smaller logits": "the same work in pieces",
    "fused attention": "less is read and written",
    "ZeRO 1": "as much traffic as the all-reduce that it replaces",
    "ZeRO 2": "as much traffic as the all-reduce that it replaces",
}
LARGEST_SCALE = 64.0
MODULE_RANGE = r"^nn\.Module: "
UNKNOWN_NS = 1e12
"""Time that stands for an unknown one, ns: more than any known time."""


class PhaseTimes(NamedTuple):
    """Time per step by phase, ns: on the device without communication, and on the host."""

    forward: float
    backward: float
    optimizer: float
    host: float
    """Host time of the busiest thread, without its waits."""
    step: float


class RepeatedLayer(NamedTuple):
    """A call that checkpointing repeats, in order of the forward pass."""

    bytes: int
    """Bytes that the call holds at the peak, without its output."""
    ns: float | None
    """Device time of its forward pass, which is repeated, ns; ``None``: no trace shows it."""


class CostedChange(NamedTuple):
    """A change, the bytes that it frees and the time that it costs."""

    change: MemoryChange
    bytes: int
    """Bytes by which this change alone lowers the peak."""
    ns: float | None
    """Time added per step, ns; ``None``: unknown."""
    cost_reason: str
    """Description of what the time consists of."""
    layers: tuple[RepeatedLayer, ...] = ()
    """Repeated calls, if the change is checkpointing."""


class MemoryFit(NamedTuple):
    """Memory needed on one device, bytes, and the changes that make it fit."""

    peak: int
    """Largest number of bytes in tensors, with the requested batch."""
    reserved: int
    """Bytes that the allocator reserves for that."""
    capacity: int
    available: int
    """Bytes of the capacity that the allocator can use."""
    candidates: list[CostedChange]
    """All changes that were found, the cheapest first."""
    chosen: list[CostedChange]
    """Cheapest set of changes that fits; empty: none is needed, or none fits."""
    reserved_after: int
    """Bytes reserved with the chosen changes; if no set fits, with the best one."""
    largest_batch: float
    """Largest batch at once that fits with the chosen changes and a margin, over the recorded one.
    Where the batch is halved, that is one of its halves. 0: none."""
    phases: PhaseTimes | None
    """Times by phase; ``None``: no trace."""
    trains: bool | None = None
    """Whether the program trains; ``None``: unknown."""

    @property
    def fits(self) -> bool:
        """Whether the program fits as it is, or with the chosen changes."""
        return self.reserved_after <= self.available

    @property
    def barely(self) -> bool:
        """Whether it fits with less than the margin that fragmentation may take."""
        return self.fits and self.reserved_after * (1 + MARGIN_SHARE) > self.available


def find_fit(
    peak: PeakMemory,
    a: Analysis | None,
    capacity: int,
    *,
    gpu: GpuSpec | None = None,
    ranks: int = 1,
    scale: float = 1.0,
    driver_share: float = 0.0,
) -> MemoryFit:
    """Find the cheapest changes with which a device's history fits.

    ``a``: trace of the same program, for the time of changes. ``gpu``: GPU to run on. ``ranks``:
    number that can share the states. ``scale``: requested batch over the recorded one.
    ``driver_share``: share of the capacity that the driver keeps. The reserved bytes beyond tensors
    stay the same share as at the recorded peak (none, if that is not recorded). A set that leaves a
    margin of MARGIN_SHARE is taken before one that does not."""
    phases = None if a is None else phase_times(a)
    beside = max(1.0, peak.reserved / max(1, peak.allocated))
    available = round(capacity * (1 - driver_share)) - CUDA_CONTEXT_BYTES
    safe = available / (1 + MARGIN_SHARE)
    today = count_needed_bytes(peak, scale=scale)
    options = [each for each in find_changes(peak) if is_new(each.name, a)]
    options += shard_changes(peak, ranks) if ranks > 1 else []
    ways = []
    for each in options:
        freed = today - count_needed_bytes(peak, [each], scale)
        ns, why = _price(each, peak, phases, gpu, ranks, scale)
        layers = _layers(each, peak, a)
        if layers and all(layer.ns is not None for layer in layers):
            ns = sum(layer.ns or 0.0 for layer in layers)
        ways.append(CostedChange(each, freed, ns, why, layers))
    ways.sort(key=lambda way: (_cost([way]), -way.bytes))

    def reserved(made: Sequence[CostedChange]) -> int:
        return round(count_needed_bytes(peak, [way.change for way in made], scale) * beside)

    chosen: list[CostedChange] = []
    after = reserved([])
    if after > safe:
        sets = [(made, reserved(made)) for made in sorted(_sets(ways), key=_cost)]
        room = next(
            (
                limit
                for limit in (safe, available)
                if any(left <= limit for _, left in sets) or after <= limit
            ),
            None,
        )
        if room is None:
            after = min([after, *(left for _, left in sets)])
        elif after > room:
            made = next(made for made, left in sets if left <= room)
            chosen = [_checkpoint_fewest_calls(way, made, reserved, room) for way in made]
            after = reserved(chosen)
    largest = 0.0
    if after <= available:
        halved = any(way.change.name == "half the batch" for way in chosen)
        largest = _largest(peak, chosen, min(safe, available) / beside) * (0.5 if halved else 1.0)
    return MemoryFit(today, round(today * beside), capacity, available, ways, chosen, after,
                     largest, phases, does_train(a, peak))  # fmt: skip


def _cost(made: Sequence[CostedChange]) -> tuple[float, int, int]:
    known = [UNKNOWN_NS if way.ns is None else way.ns for way in made]
    effort = sum(4 ** CHANGE_EFFORT[way.change.name] for way in made)
    return (round(sum(known), -3), effort, len(made))


def _sets(ways: list[CostedChange]) -> list[tuple[CostedChange, ...]]:
    """Return the sets of changes that can be combined."""
    made = []
    for count in range(1, MAX_CHANGES + 1):
        for each in combinations(ways, count):
            groups = [way.change.group for way in each if way.change.group]
            if len(set(groups)) == len(groups):
                made.append(each)
    return made


def _checkpoint_fewest_calls(
    way: CostedChange,
    made: Sequence[CostedChange],
    reserved: Callable[[Sequence[CostedChange]], int],
    available: float,
) -> CostedChange:
    """Return the change with as few checkpointed calls as fit; other changes stay as they are."""
    if way.change.forward_call is None:
        return way
    low, high = 0, int(way.change.forward_call.max()) + 1
    calls = high

    def partly(count: int) -> CostedChange:
        share = count / calls
        assumes = f"{count} of {calls} calls keep their output alone"
        times = [layer.ns for layer in way.layers[:count] if layer.ns is not None]
        again = None if way.ns is None else way.ns * share
        return way._replace(
            change=way.change.for_calls(count)._replace(assumes=assumes),
            ns=sum(times) if len(times) == count else again,
            bytes=round(way.bytes * share),
        )

    while high - low > 1:
        middle = (low + high) // 2
        others = [partly(middle) if each is way else each for each in made]
        low, high = (low, middle) if reserved(others) <= available else (middle, high)
    return partly(high)


def _largest(peak: PeakMemory, chosen: Sequence[CostedChange], room: float) -> float:
    """Return the largest batch that fits ``room`` bytes with the changes, over the recorded one."""
    made = [way.change for way in chosen]
    low, high = 0.0, LARGEST_SCALE
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if count_needed_bytes(peak, made, middle) <= room else (low, middle)
        )
    return low


# -- time -----------------------------------------------------------------------------------------


def phase_times(a: Analysis) -> PhaseTimes | None:
    """Return the times by phase of the analysed steps; ``None`` if there is no device work."""
    if a.trace.gpu.is_empty() or a.device_id is None:
        return None
    dur = a.trace.gpu["dur"].to_numpy()
    compute = a.in_window & ~a.kernels["communication"].fill_null(False).to_numpy()
    optimizer = rows_launched_under(a, r"^Optimizer\.step") & compute
    backward = rows_launched_under(a, BACKWARD) & compute & ~optimizer
    rest = compute & ~optimizer & ~backward
    waits = pl.col("class").cast(pl.String).is_in(["sync", "drain", "unrecorded", "loader"])
    threads = a.host.filter(~waits).group_by("thread").agg(pl.col("ns").sum())["ns"].to_list()
    busiest = max(threads, default=0)
    per = [float(dur[rows].sum()) / a.step_count for rows in (rest, backward, optimizer)]
    return PhaseTimes(per[0], per[1], per[2], busiest / a.step_count, a.step_ns)


def _layers(each: MemoryChange, peak: PeakMemory, a: Analysis | None) -> tuple[RepeatedLayer, ...]:
    """Return what each call of a checkpointed line holds, and how long it runs."""
    if each.forward_call is None:
        return ()
    calls = int(each.forward_call.max()) + 1
    here = peak.history.block_lifetimes.at(peak.event)[each.rows]
    rows, first = np.unique(each.rows[here], return_index=True)
    held = np.bincount(
        each.forward_call[here][first],
        weights=peak.history.block_lifetimes.size[rows],
        minlength=calls,
    )
    times = None if a is None else module_times(a, calls)
    return tuple(
        RepeatedLayer(int(size), None if times is None else times[n]) for n, size in enumerate(held)
    )


def module_times(a: Analysis, calls: int) -> list[float] | None:
    """Return the device time per step, ns, of each of ``calls`` modules of one class, called in a
    row in the forward pass. Of several such classes, the one with most time counts. One call more
    is allowed: the last layer's backward pass begins at once. ``None`` if the trace has no modules,
    or none is called so often."""
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    module = (cpu["kind"] == "python").to_numpy() & name_matches(
        cpu["name"], MODULE_RANGE
    ).to_numpy()
    if not module.any() or a.device_id is None:
        return None
    rows = np.flatnonzero(module)
    outer = np.append(innermost_ancestor(parent, module), -1)[parent[rows]]
    table = pl.DataFrame({"row": rows, "outer": outer}).with_columns(
        name=cpu["name"].gather(rows).cast(pl.String).str.replace(r"_\d+$", ""),
        ts=cpu["ts"].gather(rows),
    )
    called = (pl.len().over("outer", "name") - calls).is_between(0, 1)
    table = table.filter((pl.col("outer") >= 0) & called).sort("ts")
    wanted = np.zeros(cpu.height, dtype=np.bool_)
    wanted[table["row"].to_numpy()] = True
    compute = a.in_window & ~a.kernels["communication"].fill_null(False).to_numpy()
    compute &= a.trace.gpu["launch"].is_not_null().to_numpy()
    launch = a.trace.gpu["launch"].to_numpy()[compute].astype(np.int64)
    under = innermost_ancestor(parent, wanted)[launch]
    ns = np.bincount(under[under >= 0], weights=a.trace.gpu["dur"].to_numpy()[compute][under >= 0],
                     minlength=cpu.height)  # fmt: skip
    table = table.with_columns(
        ns=pl.Series(ns[table["row"].to_numpy()]),
        place=pl.int_range(pl.len()).over("outer", "name"),
    )
    by_name = table.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name", descending=True)
    if by_name.is_empty() or not by_name["ns"][0]:
        return None
    own = table.filter((pl.col("name") == by_name["name"][0]) & (pl.col("place") < calls))
    sums = own.group_by("place").agg(pl.col("ns").sum()).sort("place")["ns"]
    return [float(total) / a.step_count for total in sums]


def _price(
    each: MemoryChange, peak: PeakMemory, phases: PhaseTimes | None, gpu: GpuSpec | None,
    ranks: int, scale: float,
) -> tuple[float | None, str]:  # fmt: skip
    """Return the time added per step, ns (``None``: unknown), and what it consists of."""
    lives = peak.history.block_lifetimes
    here = each.rows[lives.at(peak.event)[each.rows]]
    held = int(lives.size[np.unique(here)].sum())
    link = None if gpu is None else host_rate(gpu)
    if each.name == "checkpointing":
        if phases is None:
            return None, "the forward pass of these calls again: needs a trace"
        return phases.forward, "the forward pass again"
    if each.name == "offload activations":
        if link is None or phases is None:
            return None, "copies to the host and back: needs a trace and the GPU"
        moved = held * scale / link * 1e9
        shown = max(0.0, moved - phases.forward) + max(0.0, moved - phases.backward)
        return shown, f"{t.format_bytes(held * scale)} each way, less what compute hides"
    if each.name == "offload optimizer state":
        moved = peak.by_category.get("weights", 0) * 2
        if link is None:
            return None, "gradients to the host and weights back: needs the GPU"
        return (
            moved / link * 1e9,
            f"{t.format_bytes(moved)} over the link; the host's update is more",
        )
    if each.name == "half the batch":
        if phases is None:
            return None, "twice the launches: needs a trace"
        more = max(0.0, 2 * phases.host - max(phases.step, phases.host))
        if gpu is not None:
            more += 3 * peak.by_category.get("gradients", 0) / memory_rate(gpu) * 1e9
        added = ", gradients added up" if phases.backward else ""
        return more, f"two passes of half the batch: twice the launches{added}"
    if each.name == "autocast without cache":
        if gpu is None:
            return None, "each copy made once more in each pass: needs the GPU"
        return 2 * 3 * held / memory_rate(gpu) * 1e9, "each copy made once more in each pass"
    if each.name == "ZeRO 3":
        rate = None if gpu is None else peer_rate(gpu)
        if rate is None:
            return None, "weights gathered once more: needs the GPU"
        moved = peak.by_category.get("weights", 0) * (ranks - 1) / ranks
        return moved / rate * 1e9, "weights gathered once more, if nothing hides it"
    return 0.0, CHANGE_EXPLANATIONS.get(each.name, "no work is added")
