"""Distributed: ranks side by side, late ranks and their cost, bandwidth of collectives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import polars as pl

from advisor.advise import report_charts
from advisor.core import labels
from advisor.core import text as t
from advisor.core.report import Report
from advisor.dashboard import page_view, plotly_figures
from advisor.dashboard.components import (
    abbreviation,
    card,
    choices,
    draw_section,
    element,
    empty_state,
    figure,
    head,
    link,
    page,
    rank_choice,
    remark,
    table,
    tiles,
)
from advisor.dashboard.loaded_runs import LoadedRun
from advisor.dashboard.page_view import PageView
from advisor.measure.comm.comms import sum_collectives, sum_skew
from advisor.measure.ranks.skew import align_ranks, exposed_by_rank, measure_skew
from advisor.render.documents.ranks import build_mesh_sections

MAPS = {
    "step": ("step_ns", "Step time"),
    "exposed": ("exposed", "Exposed communication"),
    "communication": ("communication", "All communication"),
}
MAX_RANKS = 64
SMALL = 0.01
"""Share of all communication (of all waiting) below which kinds of collectives are summed."""


def has_content(view: PageView) -> bool:
    """Return whether there are several ranks or collectives."""
    loaded = view.entry.loaded
    if loaded is None:
        return False
    return loaded.report.ranks is not None or not view.analysis.collectives.is_empty()


def layout(show: object = None, **query: object) -> Any:
    """Build the page; ``show``: what the map shows."""
    view = page_view.view(**query)
    report = view.loaded.report
    several = report.ranks is not None
    held = len(view.loaded.analyses) > 1
    title = head("Distributed", _counted(view))
    what = str(show) if show in MAPS else "step"
    result = _collectives(view)
    if not several and result is None:
        return page(
            title,
            empty_state(
                "One rank, no collectives",
                "This recording has one process, which does not communicate.",
                "Open a folder with the traces of several ranks to compare them.",
            ),
        )
    return page(
        title,
        _figures(report),
        _lines(view),
        _map(view, what) if held else None,
        _skew(view) if held and report.ranks is not None and report.ranks.aligned else None,
        None if several else _only_one(),
        *map(draw_section, build_mesh_sections(report, of_one=True)),
        result,
    )


def _counted(view: PageView) -> str:
    """Write how many ranks are open, and how many the run has."""
    here = len(view.loaded.analyses)
    words = f"{here} ranks in this recording" if here > 1 else "One rank in this recording"
    world = view.loaded.main.trace.meta.world_size
    return (
        f"{words}, of {t.format_count(world)} in the run."
        if world and world > here
        else f"{words}."
    )


def warm(loaded: LoadedRun) -> None:
    """Align the ranks and sum up who is late."""
    ranks = loaded.report.ranks
    if ranks is not None and ranks.aligned and len(loaded.analyses) > 1:
        loaded.cached("skew", lambda: _skew_table(loaded))


def _only_one() -> Any:
    return empty_state(
        "Skew is not measured",
        "Only one rank's trace is open, so late ranks are unknown: a rank that waits looks as "
        "if it communicated.",
        "Open a folder with the traces of all ranks.",
    )


def _figures(report: Report) -> Any:
    if report.communication_ns is None:
        return None
    exposed = next((part for part in report.time if part.name == "communication"), None)
    unit = report.per
    alignment = ""
    ranks = report.ranks
    if ranks is not None and ranks.alignment_error_ns is not None:
        alignment = t.format_duration(ranks.alignment_error_ns)
    result = [
        ("Communication", t.format_duration(report.communication_ns), t.format_per(unit)),
        (
            "Exposed",
            t.format_duration(exposed.ns) if exposed is not None else t.NOT_MEASURED,
            f"{t.format_share(exposed.share)} {t.format_of(unit)}" if exposed is not None else "",
        ),
        ("Hidden under compute", t.format_share(report.communication_overlap), "of communication"),
    ]
    if ranks is not None:
        result.append(("Clocks agree within", alignment or t.NOT_MEASURED, ""))
    return tiles(result)


def _lines(view: PageView) -> Any:
    """Build the table of ranks, as in every report."""
    shown = report_charts.build_rank_table(view.loaded.report, MAX_RANKS)
    if shown is None:
        return None
    rows = [
        [link(f"rank {row.rank}", href=view.href("/timeline", rank=row.rank)), *row.cells[1:]]
        for row in shown.rows
    ]
    latest = [number for number, row in enumerate(shown.rows) if row.latest]
    return card(
        "Ranks",
        table(
            [t.upper_first(name) for name in shown.head],
            rows,
            numbers=range(1, len(shown.head)),
            chosen=next(iter(latest), None),
            caption="Per step, by rank",
            stacked=True,
        ),
        element("P", shown.note, cls="note-line", style={"marginTop": "12px"}),
        remark(shown.more),
    )


def _dash(text: str) -> str:
    return t.EMPTY_CELL if text == t.NOT_MEASURED else text


def _map(view: PageView, what: str) -> Any:
    """Draw the map, ranks × steps."""
    rows = view.loaded.cached("exposed_by_rank", lambda: exposed_by_rank(view.loaded.analyses))
    if rows.is_empty():
        return empty_state("No map", "No rank has GPU work in its steps.")
    column, name = MAPS[what]
    wide = rows.pivot("step", index="rank", values=column, aggregate_function="first")
    steps = wide.columns[1:]
    if len(steps) < 2:
        return None  # the table of ranks has that step
    values = [
        [None if cell is None else cell / 1e6 for cell in row[1:]] for row in wide.iter_rows()
    ]
    numbers = [f"rank {rank}" for rank in wide["rank"]]
    words = f"{name} in ms, by rank and step."
    return card(
        "Ranks × steps",
        choices(
            "Show",
            [
                (label, view.href("/distributed", show=key), key == what)
                for key, (_, label) in MAPS.items()
            ],
        ),
        figure(
            plotly_figures.rank_step_heatmap(values, numbers, steps, "ms"),
            f"ranks-{what}",
            height=max(150, 60 + 26 * len(numbers)),
            description=words,
        ),
    )


def _skew_table(loaded: LoadedRun) -> pl.DataFrame:
    analyses = loaded.analyses
    return sum_skew(measure_skew(analyses, align_ranks(analyses)))


class CollectiveColumn(NamedTuple):
    title: str
    cell: Callable[[dict[str, Any]], str]
    """Text of the cell, by the row of a kind."""
    summed: Callable[[pl.DataFrame], str] = lambda _: ""
    """Text for all kinds that are too small to be listed."""


def _collective_table(
    shown: pl.DataFrame, rest: pl.DataFrame, columns: Sequence[CollectiveColumn], caption: str
) -> Any:
    """Build a row per kind of collective, then one for the others."""
    short = labels.labels_by_name(shown["annotation"], ANNOTATION)
    rows = [
        [
            _named(row["collective"], row["annotation"], short),
            *(column.cell(row) for column in columns),
        ]
        for row in shown.iter_rows(named=True)
    ]
    if rest.height:
        others = element("Span", f"{t.format_count(rest.height)} other kinds", cls="dim")
        rows.append([others, *(column.summed(rest) for column in columns)])
    header = ["Collective", *(column.title for column in columns)]
    return table(header, rows, numbers=range(1, len(header)), caption=caption, stacked=True)


MESSAGE = CollectiveColumn("Message", lambda row: _dash(t.format_bytes(row["bytes"])))
SKEW = (
    MESSAGE,
    CollectiveColumn(
        "Count",
        lambda row: t.format_count(row["count"]),
        lambda rest: t.format_count(_sum(rest, "count")),
    ),
    CollectiveColumn(
        "Skew",
        lambda row: t.format_duration(row["skew_ns"]),
        lambda rest: t.format_duration(_sum(rest, "waiting") / max(_sum(rest, "count"), 1)),
    ),
    CollectiveColumn(
        "Worst",
        lambda row: t.format_duration(row["worst_ns"]),
        lambda rest: t.format_duration(float(rest["worst_ns"].max() or 0)),  # type: ignore[arg-type]
    ),
    CollectiveColumn(
        "Others wait per step",
        lambda row: _dash(t.format_duration(row["wait_ns"])),
        lambda rest: t.format_duration(_sum(rest, "wait_ns")),
    ),
    CollectiveColumn("Most often last", lambda row: _last(row["last"], row["last_count"])),
)


def _last(rank: int | None, count: int) -> str:
    return t.EMPTY_CELL if rank is None else f"rank {rank}, {t.format_count(count)}×"


def _skew(view: PageView) -> Any:
    """Build the table of how late ranks come to each kind of collective."""
    kinds = view.loaded.cached("skew", lambda: _skew_table(view.loaded))
    if kinds.is_empty():
        return None
    kinds = kinds.with_columns(waiting=pl.col("count") * pl.col("skew_ns"))
    shown, rest = _folded(kinds, (pl.col("waiting"), pl.col("wait_ns").fill_null(0)))
    caption = "Skew: mean time between first and last arrival"
    return card("Late ranks by collective", _collective_table(shown, rest, SKEW, caption))


def _folded(table_: pl.DataFrame, sizes: tuple[pl.Expr, ...]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return rows that matter by any of the sizes, and those too small by all of them; a single
    small one is listed like the others."""
    large = pl.any_horizontal((size >= SMALL * size.sum()) & (size > 0) for size in sizes)
    marked = table_.with_columns(large=large)
    shown, rest = marked.filter("large"), marked.filter(~pl.col("large"))
    if rest.height < 2:
        shown, rest = marked, marked.clear()
    # a thousand kinds of equal size are all large
    rest = pl.concat([shown.tail(max(0, shown.height - MAX_COLLECTIVES)), rest])
    return shown.head(MAX_COLLECTIVES), rest


