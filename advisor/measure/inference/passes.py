"""Forward passes of a model that is not trained, with their device work: an engine's steps, else
calls of the outermost module, else what lies between two look-ups in the vocabulary.

Attention: with q new tokens of a request that attends to k tokens, causal, the i-th new token
attends to k - q + i, together qk - q(q - 1)/2 pairs, each of which takes 2 FLOPs for the score and
2 for the value, an element of a head (https://arxiv.org/abs/2205.14135, section 3.1). Keys and
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
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.launches import AHEAD_SHARE, analysed_device
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
MIN_CALLS = 3
"""Calls of one model, or look-ups in the vocabulary, that make a loop, at least."""
MIN_OPS_SHARE = 0.5
"""Share of the operators of the median pass below which the last one is cut off."""
MAX_INSTANCES = 2
"""Modules, at most, of the outermost class that takes most time: more are layers of a model that is
called piece by piece."""
ATTENTION = r"scaled_dot_product_|flash_attn.*forward|unified_attention|_attention_forward"
LOOKUP = "aten::embedding"
LEARNING = (
    r"^autograd::engine|Backward\d*$|^CompiledFunctionBackward|_backward(?:_|$)|^Optimizer\.|"
    r"entire_backward|^aten::_fused_(?:adam|sgd)|^aten::_foreach_addc"
)
"""Host rows of a backward pass or of an optimizer, as PyTorch names them. Kernels do not tell: a
transposed convolution runs those that are named after a gradient."""


@dataclass(frozen=True)
class ForwardPasses:
    """Forward passes. ``table``, in time's order: ``name``, ``ts``, ``end`` (ns, on the host);
    ``first``, ``last`` (ns, of the device work that the pass launched; null: none), ``ahead`` (ns
    that its first work waited for others; null: none)."""

    table: pl.DataFrame
    marks: list[StepMark]
    """Phase, requests and tokens of each pass, as far as known."""
    source: str
    """Source of the passes: ``engine``, ``module calls``, ``ProfilerStep`` or ``vocabulary
    look-ups``."""
    owner: Ints
    """Pass that launched each piece of work, aligned with ``trace.gpu``; -1: none."""

    @property
    def engine(self) -> str | None:
        """Engine that wrote the marks; ``None``: none did."""
        return next((mark.engine for mark in self.marks if mark.engine), None)

    @property
    def in_loop(self) -> NDArray[np.bool_]:
        """Whether each pass is a step of the loop: an engine's are, else the calls of the model
        that is called most often."""
        names = self.table["name"]
        if self.source == ENGINE or names.n_unique() == 1:
            return np.ones(self.table.height, dtype=np.bool_)
        return np.asarray((names == names.mode().sort()[0]).to_numpy())

    @property
    def loop(self) -> bool:
        """Whether the passes are the loop of the program: the same model again and again."""
        return int(self.in_loop.sum()) >= MIN_CALLS

    @cached_property
    def pass_intervals(self) -> tuple[Ints, Ints]:
        """Start and end of each pass, ns: of its device work, from the host's start on where the
        device waited for it; without device work the host's."""
        table = self.table
        first = table["first"].fill_null(table["ts"])
        last = table["last"].fill_null(table["end"])
        waits = table["ahead"].fill_null(0) >= AHEAD_SHARE * (last - first)
        start = table["ts"].zip_with(~waits & (table["ts"] < first), first)
        before = last.shift(1).fill_null(start)  # the device may still have worked for another
        start = start.zip_with(before <= start, pl.Series(np.minimum(before, first)))
        return start.to_numpy(), last.to_numpy()


def has_training_rows(trace: Trace) -> bool:
    """Return whether there are rows of a backward pass or of an optimizer."""
    cpu = trace.cpu  # frames tell nothing: ``get_backward_compatible_…``
    return bool((name_matches(cpu["name"], LEARNING) & (cpu["kind"] != "python")).any())


