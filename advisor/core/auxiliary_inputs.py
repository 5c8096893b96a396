"""Sources without a trace: what logs and dumps tell, as data, and one :class:`AuxiliaryInput` for
each source."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, Literal

from msgspec import Struct, field

from advisor.core.finding import Location, SkippedCheck


class AuxiliaryInput(Struct, frozen=True, kw_only=True):
    """A kind of file that a report can be made of alone, and in which no step has a length."""

    name: str
    """``Scope.step_source`` of a report of it alone."""
    field: str
    """Of :class:`~advisor.core.trace.TraceMeta`, with what its files hold; empty: there is none."""
    description: str
    """In the heading of the report. ``{count}``: what was read, with its noun ``counted``."""
    counted: str = ""
    clear: str = ""
    """The verdict where no rule found anything."""
    skipped: SkippedCheck
    """What is not checked without a trace."""

    def is_in(self, meta: object) -> bool:
        """A TraceMeta has some."""
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
    """What dynamo says: ``Failed to trace builtin operator``."""
    explanation: str
    """Its first sentence on it; empty: none."""
    hint: str
    """Its first hint on what to change; empty: none."""
    eager: bool
    """Nothing of the function is compiled: dynamo cannot go on after the break."""
    count: int
    """How often it was met while compiling."""
    frames: list[str] = field(default_factory=list)
    """Functions that are compiled from there on, by their numbers in a trace: ``1`` of
    ``Torch-Compiled Region: 1/0``."""
    idle_ns: float | None = None
    """Idle time of the device at it, per step, ns; ``null``: not measured."""
    gain_ns: float | None = None
    """What the step gains without that, by its replay, ns; ``null``: not measured."""


class CompileCause(Struct, frozen=True, kw_only=True):
    """Why a function was compiled again, not compiled, or compiled without CUDA graphs."""

    function: str | None
    """The function; ``null``: not recorded."""
    file: str | None
    """File in which the function begins."""
    line: int | None
    """Line at which it begins."""
    reason: str
    """The guard that failed, or what torch.compile says."""
    count: int
    """How often."""
    ns: float | None
    """Time of these compilations, ns; ``null``: not recorded."""


class FusedKernel(Struct, frozen=True, kw_only=True):
    """A kernel that inductor generated."""

    name: str
    """As in a trace."""
    operators: list[str]
    """What is fused in it: ``aten.add``."""
    lines: list[Location]
    """Of the program, that these operators are from; where a name stands for several kernels, of
    all of them. Empty: not recorded."""
    calls: float | None = None
    """Per step of the trace; ``null``: no trace, or it is not in it."""
    ns: float | None = None
    """Its time per step, ns; ``null``: as above."""


class CompileLog(Struct, kw_only=True):
    """What structured logs of torch.compile (``TORCH_TRACE``) tell."""

    logs: int
    """Files, one a process. Counts and times are those of the process that has most of each."""
    compilations: int
    """Frames that were compiled, again or for the first time."""
    ns: float
    """Time that took, ns."""
    inductor_ns: float | None
    """The part in inductor; ``null``: not recorded."""
    breaks: list[GraphBreak]
    """The most frequent first."""
    recompilations: list[CompileCause]
    """The longest first."""
    not_compiled: list[CompileCause]
    """Functions that run as plain PyTorch."""
    without_cuda_graphs: list[CompileCause]
    """Graphs that are launched kernel by kernel."""
    kernels: list[FusedKernel] = field(default_factory=list)
    """What inductor generated; beside a trace by time, the largest first."""
    damaged: int = 0
    """Records that cannot be read."""


class CollectiveCall(Struct, frozen=True, kw_only=True):
    """A collective as one rank called it."""

    rank: int
    """The rank."""
    group: str
    """Name of the process group, and its description."""
    operation: str
    """``all_reduce``; ``send 0->1`` and ``recv 1<-0`` by ranks in the group."""
    sequence: int
    """Its number in the group, as torch counts collectives, and sends and receives."""
    sizes: list[list[int]]
    """Shapes of its inputs."""
    dtypes: list[str]
    """Of its inputs."""
    state: str
    """``scheduled``, ``started`` or ``completed``."""
    where: Location | None
    """The innermost line outside of libraries; ``null``: no stacks in the dump."""


class CollectiveProblem(Struct, frozen=True, kw_only=True):
    """The first collective of a process group that does not match or does not end."""

    kind: Literal[
        "not called", "no dump", "operation", "order", "size", "dtype", "deadlock",
        "unknown members", "unfinished",
    ]  # fmt: skip
    """What is wrong, in the order of these values. Ranks have not called it. Members left no dump.
    Calls differ in operation, order, size or dtype. Ranks wait for each other in different
    groups. Some wait in a group whose other members are not recorded. All called it and it has
    not ended."""
    ranks: list[int]
    """Those it is due to; where calls differ, those that differ from most."""
    waiting: list[int]
    """Ranks that are in it and have not finished."""
    calls: list[CollectiveCall]
    """One for each way in which it was called, the most frequent first."""
    last: list[CollectiveCall]
    """What ``ranks`` called last, in any group."""


class FlightRecord(Struct, kw_only=True):
    """Flight-recorder dumps, compared across ranks."""

    dumps: int
    """Files, one per rank."""
    ranks: list[int]
    """Ranks with a dump."""
    absent: list[int]
    """Ranks of the job without one."""
    groups: int
    """Process groups with calls."""
    calls: int
    """Collectives, sends and receives in all dumps."""
    problems: list[CollectiveProblem]
    """The cause first: those whose ranks wait nowhere else. Empty: all calls match and ended."""
    damaged: int = 0
    """Entries that cannot be read."""


class NetworkLog(Struct, frozen=True, kw_only=True):
    """The path between GPUs, by logs of NCCL or RCCL (``NCCL_DEBUG=INFO``) and topologies."""

    files: int
    """Logs and topologies."""
    versions: list[str] = field(default_factory=list)
    """``NCCL 2.21.5+cuda12.4``."""
    hosts: int = 0
    """With lines in the logs; 0: a topology alone."""
    ranks: int | None = None
    """Of the largest communicator."""
    node_ranks: int | None = None
    """Its ranks on one host."""
    networks: dict[str, int] = field(default_factory=dict)
    """``IB``, ``Socket``, a plugin: processes that chose it."""
    interfaces: list[str] = field(default_factory=list)
    """IP interfaces that NET/Socket uses."""
    devices: list[str] = field(default_factory=list)
    """InfiniBand and RoCE devices: ``mlx5_0:1/IB``."""
    without_device: int = 0
    """Processes in which NET/IB found no device."""
    no_verbs: bool = False
    """libibverbs could not be opened."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that NCCL reports."""
    paths: dict[str, int] = field(default_factory=dict)
    """Connections by transport: ``P2P/CUMEM``, ``SHM``, ``NET/IB/GDRDMA``, ``NET/Socket``."""
    gdr_enabled: int = 0
    """Pairs of GPU and adapter, or adapters, with GPUDirect RDMA."""
    gdr_disabled: dict[str, int] = field(default_factory=dict)
    """Those without, by reason; empty: none is said."""
    p2p_disabled: int = 0
    """Pairs of GPUs whose driver reports that peer access is off."""
    channels: int | None = None
    """For collectives, the fewest of any communicator of all ranks."""
    nvls_channels: int | None = None
    """For NVLink SHARP."""
    nvls: bool | None = None
    """Multicast in the NVSwitch is available."""
    ring: str | None = None
    """Types of the links in the ring inside of a node and to the network: ``NVL/PIX``."""
    ring_gb_per_s: float | None = None
    """What NCCL expects of the ring."""
    nic_gb_per_s: float | None = None
    """Of the adapters of a node together, in one direction."""
    algorithms: dict[str, int] = field(default_factory=dict)
    """Chosen for collectives (``NCCL_DEBUG_SUBSYS=TUNING``): ``RING/SIMPLE``."""
    warnings: dict[str, int] = field(default_factory=dict)
    """NCCL's warnings, the most frequent first."""
    gpus: int = 0
    """In the topology (``nvidia-smi topo -m``, ``rocm-smi --showtopo``)."""
    gpu_links: dict[str, int] = field(default_factory=dict)
    """Pairs of GPUs by link: ``NV18``, ``PIX``, ``SYS``, ``XGMI``."""
    nics: list[str] = field(default_factory=list)
    """Adapters of the topology."""
    nic_links: dict[str, int] = field(default_factory=dict)
    """GPUs by the link to their nearest adapter."""


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
        record=RECORD_TRACE + "and the snapshot with --memory",
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
        record="a profiler trace of the program, and the report with --kernels",
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
        record="a profiler trace of the program, and the cache with --kernels",
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
SOURCES: Final = (SNAPSHOT, COUNTERS, TRITON_CACHE, FLIGHT_RECORDER, NETWORK_LOG, COMPILE_LOG)
"""Of several in one folder the first has the verdict."""
AUXILIARY_INPUTS_BY_NAME: Final = {kind.name: kind for kind in SOURCES}


class FlightCall(Struct, frozen=True, kw_only=True):
    """An entry of the recorder's ring buffer."""

    group: str
    """Name of the process group."""
    description: str
    """Its description, ``default_pg``."""
    operation: str
    """Without the backend: ``all_reduce``, ``send 0->1``."""
    sequence: int
    p2p: bool
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    state: str
    """``scheduled``, ``started`` or ``completed``."""
    where: Location | None


class FlightDump(Struct, frozen=True, kw_only=True):
    """A file."""

    path: str
    rank: int | None
    """By the file's name; ``None``: it has no number."""
    calls: tuple[FlightCall, ...]
    """In the order in which they were called."""
    members: dict[str, tuple[int, ...]]
    """Global ranks of the process groups, by name, as far as the backend keeps them."""
    damaged: int
