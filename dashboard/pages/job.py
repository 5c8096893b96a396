"""Job: many ranks at a glance; a click opens the timeline of one, and reads its trace alone."""

from typing import Any
from urllib.parse import urlencode

import dash
from dash import ClientsideFunction, Input, Output

from advisor.advise import finding_text
from advisor.advise.ranks import rank_charts
from advisor.core import text as t
from advisor.core.labels import clean, shorten
from advisor.core.ranks import FEW_RANKS, RankLine, Ranks
from advisor.core.report import Report
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.components import (
    banner,
    bar_cell,
    card,
    draw_section,
    element,
    empty_page,
    empty_state,
    fact_list,
    figure,
    foldable,
    head,
    link,
    page,
    png_button,
    remark,
    table,
    tiles,
)
from advisor.dashboard.grid import Column, grid, register_search
from advisor.dashboard.loaded_runs import DashboardSession, OpenedPath, key_of, split_key
from advisor.dashboard.page_view import PageView
from advisor.render.documents.ranks import build_rank_groups

STRIP = 128
"""Number of ranks beside each other on the map."""
ROW = 18
"""Height of a class on the map, pixels."""
MAX_SHOWN = 100
"""Number of lines of a kind."""
MAP, RANKS = "job-map", "job-ranks"


def has_content(view: PageView) -> bool:
    """Return whether several ranks are open."""
    report = view.entry.report
    return split_key(view.entry.key) is not None or (
        report is not None and report.ranks is not None
    )


def _rank_query(entry: OpenedPath, place: int, rank: int) -> str:
    """Return the query of a rank's own pages: a rank that is read here, else one to be opened."""
    if entry.loaded is not None and rank in entry.loaded.analyses:
        return urlencode({"run": entry.key, "rank": rank})
    return urlencode({"run": key_of(entry.key, place)})


def layout(**query: object) -> Any:
    """Build the page; for a rank that was opened, the page of its job."""
    view = page_view.view(**query)
    asked = split_key(view.entry.key)
    entry = view.session.entry(asked[0]) if asked else view.entry
    report = entry.report
    if report is None or report.ranks is None:
        return empty_page(
            "Job",
            "One run is open",
            "This page compares the ranks of a job: outliers, and groups of similar ranks.",
            "Open a folder with the traces of several ranks, or the JSON that advisor analyze "
            "--output JOB.json wrote of one.",
        )
    ranks = report.ranks
    return page(
        head("Job", _lead(report)),
        banner([rank_charts.describe_missing(item) for item in ranks.missing[:MAX_SHOWN]]),
        _figures(ranks),
        _map(ranks, entry),
        _outliers(ranks, entry),
        _steps(ranks),
        *map(draw_section, build_rank_groups(ranks)),
        *_changes(report),
        _ranks(ranks, entry),
        card(
            "What was read",
            fact_list(
                [(k, " · ".join(filter(None, v))) for k, v in rank_charts.describe_scope(ranks)]
            ),
        ),
        _not_compared(ranks),
    )


def _lead(report: Report) -> str | None:
    """Write the verdict, with the rank that its figures are of: the others' are beside it."""
    verdict, rank = clean(report.verdict), report.scope.rank
    known = verdict and rank is not None and rank >= 0 and f"of rank {rank}" not in verdict
    return f"Rank {rank}: {verdict}" if known else verdict or None


def choose(view: PageView) -> Any:
    """Build the notice that asks for a rank, in place of a page on a single rank."""
    return empty_page(
        "Choose a rank",
        "This page is of one rank",
        "A job is open; the traces of its ranks are read one by one, when they are asked for.",
        "",
        link("To the job and its ranks", href=view.href("/job"), cls="button main"),
    )


