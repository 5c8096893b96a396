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
from advisor.core.event_kinds import GPU_KINDS
from advisor.core.gpus import known_gpus
from advisor.core.trace import JAX, PYTORCH, TENSORFLOW, Device, Trace, TraceMeta
from advisor.read.build import build_trace
from advisor.read.protobuf import PADDING, MalformedMessage, varint
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool
from advisor.read.source import ByteSource
from advisor.read.trace_events import copy_parts

if TYPE_CHECKING:
    from advisor.read.formats.xplane.host_events import XlaHost
    from advisor.read.formats.xplane.xspace import Events, Plane, XLine, XSpace

_MAX_BYTES = 2 << 30
"""Maximum size of a file, bytes. Messages of Protocol Buffers are not longer."""

_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)")
_TPU_PLANE = re.compile(r"^/device:TPU:|^#?Chip|^/device:CUSTOM:")
_STREAM_LINE = re.compile(r"(?i)^stream\s*#?\s*(\d+)")
_PLANE_NAME = re.compile(rb"^(?:/\w+(?::|$)|Task Environment$|#Chip)")
_STATS = frozenset(
    """
        correlation_id cuda_graph_id hlo_module hlo_op kernel_details memcpy_details
        memset_details""".split()
)
_ID_KEY, _NAME_KEY = 0x08, 0x12
_PROCESS = "host"
"""Name of the only process in a file. The host's name and address are not read."""
_DETAIL_PAIR = re.compile(r"(\w+):(\S+)")


@dataclass
class Space:
    """Planes with their lines, from either file format."""

    planes: Iterable[tuple[Plane, list[XLine], Events]]
    truncated: bool = False
    undecodable_events: int = 0
    """Number of events that could not be decoded."""


_TOOL_OF_FRAMEWORK = {
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
        return _TOOL_OF_FRAMEWORK.get(framework or "", self.tool)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a message whose first field is a plane with a name that profilers use."""
        return ReaderClaim.SURE if _begins_with_plane(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read host threads, streams of devices, and the correlation numbers that join them."""
        from advisor.read.formats.xplane.host_events import STATS
        from advisor.read.formats.xplane.xspace import XSpace

        data = bytearray()
        for block in source.blocks():
            if len(data) + len(block) > _MAX_BYTES:
                source.stop("longer than 2 GB, which no XPlane file is")
                break
            data += block
            if options.progress is not None:
                options.progress(source.path, source.bytes_read)
        size = len(data)
        data += bytes(PADDING)
        space = XSpace(data, size)
        decoded = Space(
            planes=(
                (plane, *space.read(plane, _STATS if _GPU_PLANE.match(plane.name) else STATS))
                for plane in space.planes
            ),
            truncated=space.truncated,
        )
        trace = space_to_trace(decoded, source)
        return replace(
            trace, meta=replace(trace.meta, events_dropped=_add_space_counts(trace, space))
        )


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
    derived_steps: list[pl.DataFrame] = []
    tpus: list[str] = []
    vendor = None
    unused_planes = 0
    facts: dict[str, Any] = {}
    for plane, lines, events in space.planes:
        gpu_match = _GPU_PLANE.match(plane.name)
        if gpu_match is not None:
            device_number = min(int(gpu_match[1]), (1 << 31) - 1)
            devices.append(_build_device(device_number, plane))
            vendor = vendor or _find_vendor(plane)
            # other lines are derived from the events of streams: modules, ops, scopes
            stream_matches = [_STREAM_LINE.match(line.name) for line in lines]
            streams = np.array(
                [-1 if item is None else int(item[1][:15]) for item in stream_matches]
            )
            device_rows.append(_build_device_rows(hosts, plane, events, device_number, streams))
            derived_steps.append(_derived_steps(plane, lines, events))
        elif plane.name.startswith("/host:") and plane.name != "/host:metadata":
            host_events.read_names(hosts, plane)
            host_events.add_plane(hosts, plane, lines, events, _PROCESS)
        elif plane.name == "Task Environment":
            facts = plane.stats
        elif _TPU_PLANE.match(plane.name):
            tpus.append(plane.name)
        else:
            unused_planes += bool(plane.spans)
    device = pl.concat(device_rows) if device_rows else None
    if tpus and (device is None or not device.height):
        raise AdvisorError(
            f"{path}: a profile of a TPU ({tpus[0][:60]}): TPUs are not read, only GPUs and hosts "
            "are; XProf shows it"
        )
    steps, main_thread = host_events.step_rows(
        hosts, _choose_derived_steps(device_rows, derived_steps)
    )
    waits = host_events.wait_rows(hosts, main_thread)
    host = host_events.list_host_rows(hosts, steps, waits, main_thread)
    if device is not None and device.height:
        host = _add_xla_ops(host, device)
    memory = [frame for frame in hosts.memory if frame.height]
    dropped = _count_dropped(space, unused_planes + len(tpus))
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
            start_ns=_file_start_ns(facts, host, device),
            vendor=vendor,
            events_dropped=dropped,
            truncated=source.truncated or space.truncated,
            damage=source.damage or ("cut off inside a plane" if space.truncated else None),
            bytes_read=source.bytes_read,
        ),
        host=host if host.height else None,
        device=None if device is None else device.drop("hlo"),
        memory=pl.concat(memory) if memory else None,
        thread_names=hosts.thread_names_by_id(main_thread),
    )


