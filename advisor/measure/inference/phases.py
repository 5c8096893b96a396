"""Steps of inference by phase: time, tokens, limits, and attainable time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.intervals import Ints, covered_length, intervals_of
from advisor.core.report_inference import GraphReplays, InferenceByPhase, InferencePhase, Quantiles
from advisor.measure.device.families import MATRIX
from advisor.measure.device.shapes import FORMATS
from advisor.measure.host.names import cache_by_name, map_names
from advisor.measure.host.operators import KERNEL_NS, attainable_roofs
from advisor.measure.inference.annotations import FORWARD
from advisor.measure.inference.graphs import find_replays

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.inference.inference_steps import InferenceSteps

MIN_P90, MIN_P99 = 10, 100
"""Minimum number of durations at which these percentiles say more than the longest one."""
_MIN_KNOWN_SHARE = 0.5
"""Minimum share of kernel time with known work for estimating a step's attainable time."""
MIN_JITTER = 1.2
"""Minimum ratio of the 90th percentile to the median that is explained."""
FP4_FLOPS_PER_BYTE = 4
"""FLOPs per byte of a 4-bit weight for one token: a product and a sum per half byte."""
MOVING = (
    *("elementwise", "normalisation", "reduction", "softmax", "copy", "layout", "embedding"),
    "indexing",
)
"""Families that memory limits, even if their shapes are unknown."""


def measure_inference(a: Analysis) -> InferenceByPhase | None:
    """Measure ``Report.inference``: the steps of inference that begin in the used steps."""
    inference_steps = a.inference_steps
    if inference_steps is None:
        return None
    start, end = inference_steps.step_intervals
    used = np.flatnonzero(covered_length(start, start + 1, a.spans) > 0)
    if not len(used):
        return None
    is_complete = not a.lost_records.reported
    labels = [_phase_label(inference_steps, index) for index in used.tolist()]
    kernels = None if a.device_id is None else _Kernels(a, inference_steps)
    rows_of_phase = {label: used[[name == label for name in labels]] for label in labels}
    host_share = _estimate_host_share(a)
    phases = [
        _summarize_phase(
            label, rows, inference_steps, kernels, is_complete=is_complete, host_share=host_share
        )
        for label, rows in rows_of_phase.items()
    ]
    phases.sort(key=lambda phase: -phase.ns * phase.steps)
    order = used[np.argsort(start[used], kind="stable")]
    gaps = np.maximum(start[order][1:] - end[order][:-1], 0)
    span = float(end[order].max() - start[order][0])
    outputs = [inference_steps.marks[index].outputs for index in order.tolist()]
    known_outputs = [tokens for tokens in outputs if tokens is not None]
    return InferenceByPhase(
        engine=a.engine,
        source=inference_steps.source,
        phases=phases,
        between=_find_quantiles(gaps) if gaps.any() else None,
        between_share=float(gaps.sum()) / span if len(gaps) and span else None,
        output_tokens_per_s=sum(known_outputs) / span * 1e9
        if len(known_outputs) == len(order) and span
        else None,
        graphs=_summarize_graphs(a, inference_steps, used),
    )


def _estimate_host_share(a: Analysis) -> float:
    """Return the share of the profiled steps' idle time that the run's own steps have."""
    busy_share, idle = a.unprofiled_busy_share, a.span_ns - a.breakdown.busy.total
    if not busy_share or idle <= 0:
        return 1.0
    return min(1.0, (1.0 / busy_share - 1.0) * a.breakdown.busy.total / idle)


def _phase_label(inference_steps: InferenceSteps, index: int) -> str:
    phase = inference_steps.marks[index].phase
    return str(inference_steps.table["name"][index]) if phase == FORWARD else phase


def _find_quantiles(ns: Ints) -> Quantiles:
    p50, p90, p99 = np.percentile(ns, [50, 90, 99])
    count = len(ns)
    return Quantiles(
        float(p50),
        float(p90) if count >= MIN_P90 else None,
        float(p99) if count >= MIN_P99 else None,
        float(ns.max()),
    )


