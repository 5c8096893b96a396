"""Collectives: kinds, bytes, bus bandwidth and exposure, against arithmetic done elsewhere."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.measure import Analysis
from advisor.measure.comm.comms import SCHEMA, step_at
from advisor.measure.comm.messages import (
    bus_factor,
    element_bytes,
    kernel_kind,
    kind_of,
    message_elements,
)
from advisor.read import read_trace
from advisor.testing import TraceBuilder

MB = 1 << 20


def arguments(name: str, given: Any, out: Any, n: Any, dtype: Any = "Float", **more: Any) -> Any:
    """Collective arguments as the profiler writes them on a kernel."""
    args = {
        "Collective name": name,
        "In msg nelems": given,
        "Out msg nelems": out,
        "Group size": n,
        "dtype": dtype,
        "Process Group Name": "0",
    }
    return {**args, **{key.replace("_", " "): value for key, value in more.items()}}


def one_collective(
    comm: Any, kernel: str = "ncclDevKernel_Generic_4(x)", us: float = 1000
) -> dict[str, Any]:
    """The only collective of a trace."""
    b = TraceBuilder()
    with b.step():
        b.launch("gemm", 10)
        b.launch(kernel, us, stream=20, comm=comm)
        b.sync()
    table = b.analysis().collectives
    assert table.height == 1
    return table.row(0, named=True)


# -- kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("nccl:all_reduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("nccl:all_reduce_barrier", "all_reduce"),
        ("barrier", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("nccl:_broadcast_oop", "broadcast"),
        ("nccl:reduce", "reduce"),
        ("_reduce_oop", "reduce"),
        ("all_to_allv", "all_to_all"),
        ("nccl:send 0->1", "send_recv"),
        ("nccl:recv 0<-1", "send_recv"),
        ("pointToPoint", "send_recv"),
        ("nccl:coalesced", None),
        ("wait", None),
        ("nccl:gather", None),
    ],
)
def test_the_kind_is_read_from_every_spelling(text: str, kind: str | None) -> None:
    assert kind_of(text) == kind


LONG = "(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL" + LONG, "reduce_scatter"),
        ("ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)", "all_gather"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(x)", "reduce"),
        ("ncclDevKernel_SendRecv" + LONG, "send_recv"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<bf16, 16>(x)", "all_reduce"),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16>(x)", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<nv_bfloat16, 8>(x)", "all_reduce"),
        # kernels that run whatever has no kernel of its own tell nothing
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", None),
        ("ncclDevKernel_Generic" + LONG, None),
        ("some_kernel<allreduce>(reduce*)", None),
    ],
)
def test_collective_kind_comes_from_a_telling_kernel_name(kernel: str, kind: str | None) -> None:
    assert kernel_kind(kernel) == kind


def test_arguments_precede_annotation_and_kernel_name() -> None:
    b = TraceBuilder()
    name = "ncclDevKernel_AllGather_RING_LL(x)"
    with b.step():
        with b.range("nccl:broadcast"):
            b.launch(name, 10, comm=arguments("_reduce_scatter_base", 8, 4, 2))
            b.launch(name, 10)
        b.launch(name, 10)
        b.sync()
    kinds = b.analysis().collectives["collective"].to_list()
    assert kinds == ["reduce_scatter", "broadcast", "all_gather"]


def test_generic_kernel_without_host_row_is_other() -> None:
    assert (
        one_collective(None, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)")["collective"]
        == "other"
    )


def test_kernel_without_arguments_uses_those_of_its_operator() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("record_param_comms"):
            b.events[-1]["args"] |= arguments("allreduce", 1000, 1000, 4, "Half")
            b.launch("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", 1.0)
        b.sync()
    row = b.analysis().collectives.row(0, named=True)
    assert (row["collective"], row["bytes"], row["group_size"]) == ("all_reduce", 2000, 4)
    assert row["bus_gbps"] == pytest.approx(2000 * 2 * 3 / 4 / 1000)


def test_wait_around_the_launch_is_ignored_for_its_collective() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("record_param_comms"):
            b.events[-1]["args"] |= arguments("wait", 0, 0, 1, "Byte")
            b.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 5)
        b.sync()
    row = b.analysis().collectives.row(0, named=True)
    assert (row["collective"], row["bytes"], row["group_size"]) == ("all_reduce", None, None)


# -- bytes and bandwidth -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks_of_group", "out", "n", "size", "gbps"),
    [
        # 1 ms each; sizes and factors by hand from nccl-tests' doc/PERFORMANCE.md
        ("allreduce", 25_000_000, 25_000_000, 8, 100_000_000, 100 * 2 * 7 / 8),
        ("allreduce", 25_000_000, 25_000_000, 2, 100_000_000, 100),
        ("_allgather_base", 1_000_000, 8_000_000, 8, 32_000_000, 32 * 7 / 8),
        ("_reduce_scatter_base", 8_000_000, 1_000_000, 8, 32_000_000, 32 * 7 / 8),
        ("all_to_all", 4_000_000, 4_000_000, 4, 16_000_000, 16 * 3 / 4),
        ("broadcast", 2_000_000, 2_000_000, 16, 8_000_000, 8),
        ("reduce", 2_000_000, 2_000_000, 16, 8_000_000, 8),
        ("send", 2_000_000, 0, 2, 8_000_000, 8),
        ("recv", 0, 2_000_000, 2, 8_000_000, 8),
    ],
)
def test_bus_bandwidth_follows_nccl_tests(
    name: str, ranks_of_group: int, out: int, n: int, size: int, gbps: float
) -> None:
    row = one_collective(arguments(name, ranks_of_group, out, n))
    assert row["bytes"] == size
    assert row["bus_gbps"] == pytest.approx(gbps)
    assert row["dur"] == 1_000_000


def test_missing_output_is_worked_out_from_the_group() -> None:
    assert message_elements("all_gather", 10, None, 8) == 80
    assert message_elements("reduce_scatter", None, 10, 8) == 80
    assert message_elements("all_gather", 10, None, None) is None
    assert message_elements("all_reduce", None, None, 8) is None


@pytest.mark.parametrize(
    ("comm", "size"),
    [
        (arguments("allreduce", 10, 10, 8, "NoSuchType"), None),
        (arguments("allreduce", 10, 10, 8, None), None),
        (arguments("allreduce", None, None, 8), None),
        (arguments("allreduce", 10, 10, None), 40),
        (arguments("allreduce", 10, 10, 1), 40),
        (arguments("allreduce", 0, 0, 8), 0),
        (arguments("gather", 10, 10, 8), None),
        (None, None),
    ],
)
def test_unknown_sizes_give_no_bandwidth(comm: Any, size: int | None) -> None:
    row = one_collective(comm)
    assert row["bytes"] == size
    assert row["bus_gbps"] is None


def test_uneven_all_to_all_has_bytes_but_no_bandwidth() -> None:
    uneven = one_collective(arguments("all_to_allv", 100, 100, 2, In_split_size="[30, 70]"))
    assert (uneven["bytes"], uneven["bus_gbps"]) == (400, None)
    even = one_collective(arguments("all_to_allv", 100, 100, 2, In_split_size="[50, 50]"))
    assert even["bus_gbps"] == pytest.approx(400 / 2 / 1e6)
    differ = one_collective(arguments("all_to_allv", 100, 130, 2))
    assert differ["bus_gbps"] is None


def test_group_size_is_counted_from_its_ranks_if_unreported() -> None:
    comm = arguments("allreduce", 1000, 1000, None)
    comm["Process Group Ranks"] = [0, 4, 8, 12]
    assert one_collective(comm)["group_size"] == 4


@pytest.mark.parametrize(
    "comm",
    [
        arguments("allreduce", -5, -5, -1),
        arguments("allreduce", 1 << 61, 1 << 61, 8, "Double"),
        arguments("allreduce", "many", [], {}),
        arguments("allreduce", 1e300, True, "8"),
        arguments(["allreduce"], 1, 1, 1),
        arguments("allreduce" * 500, 4, 4, 2),
        arguments("\u202eallreduce\x00", 4, 4, 2, "\x00"),
        arguments("all_to_all", 4, 4, 2, In_split_size={"a": [1, 2]}, Out_split_size="]]"),
    ],
)
def test_hostile_arguments_are_harmless(comm: Any) -> None:
    row = one_collective(comm)
    assert row["bytes"] is None or row["bytes"] >= 0
    assert row["bus_gbps"] is None or row["bus_gbps"] > 0


def test_both_spellings_of_a_dtype_have_one_width() -> None:
    pairs = {"BFloat16": "c10::BFloat16", "Float": "float", "Long": "long int", "Bool": "bool"}
    for argument, shape in pairs.items():
        assert element_bytes(argument) == element_bytes(shape) is not None
    assert [element_bytes(d) for d in ("Double", "Float", "Half", "Float8_e4m3fn")] == [8, 4, 2, 1]
    assert element_bytes("Object") is None and element_bytes(None) is None


def test_dtype_widths_match_torch() -> None:
    torch = pytest.importorskip("torch")
    names = {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
        "ComplexHalf": torch.complex32,
        "Float8_e4m3fn": torch.float8_e4m3fn,
        "Float8_e5m2": torch.float8_e5m2,
    }
    assert {n: element_bytes(n) for n in names} == {n: t.itemsize for n, t in names.items()}


@given(n=st.integers(2, 4096))
def test_ring_traffic_matches_its_factor(n: int) -> None:
    """Count it: in a ring all-reduce of n chunks each link carries n-1 chunks twice."""
    chunks_sent = sum(1 for _ in range(n - 1)) + sum(1 for _ in range(n - 1))
    assert bus_factor("all_reduce", n) == pytest.approx(chunks_sent / n)
    assert bus_factor("all_gather", n) == pytest.approx((n - 1) / n)


# -- from shapes, in traces without arguments --------------------------------------------------


def test_the_tensors_of_the_annotation_give_bytes_but_no_group() -> None:
    b = TraceBuilder()
    with b.step():
        with b.range("nccl:all_reduce"):
            b.events[-1]["args"] |= {"Input Dims": [[100, 10], [24]], "Input type": ["float"] * 2}
            b.launch("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 50)
        b.sync()
    row = b.analysis().collectives.row(0, named=True)
    assert (row["bytes"], row["dtype"], row["group_size"]) == (4096, "float", None)
    assert row["bus_gbps"] is None


def test_all_gather_into_one_tensor_gives_its_group_size() -> None:
    b = TraceBuilder()
    with b.step():
        with (
            b.op("c10d::_allgather_base_", [[6400], [100], []], ["float", "float", ""]),
            b.range("nccl:_all_gather_base"),
        ):
            b.events[-1]["args"] |= {"Input Dims": [[100]], "Input type": ["float"]}
            b.launch("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", 1)
        b.sync()
    row = b.analysis().collectives.row(0, named=True)
    assert (row["collective"], row["group_size"], row["bytes"]) == ("all_gather", 64, 25600)
    assert row["bus_gbps"] == pytest.approx(25.6 * 63 / 64)


def test_an_op_that_all_reduces_itself_gives_bytes() -> None:
    b = TraceBuilder()
    with b.step():
        shapes = ([[2048, 2], [], []], ["c10::BFloat16", "", "Scalar"])
        with b.op("symm_mem::multimem_all_reduce_", *shapes):
            b.launch("void (anonymous namespace)::multimem_all_reduce_kernel<x, 16>(y)", 5)
        b.sync()
    row = b.analysis().collectives.row(0, named=True)
    assert (row["collective"], row["bytes"], row["dtype"]) == ("all_reduce", 8192, "c10::BFloat16")


# -- exposure ----------------------------------------------------------------------------------


def test_only_the_part_that_no_kernel_covers_is_exposed() -> None:
    b = TraceBuilder()
    with b.step():
        b.launch("gemm", 600, after=2000)
        b.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1000, stream=20, after=2100)
        b.sync()
    row = b.analysis().collectives.row(0, named=True)
    assert row["exposed"] == (3100 - 2600) * 1000
    assert row["dur"] == 1_000_000


def test_another_collective_or_a_copy_hides_nothing() -> None:
    b = TraceBuilder()
    with b.step():
        b.launch("gemm", 1)
        for stream in (20, 21):
            b.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 100, stream=stream, after=5000)
        b.copy("HtoD", 1 << 20, 100, stream=9)
        b.sync()
    a = b.analysis()
    assert a.collectives["exposed"].to_list() == [100_000, 100_000]
    assert a.breakdown.communication.total == 100_000


durations = st.integers(1, 400)
events = st.lists(
    st.tuples(st.integers(0, 2000), durations, st.sampled_from(["gemm", "nccl", "nccl2", "copy"])),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(events=events)
def test_exposure_equals_a_sweep_over_every_microsecond(
    events: list[tuple[int, int, str]],
) -> None:
    b = TraceBuilder()
    names = {"gemm": "gemm", "nccl": "ncclKernel_AllReduce_x(", "nccl2": "ncclKernel_AllGather_x("}
    with b.step():
        b.host(3000)
    for number, (ts, dur, kind) in enumerate(events):
        if kind == "copy":
            args = {"bytes": 1}
            b._emit(
                "gpu_memcpy",
                "Memcpy HtoD (Pinned -> Device)",
                ts + 1000,
                dur,
                0,
                9,
                {"device": 0, "stream": 9, "correlation": 10_000 + number, **args},
            )
        else:
            b._emit(
                "kernel",
                names[kind],
                ts + 1000,
                dur,
                0,
                7,
                {"device": 0, "stream": 7, "correlation": 10_000 + number},
            )
    a = b.analysis()
    if a.device_id is None:
        return
    compute = np.zeros(6000, dtype=bool)
    for ts, dur, kind in events:
        if kind == "gemm":
            compute[ts : ts + dur] = True
    inside = np.zeros(6000, dtype=bool)
    inside[:3000] = True  # the step: 3000 µs from 1000, where the events' 0 is
    wanted = sorted(
        (ts, dur, int((inside & ~compute)[ts : ts + dur].sum()) * 1000)
        for ts, dur, kind in events
        if kind.startswith("nccl") and inside[ts : ts + dur].any()
    )
    collectives = a.collectives
    origin = a.trace.meta.start_ns // 1000 - 1000
    rows = sorted(
        (ts // 1000 + origin, dur // 1000, exposed)
        for ts, dur, exposed in collectives.select("ts", "dur", "exposed").iter_rows()
    )
    assert rows == wanted


def test_hidden_by_is_the_family_that_covers_most() -> None:
    b = TraceBuilder()
    with b.step():
        with b.op("aten::mm", [[512, 512], [512, 512]]):
            b.launch("ampere_sgemm_128x64_nn", 300, after=2000)
        with b.op("aten::relu", [[512, 512]]):
            b.launch("void at::native::vectorized_elementwise_kernel<4, relu>(x)", 100)
        b.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 350, stream=20, after=2000)
        b.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 350, stream=20, after=9000)
        b.sync()
    a = b.analysis()
    if "family" not in a.kernels.columns:
        pytest.skip("kernels have no families yet")
    is_gemm = a.trace.gpu["name"] == "ampere_sgemm_128x64_nn"
    gemm = a.kernels["family"].filter(is_gemm)[0]
    assert a.collectives["hidden_by"].to_list() == [gemm, None]


# -- the rest of the row -----------------------------------------------------------------------


def test_columns_match_the_schema() -> None:
    b = TraceBuilder()
    with b.step():
        b.launch("gemm", 10)
    assert dict(b.analysis().collectives.schema) == SCHEMA
    with b.step():
        b.collective("allreduce", MB, 10)
        b.sync()
    assert dict(b.analysis().collectives.schema) == SCHEMA


def test_a_trace_without_device_work_has_no_collectives() -> None:
    b = TraceBuilder()
    with b.step(), b.op("aten::add"):
        b.host(10)
    assert b.analysis().collectives.is_empty()


def test_order_counts_kind_and_group_over_the_whole_trace() -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            b.collective("allreduce", MB, 10, group="dp")
            b.collective("allreduce", MB, 10, group="tp")
            b.collective("broadcast", MB, 10, group="dp")
            b.collective("allreduce", MB, 10, group="dp")
            b.sync()
    every = b.analysis().collectives
    dp = every.filter((pl.col("group") == "dp") & (pl.col("collective") == "all_reduce"))
    assert dp["order"].to_list() == [0, 1, 2, 3, 4, 5]
    assert every.filter(pl.col("group") == "tp")["order"].to_list() == [0, 1, 2]
    # the same collective has the same number whichever steps are looked at
    last = Analysis(b.trace(), (2, 3)).collectives
    assert last.filter(pl.col("group") == "tp")["order"].to_list() == [2]
    assert last["step"].unique().to_list() == [2]


def test_the_annotation_is_the_users_not_the_backends() -> None:
    b = TraceBuilder()
    with b.step():
        with b.range("my exchange"):
            b.collective("all_to_all", MB, 10)
        b.collective("all_to_all", MB, 10)
        b.sync()
    assert b.analysis().collectives["annotation"].to_list() == ["my exchange", None]


def test_an_instant_between_used_steps_belongs_to_the_next() -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            b.launch("gemm", 10)
            b.host(1000)
            b.sync()
        b.host(5000)
    a = b.analysis()
    table = a.steps.table
    between = (table["end"][0] + table["ts"][1]) // 2
    after = table["end"][2] + 1
    at = np.array([table["ts"][0], between, table["ts"][1], after])
    assert step_at(a, at).tolist() == [0, 1, 1, 2]


# -- real traces -------------------------------------------------------------------------------


def test_public_nccl_trace_has_its_ddp_bucket_sizes(shared_trace) -> None:  # type: ignore[no-untyped-def]
    a = Analysis(read_trace(shared_trace("nccl_collectives")))
    table = a.collectives
    reduced = table.filter(pl.col("collective") == "all_reduce")
    per_step = reduced.group_by("step").agg(pl.col("bytes").sum())["bytes"].unique()
    # ResNet-50's 25,557,032 parameters in float32: DDP reduces each gradient once a step
    assert per_step.to_list() == [25_557_032 * 4]
    assert reduced["group_size"].unique().to_list() == [2]
    largest = reduced.sort("bytes", "dur").filter(pl.col("bytes") == 31_502_336).row(0, named=True)
    assert largest["bus_gbps"] == pytest.approx(31_502_336 * 2 * (2 - 1) / 2 / largest["dur"])
    # ResNet-50 has 26,560 running means and as many variances, and 53 batch counters
    sent = set(table.filter(pl.col("collective") == "broadcast")["bytes"].to_list())
    assert sent == {2 * 26_560 * 4, 53 * 8}


@pytest.mark.parametrize(
    ("name", "exposed_ms", "total_ms"),
    [("a100_train_6steps", 87.9, 163.5), ("two_ranks_rank0", 337.0, 396.2)],
)
def test_exposed_time_equals_a_microsecond_sweep(
    shared_trace,  # type: ignore[no-untyped-def]
    name: str,
    exposed_ms: float,
    total_ms: float,
) -> None:
    path = shared_trace(name)
    rows = [
        (e["ts"], e["dur"], "nccl" in e["name"])
        for e in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "Kernel")
    ]
    first = min(ts for ts, _, _ in rows)
    busy = np.zeros((2, int(max(ts + dur for ts, dur, _ in rows) - first)), dtype=bool)
    for ts, dur, communication in rows:
        busy[int(communication), int(ts - first) : int(ts + dur - first)] = True
    a = Analysis(read_trace(path))
    assert a.collectives["exposed"].sum() == (busy[1] & ~busy[0]).sum() * 1000
    assert a.breakdown.all_communication.total == busy[1].sum() * 1000
    assert busy[1].sum() / 1e3 == pytest.approx(total_ms, abs=0.1)
    assert (busy[1] & ~busy[0]).sum() / 1e3 == pytest.approx(exposed_ms, abs=0.1)


def test_one_kernel_name_stands_for_three_collectives(shared_trace) -> None:  # type: ignore[no-untyped-def]
    a = Analysis(read_trace(shared_trace("two_ranks_rank0")))
    table = a.collectives
    assert a.trace.gpu["name"].gather(table["gpu"]).n_unique() == 1
    counts = dict(table.group_by("collective").len().iter_rows())
    assert counts == {"all_to_all": 4, "all_reduce": 4, "all_gather": 2}
    gather = table.filter(pl.col("collective") == "all_gather")
    # c10d::_allgather_base_ in the file: [[1073741824], [16777216]] of one byte each
    assert gather["bytes"].unique().to_list() == [1 << 30]
    assert gather["group_size"].unique().to_list() == [64]


def test_multimem_all_reduces_of_vllm_are_collectives_with_bytes(shared_trace) -> None:  # type: ignore[no-untyped-def]
    table = Analysis(read_trace(shared_trace("b200_eager"))).collectives
    reduced = table.filter(pl.col("collective") == "all_reduce")
    assert reduced.height == 73
    # 888 tokens x 2880 features of bfloat16, and the same padded to 3072
    assert sorted(reduced["bytes"].unique()) == [888 * 2880 * 2, 888 * 3072 * 2]
