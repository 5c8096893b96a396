"""Long steps that compile are distinguished from others in one way, by whichever rule finds
them."""

from __future__ import annotations

import pytest

from advisor.core.finding import Finding
from advisor.core.rule import Rule
from advisor.rules.host.periodic_stalls import LongStep
from advisor.rules.host.step_variation import RegularStalls, StepJitter
from advisor.rules.support.common import COMPILING
from advisor.testing import TraceBuilder

MAIN, COMPILE = "train.py(9): main", "torch/_dynamo/convert_frame.py(900): _compile"
RUN = "torch/_dynamo/eval_frame.py(1166): compile_wrapper"


def run_with(long: set[int], *, early: list[str], late: list[str]) -> TraceBuilder:
    """200 steps of 10 ms, some of 60; a quarter of the samples of the first 20 steps are in the
    frames ``early``, of the others in ``late``."""
    b = TraceBuilder()
    r = b.record_of_run()
    for n in range(200):
        ms = 60 if n in long else 10
        r.step(ms, forward=ms - 5)  # the loop's own code is periodic-work's subject
        if n in (20, 199):
            inside = early if n == 20 else late
            r.event("stacks", frames=[MAIN, *inside], stacks=[[75, [0]], [25, [0, 1]]])
    return b


def only_finding(rule: Rule, b: TraceBuilder) -> Finding:
    (finding,) = (each for each in rule.check(b.analysis()) if isinstance(each, Finding))
    return finding


@pytest.mark.parametrize(
    ("rule", "long"),
    [(RegularStalls(), set(range(39, 200, 20))), (StepJitter(), {31, 44, 77, 90, 121, 150, 171})],
    ids=["at regular distances", "irregular"],
)
def test_long_compiling_steps_are_explained(rule: Rule, long: set[int]) -> None:
    compiles = only_finding(rule, run_with(long, early=[MAIN], late=[COMPILE]))
    assert "of compiling after the warm-up" in compiles.summary
    assert compiles.fix == COMPILING["fix"] == LongStep.cases["compiling"]["fix"]
    for early, late in (([COMPILE], [MAIN]), ([RUN], [RUN])):  # at the start alone; only runs
        other = only_finding(rule, run_with(long, early=early, late=late))
        assert "compiling" not in other.summary and other.fix != COMPILING["fix"]