def _mean_if_complete(values: list[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _summarize_phase(
    label: str,
    rows: Ints,
    inference_steps: InferenceSteps,
    kernels: _Kernels | None,
    *,
    is_complete: bool,
    host_share: float,
) -> InferencePhase:
    """Summarise one phase. ``whole`` says that the records of the device are complete. ``host`` is
    the share of the host's time that the run's own steps have."""
    start, end = (times[rows] for times in inference_steps.step_intervals)
    dur = end - start
    total = float(dur.sum())
    marks = [inference_steps.marks[index] for index in rows.tolist()]
    tokens = _mean_if_complete([mark.tokens for mark in marks])
    sums = None if kernels is None or not is_complete else kernels.sums(rows, start, end)
    limits = {} if sums is None else {**sums.limits, "host": host_share * sums.limits["host"]}
    limit = max(limits, key=lambda name: limits[name]) if any(limits.values()) else None
    count = len(rows)
    is_judged = sums is not None and sums.known is not None and sums.known >= _MIN_KNOWN_SHARE
    return InferencePhase(
        name=label,
        steps=count,
        requests=_mean_if_complete([mark.requests for mark in marks]),
        tokens=tokens,
        ns=total / count,
        quantiles=_find_quantiles(dur),
        ns_per_token=total / (tokens * count) if tokens else None,
        tokens_per_s=tokens * count / total * 1e9 if tokens and total else None,
        busy_share=None if sums is None or not total else sums.busy / total,
        limit=None if limit == "unknown" else limit,
        limit_share=None if limit in (None, "unknown") else limits[limit] / sum(limits.values()),
        limit_inferred=limit in ("memory", "compute") and not is_judged,
        attainable_ns=sums.attainable / count if is_judged and sums is not None else None,
        known_share=None if sums is None else sums.known,
        jitter="" if sums is None else _explain_jitter(dur, sums.busy_each),
        roles={} if sums is None else {name: ns / count for name, ns in sums.roles.items()},
    )


def _explain_jitter(dur: Ints, busy: Ints) -> str:
    """Explain why the longest tenth of the steps exceeds the median. Empty if it hardly does."""
    if len(dur) < MIN_P90:
        return ""
    median, high = np.percentile(dur, [50, 90])
    if high < MIN_JITTER * median:
        return ""
    is_longest = dur >= high
    excess = float(dur[is_longest].mean() - median)
    more_work = float(busy[is_longest].mean() - np.median(busy))
    if more_work >= excess / 2:
        return f"the longest tenth computes {t.format_duration(more_work)} more"
    return f"the device waits {t.format_duration(excess - more_work)} longer in the longest tenth"


class _Sums(NamedTuple):
    """Sums over the steps of one phase, ns."""

    busy: float
    busy_each: Ints
    limits: dict[str, float]
    attainable: float
    known: float | None
    roles: dict[str, float]


class _Kernels:
    """Device work of steps: the limit of each piece, and its attainable time."""

    def __init__(self, a: Analysis, inference_steps: InferenceSteps) -> None:
        gpu, measured = a.trace.gpu, a.kernels
        self.owner = inference_steps.owner
        self.dur = gpu["dur"].to_numpy().astype(np.float64)
        self.busy = intervals_of(gpu, (gpu["device"] == a.device_id).to_numpy())
        self.role = find_roles(a)
        self.communication = measured["communication"].to_numpy()
        limits = attainable_roofs(a.hardware)
        flops = measured["flops"].fill_null(np.nan).to_numpy().astype(np.float64)
        moved = measured["moved"].fill_null(np.nan).to_numpy().astype(np.float64)
        rate = np.full(len(FORMATS) + 1, np.nan)
        for index, name in enumerate(FORMATS):
            if name in limits.matmul:
                rate[index] = limits.matmul[name].rate
        rate[-1] = rate[FORMATS.index("bf16")]  # if the format is not recorded
        dtype = measured["dtype"].to_physical().fill_null(len(FORMATS)).to_numpy().astype(int)
        family = measured["family"].cast(pl.String)
        is_matrix = family.is_in([*MATRIX, "attention"]).to_numpy()
        arithmetic = np.where(is_matrix, flops / rate[dtype] * 1e9, 0.0)
        memory = moved * np.nan if limits.memory is None else moved / limits.memory.rate * 1e9
        floor = np.maximum(arithmetic, memory) + KERNEL_NS
        self.known = ~np.isnan(floor) & ~self.communication
        self.floor = np.where(self.known, np.minimum(floor, self.dur), self.dur)
        self.kernel = (gpu["kind"] == "kernel").to_numpy() & ~self.communication
        is_moving = family.is_in(MOVING).to_numpy() | ~is_matrix & (moved > 0)
        reuse = [
            np.inf if mark.tokens is None else float(mark.tokens) for mark in inference_steps.marks
        ]
        tokens = np.array([*reuse, np.inf])  # tokens that may share one read of a weight
        ridge = np.nan if limits.memory is None else rate[dtype] / limits.memory.rate
        reads_limit = FP4_FLOPS_PER_BYTE * tokens[self.owner] < ridge
        limit_code = np.where(self.known & (arithmetic > memory), 2, np.where(self.known, 1, 0))
        limit_code = np.where((limit_code == 0) & (is_moving | reads_limit), 1, limit_code)
        self.bound = np.where(self.communication, 3, limit_code)

    def sums(self, rows: Ints, start: Ints, end: Ints) -> _Sums:
        """Sum the work of the steps ``rows``, which take the time [start, end)."""
        busy_each = covered_length(start, end, self.busy)
        owned = np.isin(self.owner, rows)
        work_ns = [float(self.dur[owned & (self.bound == code)].sum()) for code in range(4)]
        busy = float(busy_each.sum())
        scale = busy / sum(work_ns) if sum(work_ns) else 0.0  # concurrent work counts once
        names = ("unknown", "memory", "compute", "communication")
        limits = {name: ns * scale for name, ns in zip(names, work_ns, strict=True)}
        limits["host"] = float((end - start).sum()) - busy
        kernel_ns = float(self.dur[owned & self.kernel].sum())
        known_ns = float(self.dur[owned & self.kernel & self.known].sum())
        saved = float((self.dur - self.floor)[owned].sum()) * scale
        table = pl.DataFrame({"role": self.role.filter(pl.Series(owned)), "ns": self.dur[owned]})
        parts = table.group_by("role").agg(pl.col("ns").sum()).sort("ns", "role", descending=True)
        return _Sums(
            busy,
            busy_each,
            limits,
            max(0.0, busy - saved),
            known_ns / kernel_ns if kernel_ns else None,
            dict(parts.iter_rows()),
        )


def _summarize_graphs(
    a: Analysis, inference_steps: InferenceSteps, used: Ints
) -> GraphReplays | None:
    replays = find_replays(a.trace)
    if not replays:
        return None
    rows = np.concatenate([replay.rows for replay in replays])
    is_used = np.isin(
        inference_steps.owner[[graph.rows[0] for graph in replays if len(graph.rows)]], used
    )
    return GraphReplays(
        launches=len(replays),
        kernels=len(rows),
        per_step=float(is_used.sum()) / len(used),
        matched=None if a.trace.meta.capture is None else a.trace.meta.capture.matched,
        missing=a.lost_records.replayed,
    )


# -- roles of device work in a served model -------------------------------------

ROLES: tuple[tuple[str, str], ...] = (
    (
        "kv cache",
        r"(?i)reshape_?and_?cache|store_?kv|store_?cache|concat_?and_?cache|kv_?cache_?(update|copy|write)"
        r"|set_(mla_)?kv_buffer|append_paged|copy_?blocks|page_?indices|kv_indices",
    ),
    ("moe combine", r"(?i)finalize_?(moe|matmul|kernel)|moe_?(sum|combine|reduce)|unpermute"),
    (
        "moe routing",
        r"(?i)routing|bitmatrix|moe_?(align|sort|gate|permute|fused_gate|topk)|topk_?(softmax|sigmoid|forward|gating)"
        r"|expert_?(offsets|map|count)|grouped_?topk|moe_forward_0",
    ),
    (
        "moe experts",
        r"(?i)fused_?moe|matmul_ogs|moe_?(gemm|mm|forward|i?q\d)|fmoe|group(ed)?_?(gemm|mm)|experts"
        r"|bmm_(Mx|E4m3|E2m1|Bfloat16_Mx)|deep_?gemm.*grouped|cutlass_moe|marlin_moe|ck_moe",
    ),
    (
        "attention",
        r"(?i)reduce_segments|attention|fmha|flash_(fwd|attn|mla)|mla_|merge_(attn_)?states|sage_",
    ),
    ("rotary", r"(?i)rotary|(^|[_:])rope"),
    ("normalisation", r"(?i)rms_?norm|layer_?norm|group_?norm"),
    ("quantise", r"(?i)quant|scaled_fp8|per_token_group|mxfp|cvt_(fp16|fp32)"),
    ("activation", r"(?i)(silu|gelu|swiglu|act)_?and_?mul|silu|gelu|swiglu"),
    (
        "sampling",
        r"(?i)sampling|sampler|argmax|multinomial|top_?k_?top_?p|penalt|logits|exponential|min_p|gumbel",
    ),
)
"""Role -> pattern of a kernel's or its operator's name; the first match wins."""

_ROLE_OF_FAMILY = {
    "gemm": "dense gemm", "communication": "collectives", "attention": "attention",
    "copy": "copies", "memset": "copies", "layout": "copies",
}  # fmt: skip


@cache_by_name
def _roles_by_name(names: pl.Series) -> pl.DataFrame:
    column = pl.col("name")
    roles = [pl.when(column.str.contains(pattern)).then(pl.lit(role)) for role, pattern in ROLES]
    return names.alias("name").to_frame().select(role=pl.coalesce(*roles))


def find_roles(a: Analysis) -> pl.Series:
    """Find the role of each row of ``trace.gpu`` in a layer, by the kernel's name, then its
    operator's name, then its family. Matrix products outside experts are ``dense gemm``."""
    measured = a.kernels
    family = measured["family"].cast(pl.String)
    names = [
        map_names(column.cast(pl.Categorical), _find_role, pl.String)
        for column in (a.trace.gpu["name"], measured["op_name"])
    ]
    fallback = family.replace(_ROLE_OF_FAMILY)
    frame = pl.DataFrame(
        {"kernel": names[0], "op": names[1], "family": family, "fallback": fallback}
    )
    is_matrix = pl.col("family") == "gemm"
    is_expert = pl.coalesce("kernel", "op").is_in(["moe experts", "moe combine"])
    dense = pl.when(is_matrix & ~is_expert).then(pl.lit("dense gemm"))
    fixed = pl.when(pl.col("family") == "communication").then(pl.lit("collectives"))
    return frame.select(role=pl.coalesce(fixed, dense, "kernel", "op", "fallback")).to_series()


def _find_role(name: str) -> str | None:
    result = _roles_by_name(pl.Series([name]))["role"][0]
    return None if result is None else str(result)
