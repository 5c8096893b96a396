"""The user's code outside the model in sampled stacks, by line and by function."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location
from advisor.core.intervals import intersect, intervals_of
from advisor.measure import Analysis
from advisor.measure.host.stacks import (
    MIN_COVERED_SHARE,
    MIN_OF_LOOP,
    MIN_SAMPLES,
    CodeOwner,
    HottestLine,
    SampledStack,
    code_owner,
    hottest_line,
    line_of_function,
    line_of_share,
    normalize_operator_name,
    nullable_rows,
    parse_frame,
)

LEARNING = frozenset(("backward", "optimizer"))
"""Parts of a step that only training has."""
COMPUTING = LEARNING | {"forward", "data", "communication"}
"""Parts of a step with rules of their own."""
MAX_INSIDE_SHARE = 0.1
"""Maximum share of a line's samples in the given parts at which it counts as outside of them."""
MIN_LINE_SHARE = 0.8
"""Minimum share of a line's samples in a line that it calls, for naming the called line instead."""
MIN_SYMBOL_SHARE = 0.6
"""Minimum share of the time of operators written as symbols at which one gets the hottest line."""
SYMBOLS = frozenset(f"aten::{name}" for name in "add div index matmul mul neg pow sub".split())
"""Operators that Python writes as symbols, which have no function in a stack."""
_TRANSFORM = re.compile(r"^torchvision/transforms/")
_MODULE_CALL = re.compile(r"^torch/nn/modules/module\.py\(")

Place = tuple[str, str, int]
"""File, function and line; line 0 means the function."""


class SampledCode(NamedTuple):
    """A line, or a function with the line that has most of its samples."""

    location: Location
    share: float
    """Share of all samples in or below the line or function."""
    samples: int
    library_function: str | None
    """Library function below it with most of its samples, or ``None``."""

    @property
    def waits(self) -> bool:
        """Whether it is a wait for the GPU, where a host that runs ahead loses nothing."""
        return (self.library_function or "").startswith("synchronize (torch/cuda/")

    @property
    def place(self) -> str:
        """``send (serve.py:34)``."""
        return f"{self.location.function} ({self.location.file}:{self.location.line})"


def code_outside(
    stacks: Sequence[SampledStack], parts: frozenset[str], least: float = 0.0, most: float = 1.0
) -> SampledCode | None:
    """Find the user's line or function with most samples that is outside these parts of a step, and
    then the innermost one with most of its samples. ``least`` and ``most`` limit its share of all
    samples. ``None`` if there are too few samples, or no line matches."""
    total = sum(stack.samples for stack in stacks)
    if total < MIN_SAMPLES:
        return None
    counts: Counter[Place] = Counter()
    inside: Counter[Place] = Counter()
    depth: dict[Place, int] = {}
    leaves: dict[Place, Counter[str]] = {}
    for stack in stacks:
        part = find_step_part(stack)
        for place, level in _find_places(stack, parts).items():
            counts[place] += stack.samples
            inside[place] += stack.samples * (part in parts)
            depth[place] = max(depth.get(place, 0), level)
            leaf = stack.frames[-1] if level < len(stack.frames) - 1 else ""
            leaves.setdefault(place, Counter())[leaf] += stack.samples
    outside = {
        place: count
        for place, count in counts.items()
        if inside[place] <= MAX_INSIDE_SHARE * count and least <= count / total <= most
    }
    if not outside:
        return None
    top = max(outside.values())
    if top < MIN_SAMPLES:
        return None
    file, function, line = max(
        (place for place, count in outside.items() if count >= MIN_LINE_SHARE * top),
        key=lambda place: (depth[place], place[2] > 0, outside[place]),
    )
    count = counts[file, function, line]
    if not line:
        lines = {
            candidate: samples
            for candidate, samples in counts.items()
            if candidate[:2] == (file, function) and candidate[2]
        }
        line = max(lines, key=lines.__getitem__)[2]
    leaf, leaf_samples = leaves[file, function, line].most_common(1)[0]
    library = parse_frame(leaf) if leaf_samples >= MIN_COVERED_SHARE * count else None
    return SampledCode(
        Location(file=file, line=line, function=function),
        count / total,
        count,
        None if library is None else f"{library.function} ({library.file}:{library.line})",
    )


