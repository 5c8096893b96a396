"""Rules about single kernels, based on their hardware counters; all share one check."""

import re
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec.structs import replace

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import COUNTERS
from advisor.core.finding import Finding, Location, Outcomes, impact_without_gain
from advisor.core.rule import ANY_FRAMEWORK, Citation, Evidence, FrameworkAdvice, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.kernel_names import find_compute_capability, library_of
from advisor.measure.device.kernel_profiles import (
    ONE_LAUNCH,
    Limit,
    ProfiledKernel,
    is_reference,
    shorten_kernel,
)
from advisor.rules.support.citations import CHOSEN, NCU
from advisor.testing import Examples, TraceBuilder

_MAX_PLACES = 5
EXCESS_SECTORS = "derived__memory_l2_theoretical_sectors_global_excessive"
SECTORS = "memory_l2_theoretical_sectors_global"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
THREADS = "smsp__thread_inst_executed_per_inst_executed.ratio"
LOCAL = "l1tex__t_sectors_pipe_lsu_mem_local_op_{}.sum"
ALL_SECTORS = "l1tex__t_sectors.sum"
SCHEDULING = ("imc_miss", "no_instruction", "dispatch_stall", "sleeping", "misc", "drain")
"""Warp states that a change of memory accesses or arithmetic does not fix."""


class CounterSaving(NamedTuple):
    """Saving of a fix in one kernel."""

    share: float
    """Maximum share of the kernel's time that the fix saves (0 to 1)."""
    measured: float
    """Measured value that is compared with the threshold."""


class LibraryAdvice(NamedTuple):
    """Advice on how to make a library choose another kernel."""

    fix: str
    code: str


_AUTOTUNE = 'model = torch.compile(model, mode="max-autotune")   # times other tiles'
_PRODUCT_ADVICE = LibraryAdvice(
    "Sizes that are multiples of 64, another layout or number format select another tile. "
    "max-autotune times tiles that are written for your sizes.",
    _AUTOTUNE,
)
_ATTENTION_ADVICE = LibraryAdvice(
    "Use another backend of attention, or a split along keys that fits the batch.",
    "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
    "with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):\n    output = model(batch)",
)
_VECTOR_ADVICE = LibraryAdvice(
    "A product with a vector reads each weight for one result: use a larger batch, or weights of "
    "fewer bits.",
    "",
)
_VECTOR_PRODUCT = re.compile(r"gemv|gevm", re.IGNORECASE)
LIBRARY_ADVICE = {
    "": LibraryAdvice(
        "Call another function or algorithm of the library, with larger or merged inputs.", ""
    ),
    "cuBLAS": _PRODUCT_ADVICE,
    "CUTLASS": _PRODUCT_ADVICE,
    "rocBLAS": _PRODUCT_ADVICE,
    "cuDNN": LibraryAdvice(
        "Let cuDNN time its algorithms, or use another memory format.",
        "torch.backends.cudnn.benchmark = True",
    ),
    "FlashAttention": _ATTENTION_ADVICE,
    "xFormers": _ATTENTION_ADVICE,
    "PyTorch": LibraryAdvice(
        "Let the compiler generate it, merged with its neighbours.", "model = torch.compile(model)"
    ),
}
"""Advice for kernels of libraries, by library. The empty key is for all others."""


