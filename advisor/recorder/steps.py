"""Finds the training steps in what happens: fetches, forwards, backwards, optimizer steps.

The time between two fetches of a batch is a *segment*. What was seen in it tells what it was:

- an optimizer stepped: it ends a training step;
- a backward and no optimizer: part of a step, which goes on (gradient accumulation);
- a forward alone: validation. It belongs to no step; its time is the next step's ``evaluation``.
  As many before each step are part of it: a target network's.
  So do several forwards of a model in evaluation mode, and then one of it in training mode;
- a fetch alone: batches fetched ahead. They belong to the step that follows.

Where no loader is fetched from (a list of tensors, the last batch of a loader that looks one
batch ahead), a step ends when the optimizer has stepped. ``Recorder.step`` and its like take
over from all this once they are used: then the user says where a step ends.

Several optimizers (GAN): in a loader's loop any of them makes the step; without a loader the one
that steps least ends it, of those that step equally often the first. Several whole rounds of
backward and optimizer's step between two fetches (batches kept in a buffer) are several steps, as
many as the optimizer that steps least has made; once that was seen, its steps end them at once.
Where no optimizer is seen (weights updated by hand, an optimizer that is compiled or in another
thread) a step is what lies between two changes of weights or gradients outside of backwards
(``hooks.UpdateProbe``), from the second change on."""

from collections import Counter
from collections.abc import Callable, Hashable
from operator import sub
from typing import Any, NamedTuple

from advisor.recorder.tape import (
    FORWARD_END_EVALUATION,
    FORWARD_END_NO_GRAD,
    FORWARD_END_NO_GRAPH,
    FORWARD_END_TRAINING,
    MAX_PHASES,
    OPTIMIZER,
    OTHER,
    Clock,
)

MAX_HELD_SEGMENTS = 1024
"""Most segments kept while no optimizer has stepped."""
MAX_ROUNDS = 4096
"""Most optimizer steps looked at in a segment: between two fetches there may be any number."""
MAX_EARLY = 80
"""Most first steps that are regrouped when another optimizer turns out to step less often."""
MAX_PERIOD = 32
"""Most steps of another optimizer within one step; above that, its steps are steps themselves."""
MAX_EVENTS = 65_536
"""Most CUDA events kept of a segment; a longer segment is no step."""
SAME_STEPS = 2
"""Steps in a row with as many forwards without gradients before the training as the one before,
from which these are part of a step. They are no validation, which comes after many steps."""
PERIODS = 4
"""Multiple of its usual interval after which the optimizer that ended steps counts as gone."""


class RecordedStep(NamedTuple):
    """Training or inference step, ready to be written: times and phases in ns."""

    n: int
    t: int
    end: int
    phases: list[int]
    micro: int
    gap: int
    window: int | None
    gc: int
    batch: Any
    memory: Any
    marks: Any
    """Device times as ``watchers.EventTimes``; ``None`` if no events were made."""
    trains: bool = True
    """False for a step of a loop that does not train (``inference``)."""
    exporting: bool = False
    """True if a trace was being written during the step."""
    unused_graphs: int = 0
    """Forwards with a graph since the previous step that no backward followed."""


class StepSegment(NamedTuple):
    t: int
    end: int
    phases: list[int]
    backwards: int
    marks: Any


class OptimizerUpdate(NamedTuple):
    """Optimizer step that followed a backward, within a segment; times in ns."""

    now: int
    acc: list[int]
    """Time in each phase since the segment began, ns."""
    optimizer: int
    backwards: int
    """Number of backwards in the segment so far."""


