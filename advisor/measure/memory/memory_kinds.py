"""Categories of memory blocks, by call path, lifetime in the step, and pattern of sizes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Bools, Ints
from advisor.measure.memory.memory_history import PHASES, MemoryHistory
from advisor.measure.memory.memory_origin import ROLES

CATEGORIES = (
    "weights", "gradients", "optimizer state", "activations", "KV cache", "inputs",
    "autocast copies", "earlier steps", "backward temporaries", "optimizer temporaries",
    "communication buffers", "workspace", "CUDA graph pools", "not attributed",
)  # fmt: skip
"""Categories of blocks. ``autocast copies``: weights in autocast's type, kept until its region
ends. ``earlier steps``: made by a forward pass of a step before, and held still. ``not
attributed``: neither call path nor lifetime nor sizes identify it; its line may be known."""
BASES = ("call path", "lifetime", "size pattern", "the file", "none")
CUBLAS_WORKSPACES = (8_519_680, 33_554_432 + 131_072)
"""Sizes of cuBLAS's default workspace, bytes (``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``), often
without a stack."""
MIN_SET = 10
"""Blocks from which a set looks like the weights of a model: fewer may be anything."""
MAX_SINGLE = 0.5
"""Share of a set of weights in one block, at most: a larger one may be data."""
NOT_ATTRIBUTED = CATEGORIES.index("not attributed")


class BlockCategories(NamedTuple):
    """Category of each block and its basis, aligned with ``MemoryHistory.block_lifetimes``."""

    category: NDArray[np.int8]
    """Place in CATEGORIES."""
    basis: NDArray[np.int8]
    """Place in BASES."""


def classify(h: MemoryHistory, moment: int) -> BlockCategories:
    """Find the category of every block of the history, as of a moment (an event).

    The call path decides where it can; then the phases of the step in which a block lives; then,
    for blocks older than the history, what frees them, and last the sizes: a set of blocks that
    repeats the gradients' sizes is a copy of the weights."""
    lives = h.block_lifetimes
    role = np.array([ROLES.index(o.role) for o in h.origins], dtype=np.int16)[lives.stack]
    state = np.array([o.state for o in h.origins])[lives.stack]
    released = np.array([o.released for o in h.origins])[lives.release]
    known = lives.start_event >= 0
    kind = np.full(len(lives), NOT_ATTRIBUTED, dtype=np.int8)
    basis = np.full(len(lives), BASES.index("none"), dtype=np.int8)

    def is_(*names: str) -> Bools:
        return np.isin(role, [ROLES.index(name) for name in names])

    def put(rows: Bools, name: str, why: str = "call path") -> None:
        kind[rows] = CATEGORIES.index(name)
        basis[rows] = BASES.index(why)

    if h.snapshot.categories:
        for number, name in enumerate(h.snapshot.categories):
            put(
                lives.stack == number,
                name,
                "none" if name == CATEGORIES[NOT_ATTRIBUTED] else "the file",
            )
        return BlockCategories(kind, basis)
    leaves = _leaves_phase(h)
    sizes = np.unique(lives.size[is_("parameter")])
    engine = is_("backward") | (is_("nothing") & known & h.has_stacks)
    stays = leaves | (np.isin(lives.size, sizes) & (lives.end_event > moment))
    put(is_("parameter"), "weights")
    put(engine & ~stays, "backward temporaries")
    put(engine & stays, "gradients", "lifetime")
    put(is_("gradient"), "gradients")
    over = (
        lives.end_event == h.count
        if h.failed_event is None
        else np.zeros(len(lives), dtype=np.bool_)
    )
    keeps = state | leaves | over | ~known
    put(is_("optimizer") & keeps, "optimizer state")
    put(is_("optimizer") & ~keeps, "optimizer temporaries")
    put(is_("forward", "recomputed"), "activations")
    put(is_("input"), "inputs")
    put(is_("cache"), "KV cache")
    put(is_("communication"), "communication buffers")
    kept = is_("nothing") | (is_("forward", "own") & (lives.end_event == h.count))
    put(is_("workspace") | (kept & np.isin(lives.size, CUBLAS_WORKSPACES)), "workspace")
    dies = np.append(h.phase, -1)[lives.end_event]
    own = is_("own") & known
    put(own & (dies == PHASES.index("backward")), "activations", "lifetime")
    put(own & _spans_step(h), "inputs", "lifetime")
    old = is_("nothing") & ~known & (kind == NOT_ATTRIBUTED)
    put(old & (dies == PHASES.index("backward")), "activations", "lifetime")
    like = np.isin(lives.size, np.unique(lives.size[kind <= CATEGORIES.index("gradients")]))
    updated = (released == "optimizer") | (like & (dies == PHASES.index("optimizer")))
    put(old & updated, "optimizer state", "lifetime")
    put(old & (released == "gradient"), "gradients", "call path")
    put(old & (kind == NOT_ATTRIBUTED) & _replaced_outputs(h, kind), "earlier steps", "lifetime")
    _by_sizes(h, kind, basis, old & (kind == NOT_ATTRIBUTED) & (lives.end_event == h.count))
    cast = np.array([o.cast for o in h.origins])[lives.stack] & known
    put(_weight_copies(h, kind, cast), "autocast copies", "size pattern")
    put((released == "autocast") & is_("forward"), "autocast copies")
    put(_of_earlier_steps(h) & is_("forward", "recomputed"), "earlier steps", "lifetime")
    private = _in_private_pools(h)
    put(private & ~is_("parameter", "communication", "cache", "workspace"), "CUDA graph pools")
    return BlockCategories(kind, basis)


