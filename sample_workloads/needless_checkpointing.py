"""Activation checkpointing in a model that fits the memory many times over.

Every block throws its activations away and computes them again in the backward pass: a third more
arithmetic, to save memory that nobody needs.

The cure: no checkpointing, or only for as many blocks as the memory asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("recompute-with-free-memory",), cpu_scale=1 / 32)


def loop(run: Setup) -> Iterator[Any]:
    """Train a network of wide blocks; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(2048, 32), run.size(8192, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(6)
    ).to(run.device, dtype)
    inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        hidden = inputs
        for block in blocks:
            if run.cured:
                hidden = hidden + block(hidden)
            else:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.float().square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
