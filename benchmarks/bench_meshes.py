"""The step on another device mesh, predicted from one recorded rank and compared with that mesh.

    python -m benchmarks.bench_meshes                                # 100 simulated models
    python -m benchmarks.bench_meshes --calibrate                    # the shipped ledger
    python -m benchmarks.bench_meshes --write docs/ranks-accuracy.md

The figures that are written are of seeds from 1,000,000 on, on which nothing was developed. The
published tables are of other people's clusters: what is not published of them (the time in each
kernel) is made of the model's size, so that the recorded mesh takes as long as it did.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from advisor.measure import Analysis
from advisor.measure.comm.links import NodeLinks
from advisor.read import read_trace
from advisor.replay.ledger import SHIPPED, Prediction
from advisor.replay.project.mesh import Mesh, MeshProjector, MeshResult, parse_mesh
from benchmarks import shipped_ledger
from benchmarks.simulation.engine import SimulatedRun
from benchmarks.simulation.jobs import RANKS_PER_HOST, Kernel
from benchmarks.simulation.kineto import trace
from benchmarks.simulation.meshes import Model, draw_pair, play_mesh

CALIBRATED = 2_000
REPORTED = 1_000_000
"""First seeds; development was on seeds below 1,000."""
BEGIN, END = "<!-- meshes begin -->", "<!-- meshes end -->"

TITAN = (
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
ONEFLOW = "https://github.com/Oneflow-Inc/DLPerf/blob/master/OneFlow/LanguageModeling/GPT/README.md"


class PublishedRun(NamedTuple):
    """A model of transformer layers on two meshes: two rows of one table."""

    name: str
    source: str
    recorded: str
    target: str
    measured: float
    """Step there over here, with the batch of a GPU (``same_batch``: of the job) the same."""
    step_ms: float
    """Here."""
    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    """Samples of a micro-batch."""
    micro_batches: int
    layout: str
    node_gb_per_s: float
    network_gb_per_s: float
    """Bandwidth of a GPU in one direction."""
    same_batch: bool = False
    there_micro_batches: int | None = None
    parameters: float | None = None
    """Parameters of the layers; None: 12 h^2 each."""


_LLAMA = (32, 4096, 32, 8192, 2, 1, "fsdp", 450.0 * 0.82, 50.0)
_GPT = (16, 1536, 16, 2048)
_GPT_24 = (24, 2304, 24, 2048)
_V100 = (150.0 * 0.82, 100 / 8 / 8)
TABLES = (
    PublishedRun("Llama 3.1 8B, FSDP", TITAN, "dp=8", "dp=128", 5762 / 5605,
              2 * 8192 / 5762 * 1e3, *_LLAMA, parameters=7.0e9),
    PublishedRun("the same with torch.compile", TITAN, "dp=8", "dp=128", 6667 / 6514,
              2 * 8192 / 6667 * 1e3, *_LLAMA, parameters=7.0e9),
    PublishedRun("GPT 16 x 1536, data", ONEFLOW, "dp=8", "dp=16", 489.67 / 417.95, 417.95,
              *_GPT, 2, 1, "ddp", *_V100),
    PublishedRun("", ONEFLOW, "dp=8", "dp=32", 518.64 / 417.95, 417.95,
              *_GPT, 2, 1, "ddp", *_V100),
    PublishedRun("", ONEFLOW, "dp=16", "dp=32", 518.64 / 489.67, 489.67,
              *_GPT, 2, 1, "ddp", *_V100),
    PublishedRun("GPT 16 x 1536, tensor", ONEFLOW, "dp=8", "dp=4,tp=2", 543.88 / 417.90, 417.90,
              *_GPT, 2, 1, "parallel", *_V100, True, 1),
    PublishedRun("", ONEFLOW, "dp=8", "dp=2,tp=4", 539.69 / 417.90, 417.90,
              *_GPT, 2, 1, "parallel", *_V100, True, 1),
    PublishedRun("", ONEFLOW, "dp=4,tp=2", "dp=2,tp=4", 539.69 / 543.88, 543.88,
              *_GPT, 4, 1, "parallel", *_V100, True, 1),
    PublishedRun("", ONEFLOW, "dp=2,tp=4", "tp=8", 644.4 / 539.69, 539.69,
              *_GPT, 8, 1, "parallel", *_V100, True, 1),
    PublishedRun("GPT 24 x 2304, pipeline", ONEFLOW, "dp=2,tp=4,pp=4", "dp=2,tp=8,pp=2",
              14375.35 / 13117.18, 13117.18, *_GPT_24, 8, 32, "parallel", *_V100, True, 32),
    PublishedRun("", ONEFLOW, "dp=2,tp=8,pp=2", "dp=2,tp=4,pp=4", 13117.18 / 14375.35, 14375.35,
              *_GPT_24, 8, 32, "parallel", *_V100, True, 32),
    PublishedRun("", ONEFLOW, "dp=2,tp=4,pp=4", "tp=8,pp=4", 19196.65 / 13117.18, 13117.18,
              *_GPT_24, 8, 32, "parallel", *_V100, True, 32),
)  # fmt: skip


class Case(NamedTuple):
    """A prediction: ns, or a ratio of steps."""

    name: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        """The measured step lies within the range."""
        return self.low <= self.measured <= self.high


def project(
    played: SimulatedRun,
    mesh: Mesh,
    machine: NodeLinks,
    *,
    same_batch: bool = False,
    count: int = 0,
) -> MeshResult:
    """Project from the file of the first rank, as a user has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.json"
        path.write_bytes(trace(played, 0))
        a = Analysis(read_trace(path))
        a.collectives, a.kernels  # noqa: B018 (before the file goes)
        result = MeshProjector(a, None, machine).on(
            mesh, same_batch=same_batch, micro_batches=count or None
        )
    return result


