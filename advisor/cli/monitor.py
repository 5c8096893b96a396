"""``advisor monitor``: current use of the GPUs and the host."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.core.run_directory import Sample
    from advisor.recorder.telemetry import SampleSource

FIRST_DELAY_NS = 300_000_000
"""Delay from the first sample to the second, ns. CPU shares and some GPU counters are differences
between samples, which the first sample does not have."""
SLOW_EVERY_S = 7.0


def command(
    once: Annotated[bool, typer.Option("--once", help="Show one sample and exit.")] = False,
    format_name: Annotated[
        Literal["terminal", "json"],
        typer.Option(
            "--format", metavar="FORMAT", help="terminal, or json: one line of JSON per sample."
        ),
    ] = "terminal",
    prometheus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write each sample for Prometheus' textfile collector."),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, max=3600, help="Time between two samples.")
    ] = 1.0,
) -> None:
    """Show GPUs (NVML) and host: live on a terminal, otherwise once. Ctrl-C ends it."""
    from advisor.recorder.telemetry import SampleSource

    if prometheus is not None:
        out.check_output(prometheus, [])
    as_json = format_name == "json"
    live = sys.stdout.isatty() and not as_json and not once
    once = once or (not live and not as_json and prometheus is None)
    with SampleSource(every=True) as source:
        try:
            if live:
                _show_live(source, interval, prometheus)
            else:
                for sample in _iterate_samples(source, interval, once):
                    if prometheus is not None:
                        _write_prometheus(prometheus, source, sample)
                    if as_json:
                        out.show(_format_json(source, sample))
                    elif once:
                        out.show(_format_text(source, sample))
        except KeyboardInterrupt:
            return  # the usual way to end it


def _iterate_samples(source: SampleSource, interval: float, once: bool) -> Iterator[Sample]:
    source.sample(slow=True)
    time.sleep(FIRST_DELAY_NS / 1e9)
    slow_at = time.monotonic()
    while True:
        now = time.monotonic()
        slow = now >= slow_at
        if slow:
            slow_at = now + SLOW_EVERY_S
        yield source.sample(slow=slow)
        if once:
            return
        time.sleep(max(0.0, interval - (time.monotonic() - now)))


def _show_live(source: SampleSource, interval: float, prometheus: Path | None) -> None:
    from rich.live import Live
    from rich.text import Text

    merged: Sample | None = None
    with Live(screen=True, auto_refresh=False) as screen:
        for sample in _iterate_samples(source, interval, once=False):
            merged = _fill_slow_fields(sample, merged)
            if prometheus is not None:
                _write_prometheus(prometheus, source, merged)
            screen.update(Text.from_ansi(_format_text(source, merged)), refresh=True)


def _fill_slow_fields(sample: Sample, previous: Sample | None) -> Sample:
    """Fill rarely sampled fields from the last sample that had them."""
    from msgspec.structs import fields, replace

    if previous is None:
        return sample
    previous_gpus = {gpu.uuid: gpu for gpu in previous.gpus}
    gpus = []
    for gpu in sample.gpus:
        previous_gpu = previous_gpus.get(gpu.uuid)
        values = {
            field.name: getattr(previous_gpu, field.name)
            for field in fields(gpu)
            if previous_gpu is not None and getattr(gpu, field.name) is None
        }
        gpus.append(replace(gpu, **values))
    host = sample.host
    if host is not None and host.swap_used is None and previous.host is not None:
        host = replace(host, swap_used=previous.host.swap_used)
    return replace(sample, gpus=gpus, host=host)


def _device_names(source: SampleSource) -> dict[str | None, str | None]:
    return {device.uuid: device.name for device in source.devices}


def _format_text(source: SampleSource, sample: Sample) -> str:
    from advisor.render.document import RenderOptions
    from advisor.render.documents.monitor import build
    from advisor.render.formats.terminal import Terminal

    document = build(sample, names=_device_names(source), without_gpu=source.without_gpu)
    width, colour = out.find_report_width(sys.stdout), out.can_use_color(sys.stdout)
    return Terminal().draw(document, RenderOptions(width=width, colour=colour, details=True))


def _format_json(source: SampleSource, sample: Sample) -> str:
    import msgspec

    from advisor.core.labels import escape_terminal_controls

    data = {
        "unix_ns": time.time_ns(),
        "gpus": [
            {"name": _device_names(source).get(gpu.uuid), **msgspec.structs.asdict(gpu)}
            for gpu in sample.gpus
        ],
        "host": None if sample.host is None else msgspec.structs.asdict(sample.host),
        "without_gpu": source.without_gpu,
    }
    return escape_terminal_controls(msgspec.json.encode(data)) + "\n"


def _write_prometheus(file: Path, source: SampleSource, sample: Sample) -> None:
    from advisor.render.documents.monitor import prometheus

    try:
        out.write(prometheus(sample, _device_names(source)), file)
    except AdvisorError as error:
        raise AdvisorError(str(error).replace("--output", "--prometheus")) from None
