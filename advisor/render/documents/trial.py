"""Document of a report of trials: what was tried, what it gained, what to change."""

from collections.abc import Iterator
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.render import document as d
from advisor.tune.report import (
    Trial,
    TrialReport,
    describe_losses,
    describe_prediction,
    describe_runs,
    format_gain_interval,
    write_trial_headline,
)

NO_TRIAL: Final = (
    "No finding of the recording names a knob. Try one of your choice with --only KNOB: "
    "docs/try.md lists them, and advisor analyze RUN shows what was found."
)
_STYLES: Final[dict[str, d.Style]] = {"gain": "good", "slower": "bad", "dropped": "warn"}


def build(report: TrialReport, options: d.RenderOptions = d.DEFAULT) -> d.Document:
    fields = [
        d.TextField("program", [" ".join(report.program)]),
        d.TextField("runs", describe_runs(report)),
        d.TextField("losses", [describe_losses(report)]),
    ]
    cards = [
        _build_card(trial, report.titles.get(trial.rule, trial.rule))
        for trial in report.trials
        if trial.outcome != "not run"
    ]
    reasons = {trial.why: "" for trial in report.trials if trial.outcome == "not run" and trial.why}
    skipped = [
        d.Paragraph(
            f"Not run, {why}: "
            + ", ".join(labels.clean(trial.name) for trial in report.trials if trial.why == why)
        )
        for why in reasons
    ]
    table_section = d.Section(
        "Trials", [_build_table(report)], "share of the step that is saved", short=True
    )
    nothing = d.Paragraph(NO_TRIAL, indent=0)
    return d.Document(
        write_trial_headline(report),
        [
            d.FieldList(fields, indent=0),
            table_section if report.trials else nothing,
            *skipped,
            *([d.Section("What each does", cards)] if cards else []),
            *_build_combination(report),
            *_build_remaining(report),
        ],
        name="trials",
    )


def _build_table(report: TrialReport) -> d.Grid:
    rows = []
    for trial in report.trials:
        measured = (
            t.EMPTY_CELL
            if trial.gain is None
            else format_gain_interval(trial.gain_low, trial.gain_high)
        )
        predicted = t.EMPTY_CELL
        if trial.predicted is not None:
            predicted = format_gain_interval(trial.predicted_low, trial.predicted_high)
        name = labels.shorten(labels.clean(trial.name), 26)
        rows.append(
            [name, predicted, measured, describe_prediction(trial), str(trial.runs), trial.outcome]
        )
    return d.Grid(["knob", "predicted", "measured", "range", "runs", "outcome"], rows)


def _build_card(trial: Trial, problem: str) -> d.Card:
    memory = [
        f"{size / 1e6:,.0f} MB {where}"
        for size, where in ((trial.device_bytes, "device"), (trial.host_bytes, "host"))
        if size is not None
    ]
    checked = "" if trial.why else trial.losses
    if checked and trial.safety != "exact":
        checked += f" ({trial.safety})"
    fields = [
        d.TextField("fixes", [problem]),
        d.TextField("changes", [f"by the sample; {trial.schedule}" if trial.schedule else ""]),
        d.TextField(trial.outcome, [trial.why], _STYLES.get(trial.outcome, "")),
        d.TextField("losses", [checked]),
        d.TextField("memory", memory),
    ]
    code = [d.Code(trial.diff or trial.lines, "diff" if trial.diff else "python", "write")]
    code_blocks: list[d.Block] = [*code] if trial.outcome == "gain" and code[0].text else []
    return d.Card(
        f"{trial.name}: {trial.title}",
        [d.FieldList(fields), *code_blocks],
        fix=False,
        always_full=True,
    )


def _build_combination(report: TrialReport) -> Iterator[d.Block]:
    both = report.together
    if both is None or len(both.knob_settings) + len(both.left_out) < 2:
        return
    saved = format_gain_interval(both.gain_low, both.gain_high)
    fields = [
        d.TextField("used", [str(knob_setting) for knob_setting in both.knob_settings]),
        d.TextField("left out", [f"{knob_setting} adds nothing" for knob_setting in both.left_out]),
        d.TextField(
            "step",
            [
                f"{t.format_duration(report.step_ns)} → {t.format_duration(both.step_ns)}, "
                f"{saved} saved"
            ],
        ),
    ]
    yield d.Section("Together", [d.FieldList(fields)])


def _build_remaining(report: TrialReport) -> Iterator[d.Block]:
    if report.remembered:
        yield d.Section("Past trials", [d.Paragraph(report.remembered)])
    if report.without:
        items = [report.titles.get(rule, rule) for rule in report.without]
        note = d.Paragraph("No knob fixes these: advisor analyze says how to.")
        yield d.Section("By hand", [d.Items(items, "∙"), note])
