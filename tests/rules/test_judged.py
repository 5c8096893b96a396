"""Findings of rules on public traces, counted again from the events in other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import polars as pl
import pytest
from msgspec.structs import replace

from advisor.advise.engine import Options, analyze
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import run_rules
from advisor.core.finding import Finding
from advisor.core.text import format_duration, location_figures
from advisor.measure import Analysis
from advisor.read import open_run, read_trace
from advisor.replay.window_replayer import WindowReplayer
from advisor.rules.host.periodic_stalls import LongStep
from advisor.testing import TraceBuilder

Trace = Callable[[str], str]
RULES = {rule.id: rule for rule in load_rules(config={})}
DLRM = "dlrm_8ranks/worker0.pt.trace"


@cache
def analysis(path: str) -> Analysis:
    return Analysis(read_trace(path))


def findings_of(a: Analysis, rule: str) -> list[Finding]:
    return run_rules(0, a, [RULES[rule]], estimate_gains=False).findings


def evidence_value(finding: Finding, start: str) -> float:
    """The evidence whose label starts so; not the share beside it, which has the same start."""
    share = f"{start}, share"
    (value,) = [e.value for e in finding.evidence if e.label.startswith(start) and e.label != share]
    assert isinstance(value, int | float)
    return float(value)


def late_launches(a: Analysis) -> float:
    """Idle time before work whose launch began after the device had run dry, ns: one event after
    the other."""
    gpu = a.trace.gpu.sort("ts")
    began = a.trace.cpu["ts"].gather(gpu["launch"]).to_list()
    reached, idle = None, 0
    for start, dur, launch in zip(gpu["ts"], gpu["dur"], began, strict=True):
        if reached is not None and launch is not None and launch >= reached:
            idle += start - reached
        reached = max(reached or start, start + dur)
    return idle


def overlaps(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> Iterator[int]:
    for start, end in a:
        for other, until in b:
            if other < end and until > start:
                yield min(end, until) - max(start, other)


@pytest.mark.parametrize("name", [DLRM])
def test_the_cost_of_launching_is_idle_time_before_late_launches(
    shared_trace: Trace, name: str
) -> None:
    """The rule counts less: not what the host waits for meanwhile, nor one slow function."""
    a = analysis(shared_trace(name))
    (finding,) = findings_of(a, "launch-bound")
    idle = evidence_value(finding, "idle for launches") * a.step_count
    assert 0.35 * late_launches(a) < idle < late_launches(a)


def test_python_before_the_first_kernel_is_no_launch_time(
    shared_trace: Trace,
) -> None:
    """Python takes the time: 70,101 pieces before the first kernel, most of them in
    ``_preprocess_image``. Hardly any launch comes late after that."""
    a = analysis(shared_trace("mi300_timesformer_inference"))
    assert late_launches(a) < 0.01 * a.span_ns
    assert findings_of(a, "launch-bound") == []
    (finding,) = findings_of(a, "python-hot-spot")
    before = int(a.trace.gpu["ts"].min()) - int(a.spans.start[0])  # type: ignore[arg-type]
    assert "_preprocess_image" in finding.summary
    assert 0.9 * before < evidence_value(finding, "GPU idle in these functions") < before
    for function in ("_preprocess_image", "read_video_pyav", "as_tensor"):
        assert function in finding.title  # the gain is of all of them
    assert "collate_fn=prepare" in finding.code, "decoding and preprocessing can run ahead"


def test_functions_around_the_models_count_together(shared_trace: Trace) -> None:
    """12.2 ms before the first kernel and 10.8 ms after the last one of 250 ms: offloading hooks,
    searched and reset, by three functions of 7 to 10 ms."""
    (finding,) = findings_of(
        analysis(shared_trace("diffusion/flux1_mi300x_xdit")), "python-hot-spot"
    )
    assert {place.function for place in finding.where} == {
        "_get_top_level_group_offload_hook", "reset_stateful_hooks", "_set_context",
    }  # fmt: skip
    idle = evidence_value(finding, "GPU idle in these functions")
    assert 0.95 * 23e6 < idle < 36e6  # all idle time in Python
    # calls in the file: 5.62, 2.32, 1.42 and 0.79 ms of the first, 8 of the last
    places = {place.function: place for place in finding.where}
    longest = places["_get_top_level_group_offload_hook"]
    assert (longest.count, round(longest.dur_ns / 1e4)) == (4, 562)
    assert places["_set_context"].count == 8
    assert "8 of _set_context, 54.6 ms" in str(finding.evidence)
    assert "host work is in diffusers itself" in finding.fix and "worker" not in finding.fix
    assert not finding.code, "no worker can walk the pipeline's modules"


@pytest.mark.parametrize("name", ["mi300_timesformer_inference", "diffusion/flux1_mi300x_xdit"])
def test_final_copy_of_a_recording_does_not_block(shared_trace: Trace, name: str) -> None:
    """The copy waits for 94 and 114 ms of device work, and nothing is launched after it."""
    a = analysis(shared_trace(name))
    cpu = a.trace.cpu
    copies = cpu.filter(cpu["name"].cast(pl.String) == "hipMemcpyWithStream")
    longest = copies.sort("dur")[-1]
    assert longest["dur"].item() > 90e6
    assert longest["ts"].item() > cpu.filter(cpu["call"] == "launch")["ts"].max()
    assert findings_of(a, "implicit-sync") == []


@pytest.mark.parametrize(("name", "call", "ms"), [(DLRM, "cudaMemcpyAsync", 0.88)])
def test_a_read_holds_the_host_as_long_as_its_call_takes(
    shared_trace: Trace, name: str, call: str, ms: float
) -> None:
    a = analysis(shared_trace(name))
    named = a.trace.cpu.filter(pl.col("name").cast(pl.String) == call)
    assert named["dur"].max() / 1e6 == pytest.approx(ms, rel=0.01)  # type: ignore[operator]
    (finding,) = findings_of(a, "implicit-sync")
    value, unit = finding.summary.partition(" for ")[2].split()[:2]
    assert float(value) * {"ms": 1, "µs": 1e-3}[unit] == pytest.approx(ms, rel=0.02)


def test_half_of_a_compiled_models_time_the_host_waits_in_reads(shared_trace: Trace) -> None:
    a = analysis(shared_trace("pairs/sam_3_bf16_compiled_sdpa"))
    calls = a.trace.cpu["name"].cast(pl.String).str.contains("^cuda(?:Memcpy|.*Synchronize)")
    every = int(a.trace.cpu.filter(calls)["dur"].sum())
    (finding,) = findings_of(a, "host-reads")
    assert 0.75 * every < evidence_value(finding, "host blocked in reads") < every


def test_single_item_reads_include_launches_between_them(shared_trace: Trace) -> None:
    """The authors went from 2,565 to 1,406 ms by encoding masks together, with 5,768 launches in
    place of 19,746. A capture allows none of its 7,023 reads, so CUDA graphs are no second fix."""
    report = analyze(shared_trace("pairs/sam_1_fp32_many_syncs"), Options(config={}))
    first = report.findings[0]
    assert first.rule == "host-reads" and first.impact is not None
    assert (first.impact.low_ns or 0) <= (2565 - 1406) * 1e6 <= (first.impact.high_ns or 0)
    assert {edit.select.on for edit in first.edits} == {"host", "gap"}
    assert "launch-bound" not in {f.rule for f in report.findings if not f.folded_under}


def test_collectives_are_as_exposed_as_their_intervals_are(shared_trace: Trace) -> None:
    a = analysis(shared_trace("nccl_collectives"))
    gpu = a.trace.gpu.filter(pl.Series(a.in_window)).with_columns(end=pl.col("ts") + pl.col("dur"))
    nccl = gpu["name"].cast(pl.String).str.contains("nccl")
    sent = list(gpu.filter(nccl).select("ts", "end").iter_rows())
    computed = list(gpu.filter(~nccl).select("ts", "end").iter_rows())
    hidden = sum(overlaps(sent, computed))
    exposed = (sum(end - start for start, end in sent) - hidden) / a.step_count
    (finding,) = findings_of(a, "exposed-communication")
    assert evidence_value(finding, "exposed communication") == pytest.approx(exposed, rel=0.02)


def test_all_to_all_advice_depends_on_its_data(shared_trace: Trace, shared_file: Trace) -> None:
    """Embeddings by torchrec's ranges; the heads of an attention by the ranges AllToAll4D."""
    (tables,) = findings_of(analysis(shared_trace("a100_train_6steps")), "exposed-communication")
    (both,) = findings_of(analysis(shared_trace("two_ranks_rank0")), "exposed-communication")
    run = open_run(shared_file("nsys/mfu_2gpu_before.sqlite"))
    (heads,) = findings_of(Analysis(run.traces[min(run.traces)]), "exposed-communication")
    assert "shard tables" in str(tables.fix).lower() and "optimizer" not in str(tables.fix)
    assert "shard tables" in str(both.fix) and "the optimizer's collectives" in str(both.fix)
    assert any("all_gather in the optimizer step 53.1 ms" in str(e.value) for e in both.evidence)
    assert "heads of sequence-parallel attention" in str(heads.fix)
    assert "bottom_mlp" not in str(heads.code)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("forward", "exchange it in parts"),
        ("moe_layer", "Send tokens to their experts"),
        ("all2all_data:kjt lengths", "shard tables by load"),
        ("Optimizer.step#Muon.step", "Start the optimizer's collective"),
    ],
)
def test_unexplained_all_to_all_gets_general_advice(mark: str, expected: str) -> None:
    b = TraceBuilder(rank=0, world_size=8)
    for _ in b.steps():
        b.run("aten::mm", "ampere_bf16_s16816gemm", 3000, [[512, 512], [512, 512]], "float")
        with b.range(mark):
            b.collective("all_to_all", 100 << 20, 1000, wait=True)
    (finding,) = findings_of(b.analysis(), "exposed-communication")
    assert expected in str(finding.fix)
    assert ("tables" in str(finding.fix)) == ("kjt" in mark)


