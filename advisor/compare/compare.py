"""Comparison of two runs or reports, the gain that fixes had, and what limits the comparison."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import advisor
from advisor.advise.engine import AnalysisResult, Options, analyze_in_full
from advisor.advise.program_wording import mark_steps_of
from advisor.compare.amounts import compare_amounts, counters_change_verdict
from advisor.compare.comparison import (
    Change,
    Comparison,
    FindingChange,
    RealisedGain,
    Side,
    StepTimeChange,
)
from advisor.compare.comparison_text import (
    has_guessed_steps,
    is_of_whole_recordings,
    is_unjudged,
    write_comparison_verdict,
)
from advisor.compare.device_work import (
    can_match_by_shape,
    compare_kernels,
    compare_work,
    matched_share,
)
from advisor.compare.findings import RemainingFinding, compare_findings, find_remaining
from advisor.compare.steps import UNMARKED_STEPS_NOTE, compare_steps
from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import AUXILIARY_INPUTS_BY_NAME
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.core.run_directory import is_run
from advisor.core.trace import Run
from advisor.measure import Analysis
from advisor.measure.inference.inference_steps import TRAINING_ROWS
from advisor.replay import ledger
from advisor.replay.estimators import REPLAY

MIN_SAME_OPERATORS_SHARE = 0.8
"""Minimum matched share, by operator alone, at which only the input shapes differ."""
MAX_DISAGREEMENT = 0.1
"""Largest relative difference at which gain and prediction still agree, even with narrow ranges. A
replay that misses the step by this share still estimates gains
(``replay_quality.MAX_STEP_ERROR``)."""

MIN_MATCHED, MIN_MATCHED_RENAMED = 0.2, 0.3
"""Minimum share of time in work of both runs, below which they are different programs. The second
limit applies to files of different names."""
MIN_COMMON_NAMES = 0.4
"""Minimum share of the operators' names that two programs have in common. In 40 pairs of a program
and its fixed version it is 0.51 or more; in 93% of pairs of other programs it is less, or one of
them does not train."""
_MIN_NAMES = 20
"""Number of operators' names below which a recording may be of any program."""

ONE_TRAINS = "One of the two trains, the other does not"

RunOrFiles = str | Path | Sequence[str | Path] | Run


def compare(
    before: RunOrFiles | Report, after: RunOrFiles | Report, options: Options | None = None
) -> Comparison:
    """Read, analyze and compare two runs. A saved Report can replace a run; its step times compare
    just as exactly. Raises AdvisorError as ``analyze`` does."""
    sides = [
        source if isinstance(source, Report) else analyze_in_full(source, options)
        for source in (before, after)
    ]
    if isinstance(sides[0], AnalysisResult) and isinstance(sides[1], AnalysisResult):
        return compare_examined(sides[0], sides[1])
    reports = [side if isinstance(side, Report) else side.report for side in sides]
    saved = [index for index, side in enumerate(sides) if isinstance(side, Report)]
    return compare_reports(reports[0], reports[1], saved=saved)


def compare_reports(
    before: Report, after: Report, paths: Sequence[str] = ("", ""), saved: Sequence[int] = ()
) -> Comparison:
    """Compare two runs by their reports. ``paths``: their names, by default the first trace of
    each. ``saved``: the sides (0, 1) without a trace. The limits say what is not compared for this
    reason."""
    comparison = _start_comparison(before, after, paths)
    changes = compare_findings(before, after, None)
    comparison.findings = [change for change, _ in changes]
    _name_unjudged(comparison)
    comparison.realised = RealisedGain(rules=[], reason="there is no trace to replay")
    comparison.limits = list_comparison_limits(before, after, comparison)
    if saved:
        saved_runs = "both runs" if len(saved) > 1 else f"the run {('before', 'after')[saved[0]]}"
        comparison.limits.insert(
            0,
            f"Only a saved report of {saved_runs} is available: device work and predicted gains "
            "are not compared, and findings of one side are not checked on the other.",
        )
    comparison.verdict = write_comparison_verdict(comparison)
    return comparison


