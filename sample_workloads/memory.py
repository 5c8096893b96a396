"""Memory: held too long, in pieces, nearly full, or saved where nobody needs it."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import layers, sgd, train, wide_block

BATCHES = 8  # of validation a step


@workload(finds=("eval-without-no-grad",), shown_on="cpu", cpu_scale=1 / 32)
def eval_with_grad(run: Setup) -> Iterator[Any]:
    """Validation that builds a graph nobody uses.

    Without ``torch.no_grad()`` every validation batch keeps its activations for a backward pass
    that never comes. Here its outputs are kept until the metric is computed, and the graphs
    with them.

    The cure: ``torch.inference_mode()`` around validation."""
    width, batch = run.size(2048, 32), run.size(8192, 16)
    model = layers(run, width, 4, nn.GELU)
    inputs = torch.randn(BATCHES + 1, batch, width, device=run.device, dtype=run.dtype)
    for _ in train(sgd(model), lambda: (model(inputs[0]) - inputs[0]).square().mean()):
        yield validate(model, inputs[1:], grad=not run.cured).detach()


def validate(model: Any, batches: Any, grad: bool) -> Any:
    """Return the mean error over all batches."""
    model.eval()
    with nullcontext() if grad else torch.inference_mode():
        outputs = [model(batch) for batch in batches]
        errors = [(o - b).square().mean() for o, b in zip(outputs, batches, strict=True)]
        error = torch.stack(errors).mean()
    model.train()
    return error


ROUND = 512


@workload(finds=("allocations-in-loop", "memory-fragmentation"), cpu_scale=1 / 32, steps=12)
def fragmentation(run: Setup) -> Iterator[Any]:
    """Sequences that are a little longer in every batch.

    No block that the allocator holds is large enough for the next batch. So it asks the driver for
    more in every step and waits for it. The memory it has already lies idle in pieces.

    The cure: lengths rounded up to a multiple of 512, so that blocks fit again. (Positions beyond
    the length are masked, the results are the same.)"""
    width, batch = 512, run.size(64, 2)
    model = wide_block(width).to(run.device, run.dtype)
    inputs = torch.randn(batch, 2048, width, device=run.device, dtype=run.dtype)
    optimizer = sgd(model)

    step = 0
    while True:
        length = 256 + 13 * step % 1536
        step += 1
        padded = -(-length // ROUND) * ROUND if run.cured else length
        x = inputs[:, :padded]
        optimizer.zero_grad()
        error = (model(x) - x).float().square().mean(2)
        loss = error[:, :length].mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()


VOCABULARY = 128_000
CHUNK = 1024  # tokens


def loss_of(hidden: Any, head: Any, targets: Any) -> Any:
    """Return the loss, a sum over the tokens."""
    return cross_entropy(head(hidden).float(), targets, reduction="sum")


@workload(finds=("huge-vocabulary",), cpu_scale=1 / 64)
def huge_vocabulary(run: Setup) -> Iterator[Any]:
    """Cross entropy over 128,000 words, for all tokens at once.

    Logits, their log-softmax and their gradient are each tokens x vocabulary. They are the largest
    tensors of the step and decide how large the batch can be.

    The cure: the loss in chunks of tokens, each recomputed in its backward pass, so that no tensor
    of the full size exists. It costs one more product of the last layer and frees gigabytes."""
    width, tokens = run.size(2048, 32), run.size(8192, 16)
    words = VOCABULARY if run.on_gpu else run.size(VOCABULARY)
    body = nn.Sequential(nn.Linear(width, width), nn.GELU()).to(run.device, run.dtype)
    head = nn.Linear(width, words, bias=False).to(run.device, run.dtype)
    inputs = torch.randn(tokens, width, device=run.device, dtype=run.dtype)
    targets = torch.randint(words, (tokens,), device=run.device)

    def loss() -> Any:
        hidden = body(inputs)
        if not run.cured:
            return loss_of(hidden, head, targets) / tokens
        parts = [
            checkpoint(loss_of, h, head, t, use_reentrant=False)
            for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        ]
        return torch.stack(parts).sum() / tokens

    yield from train(sgd(nn.ModuleList([body, head])), loss)


EPOCH = 500  # steps


@workload(finds=("memory-leak",), cpu_scale=1 / 16, around=90)
def leak(run: Setup) -> Iterator[Any]:
    """Predictions of every step, kept on the GPU for a metric at the end of the epoch.

    Each step's outputs stay in a list; memory grows until it is full.

    The cure: what the metric needs is computed at once, and only that number is kept."""
    width, batch = run.size(1024, 64), run.size(4096, 64)
    model = layers(run, width, 4)
    optimizer = sgd(model)

    kept: list[Any] = []  # for the metric
    while True:
        inputs = torch.randn(batch, width, device=run.device, dtype=run.dtype)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = (outputs - inputs).square().mean()
        loss.backward()
        kept.append(outputs.detach().abs().mean() if run.cured else outputs)
        optimizer.step()
        if len(kept) == EPOCH:
            kept.clear()
        yield loss.detach()


FULL = 0.95  # of the memory, in the slow variant
TRIAL = 16_384  # rows


def largest_batch(model: Any, width: int, dtype: Any) -> int:
    """Estimate the rows that fill the GPU's memory, extrapolated from a small batch."""
    device = next(model.parameters()).device
    model(torch.randn(1, width, device=device, dtype=dtype)).sum().backward()  # gradients exist
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(TRIAL, width, device=device, dtype=dtype)).sum().backward()
    row = (torch.cuda.max_memory_allocated() - before) / TRIAL
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int((free - (1 - FULL) * total) / row)


@workload(
    finds=("memory-near-capacity",),
    cpu_scale=1 / 16,
    steps=4,
    samples=(2, 1),
    differs="batches are of different sizes",
)
def memory_pressure(run: Setup) -> Iterator[Any]:
    """A batch chosen as large as the GPU's memory allows.

    Activations fill nearly all of it. The next longer sequence, an evaluation step or fragmentation
    ends the run. Before that the allocator hands memory back and takes it again, and waits for the
    device each time.

    The cure: half the batch, with gradients of two of them added up where the larger one is needed.
    """
    width = run.size(2048, 32)
    model = layers(run, width, 16, nn.GELU)
    batch = largest_batch(model, width, run.dtype) if run.on_gpu else run.size(4096, 8)
    batch //= 2 if run.cured else 1
    inputs = torch.randn(batch, width, device=run.device, dtype=run.dtype)
    optimizer = sgd(model)

    while True:
        optimizer.zero_grad(set_to_none=False)
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@workload(finds=("recompute-with-free-memory",), cpu_scale=1 / 32)
def needless_checkpointing(run: Setup) -> Iterator[Any]:
    """Activation checkpointing in a model that fits the memory many times over.

    Every block throws its activations away and computes them again in the backward pass: a third
    more arithmetic, to save memory that nobody needs.

    The cure: no checkpointing, or only for as many blocks as the memory asks for."""
    width, batch = run.size(2048, 32), run.size(8192, 16)
    blocks = nn.ModuleList(wide_block(width) for _ in range(6)).to(run.device, run.dtype)
    inputs = torch.randn(batch, width, device=run.device, dtype=run.dtype)

    def loss() -> Any:
        hidden = inputs
        for block in blocks:
            if run.cured:
                hidden = hidden + block(hidden)
            else:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return hidden.float().square().mean()

    yield from train(sgd(blocks), loss)
