"""Short epochs that start their loader's workers anew each time.

An epoch has four batches, and without ``persistent_workers`` each begins with new processes: import
of modules, a copy of the data set, the first batch without anything prefetched.

The cure: ``persistent_workers=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("workers-respawned",),
    also=("dataloader-wait",),
    shown_on="cpu",
    cpu_scale=1 / 8,
    steps=12,
)

EPOCH = 4  # batches
WORKERS = 2


def loop(run: Setup) -> Iterator[Any]:
    """Train a small classifier; yields the loss of each step."""
    torch.manual_seed(run.seed)
    batch, width = 64, run.size(1024, 64)
    samples = TensorDataset(torch.randn(EPOCH * batch, width), torch.randint(10, (EPOCH * batch,)))
    loader = DataLoader(
        samples,
        batch_size=batch,
        num_workers=WORKERS,
        pin_memory=run.on_gpu,
        persistent_workers=run.cured,
    )
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))
    model.to(run.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        for inputs, labels in loader:
            inputs = inputs.to(run.device, non_blocking=True)
            labels = labels.to(run.device, non_blocking=True)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            yield loss.detach()
