"""A data set on slow storage, read by the training process itself.

Each sample takes two milliseconds to read, as from a network file system, and ``num_workers=0``
reads one after the other between two steps. The time is spent waiting, not computing, so the
processor looks idle and so does the GPU.

The cure: workers that read ahead, in parallel. Waiting needs no core, so there may be more of them
than cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("single-process-loader",), shown_on="cpu", cpu_scale=1 / 32, steps=8)

READ_S = 0.002  # to read one sample
BATCH = 16
WORKERS = 8


class Stored(Dataset):
    """Sequences of 64 vectors whose reading takes a while."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ_S)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, self.width, generator=generator).expand(64, -1).contiguous()


def loop(run: Setup) -> Iterator[Any]:
    """Train an autoencoder; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width = run.size(8192, 128)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    loader = DataLoader(
        Stored(width // 16),
        batch_size=BATCH,
        num_workers=WORKERS if run.cured else 0,
        pin_memory=run.on_gpu,
        persistent_workers=run.cured,
    )
    model = nn.Sequential(
        nn.Linear(width // 16, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width // 16),
    ).to(run.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        for batch in loader:
            batch = batch.to(run.device, dtype, non_blocking=True)
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach()
