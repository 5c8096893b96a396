"""Trials: the fixes that ``advisor try`` measured on this run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular
from advisor.dashboard import page_view
from advisor.dashboard.components import (
    banner,
    card,
    element,
    empty_state,
    fact_list,
    head,
    page,
    table,
    tiles,
)
from advisor.dashboard.page_view import PageView
from advisor.tune.report import (
    FILE,
    MAX_BYTES,
    Trial,
    TrialReport,
    describe_losses,
    describe_prediction,
    describe_runs,
    format_interval,
    write_headline,
)

COLUMNS = ("knob", "rule", "predicted", "measured", "in range", "losses", "memory", "outcome")


def has_content(view: PageView) -> bool:
    """Whether the run has trials."""
    return (Path(view.entry.path) / FILE).is_file()


def layout(**query: object) -> Any:
    """The page."""
    view = page_view.view(**query)
    try:
        report = read(view.entry.path)
    except (AdvisorError, OSError) as error:
        return page(
            head("Trials"), empty_state("These trials cannot be read", labels.clean(str(error)))
        )
    if report is None:
        return page(
            head("Trials"),
            empty_state(
                "No trials",
                "This page shows the measured gain of each fix and whether losses changed.",
                "Run advisor try RUN. It reruns the recorded program with and without each fix "
                "that needs no file change.",
            ),
        )
    both = report.together
    saved = t.NOT_MEASURED if both is None else format_interval(both.gain_low, both.gain_high)
    return page(
        head("Trials", labels.clean(write_headline(report))),
        banner([describe_losses(report)] if report.repeats is False else []),
        tiles(
            [
                ("Step before", t.format_duration(report.step_ns), f"{report.steps} steps per run"),
                (
                    "Step with all winning changes",
                    t.format_duration(None if both is None else both.step_ns),
                    "" if both is None else labels.clean(", ".join(map(str, both.knob_settings))),
                ),
                ("Saved", saved, "of the mean step, 95% confidence"),
            ]
        ),
        _table(report.trials) if report.trials else None,
        *[_changes(trial) for trial in report.winners],
        card(
            "How it was measured",
            fact_list(
                [
                    ("Program", labels.clean(" ".join(report.program))),
                    ("Runs", labels.clean(" · ".join(describe_runs(report)))),
                    ("Losses", describe_losses(report) or t.NOT_MEASURED),
                    ("Past trials", labels.clean(report.remembered) or "none for these rules"),
                    ("Needs manual change", labels.clean(", ".join(report.without)) or "–"),
                ]
            ),
        ),
    )


def read(path: str) -> TrialReport | None:
    """The trials in a run's folder; ``None``: there are none."""
    file = Path(path) / FILE
    if not file.is_file():
        return None
    return TrialReport.from_json(read_regular(file, MAX_BYTES))


def _table(trials: list[Trial]) -> Any:
    rows = [
        [
            labels.clean(trial.name),
            labels.clean(trial.rule),
            format_interval(trial.predicted_low, trial.predicted_high) if trial.predicted else "–",
            "–" if trial.gain is None else format_interval(trial.gain_low, trial.gain_high),
            describe_prediction(trial),
            labels.clean(trial.losses) or "–",
            t.format_bytes(trial.device_bytes or trial.host_bytes),
            labels.clean(f"{trial.outcome}: {trial.why}" if trial.why else trial.outcome),
        ]
        for trial in trials
    ]
    return card(
        "Changes tried",
        table(COLUMNS, rows, caption="Gain as a share of the step", names=(0, 7), stacked=True),
    )


def _changes(trial: Trial) -> Any:
    return card(
        labels.clean(trial.title),
        element("P", labels.clean(f"Measured per sample. {trial.schedule}"))
        if trial.schedule
        else None,
        element("Pre", element("Code", labels.clean(trial.diff or trial.lines, lines=True))),
        aside=labels.clean(trial.name),
    )
