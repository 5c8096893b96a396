"""Log of the module calls in a profiled window without Python stacks: lines for its operators.

The profiler records when each operator ran. The log has when each module's ``forward`` ran, the
line that called it and where the ``forward`` is defined. So an operator gets the line of the call
around it, at the cost of one entry per call, and only while the profiler slows the step anyway."""

from collections.abc import Mapping
from time import perf_counter_ns as now
from time import time_ns
from types import FrameType, FunctionType, MappingProxyType
from typing import Any, Final

from advisor.recorder.built_in_calls import (
    MAX_FUNCTIONS,
    find_function,
    find_in_file,
    used_names,
)
from advisor.recorder.stack_samples import frame_text

MAX_MODULE_CALLS = 6_000
"""Maximum number of calls in a window's log. Later ones are not logged."""
CLOCK_TRIES = 5
"""Number of readings of both clocks."""
MAX_PATH = 300
"""Maximum length of a module's path."""
_MAX_NAMES = 2_000
"""Maximum number of names that are written: a line of the run directory is limited."""


class CallLog:
    """Calls of nested modules in one thread. The training thread writes them as a flat list, which
    the garbage collector need not look through: a module's class and id, its caller's code and
    line, and the time. An end has no class."""

    def __init__(self) -> None:
        from torch import is_grad_enabled

        self._has_gradients = is_grad_enabled
        self._log: list[Any] = []
        self._count = 0
        self._anchor = _read_clocks()

    def begin(self, module: Any, caller: FrameType | None, *, outermost: bool = False) -> bool:
        """Log that ``caller`` calls a module; return whether ``end`` must follow."""
        if self._count >= MAX_MODULE_CALLS or caller is None:
            return False
        self._count += 1
        if outermost:
            mode = module.__dict__.get("training", True) + 2 * self._has_gradients()
            self._log.extend((_OUTERMOST, id(module), None, mode, 0))
        self._log.extend((type(module), id(module), caller.f_code, caller.f_lineno, now()))
        return True

    def end(self) -> None:
        """Log that the innermost call has ended."""
        self._log.extend((None, 0, None, 0, now()))

    def describe(self, known: Mapping[int, str] = MappingProxyType({})) -> dict[str, Any]:
        """Return the data of a ``calls`` event. ``known``: paths of modules by id; another one gets
        its class below the module around it.

        ``anchor_perf_ns`` and ``anchor_unix_ns`` are the same instant. ``calls`` has the calls by
        begin: level (0 for an outermost call), begin since the anchor, ns, duration, ns, positions
        in ``frames`` of the line that calls and of the ``forward`` (-1 for none), and the position
        in ``modules``. A call that did not end has -1 ns. ``outermost`` has for each of the
        outermost calls: a number for the module, 1 if it is in training mode, 1 if gradients are
        enabled. ``names`` has the names that the code of a ``forward`` reads: its position, the
        name, and the position of the line."""
        frames: dict[str, int] = {}
        modules: dict[str, int] = {}
        calls: list[list[int]] = []
        outermost: list[list[int]] = []
        numbers: dict[int, int] = {}
        open_calls: list[tuple[list[int], str]] = []
        names: dict[type, list[tuple[str, str]]] = {}
        perf_ns, unix_ns = self._anchor
        for kind, key, code, line, time in zip(*(self._log[i::5] for i in range(5)), strict=False):
            if kind is _OUTERMOST:
                open_calls.clear()  # an interrupt may have come before an end
                outermost.append([numbers.setdefault(key, len(numbers)), line & 1, line >> 1])
            elif kind is not None:
                texts = frame_text(code, line or 0), _forward_text(kind)
                caller, forward = (frames.setdefault(t, len(frames)) if t else -1 for t in texts)
                around = f"{open_calls[-1][1]}." if open_calls else ""
                path = known.get(key) or f"{around}{kind.__name__}"[-MAX_PATH:]
                module = modules.setdefault(path, len(modules))
                calls.append([len(open_calls), time - perf_ns, -1, caller, forward, module])
                open_calls.append((calls[-1], path))
                if kind not in names:
                    left = _MAX_NAMES - sum(map(len, names.values()))
                    names[kind] = _names_in_forward(kind)[:left] if left > 0 else []
            elif open_calls:
                call, _ = open_calls.pop()
                call[2] = time - perf_ns - call[1]
        rows = [
            [
                frames.setdefault(_forward_text(kind), len(frames)),
                name,
                frames.setdefault(line, len(frames)),
            ]
            for kind, found in names.items()
            for name, line in found
        ]
        anchor = {"anchor_perf_ns": perf_ns, "anchor_unix_ns": unix_ns}
        data = {"frames": list(frames), "modules": list(modules), "calls": calls, "names": rows}
        return data | anchor | {"outermost": outermost}


def _read_clocks() -> tuple[int, int]:
    """Return the same instant on both clocks, ns: the best of a few tries, in case the thread lost
    its core between two readings."""
    tries = [(now(), time_ns(), now()) for _ in range(CLOCK_TRIES)]
    before, unix, after = min(tries, key=lambda reading: reading[2] - reading[0])
    return (before + after) // 2, unix


_OUTERMOST: Final = object()
"""Mark in the log before an outermost call."""


def _forward_text(kind: type) -> str:
    """Return the frame at which a class's ``forward`` is defined; empty if it is no function."""
    forward = find_function(kind, "forward")
    return "" if forward is None else frame_text(forward.__code__, forward.__code__.co_firstlineno)


def _names_in_forward(kind: type) -> list[tuple[str, str]]:
    """Return the names that a class's ``forward`` reads, with the frames of their lines. Methods
    and functions of the same file that it calls are part of it. Empty for torch's."""
    forward = find_function(kind, "forward")
    if forward is None or kind.__module__.startswith("torch."):
        return []
    result: list[tuple[str, str]] = []
    functions = [forward]
    for function in functions:
        code = function.__code__
        used = used_names(code)
        result += [(name, frame_text(code, line)) for name, line in used]
        for name, _ in used:
            inner = find_function(kind, name) or find_in_file(function.__globals__, name)
            if (
                type(inner) is FunctionType
                and inner.__code__.co_filename == code.co_filename
                and inner not in functions
                and len(functions) < MAX_FUNCTIONS
            ):
                functions.append(inner)
    return result
