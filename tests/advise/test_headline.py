"""A recorded run has one step time: that of its own steps. The profiled window's is explained."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.advise import finding_text, report_text
from advisor.advise.engine import Options, analyze
from advisor.advise.finding_text import describe_gain
from advisor.advise.priority import marginal_gain
from advisor.advise.report_text import describe_scope, figures_of_merit
from advisor.core.finding import LATER_STEPS_FIRST, WHOLE_STEP, Finding, Impact
from advisor.core.report import Report
from advisor.core.run_directory import HostSample, RankInfo, RankRecord
from advisor.core.text import format_duration, format_share, location_figures, with_article
from advisor.measure.steps.run_steps import RunSteps
from advisor.render.formats import REPORTS
from advisor.replay.estimators import GainEstimator
from advisor.testing import TraceBuilder
from advisor.testing.record import RecordBuilder
from tests.run_directories import write_run

OPTIONS = Options(config={})
MS = 1_000_000


def window() -> bytes:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(3000)
            with b.op("aten::mm"):
                b.launch("ampere_sgemm_128x64_nn", 6000)
            b.sync()
    return b.json()


def run_of(
    *parts: tuple[int, float],
    profiled: float,
    rest: tuple[int, float] = (0, 0),
    second: tuple[int, float] = (0, 0),
) -> RankRecord:
    """Steps of so many ms, four that a window kept, more steps, and those of a second window."""
    r = RecordBuilder()
    for count, ms in parts:
        r.steps(count, ms)
    first = sum(count for count, _ in parts)
    r.event("window", window=0, state="open", reason="schedule")
    r.steps(4, profiled, window=0)
    r.event("window", window=0, state="done", steps=[first, first + 3], file="trace_w0.json.gz")
    r.steps(*rest)
    r.steps(*second, window=1)
    r.event("end", steps=first + 4 + rest[0] + second[0], reason="finished")
    return r.build()


def report_of(folder: Path, record: RankRecord) -> Report:
    write_run(folder, {0: record})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(window()))
    return analyze(folder, OPTIONS)


def texts(report: Report) -> dict[str, str]:
    rendered = {
        "terminal": REPORTS.render("terminal", report),
        "markdown": REPORTS.render("markdown", report),
        "html": REPORTS.render("html", report),
        "notebook": REPORTS.render("notebook", report),
        "github": REPORTS.render("github", report),
        "sarif": REPORTS.render("sarif", report),
    }
    return {name: " ".join(text.split()) for name, text in rendered.items()}


@pytest.fixture(scope="module")
def trace_alone(tmp_path_factory: pytest.TempPathFactory) -> Report:
    file = tmp_path_factory.mktemp("alone") / "trace.json"
    file.write_bytes(window())
    return analyze(file, OPTIONS)


def test_headline_of_a_trace_is_its_own_step(trace_alone: Report) -> None:
    assert trace_alone.step is None
    assert trace_alone.step_ns == trace_alone.scope.step_ns > 0


def write_windows(
    folder: Path, windows_ms: Sequence[float], before: tuple[int, float] = (0, 0.0)
) -> None:
    """Write a run: some steps, then windows of four steps, each before 60 steps of 37 ms."""
    r = RecordBuilder()
    r.steps(*before)
    for number, ms in enumerate(windows_ms):
        first = len(r._steps)
        r.event("window", window=number, state="open", reason="schedule")
        r.steps(4, ms, window=number)
        r.event("window", window=number, state="done", steps=[first, first + 3])
        r.steps(60, 37.0)
    write_run(folder, {0: r.build()})
    for number in range(len(windows_ms)):
        file = folder / "rank0" / f"trace_w{number}.json.gz"
        file.write_bytes(gzip.compress(window()))


def test_window_of_a_preparation_is_not_analysed(tmp_path: Path) -> None:
    """A first window among short calls, before a loop with steps of 37 ms and another window."""
    for preparation_ms, chosen in ((9.0, 1), (36.0, 0)):
        folder = tmp_path / f"{preparation_ms}"
        write_windows(folder, (preparation_ms, 40.0), before=(10, preparation_ms))
        report = analyze(folder, OPTIONS)
        assert [shown.window for shown in report.inputs] == [chosen]
        assert analyze(folder, replace(OPTIONS, window=0)).inputs[0].window == 0


def test_window_of_the_first_steps_is_analysed_only_without_a_later_one(tmp_path: Path) -> None:
    for count in (1, 2):
        folder = tmp_path / f"{count}"
        write_windows(folder, (200.0, 40.0)[:count])
        assert analyze(folder, OPTIONS).inputs[0].window == count - 1


def test_idle_time_of_a_recording_without_host_events_gives_no_warning(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(100):
        b.launch("gemm", 100)
        b.host(300)
    content = json.loads(b.json())
    kept = [e for e in content["traceEvents"] if e.get("ph") == "M" or e.get("cat") == "kernel"]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(content | {"traceEvents": kept}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "The trace does not show why the GPU idles" in analyze(str(trace), OPTIONS).verdict


def test_steps_after_a_window_that_ended_page_faults_do_not_count(tmp_path: Path) -> None:
    """20,000 page faults in each step of 80 ms, and none in steps of 55 ms after the window."""
    for faults, median_ms in ((20_000, 80), (2_000, 55)):
        r = RecordBuilder()
        r.steps(10, 80)
        counts = {"fault_steps": [1, 9], "minor_faults": 9 * faults, "memory_growth": 0}
        r.event("window", window=0, state="open", reason="schedule", **counts)
        r.steps(4, 90, window=0)
        r.steps(60, 55)
        r.watch(host=HostSample(minor_faults=14 * faults))
        run_steps = RunSteps(r.build())
        assert run_steps.median == median_ms * MS
        assert (run_steps.saved_by_window is not None) == (median_ms == 80)


def test_gains_of_the_whole_step_multiply() -> None:
    """Page faults of half of the work are gone if the work is: two halves leave a quarter."""
    impact = Impact(currency="step_time", gain_ns=50, share=0.5)
    faults = Finding(
        rule="page-faults", summary="", subject=WHOLE_STEP, impact=impact, marginal_gain_ns=50
    )
    other = Finding(rule="loop-phases", summary="", impact=impact, marginal_gain_ns=50)
    estimator = GainEstimator()
    assert marginal_gain(faults, [other], estimator) == 25
    assert marginal_gain(other, [faults], estimator) == 25
    assert marginal_gain(other, [], estimator) == 50


RECORDED = sorted((Path(__file__).parents[1] / "data" / "recorded").iterdir())
UNPROFILED = [folder for folder in RECORDED if not list(folder.glob("rank*/trace_w*"))]


@pytest.mark.parametrize("folder", UNPROFILED, ids=lambda folder: folder.name)
def test_verdict_names_the_step_of_its_shares_and_gains(folder: Path) -> None:
    """A single step time leads: the median, or the mean where it differs by a tenth. The other is
    not shown. Shares of phases are of all steps' time, as the bar is of the mean step."""
    report = analyze(folder, OPTIONS)
    step = report.step
    assert step is not None and step.window_ns is None
    mean, median = format_duration(step.mean_ns), format_duration(step.ns)
    mean_differs = abs(step.mean_ns / step.ns - 1) >= 0.1
    assert (f"mean step of {mean}" in report.verdict) == mean_differs
    of_all_steps = f"the time of all steps (median {median})" in report.verdict
    assert mean_differs or of_all_steps or f"{median} step" in report.verdict
    assert not of_all_steps or format_duration(step.mean_ns) != median
    assert not (mean_differs and "median" in report.verdict.replace("twice the median", ""))
    impact = report.findings[0].impact if report.findings else None
    if impact is not None and impact.currency == "step_time" and impact.gain_ns and impact.share:
        leads = step.mean_ns if mean_differs else step.ns
        assert impact.gain_ns / leads == pytest.approx(impact.share)


