"""Snapshots side by side: two of them, those of ranks, and a series over a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import advisor
from advisor.advise.engine import Options
from advisor.compare.compare import compare
from advisor.measure.memory.peak_memory import PeakMemory, growing_lines, order_snapshots
from advisor.read.formats.memory_snapshot.tables import read_snapshot
from advisor.render.formats import REPORTS
from advisor.testing.allocator import MIB, FakeAllocator, Training

FOLDER = Path(__file__).parents[1] / "corpus" / "memory"


def snapshot_after(steps: int, path: Path, **how: int) -> Path:
    m = FakeAllocator(max_entries=1500)
    t = Training(m, **how)  # type: ignore[arg-type]
    for _ in range(steps):
        t.step()
    return m.write(path)


def test_memory_raised_by_autocast_is_explained() -> None:
    c = compare(*(FOLDER / f"forward_{n}.pickle.gz" for n in ("fp32", "bf16_autocast")))
    assert c.verdict.startswith("Memory at the peak rises by 40%: 531 MiB → 744 MiB")
    assert "autocast copies +231 MiB" in c.verdict and "16-bit copy of each weight" in c.verdict
    sums = {a.name: (a.before, a.after) for a in c.amounts if a.group == "memory"}
    peak = sums.pop("in tensors at the peak")
    sums.pop("reserved then")
    by_lifetime = [sums.pop(n) for n in list(sums) if "allocated" in n]
    for side in (0, 1):
        assert sum(pair[side] or 0 for pair in sums.values()) == peak[side]
        assert sum(pair[side] or 0 for pair in by_lifetime) == peak[side]
    assert c.limits == []


def test_equal_snapshots_are_the_same_recording(tmp_path: Path) -> None:
    path = snapshot_after(4, tmp_path / "memory.pickle")
    c = compare(path, path)
    assert c.limits == ["Both are the same recording."]
    assert "stays the same" in c.verdict


def test_grown_memory_has_its_line_of_code(tmp_path: Path) -> None:
    before = snapshot_after(4, tmp_path / "a.pickle", activation=12 * MIB)
    larger = snapshot_after(4, tmp_path / "b.pickle", activation=48 * MIB)
    c = compare(before, larger)
    (line,) = [a for a in c.amounts if a.name.endswith("model.py:20 activations")]
    assert (line.before, line.after) == (4 * 12 * MIB, 4 * 48 * MIB)
    assert "activations +" in c.verdict


def test_ranks_are_side_by_side(tmp_path: Path) -> None:
    for rank in range(4):
        snapshot_after(
            4, tmp_path / f"rank{rank}.pickle", activation=(60 if rank == 2 else 12) * MIB
        )
    report = advisor.analyze(str(tmp_path))
    assert [each.name for each in report.memory_ranks] == [f"rank {n}" for n in range(4)]
    allocated = [each.allocated for each in report.memory_ranks]
    assert allocated[0] == allocated[1] == allocated[3] < allocated[2]
    text = REPORTS.render("terminal", report)
    (row,) = [line for line in text.splitlines() if "rank 2" in line and "activations +" in line]
    assert text.index("Memory by rank") < text.index(row.strip())


@pytest.mark.parametrize("named", ["step_{}", "memory_{}"])
def test_a_leak_over_a_run_has_its_line_and_its_rate(tmp_path: Path, named: str) -> None:
    m = FakeAllocator(max_entries=300)  # about one step: the history alone shows no growth
    t = Training(m, leak=5 * MIB)
    for step in range(1, 101):
        t.step()
        if step % 25 == 0:
            m.write(tmp_path / f"{named.format(step)}.pickle")
    report = advisor.analyze(str(tmp_path))
    (view,) = report.memory
    assert [each.name for each in view.series] == [
        f"{named.format(step)}.pickle" for step in (25, 50, 75, 100)
    ]
    (line,) = view.grows
    rate = 5 * MIB if named == "step_{}" else 125 * MIB
    assert (line.line, line.bytes) == (49, rate)
    (risk,) = report.risks
    assert risk.rule == "memory-leak" and "train.py:49" in risk.summary


def test_a_series_that_stays_the_same_grows_nowhere(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        snapshot_after(step, tmp_path / f"step_{step}.pickle")
    report = advisor.analyze(str(tmp_path), Options())
    assert report.memory[0].grows == []
    assert "memory-leak" not in [risk.rule for risk in report.risks]


def test_two_snapshots_are_not_series_of_growth(tmp_path: Path) -> None:
    snapshots = [snapshot_after(n, tmp_path / f"step_{n}.pickle", leak=5 * MIB) for n in (10, 20)]
    peaks = [PeakMemory(read_snapshot([path.read_bytes()], str(path)), 0) for path in snapshots]
    assert growing_lines(peaks)[0].is_empty()
    assert len(order_snapshots([peak.snapshot for peak in peaks])) == 2
