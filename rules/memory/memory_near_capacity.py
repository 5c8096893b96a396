"""GPU memory is almost full."""

from contextlib import nullcontext
from typing import Final

import polars as pl

from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.finding import Finding, Location, Outcomes, SkippedCheck, impact_risk
from advisor.core.memory_changes import EXPANDABLE
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.inference.annotations import SGLANG, TENSORRT_LLM, VLLM
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.measure.memory.trace_memory import gpu_capacity, measure_held, measure_peaks
from advisor.rules.support.citations import FOURNEX, GPUPROF, TENSORBOARD, TRACEML, TRIED_ON_TRACES
from advisor.rules.support.device_memory import (
    GIB,
    LOWER_PEAK,
    LOWER_PEAK_INFERENCE,
    locate_holders,
    run_product,
    skip_without_events,
    snapshot_example,
)
from advisor.testing import Examples, TraceBuilder


class MemoryNearCapacity(Rule):
    """The memory that PyTorch's allocator holds (reserved) is close to the GPU's capacity. A longer
    sequence, an evaluation step or fragmentation can then end the run with an out-of-memory error.
    Before that, the allocator frees and reallocates blocks, and waits for the GPU each time.

    Reserved memory decides the risk, and allocated memory is what tensors need. Where allocated is
    far below reserved, the difference is fragmentation or cache. Then another allocator setting
    helps rather than a smaller model. Memory of NCCL, cuBLAS, CUDA graphs' private pools and other
    processes comes on top and is not in the trace.

    A server of language models (vLLM, SGLang, TensorRT-LLM) fills a set part of the memory with its
    key-value cache when it starts. Nothing grows afterwards, so the rule is silent there.

    The history of a memory snapshot, alone or with a trace, counts too, and the lines that held
    most at the peak are named. A snapshot does not show how much memory the GPU has: the trace or
    the record does. A snapshot whose history ends out of memory belongs to ``out-of-memory``."""

    id = "memory-near-capacity"
    title = "GPU memory is almost full"
    auxiliary_inputs = (SNAPSHOT,)
    silent_in = (
        "traces/h100_bert_small_inference",
        "traces/pairs/particle_batch128",
        "traces/serving/vllm_decode_full/capture",
    )
    validation_note = ""
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
        "https://pytorch.org/docs/stable/torch_cuda_memory.html",
    )

    max_share = Threshold(0.90, "of capacity, reserved", TENSORBOARD, FOURNEX, GPUPROF)
    min_critical_share = Threshold(0.97, "of capacity, reserved", TRACEML)
    max_allocated_share = Threshold(
        0.80, "allocated below this share of reserved: the rest is not in tensors", TRIED_ON_TRACES
    )

    verify = "Compare torch.cuda.max_memory_reserved() with the GPU's memory, over an epoch."
    falsified_by = "a full epoch, with evaluation and checkpoint, that stays at this peak"
    assumptions = ("the window holds the largest batch",)

    fix = LOWER_PEAK
    code = (
        "from torch.utils.checkpoint import checkpoint\n"
        "x = checkpoint(block, x, use_reentrant=False)   # for the largest blocks"
    )
    confidence = 0.8
    cases = {
        "most of it is reserved, not used": {
            "fix": "Let segments grow and shrink, because most of the reserved memory is not in "
            "use. Keep shapes the same, so that fragments do not pile up.",
            "code": EXPANDABLE,
        },
        "all but full": {"confidence": 0.9},
    }

    inference = {
        "fix": LOWER_PEAK_INFERENCE,
        "code": "with torch.inference_mode():\n    y = model.to(torch.bfloat16)(x)",
        "falsified_by": "a full pass over the data that stays at this peak",
    }

    def check(self, a: Analysis) -> Outcomes:
        peak = _select_snapshot(a)
        if a.device_id is None and peak is None:
            return
        reserved, allocated, capacity = measure_peaks(a)
        reserved = allocated if reserved is None else reserved  # at least what tensors hold
        holders: list[Location] = []
        if peak is not None:
            if peak.history.failed_event is not None:
                return
            in_snapshot = int(peak.history.reserved.max())
            if reserved is None or in_snapshot > reserved:
                reserved, allocated = in_snapshot, int(peak.history.allocated.max())
            capacity = capacity or _find_capacity(a, peak.device)
            holders = locate_holders(peak)
        if reserved is None:
            is_known = measure_held(a)[0] is not None  # recorded per whole step
            subject = "what holds it at its peak" if is_known else "peak, capacity"
            yield skip_without_events(a, f"GPU memory: {subject}, what could be freed")
            return
        if not capacity:
            alone = a.only_input is SNAPSHOT
            yield SkippedCheck(
                what="how full GPU memory is",
                why=f"the {'snapshot' if alone else 'trace'} does not record how much memory the "
                "GPU has",
                record="a profiler trace, or 'advisor record', and the snapshot with "
                "--memory-snapshot"
                if alone
                else "a profiler that writes deviceProperties (any recent PyTorch)",
            )
            return
        share = reserved / capacity
        if share < self.max_share or a.engine in FILLS_MEMORY:
            return
        used = None if allocated is None else allocated / reserved
        fragmented = used is not None and used < self.max_allocated_share
        yield Finding(
            summary=(
                f"PyTorch holds {reserved / GIB:.1f} of {capacity / GIB:.1f} GiB "
                f"({share:.0%}) at the peak."
                + (
                    f" Tensors fill only {used:.0%} of it; the rest is cache and fragments."
                    if fragmented
                    else " A longer sequence or an evaluation step can run out of memory."
                )
            ),
            evidence=[
                Evidence("peak reserved", reserved, "bytes"),
                Evidence("capacity of the GPU", capacity, "bytes"),
                self.compare("reserved, share of capacity", share, "max_share"),
                self.compare(
                    "allocated at its peak, share of reserved", used, "max_allocated_share"
                ),
            ],
            where=[*self._locate_peak_step(a, reserved), *holders],
            impact=impact_risk(f"{1 - share:.0%} of GPU memory is left before the run stops"),
            **(self.case("most of it is reserved, not used") if fragmented else {}),
            **(self.case("all but full") if share >= self.min_critical_share else {}),
        )

    def _locate_peak_step(self, a: Analysis, reserved: int) -> list[Location]:
        peak_steps = a.memory.filter(
            pl.col("device").eq_missing(a.device_id)
            & (pl.coalesce("peak_reserved", "peak_allocated") == reserved)
        )["step"]
        steps = a.steps.table.filter(pl.col("index").is_in(peak_steps.implode()))
        return [
            Location(step=row["name"], ts_ns=row["ts"], dur_ns=row["dur"])
            for row in steps.head(1).iter_rows(named=True)
        ]

    @staticmethod
    def examples() -> Examples:
        """Build steps full of tensors, or of fragments (an A100 of 85 GB)."""
        return {
            "tensors": _build_step(76_000_000_000, 80_000_000_000),
            "fragments": _build_step(45_000_000_000, 82_000_000_000),
            "a snapshot with a trace": _build_snapshot(1340),
            "a server whose cache fills the memory": (
                _build_step(76_000_000_000, 80_000_000_000, mark="step[DECODE bs=64]"),
                "FILLS_MEMORY",
            ),
            "half full": (_build_step(30_000_000_000, 40_000_000_000), "max_share"),
            "not recorded": (_build_step(None, 0), "reserved is None"),
            "an allocator that does not report what it reserves": (
                _build_step(30_000_000_000, 0),
                "max_share",
            ),
            "a snapshot of less": (_build_snapshot(300), "max_share"),
            "a snapshot that ends out of memory": (
                _build_snapshot(1340, total=1 << 33),
                "peak.history.failed_event is not None",
            ),
            "a snapshot alone, of an unknown GPU": (
                _build_snapshot(1340, trace=False),
                "not capacity",
            ),
        }


