"""The axes of the device mesh: the kind of parallelism that each collective belongs to.

A process group's description names its axis where the framework gives one: DeviceMesh (``mesh_tp``,
``dp_shard_cp``), Megatron (``TENSOR_MODEL_PARALLEL_GROUP``), FSDP. Otherwise the traffic does:

============== =================================================================================
data           all-reduces in the backward pass or after it
sharded data   all-gathers, with reduce-scatters in the backward pass alone; without any,
               all-gathers in both passes (FSDP, ZeRO)
tensor         all-reduces in the forward pass, or all-gathers and reduce-scatters in it; in
               inference any of them
pipeline       sends to a rank that this one also receives from; in inference any
context        sends around a ring: to one rank, from another
all-to-all     of experts or of embeddings; the traffic alone does not tell which
============== ================================================================================="""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.layers import MeshAxis
from advisor.measure.comm.links import (
    MIN_MESSAGE_BYTES,
    NodeLinks,
    bubble_share,
    count_slots,
    find_link,
    find_node_links,
    group_ranks,
)
from advisor.measure.comm.messages import bus_factor
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import ENGINE_NODE

if TYPE_CHECKING:
    from advisor.measure import Analysis

AXES: Final = (
    "data", "sharded data", "tensor", "pipeline", "context", "expert", "all-to-all", "unknown",
)  # fmt: skip
MIN_RATE_BYTES: Final = 1 << 20
"""Minimum size of messages that fill a link, bytes (nccl-tests reach their plateau near 1 MiB)."""
_MIN_FORWARD_SHARE: Final = 0.25
"""Minimum share of a group's bytes in the forward pass at which it counts as used there."""
_AXIS_WORDS: Final = {
    "tensor": {"tp", "tensor"},
    "pipeline": {"pp", "pipe", "pipeline"},
    "expert": {"ep", "expert", "experts", "moe"},
    "context": {"cp", "context", "ring"},
    "data": {"dp", "ddp", "data", "replicate", "shard", "fsdp", "hsdp", "zero"},
}
_SHARDED_WORDS: Final = {"shard", "fsdp", "zero"}
_SCHEMA: Final[dict[str, Any]] = {"axis": pl.Enum(AXES), "axis_named": pl.Boolean}


