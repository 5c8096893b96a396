"""Steps of inference, forward passes of a model, with their device work: an engine's steps, else
calls of the outermost module, else the time between two look-ups in the vocabulary.

Attention: with q new tokens of a request that attends to k tokens, causal, the i-th new token
attends to k - q + i, in total qk - q(q - 1)/2 pairs, each of which takes 2 FLOPs for the score and
2 for the value per element of a head (https://arxiv.org/abs/2205.14135, section 3.1). Keys and
values are read once, queries and results once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.core.trace import Trace
from advisor.measure.device.shapes import read_inputs
from advisor.measure.host.launches import AHEAD_SHARE, analyzed_device
from advisor.measure.host.names import name_matches
from advisor.measure.inference.annotations import (
    DECODE,
    FORWARD,
    IMAGE,
    MIXED,
    NO_CACHE,
    PREFILL,
    SGLANG,
    TENSORRT_LLM,
    TRANSFORMERS,
    VLLM,
    XDIT,
    StepMark,
    Sums,
    engine_marks,
)

if TYPE_CHECKING:
    from advisor.measure import Analysis


ENGINE, MODULES, STEPS, LOOKUPS = "engine", "module calls", "ProfilerStep", "vocabulary look-ups"
_MIN_CALLS = 3
"""Minimum number of calls of one model, or look-ups in the vocabulary, that make a loop."""
MIN_OPS_SHARE = 0.5
"""Minimum share of the operators of the median step in a last step that is not cut off."""
MAX_INSTANCES = 2
"""Maximum number of modules of the outermost class that takes most time: more modules are layers of
a model that is called piece by piece."""
ATTENTION = r"scaled_dot_product_|flash_attn.*forward|unified_attention|_attention_forward"
LOOKUP = "aten::embedding"
TRAINING_ROWS = (
    r"^autograd::engine|Backward\d*$|^CompiledFunctionBackward|_backward(?:_|$)|^Optimizer\.|"
    r"entire_backward|^aten::_fused_(?:adam|sgd)|^aten::_foreach_addc"
)
"""Pattern of host rows of a backward pass or an optimizer, as PyTorch names them. Kernel names are
no evidence: a transposed convolution runs kernels that are named after a gradient."""


@dataclass(frozen=True)
class InferenceSteps:
    """Steps of inference. ``table``, in order of time: ``name``, ``ts``, ``end`` (ns, on the host);
    ``first``, ``last`` (ns, of the device work that the step launched; null if none), ``ahead`` (ns
    that its first work waited for other work; null if none)."""

    table: pl.DataFrame
    marks: list[StepMark]
    """Phase, requests and tokens of each step, if known."""
    source: str
    """Source of the steps: ``engine``, ``module calls``, ``ProfilerStep`` or ``vocabulary
    look-ups``."""
    owner: Ints
    """Step that launched each piece of work, aligned with ``trace.gpu``, or -1."""

    @property
    def engine(self) -> str | None:
        """Engine that wrote the marks, or ``None``."""
        return next((mark.engine for mark in self.marks if mark.engine), None)

    @property
    def in_loop(self) -> NDArray[np.bool_]:
        """Whether each step is one of the loop: all steps of an engine, else the calls of the
        model that is called most often."""
        names = self.table["name"]
        if self.source == ENGINE or names.n_unique() == 1:
            return np.ones(self.table.height, dtype=np.bool_)
        return np.asarray((names == names.mode().sort()[0]).to_numpy())

    @property
    def loop(self) -> bool:
        """Whether the steps are the loop of the program, which calls the same model repeatedly."""
        return int(self.in_loop.sum()) >= _MIN_CALLS

    @cached_property
    def step_intervals(self) -> tuple[Ints, Ints]:
        """Start and end of each step, ns: of its device work, or from the host's start if the
        device waited for it. Without device work, the host's start and end."""
        table = self.table
        first = table["first"].fill_null(table["ts"])
        last = table["last"].fill_null(table["end"])
        is_ahead = table["ahead"].fill_null(0) >= AHEAD_SHARE * (last - first)
        start = table["ts"].zip_with(~is_ahead & (table["ts"] < first), first)
        previous_end = last.shift(1).fill_null(
            start
        )  # the device may still have been busy with another step
        start = start.zip_with(previous_end <= start, pl.Series(np.minimum(previous_end, first)))
        return start.to_numpy(), last.to_numpy()


def has_training_rows(trace: Trace) -> bool:
    """Return whether there are rows of a backward pass or of an optimizer."""
    cpu = trace.cpu  # frames are no evidence: ``get_backward_compatible_…``
    return bool((name_matches(cpu["name"], TRAINING_ROWS) & (cpu["kind"] != "python")).any())