def _figures(ranks: Ranks) -> Any:
    read = len(ranks.lines)
    of = f"of {t.format_count(ranks.world)}" if ranks.world > read else ""
    step = ranks.step
    between = (
        "" if step is None else f"eight of ten {rank_charts.format_spread(step.low, step.high)}"
    )
    longest = max(ranks.lines, key=lambda row: row.step_ns, default=None)
    waiting = None if longest is None else _waiting(ranks, longest)
    of_it = f", {t.format_duration(waiting)} of it waiting" if waiting else ""
    return tiles(
        [
            ("Ranks read", t.format_count(read), of),
            ("Hosts", t.format_count(ranks.hosts) if ranks.hosts else t.NOT_MEASURED, ""),
            (
                "Step of the median rank",
                t.format_duration(None if step is None else step.median),
                between,
            ),
            (
                "Longest step",
                t.format_duration(None if step is None else step.max),
                f"rank {longest.rank}{of_it}" if longest is not None else "",
            ),
            ("Clocks agree within", t.format_duration(ranks.alignment_error_ns), ""),
        ]
    )


def _waiting(ranks: Ranks, row: RankLine) -> float | None:
    """Return how long a rank waits for others, per step, ns, or ``None`` if not measured."""
    return dict(zip(ranks.classes, row.time, strict=False)).get(rank_charts.WAITING)


def _map(ranks: Ranks, entry: OpenedPath) -> Any:
    shown = rank_charts.build_heat_map(ranks)
    if shown is None:
        return empty_state("No map", "No rank has steps that were measured.")
    keys = {id(row): _rank_query(entry, i, row.rank) for i, row in enumerate(ranks.lines)}
    values: list[list[float | None]] = []
    about: list[list[str | None]] = []
    places: list[list[str | None]] = []
    labels: list[str] = []
    effects: list[int] = []
    several = len(shown.lines) > STRIP
    for first in range(0, len(shown.lines), STRIP):
        rows = shown.lines[first : first + STRIP]
        if labels:  # a line between two strips
            values.append([None])
            about.append([None])
            places.append([None])
            labels.append("")
        for place, name in enumerate(shown.classes):
            tints = [shown.tint(row, place) for row in rows]
            values.append([None if x is None else x * shown.scale_ns / 1e6 for x in tints])
            about.append([plotly_figures.escape_markup(shown.title(row, place)) for row in rows])
            places.append([keys[id(row)] for row in rows])
            start = f"from rank {rows[0].rank}: " if several and place == 0 else ""
            effects += [len(labels)] if shown.is_effect(place) else []
            labels.append(start + rank_charts.class_label(name))
    height = 106 + ROW * len(labels)
    names = None if several else shown.columns()
    return card(
        "Time of each rank, compared with the median rank",
        figure(
            plotly_figures.rank_class_heatmap(
                values, about, places, labels, names, shown.scale_ns / 1e6, height, effects
            ),
            "job",
            height=height,
            has_table=True,
            id=MAP,
            description="Each rank's time per step by class, compared with the median rank's. The "
            "table of ranks below has the numbers.",
        ),
        remark(
            "Per step: red is longer, blue is shorter. Click on a rank to open its timeline. "
            + shown.note
        ),
    )


def _outliers(ranks: Ranks, entry: OpenedPath) -> Any:
    if not ranks.outliers:
        return None
    places = {str(row.rank): place for place, row in reversed(list(enumerate(ranks.lines)))}
    rows = []
    for outlier in ranks.outliers[:MAX_SHOWN]:
        name: Any = rank_charts.outlier_name(outlier)
        if outlier.unit == "rank" and outlier.name in places:
            query = _rank_query(entry, places[outlier.name], int(outlier.name))
            name = link(name, href=f"/timeline?{query}")
        share = outlier.last_share
        rows.append(
            [
                name,
                [
                    rank_charts.outlier_kind(outlier),
                    element("Div", clean(outlier.reason), cls="sub"),
                ],
                t.format_duration(outlier.waited_ns),
                t.format_cell(share, t.format_share),
                rank_charts.describe_gain(outlier) or t.EMPTY_CELL,
                rank_charts.format_significance(outlier.significance),
            ]
        )
    header = (
        "Who", "What", "Others wait per step, hidden or not", "Comes last", "Gain", "Significance",
    )  # fmt: skip
    return card(
        "Outliers",
        table(header, rows, numbers=(2, 3), names=(0, 1, 4, 5), caption="", stacked=True),
    )


