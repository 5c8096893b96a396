"""Reader of rocprofv3's JSON (``--output-format json``): types of its parts, and a trace's rows."""

from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import polars as pl
from msgspec import Struct, field

from advisor.core.errors import AdvisorError
from advisor.core.trace import Device
from advisor.read.formats.rocm.device_rows import build_device, copy_direction
from advisor.read.nvtx import number_inputs, parse_ranges

_CORRELATION_BITS = 40
_GPU_AGENT = 2  # rocprofiler_agent_type_t


class Handle(Struct, frozen=True, gc=False):
    handle: int = -1


class Correlation(Struct, frozen=True, gc=False):
    internal: int = 0


class Size(Struct, frozen=True, gc=False):
    x: int = 0
    y: int = 0
    z: int = 0


class Dispatch(Struct, frozen=True, gc=False):
    agent_id: Handle = Handle()
    queue_id: Handle = Handle()
    kernel_id: int = -1
    group_segment_size: int = 0
    workgroup_size: Size = Size()
    grid_size: Size = Size()


class RocprofRecord(Struct, gc=False):
    """Row of ``buffer_records``: a call, a dispatch or a copy."""

    start_timestamp: int = -1
    end_timestamp: int = -1
    kind: int = -1
    operation: int = -1
    thread_id: int = 0
    correlation_id: Correlation = Correlation()
    stream_id: Handle = Handle()
    dispatch_info: Dispatch = Dispatch()
    src_agent_id: Handle = Handle()
    dst_agent_id: Handle = Handle()
    bytes: int = 0


class Records(Struct):
    kernel_dispatch: list[RocprofRecord] = field(default_factory=list)
    hip_api: list[RocprofRecord] = field(default_factory=list)
    marker_api: list[RocprofRecord] = field(default_factory=list)
    memory_copy: list[RocprofRecord] = field(default_factory=list)
    rccl_api: list[RocprofRecord] = field(default_factory=list)


class Kind(Struct):
    kind: str = ""
    operations: list[str] = field(default_factory=list)


class Marker(Struct, gc=False):
    key: int = -1
    value: str = ""


class Strings(Struct):
    buffer_records: list[Kind] = field(default_factory=list)
    marker_api: list[Marker] = field(default_factory=list)


class Symbol(Struct, gc=False):
    kernel_id: int = -1
    formatted_kernel_name: str = ""
    kernel_name: str = ""
    arch_vgpr_count: int = 0


class RocprofAgent(Struct):
    id: Handle = Handle()
    type: int = 0
    node_id: int = -1
    logical_node_type_id: int = -1
    name: str = ""
    product_name: str = ""
    model_name: str = ""
    cu_count: int = 0
    wave_front_size: int = 0
    max_waves_per_cu: int = 0
    max_waves_per_simd: int = 0
    simd_per_cu: int = 0


class Metadata(Struct):
    pid: int = 0
    command: list[str] = field(default_factory=list)


class Process(Struct):
    metadata: Metadata = field(default_factory=Metadata)
    agents: list[RocprofAgent] = field(default_factory=list)
    kernel_symbols: list[Symbol] = field(default_factory=list)
    strings: Strings = field(default_factory=Strings)
    buffer_records: Records = field(default_factory=Records)


class RocprofDocument(Struct):
    processes: list[Process] = field(name="rocprofiler-sdk-tool", default_factory=list)


