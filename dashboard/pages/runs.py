"""Runs: the runs of a folder, newest first, and how their step time went over time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from advisor.core import labels
from advisor.core import text as t
from advisor.dashboard import page_view, plotly_figures
from advisor.dashboard.components import (
    card,
    element,
    figure,
    head,
    link,
    page,
    table,
)
from advisor.dashboard.grid import search_field
from advisor.dashboard.page_view import PageView
from advisor.dashboard.session import OpenedPath

HEAD = ("Run", "Started", "Commit", "Step", "Change", "Steps", "Ranks", "Program", "Verdict")
MAX_COMMAND, MAX_VERDICT = 60, 110
"""Lengths, characters; a verdict's first sentence stays whole if it fits twice as many."""
MAX_COLUMNS, MAX_FINDINGS = 7, 12
"""Numbers of runs and findings in the table of findings: the newest, and the largest."""


def has_content(view: PageView) -> bool:
    """Return whether a folder of runs is open."""
    return bool(view.session.folder)


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    session = view.session
    if not session.folder:
        return page(head("Runs", "Open a folder of runs: advisor dashboard runs/"))
    place = next((i for i, e in enumerate(session.entries) if e is view.entry), 0)
    return page(
        head("Runs", labels.clean(session.folder)),
        _history(session.entries),
        _findings(session.entries),
        card(
            "All runs",
            table(
                HEAD,
                [_row(session.entries, i) for i in range(len(session.entries))],
                numbers=(3, 4, 5, 6),
                names=(0, 7, 8),
                chosen=place,
                stacked=True,
            ),
            aside="a run is read when you open it; each that was read is compared with the newest",
            tools=search_field("runs-search", "Runs", "search filter-rows"),
        ),
    )


def _history(entries: list[OpenedPath]) -> Any:
    """Draw the median step of each run, oldest first."""
    shown = [(e.name, e.summary) for e in reversed(entries) if e.summary and e.summary.median_ns]
    if len(shown) < 2:
        return None
    names = labels.distinct_labels((name for name, _ in shown), 28)
    values = [(summary.median_ns or 0.0) / 1e6 for _, summary in shown]
    about = [
        f"{summary.commit or plotly_figures.NO_COMMIT} · {t.count_noun(summary.steps, 'step')}"
        for _, summary in shown
    ]
    return card(
        "Step time, run by run",
        figure(
            plotly_figures.run_history(
                names, values, list(map(plotly_figures.escape_markup, about))
            ),
            "runs",
            height=280,
            description="The median step of each run; the table below has the numbers.",
        ),
        aside="median of the steps outside the profiler",
    )


def _findings(entries: list[OpenedPath]) -> Any:
    """Build a table of what each run that was read could gain, by finding, oldest run first."""
    read = [entry for entry in entries if entry.verdict][:MAX_COLUMNS][::-1]
    largest: dict[str, float] = {}
    for entry in read:
        for title, gain in entry.gains.items():
            largest[title] = max(gain, largest.get(title, 0.0))
    if len(read) < 2 or not largest:
        return None
    titles = sorted(largest, key=lambda title: -largest[title])[:MAX_FINDINGS]
    names = labels.distinct_labels((entry.name for entry in read), 20)
    rows = [
        [labels.clean(title), *(_gain(entry.gains.get(title)) for entry in read)]
        for title in titles
    ]
    return card(
        "Findings, run by run",
        table(("Finding", *names), rows, numbers=range(1, len(read) + 1), stacked=True),
        aside="gain per step; – means not found in that run",
    )


def _gain(ns: float | None) -> str:
    return "–" if ns is None else t.format_duration(ns)


def _row(entries: list[OpenedPath], place: int) -> list[Any]:
    entry = entries[place]
    summary = entry.summary
    href = f"/?run={entry.key}" if place else "/"
    shown = labels.shorten(labels.clean(entry.name), 48)
    name = link(shown, href=href, title=labels.clean(entry.path), cls="nowrap")
    verdict: Any = labels.shorten(t.split_sentences(entry.verdict, MAX_VERDICT)[0], 2 * MAX_VERDICT)
    if entry.state == "failed":
        verdict = t.first_sentence(entry.failure_reason)
    elif not verdict:
        verdict = element(
            "Span", "reading" if entry.state == "loading" else "not read yet", cls="dim"
        )
    if summary is None:
        return [name, *["–"] * (len(HEAD) - 2), verdict]
    started = "–"
    if 0 < summary.started_unix_ns < 4 << 60:
        started = f"{datetime.fromtimestamp(summary.started_unix_ns / 1e9):%Y-%m-%d %H:%M}"
    return [
        name,
        element("Span", started, cls="nowrap"),
        labels.clean(summary.commit) or "–",
        t.format_duration(summary.median_ns),
        _change(summary.median_ns, entries[place + 1 :]),
        t.format_count(summary.steps),
        t.format_count(summary.ranks),
        labels.shorten(labels.clean(summary.command), MAX_COMMAND) or "–",
        verdict,
    ]


def _change(median_ns: float | None, older: list[OpenedPath]) -> str:
    """Show the median step against the run before; nothing is said of its significance."""
    before = older[0].summary if older else None
    if not median_ns or before is None or not before.median_ns:
        return "–"
    change = median_ns / before.median_ns - 1
    return f"{change:+.1%}".replace("-", "−")