def _derived_steps(plane: Plane, lines: list[XLine], events: Events) -> pl.DataFrame:
    """Return the steps that the profiler derived for a device (line ``Steps``): ``number``, ``ts``,
    ``dur``."""
    step_lines = [index for index, line in enumerate(lines) if line.name == "Steps"]
    rows = np.flatnonzero(np.isin(events.line, step_lines) & (events.dur > 0))
    names = [plane.names.get(code, "") for code in events.meta[rows].tolist()]
    is_numbered = [name.isdecimal() and len(name) < 18 for name in names]
    rows, names = rows[is_numbered], [name for name in names if name.isdecimal() and len(name) < 18]
    return pl.DataFrame(
        {"number": list(map(int, names)), "ts": events.ts[rows], "dur": events.dur[rows]},
        schema={"number": pl.Int64, "ts": pl.Int64, "dur": pl.Int64},
    ).sort("ts")


def _choose_derived_steps(
    work: list[pl.DataFrame], steps: list[pl.DataFrame]
) -> pl.DataFrame | None:
    """Return the derived steps of the device with the most work, or ``None`` if it has none."""
    pairs = [
        (int(rows["dur"].sum()), device_steps)
        for rows, device_steps in zip(work, steps, strict=True)
    ]
    best = max(pairs, key=lambda pair: pair[0], default=None)
    return best[1] if best is not None and best[1].height else None


def _count_dropped(space: Space, others: int) -> dict[str, int]:
    """Return the number of dropped items by reason."""
    counts = {
        "not used: planes of other devices": others,
        "not decodable": space.undecodable_events,
    }
    return {reason: count for reason, count in counts.items() if count}


def _add_space_counts(trace: Trace, space: XSpace) -> dict[str, int]:
    """Add the decoder's counts of dropped events to the trace's counts."""
    counts = Counter(trace.meta.events_dropped)
    counts["without a name"] += space.nameless
    counts["not decodable"] += space.broken
    counts["beyond the most that is read of a file"] += space.left_out
    return dict(+counts)


def _file_start_ns(facts: dict[str, Any], host: pl.DataFrame, device: pl.DataFrame | None) -> int:
    """Return the Unix time of the file's time 0 in ns. Newer profilers count from their start and
    record it. 0 if times are already absolute or the start is unknown."""
    start = facts.get("profile_start_time")
    frames = [frame["ts"] for frame in (host, device) if frame is not None and frame.height]
    first = min((int(column.min()) for column in frames), default=0)  # type: ignore[arg-type]
    return start if isinstance(start, int) and 0 <= first < 10**15 < start < 1 << 62 else 0


