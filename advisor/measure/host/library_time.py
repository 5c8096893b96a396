"""Library function that takes most of a part of the step, by Python stacks. The stacks are sampled
outside windows, or taken from a window as samples of a microsecond."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import NamedTuple, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location
from advisor.measure import Analysis
from advisor.measure.host.stacks import (
    MIN_COVERED_SHARE,
    MIN_SAMPLES,
    NESTED,
    CodeOwner,
    Rows,
    SampledStack,
    code_owner,
    describe_function,
    innermost_ancestor,
    parent_rows,
    parse_frame,
)

_MAX_STACKS = 2_000
"""Maximum number of distinct stacks of a window that are read, the longest first."""
_PYTORCH = re.compile(r"(?:^|/)torch/")
_BUILT_IN = re.compile(r"^<built-in (?:function|method) (\S+?)(?: of (\S+) object.*)?>$")

_Kind = TypeVar("_Kind")


class LibraryTime(NamedTuple):
    """Samples of a part of the step in one library function, or in several of one kind."""

    function: str
    """``NpzFile.__getitem__ (numpy/lib/_npyio_impl.py)``, ``numpy.array``."""
    location: Location | None
    """Line of the user's code with most of these samples, or ``None`` if no such code calls it."""
    samples: int
    share: float
    """Share of the part's samples."""

    @property
    def text(self) -> str:
        """``loadtxt (numpy/…), called by __getitem__ (data.py:12)``."""
        if self.location is None or self.location.file is None:
            return self.function
        place = f"{PurePath(self.location.file).name}:{self.location.line}"
        return f"{self.function}, called by {self.location.function} ({place})"


def find_hottest_library_call(
    stacks: Sequence[SampledStack],
    kind_of: Callable[[Sequence[str], str], tuple[_Kind, int] | None],
) -> tuple[LibraryTime, _Kind | None] | None:
    """Find the library function with most of the samples. ``kind_of`` gets the frames below the
    user's code and what the innermost frame calls. It returns a kind, which several functions may
    share, and the index of the frame that shows it. ``None`` if there are too few samples, or no
    function or kind has half of them."""
    total = sum(stack.samples for stack in stacks)
    counts: Counter[tuple[_Kind | None, str]] = Counter()
    names: dict[tuple[_Kind | None, str], Counter[str]] = {}
    lines: dict[tuple[_Kind | None, str], Counter[Location]] = {}
    for samples, frames, called in stacks:
        depth = max(
            (i for i, name in enumerate(frames) if code_owner(name) == CodeOwner.USER), default=-1
        )
        below = frames[depth + 1 :]
        match = kind_of(below, called)
        if match is not None:
            kind, level = match
            name = _describe_frame(below[level]) if level < len(below) else called
            key: tuple[_Kind | None, str] = (kind, "")
        else:
            outer = next((inner for inner in below if not _PYTORCH.search(inner)), None)
            name = ("" if below else called) if outer is None else _describe_frame(outer)
            key = (None, name)
        if not name:
            continue
        counts[key] += samples
        names.setdefault(key, Counter())[name] += samples
        callers = (
            inner for inner in reversed(frames[: depth + 1]) if code_owner(inner) == CodeOwner.USER
        )
        frame_name = next((inner for inner in callers if not re.search(NESTED, inner)), "")
        frame = parse_frame(frame_name)
        if frame is not None:
            lines.setdefault(key, Counter())[frame.location] += samples
    if not counts:
        return None
    key, samples = counts.most_common(1)[0]
    if samples < MIN_SAMPLES or samples < MIN_COVERED_SHARE * total:
        return None
    line = lines[key].most_common(1)[0][0] if key in lines else None
    name = names[key].most_common(1)[0][0]
    return LibraryTime(name, line, samples, samples / total), key[0]


def _describe_frame(frame: str) -> str:
    parsed = parse_frame(frame)
    return "" if parsed is None else describe_function((parsed.function, parsed.file)) or ""


def stacks_under(a: Analysis, rows: Rows) -> list[SampledStack]:
    """Return the Python stacks of a window inside the given rows of ``trace.cpu``, in the form of
    :func:`stacks_of_rows`."""
    if not (a.trace.cpu["kind"] == "python").any():
        return []
    parent, dur = parent_rows(a.trace), a.trace.cpu["dur"].to_numpy()
    is_wanted = np.zeros(len(parent), dtype=bool)
    is_wanted[rows] = True
    inside = np.flatnonzero(innermost_ancestor(parent, is_wanted) >= 0)
    parents = parent[inside]
    child_ns = np.bincount(parents[parents >= 0], dur[inside][parents >= 0], len(parent))
    return stacks_of_rows(a, inside, (dur - child_ns.astype(np.int64))[inside])


def stacks_of_rows(a: Analysis, rows: Rows, ns: NDArray[np.int64]) -> list[SampledStack]:
    """Return the Python stacks of rows of ``trace.cpu`` that take these times, with samples in µs.
    Empty if the window has no stacks."""
    cpu = a.trace.cpu
    if not (cpu["kind"] == "python").any():
        return []
    parent, result = parent_rows(a.trace), []
    table = pl.DataFrame({"row": _find_first_of_stack(cpu, parent, rows), "ns": ns})
    table = table.group_by("row").agg(pl.col("ns").sum()).sort("ns", "row", descending=True)
    for row, stack_ns in table.head(_MAX_STACKS).iter_rows():  # few rows, each with its own stack
        frames: list[str] = []
        called, ancestor = "", row
        while ancestor >= 0:
            name = str(cpu["name"][ancestor])
            if parse_frame(name) is not None:
                frames.append(name)
            elif not frames and not called:
                called = _called_name(name)
            ancestor = int(parent[ancestor])
        result.append(SampledStack(round(stack_ns / 1000), tuple(reversed(frames)), called))
    return result


def _find_first_of_stack(cpu: pl.DataFrame, parent: Rows, rows: Rows) -> NDArray[np.int64]:
    """Return for each row the first row with the same name and the same names around it. Go by
    depth, since rows with equal stacks have parents with equal stacks."""
    is_needed, open_rows = np.zeros(len(parent), dtype=bool), np.unique(rows)
    while len(open_rows):
        is_needed[open_rows] = True
        above = parent[open_rows]
        open_rows = np.unique(above[above >= 0])
    name = cpu["name"].to_physical().to_numpy().astype(np.int64)
    first = np.arange(len(parent), dtype=np.int64)
    inside = np.flatnonzero(is_needed)
    depth = cpu["depth"].to_numpy()[inside]
    for level in np.unique(depth):
        level_rows = inside[depth == level]
        above = np.where(parent[level_rows] < 0, -1, first[parent[level_rows]])
        _, index, inverse = np.unique(
            (above + 1) * (int(name.max()) + 1) + name[level_rows],
            return_index=True,
            return_inverse=True,
        )
        first[level_rows] = level_rows[index][inverse]
    return first[rows]


def _called_name(name: str) -> str:
    """Return the name of a built-in's event in sampled stacks, or "" if it is unknown."""
    match = _BUILT_IN.match(name)
    if match is None:
        return ""
    return match[1] if match[2] in (None, "module", "type") else f".{match[1]}"
