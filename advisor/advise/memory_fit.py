"""Whether a program fits a GPU's memory, and the cheapest changes that make it fit: in bytes by the
snapshot's history, in time by the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.gpus import GpuSpec
from advisor.measure import Analysis
from advisor.measure.host.stacks import BACKWARD
from advisor.measure.memory.memory_savings import Change, changes, needed, sharded
from advisor.measure.memory.post_mortem import PostMortem
from advisor.replay.project.rates import host_rate, memory_rate, peer_rate
from advisor.rules.kernel.facts import launched_under

OUTSIDE = 600 << 20
"""Bytes of the GPU that the CUDA context and libraries take and the snapshot does not show."""
MAX_CHANGES = 4
"""Of a set that is looked for."""
EFFORT = {
    "references": 0, "set_to_none": 0, "fused optimizer": 0, "share graph pools": 0,
    "16-bit weights": 1, "smaller logits": 1, "autocast without cache": 1, "ZeRO 1": 1, "ZeRO 2": 1,
    "16-bit optimizer state": 2, "8-bit optimizer": 2, "checkpointing": 2, "ZeRO 3": 2,
    "batch": 3, "offload optimizer state": 4, "offload activations": 4,
}  # fmt: skip
"""Of a change, where two cost the same time or none is known: a line, a dependency, other numbers,
another loop, the link."""
WHY = {
    "8-bit optimizer": "less is read and written; other numbers, so compare the loss",
    "16-bit optimizer state": "less is read and written; other numbers, so compare the loss",
    "16-bit weights": "less is read; other numbers, so compare the results",
    "smaller logits": "the same work in pieces",
    "ZeRO 1": "as much traffic as the all-reduce that it replaces",
    "ZeRO 2": "as much traffic as the all-reduce that it replaces",
}
LARGEST_SCALE = 64.0
UNKNOWN_NS = 1e12
"""What an unknown time counts as: more than any that is known."""


class PhaseTimes(NamedTuple):
    """Device time per step, ns, without communication; and the host's."""

    forward: float
    backward: float
    optimizer: float
    host: float
    """Of the busiest thread, without its waits."""
    step: float


class Way(NamedTuple):
    """A change with its price."""

    change: Change
    bytes: int
    """By which it alone lowers the highest point."""
    ns: float | None
    """Added per step; ``None``: unknown."""
    why: str
    """What the time is made of."""


class Fit(NamedTuple):
    """Bytes of one device."""

    peak: int
    """Most in tensors, with the batch that was asked for."""
    reserved: int
    """What the allocator reserves for that."""
    capacity: int
    available: int
    """Of the capacity, what the allocator can have."""
    ways: list[Way]
    """All that were found, the cheapest first."""
    chosen: list[Way]
    """The cheapest set that fits; empty: none is needed, or none does."""
    after: int
    """Reserved with the chosen ones; without any that fits, with the best set."""
    largest_batch: float
    """Times today's batch that fit with the chosen ones; 0: none."""
    phases: PhaseTimes | None
    """``None``: no trace."""

    @property
    def fits(self) -> bool:
        """As it is, or with the chosen changes."""
        return self.after <= self.available


def fit(
    post: PostMortem,
    a: Analysis | None,
    capacity: int,
    *,
    gpu: GpuSpec | None = None,
    ranks: int = 1,
    scale: float = 1.0,
) -> Fit:
    """Look for the cheapest changes with which a device's history fits.

    ``a``: a trace of the same program, which prices time. ``gpu``: where it will run. ``ranks``:
    that can share the states. ``scale``: the batch that is asked for over the recorded one. What is
    reserved beyond tensors stays the same share as at the recorded peak (none, where that is not
    recorded).
    """
    phases = None if a is None else phase_times(a)
    beside = max(1.0, post.reserved / max(1, post.allocated))
    available = capacity - OUTSIDE
    today = needed(post, scale=scale)
    options = [*changes(post), *(sharded(post, ranks) if ranks > 1 else [])]
    ways = []
    for each in options:
        freed = today - needed(post, [each], scale)
        ns, why = _price(each, post, phases, gpu, ranks, scale)
        ways.append(Way(each, freed, ns, why))
    ways.sort(key=lambda way: (_cost([way]), -way.bytes))

    def reserved(made: Sequence[Way]) -> int:
        return round(needed(post, [way.change for way in made], scale) * beside)

    chosen: list[Way] = []
    after = best = reserved([])
    if after > available:
        for made in sorted(_sets(ways), key=_cost):
            after = reserved(made)
            if after <= available:
                chosen = [_fewest(way, made, reserved, available) for way in made]
                after = reserved(chosen)
                break
            best = min(best, after)
        else:
            after = best
    largest = 0.0
    if after <= available:
        largest = _largest(post, chosen, available / beside)
    return Fit(today, round(today * beside), capacity, available, ways, chosen, after, largest,
               phases)  # fmt: skip


