"""Loading that moves to worker processes needs cores that are free."""

from __future__ import annotations

import pytest

from advisor.rundir import Host
from advisor.testing import TraceBuilder
from advisor.whatif.language import parse_edit
from advisor.whatif.price import WhatIf

LOADING, STEP = 6_000.0, 10_000.0
"""Of each step, µs: the loader 6 ms, then 4 ms of the model on the host."""


def whatif(*, computed: bool, used: float | None, cpus: int = 2) -> WhatIf:
    """``used``: cores that the process keeps busy, as sampled; ``None``: not recorded."""
    b = TraceBuilder()
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for _ in range(8):
        with b.step():
            with b.range(name):
                if computed:
                    with b.op("aten::stack", host_us=LOADING):
                        pass
                else:
                    b.host(LOADING)
            for _ in range(4):
                with b.op("aten::mm", host_us=1000):
                    pass
    if used is not None:
        r = b.record_of_run(cpus=cpus, cpus_total=cpus)
        r.steps(60, 10)
        r.watch(host=lambda share: Host(process_cpu=100 * used, cpu=100 * used / cpus))
    return WhatIf(b.analysis())


def gain(found: WhatIf, workers: int = 4) -> float:
    """Of the step."""
    return found.gain([parse_edit(f"spread loader {workers}")]) / found.a.step_ns


def test_without_samples_of_the_cores_they_are_taken_for_granted() -> None:
    """6 of 10 ms go, but for the hand-over of a batch (0.2 ms)."""
    assert gain(whatif(computed=True, used=None)) == pytest.approx(0.58, abs=0.02)


def test_idle_cores_do_the_work() -> None:
    assert gain(whatif(computed=True, used=1.0, cpus=8)) == pytest.approx(0.58, abs=0.02)


def test_on_busy_cores_loading_that_computes_takes_as_long_as_before() -> None:
    """Two cores, both busy: what is left is the main thread's own share while it does not load,
    0.6 of a core, so that a batch takes 6 / 0.6 = 10 ms, which is the step of before."""
    assert gain(whatif(computed=True, used=2.0)) == pytest.approx(0.0, abs=0.02)


def test_on_busy_cores_loading_that_waits_needs_none() -> None:
    found = whatif(computed=False, used=2.0)
    assert gain(found) == pytest.approx(0.58, abs=0.02)
    low, _ = found.band([parse_edit("spread loader 4")])
    assert low <= 0.02 * found.a.step_ns  # if it computes something that is not recorded
