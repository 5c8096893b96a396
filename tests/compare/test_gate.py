"""``advisor gate``: baselines, exit codes, what it tells a workflow, and its action."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from advisor import cli
from advisor.core.run_directory import MANIFEST, RANK, STEPS, Manifest, RankInfo, StepRow
from advisor.testing import TraceBuilder

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "::error::<img src=x>\x1b[31m `|` @team\n## x"


def trace(path: Path, kernel_us: float, *, steps: int = 8, name: str = "gemm") -> Path:
    """Steps of one kernel; their lengths differ by some microseconds."""
    b = TraceBuilder()
    for number in range(steps):
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.host(3 * (number % 3))
            b.launch(name, kernel_us)
            b.sync()
    return b.write(path)


def run_directory(
    folder: Path, milliseconds: list[float], *, samples: int = 32, program: str = "train.py"
) -> Path:
    """A recorded run without a profiled window."""
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(
        msgspec.json.encode(Manifest(run_id="r", command=["python", program]))
    )
    (rank / RANK).write_bytes(msgspec.json.encode(RankInfo(rank=0)))
    at, lines = 0, []
    for n, ms in enumerate(milliseconds):
        step = StepRow(n=n, t=at, dur=int(ms * 1e6), samples=samples)
        lines.append(msgspec.json.encode(step))
        at += step.dur
    (rank / STEPS).write_bytes(b"\n".join(lines) + b"\n")
    return folder


@pytest.fixture
def advisor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """``advisor("gate", …)``: the command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("us", "bound", "code", "answer"),
    [
        (1000, "5%", 0, "passed"),
        (1100, "5%", 1, "regression"),
        (1100, "15%", 0, "passed"),
        (900, "0%", 0, "passed"),
    ],
)
def test_a_run_is_compared_with_the_saved_baseline(
    advisor: Run, tmp_path: Path, us: float, bound: str, code: int, answer: str
) -> None:
    old, new = trace(tmp_path / "old.json", 1000), trace(tmp_path / "new.json", us)
    saved, _, warning = advisor("gate", "--save", "base.json", old)
    assert saved == 0 and "save three runs or more" in warning
    old.unlink()  # the baseline is all that is needed
    exit_code, out, err = advisor(
        "gate", "base.json", new, "--max-slower", bound, "--format", "json"
    )
    comparison = json.loads(out)
    decision, steps = comparison["decision"], comparison["steps"]
    assert (exit_code, decision["answer"], decision["failed"], err) == (code, answer, code == 1, "")
    # by hand: a step is the kernel and some 20 µs of host
    assert steps["share"] == pytest.approx(us / 1000 - 1, abs=0.01)
    assert steps["share_low"] <= steps["share"] <= steps["share_high"]
    # by hand: as far above the bound as the interval reaches
    reach = steps["share"] - steps["share_low"]
    assert decision["detectable"] == pytest.approx(float(bound[:-1]) / 100 + reach)
    assert f"exit code {code}" in advisor("gate", "base.json", new, "--max-slower", bound)[1]


