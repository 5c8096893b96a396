"""Gradient accumulation that sends the gradients after every micro-batch.

Four micro-batches make one optimizer step, and only the sum of their gradients is needed, but
``DistributedDataParallel`` averages over the processes in every backward pass.

The cure: ``model.no_sync()`` for all but the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("missing-no-sync",), processes=2, cpu_scale=1 / 32)

MICRO = 4  # micro-batches an optimizer step


def loop(run: Setup) -> Iterator[Any]:
    """Train on each process's part of the data; yields the loss of each optimizer step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(4096, 32), run.size(1024, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(run.device, dtype))
    torch.manual_seed(run.seed + 1 + run.rank)
    inputs = torch.randn(MICRO, batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        total = torch.zeros((), device=run.device)
        for number, micro in enumerate(inputs):
            waits = run.cured and number < MICRO - 1
            with model.no_sync() if waits else nullcontext():
                loss = (model(micro) - micro).square().mean() / MICRO
                loss.backward()
            total += loss.detach()
        optimizer.step()
        yield total
