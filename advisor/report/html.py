"""The HTML renderer: one file to mail or attach, that loads nothing and runs nothing."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from advisor.model import Finding, Location
from advisor.report import facts
from advisor.report import text as t
from advisor.report.data import Report
from advisor.report.figures import esc, staircase, step_bar, step_legend, timeline
from advisor.report.strip import strip

if TYPE_CHECKING:
    from advisor.analysis import Analysis

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: styles of the page itself, and nothing else from anywhere."""
MOST_NOTES = 100
_STATUS = {
    "bottlenecks": "Something is worth fixing",
    "healthy": "Healthy",
    "limited": "Limited",
}


def render(report: Report, analysis: Analysis | None = None) -> str:
    """A whole HTML document, below 1 MB. With the ``analysis`` it shows a step's timeline too."""
    sections = [
        _figures(report),
        _step(report),
        _staircase(report),
        _timeline(report, analysis),
        _findings(report),
        _ranks(report),
        _apart(report),
        _rest(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{esc(report.verdict)}</title>\n<style>\n{style()}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the report</a>\n'
        f'{_header(report)}\n<main id="main">\n'
        + "\n".join(part for part in sections if part)
        + f"\n</main>\n{_footer(report)}\n</body>\n</html>\n"
    )


@cache
def style() -> str:
    """The page's style sheet."""
    return files("advisor.report").joinpath("report.css").read_text(encoding="utf-8")


def _header(report: Report) -> str:
    rows = "".join(
        f"<dt>{esc(label)}</dt><dd>{esc(' · '.join(parts))}</dd>"
        for label, parts in facts.scope(report)
    )
    return (
        f'<header><span class="badge {report.status}">{_STATUS[report.status]}</span>'
        f'<h1>{esc(report.verdict)}</h1><dl class="scope">{rows}</dl></header>'
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{esc(title)}</h2>{body}</section>" if body else ""


# -- figures ------------------------------------------------------------------------------------


def _figures(report: Report) -> str:
    unit = t.loop_unit(report.scope.step_source)
    memory = t.memory(report.memory_peak_bytes)
    if report.memory_peak_bytes is not None and report.memory_capacity_bytes is not None:
        memory += f" of {t.memory(report.memory_capacity_bytes)}"
    tiles = [(t.time(report.scope.step_ns), f"{unit} on average" if unit == "step" else unit)]
    if report.time:
        tiles += [
            (t.percent(report.busy_share), "GPU busy"),
            (t.percent(report.mfu), "MFU: of the GPU's peak FLOP/s"),
            (memory, "memory peak"),
        ]
        if report.communication_ns is not None:
            tiles.append((t.percent(report.communication_overlap), "communication hidden"))
        error = t.NOT_MEASURED
        if report.replay is not None:
            error = f"{report.replay.step_error:.1%}"
        tiles.append((error, "replay error"))
    return f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>'


def _tile(value: str, label: str) -> str:
    missing = ' class="none"' if value == t.NOT_MEASURED else ""
    return f'<div class="tile"><b{missing}>{esc(value)}</b><span>{esc(label)}</span></div>'


def _step(report: Report) -> str:
    unit = t.loop_unit(report.scope.step_source)
    where = "on the GPU" if report.time else "on the host's main thread"
    bar = step_bar(report)
    if not bar:
        return ""
    lines = "".join(
        f"<dt>{esc(label)}</dt><dd>{esc(' · '.join(parts))}</dd>"
        for label, parts in facts.figures(report)
        if label != "GPU"
    )
    more = f'<dl class="scope">{lines}</dl>' if lines else ""
    body = f'{bar}<div class="bar-notes">{step_legend(report)}{more}</div>'
    return _section(f"Where the {unit}'s time goes {where}", body)


def _staircase(report: Report) -> str:
    stairs = staircase(report)
    outlook = facts.outlook(report)
    after = f'<p class="soft">{esc(outlook)}</p>' if outlook and stairs else ""
    return _section("What it comes down to", stairs + after)


def _timeline(report: Report, analysis: Analysis | None) -> str:
    shown = strip(analysis) if analysis is not None else None
    if shown is None:
        return ""
    unit = t.loop_unit(report.scope.step_source)
    title = f"A typical step: {shown.step}" if unit == "step" else "The recording"
    return _section(f"{title}, {t.time(shown.dur_ns)}", timeline(shown, report))


# -- findings -----------------------------------------------------------------------------------


def _findings(report: Report) -> str:
    found = facts.ranked(report)
    if not found:
        return ""
    cards = "".join(_finding(report, finding) for finding in found)
    closing = "".join(f'<p class="soft">{esc(line)}</p>' for line in facts.definitions(report))
    return _section("What to change", cards + closing)


def _finding(report: Report, finding: Finding) -> str:
    unit = t.loop_unit(report.scope.step_source)
    number = f'<span class="rank">{finding.rank}</span>' if finding.rank is not None else ""
    anchor = f' id="f{finding.rank}"' if finding.rank is not None else ""
    worth = [t.gain(finding, step=unit), t.band(finding), *facts.order_parts(finding, report)]
    worth.append(f"confidence {t.percent(finding.confidence)}")
    parts = [
        f'<h3>{number}{esc(finding.title)}<span class="tag {finding.severity}">'
        f"{finding.severity}</span></h3>",
        f'<p class="worth">{esc(" · ".join(part for part in worth if part))}</p>',
        f"<p>{esc(finding.summary)}</p>",
        _listed("Where", [_place(location) for location in facts.places(finding)]),
        f"<h4>Fix</h4><p>{esc(finding.fix)}</p>",
    ]
    if finding.code:
        snippet = esc(finding.code.strip("\n"), lines=True)
        parts.append(f'<pre tabindex="0"><code>{snippet}</code></pre>')
    if finding.check:
        parts.append(f"<h4>Check</h4><p>{esc(finding.check)}</p>")
    parts.append(_evidence(finding))
    parts.append(_listed("Doubt", [esc(doubt) for doubt in facts.doubts(finding)]))
    covered = [facts.covered_line(finding, other) for other in facts.folded(report, finding)]
    parts.append(_listed("Covered by this", [esc(f"{kind}: {text}") for kind, text in covered]))
    parts.append(_listed("References", [_reference(item) for item in finding.references]))
    return f"<article{anchor}>{''.join(parts)}</article>"


def _listed(title: str, items: list[str]) -> str:
    items = [item for item in items if item]
    if not items:
        return ""
    return f"<h4>{title}</h4><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _place(location: Location) -> str:
    names = t.place_names(location, name_width=120, path_width=140)
    shown = " · ".join(f"<code>{esc(name)}</code>" for name in names)
    figures = " · ".join(esc(figure) for figure in t.place_figures(location))
    return f"{shown} <span class='soft'>{figures}</span>" if shown else ""


def _evidence(finding: Finding) -> str:
    if not finding.evidence:
        return ""
    rows = []
    for item in finding.evidence:
        limit = ""
        if item.threshold is not None:
            source = f" ({t.clean(item.source)})" if item.source else ""
            limit = f"{t.value(item.threshold, item.unit)}{source}"
        rows.append(
            f'<tr><th scope="row">{esc(item.label)}</th>'
            f"<td>{esc(t.value(item.value, item.unit))}</td><td class='soft'>{esc(limit)}</td></tr>"
        )
    head = '<tr><th scope="col">seen</th><th scope="col">value</th><th scope="col">limit</th></tr>'
    return (
        f'<h4>Evidence</h4><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Evidence"><table class="evidence"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _reference(reference: str) -> str:
    """References come with the rules, but a rule may be anybody's: only web links are links."""
    if reference.startswith(("https://", "http://")):
        return f'<a href="{esc(reference)}" rel="noreferrer noopener">{esc(reference)}</a>'
    return esc(reference)


# -- the rest -----------------------------------------------------------------------------------


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
        for line in report.ranks.lines[:1024]
    ]
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{esc(row[0])}</th>'
        + "".join(f"<td>{esc(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    table = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Ranks"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return _section("Ranks", f'{table}<p class="soft">{esc(report.ranks.note)}</p>')


def _apart(report: Report) -> str:
    risks = "".join(_finding(report, finding) for finding in report.risks)
    notes = []
    for note in report.notes[:MOST_NOTES]:
        reason = facts.why_note(note)
        aside = f" <span class='soft'>({esc(reason)})</span>" if reason else ""
        notes.append(
            f"<details><summary>{esc(note.title)}{aside}</summary><p>{esc(note.summary)}</p>"
            f"<p><b>Fix:</b> {esc(note.fix)}</p></details>"
        )
    return _section("Memory and risks", risks) + _section("Notes", "".join(notes))


def _rest(report: Report) -> str:
    good = [esc(item.text) for item in report.good]
    missing = [
        f"{esc(what)} <span class='soft'>{esc(why)}</span>"
        for what, why in facts.abstentions(report)
    ]
    limits = [esc(limit) for limit in report.limits]
    return _hot_lines(report) + "".join(
        _section(title, _items(items))
        for title, items in (
            ("What is good", good),
            ("Not checked", missing),
            ("Limits of this trace", limits),
        )
    )


def _hot_lines(report: Report) -> str:
    """Python lines that take much CPU time, from the pass with Scalene."""
    rows = [
        f'<tr><th scope="row"><code>{esc(place)}</code></th><td>{esc(share)}</td>'
        f"<td class='line'><code>{esc(text)}</code></td></tr>"
        for share, place, text in facts.hot_lines(report)
    ]
    if not rows:
        return ""
    head = '<tr><th scope="col">line</th><th scope="col">CPU time</th><th scope="col"></th></tr>'
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Hot lines">'
        f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    return _section("Python lines that take CPU time", table)


def _items(items: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def _footer(report: Report) -> str:
    return f"<footer>advisor {esc(report.version)} · {esc(report.schema)}</footer>"
