"""Distributed: comparison of ranks, late ranks and their cost, bandwidth of collectives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import polars as pl

from advisor.advise import report_charts
from advisor.core import labels
from advisor.core import text as t
from advisor.core.report import Report
from advisor.dashboard import components as ui
from advisor.dashboard import page_view, plotly_figures
from advisor.dashboard.loaded_runs import LoadedRun
from advisor.dashboard.page_view import PageView
from advisor.measure.comm.comms import sum_collectives, sum_skew
from advisor.measure.ranks.skew import align_ranks, exposed_by_rank, measure_skew
from advisor.render.documents.ranks import build_mesh_sections

HEAT_MAPS = {
    "step": ("step_ns", "Step time"),
    "exposed": ("exposed", "Exposed communication"),
    "communication": ("communication", "All communication"),
}
_MAX_RANKS = 64
_MIN_LISTED_SHARE = 0.01
"""Share of all communication, or of all waiting, below which kinds of collectives are summed."""


def has_content(view: PageView) -> bool:
    """Return whether there are several ranks or collectives."""
    loaded = view.entry.loaded
    if loaded is None:
        return False
    return loaded.report.ranks is not None or not view.analysis.collectives.is_empty()


def layout(show: object = None, **query: object) -> Any:
    """Build the page. ``show``: quantity on the heat map, a key of HEAT_MAPS."""
    view = page_view.view(**query)
    report = view.loaded.report
    has_several_ranks = report.ranks is not None
    has_several_traces = len(view.loaded.analyses) > 1
    heading = ui.page_heading("Distributed", _describe_rank_count(view))
    map_key = str(show) if show in HEAT_MAPS else "step"
    collectives = _collective_card(view)
    if not has_several_ranks and collectives is None:
        return ui.page(
            heading,
            ui.empty_state(
                "One rank, no collectives",
                "This recording has one process, which does not communicate.",
                "Open a folder with the traces of several ranks to compare them.",
            ),
        )
    return ui.page(
        heading,
        _communication_tiles(report),
        _rank_card(view),
        _heat_map_card(view, map_key) if has_several_traces else None,
        _skew_card(view)
        if has_several_traces and report.ranks is not None and report.ranks.aligned
        else None,
        None if has_several_ranks else _one_rank_notice(),
        *map(ui.draw_section, build_mesh_sections(report, of_one=True)),
        collectives,
    )


def _describe_rank_count(view: PageView) -> str:
    """Write how many ranks this recording and the run have."""
    open_ranks = len(view.loaded.analyses)
    count_text = (
        f"{open_ranks} ranks in this recording" if open_ranks > 1 else "One rank in this recording"
    )
    world_size = view.loaded.main.trace.meta.world_size
    return (
        f"{count_text}, of {t.format_count(world_size)} in the run."
        if world_size and world_size > open_ranks
        else f"{count_text}."
    )


def precompute(loaded: LoadedRun) -> None:
    """Align the clocks of the ranks, and measure which ranks are late."""
    ranks = loaded.report.ranks
    if ranks is not None and ranks.aligned and len(loaded.analyses) > 1:
        loaded.get_or_compute("skew", lambda: _skew_table(loaded))


def _one_rank_notice() -> Any:
    """Build the notice that skew needs several ranks."""
    return ui.empty_state(
        "Skew is not measured",
        "Only one rank's trace is open, so late ranks are unknown. A rank that waits for others "
        "seems to communicate.",
        "Open a folder with the traces of all ranks.",
    )


def _communication_tiles(report: Report) -> Any:
    """Build the tiles of communication time, or ``None`` if not measured."""
    if report.communication_ns is None:
        return None
    exposed = next((part for part in report.time if part.name == "communication"), None)
    unit = report.per
    alignment = ""
    ranks = report.ranks
    if ranks is not None and ranks.alignment_error_ns is not None:
        alignment = t.format_duration(ranks.alignment_error_ns)
    figures = [
        ("Communication", t.format_duration(report.communication_ns), t.format_per(unit)),
        (
            "Exposed",
            t.format_duration(exposed.ns) if exposed is not None else t.NOT_MEASURED,
            f"{t.format_share(exposed.share)} {t.format_of(unit)}" if exposed is not None else "",
        ),
        ("Hidden under compute", t.format_share(report.communication_overlap), "of communication"),
    ]
    if ranks is not None:
        figures.append(("Clocks agree within", alignment or t.NOT_MEASURED, ""))
    return ui.tiles(figures)


def _rank_card(view: PageView) -> Any:
    """Build the card with the report's table of ranks."""
    rank_table = report_charts.build_rank_table(view.loaded.report, _MAX_RANKS)
    if rank_table is None:
        return None
    rows = [
        [ui.link(f"rank {row.rank}", href=view.href("/timeline", rank=row.rank)), *row.cells[1:]]
        for row in rank_table.rows
    ]
    late_rows = [index for index, row in enumerate(rank_table.rows) if row.latest]
    return ui.card(
        "Ranks",
        ui.table(
            [t.upper_first(name) for name in rank_table.head],
            rows,
            number_columns=range(1, len(rank_table.head)),
            chosen_row=next(iter(late_rows), None),
            caption="Per step, by rank",
            stacked=True,
        ),
        ui.element("P", rank_table.note, cls="note-line", style={"marginTop": "12px"}),
        ui.remark(rank_table.more),
    )


