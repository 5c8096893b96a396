"""Live: a run during its recording: steps, phases, telemetry, and findings of each window."""

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
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.components import (
    card,
    choices,
    draw_strip,
    element,
    empty_page,
    empty_state,
    figure,
    head,
    link,
    page,
    remark,
    table,
    tiles,
    two_columns,
)
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import PageView, parse_query
from advisor.dashboard.pages.overview import finding_line
from advisor.measure.steps.step_records import StepRecords
from advisor.render.documents.monitor import throttle_reasons

SHOWN_STEPS, SHOWN_SAMPLES = 400, 600
RECENT_STEPS = 50
"""Number of steps that the figures of merit cover."""


def has_content(view: PageView) -> bool:
    return view.session.live


def layout(rank: object = None, **query: object) -> Any:
    view = page_view.view(**query)
    session = view.session
    if not session.live or session.follower is None:
        return empty_page(
            "Live",
            "Not following a run",
            "This page follows steps, phases and telemetry during training.",
            "Start advisor dashboard RUN --live, where RUN is the folder that advisor record "
            "writes.",
        )
    interval: Any = dcc.Interval
    return [
        *page(
            head("Live", labels.clean(session.entries[0].path)),
            element(
                "Div", *body(view, _number(rank)), id="live-body", cls="stack", aria_live="off"
            ),
        ),
        interval(id="live-tick", interval=1000),
    ]


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Update the page once per second."""
    if not session.live:
        return

    @app.callback(
        Output("live-body", "children"),
        Output("live-tick", "disabled"),
        Input("live-tick", "n_intervals"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
    def tick(_: object, search: object) -> Any:
        query = parse_query(search)
        view = page_view.view()
        record = _record(view, _number(query.get("rank")))
        return body(view, _number(query.get("rank"))), record is not None and record.has_ended


def _number(rank: object) -> int | None:
    text = str(rank)
    return int(text) if text.isdecimal() and len(text) <= 6 else None


def _record(view: PageView, rank: int | None) -> RankRecord | None:
    follower = view.session.follower
    if follower is None:
        return None
    ranks = follower.ranks()
    if not ranks:
        return None
    return follower.read(rank if rank in ranks else ranks[0])


def body(view: PageView, rank: int | None) -> list[Any]:
    """Build all that changes while the run goes on."""
    record = _record(view, rank)
    if record is None or not record.steps:
        return [
            empty_state("Waiting for the first step", "Nothing was recorded in this folder yet.")
        ]
    follower = view.session.follower
    ranks = follower.ranks() if follower is not None else []
    chosen = rank if rank in ranks else ranks[0]
    parts: list[Any] = []
    if len(ranks) > 1:
        links = [(str(n), view.href("/live", rank=n), n == chosen) for n in ranks[:64]]
        parts.append(choices("Rank", links))
    parts.append(_figures(record))
    recent = record.steps[-SHOWN_STEPS:]
    shown = StepRecords(RankRecord(rank=record.rank, steps=recent))
    parts.append(steps_card(shown, f"the last {len(recent)}"))
    parts.append(_phases(record))
    parts.append(_findings(view))
    parts += telemetry_cards(record, last=SHOWN_SAMPLES)
    return [part for part in parts if part is not None]


def _recent(record: RankRecord) -> StepRecords:
    """Return measurements of the latest steps alone."""
    steps = record.steps[-RECENT_STEPS:]
    return StepRecords(RankRecord(rank=record.rank, steps=steps))


def _figures(record: RankRecord) -> Any:
    recent = _recent(record)
    rate = recent.samples_per_second
    last = record.steps[-1]
    ends = record.events_of("end")
    state = "running"
    if ends:
        state = f"ended: {labels.clean(ends[-1].get('reason', ''))}"
    return tiles(
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


def steps_card(recorded: StepRecords, aside: str = "") -> Any:
    """Draw durations of recorded steps, if known, and mark those that the profiler slowed."""
    known, total = ~np.isnan(recorded.durations), len(recorded.steps)
    durations = (recorded.durations[known] / 1e6).tolist()
    numbers = np.array([step.n for step in recorded.steps], dtype=np.float64)
    shown_ms = np.where(known, recorded.durations, recorded.dur) / 1e6
    stops = ~recorded.profiled & (~recorded.unprofiled | recorded.exporting)
    # without a length the host runs ahead, but where it takes long for a step the GPU waits
    marks = [
        (name, *plotly_figures.downsample(numbers[own].tolist(), shown_ms[own].tolist()), colour)
        for name, own, colour in (
            ("host time alone", ~known & ~recorded.profiled & ~stops, theme.PLAIN),
            ("while profiled", recorded.profiled, theme.CAUSES["dispatch"]),
            ("while the profiler stops or writes", stops, theme.CAUSES["python"]),
        )
        if own.any()
    ]
    drawn = plotly_figures.line_chart(
        [("step", *plotly_figures.downsample(numbers[known].tolist(), durations), theme.ACCENT)],
        x="step",
        y="ms",
        height=220,
        marks=marks,
    )
    description = f"Duration of each of {total} recorded steps, in ms."
    if not known.all():
        count = f"{known.sum()} of {total} steps are timed on the GPU"
        count += "; off the line is the host's time of another"
        aside = ", ".join(filter(None, (aside, count)))
        description += f" {count}."
    top = 1.08 * float(shown_ms[recorded.after_warmup].max(initial=0))
    # start-up of a first step would flatten all others: a line names it, a double click shows it
    beyond = [
        f"step {step.n}, {t.format_duration(1e6 * ms)}"
        for step, ms in zip(recorded.steps, shown_ms, strict=True)
        if ms > top > 0
    ]
    if beyond:
        drawn.update_yaxes(range=[0, top])
    below = f"Above the axis: {'; '.join(beyond)}. Double click: all." if beyond else ""
    made = figure(drawn, "steps", height=220, description=description)
    return card("Steps", made, remark(below), aside=aside)


def phases_card(title: str, parts: Sequence[Segment], aside: str) -> Any:
    """Draw a bar of the step's phases with its legend; ``None`` without any."""
    if not parts:
        return None
    legend = element("Div", *two_columns(parts), cls="legend")
    return card(title, draw_strip(parts, title), legend, aside=aside)


