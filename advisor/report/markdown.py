"""The Markdown renderer: the same report for a pull-request comment or a wiki page."""

from __future__ import annotations

import re

from advisor.model import Finding, Location
from advisor.report import facts
from advisor.report import text as t
from advisor.report.data import Report

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_LIST = re.compile(r"^(\s*)([-+=#]|\d+(?=[.)](?:\s|$)))")


def render(report: Report, *, top: int | None = None) -> str:
    """The report as GitHub-flavoured Markdown. ``top``: only so many findings."""
    parts = [f"**{escape(report.verdict)}**", _scope(report), _time(report), _ranks(report)]
    parts += _findings(report, top)
    parts += _apart(report)
    parts += _rest(report)
    return "\n\n".join(part for part in parts if part) + "\n"


# -- escaping -----------------------------------------------------------------------------------


def escape(text: object) -> str:
    """Text that Markdown, HTML and GitHub's own syntax (mentions, issue numbers) leave alone."""
    safe = t.clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _SPECIAL.sub(r"\\\g<0>", safe)
    safe = _LIST.sub(lambda m: f"{m[1]}{m[2]}\\" if m[2].isdigit() else f"{m[1]}\\{m[2]}", safe)
    # An empty comment keeps the two apart: nobody is notified, no issue or address is linked.
    safe = re.sub(r"@|#(?=\d)", r"\g<0><!-- -->", safe).replace("://", ":<!-- -->//")
    return safe.replace("www.", "www<!-- -->.")


def code(text: object) -> str:
    """A code span, whatever backticks are inside; its pipes do not end a table cell."""
    safe = t.clean(text).replace("|", "\\|")
    fence = "`" * (_longest_run(safe) + 1)
    if not safe.strip():
        return f"{fence} {safe} {fence}" if safe else ""
    blank = " " if safe[0] in "` " or safe[-1] in "` " else ""
    return f"{fence}{blank}{safe}{blank}{fence}"


def block(text: str, language: str = "python") -> str:
    """A fenced block that its content cannot end."""
    safe = t.clean(text, lines=True).strip("\n")
    fence = "`" * max(3, _longest_run(safe) + 1)
    return f"{fence}{language}\n{safe}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def table(head: list[str], align: str, rows: list[list[str]]) -> str:
    """``align``: a letter a column, l or r."""
    marks = [{"l": ":---", "r": "---:"}[letter] for letter in align]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *rows))


# -- parts --------------------------------------------------------------------------------------


def _scope(report: Report) -> str:
    lines = [
        f"- {label}: {' · '.join(escape(part) for part in parts)}"
        for label, parts in (*facts.scope(report), *facts.figures(report))
    ]
    return "\n".join(lines)


def _time(report: Report) -> str:
    unit = t.loop_unit(report.scope.step_source)
    if report.time:
        rows = []
        for part in report.time:
            if part.ns <= 0:
                continue
            rows.append((t.LABELS.get(part.name, t.cause_label(part.name)), part.ns, part.share))
            if part.name == "idle":
                rows += [(f"– {t.cause_label(c.cause)}", c.ns, c.share) for c in report.idle]
        title = f"Where the {unit}'s time goes on the GPU"
    elif report.host:
        rows = [(t.host_label(part.name), part.ns, part.share) for part in report.host]
        title = f"Where the {unit}'s time goes on the host's main thread"
    else:
        return ""
    durations = t.times([ns for _, ns, _ in rows])
    figures = table(
        ["", "time", "share", ""],
        "lrrl",
        [
            [escape(label), duration, t.percent(share), _bar(share)]
            for (label, _, share), duration in zip(rows, durations, strict=True)
        ],
    )
    return f"### {title}\n\n{figures}"


def _bar(share: float) -> str:
    return "█" * min(20, round(share * 20))


def _ranks(report: Report) -> str:
    if report.ranks is None:
        return ""
    head = ["rank", "step", "GPU busy", "exposed comm.", "idle", "comes last", "others wait"]
    rows = [
        [
            str(line.rank),
            t.time(line.step_ns),
            t.percent(line.busy_share),
            t.time(line.communication_ns),
            t.time(line.idle_ns),
            t.percent(line.last_share),
            t.time(line.caused_wait_ns),
        ]
        for line in report.ranks.lines
    ]
    return f"### Ranks\n\n{table(head, 'r' * len(head), rows)}\n\n{escape(report.ranks.note)}"


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
    unit = t.loop_unit(report.scope.step_source)
    gain = [t.gain(finding, step=unit), t.band(finding), *facts.order_parts(finding, report)]
    gain.append(f"confidence {t.percent(finding.confidence)}")
    parts = [
        f"#### {number}{escape(finding.title)}",
        f"**{escape(' · '.join(part for part in gain if part))}**",
        escape(finding.summary),
    ]
    places = [_place(location) for location in facts.places(finding)]
    if any(places):
        parts.append("\n".join(f"- {place}" for place in places if place))
    parts.append(f"**Fix:** {escape(finding.fix)}")
    if finding.code:
        parts.append(block(finding.code))
    details = [f"- {escape(t.evidence(item))}" for item in finding.evidence]
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


def _place(location: Location) -> str:
    names = [code(part) for part in t.place_names(location, name_width=80, path_width=100)]
    return " · ".join([*names, *t.place_figures(location)])


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
            lines.append(
                f"- {escape(note.title)}{aside}: {escape(note.summary)} *Fix:* {escape(note.fix)}"
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