def _dash_if_missing(text: str) -> str:
    """Return a dash for a value that was not measured."""
    return t.EMPTY_CELL if text == t.NOT_MEASURED else text


def _heat_map_card(view: PageView, map_key: str) -> Any:
    """Build the card of the heat map, ranks × steps, or ``None`` for a single step."""
    rows = view.loaded.get_or_compute(
        "exposed_by_rank", lambda: exposed_by_rank(view.loaded.analyses)
    )
    if rows.is_empty():
        return ui.empty_state("No map", "No rank has GPU work in its steps.")
    column, name = HEAT_MAPS[map_key]
    table_by_step = rows.pivot("step", index="rank", values=column, aggregate_function="first")
    steps = table_by_step.columns[1:]
    if len(steps) < 2:
        return None  # the table of ranks shows a single step
    values = [
        [None if cell is None else cell / 1e6 for cell in row[1:]]
        for row in table_by_step.iter_rows()
    ]
    rank_names = [f"rank {rank}" for rank in table_by_step["rank"]]
    description = f"{name} in ms, by rank and step."
    return ui.card(
        "Ranks × steps",
        ui.choice_links(
            "Show",
            [
                (label, view.href("/distributed", show=key), key == map_key)
                for key, (_, label) in HEAT_MAPS.items()
            ],
        ),
        ui.figure(
            plotly_figures.rank_step_heatmap(values, rank_names, steps, "ms"),
            f"ranks-{map_key}",
            height=max(150, 60 + 26 * len(rank_names)),
            description=description,
        ),
    )


def _skew_table(loaded: LoadedRun) -> pl.DataFrame:
    """Measure the skew of collectives. Return a row per kind."""
    analyses = loaded.analyses
    return sum_skew(measure_skew(analyses, align_ranks(analyses)))


class CollectiveColumn(NamedTuple):
    """Column of a table of collectives."""

    title: str
    format_cell: Callable[[dict[str, Any]], str]
    """Formatter of a cell. Its argument is the row of a kind of collective."""
    format_total: Callable[[pl.DataFrame], str] = lambda _: ""
    """Formatter of the total of all kinds that are too small to be listed."""


def _collective_table(
    listed: pl.DataFrame, rest: pl.DataFrame, columns: Sequence[CollectiveColumn], caption: str
) -> Any:
    """Build a table with a row per kind of collective, and one for all other kinds."""
    short_names = labels.labels_by_name(listed["annotation"], MAX_ANNOTATION_LENGTH)
    rows = [
        [
            _collective_name(row["collective"], row["annotation"], short_names),
            *(column.format_cell(row) for column in columns),
        ]
        for row in listed.iter_rows(named=True)
    ]
    if rest.height:
        others = ui.element("Span", f"{t.format_count(rest.height)} other kinds", cls="dim")
        rows.append([others, *(column.format_total(rest) for column in columns)])
    header = ["Collective", *(column.title for column in columns)]
    return ui.table(
        header, rows, number_columns=range(1, len(header)), caption=caption, stacked=True
    )


MESSAGE_COLUMN = CollectiveColumn(
    "Message", lambda row: _dash_if_missing(t.format_bytes(row["bytes"]))
)
SKEW_COLUMNS = (
    MESSAGE_COLUMN,
    CollectiveColumn(
        "Count",
        lambda row: t.format_count(row["count"]),
        lambda rest: t.format_count(_column_sum(rest, "count")),
    ),
    CollectiveColumn(
        "Skew",
        lambda row: t.format_duration(row["skew_ns"]),
        lambda rest: t.format_duration(
            _column_sum(rest, "waiting") / max(_column_sum(rest, "count"), 1)
        ),
    ),
    CollectiveColumn(
        "Worst",
        lambda row: t.format_duration(row["worst_ns"]),
        lambda rest: t.format_duration(float(rest["worst_ns"].max() or 0)),  # type: ignore[arg-type]
    ),
    CollectiveColumn(
        "Others wait per step",
        lambda row: _dash_if_missing(t.format_duration(row["wait_ns"])),
        lambda rest: t.format_duration(_column_sum(rest, "wait_ns")),
    ),
    CollectiveColumn(
        "Most often last", lambda row: _format_last_rank(row["last"], row["last_count"])
    ),
)


def _format_last_rank(rank: int | None, count: int) -> str:
    """Write which rank was last most often, and how often."""
    return t.EMPTY_CELL if rank is None else f"rank {rank}, {t.format_count(count)}×"


