"""Run: the environment, all recorded steps, telemetry and hot Python lines."""

from collections.abc import Callable
from typing import Any

from advisor.advise import report_charts
from advisor.core import labels
from advisor.core import text as t
from advisor.core.gpus import lookup
from advisor.core.run_directory import Manifest, RankRecord
from advisor.dashboard import components as ui
from advisor.dashboard import page_view
from advisor.dashboard.page_view import PageView
from advisor.dashboard.pages.live import phases_card, steps_card, telemetry_cards
from advisor.measure import Analysis

_MAX_LINES = 30
MAX_WARNINGS = 20


def has_content(view: PageView) -> bool:
    """Return whether there is a trace or a record."""
    return view.entry.loaded is None or view.analysis.only_input is None


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    a = view.analysis
    record = a.rank_record
    heading = ui.page_heading("Run", labels.clean(view.entry.path), ui.rank_selector(view, "/run"))
    recording = view.loaded.run.recording
    manifest = recording.manifest if recording is not None else None
    if record is None:
        return ui.page(heading, _no_record_notice(), _trace_card(a))
    return ui.page(
        heading,
        _metric_tiles(view),
        steps_card(a.run_steps) if a.run_steps is not None and a.run_steps.steps else None,
        _phase_card(view),
        *telemetry_cards(record),
        _event_card(record),
        _hot_line_card(view) if view.rank is None else None,
        _loader_card(a),
        ui.element(
            "Div",
            ui.element("Div", _environment_card(manifest, record), _trace_card(a), cls="stack"),
            _flag_card(record),
            cls="pair wide-first",
        ),
    )


def _no_record_notice() -> Any:
    """Build the notice that the run has no record."""
    return ui.empty_state(
        "No run record",
        "Only a profiler trace was recorded. Steps outside its window, phases, GPU clocks, power, "
        "temperature, flags and loader settings are unknown.",
        "Record with advisor record, or @advisor.profile, to record them.",
    )


def _metric_tiles(view: PageView) -> Any:
    """Build the tiles of step time, profiler overhead and throughput."""
    recorded = view.loaded.report.recorded
    if recorded is None or view.rank is not None:
        return None
    overhead = recorded.profiler_overhead
    rate = recorded.samples_per_second
    step = view.loaded.report.step
    use = "analysed" if step is None else f"in the {step.statistic}"
    ended = labels.clean(recorded.ended) if recorded.ended else "killed or still running"
    return ui.tiles(
        [
            (
                "Steps",
                t.format_count(recorded.steps),
                f"{t.format_count(recorded.used)} {use} · {labels.clean(ended)}",
            ),
            _step_tile(view),
            (
                "99th percentile",
                t.format_duration(recorded.p99_ns),
                "" if recorded.p99_ns is not None else "needs 100 steps outside the profiler",
            ),
            (
                "Profiler overhead",
                t.NOT_MEASURED
                if overhead is None
                else "none measured"
                if overhead <= 0
                else f"{overhead:+.0%}",
                "all windows, compared with the steps around them" if overhead is not None else "",
            ),
            (
                "Throughput",
                t.NOT_MEASURED if rate is None else f"{rate:,.0f}/s",
                "samples, this rank" if rate is not None else "batch size not recorded",
            ),
        ]
    )


def _step_tile(view: PageView) -> tuple[str, str, str]:
    """Return the tile of the step time that every page uses. Its note may add the median."""
    step, recorded = view.loaded.report.step, view.loaded.report.recorded
    if step is None or recorded is None:
        return "Step", t.NOT_MEASURED, "no steps outside the profiler, or only host times"
    note = f"{step.statistic} outside the profiler"
    if step.varies:
        note += f"; median {t.format_duration(step.ns)}"
    return "Step", t.format_duration(step.reference_ns), note