def decode_document(data: bytes, path: str) -> tuple[list[Process], int]:
    """Return the processes of a file, and the number of parts left out because values have other
    types. Raises AdvisorError if it is not complete JSON, or has another layout."""
    try:
        return msgspec.json.decode(data, type=RocprofDocument, strict=False).processes, 0
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        result = msgspec.json.decode(data)["rocprofiler-sdk-tool"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        reason = (str(error).splitlines() or ["no text"])[0][:150]
        raise AdvisorError(
            f"{path}: a damaged file of rocprofv3 ({reason}); copy or record it again"
        ) from None
    left_out: list[str] = []
    result = result if isinstance(result, list) else []
    processes = [
        _convert_leniently(item, Process, left_out) for item in result if isinstance(item, dict)
    ]
    return processes, len(left_out)


_S = TypeVar("_S")


def _convert_leniently(value: object, kind: type[_S], left_out: list[str]) -> _S:
    """Convert a value to a type, keeping the parts that fit. Lists are kept item by item."""
    parts: dict[str, object] = {}
    if isinstance(value, dict):
        for struct_field in msgspec.structs.fields(kind):  # type: ignore[arg-type]
            name, field_type = struct_field.name, struct_field.type
            if name not in value:
                continue
            if get_origin(field_type) is list:
                item_type = get_args(field_type)[0]
                items = value[name] if isinstance(value[name], list) else []
                parts[name] = [
                    entry
                    for entry in (_convert_or_count(part, item_type, left_out) for part in items)
                    if entry is not None
                ]
                if not isinstance(value[name], list):
                    left_out.append(name)
            elif isinstance(field_type, type) and issubclass(field_type, Struct):
                parts[name] = _convert_leniently(value[name], field_type, left_out)
            else:
                converted = _convert_or_count(value[name], field_type, left_out)
                if converted is not None:
                    parts[name] = converted
    return kind(**parts)


def _convert_or_count(value: object, kind: Any, left_out: list[str]) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.MsgspecError, RecursionError, OverflowError):
        left_out.append(str(kind))
        return None


class Rows:
    """Host and device rows of all processes."""

    def __init__(self, processes: list[Process]) -> None:
        self.host: list[pl.DataFrame] = []
        self.device: list[pl.DataFrame] = []
        self.inputs: pl.DataFrame | None = None
        self._devices: dict[int, Device] = {}
        self.programs = [p.metadata.command[0] for p in processes if p.metadata.command]
        marks = []
        for index, process in enumerate(processes):
            first_correlation = index << _CORRELATION_BITS
            agents = self._read_gpu_agents(process)
            self.host += [
                _build_calls(process, process.buffer_records.hip_api, first_correlation),
                _build_calls(process, process.buffer_records.rccl_api, first_correlation),
            ]
            marks.append(_build_markers(process))
            self.device += [
                _build_kernels(process, agents, first_correlation),
                _build_copies(process, agents, first_correlation),
            ]
        marks = [part for part in marks if part.height]
        if marks:
            rows = pl.concat(marks)
            result, self.inputs = number_inputs(parse_ranges(rows["text"]))
            self.host.append(rows.drop("text").hstack(result))

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self._devices.values())

    def _read_gpu_agents(self, process: Process) -> dict[int, int]:
        """Return the GPU number, as counted by HIP, by the handle of its agent."""
        result: dict[int, int] = {}
        gpus = [agent for agent in process.agents if agent.type == _GPU_AGENT]
        for index, agent in enumerate(sorted(gpus, key=lambda item: item.node_id)):
            number = agent.logical_node_type_id
            number = number if 0 <= number < 1 << 31 else index
            result[agent.id.handle] = number
            self._devices[number] = build_device(number, msgspec.structs.asdict(agent))
        return result


def _time_columns(records: list[RocprofRecord], first_correlation: int) -> dict[str, pl.Series]:
    start, end, correlation = (
        pl.Series(values, dtype=pl.Int64, strict=False)
        for values in (
            [record.start_timestamp for record in records],
            [record.end_timestamp for record in records],
            [record.correlation_id.internal for record in records],
        )
    )
    is_valid = correlation.is_between(1, (1 << _CORRELATION_BITS) - 1).fill_null(False)
    return {
        "ts": start.set((start < 0).fill_null(False), None),
        "dur": end - start,
        "correlation": (correlation + first_correlation).set(~is_valid, None),
    }


def _thread_columns(process: Process, records: list[RocprofRecord]) -> dict[str, object]:
    return {
        "process": pl.Series([str(process.metadata.pid)] * len(records), dtype=pl.String),
        "thread": pl.Series([str(record.thread_id) for record in records], dtype=pl.String),
    }


