"""Runs: the runs of a folder, newest first, and how their step time went over time."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from advisor.core import text as t
from advisor.dashboard import current, figures
from advisor.dashboard.current import PageView
from advisor.dashboard.parts import card, el, figure, head, link, page, table
from advisor.dashboard.session import OpenedPath

HEAD = ("Run", "Started", "Commit", "Step", "Steps", "Ranks", "Program", "Verdict")
MAX_COMMAND, MAX_VERDICT = 60, 140


def has_content(view: PageView) -> bool:
    """Whether a folder of runs is open."""
    return bool(view.session.folder)


def layout(**query: object) -> Any:
    """The page."""
    view = current.view(**query)
    session = view.session
    if not session.folder:
        return page(head("Runs", "Open a folder of runs: advisor dashboard runs/"))
    place = next((i for i, e in enumerate(session.entries) if e is view.entry), 0)
    return page(
        head("Runs", t.clean(session.folder)),
        _history(session.entries),
        card(
            "All runs",
            table(
                HEAD,
                [_row(entry, i) for i, entry in enumerate(session.entries)],
                numbers=(3, 4, 5),
                names=(0, 6, 7),
                chosen=place,
                stacked=True,
            ),
            aside="a run is read when you open it; the newest is compared with each that was read",
        ),
    )


def _history(entries: list[OpenedPath]) -> Any:
    """The median step of each run, oldest first."""
    shown = [(e.name, e.summary) for e in reversed(entries) if e.summary and e.summary.median_ns]
    if len(shown) < 2:
        return None
    names = t.distinct_labels((name for name, _ in shown), 28)
    values = [(summary.median_ns or 0.0) / 1e6 for _, summary in shown]
    about = [f"{summary.commit or 'no commit'} · {summary.steps:,} steps" for _, summary in shown]
    return card(
        "Step time, run by run",
        figure(
            figures.run_history(names, values, list(map(figures.escape_markup, about))),
            "runs",
            height=280,
            description="The median step of each run; the table below has the numbers.",
        ),
        aside="median of the steps outside the profiler",
    )


def _row(entry: OpenedPath, place: int) -> list[Any]:
    summary = entry.summary
    href = f"/?run={entry.key}" if place else "/"
    name = link(t.shorten(t.clean(entry.name), 48), href=href, title=t.clean(entry.path))
    verdict: Any = t.shorten(t.clean(entry.verdict), MAX_VERDICT)
    if entry.state == "failed":
        verdict = t.shorten(t.clean(entry.why), MAX_VERDICT)
    elif not verdict:
        verdict = el("Span", "reading" if entry.state == "loading" else "not read yet", cls="dim")
    if summary is None:
        return [name, *["–"] * (len(HEAD) - 2), verdict]
    started = "–"
    if 0 < summary.started_unix_ns < 4 << 60:
        started = f"{datetime.fromtimestamp(summary.started_unix_ns / 1e9):%Y-%m-%d %H:%M}"
    return [
        name,
        started,
        t.clean(summary.commit) or "–",
        t.format_duration(summary.median_ns),
        t.format_count(summary.steps),
        t.format_count(summary.ranks),
        t.shorten(t.clean(summary.command), MAX_COMMAND) or "–",
        verdict,
    ]
