"""Trace and Run: the typed, columnar tables that all analysis reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.text import count_noun

if TYPE_CHECKING:
    from pathlib import Path

    from advisor.core.auxiliary_inputs import CompileLog, FlightDump, NetworkLog
    from advisor.core.kernel_profile import KernelProfiles
    from advisor.core.run_directory import Recording
    from advisor.core.snapshot import MemorySnapshot

KINETO = "kineto"
"""Value of ``TraceMeta.format`` for PyTorch's profiler."""
PYTORCH, TENSORFLOW, JAX, CUDA = "pytorch", "tensorflow", "jax", "cuda"
"""Values of ``TraceMeta.framework``."""
TF_DATA = "tf.data::"
"""Prefix of the names of waits for TensorFlow's input pipeline."""
ANOTHER_TRACE = "of another trace behind the first one in the same file"
"""Reason for events that were left out without being counted."""
DEVICE_STEPS = "device steps"
STEP_MARKS = ("StepTraceAnnotation", "step_num", "program", DEVICE_STEPS)
"""Values of ``TraceMeta.step_marks``: JAX's, TensorFlow's, the period of a program that is called
repeatedly, and the line ``Steps`` that the profiler derived from a device's work."""
_STEP, _MARKED_STEP = r"^ProfilerStep\s*#?\d+", r"^(?:step #|ProfilerStep\s*#?)\d+$"
LOADER = r"^enumerate\(Data(?:Loader|Pipe)\)#|^tf\.data::"
"""Regular expression of ranges in which the loop waits for its next batch."""
COPIES = ("HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "other")
SYNC_KINDS = ("context", "stream", "event", "stream_wait")
CALLS = (
    "launch",  # one kernel
    "graph_launch",  # one call, many kernels
    "memcpy",  # asynchronous copy API
    "memcpy_blocking",  # synchronous copy API
    "memset",
    "sync_device",
    "sync_stream",
    "sync_event",
    "event_record",
    "event_query",
    "stream_wait",  # a stream waits for an event; the host does not
    "malloc",
    "free",
    "host_alloc",
    "host_free",
    "graph_capture",
    "module_load",
    "other",
)
BLOCKING_CALLS = ("sync_device", "sync_stream", "sync_event", "memcpy", "memcpy_blocking")
"""Classes of calls that may block the host until the device is done."""

CpuKind = pl.Enum(CPU_KINDS)
GpuKind = pl.Enum(GPU_KINDS)
Copy = pl.Enum(COPIES)
Call = pl.Enum(CALLS)
SyncKind = pl.Enum(SYNC_KINDS)

CPU_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,  # ns from the trace's start
    "dur": pl.Int64,  # ns
    "kind": CpuKind,
    "name": pl.Categorical,
    "thread": pl.Int32,  # row of Trace.threads
    "parent": pl.Int32,  # row of the innermost event around it on its thread, or null
    "depth": pl.Int32,  # 0: outermost on its thread
    "call": Call,  # class of runtime or driver call; null for the other kinds
    "correlation": pl.Int64,  # null: none
    "external": pl.Int64,  # External id; null: none
    "sequence": pl.Int64,  # autograd sequence number; null: none
    "inputs": pl.Int32,  # row of Trace.inputs; null: shapes not recorded
    "comm": pl.Int32,  # row of Trace.comms; null: not a collective
}
"""Columns of host events, ordered by (thread, ts, longest first): parents precede children."""

