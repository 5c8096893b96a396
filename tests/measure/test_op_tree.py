"""Operators by name, and the tree of names, against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from advisor.core.trace import blank_trace
from advisor.measure import Analysis
from advisor.measure.host.op_tree import REST, op_table, op_tree
from advisor.read import read_trace
from advisor.testing import TraceBuilder

US = 1000


def two_steps() -> TraceBuilder:
    """Each step: linear → addmm (a kernel of 100 µs), then a copy_ of 30 µs on its own."""
    b = TraceBuilder()
    for _ in range(2):
        with b.step():
            with b.op("aten::linear", [[8, 8]], "float"), b.op("aten::addmm", [[8, 8]], "float"):
                b.launch("gemm", 100)
            with b.op("aten::copy_", [[8]], "float"):
                b.launch("copy", 30)
            b.sync()
    return b


def row(table: pl.DataFrame, name: str) -> dict[str, object]:
    return table.filter(pl.col("name") == name).row(0, named=True)


def test_device_time_is_of_the_operator_that_launched_it() -> None:
    table = op_table(two_steps().analysis())
    assert row(table, "aten::addmm")["device"] == 200 * US
    assert row(table, "aten::linear")["device"] == 0
    assert row(table, "aten::copy_")["device"] == 60 * US
    assert row(table, "aten::linear")["count"] == 2
    assert table["name"].to_list()[:2] == ["aten::addmm", "aten::copy_"]


def test_own_host_time_excludes_children() -> None:
    a = two_steps().analysis()
    cpu = a.trace.cpu
    # by hand, one event at a time: its length less that of its direct children
    for name in ("aten::linear", "aten::addmm", "aten::copy_"):
        own_ns = 0
        for i in range(cpu.height):
            if cpu["name"][i] == name:
                own_ns += cpu["dur"][i] - sum(
                    cpu["dur"][j] for j in range(cpu.height) if cpu["parent"][j] == i
                )
        assert row(op_table(a), name)["host"] == own_ns


def test_the_tree_merges_steps_and_adds_up() -> None:
    tree = op_tree(two_steps().analysis())
    by_name = {name: (node, parent, ns) for node, parent, name, _, ns in tree.iter_rows()}
    assert by_name["ProfilerStep"][2] == 260 * US
    assert by_name["aten::linear"][1] == by_name["ProfilerStep"][0]
    assert by_name["aten::addmm"][1] == by_name["aten::linear"][0]
    assert by_name["aten::addmm"][2] == by_name["aten::linear"][2] == 200 * US
    assert tree.filter(pl.col("parent").is_null()).height == 1


def test_operators_have_host_time_if_the_host_runs_ahead(
    shared_trace: Callable[[str], str],
) -> None:
    """The device works on this step after the host has launched all of it, within 0.15 ms."""
    a = Analysis(read_trace(shared_trace("serving/vllm_decode_full/replay")))
    host = op_table(a)["host"]
    assert a.steps.ahead_ns is not None and 0 < host.sum() <= a.steps.host_spans.total
    assert host.max() > 0


def test_operator_lists_its_own_kernels_by_name() -> None:
    """A graph's kernels have no operators of their own: without their names its time is blank."""
    b = TraceBuilder()
    with b.step():
        with b.op("execute_graph"):
            b.launch("gemm_kernel", 600)
            b.launch("gemm_kernel", 200)
            b.launch("softmax_kernel", 195)
            b.launch("tiny_kernel", 5)
        with b.op("aten::mm"):
            b.launch("other_gemm", 100)
        b.sync()
    tree = op_tree(b.analysis())
    by_name = {name: (node, parent, ns) for node, parent, name, _, ns in tree.iter_rows()}
    graph = by_name["execute_graph"][0]
    assert by_name["kernel: gemm_kernel"][1:] == (graph, 800 * US)
    assert by_name["kernel: softmax_kernel"][1:] == (graph, 195 * US)
    assert not {"kernel: tiny_kernel", "kernel: other_gemm"} & by_name.keys()


def test_modules_of_one_class_and_location_are_merged() -> None:
    b = TraceBuilder()
    with b.step():
        for number in range(24):
            with b.python(f"nn.Module: Block_{number}"), b.python(f"nn.Module: Linear_{number}"):
                b.run("aten::mm", "gemm", 10)
        b.sync()
    tree = op_tree(b.analysis())
    block, linear, mm = (row(tree, name) for name in ("Block", "Linear", "aten::mm"))
    assert block["count"] == mm["count"] == 24 and mm["ns"] == block["ns"] == 240 * US
    assert linear["parent"] == block["node"] and mm["parent"] == linear["node"]


def test_omitted_children_are_the_rest_of_their_parent() -> None:
    b = TraceBuilder()
    with b.step():
        for i in range(40):
            with b.op(f"aten::op{i}", [[8]], "float"):
                b.launch(f"k{i}", 10 + i)
        b.sync()
    tree = op_tree(b.analysis(), limit=12)
    assert tree.height <= 12
    root = tree.filter(pl.col("parent").is_null())
    assert root["ns"].to_list() == [sum(10 + i for i in range(40)) * US]
    children = tree.filter(pl.col("parent") == root["node"][0])
    assert children["ns"].sum() == root["ns"][0]
    assert REST in children["name"].to_list()
    assert children["name"][0] == "aten::op39"


def test_without_device_work_the_tree_has_host_time() -> None:
    b = TraceBuilder()
    for _ in range(2):
        with b.step(), b.op("aten::mm", [[8, 8]], "float"):
            b.host(50)
    tree = op_tree(b.analysis())
    mm = tree.filter(pl.col("name") == "aten::mm")
    assert mm["ns"].item() >= 100 * US
    assert op_table(b.analysis())["device"].sum() == 0


def test_without_operators_the_tree_is_empty() -> None:
    a = Analysis(blank_trace("nothing"))
    assert op_tree(a).is_empty() and op_table(a).is_empty()


def test_on_a_real_trace_no_child_is_larger_than_its_parent(
    shared_trace: Callable[[str], str],
) -> None:
    for name in ("a100_train_6steps", "h100_bert_small_inference", "no_gpu_rank"):
        a = Analysis(read_trace(shared_trace(name)))
        tree = op_tree(a)
        assert 0 < tree.height <= 500
        both = tree.join(tree, left_on="parent", right_on="node", suffix="_of_parent")
        assert (both["ns"] <= both["ns_of_parent"]).all()
        sums = tree.group_by("parent").agg(pl.col("ns").sum().alias("children"))
        parents = tree.join(sums, left_on="node", right_on="parent")
        assert (parents["children"] <= parents["ns"]).all()
        if a.device_id is not None:
            launched = a.trace.gpu.filter(pl.Series(a.in_window) & pl.col("op").is_not_null())
            assert op_table(a)["device"].sum() <= launched["dur"].sum()
