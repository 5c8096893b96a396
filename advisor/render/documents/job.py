"""The document of a job: its ranks' steps, those that differ, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from advisor.advise.ranks import sentences as w
from advisor.advise.ranks import views
from advisor.core import text as t
from advisor.measure.ranks.job_report import JobFinding, JobReport, Odd
from advisor.render.document import (
    DEFAULT,
    Block,
    Card,
    Document,
    FieldList,
    Grid,
    Items,
    RenderOptions,
    Section,
    TextField,
)
from advisor.render.figures import Histogram, RankMap

MAX_GROUPS: Final = 6
"""Groups of ranks that a terminal lists."""
MAX_TEXT: Final = 400
"""Characters of a reason."""


def build(report: JobReport, options: RenderOptions = DEFAULT) -> Document:
    """The document."""
    return Document(
        report.verdict or "A job",
        [
            FieldList([TextField(label, parts) for label, parts in w.scope(report)], indent=0),
            *_steps(report),
            *_map(report),
            *_groups(report),
            *_outliers(report),
            *_findings(report),
            *_rest(report),
        ],
        name="job",
        footer=f"advisor {report.version}",
        notes=[w.work(report)] if w.work(report) else [],
    )


def _steps(report: JobReport) -> Iterator[Block]:
    bins = views.histogram(report)
    if bins:
        figure = Histogram(("mean step", "ranks"), [(one.words, one.ranks) for one in bins])
        yield Section("The ranks' steps", [figure], "mean step, ranks")


def _map(report: JobReport) -> Iterator[Block]:
    heat = views.heat_map(report)
    if heat is None:
        return
    rows = [
        [
            views.who(row),
            t.format_duration(row.step_ns),
            *(t.format_duration(value) for value in row.values),
        ]
        for row in heat.rows
    ]
    names = [views.label(name) for name in heat.classes]
    figure = RankMap(
        "Time per step by rank and class",
        names,
        [str(row.rank) for row in heat.rows],
        lambda column, row: heat.tint(heat.rows[column], row),
        lambda column, row: heat.words(heat.rows[column], row),
        t.format_duration(heat.scale_ns),
        Grid(["rank", "step", *names], rows),
        heat.note,
    )
    yield Section("Ranks × classes of time", [figure], "compared with the median rank")


def _groups(report: JobReport) -> Iterator[Block]:
    if not report.alike:
        return
    total = dict.fromkeys(report.classes, 0.0)
    for group in report.alike:
        for name, ns in group.time.items():
            total[name] = total.get(name, 0.0) + ns * group.count
    rows = [
        [
            t.shorten(t.clean(group.name), 24),
            w.ranks(group.ranks),
            t.format_count(group.count),
            t.format_duration(group.step_ns),
            *(t.format_duration(group.time.get(name)) for name in report.classes),
        ]
        for group in report.alike
    ]
    head = ["group", "ranks", "how many", "step", *map(views.label, report.classes)]
    smallest = sorted(report.classes, key=lambda name: total[name])
    table = Grid(
        head,
        rows,
        align="ll" + "r" * (len(head) - 2),
        short=rows[:MAX_GROUPS],
        more=f"{t.count_noun(len(rows) - MAX_GROUPS, 'more group')}: --format json has all",
        optional=[1, *(4 + report.classes.index(name) for name in smallest)],
    )
    yield Section("Groups of similar ranks", [table], "median per step")


def _outliers(report: JobReport) -> Iterator[Block]:
    if report.odd:
        yield Section("Outliers", [_outlier(odd) for odd in report.odd])


def _outlier(odd: Odd) -> Card:
    fields = [
        TextField("seen", w.odd_figures(odd)),
        TextField("why", [t.clean(odd.why)]),
        TextField("fix", [t.clean(odd.fix)], "strong"),
    ]
    return Card(f"{w.odd_name(odd)}: {w.odd_kind(odd)}", [FieldList(fields)], fix=False, full=True)


def _findings(report: JobReport) -> Iterator[Block]:
    if report.findings:
        cards = [_card(report, item, n) for n, item in enumerate(report.findings, start=1)]
        yield Section("What to change", cards, "gain of the job's step")


def _card(report: JobReport, finding: JobFinding, number: int) -> Card:
    fields = [
        TextField("why", [finding.summary], prose=True),
        TextField("fix", [finding.fix], "strong", prose=True),
    ]
    return Card(
        finding.title,
        [FieldList(fields, indent=4)],
        number=str(number),
        gain=" · ".join(w.finding_parts(report, finding)),
        place=t.clean(finding.place),
        tag=finding.severity,
        details=[FieldList([TextField("verify", [finding.verify])], indent=4)]
        if finding.verify
        else [],
    )


def _rest(report: JobReport) -> Iterator[Block]:
    cases = [f"{item.text}: {w.gain(item)}" for item in report.what_if]
    missing = [w.missing(item) for item in report.missing]
    skipped = [f"{name}: {why}" for name, why in report.not_checked.items()]
    for title, lines, mark in (
        ("What if", cases, "•"),
        ("Ranks that were not read", missing, "!"),
        ("Skipped checks", skipped, "?"),
    ):
        if lines:
            yield Section(title, [Items([t.shorten(line, MAX_TEXT) for line in lines], mark)])
