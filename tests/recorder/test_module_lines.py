"""The table of a model's layers: shapes of weights, and the lines that call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from advisor.recorder.module_lines import (  # noqa: E402
    CALLS_BEFORE,
    MAX_MODULE_KINDS,
    ModuleLines,
    describe_modules,
)

FILE = "test_module_lines.py"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return x + self.net(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 50, bias=False)
        self.unused = nn.Linear(3, 3)
        self.register_parameter("nothing", None)

    def scores(self, x: Any) -> Any:
        return self.head(x)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.scores(x)


def line_of(text: str) -> int:
    with Path(__file__).open() as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_each_layer_has_the_line_that_calls_it() -> None:
    table = {row[0]: row[1:] for row in describe_modules(Net())}
    assert table["table"][:3] == ["Embedding", 1, [[50, 8]]]
    assert table["table"][3].endswith(f"{FILE}({line_of('x = self.table')}): Net.forward")
    assert table["blocks.*.norm"][:3] == ["LayerNorm", 3, [[8], [8]]]
    assert table["blocks.*.norm"][3].endswith(f"({line_of('y = self.norm')}): Block.forward")
    assert table["head"][:3] == ["Linear", 1, [[50, 8]]]
    assert table["head"][3].endswith(f"({line_of('return self.head')}): Net.scores")
    assert table["unused"][3] == ""
    assert table[""][:3] == ["Net", 1, [[8]]]
    assert table[""][3] == table["table"][3]  # it has a weight of its own, used there
    rows = [row for row in describe_modules(Net()) if row[0] == "blocks.*.net.*"]
    assert [row[2:4] for row in rows] == [[3, [[16, 8], [16]]], [3, [[8, 16], [8]]]]
    assert {row[4].rpartition("(")[2] for row in rows} == {
        f"{line_of('return x + self.net')}): Block.forward"
    }


def test_wrappers_are_looked_through() -> None:
    wrapped = nn.DataParallel(Net())
    names = {row[0]: row[4] for row in describe_modules(wrapped)}
    assert names["module.head"].endswith("Net.scores")
    compiled = torch.compile(Net())
    assert {row[0] for row in describe_modules(compiled)} == {
        row[0] for row in describe_modules(Net())
    }


def test_the_table_is_bounded() -> None:
    model = nn.ModuleDict({f"layer{'x' * n}": nn.Linear(1, 1) for n in range(MAX_MODULE_KINDS + 5)})
    assert len(describe_modules(model)) == MAX_MODULE_KINDS


def test_module_lines_are_written_once_per_model(record_run: Callable[..., Any]) -> None:
    def run() -> None:
        model, other = Net().eval(), nn.Linear(8, 8)
        with torch.no_grad():
            for _ in range(4 * CALLS_BEFORE):
                model(torch.zeros(2, 3, dtype=torch.long))
            other(torch.zeros(2, 8))

    (event,) = record_run(run).events_of("modules")
    assert event["model"] == "Net"
    assert event["modules"] == describe_modules(Net())


class CustomLinear(nn.Linear):
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("not now")


def test_a_model_that_cannot_be_looked_at_has_no_table() -> None:
    events: list[Any] = []
    lines = ModuleLines(lambda kind, data: events.append(data["model"]))
    custom, lazy, plain = CustomLinear(8, 8), nn.LazyLinear(8), nn.Linear(8, 8)
    for _ in range(2 * CALLS_BEFORE):
        for model in (custom, lazy, plain):
            lines.on_forward(model)
    assert events == ["Linear"]
