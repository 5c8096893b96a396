"""Estimates of the memory that changes to a program would free. A change names the blocks that it
affects, and the history is summed again without them. So it frees no more than it lowers the peak,
wherever that is afterwards, and changes can be combined."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Bools, Ints
from advisor.core.snapshot import SnapshotFrame, Stack
from advisor.core.text import format_bytes
from advisor.measure.memory.allocator_replay import measure_repacking
from advisor.measure.memory.memory_history import PHASES
from advisor.measure.memory.memory_kinds import CATEGORIES
from advisor.measure.memory.memory_origin import CALLS, MODULE, AllocationOrigin, frame_owner
from advisor.measure.memory.peak_memory import PeakMemory, cached_measurement

MIN_SAVING_SHARE = 0.05
"""Share of the peak below which a saving is not reported."""
LOSS_CHUNKS = 8
"""Pieces that a loss over classes is cut into, as fused ones cut it or finer."""
STATE_8_BIT = (1 + 4 / 256) / 4
"""Bytes of an 8-bit state over those in fp32: a scale in fp32 for each 256 elements
(bitsandbytes)."""
MIN_8_BIT = 4096 * 4
"""Bytes of an fp32 state below which it stays as it is (bitsandbytes, ``min_8bit_size``)."""


COST_ORDER = (
    "16-bit weights", "BF16 autocast", "8-bit optimizer", "16-bit optimizer state",
    "expandable segments", "autocast without cache", "half the batch", "checkpointing",
    "offload activations", "offload optimizer state",
)  # fmt: skip
"""Changes that cost something, the cheapest first: other numbers before time. What frees no tensor,
but pieces between them, stands with them. All others cost nothing."""
_SAME_COST = 5
"""Number of the first ones that add no work to a step: their size alone decides."""


class MemoryChange(NamedTuple):
    """Blocks that a change shrinks or removes, always or for some events."""

    name: str
    rows: Ints
    """Rows of ``MemoryHistory.block_lifetimes``; a row may recur, with other times."""
    kept_share: float | np.ndarray
    """Share of their bytes that stays; an array: one share a row."""
    assumes: str
    begin: Ints | None = None
    """Events from ``begin`` to ``end`` in which the rest is freed; ``None``: always."""
    end: Ints | None = None
    where: AllocationOrigin | None = None
    """Line that the change is about; ``None``: no one line."""
    group: str = ""
    """Group of changes that exclude each other; empty: none."""
    forward_call: Ints | None = None
    """Call of its forward pass that a row belongs to: of checkpointing, which can be done for some.
    """
    request_share: float = 1.0
    """Share of the request that failed which is still asked for at once."""

    def for_calls(self, count: int) -> MemoryChange:
        """Limit the change to the first ``count`` calls of each pass."""
        if self.forward_call is None or self.begin is None or self.end is None:
            return self
        chosen = self.forward_call < count
        return self._replace(
            rows=self.rows[chosen], begin=self.begin[chosen], end=self.end[chosen],
            forward_call=self.forward_call[chosen],
        )  # fmt: skip


class FreedMemory(NamedTuple):
    name: str
    """Name of a change of ``find_changes``, or ``expandable segments``."""
    bytes: int
    """Bytes by which the peak of the history falls; for expandable segments, by which the reserved
    memory falls there."""
    assumes: str
    file: str | None = None
    """File of the line that the change is about; ``None``: no one line."""
    line: int | None = None
    function: str | None = None


def count_needed_bytes(
    peak: PeakMemory, made: Sequence[MemoryChange] = (), scale: float = 1.0
) -> int:
    """Count the most bytes in tensors at once, the failed request included, after changes.

    ``scale``: of the batch, in proportion to which the blocks of ``batch_rows`` grow."""
    h, lives = peak.history, peak.history.block_lifetimes
    share = np.ones(len(lives))
    for each in made:
        if each.begin is None:
            share[each.rows] *= each.kept_share
    if scale != 1.0:
        share[batch_rows(peak)] *= scale
    curve = h.allocated.astype(np.float64)
    size = lives.size * (share - 1)
    _add(
        curve, np.maximum(lives.start_event, -1) + 1, np.minimum(lives.end_event, h.count) + 1, size
    )
    for each in made:
        if each.begin is not None and each.end is not None:
            away = -lives.size[each.rows] * share[each.rows] * (1 - each.kept_share)
            born = lives.start_event[each.rows]
            begin = np.where(born < 0, each.begin, np.maximum(each.begin, born + 1))
            end = np.minimum(each.end, lives.end_event[each.rows])
            real = end > begin
            _add(curve, begin[real] + 1, end[real] + 1, away[real])
    if h.failed_event is not None and peak.request is not None:
        asked = min([each.request_share for each in made], default=1.0)
        curve[h.failed_event + 1] += peak.request * asked
    return round(float(curve.max()))


def _add(curve: np.ndarray, begin: Ints, end: Ints, size: np.ndarray) -> None:
    count = len(curve)
    total = np.bincount(begin, weights=size, minlength=count + 1)[: count + 1]
    total -= np.bincount(end, weights=size, minlength=count + 1)[: count + 1]
    curve += np.cumsum(total)[:count]


@cached_measurement
def find_savings(peak: PeakMemory) -> list[FreedMemory]:
    """List what lowers the peak, the cheapest in time first, then the largest. Savings overlap: not
    to be added up."""
    before = count_needed_bytes(peak)
    result = [
        _saving(peak, each, before - count_needed_bytes(peak, [each]))
        for each in find_changes(peak)
    ]
    least = MIN_SAVING_SHARE * max(before, 1)
    kept = [each for each in result if each.bytes >= least]
    repacked = measure_repacking(peak)
    if repacked is not None and (
        repacked.helps or repacked.freed >= MIN_SAVING_SHARE * peak.reserved
    ):
        kept.append(FreedMemory("expandable segments", repacked.freed, repacked.assumes))
    return sorted(kept, key=lambda each: (_cost(each.name), -each.bytes))


def _cost(change: str) -> int:
    """Return the place of a change among the costs; 0: it costs nothing."""
    place = COST_ORDER.index(change) + 1 if change in COST_ORDER else 0
    return max(place, _SAME_COST) if place else 0


MOVED_PEAK = 0.95
"""Share of what a change frees at the peak below which another moment is the peak after it."""


def _saving(peak: PeakMemory, each: MemoryChange, freed: int) -> FreedMemory:
    where = each.where
    place = (None, None, None) if where is None else (where.file, where.line, where.function)
    lives, assumes = peak.history.block_lifetimes, each.assumes
    here = lives.at(peak.event)[each.rows]
    if each.begin is not None and each.end is not None:
        here &= (each.begin <= peak.event) & (each.end > peak.event)
    at_peak = float((lives.size[each.rows] * (1 - each.kept_share))[here].sum())
    if freed < MOVED_PEAK * at_peak:
        moved = (
            f"this frees {format_bytes(at_peak)} at that moment, and another one is then the peak"
        )
        assumes = f"{assumes}; {moved}"
    return FreedMemory(each.name, freed, assumes, *place)


@cached_measurement
def find_changes(peak: PeakMemory) -> list[MemoryChange]:
    """List the changes whose blocks are in the history; one without any is left out."""
    if peak.snapshot.exception is not None:
        return []
    made = [
        _attention(peak), _logits(peak), _references(peak), _batch(peak), *_autocast(peak),
        _graphs(peak),
    ]  # fmt: skip
    if peak.trains is not False:
        made += [
            _half_precision(peak),
            _checkpointing(peak),
            _offload(peak),
            _set_to_none(peak),
            *_optimizer(peak),
        ]
    return [
        each for each in made if each is not None and (len(each.rows) or each.request_share < 1)
    ]


def _of(peak: PeakMemory, *categories: str) -> Bools:
    mask: Bools = np.isin(peak.category_codes, [CATEGORIES.index(name) for name in categories])
    return mask


# -- activations ----------------------------------------------------------------------------------


def _checkpointing(peak: PeakMemory) -> MemoryChange | None:
    """Checkpoint the line that calls the same module again and again: each call keeps its output
    alone, and is whole again when its backward begins.

    The stack that made its first block marks a call: as often as that recurs, so often it was
    called. One that no backward pass of the history reaches stays away to the end, except the
    largest, which is whole while it is computed again."""
    lives = peak.history.block_lifetimes
    rows = np.flatnonzero(_of(peak, "activations", "autocast copies") & (lives.start_event >= 0))
    rows = rows[np.argsort(lives.start_event[rows], kind="stable")]
    stacks = lives.stack[rows]
    places: dict[tuple[str, int, str], list[int]] = {}
    for stack in np.unique(stacks).tolist():
        for place in set(_callers(peak, stack)):
            places.setdefault(place, []).append(stack)
    best: MemoryChange | None = None
    least = count_needed_bytes(peak)
    for place, of_place in places.items():
        made = _checkpointed(peak, rows[np.isin(stacks, of_place)], place)
        after = least if made is None else count_needed_bytes(peak, [made])
        if after < least:
            best, least = made, after
    return best


def _checkpointed(peak: PeakMemory, rows: Ints, place: tuple[str, int, str]) -> MemoryChange | None:
    h, lives = peak.history, peak.history.block_lifetimes
    stacks, born = lives.stack[rows], lives.start_event[rows]
    first_stack = stacks == stacks[0]
    begins = np.flatnonzero(first_stack & np.append(True, ~first_stack[:-1]))
    if len(begins) < 2:
        return None
    ends = np.append(begins[1:], len(rows))
    dies = np.append(h.phase == PHASES.index("backward"), True)
    turn = np.cumsum(np.append([0], np.diff(h.phase) != 0))  # which run of a phase
    chosen: list[tuple[Ints, int, int, int]] = []  # rows, begin, end, number in its pass
    number, before = 0, -1
    for a, b in zip(begins, ends, strict=True):  # a call each
        call = rows[a:b]
        number = number + 1 if turn[born[a]] == before else 0
        before = int(turn[born[a]])
        over = int(born[b - 1])
        waits = (lives.end_event[call] > over + 1) & dies[lives.end_event[call]]
        kept = call[waits][:-1]  # the last one is its output
        if len(kept):
            chosen.append((kept, over + 1, int(lives.end_event[kept].min()), number))
    gaps: list[tuple[Ints, int, int, int]] = []
    unreached: list[tuple[Ints, int, int, int]] = []
    for index, (kept, over, first, at) in enumerate(chosen):
        if first >= h.count:
            unreached.append((kept, over, first, at))
            continue
        # computed again when the backward of the call after it is over
        later = lives.end_event[chosen[index + 1][0]] if index + 1 < len(chosen) else np.empty(0)
        later = later[later < first]
        again = int(later.max()) if len(later) and chosen[index + 1][3] > at else first - 1
        gaps.append((kept, over, again, at))
    if unreached:
        largest = max(range(len(unreached)), key=lambda n: int(lives.size[unreached[n][0]].sum()))
        gaps += [call for n, call in enumerate(unreached) if n != largest]
    if not gaps:
        return None
    counts = [len(call[0]) for call in gaps]
    calls = max(call[3] for call in gaps) + 1
    return MemoryChange(
        "checkpointing",
        np.concatenate([call[0] for call in gaps]),
        0.0,
        f"each of the {max(calls, len(unreached))} calls there keeps its output alone, and is "
        "whole while it is computed again; the forward pass runs twice",
        np.repeat([call[1] for call in gaps], counts),
        np.repeat([call[2] for call in gaps], counts),
        AllocationOrigin("forward", *place),
        group="activations",
        forward_call=np.repeat([call[3] for call in gaps], counts),
    )


def _callers(peak: PeakMemory, stack: int) -> list[tuple[str, int, str]]:
    """List the user's lines around a stack that call a module: those that could be checkpointed."""
    frames = peak.snapshot.stacks[stack] if stack >= 0 else ()
    frames = tuple(f for f in frames if f.line > 0)
    called = [MODULE.search(f.file.replace("\\", "/")) and f.name in CALLS for f in frames]
    if not any(called):  # of C++ and Python together some have no frame of the call itself
        called = [f.name == "forward" for f in frames]
    return [
        (outer.file, outer.line, outer.name)
        for index, outer in enumerate(frames[1:], start=1)
        if called[index - 1]
        and outer.name not in CALLS
        and frame_owner(outer) >= 1
        and any(called[index:])
    ]


