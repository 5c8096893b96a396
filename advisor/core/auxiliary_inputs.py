"""Sources other than traces: the data of logs and dumps, and one :class:`AuxiliaryInput` per
source."""

from operator import attrgetter
from typing import Any, Final, Literal

from msgspec import Struct, field

from advisor.core.finding import Location, SkippedCheck


class AuxiliaryInput(Struct, frozen=True, kw_only=True):
    """Kind of a file without step times that a report can be made of without a trace."""

    name: str
    """Name, and ``Scope.step_source`` of a report on this input alone."""
    field: str
    """Field of :class:`~advisor.core.trace.TraceMeta` with the data of its files. May be empty."""
    description: str
    """Text for the report's heading. ``{count}``: number of items read, with the noun
    ``counted``."""
    counted: str = ""
    clear: str = ""
    """Verdict if no rule found anything."""
    skipped: SkippedCheck
    """Check that is skipped without a trace."""

    def is_in(self, meta: object) -> bool:
        """Return whether a TraceMeta has data of this kind."""
        name, _, path = self.field.partition(".")
        value: Any = getattr(meta, name)
        return bool(attrgetter(path)(value) if path and value is not None else value)


class GraphBreak(Struct, frozen=True, kw_only=True):
    """A line at which torch.compile ends one graph and begins the next."""

    file: str
    """File of the user's line."""
    line: int
    """Line number in the file."""
    function: str | None
    """Function around the line, or ``null`` if not recorded."""
    reason: str
    """Reason from dynamo, such as ``Failed to trace builtin operator``."""
    explanation: str
    """First sentence of dynamo's explanation. Empty if there is none."""
    hint: str
    """First hint of dynamo on what to change. Empty if there is none."""
    eager: bool
    """Whether no part of the function is compiled, because dynamo cannot resume after the break."""
    count: int
    """Number of times that it occurred while compiling."""
    frames: list[str] = field(default_factory=list)
    """Functions that are compiled after the break, by their numbers in a trace: ``1`` of
    ``Torch-Compiled Region: 1/0``."""
    idle_ns: float | None = None
    """Idle time of the device at the break, per step, ns, or ``null`` if not measured."""
    gain_ns: float | None = None
    """Time per step saved without the break, in the replay, ns, or ``null`` if not measured."""


class CompileCause(Struct, frozen=True, kw_only=True):
    """Reason why a function was recompiled, not compiled, or compiled without CUDA graphs."""

    function: str | None
    """Name of the function, or ``null`` if not recorded."""
    file: str | None
    """File in which the function begins, or ``null`` if not recorded."""
    line: int | None
    """Line at which the function begins, or ``null`` if not recorded."""
    reason: str
    """Failed guard, or the reason from torch.compile."""
    count: int
    """Number of times that it happened."""
    ns: float | None
    """Time of the compilations for this reason, ns, or ``null`` if not recorded."""


class FusedKernel(Struct, frozen=True, kw_only=True):
    """A kernel that inductor generated."""

    name: str
    """Name as in a trace."""
    operators: list[str]
    """Operators fused in it, such as ``aten.add``."""
    lines: list[Location]
    """Lines of the program with these operators. If several kernels have this name, lines of all of
    them. Empty if not recorded."""
    calls: float | None = None
    """Calls per step in the trace, or ``null`` if the kernel is not in a trace."""
    ns: float | None = None
    """Time per step in the trace, ns, or ``null`` if the kernel is not in a trace."""


class CompileLog(Struct, kw_only=True):
    """Data from structured logs of torch.compile (``TORCH_TRACE``)."""

    logs: int
    """Number of files, one per process. Each count and time is the largest of all processes."""
    compilations: int
    """Number of compiled frames, including recompiled ones."""
    ns: float
    """Time of all compilations, ns."""
    inductor_ns: float | None
    """Part of ``ns`` in inductor, ns, or ``null`` if not recorded."""
    breaks: list[GraphBreak]
    """Graph breaks, the most frequent first."""
    recompilations: list[CompileCause]
    """Recompilations by cause, the longest first."""
    not_compiled: list[CompileCause]
    """Functions that run as plain PyTorch, by cause."""
    without_cuda_graphs: list[CompileCause]
    """Graphs launched kernel by kernel, by cause."""
    kernels: list[FusedKernel] = field(default_factory=list)
    """Kernels that inductor generated. With a trace, longest first."""
    damaged: int = 0
    """Number of unreadable records."""


