"""The axes of the device mesh: which part of the parallelism each collective belongs to.

A process group's description names its axis where the framework gives one: DeviceMesh
(``mesh_tp``, ``dp_shard_cp``), Megatron (``TENSOR_MODEL_PARALLEL_GROUP``), FSDP. Otherwise the
traffic does:

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
    MIN_BYTES,
    NodeLinks,
    bubble_share,
    count_slots,
    find_link,
    group_ranks,
    machine_of,
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
"""Size from which messages fill a link, bytes (nccl-tests reach their plateau near 1 MiB)."""
MIN_FORWARD_SHARE: Final = 0.25
"""Share of its bytes in the forward pass from which a group counts as used there."""
_WORDS: Final = {
    "tensor": {"tp", "tensor"},
    "pipeline": {"pp", "pipe", "pipeline"},
    "expert": {"ep", "expert", "experts", "moe"},
    "context": {"cp", "context", "ring"},
    "data": {"dp", "ddp", "data", "replicate", "shard", "fsdp", "hsdp", "zero"},
}
_SHARDED: Final = {"shard", "fsdp", "zero"}
_SCHEMA: Final[dict[str, Any]] = {"axis": pl.Enum(AXES), "axis_named": pl.Boolean}


def find_axes(a: Analysis, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return ``axis`` (one of AXES) and ``axis_named`` (its group's description says so) of each
    row of ``comms.list_collectives``."""
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
        named = read_description(key[1])
        carried = _of_traffic(str(key[2]), rows, a.trace.meta.rank)
        if named == "data" and carried == "sharded data":
            named = carried
        axes[key] = (named or carried, named is not None)
    found = [axes[key] for key in table.select(keys).iter_rows()]  # a look-up each
    return pl.DataFrame(found, schema=_SCHEMA, orient="row")


def read_description(text: str | None) -> str | None:
    """Return the axis that a process group's description names; None: none, or several."""
    words = set(re.findall(r"[a-z]+", (text or "").lower()))
    named = {axis for axis, known in _WORDS.items() if words & known}
    if len(named) > 1:  # data of experts is data; dp_shard_cp shards over both
        named -= {"expert"}
    if named == {"data", "context"}:
        named = {"data"}
    if len(named) != 1:
        return None
    (axis,) = named
    return "sharded data" if axis == "data" and words & _SHARDED else axis


def _of_traffic(family: str, rows: pl.DataFrame, rank: int | None) -> str:
    """Infer the axis of a group from its collectives of one family."""
    if family == "all_to_all":
        return "all-to-all"
    if family == "send_recv":
        own = pl.lit(rank, dtype=pl.Int64)
        to = set(rows.filter(pl.col("source") == own)["target"].drop_nulls())
        came = set(rows.filter(pl.col("target") == own)["source"].drop_nulls())
        is_ring = to and came and not to & came and rows["forward"].null_count() == 0
        return "context" if is_ring and not rows["forward"].all() else "pipeline"
    large = rows.filter(pl.col("weight") >= MIN_BYTES)
    if large.is_empty() or large["forward"].null_count():
        return "unknown"
    if family == "all_reduce":
        return "tensor" if _forward_share(large) >= MIN_FORWARD_SHARE else "data"
    if family != "all_gather":
        return "unknown"
    scatters = large.filter(pl.col("collective") == "reduce_scatter")
    if scatters.height:
        return "tensor" if _forward_share(scatters) >= MIN_FORWARD_SHARE else "sharded data"
    forward = _forward_share(large)
    if forward == 1:
        return "tensor"
    return "sharded data" if forward >= MIN_FORWARD_SHARE else "unknown"


def _sum(values: pl.Series) -> int:
    return int(values.to_numpy().sum())


def _forward_share(rows: pl.DataFrame) -> float:
    sent = _sum(rows["weight"])
    return _sum(rows.filter("forward")["weight"]) / sent if sent else 0.0


