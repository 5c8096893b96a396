"""The parts of a Report that are measurements, not advice: scope, time, limits, verdict."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from advisor.advice.pricing import REPLAY, Pricer, ReplayPricer
from advisor.analysis.optree import op_table
from advisor.model import Finding
from advisor.report import text as t
from advisor.report.data import (
    Family,
    HardPart,
    HostShare,
    IdleCause,
    Input,
    OperatorTime,
    Phase,
    RankLine,
    Ranks,
    Recorded,
    Replay,
    Report,
    Scope,
    TimeShare,
)
from advisor.trace import Run, Trace

if TYPE_CHECKING:
    from advisor.analysis import Analysis

ONCE = ("other", "free", "malloc", "launch", "module_load")
"""Classes of runtime calls that wait for nothing in a steady step."""
START_UP = 0.10
"""A single one of them that takes this share of the window is start-up (loading modules, creating
the context: seconds each in public traces of a first iteration)."""
UNEVEN = 1.5
"""Longest over shortest step from which the mean stands for neither."""
WIDE = 0.70
"""A gain whose lower end is below this part of it is told as a range."""
MOST_OPERATORS = 10
BUSY = 0.80
"""Device-busy share from which a step without findings may be called healthy (gpu-idle: 80 %)."""


def inputs(run: Run, analyses: dict[int, Analysis]) -> list[Input]:
    """One entry a rank: the window that is analysed."""
    found = []
    for number, a in analyses.items():
        meta = a.trace.meta
        found.append(
            Input(
                path=meta.path,
                rank=None if number < 0 else number,
                window=meta.window,
                windows=sum(1 for r, _ in (*run.traces, *run.unread) if r == number),
                events_read=meta.events_read,
                events_dropped=meta.events_dropped,
                bytes_read=meta.bytes_read,
                truncated=meta.truncated,
                damage=meta.damage,
            )
        )
    return found


def measure(a: Analysis) -> dict[str, Any]:
    """The measured fields of a Report."""
    if a.record_only:
        return {"scope": _recorded_scope(a), "host": _phases(a)}
    fields: dict[str, Any] = {"scope": _scope(a), "host": _host(a)}
    if a.device_id is not None:
        per_step = a.step_count
        totals = a.breakdown.totals()
        span = max(a.span_ns, 1)
        communication = a.breakdown.all_communication.total
        fields |= {
            "time": [TimeShare(n, ns / per_step, ns / span) for n, ns in totals.items()],
            "busy_share": a.breakdown.busy.total / span,
            "communication_ns": communication / per_step if communication else None,
            "communication_overlap": a.breakdown.communication_overlap,
            "families": _families(a),
            "mfu": a.mfu,
            **_idle(a, totals["idle"]),
        }
    else:
        fields["operators"] = _operators(a)
    memory = a.memory
    if not memory.is_empty():
        peak, capacity = memory["peak_reserved"].max(), memory["capacity"].max()
        fields["memory_peak_bytes"] = peak
        fields["memory_capacity_bytes"] = capacity
    return fields


def _scope(a: Analysis) -> Scope:
    table, used = a.steps.table, a.steps.used
    return Scope(
        rank=a.trace.meta.rank,
        step_source=a.steps.source,
        steps_found=table.height,
        steps_used=used.height,
        outliers=table.filter("outlier")["name"].to_list(),
        span_ns=a.span_ns,
        step_ns=a.step_ns,
        step_min_ns=_whole(used["dur"].min()),
        step_max_ns=_whole(used["dur"].max()),
        step_median_ns=float(used["dur"].median() or 0),  # type: ignore[arg-type]
        device=a.device_id,
        device_name=a.device.name if a.device else None,
        device_known=a.hardware is not None,
        devices_seen=a.trace.gpu["device"].n_unique(),
    )


def _recorded_scope(a: Analysis) -> Scope:
    """Of a run without a profiled window: the recorder's own steps."""
    recorded = a.recorded
    assert recorded is not None
    dur = recorded.dur[recorded.used]
    device = next(iter(recorded.record.rank.devices), None)
    return Scope(
        rank=a.trace.meta.rank,
        step_source="record",
        steps_found=len(recorded.steps),
        steps_used=recorded.count,
        outliers=[],
        span_ns=int(dur.sum()),
        step_ns=a.step_ns,
        step_min_ns=int(dur.min()) if len(dur) else 0,
        step_max_ns=int(dur.max()) if len(dur) else 0,
        step_median_ns=recorded.median or 0.0,
        device=None if device is None else device.index,
        device_name=None if device is None else device.name,
        device_known=False,
        devices_seen=0,
    )


