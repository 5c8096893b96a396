"""Gradients that are averaged over all GPUs only after the whole backward pass.

One all-reduce a parameter, after ``backward()``: nothing is computed meanwhile, and the network
stands idle before.

The cure: ``DistributedDataParallel``, which sends the gradients of the last layers while those of
the first are still being computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("exposed-communication", "poor-overlap", "small-collectives"),
    processes=2,
    cpu_scale=1 / 32,
)


def loop(run: Setup) -> Iterator[Any]:
    """Train on each process's part of the data; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(4096, 32), run.size(4096, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    if run.cured:
        model = DistributedDataParallel(model)
    torch.manual_seed(run.seed + 1 + run.rank)
    inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        if not run.cured:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        yield loss.detach()
