"""The table of measured and predicted gains says what the recordings say, misses included."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from advisor.sample_workloads import Workload, catalogue

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "h200"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_gpu", ROOT / "benchmarks/record_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def advice_of(
    *findings: tuple[str, int | None, float], risks: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Build advice about a recording from (rule, rank, share) of each finding."""
    return {
        "findings": [
            {
                "rule": rule,
                "priority": rank,
                "folded_under": None if rank else "other",
                "share": share,
                "low": share / 2,
                "high": share * 2,
            }
            for rule, rank, share in findings
        ],
        "risks": list(risks),
        "notes": [],
    }


def make_entry(slow: dict[str, Any], cured: dict[str, Any], times: tuple[float, float]) -> Any:
    blocks = [[t * 0.9, t, t * 1.1] for t in times]
    return {
        "slow": {"median_ms": times[0], "block_ms": blocks[0], "advice": slow},
        "cured": {"median_ms": times[1], "block_ms": blocks[1], "advice": cured},
    }


def test_cure_halving_the_step_is_measured_as_half(script: ModuleType) -> None:
    one = make_entry(advice_of(("launch-bound", 1, 0.4)), advice_of(), (10.0, 5.0))
    result = script.compared(Workload(finds=("launch-bound",)), one)
    assert result == {
        "measured": 0.5,
        "predicted": 0.4,
        "low": 0.2,
        "high": 0.8,
        "place": "1",
        "gone": True,
        "left": [],
    }


def test_gains_compare_equal_work_of_unequal_steps(script: ModuleType) -> None:
    one = make_entry(advice_of(), advice_of(), (8.0, 16.0))
    result = script.compared(Workload(finds=("small-grids",), samples=(8, 128)), one)
    assert result["measured"] == pytest.approx(1 - (16 / 128) / (8 / 8))


def test_remaining_finding_is_a_miss_and_absent_one_not_cured(
    script: ModuleType,
) -> None:
    both = advice_of(("implicit-sync", 2, 0.1), ("launch-bound", 1, 0.2))
    stays = script.compared(Workload(finds=("implicit-sync",)), make_entry(both, both, (2.0, 2.0)))
    assert (stays["place"], stays["gone"], stays["left"]) == (
        "2",
        False,
        ["implicit-sync", "launch-bound"],
    )
    never = script.compared(
        Workload(finds=("ping-pong",)), make_entry(both, advice_of(), (2.0, 1.0))
    )
    assert never["place"] is None
    assert "gone" not in never


def test_folded_findings_and_risks_are_distinguished_from_ranks(script: ModuleType) -> None:
    assert script.place(("memory-leak",), advice_of(risks=("other", "memory-leak"))) == "risk 2"
    assert script.place(("poor-overlap",), advice_of(("poor-overlap", None, 0.1))) == "under other"
    assert script.place(("x",), advice_of(("y", 1, 0.5))) is None


def test_page_names_misses_failures_and_omissions(script: ModuleType) -> None:
    miss = make_entry(advice_of(), advice_of(), (3.0, 2.0))
    loud = make_entry(advice_of(("launch-bound", 1, 0.5)), advice_of(), (1.0, 1.0))
    cut = {"steps": 3, "stacks": False, "memory": True, "left_out": ["400 kB with all"]}
    miss["slow"]["recorded"] = cut
    results = {
        "environment": {"gpu": "A GPU", "torch": "2"},
        "workloads": {
            "per_step_sync": miss,
            "healthy_cnn": loud,
            "leak": {"slow": {"error": "ended after 150 s"}, "cured": {}},
        },
    }
    for name, each in results["workloads"].items():  # type: ignore[attr-defined]
        each["compared"] = script.compared(catalogue()[name], each)
    page = script.page(results, 300)
    assert "| per_step_sync | 3 ± 0.3 | 2 ± 0.2 | 33% | – | – | **none** | – | – |" in page
    assert "**not silent**" in page
    assert "leak, slow: ended after 150 s" in page
    assert "per_step_sync, slow: 400 kB with all; recorded with 3 steps, without stacks" in page
    assert "at first or second place: 0 of 1" in page
    assert "controls without a finding: 0 of 1" in page


def test_every_rung_of_the_ladder_records_less(script: ModuleType) -> None:
    for workload in catalogue().values():
        rungs = script.ladder(workload)
        assert rungs[0] == {"steps": workload.steps, "stacks": workload.stacks, "memory": True}
        size = [(r["steps"], r["stacks"], r["memory"]) for r in rungs]
        assert len(set(size)) == len(size)
        assert size[-1][1:] == (False, False)


@pytest.mark.slow
def test_record_command_resumes_after_an_interruption(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    arguments = ["--device", "cpu", "--only", "leak", "--seconds", "0.2"]
    arguments += ["--output", str(tmp_path)]
    assert script.main(arguments) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    for variant in ("slow", "cured"):
        one = results["workloads"]["leak"][variant]
        assert one["median_ms"] > 0
        assert len(one["block_ms"]) >= 3
        (trace,) = (tmp_path / "leak" / variant).rglob("*.json.gz")
        assert trace.stat().st_size <= 300_000
    assert "| leak |" in (tmp_path / "README.md").read_text()
    capsys.readouterr()

    assert script.main(arguments) == 0
    assert "leak, slow" not in capsys.readouterr().out  # there already


def test_script_without_gpu_is_one_line_error(script: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert script.main(["--output", str(tmp_path / "x")]) == 2


# -- the recordings of this repository ----------------------------------------------------------


@pytest.fixture(scope="module")
def recorded_results() -> dict[str, Any]:
    if not (RECORDED / "results.json").exists():
        pytest.skip("no recordings of a GPU yet: make record-h200 on a machine with one")
    document: dict[str, Any] = json.loads((RECORDED / "results.json").read_text())
    return document


def test_recorded_traces_are_small(recorded_results: dict[str, Any]) -> None:
    assert recorded_results["workloads"]
    assert all(file.stat().st_size <= 300_000 for file in RECORDED.rglob("*.json.gz"))


def test_advice_on_recordings_matches_the_table(
    recorded_results: dict[str, Any], script: ModuleType
) -> None:
    changed = {}
    for name, one in recorded_results["workloads"].items():
        for variant in ("slow", "cured"):
            folder = RECORDED / name / variant
            if not folder.is_dir() or "advice" not in one.get(variant, {}):
                continue
            rules = {f["rule"] for f in one[variant]["advice"]["findings"] if f["priority"] == 1}
            now = {f["rule"] for f in script.advice(folder)["findings"] if f["priority"] == 1}
            if rules != now:
                changed[f"{name}, {variant}"] = (rules, now)
    assert changed == {}, "python benchmarks/record_gpu.py --output tests/data/h200 --table"


def test_the_recorded_controls_have_no_finding(recorded_results: dict[str, Any]) -> None:
    for name, workload in catalogue().items():
        claims = recorded_results["workloads"].get(name, {}).get("compared", {})
        if not workload.finds and "silent" in claims:
            assert claims["silent"], name
