"""Gains of recorded runs are of steps without the profiler; those of bare traces know its cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from advisor.advise.engine import analyze
from advisor.advise.gain_reasons import beyond_evidence
from advisor.advise.impact import estimate_impact, scale_to_run
from advisor.core.finding import Edit, Finding, Select
from advisor.replay.estimators import ReplayEstimator
from advisor.replay.ranks.estimator import RanksEstimator
from advisor.replay.window_replayer import EVENT_COST_NS, WindowReplayer, event_cost, median_error
from advisor.testing import TraceBuilder
from tests.corpus_analyses import analyze_cached
from tests.replay.test_event_cost import OPS, host_bound

CORPUS = Path(__file__).parents[1] / "corpus"
RECORDED = Path(__file__).parents[1] / "data" / "recorded"
LAUNCHES = Edit(
    op="drop_launch",
    select=Select(on="gap", cause=("dispatch", "launch", "python"), max_ns=200_000),
    host_ns=1000,
)


def test_varying_steps_do_not_reveal_the_profiling_cost() -> None:
    """Profiled steps of 100 to 900 µs beside others of 100 to 900 µs: their medians differ by
    chance, and five of them know theirs to 166 µs; the usual cost is 81 µs."""
    b = host_bound(median_us=None)
    r = b.record_of_run()
    for n in range(40):
        r.step(0.1 + 0.2 * (n % 5))
    for n in range(5):
        r.step(0.1 + 0.2 * n, window=0)
    assert event_cost(b.analysis()) == EVENT_COST_NS["plain"]
    times = np.array([100.0, 300.0, 500.0, 700.0, 900.0])
    assert median_error(times) == pytest.approx(1.2533 * 1.4826 * 200 / 5**0.5)


def test_profiling_cost_is_that_of_the_same_window() -> None:
    """Window 0: 300 µs beside 200. Window 1, not this one, came in a slower phase: 900."""
    b = host_bound(median_us=None)
    r = b.record_of_run()
    r.steps(40, 0.2)
    r.steps(5, 0.3, window=0)
    r.steps(40, 0.2)
    r.steps(50, 0.9, window=1)
    assert event_cost(b.analysis()) == pytest.approx(100_000 / (OPS + 1), rel=0.01)


def eager(recorded_us: float | None) -> TraceBuilder:
    """100 kernels of 4 µs, one every 20 µs and more: the device idles for the host."""
    b = TraceBuilder()
    for _ in b.steps(4):
        b.run("aten::add", "elementwise_kernel", 4, times=100, host_us=20)
        b.sync()
    if recorded_us is not None:
        step = b.analysis().step_ns / 1e6
        r = b.record_of_run()
        r.steps(40, recorded_us / 1000)
        r.steps(5, step, window=0)
    return b


def test_launch_costs_of_a_bare_trace_exclude_the_profiler() -> None:
    """100 operators and launch calls of 0.8 µs each that only the profiler takes are no gain; the
    range still reaches what the profiled step would gain."""
    replayer = WindowReplayer(eager(None).analysis())
    gain, low, high, *_ = replayer.gain_range([LAUNCHES])
    profiled = replayer.period((), "profiled") - replayer.period([LAUNCHES], "profiled")
    real = replayer.period((), "unprofiled") - replayer.period([LAUNCHES], "unprofiled")
    assert gain == pytest.approx(real)
    assert low < gain < 0.95 * profiled
    assert high >= profiled


def test_profiler_lengthens_host_time_but_not_device_time() -> None:
    """The run's own steps take 1.5 ms, profiled ones 2.6. Without launch costs both become the
    device's 400 µs and little more, not the same share of the step."""
    estimator = ReplayEstimator(eager(1500).analysis())
    a, reference_ns = estimator.replayer.a, estimator.reference_ns()
    busy, period = a.breakdown.busy.total / a.step_count, estimator.replayer.period([LAUNCHES])
    impact = estimate_impact(Finding(summary="S.", edits=[LAUNCHES]), a, estimator)
    assert reference_ns < a.step_ns and impact.impact is not None
    assert impact.impact.gain_ns == pytest.approx(reference_ns - period, rel=0.01)
    (of_run,) = scale_to_run([impact], a, estimator)
    assert of_run.impact is not None and of_run.impact.gain_ns is not None
    assert busy < 1_500_000 - of_run.impact.gain_ns < period
    assert busy == 400_000 and period < 600_000


def test_rank_savings_use_own_step_and_measured_collectives() -> None:
    result = analyze_cached(str(RECORDED / "gloo_metrics.slow"))
    estimator, (collectives, overlap, *_) = result.estimator, result.report.findings
    assert isinstance(estimator, RanksEstimator) and collectives.rule == "collectives-in-step"
    assert estimator.reference_ns(collectives.edits) is None
    reference_ns = estimator.own.reference_ns()
    assert reference_ns is not None and reference_ns < result.main.step_ns
    assert estimator.reference_ns(overlap.edits) == reference_ns


