"""Every command of the README and of the first pages runs as written, and prints what is shown."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor import cli
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import run_rules
from advisor.measure import Analysis

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
SERVERS = ("dashboard", "mcp")
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 8))
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def documented_commands(page: str) -> dict[str, list[str]]:
    """The commands of a page with what it shows of their output; ``...`` leaves lines out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    result: dict[str, list[str]] = {}
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        output: list[str] = []
        for line in block.splitlines():
            if line.startswith("$ "):
                output = result.setdefault(line[2:].split("   # ")[0].rstrip(), [])
            elif line.strip() not in ("", "..."):
                output.append(line)
    return {command: output for command, output in result.items() if command.startswith("advisor")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copy(CORPUS / "pairs" / "loader_profiler_workers0.json.gz", folder / "trace.json.gz")
    shutil.copy(CORPUS / "pairs" / "loader_profiler_workers4.json.gz", folder / "after.json.gz")
    (folder / "train.py").write_text(SCRIPT)
    for path in (CORPUS / "pairs").glob("loader_profiler_workers*.gz"):  # after the README's cd
        shutil.copy(path, folder)
    for name in ("main1", "main2", "main3"):
        shutil.copytree(CORPUS.parent / "data" / "own_script" / name, folder / "runs" / name)
    for name in ("pairs", "dlrm_8ranks", "ncu", "serving", "memory"):
        (folder / name).symlink_to(CORPUS / name)
    (folder / "tests").symlink_to(CORPUS.parent)
    for name in ("second_forward.slow", "second_forward.cured"):  # copies: a comparison keeps notes
        shutil.copytree(CORPUS.parent / "data" / "recorded" / name, folder / name)
    return folder


def environment() -> dict[str, str]:
    bin_folder = Path(sys.executable).parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "80"}


PAGES = ("README.md", "docs/index.md", "docs/tutorials.md", "docs/reading-a-report.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_written(
    page: str, place: Path, run_in_process: Callable[[list[str]], tuple[int, str, str]]
) -> None:
    pytest.importorskip("torch")
    result = documented_commands(page)
    assert result
    before = {
        line for earlier in PAGES[: PAGES.index(page)] for line in documented_commands(earlier)
    }
    for command, expected_lines in result.items():
        expected_lines = [re.sub(r" +[①-⑨]$", "", line) for line in expected_lines]
        if command in before and not expected_lines:
            continue
        words = shlex.split(command)
        if words[1] in SERVERS:
            assert_serves(words, place)
            continue
        if page == PAGES[-1]:  # a process each is shown by the pages before
            code, out, err = run_in_process(words[1:])
        else:
            completed = subprocess.run(
                words, cwd=place, env=environment(), capture_output=True, text=True, check=False,
                timeout=280, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            code, out, err = completed.returncode, completed.stdout, completed.stderr
        assert code == 0, f"{command}\n{out[-500:]}\n{err[-2000:]}"
        assert [line for line in expected_lines if line not in out.splitlines()] == [], (
            f"{command}\n{out}"
        )


OTHERS = [
    page.name for page in sorted((ROOT / "docs").glob("*.md")) if f"docs/{page.name}" not in PAGES
]


def test_pages_show_current_command_output(
    place: Path, run_in_process: Callable[[list[str]], tuple[int, str, str]]
) -> None:
    """Their other commands need a server, a cluster or a file that nobody has."""
    seen = set()
    for page in OTHERS:
        for command, expected_lines in documented_commands(f"docs/{page}").items():
            words = shlex.split(command)
            files = [word for word in words if word.endswith((".gz", ".sqlite", ".pickle"))]
            own = "trace.json.gz" in files and page != "comparing.md"  # the reader's
            if not expected_lines or not files or own:
                continue
            if not all((place / name).exists() for name in files):
                continue
            code, out, err = run_in_process(words[1:])
            assert code == 0, f"{command}\n{err[-2000:]}"
            assert [line for line in expected_lines if line not in out.splitlines()] == [], (
                f"{page}\n{out}"
            )
            seen.add(page)
    assert {"whatif.md", "inference-servers.md", "comparing.md", "project.md"} <= seen


def test_the_python_of_pages_on_files_at_hand_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for page in ("comparing.md",):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        names: dict[str, object] = {}
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(code, page, "exec"), names)
        assert names, page


def test_the_page_on_an_own_script_shows_its_recordings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_in_process: Callable[[list[str]], tuple[int, str, str]],
) -> None:
    """Check that the kept recordings show what the page says, and that its script is recorded."""
    pytest.importorskip("torch")
    recordings = CORPUS.parent / "data" / "own_script"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recordings, "runs")
    page = (ROOT / "docs" / "own-script.md").read_text(encoding="utf-8")
    Path("train.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    recorded = 0
    for command, lines in documented_commands("docs/own-script.md").items():
        words = shlex.split(command)
        if words[1] == "record":
            recorded += 1
            assert (recordings / words[words.index("--out") + 1].removeprefix("runs/")).is_dir()
            continue
        code, out, err = run_in_process(words[1:])
        wanted = [int(line.split()[-1]) for line in lines if line.startswith("exit code ")]
        assert [code] == (wanted or [0]), err
        assert [line for line in lines if line not in out.splitlines()] == [], out
        if command == "advisor gate baseline.json runs/change":
            again = documented_commands("docs/ci.md")[command]
            assert again and [line for line in again if line not in lines] == []
    assert recorded == 4
    shutil.rmtree("runs/first")
    completed = subprocess.run(
        shlex.split("advisor record --active 0 --out runs/first train.py"), env=environment(),
        capture_output=True, text=True, check=True, timeout=280,
    )  # fmt: skip
    assert completed.stdout == "epoch 0: 9.7%\nepoch 1: 9.7%\nepoch 2: 9.7%\n"
    assert "advisor: recorded in runs/first\n         192 steps, " in completed.stderr


@pytest.fixture
def run_in_process(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[int, str, str]]:
    """``run_in_process(words)``: exit code and streams of a command line run in this process."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")

    def run(words: list[str]) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run(words)
        return (code, *capsys.readouterr())

    return run


def test_the_rule_of_the_page_on_extending_works_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 40
    (tmp_path / "progress_bar.py").write_text(code)
    rule = next(each for each in load_rules(tmp_path, {}) if each.id == "progress-bar")
    slow, (quick, _) = (rule.examples()[name] for name in ("slow", "quick"))
    result = run_rules(0, slow.analysis(), [rule]).findings
    # by hand: 300 µs of each step are the bar's
    assert [(each.rule, each.impact.gain_ns) for each in result] == [("progress-bar", 300_000)]
    assert run_rules(0, quick.analysis(), [rule]).findings == []
    assert rule.verify and len(type(rule).__doc__ or "") > 80  # as a rule of the package needs
    one = run_rules(0, Analysis(slow.trace(), (0, 1)), [rule]).findings
    # 300 of the 1,310 µs or so of one step, not the bars of all steps over it
    assert [each.evidence[0].value for each in one] == [pytest.approx(0.23, abs=0.01)]


def assert_serves(words: list[str], place: Path) -> None:
    """A server starts, and ends when it is interrupted or its input ends."""
    started = subprocess.Popen(
        words, cwd=place, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert started.stdin is not None and started.stdout is not None
    try:
        if words[1] == "dashboard":
            assert any("http://127.0.0.1" in line for line in iter(started.stdout.readline, ""))
            started.send_signal(signal.SIGINT)
        started.stdin.close()
        assert started.wait(30) in (0, 130, -signal.SIGINT)
    finally:
        started.kill()
        started.stdout.close()
