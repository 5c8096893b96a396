"""Lines of operators in recordings without Python stacks: the recorder's log of module calls in the
profiled window, matched with operators by time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Location
from advisor.core.intervals import EMPTY, Intervals, intersect, union
from advisor.core.run_directory import MAX_VALUE
from advisor.measure.host.stacks import (
    CodeOwner,
    Frame,
    Rows,
    code_owner,
    normalize_operator_name,
    parse_frame,
)
from advisor.measure.steps.steps import step_of

if TYPE_CHECKING:
    from advisor.core.trace import Trace
    from advisor.measure import Analysis

FORWARD_RANGE = "advisor::forward"
"""Name of the recorder's range around an outermost module call."""
MIN_CALL_TIME_SHARE = 0.5
"""Minimum share of an operator's time in calls of one function, whose line is used for it."""
MAX_CLOCK_ERROR_NS = 100_000
"""Maximum time by which an outermost call may exceed its range, ns."""
_MAX_LEVEL = 100
"""Maximum nesting level of a call. The recorder logs fewer."""

_PYTHON_NAMES = {
    **dict.fromkeys(("select", "slice", "index", "narrow"), "getitem"),
    "div": "truediv",
    "rsub": "sub",
    "native_layer_norm": "layer_norm",
    "concat": "cat",
}
"""Functions of Python that run an operator of another name."""


class CallPlace(NamedTuple):
    """Line of the user's code for operators directly in a module's call."""

    frame: Frame
    layer: str | None
    """Class of the innermost module of a library around them, or ``None``."""
    is_definition: bool = False
    """Whether the frame is the definition of ``forward``: the line of the operator is unknown."""


class LoggedCalls(NamedTuple):
    """Pieces of host time inside calls: the start of each piece, ns, and the position of its place,
    or -1 between calls."""

    thread: int
    starts: NDArray[np.int64]
    pieces: NDArray[np.int64]
    calls: tuple[NDArray[np.int64], NDArray[np.int64]]
    """Begin of each call, ns, and the position of its place."""
    places: list[CallPlace | None]
    paths: list[str]
    """Path of the innermost module of each place."""
    lines: dict[tuple[Frame, str], Frame | None]
    """First line of a name in the code of a ``forward``, or ``None`` if it is in several functions
    of it."""

    def find(self, trace: Trace, rows: Rows) -> NDArray[np.int64]:
        """Return the position of the place of each host row, or -1 outside of calls."""
        if not len(self.starts) or not trace.cpu.height:
            return np.full(len(rows), -1, dtype=np.int64)
        row = np.maximum(rows, 0)
        is_in_thread = (rows >= 0) & (trace.cpu["thread"].to_numpy()[row] == self.thread)
        piece = np.searchsorted(self.starts, trace.cpu["ts"].to_numpy()[row], side="right") - 1
        return np.where(is_in_thread & (piece >= 0), self.pieces[np.maximum(piece, 0)], -1)


def line_of_call(a: Analysis, place: Location) -> CallPlace | None:
    """Find the line that calls the module of the worst instance of ``place``, or the line of the
    ``forward`` that runs it. If no instance is known, all instances count. ``None`` if no function
    has most of their time."""
    calls = a.module_calls if place.op is not None else None
    if calls is None:
        return None
    rows, ns = rows_of_place(a, place)
    if place.ts_ns is not None and (is_worst := _begins_at(a, place.ts_ns, rows)).any():
        rows, ns = rows[is_worst], ns[is_worst]
    forward = a.forward_op[rows]  # of a gradient
    rows = np.where(forward >= 0, forward, rows)
    call_places = calls.find(a.trace, rows)
    outermost = a.outermost_aten[rows]
    names = a.trace.cpu["name"].gather(np.where(outermost >= 0, outermost, rows)).to_list()
    times: Counter[CallPlace] = Counter()
    functions: Counter[tuple[str, str]] = Counter()
    for position, name, duration in zip(call_places.tolist(), names, ns.tolist(), strict=True):
        called = calls.places[position] if position >= 0 else None
        if called is not None:
            called = _with_line_of_name(called, str(name), calls)
            times[called] += duration
            functions[called.frame.file, called.frame.function] += duration
    if not functions:
        return None
    function, duration = functions.most_common(1)[0]
    if duration < MIN_CALL_TIME_SHARE * int(ns.sum()):
        return None
    in_function = [c for c in times if (c.frame.file, c.frame.function) == function]
    return max(in_function, key=lambda called: (times[called], -called.frame.line))


