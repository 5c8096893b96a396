"""Sequences that are a little longer in every batch.

No block that the allocator holds is large enough for the next batch, so it asks the driver for more
in every step, waits for it, and the memory it has already lies idle in pieces.

The cure: lengths rounded up to a multiple of 512, so that blocks fit again. (Positions beyond the
length are masked, the results are the same.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("allocations-in-loop", "memory-fragmentation"), cpu_scale=1 / 32, steps=12
)

ROUND = 512


def loop(run: Setup) -> Iterator[Any]:
    """Train on sequences sorted by length; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = 512, run.size(64, 2)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(
        run.device, dtype
    )
    inputs = torch.randn(batch, 2048, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    step = 0
    while True:
        length = 256 + 13 * step % 1536
        step += 1
        padded = -(-length // ROUND) * ROUND if run.cured else length
        x = inputs[:, :padded]
        optimizer.zero_grad()
        error = (model(x) - x).float().square().mean(2)
        loss = error[:, :length].mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
