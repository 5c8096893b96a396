"""The document of ``advisor analyze --by operator``: operators by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from advisor.core import labels
from advisor.core import text as t
from advisor.render.document import (
    DEFAULT,
    Document,
    Grid,
    Inline,
    Paragraph,
    RenderOptions,
    Section,
    Span,
)

if TYPE_CHECKING:
    from advisor.core.report import AttainableRate, OperatorRate, Report

MAX_ROWS: Final = 20
_HEAD: Final = ("operator", "time", "calls", "reached", "attains", "of it", "saves", "bound")
_LEGEND: Final = (
    "reached, attains: of the rate that limits it. of it: time at that rate over time taken "
    "(above 100% from caches). saves: what the attainable rate would save. launch: starting "
    "the kernel takes longer than its work. –: unknown."
)


def build(report: Report, options: RenderOptions = DEFAULT) -> Document:
    """A table of ``top`` operators, each with its shapes below it."""
    result = report.rooflines
    rows = result[: MAX_ROWS if options.top is None else options.top]
    if not rows:
        text = "No kernels were recorded: what operators attain is not measured."
        return Document(text, [], name="operators", style="")
    shown = "all" if len(rows) == len(result) else f"the {len(rows)} longest"
    table = Grid(_HEAD, [_row(row) for row in rows], below=[_below(row) for row in rows])
    notes = [Paragraph(line, "soft", indent=0) for line in _notes(report, rows)]
    title = f"Operators by shape, {shown}, {t.format_per(report.per)}"
    return Document("", [Section(title, [table, *notes])], name="operators")


def _row(row: OperatorRate) -> list[Inline]:
    reached, attains = _rates(row)
    low = row.efficiency is not None and row.efficiency < 0.5
    cells = [
        t.format_duration(row.ns),
        t.format_count(row.calls),
        reached,
        attains,
        "–" if row.efficiency is None else t.format_share(row.efficiency),
        "–" if row.saved_ns is None else t.format_duration(row.saved_ns) if row.saved_ns else "0",
        "–" if row.bound == "unknown" else row.bound,
    ]
    return [row.name or row.kernel, *(Span(cell, "warn" if low else "") for cell in cells)]


def _below(row: OperatorRate) -> str:
    return " ".join(part for part in (row.dtype, row.shapes or "shapes not recorded") if part)


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


def _notes(report: Report, rows: list[OperatorRate]) -> list[str]:
    notes = [_LEGEND]
    if not report.attainable:
        name = report.scope.device_name
        notes.append(
            f"advisor has no attainable rates of {labels.clean(name)}."
            if name
            else "The GPU's model was not recorded."
        )
    elif all(row.bound == "unknown" for row in rows):
        notes.append("Record with record_shapes=True: FLOPs and bytes come from the shapes.")
    return [*notes, *map(_source, report.attainable)]


def _source(rate: AttainableRate) -> str:
    what = "memory" if rate.of == "memory" else f"matrix products in {rate.of}"
    shown = _short(rate.rate, "G" if rate.of == "memory" else "T")
    if rate.source is None:
        return f"{what}: {shown}, estimated: the peak times what other GPUs of its maker attain"
    where = f", {labels.clean(rate.url)}" if rate.url else ""
    return f"{what}: {shown}, measured: {labels.clean(rate.source)}{where}"
