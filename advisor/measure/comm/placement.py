"""Nodes that each axis of the mesh spans, and the time of collectives with all tensor-parallel
ranks on one node."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import polars as pl

from advisor.measure import Analysis
from advisor.measure.comm.links import (
    ATTAINED_SHARE,
    LARGE_MESSAGE_BYTES,
    NodeLinks,
    count_local,
    find_node_links,
    find_node_size,
    group_ranks,
)
from advisor.measure.comm.mesh import pipeline_wait
from advisor.measure.comm.messages import bus_factor

FILLING_BYTES: int = 1 << 20
"""Minimum size of messages that show the rate of a link, bytes (nccl-tests)."""


class AxisRanks(NamedTuple):
    """Collectives of one axis and the ranks that they connect."""

    axis: str
    members: list[int]
    local: int
    """Number of ranks on the node with the most ranks."""
    rows: pl.DataFrame
    """Rows of ``Analysis.collectives``."""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def crosses(self) -> bool:
        """Whether some of the ranks are on another node."""
        return self.local < self.size


class PlacementChange(NamedTuple):
    """Collectives whose time the placement would change."""

    rows: pl.DataFrame
    factor: float
    """Time after the change over the present time, with unchanged waits."""
    factor_without_waits: float
    """Time after the change, without waits, over the present time."""


class TensorPlacement(NamedTuple):
    """Tensor parallelism that spans several nodes though it would fit on one."""

    tensor: AxisRanks
    node: int
    """GPUs of a node."""
    network: float | None
    """Bus bandwidth of a GPU across nodes, GB/s, or ``None`` if unknown."""
    inside_node: float | None
    """Bus bandwidth of a GPU inside a node, GB/s, or ``None`` if unknown."""
    changes: tuple[PlacementChange, ...]
    """Effects of keeping tensor parallelism inside a node. Empty if no rate is known."""


def find_placement(a: Analysis) -> TensorPlacement | None:
    """Find a placement to improve. ``None`` if tensor parallelism is in one node, or does not fit
    on a node, or it is unknown which ranks share a node."""
    machine = find_node_links(a)
    node = find_node_size(a, machine)
    if node is None or a.device_id is None:
        return None
    axes = _list_axes(a, machine._replace(node_size=node))
    tensor = next((axis for axis in axes if axis.axis == "tensor" and axis.crosses), None)
    if tensor is None or tensor.size > node or node % tensor.size:
        return None
    network, inside = _find_rates(a, axes, machine)
    changes: tuple[PlacementChange, ...] = ()
    if network and inside:
        changes = _add_bubble(a, axes, _find_changes(axes, tensor, network, inside))
    return TensorPlacement(tensor, node, network, inside, changes)


def _list_axes(a: Analysis, machine: NodeLinks) -> list[AxisRanks]:
    """List the axes of groups whose members are recorded, with their ranks."""
    result = []
    for (axis, ranks), rows in a.collectives.group_by("axis", "ranks", maintain_order=True):
        members = group_ranks(cast(str | None, ranks))
        if len(members) > 1 and axis != "unknown":
            local = count_local(members, machine)
            result.append(AxisRanks(str(axis), members, local, rows))
    return result


def _find_rates(
    a: Analysis, axes: Sequence[AxisRanks], machine: NodeLinks
) -> tuple[float | None, float | None]:
    """Return the bus bandwidth of a GPU across nodes and inside a node, GB/s: the upper quartile
    of the recorded bandwidths (waits lower the others), else the rate that NCCL attains on the
    link."""
    network_rates, inside = [], []
    for axis in axes:
        large = axis.rows.filter(pl.col("bytes") >= FILLING_BYTES, pl.col("bus_gbps").is_not_null())
        if large.is_empty():
            continue
        rate = float(np.quantile(large["bus_gbps"].to_numpy(), 0.75))
        if axis.crosses:
            network_rates.append(rate / (1 if axis.axis == "pipeline" else axis.local))
        elif (large["bytes"] >= LARGE_MESSAGE_BYTES).any():
            inside.append(rate)
    link = None if a.hardware is None else a.hardware.link
    network_rate = machine.network_gb_per_s
    network = max(
        network_rates, default=None if network_rate is None else ATTAINED_SHARE * network_rate
    )
    return network, max(inside, default=None if link is None else ATTAINED_SHARE * link.gb_per_s)


def _find_changes(
    axes: Sequence[AxisRanks], tensor: AxisRanks, network: float, inside: float
) -> tuple[PlacementChange, ...]:
    """Move ranks of the other axes off the node, starting with the axes that send the least."""
    remaining_factor = tensor.size / tensor.local
    new_local: dict[int, int] = {}
    for merged in _merge_axes([axis for axis in axes if axis.axis != "tensor"]):
        max_local = max(axis.local for axis in merged)
        reduction = min(remaining_factor, max_local)
        for axis in merged:
            new_local[id(axis)] = min(axis.local, max(1, round(max_local / reduction)))
        remaining_factor /= reduction

    def rate(axis: AxisRanks, on_node: int) -> float:
        if on_node >= axis.size:
            return inside
        return network if axis.axis == "pipeline" else min(inside, network * on_node)

    result = []
    for axis in axes:
        local_after = new_local.get(id(axis))
        if axis.axis == "tensor":
            local_after = axis.size
        if local_after is None or local_after == axis.local:
            continue
        factors = _time_factors(axis.rows, rate(axis, axis.local), rate(axis, local_after))
        if factors is not None:
            result.append(PlacementChange(axis.rows, *factors))
    return tuple(result)


def _merge_axes(axes: Sequence[AxisRanks]) -> list[list[AxisRanks]]:
    """Merge axes with the same ranks, since experts are spread over data-parallel ranks. Axes that
    send the least come first."""
    result: list[tuple[set[int], list[AxisRanks]]] = []
    for axis in axes:
        members, merged = set(axis.members), [axis]
        for other in [entry for entry in result if len(entry[0] & members) > 1]:
            result.remove(other)
            members, merged = members | other[0], other[1] + merged
        result.append((members, merged))

    def sent(merged_axes: list[AxisRanks]) -> int:
        return sum(int(axis.rows["bytes"].fill_null(0).sum()) for axis in merged_axes)

    return sorted((merged for _, merged in result), key=sent)


def _add_bubble(
    a: Analysis, axes: Sequence[AxisRanks], changes: tuple[PlacementChange, ...]
) -> tuple[PlacementChange, ...]:
    """Add the pipeline's bubble, which scales with the stages' work, since they wait for each
    other."""
    result = list(changes)
    for axis in axes:
        if axis.axis != "pipeline":
            continue
        idle, time = pipeline_wait(axis.rows), float(axis.rows["dur"].sum())
        busy_ns = max(1.0, a.span_ns - idle)
        shares = [
            sum((1 - factor) * float(change.rows["exposed"].sum()) for change, factor in parts)
            / busy_ns
            for parts in (
                [(change, change.factor) for change in changes],
                [(change, change.factor_without_waits) for change in changes],
            )
        ]
        existing = next((change for change in result if change.rows is axis.rows), None)
        old_factors = (
            (1.0, 1.0) if existing is None else (existing.factor, existing.factor_without_waits)
        )
        result = [change for change in result if change is not existing]
        factors = [
            max(0.0, old - idle * min(1.0, share) / max(time, 1.0))
            for old, share in zip(old_factors, shares, strict=True)
        ]
        result.append(PlacementChange(axis.rows, *factors))
    return tuple(result)


def _time_factors(
    rows: pl.DataFrame, present_rate: float, new_rate: float
) -> tuple[float, float] | None:
    """Return the new time over the present time, by rates in GB/s, with and without waits. Only the
    transfer of the bytes changes; latency stays. ``None`` if bytes are not recorded."""
    saved = total = shortest = 0.0
    for collective, size, group, dur in rows.select(
        pl.col("collective").cast(pl.String), "bytes", "group_size", "dur"
    ).iter_rows():
        factor = bus_factor(collective, group)
        if size is None or factor is None:
            return None
        total += dur
        saved += min(dur, size * factor / present_rate) * (1 - present_rate / new_rate)
        shortest += (
            min(dur, size * factor / new_rate)
            if new_rate > present_rate
            else size * factor / new_rate
        )
    if not total:
        return None
    return 1 - saved / total, min(1 - saved / total, shortest / total)
