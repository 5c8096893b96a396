"""Convolutions in 16 bits on tensors in PyTorch's default order, NCHW.

Tensor cores convolve in channels-last order, so each tensor is transposed before a convolution and
back after it, in kernels that compute nothing.

The cure: ``channels_last`` for model and images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("layout-transposes",), cpu_scale=1 / 16)


class ConvolutionBlock(nn.Module):
    """Two convolutions and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Any) -> Any:
        """Images in, images out."""
        return torch.relu(x + self.body(x))


def loop(run: Setup) -> Iterator[Any]:
    """Train a small residual network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(256, 16), run.size(256, 4)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    model = nn.Sequential(*(ConvolutionBlock(width) for _ in range(4)), nn.AdaptiveAvgPool2d(1))
    images = torch.randn(batch, width, 28, 28)
    if run.cured:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    model, images = model.to(run.device, dtype), images.to(run.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
