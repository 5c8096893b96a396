"""A compiled model that meets a new shape in every step.

Compiled for fixed shapes (``dynamic=False``), each new length is compiled anew, which takes seconds
where a step takes milliseconds; after eight of them ``torch.compile`` gives up and runs eagerly.

Here the limit is lifted, as it often is.

The cure: ``dynamic=True``, compiled once for all lengths. (On a CPU the model is traced but not
compiled, so that no C++ compiler is needed; tracing anew costs enough.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("recompilation",), shown_on="cpu", cpu_scale=1 / 8, steps=6, around=8, stacks=False
)


def loop(run: Setup) -> Iterator[Any]:
    """Train on sequences of any length; yields the loss of each step."""
    torch.manual_seed(run.seed)
    torch._dynamo.reset()
    width, batch = run.size(512, 32), run.size(64, 2)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*layers).to(run.device)
    compiled = torch.compile(
        model, dynamic=run.cured, backend="inductor" if run.on_gpu else "aot_eager"
    )
    inputs = torch.randn(batch, 512, width, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    step = 0
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        while True:
            length = 64 + 37 * step % 448
            step += 1
            optimizer.zero_grad()
            x = inputs[:, :length]
            loss = (compiled(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach()
