"""A transformer that answers one request at a time, in fp32.

A batch of one gives the GPU kernels of a few microseconds, which the host cannot launch fast
enough, and fp32 leaves the tensor cores idle.

The cure: requests gathered into batches of 32, in bf16 (on a GPU; a CPU stays with fp32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("launch-bound", "cuda-graphs-unused", "small-grids", "fp32-matmul"),
    cpu_scale=1 / 8,
    samples=(1, 32),
    differs="16 bits instead of 32, and answers to more requests",
)

LAYERS, TOKENS = 12, 128


def loop(run: Setup) -> Iterator[Any]:
    """Answer requests; yields the mean of each answer."""
    torch.manual_seed(run.seed)
    width = run.size(1024, 32)
    layer = nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval().to(run.device)
    requests = torch.randn(32, TOKENS, width, device=run.device)
    if run.cured and run.on_gpu:
        model, requests = model.to(torch.bfloat16), requests.to(torch.bfloat16)

    turn = 0
    while True:
        batch = requests if run.cured else requests[turn % 32 : turn % 32 + 1]
        with torch.inference_mode():
            answer = model(batch).float().mean()
        turn += 1
        yield answer
