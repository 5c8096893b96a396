"""Predicted against measured gains: small programs, run with and without a fix.

Each experiment is recorded slow (with the profiler, for the prediction) and timed slow and fixed
(without it, for the truth), alternating, in this process. On a machine without a CUDA device only
the experiments that a CPU can show are run.

    python benchmarks/bench_accuracy.py [--steps 30] [--only "NAME|NAME"] [--write docs/accuracy.md]
    python benchmarks/bench_accuracy.py --record DIR     # measure and record; predict elsewhere:
    python benchmarks/bench_accuracy.py --recorded DIR [--write docs/accuracy.md]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Loop = Callable[[bool], Iterator[None]]
"""``loop(fixed)``: a training loop that yields after every step."""


@dataclass(frozen=True)
class Experiment:
    """A program, its fix, and the fix in the edit language."""

    name: str
    loop: Loop
    edits: tuple[str, ...]
    cuda: bool = False


def _slow_dataset(seconds: float, count: int = 100_000) -> Any:
    import torch

    class SlowDataset(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> Any:
            time.sleep(seconds)
            return torch.full((64,), float(index % 7))

    return SlowDataset()


def _mlp(device: str, width: int = 256, depth: int = 2) -> Any:
    import torch

    layers: list[Any] = [torch.nn.Linear(64, width)]
    for _ in range(depth):
        layers += [torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(width, 1)).to(device)


def loader_workers(workers: int, item_s: float, work: int) -> Loop:
    """A dataset that takes time an item (sleeping, as reads from storage do)."""

    def loop(fixed: bool) -> Iterator[None]:
        import torch

        torch.manual_seed(0)
        model = _mlp("cpu", 256, work)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(
            _slow_dataset(item_s), batch_size=16, num_workers=workers if fixed else 0
        )
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            yield

    return loop


def host_work(ms: float) -> Loop:
    """A Python function in the step that the fix takes out (a slow metric, a log call)."""

    def slow_metric(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            count += 1
        return count

    def loop(fixed: bool) -> Iterator[None]:
        import torch

        torch.manual_seed(0)
        model = _mlp("cpu", 512, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.randn(128, 64)
        while True:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            if not fixed:
                with torch.profiler.record_function("slow_metric"):
                    slow_metric(time.perf_counter() + ms / 1e3)
            optimizer.step()
            yield

    return loop


def cuda_loop(make: Callable[[bool], Callable[[], None]]) -> Loop:
    """A loop out of a function that makes the step."""

    def loop(fixed: bool) -> Iterator[None]:
        step = make(fixed)
        while True:
            step()
            yield

    return loop


def pinned(fixed: bool) -> Callable[[], None]:
    """A large batch copied every step from pageable or pinned memory."""
    import torch

    model = _mlp("cuda", 4096, 4)
    batch = torch.randn(65536, 64)
    batch = batch.pin_memory() if fixed else batch

    def step() -> None:
        model(batch.to("cuda", non_blocking=fixed)).square().mean().backward()

    return step


def item_every_step(fixed: bool) -> Callable[[], None]:
    """``loss.item()`` in a step of many small kernels."""
    import torch

    model = _mlp("cuda", 1024, 12)
    data = torch.randn(256, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    total = torch.zeros((), device="cuda")

    def step() -> None:
        nonlocal total
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        total = total + (loss.detach() if fixed else loss.item())

    return step


def precision(fixed: bool) -> Callable[[], None]:
    """fp32 matrix products with and without TF32."""
    import torch

    torch.set_float32_matmul_precision("high" if fixed else "highest")
    a = torch.randn(4096, 4096, device="cuda")

    def step() -> None:
        b = a
        for _ in range(8):
            b = a @ b
            b = b / b.norm()

    return step


def attention(fixed: bool) -> Callable[[], None]:
    """Attention written out, and as scaled_dot_product_attention."""
    import torch

    q, k, v = (torch.randn(8, 16, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def step() -> None:
        for _ in range(4):
            if fixed:
                torch.nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                torch.softmax(q @ k.transpose(-1, -2) / 8.0, dim=-1) @ v

    return step


def graphs(fixed: bool) -> Callable[[], None]:
    """Many tiny kernels, launched one by one or as a CUDA graph."""
    import torch

    x = torch.randn(256, 256, device="cuda")

    def work() -> None:
        y = x
        for _ in range(200):
            y = torch.sin(y)

    work()
    if not fixed:
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def compiled(fixed: bool) -> Callable[[], None]:
    """A pointwise chain, eager and compiled."""
    import torch

    x = torch.randn(64, 1024, 1024, device="cuda")

    def chain(t: Any) -> Any:
        return torch.tanh(torch.sigmoid(t * 1.5 + 0.5) * t).relu() - t.abs()

    run = torch.compile(chain) if fixed else chain
    run(x)
    return lambda: run(x)


def fused_optimizer(fixed: bool) -> Callable[[], None]:
    """AdamW over many parameters, one kernel a tensor and fused."""
    import torch

    parameters = [torch.nn.Parameter(torch.randn(256, 256, device="cuda")) for _ in range(200)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    kind = {"fused": True} if fixed else {"foreach": False}
    optimizer = torch.optim.AdamW(parameters, **kind)
    return lambda: optimizer.step() and None


EXPERIMENTS = (
    Experiment(
        "loader: 2 workers, loader-bound", loader_workers(2, 0.002, 2), ("parallelize loader 2",)
    ),
    Experiment(
        "loader: 4 workers, loader-bound", loader_workers(4, 0.002, 2), ("parallelize loader 4",)
    ),
    Experiment(
        "loader: 2 workers, short items", loader_workers(2, 0.0005, 8), ("parallelize loader 2",)
    ),
    Experiment("host work of 5 ms removed", host_work(5.0), ("remove range:slow_metric",)),
    Experiment("host work of 1 ms removed", host_work(1.0), ("remove range:slow_metric",)),
    Experiment(
        "pinned memory, non_blocking",
        cuda_loop(pinned),
        ("scale copy:HtoD 0.3", "async sync:aten::to"),
        cuda=True,
    ),
    Experiment(
        "loss.item() removed",
        cuda_loop(item_every_step),
        ("async sync:aten::item", "remove copy:DtoH"),
        cuda=True,
    ),
    Experiment("TF32", cuda_loop(precision), ("scale family:gemm 0.17",), cuda=True),
    Experiment("fused attention", cuda_loop(attention), ("merge work 0.25",), cuda=True),
    Experiment("CUDA graph", cuda_loop(graphs), ("graph work",), cuda=True),
    Experiment(
        "torch.compile of a pointwise chain", cuda_loop(compiled), ("merge work 0.3",), cuda=True
    ),
    Experiment("fused AdamW", cuda_loop(fused_optimizer), ("merge work 0.5",), cuda=True),
)
"""Factors of the device edits are what the rules assume where they know nothing better."""


def median_step(loop: Iterator[None], steps: int, *, cuda: bool, warm: int = 4) -> float:
    """Median step time in seconds, unprofiled."""
    import torch

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(warm):
        next(loop)
    times = []
    for _ in range(steps):
        begin = now()
        next(loop)
        times.append(now() - begin)
    return statistics.median(times)


def record(loop: Iterator[None], path: Path, *, cuda: bool, active: int = 6) -> None:
    """A profiled window of ``active`` steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with profile(
        activities=activities,
        schedule=schedule(wait=2, warmup=2, active=active, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4 + active):
            next(loop)
            profiler.step()
        if cuda:
            torch.cuda.synchronize()


Row = dict[str, Any]


def timed(experiment: Experiment, steps: int, rounds: int, trace: Path) -> Row:
    """Record the slow program once, and measure the truth from alternating runs."""
    record(experiment.loop(False), trace, cuda=experiment.cuda)
    slow, fixed = [], []
    for _ in range(rounds):
        slow.append(median_step(experiment.loop(False), steps, cuda=experiment.cuda))
        fixed.append(median_step(experiment.loop(True), steps, cuda=experiment.cuda))
    truth = statistics.median(slow), statistics.median(fixed)
    return {
        "experiment": experiment.name,
        "edits": list(experiment.edits),
        "slow_ms": truth[0] * 1e3,
        "fixed_ms": truth[1] * 1e3,
        "true_gain": 1 - truth[1] / truth[0],
    }


def predicted(row: Row, trace: Path) -> Row:
    """The same with what a replay of the recording says."""
    import advisor

    whatif = advisor.whatif(advisor.open(trace), row["edits"])
    return {
        **row,
        "predicted_gain": 1 - whatif.edited_step_ns / whatif.replayed_step_ns,
        "profiled_ms": whatif.measured_step_ns / 1e6,
        "replay_error": whatif.replay.step_error,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    lines = [
        "| experiment | step, slow → fixed | true gain | predicted | off by | replay error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['experiment']} (`{'; '.join(r['edits'])}`) "
        f"| {r['slow_ms']:.2f} → {r['fixed_ms']:.2f} ms | {r['true_gain']:.1%} "
        f"| {r['predicted_gain']:.1%} | {100 * abs(r['predicted_gain'] - r['true_gain']):.1f} "
        f"points | {r['replay_error']:.2%} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the experiments that this machine can run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, metavar="DIR")
    parser.add_argument("--recorded", type=Path, metavar="DIR")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.recorded or args.record or Path(scratch)
        if args.recorded is None:
            measure(folder, args.only, args.steps, args.rounds)
        if args.record is not None:
            return
        document = json.loads((folder / MEASURED).read_text())
        rows = [predicted(row, folder / row.pop("trace")) for row in document["rows"]]
    text = f"{document['where']}\n\n{table(rows)}\n"
    print(text)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    if args.write:
        write(args.write, text, document["cuda"])


MEASURED = "measured.json"


def measure(folder: Path, only: str, steps: int, rounds: int) -> None:
    """Run and record the experiments that this machine can run."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    have = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if have else f"CPU ({platform.machine()})"
    result_row: Row = {"where": f"PyTorch {torch.__version__}, {where}", "cuda": have, "rows": []}
    for number, experiment in enumerate(EXPERIMENTS):
        if any(part in experiment.name for part in only.split("|")) and (
            have or not experiment.cuda
        ):
            name = f"{number:02}.json.gz"
            row = timed(experiment, steps, rounds, folder / name)
            result_row["rows"].append({**row, "trace": name})
            print(experiment.name, f"{row['true_gain']:.1%}", file=sys.stderr, flush=True)
            (folder / MEASURED).write_text(json.dumps(result_row, indent=1))


def write(path: Path, text: str, have_cuda: bool) -> None:
    """Replace the section of this kind of machine in the document."""
    mark = "CUDA" if have_cuda else "CPU"
    begin, end = f"<!-- {mark} begin -->", f"<!-- {mark} end -->"
    old = path.read_text()
    head, _, rest = old.partition(begin)
    _, _, tail = rest.partition(end)
    path.write_text(f"{head}{begin}\n{text}{end}{tail}")


if __name__ == "__main__":
    main()
