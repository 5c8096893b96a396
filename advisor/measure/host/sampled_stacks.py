"""Python stacks of the training thread that the recorder sampled: what the host does, by line.

A sample falls where the interpreter changes threads. Stretches of pure Python of less than 5 ms are
rarely hit, and the call after them is instead. So shares of samples name lines; time is that of the
recorded phases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from advisor.core.finding import Location
from advisor.core.run_directory import RankRecord
from advisor.measure.host.stacks import Frame, frame_rank, parse_frame

MIN_SAMPLES = 8
"""Samples of a part from which its lines are named."""
MIN_COVERED = 0.5
"""Of a part's samples hold the line that is named for it."""
MIN_OF_LOOP = 0.8
"""The same of one line of the outermost function, which is in all samples: the loop itself."""
MAX_FRAMES = 200_000
"""Of all stacks of a rank together: the recorder writes less."""
_PARTS = {
    "data": re.compile(r"^torch/utils/data/"),
    "forward": re.compile(r"^torch/nn/modules/module\.py\("),
    "backward": re.compile(r"^torch/(?:_tensor|autograd/__init__)\.py\(\d+\): (?:\w+\.)?backward$"),
    "optimizer": re.compile(r"^torch/(?:optim/|amp/grad_scaler)"),
}
LOOP = "loop"
"""The part of what is in none of these."""
_CLASS = re.compile(r": (?:\w+\.)+(?=\w+$)")
_PROFILER = re.compile(r"^torch/profiler/")


class SampledStack(NamedTuple):
    """One stack: how often it was seen, and its frames (``file(line): function``), the outermost
    first."""

    samples: int
    frames: tuple[str, ...]

    @property
    def part(self) -> str:
        """Part of the step: ``data``, ``forward``, ``backward``, ``optimizer`` or ``loop``, by the
        outermost frame that is of one."""
        for frame in self.frames:
            for part, pattern in _PARTS.items():
                if pattern.search(frame):
                    return part
        return LOOP


class HottestLine(NamedTuple):
    """A line of the user's code and how many samples of a part lie in or below it."""

    location: Location
    share: float
    """Of the part's samples."""
    inside: str | None
    """The function of a library below it in which most of them are; ``None``: in itself."""


def read_stacks(record: RankRecord) -> list[SampledStack]:
    """The stacks of a rank, without those in which a profiler started or stopped. Damaged lines
    are left out."""
    result: list[SampledStack] = []
    room = MAX_FRAMES
    for event in record.of_kind("stacks"):
        names, stacks = event.get("frames"), event.get("stacks")
        if not isinstance(names, list) or not isinstance(stacks, list):
            continue
        for line in stacks:
            stack = _stack(line, names)
            if stack is None or any(_PROFILER.search(frame) for frame in stack.frames):
                continue
            room -= len(stack.frames)
            if room < 0:
                return result
            result.append(stack)
    return result


def _stack(line: Any, names: list[Any]) -> SampledStack | None:
    if not isinstance(line, list) or len(line) != 2:
        return None
    count, index = line
    if type(count) is not int or not 0 < count < 1 << 31 or not isinstance(index, list):
        return None
    if not index or not all(type(i) is int and 0 <= i < len(names) for i in index):
        return None
    frames = tuple(names[i] for i in index)
    return SampledStack(count, frames) if all(isinstance(f, str) for f in frames) else None


def share_in(stacks: Sequence[SampledStack], pattern: str) -> tuple[float, list[SampledStack]]:
    """Share of all samples that are in a frame of this name, as PyTorch's profiler writes frames
    (without the class), and those samples."""
    named = re.compile(pattern)
    own = [
        stack
        for stack in stacks
        if any(named.search(_CLASS.sub(": ", frame)) for frame in stack.frames)
    ]
    total = sum(stack.samples for stack in stacks)
    return sum(stack.samples for stack in own) / max(total, 1), own


def hottest_line(stacks: Sequence[SampledStack]) -> HottestLine | None:
    """The innermost function of the user's code that half of the samples are in or below, and its
    line of most samples; where there is no such function, that of most. ``None``: too few samples,
    no such code, or several lines of the loop itself."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES:
        return None
    covered: Counter[tuple[str, str]] = Counter()
    depth: dict[tuple[str, str], int] = {}
    lines: dict[tuple[str, str], Counter[Frame]] = {}
    leaves: dict[tuple[str, str], Counter[str]] = {}
    for count, frames in stacks:
        own = {}
        for place, name in enumerate(frames):
            frame = parse_frame(name)
            if frame is not None and frame_rank(name) == 2:
                own[frame.file, frame.function] = place, frame
        for function, (place, frame) in own.items():
            covered[function] += count
            depth[function] = max(depth.get(function, 0), place)
            lines.setdefault(function, Counter())[frame] += count
            leaf = frames[-1] if place < len(frames) - 1 else ""
            leaves.setdefault(function, Counter())[leaf] += count
    wide = [function for function, count in covered.items() if count >= MIN_COVERED * total]
    if not wide:
        wide = [function for function, _ in covered.most_common(1)]
    if not wide:
        return None
    function = max(wide, key=depth.__getitem__)
    line, most = lines[function].most_common(1)[0]
    if not depth[function] and most < MIN_OF_LOOP * total:
        return None
    leaf, count = leaves[function].most_common(1)[0]
    inside = parse_frame(leaf) if 2 * count >= covered[function] else None
    return HottestLine(
        Location(file=line.file, line=line.line, function=line.function),
        covered[function] / total,
        None if inside is None else f"{inside.function} ({inside.file}:{inside.line})",
    )
