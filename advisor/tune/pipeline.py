"""Steps from a program or a recorded run to a report of trials: the knobs that the findings' rules
name, their predicted gains, the trials, and the saved results."""

import ast
import difflib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

import advisor
from advisor.advise.engine import AnalysisResult, Options, analyze_in_full
from advisor.advise.rule_loading import load_rules
from advisor.core import run_directory as rundir
from advisor.core.cgroup import count_cores
from advisor.core.credentials import HIDDEN, clean_command
from advisor.core.errors import AdvisorError
from advisor.core.files import scratch_folder
from advisor.core.finding import Finding
from advisor.lint.script import Script, find_keyword, parse
from advisor.recorder.folder import new_run
from advisor.replay import ledger
from advisor.tune.knob import Knob, KnobSetting, Machine, Value, find_knob
from advisor.tune.report import FILE, Trial, TrialReport
from advisor.tune.rounds import TrialLimits
from advisor.tune.trial_process import TrialProgram
from advisor.tune.trials import Say, TrialSession, build_trial_error, explain_refusal

RECORDED_STEPS, MIN_RECORDING_STEPS = 90, 40
"""Maximum and minimum steps of the recording: a profiled window and as many around it."""
RECORDED_SHARE = 0.2
"""Share of the budget that the recording may take, once there are enough steps."""


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    limits: TrialLimits
    only: tuple[str, ...] = ()
    """Knobs, by id or with a setting (``workers=2``). Empty for all that the findings name."""
    dry: bool = False
    remember: bool = False
    """Whether to write into the user's ledger as well."""
    allowed: tuple[str, ...] = ()
    """Folders in which the program, including its native code, may write."""
    out: str = ""
    """Run directory. Empty for a new one below ``runs``."""


def try_program(
    words: Sequence[str], recorded: Path | None, request: TrialRequest, say: Say
) -> tuple[TrialReport, Path]:
    """Try a command. ``recorded`` is its run, if one exists. Returns the report and the run's
    folder, which contains it. Raises AdvisorError if the command cannot be tried."""
    started = time.monotonic()
    end = started + request.limits.budget
    report = TrialReport(version=advisor.__version__, program=clean_command(list(words)))
    with scratch_folder() as folder:
        root = folder.resolve()
        program = TrialProgram(words, root, allowed=request.allowed)
        run = recorded if recorded is not None else _record(program, root, request, say)
        _fill_plan(report, run, words, request)
        if report.trials and not request.dry:
            TrialSession(program, report, request.limits, end, say).run()
    report.dry = request.dry
    report.seconds = time.monotonic() - started
    if not request.dry:
        save_trials(report, run, remember=request.remember)
    return report, run


def _record(program: TrialProgram, root: Path, request: TrialRequest, say: Say) -> Path:
    """Record the program in the scratch folder, and return its new folder among the user's runs."""
    say("recording")
    recording = root / "recorded"
    recording.mkdir()
    limits = request.limits
    result = program.run(
        (),
        warmup=MIN_RECORDING_STEPS,
        steps=RECORDED_STEPS,
        seconds=limits.budget * RECORDED_SHARE,
        timeout=limits.timeout + limits.budget * RECORDED_SHARE,
        record=recording,
    )
    if not (recording / rundir.MANIFEST).is_file():
        raise build_trial_error(f"nothing was recorded: {explain_refusal(result)}", result)
    try:
        run = new_run(request.out)
        shutil.copytree(recording, run, dirs_exist_ok=True)
    except OSError as error:
        raise AdvisorError(f"no run directory can be made ({error.strerror or error})") from None
    return run


def _fill_plan(report: TrialReport, run: Path, words: Sequence[str], request: TrialRequest) -> None:
    machine = Machine(count_cores(), _used_gpu(run))
    result = plan_trials(run, machine)
    report.verdict, report.without = result.verdict, result.by_hand
    report.titles = result.titles
    report.trials = [
        t
        for t in [*result.trials, *plan_requested_trials(request.only, machine, result.trials)]
        if not request.only or {t.knob_setting.knob, t.name} & set(request.only)
    ]
    script = next((Path(word) for word in words[1:2] if word.endswith(".py")), None)
    for trial in report.trials:
        if script is not None:
            callees, arguments = find_knob(trial.knob_setting.knob).arguments(
                trial.knob_setting.value
            )
            trial.diff = write_diff(script, callees, arguments) if callees else ""
    records = ledger.records_by_rule(ledger.read_ledger(ledger.user_file()).predictions)
    rules = dict.fromkeys(trial.rule for trial in report.trials if trial.rule)
    report.remembered = "; ".join(f"{rule}: {records[rule]}" for rule in rules if rule in records)


