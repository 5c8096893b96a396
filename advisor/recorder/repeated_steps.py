"""Fast reader of steps that repeat the one before, many at once.

Most steps of a training put the same codes on the tape, with other times. What such a step does to
the state of the reader is then known: from one step's end to the next it led from a state to the
same state. So a stretch of the tape that was read entry by entry, and began and ended in one state,
is a pattern; where the same codes follow, the times are taken out in columns, in a tenth of the
time. Everything else is read entry by entry, and what a pattern says of its first step is compared
with what was found there."""

from collections.abc import Hashable
from itertools import chain
from operator import add, sub
from typing import Any, NamedTuple

from advisor.recorder import tape
from advisor.recorder.steps import RecordedStep, StepFinder, StepSegment
from advisor.recorder.tape import DATA, MAX_PHASES, Clock

LIMIT = 128
"""Most steps read at once: handling them takes about half a millisecond, in which the training
thread may wait for the interpreter."""
MAX_STATES = 16
MAX_PATTERNS = 4
"""Most patterns kept for one state."""
MAX_ENTRIES = 512
"""Most entries of a step that can be a pattern, and most entries read at once."""

LEAVING = tape.FORWARDED | {tape.LEAVE, tape.FETCHED, tape.BACKWARD_END, tape.OPTIMIZER_END}
"""Codes that end the innermost phase."""
KNOWN = LEAVING | {
    tape.FETCH, tape.FETCHED_INSIDE, tape.BATCH, tape.OPTIMIZED_BY, tape.BOUNDARY, tape.FORWARD_OF,
}  # fmt: skip
"""Codes that a pattern may have besides phases."""
TIMELESS = frozenset((tape.BATCH, tape.OPTIMIZED_BY, tape.FORWARD_OF))


class RepeatedBlock(NamedTuple):
    """Consecutive steps outside windows, in columns; times in ns."""

    n: int
    begins: list[int]
    ends: list[int]
    phases: list[tuple[int, list[int]]]
    """Number of each phase, and its time in each step, ns."""
    micro: int
    batches: list[list[Any]]
    """Notes on each step's batches."""

    def steps(self) -> list[RecordedStep]:
        result = []
        for index, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            phases = [0] * MAX_PHASES
            for phase, column in self.phases:
                phases[phase] = column[index]
            batch = self.batches[index] if self.batches else []
            number = self.n + index
            result.append(
                RecordedStep(number, begin, end, phases, self.micro, 0, None, 0, batch, None, None)
            )
        return result


class StepPattern(NamedTuple):
    """Pattern of tape entries that repeats with every step."""

    codes: list[int]
    intervals: list[tuple[int, list[tuple[int, int]]]]
    """Entries that each phase but one lasts from and to; -1 stands for the step's begin."""
    rest: int
    """Number of the phase that has the remaining time; -1 if none."""
    fixed: list[tuple[int, Any]]
    """Entries whose value must be the given one."""
    batches: list[int]
    """Entries that describe a batch."""
    micro: int
    count_increments: dict[str, int]
    """Counts that a step adds to ``StepFinder.event_counts``."""