FRAMES = (
    (VLLM, r"(^|/)vllm/"),
    (SGLANG, r"(^|/)sglang/"),
    (TENSORRT_LLM, r"(^|/)tensorrt_llm/"),
    (XDIT, r"(^|/)xfuser/"),
    (TRANSFORMERS, r"(^|/)transformers/models/"),
)
"""Engine -> pattern of frames of its code; the first match counts."""


def find_engine(trace: Trace, inference_steps: InferenceSteps | None) -> str | None:
    """Find the engine by its marks, else by frames if nothing trains. ``None`` if unknown."""
    if inference_steps is None or inference_steps.engine:
        return None if inference_steps is None else inference_steps.engine
    cpu = trace.cpu
    frames = cpu.filter(cpu["kind"] == "python")["name"]
    return next((name for name, code in FRAMES if name_matches(frames, code).any()), None)


def find_inference_steps(trace: Trace) -> InferenceSteps | None:
    """Find the steps, or return ``None`` if nothing marks them, or the model is trained."""
    rows, marks = engine_marks(trace)
    source = ENGINE
    if marks and all(mark.phase == IMAGE for mark in marks):
        inner = _module_calls(trace)  # its parts are more useful: encoders, steps, decoder
        marks = marks if inner.is_empty() else []
    if not marks:
        if trace.cpu.is_empty() or has_training_rows(trace):
            return None
        rows, source = _module_calls(trace), MODULES
        if rows.is_empty():
            rows, source = _find_lookup_steps(trace)
        if rows.is_empty():
            return None
        marks = [StepMark(None, FORWARD)] * rows.height
    if any(mark.engine is None for mark in marks):
        marks = _infer_from_shapes(trace, rows, marks)
    return _add_work(trace, rows, marks, source)


# -- where a step begins and ends ------------------------------------------------------------------


def _module_calls(trace: Trace) -> pl.DataFrame:
    """Find calls of outermost modules, by class. Empty if none of them is the model."""
    cpu = trace.cpu
    is_module = name_matches(cpu["name"], r"^nn\.Module: ") & (cpu["kind"] == "python")
    rows = cpu.with_row_index("row").filter(is_module & (pl.col("thread") == trace.main_thread))
    rows = rows.select(
        "ts", "dur", "depth", end=pl.col("ts") + pl.col("dur"), name=pl.col("name").cast(pl.String)
    )
    rows = rows.sort("ts", "depth")
    is_inside = rows["end"].cum_max().shift(1).fill_null(-1) > rows["ts"]
    is_wrapped = rows["name"].str.contains("OptimizedModule")
    inner = rows["name"].shift(-1).zip_with(is_inside.shift(-1).fill_null(False), rows["name"])
    rows = rows.with_columns(name=pl.when(is_wrapped).then(inner).otherwise(pl.col("name")))
    rows = rows.filter(~is_inside).with_columns(
        instance="name",
        name=pl.col("name").str.extract(r"^nn\.Module: (\w+?)(?:_\d+)?$").fill_null("module"),
    )
    classes = rows.group_by("name").agg(pl.col("instance").n_unique(), pl.col("dur").sum())
    classes = classes.sort("dur", "name")
    if rows.height and classes["instance"][-1] > MAX_INSTANCES:
        rows = rows.clear()
    return rows.select("name", "ts", "dur")


class _Lookup(NamedTuple):
    vocabulary: int
    shape: tuple[int, ...]


def _find_lookups(trace: Trace) -> tuple[pl.DataFrame, list[_Lookup]]:
    """Find look-ups in the largest table, and their shapes."""
    cpu = trace.cpu
    rows = cpu.filter((cpu["name"].cast(pl.String) == LOOKUP) & cpu["inputs"].is_not_null())
    rows = rows.filter(pl.col("thread") == trace.main_thread).select("ts", "dur", "inputs")
    shapes = {row: _read_lookup(trace, row) for row in rows["inputs"].unique()}
    lookups = [shapes[row] for row in rows["inputs"]]
    sizes = [lookup.vocabulary for lookup in lookups if lookup is not None]
    if not sizes:
        return rows.clear(), []
    largest = max(sizes)
    is_largest = [lookup is not None and lookup.vocabulary == largest for lookup in lookups]
    return rows.filter(pl.Series(is_largest)), [
        item for item in lookups if item and item.vocabulary == largest
    ]


def _read_lookup(trace: Trace, row: int) -> _Lookup | None:
    inputs = read_inputs(trace.inputs, row)
    weight, indices = inputs.tensor(0), inputs.tensor(1)
    if weight is None or indices is None or len(weight.shape) != 2 or not indices.shape:
        return None
    return _Lookup(weight.shape[0], indices.shape)


