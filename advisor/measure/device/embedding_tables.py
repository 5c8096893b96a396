"""Embedding tables that a step looks rows up in."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps

LOOKUP = r"^aten::embedding(?:_bag|_renorm_)?$"
_PRODUCTS = r"^aten::(?:mm|addmm|matmul|linear)$"
MAX_DESCRIBED = 20_000
"""Maximum number of distinct inputs that are read."""


class Table(NamedTuple):
    rows: int
    size: int
    used: int
    """Maximum number of rows that a step looks up: the same row may occur twice."""


def find_tables(a: Analysis) -> list[Table]:
    """Find embedding tables that the analysed window looks rows up in and no product uses."""
    cpu = a.trace.cpu
    lookup_rows = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], LOOKUP).to_numpy()))
    calls = pl.DataFrame({"inputs": cpu["inputs"].gather(lookup_rows).drop_nulls()})
    used: dict[tuple[int, ...], int] = {}
    for index, count in calls.group_by("inputs").len().sort("inputs").iter_rows():
        table, indices = (inputs_at(a, index).tensor(position) for position in (0, 1))
        if table is not None and indices is not None and len(table.shape) == 2:
            used[table.shape] = used.get(table.shape, 0) + indices.elements * count
    product_shapes = _find_product_shapes(a)
    return [
        Table(rows, size, max(1, round(lookups_of_table / a.step_count)))
        for (rows, size), lookups_of_table in used.items()
        if not {(rows, size), (size, rows)} & product_shapes
    ]


def _find_product_shapes(a: Analysis) -> set[tuple[int, ...]]:
    cpu = a.trace.cpu
    is_product = name_matches(cpu["name"], _PRODUCTS).to_numpy()
    inputs = cpu["inputs"].filter(pl.Series(is_product)).drop_nulls().unique().sort()
    return {
        tensor.shape for index in inputs[:MAX_DESCRIBED] for tensor in inputs_at(a, index).tensors
    }
