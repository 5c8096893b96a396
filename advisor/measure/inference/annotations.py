"""Marks that inference engines write around a step, with the phase, requests and tokens in them.

``PATTERNS`` has one entry per spelling, with the place where the engine writes it. A mark may
contain sums over its requests: ``sq`` of new tokens (queries), ``sk`` of tokens attended to (keys),
``sqsq`` and ``sqsk`` of their squares and products."""

import re
from collections.abc import Callable
from typing import NamedTuple

import polars as pl

from advisor.core.intervals import covered_length, intervals_of
from advisor.core.trace import Trace

VLLM, SGLANG, TENSORRT_LLM, ATOM, XDIT = "vllm", "sglang", "tensorrt-llm", "atom", "xdit"
TRANSFORMERS = "transformers"
PREFILL, DECODE, MIXED, DRAFT = "prefill", "decode", "mixed", "draft"
NO_CACHE = "decode, no KV cache"
"""Phase of passes that recompute the complete sequence for each new token."""
IMAGE, FORWARD = "image", "forward"
_MIN_WORK_SHARE = 0.9
"""Minimum share of the device's time in ranges called ``prefill`` or ``decode`` that are steps.
Without a device, minimum share of the operators' time."""


class Sums(NamedTuple):
    """Sums over the requests of one kind in a step."""

    q: int
    """New tokens."""
    k: int
    """Tokens attended to."""
    qq: int
    """Squares of the new tokens."""
    qk: int
    """Products of new tokens and tokens attended to."""


class StepMark(NamedTuple):
    """Engine, phase, requests and tokens of a step, read from its mark."""

    engine: str | None
    """Name of the engine, or ``None`` for a user's range."""
    phase: str
    """Phase: ``prefill``, ``decode``, ``mixed``, ``draft``, ``image`` (a complete picture), or
    ``forward`` if not recorded."""
    requests: int | None = None
    tokens: int | None = None
    """New tokens that are computed, or ``None`` if not recorded."""
    outputs: int | None = None
    """Output tokens, or ``None`` if not recorded, for example because drafts may be rejected."""
    prefill: Sums | None = None
    decode: Sums | None = None


def _phase_of(prefills: int, decodes: int) -> str:
    return MIXED if prefills and decodes else PREFILL if prefills else DECODE


_NUMBER = r"(\d{1,15})"
"""Pattern of a number: longer numbers come from damaged files."""
_GROUP = rf"\((?:sq{_NUMBER}sk{_NUMBER}sqsq{_NUMBER}sqsk{_NUMBER}|{_NUMBER}(?:_{_NUMBER})?)\)"


def _read_sums(values: tuple[str | None, ...]) -> tuple[int, Sums | None]:
    """Return the new tokens of a match of ``_GROUP``, and its sums. Older versions of vLLM write
    the tokens and the sum of their squares, for complete prompts."""
    if values[0] is not None:
        q, k, qq, qk = (int(value or 0) for value in values[:4])
        return q, Sums(q, k, qq, qk)
    q = int(values[4] or 0)
    return q, None if values[5] is None else Sums(q, q, int(values[5]), int(values[5]))


def _read_vllm(match: re.Match[str]) -> StepMark:
    groups = match.groups()
    prefills, decodes = int(groups[0]), int(groups[7])
    prefill_tokens, prefill = _read_sums(groups[1:7])
    decode_tokens, decode = _read_sums(groups[8:14])
    is_plain = decode_tokens in (0, decodes)  # more tokens than requests: drafts are verified
    return StepMark(
        VLLM,
        _phase_of(prefills, decodes),
        prefills + decodes,
        prefill_tokens + decode_tokens,
        prefills + decodes if is_plain else None,
        prefill if prefills else None,
        decode if decodes else None,
    )


def _read_vllm_counts(match: re.Match[str]) -> StepMark:
    new, cached = map(int, match.groups())
    return StepMark(
        VLLM, _phase_of(new, cached), new + cached, None if new else cached, new + cached
    )


def _read_fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(rf"(\w+)={_NUMBER}\b", text)}


def _read_group_sums(fields: dict[str, int], prefix: str, tokens: int | None) -> Sums | None:
    k, qq, qk = (fields.get(f"{prefix}{name}") for name in ("sk", "sqsq", "sqsk"))
    q = fields.get(f"{prefix}sq", tokens)
    if q is None or k is None or qq is None or qk is None:
        return None
    return Sums(q, k, qq, qk)


