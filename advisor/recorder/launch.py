"""Launcher of ``advisor record``: starts the program, waits for it, and prints the result.

The program runs in processes of its own, exactly as it would: ``__main__``, arguments, standard
streams and the terminal's process group are its own. Only the environment differs, by
``PYTHONPATH`` (see ``inject/sitecustomize.py``) and ``ADVISOR_*``. Imports no torch."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from advisor.core import run_directory as rundir
from advisor.core.errors import AdvisorError, install_command
from advisor.core.text import count_noun
from advisor.recorder import injection as reach
from advisor.recorder.folder import (
    RUN_DIR,
    missing_folders,
    new_run,
    print_message,
    print_result,
    remove_empty,
    with_injected,
)
from advisor.recorder.injection import STOP_AFTER
from advisor.recorder.options import resolve_options

PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals passed on to the program. SIGINT and SIGQUIT are not: they come from the terminal, which
sends them to the program as well."""


def command_line(program: list[str]) -> list[str]:
    """Return the command to start: a script or ``-m module`` gets this Python in front.

    Raises AdvisorError: no such program."""
    first = program[0]
    if first == "-m":
        return [sys.executable, *program]
    if first.endswith((".py", ".pyw")):
        if not Path(first).is_file():
            raise AdvisorError(f"{first}: no such file")
        return [sys.executable, *program]
    result = shutil.which(first)
    if result is None:
        # of the same environment, though its bin folder is not on the path
        beside = Path(sys.executable).with_name(first)
        if beside.is_file():
            return [str(beside), *program[1:]]
        if _for_python(Path(first)):
            return [sys.executable, *program]
        raise AdvisorError(f"{first}: neither a script (*.py) nor a command on the path")
    return [result, *program[1:]]


def warn_misplaced(program: list[str], options: Sequence[str]) -> str:
    """Return a line about options of advisor given after the program, which gets them; empty if
    there are none, or the script's text has them."""
    place = next((n for n, word in enumerate(program) if word.endswith((".py", ".pyw"))), None)
    if place is None:
        return ""
    script, *after = program[place:]
    given = [word.partition("=")[0] for word in after]
    wrong = [name for name in dict.fromkeys(given) if name in options]
    try:
        text = Path(script).read_text("utf-8", "replace")
    except OSError:
        return ""
    words = {name: name[2:].replace("-", "_") for name in wrong}
    wrong = [n for n in wrong if n not in text and not re.search(rf"\b{words[n]}\b", text)]
    if not wrong:
        return ""
    names = " and ".join(wrong)
    return f"{names} behind {script} goes to the program; put it before the program for advisor"


def _for_python(path: Path) -> bool:
    """Return whether Python would run a path: a folder or an archive with ``__main__``, or a script
    whose first line says so and that is no command (``chmod +x``)."""
    if path.is_dir():
        return (path / "__main__.py").is_file()
    try:
        with path.open("rb") as file:
            line = file.readline(200)
    except OSError:
        return False
    return (line.startswith(b"#!") and b"python" in line) or zipfile.is_zipfile(path)


def record(words: list[str], options: Mapping[str, Any]) -> int:
    """Run and record the program; return its exit code. Raises AdvisorError: no run directory."""
    decided = resolve_options(**options)
    made = missing_folders(decided.out)
    try:
        run_dir = new_run(decided.out)
    except OSError as error:
        raise AdvisorError(
            f"{decided.out or 'runs'}: no run directory can be made ({error.strerror or error})"
        ) from None
    reason = reach.explain_unreachable(words)
    if reason:
        print_message(f"this will not be recorded: {reason}")
    with reach.note_folder() as folder:
        try:
            code = run(words, {**environment(run_dir, options), reach.NOTES: str(folder)})
            parts = _recorded(run_dir)
        finally:
            if run_dir != Path(decided.out or "runs").absolute():
                made.insert(0, run_dir)
            remove_empty(made)
        if not parts:
            print_message(
                f"nothing was recorded: {reason or reach.explain_nothing_recorded(folder, code)}"
            )
            return code
        problems = reach.list_problems(folder)
    for part in parts:
        print_result(part, analyse=decided.report)
    for problem in problems[:1]:
        print_message(f"recording stopped early: {problem}.")
    return code


