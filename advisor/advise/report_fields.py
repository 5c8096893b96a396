"""Measured fields of a Report: inputs, scope, time, host, kernels, memory, energy and cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.advise.auxiliary_report import source_scope
from advisor.advise.recording_limits import (
    describe_lost_replays,
    explain_lost_records,
    window_lines,
)
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import LAYER_TIMES
from advisor.core.intervals import covered_length, intervals_of
from advisor.core.prices import HOUR_NS, Cost, EnergyUse, FixCost, Prices, RankEnergy
from advisor.core.ranks import FEW_RANKS, RankLine, Ranks, format_ranks
from advisor.core.report import Input, Scope
from advisor.core.report_steps import Phase, RunStepFigures, StepDurations, StepTime
from advisor.core.report_time import (
    Family,
    HostShare,
    IdleCause,
    NextOperator,
    OperatorTime,
    SampledFunction,
    TimeShare,
)
from advisor.measure.device.energy import step_energy
from advisor.measure.host.gaps import is_outside_operators, operators_after_gaps
from advisor.measure.host.layers import report_layers
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import op_table, range_table
from advisor.measure.host.operators import list_attainable_rates, rooflines
from advisor.measure.inference.inference_steps import TRAINING_ROWS
from advisor.measure.memory.trace_memory import measure_held
from advisor.measure.steps.steps import recorded_extent

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.core.trace import Run, Trace
    from advisor.measure import Analysis
    from advisor.replay.ranks.rank_comparison import RankComparison

MAX_HOST_OPERATORS = 10
MAX_OPERATOR_NAMES = 500
OPERATOR_NAMES = rf"^aten::|Compiled|{TRAINING_ROWS}"
"""Pattern of the rows that ``Report.operator_names`` names, of PyTorch's programs."""
MAX_DURATIONS = 5000
"""Maximum number of steps whose durations a report holds. The last steps are kept, without gaps."""


_META_FIELDS = set(Input.__struct_fields__) - {"rank", "windows"}
"""Fields of an input that are copied from its trace's metadata."""


def list_inputs(run: Run, analyses: Mapping[int, Analysis]) -> list[Input]:
    """Return an entry for the analysed window of each rank."""
    result = []
    for number, a in analyses.items():
        meta = a.trace.meta
        result.append(
            Input(
                rank=None if number < 0 else number,
                windows=sum(1 for r, _ in (*run.traces, *run.unread) if r == number),
                **{name: getattr(meta, name) for name in _META_FIELDS},
            )
        )
    return result


def measure_fields(a: Analysis) -> dict[str, Any]:
    """Return the measured fields of the report, by name."""
    if a.only_input is not None:
        return {"scope": source_scope(a, a.only_input)}
    if a.record_only:
        return {"scope": _build_recorded_scope(a), "host": _list_phases(a)}
    fields: dict[str, Any] = {
        "scope": _build_scope(a),
        "host": [] if describe_lost_replays(a) else host_time(a),
        "host_step_ns": None
        if a.steps.launched is None
        else a.steps.host_spans.total / a.step_count,
        "step_variation": a.step_halves,
        "inference": a.inference,
        "layers": report_layers(a),
        "operator_names": _list_operator_names(a.trace),
    }
    if a.device_id is not None:
        fields |= device_time(a)
        fields |= {"rooflines": rooflines(a), "attainable": list_attainable_rates(a)}
        if (utilization := a.flop_utilization) is not None:
            fields |= {"mfu": utilization.share, "mfu_format": utilization.format}
    else:
        fields["operators"] = _list_operators(a)
    if not (a.trace.cpu["kind"] == "op").any():
        fields["ranges"] = _select_longest(a, range_table(a), a.span_ns)
    memory = a.memory
    if not memory.is_empty():
        peak, capacity = memory["peak_reserved"].max(), memory["capacity"].max()
        fields["memory_peak_bytes"] = peak
        fields["memory_capacity_bytes"] = capacity
    else:  # what the recorder saw
        fields["memory_peak_bytes"], fields["memory_capacity_bytes"] = measure_held(a)
    return fields


