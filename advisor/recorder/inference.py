"""Finds the steps of a loop that does not train: forwards repeated, with a loader or without.

It reads the same tape as ``steps``, beside it, until something is learnt in the process (a
backward, an optimizer's step) or the user says where steps end. Once a step is found that way, all
that was found here was a validation before the training, and is dropped. So it is written apart
(``inference.jsonl``), and nothing of it reaches the record of a training. Where little was learnt
and many forwards follow, the session has it look again (``RecordingSession._retry_inference``).

- With a loader a step goes from one fetch to the next, however many forwards are in it.
- Without one it ends with an outermost forward, and begins where the one before ended. Where
  several modules take turns (encoder, decoder), the one that comes again ends it.
- A call of ``generate`` is one forward, whatever it calls. Where calls are long, each forward in
  them is one: a step is a generated token, and there are enough of them in a short run.

Modules without parameters and submodules (transforms, losses) are not counted. But where no other
is called and several of them take turns, they are a model's whose weights functions use."""

from collections.abc import Callable
from typing import Any, NamedTuple

from advisor.recorder import tape
from advisor.recorder.steps import MAX_EVENTS
from advisor.recorder.tape import BACKWARD, DATA, FORWARD, MAX_PHASES, OPTIMIZER, Clock

MIN_LOOP_STEPS = 3
"""Steps that make a loop: a model called once or twice is only being tried."""
MAX_PARTS = 1024
"""Most forwards kept while it is unknown which step they belong to."""
SINGLE = 64
"""Least forwards since a fetch from which the loop is taken to fetch nothing (``x =
next(iter(loader))`` before it) …"""
TIMES = 4
"""… and their least multiple of the forwards of an earlier step."""
MAX_CYCLE = 512
"""Most calls in a repeated cycle of modules without parameters."""
MAX_PREFETCHED = 8
"""Batches fetched without a forward, beyond the number of steps, that end the search: something
unseen works on them, perhaps a training."""

LONG_CALL_NS = 1_000_000_000
"""Length of a ``generate`` call after its first forward, ns, from which its forwards are steps …"""
MIN_TOKENS = 3
"""… if there were more of them than this."""

