"""What changes of a program would free of the memory that was held, in bytes, and what each such
figure takes for granted."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from advisor.measure.memory.fragments import fragments, placement
from advisor.measure.memory.memory_history import Ints
from advisor.measure.memory.memory_origin import Origin
from advisor.measure.memory.post_mortem import CATEGORIES, PostMortem

MINIMUM = 0.05
"""Of what was held: smaller savings are not recorded."""
CHUNKS = 8
"""Into so many pieces a loss over classes is cut, as fused ones cut it or finer."""
CHECKPOINTED = ("activations",)


class Saving(NamedTuple):
    """One change."""

    change: str
    """``checkpointing``, ``smaller logits``, ``references``, ``set_to_none``, ``8-bit optimizer``,
    ``batch`` or ``expandable segments``."""
    bytes: int
    """Freed at the moment that was looked at."""
    assumes: str
    file: str | None = None
    """The line that it is about; ``None``: no one line."""
    line: int | None = None
    function: str | None = None


def savings(post: PostMortem) -> list[Saving]:
    """What would have freed most at the moment, largest first. They overlap: not to be added up."""
    result = [
        *_checkpointing(post),
        *_logits(post),
        *_references(post),
        *_set_to_none(post),
        *_optimizer(post),
        *_batch(post),
        *_expandable(post),
    ]
    least = MINIMUM * max(post.allocated, 1)
    kept = [each for each in result if each.bytes >= least or each.change == "expandable segments"]
    return sorted(kept, key=lambda each: -each.bytes)


def _rows(post: PostMortem, *categories: str) -> Ints:
    codes = [CATEGORIES.index(name) for name in categories]
    rows = post.held_rows
    result: Ints = rows[np.isin(post.kinds[rows], codes)]
    return result


def _checkpointing(post: PostMortem) -> list[Saving]:
    """The line that calls the same module again and again: each call keeps its output alone, and
    one of them is whole while it is computed again.

    A call is told by the stack that made its first block: as often as that recurs, so often it was
    called.
    """
    h = post.history
    rows = _rows(post, *CHECKPOINTED)
    rows = rows[np.argsort(h.lives.born[rows], kind="stable")]
    groups: dict[tuple[str, int, str], list[int]] = {}
    for row in rows.tolist():
        stack = h.lives.stack[row]
        for place in set(_callers(post, int(stack))):
            groups.setdefault(place, []).append(row)
    best: Saving | None = None
    for (file, line, function), members in groups.items():
        stacks = h.lives.stack[members]
        first = int(stacks[0])
        begins = np.flatnonzero(stacks == first)
        count = len(begins)
        if count < 2:
            continue
        size = h.lives.size[members]
        ends = np.append(begins[1:], len(members))
        calls = np.array([int(size[a:b].sum()) for a, b in zip(begins, ends, strict=True)])
        kept = np.array([int(size[b - 1]) for b in ends])
        freed = int(calls.sum() - kept.sum() - max(0, int((calls - kept).max())))
        if freed > 0 and (best is None or freed > best.bytes):
            best = Saving(
                "checkpointing",
                freed,
                f"each of the {count} calls there keeps its last block alone, and one is whole "
                "while it is computed again; the forward pass runs twice",
                file,
                line,
                function,
            )
    return [] if best is None else [best]


def _callers(post: PostMortem, stack: int) -> list[tuple[str, int, str]]:
    """The user's lines around a stack that call a module: those that could be checkpointed."""
    from advisor.measure.memory.memory_origin import CALLS, MODULE, whose

    frames = post.snapshot.stacks[stack] if stack >= 0 else ()
    result = []
    for inner, outer in pairwise(frames):
        if (
            MODULE.search(inner.file.replace("\\", "/"))
            and inner.name in CALLS
            and not MODULE.search(outer.file.replace("\\", "/"))
            and whose(outer) >= 1
            and any(MODULE.search(f.file) for f in frames[frames.index(outer) + 1 :])
        ):
            result.append((outer.file, outer.line, outer.name))
    return result


