"""Training steps that compute on everything that earlier steps collected."""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    impact_per_step,
    of_step,
)
from advisor.rules.support.growing_calls import (
    MAX_GROWTH_RATIO,
    MIN_GROWING_STEPS,
    GrowingCalls,
    find_growing_calls,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder


class GrowingInputs(Rule):
    """The training loop computes a metric, a mean or a distance in each step, on everything
    collected so far. The n-th step works on n batches, so steps take longer and longer, and the
    run's time grows with the square of its length.

    The recorded shapes show this. In each step, the same call of an operator has more values than
    in the previous step, always by about the same number. Inference is left out: a cache of keys
    and values grows this way by design.

    The gain is the time of these operators in the window. In a recorded run on a CPU, it is
    extrapolated to the run's steps, whose inputs grow in the same way."""

    id = "growing-inputs"
    title = "Each step computes on everything that earlier steps collected"
    needs_shapes = True
    training_only = True
    found_in = ("recorded/growing_metric.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://lightning.ai/docs/torchmetrics/stable/pages/overview.html",
        "https://lightning.ai/docs/torchmetrics/stable/classification/auroc.html",
    )

    min_steps = Threshold(
        MIN_GROWING_STEPS, "consecutive steps, each with more values than the last", CHOSEN
    )
    max_growth_ratio = Threshold(
        MAX_GROWTH_RATIO, "times the smallest growth from step to step", CHOSEN
    )
    min_share = Threshold(0.05, "of the step in these operators", XPROF)
    best_factor = Factor(1.2, "times that time at best: larger inputs miss the caches", CHOSEN)
    worst_factor = Factor(0.2, "of the time remains at most, for the step's own values", CHOSEN)

    fix = (
        "Only add to the metric in each step, and compute it at the end, or every few hundred "
        "steps. Or keep sums, counts or bins instead of all values."
    )
    code = (
        "metric.update(scores.detach(), labels)      # in each step\n"
        "if (step + 1) % 500 == 0:\n"
        '    log("auroc", metric.compute())          # not in each step\n'
        "# With bins, the cost of a metric of torchmetrics does not grow:\n"
        "# BinaryAUROC(thresholds=200)\n"
        "# For a mean, keep a sum and a count."
    )
    verify = "Record a longer run: late steps take as long as early ones."
    falsified_by = "late steps of a longer run that take as long as early ones"
    assumptions = ("the loop does not need the result in each step",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or a.steps.used.height < self.min_steps:
            return
        growing = find_growing_calls(a, self.max_growth_ratio)
        if not growing:
            return
        rows = np.sort(np.concatenate([call.rows for call in growing]))
        ns = time_of_operators(a, rows)
        if ns < self.min_share * a.span_ns:
            return
        costliest = max(growing, key=lambda call: call.ns)
        values = costliest.values
        growth_factor = _measure_growth_factor(a, costliest)
        later = ""
        if growth_factor is not None and growth_factor >= 1.05:
            later = f", and {growth_factor:.1f} times that in the run's mean step"
        yield Finding(
            summary=(
                f"{costliest.name} works on {values[0]:,} values in the first recorded step and "
                f"on {values[-1]:,} in the last, about {np.diff(values).mean():,.0f} more in each. "
                f"{t.count_noun(len(growing), 'operator')} of a step on such values "
                f"{'takes' if len(growing) == 1 else 'take'} {of_step(a, ns)}{later}."
            ),
            evidence=[
                self.compare("steps in a row with more values", len(values), "min_steps", "count"),
                amount_per_step(a, "operators on more and more values", len(rows), "count"),
                amount_per_step(a, "time of operators on more and more values", ns),
                self.compare_share(a, "operators on more and more values", ns),
            ],
            where=costliest_places(a, rows, top=1),
            **self._estimate_effect(a, rows, ns, growth_factor),
        )

    def _estimate_effect(
        self, a: Analysis, rows: Rows, ns: int, growth_factor: float | None
    ) -> dict[str, Any]:
        """Return the impact or the edits that remove these operators. ``growth_factor``: their time
        in the run's mean step over that in the window, or ``None`` if unknown."""
        if growth_factor is not None:
            time = growth_factor * ns / a.step_count
            impact = impact_per_step(
                a,
                time,
                low=(1 - self.worst_factor) * ns / a.step_count,
                high=self.best_factor * time,
                method="time of these operators, as it grows from step to step",
            )
            return {"impact": impact}
        saved = (ns, ns, (1 - self.worst_factor) * ns)
        return {"edits": [scale_operators(a, rows, saved)]}

    @staticmethod
    def examples() -> Examples:
        return {
            "a metric on all scores": _build_training(),
            "on a CPU": _build_training(gpu=None),
            "in a recorded run": _build_training(gpu=None, recorded=True),
            "sizes that vary": (_build_training(sizes=(9000, 9700, 9200, 9900)), "not growing"),
            "always as much": (_build_training(sizes=(9000,) * 4), "not growing"),
            "two steps": (_build_training(sizes=(9000, 10000)), "min_steps"),
            "hardly any time": (_build_training(us=4), "min_share"),
        }


def _measure_growth_factor(a: Analysis, costliest: GrowingCalls) -> float | None:
    """Return how many times as long the operators take in the run's mean step as in the window, in
    proportion to the collected values. ``None`` without a recorded run on a CPU."""
    if a.run_steps is None or a.device_id is not None:
        return None
    in_window = a.run_steps.kept_by_window(a.trace.meta.window)
    steps, window = (np.flatnonzero(mask) for mask in (a.run_steps.used, in_window))
    if not len(steps) or not len(window):
        return None
    values = costliest.values
    growth = (values[-1] - values[0]) / (len(values) - 1)
    steps_collected = sum(values) / len(values) / growth
    return 1 + max(0.0, float(steps.mean() - window.mean())) / steps_collected


def _build_training(
    *,
    gpu: str | None = "A100",
    us: float = 800,
    sizes: tuple[int, ...] = (9000, 10000, 11000, 12000),
    recorded: bool = False,
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)

    for _, size in zip(b.steps(len(sizes)), sizes, strict=False):
        b.compute("aten::linear", 2000, [[512, 512], [512, 512]])
        b.compute("autograd::engine::evaluate_function: AddmmBackward0", 2000, [])
        b.compute("aten::sort", us, [[size]], kernel="DeviceRadixSortOnesweepKernel")
    for n in range(60 if recorded else 0):
        b.record_of_run().step(4 + n / 10, window=0 if 8 <= n < 12 else None)
    return b
