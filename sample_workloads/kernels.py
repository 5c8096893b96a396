"""Kernels that reach little of what the GPU can do: formats, layouts, sizes, fusion."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm, log_softmax, scaled_dot_product_attention

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import layers, sgd, train

HEADS, HEAD = 16, 64


@workload(
    finds=("fp32-matmul",),
    cpu_scale=1 / 32,
    differs="TF32 keeps 10 bits of the mantissa instead of 23 (on a CPU the results are the same)",
)
def fp32_matmul(run: Setup) -> Iterator[Any]:
    """Matrix products in full fp32, on a GPU whose tensor cores stand idle.

    PyTorch multiplies fp32 matrices in full precision by default, on the CUDA cores. Tensor
    cores do it in TF32 about eight times faster on an A100.

    The cure: one line, ``torch.set_float32_matmul_precision("high")``."""
    torch.set_float32_matmul_precision("high" if run.cured else "highest")
    width, batch = run.size(4096, 32), run.size(8192, 16)
    model = layers(run, width, 4).float()
    inputs = torch.randn(batch, width, device=run.device)
    yield from train(sgd(model), lambda: (model(inputs) - inputs).square().mean())


class ConvolutionBlock(nn.Module):
    """Two convolutions and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Any) -> Any:
        """Images in, images out."""
        return torch.relu(x + self.body(x))


@workload(finds=("layout-transposes",), cpu_scale=1 / 16)
def nchw_convolution(run: Setup) -> Iterator[Any]:
    """Convolutions in 16 bits on tensors in PyTorch's default order, NCHW.

    Tensor cores convolve in channels-last order, so each tensor is transposed before a convolution
    and back after it, in kernels that compute nothing.

    The cure: ``channels_last`` for model and images."""
    width, batch = run.size(256, 16), run.size(256, 4)
    model = nn.Sequential(*(ConvolutionBlock(width) for _ in range(4)), nn.AdaptiveAvgPool2d(1))
    images = torch.randn(batch, width, 28, 28)
    if run.cured:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    model, images = model.to(run.device, run.dtype), images.to(run.device, run.dtype)
    yield from train(sgd(model), lambda: model(images).float().square().mean())


@workload(
    finds=("small-grids", "low-occupancy"),
    cpu_scale=1 / 64,
    samples=(8, 128),
    differs="batches are of different sizes",
)
def small_batch(run: Setup) -> Iterator[Any]:
    """A batch too small to fill the GPU: a few very long rows, one thread block each.

    Normalisation and softmax of a row run in one block, on one multiprocessor. A batch of eight
    recordings of half a million samples leaves all others without work, for milliseconds.

    The cure: sixteen times the batch, which takes hardly longer. (The learning rate would have to
    follow; here it does not matter.)"""
    length = run.size(1 << 19, 64)
    waves = torch.randn(128 if run.cured else 8, length, device=run.device)
    gain = nn.Parameter(torch.ones(length, device=run.device))

    def loss() -> Any:
        scores = layer_norm(waves, (length,), gain)
        return -log_softmax(scores, 1)[:, 0].mean()

    yield from train(torch.optim.SGD([gain], lr=1e-3), loss)


@workload(finds=("single-tensor-optimizer",), cpu_scale=1 / 8, steps=4)
def single_tensor_optimizer(run: Setup) -> Iterator[Any]:
    """AdamW that updates one parameter after the other.

    With ``foreach=False`` (as with optimizers written by hand) each of some hundred parameters gets
    a dozen tiny kernels per step.

    The cure: ``fused=True``, a few kernels for all parameters together."""
    width, batch = run.size(512, 32), run.size(8192, 16)
    model = layers(run, width, 24)
    inputs = torch.randn(batch, width, device=run.device, dtype=run.dtype)
    kind = {"fused": True} if run.cured else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
    yield from train(optimizer, lambda: (model(inputs) - inputs).float().square().mean())


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


@workload(finds=("unfused-attention",), cpu_scale=1 / 32)
def unfused_attention(run: Setup) -> Iterator[Any]:
    """Attention written out: product, scaling, mask, softmax, product.

    The matrix of scores, tokens x tokens for each head, is written to memory and read back four
    times on the way.

    The cure: ``scaled_dot_product_attention``, which computes the same in one kernel that keeps the
    scores on the chip."""
    tokens, batch = run.size(2048, 32), run.size(8)
    model = nn.Sequential(*(Attention(tokens, run.cured) for _ in range(4)))
    model = model.to(run.device, run.dtype)
    inputs = torch.randn(batch, tokens, HEADS * HEAD, device=run.device, dtype=run.dtype)
    yield from train(sgd(model), lambda: model(inputs).float().square().mean())
