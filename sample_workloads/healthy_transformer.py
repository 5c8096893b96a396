"""A control: a compiled transformer in bf16 with nothing to complain about.

Fused attention, a fused optimizer, large batches that stay on the GPU, no value read. Both variants
are the same, and no finding may appear. (On a CPU the model is traced but not compiled, so that no
C++ compiler is needed.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=(), shown_on="cpu", cpu_scale=1 / 16)

LAYERS, HEAD = 6, 64
VOCABULARY = 8192


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Batch x tokens x width, in and out."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


def loop(run: Setup) -> Iterator[Any]:
    """Train a language model; yields the loss of each step."""
    torch.manual_seed(run.seed)
    torch._dynamo.reset()
    width, batch, tokens = run.size(1024, HEAD), run.size(16), run.size(1024, 32)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        *(TransformerBlock(width) for _ in range(run.size(LAYERS, 2))),
        nn.LayerNorm(width),
        nn.Linear(width, VOCABULARY, bias=False),
    ).to(run.device, dtype)
    compiled = torch.compile(
        model, fullgraph=True, backend="inductor" if run.on_gpu else "aot_eager"
    )
    words = torch.randint(VOCABULARY, (batch, tokens + 1), device=run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    while True:
        optimizer.zero_grad()
        logits = compiled(words[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        yield loss.detach()
