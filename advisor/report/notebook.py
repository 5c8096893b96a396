"""What a notebook shows of a Report or a Comparison: a few lines, styled inline, escaped.

Colours come from the notebook's own theme where they can; nothing is loaded and nothing runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.report import facts
from advisor.report import text as t
from advisor.report.data import Report
from advisor.report.figures import esc
from advisor.report.timebar import Segment, device_segments, host_segments

if TYPE_CHECKING:
    from advisor.compare import Comparison

MOST_FINDINGS = 5
_WORK = ("#2a9d77", "#b0609a", "#3a7fc4", "#7fb5d6", "#8d6e63", "#868d96")
_IDLE = ("#d3503f", "#e08e0b", "#d9bb2b", "#8d6e63", "#a79bb3", "#868d96")
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"
_BOX = "font-family:system-ui,sans-serif;line-height:1.45;max-width:60em"


def report_html(report: Report) -> str:
    """Verdict, the step as a bar, the findings worth most."""
    found = facts.ranked(report)
    unit = t.loop_unit(report.scope.step_source)
    rows = [
        [
            str(finding.rank),
            t.clean(finding.title),
            t.gain(finding, step=unit),
            " · ".join(t.place_names(finding.where[0])[:1]) if finding.where else "",
        ]
        for finding in found[:MOST_FINDINGS]
    ]
    more = ""
    if len(found) > len(rows):
        more = f"<p>{len(found) - len(rows)} more findings.</p>"
    missing = facts.abstentions(report)
    if missing:
        more += f'<p style="opacity:.75">{len(missing)} things could not be checked.</p>'
    return (
        f'<div style="{_BOX}"><p><b>{esc(report.verdict)}</b></p>{_bar(report)}'
        f"{_table(['', 'what to change', 'worth', 'where'], rows)}{more}</div>"
    )


def _bar(report: Report) -> str:
    work, idle = device_segments(report) if report.time else (host_segments(report), [])
    parts = [*_coloured(work, _WORK), *_coloured(idle, _IDLE)]
    if not parts:
        return ""
    bar = "".join(
        f'<div title="{esc(segment.label)} {t.percent(segment.share)}" style="background:{colour};'
        f'width:{max(0.0, min(segment.share, 1.0)) * 100:.2f}%"></div>'
        for colour, segment in parts
    )
    legend = " &nbsp; ".join(
        f'<span style="color:{colour}">■</span> {esc(segment.label)} {t.percent(segment.share)}'
        for colour, segment in parts
        if segment.share >= 0.01
    )
    return (
        '<div style="display:flex;height:18px;border-radius:3px;overflow:hidden;'
        f'background:rgba(128,128,128,.2)">{bar}</div>'
        f'<p style="font-size:.88em;margin:.3em 0 .8em">{legend}</p>'
    )


def _coloured(segments: list[Segment], colours: tuple[str, ...]) -> list[tuple[str, Segment]]:
    return [(colours[i % len(colours)], segment) for i, segment in enumerate(segments)]


def comparison_html(comparison: Comparison) -> str:
    """Verdict, limits, step times, what became of the findings."""
    from advisor.compare import view

    limits = "".join(f"<p>⚠ {esc(limit)}</p>" for limit in comparison.limits)
    steps = view.step_table(comparison)
    parts = [_table(steps.head, steps.rows)] if steps is not None else []
    for title, items in view.findings(comparison):
        rows = [view.finding(item)[:2] for item in items[:MOST_FINDINGS]]
        parts.append(_table([f"{title} ({len(items)})", ""], [[*row, ""][:2] for row in rows]))
    return (
        f'<div style="{_BOX}"><p><b>{esc(comparison.verdict)}</b></p>{limits}{"".join(parts)}</div>'
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th style="{_CELL}">{esc(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{esc(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        '<table style="border-collapse:collapse;font-size:.92em;margin:.4em 0">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    )
