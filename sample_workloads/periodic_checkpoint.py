"""A checkpoint of a large table, written by the training loop itself every eight steps.

``torch.save`` copies the weights to the host, packs them and waits for the disk; all GPUs of the
job wait with it.

The cure: the weights are copied, and a thread writes the copy while training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("periodic-stalls",), shown_on="cpu", cpu_scale=1 / 4, steps=32)

EVERY = 8


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state on the host, which later steps do not change."""
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def loop(run: Setup) -> Iterator[Any]:
    """Train and save; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, batch, words = run.size(1024, 32), run.size(1024, 16), run.size(1 << 18, 1024)
    model = nn.Sequential(
        nn.Embedding(words, width, sparse=True), nn.Linear(width, width), nn.ReLU()
    ).to(run.device)
    inputs = torch.randint(words, (batch,), device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    path = Path(run.folder, f"checkpoint-{run.variant}.pt") if run.folder else None
    writer = ThreadPoolExecutor(1)
    writing: Future[None] | None = None
    step = 0
    try:
        while True:
            optimizer.zero_grad()
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0 and path is not None:
                if not run.cured:
                    torch.save(model.state_dict(), path)
                else:
                    if writing is not None:
                        writing.result()
                    state = on_host(model.state_dict())
                    writing = writer.submit(torch.save, state, path)
            yield loss.detach()
    finally:
        writer.shutdown()
        if path is not None:
            path.unlink(missing_ok=True)