FILLS_MEMORY: Final = (VLLM, SGLANG, TENSORRT_LLM)
"""Engines that reserve memory for their cache at start: vLLM's ``gpu_memory_utilization`` (0.9),
SGLang's ``mem_fraction_static``, TensorRT-LLM's ``free_gpu_memory_fraction``."""


def _select_snapshot(a: Analysis) -> PeakMemory | None:
    """Return the snapshot's part of the analysed GPU, else of the fullest GPU."""
    peaks = a.peak_memories
    of_this_gpu = [peak for peak in peaks if peak.device == a.device_id]
    return next(iter(of_this_gpu or peaks), None)


def _find_capacity(a: Analysis, device: int) -> int | None:
    """Return a GPU's memory, bytes, from the trace or the record, or ``None`` if neither has it."""
    properties = a.trace.device(device)
    if properties is not None and properties.memory_bytes:
        return properties.memory_bytes
    return None if a.run_steps is None else gpu_capacity(a)


def _build_snapshot(mib: int, *, total: int = 80 << 30, trace: bool = True) -> TraceBuilder:
    """Build the history of a training. Most of it is activations and logits of eleven times
    ``mib``. A trace of a V100 with 16.9 GB is optional."""
    b = TraceBuilder(gpu="V100")
    if trace:
        with b.step():
            run_product(b)
            b.sync()
    size = mib << 20
    return snapshot_example(b, total=total, activation=size, logits=size)


def _build_step(allocated: int | None, reserved: int, mark: str | None = None) -> TraceBuilder:
    """Build steps, with a server's range ``mark`` around each."""
    b = TraceBuilder()
    for _ in b.steps():
        with b.range(mark) if mark else nullcontext():
            if allocated is not None:
                b.memory(1 << 20, allocated, reserved)
            run_product(b)
            if allocated is not None:
                b.memory(-(1 << 20), allocated - (1 << 20), reserved)
            b.sync()
    return b