@pytest.mark.parametrize(("size", "late"), [(1 << 10, True), (100 << 20, False)])
def test_a_message_far_too_small_for_its_time_waits_for_a_rank(size: int, late: bool) -> None:
    """4 ms: 1 KiB needs 0.2 ms of latency between 8 ranks, 100 MiB more than 4 ms at 1 Gbit/s."""
    b = TraceBuilder(rank=0, world_size=8)
    for _ in b.steps(3):
        b.run("aten::mm", "ampere_bf16_s16816gemm", 3000, [[512, 512], [512, 512]], "float")
        b.collective("allreduce", size, 4000, wait=True)
    (finding,) = findings_of(b.analysis(), "exposed-communication")
    (edit,) = finding.edits
    assert (edit.op, "late" in finding.title) == ("scale" if late else "overlap", late)
    if late:
        waited = 4000 - (8.4 + 14 * 14 + 1024 * 2 * 7 / 8 / 0.125e3)  # base, 14 hops, bytes: µs
        assert evidence_value(finding, "waiting for other ranks") == pytest.approx(
            waited * 1e3, rel=1e-3
        )
        assert "DDP" not in finding.code and "overlap" not in str(finding.fix).partition(".")[0]


@pytest.mark.parametrize("rank", range(8))
def test_small_messages_of_a_job_wait_for_its_late_rank(shared_trace: Trace, rank: int) -> None:
    """24 KiB take up to 7.6 ms on ranks 0, 1, 3, 4 and 5; the other three enter late."""
    for finding in findings_of(analysis(shared_trace(f"dlrm_8ranks/worker{rank}.pt.trace")),
                         "exposed-communication"):  # fmt: skip
        late = "enters collectives late" in finding.title
        assert late == (rank in (0, 1, 3, 4, 5))
        assert ("traces of all ranks" in str(finding.fix)) == late
        # of rank 7 alone, all-reduces are exposed longest
        assert "fully_shard" not in finding.code and ("DDP(" in finding.code) == (rank == 7)


