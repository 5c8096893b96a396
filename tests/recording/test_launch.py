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

from advisor.rundir import read_recording

pytest.importorskip("torch")
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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A package's module run with arguments and a sitecustomize of the user's, decorated though it
    is recorded already, which ends with exit code 7: the folder, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 42")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "part.py").write_text("NAME = 'relative'")
    (folder / "pkg" / "train.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, *RECORD, "-m", "pkg.train", "--lr", "1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(folder / "site"), "PYTHONWARNINGS": "ignore"},
    )
    yield folder, done


def test_the_exit_code_is_the_programs(trained: tuple[Path, Any]) -> None:
    folder, done = trained
    assert done.returncode == 7, done.stderr
    assert len(only_rank(folder / "run").steps) == 8


def test_a_module_is_run_as_one(trained: tuple[Path, Any]) -> None:
    _, done = trained
    assert done.stdout.splitlines()[0] == "relative ['--lr', '1']"


def test_the_users_own_sitecustomize_still_runs(trained: tuple[Path, Any]) -> None:
    folder, done = trained
    assert done.stdout.splitlines()[1] == f"42 {folder / 'site' / 'sitecustomize.py'}"


def test_the_decorator_inside_is_left_out(trained: tuple[Path, Any]) -> None:
    folder, done = trained
    assert done.stderr.count("already recording") == 1
    assert len(only_rank(folder / "run").steps) == 8
    assert not (folder / "runs").exists()


def test_an_uncaught_exception_is_the_programs(program: Program, tmp_path: Path) -> None:
    done = program(LOOP + "step()\nstep()\nraise LookupError('mine')", before=RECORD)
    assert done.returncode == 1
    assert "LookupError: mine" in done.stderr
    record = only_rank(tmp_path / "run")
    assert record.of_kind("end") == [
        {"steps": 2, "reason": "exception", "exception": "LookupError"}
    ]


def test_streams_are_the_programs(program: Program, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.stdin.read()[::-1])\nprint('err', file=sys.stderr)")
    done = subprocess.run(
        [sys.executable, *RECORD, str(script)],
        input="abc",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "cba\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "err"
    assert len(lines) == 2
    assert "nothing was recorded" in lines[1]
    assert not (tmp_path / "run").exists()


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
    assert record.ended == (number == signal.SIGINT)


def test_processes_that_do_not_train_leave_nothing(program: Program, tmp_path: Path) -> None:
    """Loader workers, forked and spawned, and helpers."""
    done = program(
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
    assert done.returncode == 0, done.stderr
    assert len(only_rank(tmp_path / "run").steps) == 8
    assert not list(tmp_path.glob("run_*"))


def test_switched_off_the_program_just_runs(program: Program, tmp_path: Path) -> None:
    done = program(
        LOOP + "step()\nimport sys\nprint('advisor' in sys.modules)\nraise SystemExit(3)",
        before=RECORD,
        env={"ADVISOR": "0"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "False\n", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("nowhere.py",), "nowhere.py: no such file"),
        (("no-such-command", "x"), "neither a script"),
        ((), "Missing argument"),
    ],
)
def test_a_program_that_is_not_there(
    program: Program, words: tuple[str, ...], complaint: str
) -> None:
    done = program("", before=(*RECORD, *words), after=("--",) if not words else ())
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_window_is_asked_for_from_outside(tmp_path: Path) -> None:
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

    done = program(
        LOOP + "import time\ndef work():\n    return sum(i * i for i in range(20_000))\n"
        "for _ in range(300):\n    work(); step()\nprint('end')",
        before=(*RECORD, "--scalene", "--scalene-steps", "120"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("end") == 1  # the second pass stopped before
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 300
    profile = json.loads((tmp_path / "run" / "rank0" / "scalene.json").read_text())
    (lines,) = [f["lines"] for name, f in profile["files"].items() if name.endswith("train.py")]
    hot = max(lines, key=lambda line: line["n_cpu_percent_python"])
    assert "range(20_000)" in hot["line"]
