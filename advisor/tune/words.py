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
        return f"{count} trial{'s' if count > 1 else ''} would be made; none was."
    how = (
        "Interrupted: this is what is known. "
        if report.interrupted
        else "The budget was spent before all was known. "
        if report.out_of_budget
        else ""
    )
    both = report.together
    if both is None:
        if report.winners and report.winners[0].schedule:
            best = report.winners[0]
            return (
                f"{how}{best.name}: a sample takes {interval(best.gain_low, best.gain_high)} less. "
                "It is another training: see what it does to the schedule."
            )
        return f"{how}None of {count} trials makes the step surely faster."
    names = " and ".join(map(str, both.pulls))
    return (
        f"{how}{names}: the step goes from {t.format_duration(report.step_ns)} to "
        f"{t.format_duration(both.step_ns)} "
        f"(-{t.format_share(both.gain)}, {interval(both.gain_low, both.gain_high)})."
    )


def interval(low: float | None, high: float | None) -> str:
    """Of shares of the step."""
    if low is None or high is None:
        return t.NOT_MEASURED
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def runs(report: TrialReport) -> list[str]:
    """How much was run."""
    found = [f"{report.processes} processes, {report.seconds:.0f} s"]
    if report.steps:
        found.append(f"{report.steps} steps timed in each")
    if report.moved:
        found.append(f"{report.moved} files kept from where they would have been written")
    if report.processes and not report.confined:
        found.append("writes of native code could not be held on this system")
    return found


def losses(report: TrialReport) -> str:
    """Whether the program repeats itself; empty: not known."""
    if report.repeats is None:
        return ""
    return (
        "the unchanged program repeats its losses exactly"
        if report.repeats
        else "the unchanged program does not repeat its own losses: levers are held to a band"
    )


def band(trial: Trial) -> str:
    """Whether the measurement meets what was promised."""
    return {True: "inside", False: "outside", None: "–"}[trial.inside]