FRAMES = (
    (VLLM, r"(^|/)vllm/"),
    (SGLANG, r"(^|/)sglang/"),
    (TENSORRT_LLM, r"(^|/)tensorrt_llm/"),
    (XDIT, r"(^|/)xfuser/"),
    (TRANSFORMERS, r"(^|/)transformers/models/"),
)
"""Engine -> pattern of frames of its code; the first that is there counts."""


def find_engine(trace: Trace, passes: ForwardPasses | None) -> str | None:
    """Find the engine by its marks, else by frames where nothing trains; ``None``: unknown."""
    if passes is None or passes.engine:
        return None if passes is None else passes.engine
    cpu = trace.cpu
    frames = cpu.filter(cpu["kind"] == "python")["name"]
    return next((name for name, code in FRAMES if name_matches(frames, code).any()), None)


def find_passes(trace: Trace) -> ForwardPasses | None:
    """Find the passes; ``None``: nothing marks them, or the model learns."""
    rows, marks = engine_marks(trace)
    source = ENGINE
    if marks and all(mark.phase == IMAGE for mark in marks):
        inner = _module_calls(trace)  # its parts are of more use: encoders, steps, decoder
        marks = marks if inner.is_empty() else []
    if not marks:
        if trace.cpu.is_empty() or has_training_rows(trace):
            return None
        rows, source = _module_calls(trace), MODULES
        if rows.is_empty():
            rows, source = _between_lookups(trace)
        if rows.is_empty():
            return None
        marks = [StepMark(None, FORWARD)] * rows.height
    if any(mark.engine is None for mark in marks):
        marks = _from_shapes(trace, rows, marks)
    return _with_work(trace, rows, marks, source)


# -- where a pass begins and ends ------------------------------------------------------------------


