"""Operators by shape against what the device attains, as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.core import text as t
from advisor.render.page import Page
from advisor.render.renderer import DEFAULT, Options, Renderer

if TYPE_CHECKING:
    from advisor.core.report import AttainableRate, OperatorRate, Report

MAX_ROWS = 20
_NUMBERS = ("time", "calls", "reached", "attains", "of it", "saves", "bound")


class Operators(Renderer["Report"]):
    """For a terminal; the other formats have the figures in them."""

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """The table in at most ``width`` columns, of ``top`` operators."""
        page = Page(options.width, colour=options.colour)
        found = subject.rooflines
        rows = found[: MAX_ROWS if options.top is None else options.top]
        if not rows:
            page.wrapped("No kernels were recorded: what operators attain is not measured.")
            return page.getvalue()
        shown = "all" if len(rows) == len(found) else f"the {len(rows)} longest"
        page.section("Operators by shape", f"{shown}, {t.format_per(subject.per)}")
        _table(page, rows)
        page.blank()
        for line in _notes(subject, rows):
            page.wrapped(line, style="dim")
        return page.getvalue()


def _table(page: Page, rows: list[OperatorRate]) -> None:
    """Figures in columns, and below each operator its shapes: both fit in 80 columns."""
    figures = [_figures(row) for row in rows]
    widths = [max(len(row[i]) for row in (_NUMBERS, *figures)) for i in range(len(_NUMBERS))]
    room = max(12, page.width - 2 - sum(widths) - len(widths))
    head = " ".join(name.rjust(widths[i]) for i, name in enumerate(_NUMBERS))
    page.line(("operator".ljust(room) + " " + head, "dim"), indent=2)
    for row, numbers in zip(rows, figures, strict=True):
        name = t.shorten(t.clean(row.name or row.kernel), room)
        cells = " ".join(text.rjust(widths[i]) for i, text in enumerate(numbers))
        page.line(name.ljust(room), " ", (cells, _style(row)), indent=2)
        told = [row.dtype or "", row.shapes or "shapes not recorded"]
        page.line((t.clean(" ".join(part for part in told if part)), "dim"), indent=4)


def _figures(row: OperatorRate) -> list[str]:
    reached, attains = _rates(row)
    return [
        t.format_duration(row.ns),
        t.format_count(row.calls),
        reached,
        attains,
        "–" if row.efficiency is None else t.format_share(row.efficiency),
        "–" if row.saved_ns is None else t.format_duration(row.saved_ns) if row.saved_ns else "0",
        "–" if row.bound == "unknown" else row.bound,
    ]


def _rates(row: OperatorRate) -> tuple[str, str]:
    """What is reached and what could be, in FLOP/s where the arithmetic decides, else in bytes."""
    if row.bound == "compute":
        return _short(row.flops_per_s, "T"), _short(row.attainable_flops_per_s, "T")
    known = row.bytes_per_s is not None
    return _short(row.bytes_per_s, "G"), _short(row.attainable_bytes_per_s, "G") if known else "–"


def _short(rate: float | None, letter: str) -> str:
    if rate is None:
        return "–"
    scale, unit = (1e12, "TFLOP/s") if letter == "T" else (1e9, "GB/s")
    return f"{t.format_number(rate / scale)} {unit}"


def _style(row: OperatorRate) -> str:
    return "yellow" if row.efficiency is not None and row.efficiency < 0.5 else ""


def _notes(report: Report, rows: list[OperatorRate]) -> list[str]:
    notes = [
        "reached, attains: of the rate that limits it. of it: time at that rate over time taken "
        "(above 100 % from caches). saves: what the attainable rate would save. launch: starting "
        "the kernel takes longer than its work. –: not known."
    ]
    if not report.attainable:
        name = report.scope.device_name
        notes.append(
            f"What {t.clean(name)} attains is not known to advisor."
            if name
            else "The trace does not tell which GPU it was recorded on."
        )
    elif all(row.bound == "unknown" for row in rows):
        notes.append("Record with record_shapes=True: FLOPs and bytes come from the shapes.")
    notes += [_source(rate) for rate in report.attainable]
    return notes


def _source(rate: AttainableRate) -> str:
    what = "memory" if rate.of == "memory" else f"matrix products in {rate.of}"
    shown = _short(rate.rate, "G" if rate.of == "memory" else "T")
    if rate.source is None:
        return f"{what}: {shown}, estimated: the peak times what others of its make reach of theirs"
    where = f", {t.clean(rate.url)}" if rate.url else ""
    return f"{what}: {shown}, measured: {t.clean(rate.source)}{where}"