class CounterRule(Rule):
    """Base of rules about a kernel's bottleneck, based on its hardware counters. The estimate is an
    upper bound, like that of Nsight Compute: no kernel gets faster than its busiest unit allows.
    With a trace, the replay gives the gain per step of all these kernels."""

    auxiliary_inputs = (COUNTERS,)
    references = (NCU.address,)
    confidence = 0.6
    _label: ClassVar[str] = ""
    """Evidence label of the measured value."""
    _verb: ClassVar[str] = "are"
    _unit: ClassVar[str] = "share"
    _limit_name: ClassVar[str] = ""
    """Name of the threshold that the value is compared with."""
    _units: ClassVar[tuple[Limit, ...]] = ()
    """Units that the fix relieves."""
    assumptions = ("the kernel reaches the limit of its busiest unit; usually less is gained",)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.framework_advice = {
            ANY_FRAMEWORK: FrameworkAdvice(cls.fix, cls.code)
        }  # kernels belong to no framework

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate what the fix could save in a kernel; ``None`` if it does not have the
        problem."""
        raise NotImplementedError

    def check(self, a: Analysis) -> Outcomes:
        kernels = a.profiled_kernels
        kernels = [k for k in kernels if not is_reference(k.profile.name)] or kernels
        savings = [(k, saved) for k in kernels if (saved := self.estimate_saving(k)) is not None]
        savings.sort(key=lambda each: -_measure_time(a, each[0]) * each[1].share)
        yield from (self._build_finding(a, savings) for _ in savings[:1])

    def _build_finding(
        self, a: Analysis, savings: list[tuple[ProfiledKernel, CounterSaving]]
    ) -> Finding:
        """Build the finding on the kernels that have the problem, worst first."""
        k, saved = savings[0]
        edits = [
            edit for k, saved in savings if (edit := shorten_kernel(a, k, saved.share)) is not None
        ]
        launch_evidence: list[Evidence] = []
        others = t.count_noun(len(savings) - 1, "more profiled kernel")
        verb = "has" if len(savings) == 2 else "have"
        others_text = f" {others} {verb} it too." if len(savings) > 1 else ""
        if not edits:
            times = [(k.profile.duration_ns or 0.0) * saved.share for k, saved in savings]
            launches = "One launch of each saves" if len(savings) > 1 else "One launch saves"
            own = f" ({t.format_duration(times[0])} in this one)" * (len(savings) > 1)
            others_text += f" {launches} {t.format_duration(sum(times))} at most{own}."
            launch_evidence.append(Evidence(ONE_LAUNCH, sum(times), "ns"))
        return Finding(
            summary=f"{self._describe(k, saved)}{_describe_hot_line(k)}{others_text}",
            evidence=[
                self.compare(
                    f"{self._label} of {k.label}", saved.measured, self._limit_name, self._unit
                ),
                *_list_facts(k),
                *launch_evidence,
                Evidence("kernels with it", len(savings), "count"),
            ],
            where=[
                Location(
                    file=None if (hot_line := k.profile.hot_line) is None else hot_line.file,
                    line=None if hot_line is None else hot_line.line,
                    kernel=k.profile.name,
                    count=len(k.rows) or k.profile.launches,
                    dur_ns=None if k.profile.duration_ns is None else round(k.profile.duration_ns),
                )
                for k, _ in savings[:_MAX_PLACES]
            ],
            edits=edits,
            **self._library_texts(savings),
            impact=None
            if a.record_only or any(len(k.rows) for k, _ in savings)
            else impact_without_gain("the trace has no launch of these kernels"),
        )

    def complete(self, finding: Finding) -> Finding:
        """Fill in the rule's texts, but keep the fix and code for a library's kernel."""
        result = super().complete(finding)
        return replace(result, fix=finding.fix, code=finding.code) if finding.fix else result

    def _library_texts(self, savings: list[tuple[ProfiledKernel, CounterSaving]]) -> dict[str, Any]:
        """Return the fix and code if the worst kernel is a library's, whose source the user cannot
        change. Empty if it is the program's own kernel."""
        worst = savings[0][0]
        library = library_of(worst.profile.signature or worst.profile.name)
        if library is None:
            return {}
        advice = LIBRARY_ADVICE.get(library, LIBRARY_ADVICE[""])
        if _VECTOR_PRODUCT.search(worst.profile.signature or worst.profile.name):
            advice = _VECTOR_ADVICE
        fix = [
            f"{worst.label} is a kernel of {library}, whose source you cannot change. Make the "
            f"library choose another kernel. {advice.fix}"
        ]
        target, compute = find_compute_capability(worst.profile.name), worst.profile.compute
        if target is not None and compute is not None and target[0] < compute[0]:
            fix.append(
                f"It is built for sm_{target[0]}{target[1]} and runs on sm_{compute[0]}{compute[1]}"
                ": try a version of the library that is built for this GPU."
            )
        if any(library_of(k.profile.signature or k.profile.name) is None for k, _ in savings):
            fix.append(f"In your own kernels: {t.lower_first(self.fix)}")
        return {"fix": " ".join(fix), "code": advice.code}

    def _describe(self, k: ProfiledKernel, saved: CounterSaving) -> str:
        value = t.format_share(saved.measured) if self._unit == "share" else f"{saved.measured:.3g}"
        limit: Threshold[float] = getattr(type(self), self._limit_name)
        return (
            f"{k.label}: {self._label} {self._verb} {value} {limit.meaning}. A fix saves up to "
            f"{t.format_share(saved.share)} of the kernel's time{self._describe_limit(k, saved)}."
        )

    def _describe_limit(self, k: ProfiledKernel, saved: CounterSaving) -> str:
        """Return why less is saved than the measured share: another unit stays as busy as it is."""
        other_units = {unit: use for unit, use in k.use.items() if unit not in self._units}
        if self._unit != "share" or saved.share > saved.measured - 0.05 or not other_units:
            return ""
        unit = max(other_units, key=lambda unit: other_units[unit])
        return f", because then {unit} ({t.format_share(other_units[unit] / 100)} busy) limits it"


