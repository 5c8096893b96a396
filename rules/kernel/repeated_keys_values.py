"""Keys and values of grouped-query attention that are copied for each query head."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, SILENT_TRACES, XPROF
from advisor.rules.support.common import (
    TRANSFORMERS,
    Rows,
    amount_per_step,
    backward_operators,
    costliest_places,
    of_step,
    runs_code_of,
    scale_edit,
)
from advisor.rules.support.kernel_work import exact_pattern, scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

EXPAND, REPEAT, INTERLEAVE = "aten::expand", "aten::repeat", "aten::repeat_interleave"
COPIES = frozenset(("aten::reshape", "aten::contiguous", "aten::clone", "aten::flatten"))
PRODUCTS = frozenset(("aten::matmul", "aten::bmm", "aten::baddbmm"))
HEADS_LAST = frozenset(("FlashAttnFunc", "flash_attn::_flash_attn_forward"))
ATTENTION = r"^aten::_?scaled_dot_product_(?:\w*_)?attention(?:_for_cpu|_math)?$"
OTHERS = exact_pattern({EXPAND, REPEAT, INTERLEAVE} | COPIES | PRODUCTS | HEADS_LAST)
MAX_CALLS = 200_000
MAX_BEHIND = 48
"""Operators behind a copy, of those named here, among which attention has to read it."""
MAX_HEAD_SIZE = 256
"""Head size up to which FlashAttention and cuDNN run."""
Shape = tuple[int, ...]


class Repeat(NamedTuple):
    """A copy of keys or values with each head several times."""

    rows: tuple[int, ...]
    """The operator that copies, and the ``expand`` before it."""
    shape: Shape
    """[batch, heads, tokens, head size] of the copy."""
    times: int
    """Query heads for each head of keys."""


class Reader(NamedTuple):
    """An operator of attention that reads such copies."""

    row: int
    repeats: list[Repeat]
    queries: int
    product: bool
    """Whether it is one of the two products, of which attention by hand is made."""
    ungrouped: bool
    """Whether no fused kernel of a GPU takes its inputs with grouped heads."""

    @property
    def kind(self) -> str:
        if self.product:
            return "two products"
        if self.queries == 1:
            return "one query"
        return "a mask, FP32 or large heads" if self.ungrouped else ""


class RepeatedKeysValues(Rule):
    """Grouped-query attention has fewer heads of keys and values than of queries. Code that repeats
    them for each query head (``repeat_kv``, ``repeat_interleave``) writes copies as large as
    without groups. In a decode loop it copies the whole cache for each token and layer. Attention
    then reads the copies, several times as many bytes as the cache has.

    Found are copies of a view ``[batch, heads, n, tokens, size]`` that was expanded, or of
    ``repeat_interleave`` and ``repeat`` along the heads. Attention behind has to read a tensor of
    just that shape, with as many query heads: scaled_dot_product_attention, or the two products of
    attention by hand.

    The gain is the time of the copies. On a CPU the sums of their gradients go too; on a GPU the
    backward kernel still computes them. With one query token attention is bound by memory, and the
    fix reads each head of keys once, not once per query head. A copy moves one more head than
    attention reads of it: the bytes that attention saves are taken at the copy's own rate. They
    save at most that share of attention's time, at worst nothing."""

    id = "repeated-keys-values"
    subject = "attention"
    title = "Keys and values are copied for each query head of their group"
    found_in: ClassVar[tuple[str, ...]] = ("recorded/grouped_heads.slow",)
    silent_in: ClassVar[tuple[str, ...]] = (
        "recorded/grouped_heads.cured",
        *CURED_RECORDINGS,
        *SILENT_TRACES,
    )
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
        "https://arxiv.org/abs/2305.13245",
    )

    min_share = Threshold(0.05, "of the step in these copies", XPROF)
    min_repeats = Threshold(2, "copies that attention reads: keys and values", CHOSEN)

    fix = (
        "Pass keys and values as they are, with enable_gqa=True (PyTorch 2.5 or later). On a GPU "
        "that needs FP16 or BF16 and no attn_mask; is_causal=True is fine. The flash_attn package "
        "takes grouped heads without an option."
    )
    code = (
        "# not k, v = repeat_kv(k, n), repeat_kv(v, n)\n"
        "y = F.scaled_dot_product_attention(\n"
        "    q, k, v, is_causal=True, enable_gqa=True)"
    )
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "one query": {
            "fix": "For one token, make the query heads of a group the rows of one query: their "
            "keys are the same. Any backend takes that. A mask [batch, 1, 1, tokens] stays as it "
            "is.",
            "code": "# q: [b, heads, 1, d]; k, v: [b, kv_heads, tokens, d], not repeated\n"
            "if q.size(2) == 1:\n"
            "    rows = q.reshape(b, kv_heads, heads // kv_heads, d)\n"
            "    y = F.scaled_dot_product_attention(rows, k, v)\n"
            "    y = y.reshape(b, heads, 1, d)",
        },
        "two products": {
            "fix": "Make the query heads of a group the rows of one query: their keys are the "
            "same. Both products then take keys and values as they are.",
            "code": "n = heads // kv_heads\n"
            "rows = q.reshape(b, kv_heads, n * t, d)\n"
            "scores = (rows @ k.transpose(-1, -2)).view(b, heads, t, -1)\n"
            "weights = (scores * d**-0.5 + mask).softmax(-1)\n"
            "y = weights.view(b, kv_heads, n * t, -1) @ v\n"
            "y = y.view(b, heads, t, d)",
        },
        "a mask, FP32 or large heads": {
            "fix": "Make the query heads of a group the rows of one query, and repeat the mask "
            "instead; a causal mask is one too. Do not pass enable_gqa=True here: GPUs run the "
            "slow math kernel then. In FP16 or BF16, without a mask, it is the better way.",
            "code": "n = heads // kv_heads   # mask: [b or 1, 1, t, tokens]\n"
            "rows = q.reshape(b, kv_heads, n * t, d)\n"
            "y = F.scaled_dot_product_attention(\n"
            "    rows, k, v, attn_mask=mask.repeat(1, 1, n, 1))\n"
            "y = y.view(b, heads, t, d)",
            "assumptions": (
                "the mask is small beside keys and values; at worst repeating it takes as long",
            ),
        },
        "transformers": {
            "fix": "Update transformers, and load the model with attn_implementation='sdpa' or "
            "'flash_attention_2': both take grouped keys and values as they are. With 'sdpa' a "
            "mask still makes it repeat them for several tokens: leave out a mask without padding.",
            "code": "model = AutoModelForCausalLM.from_pretrained(\n"
            '    name, attn_implementation="flash_attention_2", dtype="bfloat16")',
        },
    }
    verify = "Profile again: attention reads keys with as many heads as the cache has."
    falsified_by = "code behind the copy that changes it for each query head"
    assumptions = ("what reads the copies is attention alone",)
    confidence = 0.9
    sampled_part = "forward"

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or a.trace.inputs.is_empty():
            return
        readers = list(_readers(a))
        repeats = [one for reader in readers for one in reader.repeats]
        if len(repeats) < self.min_repeats:
            return
        copies = _copies(readers)
        ns = time_of_operators(a, copies)
        backward = backward_operators(a, copies) if a.device_id is None else copies[:0]
        gradient = time_of_operators(a, backward) if len(backward) else 0
        if ns + gradient < self.min_share * a.span_ns:
            return
        amount: dict[str, int] = defaultdict(int)
        for reader in readers:
            amount[reader.kind] += sum(int(np.prod(one.shape)) for one in reader.repeats)
        kind = max(amount, key=lambda each: amount[each])
        most = max(repeats, key=lambda one: int(np.prod(one.shape)))
        batch, heads, tokens, _ = most.shape
        if runs_code_of(a, TRANSFORMERS):
            kind = "transformers"
        yield Finding(
            summary=(
                f"Keys and values of {t.count_noun(heads // most.times, 'head')} are copied to "
                f"{heads}, up to {batch} x {tokens:,} tokens each time: {of_step(a, ns + gradient)}"
                f"{', with the sums of their gradients' if gradient else ''}."
            ),
            evidence=[
                amount_per_step(a, "copies", len(repeats), "count"),
                amount_per_step(a, "time of the copies and their backward pass", ns + gradient),
                amount_per_step(a, "backward pass of the copies", gradient),
                Evidence("query heads per head of keys", most.times, "count"),
                self.compare("share", (ns + gradient) / a.span_ns, "min_share", per=a.per),
            ],
            where=costliest_places(a, copies, top=1),
            edits=list(self._edits(a, readers, copies, ns, backward, gradient)),
            **(self.case(kind) if kind else {}),
        )

    def _edits(
        self, a: Analysis, readers: list[Reader], copies: Rows, ns: int, backward: Rows, sums: int
    ) -> Iterator[Edit]:
        """Remove the copies, and of attention with one query token what it reads too much."""
        sure = time_of_operators(a, _copies(r for r in readers if not r.ungrouped))
        yield scale_operators(a, copies, (ns, ns, sure))
        if a.device_id is not None:
            yield _scale_calls(a, copies)
        if sums:
            yield scale_operators(a, backward, (sums, sums, 0))
        expected = best = 0.0
        single = [reader for reader in readers if reader.queries == 1]
        for times in {reader.repeats[0].times for reader in single}:
            own = [reader for reader in single if reader.repeats[0].times == times]
            most = time_of_operators(a, _rows(r.row for r in own)) * (1 - 1 / times)
            copied = time_of_operators(a, _copies(own))
            expected += min(most, copied * (times - 1) / (times + 1))
            best += most
        if single:
            yield scale_operators(a, _rows(r.row for r in single), (expected, best, 0.0))

    @staticmethod
    def examples() -> Examples:
        few = "len(repeats) < self.min_repeats"
        return {
            "decoding on a GPU": _model(),
            "decoding on a CPU": _model(gpu=None),
            "prefill": _model(queries=512),
            "prefill with a mask": _model(queries=512, mask=[1, 1, 512, 512]),
            "attention by hand": _model(by_hand=True),
            "repeat_interleave": _model(copy=INTERLEAVE),
            "tokens before heads": _model(tokens_first=True),
            "repeat": _model(copy=REPEAT),
            "a copy without a repeat": (_model(times=1), few),
            "keys as they are": (_model(copy=""), few),
            "repeated for the batch": (_model(copy=INTERLEAVE, dim=0), few),
            "other heads than the queries'": (_model(heads=16), few),
            "little of the step": (_model(rest=200_000), "min_share"),
        }