def device_time(a: Analysis) -> dict[str, Any]:
    """Return device time by class, idle cause and kernel family. Empty if there is no device."""
    if a.device_id is None:
        return {}
    if describe_lost_replays(a):
        return {"families": list_families(a)}
    per_step = a.step_count
    totals = a.breakdown.totals()
    span = max(a.span_ns, 1)
    communication = a.breakdown.all_communication.total
    layers = a.steps.source == LAYER_TIMES  # layers have no start times
    return {
        "time": [TimeShare(n, ns / per_step, ns / span) for n, ns in totals.items()],
        "busy_share": None if layers else a.breakdown.busy.total / span,
        "communication_ns": communication / per_step if communication else None,
        "communication_overlap": a.breakdown.communication_overlap,
        "families": list_families(a),
        **_measure_idle_time(a, totals["idle"]),
    }


def _build_scope(a: Analysis) -> Scope:
    table, used = a.steps.table, a.steps.used
    return Scope(
        rank=a.trace.meta.rank,
        step_source=a.steps.source,
        steps_found=table.height,
        steps_used=used.height,
        outliers=table.filter("outlier")["name"].to_list(),
        span_ns=a.span_ns,
        step_ns=a.step_ns,
        step_min_ns=_to_int(used["dur"].min()),
        step_max_ns=_to_int(used["dur"].max()),
        recorded_ns=_measure_recorded_time(a),
        launched_before_ns=int(a.trace.gpu["dur"].to_numpy()[a.launched_before].sum()),
        queue_delay_ns=_to_int(a.steps.ahead_ns),
        step_median_ns=float(used["dur"].median() or 0),  # type: ignore[arg-type]
        device=a.device_id,
        device_name=a.device_name,
        device_known=a.hardware is not None,
        devices_seen=a.trace.gpu["device"].n_unique(),
        framework=a.trace.meta.framework,
    )


def _measure_recorded_time(a: Analysis) -> int | None:
    """Return the recorded time, ns, if the figures cover only a part of it, or ``None``."""
    if a.per != "recording" or a.device_id is None:
        return None
    start, end = recorded_extent(a.trace)
    return end - start


def _build_recorded_scope(a: Analysis) -> Scope:
    """Return the scope of a run without a profiled window: the recorder's own steps."""
    run_steps = a.run_steps
    assert run_steps is not None
    dur = run_steps.timed_durations
    device = next(iter(run_steps.rank_record.rank.devices), None)
    return Scope(
        rank=a.trace.meta.rank,
        step_source="record",
        steps_found=len(run_steps.steps),
        steps_used=run_steps.count,
        outliers=[],
        span_ns=int(dur.sum()),
        step_ns=a.step_ns,
        step_min_ns=int(dur.min()) if len(dur) else 0,
        step_max_ns=int(dur.max()) if len(dur) else 0,
        step_median_ns=run_steps.median or 0.0,
        device=None if device is None else device.index,
        device_name=None if device is None else device.name,
        device_known=False,
        devices_seen=0,
        framework=a.trace.meta.framework,
    )


def _list_phases(a: Analysis) -> list[HostShare]:
    view = build_recorded_view(a)
    return [] if view is None else [HostShare(p.name, p.ns, p.share) for p in view.phases]


def _to_int(value: Any) -> int:
    return int(value) if value is not None else 0


def host_time(a: Analysis) -> list[HostShare]:
    main = a.trace.main_thread
    if main is None:
        return []
    # the thread has no operator in either: a range around that time explains nothing
    name = pl.col("class").cast(pl.String).replace("unrecorded", "unknown")
    table = a.host.filter(pl.col("thread") == main).group_by(name).agg(pl.col("ns").sum())
    table = table.sort("ns", "class", descending=[True, False])
    return [
        HostShare(name, ns / a.step_count, ns / max(a.steps.host_spans.total, 1))
        for name, ns in zip(table["class"].to_list(), table["ns"].to_list(), strict=True)
        if ns
    ]


def _list_operators(a: Analysis) -> list[OperatorTime]:
    table = op_table(a).filter(pl.col("host") > 0).sort("host", descending=True)
    return _select_longest(a, table.select("name", "host", "count"), int(table["host"].sum()))


def _list_operator_names(trace: Trace) -> list[str]:
    cpu = trace.cpu
    chosen = (cpu["kind"] != "python") & name_matches(cpu["name"], OPERATOR_NAMES)
    names = cpu["name"].filter(chosen)
    return sorted(names.unique().cast(pl.String))[:MAX_OPERATOR_NAMES]


