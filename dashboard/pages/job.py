"""Job: comparison of many ranks. A click opens a rank's timeline and reads only its trace."""

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
from advisor.dashboard import components as ui
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.grid import Column, grid, register_search
from advisor.dashboard.loaded_runs import DashboardSession, OpenedPath, rank_key, split_rank_key
from advisor.dashboard.page_view import PageView
from advisor.render.documents.ranks import build_rank_groups

RANKS_PER_STRIP = 128
"""Number of ranks in one strip of the map."""
ROW_HEIGHT_PX = 18
"""Height of a class of time on the map, pixels."""
_MAX_LINES = 100
"""Number of outliers, missing ranks, changes and so on that are listed."""
MAP_ID, RANK_GRID_ID = "job-map", "job-ranks"


def has_content(view: PageView) -> bool:
    """Return whether several ranks are open."""
    report = view.entry.report
    return split_rank_key(view.entry.key) is not None or (
        report is not None and report.ranks is not None
    )


def _rank_query(entry: OpenedPath, row: int, rank: int) -> str:
    """Return the query of a rank's pages, for a rank that is loaded or can be opened."""
    if entry.loaded is not None and rank in entry.loaded.analyses:
        return urlencode({"run": entry.key, "rank": rank})
    return urlencode({"run": rank_key(entry.key, row)})


def layout(**query: object) -> Any:
    """Build the page. For a rank that was opened from a job, it shows the job."""
    view = page_view.view(**query)
    job_and_row = split_rank_key(view.entry.key)
    entry = view.session.entry(job_and_row[0]) if job_and_row else view.entry
    report = entry.report
    if report is None or report.ranks is None:
        return ui.empty_page(
            "Job",
            "One run is open",
            "This page compares the ranks of a job: outliers, and groups of similar ranks.",
            "Open a folder with the traces of several ranks, or the JSON that advisor analyze "
            "--output JOB.json wrote of one.",
        )
    ranks = report.ranks
    return ui.page(
        ui.page_heading("Job", _lead_text(report)),
        ui.banner([rank_charts.describe_missing(item) for item in ranks.missing[:_MAX_LINES]]),
        _job_tiles(ranks),
        _heat_map_card(ranks, entry),
        _outlier_card(ranks, entry),
        _step_time_card(ranks),
        *map(ui.draw_section, build_rank_groups(ranks)),
        *_change_cards(report),
        _rank_grid_card(ranks, entry),
        ui.card(
            "What was read",
            ui.fact_list(
                [
                    (label, " · ".join(filter(None, parts)))
                    for label, parts in rank_charts.describe_scope(ranks)
                ]
            ),
        ),
        _not_compared_card(ranks),
    )


def _lead_text(report: Report) -> str | None:
    """Write the verdict, with the rank that its figures belong to."""
    verdict, rank = clean(report.verdict), report.scope.rank
    names_rank = verdict and rank is not None and rank >= 0 and f"of rank {rank}" not in verdict
    return f"Rank {rank}: {verdict}" if names_rank else verdict or None


def rank_required_page(view: PageView) -> Any:
    """Build the notice that asks for a rank, instead of a page about one rank."""
    return ui.empty_page(
        "Choose a rank",
        "This page shows one rank",
        "A job is open. The trace of a rank is read when you open the rank.",
        "",
        ui.link("Show the job and its ranks", href=view.href("/job"), cls="button main"),
    )


def _job_tiles(ranks: Ranks) -> Any:
    """Build the tiles of the job's key figures."""
    read_count = len(ranks.lines)
    of_world = f"of {t.format_count(ranks.world)}" if ranks.world > read_count else ""
    step = ranks.step
    spread = (
        "" if step is None else f"eight of ten {rank_charts.format_spread(step.low, step.high)}"
    )
    longest = max(ranks.lines, key=lambda row: row.step_ns, default=None)
    waiting = None if longest is None else _waiting_ns(ranks, longest)
    waiting_note = f", {t.format_duration(waiting)} of it waiting" if waiting else ""
    return ui.tiles(
        [
            ("Ranks read", t.format_count(read_count), of_world),
            ("Hosts", t.format_count(ranks.hosts) if ranks.hosts else t.NOT_MEASURED, ""),
            (
                "Step of the median rank",
                t.format_duration(None if step is None else step.median),
                spread,
            ),
            (
                "Longest step",
                t.format_duration(None if step is None else step.max),
                f"rank {longest.rank}{waiting_note}" if longest is not None else "",
            ),
            ("Clocks agree within", t.format_duration(ranks.alignment_error_ns), ""),
        ]
    )