def _sum(table_: pl.DataFrame, column: str) -> float:
    return float(table_.select(pl.col(column).sum()).item() or 0)


def _named(collective: str, annotation: str | None, short: dict[str, str]) -> Any:
    note = abbreviation(short[annotation], annotation) if annotation else None
    return element(
        "Span",
        collective.replace("_", " "),
        element("Br") if note else None,
        element("Span", note, cls="dim") if note else None,
    )


MAX_COLLECTIVES = 40
ANNOTATION = 48
"""Length of the name of the range around a collective, characters."""


def _collectives(view: PageView) -> Any:
    a = view.analysis
    if a.collectives.is_empty():
        return None
    rows_ = view.loaded.cached(("collectives", view.rank), lambda: sum_collectives(a))
    peak = a.hardware.link.gb_per_s if a.hardware is not None and a.hardware.link else None
    shown, rest = _folded(rows_, (pl.col("dur"), pl.col("exposed")))

    def per_step(title: str, field: str, write: Callable[[float], str]) -> CollectiveColumn:
        return CollectiveColumn(
            title,
            lambda row: write(row[field] / a.step_count),
            lambda rest: write(_sum(rest, field) / a.step_count),
        )

    def bandwidth(row: dict[str, Any]) -> str:
        speed = row["bus_gbps"]
        return t.EMPTY_CELL if speed is None else f"{t.format_number(speed)} GB/s"

    def of_peak(row: dict[str, Any]) -> str:
        speed = row["bus_gbps"]
        return t.EMPTY_CELL if speed is None or peak is None else t.format_share(speed / peak)

    every = (
        MESSAGE,
        CollectiveColumn("Group size", lambda row: _dash(t.format_count(row["group_size"]))),
        per_step("Per step", "count", t.format_count),
        per_step("Time per step", "dur", t.format_duration),
        per_step("Exposed", "exposed", t.format_duration),
        CollectiveColumn("Bus bandwidth", bandwidth),
        CollectiveColumn("Share of link peak", of_peak),
    )
    lines = list(shown.iter_rows(named=True))
    columns = [each for each in every if any(each.cell(row) != t.EMPTY_CELL for row in lines)]
    missing = ", ".join(each.title.lower() for each in every if each not in columns)
    link_note = (
        f"Link peak: {a.hardware.link.name}, {t.format_number(peak)} GB/s per direction."
        if a.hardware is not None and a.hardware.link and peak is not None
        else "The peak bandwidth of the GPU links is unknown."
    )
    notes = [link_note, "Waiting for another rank counts as communication."]
    if missing:
        notes = [f"Not recorded: {missing}.", notes[1]]
    if rest.height:
        notes.append(f"Kinds below {t.format_share(SMALL)} of the time are summed.")
    number = view.rank if view.rank is not None else next(iter(view.loaded.analyses))
    return card(
        "Collectives",
        rank_choice(view, "/distributed"),
        _collective_table(shown, rest, columns, "By kind and message size"),
        element("P", " ".join(notes), cls="note-line", style={"marginTop": "12px"}),
        aside=f"of rank {number}" if number >= 0 else "",
    )
