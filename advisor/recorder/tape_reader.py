"""Reader of the tape: turns the training thread's entries into phases, steps and loaders. Also a
counter of steps, with which a pass under Scalene and trial runs end after enough steps."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from advisor.recorder import tape
from advisor.recorder.hooks import Hooks, Listener
from advisor.recorder.inference import LEARNING, TRAINING_CODES, InferenceStepFinder
from advisor.recorder.loaders import Loaders
from advisor.recorder.repeated_steps import RepeatedBlock, StepMatcher
from advisor.recorder.steps import StepFinder, StepSegment
from advisor.recorder.tape import (
    ACT_ON_OPTIMIZER_STEP,
    DATA,
    FORWARD,
    MAX_PHASES,
    OPTIMIZER,
    THREAD,
    Clock,
    Tape,
)

OPENING = frozenset((FORWARD, tape.BACKWARD, OPTIMIZER))
"""Phases that can start a step, in addition to the program's own phases."""
ENTRIES_PER_READ = 512
"""Number of entries that the writer's thread reads at once, a few tenths of a millisecond."""
YIELD_SECONDS = 1e-4
"""Sleep of the writer's thread between two reads, s. Otherwise the training thread could wait for
the interpreter for up to its switch interval, 5 ms."""


class TapeReader:
    """Reader of the tape, with a handler for each code. Only one thread may use it at a time.
    ``emit`` gets each step, and ``emit_block`` steps read together; for ``None``, no steps are."""

    def __init__(
        self,
        loaders: Loaders,
        emit: Callable[[StepSegment, int, int], None],
        emit_block: Callable[[RepeatedBlock], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self._emit = emit
        self._emit_block = emit_block
        self.steps = StepFinder(self.clock, self._on_step)
        self._repeats = StepMatcher(self.clock, self.steps)
        self._last_plain_step: tuple[StepSegment, int] | None = None
        """Segment and number of batches of the last step, or ``None`` if it cannot be a pattern."""
        self.loaders = loaders
        self.inference: InferenceStepFinder | None = None
        """Finder of inference steps, or ``None`` once the process has trained."""
        self.on_training: Callable[[], None] | None = None
        """Function to call when ``inference`` ends."""
        self.on_more_forwards: Callable[[int], None] | None = None
        """Function to call with the number of forwards since the last update, after
        ``inference``."""
        self._forwards = 0
        self.memory: Any = None
        """Allocator counters since the last step, or ``None`` if there are none."""
        self.paused = 0
        """Time in garbage collection since the last step, ns."""
        self._optimizer = 0
        self._fetch_began = 0
        self._handlers: dict[int, Callable[[Any], None]] = {
            tape.LEAVE: self.clock.leave, tape.FETCH: self._on_fetch, tape.FETCHED: self._on_batch,
            tape.FETCHED_INSIDE: lambda now: self.steps.on_batch(),
            tape.EXHAUSTED: self._on_exhausted, tape.ITERATE: self.steps.on_iterate,
            tape.ITERATED: self.loaders.on_epoch, tape.LOADER: self.loaders.on_fetch_from,
            tape.BATCH: self.steps.set_batch,
            **{code: partial(self._on_forward_end, code) for code in tape.FORWARDED},
            tape.BACKWARD_END: self._on_backward_end, tape.OPTIMIZED_BY: self._on_optimizer,
            tape.OPTIMIZER_END: self._on_optimizer_end, tape.SAVE: self.steps.on_checkpoint,
            tape.GRADIENTS_USED: self.steps.on_update, tape.BOUNDARY: self.steps.on_step_end,
            tape.BEGIN: self.steps.begin, tape.BREAK_OFF: self.steps.stop,
            tape.ABANDON: self.steps.drop_step, tape.RESET: self.clock.leave_all,
            tape.PAUSE: self._on_pause, tape.MEMORY: self._on_memory,
            tape.CUDA_EVENT: self.steps.add_event,
            tape.MARKS_END: lambda _: self.steps.without_events(), tape.FORWARD_OF: _ignore,
            tape.GENERATE: _ignore, tape.GENERATED: _ignore,
        }  # fmt: skip

    def read(self, taken: list[Any], *, aside: bool = False) -> None:
        """Read entries taken from the tape. ``aside``: in the writer's thread, which reads repeated
        steps together and pauses for other threads."""
        clock, steps, handlers = self.clock, self.steps, self._handlers
        codes, values = taken[::2], taken[1::2]
        if self.inference is not None and not self.inference.read(codes, values):
            self.inference = None
            self._forwards = 0
            if self.on_training is not None:
                self.on_training()
        self._repeats.forget()
        in_blocks = aside and self._emit_block is not None
        count, entry, size = steps.count, 0, len(values)
        next_pause = ENTRIES_PER_READ if aside else size
        while entry < size:
            code, value = codes[entry], values[entry]
            entry += 1
            if code < MAX_PHASES:
                if code == FORWARD and steps.is_undecided:
                    steps.on_forward_start(value)
                if not steps.open and (code in OPENING or code > OPTIMIZER):
                    steps.on_activity(value)
                clock.enter(code, value)
            else:
                handlers[code](value)
                if in_blocks and steps.count != count:
                    entry = self._read_repeats(codes, values, entry, steps.count - count)
                    count = steps.count
            if entry >= next_pause:
                time.sleep(YIELD_SECONDS)
                next_pause = entry + ENTRIES_PER_READ
        if self.inference is None and self.on_more_forwards is not None:
            self._forwards = _count_forwards(codes, self._forwards)
            if self._forwards:
                self.on_more_forwards(self._forwards)

    def _read_repeats(self, codes: list[int], values: list[Any], entry: int, ended: int) -> int:
        """Read repeated steps together, and return the next entry."""
        repeats, steps, clock = self._repeats, self.steps, self.clock
        state = self._get_state(values[entry - 1])
        repeats.ended(state, codes, values, entry, self._last_plain_step if ended == 1 else None)
        while state is not None:
            result = repeats.match(state, codes, values, entry)
            if result is None:
                break
            block, seen, entry = result
            assert self._emit_block is not None
            self._emit_block(block)
            clock.last = block.ends[-1]
            steps.on_repeats(len(block.ends), block.ends[-1], seen)
            repeats.resume(entry)
            time.sleep(YIELD_SECONDS)
        return entry

    def _get_state(self, now: int) -> Hashable:
        """Return all state that affects how the next entries are read, just after a step. Return
        ``None`` if other state affects it too."""
        clock, loaders = self.clock, self.loaders
        step_state = self.steps.state(now)
        if step_state is None or clock.last != now or self.memory is not None or self.paused:
            return None
        return step_state, clock.cur, *clock.stack, loaders.last, loaders.is_undecided

    def _on_step(self, segment: StepSegment, micro: int, gap: int) -> None:
        has_notes = gap or self.steps.unused_graphs or self.paused or segment.marks
        is_plain = not has_notes and self.memory is None
        self._last_plain_step = (segment, micro) if is_plain else None
        self._emit(segment, micro, gap)

    def _on_fetch(self, now: int) -> None:
        self._fetch_began = now
        self.steps.on_fetch(now)
        self.clock.enter(DATA, now)

    def _on_batch(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_batch()

    def _on_exhausted(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_exhausted(now)
        self.loaders.on_exhausted(now - self._fetch_began)

    def _on_forward_end(self, code: int, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_forward(code, now)

    def _on_backward_end(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_backward(now)
        self.loaders.on_training()

    def _on_optimizer(self, optimizer: int) -> None:
        self._optimizer = optimizer

    def _on_optimizer_end(self, now: int) -> None:
        self.clock.leave(now)
        if self.clock.cur != OPTIMIZER:  # else it is inside a scaler or another optimizer
            self.steps.on_optimizer_step(self._optimizer, now)

    def _on_pause(self, length: int) -> None:
        self.paused += length

    def _on_memory(self, counters: Any) -> None:
        self.memory = counters


def _count_forwards(codes: list[Any], before: int) -> int:
    """Return the number of forwards since the last backward or update. ``before``: prior to
    codes."""
    count = 0
    for code in reversed(codes):
        if code in LEARNING or code in TRAINING_CODES:
            return count
        count += code in tape.FORWARDED
    return before + count


def _ignore(_: Any) -> None:
    """Ignore an entry that only ``InferenceStepFinder`` reads."""


log = logging.getLogger("advisor")


class CallCounter(Listener):
    """Listener that only counts the training steps of one thread. ``ended`` is called in the
    training thread with the number of each step as it ends. A SystemExit that it raises reaches the
    program."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.ended = ended
        self.count = 0
        self.tape = Tape()
        self.tape.hook_state[ACT_ON_OPTIMIZER_STEP] = 1
        self.looping: list[Any] = []
        self.loaders = Loaders(lambda kind, data: None)
        self.reader = TapeReader(self.loaders, self._emit)
        self.hooks = Hooks(self)

    def read_tape(self) -> None:
        """Read the tape and count the steps that ended."""
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.on_internal_error(error)

    def on_internal_error(self, error: BaseException) -> None:
        """Stop counting after a failure of our code: the program runs to its end."""
        self.stop()
        log.warning("advisor: steps are not counted: %s", error)

    def start(self) -> None:
        """Install the hooks and count the steps of the calling thread."""
        self.hooks.install()
        self.tape.hook_state[THREAD] = threading.get_ident()

    def stop(self) -> None:
        """Stop counting steps."""
        self.tape.hook_state[THREAD] = -1

    def _emit(self, segment: StepSegment, micro: int, gap: int) -> None:
        if not self.reader.steps.is_backdated:  # a backdated step ended some time ago
            self.count += 1
            self.ended(self.count)