def _build_device(number: int, plane: Plane) -> Device:
    """Return a GPU from its plane's stats. The model is not in the file. It is named if the
    recorded compute capability, multiprocessors, memory and clock match exactly one known model."""
    stats = plane.stats

    def positive_integer(name: str) -> int | None:
        value = stats.get(name)
        return value if isinstance(value, int) and 0 < value < 1 << 53 else None

    major, minor = stats.get("compute_cap_major"), stats.get("compute_cap_minor")
    compute = (major, minor) if isinstance(major, int) and isinstance(minor, int) else None
    sms, memory, clock = (
        positive_integer("core_count"),
        positive_integer("memory_size"),
        positive_integer("clock_rate"),
    )
    details = stats.get("gpu_model") or stats.get("device_name")
    name = details if isinstance(details, str) else None
    matching_gpus = [
        gpu
        for gpu in known_gpus()
        if gpu.compute == compute and gpu.sms == sms and memory is not None
        and 0.88 <= memory / gpu.memory_bytes <= 1.01
    ]  # fmt: skip
    if len(matching_gpus) > 1 and clock is not None:  # kHz
        matching_gpus = [
            candidate
            for candidate in matching_gpus
            if candidate.boost_mhz is not None and abs(clock / 1000 - candidate.boost_mhz) < 3
        ]
    if name is None and len(matching_gpus) == 1:
        name = matching_gpus[0].names[0]
    return Device(
        id=number,
        name=name,
        memory_bytes=memory,
        sms=sms,
        compute=compute,
        max_threads_per_sm=matching_gpus[0].max_threads_per_sm if len(matching_gpus) == 1 else None,
    )


def _find_vendor(plane: Plane) -> str | None:
    details = str(plane.stats.get("device_vendor", "")).lower()
    if "amd" in details or "advanced micro" in details:
        return "amd"
    # compute capability is NVIDIA's; planes of AMD GPUs also have the vendor
    return "nvidia" if "nvidia" in details or "compute_cap_major" in plane.stats else None


def _build_device_rows(
    hosts: XlaHost, plane: Plane, events: Events, device: int, streams: Any
) -> pl.DataFrame:
    """Return the work of one device. ``streams``: stream number of each line, or -1 for others."""
    if not len(events.ts):
        return pl.DataFrame(schema=_WORK_SCHEMA)
    stream = streams[events.line]
    codes, code_index = np.unique(events.meta, return_inverse=True)
    names = [plane.names[code] for code in codes.tolist()]
    kinds = np.array([GPU_KINDS.index(_kind_of_name(name)) for name in names], dtype=np.int8)[
        code_index
    ]
    for kind_index, kind in enumerate(GPU_KINDS):
        kinds[events.has_stat(f"{kind}_details")] = kind_index
    columns: dict[str, Any] = {
        "ts": events.ts,
        "dur": events.dur,
        "kind": pl.Series(GPU_KINDS).gather(kinds.astype(np.uint32)),
        "name": pl.Series(names, dtype=pl.String).gather(code_index),
        "device": device,
        "stream": stream,
        "correlation": events.number("correlation_id"),
        "graph": pl.Series(events.number("cuda_graph_id", 0)).replace(0, None),
    }
    columns |= _parse_details(events.texts.get("kernel_details"), len(code_index), _parse_kernel)
    copy_details = _parse_details(events.texts.get("memcpy_details"), len(code_index), _parse_copy)
    fill_details = _parse_details(events.texts.get("memset_details"), len(code_index), _parse_copy)
    columns["bytes"] = copy_details["bytes"].fill_null(fill_details["bytes"])
    columns["gbps"] = columns["bytes"] / pl.Series(np.maximum(events.dur, 1))
    columns["src"], columns["dst"] = copy_details["src"], copy_details["dst"]
    directions = pl.Series(
        [copy_parts(_COPY_NAME.sub(r"Memcpy \1to\2", name))[0] for name in names], dtype=pl.String
    ).gather(code_index)
    columns["copy"] = directions.set(pl.Series(kinds != GPU_KINDS.index("memcpy")), None)
    module, hlo = (_text_column(events, name) for name in ("hlo_module", "hlo_op"))
    columns["hlo"] = pl.select(
        pl.concat_str(module, hlo, separator="/", ignore_nulls=False).fill_null(hlo)
    ).to_series()
    table = pl.DataFrame(columns).select(
        pl.col(name).cast(kind) for name, kind in _WORK_SCHEMA.items()
    )
    from advisor.read.formats.xplane.host_events import count_modules

    count_modules(hosts, events)
    return table[np.flatnonzero(stream >= 0)]


