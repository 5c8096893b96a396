"""Sources without a trace: the data of logs and dumps, and one :class:`AuxiliaryInput` for each
source."""

from operator import attrgetter
from typing import Any, Final, Literal

from msgspec import Struct, field

from advisor.core.finding import Location, SkippedCheck


class AuxiliaryInput(Struct, frozen=True, kw_only=True):
    """Kind of a file without step times, of which a report can be made without a trace."""

    name: str
    """Name, which is ``Scope.step_source`` of a report of it alone."""
    field: str
    """Field of :class:`~advisor.core.trace.TraceMeta` with the data of its files; empty: none."""
    description: str
    """Text for the report's heading. ``{count}``: what was read, with its noun ``counted``."""
    counted: str = ""
    clear: str = ""
    """Verdict where no rule found anything."""
    skipped: SkippedCheck
    """Checks that are skipped without a trace."""

    def is_in(self, meta: object) -> bool:
        """Whether a TraceMeta has data of this kind."""
        first, _, rest = self.field.partition(".")
        value: Any = getattr(meta, first)
        return bool(attrgetter(rest)(value) if rest and value is not None else value)


class GraphBreak(Struct, frozen=True, kw_only=True):
    """A line at which torch.compile ends one graph and begins the next."""

    file: str
    """File of the user's line."""
    line: int
    """Line number in the file."""
    function: str | None
    """Function around the line; ``null``: not recorded."""
    reason: str
    """Reason that dynamo gives: ``Failed to trace builtin operator``."""
    explanation: str
    """First sentence of dynamo's explanation; empty: none."""
    hint: str
    """First hint of dynamo on what to change; empty: none."""
    eager: bool
    """Whether nothing of the function is compiled: dynamo cannot go on after the break."""
    count: int
    """Number of times that it was met while compiling."""
    frames: list[str] = field(default_factory=list)
    """Functions that are compiled from there on, by their numbers in a trace: ``1`` of
    ``Torch-Compiled Region: 1/0``."""
    idle_ns: float | None = None
    """Idle time of the device at the break, per step, ns; ``null``: not measured."""
    gain_ns: float | None = None
    """Time that the step gains without the break, by its replay, ns; ``null``: not measured."""


class CompileCause(Struct, frozen=True, kw_only=True):
    """Cause that a function was compiled again, not compiled or compiled without CUDA graphs."""

    function: str | None
    """Name of the function; ``null``: not recorded."""
    file: str | None
    """File in which the function begins; ``null``: not recorded."""
    line: int | None
    """Line at which it begins; ``null``: not recorded."""
    reason: str
    """Guard that failed, or reason that torch.compile gives."""
    count: int
    """Number of times that it happened."""
    ns: float | None
    """Time of these compilations, ns; ``null``: not recorded."""


class FusedKernel(Struct, frozen=True, kw_only=True):
    """A kernel that inductor generated."""

    name: str
    """Name as in a trace."""
    operators: list[str]
    """Operators that are fused in it: ``aten.add``."""
    lines: list[Location]
    """Lines of the program that these operators are from; where a name stands for several kernels,
    of all of them. Empty: not recorded."""
    calls: float | None = None
    """Calls per step of the trace; ``null``: no trace, or the kernel is not in it."""
    ns: float | None = None
    """Time per step of the trace, ns; ``null``: as above."""


class CompileLog(Struct, kw_only=True):
    """Data from structured logs of torch.compile (``TORCH_TRACE``)."""

    logs: int
    """Files, one a process. Counts and times are those of the process that has most of each."""
    compilations: int
    """Number of frames that were compiled, again or for the first time."""
    ns: float
    """Time of these compilations, ns."""
    inductor_ns: float | None
    """Part of that time in inductor, ns; ``null``: not recorded."""
    breaks: list[GraphBreak]
    """Graph breaks, the most frequent first."""
    recompilations: list[CompileCause]
    """Recompilations by cause, the longest first."""
    not_compiled: list[CompileCause]
    """Functions that run as plain PyTorch, by cause."""
    without_cuda_graphs: list[CompileCause]
    """Graphs that are launched kernel by kernel, by cause."""
    kernels: list[FusedKernel] = field(default_factory=list)
    """Kernels that inductor generated; beside a trace by time, the largest first."""
    damaged: int = 0
    """Number of records that cannot be read."""


class CollectiveCall(Struct, frozen=True, kw_only=True):
    """A collective as one rank called it."""

    rank: int
    """Rank that called it."""
    group: str
    """Name of the process group, and its description."""
    operation: str
    """Operation: ``all_reduce``; ``send 0->1`` and ``recv 1<-0`` by ranks in the group."""
    sequence: int
    """Number in the group, as torch counts collectives, and sends and receives."""
    sizes: list[list[int]]
    """Shapes of its inputs."""
    dtypes: list[str]
    """Number formats of its inputs."""
    state: str
    """State of the call: ``scheduled``, ``started`` or ``completed``."""
    where: Location | None
    """Innermost line outside of libraries; ``null``: no stacks in the dump."""