def one(seed: int) -> Case:
    """A simulated model on two meshes."""
    model, recorded, target = draw_pair(seed)
    recorded_run, target_run = play_mesh(model, recorded), play_mesh(model, target)
    machine = NodeLinks(RANKS_PER_HOST, model.network_rate)
    result = project(recorded_run, target, machine)
    name = f"seed {seed}, {recorded} to {target}"
    return Case(name, result.step_ns, result.low_ns, result.high_ns, target_run.step_ns)


def model_of(row: PublishedRun) -> Model:
    """Kernels of one micro-batch and layer: products by their FLOPs, the others by the 34 s b h
    bytes of activations that they read and write (arXiv:2205.05198); backward twice as much."""
    h, tokens = row.hidden, row.batch * row.sequence
    mesh = parse_mesh(row.recorded)
    scores = 4 * tokens * row.sequence * h / 2
    moved = 34 * tokens * h
    flops = {"qkv": 6 * tokens * h * h, "out": 2 * tokens * h * h, "up": 8 * tokens * h * h}
    rate = 1.0  # of products, FLOP/ns; scaled below

    def kernel(op: str, family: str, ns: float) -> Kernel:
        query = None
        if op == "aten::_flash_attention_forward":
            query = (row.batch, row.sequence, row.heads, h // row.heads)
        return Kernel(op, f"{family}_kernel", family, ns, blocks=2160, query=query)

    def gemm(name: str) -> Kernel:
        return Kernel(
            "aten::mm", "ampere_bf16_s16816gemm_bf16_128x128", "gemm", flops[name] / rate, 2160
        )

    memory = moved / 4 * 250 / 1.6e3  # bytes per FLOP-rate unit: memory is 1.6 TB/s at 250 TFLOP/s
    norm = kernel("aten::native_layer_norm", "normalisation", memory)
    add, gelu = (kernel(op, "elementwise", memory) for op in ("aten::add", "aten::gelu"))
    name = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >"
    attend = kernel("aten::_flash_attention_forward", "attention", scores / rate)
    attend = attend._replace(name=name)
    forward = (norm, gemm("qkv"), attend, gemm("out"), add, gemm("up"), gelu, gemm("up"), add)
    undo = attend._replace(
        op="aten::_flash_attention_backward", ns=2 * attend.ns, query=None,
        name="void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd<128> >",
    )  # fmt: skip
    backward = tuple(undo if k is attend else k._replace(ns=2 * k.ns) for k in reversed(forward))
    parameters = 2 * (row.parameters or 12.0 * h * h * row.layers)
    model = Model(
        0, row.layers, row.micro_batches, forward, backward, (), (),
        (row.batch, row.sequence, row.heads, h // row.heads), parameters, row.layout,
        row.node_gb_per_s, row.network_gb_per_s, 0.0, 0.0,
    )  # fmt: skip
    scale = row.step_ms * 1e6 * mesh.tp * mesh.pp
    scale /= sum(k.ns for k in (*forward, *backward)) * row.layers * row.micro_batches
    for _ in range(4):  # until the recorded mesh takes as long as it did
        model = replace(
            model,
            forward=tuple(k._replace(ns=k.ns * scale) for k in model.forward),
            backward=tuple(k._replace(ns=k.ns * scale) for k in model.backward),
        )
        scale = 1 + 0.9 * (row.step_ms * 1e6 / play_mesh(model, mesh).step_ns - 1)
    return model


def published(row: PublishedRun) -> Case:
    """The ratio of two rows of a table."""
    mesh = parse_mesh(row.recorded)
    played = play_mesh(model_of(row), mesh)
    result = project(
        played, parse_mesh(row.target), NodeLinks(RANKS_PER_HOST, row.network_gb_per_s),
        same_batch=row.same_batch, count=row.there_micro_batches or 0,
    )  # fmt: skip
    measured_ns = result.measured_step_ns
    ratio, low, high = (ns / measured_ns for ns in (result.step_ns, result.low_ns, result.high_ns))
    return Case(row.name, ratio, low, high, row.measured)


def page(simulated: list[Case], tables: list[Case]) -> str:
    """The section of docs/ranks-accuracy.md."""
    off = sorted(abs(math.log(case.predicted / case.measured)) for case in simulated)
    inside = sum(case.inside for case in simulated)
    width = statistics.median((case.high - case.low) / case.predicted for case in simulated)
    lines = [
        f"{len(simulated)} models, seeds from {REPORTED:,} on: the step on the other mesh is off "
        f"by {math.exp(statistics.median(off)) - 1:.0%} (median), in four of five by at most "
        f"{math.exp(off[int(0.8 * len(off))]) - 1:.0%}. {inside} of {len(simulated)} lie in the "
        f"range ({inside / len(simulated):.0%}), whose width is {width:.0%} of the step (median).",
        "",
        "| published | recorded | asked for | step there ÷ here | predicted | in the range |",
        "|---|---|---|---|---|---|",
    ]
    for row, case in zip(TABLES, tables, strict=True):
        lines.append(
            f"| {row.name or '〃'} | {row.recorded} | {row.target} | {case.measured:.2f} "
            f"| {case.predicted:.2f} ({case.low:.2f} to {case.high:.2f}) "
            f"| {'yes' if case.inside else 'no'} |"
        )
    return "\n".join(lines)


def predictions(simulated: list[Case], tables: list[Case]) -> list[Prediction]:
    """Lines of the shipped ledger: ns; of published tables the step there over here."""
    of_jobs = [
        Prediction(
            source="mesh", program=case.name.split(",")[0], kind="simulated",
            change=case.name.partition(", ")[2], unit="ns",
            predicted=round(case.predicted), measured=round(case.measured),
        )
        for case in simulated
    ]  # fmt: skip
    of_tables = [
        Prediction(
            source="mesh", program=row.source, kind="published",
            change=f"{row.recorded} to {row.target}", unit="step there over here",
            predicted=round(case.predicted, 4), measured=round(case.measured, 4),
        )
        for row, case in zip(TABLES, tables, strict=True)
    ]  # fmt: skip
    return [*of_jobs, *of_tables]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=REPORTED)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--calibrate", action="store_true", help="write shipped_ledger.jsonl")
    parser.add_argument("--write", type=Path, help="between the marks of that page")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.calibrate:
        arguments.seed = CALIBRATED
    seeds = range(arguments.seed, arguments.seed + arguments.jobs)
    with ProcessPoolExecutor(arguments.workers) as pool:
        simulated = list(pool.map(one, seeds))
        tables = list(pool.map(published, TABLES))
    if arguments.verbose:
        for case in simulated:
            if not case.inside:
                print(case)
    if arguments.calibrate:
        shipped_ledger.replace(SHIPPED, "mesh", predictions(simulated, tables))
        return
    text = page(simulated, tables)
    print(text)
    if arguments.write:
        old = arguments.write.read_text(encoding="utf-8")
        head, _, rest = old.partition(BEGIN)
        tail = rest.partition(END)[2]
        arguments.write.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