def test_strict_gate_refuses_noisy_steps(advisor: Run, tmp_path: Path) -> None:
    wild = [10, 14, 6, 20, 8, 12] * 10
    advisor("gate", "--save", "base.json", run_directory(tmp_path / "a", wild))
    run = run_directory(tmp_path / "b", [9.0, 18.0, 7.0, 15.0, 12.0] * 13)
    code, out, _ = advisor("gate", "base.json", run)
    assert code == 0 and out.startswith("Not shown to be slower: ")
    code, out, _ = advisor("gate", "base.json", run, "--strict")
    assert code == 1 and "--strict" in out and "exit code 1" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 64}, "save the baseline again"),
        ({"program": "other/eval.py"}, "the programs are train.py and eval.py"),
        (
            {"milliseconds": [10.0] * 5},
            "4 steps cannot tell slower from noise",
        ),  # the first is warm-up
    ],
)
def test_runs_that_cannot_be_compared_are_bad_input(
    advisor: Run, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    steps = [10.0 + n % 3 for n in range(60)]
    advisor("gate", "--save", "base.json", run_directory(tmp_path / "a", steps))
    other = run_directory(tmp_path / "b", **{"milliseconds": steps, **change})
    code, out, err = advisor("gate", "base.json", other)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("slices", "hooks", "only 14% of the time is in operators that both have"),
        ("training_mode", "leak", "one of the two trains, the other does not"),
    ],
)
def test_other_cpu_program_gets_no_verdict_and_fails_the_gate(
    advisor: Run, tmp_path: Path, name: str, other: str, message: str
) -> None:
    runs = [tmp_path / f"{each}.slow" for each in (name, other)]
    cured = tmp_path / f"{name}.cured"
    for run in (*runs, cured):
        shutil.copytree(ROOT / "tests/data/recorded" / run.name, run)
    code, out, _ = advisor("compare", *runs)
    assert code == 0 and out.startswith("These look like different programs, so neither is")
    code, out, err = advisor("gate", *runs)
    assert (code, out) == (2, "") and message in err
    assert not (runs[1] / "ledger.jsonl").exists()
    assert "different programs" not in advisor("compare", runs[0], cured)[1]  # of one file


def test_gate_refuses_a_gpu_trace_after_a_cpu_recording(
    advisor: Run, tmp_path: Path, shared_trace: Callable[[str], str]
) -> None:
    baseline = tmp_path / "base.json"
    on_cpu = ROOT / "tests/data/recorded/second_forward.slow"
    assert advisor("gate", "--save", baseline, on_cpu)[0] == 0
    code, out, err = advisor("gate", baseline, shared_trace("pairs/loader_profiler_workers0"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "these may be different programs" in err


def test_gate_refuses_the_same_program_on_a_gpu(advisor: Run, tmp_path: Path) -> None:
    baseline = tmp_path / "base.json"

    def write(path: Path, *, gpu: bool) -> Path:
        b = TraceBuilder()
        for _ in range(8):
            with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                if gpu:
                    b.launch("ampere_sgemm_128x64_nn", 900)
                b.host(1000)
        return b.write(path)

    assert advisor("gate", "--save", baseline, write(tmp_path / "cpu.json", gpu=False))[0] == 0
    code, _, err = advisor("gate", baseline, write(tmp_path / "gpu.json", gpu=True))
    assert code == 2 and "the baseline ran on the CPU and the run on a GPU" in err


def test_profiling_and_gpu_must_match_for_comparison(advisor: Run, tmp_path: Path) -> None:
    advisor("gate", "--save", "base.json", trace(tmp_path / "t.json", 1000))
    run = run_directory(tmp_path / "a", [1.0] * 60)
    code, _, err = advisor("gate", "base.json", run)
    assert code == 2 and "record both the same way" in err
    base = json.loads(Path("base.json").read_text())
    base["scope"]["device_name"] = "NVIDIA H100"
    Path("base.json").write_text(json.dumps(base))
    code, _, err = advisor("gate", "base.json", tmp_path / "t.json")
    assert code == 2 and "keep a baseline for each GPU" in err


def test_old_baseline_error_shows_how_to_save_it_again(advisor: Run, tmp_path: Path) -> None:
    Path("base.json").write_text('{"schema": "advisor.baseline/1", "source": "trace"}')
    code, _, err = advisor("gate", "base.json", trace(tmp_path / "t.json", 1000))
    assert code == 2 and "advisor gate --save base.json RUN" in err


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": "advisor.baseline/2", "source": "trace", "durations_ns": []}',
        '{"schema": "advisor.baseline/1", "source": "trace", "durations_ns": [1, "x"]}',
        '{"schema": "advisor.baseline/1", "source": "trace", "durations_ns": [-1], "numbers": [0]}',
        '{"schema": "advisor.baseline/1", "source": "trace", "durations_ns": [5, 5]}',
        '{"schema": "advisor.baseline/1", "source": "trace", "durations_ns": [], "numbers": []}',
        '{"schema": "advisor.baseline/1", ' + '"x": [' * 100_000,
        '{"schema": "advisor.report/1", "source": "trace", "durations_ns": []}',
        '{"schema": "advisor.report/1", ' + '"x": [' * 100_000,
    ],
)
def test_damaged_baseline_is_one_line_error(advisor: Run, tmp_path: Path, text: str) -> None:
    Path("base.json").write_text(text)
    code, out, err = advisor("gate", "base.json", trace(tmp_path / "t.json", 1000))
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_usage_is_reported_in_one_line(advisor: Run, tmp_path: Path) -> None:
    run = trace(tmp_path / "t.json", 1000)
    for words in (
        ("gate", run),
        ("gate", "--save", "b.json", run, run),
        ("gate", "--save", run, run),
        ("gate", run, run, "--max-slower", "fast"),
        ("gate", run, run, "--max-memory", "5%"),  # no allocator events in this trace
    ):
        code, _, err = advisor(*words)
        assert (code, err.count("\n")) == (2, 1), words


