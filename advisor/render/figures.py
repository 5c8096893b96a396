"""Figures: the step's bar, the step after each fix, a step's timeline, ranks as histogram and map.

A figure draws itself as a table, for a page and, if useful, for a terminal. To add one, write a
class here and use it in a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from advisor.core import charts, labels
from advisor.core import text as t
from advisor.core.charts import FixSequence, Segment, StepBar
from advisor.render.document import Figure, Grid
from advisor.render.html import (
    Markup,
    color_class,
    color_class_of_segment,
    join,
    scrolling_box,
    tag,
)

if TYPE_CHECKING:
    from advisor.measure.steps.step_lanes import StepLanes

LAST_TICK: Final = 0.95
"""Share of an axis beyond which a text does not fit."""
WIDTH: Final = 1000
"""Width of a bar on a page, units."""
Parts = list[tuple[str, str]]


def block_bar(share: float, room: int) -> str:
    """Draw a bar of at most ``room`` columns. Any value above zero is visible."""
    return "█" * (max(1, round(min(share, 1.0) * room)) if share > 0 else 0)


def share_cells(shares: Sequence[float], width: int) -> list[int]:
    """Convert shares to whole cells, largest remainders first, with the same sum (at most
    ``width``)."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / max(total, 1.0) * width for share in shares]
    sizes = [int(size) for size in exact]
    missing = min(width, round(sum(exact))) - sum(sizes)
    by_remainder = sorted(range(len(exact)), key=lambda i: (sizes[i] - exact[i], i))
    for index in by_remainder[: max(0, missing)]:
        sizes[index] += 1
    return sizes


# -- where the time goes -------------------------------------------------------------------------


MIN_KEY_SHARE: Final = 0.02
"""Minimum share of the step at which a short legend names a part."""


@dataclass(frozen=True)
class Bar(Figure):
    """Bar of the step's time, in which each instant counts once. The timeline below it shares its
    legend."""

    bar: StepBar
    step: StepTimeline | None = None

    def table(self) -> Grid:
        """Return one row per part. Parts of the idle time follow its total."""
        bar = self.bar
        rows = [_table_row(segment, segment.label) for segment in bar.work]
        if bar.idle_total is not None and bar.idle != [bar.idle_total]:
            rows.append(_table_row(bar.idle_total, bar.idle_total.label))
            rows += [_table_row(segment, f"– {segment.label}") for segment in bar.idle]
        else:
            rows += [_table_row(segment, segment.label) for segment in bar.idle]
        return Grid(["", "time", t.format_of(bar.per), ""], rows, align="lrrl")

    def html(self, *, small: bool = False) -> Markup:
        bar = self.bar
        drawn = _draw_strip(bar.segments, f"The {bar.per}'s time: {bar.alt_text}")
        if small:
            keys = [
                tag(
                    "li",
                    legend_key(color_class_of_segment(segment)),
                    f"{segment.name} {segment.time}, {segment.share_text}",
                )
                for segment in bar.segments
            ]
            return join(drawn, tag("ul", *keys, cls="keys"))
        rows = [
            tag(
                "tr",
                tag("th", legend_key(color_class_of_segment(segment)), segment.name, scope="row"),
                tag("td", segment.time),
                tag("td", segment.share_text),
            )
            for segment in bar.segments
        ]
        head = table_head(["", "time", t.format_of(bar.per)])
        legend = tag("table", head, tag("tbody", *rows), cls="legend")
        if self.step is None:
            return join(drawn, legend)
        explained = set(map(color_class_of_segment, bar.segments))
        return join(drawn, self.step.draw_lanes(explained), legend)

    def lines(self, width: int, *, short: bool = False) -> list[Parts]:
        """Draw the bar. Below it are work on the left and causes of idle time on the right, or
        below each other on a narrow page. ``short``: only shares, as many per line as fit."""
        bar = self.bar
        if short:
            return self._short_lines(width)
        lengths = share_cells([segment.share for segment in bar.segments], width)
        both = zip(bar.segments, lengths, strict=True)
        drawn = [(s.look.glyph * length, s.look.style) for s, length in both if length]
        wide = max(len(segment.time) for segment in bar.segments)
        room = width - wide - 12
        left_room = min(max((len(s.label) for s in bar.work), default=0), room)
        right_room = min(max((len(s.label) for s in bar.idle), default=0), room)
        second = left_room + wide + 16 if bar.work and bar.idle else 0
        if second + right_room + wide + 12 > width:
            second = 0
            left_room = right_room = max(left_room, right_room)
        left = [_format_entry(segment, left_room, wide) for segment in bar.work]
        right = [_format_entry(segment, right_room, wide) for segment in bar.idle]
        if right:
            right.insert(0, [(f"  {bar.idle_title}", "dim")])
        if not second:
            return [drawn, *left, *right]
        rows = []
        for number in range(max(len(left), len(right))):
            parts = list(left[number]) if number < len(left) else []
            if number < len(right):
                blanks = " " * (second - sum(len(text) for text, _ in parts))
                parts += [(blanks, ""), *right[number]]
            rows.append(parts)
        return [drawn, *rows]

    def _short_lines(self, width: int) -> list[Parts]:
        """Draw the bar, and below it the glyph, name and share of each part. Small parts are one
        part, the last."""
        segments = self.bar.segments
        named = [
            s
            for s in segments
            if s.share >= MIN_KEY_SHARE and s.look.glyph != charts.OTHER_LOOK.glyph
        ]
        rest = sum(segment.share for segment in segments) - sum(s.share for s in named)
        parts = [(s.look.glyph, s.look.style, s.share, s.name, s.share_text) for s in named]
        parts.append((charts.OTHER_LOOK.glyph, "dim", rest, "smaller parts", t.format_share(rest)))
        cells = share_cells([share for _, _, share, *_ in parts], width)
        drawn = [(part[0] * count, part[1]) for part, count in zip(parts, cells, strict=True)]
        rows: list[Parts] = []
        used = width
        for (glyph, style, _, name, share_text), count in zip(parts, cells, strict=True):
            text = f" {name} {share_text}"
            is_rest = glyph == charts.OTHER_LOOK.glyph
            if not count or (is_rest and used + len(text) + 3 > width):
                continue
            if used + len(text) + 3 > width:
                rows.append([("  ", "")])
                used = 0
            rows[-1] += [
                ("  " * bool(used), ""),
                (glyph, style),
                (text, ""),
            ]
            used += len(text) + 3
        return [[part for part in drawn if part[0]], *rows]