def _operation_name(process: Process, item: RocprofRecord) -> str:
    kinds = process.strings.buffer_records
    if not 0 <= item.kind < len(kinds) or not 0 <= item.operation < len(
        kinds[item.kind].operations
    ):
        return "call"
    return kinds[item.kind].operations[item.operation]


def _build_calls(
    process: Process, records: list[RocprofRecord], first_correlation: int
) -> pl.DataFrame:
    # one by one, because the records are objects
    return pl.DataFrame(
        {
            **_time_columns(records, first_correlation),
            **_thread_columns(process, records),
            "name": pl.Series(
                [_operation_name(process, record) for record in records], dtype=pl.String
            ),
        }
    ).with_columns(kind=pl.lit("runtime"))


def _build_markers(process: Process) -> pl.DataFrame:
    texts = {item.key: item.value for item in process.strings.marker_api}
    records = [
        item
        for item in process.buffer_records.marker_api
        if item.end_timestamp > item.start_timestamp
    ]
    frame = pl.DataFrame(
        {
            **_time_columns(records, 0),
            **_thread_columns(process, records),
            "text": pl.Series(
                [texts.get(record.correlation_id.internal, "range") for record in records],
                dtype=pl.String,
            ),
        }
    )
    return frame.drop("correlation")


def _build_kernels(
    process: Process, agents: dict[int, int], first_correlation: int
) -> pl.DataFrame:
    records = process.buffer_records.kernel_dispatch
    symbols = {kernel_symbol.kernel_id: kernel_symbol for kernel_symbol in process.kernel_symbols}
    record_symbols = [symbols.get(record.dispatch_info.kernel_id, Symbol()) for record in records]
    names = [item.formatted_kernel_name or item.kernel_name or "kernel" for item in record_symbols]
    groups: list[int | None] = []
    blocks: list[int | None] = []
    for record in records:
        group, grid = record.dispatch_info.workgroup_size, record.dispatch_info.grid_size
        size = group.x * group.y * group.z
        groups.append(size or None)
        blocks.append(grid.x * grid.y * grid.z // size if size > 0 else None)
    frame = pl.DataFrame(
        {
            **_time_columns(records, first_correlation),
            "name": pl.Series(names, dtype=pl.String),
            "device": _to_integers(
                [agents.get(record.dispatch_info.agent_id.handle, 0) for record in records]
            ),
            "stream": _to_integers(
                [
                    record.stream_id.handle
                    if record.stream_id.handle >= 0
                    else max(0, record.dispatch_info.queue_id.handle)
                    for record in records
                ]
            ),
            "threads": _to_integers(groups),
            "blocks": _to_integers(blocks),
            "shared": _to_integers([record.dispatch_info.group_segment_size for record in records]),
            "registers": _to_integers([item.arch_vgpr_count or None for item in record_symbols]),
        }
    )
    fill = pl.col("name").str.contains(r"^__amd_rocclr_fillBuffer")
    return frame.with_columns(kind=pl.when(fill).then(pl.lit("memset")).otherwise(pl.lit("kernel")))


def _build_copies(process: Process, agents: dict[int, int], first_correlation: int) -> pl.DataFrame:
    records = process.buffer_records.memory_copy
    device = [
        agents.get(record.dst_agent_id.handle, agents.get(record.src_agent_id.handle, 0))
        for record in records
    ]
    frame = pl.DataFrame(
        {
            **_time_columns(records, first_correlation),
            "name": pl.Series(
                [_operation_name(process, record) for record in records], dtype=pl.String
            ),
            "device": _to_integers(device),
            "stream": _to_integers([max(0, record.stream_id.handle) for record in records]),
            "bytes": _to_integers([record.bytes or None for record in records]),
        }
    )
    has_rate = (pl.col("bytes") > 0) & (pl.col("dur") > 0)
    return frame.with_columns(
        kind=pl.lit("memcpy"),
        copy=copy_direction(frame["name"]),
        gbps=pl.when(has_rate).then(pl.col("bytes") / pl.col("dur")),
    )


def _to_integers(values: Sequence[int | None]) -> pl.Series:
    return pl.Series(values, dtype=pl.Int64, strict=False)