def _module_calls(trace: Trace) -> pl.DataFrame:
    """Find calls of modules in no other module, by class. Empty: none of them is the model."""
    cpu = trace.cpu
    module = name_matches(cpu["name"], r"^nn\.Module: ") & (cpu["kind"] == "python")
    rows = cpu.with_row_index("row").filter(module & (pl.col("thread") == trace.main_thread))
    rows = rows.select(
        "ts", "dur", "depth", end=pl.col("ts") + pl.col("dur"), name=pl.col("name").cast(pl.String)
    )
    rows = rows.sort("ts", "depth")
    inside = rows["end"].cum_max().shift(1).fill_null(-1) > rows["ts"]
    wrapped = rows["name"].str.contains("OptimizedModule")
    inner = rows["name"].shift(-1).zip_with(inside.shift(-1).fill_null(False), rows["name"])
    rows = rows.with_columns(name=pl.when(wrapped).then(inner).otherwise(pl.col("name")))
    rows = rows.filter(~inside).with_columns(
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


def _lookups(trace: Trace) -> tuple[pl.DataFrame, list[_Lookup]]:
    """Find look-ups in the largest table that is looked up more than once, and their shapes."""
    cpu = trace.cpu
    rows = cpu.filter((cpu["name"].cast(pl.String) == LOOKUP) & cpu["inputs"].is_not_null())
    rows = rows.filter(pl.col("thread") == trace.main_thread).select("ts", "dur", "inputs")
    shapes = {row: _lookup(trace, row) for row in rows["inputs"].unique()}
    found = [shapes[row] for row in rows["inputs"]]
    sizes = [each.vocabulary for each in found if each is not None]
    if not sizes:
        return rows.clear(), []
    largest = max(sizes)
    kept = [each is not None and each.vocabulary == largest for each in found]
    return rows.filter(pl.Series(kept)), [e for e in found if e and e.vocabulary == largest]


def _inputs(trace: Trace, row: int) -> OpInputs:
    return OpInputs(*(str(text) for text in trace.inputs.select("dims", "types").row(row)))


def _lookup(trace: Trace, row: int) -> _Lookup | None:
    inputs = _inputs(trace, row)
    weight, indices = inputs.tensor(0), inputs.tensor(1)
    if weight is None or indices is None or len(weight.shape) != 2 or not indices.shape:
        return None
    return _Lookup(weight.shape[0], indices.shape)


def _between_lookups(trace: Trace) -> tuple[pl.DataFrame, str]:
    """Find the marked steps where each has one look-up, wherever in it; else what lies between two.
    What follows the last one may be cut off, and is left out then."""
    rows, _ = _lookups(trace)
    if rows.height < MIN_CALLS:
        return pl.DataFrame(schema={"name": pl.String, "ts": pl.Int64, "dur": pl.Int64}), LOOKUPS
    own = trace.cpu.filter(pl.col("thread") == trace.main_thread)
    marked = pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#")
    steps = own.filter((pl.col("kind") != "python") & marked).sort("ts")
    start = steps["ts"].to_numpy()
    end = start + steps["dur"].to_numpy()
    place = _place(rows["ts"].to_numpy(), start, end) if steps.height else start
    if steps.height and place.tolist() == list(range(steps.height)):
        return steps.select(pl.lit("pass").alias("name"), "ts", "dur"), STEPS
    ops = own.filter(pl.col("kind") == "op")
    last = int((ops["ts"] + ops["dur"]).max())  # type: ignore[arg-type]
    ends = rows["ts"].shift(-1).fill_null(last)
    counts = np.diff(np.searchsorted(np.sort(ops["ts"].to_numpy()), [*rows["ts"], last + 1]))
    if counts[-1] < MIN_OPS_SHARE * np.median(counts):
        rows, ends = rows[:-1], ends[:-1]
    return rows.select(pl.lit("pass").alias("name"), "ts", dur=ends - rows["ts"]), LOOKUPS


# -- what shapes tell of a pass --------------------------------------------------------------------


def _from_shapes(trace: Trace, rows: pl.DataFrame, marks: list[StepMark]) -> list[StepMark]:
    """Infer phase, requests and tokens of passes by shapes of look-ups and attention: a sequence
    with one new token decodes. Where none does, longer ones are prompts if attention is causal."""
    start = rows["ts"].to_numpy()
    end = start + rows["dur"].to_numpy()
    looked, found = _lookups(trace)
    place = _place(looked["ts"].to_numpy(), start, end)
    first: dict[int, tuple[int, ...]] = {}
    for index, lookup in zip(place.tolist(), found, strict=True):
        first.setdefault(index, lookup.shape)
    cpu = trace.cpu
    attention = cpu.filter(name_matches(cpu["name"], ATTENTION) & cpu["inputs"].is_not_null())
    queries = {row: _query(trace, row) for row in attention["inputs"].unique()}
    lengths: dict[int, set[tuple[int, int, bool]]] = {}
    for index, row in zip(
        _place(attention["ts"].to_numpy(), start, end).tolist(), attention["inputs"], strict=True
    ):
        query = queries[row]
        if query is not None and index >= 0:
            lengths.setdefault(index, set()).add(query)
    result = [
        _described(mark, first.get(index), lengths.get(index, set()))
        for index, mark in enumerate(marks)
    ]
    # a prompt alone is one if something decodes, or if the only model there is attends causally
    decodes = any(mark.phase in (DECODE, MIXED) for mark in result)
    alone = rows["name"].n_unique() == 1
    for index, (old, mark) in enumerate(zip(marks, result, strict=True)):
        causal = alone and any(causal for *_, causal in lengths.get(index, ()))
        if mark.phase == PREFILL != old.phase and not (decodes or causal):
            result[index] = mark._replace(phase=FORWARD)
        if not decodes:
            result[index] = result[index]._replace(outputs=old.outputs)
    for index in _growing(lengths, len(marks)):
        mark = result[index]
        result[index] = mark._replace(phase=NO_CACHE, outputs=marks[index].outputs or mark.requests)
    return result


def _growing(lengths: dict[int, set[tuple[int, int, bool]]], count: int) -> list[int]:
    """Find passes in a row whose sequences attend to themselves alone and are one token longer each
    time: they compute the whole sequence for one new token."""
    whole = [0] * count
    for index, seen in lengths.items():
        if len({(q, k) for q, k, _ in seen}) == 1:
            q, k, _ = next(iter(seen))
            whole[index] = q if q == k and q > 1 else 0
    result, run = [], [0]
    for index in range(1, count + 1):
        if index < count and whole[index - 1] and whole[index] == whole[index - 1] + 1:
            run.append(index)
            continue
        result += run if len(run) >= MIN_CALLS else []
        run = [index]
    return result


def _place(ts: Ints, start: Ints, end: Ints) -> Ints:
    """Return the pass that each instant lies in, -1: none."""
    place = np.searchsorted(start, ts, side="right") - 1
    inside = (place >= 0) & (ts < end[np.maximum(place, 0)])
    return np.where(inside, place, -1).astype(np.int64)


def _query(trace: Trace, row: int) -> tuple[int, int, bool] | None:
    """Return a sequence's new tokens, tokens attended to, and whether attention is causal."""
    inputs = _inputs(trace, row)
    query, key = inputs.tensor(0), inputs.tensor(1)
    if query is None or key is None or len(query.shape) != 4 or len(key.shape) != 4:
        return None
    text = str(trace.inputs["concrete"][row] or "")
    return query.shape[2], key.shape[2], '"True"' in text or "true" in text


def _described(
    mark: StepMark, looked: tuple[int, ...] | None, seen: set[tuple[int, int, bool]]
) -> StepMark:
    if looked is None:
        return mark  # no text: an image's attention tells nothing of prompts
    new = {q for q, k, _ in seen if k >= q}
    tokens = prod(looked)
    requests = looked[0] if len(looked) == 2 else None
    if requests is None and new and min(new) > tokens:
        return mark  # labels of images, and no tokens: attention has more rows than were looked up
    if requests and new and min(new) > looked[1]:
        tokens = requests * max(new)  # embedded elsewhere: the look-up is of the newest token
    if not new and len(looked) == 2:
        new = {looked[1]}
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


# -- the device work of a pass ---------------------------------------------------------------------


def _with_work(
    trace: Trace, rows: pl.DataFrame, marks: list[StepMark], source: str
) -> ForwardPasses:
    """Add the device work that each pass launched. Launches after a pass belong to it for as long
    as the pass itself took: sampling, and copies of tokens to the host."""
    gpu = trace.gpu
    start = rows["ts"].to_numpy()
    end = start + rows["dur"].to_numpy()
    owner = np.full(gpu.height, -1, dtype=np.int64)
    first = np.full(rows.height, -1, dtype=np.int64)
    last, ahead = first.copy(), first.copy()
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    device = analysed_device(trace)
    known = launch >= 0 if device is None else (launch >= 0) & (gpu["device"] == device).to_numpy()
    known = np.flatnonzero(known)
    if len(known):
        called = trace.cpu["ts"].to_numpy()[launch[known]]
        upto = np.minimum(end + (end - start), np.append(start[1:], np.iinfo(np.int64).max))
        owner[known] = _place(called, start, np.maximum(upto, end))
        ts, dur = gpu["ts"].to_numpy(), gpu["dur"].to_numpy()
        worked = np.flatnonzero(owner >= 0)
        which, index = np.unique(owner[worked], return_index=True)  # rows are in order of ts
        first[which] = ts[worked[index]]
        ahead[which] = first[which] - trace.cpu["ts"].to_numpy()[launch[worked[index]]]
        np.maximum.at(last, owner[worked], (ts + dur)[worked])
    table = rows.select("name", "ts", end=pl.Series(end)).with_columns(
        pl.Series(name, np.where(first >= 0, values, -1)).replace(-1, None)
        for name, values in (("first", first), ("last", last), ("ahead", ahead))
    )
    return ForwardPasses(table, marks, source, owner)


WINDOWED = r"[Ss]liding|[Cc]hunked|[Ww]indow|[Ll]ocal|[Ss]parse|[Tt]opk"
"""Kernels that attend to fewer than all tokens: to how many is not recorded."""
HELPERS = r"reduce|[Mm]erge|combine|metadata|prepare|quant"
NARROW = r"(?i)e4m3|e5m2|fp8|float8|f8_"
"""Kernels with keys and values in one byte, whatever the operator's inputs are in."""
LATENT = 576
"""Elements of a token's cache in DeepSeek's latent attention: 512 of keys and values and 64 that
carry positions (https://arxiv.org/abs/2412.19437, section 4.2)."""


class Heads(NamedTuple):
    """Heads of one attention operator: number and size."""

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
    ``None``: not recorded so."""
    inputs = trace.cpu["inputs"][row]
    if inputs is None:
        return None
    described = OpInputs(*(str(text) for text in trace.inputs.select("dims", "types").row(inputs)))
    query, key, value = (described.tensor(place) for place in range(3))
    if query is None or key is None or len(query.shape) != 3 or len(key.shape) not in (2, 3):
        return None
    wide = key.width
    if wide is None or query.shape[2] != key.shape[-1] or not query.shape[1]:
        return None
    keys = key.shape[1] if len(key.shape) == 3 else 1
    size = value.shape[-1] if value is not None and len(value.shape) == len(key.shape) else None
    return Heads(query.shape[1], keys, key.shape[-1], size or key.shape[-1], wide)


def count_pairs(sums: Sums) -> float:
    """Count pairs of a new token and one that it attends to, of all requests."""
    return sums.qk - (sums.qq - sums.q) / 2


def attention_cost(mark: StepMark, shape: Heads, *, narrow: bool) -> tuple[float, float] | None:
    """Count FLOPs and bytes of one attention operator in a step; ``None``: the mark has no sums."""
    kinds = [sums for sums in (mark.prefill, mark.decode) if sums is not None]
    if not kinds:
        return None
    flops = sum(2.0 * shape.queries * (shape.size + shape.value) * count_pairs(s) for s in kinds)
    cached = shape.size if shape.size == LATENT else shape.keys * (shape.size + shape.value)
    width = 1 if narrow else shape.width
    moved = sum(
        s.k * cached * width + s.q * shape.queries * (shape.size + shape.value) * shape.width
        for s in kinds
    )
    return flops, float(moved)


def with_attention(a: Analysis, measured: pl.DataFrame) -> pl.DataFrame:
    """Add FLOPs and bytes of attention that shapes alone do not tell to ``Analysis.kernels``. Where
    the bytes are more than the memory can deliver, the kernel reads less than all tokens, and
    nothing is known of it."""
    trace, passes = a.trace, a.passes
    if passes is None:
        return measured
    owner = passes.owner
    wanted = (
        (measured["family"] == "attention")
        & measured["moved"].is_null()
        & measured["op_row"].is_not_null()
    )
    rows = np.flatnonzero(wanted.fill_null(False).to_numpy() & (owner >= 0))
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
        place = trace.cpu["inputs"][op]
        if place not in shapes:
            shapes[place] = read_heads(trace, op)
        shape = shapes[place]
        if shape is None or re.search(f"{WINDOWED}|{HELPERS}", name):
            continue
        narrow = re.search(NARROW, name) is not None
        work = attention_cost(passes.marks[owner[row]], shape, narrow=narrow)
        if work is not None and work[1] * 1e9 <= bandwidth * max(ns, 1):
            flops[row], moved[row] = work
    return measured.with_columns(
        flops=pl.Series(flops).fill_nan(None), moved=pl.Series(moved).fill_nan(None)
    )
