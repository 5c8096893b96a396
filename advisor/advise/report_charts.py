"""Charts of a report: the step's bar, the step after each fix, and the table of ranks.

Each is built once, as data with its texts. Renderers do not fold, sum or round anything."""

from collections.abc import Callable, Container, Sequence
from typing import Final

from msgspec.structs import replace

from advisor.advise import finding_text, report_text
from advisor.advise.priority import marginal_gain
from advisor.core import charts, labels
from advisor.core import text as t
from advisor.core.charts import (
    Appearance,
    FixSequence,
    Kind,
    RankRow,
    RankTable,
    ReportCharts,
    Segment,
    StepAfterFix,
    StepBar,
)
from advisor.core.finding import Finding
from advisor.core.ranks import RankLine
from advisor.core.report import Report
from advisor.replay.estimators import GainEstimator


def build_charts(report: Report) -> ReportCharts:
    """Build all charts of a report."""
    return ReportCharts(
        build_step_bar(report), build_fix_sequence(report), build_rank_table(report)
    )


# -- where the time goes ------------------------------------------------------------------------

MAX_CAUSES = 4
"""Maximum number of causes with a segment of their own. Smaller ones are summed."""
MIN_SHOWN_SHARE = 0.0005
"""Share of the step below which idle time is ignored: some nanoseconds between two kernels."""
MIN_SEGMENT_SHARE = 0.015
"""Share of the step below which a cause has no segment of its own: it would be narrower than half a
cell of a terminal."""


def build_step_bar(report: Report) -> StepBar | None:
    """Return the bar of the step's time, or ``None`` if nothing is measured."""
    work = _list_work_segments(report) if report.time else _list_host_segments(report)
    idle, total = _list_idle_segments(report)
    if not work and not idle:
        return None
    title, aside = report_text.time_heading(report)
    return StepBar(title, aside, report.per, work, idle, total)


def _list_work_segments(report: Report) -> list[Segment]:
    return [
        Segment(
            "work",
            part.name,
            t.CLASS_LABELS.get(part.name, t.cause_label(part.name, report.scope.framework)),
            charts.CLASSES.get(part.name, charts.OTHER_LOOK),
            part.ns,
            part.share,
        )
        for part in report.time
        if part.name != "idle" and part.ns > 0
    ]


def _list_idle_segments(report: Report) -> tuple[list[Segment], Segment | None]:
    """Return a segment for each cause of idle time, and one for all of it."""
    part = next((part for part in report.time if part.name == "idle"), None)
    if part is None or part.share < MIN_SHOWN_SHARE:
        return [], None
    label = t.CLASS_LABELS["idle"] if report.idle else "idle or not recorded"
    label += " while profiled" * (
        report.step is not None and report.step.window_is_unrepresentative
    )
    total = Segment("idle", "idle", label, charts.CLASSES["idle"], part.ns, part.share)
    if not report.idle:
        return [total] if part.ns > 0 else [], total
    framework = report.scope.framework
    causes = [
        (item.cause, t.idle_label(item, framework), item.ns, item.share) for item in report.idle
    ]
    return _list_largest_segments("idle", causes, charts.CAUSES.get, "other causes"), total


def _list_host_segments(report: Report) -> list[Segment]:
    """Return the main thread's time by class, as segments for a trace without device work."""
    framework = report.scope.framework
    parts = [
        (item.name, t.host_label(item.name, framework), item.ns, item.share) for item in report.host
    ]
    return _list_largest_segments(
        "host", _replace_by_ranges(report, parts), charts.host_look, "smaller parts"
    )


def _replace_by_ranges(
    report: Report, parts: list[tuple[str, str, float, float]]
) -> list[tuple[str, str, float, float]]:
    """Replace time outside operators by the program's own ranges, if it is most of the time and the
    ranges fit in it."""
    largest = max(parts, key=lambda part: part[2], default=None)
    range_ns = sum(item.ns for item in report.ranges)
    if largest is None or largest[0] != "unknown" or not 0 < range_ns <= largest[2]:
        return parts
    key, label, ns, share = largest
    range_parts = [
        (f"range {item.name}", labels.shorten(labels.clean(item.name), 30), item.ns, item.share)
        for item in report.ranges
    ]
    remaining = (key, label, ns - range_ns, share - sum(item.share for item in report.ranges))
    return [*range_parts, remaining, *(part for part in parts if part is not largest)]


def build_phase_segment(name: str, ns: float, share: float) -> Segment:
    """Return the segment of a recorded phase of the step, for a bar of phases."""
    look = charts.PHASES.get(name, charts.OTHER_LOOK)
    return Segment("host", name, t.host_label(name), look, ns, share)


def _list_largest_segments(
    kind: Kind,
    parts: list[tuple[str, str, float, float]],
    look: Callable[[str], Appearance | None],
    rest_label: str,
) -> list[Segment]:
    parts = sorted((part for part in parts if part[2] > 0), key=lambda part: -part[2])
    large = [part for part in parts if part[3] >= MIN_SEGMENT_SHARE]
    if len(large) > MAX_CAUSES + 1:
        large = large[:MAX_CAUSES]
    small = parts[len(large) :]
    if len(small) > 1:
        ns, share = sum(part[2] for part in small), sum(part[3] for part in small)
        parts = [*large, ("rest", rest_label, ns, share)]
    spare_glyphs = iter(charts.SPARE_GLYPHS)

    def get_look(key: str) -> Appearance:
        if key == "rest":
            return charts.OTHER_LOOK
        return look(key) or replace(charts.OTHER_LOOK, glyph=next(spare_glyphs, "?"))

    return [Segment(kind, key, label, get_look(key), ns, share) for key, label, ns, share in parts]


