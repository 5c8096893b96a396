"""Marks that inference engines put around a step, and the phase, requests and tokens in them.

One entry of ``PATTERNS`` a spelling, with where the engine writes it. A mark may carry sums over
its requests: ``sq`` of new tokens (queries), ``sk`` of tokens attended to (keys), ``sqsq`` and
``sqsk`` of their squares and products."""

import re
from collections.abc import Callable
from typing import NamedTuple

import polars as pl

from advisor.core.intervals import covered_length, union
from advisor.core.trace import Trace

VLLM, SGLANG, TENSORRT_LLM, ATOM, XDIT = "vllm", "sglang", "tensorrt-llm", "atom", "xdit"
TRANSFORMERS = "transformers"
PREFILL, DECODE, MIXED, DRAFT = "prefill", "decode", "mixed", "draft"
NO_CACHE = "decode, no KV cache"
"""Phase of passes that compute the whole sequence again for each new token."""
IMAGE, FORWARD = "image", "forward"
LAUNCHED_INSIDE = 0.9
"""Share of the device's time that ranges called ``prefill`` or ``decode`` must hold to be steps.
Without a device, share of the operators' time."""


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
    """Name of the engine; ``None``: a range of the user's own."""
    phase: str
    """Phase: ``prefill``, ``decode``, ``mixed``, ``draft``, ``image`` (a whole picture);
    ``forward``: not recorded."""
    requests: int | None = None
    tokens: int | None = None
    """New tokens that are computed; ``None``: not recorded."""
    outputs: int | None = None
    """Tokens that come out; ``None``: not recorded, as where drafts may be rejected."""
    prefill: Sums | None = None
    decode: Sums | None = None


def _phase(prefills: int, decodes: int) -> str:
    return MIXED if prefills and decodes else PREFILL if prefills else DECODE


_N = r"(\d{1,15})"
"""Pattern of a number: longer ones are damage."""
_GROUP = rf"\((?:sq{_N}sk{_N}sqsq{_N}sqsk{_N}|{_N}(?:_{_N})?)\)"


def _sums(values: tuple[str | None, ...]) -> tuple[int, Sums | None]:
    """Return the new tokens of a group of ``_GROUP``, and its sums. An older vLLM writes the tokens
    with the sum of their squares, which are prompts from their beginning."""
    if values[0] is not None:
        q, k, qq, qk = (int(value or 0) for value in values[:4])
        return q, Sums(q, k, qq, qk)
    q = int(values[4] or 0)
    return q, None if values[5] is None else Sums(q, q, int(values[5]), int(values[5]))


def _vllm(match: re.Match[str]) -> StepMark:
    groups = match.groups()
    prefills, decodes = int(groups[0]), int(groups[7])
    context, prefill = _sums(groups[1:7])
    generation, decode = _sums(groups[8:14])
    plain = generation in (0, decodes)  # more tokens than requests: drafts to be verified
    return StepMark(
        VLLM,
        _phase(prefills, decodes),
        prefills + decodes,
        context + generation,
        prefills + decodes if plain else None,
        prefill if prefills else None,
        decode if decodes else None,
    )


def _vllm_counts(match: re.Match[str]) -> StepMark:
    new, cached = map(int, match.groups())
    return StepMark(VLLM, _phase(new, cached), new + cached, None if new else cached, new + cached)


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(rf"(\w+)={_N}\b", text)}


def _group(fields: dict[str, int], prefix: str, tokens: int | None) -> Sums | None:
    k, qq, qk = (fields.get(f"{prefix}{name}") for name in ("sk", "sqsq", "sqsk"))
    q = fields.get(f"{prefix}sq", tokens)
    if q is None or k is None or qq is None or qk is None:
        return None
    return Sums(q, k, qq, qk)


def _sglang(match: re.Match[str]) -> StepMark | None:
    mode, fields = match[1], _fields(match[2])
    requests = fields.get("bs")
    if mode == "IDLE":
        return None
    if mode == "MIXED":
        context, generation = fields.get("c_sq"), fields.get("g_sq")
        tokens = None if context is None or generation is None else context + generation
        prefill, decode = _group(fields, "c_", context), _group(fields, "g_", generation)
        return StepMark(SGLANG, MIXED, requests, tokens, requests, prefill, decode)
    if mode == "DECODE":
        tokens = fields.get("g_sq", requests)
        outputs = requests if tokens == requests else None
        return StepMark(
            SGLANG, DECODE, requests, tokens, outputs, None, _group(fields, "g_", tokens)
        )
    if "DRAFT" in mode:
        return StepMark(SGLANG, DRAFT, requests, None, 0)
    if "VERIFY" in mode:
        return StepMark(SGLANG, DECODE, requests)
    if "EXTEND" in mode or "PREFILL" in mode:
        tokens = fields.get("toks")
        return StepMark(SGLANG, PREFILL, requests, tokens, requests, _group(fields, "c_", tokens))
    return StepMark(SGLANG, FORWARD, requests)


def _atom(match: re.Match[str]) -> StepMark:
    fields = _fields(match[2])
    requests, tokens = fields.get("bs"), fields.get("tok")
    sums = _group(fields, "", tokens)
    if match[1] == PREFILL:
        return StepMark(ATOM, PREFILL, requests, tokens, requests, sums)
    outputs = None if "spec" in fields else requests
    phase = MIXED if fields.get("p") else DECODE
    return StepMark(ATOM, phase, requests, tokens, outputs, None, sums if phase == DECODE else None)


