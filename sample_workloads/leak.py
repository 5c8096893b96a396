"""Predictions of every step, kept on the GPU for a metric at the end of the epoch.

Each step's outputs stay in a list; memory grows until it is full.

The cure: what the metric needs is computed at once, and only that number is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("memory-leak",), cpu_scale=1 / 16, around=90)

EPOCH = 500  # steps


def loop(run: Setup) -> Iterator[Any]:
    """Train a small network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(1024, 64), run.size(4096, 64)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    kept: list[Any] = []  # for the metric
    while True:
        inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = (outputs - inputs).square().mean()
        loss.backward()
        kept.append(outputs.detach().abs().mean() if run.cured else outputs)
        optimizer.step()
        if len(kept) == EPOCH:
            kept.clear()
        yield loss.detach()