def _draw_strip(segments: Sequence[Segment], label: str, scale: float = 1.0) -> Markup:
    """Draw only the bar. ``scale``: its share of the page's width."""
    parts, x = [], 0.0
    for segment in segments:
        width = max(0.0, min(segment.share, 1.0)) * WIDTH * scale
        title = tag("title", f"{segment.label} {segment.time}, {segment.share_text}")
        place = {"x": f"{x:.1f}", "y": 0, "width": f"{width:.1f}", "height": 40}
        parts.append(tag("rect", title, cls=color_class_of_segment(segment), **place))
        if segment.kind == "idle":  # hatched, so that the eye need not know the colours
            stripes = range(round(x) + 6, round(x + width), 12)
            path = "".join(f"M{at},40l{min(10, x + width - at):.0f},-40" for at in stripes)
            parts.append(tag("path", cls="hatch", d=Markup(path)))
        x += width
    return tag(
        "svg", *parts, cls="bar", viewBox=f"0 0 {WIDTH} 40", preserveAspectRatio="none",
        role="img", aria_label=label,
    )  # fmt: skip


@dataclass(frozen=True)
class ComparedBars(Figure):
    """Bars of the step before and after, on the same scale."""

    sides: Sequence[tuple[str, float, Sequence[Segment]]]
    """Name of each side, its step time in ns, and its parts."""

    def table(self) -> None:
        """Return ``None``: the table beside it has the numbers."""

    def html(self, *, small: bool = False) -> Markup:
        longest, lanes = max(ns for _, ns, _ in self.sides), []
        for name, ns, own in self.sides:
            time, scale = t.format_duration(ns), ns / longest
            label = ", ".join(f"{segment.name} {segment.share_text}" for segment in own)
            title = tag("span", f"{name} ", tag("small", time), cls="name")
            lanes.append(
                tag("div", title, _draw_strip(own, f"{name}, {time}: {label}", scale), cls="lane")
            )
        parts = {s.name: color_class_of_segment(s) for _, _, own in self.sides for s in own}
        keys = [tag("li", legend_key(cls), name) for name, cls in parts.items()]
        return join(tag("div", *lanes, cls="strips"), tag("ul", *keys, cls="keys"))


