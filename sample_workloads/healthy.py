"""Controls: programs with nothing to complain about."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import train

LAYERS, HEAD = 6, 64
VOCABULARY = 8192


@workload(finds=(), shown_on="cpu", cpu_scale=1 / 16)
def healthy_cnn(run: Setup) -> Iterator[Any]:
    """A control: a channels-last CNN in bf16 with nothing to complain about.

    Wide convolutions, a large batch that stays on the GPU, no value read. Both variants are the
    same, and no finding may appear."""
    width, batch = run.size(256, 16), run.size(512, 8)
    parts: list[Any] = []
    before = 16
    for _ in range(6):
        parts += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 16))
    model = model.to(run.device, run.dtype).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 16, 32, 32, device=run.device, dtype=run.dtype)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(16, (batch,), device=run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    yield from train(optimizer, lambda: cross_entropy(model(images), labels))


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


@workload(finds=(), shown_on="cpu", cpu_scale=1 / 16)
def healthy_transformer(run: Setup) -> Iterator[Any]:
    """A control: a compiled transformer in bf16 with nothing to complain about.

    Fused attention, a fused optimizer, large batches that stay on the GPU, no value read. Both
    variants are the same, and no finding may appear. (On a CPU the model is traced but not
    compiled, so that no C++ compiler is needed.)"""
    torch._dynamo.reset()
    width, batch, tokens = run.size(1024, HEAD), run.size(16), run.size(1024, 32)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        *(TransformerBlock(width) for _ in range(run.size(LAYERS, 2))),
        nn.LayerNorm(width),
        nn.Linear(width, VOCABULARY, bias=False),
    ).to(run.device, run.dtype)
    compiled = torch.compile(model, fullgraph=True, backend=run.backend)
    words = torch.randint(VOCABULARY, (batch, tokens + 1), device=run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss() -> Any:
        logits = compiled(words[:, :-1])
        return cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    yield from train(optimizer, loss)
