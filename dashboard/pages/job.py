"""Job: many ranks at a glance; a click opens the timeline of one, and reads its trace alone."""

from __future__ import annotations

from typing import Any

import dash
from dash import ClientsideFunction, Input, Output

from advisor.advise.ranks import sentences as w
from advisor.advise.ranks import views
from advisor.core import text as t
from advisor.dashboard import current, figures
from advisor.dashboard.current import PageView
from advisor.dashboard.grid import Column, grid, register_search
from advisor.dashboard.jobs import key_of, split
from advisor.dashboard.parts import (
    banner,
    card,
    el,
    empty,
    facts,
    figure,
    head,
    link,
    page,
    table,
    tiles,
)
from advisor.dashboard.session import DashboardSession
from advisor.measure.ranks.job_report import JobReport

STRIP = 128
"""Ranks beside each other on the map."""
ROW = 15
"""Pixels of a class on the map."""
MAX_SHOWN = 100
"""Lines of a kind."""
MAP, RANKS = "job-map", "job-ranks"


def has_content(view: PageView) -> bool:
    """Whether a job of many ranks is open."""
    return any(entry.job is not None for entry in view.session.entries)


def layout(**query: object) -> Any:
    """The page; of a rank that was opened, the page of its job."""
    view = current.view(**query)
    asked = split(view.entry.key)
    entry = view.session.entry(asked[0]) if asked else view.entry
    report = entry.job
    if report is None:
        return page(
            head("Job"),
            empty(
                "One run is open",
                "This page shows a job of many ranks: who is not like the others, and which ranks "
                "are alike.",
                "advisor dashboard FOLDER measures a folder of more than 16 ranks one by one; "
                "JOB.json of advisor analyze --format json --output JOB.json is shown at once.",
            ),
        )
    return page(
        head("Job", t.clean(report.verdict) or None),
        banner([w.missing(item) for item in report.missing[:MAX_SHOWN]]),
        _figures(report),
        _map(report, entry.key),
        _odd(report, view, entry.key),
        _steps(report),
        _alike(report),
        _findings(report),
        _ranks(report, entry.key),
        card(
            "What was read", facts([(k, " · ".join(filter(None, v))) for k, v in w.scope(report)])
        ),
        _not_checked(report),
    )


def choose(view: PageView) -> Any:
    """In place of a page that is of one rank."""
    return page(
        head("Choose a rank"),
        empty(
            "This page is of one rank",
            "A job is open; the traces of its ranks are read one by one, when they are asked for.",
            "",
            link("To the job and its ranks", href=view.href("/job"), cls="button main"),
        ),
    )


def _figures(report: JobReport) -> Any:
    of = f"of {t.format_count(report.world)}" if report.world > report.read else ""
    step = report.step
    between = "" if step is None else f"eight of ten {w.spread(step.low, step.high)}"
    slowest = t.NOT_MEASURED if step is None else t.format_duration(step.most)
    return tiles(
        [
            ("Ranks read", t.format_count(report.read), of),
            ("Hosts", t.format_count(report.hosts) if report.hosts else t.NOT_MEASURED, ""),
            (
                "Step of the median rank",
                t.format_duration(None if step is None else step.median),
                between,
            ),
            ("Slowest rank", slowest, ""),
            ("Clocks agree within", t.format_duration(report.error_ns), ""),
        ]
    )


def _map(report: JobReport, key: str) -> Any:
    heat = views.heat_map(report)
    if heat is None:
        return empty("No map", "No rank has steps that were measured.")
    keys = {id(row): key_of(key, place) for place, row in enumerate(report.rows)}
    values: list[list[float | None]] = []
    about: list[list[str | None]] = []
    places: list[list[str | None]] = []
    labels: list[str] = []
    several = len(heat.rows) > STRIP
    for first in range(0, len(heat.rows), STRIP):
        rows = heat.rows[first : first + STRIP]
        if labels:  # a line between two strips
            values.append([None])
            about.append([None])
            places.append([None])
            labels.append("")
        for place, name in enumerate(heat.classes):
            tints = [heat.tint(row, place) for row in rows]
            values.append([None if x is None else x * heat.scale_ns / 1e6 for x in tints])
            about.append([figures.escape_markup(heat.words(row, place)) for row in rows])
            places.append([keys[id(row)] for row in rows])
            start = f"from rank {rows[0].rank}: " if several and place == 0 else ""
            labels.append(start + views.label(name))
    height = 70 + ROW * len(labels)
    return card(
        "Ranks × classes of time",
        figure(
            figures.rank_class_heatmap(values, about, places, labels, heat.scale_ns / 1e6, height),
            "job",
            height=height,
            id=MAP,
            description="Each rank's time a step by class, against the median rank's. The table "
            "of ranks below has the numbers.",
        ),
        el(
            "P",
            "Against the median rank, ms a step. Click on a rank to open its timeline. ",
            heat.note,
            cls="note-line",
        ),
    )