def compare_examined(before: AnalysisResult, after: AnalysisResult) -> Comparison:
    """Compare two runs that were analyzed already; of several ranks, the reported one."""
    a, b = before.main, after.main
    paths = [str(each.run.path or each.main.trace.meta.path) for each in (before, after)]
    comparison = _start_comparison(before.report, after.report, paths)

    def search(finding: Finding, of_before: bool) -> RemainingFinding | None:
        run, other_run = (before, after) if of_before else (after, before)
        return find_remaining(finding, run, other_run)

    changes = compare_findings(before.report, after.report, search)
    comparison.findings = [change for change, _ in changes]
    comparison.work, comparison.work_rest = compare_work(a, b)
    comparison.matched = matched_share(comparison.work, comparison.work_rest)
    if comparison.matched is not None:
        _judge_by_work(comparison, a, b, contrast_operators(before.report, after.report))
    if comparison.same_device is not False:
        comparison.kernels, comparison.kernels_rest = compare_kernels(a, b)
    _name_unjudged(comparison)
    fixed = [old for change, old in changes if change.change == "fixed" and old is not None]
    comparison.realised = measure_realised_gain(fixed, before, comparison)
    comparison.limits = list_comparison_limits(before.report, after.report, comparison)
    if not can_match_by_shape(a, b) and (
        comparison.before.record_shapes or comparison.after.record_shapes
    ):
        comparison.limits.append("Only one side has shapes: work is matched by operator alone.")
    comparison.verdict = write_comparison_verdict(comparison)
    if before.report.scope.step_source == after.report.scope.step_source == "counters":
        comparison.verdict = counters_change_verdict(before.report, after.report)
    return comparison


def _judge_by_work(c: Comparison, a: Analysis, b: Analysis, contrast: str) -> None:
    """Decide by device work whether the programs differ, or only their input shapes. ``contrast``
    says which operators show that they differ, or is empty."""
    assert c.matched is not None
    c.other_programs = contrast
    if contrast or c.matched >= MIN_MATCHED:
        return
    if can_match_by_shape(a, b):
        work, work_rest = compare_work(a, b, shapes=False)
        if (matched_share(work, work_rest) or 0.0) >= MIN_SAME_OPERATORS_SHARE:
            c.other_shapes, c.work, c.work_rest = True, work, work_rest
            return
    c.other_programs = (
        f"Only {t.format_share(c.matched)} of the device time is in operators and shapes that both "
        "have"
    )


_UNJUDGED_CHANGES: Final[dict[str, Change]] = {
    "fixed": "only before", "replaced": "only before", "new": "only after", "remaining": "in both"
}  # fmt: skip
"""Names of changes where neither run is a fix of the other."""


def _name_unjudged(c: Comparison) -> None:
    """Call no finding fixed or new if the two are not comparable."""
    for finding in c.findings if is_unjudged(c) else ():
        finding.change = _UNJUDGED_CHANGES.get(finding.change, finding.change)


def _start_comparison(before: Report, after: Report, paths: Sequence[str]) -> Comparison:
    """Return the part of a comparison that two reports alone determine."""
    _refuse_other_kinds(before, after, paths)
    sides = [
        describe_side(report, path) for report, path in zip((before, after), paths, strict=True)
    ]
    names = [each.device_name for each in sides]
    steps = compare_steps(before, after)
    steps.notes += compile_payback(before, after, steps)
    return Comparison(
        version=advisor.__version__,
        verdict="",
        before=sides[0],
        after=sides[1],
        same_device=None if None in names else names[0] == names[1],
        steps=steps,
        amounts=compare_amounts(before, after),
        other_programs=find_other_programs(before, after),
        realised=RealisedGain(rules=[]),
    )


def _refuse_other_kinds(before: Report, after: Report, paths: Sequence[str]) -> None:
    """Raise AdvisorError unless both are traces, or both are of the same other tool."""
    kinds = [
        each.scope.step_source if each.scope.step_source in AUXILIARY_INPUTS_BY_NAME else "trace"
        for each in (before, after)
    ]
    if kinds[0] != kinds[1]:
        descriptions = [f"{path} ({kind})" for path, kind in zip(paths, kinds, strict=True)]
        raise AdvisorError(
            f"{' and '.join(descriptions)} cannot be compared: give two traces or runs, two memory "
            "snapshots, or two kernel profiles"
        )