RECORDED_ON_GPU = (
    *("ads_ranker", "blocking_upload", "seg_val_hist", "voice_stream", "decode_batch1"),
    "face_gan",
)
"""Recordings made on a GPU. In the first three the steps vary; profiled steps of the others are
10% to 50% longer."""


@pytest.mark.parametrize("name", RECORDED_ON_GPU)
def test_report_gives_one_step_time_first_and_others_once(
    name: str, shared_file: Callable[[str], str]
) -> None:
    report = analyze(shared_file(f"h100/{name}"), OPTIONS)
    step = report.step
    assert step is not None and step.window_ns is not None
    median, mean, window = map(format_duration, (step.ns, step.mean_ns, step.window_ns))
    leads = format_duration(report.step_ns)
    others = {median, mean, window} - {leads}
    busy = report.verdict.partition(" First:")[0]
    assert leads in busy
    assert not [other for other in others if other in busy]
    run, profiled = (dict(describe_scope(report))[label] for label in ("run", "window"))
    text = " · ".join(run)
    assert leads in text and all(text.count(each) <= 1 for each in (median, mean))
    assert text.index(leads) == min(text.index(each) for each in (median, mean) if each in text)
    assert " · ".join(profiled).count(f"{window} per step") == 1
    tiles = {name: value for name, value, _ in figures_of_merit(report)}
    assert tiles["Step"] == leads and not others & set(tiles.values())


@pytest.mark.parametrize("run_ms", [7.0, 8.5])
def test_shares_of_a_longer_profiled_step_name_that_step(tmp_path: Path, run_ms: float) -> None:
    report = report_of(tmp_path, run_of((60, run_ms), profiled=9.0, rest=(30, run_ms)))
    assert report.step is not None and report.step.window_ns is not None
    far = report.step.window_ns >= 1.2 * run_ms * MS
    text = REPORTS.render("terminal", report)
    assert ("Where a profiled step's time goes on the GPU" in text) == far
    assert ("idle while profiled" in text) == far
    assert ("while profiled) · MFU" in text) == far
    agent = REPORTS.render("agent", report)
    busy = {key: float(value) for key, value in re.findall(r"(\w*busy_share): ([\d.]+)", agent)}
    assert busy["profiled_gpu_busy_share"] == pytest.approx(report.busy_share, abs=1e-3)
    both = report.step.window_ns / report.step.ns
    assert busy["gpu_busy_share"] == pytest.approx((report.busy_share or 0) * both, abs=1e-3)
    assert "profiled_time_shares: " in agent


