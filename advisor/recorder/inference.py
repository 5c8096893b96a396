"""Finder of the steps of a loop that does not train: repeated forwards, with or without a loader.

It reads the same tape as ``steps``, in parallel, until the process trains (a backward, an optimizer
step) or the program marks where steps end. If training steps are found, the inference steps before
them were validation and are dropped. So they are written to a separate file (``inference.jsonl``)
and never affect the record of training. If many forwards follow a short training, the session
starts a new search (``RecordingSession._retry_inference``).

- With a loader, a step lasts from one fetch to the next, with any number of forwards.
- Without a loader, a step lasts from the end of the previous step to the end of an outermost
  forward. If several modules take turns (encoder, decoder), the first one that repeats ends it.
- A call of ``generate`` is one forward, whatever it calls. If calls are long, each forward in them
  counts: a step is a generated token, so that a short run has enough steps.

Modules without parameters and submodules (transforms, losses) are not counted. But if only such
modules are called and several take turns, they form a model whose functions use the weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from advisor.recorder import tape
from advisor.recorder.steps import MAX_EVENTS
from advisor.recorder.tape import BACKWARD, DATA, FORWARD, MAX_PHASES, OPTIMIZER, Clock

MIN_LOOP_STEPS = 3
"""Minimum number of steps in a loop: a model called once or twice is only tested."""
_MAX_PARTS = 1024
"""Maximum number of forwards kept while it is unknown which step they belong to."""
MIN_LOOP_FORWARDS = 64
"""Minimum number of forwards since a fetch in a loop that fetches nothing (``x =
next(iter(loader))`` before it)."""
_MIN_FORWARD_RATIO = 4
"""Minimum ratio of these forwards to the forwards of an earlier step."""
MAX_CYCLE = 512
"""Maximum number of calls in a repeated cycle of modules without parameters."""
MAX_PREFETCHED = 8
"""Maximum number of batches fetched without a forward, beyond the number of steps. With more, the
search ends: something unseen works on them, perhaps training."""

LONG_CALL_NS = 1_000_000_000
"""Minimum length of a ``generate`` call after its first forward, ns, whose forwards are steps."""
MAX_UNSPLIT_FORWARDS = 3
"""Maximum number of forwards in a ``generate`` call whose forwards are not steps."""

LEARNING = frozenset((BACKWARD, OPTIMIZER))
TRAINING_CODES = frozenset(
    (
        tape.BACKWARD_END, tape.OPTIMIZED_BY, tape.OPTIMIZER_END, tape.GRADIENTS_USED,
        tape.BOUNDARY, tape.BEGIN, tape.BREAK_OFF, tape.FETCHED_INSIDE,
    )
)  # fmt: skip
LEAVING = tape.FORWARDED | {tape.LEAVE}


class InferencePart(NamedTuple):
    """Interval between the ends of two forwards, ns."""

    t: int
    end: int
    phases: list[int]
    module: int
    forwards: int
    """Number of forwards in the interval, above 1 for a call of ``generate``."""


class InferenceStep(NamedTuple):
    """Step of a loop that does not train, with times in ns."""

    n: int
    t: int
    end: int
    phases: list[int]
    batches: list[Any]
    """Note on each batch."""
    forwards: int
    is_backdated: bool
    """True if the step was only recognised after it had ended."""
    delimited_by_forward: bool
    """True if only a forward shows where the step ended, not a fetch or ``generate``."""
    gc: int
    memory: Any
    graphs: int
    """Number of forwards in evaluation mode that made a graph."""
    marks: Any = None
    """CUDA events, each with the phase that it begins, or ``None`` if incomplete."""


class InferenceStepFinder:
    """Finder of inference steps. ``emit`` gets each step. ``module_calls_suspended`` returns
    whether forwards are not recorded now. ``on_restart`` is called with the reason if the steps so
    far did not run a model or were too long, before other steps follow. ``splits_calls``: whether
    the forwards of long ``generate`` calls are steps."""

    def __init__(
        self,
        emit: Callable[[InferenceStep], None],
        module_calls_suspended: Callable[[], bool],
        on_restart: Callable[[str], None],
        *,
        splits_calls: bool = True,
    ) -> None:
        self._emit = emit
        self._module_calls_suspended = module_calls_suspended
        self._on_restart = on_restart
        self._splits_calls = splits_calls
        self._steps_are_tokens = False
        """True once forwards in ``generate`` are steps."""
        self._parameterless: list[int] | None = []
        """Modules without parameters, in call order, or ``None`` once it is known whether they
        count."""
        self._only_parameterless = False
        """True if modules without parameters count, because no other module is called."""
        self.count = 0
        """Number of steps emitted."""
        self._clock = Clock()
        self._unconfirmed: list[InferenceStep] = []
        self._parts: list[InferencePart] = []
        self._batches: list[Any] = []
        self._begin_ns = 0
        self._open = False
        self._outside_loader = True
        self._fetched_batches = 0
        """Number of batches fetched since the loader was last iterated."""
        self._prefetched = 0
        self._max_parts = 0
        """Maximum number of parts in a step of a loader's loop."""
        self._turns: dict[int, int] = {}
        self._primary: int | None = None
        self._open_calls = 0
        """Number of open ``generate`` calls."""
        self._call_forwards = 0
        """Number of forwards in the open ``generate`` calls."""
        self._first_token_ns = 0
        """End of the first forward in them, ns."""
        self._ended_by_generate = False
        self._gc = self._graphs = 0
        self._memory: Any = None
        self._marks: list[Any] = []
        """CUDA events since the step began if ``_marks_complete``, else the latest ones."""
        self._marks_complete = False

    def start(self, now: int) -> None:
        """Start, with no phase open, at ``now``, ns."""
        self._clock.start(now)
        self._reset(now)

    def read(self, codes: list[int], values: list[Any]) -> bool:
        """Read entries of the tape. Return false if the process trains, or may train unseen: then
        do not call this again."""
        clock = self._clock
        for code, value in zip(codes, values, strict=True):
            if code < MAX_PHASES:
                if code in LEARNING:
                    return False
                if not self._open and (code == FORWARD or code > OPTIMIZER):
                    self._begin_step(value)
                clock.enter(code, value)
            elif code in LEAVING:
                clock.leave(value)
                self._graphs += code == tape.FORWARD_END_EVALUATION
            elif code in TRAINING_CODES:
                return False
            elif code == tape.FORWARD_OF:
                self._on_forward(value)
            elif code == tape.FETCH:
                self._on_fetch(value)
            elif code == tape.FETCHED:
                clock.leave(value)
                self._fetched_batches += 1
                self._batches.append(None)
            elif code == tape.BATCH:
                if self._batches:
                    self._batches[-1] = value
            elif code == tape.CUDA_EVENT:
                self._marks.append(value)
                if len(self._marks) > MAX_EVENTS:
                    self._drop_marks()
            elif code == tape.MARKS_END:
                self._drop_marks()
            elif code == tape.GENERATE:
                if not self._open:
                    self._begin_step(value)
                    self._drop_marks()  # the latest event is older
                self._open_calls += 1
            elif code == tape.GENERATED:
                self._on_generate_end(value)
            elif code == tape.EXHAUSTED:
                clock.leave(value)
                self._leave_loader(value)
            elif code == tape.ITERATE:
                self._break_off()
                self._batches.clear()
                self._leave_loader(value)
                self._fetched_batches = 0
            elif code in (tape.RESET, tape.ABANDON):
                clock.leave_all(value)
                self._reset(value)
            elif code == tape.PAUSE:
                self._gc += value
            elif code == tape.MEMORY:
                self._memory = value
            if self._prefetched > MAX_PREFETCHED + self.count + len(self._unconfirmed):
                return False
        return True

    def finish(self) -> None:
        """Finish or pause the recording, and keep a step whose forward has ended."""
        if self._open_calls:
            self._open_calls = 1
            self._on_generate_end(self._clock.last)
        self._break_off()
        self._reset(self._clock.last)

    # -- internals ------------------------------------------------------------------------------

    def _drop_marks(self) -> None:
        self._marks = []
        self._marks_complete = False

    def _cut_marks(self) -> list[Any] | None:
        """Return the step's events, or ``None`` if incomplete. The last one starts the next
        step."""
        marks = self._marks if self._marks_complete and len(self._marks) > 1 else None
        self._marks = self._marks[-1:]
        self._marks_complete = bool(self._marks)
        return marks

    def _begin_step(self, now: int) -> None:
        self._cut_marks()
        self._clock.cut(now)
        self._begin_ns = now
        self._open = True

    def _reset(self, now: int) -> None:
        self._parts.clear()
        self._batches.clear()
        self._leave_loader(now)
        self._open_calls = self._call_forwards = 0

    def _leave_loader(self, now: int) -> None:
        self._clock.cut(now)
        self._parts.clear()
        self._open = False
        self._outside_loader = True

    def _on_fetch(self, now: int) -> None:
        if self._steps_are_tokens:  # a batch of prompts: tokens are steps
            self._clock.enter(DATA, now)
            return
        looping = self.count and not self._outside_loader and self._batches
        if self._outside_loader:
            self._parts.clear()
            self._begin_step(now)
        elif self._parts or (looping and self._module_calls_suspended()):
            self._end_batch(now)
        elif self._batches:
            self._prefetched += 1  # a prefetched batch: the step continues
        else:
            self._begin_step(now)
        self._outside_loader = False
        self._open = True
        self._clock.enter(DATA, now)

    def _on_forward(self, module: int) -> None:
        """Handle a forward that ended at the previous entry's time."""
        if module < 0:
            if self._parameterless is not None:
                self._parameterless.append(module)
                self._only_parameterless = _is_cycle(self._parameterless)
                self._parameterless = (
                    None
                    if self._only_parameterless
                    else self._parameterless[-MIN_LOOP_STEPS * MAX_CYCLE :]
                )
            if not self._only_parameterless:
                return
        elif self._only_parameterless or self._parameterless is not None:
            self._restart_at_model()
        if self._open_calls and not self._steps_are_tokens:
            self._count_token(self._clock.last)
            return
        self._ended_by_generate = False
        self._add_part(self._clock.last, module, 1)

    def _restart_at_model(self) -> None:
        """Drop the steps so far at the first call of a model, whose input they prepared."""
        self._parameterless, self._only_parameterless = None, False
        self._primary = None
        self._turns.clear()
        self._parts.clear()
        self._unconfirmed.clear()
        if self.count:
            self.count = 0
            self._on_restart("the model's forwards began after it")

    def _count_token(self, now: int) -> None:
        """Count a forward in ``generate``. If the call is long, forwards are steps from now on."""
        self._call_forwards += 1
        if self._call_forwards == 1:
            self._first_token_ns = now
        is_long = (
            self._call_forwards > MAX_UNSPLIT_FORWARDS and now - self._first_token_ns > LONG_CALL_NS
        )
        if not is_long or not self._splits_calls:
            return
        self._steps_are_tokens, self._call_forwards, self._primary = True, 0, None
        self._turns.clear()
        self._unconfirmed.clear()
        self._leave_loader(now)
        self._begin_step(now)
        self._clock.enter_between_steps()
        if self.count:
            self.count = 0
            self._on_restart("its steps are calls of generate, which are long")

    def _on_generate_end(self, now: int) -> None:
        self._open_calls = max(0, self._open_calls - 1)
        if not self._open_calls and self._call_forwards:
            forwards, self._call_forwards = self._call_forwards, 0
            self._ended_by_generate = True
            self._add_part(now, -1, forwards)

    def _add_part(self, now: int, module: int, forwards: int) -> None:
        self._cut_part(now, module, forwards)
        if self._outside_loader:
            self._end_turn(self._parts[-1])
        elif len(self._parts) >= max(MIN_LOOP_FORWARDS, _MIN_FORWARD_RATIO * self._max_parts):
            self._split_into_turns()

    def _cut_part(self, now: int, module: int, forwards: int) -> None:
        """End a part. The time in a phase that the program opened counts up to here."""
        phases = self._clock.cut(now)
        self._parts.append(InferencePart(self._begin_ns, now, phases, module, forwards))
        self._begin_ns = now
        if self._outside_loader:
            self._clock.enter_between_steps()
        if len(self._parts) > _MAX_PARTS:
            del self._parts[0]
            self._drop_marks()

    def _end_turn(self, part: InferencePart, is_backdated: bool = False) -> None:
        """End the step outside a loader's loop, if the module is the primary one."""
        module, turns = part.module, self._turns
        turns[module] = turns.get(module, 0) + 1
        if self._primary is None or (module != self._primary and turns[module] > 1):
            self._primary = module
        if len(turns) > _MAX_PARTS:
            turns.clear()
        if module == self._primary:
            turns.clear()
            parts, self._parts = self._parts, []
            self._emit_step(parts, part.end, is_backdated)

    def _split_into_turns(self) -> None:
        """Split an apparent step into the steps of a loop that fetches nothing."""
        parts, self._parts = self._parts, []
        self._outside_loader = True
        for part in parts:
            self._parts.append(part)
            self._end_turn(part, is_backdated=True)
        self._clock.enter_between_steps()

    def _end_batch(self, now: int) -> None:
        """End a part and the step, because work on a batch has ended."""
        parts, self._parts = self._parts, []
        self._max_parts = max(self._max_parts, len(parts))
        parts.append(InferencePart(self._begin_ns, now, self._clock.cut(now), 0, 0))
        self._begin_ns = now
        self._emit_step(parts, now, is_backdated=False)

    def _break_off(self) -> None:
        """End the last step at its last forward, because the program left the loop."""
        if self._outside_loader or not self._parts:
            return
        if self._fetched_batches == 1 and len(self._parts) >= MIN_LOOP_STEPS:
            self._split_into_turns()
            return
        parts, self._parts = self._parts, []
        self._emit_step(parts, parts[-1].end, is_backdated=True)

    def _emit_step(self, parts: list[InferencePart], end: int, is_backdated: bool) -> None:
        phases = [sum(column) for column in zip(*(part.phases for part in parts), strict=True)]
        batches, self._batches = self._batches, []
        forwards = sum(part.forwards for part in parts)
        delimited_by_forward = self._outside_loader and not self._ended_by_generate
        marks = self._cut_marks()
        step = InferenceStep(
            self.count + len(self._unconfirmed), parts[0].t, end, phases, batches, forwards,
            is_backdated, delimited_by_forward, self._gc, self._memory, self._graphs,
            None if is_backdated else marks,
        )  # fmt: skip
        self._gc, self._memory, self._graphs = 0, None, 0
        if self.count:
            self.count += 1
            self._emit(step)
            return
        self._unconfirmed.append(step._replace(marks=None))
        if len(self._unconfirmed) >= MIN_LOOP_STEPS:
            unconfirmed, self._unconfirmed = self._unconfirmed, []
            for result in unconfirmed:
                self.count += 1
                self._emit(
                    result._replace(is_backdated=is_backdated or result is not unconfirmed[-1])
                )


def _is_cycle(modules: list[int]) -> bool:
    """Return whether the last calls repeat a cycle of several modules ``MIN_LOOP_STEPS`` times."""
    last = modules[-1]
    for size in range(2, min(MAX_CYCLE, len(modules) // MIN_LOOP_STEPS) + 1):
        if modules[-1 - size] == last:
            cycle = modules[-size:]
            return (
                len(set(cycle)) == size
                and modules[-MIN_LOOP_STEPS * size :] == cycle * MIN_LOOP_STEPS
            )
    return False
