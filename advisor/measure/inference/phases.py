"""Steps of inference by phase: time, tokens, limits, and attainable time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.intervals import Ints, covered_length, union
from advisor.core.report_inference import GraphReplays, InferenceByPhase, InferencePhase, Quantiles
from advisor.measure.device.families import MATRIX
from advisor.measure.device.shapes import FORMATS
from advisor.measure.host.names import cache_by_name, map_names
from advisor.measure.host.operators import KERNEL_NS, attainable_roofs
from advisor.measure.inference.annotations import FORWARD
from advisor.measure.inference.graphs import find_replays

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.inference.passes import ForwardPasses

MIN_P90, MIN_P99 = 10, 100
"""Durations below which these percentiles say no more than the longest does."""
MIN_KNOWN = 0.5
"""Part of kernel time whose work must be known to estimate a step's attainable time."""
JITTER = 1.2
"""Ratio of the 90th percentile to the median from which it is explained."""
FP4_FLOPS_PER_BYTE = 4
"""FLOPs per byte of a 4-bit weight that one token uses: a product and a sum, by half a byte."""
MOVING = (
    *("elementwise", "normalisation", "reduction", "softmax", "copy", "layout", "embedding"),
    "indexing",
)
"""Families that memory limits, however little is known of their shapes."""


def measure_inference(a: Analysis) -> InferenceByPhase | None:
    """Measure ``Report.inference``: the passes that begin in the used steps."""
    passes = a.passes
    if passes is None:
        return None
    start, end = passes.pass_intervals
    used = np.flatnonzero(covered_length(start, start + 1, a.spans) > 0)
    if not len(used):
        return None
    whole = not a.lost_records.reported
    labels = [_label(passes, index) for index in used.tolist()]
    kernels = None if a.device_id is None else _Kernels(a, passes)
    named = {label: used[[each == label for each in labels]] for label in labels}
    host = _host_unprofiled(a)
    phases = [
        _phase(label, rows, passes, kernels, whole=whole, host=host)
        for label, rows in named.items()
    ]
    phases.sort(key=lambda phase: -phase.ns * phase.steps)
    order = used[np.argsort(start[used], kind="stable")]
    gaps = np.maximum(start[order][1:] - end[order][:-1], 0)
    span = float(end[order].max() - start[order][0])
    outputs = [passes.marks[index].outputs for index in order.tolist()]
    described = [tokens for tokens in outputs if tokens is not None]
    return InferenceByPhase(
        engine=a.engine,
        source=passes.source,
        phases=phases,
        between=_quantiles(gaps) if gaps.any() else None,
        between_share=float(gaps.sum()) / span if len(gaps) and span else None,
        output_tokens_per_s=sum(described) / span * 1e9
        if len(described) == len(order) and span
        else None,
        graphs=_graphs(a, passes, used),
    )


def _host_unprofiled(a: Analysis) -> float:
    """Return the part of the profiled steps' idle time that the run's own steps have."""
    own, idle = a.own_busy_share, a.span_ns - a.breakdown.busy.total
    if not own or idle <= 0:
        return 1.0
    return min(1.0, (1.0 / own - 1.0) * a.breakdown.busy.total / idle)


def _label(passes: ForwardPasses, index: int) -> str:
    phase = passes.marks[index].phase
    return str(passes.table["name"][index]) if phase == FORWARD else phase


def _quantiles(ns: Ints) -> Quantiles:
    p50, p90, p99 = np.percentile(ns, [50, 90, 99])
    count = len(ns)
    return Quantiles(
        float(p50),
        float(p90) if count >= MIN_P90 else None,
        float(p99) if count >= MIN_P99 else None,
        float(ns.max()),
    )


def _mean(values: list[int | None]) -> float | None:
    described = [value for value in values if value is not None]
    return sum(described) / len(described) if described and len(described) == len(values) else None