def _read_sglang(match: re.Match[str]) -> StepMark | None:
    mode, fields = match[1], _read_fields(match[2])
    requests = fields.get("bs")
    if mode == "IDLE":
        return None
    if mode == "MIXED":
        context, generation = fields.get("c_sq"), fields.get("g_sq")
        tokens = None if context is None or generation is None else context + generation
        prefill, decode = (
            _read_group_sums(fields, "c_", context),
            _read_group_sums(fields, "g_", generation),
        )
        return StepMark(SGLANG, MIXED, requests, tokens, requests, prefill, decode)
    if mode == "DECODE":
        tokens = fields.get("g_sq", requests)
        outputs = requests if tokens == requests else None
        return StepMark(
            SGLANG, DECODE, requests, tokens, outputs, None, _read_group_sums(fields, "g_", tokens)
        )
    if "DRAFT" in mode:
        return StepMark(SGLANG, DRAFT, requests, None, 0)
    if "VERIFY" in mode:
        return StepMark(SGLANG, DECODE, requests)
    if "EXTEND" in mode or "PREFILL" in mode:
        tokens = fields.get("toks")
        return StepMark(
            SGLANG, PREFILL, requests, tokens, requests, _read_group_sums(fields, "c_", tokens)
        )
    return StepMark(SGLANG, FORWARD, requests)


def _read_atom(match: re.Match[str]) -> StepMark:
    fields = _read_fields(match[2])
    requests, tokens = fields.get("bs"), fields.get("tok")
    sums = _read_group_sums(fields, "", tokens)
    if match[1] == PREFILL:
        return StepMark(ATOM, PREFILL, requests, tokens, requests, sums)
    outputs = None if "spec" in fields else requests
    phase = MIXED if fields.get("p") else DECODE
    return StepMark(ATOM, phase, requests, tokens, outputs, None, sums if phase == DECODE else None)


def _read_tensorrt(match: re.Match[str]) -> StepMark:
    prefills, tokens, decodes = (None if text is None else int(text) for text in match.groups())
    assert prefills is not None and decodes is not None
    computed = decodes if not prefills else None if tokens is None else tokens + decodes
    requests = prefills + decodes
    return StepMark(TENSORRT_LLM, _phase_of(prefills, decodes), requests, computed, requests)


def _read_plain(match: re.Match[str]) -> StepMark:
    return StepMark(None, PREFILL if match[1].lower() in ("prefill", "extend") else DECODE)


class MarkPattern(NamedTuple):
    """Pattern of one spelling of a mark, and the function that reads it."""

    regex: re.Pattern[str]
    read: Callable[[re.Match[str]], StepMark | None]
    source: str
    """File and function in which the engine writes the mark."""


_VLLM_WORKER = "vllm/v1/worker/gpu_worker.py, annotate_profile"
PATTERNS = (
    MarkPattern(
        re.compile(rf"^execute_(?:\d+_)?context_{_NUMBER}{_GROUP}_generation_{_NUMBER}{_GROUP}$"),
        _read_vllm,
        _VLLM_WORKER,
    ),
    MarkPattern(
        re.compile(rf"^execute_new_{_NUMBER}_cached_{_NUMBER}$"), _read_vllm_counts, _VLLM_WORKER
    ),
    MarkPattern(
        re.compile(r"^step\[([A-Z_0-9]+) (bs=\d+[^\]]*)\]$"),
        _read_sglang,
        "sglang/srt/model_executor/step_span_utils.py, build_step_span_name",
    ),
    MarkPattern(
        re.compile(r"^(prefill|decode)\[(bs=\d+.*)\]$"),
        _read_atom,
        "atom/model_engine/model_runner.py",
    ),
    MarkPattern(
        re.compile(
            rf"^\[Executor\] _forward_step(?: \d+)?: {_NUMBER} ctx reqs"
            rf"(?:, {_NUMBER} ctx tokens)?, {_NUMBER} gen reqs"
        ),
        _read_tensorrt,
        "tensorrt_llm/_torch/pyexecutor/py_executor.py, _forward_step",
    ),
    MarkPattern(
        re.compile(rf"^execute_diffusion_{_NUMBER}_(\d+x\d+)$"),
        lambda match: StepMark(XDIT, IMAGE, int(match[1])),
        "xfuser/runner.py",
    ),
)
PLAIN = (
    MarkPattern(
        re.compile(r"^(?:v2_)?gpu_model_runner: forward$"),
        lambda _: StepMark(VLLM, FORWARD),
        "vllm/v1/worker/gpu_model_runner.py, VLLM_CUSTOM_SCOPES_FOR_PROFILING=1",
    ),
    MarkPattern(
        re.compile(r"(?i)^(prefill|extend|decode)(?:[ _-]?(?:step|token|iteration))?[ _#:-]*\d*$"),
        _read_plain,
        "a range of the program's own",
    ),
)
"""Patterns with less information, tried if no other pattern matches."""


