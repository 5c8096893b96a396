"""Links that the axes of the mesh use, their rates, and the bubble of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import numpy as np
import polars as pl

from advisor.core.finding import Select

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_MESSAGE_BYTES = 1 << 10
"""Minimum size of messages that count, bytes: smaller ones are counters and flags."""


class NodeLinks(NamedTuple):
    """Nodes and network of the job that the trace does not show. ``None`` if unknown."""

    node_size: int | None = None
    """GPUs of a node."""
    network_gb_per_s: float | None = None
    """Network rate of one GPU across nodes, GB/s in one direction."""
    hosts: Mapping[int, str] = {}
    """Host of each rank."""


UNKNOWN_LINKS = NodeLinks()


class AxisLink(NamedTuple):
    """Link that connects the ranks of a group."""

    crosses: bool
    """Whether the link is between nodes and not inside a node."""
    name: str | None
    """Name such as ``NVLink 4``, or ``None`` for a network, whose name is not recorded."""
    gb_per_s: float | None
    """Rate in one direction, from the datasheet or the user, GB/s, or ``None`` if unknown."""


def find_node_size(a: Analysis, node_links: NodeLinks) -> int | None:
    """Return the GPUs of a node: as given, else the ranks per host, else the number of devices in
    the trace if there are several. ``None`` if unknown: a process may see one of many GPUs."""
    if node_links.node_size:
        return node_links.node_size
    if node_links.hosts and len(node_links.hosts) >= (a.trace.meta.world_size or 2):
        counts = Counter(Counter(node_links.hosts.values()).values())
        return counts.most_common(1)[0][0]
    devices = len(a.trace.meta.devices)
    return devices if devices > 1 else None


def find_link(
    a: Analysis, ranks: Sequence[int], size: int | None, node_links: NodeLinks
) -> AxisLink | None:
    """Find the link of a group, or return ``None`` if it is unknown which ranks share a node. If
    hosts are unknown, ranks are assumed to be numbered node by node, as by torchrun."""
    crosses = _crosses_nodes(a, ranks, size, node_links)
    if crosses is None:
        return None
    if crosses:
        return AxisLink(True, None, node_links.network_gb_per_s)
    link = None if a.hardware is None else a.hardware.link
    return (
        AxisLink(False, None, None) if link is None else AxisLink(False, link.name, link.gb_per_s)
    )


def _crosses_nodes(
    a: Analysis, ranks: Sequence[int], size: int | None, node_links: NodeLinks
) -> bool | None:
    if len(ranks) > 1 and all(rank in node_links.hosts for rank in ranks):
        return len({node_links.hosts[rank] for rank in ranks}) > 1
    node = find_node_size(a, node_links)
    if node is None:
        return None
    if len(ranks) > 1:
        return len({rank // node for rank in ranks}) > 1
    return True if size is not None and size > node else None


def count_slots(rows: pl.DataFrame) -> int | None:
    """Count the passes of a pipeline step through this rank's stages (micro-batches times stages),
    by the sends of the most frequent size to (or from) one rank in a step. ``None`` if the ends of
    the sends are not recorded."""
    sends = rows.filter(pl.col("peer").is_not_null(), pl.col("bytes") >= MIN_MESSAGE_BYTES)
    if sends.is_empty():
        return None
    counts = sends.group_by("step", "sends", "peer", "bytes").len()
    by_step = counts.group_by("step").agg(pl.col("len").max())["len"]
    return int(np.median(by_step.to_numpy()))


def bubble_share(stages: int, slots: int) -> float:
    """Return the share of the pipeline's time in which a stage is idle: (p - 1) / (m v + p - 1)
    with p stages, m micro-batches and v stages per rank (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2). ``slots`` is m v."""
    return (stages - 1) / (slots + stages - 1)


BASE_NS = (6_600.0, 14_000.0, 8_400.0)
NODE_HOP_NS = (600.0, 1_900.0, 3_400.0)
NETWORK_HOP_NS = (2_700.0, 4_000.0, 14_000.0)
"""Latency of a ring by protocol (LL, LL128, Simple): NCCL, src/graph/tuning.cc."""
SIMPLE = 2
"""Index of the protocol with the longest latency over a network."""


def ring_latency(kind: str, size: int, local: int, protocol: int) -> float:
    """Estimate the latency of a collective of ``size`` ranks, ``local`` of them on a node, ns: a
    base plus a hop for each step from rank to rank. ``protocol`` is the index in ``BASE_NS``."""
    hops = 1 if kind == "send_recv" else (2 if kind == "all_reduce" else 1) * (size - 1)
    nodes = 0 if local >= size else max(1, hops // max(1, local))
    node_ns = (hops - nodes) * NODE_HOP_NS[protocol]
    return BASE_NS[protocol] + node_ns + nodes * NETWORK_HOP_NS[protocol]


ATTAINED_SHARE = 0.8
"""Share of a link's rate that NCCL attains: 370 of 450 GB/s over NVLink 4, by a maintainer of NCCL
(https://github.com/NVIDIA/nccl-tests/issues/212)."""
MAX_SELECTED_IDS = 500
LARGE_MESSAGE_BYTES = 16 << 20
"""Minimum size of messages that fill any link, bytes (nccl-tests)."""


def count_local(ranks: Sequence[int], node_links: NodeLinks) -> int:
    """Count a group's ranks on the node with the most, whose adapters carry its ring together."""
    if ranks and all(rank in node_links.hosts for rank in ranks):
        return max(Counter(node_links.hosts[rank] for rank in ranks).values())
    counts = Counter(rank // node_links.node_size for rank in ranks) if node_links.node_size else {}
    return max(counts.values(), default=1)


def select_collectives(a: Analysis, rows: pl.DataFrame) -> tuple[Select, float]:
    """Return an edit's selection of these rows of ``Analysis.collectives``, and their share of the
    selected time. Rows are selected one by one, or by their streams if there are too many."""
    gpu = a.trace.gpu
    ids = gpu["correlation"].gather(rows["gpu"]).drop_nulls().unique().sort()
    if len(ids) <= MAX_SELECTED_IDS:
        return Select(on="gpu", family=("communication",), correlation=tuple(ids)), 1.0
    streams = rows["stream"].unique().sort()
    covered = a.collectives.filter(pl.col("stream").is_in(streams.implode()))
    share = float(rows["dur"].sum()) / max(1, int(covered["dur"].sum()))
    return Select(on="gpu", family=("communication",), stream=tuple(streams)), share


class ScaledCollectives(NamedTuple):
    """Collectives that a faster link would shorten."""

    select: Select
    measured: float
    """Maximum bus bandwidth of these collectives, GB/s: waits lower the others."""
    attainable: float
    """Bus bandwidth that NCCL attains on the link, GB/s."""
    factor: float
    """Estimated over present time, if the transfers attain that bandwidth and waits stay."""
    calls: int
    agreement: float
    """Tenth percentile over the maximum of the bandwidths: near 1 the link limits, else waits."""


def find_node_links(a: Analysis, links: NodeLinks | None = None) -> NodeLinks:
    """Return the links as given, with unknown values from NCCL's log and the topology."""
    links = links or a.node_links
    log = a.trace.meta.network
    if log is None:
        return links
    size = links.node_size or log.node_ranks or log.gpus or None
    rate = log.nic_gb_per_s / size if log.nic_gb_per_s and size else None
    return links._replace(node_size=size, network_gb_per_s=links.network_gb_per_s or rate)


def group_ranks(ranks: str | None) -> list[int]:
    """Return the group's members, empty if not recorded or cut off."""
    try:
        members = msgspec.json.decode(ranks or "[]", type=list[int])
    except (msgspec.DecodeError, RecursionError):
        return []
    return members


def scale_collectives(a: Analysis, *, across: bool) -> ScaledCollectives | None:
    """Measure the present and attainable bus bandwidth of large collectives across nodes, or inside
    a node. ``None`` if there are none, no rate of their link is known, or they attain it."""
    if a.device_id is None:
        return None
    table = a.collectives.filter(
        pl.col("bus_gbps").is_not_null() & (pl.col("bytes") >= LARGE_MESSAGE_BYTES)
    )
    node_links = find_node_links(a)
    rows, rate = [], 0.0
    for (ranks, size), group_rows in table.group_by("ranks", "group_size", maintain_order=True):
        members = group_ranks(cast(str | None, ranks))
        link = find_link(a, members, cast(int | None, size), node_links)
        if link is not None and link.crosses == across and link.gb_per_s:
            rows.append(group_rows)
            rate = link.gb_per_s * (count_local(members, node_links) if across else 1)
    if not rows:
        return None
    group_rows = pl.concat(rows)
    max_rate = cast(float, group_rows["bus_gbps"].max())
    if max_rate >= ATTAINED_SHARE * rate:
        return None
    select, selected_share = select_collectives(a, group_rows)
    transferred = float((group_rows["bus_gbps"] * group_rows["dur"]).sum())
    saved = transferred * (1 / max_rate - 1 / (ATTAINED_SHARE * rate))
    slow_rate = cast(float, group_rows["bus_gbps"].quantile(0.1))
    factor = 1 - selected_share * saved / float(group_rows["dur"].sum())
    return ScaledCollectives(
        select, max_rate, ATTAINED_SHARE * rate, factor, group_rows.height, slow_rate / max_rate
    )