class CollectiveCall(Struct, frozen=True, kw_only=True):
    """A call of a collective by one rank."""

    rank: int
    """Rank that called it."""
    group: str
    """Name of the process group, and its description."""
    operation: str
    """Operation, such as ``all_reduce``, or ``send 0->1`` and ``recv 1<-0`` by ranks in the
    group."""
    sequence: int
    """Number in the group, as torch counts collectives, sends and receives."""
    sizes: list[list[int]]
    """Shapes of its inputs."""
    dtypes: list[str]
    """Number formats of its inputs."""
    state: str
    """State of the call: ``scheduled``, ``started`` or ``completed``."""
    where: Location | None
    """Innermost line outside libraries, or ``null`` if the dump has no stacks."""


class CollectiveProblem(Struct, frozen=True, kw_only=True):
    """The first collective of a process group that does not match or does not end."""

    kind: Literal[
        "not called", "no dump", "operation", "order", "size", "dtype", "deadlock",
        "unknown members", "unfinished",
    ]  # fmt: skip
    """Kind of problem, in the order of these values: Ranks have not called the collective. Members
    left no dump. Calls differ in operation, order, size or dtype. Ranks wait for each other in
    different groups. Some wait in a group with unrecorded members. All called it, but it has not
    ended."""
    ranks: list[int]
    """Ranks that cause the problem. If calls differ, the ranks that differ from the majority."""
    waiting: list[int]
    """Ranks that called the collective and have not finished."""
    calls: list[CollectiveCall]
    """Calls of the collective, one for each variant, most frequent first."""
    last: list[CollectiveCall]
    """Last call of each of ``ranks``, in any group."""


class FlightRecord(Struct, kw_only=True):
    """Flight-recorder dumps, compared across ranks."""

    dumps: int
    """Number of files, one per rank."""
    ranks: list[int]
    """Ranks with a dump."""
    absent: list[int]
    """Ranks of the job without a dump."""
    groups: int
    """Number of process groups with calls."""
    calls: int
    """Number of collectives, sends and receives in all dumps."""
    problems: list[CollectiveProblem]
    """Problems, causes first: their ranks wait nowhere else. Empty if all calls match and ended."""
    damaged: int = 0
    """Number of unreadable entries."""


class NetworkLog(Struct, frozen=True, kw_only=True):
    """The path between GPUs, from logs of NCCL or RCCL (``NCCL_DEBUG=INFO``) and topologies."""

    files: int
    """Number of logs and topologies."""
    versions: list[str] = field(default_factory=list)
    """Versions of the library: ``NCCL 2.21.5+cuda12.4``."""
    hosts: int = 0
    """Number of hosts with lines in the logs, or 0 for a topology alone."""
    ranks: int | None = None
    """Number of ranks of the largest communicator, or ``null`` if not logged."""
    node_ranks: int | None = None
    """Number of the communicator's ranks on one host, or ``null`` if not logged."""
    networks: dict[str, int] = field(default_factory=dict)
    """Number of processes by their network: ``IB``, ``Socket``, or a plugin."""
    interfaces: list[str] = field(default_factory=list)
    """IP interfaces that NET/Socket uses."""
    devices: list[str] = field(default_factory=list)
    """InfiniBand and RoCE devices: ``mlx5_0:1/IB``."""
    without_device: int = 0
    """Number of processes in which NET/IB found no device."""
    no_verbs: bool = False
    """Whether libibverbs could not be opened."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that NCCL reports, with their values."""
    paths: dict[str, int] = field(default_factory=dict)
    """Connections by transport: ``P2P/CUMEM``, ``SHM``, ``NET/IB/GDRDMA``, ``NET/Socket``."""
    gdr_enabled: int = 0
    """Number of pairs of GPU and adapter, or of adapters, with GPUDirect RDMA."""
    gdr_disabled: dict[str, int] = field(default_factory=dict)
    """Number of pairs without GPUDirect RDMA, by reason. Empty if the logs give none."""
    p2p_disabled: int = 0
    """Number of pairs of GPUs whose driver reports that peer access is off."""
    channels: int | None = None
    """Minimum number of channels for collectives of communicators of all ranks, or ``null``."""
    nvls_channels: int | None = None
    """Minimum number of channels for NVLink SHARP of these communicators, or ``null``."""
    nvls: bool | None = None
    """Whether multicast in the NVSwitch is available, or ``null`` if unknown."""
    ring: str | None = None
    """Types of the ring's links inside a node and to the network, such as ``NVL/PIX``."""
    ring_gb_per_s: float | None = None
    """Ring bandwidth that NCCL expects, GB/s, or ``null`` if unknown."""
    nic_gb_per_s: float | None = None
    """Total bandwidth of a node's adapters in one direction, GB/s, or ``null`` if unknown."""
    algorithms: dict[str, int] = field(default_factory=dict)
    """Algorithms chosen for collectives (``NCCL_DEBUG_SUBSYS=TUNING``): ``RING/SIMPLE``."""
    warnings: dict[str, int] = field(default_factory=dict)
    """Warnings of NCCL with their counts, the most frequent first."""
    gpus: int = 0
    """Number of GPUs in the topology (``nvidia-smi topo -m``, ``rocm-smi --showtopo``)."""
    gpu_links: dict[str, int] = field(default_factory=dict)
    """Number of pairs of GPUs by link: ``NV18``, ``PIX``, ``SYS``, ``XGMI``."""
    nics: list[str] = field(default_factory=list)
    """Network adapters of the topology."""
    nic_links: dict[str, int] = field(default_factory=dict)
    """Number of GPUs by the link to their nearest adapter."""


