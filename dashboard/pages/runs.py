"""Runs: the runs of a folder, newest first, with their step times and findings."""

from datetime import datetime
from typing import Any

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Impact
from advisor.dashboard import page_view, plotly_figures
from advisor.dashboard.components import card, element, figure, link, page, page_heading, table
from advisor.dashboard.grid import search_field
from advisor.dashboard.loaded_runs import OpenedPath
from advisor.dashboard.page_view import PageView

COLUMN_TITLES = (
    "Run",
    "Started",
    "Commit",
    "Step",
    "Change",
    "Steps",
    "Ranks",
    "Verdict and program",
)
OPTIONAL_COLUMNS = {"Commit": t.EMPTY_CELL, "Ranks": "1"}
"""Columns that are left out if every run has this value."""
NUMBER_COLUMNS, NAME_COLUMNS = ("Step", "Change", "Steps", "Ranks"), ("Run", "Verdict and program")
STEP_TIME_NOTE = "outside the profiler: the median, or the mean if steps vary"
_MAX_COMMAND, MAX_VERDICT = 60, 110
"""Lengths, characters. The first sentence of a verdict may be twice as long."""
_MAX_COLUMNS, _MAX_FINDINGS = 7, 12
"""Numbers of runs (the newest) and findings (the largest gains) in the table of findings."""


def has_content(view: PageView) -> bool:
    """Return whether a folder of runs is open."""
    return bool(view.session.folder)


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    session = view.session
    if not session.folder:
        return page(page_heading("Runs", "Open a folder of runs: advisor dashboard runs/"))
    shown_row = next((i for i, entry in enumerate(session.entries) if entry is view.entry), 0)
    header, rows = _drop_empty_columns(
        [_table_row(session.entries, i) for i in range(len(session.entries))]
    )
    return page(
        page_heading("Runs", labels.clean(session.folder)),
        _history_card(session.entries),
        _finding_card(session.entries),
        card(
            "All runs",
            table(
                header,
                rows,
                number_columns=[i for i, title in enumerate(header) if title in NUMBER_COLUMNS],
                name_columns=[i for i, title in enumerate(header) if title in NAME_COLUMNS],
                chosen_row=shown_row,
                stacked=True,
            ),
            aside="a run is read when you open it, and then compared with the newest one",
            tools=search_field("runs-search", "Runs", "search filter-rows"),
        ),
    )


