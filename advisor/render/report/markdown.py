"""The Markdown renderer: the same report for a pull-request comment or a wiki page."""

from __future__ import annotations

from advisor.advise import facts, views
from advisor.core import text as t
from advisor.core.finding import Finding, Location
from advisor.core.report import Report
from advisor.core.views import Segment
from advisor.render import memory
from advisor.render.markdown import block, code, escape, table
from advisor.render.renderer import DEFAULT, Options, Renderer


class Markdown(Renderer[Report]):
    """GitHub-flavoured Markdown."""

    suffixes = (".md", ".markdown")

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """The report, with ``top`` findings."""
        parts = [f"**{escape(subject.verdict)}**", _scope(subject), _time(subject)]
        parts += [_ranks(subject), *_memory(subject), *_findings(subject, options.top)]
        parts += [*_apart(subject), *_rest(subject)]
        return "\n\n".join(part for part in parts if part) + "\n"


def _scope(report: Report) -> str:
    lines = [
        f"- {label}: {' · '.join(escape(part) for part in parts)}"
        for label, parts in (*facts.scope(report), *facts.figures(report))
    ]
    return "\n".join(lines)


def _time(report: Report) -> str:
    bar = views.step_bar(report)
    if bar is None:
        return ""
    rows = [_part(segment, segment.label) for segment in bar.work]
    if bar.idle_total is not None and bar.idle != [bar.idle_total]:
        rows.append(_part(bar.idle_total, bar.idle_total.label))
        rows += [_part(segment, f"– {segment.label}") for segment in bar.idle]
    else:
        rows += [_part(segment, segment.label) for segment in bar.idle]
    figures = table(["", "time", t.format_of(bar.per), ""], "lrrl", rows)
    return f"### {bar.heading}\n\n{figures}"


def _part(segment: Segment, label: str) -> list[str]:
    length = "█" * min(20, round(segment.share * 20))
    return [escape(label), segment.time, segment.percent, length]


def _ranks(report: Report) -> str:
    ranks = views.rank_table(report)
    if ranks is None:
        return ""
    figures = table(ranks.head, "r" * len(ranks.head), [row.cells for row in ranks.rows])
    notes = "\n\n".join(escape(note) for note in (ranks.more, ranks.note) if note)
    return f"### Ranks\n\n{figures}\n\n{notes}"


def _memory(report: Report) -> list[str]:
    """What a memory snapshot shows."""
    parts = []
    for device in memory.devices(report):
        parts.append(f"### {device.title}, {device.aside}")
        parts.append(
            "\n".join(
                f"- {label}: {' · '.join(escape(part) for part in told)}"
                for label, told in device.lines
            )
        )
        for one in device.tables:
            align = "l" + "r" * (len(one.head) - 1)
            rows = [[escape(cell) for cell in row] for row in one.rows]
            parts.append(f"**{one.title}**\n\n{table(one.head, align, rows)}")
    return parts


def _findings(report: Report, top: int | None) -> list[str]:
    found = facts.ranked(report)
    if not found:
        return []
    shown = found if top is None else found[:top]
    parts = ["### What to change"]
    for finding in shown:
        parts += _finding(report, finding)
    if len(shown) < len(found):
        parts.append(f"{len(found) - len(shown)} more: `--top {len(found)}`.")
    closing = [line for line in (facts.outlook(report), *facts.definitions(report)) if line]
    return [*parts, *(f"*{escape(line)}*" for line in closing)]


def _finding(report: Report, finding: Finding) -> list[str]:
    number = f"{finding.rank}. " if finding.rank is not None else ""
    parts = [
        f"#### {number}{escape(finding.title)}",
        f"**{escape(' · '.join(facts.gain_parts(finding, report)))}**",
        escape(finding.summary),
    ]
    where = facts.named_places(finding, name_width=80, path_width=100)
    places = [_place(location, names) for location, names in where]
    if any(places):
        parts.append("\n".join(f"- {place}" for place in places if place))
    parts.append(f"**Fix:** {escape(finding.fix)}")
    if finding.code:
        parts.append(block(finding.code))
    details = [f"- {escape(t.format_evidence(item))}" for item in finding.evidence]
    details += [f"- {escape(doubt)}" for doubt in facts.doubts(finding)]
    for other in facts.folded(report, finding):
        kind, text = facts.covered_line(finding, other)
        details.append(f"- {kind}: {escape(text)}")
    if finding.check:
        parts.append(f"**Check:** {escape(finding.check)}")
    if details:
        listed = "\n".join(details)
        parts.append(f"<details><summary>Evidence</summary>\n\n{listed}\n\n</details>")
    return parts


def _place(location: Location, names: list[str]) -> str:
    return " · ".join([*map(code, names), *t.location_figures(location)])


def _apart(report: Report) -> list[str]:
    parts = []
    if report.risks:
        parts.append("### Memory and risks")
        for finding in report.risks:
            parts += _finding(report, finding)
    if report.notes:
        parts.append("### Notes")
        lines = []
        for note in report.notes:
            reason = facts.why_note(note)
            aside = f" *({escape(reason)})*" if reason else ""
            impact = facts.note_gain(note)
            gain = f" *Worth:* {escape(impact)}." if impact else ""
            lines.append(
                f"- {escape(note.title)}{aside}: {escape(note.summary)}{gain} "
                f"*Fix:* {escape(note.fix)}"
            )
        parts.append("\n".join(lines))
    return parts


def _rest(report: Report) -> list[str]:
    parts = []
    if report.hot_lines:
        rows = [[share, code(place), code(text)] for share, place, text in facts.hot_lines(report)]
        figures = table(["CPU samples", "line", ""], "rll", rows)
        parts.append(f"### Hot Python lines\n\nOf a separate pass under Scalene.\n\n{figures}")
    if report.good:
        lines = "\n".join(f"- {escape(good.text)}" for good in report.good)
        parts.append(f"### What is good\n\n{lines}")
    missing = facts.abstentions(report)
    if missing:
        lines = "\n".join(f"- {escape(what)}: {escape(why)}" for what, why in missing)
        parts.append(f"### Not checked\n\n{lines}")
    if report.limits:
        lines = "\n".join(f"- {escape(limit)}" for limit in report.limits)
        parts.append(f"### Limits of this trace\n\n{lines}")
    return parts