def find_other_programs(before: Report, after: Report, *, strict: bool = False) -> str:
    """Say what shows that two reports are of different programs; empty if nothing does. Runs of one
    file are one program. ``strict``: files of different names need common operators."""
    reports = (before, after)
    names = [str((each.recorded and each.recorded.program) or "") for each in reports]
    renamed = all(names) and names[0] != names[1]
    if all(names) and not renamed:
        return ""
    if contrast := contrast_operators(before, after):
        return contrast
    if bool(before.time) != bool(after.time):
        return ""
    min_common = MIN_MATCHED_RENAMED if renamed else MIN_MATCHED
    old_times, new_times = map(_time_by_operator, reports)
    if total := min(sum(old_times.values()), sum(new_times.values())):
        common = sum(min(ns, new_times.get(name, 0.0)) for name, ns in old_times.items()) / total
        text = f"Only {t.format_share(common)} of the time is in operators that both have"
        return text if common < min_common else ""
    if before.recorded and after.recorded and before.recorded.inference != after.recorded.inference:
        return ONE_TRAINS
    if renamed and strict:
        return f"The programs are {labels.clean(names[0])} and {labels.clean(names[1])}"
    return ""


def contrast_operators(before: Report, after: Report) -> str:
    """Say which operators show that two reports are of different programs. Empty if none do, if few
    are recorded, or if one program is compiled, which replaces its operators."""
    names = [set(each.operator_names) for each in (before, after)]
    if min(map(len, names)) < _MIN_NAMES or any("Compiled" in name for name in names[0] ^ names[1]):
        return ""
    trains = [any(re.search(TRAINING_ROWS, name) for name in each) for each in names]
    if trains[0] != trains[1]:
        return ONE_TRAINS
    common = len(names[0] & names[1]) / len(names[0] | names[1])
    if common >= MIN_COMMON_NAMES:
        return ""
    return f"Only {t.format_share(common)} of the names of operators are in both"


def _time_by_operator(report: Report) -> dict[str, float]:
    """Return shares of device or host time by operator. Some operators may be missing."""
    result: dict[str, float] = {}
    for item in report.rooflines if report.time else report.operators:
        if item.name is not None:
            result[item.name] = result.get(item.name, 0.0) + item.share
    return result


def describe_side(report: Report, path: str = "") -> Side:
    """Describe one of the two runs. ``path`` is its name, by default its first trace."""
    first = report.inputs[0] if report.inputs else None
    scope = report.scope
    return Side(
        path=path or (first.path if first is not None else ""),
        rank=scope.rank,
        window=first.window if first is not None else 0,
        ranks=max(1, len(report.inputs)),
        status=report.status,
        verdict=report.verdict,
        device_name=scope.device_name,
        on_cpu=scope.device_name is None and not report.time and bool(report.operators),
        step_source=scope.step_source,
        steps_used=scope.steps_used,
        step_ns=scope.step_ns,
        record_shapes=first.record_shapes if first is not None else None,
        with_stack=first.with_stack if first is not None else None,
        profile_memory=first.profile_memory if first is not None else None,
        truncated=any(item.truncated for item in report.inputs),
        samples=None if report.recorded is None else report.recorded.samples_per_step,
        other_programs_ns=None if report.recorded is None else report.recorded.other_programs_ns,
        crash=t.describe_crashes(report.crashes),
        framework=scope.framework,
    )


def compile_payback(before: Report, after: Report, steps: StepTimeChange) -> list[str]:
    """Say after how many steps the time to compile is recovered, if only the later run compiled.
    The earlier run's steps give the eager time. Empty if the number of steps is unknown."""
    log = after.compilation
    if log is None or not log.ns or before.compilation is not None:
        return []
    if steps.difference_ns is None:
        return []
    compiling = f"torch.compile took {t.format_duration(log.ns)}"
    if steps.verdict != "faster":
        return [f"{compiling}, and the steps are not shorter: this time is not recovered."]
    count = t.count_noun(math.ceil(log.ns / -steps.difference_ns), "step")
    min_steps = math.ceil(log.ns / -(steps.low_ns or steps.difference_ns))
    text = f"{compiling}, which is recovered after {count}"
    if steps.high_ns is None or steps.high_ns >= 0:
        return [f"{text}."]
    max_steps = math.ceil(log.ns / -steps.high_ns)
    return [f"{text} ({t.format_count(min_steps)} to {t.format_count(max_steps)})."]