def _rows(rows: Iterable[int]) -> Rows:
    return np.array(sorted(set(rows)), dtype=np.int64)


def _copies(readers: Iterable[Reader]) -> Rows:
    return _rows(row for reader in readers for one in reader.repeats for row in one.rows)


def _scale_calls(a: Analysis, rows: Rows) -> Edit:
    """Remove these operators from the host, of all with their names."""
    cpu = a.trace.cpu
    names = exact_pattern(cpu["name"].gather(rows).cast(pl.String).unique())
    every = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], names).to_numpy()))
    own, whole = (float(cpu["dur"].gather(each).sum()) for each in (rows, every))
    left = 1 - own / max(1.0, whole)
    return scale_edit(Select(on="host", kind=("op",), name=names), left, left, 1.0)


def _readers(a: Analysis) -> Iterator[Reader]:
    """Yield operators of attention in the analysed steps that read repeated keys or values."""
    cpu = a.trace.cpu
    named = (
        name_matches(cpu["name"], f"{ATTENTION}|{OTHERS}") & cpu["inputs"].is_not_null()
    ).to_numpy()
    rows = rows_in_steps(a, np.flatnonzero(named))[:MAX_CALLS]
    table = cpu.select("name", "thread", "ts", "dur", "inputs")[rows].with_columns(row=rows)
    table = table.sort("ts", "dur", descending=[False, True], maintain_order=True)
    inputs: dict[int, OpInputs] = {}
    threads: dict[int, _Thread] = defaultdict(_Thread)
    on_device = a.device_id is not None
    # a loop: what an operator reads depends on those before it
    for name, thread, ts, dur, index, row in table.iter_rows():
        own = threads[thread]
        if ts < own.end:  # it lies in the one before
            continue
        own.end = ts + dur
        if index not in inputs:
            inputs[index] = inputs_at(a, index)
        reader = own.add(row, str(name), inputs[index], on_device=on_device)
        if reader is not None:
            yield reader