def _begins_at(a: Analysis, ts: int, rows: Rows) -> NDArray[np.bool_]:
    """Return which operators, or the device work that they launch, begin at a time."""
    result: NDArray[np.bool_] = a.trace.cpu["ts"].to_numpy()[rows] == ts
    if a.device_id is not None:
        gpu = a.trace.gpu
        result |= np.isin(rows, gpu["op"].filter(gpu["ts"] == ts).drop_nulls().to_numpy())
    return result


def _with_line_of_name(called: CallPlace, operator: str, calls: LoggedCalls) -> CallPlace:
    """Return the place with the line that names the operator, if its ``forward`` has one such."""
    if not called.is_definition:
        return called
    name = normalize_operator_name(operator)
    names = {name, _PYTHON_NAMES.get(name, name)}
    lines = [calls.lines[key] for n in names if (key := (called.frame, n)) in calls.lines]
    return called if len(lines) != 1 or lines[0] is None else CallPlace(lines[0], called.layer)


def read_calls(a: Analysis) -> LoggedCalls | None:
    """Read the recorder's log of the window, on the trace's clock. ``None`` if there is none, or if
    its outermost calls are not in the trace's ranges of them."""
    log = _read_log(a)
    ranges = a.trace.cpu.filter(pl.col("name") == FORWARD_RANGE).sort("ts")
    if log is None or not ranges.height or ranges["thread"].n_unique() > 1:
        return None
    frames, modules, calls, lines, origin, _ = log
    earliest = int(ranges["ts"][0]) - MAX_CLOCK_ERROR_NS  # warm-up before it is not in the trace
    is_outermost = (calls[:, 0] == 0) & (calls[:, 1] + origin >= earliest)
    calls = calls[np.argmax(is_outermost) :]
    begin = calls[calls[:, 0] == 0, 1] + origin
    around = np.searchsorted(ranges["ts"].to_numpy(), begin + MAX_CLOCK_ERROR_NS, "right") - 1
    around = np.maximum(around, 0)
    first, last = ranges["ts"].to_numpy()[around], (ranges["ts"] + ranges["dur"]).to_numpy()[around]
    if (
        not is_outermost.any()
        or (np.abs(np.clip(begin, first, last) - begin) > MAX_CLOCK_ERROR_NS).any()
    ):
        return None
    starts: list[int] = []
    pieces: list[int] = []
    begun: list[int] = []
    places: list[CallPlace | None] = []
    paths: list[str] = []
    positions: dict[tuple[CallChain, int], int] = {}
    open_calls: list[tuple[int, CallChain, int]] = []
    last = (0, np.iinfo(np.int64).max - origin, 0, -1, -1, -1)  # ends all calls
    for level, offset, duration, caller, forward, module in [*calls.tolist(), last]:
        while open_calls and (len(open_calls) > level or open_calls[-1][0] <= offset):
            end, *_ = open_calls.pop()
            starts.append(min(end, offset) + origin)
            pieces.append(positions[open_calls[-1][1:]] if open_calls else -1)
        end_around, chain_around, _ = open_calls[-1] if open_calls else (last[1], (), -1)
        chain = (*chain_around, (caller, forward))
        if (chain, module) not in positions:
            positions[chain, module] = len(places)
            places.append(find_place(frames, chain))
            paths.append(modules[module])
        open_calls.append((min(offset + max(duration, 0), end_around), chain, module))
        starts.append(offset + origin)
        pieces.append(positions[chain, module])
        begun.append(positions[chain, module])
    return LoggedCalls(
        int(ranges["thread"][0]),
        np.array(starts, np.int64),
        np.array(pieces, np.int64),
        (calls[:, 1] + origin, np.array(begun[:-1], np.int64)),
        places,
        paths,
        lines,
    )


_Names = dict[tuple[Frame, str], Frame | None]


class _ReadLog(NamedTuple):
    """Log of a window's calls, as read."""

    frames: list[str]
    modules: list[str]
    calls: NDArray[np.int64]
    names: _Names
    origin: int
    """Time of the anchor on the trace's clock, ns."""
    outermost: NDArray[np.int64]
    """Module, training mode and gradients of each outermost call. Empty if not logged."""