class Logits(NamedTuple):
    """What a loss over classes held, and what of the same size was around it: the logits."""

    largest: int
    """Bytes of the loss's largest block."""
    blocks: int
    """Of the loss and of the logits' size."""
    bytes: int
    """In all of them."""
    where: Origin
    """Who called the loss."""

    @property
    def freed(self) -> int:
        """Were they made in CHUNKS pieces, one at a time."""
        return self.bytes - self.bytes // CHUNKS


def logits(post: PostMortem) -> Logits | None:
    """At the moment that is looked at; ``None``: no loss held anything large then."""
    h = post.history
    rows = _rows(post, "activations", "earlier steps", "outside modules", "backward temporaries")
    loss = np.array([o.loss for o in h.origins])[h.lives.stack[rows]]
    size = h.lives.size[rows]
    large = size >= MINIMUM * max(post.allocated, 1) / 4
    if not (loss & large).any():
        return None
    like = np.unique(size[loss & large])
    alike = np.isin(size, np.concatenate([like, like // 2]))  # the latter in 16 bits
    chosen = large & (loss | alike)
    where = h.origins[int(h.lives.stack[rows[np.flatnonzero(loss & large)[0]]])]
    return Logits(int(like.max()), int(chosen.sum()), int(size[chosen].sum()), where)


def _logits(post: PostMortem) -> list[Saving]:
    result = logits(post)
    if result is None:
        return []
    return [
        _at(
            "smaller logits",
            result.freed,
            f"the {result.blocks} blocks of the loss and of the logits' size are made in {CHUNKS} "
            "pieces, one at a time",
            result.where,
        )
    ]


def _references(post: PostMortem) -> list[Saving]:
    """What each step leaves behind, by the line that leaves most; else blocks of earlier steps, by
    the line that made most of them."""
    if not post.growth.is_empty():
        row = post.growth.row(0, named=True)
        return [
            Saving(
                "references",
                int(row["bytes"]),
                "nothing needs what each step leaves behind there",
                row["file"],
                row["line"],
                row["function"],
            )
        ]
    rows = _rows(post, "earlier steps")
    if not len(rows):
        return []
    h = post.history
    size = h.lives.size[rows]
    stacks = h.lives.stack[rows]
    largest = int(stacks[np.argmax(size)])
    return [
        _at(
            "references",
            int(size.sum()),
            "nothing needs the outputs and losses of the steps before any more",
            h.origins[largest],
        )
    ]


def _set_to_none(post: PostMortem) -> list[Saving]:
    """Gradients that are there while a forward pass runs."""
    h = post.history
    rows = _rows(post, "gradients")
    if post.moment < 0 or not len(rows):
        return []
    acts = np.flatnonzero(
        h.is_action["alloc"][: post.moment + 1] | h.is_action["oom"][: post.moment + 1]
    )
    acting = h.origins[int(h.event_stack[acts[-1]])].role if len(acts) else ""
    if acting != "forward":
        return []
    return [
        Saving(
            "set_to_none",
            int(h.lives.size[rows].sum()),
            "gradients are not accumulated over several batches, and are let go of before the "
            "forward pass",
        )
    ]


def _optimizer(post: PostMortem) -> list[Saving]:
    held = post.by_category.get("optimizer state", 0)
    return [
        Saving(
            "8-bit optimizer",
            held * 3 // 4,
            "the state is in fp32 and all of it can be kept in 8 bits",
        )
    ]


def _batch(post: PostMortem) -> list[Saving]:
    rows = _rows(post, "activations", "inputs", "backward temporaries", "outside modules")
    rows = rows[~post.of_earlier_steps[rows]]
    held = int(post.history.lives.size[rows].sum())
    return [
        Saving(
            "batch",
            held // 2,
            "activations and inputs are in proportion to the batch, which is halved",
        )
    ]


def _expandable(post: PostMortem) -> list[Saving]:
    """Only where fragments were in the way of a request."""
    at, result = placement(post), fragments(post)
    if at is None or result is None or not at.fits_expandable or result.expandable <= 0:
        return []
    return [
        Saving(
            "expandable segments",
            result.expandable,
            "tensors stay where they are; of each free block, whole pages of 20 MiB (2 MiB in the "
            "small pool) can be given back",
        )
    ]


def _at(change: str, freed: int, assumes: str, where: Origin) -> Saving:
    return Saving(change, freed, assumes, where.file, where.line, where.function)