def test_a_message_slower_than_similar_ones_may_be_a_wait(shared_trace: Trace) -> None:
    """All-to-alls of 289 MB take 3.1 to 12.6 ms, those of 4 MB up to 4.9: each message beside all
    others of its kind. The low end of the gain is without that share."""
    a = analysis(shared_trace("a100_train_6steps"))
    rows = list(a.collectives.iter_rows(named=True))
    waits = 0.0
    for row in rows:
        like = [r for r in rows if (r["collective"], r["axis"]) == (row["collective"], row["axis"])]
        need = min(r["dur"] * max(1.0, row["bytes"] / r["bytes"]) for r in like)
        waits += min(row["exposed"], row["dur"] - need)
    share = waits / sum(r["exposed"] for r in rows)
    (finding,) = findings_of(a, "exposed-communication")
    (edit,) = finding.edits
    assert edit.worst_factor == pytest.approx(share, rel=1e-3) and 0.8 < share < 0.9
    assert evidence_value(finding, "exposed beyond the fastest") == pytest.approx(share, rel=1e-3)
    replay = WindowReplayer(a)
    sure = replay.period((), "low") - replay.period([replace(edit, worst_factor=None)], "low")
    saved = replay.period((), "low") - replay.period([edit], "low")
    assert saved == pytest.approx((1 - share) * sure)
    assert replay.gain([edit]) == replay.gain([replace(edit, worst_factor=None)])


