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
ends. ``earlier steps``: made by a forward pass of an earlier step, and still allocated. ``not
attributed``: not identified by call path, lifetime or sizes; the line may be known."""
BASES = ("call path", "lifetime", "size pattern", "the file", "none")
CUBLAS_WORKSPACES = (8_519_680, 33_554_432 + 131_072)
"""Sizes of cuBLAS's default workspaces, bytes (``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``), often
without a stack."""
MIN_SET_BLOCKS = 10
"""Minimum blocks of a set that looks like the weights of a model: fewer may be anything."""
MAX_SINGLE_SHARE = 0.5
"""Maximum share of a set of weights in one block: a larger block may be data."""
NOT_ATTRIBUTED = CATEGORIES.index("not attributed")


class BlockCategories(NamedTuple):
    """Category of each block and its basis, aligned with ``MemoryHistory.block_lifetimes``."""

    category: NDArray[np.int8]
    """Index in CATEGORIES."""
    basis: NDArray[np.int8]
    """Index in BASES."""


def classify(h: MemoryHistory, moment: int) -> BlockCategories:
    """Find the category of every block of the history at a moment (an event).

    The call path decides if it can, then the phases of the step in which a block lives, then, for
    blocks older than the history, the code that frees them, and finally the sizes: a set of blocks
    that repeats the gradients' sizes is a copy of the weights."""
    lives = h.block_lifetimes
    role = np.array([ROLES.index(origin.role) for origin in h.origins], dtype=np.int16)[lives.stack]
    state = np.array([origin.state for origin in h.origins])[lives.stack]
    released = np.array([origin.released for origin in h.origins])[lives.release]
    in_history = lives.start_event >= 0
    kind = np.full(len(lives), NOT_ATTRIBUTED, dtype=np.int8)
    basis = np.full(len(lives), BASES.index("none"), dtype=np.int8)

    def has_role(*names: str) -> Bools:
        return np.isin(role, [ROLES.index(name) for name in names])

    def assign_category(rows: Bools, name: str, why: str = "call path") -> None:
        kind[rows] = CATEGORIES.index(name)
        basis[rows] = BASES.index(why)

    if h.snapshot.categories:
        for number, name in enumerate(h.snapshot.categories):
            assign_category(
                lives.stack == number,
                name,
                "none" if name == CATEGORIES[NOT_ATTRIBUTED] else "the file",
            )
        return BlockCategories(kind, basis)
    leaves = _find_leaving_phase(h)
    weight_sizes = np.unique(lives.size[has_role("parameter")])
    by_engine = has_role("backward") | (has_role("nothing") & in_history & h.has_stacks)
    is_kept = leaves | (np.isin(lives.size, weight_sizes) & (lives.end_event > moment))
    assign_category(has_role("parameter"), "weights")
    assign_category(by_engine & ~is_kept, "backward temporaries")
    assign_category(by_engine & is_kept, "gradients", "lifetime")
    assign_category(has_role("gradient"), "gradients")
    never_freed = (
        lives.end_event == h.count
        if h.failed_event is None
        else np.zeros(len(lives), dtype=np.bool_)
    )
    is_state = state | leaves | never_freed | ~in_history
    assign_category(has_role("optimizer") & is_state, "optimizer state")
    assign_category(has_role("optimizer") & ~is_state, "optimizer temporaries")
    assign_category(has_role("forward", "recomputed"), "activations")
    assign_category(has_role("input"), "inputs")
    assign_category(has_role("cache"), "KV cache")
    assign_category(has_role("communication"), "communication buffers")
    is_lasting = has_role("nothing") | (has_role("forward", "own") & (lives.end_event == h.count))
    assign_category(
        has_role("workspace") | (is_lasting & np.isin(lives.size, CUBLAS_WORKSPACES)), "workspace"
    )
    ends_in = np.append(h.phase, -1)[lives.end_event]
    by_user = has_role("own") & in_history
    assign_category(by_user & (ends_in == PHASES.index("backward")), "activations", "lifetime")
    assign_category(by_user & _find_spanning_step(h), "inputs", "lifetime")
    older = has_role("nothing") & ~in_history & (kind == NOT_ATTRIBUTED)
    assign_category(older & (ends_in == PHASES.index("backward")), "activations", "lifetime")
    weight_sized = np.isin(lives.size, np.unique(lives.size[kind <= CATEGORIES.index("gradients")]))
    is_updated = (released == "optimizer") | (weight_sized & (ends_in == PHASES.index("optimizer")))
    assign_category(older & is_updated, "optimizer state", "lifetime")
    assign_category(older & (released == "gradient"), "gradients", "call path")
    assign_category(
        older & (kind == NOT_ATTRIBUTED) & _find_replaced(h, kind), "earlier steps", "lifetime"
    )
    _match_sizes(h, kind, basis, older & (kind == NOT_ATTRIBUTED) & (lives.end_event == h.count))
    is_cast = np.array([origin.cast for origin in h.origins])[lives.stack] & in_history
    assign_category(_find_weight_copies(h, kind, is_cast), "autocast copies", "size pattern")
    assign_category((released == "autocast") & has_role("forward"), "autocast copies")
    assign_category(
        _find_outliving_step(h) & has_role("forward", "recomputed"), "earlier steps", "lifetime"
    )
    is_private = _find_in_private_pools(h)
    assign_category(
        is_private & ~has_role("parameter", "communication", "cache", "workspace"),
        "CUDA graph pools",
    )
    return BlockCategories(kind, basis)


