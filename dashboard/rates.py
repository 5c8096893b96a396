"""The card of operators by shape: the rate reached, the one attained, what that would save."""

from __future__ import annotations

from typing import Any

from advisor.core import text as t
from advisor.core.report import OperatorRate
from advisor.dashboard.current import View
from advisor.dashboard.dom import el
from advisor.dashboard.grid import Column, add_labels, grid
from advisor.dashboard.parts import card, empty
from advisor.measure import Analysis
from advisor.measure.device.rooflines import attained, rooflines

GRID = "rate-grid"
MOST_ROWS = 500

COLUMNS = (
    Column("name", "Operator", flex=2, names=True),
    Column("shapes", "Shapes", flex=2, names=True),
    Column("dtype", "Format", width=76),
    Column("calls", "Calls", width=66, number=True, csv="Calls a step"),
    Column("time", "Time a step", width=94, number=True, csv="Time a step, ns"),
    Column("bound", "Bound", width=86),
    Column("flops", "TFLOP/s", width=76, number=True, csv="FLOP/s"),
    Column("bytes", "GB/s", width=70, number=True, csv="Bytes/s"),
    Column("efficiency", "Of attainable", width=104, number=True, csv="Of attainable, 0 to 1"),
    Column("saved", "Saves a step", width=98, number=True, csv="Saves a step, ns"),
)


def rate_rows(a: Analysis) -> list[dict[str, Any]]:
    """Rows of the grid: numbers to sort by, and the texts that are shown."""
    rows = [_row(number, rate) for number, rate in enumerate(rooflines(a, MOST_ROWS))]
    add_labels(rows, "name")
    add_labels(rows, "shapes")
    return rows


def _row(number: int, rate: OperatorRate) -> dict[str, Any]:
    return {
        "id": str(number),
        "name": t.clean(rate.name or rate.kernel),
        "shapes": t.clean(rate.shapes) if rate.shapes else "–",
        "dtype": rate.dtype or "–",
        "bound": "–" if rate.bound == "unknown" else rate.bound,
        **_cell("calls", rate.calls, t.count(rate.calls)),
        **_cell("time", rate.ns, t.time(rate.ns)),
        **_cell("flops", rate.flops_per_s, _number(rate.flops_per_s, 1e12)),
        **_cell("bytes", rate.bytes_per_s, _number(rate.bytes_per_s, 1e9)),
        **_cell("efficiency", rate.efficiency, t.percent(rate.efficiency)),
        **_cell("saved", rate.saved_ns, t.time(rate.saved_ns)),
    }


def _cell(name: str, value: float | None, shown: str) -> dict[str, Any]:
    return {name: value, f"{name}_text": "–" if value is None else shown}


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return t.NOT_MEASURED
    return "<0.01" if 0 < value / scale < 0.01 else t.number(value / scale)


def operator_rates(view: View) -> Any:
    """The card."""
    a = view.analysis
    rows = view.loaded.view(("rate_rows", view.rank), lambda: rate_rows(a))
    if not rows:
        return empty("No operators by shape", "No kernel of these steps computes anything.")
    return card(
        "Operators by shape",
        grid(GRID, COLUMNS, rows, height=420, label="Operators by shape"),
        el("P", _words(a), cls="note-line", style={"marginTop": "10px"}),
        aside="against the rates that are attained on such a GPU; – is not measured",
    )


def _words(a: Analysis) -> str:
    """What the rates are, and where they come from."""
    found = []
    for rate in attained(a):
        memory = rate.of == "memory"
        unit = "GB/s" if memory else "TFLOP/s"
        shown = f"{t.number(rate.rate / (1e9 if memory else 1e12))} {unit}"
        where = "estimated by its kin" if rate.source is None else t.clean(rate.source)
        found.append(f"{rate.of} {shown} ({where})")
    told = f"Attainable: {', '.join(found)}. " if found else "What this GPU attains is not known. "
    return (
        f"{told}Bound by launch: starting the kernel takes longer than its work, so it is not "
        "held against a rate."
    )
