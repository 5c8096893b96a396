"""A window opens when it should, keeps the steps that it says, and never meets another profiler."""

from __future__ import annotations

import gzip
import json
import mmap
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.recorder import slowdown, windows
from advisor.recorder.api import Recorder
from advisor.recorder.options import RecordOptions
from advisor.recorder.slowdown import SlowdownWatch
from advisor.recorder.telemetry import MemoryCounters
from advisor.recorder.windows import FOLDER_SECONDS
from advisor.recorder.writer import Writer

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timed

MS = 1_000_000
CALM = {"report": False, "guard": 1e9}
"""No guard: steps of a millisecond may take any time on a machine that runs other tests."""


def wait_for(recorder: Recorder, condition: Callable[[Any], bool]) -> None:
    """Wait until the writer's thread has caught up."""
    session = recorder._session
    assert session is not None
    deadline = time.monotonic() + 20
    while not condition(session):
        assert time.monotonic() < deadline
        session.writer._wake.set()
        time.sleep(0.005)


def steps_of(trace: Path) -> list[int]:
    """Numbers of the profiler's steps in a trace."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    names = {e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep#")}
    return sorted(int(name.partition("#")[2]) for name in names)


def run(tmp_path: Path, training: Any, steps: int, **options: Any) -> Any:
    calm = {"telemetry": 0.0, **CALM, **options}
    with Recorder(str(tmp_path / "run"), **calm):
        for _ in range(steps):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == steps
    return record


def test_first_window_is_at_its_requested_step(tmp_path: Path, training: Any) -> None:
    record = run(tmp_path, training, 30, skip=10, warmup=3, active=5)
    opened, closed = record.events_of("window")
    assert (opened["state"], opened["steps"]) == ("open", [10])
    assert (closed["state"], closed["steps"], closed["file"]) == (
        "done",
        [13, 17],
        "trace_w0.json.gz",
    )
    assert steps_of(tmp_path / "run" / "rank0" / closed["file"]) == [13, 14, 15, 16, 17]
    marked = [step.n for step in record.steps if step.window == 0]
    assert marked[:8] == list(range(10, 18))  # and those during which the trace was written
    assert record.steps[9].window is None
    assert not list((tmp_path / "run" / "rank0").glob(".*"))


def test_long_steps_are_not_waited_for(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four steps are profiled, unless the user says how many to skip. Each step counts as
    long as it is said to be, however long this machine takes for it."""
    due = windows.Windows._is_first_due
    for seconds, options, kept in (
        (1.5, {}, [2, 3]),
        (0.5, {}, [3, 3]),  # the profiler's start would be much of the first one
        (1.5, {"skip": 9}, None),
        (0.0, {}, None),
    ):
        durations: list[int] = []

        def due_after(
            self: Any,
            number: int,
            dur: int,
            long: float = seconds,
            durations: list[int] = durations,
        ) -> bool:
            durations.append(dur)
            return due(self, number, int(long * 1e9))

        monkeypatch.setattr(windows.Windows, "_is_first_due", due_after)
        folder = str(tmp_path / f"{seconds}{len(options)}")
        with Recorder(folder, telemetry=0.0, **CALM, **options):
            for _ in range(4):
                training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        record = only_rank(folder)
        assert durations and set(durations) <= {step.dur for step in record.steps}
        last = record.events_of("window")[-1]
        assert last["state"] == ("done" if kept else "never"), seconds
        assert last.get("steps") == kept


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_first_window_says_how_many_page_faults_came_before_it(
    tmp_path: Path, training: Any
) -> None:
    pages = 2_000
    with Recorder(str(tmp_path / "run"), skip=6, warmup=1, active=2, **CALM):
        for _ in range(12):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
                memory.madvise(mmap.MADV_NOHUGEPAGE)
                for start in range(0, len(memory), mmap.PAGESIZE):
                    memory[start] = 1
    record = only_rank(tmp_path / "run")
    opened = record.events_of("window")[0]
    assert opened["fault_steps"] == [1, 5]
    assert 5 * pages <= opened["minor_faults"] < 10 * pages
    assert 100 < opened["fault_ns"] < 100_000
    # another test may have used more memory before
    assert opened["memory_growth"] < 5 * pages * mmap.PAGESIZE


