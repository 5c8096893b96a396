"""Live: a run while it is being recorded: steps, phases, telemetry, findings as windows land."""

from __future__ import annotations

from typing import Any

import dash
from dash import Input, Output, State, dcc

from advisor.advise import facts, views
from advisor.core import text as t
from advisor.core.run_directory import RankRecord
from advisor.dashboard import current, figures, telemetry, theme
from advisor.dashboard.current import View
from advisor.dashboard.dom import el, link
from advisor.dashboard.pages.overview import finding_line
from advisor.dashboard.parts import card, choices, empty, figure, head, page, tiles
from advisor.dashboard.query import parse
from advisor.dashboard.session import Session
from advisor.dashboard.stepbar import halves, strip
from advisor.measure.steps.record import Recorded

SHOWN_STEPS, SHOWN_SAMPLES = 400, 600
RECENT = 50
"""Steps that the figures of merit are of."""


def layout(rank: object = None, **query: object) -> Any:
    """The page."""
    view = current.view(**query)
    session = view.session
    if not session.live or session.follower is None:
        return page(
            head("Live"),
            empty(
                "Not following a run",
                "This page shows steps, phases and telemetry while training is going on.",
                "Start with advisor dashboard RUN --live, where RUN is the folder that advisor "
                "record writes to.",
            ),
        )
    interval: Any = dcc.Interval
    return [
        *page(
            head("Live", t.clean(session.entries[0].path)),
            el("Div", *body(view, _number(rank)), id="live-body", cls="stack", aria_live="off"),
        ),
        interval(id="live-tick", interval=1000),
    ]


def register(app: dash.Dash, session: Session) -> None:
    """Once a second: what was appended since."""
    if not session.live:
        return

    @app.callback(
        Output("live-body", "children"),
        Output("live-tick", "disabled"),
        Input("live-tick", "n_intervals"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
    def tick(_: object, search: object) -> Any:
        query = parse(search)
        view = current.view()
        record = _record(view, _number(query.get("rank")))
        return body(view, _number(query.get("rank"))), record is not None and record.ended


def _number(rank: object) -> int | None:
    text = str(rank)
    return int(text) if text.isdecimal() and len(text) <= 6 else None


def _record(view: View, rank: int | None) -> RankRecord | None:
    follower = view.session.follower
    if follower is None:
        return None
    ranks = follower.ranks()
    if not ranks:
        return None
    return follower.read(rank if rank in ranks else ranks[0])


def body(view: View, rank: int | None) -> list[Any]:
    """All that changes while the run goes on."""
    record = _record(view, rank)
    if record is None or not record.steps:
        return [empty("Waiting for the first step", "Nothing was recorded in this folder yet.")]
    follower = view.session.follower
    ranks = follower.ranks() if follower is not None else []
    here = rank if rank in ranks else ranks[0]
    parts: list[Any] = []
    if len(ranks) > 1:
        links = [(str(n), view.href("/live", rank=n), n == here) for n in ranks[:64]]
        parts.append(choices("Rank", links))
    parts.append(_figures(record))
    parts.append(_steps(record))
    parts.append(_phases(record))
    parts.append(_findings(view))
    parts += telemetry.cards(record, last=SHOWN_SAMPLES)
    return [part for part in parts if part is not None]


def _recent(record: RankRecord) -> Recorded:
    """The latest steps, as they would be measured on their own."""
    steps = record.steps[-RECENT:]
    return Recorded(RankRecord(rank=record.rank, steps=steps))


def _figures(record: RankRecord) -> Any:
    recent = _recent(record)
    rate = recent.samples_per_second
    last = record.steps[-1]
    ends = record.of_kind("end")
    state = "going on"
    if ends:
        state = f"ended: {t.clean(ends[-1].get('reason', ''))}"
    return tiles(
        [
            ("Steps", t.count(len(record.steps)), state),
            ("Last step", t.time(last.dur), "while profiled" if last.window is not None else ""),
            ("Median", t.time(recent.median), f"of the last {min(RECENT, len(record.steps))}"),
            (
                "Throughput",
                t.NOT_MEASURED if rate is None else f"{rate:,.0f}/s",
                "samples, this rank" if rate is not None else "",
            ),
            ("Memory in tensors", t.memory(last.allocated), "at the end of the last step"),
        ]
    )


def _steps(record: RankRecord) -> Any:
    steps = record.steps[-SHOWN_STEPS:]
    numbers = [float(step.n) for step in steps]
    plain = [None if step.window is not None else step.dur / 1e6 for step in steps]
    inside = [step.dur / 1e6 if step.window is not None else None for step in steps]
    series = [("step", numbers, plain, theme.ACCENT)]
    if any(value is not None for value in inside):
        series.append(("while profiled", numbers, inside, theme.CAUSES["dispatch"]))
    made = figures.lines(series, x="step", y="ms", height=220)
    return card(
        "Steps",
        figure(made, "live-steps", height=220, description="Durations of the latest steps, ms."),
        aside=f"the last {len(steps)}",
    )


def _phases(record: RankRecord) -> Any:
    recent = _recent(record)
    parts = []
    for name in recent.phases:
        ns, share = recent.phase(name), recent.share(name)
        if ns is not None and share:
            parts.append(views.phase(name, float(ns.mean()), share))
    if not parts:
        return None
    return card(
        "Phases",
        strip(parts, "Phases of the latest steps"),
        el("Div", *halves(parts), cls="legend"),
        aside=f"host time, mean of the last {min(RECENT, len(record.steps))} steps",
    )


def _findings(view: View) -> Any:
    """What the last window showed."""
    entry = view.session.entries[0]
    if entry.loaded is None:
        why = t.clean(entry.why or entry.doing)
        return empty("No findings yet", f"They come when a profiled window lands. {why}")
    report = entry.loaded.report
    found = facts.ranked(report)[:5]
    if not found:
        return card("Findings", el("P", t.clean(report.verdict)))
    if report.scope.step_source == "record":
        basis = "from the recorded steps alone, until a profiled window lands"
    else:
        basis = f"of window {next((item.window for item in report.inputs), 0)}"
    return card(
        "Findings",
        el("Ol", *(finding_line(view, report, finding) for finding in found), cls="lines"),
        tools=link("All", href=view.href("/findings")),
        aside=f"{basis}; {t.clean(entry.why)}" if entry.why else basis,
    )