def test_the_mfu_shown_is_of_the_runs_step_unless_its_steps_vary(
    shared_file: Callable[[str], str],
) -> None:
    """The profiled step of latent_sampler takes twice as long, for the same FLOPs; the steps of
    compiled_breaks vary."""
    sampler = analyze(shared_file("h100/latent_sampler"), OPTIONS)
    assert sampler.mfu is not None and sampler.step is not None and sampler.step.window_ns
    expected_mfu = format_share(sampler.mfu * sampler.step.window_ns / sampler.step.ns)
    text = REPORTS.render("terminal", sampler)
    assert f"busy 93% (47% while profiled) · MFU {expected_mfu}\n" in text
    assert expected_mfu != format_share(sampler.mfu)
    assert {name: value for name, value, _ in figures_of_merit(sampler)}["MFU"] == expected_mfu
    text = REPORTS.render("terminal", analyze(shared_file("h100/compiled_breaks"), OPTIONS))
    assert re.search(r"MFU \d+% of the FP32 peak while\s+profiled", text)


def test_a_verdict_leads_with_the_mean_where_steps_vary(
    tmp_path: Path, trace_alone: Report
) -> None:
    profiled = trace_alone.scope.step_ns / MS
    even = report_of(tmp_path / "even", run_of((40, 6), profiled=profiled, rest=(40, 6)))
    assert "average" not in even.verdict
    late = report_of(tmp_path / "late", run_of((40, 6), (10, 60), profiled=profiled, rest=(40, 6)))
    busy = f"{format_share(late.busy_share)} while profiled"
    step = "mean step 12.8 ms without the profiler"
    assert late.verdict.startswith(f"GPU busy {busy} ({step}), but ")
    # 69 of 6 ms and 10 of 60 ms: without warm-up, window and the step after it
    text = " ".join(texts(late)["terminal"].split())
    assert "10 of 79 timed steps exceed twice the median: 59% of the time" in text
    assert "twice the median" not in " ".join(texts(even)["terminal"].split())
    assert late.step is not None
    assert late.step_ns == late.step.mean_ns
    gains = [f.impact for f in late.findings if f.impact is not None]
    gains = [impact for impact in gains if impact.currency == "step_time" and impact.gain_ns]
    assert gains
    for impact in gains:
        assert impact.gain_ns is not None
        assert impact.share == pytest.approx(impact.gain_ns / late.step.mean_ns)


def test_all_renderers_lead_with_the_runs_own_step(tmp_path: Path, trace_alone: Report) -> None:
    profiled = trace_alone.scope.step_ns
    report = report_of(tmp_path / "run", run_of((40, 6), profiled=profiled / MS, rest=(40, 6)))
    assert report.step is not None
    assert report.step_ns == report.step.ns == 6 * MS
    assert report.step.window_ns == report.scope.step_ns == profiled
    assert report.step.window_slowdown == pytest.approx(profiled / (6 * MS) - 1)
    for name, text in texts(report).items():
        assert "of a 6 ms step (67%" in text and "while profiled)" in text, name
        if name in ("terminal", "markdown", "html"):
            assert f"the profiler adds {profiled / 6e6 - 1:.0%}" in text, name


def test_gains_scale_window_idle_time_to_the_run_step(tmp_path: Path, trace_alone: Report) -> None:
    """The profiler lengthens host time. The device is busy for 6 ms of each step, with it and
    without; of the 9.01 ms with it 1.5 wait for the loader, and half of that of 7.5 ms without."""
    profiled, busy = trace_alone.scope.step_ns, 6 * MS
    report = report_of(tmp_path / "run", run_of((40, 7.5), profiled=profiled / MS, rest=(40, 7.5)))
    part = (7.5 * MS - busy) / (profiled - busy)
    before = {finding.rule: finding for finding in trace_alone.findings}
    assert before
    for finding in report.findings:
        if finding.rule not in before:
            continue
        window_impact, run_impact = before[finding.rule].impact, finding.impact
        assert window_impact is not None and run_impact is not None
        assert window_impact.gain_ns is not None and run_impact.gain_ns is not None
        # the run's steps have not what the profiler cost the host, where the device is the limit
        assert run_impact.gain_ns == pytest.approx(window_impact.gain_ns * part, rel=0.01)
        assert run_impact.gain_ns / (7.5 * MS) == pytest.approx(run_impact.share, abs=1e-6)
        # as long as with the profiler at most, if that leaves the device its time
        assert run_impact.low_ns is not None and window_impact.high_ns is not None
        assert run_impact.low_ns <= run_impact.gain_ns
        most = (
            min(window_impact.high_ns, 7.5 * MS - busy)
            if window_impact.gain_ns
            else window_impact.high_ns
        )
        assert run_impact.high_ns == pytest.approx(most, rel=0.01)
    assert {finding.rule for finding in report.findings} >= before.keys()


def test_a_gain_need_not_grow_with_steps_longer_than_the_windows(
    tmp_path: Path, trace_alone: Report
) -> None:
    profiled = trace_alone.scope.step_ns
    report = report_of(tmp_path / "run", run_of((40, 30), profiled=profiled / MS, rest=(40, 30)))
    before = {finding.rule: finding.impact for finding in trace_alone.findings}
    shared = [finding for finding in report.findings if finding.rule in before]
    assert shared
    for finding in shared:
        window_impact, run_impact = before[finding.rule], finding.impact
        assert (
            window_impact is not None
            and run_impact is not None
            and window_impact.gain_ns is not None
        )
        assert run_impact.gain_ns == pytest.approx(
            window_impact.gain_ns * 30 * MS / profiled, abs=1
        )
        assert run_impact.low_ns == window_impact.low_ns


