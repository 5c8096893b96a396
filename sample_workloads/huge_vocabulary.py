"""Cross entropy over 128,000 words, for all tokens at once.

Logits, their log-softmax and their gradient, each tokens x vocabulary, are the largest tensors of
the whole step and decide how large the batch can be.

The cure: the loss in chunks of tokens, each recomputed in its backward pass, so that no tensor of
the full size exists. It costs one more product of the last layer and frees gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("huge-vocabulary",), cpu_scale=1 / 64)

VOCABULARY = 128_000
CHUNK = 1024  # tokens


def loss_of(hidden: Any, head: Any, targets: Any) -> Any:
    """Sum over the tokens."""
    return cross_entropy(head(hidden).float(), targets, reduction="sum")


def loop(run: Setup) -> Iterator[Any]:
    """Train the last layers of a language model; yields the loss of each step."""
    torch.manual_seed(run.seed)
    width, tokens = run.size(2048, 32), run.size(8192, 16)
    words = VOCABULARY if run.on_gpu else run.size(VOCABULARY)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    body = nn.Sequential(nn.Linear(width, width), nn.GELU()).to(run.device, dtype)
    head = nn.Linear(width, words, bias=False).to(run.device, dtype)
    inputs = torch.randn(tokens, width, device=run.device, dtype=dtype)
    targets = torch.randint(words, (tokens,), device=run.device)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-3)

    while True:
        optimizer.zero_grad()
        hidden = body(inputs)
        if run.cured:
            parts = [
                checkpoint(loss_of, h, head, t, use_reentrant=False)
                for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
            ]
            loss = torch.stack(parts).sum() / tokens
        else:
            loss = loss_of(hidden, head, targets) / tokens
        loss.backward()
        optimizer.step()
        yield loss.detach()
