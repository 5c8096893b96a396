"""Steps that are read together are the same as read one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from advisor.core.run_directory import Manifest, RankInfo, StepRow
from advisor.recorder import tape
from advisor.recorder import tape_reader as reading
from advisor.recorder.loaders import Batch, Loaders
from advisor.recorder.repeated_steps import RepeatedBlock
from advisor.recorder.steps import RecordedStep
from advisor.recorder.tape_reader import TapeReader
from advisor.recorder.writer import StepLines, Writer

pytestmark = pytest.mark.timed

USER = len(tape.PHASES)
FETCH = [tape.FETCH, tape.FETCHED, tape.BATCH]
LEARN = [tape.FORWARD, tape.FORWARD_END, tape.BACKWARD, tape.BACKWARD_END]
APPLY = [tape.OPTIMIZER, tape.OPTIMIZED_BY, tape.OPTIMIZER_END]
STEPS = {
    "loader": [*FETCH, tape.H2D, tape.LEAVE, *LEARN, *APPLY],
    "own phases": [*FETCH, USER, tape.H2D, tape.LEAVE, tape.LEAVE, *LEARN, *APPLY],
    "no loader": [*LEARN, *APPLY],
    "no loader, copied": [tape.H2D, tape.LEAVE, *LEARN, *APPLY],
    "accumulation": [*FETCH, *LEARN, *FETCH, *LEARN, *FETCH, *LEARN, *APPLY],
    "ahead": [*LEARN, *FETCH, *APPLY],
    "two optimizers": [*FETCH, *LEARN, *APPLY, *LEARN, *APPLY],
    "without an optimizer": [tape.GRADIENTS_USED, *LEARN],
    "said": [*LEARN, *APPLY, tape.BOUNDARY],
    "validation": [*FETCH, tape.FORWARD, tape.FORWARD_END_NO_GRAD],
    "forwards": [tape.FORWARD, tape.FORWARD_END_NO_GRAD],
    "pause": [*FETCH, *LEARN, tape.PAUSE, *APPLY],
    "save": [*LEARN, *APPLY, tape.SAVE],
    "epoch": [tape.FETCH, tape.EXHAUSTED, tape.ITERATE, tape.ITERATED, tape.LOADER],
    "raised": [*FETCH, tape.FORWARD, tape.RESET],
}


class PlainWriter:
    """A reader, and the steps that it found."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.together = 0
        self.events: list[Any] = []
        loaders = Loaders(lambda kind, data: self.events.append((kind, data)))
        self.reader = TapeReader(loaders, self._write_one, self._write_several)

    def _write_one(self, segment: Any, micro: int, gap: int) -> None:
        reader = self.reader
        used, reader.steps.used = reader.steps.used, []
        paused, reader.paused = reader.paused, 0
        number = reader.steps.count
        step = (number, segment.t, segment.end, segment.phases, micro, gap, paused, used)
        self.steps.append(step)

    def _write_several(self, block: RepeatedBlock) -> None:
        self.together += len(block.ends)
        self.steps += [
            (s.n, s.t, s.end, s.phases, s.micro, s.gap, s.gc, s.batch) for s in block.steps()
        ]


def write_tape(kinds: list[tuple[str, int]], lengths: list[int]) -> list[Any]:
    """A tape of so many steps of each kind."""
    now, entries = 1000, []
    for kind, times in kinds:
        for code in STEPS[kind] * times:
            now += lengths[len(entries) % len(lengths)]
            value: Any = now
            if code == tape.BATCH:
                value = f"batch {len(entries)}"
            elif code == tape.OPTIMIZED_BY:
                value = 10**9 + (kind == "two optimizers" and len(entries) % 4 == 0)
            elif code == tape.ITERATED:
                value = {"id": 0, "workers_started_ns": None, "evaluation": True}
            elif code == tape.LOADER:
                value = 0
            elif code == tape.PAUSE:
                value = 7
            entries += [code, value]
    return entries


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 9)), max_size=12),
    st.lists(st.integers(0, 50), min_size=1, max_size=23),
    st.lists(st.integers(1, 120), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_steps_read_in_bulk_equal_single_reads(
    kinds: list[tuple[str, int]], lengths: list[int], cuts: list[int]
) -> None:
    entries = write_tape(kinds, lengths)
    slowly, fast = PlainWriter(), PlainWriter()
    for writer in (slowly, fast):
        writer.reader.clock.start(0)
    slowly.reader.read(entries)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(reading.time, "sleep", lambda seconds: None)
        begin = 0
        for cut in [*cuts, len(entries)]:
            fast.reader.read(entries[begin : begin + 2 * cut], aside=True)
            begin += 2 * cut
    for writer in (slowly, fast):
        writer.reader.steps.finish(10**9)
    assert fast.steps == slowly.steps
    assert fast.reader.steps.event_counts == slowly.reader.steps.event_counts
    assert fast.reader.steps.forwards == slowly.reader.steps.forwards
    assert fast.events == slowly.events


@pytest.mark.parametrize(
    "kind", ["loader", "own phases", "no loader", "accumulation", "ahead", "said"]
)
def test_steps_that_repeat_are_read_together(kind: str) -> None:
    writer = PlainWriter()
    writer.reader.clock.start(0)
    writer.reader.read(write_tape([(kind, 300)], [3, 5, 11]), aside=True)
    # without a loader, the first ones are looked at more closely: another optimizer may end them
    assert writer.together > (180 if kind == "no loader" else 280)


def test_steps_written_in_bulk_equal_single_writes(tmp_path: Path) -> None:
    names = [*tape.PHASES, 'mine "%d" é']
    kinds = {"a": (3, 96, 0, None), "b": (5, 160, 1, 0.25)}
    begins = [1000, 1100, 1300]
    ends = [1100, 1300, 1600]

    def lines(name: str, batches: list[list[Any]], together: bool) -> list[Any]:
        block = RepeatedBlock(
            7,
            begins,
            ends,
            [(0, [40, 60, 100]), (1, [0, 0, 0]), (USER, [60, 140, 200])],
            2,
            batches,
        )
        writer = Writer(
            out=str(tmp_path),
            rank=lambda: (0, 1),
            names=names,
            describe=lambda run: (Manifest(), RankInfo()),
            failed=pytest.fail,
        )
        writer.resolve = lambda glance: Batch(*kinds[glance])
        writer._files = {RecordedStep: StepLines(tmp_path / name)}
        if together:
            writer._block(block, 512)
        else:
            steps = [writer._make_row(step) for step in block.steps()]
            steps[-1].rss = 512
            for step in steps:
                writer._files[RecordedStep].add(step)
        writer._files[RecordedStep].flush()
        decoder = msgspec.json.Decoder(StepRow)
        return [decoder.decode(line) for line in (tmp_path / name).read_bytes().splitlines()]

    for number, batches in enumerate(([], [["a", "a"]] * 3, [["a", None], ["b", "a"], ["b", "b"]])):
        result = lines(f"together{number}", batches, True)
        assert result == lines(f"single{number}", batches, False)
        assert [step.dur for step in result] == [100, 200, 300]
        assert [step.phases[names[-1]] for step in result] == [60, 140, 200]
