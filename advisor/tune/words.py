"""What is said of trials, wherever they are shown."""

from __future__ import annotations

from advisor.core import text as t
from advisor.tune.report import Trial, TrialReport


def headline(report: TrialReport) -> str:
    """One sentence."""
    count = len(report.trials)
    if not count:
        return f"Nothing to try. {report.verdict}"
    if report.dry:
        return f"Dry run: {t.count_noun(count, 'trial')} planned, none run."
    how = (
        "Interrupted; results so far. "
        if report.interrupted
        else "The time budget ran out before every trial finished. "
        if report.out_of_budget
        else ""
    )
    both = report.together
    if both is None:
        if report.winners and report.winners[0].schedule:
            best = report.winners[0]
            return (
                f"{how}{best.name}: a sample takes {interval(best.gain_low, best.gain_high)} less "
                "time. This is another training: check what it does to the schedule."
            )
        return f"{how}No gain is shown in {t.count_noun(count, 'trial')}."
    names = " and ".join(map(str, both.knob_settings))
    return (
        f"{how}{names}: {t.format_duration(report.step_ns)} → {t.format_duration(both.step_ns)} "
        f"per step (-{t.format_share(both.gain)}, {interval(both.gain_low, both.gain_high)})."
    )


def interval(low: float | None, high: float | None) -> str:
    """Of shares of the step."""
    if low is None or high is None:
        return t.NOT_MEASURED
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def runs(report: TrialReport) -> list[str]:
    """How much was run."""
    result = [f"{report.processes} processes, {report.seconds:.0f} s"]
    if report.steps:
        result.append(f"{report.steps} steps timed in each")
    if report.moved:
        result.append(f"{report.moved} files written to the scratch folder instead")
    if report.processes and not report.confined:
        result.append("writes by native code are not redirected on this system")
    return result


def losses(report: TrialReport) -> str:
    """Whether the program repeats itself; empty: unknown."""
    if report.repeats is None:
        return ""
    return (
        "the unchanged program repeats its losses exactly"
        if report.repeats
        else "losses of the unchanged program vary between runs: knobs are allowed as much"
    )


def band(trial: Trial) -> str:
    """Whether the measured gain is within the predicted range."""
    return {True: "in range", False: "outside", None: "–"}[trial.inside]