def test_the_profilers_cost_is_reported_as_such(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", run_of((60, 6), profiled=9, rest=(60, 6)))
    assert report.step is not None and not report.step.atypical
    assert report.step.profiler_overhead == pytest.approx(0.5)
    assert "the profiler adds 50%" in texts(report)["terminal"]


def test_slow_unprofiled_steps_are_no_profiler_overhead(tmp_path: Path) -> None:
    """5 of the additional 6 ms in the window last on after it for a while."""
    report = report_of(tmp_path / "run", run_of((40, 6), profiled=12, rest=(8, 11)))
    assert report.step is not None and report.step.profiler_overhead is None
    assert report.recorded is not None and report.recorded.profiler_overhead is None
    text = " ".join(texts(report)["terminal"].split())
    assert "steps vary too much to tell the profiler's cost" in text
    assert "the profiler adds" not in text


def test_the_profilers_cost_shows_in_every_window(tmp_path: Path) -> None:
    """The first window doubles the steps, the second one leaves them as they are."""
    record = run_of((60, 6), profiled=12, rest=(60, 6), second=(5, 6))
    report = report_of(tmp_path / "run", record)
    assert report.step is not None and report.step.profiler_overhead is None


def test_a_window_unlike_its_run_is_reported_and_trusted_less(
    tmp_path: Path, trace_alone: Report
) -> None:
    """Steps take 6 ms, but for the 40 around the window, which take as long as those inside it."""
    same = trace_alone.scope.step_ns / MS
    record = run_of((300, 6), (20, same), profiled=same, rest=(20, same))
    report = report_of(tmp_path / "run", record)
    assert report.step is not None and report.step.atypical
    assert report.step.profiler_overhead == pytest.approx(0, abs=1e-3)
    # 40 of 290 + 40 steps that count, but the one after the window
    assert report.step.share_beyond == pytest.approx(39 / 329)
    assert "12% of the run's steps are as long" in " ".join(texts(report)["terminal"].split())
    before = {finding.rule: finding.confidence for finding in trace_alone.findings}
    shared = [finding for finding in report.findings if finding.rule in before]
    assert shared
    for finding in shared:
        assert finding.confidence == pytest.approx(before[finding.rule] * 0.85)


def test_a_window_in_a_run_of_two_kinds_of_steps_is_like_it(tmp_path: Path) -> None:
    """Half of the steps take 9 ms, as those around the window do: that is usual in this run."""
    report = report_of(tmp_path / "run", run_of((140, 6), (60, 9), profiled=9, rest=(60, 9)))
    assert report.step is not None
    assert (report.step.ns, report.step.nearby_ns) == (6 * MS, 9 * MS)
    assert not report.step.atypical
    text = " ".join(texts(report)["terminal"].split())
    assert "the steps around them take 9 ms without the profiler" in text


def test_a_window_like_its_run_is_not_doubted(tmp_path: Path, trace_alone: Report) -> None:
    same = trace_alone.scope.step_ns / MS
    report = report_of(tmp_path / "run", run_of((60, same), profiled=same, rest=(60, same)))
    assert report.step is not None and not report.step.atypical
    assert abs(report.step.window_slowdown or 0.0) < 0.001
    text = texts(report)["terminal"]
    assert "as long as the run's" in text
    assert "longer than the run's" not in text


def test_too_few_steps_are_not_headline(tmp_path: Path) -> None:
    report = report_of(tmp_path / "run", run_of((5, 6), profiled=9))
    assert report.step is None
    assert report.step_ns == report.scope.step_ns


# -- crashes ------------------------------------------------------------------------------------


def crashed_record(reason: str, at: int, **more: object) -> RankRecord:
    r = RecordBuilder()
    r.steps(60 + at, 10)
    r.event("end", steps=60 + at, reason=reason, **more)
    return r.build()


def test_every_renderer_starts_with_the_crashed_rank(tmp_path: Path) -> None:
    ranks = {
        0: crashed_record("exception", 9, exception="DistBackendError", message="peer is gone"),
        1: crashed_record(
            "exception", 3, exception="RuntimeError", message="shape \x1b[2Jof <b>x</b>."
        ),
        2: crashed_record("interrupted", 2, exception="KeyboardInterrupt"),
        3: crashed_record("finished", 5),
    }
    report = analyze(write_run(tmp_path / "run", ranks), OPTIONS)
    assert [(c.rank, c.exception, c.steps) for c in report.crashes] == [
        (1, "RuntimeError", 63),
        (0, "DistBackendError", 69),
    ]
    assert report.verdict.startswith("Rank 1 ended after 63 steps with RuntimeError: shape ")
    assert "Then rank 0 (DistBackendError) ended too." in report.verdict
    assert report.status != "healthy"
    for name, text in texts(report).items():
        assert "Rank 1 ended after 63 steps with RuntimeError: shape" in text, name
        assert "\x1b" not in text, name
        if name in ("html", "notebook", "markdown"):
            assert "<b>x" not in text, name
    assert Report.from_json(report.to_json()).crashes == report.crashes


def test_run_continuing_after_an_exception_is_no_crash(tmp_path: Path) -> None:
    r = RecordBuilder()
    r.steps(30, 10)
    r.event("end", steps=30, reason="exception", exception="OutOfMemoryError")
    r.steps(30, 10)
    r.event("end", steps=60, reason="finished")
    report = analyze(write_run(tmp_path / "run", {0: r.build()}), OPTIONS)
    assert report.crashes == []
    assert report.recorded is not None and report.recorded.ended == "finished"


def test_truncated_file_is_reported_first_with_lower_bounds(
    shared_trace: Callable[[str], str], tmp_path: Path
) -> None:
    data = gzip.decompress(Path(shared_trace("a100_train_6steps")).read_bytes())
    cut = tmp_path / "cut.json"
    cut.write_bytes(data[: len(data) * 2 // 3])
    report = analyze(cut)
    assert report.verdict.startswith("The file is cut off. In what is left, the GPU is busy at")
    assert report.status == "limited"
    # the host's events come first in the file: kernels are missing anywhere, not at its end
    assert not report.findings and not report.idle
    assert "of what is left of the file" in str(report)


@pytest.mark.parametrize("share", [0.3, 0.95])
def test_file_truncated_before_gpu_work_gets_no_advice(
    share: float, shared_trace: Callable[[str], str], tmp_path: Path
) -> None:
    data = gzip.decompress(Path(shared_trace("mi300_timesformer_inference")).read_bytes())
    cut = tmp_path / "cut.json"
    cut.write_bytes(data[: int(len(data) * share)])
    report = analyze(cut)
    assert report.verdict.startswith("The file is cut off before any GPU work.")
    assert not report.findings


def test_matrix_units_are_not_praised_far_below_their_rate(
    shared_trace: Callable[[str], str],
) -> None:
    def praises_matrix_units(name: str) -> bool:
        report = analyze(shared_trace(name))
        return any("GEMM and convolution time runs on" in each.text for each in report.passed)

    assert praises_matrix_units(
        "mi300_torch_compile"
    )  # 34% of the GPU's peak over the whole recording
    assert not praises_matrix_units("mi250_train")  # below 1% in a busy time of 2%


@pytest.mark.parametrize("kept", [30_000, 400_000])
@pytest.mark.parametrize(
    "name", ["v100_train_copy_heavy.json.gz", "pairs/loader_profiler_workers0.json.gz"]
)
def test_file_truncated_before_gpu_work_promises_no_gain(
    name: str, kept: int, shared_file: Callable[[str], str], tmp_path: Path
) -> None:
    """PyTorch writes the host's events first: the GPU may have worked behind all of them."""
    path = tmp_path / "cut.json.gz"
    path.write_bytes(Path(shared_file(name)).read_bytes()[:kept])
    report = analyze(path)
    assert not report.time and report.status == "limited"
    assert report.verdict.startswith("The file is cut off before any GPU work.")
    assert "Copy it again, or record again." in report.verdict
    assert report.findings == []


def test_loss_of_all_gpu_records_is_reported_first(shared_trace: Callable[[str], str]) -> None:
    report = analyze(shared_trace("a100_kernels_lost"))
    lost = r"The recording has \d+ launch calls but no kernel: the profiler lost all GPU work\."
    assert re.match(lost, report.verdict)
    assert report.findings == [] and report.status == "limited"


def test_fix_that_first_asks_for_later_steps_may_save(shared_trace: Callable[[str], str]) -> None:
    report = analyze(shared_trace("nccl_collectives"))
    assert report.findings[0].fix.startswith(LATER_STEPS_FIRST)
    assert "A fix may save about" in report.verdict
    assert "perhaps" in report_text.describe_all_fixes(report)


def test_unexplained_idle_time_with_queued_work_is_separate(
    shared_trace: Callable[[str], str],
) -> None:
    """Stacks would explain only the part in which nothing is queued: 107 of 301 ms."""
    report = analyze(shared_trace("two_ranks_rank0"))
    assert "idles for 49% of the step; 32% is with work queued." in report.verdict
    assert "Record stacks on a free GPU." in report.verdict
    queued = next(each for each in report.not_checked if "work is queued" in each.what)
    assert "(32%)" in queued.what


def test_recorded_phases_have_names_of_their_work(shared_file: Callable[[str], str]) -> None:
    report = analyze(shared_file("h100/healthy_lm"))
    phases = ", ".join(report_text.describe_phases(report))
    assert "the loop's own code 31%" in phases and "uploads <1%" in phases
    assert not re.search(r"\b(?:h2d|other|data) [<\d]", phases.replace("loading data", ""))


def test_steps_say_how_far_the_gpu_runs_behind_their_marks(
    shared_trace: Callable[[str], str],
) -> None:
    """Ten marks of the host 152 µs apart; their work begins 17 ms later and takes 21 ms."""
    for name, behind in (("mi300x_kernels_after_steps", True), ("b200_eager", False)):
        report = analyze(shared_trace(name))
        (step_parts,) = [parts for label, parts in describe_scope(report) if label == "steps"]
        assert (
            "the host runs 17.2 ms (8 steps) ahead: the GPU's work sets the step time" in step_parts
        ) == behind


@pytest.mark.parametrize("name", ["loader_autograd_workers4", "loader_profiler_workers4"])
def test_gain_of_short_waits_is_at_most_their_cost(
    shared_trace: Callable[[str], str], name: str
) -> None:
    """Copies cost 3.3 ms of each step. That later launches come earlier too is not certain."""
    report = analyze(shared_trace(f"pairs/{name}"))
    first = report.findings[0]
    impact, cost = first.impact, first.shown_time
    assert impact is not None and cost is not None and impact.gain_ns is not None
    assert impact.gain_ns > 2 * float(cost.value or 0)
    assert impact.low_ns == pytest.approx(cost.value, abs=1) and impact.low_by == "late launches"
    assert any(
        "no launch after them comes earlier" in why
        for why in finding_text.range_reasons(first, report)
    )


def test_surprising_gain_sums_and_orders_are_explained(
    shared_file: Callable[[str], str],
) -> None:
    """Alone 9.57, 5.84 and 6.2 ms, together 20.6 ms, of which the 6.2 may be nothing and the 9.57
    depend on later launches; 7.4 and 0.79 ms, together 8.4 ms, of which the 7.4 may be nothing."""
    for name, first_may_be_nothing in (
        ("pairs/loader_autograd_workers4.json.gz", False),
        ("dlrm_8ranks/worker1.pt.trace.json.gz", True),
    ):
        report = analyze(shared_file(name))
        assert report.findings[0].impact is not None
        assert (report.findings[0].impact.low_ns == 0) == first_may_be_nothing
        assert "perhaps" in report_text.describe_all_fixes(report)
        assert "gain per step, of each fix alone" in REPORTS.render("terminal", report)
    report = analyze(shared_file("h100/doc_finder"))
    assert len(finding_text.ranked_findings(report)) == 1
    assert "perhaps" not in report_text.describe_all_fixes(report)
    assert "of each fix alone" not in REPORTS.render("terminal", report)


def test_a_column_of_dashes_alone_is_left_out(shared_file: Callable[[str], str]) -> None:
    """The trace of one rank shows neither how long each collective waits nor a bandwidth."""
    report = analyze(shared_file("dlrm_8ranks/worker1.pt.trace.json.gz"))
    text = REPORTS.render("terminal", report, details=True)
    assert re.search(r"axis +ranks +collectives +bytes +time +exposed\n", text)


def test_only_the_largest_memory_saving_is_called_largest(
    shared_file: Callable[[str], str],
) -> None:
    """Offloading frees 11.1 GiB; checkpointing, whose code is shown, 10.3 GiB."""
    report = analyze(shared_file("memory/windows_training.pickle.gz"))
    text = REPORTS.render("terminal", report)
    assert re.search(r"larger +Checkpoint the blocks", text) and "most     " not in text


def test_the_memory_peak_is_that_of_the_device_beside_it(shared_file: Callable[[str], str]) -> None:
    """Three GPUs have work in it; the one with most holds 5.78 GiB."""
    report = analyze(shared_file("xla/tf_gpu_multi_worker.xplane.pb.gz"))
    assert report.scope.device == 6
    assert report_text.memory_peak(report) == "5.78 GiB in tensors"


def test_long_call_before_the_first_step_is_no_step_time(
    shared_file: Callable[[str], str],
) -> None:
    """cudaFree of 715 ms ends before the first optimizer step; 37 steps are 884 ms."""
    limits = analyze(shared_file("linear_2080ti_launch_bound.json.gz")).limits
    assert not [each for each in limits if each.startswith("cudaFree")]


def test_a_read_is_counted_once_though_it_copies_and_waits(
    shared_file: Callable[[str], str],
) -> None:
    """4,259 reads of a value; each is a copy and a wait for the stream."""
    report = analyze(shared_file("pairs/sam_1_fp32_many_syncs.json.gz"))
    match = next(each for each in report.findings if each.rule == "host-reads")
    assert sum(place.count for place in match.where) == 4259


def test_range_shares_match_the_printed_gains(
    shared_file: Callable[[str], str],
) -> None:
    """The fix removes the same shares of 24.9 ms of slow operators as its gain."""
    report = analyze(shared_file("h100/conv_heuristics"))
    first = report.findings[0]
    (note,) = [
        why for why in finding_text.range_reasons(first, report) if why.startswith("range: ")
    ]
    shares = [int(share) for share in re.findall(r"(\d+)%", note)]
    impact = first.impact
    assert impact is not None and impact.gain_ns and impact.low_ns and impact.high_ns
    expected = [shares[0] * ns / impact.gain_ns for ns in (impact.low_ns, impact.high_ns)]
    assert shares[1:] == pytest.approx(expected, abs=2)
    metric = analyze(shared_file("h100/host_metric"))  # 1.05 ms and more: not none
    assert "none" not in " ".join(finding_text.range_reasons(metric.findings[0], metric))


def test_a_gain_at_the_upper_end_of_a_wide_range_is_up_to_it(
    shared_file: Callable[[str], str],
) -> None:
    """All copies go at best (15 ms), none at worst; 15.4 ms is the error of the estimate."""
    first = analyze(shared_file("v100_train_copy_heavy.json.gz")).findings[0]
    assert finding_text.describe_gain(first) == "up to 15 ms, 12%"


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        # Python without stacks, between operators that are recorded
        ("h100/photo_tagger", True),
        ("pairs/loader_profiler_workers0.json.gz", True),
        # 32% of the step with work queued, and a trace without operators
        ("two_ranks_rank0.json.gz", False),
        ("nsys/ee4fcf3_report1.sqlite.gz", False),
    ],
)
def test_idle_time_outside_operators_is_not_called_unknown(
    name: str, outside: bool, shared_file: Callable[[str], str]
) -> None:
    report = analyze(shared_file(name))
    (part,) = [each for each in report.idle if each.cause == "unknown"]
    assert part.outside_operators is outside
    page = REPORTS.render("terminal", report, details=True)
    assert ("? outside operators" in page, "? unknown" in page) == (outside, not outside)
    assert (part.gaps is not None, bool(part.next_operators)) == (outside, outside)
    assert sum(each.share for each in part.next_operators) <= 1
    described = outside and part.share >= report_text.MIN_OUTSIDE_OPERATORS
    assert ("idle     outside operators: " in page) is described


def test_critical_path_is_omitted_without_host_records(
    shared_file: Callable[[str], str],
) -> None:
    """Seven operators, calls and kernels in 13.3 s."""
    page = str(analyze(shared_file("triton_example.json.gz")))
    assert "critical path" not in page


def test_a_faster_step_by_an_uncertain_cause_is_reported_as_such(
    shared_file: Callable[[str], str],
) -> None:
    """Identical kernels differ 19-fold in this file."""
    report = analyze(shared_file("mi300x_kernels_after_steps.json.gz"))
    (finding,) = finding_text.ranked_findings(report)
    assert finding.confidence < finding_text.MIN_SURE
    description = report_text.describe_all_fixes(report)
    assert description.startswith(
        f"If this is the cause, of which advisor is {finding.confidence:.0%} sure: 2.1 ms → "
    )


def test_two_ranks_have_no_median(shared_file: Callable[[str], str]) -> None:
    report = analyze(shared_file("nsys/mfu_2gpu_before.sqlite.gz"))
    assert report.ranks is not None
    texts = [each.text for each in report.ranks.what_if]
    assert any(text.startswith("both ranks equally fast") for text in texts)
    assert not any("median" in text for text in texts)
    assert "every all-to-all transfer hidden, at best" in texts


@pytest.mark.parametrize(
    ("name", "action"),
    [
        (
            "a100_kernels_lost",
            "Record again after a warm-up: schedule(wait=1, warmup=1, active=5) and prof.step() ",
        ),
        ("cupti_counters", "Record without counters."),
        ("alexnet", "Record after a few steps: schedule(skip_first=10, "),
        ("alexnet", "One-off costs take at least 90% of the analysed 12.9 s, "),
        (
            "event_sync",
            "Record several whole steps: schedule(wait=1, warmup=3, active=5) and prof.step() "
            "after each ",
        ),
        (
            "no_gpu_rank",
            "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] where the ",
        ),
    ],
)
def test_insufficient_recording_gets_recording_instructions(
    name: str, action: str, shared_trace: Callable[[str], str]
) -> None:
    """The first lines are all that many readers see: they end in what to do."""
    assert action in analyze(shared_trace(name)).verdict


@pytest.mark.parametrize(
    ("number", "article"),
    [
        ("8.4 ms", "an"), ("87.1 ms", "an"), ("800 µs", "an"), ("11 ms", "an"), ("11.8 s", "an"),
        ("18 ms", "an"), ("18,000 s", "an"), ("110 ms", "a"), ("180 ms", "a"), ("1.8 ms", "a"),
        ("77 ms", "a"), ("90 ms", "a"), ("<1 ms", "a"),
    ],
)  # fmt: skip
def test_number_has_its_spoken_article(number: str, article: str) -> None:
    assert with_article(number) == f"{article} {number}"


def of_host(folder: Path, *, loading: float, steps: int = 60, gc: float = 0.0) -> Report:
    """A run that trains on the CPU in steps of 10 ms, of them so many ms of loading in the run,
    and 3 ms in the profiled window."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.loader_wait(3000, workers=0)
        b.on_host("aten::mm", 7000)
    r = RecordBuilder(RankInfo(cpus=4, cpus_total=4))
    r.watch(host=HostSample(cpu=25.0, process_cpu=100.0))
    r.event("loader", id=0, workers=0)
    r.event("loader_iter", id=0)
    r.steps(steps, 10, data=loading, forward=6 - loading, backward=4, gc=gc)
    write_run(folder, {0: r.build()})
    (folder / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    return analyze(folder, OPTIONS)


def test_healthy_cpu_run_lists_time_shares_and_checks(
    tmp_path: Path,
) -> None:
    report = of_host(tmp_path / "run", loading=0.1)
    assert report.status == "limited"
    found = "The program trains on the CPU. No fix with a large gain was found in its 10 ms step."
    assert report.verdict.startswith(found)
    assert "mostly aten::mm (100% of operators' time)" in report.verdict
    assert " checks of the host found no more." in report.verdict
    assert "GPU" not in report.verdict


@pytest.mark.parametrize(("operators", "computes"), [(9900, True), (7000, False)])
def test_a_step_of_the_models_operators_alone_is_called_so(
    tmp_path: Path, operators: int, computes: bool
) -> None:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.on_host("aten::mm", operators)
        b.host(10_000 - operators)
    r = RecordBuilder(RankInfo(cpus=4, cpus_total=4))
    r.steps(60, 10, forward=5.9, backward=4)
    module = "torch/nn/modules/module.py(1789): Module._call_impl"
    frames = ["train.py(9): main", module, "model.py(17): Expert.forward"]
    r.event("stacks", frames=frames, stacks=[[40, [0, 1, 2]], [10, [0, 1]]])
    write_run(tmp_path / "run", {0: r.build()})
    (tmp_path / "run" / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    verdict = analyze(tmp_path / "run", OPTIONS).verdict
    assert ("almost all the model's own computation" in verdict) == computes
    assert ("Nothing to fix was found in its 10 ms step." in verdict) != computes
    unknown = "Nothing to fix was found, but advisor cannot tell whether the model needs all this"
    assert verdict.endswith(f"{unknown} computation.") == computes
    assert "Of forward, 80% is in Expert.forward (model.py:17)" in verdict


def test_the_call_of_the_model_is_not_a_place_in_it(tmp_path: Path) -> None:
    r = RecordBuilder(RankInfo(cpus=4, cpus_total=4))
    r.steps(60, 10, forward=5.9, backward=4)
    module = "torch/nn/modules/module.py(1789): Module._call_impl"
    r.event("stacks", frames=["train.py(9): main", module], stacks=[[50, [0, 1]]])
    write_run(tmp_path / "run", {0: r.build()})
    assert "Of forward" not in analyze(tmp_path / "run", OPTIONS).verdict


@pytest.mark.parametrize("late_ms", [20, 180])
def test_run_with_slowing_steps_names_the_first_slow_step(tmp_path: Path, late_ms: float) -> None:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.on_host("aten::mm", 9900)
    r = RecordBuilder()
    for n in range(48):
        ms = 12.0 + n % 3 if n < 31 else late_ms
        r.step(ms, forward=0.9 * ms)
    r.event("end", steps=48, reason="finished")
    write_run(tmp_path / "run", {0: r.build()})
    (tmp_path / "run" / "rank0" / "trace_w0.json.gz").write_bytes(gzip.compress(b.json()))
    report = analyze(tmp_path / "run", OPTIONS)
    slower = [risk for risk in report.risks if risk.rule == "step-jitter"]
    assert bool(slower) == (late_ms == 180)
    if slower:
        assert slower[0].title == "From step 31 on, steps take 14 times as long"
        assert f"on the CPU. {slower[0].title}." in report.verdict
        assert "Nothing else to fix was found" in report.verdict
        assert "Longer phases: forward 2.5" in slower[0].summary


def test_small_gains_do_not_lead(tmp_path: Path) -> None:
    report = of_host(tmp_path / "run", loading=0.1, gc=0.12)
    assert "gc-pauses" in [f.rule for f in report.findings]
    assert "No fix with a large gain was found in its 10 ms step." in report.verdict
    assert report.verdict.endswith("The largest gain found is 120 µs (1%; range 108 to 120 µs).")


def test_loader_gain_is_measured_over_the_whole_run(
    tmp_path: Path,
) -> None:
    short, long = (
        next(f for f in report.findings if f.category == "input")
        for report in (of_host(tmp_path / f"{ms}", loading=ms) for ms in (3.1, 5.5))
    )
    assert short.impact is not None and long.impact is not None
    assert 1.6 < (long.impact.gain_ns or 0) / (short.impact.gain_ns or 1) < 2
    assert (long.impact.high_ns or 0) <= 5.5 * MS


def test_large_run_cost_leads_without_being_in_a_median_step(
    tmp_path: Path,
) -> None:
    r = RecordBuilder()
    r.event("loader", id=1, workers=4, persistent_workers=False)
    for epoch in range(4):
        r.event("loader_iter", id=1, workers_started_ns=600 * MS, evaluation=False)
        if epoch == 1:
            r.event("window", window=0, state="open", reason="schedule")
            r.steps(4, 12, window=0)
            r.event("window", window=0, state="done", steps=[50, 53], file="trace_w0.json.gz")
        r.step(1020, data=1000)
        r.steps(49, 20, data=0.2)
    r.event("end", steps=204, reason="finished")
    report = report_of(tmp_path / "run", r.build())
    first = report.findings[0]
    assert (first.rule, first.priority) == ("workers-respawned", 1)
    assert [f.priority for f in report.findings if f.folded_under is None][:2] == [1, 2]
    assert first.impact is not None and first.impact.currency == "run_time"
    assert 0.4 < (first.impact.share or 0) < 0.8
    assert "over the run" in describe_gain(first)


def test_step_without_matrix_products_is_called_partial(
    shared_file: Callable[[str], str],
) -> None:
    """BERT's einsum operators are in the file, and of 688 kernels none is a GEMM."""
    report = analyze(shared_file("xla/tf_gpu_multi_worker.xplane.pb.gz"))
    assert report.status == "limited"
    assert report.verdict.startswith("Only a part of a step is recorded: no matrix product ran")
    # a share of a part says nothing of the step, nor does what is left of it
    assert all(f.impact is None or f.impact.share is None for f in report.findings)
    assert report_text.describe_all_fixes(report) == ""
    lead = (
        "In this part, a possibility (advisor is 42% sure of the cause): pointwise kernels are not"
    )
    assert f"{lead} fused. A fix may save up to 15.5 ms (range 6.36 to 15.5 ms)." in report.verdict
    advice = "Record several whole steps: tf.profiler.experimental.Trace around each step."
    assert report.verdict.endswith(advice)
    assert report.findings[0].severity == "warning" and "First:" not in report.verdict
    possible = "cause a possibility (advisor is 42% sure of the cause) · warning"
    assert possible in " ".join(REPORTS.render("terminal", report, details=True).split())
    # its one kernel of 24 equal layers is an example, and no count
    place = report.findings[0].where[0]
    assert location_figures(place) == ["<1% of this finding's time", "one takes 55.3 µs"]
    assert any(each.startswith("Only a part of a step") for each in report.limits)


def test_gain_beyond_waits_of_a_renormalized_graph_is_explained() -> None:
    """The edits of the fix end the kernels of the normalisation with the wait for its size."""
    report = analyze(Path(__file__).parents[1] / "corpus" / "h100" / "citation_gcn", OPTIONS)
    (why,) = finding_text.beyond_evidence(report.findings[0], report)
    assert why.startswith("the gain is more than")
    assert why.endswith("the kernels around the wait go too, and later work is launched earlier")
