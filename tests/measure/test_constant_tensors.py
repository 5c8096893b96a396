"""Operators that compute a tensor from plain arguments alone, against what PyTorch records."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.measure import Analysis
from advisor.measure.host.constant_tensors import constant_tensors
from advisor.read import read_trace

torch = pytest.importorskip("torch")


def sines() -> None:
    position = torch.arange(256).unsqueeze(1)
    rate = torch.linspace(0, 8, 32).neg().exp()
    table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], dim=2)
    table.reshape(256, -1).t().contiguous()


def band_mask() -> None:
    torch.ones(64, 64).tril().transpose(0, 1).eq(0).logical_not().expand(4, 64, 64)


def window() -> None:
    torch.outer(torch.hann_window(64), torch.kaiser_window(32).square()).permute(1, 0).sqrt()


def grid() -> None:
    steps = torch.arange(-3.0, 3.0, 0.25)
    torch.cat([steps.view(1, 24).add(1), steps.view(-1, 24).mul(2)], dim=0).clamp(-1, 1)


def mixed_constants() -> None:
    torch.matmul(torch.eye(16, 24), torch.full((24, 8), 2.0).pow(3)).squeeze(0).tanh()


CONSTANT = (sines, band_mask, window, grid, mixed_constants)

DATA = torch.randn(64, 64)


def random_tensors() -> None:
    torch.randn(64, 64).sin().cos()


def masked_scores() -> None:
    DATA.masked_fill(torch.ones(64, 64).tril() == 0, -1e9).softmax(-1)


def filled_buffer() -> None:
    torch.zeros(64, 64).index_add_(0, torch.arange(64), DATA)


def comparisons() -> None:
    torch.where(torch.zeros(64, 64) < DATA, DATA, torch.full((64, 64), 2.0)).exp()


def profile_steps(function: Callable[[], None], folder: Path) -> Analysis:
    """Profile three steps of a function."""
    path = folder / "trace.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            with torch.no_grad():
                function()
            profiler.step()
    return Analysis(read_trace(str(path)))


def computing_operators(a: Analysis, names: list[str]) -> list[str]:
    """Names of operators that compute, in the order of the trace."""
    views = {"aten::empty", "aten::detach", "aten::alias", "aten::lift_fresh"}
    return [name for name in names if name not in views]


@pytest.mark.parametrize("function", CONSTANT, ids=lambda each: each.__name__)
def test_every_operator_of_a_constant_is_found(function, tmp_path: Path) -> None:
    a = profile_steps(function, tmp_path)
    from advisor.measure.host.stacks import outermost_rows

    names = a.trace.cpu["name"]
    every = names.gather(outermost_rows(a.trace)).to_list()
    rows = names.gather(constant_tensors(a)).to_list()
    assert len(every) >= 9 and computing_operators(a, rows) == computing_operators(a, every)


@pytest.mark.parametrize("function", [random_tensors, masked_scores, filled_buffer, comparisons])
def test_tensors_that_depend_on_data_are_not_constant(function, tmp_path: Path) -> None:
    a = profile_steps(function, tmp_path)
    items = set(a.trace.cpu["name"].gather(constant_tensors(a)).to_list())
    assert not items & {"aten::sin", "aten::cos", "aten::softmax", "aten::exp", "aten::where",
                        "aten::index_add_", "aten::masked_fill", "aten::gt"}  # fmt: skip


def test_arguments_varying_by_step_are_not_constant(tmp_path: Path) -> None:
    lengths = iter(range(100, 200))
    a = profile_steps(lambda: torch.arange(next(lengths)).float().sin().cos(), tmp_path)
    assert not len(constant_tensors(a))


def test_no_constant_tensors_without_concrete_inputs(tmp_path: Path) -> None:
    a = profile_steps(sines, tmp_path)
    assert len(constant_tensors(a))
    trace = json.loads((tmp_path / "trace.json").read_text())
    for event in trace["traceEvents"]:
        event.get("args", {}).pop("Concrete Inputs", None)
    path = tmp_path / "bare.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert not len(constant_tensors(Analysis(read_trace(str(path)))))