def _phases(a: Analysis) -> list[HostShare]:
    view = recorded_view(None, a)
    return [] if view is None else [HostShare(p.name, p.ns, p.share) for p in view.phases]


def recorded_view(run: Run | None, a: Analysis) -> Recorded | None:
    """What the recorder measured of every step; ``None`` for a trace alone."""
    recorded = a.recorded
    if recorded is None:
        return None
    mean = recorded.mean or 0.0
    phases = [
        Phase(name, float(values[recorded.used].mean()), float(values[recorded.used].mean()) / mean)
        for name, values in recorded.phases.items()
        if mean and values[recorded.used].any()
    ]
    end = next(iter(recorded.record.of_kind("end")), None)
    return Recorded(
        steps=len(recorded.steps),
        used=recorded.count,
        median_ns=recorded.median,
        mean_ns=recorded.mean,
        p99_ns=recorded.quantile(0.99) if recorded.count >= 100 else None,
        profiled_steps=int(recorded.profiled.sum()),
        profiled_median_ns=recorded.profiled_median,
        observer_effect=recorded.observer,
        phases=phases,
        samples_per_second=recorded.samples_per_second,
        ended=None if end is None else str(end.get("reason", "finished"))[:100],
        windows=_window_lines(recorded.record.of_kind("window")),
    )


def _window_lines(events: list[dict[str, Any]]) -> list[str]:
    """The last that was told of each window: ``window 0: done``."""
    last: dict[Any, dict[str, Any]] = {}
    for event in events:
        last[str(event.get("window"))] = event
    return [
        " ".join(
            part
            for part in (
                f"window {number}:",
                str(event.get("state", "open"))[:40],
                f"({str(event['why'])[:200]})" if event.get("why") else "",
            )
            if part
        )
        for number, event in list(last.items())[:100]
    ]


def _whole(value: Any) -> int:
    return int(value) if value is not None else 0


def _host(a: Analysis) -> list[HostShare]:
    main = a.trace.main_thread
    if main is None:
        return []
    table = a.host.filter(pl.col("thread") == main).sort("ns", descending=True)
    return [
        HostShare(name, ns / a.step_count, ns / max(a.span_ns, 1))
        for name, ns in zip(table["class"].to_list(), table["ns"].to_list(), strict=True)
        if ns
    ]


def _operators(a: Analysis) -> list[OperatorTime]:
    table = op_table(a).filter(pl.col("host") > 0).sort("host", descending=True)
    whole = max(int(table["host"].sum()), 1)
    rows = table.select("name", "host", "count").head(MOST_OPERATORS).iter_rows()
    return [
        OperatorTime(name, ns / a.step_count, ns / whole, count / a.step_count)
        for name, ns, count in rows
    ]


def _families(a: Analysis) -> list[Family]:
    table = a.families.sort("dur", descending=True)
    return [
        Family(name, dur / a.step_count, share, count / a.step_count)
        for name, dur, share, count in table.select("family", "dur", "share", "count").iter_rows()
        if share is not None
    ]


def _idle(a: Analysis, idle: int) -> dict[str, Any]:
    table = a.gaps.group_by("cause").agg(pl.col("dur").sum()).sort("dur", descending=True)
    rows = list(zip(table["cause"].cast(pl.String), table["dur"], strict=True))
    unknown = sum(ns for cause, ns in rows if cause == "unknown")
    span = max(a.span_ns, 1)
    return {
        "idle": [IdleCause(cause, ns / a.step_count, ns / span) for cause, ns in rows if ns],
        "unknown_idle_share": unknown / idle if idle else None,
    }


def limits(a: Analysis, run: Run) -> list[str]:
    """What this trace cannot tell, and what was left out of it, a sentence each."""
    meta = a.trace.meta
    if a.record_only:
        return [*_record_limits(a), *run.problems]
    found = []
    if meta.truncated:
        damage = f" ({meta.damage})" if meta.damage else ""
        found.append(f"The file is truncated{damage}: {meta.events_read:,} events kept.")
    if a.trace.gpu.is_empty():
        found.append(_no_device_work(a.trace))
    if a.trace.cpu.is_empty():
        found.append(
            "No host events in the trace: who launched what, why the device idles and which line "
            "of code is responsible are not measured. Record with activities=[CPU, CUDA]."
        )
    elif not (a.trace.cpu["kind"] == "op").any():
        found.append(
            "No operators in the trace, only runtime calls: kernels cannot be tied to the code "
            "that launched them. Record with activities=[CPU, CUDA]."
            if (a.trace.cpu["kind"] == "runtime").any()
            else "No operators in the trace: nothing ran between its start and its end, or the "
            "profiler was restarted before the file was written (schedule(..., repeat=1))."
        )
    found += _start_up(a)
    if a.step_count > 1 and _uneven(a):
        used = a.steps.used["dur"]
        found.append(
            f"The steps differ: {t.between(_whole(used.min()), _whole(used.max()))}. Figures are "
            "means over them; what makes one longer than another is not explained by them."
        )
    for reason, count in meta.events_dropped.items():
        found.append(f"{count:,} event{'' if count == 1 else 's'}: {reason}.")
    if a.steps.source == "whole trace":
        found.append(
            "No steps in the trace: the figures are for the whole recording. Call "
            "profiler.step() once an iteration to have them a step."
        )
    found.extend(run.problems)
    return found