def _steps(ranks: Ranks) -> Any:
    """Draw a bar for each of a few ranks, the one that works longest first, its waiting in grey; of
    more, how many take how long."""
    bins = rank_charts.build_histogram(ranks)
    if not bins:
        return None
    tools = png_button("job-steps")
    if len(ranks.lines) > FEW_RANKS:
        most = max(item.ranks for item in bins)
        rows = [
            [item.label, bar_cell(item.ranks / most, theme.ACCENT), t.format_count(item.ranks)]
            for item in bins
        ]
        made = table(("Mean step", "", "Ranks"), rows, numbers=(2,))
        return card("Ranks by step time", made, tools=tools)
    waits = [(row, _waiting(ranks, row) or 0.0) for row in ranks.lines if row.step_ns > 0]
    waits.sort(key=lambda each: each[1] - each[0].step_ns)
    scale = max(row.step_ns for row, _ in waits)
    rows = [
        [
            f"rank {row.rank}",
            bar_cell((row.step_ns - ns) / scale, theme.ACCENT, ns / scale),
            *map(t.format_duration, (row.step_ns - ns, ns, row.step_ns)),
        ]
        for row, ns in waits
    ]
    header = ("Rank", "", "Own time", "Waiting for others", "Mean step")
    made = table(header, rows, numbers=(2, 3, 4), stacked=True)
    return card("Step time of each rank", made, tools=tools)


def _title(name: str) -> str:
    """Write a class of time as the head of a column."""
    return _capitalized(rank_charts.class_label(name))


def _capitalized(text: str) -> str:
    return t.upper_first(text)


def _changes(report: Report) -> list[Any]:
    """Show fixes, opened on demand, and what other changes would gain."""
    fixes = [
        foldable(
            " · ".join(filter(None, (clean(finding.title), finding_text.describe_gain(finding)))),
            element("P", clean(finding.summary)),
            element("P", clean(finding.fix)) if finding.fix else None,
        )
        for finding in report.findings[:MAX_SHOWN]
    ]
    cases = [
        element("Li", _capitalized(change))
        for change in rank_charts.other_changes(report)[:MAX_SHOWN]
    ]
    return [
        *([card("What to change", *fixes)] if fixes else []),
        *([card("What if", element("Ul", *cases))] if cases else []),
    ]


def _ranks(ranks: Ranks, entry: OpenedPath) -> Any:
    classes = [(f"c{place}", _title(name)) for place, name in enumerate(ranks.classes)]
    rows = []
    for place, row in enumerate(ranks.lines):
        made: dict[str, Any] = {
            "id": key_of(entry.key, place), "query": _rank_query(entry, place, row.rank),
            "rank": row.rank, "rank_text": str(row.rank), "host": shorten(clean(row.host), 80),
            "step": row.step_ns, "step_text": t.format_duration(row.step_ns),
        }  # fmt: skip
        for (field, _), value in zip(classes, row.time, strict=False):
            made |= {field: value, f"{field}_text": t.format_duration(value)}
        rows.append(made)
    columns = [
        Column("rank", "Rank", width=76, number=True),
        *([Column("host", "Host", flex=1)] if any(row.host for row in ranks.lines) else []),
        Column("step", "Step", width=100, number=True, csv="Step, ns"),
        *(Column(f, name, width=116, number=True, csv=f"{name}, ns") for f, name in classes),
    ]
    return card(
        "Ranks",
        grid(RANKS, columns, rows, height=420, label="Ranks"),
        remark("Choose a rank to open its timeline."),
    )


def _not_compared(ranks: Ranks) -> Any:
    if not ranks.not_checked:
        return None
    lines = [(clean(name), clean(why)) for name, why in ranks.not_checked.items()]
    return card("Not compared", fact_list(lines[:MAX_SHOWN]))


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Put a rank that is clicked into the address, in the browser."""
    register_search(app, RANKS)
    app.clientside_callback(
        ClientsideFunction("advisor", "openRank"),
        Output("_pages_location", "pathname", allow_duplicate=True),
        Output("_pages_location", "search", allow_duplicate=True),
        Input(MAP, "clickData"),
        Input(RANKS, "selectedRows"),
        prevent_initial_call=True,
    )