def _select_longest(a: Analysis, table: pl.DataFrame, total_ns: int) -> list[OperatorTime]:
    """Return the first rows (name, ns, count) per step, with their shares of ``total_ns``."""
    return [
        OperatorTime(name, ns / a.step_count, ns / max(total_ns, 1), count / a.step_count)
        for name, ns, count in table.head(MAX_HOST_OPERATORS).iter_rows()
    ]


def list_families(a: Analysis) -> list[Family]:
    """Return kernel families, with their shares of all listed device work. The shares sum to 1."""
    total_ns = int(a.families["dur"].sum())
    return [
        Family(name, ns / a.step_count, ns / total_ns, count / a.step_count)
        for name, count, ns in a.families.select("family", "count", "dur").iter_rows()
        if total_ns
    ]


def _measure_idle_time(a: Analysis, idle: int) -> dict[str, Any]:
    if explain_lost_records(a):
        return {"idle": [], "unknown_idle_share": None}
    table = a.gaps.group_by("cause").agg(pl.col("dur").sum()).sort("dur", descending=True)
    rows = list(zip(table["cause"].cast(pl.String), table["dur"], strict=True))
    unknown = sum(ns for cause, ns in rows if cause == "unknown")
    is_outside = is_outside_operators(a)
    span = max(a.span_ns, 1)
    causes = [
        IdleCause(cause, ns / a.step_count, ns / span, _list_sampled_functions(a, cause))
        for cause, ns in rows
        if ns
    ]
    return {
        "idle": [
            _add_next_operators(a, part) if is_outside and part.cause == "unknown" else part
            for part in causes
        ],
        "unknown_idle_share": unknown / idle if idle else None,
    }


def _add_next_operators(a: Analysis, part: IdleCause) -> IdleCause:
    """Return idle time of unknown cause with the operators that ended it."""
    table = operators_after_gaps(a)
    named = table.drop_nulls("name").head(MAX_SAMPLED).select("name", "dur").iter_rows()
    return replace(
        part,
        outside_operators=True,
        gaps=int(table["count"].sum()) / a.step_count,
        next_operators=[NextOperator(name, ns / int(table["dur"].sum())) for name, ns in named],
    )


MAX_SAMPLED = 3
"""Maximum number of functions, or of operators, that are named."""
MIN_SAMPLED_SHARE = 0.01
"""Minimum share of the step at which a sampled function is named."""


def _list_sampled_functions(a: Analysis, cause: str) -> list[SampledFunction]:
    """Return the functions in which a thread was sampled while the device idled for this cause."""
    samples = a.trace.meta.cpu_samples
    if samples is None or cause != "host_code":
        return []
    gaps = a.gaps.filter(pl.col("cause") == cause)
    times: dict[str, int] = {}
    for (thread,), thread_gaps in gaps.group_by("thread"):
        idle = intervals_of(thread_gaps)
        thread_samples = samples.filter(pl.col("thread") == thread)
        inside = covered_length(
            thread_samples["ts"].to_numpy(), thread_samples["end"].to_numpy(), idle
        )
        for name, ns in (
            thread_samples.with_columns(ns=inside)
            .group_by("name")
            .agg(pl.sum("ns"))
            .select("name", "ns")
            .iter_rows()
        ):
            times[name] = times.get(name, 0) + ns
    largest = sorted(times.items(), key=lambda each: (-each[1], each[0]))[:MAX_SAMPLED]
    span = max(a.span_ns, 1)
    return [
        SampledFunction(labels.clean(name), ns / span)
        for name, ns in largest
        if ns >= MIN_SAMPLED_SHARE * span
    ]


