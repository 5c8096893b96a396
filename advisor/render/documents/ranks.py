"""The ranks of a job beside each other: their steps, similar ones, what a change gains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from advisor.advise.ranks import views
from advisor.core import text as t
from advisor.core.ranks import Ranks
from advisor.render.document import Block, Grid, Items, Section
from advisor.render.figures import Histogram, RankMap

MAX_GROUPS: Final = 6
"""Groups of ranks that a terminal lists."""
MAX_TEXT: Final = 400
"""Characters of a reason."""


def sections(ranks: Ranks) -> Iterator[Block]:
    """What a table of the ranks does not show; of a few, the map and lists alone."""
    many = len(ranks.lines) > views.FEW_RANKS
    if many and (bins := views.histogram(ranks)):
        figure = Histogram(("mean step", "ranks"), [(each.label, each.ranks) for each in bins])
        yield Section("The ranks' steps", [figure], "mean step, ranks")
    yield from _map(ranks)
    if many:
        yield from _groups(ranks)
    for title, _, lines in views.lists(ranks):
        yield Section(title, [Items([t.shorten(line, MAX_TEXT) for line in lines], "•")])


def _map(ranks: Ranks) -> Iterator[Block]:
    shown = views.heat_map(ranks)
    if shown is None:
        return
    rows = [
        [
            views.who(line),
            t.format_duration(line.step_ns),
            *(t.format_duration(value) for value in line.time),
        ]
        for line in shown.lines
    ]
    names = [views.label(name) for name in shown.classes]
    figure = RankMap(
        "Time per step by rank and class",
        names,
        [str(line.rank) for line in shown.lines],
        lambda column, row: shown.tint(shown.lines[column], row),
        lambda column, row: shown.title(shown.lines[column], row),
        t.format_duration(shown.scale_ns),
        Grid(["rank", "step", *names], rows),
        shown.note,
    )
    yield Section("Ranks × classes of time", [figure], "compared with the median rank")


def _groups(ranks: Ranks) -> Iterator[Block]:
    if not ranks.clusters:
        return
    total = dict.fromkeys(ranks.classes, 0.0)
    for group in ranks.clusters:
        for name, ns in group.time.items():
            total[name] = total.get(name, 0.0) + ns * group.count
    rows = [
        [
            t.shorten(t.clean(group.name), 24),
            views.shorten_numbers(group.ranks),
            t.format_count(group.count),
            t.format_duration(group.step_ns),
            *(t.format_duration(group.time.get(name)) for name in ranks.classes),
        ]
        for group in ranks.clusters
    ]
    head = ["group", "ranks", "how many", "step", *map(views.label, ranks.classes)]
    smallest = sorted(ranks.classes, key=lambda name: total[name])
    table = Grid(
        head,
        rows,
        align="ll" + "r" * (len(head) - 2),
        short=rows[:MAX_GROUPS],
        more=f"{t.count_noun(len(rows) - MAX_GROUPS, 'more group')}: --format json has all",
        optional=[1, *(4 + ranks.classes.index(name) for name in smallest)],
    )
    yield Section("Groups of similar ranks", [table], "median per step")
