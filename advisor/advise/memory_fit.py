"""Fit of a program in a GPU's memory: the cheapest changes that make it fit. Bytes come from the
snapshot's history, times from the trace."""

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
from advisor.replay.selection import mask_launched_under

CUDA_CONTEXT_BYTES = 600 << 20
"""GPU memory of the CUDA context and libraries, bytes. The snapshot does not show it. 200 to 700
MiB were measured (github.com/pytorch/pytorch/issues/28113, 107667); 1 GiB before CUDA 11.7."""
DRIVER_SHARE = 0.022
"""Maximum share of the memory in an NVIDIA GPU's name that the driver keeps. totalGlobalMem in the
traces of tests/corpus is 97.8% (RTX 2080 Ti) to 99.2% (V100 32GB) of it."""
MARGIN_SHARE = 0.05
"""Share of the reserved bytes by which they may differ from an estimate. At the peak, the same
training reserved 4.4% in addition to its tensors in one recording
(tests/corpus/memory/h100_training), and 9.3% in the other (h100_leak)."""
MAX_CHANGES = 4
"""Maximum number of changes in a set."""
CHANGE_EFFORT = {
    "references": 0, "set_to_none": 0, "fused optimizer": 0, "share graph pools": 0,
    "16-bit weights": 1, "smaller logits": 1, "fused attention": 1, "autocast without cache": 1,
    "ZeRO 1": 1, "ZeRO 2": 1, "BF16 autocast": 2,
    "16-bit optimizer state": 2, "8-bit optimizer": 2, "checkpointing": 2, "ZeRO 3": 2,
    "half the batch": 3, "offload optimizer state": 4, "offload activations": 4,
}  # fmt: skip
"""Effort of a change, to order changes of equal or unknown time: 0 a line, 1 a dependency, 2 other
numbers, 3 another loop, 4 traffic over the link."""
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
MAX_BATCH_SCALE = 64.0
MODULE_RANGE = r"^nn\.Module: "
UNKNOWN_NS = 1e12
"""Placeholder for an unknown time, ns: more than any known time."""


class PhaseTimes(NamedTuple):
    """Time per step by phase, ns: device time without communication, and host time."""

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
    """Device time of the repeated forward pass, ns, or ``None`` if no trace shows it."""


class CostedChange(NamedTuple):
    """A change with the bytes that it frees and the time that it costs."""

    change: MemoryChange
    bytes: int
    """Bytes by which this change alone lowers the peak."""
    ns: float | None
    """Time added per step, ns, or ``None`` if unknown."""
    cost_reason: str
    """Description of what the time consists of."""
    layers: tuple[RepeatedLayer, ...] = ()
    """Repeated calls, if the change is checkpointing."""


