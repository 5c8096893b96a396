"""Telemetry of a rank: GPU use, clocks, power, temperature, throttling, and the host."""

from __future__ import annotations

from typing import Any

from advisor.core import text as t
from advisor.core.run_directory import THROTTLE, Gpu, Host, RankRecord
from advisor.dashboard import figures, theme
from advisor.dashboard.dom import el
from advisor.dashboard.parts import card, empty, figure, table
from advisor.measure.steps.record import Recorded

GPU_LINES = (
    ("Use", "%", (("any kernel", "utilisation", 1), ("memory", "memory_utilisation", 1))),
    ("Clock", "MHz", (("SM", "sm_clock", 1), ("highest", "sm_clock_max", 1))),
    ("Power", "W", (("drawn", "power", 1e3), ("limit", "power_limit", 1e3))),
    (
        "Temperature",
        "°C",
        (("GPU", "temperature", 1), ("clocks fall at", "temperature_slowdown", 1)),
    ),
    (
        "Memory",
        "GiB",
        (("used, all processes", "memory_used", 1 << 30), ("there is", "memory_total", 1 << 30)),
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


def cards(record: RankRecord, *, last: int | None = None) -> list[Any]:
    """Figures of what was sampled; ``last``: only the latest samples."""
    samples = record.samples[-last:] if last else record.samples
    if not samples:
        return [
            empty(
                "No telemetry",
                "Clocks, power, temperature and host load were not sampled.",
                "Record with advisor record: it samples once a second.",
            )
        ]
    start = record.samples[0].t
    uuid = Recorded(record).uuid
    gpus = [(s.t, gpu) for s in samples for gpu in s.gpus if uuid is None or gpu.uuid == uuid]
    hosts = [(s.t, s.host) for s in samples if s.host is not None]
    made = [
        one for name, unit, lines in GPU_LINES if (one := _figure(name, unit, lines, gpus, start))
    ]
    found: list[Any] = []
    if made:
        found.append(card("GPU", multiples(made), aside="over the run, in seconds"))
    elif record.rank.devices:
        found.append(empty("No GPU telemetry", "The driver gave nothing that could be sampled."))
    spans = throttle_spans(gpus, start)
    if spans:
        found.append(_throttled(spans))
    made = [
        one for name, unit, lines in HOST_LINES if (one := _figure(name, unit, lines, hosts, start))
    ]
    if made:
        found.append(card("Host", multiples(made), aside="over the run, in seconds"))
    return found


def _figure(
    name: str,
    unit: str,
    lines: tuple[tuple[str, str, float], ...],
    samples: list[tuple[int, Gpu]] | list[tuple[int, Host]],
    start: int,
) -> Any:
    series = []
    colours = (theme.ACCENT, theme.PLAIN)
    for (label, field, scale), colour in zip(lines, colours, strict=True):
        values = [getattr(sample, field) for _, sample in samples]
        if any(value is not None for value in values):
            at = [(when - start) / 1e9 for when, _ in samples]
            shown = [None if value is None else value / scale for value in values]
            series.append((label, *figures.thin(at, shown), colour))
    if not series:
        return None
    return el(
        "Div",
        el("H3", f"{name}, {unit}"),
        figure(
            figures.lines(series, x="", y="", height=150),
            f"telemetry-{name.lower().replace(' ', '-')}",
            height=150,
            description=f"{name} over time, in {unit}.",
        ),
    )


def multiples(parts: list[Any]) -> Any:
    """Small figures of one kind beside each other."""
    return el("Div", *parts, cls="multiples")


def throttle_spans(gpus: list[tuple[int, Gpu]], start: int) -> list[tuple[str, float, float, int]]:
    """Runs of samples with the same reasons: (reasons, first s, last s, samples)."""
    spans: list[tuple[str, float, float, int]] = []
    before = ""
    for when, gpu in gpus:
        bits = gpu.throttle or 0
        names = ", ".join(name for name, bit in THROTTLE.items() if bits & bit and name != "idle")
        at = (when - start) / 1e9
        if names and names == before:
            spans[-1] = (names, spans[-1][1], at, spans[-1][3] + 1)
        elif names:
            spans.append((names, at, at, 1))
        before = names
    return spans


def _throttled(spans: list[tuple[str, float, float, int]]) -> Any:
    rows = [
        [names, f"{first:,.0f} s", f"{last:,.0f} s", t.count(count)]
        for names, first, last, count in sorted(spans, key=lambda span: -span[3])[:20]
    ]
    return card(
        "Clocks held down",
        table(["Reason", "From", "To", "Samples"], rows, numbers=(1, 2, 3)),
        aside="as the driver gives it",
    )