def _leaves_phase(h: MemoryHistory) -> Bools:
    """Return which blocks live into another phase, or into the same one a step later."""
    phase = h.phase
    turns = np.concatenate([[0, 0], np.cumsum(phase[1:] != phase[:-1])])[: h.count + 1]
    lives = h.block_lifetimes
    begin = np.clip(lives.start_event, 0, h.count)
    end = np.clip(lives.end_event - 1, 0, h.count)
    left: Bools = (turns[end + (h.count > 0)] > turns[begin + (h.count > 0)]) & (
        lives.start_event >= 0
    )
    return left if h.count else np.zeros(len(lives), dtype=np.bool_)


def _spans_step(h: MemoryHistory) -> Bools:
    """Return which blocks are made before a forward pass, after the last step's work, and there
    until the pass and its backward have ended."""
    lives, phase = h.block_lifetimes, h.phase
    if not h.count:
        return np.zeros(len(lives), dtype=np.bool_)
    begin = np.clip(lives.start_event, 0, h.count - 1)
    forward = np.flatnonzero(h.allocates("forward"))
    backward = np.flatnonzero(phase == PHASES.index("backward"))
    if not len(forward) or not len(backward):
        return np.zeros(len(lives), dtype=np.bool_)
    starts = np.append(forward, h.count)[np.searchsorted(forward, begin)]
    turns = np.append(backward, h.count)[np.searchsorted(backward, starts)]
    spans: Bools = (
        (phase[begin] != PHASES.index("forward"))
        & (turns < np.minimum(lives.end_event, h.count))
        & (lives.end_event < h.count)
    )
    return spans


def _replaced_outputs(h: MemoryHistory, kind: NDArray[np.int8]) -> Bools:
    """Find blocks freed when a pass has made one of their size that outlives the backward."""
    lives = h.block_lifetimes
    outputs = (
        (kind == CATEGORIES.index("activations")) & (lives.start_event >= 0) & _spans_phases(h)
    )
    sizes = np.unique(lives.size[outputs])
    replaced: Bools = np.isin(lives.size, sizes) & (lives.end_event < h.count)
    return replaced


def _spans_phases(h: MemoryHistory) -> Bools:
    """Return which blocks are there after a whole backward pass that came after them."""
    lives = h.block_lifetimes
    backward = h.phase == PHASES.index("backward")
    over = np.flatnonzero(backward[:-1] & ~backward[1:]) + 1
    if len(backward) and backward[-1]:
        over = np.append(over, h.count)
    first = np.append(over, h.count + 1)[np.searchsorted(over, np.maximum(lives.start_event, 0))]
    spans: Bools = lives.end_event >= first
    return spans


def _of_earlier_steps(h: MemoryHistory) -> Bools:
    """Return which blocks were made in the history, and are held beyond the end of their step.
    Steps that backward passes mark may be parts of one, and do not count."""
    source, marks = h.steps
    lives = h.block_lifetimes
    if not source or source == "backward passes":
        return np.zeros(len(lives), dtype=np.bool_)
    until = np.minimum(lives.end_event, h.count)
    steps = np.searchsorted(marks, [lives.start_event, until], side="right")
    old: Bools = (lives.start_event >= 0) & (steps[1] > steps[0])
    return old


def _in_private_pools(h: MemoryHistory) -> Bools:
    """Return which blocks are in segments of a private pool, as those of CUDA graphs are."""
    lives = h.block_lifetimes
    pools = h.segments.filter(h.segments["pool"].is_not_null()).sort("address")
    inside = np.zeros(len(lives), dtype=np.bool_)
    if len(pools):
        start, total = pools["address"].to_numpy(), pools["total"].to_numpy()
        place = np.searchsorted(start, lives.address, side="right") - 1
        inside = (place >= 0) & (lives.address < (start + total)[np.maximum(place, 0)])
    marked = h.events["pool"].is_not_null().to_numpy()
    inside |= (lives.start_event >= 0) & np.append(marked, False)[lives.start_event]
    return inside


