"""Launcher of ``advisor record``: starts the program, waits for it, and prints the result.

The program runs in its own processes, exactly as without advisor: with its own ``__main__``,
arguments, standard streams and process group. Only the environment differs: ``PYTHONPATH`` (see
``inject/sitecustomize.py``) and ``ADVISOR_*``. This module does not import torch."""

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

FORWARDED_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals to pass on to the program. SIGINT and SIGQUIT are not: the terminal sends them to the
program as well."""


def command_line(program: list[str]) -> list[str]:
    """Return the command to start, with this Python in front of a script or ``-m module``.

    Raises AdvisorError if there is no such program."""
    first = program[0]
    if first == "-m":
        return [sys.executable, *program]
    if first.startswith("-"):
        raise AdvisorError(f"no such option: {first}; see advisor record --help")
    if first.endswith((".py", ".pyw")):
        if not Path(first).is_file():
            raise AdvisorError(f"{first}: no such file or directory")
        return [sys.executable, *program]
    result = shutil.which(first)
    if result is None:
        # in the same environment, whose bin folder is not on the path
        sibling = Path(sys.executable).with_name(first)
        if sibling.is_file():
            return [str(sibling), *program[1:]]
        if _is_python_program(Path(first)):
            return [sys.executable, *program]
        raise AdvisorError(f"{first}: neither a script (*.py) nor a command on the PATH")
    return [result, *program[1:]]


def warn_misplaced(program: list[str], options: Sequence[str]) -> str:
    """Return a warning about options of advisor that are given after the program and so go to it.
    Empty if there are none, or if the script's text contains them."""
    index = next((n for n, word in enumerate(program) if word.endswith((".py", ".pyw"))), None)
    if index is None:
        return ""
    script, *arguments = program[index:]
    option_names = [word.partition("=")[0] for word in arguments]
    misplaced = [name for name in dict.fromkeys(option_names) if name in options]
    try:
        text = Path(script).read_text("utf-8", "replace")
    except OSError:
        return ""
    identifiers = {name: name[2:].replace("-", "_") for name in misplaced}
    misplaced = [
        n for n in misplaced if n not in text and not re.search(rf"\b{identifiers[n]}\b", text)
    ]
    if not misplaced:
        return ""
    names = " and ".join(misplaced)
    verb, pronoun = ("goes", "it") if len(misplaced) == 1 else ("go", "them")
    return (
        f"{names} after {script} {verb} to the program; for advisor, put {pronoun} before the "
        "program"
    )


def _is_python_program(path: Path) -> bool:
    """Return whether Python would run a path: a folder or an archive with ``__main__``, or a script
    whose first line names Python and that is not a command (``chmod +x``)."""
    if path.is_dir():
        return (path / "__main__.py").is_file()
    try:
        with path.open("rb") as file:
            line = file.readline(200)
    except OSError:
        return False
    return (line.startswith(b"#!") and b"python" in line) or zipfile.is_zipfile(path)


def record(words: list[str], options: Mapping[str, Any]) -> int:
    """Run and record the program, and return its exit code. Raises AdvisorError: no run
    directory."""
    resolved = resolve_options(**options)
    created = missing_folders(resolved.out)
    try:
        run_dir = new_run(resolved.out)
    except OSError as error:
        raise AdvisorError(
            f"{resolved.out or 'runs'}: cannot create a run directory ({error.strerror or error})"
        ) from None
    reason = reach.explain_unreachable(words)
    if reason:
        print_message(f"this program cannot be recorded: {reason}")
    with reach.note_folder() as folder:
        try:
            code = run(words, {**environment(run_dir, options), reach.NOTES: str(folder)})
            runs = _recorded_runs(run_dir)
        finally:
            if run_dir != Path(resolved.out or "runs").absolute():
                created.insert(0, run_dir)
            remove_empty(created)
        if not runs:
            print_message(
                f"nothing was recorded: {reason or reach.explain_nothing_recorded(folder, code)}"
            )
            return code
        problems = reach.list_problems(folder)
    for part in runs:
        print_result(part, analyse=resolved.report)
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


def _recorded_runs(run_dir: Path) -> list[Path]:
    """Return the run directory, and the sibling directories of the program's later trainings."""
    candidates = [run_dir, *run_dir.parent.glob(f"{run_dir.name}_[0-9r]*")]
    return sorted(path for path in candidates if (path / rundir.MANIFEST).is_file())


def run(words: list[str], env: Mapping[str, str]) -> int:
    """Run a command with our streams, pass signals on, and return its exit code, or -N if signal N
    ended it. Raises AdvisorError if it cannot be started."""
    old_handlers: dict[int, Any] = {}
    early_signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            early_signals.append(number)
        else:
            process.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        """Ignore the signal, which the terminal has sent to the program too."""

    for name in FORWARDED_SIGNALS:
        _install_handler(name, pass_on, old_handlers)
    for name in ("SIGINT", "SIGQUIT"):
        _install_handler(name, ignore, old_handlers)
    try:
        process = subprocess.Popen(words, env=dict(env))
        for number in early_signals:
            process.send_signal(number)
        return process.wait()
    except OSError as error:
        raise AdvisorError(f"{words[0]}: cannot be started ({error.strerror or error})") from None
    finally:
        for number, old in old_handlers.items():
            signal.signal(number, old)


def _install_handler(
    name: str, handler: Callable[[int, FrameType | None], None], old_handlers: dict[int, Any]
) -> None:
    number = getattr(signal, name, None)
    # a signal that our caller ignores (nohup) is ignored by the program too
    if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
        old_handlers[number] = signal.signal(number, handler)


def exit_like_program(code: int) -> NoReturn:
    """End this process as the program ended, with the same exit code or signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        with suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's core dump is enough
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    sys.exit(code)


def under_scalene(program: list[str], steps: int, out: str = "") -> None:
    """Run the script again under Scalene for ``steps`` steps, without recording. The profile goes
    to the first rank of the newest run. The script repeats all its output.

    Only CPU time is sampled: Scalene's other modes start a torch profiler and slow training
    sixfold. Raises AdvisorError if there is no script, no Scalene or no profile."""
    if not program[0].endswith(".py"):
        raise AdvisorError(f"{program[0]}: Scalene only runs scripts (*.py)")
    if importlib.util.find_spec("scalene") is None:
        raise AdvisorError(f"Scalene is not installed: {install_command('scalene')}")
    run_dir = _find_newest_run(out)
    hidden = run_dir / "rank0" / f".{rundir.SCALENE}"
    # cpu-only, no stacks, no async: other modes would start a profiler or use much memory
    words = [sys.executable, "-m", "scalene", "run", "--cpu-only", "--no-stacks", "--no-async"]
    words += ["-o", str(hidden), program[0], "---", *program[1:]]
    env = environment(run_dir, {})
    env[STOP_AFTER] = str(steps)
    print(f"advisor: running again under Scalene, {count_noun(steps, 'step')}", file=sys.stderr)
    run(words, env)
    if not hidden.is_file():
        raise AdvisorError(f"{program[0]}: Scalene wrote no profile")
    hidden.replace(run_dir / "rank0" / rundir.SCALENE)


def _find_newest_run(out: str) -> Path:
    """Return the newest run directory. Raises AdvisorError if there is none."""
    pattern = Path(out) if out else Path("runs") / "*"
    runs = [p for p in pattern.parent.glob(f"{pattern.name}*") if (p / rundir.MANIFEST).is_file()]
    if not runs:
        raise AdvisorError(f"{pattern}: there is no recorded run to add Scalene's lines to")
    return max(runs, key=lambda path: (path / rundir.MANIFEST).stat().st_mtime)
