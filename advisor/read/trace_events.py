"""Vocabulary of trace events: old, new and AMD spellings are unified here and nowhere else.

Imports nothing from the project, because decoding processes load it and do without polars."""

import math
import re

from msgspec import Raw, Struct, field

# Kind of an event by its category. Categories are compared in lower case, which also covers the
# capitalised spelling that profilers wrote before 2022.
HOST_CATEGORIES: dict[str, str] = {
    "cpu_op": "op",
    "operator": "op",
    "cpu functions": "op",  # the legacy autograd profiler's process name
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
    "driver": "runtime",
    "hip_runtime": "runtime",
    "hip_driver": "runtime",
    "xpu_runtime": "runtime",
    "xpu_driver": "runtime",
    "mtia_runtime": "runtime",
    "privateuse1_runtime": "runtime",
    "privateuse1_driver": "runtime",
    "overhead": "overhead",
}
DEVICE_CATEGORIES: dict[str, str] = {
    "kernel": "kernel", "concurrent_kernel": "kernel", "cuda functions": "kernel",
    "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset", "memset": "memset",
}  # fmt: skip
_RANGE = re.compile(
    r"^(?:ProfilerStep|Optimizer\.|##|DistributedDataParallel\.|\[|advisor::|enumerate\()"
)


def is_range(name: str) -> bool:
    """Return whether an event in an operator's category is a range around operators:
    ``ProfilerStep#5``, ``Optimizer.step#Adam.step``, ``enumerate(DataLoader)#…``. Profilers before
    2022, and still ``_RecordFunctionFast``, write both in one category."""
    return _RANGE.match(name) is not None


SYNC_CATEGORY = "cuda_sync"
COUNTER_CATEGORY = "cuda_profiler_range"
IGNORED_CATEGORIES = frozenset(
    {"advisor", "gpu_user_annotation", "trace", "ac2g", "async_cpu_to_gpu", "fwdbwd", "async_gpu"}
)
"""Categories that are ignored: device-side copies of annotations, the profiler's own span, flow
arrows, and events added by ``advisor export``."""

# Suffixes of CUPTI's names for ABI versions of a call: cudaLaunchKernel_ptsz_v7000.
_ABI_SUFFIX = re.compile(r"(_(ptsz|ptds|spt|v\d+))+$")
_API_PREFIX = r"^(cuda|hip|cu)"
_CALL_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), call)
    for pattern, call in (
        (_API_PREFIX + r"(Ext)?(Module)?Launch(Cooperative)?(Kernel|ByPtr|$)", "launch"),
        (r"^hip(ExtModule|HccModule|ModuleCooperative)LaunchKernel", "launch"),
        (r"^hipModuleLaunchCooperativeKernel", "launch"),
        (_API_PREFIX + r"GraphLaunch", "graph_launch"),
        # "like hipMemcpyAsync followed by hipStreamSynchronize" (HIP reference): it blocks
        (r"^hipMemcpyWithStream", "memcpy_blocking"),
        (_API_PREFIX + r"Memcpy.*Async", "memcpy"),
        (_API_PREFIX + r"Memcpy", "memcpy_blocking"),
        (_API_PREFIX + r"Memset", "memset"),
        (_API_PREFIX + r"(Device|Thread|Ctx)Synchronize", "sync_device"),
        (_API_PREFIX + r"StreamSynchronize", "sync_stream"),
        (_API_PREFIX + r"EventSynchronize", "sync_event"),
        (_API_PREFIX + r"EventRecord", "event_record"),
        (_API_PREFIX + r"(Event|Stream)Query", "event_query"),
        (_API_PREFIX + r"StreamWaitEvent", "stream_wait"),
        (
            r"^cuda(HostAlloc|MallocHost|HostRegister)|^hip(HostMalloc|MallocHost|HostAlloc|HostRegister)"
            r"|^cuMem(HostAlloc|AllocHost|HostRegister)",
            "host_alloc",
        ),
        (
            r"^cuda(FreeHost|HostUnregister)|^hip(HostFree|FreeHost|HostUnregister)"
            r"|^cuMem(FreeHost|HostUnregister)",
            "host_free",
        ),
        (
            r"^(cuda|hip|hipExt)Malloc|^cuMem(Alloc|Create|Map|AddressReserve)"
            r"|^hipMem(Create|Map|AddressReserve)",
            "malloc",
        ),
        (
            r"^(cuda|hip)Free|^cuMem(Free|Unmap|Release|AddressFree)"
            r"|^hipMem(Unmap|Release|AddressFree)",
            "free",
        ),
        (_API_PREFIX + r"(Stream(Begin|End)Capture|GraphInstantiate)", "graph_capture"),
        (_API_PREFIX + r"(ModuleLoad|LibraryLoad|LinkComplete)", "module_load"),
    )
)