# -- what the step could come down to ------------------------------------------------------------


def build_fix_sequence(report: Report) -> FixSequence | None:
    """Return the step time left after each fix of the step, or ``None`` if no fix shortens it."""
    result = finding_text.fixes_of_step(report)
    step_ns = report.step_ns
    if step_ns <= 0 or not any(finding.marginal_gain_ns for finding in result):
        return None
    remaining_ns = step_ns
    fixes = []
    for finding in result:
        saved = float(max(0, finding.marginal_gain_ns or 0))
        remaining_ns = max(0.0, remaining_ns - saved)
        identity = (finding.priority, finding.severity, labels.clean(finding.title))
        fixes.append(
            StepAfterFix(*identity, saved, remaining_ns, saved / step_ns, remaining_ns / step_ns)
        )
    measured = StepAfterFix(None, "info", "as measured", 0.0, step_ns, 0.0, 1.0)
    return FixSequence(report.per, report_text.has_upper_bound(report), measured, fixes)


def build_chosen_fix_sequence(
    report: Report, priorities: Container[int], estimator: GainEstimator
) -> FixSequence | None:
    """Return the sequence with only the kept fixes, by priority. Each saves its gain after the kept
    fixes before it. A fix that is not kept shows its saving after all kept ones."""
    full = build_fix_sequence(report)
    if full is None:
        return None
    result = finding_text.fixes_of_step(report)
    full_savings = [stair.saved_ns for stair in full.fixes]

    def savings(chosen: Sequence[Finding]) -> list[float]:
        """Return what each of these fixes saves after the fixes before it. Together they save at
        most what all fixes save."""
        remaining_ns, saved = sum(full_savings), []
        for index, finding in enumerate(chosen):
            if chosen[: index + 1] == result[: index + 1]:
                gain = full_savings[index]
            else:
                gain = _marginal_in_report(finding, chosen[:index], estimator)
            saved.append(min(remaining_ns, gain))
            remaining_ns -= saved[-1]
        return saved

    chosen = [finding for finding in result if finding.priority in priorities]
    of_kept = savings(chosen)
    remaining_ns, done, fixes = full.measured.left_ns, iter(of_kept), []
    for stair, finding in zip(full.fixes, result, strict=True):
        if finding.priority in priorities:
            saved = next(done)
            remaining_ns = max(0.0, remaining_ns - saved)
        else:
            with_finding = [f for f in result if f.priority in priorities or f is finding]
            saved = max(0.0, sum(savings(with_finding)) - sum(of_kept))
        shares = {
            "saved_share": saved / report.step_ns,
            "left_share": remaining_ns / report.step_ns,
        }
        fixes.append(replace(stair, saved_ns=saved, left_ns=remaining_ns, **shares))
    return replace(full, fixes=fixes)


def _marginal_in_report(
    finding: Finding, before: Sequence[Finding], estimator: GainEstimator
) -> float:
    """Return what a fix saves after the fixes ``before``, ns of the report's step: the part of its
    gain alone that remains in the replayed window."""
    alone = float(finding.impact.gain_ns or 0) if finding.impact is not None else 0.0
    if not before:
        return max(0.0, alone)
    overlaps = estimator.overlaps(finding)
    of_window = estimator.marginal(finding.edits, ()) if overlaps else alone
    if of_window <= 0:
        return max(0.0, alone)
    return max(0.0, alone * marginal_gain(finding, before, estimator) / of_window)


# -- ranks side by side ---------------------------------------------------------------------------

RANK_HEAD: Final = [
    "rank", "step", "GPU busy", "exposed comm.", "idle", "arrives last", "others wait",
]  # fmt: skip
DEVICE_COLUMNS: Final = ("GPU busy", "idle")
"""Columns that a job without devices lacks."""


def build_rank_table(report: Report, limit: int = 1024) -> RankTable | None:
    """Return the ``limit`` ranks that others wait for longest, or ``None`` for one rank."""
    if report.ranks is None:
        return None
    lines = sorted(report.ranks.lines, key=lambda x: (-(x.caused_wait_ns or 0.0), -x.step_ns))
    latest = lines[0] if lines and lines[0].caused_wait_ns else None
    rows = [
        RankRow(line.rank, _rank_cells(line), line is latest)
        for line in sorted(lines[:limit], key=lambda line: line.rank)
    ]
    head = [report.per if name == "step" else name for name in RANK_HEAD]
    no_devices = all(line.busy_share is None for line in lines)
    columns = [
        number
        for number, name in enumerate(head)
        if not (no_devices and name in DEVICE_COLUMNS)
        and (not number or any(row.cells[number] != t.EMPTY_CELL for row in rows))
    ]
    head = [head[n] for n in columns]
    rows = [replace(row, cells=[row.cells[n] for n in columns]) for row in rows]
    return RankTable(head, rows, len(lines), labels.clean(report.ranks.note))


def _rank_cells(line: RankLine) -> list[str]:
    cells = [
        t.format_duration(line.step_ns),
        t.format_share(line.busy_share),
        t.format_duration(line.communication_ns),
        t.format_duration(line.idle_ns),
        t.format_share(line.last_share),
        t.format_duration(line.caused_wait_ns),
    ]
    number = t.EMPTY_CELL if line.rank < 0 else str(line.rank)
    return [number, *(t.EMPTY_CELL if cell == t.NOT_MEASURED else cell for cell in cells)]
