"""Operators get the line that calls their layer by the shape of its weights."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.core.finding import Location
from advisor.measure.host.module_lines import line_of_layer
from advisor.testing import TraceBuilder

MODULES = [
    ["blocks.*.up", "Linear", 12, [[64, 16], [64]], "net.py(12): Block.forward"],
    ["blocks.*.down", "Linear", 12, [[16, 64], [16]], "net.py(13): Block.forward"],
    ["head", "Linear", 1, [[1000, 16]], "net.py(40): Net.forward"],
    ["old_head", "Linear", 1, [[1000, 16]], ""],
    ["norm", "LayerNorm", 1, [[16], [16]], "net.py(39): Net.forward"],
    ["encoder.q", "Linear", 1, [[16, 16], [16]], "net.py(51): Attention.forward"],
    ["encoder.k", "Linear", 1, [[16, 16], [16]], "net.py(52): Attention.forward"],
    ["mixer", "Linear", 1, [[32, 32], [32]], "net.py(70): Mixer.forward"],
    ["gate", "Linear", 1, [[32, 32], [32]], "net.py(80): Gate.forward"],
]


def linear_layers(*, gpu: str | None, modules: Any = MODULES) -> TraceBuilder:
    """Linear layers by their weights, each with its gradient."""
    b = TraceBuilder(gpu=gpu)
    number = 0
    times = {(1000, 16): 900, (64, 16): 50, (16, 64): 40, (16, 16): 2_000, (32, 32): 3_000}
    for _ in b.steps():
        for weights, us in times.items():
            number += 1
            name = "aten::bmm" if weights[0] in (16, 32) and weights[1] != 64 else "aten::mm"
            shapes = [[8, weights[1]], list(weights), []]
            with b.op("aten::linear", shapes, sequence=number):
                if gpu:
                    b.run(name, f"gemm_{weights[0]}_{weights[1]}", us)
                else:
                    b.on_host(name, us)
        with b.op("aten::layer_norm", [[8, 16], [], [16], [16], [], []]):
            b.on_host("aten::native_layer_norm", 30)
    run = b.record_of_run()
    run.steps(20, 10, forward=8)
    run.event("modules", model="Net", modules=modules)
    return b


def find(b: TraceBuilder, **place: Any) -> Location | None:
    return line_of_layer(b.analysis(), Location(**place))


@pytest.mark.parametrize("gpu", [None, "A100"])
def test_the_layer_of_most_of_the_time_is_named(gpu: str | None) -> None:
    result = find(linear_layers(gpu=gpu), op="aten::mm")
    assert result == Location(file="net.py", line=40, function="Net.forward", layer="head (Linear)")


def test_a_kernel_has_the_layer_that_launches_it() -> None:
    result = find(linear_layers(gpu="A100"), op="aten::mm", kernel="gemm_16_64")
    assert result is not None
    assert (result.line, result.layer) == (13, "blocks.*.down (Linear)")


def test_normalizations_have_weights_of_one_dimension() -> None:
    result = find(linear_layers(gpu=None), op="aten::native_layer_norm")
    assert result is not None
    assert result.line == 39


def test_several_lines_of_one_function_give_its_first_line() -> None:
    result = find(linear_layers(gpu="A100"), op="aten::bmm", kernel="gemm_16_16")
    assert result is not None
    assert (result.line, result.layer) == (51, "encoder.k (Linear) and 1 more")


def test_layers_of_several_functions_are_not_line() -> None:
    assert find(linear_layers(gpu="A100"), op="aten::bmm", kernel="gemm_32_32") is None
    assert find(linear_layers(gpu=None), op="aten::bmm") is None  # three fifths of it


def test_code_without_a_layer_is_no_line() -> None:
    assert find(linear_layers(gpu=None), op="aten::mul") is None
    assert find(linear_layers(gpu=None, modules=[]), op="aten::mm") is None
    assert find(linear_layers(gpu=None)) is None


@pytest.mark.parametrize(
    "modules",
    [None, "x", [3], [[1, 2]], [["a", "b", 1, [5], "f.py(1): g"]], [["a", "b", 1, [], 7]]],
)
def test_invalid_module_table_is_ignored(modules: Any) -> None:
    assert find(linear_layers(gpu=None, modules=modules), op="aten::mm") is None