def _used_gpu(run: Path) -> bool:
    record = rundir.read_recording(run)
    return any(rank.rank.devices for rank in record.ranks.values())


def save_trials(report: TrialReport, run: Path, *, remember: bool) -> None:
    """Save the report and the ledger's lines in the run's folder; ``remember`` writes the user's
    too."""
    try:
        (run / FILE).write_bytes(report.to_json())
    except OSError as error:
        raise AdvisorError(f"{run}: cannot be written to ({error.strerror or error})") from None
    entries = list(filter(None, (_build_entry(report, trial) for trial in report.trials)))
    ledger.append_to_ledger(run / ledger.FILE, entries)
    if remember:
        ledger.append_to_ledger(ledger.user_file(), entries)


def _build_entry(report: TrialReport, trial: Trial) -> ledger.Prediction | None:
    """Return the ledger's line of a trial, or ``None`` unless it was predicted and measured
    twice."""
    if (
        trial.predicted is None
        or trial.predicted_low is None
        or trial.predicted_high is None
        or trial.gain is None
        or trial.gain_low is None
        or trial.gain_high is None
        or trial.runs < 2
        or not trial.is_known
        or trial.outcome == "dropped"
    ):
        return None
    return ledger.Prediction(
        unix=int(time.time()),
        source="try",
        rule=trial.rule,
        knob=str(trial.knob_setting),
        device=report.device,
        torch=report.torch,
        predicted=trial.predicted,
        low=trial.predicted_low,
        high=trial.predicted_high,
        measured=trial.gain,
        measured_low=trial.gain_low,
        measured_high=trial.gain_high,
    )


def command_of(run: Path) -> list[str]:
    """Return the command of a recorded run. Raises AdvisorError if it cannot be started again."""
    words = list(rundir.read_recording(run).manifest.command)
    if not words:
        raise AdvisorError(f"{run}: does not say what was run; give the program itself")
    if any(HIDDEN in word for word in words):
        raise AdvisorError(f"{run}: its command contains a credential; give the program itself")
    if words[0].endswith((".py", ".pyw")):
        words = [sys.executable, *words]
    return words


MAX_SCRIPT_BYTES = 4 << 20


