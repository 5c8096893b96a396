"""A job to simulate: its layout, its model, its machines, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.simulation.measured import Measured, measured

Ranks = NDArray[np.int64]

HEALTHY = "healthy"
FAULTS = (
    "slow_device",  # the clock of one GPU is throttled: all its kernels are longer
    "slow_host",  # launches of a rank, or of a host's ranks, take longer than its kernels
    "slow_input",  # the loader of a rank, or of a host's ranks
    "slow_link",  # collectives of a host's or a rack's groups
    "moving",  # more data on another rank each step
    "expert_imbalance",  # one expert is asked for most
    "pipeline_imbalance",  # one stage has more to do
)
EVEN = "even"
"""``Fault.unit`` of a pipeline where all stages have equal shares of what one had too much."""
RANKS_PER_HOST = 8
LAYOUTS = ("ddp", "fsdp", "hybrid", "parallel", "experts")


class Kernel(NamedTuple):
    """A kernel and the operator that launches it."""

    op: str
    name: str
    family: str
    ns: float
    """Time on a healthy device, without noise."""
    blocks: int = 432
    threads: int = 256
    query: tuple[int, int, int, int] | None = None
    """Batch, sequence, heads and width of an attention."""


@dataclass(frozen=True)
class Fault:
    """A planted fault of ``ranks``; where it is ``moving``, of another one in each step."""

    kind: str
    unit: str = ""
    """``rank``, ``host``, ``rack``, ``expert``, ``stage``."""
    index: int = 0
    """Number of the unit."""
    ranks: tuple[int, ...] = ()
    factor: float = 1.0
    """Slowdown of what has the fault: kernels, launches, collectives, the experts' work, the
    stage."""
    wait_ns: float = 0.0
    """Time that the loader waits, ns per step."""


@dataclass(frozen=True)
class Groups:
    """Process groups of one kind: a row of ``members`` a group, all of one size."""

    name: str
    """``tp``, ``dp``, ``ep``, ``pp``, ``shard``, ``replicate``, ``world``."""
    members: Ranks
    stream: int
    first: int
    """Number of the first of them: PyTorch counts process groups over the whole job."""
    crosses: bool
    """Whether they reach over hosts."""

    def of(self, ranks: Ranks) -> Ranks:
        """Row of each of ``ranks``."""
        owner = np.full(int(self.members.max()) + 1, -1)
        owner[self.members] = np.arange(len(self.members))[:, None]
        return owner[ranks]


@dataclass(frozen=True)
class Job:
    """All that a simulation needs; the same seed gives the same."""

    seed: int
    ranks: int
    layout: str
    steps: int
    layers: int
    """Layers of a rank."""
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    expert: tuple[Kernel, ...]
    """Forward, of a layer with experts; twice as long backward."""
    head: tuple[Kernel, ...]
    """Embedding, loss and the like: once a micro-batch."""
    optimizer: tuple[Kernel, ...]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    micro_batches: int = 1
    groups: dict[str, Groups] = field(default_factory=dict)
    message: dict[str, float] = field(default_factory=dict)
    """Bytes a collective, by name of its groups."""
    rate: dict[str, float] = field(default_factory=dict)
    """Bytes a ns, likewise."""
    noise: float = 0.02
    """Standard deviation of the log of a kernel's length."""
    chip: float = 0.004
    """Relative spread of whole devices: no two chips are the same."""
    launch_ns: float = 30_000.0
    """Time from a launch to the next where the host is not held."""
    call_ns: float = 7_000.0
    latency_ns: float = 3_000.0
    """Time from the end of a launch call to the start of its kernel."""
    load_ns: float = 80_000.0
    """Time to load the next batch, where it is ready."""
    offset_ns: float = 5e6
    """Clocks of hosts differ by up to this, either way."""
    drift: float = 50e-6
    """Largest drift of the clocks."""
    lost: tuple[int, ...] = ()
    """Ranks without a file."""
    cut: tuple[int, ...] = ()
    """Ranks whose file is cut off."""
    fault: Fault | None = None
    hosts_per_rack: int = 2

    @property
    def hosts(self) -> int:
        """Machines."""
        return -(-self.ranks // RANKS_PER_HOST)

    def host_of(self, rank: int) -> int:
        """Number of the machine of a rank."""
        return rank // RANKS_PER_HOST

    def rack_of(self, rank: int) -> int:
        """Number of its rack."""
        return self.host_of(rank) // self.hosts_per_rack

    def host_name(self, rank: int) -> str:
        """``rack1-node03``."""
        return f"rack{self.rack_of(rank)}-node{self.host_of(rank):02d}"

    def stage(self, number: int) -> Ranks:
        """Ranks of a pipeline stage: the outermost dimension, as in Megatron."""
        size = self.ranks // self.pp
        return np.arange(number * size, (number + 1) * size)

    def mended(self) -> Job:
        """The same without the fault: what a stage has too much is spread over all of them, what
        an expert has too much is asked of the others; all else is not there."""
        fault = self.fault
        if fault is not None and fault.kind == "pipeline_imbalance":
            return replace(self, fault=replace(fault, unit=EVEN))
        return replace(self, fault=None)


class FaultTruth(NamedTuple):
    """The truth that a diagnosis has to find."""

    kind: str
    """``healthy`` or one of FAULTS."""
    unit: str
    name: str
    """``7``, ``rack1-node03``, ``rack1`` …; empty: nobody in particular."""
    ranks: tuple[int, ...]
    moves: bool
    step_ns: float
    """Mean of the job's step, as it is."""
    gain_ns: float
    """Time that it would be shorter by without the fault (``Job.mended``): simulated with the
    same noise."""


def draw(seed: int, ranks: int = 64, kind: str | None = None, steps: int = 6) -> Job:
    """A job chosen at random. ``kind``: of its fault (``healthy``: none); None: any fault.

    ``ranks``: a multiple of 16, or any number where a fault of that kind can be data-parallel.
    """
    even = ranks >= 16 and not ranks % 16
    rng = np.random.default_rng([seed, 1])
    if ranks < 2 or (not even and (kind is None or "ddp" not in _layouts(kind))):
        raise ValueError(f"{ranks} ranks: a multiple of 16 is simulated")
    kind = str(rng.choice(FAULTS)) if kind is None else kind
    layout = str(rng.choice(_layouts(kind))) if even else "ddp"
    known = measured()
    tp, pp, ep = _sizes(rng, layout, kind, ranks)
    layers = int(rng.integers(2, 4)) if pp > 1 else int(rng.integers(4, 9))
    micro = int(rng.integers(4, 7)) if pp > 1 else 1
    forward, backward, expert = _layer(rng, known, experts=ep > 1)
    once = sum(k.ns for k in (*forward, *backward)) + 3 * sum(k.ns for k in expert)
    # a host is slow where its kernels are short
    compute = rng.uniform(8e6, 25e6) if kind == "slow_host" else rng.uniform(20e6, 60e6)
    scale = compute / (once * layers * micro)
    forward, backward, expert = (
        tuple(k._replace(ns=max(3_000.0, k.ns * scale)) for k in part)
        for part in (forward, backward, expert)
    )
    hosts = -(-ranks // RANKS_PER_HOST)
    job = Job(
        seed=seed,
        ranks=ranks,
        layout=layout,
        steps=steps,
        layers=layers,
        forward=forward,
        backward=backward,
        expert=expert,
        head=_head(rng, known, compute / micro),
        optimizer=_optimizer(rng, known, compute),
        tp=tp,
        pp=pp,
        ep=ep,
        micro_batches=micro,
        noise=rng.uniform(0.01, 0.03),
        chip=rng.uniform(0.002, 0.006),
        launch_ns=known.host(rng, "between", 0.2, 0.5),
        call_ns=known.host(rng, "call", 0.1, 0.75),
        load_ns=rng.uniform(30e3, 200e3),
        drift=rng.uniform(5e-6, 50e-6),
        offset_ns=rng.uniform(0.1e6, 5e6),
        hosts_per_rack=max(2, min(8, hosts // 4)),
    )
    job = _with_groups(rng, known, job, compute)
    fault = _fault(rng, job, kind)
    spared = set(fault.ranks) if fault is not None and len(fault.ranks) == 1 else set()
    others = [r for r in range(ranks) if r not in spared]
    lost_ranks = rng.permutation(others)[: int(rng.integers(0, 4))].tolist()
    cuts = int(rng.integers(0, len(lost_ranks) + 1))
    return replace(job, fault=fault, cut=tuple(lost_ranks[:cuts]), lost=tuple(lost_ranks[cuts:]))


def _layouts(kind: str) -> tuple[str, ...]:
    if kind == "slow_link":  # over one group of all ranks, nothing tells where the slow link is
        return ("hybrid", "parallel", "experts")
    if kind == "expert_imbalance":
        return ("experts",)
    return ("parallel",) if kind == "pipeline_imbalance" else LAYOUTS


def _sizes(rng: Generator, layout: str, kind: str, ranks: int) -> tuple[int, int, int]:
    if layout == "parallel":
        pp = int(rng.choice([2, 4])) if kind == "pipeline_imbalance" else int(rng.choice([1, 2, 4]))
        fit = [n for n in (2, 4, 8) if ranks // (n * pp) >= 2]
        return int(rng.choice(fit)), pp, 1
    if layout == "experts":
        tp, pp = (int(n) for n in ((1, 1), (2, 1), (2, 2))[int(rng.integers(3))])
        fit = [n for n in (4, 8) if (ranks // (tp * pp)) // n >= 2]
        return tp, pp, int(rng.choice(fit or [2]))
    return 1, 1, 1


def _layer(
    rng: Generator, known: Measured, *, experts: bool
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Forward and backward of one layer of a transformer, and its experts."""
    gemm = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
    point = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::{}, at::detail::Array<char*"
        ", 3> >(int, at::native::{}, at::detail::Array<char*, 3>)"
    )
    add = point.format(*["CUDAFunctor_add<c10::BFloat16>"] * 2)
    gelu = point.format(*["GeluCUDAKernelImpl"] * 2)
    norm = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>"
    undo = "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<c10::BFloat16>"
    flash = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >"
    flash_undo = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd<128> >"

    def draw_ns(family: str) -> float:
        return known.kernel(rng, family)

    dense = [draw_ns("gemm") * 3 for _ in range(4)]
    around = draw_ns("normalisation")
    small = draw_ns("elementwise")
    attend = draw_ns("attention") * rng.uniform(3, 12)
    start = [
        Kernel("aten::native_layer_norm", norm, "normalisation", around),
        Kernel("aten::mm", gemm, "gemm", dense[0]),
        Kernel("aten::_flash_attention_forward", flash, "attention", attend),
        Kernel("aten::mm", gemm, "gemm", dense[1]),
        Kernel("aten::add", add, "elementwise", small),
    ]
    grouped = (
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape> >"
    )
    up, product = ("aten::_grouped_mm", grouped) if experts else ("aten::mm", gemm)
    feed = [
        Kernel(up, product, "gemm", dense[2]),
        Kernel("aten::gelu", gelu, "elementwise", small),
        Kernel(up, product, "gemm", dense[3]),
    ]
    forward = [*start, *([] if experts else feed), Kernel("aten::add_", add, "elementwise", small)]
    backward: list[Kernel] = []
    for kernel in reversed(forward):
        if kernel.family == "gemm":
            backward += [kernel, kernel]
        elif kernel.family == "attention":
            name = "aten::_flash_attention_backward"
            backward.append(Kernel(name, flash_undo, "attention", 2.3 * kernel.ns))
        elif kernel.family == "normalisation":
            name = "aten::native_layer_norm_backward"
            backward.append(Kernel(name, undo, "normalisation", 1.6 * kernel.ns))
        else:
            backward.append(kernel)
    return tuple(forward), tuple(backward), tuple(feed) if experts else ()


def _head(rng: Generator, known: Measured, compute: float) -> tuple[Kernel, ...]:
    look = known.kernel(rng, "embedding", 0.3, 0.6)
    return (
        Kernel(
            "aten::embedding",
            "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>",
            "embedding",
            min(look, 0.002 * compute),
        ),
    )


def _optimizer(rng: Generator, known: Measured, compute: float) -> tuple[Kernel, ...]:
    name = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "
        "FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false> >"
    )
    each = min(known.kernel(rng, "optimizer"), 0.01 * compute)
    return tuple(Kernel("aten::_fused_adamw_", name, "optimizer", each) for _ in range(4))


def _with_groups(rng: Generator, known: Measured, job: Job, compute: float) -> Job:
    """The process groups of a layout, their messages and rates."""
    every = np.arange(job.ranks)
    grid = every.reshape(job.pp, -1, job.tp)  # stage, data, tensor
    result: list[tuple[str, Ranks]] = []
    if job.layout in ("ddp", "fsdp"):
        result.append(("world", every[None, :]))
    elif job.layout == "hybrid":
        rows = every.reshape(-1, RANKS_PER_HOST)
        result += [("shard", rows), ("replicate", rows.T)]
    else:
        result.append(("dp", grid.transpose(0, 2, 1).reshape(-1, grid.shape[1])))
        if job.tp > 1:
            result.append(("tp", grid.reshape(-1, job.tp)))
        if job.ep > 1:
            cut = grid.reshape(job.pp, -1, job.ep, job.tp)
            result.append(("ep", cut.transpose(0, 1, 3, 2).reshape(-1, job.ep)))
    if job.pp > 1:
        result.append(("pp", every.reshape(job.pp, -1).T))
    groups, message, rate = {}, {}, {}
    number = 1
    calls = {
        "world": job.layers * (3 if job.layout == "fsdp" else 1),
        "shard": job.layers * 3,
        "replicate": job.layers,
        "dp": 2,
        "tp": job.layers * job.micro_batches * 4,
        "ep": job.layers * job.micro_batches * 4,
    }
    share = {"world": 0.3, "shard": 0.3, "replicate": 0.2, "dp": 0.1, "tp": 0.2, "ep": 0.2}
    for stream, (name, members) in enumerate(result):
        crosses = bool((members // RANKS_PER_HOST != members[:, :1] // RANKS_PER_HOST).any())
        is_world = members.shape == (1, job.ranks)
        groups[name] = Groups(name, members, 20 + 4 * stream, 0 if is_world else number, crosses)
        number += len(members)
        if name == "pp":
            rate[name] = known.rate(rng, "all_reduce", 0.2, 0.3)
            wanted = rng.uniform(0.003, 0.01) * compute * rate[name]
            message[name] = float(max(2**16, wanted) // 4096 * 4096)
            continue
        kind = "all_to_all" if name == "ep" else "all_reduce"
        low, high = (0.05, 0.25) if crosses else (0.5, 0.95)
        rate[name] = known.rate(rng, kind, low, high)
        wanted = share[name] * rng.uniform(0.5, 1.3) * compute / calls[name]
        message[name] = float(min(2**31, max(2**16, wanted * rate[name])) // 4096 * 4096)
    return replace(job, groups=groups, message=message, rate=rate)


def _fault(rng: Generator, job: Job, kind: str) -> Fault | None:
    if kind == HEALTHY:
        return None
    if kind == "moving":
        return Fault(kind, factor=rng.uniform(1.3, 2.0), index=int(rng.integers(2)))
    if kind == "expert_imbalance":
        hot = int(rng.integers(job.ep))
        ranks = tuple(sorted(int(r) for r in job.groups["ep"].members[:, hot]))
        return Fault(kind, "expert", hot, ranks, rng.uniform(1.5, min(3.5, 0.8 * job.ep)))
    if kind == "pipeline_imbalance":
        stage = int(rng.integers(job.pp))
        ranks = tuple(int(r) for r in job.stage(stage))
        return Fault(kind, "stage", stage, ranks, rng.uniform(1.2, 1.6))
    units = {"slow_device": ("rank",), "slow_link": ("host", "rack")}.get(kind, ("rank", "host"))
    unit = str(rng.choice(units))
    victim = int(rng.integers(job.ranks))
    where = {"rank": lambda r: r, "host": job.host_of, "rack": job.rack_of}[unit]
    ranks = tuple(r for r in range(job.ranks) if where(r) == where(victim))
    least, most = {"slow_host": (3, 8), "slow_link": (1.6, 4)}.get(kind, (1.2, 2.0))
    busy = sum(k.ns for k in (*job.forward, *job.backward)) * job.layers * job.micro_batches
    wait = rng.uniform(0.1, 0.5) * busy if kind == "slow_input" else 0.0
    return Fault(kind, unit, where(victim), ranks, rng.uniform(least, most), wait)