def _skew_card(view: PageView) -> Any:
    """Build the card of the skew of ranks by kind of collective."""
    kinds = view.loaded.get_or_compute("skew", lambda: _skew_table(view.loaded))
    if kinds.is_empty():
        return None
    kinds = kinds.with_columns(waiting=pl.col("count") * pl.col("skew_ns"))
    listed, rest = _split_small(kinds, (pl.col("waiting"), pl.col("wait_ns").fill_null(0)))
    caption = "Skew: mean time between first and last arrival"
    return ui.card(
        "Late ranks by collective", _collective_table(listed, rest, SKEW_COLUMNS, caption)
    )


def _split_small(
    kinds: pl.DataFrame, sizes: tuple[pl.Expr, ...]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split rows into listed ones and those that are small by every size.

    A single small row is listed."""
    large = pl.any_horizontal(
        (size >= _MIN_LISTED_SHARE * size.sum()) & (size > 0) for size in sizes
    )
    with_size = kinds.with_columns(large=large)
    listed, rest = with_size.filter("large"), with_size.filter(~pl.col("large"))
    if rest.height < 2:
        listed, rest = with_size, with_size.clear()
    # with a thousand kinds of equal size, none is small
    rest = pl.concat([listed.tail(max(0, listed.height - MAX_COLLECTIVES)), rest])
    return listed.head(MAX_COLLECTIVES), rest


def _column_sum(kinds: pl.DataFrame, column: str) -> float:
    """Return the sum of a column."""
    return float(kinds.select(pl.col(column).sum()).item() or 0)


def _collective_name(collective: str, annotation: str | None, short_names: dict[str, str]) -> Any:
    """Build the cell of a collective's name and the range around it."""
    annotation_label = ui.abbreviation(short_names[annotation], annotation) if annotation else None
    return ui.element(
        "Span",
        collective.replace("_", " "),
        ui.element("Br") if annotation_label else None,
        ui.element("Span", annotation_label, cls="dim") if annotation_label else None,
    )


MAX_COLLECTIVES = 40
MAX_ANNOTATION_LENGTH = 48
"""Length limit of the name of the range around a collective, characters."""


def _collective_card(view: PageView) -> Any:
    """Build the card of collectives by kind and message size."""
    a = view.analysis
    if a.collectives.is_empty():
        return None
    kinds = view.loaded.get_or_compute(("collectives", view.rank), lambda: sum_collectives(a))
    peak = a.hardware.link.gb_per_s if a.hardware is not None and a.hardware.link else None
    listed, rest = _split_small(kinds, (pl.col("dur"), pl.col("exposed")))

    def per_step(title: str, field: str, format_amount: Callable[[float], str]) -> CollectiveColumn:
        return CollectiveColumn(
            title,
            lambda row: format_amount(row[field] / a.step_count),
            lambda rest: format_amount(_column_sum(rest, field) / a.step_count),
        )

    def bandwidth(row: dict[str, Any]) -> str:
        gb_per_s = row["bus_gbps"]
        return t.EMPTY_CELL if gb_per_s is None else f"{t.format_number(gb_per_s)} GB/s"

    def share_of_peak(row: dict[str, Any]) -> str:
        gb_per_s = row["bus_gbps"]
        return t.EMPTY_CELL if gb_per_s is None or peak is None else t.format_share(gb_per_s / peak)

    all_columns = (
        MESSAGE_COLUMN,
        CollectiveColumn(
            "Group size", lambda row: _dash_if_missing(t.format_count(row["group_size"]))
        ),
        per_step("Per step", "count", t.format_count),
        per_step("Time per step", "dur", t.format_duration),
        per_step("Exposed", "exposed", t.format_duration),
        CollectiveColumn("Bus bandwidth", bandwidth),
        CollectiveColumn("Share of link peak", share_of_peak),
    )
    rows = list(listed.iter_rows(named=True))
    columns = [
        column
        for column in all_columns
        if any(column.format_cell(row) != t.EMPTY_CELL for row in rows)
    ]
    missing = ", ".join(column.title.lower() for column in all_columns if column not in columns)
    link_note = (
        f"Link peak: {a.hardware.link.name}, {t.format_number(peak)} GB/s per direction."
        if a.hardware is not None and a.hardware.link and peak is not None
        else "The peak bandwidth of the GPU links is unknown."
    )
    notes = [link_note, "Waiting for another rank counts as communication."]
    if missing:
        notes = [f"Not recorded: {missing}.", notes[1]]
    if rest.height:
        notes.append(f"Kinds below {t.format_share(_MIN_LISTED_SHARE)} of the time are summed.")
    rank = view.rank if view.rank is not None else next(iter(view.loaded.analyses))
    return ui.card(
        "Collectives",
        ui.rank_selector(view, "/distributed"),
        _collective_table(listed, rest, columns, "By kind and message size"),
        ui.element("P", " ".join(notes), cls="note-line", style={"marginTop": "12px"}),
        aside=f"of rank {rank}" if rank >= 0 else "",
    )
