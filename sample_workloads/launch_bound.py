"""A deep and narrow network: more kernels than one host thread can launch in time.

Each layer takes the GPU some microseconds, less than Python and the launch of its kernels take, so
the GPU idles between any two kernels.

The cure: the whole step is captured once as a CUDA graph and replayed with one call. (On a CPU
there is nothing to capture, and both variants are the same.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("launch-bound", "cuda-graphs-unused"), cpu_scale=1 / 2)

LAYERS = 32
BATCH = 64


def loop(run: Setup) -> Iterator[Any]:
    """Train a deep network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width = run.size(64, 8)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(run.device)
    inputs = torch.randn(BATCH, width, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Any:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not (run.cured and run.on_gpu):
        while True:
            yield step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture needs steps before it, on another stream
        warm = [step().clone() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    yield from warm
    while True:
        graph.replay()
        yield loss.clone()
