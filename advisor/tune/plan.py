"""What is to be tried: the knobs that the rules of the findings name, and what they should gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from advisor.advise.engine import AnalysisResult, Options, examine
from advisor.advise.select import load_rules
from advisor.core.finding import Finding
from advisor.tune.knob import Knob, Machine, find_knob
from advisor.tune.report import Trial
from advisor.tune.spec import KnobSetting, Value


class TrialPlan(NamedTuple):
    """Trials in the order of the findings, and the findings that no knob cures."""

    trials: list[Trial]
    without: list[str]
    verdict: str


def plan_trials(run: Path, machine: Machine) -> TrialPlan:
    """Of a recorded run. Raises AdvisorError: nothing in it can be analysed."""
    seen = examine(run, Options())
    named = {rule.id: rule.knobs for rule in load_rules()}
    report = seen.report
    trials: list[Trial] = []
    without: list[str] = []
    taken: set[KnobSetting] = set()
    # a note is measured as well: what nothing is promised of may gain the most
    for finding in (*report.findings, *report.risks, *report.notes):
        usable = [
            one for name in named.get(finding.rule, ()) if _fits(one := find_knob(name), machine)
        ]
        if not usable and finding not in report.notes:
            without.append(finding.rule)
        for item in usable:
            for number, value in enumerate(item.values(_number(finding), machine)):
                knob_setting = KnobSetting(item.id, value)
                if knob_setting in taken:
                    continue
                taken.add(knob_setting)
                trial = _trial(finding.rule, item, knob_setting)
                trial.memory = finding.impact is not None and finding.impact.currency == "memory"
                first = item is usable[0] and number == 0
                _predict(trial, finding, seen, value, first=first)
                trials.append(trial)
    return TrialPlan(trials, list(dict.fromkeys(without)), report.verdict)


def asked_for(names: tuple[str, ...], machine: Machine, there: list[Trial]) -> list[Trial]:
    """Trials of knobs that the user names and no finding does: nothing is promised of them."""
    result = []
    known = {trial.knob_setting for trial in there}
    for text in dict.fromkeys(names):
        name, _, given = text.partition("=")
        item = find_knob(name)
        if not _fits(item, machine):
            continue
        if given:
            values: Sequence[Value] = [item.parse_setting(given, machine)]
        elif any(knob_setting.knob == name for knob_setting in known):
            continue
        else:
            values = item.values(None, machine)
        for value in values:
            knob_setting = KnobSetting(name, value)
            if knob_setting not in known:
                known.add(knob_setting)
                result.append(_trial("", item, knob_setting))
    return result


def _trial(rule: str, item: Knob, setting: KnobSetting) -> Trial:
    return Trial(
        rule=rule,
        knob_setting=setting,
        title=item.title,
        safety=item.safety,
        lines=item.lines(setting.value),
    )


def _fits(item: Knob, machine: Machine) -> bool:
    return machine.cuda or not item.needs_cuda


def _number(finding: Finding) -> int | None:
    """Workers that the finding's edit names."""
    return next((edit.workers for edit in finding.edits if edit.workers), None)


def _recorded_ns(seen: AnalysisResult) -> float | None:
    """From the first step to the last, what lay between them included: a share of it is that of the
    mean step, as trials measure it from one end of a step to the next."""
    recorded = seen.main.recorded
    if recorded is None or not len(recorded.dur):
        return None
    return float(recorded.dur.sum() + np.nansum(recorded.column("evaluation")[1:]))


def _predict(
    trial: Trial, finding: Finding, seen: AnalysisResult, value: Value, *, first: bool
) -> None:
    """The band of the finding; of another number of workers, the same edit with that number."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        return
    whole = {"step_time": seen.report.step_ns, "run_time": _recorded_ns(seen)}
    step = whole.get(impact.currency)
    if impact.currency == "step_time" and impact.share and impact.gain_ns:
        step = impact.gain_ns / impact.share  # the mean, of steps with pauses well above the median
    if not step:
        return
    wanted = _number(finding)
    if wanted is not None and isinstance(value, int) and value != wanted:
        if value < 1 or not seen.main.step_ns:
            return
        edits = [replace(e, workers=value) if e.workers else e for e in finding.edits]
        result = seen.estimator.gain_range(edits)
        traced = seen.main.step_ns
        trial.predicted = result.gain / traced
        trial.predicted_low, trial.predicted_high = (
            result.low / traced,
            min(1, result.high / traced),
        )
    elif first or wanted is not None:
        low = impact.gain_ns if impact.low_ns is None else impact.low_ns
        high = impact.gain_ns if impact.high_ns is None else impact.high_ns
        trial.predicted = min(1.0, impact.gain_ns / step)
        # nothing saves more than the step, though bands of rare pauses reach beyond
        trial.predicted_low, trial.predicted_high = min(1.0, low / step), min(1.0, high / step)