def _attention(peak: PeakMemory) -> MemoryChange | None:
    """Compute attention in one fused kernel, which stores no scores: the softmax inside a function
    or file of attention made blocks of their size. Under autocast that function's next product
    keeps a copy of them in 16 bits: half as large, as no other of its blocks is, unless a head has
    as many channels as the sequence has tokens."""
    lives, stacks = peak.history.block_lifetimes, peak.snapshot.stacks
    place = np.array([*(_find_attention(stack) for stack in stacks), None], dtype=object)
    soft = np.array([*(any(_SOFTMAX.search(f.name) for f in s) for s in stacks), False])
    inside = np.array([each is not None for each in place])
    rows = np.flatnonzero(inside[lives.stack] & _of(peak, "activations"))
    if not len(rows):
        return None
    scores = np.unique(lives.size[rows[soft[lives.stack[rows]]]])
    if not len(scores):
        return None
    largest = int(scores.max())
    made = rows[(lives.size[rows] == largest) & soft[lives.stack[rows]]]
    first = place[lives.stack[made[0]]]
    wanted = lives.size[rows] == largest
    if _of(peak, "autocast copies").any():
        same = [p is not None and (p.file, p.name) == (first.file, first.name) for p in place]
        wanted |= (lives.size[rows] * 2 == largest) & np.array(same)[lives.stack[rows]]
    rows = rows[wanted]
    return MemoryChange(
        "fused attention",
        rows,
        0.0,
        "a fused kernel stores neither scores nor their softmax",
        where=AllocationOrigin("forward", first.file, first.line, first.name),
    )


