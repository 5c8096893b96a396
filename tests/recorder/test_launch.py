"""``advisor record`` is the program: its arguments, streams, exit code and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_checks import only_rank

from advisor.core.run_directory import read_recording
from advisor.recorder import injection as reach

pytest.importorskip("torch")

pytestmark = pytest.mark.timed
RECORD = ("-m", "advisor", "record", "--no-report", "-o", "run")
Program = Callable[..., Any]

LOOP = """
import torch
torch.set_num_threads(1)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


MODULE = f"""
import sys
from .part import NAME
import sitecustomize
import advisor
{LOOP}
@advisor.profile
def train():
    for _ in range(4):
        step()
if __name__ == "__main__":
    train()
    train()
    print(NAME, sys.argv[1:])
    print(mine, sitecustomize.__file__)
    raise SystemExit(7)
"""


@pytest.fixture(scope="module")
def recorded_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A package's module run with arguments and a sitecustomize of the user's, decorated though it
    is recorded already, which ends with exit code 7: the folder, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 42")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "part.py").write_text("NAME = 'relative'")
    (folder / "pkg" / "train.py").write_text(MODULE)
    result = subprocess.run(
        [sys.executable, *RECORD, "-m", "pkg.train", "--lr", "1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(folder / "site"), "PYTHONWARNINGS": "ignore"},
    )
    yield folder, result


def test_the_exit_code_is_the_programs(recorded_package: tuple[Path, Any]) -> None:
    folder, process = recorded_package
    assert process.returncode == 7, process.stderr
    assert len(only_rank(folder / "run").steps) == 8


def test_module_runs_with_relative_imports(recorded_package: tuple[Path, Any]) -> None:
    _, process = recorded_package
    assert process.stdout.splitlines()[0] == "relative ['--lr', '1']"


def test_the_users_own_sitecustomize_still_runs(recorded_package: tuple[Path, Any]) -> None:
    folder, process = recorded_package
    assert process.stdout.splitlines()[1] == f"42 {folder / 'site' / 'sitecustomize.py'}"


def test_the_decorator_inside_is_left_out(recorded_package: tuple[Path, Any]) -> None:
    folder, process = recorded_package
    assert process.stderr.count("already recording") == 1
    assert len(only_rank(folder / "run").steps) == 8
    assert not (folder / "runs").exists()


def test_an_uncaught_exception_is_the_programs(program: Program, tmp_path: Path) -> None:
    result = program(LOOP + "step()\nstep()\nraise LookupError('mine')", before=RECORD)
    assert result.returncode == 1
    assert "LookupError: mine" in result.stderr
    record = only_rank(tmp_path / "run")
    assert record.events_of("end") == [
        {"steps": 2, "reason": "exception", "exception": "LookupError", "message": "mine"}
    ]


def test_streams_are_the_programs(program: Program, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.stdin.read()[::-1])\nprint('err', file=sys.stderr)")
    result = subprocess.run(
        [sys.executable, *RECORD, str(script)],
        input="abc",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout == "cba\n"
    first, *lines = result.stderr.splitlines()
    assert first == "err"
    assert lines[0].startswith("advisor: nothing was recorded: ")
    assert all(line.startswith("         ") and len(line) <= 80 for line in lines[1:])
    assert not (tmp_path / "run").exists()


QUIET = f"""
import os, signal, sys, time, warnings
warnings.simplefilter("always")
print("first", file=sys.stderr, flush=True)
{LOOP}
for n in range(160):
    step()
    if n % 40 == 30:
        print(n, file=sys.stderr, flush=True)
        os.write(2, b"raw\\n")
        if os.environ.get("ADVISOR_SIGNAL"):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.3)  # the window before is written meanwhile
print(sorted(k for k in os.environ if "KINETO" in k), flush=True)
"""


def test_program_output_has_no_recorder_messages(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several windows: the program's own lines in their order, then our last ones."""
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)  # of other tests in this process
    plain = program(QUIET)
    result = program(QUIET, before=(*RECORD, "--signal", "SIGUSR2"))
    assert result.returncode == 0
    assert result.stdout == plain.stdout == "[]\n"
    first_message = result.stderr.index("advisor: ")
    assert result.stderr[:first_message] == plain.stderr
    assert result.stderr[first_message:].splitlines() == [
        "advisor: recorded in run",
        "         More: advisor analyze run",
    ]
    windows = only_rank(tmp_path / "run").events_of("window")
    assert sum(window["state"] == "done" for window in windows) >= 3


WAYS = {
    "python -I": ("-- PYTHON -I train.py", "this program cannot be recorded: python -I skips"),
    "a shebang with -S": ("-- ./script", "python -S skips the start-up file"),
    "an emptied environment": ("-- env -i PYTHON train.py", "an emptied environment"),
    "no torch": ("-- PYTHON -c pass", "imported torch (1 ran)"),
    "no Python": ("-- true", "no Python process of the program read the start-up file"),
    "no loop": ("infer.py", "only 2 forwards (no backward, no optimizer step)"),
}


def test_the_reason_why_a_program_was_not_recorded_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    (tmp_path / "infer.py").write_text(
        "import torch\nnet = torch.nn.Linear(4, 4)\nwith torch.no_grad():\n"
        "    for _ in range(2): net(torch.ones(2, 4))\n"
    )
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable} -S\nprint('ran')")
    script.chmod(0o755)
    for way, (words, message) in WAYS.items():
        command = [sys.executable if word == "PYTHON" else word for word in words.split()]
        result = subprocess.run(
            [sys.executable, *RECORD, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert message in " ".join(result.stderr.split()), way
        assert all(len(line) <= 80 for line in result.stderr.splitlines()), way
        if "train" in words or "script" in words:
            assert result.stdout == "ran\n", way
        assert not (tmp_path / "run").exists(), way


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("python3 -I train.py", "-I"),
        ("/usr/bin/python3.12 -uES train.py", "-E"),
        ("python -W ignore -S train.py", "-S"),
        ("python -Wignore -X dev -Im pkg", "-I"),
        ("python train.py -I", ""),
        ("python -m pkg -I", ""),
        ("python -c pass -S", ""),
        ("python -u -- train.py", ""),
        ("torchrun -I train.py", ""),
        ("python -mSE", ""),
        ("python -WI train.py", ""),
    ],
)
def test_options_that_keep_a_python_from_being_recorded(words: str, option: str) -> None:
    explanation = reach.explain_unreachable(words.split())
    assert (f"python {option} skips" in explanation) == bool(option)
    assert bool(explanation) == bool(option)


PROCESSES = f"""
import sys
def train(*_):
{"".join(f"    {line}" + chr(10) for line in LOOP.strip().splitlines())}
    for _ in range(12): step()
if __name__ == "__main__":
    import multiprocessing
    import subprocess
    for method in ("spawn", "forkserver", "fork"):
        child = multiprocessing.get_context(method).Process(target=train)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "import train; train.train()"], check=True)
"""


@pytest.mark.slow
def test_processes_of_a_program_are_recorded_however_they_start(
    program: Program, tmp_path: Path
) -> None:
    """The program itself imports no torch; each of its processes makes a run of its own."""
    result = program(PROCESSES, before=RECORD)
    assert result.returncode == 0, result.stderr
    runs = sorted(path for path in tmp_path.glob("run*") if path.is_dir())
    assert [path.name for path in runs] == ["run", "run_2", "run_3", "run_4"]
    assert [len(only_rank(run).steps) for run in runs] == [12] * 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        LOOP + "import os, time\nwhile True:\n    step(); time.sleep(0.01)\n"
        "    print(os.getpid(), flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, *RECORD, str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    time.sleep(2.5)
    if number == signal.SIGTERM:
        os.kill(process.pid, number)  # a scheduler's: to the first process only
    elif number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal's: to all
    else:
        os.kill(child, number)  # the kernel's, out of memory
    process.stdout.read()
    assert process.wait(60) == -number
    process.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    (record,) = read_recording(tmp_path / "run").ranks.values()
    assert len(record.steps) > 10
    assert record.has_ended == (number == signal.SIGINT)


def test_processes_that_do_not_train_leave_nothing(program: Program, tmp_path: Path) -> None:
    """Loader workers, forked and spawned, and helpers."""
    result = program(
        "import subprocess, sys\n"
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def main():\n"
        f"    exec({LOOP!r}, globals())\n"  # not when a spawned worker imports this
        "    data = TensorDataset(torch.ones(8, 4))\n"
        "    for method, workers in (('fork', 2), ('spawn', 1)):\n"
        "        for _ in DataLoader(data, 2, num_workers=workers,\n"
        "                            multiprocessing_context=method):\n"
        "            step()\n"
        "    subprocess.run([sys.executable, '-c', 'import torch; torch.nn.Linear(1, 1)'])\n"
        "if __name__ == '__main__':\n    main()\n",
        before=RECORD,
    )
    assert result.returncode == 0, result.stderr
    assert len(only_rank(tmp_path / "run").steps) == 8
    assert not list(tmp_path.glob("run_*"))


def test_switched_off_the_program_just_runs(program: Program, tmp_path: Path) -> None:
    result = program(
        LOOP + "step()\nimport sys\nprint('advisor' in sys.modules)\nraise SystemExit(3)",
        before=RECORD,
        env={"ADVISOR": "0"},
    )
    assert (result.returncode, result.stdout, result.stderr) == (3, "False\n", "")
    assert not (tmp_path / "run").exists()


def test_a_script_without_a_suffix_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or an archive with a ``__main__``, and a script that is no command."""
    import zipapp

    from advisor.core.errors import AdvisorError
    from advisor.recorder.launch import command_line

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my_folder"
    folder.mkdir()
    for text in ("config.yaml", "my_folder"):
        (tmp_path / "config.yaml").write_text("lr: 0.1\n", "utf-8")
        with pytest.raises(AdvisorError, match="neither a script"):
            command_line([text])
    (folder / "__main__.py").write_text("print('here')\n", "utf-8")
    zipapp.create_archive(folder, tmp_path / "app.pyz")
    (tmp_path / "my_script").write_text("#!/usr/bin/env python\nprint('here')\n", "utf-8")
    for text in ("my_folder", "app.pyz", "my_script"):
        words = command_line([text, "--lr", "1"])
        assert words == [sys.executable, text, "--lr", "1"]
        assert subprocess.check_output(words, text=True) == "here\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("nowhere.py",), "nowhere.py: no such file"),
        (("no-such-command", "x"), "neither a script"),
        ((), "no PROGRAM is given: advisor record train.py, or for a server"),
    ],
)
def test_missing_program_is_reported_without_traceback(
    program: Program, words: tuple[str, ...], complaint: str
) -> None:
    result = program("", before=(*RECORD, *words), after=("--",) if not words else ())
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_window_can_be_requested_from_outside(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        LOOP + "import time\nwhile True:\n    step(); time.sleep(0.01); print(flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, *RECORD, "--skip", "99999", "--active", "2", str(script)],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        trace = tmp_path / "run" / "rank0" / "trace_w0.json.gz"
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "manifest.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.5)
        subprocess.run(
            [sys.executable, "-m", "advisor", "window", str(tmp_path / "run")],
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
        while not trace.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
def test_a_second_pass_under_scalene(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("scalene")
    import json

    result = program(
        LOOP + "import time\ndef work():\n    return sum(i * i for i in range(60_000))\n"
        "for _ in range(300):\n    work(); step()\nprint('end')",
        before=(*RECORD, "--scalene", "--scalene-steps", "120"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("end") == 1  # the second pass stopped before
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 300
    profile = json.loads((tmp_path / "run" / "rank0" / "scalene.json").read_text())
    (lines,) = [f["lines"] for name, f in profile["files"].items() if name.endswith("train.py")]
    hot = sorted(lines, key=lambda line: -line["n_cpu_percent_python"])
    # the first optimizer.step() imports torch's compiler, which may take longer than all the work
    assert any("range(60_000)" in line["line"] for line in hot[:2])
    assert hot[0]["n_cpu_percent_python"] > 0


def test_program_failing_before_training_gets_no_step_advice(program: Any, tmp_path: Path) -> None:
    before = ("-m", "advisor", "record", "--no-report", "-o", "run")
    result = program("import torch\nnet = torch.nn.Linear(2, 2)\nnet(1)\n", before=before)
    assert result.returncode == 1
    message = " ".join(result.stderr.split())
    assert "ended with exit code 1 before a training step was seen" in message
    assert "advisor.step()" not in message


@pytest.mark.parametrize(
    ("text", "code"),
    [("import no_such_module", 1), ("x = = 1", 1), ("raise SystemExit(3)", 3)],
)
@pytest.mark.parametrize("out", [(), ("-o", "deep/er/run"), ("-o", "mine")])
def test_a_program_that_fails_at_once_leaves_no_folder(
    tmp_path: Path, text: str, code: int, out: tuple[str, ...]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "train.py").write_text(text)
    words = [sys.executable, "-m", "advisor", "record", *out, "train.py"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert f"the program ended with exit code {code}" in " ".join(result.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "train.py"]


def test_unstartable_program_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"\0not a program")
    (tmp_path / "broken").chmod(0o755)
    words = [sys.executable, "-m", "advisor", "record", "./broken"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "./broken: cannot be started" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_paths_are_quoted_for_a_shell(tmp_path: Path, capfd: Any) -> None:
    from advisor.recorder.folder import print_result

    print_result(tmp_path / "my runs" / "a", analyse=False)
    assert "'" + str(tmp_path / "my runs" / "a") + "'" in "".join(
        capfd.readouterr().err.replace("\n         ", " ")
    )


def test_the_step_time_at_the_end_is_that_of_the_report() -> None:
    """Both lead with the mean, 26.1 ms, where it differs from the median, 22.9 ms, by 10%."""
    from advisor.recorder.folder import summarize_findings

    run = Path(__file__).parents[1] / "data/recorded/anomaly.slow"
    sentences = summarize_findings(run)
    assert sentences is not None and sentences[0].endswith(" steps, 26.1 ms each (mean)")


def test_window_request_for_an_ended_run_is_refused(tmp_path: Path) -> None:
    from advisor.cli import run as cli

    run = tmp_path / "run"
    (run / "rank0").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    assert cli(["window", str(run)]) == 0
    (run / "rank0" / "events.jsonl").write_text('{"t":1,"kind":"end","data":{"steps":3}}\n')
    assert cli(["window", str(run)]) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--deep"], "--deep after"),
        (["train.py", "--skip=5", "--active", "3"], "--skip and --active after"),
        (["train.py", "--out", "runs/a"], "--out after"),
        (["train.py", "--epochs", "1"], ""),
        (["train.py", "--warmup", "1"], ""),
        (["train.py", "--signal", "1"], ""),
    ],
)
def test_options_behind_the_program_are_pointed_out(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    from advisor.cli.record import OPTIONS
    from advisor.recorder.launch import warn_misplaced

    (tmp_path / "train.py").write_text(
        "parser.add_argument('--warmup', '--epochs')\ndef main(signal, layout): ...\n"
    )
    words[0] = str(tmp_path / "train.py")
    assert bool(warn_misplaced(["python", *words], OPTIONS)) == bool(expected)
    assert warn_misplaced(words, OPTIONS).startswith(expected)
    assert bool(warn_misplaced(words, OPTIONS)) == bool(expected)


def test_report_names_the_option_for_source_lines() -> None:
    from advisor.advise.program_wording import how_to_record
    from advisor.core.trace import TraceMeta

    meta = TraceMeta(path="trace.json")
    assert how_to_record("with_stack=True", meta) == "with_stack=True"
    assert how_to_record("with_stack=True", meta, recorder=True) == "advisor record --deep"
    assert how_to_record("record_shapes=True", meta, recorder=True) == "record_shapes=True"