def _phase_card(view: PageView) -> Any:
    """Build the card of the step's phases, from the report."""
    recorded = view.loaded.report.recorded
    if recorded is None or view.rank is not None:
        return None
    parts = [
        report_charts.build_phase_segment(phase.name, phase.ns, phase.share)
        for phase in recorded.phases
    ]
    on_host = view.analysis.trains_on_host
    aside = "host time" if on_host else "host time; the GPU runs asynchronously"
    return phases_card("Phases of the step", parts, aside)


def _environment_card(manifest: Manifest | None, record: RankRecord) -> Any:
    """Build the card of command, commit, hardware and versions."""
    rank = record.rank
    rows: list[tuple[str, Any]] = []
    if manifest is not None:
        if manifest.command:
            rows.append(("command", ui.element("Code", labels.clean(" ".join(manifest.command)))))
        if manifest.git_commit:
            dirty_note = ", with uncommitted changes" if manifest.git_dirty else ""
            rows.append(
                (
                    "commit",
                    ui.element(
                        "Span", ui.element("Code", labels.clean(manifest.git_commit)), dirty_note
                    ),
                )
            )
        rows += _rows_with_values(("ranks", manifest.world_size, t.format_count))
    for device in rank.devices[:8]:
        parts = [labels.clean(device.name or "GPU"), t.format_bytes(device.total_bytes)]
        if device.driver:
            parts.append(f"driver {labels.clean(device.driver)}")
        rows.append(("GPU", " · ".join(parts)))
    of_total = ""
    if rank.cpus_total not in (None, rank.cpus):
        of_total = f" of {t.format_count(rank.cpus_total)}"
    rows += _rows_with_values(
        ("CPUs", rank.cpus, lambda cpus: f"{t.format_count(cpus)}{of_total}"),
        ("host memory", rank.memory_bytes, t.format_bytes),
        ("/dev/shm", rank.shm_bytes, t.format_bytes),
    )
    versions = {} if manifest is None else manifest.versions
    rows += [(labels.clean(name), labels.clean(value)) for name, value in sorted(versions.items())]
    return ui.card("Environment", ui.fact_list(rows)) if rows else None


def _rows_with_values(*rows: tuple[str, Any, Callable[[Any], str]]) -> list[tuple[str, Any]]:
    """Return name and text of the rows with a value. Rows are (name, value, formatter)."""
    return [(name, format_text(value)) for name, value, format_text in rows if value is not None]


def _flag_card(record: RankRecord) -> Any:
    """Build the card of PyTorch flags, environment variables and limits."""
    rank = record.rank
    rows = [
        (ui.element("Code", labels.clean(name)), _format_value(value))
        for name, value in sorted(rank.flags.items())
    ]
    rows += [
        (ui.element("Code", labels.clean(name)), ui.element("Code", labels.clean(value)))
        for name, value in sorted(rank.env.items())
    ]
    rows += [
        (ui.element("Code", f"ulimit {labels.clean(name)}"), t.format_count(value))
        for name, value in sorted(rank.ulimits.items())
    ]
    return ui.card("Flags and variables", ui.fact_list(rows)) if rows else None


