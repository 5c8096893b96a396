"""Runs: the runs of a folder, newest first, and how their step time went over time."""

from datetime import datetime
from typing import Any

from advisor.core import labels
from advisor.core import text as t
from advisor.dashboard import page_view, plotly_figures
from advisor.dashboard.components import card, element, figure, head, link, page, table
from advisor.dashboard.grid import search_field
from advisor.dashboard.loaded_runs import OpenedPath
from advisor.dashboard.page_view import PageView

HEAD = ("Run", "Started", "Commit", "Step", "Change", "Steps", "Ranks", "Verdict and program")
OPTIONAL = {"Commit": t.EMPTY_CELL, "Ranks": "1"}
"""Columns that are left out where every run has this."""
NUMBERS, NAMES = ("Step", "Change", "Steps", "Ranks"), ("Run", "Verdict and program")
OUTSIDE = "outside the profiler: the median, or the mean where steps vary"
MAX_COMMAND, MAX_VERDICT = 60, 110
"""Lengths, characters; a verdict's first sentence stays whole if it fits twice as many."""
MAX_COLUMNS, MAX_FINDINGS = 7, 12
"""Numbers of runs and findings in the table of findings: the newest, and the largest."""


def has_content(view: PageView) -> bool:
    return bool(view.session.folder)


def layout(**query: object) -> Any:
    view = page_view.view(**query)
    session = view.session
    if not session.folder:
        return page(head("Runs", "Open a folder of runs: advisor dashboard runs/"))
    place = next((i for i, e in enumerate(session.entries) if e is view.entry), 0)
    header, rows = _columns([_row(session.entries, i) for i in range(len(session.entries))])
    return page(
        head("Runs", labels.clean(session.folder)),
        _history(session.entries),
        _findings(session.entries),
        card(
            "All runs",
            table(
                header,
                rows,
                numbers=[i for i, title in enumerate(header) if title in NUMBERS],
                names=[i for i, title in enumerate(header) if title in NAMES],
                chosen=place,
                stacked=True,
            ),
            aside="a run is read when you open it; each that was read is compared with the newest",
            tools=search_field("runs-search", "Runs", "search filter-rows"),
        ),
    )


def _columns(rows: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the titles and rows without the columns that say nothing."""
    cells = list(zip(*rows, strict=True))
    empty = {title: {OPTIONAL.get(title), t.EMPTY_CELL} for title in OPTIONAL}
    kept = [
        i for i, title in enumerate(HEAD) if title not in empty or not {*cells[i]} <= empty[title]
    ]
    return [HEAD[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _of_program(entries: list[OpenedPath]) -> list[OpenedPath]:
    """Return the runs of the newest run's program: times of different ones are not comparable."""
    program = next((e.summary.program for e in entries if e.summary), "")
    return [e for e in entries if e.summary and e.summary.program == program]


def _history(entries: list[OpenedPath]) -> Any:
    """Draw the step time of each run of one program, oldest first."""
    shown = [(e.name, e.summary, e.step) for e in reversed(_of_program(entries))]
    known = [(name, about, step) for name, about, step in shown if about and step]
    if len(known) < 2:
        return None
    names = labels.distinct_labels((name for name, _, _ in known), 28)
    about = [
        f"{summary.commit or plotly_figures.NO_COMMIT} · {t.count_noun(summary.steps, 'step')}"
        for _, summary, _ in known
    ]
    program = labels.clean(known[0][1].program)
    return card(
        f"Step time of {program}, run by run" if program else "Step time, run by run",
        figure(
            plotly_figures.run_history(
                names,
                [step.reference_ns / 1e6 for _, _, step in known],
                list(map(plotly_figures.escape_markup, about)),
            ),
            "runs",
            height=280,
            has_table=True,
            description="The step time of each run; the table below has the numbers.",
        ),
        aside=OUTSIDE,
    )


def _findings(entries: list[OpenedPath]) -> Any:
    """Build a table of what each run that was read could gain, by finding, oldest run first."""
    read = [entry for entry in _of_program(entries) if entry.verdict][:MAX_COLUMNS][::-1]
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
    return t.format_cell(ns, t.format_duration)


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
        return [name, *[t.EMPTY_CELL] * (len(HEAD) - 2), verdict]
    command = labels.shorten(labels.clean(summary.command), MAX_COMMAND)
    started = t.EMPTY_CELL
    if 0 < summary.started_unix_ns < 4 << 60:
        started = f"{datetime.fromtimestamp(summary.started_unix_ns / 1e9):%Y-%m-%d %H:%M}"
    return [
        name, element("Span", started, cls="nowrap"), labels.clean(summary.commit) or t.EMPTY_CELL,
        _step(entry), _change(entry, entries[place + 1 :]), t.format_count(summary.steps),
        t.format_count(summary.ranks),
        element("Div", verdict, element("Div", command, cls="dim mono") if command else None),
    ]  # fmt: skip


def _step(entry: OpenedPath) -> Any:
    """Show the step time, named where it is the mean. Where it is missing, say why: only a run that
    was read may be called not measured."""
    if (step := entry.step) is not None:
        text = t.format_duration(step.reference_ns)
        return [text, element("Small", " mean", cls="dim")] if step.varies else text
    return element("Span", t.NOT_MEASURED if entry.verdict else "not read yet", cls="dim")


def _change(entry: OpenedPath, older: list[OpenedPath]) -> str:
    """Show the step time against the run before, if that is of the same program. No significance
    is computed."""
    before = older[0] if older else None
    if before is None or not entry.step or not before.step:
        return t.EMPTY_CELL
    programs = [each.summary.program for each in (entry, before) if each.summary]
    if len(set(programs)) != 1:
        return t.EMPTY_CELL
    change = entry.step.reference_ns / before.step.reference_ns - 1
    return t.format_share_change(change)
