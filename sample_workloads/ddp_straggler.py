"""One process of two that gets three quarters of the work.

Samples are dealt out by file, and one file is larger: its process computes longer, and the other
waits for it in every all-reduce.

The cure: samples dealt out evenly. (The gradient is weighted by samples, so it is the same.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("straggler-rank",),
    processes=2,
    shown_on="cpu",
    cpu_scale=1 / 16,
    differs="each process sees other samples",
)


def loop(run: Setup) -> Iterator[Any]:
    """Train on each process's part of the data; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(4096, 32), run.size(8192, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(run.device, dtype))
    inputs = torch.randn(2 * batch, width, device=run.device, dtype=dtype)
    cut = batch if run.cured else batch // 2
    mine = inputs[:cut] if run.rank == 0 else inputs[cut:]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = (model(mine) - mine).square().mean() * len(mine) / batch
        loss.backward()
        optimizer.step()
        yield loss.detach()