def call_class(name: str) -> str:
    """Return the class of a CUDA or HIP call, one of :data:`advisor.core.trace.CALLS`."""
    plain_name = _ABI_SUFFIX.sub("", name[:200])
    for pattern, call in _CALL_PATTERNS:
        if pattern.search(plain_name):
            return call
    return "other"


# Memcpy HtoD (Pageable -> Device)
_COPY_NAME = re.compile(r"(?:Memcpy|Copy)\s*(\w+)?\s*(?:\(\s*([\w ]+)->\s*([\w ]+)\))?", re.I)
_DIRECTIONS = {
    "htod": "HtoD",
    "dtoh": "DtoH",
    "dtod": "DtoD",
    "ptop": "PtoP",
    "p2p": "PtoP",
    "htoh": "HtoH",
    "htoa": "HtoD",  # arrays live on the device
    "atoh": "DtoH",
    "atod": "DtoD",
    "dtoa": "DtoD",
    "atoa": "DtoD",
}
_HIP_DIRECTIONS = {
    "copyhosttodevice": "HtoD",
    "copydevicetohost": "DtoH",
    "copydevicetodevice": "DtoD",
    "copyhosttohost": "HtoH",
}
_MEMORIES = frozenset(
    {"pageable", "pinned", "device", "managed", "array", "device static", "managed static"}
)


def copy_parts(name: str) -> tuple[str, str | None, str | None]:
    """Return direction (one of COPIES), source and destination memory of a copy, from its name.

    ``Memcpy HtoD (Pageable -> Device)`` -> HtoD, Pageable, Device. AMD's profiler writes
    ``CopyHostToDevice`` or ``Memcpy HtoD (Host -> Device)``, which does not record whether the host
    memory was pinned; it stays ``None``."""
    name = name[:200]
    squeezed = name.replace(" ", "").lower()
    for word, direction in _HIP_DIRECTIONS.items():
        if word in squeezed:
            return direction, None, None
    match = _COPY_NAME.search(name)
    if match is None:
        return "other", None, None
    kind, src, dst = match.groups()
    return _DIRECTIONS.get((kind or "").lower(), "other"), _known_memory(src), _known_memory(dst)


def _known_memory(name: str | None) -> str | None:
    name = (name or "").strip()
    return name if name.lower() in _MEMORIES else None


_SYNC_NAMES = {
    "context sync": "context", "device sync": "context", "stream sync": "stream",
    "stream synchronize": "stream", "event sync": "event", "event synchronize": "event",
    "stream wait event": "stream_wait",
}  # fmt: skip


def sync_kind(name: str) -> str | None:
    """Return the kind of a ``cuda_sync`` row (one of SYNC_KINDS), or ``None`` if unknown."""
    return _SYNC_NAMES.get(name.strip().lower())


# -- events as written in the JSON -----------------------------------------------------------------

Whole = int | float | str | None
"""Type of an id. Profilers write numbers; some tools that rewrite traces write strings."""
Real = float | str | None
"""Type of a quantity. msgspec converts integers to floats here, which are fastest for columns."""

