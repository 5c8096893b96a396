"""Compare: two runs side by side, and whether what was advised did what it promised."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from advisor.compare import view as words
from advisor.compare.data import Comparison, Distribution, FindingChange
from advisor.dashboard import current, figures, stepbar, theme
from advisor.dashboard.current import View
from advisor.dashboard.dom import el
from advisor.dashboard.parts import banner, card, choices, empty, figure, head, page, table
from advisor.dashboard.session import Entry
from advisor.report import text as t

BEFORE, AFTER = "#9a9aa5", theme.ACCENT
MOST_WORK = 20
STATUS = {
    "slower": ("failed", "Slower"),
    "faster": ("healthy", "Faster"),
    "no difference": ("", "No difference shown"),
    "not measured": ("", "Not measured"),
}
MARKS = {"fixed": "healthy", "new": "failed", "remaining": "bottlenecks"}


def layout(other: object = None, **query: object) -> Any:
    """The page; ``other`` is the run that the first is compared with."""
    view = current.view(**query)
    pairs = view.session.pairs
    if not pairs:
        return page(
            head("Compare"),
            empty(
                "One run is open",
                "Two are needed to say what became faster or slower.",
                "Start with both: advisor dashboard BEFORE AFTER, or advisor compare on the "
                "command line.",
            ),
        )
    keys = [after for _, after in pairs]
    # the chosen run, unless it is the first, which all others are compared with
    wanted = str(other) if str(other) in keys else view.entry.key
    after = view.session.entry(wanted if wanted in keys else keys[0])
    before = view.session.entry(pairs[0][0])
    found = view.session.comparison(before.key, after.key)
    chooser = _chooser(view, keys, after)
    if found is None or isinstance(found, str):
        why = t.clean(found) if found else "The comparison is being made; reload in a moment."
        title = "These cannot be compared" if found else "Not yet"
        return page(head("Compare", None, chooser), empty(title, why))
    return page(
        _head(found, chooser),
        banner(found.limits),
        _steps(found),
        _breakdown(found, before, after),
        _findings(found),
        _realised(found),
        _work(found),
    )


def _chooser(view: View, keys: list[str], after: Entry) -> Any:
    if len(keys) < 2:
        return None
    entries = [view.session.entry(key) for key in keys]
    return choices(
        "With",
        [
            (
                t.shorten(t.clean(entry.name), 40),
                view.href("/compare", other=entry.key),
                entry is after,
            )
            for entry in entries
        ],
    )


def _head(c: Comparison, chooser: Any) -> Any:
    look, word = STATUS[c.steps.verdict]
    sides = [
        el("Span", el("B", label), " ", t.clean(" · ".join(parts)))
        for label, parts in words.sides(c)
    ]
    return el(
        "Div",
        el("Span", word, cls=f"pill {look}"),
        el("H1", t.clean(c.verdict)),
        el("Div", *sides, cls="scope"),
        chooser,
        cls="page-head",
    )


def _steps(c: Comparison) -> Any:
    made = words.step_table(c)
    if made is None or c.steps.before is None or c.steps.after is None:
        return empty("Step times are not compared", t.clean(c.steps.reason))
    notes = [t.clean(note) for note in words.step_notes(c.steps)]
    return card(
        "Step times",
        figure(
            _distribution(c.steps.before, c.steps.after),
            "step-times",
            height=230,
            description="Share of the steps that are at most as long, before and after.",
        ),
        table(made.head, _signed(made.rows), numbers=(1, 2, 3)),
        *(el("P", note, cls="note-line", style={"marginTop": "10px"}) for note in notes),
    )


def _distribution(before: Distribution, after: Distribution) -> Any:
    """Both as cumulative shares: no bins to choose, every step is in it."""
    made = figures.base(230)
    for name, side, colour in (("before", before, BEFORE), ("after", after, AFTER)):
        at = sorted(side.durations_ns)
        shares = [(i + 1) / len(at) for i in range(len(at))]
        x, y = figures.thin([ns / 1e6 for ns in at], shares)
        made.add_trace(
            go.Scatter(
                x=x, y=y, name=name, mode="lines+markers" if len(at) < 40 else "lines",
                line={"shape": "hv", "width": 1.8, "color": colour},
                marker={"size": 5, "color": colour},
                hovertemplate="%{y:.0%} take at most %{x:,.2f} ms<extra>" + name + "</extra>",
            )
        )  # fmt: skip
    made.update_xaxes(title="ms a step")
    made.update_yaxes(title="share of steps", tickformat=".0%", range=[0, 1.04], nticks=5)
    made.update_layout(showlegend=True, margin={"t": 34})
    return made


def _signed(rows: list[list[str]]) -> list[list[Any]]:
    """Cells with a change coloured: less is better for times, and the sign says so too."""
    return [[*row[:-1], _change(row[-1])] for row in rows]


def _change(text: str) -> Any:
    text = t.clean(text)
    return el("Span", text, cls="dim") if text else ""


def _breakdown(c: Comparison, before: Entry, after: Entry) -> Any:
    made = words.breakdown(c)
    strips = []
    for name, entry in (("before", before), ("after", after)):
        if entry.loaded is None:
            continue
        work, idle = stepbar.pieces(entry.loaded.report)
        if work or idle:
            strips.append(
                el(
                    "Div",
                    el("Span", name, cls="dim"),
                    stepbar.strip([*work, *idle], f"The step {name}", thin=True),
                    cls="strip-line",
                )
            )
    return card(
        "Where the time goes",
        el("Div", *strips, cls="strips") if strips else None,
        table(made.head, _signed(made.rows), numbers=(1, 2, 3)),
    )


def _findings(c: Comparison) -> Any:
    groups = words.findings(c)
    if not groups:
        return empty("No findings", "Neither of the two has any.")
    parts: list[Any] = []
    for title, items in groups:
        parts.append(
            el(
                "Section",
                el("Span", f"{title} {len(items)}", cls=f"pill {MARKS.get(items[0].change, '')}"),
                el("Ul", *(_finding(item) for item in items), cls="changes"),
            )
        )
    return card("Findings", el("Div", *parts, cls="stack"))


def _finding(item: FindingChange) -> Any:
    title, *rest = (t.clean(part) for part in words.finding(item))
    return el("Li", el("B", title), el("Span", " · ".join(rest), cls="dim") if rest else None)


def _realised(c: Comparison) -> Any:
    sentences = [t.clean(sentence) for sentence in words.realised(c)]
    if not sentences:
        return None
    return card("Promised and kept", *(el("P", sentence) for sentence in sentences))


def _work(c: Comparison) -> Any:
    made = words.work(c, MOST_WORK)
    if made is None or not made.rows:
        return None
    return card(
        "Operators that differ",
        table(made.head, _signed([[t.clean(x) for x in row] for row in made.rows]),
              numbers=range(1, len(made.head)), caption="Device time and launches a step"),
        aside="matched by operator and shape, so across GPUs too",
    )  # fmt: skip
