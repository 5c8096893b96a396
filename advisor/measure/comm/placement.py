"""Nodes that each axis of the mesh spans, and the time of collectives if the tensor-parallel ranks
shared a node."""

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
    find_node_size,
    group_ranks,
    machine_of,
)
from advisor.measure.comm.mesh import pipeline_wait
from advisor.measure.comm.messages import bus_factor

FILLS: int = 1 << 20
"""Size from which messages show the rate of a link, bytes (nccl-tests)."""


class AxisRanks(NamedTuple):
    """Collectives of one axis and the ranks that they connect."""

    axis: str
    members: list[int]
    local: int
    """Ranks on the node with most."""
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
    """Time after the change over the time now; waits stay."""
    factor_without_waits: float
    """Time after the change, without waits, over the time now."""


class TensorPlacement(NamedTuple):
    """Tensor parallelism that spans several nodes though it would fit on one."""

    tensor: AxisRanks
    node: int
    """GPUs of a node."""
    network: float | None
    """Bus bandwidth of a GPU across nodes, GB/s; ``None``: unknown."""
    inside_node: float | None
    """Bus bandwidth of a GPU inside of a node, GB/s; ``None``: unknown."""
    changes: tuple[PlacementChange, ...]
    """Effects of giving tensor parallelism a node and others the network; empty: no known rate."""


def find_placement(a: Analysis) -> TensorPlacement | None:
    """Find a placement to improve. ``None``: tensor parallelism is in one node, or no node holds
    it, or which ranks share a node is unknown."""
    machine = machine_of(a)
    node = find_node_size(a, machine)
    if node is None or a.device_id is None:
        return None
    axes = _axes(a, machine._replace(node_size=node))
    tensor = next((axis for axis in axes if axis.axis == "tensor" and axis.crosses), None)
    if tensor is None or tensor.size > node or node % tensor.size:
        return None
    network, inside = _rates(a, axes, machine)
    changes: tuple[PlacementChange, ...] = ()
    if network and inside:
        changes = _with_bubble(a, axes, _changes(axes, tensor, network, inside))
    return TensorPlacement(tensor, node, network, inside, changes)


def _axes(a: Analysis, machine: NodeLinks) -> list[AxisRanks]:
    """List the axes of groups whose members are recorded, with their ranks."""
    result = []
    for (axis, ranks), rows in a.collectives.group_by("axis", "ranks", maintain_order=True):
        members = group_ranks(cast(str | None, ranks))
        if len(members) > 1 and axis != "unknown":
            local = count_local(members, machine)
            result.append(AxisRanks(str(axis), members, local, rows))
    return result


def _rates(
    a: Analysis, axes: Sequence[AxisRanks], machine: NodeLinks
) -> tuple[float | None, float | None]:
    """Return the bus bandwidth of a GPU across nodes and inside of one, GB/s: the upper quartile of
    the recorded ones, for waits lower the others; else the rate that NCCL attains on the link."""
    across, near = [], []
    for axis in axes:
        large = axis.rows.filter(pl.col("bytes") >= FILLS, pl.col("bus_gbps").is_not_null())
        if large.is_empty():
            continue
        best = float(np.quantile(large["bus_gbps"].to_numpy(), 0.75))
        if axis.crosses:
            across.append(best / (1 if axis.axis == "pipeline" else axis.local))
        elif (large["bytes"] >= LARGE_MESSAGE_BYTES).any():
            near.append(best)
    link = None if a.hardware is None else a.hardware.link
    given = machine.network_gb_per_s
    network = max(across, default=None if given is None else ATTAINED_SHARE * given)
    return network, max(near, default=None if link is None else ATTAINED_SHARE * link.gb_per_s)


def _changes(
    axes: Sequence[AxisRanks], tensor: AxisRanks, network: float, inside: float
) -> tuple[PlacementChange, ...]:
    """Move ranks of the other axes off the node, those of the axes that send least first."""
    leave = tensor.size / tensor.local
    local: dict[int, int] = {}
    for together in _dimensions([axis for axis in axes if axis.axis != "tensor"]):
        most = max(axis.local for axis in together)
        fewer = min(leave, most)
        for axis in together:
            local[id(axis)] = min(axis.local, max(1, round(most / fewer)))
        leave /= fewer

    def rate(axis: AxisRanks, on_node: int) -> float:
        if on_node >= axis.size:
            return inside
        return network if axis.axis == "pipeline" else min(inside, network * on_node)

    result = []
    for axis in axes:
        then = local.get(id(axis))
        if axis.axis == "tensor":
            then = axis.size
        if then is None or then == axis.local:
            continue
        factors = _factors(axis.rows, rate(axis, axis.local), rate(axis, then))
        if factors is not None:
            result.append(PlacementChange(axis.rows, *factors))
    return tuple(result)


def _dimensions(axes: Sequence[AxisRanks]) -> list[list[AxisRanks]]:
    """Merge axes with the same ranks: experts are spread over data-parallel ranks. Axes that send
    least come first."""
    result: list[tuple[set[int], list[AxisRanks]]] = []
    for axis in axes:
        members, own = set(axis.members), [axis]
        for known in [each for each in result if len(each[0] & members) > 1]:
            result.remove(known)
            members, own = members | known[0], known[1] + own
        result.append((members, own))

    def sent(together: list[AxisRanks]) -> int:
        return sum(int(axis.rows["bytes"].fill_null(0).sum()) for axis in together)

    return sorted((own for _, own in result), key=sent)


def _with_bubble(
    a: Analysis, axes: Sequence[AxisRanks], changes: tuple[PlacementChange, ...]
) -> tuple[PlacementChange, ...]:
    """Add the pipeline's bubble: stages wait for each other's work, so it scales with it."""
    result = list(changes)
    for axis in axes:
        if axis.axis != "pipeline":
            continue
        idle, time = pipeline_wait(axis.rows), float(axis.rows["dur"].sum())
        rest = max(1.0, a.span_ns - idle)
        shares = [
            sum((1 - part) * float(each.rows["exposed"].sum()) for each, part in parts) / rest
            for parts in (
                [(each, each.factor) for each in changes],
                [(each, each.factor_without_waits) for each in changes],
            )
        ]
        same = next((each for each in result if each.rows is axis.rows), None)
        before = (1.0, 1.0) if same is None else (same.factor, same.factor_without_waits)
        result = [each for each in result if each is not same]
        factors = [
            max(0.0, old - idle * min(1.0, share) / max(time, 1.0))
            for old, share in zip(before, shares, strict=True)
        ]
        result.append(PlacementChange(axis.rows, *factors))
    return tuple(result)


def _factors(rows: pl.DataFrame, now: float, then: float) -> tuple[float, float] | None:
    """Return time after over time now, by rates in GB/s, with the waits and without. Only the
    transfer of the bytes changes; latency stays. ``None``: bytes are not recorded."""
    saved = total = least = 0.0
    for kind, size, group, dur in rows.select(
        pl.col("collective").cast(pl.String), "bytes", "group_size", "dur"
    ).iter_rows():
        factor = bus_factor(kind, group)
        if size is None or factor is None:
            return None
        total += dur
        saved += min(dur, size * factor / now) * (1 - now / then)
        least += min(dur, size * factor / then) if then > now else size * factor / then
    if not total:
        return None
    return 1 - saved / total, min(1 - saved / total, least / total)
