"""Live: steps, phases, telemetry and findings of a run during its recording."""

from collections.abc import Sequence
from typing import Any

import dash
import numpy as np
from dash import Input, Output, State, dcc

from advisor.advise import finding_text, report_charts
from advisor.core import labels
from advisor.core import text as t
from advisor.core.charts import Segment
from advisor.core.run_directory import GpuSample, HostSample, RankRecord
from advisor.dashboard import components as ui
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import PageView, parse_query
from advisor.dashboard.pages.overview import finding_line
from advisor.measure.steps.run_steps import RunSteps
from advisor.render.documents.monitor import throttle_reasons

_MAX_STEPS, _MAX_SAMPLES = 400, 600
RECENT_STEPS = 50
"""Number of steps that the tiles and phases cover."""


def has_content(view: PageView) -> bool:
    """Return whether a run is being followed."""
    return view.session.is_live


def layout(rank: object = None, **query: object) -> Any:
    """Build the page. ``rank``: number of the rank to show."""
    view = page_view.view(**query)
    session = view.session
    if not session.is_live or session.follower is None:
        return ui.empty_page(
            "Live",
            "Not following a run",
            "This page follows steps, phases and telemetry during training.",
            "Start advisor dashboard RUN --live, where RUN is the folder that advisor record "
            "writes.",
        )
    interval: Any = dcc.Interval
    return [
        *ui.page(
            ui.page_heading("Live", labels.clean(session.entries[0].path)),
            ui.element(
                "Div",
                *live_body(view, _parse_number(rank)),
                id="live-body",
                cls="stack",
                aria_live="off",
            ),
        ),
        interval(id="live-tick", interval=1000),
    ]


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Register the callback that updates the page once per second."""
    if not session.is_live:
        return

    @app.callback(
        Output("live-body", "children"),
        Output("live-tick", "disabled"),
        Input("live-tick", "n_intervals"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
    def refresh(_: object, search: object) -> Any:
        query = parse_query(search)
        view = page_view.view()
        record = _read_record(view, _parse_number(query.get("rank")))
        return live_body(
            view, _parse_number(query.get("rank"))
        ), record is not None and record.has_ended


def _parse_number(rank: object) -> int | None:
    """Return a number of at most six digits, or ``None``."""
    text = str(rank)
    return int(text) if text.isdecimal() and len(text) <= 6 else None


def _read_record(view: PageView, rank: int | None) -> RankRecord | None:
    """Read the record of a rank, or of the first rank."""
    follower = view.session.follower
    if follower is None:
        return None
    ranks = follower.ranks()
    if not ranks:
        return None
    return follower.read(rank if rank in ranks else ranks[0])


def live_body(view: PageView, rank: int | None) -> list[Any]:
    """Build the parts of the page that change during the run."""
    record = _read_record(view, rank)
    if record is None or not record.steps:
        return [
            ui.empty_state("Waiting for the first step", "Nothing was recorded in this folder yet.")
        ]
    follower = view.session.follower
    ranks = follower.ranks() if follower is not None else []
    chosen = rank if rank in ranks else ranks[0]
    parts: list[Any] = []
    if len(ranks) > 1:
        links = [(str(n), view.href("/live", rank=n), n == chosen) for n in ranks[:64]]
        parts.append(ui.choice_links("Rank", links))
    parts.append(_metric_tiles(record))
    recent = record.steps[-_MAX_STEPS:]
    shown_steps = RunSteps(RankRecord(rank=record.rank, steps=recent))
    parts.append(steps_card(shown_steps, f"the last {len(recent)}"))
    parts.append(_phase_card(record))
    parts.append(_finding_card(view))
    parts += telemetry_cards(record, max_samples=_MAX_SAMPLES)
    return [part for part in parts if part is not None]


def _recent_steps(record: RankRecord) -> RunSteps:
    """Return measurements of the last RECENT_STEPS steps."""
    steps = record.steps[-RECENT_STEPS:]
    return RunSteps(RankRecord(rank=record.rank, steps=steps))


def _metric_tiles(record: RankRecord) -> Any:
    """Build the tiles of steps, step time, throughput and memory."""
    recent = _recent_steps(record)
    rate = recent.samples_per_second
    last = record.steps[-1]
    end_events = record.events_of("end")
    state = "running"
    if end_events:
        state = f"ended: {labels.clean(end_events[-1].get('reason', ''))}"
    return ui.tiles(
        [
            ("Steps", t.format_count(len(record.steps)), state),
            (
                "Last step",
                t.format_duration(last.dur),
                "while profiled" if last.window is not None else "",
            ),
            (
                "Median",
                t.format_duration(recent.median),
                f"of the last {min(RECENT_STEPS, len(record.steps))}",
            ),
            (
                "Throughput",
                t.NOT_MEASURED if rate is None else f"{rate:,.0f}/s",
                "samples, this rank" if rate is not None else "",
            ),
            ("Allocated memory", t.format_bytes(last.allocated), "at the end of the last step"),
        ]
    )


TOP_OVER_STEPS = 1.5
"""Top of the axis of step times, as a multiple of the longest step without the profiler."""
_MAX_NAMED_STEPS = 4
"""Number of steps above that axis whose times the remark gives."""


def steps_card(run_steps: RunSteps, aside: str = "") -> Any:
    """Draw the durations of recorded steps, and mark steps that the profiler slowed down."""
    has_duration, total = ~np.isnan(run_steps.durations), len(run_steps.steps)
    durations = (run_steps.durations[has_duration] / 1e6).tolist()
    step_numbers = np.array([step.n for step in run_steps.steps], dtype=np.float64)
    shown_ms = np.where(has_duration, run_steps.durations, run_steps.dur) / 1e6
    while_stopping = ~run_steps.profiled & (~run_steps.unprofiled | run_steps.exporting)
    # without a duration the host runs ahead, but the GPU waits for a step with a long host time
    point_series = [
        (
            name,
            *plotly_figures.downsample(step_numbers[mask].tolist(), shown_ms[mask].tolist()),
            color,
        )
        for name, mask, color in (
            (
                "host time only",
                ~has_duration & ~run_steps.profiled & ~while_stopping,
                theme.OTHER_COLOR,
            ),
            ("while profiled", run_steps.profiled, theme.CAUSE_COLORS["dispatch"]),
            ("while the profiler stops or writes", while_stopping, theme.CAUSE_COLORS["python"]),
        )
        if mask.any()
    ]
    chart = plotly_figures.line_chart(
        [
            (
                "step",
                *plotly_figures.downsample(step_numbers[has_duration].tolist(), durations),
                theme.ACCENT,
            )
        ],
        x_title="step",
        y_title="ms",
        height=220,
        point_series=point_series,
    )
    description = f"Duration of each of {total} recorded steps, in ms."
    if not has_duration.all():
        count = f"{has_duration.sum()} of {total} steps are timed on the GPU"
        count += "; points off the line are host times"
        aside = ", ".join(filter(None, (aside, count)))
        description += f" {count}."
    unslowed = run_steps.after_warmup & ~run_steps.profiled & ~while_stopping
    usual = unslowed if unslowed.any() else run_steps.after_warmup
    top = TOP_OVER_STEPS * float(shown_ms[usual].max(initial=0))
    # the others would compress them: a remark gives their times, a double click shows them
    above_axis = [
        f"step {step.n}, {t.format_duration(1e6 * ms)}"
        for step, ms in zip(run_steps.steps, shown_ms, strict=True)
        if ms > top > 0
    ]
    if above_axis:
        chart.update_yaxes(range=[0, top])
    others = len(above_axis) - _MAX_NAMED_STEPS
    note = (
        f"Above the axis: {'; '.join(above_axis[:_MAX_NAMED_STEPS])}"
        f"{f' and {others:,} more' if others > 0 else ''}. Double-click to show all."
        if above_axis
        else ""
    )
    step_figure = ui.figure(chart, "steps", height=220, description=description)
    return ui.card("Steps", step_figure, ui.remark(note), aside=aside)


def phases_card(title: str, parts: Sequence[Segment], aside: str) -> Any:
    """Build a card with a bar of the step's phases, or ``None`` without any."""
    if not parts:
        return None
    legend = ui.element("Div", *ui.two_column_legend(parts), cls="legend")
    return ui.card(title, ui.draw_strip(parts, title), legend, aside=aside)