def _phases(record: RankRecord) -> Any:
    recent = _recent(record)
    parts = []
    for name in recent.phases:
        ns, share = recent.phase(name), recent.share(name)
        if ns is not None and share:
            parts.append(report_charts.build_phase_segment(name, float(ns.mean()), share))
    aside = f"host time, mean of the last {min(RECENT_STEPS, len(record.steps))} steps"
    return phases_card("Phases", parts, aside)


def _findings(view: PageView) -> Any:
    """Show findings of the last window."""
    entry = view.session.entries[0]
    if entry.loaded is None:
        why = labels.clean(entry.failure_reason or entry.progress)
        return empty_state("No findings yet", f"They appear after the first profiled window. {why}")
    report = entry.loaded.report
    ranked = finding_text.ranked_findings(report)[:5]
    if not ranked:
        return card("Findings", element("P", labels.clean(report.verdict)))
    if report.scope.step_source == "record":
        basis = "from recorded steps only, until a window is profiled"
    else:
        basis = f"of window {next((item.window for item in report.inputs), 0)}"
    return card(
        "Findings",
        element("Ol", *(finding_line(view, finding) for finding in ranked), cls="lines"),
        tools=link("All", href=view.href("/findings")),
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


def telemetry_cards(record: RankRecord, *, last: int | None = None) -> list[Any]:
    """Draw figures of what was sampled; ``last``: only the latest samples."""
    samples = record.samples[-last:] if last else record.samples
    if not samples:
        return [
            empty_state(
                "No telemetry",
                "Clocks, power, temperature and host load were not recorded.",
                "Record with advisor record, which samples once per second.",
            )
        ]
    start = record.samples[0].t
    uuid = StepRecords(record).uuid
    gpus = [(s.t, gpu) for s in samples for gpu in s.gpus if uuid is None or gpu.uuid == uuid]
    hosts = [(s.t, s.host) for s in samples if s.host is not None]
    made = [
        drawn
        for name, unit, lines in GPU_LINES
        if (drawn := _figure(name, unit, lines, gpus, start))
    ]
    cards: list[Any] = []
    if made:
        cards.append(card("GPU", figure_grid(made), aside="over the run"))
    elif record.rank.devices:
        cards.append(empty_state("No GPU telemetry", "The driver reported no samples."))
    spans = throttle_spans(gpus, start)
    if spans:
        cards.append(_throttled(spans))
    made = [
        drawn
        for name, unit, lines in HOST_LINES
        if (drawn := _figure(name, unit, lines, hosts, start))
    ]
    if made:
        cards.append(card("Host", figure_grid(made), aside="over the run"))
    return cards


def _figure(
    name: str,
    unit: str,
    lines: tuple[tuple[str, str, float], ...],
    samples: list[tuple[int, GpuSample]] | list[tuple[int, HostSample]],
    start: int,
) -> Any:
    series = []
    colours = (theme.ACCENT, theme.PLAIN)
    for (label, field, scale), colour in zip(lines, colours, strict=True):
        values = [getattr(sample, field) for _, sample in samples]
        if any(value is not None for value in values):
            seconds = [(when - start) / 1e9 for when, _ in samples]
            shown = [None if value is None else value / scale for value in values]
            series.append((label, *plotly_figures.downsample(seconds, shown), colour))
    if not series:
        return None
    return element(
        "Div",
        element("H3", name),
        figure(
            plotly_figures.line_chart(series, x="s", y=unit, height=190),
            f"telemetry-{name.lower().replace(' ', '-')}",
            height=190,
            description=f"{name} over time, in {unit}.",
        ),
    )


def figure_grid(parts: list[Any]) -> Any:
    """Arrange small figures side by side."""
    return element("Div", *parts, cls="multiples")


def throttle_spans(
    gpus: list[tuple[int, GpuSample]], start: int
) -> list[tuple[str, float, float, int]]:
    """Find runs of samples with the same reasons: (reasons, first s, last s, samples)."""
    spans: list[tuple[str, float, float, int]] = []
    before = ""
    for when, gpu in gpus:
        names = ", ".join(throttle_reasons(gpu))
        second = (when - start) / 1e9
        if names and names == before:
            spans[-1] = (names, spans[-1][1], second, spans[-1][3] + 1)
        elif names:
            spans.append((names, second, second, 1))
        before = names
    return spans


def _throttled(spans: list[tuple[str, float, float, int]]) -> Any:
    rows = [
        [names, f"{first:,.0f} s", f"{last:,.0f} s", t.format_count(count)]
        for names, first, last, count in sorted(spans, key=lambda span: -span[3])[:20]
    ]
    return card(
        "Clock throttling",
        table(["Reason", "From", "To", "Samples"], rows, numbers=(1, 2, 3)),
        aside="reasons as the driver reports them",
    )