def forward_passes(a: Analysis) -> NDArray[np.int64]:
    """Return the time of the first launch of device work in each forward pass of the used steps,
    ns. With gradient accumulation a step has several. Empty: the backward pass was not recorded."""
    gpu = a.trace.gpu.select("launch").with_row_index("gpu").filter(pl.Series(a.in_window))
    gpu = gpu.with_columns(launch_ts=a.trace.cpu["ts"].gather(gpu["launch"]), ts=0)
    gpu = gpu.drop_nulls("launch_ts").sort("launch_ts")
    if gpu.is_empty() or (forward := _in_forward(a, gpu)).null_count():
        return np.zeros(0, dtype=np.int64)
    flags = forward.to_numpy()
    begins = flags & ~np.concatenate([[False], flags[:-1]])
    return np.asarray(gpu["launch_ts"].to_numpy()[begins], dtype=np.int64)


def count_passes(a: Analysis) -> int:
    """Count forward passes per step (median); 1 where the backward pass was not recorded."""
    ends = a.steps.used["end"].to_numpy()
    step = np.searchsorted(ends, forward_passes(a), side="right")
    return max(1, int(np.median(np.unique(step, return_counts=True)[1]))) if len(step) else 1


def _in_forward(a: Analysis, collectives: pl.DataFrame) -> pl.Series:
    """Return whether each was launched before the backward pass of its step: outside of autograd's
    nodes and the threads that run them, with such a node after it. In inference all were. Null: the
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
    at = collectives["launch_ts"].fill_null(collectives["ts"]).to_numpy()
    thread = cpu["thread"].gather(launch)
    own = _drives(a, nodes)
    ts = np.sort(nodes["ts"].to_numpy())
    following = np.searchsorted(ts, at, side="right")
    has_next = following < len(ts)
    next_ts = ts[np.minimum(following, len(ts) - 1)]
    ends = a.steps.table["end"].to_numpy()
    step_end = np.append(ends, np.iinfo(np.int64).max)[np.searchsorted(ends, at, side="right")]
    before = has_next & (next_ts < step_end) & ~_inside(nodes, thread, at)
    return pl.Series(before) & ~thread.is_in(own).fill_null(False)


def _drives(a: Analysis, nodes: pl.DataFrame) -> list[int]:
    """List threads that run the backward pass and nothing of the forward one: autograd's."""
    main = a.trace.main_thread
    return [each for each in nodes["thread"].unique().to_list() if each != main]