_SOFTMAX = re.compile(r"(?<!log_)softmax", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn|sdpa", re.IGNORECASE)


def _find_attention(stack: Stack) -> SnapshotFrame | None:
    """Return the innermost frame of the user's attention function or file."""
    for frame in stack:
        file = frame.file.replace("\\", "/").rsplit("/", 1)[-1]
        if frame_owner(frame) >= 1 and (_ATTENTION.search(frame.name) or _ATTENTION.search(file)):
            return frame
    return None


def _offload(peak: PeakMemory) -> MemoryChange | None:
    """Move activations to host memory while they wait for the backward pass."""
    h, lives = peak.history, peak.history.block_lifetimes
    rows = np.flatnonzero(
        _of(peak, "activations") & (lives.start_event >= 0) & (lives.size >= 1 << 20)
    )
    phase = np.append(h.phase, PHASES.index("backward"))[lives.end_event[rows]]
    rows = rows[phase == PHASES.index("backward")]
    rows = rows[lives.end_event[rows] - lives.start_event[rows] > 2]
    # the next one is fetched while one is in use
    return MemoryChange(
        "offload activations",
        rows,
        0.0,
        "activations go to pinned host memory after use, and come back just before the backward "
        "pass needs them",
        lives.start_event[rows] + 2,
        lives.end_event[rows] - 2,
        group="activations",
    )


def batch_rows(peak: PeakMemory) -> Ints:
    """Find blocks whose size is in proportion to the batch: activations, inputs, and the gradients
    of activations on their way. Never weights, states, copies of weights or caches."""
    lives = peak.history.block_lifetimes
    weights = np.unique(lives.size[_of(peak, "weights", "gradients")])
    flow = _of(peak, "backward temporaries") & ~np.isin(lives.size, weights)
    rows: Ints = np.flatnonzero(_of(peak, "activations", "inputs", "earlier steps") | flow)
    return rows


def _batch(peak: PeakMemory) -> MemoryChange:
    return MemoryChange(
        "half the batch",
        batch_rows(peak),
        0.5,
        f"activations, inputs and {'' if peak.trains is False else 'backward '}temporaries are in "
        "proportion to the batch, which is halved",
    )


class Logits(NamedTuple):
    """Logits: blocks made by a loss over classes, and others of the same size around it."""

    rows: Ints
    """Rows of ``MemoryHistory.block_lifetimes``."""
    largest: int
    """Size of the loss's largest block, bytes."""
    blocks: int
    """Blocks held at the analysed moment."""
    bytes: int
    """Bytes in these blocks."""
    where: AllocationOrigin
    """Origin of the loss's first block: the line that called the loss."""


def find_logits(peak: PeakMemory) -> Logits | None:
    """Find the logits; ``None``: no loss held anything large at the analysed moment."""
    h, lives = peak.history, peak.history.block_lifetimes
    loss = np.array([o.loss for o in h.origins])[lives.stack]
    of_pass = _of(peak, "activations", "earlier steps", "backward temporaries")
    here = lives.at(peak.event)
    large = lives.size >= MIN_SAVING_SHARE * max(peak.allocated, 1) / 4
    first = np.flatnonzero(loss & large & here & of_pass)
    if not len(first):
        return None
    sizes = np.unique(lives.size[first])
    like = np.isin(lives.size, np.concatenate([sizes, sizes // 2]))  # the latter in 16 bits
    # made once where the loss is: a line that makes more of them makes something else
    made = np.bincount(lives.stack[lives.start_event >= 0] + 1, minlength=len(h.origins) + 1)
    often = made[lives.stack + 1] > made[lives.stack[first] + 1].max()
    flow = _of(peak, "backward temporaries")
    others = np.unique(lives.size[like & often & ~loss & ~flow & of_pass])
    like &= np.where(flow, ~np.isin(lives.size, others), ~often)
    rows = np.flatnonzero(of_pass & large & (loss | like))
    now = rows[here[rows]]
    where = h.origins[int(lives.stack[first[0]])]
    total = int(lives.size[now].sum())
    return Logits(rows, int(lives.size[first].max()), len(now), total, where)


def _logits(peak: PeakMemory) -> MemoryChange | None:
    result = find_logits(peak)
    asked = _asks_for_logits(peak)
    if result is None and not asked:
        return None
    pieces = f"made in {LOSS_CHUNKS} pieces, one at a time"
    return MemoryChange(
        "smaller logits",
        np.empty(0, np.int64) if result is None else result.rows,
        1 / LOSS_CHUNKS,
        f"the request that failed is for logits, which are {pieces}"
        if result is None
        else f"the {result.blocks} blocks of the loss and of the logits' size are {pieces}",
        where=peak.failed_at if result is None else result.where,
        request_share=1 / LOSS_CHUNKS if asked else 1.0,
    )


def _asks_for_logits(peak: PeakMemory) -> bool:
    """Tell whether the request that failed is for logits: where earlier steps made blocks of the
    same size as a loss did."""
    h, lives = peak.history, peak.history.block_lifetimes
    if h.failed_event is None or peak.request is None:
        return False
    loss = np.array([o.loss for o in h.origins])[lives.stack]
    same = lives.stack == h.event_stack[h.failed_event]
    return bool(np.isin(lives.size[same], lives.size[loss]).any())


def _autocast(peak: PeakMemory) -> list[MemoryChange]:
    """Drop the copies of weights that autocast's cache alone holds: those that a backward pass
    needs stay without it. Where nothing trains, the weights can be of that type themselves."""
    h, lives = peak.history, peak.history.block_lifetimes
    rows = np.flatnonzero(_of(peak, "autocast copies"))
    released = np.array([o.released for o in h.origins])[lives.release[rows]] == "autocast"
    cached = rows[released | ((lives.end_event[rows] == h.count) & (peak.trains is False))]
    made = [
        MemoryChange(
            "autocast without cache",
            cached,
            0.0,
            "each copy is made again where it is used, and one is there at a time",
            lives.start_event[cached] + 2,
            lives.end_event[cached],
            group="autocast",
        )
    ]
    weights = np.flatnonzero(_of(peak, "weights"))
    if len(weights) and (peak.trains is False or (len(rows) and not peak.trains)):
        made.append(
            MemoryChange(
                "16-bit weights",
                np.concatenate([rows, weights]),
                np.repeat([0.0, 0.5], [len(rows), len(weights)]),
                "weights are in fp32, and 16 bits suffice; autocast then makes no copies",
                group="autocast",
            )
        )
    return made


def _half_precision(peak: PeakMemory) -> MemoryChange | None:
    """Train under autocast: what matrix products make is half as large, and so is what operators
    that keep the type make of it. A 16-bit copy of each weight is there from the forward pass to
    the end of the backward pass. After PyTorch's own softmax, the next product keeps a copy too."""
    h, lives = peak.history, peak.history.block_lifetimes
    if any(origin.cast for origin in h.origins):
        return None
    made = _of(peak, "activations", "earlier steps") & (lives.start_event >= 0)
    forward = np.flatnonzero(made)[np.argsort(lives.start_event[made], kind="stable")]
    share = np.ones(len(forward))
    newest: dict[int, float] = {}  # by size, which stands for the shape
    # one block after the other: what it reads is known by those before
    for place, row in enumerate(forward.tolist()):
        output, size = h.origins[int(lives.stack[row])].output, int(lives.size[row])
        half = output == "product" or (output == "same type" and newest.get(size) == 0.5)
        newest[size] = share[place] = 1.5 if output == "softmax" else 0.5 if half else 1.0
    rows, share = forward[share != 1], share[share != 1]
    weights = np.flatnonzero(_of(peak, "weights"))
    runs = np.isin(h.phase, [PHASES.index("forward"), PHASES.index("backward")])
    begin, end = np.flatnonzero(np.diff(runs, prepend=False, append=False)).reshape(-1, 2).T
    return MemoryChange(
        "BF16 autocast",
        np.concatenate([rows, np.tile(weights, len(begin))]),
        np.append(share, np.full(len(weights) * len(begin), 1.5)),
        "activations are in fp32; those of matrix products, and what is made of them alone, are "
        "then in 16 bits, with a copy of each weight until the backward pass ends",
        np.append(lives.start_event[rows], np.repeat(begin, len(weights))),
        np.append(lives.end_event[rows], np.repeat(end - 1, len(weights))),
    )


# -- what outlives its use ------------------------------------------------------------------------


def _references(peak: PeakMemory) -> MemoryChange | None:
    """Free what each step leaves behind, else blocks of earlier steps, from the end of their step
    on."""
    h, lives = peak.history, peak.history.block_lifetimes
    _, marks = h.steps
    old = _of(peak, "earlier steps")
    lines = set(peak.growth.select("file", "line", "function").rows())
    grows = np.array([(o.file, o.line, o.function) in lines for o in h.origins])[lives.stack]
    grows &= lives.end_event == h.count
    rows = np.flatnonzero(old | grows)
    if not len(rows):
        return None
    where = h.origins[int(lives.stack[rows[np.argmax(lives.size[rows])]])]
    if lines:
        row = peak.growth.row(0, named=True)
        where = AllocationOrigin("own", row["file"], row["line"], row["function"])
    assumes = (
        "nothing needs what each step leaves behind there, but the newest step's may be in use"
        if lines
        else "nothing needs the outputs and losses of the steps before any more"
    )
    later = np.append(marks, h.count)[np.searchsorted(marks, lives.start_event[rows], side="right")]
    begin = np.where(lives.start_event[rows] < 0, -1, later)
    return MemoryChange("references", rows, 0.0, assumes, begin, lives.end_event[rows],
                  None if where.file is None else where)  # fmt: skip


def _set_to_none(peak: PeakMemory) -> MemoryChange | None:
    """Free gradients that are there during a forward pass although the optimizer has used them."""
    h, lives = peak.history, peak.history.block_lifetimes
    gradients = np.flatnonzero(_of(peak, "gradients"))
    phase = h.phase
    used = np.flatnonzero(
        (phase[:-1] == PHASES.index("optimizer")) & (phase[1:] != PHASES.index("optimizer"))
    ) + 1  # fmt: skip
    backward = np.flatnonzero(phase == PHASES.index("backward"))
    rows, begin, end = [], [], []
    for over in used.tolist():  # a step each
        again = backward[backward >= over]
        until = int(again[0]) if len(again) else h.count
        here = gradients[
            (lives.start_event[gradients] < over) & (lives.end_event[gradients] > over)
        ]
        rows.append(here)
        begin.append(np.full(len(here), over))
        end.append(np.full(len(here), until))
    if not rows:
        return None
    return MemoryChange(
        "set_to_none",
        np.concatenate(rows),
        0.0,
        "the optimizer has used the gradients: they are let go of before the forward pass",
        np.concatenate(begin),
        np.concatenate(end),
    )


# -- the optimizer --------------------------------------------------------------------------------


def _optimizer(peak: PeakMemory) -> list[MemoryChange]:
    state = np.flatnonzero(_of(peak, "optimizer state"))
    large = state[peak.history.block_lifetimes.size[state] >= MIN_8_BIT]
    return [
        MemoryChange("8-bit optimizer", large, STATE_8_BIT,
               "the state is in fp32 and all of it can be kept in 8 bits", group="state"),
        MemoryChange("16-bit optimizer state", state, 0.5,
               "the state is in fp32 and can be kept in bf16", group="state"),
        MemoryChange("offload optimizer state", state, 0.0,
               "the optimizer runs on the host: gradients go there, weights come back",
               group="state"),
        MemoryChange("fused optimizer", np.flatnonzero(_of(peak, "optimizer temporaries")), 0.0,
               "a fused kernel updates in place, without temporaries"),
    ]  # fmt: skip


def shard_changes(peak: PeakMemory, ranks: int) -> list[MemoryChange]:
    """Estimate ZeRO 1 to 3 (FSDP), over so many ranks that hold the same today. Stage 3 keeps the
    largest two weights gathered."""
    lives = peak.history.block_lifetimes
    rows = [np.flatnonzero(_of(peak, name)) for name in ("optimizer state", "gradients", "weights")]
    here = lives.at(peak.event)
    total = int(lives.size[np.concatenate(rows)][here[np.concatenate(rows)]].sum())
    gathered = 2 * int(lives.size[rows[2]].max(initial=0))
    made = []
    for stage in (1, 2, 3):
        keep = 1 / ranks
        if stage == 3:
            keep = min(1.0, keep + gathered / max(total, 1))
        made.append(
            MemoryChange(f"ZeRO {stage}", np.concatenate(rows[:stage]), keep,
                   f"{ranks} ranks hold equal parts", group="sharding")
        )  # fmt: skip
    return [each for each in made if len(each.rows)]


def _graphs(peak: PeakMemory) -> MemoryChange | None:
    """Merge private pools beyond the largest: graphs that never run at once can share one."""
    h, lives = peak.history, peak.history.block_lifetimes
    rows = np.flatnonzero(_of(peak, "CUDA graph pools"))
    pools = h.segments.filter(h.segments["pool"].is_not_null()).sort("address")
    if not len(rows) or pools["pool"].n_unique() < 2:
        return None
    place = np.searchsorted(pools["address"].to_numpy(), lives.address[rows], side="right") - 1
    names = np.array(pools["pool"].to_list())[np.maximum(place, 0)]
    totals = {name: int(lives.size[rows[names == name]].sum()) for name in set(names.tolist())}
    largest = max(sorted(totals), key=lambda name: totals[name])
    return MemoryChange(
        "share graph pools",
        rows[names != largest],
        0.0,
        f"the graphs of {len(totals)} pools never run at once and need no outputs of each other",
    )
