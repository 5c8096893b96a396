"""The table of operators by shape: it fits, adds nothing, and says what is not known."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from advisor.core.report import Report
from advisor.core.report_kernels import AttainableRate, OperatorRate
from advisor.measure.host.operators import shape_text
from advisor.render.documents import layers
from advisor.render.formats.terminal import Terminal
from advisor.render.renderer import RenderOptions

from .conftest import HOSTILE

Make = Callable[..., Report]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def rate(**given: Any) -> OperatorRate:
    fields: dict[str, Any] = {
        "name": "aten::mm", "shapes": "[8944, 1024] [1024, 2816]", "family": "gemm",
        "dtype": "bf16", "kernel": "sm90_xmma", "tensor_core": True, "calls": 48.0, "ns": 4.0155e6,
        "share": 0.126, "flops": 5.1e10, "bytes": 7.4e7, "flops_per_s": 616.6e12,
        "bytes_per_s": 890e9, "attainable_flops_per_s": 794.5e12,
        "attainable_bytes_per_s": 2791e9, "bound": "compute", "efficiency": 0.812,
        "saved_ns": 755e3,
    }  # fmt: skip
    return OperatorRate(**(fields | given))


def render_operators(make: Make, *rows: OperatorRate, width: int = 80, **more: Any) -> str:
    report = make(0)
    report.rooflines = list(rows)
    report.attainable = [
        AttainableRate(of="bf16", rate=794.5e12, source="a benchmark", url="https://x.org/y"),
        AttainableRate(of="memory", rate=2791e9, source=None, url=None),
    ]
    options = RenderOptions(width=width, details=True, **more)
    return Terminal().draw(layers.build_operators(report, options), options)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_every_line_fits_whatever_the_names(report: Make, width: int, colour: bool) -> None:
    rows = [rate(name=name, shapes=name, kernel=name, efficiency=0.1) for name in HOSTILE]
    text = render_operators(report, *rows, width=width, colour=colour)
    plain = ANSI.sub("", text)
    assert max(cell_len(line) for line in plain.split("\n")) <= width
    assert "\x1b" not in plain and "\x07" not in plain


def test_operator_row_names_its_limit_and_saving(report: Make) -> None:
    text = render_operators(report, rate(), rate(name="aten::add", bound="memory", efficiency=1.27))
    line = next(line for line in text.split("\n") if "aten::mm" in line)
    assert line.split() == [
        "aten::mm", "4.02", "ms", "48", "617", "TFLOP/s", "794", "TFLOP/s", "81%", "755", "µs",
        "compute",
    ]  # fmt: skip
    assert "bf16 [8944, 1024] [1024, 2816]" in text
    assert "890 GB/s 2,791 GB/s 127%" in " ".join(text.split())
    flat = " ".join(text.split())
    assert "measured: a benchmark, https://x.org/y" in flat
    assert "memory: 2,791 GB/s, estimated" in flat


def test_unknown_values_are_dashes(report: Make) -> None:
    blind = {"flops_per_s": None, "bytes_per_s": None, "efficiency": None, "saved_ns": None}
    text = render_operators(report, rate(bound="unknown", shapes=None, **blind))
    line = next(line for line in text.split("\n") if "aten::mm" in line)
    assert line.split()[4:] == ["–"] * 5
    assert "shapes not recorded" in text
    assert "record_shapes=True" in text


def test_trace_without_kernels_is_reported(report: Make) -> None:
    assert "not measured" in render_operators(report)


def test_number_of_shown_operators_is_limited(report: Make) -> None:
    rows = [rate(name=f"aten::op{n}") for n in range(30)]
    assert render_operators(report, *rows).count("aten::op") == layers.MAX_OPERATOR_ROWS
    assert render_operators(report, *rows, top=3).count("aten::op") == 3


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ("[[8, 1024], [1024, 4096]]", "[8, 1024] [1024, 4096]"),
        ("[[[2, 3], [2, 5], [2, 7]], []]", "([2, 3] [2, 5] …)"),
        ("[[1], [2], [3], [4], [5]]", "[1] [2] [3] [4] …"),
        ("[[], []]", ""),
        ("not JSON", None),
        ("[" * 5000, None),
        ("{}", None),
        (None, None),
    ],
)
def test_shapes_are_written_as_they_were_recorded(dims: str | None, text: str | None) -> None:
    assert shape_text(dims) == text
