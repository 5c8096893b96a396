"""Copies: direction, memory, what hid them, and whether they held the host."""

from __future__ import annotations

import polars as pl
import pytest

from advisor.measure import Analysis
from advisor.measure.device.copies import COPIES_SCHEMA
from advisor.read import read_trace
from advisor.testing import TraceBuilder


def program() -> TraceBuilder:
    return TraceBuilder(launch_us=5, latency_us=3)


def only_copy(a: Analysis) -> dict:
    assert a.copies.height == 1
    return a.copies.row(0, named=True)


def test_a_copy_hidden_under_a_kernel_costs_nothing():
    b = program()
    with b.step():
        b.launch("gemm", 100)  # 8 .. 108
        b.copy("HtoD", 1 << 20, 50, stream=20, op=None)  # 13 .. 63
    copy = only_copy(b.analysis())
    assert (copy["copy"], copy["memory"], copy["bytes"]) == ("HtoD", "pinned", 1 << 20)
    assert copy["gbps"] == pytest.approx((1 << 20) / 50e3)
    assert (copy["exposed"], copy["blocking"], copy["same_stream"]) == (0, False, False)


def test_the_part_outside_kernels_and_collectives_is_exposed():
    b = program()
    with b.step():
        b.launch("gemm", 100)  # 8 .. 108
        b.copy("HtoD", 1 << 20, 300, stream=20, op=None)  # 13 .. 313
        b.launch("ncclDevKernel_AllReduce", 50, stream=21, after=1200)  # 200 .. 250
        b.host(500)
    # 108 .. 200 and 250 .. 313
    assert only_copy(b.analysis())["exposed"] == 92_000 + 63_000


def test_a_copy_on_the_compute_stream_waits_its_turn():
    b = program()
    with b.step():
        b.launch("gemm", 100)
        b.copy("HtoD", 1 << 20, 50)
        b.host(200)
    copy = only_copy(b.analysis())
    assert copy["same_stream"]
    assert copy["exposed"] == 50_000


def test_copy_awaited_in_its_operator_is_blocking():
    b = program()
    with b.step():
        b.launch("gemm", 100)
        b.copy("HtoD", 1 << 20, 50, blocking=True)
        b.copy("HtoD", 1 << 20, 50)
        b.sync()  # of its own, in no operator: the loop waits, not the copy
        b.launch("gemm", 10)
    assert b.analysis().copies["blocking"].to_list() == [True, False]


@pytest.mark.parametrize(
    ("name", "call_us", "begins", "lasts", "memory", "blocking"),
    [
        # the call ends after the copy: pageable, from the device
        ("Memcpy DtoH (Device -> Pageable)", 60, 40, 10, "pageable", True),
        # large and staged: the call ends a little before the copy
        ("Memcpy HtoD (Pageable -> Device)", 500, 20, 490, "pageable", True),
        # small and staged: the call is over before the copy begins
        ("Memcpy HtoD (Pageable -> Device)", 7, 10, 2, "pageable", False),
        # half staged when the call returns: most of the copy is still to come
        ("Memcpy HtoD (Pageable -> Device)", 30, 20, 100, "pageable", False),
        # pinned never holds the host, even when the call is slow
        ("Memcpy HtoD (Pinned -> Device)", 60, 20, 10, "pinned", False),
        ("Memcpy DtoH (Device -> Pinned)", 60, 20, 10, "pinned", False),
        # memory not recorded (AMD): the time decides
        ("Memcpy HtoD (Host -> Device)", 60, 20, 10, None, True),
        ("CopyHostToDevice", 7, 20, 10, None, False),
        # within the device nothing holds the host
        ("Memcpy DtoD (Device -> Device)", 60, 20, 10, None, False),
        ("Memcpy HtoD (Managed -> Device)", 7, 20, 10, None, False),
    ],
)
def test_memory_and_blocking(name, call_us, begins, lasts, memory, blocking):
    b = program()
    with b.step():
        start = b.now + begins
        b.call("cudaMemcpyAsync", call_us, 99)
        b.events.append(
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": start,
                "dur": lasts,
                "args": {"device": 0, "stream": 7, "correlation": 99, "bytes": 8},
            }
        )
        b.host(600)
    copy = only_copy(b.analysis())
    assert (copy["memory"], copy["blocking"]) == (memory, blocking)
    assert copy["same_stream"] is None  # no compute to share a stream with


def test_a_copy_knows_its_operator_line_and_step():
    b = program()
    for _ in range(2):
        with b.step(), b.python("data.py(5): to_device"):
            b.copy("HtoD", 1000, 10)
            b.launch("gemm", 10)
    a = b.analysis()
    assert a.copies["step"].to_list() == [0, 1]
    assert set(a.trace.cpu["name"].gather(a.copies["op"])) == {"aten::copy_"}
    assert [a.location(row) for row in a.copies["line"]] == [("data.py", 5, "to_device")] * 2


def test_columns_match_the_schema_without_copies():
    b = program()
    with b.step():
        b.launch("gemm", 10)
    a = b.analysis()
    assert a.copies.is_empty()
    assert a.copies.schema == pl.Schema(COPIES_SCHEMA)


# -- real traces -------------------------------------------------------------------------------


def test_a100_job_hides_two_thirds_of_pinned_uploads(shared_trace):
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    up = a.copies.filter(copy="HtoD")
    assert up.height == 150
    assert up["memory"].unique().to_list() == ["pinned"]
    assert not up["blocking"].any()
    assert up["dur"].sum() / 1e6 == pytest.approx(50.7, abs=0.05)
    assert up["exposed"].sum() / 1e6 == pytest.approx(16.0, abs=0.05)
    down = a.copies.filter(copy="DtoH")
    assert down.height == 60
    assert down["memory"].unique().to_list() == ["pageable"]
    assert down["blocking"].all()
    assert down["dur"].sum() / 1e6 == pytest.approx(0.1, abs=0.01)


def test_the_v100_job_copies_4856_times_mostly_inside_the_device(shared_trace):
    a = Analysis(read_trace(shared_trace("v100_train_copy_heavy")))
    counts = dict(a.copies.group_by("copy").len().iter_rows())
    assert counts == {"HtoD": 151, "DtoD": 4645, "DtoH": 60}
    assert a.copies.filter(copy="DtoD")["memory"].null_count() == 4645
    assert a.copies.filter(pl.col("blocking"))["copy"].unique().to_list() == ["DtoH"]


@pytest.mark.parametrize("name", ["alexnet", "simple_add"])
def test_pageable_weights_hold_the_host(name, shared_trace):
    a = Analysis(read_trace(shared_trace(name)))
    assert a.copies["memory"].unique().to_list() == ["pageable"]
    assert a.copies["blocking"].all()  # each is followed by cudaStreamSynchronize in aten::copy_


@pytest.mark.parametrize("name", ["a100_train_6steps", "v100_train_copy_heavy", "b200_eager"])
def test_exposed_copies_together_are_the_breakdowns(name, shared_trace):
    from advisor.core.intervals import intersect, subtract, union

    a = Analysis(read_trace(shared_trace(name)))
    table = a.copies
    parts = a.breakdown
    assert (table["exposed"] <= table["dur"]).all()
    all_of_them = union(table["ts"].to_numpy(), (table["ts"] + table["dur"]).to_numpy())
    bare = subtract(subtract(all_of_them, parts.compute), parts.all_communication)
    assert intersect(bare, a.spans).total == parts.copies.total
    assert table["exposed"].sum() >= parts.copies.total
