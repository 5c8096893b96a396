"""Layers: sums against the device's total on every public file with modules, cases by hand."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import advisor
from advisor.compare.amounts import layer_amounts
from advisor.core.intervals import covered_length
from advisor.core.report import Report
from advisor.core.text import location_names
from advisor.measure import Analysis
from advisor.measure.host.layers import (
    LayerTable,
    describe_nodes,
    equal_layers,
    find_unequal_layers,
    report_layers,
)
from advisor.measure.host.module_sources import MAX_MODULE_DEPTH, op_path, split_modules
from advisor.read import read_trace
from advisor.rules.support.common import costliest_places
from advisor.testing import TraceBuilder

US = 1000
WITH_MODULES = {
    "h100_qwen_inference.json.gz": "module events",
    "h100_bert_small_inference.json.gz": "module events",
    "b200_eager.json.gz": "module events",
    "mi300_timesformer_inference.json.gz": "module events",
    "serving/sglang_prefill/replay.json.gz": "module events",
    "serving/vllm_decode_full/replay.json.gz": "module events",
    "diffusion/flux1_mi300x_xdit.json.gz": "module events",
    "nsys/mfu_2gpu_before.sqlite": "FSDP",
    "nsys/mfu_2gpu_after.sqlite": "FSDP",
    "xla/tf_gpu_multi_worker.xplane.pb.gz": "operator names",
}
WITHOUT = ("alexnet.json.gz", "a100_train_6steps.json.gz", "two_ranks_rank0.json.gz")


def module(number: int, name: str = "Block") -> str:
    return f"nn.Module: {name}_{number}"


def layers_of(builder: TraceBuilder) -> LayerTable:
    result = builder.analysis().layers
    assert result is not None
    return result


def times(layers: LayerTable) -> dict[str, int]:
    """Time by the path of names, ns."""
    names, ns = layers.nodes["name"].to_list(), layers.nodes["ns"].to_list()
    return {"/".join(names[i] for i in layers.path(node)): ns[node] for node in range(len(names))}


# -- laws over public files -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=WITH_MODULES)
def analyses(request: pytest.FixtureRequest, shared_file: Callable[[str], str]) -> list[Analysis]:
    """Each rank of each public file with modules."""
    run = advisor.open(shared_file(request.param))
    result = [Analysis(trace) for trace in run.traces.values()]
    for a in result:
        assert a.layers is not None
        assert a.layers.source == WITH_MODULES[request.param]
    return result


def test_layers_and_other_work_add_up_to_device_work(analyses: list[Analysis]) -> None:
    for a in analyses:
        gpu = a.trace.gpu[np.flatnonzero(a.in_window)]
        ts = gpu["ts"].to_numpy()
        work = int(covered_length(ts, ts + gpu["dur"].to_numpy(), a.spans).sum())
        report = report_layers(a)
        assert report is not None
        outermost = [layer for layer in report.layers if layer.parent is None]
        total = sum(layer.ns for layer in outermost) + report.outside_ns
        assert total * a.step_count == pytest.approx(work, rel=1e-3)
        assert report.outside_ns >= 0
        kernels = sum(layer.kernels for layer in outermost) + report.outside_kernels
        assert kernels * a.step_count == pytest.approx(gpu.height)
        self_ns = sum(kind.self_ns for kind in report.kinds)
        assert len(report.kinds) == 100 or self_ns == pytest.approx(
            report.total_ns - report.outside_ns
        )


def test_module_time_is_own_work_plus_submodules(analyses: list[Analysis]) -> None:
    for a in analyses:
        assert a.layers is not None
        nodes = a.layers.nodes
        inside = nodes.group_by("parent").agg(pl.col("ns").sum().alias("inside"))
        joined = nodes.join(inside, left_on="node", right_on="parent", how="left")
        assert (joined["self"] + joined["inside"].fill_null(0) == joined["ns"]).all()
        assert (nodes["self"] >= 0).all() and (nodes["backward"] <= nodes["ns"]).all()
        assert a.layers.steps.sum(axis=1)[0] == pytest.approx(nodes["ns"][0], rel=1e-3)
        report = report_layers(a)
        assert report is not None
        below: dict[int, float] = defaultdict(float)
        for layer in report.layers:
            if layer.parent is not None:
                below[layer.parent] += layer.ns
        if not report.more:
            for place, layer in enumerate(report.layers):
                assert layer.self_ns + below[place] == pytest.approx(layer.ns, abs=1)


def test_calls_are_whole_numbers_per_step(analyses: list[Analysis]) -> None:
    for a in analyses:
        report = report_layers(a)
        assert report is not None
        if a.steps.source in ("ProfilerStep", "whole trace", "engine"):
            assert all(layer.calls is None or layer.calls.is_integer() for layer in report.layers)


def test_a_recording_without_modules_has_no_layers(shared_file: Callable[[str], str]) -> None:
    for name in WITHOUT:
        assert Analysis(read_trace(shared_file(name))).layers is None


def test_the_same_times_come_out_of_the_json_by_hand(shared_file: Callable[[str], str]) -> None:
    """Kernel -> launch by correlation -> innermost module by time on its thread."""
    path = shared_file("h100_bert_small_inference.json.gz")
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    modules = [e for e in events if str(e.get("name", "")).startswith("nn.Module: ")]
    launches = {e["args"]["correlation"]: e for e in events if "cuda_" in e.get("cat", "")}
    expected: Counter[str] = Counter()
    for kernel in events:
        if kernel.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches[kernel["args"]["correlation"]]
        around = [
            e
            for e in modules
            if e["tid"] == launch["tid"] and e["ts"] <= launch["ts"] < e["ts"] + e["dur"]
        ]
        for e in around:
            expected[e["name"].removeprefix("nn.Module: ")] += round(kernel["dur"] * US)
    layers = Analysis(read_trace(path)).layers
    assert layers is not None
    measured = {name.split("/")[-1]: ns for name, ns in times(layers).items() if ns}
    assert measured == pytest.approx(dict(expected))


def test_a_trace_of_the_capture_names_the_modules_of_a_replay(
    shared_file: Callable[[str], str],
) -> None:
    from advisor.advise.engine import Options, analyze_in_full

    replay = shared_file("serving/vllm_decode_full/replay.json.gz")
    capture = shared_file("serving/vllm_decode_full/capture.json.gz")
    without_capture = Analysis(read_trace(replay)).layers
    named = analyze_in_full([replay], Options(capture=capture)).main.layers
    assert without_capture is not None and named is not None
    tops = [
        int(each.nodes.filter(pl.col("parent").is_null())["ns"].sum())
        for each in (without_capture, named)
    ]
    assert tops[0] < 0.05 * without_capture.total_ns and tops[1] > 0.9 * named.total_ns


# -- each source, by hand -------------------------------------------------------------------------


def two_blocks(b: TraceBuilder, frame: Callable[[int], str] = module) -> None:
    with b.python(module(0, "Model")):
        for number in range(2):
            with b.python(frame(number)), b.op("aten::mm"):
                b.launch("gemm", 100 + number)
        b.run("aten::add", "add", 7)
    b.run("aten::sum", "sum", 3)


def test_work_belongs_to_the_innermost_module_around_its_launch() -> None:
    b = TraceBuilder()
    for _ in range(3):
        with b.step():
            two_blocks(b)
            b.sync()
    layers = layers_of(b)
    assert times(layers) == {
        "Model_0": 3 * 208 * US, "Model_0/Block_0": 300 * US, "Model_0/Block_1": 303 * US,
    }  # fmt: skip
    report = report_layers(b.analysis())
    assert report is not None and report.outside_ns == 3 * US
    assert [(row.name, row.modules, row.calls, row.ns) for row in report.layers] == [
        ("Model_0", 1, 1, 208 * US), ("Block_0–1", 2, 2, 201 * US),
    ]  # fmt: skip
    assert report.layers[0].backward_ns is None and report.layers[0].flops is None


def test_backward_work_belongs_to_its_forward_module() -> None:
    b = TraceBuilder()
    with b.step():
        with b.python(module(0)), b.op("aten::mm", sequence=5):
            b.launch("gemm", 100)
        with (
            b.thread(2),
            b.op("autograd::engine::evaluate_function: MmBackward0", sequence=5),
            b.op("MmBackward0", sequence=5),
            b.op("aten::mm"),
        ):
            b.launch("gemm", 250)
        b.sync()
    layers = layers_of(b)
    assert times(layers) == {"Block_0": 350 * US}
    assert layers.nodes["backward"].to_list() == [250 * US]
    assert layers.nodes["calls"].to_list() == [1]


def test_module_called_in_two_places_is_one_layer() -> None:
    """Activation checkpointing calls a block again on the thread of the backward pass."""
    b = TraceBuilder()
    with b.step():
        with b.python(module(0, "Model")), b.python(module(0)):
            b.run("aten::mm", "gemm", 100)
        with b.thread(2), b.python(module(0)), b.python(module(0, "Linear")):
            b.run("aten::mm", "gemm", 60)
        b.sync()
    assert times(layers_of(b)) == {
        "Model_0": 160 * US, "Model_0/Block_0": 160 * US, "Model_0/Block_0/Linear_0": 60 * US,
    }  # fmt: skip


@pytest.mark.parametrize("mark", ["{}", "{{'Module': '{}', 'Inputs': [[8, 16]]}}"])
def test_ranges_named_after_modules_are_layers(mark: str) -> None:
    b = TraceBuilder()
    with b.step():
        for number in range(2):
            with b.range(mark.format(f"model.layers.{number}")):
                with b.range(mark.format(f"model.layers.{number}.self_attn")):
                    b.run("aten::mm", "gemm", 100)
                with b.range("my own words"):
                    b.run("aten::add", "add", 10)
        b.sync()
    assert times(layers_of(b)) == {
        "model": 220 * US,
        "model/layers.0": 110 * US, "model/layers.0/self_attn": 100 * US,
        "model/layers.1": 110 * US, "model/layers.1/self_attn": 100 * US,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["h100", "h2d", "forward", "step 3", "layers", "Optimizer.step#A"])
def test_other_ranges_are_not_layers(name: str) -> None:
    b = TraceBuilder()
    with b.step(), b.range(name):
        b.run("aten::mm", "gemm", 100)
    assert b.analysis().layers is None


def test_between_the_marks_of_fsdp_lies_a_module() -> None:
    b = TraceBuilder()
    with b.step():
        for number in range(2):
            with b.range(f"FSDP::pre_forward (blocks.{number}._checkpoint_wrapped_module)"):
                b.run("aten::copy_", "gather", 5)
            b.run("aten::mm", "gemm", 100)
            with b.range(f"FSDP::post_forward (blocks.{number}._checkpoint_wrapped_module)"):
                pass
            b.run("aten::add", "add", 3)
        b.sync()
    layers = layers_of(b)
    assert times(layers) == {"blocks.0": 105 * US, "blocks.1": 105 * US}
    assert layers.nodes["calls"].to_list() == [1, 1]


def test_frames_of_forward_are_modules_in_order_of_their_calls() -> None:
    call = "torch/nn/modules/module.py(1773): _call_impl"
    b = TraceBuilder()
    with b.step():
        with b.python(call), b.python("net/model.py(40): forward"):
            for us in (100, 50):
                with b.python(call), b.python("net/model.py(12): forward"):
                    b.run("aten::mm", "gemm", us)
        with b.python("net/loss.py(3): forward"):  # not called by a module
            b.run("aten::sum", "sum", 4)
        b.sync()
    assert times(layers_of(b)) == {
        "model.py:40": 150 * US,
        "model.py:40/model.py:12 #0": 100 * US,
        "model.py:40/model.py:12 #1": 50 * US,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("jit(step)/jit(main)/transpose(jvp(Model))/layer_0/dot_general", "Model layer_0"),
        ("jit(f)/while/body/remat(Block_3)/add", "Block_3"),
        ("gradient_tape/replica_6/bert/layer_18/query/einsum/Einsum:Einsum", "bert layer_18 query"),
        ("fusion.3", ""),
    ],
)
def test_the_name_of_an_operator_of_xla_holds_its_modules(name: str, path: str) -> None:
    assert " ".join(op_path(name)[:3]).startswith(path) and bool(op_path(name)) == bool(path)


def test_wrappers_are_no_layers_and_indices_join_their_names() -> None:
    path = "module._orig_mod.model.layers.11._checkpoint_wrapped_module.mlp"
    assert split_modules(path) == ("model", "layers.11", "mlp")


def test_cpu_layers_have_own_time_of_their_operators() -> None:
    b = TraceBuilder(None)
    with b.step(), b.python(module(0)), b.op("aten::linear", host_us=10), b.op("aten::addmm"):
        b.host(100)
    layers = layers_of(b)
    assert not layers.on_device
    table = b.analysis().trace.cpu.filter(pl.col("name").cast(pl.String) == "aten::linear")
    assert times(layers) == {"Block_0": table["dur"][0]}


def test_untrusted_depth_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.measure.host.module_sources.MAX_NODES", 50)
    b = TraceBuilder()
    with b.step():
        for number in range(100):
            with ExitStack() as stack:
                for depth in range(100 if number == 0 else 1):
                    stack.enter_context(b.python(module(1000 * number + depth)))
                b.run("aten::mm", "gemm", 10)
        b.sync()
    layers = layers_of(b)
    assert layers.nodes.height <= 50
    assert max(len(layers.path(node)) for node in range(layers.nodes.height)) <= MAX_MODULE_DEPTH
    assert layers.total_ns == 1000 * US


# -- equal layers ---------------------------------------------------------------------------------


@contextmanager
def blocks(b: TraceBuilder) -> Iterator[Callable[[int, float, float], None]]:
    """Add calls of a block with two modules inside."""

    def call(number: int, norm: float, linear: float) -> None:
        with b.python(module(number)):
            with b.python(module(number, "Norm")):
                b.run("aten::norm", "norm", norm)
            with b.python(module(number, "Linear")):
                b.run("aten::mm", "gemm", linear)

    with b.step():
        with b.python(module(0, "Model")):
            yield call
        b.sync()


def test_equal_modules_share_one_line() -> None:
    b = TraceBuilder()
    with blocks(b) as call:
        for number in range(5):
            call(number, 10, 100)
    groups = equal_layers(layers_of(b))
    assert [(g.label, g.depth, len(g.nodes)) for g in groups] == [
        ("Model_0", 0, 1), ("Block_0–4", 1, 5), ("Linear_0–4", 2, 5), ("Norm_0–4", 2, 5),
    ]  # fmt: skip
    assert not find_unequal_layers(layers_of(b), groups)


def test_slowest_equal_layer_is_named_with_its_cause() -> None:
    b = TraceBuilder()
    for _ in range(3):
        with blocks(b) as call:
            for number in range(6):
                call(number, 10, 190 if number == 3 else 100 + number)
    layers = layers_of(b)
    (outlier,) = find_unequal_layers(layers, equal_layers(layers))
    assert layers.nodes["name"][outlier.node] == "Block_3"
    assert (outlier.ns, outlier.median, outlier.slowest_part) == (200 * US, 112 * US, "Linear")


@pytest.mark.parametrize("linear", [[100, 110, 120, 130, 140], [50, 100, 200, 400, 900], [9, 30]])
def test_modules_that_differ_anyway_have_no_outlier(linear: list[float]) -> None:
    b = TraceBuilder()
    with blocks(b) as call:
        for number, us in enumerate(linear):
            call(number, 10, us)
    layers = layers_of(b)
    assert not find_unequal_layers(layers, equal_layers(layers))


def test_one_slow_step_makes_no_module_an_outlier() -> None:
    b = TraceBuilder()
    for step in range(3):
        with blocks(b) as call:
            for number in range(4):
                call(number, 10, 900 if (step, number) == (1, 2) else 100)
    layers = layers_of(b)
    assert not find_unequal_layers(layers, equal_layers(layers))


def test_modules_are_described_by_kind_and_equal_parents() -> None:
    b = TraceBuilder()
    with blocks(b) as call:
        for number in range(3):
            call(number, 10, 100)
    a = b.analysis()
    layers = a.layers
    assert layers is not None
    nodes = {name.split("/")[-1]: node for node, name in enumerate(times(layers))}

    def description(*names: str) -> str | None:
        return describe_nodes(a, [nodes[name] for name in names])

    assert description("Norm_0", "Norm_1", "Norm_2") == "3 Norm in Block_0–2"
    assert description("Norm_1") == "Norm_1 in Block_1"
    assert description("Block_0", "Block_1") == "Block_0–1 in Model_0"
    assert description("Norm_1", "Linear_1") is None and description("Model_0") == "Model_0"


def script_around_model(module_frames: bool) -> TraceBuilder:
    """A line of a script calls a model; ``module_frames``: whose own lines are recorded too."""
    b = TraceBuilder()
    for _ in range(2):
        with b.step(), b.python("run.py(40): main"):
            for number in range(3):
                with b.python(module(number)), ExitStack() as stack:
                    if module_frames:
                        stack.enter_context(b.python("model.py(7): forward"))
                    b.run("aten::mul", "mul", 50)
            b.sync()
    return b


@pytest.mark.parametrize(
    ("own_lines", "names"),
    [
        (False, ["3 Block in Model", "aten::mul"]),
        (True, ["model.py:7 in forward", "3 Block in Model", "aten::mul"]),
    ],
)
def test_location_names_modules_instead_of_an_outside_line(
    own_lines: bool, names: list[str]
) -> None:
    a = script_around_model(own_lines).analysis()
    hosts = a.trace.gpu["launch"].to_numpy().astype(np.int64)
    (place,) = costliest_places(a, hosts, np.ones(len(hosts), dtype=np.int64))
    expected = [name.replace("3 Block in Model", "Block_0–2") for name in names]
    assert location_names(place) == expected and place.count == 6
    assert place.file is not None and place.around_layer == (not own_lines)


def test_location_figures_belong_to_its_named_operator() -> None:
    """A line calls two operators: what the first costs is a quarter of all, the second a half."""
    b = TraceBuilder()
    with b.step(), b.python("run.py(40): main"):
        for name, us in (("aten::mul", 10), ("aten::add", 10), ("aten::add", 10)):
            b.run(name, name, us)
    with b.step(), b.python("run.py(50): other"):
        b.run("aten::exp", "exp", 10)
    a = b.analysis()
    hosts = a.trace.gpu["launch"].to_numpy().astype(np.int64)
    cost = np.array([30, 40, 10, 20], dtype=np.int64)[: len(hosts)]
    first, _ = costliest_places(a, hosts, cost, gap=np.zeros(len(hosts), dtype=np.int64))
    assert (first.op, first.count, first.share, first.dur_ns) == ("aten::add", 1, 0.5, 50)
    first, _ = costliest_places(a, hosts, cost, whole=1000.0)
    assert (first.count, first.share) == (2, 0.05)


def test_a_comparison_lists_the_layers_that_changed_most(tmp_path: Path) -> None:
    def report(norm: float) -> Report:
        b = TraceBuilder()
        for _ in range(3):
            with blocks(b) as call:
                for number in range(2):
                    call(number, norm, 100)
        return advisor.analyze(b.write(tmp_path / "trace.json"))

    amounts = layer_amounts(report(30), report(80))
    assert [(each.name, each.before, each.after) for each in amounts] == [
        ("Norm in Block", 60 * US, 160 * US), ("Linear in Block", 200 * US, 200 * US),
    ]  # fmt: skip


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_recorded_training_has_its_backward_in_its_modules(
    checkpoint: bool, tmp_path: Path
) -> None:
    """PyTorch's own profiler; a checkpointed block is called again in the backward pass."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint as again

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            make = torch.nn.Linear
            blocks = [torch.nn.Sequential(make(64, 64), torch.nn.GELU()) for _ in range(3)]
            self.layers = torch.nn.ModuleList(blocks)

        def forward(self, x: object) -> object:
            for layer in self.layers:
                x = again(layer, x, use_reentrant=False) if checkpoint else layer(x)
            return x

    model, x = Net(), torch.randn(256, 64)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
    )
    with profiler:
        for _ in range(2):
            model(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    a = Analysis(read_trace(str(tmp_path / "trace.json")))
    assert a.layers is not None and not a.layers.on_device
    groups = {group.label: a.layers.nodes[group.nodes] for group in equal_layers(a.layers)}
    assert groups["Net_0"]["calls"].to_list() == [2]
    blocks, linear = groups["Sequential_0–2"], groups["Linear_0–2"]
    assert linear["calls"].sum() == blocks["calls"].sum() == (12 if checkpoint else 6)
    assert 0 < linear["backward"].sum() < linear["ns"].sum()
    assert blocks["ns"].sum() <= groups["Net_0"]["ns"].sum() <= a.layers.total_ns


# -- memory ---------------------------------------------------------------------------------------


def shown_memory(a: Analysis) -> dict[str, tuple[float | None, float | None, int | None]]:
    """Name of a group -> bytes allocated, kept and at the peak of a call."""
    report = report_layers(a)
    assert report is not None
    return {
        layer.name: (layer.allocated_bytes, layer.kept_bytes, layer.peak_bytes)
        for layer in report.layers
    }


def test_call_keeps_unreleased_allocations() -> None:
    """Block: 100 out of Linear, which needs 60 more for a while; 30 are of neither."""
    b = TraceBuilder()
    for _ in range(2):
        with b.step():
            b.memory(30, 30, 1000)
            b.host(5)
            with b.python(module(0)):
                b.run("aten::mul", "k", 10)
                with b.python(module(0, "Linear")):
                    b.memory(60, 90, 1000)
                    b.memory(100, 190, 1000)
                    b.run("aten::mm", "k", 10)
                    b.memory(-60, 130, 1000)
                    b.host(5)
                b.host(5)
                b.memory(7, 137, 1000)
                b.memory(-7, 130, 1000)
                b.host(5)
            b.host(5)
            b.memory(-130, 0, 1000)
    a = b.analysis()
    assert shown_memory(a) == {"Block_0": (167, 100, 160), "Linear_0": (160, 100, 160)}


def test_unrecorded_memory_is_unknown_not_zero() -> None:
    b = TraceBuilder()
    with b.step(), b.python(module(0)):
        b.run("aten::mul", "k", 10)
    assert shown_memory(b.analysis()) == {"Block_0": (None, None, None)}
    b.host(5)
    b.memory(30, 30, 1000)  # recorded, but in no module
    assert shown_memory(b.analysis()) == {"Block_0": (None, None, None)}


WITH_MEMORY = ("h100_qwen_inference", "h100_bert_small_inference", "mi300_timesformer_inference")


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_the_same_memory_comes_out_of_the_json_by_hand(
    name: str, shared_file: Callable[[str], str]
) -> None:
    """Every call of a module against the instant events of its thread between its two ends."""
    path = shared_file(f"{name}.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    allocations = [each for each in events if each.get("name") == "[memory]"]
    allocations = [each for each in allocations if each["args"]["Device Type"] != 0]
    allocations.sort(key=lambda each: float(each["ts"]))
    kept: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for each in events:
        if not str(each.get("name", "")).startswith("nn.Module: "):
            continue
        kind = each["name"].removeprefix("nn.Module: ").rpartition("_")[0]
        ts, end = float(each["ts"]), float(each["ts"]) + float(each["dur"])
        own = [
            memory["args"]["Bytes"]
            for memory in allocations
            if memory["tid"] == each["tid"] and ts <= float(memory["ts"]) <= end
        ]
        kept[kind] += sum(own)
        allocated[kind] += sum(size for size in own if size > 0)
        peak[kind] = max(peak[kind], int(np.cumsum([0, *own]).max()))
    a = Analysis(read_trace(path))
    report = report_layers(a)
    assert report is not None and a.step_count == 1
    assert len(kept) > 5
    for row in report.kinds:
        assert row.kept_bytes == pytest.approx(kept[row.kind])
        assert row.peak_bytes == peak[row.kind]
    for kind in kept:
        own = [layer for layer in report.layers if layer.kind == kind]
        assert sum(layer.allocated_bytes or 0 for layer in own) == pytest.approx(allocated[kind])


@pytest.mark.parametrize("trained", [False, True])
def test_memory_by_layer_matches_tensors_of_a_recorded_program(
    trained: bool, tmp_path: Path
) -> None:
    """PyTorch's own profiler on a CPU: what each call keeps is counted from its tensors."""
    torch = pytest.importorskip("torch")

    class Mlp(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: object) -> object:
            return self.down(torch.relu(self.up(x)))

    model, x = torch.nn.Sequential(Mlp(), Mlp()), torch.randn(512, 64)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True, profile_memory=True
    )
    with profiler, torch.set_grad_enabled(trained):
        y = model(x)
        if trained:
            y.sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    wide, narrow = 4 * 512 * 256, 4 * 512 * 64
    memory = shown_memory(Analysis(read_trace(str(tmp_path / "trace.json"))))
    assert memory["Linear_0–3"] == (2 * (wide + narrow), 2 * (wide + narrow), wide)
    # without gradients the wide activations are released at the end of the call; with them the
    # output of relu is kept for the backward pass
    each = wide + narrow if trained else narrow
    assert memory["Mlp_0–1"][1] == 2 * each
    assert memory["Sequential_0"][1] == (2 * each if trained else narrow)
    assert memory["Mlp_0–1"][2] == 2 * wide
    assert memory["Sequential_0"][0] == 2 * (2 * wide + narrow)
