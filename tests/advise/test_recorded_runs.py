"""A run directory is analysed with what is in it: all of it, or what a killed run left."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.advise import report_text
from advisor.advise.engine import Options, analyze
from advisor.advise.impact import without_gain
from advisor.core.errors import AdvisorError
from advisor.core.finding import Edit, Evidence, Finding, Select
from advisor.core.report import Report
from advisor.core.run_directory import HostSample, RankInfo, RankRecord, RecordedDevice
from advisor.measure import Analysis
from advisor.read import open_run
from advisor.render.formats import REPORTS
from advisor.replay.estimators import GainEstimator
from advisor.replay.what_if import what_if
from advisor.rules.support.loader_waits import SINGLE_PROCESS
from advisor.testing import TraceBuilder
from advisor.testing.record import RecordBuilder
from tests.run_directories import write_run

OPTIONS = Options(config={})
MS = 1_000_000


def training(steps: int = 60, *, ended: bool = True) -> RankRecord:
    """10 ms steps, of which data takes 6; each of three profiled steps takes 15."""
    r = RecordBuilder()
    r.event("window", window=0, state="open", reason="schedule")
    for number in range(steps):
        inside = 20 <= number < 23
        r.step(15 if inside else 10, data=6, forward=1, window=0 if inside else None)
    r.event("window", window=0, state="done", file="trace_w0.json.gz")
    if ended:
        r.event("end", steps=steps, reason="finished")
    return r.build()


def window() -> bytes:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(3000)
            with b.op("aten::mm"):
                b.launch("ampere_sgemm_128x64_nn", 6000)
            b.sync()
    return b.json()


def test_program_without_gpu_is_not_called_host_bound() -> None:
    recorded = Path(__file__).parents[1] / "data/recorded/training_mode.slow"
    text = report_text.describe_all_fixes(analyze(recorded, OPTIONS))
    assert text == "With this fix: 6.63 ms → 4.76 ms (1.39× faster)."


@pytest.mark.parametrize(("free", "is_explained"), [(0.2, True), (2.0, False), (None, False)])
def test_only_missing_cores_void_a_loader_fix_without_gpu(
    monkeypatch: pytest.MonkeyPatch, free: float | None, is_explained: bool
) -> None:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(5000, workers=0)
        b.on_host("aten::mm", 4000)
    a = Analysis(b.trace())
    monkeypatch.setitem(a.__dict__, "run_steps", SimpleNamespace(free_cores=free))
    estimator = GainEstimator()
    monkeypatch.setattr(estimator, "critical_path", lambda: {"host": 1.0})
    edit = Edit(op="parallelize", select=Select(on="host", name=SINGLE_PROCESS), workers=2)
    notes = without_gain([Finding(summary="S.", edits=[edit])], estimator, a, 1.0)
    assert [note.summary for note in notes] == (
        ["S. Workers do not shorten the step, as no core is free for them."] * is_explained
    )


def test_limiting_loader_is_not_the_first_to_shorten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shortening it is the fix itself: what keeps workers from it is the cores in use."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(5000, workers=0)
        b.on_host("aten::mm", 2000)
    a = Analysis(b.trace())
    run_steps = SimpleNamespace(
        free_cores=0.1, rank_record=SimpleNamespace(rank=SimpleNamespace(cpus=2))
    )
    monkeypatch.setitem(a.__dict__, "run_steps", run_steps)
    estimator = GainEstimator()
    monkeypatch.setattr(estimator, "critical_path", lambda: {"loader": 2.0, "host": 1.0})
    edit = Edit(op="parallelize", select=Select(on="host", name=SINGLE_PROCESS), workers=1)
    evidence = [
        Evidence(
            "loading: outside operators (advisor record --deep shows what) per step", 1e6, "ns"
        ),
        Evidence("loading: aten::select per step", 9e5, "ns"),
    ]
    finding = Finding(summary="S.", edits=[edit], evidence=evidence, category="input")
    (note,) = without_gain([finding], estimator, a, 1.0)
    assert "1.9 of 2 cores are used" in note.summary and "Shorten that" not in note.summary
    assert note.impact is not None and note.impact.reason == (
        "1.9 of 2 cores are used, so workers do not help: make the loading cheaper (aten::select "
        "takes 900 µs)"
    )


def report_of(folder: Path) -> Report:
    return analyze(folder, OPTIONS)


def test_run_without_a_reached_window_gives_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training()})
    report = report_of(folder)
    assert report.recorded is not None and report.recorded.steps == 60
    # 10 warm-up steps, three profiled ones and the one after them do not count
    assert report.recorded.used == 60 - 10 - 3 - 1
    assert report.recorded.median_ns == 10 * MS and report.scope.step_ns == 10 * MS
    assert report.scope.step_source == "record"
    shares = {phase.name: phase.share for phase in report.recorded.phases}
    assert shares == {"data": 0.6, "other": 0.3, "forward": 0.1}
    assert sum(phase.ns for phase in report.recorded.phases) == 10 * MS
    assert report.status != "healthy"
    assert report.verdict.startswith("The program runs on the CPU.") and "60%" in report.verdict
    assert report.verdict.endswith("not recorded: run advisor record --deep python PROGRAM.py.")
    assert "no profiled window" in REPORTS.render("terminal", report)
    # the program has no GPU, so nothing about one is missing
    assert any("the CPU computes" in item.what for item in report.not_checked)
    assert not any("device" in limit for limit in report.limits)
    for text in (REPORTS.render("terminal", report), REPORTS.render("markdown", report)):
        assert "data" in text and "60%" in text and "46 of 60 recorded" in text
    assert Report.from_json(report.to_json()).recorded == report.recorded


def test_profiler_overhead_compares_profiled_and_other_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(window()))
    report = report_of(folder)
    assert report.recorded is not None
    assert report.recorded.profiled_median_ns == 15 * MS
    assert report.recorded.profiler_overhead == pytest.approx(0.5)
    assert report.scope.step_source == "ProfilerStep" and report.time
    assert report.recorded.windows == ["window 0: done"]
    text = " ".join(REPORTS.render("terminal", report).split())
    assert "median 10 ms without the profiler" in text and "the profiler adds 50%" in text


def test_killed_run_is_analyzed_up_to_its_last_whole_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(ended=False)})
    steps = folder / "rank0" / "steps.jsonl"
    steps.write_bytes(steps.read_bytes()[:-7])
    packed = gzip.compress(window())
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(packed[: len(packed) // 2])
    report = report_of(folder)
    assert report.recorded is not None and report.recorded.steps == 59
    assert report.recorded.ended is None
    assert any("1 damaged line" in line for line in report.limits)


def test_unreadable_window_is_reported_and_the_record_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(b"not a trace")
    report = report_of(folder)
    assert report.scope.step_source == "record"
    assert any("trace_w0" in line for line in report.limits)


def test_window_without_trace_is_reported_missing() -> None:
    report = report_of(Path(__file__).parents[1] / "data" / "recorded" / "worker_respawn.slow")
    assert report.recorded is not None and report.recorded.windows == ["window 0: done"]
    assert report.limits[0].startswith("The trace of window 0 is missing: ")
    assert not any("done" in limit for limit in report.limits)


def test_windows_keep_the_numbers_of_their_names(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(), 1: training()})
    (folder / "rank1" / "trace_w2.json.gz").write_bytes(gzip.compress(window()))
    (folder / "rank1" / "scalene.json").write_text("{}")
    run = open_run(folder)
    assert list(run.traces) == [(1, 2)] and run.problems == ()
    assert run.traces[1, 2].meta.rank == 1


def test_only_the_analyzed_window_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(), 1: training()})
    for rank, number in ((0, 0), (0, 1), (0, 2), (1, 1)):
        (folder / f"rank{rank}" / f"trace_w{number}.json.gz").write_bytes(gzip.compress(window()))
    first = open_run(folder, window="first")
    assert list(first.traces) == [(0, 0), (1, 1)] and first.unread == ((0, 1), (0, 2))
    assert list(open_run(folder, window=2).traces) == [(0, 2)]
    report = report_of(folder)
    assert (report.inputs[0].window, report.inputs[0].windows) == (0, 3)
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(b"not a trace")
    assert list(open_run(folder, window="first").traces) == [(0, 1), (1, 1)]
    assert analyze(folder, Options(config={}, window=2)).inputs[0].window == 2
    with pytest.raises(AdvisorError, match=r"no window 7 of rank 0 \(windows present: 0-2\)"):
        analyze(folder, Options(config={}, window=7))


def test_report_uses_the_only_profiled_rank(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {number: training() for number in range(3)})
    (folder / "rank1" / "trace_w0.json.gz").write_bytes(gzip.compress(window()))
    report = report_of(folder)
    assert report.scope.rank == 1 and report.ranks is not None
    assert [line.rank for line in report.ranks.lines] == [1, 0, 2]
    assert [line.step_ns for line in report.ranks.lines][1:] == [10 * MS, 10 * MS]
    assert "profiled" in report.ranks.note


def test_a_rank_can_be_chosen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: training(), 1: training(steps=30)})
    report = analyze(folder, Options(config={}, rank=1))
    assert report.recorded is not None and report.recorded.steps == 30
    with pytest.raises(AdvisorError, match="nothing of rank 7"):
        analyze(folder, Options(config={}, rank=7))


def test_empty_run_is_one_line_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {})
    with pytest.raises(AdvisorError, match="no process has recorded anything"):
        report_of(folder)


def test_run_without_steps_is_reported(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path / "run", {0: RankRecord(rank=training().rank)}))
    assert report.status == "limited" and "No step was recorded." in report.limits
    REPORTS.render("terminal", report)


def test_run_without_window_has_no_replay(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", {0: training()}))
    with pytest.raises(AdvisorError, match="nothing to replay"):
        what_if(run, ["remove host sync"])


def test_trace_alone_has_one_line_on_missing_records(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(window())
    report = report_of(file)
    assert report.recorded is None
    lines = [item for item in report.not_checked if item.record == "advisor record"]
    assert len(lines) <= 1


def test_mostly_evaluating_run_is_reported_first(tmp_path: Path) -> None:
    r = RecordBuilder()
    for number in range(60):
        r.step(10, forward=4, backward=6, evaluation=100 if number % 5 == 0 else 0)
    r.event("end", steps=60, reason="finished")
    seldom = RecordBuilder()
    seldom.steps(60, 10, forward=4, backward=6)
    seldom.event("end", steps=60, reason="finished")
    often, never = (
        report_of(write_run(tmp_path / name, {0: record.build()})).verdict
        for name, record in (("often", r), ("never", seldom))
    )
    # 11 of 12 evaluations come after the first step: 1.1 s beside 0.6 s of steps
    pauses = "is in long pauses between steps"
    assert often.startswith(f"65% of the time after the first step {pauses}, perhaps evaluation")
    assert pauses not in never


def host_ahead(*, marks: bool, steps: int = 60) -> RankRecord:
    """The host launches a step in 2 ms and waits for the GPU in every tenth; the GPU takes 20 ms
    for each, as CUDA events of every fourth step say (``marks``)."""
    r = RecordBuilder(RankInfo(devices=[RecordedDevice()]))
    for number in range(steps):
        gpu = {"forward": 8 * MS, "backward": 12 * MS} if marks and number % 4 == 0 else None
        pause = 10.0 if number % 20 == 7 else 0.0
        r.step(182 if number % 10 == 9 else 2 + pause, gc=pause, fields={"gpu": gpu})
    r.event("end", steps=steps, reason="finished")
    return r.build()


def queued_window() -> bytes:
    """Steps of 2 ms on the host, and of 20 ms on the GPU, which never idles."""
    b = TraceBuilder()
    for _ in range(6):
        with b.step(), b.op("aten::mm"):
            b.launch("ampere_sgemm_128x64_nn", 20_000)
            b.host(2_000)
    b.sync()
    return b.json()


def test_step_time_is_device_time_when_the_host_runs_ahead(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: host_ahead(marks=True)})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(queued_window()))
    report = report_of(folder)
    assert report.recorded is not None and report.step is not None
    assert report.recorded.median_ns == report.recorded.mean_ns == 20 * MS
    assert report.step.ns == report.step.mean_ns == 20 * MS
    assert [set(each.durations_ns) for each in report.step_durations[:1]] == [{20 * MS}]
    assert "unprofiled" not in report.verdict and "vary" not in report.verdict
    reported_rules = {finding.rule for finding in (*report.findings, *report.risks, *report.notes)}
    assert not reported_rules & {
        "gc-pauses",
        "step-jitter",
        "regular-stalls",
        "slow-profiled-steps",
    }


def test_host_running_ahead_does_not_give_the_step_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {0: host_ahead(marks=False)})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(queued_window()))
    report = report_of(folder)
    assert report.recorded is not None and report.recorded.median_ns is None
    assert report.step is None
    assert "unprofiled" not in report.verdict and "20 ms step" in report.verdict
    assert any("the host runs ahead of the GPU" in line for line in report.limits)


def test_host_waiting_in_each_step_gives_all_step_times(tmp_path: Path) -> None:
    r = RecordBuilder(RankInfo(devices=[RecordedDevice()]))
    for number in range(60):
        ms = 10 + number % 3
        r.step(ms, fields={"gpu": {"forward": ms * MS} if number % 4 == 0 else None})
    folder = write_run(tmp_path / "run", {0: r.build()})
    recorded = report_of(folder).recorded
    assert recorded is not None and recorded.used == 50


def test_a_pause_of_the_host_costs_no_more_than_the_device_waits(tmp_path: Path) -> None:
    """Steps of 20 ms, of which the device works 15 by the window; each has a pause of 8 ms."""
    r = RecordBuilder(RankInfo(devices=[RecordedDevice()]))
    r.steps(60, 20, gc=8, fields={"gpu": {"forward": 20 * MS}})
    b = TraceBuilder()
    for _ in range(6):
        with b.step():
            b.product(15_000, wait=True)
            b.host(5_000)
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    report = report_of(folder)
    pauses = [f for f in (*report.findings, *report.notes) if f.rule == "gc-pauses"]
    assert [f.impact is not None and f.impact.gain_ns for f in pauses] == [
        pytest.approx(5 * MS, rel=0.01)
    ]


def test_steps_ending_long_before_the_run_are_not_its_work(tmp_path: Path) -> None:
    """A model is called to capture a CUDA graph, and for 6 s the graph is replayed."""
    for seconds, seen in ((6, False), (0.2, True)):
        r = RecordBuilder(RankInfo(devices=[RecordedDevice(index=0, name="H100")]))
        for ms in (4000, 9, 8, 90):
            r.step(ms, forward=ms)
        r.now += round(seconds * 1000 * MS)
        r.event("end", steps=4, reason="finished")
        report = report_of(write_run(tmp_path / f"run{seconds}", {0: r.build()}))
        line = "No step was found in the last 6 s of the run (59%)"
        assert seen != (line in report.verdict)
        assert seen != any(line in limit for limit in report.limits)
        assert seen == ("The longest part on the host is" in report.verdict)


def _cpu_run(devices: list[RecordedDevice]) -> tuple[RecordBuilder, bytes]:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.on_host("aten::mm", 18_000)
    return RecordBuilder(RankInfo(devices=devices)), gzip.compress(b.json())


@pytest.mark.parametrize(("times", "asks"), [((), False), ((1,), False), ((1, 2, 64), True)])
def test_only_lines_that_collect_in_each_step_are_named(
    tmp_path: Path, times: tuple[int, ...], asks: bool
) -> None:
    """Python collects by itself in each step that makes many objects, whoever asked once."""
    r, window = _cpu_run([])
    r.steps(100, 20, gc=2, forward=18)
    for number in times:
        r.event("collect", file="train.py", line=9, function="main", times=number)
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(window)
    report = report_of(folder)
    (pauses,) = [f for f in report.findings if f.rule == "gc-pauses"]
    assert "A fix saves about" in report.verdict
    assert ("Take gc.collect() out" in str(pauses.fix)) == asks
    assert [place.line for place in pauses.where] == ([9] if asks else [])


@pytest.mark.parametrize("devices", [[], [RecordedDevice()]])
def test_a_recorded_program_on_the_cpu_lacks_no_device_work(
    tmp_path: Path, devices: list[RecordedDevice]
) -> None:
    r, window = _cpu_run(devices)
    r.steps(100, 20, forward=5)
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(window)
    limits = report_of(folder).limits
    assert any("No device work" in line for line in limits) == bool(devices)


@pytest.mark.parametrize("crowded", [False, True])
def test_steps_slowed_by_other_programs_are_not_blamed_on_this(
    tmp_path: Path, *, crowded: bool
) -> None:
    """Ten steps of ten times the length in a row; meanwhile others use one of two CPUs, 13% of the
    run's."""
    r = RecordBuilder(RankInfo(cpus=2, cpus_total=2, flags={"compile": 0}))
    for number in range(300):
        r.step(600 if 100 <= number < 110 else 60, forward=50)
    long = range(26, 52)  # of 100 parts of the run
    r.watch(
        host=lambda share: HostSample(
            cpu=99, process_cpu=98 if crowded and round(100 * share) in long else 198
        )
    )
    _, window = _cpu_run([])
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(window)
    report = report_of(folder)
    jitter = [f for f in (*report.findings, *report.risks) if f.rule == "step-jitter"]
    assert len(jitter) == (not crowded)
    assert any("other programs used 5" in str(skipped) for skipped in report.not_checked) == crowded
    assert not any("recompilation" in str(finding.fix) for finding in jitter)


