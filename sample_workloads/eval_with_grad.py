"""Validation that builds a graph nobody uses.

Without ``torch.no_grad()`` every validation batch keeps its activations for a backward pass that
never comes, and here its outputs are kept until the metric is computed, and the graphs with them.

The cure: ``torch.inference_mode()`` around validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("eval-without-no-grad",), shown_on="cpu", cpu_scale=1 / 32)

BATCHES = 8  # of validation a step


def validate(model: Any, batches: Any, grad: bool) -> Any:
    """Mean error over all batches."""
    model.eval()
    with nullcontext() if grad else torch.inference_mode():
        outputs = [model(batch) for batch in batches]
        errors = [(o - b).square().mean() for o, b in zip(outputs, batches, strict=True)]
        error = torch.stack(errors).mean()
    model.train()
    return error


def loop(run: Setup) -> Iterator[Any]:
    """Train one batch and validate; yields the validation error after each step."""
    torch.manual_seed(run.seed)
    width, batch = run.size(2048, 32), run.size(8192, 16)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    inputs = torch.randn(BATCHES + 1, batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = (model(inputs[0]) - inputs[0]).square().mean()
        loss.backward()
        optimizer.step()
        yield validate(model, inputs[1:], grad=not run.cured).detach()