class StepMatcher:
    """Patterns learnt from one tape, and their matches."""

    def __init__(self, clock: Clock, steps: StepFinder) -> None:
        self._clock = clock
        self._steps = steps
        self._patterns: dict[Hashable, list[StepPattern]] = {}
        self._since = -1
        self._state: Hashable = None
        self._seen: dict[str, int] = {}

    def forget(self) -> None:
        """Forget the last step's end: the next piece of tape may not follow it."""
        self._since = -1

    def resume(self, entry: int) -> None:
        """Continue at ``entry``, up to where repeated steps were read; the state is the same."""
        self._since, self._seen = entry, dict(self._steps.event_counts)

    def ended(
        self,
        state: Hashable,
        codes: list[int],
        values: list[Any],
        entry: int,
        result: tuple[StepSegment, int] | None,
    ) -> None:
        """Learn from a step that ended before ``entry``, in ``state`` (``None``: it cannot repeat).
        ``result`` is its segment and number of batches; ``None``: it was no plain step."""
        since, before, seen = self._since, self._state, self._seen
        self._since, self._state, self._seen = entry, state, dict(self._steps.event_counts)
        if since < 1 or state is None or state != before or result is None:
            return
        if entry - since > MAX_ENTRIES:
            return
        pattern = self._learn(codes[since:entry], values[since:entry], values[since - 1], *result)
        if pattern is None:
            return
        added = {key: self._steps.event_counts[key] - seen[key] for key in seen}
        known = self._patterns.setdefault(state, [])
        known.insert(0, pattern._replace(count_increments=added))
        del known[MAX_PATTERNS:]
        if len(self._patterns) > MAX_STATES:
            self._patterns.clear()

    def match(
        self, state: Hashable, codes: list[int], values: list[Any], entry: int
    ) -> tuple[RepeatedBlock, dict[str, int], int] | None:
        """Return the steps from ``entry`` on that repeat a pattern, the counts each adds to
        ``StepFinder.event_counts``, and the entry after them; ``None`` if none do."""
        for pattern in self._patterns.get(state, ()):
            wanted = pattern.codes
            size = len(wanted)
            most = max(1, min(LIMIT, MAX_ENTRIES // size))
            end, last = entry, min(len(codes), entry + most * size)
            while end + size <= last and codes[end : end + size] == wanted:
                end += size
            count = (end - entry) // size
            for at, value in pattern.fixed:
                column = values[entry + at : end : size]
                if column.count(value) < count:
                    count = min(count, [other == value for other in column].index(False))
            if count:
                return (
                    self._block(pattern, values, entry, count),
                    pattern.count_increments,
                    entry + count * size,
                )
        return None

    def _block(
        self, pattern: StepPattern, values: list[Any], entry: int, count: int
    ) -> RepeatedBlock:
        size = len(pattern.codes)
        stop = entry + count * size
        columns: dict[int, list[int]] = {}

        def column(at: int) -> list[int]:
            result = columns.get(at)
            if result is None:
                # where a step begins is where the one before ended
                result = columns[at] = values[entry + at : stop + at : size][:count]
            return result

        begins, ends = column(-1), column(size - 1)
        rest = list(map(sub, ends, begins))
        phases = []
        for phase, intervals in pattern.intervals:
            total: list[int] | None = None
            for a, b in intervals:
                lengths = list(map(sub, column(b), column(a)))
                total = lengths if total is None else list(map(add, total, lengths))
            if total is not None:
                phases.append((phase, total))
                rest = list(map(sub, rest, total))
        if pattern.rest >= 0:
            phases.append((pattern.rest, rest))
        batches: list[list[Any]] = []
        if pattern.batches:
            noted = [values[entry + at : stop : size] for at in pattern.batches]
            stock = self._steps.swap_batches([*chain.from_iterable(zip(*noted, strict=True))])
            micro = len(pattern.batches)
            batches = [stock[i : i + micro] for i in range(0, len(stock), micro)]
        return RepeatedBlock(self._steps.count, begins, ends, phases, pattern.micro, batches)

    def _learn(
        self, codes: list[int], values: list[Any], begin: int, result: StepSegment, micro: int
    ) -> StepPattern | None:
        """Return the pattern of these entries; ``None`` if their codes do not say all they do."""
        if any(code >= MAX_PHASES and code not in KNOWN for code in codes):
            return None
        if result.t != begin or result.end != values[-1]:
            return None
        batches = [at for at, code in enumerate(codes) if code == tape.BATCH]
        fetched = [at for at, c in enumerate(codes) if c in (tape.FETCHED, tape.FETCHED_INSIDE)]
        if [at - 1 for at in batches] != fetched or (batches and len(batches) != micro):
            return None
        spans: dict[int, list[tuple[int, int]]] = {}
        # the phase that is open between steps: the state is again what it was when they began
        current, stack = self._clock.cur, list(self._clock.stack)
        last = -1
        for at, code in enumerate(codes):
            if code in TIMELESS or code in (tape.FETCHED_INSIDE, tape.BOUNDARY):
                continue
            leaves = code in LEAVING
            if leaves and not stack:
                return None
            spans.setdefault(current, []).append((last, at))
            last = at
            if leaves:
                current = stack.pop()
            else:
                stack.append(tape.OTHER if current == tape.BETWEEN else current)
                current = DATA if code == tape.FETCH else code
        if last != len(codes) - 1:
            spans.setdefault(current, []).append((last, len(codes) - 1))
        at_ = lambda index: begin if index < 0 else values[index]  # noqa: E731
        lengths = {phase: sum(at_(b) - at_(a) for a, b in ab) for phase, ab in spans.items()}
        if any(ns != lengths.get(phase, 0) for phase, ns in enumerate(result.phases)):
            return None
        rest = max(spans, key=lambda phase: len(spans[phase]))
        return StepPattern(
            codes,
            [(phase, intervals) for phase, intervals in spans.items() if phase != rest],
            rest,
            [
                (index, values[index])
                for index, code in enumerate(codes)
                if code == tape.OPTIMIZED_BY
            ],
            batches,
            micro,
            {},
        )
