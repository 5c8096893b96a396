"""The log of module calls in a window: each operator gets the line that runs it, without stacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import advisor
from advisor.core.finding import Location
from advisor.measure import Analysis
from advisor.measure.host.module_calls import line_of_call, read_calls
from advisor.recorder import module_calls
from advisor.recorder.module_calls import CallLog
from advisor.recorder.modules import MAX_MODULE_DEPTH

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = pytest.mark.timed


class Dice(nn.Module):
    def of_class(self, p: Any, t: Any) -> Any:
        return 2 * (p * t).clamp(0).mean() / (p + t).mean()

    def forward(self, x: Any, y: Any) -> Any:
        p = x.softmax(1).clamp(0)
        return sum(self.of_class(p[:, c], y[:, c]) for c in range(p.shape[1]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        y = functional.gelu(y)
        return self.drop(y) + x


class Shift:
    def moved(self, x: Any) -> Any:
        return x.roll(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.GLU(1)

    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Any) -> Any:
        return self.last(self.blocks(self.shift.moved(x))).sigmoid()


def train(steps: int = 12, *, compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    net, dice = Net(), Dice()
    model = torch.compile(net, backend="eager") if compiled else net
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        loss = dice(model(torch.ones(2, 8, 32, 32)), torch.ones(2, 4, 32, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


WINDOW = {"active": 3, "skip": 3, "warmup": 1}


@pytest.fixture
def analysis(record_run: Callable[..., Any], tmp_path: Path) -> Analysis:
    record = record_run(train, **WINDOW)
    (trace,) = advisor.open(str(tmp_path / "run0")).traces.values()
    return Analysis(trace, rank_record=record)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


LINES = {
    "aten::conv2d": ("y = self.conv", "Block.forward"),
    "aten::convolution_backward": ("y = self.conv", "Block.forward"),
    "aten::gelu_backward": ("functional.gelu", "Block.forward"),
    "aten::dropout": ("self.drop(y) + x", "Block.forward"),
    "aten::softmax": ("x.softmax", "Dice.forward"),
    "aten::mean": ("return 2 *", "Dice.of_class"),
    "aten::select_backward": ("for c in range", "Dice.forward"),
    "aten::roll": ("return x.roll", "Shift.moved"),
    "aten::sigmoid": (".sigmoid()", "Net.forward"),
}


@pytest.mark.parametrize("op", LINES)
def test_an_operator_has_the_line_that_runs_it(analysis: Analysis, op: str) -> None:
    text, function = LINES[op]
    found = line_of_call(analysis, Location(op=op))
    assert found is not None
    assert (found.frame.line, found.frame.function) == (line_of(text), function)
    assert not found.is_definition and found.layer is None


def test_an_operator_of_several_functions_has_the_forward(analysis: Analysis) -> None:
    found = line_of_call(analysis, Location(op="aten::clamp"))
    assert found is not None
    assert (found.frame.function, found.is_definition) == ("Dice.forward", True)


def test_an_operator_outside_of_modules_has_no_line(analysis: Analysis) -> None:
    assert line_of_call(analysis, Location(op="aten::ones")) is None
    assert line_of_call(analysis, Location()) is None


def test_layers_are_known_without_stacks(analysis: Analysis) -> None:
    layers = analysis.layers
    assert layers is not None and layers.source == "logged calls"
    names = layers.nodes["name"].to_list()
    assert {"Net", "blocks.0", "blocks.1", "conv", "drop", "last", "Dice"} == set(names)
    net = layers.nodes.filter(layers.nodes["name"] == "Net")
    assert net["calls"][0] == 3
    assert net["ns"][0] > 0.3 * layers.total_ns and net["backward"][0] > 0


DAMAGED: list[dict[str, Any]] = [
    {"window": 7},
    {"frames": None},
    {"frames": [3]},
    {"calls": []},
    {"calls": [[0, 1, 2]]},
    {"calls": [[0, 5, 2, 0, 99, 0]]},
    {"calls": [[0, 5, 2, 0, 0, 99]]},
    {"calls": [[0, -5, 2, 0, 0, 0]]},
    {"calls": [[0, "x", 2, 0, 0, 0]]},
    {"calls": [[level, 5, 1 << 40, 0, 0, 0] for level in range(5_000)]},
    {"calls": [[0, 1 << 70, 2, 0, 0, 0]]},
    {"modules": [None]},
    {"calls": {"0": 1}},
    {"names": [[0, 1]]},
    {"names": [[99, "add", 0]]},
    {"names": 5},
    {"anchor_unix_ns": None},
    {"anchor_unix_ns": 1_700_000_000_000_000_000},
    {"anchor_unix_ns": 1 << 80},
]


@pytest.mark.parametrize("change", DAMAGED, ids=[str(d)[:40] for d in DAMAGED])
def test_a_damaged_log_is_left_out(analysis: Analysis, change: dict[str, Any]) -> None:
    assert read_calls(analysis) is not None
    rank_record = analysis.rank_record
    assert rank_record is not None
    events = [
        msgspec.structs.replace(event, data={**event.data, **change})
        if event.kind == "calls"
        else event
        for event in rank_record.events
    ]
    damaged = Analysis(
        analysis.trace, rank_record=msgspec.structs.replace(rank_record, events=events)
    )
    assert read_calls(damaged) is None


def test_only_windows_are_logged(record_run: Callable[..., Any]) -> None:
    assert not record_run(train).events_of("calls")
    (event,) = record_run(train, **WINDOW).events_of("calls")
    levels = [call[0] for call in event["calls"]]
    assert levels == 3 * [0, 1, *2 * [2, 3, 3], 1, 0]  # per step: Net, and then Dice


def test_the_program_is_unchanged(record_run: Callable[..., Any]) -> None:
    call, code = nn.Module.__call__, nn.Module.__call__.__code__
    expected, seen = train(), []
    record_run(lambda: seen.extend(train()), **WINDOW)
    assert seen == expected
    assert nn.Module.__call__ is call and call.__code__ is code


def test_compiled_modules_are_logged_from_outside(record_run: Callable[..., Any]) -> None:
    expected, seen = train(compiled=True), []
    record = record_run(lambda: seen.extend(train(compiled=True)), **WINDOW)
    assert seen == expected
    (event,) = record.events_of("calls")
    assert {call[0] for call in event["calls"]} == {0}


class Recursive(nn.Module):
    def forward(self, x: Any, depth: int) -> Any:
        return self(x, depth - 1) if depth else x


def find_max_levels(model: Recursive) -> int:
    """Return a number of nested calls that just fits the interpreter's limit here."""
    for levels in range(50, sys.getrecursionlimit(), 5):
        try:
            model._call_impl(torch.ones(1, 4), levels)
        except RecursionError:
            return levels - 5
    raise AssertionError("no limit")


