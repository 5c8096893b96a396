"""Sections of a report on a served model: its steps by phase, and the time between steps."""

from collections.abc import Iterator
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.core.report import Report
from advisor.core.report_inference import InferenceByPhase, InferencePhase, Quantiles
from advisor.measure.inference.annotations import NO_CACHE
from advisor.render.document import Block, FieldList, Grid, Paragraph, Section, TextField

MAX_ROLES: Final = 6
_MAX_NAME: Final = 40
"""Maximum length of a phase's name, characters. It may be the class of a model."""
COLUMN_TITLES: Final = (
    "phase", "steps", "batch", "tokens", "step", "per token", "tokens/s", "busy", "limit",
)  # fmt: skip
LIMIT: Final = "limit: what takes most of a step"
LIMIT_SHARE: Final = f"{LIMIT}, and its share"
HOST_LIMIT: Final = "; host: waiting for the CPU"
INFERRED_LIMIT: Final = "; ?: inferred"
"""Legends of the last column, without shares and with them: one line of a terminal each."""
OPTIONAL_TITLES: Final = ("tokens/s", "tokens")
"""Columns that a terminal leaves out first if they do not fit."""
ENGINE_NAMES: Final = {
    "vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "atom": "ATOM",
    "xdit": "xDiT", "transformers": "transformers",
}  # fmt: skip


_SPARE: Final = {"between": 1, "rates": 1, "parts": 2, "graphs": 2}
"""Levels at which a terminal starts to leave lines out to fit a screen."""


def sections(report: Report) -> Iterator[Block]:
    """Yield steps by phase. Nothing if the program trains, or if nothing marks its steps."""
    inference = report.inference
    if inference is None:
        return
    table = _build_table([build_row(phase) for phase in inference.phases])
    has_limit = any(phase.limit for phase in inference.phases)
    has_share = any(phase.limit and not phase.limit_inferred for phase in inference.phases)
    host = HOST_LIMIT * any(phase.limit == "host" for phase in inference.phases)
    host += INFERRED_LIMIT * any(phase.limit_inferred for phase in inference.phases)
    text = f"{LIMIT_SHARE if has_share else LIMIT}{host}."
    legend = [Paragraph(text, "soft")] if has_limit else []
    rows = [
        TextField(label, parts, detail=detail, spare=_SPARE.get(label, 0))
        for label, parts, detail in describe_lines(inference)
    ]
    engine = ENGINE_NAMES.get(inference.engine or "", inference.engine or "")
    source = "its own marks" if inference.source == "engine" else inference.source
    step = report.step
    profiled = "profiled steps" * (step is not None and step.window_differs)
    if step is not None and step.window_is_unrepresentative:
        profiled += "; limit: of the run's own steps" * has_limit
    aside = " · ".join(part for part in (engine, f"by {source}", profiled) if part)
    title = "Inference by phase"
    yield Section(title, [table, *legend, FieldList(rows)], aside, short=True, spare=4)


def _build_table(rows: list[list[str]]) -> Grid:
    """Return the table of phases without the columns that have no value."""
    columns = [
        number
        for number, values in enumerate(zip(*rows, strict=True))
        if any(value != t.EMPTY_CELL for value in values)
    ]
    titles = [COLUMN_TITLES[number] for number in columns]
    optional = [titles.index(title) for title in OPTIONAL_TITLES if title in titles]
    return Grid(titles, [[row[n] for n in columns] for row in rows], optional=optional)


def build_row(phase: InferencePhase) -> list[str]:
    """Return the cells of a phase for ``COLUMN_TITLES``, with ``–`` for values not recorded."""
    limit = t.EMPTY_CELL
    if phase.limit is not None:
        share = "" if phase.limit_inferred else t.format_share(phase.limit_share)
        limit = f"{phase.limit}?" if phase.limit_inferred else f"{phase.limit} {share}"
    return [
        labels.shorten(labels.clean(phase.name), _MAX_NAME), f"{phase.steps:,}",
        _format_count(phase.requests), _format_count(phase.tokens), t.format_duration(phase.ns),
        t.format_cell(phase.ns_per_token, t.format_duration), _format_count(phase.tokens_per_s),
        t.format_cell(phase.busy_share, t.format_share), limit,
    ]  # fmt: skip


def _format_count(value: float | None) -> str:
    if value is None:
        return t.EMPTY_CELL
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _format_quantiles(quantiles: Quantiles) -> str:
    parts = [
        f"{name} {t.format_duration(ns)}"
        for name, ns in (
            ("median", quantiles.median_ns),
            ("p90", quantiles.p90_ns),
            ("p99", quantiles.p99_ns),
            ("longest", quantiles.max_ns),
        )
        if ns is not None
    ]
    return ", ".join(parts)


def describe_lines(inference: InferenceByPhase) -> list[tuple[str, list[str], bool]]:
    """List the lines below the table: label, parts, and whether it is a detail."""
    result: list[tuple[str, list[str], bool]] = []
    for phase in inference.phases:
        own = labels.shorten(labels.clean(phase.name), _MAX_NAME)
        busy = (phase.busy_share or 0.0) * phase.ns
        if phase.attainable_ns is not None and phase.attainable_ns < busy:
            known = f"{t.format_share(phase.known_share)} of the kernel time could be compared"
            least, now = map(t.format_duration, (phase.attainable_ns, busy))
            text = (
                f"{own}: at rates that this GPU model reaches in benchmarks, its kernels would "
                f"take {least} instead of {now}"
            )
            result.append(("rates", [text, known], False))
        elif phase.attainable_ns is None and phase.known_share is not None:
            share = t.format_share(1 - phase.known_share)
            unknown = f"unknown, as FLOPs and bytes of {share} of its kernel time are not recorded"
            why = f"the limit, {phase.limit}, is inferred from its tokens and kinds of kernels"
            parts = [f"{own}: {unknown}", *([why] if phase.limit_inferred else [])]
            result.append(("rates", parts, False))
        if phase.steps > 1:
            parts = [
                f"{own} {_format_quantiles(phase.quantiles)}",
                *([phase.jitter] if phase.jitter else []),
            ]
            result.append(("spread", parts, not phase.jitter))
        if phase.roles:
            total = sum(phase.roles.values()) or 1.0
            first_roles = list(phase.roles.items())[:MAX_ROLES]
            parts = [f"{name} {t.format_share(ns / total)}" for name, ns in first_roles]
            result.append(("parts", [f"{own}: {parts[0]}", *parts[1:]], len(inference.phases) > 1))
    if inference.between is not None and inference.between_share is not None:
        share = f"{t.format_share(inference.between_share)} of the time"
        result.append(("between", [share, _format_quantiles(inference.between)], False))
    again = any(phase.name == NO_CACHE for phase in inference.phases)
    if inference.output_tokens_per_s is not None and (len(inference.phases) > 1 or again):
        rate = f"{_format_count(inference.output_tokens_per_s)} tokens/s generated"
        rate += ", over all phases" if len(inference.phases) > 1 else "; the others are recomputed"
        result.append(("output", [rate], False))
    graphs = inference.graphs
    if graphs is not None:
        parts = [t.count_noun(graphs.launches, "graph launch", "graph launches")]
        parts.append(t.count_noun(graphs.kernels, "kernel"))
        if graphs.matched is not None:
            parts.append(f"{t.format_share(graphs.matched)} named by the capture")
        if graphs.missing:
            parts.append(f"{graphs.missing:,} missing")
        result.append(("graphs", parts, False))
    return result