@dataclass
class _Thread:
    """Operators of a thread, in order, up to now."""

    end: int = 0
    """End of the one before, ns."""
    count: int = 0
    views: list[tuple[int, Shape]] = field(default_factory=list)
    """Recent calls of ``expand``: row and shape before it."""
    repeats: list[tuple[int, Repeat]] = field(default_factory=list)
    """Copies that nothing has read yet, each with the count at its call."""

    def add(self, row: int, name: str, x: OpInputs, *, on_device: bool) -> Reader | None:
        """Take the next operator; return it if it is attention that reads such copies."""
        self.count += 1
        self.repeats = [one for one in self.repeats if self.count - one[0] <= MAX_BEHIND]
        if name == EXPAND:
            data = x.tensor(0)
            if data is not None and len(data.shape) == 5:
                self.views = [*self.views[-3:], (row, data.shape)]
        elif name in COPIES or name in (REPEAT, INTERLEAVE):
            repeat = self._repeat(row, name, x)
            if repeat is not None:
                self.repeats.append((self.count, repeat))
        elif name in PRODUCTS:
            return self._product(row, name, x)
        else:
            return self._attention(row, name, x, on_device)
        return None

    def _repeat(self, row: int, name: str, x: OpInputs) -> Repeat | None:
        data = x.tensor(0)
        shape = () if data is None else data.shape
        if name in COPIES:
            for view in self.views[::-1]:
                axis = _only_difference(view[1], shape)
                if axis is not None and view[1][axis] == 1:
                    self.views.remove(view)
                    return _merge((view[0], row), shape, axis, shape[axis])
        elif name == INTERLEAVE:
            times, dim = x.argument(1), x.argument(2)
            if len(shape) == 4 and isinstance(times, int) and isinstance(dim, int):
                whole = (*shape[: dim % 4 + 1], times, *shape[dim % 4 + 1 :])
                return _merge((row,), whole, dim % 4 + 1, times)
        else:
            counts = x.integers(1) or []
            many = [axis for axis, count in enumerate(counts) if count > 1]
            if len(counts) == len(shape) == 5 and len(many) == 1 and shape[many[0]] == 1:
                whole = tuple(a * b for a, b in zip(shape, counts, strict=True))
                return _merge((row,), whole, many[0], counts[many[0]])
        return None

    def _product(self, row: int, name: str, x: OpInputs) -> Reader | None:
        """Match a product of attention by hand: of queries and keys, or of weights and values."""
        tensors = x.tensors[1:] if name == "aten::baddbmm" else x.tensors
        if len(tensors) < 2 or not len(tensors[0].shape) == len(tensors[1].shape) in (3, 4):
            return None
        a, b = tensors[0].shape, tensors[1].shape
        for one in self.repeats if a[:-2] == b[:-2] else ():
            *outer, tokens, size = one[1].shape
            whole = tuple(outer) if len(b) == 4 else (outer[0] * outer[1],)
            if b[:-2] == whole and sorted(b[-2:]) == sorted((tokens, size)):
                self.repeats.remove(one)
                return Reader(row, [one[1]], a[-2], product=True, ungrouped=False)
        return None

    def _attention(self, row: int, name: str, x: OpInputs, on_device: bool) -> Reader | None:
        given = [x.tensor(at) for at in range(3)]
        if any(one is None or len(one.shape) != 4 for one in given):
            return None
        query, *read = (_heads_first(one, name) for one in given if one is not None)
        own = [one for one in self.repeats if one[1].shape in read and query[1] == one[1].shape[1]]
        if not own:
            return None
        self.repeats = [one for one in self.repeats if one not in own]
        wide = given[0] is not None and (given[0].width or 0) > 2
        masked = name not in HEADS_LAST and x.tensor(3) is not None
        ungrouped = on_device and (wide or masked or query[3] > MAX_HEAD_SIZE)
        return Reader(
            row,
            [one[1] for one in own[-2:]],
            query[2],
            product=False,
            ungrouped=ungrouped and query[2] > 1,
        )