def _find_lookup_steps(trace: Trace) -> tuple[pl.DataFrame, str]:
    """Find the marked steps if each contains one look-up, else the times between two look-ups. The
    step after the last look-up is left out if it is cut off."""
    rows, _ = _find_lookups(trace)
    if rows.height < _MIN_CALLS:
        return pl.DataFrame(schema={"name": pl.String, "ts": pl.Int64, "dur": pl.Int64}), LOOKUPS
    main_rows = trace.cpu.filter(pl.col("thread") == trace.main_thread)
    is_marked = pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#")
    steps = main_rows.filter((pl.col("kind") != "python") & is_marked).sort("ts")
    start = steps["ts"].to_numpy()
    end = start + steps["dur"].to_numpy()
    step_index = _find_step(rows["ts"].to_numpy(), start, end) if steps.height else start
    if steps.height and step_index.tolist() == list(range(steps.height)):
        return steps.select(pl.lit("pass").alias("name"), "ts", "dur"), STEPS
    ops = main_rows.filter(pl.col("kind") == "op")
    last_end = int((ops["ts"] + ops["dur"]).max())  # type: ignore[arg-type]
    ends = rows["ts"].shift(-1).fill_null(last_end)
    counts = np.diff(np.searchsorted(np.sort(ops["ts"].to_numpy()), [*rows["ts"], last_end + 1]))
    if counts[-1] < MIN_OPS_SHARE * np.median(counts):
        rows, ends = rows[:-1], ends[:-1]
    return rows.select(pl.lit("pass").alias("name"), "ts", dur=ends - rows["ts"]), LOOKUPS


# -- steps from shapes ---------------------------------------------------------------------


def _infer_from_shapes(trace: Trace, rows: pl.DataFrame, marks: list[StepMark]) -> list[StepMark]:
    """Infer phase, requests and tokens of steps from shapes of look-ups and attention. A sequence
    with one new token decodes. If none does, longer ones are prompts if attention is causal."""
    start = rows["ts"].to_numpy()
    end = start + rows["dur"].to_numpy()
    lookup_rows, lookup_shapes = _find_lookups(trace)
    step_index = _find_step(lookup_rows["ts"].to_numpy(), start, end)
    first_shape: dict[int, tuple[int, ...]] = {}
    for index, lookup in zip(step_index.tolist(), lookup_shapes, strict=True):
        first_shape.setdefault(index, lookup.shape)
    cpu = trace.cpu
    attention = cpu.filter(name_matches(cpu["name"], ATTENTION) & cpu["inputs"].is_not_null())
    queries = {row: _read_query(trace, row) for row in attention["inputs"].unique()}
    lengths: dict[int, set[tuple[int, int, bool]]] = {}
    for index, row in zip(
        _find_step(attention["ts"].to_numpy(), start, end).tolist(),
        attention["inputs"],
        strict=True,
    ):
        query = queries[row]
        if query is not None and index >= 0:
            lengths.setdefault(index, set()).add(query)
    result = [
        _describe_mark(mark, first_shape.get(index), lengths.get(index, set()))
        for index, mark in enumerate(marks)
    ]
    # a longer sequence is a prompt if something decodes, or if the only model attends causally
    decodes = any(mark.phase in (DECODE, MIXED) for mark in result)
    is_only_model = rows["name"].n_unique() == 1
    for index, (previous, mark) in enumerate(zip(marks, result, strict=True)):
        causal = is_only_model and any(causal for *_, causal in lengths.get(index, ()))
        if mark.phase == PREFILL != previous.phase and not (decodes or causal):
            result[index] = mark._replace(phase=FORWARD)
        if not decodes:
            result[index] = result[index]._replace(outputs=previous.outputs)
    for index in _find_growing(lengths, len(marks)):
        mark = result[index]
        result[index] = mark._replace(phase=NO_CACHE, outputs=marks[index].outputs or mark.requests)
    return result


def _find_growing(lengths: dict[int, set[tuple[int, int, bool]]], count: int) -> list[int]:
    """Find consecutive steps whose sequences attend only to themselves and are one token longer
    each time: they compute the complete sequence for one new token."""
    complete_lengths = [0] * count
    for index, queries in lengths.items():
        if len({(q, k) for q, k, _ in queries}) == 1:
            q, k, _ = next(iter(queries))
            complete_lengths[index] = q if q == k and q > 1 else 0
    result, run = [], [0]
    for index in range(1, count + 1):
        if (
            index < count
            and complete_lengths[index - 1]
            and complete_lengths[index] == complete_lengths[index - 1] + 1
        ):
            run.append(index)
            continue
        result += run if len(run) >= _MIN_CALLS else []
        run = [index]
    return result


