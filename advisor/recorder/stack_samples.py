"""Sampler of the training thread's Python call stack, without a profiler.

Each sample takes the interpreter from the training thread for some 100 µs. So samples are frequent
only in the first seconds, which cover a short run, and end after some thousand.

A thread that wakes gets the interpreter when the other thread releases it: at once if that thread
waits or computes in C, and after 5 ms if it runs Python. A delay in between means that short Python
code has just ended and a call into C begins, which had no part in the time, so such a sample does
not count. If a call into C keeps the interpreter for longer than the interval between samples, it
counts once per interval.

Frames are read while their thread waits for the interpreter. Without that lock (free-threaded
Python) they may end meanwhile, so nothing is sampled.

A C function that the innermost frame calls is written as a frame below it. The arguments of a loss
in the innermost frame are passed to ``on_loss`` at once."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from advisor.recorder.background import BackgroundThread
from advisor.recorder.built_in_calls import (
    called_function,
    membership_tests,
    operator_function,
)

FAST_SECONDS, FAST_SAMPLES = 0.02, 300
"""Interval between the first samples, s, and their number."""
SLOW_SECONDS, MAX_SAMPLES = 0.1, 1_500
"""Interval between the later samples, s, and the maximum number of all samples."""
WRITE_EVERY = 150
"""Number of samples written together, the maximum that is lost if a run is killed."""
C_DELAY_SECONDS = 0.0005
"""Maximum delay of a sample that interrupted a call into C, s."""
FORCED_SHARE = 0.9
"""Minimum delay of a sample that forced the thread to release the interpreter, as a share of the
interpreter's switch interval. Samples between the two delays are invalid."""
_GOLDEN_RATIO = 0.6180339887498949
"""Step of a sequence that fills 0 to 1 evenly, so samples do not follow the program's rhythm."""
MAX_WEIGHT = 50
"""Maximum number of intervals that one sample counts for."""
MAX_WAKES = 2 * MAX_SAMPLES
_MAX_DEPTH = 100
"""Maximum number of frames in a sample; the innermost ones are kept."""
MAX_STACKS = 400
"""Maximum number of different stacks written together; the most frequent ones are kept."""
_MAX_NAME = 300
MIN_TESTED_SHARE, MAX_TESTS = 0.1, 8
"""Minimum share of the samples in a function that is searched for tests ``x in items``, and maximum
number of tests that are written for it."""
_PACKAGE_FOLDER = str(Path(__file__).absolute().parents[1]) + os.sep
"""Folder of this package, with a trailing separator."""
_PARTS_OF_FUNCTIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
"""Code names that are replaced by the function around them."""

_LOSS_NAMES = ("cross_entropy", "nll_loss")
_LOSS_MODULE = "torch.nn.functional"

Stack = tuple[str, tuple[tuple[CodeType, int], ...]]
"""Call stack: the C function that the innermost frame calls, and the code and line of each frame,
innermost first."""