def _table_row(segment: Segment, label: str) -> list[str]:
    length = "█" * min(20, round(segment.share * 20))
    return [label, segment.time, segment.share_text, length]


def _format_entry(segment: Segment, room: int, wide: int) -> Parts:
    label = labels.shorten(segment.label, room)
    return [
        (f"  {segment.look.glyph} ", segment.look.style),
        (f"{label:<{room}}  ", ""),
        (f"{segment.time:>{wide}}  {segment.share_text:>4}", ""),
    ]


def legend_key(cls: str) -> Markup:
    """Draw a square of a colour, for a legend."""
    return tag("span", cls=f"key {cls}")


def table_head(names: Sequence[str]) -> Markup:
    heads = (tag("th", name, scope="col") if name else tag("td", cls="track") for name in names)
    return tag("thead", tag("tr", *heads))


# -- what it comes down to -----------------------------------------------------------------------


@dataclass(frozen=True)
class FixSequenceFigure(Figure):
    """Drawing of the step after each fix."""

    fix_sequence: FixSequence

    def table(self) -> Grid:
        """Return one row per fix: its saving after the fixes above it, and the remaining step."""
        sequence = self.fix_sequence
        rows = [
            [f"{s.number}. {s.label}".lstrip(". "), f"{s.saved} {s.percent}".strip(), s.left]
            for s in sequence.fixes
        ]
        return Grid(
            ["fix", f"saves {sequence.bound_prefix}after those above", f"{sequence.per} then"], rows
        )

    def html(self, *, small: bool = False) -> Markup:
        """Draw one track per fix: the remaining step, and the saving of this fix."""
        sequence = self.fix_sequence
        head = table_head(
            ["after fix", "", sequence.per, f"saves {sequence.bound_prefix}after those above"]
        )
        rows = []
        for stair in sequence.all:
            left = min(stair.left_share * 100, 100)
            before = min((stair.left_share + stair.saved_share) * 100, 100)
            track = tag(
                "svg", _draw_rect("c-left", 0, left), _draw_rect("c-saved", left, before - left),
                viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true",
                focusable="false",
            )  # fmt: skip
            name: object = stair.label
            if stair.number:
                name = tag("a", f"{stair.number}. {stair.label}", href=f"#f{stair.number}")
            saved = f"{stair.saved} {stair.percent}" if stair.saved else ""
            cells_ = tag("td", track, cls="track"), tag("td", stair.left), tag("td", saved)
            rows.append(tag("tr", tag("th", name, scope="row"), *cells_))
        return tag("table", head, tag("tbody", *rows), cls="stairs")


def _draw_rect(cls: str, x: float, width: float) -> Markup:
    return tag("rect", cls=cls, x=f"{x:.2f}", y=0, width=f"{max(width, 0.0):.2f}", height=10)


