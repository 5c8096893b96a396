"""A JobReport as Markdown."""

from __future__ import annotations

from typing import Final

from advisor.advise.ranks import sentences as w
from advisor.advise.ranks import views
from advisor.core import text as t
from advisor.measure.ranks.job_report import JobReport
from advisor.render.markdown import escape, table
from advisor.render.renderer import DEFAULT, Options, Renderer

LIMIT: Final = 40
"""Of a kind of lines."""


class Markdown(Renderer[JobReport]):
    """Tables of steps, groups and odd ones; findings in full."""

    suffixes = (".md", ".markdown")

    def render(self, subject: JobReport, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        blocks = [f"## {escape(subject.verdict) or 'A job'}"]
        lines = [f"- {name}: {escape(' · '.join(filter(None, p)))}" for name, p in w.scope(subject)]
        blocks.append("\n".join(lines))
        blocks += _steps(subject)
        blocks += _alike(subject)
        blocks += _odd(subject)
        blocks += _findings(subject, options.top)
        for title, found in (
            ("What if", [f"{item.text}: {w.gain(item)}" for item in subject.what_if]),
            ("Ranks that were not read", [w.missing(item) for item in subject.missing]),
            ("Not checked", [f"{name}: {why}" for name, why in subject.not_checked.items()]),
        ):
            if found:
                told = [f"- {escape(t.shorten(line, 400))}" for line in found[:LIMIT]]
                blocks.append("\n".join([f"### {title}", "", *told, *_more(len(found))]))
        took = w.work(subject)
        return "\n\n".join(blocks + ([f"{escape(took)}."] if took else [])) + "\n"


def _more(count: int) -> list[str]:
    return [f"- and {t.format_count(count - LIMIT)} more"] if count > LIMIT else []


def _steps(report: JobReport) -> list[str]:
    bins = views.histogram(report)
    if not bins:
        return []
    most = max(one.ranks for one in bins)
    rows = [
        [one.words, t.format_count(one.ranks), "█" * views.bar(one.ranks, most, 30)] for one in bins
    ]
    return [f"### The ranks' steps\n\n{table(['mean step', 'ranks', ''], 'rrl', rows)}"]


def _alike(report: JobReport) -> list[str]:
    if not report.alike:
        return []
    head = ["group", "ranks", "how many", "step", *map(views.label, report.classes)]
    rows = [
        [
            escape(group.name),
            escape(w.ranks(group.ranks)),
            t.format_count(group.count),
            t.format_duration(group.step_ns),
            *(t.format_duration(group.time.get(name)) for name in report.classes),
        ]
        for group in report.alike[:LIMIT]
    ]
    made = table([escape(name) for name in head], "ll" + "r" * (len(head) - 2), rows)
    return [f"### Ranks that are alike\n\nMedian, a step.\n\n{made}"]


def _odd(report: JobReport) -> list[str]:
    if not report.odd:
        return []
    lines = []
    for odd in report.odd[:LIMIT]:
        told = " · ".join([w.odd_kind(odd), *w.odd_figures(odd)])
        why = f" {escape(odd.why)}." if odd.why else ""
        why += f" Fix: {escape(odd.fix)}" if odd.fix else ""
        lines.append(f"- **{escape(w.odd_name(odd))}**: {escape(told)}.{why}")
    return ["\n".join(["### Not like the others", "", *lines, *_more(len(report.odd))])]


def _findings(report: JobReport, top: int | None) -> list[str]:
    blocks = ["### What to change"] if report.findings else []
    for number, found in enumerate(report.findings[: LIMIT if top is None else top], start=1):
        parts = [
            f"**{number}. {escape(found.title)}** ({escape(found.severity)})",
            escape(" · ".join(w.finding_parts(report, found))),
            escape(found.summary),
            f"Fix: {escape(found.fix)}" if found.fix else "",
            f"Check: {escape(found.verify)}" if found.verify else "",
        ]
        blocks.append("\n\n".join(part for part in parts if part))
    return blocks
