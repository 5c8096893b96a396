"""What most of the programs share: layers in a row, and the training loop around a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup


def layers(run: Setup, width: int, count: int, activation: Any = nn.ReLU) -> nn.Sequential:
    """Linear layers of one width, an activation after each, on the device."""
    parts = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(count)]
    return nn.Sequential(*parts).to(run.device, run.dtype)


def wide_block(width: int) -> nn.Sequential:
    """Two linear layers with four times the width between them."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def train(optimizer: Any, loss: Callable[[], Any]) -> Iterator[Any]:
    """The training loop; yields the loss of each step, which stays on the device."""
    while True:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        yield value.detach()


def sgd(model: Any) -> Any:
    """The optimizer of most programs."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)
