"""Reader of XPlane files of TensorFlow's, JAX's and PyTorch/XLA's profilers (``.xplane.pb``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.gpus import known_gpus
from advisor.core.trace import GPU_KINDS, JAX, PYTORCH, TENSORFLOW, Device, Trace, TraceMeta
from advisor.read.build import build_trace
from advisor.read.protobuf import PADDING, MalformedMessage, varint
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool
from advisor.read.source import ByteSource
from advisor.read.trace_events import copy_parts

if TYPE_CHECKING:
    from advisor.read.formats.xplane.host_events import XlaHost
    from advisor.read.formats.xplane.xspace import Events, Plane, XLine, XSpace

MAX_BYTES = 2 << 30
"""Largest file, bytes: no message of Protocol Buffers is longer."""

_GPU = re.compile(r"^/device:GPU:(\d+)")
_TPU = re.compile(r"^/device:TPU:|^#?Chip|^/device:CUSTOM:")
_STREAM = re.compile(r"(?i)^stream\s*#?\s*(\d+)")
_PLANE_NAME = re.compile(rb"^(?:/\w+(?::|$)|Task Environment$|#Chip)")
_STATS = frozenset(
    """
        correlation_id cuda_graph_id hlo_module hlo_op kernel_details memcpy_details
        memset_details""".split()
)
_ID_KEY, _NAME_KEY = 0x08, 0x12
_PROCESS = "host"
"""Name of the one process in a file. The host's name and address stay in the file."""
_DETAIL = re.compile(r"(\w+):(\S+)")


@dataclass
class Space:
    """Planes with their lines, from either file format."""

    planes: Iterable[tuple[Plane, list[XLine], Events]]
    truncated: bool = False
    undecodable_events: int = 0
    """Number of events that could not be decoded."""


_TOOLS = {
    TENSORFLOW: Tool(
        "tf.profiler.experimental.start",
        "tf.profiler.experimental.Trace around each step",
        "tf.profiler.experimental.ProfilerOptions(python_tracer_level=1)",
    ),
    JAX: Tool(
        "jax.profiler.trace",
        "jax.profiler.StepTraceAnnotation around each step",
        "jax.profiler.ProfileOptions (python_tracer_level = 1)",
    ),
    PYTORCH: Tool(
        "torch_xla.debug.profiler.trace",
        "torch_xla.debug.profiler.StepTrace around each step",
        "torch_xla.debug.profiler.Trace around the host's work",
    ),
}


