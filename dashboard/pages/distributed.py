"""Distributed: ranks side by side, who keeps whom waiting, how fast collectives are."""

from __future__ import annotations

from typing import Any

import polars as pl

from advisor.analysis.comm_table import sum_collectives, sum_skew
from advisor.analysis.ranks import align, exposed_by_rank, skew
from advisor.dashboard import current, figures
from advisor.dashboard.current import View
from advisor.dashboard.dom import el, link
from advisor.dashboard.parts import card, choices, empty, figure, head, page, table, tiles
from advisor.dashboard.ranks import rank_choice
from advisor.dashboard.session import Loaded
from advisor.report import text as t
from advisor.report.data import Ranks, Report

MAPS = {
    "step": ("step_ns", "Step time"),
    "exposed": ("exposed", "Exposed communication"),
    "communication": ("communication", "All communication"),
}
MOST_RANKS = 64


def layout(show: object = None, **query: object) -> Any:
    """The page; ``show`` is what the map is of."""
    view = current.view(**query)
    report = view.loaded.report
    several = report.ranks is not None
    title = head(
        "Distributed",
        f"{len(view.loaded.analyses)} ranks." if several else "One rank.",
    )
    what = str(show) if show in MAPS else "step"
    found = _collectives(view)
    if not several and found is None:
        return page(
            title,
            empty(
                "One rank, no collectives",
                "This recording is of one process that does not communicate.",
                "Open a folder with the traces of several ranks to see them side by side.",
            ),
        )
    return page(
        title,
        _figures(report),
        _lines(view, report.ranks) if report.ranks is not None else None,
        _map(view, what) if several else None,
        _skew(view) if several and report.ranks is not None and report.ranks.aligned else None,
        None if several else _only_one(),
        found,
    )


def warm(loaded: Loaded) -> None:
    """Align the ranks and sum up who is late."""
    ranks = loaded.report.ranks
    if ranks is not None and ranks.aligned:
        loaded.view("skew", lambda: _skew_table(loaded))


def _only_one() -> Any:
    return empty(
        "Skew is not measured",
        "Only one rank's trace is open, so who is late to a collective cannot be told: a rank "
        "that waits looks as if it communicated.",
        "Open a folder with the traces of all ranks.",
    )


def _figures(report: Report) -> Any:
    if report.communication_ns is None:
        return None
    exposed = next((part for part in report.time if part.name == "communication"), None)
    unit = t.loop_unit(report.scope.step_source)
    alignment = ""
    ranks = report.ranks
    if ranks is not None and ranks.alignment_error_ns is not None:
        alignment = t.time(ranks.alignment_error_ns)
    found = [
        ("Communication", t.time(report.communication_ns), f"a {unit}"),
        (
            "Exposed",
            t.time(exposed.ns) if exposed is not None else t.NOT_MEASURED,
            f"{t.percent(exposed.share)} of the {unit}" if exposed is not None else "",
        ),
        ("Hidden under compute", t.percent(report.communication_overlap), "of communication"),
    ]
    if ranks is not None:
        found.append(("Clocks agree within", alignment or t.NOT_MEASURED, ""))
    return tiles(found)


def _lines(view: View, ranks: Ranks) -> Any:
    """One line a rank: the report's own."""
    latest = max(
        (line for line in ranks.lines if line.caused_wait_ns),
        key=lambda line: line.caused_wait_ns or 0,
        default=None,
    )
    rows = [
        [
            link(f"rank {line.rank}", href=view.href("/timeline", rank=line.rank)),
            t.time(line.step_ns),
            _dash(t.percent(line.busy_share)),
            _dash(t.time(line.communication_ns)),
            _dash(t.time(line.idle_ns)),
            _dash(t.percent(line.last_share)),
            _dash(t.time(line.caused_wait_ns)),
        ]
        for line in ranks.lines[:MOST_RANKS]
    ]
    header = [
        "Rank", "Step", "GPU busy", "Exposed comm.", "Idle", "Comes last", "Others wait for it",
    ]  # fmt: skip
    chosen = None if latest is None else ranks.lines.index(latest)
    more = len(ranks.lines) - len(rows)
    return card(
        "Ranks",
        table(header, rows, numbers=range(1, 7), chosen=chosen, caption="A step, per rank"),
        el("P", t.clean(ranks.note), cls="note-line", style={"marginTop": "12px"}),
        el("P", f"{t.count(more)} more ranks are not listed.", cls="note-line")
        if more > 0
        else None,
    )