def _only_difference(before: Shape, after: Shape) -> int | None:
    """Return the only dimension in which two shapes differ."""
    if len(before) != len(after):
        return None
    axes = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if len({*sizes}) > 1]
    return axes[0] if len(axes) == 1 else None


def _merge(rows: tuple[int, ...], whole: Shape, axis: int, times: int) -> Repeat | None:
    """Merge the repeated dimension into the heads before it, dimension 1 or 2 of the result;
    ``None``: it is another dimension."""
    if axis not in (2, 3) or times < 2:
        return None
    shape = (*whole[: axis - 1], whole[axis - 1] * times, *whole[axis + 1 :])
    if axis == 3:
        shape = (shape[0], shape[2], shape[1], shape[3])
    return Repeat(rows, shape, times)


def _heads_first(tensor: Tensor, name: str) -> Shape:
    batch, first, second, size = tensor.shape
    return (batch, second, first, size) if name in HEADS_LAST else tensor.shape


def _model(
    *,
    gpu: str | None = "A100",
    queries: int = 1,
    times: int = 4,
    heads: int = 32,
    copy: str = "aten::reshape",
    dim: int = 1,
    tokens_first: bool = False,
    by_hand: bool = False,
    mask: Sequence[int] = (),
    rest: float = 500,
) -> TraceBuilder:
    """Return steps of two layers: 8 heads of 2048 keys, repeated to 32, on 4 sequences."""
    b = TraceBuilder(gpu)
    half, tokens = "c10::BFloat16", 2048
    own, whole = [4, 8, tokens, 128], [4, 8 * times, tokens, 128]
    if tokens_first:
        own = [4, tokens, 8, 128]
    query = [4, heads, queries, 128]
    kernel = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>"

    def repeat() -> None:
        at = 3 if tokens_first else 2
        before = [*own[:at], 1, *own[at:]]
        after = [*own[:at], times, *own[at:]]
        if copy == INTERLEAVE:
            given = ["", str(times), str(dim), ""]
            types = [half, "Scalar", "Scalar", ""]
            b.compute(copy, 150, [own, [], [], []], types, kernel=kernel, concrete=given)
        elif copy == REPEAT:
            given = ["", "[1, 1, 4, 1, 1]"]
            b.compute(copy, 150, [before, []], [half, ""], kernel=kernel, concrete=given)
        elif copy:
            b.on_host(EXPAND, 2, [before, [], []], [half, "", "Scalar"])
            b.compute(copy, 150, [after, []], [half, ""], kernel=kernel)

    for _ in b.steps():
        for _ in range(2):
            b.compute("aten::linear", rest, [[4, queries, 4096], [4096, 4096]], half)
            repeat()
            repeat()
            keys = whole if copy else own
            if by_hand:
                turned = [*keys[:2], keys[3], keys[2]]
                b.compute("aten::matmul", 100, [query, turned], half)
                b.compute("aten::softmax", 10, [[*query[:3], tokens]], half)
                b.compute("aten::matmul", 100, [[*query[:3], tokens], keys], half)
                continue
            types = [half, half, half, half if mask else "", "Scalar", "Scalar", "", "Scalar"]
            shapes = [query, keys, keys, list(mask), [], [], [], []]
            name = "aten::scaled_dot_product_attention"
            b.compute(name, 200, shapes, types, kernel="void pytorch_flash::flash_fwd_kernel")
        b.sync()
    return b
