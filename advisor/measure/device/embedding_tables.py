"""Embedding tables that a step looks rows up in."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps

LOOKUP = r"^aten::embedding(?:_bag|_renorm_)?$"
_MULTIPLIES = r"^aten::(?:mm|addmm|matmul|linear)$"
MAX_DESCRIBED = 20_000
"""Most kinds of inputs that are looked at."""


class Table(NamedTuple):
    rows: int
    size: int
    used: int
    """Rows that a step looks up, at most: the same row may come twice."""


def find_tables(a: Analysis) -> list[Table]:
    """Find embedding tables that the analysed window looks rows up in and nothing multiplies."""
    cpu = a.trace.cpu
    lookups = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], LOOKUP).to_numpy()))
    calls = pl.DataFrame({"inputs": cpu["inputs"].gather(lookups).drop_nulls()})
    used: dict[tuple[int, ...], int] = {}
    for index, count in calls.group_by("inputs").len().sort("inputs").iter_rows():
        table, indices = (inputs_at(a, index).tensor(at) for at in (0, 1))
        if table is not None and indices is not None and len(table.shape) == 2:
            used[table.shape] = used.get(table.shape, 0) + indices.elements * count
    multiplied = _multiplied(a)
    return [
        Table(rows, size, max(1, round(number / a.step_count)))
        for (rows, size), number in used.items()
        if not {(rows, size), (size, rows)} & multiplied
    ]


def _multiplied(a: Analysis) -> set[tuple[int, ...]]:
    cpu = a.trace.cpu
    chosen = name_matches(cpu["name"], _MULTIPLIES).to_numpy()
    inputs = cpu["inputs"].filter(pl.Series(chosen)).drop_nulls().unique().sort()
    return {
        tensor.shape for index in inputs[:MAX_DESCRIBED] for tensor in inputs_at(a, index).tensors
    }