def _cost(made: Sequence[Way]) -> tuple[float, int, int]:
    known = [UNKNOWN_NS if way.ns is None else way.ns for way in made]
    effort = sum(4 ** EFFORT[way.change.change] for way in made)
    return (round(sum(known), -3), effort, len(made))


def _sets(ways: list[Way]) -> list[tuple[Way, ...]]:
    """Sets of changes that go together."""
    made = []
    for count in range(1, MAX_CHANGES + 1):
        for each in combinations(ways, count):
            groups = [way.change.group for way in each if way.change.group]
            if len(set(groups)) == len(groups):
                made.append(each)
    return made


def _fewest(
    way: Way, made: Sequence[Way], reserved: Callable[[Sequence[Way]], int], available: int
) -> Way:
    """Checkpointing of as few calls as suffice."""
    if way.change.part is None:
        return way
    low, high = 0, int(way.change.part.max()) + 1
    calls = high

    def partly(count: int) -> Way:
        share = count / calls
        assumes = f"{count} of {calls} calls keep their output alone"
        return way._replace(
            change=way.change.of_parts(count)._replace(assumes=assumes),
            ns=None if way.ns is None else way.ns * share,
            bytes=round(way.bytes * share),
        )

    while high - low > 1:
        middle = (low + high) // 2
        others = [partly(middle) if each is way else each for each in made]
        low, high = (low, middle) if reserved(others) <= available else (middle, high)
    return partly(high)


def _largest(post: PostMortem, chosen: Sequence[Way], room: float) -> float:
    """Times the recorded batch."""
    made = [way.change for way in chosen]
    low, high = 0.0, LARGEST_SCALE
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if needed(post, made, middle) <= room else (low, middle)
    return low


# -- time -----------------------------------------------------------------------------------------


def phase_times(a: Analysis) -> PhaseTimes | None:
    """Of the analysed steps; ``None``: no device work."""
    if a.trace.gpu.is_empty() or a.device_id is None:
        return None
    dur = a.trace.gpu["dur"].to_numpy()
    compute = a.in_window & ~a.kernels["communication"].fill_null(False).to_numpy()
    optimizer = launched_under(a, r"^Optimizer\.step") & compute
    backward = launched_under(a, BACKWARD) & compute & ~optimizer
    rest = compute & ~optimizer & ~backward
    waits = pl.col("class").cast(pl.String).is_in(["sync", "unrecorded", "loader"])
    threads = a.host.filter(~waits).group_by("thread").agg(pl.col("ns").sum())["ns"].to_list()
    busiest = max(threads, default=0)
    per = [float(dur[rows].sum()) / a.step_count for rows in (rest, backward, optimizer)]
    return PhaseTimes(per[0], per[1], per[2], busiest / a.step_count, a.step_ns)


def _price(
    each: Change, post: PostMortem, phases: PhaseTimes | None, gpu: GpuSpec | None, ranks: int,
    scale: float,
) -> tuple[float | None, str]:  # fmt: skip
    """Nanoseconds added per step, and what they are made of."""
    lives = post.history.lives
    here = each.rows[lives.at(post.moment)[each.rows]]
    held = int(lives.size[np.unique(here)].sum())
    link = None if gpu is None else host_rate(gpu)
    if each.change == "checkpointing":
        if phases is None:
            return None, "the forward pass of these calls again: needs a trace"
        return phases.forward, "the forward pass again"
    if each.change == "offload activations":
        if link is None or phases is None:
            return None, "copies to the host and back: needs a trace and the GPU"
        moved = held * scale / link * 1e9
        shown = max(0.0, moved - phases.forward) + max(0.0, moved - phases.backward)
        return shown, f"{t.format_bytes(held * scale)} each way, less what compute hides"
    if each.change == "offload optimizer state":
        moved = post.by_category.get("weights", 0) * 2
        if link is None:
            return None, "gradients to the host and weights back: needs the GPU"
        return (
            moved / link * 1e9,
            f"{t.format_bytes(moved)} over the link; the host's update is more",
        )
    if each.change == "batch":
        if phases is None:
            return None, "twice the launches: needs a trace"
        more = max(0.0, 2 * phases.host - max(phases.step, phases.host))
        if gpu is not None:
            more += 3 * post.by_category.get("gradients", 0) / memory_rate(gpu) * 1e9
        return more, "two passes of half the batch: launches twice, gradients added up"
    if each.change == "autocast without cache":
        if gpu is None:
            return None, "each copy made once more in each pass: needs the GPU"
        return 2 * 3 * held / memory_rate(gpu) * 1e9, "each copy made once more in each pass"
    if each.change == "ZeRO 3":
        rate = None if gpu is None else peer_rate(gpu)
        if rate is None:
            return None, "weights gathered once more: needs the GPU"
        moved = post.by_category.get("weights", 0) * (ranks - 1) / ranks
        return moved / rate * 1e9, "weights gathered once more, if nothing hides it"
    return 0.0, WHY.get(each.change, "no work is added")
