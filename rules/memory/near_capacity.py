"""Device memory is almost full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import polars as pl

from advisor.core.finding import (
    Evidence,
    Finding,
    Impact,
    Location,
    Outcome,
    Rule,
    SkippedCheck,
    Threshold,
)
from advisor.measure import Analysis
from advisor.rules.memory.peaks import held_most, peaks
from advisor.rules.memory.recorded import capacity as recorded_capacity
from advisor.rules.sources import FOURNEX, GPUPROF, OURS, TENSORBOARD, TRACEML
from advisor.testing import TraceBuilder

if TYPE_CHECKING:
    from advisor.measure.memory.post_mortem import PostMortem

GIB = 1 << 30


class MemoryNearCapacity(Rule):
    """Memory that PyTorch's allocator holds (reserved) is close to all the device has. A longer
    sequence, an evaluation step or fragmentation then ends the run with an out-of-memory error;
    before that the allocator frees and reallocates blocks, each time waiting for the device.

    Reserved memory is what counts for the risk, allocated memory is what tensors need: where
    allocated is far below reserved, the rest is fragmentation or cache, and the cure is another
    allocator setting rather than a smaller model. Memory of NCCL, cuBLAS, CUDA graphs' private
    pools and other processes comes on top and is not in the trace.

    Where there is a memory snapshot, alone or beside a trace, its history counts too, and the lines
    that held most at the peak are named. A snapshot does not say how much the GPU has: the trace or
    the record beside it does. One whose history ends out of memory is ``out-of-memory``'s.
    """

    id = "memory-near-capacity"
    title = "Device memory is almost full"
    category = "memory"
    reads_snapshot = True
    silent_in = (
        "traces/h100_bert_small_inference",
        "traces/pairs/particle_batch128",
    )
    validated_on = ""
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
        "https://pytorch.org/docs/stable/torch_cuda_memory.html",
    )

    max_share = Threshold(0.90, "of capacity, reserved", TENSORBOARD, FOURNEX, GPUPROF)
    critical_share = Threshold(0.97, "of capacity, reserved", TRACEML)
    fragmented = Threshold(
        0.80, "allocated below this share of reserved: the rest is no tensor", OURS
    )

    verify = "torch.cuda.max_memory_reserved() against the card's memory, over an epoch."
    falsified_by = "a whole epoch, evaluation and checkpoint included, that stays at this peak"
    assumptions = ("the window holds the largest batch",)

    fix = (
        "Lower the peak: bf16 autocast, activation checkpointing of the largest "
        "blocks, a sharded or 8-bit optimizer, a smaller micro-batch with accumulation."
    )
    code = (
        "from torch.utils.checkpoint import checkpoint\n"
        "x = checkpoint(block, x, use_reentrant=False)   # for the largest blocks\n"
        "# where the memory is: torch.cuda.memory._record_memory_history()"
    )
    confidence = 0.8
    cases: ClassVar = {
        "most of it is reserved, not used": {
            "fix": "Most of the reserved memory is not in use: let segments grow and shrink, and "
            "keep shapes the same, so that fragments do not pile up.",
            "code": "# shell, before starting (older PyTorch: PYTORCH_CUDA_ALLOC_CONF)\n"
            "export PYTORCH_ALLOC_CONF=expandable_segments:True",
        },
        "all but full": {"confidence": 0.9},
    }

    inference: ClassVar = {
        "fix": "Lower the peak: 16-bit weights, inference_mode, a smaller batch, a shorter or "
        "quantised key-value cache.",
        "code": "with torch.inference_mode():\n"
        "    y = model.to(torch.bfloat16)(x)\n"
        "# where the memory is: torch.cuda.memory._record_memory_history()",
        "falsified_by": "a whole pass over the data that stays at this peak",
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the highest reserved memory with the device's capacity."""
        post = _shown(a)
        if a.device_id is None and post is None:
            return
        reserved, allocated, capacity = peaks(a)
        reserved = allocated if reserved is None else reserved  # it is at least what tensors hold
        held: list[Location] = []
        if post is not None:
            if post.history.failed is not None:
                return
            told = int(post.history.reserved.max())
            if reserved is None or told > reserved:
                reserved, allocated = told, int(post.history.allocated.max())
            capacity = capacity or _capacity(a, post.device)
            held = held_most(post)
        if reserved is None:
            yield SkippedCheck(
                what="device memory: peak, capacity, what could be freed",
                why="allocator events are not recorded",
                record="profile_memory=True",
            )
            return
        if not capacity:
            alone = a.snapshot_only
            yield SkippedCheck(
                what="how full device memory is",
                why=f"the {'snapshot' if alone else 'trace'} does not say how much memory the GPU "
                "has",
                record="a profiler trace, or 'advisor record', and the snapshot with --memory"
                if alone
                else "a profiler that writes deviceProperties (any recent PyTorch)",
            )
            return
        share = reserved / capacity
        if share < self.max_share:
            return
        used = None if allocated is None else allocated / reserved
        loose = used is not None and used < self.fragmented
        yield Finding(
            summary=(
                f"PyTorch holds {reserved / GIB:.1f} of {capacity / GIB:.1f} GiB "
                f"({share:.0%}) at its peak"
                + (
                    f", of which tensors fill only {used:.0%}: the rest is cache and fragments."
                    if loose
                    else ": a longer sequence or an evaluation step can run out of memory."
                )
            ),
            evidence=[
                Evidence("peak reserved", reserved, "bytes"),
                Evidence("capacity", capacity, "bytes"),
                Evidence("reserved, share of capacity", share, "share", *self.limit("max_share")),
                Evidence(
                    "allocated at its peak, share of reserved",
                    used,
                    "share",
                    *self.limit("fragmented"),
                ),
            ],
            where=[*self._where(a, reserved), *held],
            impact=Impact(
                currency="risk",
                reason=f"{1 - share:.0%} of device memory is left before the run stops",
            ),
            **(self.case("most of it is reserved, not used") if loose else {}),
            **(self.case("all but full") if share >= self.critical_share else {}),
        )

    def _where(self, a: Analysis, reserved: int) -> list[Location]:
        """The step of the peak."""
        at = a.memory.filter(
            pl.col("device").eq_missing(a.device_id)
            & (pl.coalesce("peak_reserved", "peak_allocated") == reserved)
        )["step"]
        steps = a.steps.table.filter(pl.col("index").is_in(at.implode()))
        return [
            Location(step=row["name"], ts_ns=row["ts"], dur_ns=row["dur"])
            for row in steps.head(1).iter_rows(named=True)
        ]

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Full of tensors; and full of fragments (an A100 of 85 GB)."""
        return {
            "tensors": _step(76_000_000_000, 80_000_000_000),
            "fragments": _step(45_000_000_000, 82_000_000_000),
            "a snapshot beside a trace": _snapshot(1340),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Half full; not recorded; only allocated memory is told, and it is half."""
        return {
            "half full": (_step(30_000_000_000, 40_000_000_000), "max_share"),
            "not recorded": (_step(None, 0), "reserved is None"),
            "an allocator that does not tell what it reserves": (
                _step(30_000_000_000, 0),
                "max_share",
            ),
            "a snapshot of less": (_snapshot(300), "max_share"),
            "a snapshot that ends out of memory": (
                _snapshot(1340, total=1 << 33),
                "post.history.failed is not None",
            ),
            "a snapshot alone, of a GPU that is not told": (
                _snapshot(1340, trace=False),
                "not capacity",
            ),
        }