def _find_step(ts: Ints, start: Ints, end: Ints) -> Ints:
    """Return the step that contains each instant, or -1."""
    index = np.searchsorted(start, ts, side="right") - 1
    is_inside = (index >= 0) & (ts < end[np.maximum(index, 0)])
    return np.where(is_inside, index, -1).astype(np.int64)


def _read_query(trace: Trace, row: int) -> tuple[int, int, bool] | None:
    """Return a sequence's new tokens, tokens attended to, and whether attention is causal."""
    inputs = read_inputs(trace.inputs, row)
    query, key = inputs.tensor(0), inputs.tensor(1)
    if query is None or key is None or len(query.shape) != 4 or len(key.shape) != 4:
        return None
    text = str(trace.inputs["concrete"][row] or "")
    return query.shape[2], key.shape[2], '"True"' in text or "true" in text


def _describe_mark(
    mark: StepMark, lookup_shape: tuple[int, ...] | None, queries: set[tuple[int, int, bool]]
) -> StepMark:
    if lookup_shape is None:
        return mark  # no text: an image's attention says nothing about prompts
    new = {q for q, k, _ in queries if k >= q}
    tokens = prod(lookup_shape)
    requests = lookup_shape[0] if len(lookup_shape) == 2 else None
    if requests is None and new and min(new) > tokens:
        return mark  # labels of images, not tokens: attention has more rows than were looked up
    if requests and new and min(new) > lookup_shape[1]:
        tokens = requests * max(new)  # embedded elsewhere: the look-up is for the newest token
    if not new and len(lookup_shape) == 2:
        new = {lookup_shape[1]}
    phase = mark.phase
    if phase == FORWARD and new:
        phase = MIXED if 1 in new and len(new) > 1 else DECODE if new == {1} else PREFILL
    if requests is None and phase == DECODE:
        requests = tokens
    outputs = requests if phase in (PREFILL, DECODE, MIXED) else None
    return mark._replace(
        phase=phase,
        requests=mark.requests or requests,
        tokens=mark.tokens or tokens,
        outputs=mark.outputs or outputs,
    )


# -- the device work of a step ---------------------------------------------------------------------


def _add_work(
    trace: Trace, rows: pl.DataFrame, marks: list[StepMark], source: str
) -> InferenceSteps:
    """Add the device work that each step launched. Later launches belong to the step too, for as
    long as the step itself took: sampling, and copies of tokens to the host."""
    gpu = trace.gpu
    start = rows["ts"].to_numpy()
    end = start + rows["dur"].to_numpy()
    owner = np.full(gpu.height, -1, dtype=np.int64)
    first_start = np.full(rows.height, -1, dtype=np.int64)
    last_end, ahead = first_start.copy(), first_start.copy()
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    device = analyzed_device(trace)
    is_launched = (
        launch >= 0 if device is None else (launch >= 0) & (gpu["device"] == device).to_numpy()
    )
    is_launched = np.flatnonzero(is_launched)
    if len(is_launched):
        call_ts = trace.cpu["ts"].to_numpy()[launch[is_launched]]
        until = np.minimum(end + (end - start), np.append(start[1:], np.iinfo(np.int64).max))
        owner[is_launched] = _find_step(call_ts, start, np.maximum(until, end))
        ts, dur = gpu["ts"].to_numpy(), gpu["dur"].to_numpy()
        owned_rows = np.flatnonzero(owner >= 0)
        step_index, first_index = np.unique(
            owner[owned_rows], return_index=True
        )  # rows are in order of ts
        first_start[step_index] = ts[owned_rows[first_index]]
        ahead[step_index] = (
            first_start[step_index] - trace.cpu["ts"].to_numpy()[launch[owned_rows[first_index]]]
        )
        np.maximum.at(last_end, owner[owned_rows], (ts + dur)[owned_rows])
    table = rows.select("name", "ts", end=pl.Series(end)).with_columns(
        pl.Series(name, np.where(first_start >= 0, values, -1)).replace(-1, None)
        for name, values in (("first", first_start), ("last", last_end), ("ahead", ahead))
    )
    return InferenceSteps(table, marks, source, owner)


