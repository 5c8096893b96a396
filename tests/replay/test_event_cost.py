"""The profiler's cost per event is taken from the recorded steps where they show it."""

from __future__ import annotations

import pytest

from advisor.replay.window_replayer import EVENT_COST_NS, MAX_COST, WindowReplayer, event_cost
from advisor.testing import TraceBuilder

USUAL = EVENT_COST_NS["plain"]
OPS, STEP_US = 100, 300.0


def host_bound(*, median_us: float | None, profiled_us: float = STEP_US) -> TraceBuilder:
    """Steps of 100 operators, 3 µs each, on the CPU; and what the recorder saw."""
    b = TraceBuilder(gpu=None)
    for _ in range(5):
        with b.step():
            for _ in range(OPS):
                with b.op("aten::add", host_us=2.5):
                    pass
    if median_us is not None:
        r = b.record_of_run()
        r.steps(40, median_us / 1000)
        r.steps(5, profiled_us / 1000, window=0)
    return b


def test_without_a_record_the_event_cost_is_the_usual_one() -> None:
    assert event_cost(host_bound(median_us=None).analysis()) == USUAL


def test_event_cost_is_profiling_overhead_per_event() -> None:
    # 300 µs with the profiler and 200 without: 100 µs over 100 operators and the step's own range
    cost = event_cost(host_bound(median_us=200).analysis())
    assert cost == pytest.approx(100_000 / (OPS + 1), rel=0.01)


def test_profiler_without_overhead_has_no_event_cost() -> None:
    a = host_bound(median_us=310).analysis()
    assert event_cost(a) == 0.0
    replayer = WindowReplayer(a)
    assert replayer.period((), "unprofiled") == pytest.approx(replayer.unedited.period, rel=1e-6)


def test_a_measured_cost_is_bounded() -> None:
    a = host_bound(median_us=10, profiled_us=30_000).analysis()
    assert event_cost(a) == MAX_COST * USUAL


def test_behind_a_busy_device_the_cost_cannot_be_seen() -> None:
    b = TraceBuilder()
    for _ in range(5):
        with b.step():
            with b.op("aten::mm"):
                b.launch("ampere_sgemm_128x64_nn", 3000)
            b.sync()
    r = b.record_of_run()
    r.steps(40, 3.0)
    r.steps(5, 3.0, window=0)
    assert event_cost(b.analysis()) == USUAL


def test_a_python_frame_costs_less_than_an_operator() -> None:
    """1,000 frames beside 100 operators: 0.5 µs each, and no more in the stretch that they fill."""
    b = TraceBuilder(gpu=None)
    for _ in b.steps(4):
        for _ in range(250):
            with b.python("model.py(3): forward"):
                pass
        for _ in range(25):
            with b.op("aten::add", host_us=10.0):
                pass
    replayer = WindowReplayer(b.analysis())
    taken = replayer.unedited.period - replayer.period((), "unprofiled")
    frames, others = 250 * EVENT_COST_NS["python"], 25 * USUAL
    assert taken == pytest.approx(frames + others, rel=0.05)