class StepFinder:
    """Finder of training steps in segments, in the order of the tape. ``now``: time in ns."""

    def __init__(self, clock: Clock, emit: Callable[[StepSegment, int, int], None]) -> None:
        self.clock = clock
        self._emit = emit
        self.on_regroup: Callable[[], None] | None = None
        """Function to call when the steps so far were parts of longer steps, which follow."""
        self.is_backdated = False
        """True if the step being emitted ended before the latest tape entry."""
        self.event_counts = {"fetched": 0, "forwards": 0, "backwards": 0, "optimized": 0}
        """Counts of all events, whether or not they made steps: to say why there are none."""
        self.explicit = False
        """True once the program says itself where steps end."""
        self.count = 0
        self.gap = 0
        """Time since the last step that belongs to no step, ns …"""
        self.unused_graphs = 0
        """… and forwards with a graph in it that no backward followed."""
        self._graphs = 0
        """Forwards with a graph in the segment since its last backward …"""
        self._earlier_graphs = 0
        """… and in earlier segments: the next backward is theirs if its segment has no forward."""
        self._evaluated = 0
        """Number of these forwards in evaluation mode, before any backward …"""
        self._evaluation: tuple[int, list[int]] = 0, []
        """… with the end of the last one, ns, and the time in each phase until then."""
        self._untrained = 0
        """Number of forwards without gradients before this step's training."""
        self._last_untrained = 0
        """Number of those forwards before the previous step's training."""
        self._same = 0
        """Number of steps since that number changed."""
        self._targets = 0
        """Number of those forwards that belong to each step, such as a target network's."""
        self.marks: list[Any] = []
        """CUDA events of the segment, each with the phase that it begins …"""
        self._marks_whole = False
        """… and whether they reach back to the segment's start."""
        self.begun = 0
        """Start of the segment, ns …"""
        self.open = False
        """… and whether one is open: time before the first activity belongs to no step."""
        self.outside_loader = True
        """True while no batch of a loader is being worked on."""
        self._batches = 0
        self._stock: list[Any] = []
        """Notes on the batches that are in no step yet."""
        self.used: list[Any] = []
        """Notes on the batches of the step being emitted."""
        self.forwards = 0
        """Number of forwards in total."""
        self._forwards = 0
        self._backwards = 0
        self._micro = 0
        self._stepped = False
        self._trained_here = False
        """True if a step was trained with batches of the current loader."""
        self._rest: tuple[int, list[int]] | None = None
        """Time of the segment's last optimizer step, ns, and the time in each phase until then."""
        self._held: list[StepSegment] = []
        self._optimizers: dict[int, int] = {}
        """Steps of each other optimizer since the primary one's last step …"""
        self._primary: int | None = None
        """… which is the optimizer that ends steps outside a loader's loop …"""
        self._period = 1
        """… at most this many steps of another optimizer after its last …"""
        self._since: dict[int, int] = {}
        """… and its steps since each other optimizer's last step."""
        self._early: list[tuple[StepSegment, int]] | None = []
        """Parts of the steps so far, and the optimizer that ended each; ``None``: too many."""
        self._rounds: list[OptimizerUpdate] = []
        self._last_inner = 0
        """Id of the optimizer that last stepped during a backward."""
        self._ended_by = 0
        """Id of the optimizer that ended the previous segment."""
        self._outer_steps = False
        """True once an optimizer stepped outside a backward: it is not one per parameter."""
        self._buffered = False
        """True once several steps lay between two fetches: optimizers end steps, not fetches."""
        self._first: int | None = None
        """Number of held parts that form the first step without an optimizer, while a second one is
        awaited. ``None``: no step yet; 0: two were found."""

    # -- what hooks report ----------------------------------------------------------------------

    def on_fetch(self, now: int) -> None:
        """End the open segment: a loader is asked for a batch."""
        if self.explicit:
            return
        if self.clock.cur == OPTIMIZER:  # an optimizer raised, its hook for the end was not called
            self.clock.leave_all(now)
        self._early = None
        idle = not (self._forwards or self._backwards or self._batches)
        if not (self._buffered and self.open and idle):
            self._close(now)
        self.outside_loader = False
        self.open = True

    def on_batch(self) -> None:
        self.event_counts["fetched"] += 1
        self._batches += 1
        self._stock.append(None)

    def set_batch(self, batch_summary: Any) -> None:
        """Attach the note on its content to the batch fetched last."""
        if self._stock:
            self._stock[-1] = batch_summary

    def on_exhausted(self, now: int) -> None:
        """Leave the loader, which is exhausted: later work is not on its batches."""
        if self.explicit:
            return
        self._forget_batches()
        self._leave_out(now)
        if not self._trained_here:
            self._drop_ahead()
        self._outside()

    def on_iterate(self, now: int) -> None:
        """Start a new pass over a loader: an epoch or a validation."""
        if self.explicit:
            return
        if self.open:
            self._close(now)
        self._drop_ahead()
        self._stock.clear()
        self._trained_here = False
        self._outside()

    def on_checkpoint(self, now: int) -> None:
        """End a complete step before a checkpoint: writing it is not part of the step."""
        if not self.explicit and self._stepped and not self.clock.stack:
            self._close(now)
            self._outside()

    def on_activity(self, now: int) -> None:
        """Begin a step, if none is open, at an activity that a step may begin with."""
        if not self.open:
            before = sum(self._cut(now).phases)
            if not self.explicit:
                self.gap += before
            self.open = True

    def on_forward(self, code: int, now: int) -> None:
        """Count an outermost forward that returned; ``code`` is its ``FORWARD_END…`` entry."""
        self.event_counts["forwards"] += 1
        self._forwards += 1
        self._graphs += code not in (FORWARD_END_NO_GRAD, FORWARD_END_NO_GRAPH)
        self.forwards += 1
        if code == FORWARD_END_EVALUATION:
            self._evaluated += not self._backwards
            self._evaluation = now, self.clock.acc.copy()
        elif code == FORWARD_END_TRAINING and self._evaluated > 1:
            self._evaluated_before()
        learns = self._backwards or self._stepped or self._graphs  # or will: a teacher's may follow
        apart = self.outside_loader and not (learns or self._held or self.explicit)
        if code != FORWARD_END_NO_GRAD or not apart:
            return
        self._untrained += 1
        if self._untrained <= self._targets:
            return
        # without a loader, a forward that nothing is learnt from is validation; training begins
        # after it
        self._leave_out(now)
        self.open = False

    def _evaluated_before(self) -> None:
        """Treat forwards in evaluation mode as a validation: the same model then began to train,
        and no backward used their graphs."""
        self.unused_graphs += self._evaluated
        self._graphs -= self._evaluated
        self._evaluated = 0
        if self.outside_loader and not (self._stepped or self.explicit):
            self.begun, phases = self._evaluation
            self.clock.acc = list(map(sub, self.clock.acc, phases))
            self.gap += sum(phases)
            self.without_events()

    def on_backward(self, now: int) -> None:
        """Count a backward that ended, and end the step if an optimizer stepped during it."""
        self.event_counts["backwards"] += 1
        self._backwards += 1
        if self._forwards:
            self.unused_graphs += self._earlier_graphs
        self._graphs = self._earlier_graphs = self._evaluated = 0
        if not self._stepped or self.clock.stack:
            return
        if self._by_optimizer:
            self._end_outside(now)
        elif not self._outer_steps:  # it stepped in the backward
            self._end_round(0, now)

    def on_optimizer_step(self, optimizer: int, now: int) -> None:
        """Handle an optimizer step, also one that the gradient scaler skipped."""
        self.event_counts["optimized"] += 1
        anew = self._choose_primary(optimizer)
        by_optimizer = self._by_optimizer
        if by_optimizer and optimizer != self._primary:
            self._backwards += not self._backwards
            self._part(optimizer, now)
            return
        self._stepped = True
        if by_optimizer and not self.explicit and not self.clock.stack:
            if anew:
                self._part(optimizer, now)
                self._group_anew(optimizer)
            else:
                self._end_outside(now)
        elif not self.clock.stack:
            self._end_round(optimizer, now)
        else:
            self._last_inner = optimizer

    def _end_round(self, optimizer: int, now: int) -> None:
        """Note an optimizer step in a loader's segment, after or during a backward."""
        self._rest = now, self.clock.acc.copy()
        if optimizer and not self._outer_steps:
            self._outer_steps = True
            self._rounds.clear()
        rounds = self._rounds
        if rounds and rounds[-1].backwards == self._backwards:
            rounds[-1] = OptimizerUpdate(now, self._rest[1], rounds[-1].optimizer, self._backwards)
        elif len(rounds) < MAX_ROUNDS:
            rounds.append(OptimizerUpdate(now, self._rest[1], optimizer, self._backwards))

    def _choose_primary(self, optimizer: int) -> bool:
        """Choose which optimizer ends steps, as ``optimizer`` steps. Return whether it replaces one
        that steps more often."""
        known, since = self._optimizers, self._since
        if self._primary is None:
            self._primary = optimizer
        if optimizer == self._primary:
            self._period = min(MAX_PERIOD, max([self._period, *known.values()]))
            known.clear()
            for other in since:
                since[other] = min(MAX_PERIOD, since[other]) + 1
            return False
        if len(since) > MAX_PERIOD:  # made anew for each step
            since.clear()
            known.clear()
        known[optimizer] = known.get(optimizer, 0) + 1
        between, since[optimizer] = since.get(optimizer, 0), 0
        gone = known[optimizer] > (1 if self._period == 1 else PERIODS * self._period)
        steps_less = 1 < between <= MAX_PERIOD
        if not steps_less and not gone:
            return False
        self._primary, self._period = optimizer, between if steps_less else 1
        known.clear()
        del since[optimizer]
        return steps_less and self.outside_loader and bool(self._early)

    @property
    def _by_optimizer(self) -> bool:
        """True where optimizers end steps, not fetches."""
        return self.outside_loader or self._buffered

    def _part(self, optimizer: int, now: int) -> None:
        """Note a step of an optimizer that does not end steps; among the first steps only, since it
        may turn out to be the one that does."""
        if (
            self._early is not None
            and self.outside_loader
            and not self.clock.stack
            and not self.explicit
        ):
            self._micro += self._backwards
            self._hold(self._cut(now), optimizer)

    def _group_anew(self, optimizer: int) -> None:
        """Regroup the steps so far into longer ones, which ``optimizer`` ends."""
        early, self._early = self._early or [], None
        self._held = []
        self._micro = 0
        self.count = 0
        if self.on_regroup is not None:
            self.on_regroup()
        parts: list[StepSegment] = []
        for part, ended_by in early:
            parts.append(part)
            if ended_by == optimizer:
                self.is_backdated = part is not early[-1][0]
                self._hand_on(parts, max(1, sum(p.backwards for p in parts)))
                parts = []
        self.is_backdated = False
        self.open = True
        self.clock.enter_between_steps()

    def on_update(self, now: int) -> None:
        """Note, as a backward begins, that weights or gradients changed since the last one."""
        if not self.is_undecided or self.clock.stack:
            return
        self.on_forward_start(now)
        self._applied()

    def on_forward_start(self, now: int) -> None:
        """End a segment before a forward if, without a loader, it has a backward but no step."""
        if self.outside_loader and self._backwards and not self._stepped and not self.clock.stack:
            self._close(now)
            self.open = True

    # -- what the user says ---------------------------------------------------------------------

    def on_step_end(self, now: int) -> None:
        """End the step here, as the program says."""
        if not self.explicit:
            self.explicit = True
            if self.count == 1 and not self._held and not self._stepped and not self._batches:
                # found by itself already: a loop without a loader
                self._cut(now)
                self.open = True
                return
            self._held = [part for part in self._held if part.backwards]
        drawn = self._batches
        self._complete(now)
        self.open = True
        if not drawn:
            self.clock.enter_between_steps()

    def begin(self, now: int) -> None:
        """Begin a loop whose every iteration is a step."""
        self.explicit = True
        self._held.clear()
        self._leave_out(now)
        self.open = True

    def stop(self, now: int) -> None:
        """End a loop left in mid-iteration: with a step, if a backward or update was in it."""
        if self._stepped or self._backwards or self._primary is None:
            self.on_step_end(now)
        else:
            self.drop_step(now)

    def complete(self) -> int:
        """Return 1 if the open segment would be a step if it ended now, else 0."""
        unseen = self._first is not None and (self._backwards or self._learnt())
        return int(bool(self._stepped or unseen))

    @property
    def is_undecided(self) -> bool:
        """True while no optimizer has stepped and the program has not said where steps end."""
        return self._primary is None and not self.explicit

    def drop_step(self, now: int) -> None:
        """Drop the open segment and the held ones: they are no step."""
        self._held.clear()
        self._cut(now)
        self.open = False

    def forget(self) -> None:
        """Drop all state: what was found was a trial of the model, and the next step is the
        first."""
        self.drop_step(self.clock.last)
        self.count = self.gap = self._micro = self._earlier_graphs = self.unused_graphs = 0
        self._primary = self._first = self._early = None
        self._optimizers.clear()
        self._since.clear()
        self._period, self._buffered = 1, False
        self._untrained = self._last_untrained = self._same = self._targets = 0

    def finish(self, now: int) -> None:
        """Finish the recording: keep a complete step, drop an incomplete one."""
        if self.explicit:
            return
        if self.open and self._rest is not None:  # what follows until the program's end is no step
            (now, phases), self._rest = self._rest, None
            self.clock.last, self.clock.cur = now, OTHER
            self.clock.acc = phases
            self.without_events()
        if self.open and (self._stepped or (self._first is not None and self._backwards)):
            self._close(now)
        if self._first is not None:
            self._applied()
        if self._primary is None and self._held:
            for part in self._held:
                if part.backwards:
                    self._hand_on([part], self._micro_steps(1))
            if self._backwards:
                self._hand_on([self._cut(now)], self._micro_steps(1))
        self._held.clear()

    def add_event(self, mark: Any) -> None:
        """Add a CUDA event, with the phase that it begins."""
        self.marks.append(mark)
        if len(self.marks) > MAX_EVENTS:
            self.without_events()

    def without_events(self) -> None:
        """Drop the segment's CUDA events: none follow for a while."""
        self.marks = []
        self._marks_whole = False

    # -- for steps that repeat ------------------------------------------------------------------

    def state(self, now: int) -> Hashable:
        """Return all state that decides how the next entries are read, just after a step ended;
        ``None`` if more decides it."""
        if self.begun != now or self.gap or self._held or self.marks or self._marks_whole:
            return None
        if self._early is not None or self._earlier_graphs:
            return None
        return (
            (self.explicit, self.open, self.outside_loader, self._stepped, self._trained_here),
            (self._batches, len(self._stock), self._forwards, self._backwards, self._micro),
            (self._buffered, self._primary, self._first, *self._optimizers.items()),
            (self._period, *self._since.items()),
            (self._untrained, self._last_untrained, self._targets, self._same >= SAME_STEPS),
        )

    def swap_batches(self, batches: list[Any]) -> list[Any]:
        """Add ``batches`` to the waiting ones; return as many of the oldest, for the next steps."""
        stock = [*self._stock, *batches]
        self._stock = stock[len(batches) :]
        return stock[: len(batches)]

    def on_repeats(self, count: int, end: int, seen: dict[str, int]) -> None:
        """Advance by ``count`` repeated steps, to ``end``, ns. Each adds the counts in ``seen``."""
        self.count += count
        self.begun = end
        for key, each in seen.items():
            self.event_counts[key] += count * each
        self.forwards += count * seen["forwards"]

    # -- inside ---------------------------------------------------------------------------------

    def _outside(self) -> None:
        self.outside_loader = True
        self.open = False

    def _end_outside(self, now: int) -> None:
        self._trained_here = True
        number, self._untrained = self._untrained, 0
        self._same = self._same + 1 if number == self._last_untrained else 0
        self._last_untrained = number
        if self._same >= SAME_STEPS:
            self._targets = number
        self._complete(now)
        self.open = True
        self.clock.enter_between_steps()

    def _cut(self, now: int) -> StepSegment:
        """End the segment, whatever it contains, and return it."""
        marks = self.marks if self._marks_whole and len(self.marks) > 1 else None
        self.marks = self.marks[-1:]  # where this segment ends, the next one begins
        self._marks_whole = bool(self.marks)
        segment = StepSegment(self.begun, now, self.clock.cut(now), self._backwards, marks)
        self.begun = now
        self._earlier_graphs += self._graphs
        self._batches = self._forwards = self._backwards = self._graphs = self._evaluated = 0
        self._stepped = False
        self._rest = None
        self._rounds = []
        return segment

    def _leave_out(self, now: int) -> None:
        """End the segment and count its time to no step."""
        self.gap += sum(self._cut(now).phases)

    def _close(self, now: int) -> None:
        """End the segment, and the step if an optimizer has stepped in it."""
        if self._stepped:
            self._trained_here = True
            if not self._split(now):
                self._complete(now)
        elif self._backwards:
            self._trained_here = True
            self._micro += self._backwards
            self._hold(self._cut(now))
        elif self._forwards or not self._batches:
            self._forget_batches()
            self._leave_out(now)
            self._drop_ahead()
        else:
            self._hold(self._cut(now))

    def _split(self, now: int) -> bool:
        """Emit each step in the segment. Return false, having emitted none, if it holds one."""
        rounds = self._rounds
        steps = Counter(item.optimizer for item in rounds)
        if self._ended_by and self._ended_by not in steps:  # one steps inside of another's step
            return False
        self._ended_by = rounds[-1].optimizer if rounds else 0
        if len(rounds) < 2 or self.outside_loader:
            return False
        least = min(steps.values())
        if least < 2:
            return False
        # of those that step equally often, the one that stepped last ends a step
        last = next(item.optimizer for item in reversed(rounds) if steps[item.optimizer] == least)
        ends = [item for item in rounds if item.optimizer == last]
        self._primary, self._period = last or self._last_inner, max(steps.values()) // least
        self._optimizers.clear()
        self._since.clear()
        self._buffered = True
        begun, before, held = self.begun, [0] * MAX_PHASES, self._held
        backwards = self._micro
        self._held, self._micro = [], 0
        total = self._cut(now)
        ends[-1] = ends[-1]._replace(now=now, acc=total.phases, backwards=total.backwards)
        passed = 0
        for item in ends:
            phases = list(map(sub, item.acc, before))
            part = StepSegment(begun, item.now, phases, item.backwards - passed, None)
            backwards += item.backwards - passed
            self.is_backdated = item is not ends[-1]
            self._hand_on([*held, part], self._micro_steps(backwards))
            begun, before, passed, held, backwards = item.now, item.acc, item.backwards, [], 0
        self.is_backdated = False
        return True

    def _forget_batches(self) -> None:
        """Drop this segment's batches: they are in no step."""
        if self._batches:
            del self._stock[-self._batches :]

    def _note_early(self, part: StepSegment, optimizer: int) -> None:
        early = self._early
        if early is not None:
            if self.outside_loader and not self.explicit and len(early) < MAX_EARLY:
                early.append((part, optimizer))
            else:
                self._early = None

    def _hold(self, segment: StepSegment, optimizer: int = 0) -> None:
        self._held.append(segment)
        self._note_early(segment, optimizer)
        if len(self._held) > MAX_HELD_SEGMENTS:
            self.gap += sum(self._held.pop(0).phases)
            if self._first:
                self._first -= 1

    def _learnt(self) -> int:
        """Return the number of held segments up to the last one with a backward."""
        return max((n for n, part in enumerate(self._held, 1) if part.backwards), default=0)

    def _applied(self) -> None:
        """Emit the held segments as a step: weights changed without a known optimizer step."""
        end = self._learnt()
        if not end or end == self._first:
            return
        if self._first is None:  # once may be gradients that nobody wanted
            self._first = end
            return
        for parts in (self._held[: self._first], self._held[self._first : end]):
            if parts:
                backwards = sum(part.backwards for part in parts)
                self._micro -= backwards
                self._hand_on(parts, self._micro_steps(backwards))
        self._held = self._held[end:]
        self._first = 0

    def _drop_ahead(self) -> None:
        """Drop held segments of batches that were fetched ahead but not trained with."""
        if self._held and not self._learnt():
            self.gap += sum(sum(part.phases) for part in self._held)
            self._held.clear()

    def _complete(self, now: int) -> None:
        backwards = self._micro + self._backwards
        self._micro = 0
        parts = [*self._held, self._cut(now)]
        self._held = []
        self._note_early(parts[-1], self._primary or 0)
        self._hand_on(parts, self._micro_steps(backwards))

    def _micro_steps(self, backwards: int) -> int:
        """Return the number of batches in a step, and take them from the fetched ones."""
        micro = max(1, min(backwards, len(self._stock)) if self._stock else backwards)
        self.used = self._stock[:micro]
        del self._stock[:micro]
        return micro

    def _hand_on(self, parts: list[StepSegment], micro: int) -> None:
        whole = parts[-1]
        if len(parts) > 1:
            phases = list(whole.phases)
            for part in parts[:-1]:
                for index, value in enumerate(part.phases):
                    phases[index] += value
            marked = all(part.marks is not None for part in parts)
            marks = None
            if marked:  # the last event of a part is the first of the next
                marks = [*parts[0].marks, *(m for part in parts[1:] for m in part.marks[1:])]
            whole = StepSegment(parts[0].t, whole.end, phases, whole.backwards, marks)
        gap, self.gap = self.gap, 0
        self._emit(whole, micro, gap)
        self.unused_graphs = 0
        self.count += 1
