"""The table of layers: it fits whatever the names are, and says what is not known."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from advisor.core.layers import Layer, LayerKind, LayerOutlier, Layers
from advisor.core.report import Report
from advisor.render.documents import layers
from advisor.render.formats.terminal import Terminal
from advisor.render.renderer import RenderOptions

from .conftest import HOSTILE

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def layer(name: str, parent: int | None, **changes: Any) -> Layer:
    values: dict[str, Any] = {
        "name": name, "kind": name, "parent": parent, "modules": 4, "calls": 4.0, "ns": 3e6,
        "self_ns": 1e6, "share": 0.75, "backward_ns": None, "kernels": 8.0, "flops": 6e12,
        "bytes": 3e9, "flops_per_s": 2e15, "bytes_per_s": 1e12,
    }  # fmt: skip
    return Layer(**(values | changes))


def make_layers(rows: list[Layer], name: str = "Block_2") -> Layers:
    kind = LayerKind(kind=name, modules=4, calls=None, ns=3e6, self_ns=1e6, share=0.25)
    outlier = LayerOutlier(
        name=name, path=[], equals="Block_0–3", ns=2e6, usual_ns=1e6, part="Linear"
    )
    return Layers(
        source="module events", on_device=True, total_ns=4e6, outside_ns=1e6, outside_kernels=2,
        layers=rows, more=3, kinds=[kind], outliers=[outlier],
    )  # fmt: skip


def render_layers(report: Report, **more: Any) -> str:
    options = RenderOptions(details=True, **more)
    return Terminal().draw(layers.build(report, options), options)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_every_line_fits_whatever_the_names(
    report: Callable[..., Report], width: int, colour: bool
) -> None:
    result = report(0)
    for name in HOSTILE:
        result.layers = make_layers([layer(name, None), *(layer(name, i) for i in range(9))], name)
        plain = ANSI.sub("", render_layers(result, width=width, colour=colour))
        assert max(cell_len(line) for line in plain.split("\n")) <= width
        assert "\x1b" not in plain and "\x07" not in plain


def test_unknown_values_are_dashes_and_other_work_has_a_row(
    report: Callable[..., Report],
) -> None:
    result = report(0)
    rows = [layer("Model", None, calls=None, modules=1), layer("Block", 0, flops_per_s=None)]
    result.layers = make_layers(rows)
    text = " ".join(render_layers(result, width=120).split())
    assert "Model – 3 ms 75% 6 T 2.79 GiB 2,000 1,000" in text
    assert "Block ×4 4 3 ms 75% 6 T 2.79 GiB – 1,000" in text
    assert "outside modules – 1 ms 25% – –" in text
    assert "3 smaller or deeper groups not shown" in text
    assert "Block_2 takes 2 ms, 100% longer than its equals in Block_0–3 (1 ms)" in text


def test_layer_follows_its_parent() -> None:
    with pytest.raises(ValueError, match="before the layer around it"):
        make_layers([layer("Model", 0)])


@pytest.mark.parametrize(
    ("framework", "form", "with_stack", "message"),
    [
        ("pytorch", "kineto", False, "with_stack=True"),
        ("pytorch", "kineto", True, "no call of a torch.nn.Module"),
        ("pytorch", "nsys", None, "NVTX or ROCTX range named layers.<number>"),
        ("jax", "xplane", None, "jax.named_scope"),
    ],
)
def test_report_without_layers_shows_how_to_record_them(
    report: Callable[..., Report], framework: str, form: str, with_stack: bool | None, message: str
) -> None:
    result = report(0)
    result.layers, result.scope.framework = None, framework
    result.inputs[0].format, result.inputs[0].with_stack = form, with_stack
    text = " ".join(render_layers(result).split())
    assert text.startswith("No layers were recorded") and message in text
