"""Figures of a report as inline SVG: classes for colours, words for those who do not see them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape as _escape

from advisor.report import facts
from advisor.report import text as t
from advisor.report.data import Report
from advisor.report.strip import CELLS, Lane, Strip
from advisor.report.timebar import Segment, device_segments, host_segments

LONGEST = 2000
"""Characters of any one text on the page; what is longer is cut in its middle."""
_CLASS_OF = {
    "compute": "compute",
    "communication": "comm",
    "copies": "copies",
    "memset": "memset",
}
OTHERS = "idle: other causes"
_VAGUE = {"unknown", "other", t.HOST["unrecorded"]}


def esc(text: object, *, lines: bool = False) -> str:
    """Text that HTML and SVG show as it is, in elements and in quoted attributes."""
    return _escape(t.shorten(t.clean(text, lines=lines), LONGEST), quote=True)


def step_bar(report: Report) -> str:
    """The step as one stacked bar; empty: nothing is measured."""
    shown = _segments(report)
    if not shown:
        return ""
    parts, x = [], 0.0
    for name, segment in shown:
        width = max(0.0, min(segment.share, 1.0)) * 1000
        parts.append(
            f'<rect class="c-{name}" x="{x:.1f}" y="0" width="{width:.1f}" height="40">'
            f"<title>{esc(segment.label)} {_amount(segment)}</title></rect>"
        )
        x += width
    label = ", ".join(f"{segment.label} {t.percent(segment.share)}" for _, segment in shown)
    return _svg(1000, 40, "".join(parts), f"The step's time: {label}", "bar")


def step_legend(report: Report) -> str:
    """The parts of the bar as a table."""
    rows = "".join(
        f'<tr><th scope="row"><span class="key c-{name}"></span>{esc(_legend(name, segment))}</th>'
        f"<td>{t.time(segment.ns)}</td><td>{t.percent(segment.share)}</td></tr>"
        for name, segment in _segments(report)
    )
    head = '<tr><th scope="col"></th><th scope="col">time</th><th scope="col">share</th></tr>'
    return f'<table class="legend"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _segments(report: Report) -> list[tuple[str, Segment]]:
    """The parts of the bar, each with the class of its colour."""
    work, idle = device_segments(report) if report.time else (host_segments(report), [])
    return [*_classed(work, report), *((f"idle{i % 6}", s) for i, s in enumerate(idle))]


def _legend(name: str, segment: Segment) -> str:
    return f"idle: {segment.label}" if name.startswith("idle") else segment.label


def _classed(work: list[Segment], report: Report) -> Iterable[tuple[str, Segment]]:
    names = {t.LABELS[key]: css for key, css in _CLASS_OF.items()}
    for number, segment in enumerate(work):
        if report.time:
            yield names.get(segment.label, "memset"), segment
        else:
            yield (f"host{number % 5}" if segment.label not in _VAGUE else "host5"), segment


def _amount(segment: Segment) -> str:
    return f"{t.time(segment.ns)}, {t.percent(segment.share)}"


def staircase(report: Report) -> str:
    """What the step comes down to, fix by fix."""
    found = facts.ranked(report)
    step = report.scope.step_ns
    if not found or step <= 0:
        return ""
    unit = t.loop_unit(report.scope.step_source)
    rows = [("measured", step, 0.0, "")]
    left = step
    for finding in found:
        gain = float(max(0, finding.rank_gain_ns or 0))
        left = max(0.0, left - gain)
        rows.append((f"{finding.rank}. {t.clean(finding.title)}", left, gain, f"f{finding.rank}"))
    body = []
    for label, after, gain, anchor in rows:
        whole = (after + gain) / step * 100
        name = f'<a href="#{anchor}">{esc(label)}</a>' if anchor else esc(label)
        saved = f"−{t.time(gain)}" if gain else ""
        body.append(
            f'<tr><th scope="row">{name}</th><td class="track">'
            f"{_stair(after / step * 100, whole)}</td>"
            f"<td>{t.time(after)}</td><td>{saved}</td></tr>"
        )
    head = (
        f'<tr><th scope="col">then fix</th><th scope="col" class="track"></th>'
        f'<th scope="col">{unit}</th><th scope="col">saves</th></tr>'
    )
    return f'<table class="stairs"><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'


def _stair(left: float, whole: float) -> str:
    parts = f'<rect class="c-left" x="0" y="0" width="{min(left, 100):.2f}" height="10"/>'
    if whole > left:
        width = max(0.0, min(whole, 100) - left)
        parts += f'<rect class="c-saved" x="{left:.2f}" y="0" width="{width:.2f}" height="10"/>'
    return (
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" '
        f'focusable="false">{parts}</svg>'
    )


# -- the timeline -------------------------------------------------------------------------------


def timeline(shown: Strip, report: Report) -> str:
    """A strip a stream of one step, and when the device idled for which cause."""
    colours = _idle_colours(report)
    rows = [_lane(lane, colours) for lane in shown.lanes]
    ticks = "".join(
        f"<span>{t.time(shown.dur_ns * part / 4) if part else '0'}</span>" for part in range(5)
    )
    kinds = dict.fromkeys(run.kind for lane in shown.lanes for run in lane.runs)
    labels: dict[str, list[str]] = {}
    for kind in kinds:
        labels.setdefault(_class(kind, colours), []).append(_kind_label(kind))
    keys = "".join(
        f'<li><span class="key c-{name}"></span>{esc(same[0] if len(same) == 1 else OTHERS)}</li>'
        for name, same in sorted(labels.items())
    )
    more = f"<p>{shown.more} more streams have less work.</p>" if shown.more else ""
    return (
        f'<div class="strips">{"".join(rows)}<div class="axis">{ticks}</div></div>'
        f'<ul class="keys">{keys}</ul>{more}'
    )


def _lane(lane: Lane, colours: dict[str, str]) -> str:
    by_class: dict[str, list[str]] = {}
    for run in lane.runs:
        path = f"M{run.first},0h{run.last - run.first}v20h-{run.last - run.first}z"
        by_class.setdefault(_class(run.kind, colours), []).append(path)
    paths = "".join(f'<path class="c-{name}" d="{"".join(d)}"/>' for name, d in by_class.items())
    busy = t.percent(lane.busy)
    return (
        f'<div class="lane"><span class="name">{esc(lane.label)} <small>{busy}</small></span>'
        f'<svg viewBox="0 0 {CELLS} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(lane.label)}: {busy} of the step">{paths}</svg></div>'
    )


def _idle_colours(report: Report) -> dict[str, str]:
    """Causes in the order, and so in the colours, of the step bar."""
    _, idle = device_segments(report) if report.time else ([], [])
    place = {segment.label: f"idle{number % 6}" for number, segment in enumerate(idle)}
    rest = place.get("other causes", "idle5")
    return {part.cause: place.get(t.cause_label(part.cause), rest) for part in report.idle}


def _class(kind: str, colours: dict[str, str]) -> str:
    return _CLASS_OF.get(kind) or colours.get(kind, "idle5")


def _kind_label(kind: str) -> str:
    return kind if kind in _CLASS_OF else f"idle: {t.cause_label(kind)}"


def _svg(width: int, height: int, body: str, label: str, name: str) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {width} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{esc(label)}">{body}</svg>'
    )
