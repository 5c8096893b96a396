"""Large batches copied to the GPU from ordinary, pageable memory.

The driver has to stage such a copy through a pinned buffer, piece by piece, and the host thread
stands still meanwhile: nothing can be launched, and copy and compute cannot overlap.

The cure: pinned memory, ``non_blocking=True``, and a stream of its own on which the next batch is
copied while the present one is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("pageable-copies",), cpu_scale=1 / 64)

DISTINCT = 4  # batches, used in turn


def batches(run: Setup, width: int) -> Iterator[Any]:
    """Batches on the device, for ever."""
    host = [torch.randn(run.size(16384, 8), width) for _ in range(DISTINCT)]
    if not (run.cured and run.on_gpu):
        while True:
            for batch in host:
                yield batch.to(run.device)

    host = [batch.pin_memory() for batch in host]
    side = torch.cuda.Stream()
    ahead: Any = None
    while True:
        for batch in host:
            with torch.cuda.stream(side):
                coming = batch.to(run.device, non_blocking=True)
            if ahead is not None:
                ready, event = ahead
                torch.cuda.current_stream().wait_event(event)
                ready.record_stream(torch.cuda.current_stream())
                yield ready
            event = torch.cuda.Event()
            event.record(side)
            ahead = coming, event


def loop(run: Setup) -> Iterator[Any]:
    """Train an autoencoder; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width = 2048 if run.on_gpu else 256
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(
        run.device, dtype
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    for batch in batches(run, width):
        optimizer.zero_grad()
        batch = batch.to(dtype)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
