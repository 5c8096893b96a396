"""The host's own time: launches, reads of values, Python, pauses."""

import gc
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import layers, sgd, train


@workload(
    finds=("launch-bound", "cuda-graphs-unused", "small-grids", "fp32-matmul"),
    cpu_scale=1 / 8,
    samples=(1, 32),
    differs="16 bits instead of 32, and answers to more requests",
)
def batch1_inference(run: Setup) -> Iterator[Any]:
    """A transformer that answers one request at a time, in fp32.

    A batch of one gives the GPU kernels of a few microseconds. The host cannot launch them fast
    enough, and fp32 leaves the tensor cores idle.

    The cure: requests gathered into batches of 32, in bf16 (on a GPU; a CPU stays with fp32)."""
    width = run.size(1024, 32)
    layer = nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval().to(run.device)
    requests = torch.randn(32, 128, width, device=run.device)
    if run.cured:
        model, requests = model.to(run.dtype), requests.to(run.dtype)

    turn = 0
    while True:
        batch = requests if run.cured else requests[turn % 32 : turn % 32 + 1]
        with torch.inference_mode():
            answer = model(batch).float().mean()
        turn += 1
        yield answer


KEPT = 40  # steps whose records stay in the buffer
EVERY = 500  # steps between collections by hand


@workload(finds=("gc-pauses",), shown_on="cpu", cpu_scale=1 / 8, around=60)
def gc_pauses(run: Setup) -> Iterator[Any]:
    """A replay buffer of Python objects, and the garbage collector that walks through it.

    Thousands of small dictionaries are made in every step and kept for a while. Every few steps the
    collector of cyclic garbage looks at all of them, finds nothing, and the training loop stands
    still meanwhile.

    The cure: ``gc.disable()``, and a collection by hand now and then, between epochs. What is not
    cyclic is freed as before."""
    width, records = run.size(1024, 64), 6000
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    model = model.to(run.device)
    observations = torch.randn(256, width, device=run.device)
    optimizer = sgd(model)
    buffer: deque[list[dict[str, Any]]] = deque(maxlen=KEPT)

    gc.enable()
    if run.cured:
        gc.collect()
        gc.disable()
    step = 0
    while True:
        buffer.append([{"step": step, "tags": [n], "seen": {}} for n in range(records)])
        rows = torch.tensor([record["tags"][0] % 256 for record in buffer[-1][:64]])
        x = observations[rows.to(run.device)]
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if run.cured and step % EVERY == 0:
            gc.collect()
        yield loss.detach()


@workload(finds=("launch-bound", "cuda-graphs-unused"), cpu_scale=1 / 2)
def launch_bound(run: Setup) -> Iterator[Any]:
    """A deep and narrow network: more kernels than one host thread can launch in time.

    Each layer takes the GPU some microseconds, less than Python and the launch of its kernels take,
    so the GPU idles between any two kernels.

    The cure: the whole step is captured once as a CUDA graph and replayed with one call. (On a CPU
    there is nothing to capture, and both variants are the same.)"""
    width = run.size(64, 8)
    model = layers(run, width, 32, nn.Tanh).float()
    inputs = torch.randn(64, width, device=run.device)
    steps = train(sgd(model), lambda: (model(inputs) - inputs).square().mean())
    if not (run.cured and run.on_gpu):
        yield from steps

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture needs steps before it, on another stream
        warm = [next(steps).clone() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = next(steps)
    yield from warm
    while True:
        graph.replay()
        yield loss.clone()


@workload(finds=("implicit-sync",), cpu_scale=1 / 16)
def per_step_sync(run: Setup) -> Iterator[Any]:
    """Values read from the GPU in every step.

    The gradient's norm is printed layer by layer with ``.item()``, and the loss too. Each read
    waits until the GPU has worked off everything that was launched; then the GPU waits until the
    host has launched something new.

    The cure: norms are computed on the device, all at once, and read every hundred steps."""
    width, batch = run.size(1024, 32), run.size(2048, 16)
    model = layers(run, width, 12)
    inputs = torch.randn(batch, width, device=run.device, dtype=run.dtype)
    optimizer = sgd(model)

    step = 0
    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if run.cured:
            norms = torch.stack(torch._foreach_norm(gradients))
            if step % 100 == 99:
                norms.tolist()
        else:
            for gradient in gradients:
                gradient.norm().item()
        optimizer.step()
        step += 1
        yield loss.detach() if run.cured else loss.item()


@workload(finds=("periodic-stalls",), shown_on="cpu", cpu_scale=1 / 4, steps=32)
def periodic_checkpoint(run: Setup) -> Iterator[Any]:
    """A checkpoint of a large table, written by the training loop itself every eight steps.

    ``torch.save`` copies the weights to the host, packs them and waits for the disk; all GPUs of
    the job wait with it.

    The cure: the weights are copied, and a thread writes the copy while training goes on."""
    width, batch, words = run.size(1024, 32), run.size(1024, 16), run.size(1 << 18, 1024)
    model = nn.Sequential(
        nn.Embedding(words, width, sparse=True), nn.Linear(width, width), nn.ReLU()
    ).to(run.device)
    inputs = torch.randint(words, (batch,), device=run.device)
    path = Path(run.folder, f"checkpoint-{run.variant}.pt") if run.folder else None
    writer = ThreadPoolExecutor(1)
    writing: Future[None] | None = None
    try:
        losses = train(sgd(model), lambda: (model(inputs) - 1).square().mean())
        for step, loss in enumerate(losses, start=1):
            if step % 8 == 0 and path is not None:
                if not run.cured:
                    torch.save(model.state_dict(), path)
                else:
                    if writing is not None:
                        writing.result()
                    writing = writer.submit(torch.save, on_host(model.state_dict()), path)
            yield loss
    finally:
        writer.shutdown()
        if path is not None:
            path.unlink(missing_ok=True)


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state to the host, where later steps do not change it."""
    return {name: value.detach().cpu().clone() for name, value in state.items()}


SAMPLES, BATCH = 20_000, 256


def choose_slowly(weights: list[float], at: int) -> Any:
    """Return indices of the first samples from ``at`` on that weigh more than a half."""
    count = len(weights)
    order = [(at + offset) % count for offset in range(count)]
    return torch.tensor([index for index in order if weights[index] > 0.5][:BATCH])


def choose(weights: Any, at: int) -> Any:
    """Return the same indices with tensor operators."""
    order = torch.roll(torch.arange(len(weights)), -at)
    return order[weights[order] > 0.5][:BATCH]


@workload(
    finds=("python-hot-spot", "cpu-before-first-kernel", "loop-code"),
    cpu_scale=1 / 8,
    shown_on="cpu",
)
def python_hot_spot(run: Setup) -> Iterator[Any]:
    """A Python function between two steps that looks at one value after the other.

    Which samples to show the model next is decided in a loop over ten thousand weights, while the
    GPU has nothing to do.

    The cure: the same decision with tensor operators, a few microseconds."""
    width = run.size(1024, 32)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model = model.to(run.device)
    samples = torch.randn(SAMPLES, width, device=run.device)
    weights = torch.rand(SAMPLES)
    listed = weights.tolist()
    optimizer = sgd(model)

    step = 0
    while True:
        at = step * 97 % SAMPLES
        rows = choose(weights, at) if run.cured else choose_slowly(listed, at)
        x = samples[rows.to(run.device)]
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        yield loss.detach()