def _text_column(events: Events, name: str) -> pl.Series:
    """Return a text stat as a column, null where missing."""
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
_COPY_NAME = re.compile(r"Memcpy\s*([HDAP])(?:2|to)([HDAP])", re.IGNORECASE)


def _kind_of_name(name: str) -> str:
    lowered = name[:20].lower()
    return next((kind for kind in ("memcpy", "memset") if lowered.startswith(kind)), "kernel")


def _parse_details(
    details: tuple[Any, list[str]] | None, count: int, parse: Any
) -> dict[str, pl.Series]:
    """Parse texts such as ``regs:38 shm:0 grid:160,1,1 block:1024,1,1`` into columns. Each distinct
    text is parsed once."""
    rows, texts = details if details is not None else (np.zeros(0, dtype=np.int64), [])
    frame = pl.DataFrame({"text": texts}, schema={"text": pl.String})
    distinct = frame["text"].unique(maintain_order=True)
    parsed = [parse(dict(_DETAIL_PAIR.findall(text[:1000]))) for text in distinct.to_list()]
    columns = {}
    for key in parse({}):
        values = pl.Series([item[key] for item in parsed], dtype=_DETAIL_TYPES.get(key, pl.Int64))
        table = pl.DataFrame({"text": distinct, "value": values})
        joined = frame.join(table, on="text", how="left", maintain_order="left")["value"]
        empty = pl.Series(key, [None], dtype=values.dtype).new_from_index(0, count)
        columns[key] = empty.scatter(rows, joined) if len(rows) else empty
    return columns


_DETAIL_TYPES = {"src": pl.String, "dst": pl.String, "occupancy": pl.Float64}
_MEMORY_KINDS = {"pinned": "Pinned", "pageable": "Pageable", "device": "Device",
                 "managed": "Managed", "array": "Array", "unified": "Managed"}  # fmt: skip


def _parse_kernel(details: dict[str, str]) -> dict[str, Any]:
    names = ("static_shared", "dynamic_shared", "shm", "static_shm", "dynamic_shm")
    shared = [_parse_integer(details[key]) for key in names if key in details]
    return {
        "registers": _parse_integer(details.get("regs", ""), 1 << 16),
        "shared": None if None in shared or not shared else sum(x or 0 for x in shared),
        "blocks": _parse_product(details.get("grid", "")),
        "threads": _parse_product(details.get("block", ""), 1 << 20),
        "occupancy": None,
    }


def _parse_copy(details: dict[str, str]) -> dict[str, Any]:
    return {
        "bytes": _parse_integer(details.get("size", "")),
        "src": _MEMORY_KINDS.get(details.get("kind_src", "").lower()),
        "dst": _MEMORY_KINDS.get(details.get("kind_dst", "").lower()),
    }


def _parse_integer(text: str, limit: int = 1 << 53) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 18 and int(text) < limit else None


def _parse_product(text: str, limit: int = 1 << 53) -> int | None:
    """Return the product of the sizes of a grid or block, or ``None`` if one is missing or 0."""
    sizes = [_parse_integer(part, 1 << 32) for part in text.split(",")]
    if len(sizes) > 3 or not all(sizes):
        return None
    result = int(np.prod([float(size or 0) for size in sizes]))
    return result if result < limit else None


def _add_xla_ops(host: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """Return the host rows with an op added around each launch for which the device names the XLA
    op. Such ops have no range on the host."""
    details = (
        device.filter(pl.col("hlo").is_not_null() & (pl.col("correlation") > 0))
        .group_by("correlation")
        .agg(pl.col("hlo").first(), pl.col("hlo").n_unique().alias("kinds"))
        .filter(pl.col("kinds") == 1)  # the launch of a graph belongs to many ops
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
