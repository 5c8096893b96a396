"""A report of trials as terminal text."""

from __future__ import annotations

from advisor.core import text as t
from advisor.render.page import Page
from advisor.tune.report import Trial, TrialReport
from advisor.tune.words import band, headline, interval, losses, runs

NOTHING = (
    "No finding of the recording names a lever. One of your choice is tried with --only LEVER: "
    "see docs/try.md for those there are, and advisor analyze RUN for what was found."
)
STYLES = {"gain": "bold green", "slower": "bold red", "dropped": "yellow"}


def render(report: TrialReport, *, width: int = 80, colour: bool = False) -> str:
    """Text of at most ``width`` columns."""
    page = Page(width, colour=colour)
    page.wrapped(t.clean(headline(report)), style="bold")
    page.blank()
    page.field("program", t.clean(" ".join(report.program)), indent=0)
    page.flow("runs", runs(report), indent=0)
    page.field("losses", losses(report), indent=0)
    if report.trials:
        page.section("Trials", "share of the step that is saved")
        page.table(
            ["knob", "predicted", "measured", "band", "runs", "outcome"],
            [_row(trial) for trial in report.trials],
        )
    else:
        page.blank()
        page.wrapped(t.clean(NOTHING))
    for trial in report.trials:
        _more(page, trial)
    _together(page, report)
    if report.remembered:
        page.section("Past trials")
        page.wrapped(t.clean(report.remembered), indent=2)
    if report.without:
        page.section("By hand")
        page.wrapped(
            t.clean(f"No lever cures {', '.join(report.without)}: see advisor analyze."), indent=2
        )
    return page.getvalue()


def _row(trial: Trial) -> list[str]:
    measured = "–" if trial.gain is None else interval(trial.gain_low, trial.gain_high)
    predicted = "–"
    if trial.predicted is not None:
        predicted = interval(trial.predicted_low, trial.predicted_high)
    return [
        t.shorten(t.clean(trial.name), 26),
        predicted,
        measured,
        band(trial),
        str(trial.runs),
        trial.outcome,
    ]


def _more(page: Page, trial: Trial) -> None:
    if trial.outcome == "not run" and not trial.why:
        return
    page.section(t.clean(trial.name), trial.title)
    page.field("cures", trial.rule, indent=2)
    if trial.schedule:
        page.field("changes", t.clean(f"by the sample; {trial.schedule}"), indent=2)
    if trial.why:
        page.field(trial.outcome, t.clean(trial.why), indent=2, style=STYLES.get(trial.outcome, ""))
    elif trial.losses:
        page.field("losses", f"{trial.losses} ({trial.safety})", indent=2)
    memory = [
        f"{size / 1e6:,.0f} MB {where}"
        for size, where in ((trial.device_bytes, "device"), (trial.host_bytes, "host"))
        if size is not None
    ]
    page.flow("memory", memory, indent=2)
    if trial.outcome == "gain":
        page.code("write", trial.diff or trial.lines, indent=2)


def _together(page: Page, report: TrialReport) -> None:
    both = report.together
    if both is None or len(both.pulls) + len(both.left_out) < 2:
        return
    page.section("Together")
    page.flow("pulled", map(str, both.pulls), indent=2)
    page.flow("left out", (f"{pull} adds nothing" for pull in both.left_out), indent=2)
    page.field(
        "step",
        f"{t.format_duration(report.step_ns)} → {t.format_duration(both.step_ns)}, "
        f"{interval(both.gain_low, both.gain_high)} saved",
        indent=2,
    )