def test_workflow_annotations_and_summary_escape_input(
    advisor: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = TraceBuilder()
    for number in range(8):
        with b.step():
            b.loader_wait(10_000 + number % 3, workers=0)
            with b.op(HOSTILE):
                b.launch(HOSTILE, 900)
            with b.op("aten::mm"):
                b.launch("gemm", 900)
            b.sync()
    slow = b.write(tmp_path / "slow.json")
    advisor("gate", "--save", "base.json", trace(tmp_path / "fast.json", 900))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    Path("summary.md").write_text("before\n")
    code, out, err = advisor("gate", "base.json", slow, "--format", "json")
    assert code == 1 and json.loads(out)["decision"]["failed"]
    commands = err.splitlines()
    assert commands[0].startswith("::error title=advisor gate::Regression: ")
    assert any(line.startswith("::warning title=advisor%3A new finding::") for line in commands)
    assert all(line.startswith(("::error title=", "::warning title=")) for line in commands)
    assert "\x1b" not in err
    summary = Path("summary.md").read_text()
    assert summary.startswith("before\n### ❌ advisor gate: regression\n")
    assert "<img" not in summary and "\n## x" not in summary and "New findings:" in summary
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))  # a folder: it cannot be appended to
    assert advisor("gate", "base.json", slow, "--format", "json")[0] == 1


MARKED = [
    "linear_2080ti_launch_bound.json.gz",
    "mi300x_kernels_after_steps.json.gz",
    "pairs/loader_autograd_workers0.json.gz",
    "pairs/loader_profiler_workers4.json.gz",
    # compared with themselves in test_compare.py
    pytest.param("a100_train_6steps.json.gz", marks=pytest.mark.thorough),
    pytest.param("v100_train_copy_heavy.json.gz", marks=pytest.mark.thorough),
]
"""Public traces with five steps or more, of several versions of the profiler."""


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.usefixtures("no_shared_analysis")
def test_a_real_trace_does_not_differ_from_itself(
    advisor: Run, shared_file: Callable[[str], str], name: str
) -> None:
    path = shared_file(name)
    code, out, err = advisor("gate", path, path, "--format", "json", "--max-slower", "0%")
    assert code == 0, err
    comparison = json.loads(out)
    steps = comparison["steps"]
    assert steps["before"]["count"] >= 5
    assert (comparison["decision"]["answer"], steps["share"]) == ("passed", 0.0)
    assert steps["share_high"] - steps["share_low"] < 0.05
    assert comparison["decision"]["reasons"][0].startswith("no difference; up to 0.0%")


def test_unmarked_repetitions_fail_the_gate(
    advisor: Run, shared_file: Callable[[str], str]
) -> None:
    path = shared_file("nsys/mfu_2gpu_before.sqlite")
    code, _, err = advisor("gate", path, path, "--max-slower", "0%")
    assert code == 2
    assert "nothing marks the steps; put an NVTX range around each iteration" in err


