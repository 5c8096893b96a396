"""Edits of collectives where there is no device: steps that are known by hand."""

from __future__ import annotations

import pytest

from advisor.replay.edit_language import parse_edit, write_edit
from advisor.replay.window_replayer import WindowReplayer
from advisor.testing import TraceBuilder

US = 1_000


def training() -> WindowReplayer:
    """Each step computes 4 ms, waits 1 ms for gradients and 0.3 ms for each of two metrics."""
    b = TraceBuilder(None, rank=0, world_size=2)
    for _ in b.steps(6):
        b.on_host("aten::mm", 4000)
        b.host_collective("allreduce", 4 << 20, 1000, wait=True)
        for _ in range(2):
            b.host_collective("allreduce", 4, 300, wait=True)
    return WindowReplayer(b.analysis())


@pytest.mark.parametrize(
    ("line", "saved"),
    [
        ("remove comm", 1600),
        ("remove comm bytes:1024", 600),
        ("remove comm:all_gather", 0),
        ("scale comm bytes:1024 0.25", 450),
        ("merge comm bytes:1024 0.5", 300),
        ("overlap comm", 1600),  # 4 ms of work hide all of it
    ],
)
def test_an_edit_of_communication_is_of_the_waits_for_gloo(line: str, saved: float) -> None:
    edit = parse_edit(line)
    assert parse_edit(write_edit(edit)) == edit
    replay = training()
    # of each call, 2.5 us are waiting too
    assert replay.gain([edit]) == pytest.approx(saved * US, abs=8 * US)


def test_hidden_communication_is_bounded_by_overlapping_work() -> None:
    b = TraceBuilder(None, rank=0, world_size=2)
    for _ in b.steps(6):
        b.on_host("aten::mm", 400)
        b.host_collective("allreduce", 4 << 20, 1000, wait=True)
    replay = WindowReplayer(b.analysis())
    assert replay.gain([parse_edit("overlap comm")]) == pytest.approx(400 * US, abs=10 * US)


def test_earlier_communication_gains_half_and_at_least_zero() -> None:
    replay = training()
    gain, low, *_ = replay.gain_range([parse_edit("overlap comm ahead")])
    assert gain == pytest.approx(800 * US, abs=10 * US)
    assert low == 0


def test_selected_collectives_are_counted_in_steps() -> None:
    replay = training()
    assert replay.count_selected(parse_edit("remove comm bytes:4")) == 12
    assert replay.count_selected(parse_edit("remove comm")) == 18
