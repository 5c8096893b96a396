"""A Python function between two steps that looks at one value after the other.

Which samples to show the model next is decided in a loop over ten thousand weights, while the GPU
has nothing to do.

The cure: the same decision with tensor operators, a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("python-hot-spot", "cpu-before-first-kernel", "loop-code"),
    cpu_scale=1 / 8,
    shown_on="cpu",
)

SAMPLES, BATCH = 20_000, 256


def choose_slowly(weights: list[float], at: int) -> Any:
    """Indices of the first samples from ``at`` on that weigh more than a half."""
    count = len(weights)
    order = [(at + offset) % count for offset in range(count)]
    return torch.tensor([index for index in order if weights[index] > 0.5][:BATCH])


def choose(weights: Any, at: int) -> Any:
    """The same with tensor operators."""
    order = torch.roll(torch.arange(len(weights)), -at)
    return order[weights[order] > 0.5][:BATCH]


def loop(run: Setup) -> Iterator[Any]:
    """Train on chosen samples; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width = run.size(1024, 32)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    model = model.to(run.device)
    samples = torch.randn(SAMPLES, width, device=run.device)
    weights = torch.rand(SAMPLES)
    listed = weights.tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

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