ABSENT = Raw()
"""Default of nested values, compared by identity: ``args.dims is ABSENT``."""
_NAN = math.nan  # default for numbers, which needs no conversion in float columns


class EventArgs(Struct, gc=False):
    """Arguments of an event that the analysis uses. Nested values stay undecoded: most of them
    repeat, so each distinct value is decoded once, later."""

    external: Whole = field(default=-1, name="External id")
    external_old: Whole = field(default=-1, name="external id")
    correlation: Whole = -1
    stream: Real = _NAN
    device: Real = _NAN
    bytes: Real = _NAN
    gbps: Real = field(default=_NAN, name="memory bandwidth (GB/s)")
    gbps_old: Real = field(default=_NAN, name="Memory bandwidth (GB/s)")
    grid: Raw = ABSENT
    block: Raw = ABSENT
    registers: Real = field(default=_NAN, name="registers per thread")
    shared: Real = field(default=_NAN, name="shared memory")
    blocks_per_sm: Real = field(default=_NAN, name="blocks per SM")
    warps_per_sm: Real = field(default=_NAN, name="warps per SM")
    occupancy: Real = field(default=_NAN, name="est. achieved occupancy %")
    occupancy_detail: Raw = field(default=ABSENT, name="occupancy")
    graph: Real = field(default=_NAN, name="graph id")
    dims: Raw = field(default=ABSENT, name="Input Dims")
    dims_old: Raw = field(default=ABSENT, name="Input dims")
    types: Raw = field(default=ABSENT, name="Input type")
    strides: Raw = field(default=ABSENT, name="Input Strides")
    concrete: Raw = field(default=ABSENT, name="Concrete Inputs")
    sequence: Whole = field(default=-1, name="Sequence number")
    collective: Raw = field(default=ABSENT, name="Collective name")
    comm_in: Raw = field(default=ABSENT, name="In msg nelems")
    comm_out: Raw = field(default=ABSENT, name="Out msg nelems")
    comm_size: Raw = field(default=ABSENT, name="Group size")
    comm_dtype: Raw = field(default=ABSENT, name="dtype")
    comm_group: Raw = field(default=ABSENT, name="Process Group Name")
    comm_description: Raw = field(default=ABSENT, name="Process Group Description")
    comm_ranks: Raw = field(default=ABSENT, name="Process Group Ranks")
    comm_in_split: Raw = field(default=ABSENT, name="In split size")
    comm_out_split: Raw = field(default=ABSENT, name="Out split size")
    comm_sequence: Raw = field(default=ABSENT, name="Seq")
    comm_source: Raw = field(default=ABSENT, name="Src Rank")
    comm_target: Raw = field(default=ABSENT, name="Dst Rank")
    wait_stream: Real = field(default=_NAN, name="wait_on_stream")
    wait_correlation: Real = field(default=_NAN, name="wait_on_cuda_event_record_corr_id")
    address: Whole = field(default=_NAN, name="Addr")
    alloc_bytes: Whole = field(default=_NAN, name="Bytes")
    allocated: Whole = field(default=None, name="Total Allocated")
    reserved: Whole = field(default=_NAN, name="Total Reserved")
    device_type: Real = field(default=_NAN, name="Device Type")
    device_id: Real = field(default=_NAN, name="Device Id")
    name: str | None = None


COMM_FIELDS = tuple(
    name for name in EventArgs.__struct_fields__ if name == "collective" or name.startswith("comm_")
)
"""Fields of a collective, in the order of ``core.trace.COMMS_SCHEMA``."""


class TraceEvent(Struct, gc=False):
    """Element of ``traceEvents``."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: Whole = None
    tid: Whole = None
    ts: Real = _NAN
    dur: Real = _NAN
    args: EventArgs | None = None


NO_ARGS = EventArgs()
