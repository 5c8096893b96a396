"""A control: a channels-last CNN in bf16 with nothing to complain about.

Wide convolutions, a large batch that stays on the GPU, no value read. Both variants are the same,
and no finding may appear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=(), shown_on="cpu", cpu_scale=1 / 16)


def loop(run: Setup) -> Iterator[Any]:
    """Train an image classifier; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(256, 16), run.size(512, 8)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers: list[Any] = []
    before = 16
    for _ in range(6):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 16))
    model = model.to(run.device, dtype).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 16, 32, 32, device=run.device, dtype=dtype)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(16, (batch,), device=run.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    while True:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        yield loss.detach()
