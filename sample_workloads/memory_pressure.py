"""A batch chosen as large as the GPU's memory allows.

Activations fill nearly all of it. The next longer sequence, an evaluation step or fragmentation
ends the run; before that the allocator hands memory back and takes it again, waiting for the device
each time.

The cure: half the batch, with gradients of two of them added up where the larger one is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("memory-near-capacity",),
    cpu_scale=1 / 16,
    steps=4,
    samples=(2, 1),
    differs="batches are of different sizes",
)

LAYERS = 16
FULL = 0.94  # of the memory, in the slow variant


def largest_batch(run: Setup, width: int) -> int:
    """Rows whose activations fill the memory that is free."""
    if not run.on_gpu:
        return run.size(4096, 8)
    free, total = torch.cuda.mem_get_info()
    row = (2 * LAYERS + 5) * width * 2  # two tensors a layer are kept; bf16
    return int((free - (1 - FULL) * total) / row)


def loop(run: Setup) -> Iterator[Any]:
    """Train a deep network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width = run.size(2048, 32)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    batch = largest_batch(run, width) // (2 if run.cured else 1)
    inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        yield loss.detach()