RECORD_TRACE: Final = "a profiler trace, or 'advisor record', "
RECORD_IN_FOLDER: Final = RECORD_TRACE + "in the same folder"

SNAPSHOT: Final = AuxiliaryInput(
    name="snapshot",
    field="snapshot",
    description="a memory snapshot, {count}",
    counted="event",
    skipped=SkippedCheck(
        what="time: steps, kernels, copies and syncs, and what they cost",
        why="a memory snapshot only shows memory",
        record=RECORD_TRACE + "and the snapshot with --memory-snapshot",
    ),
)
COUNTERS: Final = AuxiliaryInput(
    name="counters",
    field="kernel_profiles.kernels",
    description="a kernel profile of {count}",
    counted="kernel",
    skipped=SkippedCheck(
        what="steps, idle time, and the gain per step",
        why="hardware counters of single kernels say nothing about the program around them",
        record="a profiler trace of the program, and the report with --kernel-profile",
    ),
)
TRITON_CACHE: Final = AuxiliaryInput(
    name="Triton cache",
    field="kernel_profiles.compiled",
    description="{count} compiled by Triton",
    counted="kernel",
    skipped=SkippedCheck(
        what="steps, idle time, and the gain per step",
        why="a cache of compiled kernels says nothing about the program around them",
        record="a profiler trace of the program, and the cache with --kernel-profile",
    ),
)
FLIGHT_RECORDER: Final = AuxiliaryInput(
    name="flight recorder",
    field="flight",
    description="dumps of the flight recorder",
    skipped=SkippedCheck(
        what="steps and how long they take",
        why="a flight-recorder dump says nothing about the steps",
        record=RECORD_IN_FOLDER,
    ),
)
NETWORK_LOG: Final = AuxiliaryInput(
    name="network log",
    field="network",
    description="logs of NCCL",
    clear="No fault in the path between GPUs. A trace shows how much of it is used.",
    skipped=SkippedCheck(
        what="steps, and the time of communication in them",
        why="a log of NCCL says nothing about the steps",
        record=RECORD_IN_FOLDER,
    ),
)
COMPILE_LOG: Final = AuxiliaryInput(
    name="compile log",
    field="compilation",
    description="a log of torch.compile",
    skipped=SkippedCheck(
        what="steps, idle time, and what graph breaks cost",
        why="a log of torch.compile says nothing about the steps",
        record=RECORD_TRACE + "and the log with --compile-log",
    ),
)
AUXILIARY_INPUTS: Final = (
    SNAPSHOT, COUNTERS, TRITON_CACHE, FLIGHT_RECORDER, NETWORK_LOG, COMPILE_LOG,
)  # fmt: skip
"""Auxiliary inputs in order of precedence. The first one in a folder determines the verdict."""
AUXILIARY_INPUTS_BY_NAME: Final = {kind.name: kind for kind in AUXILIARY_INPUTS}


class FlightCall(Struct, frozen=True, kw_only=True):
    """An entry of the flight recorder's ring buffer."""

    group: str
    """Name of the process group."""
    description: str
    """Description of the process group, ``default_pg``."""
    operation: str
    """Operation without the backend: ``all_reduce``, ``send 0->1``."""
    sequence: int
    p2p: bool
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    """State of the call: ``scheduled``, ``started`` or ``completed``."""
    where: Location | None


class FlightDump(Struct, frozen=True, kw_only=True):
    """A file that the flight recorder of one rank dumped."""

    path: str
    rank: int | None
    """Rank in the file's name, or ``None`` if it has no number."""
    calls: tuple[FlightCall, ...]
    """Calls in order of time."""
    members: dict[str, tuple[int, ...]]
    """Global ranks of the process groups, by name, if the backend keeps them."""
    damaged: int