@pytest.mark.parametrize(("before", "after"), [(8, 8), (6, 9), (60, 60), (50, 45)])
def test_a_comparison_of_the_same_runs_has_the_same_interval(
    advisor: Run, tmp_path: Path, before: int, after: int
) -> None:
    """Both use one method for steps that depend on each other, and pairs where the numbers
    match."""
    runs = [
        run_directory(tmp_path / name, [10 + slower + (n * n) % 7 / 10 for n in range(count + 20)])
        for name, count, slower in (("one", before, 0.0), ("two", after, 0.3))
    ]
    steps = json.loads(advisor("gate", *runs, "--format", "json")[1])["steps"]
    assert steps["paired"] is (before == after)
    assert steps == json.loads(advisor("compare", *runs, "--format", "json")[1])["steps"]


def test_few_steps_are_compared_without_dependence_estimate(advisor: Run, tmp_path: Path) -> None:
    few, more = (trace(tmp_path / f"{n}.json", 1000, steps=n) for n in (4, 5))
    for path, method in ((few, "Welch's t interval"), (more, "circular block bootstrap")):
        steps = json.loads(advisor("compare", path, more, "--format", "json")[1])["steps"]
        assert steps["method"].startswith(method)
        notes = [note for note in steps["notes"] if note.startswith("So few steps")]
        assert bool(notes) is (path == few)


def test_a_real_pair_differs_as_its_traces_do(
    advisor: Run, shared_file: Callable[[str], str]
) -> None:
    slow, fast = (
        shared_file(f"pairs/loader_autograd_workers{workers}.json.gz") for workers in (0, 4)
    )
    assert advisor("gate", fast, slow)[0] == 1
    assert advisor("gate", slow, fast, "--max-slower", "0%", "--strict")[0] == 0


# -- the action ---------------------------------------------------------------------------------


class Action:
    """The steps of ``action.yml``, run as Actions runs them."""

    def __init__(self, folder: Path) -> None:
        self.parsed = yaml.safe_load((ROOT / "action.yml").read_text())
        self.folder = folder

    def __call__(self, **given: str) -> tuple[int, str, dict[str, str]]:
        """(exit code, stderr, outputs) of the steps whose condition holds."""
        defaults = {name: str(i.get("default", "")) for name, i in self.parsed["inputs"].items()}
        inputs = defaults | {name.replace("_", "-"): value for name, value in given.items()}
        outputs = self.folder / "outputs"
        outputs.write_text("")
        messages = ""
        for step in self.parsed["runs"]["steps"]:
            condition = re.fullmatch(r"inputs\.([\w-]+) == '(.*)'", step.get("if", ""))
            if condition is not None and inputs[condition[1]] != condition[2]:
                continue
            assert "${{" not in step["run"], "inputs in a script are commands for who writes them"
            env = {name: self.substitute(text, inputs) for name, text in step["env"].items()}
            result = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "GITHUB_OUTPUT": str(outputs),
                    "GITHUB_ACTIONS": "true",
                    "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
                    **env,
                },
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            messages += result.stderr
            if result.returncode:
                break
        lines = [line.partition("=") for line in outputs.read_text().splitlines()]
        return result.returncode, messages, {name: value for name, _, value in lines}

    @staticmethod
    def substitute(text: str, inputs: dict[str, str]) -> str:
        match = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text)
        assert match is not None, text
        return inputs[match[1]]


def test_the_action_creates_a_baseline_passes_fails_and_refuses(tmp_path: Path) -> None:
    action = Action(tmp_path)
    fast = trace(tmp_path / "fast run.json", 1000)
    slow = trace(tmp_path / "$(touch owned).json", 1200)
    base = {"baseline": "base line.json", "install": "false"}
    code, err, outputs = action(run=fast.name, create="true", **base)
    assert (code, outputs) == (0, {"answer": "created"}), err
    code, err, outputs = action(run=fast.name, create="true", strict="true", **base)
    assert (code, outputs) == (0, {"answer": "passed"}), err
    code, err, outputs = action(run=slow.name, **base)
    assert (code, outputs) == (1, {"answer": "regression"}) and "::error title=" in err
    assert json.loads((tmp_path / "advisor-gate.json").read_text())["decision"]["failed"]
    code, err, outputs = action(run="absent.json", **base)
    assert (code, outputs) == (2, {}) and "no such file" in err
    assert not (tmp_path / "owned").exists()
    assert (tmp_path / "summary.md").read_text().count("### ") == 2
