"""Trials: the fixes that ``advisor try`` measured on this run."""

from pathlib import Path
from typing import Any

from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular
from advisor.dashboard import components as ui
from advisor.dashboard import page_view
from advisor.dashboard.page_view import PageView
from advisor.render.documents.trial import build
from advisor.tune.report import (
    FILE,
    MAX_TRIALS_BYTES,
    TrialReport,
    describe_losses,
    format_gain_interval,
    write_trial_headline,
)


def has_content(view: PageView) -> bool:
    """Return whether the run has a report of trials."""
    return (Path(view.entry.path) / FILE).is_file()


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    try:
        report = read_trials(view.entry.path)
    except (AdvisorError, OSError) as error:
        return ui.empty_page("Trials", "These trials cannot be read", labels.clean(str(error)))
    if report is None:
        return ui.empty_page(
            "Trials",
            "No trials",
            "This page shows the measured gain of each fix and whether losses changed.",
            "Run advisor try RUN. It reruns the recorded program with and without each fix that "
            "needs no file change.",
        )
    method, *blocks = build(report).blocks
    together = report.together
    saved = (
        t.NOT_MEASURED
        if together is None
        else format_gain_interval(together.gain_low, together.gain_high)
    )
    return ui.page(
        ui.page_heading("Trials", labels.clean(write_trial_headline(report))),
        ui.banner([describe_losses(report)] if report.repeats is False else []),
        ui.tiles(
            [
                ("Step before", t.format_duration(report.step_ns), f"{report.steps} steps per run"),
                (
                    "Step with all winning changes",
                    t.format_duration(None if together is None else together.step_ns),
                    ""
                    if together is None
                    else labels.clean(", ".join(map(str, together.knob_settings))),
                ),
                ("Saved", saved, "of the mean step, 95% confidence"),
            ]
        ),
        *map(ui.draw_block, blocks),
        ui.card("How it was measured", ui.draw_block(method)),
    )


def read_trials(path: str) -> TrialReport | None:
    """Read the trials in a run's folder. Return ``None`` if there are none."""
    file = Path(path) / FILE
    if not file.is_file():
        return None
    return TrialReport.from_json(read_regular(file, MAX_TRIALS_BYTES))
