"""Fused operators written out as people write them are recognised by what PyTorch then runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from advisor.rules.kernel.handwritten_operator import PATTERN_NAMES, PATTERNS, chains_in

torch = pytest.importorskip("torch")


def run(function: Callable[..., Any], *tensors: Any) -> str:
    """The operators that a function calls, as words: as kernels have them, so that ``_to_copy`` is
    a copy, and what launches nothing (views) is not there."""
    from torch.utils._python_dispatch import TorchDispatchMode

    words: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func.overloadpacket.__name__
            result = func(*args, **(kwargs or {}))
            views = ("view", "slice", "unsqueeze", "expand", "t", "transpose", "split", "detach",
                     "select", "_unsafe_view", "alias", "permute")  # fmt: skip
            if name not in views:
                short_name = "copy" if name == "_to_copy" else name.removesuffix("_")
                words.append(PATTERN_NAMES.get(short_name, "_"))
            return result

    with torch.no_grad(), Log():
        function(*tensors)
    return "".join(f"{word} " for word in words)


def llama_norm(x: Any, weight: Any) -> Any:
    kind = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-6)).to(kind)


def gemma_norm(x: Any, weight: Any) -> Any:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + weight.float())).type_as(x)


def square_norm(x: Any, weight: Any) -> Any:
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * weight


def annotated_transformer_norm(x: Any, weight: Any) -> Any:
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return weight * (x - mean) / (std + 1e-6) + weight


def convnext_norm(x: Any, weight: Any) -> Any:
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return weight * x + weight


def var_norm(x: Any, weight: Any) -> Any:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(var + 1e-6) * weight + weight


def stable_softmax(x: Any, weight: Any) -> Any:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def plain_softmax(x: Any, weight: Any) -> Any:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def llama_rotary(x: Any, weight: Any) -> Any:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * weight) + (torch.cat((-second, first), dim=-1) * weight)


def rotary_by_halves(x: Any, weight: Any) -> Any:
    a, b = x.chunk(2, dim=-1)
    cos, sin = weight.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def new_gelu(x: Any, weight: Any) -> Any:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def erf_gelu(x: Any, weight: Any) -> Any:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (llama_norm, "RMS normalisation"),
        (gemma_norm, "RMS normalisation"),
        (square_norm, "RMS normalisation"),
        (annotated_transformer_norm, "layer normalisation"),
        (convnext_norm, "layer normalisation"),
        (var_norm, "layer normalisation"),
        (stable_softmax, "softmax"),
        (plain_softmax, "softmax"),
        (llama_rotary, "rotary embedding"),
        (rotary_by_halves, "rotary embedding"),
        (new_gelu, "GELU (tanh form)"),
        (erf_gelu, "GELU"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_common_handwritten_operators_are_recognized(
    function: Callable[..., Any], what: str, dtype: str
) -> None:
    x = torch.ones(2, 4, 8, dtype=getattr(torch, dtype))
    weight = torch.ones(8, dtype=x.dtype)
    if function is convnext_norm:
        weight = torch.ones(4, 1, dtype=x.dtype)
    text = run(function, x, weight)
    assert PATTERNS[next(chains_in(text))[0]].name == what, text


def adam(x: Any, weight: Any) -> Any:
    m, v = x * 0.9 + weight * 0.1, x * 0.99 + weight * weight * 0.01
    return x - 1e-3 * m / (v.sqrt() + 1e-8)


def mse(x: Any, weight: Any) -> Any:
    return ((x - weight) ** 2).mean()


def swiglu(x: Any, weight: Any) -> Any:
    return torch.nn.functional.silu(x) * weight


def fused(x: Any, weight: Any) -> Any:
    y = torch.nn.functional.layer_norm(x, (8,), weight)
    return torch.nn.functional.gelu(torch.softmax(y, -1))


@pytest.mark.parametrize("function", [adam, mse, swiglu, fused])
def test_other_arithmetic_is_no_handwritten_operator(function: Callable[..., Any]) -> None:
    text = run(function, torch.ones(2, 4, 8), torch.ones(8))
    assert list(chains_in(text)) == [], text