class StackSampler(BackgroundThread):
    """Daemon thread that samples the stack of ``thread()`` (-1 for no thread) until ``stop``.
    ``write_event`` gets a ``stacks`` event after every ``WRITE_EVERY`` samples and at the end. No
    samples are taken while ``busy()``: a profiler slows down what it watches."""

    name = "stacks"

    def __init__(
        self,
        thread: Callable[[], int],
        busy: Callable[[], bool],
        write_event: Callable[[str, dict[str, Any]], None],
        on_loss: Callable[[Mapping[str, Any]], None] = lambda given: None,
    ) -> None:
        super().__init__()
        self._get_thread = thread
        self._is_busy = busy
        self._write_event = write_event
        self._on_loss = on_loss
        self._stacks: Counter[Stack] = Counter()
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._calls: dict[tuple[CodeType, int, bool], str] = {}
        self._names: dict[CodeType, dict[str, Any]] = {}
        """Globals of the innermost functions of samples."""
        self._tests: dict[CodeType, list[tuple[CodeType, int]]] = {}

    def work(self) -> None:
        """Sample until the end, then write the remaining samples."""
        self._sample_until_stopped()
        self._write()

    def _sample_until_stopped(self) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return
        taken = written = 0
        for wake in range(MAX_WAKES):
            pause = FAST_SECONDS if taken < FAST_SAMPLES else SLOW_SECONDS
            due = time.monotonic() + pause * (0.5 + wake * _GOLDEN_RATIO % 1)
            if self.stop_event.wait(max(0.0, due - time.monotonic())) or taken >= MAX_SAMPLES:
                return
            delay = time.monotonic() - due
            if C_DELAY_SECONDS < delay < FORCED_SHARE * sys.getswitchinterval() or self._is_busy():
                continue
            in_c = delay <= C_DELAY_SECONDS
            taken += self._sample(min(MAX_WEIGHT, 1 + int(delay / pause)), in_c=in_c)
            if taken - written >= WRITE_EVERY:
                written = taken
                self._write()

    def _sample(self, weight: int, *, in_c: bool = False) -> int:
        """Take a sample that counts ``weight`` times. ``in_c``: the thread runs C code, as
        symbols such as ``**`` do with arrays. Return the number of samples taken, 0 or 1."""
        frame = sys._current_frames().get(self._get_thread())
        stack: list[tuple[CodeType, int]] = []
        called = ""
        while frame is not None and len(stack) < _MAX_DEPTH:
            if is_own(frame.f_code):
                if stack and stack[-1][0].co_filename == threading.__file__:
                    return 0  # the recorder waits for one of its own threads to start
            else:
                if not stack:
                    called = self._called_name(frame, in_c)
                    self._names[frame.f_code] = frame.f_globals
                    if _is_loss(frame):
                        self._on_loss(frame.f_locals)
                stack.append((frame.f_code, frame.f_lineno or 0))
            frame = frame.f_back
        if not stack:
            return 0
        self._stacks[called, tuple(stack)] += weight
        return 1

    def _called_name(self, frame: FrameType, in_c: bool) -> str:
        instruction = frame.f_code, frame.f_lasti, in_c
        name = self._calls.get(instruction)
        if name is None:
            name = called_function(frame)[:_MAX_NAME] or (operator_function(frame) if in_c else "")
            self._calls[instruction] = name
        return name

    def _write(self) -> None:
        stacks, self._stacks = self._stacks, Counter()
        if not stacks:
            return
        index: dict[str, int] = {}
        lines: list[list[Any]] = []
        for (called, stack), count in stacks.most_common(MAX_STACKS):
            names = [self._frame_text(*frame) for frame in reversed(stack)]
            if called:
                names.append(f"<built-in function {called}>")
            lines.append([count, [index.setdefault(name, len(index)) for name in names]])
        tests = [
            [index.setdefault(self._frame_text(*frame), len(index)) for frame in pair]
            for pair in self._find_tests(stacks)
        ]
        self._write_event("stacks", {"frames": list(index), "stacks": lines, "tests": tests})

    def _find_tests(self, stacks: Counter[Stack]) -> Iterator[tuple[tuple[CodeType, int], ...]]:
        """Yield functions with many samples of Python, and a test ``x in items`` in each or below
        it, which may look through a list."""
        samples: Counter[CodeType] = Counter()
        for (called, stack), count in stacks.items():
            samples[stack[0][0]] += 0 if called else count
        names, self._names = self._names, {}
        for code, count in samples.items():
            if count < MIN_TESTED_SHARE * stacks.total():
                continue
            if code not in self._tests:
                self._tests[code] = membership_tests(code, names.get(code, {}))
            for test in self._tests[code][:MAX_TESTS]:
                yield (code, code.co_firstlineno), test

    def _frame_text(self, code: CodeType, line: int) -> str:
        text = self._texts.get((code, line))
        if text is None:
            text = self._texts[code, line] = frame_text(code, line)
        return text


def frame_text(code: CodeType, line: int) -> str:
    """Return a frame's text as PyTorch's profiler writes it: ``train.py(12): log``."""
    function = code.co_qualname.replace(".<locals>", "")
    for part in _PARTS_OF_FUNCTIONS:
        function = function.replace(f".{part}", "").replace(part, "<module>")
    return f"{without_search_path(code.co_filename)}({line}): {function}"[:_MAX_NAME]


def is_own(code: CodeType) -> bool:
    """Return whether code belongs to the recorder or the launcher, not to the program."""
    return code.co_filename.startswith((_PACKAGE_FOLDER, "<frozen runpy>"))


def _is_loss(frame: FrameType) -> bool:
    """Return whether a frame is one of PyTorch's losses over class numbers."""
    return frame.f_code.co_name in _LOSS_NAMES and frame.f_globals.get("__name__") == _LOSS_MODULE


def without_search_path(file: str) -> str:
    """Return a file's path without the longest entry of ``sys.path`` at its start."""
    entries = (os.path.join(entry, "") for entry in sys.path if entry)  # noqa: PTH118
    longest = max((entry for entry in entries if file.startswith(entry)), key=len, default="")
    return file.removeprefix(longest)