def test_first_window_waits_for_more_steps_if_it_may_end_page_faults(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 0.5 s or 20 ms, in which page faults take 20%, or hardly any time."""
    due, add_step = windows.Windows._is_first_due, windows.Windows.add_step
    for ms, per_step, options, first in (
        (500, 100_000, {}, 14),  # two seconds
        (500, 1_000, {}, 2),
        (20, 4_000, {}, 30),
        (20, 800, {}, 10),
        (20, 4_000, {"skip": 6}, 6),
    ):

        def due_after(self: Any, number: int, dur: int, ms: int = ms) -> bool:
            return due(self, number, ms * MS)

        def add(self: Any, slowed: bool, dur: int, ms: int = ms) -> None:
            add_step(self, slowed, ms * MS)

        monkeypatch.setattr(windows.Windows, "_is_first_due", due_after)
        monkeypatch.setattr(windows.Windows, "add_step", add)
        session: list[Any] = []

        def count(each: int = per_step, session: list[Any] = session) -> MemoryCounters:
            return MemoryCounters(each * session[0].steps.count, 0)

        monkeypatch.setattr(windows, "read_memory_counters", count)
        folder = str(tmp_path / f"{ms}-{per_step}-{len(options)}")
        with Recorder(folder, telemetry=0.0, **CALM, **options) as recorder:
            session.append(recorder._session)
            for _ in range(40):
                training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        opened = only_rank(folder).events_of("window")[0]
        assert (opened["state"], opened["steps"]) == ("open", [first]), (ms, per_step)


def test_run_ending_before_its_folder_exists_has_a_trace(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Writer._create_folder

    def make_slowly(writer: Writer) -> None:
        time.sleep(1.0)
        make(writer)

    monkeypatch.setattr(Writer, "_create_folder", make_slowly)
    record = run(tmp_path, training, 20, skip=10, warmup=1, active=4)
    assert record.events_of("window")[-1]["state"] == "done"
    assert steps_of(tmp_path / "run" / "rank0" / "trace_w0.json.gz") == [11, 12, 13, 14]


def test_trace_without_folder_is_given_up_immediately(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def raise_disk_full(writer: Writer) -> None:
        time.sleep(0.5)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, "_create_folder", raise_disk_full)
    start_s = time.monotonic()
    with Recorder(str(tmp_path / "run"), skip=10, warmup=1, active=4, **CALM):
        for _ in range(20):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    assert time.monotonic() - start_s < FOLDER_SECONDS / 2
    assert "No space left on device" in caplog.text and "no folder" in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_phases_are_ranges_of_the_windows_trace(tmp_path: Path, training: Any) -> None:
    with Recorder(str(tmp_path / "run"), skip=4, warmup=1, active=5, **CALM) as rec:
        for batch in training.loader(16):
            with rec.phase("mine"):
                time.sleep(0.002)
            training.learn(batch)
    record = only_rank(tmp_path / "run")
    first, last = record.events_of("window")[-1]["steps"]
    kept = [step for step in record.steps if first <= step.n <= last]
    with gzip.open(tmp_path / "run" / "rank0" / "trace_w0.json.gz") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    for name in ("data", "mine", "forward", "backward", "optimizer"):
        ranges = [e for e in events if e["name"] == f"advisor::{name}"]
        # the window opens inside the fetch of its first batch, and closes inside one
        assert 4 <= len(ranges) <= 6
        if name != "data":
            # the shortest: any of them may be interrupted between the two clock readings
            shortest = min(step.phases[name] for step in kept) / 1e3
            assert min(e["dur"] for e in ranges) == pytest.approx(shortest, rel=0.25, abs=60)
    assert next(e for e in events if e["name"] == "advisor::mine")["dur"] >= 2000


def test_python_stacks_know_the_modules(tmp_path: Path, training: Any) -> None:
    """torch's tracer reads the frame of ``Module.__call__``: in its place it would crash. The
    window opens before outermost modules are called directly, and closes after."""
    run(tmp_path, training, 12, skip=2, warmup=1, active=3, deep=True)
    with gzip.open(tmp_path / "run" / "rank0" / "trace_w0.json.gz") as file:
        names = [str(e.get("name")) for e in json.load(file)["traceEvents"]]
    assert any(name.startswith("nn.Module: Sequential") for name in names)
    assert any("conftest.py" in name and "learn" in name for name in names)


def test_profiler_exists_only_inside_a_window(tmp_path: Path, training: Any) -> None:
    seen = []
    with Recorder(str(tmp_path / "run"), skip=4, warmup=1, active=2, report=False):
        for _ in range(12):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            seen.append(torch.autograd._profiler_enabled())
    # torch does not count the warm-up, the step before
    assert seen == [False] * 4 + [True] * 2 + [False] * 6


@pytest.mark.parametrize("loader", [False, True])
def test_window_of_manual_updates_has_its_declared_steps(
    tmp_path: Path, training: Any, loader: bool
) -> None:
    data = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(40)]
    with Recorder(str(tmp_path / "run"), telemetry=0.0, **CALM):
        batches = torch.utils.data.DataLoader(data, batch_size=None) if loader else data
        for number, batch in enumerate(batches):
            with torch.profiler.record_function(f"mine#{number}"):
                training.loss(batch).backward()
            for p in training.net.parameters():
                p.data -= 0.01 * p.grad
                p.grad = None
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 40
    assert [event["state"] for event in record.events_of("window")] == ["open", "done"]
    (trace,) = (tmp_path / "run").glob("rank0/trace_w*.json.gz")
    reported_steps = record.events_of("window")[-1]["steps"]
    numbers = steps_of(trace)
    assert [numbers[0], numbers[-1]] == reported_steps and len(numbers) == 5
    with gzip.open(trace) as file:
        names = {e.get("name", "") for e in json.load(file)["traceEvents"]}
    marked = sorted(int(name[5:]) for name in names if str(name).startswith("mine#"))
    # without a loader a step's end is seen when the next forward begins, inside of our range
    assert marked == (numbers if loader else [*numbers[1:], numbers[-1] + 1])


def test_missing_window_is_explained_by_unseen_step_ends(
    tmp_path: Path,
) -> None:
    """No loader, no module that is called, no optimizer."""
    weight = torch.ones(4, requires_grad=True)
    with Recorder(str(tmp_path / "run"), telemetry=0.0, **CALM) as recorder:
        for number in range(40):
            if number == 20:
                wait_for(recorder, lambda session: session.steps.count > 15)
            (weight * torch.randn(4)).sum().backward()
            weight.data -= 0.01 * weight.grad
            weight.grad = None
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 40
    (never,) = record.events_of("window")
    assert never["state"] == "never" and "only known later" in never["why"]


def test_an_exported_model_in_a_loop_has_a_window(tmp_path: Path, training: Any) -> None:
    """An exported model is a ``GraphModule``, whose call lies around that of the module."""
    model = torch.export.export(training.net, (torch.randn(2, 4),)).module()
    with Recorder(str(tmp_path / "run"), telemetry=0.0, **CALM), torch.inference_mode():
        for _ in range(40):
            model(torch.randn(2, 4))
    record = only_rank(tmp_path / "run")
    assert record.inference
    assert [event["state"] for event in record.events_of("window")] == ["open", "done"]


def test_short_loop_gets_an_earlier_window(tmp_path: Path, training: Any) -> None:
    with Recorder(str(tmp_path / "run"), telemetry=0.0, **CALM):
        for batch in training.loader(12):
            training.learn(batch)
    closed = only_rank(tmp_path / "run").events_of("window")[-1]
    assert closed["state"] == "done"
    first, last = closed["steps"]
    assert last - first == 4
    assert last <= 11


def test_a_window_that_was_never_reached_is_reported(tmp_path: Path, training: Any) -> None:
    record = run(tmp_path, training, 7, skip=10)
    (never,) = record.events_of("window")
    assert never["state"] == "never"
    assert "7 steps" in never["why"]


def test_run_ending_in_a_window_keeps_its_records(tmp_path: Path, training: Any) -> None:
    record = run(tmp_path, training, 9, skip=3, warmup=2, active=50)
    closed = record.events_of("window")[-1]
    assert (closed["state"], closed["steps"]) == ("done", [5, 8])
    assert (tmp_path / "run" / "rank0" / closed["file"]).is_file()


def test_exception_in_a_window_keeps_its_records(tmp_path: Path, training: Any) -> None:
    recorder = Recorder(str(tmp_path / "run"), skip=3, warmup=1, active=50, **CALM)
    with pytest.raises(ZeroDivisionError), recorder:
        for number in range(9):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            if number == 7:
                raise ZeroDivisionError
    closed = only_rank(tmp_path / "run").events_of("window")[-1]
    assert closed["state"] == "done"
    assert not torch.autograd._profiler_enabled()


def test_user_profiler_is_not_disturbed(tmp_path: Path, training: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with (
        Recorder(str(tmp_path / "run"), skip=2, warmup=1, active=2, report=False),
        profile(activities=[ProfilerActivity.CPU]) as users_profiler,
    ):
        for _ in range(8):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    users_profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    assert sum(e.count for e in users_profiler.key_averages() if e.key == "aten::addmm") == 16
    windows = only_rank(tmp_path / "run").events_of("window")
    assert [w["state"] for w in windows if "another profiler" in w["why"]] == ["never"]
    assert not list((tmp_path / "run" / "rank0").glob("trace*"))


def test_a_profiler_that_starts_in_a_window_ends_it(tmp_path: Path, training: Any) -> None:
    """The process would crash otherwise when the recorder's trace is exported."""
    from torch.profiler import ProfilerActivity, profile

    with Recorder(str(tmp_path / "run"), skip=2, warmup=1, active=20, **CALM):
        for _ in range(6):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        assert torch.autograd._profiler_enabled()
        with profile(activities=[ProfilerActivity.CPU]) as users_profiler:
            for _ in range(5):
                training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        users_profiler.export_chrome_trace(str(tmp_path / "theirs.json"))
    assert sum(e.count for e in users_profiler.key_averages() if e.key == "aten::addmm") == 10
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 11
    stopped = record.events_of("window")[-1]
    assert stopped["state"] == "stopped"
    assert "another profiler" in stopped["why"]
    assert steps_of(tmp_path / "run" / "rank0" / stopped["file"])[:3] == [3, 4, 5]


def test_the_guard_stops_a_window_that_slows_training(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times as long while profiled, by a clock of the test's own."""
    too_slow = windows.Windows._explain_slowdown

    def too_slow_after(self: Any) -> str | None:
        assert all(dur > 0 for dur in (*self._unprofiled, *self._durations))
        for lengths, each in ((self._unprofiled, 10_000_000), (self._durations, 50_000_000)):
            count = len(lengths)
            lengths.clear()
            lengths.extend([each] * count)
        return too_slow(self)

    monkeypatch.setattr(windows.Windows, "_explain_slowdown", too_slow_after)
    with Recorder(str(tmp_path / "run"), skip=6, warmup=1, active=20, report=False):
        for _ in range(20):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    stopped = only_rank(tmp_path / "run").events_of("window")[1]
    assert stopped["state"] == "stopped"
    assert "times as long" in stopped["why"]
    first, last = stopped["steps"]
    assert last - first == 2


def test_a_window_opens_when_asked_by_file_and_by_signal(tmp_path: Path, training: Any) -> None:
    from advisor.recorder.writer import REQUEST

    before = signal.getsignal(signal.SIGUSR2)
    with Recorder(
        str(tmp_path / "run"), skip=9999, warmup=0, active=2, signal="SIGUSR2", report=False
    ) as rec:
        training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        wait_for(rec, lambda session: session.writer.folder is not None)
        time.sleep(0.05)
        (tmp_path / "run" / REQUEST).touch()
        wait_for(rec, lambda session: session.windows.requested_reason is not None)
        for _ in range(4):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        wait_for(rec, lambda session: session.windows._export is None)
        signal.raise_signal(signal.SIGUSR2)
        for _ in range(4):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    assert signal.getsignal(signal.SIGUSR2) is before
    closed = [w for w in only_rank(tmp_path / "run").events_of("window") if w["state"] == "done"]
    assert [w["reason"] for w in closed] == ["asked for", "SIGUSR2 received"]


def test_a_slowdown_opens_a_window(
    tmp_path: Path, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowdown, "MIN_BASELINE_NS", 0)
    monkeypatch.setattr(slowdown, "MIN_SLOW_NS", 0)
    with Recorder(str(tmp_path / "run"), skip=9999, warmup=0, active=2, report=False) as rec:
        for number in range(75):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            time.sleep(0.004 if number < 45 else 0.03)
            if number == 70:
                wait_for(
                    rec, lambda s: s.windows.automatic_reason is not None or s.windows._number >= 0
                )
    closed = [w for w in only_rank(tmp_path / "run").events_of("window") if w["state"] == "done"]
    assert len(closed) == 1
    assert "median" in closed[0]["reason"]


def test_trouble_is_a_slower_median_or_a_spike() -> None:
    def alarm_steps(durations: list[int]) -> list[int]:
        trouble = SlowdownWatch()
        return [n for n, ms in enumerate(durations) if trouble.add_step(ms * 1_000_000)]

    steady = [100] * 200
    assert alarm_steps(steady) == []
    assert alarm_steps([900, 900, 900, *steady]) == []  # start-up
    assert alarm_steps(steady + [120] * 100) == []  # a fifth slower
    assert alarm_steps([*steady, 290]) == []
    assert alarm_steps([*steady, 310]) == [200]
    # the median of 16 has moved once most of them are slow; reported once, not for ever
    assert alarm_steps(steady + [130] * 300) == [208]
    assert alarm_steps([1] * 100 + [2] * 100) == []  # a millisecond is the machine's
    # calls of a preparation, then the loop: once, when most of the recent ones are of the loop
    assert alarm_steps([10] * 20 + [31] * 300) == [27]
    assert alarm_steps([100] * 20 + [40] * 300) == [28]
    assert alarm_steps([10] * 20 + [19] * 300) == []
    # a fast step is compared with two seconds of others, and slow for one
    assert alarm_steps([10] * 100 + [14] * 100) == []
    assert alarm_steps([10] * 300 + [14] * 50) == []
    # the median of 16 has moved at the 9th; they are slow for 1 s after 62 more at most
    assert len(alarm_steps([10] * 300 + [14] * 100)) == 1
    assert alarm_steps([10] * 300 + [50]) == []  # 40 ms once: less than a window costs


def test_windows_of_a_rank_are_bounded(tmp_path: Path, training: Any) -> None:
    with Recorder(
        str(tmp_path / "run"), skip=2, warmup=0, active=1, windows=2, report=False
    ) as rec:
        session = rec._session
        assert session is not None
        for number in range(40):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            if number > 4:
                session.request_window("trouble", False)
                wait_for(rec, lambda session: session.windows._export is None)
    assert len(list((tmp_path / "run" / "rank0").glob("trace_w*.json.gz"))) == 2


def test_no_more_windows_once_traces_are_too_large(tmp_path: Path, training: Any) -> None:
    with Recorder(
        str(tmp_path / "run"), skip=2, warmup=0, active=1, max_bytes=100, report=False
    ) as rec:
        session = rec._session
        assert session is not None
        deadline = time.monotonic() + 20
        while not session.windows._bytes:  # until the first window is in its file
            assert time.monotonic() < deadline
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            session.writer._wake.set()
        wait_for(rec, lambda session: session.windows._export is None)
        session.request_window("please", True)
        while (
            session.windows.requested_reason is not None
        ):  # until a boundary that was read in time
            assert time.monotonic() < deadline
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    windows = only_rank(tmp_path / "run").events_of("window")
    assert [w["state"] for w in windows] == ["open", "done", "never"]


@pytest.mark.parametrize(
    ("ranks", "rank", "traces"),
    [
        ("0-7", 0, True),
        ("0-7", 7, True),
        ("0-7", 8, False),
        ("0,8,16", 8, True),
        ("0,8,16", 1, False),
        ("all", 511, True),
        ("3", 3, True),
        ("", 0, False),
        ("nonsense", 0, False),
    ],
)
def test_only_the_chosen_ranks_trace(ranks: str, rank: int, traces: bool) -> None:
    assert RecordOptions(ranks=ranks).traces(rank) is traces
    assert RecordOptions(ranks=ranks, active=0).traces(rank) is False
