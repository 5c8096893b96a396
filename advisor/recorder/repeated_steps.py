"""Fast reader of repeated steps, many at once.

Most training steps put the same codes on the tape, with different times, and leave the reader in
the same state. So the entries of a step that was read one by one, and that began and ended in the
same state, form a pattern. If the same codes follow, their times are read in columns, ten times
faster. Everything else is read entry by entry. A new pattern's result for its first step is
compared with the result of reading that step entry by entry."""

from collections.abc import Hashable
from itertools import chain
from operator import add, sub
from typing import Any, NamedTuple

from advisor.recorder import tape
from advisor.recorder.steps import RecordedStep, StepFinder, StepSegment
from advisor.recorder.tape import DATA, MAX_PHASES, Clock

_MAX_STEPS = 128
"""Maximum number of steps read at once. This takes about half a millisecond, during which the
training thread may wait for the interpreter."""
MAX_STATES = 16
MAX_PATTERNS = 4
"""Maximum number of patterns kept per state."""
_MAX_ENTRIES = 512
"""Maximum number of entries of a pattern, and of entries read at once."""

LEAVING_CODES = tape.FORWARDED | {tape.LEAVE, tape.FETCHED, tape.BACKWARD_END, tape.OPTIMIZER_END}
"""Codes that end the innermost phase."""
PATTERN_CODES = LEAVING_CODES | {
    tape.FETCH, tape.FETCHED_INSIDE, tape.BATCH, tape.OPTIMIZED_BY, tape.BOUNDARY, tape.FORWARD_OF,
}  # fmt: skip
"""Codes that a pattern may have, in addition to phases."""
CODES_WITHOUT_TIME = frozenset((tape.BATCH, tape.OPTIMIZED_BY, tape.FORWARD_OF))


class RepeatedBlock(NamedTuple):
    """Consecutive steps outside windows, as columns; times in ns."""

    n: int
    starts: list[int]
    ends: list[int]
    phases: list[tuple[int, list[int]]]
    """Number of each phase with its time in each step, ns."""
    micro: int
    batches: list[list[Any]]
    """Notes on each step's batches."""

    def steps(self) -> list[RecordedStep]:
        result = []
        for index, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            phases = [0] * MAX_PHASES
            for phase, column in self.phases:
                phases[phase] = column[index]
            batch = self.batches[index] if self.batches else []
            number = self.n + index
            result.append(
                RecordedStep(number, start, end, phases, self.micro, 0, None, 0, batch, None, None)
            )
        return result


class StepPattern(NamedTuple):
    """Pattern of tape entries that repeats with every step."""

    codes: list[int]
    intervals: list[tuple[int, list[tuple[int, int]]]]
    """First and last entries of each phase but one; -1 is the start of the step."""
    remaining: int
    """Number of the phase that has the remaining time, or -1 if there is none."""
    fixed: list[tuple[int, Any]]
    """Entries with the value that each must have."""
    batches: list[int]
    """Entries that describe a batch."""
    micro: int
    count_increments: dict[str, int]
    """Counts that each step adds to ``StepFinder.event_counts``."""