def _drop_empty_columns(rows: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return titles and rows without the optional columns that have no information."""
    cells = list(zip(*rows, strict=True))
    empty_values = {
        title: {OPTIONAL_COLUMNS.get(title), t.EMPTY_CELL} for title in OPTIONAL_COLUMNS
    }
    kept_columns = [
        i
        for i, title in enumerate(COLUMN_TITLES)
        if title not in empty_values or not {*cells[i]} <= empty_values[title]
    ]
    return [COLUMN_TITLES[i] for i in kept_columns], [
        [row[i] for i in kept_columns] for row in rows
    ]


def _runs_of_program(entries: list[OpenedPath]) -> list[OpenedPath]:
    """Return the runs of the newest run's program. Times of different programs do not compare."""
    program = next((entry.summary.program for entry in entries if entry.summary), "")
    return [entry for entry in entries if entry.summary and entry.summary.program == program]


def _history_card(entries: list[OpenedPath]) -> Any:
    """Build the card of step times, run by run, oldest first."""
    runs = [
        (entry.name, entry.summary, entry.step) for entry in reversed(_runs_of_program(entries))
    ]
    measured_runs = [(name, summary, step) for name, summary, step in runs if summary and step]
    if len(measured_runs) < 2:
        return None
    names = labels.distinct_labels((name for name, _, _ in measured_runs), 28)
    details = [
        f"{summary.commit or plotly_figures.NO_COMMIT} · {t.count_noun(summary.steps, 'step')}"
        for _, summary, _ in measured_runs
    ]
    program = labels.clean(measured_runs[0][1].program)
    return card(
        f"Step time of {program}, run by run" if program else "Step time, run by run",
        figure(
            plotly_figures.run_history(
                names,
                [step.reference_ns / 1e6 for _, _, step in measured_runs],
                list(map(plotly_figures.escape_markup, details)),
            ),
            "runs",
            height=280,
            has_table=True,
            description="The step time of each run; the table below has the numbers.",
        ),
        aside=STEP_TIME_NOTE,
    )


def _finding_card(entries: list[OpenedPath]) -> Any:
    """Build the card of gains by finding and run, oldest run first. Only read runs have gains."""
    read_entries = [entry for entry in _runs_of_program(entries) if entry.verdict][:_MAX_COLUMNS][
        ::-1
    ]
    largest: dict[str, float] = {}
    for entry in read_entries:
        for title, gain in entry.gains.items():
            largest[title] = max(gain.gain_ns or 0.0, largest.get(title, 0.0))
    if len(read_entries) < 2 or not largest:
        return None
    titles = sorted(largest, key=lambda title: -largest[title])[:_MAX_FINDINGS]
    names = labels.distinct_labels((entry.name for entry in read_entries), 20)
    rows = [
        [labels.clean(title), *(_format_gain(entry.gains.get(title)) for entry in read_entries)]
        for title in titles
    ]
    return card(
        "Findings, run by run",
        table(
            ("Finding", *names), rows, number_columns=range(1, len(read_entries) + 1), stacked=True
        ),
        aside="gain per step; – means not found in that run",
    )


def _format_gain(gain: Impact | None) -> str:
    """Write a gain, or a dash without one."""
    return t.EMPTY_CELL if gain is None else t.format_saving(gain)


def _table_row(entries: list[OpenedPath], index: int) -> list[Any]:
    """Build the row of a run in the table of runs."""
    entry = entries[index]
    summary = entry.summary
    href = f"/?run={entry.key}" if index else "/"
    short_name = labels.shorten(labels.clean(entry.name), 48)
    name = link(short_name, href=href, title=labels.clean(entry.path), cls="nowrap")
    verdict: Any = labels.shorten(t.split_sentences(entry.verdict, MAX_VERDICT)[0], 2 * MAX_VERDICT)
    if entry.state == "failed":
        verdict = t.first_sentence(entry.failure_reason)
    elif not verdict:
        verdict = element(
            "Span", "reading" if entry.state == "loading" else "not read yet", cls="dim"
        )
    if summary is None:
        return [name, *[t.EMPTY_CELL] * (len(COLUMN_TITLES) - 2), verdict]
    command = labels.shorten(labels.clean(summary.command), _MAX_COMMAND)
    started = t.EMPTY_CELL
    if 0 < summary.started_unix_ns < 4 << 60:
        started = f"{datetime.fromtimestamp(summary.started_unix_ns / 1e9):%Y-%m-%d %H:%M}"
    return [
        name, element("Span", started, cls="nowrap"), labels.clean(summary.commit) or t.EMPTY_CELL,
        _step_cell(entry), _change_cell(entry, entries[index + 1 :]), t.format_count(summary.steps),
        t.format_count(summary.ranks),
        element("Div", verdict, element("Div", command, cls="dim mono") if command else None),
    ]  # fmt: skip


def _step_cell(entry: OpenedPath) -> Any:
    """Build the cell of the step time, or of the reason why it is missing.

    Marks means. Shows "not measured" only for runs already read."""
    if (step := entry.step) is not None:
        text = t.format_duration(step.reference_ns)
        return [text, element("Small", " mean", cls="dim")] if step.varies else text
    return element("Span", t.NOT_MEASURED if entry.verdict else "not read yet", cls="dim")


def _change_cell(entry: OpenedPath, older: list[OpenedPath]) -> str:
    """Write the change of the step time since the previous run, if it is of the same program.

    The significance of the change is not computed."""
    previous = older[0] if older else None
    if previous is None or not entry.step or not previous.step:
        return t.EMPTY_CELL
    programs = [candidate.summary.program for candidate in (entry, previous) if candidate.summary]
    if len(set(programs)) != 1:
        return t.EMPTY_CELL
    change = entry.step.reference_ns / previous.step.reference_ns - 1
    return t.format_share_change(change)