def _describe_hot_line(k: ProfiledKernel) -> str:
    """Return a sentence on the line with most samples, if one line has half of them."""
    line = k.profile.hot_line
    if line is None:
        return ""
    share = t.format_share(line.samples / (k.profile.samples or 1))
    return (
        f" {share} of its samples are at {t.shorten_path(labels.clean(line.file), 40)}:{line.line}."
    )


def _measure_time(a: Analysis, k: ProfiledKernel) -> float:
    """Return a kernel's time in the used steps, ns; without a trace, the time of one launch."""
    if len(k.rows):
        return float(a.trace.gpu["dur"].to_numpy()[k.rows].sum())
    return k.profile.duration_ns or 0.0


def _list_facts(k: ProfiledKernel) -> list[Evidence]:
    result = [Evidence("time of a launch", k.profile.duration_ns, "ns")]
    result += [Evidence(f"{unit} use", x / 100, "share") for unit, x in k.use.items()]
    if k.occupancy is not None:
        result.append(Evidence("achieved occupancy", k.occupancy / 100, "share"))
    return result


def _latency_share(k: ProfiledKernel) -> float:
    """Return the maximum share of a kernel's time that hiding latency can save: its busiest unit
    stays as busy as it is."""
    return max(0.0, 1 - (k.busiest or 0.0) / 100)


def _traffic_saving(k: ProfiledKernel, excess: float, *units: Limit) -> float:
    """Return the share of time that less traffic in some units saves, down to the busiest other
    unit."""
    relieved = max((k.use[unit] for unit in units if unit in k.use), default=0.0)
    other = max((use for unit, use in k.use.items() if unit not in units), default=0.0)
    busiest = max(relieved, other)
    if busiest <= 0:
        return 0.0
    return max(
        0.0, min(excess * relieved / busiest, 1 - other / busiest if relieved > other else 0.0)
    )


_TENSOR_OPS = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"


class KernelOccupancyLimited(CounterRule):
    """No unit of the GPU is busy: all are below 60% of their peaks, the limit of Nsight Compute's
    SpeedOfLight rule. Registers, shared memory or the block's size admit few resident warps, too
    few to hide the latency of memory and arithmetic. More warps hide more latency, at best until
    the busiest unit is full.

    Products on tensor cores are left out. Their tiles fill registers and shared memory by design:
    few warps with many products in flight hide the latency."""

    id = "kernel-occupancy-limited"
    title = "Few resident warps leave a kernel waiting"
    _label = "theoretical occupancy"
    _limit_name = "max_occupancy"
    max_occupancy = Threshold(0.5, "share of the warps that a multiprocessor holds", CHOSEN)
    fix = (
        "Let more warps be resident: fewer registers per thread, less shared memory per block, or "
        "smaller blocks, whichever the profiler names as the limit."
    )
    code = "// CUDA: at most 64 registers per thread\n__launch_bounds__(256, 4)"
    verify = "ncu --section Occupancy --section SpeedOfLight …: occupancy and throughput rise."
    falsified_by = "the same time at a higher occupancy"
    found_in = ("traces/ncu/deepseek_ocr_rtx5090",)
    silent_in = ("traces/ncu/cutlass_a100_s8",)
    sources = (Citation("Nsight Compute's SpeedOfLight rule: 60%", NCU.address),)
    validation_note = (
        "20 kernels of a language model on an RTX 5090; silent on full and on tiny grids"
    )

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate the gain up to full use of the busiest unit, limited by how far occupancy can
        rise."""
        if k.on_tensor_cores:
            return None
        if k.limit != "latency" or k.theoretical is None:
            return None
        if k.theoretical / 100 > self.max_occupancy:
            return None
        if k.waves is not None and k.waves < 1:
            return None
        return CounterSaving(min(_latency_share(k), 1 - k.theoretical / 100), k.theoretical / 100)

    def _describe(self, k: ProfiledKernel, saved: CounterSaving) -> str:
        limiter = f", limited by {k.limiter}" if k.limiter else ""
        return (
            f"{k.label} has {t.format_share(saved.measured)} theoretical occupancy{limiter}, and "
            f"no unit is busier than {t.format_share((k.busiest or 0) / 100)}. More resident warps "
            f"save up to {t.format_share(saved.share)} of its time."
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "registers": _build_example(theoretical=16.7, sm=40, dram=30, registers=5),
            "memory is busy": (_build_example(theoretical=16.7, dram=85), "k.limit != 'latency'"),
            "high occupancy": (_build_example(theoretical=100, sm=40), "max_occupancy"),
            "a tile for tensor cores": (
                _build_example(theoretical=16.7, sm=32, **{_TENSOR_OPS: 45.9e9}),
                "k.on_tensor_cores",
            ),
            "small grid": (_build_example(theoretical=16.7, sm=5, waves=0.1), "k.waves < 1"),
        }


class ExcessRule(CounterRule):
    """Base of rules about more accesses than the ideal pattern needs. They save their share of the
    time of the units that serve them."""

    _limit_name = "min_excess"
    min_excess: Threshold[float]
    _counters: ClassVar[tuple[str, str]]
    """Counters of the excess accesses and of all accesses."""

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate the time of the excess accesses."""
        excess, total = (k.profile.number(name) for name in self._counters)
        if excess is None or not total:
            return None
        if excess / total < self.min_excess:
            return None
        return _drop_negligible(_traffic_saving(k, excess / total, *self._units), excess / total)


