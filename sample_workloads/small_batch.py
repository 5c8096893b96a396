"""A batch too small to fill the GPU: a few very long rows, one thread block each.

Normalisation and softmax of a row run in one block, on one multiprocessor, and a batch of eight
recordings of half a million samples leaves all others without work, for milliseconds.

The cure: sixteen times the batch, which takes hardly longer. (The learning rate would have to
follow; here it does not matter.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm, log_softmax

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("small-grids", "low-occupancy"),
    cpu_scale=1 / 64,
    samples=(8, 128),
    differs="batches are of different sizes",
)

SLOW_BATCH, CURED_BATCH = 8, 128


def loop(run: Setup) -> Iterator[Any]:
    """Train weights over time; yields the loss of each step."""
    torch.manual_seed(run.seed)
    length = run.size(1 << 19, 64)
    batch = CURED_BATCH if run.cured else SLOW_BATCH
    waves = torch.randn(batch, length, device=run.device)
    gain = nn.Parameter(torch.ones(length, device=run.device))
    optimizer = torch.optim.SGD([gain], lr=1e-3)

    while True:
        optimizer.zero_grad()
        scores = layer_norm(waves, (length,), gain)
        loss = -log_softmax(scores, 1)[:, 0].mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