def _by_sizes(
    h: MemoryHistory, kind: NDArray[np.int8], basis: NDArray[np.int8], rows: Bools
) -> None:
    """Classify blocks older than the history that nothing frees: weights, and copies of them."""
    lives = h.block_lifetimes
    # the same is left behind in the history, for no known purpose
    left = (lives.start_event >= 0) & (lives.end_event == h.count) & (kind == NOT_ATTRIBUTED)
    unknown = np.flatnonzero(rows & ~np.isin(lives.size, np.unique(lives.size[left])))
    if len(unknown) < MIN_SET:
        return
    sizes = lives.size[unknown]
    if sizes.max() > MAX_SINGLE * sizes.sum():
        unknown, sizes = unknown[sizes < sizes.max()], sizes[sizes < sizes.max()]
    values, have = np.unique(sizes, return_counts=True)
    made = _largest_set(h, kind == CATEGORIES.index("gradients"))
    phases = set(h.phase.tolist())
    backward = PHASES.index("backward") in phases
    if PHASES.index("forward") not in phases and not backward:
        return
    if made:
        weights = kind == CATEGORIES.index("weights")
        here = dict(zip(*np.unique(lives.size[weights], return_counts=True), strict=True))
        first = [max(0, made.get(int(v), 0) - int(here.get(v, 0))) for v in values]
        # what has no gradient is frozen, or a buffer: as long as it is there, a weight
        plan = [
            ("weights", "size pattern" if need else "lifetime", need or int(n))
            for need, n in zip(first, have, strict=True)
        ]
        rest = ["optimizer state"] * len(values)
    else:
        copies = _copies(values, have)
        names = {2: "gradients" if backward else "", 3: "optimizer state"}.get(copies, "")
        why = "size pattern" if copies > 1 else "lifetime"
        plan = [("weights", why, max(1, int(n) // copies)) for n in have]
        rest = [names] * len(values)
        if copies == 4 or (copies == 3 and backward):
            _split_gradients(unknown, sizes, values, have // copies, kind, basis)
    for value, (name, why, count), other in zip(values, plan, rest, strict=True):
        own = unknown[(sizes == value) & (kind[unknown] == NOT_ATTRIBUTED)]
        for chosen, label, ground in (
            (own[:count], name, why),
            (own[count:], other, "size pattern"),
        ):
            if label:
                kind[chosen] = CATEGORIES.index(label)
                basis[chosen] = BASES.index(ground)


def _copies(values: Ints, have: Ints) -> int:
    """Return how many sets of equal sizes the blocks form: 4, 3 or 2 if nearly all fit, else 1."""
    for copies in (4, 3, 2):
        whole = have % copies == 0
        by_bytes = (values * have)[whole].sum() / (values * have).sum()
        if by_bytes >= 0.98 and have[whole].sum() >= 0.9 * have.sum():
            return copies
    return 1


def _split_gradients(
    unknown: Ints, sizes: Ints, values: Ints, each: Ints,
    kind: NDArray[np.int8], basis: NDArray[np.int8],
) -> None:  # fmt: skip
    """Take the last of the copies for gradients, where a backward pass adds to what is there."""
    for value, count in zip(values, each, strict=True):
        own = unknown[sizes == value]
        kind[own[len(own) - int(count) :]] = CATEGORIES.index("gradients")
        basis[own[len(own) - int(count) :]] = BASES.index("size pattern")


def _largest_set(h: MemoryHistory, rows: Bools) -> dict[int, int]:
    """Count the blocks by size at the event after which most of these are held."""
    chosen = np.flatnonzero(rows)
    lives = h.block_lifetimes
    if not len(chosen):
        return {}
    change = np.zeros(h.count + 2, dtype=np.int64)
    np.add.at(change, lives.start_event[chosen] + 1, 1)
    np.add.at(change, np.minimum(lives.end_event[chosen], h.count) + 1, -1)
    at = int(np.argmax(np.cumsum(change))) - 1
    there = chosen[(lives.start_event[chosen] <= at) & (lives.end_event[chosen] > at)]
    values, counts = np.unique(lives.size[there], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _weight_copies(h: MemoryHistory, kind: NDArray[np.int8], cast: Bools) -> Bools:
    """Find casts of half a weight's size, at most as many at once as there are such weights."""
    lives = h.block_lifetimes
    weights = kind == CATEGORIES.index("weights")
    values, counts = np.unique(lives.size[weights] // 2, return_counts=True)
    room = dict(zip(values.tolist(), counts.tolist(), strict=True))
    copies = np.zeros(len(lives), dtype=np.bool_)
    active: dict[int, list[int]] = {}
    rows = np.flatnonzero(cast & np.isin(lives.size, values))
    # one cast after the other: whether it counts depends on those before
    for row in rows[np.argsort(lives.start_event[rows], kind="stable")].tolist():
        size, born = int(lives.size[row]), int(lives.start_event[row])
        ends = [end for end in active.get(size, []) if end > born]
        if len(ends) < room[size]:
            ends.append(int(lives.end_event[row]))
            copies[row] = True
        active[size] = ends
    return copies
