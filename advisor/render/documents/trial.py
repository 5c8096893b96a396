"""Document of a report of trials: what was tried, what it gained, what to change."""

from collections.abc import Iterator
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.render.document import (
    DEFAULT,
    Block,
    Card,
    Code,
    Document,
    FieldList,
    Grid,
    Paragraph,
    RenderOptions,
    Section,
    Style,
    TextField,
)
from advisor.tune.report import (
    Trial,
    TrialReport,
    describe_losses,
    describe_prediction,
    describe_runs,
    format_interval,
    write_headline,
)

NO_TRIAL: Final = (
    "No finding of the recording names a knob. Try one of your choice with --only KNOB: "
    "docs/try.md lists them, and advisor analyze RUN shows what was found."
)
_STYLES: Final[dict[str, Style]] = {"gain": "good", "slower": "bad", "dropped": "warn"}


def build(report: TrialReport, options: RenderOptions = DEFAULT) -> Document:
    fields = [
        TextField("program", [" ".join(report.program)]),
        TextField("runs", describe_runs(report)),
        TextField("losses", [describe_losses(report)]),
    ]
    cards = [
        _build_card(trial) for trial in report.trials if trial.outcome != "not run" or trial.why
    ]
    shown = Section("Trials", [_build_table(report)], "share of the step that is saved", short=True)
    nothing = Paragraph(NO_TRIAL, indent=0)
    return Document(
        write_headline(report),
        [
            FieldList(fields, indent=0),
            shown if report.trials else nothing,
            *([Section("What each does", cards)] if cards else []),
            *_build_combination(report),
            *_build_remaining(report),
        ],
        name="trials",
    )


def _build_table(report: TrialReport) -> Grid:
    rows = []
    for trial in report.trials:
        measured = (
            t.EMPTY_CELL if trial.gain is None else format_interval(trial.gain_low, trial.gain_high)
        )
        predicted = t.EMPTY_CELL
        if trial.predicted is not None:
            predicted = format_interval(trial.predicted_low, trial.predicted_high)
        name = labels.shorten(labels.clean(trial.name), 26)
        rows.append(
            [name, predicted, measured, describe_prediction(trial), str(trial.runs), trial.outcome]
        )
    return Grid(["knob", "predicted", "measured", "range", "runs", "outcome"], rows)


def _build_card(trial: Trial) -> Card:
    memory = [
        f"{size / 1e6:,.0f} MB {where}"
        for size, where in ((trial.device_bytes, "device"), (trial.host_bytes, "host"))
        if size is not None
    ]
    checked = "" if trial.why else trial.losses
    if checked and trial.safety != "exact":
        checked += f" ({trial.safety})"
    fields = [
        TextField("fixes", [trial.rule]),
        TextField("changes", [f"by the sample; {trial.schedule}" if trial.schedule else ""]),
        TextField(trial.outcome, [trial.why], _STYLES.get(trial.outcome, "")),
        TextField("losses", [checked]),
        TextField("memory", memory),
    ]
    code = [Code(trial.diff or trial.lines, "diff" if trial.diff else "python", "write")]
    kept: list[Block] = [*code] if trial.outcome == "gain" and code[0].text else []
    return Card(
        f"{trial.name}: {trial.title}", [FieldList(fields), *kept], fix=False, always_full=True
    )


def _build_combination(report: TrialReport) -> Iterator[Block]:
    both = report.together
    if both is None or len(both.knob_settings) + len(both.left_out) < 2:
        return
    saved = format_interval(both.gain_low, both.gain_high)
    fields = [
        TextField("used", [str(knob_setting) for knob_setting in both.knob_settings]),
        TextField("left out", [f"{knob_setting} adds nothing" for knob_setting in both.left_out]),
        TextField(
            "step",
            [
                f"{t.format_duration(report.step_ns)} → {t.format_duration(both.step_ns)}, "
                f"{saved} saved"
            ],
        ),
    ]
    yield Section("Together", [FieldList(fields)])


def _build_remaining(report: TrialReport) -> Iterator[Block]:
    if report.remembered:
        yield Section("Past trials", [Paragraph(report.remembered)])
    if report.without:
        names = ", ".join(report.without)
        yield Section(
            "By hand", [Paragraph(f"No knob fixes {names}: see advisor analyze.")]
        )  # fmt: skip