def line_of_operator(a: Analysis, op: str, *, by_share: bool = True) -> HottestLine | None:
    """Find the line of the user's code whose stacks, sampled outside windows, end in the function
    of PyTorch or a library that calls the operator, and the library function below it. Else, with
    ``by_share``, find the line with as large a share of the training thread's time as the operator
    in windows."""
    run_steps = a.run_steps
    if run_steps is None or not a.span_ns or not run_steps.stacks:
        return None
    cpu, main = a.trace.cpu, a.trace.main_thread
    rows = np.flatnonzero(((cpu["name"] == op) & (cpu["thread"] == main)).to_numpy())
    calls = cpu.select("ts", "dur")[rows]
    outermost = a.outermost_aten
    caller_names = cpu["name"].gather(nullable_rows(outermost[rows])).cast(pl.String)
    times = (
        calls.group_by(caller_names.alias("called"))
        .agg(pl.col("dur").sum())
        .sort("dur")
        .drop_nulls()
    )
    # several callers may run the same operator: nearly all of its time is in one of them
    if len(times) and times["dur"][-1] > MIN_OF_LOOP * int(calls["dur"].sum()):
        line = line_of_function(run_steps.stacks, normalize_operator_name(times["called"][-1]))
        if line is None and times["called"][-1] in SYMBOLS:
            line = _line_of_symbol(a, outermost, int(times["dur"][-1]))
        if line is not None:
            return line
    if not by_share:
        return None
    spans = intervals_of(calls)
    stacks = run_steps.stacks
    if a.device_id is not None:  # the thread waits in backward(): its own work is elsewhere
        stacks = [s._replace(frames=()) if s.part == "backward" else s for s in stacks]
    if op in SYMBOLS:
        stacks = [s._replace(frames=s.frames[-1:] * _ends_in_own_line(s)) for s in stacks]
    return line_of_share(stacks, intersect(spans, a.spans).total / a.span_ns)


def _line_of_symbol(a: Analysis, outermost: NDArray[np.int64], ns: int) -> HottestLine | None:
    """Find the line of an operator that is written as a symbol (``a @ b``), so that samples end in
    the line itself. ``outermost`` is ``outermost_aten``. ``ns``, the time of its calls, must be
    most of the time of all such operators."""
    run_steps, main = a.run_steps, a.trace.main_thread
    rows = np.unique(outermost)
    operators = a.trace.cpu[rows[rows >= 0]].filter(pl.col("thread") == main)
    total = operators.filter(pl.col("name").cast(pl.String).is_in(SYMBOLS))["dur"].sum()
    if run_steps is None or ns < MIN_SYMBOL_SHARE * int(total):
        return None
    return hottest_line([stack for stack in run_steps.stacks if _ends_in_own_line(stack)])


def _ends_in_own_line(stack: SampledStack) -> bool:
    """Return whether a stack ends in a line of the user's code, as with a symbol."""
    return (
        bool(stack.frames)
        and code_owner(stack.frames[-1]) == CodeOwner.USER
        and (not stack.called or stack.called.startswith("operator."))
    )


def share_of_python(sampled: Sequence[SampledStack]) -> float:
    """Return the share of these samples in which the user's lines run Python itself. They call
    nothing, or a function of single values such as ``min`` or ``list.append``."""
    total = sum(stack.samples for stack in sampled)
    python_samples = sum(
        stack.samples
        for stack in sampled
        if stack.frames
        and code_owner(stack.frames[-1]) == CodeOwner.USER
        and (not stack.called or _SINGLE_VALUES.search(stack.called))
    )
    return python_samples / total if total else 0.0


_SINGLE_VALUES = re.compile(
    r"^(?:builtins\.(?:abs|bool|divmod|float|int|isinstance|len|max|min|next|pow|range|round|str|zip)"
    r"|math\.\w+|\.(?:append|get|items|keys|pop|values|add|update|extend))$"
)


def find_step_part(stack: SampledStack) -> str:
    """Return the part of a step. Image transforms are not forward, though some are modules."""
    if stack.part == "forward" and model_call(stack.frames) is None:
        return "loop"
    return stack.part


def model_call(frames: Sequence[str]) -> int | None:
    """Return the position of the outermost call of a module that is not a transform."""
    for index, frame in enumerate(frames):
        if _MODULE_CALL.search(frame):
            caller = next((name for name in frames[index:] if not name.startswith("torch/")), "")
            if not _TRANSFORM.search(caller):
                return index
    return None


def _find_places(stack: SampledStack, parts: frozenset[str]) -> dict[Place, int]:
    """Return the user's lines and functions in a stack, down to the model's call, with their
    depths."""
    end = (
        model_call(stack.frames)
        if "forward" in parts or find_step_part(stack) == "forward"
        else None
    )
    result: dict[Place, int] = {}
    for level, name in enumerate(stack.frames[:end]):
        frame = parse_frame(name)
        if frame is not None and code_owner(name) == CodeOwner.USER:
            result[frame.file, frame.function, frame.line] = level
            result[frame.file, frame.function, 0] = level
    return result