def _phase_card(record: RankRecord) -> Any:
    """Build the card of phases, means over recent steps."""
    recent = _recent_steps(record)
    parts = []
    for name in recent.phases:
        ns, share = recent.phase(name), recent.share(name)
        if ns is not None and share:
            parts.append(report_charts.build_phase_segment(name, float(ns.mean()), share))
    aside = f"host time, mean of the last {min(RECENT_STEPS, len(record.steps))} steps"
    return phases_card("Phases", parts, aside)


def _finding_card(view: PageView) -> Any:
    """Build the card of the findings of the last window."""
    entry = view.session.entries[0]
    if entry.loaded is None:
        reason = labels.clean(entry.failure_reason or entry.progress)
        return ui.empty_state(
            "No findings yet", f"They appear after the first profiled window. {reason}"
        )
    report = entry.loaded.report
    ranked = finding_text.ranked_findings(report)[:5]
    if not ranked:
        return ui.card("Findings", ui.element("P", labels.clean(report.verdict)))
    if report.scope.step_source == "record":
        basis = "from recorded steps only, until a window is profiled"
    else:
        basis = f"of window {next((item.window for item in report.inputs), 0)}"
    return ui.card(
        "Findings",
        ui.element("Ol", *(finding_line(view, finding) for finding in ranked), cls="lines"),
        tools=ui.link("All", href=view.href("/findings")),
        aside=f"{basis}; {labels.clean(entry.failure_reason)}" if entry.failure_reason else basis,
    )


GPU_LINES = (
    ("Utilization", "%", (("any kernel", "utilisation", 1), ("memory", "memory_utilisation", 1))),
    ("Clock", "MHz", (("SM", "sm_clock", 1), ("maximum", "sm_clock_max", 1))),
    ("Power", "W", (("draw", "power", 1e3), ("limit", "power_limit", 1e3))),
    ("Temperature", "°C", (("GPU", "temperature", 1), ("slowdown at", "temperature_slowdown", 1))),
    (
        "Memory",
        "GiB",
        (("used, all processes", "memory_used", 1 << 30), ("total", "memory_total", 1 << 30)),
    ),
)
HOST_LINES = (
    ("CPU", "%", (("all CPUs", "cpu", 1), ("this process, of one CPU", "process_cpu", 1))),
    (
        "Host memory",
        "GiB",
        (("this process", "rss", 1 << 30), ("available", "memory_available", 1 << 30)),
    ),
)


def telemetry_cards(record: RankRecord, *, max_samples: int | None = None) -> list[Any]:
    """Build the cards of GPU and host telemetry. ``max_samples``: show only the latest ones."""
    samples = record.samples[-max_samples:] if max_samples else record.samples
    if not samples:
        return [
            ui.empty_state(
                "No telemetry",
                "Clocks, power, temperature and host load were not recorded.",
                "Record with advisor record, which samples once per second.",
            )
        ]
    start = record.samples[0].t
    uuid = RunSteps(record).uuid
    gpus = [
        (sample.t, gpu)
        for sample in samples
        for gpu in sample.gpus
        if uuid is None or gpu.uuid == uuid
    ]
    hosts = [(sample.t, sample.host) for sample in samples if sample.host is not None]
    figures = [
        chart
        for name, unit, lines in GPU_LINES
        if (chart := _telemetry_figure(name, unit, lines, gpus, start))
    ]
    cards: list[Any] = []
    if figures:
        cards.append(ui.card("GPU", figure_grid(figures), aside="over the run"))
    elif record.rank.devices:
        cards.append(ui.empty_state("No GPU telemetry", "The driver reported no samples."))
    spans = find_throttle_spans(gpus, start)
    if spans:
        cards.append(_throttle_card(spans))
    figures = [
        chart
        for name, unit, lines in HOST_LINES
        if (chart := _telemetry_figure(name, unit, lines, hosts, start))
    ]
    if figures:
        cards.append(ui.card("Host", figure_grid(figures), aside="over the run"))
    return cards


def _telemetry_figure(
    name: str,
    unit: str,
    lines: tuple[tuple[str, str, float], ...],
    samples: list[tuple[int, GpuSample]] | list[tuple[int, HostSample]],
    start: int,
) -> Any:
    """Draw a quantity over time, or return ``None`` without samples.

    ``lines``: (label, field of the sample, divisor) each. ``start``: first sample's time, ns."""
    series = []
    colors = (theme.ACCENT, theme.OTHER_COLOR)
    for (label, field, scale), color in zip(lines, colors, strict=True):
        values = [getattr(sample, field) for _, sample in samples]
        if any(value is not None for value in values):
            seconds = [(time_ns - start) / 1e9 for time_ns, _ in samples]
            scaled = [None if value is None else value / scale for value in values]
            series.append((label, *plotly_figures.downsample(seconds, scaled), color))
    if not series:
        return None
    return ui.element(
        "Div",
        ui.element("H3", name),
        ui.figure(
            plotly_figures.line_chart(series, x_title="s", y_title=unit, height=190),
            f"telemetry-{name.lower().replace(' ', '-')}",
            height=190,
            description=f"{name} over time, in {unit}.",
        ),
    )


def figure_grid(parts: list[Any]) -> Any:
    """Arrange small figures side by side."""
    return ui.element("Div", *parts, cls="multiples")


def find_throttle_spans(
    gpus: list[tuple[int, GpuSample]], start: int
) -> list[tuple[str, float, float, int]]:
    """Find spans of throttled samples: (reasons, first s, last s, number of samples)."""
    spans: list[tuple[str, float, float, int]] = []
    previous = ""
    for time_ns, gpu in gpus:
        reasons = ", ".join(throttle_reasons(gpu))
        seconds = (time_ns - start) / 1e9
        if reasons and reasons == previous:
            spans[-1] = (reasons, spans[-1][1], seconds, spans[-1][3] + 1)
        elif reasons:
            spans.append((reasons, seconds, seconds, 1))
        previous = reasons
    return spans


def _throttle_card(spans: list[tuple[str, float, float, int]]) -> Any:
    """Build the card of clock throttling, the longest spans first."""
    rows = [
        [reasons, f"{first:,.0f} s", f"{last:,.0f} s", t.format_count(count)]
        for reasons, first, last, count in sorted(spans, key=lambda span: -span[3])[:20]
    ]
    return ui.card(
        "Clock throttling",
        ui.table(["Reason", "From", "To", "Samples"], rows, number_columns=(1, 2, 3)),
        aside="reasons as the driver reports them",
    )