GPU_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,
    "dur": pl.Int64,
    "kind": GpuKind,
    "name": pl.Categorical,
    "device": pl.Int32,
    "stream": pl.Int64,
    "correlation": pl.Int64,
    "external": pl.Int64,
    "launch": pl.Int32,  # row of Trace.cpu: the runtime call; null: outside the window
    "op": pl.Int32,  # row of Trace.cpu: innermost op around the launch (else by External id)
    "bytes": pl.Int64,  # copies and memsets
    "gbps": pl.Float64,  # as the profiler wrote it: GB/s = bytes / ns
    "copy": Copy,
    "src": pl.Categorical,  # Pageable, Pinned, Device, Managed, …; null: not recorded
    "dst": pl.Categorical,
    "blocks": pl.Int64,  # gridX * gridY * gridZ
    "threads": pl.Int32,  # blockX * blockY * blockZ
    "registers": pl.Int32,  # per thread
    "shared": pl.Int64,  # shared memory per block, bytes
    "blocks_per_sm": pl.Float64,
    "warps_per_sm": pl.Float64,
    "occupancy": pl.Float64,  # estimated achieved occupancy, %; 0 is often rounding; or null
    "active_blocks": pl.Float64,  # activeBlocksPerMultiprocessor, newer profilers only
    "limits": pl.Categorical,  # limitingFactors, newer profilers only
    "graph": pl.Int64,
    "comm": pl.Int32,
}
"""Columns of device work, ordered by ts."""

SYNC_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,
    "dur": pl.Int64,
    "kind": SyncKind,
    "device": pl.Int32,
    "stream": pl.Int64,  # null: none
    "correlation": pl.Int64,
    "wait_stream": pl.Int64,  # stream whose event is waited for
    "wait_correlation": pl.Int64,  # correlation of the cudaEventRecord waited for
}
"""Columns of ``cuda_sync`` rows, present only when the recorder enabled them."""

MEMORY_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,
    "bytes": pl.Int64,  # + allocated, - freed
    "address": pl.Int64,
    "allocated": pl.Int64,  # total after the event, bytes
    "reserved": pl.Int64,
    "device": pl.Int32,  # -1: host memory
    "thread": pl.Int32,
}
"""Columns of allocator events (``profile_memory=True``)."""

COUNTER_SCHEMA: dict[str, Any] = {
    "ts": pl.Int64,
    "dur": pl.Int64,
    "name": pl.Categorical,
    "range": pl.Categorical,  # kernel or range the counter belongs to
    "value": pl.Float64,
}

INPUTS_SCHEMA: dict[str, Any] = {
    "dims": pl.String,  # JSON text: [[8,128],[128,64]]
    "types": pl.String,  # JSON text: ["float","c10::BFloat16"]
    "strides": pl.String,  # JSON text; empty: not recorded
    "concrete": pl.String,  # JSON text; empty: not recorded
}
"""Columns of the distinct input descriptions of operators. Operators with equal inputs share
one."""

COMMS_SCHEMA: dict[str, Any] = {
    "collective": pl.String,  # allreduce, _allgather_base, …
    "in_elements": pl.Int64,
    "out_elements": pl.Int64,
    "group_size": pl.Int64,
    "dtype": pl.String,
    "group": pl.String,  # process group name
    "group_description": pl.String,
    "ranks": pl.String,  # JSON text
    "in_split": pl.String,
    "out_split": pl.String,
    "sequence": pl.Int64,
    "source": pl.Int64,  # sending rank of a send and its receive
    "target": pl.Int64,  # receiving rank; both null if not recorded
}
"""Columns of the distinct descriptions of collectives."""

THREADS_SCHEMA: dict[str, Any] = {"pid": pl.String, "tid": pl.String, "name": pl.String}


@dataclass(frozen=True)
class Device:
    """A GPU as ``deviceProperties`` describes it. ``None`` in a field if the file does not have
    it."""

    id: int
    name: str | None = None
    memory_bytes: int | None = None
    sms: int | None = None
    compute: tuple[int, int] | None = None
    max_threads_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_per_sm: int | None = None
    shared_per_block_optin: int | None = None
    warp_size: int | None = None


class Capture(NamedTuple):
    """Result of matching the replays of a CUDA graph with a recording of its capture."""

    row: int
    """First row of ``cpu`` from the capture: operators and frames of zero length."""
    launches: int | None
    """Number of launches in the graph, or ``None`` if several graphs were captured."""
    matched: float
    """Share of the replayed work that has a launch in the capture."""