class KernelUncoalesced(ExcessRule):
    """Threads of a warp read or write addresses far apart, so that each request moves more 32-byte
    sectors than its data needs. The excess is defined as in Nsight Compute: sectors beyond those of
    the ideal pattern, over all sectors of global memory. The fix saves their share of the time of
    L1, L2 and DRAM, at most down to the next busiest unit."""

    id = "kernel-uncoalesced"
    title = "Uncoalesced global memory accesses"
    _label = "excess global memory sectors"
    _counters = (EXCESS_SECTORS, SECTORS)
    _units = ("L1", "L2", "DRAM")
    min_excess = Threshold(0.1, "of all sectors of global memory", NCU)
    fix = (
        "Let neighbouring threads touch neighbouring addresses: make the innermost index the "
        "thread's, use contiguous tensors, or stage a tile through shared memory."
    )
    code = "x = x.contiguous()   # once, before the kernel runs many times"
    verify = "ncu --section MemoryWorkloadAnalysis_Tables …: sectors per request fall towards 4."
    falsified_by = "as many sectors per request with contiguous inputs"

    @staticmethod
    def examples() -> Examples:
        little = {EXCESS_SECTORS: 50, SECTORS: 1000}
        return {
            "strided": _build_example(l1=80, sm=20, **{EXCESS_SECTORS: 875, SECTORS: 1000}),
            "coalesced": (_build_example(l1=80, **little), "min_excess"),
            "not collected": (_build_example(l1=80), "excess is None"),
        }


class KernelBankConflicts(ExcessRule):
    """Threads of a warp touch different addresses of one bank of shared memory, and the accesses
    run one after another. The rule compares the conflicts that the hardware counted with all
    wavefronts of shared memory."""

    id = "kernel-bank-conflicts"
    title = "Bank conflicts in shared memory"
    _label = "bank conflicts"
    _counters = (CONFLICTS, WAVEFRONTS)
    _units = ("L1",)
    min_excess = Threshold(0.2, "of all wavefronts of shared memory", CHOSEN)
    fix = "Pad the rows of shared memory tiles by one element, or swizzle their columns."
    code = "__shared__ float tile[32][33];   // 33: rows start in different banks"
    verify = "ncu --section MemoryWorkloadAnalysis_Tables …: bank conflicts fall towards 0."
    falsified_by = "as many conflicts with padded rows"
    silent_in = ("traces/ncu/cutlass_a100_s8",)

    @staticmethod
    def examples() -> Examples:
        little = {CONFLICTS: 50, WAVEFRONTS: 1000}
        return {
            "columns": _build_example(l1=90, sm=20, **{CONFLICTS: 750, WAVEFRONTS: 1000}),
            "padded": (_build_example(l1=90, **little), "min_excess"),
        }