def test_ranks_of_one_job_share_one_advice(shared_trace: Trace) -> None:
    """The longest of rank 0 is alltoall_fwd_single, of rank 1 alltoall_bwd_single, of bytes: both
    run torchrec's functions, whose backward pass autograd knows."""
    first, second = (
        findings_of(analysis(shared_trace(f"two_ranks_rank{rank}")), "exposed-communication")[0]
        for rank in (0, 1)
    )
    assert (first.fix, first.code) == (second.fix, second.code)
    assert "autograd can differentiate" in first.code and "no gradient" not in first.code
    assert "on the wire" not in f"{first.fix} {first.code}"


def test_collective_awaited_immediately_is_exposed(shared_trace: Trace) -> None:
    """Rank 7's longest: the next kernel is launched while it runs, and starts when it ends."""
    a = analysis(shared_trace("dlrm_8ranks/worker7.pt.trace"))
    gpu = a.trace.gpu.with_columns(end=pl.col("ts") + pl.col("dur")).sort("ts")
    sums = gpu["name"].cast(pl.String).str.contains("AllReduce")
    longest = gpu.filter(sums).sort("dur").row(-1, named=True)
    start, end = longest["ts"], longest["end"]
    assert gpu.filter((pl.col("ts") < end) & (pl.col("end") > start)).height == 1
    following = gpu.filter(pl.col("ts") >= end).row(0, named=True)
    assert start < a.trace.cpu["ts"][following["launch"]] < end - 300_000
    assert following["ts"] - end < 5_000
    (finding,) = findings_of(a, "poor-overlap")
    assert evidence_value(finding, "exposed and waited for at once") == end - start


def test_small_grids_have_fewer_blocks_than_v100_sms(shared_trace: Trace) -> None:
    a = analysis(shared_trace("dlrm_8ranks/worker1.pt.trace"))
    gpu = a.trace.gpu.filter(pl.Series(a.in_window) & (pl.col("kind") == "kernel"))
    gpu = gpu.filter(~pl.col("name").cast(pl.String).str.contains("nccl"))
    by_row = pl.col("name").cast(pl.String).str.contains("reduce_|_norm|softmax_warp")
    small = gpu.filter((pl.col("blocks") < 80) & ~by_row)
    (finding,) = findings_of(a, "small-grids")
    reported_share = evidence_value(finding, "small kernels, share of compute time")
    assert reported_share == pytest.approx(small["dur"].sum() / gpu["dur"].sum(), rel=0.03)
    empty = 1 - (small["dur"] * small["blocks"] / 80).sum() / small["dur"].sum()
    assert evidence_value(finding, "of the GPU empty meanwhile") == pytest.approx(empty, rel=0.02)


@pytest.mark.parametrize("size", [2, 32, 64, 128])
def test_each_block_of_the_particle_transformer_attends_by_hand(
    shared_trace: Trace, size: int
) -> None:
    """Eight blocks over the particles and two over the class, as its authors wrote it: product,
    softmax, product."""
    a = analysis(shared_trace(f"pairs/particle_batch{size}"))
    gpu = a.trace.gpu.filter(pl.col("kind") == "kernel").sort("ts")
    ops = a.trace.cpu["name"].cast(pl.String).gather(gpu["op"])
    products = {"aten::bmm", "aten::baddbmm", "aten::addmm", "aten::mm"}
    seen = [op for op in ops if op == "aten::_softmax" or op in products]
    around = [(seen[at - 1], seen[at + 1]) for at, op in enumerate(seen) if op == "aten::_softmax"]
    assert sum(pair[1] == "aten::bmm" and pair[0] in products for pair in around) >= 8
    (finding,) = findings_of(a, "unfused-attention")
    assert {place.op for place in finding.where} & {"aten::_softmax", "aten::baddbmm"}


