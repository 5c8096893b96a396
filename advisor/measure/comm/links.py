"""Which link an axis of the mesh uses, and the bubble of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_BYTES = 1 << 10
"""Smaller messages are counters and flags, and tell nothing of an axis."""


class Machine(NamedTuple):
    """What is known of the machines beyond the trace. ``None``: unknown."""

    node_size: int | None = None
    """GPUs of a node."""
    network_gb_per_s: float | None = None
    """Of a GPU across nodes, GB/s in one direction."""
    hosts: Mapping[int, str] = {}
    """Host of each rank."""


UNKNOWN = Machine()


class Link(NamedTuple):
    """What the ranks of a group send over."""

    crosses: bool
    """Across nodes; otherwise inside of one."""
    name: str | None
    """``NVLink 4``; of a network none is recorded."""
    gb_per_s: float | None
    """In one direction, by the datasheet or as given; ``None``: unknown."""


def find_node_size(a: Analysis, machine: Machine) -> int | None:
    """GPUs of a node: as given, else ranks of the hosts, else the devices that the trace lists,
    where they are several. ``None``: unknown, for a process may see one of many GPUs."""
    if machine.node_size:
        return machine.node_size
    if machine.hosts:
        counts = Counter(Counter(machine.hosts.values()).values())
        size = counts.most_common(1)[0][0]
        return size if size > 1 or len(machine.hosts) > 1 else None
    devices = len(a.trace.meta.devices)
    return devices if devices > 1 else None


def find_link(a: Analysis, ranks: Sequence[int], size: int | None, machine: Machine) -> Link | None:
    """The link of a group; ``None``: unknown which of its ranks share a node. Ranks are numbered
    node by node, as torchrun does, where their hosts are not known."""
    crosses = _crosses(a, ranks, size, machine)
    if crosses is None:
        return None
    if crosses:
        return Link(True, None, machine.network_gb_per_s)
    link = None if a.hardware is None else a.hardware.link
    return Link(False, None, None) if link is None else Link(False, link.name, link.gb_per_s)


def _crosses(a: Analysis, ranks: Sequence[int], size: int | None, machine: Machine) -> bool | None:
    if len(ranks) > 1 and all(rank in machine.hosts for rank in ranks):
        return len({machine.hosts[rank] for rank in ranks}) > 1
    node = find_node_size(a, machine)
    if node is None:
        return None
    if len(ranks) > 1:
        return len({rank // node for rank in ranks}) > 1
    return True if size is not None and size > node else None


def count_slots(rows: pl.DataFrame) -> int | None:
    """Passes of a pipeline step through this rank's stages: micro-batches times stages of the rank.
    Those are the sends of the most frequent size to one rank (or from one) in a step; ``None``: the
    sends' ends are not recorded."""
    known = rows.filter(pl.col("peer").is_not_null(), pl.col("bytes") >= MIN_BYTES)
    if known.is_empty():
        return None
    counts = known.group_by("step", "sends", "peer", "bytes").len()
    by_step = counts.group_by("step").agg(pl.col("len").max())["len"]
    return int(np.median(by_step.to_numpy()))


def bubble_share(stages: int, slots: int) -> float:
    """Share of the pipeline's time in which a stage has nothing to do: (p - 1) / (m v + p - 1) with
    p stages, m micro-batches and v stages of a rank (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2). ``slots``: m v."""
    return (stages - 1) / (slots + stages - 1)
