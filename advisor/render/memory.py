"""A memory snapshot's post-mortem, as words and tables for any renderer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from advisor.core import text as t

if TYPE_CHECKING:
    from advisor.core.report import MemoryHolder, MemoryView, Report

MAX_ROWS = 8
MAX_SAVINGS = 6
MAX_DEVICES = 8


class Table(NamedTuple):
    """Rows under a head; the first column is text, the others figures."""

    title: str
    head: list[str]
    rows: list[list[str]]


class Device(NamedTuple):
    """What is shown of a device."""

    title: str
    aside: str
    lines: list[tuple[str, list[str]]]
    """A label and the parts that follow it."""
    tables: list[Table]


def devices(report: Report, rows: int = MAX_ROWS) -> list[Device]:
    """One a device of the snapshot."""
    shown = report.memory[:MAX_DEVICES]
    return [device(view, rows, named=len(report.memory) > 1) for view in shown]


def device(view: MemoryView, rows: int = MAX_ROWS, *, named: bool = False) -> Device:
    """What is shown of one; ``named``: with its number."""
    when = {
        "out of memory": "when it ran out",
        "peak": "at its peak",
        "snapshot": "in the snapshot, without a history",
    }[view.at if view.at in ("out of memory", "peak") else "snapshot"]
    title = f"What held GPU {view.device}'s memory" if named else "What held the memory"
    lines = [
        ("held", [f"{t.format_bytes(view.allocated)} in tensors",
                  f"{t.format_bytes(view.reserved)} reserved",
                  f"peak {t.format_bytes(view.peak)}" if view.peak != view.allocated else ""]),
        ("by", [f"{each.category} {t.format_bytes(each.bytes)} "
                f"{t.format_share(each.bytes / max(view.allocated, 1))}"
                for each in view.categories]),
        ("failed", [view.placement]),
        ("steps", _steps(view)),
    ]  # fmt: skip
    tables = [_held(view, rows)]
    if view.growth:
        tables.append(
            Table(
                "Left behind by each step",
                ["line", "a step", "steps"],
                [
                    [_place(e), t.format_bytes(e.bytes), t.format_count(e.blocks)]
                    for e in view.growth[:rows]
                ],
            )
        )
    if view.churn:
        tables.append(
            Table(
                "Comes and goes within a step",
                ["line", "a step", "times"],
                [
                    [_place(e), t.format_bytes(e.bytes), t.format_count(e.blocks)]
                    for e in view.churn[:rows]
                ],
            )
        )
    if view.pools:
        tables.append(
            Table(
                "Segments",
                ["pool", "number", "reserved", "in tensors", "free", "largest piece"],
                [[p.name, t.format_count(p.segments),
                  *map(t.format_bytes, (p.reserved, p.allocated, p.free, p.largest))]
                 for p in view.pools[:rows]],
            )
        )  # fmt: skip
    if view.savings:
        tables.append(
            Table(
                "What a change frees (they overlap)",
                ["change", "frees"],
                [
                    [_change(view, n), t.format_bytes(s.bytes)]
                    for n, s in enumerate(view.savings[:MAX_SAVINGS])
                ],
            )
        )
    kept = [(label, [part for part in parts if part]) for label, parts in lines]
    return Device(
        title,
        when,
        [(label, parts) for label, parts in kept if parts],
        [table for table in tables if table.rows],
    )


def _held(view: MemoryView, rows: int) -> Table:
    found = [
        [
            f"{_place(each)} · {each.category}{f' · {t.clean(each.label)}' if each.label else ''}",
            t.format_bytes(each.bytes),
            t.format_share(each.bytes / max(view.allocated, 1)),
            t.format_count(each.blocks),
        ]
        for each in view.held[:rows]
    ]
    return Table("By line", ["line · category", "bytes", "of it", "blocks"], found)


def _steps(view: MemoryView) -> list[str]:
    if not view.events:
        return []
    if not view.step_source:
        return ["not told, so what grows and what comes and goes is not measured"]
    churn = f"{t.format_bytes(view.churn_bytes)} allocated a step" if view.churn_bytes else ""
    return [f"{t.count_noun(view.steps, 'whole one')} in the history, by {view.step_source}", churn]


def _place(each: MemoryHolder) -> str:
    if each.file is None:
        return "no line" if each.category else "no line (autograd's thread)"
    return f"{t.shorten_path(t.clean(each.file), 40)}:{each.line}"


def _change(view: MemoryView, number: int) -> str:
    each = view.savings[number]
    if each.file is None:
        return each.change
    return f"{each.change} at {t.shorten_path(t.clean(each.file), 40)}:{each.line}"


def sentences(device: Device) -> list[str]:
    """A device as lines of text: its figures, then its tables, a row each."""
    found = [f"{label}: {' · '.join(parts)}" for label, parts in device.lines]
    for table in device.tables:
        found.append(f"{table.title}:")
        for row in table.rows:
            cells = zip(table.head[1:], row[1:], strict=True)
            found.append(f"- {row[0]}: {', '.join(f'{head} {cell}' for head, cell in cells)}")
    return found


def assumptions(view: MemoryView) -> list[str]:
    """What the savings take for granted."""
    return [f"{each.change}: {each.assumes}." for each in view.savings[:MAX_SAVINGS]]
