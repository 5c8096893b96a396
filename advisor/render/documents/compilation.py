"""What logs of torch.compile tell: graph breaks, recompilations, graphs without CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import CompileCause, CompileLog, FusedKernel, GraphBreak
from advisor.core.report import Report
from advisor.render.document import Block, Inline, Items, Paragraph, Section, Span

MAX_ROWS: Final = 12


def sections(log: CompileLog | None, report: Report | None = None) -> Iterator[Block]:
    """The causes, with their lines; nothing without logs."""
    if log is None:
        return
    lists: list[Block] = [Paragraph(_summary(log, report), indent=2)]
    for title, rows in (
        ("Graph breaks", [_break(each) for each in log.breaks]),
        ("Recompilations", [_again(causes) for causes in _by_place(log.recompilations)]),
        ("Not compiled", [_cause(each) for each in log.not_compiled]),
        ("Without CUDA graphs", [_cause(each) for each in log.without_cuda_graphs]),
        ("Generated kernels", [_kernel(each) for each in log.kernels if each.ns is not None]),
    ):
        if rows:
            more = len(rows) - MAX_ROWS
            shown = rows[:MAX_ROWS]
            if more > 0:
                shown.append(Span(f"{more:,} more; JSON has all", "soft"))
            lists.append(Items(shown, "∙", f"{title} ({len(rows)})"))
    yield Section("torch.compile", lists)


def _summary(log: CompileLog, report: Report | None) -> str:
    """Counts and time; with a trace, the time as a number of its steps."""
    text = f"{t.count_noun(log.compilations, 'compilation')} took {t.format_duration(log.ns)}"
    if log.inductor_ns is not None:
        text += f", {t.format_duration(log.inductor_ns)} of it in inductor"
    if report is not None and report.per == "step" and report.step_ns > 0 < log.ns:
        text += f": as long as {t.count_noun(round(log.ns / report.step_ns), 'step')}"
    if log.logs > 1:
        text += f" (the longest of {log.logs:,} processes)"
    if not (log.breaks or log.recompilations or log.not_compiled or log.without_cuda_graphs):
        text += ". No graph breaks, no recompilations"
    damaged = f" {t.count_noun(log.damaged, 'record')} could not be read." if log.damaged else ""
    return f"{text}.{damaged}"


def _break(item: GraphBreak) -> Inline:
    place = f"{t.shorten_path(item.file, 60)}:{item.line}"
    inside = f" in {labels.shorten(labels.clean(item.function), 40)}" if item.function else ""
    count = f", {item.count:,}×" if item.count > 1 else ""
    cost = ""
    if item.idle_ns is not None:
        cost = f", the GPU idles {t.format_duration(item.idle_ns)} per step"
    if item.gain_ns:
        cost += f" ({t.format_duration(item.gain_ns)} faster without it)"
    eager = " The whole function runs as plain PyTorch." if item.eager else ""
    hint = f" {item.hint or item.explanation}"
    return (
        Span(place, "code"),
        f"{inside}{count}{cost}: {item.reason}.{eager}",
        Span(hint, "soft"),
    )


def _kernel(item: FusedKernel) -> Inline:
    """Its time, what is fused in it, and the lines that is from."""
    operators = ", ".join(labels.clean(name).removeprefix("aten.") for name in item.operators)
    places: dict[str, list[int]] = {}
    for each in item.lines:
        if each.file is not None and each.line is not None:
            places.setdefault(t.shorten_path(each.file, 40), []).append(each.line)
    at = "; ".join(f"{file}:{', '.join(map(str, lines))}" for file, lines in places.items())
    time = f", {t.format_duration(item.ns or 0.0)} per step"
    return (
        Span(labels.shorten(labels.clean(item.name), 50), "code"),
        f"{time}: {operators or 'operators not recorded'}",
        Span(f" {at}" if at else "", "soft"),
    )


def _by_place(causes: list[CompileCause]) -> list[list[CompileCause]]:
    """Recompilations of one function together."""
    result: dict[tuple[str | None, int | None], list[CompileCause]] = {}
    for cause in causes:
        result.setdefault((cause.file, cause.line), []).append(cause)
    return sorted(result.values(), key=lambda group: -sum(each.ns or 0 for each in group))


def _again(causes: list[CompileCause]) -> Inline:
    """The first guard stands for those of its function."""
    others = len(causes) - 1
    more = f", and {t.count_noun(others, 'other guard')}" if others else ""
    known = [each.ns for each in causes if each.ns is not None]
    count = sum(each.count for each in causes)
    reason = f"{causes[0].reason}{more}"
    merged = {"reason": reason, "count": count, "ns": sum(known) if known else None}
    return _cause(replace(causes[0], **merged))


def _cause(item: CompileCause) -> Inline:
    known = item.file is not None
    place = f"{t.shorten_path(item.file or '', 60)}:{item.line}" if known else "unknown line"
    inside = f" in {labels.shorten(labels.clean(item.function), 40)}" if item.function else ""
    time = "" if item.ns is None else f", {t.format_duration(item.ns)}"
    count = f", {item.count:,}×" if item.count > 1 else ""
    return (Span(place, "code"), f"{inside}{count}{time}: {item.reason}")