def _phase(
    label: str,
    rows: Ints,
    passes: ForwardPasses,
    kernels: _Kernels | None,
    *,
    whole: bool,
    host: float,
) -> InferencePhase:
    """Summarise one phase. ``whole``: the records of the device are complete. ``host``: part of the
    host's time that the run's own steps have."""
    start, end = (times[rows] for times in passes.pass_intervals)
    dur = end - start
    total = float(dur.sum())
    marks = [passes.marks[index] for index in rows.tolist()]
    tokens = _mean([mark.tokens for mark in marks])
    sums = None if kernels is None or not whole else kernels.sums(rows, start, end)
    limits = {} if sums is None else {**sums.limits, "host": host * sums.limits["host"]}
    limit = max(limits, key=lambda name: limits[name]) if any(limits.values()) else None
    count = len(rows)
    judged = sums is not None and sums.known is not None and sums.known >= MIN_KNOWN
    return InferencePhase(
        name=label,
        steps=count,
        requests=_mean([mark.requests for mark in marks]),
        tokens=tokens,
        ns=total / count,
        quantiles=_quantiles(dur),
        ns_per_token=total / (tokens * count) if tokens else None,
        tokens_per_s=tokens * count / total * 1e9 if tokens and total else None,
        busy_share=None if sums is None or not total else sums.busy / total,
        limit=None if limit == "unknown" else limit,
        limit_share=None if limit in (None, "unknown") else limits[limit] / sum(limits.values()),
        limit_inferred=limit in ("memory", "compute") and not judged,
        attainable_ns=sums.attainable / count if judged and sums is not None else None,
        known_share=None if sums is None else sums.known,
        jitter="" if sums is None else _jitter(dur, sums.busy_each),
        roles={} if sums is None else {name: ns / count for name, ns in sums.roles.items()},
    )


def _jitter(dur: Ints, busy: Ints) -> str:
    """Explain why the longest tenth of the steps exceeds the median; empty: no need."""
    if len(dur) < MIN_P90:
        return ""
    middle, high = np.percentile(dur, [50, 90])
    if high < JITTER * middle:
        return ""
    longest = dur >= high
    more = float(dur[longest].mean() - middle)
    work = float(busy[longest].mean() - np.median(busy))
    if work >= more / 2:
        return f"the longest tenth computes {t.format_duration(work)} more"
    return f"the device waits {t.format_duration(more - work)} longer in the longest tenth"


class _Sums(NamedTuple):
    """Sums over the steps of one phase, ns."""

    busy: float
    busy_each: Ints
    limits: dict[str, float]
    attainable: float
    known: float | None
    roles: dict[str, float]


class _Kernels:
    """Device work of passes: what limits each piece, and the least time it could take."""

    def __init__(self, a: Analysis, passes: ForwardPasses) -> None:
        gpu, measured = a.trace.gpu, a.kernels
        self.owner = passes.owner
        self.dur = gpu["dur"].to_numpy().astype(np.float64)
        ts = gpu["ts"].to_numpy()
        own = (gpu["device"] == a.device_id).to_numpy()
        self.busy = union(ts[own], (ts + gpu["dur"].to_numpy())[own])
        self.role = find_roles(a)
        self.communication = measured["communication"].to_numpy()
        limits = attainable_roofs(a.hardware)
        flops = measured["flops"].fill_null(np.nan).to_numpy().astype(np.float64)
        moved = measured["moved"].fill_null(np.nan).to_numpy().astype(np.float64)
        rate = np.full(len(FORMATS) + 1, np.nan)
        for place, name in enumerate(FORMATS):
            if name in limits.matmul:
                rate[place] = limits.matmul[name].rate
        rate[-1] = rate[FORMATS.index("bf16")]  # where the format is not recorded
        dtype = measured["dtype"].to_physical().fill_null(len(FORMATS)).to_numpy().astype(int)
        family = measured["family"].cast(pl.String)
        matrix = family.is_in([*MATRIX, "attention"]).to_numpy()
        arithmetic = np.where(matrix, flops / rate[dtype] * 1e9, 0.0)
        memory = moved * np.nan if limits.memory is None else moved / limits.memory.rate * 1e9
        floor = np.maximum(arithmetic, memory) + KERNEL_NS
        self.known = ~np.isnan(floor) & ~self.communication
        self.floor = np.where(self.known, np.minimum(floor, self.dur), self.dur)
        self.kernel = (gpu["kind"] == "kernel").to_numpy() & ~self.communication
        moving = family.is_in(MOVING).to_numpy() | ~matrix & (moved > 0)
        reuse = [np.inf if mark.tokens is None else float(mark.tokens) for mark in passes.marks]
        tokens = np.array([*reuse, np.inf])  # that may share one read of a weight
        ridge = np.nan if limits.memory is None else rate[dtype] / limits.memory.rate
        few = FP4_FLOPS_PER_BYTE * tokens[self.owner] < ridge
        bound = np.where(self.known & (arithmetic > memory), 2, np.where(self.known, 1, 0))
        bound = np.where((bound == 0) & (moving | few), 1, bound)
        self.bound = np.where(self.communication, 3, bound)

    def sums(self, rows: Ints, start: Ints, end: Ints) -> _Sums:
        """Sum the work of the passes ``rows``, whose own time is [start, end)."""
        each = covered_length(start, end, self.busy)
        owned = np.isin(self.owner, rows)
        work = [float(self.dur[owned & (self.bound == code)].sum()) for code in range(4)]
        busy = float(each.sum())
        scale = busy / sum(work) if sum(work) else 0.0  # work that runs at once counts once
        names = ("unknown", "memory", "compute", "communication")
        limits = {name: ns * scale for name, ns in zip(names, work, strict=True)}
        limits["host"] = float((end - start).sum()) - busy
        kernel = float(self.dur[owned & self.kernel].sum())
        known = float(self.dur[owned & self.kernel & self.known].sum())
        saved = float((self.dur - self.floor)[owned].sum()) * scale
        table = pl.DataFrame({"role": self.role.filter(pl.Series(owned)), "ns": self.dur[owned]})
        parts = table.group_by("role").agg(pl.col("ns").sum()).sort("ns", "role", descending=True)
        return _Sums(
            busy,
            each,
            limits,
            max(0.0, busy - saved),
            known / kernel if kernel else None,
            dict(parts.iter_rows()),
        )