class StepMatcher:
    """Matcher of steps against the patterns found on one tape."""

    def __init__(self, clock: Clock, steps: StepFinder) -> None:
        self._clock = clock
        self._steps = steps
        self._patterns: dict[Hashable, list[StepPattern]] = {}
        self._start = -1
        self._state: Hashable = None
        self._counts: dict[str, int] = {}

    def forget(self) -> None:
        """Forget the end of the last step, because the next entries may not follow it."""
        self._start = -1

    def resume(self, entry: int) -> None:
        """Continue in the same state at ``entry``, after the repeated steps."""
        self._start, self._counts = entry, dict(self._steps.event_counts)

    def ended(
        self,
        state: Hashable,
        codes: list[int],
        values: list[Any],
        entry: int,
        result: tuple[StepSegment, int] | None,
    ) -> None:
        """Make a pattern of the step that ended before ``entry``, if it can repeat. ``state`` is
        ``None`` if it cannot. ``result`` is its segment and number of batches, or ``None``."""
        start, previous_state, counts = self._start, self._state, self._counts
        self._start, self._state, self._counts = entry, state, dict(self._steps.event_counts)
        if start < 1 or state is None or state != previous_state or result is None:
            return
        if entry - start > _MAX_ENTRIES:
            return
        pattern = self._make_pattern(
            codes[start:entry], values[start:entry], values[start - 1], *result
        )
        if pattern is None:
            return
        increments = {key: self._steps.event_counts[key] - counts[key] for key in counts}
        patterns = self._patterns.setdefault(state, [])
        patterns.insert(0, pattern._replace(count_increments=increments))
        del patterns[MAX_PATTERNS:]
        if len(self._patterns) > MAX_STATES:
            self._patterns.clear()

    def match(
        self, state: Hashable, codes: list[int], values: list[Any], entry: int
    ) -> tuple[RepeatedBlock, dict[str, int], int] | None:
        """Return the steps from ``entry`` on that repeat a pattern, the counts that each adds to
        ``StepFinder.event_counts``, and the entry after them, or ``None`` if no steps repeat."""
        for pattern in self._patterns.get(state, ()):
            pattern_codes = pattern.codes
            size = len(pattern_codes)
            max_steps = max(1, min(_MAX_STEPS, _MAX_ENTRIES // size))
            end, limit = entry, min(len(codes), entry + max_steps * size)
            while end + size <= limit and codes[end : end + size] == pattern_codes:
                end += size
            count = (end - entry) // size
            for offset, value in pattern.fixed:
                column = values[entry + offset : end : size]
                if column.count(value) < count:
                    count = min(count, [other == value for other in column].index(False))
            if count:
                return (
                    self._make_block(pattern, values, entry, count),
                    pattern.count_increments,
                    entry + count * size,
                )
        return None

    def _make_block(
        self, pattern: StepPattern, values: list[Any], entry: int, count: int
    ) -> RepeatedBlock:
        size = len(pattern.codes)
        stop = entry + count * size
        columns: dict[int, list[int]] = {}

        def column(offset: int) -> list[int]:
            result = columns.get(offset)
            if result is None:
                # a step begins where the previous one ended
                result = columns[offset] = values[entry + offset : stop + offset : size][:count]
            return result

        starts, ends = column(-1), column(size - 1)
        remaining = list(map(sub, ends, starts))
        phases = []
        for phase, intervals in pattern.intervals:
            total: list[int] | None = None
            for a, b in intervals:
                lengths = list(map(sub, column(b), column(a)))
                total = lengths if total is None else list(map(add, total, lengths))
            if total is not None:
                phases.append((phase, total))
                remaining = list(map(sub, remaining, total))
        if pattern.remaining >= 0:
            phases.append((pattern.remaining, remaining))
        batches: list[list[Any]] = []
        if pattern.batches:
            notes = [values[entry + offset : stop : size] for offset in pattern.batches]
            oldest = self._steps.swap_batches([*chain.from_iterable(zip(*notes, strict=True))])
            micro = len(pattern.batches)
            batches = [oldest[i : i + micro] for i in range(0, len(oldest), micro)]
        return RepeatedBlock(self._steps.count, starts, ends, phases, pattern.micro, batches)

    def _make_pattern(
        self, codes: list[int], values: list[Any], start: int, result: StepSegment, micro: int
    ) -> StepPattern | None:
        """Return the pattern of these entries, or ``None`` if their codes do not determine the
        step."""
        if any(code >= MAX_PHASES and code not in PATTERN_CODES for code in codes):
            return None
        if result.t != start or result.end != values[-1]:
            return None
        batches = [at for at, code in enumerate(codes) if code == tape.BATCH]
        fetched = [at for at, c in enumerate(codes) if c in (tape.FETCHED, tape.FETCHED_INSIDE)]
        if [at - 1 for at in batches] != fetched or (batches and len(batches) != micro):
            return None
        spans: dict[int, list[tuple[int, int]]] = {}
        # the phase open between steps: the state is the same as when they began
        current, stack = self._clock.cur, list(self._clock.stack)
        last = -1
        for at, code in enumerate(codes):
            if code in CODES_WITHOUT_TIME or code in (tape.FETCHED_INSIDE, tape.BOUNDARY):
                continue
            leaves = code in LEAVING_CODES
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
        at_ = lambda index: start if index < 0 else values[index]  # noqa: E731
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