def _find_leaving_phase(h: MemoryHistory) -> Bools:
    """Return which blocks live into another phase, or into the same phase a step later."""
    phase = h.phase
    phase_count = np.concatenate([[0, 0], np.cumsum(phase[1:] != phase[:-1])])[: h.count + 1]
    blocks = h.block_lifetimes
    start = np.clip(blocks.start_event, 0, h.count)
    end = np.clip(blocks.end_event - 1, 0, h.count)
    is_left: Bools = (phase_count[end + (h.count > 0)] > phase_count[start + (h.count > 0)]) & (
        blocks.start_event >= 0
    )
    return is_left if h.count else np.zeros(len(blocks), dtype=np.bool_)


def _find_spanning_step(h: MemoryHistory) -> Bools:
    """Return which blocks are made before a forward pass, after the last step's work, and stay
    allocated until the pass and its backward have ended."""
    blocks, phase = h.block_lifetimes, h.phase
    if not h.count:
        return np.zeros(len(blocks), dtype=np.bool_)
    start = np.clip(blocks.start_event, 0, h.count - 1)
    forward = np.flatnonzero(h.allocates("forward"))
    backward = np.flatnonzero(phase == PHASES.index("backward"))
    if not len(forward) or not len(backward):
        return np.zeros(len(blocks), dtype=np.bool_)
    starts = np.append(forward, h.count)[np.searchsorted(forward, start)]
    turns = np.append(backward, h.count)[np.searchsorted(backward, starts)]
    is_spanning: Bools = (
        (phase[start] != PHASES.index("forward"))
        & (turns < np.minimum(blocks.end_event, h.count))
        & (blocks.end_event < h.count)
    )
    return is_spanning


def _find_replaced(h: MemoryHistory, kind: NDArray[np.int8]) -> Bools:
    """Find blocks freed after a pass has made one of their size that outlives the backward."""
    blocks = h.block_lifetimes
    is_output = (
        (kind == CATEGORIES.index("activations"))
        & (blocks.start_event >= 0)
        & _find_outliving_backward(h)
    )
    sizes = np.unique(blocks.size[is_output])
    is_replaced: Bools = np.isin(blocks.size, sizes) & (blocks.end_event < h.count)
    return is_replaced


def _find_outliving_backward(h: MemoryHistory) -> Bools:
    """Return which blocks are still allocated after a complete backward pass that followed them."""
    blocks = h.block_lifetimes
    backward = h.phase == PHASES.index("backward")
    backward_ends = np.flatnonzero(backward[:-1] & ~backward[1:]) + 1
    if len(backward) and backward[-1]:
        backward_ends = np.append(backward_ends, h.count)
    first_end = np.append(backward_ends, h.count + 1)[
        np.searchsorted(backward_ends, np.maximum(blocks.start_event, 0))
    ]
    outlives: Bools = blocks.end_event >= first_end
    return outlives


def _find_outliving_step(h: MemoryHistory) -> Bools:
    """Return which blocks were made in the history, and are kept beyond the end of their step.
    Steps found by backward passes may be parts of a step, and do not count."""
    source, marks = h.steps
    blocks = h.block_lifetimes
    if not source or source == "backward passes":
        return np.zeros(len(blocks), dtype=np.bool_)
    last_event = np.minimum(blocks.end_event, h.count)
    steps = np.searchsorted(marks, [blocks.start_event, last_event], side="right")
    outlives: Bools = (blocks.start_event >= 0) & (steps[1] > steps[0])
    return outlives


def _find_in_private_pools(h: MemoryHistory) -> Bools:
    """Return which blocks are in segments of a private pool, such as those of CUDA graphs."""
    blocks = h.block_lifetimes
    pools = h.segments.filter(h.segments["pool"].is_not_null()).sort("address")
    is_inside = np.zeros(len(blocks), dtype=np.bool_)
    if len(pools):
        start, total = pools["address"].to_numpy(), pools["total"].to_numpy()
        segment_index = np.searchsorted(start, blocks.address, side="right") - 1
        is_inside = (segment_index >= 0) & (
            blocks.address < (start + total)[np.maximum(segment_index, 0)]
        )
    has_pool = h.events["pool"].is_not_null().to_numpy()
    is_inside |= (blocks.start_event >= 0) & np.append(has_pool, False)[blocks.start_event]
    return is_inside


