"""Summary of one rank's trace for the job: the figures of a report on one rank, and its
collectives.

It reads one trace and keeps only the summary."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from advisor.core.finding import Finding
from advisor.core.intervals import Ints, covered_length, intervals_of, union
from advisor.core.report_memory import MemorySample
from advisor.measure import Analysis
from advisor.measure.host.stacks import shares_of_functions
from advisor.measure.ranks.collectives import collective_table, pack_collectives, step_summaries
from advisor.measure.ranks.summary_schema import (
    MAX_SUMMARY_BYTES,
    Advice,
    Collectives,
    KernelSummary,
    PackedColumns,
    RankSummary,
    encode,
    pack,
    pack_findings,
)
from advisor.measure.ranks.topology import host_of
from advisor.measure.steps.timeline import CLASSES as HOST_CLASSES
from advisor.read.remote.urls import redact_url

MAX_SUMMARY_KERNELS = 40
"""Maximum number of kernels compared between ranks, with nearly all time of a step."""
_MAX_STEPS = 2_000
"""Maximum number of steps with their own figures."""
_MAX_FINDINGS = 60


def summarize_rank(
    a: Analysis,
    rank: int,
    findings: Sequence[Finding] = (),
    path: str = "",
    memory: MemorySample | None = None,
) -> RankSummary:
    """Return the measurements of one rank, and its findings with their gains on this rank alone."""
    meta = a.trace.meta
    on_device = a.device_id is not None and not a.record_only
    is_complete = on_device and not a.lost_records.has_lost_replays
    path = path or redact_url(meta.path)
    used = a.steps.used.head(_MAX_STEPS)
    return shrink_to_limit(
        RankSummary(
            rank=rank,
            path=path,
            host=host_of(path),
            device=(a.device.name if a.device else None) or "",
            world=meta.world_size or 0,
            framework=meta.framework or "",
            clock=meta.clock,
            events=meta.events_read,
            bytes_read=meta.bytes_read,
            step_source=a.steps.source,
            steps=step_summaries(a, used),
            step_ns=float(a.step_ns),
            time=_per_step_ns(a, a.breakdown.totals().items() if is_complete else ()),
            idle=_per_step_ns(a, _sum_idle(a).iter_rows() if is_complete else ()),
            host_time=_per_step_ns(a, () if a.record_only else _sum_host_time(a).iter_rows()),
            families=_per_step_ns(
                a, a.families.select("family", "dur").iter_rows() if on_device else ()
            ),
            communication=a.breakdown.all_communication.total / a.step_count
            if is_complete
            else 0.0,
            kernels=_summarize_kernels(a),
            operators=_summarize_operators(a),
            functions={} if a.run_steps is None else shares_of_functions(a.run_steps.stacks),
            per_step=_pack_steps(a),
            collectives=pack_collectives(a, collective_table(a, used), used),
            findings=[_shorten_finding(finding) for finding in findings[:_MAX_FINDINGS]],
            details=pack_findings(findings[:_MAX_FINDINGS]),
            damage=_describe_damage(a),
            memory=memory,
        )
    )


def _per_step_ns(a: Analysis, total: Iterable[tuple[str, int]]) -> dict[str, float]:
    return {str(name): ns / a.step_count for name, ns in total}


def _sum_idle(a: Analysis) -> pl.DataFrame:
    return a.gaps.group_by(pl.col("cause").cast(pl.String)).agg(pl.col("dur").sum()).sort("cause")


def _sum_host_time(a: Analysis) -> pl.DataFrame:
    main = -1 if a.trace.main_thread is None else a.trace.main_thread
    return a.host.filter(pl.col("thread") == main).select("class", "ns")


def _summarize_kernels(a: Analysis) -> dict[str, KernelSummary]:
    if a.device_id is None:
        return {}
    is_compute = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.in_window
    is_compute &= ~a.kernels["communication"].to_numpy()
    table = (
        a.trace.gpu.filter(pl.Series(is_compute))
        .group_by("name", "blocks", "threads")
        .agg(pl.len(), pl.col("dur").sum(), pl.col("dur").median().alias("median"))
        .sort("dur", "name", "blocks", "threads", descending=[True, False, False, False])
    )
    return _key_by_digest(a, table)


def _summarize_operators(a: Analysis) -> dict[str, KernelSummary]:
    """Return the outermost ATen operators in the used steps, by name and shapes. Empty with device
    work, or if no shapes were recorded."""
    cpu = a.trace.cpu
    if a.device_id is not None:
        return {}
    ts = cpu["ts"].to_numpy()
    is_outermost = a.outermost_aten == np.arange(len(ts))
    is_outermost &= covered_length(ts, ts + 1, a.spans) > 0
    rows = cpu.filter(pl.Series(is_outermost)).filter(pl.col("inputs").is_not_null())
    table = (
        rows.select("name", "dur", dims=a.trace.inputs["dims"].gather(rows["inputs"]))
        .group_by("name", "dims")
        .agg(pl.len(), pl.col("dur").sum(), pl.col("dur").median().alias("median"))
        .with_columns(pl.col("name").cast(pl.String))
        .sort("dur", "name", "dims", descending=[True, False, False])
    )
    return _key_by_digest(a, table)


def _key_by_digest(a: Analysis, table: pl.DataFrame) -> dict[str, KernelSummary]:
    """Return the first rows by name and a digest that separates rows of one name. A row has name,
    distinguishing columns, count, and summed and median duration (ns, in all steps)."""
    result = {}
    for name, *columns, count, total, median in table.head(MAX_SUMMARY_KERNELS).iter_rows():
        text = "|".join(map(str, [name, *columns]))
        digest = hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()
        result[f"{str(name)[:40]}#{digest}"] = KernelSummary(
            count, total / a.step_count, float(median)
        )
    return result


def _pack_steps(a: Analysis) -> dict[str, PackedColumns]:
    used = a.steps.used.head(_MAX_STEPS)
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    columns: dict[str, Ints]
    if a.device_id is not None:
        table = a.breakdown.per_step.head(_MAX_STEPS)
        columns = {
            name: table[name].to_numpy() for name in table.columns if name not in ("step", "idle")
        }
        gaps = a.gaps.select("cause", "ts", "dur").with_columns(pl.col("cause").cast(pl.String))
        for (cause,), rows in sorted(gaps.partition_by("cause", as_dict=True).items()):
            columns[f"idle: {cause}"] = covered_length(start, end, intervals_of(rows))
    else:
        columns = {"communication": covered_length(start, end, a.breakdown.communication)}
        if a.trace.main_thread is not None:
            timeline = a.timeline
            is_main = timeline.thread == a.trace.main_thread
            for code in np.unique(timeline.code[is_main]).tolist():
                rows_of = is_main & (timeline.code == code)
                activity = union(timeline.start[rows_of], timeline.end[rows_of])
                columns[HOST_CLASSES[code]] = covered_length(start, end, activity)
    return {name: pack(values) for name, values in columns.items() if values.any()}


def _shorten_finding(finding: Finding) -> Advice:
    impact = finding.impact
    is_estimated = (
        impact is not None and impact.currency == "step_time" and impact.gain_ns is not None
    )
    gain = float(impact.gain_ns or 0) if is_estimated and impact is not None else None
    return Advice(finding.rule, finding.category, gain)


def _describe_damage(a: Analysis) -> str:
    meta = a.trace.meta
    if meta.damage:
        return meta.damage[:300]
    return "cut off before its end" if meta.truncated else ""


def shrink_to_limit(summary: RankSummary) -> RankSummary:
    """Shrink a summary to MAX_SUMMARY_BYTES: drop the collectives of complete steps, the last
    first, then texts."""
    from msgspec.structs import replace as changed

    size = len(encode(summary))
    while size > MAX_SUMMARY_BYTES and summary.collectives is not None:
        kept_collectives = _drop_steps(summary.collectives, MAX_SUMMARY_BYTES * 0.95 / size)
        summary = changed(summary, collectives=kept_collectives)
        size = len(encode(summary))
    if size > MAX_SUMMARY_BYTES:
        summary = changed(summary, details=b"")
        size = len(encode(summary))
    if size > MAX_SUMMARY_BYTES:
        summary = changed(summary, findings=[], per_step={})
        size = len(encode(summary))
    if size > MAX_SUMMARY_BYTES:
        summary = changed(summary, steps=summary.steps[:100], kernels={}, operators={}, families={})
    return summary


def _drop_steps(result: Collectives, share: float) -> Collectives | None:
    """Keep about this share of the collectives, in complete steps; ``None`` if no step is left."""
    from msgspec.structs import replace as changed

    from advisor.measure.ranks.summary_schema import unpack

    columns = {
        name: unpack(getattr(result, name))
        for name in ("key", "order", "step", "start", "end", "exposed", "work", "amount")
        if getattr(result, name) is not None
    }
    step = columns["step"]
    steps = np.unique(step)
    kept_steps = min(int(len(steps) * min(share, 0.9)), len(steps) - 1)
    if kept_steps < 1:
        return None
    rows = step <= steps[kept_steps - 1]
    dropped = result.dropped + int((~rows).sum())
    return changed(
        result, dropped=dropped, **{name: pack(values[rows]) for name, values in columns.items()}
    )