class KernelRegisterSpills(CounterRule):
    """A kernel needs more registers than it may use and keeps the others in local memory, which is
    in DRAM behind the caches. The rule compares the sectors of local memory with all sectors of
    L1."""

    id = "kernel-register-spills"
    title = "Registers spill to local memory"
    _label = "local memory sectors"
    _units = ("L1", "L2")
    _limit_name = "min_share"
    min_share = Threshold(0.1, "of all sectors of L1", CHOSEN)
    fix = (
        "Give each thread more registers or fewer values to keep: smaller tiles, a larger register "
        "limit, fewer unrolled iterations."
    )
    code = "nvcc -Xptxas -v kernel.cu          # prints spills\nnvcc -maxrregcount=128 kernel.cu"
    verify = "ncu --section MemoryWorkloadAnalysis_Tables …: no local loads and stores."
    falsified_by = "local memory that is an array the kernel indexes, not spills"

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate the share of L1's time that local loads and stores take."""
        parts = [k.profile.number(LOCAL.format(op)) for op in ("ld", "st")]
        total = k.profile.number(ALL_SECTORS)
        if None in parts or not total:
            return None
        local = sum(part for part in parts if part is not None) / total
        if local < self.min_share:
            return None
        return _drop_negligible(_traffic_saving(k, local, *self._units), local)

    @staticmethod
    def examples() -> Examples:
        spilled = {LOCAL.format("ld"): 300.0, LOCAL.format("st"): 200.0, ALL_SECTORS: 1000.0}
        little = {LOCAL.format("ld"): 30.0, LOCAL.format("st"): 20.0, ALL_SECTORS: 1000.0}
        return {
            "spills": _build_example(l1=85, sm=30, **spilled),
            "no spills": (_build_example(l1=85, **little), "min_share"),
        }


class KernelPartialWave(CounterRule):
    """The grid fills the GPU a few times, and the last time only in part: the other multiprocessors
    wait for the tail. With ``w`` waves at most ``1 - w / ceil(w)`` of the time is lost, which
    matters only for few waves."""

    id = "kernel-partial-wave"
    title = "The last wave of blocks fills part of the GPU"
    _label = "time lost in the last wave"
    _verb = "is"
    _limit_name = "min_lost"
    min_lost = Threshold(0.2, "of the kernel's time", NCU)
    fix = (
        "Choose a grid of whole waves: another block size, a split along K, or a persistent kernel "
        "that loops over tiles."
    )
    code = (
        "# Triton: one program per multiprocessor\ngrid = (min(tiles, sm_count * blocks_per_sm),)"
    )
    verify = "ncu --section LaunchStats …: waves per SM are near a whole number, or many."
    falsified_by = "blocks of very different duration"
    found_in = ("traces/ncu/sparse_matmul_a10g",)
    silent_in = ("traces/ncu/cutlass_a100_s8",)
    validation_note = "a product of 1.07 waves on an A10G; silent on 12.8 waves and on tiny grids"

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate the cost of the tail, unless a unit is busy all the time."""
        if k.waves is None or k.waves < 1 or _latency_share(k) < 0.1:
            return None
        lost = 1 - k.waves / float(np.ceil(k.waves))
        if lost < self.min_lost:
            return None
        return _drop_negligible(min(lost, _latency_share(k)), lost)

    @staticmethod
    def examples() -> Examples:
        return {
            "tail": _build_example(waves=1.1, sm=40),
            "many waves": (_build_example(waves=12.8, sm=40), "min_lost"),
            "small grid": (_build_example(waves=0.1, sm=5), "k.waves < 1"),
            "a unit is busy all the same": (
                _build_example(waves=1.1, l1=97),
                "_latency_share(k) < 0.1",
            ),
        }


class KernelDivergence(CounterRule):
    """Branches or early exits leave threads of a warp idle: only some of the 32 work in an
    instruction. The fix saves at most the idle share of the time in which arithmetic is the
    limit."""

    id = "kernel-divergence"
    title = "Threads of a warp take different branches"
    _label = "active threads per instruction"
    _unit = ""
    _limit_name = "max_threads"
    max_threads = Threshold(24.0, "of 32 threads", NCU)
    fix = "Sort or group the work so that a warp's threads take the same branch."
    code = "// order the work so that a warp's threads get items of one kind\nint item = order[i];"
    verify = "ncu --section WarpStateStats …: active threads per warp rise towards 32."
    falsified_by = "blocks whose size is not a multiple of 32"

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate the idle threads' share of arithmetic time."""
        threads = k.profile.number(THREADS)
        if threads is None or threads > self.max_threads:
            return None
        return _drop_negligible(_traffic_saving(k, 1 - threads / 32, "compute"), threads)

    @staticmethod
    def examples() -> Examples:
        """Return a kernel in which eight of 32 threads are active, and traps."""
        return {
            "branches": _build_example(sm=85, dram=20, **{THREADS: 8.0}),
            "together": (_build_example(sm=85, **{THREADS: 31.0}), "max_threads"),
        }


