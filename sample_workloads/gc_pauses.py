"""A replay buffer of Python objects, and the garbage collector that walks through it.

Thousands of small dictionaries are made in every step and kept for a while. Every few steps the
collector of cyclic garbage looks at all of them, finds nothing, and the training loop stands still
meanwhile.

The cure: ``gc.disable()``, and a collection by hand now and then, between epochs. What is not
cyclic is freed as before.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("gc-pauses",), shown_on="cpu", cpu_scale=1 / 8, around=60)

KEPT = 40  # steps whose records stay in the buffer
EVERY = 500  # steps between collections by hand


def loop(run: Setup) -> Iterator[Any]:
    """Train on samples from a replay buffer; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, records = run.size(1024, 64), 6000
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    model = model.to(run.device)
    observations = torch.randn(256, width, device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    buffer: deque[list[dict[str, Any]]] = deque(maxlen=KEPT)

    gc.enable()
    if run.cured:
        gc.collect()
        gc.disable()
    step = 0
    while True:
        buffer.append([{"step": step, "tags": [n], "seen": {}} for n in range(records)])
        rows = torch.tensor([record["tags"][0] % 256 for record in buffer[-1][:64]])
        x = observations[rows.to(run.device)]
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if run.cured and step % EVERY == 0:
            gc.collect()
        yield loss.detach()
