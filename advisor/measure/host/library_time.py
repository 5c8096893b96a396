"""Library function that takes most of a part of the step, by Python stacks: those sampled outside
windows, or those of a window as samples of a microsecond."""

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
    MIN_COVERED,
    MIN_SAMPLES,
    NESTED,
    Rows,
    SampledStack,
    describe_function,
    frame_rank,
    innermost_ancestor,
    parent_rows,
    parse_frame,
)

MAX_STACKS = 2_000
"""Most different stacks of a window that are read, those with most time."""
_PYTORCH = re.compile(r"(?:^|/)torch/")
_BUILT_IN = re.compile(r"^<built-in (?:function|method) (\S+?)(?: of (\S+) object.*)?>$")

_T = TypeVar("_T")


class LibraryTime(NamedTuple):
    """Samples of a part of the step in one library function, or in several of one kind."""

    function: str
    """``NpzFile.__getitem__ (numpy/lib/_npyio_impl.py)``, ``numpy.array``."""
    location: Location | None
    """Line of the user's code with most of these samples; ``None``: no such code is around."""
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
    stacks: Sequence[SampledStack], kind_of: Callable[[Sequence[str], str], tuple[_T, int] | None]
) -> tuple[LibraryTime, _T | None] | None:
    """Find the library function with most of the samples. ``kind_of``: gets the frames below the
    user's code and what the innermost one calls; returns a kind, which several functions may share,
    and the place of the frame that shows it. ``None``: too few samples, or half of them are in no
    function or kind."""
    total = sum(stack.samples for stack in stacks)
    counts: Counter[tuple[_T | None, str]] = Counter()
    names: dict[tuple[_T | None, str], Counter[str]] = {}
    lines: dict[tuple[_T | None, str], Counter[Location]] = {}
    for samples, frames, called in stacks:
        depth = max((n for n, name in enumerate(frames) if frame_rank(name) == 2), default=-1)
        below = frames[depth + 1 :]
        known = kind_of(below, called)
        if known is not None:
            kind, level = known
            name = _name(below[level]) if level < len(below) else called
            key: tuple[_T | None, str] = (kind, "")
        else:
            outer = next((each for each in below if not _PYTORCH.search(each)), None)
            name = ("" if below else called) if outer is None else _name(outer)
            key = (None, name)
        if not name:
            continue
        counts[key] += samples
        names.setdefault(key, Counter())[name] += samples
        around = (each for each in reversed(frames[: depth + 1]) if frame_rank(each) == 2)
        place = next((each for each in around if not re.search(NESTED, each)), "")
        frame = parse_frame(place)
        if frame is not None:
            lines.setdefault(key, Counter())[frame.location] += samples
    if not counts:
        return None
    key, samples = counts.most_common(1)[0]
    if samples < MIN_SAMPLES or samples < MIN_COVERED * total:
        return None
    line = lines[key].most_common(1)[0][0] if key in lines else None
    name = names[key].most_common(1)[0][0]
    return LibraryTime(name, line, samples, samples / total), key[0]


def _name(frame: str) -> str:
    parsed = parse_frame(frame)
    return "" if parsed is None else describe_function((parsed.function, parsed.file)) or ""


def stacks_under(a: Analysis, rows: Rows) -> list[SampledStack]:
    """Return the Python stacks of a window inside these rows of ``trace.cpu``, as
    :func:`stacks_of_rows` does."""
    if not (a.trace.cpu["kind"] == "python").any():
        return []
    parent, dur = parent_rows(a.trace), a.trace.cpu["dur"].to_numpy()
    wanted = np.zeros(len(parent), dtype=bool)
    wanted[rows] = True
    inside = np.flatnonzero(innermost_ancestor(parent, wanted) >= 0)
    around = parent[inside]
    called = np.bincount(around[around >= 0], dur[inside][around >= 0], len(parent))
    return stacks_of_rows(a, inside, (dur - called.astype(np.int64))[inside])


def stacks_of_rows(a: Analysis, rows: Rows, ns: NDArray[np.int64]) -> list[SampledStack]:
    """Return the Python stacks of rows of ``trace.cpu`` that take these times; samples are µs.
    Empty: the window has none."""
    cpu = a.trace.cpu
    if not (cpu["kind"] == "python").any():
        return []
    parent, result = parent_rows(a.trace), []
    table = pl.DataFrame({"row": _first_of_stack(cpu, parent, rows), "ns": ns})
    table = table.group_by("row").agg(pl.col("ns").sum()).sort("ns", "row", descending=True)
    for row, spent in table.head(MAX_STACKS).iter_rows():  # few, each with a stack of its own
        frames: list[str] = []
        called, at = "", row
        while at >= 0:
            name = str(cpu["name"][at])
            if parse_frame(name) is not None:
                frames.append(name)
            elif not frames and not called:
                called = _called(name)
            at = int(parent[at])
        result.append(SampledStack(round(spent / 1000), tuple(reversed(frames)), called))
    return result


def _first_of_stack(cpu: pl.DataFrame, parent: Rows, rows: Rows) -> NDArray[np.int64]:
    """Return for each of these rows the first row that has the same names around it, and its own.
    By depth, as rows of one stack have parents of one stack."""
    needed, around = np.zeros(len(parent), dtype=bool), np.unique(rows)
    while len(around):
        needed[around] = True
        above = parent[around]
        around = np.unique(above[above >= 0])
    name = cpu["name"].to_physical().to_numpy().astype(np.int64)
    first = np.arange(len(parent), dtype=np.int64)
    inside = np.flatnonzero(needed)
    depth = cpu["depth"].to_numpy()[inside]
    for level in np.unique(depth):
        own = inside[depth == level]
        above = np.where(parent[own] < 0, -1, first[parent[own]])
        _, index, place = np.unique(
            (above + 1) * (int(name.max()) + 1) + name[own], return_index=True, return_inverse=True
        )
        first[own] = own[index][place]
    return first[rows]


def _called(name: str) -> str:
    """Return what a built-in's event is called in sampled stacks, as far as it says."""
    found = _BUILT_IN.match(name)
    if found is None:
        return ""
    return found[1] if found[2] in (None, "module", "type") else f".{found[1]}"