def build_recorded_view(a: Analysis, program: str | None = None) -> RunStepFigures | None:
    """Return what the recorder measured of every step, or ``None`` for a trace alone."""
    run_steps = a.run_steps
    if run_steps is None:
        return None
    phases = [
        Phase(name, float(values[run_steps.used].mean()), run_steps.share(name) or 0.0)
        for name, values in run_steps.phases.items()
        if values[run_steps.used].any()
    ]
    end = next(reversed(run_steps.rank_record.events_of("end")), None)
    total_ns = run_steps.after_first_ns
    return RunStepFigures(
        steps=len(run_steps.steps),
        used=run_steps.count,
        median_ns=run_steps.median,
        mean_ns=run_steps.mean,
        p99_ns=run_steps.quantile(0.99) if run_steps.count >= 100 else None,
        profiled_steps=int(run_steps.profiled.sum()),
        profiled_median_ns=run_steps.median_of(run_steps.active),
        profiler_overhead=run_steps.profiler_overhead(run_steps.active),
        phases=phases,
        samples_per_second=run_steps.samples_per_second,
        samples_per_step=run_steps.samples_per_step,
        inference=run_steps.inference,
        outside_ns=None if run_steps.inference else run_steps.outside_steps_ns,
        outside_share=None
        if run_steps.inference or not total_ns
        else run_steps.outside_steps_ns / total_ns,
        other_programs_ns=None
        if run_steps.mean is None or run_steps.other_programs_share is None
        else run_steps.other_programs_share * run_steps.mean,
        ended=None if end is None else str(end.get("reason", "finished"))[:100],
        windows=window_lines(run_steps.rank_record.events_of("window")),
        program=program,
    )


def step_durations(a: Analysis) -> list[StepDurations]:
    """Return the durations of the used steps, from the recorder and from the trace."""
    result = []
    run_steps = a.run_steps
    if run_steps is not None:
        is_training = np.array([not step.evaluation for step in run_steps.steps], dtype=bool)
        rows = np.flatnonzero(run_steps.timed & is_training)
        numbers = [run_steps.steps[row].n for row in rows]
        lengths = run_steps.durations[rows].astype(np.int64).tolist()
        result.append(_build_durations("recorder", numbers, lengths))
    if a.steps.source != "whole trace":
        result.append(_build_durations("trace", _number_steps(a), a.steps.used["dur"].to_list()))
    return [each for each in result if each.durations_ns]


def _build_durations(
    source: Literal["recorder", "trace"], numbers: list[int], durations: list[int]
) -> StepDurations:
    ranges: list[tuple[int, int]] = []
    for number in numbers[-MAX_DURATIONS:]:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return StepDurations(source=source, numbers=ranges, durations_ns=durations[-MAX_DURATIONS:])


def _number_steps(a: Analysis) -> list[int]:
    """Return the ascending numbers of the used steps, or their indices if they are not numbered."""
    matches = [re.search(r"(?:#|^step )(\d{1,12})$", str(name)) for name in a.steps.used["name"]]
    numbers = [int(match[1]) for match in matches if match is not None]
    if len(numbers) != a.steps.used.height or sorted(set(numbers)) != numbers:
        numbers = a.steps.used["index"].to_list()
    return numbers


MAX_GPUS = 1_000_000
"""Maximum number of GPUs in a price, as a guard against damaged records."""


def energy_use(analyses: Mapping[int, Analysis]) -> EnergyUse | None:
    """Return the energy per step, by rank and in total, or ``None`` if no rank sampled it."""
    rank_energies: list[RankEnergy] = []
    boards: dict[str, RankEnergy] = {}
    for number, a in analyses.items():
        item = None if a.run_steps is None else step_energy(a.run_steps, number)
        if item is None or a.run_steps is None:
            continue
        rank_energies.append(item)
        boards.setdefault(a.run_steps.uuid or f"rank {number}", item)  # ranks may share a GPU
    if not rank_energies:
        return None
    is_complete = len(rank_energies) == len(analyses)
    return EnergyUse(
        joules=sum(board.joules for board in boards.values()) if is_complete else None,
        watts=sum(board.watts for board in boards.values()) if is_complete else None,
        ranks=rank_energies,
    )


def cost_per_step(run: Run, report: Report, prices: Prices, gpus: int | None = None) -> Cost | None:
    """Return the cost of a step, or ``None`` without a price for this GPU or without steps.
    ``gpus``: number of paid GPUs, or ``None`` for one per rank."""
    price = prices.price_of(report.scope.device_name)
    if price is None or report.step_ns <= 0 or report.scope.has_no_step_time:
        return None
    count = gpus or _count_gpus(run, report)
    price_per_ns = price.per_hour * count / HOUR_NS
    ranked = [f for f in report.findings if f.folded_under is None and f.priority is not None]
    saved = {id(f): max(0, f.marginal_gain_ns or 0) for f in ranked}
    remaining_ns = max(0.0, report.step_ns - sum(saved.values()))
    run_ns = _measure_run_time(run, report)
    return Cost(
        currency=price.currency,
        per_hour=price.per_hour,
        gpus=count,
        source=price.source,
        step=report.step_ns * price_per_ns,
        run=None if run_ns is None else run_ns * price_per_ns,
        step_after=remaining_ns * price_per_ns if any(saved.values()) else None,
        bound=report.replay is None,
        fixes=[
            FixCost(rule=f.rule, priority=f.priority or 0, step=saved[id(f)] * price_per_ns)
            for f in ranked
            if saved[id(f)]
        ],
    )


