"""Reader of the tape: turns the training thread's entries into phases, steps and loaders. Also a
counter of steps that ends the process after enough of them: for the pass under Scalene and trial
runs."""

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
"""Phases that a step may begin with, besides phases of the program's own."""
ENTRIES_PER_READ = 512
"""Entries read at a time in the writer's thread, a few tenths of a millisecond …"""
YIELD_SECONDS = 1e-4
"""… before it sleeps this long, s. Otherwise the training thread could wait for the interpreter up
to its switch interval, 5 ms."""


class TapeReader:
    """Reader of the tape, with a handler for each code. Not for use in two threads at once.
    ``emit`` gets each step, ``emit_block`` steps read together (``None``: none are)."""

    def __init__(
        self,
        loaders: Loaders,
        emit: Callable[[StepSegment, int, int], None],
        emit_block: Callable[[RepeatedBlock], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self._emit = emit
        self._emit_block = emit_block
        self.steps = StepFinder(self.clock, self._ended)
        self._repeats = StepMatcher(self.clock, self.steps)
        self._found: tuple[StepSegment, int] | None = None
        """Segment and batches of the last step, if it can be a pattern; else ``None``."""
        self.loaders = loaders
        self.inference: InferenceStepFinder | None = None
        """Finder of inference steps; ``None`` once the process has trained."""
        self.on_training: Callable[[], None] | None = None
        """Function called when ``inference`` ends."""
        self.on_more_forwards: Callable[[int], None] | None = None
        """Function called with the forwards since the last update, once ``inference`` ended."""
        self._forwards = 0
        self.memory: Any = None
        """Allocator counters since the last step; ``None`` if there are none."""
        self.paused = 0
        """Time in garbage collection since the last step, ns."""
        self._optimizer = 0
        self._fetch_began = 0
        self._handlers: dict[int, Callable[[Any], None]] = {
            tape.LEAVE: self.clock.leave, tape.FETCH: self._fetch, tape.FETCHED: self._fetched,
            tape.FETCHED_INSIDE: lambda now: self.steps.on_batch(),
            tape.EXHAUSTED: self._exhausted, tape.ITERATE: self.steps.on_iterate,
            tape.ITERATED: self.loaders.on_epoch, tape.LOADER: self.loaders.on_fetch_from,
            tape.BATCH: self.steps.set_batch,
            **{code: partial(self._forward_end, code) for code in tape.FORWARDED},
            tape.BACKWARD_END: self._backward_end, tape.OPTIMIZED_BY: self._optimized_by,
            tape.OPTIMIZER_END: self._optimizer_end, tape.SAVE: self.steps.on_checkpoint,
            tape.APPLIED: self.steps.on_update, tape.BOUNDARY: self.steps.on_step_end,
            tape.BEGIN: self.steps.begin, tape.BREAK_OFF: self.steps.stop,
            tape.ABANDON: self.steps.drop_step, tape.RESET: self.clock.leave_all,
            tape.PAUSE: self._pause, tape.MEMORY: self._memory,
            tape.CUDA_EVENT: self.steps.add_event,
            tape.MARKS_END: lambda _: self.steps.without_events(), tape.FORWARD_OF: _pass,
            tape.GENERATE: _pass, tape.GENERATED: _pass,
        }  # fmt: skip

    def read(self, taken: list[Any], *, aside: bool = False) -> None:
        """Read a piece cut off the tape. ``aside``: in the writer's thread, where repeated steps
        are read together and other threads get pauses."""
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
                    entry = self._follow(codes, values, entry, steps.count - count)
                    count = steps.count
            if entry >= next_pause:
                time.sleep(YIELD_SECONDS)
                next_pause = entry + ENTRIES_PER_READ
        if self.inference is None and self.on_more_forwards is not None:
            self._forwards = _forwards_since(codes, self._forwards)
            if self._forwards:
                self.on_more_forwards(self._forwards)

    def _follow(self, codes: list[int], values: list[Any], entry: int, ended: int) -> int:
        """Read repeated steps together; return the next entry."""
        repeats, steps, clock = self._repeats, self.steps, self.clock
        state = self._state(values[entry - 1])
        repeats.ended(state, codes, values, entry, self._found if ended == 1 else None)
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

    def _state(self, now: int) -> Hashable:
        """Return the state that decides how the next entries are read, just after a step ended;
        ``None`` if more decides it."""
        clock, loaders = self.clock, self.loaders
        of_steps = self.steps.state(now)
        if of_steps is None or clock.last != now or self.memory is not None or self.paused:
            return None
        return of_steps, clock.cur, *clock.stack, loaders.last, loaders.is_undecided

    def _ended(self, segment: StepSegment, micro: int, gap: int) -> None:
        noted = gap or self.steps.unused_graphs or self.paused or segment.marks
        plain = not noted and self.memory is None
        self._found = (segment, micro) if plain else None
        self._emit(segment, micro, gap)

    def _fetch(self, now: int) -> None:
        self._fetch_began = now
        self.steps.on_fetch(now)
        self.clock.enter(DATA, now)

    def _fetched(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_batch()

    def _exhausted(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_exhausted(now)
        self.loaders.on_exhausted(now - self._fetch_began)

    def _forward_end(self, code: int, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_forward(code, now)

    def _backward_end(self, now: int) -> None:
        self.clock.leave(now)
        self.steps.on_backward(now)
        self.loaders.on_training()

    def _optimized_by(self, optimizer: int) -> None:
        self._optimizer = optimizer

    def _optimizer_end(self, now: int) -> None:
        self.clock.leave(now)
        if self.clock.cur != OPTIMIZER:  # else a scaler or another optimizer is around it
            self.steps.on_optimizer_step(self._optimizer, now)

    def _pause(self, length: int) -> None:
        self.paused += length

    def _memory(self, counters: Any) -> None:
        self.memory = counters


def _forwards_since(codes: list[Any], before: int) -> int:
    """Return the forwards since the last backward or update; ``before``: those before ``codes``."""
    count = 0
    for code in reversed(codes):
        if code in LEARNING or code in TRAINING_CODES:
            return count
        count += code in tape.FORWARDED
    return before + count


def _pass(_: Any) -> None:
    """Ignore an entry that only ``InferenceStepFinder`` reads."""


log = logging.getLogger("advisor")


class CallCounter(Listener):
    """Listener that counts training steps of one thread and keeps nothing. ``ended`` gets each
    step's number as it ends, in the training thread. What it raises that is no Exception passes
    through to the program."""

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
        """Stop counting after a failure of ours: the program runs to its end."""
        self.stop()
        log.warning("advisor: steps are not counted: %s", error)

    def start(self) -> None:
        """Install the hooks and count the steps of the calling thread."""
        self.hooks.install()
        self.tape.hook_state[THREAD] = threading.get_ident()

    def stop(self) -> None:
        """Count no further steps."""
        self.tape.hook_state[THREAD] = -1

    def _emit(self, segment: StepSegment, micro: int, gap: int) -> None:
        if not self.reader.steps.is_backdated:  # else it ended some time ago
            self.count += 1
            self.ended(self.count)
