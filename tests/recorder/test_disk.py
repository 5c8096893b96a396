"""A recording leaves little on a disk: a bounded file of steps with exact sums. On a full disk
it leaves one warning, no temporary files, and the reason why the record ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from advisor.core.run_directory import STEPS, StepRow, read_recording
from advisor.recorder import writer as writing
from advisor.recorder.repeated_steps import RepeatedBlock
from advisor.recorder.steps import RecordedStep
from advisor.recorder.tape import MAX_PHASES, PHASES
from advisor.recorder.writer import StepLines, Writer

torch = pytest.importorskip("torch")

FULL = """
import resource, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
net = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for (x,) in DataLoader(TensorDataset(torch.randn(4000, 16)), 2):
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [80 << 10, pytest.param(16 << 10, marks=pytest.mark.thorough)])
def test_full_disk_is_reported_once_and_leaves_no_file(
    size: int, program: Any, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the disk: first the trace meets it, or the steps."""
    before = ("-m", "advisor", "record", "--no-report", "-o", "run")
    result = program(FULL, str(size), before=before)
    assert (result.returncode, result.stdout) == (0, "trained\n")
    assert result.stderr.count("WARNING") + result.stderr.count("not written") <= 1
    assert result.stderr.count("recording stopped") <= 1
    leftovers = [path.name for path in (tmp_path / "run").rglob("*") if path.name.startswith(".")]
    assert leftovers == []
    record = read_recording(tmp_path / "run").ranks[0]
    (end,) = record.events_of("end")
    assert end["reason"] == "disk" and "large" in end["message"]
    assert end["steps"] >= len(record.steps) > 50
    assert read_recording(tmp_path / "run").problems == []


def _steps(count: int) -> list[StepRow]:
    chance = random.Random(3)
    result, t = [], 0
    for n in range(count):
        phases = {"forward": chance.randrange(900, 1100), "backward": chance.randrange(1900, 2100)}
        dur = sum(phases.values())
        step = StepRow(n=n, t=t, dur=dur, phases=phases, samples=4, bytes=100 + n % 2, shapes=0)
        if n % 997 == 996:
            step.evaluation = 5000
        if n % 501 == 500:
            step.phases["data"] = 50_000
            step.dur += 50_000
        t += step.dur
        result.append(step)
    return result


def test_the_file_of_steps_is_bounded_and_its_sums_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SINGLE", 100)
    monkeypatch.setattr(writing, "MAX_OUTLIERS", 25)
    run = tmp_path / "run"
    (run / "rank0").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    lines = StepLines(run / "rank0" / STEPS)
    steps = _steps(50_000)
    plain = [StepRow(**{f: getattr(s, f) for f in s.__struct_fields__}) for s in steps]
    for number, step in enumerate(steps):
        step.phases = dict(step.phases)
        lines.add(step)
        if number % 1000 == 0:
            lines.flush()
    lines.join()
    lines.flush()
    lines.close()
    assert len((run / "rank0" / STEPS).read_text().splitlines()) < 1500
    read = read_recording(run).ranks[0].steps
    assert [step.n for step in read] == list(range(50_000))
    for name in ("dur", "samples", "bytes", "evaluation", "gc"):
        assert sum(getattr(s, name) for s in read) == sum(getattr(s, name) for s in plain), name
    for phase in ("forward", "backward", "data"):
        assert sum(s.phases.get(phase, 0) for s in read) == sum(
            s.phases.get(phase, 0) for s in plain
        )
    assert all(sum(s.phases.values()) == s.dur for s in read)
    assert [s.t for s in read[:100]] == [s.t for s in plain[:100]]
    # a long step of an early line is one of its own
    assert max(s.dur for s in read[:2000]) == max(s.dur for s in plain[:2000])


def test_blocks_of_steps_are_joined_as_single_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SINGLE", 64)

    def write_steps(name: str, together: bool) -> list[StepRow]:
        run = tmp_path / name
        (run / "rank0").mkdir(parents=True)
        (run / "manifest.json").write_text("{}")
        failed: list[str] = []
        writer = Writer(
            out="", rank=lambda: (0, 1), names=list(PHASES), describe=None, failed=failed.append
        )  # type: ignore[arg-type]
        lines = StepLines(run / "rank0" / STEPS)
        writer._files[RecordedStep] = lines
        for number in range(0, 2000, 50):
            begins = [1000 * (number + i) for i in range(50)]
            columns = [(3, [300 + i for i in range(50)]), (4, [700 - i for i in range(50)])]
            block = RepeatedBlock(number, begins, [b + 1000 for b in begins], columns, 1, [])
            if together:
                writer._block(block, None)
            else:
                for step in block.steps():
                    lines.add(writer._make_row(step))
        lines.join()
        lines.flush()
        lines.close()
        return read_recording(run).ranks[0].steps

    once, one_by_one = write_steps("a", True), write_steps("b", False)
    assert len(once) == len(one_by_one) == 2000
    assert len((tmp_path / "a" / "rank0" / STEPS).read_text().splitlines()) < 500
    for steps in (once, one_by_one):
        assert sum(s.dur for s in steps) == 2_000_000
        assert sum(s.phases["forward"] for s in steps) == 40 * sum(range(300, 350))
    assert MAX_PHASES > 5


def test_a_line_that_stands_for_too_many_steps_is_damage(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    (tmp_path / "manifest.json").write_text("{}")
    line = {"n": 0, "of": 10**12, "t": 0, "dur": 10}
    (tmp_path / "rank0" / STEPS).write_text(json.dumps(line) + "\n")
    record = read_recording(tmp_path)
    assert record.ranks[0].steps == []
    assert any("damaged" in problem for problem in record.problems)