def _inside(nodes: pl.DataFrame, thread: pl.Series, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each instant of a thread lies in one of autograd's nodes there."""
    result = np.zeros(len(at), dtype=np.bool_)
    for each in thread.drop_nulls().unique():
        own = nodes.filter(pl.col("thread") == each).sort("ts")
        if own.is_empty():
            continue
        ts = own["ts"].to_numpy()
        end = np.maximum.accumulate(ts + own["dur"].to_numpy())
        place = np.searchsorted(ts, at, side="right") - 1
        on_thread = (thread == each).fill_null(False).to_numpy()
        result |= on_thread & (place >= 0) & (at < end[np.maximum(place, 0)])
    return result


def report_mesh(
    a: Analysis, machine: NodeLinks | None = None, waits: pl.DataFrame | None = None
) -> list[MeshAxis]:
    """Summarise each axis and the ranks that communicate along it, the most exposed first.
    ``waits``: from ``ranks.join.collective_waits``, if other ranks' traces are available."""
    table = a.collectives
    if table.is_empty():
        return []
    machine = machine_of(a, machine)
    result = []
    keys = ["axis", "group_size", "ranks"]
    for (axis, size, ranks), rows in table.group_by(keys, maintain_order=True):
        axis = cast(Any, axis)
        result.append(_report_axis(a, axis, size, group_ranks(ranks), rows, machine, waits))
    return sorted(result, key=lambda each: (-each.exposed_ns, -each.ns))


def _report_axis(
    a: Analysis,
    axis: Any,
    size: int | None,
    members: list[int],
    rows: pl.DataFrame,
    machine: NodeLinks,
    waits: pl.DataFrame | None,
) -> MeshAxis:
    steps = a.step_count
    large = rows.filter(pl.col("bus_gbps").is_not_null() & (pl.col("bytes") >= MIN_RATE_BYTES))
    kinds = rows["collective"].cast(pl.String).value_counts(sort=True)
    rate = large["bus_gbps"].quantile(0.9) if large.height else None
    waiting = waited_here = None
    own = _own_waits(rows, waits)
    if own is not None:
        waited_here = float(own["wait"].sum()) / max(1, own["step"].n_unique()) or None
        if own["complete"].all():
            waiting, waited_here = waited_here or 0.0, None
            rate = _transfer_rate(own) or rate
    link = find_link(a, members, size, machine)
    slots = count_micro_batches(a, rows) if axis == "pipeline" else None
    exposed = _sum(rows["exposed"]) / steps
    return MeshAxis(
        axis=axis,
        named=bool(rows["axis_named"].all()),
        size=size,
        ranks=members,
        collectives=dict(kinds.iter_rows()),
        calls=rows.height / steps,
        bytes=_sum(rows["bytes"]) / steps if rows["bytes"].null_count() == 0 else None,
        ns=_sum(rows["dur"]) / steps,
        exposed_ns=exposed,
        waiting_ns=waiting,
        waited_here_ns=waited_here,
        bus_gb_per_s=rate,
        link=None if link is None else "network" if link.crosses else "node",
        link_name=None if link is None else link.name,
        link_gb_per_s=None if link is None else link.gb_per_s,
        micro_batches=slots,
        bubble=bubble_share(size, slots) if slots and size else None,
        idle_ns=pipeline_wait(rows) / steps if axis == "pipeline" else None,
    )


def _own_waits(rows: pl.DataFrame, waits: pl.DataFrame | None) -> pl.DataFrame | None:
    """Return the waits of an axis for the ranks with a trace here; ``None``: not measured."""
    if waits is None or waits.is_empty():
        return None
    names = rows.select(
        pl.col("collective").cast(pl.String), pl.col("group").fill_null("").str.slice(0, 80)
    ).unique()
    own = waits.join(names, on=["collective", "group"], how="semi")
    return own if own.height else None


def _transfer_rate(own: pl.DataFrame) -> float | None:
    """Return the median bus bandwidth of large messages once the last rank has arrived, GB/s."""
    rates = [
        size * factor / ns
        for kind, size, group, ns in own.filter(
            pl.col("bytes") >= MIN_RATE_BYTES, pl.col("transfer") > 0
        )
        .select("collective", "bytes", "size", "transfer")
        .iter_rows()
        if (factor := bus_factor(kind, group)) is not None
    ]
    return float(np.median(rates)) if rates else None


def count_micro_batches(a: Analysis, rows: pl.DataFrame) -> int | None:
    """Count the micro-batches of ``rows``, those of a pipeline's axis, by ``links.count_slots``."""
    return count_slots(_with_peers(a, rows))


def _with_peers(a: Analysis, rows: pl.DataFrame) -> pl.DataFrame:
    """Add ``peer``, the other end of a send or receive, and ``sends``: this rank is the source."""
    own = pl.lit(a.trace.meta.rank, dtype=pl.Int64)
    sends = (pl.col("source") == own).fill_null(value=False)
    return rows.with_columns(sends=sends, peer=pl.when(sends).then("target").otherwise("source"))


def pipeline_wait(rows: pl.DataFrame) -> float:
    """Sum the exposed time of sends and receives beyond the shortest of each size, ns: a pipeline's
    bubble is spent in them. Other waits are in it too."""
    shortest = pl.col("dur").min().over("bytes")
    beyond = rows.select(pl.min_horizontal("exposed", pl.col("dur") - shortest))
    return float(beyond.to_series().sum())
