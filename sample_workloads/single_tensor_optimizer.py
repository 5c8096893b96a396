"""AdamW that updates one parameter after the other.

With ``foreach=False`` (as with optimizers written by hand) each of some hundred parameters gets a
dozen tiny kernels a step.

The cure: ``fused=True``, a few kernels for all parameters together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("single-tensor-optimizer",), cpu_scale=1 / 8, steps=4)

LAYERS = 24


def loop(run: Setup) -> Iterator[Any]:
    """Train a deep network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(512, 32), run.size(8192, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
    kind = {"fused": True} if run.cured else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)

    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
