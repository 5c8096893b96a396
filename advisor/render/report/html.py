"""The HTML renderer: one file to mail or attach, that loads nothing and runs nothing."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from advisor.advise import facts, views
from advisor.core import palette
from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.render import memory
from advisor.render.html import colour, fill
from advisor.render.renderer import DEFAULT, Options, Renderer

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: styles of the page itself, and nothing else from anywhere."""
MAX_NOTES = 100
_STATUS = {
    "bottlenecks": "Something is worth fixing",
    "healthy": "Healthy",
    "limited": "Limited",
}


class Html(Renderer[Report]):
    """A whole document, below 1 MB."""

    suffixes = (".html", ".htm")

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """The report; with the ``analysis`` it shows a step's timeline too, the names in it as
        ``clean`` gives them."""
        return fill(
            "render/report.html",
            report=subject,
            facts=facts,
            policy=POLICY,
            style=style(),
            status=_STATUS[subject.status],
            tiles=_tiles(subject),
            bar=views.step_bar(subject),
            stairs=views.stairs(subject),
            ranks=views.rank_table(subject),
            timeline=_timeline(subject, options),
            figures=[line for line in facts.figures(subject) if line[0] != "GPU"],
            places=_places,
            memory=memory.devices(subject, 25),
            assumed=[memory.assumptions(view) for view in subject.memory],
            most_notes=MAX_NOTES,
        )


@cache
def style() -> str:
    """The page's style sheet."""
    sheet = files("advisor.render").joinpath("report.css").read_text(encoding="utf-8")
    return f"{sheet}{palette.css()}"


def _tiles(report: Report) -> list[tuple[str, str]]:
    """Figures of merit: (value, what it is)."""
    if report.scope.step_source == "snapshot":
        return []
    peak = t.format_bytes(report.memory_peak_bytes)
    if report.memory_peak_bytes is not None and report.memory_capacity_bytes is not None:
        peak += f" of {t.format_bytes(report.memory_capacity_bytes)}"
    average = "step on average" if report.per == "step" else report.per
    tiles: list[tuple[str, str]] = [(t.format_duration(report.step_ns), average)]
    if report.step is not None:
        tiles = [
            (t.format_duration(report.step.ns), "step: the run's median, without the profiler")
        ]
        if report.step.window_ns is not None:
            tiles.append(
                (t.format_duration(report.step.window_ns), "step on average while profiled")
            )
    if not report.time:
        return tiles
    tiles += [
        (t.format_share(report.busy_share), "GPU busy"),
        (t.format_share(report.mfu), "MFU: of the GPU's peak FLOP/s"),
        (peak, "memory peak"),
    ]
    if report.communication_ns is not None:
        tiles.append((t.format_share(report.communication_overlap), "communication hidden"))
    replay = report.replay
    error = t.NOT_MEASURED if replay is None else facts.replay_error(replay)
    return [*tiles, (error, "replay error")]


def _places(finding: Finding) -> list[tuple[list[tuple[str, str]], str]]:
    """Where it is: ((short name, whole name) …, how often and how long)."""
    found = []
    for location, names in facts.named_places(finding, name_width=120, path_width=140):
        whole = t.location_names(location, name_width=2000, path_width=2000)
        if names:
            pairs = list(zip(names, whole, strict=True))
            found.append((pairs, " · ".join(t.location_figures(location))))
    return found


def _timeline(report: Report, options: Options) -> dict[str, Any] | None:
    """A strip a stream of one step, and when the device idled for which cause; ``None``: only the
    report is here, or no device work in it."""
    if options.analysis is None:
        return None
    from advisor.render.strip import CELLS, strip

    shown = strip(options.analysis)
    if shown is None:
        return None
    title = "The recording"
    if report.per == "step":
        title = f"A typical step: {options.clean(shown.step)}"
    lanes = []
    for lane in shown.lanes:
        paths: dict[str, str] = {}
        for run in lane.runs:
            name, length = _kind(run.kind), run.last - run.first
            paths[name] = f"{paths.get(name, '')}M{run.first},0h{length}v20h-{length}z"
        lanes.append((lane.label, t.format_share(lane.busy), paths))
    kinds = {run.kind for lane in shown.lanes for run in lane.runs}
    own = report.scope.framework
    return {
        "title": f"{title}, {t.format_duration(shown.dur_ns)}",
        "cells": CELLS,
        "lanes": lanes,
        "ticks": [t.format_duration(shown.dur_ns * part / 4) if part else "0" for part in range(5)],
        "keys": [
            (_kind(kind), kind if kind in palette.CLASSES else f"idle: {t.cause_label(kind, own)}")
            for kind in sorted(kinds, key=_kind)
        ],
        "more": f"{t.count_noun(shown.more, 'more stream')} with less work." if shown.more else "",
    }


def _kind(kind: str) -> str:
    return colour(kind, "work" if kind in palette.CLASSES else "idle")