def test_decode_step_gain_matches_a_measured_cuda_graph() -> None:
    """Measured: 12.0 to 13.5 of 14.0 ms (tests/corpus/truth.toml), of which 1.28 ms must remain."""
    report = analyze(str(CORPUS / "h100" / "decode_batch1"))
    impact = report.findings[0].impact
    assert impact is not None and impact.gain_ns is not None and impact.high_ns is not None
    assert 12.0e6 <= impact.gain_ns < impact.high_ns <= 14.0e6 - 1.28e6


@pytest.mark.parametrize("name", ["pairs/particle_batch2.json.gz", "dlrm_8ranks"])
def test_an_estimate_of_launch_costs_is_not_its_own_upper_end(name: str) -> None:
    impact = next(
        f for f in analyze(str(CORPUS / name)).findings if f.rule == "launch-bound"
    ).impact
    assert impact is not None and impact.gain_ns is not None and impact.high_ns is not None
    assert impact.gain_ns < 0.95 * impact.high_ns


def test_device_work_removed_by_a_fix_is_not_rescaled() -> None:
    """The device paces this run: its steps are 8% shorter than profiled ones, and fused attention
    saved 50.4 to 53.6 ms of them (tests/corpus/truth.toml); 47.3 as a share of the step."""
    report = analyze(str(CORPUS / "h100" / "gpt2_eager_attention"))
    impact = report.findings[0].impact
    assert report.gain_scale is not None and report.gain_scale < 0.93
    assert impact is not None and impact.gain_ns == pytest.approx(50.4e6, rel=0.05)


def test_fix_gaining_less_than_its_evidence_is_explained() -> None:
    report = analyze(str(CORPUS / "h100" / "wide_embedding"))
    finding = report.findings[0]
    assert finding.impact is not None and finding.impact.gain_ns is not None
    assert finding.shown_time is not None
    assert finding.impact.gain_ns < 0.7 * float(finding.shown_time.value or 0)
    (reason,) = beyond_evidence(finding, report)
    assert reason.startswith("the gain is less than") and "the host then limits the step" in reason
    without_device = replace(report, scope=replace(report.scope, device=None))
    (reason,) = beyond_evidence(finding, without_device)
    assert "host" not in reason and "GPU" not in reason


def test_note_gives_the_remaining_share_of_evidence() -> None:
    """Kernels on doubles: those limited by memory keep their time, so half of the whole is no
    expectation; the GPU is busy throughout the step after this fix."""
    report = analyze(str(CORPUS / "h100" / "numpy_double"))
    finding = report.findings[0]
    assert any(edit.factor == 1.0 for edit in finding.edits)
    remaining_share = 1 - finding.impact.gain_ns / finding.shown_time.value  # type: ignore
    (reason,) = beyond_evidence(finding, report)
    assert reason.endswith(
        f": about {remaining_share:.0%} of it stays, as part of the work keeps its time"
    )


def test_a_share_that_stays_has_its_reason() -> None:
    """Products without TF32, waits for a late rank; and updates of a whole table, without which the
    step is the host's: 4 to 5% of that work stays, and the gain is half of it all the same."""
    for path, why in (
        ("pairs/sam_1_fp32_many_syncs.json.gz", "stays, as the work remains and becomes faster"),
        ("dlrm_8ranks/worker3.pt.trace.json.gz", "stays, as the transfer itself remains"),
        ("h100/ads_ranker", "the host then limits the step"),
    ):
        report = analyze(str(CORPUS / path))
        reasons = [text for each in report.findings for text in beyond_evidence(each, report)]
        assert any(text.endswith(why) for text in reasons)
        assert not any(text.endswith("of it stays") for text in reasons)


@pytest.mark.parametrize(("optimizer_ms", "gain_ms"), [(2.0, (1.0, 2.0)), (10.0, (5.0, 10.0))])
def test_a_gain_on_a_cpu_is_of_the_phase_in_the_steps_of_the_run(
    optimizer_ms: float, gain_ms: tuple[float, float]
) -> None:
    """Other programs stopped the optimizer of the window: it takes 10 ms there, and 2 in the run's
    steps. A fix that removes three quarters of it saves at most 2 ms. Where it takes 10 ms in the
    run too, the gain is three quarters of it."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps(4):
        with b.range("advisor::forward"):
            b.compute("aten::mm", 20_000, [[64, 64], [64, 64]])
        with b.range("advisor::optimizer"), b.range("Optimizer.step#Adam.step"):
            b.compute("aten::addcmul_", 10_000, [[64, 64]])
    run = b.record_of_run()
    run.steps(60, 20 + optimizer_ms, forward=20, optimizer=optimizer_ms)
    run.steps(4, 30, window=0)
    estimator = ReplayEstimator(b.analysis())
    select = Select(on="host", kind=("op",), name="^aten::addcmul_$")
    fix = Finding(summary="S.", edits=[Edit(op="scale", select=select, factor=0.25)])
    a = estimator.replayer.a
    (of_run,) = scale_to_run([estimate_impact(fix, a, estimator)], a, estimator)
    impact = of_run.impact
    assert impact is not None and impact.low_ns is not None
    assert impact.gain_ns is not None and impact.high_ns is not None
    assert gain_ms[0] * 1e6 <= impact.gain_ns <= impact.high_ns <= gain_ms[1] * 1e6
    assert impact.low_ns <= impact.gain_ns