def _graphs(a: Analysis, passes: ForwardPasses, used: Ints) -> GraphReplays | None:
    found = find_replays(a.trace)
    if not found:
        return None
    rows = np.concatenate([replay.rows for replay in found])
    inside = np.isin(passes.owner[[r.rows[0] for r in found if len(r.rows)]], used)
    return GraphReplays(
        launches=len(found),
        kernels=len(rows),
        per_step=float(inside.sum()) / len(used),
        matched=None if a.trace.meta.capture is None else a.trace.meta.capture.matched,
        missing=a.lost_records.replayed,
    )


# -- which part of a served model each piece of device work is -------------------------------------

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
"""Role -> pattern of a kernel's or its operator's name; the first that fits wins."""

_OF_FAMILY = {
    "gemm": "dense gemm", "communication": "collectives", "attention": "attention",
    "copy": "copies", "memset": "copies", "layout": "copies",
}  # fmt: skip


@cache_by_name
def _by_name(names: pl.Series) -> pl.DataFrame:
    column = pl.col("name")
    fits = [pl.when(column.str.contains(pattern)).then(pl.lit(r)) for r, pattern in ROLES]
    return names.alias("name").to_frame().select(role=pl.coalesce(*fits))


def find_roles(a: Analysis) -> pl.Series:
    """Find the role of each row of ``trace.gpu`` in a layer, by the kernel's name, then its
    operator's, then its family. Matrix products that are no expert's are ``dense gemm``."""
    measured = a.kernels
    family = measured["family"].cast(pl.String)
    names = [
        map_names(column.cast(pl.Categorical), _role, pl.String)
        for column in (a.trace.gpu["name"], measured["op_name"])
    ]
    fallback = family.replace(_OF_FAMILY)
    frame = pl.DataFrame(
        {"kernel": names[0], "op": names[1], "family": family, "fallback": fallback}
    )
    matrix = pl.col("family") == "gemm"
    expert = pl.coalesce("kernel", "op").is_in(["moe experts", "moe combine"])
    own = pl.when(matrix & ~expert).then(pl.lit("dense gemm"))
    fixed = pl.when(pl.col("family") == "communication").then(pl.lit("collectives"))
    return frame.select(role=pl.coalesce(fixed, own, "kernel", "op", "fallback")).to_series()


def _role(name: str) -> str | None:
    result = _by_name(pl.Series([name]))["role"][0]
    return None if result is None else str(result)
