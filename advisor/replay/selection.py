"""Selectors against the tables: which rows an Edit touches."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.finding import Select
from advisor.core.intervals import covered_length
from advisor.measure.host.layers import matching_nodes, modules_around, work_nodes
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import Rows
from advisor.measure.steps.instants import instants

if TYPE_CHECKING:
    from advisor.measure import Analysis

Mask = NDArray[np.bool_]


def selected_gpu(a: Analysis, select: Select, *, anywhere: bool = False) -> Mask:
    """Aligned with ``trace.gpu``: rows of the analysed device that run inside the used steps;
    ``anywhere``: at whatever time they run."""
    gpu = a.trace.gpu
    mask: Mask = a.in_window.copy()
    if anywhere and a.device_id is not None:
        mask = (gpu["device"] == a.device_id).to_numpy().copy()
    if select.kind:
        mask &= gpu["kind"].is_in(list(select.kind)).to_numpy()
    if select.name:
        mask &= name_matches(gpu["name"], _checked(select.name)).to_numpy()
    if select.family:
        mask &= a.kernels["family"].is_in(list(select.family)).fill_null(False).to_numpy()
    if select.copy:
        mask &= gpu["copy"].is_in(list(select.copy)).fill_null(False).to_numpy()
    if select.memory:
        wanted = [select.memory.capitalize()]
        host_side = gpu["src"].is_in(wanted) | gpu["dst"].is_in(wanted)
        mask &= host_side.fill_null(False).to_numpy()
    if select.stream:
        mask &= gpu["stream"].is_in(list(select.stream)).to_numpy()
    if select.max_ns is not None:
        mask &= (gpu["dur"] <= select.max_ns).to_numpy()
    if select.correlation:
        mask &= gpu["correlation"].is_in(list(select.correlation)).fill_null(False).to_numpy()
    if select.layer:
        mask &= _in_layer(a, select.layer, work_nodes(a))
    if select.under:
        under = under_names(a, select.under)
        start = gpu["op"].fill_null(-1).to_numpy()
        launch = gpu["launch"].fill_null(-1).to_numpy()
        mask &= np.where(start >= 0, under[start], False) | np.where(
            launch >= 0, under[launch], False
        )
    return mask


def selected_host(a: Analysis, select: Select) -> Mask:
    """Aligned with ``trace.cpu``."""
    cpu = a.trace.cpu
    mask = np.ones(cpu.height, dtype=bool)
    if select.kind:
        mask &= cpu["kind"].is_in(list(select.kind)).to_numpy()
    if select.name:
        mask &= name_matches(cpu["name"], _checked(select.name)).to_numpy()
    if select.call:
        mask &= cpu["call"].is_in(list(select.call)).fill_null(False).to_numpy()
    if select.copy:
        mask &= _for_copies(a, select.copy)
    if select.under:
        mask &= under_names(a, select.under)[:-1]
    if select.layer:
        mask &= _in_layer(a, select.layer, modules_around(a, np.arange(cpu.height)).node)
    if select.max_ns is not None:
        mask &= (cpu["dur"] <= select.max_ns).to_numpy()
    if select.correlation:
        mask &= cpu["correlation"].is_in(list(select.correlation)).fill_null(False).to_numpy()
    return mask


def _in_layer(a: Analysis, pattern: str, nodes: Rows) -> Mask:
    """Whether rows are of the modules that a pattern names."""
    if a.layers is None:
        return np.zeros(len(nodes), dtype=bool)
    return np.append(matching_nodes(a.layers, pattern), False)[nodes]


def host_of_layer(select: Select) -> Select | None:
    """The host events of a layer whose device work is selected without more; ``None``: it is not
    such a selector."""
    own = Select(on="host", layer=select.layer)
    return own if select.layer and select == replace(own, on="gpu") else None


def _for_copies(a: Analysis, directions: tuple[str, ...]) -> Mask:
    """Aligned with ``trace.cpu``: calls that copy in these directions, or wait for such a copy."""
    copies = a.trace.gpu["copy"].is_in(list(directions)).fill_null(False).to_numpy()
    rows = a.trace.gpu["launch"].filter(pl.Series(copies)).drop_nulls().to_numpy()
    awaited = a.syncs.filter(pl.col("copy").is_not_null()).select("host", "copy")
    result = np.zeros(a.trace.cpu.height, dtype=bool)
    result[rows] = True
    result[awaited["host"].filter(pl.Series(copies[awaited["copy"].to_numpy()])).to_numpy()] = True
    return result


def selected_gaps(a: Analysis, select: Select) -> Mask:
    """Aligned with ``Analysis.gaps``."""
    gaps = a.gaps
    mask = np.ones(gaps.height, dtype=bool)
    if select.cause:
        mask &= gaps["cause"].is_in(list(select.cause)).to_numpy()
    if select.under:
        host = gaps["host"].fill_null(-1).to_numpy()
        mask &= under_names(a, select.under)[host]
    if select.name:
        named = name_matches(a.trace.cpu["name"], _checked(select.name)).to_numpy()
        host = gaps["host"].fill_null(-1).to_numpy()
        mask &= np.append(named, False)[host]
    if select.max_ns is not None:
        mask &= (gaps["dur"] <= select.max_ns).to_numpy()
    if select.at:
        ts = gaps["ts"].to_numpy()
        mask &= covered_length(ts, ts + gaps["dur"].to_numpy(), instants(a, select)) > 0
    return mask


def under_names(a: Analysis, pattern: str) -> Mask:
    """Aligned with ``trace.cpu`` plus a last False: the row or a row around it has the name."""
    cpu = a.trace.cpu
    named = name_matches(cpu["name"], _checked(pattern)).to_numpy()
    result = np.append(named, False)
    if named.any():
        # a named row covers all rows of its thread that start inside it
        rows = np.flatnonzero(named)
        thread = cpu["thread"].to_numpy()
        ts = cpu["ts"].to_numpy()
        end = ts + cpu["dur"].to_numpy()
        span = int(end.max()) + 1
        key = thread.astype(np.int64) * span + ts
        reach = np.maximum.accumulate(thread[rows].astype(np.int64) * span + end[rows])
        last = np.searchsorted(rows, np.arange(len(key)), side="right") - 1
        result[:-1] = (last >= 0) & (key < reach[np.maximum(last, 0)])
    return result


@lru_cache(maxsize=512)
def _checked(pattern: str) -> str:
    """The pattern, if it is a regular expression; raises AdvisorError when it is not."""
    try:
        re.compile(pattern)
        pl.Series(["x"]).str.contains(pattern)
    except (re.error, pl.exceptions.ComputeError) as error:
        raise AdvisorError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern
