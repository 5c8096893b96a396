"""Charts of a report: the step's bar, the step after each fix, and the table of ranks.

Each is built here, once, as data with its words; renderers fold, sum and round nothing."""

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
    return ReportCharts(
        build_step_bar(report), build_fix_sequence(report), build_rank_table(report)
    )


# -- where the time goes ------------------------------------------------------------------------

MAX_CAUSES = 4
"""Number of causes with a segment of their own; smaller ones are summed."""
MIN_SHOWN_SHARE = 0.0005
"""Share of the step below which idle time is none: some nanoseconds between two kernels."""
MIN_SEGMENT_SHARE = 0.015
"""Share of the step below which a cause has no segment of its own: it would be less than half a
cell of a terminal wide."""


def build_step_bar(report: Report) -> StepBar | None:
    """Return the bar of the step's time; ``None`` if nothing is measured."""
    work = _work(report) if report.time else _host(report)
    idle, total = _idle(report)
    if not work and not idle:
        return None
    title, aside = report_text.time_heading(report)
    return StepBar(title, aside, report.per, work, idle, total)


def _work(report: Report) -> list[Segment]:
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


def _idle(report: Report) -> tuple[list[Segment], Segment | None]:
    """Return a segment for each cause of idle time, and one for all of it."""
    part = next((part for part in report.time if part.name == "idle"), None)
    if part is None or part.share < MIN_SHOWN_SHARE:
        return [], None
    label = t.CLASS_LABELS["idle"] if report.idle else "idle or not recorded"
    label += " while profiled" * (report.step is not None and report.step.window_is_other)
    total = Segment("idle", "idle", label, charts.CLASSES["idle"], part.ns, part.share)
    if not report.idle:
        return [total] if part.ns > 0 else [], total
    own = report.scope.framework
    causes = [(item.cause, t.idle_label(item, own), item.ns, item.share) for item in report.idle]
    return _ranked("idle", causes, charts.CAUSES.get, "other causes"), total


def _host(report: Report) -> list[Segment]:
    """Return the main thread's time by class, as segments for a trace without device work."""
    own = report.scope.framework
    parts = [(item.name, t.host_label(item.name, own), item.ns, item.share) for item in report.host]
    return _ranked("host", _in_ranges(report, parts), charts.host_look, "smaller parts")


def _in_ranges(
    report: Report, parts: list[tuple[str, str, float, float]]
) -> list[tuple[str, str, float, float]]:
    """Replace time outside operators by the program's own ranges, if it is most of the time and the
    ranges fit in it."""
    largest = max(parts, key=lambda part: part[2], default=None)
    named = sum(item.ns for item in report.ranges)
    if largest is None or largest[0] != "unknown" or not 0 < named <= largest[2]:
        return parts
    key, label, ns, share = largest
    inside = [
        (f"range {item.name}", labels.shorten(labels.clean(item.name), 30), item.ns, item.share)
        for item in report.ranges
    ]
    left = (key, label, ns - named, share - sum(item.share for item in report.ranges))
    return [*inside, left, *(part for part in parts if part is not largest)]


def build_phase_segment(name: str, ns: float, share: float) -> Segment:
    """Return the segment of a recorded phase of the step, for a bar of phases."""
    look = charts.PHASES.get(name, charts.OTHER_LOOK)
    return Segment("host", name, t.host_label(name), look, ns, share)


def _ranked(
    kind: Kind,
    parts: list[tuple[str, str, float, float]],
    look: Callable[[str], Appearance | None],
    rest: str,
) -> list[Segment]:
    parts = sorted((part for part in parts if part[2] > 0), key=lambda part: -part[2])
    large = [part for part in parts if part[3] >= MIN_SEGMENT_SHARE]
    if len(large) > MAX_CAUSES + 1:
        large = large[:MAX_CAUSES]
    small = parts[len(large) :]
    if len(small) > 1:
        ns, share = sum(part[2] for part in small), sum(part[3] for part in small)
        parts = [*large, ("rest", rest, ns, share)]
    spare = iter(charts.SPARE_GLYPHS)

    def drawn(key: str) -> Appearance:
        if key == "rest":
            return charts.OTHER_LOOK
        return look(key) or replace(charts.OTHER_LOOK, glyph=next(spare, "?"))

    return [Segment(kind, key, label, drawn(key), ns, share) for key, label, ns, share in parts]


# -- what the step could come down to ------------------------------------------------------------


def build_fix_sequence(report: Report) -> FixSequence | None:
    """Return the step time left after each fix of the step; ``None`` if none shortens it."""
    result = finding_text.fixes_of_step(report)
    whole = report.step_ns
    if whole <= 0 or not any(finding.marginal_gain_ns for finding in result):
        return None
    left = whole
    fixes = []
    for finding in result:
        saved = float(max(0, finding.marginal_gain_ns or 0))
        left = max(0.0, left - saved)
        named = (finding.priority, finding.severity, labels.clean(finding.title))
        fixes.append(StepAfterFix(*named, saved, left, saved / whole, left / whole))
    measured = StepAfterFix(None, "info", "as measured", 0.0, whole, 0.0, 1.0)
    return FixSequence(report.per, report_text.has_upper_bound(report), measured, fixes)


def build_chosen_fix_sequence(
    report: Report, kept: Container[int], estimator: GainEstimator
) -> FixSequence | None:
    """Return the sequence with only the kept fixes, by priority: each saves what it does after the
    kept ones before it. A fix that is left out shows its saving after all kept ones."""
    full = build_fix_sequence(report)
    if full is None:
        return None
    result = finding_text.fixes_of_step(report)
    known = [stair.saved_ns for stair in full.fixes]

    def savings(chosen: Sequence[Finding]) -> list[float]:
        """Return what each of these fixes saves after those before it, together at most what all
        do."""
        left, saved = sum(known), []
        for place, finding in enumerate(chosen):
            if chosen[: place + 1] == result[: place + 1]:
                own = known[place]
            else:
                own = _marginal_in_report(finding, chosen[:place], estimator)
            saved.append(min(left, own))
            left -= saved[-1]
        return saved

    chosen = [finding for finding in result if finding.priority in kept]
    of_kept = savings(chosen)
    left, done, fixes = full.measured.left_ns, iter(of_kept), []
    for stair, finding in zip(full.fixes, result, strict=True):
        if finding.priority in kept:
            saved = next(done)
            left = max(0.0, left - saved)
        else:
            more = [f for f in result if f.priority in kept or f is finding]
            saved = max(0.0, sum(savings(more)) - sum(of_kept))
        shares = {"saved_share": saved / report.step_ns, "left_share": left / report.step_ns}
        fixes.append(replace(stair, saved_ns=saved, left_ns=left, **shares))
    return replace(full, fixes=fixes)


def _marginal_in_report(
    finding: Finding, before: Sequence[Finding], estimator: GainEstimator
) -> float:
    """Return what a fix saves after those ``before``, ns of the report's step: of its gain alone
    the share that is left in the replayed window."""
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
    "rank", "step", "GPU busy", "exposed comm.", "idle", "comes last", "others wait",
]  # fmt: skip
OF_DEVICE: Final = ("GPU busy", "idle")
"""Columns that a job without devices does not have."""


def build_rank_table(report: Report, limit: int = 1024) -> RankTable | None:
    """Return the ranks, at most ``limit`` that others wait for longest; ``None``: one rank."""
    if report.ranks is None:
        return None
    lines = sorted(report.ranks.lines, key=lambda x: (-(x.caused_wait_ns or 0.0), -x.step_ns))
    latest = lines[0] if lines and lines[0].caused_wait_ns else None
    rows = [
        RankRow(line.rank, _rank_cells(line), line is latest)
        for line in sorted(lines[:limit], key=lambda line: line.rank)
    ]
    head = [report.per if name == "step" else name for name in RANK_HEAD]
    if all(line.busy_share is None for line in lines):
        kept = [n for n, name in enumerate(head) if name not in OF_DEVICE]
        head = [head[n] for n in kept]
        rows = [replace(row, cells=[row.cells[n] for n in kept]) for row in rows]
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