@dataclass(frozen=True)
class TraceMeta:
    """Metadata of a trace: the file's own description, and what was lost while reading it."""

    path: str
    format: str = KINETO
    """Name of the reader. For a trace that advisor wrote itself, the reader of its source."""
    framework: str | None = None
    """Framework of the program: ``pytorch``, ``tensorflow``, ``jax``, ``cuda`` (C++ with CUDA or
    HIP and none of these), or ``None`` when nothing identifies it."""
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    devices: tuple[Device, ...] = ()
    start_ns: int = 0
    """Absolute time of the trace's 0, ns on the clock of ``clock``."""
    clock: str = "unix"
    """Kind of clock: ``unix`` when ``start_ns`` is Unix time, else ``arbitrary``."""
    end_ns: int = 0
    """End of the last event, ns from the trace's start."""
    record_shapes: bool | None = None
    with_stack: bool | None = None
    profile_memory: bool | None = None
    cuda_runtime: int | None = None
    cuda_driver: int | None = None
    vendor: str | None = None
    """Vendor of the GPU: ``nvidia``, ``amd`` or ``None`` when nothing identifies it."""
    events_read: int = 0
    events_dropped: dict[str, int] = field(default_factory=dict)
    """Number of events that were left out, by reason."""
    truncated: bool = False
    damage: str | None = None
    """Error message of the unpacker, or ``None`` if the file is intact."""
    bytes_read: int = 0
    """Uncompressed size, bytes."""
    sync_events: bool = False
    """Whether ``cuda_sync`` rows were recorded."""
    nesting_repaired: int = 0
    """Number of host events shortened to end with the event around them."""
    window: int = 0
    """Number of the rank's profiler window, from 0."""
    example: bool = field(default=False, compare=False)
    """Whether code wrote the trace as an example. A small size then means nothing."""
    snapshot: MemorySnapshot | None = None
    """Allocator snapshot, if the file is one. The trace's tables are then empty."""
    kernel_profiles: KernelProfiles | None = None
    """Counters of single kernels, from a file of their own or given with a trace."""
    compilation: CompileLog | None = None
    """Logs of torch.compile, from a file of their own or given with a trace."""
    flight: tuple[FlightDump, ...] = ()
    """Dumps of the flight recorder, from a file of their own or given with a trace."""
    network: NetworkLog | None = None
    """Logs of NCCL and topologies, from a file of their own or given with a trace."""
    layer_times: bool = False
    """Whether rows are the layers of one inference, with mean times (``Reader.layer_times``)."""
    step_marks: str | None = None
    """Kind of step marks, one of STEP_MARKS, if they are not PyTorch's. The marks are then ranges
    ``step #<n>``."""
    step_ranges: str | None = None
    """Regular expression of ranges that the user declared to be steps, or ``None``."""
    gpu: str | None = None
    """GPU that ran the work according to the user (``GpuSpec.name``), or ``None``."""

    cpu_samples: pl.DataFrame | None = None
    """Samples of running threads: ``thread`` (row of ``threads``), ``ts``, ``end`` (ns, the time of
    the thread's next sample), ``name`` (function). ``None`` if not recorded."""
    capture: Capture | None = None
    """Recording that names the work of replayed graphs, or ``None``."""

    @property
    def is_pytorch(self) -> bool:
        """Whether the program is written with PyTorch, as far as the trace shows."""
        return self.framework == PYTORCH or (self.framework is None and self.format == KINETO)

    @property
    def step_names(self) -> str:
        """Regular expression of ranges that mark steps: ``ProfilerStep#<n>`` for PyTorch, ``step
        #<n>`` for others (``step_marks``, or PyTorch's marks in older exports of advisor)."""
        return _STEP if self.step_marks is None else _MARKED_STEP