def _tensorrt(match: re.Match[str]) -> StepMark:
    prefills, tokens, decodes = (None if text is None else int(text) for text in match.groups())
    assert prefills is not None and decodes is not None
    computed = decodes if not prefills else None if tokens is None else tokens + decodes
    requests = prefills + decodes
    return StepMark(TENSORRT_LLM, _phase(prefills, decodes), requests, computed, requests)


def _own(match: re.Match[str]) -> StepMark:
    return StepMark(None, PREFILL if match[1].lower() in ("prefill", "extend") else DECODE)


class MarkPattern(NamedTuple):
    """Pattern of one spelling of a mark, and the function that reads it."""

    regex: re.Pattern[str]
    read: Callable[[re.Match[str]], StepMark | None]
    source: str
    """File and function in which the engine writes it."""


_VLLM_WORKER = "vllm/v1/worker/gpu_worker.py, annotate_profile"
PATTERNS = (
    MarkPattern(
        re.compile(rf"^execute_(?:\d+_)?context_{_N}{_GROUP}_generation_{_N}{_GROUP}$"),
        _vllm,
        _VLLM_WORKER,
    ),
    MarkPattern(re.compile(rf"^execute_new_{_N}_cached_{_N}$"), _vllm_counts, _VLLM_WORKER),
    MarkPattern(
        re.compile(r"^step\[([A-Z_0-9]+) (bs=\d+[^\]]*)\]$"),
        _sglang,
        "sglang/srt/model_executor/step_span_utils.py, build_step_span_name",
    ),
    MarkPattern(
        re.compile(r"^(prefill|decode)\[(bs=\d+.*)\]$"), _atom, "atom/model_engine/model_runner.py"
    ),
    MarkPattern(
        re.compile(
            rf"^\[Executor\] _forward_step(?: \d+)?: {_N} ctx reqs(?:, {_N} ctx tokens)?, "
            rf"{_N} gen reqs"
        ),
        _tensorrt,
        "tensorrt_llm/_torch/pyexecutor/py_executor.py, _forward_step",
    ),
    MarkPattern(
        re.compile(rf"^execute_diffusion_{_N}_(\d+x\d+)$"),
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
        _own,
        "a range of the program's own",
    ),
)
"""Patterns tried where none of the others matches: they tell less."""


def parse_mark(name: str, patterns: tuple[MarkPattern, ...] = PATTERNS) -> StepMark | None:
    """Read a name as the mark of an engine; ``None``: it is none."""
    for pattern in patterns:
        match = pattern.regex.search(name)
        if match is not None:
            return pattern.read(match)
    return None


def engine_marks(trace: Trace) -> tuple[pl.DataFrame, list[StepMark]]:
    """Find the marks of an engine's steps on the thread that has the first of them: ``name``,
    ``ts``, ``dur`` (ns), in time's order, and what each tells. Of marks inside each other the
    innermost counts, with the sums of the one around it. Empty: there are none."""
    ranges = trace.cpu.filter(pl.col("kind") == "annotation")
    for patterns in (PATTERNS, PLAIN):
        unique = ranges["name"].unique().cast(pl.String).drop_nulls()
        read = {name: mark for name in unique if (mark := parse_mark(name, patterns)) is not None}
        if not read:
            continue
        rows = ranges.filter(pl.col("name").cast(pl.String).is_in(list(read))).sort("ts", "depth")
        rows = rows.filter(pl.col("thread") == rows["thread"][0])
        rows = rows.select(pl.col("name").cast(pl.String), "ts", "dur")
        described = [read[name] for name in rows["name"]]
        if patterns is PLAIN and not (described[0].engine or _holds_the_work(trace, rows)):
            continue
        return _innermost(rows, described)
    return ranges.select(pl.col("name").cast(pl.String), "ts", "dur").clear(), []


def _innermost(rows: pl.DataFrame, marks: list[StepMark]) -> tuple[pl.DataFrame, list[StepMark]]:
    end = (rows["ts"] + rows["dur"]).to_list()
    ts = rows["ts"].to_list()
    outer = [after < own_end for after, own_end in zip(ts[1:], end, strict=False)] + [False]
    kept: list[int] = []
    result: list[StepMark] = []
    around: StepMark | None = None
    for index, mark in enumerate(marks):
        if outer[index]:
            around = mark
            continue
        if around is not None and (around.phase, around.requests) == (mark.phase, mark.requests):
            mark = mark._replace(
                prefill=mark.prefill or around.prefill, decode=mark.decode or around.decode
            )
        around = None
        kept.append(index)
        result.append(mark)
    return rows[kept], result


def _holds_the_work(trace: Trace, rows: pl.DataFrame) -> bool:
    """Return whether ranges of such names hold nearly all work: ``decode`` may be a video's."""
    spans = union(rows["ts"].to_numpy(), (rows["ts"] + rows["dur"]).to_numpy())
    gpu, cpu = trace.gpu, trace.cpu
    if gpu.is_empty():
        work = cpu.filter((pl.col("kind") == "op") & (pl.col("depth") == pl.col("depth").min()))
        ts, dur = work["ts"].to_numpy(), work["dur"].to_numpy()
        return bool(covered_length(ts, ts + dur, spans).sum() >= LAUNCHED_INSIDE * dur.sum() > 0)
    launched = gpu.filter(pl.col("launch").is_not_null())
    ts = cpu["ts"].gather(launched["launch"]).to_numpy()
    inside = covered_length(ts, ts + 1, spans) > 0
    dur = launched["dur"].to_numpy()
    return bool(dur[inside].sum() >= LAUNCHED_INSIDE * dur.sum() > 0)