class KernelWarpStalls(CounterRule):
    """Warps mostly wait for one thing, and no unit is busy. Nsight Compute's WarpStateStats gives
    the cycles between two instructions of a warp, by cause of the wait."""

    id = "kernel-warp-stalls"
    title = "Warps of a kernel wait for one thing"
    _label = "largest stall"
    _limit_name = "min_stall"
    min_stall = Threshold(0.3, "of the cycles between two instructions of a warp", NCU)
    fix = (
        "Remove what most warps wait for. For memory, load earlier and keep more loads in flight. "
        "For arithmetic, do more independent work per thread. Between two barriers, do less."
    )
    verify = "ncu --section WarpStateStats --section SchedulerStats …: the stall shrinks."
    falsified_by = "the same time without this stall"
    cures = {
        "long_scoreboard": "loads from global memory: load earlier (prefetch, cp.async), reuse "
        "data in shared memory, and keep more loads in flight",
        "short_scoreboard": "shared memory or special functions: fewer bank conflicts, fewer "
        "sin, exp and divisions",
        "barrier": "__syncthreads: smaller blocks, or less work between two barriers",
        "math_pipe_throttle": "a full arithmetic pipe: use tensor cores, or fewer operations",
        "mio_throttle": "the queue of memory instructions: wider loads, fewer of them",
        "lg_throttle": "the queue of global and local accesses: wider loads, fewer of them",
        "tex_throttle": "the queue of textures: fewer or wider fetches",
        "wait": "fixed latency of dependent instructions: more independent work per thread",
        "branch_resolving": "branches: unroll short loops, or use predication",
        "membar": "memory barriers: fewer fences",
    }
    """Stall, as named by Nsight Compute -> its meaning and what to do."""

    def estimate_saving(self, k: ProfiledKernel) -> CounterSaving | None:
        """Estimate the share of the largest stall, up to full use of the busiest unit."""
        if k.limit != "latency" or not k.stalls:
            return None
        name, share = next(iter(k.stalls.items()))
        if share < self.min_stall or name in SCHEDULING:
            return None
        return _drop_negligible(min(share, _latency_share(k)), share)

    def _describe(self, k: ProfiledKernel, saved: CounterSaving) -> str:
        name = next(iter(k.stalls))
        cure = self.cures.get(name, name.replace("_", " "))
        return (
            f"{k.label} waits {t.format_share(saved.measured)} of its cycles for {cure}. Removing "
            f"that saves up to {t.format_share(saved.share)} of its time."
        )

    @staticmethod
    def examples() -> Examples:
        stall = {_stall_metric("long_scoreboard"): 12.0}
        even = {
            _stall_metric(name): 1.0 for name in ("long_scoreboard", "barrier", "wait", "membar")
        }
        return {
            "loads": _build_example(sm=20, dram=30, **{_stall_metric("long_scoreboard"): 12.0}),
            "memory is busy": (_build_example(dram=85, **stall), "k.limit != 'latency'"),
            "many small": (_build_example(sm=20, **even), "min_stall"),
        }


def _drop_negligible(share: float, measured: float) -> CounterSaving | None:
    """Return the saving, or ``None`` if it is below 1% of the kernel's time."""
    return CounterSaving(share, measured) if share >= 0.01 else None


def _stall_metric(name: str) -> str:
    return f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"


def _build_example(
    *,
    sm: float = 10.0,
    dram: float = 10.0,
    l1: float = 10.0,
    theoretical: float = 100.0,
    waves: float = 20.0,
    registers: float = 16.0,
    **metrics: float,
) -> TraceBuilder:
    """Build steps of a kernel that takes most of the time, with its counters."""
    b = TraceBuilder()
    for _ in b.steps():
        with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch("my_kernel<float>(int)", 900, blocks=1280, threads=256)
        b.sync()
    b.kernel_profile(
        "my_kernel<float>",
        grid=(1280, 1, 1),
        block=(256, 1, 1),
        metrics={
            "gpu__time_duration.sum": 900_000.0,
            "sm__throughput.avg.pct_of_peak_sustained_elapsed": sm,
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": dram,
            "l1tex__throughput.avg.pct_of_peak_sustained_active": l1,
            "sm__maximum_warps_per_active_cycle_pct": theoretical,
            "launch__waves_per_multiprocessor": waves,
            "launch__occupancy_limit_registers": registers,
            _stall_metric("selected"): 1.0,
            **metrics,
        },
    )
    return b