def _no_device_work(trace: Trace) -> str:
    measured = "device time, transfers, kernels and idle gaps are not measured."
    if trace.meta.truncated:
        return f"No device work in what is left of the trace: {measured}"
    launches = int(trace.cpu["call"].is_in(["launch", "graph_launch"]).sum())
    if not launches:
        return (
            f"No device work in the trace: {measured} Record with activities=[CPU, CUDA] on a "
            "machine with a GPU to get them."
        )
    why = (
        "hardware counters were recorded in place of their times, and make the host wait for each. "
        "Record without counters"
        if trace.counters.height
        else "the activity CUDA was not recorded. Record with activities=[CPU, CUDA]"
    )
    return (
        f"No device work in the trace although the host launched some ({launches:,} calls): "
        f"{measured} Probably {why} to get them."
    )


def _start_up(a: Analysis) -> list[str]:
    """A call into the driver that is no wait and takes a large part of the window."""
    cpu = a.trace.cpu
    once = (cpu["kind"] == "runtime") & cpu["call"].is_in(ONCE).fill_null(False)
    longest = cpu.filter(once & (cpu["ts"] < a.spans.end.max(initial=0)))
    longest = longest.sort("dur", descending=True).head(1)
    if longest.is_empty() or not a.span_ns or longest["dur"][0] < START_UP * a.span_ns:
        return []
    name, dur = str(longest["name"][0]), int(longest["dur"][0])
    return [
        f"{t.shorten(t.clean(name), 50)} alone takes {t.time(dur)} ({t.percent(dur / a.span_ns)} "
        "of what is analysed): this is start-up, which later steps do not have. Record after a "
        "few steps: schedule(skip_first=10, wait=1, warmup=3, active=5)."
    ]


def _uneven(a: Analysis) -> bool:
    dur = a.steps.used["dur"]
    return _whole(dur.max()) > UNEVEN * max(1, _whole(dur.min()))


def strangers(analyses: dict[int, Analysis]) -> list[str]:
    """Ranks that cannot be of one run: different GPUs, or no instant at which all ran."""
    traced = [a for a in analyses.values() if not a.record_only]
    if len(traced) < 2:
        return []
    metas = [a.trace.meta for a in traced]
    why = []
    names = sorted({a.device.name for a in traced if a.device and a.device.name})
    if len(names) > 1:
        why.append(f"they ran on {' and '.join(t.shorten(t.clean(name), 40) for name in names)}")
    if all(m.clock == "unix" for m in metas) and max(m.start_ns for m in metas) > min(
        m.start_ns + m.end_ns for m in metas
    ):
        why.append("they were not recorded at the same time")
    if not why:
        return []
    files = ", ".join(t.path(PurePath(m.path).name, 40) for m in metas[:8])
    return [
        f"These files do not look like ranks of one run: {' and '.join(why)} ({files}). The "
        "comparison of ranks means nothing then; give the files of one run."
    ]


def _record_limits(a: Analysis) -> list[str]:
    """What a record without a profiled window cannot tell."""
    recorded = a.recorded
    assert recorded is not None
    found = [
        "No window was profiled: what the host did is known by phase, and nothing of what ran on "
        "the device. Host times of phases that only launch work say little about the device."
    ]
    found += [line + "." for line in _window_lines(recorded.record.of_kind("window"))]
    if not recorded.record.ended:
        found.append("The run was killed, or is still going on: figures are up to its last step.")
    if not recorded.steps:
        found.append("No step was recorded.")
    elif not recorded.count:
        found.append("No step without a profiler was recorded.")
    return found


