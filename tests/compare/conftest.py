"""Small runs with known differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from advisor.core.run_directory import (
    MANIFEST,
    RANK,
    STEPS,
    Manifest,
    RankInfo,
    StepRow,
    trace_name,
)
from advisor.testing import TraceBuilder


def make_training(
    *, wait: float = 0.0, gemm: float = 900.0, steps: int = 6, gpu: str = "A100", kernel: str = ""
) -> TraceBuilder:
    """Steps with a wait for the loader, a matrix product and an addition, each synchronised: the
    device works gemm + 100 µs, and a µs or two differ from step to step."""
    b = TraceBuilder(gpu)
    for number in range(steps):
        with b.step():
            if wait:
                b.loader_wait(wait + number % 3, workers=0)
            b.host(number % 3)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch(kernel or "ampere_sgemm_128x64_nn", gemm)
            with b.op("aten::add", [[4096, 2048], [4096, 2048]], "float"):
                b.launch("void at::native::vectorized_elementwise_kernel<4, Add>(int)", 100)
            b.sync()
    return b


@pytest.fixture
def training() -> Callable[..., TraceBuilder]:
    """``training(wait=0, gemm=900, steps=6, gpu="A100", kernel="")``."""
    return make_training


@pytest.fixture
def write_recording(tmp_path: Path) -> Callable[..., Path]:
    """``write_recording("name", durations_us, builder)``: a run directory with step records."""

    def make(name: str, durations: list[float], b: TraceBuilder, **changes: int) -> Path:
        folder = tmp_path / name / "rank0"
        folder.mkdir(parents=True)
        (folder.parent / MANIFEST).write_bytes(msgspec.json.encode(Manifest(run_id=name)))
        (folder / RANK).write_bytes(msgspec.json.encode(RankInfo(rank=0)))
        at, lines = 0, []
        for n, us in enumerate(durations):
            lines.append(msgspec.json.encode(StepRow(n=n, t=at, dur=int(us * 1000), **changes)))
            at += int(us * 1000)
        (folder / STEPS).write_bytes(b"\n".join(lines) + b"\n")
        b.write(folder / trace_name(0).removesuffix(".gz"))
        return folder.parent

    return make