def _count_gpus(run: Run, report: Report) -> int:
    world = run.recording.manifest.world_size if run.recording is not None else None
    return min(MAX_GPUS, max(1, world or len(run.ranks), report.scope.devices_seen))


def _measure_run_time(run: Run, report: Report) -> float | None:
    """Return the time from the reported rank's first step to the end of its last, ns."""
    if run.recording is None:
        return None
    from advisor.measure.steps.run_steps import RunSteps

    record = run.recording.ranks.get(report.scope.rank or 0)
    run_steps = None if record is None else RunSteps(record)
    if run_steps is None or not len(run_steps.ts):
        return None
    return float((run_steps.ts + run_steps.dur).max() - run_steps.ts.min())


def build_ranks_view(
    analyses: Mapping[int, Analysis], comparison: RankComparison | None
) -> Ranks | None:
    """Return the ranks side by side, with unprofiled ones, or ``None`` if there is one rank."""
    if comparison is None:
        if len(analyses) < 2 or all(a.only_input for a in analyses.values()):
            return None
        note = "Skew between ranks is not measured: fewer than two of them were profiled."
        result = Ranks(lines=[], aligned=False, alignment_error_ns=None, note=note)
    else:
        result = comparison.ranks
        replayed = comparison.replayed
        if replayed:
            is_short = len(replayed) <= FEW_RANKS
            rank_names = f"ranks {format_ranks(replayed)}"
            replayed_ranks = rank_names if is_short else t.count_noun(len(replayed), "rank")
            result.note += f" Gains are estimated for {replayed_ranks} as one job."
    listed = {line.rank for line in result.lines}
    result.lines += [
        _build_rank_line(number, a) for number, a in analyses.items() if number not in listed
    ]
    return result


def _build_rank_line(number: int, a: Analysis) -> RankLine:
    totals = a.breakdown.totals() if a.device_id is not None else None
    return RankLine(
        rank=number,
        step_ns=a.step_ns,
        busy_share=None if totals is None else a.breakdown.busy.total / max(a.span_ns, 1),
        communication_ns=None if totals is None else totals["communication"] / a.step_count,
        idle_ns=None if totals is None else totals["idle"] / a.step_count,
    )


MIN_APART_SHARE = 0.10
"""Minimum relative difference of two step times that the profiler's usual cost does not explain:
the bound of ``rules/host/profiling_cost.py``."""
MAX_SIMILAR_SHARE = 0.25
"""The steps around the window are not typical if a smaller share of the run's steps is as far from
the run's median: the quarter at either end."""


def step_time(a: Analysis) -> StepTime | None:
    """Return the run's step time, or ``None`` for a trace alone, without steps, or with too few."""
    run_steps = a.run_steps
    if run_steps is None or run_steps.step_time is None:
        return None
    result = copy(run_steps.step_time)
    run_ns = result.ns
    if a.record_only:
        return result
    if a.steps.source == "whole trace" or not a.step_ns:
        return None
    result.window_ns = a.step_ns
    result.busy_share = None if result.varies else a.unprofiled_busy_share
    result.window_slowdown = a.step_ns / run_ns - 1
    in_window = run_steps.kept_by_window(a.trace.meta.window)
    result.in_warm_up = bool(in_window.any()) and not run_steps.after_warmup[in_window].any()
    nearby_ns = run_steps.median_around(in_window)
    if not nearby_ns:
        return result
    result.nearby_ns = nearby_ns
    result.profiler_overhead = run_steps.profiler_overhead(in_window)
    durations = run_steps.timed_durations
    result.share_beyond = float(
        (durations >= nearby_ns if nearby_ns > run_ns else durations <= nearby_ns).mean()
    )
    result.atypical = (
        abs(nearby_ns / run_ns - 1) >= MIN_APART_SHARE and result.share_beyond < MAX_SIMILAR_SHARE
    )
    return result