def test_deep_recursion_has_few_frames_more(record_run: Callable[..., Any]) -> None:
    model, weights = Recursive(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(weights.parameters(), 1e-3)

    def run() -> None:
        levels = find_max_levels(model) - MAX_MODULE_DEPTH // 2
        for _ in range(12):
            model(torch.ones(1, 4), levels)
            weights(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    (event,) = record_run(run, **WINDOW).events_of("calls")
    assert max(call[0] for call in event["calls"]) == MAX_MODULE_DEPTH


class Failing(nn.Module):
    def forward(self, x: Any) -> Any:
        raise KeyError("x")


def test_calls_that_raise_end_their_entries(record_run: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing())
    weights = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(weights.parameters(), 1e-3)

    def run() -> None:
        for _ in range(12):
            with pytest.raises(KeyError):
                model(torch.ones(1, 4))
            weights(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    (event,) = record_run(run, **WINDOW).events_of("calls")
    assert [call[0] for call in event["calls"]] == 3 * [0, 1, 1, 0]
    assert all(call[2] >= 0 for call in event["calls"])


def test_a_missing_end_does_not_spoil_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    log, frame = CallLog(), sys._getframe()
    assert log.begin(nn.Identity(), frame, outermost=True)
    assert log.begin(nn.Identity(), frame)
    assert log.begin(nn.Identity(), frame, outermost=True)
    log.end()
    log.end()
    assert not log.begin(nn.Identity(), None)
    data = log.describe()
    assert [(call[0], call[2] < 0) for call in data["calls"]] == [
        (0, True),
        (1, True),
        (0, False),
    ]
    monkeypatch.setattr(module_calls, "MAX_MODULE_CALLS", 3)
    assert not log.begin(nn.Identity(), frame)
