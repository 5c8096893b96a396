"""Reads the tape: what the training thread noted, in order, becomes phases, steps and loaders. And
counts steps, to leave the process after enough of them: the pass under Scalene, and programs that
are only tried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from advisor.recorder import clock as tape
from advisor.recorder.clock import DATA, FORWARD, MAX_PHASES, ONLINE, OPTIMIZER, THREAD, Clock, Tape
from advisor.recorder.hooks import Hooks, Listener
from advisor.recorder.inference import LEARNING, LEARNT, Inference
from advisor.recorder.loaders import Loaders
from advisor.recorder.repeated_steps import RepeatedBlock, StepMatcher
from advisor.recorder.steps import StepFinder, StepSegment

OPENING = frozenset((FORWARD, tape.BACKWARD, OPTIMIZER))
"""Phases that a step may begin with, besides those of the user's own."""
ENTRIES_PER_READ = 512
"""Entries that are read at a stretch in a thread of our own, a few tenths of a millisecond …"""
BREATH_SECONDS = 1e-4
"""… until it sleeps so long: else the training thread could wait for the interpreter up to its
switch interval, 5 ms."""


class TapeReader:
    """Handlers by code. Not to be used in two threads at once. ``emit`` is called with each step,
    ``emit_block`` with those that were read together (``None``: none are)."""

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
        """The step that ended last, if it is one that may be a pattern."""
        self.loaders = loaders
        self.inference: Inference | None = None
        """Looks for the steps of a loop that does not train, until something is learnt."""
        self.on_training: Callable[[], None] | None = None
        """Called when that happens."""
        self.on_more_forwards: Callable[[int], None] | None = None
        """Called with the forwards since anything was learnt, once ``inference`` is gone."""
        self._forwards = 0
        self.memory: Any = None
        """The allocator's counters since the last step."""
        self.paused = 0
        """Garbage collection since the last step, ns."""
        self._optimizer = 0
        self._fetch_began = 0
        self._handlers: dict[int, Callable[[Any], None]] = {
            tape.LEAVE: self.clock.leave,
            tape.FETCH: self._fetch,
            tape.FETCHED: self._fetched,
            tape.FETCHED_INSIDE: lambda now: self.steps.on_batch(),
            tape.EXHAUSTED: self._exhausted,
            tape.ITERATE: self.steps.on_iterate,
            tape.ITERATED: self.loaders.on_epoch,
            tape.LOADER: self.loaders.on_fetch_from,
            tape.BATCH: self.steps.batch,
            **{code: partial(self._forward_end, code) for code in tape.FORWARDED},
            tape.BACKWARD_END: self._backward_end,
            tape.OPTIMIZED_BY: self._optimized_by,
            tape.OPTIMIZER_END: self._optimizer_end,
            tape.SAVE: self.steps.on_checkpoint,
            tape.APPLIED: self.steps.on_update,
            tape.BOUNDARY: self.steps.on_step_end,
            tape.BEGIN: self.steps.begin,
            tape.BREAK_OFF: self.steps.stop,
            tape.ABANDON: self.steps.drop_step,
            tape.RESET: self.clock.leave_all,
            tape.PAUSE: self._pause,
            tape.MEMORY: self._memory,
            tape.MARK: self.steps.add_event,
            tape.MARKS_END: lambda _: self.steps.without_events(),
            tape.FORWARD_OF: _pass,
            tape.GENERATE: _pass,
            tape.GENERATED: _pass,
        }

    def read(self, taken: list[Any], *, aside: bool = False) -> None:
        """Go through what was cut off the tape. ``aside``: in a thread of our own, which reads
        steps that repeat together, and lets the others run now and then."""
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
                    steps.active(value)
                clock.enter(code, value)
            else:
                handlers[code](value)
                if in_blocks and steps.count != count:
                    entry = self._follow(codes, values, entry, steps.count - count)
                    count = steps.count
            if entry >= next_pause:
                time.sleep(BREATH_SECONDS)
                next_pause = entry + ENTRIES_PER_READ
        if self.inference is None and self.on_more_forwards is not None:
            self._forwards = _forwards_since(codes, self._forwards)
            if self._forwards:
                self.on_more_forwards(self._forwards)

    def _follow(self, codes: list[int], values: list[Any], entry: int, ended: int) -> int:
        """Read on as far as steps repeat; the entry that comes next."""
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
            time.sleep(BREATH_SECONDS)
        return entry

    def _state(self, now: int) -> Hashable:
        """What decides how the next entries are read, when a step has ended just now; ``None``:
        more than that says."""
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
    """Forwards since anything was learnt; ``before``: those before these entries."""
    count = 0
    for code in reversed(codes):
        if code in LEARNING or code in LEARNT:
            return count
        count += code in tape.FORWARDED
    return before + count


def _pass(_: Any) -> None:
    """An entry that only ``Inference`` reads."""


log = logging.getLogger("advisor")


class CallCounter(Listener):
    """Listens, keeps nothing; loops that do not train and other threads are left alone. ``ended``
    is called with the number of each step as it ends, in the training thread; what it raises that
    is no Exception goes through to the program."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self.ended = ended
        self.count = 0
        self.tape = Tape()
        self.tape.here[ONLINE] = 1
        self.looping: list[Any] = []
        self.loaders = Loaders(lambda kind, data: None)
        self.reader = TapeReader(self.loaders, self._emit)
        self.hooks = Hooks(self)

    def read_tape(self) -> None:
        """Read the tape."""
        try:
            self.reader.read(self.tape.take())
        except Exception as error:
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Something of ours failed: let the program run to its end."""
        self.stop()
        log.warning("advisor: steps are not counted: %s", error)

    def start(self) -> None:
        """Count the steps of the calling thread."""
        self.hooks.install()
        self.tape.here[THREAD] = threading.get_ident()

    def stop(self) -> None:
        """Count no further calls."""
        self.tape.here[THREAD] = -1

    def _emit(self, segment: StepSegment, micro: int, gap: int) -> None:
        if not self.reader.steps.late:  # else it ended some time ago
            self.count += 1
            self.ended(self.count)