def ranks_view(analyses: dict[int, Analysis]) -> Ranks | None:
    """Ranks side by side; ``None`` for one rank."""
    if len(analyses) < 2:
        return None
    from advisor.analysis.ranks import align, skew

    lines = {}
    for number, a in analyses.items():
        device = a.device_id is not None
        totals = a.breakdown.totals() if device else {}
        lines[number] = RankLine(
            rank=number,
            step_ns=a.step_ns,
            busy_share=a.breakdown.busy.total / max(a.span_ns, 1) if device else None,
            communication_ns=totals["communication"] / a.step_count if device else None,
            idle_ns=totals["idle"] / a.step_count if device else None,
        )
    traced = {number: a for number, a in analyses.items() if not a.record_only}
    if len(traced) < 2:
        note = "Skew between ranks is not measured: fewer than two of them were profiled."
        return Ranks(lines=list(lines.values()), aligned=False, alignment_error_ns=None, note=note)
    alignment = align(traced)
    if alignment.error_ns is None:
        note = f"Skew between ranks is not measured: {alignment.reason}."
        return Ranks(lines=list(lines.values()), aligned=False, alignment_error_ns=None, note=note)
    table = skew(traced, alignment).stragglers
    for number, last, wait in table.select("rank", "last_share", "caused_wait_ns").iter_rows():
        lines[number].last_share = last
        lines[number].caused_wait_ns = wait
    note = (
        f"Ranks put on one clock by the ends of {alignment.matched} matched collectives, "
        f"to within {alignment.error_ns / 1e3:.0f} µs. 'Comes last': share of them; 'others wait': "
        "mean wait that it causes a peer in them a step, hidden under compute or not."
    )
    return Ranks(
        lines=list(lines.values()), aligned=True, alignment_error_ns=alignment.error_ns, note=note
    )


def replay_view(pricing: Pricer, findings: list[Finding]) -> Replay | None:
    """The replay behind the prices; ``None`` when bounds stand in for it."""
    if not isinstance(pricing, ReplayPricer):
        return None
    whatif, quality = pricing.whatif, pricing.whatif.quality
    edits = [e for f in findings if f.rank is not None and not f.other_rank for e in f.edits]
    return Replay(
        step_ns=whatif.a.step_ns * (1 + quality.total_error),
        measured_ns=whatif.a.step_ns,
        step_error=quality.step_error,
        starts=quality.starts,
        explained=quality.explained,
        hard=[HardPart(*part) for part in quality.hard],
        steps=quality.steps,
        of_steps=quality.of_steps,
        critical=whatif.critical(),
        critical_after=whatif.critical(edits),
        step_after_ns=whatif.step_after(edits),
    )


def verdict(
    report: Report, a: Analysis
) -> tuple[Literal["bottlenecks", "healthy", "limited"], str]:
    """Status and one sentence."""
    step = t.time(report.scope.step_ns)
    unit = t.loop_unit(report.scope.step_source)
    if report.busy_share is None:
        top = report.host[0] if report.host else None
        if top is None:
            what = "run" if report.scope.step_source == "record" else "trace"
            return "limited", f"Nothing in this {what} can be measured."
        why = "No GPU work in the trace."
        if report.scope.step_source == "record":
            why = "No window was profiled."
        text = f"{why} The host's {step} {unit}: {t.host_label(top.name)} {t.percent(top.share)}"
        if report.findings:
            return "bottlenecks", f"{text}; {_lead(report)}."
        return "limited", f"{text}; GPU bottlenecks are not measured."
    busy = t.percent(report.busy_share)
    text = f"GPU busy {busy} of a {step} {unit}"
    if report.findings:
        return "bottlenecks", f"{text}; {_lead(report)}."
    if report.busy_share >= BUSY:
        return "healthy", (
            f"Healthy: the GPU is busy {busy} of a {step} {unit}, and nothing stands out."
        )
    idle = report.idle[0] if report.idle else None
    if idle is not None:
        why = f"{t.cause_label(idle.cause)} ({t.percent(idle.share)} of the {unit})"
        return "limited", (
            f"{text}; it idles most for: {why}, but no rule has a fix that is worth showing."
        )
    return "limited", f"{text}."


def _lead(report: Report) -> str:
    first = report.findings[0]
    worth = first.worth
    if worth is None or worth.gain_ns is None or worth.share is None:
        return f"first: {first.title}"
    bound = "" if worth.method == REPLAY else " up to"
    title = first.title[0].lower() + first.title[1:] if first.title[1:2].islower() else first.title
    if worth.low_ns is not None and worth.low_ns < WIDE * worth.gain_ns:
        low = worth.share * worth.low_ns / worth.gain_ns
        shares = f"{t.percent(low).removesuffix('%')} to {t.percent(worth.share)}"
        return f"first: {title}, worth {t.between(worth.low_ns, worth.gain_ns)} ({shares})"
    return f"first: {title}, worth{bound} {t.time(worth.gain_ns)} ({t.percent(worth.share)})"
