"""Layer times of NVIDIA's public engines of ResNet-50, and what a change of precision brought."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import advisor
from advisor import cli
from advisor.core.errors import AdvisorError
from advisor.read import read_trace
from advisor.render.formats import REPORTS

ARCHIVE = next((Path(__file__).parents[1] / "corpus" / "tensorrt").glob("*.tar.gz"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def layers(engines: Path, name: str) -> list[dict[str, Any]]:
    written = json.loads((engines / f"{name}.profile.json").read_bytes())
    return [layer for layer in written if layer.get("averageMs")]


def convolutions(engines: Path, name: str) -> float:
    kinds = {
        layer["Name"]: layer["LayerType"]
        for layer in json.loads((engines / f"{name}.graph.json").read_bytes())["Layers"]
    }
    engine_layers = layers(engines, name)
    return sum(
        each["averageMs"] for each in engine_layers if "Convolution" in kinds.get(each["name"], "")
    )


@pytest.mark.parametrize(
    ("name", "published"),
    [("A100_fp32", 2.12), ("A100_fp16", 1.02), ("A100_int8qat_residual", 0.73)],
)
def test_layers_have_the_times_of_the_file(engines: Path, name: str, published: float) -> None:
    trace = read_trace(str(engines / f"resnet_{name}.profile.json"))
    engine_layers = layers(engines, f"resnet_{name}")
    kernels = trace.gpu.filter(trace.gpu["kind"] == "kernel")
    assert kernels.height == len(engine_layers)
    assert kernels["dur"].sum() / 1e6 == pytest.approx(
        sum(each["averageMs"] for each in engine_layers)
    )
    report = advisor.analyze(engines / f"resnet_{name}.profile.json")
    assert report.step_ns / 1e6 == pytest.approx(published, abs=0.01)
    assert report.scope.device_name == "NVIDIA A100 80GB PCIe"


def test_fp16_gain_matches_the_fp16_engine(engines: Path) -> None:
    report = advisor.analyze(engines / "resnet_A100_fp32.profile.json")
    (finding,) = report.findings
    assert finding.rule == "tensorrt-fp32-layers" and finding.impact is not None
    saved = sum(each["averageMs"] for each in layers(engines, "resnet_A100_fp32"))
    saved -= sum(each["averageMs"] for each in layers(engines, "resnet_A100_fp16"))
    assert (finding.impact.gain_ns or 0) / 1e6 == pytest.approx(saved, rel=0.05)


def test_the_rates_of_the_rules_are_measured_on_these_engines(engines: Path) -> None:
    for gpu, expected in (("A100", 0.43), ("RTX3090", 0.34)):
        before, after = (convolutions(engines, f"resnet_{gpu}_{each}") for each in ("fp32", "fp16"))
        assert after / before == pytest.approx(expected, abs=0.005)
    unexplained = []
    for name in ("resnet_A100_int8qat", "resnet_A100_int8qat_residual"):
        report = advisor.analyze(engines / f"{name}.profile.json")
        (finding,) = [each for each in report.findings if each.rule == "tensorrt-reformat"]
        unexplained.append(next(e.value for e in finding.evidence if e.label == "reformat layers"))
    assert float(unexplained[1]) / float(unexplained[0]) == pytest.approx(0.42, abs=0.005)  # type: ignore[arg-type]


def test_engines_are_compared_by_kind_of_layer(engines: Path) -> None:
    from advisor.compare.compare import compare

    before, after = (
        advisor.analyze(engines / f"resnet_A100_{each}.profile.json") for each in ("fp32", "fp16")
    )
    amounts = compare(before, after).amounts
    (row,) = [each for each in amounts if each.name.endswith("convolution")]
    assert (row.before, row.after) == (pytest.approx(1_975_296), pytest.approx(857_088))


def test_layer_times_are_required_and_layer_information_optional(
    engines: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    file.write_bytes((engines / "resnet_A100_int8qat.profile.json").read_bytes())
    names = read_trace(str(file)).gpu["name"].cast(pl.String).to_list()
    assert any(name.startswith("Reformat Reformatting CopyNode") for name in names)
    with pytest.raises(AdvisorError, match="exportProfile"):
        read_trace(str(engines / "resnet_A100_fp16.graph.json"))


@pytest.mark.parametrize(
    "text",
    ['[{"count": 1}, {"averageMs": "x"}]', '[{"count": 1}, {"name": 1, "averageMs": -1}, 5]',
     '[{"count": 1}, {"name": "a", "averageMs": 1'],
)  # fmt: skip
def test_damaged_times_are_refused_in_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(AdvisorError):
        read_trace(str(path))


def test_hints_are_for_an_engine(engines: Path) -> None:
    """trtexec runs it: no PyTorch profiler, no training script, no kernels named like layers."""
    report = advisor.analyze(engines / "resnet_A100_int8qat.profile.json")
    text = " ".join(REPORTS.render("terminal", report, details=True, width=200).split())
    for word in (
        "activities=",
        "python PROGRAM.py",
        "ncu -k",
        "profiler.step()",
        "advisor record.",
    ):
        assert word not in text, word
    assert "trtexec --loadEngine=model.plan" in text
    assert "Record with nsys profile --trace=cuda,nvtx,osrt trtexec" in text


CORPUS = Path(__file__).parents[1] / "corpus"


@pytest.mark.parametrize(
    "name",
    [
        "rocprof/matmul_result.rpd",
        "nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite",
        "nsys/mfu_2gpu_after.sqlite.gz",
        "xla/tf_gpu_multi_worker.xplane.pb.gz",
    ],
)
def test_hints_are_by_the_format_of_the_file(name: str) -> None:
    report = advisor.analyze(CORPUS / name)
    text = " ".join(REPORTS.render("terminal", report, details=True, width=200).split())
    for word in ("activities=[", "python PROGRAM.py", "profiler.step()", "with PyTorch's profiler"):
        assert word not in text, word
    if name.endswith(".rpd"):
        assert "Put a ROCTX range around each iteration" in text


def test_layer_profile_has_no_idle_time_steps_or_host(engines: Path) -> None:
    """The file holds names and mean times of layers; no starts, no launches."""
    for name in ("A100_fp32", "A100_int8qat"):
        path = engines / f"resnet_{name}.profile.json"
        trace = read_trace(str(path))
        assert trace.cpu.is_empty()
        report = advisor.analyze(path)
        assert report.scope.step_source == "layer times" and report.per == "inference"
        total = sum(each["averageMs"] for each in layers(engines, f"resnet_{name}"))
        assert report.scope.span_ns / 1e6 == pytest.approx(total, rel=1e-4)
        assert report.busy_share is None and not report.idle and not report.host
        assert report.replay is None
        text = " ".join(REPORTS.render("terminal", report, details=True, width=200).split())
        for words in (
            "ProfilerStep",
            "GPU busy 1",
            "╳ launch delay",
            "waiting in a sync",
            "explains",
        ):
            assert words not in text, words
        assert report.verdict.startswith("The layers of one inference take ")
        assert any("idle time, launches and the host are not measured" in x for x in report.limits)


def test_an_edit_of_layers_changes_their_sum(
    engines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = engines / "resnet_A100_fp32.profile.json"
    assert cli.run(["whatif", str(path), "-e", "scale family:convolution 0.5"]) == 0
    halved = convolutions(engines, "resnet_A100_fp32") / 2 * 1000
    text = capsys.readouterr().out
    assert f"{halved:.0f} µs" in text
    assert "starts of GPU work" not in text and "error" not in text