# -- a step as strips ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimeline:
    """Timeline of one step: one lane per stream, and idle time of the device by cause."""

    title: str
    strip: StepLanes
    framework: str | None
    caption: str
    """Unit of shares, such as ``of the step``."""
    outside: bool = False
    """Whether idle time of unknown cause is code outside operators."""

    def draw_lanes(self, explained: Collection[str]) -> Markup:
        """Draw the lanes. ``explained``: colour classes that another legend already explains."""
        from advisor.measure.steps.step_lanes import CELLS

        shown = self.strip
        lanes = []
        for lane in shown.lanes:
            paths: dict[str, str] = {}
            for run in lane.runs:
                name, length = _kind(run.kind), run.last - run.first
                paths[name] = f"{paths.get(name, '')}M{run.first},0h{length}v20h-{length}z"
            busy = t.format_share(lane.busy)
            drawn = tag(
                "svg",
                *(tag("path", cls=name, d=Markup(path)) for name, path in paths.items()),
                viewBox=f"0 0 {CELLS} 20", preserveAspectRatio="none", role="img",
                aria_label=f"{lane.label}: {busy} {self.caption}",
            )  # fmt: skip
            name = tag("span", f"{lane.label} ", tag("small", busy), cls="name")
            lanes.append(tag("div", name, drawn, cls="lane"))
        axis = tag("div", _draw_axis(shown.dur_ns), cls="axis")
        kinds = {run.kind for lane in shown.lanes for run in lane.runs}
        keys = [
            tag("li", legend_key(_kind(kind)), self._label_kind(kind))
            for kind in sorted(kinds, key=_kind)
            if _kind(kind) not in explained
        ]
        more = (
            f"{t.count_noun(shown.omitted_streams, 'more stream')} with less work."
            if shown.omitted_streams
            else ""
        )
        return join(
            tag("h3", self.title),
            tag("div", *lanes, axis, cls="strips"),
            tag("ul", *keys, cls="keys") if keys else "",
            tag("p", more) if more else "",
        )

    def _label_kind(self, kind: str) -> str:
        if kind in charts.CLASSES:
            return kind
        return f"idle: {t.cause_label(kind, self.framework, outside=self.outside)}"


def _draw_axis(dur_ns: float) -> Markup:
    """Draw an axis from 0 with three to seven round times. The last one leaves room for its
    text."""
    power = 10 ** math.floor(math.log10(max(dur_ns, 1) / 10))
    step = next(each for m in (1, 2, 2.5, 5, 10, 20) if dur_ns / (each := m * power) <= 6)
    marks = [
        tag(
            "text", t.format_duration(at * step) if at else "0", x=f"{at * step / dur_ns:.2%}", y=12
        )
        for at in range(int(dur_ns / step) + 1)
        if at * step <= LAST_TICK * dur_ns
    ]
    return tag("svg", *marks, aria_hidden="true", focusable="false")


def _kind(kind: str) -> str:
    return color_class(kind, "work" if kind in charts.CLASSES else "idle")


# -- many ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Histogram(Figure):
    """Histogram: number of things of each size."""

    head: tuple[str, str]
    """Quantity of the bins, and the counted things."""
    bins: Sequence[tuple[str, int]]

    def _most(self) -> int:
        return max((count for _, count in self.bins), default=1) or 1

    def table(self) -> Grid:
        rows = [
            [name, t.format_count(count), block_bar(count / self._most(), 30)]
            for name, count in self.bins
        ]
        return Grid([*self.head, ""], rows, align="rrl")

    def lines(self, width: int, *, short: bool = False) -> list[Parts]:
        wide = max(len(name) for name, _ in self.bins)
        digits = len(t.format_count(self._most()))
        room = width - wide - digits - 6
        return [
            [
                (f"  {name:>{wide}}  {t.format_count(count):>{digits}}  ", ""),
                (block_bar(count / self._most(), room), "green"),
            ]
            for name, count in self.bins
        ]

    def html(self, *, small: bool = False) -> Markup:
        return _draw_tracks(self.head, self.bins, t.format_count)


@dataclass(frozen=True)
class Sizes(Figure):
    """Bytes of each kind as bars."""

    head: str
    parts: Sequence[tuple[str, int]]

    def table(self) -> None:
        """Return ``None``: only a page shows it; a line beside it has the numbers."""

    def html(self, *, small: bool = False) -> Markup:
        return _draw_tracks((self.head, "bytes"), self.parts, t.format_bytes)


def _draw_tracks(
    head: tuple[str, str], parts: Sequence[tuple[str, int]], write: Callable[[int], str]
) -> Markup:
    """Draw one row per part, with a bar as long as its share of the largest."""
    most, rows = max((size for _, size in parts), default=1) or 1, []
    for name, size in parts:
        length = max(size / most * 100, 0.5) if size else 0
        track = tag(
            "svg", _draw_rect("c-left", 0, length), viewBox="0 0 100 10",
            preserveAspectRatio="none", aria_hidden="true",
        )  # fmt: skip
        cells_ = tag("td", write(size)), tag("td", track, cls="track")
        rows.append(tag("tr", tag("th", name, scope="row"), *cells_))
    return tag("table", table_head([*head, ""]), tag("tbody", *rows), cls="stairs")