class CollectiveProblem(Struct, frozen=True, kw_only=True):
    """The first collective of a process group that does not match or does not end."""

    kind: Literal[
        "not called", "no dump", "operation", "order", "size", "dtype", "deadlock",
        "unknown members", "unfinished",
    ]  # fmt: skip
    """Kind of problem, in the order of these values. Ranks have not called it. Members left no
    dump. Calls differ in operation, order, size or dtype. Ranks wait for each other in different
    groups. Some wait in a group whose other members are not recorded. All called it and it has not
    ended."""
    ranks: list[int]
    """Ranks that cause the problem; where calls differ, those that differ from the majority."""
    waiting: list[int]
    """Ranks that are in it and have not finished."""
    calls: list[CollectiveCall]
    """Calls of it, one for each way in which it was called, the most frequent first."""
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
    """Problems, causes first: their ranks wait nowhere else. Empty: all calls match and ended."""
    damaged: int = 0
    """Number of entries that cannot be read."""


class NetworkLog(Struct, frozen=True, kw_only=True):
    """The path between GPUs, by logs of NCCL or RCCL (``NCCL_DEBUG=INFO``) and topologies."""

    files: int
    """Number of logs and topologies."""
    versions: list[str] = field(default_factory=list)
    """Versions of the library: ``NCCL 2.21.5+cuda12.4``."""
    hosts: int = 0
    """Number of hosts with lines in the logs; 0: a topology alone."""
    ranks: int | None = None
    """Number of ranks of the largest communicator; ``null``: not in the logs."""
    node_ranks: int | None = None
    """Number of its ranks on one host; ``null``: not in the logs."""
    networks: dict[str, int] = field(default_factory=dict)
    """Number of processes by the network that they chose: ``IB``, ``Socket``, a plugin."""
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
    """Number of pairs without GPUDirect RDMA, by reason; empty: the logs give none."""
    p2p_disabled: int = 0
    """Number of pairs of GPUs whose driver reports that peer access is off."""
    channels: int | None = None
    """Channels for collectives, the fewest of any communicator of all ranks; ``null``: unknown."""
    nvls_channels: int | None = None
    """Channels for NVLink SHARP, counted likewise; ``null``: unknown."""
    nvls: bool | None = None
    """Whether multicast in the NVSwitch is available; ``null``: unknown."""
    ring: str | None = None
    """Types of the links in the ring inside of a node and to the network: ``NVL/PIX``."""
    ring_gb_per_s: float | None = None
    """Bandwidth that NCCL expects of the ring, GB/s; ``null``: unknown."""
    nic_gb_per_s: float | None = None
    """Bandwidth of a node's adapters together, in one direction, GB/s; ``null``: unknown."""
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
BESIDE: Final = RECORD_TRACE + "in the same folder"

SNAPSHOT: Final = AuxiliaryInput(
    name="snapshot",
    field="snapshot",
    description="a memory snapshot, {count}",
    counted="event",
    skipped=SkippedCheck(
        what="time: steps, kernels, copies, syncs, and what any of them costs",
        why="a memory snapshot tells of memory alone",
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
        why="hardware counters of single kernels say nothing of the program around them",
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
        why="a cache of compiled kernels says nothing of the program around them",
        record="a profiler trace of the program, and the cache with --kernel-profile",
    ),
)
FLIGHT_RECORDER: Final = AuxiliaryInput(
    name="flight recorder",
    field="flight",
    description="dumps of the flight recorder",
    skipped=SkippedCheck(
        what="steps and how long they take",
        why="a flight-recorder dump says nothing of the steps",
        record=BESIDE,
    ),
)
NETWORK_LOG: Final = AuxiliaryInput(
    name="network log",
    field="network",
    description="logs of NCCL",
    clear="No fault in the path between GPUs; how much of it is used needs a trace.",
    skipped=SkippedCheck(
        what="steps, and what communication takes of them",
        why="a log of NCCL says nothing of the steps",
        record=BESIDE,
    ),
)
COMPILE_LOG: Final = AuxiliaryInput(
    name="compile log",
    field="compilation",
    description="a log of torch.compile",
    skipped=SkippedCheck(
        what="steps, idle time, and what graph breaks cost",
        why="a log of torch.compile says nothing of the steps",
        record=RECORD_TRACE + "and the log with --compile-log",
    ),
)
AUXILIARY_INPUTS: Final = (
    SNAPSHOT, COUNTERS, TRITON_CACHE, FLIGHT_RECORDER, NETWORK_LOG, COMPILE_LOG,
)  # fmt: skip
"""Auxiliary inputs in order of precedence: of several in one folder the first has the verdict."""
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
    """Rank in the file's name; ``None``: it has no number."""
    calls: tuple[FlightCall, ...]
    """Calls in the order in which they were made."""
    members: dict[str, tuple[int, ...]]
    """Global ranks of the process groups, by name, as far as the backend keeps them."""
    damaged: int
