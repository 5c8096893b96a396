"""``--steps`` means the same to every command that measures steps."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.testing import TraceBuilder

Run = Callable[..., tuple[int, str, str]]
STEPS, KERNEL = 6, 900


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six iterations, each marked as a step; the even ones have a range of 1 ms inside."""
    b = TraceBuilder()
    for number in range(STEPS):
        with b.step():
            with b.range("evaluate" if number % 2 == 0 else "other"):
                with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                    b.launch("ampere_sgemm_128x64_nn", KERNEL)
                b.sync()
            b.host(3_000)
    return b.write(tmp_path / "run.json")


WHATIF = ("whatif", "--format", "json")


def test_whatif_replays_the_named_ranges(advisor: Run, trace: Path) -> None:
    every = json.loads(advisor(*WHATIF, trace, "scale work 1")[1])
    some = json.loads(advisor(*WHATIF, trace, "scale work 1", "--steps", "^evaluate$")[1])
    assert (every["replay"]["of_steps"], some["replay"]["of_steps"]) == (STEPS, STEPS // 2)
    assert some["measured_step_ns"] < 0.5 * every["measured_step_ns"]  # not the 3 ms after it
    first = json.loads(advisor(*WHATIF, trace, "scale work 1", "--steps", "1:4")[1])
    assert first["replay"]["of_steps"] == 3


def test_one_or_two_steps_are_too_few_to_replay(advisor: Run, trace: Path) -> None:
    """Work of a step runs into the next, so three steps are replayed or more. Both commands say
    that the gain is not that of the selection."""
    sentence = "ains are those of 6 steps in a row, because 2 are too few to replay"
    replayed = advisor("whatif", trace, "remove sync", "--steps", "0:2")[1]
    analyzed = advisor("analyze", trace, "--steps", "0:2")[1]
    whole = advisor("whatif", trace, "remove sync", "--steps", "0:3")[1]
    assert [sentence in " ".join(out.split()) for out in (replayed, analyzed, whole)] == [
        True, True, False,
    ]  # fmt: skip
    result = json.loads(advisor(*WHATIF, trace, "remove sync", "--steps", "0:2")[1])
    assert (result["replay"]["steps"], result["replay"]["of_steps"]) == (6, 2)


def test_project_takes_them(advisor: Run, trace: Path) -> None:
    line = (
        "project",
        trace,
        "--gpu",
        "h100",
        "--recorded-gpu",
        "a100 sxm4 80gb",
        "--format",
        "json",
    )
    every = json.loads(advisor(*line)[1])["measured_step_ns"]
    assert json.loads(advisor(*line, "--steps", "^evaluate$")[1])["measured_step_ns"] < 0.5 * every


def test_export_draws_them(advisor: Run, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert advisor("export", trace, "--perfetto", out, "--steps", "^evaluate$")[0] == 0
    drawn = [e for e in json.loads(out.read_text())["traceEvents"]
             if e.get("cat") == "advisor" and e["name"] == "evaluate"]  # fmt: skip
    assert len(drawn) == STEPS // 2


def test_gate_keeps_and_holds_them(advisor: Run, trace: Path, tmp_path: Path) -> None:
    kept = tmp_path / "baseline.json"
    code, _, err = advisor("gate", "--save", kept, trace, "--steps", "^(evaluate|other)$")
    assert code == 0 and f"{STEPS} profiled steps of 1 run" in err
    assert advisor("gate", kept, trace, "--steps", "^(evaluate|other)$")[0] == 0


@pytest.mark.parametrize("command", ["compare", "whatif", "project", "export", "gate", "report"])
@pytest.mark.parametrize("steps", ["nothing like it", "(", "7:3", "40:50"])
def test_missing_steps_are_one_line_error(
    advisor: Run, trace: Path, tmp_path: Path, command: str, steps: str
) -> None:
    more: dict[str, list[object]] = {
        "compare": [trace],
        "gate": [trace],
        "export": ["--perfetto", tmp_path / "out.json"],
        "project": ["--gpu", "h100", "--recorded-gpu", "a100 sxm4 80gb"],
    }
    code, _, err = advisor(command, trace, *more.get(command, []), "--steps", steps)
    assert code == 2
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_saved_report_rejects_other_steps(advisor: Run, trace: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    advisor("analyze", trace, "-o", saved)
    code, _, err = advisor("compare", saved, trace, "--steps", "^evaluate$")
    assert code == 2 and "saved report" in err


def test_nsight_systems_recordings_are_compared_by_a_range(
    advisor: Run, shared_file: Callable[[str], str]
) -> None:
    """FSDP's own range before each block of the model: as many as the files hold on the thread
    that has the first of them, and as long."""
    line = ["compare", *(shared_file(f"nsys/mfu_2gpu_{which}.sqlite") for which in
                         ("before", "after"))]  # fmt: skip
    code, out, _ = advisor(*line, "--steps", r"^FSDP::pre_forward", "--format", "json")
    assert code == 0
    comparison = json.loads(out)
    for which, path in zip(("before", "after"), line[1:], strict=True):
        rank = json.loads(out)[which]
        assert rank["step_source"] == "ranges"
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            ranges = db.execute(
                "SELECT globalTid, end - start FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
                "WHERE coalesce(text, value) LIKE 'FSDP::pre_forward%' AND end > start"
            ).fetchall()
        counts = {tid: sum(one == tid for one, _ in ranges) for tid, _ in ranges}
        assert comparison["steps"][which]["count"] <= max(counts.values())
        assert (
            comparison["steps"][which]["count"] >= min(counts.values()) - 3
        )  # outliers are set aside
    assert comparison["steps"]["verdict"] == "slower"