def write_diff(file: Path, callees: frozenset[str], arguments: Mapping[str, object]) -> str:
    """Return a diff that sets keyword arguments of the only call of one of these names. Empty if
    there are no or several calls, or the arguments are not all written out."""
    try:
        if file.stat().st_size > MAX_SCRIPT_BYTES:
            return ""
        text = file.read_text("utf-8")
        script = parse(text, file.name)
    except (OSError, UnicodeError, AdvisorError):
        return ""
    calls = [call for call in script.calls if script.qualified_name(call.func) in callees]
    if len(calls) != 1:
        return ""
    changed = _set_args(script, text, calls[0], arguments)
    if changed is None or not _is_python(changed):
        return ""
    lines = difflib.unified_diff(
        text.splitlines(keepends=True),
        changed.splitlines(keepends=True),
        f"a/{file.name}",
        f"b/{file.name}",
        n=1,
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _set_args(
    script: Script, text: str, call: ast.Call, arguments: Mapping[str, object]
) -> str | None:
    """Return the text with the call changed, or ``None`` if its arguments do not allow it."""
    if len(call.args) > 1 or any(item.arg is None for item in call.keywords):
        return None
    if any(isinstance(item, ast.Starred) for item in call.args):
        return None
    edits: list[tuple[int, int, str]] = []
    additions = []
    for name, value in arguments.items():
        keyword = find_keyword(call, name)
        if keyword is None:
            additions.append(f"{name}={value!r}")
        else:
            edits.append((*script.span(keyword), repr(value)))
    if additions:
        values = [*call.args, *(item.value for item in call.keywords)]
        if not values:
            return None
        insert_at = max(script.span(node)[1] for node in values)
        edits.append((insert_at, insert_at, f", {', '.join(additions)}"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


class TrialPlan(NamedTuple):
    """Trials in the order of the findings, and the findings that no knob fixes."""

    trials: list[Trial]
    by_hand: list[str]
    verdict: str
    titles: dict[str, str]
    """Title of each rule's finding, for those that are tried or fixed by hand."""


def plan_trials(run: Path, machine: Machine) -> TrialPlan:
    """Plan the trials of a recorded run. Raises AdvisorError if nothing in it can be analysed."""
    analysis = analyze_in_full(run, Options())
    names_of = {rule.id: rule.knobs for rule in load_rules()}
    report = analysis.report
    trials: list[Trial] = []
    by_hand: list[str] = []
    titles: dict[str, str] = {}
    planned: set[KnobSetting] = set()
    # a note is tried as well: a knob without a predicted gain may gain the most
    for finding in (*report.findings, *report.risks, *report.notes):
        usable = [
            knob
            for name in names_of.get(finding.rule, ())
            if _is_usable(knob := find_knob(name), machine)
        ]
        if usable or finding not in report.notes:
            titles.setdefault(finding.rule, finding.title)
        if not usable and finding not in report.notes:
            by_hand.append(finding.rule)
        for knob in usable:
            for index, value in enumerate(knob.values(_find_workers(finding), machine)):
                knob_setting = KnobSetting(knob.id, value)
                if knob_setting in planned:
                    continue
                planned.add(knob_setting)
                trial = _build_trial(finding.rule, knob, knob_setting)
                trial.memory = finding.impact is not None and finding.impact.currency == "memory"
                is_first = knob is usable[0] and index == 0
                _predict(trial, finding, analysis, value, is_first=is_first)
                trials.append(trial)
    return TrialPlan(trials, list(dict.fromkeys(by_hand)), report.verdict, titles)


def plan_requested_trials(
    names: tuple[str, ...], machine: Machine, trials: list[Trial]
) -> list[Trial]:
    """Return trials, without predictions, of knobs that only the user names."""
    result = []
    planned = {trial.knob_setting for trial in trials}
    for text in dict.fromkeys(names):
        name, _, setting_text = text.partition("=")
        knob = find_knob(name)
        if not _is_usable(knob, machine):
            continue
        if setting_text:
            values: Sequence[Value] = [knob.parse_setting(setting_text, machine)]
        elif any(knob_setting.knob == name for knob_setting in planned):
            continue
        else:
            values = knob.values(None, machine)
        for value in values:
            knob_setting = KnobSetting(name, value)
            if knob_setting not in planned:
                planned.add(knob_setting)
                result.append(_build_trial("", knob, knob_setting))
    return result


def _build_trial(rule: str, knob: Knob, setting: KnobSetting) -> Trial:
    return Trial(
        rule=rule,
        knob_setting=setting,
        title=knob.title,
        safety=knob.safety,
        lines=knob.lines(setting.value),
    )


def _is_usable(knob: Knob, machine: Machine) -> bool:
    return machine.cuda or not knob.needs_cuda


def _find_workers(finding: Finding) -> int | None:
    """Return the number of workers in the finding's edit."""
    return next((edit.workers for edit in finding.edits if edit.workers), None)


def _recorded_ns(analysis: AnalysisResult) -> float | None:
    """Return the recorded time from the first step to the last, ns, including time between steps.
    Trials measure the mean step in the same way. ``None`` if not recorded."""
    run_steps = analysis.main.run_steps
    if run_steps is None or not len(run_steps.dur):
        return None
    return float(run_steps.dur.sum() + np.nansum(run_steps.column("evaluation")[1:]))


def _predict(
    trial: Trial, finding: Finding, analysis: AnalysisResult, value: Value, *, is_first: bool
) -> None:
    """Set the predicted range; for another number of workers, replay the same edit with that
    number."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        return
    base_ns = {"step_time": analysis.report.step_ns, "run_time": _recorded_ns(analysis)}
    step = base_ns.get(impact.currency)
    if impact.currency == "step_time" and impact.share and impact.gain_ns:
        step = impact.gain_ns / impact.share  # the mean: with pauses well above the median
    if not step:
        return
    workers = _find_workers(finding)
    if workers is not None and isinstance(value, int) and value != workers:
        if value < 1 or not analysis.main.step_ns:
            return
        edits = [replace(e, workers=value) if e.workers else e for e in finding.edits]
        result = analysis.estimator.gain_range(edits)
        traced_ns = analysis.main.step_ns
        trial.predicted = result.gain / traced_ns
        trial.predicted_low, trial.predicted_high = (
            result.low / traced_ns,
            min(1, result.high / traced_ns),
        )
    elif is_first or workers is not None:
        low = impact.gain_ns if impact.low_ns is None else impact.low_ns
        high = impact.gain_ns if impact.high_ns is None else impact.high_ns
        trial.predicted = min(1.0, impact.gain_ns / step)
        # no fix saves more than the step, although ranges of rare pauses extend beyond it
        trial.predicted_low, trial.predicted_high = min(1.0, low / step), min(1.0, high / step)