def _odd(report: JobReport, view: PageView, key: str) -> Any:
    if not report.odd:
        return None
    places = {str(row.rank): place for place, row in reversed(list(enumerate(report.rows)))}
    rows = []
    for odd in report.odd[:MAX_SHOWN]:
        name: Any = w.odd_name(odd)
        if odd.what == "rank" and odd.name in places:
            name = link(name, href=view.href("/timeline", run=key_of(key, places[odd.name])))
        rows.append(
            [
                name,
                w.odd_kind(odd),
                t.format_duration(odd.waited_ns),
                "–" if odd.last_share is None else t.format_share(odd.last_share),
                w.gain(odd) or "–",
                w.sure(odd.sure),
                " ".join(filter(None, (t.clean(odd.why), t.clean(odd.fix)))),
            ]
        )
    header = ("Who", "What", "Others wait a step", "Comes last", "Worth", "How sure", "Why")
    return card(
        "Not like the others",
        table(header, rows, numbers=(2, 3), names=(0, 1, 4, 5, 6), caption="", stacked=True),
    )


def _steps(report: JobReport) -> Any:
    bins = views.histogram(report)
    if not bins:
        return None
    made = figures.histogram([one.words for one in bins], [one.ranks for one in bins], "ranks")
    told = "; ".join(f"{one.words}: {t.format_count(one.ranks)}" for one in bins if one.ranks)
    return card(
        "The ranks' steps",
        figure(
            made,
            "job-steps",
            height=60 + 24 * len(bins),
            description=f"Ranks by mean step: {told}.",
        ),
    )


def _alike(report: JobReport) -> Any:
    if not report.alike:
        return None
    rows = [
        [
            t.clean(group.name),
            w.ranks(group.ranks),
            t.format_count(group.count),
            t.format_duration(group.step_ns),
            *(t.format_duration(group.time.get(name)) for name in report.classes),
        ]
        for group in report.alike[:MAX_SHOWN]
    ]
    header = ["Group", "Ranks", "How many", "Step", *map(views.label, report.classes)]
    return card(
        "Ranks that are alike",
        table(
            header,
            rows,
            numbers=range(2, len(header)),
            names=(0, 1),
            caption="Median, a step",
            stacked=True,
        ),
    )


def _findings(report: JobReport) -> Any:
    if not report.findings and not report.what_if:
        return None
    found = [
        el(
            "Article",
            el("H3", t.clean(one.title)),
            el("P", " · ".join(w.finding_parts(report, one)), cls="note-line"),
            el("P", t.clean(one.summary)),
            el("P", t.clean(one.fix)) if one.fix else None,
        )
        for one in report.findings[:MAX_SHOWN]
    ]
    cases = [el("Li", f"{t.clean(one.text)}: {w.gain(one)}") for one in report.what_if[:MAX_SHOWN]]
    return card(
        "What to change",
        *found,
        el("H3", "What if") if cases else None,
        el("Ul", *cases) if cases else None,
    )


def _ranks(report: JobReport, key: str) -> Any:
    classes = [(f"c{place}", views.label(name)) for place, name in enumerate(report.classes)]
    rows = []
    for place, row in enumerate(report.rows):
        made: dict[str, Any] = {
            "id": key_of(key, place),
            "rank": row.rank,
            "rank_text": str(row.rank),
            "host": t.shorten(t.clean(row.host), 80),
            "step": row.step_ns,
            "step_text": t.format_duration(row.step_ns),
        }
        for (field, _), value in zip(classes, row.values, strict=False):
            made |= {field: value, f"{field}_text": t.format_duration(value)}
        rows.append(made)
    columns = [
        Column("rank", "Rank", width=90, number=True),
        Column("host", "Host", flex=2),
        Column("step", "Step", width=110, number=True, csv="Step, ns"),
        *(Column(f, name, width=130, number=True, csv=f"{name}, ns") for f, name in classes),
    ]
    return card(
        "Ranks",
        grid(RANKS, columns, rows, height=420, label="Ranks"),
        el("P", "Choose a rank to open its timeline.", cls="note-line"),
    )


def _not_checked(report: JobReport) -> Any:
    if not report.not_checked:
        return None
    lines = [(t.clean(name), t.clean(why)) for name, why in report.not_checked.items()]
    return card("Not checked", facts(lines[:MAX_SHOWN]))


def register(app: dash.Dash, session: DashboardSession) -> None:
    """A rank that is clicked goes into the address, in the browser."""
    register_search(app, RANKS)
    app.clientside_callback(
        ClientsideFunction("advisor", "openRank"),
        Output("_pages_location", "pathname", allow_duplicate=True),
        Output("_pages_location", "search", allow_duplicate=True),
        Input(MAP, "clickData"),
        Input(RANKS, "selectedRows"),
        prevent_initial_call=True,
    )
