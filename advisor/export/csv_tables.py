"""CSV tables of the measurements for a spreadsheet: one table per file, units in the headers."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import polars as pl

from advisor.core import labels
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.measure import Analysis

Cell = str | int | float | bool | None
FORMULA_CHARACTERS = ("=", "+", "-", "@")
"""Characters that begin a formula in a spreadsheet, also after spaces and in full width (``＝``).
The names in a table come from the trace."""


class CsvTable:
    """Header and rows of a CSV file."""

    def __init__(self, head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        self.head = list(head)
        self.rows = [list(row) for row in rows]

    def text(self) -> str:
        """Return the CSV text (RFC 4180 with plain line ends). Unmeasured cells are empty. Text
        that a spreadsheet would run as a formula begins with an apostrophe."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        lines: list[Sequence[Cell]] = [self.head, *self.rows]
        writer.writerows([_escape_cell(value) for value in row] for row in lines)
        return buffer.getvalue()

    def redact(self, text: Callable[[str], str]) -> CsvTable:
        """Return a copy in which ``text`` is applied to each text."""
        return CsvTable(
            self.head, ([text(v) if isinstance(v, str) else v for v in row] for row in self.rows)
        )


def build_tables(a: Analysis, report: Report) -> dict[str, CsvTable]:
    """Build the tables by name: ``findings``, ``steps``, ``kernels``, ``operators``, ``rooflines``,
    ``idle``. Times are in ns. A table without rows was not measured, or is empty."""
    return {
        "findings": _findings_table(report), "steps": _steps_table(a), "kernels": _kernels_table(a),
        "operators": _operators_table(a), "rooflines": _rooflines_table(a), "idle": _idle_table(a),
    }  # fmt: skip


def _escape_cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    text = labels.clean(value, lines=True)
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    formula = first in FORMULA_CHARACTERS or text.startswith(("\t", "\r", "\n"))
    return f"'{text}" if formula else text


def _findings_table(report: Report) -> CsvTable:
    head = """
        section priority rule category severity title gain_ns gain_low_ns gain_high_ns currency
        marginal_gain_ns marginal_low_ns marginal_high_ns confidence file line function operator
        kernel fix code""".split()
    sections = (("finding", report.findings), ("risk", report.risks), ("note", report.notes))
    return CsvTable(head, [_finding_row(name, f) for name, findings in sections for f in findings])


_FINDING_FIELDS = attrgetter("priority", "rule", "category", "severity", "title")
_GAIN_FIELDS = attrgetter("gain_ns", "low_ns", "high_ns", "currency")
_MARGINAL_FIELDS = attrgetter(
    "marginal_gain_ns", "marginal_low_ns", "marginal_high_ns", "confidence"
)
_PLACE_FIELDS = attrgetter("file", "line", "function", "op", "kernel")


def _finding_row(section: str, f: Finding) -> list[Cell]:
    gain = [None] * 4 if f.impact is None else _GAIN_FIELDS(f.impact)
    place = _PLACE_FIELDS(f.where[0]) if f.where else [None] * 5
    return [
        section,
        *_FINDING_FIELDS(f),
        *gain,
        *_MARGINAL_FIELDS(f),
        *place,
        f.fix,
        f.code or None,
    ]


_STEP_FIELDS = attrgetter("window", "samples", "micro", "allocated", "reserved")


def _steps_table(a: Analysis) -> CsvTable:
    """Return the recorder's steps with their samples, or the trace's steps if there are none."""
    if a.rank_record is not None and a.rank_record.steps:
        phases = list(dict.fromkeys(name for step in a.rank_record.steps for name in step.phases))
        sampled_columns = (
            "window",
            "samples",
            "micro_batches",
            "allocated_bytes",
            "reserved_bytes",
        )
        return CsvTable(
            [
                "step",
                "start_ns",
                "duration_ns",
                *(f"{name}_ns" for name in phases),
                *sampled_columns,
            ],
            (
                [s.n, s.t, s.dur, *(s.phases.get(name, 0) for name in phases), *_STEP_FIELDS(s)]
                for s in a.rank_record.steps
            ),
        )
    frame = a.steps.table
    return CsvTable(
        ["step", "name", "start_ns", "duration_ns", "used"],
        frame.select("index", pl.col("name").cast(pl.String), "ts", "dur", "used").iter_rows(),
    )


def _kernels_table(a: Analysis) -> CsvTable:
    head = """
        kernel family count total_ns ns_per_step share occupancy tensor_cores flops_per_s
        bytes_per_s roofline_share operator""".split()
    if a.record_only or a.device_id is None:
        return CsvTable(head, [])
    kernels = a.hot_kernels.select(
        *("name", "family", "count", "dur", pl.col("dur").truediv(a.step_count).alias("ns")),
        *("share", pl.col("occupancy") / 100, "tensor_core", "flops_per_s", "bytes_per_s"),
        *("roofline", "op_name"),
    )
    return CsvTable(head, kernels.iter_rows())


def _operators_table(a: Analysis) -> CsvTable:
    from advisor.measure.host.op_tree import op_table

    head = ["operator", "calls", "device_ns", "device_ns_per_step", "host_ns", "host_ns_per_step"]
    if a.record_only:
        return CsvTable(head, [])
    device = a.device_id is not None
    return CsvTable(
        head,
        (
            [
                r["name"],
                r["count"],
                *(_total_and_per_step(r["device"], a) if device else (None, None)),
                *_total_and_per_step(r["host"], a),
            ]
            for r in op_table(a).iter_rows(named=True)
        ),
    )


def _rooflines_table(a: Analysis) -> CsvTable:
    from advisor.measure.host.operators import rooflines

    head = """
        operator shapes family dtype kernel tensor_cores calls_per_step ns_per_step share
        flops_per_call bytes_per_call flops_per_s bytes_per_s attainable_flops_per_s
        attainable_bytes_per_s bound efficiency saved_ns_per_step""".split()
    if a.record_only or a.device_id is None:
        return CsvTable(head, [])
    return CsvTable(head, map(_ROOFLINE_FIELDS, rooflines(a, limit=None)))


_ROOFLINE_FIELDS = attrgetter(
    *("name", "shapes", "family", "dtype", "kernel", "tensor_core", "calls", "ns", "share"),
    *("flops", "bytes", "flops_per_s", "bytes_per_s", "attainable_flops_per_s"),
    *("attainable_bytes_per_s", "bound", "efficiency", "saved_ns"),
)


def _total_and_per_step(ns: int, a: Analysis) -> tuple[int, float]:
    return ns, ns / a.step_count


def _idle_table(a: Analysis) -> CsvTable:
    head = ["start_ns", "duration_ns", "step", "cause", "blamed", "file", "line", "next"]
    if a.record_only or a.device_id is None:
        return CsvTable(head, [])
    gaps, cpu, gpu = a.gaps, a.trace.cpu, a.trace.gpu
    blamed = cpu["name"].cast(pl.String).gather(gaps["host"].cast(pl.Int64))
    following = gpu["name"].cast(pl.String).gather(gaps["next"].cast(pl.Int64))
    lines = gaps["line"].drop_nulls().unique()
    place_by_row = {row: a.location(row)[:2] for row in lines}
    places = [place_by_row.get(row, (None, None)) for row in gaps["line"]]
    return CsvTable(
        head,
        (
            [r["ts"], r["dur"], r["step"], r["cause"], host, place[0], place[1], next_name]
            for r, host, place, next_name in zip(
                gaps.iter_rows(named=True), blamed, places, following, strict=True
            )
        ),
    )