class MemoryFit(NamedTuple):
    """Memory needed on one device, bytes, and the changes that make the program fit."""

    peak: int
    """Peak of bytes in tensors, with the requested batch."""
    reserved: int
    """Bytes that the allocator reserves for the peak."""
    capacity: int
    available: int
    """Bytes of the capacity that the allocator can use."""
    candidates: list[CostedChange]
    """All changes found, the cheapest first."""
    chosen: list[CostedChange]
    """Cheapest set of changes that fits. Empty if no change is needed, or if no set fits."""
    reserved_after: int
    """Bytes reserved with the chosen changes, or with the best set if none fits."""
    largest_batch: float
    """Ratio of the largest batch that fits with the chosen changes and a margin to the recorded
    batch. If the batch is halved, one half counts. 0 if no batch fits."""
    phases: PhaseTimes | None
    """Times by phase, or ``None`` without a trace."""
    trains: bool | None = None
    """Whether the program trains, or ``None`` if unknown."""

    @property
    def fits(self) -> bool:
        """Whether the program fits as it is, or with the chosen changes."""
        return self.reserved_after <= self.available

    @property
    def barely(self) -> bool:
        """Whether the program fits with less than the margin that fragmentation may take."""
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
    number of ranks that can share the states. ``scale``: requested batch over the recorded one.
    ``driver_share``: share of the capacity that the driver keeps. The reserved bytes beyond tensors
    keep their share of the recorded peak, or are 0 if the peak is not recorded. A set that leaves a
    margin of MARGIN_SHARE is preferred to one that does not."""
    phases = None if a is None else phase_times(a)
    ratio = max(1.0, peak.reserved / max(1, peak.allocated))
    available = round(capacity * (1 - driver_share)) - CUDA_CONTEXT_BYTES
    safe = available / (1 + MARGIN_SHARE)
    needed_now = count_needed_bytes(peak, scale=scale)
    changes = [change for change in find_changes(peak) if is_new(change.name, a)]
    changes += shard_changes(peak, ranks) if ranks > 1 else []
    options = []
    for change in changes:
        freed = needed_now - count_needed_bytes(peak, [change], scale)
        ns, why = _estimate_cost(change, peak, phases, gpu, ranks, scale)
        layers = _list_layers(change, peak, a)
        if layers and all(layer.ns is not None for layer in layers):
            ns = sum(layer.ns or 0.0 for layer in layers)
        options.append(CostedChange(change, freed, ns, why, layers))
    options.sort(key=lambda option: (_rank_cost([option]), -option.bytes))

    def reserved(subset: Sequence[CostedChange]) -> int:
        return round(count_needed_bytes(peak, [option.change for option in subset], scale) * ratio)

    chosen: list[CostedChange] = []
    after = reserved([])
    if after > safe:
        sets = [
            (subset, reserved(subset)) for subset in sorted(_list_sets(options), key=_rank_cost)
        ]
        room = next(
            (
                limit
                for limit in (safe, available)
                if any(size <= limit for _, size in sets) or after <= limit
            ),
            None,
        )
        if room is None:
            after = min([after, *(size for _, size in sets)])
        elif after > room:
            subset = next(subset for subset, size in sets if size <= room)
            chosen = [_checkpoint_fewest_calls(option, subset, reserved, room) for option in subset]
            after = reserved(chosen)
    largest = 0.0
    if after <= available:
        halved = any(option.change.name == "half the batch" for option in chosen)
        largest = _find_max_batch(peak, chosen, min(safe, available) / ratio) * (
            0.5 if halved else 1.0
        )
    return MemoryFit(
        needed_now, round(needed_now * ratio), capacity, available, options, chosen,
        after, largest, phases, does_train(a, peak),
    )  # fmt: skip


def _rank_cost(changes: Sequence[CostedChange]) -> tuple[float, int, int]:
    times = [UNKNOWN_NS if change.ns is None else change.ns for change in changes]
    effort = sum(4 ** CHANGE_EFFORT[change.change.name] for change in changes)
    return (round(sum(times), -3), effort, len(changes))


def _list_sets(changes: list[CostedChange]) -> list[tuple[CostedChange, ...]]:
    """Return the sets of changes that can be made together."""
    sets = []
    for count in range(1, MAX_CHANGES + 1):
        for change_set in combinations(changes, count):
            groups = [change.change.group for change in change_set if change.change.group]
            if len(set(groups)) == len(groups):
                sets.append(change_set)
    return sets


def _checkpoint_fewest_calls(
    option: CostedChange,
    changes: Sequence[CostedChange],
    reserved: Callable[[Sequence[CostedChange]], int],
    available: float,
) -> CostedChange:
    """Return the change with the fewest checkpointed calls that fit, or unchanged."""
    if option.change.forward_call is None:
        return option
    low, high = 0, int(option.change.forward_call.max()) + 1
    calls = high

    def limit_calls(count: int) -> CostedChange:
        share = count / calls
        assumes = f"{count} of {calls} calls keep their output alone"
        times = [layer.ns for layer in option.layers[:count] if layer.ns is not None]
        scaled_ns = None if option.ns is None else option.ns * share
        return option._replace(
            change=option.change.for_calls(count)._replace(assumes=assumes),
            ns=sum(times) if len(times) == count else scaled_ns,
            bytes=round(option.bytes * share),
        )

    while high - low > 1:
        middle = (low + high) // 2
        tried = [limit_calls(middle) if change is option else change for change in changes]
        low, high = (low, middle) if reserved(tried) <= available else (middle, high)
    return limit_calls(high)


def _find_max_batch(peak: PeakMemory, chosen: Sequence[CostedChange], room: float) -> float:
    """Return the largest batch that fits in ``room`` bytes, over the recorded one."""
    changes = [change.change for change in chosen]
    low, high = 0.0, MAX_BATCH_SCALE
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if count_needed_bytes(peak, changes, middle) <= room else (low, middle)
        )
    return low


# -- time -----------------------------------------------------------------------------------------


def phase_times(a: Analysis) -> PhaseTimes | None:
    """Return the times by phase of the analysed steps, or ``None`` if there is no device work."""
    if a.trace.gpu.is_empty() or a.device_id is None:
        return None
    dur = a.trace.gpu["dur"].to_numpy()
    compute = a.in_window & ~a.kernels["communication"].fill_null(False).to_numpy()
    optimizer = mask_launched_under(a, r"^Optimizer\.step") & compute
    backward = mask_launched_under(a, BACKWARD) & compute & ~optimizer
    forward = compute & ~optimizer & ~backward
    waits = pl.col("class").cast(pl.String).is_in(["sync", "drain", "unrecorded", "loader"])
    threads = a.host.filter(~waits).group_by("thread").agg(pl.col("ns").sum())["ns"].to_list()
    busiest = max(threads, default=0)
    phase_ns = [float(dur[rows].sum()) / a.step_count for rows in (forward, backward, optimizer)]
    return PhaseTimes(phase_ns[0], phase_ns[1], phase_ns[2], busiest / a.step_count, a.step_ns)


def _list_layers(
    change: MemoryChange, peak: PeakMemory, a: Analysis | None
) -> tuple[RepeatedLayer, ...]:
    """Return the bytes that each call of a checkpointed line holds, and its duration."""
    if change.forward_call is None:
        return ()
    calls = int(change.forward_call.max()) + 1
    is_held = peak.history.block_lifetimes.at(peak.event)[change.rows]
    rows, first_index = np.unique(change.rows[is_held], return_index=True)
    call_bytes = np.bincount(
        change.forward_call[is_held][first_index],
        weights=peak.history.block_lifetimes.size[rows],
        minlength=calls,
    )
    times = None if a is None else module_times(a, calls)
    return tuple(
        RepeatedLayer(int(size), None if times is None else times[n])
        for n, size in enumerate(call_bytes)
    )


def module_times(a: Analysis, calls: int) -> list[float] | None:
    """Return the device time per step, ns, of each of ``calls`` modules of one class, called in a
    row in the forward pass. Of several matching classes, take the one with most time. One more call
    is allowed, as the last layer's backward pass begins at once. ``None`` if the trace has no
    modules, or if none is called so often."""
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    is_module = (cpu["kind"] == "python").to_numpy() & name_matches(
        cpu["name"], MODULE_RANGE
    ).to_numpy()
    if not is_module.any() or a.device_id is None:
        return None
    rows = np.flatnonzero(is_module)
    parents = np.append(innermost_ancestor(parent, is_module), -1)[parent[rows]]
    table = pl.DataFrame({"row": rows, "outer": parents}).with_columns(
        name=cpu["name"].gather(rows).cast(pl.String).str.replace(r"_\d+$", ""),
        ts=cpu["ts"].gather(rows),
    )
    is_count_right = (pl.len().over("outer", "name") - calls).is_between(0, 1)
    table = table.filter((pl.col("outer") >= 0) & is_count_right).sort("ts")
    is_wanted = np.zeros(cpu.height, dtype=np.bool_)
    is_wanted[table["row"].to_numpy()] = True
    compute = a.in_window & ~a.kernels["communication"].fill_null(False).to_numpy()
    compute &= a.trace.gpu["launch"].is_not_null().to_numpy()
    launch = a.trace.gpu["launch"].to_numpy()[compute].astype(np.int64)
    module_rows = innermost_ancestor(parent, is_wanted)[launch]
    ns = np.bincount(
        module_rows[module_rows >= 0],
        weights=a.trace.gpu["dur"].to_numpy()[compute][module_rows >= 0],
        minlength=cpu.height,
    )
    table = table.with_columns(
        ns=pl.Series(ns[table["row"].to_numpy()]),
        place=pl.int_range(pl.len()).over("outer", "name"),
    )
    by_name = table.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name", descending=True)
    if by_name.is_empty() or not by_name["ns"][0]:
        return None
    class_rows = table.filter((pl.col("name") == by_name["name"][0]) & (pl.col("place") < calls))
    sums = class_rows.group_by("place").agg(pl.col("ns").sum()).sort("place")["ns"]
    return [float(total) / a.step_count for total in sums]


def _estimate_cost(
    change: MemoryChange, peak: PeakMemory, phases: PhaseTimes | None, gpu: GpuSpec | None,
    ranks: int, scale: float,
) -> tuple[float | None, str]:  # fmt: skip
    """Return the time added per step, ns (``None`` if unknown), and what it consists of."""
    lives = peak.history.block_lifetimes
    held_rows = change.rows[lives.at(peak.event)[change.rows]]
    held_bytes = int(lives.size[np.unique(held_rows)].sum())
    link = None if gpu is None else host_rate(gpu)
    if change.name == "checkpointing":
        if phases is None:
            return None, "the forward pass of these calls again: needs a trace"
        return phases.forward, "the forward pass again"
    if change.name == "offload activations":
        if link is None or phases is None:
            return None, "copies to the host and back: needs a trace and the GPU"
        moved = held_bytes * scale / link * 1e9
        exposed = max(0.0, moved - phases.forward) + max(0.0, moved - phases.backward)
        return exposed, f"{t.format_bytes(held_bytes * scale)} each way, minus what compute hides"
    if change.name == "offload optimizer state":
        moved = peak.by_category.get("weights", 0) * 2
        if link is None:
            return None, "gradients to the host and weights back: needs the GPU"
        return (
            moved / link * 1e9,
            f"{t.format_bytes(moved)} over the link; the host's update is more",
        )
    if change.name == "half the batch":
        if phases is None:
            return None, "twice the launches: needs a trace"
        extra_ns = max(0.0, 2 * phases.host - max(phases.step, phases.host))
        if gpu is not None:
            extra_ns += 3 * peak.by_category.get("gradients", 0) / memory_rate(gpu) * 1e9
        gradient_note = ", gradients added up" if phases.backward else ""
        return extra_ns, f"two passes of half the batch: twice the launches{gradient_note}"
    if change.name == "autocast without cache":
        if gpu is None:
            return None, "each copy made once more in each pass: needs the GPU"
        return 2 * 3 * held_bytes / memory_rate(gpu) * 1e9, "each copy made once more in each pass"
    if change.name == "ZeRO 3":
        rate = None if gpu is None else peer_rate(gpu)
        if rate is None:
            return None, "weights gathered once more: needs the GPU"
        moved = peak.by_category.get("weights", 0) * (ranks - 1) / ranks
        return moved / rate * 1e9, "weights gathered once more, if nothing hides it"
    return 0.0, CHANGE_EXPLANATIONS.get(change.name, "no work is added")