LEARNING = frozenset((BACKWARD, OPTIMIZER))
TRAINING_CODES = frozenset(
    (
        tape.BACKWARD_END, tape.OPTIMIZED_BY, tape.OPTIMIZER_END, tape.APPLIED, tape.BOUNDARY,
        tape.BEGIN, tape.BREAK_OFF, tape.FETCHED_INSIDE,
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
    """Number of forwards in it: above 1 for a call of ``generate``."""


class InferenceStep(NamedTuple):
    """Step of a loop that does not train; times in ns."""

    n: int
    t: int
    end: int
    phases: list[int]
    batches: list[Any]
    """Note on each batch."""
    forwards: int
    is_backdated: bool
    """True if it was only recognised as a step after it had ended."""
    delimited_by_forward: bool
    """True if only forwards tell where it ended: no fetch, no ``generate``."""
    gc: int
    memory: Any
    graphs: int
    """Forwards in evaluation mode that made a graph."""
    marks: Any = None
    """CUDA events, each with the phase that it begins; ``None`` if not of the whole step."""


class InferenceStepFinder:
    """Finder of inference steps. ``emit`` gets each step. ``module_calls_suspended`` tells whether
    forwards are unrecorded now. ``on_restart`` is called, with the reason, if the steps so far were
    not a model's or too long; others follow. ``splits_calls``: the forwards of long ``generate``
    calls are steps."""

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
        self._by_token = False
        """True once forwards in ``generate`` are steps."""
        self._plain: list[int] | None = []
        """Modules without parameters, in call order, while it is unknown whether they count;
        ``None`` once it is known."""
        self._only_plain = False
        """True if they count, because no other module is called."""
        self.count = 0
        """Number of steps emitted."""
        self._clock = Clock()
        self._kept: list[InferenceStep] = []
        self._parts: list[InferencePart] = []
        self._batches: list[Any] = []
        self._begun = 0
        self._open = False
        self._outside = True
        self._drawn = 0
        """Batches fetched since the loader was last iterated."""
        self._ahead = 0
        self._usual = 0
        """Most parts in a step of a loader's loop."""
        self._known: dict[int, int] = {}
        self._primary: int | None = None
        self._inside = 0
        """Number of ``generate`` calls that are open …"""
        self._inner = 0
        """… and of the forwards in them; the first one's end, ns."""
        self._prompted = 0
        self._generated = False
        self._gc = self._graphs = 0
        self._memory: Any = None
        self._marks: list[Any] = []
        """CUDA events since the step began, if ``_marked``; else those made last."""
        self._marked = False

    def start(self, now: int) -> None:
        """Start, with no phase open, at ``now``, ns."""
        self._clock.start(now)
        self._forget(now)

    def read(self, codes: list[int], values: list[Any]) -> bool:
        """Read a piece of the tape. Return false if it trains, or may train unseen; then do not
        call it again."""
        clock = self._clock
        for code, value in zip(codes, values, strict=True):
            if code < MAX_PHASES:
                if code in LEARNING:
                    return False
                if not self._open and (code == FORWARD or code > OPTIMIZER):
                    self._begin(value)
                clock.enter(code, value)
            elif code in LEAVING:
                clock.leave(value)
                self._graphs += code == tape.FORWARD_END_EVALUATION
            elif code in TRAINING_CODES:
                return False
            elif code == tape.FORWARD_OF:
                self._forwarded(value)
            elif code == tape.FETCH:
                self._fetching(value)
            elif code == tape.FETCHED:
                clock.leave(value)
                self._drawn += 1
                self._batches.append(None)
            elif code == tape.BATCH:
                if self._batches:
                    self._batches[-1] = value
            elif code == tape.CUDA_EVENT:
                self._marks.append(value)
                if len(self._marks) > MAX_EVENTS:
                    self._without_marks()
            elif code == tape.MARKS_END:
                self._without_marks()
            elif code == tape.GENERATE:
                if not self._open:
                    self._begin(value)
                    self._without_marks()  # the last one is older
                self._inside += 1
            elif code == tape.GENERATED:
                self._generate_ended(value)
            elif code == tape.EXHAUSTED:
                clock.leave(value)
                self._leave_loader(value)
            elif code == tape.ITERATE:
                self._break_off()
                self._batches.clear()
                self._leave_loader(value)
                self._drawn = 0
            elif code in (tape.RESET, tape.ABANDON):
                clock.leave_all(value)
                self._forget(value)
            elif code == tape.PAUSE:
                self._gc += value
            elif code == tape.MEMORY:
                self._memory = value
            if self._ahead > MAX_PREFETCHED + self.count + len(self._kept):
                return False
        return True

    def finish(self) -> None:
        """Finish the recording, or pause: keep a step whose forward has ended."""
        if self._inside:
            self._inside = 1
            self._generate_ended(self._clock.last)
        self._break_off()
        self._forget(self._clock.last)

    # -- inside ---------------------------------------------------------------------------------

    def _without_marks(self) -> None:
        self._marks = []
        self._marked = False

    def _cut_marks(self) -> list[Any] | None:
        """Return the step's events, ``None`` if incomplete; its last one starts the next step."""
        made = self._marks if self._marked and len(self._marks) > 1 else None
        self._marks = self._marks[-1:]
        self._marked = bool(self._marks)
        return made

    def _begin(self, now: int) -> None:
        self._cut_marks()
        self._clock.cut(now)
        self._begun = now
        self._open = True

    def _forget(self, now: int) -> None:
        self._parts.clear()
        self._batches.clear()
        self._leave_loader(now)
        self._inside = self._inner = 0

    def _leave_loader(self, now: int) -> None:
        self._clock.cut(now)
        self._parts.clear()
        self._open = False
        self._outside = True

    def _fetching(self, now: int) -> None:
        if self._by_token:  # a batch of prompts: tokens are steps
            self._clock.enter(DATA, now)
            return
        looping = self.count and not self._outside and self._batches
        if self._outside:
            self._parts.clear()
            self._begin(now)
        elif self._parts or (looping and self._module_calls_suspended()):
            self._close(now)
        elif self._batches:
            self._ahead += 1  # a batch fetched ahead: the step goes on
        else:
            self._begin(now)
        self._outside = False
        self._open = True
        self._clock.enter(DATA, now)

    def _forwarded(self, module: int) -> None:
        """Handle a forward that ended at the previous entry's time."""
        if module < 0:
            if self._plain is not None:
                self._plain.append(module)
                self._only_plain = _take_turns(self._plain)
                self._plain = (
                    None if self._only_plain else self._plain[-MIN_LOOP_STEPS * MAX_CYCLE :]
                )
            if not self._only_plain:
                return
        elif self._only_plain or self._plain is not None:
            self._found_model()
        if self._inside and not self._by_token:
            self._count_token(self._clock.last)
            return
        self._generated = False
        self._piece(self._clock.last, module, 1)

    def _found_model(self) -> None:
        """Drop the steps so far, at the first call of a model: they prepared its input."""
        self._plain, self._only_plain = None, False
        self._primary = None
        self._known.clear()
        self._parts.clear()
        self._kept.clear()
        if self.count:
            self.count = 0
            self._on_restart("it lies before the model's forwards")

    def _count_token(self, now: int) -> None:
        """Count a forward in ``generate``; if the call is long, its forwards are steps from now."""
        self._inner += 1
        if self._inner == 1:
            self._prompted = now
        long = self._inner > MIN_TOKENS and now - self._prompted > LONG_CALL_NS
        if not long or not self._splits_calls:
            return
        self._by_token, self._inner, self._primary = True, 0, None
        self._known.clear()
        self._kept.clear()
        self._leave_loader(now)
        self._begin(now)
        self._clock.enter_between_steps()
        if self.count:
            self.count = 0
            self._on_restart("its steps are calls of generate, which are long")

    def _generate_ended(self, now: int) -> None:
        self._inside = max(0, self._inside - 1)
        if not self._inside and self._inner:
            inner, self._inner = self._inner, 0
            self._generated = True
            self._piece(now, -1, inner)

    def _piece(self, now: int, module: int, forwards: int) -> None:
        self._cut(now, module, forwards)
        if self._outside:
            self._took_turn(self._parts[-1])
        elif len(self._parts) >= max(SINGLE, TIMES * self._usual):
            self._go_outside()

    def _cut(self, now: int, module: int, forwards: int) -> None:
        """End a part; time in a phase that the program opened is counted up to here."""
        phases = self._clock.cut(now)
        self._parts.append(InferencePart(self._begun, now, phases, module, forwards))
        self._begun = now
        if self._outside:
            self._clock.enter_between_steps()
        if len(self._parts) > MAX_PARTS:
            del self._parts[0]
            self._without_marks()

    def _took_turn(self, part: InferencePart, is_backdated: bool = False) -> None:
        """End the step, outside a loader's loop, if the module is the one that ends steps."""
        module, known = part.module, self._known
        known[module] = known.get(module, 0) + 1
        if self._primary is None or (module != self._primary and known[module] > 1):
            self._primary = module
        if len(known) > MAX_PARTS:
            known.clear()
        if module == self._primary:
            known.clear()
            parts, self._parts = self._parts, []
            self._step(parts, part.end, is_backdated)

    def _go_outside(self) -> None:
        """Split what was taken for one step into the steps of a loop that fetches nothing."""
        parts, self._parts = self._parts, []
        self._outside = True
        for part in parts:
            self._parts.append(part)
            self._took_turn(part, is_backdated=True)
        self._clock.enter_between_steps()

    def _close(self, now: int) -> None:
        """End a part and the step: work on a batch has ended."""
        parts, self._parts = self._parts, []
        self._usual = max(self._usual, len(parts))
        parts.append(InferencePart(self._begun, now, self._clock.cut(now), 0, 0))
        self._begun = now
        self._step(parts, now, is_backdated=False)

    def _break_off(self) -> None:
        """End the last step at its last forward: the loop was left."""
        if self._outside or not self._parts:
            return
        if self._drawn == 1 and len(self._parts) >= MIN_LOOP_STEPS:
            self._go_outside()
            return
        parts, self._parts = self._parts, []
        self._step(parts, parts[-1].end, is_backdated=True)

    def _step(self, parts: list[InferencePart], end: int, is_backdated: bool) -> None:
        phases = [sum(column) for column in zip(*(part.phases for part in parts), strict=True)]
        batches, self._batches = self._batches, []
        forwards = sum(part.forwards for part in parts)
        delimited_by_forward = self._outside and not self._generated
        marks = self._cut_marks()
        step = InferenceStep(
            self.count + len(self._kept), parts[0].t, end, phases, batches, forwards, is_backdated,
            delimited_by_forward, self._gc, self._memory, self._graphs,
            None if is_backdated else marks,
        )  # fmt: skip
        self._gc, self._memory, self._graphs = 0, None, 0
        if self.count:
            self.count += 1
            self._emit(step)
            return
        self._kept.append(step._replace(marks=None))
        if len(self._kept) >= MIN_LOOP_STEPS:
            kept, self._kept = self._kept, []
            for result in kept:
                self.count += 1
                self._emit(result._replace(is_backdated=is_backdated or result is not kept[-1]))


def _take_turns(modules: list[int]) -> bool:
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