def environment(run_dir: Path, options: Mapping[str, Any]) -> dict[str, str]:
    env = os.environ.copy()
    env[RUN_DIR] = str(run_dir)
    for name, value in options.items():
        if name != "out":
            env[f"ADVISOR_{name.upper()}"] = str(value)
    env["PYTHONPATH"] = with_injected(env.get("PYTHONPATH", ""))
    return env


def _recorded(run_dir: Path) -> list[Path]:
    """Return the run directory, and those that the program's later trainings made beside it."""
    beside = [run_dir, *run_dir.parent.glob(f"{run_dir.name}_[0-9r]*")]
    return sorted(path for path in beside if (path / rundir.MANIFEST).is_file())


def run(words: list[str], env: Mapping[str, str]) -> int:
    """Run a command with our streams, pass signals on, and return its exit code; -N: signal N ended
    it. Raises AdvisorError if it cannot be started."""
    before: dict[int, Any] = {}
    early: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    def leave_it(number: int, frame: FrameType | None) -> None:
        """Ignore the signal: the terminal has sent it to the program too."""

    for name in PASSED_ON:
        _handle(name, pass_on, before)
    for name in ("SIGINT", "SIGQUIT"):
        _handle(name, leave_it, before)
    try:
        process = subprocess.Popen(words, env=dict(env))
        for number in early:
            process.send_signal(number)
        return process.wait()
    except OSError as error:
        raise AdvisorError(f"{words[0]}: cannot be started ({error.strerror or error})") from None
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _handle(
    name: str, handler: Callable[[int, FrameType | None], None], before: dict[int, Any]
) -> None:
    number = getattr(signal, name, None)
    # one that our caller ignores (nohup) is ignored by the program too
    if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
        before[number] = signal.signal(number, handler)


def exit_like_program(code: int) -> NoReturn:
    """End this process as the program ended: with its exit code, or by the same signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        with suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's own core is enough
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    sys.exit(code)


def under_scalene(program: list[str], steps: int, out: str = "") -> None:
    """Run the script again under Scalene, unrecorded, for ``steps`` steps. The profile goes to the
    newest run's first rank. What the script writes, it writes again.

    Only CPU time is sampled: Scalene's other modes start a torch profiler of their own, and slow
    training sixfold. Raises AdvisorError: no script, no Scalene, no profile."""
    if not program[0].endswith(".py"):
        raise AdvisorError(f"{program[0]}: Scalene runs scripts (*.py) only")
    if importlib.util.find_spec("scalene") is None:
        raise AdvisorError(f"Scalene is not installed: {install_command('scalene')}")
    run_dir = _newest(out)
    hidden = run_dir / "rank0" / f".{rundir.SCALENE}"
    # cpu-only, no stacks, no async: anything more would start a profiler or cost memory
    words = [sys.executable, "-m", "scalene", "run", "--cpu-only", "--no-stacks", "--no-async"]
    words += ["-o", str(hidden), program[0], "---", *program[1:]]
    env = environment(run_dir, {})
    env[STOP_AFTER] = str(steps)
    print(f"advisor: once more under Scalene, {count_noun(steps, 'step')}", file=sys.stderr)
    run(words, env)
    if not hidden.is_file():
        raise AdvisorError(f"{program[0]}: Scalene left no profile")
    hidden.replace(run_dir / "rank0" / rundir.SCALENE)


def _newest(out: str) -> Path:
    """Return the newest run directory. Raises AdvisorError if there is none."""
    wanted = Path(out) if out else Path("runs") / "*"
    runs = [p for p in wanted.parent.glob(f"{wanted.name}*") if (p / rundir.MANIFEST).is_file()]
    if not runs:
        raise AdvisorError(f"{wanted}: nothing was recorded that Scalene's lines could join")
    return max(runs, key=lambda path: (path / rundir.MANIFEST).stat().st_mtime)