# -- predicted and measured gain ----------------------------------------------------------------


def measure_realised_gain(
    findings: list[Finding], before: AnalysisResult, c: Comparison
) -> RealisedGain:
    """Compare the predicted saving of all fixed findings together with the measured saving."""
    steps = c.steps
    fixed = [
        finding
        for finding in findings
        if finding.edits
        and not finding.other_rank
        and finding.impact is not None
        and finding.impact.currency == "step_time"
    ]
    result = RealisedGain(rules=[f.rule for f in fixed])
    if not fixed:
        result.reason = "no finding with an estimated gain was fixed"
        return result
    edits = [edit for finding in fixed for edit in finding.edits]
    impact = fixed[0].impact if len(fixed) == 1 else None
    result.predicted_ns = None if impact is None else impact.gain_ns  # from the report
    low, high = (None, None) if impact is None else (impact.low_ns, impact.high_ns)
    if result.predicted_ns is not None and low is not None and high is not None:
        result.predicted_low_ns, result.predicted_high_ns = low, high
    else:
        estimate = before.estimator.gain_range(edits)
        result.predicted_ns = estimate.gain
        result.predicted_low_ns, result.predicted_high_ns = estimate.low, estimate.high
    result.method = before.estimator.method
    if steps.difference_ns is None or steps.low_ns is None or steps.high_ns is None:
        result.reason = steps.reason.partition("; ")[0]
        return result
    result.measured_ns = -steps.difference_ns
    result.measured_low_ns, result.measured_high_ns = -steps.high_ns, -steps.low_ns
    if c.same_device is False:
        result.reason = "the GPUs differ, and the prediction is for the one before"
    elif c.other_shapes:
        result.reason = "the input shapes differ, and the prediction is for those before"
    elif c.other_programs:
        result.reason = "the work differs, and the prediction is for the work before"
    elif _has_other_batch(c):
        result.reason = "the batch sizes differ, and the prediction is for the one before"
    elif other := find_other_fixes(c, result.rules):
        names = t.list_names(f"'{change.title}'" for change in other)
        verb, it = ("was", "it") if len(other) == 1 else ("were", "them")
        result.reason = f"{names} {verb} fixed too, and the prediction leaves {it} out"
    elif result.method == REPLAY:
        error = abs(result.measured_ns - result.predicted_ns)
        result.agrees = error <= MAX_DISAGREEMENT * max(
            result.measured_ns, result.predicted_ns
        ) or (
            result.measured_low_ns <= result.predicted_high_ns
            and result.predicted_low_ns <= result.measured_high_ns
        )
    else:
        result.agrees = result.measured_low_ns <= result.predicted_high_ns
    if result.agrees and result.measured_low_ns <= 0 <= result.measured_high_ns:
        result.agrees = None
        result.reason = "the measured change may be none at all"
    return result


def find_other_fixes(c: Comparison, predicted: list[str]) -> list[FindingChange]:
    """Return the fixed findings with a gain that is not part of the predicted one: their rules are
    not among ``predicted``. The measured saving has theirs too."""
    return [
        change
        for change in c.findings_with("fixed")
        if change.before_gain_ns and change.rule not in predicted
    ]


def _has_other_batch(c: Comparison) -> bool:
    return None not in (c.before.samples, c.after.samples) and c.before.samples != c.after.samples


# -- limits -------------------------------------------------------------------------------------


