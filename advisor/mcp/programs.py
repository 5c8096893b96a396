"""Recording and trying of programs that a client names: if allowed, below the folders."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from advisor.core import labels
from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular
from advisor.mcp import answers as b
from advisor.mcp.answers import AllowedFolders, Ran, TogetherLine, TrialLine, TrialText, Tried
from advisor.tune.knob import find_knob
from advisor.tune.report import FILE, MAX_BYTES, CombinedTrial, Trial, TrialReport

SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)
MAX_SECONDS = 3600
MAX_ARGUMENTS, LONGEST_ARGUMENT = 100, 2000
MAX_KNOBS, LONGEST_KNOB = 20, 60
MIN_BUDGET = 10.0
OVER_BUDGET, SLACK = 1.5, 60.0
"""Factor of the budget, and further seconds, after which trials are ended. The budget starts no run
beyond it, but a run that has started may finish."""
OUTPUT_TAIL_CHARS = 2000
"""Number of characters kept of the program's output, the last ones."""
GRACE_SECONDS = 10.0
"""Time to end by itself after the time limit, s: the recorder writes what it has."""


def record(
    allowed: AllowedFolders, script: str, arguments: list[str], out: str, timeout_s: float
) -> Ran:
    """Run ``advisor record`` on a script, in its own folder, into a new run directory.

    Raises AdvisorError if the script is outside, or the run directory exists."""
    program, folder = _asked(allowed, script, arguments, out)
    seconds = min(max(1.0, timeout_s), MAX_SECONDS)
    command = ["record", "--no-report", "--out", str(folder), "--", str(program), *arguments]
    code, took, said = _run(command, program.parent, seconds)
    recorded = folder.is_dir() and any(folder.iterdir())
    return Ran(
        path=str(folder) if recorded else "",
        exit_code=code,
        seconds=took,
        untrusted=b.UNTRUSTED,
        from_program=said,
    )


def try_knobs(
    allowed: AllowedFolders,
    script: str,
    arguments: list[str],
    out: str,
    only: list[str],
    budget_s: float,
) -> Tried:
    """Run ``advisor try`` on a script, in its own folder, into a new run directory.

    Raises AdvisorError if the script is outside, the run directory exists, or a knob is unknown."""
    program, folder = _asked(allowed, script, arguments, out)
    for name in only[:MAX_KNOBS]:
        find_knob(name.partition("=")[0])
    budget = min(max(MIN_BUDGET, budget_s), MAX_SECONDS)
    command = ["try", "--no-progress", "--format", "json", "--budget", f"{budget:.0f}s"]
    command += [word for name in only[:MAX_KNOBS] for word in ("--only", name)]
    command += ["--out", str(folder), "--", str(program), *arguments]
    code, took, said = _run(command, program.parent, budget * OVER_BUDGET + SLACK, errors=True)
    if not (folder / FILE).is_file():
        return build_trial_answer(None, "", code, took, said)
    return build_trial_answer(
        TrialReport.from_json(read_regular(folder / FILE, MAX_BYTES)), str(folder), code, took, said
    )


def _asked(
    allowed: AllowedFolders, script: str, arguments: list[str], out: str
) -> tuple[Path, Path]:
    """Return the script and the run directory to create. Raises AdvisorError."""
    program, folder = allowed.path(script), allowed.new_path(out)
    if not program.is_file():
        raise AdvisorError(f"{script}: not a file; give a Python script")
    if len(arguments) > MAX_ARGUMENTS or any(len(a) > LONGEST_ARGUMENT for a in arguments):
        raise AdvisorError("too many arguments, or one that is too long")
    if any("\0" in argument for argument in arguments):
        raise AdvisorError("an argument holds a null character")
    return program, folder


def _run(
    command: list[str], folder: Path, seconds: float, *, errors: bool = False
) -> tuple[int | None, float, str]:
    """Run an advisor command; return exit code, seconds and last output. ``errors``: only standard
    error, since the rest is for programs."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # a group of its own: what the program started ends with it
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "advisor", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if errors else output,
            stderr=output if errors else subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        code = _wait(process, seconds)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4 * OUTPUT_TAIL_CHARS))
        tail = output.read().decode("utf-8", "replace")
    return (
        code,
        round(time.monotonic() - started, 1),
        labels.clean(tail, lines=True)[-OUTPUT_TAIL_CHARS:],
    )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process; ``None`` if it was ended after the time limit."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    for number in (signal.SIGTERM, SIGKILL):
        _signal(process, number)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        break
    _signal(process, SIGKILL)  # what it left behind
    return None


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the program and all that it started; without groups, to it alone."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def build_trial_answer(
    report: TrialReport | None, path: str, exit_code: int | None, seconds: float, said: str
) -> Tried:
    """Return the answer of a trial report; without one, ``said`` tells why."""
    report = report or TrialReport(interrupted=True)
    shown, more = b.take_first(report.trials, b.MAX_TRIALS)
    return Tried(
        path=path,
        exit_code=exit_code,
        seconds=seconds,
        complete=not (report.interrupted or report.out_of_budget) and exit_code == 0,
        step_ns=report.step_ns,
        repeats_its_losses=report.repeats,
        trials=[_line(trial) for trial in shown],
        more_trials=more,
        together=_together(report.together),
        by_hand=[b.bound_name(item) for item in report.without[: b.MAX_TRIALS]],
        untrusted=b.UNTRUSTED,
        from_program=said,
    )


def _line(trial: Trial) -> TrialLine:
    return b.copy_fields(
        TrialLine,
        trial,
        knob=b.bound_name(trial.name),
        rule=b.bound_name(trial.rule),
        losses=b.bound_name(trial.losses),
        schedule=b.bound_text(trial.schedule),
        from_program=TrialText(
            why=b.bound_text(trial.why),
            lines=_code(trial.lines),
            diff=_code(trial.diff) if trial.outcome == "gain" else "",
        ),
    )


def _code(text: str) -> str:
    return labels.shorten(labels.clean(text, lines=True), 2 * b.LONGEST_TEXT)


def _together(both: CombinedTrial | None) -> TogetherLine | None:
    if both is None:
        return None
    return b.copy_fields(
        TogetherLine,
        both,
        knobs=[b.bound_name(knob_setting) for knob_setting in both.knob_settings],
        adds_nothing=[b.bound_name(knob_setting) for knob_setting in both.left_out],
    )
