"""Ranges that are opened inside one Python frame and outlast it hold what runs inside them."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from advisor.read.registry import read_bytes
from advisor.testing import TraceBuilder


def event(cat: str, name: str, ts: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": end - ts}


def parents(*events: dict[str, Any]) -> dict[str, str | None]:
    """Name of each host event -> name of the event around it."""
    cpu = read_bytes(json.dumps({"traceEvents": list(events)}).encode()).cpu
    names = cpu["name"].cast(pl.String).to_list()
    return {
        name: None if parent is None else names[parent]
        for name, parent in zip(names, cpu["parent"].to_list(), strict=True)
    }


def test_a_range_opened_in_enter_holds_what_follows() -> None:
    """The DataLoader's range with with_stack=True: ``__enter__`` returns at once."""
    parent_rows = parents(
        event("python_function", "loop", 0, 1000),
        event("python_function", "next", 10, 900),
        event("python_function", "enter", 20, 40),
        event("python_function", "builtin enter", 25, 35),
        event("user_annotation", "range", 30, 850),
        event("python_function", "fetch", 50, 800),
        event("cpu_op", "aten::stack", 60, 700),
        event("python_function", "exit", 840, 870),
        event("python_function", "after", 910, 990),
    )
    assert parent_rows == {
        "loop": None,
        "next": "loop",
        "enter": "next",
        "builtin enter": "enter",
        "range": "next",
        "fetch": "range",
        "aten::stack": "fetch",
        "exit": "range",
        "after": "loop",
    }


def test_range_ending_late_stays_inside_its_function() -> None:
    parent_rows = parents(
        event("python_function", "loop", 0, 1000),
        event("python_function", "work", 10, 500),
        event("user_annotation", "range", 20, 502),
        event("cpu_op", "aten::mm", 30, 400),
        event("python_function", "next", 501, 900),
    )
    assert parent_rows["range"] == "work"
    assert parent_rows["aten::mm"] == "range"
    assert parent_rows["next"] == "loop"


def test_range_of_another_thread_is_ignored() -> None:
    other = {**event("user_annotation", "range", 30, 850), "tid": 2}
    parent_rows = parents(
        event("python_function", "frame", 20, 40), other, event("cpu_op", "aten::mm", 32, 38)
    )
    assert parent_rows == {"frame": None, "range": None, "aten::mm": "frame"}


def test_ranges_opened_in_each_other_nest() -> None:
    parent_rows = parents(
        event("python_function", "step", 0, 20),
        event("user_annotation", "ProfilerStep#1", 10, 1000),
        event("python_function", "enter", 30, 50),
        event("user_annotation", "forward", 40, 600),
        event("cpu_op", "aten::mm", 60, 500),
    )
    assert parent_rows["ProfilerStep#1"] is None
    assert parent_rows["forward"] == "ProfilerStep#1"
    assert parent_rows["aten::mm"] == "forward"


def _closure(*, nodes: bool) -> TraceBuilder:
    """A step whose optimizer calls forward and backward, as PyTorch Lightning's do."""
    b = TraceBuilder(None)
    for _ in b.steps(2):
        with b.range("Optimizer.step#AdamW.step"):
            with b.op("aten::linear", [[8, 8]], sequence=1, host_us=500):
                pass
            if nodes:
                with b.op("autograd::engine::evaluate_function: AddmmBackward0", host_us=900):
                    pass
            b.on_host("aten::_fused_adamw_", 100)
    return b


def test_the_range_of_an_optimizer_begins_behind_its_closure() -> None:
    """The update takes 100 µs; forward and backward inside the range belong to the step alone."""
    cpu = _closure(nodes=True).trace().cpu
    name = cpu["name"].cast(pl.String)
    steps = cpu.filter(name.str.starts_with("Optimizer.step#"))
    assert 100_000 <= min(steps["dur"]) <= max(steps["dur"]) < 110_000
    forward = cpu.filter(name == "aten::linear")["parent"].to_list()
    assert {str(name[row]) for row in forward} == {"ProfilerStep#0", "ProfilerStep#1"}
    update = cpu.filter(name == "aten::_fused_adamw_")["parent"].to_list()
    assert {str(name[row]) for row in update} == {"Optimizer.step#AdamW.step"}


def test_numbered_operators_alone_are_not_closure() -> None:
    """Older versions of PyTorch number the operators of an update, too (a100_train_6steps)."""
    cpu = _closure(nodes=False).trace().cpu
    name = cpu["name"].cast(pl.String)
    assert min(cpu.filter(name.str.starts_with("Optimizer.step#"))["dur"]) >= 600_000
