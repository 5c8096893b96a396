"""Matrix products in full fp32, on a GPU whose tensor cores stand idle.

PyTorch multiplies fp32 matrices in full precision by default, on the CUDA cores. Tensor
cores do it in TF32 about eight times faster on an A100.

The cure: one line, ``torch.set_float32_matmul_precision("high")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("fp32-matmul",),
    cpu_scale=1 / 32,
    differs="TF32 keeps 10 bits of the mantissa instead of 23 (on a CPU the results are the same)",
)


def loop(run: Setup) -> Iterator[Any]:
    """Train a network of large layers; yields the loss of each step."""
    torch.manual_seed(run.seed)
    torch.set_float32_matmul_precision("high" if run.cured else "highest")
    width, batch = run.size(4096, 32), run.size(8192, 16)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers).to(run.device)
    inputs = torch.randn(batch, width, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
