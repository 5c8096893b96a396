"""Time of the loop's own code where steps vary."""

from __future__ import annotations

import pytest

from advisor.core.finding import Finding
from advisor.rules.host.loop_time import LoopPhases
from advisor.testing import TraceBuilder

MS = 1_000_000


def test_the_loops_own_code_is_of_the_mean_step_where_steps_vary() -> None:
    """20 of 100 steps take 40 ms, 36 of them between steps; the others 10 and 6 ms."""
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    for _ in range(20):
        run.steps(4, 10, forward=4, **{"between steps": 6})
        run.steps(1, 40, forward=4, **{"between steps": 36})
    (finding,) = (f for f in LoopPhases().check(b.analysis()) if isinstance(f, Finding))
    assert finding.impact is not None
    assert finding.impact.gain_ns == pytest.approx(12 * MS, rel=0.06)
    assert "of the mean step" in finding.summary


@pytest.mark.parametrize(
    ("name", "samples"), [("a sort of all values", False), ("a sort before sampling", True)]
)
def test_tokens_are_sampled_only_in_the_code_of_programs_that_sample(
    name: str, *, samples: bool
) -> None:
    example = LoopPhases.examples()[name]
    assert isinstance(example, TraceBuilder)
    (finding,) = (f for f in LoopPhases().check(example.analysis()) if isinstance(f, Finding))
    assert "torch.topk" in str(finding.code)
    assert ("multinomial" in str(finding.code)) == ("sample" in str(finding.fix)) == samples


def test_a_sort_in_the_loss_is_named_and_gains_its_own_time() -> None:
    """As for hard negatives of a detector: 3 ms of sorting in 6 ms of loss and 10 ms of step."""
    example = LoopPhases.examples()["a sort in the loss"]
    assert isinstance(example, TraceBuilder)
    (finding,) = (f for f in LoopPhases().check(example.analysis()) if isinstance(f, Finding))
    assert "torch.topk" in str(finding.code)
    assert "sort takes 33%" in finding.summary
    sorts = 3e6 / 13e6 * 10e6
    assert finding.impact is not None
    assert finding.impact.gain_ns == pytest.approx(0.9 * sorts, rel=0.05)
