"""Sampler of the training thread's Python call stack, without a profiler.

Waking for a sample takes the interpreter from the training thread for some 100 µs. So samples are
frequent in the first seconds only, of which a short run consists, and end after some thousand.

A thread that wakes gets the interpreter when the other one gives it up: at once where that waits or
computes in C, after 5 ms where it runs Python. In between it gets it where short Python code ends
and the next call into C begins, which had no part in the time; such samples do not count. A call
into C that keeps the interpreter for longer than the time between samples counts once for each of
them.

Frames are read while their thread waits for the interpreter. Without that lock (a free-threaded
Python) they may end meanwhile, so nothing is sampled there.

What the innermost frame calls in C is written as a frame below it. Arguments of losses that it
meets are handed to ``on_loss``, at once."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from advisor.recorder.background import BackgroundThread
from advisor.recorder.built_in_calls import called_function

FAST_SECONDS, FAST_SAMPLES = 0.02, 300
"""Interval of the first samples, s, and their number."""
SLOW_SECONDS, MAX_SAMPLES = 0.1, 1_500
"""Interval of the later samples, s, and the most samples in all."""
WRITE_EVERY = 150
"""Samples written together: the most that is lost if a run is killed."""
AT_ONCE = 0.0005
"""Maximum delay of a sample that interrupted a call into C, s."""
FORCED = 0.9
"""Minimum delay of a sample that forced the thread to release the interpreter, as a share of the
interpreter's switch interval. Samples between the two delays are invalid."""
_GOLDEN = 0.6180339887498949
"""Step of a sequence that fills 0 to 1 evenly: times of samples follow no rhythm of the program."""
MAX_WEIGHT = 50
"""Most intervals that one sample counts for."""
MAX_WAKES = 2 * MAX_SAMPLES
MAX_DEPTH = 100
"""Most frames of a sample, the innermost ones."""
MAX_STACKS = 400
"""Most different stacks written together, those with the most samples."""
MAX_NAME = 300
_OWN = str(Path(__file__).absolute().parents[1]) + os.sep
"""Folder of this package, with a final separator."""
_PARTS_OF_FUNCTIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
"""Code names that are shown as the function around them."""

_LOSSES = ("cross_entropy", "nll_loss")
_FUNCTIONAL = "torch.nn.functional"

Stack = tuple[str, tuple[tuple[CodeType, int], ...]]
"""Call stack: what the innermost frame calls in C; code and line of each frame, the innermost
first."""


class StackSampler(BackgroundThread):
    """Daemon thread that samples the stack of ``thread()`` (-1: of none, for now) until ``stop``.
    ``write_event`` gets a ``stacks`` event for every ``WRITE_EVERY`` samples and at the end. While
    ``busy()``, none is taken: a profiler lengthens what it watches."""

    name = "stacks"

    def __init__(
        self,
        thread: Callable[[], int],
        busy: Callable[[], bool],
        write_event: Callable[[str, dict[str, Any]], None],
        on_loss: Callable[[Mapping[str, Any]], None] = lambda given: None,
    ) -> None:
        super().__init__()
        self._watched = thread
        self._busy = busy
        self._write_event = write_event
        self._on_loss = on_loss
        self._stacks: Counter[Stack] = Counter()
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._calls: dict[tuple[CodeType, int], str] = {}

    def work(self) -> None:
        """Sample until the end, then write the remaining samples."""
        self._loop()
        self._write()

    def _loop(self) -> None:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return
        taken = written = 0
        for wake in range(MAX_WAKES):
            pause = FAST_SECONDS if taken < FAST_SAMPLES else SLOW_SECONDS
            due = time.monotonic() + pause * (0.5 + wake * _GOLDEN % 1)
            if self.stop_event.wait(max(0.0, due - time.monotonic())) or taken >= MAX_SAMPLES:
                return
            late = time.monotonic() - due
            if AT_ONCE < late < FORCED * sys.getswitchinterval() or self._busy():
                continue
            taken += self._sample(min(MAX_WEIGHT, 1 + int(late / pause)))
            if taken - written >= WRITE_EVERY:
                written = taken
                self._write()

    def _sample(self, weight: int) -> int:
        """Take a sample that counts ``weight`` times; return how many were taken, 0 or 1."""
        frame = sys._current_frames().get(self._watched())
        stack: list[tuple[CodeType, int]] = []
        called = ""
        while frame is not None and len(stack) < MAX_DEPTH:
            if is_own(frame.f_code):
                if stack and stack[-1][0].co_filename == threading.__file__:
                    return 0  # the recorder waits for a thread of its own to start
            else:
                if not stack:
                    called = self._called(frame)
                    if _is_loss(frame):
                        self._on_loss(frame.f_locals)
                stack.append((frame.f_code, frame.f_lineno or 0))
            frame = frame.f_back
        if not stack:
            return 0
        self._stacks[called, tuple(stack)] += weight
        return 1

    def _called(self, frame: FrameType) -> str:
        place = frame.f_code, frame.f_lasti
        known = self._calls.get(place)
        if known is None:
            known = self._calls[place] = called_function(frame)[:MAX_NAME]
        return known

    def _write(self) -> None:
        stacks, self._stacks = self._stacks, Counter()
        if not stacks:
            return
        index: dict[str, int] = {}
        lines: list[list[Any]] = []
        for (called, stack), count in stacks.most_common(MAX_STACKS):
            names = [self._text(*place) for place in reversed(stack)]
            if called:
                names.append(f"<built-in function {called}>")
            lines.append([count, [index.setdefault(name, len(index)) for name in names]])
        self._write_event("stacks", {"frames": list(index), "stacks": lines})

    def _text(self, code: CodeType, line: int) -> str:
        known = self._texts.get((code, line))
        if known is None:
            known = self._texts[code, line] = frame_text(code, line)
        return known


def frame_text(code: CodeType, line: int) -> str:
    """Return a frame's text as PyTorch's profiler writes it: ``train.py(12): log``."""
    function = code.co_qualname.replace(".<locals>", "")
    for part in _PARTS_OF_FUNCTIONS:
        function = function.replace(f".{part}", "").replace(part, "<module>")
    return f"{without_search_path(code.co_filename)}({line}): {function}"[:MAX_NAME]


def is_own(code: CodeType) -> bool:
    """Return whether code is the recorder's or started the program: no line of the program's."""
    return code.co_filename.startswith((_OWN, "<frozen runpy>"))


def _is_loss(frame: FrameType) -> bool:
    """Return whether a frame is a loss of PyTorch's over numbers of classes."""
    return frame.f_code.co_name in _LOSSES and frame.f_globals.get("__name__") == _FUNCTIONAL


def without_search_path(file: str) -> str:
    """Return a file's name without the longest entry of ``sys.path`` in front of it."""
    entries = (os.path.join(entry, "") for entry in sys.path if entry)  # noqa: PTH118
    longest = max((entry for entry in entries if file.startswith(entry)), key=len, default="")
    return file.removeprefix(longest)
