"""Memory over time and at its peak, against a plain replay of the allocator's events."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.trace import blank_trace
from advisor.measure import Analysis
from advisor.measure.memory.peak import memory_curve, memory_devices, memory_peak
from advisor.read import read_trace
from advisor.testing import TraceBuilder

MIB = 1 << 20


def allocating() -> TraceBuilder:
    """40 MiB by aten::mm, 10 more by aten::cat, which the peak has; then 40 are freed."""
    b = TraceBuilder()
    with b.step():
        with b.op("aten::mm", [[8]], "float"):
            b.memory(40 * MIB, address=1, allocated=140 * MIB, reserved=200 * MIB)
        with b.op("aten::cat", [[8]], "float"):
            b.memory(10 * MIB, address=2, allocated=150 * MIB, reserved=200 * MIB)
        with b.op("aten::mm", [[8]], "float"):
            b.memory(-40 * MIB, address=1, allocated=110 * MIB, reserved=200 * MIB)
            b.launch("k", 10)
        b.sync()
    return b


def test_the_peak_is_tied_to_the_operators_that_allocated() -> None:
    a = allocating().analysis()
    assert memory_devices(a) == [0]
    peak = memory_peak(a, 0)
    assert peak is not None
    assert peak.allocated == 150 * MIB
    assert peak.reserved == 200 * MIB
    assert peak.before == 100 * MIB
    assert peak.held.select("op", "bytes", "blocks").rows() == [
        ("aten::mm", 40 * MIB, 1),
        ("aten::cat", 10 * MIB, 1),
    ]


def test_without_events_there_is_no_peak() -> None:
    a = Analysis(blank_trace("nothing"))
    assert memory_devices(a) == []
    assert memory_peak(a, 0) is None
    assert memory_curve(a, 0).is_empty()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=60))
def test_what_is_held_is_what_a_plain_replay_holds(events: list[tuple[int, int]]) -> None:
    b = TraceBuilder()
    live: dict[int, int] = {}
    total = 7 * MIB  # there before
    best, held_then = -1, 0
    with b.step():
        for address, size in events:
            if address in live:
                change = -live.pop(address)
            else:
                live[address] = change = size * MIB
            total += change
            if total > best:
                best, held_then = total, sum(live.values())
            b.memory(change, address=100 + address, allocated=total, reserved=512 * MIB)
            b.host(1)
    peak = memory_peak(b.analysis(), 0)
    assert peak is not None
    assert peak.allocated == best
    assert peak.held["bytes"].sum() == held_then
    assert peak.before == best - held_then


def test_a_thinned_curve_keeps_its_extremes(shared_trace: Callable[[str], str]) -> None:
    a = Analysis(read_trace(shared_trace("h100_bert_small_inference")))
    whole = memory_curve(a, 0)
    thin = memory_curve(a, 0, most=40)
    assert whole.height > 100 >= thin.height
    assert thin["allocated"].max() == whole["allocated"].max()
    assert thin["allocated"].min() == whole["allocated"].min()
    assert thin["ts"].is_sorted()


def test_the_peak_of_a_real_trace_is_the_highest_total_in_its_file(
    shared_trace: Callable[[str], str],
) -> None:
    a = Analysis(read_trace(shared_trace("h100_bert_small_inference")))
    peak = memory_peak(a, 0)
    assert peak is not None
    events = a.trace.memory.filter(pl.col("device") == 0)
    assert peak.allocated == events["allocated"].max()
    assert peak.before + peak.held["bytes"].sum() == pytest.approx(peak.allocated)
