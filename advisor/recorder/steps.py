"""Finder of training steps in the recorded fetches, forwards, backwards and optimizer steps.

The time between two fetches of a batch is a *segment*. Its content decides what it is:

- An optimizer step: the segment ends a training step.
- A backward without an optimizer step: part of a step that continues (gradient accumulation).
- Only a forward: validation. It belongs to no step; its time is the next step's ``evaluation``.
  Several forwards in evaluation mode before one of the same model in training mode are validation
  too. If the same number comes before each step, they are part of it, such as a target network's.
- Only a fetch: prefetched batches. They belong to the step that follows.

Without fetches from a loader (a list of tensors, the last batch of a loader that looks one batch
ahead), a step ends when the optimizer has stepped. Once the program uses ``Recorder.step`` or
``Recorder.steps``, the program alone decides where a step ends.

Several optimizers (GAN): in a loader's loop, a step of any of them makes the segment a step.
Without a loader, the optimizer that steps least often ends the step; among equals, the first one.
If several rounds of backward and optimizer step come between two fetches (buffered batches), each
step of the least frequent optimizer is a step of its own; from then on, it ends steps at once.
If no optimizer is seen (weights updated by hand, an optimizer that is compiled or in another
thread), a step is the time between two changes of weights or gradients outside backwards
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
"""Maximum number of segments kept while no optimizer has stepped."""
MAX_UPDATES = 4096
"""Maximum number of optimizer steps examined in a segment, which may have any number of them."""
MAX_EARLY_PARTS = 80
"""Maximum number of first steps to regroup when another optimizer turns out to step less often."""
_MAX_PERIOD = 32
"""Maximum number of steps of another optimizer within one step; with more, they are the steps."""
MAX_EVENTS = 65_536
"""Maximum number of CUDA events kept per segment; a longer segment is not a step."""
_MIN_EQUAL_STEPS = 2
"""Minimum number of consecutive steps with the same number of forwards without gradients before
training, from which these forwards are part of a step. Validation comes after many steps."""
_MAX_PERIODS = 4
"""Multiple of its usual interval after which the optimizer that ended steps is considered gone."""


class RecordedStep(NamedTuple):
    """Training or inference step that is ready to be written; times and phases in ns."""

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
    """Device times as ``watchers.EventTimes``, or ``None`` if no events were made."""
    trains: bool = True
    """False for a step of a loop that does not train (``inference``)."""
    exporting: bool = False
    """True if a trace was being written during the step."""
    unused_graphs: int = 0
    """Forwards with a graph since the previous step that no backward followed."""


class StepSegment(NamedTuple):
    """Interval between two fetches, or a part of one; times and phases in ns."""

    t: int
    end: int
    phases: list[int]
    backwards: int
    marks: Any


class OptimizerUpdate(NamedTuple):
    """Optimizer step after a backward, within a segment; times in ns."""

    now: int
    acc: list[int]
    """Time in each phase since the start of the segment, ns."""
    optimizer: int
    backwards: int
    """Number of backwards since the start of the segment."""


class StepFinder:
    """Finder of training steps. Methods are called in the order of the tape; ``now`` is in ns."""

    def __init__(self, clock: Clock, emit: Callable[[StepSegment, int, int], None]) -> None:
        self.clock = clock
        self._emit = emit
        self.on_regroup: Callable[[], None] | None = None
        """Function to call when the steps so far turn out to be parts of longer steps."""
        self.is_backdated = False
        """True if the step being emitted ended before the latest tape entry."""
        self.event_counts = {"fetched": 0, "forwards": 0, "backwards": 0, "optimized": 0}
        """Counts of all events, which explain why no steps were found."""
        self.explicit = False
        """True once the program marks where steps end."""
        self.count = 0
        self.gap = 0
        """Time since the last step that belongs to no step, ns."""
        self.unused_graphs = 0
        """Number of forwards with a graph since the last step that no backward followed."""
        self._graphs = 0
        """Number of forwards with a graph since the segment's last backward."""
        self._earlier_graphs = 0
        """Graphs of earlier segments, used by the next backward if its segment has no forward."""
        self._evaluations = 0
        """Number of the segment's forwards with a graph in evaluation mode, before any backward."""
        self._evaluation_end: tuple[int, list[int]] = 0, []
        """End of the last forward in evaluation mode, ns, and the time in each phase until then."""
        self._pre_forwards = 0
        """Number of forwards without gradients before this step's training."""
        self._old_pre_forwards = 0
        """Number of forwards without gradients before the previous step's training."""
        self._same_count = 0
        """Number of steps since ``_pre_forwards`` changed."""
        self._target_forwards = 0
        """Number of forwards without gradients in each step, such as a target network's."""
        self.marks: list[Any] = []
        """CUDA events of the segment, each with the phase that it begins."""
        self._marks_complete = False
        """True if the events reach back to the segment's start."""
        self.begun = 0
        """Start of the segment, ns."""
        self.open = False
        """True while a segment is open: time before the first activity belongs to no step."""
        self.outside_loader = True
        """True while the program works on no batch of a loader."""
        self._batches = 0
        self._pending: list[Any] = []
        """Notes on the fetched batches that are not in a step yet."""
        self.used: list[Any] = []
        """Notes on the batches of the step being emitted."""
        self.forwards = 0
        """Number of forwards of the whole run."""
        self._forwards = 0
        self._backwards = 0
        self._micro = 0
        """Number of backwards in the held segments."""
        self._updated = False
        self._loader_trains = False
        """True if a training step used batches of the current loader."""
        self._last_update: tuple[int, list[int]] | None = None
        """End of the segment's last optimizer step, ns, and the time in each phase until then."""
        self._segments: list[StepSegment] = []
        self._other_steps: dict[int, int] = {}
        """Number of steps of each other optimizer since the primary optimizer's last step."""
        self._primary: int | None = None
        """Id of the primary optimizer, which ends steps outside a loader's loop."""
        self._period = 1
        """Maximum number of steps of another optimizer between two of the primary one."""
        self._primary_steps_since: dict[int, int] = {}
        """Number of the primary optimizer's steps since each other optimizer's last step."""
        self._early_parts: list[tuple[StepSegment, int]] | None = []
        """Parts of steps with the optimizer that ended each, or ``None`` if there are too many."""
        self._updates: list[OptimizerUpdate] = []
        self._last_inner = 0
        """Id of the optimizer that last stepped during a backward."""
        self._ended_by = 0
        """Id of the optimizer that ended the previous segment."""
        self._steps_outside_backward = False
        """True once an optimizer stepped outside a backward: there is not one per parameter."""
        self._is_buffered = False
        """True once there were several steps between two fetches: then optimizers end steps."""
        self._first_parts: int | None = None
        """Held segments of the first step without an optimizer: ``None`` before it, 0 after two."""

    # -- events from the hooks ------------------------------------------------------------------

    def on_fetch(self, now: int) -> None:
        """End the open segment, because the program asks a loader for a batch."""
        if self.explicit:
            return
        if self.clock.cur == OPTIMIZER:  # an optimizer raised, so its end hook was not called
            self.clock.leave_all(now)
        self._early_parts = None
        idle = not (self._forwards or self._backwards or self._batches)
        if not (self._is_buffered and self.open and idle):
            self._close_segment(now)
        self.outside_loader = False
        self.open = True

    def on_batch(self) -> None:
        self.event_counts["fetched"] += 1
        self._batches += 1
        self._pending.append(None)

    def set_batch(self, batch_summary: Any) -> None:
        """Attach the note on its content to the last fetched batch."""
        if self._pending:
            self._pending[-1] = batch_summary

    def on_exhausted(self, now: int) -> None:
        """Leave the exhausted loader: later work is not on its batches."""
        if self.explicit:
            return
        self._drop_batches()
        self._leave_out_segment(now)
        if not self._loader_trains:
            self._drop_prefetched()
        self._leave_loader()

    def on_iterate(self, now: int) -> None:
        """Start a new pass over a loader, for an epoch or a validation."""
        if self.explicit:
            return
        if self.open:
            self._close_segment(now)
        self._drop_prefetched()
        self._pending.clear()
        self._loader_trains = False
        self._leave_loader()

    def on_checkpoint(self, now: int) -> None:
        """End a complete step before a checkpoint: writing it is not part of the step."""
        if not self.explicit and self._updated and not self.clock.stack:
            self._close_segment(now)
            self._leave_loader()

    def on_activity(self, now: int) -> None:
        """Begin a step, unless one is open, at an activity that can start a step."""
        if not self.open:
            before = sum(self._cut_segment(now).phases)
            if not self.explicit:
                self.gap += before
            self.open = True

    def on_forward(self, code: int, now: int) -> None:
        """Count an outermost forward that has returned. ``code`` is its ``FORWARD_END…`` entry."""
        self.event_counts["forwards"] += 1
        self._forwards += 1
        self._graphs += code not in (FORWARD_END_NO_GRAD, FORWARD_END_NO_GRAPH)
        self.forwards += 1
        if code == FORWARD_END_EVALUATION:
            self._evaluations += not self._backwards
            self._evaluation_end = now, self.clock.acc.copy()
        elif code == FORWARD_END_TRAINING and self._evaluations > 1:
            self._leave_out_evaluation()
        trains = self._backwards or self._updated or self._graphs  # or may yet, after a teacher
        is_alone = self.outside_loader and not (trains or self._segments or self.explicit)
        if code != FORWARD_END_NO_GRAD or not is_alone:
            return
        self._pre_forwards += 1
        if self._pre_forwards <= self._target_forwards:
            return
        # without a loader, a forward without gradients is validation; training begins after it
        self._leave_out_segment(now)
        self.open = False

    def _leave_out_evaluation(self) -> None:
        """Treat forwards in evaluation mode as validation: the model switched to training mode
        before any backward used their graphs."""
        self.unused_graphs += self._evaluations
        self._graphs -= self._evaluations
        self._evaluations = 0
        if self.outside_loader and not (self._updated or self.explicit):
            self.begun, phases = self._evaluation_end
            self.clock.acc = list(map(sub, self.clock.acc, phases))
            self.gap += sum(phases)
            self.without_events()

    def on_backward(self, now: int) -> None:
        """Count a finished backward, and end the step if an optimizer stepped during it."""
        self.event_counts["backwards"] += 1
        self._backwards += 1
        if self._forwards:
            self.unused_graphs += self._earlier_graphs
        self._graphs = self._earlier_graphs = self._evaluations = 0
        if not self._updated or self.clock.stack:
            return
        if self._optimizer_ends_step:
            self._end_optimizer_step(now)
        elif not self._steps_outside_backward:  # it stepped during the backward
            self._note_update(0, now)

    def on_optimizer_step(self, optimizer: int, now: int) -> None:
        """Handle an optimizer step, including one that the gradient scaler skipped."""
        self.event_counts["optimized"] += 1
        regroup = self._choose_primary(optimizer)
        optimizer_ends_step = self._optimizer_ends_step
        if optimizer_ends_step and optimizer != self._primary:
            self._backwards += not self._backwards
            self._note_other_optimizer(optimizer, now)
            return
        self._updated = True
        if optimizer_ends_step and not self.explicit and not self.clock.stack:
            if regroup:
                self._note_other_optimizer(optimizer, now)
                self._regroup_steps(optimizer)
            else:
                self._end_optimizer_step(now)
        elif not self.clock.stack:
            self._note_update(optimizer, now)
        else:
            self._last_inner = optimizer

    def _note_update(self, optimizer: int, now: int) -> None:
        """Note an optimizer step after or during a backward, in a loader's segment."""
        self._last_update = now, self.clock.acc.copy()
        if optimizer and not self._steps_outside_backward:
            self._steps_outside_backward = True
            self._updates.clear()
        updates = self._updates
        if updates and updates[-1].backwards == self._backwards:
            updates[-1] = OptimizerUpdate(
                now, self._last_update[1], updates[-1].optimizer, self._backwards
            )
        elif len(updates) < MAX_UPDATES:
            updates.append(OptimizerUpdate(now, self._last_update[1], optimizer, self._backwards))

    def _choose_primary(self, optimizer: int) -> bool:
        """Choose the optimizer that ends steps, now that ``optimizer`` has stepped. Return whether
        it replaces one that steps more often."""
        other_steps, steps_since = self._other_steps, self._primary_steps_since
        if self._primary is None:
            self._primary = optimizer
        if optimizer == self._primary:
            self._period = min(_MAX_PERIOD, max([self._period, *other_steps.values()]))
            other_steps.clear()
            for other in steps_since:
                steps_since[other] = min(_MAX_PERIOD, steps_since[other]) + 1
            return False
        if len(steps_since) > _MAX_PERIOD:  # a new one for each step
            steps_since.clear()
            other_steps.clear()
        other_steps[optimizer] = other_steps.get(optimizer, 0) + 1
        interval, steps_since[optimizer] = steps_since.get(optimizer, 0), 0
        is_gone = other_steps[optimizer] > (1 if self._period == 1 else _MAX_PERIODS * self._period)
        is_rarer = 1 < interval <= _MAX_PERIOD
        if not is_rarer and not is_gone:
            return False
        self._primary, self._period = optimizer, interval if is_rarer else 1
        other_steps.clear()
        del steps_since[optimizer]
        return is_rarer and self.outside_loader and bool(self._early_parts)

    @property
    def _optimizer_ends_step(self) -> bool:
        """True if optimizers end steps, rather than fetches."""
        return self.outside_loader or self._is_buffered

    def _note_other_optimizer(self, optimizer: int, now: int) -> None:
        """Note a step of an optimizer that does not end steps, among the first steps only: later it
        may turn out to be the primary one."""
        if (
            self._early_parts is not None
            and self.outside_loader
            and not self.clock.stack
            and not self.explicit
        ):
            self._micro += self._backwards
            self._hold_segment(self._cut_segment(now), optimizer)

    def _regroup_steps(self, optimizer: int) -> None:
        """Regroup the steps so far into longer steps that ``optimizer`` ends."""
        early_parts, self._early_parts = self._early_parts or [], None
        self._segments = []
        self._micro = 0
        self.count = 0
        if self.on_regroup is not None:
            self.on_regroup()
        parts: list[StepSegment] = []
        for part, ended_by in early_parts:
            parts.append(part)
            if ended_by == optimizer:
                self.is_backdated = part is not early_parts[-1][0]
                self._emit_step(parts, max(1, sum(p.backwards for p in parts)))
                parts = []
        self.is_backdated = False
        self.open = True
        self.clock.enter_between_steps()

    def on_update(self, now: int) -> None:
        """Handle a change of weights or gradients since the last backward, before the next one."""
        if not self.is_undecided or self.clock.stack:
            return
        self.on_forward_start(now)
        self._emit_unseen_update()

    def on_forward_start(self, now: int) -> None:
        """End a segment before a forward if, without a loader, it has a backward and no update."""
        if self.outside_loader and self._backwards and not self._updated and not self.clock.stack:
            self._close_segment(now)
            self.open = True

    # -- calls of the program -------------------------------------------------------------------

    def on_step_end(self, now: int) -> None:
        """End the step here, because the program says so."""
        if not self.explicit:
            self.explicit = True
            if self.count == 1 and not self._segments and not self._updated and not self._batches:
                # this step was already found: a loop without a loader
                self._cut_segment(now)
                self.open = True
                return
            self._segments = [part for part in self._segments if part.backwards]
        has_batches = self._batches
        self._complete_step(now)
        self.open = True
        if not has_batches:
            self.clock.enter_between_steps()

    def begin(self, now: int) -> None:
        """Begin a loop whose every iteration is a step."""
        self.explicit = True
        self._segments.clear()
        self._leave_out_segment(now)
        self.open = True

    def stop(self, now: int) -> None:
        """End a loop left in mid-iteration, which is a step if it has a backward or update."""
        if self._updated or self._backwards or self._primary is None:
            self.on_step_end(now)
        else:
            self.drop_step(now)

    def complete(self) -> int:
        """Return 1 if the open segment would be a step if it ended now, else 0."""
        unseen = self._first_parts is not None and (self._backwards or self._count_trained())
        return int(bool(self._updated or unseen))

    @property
    def is_undecided(self) -> bool:
        """True while no optimizer has stepped and the program has not said where steps end."""
        return self._primary is None and not self.explicit

    def drop_step(self, now: int) -> None:
        """Drop the open segment and the held segments, which are not a step."""
        self._segments.clear()
        self._cut_segment(now)
        self.open = False

    def forget(self) -> None:
        """Drop all state: the steps so far were a test of the model, and the next step is the
        first one."""
        self.drop_step(self.clock.last)
        self.count = self.gap = self._micro = self._earlier_graphs = self.unused_graphs = 0
        self._primary = self._first_parts = self._early_parts = None
        self._other_steps.clear()
        self._primary_steps_since.clear()
        self._period, self._is_buffered = 1, False
        self._pre_forwards = self._old_pre_forwards = self._same_count = self._target_forwards = 0

    def finish(self, now: int) -> None:
        """Finish the recording: keep a complete step, drop an incomplete one."""
        if self.explicit:
            return
        if self.open and self._last_update is not None:  # the rest is not a step
            (now, phases), self._last_update = self._last_update, None
            self.clock.last, self.clock.cur = now, OTHER
            self.clock.acc = phases
            self.without_events()
        if self.open and (self._updated or (self._first_parts is not None and self._backwards)):
            self._close_segment(now)
        if self._first_parts is not None:
            self._emit_unseen_update()
        if self._primary is None and self._segments:
            for part in self._segments:
                if part.backwards:
                    self._emit_step([part], self._take_batches(1))
            if self._backwards:
                self._emit_step([self._cut_segment(now)], self._take_batches(1))
        self._segments.clear()

    def add_event(self, mark: Any) -> None:
        """Add a CUDA event, with the phase that it begins."""
        self.marks.append(mark)
        if len(self.marks) > MAX_EVENTS:
            self.without_events()

    def without_events(self) -> None:
        """Drop the segment's CUDA events: no more are made for a while."""
        self.marks = []
        self._marks_complete = False

    # -- repeated steps -------------------------------------------------------------------------

    def state(self, now: int) -> Hashable:
        """Return all state that affects how the next entries are read, just after a step. Return
        ``None`` if other state affects it too."""
        if self.begun != now or self.gap or self._segments or self.marks or self._marks_complete:
            return None
        if self._early_parts is not None or self._earlier_graphs:
            return None
        return (
            (self.explicit, self.open, self.outside_loader, self._updated, self._loader_trains),
            (self._batches, len(self._pending), self._forwards, self._backwards, self._micro),
            (self._is_buffered, self._primary, self._first_parts, *self._other_steps.items()),
            (self._period, *self._primary_steps_since.items()),
            (
                self._pre_forwards,
                self._old_pre_forwards,
                self._target_forwards,
                self._same_count >= _MIN_EQUAL_STEPS,
            ),
        )

    def swap_batches(self, batches: list[Any]) -> list[Any]:
        """Add ``batches`` to the pending ones. Return the same number of the oldest ones."""
        pending = [*self._pending, *batches]
        self._pending = pending[len(batches) :]
        return pending[: len(batches)]

    def on_repeats(self, count: int, end: int, seen: dict[str, int]) -> None:
        """Advance by ``count`` repeated steps, to ``end``, ns. Each adds the counts in ``seen``."""
        self.count += count
        self.begun = end
        for key, increment in seen.items():
            self.event_counts[key] += count * increment
        self.forwards += count * seen["forwards"]

    # -- internals ------------------------------------------------------------------------------

    def _leave_loader(self) -> None:
        self.outside_loader = True
        self.open = False

    def _end_optimizer_step(self, now: int) -> None:
        self._loader_trains = True
        number, self._pre_forwards = self._pre_forwards, 0
        self._same_count = self._same_count + 1 if number == self._old_pre_forwards else 0
        self._old_pre_forwards = number
        if self._same_count >= _MIN_EQUAL_STEPS:
            self._target_forwards = number
        self._complete_step(now)
        self.open = True
        self.clock.enter_between_steps()

    def _cut_segment(self, now: int) -> StepSegment:
        """End the segment, whatever its content, and return it."""
        marks = self.marks if self._marks_complete and len(self.marks) > 1 else None
        self.marks = self.marks[-1:]  # the end of this segment is the start of the next
        self._marks_complete = bool(self.marks)
        segment = StepSegment(self.begun, now, self.clock.cut(now), self._backwards, marks)
        self.begun = now
        self._earlier_graphs += self._graphs
        self._batches = self._forwards = self._backwards = self._graphs = self._evaluations = 0
        self._updated = False
        self._last_update = None
        self._updates = []
        return segment

    def _leave_out_segment(self, now: int) -> None:
        """End the segment, and count its time as part of no step."""
        self.gap += sum(self._cut_segment(now).phases)

    def _close_segment(self, now: int) -> None:
        """End the segment, and the step if an optimizer has stepped in it."""
        if self._updated:
            self._loader_trains = True
            if not self._emit_updates(now):
                self._complete_step(now)
        elif self._backwards:
            self._loader_trains = True
            self._micro += self._backwards
            self._hold_segment(self._cut_segment(now))
        elif self._forwards or not self._batches:
            self._drop_batches()
            self._leave_out_segment(now)
            self._drop_prefetched()
        else:
            self._hold_segment(self._cut_segment(now))

    def _emit_updates(self, now: int) -> bool:
        """Emit each step in the segment. Return false, without emitting, if there is only one."""
        updates = self._updates
        steps = Counter(update.optimizer for update in updates)
        if self._ended_by and self._ended_by not in steps:  # one steps within another's step
            return False
        self._ended_by = updates[-1].optimizer if updates else 0
        if len(updates) < 2 or self.outside_loader:
            return False
        fewest = min(steps.values())
        if fewest < 2:
            return False
        # among those that step equally often, the one that stepped last ends a step
        primary = next(
            update.optimizer for update in reversed(updates) if steps[update.optimizer] == fewest
        )
        ends = [update for update in updates if update.optimizer == primary]
        self._primary, self._period = (primary or self._last_inner, max(steps.values()) // fewest)
        self._other_steps.clear()
        self._primary_steps_since.clear()
        self._is_buffered = True
        t, acc, segments = self.begun, [0] * MAX_PHASES, self._segments
        backwards = self._micro
        self._segments, self._micro = [], 0
        total = self._cut_segment(now)
        ends[-1] = ends[-1]._replace(now=now, acc=total.phases, backwards=total.backwards)
        counted = 0
        for update in ends:
            phases = list(map(sub, update.acc, acc))
            part = StepSegment(t, update.now, phases, update.backwards - counted, None)
            backwards += update.backwards - counted
            self.is_backdated = update is not ends[-1]
            self._emit_step([*segments, part], self._take_batches(backwards))
            t, acc, counted, segments, backwards = (update.now, update.acc, update.backwards, [], 0)
        self.is_backdated = False
        return True

    def _drop_batches(self) -> None:
        """Drop this segment's batches, which are not part of a step."""
        if self._batches:
            del self._pending[-self._batches :]

    def _note_early_part(self, part: StepSegment, optimizer: int) -> None:
        early_parts = self._early_parts
        if early_parts is not None:
            if self.outside_loader and not self.explicit and len(early_parts) < MAX_EARLY_PARTS:
                early_parts.append((part, optimizer))
            else:
                self._early_parts = None

    def _hold_segment(self, segment: StepSegment, optimizer: int = 0) -> None:
        self._segments.append(segment)
        self._note_early_part(segment, optimizer)
        if len(self._segments) > MAX_HELD_SEGMENTS:
            self.gap += sum(self._segments.pop(0).phases)
            if self._first_parts:
                self._first_parts -= 1

    def _count_trained(self) -> int:
        """Return the number of held segments up to the last one with a backward."""
        return max((n for n, part in enumerate(self._segments, 1) if part.backwards), default=0)

    def _emit_unseen_update(self) -> None:
        """Emit the held segments as a step: weights changed without a known optimizer."""
        end = self._count_trained()
        if not end or end == self._first_parts:
            return
        if self._first_parts is None:  # a single change may be discarded gradients
            self._first_parts = end
            return
        for parts in (self._segments[: self._first_parts], self._segments[self._first_parts : end]):
            if parts:
                backwards = sum(part.backwards for part in parts)
                self._micro -= backwards
                self._emit_step(parts, self._take_batches(backwards))
        self._segments = self._segments[end:]
        self._first_parts = 0

    def _drop_prefetched(self) -> None:
        """Drop held segments of batches that were prefetched but not used in training."""
        if self._segments and not self._count_trained():
            self.gap += sum(sum(part.phases) for part in self._segments)
            self._segments.clear()

    def _complete_step(self, now: int) -> None:
        backwards = self._micro + self._backwards
        self._micro = 0
        parts = [*self._segments, self._cut_segment(now)]
        self._segments = []
        self._note_early_part(parts[-1], self._primary or 0)
        self._emit_step(parts, self._take_batches(backwards))

    def _take_batches(self, backwards: int) -> int:
        """Return the number of batches in a step, and take them from the pending ones."""
        batch_count = max(1, min(backwards, len(self._pending)) if self._pending else backwards)
        self.used = self._pending[:batch_count]
        del self._pending[:batch_count]
        return batch_count

    def _emit_step(self, parts: list[StepSegment], micro: int) -> None:
        joined = parts[-1]
        if len(parts) > 1:
            phases = list(joined.phases)
            for part in parts[:-1]:
                for index, value in enumerate(part.phases):
                    phases[index] += value
            has_marks = all(part.marks is not None for part in parts)
            marks = None
            if has_marks:  # a part's last event is the next part's first
                marks = [*parts[0].marks, *(m for part in parts[1:] for m in part.marks[1:])]
            joined = StepSegment(parts[0].t, joined.end, phases, joined.backwards, marks)
        gap, self.gap = self.gap, 0
        self._emit(joined, micro, gap)
        self.unused_graphs = 0
        self.count += 1
