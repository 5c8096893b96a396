"""Tools that record and try programs which a client names, if allowed, in the allowed folders."""

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
from advisor.mcp import answers
from advisor.mcp.answers import (
    AllowedFolders,
    ProgramResult,
    TogetherLine,
    TrialLine,
    TrialsResult,
    TrialText,
)
from advisor.tune.knob import find_knob
from advisor.tune.report import FILE, MAX_TRIALS_BYTES, CombinedTrial, Trial, TrialReport

SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)
MAX_SECONDS = 3600
MAX_ARGUMENTS, LONGEST_ARGUMENT = 100, 2000
MAX_KNOBS, LONGEST_KNOB = 20, 60
MIN_BUDGET = 10.0
BUDGET_FACTOR, BUDGET_SLACK_S = 1.5, 60.0
"""Trials are ended after this multiple of the budget plus these seconds. No run starts once the
budget is spent, but a run that has started may finish."""
OUTPUT_TAIL_CHARS = 2000
"""Number of characters kept from the end of the program's output."""
GRACE_S = 10.0
"""Seconds that a program gets to end by itself after the limit: the recorder writes its data."""


def record(
    allowed: AllowedFolders, script: str, arguments: list[str], out: str, timeout_s: float
) -> ProgramResult:
    """Run ``advisor record`` on a script, in its own folder, into a new run directory.

    Raises AdvisorError if the script is outside the folders or the run directory exists."""
    program, folder = _resolve_paths(allowed, script, arguments, out)
    seconds = min(max(1.0, timeout_s), MAX_SECONDS)
    command = ["record", "--no-report", "--out", str(folder), "--", str(program), *arguments]
    exit_code, elapsed_s, output = _run_command(command, program.parent, seconds)
    recorded = folder.is_dir() and any(folder.iterdir())
    return ProgramResult(
        path=str(folder) if recorded else "",
        exit_code=exit_code,
        seconds=elapsed_s,
        untrusted=answers.UNTRUSTED,
        from_program=output,
    )


def try_knobs(
    allowed: AllowedFolders,
    script: str,
    arguments: list[str],
    out: str,
    only: list[str],
    budget_s: float,
) -> TrialsResult:
    """Run ``advisor try`` on a script, in its own folder, into a new run directory.

    Raises AdvisorError if the script is outside the folders, the run directory exists, or a knob
    is unknown."""
    program, folder = _resolve_paths(allowed, script, arguments, out)
    for name in only[:MAX_KNOBS]:
        find_knob(name.partition("=")[0])
    budget = min(max(MIN_BUDGET, budget_s), MAX_SECONDS)
    command = ["try", "--no-progress", "--format", "json", "--budget", f"{budget:.0f}s"]
    command += [word for name in only[:MAX_KNOBS] for word in ("--only", name)]
    command += ["--out", str(folder), "--", str(program), *arguments]
    exit_code, elapsed_s, output = _run_command(
        command, program.parent, budget * BUDGET_FACTOR + BUDGET_SLACK_S, errors_only=True
    )
    if not (folder / FILE).is_file():
        return build_trial_answer(None, "", exit_code, elapsed_s, output)
    return build_trial_answer(
        TrialReport.from_json(read_regular(folder / FILE, MAX_TRIALS_BYTES)),
        str(folder),
        exit_code,
        elapsed_s,
        output,
    )


def _resolve_paths(
    allowed: AllowedFolders, script: str, arguments: list[str], out: str
) -> tuple[Path, Path]:
    """Return the script and the run directory to create. Raises AdvisorError."""
    program, folder = allowed.path(script), allowed.new_path(out)
    if not program.is_file():
        raise AdvisorError(f"{script}: not a file; give a Python script")
    if len(arguments) > MAX_ARGUMENTS or any(len(a) > LONGEST_ARGUMENT for a in arguments):
        raise AdvisorError("too many arguments, or an argument that is too long")
    if any("\0" in argument for argument in arguments):
        raise AdvisorError("an argument contains a null character")
    return program, folder


def _run_command(
    command: list[str], folder: Path, seconds: float, *, errors_only: bool = False
) -> tuple[int | None, float, str]:
    """Run an advisor command. Return its exit code, its duration in seconds and the end of its
    output. ``errors_only``: keep standard error only, because standard output is for programs."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # a process group of its own, so that child processes of the program end with it
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "advisor", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if errors_only else output,
            stderr=output if errors_only else subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        exit_code = _wait_or_end(process, seconds)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4 * OUTPUT_TAIL_CHARS))
        tail = output.read().decode("utf-8", "replace")
    return (
        exit_code,
        round(time.monotonic() - started, 1),
        labels.clean(tail, lines=True)[-OUTPUT_TAIL_CHARS:],
    )


def _wait_or_end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process, or ``None`` if it was ended after the time limit."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    for signal_number in (signal.SIGTERM, SIGKILL):
        _signal_group(process, signal_number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        break
    _signal_group(process, SIGKILL)  # child processes that are still running
    return None


def _signal_group(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """Send a signal to the program's process group, or to the program where there are no groups."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal_number)
        else:
            process.send_signal(signal_number)


def build_trial_answer(
    report: TrialReport | None, path: str, exit_code: int | None, seconds: float, output: str
) -> TrialsResult:
    """Return the answer for a trial report. If there is none, ``output`` tells why."""
    report = report or TrialReport(interrupted=True)
    first_trials, remaining = answers.take_first(report.trials, answers.MAX_TRIALS)
    return TrialsResult(
        path=path,
        exit_code=exit_code,
        seconds=seconds,
        complete=not (report.interrupted or report.out_of_budget) and exit_code == 0,
        step_ns=report.step_ns,
        repeats_its_losses=report.repeats,
        trials=[_build_trial_line(trial) for trial in first_trials],
        more_trials=remaining,
        together=_build_together_line(report.together),
        by_hand=[answers.bound_name(item) for item in report.without[: answers.MAX_TRIALS]],
        untrusted=answers.UNTRUSTED,
        from_program=output,
    )


def _build_trial_line(trial: Trial) -> TrialLine:
    return answers.copy_fields(
        TrialLine,
        trial,
        knob=answers.bound_name(trial.name),
        rule=answers.bound_name(trial.rule),
        losses=answers.bound_name(trial.losses),
        schedule=answers.bound_text(trial.schedule),
        from_program=TrialText(
            why=answers.bound_text(trial.why),
            lines=_clean_code(trial.lines),
            diff=_clean_code(trial.diff) if trial.outcome == "gain" else "",
        ),
    )


def _clean_code(text: str) -> str:
    return labels.shorten(labels.clean(text, lines=True), 2 * answers.LONGEST_TEXT)


def _build_together_line(combined: CombinedTrial | None) -> TogetherLine | None:
    if combined is None:
        return None
    return answers.copy_fields(
        TogetherLine,
        combined,
        knobs=[answers.bound_name(knob_setting) for knob_setting in combined.knob_settings],
        adds_nothing=[answers.bound_name(knob_setting) for knob_setting in combined.left_out],
    )