def _match_sizes(
    h: MemoryHistory, kind: NDArray[np.int8], basis: NDArray[np.int8], rows: Bools
) -> None:
    """Classify blocks older than the history that nothing frees: weights and copies of weights."""
    blocks = h.block_lifetimes
    # blocks of these sizes are also left over in the history, for no known purpose
    is_left = (blocks.start_event >= 0) & (blocks.end_event == h.count) & (kind == NOT_ATTRIBUTED)
    unknown = np.flatnonzero(rows & ~np.isin(blocks.size, np.unique(blocks.size[is_left])))
    if len(unknown) < MIN_SET_BLOCKS:
        return
    sizes = blocks.size[unknown]
    if sizes.max() > MAX_SINGLE_SHARE * sizes.sum():
        unknown, sizes = unknown[sizes < sizes.max()], sizes[sizes < sizes.max()]
    values, counts = np.unique(sizes, return_counts=True)
    gradients = _count_largest_set(h, kind == CATEGORIES.index("gradients"))
    phases = set(h.phase.tolist())
    backward = PHASES.index("backward") in phases
    if PHASES.index("forward") not in phases and not backward:
        return
    if gradients:
        weights = kind == CATEGORIES.index("weights")
        weights_known = dict(zip(*np.unique(blocks.size[weights], return_counts=True), strict=True))
        missing = [max(0, gradients.get(int(v), 0) - int(weights_known.get(v, 0))) for v in values]
        # blocks without a gradient are frozen, or buffers: count them as weights
        first_labels = [
            ("weights", "size pattern" if needed else "lifetime", needed or int(n))
            for needed, n in zip(missing, counts, strict=True)
        ]
        other_labels = ["optimizer state"] * len(values)
    else:
        copies = _count_copies(values, counts)
        names = {2: "gradients" if backward else "", 3: "optimizer state"}.get(copies, "")
        reason = "size pattern" if copies > 1 else "lifetime"
        first_labels = [("weights", reason, max(1, int(n) // copies)) for n in counts]
        other_labels = [names] * len(values)
        if copies == 4 or (copies == 3 and backward):
            _split_gradients(unknown, sizes, values, counts // copies, kind, basis)
    for value, (name, reason, count), other_label in zip(
        values, first_labels, other_labels, strict=True
    ):
        of_size = unknown[(sizes == value) & (kind[unknown] == NOT_ATTRIBUTED)]
        for chosen, label, ground in (
            (of_size[:count], name, reason),
            (of_size[count:], other_label, "size pattern"),
        ):
            if label:
                kind[chosen] = CATEGORIES.index(label)
                basis[chosen] = BASES.index(ground)


def _count_copies(values: Ints, counts: Ints) -> int:
    """Return the number of equal sets that the blocks form: 4, 3 or 2 if nearly all fit, else 1."""
    for copies in (4, 3, 2):
        is_whole = counts % copies == 0
        by_bytes = (values * counts)[is_whole].sum() / (values * counts).sum()
        if by_bytes >= 0.98 and counts[is_whole].sum() >= 0.9 * counts.sum():
            return copies
    return 1


def _split_gradients(
    unknown: Ints, sizes: Ints, values: Ints, counts: Ints,
    kind: NDArray[np.int8], basis: NDArray[np.int8],
) -> None:  # fmt: skip
    """Classify the last copies as gradients, if a backward pass adds to existing gradients."""
    for value, count in zip(values, counts, strict=True):
        of_size = unknown[sizes == value]
        kind[of_size[len(of_size) - int(count) :]] = CATEGORIES.index("gradients")
        basis[of_size[len(of_size) - int(count) :]] = BASES.index("size pattern")


def _count_largest_set(h: MemoryHistory, rows: Bools) -> dict[int, int]:
    """Count the given blocks by size at the event after which most of them are allocated."""
    row_numbers = np.flatnonzero(rows)
    blocks = h.block_lifetimes
    if not len(row_numbers):
        return {}
    change = np.zeros(h.count + 2, dtype=np.int64)
    np.add.at(change, blocks.start_event[row_numbers] + 1, 1)
    np.add.at(change, np.minimum(blocks.end_event[row_numbers], h.count) + 1, -1)
    fullest = int(np.argmax(np.cumsum(change))) - 1
    allocated = row_numbers[
        (blocks.start_event[row_numbers] <= fullest) & (blocks.end_event[row_numbers] > fullest)
    ]
    values, counts = np.unique(blocks.size[allocated], return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _find_weight_copies(h: MemoryHistory, kind: NDArray[np.int8], cast: Bools) -> Bools:
    """Find casts of half a weight's size, at most as many at once as weights of that size."""
    blocks = h.block_lifetimes
    weights = kind == CATEGORIES.index("weights")
    values, counts = np.unique(blocks.size[weights] // 2, return_counts=True)
    weight_counts = dict(zip(values.tolist(), counts.tolist(), strict=True))
    is_copy = np.zeros(len(blocks), dtype=np.bool_)
    active: dict[int, list[int]] = {}
    rows = np.flatnonzero(cast & np.isin(blocks.size, values))
    # sequential: whether a cast counts depends on earlier casts
    for row in rows[np.argsort(blocks.start_event[rows], kind="stable")].tolist():
        size, start = int(blocks.size[row]), int(blocks.start_event[row])
        ends = [end for end in active.get(size, []) if end > start]
        if len(ends) < weight_counts[size]:
            ends.append(int(blocks.end_event[row]))
            is_copy[row] = True
        active[size] = ends
    return is_copy