def list_comparison_limits(before: Report, after: Report, c: Comparison) -> list[str]:
    """List the reasons why the two are hard to compare, one sentence each."""
    old, new = c.before, c.after
    result = []
    is_same = before.scope == after.scope and before.kernel_counters == after.kernel_counters
    is_same = is_same and before.triton_kernels == after.triton_kernels
    is_same = is_same and before.compilation == after.compilation
    if is_same and before.step_durations == after.step_durations and before.memory == after.memory:
        result.append("Both are the same recording.")
    if c.same_device is False:
        result.append(
            f"The GPUs differ ({old.device_name} and {new.device_name}): a change may come "
            "from the GPU, not the program. Work is matched by operator, not by kernel name."
        )
    elif c.same_device is None and (old.device_name or new.device_name):
        result.append("The GPU model of one side is unknown: the two GPUs may differ.")
    for which, report, counterpart in (("before", before, after), ("after", after, before)):
        if not report.time and counterpart.time:
            result.append(f"The trace {which} has no GPU work, so device time is not compared.")
    result += _list_step_limits(c, before)
    earlier = [each.scope.launched_before_ns for each in (before, after)]
    if any(earlier):
        durations = [t.format_duration(ns) if ns else "none" for ns in earlier]
        result.append(
            f"Work that was launched before the recording is excluded: {durations[0]} before, "
            f"{durations[1]} after."
        )
    if c.other_shapes:
        result.append(
            "The same operators run on other input shapes: another batch size or sequence length. "
            "Device work is compared by operator alone. Compare time per sample or token."
        )
    elif c.other_programs:
        result.append(f"{c.other_programs}: these look like different programs.")
    elif c.matched is None and (why := find_other_programs(before, after, strict=True)):
        result.append(f"{why}: whether they do the same work is not recorded.")
    if _has_other_batch(c):
        result.append(
            f"A step has {t.count_noun(old.samples or 0, 'sample')} before and {new.samples} "
            "after: "
            "compare time per sample, not per step."
        )
    if old.ranks != new.ranks:
        result.append(
            f"{t.count_noun(old.ranks, 'rank')} before and {new.ranks} after; one of each is "
            "compared."
        )
    elif old.ranks > 1:
        result.append(f"One of {old.ranks} ranks is compared (rank {old.rank}); --rank chooses.")
    for which, each in (("before", old), ("after", new)):
        if each.truncated:
            result.append(f"The trace {which} is truncated.")
    return result


def _list_step_limits(c: Comparison, before: Report) -> list[str]:
    """Describe how steps were found, if that limits the comparison."""
    sources = {"before": c.before.step_source, "after": c.after.step_source}
    unmarked = [which for which, source in sources.items() if source == "whole trace"]
    result = []
    if is_of_whole_recordings(c):
        how = mark_steps_of(before)
        result.append(
            "No steps are marked in either: figures are totals of the whole recordings. To "
            f"compare iterations, {how}."
        )
    elif unmarked:
        result.append(
            f"No steps are marked {unmarked[0]}: figures per step are totals of the whole "
            "recording there, and comparable only if both did the same amount of work."
        )
    elif sources["before"] != sources["after"]:
        result.append(f"A step is {sources['before']} before and {sources['after']} after.")
    if has_guessed_steps(c):
        result.append(UNMARKED_STEPS_NOTE)
    return result


# -- past predictions ---------------------------------------------------------------------------


def append_prediction(comparison: Comparison, file: Path, *, unix: int) -> bool:
    """Record the predicted and measured saving of a fix in a ledger, once. Return whether it was
    recorded: both sides must be runs, and one finding with an estimated gain gone."""
    result = prediction_of(comparison, unix=unix)
    after = Path(comparison.after.path)
    if result is None or not is_run(after) or not is_run(comparison.before.path):
        return False
    key = (result.rule, result.predicted, result.measured)
    if any(
        (row.rule, row.predicted, row.measured) == key
        for row in ledger.read_ledger(file).predictions
    ):
        return False  # compared before
    ledger.append_to_ledger(file, [result])
    return True


def prediction_of(comparison: Comparison, *, unix: int) -> ledger.Prediction | None:
    """Return the tested prediction of a single fix, or ``None`` if there is none."""
    fix = comparison.realised
    step = comparison.before.step_ns
    if len(fix.rules) != 1 or not step or comparison.other_programs:
        return None
    if find_other_fixes(comparison, fix.rules):
        return None
    if fix.predicted_ns is None or fix.measured_ns is None:
        return None

    def share(ns: float | None, otherwise: float) -> float:
        return (otherwise if ns is None else ns) / step

    return ledger.Prediction(
        unix=unix,
        source="compare",
        rule=fix.rules[0],
        device=comparison.before.device_name or "",
        predicted=fix.predicted_ns / step,
        low=share(fix.predicted_low_ns, fix.predicted_ns),
        high=share(fix.predicted_high_ns, fix.predicted_ns),
        measured=fix.measured_ns / step,
        measured_low=share(fix.measured_low_ns, fix.measured_ns),
        measured_high=share(fix.measured_high_ns, fix.measured_ns),
    )
