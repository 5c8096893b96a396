"""Which operator is responsible for a piece of device work: host rows and their ancestors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import Trace
from advisor.measure.device.families import CODE, SDPA, op_families
from advisor.measure.host.names import distinct_names, name_matches
from advisor.measure.host.stacks import around, climb_stack

Rows = NDArray[np.int64]
NONE = -1

_OPTIMIZER = r"^Optimizer\.step"


class Launches(NamedTuple):
    """Aligned with ``trace.gpu``; rows are rows of ``trace.cpu``, -1: none."""

    inner: Rows
    """Innermost operator around the launch. None for work of a CUDA graph: the operator around
    the launch of a graph did not launch each of its kernels."""
    op: Rows
    """Nearest operator, from the inside, that does work of a known family."""
    outer: Rows
    """The next such operator around that."""
    family: NDArray[np.int8]
    """Family code of ``op``; -1: none."""
    outer_family: NDArray[np.int8]
    """Family code of ``outer``; -1: none."""
    optimizer: NDArray[np.bool_]
    """Launched inside ``Optimizer.step``."""
    sdpa: Rows
    """Innermost ``scaled_dot_product_attention`` operator around it."""


def find_launches(trace: Trace) -> Launches:
    """Walk from each launch to the operators that it serves.

    The walk is done once for each distinct launching row; several kernels of one operator share
    it.
    """
    cpu, gpu = trace.cpu, trace.gpu
    inner = _rows(gpu["op"])
    launch = _rows(gpu["launch"])
    graph = (cpu["call"] == "graph_launch").fill_null(False).to_numpy()
    if graph.any():
        of_graph = (launch >= 0) & graph[np.maximum(launch, 0)]
        inner = np.where(of_graph, NONE, inner)
    parent = _rows(cpu["parent"])
    codes = _family_codes(cpu)
    start, back = np.unique(np.where(inner >= 0, inner, launch), return_inverse=True)
    ops, op_back = np.unique(inner, return_inverse=True)
    has_family = codes >= 0
    op = climb_stack(parent, has_family, ops)
    outer = climb_stack(parent, has_family, around(parent, op))
    op, outer = op[op_back], outer[op_back]
    return Launches(
        inner=inner,
        op=op,
        outer=outer,
        family=_at(codes, op),
        outer_family=_at(codes, outer),
        optimizer=_around(cpu, parent, start, "annotation", _OPTIMIZER)[back] >= 0,
        sdpa=_around(cpu, parent, start, "op", SDPA)[back],
    )


def _rows(column: pl.Series) -> Rows:
    rows: Rows = column.fill_null(NONE).cast(pl.Int64).to_numpy()
    return rows


def _at(codes: NDArray[np.int8], rows: Rows) -> NDArray[np.int8]:
    if not len(codes):
        return np.full(len(rows), NONE, dtype=np.int8)
    return np.where(rows >= 0, codes[np.maximum(rows, 0)], NONE).astype(np.int8)


def _around(cpu: pl.DataFrame, parent: Rows, rows: Rows, kind: str, pattern: str) -> Rows:
    """Nearest host row of a kind and name at or around each row; -1: none."""
    where = np.flatnonzero((cpu["kind"] == kind).to_numpy())
    named = name_matches(cpu["name"].gather(where), pattern).to_numpy()
    if not named.any():
        return np.full(len(rows), NONE, dtype=np.int64)
    wanted = np.zeros(cpu.height, dtype=np.bool_)
    wanted[where[named]] = True
    return climb_stack(parent, wanted, rows)


def _family_codes(cpu: pl.DataFrame) -> NDArray[np.int8]:
    """Aligned with ``trace.cpu``: family code of an operator, -1: not an operator, or none."""
    codes = np.full(cpu.height, NONE, dtype=np.int8)
    where = np.flatnonzero((cpu["kind"] == "op").to_numpy())
    texts, which = distinct_names(cpu["name"].gather(where))
    if texts.is_empty():
        return codes
    of_name = op_families(texts).replace_strict(CODE, default=NONE, return_dtype=pl.Int8)
    codes[where] = np.append(of_name.fill_null(NONE).to_numpy(), np.int8(NONE))[which]
    return codes
