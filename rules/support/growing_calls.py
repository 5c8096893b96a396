"""Calls of operators that work on more values in each step than in the step before."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.steps.steps import step_of_call
from advisor.rules.support.common import Rows, outermost_in_steps

MIN_GROWING_STEPS, MAX_GROWTH_RATIO = 3, 1.05
"""Minimum number of consecutive steps that show growth, and maximum ratio of the largest growth to
the smallest."""


class GrowingCalls(NamedTuple):
    """The same call in each step."""

    name: str
    rows: Rows
    values: list[int]
    """Number of input values in each step."""
    ns: int


def _calls_by_place(a: Analysis) -> list[GrowingCalls]:
    """Return calls that occur in each used step: the n-th call of an operator, if all steps have
    equally many."""
    ops = outermost_in_steps(a).filter(pl.col("inputs").is_not_null()).sort("ts")
    ops = ops.with_columns(step=step_of_call(a.steps, ops["ts"].to_numpy())).drop_nulls("step")
    step_number = {index: n for n, index in enumerate(a.steps.used["index"].sort())}
    sizes = {index: _count_values(inputs_at(a, index)) for index in ops["inputs"].unique()}
    by_name: dict[str, list[list[tuple[int, int, int]]]] = defaultdict(
        lambda: [[] for _ in step_number]
    )
    for row, name, ns, index, step in ops.select("row", "name", "ns", "inputs", "step").iter_rows():
        by_name[name][step_number[step]].append((row, ns, sizes[index]))
    result = []
    for name, steps in by_name.items():
        if len({len(calls) for calls in steps}) != 1:
            continue
        for calls in zip(*steps, strict=True):
            rows = np.array([row for row, _, _ in calls], dtype=np.int64)
            values = [size for _, _, size in calls]
            result.append(GrowingCalls(name, rows, values, sum(ns for _, ns, _ in calls)))
    return result


def _count_values(inputs: OpInputs) -> int:
    lists = [shape for position in range(len(inputs)) for shape in inputs.shapes(position)]
    return sum(prod(shape) for shape in [*(tensor.shape for tensor in inputs.tensors), *lists])


def find_growing_rows(a: Analysis) -> Rows:
    """Return the rows of all calls that work on more values in each step."""
    is_short = a.trace.inputs.is_empty() or a.steps.used.height < MIN_GROWING_STEPS
    calls = [] if is_short else find_growing_calls(a)
    return np.concatenate([np.zeros(0, dtype=np.int64), *(call.rows for call in calls)])


def find_growing_calls(
    a: Analysis, max_growth_ratio: float = MAX_GROWTH_RATIO
) -> list[GrowingCalls]:
    """Return calls that have more values in each step, by about the same number."""
    growing = []
    for call in _calls_by_place(a):
        rise = np.diff(call.values)
        if len(rise) and rise.min() > 0 and rise.max() <= max_growth_ratio * rise.min():
            growing.append(call)
    return growing
