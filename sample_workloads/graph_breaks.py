"""A compiled model with values that are read in the middle of it.

``.item()`` in each block asks whether activations have run away; the compiler cannot follow a
decision that depends on a value, so it ends one graph there and begins another.

The cure: ``torch.clamp``, which needs no decision; ``fullgraph=True`` makes sure. (On a CPU the
model is traced but not compiled, so that no C++ compiler is needed.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("graph-breaks",), cpu_scale=1 / 8)

LIMIT = 100.0


class BrokenBlock(nn.Module):
    """A residual layer that keeps its activations in bounds."""

    def __init__(self, width: int, watched: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.watched = watched

    def forward(self, x: Any) -> Any:
        """Rows in, rows out."""
        x = x + torch.nn.functional.gelu(self.linear(x))
        if self.watched:
            if x.abs().max().item() > LIMIT:
                x = x.clamp(-LIMIT, LIMIT)
            return x
        return x.clamp(-LIMIT, LIMIT)


def loop(run: Setup) -> Iterator[Any]:
    """Train a few blocks; yields the loss of each step."""
    torch.manual_seed(run.seed)
    torch._dynamo.reset()
    width, batch = run.size(512, 32), run.size(1024, 16)
    model = nn.Sequential(
        *(BrokenBlock(width, watched=not run.cured) for _ in range(run.size(6, 3)))
    )
    model = model.to(run.device)
    compiled = torch.compile(
        model, fullgraph=run.cured, backend="inductor" if run.on_gpu else "aot_eager"
    )
    inputs = torch.randn(batch, width, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = (compiled(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
