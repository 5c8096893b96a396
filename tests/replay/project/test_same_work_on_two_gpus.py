"""Bands rest on the same work measured on two GPUs."""

from __future__ import annotations

import json
import math
import tarfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import bench_project
import polars as pl
import pytest
from bench_project import WorkOnTwoGpus, measurements

from advisor.core.gpus import find_gpu
from advisor.measure import Analysis
from advisor.read import open_run
from advisor.replay.ledger import COVERAGE, device_error, host_error, shipped_predictions


def test_a_pair_by_hand() -> None:
    """Softmax, 16,384 rows of 4,096: 0.805 ms on a V100 whose memory attains 750 GB/s. A T4's
    attains 220: 1.8 µs and (805 - 1.8) x 750 / 220 µs are 2,740; 2,202 were measured. Backwards
    the same ratio is missed."""
    pair = next(c for c in measurements().crossings if c.what == "softmax of 16384 x 4096")
    assert pair.projected_ns == pytest.approx(1_800 + 803_200 * 750 / 220, rel=1e-6)
    assert pair.error == pytest.approx(math.log(2_740 / 2_202.49), abs=0.002)


def test_four_of_five_errors_are_within_other_errors_of_the_kind() -> None:
    for kind in ("compute", "memory"):
        known = [c for c in measurements().crossings if c.kind == kind]
        inside = [c.error <= max(o.error for o in known if o is not c) for c in known]
        assert sum(inside) >= COVERAGE * len(inside)


def test_the_worse_of_two_pairs_of_gpus_counts() -> None:
    """T4 to A100 alone would give a range that V100 to T4 leaves."""
    worst: dict[tuple[str, str], float] = {}
    for pair in measurements().crossings:
        if pair.kind == "memory":
            gpus = (pair.source, pair.target)
            worst[gpus] = max(worst.get(gpus, 0.0), pair.error)
    assert len(worst) == 2
    assert device_error("memory", other_vendor=False) == max(worst.values())


def test_another_vendor_and_unknown_kinds_are_never_surer() -> None:
    worst = max(c.error for c in measurements().crossings)
    for kind in ("compute", "memory", "mixture", "unknown", "copy", "link"):
        assert (
            0.1
            < device_error(kind, other_vendor=False)
            < device_error(kind, other_vendor=True)
            < 1.5
        )
    for kind in ("mixture", "unknown", "copy", "link"):
        assert device_error(kind, other_vendor=False) == worst
    assert 0.1 < host_error() < 1.0


def test_every_gpu_of_the_pairs_is_known_and_every_figure_sane() -> None:
    for pair in measurements().crossings:
        assert find_gpu(pair.source).gpu.name == pair.source
        assert find_gpu(pair.target).gpu.name == pair.target
        assert pair.moved > 0 and pair.source_ns > 0 and pair.target_ns > 0
        assert pair.reference.startswith("https://")


def test_table_matches_current_projections() -> None:
    """A change of a GPU's rates or of the projection must be written into the table."""
    table = {
        (p.program, p.device, p.target): p for p in shipped_predictions() if p.source == "gpus"
    }
    rows = bench_project.predictions()
    assert len(rows) == len(table)
    for row in rows:
        known = table[row.program, row.device, row.target]
        assert (known.kind, known.predicted, known.measured) == (
            row.kind,
            pytest.approx(row.predicted, rel=1e-9),
            row.measured,
        )


def test_documented_table_matches_the_measurements() -> None:
    page = Path(bench_project.__file__).parents[1] / "docs" / "project.md"
    assert bench_project.table() in page.read_text(encoding="utf-8")


Key = tuple[int, int, int, int]


def test_layers_match_published_engine_profiles(
    shared_file: Callable[[str], str],
) -> None:
    """Convolutions of the same shape in both GPUs' profiles, their medians."""
    wanted = {c for c in measurements().crossings if "TensorRT" in c.reference}
    path = shared_file("tensorrt/resnet50_engine_profiles_A100_RTX3090.tar.gz")
    with tarfile.open(path) as archive:

        def read(name: str) -> Any:
            member = archive.extractfile(name)
            assert member is not None
            return json.load(member)

        result = {}
        for engine, precision in (("fp32", "fp32"), ("fp16", "fp16"), ("int8qat", "int8")):
            sides = []
            for gpu in ("A100", "RTX3090"):
                stem = f"resnet_{gpu}_{engine}"
                times = {
                    r["name"]: r["averageMs"] for r in read(f"{stem}.profile.json") if "name" in r
                }
                by_shape: dict[Key, list[float]] = defaultdict(list)
                for layer in read(f"{stem}.graph.json")["Layers"]:
                    if layer["LayerType"] == "CaskConvolution" and len(layer["Inputs"]) == 1:
                        into = layer["Inputs"][0]["Dimensions"]
                        out = layer["Outputs"][0]["Dimensions"]
                        key = (layer["Kernel"][0], into[1], out[1], out[2])
                        if layer["Stride"][0] == into[2] // out[2]:
                            by_shape[key].append(times[layer["Name"]])
                sides.append(by_shape)
            for key in sides[0].keys() & sides[1].keys():
                result[precision, key] = [median(side[key]) * 1e6 for side in sides]
    assert len(wanted) == 14
    for pair in wanted:
        key, precision = _pair_key(pair), "fp32" if pair.dtype == "tf32" else pair.dtype
        a100, rtx = result[precision, key]
        assert pair.source_ns == pytest.approx(a100, rel=0.03)
        assert pair.target_ns == pytest.approx(rtx, rel=0.03)
        kernel, channels, out, size = key
        assert pair.flops == 2 * 32 * size**2 * kernel**2 * channels * out


def _pair_key(pair: WorkOnTwoGpus) -> Key:
    """Key of a pair, read from ``convolution 3x3, 64 to 64 channels, 56x56, batch 32``."""
    words = pair.what.replace(",", "").split()
    return int(words[1].split("x")[0]), int(words[2]), int(words[4]), int(words[6].split("x")[0])


@pytest.mark.parametrize(
    "name", ["h100_qwen_inference", "mi300_timesformer_inference", "mi300_torch_compile"]
)
def test_efficiencies_and_host_times_match_public_traces(
    shared_trace: Callable[[str], str], name: str
) -> None:
    """The efficiency of a family with one bound is the time that the roofline allows over the
    time taken, of the format with the most time; the host time is the median of ``aten::addmm``."""
    run = open_run(shared_trace(name), window="first")
    a = Analysis(run.window(run.ranks[0]))
    judged = a.rooflines.filter(pl.col("efficiency").is_not_null())
    result = (
        judged.group_by("family", "bound", "dtype")
        .agg(
            pl.col("dur").sum(),
            share=(pl.col("efficiency") * pl.col("dur")).sum() / pl.col("dur").sum(),
        )
        .sort("dur", descending=True)
        .unique(["family", "bound"], keep="first", maintain_order=True)
    )
    shares = {(f, b): s for f, b, s in result.select("family", "bound", "share").iter_rows()}
    efficiencies = [e for e in measurements().efficiencies if e.trace == name]
    assert len(efficiencies) >= 4
    for row in efficiencies:
        assert row.share == pytest.approx(shares[row.family, row.bound], rel=0.02)
    for host in measurements().hosts:
        if host.trace == name:
            calls = a.trace.cpu.filter(pl.col("name").cast(pl.String) == host.op)
            assert host.ns == pytest.approx(float(calls["dur"].median()), rel=0.01)  # type: ignore[arg-type]