def find_axes(a: Analysis, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return ``axis`` (one of AXES) and ``axis_named`` (whether the group's description names it)
    of each row of ``comms.list_collectives``."""
    if collectives.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    table = collectives.select(
        pl.col("collective").cast(pl.String),
        "group", "description", "source", "target", weight=pl.col("bytes").fill_null(0),
        forward=_in_forward(a, collectives),
    )  # fmt: skip
    family = pl.col("collective").replace({"reduce_scatter": "all_gather"})
    keys = ["group", "description", "family"]
    table = table.with_columns(family=family)
    axes: dict[tuple[Any, ...], tuple[str, bool]] = {}
    for key, rows in table.group_by(keys):
        named_axis = read_description(key[1])
        inferred = _infer_axis(str(key[2]), rows, a.trace.meta.rank)
        if named_axis == "data" and inferred == "sharded data":
            named_axis = inferred
        axes[key] = (named_axis or inferred, named_axis is not None)
    rows_of_axes = [axes[key] for key in table.select(keys).iter_rows()]  # one look-up per row
    return pl.DataFrame(rows_of_axes, schema=_SCHEMA, orient="row")


def read_description(text: str | None) -> str | None:
    """Return the axis that a group's description names, or None if it names none or several."""
    words = set(re.findall(r"[a-z]+", (text or "").lower()))
    axes = {axis for axis, axis_words in _AXIS_WORDS.items() if words & axis_words}
    if len(axes) > 1:  # data of experts counts as data; dp_shard_cp shards over both
        axes -= {"expert"}
    if axes == {"data", "context"}:
        axes = {"data"}
    if len(axes) != 1:
        return None
    (axis,) = axes
    return "sharded data" if axis == "data" and words & _SHARDED_WORDS else axis


def _infer_axis(family: str, rows: pl.DataFrame, rank: int | None) -> str:
    """Infer the axis of a group from its collectives of one family."""
    if family == "all_to_all":
        return "all-to-all"
    if family == "send_recv":
        this_rank = pl.lit(rank, dtype=pl.Int64)
        to = set(rows.filter(pl.col("source") == this_rank)["target"].drop_nulls())
        senders = set(rows.filter(pl.col("target") == this_rank)["source"].drop_nulls())
        is_ring = to and senders and not to & senders and rows["forward"].null_count() == 0
        return "context" if is_ring and not rows["forward"].all() else "pipeline"
    large = rows.filter(pl.col("weight") >= MIN_MESSAGE_BYTES)
    if large.is_empty() or large["forward"].null_count():
        return "unknown"
    if family == "all_reduce":
        return "tensor" if _forward_share(large) >= _MIN_FORWARD_SHARE else "data"
    if family != "all_gather":
        return "unknown"
    scatters = large.filter(pl.col("collective") == "reduce_scatter")
    if scatters.height:
        return "tensor" if _forward_share(scatters) >= _MIN_FORWARD_SHARE else "sharded data"
    forward = _forward_share(large)
    if forward == 1:
        return "tensor"
    return "sharded data" if forward >= _MIN_FORWARD_SHARE else "unknown"


def _sum_values(values: pl.Series) -> int:
    return int(values.to_numpy().sum())


def _forward_share(rows: pl.DataFrame) -> float:
    sent = _sum_values(rows["weight"])
    return _sum_values(rows.filter("forward")["weight"]) / sent if sent else 0.0


def forward_passes(a: Analysis) -> NDArray[np.int64]:
    """Return the time of the first launch of device work in each forward pass of the used steps,
    ns. Several per step with gradient accumulation. Empty if the backward pass was not recorded."""
    gpu = a.trace.gpu.select("launch").with_row_index("gpu").filter(pl.Series(a.in_window))
    gpu = gpu.with_columns(launch_ts=a.trace.cpu["ts"].gather(gpu["launch"]), ts=0)
    gpu = gpu.drop_nulls("launch_ts").sort("launch_ts")
    if gpu.is_empty() or (forward := _in_forward(a, gpu)).null_count():
        return np.zeros(0, dtype=np.int64)
    flags = forward.to_numpy()
    is_first = flags & ~np.concatenate([[False], flags[:-1]])
    return np.asarray(gpu["launch_ts"].to_numpy()[is_first], dtype=np.int64)


def count_passes(a: Analysis) -> int:
    """Count forward passes per step (median), or return 1 if the backward pass was not recorded."""
    ends = a.steps.used["end"].to_numpy()
    step = np.searchsorted(ends, forward_passes(a), side="right")
    return max(1, int(np.median(np.unique(step, return_counts=True)[1]))) if len(step) else 1


def _in_forward(a: Analysis, collectives: pl.DataFrame) -> pl.Series:
    """Return whether each row was launched before the backward pass of its step: outside autograd's
    nodes and their threads, with a node after it in the step. In inference all were. Null if the
    backward pass was not recorded."""
    cpu = a.trace.cpu
    nodes = cpu.filter(name_matches(cpu["name"], ENGINE_NODE))
    if nodes.is_empty():
        forward = True if a.forward_only else None
        return pl.Series([forward] * collectives.height, dtype=pl.Boolean)
    if a.device_id is None:
        launch = collectives["op"]
    else:
        launch = a.trace.gpu["launch"].gather(collectives["gpu"])
    ts_at = collectives["launch_ts"].fill_null(collectives["ts"]).to_numpy()
    thread = cpu["thread"].gather(launch)
    backward_threads = _find_backward_threads(a, nodes)
    ts = np.sort(nodes["ts"].to_numpy())
    next_node = np.searchsorted(ts, ts_at, side="right")
    has_next = next_node < len(ts)
    next_ts = ts[np.minimum(next_node, len(ts) - 1)]
    ends = a.steps.table["end"].to_numpy()
    step_end = np.append(ends, np.iinfo(np.int64).max)[np.searchsorted(ends, ts_at, side="right")]
    is_before = has_next & (next_ts < step_end) & ~_is_inside_node(nodes, thread, ts_at)
    return pl.Series(is_before) & ~thread.is_in(backward_threads).fill_null(False)


def _find_backward_threads(a: Analysis, nodes: pl.DataFrame) -> list[int]:
    """List threads that run only the backward pass: autograd's threads."""
    main = a.trace.main_thread
    return [thread for thread in nodes["thread"].unique().to_list() if thread != main]


def _is_inside_node(
    nodes: pl.DataFrame, thread: pl.Series, instants: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether each instant is inside one of autograd's nodes on its thread."""
    result = np.zeros(len(instants), dtype=np.bool_)
    for thread_id in thread.drop_nulls().unique():
        thread_nodes = nodes.filter(pl.col("thread") == thread_id).sort("ts")
        if thread_nodes.is_empty():
            continue
        ts = thread_nodes["ts"].to_numpy()
        end = np.maximum.accumulate(ts + thread_nodes["dur"].to_numpy())
        index = np.searchsorted(ts, instants, side="right") - 1
        on_thread = (thread == thread_id).fill_null(False).to_numpy()
        result |= on_thread & (index >= 0) & (instants < end[np.maximum(index, 0)])
    return result


def report_mesh(
    a: Analysis, node_links: NodeLinks | None = None, waits: pl.DataFrame | None = None
) -> list[MeshAxis]:
    """Summarise each axis and the ranks that communicate along it, the most exposed first.
    ``waits`` comes from ``ranks.join.collective_waits``, if other ranks' traces are available."""
    table = a.collectives
    if table.is_empty():
        return []
    node_links = find_node_links(a, node_links)
    result = []
    keys = ["axis", "group_size", "ranks"]
    for (axis, size, ranks), rows in table.group_by(keys, maintain_order=True):
        axis = cast(Any, axis)
        result.append(_report_axis(a, axis, size, group_ranks(ranks), rows, node_links, waits))
    return sorted(result, key=lambda mesh_axis: (-mesh_axis.exposed_ns, -mesh_axis.ns))


def _report_axis(
    a: Analysis,
    axis: Any,
    size: int | None,
    members: list[int],
    rows: pl.DataFrame,
    node_links: NodeLinks,
    waits: pl.DataFrame | None,
) -> MeshAxis:
    steps = a.step_count
    large = rows.filter(pl.col("bus_gbps").is_not_null() & (pl.col("bytes") >= MIN_RATE_BYTES))
    kinds = rows["collective"].cast(pl.String).value_counts(sort=True)
    rate = large["bus_gbps"].quantile(0.9) if large.height else None
    waiting_ns = waited_here_ns = None
    axis_waits = _select_waits(rows, waits)
    if axis_waits is not None:
        waited_here_ns = (
            float(axis_waits["wait"].sum()) / max(1, axis_waits["step"].n_unique()) or None
        )
        if axis_waits["complete"].all():
            waiting_ns, waited_here_ns = waited_here_ns or 0.0, None
            rate = _measure_transfer_rate(axis_waits) or rate
    link = find_link(a, members, size, node_links)
    slots = count_micro_batches(a, rows) if axis == "pipeline" else None
    exposed = _sum_values(rows["exposed"]) / steps
    return MeshAxis(
        axis=axis,
        named=bool(rows["axis_named"].all()),
        size=size,
        ranks=members,
        collectives=dict(kinds.iter_rows()),
        calls=rows.height / steps,
        bytes=_sum_values(rows["bytes"]) / steps if rows["bytes"].null_count() == 0 else None,
        ns=_sum_values(rows["dur"]) / steps,
        exposed_ns=exposed,
        waiting_ns=waiting_ns,
        waited_here_ns=waited_here_ns,
        bus_gb_per_s=rate,
        link=None if link is None else "network" if link.crosses else "node",
        link_name=None if link is None else link.name,
        link_gb_per_s=None if link is None else link.gb_per_s,
        micro_batches=slots,
        bubble=bubble_share(size, slots) if slots and size else None,
        idle_ns=pipeline_wait(rows) / steps if axis == "pipeline" else None,
    )


def _select_waits(rows: pl.DataFrame, waits: pl.DataFrame | None) -> pl.DataFrame | None:
    """Return the waits of an axis for the ranks with a trace, or ``None`` if not measured."""
    if waits is None or waits.is_empty():
        return None
    names = rows.select(
        pl.col("collective").cast(pl.String), pl.col("group").fill_null("").str.slice(0, 80)
    ).unique()
    selected = waits.join(names, on=["collective", "group"], how="semi")
    return selected if selected.height else None


def _measure_transfer_rate(waits: pl.DataFrame) -> float | None:
    """Return the median bus bandwidth of large messages once the last rank has arrived, GB/s."""
    rates = [
        size * factor / ns
        for kind, size, group, ns in waits.filter(
            pl.col("bytes") >= MIN_RATE_BYTES, pl.col("transfer") > 0
        )
        .select("collective", "bytes", "size", "transfer")
        .iter_rows()
        if (factor := bus_factor(kind, group)) is not None
    ]
    return float(np.median(rates)) if rates else None


def count_micro_batches(a: Analysis, rows: pl.DataFrame) -> int | None:
    """Count the micro-batches of a pipeline axis (``rows``) by ``links.count_slots``."""
    return count_slots(_add_peers(a, rows))


def _add_peers(a: Analysis, rows: pl.DataFrame) -> pl.DataFrame:
    """Add ``peer``, the other end of a send or receive, and ``sends`` (this rank is the source)."""
    this_rank = pl.lit(a.trace.meta.rank, dtype=pl.Int64)
    sends = (pl.col("source") == this_rank).fill_null(value=False)
    return rows.with_columns(sends=sends, peer=pl.when(sends).then("target").otherwise("source"))


def pipeline_wait(rows: pl.DataFrame) -> float:
    """Sum the exposed time of sends and receives beyond the shortest of each size, ns. It contains
    a pipeline's bubble, and other waits too."""
    shortest = pl.col("dur").min().over("bytes")
    excess = rows.select(pl.min_horizontal("exposed", pl.col("dur") - shortest))
    return float(excess.to_series().sum())