def _shown(a: Analysis) -> PostMortem | None:
    """What the snapshot tells of the device that is looked at, else of the fullest."""
    posts = a.post_mortems
    mine = [post for post in posts if post.device == a.device_id]
    return next(iter(mine or posts), None)


def _capacity(a: Analysis, device: int) -> int | None:
    """Memory of a GPU, bytes, as the trace or the record tells it; ``None``: neither does."""
    told = a.trace.device(device)
    if told is not None and told.memory_bytes:
        return told.memory_bytes
    return None if a.recorded is None else recorded_capacity(a)


def _snapshot(mib: int, *, total: int = 80 << 30, trace: bool = True) -> TraceBuilder:
    """The history of a training, most of it activations and logits of eleven times so many MiB;
    beside a trace of a V100 with 16.9 GB."""
    from contextlib import suppress

    from advisor.testing.allocator import MIB, Allocator, DeviceFull, Training

    m = Allocator(total=total)
    b = TraceBuilder(gpu="V100")
    with suppress(DeviceFull):
        training = Training(m, activation=mib * MIB, logits=mib * MIB)
        for _ in range(3):
            training.step()
    if trace:
        with b.step(), b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
            b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", 2000)
            b.sync()
    b.memory_snapshot(m)
    return b


def _step(allocated: int | None, reserved: int) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            if allocated is not None:
                b.memory(1 << 20, allocated, reserved)
            with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", 2000)
            if allocated is not None:
                b.memory(-(1 << 20), allocated - (1 << 20), reserved)
            b.sync()
    return b