def test_a_fix_that_needs_busy_cores_may_save(tmp_path: Path) -> None:
    r = RecordBuilder(RankInfo(cpus=2, cpus_total=2))
    r.steps(60, 10, data=4, forward=6)
    r.watch(host=lambda share: HostSample(process_cpu=200, cpu=100))
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(4000, workers=0)
        b.on_host("aten::mm", 6000)
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    report = report_of(folder)
    first = report.findings[0].impact
    assert first is not None and first.low_ns == 0
    assert "A fix may save about" in report.verdict


@pytest.mark.parametrize("has_fix", [False, True])
def test_loading_without_a_fix_has_a_reason_in_a_program_on_the_cpu(has_fix: bool) -> None:
    """The loading of this run has a fix, by its record or by its line. Without both the report says
    why there is none."""
    rules = {"whole-record-items": {"enabled": False}}
    off = {} if has_fix else rules | {"single-process-loader": {"min_cheaper_share": 1.0}}
    folder = Path(__file__).parents[1] / "data" / "recorded" / "year_windows.slow"
    report = analyze(folder, Options(config=off))
    labels = [label for part in report.without_fix for label in part.labels]
    assert labels == ([] if has_fix else ["data loader"])
    assert all("gains too little" in part.why for part in report.without_fix)


@pytest.mark.parametrize("pauses_go_on", [False, True])
def test_pauses_of_the_start_are_not_the_loop_s_own_code(
    tmp_path: Path, pauses_go_on: bool
) -> None:
    """The recorder or the program starts in them: no later step has them."""
    r = RecordBuilder()
    for number in range(40):
        pause = 20 if number < 18 or pauses_go_on else 0
        r.step(2 + pause, forward=1, backward=1, **{"between steps": pause})
    report = report_of(write_run(tmp_path / "run", {0: r.build()}))
    rules = {finding.rule for finding in (*report.findings, *report.notes)}
    assert ("loop-phases" in rules) == pauses_go_on
    assert ("the program or the recorder starts" in report.verdict) != pauses_go_on


def test_a_fault_of_the_program_is_listed_after_other_programs_that_take_the_cores(
    tmp_path: Path,
) -> None:
    """The other programs slow the program's own fault down too. It stays a fault without them."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps(6):
        b.loader_wait(4000, workers=0)
        b.on_host("aten::mm", 6000)
    r = RecordBuilder(RankInfo(cpus=2, cpus_total=2, flags={"num_threads": 1}))
    r.steps(60, 10, data=4, forward=6)
    r.watch(
        host=lambda share: HostSample(
            cpu=100, process_cpu=50, run_delay=round(share * 0.6e9 * 0.8), children_cpu=0
        )
    )
    folder = write_run(tmp_path / "run", {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    ranked = {f.rule: f for f in report_of(folder).findings if f.priority is not None}
    assert ranked["cpu-contention"].priority == 1
    loader = ranked["single-process-loader"]
    assert loader.priority == 2 and loader.folded_under is None
    assert str(loader.fix).startswith("Make loading cheaper, which needs no free core")
