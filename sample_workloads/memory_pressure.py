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
FULL = 0.95  # of the memory, in the slow variant
TRIAL = 16_384  # rows


def largest_batch(model: Any, width: int, dtype: Any) -> int:
    """Rows that fill the GPU's memory, extrapolated from what a small batch takes."""
    device = next(model.parameters()).device
    model(torch.randn(1, width, device=device, dtype=dtype)).sum().backward()  # gradients exist
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(TRIAL, width, device=device, dtype=dtype)).sum().backward()
    row = (torch.cuda.max_memory_allocated() - before) / TRIAL
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int((free - (1 - FULL) * total) / row)


def loop(run: Setup) -> Iterator[Any]:
    """Train a deep network; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width = run.size(2048, 32)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(run.device, dtype)
    batch = largest_batch(model, width, dtype) if run.on_gpu else run.size(4096, 8)
    batch //= 2 if run.cured else 1
    inputs = torch.randn(batch, width, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad(set_to_none=False)
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        yield loss.detach()