SHADES_PER_SIDE: Final = 4
"""Number of colours on either side of the median's colour."""
RANKS_PER_STRIP: Final = 128
"""Maximum number of columns in one strip. More columns go into strips below each other."""
MAP_WIDTH, HIGH, LABELS, GAP, TOP = 1024, 15, 132, 10, 14
"""Sizes of the map: width of a full strip, height of a row, room for names, between strips, for the
numbers above one."""


@dataclass(frozen=True)
class RankMap(Figure):
    """Columns × rows of cells, coloured by their distance to the median."""

    label: str
    names: Sequence[str]
    """Names of the rows of cells, from the top."""
    columns: Sequence[str]
    """Numbers above the cells."""
    tint: Callable[[int, int], float | None]
    """Tint of a cell by (column, row), -1 to 1, or ``None`` if not measured."""
    words: Callable[[int, int], str]
    """Text of a cell by (column, row)."""
    is_effect: Callable[[int], bool]
    """Whether other ranks cause a row's time. Its cells are then grey."""
    scale: str
    """Difference at which the colour scale ends."""
    numbers: Grid
    """Table of the values in the cells."""
    note: str = ""

    def table(self) -> None:
        """Return ``None``: only a page shows it; the groups of ranks stand in its place."""

    def html(self, *, small: bool = False) -> Markup:
        """Draw the map, its scale, and its numbers on demand."""
        wide = min(48.0, MAP_WIDTH / min(RANKS_PER_STRIP, len(self.columns)))
        every = max(1, round(64 / wide))  # a number of four digits is about 30 units wide
        each = TOP + HIGH * len(self.names) + GAP
        drawn: list[Markup] = []
        for number, first in enumerate(range(0, len(self.columns), RANKS_PER_STRIP)):
            top = number * each
            count = min(RANKS_PER_STRIP, len(self.columns) - first)
            for index in range(0, count, every):
                x = f"{LABELS + index * wide:.6g}"
                drawn.append(tag("text", self.columns[first + index], x=x, y=top + 10))
            for row, name in enumerate(self.names):
                y = top + TOP + HIGH * row
                label = labels.shorten(name, 20)
                drawn.append(tag("text", label, x=LABELS - 6, y=y + HIGH - 4, text_anchor="end"))
                drawn += [self._cell(first + at, row, at * wide, y, wide) for at in range(count)]
        strips = -(-len(self.columns) // RANKS_PER_STRIP)
        height = (strips - 1) * each + TOP + HIGH * len(self.names)
        room = f"{LABELS + wide * min(RANKS_PER_STRIP, len(self.columns)):.6g}"
        picture = tag(
            "svg", *drawn, cls="map", viewBox=f"0 0 {room} {height}", width=room, role="img",
            aria_label=f"{self.label}; the table below has the numbers",
        )  # fmt: skip
        shades = [
            tag("i", cls=f"h{shade}") for shade in range(-SHADES_PER_SIDE, SHADES_PER_SIDE + 1)
        ]
        rows = [
            tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
            for row in self.numbers.rows
        ]
        numbers = tag("table", table_head(self.numbers.head), tag("tbody", *rows), cls="ranks")
        return join(
            scrolling_box(f"{self.label}: the map", picture),
            tag("p", f"{self.scale} less ", *shades, f" {self.scale} more", cls="scale"),
            tag("p", self.note, cls="soft") if self.note else "",
            tag("details", tag("summary", "The numbers"), scrolling_box(self.label, numbers)),
        )

    def _cell(self, column: int, row: int, x: float, y: int, wide: float) -> Markup:
        tint = self.tint(column, row)
        effect = self.is_effect(row)
        cls = "hx" if tint is None else f"h{round(tint * SHADES_PER_SIDE)}"
        shade = f"{(tint + 1) / 2:.2f}" if effect and tint is not None else None
        cls = cls if shade is None else "effect"
        title = tag("title", self.words(column, row))
        place = {"x": f"{LABELS + x:.6g}", "y": y, "width": f"{wide - 0.5:.6g}"}
        return tag("rect", title, cls=cls, height=HIGH - 1, fill_opacity=shade, **place)
