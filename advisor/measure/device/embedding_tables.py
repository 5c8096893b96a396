"""Embedding tables that a step looks rows up in."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps

LOOKUP = r"^aten::embedding(?:_bag|_renorm_)?$"
_BAG = r"^aten::embedding_bag$"
_MODE_ARGUMENT, _MAX_MODE = 4, 2
"""Argument of a bag's mode, and the mode without sparse gradients: the largest value."""
_TABLE_PRODUCTS = r"^aten::(?:mm|addmm|matmul|linear)$"
MAX_DESCRIBED = 20_000
"""Maximum number of distinct inputs that are read."""


class Table(NamedTuple):
    rows: int
    size: int
    used: int
    """Maximum number of rows that a step looks up: the same row may occur twice."""
    is_bag: bool = False
    """Whether bags of rows are looked up (``nn.EmbeddingBag``)."""


def find_tables(a: Analysis) -> list[Table]:
    """Find embedding tables that the analysed window looks rows up in and no product uses. Tables
    of bags of the largest value are left out: their gradient cannot be sparse."""
    cpu = a.trace.cpu
    lookup_rows = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], LOOKUP).to_numpy()))
    calls = pl.DataFrame(
        {
            "inputs": cpu["inputs"].gather(lookup_rows),
            "is_bag": name_matches(cpu["name"].gather(lookup_rows), _BAG),
        }
    ).drop_nulls("inputs")
    used: dict[tuple[int, ...], int] = {}
    bags: set[tuple[int, ...]] = set()
    for index, is_bag, count in calls.group_by("inputs", "is_bag").len().sort("inputs").iter_rows():
        inputs = inputs_at(a, index)
        table, indices = (inputs.tensor(position) for position in (0, 1))
        if is_bag and inputs.argument(_MODE_ARGUMENT) == _MAX_MODE:
            continue
        if table is not None and indices is not None and len(table.shape) == 2:
            used[table.shape] = used.get(table.shape, 0) + indices.elements * count
            bags |= {table.shape} if is_bag else set()
    product_shapes = _find_product_shapes(a)
    return [
        Table(rows, size, max(1, round(lookups_of_table / a.step_count)), (rows, size) in bags)
        for (rows, size), lookups_of_table in used.items()
        if not {(rows, size), (size, rows)} & product_shapes
    ]


def _find_product_shapes(a: Analysis) -> set[tuple[int, ...]]:
    cpu = a.trace.cpu
    is_product = name_matches(cpu["name"], _TABLE_PRODUCTS).to_numpy()
    inputs = cpu["inputs"].filter(pl.Series(is_product)).drop_nulls().unique().sort()
    return {
        tensor.shape for index in inputs[:MAX_DESCRIBED] for tensor in inputs_at(a, index).tensors
    }