@pytest.mark.parametrize(
    ("name", "kernel", "blocks", "resident", "waves"),
    [
        # 122 and 255 registers a thread of 128: four and two blocks fit into 65,536
        ("pairs/sam_2_fp32_few_syncs", "ampere_sgemm_128x64_tn", 640, 4, 1.481),
        ("pairs/sam_3_bf16_compiled_sdpa", "flash_fwd_kernel", 512, 2, 2.370),
    ],
)
def test_waves_are_blocks_over_a100_resident_blocks(
    shared_trace: Trace, name: str, kernel: str, blocks: int, resident: int, waves: float
) -> None:
    a = analysis(shared_trace(name))
    rows = a.trace.gpu.filter(pl.col("name").cast(pl.String).str.contains(kernel))
    rows = rows.filter(pl.col("blocks") == blocks)
    registers = 8 * np.ceil(rows["registers"][0] / 8) * rows["threads"][0]
    assert int(65_536 // registers) == resident
    assert blocks / (108 * resident) == pytest.approx(waves, abs=0.001)
    at = a.trace.gpu["name"].cast(pl.String).str.contains(kernel) & (
        a.trace.gpu["blocks"] == blocks
    )
    assert a.kernels["waves"].filter(at).unique().to_list() == pytest.approx([waves], abs=0.001)


def test_a_tail_at_98_percent_of_the_rate_is_not_counted(shared_trace: Trace) -> None:
    """Four blocks share a multiprocessor; those of the tail have it to themselves."""
    a = analysis(shared_trace("pairs/sam_2_fp32_few_syncs"))
    places = [place for finding in findings_of(a, "wave-quantisation") for place in finding.where]
    assert not [place for place in places if "sgemm" in str(place.kernel)]


def test_layer_norm_of_short_rows_is_below_memory_bandwidth(
    shared_trace: Trace,
) -> None:
    """16,384 rows of 128, in and out: bytes over time, by hand. An A100's memory: 1,555 GB/s."""
    a = analysis(shared_trace("pairs/particle_batch128"))
    ops = a.trace.cpu["name"].cast(pl.String).gather(a.trace.gpu["op"])
    inputs = a.trace.cpu["inputs"].gather(a.trace.gpu["op"])
    dims = a.trace.inputs["dims"].cast(pl.String).gather(inputs)
    is_short_norm = (
        (ops == "aten::native_layer_norm") & dims.str.contains("128, ?128, ?128")
    ).fill_null(False)
    kernels = a.trace.gpu.filter(is_short_norm)
    types = a.trace.inputs["types"].cast(pl.String).gather(inputs).filter(is_short_norm)
    width = 2 if "Half" in types[0].split(",")[0] else 4
    rate = kernels.height * 2 * width * 128**3 / kernels["dur"].sum()
    assert rate < 1_555 / 3
    (finding,) = findings_of(a, "low-bandwidth")
    operators = [e.value for e in finding.evidence if e.label == "operator"]
    assert f": {rate:,.0f} of " in str(operators[0])


def test_compiling_step_is_advised_to_compile_before_the_loop() -> None:
    """The advice is not to do "it" in another thread, which is possible for a checkpoint."""
    examples = LongStep.examples()
    fixes = {}
    for name in ("a new shape is compiled", "a checkpoint"):
        trace = examples[name]
        assert isinstance(trace, TraceBuilder)
        (finding,) = findings_of(Analysis(trace.trace()), "long-step")
        fixes[name] = finding.fix
        assert ("compiling or loading code" in finding.summary) == (name != "a checkpoint")
        # by the mean of the report's scope, not a further time of the same steps
        mean = Analysis(trace.trace()).steps.used["dur"].to_numpy().mean()
        assert f"the other profiled steps take {format_duration(mean)} on" in finding.summary
    assert fixes["a new shape is compiled"].startswith("Compile before the loop")
    assert "torch._dynamo" not in fixes["a checkpoint"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("mi300_timesformer_inference", "unfused-attention"),
        ("h100_qwen_inference", "handwritten-operator"),
        ("linear_2080ti_launch_bound", "launch-bound"),
        ("b200_eager", "launch-bound"),
        ("pairs/particle_batch2", "launch-bound"),
    ],
)
def test_kernel_counts_match_the_named_kernel(shared_trace: Trace, name: str, rule: str) -> None:
    """No kernel is said to run more often than the file has it; other counts name what they are."""
    a = analysis(shared_trace(name))
    (finding,) = findings_of(a, rule)
    runs = dict(a.trace.gpu["name"].cast(pl.String).value_counts().iter_rows())
    for place in finding.where:
        if place.counted:
            assert place.kernel is None and " gaps" in location_figures(place)[0]
        else:
            assert place.count <= runs[place.kernel]