def _read_log(a: Analysis) -> _ReadLog | None:
    """Return the window's log. ``None`` if there is none, or a damaged one."""
    events = [] if a.rank_record is None else a.rank_record.events_of("calls")
    events = [event for event in events if event.get("window") == a.trace.meta.window]
    if not events or a.trace.meta.clock != "unix":
        return None
    event = events[-1]
    try:
        log = msgspec.convert(event, _Log)
        calls = np.array(log.calls, dtype=np.int64).reshape(-1, 6)
        lines = _read_lines(log.names, [parse_frame(frame) for frame in log.frames])
        outermost = np.array(log.outermost, dtype=np.int64).reshape(-1, 3)
    except (msgspec.ValidationError, ValueError, OverflowError, IndexError):
        return None
    is_valid = (
        len(calls) > 0
        and ((calls[:, 0] >= 0) & (calls[:, 0] <= _MAX_LEVEL)).all()
        and (calls[:, 1:3] < MAX_VALUE).all()
        and (calls[:, 1] >= 0).all()
        and (np.diff(calls[:, 1]) >= 0).all()
        and ((calls[:, 3:5] >= -1) & (calls[:, 3:5] < len(log.frames))).all()
        and ((calls[:, 5] >= 0) & (calls[:, 5] < len(log.modules))).all()
    )
    if not is_valid or not 0 < log.anchor_unix_ns < MAX_VALUE:
        return None
    origin = log.anchor_unix_ns - a.trace.meta.start_ns
    return _ReadLog(log.frames, log.modules, calls, lines, origin, outermost)


def step_evaluations(a: Analysis) -> Intervals:
    """Find host time in which a module runs in evaluation mode and without gradients, although the
    steps train this module in training mode. Empty unless most steps have such a call, or if the
    recorder did not log the modes."""
    log = _read_log(a)
    if log is None or a.module_calls is None:
        return EMPTY
    _, _, calls, _, origin, outermost = log
    calls = calls[calls[:, 0] == 0]
    if len(outermost) != len(calls):
        return EMPTY
    begin, end = calls[:, 1] + origin, calls[:, 1] + calls[:, 2] + origin
    step = step_of(a.steps, begin)
    in_step = step.is_not_null().to_numpy() & (calls[:, 2] > 0)
    module, in_training, has_gradients = outermost.T
    trained = module[in_step & (in_training > 0) & (has_gradients > 0)]
    chosen = in_step & np.isin(module, trained) & (in_training == 0) & (has_gradients == 0)
    if 2 * step.filter(pl.Series(chosen)).n_unique() <= a.step_count:
        return EMPTY
    return intersect(union(begin[chosen], end[chosen]), a.steps.host_spans)


class _Log(msgspec.Struct):
    """Data of a ``calls`` event, as the recorder writes it."""

    frames: list[str]
    modules: list[str]
    calls: list[list[int]]
    names: list[tuple[int, str, int]]
    anchor_unix_ns: int
    outermost: list[tuple[int, int, int]] = []


def _read_lines(names: list[tuple[int, str, int]], frames: list[Frame | None]) -> _Names:
    """Return the line of each name in the code of a ``forward``: the first one of a function, or
    ``None`` if several functions have the name. Raises IndexError for missing frames."""
    result: _Names = {}
    for forward, name, position in names:
        definition, line = frames[forward], frames[position]
        if definition is not None and line is not None:
            key = definition, name
            first = result.get(key, line)
            is_same = first is not None and first[::2] == line[::2]  # the function
            result[key] = min(first or line, line) if is_same else None
    return result


CallChain = tuple[tuple[int, int], ...]
"""Nested calls from the outermost inwards: positions of the frame of the line that calls, and of
the definition of ``forward``, or -1."""


def find_place(frames: list[str], chain: CallChain) -> CallPlace | None:
    """Return the place of operators in the innermost call of a chain.

    It is the innermost frame of the user's own code, or else of an installed library."""
    texts = [frames[position] if position >= 0 else "" for call in chain for position in call]
    owners = [code_owner(text) for text in texts]
    for owner in (CodeOwner.USER, CodeOwner.LIBRARY):
        if owner in owners:
            index = len(owners) - 1 - owners[::-1].index(owner)
            frame = parse_frame(texts[index])
            inner = zip(texts[index + 1 :], owners[index + 1 :], strict=True)
            library = parse_frame(
                next((t for t, o in reversed([*inner]) if o == CodeOwner.LIBRARY), "")
            )
            if frame is not None:
                layer = None if library is None else library.function.rpartition(".")[0] or None
                return CallPlace(frame, layer, is_definition=index % 2 == 1)
    return None


def rows_of_place(a: Analysis, place: Location) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the operators of a place as rows of ``trace.cpu``, and their times: of their kernels
    if there is a device, else their own."""
    cpu = a.trace.cpu
    if a.device_id is None:
        rows = np.flatnonzero((cpu["name"] == place.op).to_numpy())
        return rows, cpu["dur"].to_numpy()[rows]
    is_of_place = a.kernels["op_name"] == place.op
    if place.kernel is not None:
        is_of_place &= a.trace.gpu["name"] == place.kernel
    device_rows = np.flatnonzero(is_of_place.fill_null(value=False).to_numpy())
    op = a.trace.gpu["op"].fill_null(-1).to_numpy()[device_rows]
    return op[op >= 0], a.trace.gpu["dur"].to_numpy()[device_rows][op >= 0]