def _waiting_ns(ranks: Ranks, row: RankLine) -> float | None:
    """Return how long a rank waits for others, per step, ns, or ``None`` if not measured."""
    return dict(zip(ranks.classes, row.time, strict=False)).get(rank_charts.WAITING)


def _heat_map_card(ranks: Ranks, entry: OpenedPath) -> Any:
    """Build the card of the heat map: time of each rank by class, compared with the median."""
    heat_map = rank_charts.build_heat_map(ranks)
    if heat_map is None:
        return ui.empty_state("No map", "No rank has steps that were measured.")
    query_by_row = {id(row): _rank_query(entry, i, row.rank) for i, row in enumerate(ranks.lines)}
    values: list[list[float | None]] = []
    tooltips: list[list[str | None]] = []
    queries: list[list[str | None]] = []
    labels: list[str] = []
    effect_rows: list[int] = []
    has_several_strips = len(heat_map.lines) > RANKS_PER_STRIP
    for first in range(0, len(heat_map.lines), RANKS_PER_STRIP):
        rows = heat_map.lines[first : first + RANKS_PER_STRIP]
        if labels:  # a blank row between two strips
            values.append([None])
            tooltips.append([None])
            queries.append([None])
            labels.append("")
        for class_index, name in enumerate(heat_map.classes):
            tints = [heat_map.tint(row, class_index) for row in rows]
            values.append(
                [None if tint is None else tint * heat_map.scale_ns / 1e6 for tint in tints]
            )
            tooltips.append(
                [plotly_figures.escape_markup(heat_map.title(row, class_index)) for row in rows]
            )
            queries.append([query_by_row[id(row)] for row in rows])
            strip_label = (
                f"from rank {rows[0].rank}: " if has_several_strips and class_index == 0 else ""
            )
            effect_rows += [len(labels)] if heat_map.is_effect(class_index) else []
            labels.append(strip_label + rank_charts.class_label(name))
    height = 106 + ROW_HEIGHT_PX * len(labels)
    rank_names = None if has_several_strips else heat_map.columns()
    return ui.card(
        "Time of each rank, compared with the median rank",
        ui.figure(
            plotly_figures.rank_class_heatmap(
                values,
                tooltips,
                queries,
                labels,
                rank_names,
                heat_map.scale_ns / 1e6,
                height,
                effect_rows,
            ),
            "job",
            height=height,
            has_table=True,
            id=MAP_ID,
            description="Each rank's time per step by class, compared with the median rank's. The "
            "table of ranks below has the numbers.",
        ),
        ui.remark(
            "Per step: red is longer, blue is shorter. Click on a rank to open its timeline. "
            + heat_map.note
        ),
    )


def _outlier_card(ranks: Ranks, entry: OpenedPath) -> Any:
    """Build the card of outliers, or ``None`` without any."""
    if not ranks.outliers:
        return None
    row_by_rank = {str(row.rank): index for index, row in reversed(list(enumerate(ranks.lines)))}
    rows = []
    for outlier in ranks.outliers[:_MAX_LINES]:
        name: Any = rank_charts.outlier_name(outlier)
        if outlier.unit == "rank" and outlier.name in row_by_rank:
            query = _rank_query(entry, row_by_rank[outlier.name], int(outlier.name))
            name = ui.link(name, href=f"/timeline?{query}")
        share = outlier.last_share
        rows.append(
            [
                name,
                [
                    rank_charts.outlier_kind(outlier),
                    ui.element("Div", clean(outlier.reason), cls="sub"),
                ],
                t.format_duration(outlier.waited_ns),
                t.format_cell(share, t.format_share),
                rank_charts.describe_rank_gain(outlier) or t.EMPTY_CELL,
                rank_charts.format_significance(outlier.significance),
            ]
        )
    header = (
        "Who",
        "What",
        "Wait of others per step, hidden included",
        "Comes last",
        "Gain",
        "Significance",
    )
    return ui.card(
        "Outliers",
        ui.table(
            header, rows, number_columns=(2, 3), name_columns=(0, 1, 4, 5), caption="", stacked=True
        ),
    )


