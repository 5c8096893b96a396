"""Work that comes every few steps is found, with its period, its time and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from advisor.measure.steps.periodic import RecurringWork, find_periodic_work
from advisor.measure.steps.run_steps import RunSteps
from advisor.testing.record import RecordBuilder


def work_of(
    extra: Callable[[int], float],
    *,
    steps: int = 160,
    outside: bool = False,
    window: range = range(0),
    **fields: Any,
) -> RecurringWork | None:
    """Measured work of steps of 10 ms with ``extra(n)`` ms more."""
    r = RecordBuilder()
    for n in range(steps):
        more = extra(n)
        r.step(
            10 + (0 if outside else more),
            evaluation=more if outside else 0.0,
            forward=4,
            backward=5,
            window=0 if n in window else None,
            **{key: value(n) for key, value in fields.items()},
        )
    return find_periodic_work(RunSteps(r.build()))


@pytest.mark.parametrize("outside", [True, False])
def test_every_eighth_step(outside: bool) -> None:
    """Every eighth step takes 24 ms more: 3 ms per step, of 13."""
    work = work_of(lambda n: 24 if n % 8 == 7 else 0, outside=outside)
    assert work is not None and (work.period, work.outside) == (8, outside)
    assert work.each == pytest.approx(24e6)
    assert work.per_step == pytest.approx(3e6, rel=0.05)
    assert work.gain == pytest.approx(work.per_step, rel=0.05)
    assert work.share == pytest.approx(3 / 13, rel=0.05)
    assert work.contains(79) and work.contains(80) and not work.contains(75)


def test_a_profiled_window_hides_some() -> None:
    work = work_of(lambda n: 24 if n % 8 == 7 else 0, window=range(60, 75))
    assert work is not None and work.period == 8


def test_random_work_has_no_period() -> None:
    assert work_of(lambda n: 24 if n in (12, 31, 50, 71, 77, 90, 121, 150) else 0) is None


def test_garbage_collection_is_none() -> None:
    assert work_of(lambda n: 24 if n % 8 == 7 else 0, gc=lambda n: 24 if n % 8 == 7 else 0) is None


def test_a_little_in_every_step_is_none() -> None:
    assert work_of(lambda n: 4 if n % 8 == 7 else 0) is None


def test_occasional_wait_for_the_device_has_no_gain() -> None:
    """The host launches steps in 10 ms, the device takes 13, and every eighth step waits for it."""
    work = work_of(
        lambda n: 24 if n % 8 == 7 else 0,
        fields=lambda n: {"gpu": {"forward": 13_000_000}} if n % 4 == 0 else {},
    )
    assert work is not None and work.gain < 0.1 * work.per_step
