"""``advisor project``: figures by hand, 80 columns, JSON, prices, and clear errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.replay.project.splits import find_epoch
from advisor.testing import TraceBuilder

Run = Callable[..., Any]
SGEMM = "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32"
MIB = 1 << 20


def write_trace(path: Path, gpu: str | None = "A100") -> Path:
    """Steps of a product of 20 ms on an A100, and 30 GiB of memory."""
    b = TraceBuilder(gpu)
    for _ in range(5):
        with b.step():
            b.memory(MIB, 30_000 * MIB, 31_000 * MIB)
            with b.op("aten::mm", [[16384, 16384], [16384, 8192]], "c10::BFloat16"):
                b.launch(SGEMM, 20_000, blocks=4096)
            b.sync()
    return b.write(path)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("project") / "trace.json")


def words(text: str) -> str:
    """Join the lines of a text."""
    return " ".join(text.split())


def test_json_has_the_step_its_range_and_its_basis(advisor: Run, trace: Path) -> None:
    result = advisor("project", trace, "--gpu", "h100 sxm5", "--format", "json")
    assert result.code == 0, result.err
    output = json.loads(result.out)
    assert output["source"] == "NVIDIA A100 SXM4 80GB" and output["replayed"] is True
    (gpu,) = output["gpus"]
    # 271.2 and 794.5 TFLOP/s of bf16 were measured on the two
    assert gpu["step_ns"] == pytest.approx(20e6 * 271.2 / 794.5, rel=0.01)
    assert gpu["low_ns"] < gpu["step_ns"] < gpu["high_ns"]
    assert gpu["memory"]["verdict"] == "fits" and gpu["memory"]["allocated"] == 30_000 * MIB
    assert [part["kind"] for part in gpu["parts"]] == ["compute"]
    assert gpu["price_per_hour"] is None and gpu["cost_per_million_steps"] is None
    assert output["rests_on"]["crossings"] >= 30


def test_cheapest_capable_gpu_comes_first_with_prices(
    advisor: Run, trace: Path, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[prices]\n"h100 sxm5" = 3.0\nmi300x = 2.0\nl4 = 0.01\n')
    result = advisor("project", trace, "--all", "--prices", prices, "--format", "json")
    rows = json.loads(result.out)["gpus"]
    # by hand: 6.83 ms at 3.0 and 8.11 ms at 2.0 an hour; 30 GiB do not fit into 24
    assert [r["gpu"] for r in rows] == [
        "AMD Instinct MI300X",
        "NVIDIA H100 SXM5 80GB",
        "NVIDIA L4",
    ]
    assert rows[0]["cost_per_million_steps"] == pytest.approx(2 * 8.115e-3 / 3600 * 1e6, rel=0.01)
    assert rows[1]["cost_per_million_steps"] == pytest.approx(3 * 6.827e-3 / 3600 * 1e6, rel=0.01)
    assert rows[2]["memory"]["verdict"] == "too small"
    out = words(advisor("project", trace, "--all", "--prices", prices).out)
    assert "Cheapest: AMD Instinct MI300X; within the ranges it could be NVIDIA H100" in out
    assert "NVIDIA L4: too little memory" in out


@pytest.mark.parametrize(
    "arguments",
    [("--gpu", "h200"), ("--gpu", "mi300x", "--gpu", "t4", "--same-host"), ("--all",)],
)
def test_the_text_fits_into_80_columns(
    advisor: Run, trace: Path, arguments: tuple[str, ...]
) -> None:
    result = advisor("project", trace, *arguments)
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "measured 20 ms per step · NVIDIA A100 SXM4 80GB" in result.out


def test_short_gpu_name_shows_its_match(advisor: Run, trace: Path) -> None:
    out = words(advisor("project", trace, "--gpu", "h200").out)
    assert "h200 is taken for NVIDIA H200 SXM; it could be NVIDIA H200 NVL." in out


def test_gpus_of_equal_time_share_one_row_and_reason(
    advisor: Run, shared_trace: Callable[[str], str]
) -> None:
    output = advisor("project", shared_trace("linear_2080ti_launch_bound"), "--all").out
    assert re.search(r"\n  \d\d models, as NVIDIA V100 SXM2… +23.9 ms  12.3 to 46.3 ms", output)
    assert len(output.splitlines()) < 25 and output.count("the host limits the step") == 1
    assert words(output).startswith("The step on each of ")


def test_pyproject_price_table_may_name_its_currency(
    advisor: Run, trace: Path, tmp_path: Path
) -> None:
    """The command runs in ``tmp_path``. Both H200 have the words, and nothing else does."""
    text = '[tool.advisor.prices]\ncurrency = "EUR"\nh200 = 3\n'
    (tmp_path / "pyproject.toml").write_text(text)
    out = advisor("project", trace, "--all").out
    assert "EUR a million" in out and "NVIDIA H200 NVL" in out and "NVIDIA L4" not in out
    document = json.loads(advisor("project", trace, "--all", "--format", "json").out)
    assert document["currency"] == "EUR"
    assert {g["gpu"] for g in document["gpus"]} == {"NVIDIA H200 SXM", "NVIDIA H200 NVL"}


def test_gpu_option_names_the_gpu_of_a_recording(advisor: Run, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "bare.json", None)
    refused = advisor("project", path, "--gpu", "h100 sxm5")
    assert refused.code == 2 and "--recorded-gpu NAME says what it was" in refused.err
    options = ("--recorded-gpu", "a100 sxm4 80gb", "--gpu", "h100 sxm5", "--format", "json")
    (gpu,) = json.loads(advisor("project", path, *options).out)["gpus"]
    assert gpu["speedup"] == pytest.approx(794.5 / 271.2, rel=0.01)


def test_given_gpu_applies_to_several_gpus(advisor: Run, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "bare.json", None)
    prices = tmp_path / "prices.toml"
    prices.write_text('[prices]\n"a100 sxm4 80gb" = 2.0\n')
    options = ("--gpus", "1", "--prices", prices, "--format", "json")
    (bare,) = json.loads(advisor("project", path, *options).out)["splits"]
    named = advisor("project", path, *options, "--recorded-gpu", "a100 sxm4 80gb")
    assert bare["cost"] is None and json.loads(named.out)["splits"][0]["cost"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no GPU is given: add --gpu NAME, --all or --gpus N"),
        (("--gpu", "voodoo"), "no GPU 'voodoo' is known"),
        (("--gpu", "h2000"), "did you mean NVIDIA H200 SXM, "),
        (("--gpu", "mi30"), "did you mean AMD Instinct MI300X, "),
        (
            ("--gpu", "l4", "--recorded-gpu", "h100 sxm5"),
            "recorded on NVIDIA A100 SXM4 80GB, not on",
        ),
        (("--gpus", "2", "--recorded-gpu", "voodoo"), "no GPU 'voodoo' is known"),
        (
            ("--gpus", "2", "--recorded-gpu", "h100 sxm5"),
            "recorded on NVIDIA A100 SXM4 80GB, not on",
        ),
        (("--all", "--prices", "nowhere.toml"), "nowhere.toml: cannot be read"),
        (("--gpu", "l4", "--rank", "7"), "7"),
    ],
)
def test_an_impossible_projection_is_one_line_error(
    advisor: Run, trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = advisor("project", trace, *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_the_projection_of_a_run_of_several_ranks_names_the_rank(
    advisor: Run, tmp_path: Path
) -> None:
    for rank in (0, 1):
        b = TraceBuilder(rank=rank, world_size=2)
        for _ in range(4):
            with b.step():
                b.launch("softmax_warp_forward", 1_000)
                b.sync()
        b.write(tmp_path / f"rank{rank}.json")
    out = words(advisor("project", tmp_path, "--gpu", "mi300x").out)
    assert "the step is that of rank 0" in out.lower()
    options = ("--gpu", "mi300x", "--rank", "1", "--format", "json")
    result = advisor("project", tmp_path, *options)
    assert result.code == 0, result.err
    assert (json.loads(result.out)["rank"], json.loads(result.out)["median"]) == (1, None)


def test_job_projection_shows_its_slowest_and_median_rank(advisor: Run, tmp_path: Path) -> None:
    """Ranks of 1, 3 and 2 ms: rank 1 sets the pace, and rank 2 is the one in the middle."""
    for rank, us in enumerate((1_000, 3_000, 2_000)):
        b = TraceBuilder(rank=rank, world_size=3)
        for _ in range(4):
            with b.step():
                b.launch("softmax_warp_forward", us)
                b.sync()
        b.write(tmp_path / f"rank{rank}.json")
    out = words(advisor("project", tmp_path, "--gpu", "mi300x").out).lower()
    assert "rank 1 has the most work of 3 ranks, 3 ms per step" in out
    assert "rank 2, has 2 ms" in out and "the step of rank 2:" in out
    document = json.loads(advisor("project", tmp_path, "--gpu", "mi300x", "--format", "json").out)
    (gpu,), (other,) = document["gpus"], document["median"]["gpus"]
    assert (document["rank"], document["median"]["rank"]) == (1, 2)
    assert gpu["step_ns"] == pytest.approx(1.5 * other["step_ns"], rel=0.05)


def test_an_epoch_costs_its_steps(advisor: Run, trace: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[prices]\n"h100 sxm5" = 3.0\n')
    arguments = ("project", trace, "--all", "--prices", prices, "--epoch-steps", "5000")
    document = json.loads(advisor(*arguments, "--format", "json").out)
    (gpu,) = document["gpus"]
    assert document["epoch_steps"] == 5000
    assert gpu["cost_per_epoch"] == pytest.approx(gpu["cost_per_million_steps"] * 5000 / 1e6)
    out = words(advisor(*arguments).out)
    assert "USD an epoch" in out and "An epoch has 5,000 recorded steps" in out
    unpaid = advisor("project", trace, "--all", "--epoch-steps", "5000")
    assert "An epoch has" not in words(unpaid.out)
    refused = advisor("project", trace, "--gpu", "h200", "--epoch-samples", "10")
    assert refused.code == 2 and "samples per step were not recorded" in refused.err


def test_the_length_of_the_recorded_loader_is_an_epoch() -> None:
    """An epoch has 1,000 batches of 32, two of them per step: 500 steps of 64 samples."""
    b = TraceBuilder()
    record = b.record_of_run()
    record.event("loader", id=1, length=1000, batch_size=32)
    record.steps(10, 5.0, fields={"samples": 32, "micro": 2})
    with b.step():
        b.launch("k", 10)
    a = b.analysis()
    assert find_epoch(a, None, None) == 500
    assert find_epoch(a, 7, None) == 7
    assert find_epoch(a, None, 6400) == 100
    record.event("loader", id=2, length=10)
    assert find_epoch(b.analysis(), None, None) is None


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_a_projection_is_written_as_a_page_too(
    advisor: Run, trace: Path, tmp_path: Path, suffix: str
) -> None:
    page = tmp_path / f"there{suffix}"
    assert advisor("project", trace, "--gpu", "h200", "--output", page)[:2] == (0, "")
    assert "NVIDIA H200 SXM" in page.read_text(encoding="utf-8")