def parse_mark(name: str, patterns: tuple[MarkPattern, ...] = PATTERNS) -> StepMark | None:
    """Read a name as the mark of an engine, or return ``None`` if it is not a mark."""
    for pattern in patterns:
        match = pattern.regex.search(name)
        if match is not None:
            return pattern.read(match)
    return None


def engine_marks(trace: Trace) -> tuple[pl.DataFrame, list[StepMark]]:
    """Find the marks of an engine's steps on the thread of the first mark: ``name``, ``ts``,
    ``dur`` (ns), in order of time, and the content of each mark. Of nested marks the innermost
    counts, with the sums of the mark around it. Empty if there are none."""
    ranges = trace.cpu.filter(pl.col("kind") == "annotation")
    for patterns in (PATTERNS, PLAIN):
        unique = ranges["name"].unique().cast(pl.String).drop_nulls()
        mark_of_name = {
            name: mark for name in unique if (mark := parse_mark(name, patterns)) is not None
        }
        if not mark_of_name:
            continue
        rows = ranges.filter(pl.col("name").cast(pl.String).is_in(list(mark_of_name))).sort(
            "ts", "depth"
        )
        rows = rows.filter(pl.col("thread") == rows["thread"][0])
        rows = rows.select(pl.col("name").cast(pl.String), "ts", "dur")
        marks = [mark_of_name[name] for name in rows["name"]]
        if patterns is PLAIN and not (marks[0].engine or _contain_work(trace, rows)):
            continue
        return _keep_innermost(rows, marks)
    return ranges.select(pl.col("name").cast(pl.String), "ts", "dur").clear(), []


def _keep_innermost(
    rows: pl.DataFrame, marks: list[StepMark]
) -> tuple[pl.DataFrame, list[StepMark]]:
    end = (rows["ts"] + rows["dur"]).to_list()
    ts = rows["ts"].to_list()
    is_outer = [start < mark_end for start, mark_end in zip(ts[1:], end, strict=False)] + [False]
    indices: list[int] = []
    result: list[StepMark] = []
    outer_mark: StepMark | None = None
    for index, mark in enumerate(marks):
        if is_outer[index]:
            outer_mark = mark
            continue
        if outer_mark is not None and (outer_mark.phase, outer_mark.requests) == (
            mark.phase,
            mark.requests,
        ):
            mark = mark._replace(
                prefill=mark.prefill or outer_mark.prefill, decode=mark.decode or outer_mark.decode
            )
        outer_mark = None
        indices.append(index)
        result.append(mark)
    return rows[indices], result


def _contain_work(trace: Trace, rows: pl.DataFrame) -> bool:
    """Return whether these ranges contain nearly all work: a ``decode`` may be of a video."""
    spans = intervals_of(rows)
    gpu, cpu = trace.gpu, trace.cpu
    if gpu.is_empty():
        work = cpu.filter((pl.col("kind") == "op") & (pl.col("depth") == pl.col("depth").min()))
        ts, dur = work["ts"].to_numpy(), work["dur"].to_numpy()
        return bool(covered_length(ts, ts + dur, spans).sum() >= _MIN_WORK_SHARE * dur.sum() > 0)
    launched = gpu.filter(pl.col("launch").is_not_null())
    ts = cpu["ts"].gather(launched["launch"]).to_numpy()
    is_inside = covered_length(ts, ts + 1, spans) > 0
    dur = launched["dur"].to_numpy()
    return bool(dur[is_inside].sum() >= _MIN_WORK_SHARE * dur.sum() > 0)