class XPlaneReader(Reader):
    """Reader of an ``XSpace`` message, packed or not, without TensorFlow or protobuf."""

    name = "xplane"
    description = "a profile of TensorFlow or JAX (.xplane.pb or .trace.json.gz)"
    suffixes = (".xplane.pb",)
    tool = Tool(
        "TensorFlow's or JAX's profiler",
        "tf.profiler.experimental.Trace or jax.profiler.StepTraceAnnotation around each step",
        "python_tracer_level=1 in the profiler's options",
    )

    def find_tool(self, framework: str | None) -> Tool | None:
        return _TOOLS.get(framework or "", self.tool)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a message whose first field is a plane with a profiler's name for it."""
        return ReaderClaim.SURE if _begins_with_plane(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read host threads, the devices' streams, and the numbers that join them."""
        from advisor.read.formats.xplane.host_events import STATS
        from advisor.read.formats.xplane.xspace import XSpace

        data = bytearray()
        for block in source.blocks():
            if len(data) + len(block) > MAX_BYTES:
                source.stop("longer than 2 GB, which no XPlane file is")
                break
            data += block
            if options.progress is not None:
                options.progress(source.path, source.bytes_read)
        size = len(data)
        data += bytes(PADDING)
        space = XSpace(data, size)
        read = Space(
            planes=(
                (plane, *space.read(plane, _STATS if _GPU.match(plane.name) else STATS))
                for plane in space.planes
            ),
            truncated=space.truncated,
        )
        trace = space_to_trace(read, source)
        return replace(trace, meta=replace(trace.meta, events_dropped=_more(trace, space)))


def _begins_with_plane(head: bytes) -> bool:
    """Return whether a message begins with a plane (field 1) whose first fields are a number (1)
    and a name (2) such as ``/host:CPU``."""
    index = 0
    try:
        if head[:1] != b"\x0a":
            return False
        size, index = varint(head, 1, min(len(head), 11))
        end = min(index + size, len(head))
        for _ in range(2):
            if index < end and head[index] == _ID_KEY:
                index = varint(head, index + 1, end)[1]
        if index >= end or head[index] != _NAME_KEY:
            return False
        size, index = varint(head, index + 1, end)
    except MalformedMessage:
        return False
    return size < 200 and _PLANE_NAME.match(head[index : index + size]) is not None


def space_to_trace(space: Space, source: ByteSource) -> Trace:
    """Return the trace of a decoded space. Raises AdvisorError if nothing in it can be read."""
    from advisor.read.formats.xplane import host_events

    path = source.path
    hosts = host_events.XlaHost()
    devices: list[Device] = []
    device_rows: list[pl.DataFrame] = []
    derived: list[pl.DataFrame] = []
    tpus: list[str] = []
    vendor = None
    aside = 0
    facts: dict[str, Any] = {}
    for plane, lines, events in space.planes:
        gpu = _GPU.match(plane.name)
        if gpu is not None:
            number = min(int(gpu[1]), (1 << 31) - 1)
            devices.append(_device(number, plane))
            vendor = vendor or _vendor(plane)
            # other lines are derived from the streams' events: modules, ops, scopes
            result = [_STREAM.match(line.name) for line in lines]
            streams = np.array([-1 if item is None else int(item[1][:15]) for item in result])
            device_rows.append(_work(hosts, plane, events, number, streams))
            derived.append(_derived_steps(plane, lines, events))
        elif plane.name.startswith("/host:") and plane.name != "/host:metadata":
            host_events.read_names(hosts, plane)
            host_events.add_plane(hosts, plane, lines, events, _PROCESS)
        elif plane.name == "Task Environment":
            facts = plane.stats
        elif _TPU.match(plane.name):
            tpus.append(plane.name)
        else:
            aside += bool(plane.spans)
    device = pl.concat(device_rows) if device_rows else None
    if tpus and (device is None or not device.height):
        raise AdvisorError(
            f"{path}: a profile of a TPU ({tpus[0][:60]}): TPUs are not read, only GPUs and hosts "
            "are; XProf shows it"
        )
    steps, main = host_events.step_rows(hosts, _steps_of_busiest(device_rows, derived))
    waits = host_events.wait_rows(hosts, main)
    host = host_events.list_host_rows(hosts, steps, waits, main)
    if device is not None and device.height:
        host = _with_ops(host, device)
    memory = [frame for frame in hosts.memory if frame.height]
    dropped = _dropped(space, aside + len(tpus))
    if not host.height and (device is None or not device.height):
        if space.truncated:
            raise AdvisorError(
                f"{path}: an XPlane file that is cut off or damaged, no event can be read; copy it "
                "again"
            )
        raise AdvisorError(
            f"{path}: an XPlane file without events; was the profiler active while work was done?"
        )
    return build_trace(
        TraceMeta(
            path=path,
            framework=hosts.framework(),
            step_marks=hosts.step_marks,
            devices=tuple(devices),
            start_ns=_start(facts, host, device),
            vendor=vendor,
            events_dropped=dropped,
            truncated=source.truncated or space.truncated,
            damage=source.damage or ("cut off inside a plane" if space.truncated else None),
            bytes_read=source.bytes_read,
        ),
        host=host if host.height else None,
        device=None if device is None else device.drop("hlo"),
        memory=pl.concat(memory) if memory else None,
        thread_names=hosts.thread_names_by_id(main),
    )


def _derived_steps(plane: Plane, lines: list[XLine], events: Events) -> pl.DataFrame:
    """Return the steps that the profiler derived for a device (line ``Steps``): ``number``, ``ts``,
    ``dur``."""
    own = [index for index, line in enumerate(lines) if line.name == "Steps"]
    rows = np.flatnonzero(np.isin(events.line, own) & (events.dur > 0))
    names = [plane.names.get(code, "") for code in events.meta[rows].tolist()]
    numbered = [name.isdecimal() and len(name) < 18 for name in names]
    rows, names = rows[numbered], [name for name in names if name.isdecimal() and len(name) < 18]
    return pl.DataFrame(
        {"number": list(map(int, names)), "ts": events.ts[rows], "dur": events.dur[rows]},
        schema={"number": pl.Int64, "ts": pl.Int64, "dur": pl.Int64},
    ).sort("ts")


def _steps_of_busiest(work: list[pl.DataFrame], steps: list[pl.DataFrame]) -> pl.DataFrame | None:
    """Return the derived steps of the device with most work; ``None``: it has none."""
    pairs = [(int(rows["dur"].sum()), own) for rows, own in zip(work, steps, strict=True)]
    best = max(pairs, key=lambda pair: pair[0], default=None)
    return best[1] if best is not None and best[1].height else None


def _dropped(space: Space, others: int) -> dict[str, int]:
    """Return the number of left-out items by reason."""
    counts = {
        "not used: planes of other devices": others,
        "not decodable": space.undecodable_events,
    }
    return {reason: count for reason, count in counts.items() if count}


def _more(trace: Trace, space: XSpace) -> dict[str, int]:
    """Add what the decoder left out to the counts of dropped events."""
    counts = Counter(trace.meta.events_dropped)
    counts["without a name"] += space.nameless
    counts["not decodable"] += space.broken
    counts["beyond the most that is read of a file"] += space.left_out
    return dict(+counts)


def _start(facts: dict[str, Any], host: pl.DataFrame, device: pl.DataFrame | None) -> int:
    """Return the Unix time of the file's 0, ns. Newer profilers count from their start and record
    it; 0: times are absolute already, or it is unknown."""
    start = facts.get("profile_start_time")
    frames = [frame["ts"] for frame in (host, device) if frame is not None and frame.height]
    first = min((int(column.min()) for column in frames), default=0)  # type: ignore[arg-type]
    return start if isinstance(start, int) and 0 <= first < 10**15 < start < 1 << 62 else 0


def _device(number: int, plane: Plane) -> Device:
    """Return a GPU from its plane's stats. Its model is not in the file; it is named if the
    recorded compute capability, multiprocessors, memory and clock fit a single known one."""
    stats = plane.stats

    def whole(name: str) -> int | None:
        value = stats.get(name)
        return value if isinstance(value, int) and 0 < value < 1 << 53 else None

    major, minor = stats.get("compute_cap_major"), stats.get("compute_cap_minor")
    compute = (major, minor) if isinstance(major, int) and isinstance(minor, int) else None
    sms, memory, clock = whole("core_count"), whole("memory_size"), whole("clock_rate")
    details = stats.get("gpu_model") or stats.get("device_name")
    name = details if isinstance(details, str) else None
    fitting = [
        gpu
        for gpu in known_gpus()
        if gpu.compute == compute and gpu.sms == sms and memory is not None
        and 0.88 <= memory / gpu.memory_bytes <= 1.01
    ]  # fmt: skip
    if len(fitting) > 1 and clock is not None:  # kHz
        fitting = [
            g for g in fitting if g.boost_mhz is not None and abs(clock / 1000 - g.boost_mhz) < 3
        ]
    if name is None and len(fitting) == 1:
        name = fitting[0].names[0]
    return Device(
        id=number,
        name=name,
        memory_bytes=memory,
        sms=sms,
        compute=compute,
        max_threads_per_sm=fitting[0].max_threads_per_sm if len(fitting) == 1 else None,
    )


def _vendor(plane: Plane) -> str | None:
    details = str(plane.stats.get("device_vendor", "")).lower()
    if "amd" in details or "advanced micro" in details:
        return "amd"
    # compute capability is NVIDIA's; AMD's planes have the vendor beside it
    return "nvidia" if "nvidia" in details or "compute_cap_major" in plane.stats else None


def _work(hosts: XlaHost, plane: Plane, events: Events, device: int, streams: Any) -> pl.DataFrame:
    """Return the work of one device; ``streams``: the number of each line, -1: it is no stream."""
    if not len(events.ts):
        return pl.DataFrame(schema=_WORK_SCHEMA)
    stream = streams[events.line]
    codes, which = np.unique(events.meta, return_inverse=True)
    names = [plane.names[code] for code in codes.tolist()]
    kinds = np.array([GPU_KINDS.index(_kind(name)) for name in names], dtype=np.int8)[which]
    for nth, kind in enumerate(GPU_KINDS):
        kinds[events.has_stat(f"{kind}_details")] = nth
    columns: dict[str, Any] = {
        "ts": events.ts,
        "dur": events.dur,
        "kind": pl.Series(GPU_KINDS).gather(kinds.astype(np.uint32)),
        "name": pl.Series(names, dtype=pl.String).gather(which),
        "device": device,
        "stream": stream,
        "correlation": events.number("correlation_id"),
        "graph": pl.Series(events.number("cuda_graph_id", 0)).replace(0, None),
    }
    columns |= _details(events.texts.get("kernel_details"), len(which), _kernel)
    moved = _details(events.texts.get("memcpy_details"), len(which), _copy)
    filled = _details(events.texts.get("memset_details"), len(which), _copy)
    columns["bytes"] = moved["bytes"].fill_null(filled["bytes"])
    columns["gbps"] = columns["bytes"] / pl.Series(np.maximum(events.dur, 1))
    columns["src"], columns["dst"] = moved["src"], moved["dst"]
    directions = pl.Series([copy_parts(_COPY.sub(r"Memcpy \1to\2", name))[0] for name in names],
                           dtype=pl.String).gather(which)  # fmt: skip
    columns["copy"] = directions.set(pl.Series(kinds != GPU_KINDS.index("memcpy")), None)
    module, hlo = (_texts(events, name) for name in ("hlo_module", "hlo_op"))
    columns["hlo"] = pl.select(
        pl.concat_str(module, hlo, separator="/", ignore_nulls=False).fill_null(hlo)
    ).to_series()
    table = pl.DataFrame(columns).select(
        pl.col(name).cast(kind) for name, kind in _WORK_SCHEMA.items()
    )
    from advisor.read.formats.xplane.host_events import count_modules

    count_modules(hosts, events)
    return table[np.flatnonzero(stream >= 0)]


def _texts(events: Events, name: str) -> pl.Series:
    """Return a text stat as a column; null if missing."""
    column = pl.Series([None] * len(events.ts), dtype=pl.String)
    return column.scatter(*events.texts[name]) if name in events.texts else column


_WORK_SCHEMA: dict[str, Any] = {
    **dict.fromkeys(("ts", "dur"), pl.Int64),
    **dict.fromkeys(("kind", "name"), pl.String),
    **dict.fromkeys(("device", "stream", "correlation", "graph", "bytes"), pl.Int64),
    **dict.fromkeys(("blocks", "threads", "registers", "shared"), pl.Int64),
    **dict.fromkeys(("gbps", "occupancy"), pl.Float64),
    **dict.fromkeys(("copy", "src", "dst", "hlo"), pl.String),
}
_COPY = re.compile(r"Memcpy\s*([HDAP])(?:2|to)([HDAP])", re.IGNORECASE)


def _kind(name: str) -> str:
    lowered = name[:20].lower()
    return next((kind for kind in ("memcpy", "memset") if lowered.startswith(kind)), "kernel")


def _details(details: tuple[Any, list[str]] | None, count: int, parse: Any) -> dict[str, pl.Series]:
    """Parse texts such as ``regs:38 shm:0 grid:160,1,1 block:1024,1,1`` into columns, each distinct
    one once."""
    rows, texts = details if details is not None else (np.zeros(0, dtype=np.int64), [])
    frame = pl.DataFrame({"text": texts}, schema={"text": pl.String})
    seen = frame["text"].unique(maintain_order=True)
    parsed = [parse(dict(_DETAIL.findall(text[:1000]))) for text in seen.to_list()]
    columns = {}
    for key in parse({}):
        values = pl.Series([item[key] for item in parsed], dtype=_TYPES.get(key, pl.Int64))
        table = pl.DataFrame({"text": seen, "value": values})
        joined = frame.join(table, on="text", how="left", maintain_order="left")["value"]
        empty = pl.Series(key, [None], dtype=values.dtype).new_from_index(0, count)
        columns[key] = empty.scatter(rows, joined) if len(rows) else empty
    return columns


_TYPES = {"src": pl.String, "dst": pl.String, "occupancy": pl.Float64}
_MEMORY_KINDS = {"pinned": "Pinned", "pageable": "Pageable", "device": "Device",
                 "managed": "Managed", "array": "Array", "unified": "Managed"}  # fmt: skip


def _kernel(details: dict[str, str]) -> dict[str, Any]:
    names = ("static_shared", "dynamic_shared", "shm", "static_shm", "dynamic_shm")
    shared = [_whole(details[key]) for key in names if key in details]
    return {
        "registers": _whole(details.get("regs", ""), 1 << 16),
        "shared": None if None in shared or not shared else sum(x or 0 for x in shared),
        "blocks": _product(details.get("grid", "")),
        "threads": _product(details.get("block", ""), 1 << 20),
        "occupancy": None,
    }


def _copy(details: dict[str, str]) -> dict[str, Any]:
    return {
        "bytes": _whole(details.get("size", "")),
        "src": _MEMORY_KINDS.get(details.get("kind_src", "").lower()),
        "dst": _MEMORY_KINDS.get(details.get("kind_dst", "").lower()),
    }


def _whole(text: str, most: int = 1 << 53) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 18 and int(text) < most else None


def _product(text: str, most: int = 1 << 53) -> int | None:
    """Return the product of a grid's or block's sizes; ``None`` if one is missing or 0."""
    sizes = [_whole(part, 1 << 32) for part in text.split(",")]
    if len(sizes) > 3 or not all(sizes):
        return None
    result = int(np.prod([float(size or 0) for size in sizes]))
    return result if result < most else None


def _with_ops(host: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """Return the host rows, with an op around each launch for which the device names XLA's op: it
    has no range of its own on the host."""
    details = (
        device.filter(pl.col("hlo").is_not_null() & (pl.col("correlation") > 0))
        .group_by("correlation")
        .agg(pl.col("hlo").first(), pl.col("hlo").n_unique().alias("kinds"))
        .filter(pl.col("kinds") == 1)  # a graph's one launch stands for many
    )
    if not details.height or not host.height:
        return host
    launches = host.filter((pl.col("kind") == "runtime") & (pl.col("correlation") > 0)
                           & pl.col("call").is_in(["launch", "memcpy", "memcpy_blocking", "memset",
                                                   "graph_launch", "other"]))  # fmt: skip
    ops = launches.join(details, on="correlation", how="inner").with_columns(
        name=pl.col("hlo"), kind=pl.lit("op"), call=pl.lit(None, dtype=pl.String),
        correlation=pl.lit(-1, dtype=pl.Int64),
    )  # fmt: skip
    return pl.concat([host, ops.select(host.columns)])