def _step_time_card(ranks: Ranks) -> Any:
    """Build the card of step times by rank.

    A few ranks have a bar each, with waiting in gray, the longest own time first. More ranks have
    a histogram."""
    bins = rank_charts.build_histogram(ranks)
    if not bins:
        return None
    tools = ui.png_button("job-steps")
    if len(ranks.lines) > FEW_RANKS:
        max_ranks = max(item.ranks for item in bins)
        rows = [
            [
                item.label,
                ui.bar_cell(item.ranks / max_ranks, theme.ACCENT),
                t.format_count(item.ranks),
            ]
            for item in bins
        ]
        table_element = ui.table(("Mean step", "", "Ranks"), rows, number_columns=(2,))
        return ui.card("Ranks by step time", table_element, tools=tools)
    waits = [(row, _waiting_ns(ranks, row) or 0.0) for row in ranks.lines if row.step_ns > 0]
    waits.sort(key=lambda each: each[1] - each[0].step_ns)
    scale = max(row.step_ns for row, _ in waits)
    rows = [
        [
            f"rank {row.rank}",
            ui.bar_cell((row.step_ns - ns) / scale, theme.ACCENT, ns / scale),
            *map(t.format_duration, (row.step_ns - ns, ns, row.step_ns)),
        ]
        for row, ns in waits
    ]
    header = ("Rank", "", "Own time", "Waiting for others", "Mean step")
    table_element = ui.table(header, rows, number_columns=(2, 3, 4), stacked=True)
    return ui.card("Step time of each rank", table_element, tools=tools)


def _class_title(name: str) -> str:
    """Write a class of time as the title of a column."""
    return t.upper_first(rank_charts.class_label(name))


def _change_cards(report: Report) -> list[Any]:
    """Build the cards of fixes, opened on demand, and of other changes with their gains."""
    fixes = [
        ui.expander(
            " · ".join(filter(None, (clean(finding.title), finding_text.describe_gain(finding)))),
            ui.element("P", clean(finding.summary)),
            ui.element("P", clean(finding.fix)) if finding.fix else None,
        )
        for finding in report.findings[:_MAX_LINES]
    ]
    cases = [
        ui.element("Li", t.upper_first(change))
        for change in rank_charts.other_changes(report)[:_MAX_LINES]
    ]
    return [
        *([ui.card("What to change", *fixes)] if fixes else []),
        *([ui.card("What if", ui.element("Ul", *cases))] if cases else []),
    ]


def _rank_grid_card(ranks: Ranks, entry: OpenedPath) -> Any:
    """Build the card of the grid of ranks."""
    classes = [(f"c{index}", _class_title(name)) for index, name in enumerate(ranks.classes)]
    rows = []
    for index, row in enumerate(ranks.lines):
        grid_row: dict[str, Any] = {
            "id": rank_key(entry.key, index), "query": _rank_query(entry, index, row.rank),
            "rank": row.rank, "rank_text": str(row.rank), "host": shorten(clean(row.host), 80),
            "step": row.step_ns, "step_text": t.format_duration(row.step_ns),
        }  # fmt: skip
        for (field, _), value in zip(classes, row.time, strict=False):
            grid_row |= {field: value, f"{field}_text": t.format_duration(value)}
        rows.append(grid_row)
    columns = [
        Column("rank", "Rank", width=76, number_format=True),
        *([Column("host", "Host", flex=1)] if any(row.host for row in ranks.lines) else []),
        Column("step", "Step", width=100, number_format=True, csv_title="Step, ns"),
        *(
            Column(field, name, width=116, number_format=True, csv_title=f"{name}, ns")
            for field, name in classes
        ),
    ]
    return ui.card(
        "Ranks",
        grid(RANK_GRID_ID, columns, rows, height=420, label="Ranks"),
        ui.remark("Select a rank to open its timeline."),
    )


def _not_compared_card(ranks: Ranks) -> Any:
    """Build the card of what was not compared, with reasons."""
    if not ranks.not_checked:
        return None
    lines = [(clean(name), clean(reason)) for name, reason in ranks.not_checked.items()]
    return ui.card("Not compared", ui.fact_list(lines[:_MAX_LINES]))


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Register the browser callback that opens the timeline of a clicked rank."""
    register_search(app, RANK_GRID_ID)
    app.clientside_callback(
        ClientsideFunction("advisor", "openRank"),
        Output("_pages_location", "pathname", allow_duplicate=True),
        Output("_pages_location", "search", allow_duplicate=True),
        Input(MAP_ID, "clickData"),
        Input(RANK_GRID_ID, "selectedRows"),
        prevent_initial_call=True,
    )