WINDOWED = r"[Ss]liding|[Cc]hunked|[Ww]indow|[Ll]ocal|[Ss]parse|[Tt]opk"
"""Pattern of kernels that attend to only some tokens; how many is not recorded."""
HELPERS = r"reduce|[Mm]erge|combine|metadata|prepare|quant"
NARROW = r"(?i)e4m3|e5m2|fp8|float8|f8_"
"""Pattern of kernels with one-byte keys and values, whatever the type of the operator's inputs."""
LATENT = 576
"""Elements of a token's cache in DeepSeek's latent attention: 512 of keys and values and 64 of
positions (https://arxiv.org/abs/2412.19437, section 4.2)."""


class Heads(NamedTuple):
    """Number and size of the heads of one attention operator."""

    queries: int
    keys: int
    """Number of heads of keys and values."""
    size: int
    """Elements of a head of queries and keys."""
    value: int
    """Elements of a head of values."""
    width: int
    """Size of an element, bytes."""


def read_heads(trace: Trace, row: int) -> Heads | None:
    """Read the heads of an operator whose inputs are (tokens, heads, size): queries, keys, values.
    ``None`` if not recorded in this form."""
    inputs = trace.cpu["inputs"][row]
    if inputs is None:
        return None
    op_inputs = read_inputs(trace.inputs, inputs)
    query, key, value = (op_inputs.tensor(position) for position in range(3))
    if query is None or key is None or len(query.shape) != 3 or len(key.shape) not in (2, 3):
        return None
    width = key.width
    if width is None or query.shape[2] != key.shape[-1] or not query.shape[1]:
        return None
    keys = key.shape[1] if len(key.shape) == 3 else 1
    size = value.shape[-1] if value is not None and len(value.shape) == len(key.shape) else None
    return Heads(query.shape[1], keys, key.shape[-1], size or key.shape[-1], width)


def count_pairs(sums: Sums) -> float:
    """Count pairs of a new token and a token that it attends to, over all requests."""
    return sums.qk - (sums.qq - sums.q) / 2


def attention_cost(mark: StepMark, shape: Heads, *, narrow: bool) -> tuple[float, float] | None:
    """Count FLOPs and bytes of one attention operator in a step; ``None`` if the mark has no
    sums."""
    kinds = [sums for sums in (mark.prefill, mark.decode) if sums is not None]
    if not kinds:
        return None
    flops = sum(
        2.0 * shape.queries * (shape.size + shape.value) * count_pairs(request_sums)
        for request_sums in kinds
    )
    cached = shape.size if shape.size == LATENT else shape.keys * (shape.size + shape.value)
    width = 1 if narrow else shape.width
    moved = sum(
        request_sums.k * cached * width
        + request_sums.q * shape.queries * (shape.size + shape.value) * shape.width
        for request_sums in kinds
    )
    return flops, float(moved)


def with_attention(a: Analysis, measured: pl.DataFrame) -> pl.DataFrame:
    """Add FLOPs and bytes of attention that shapes alone do not give to ``Analysis.kernels``. If
    the bytes are more than the memory can deliver, the kernel reads only some tokens, and its work
    is unknown."""
    trace, inference_steps = a.trace, a.inference_steps
    if inference_steps is None:
        return measured
    owner = inference_steps.owner
    is_unknown = (
        (measured["family"] == "attention")
        & measured["moved"].is_null()
        & measured["op_row"].is_not_null()
    )
    rows = np.flatnonzero(is_unknown.fill_null(False).to_numpy() & (owner >= 0))
    if not len(rows):
        return measured
    flops = measured["flops"].fill_null(np.nan).to_numpy().astype(np.float64).copy()
    moved = measured["moved"].fill_null(np.nan).to_numpy().astype(np.float64).copy()
    dur = trace.gpu["dur"].gather(rows).to_list()
    bandwidth = float("inf") if a.hardware is None else a.hardware.bandwidth
    shapes: dict[int | None, Heads | None] = {}
    ops = measured["op_row"].gather(rows).to_list()
    texts = trace.gpu["name"].gather(rows).cast(pl.String).to_list()
    for row, op, name, ns in zip(rows.tolist(), ops, texts, dur, strict=True):
        inputs_row = trace.cpu["inputs"][op]
        if inputs_row not in shapes:
            shapes[inputs_row] = read_heads(trace, op)
        shape = shapes[inputs_row]
        if shape is None or re.search(f"{WINDOWED}|{HELPERS}", name):
            continue
        is_narrow = re.search(NARROW, name) is not None
        cost = attention_cost(inference_steps.marks[owner[row]], shape, narrow=is_narrow)
        if cost is not None and cost[1] * 1e9 <= bandwidth * max(ns, 1):
            flops[row], moved[row] = cost
    return measured.with_columns(
        flops=pl.Series(flops).fill_nan(None), moved=pl.Series(moved).fill_nan(None)
    )