def _dash(text: str) -> str:
    return "–" if text == t.NOT_MEASURED else text


def _map(view: View, what: str) -> Any:
    """Ranks × steps."""
    rows = view.loaded.view("exposed_by_rank", lambda: exposed_by_rank(view.loaded.analyses))
    if rows.is_empty():
        return empty("No map", "No rank has device work inside its steps.")
    column, name = MAPS[what]
    wide = rows.pivot("step", index="rank", values=column, aggregate_function="first")
    steps = wide.columns[1:]
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
            figures.heat(values, numbers, steps, "ms"),
            f"ranks-{what}",
            height=max(150, 60 + 26 * len(numbers)),
            description=words,
        ),
    )


def _skew_table(loaded: Loaded) -> pl.DataFrame:
    analyses = loaded.analyses
    return sum_skew(skew(analyses, align(analyses)))


def _skew(view: View) -> Any:
    """How late ranks come to each kind of collective."""
    table_ = view.loaded.view("skew", lambda: _skew_table(view.loaded))
    if table_.is_empty():
        return None
    rows = [
        [
            _named(row["collective"], row["annotation"]),
            _dash(t.memory(row["bytes"])),
            t.count(row["count"]),
            t.time(row["skew_ns"]),
            t.time(row["worst_ns"]),
            _dash(t.time(row["wait_ns"])),
            "–" if row["last"] is None else f"rank {row['last']}, {t.count(row['last_count'])}×",
        ]
        for row in table_.head(MOST_COLLECTIVES).iter_rows(named=True)
    ]
    header = [
        "Collective", "Message", "Count", "Skew", "Worst", "Others wait a step", "Most often last",
    ]  # fmt: skip
    return card(
        "Who comes late",
        table(
            header, rows, numbers=range(1, 7), caption="Skew: last arrival minus first, on average"
        ),
    )


def _named(collective: str, annotation: str | None) -> Any:
    note = t.shorten(t.clean(annotation), 48) if annotation else None
    return el(
        "Span",
        collective.replace("_", " "),
        el("Br") if note else None,
        el("Span", note, cls="dim") if note else None,
    )


MOST_COLLECTIVES = 40


def _collectives(view: View) -> Any:
    a = view.analysis
    if a.collectives.is_empty():
        return None
    rows_ = view.loaded.view(("collectives", view.rank), lambda: sum_collectives(a))
    peak = a.hardware.link.gb_per_s if a.hardware is not None and a.hardware.link else None
    rows = []
    for row in rows_.head(MOST_COLLECTIVES).iter_rows(named=True):
        speed = row["bus_gbps"]
        rows.append(
            [
                _named(row["collective"], row["annotation"]),
                _dash(t.memory(row["bytes"])),
                _dash(t.count(row["group_size"])),
                t.count(row["count"] / a.step_count),
                t.time(row["dur"] / a.step_count),
                t.time(row["exposed"] / a.step_count),
                "–" if speed is None else f"{t.number(speed)} GB/s",
                "–" if speed is None or peak is None else t.percent(speed / peak),
            ]
        )
    header = [
        "Collective", "Message", "Ranks", "A step", "Time a step", "Exposed", "Bus bandwidth",
        "Of link peak",
    ]  # fmt: skip
    more = rows_.height - len(rows)
    link_note = (
        f"Link peak: {a.hardware.link.name}, {t.number(peak)} GB/s in one direction."
        if a.hardware is not None and a.hardware.link and peak is not None
        else "The peak of the links between the GPUs is not known."
    )
    notes = [link_note, "A rank that waits for another counts as communicating."]
    if more:
        notes.append(f"{t.count(more)} smaller groups are not listed.")
    number = view.rank if view.rank is not None else next(iter(view.loaded.analyses))
    return card(
        "Collectives",
        rank_choice(view, "/distributed"),
        table(header, rows, numbers=range(1, 8), caption="By kind and message size"),
        el("P", " ".join(notes), cls="note-line", style={"marginTop": "12px"}),
        aside=f"of rank {number}" if number >= 0 else "",
    )
