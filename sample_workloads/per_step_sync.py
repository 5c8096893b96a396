"""Values read from the GPU in every step.

The gradient's norm is printed layer by layer with ``.item()``, and the loss too. Each read waits
until the GPU has worked off everything that was launched; then the GPU waits until the host has
launched something new.

The cure: norms are computed on the device, all at once, and read every hundred steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("implicit-sync",), cpu_scale=1 / 16)

LAYERS = 12
EVERY = 100


def loop(run: Setup) -> Iterator[Any]:
    """Train a deep network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(1024, 32), run.size(2048, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    step = 0
    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if run.cured:
            norms = torch.stack(torch._foreach_norm(gradients))
            if step % EVERY == EVERY - 1:
                norms.tolist()
        else:
            for gradient in gradients:
                gradient.norm().item()
        optimizer.step()
        step += 1
        yield loss.detach() if run.cured else loss.item()