def _format_value(value: object) -> str:
    """Write a setting's value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return labels.shorten(labels.clean(value), 200)


WINDOW_STATES = {"done": "recorded", "never": "never opened"}

LOADER_FIELDS = (
    "workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor", "drop_last",
    "multiprocessing_context", "length", "dataset",
)  # fmt: skip


def _loader_card(a: Analysis) -> Any:
    """Build the card of the settings of data loaders, or ``None`` without any."""
    loaders = [] if a.run_steps is None else a.run_steps.loaders
    if not loaders:
        return None
    names = [name for name in LOADER_FIELDS if any(name in loader for loader in loaders)]
    rows = [
        [f"{number}", *(_format_value(loader.get(name)) for name in names)]
        for number, loader in enumerate(loaders[:20], start=1)
    ]
    return ui.card(
        "Data loaders",
        ui.table(["Loader", *(name.replace("_", " ") for name in names)], rows, stacked=True),
        aside="loaders that fed training steps",
    )


def _event_card(record: RankRecord) -> Any:
    """Build the card of warnings, errors, and the state of each profiled window."""
    lines = []
    for data in record.events_of("window"):
        state, reason = labels.clean(data.get("state", "")), labels.clean(data.get("why", "") or "")
        if state != "open":
            window = labels.clean(data.get("window", "?"))
            state_text = WINDOW_STATES.get(state, state)
            lines.append(f"profiled window {window}: {state_text}{f', {reason}' if reason else ''}")
    for kind in ("warning", "error"):
        lines += [
            f"{kind}: {labels.clean(data.get('text', ''))}" for data in record.events_of(kind)
        ]
    if not lines:
        return None
    items = [ui.element("Li", line) for line in lines[:MAX_WARNINGS]]
    return ui.card("Events", ui.element("Ul", *items, cls="more"))


def _hot_line_card(view: PageView) -> Any:
    """Build the card of the hot lines that Scalene sampled."""
    hot_lines = view.loaded.report.hot_lines
    if not hot_lines:
        return ui.empty_state(
            "No Python lines",
            "Host time by line of Python was not sampled.",
            "Record with advisor record --scalene, which adds a separate pass.",
        )
    rows = [
        [
            ui.element("Code", f"{t.shorten_path(hot.file, 60)}:{hot.line}"),
            ui.element("Code", labels.shorten(labels.clean(hot.text), 80)),
            t.format_share(hot.share),
            t.format_share(hot.python),
            t.format_share(hot.native),
            t.format_share(hot.system),
        ]
        for hot in hot_lines[:_MAX_LINES]
    ]
    return ui.card(
        "Hot Python lines",
        ui.table(
            ["Line", "", "CPU time", "Python", "Native", "System"],
            rows,
            number_columns=(2, 3, 4, 5),
            name_columns=(0, 1),
            caption="Share of the process's CPU time, sampled by Scalene in a separate pass",
        ),
    )


def _trace_card(a: Analysis) -> Any:
    """Build the card of facts about the trace: size, options, devices."""
    meta = a.trace.meta
    if a.record_only:
        return None
    rows: list[tuple[str, Any]] = [
        ("file", t.shorten_path(meta.path, 100)),
        ("events", t.format_count(meta.events_read)),
        ("size", f"{t.format_bytes(meta.bytes_read)} uncompressed"),
        ("length", t.format_duration(meta.end_ns)),
    ]
    if meta.truncated:
        rows.append(("truncated", labels.clean(meta.damage or "the file ends early")))
    rows += [
        (f"excluded: {labels.clean(reason)}", t.format_count(count))
        for reason, count in meta.events_dropped.items()
    ]
    rows += [
        ("shapes", _format_recorded(meta.record_shapes)),
        ("Python stacks", _format_recorded(meta.with_stack)),
        ("memory", _format_recorded(meta.profile_memory)),
        ("sync events", _format_recorded(meta.sync_events)),
    ]
    rows += _rows_with_values(
        ("ranks", meta.world_size, t.format_count),
        ("backend", meta.backend or None, labels.clean),
        ("CUDA runtime", meta.cuda_runtime, _format_version),
        ("CUDA driver", meta.cuda_driver, _format_version),
    )
    for device in meta.devices[:8]:
        name, memory_bytes, sms = device.name, device.memory_bytes, device.sms
        gpu_spec = lookup(name, sms=sms, memory_bytes=memory_bytes, compute=device.compute)
        if name is None and gpu_spec is not None:
            name = gpu_spec.name
        parts = [labels.clean(name) if name else "model not recorded"]
        if memory_bytes is not None:
            parts.append(t.format_bytes(memory_bytes))
        rows.append((f"GPU {device.id}", " · ".join(parts)))
    return ui.card("Trace", ui.fact_list(rows))


def _format_recorded(value: bool | None) -> str:
    """Write whether an option was recorded."""
    return "unknown" if value is None else "recorded" if value else "not recorded"


def _format_version(number: int) -> str:
    """Write a CUDA version number such as 12040 as ``12.4``."""
    return f"{number // 1000}.{number % 1000 // 10}" if number >= 1000 else str(number)
