"""Attention written out: product, scaling, mask, softmax, product.

The matrix of scores, tokens x tokens for each head, is written to memory and read back four times
on the way.

The cure: ``scaled_dot_product_attention``, which computes the same in one kernel that keeps the
scores on the chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("unfused-attention",), cpu_scale=1 / 32)

HEADS, HEAD = 16, 64


class Attention(nn.Module):
    """Causal self-attention with a residual."""

    def __init__(self, tokens: int, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEADS * HEAD)
        self.qkv = nn.Linear(HEADS * HEAD, 3 * HEADS * HEAD)
        self.out = nn.Linear(HEADS * HEAD, HEADS * HEAD)
        self.fused = fused
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        self.register_buffer("mask", ~mask, persistent=False)

    def forward(self, x: Any) -> Any:
        """Batch x tokens x width, in and out."""
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        if self.fused:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(2, 3)) * HEAD**-0.5
            attended = scores.masked_fill(self.mask, float("-inf")).softmax(3) @ v
        return x + self.out(attended.transpose(1, 2).flatten(2))


def loop(run: Setup) -> Iterator[Any]:
    """Train four attention layers; yields the loss of each step."""
    torch.manual_seed(run.seed)
    tokens, batch = run.size(2048, 32), run.size(8)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    model = nn.Sequential(*(Attention(tokens, run.cured) for _ in range(4))).to(run.device, dtype)
    inputs = torch.randn(batch, tokens, HEADS * HEAD, device=run.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
