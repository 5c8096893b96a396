"""Names that rules look for, against what PyTorch itself records (on the CPU: the host side is
the same)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from advisor.measure.memory import trace_memory
from advisor.read import read_trace
from advisor.rules.memory import recompute_with_free_memory
from advisor.rules.optimizer import single_tensor_optimizer
from advisor.rules.support import device_memory, kernel_work

torch = pytest.importorskip("torch")

SOFTMAX = r"^aten::(_softmax|_softmax_backward_data|_masked_softmax|_safe_softmax)$"


def host_event_names(work: Callable[[], Any], tmp_path: Path) -> list[str]:
    """Names of the host events of one run of ``work``, in order of time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as p:
        work()
    path = tmp_path / "trace.json"
    p.export_chrome_trace(str(path))
    return read_trace(path).cpu.sort("ts")["name"].cast(pl.String).to_list()


def count(pattern: str, names: list[str]) -> int:
    return sum(bool(re.search(pattern, name)) for name in names)


@pytest.fixture
def heads() -> Any:
    return [torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3)]


def test_handwritten_attention_is_two_products_and_a_softmax(heads: Any, tmp_path: Path) -> None:
    q, k, v = heads

    def work() -> None:
        ((q @ k.transpose(-2, -1) / 4).softmax(-1) @ v).sum().backward()

    names = host_event_names(work, tmp_path)
    forward = names[: names.index("autograd::engine::evaluate_function: SumBackward0")]
    kept = [n for n in forward if re.search(f"{kernel_work.FORWARD}|{SOFTMAX}", n)]
    assert kept == ["aten::bmm", "aten::_softmax", "aten::bmm"]
    backward = names[len(forward) :]
    assert count(kernel_work.FORWARD, backward) == 4  # two gradients of two products
    assert count(SOFTMAX, backward) == 1


def test_the_math_fallback_of_sdpa_has_its_own_operator(heads: Any, tmp_path: Path) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def work() -> None:
        with sdpa_kernel([SDPBackend.MATH]):
            torch.nn.functional.scaled_dot_product_attention(*heads)

    assert count(kernel_work.MATH, host_event_names(work, tmp_path)) == 1

    def fused() -> None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            torch.nn.functional.scaled_dot_product_attention(*heads)

    names = host_event_names(fused, tmp_path)
    assert count(kernel_work.MATH, names) == 0
    assert count(SOFTMAX, names) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_leaves_its_frame_or_its_operator(reentrant: bool, tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)

    def work() -> None:
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()

    names = host_event_names(work, tmp_path)
    assert count(trace_memory.RECOMPUTE, names) == (0 if reentrant else 1)
    assert count(trace_memory.REENTRANT, names) == (1 if reentrant else 0)
    assert count(r"torch/utils/checkpoint\.py\(\d+\): checkpoint$", names) == 1
    assert count(recompute_with_free_memory.BACKWARD_NODES, names) > 0


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {})])
def test_a_loop_over_parameters_has_its_frame(
    name: str, options: dict[str, float], tmp_path: Path
) -> None:
    layer = torch.nn.Linear(8, 8)

    def work(foreach: bool) -> Callable[[], None]:
        optimizer = getattr(torch.optim, name)(layer.parameters(), foreach=foreach, **options)

        def step() -> None:
            layer(torch.randn(2, 8)).sum().backward()
            optimizer.step()

        return step

    loop = host_event_names(work(False), tmp_path)
    assert f"Optimizer.step#{name}.step" in loop
    assert count(single_tensor_optimizer.OPTIMIZER_STEP, loop) == 1
    assert count(single_tensor_optimizer.SINGLE_TENSOR, loop) == 1
    assert count(single_tensor_optimizer.SINGLE_TENSOR, host_event_names(work(True), tmp_path)) == 0


def test_empty_cache_has_its_frame(tmp_path: Path) -> None:
    names = host_event_names(torch.cuda.empty_cache, tmp_path)
    assert count(device_memory.EMPTY_CACHE, names) >= 1