@dataclass(frozen=True)
class Trace:
    """Tables of one rank's profiler window, with a fixed schema. Treat the frames as read-only.

    Times are int64 nanoseconds from the trace's start. Every device row has its launch row and
    operator, and every host row its parent. Null means not measured."""

    cpu: pl.DataFrame
    gpu: pl.DataFrame
    sync: pl.DataFrame
    memory: pl.DataFrame
    counters: pl.DataFrame
    inputs: pl.DataFrame
    comms: pl.DataFrame
    threads: pl.DataFrame
    meta: TraceMeta

    @cached_property
    def main_thread(self) -> int | None:
        """Row of ``threads`` that drives the step: the thread with step marks, else with pid = tid,
        else with most host rows. ``None`` without host rows."""
        host = self.cpu.filter(pl.col("kind") != "overhead")
        if host.is_empty():
            return None
        steps = host.filter(
            (pl.col("kind") == "annotation")
            & pl.col("name").cast(pl.String).str.contains(self.meta.step_names)
        )
        if not steps.is_empty():
            return int(steps["thread"][0])
        counts = host.group_by("thread").len().sort("len", descending=True)
        main_threads = self.threads.with_row_index("thread").filter(pl.col("pid") == pl.col("tid"))
        for thread in counts["thread"].to_list():
            if thread in main_threads["thread"]:
                return int(thread)
        return int(counts["thread"][0])

    def device(self, device_id: int) -> Device | None:
        """Return the properties of a device, or ``None`` if the file does not have them."""
        return next((d for d in self.meta.devices if d.id == device_id), None)

    def working_device(self, device_id: int) -> Device | None:
        """Return the properties of a device that ran work of this file, or ``None`` if unknown.

        The properties may number a device differently from the events (HIP_VISIBLE_DEVICES,
        containers). If all listed devices are of one model, the model is still known.
        """
        result = self.device(device_id)
        if result is None and self.meta.devices:
            devices = {replace(d, id=device_id) for d in self.meta.devices}
            result = devices.pop() if len(devices) == 1 else None
        if self.meta.gpu is not None and (result is None or result.name is None):
            result = replace(result or Device(device_id), name=self.meta.gpu)
        return result


def blank_trace(path: str, rank: int | None = None, **fields: Any) -> Trace:
    """Return an empty trace, for a run that never reached its profiled window, or for a file of
    another kind. ``fields``: fields of its ``meta``."""
    return Trace(
        cpu=pl.DataFrame(schema=CPU_SCHEMA),
        gpu=pl.DataFrame(schema=GPU_SCHEMA),
        sync=pl.DataFrame(schema=SYNC_SCHEMA),
        memory=pl.DataFrame(schema=MEMORY_SCHEMA),
        counters=pl.DataFrame(schema=COUNTER_SCHEMA),
        inputs=pl.DataFrame(schema=INPUTS_SCHEMA),
        comms=pl.DataFrame(schema=COMMS_SCHEMA),
        threads=pl.DataFrame(schema=THREADS_SCHEMA),
        meta=TraceMeta(**{"path": path, "rank": rank, "framework": PYTORCH, **fields}),
    )


@dataclass(frozen=True)
class Run:
    """Windows and ranks of a job: traces keyed by (rank, window).

    ``rank`` is -1 for a trace whose file and file name do not give it. A recorded run may have
    ranks without traces, or no trace at all: its window was never reached."""

    traces: dict[tuple[int, int], Trace]
    path: Path | None = None
    problems: tuple[str, ...] = ()
    """Problems: one line per file that could not be read or was left out."""
    recording: Recording | None = None
    """Data that the recorder wrote in addition to the traces, or ``None`` without a run
    directory."""
    unread: tuple[tuple[int, int], ...] = ()
    """(rank, window) of the run directory's traces that were not requested."""
    snapshots: dict[int, MemorySnapshot] = field(default_factory=dict)
    """Allocator snapshots by rank, of the ranks that have one."""
    logs: dict[str, Any] = field(default_factory=dict)
    """Logs in a run directory, by field of TraceMeta."""

    def __repr__(self) -> str:
        events = sum(trace.cpu.height + trace.gpu.height for trace in self.traces.values())
        counts = count_noun(len(self.ranks), "rank"), count_noun(len(self.traces), "window")
        return f"<Run: {', '.join(counts)}, {events:,} events>"

    @property
    def ranks(self) -> list[int]:
        """Ranks with traces, in ascending order."""
        return sorted({rank for rank, _ in self.traces})

    def window(self, rank: int, window: int | None = None) -> Trace:
        """Return a rank's trace of the given window, or of its first one."""
        windows = sorted(w for r, w in self.traces if r == rank)
        return self.traces[rank, windows[0] if window is None else window]
