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
from advisor.measure.device.shapes import OpInputs, Shape, Tensor
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
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
ATTENTION_PRODUCTS = frozenset(("aten::matmul", "aten::bmm", "aten::baddbmm"))
HEADS_LAST = frozenset(("FlashAttnFunc", "flash_attn::_flash_attn_forward"))
ATTENTION = r"^aten::_?scaled_dot_product_(?:\w*_)?attention(?:_for_cpu|_math)?$"
OTHER_OPS = exact_pattern({EXPAND, REPEAT, INTERLEAVE} | COPIES | ATTENTION_PRODUCTS | HEADS_LAST)
_MAX_CALLS = 200_000
MAX_BEHIND = 48
"""Number of the operators named here, after a copy, within which attention must read it."""
MAX_HEAD_SIZE = 256
"""Maximum head size of FlashAttention and cuDNN."""


class Repeat(NamedTuple):
    """A copy of keys or values in which each head is repeated."""

    rows: tuple[int, ...]
    """Rows of the operator that copies and of the ``expand`` before it."""
    shape: Shape
    """Shape of the copy: [batch, heads, tokens, head size]."""
    times: int
    """Number of query heads per head of keys."""


class ReadingOperator(NamedTuple):
    """An operator of attention that reads such copies."""

    row: int
    repeats: list[Repeat]
    queries: int
    product: bool
    """Whether it is one of the two products of hand-written attention."""
    ungrouped: bool
    """Whether no fused GPU kernel takes these inputs with grouped heads."""

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
    without groups. A decode loop then copies the whole cache for each token and layer. Attention
    reads these copies, which are several times as large as the cache.

    The rule finds copies of an expanded view ``[batch, heads, n, tokens, size]``, and
    ``repeat_interleave`` and ``repeat`` along the heads. Attention after it must read a tensor of
    exactly that shape, with as many query heads. It is scaled_dot_product_attention, or the two
    products of hand-written attention.

    The gain is the time of the copies. On a CPU the sums of their gradients are saved too; on a GPU
    the backward kernel still computes them. With one query token attention is bound by memory, and
    the fix reads each head of keys once, not once per query head. A copy moves one more head than
    attention reads of it. So the rule estimates the time of the bytes that attention saves at the
    copy's rate. They save at most their share of attention's time, at worst nothing."""

    id = "repeated-keys-values"
    subject = "attention"
    title = "Keys and values are copied for each query head of their group"
    found_in = ("recorded/grouped_heads.slow",)
    silent_in = SILENT_INPUTS
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
            "keys are the same. Any backend supports that. A mask [batch, 1, 1, tokens] stays as "
            "it is.",
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
            "instead, including a causal one. Do not pass enable_gqa=True here: GPUs then run the "
            "slow math kernel. In FP16 or BF16, without a mask, enable_gqa=True is better.",
            "code": "n = heads // kv_heads   # mask: [b or 1, 1, t, tokens]\n"
            "rows = q.reshape(b, kv_heads, n * t, d)\n"
            "y = F.scaled_dot_product_attention(\n"
            "    rows, k, v, attn_mask=mask.repeat(1, 1, n, 1))\n"
            "y = y.view(b, heads, t, d)",
            "assumptions": (
                "the mask is small compared with keys and values; at worst repeating it takes as "
                "long",
            ),
        },
        "transformers": {
            "fix": "Update transformers, and load the model with attn_implementation='sdpa' or "
            "'flash_attention_2': both take grouped keys and values as they are. With 'sdpa' and a "
            "mask it still repeats them for several tokens: leave the mask out if nothing is "
            "padded.",
            "code": "model = AutoModelForCausalLM.from_pretrained(\n"
            '    name, attn_implementation="flash_attention_2", dtype="bfloat16")',
        },
    }
    verify = "Profile again: attention reads keys with as many heads as the cache has."
    falsified_by = "code after the copy that changes it for each query head"
    assumptions = ("only attention reads the copies",)
    needs_shapes = True
    confidence = 0.9
    sampled_part = "forward"

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        readers = list(_find_readers(a))
        repeats = [repeat for reader in readers for repeat in reader.repeats]
        if len(repeats) < self.min_repeats:
            return
        copies = _copy_rows(readers)
        ns = time_of_operators(a, copies)
        backward = backward_operators(a, copies) if a.device_id is None else copies[:0]
        gradient_ns = time_of_operators(a, backward) if len(backward) else 0
        if ns + gradient_ns < self.min_share * a.span_ns:
            return
        amount_by_kind: dict[str, int] = defaultdict(int)
        for reader in readers:
            amount_by_kind[reader.kind] += sum(
                int(np.prod(repeat.shape)) for repeat in reader.repeats
            )
        kind = max(amount_by_kind, key=lambda name: amount_by_kind[name])
        largest = max(repeats, key=lambda repeat: int(np.prod(repeat.shape)))
        batch, heads, tokens, _ = largest.shape
        if runs_code_of(a, TRANSFORMERS):
            kind = "transformers"
        yield Finding(
            summary=(
                f"Keys and values of {t.count_noun(heads // largest.times, 'head')} are copied to "
                f"{heads}, up to {batch} x {tokens:,} tokens each time: "
                f"{of_step(a, ns + gradient_ns)}"
                f"{', with the sums of their gradients' if gradient_ns else ''}."
            ),
            evidence=[
                amount_per_step(a, "copies of keys and values", len(repeats), "count"),
                amount_per_step(a, "time of the copies and their backward pass", ns + gradient_ns),
                amount_per_step(a, "backward pass of the copies", gradient_ns),
                Evidence("query heads per head of keys", largest.times, "count"),
                self.compare_share(a, "copies and their backward pass", ns + gradient_ns),
            ],
            where=costliest_places(a, copies, top=1),
            edits=list(self._edits(a, readers, copies, ns, backward, gradient_ns)),
            **(self.case(kind) if kind else {}),
        )

    def _edits(
        self,
        a: Analysis,
        readers: list[ReadingOperator],
        copies: Rows,
        ns: int,
        backward: Rows,
        sums_ns: int,
    ) -> Iterator[Edit]:
        """Remove the copies, and the excess reads of attention with one query token."""
        certain_ns = time_of_operators(a, _copy_rows(r for r in readers if not r.ungrouped))
        yield scale_operators(a, copies, (ns, ns, certain_ns))
        if a.device_id is not None:
            yield _remove_host_calls(a, copies)
        if sums_ns:
            yield scale_operators(a, backward, (sums_ns, sums_ns, 0))
        expected = best = 0.0
        one_query = [reader for reader in readers if reader.queries == 1]
        for times in {reader.repeats[0].times for reader in one_query}:
            group = [reader for reader in one_query if reader.repeats[0].times == times]
            excess = time_of_operators(a, _sorted_rows(r.row for r in group)) * (1 - 1 / times)
            copy_ns = time_of_operators(a, _copy_rows(group))
            expected += min(excess, copy_ns * (times - 1) / (times + 1))
            best += excess
        if one_query:
            yield scale_operators(a, _sorted_rows(r.row for r in one_query), (expected, best, 0.0))

    @staticmethod
    def examples() -> Examples:
        few = "len(repeats) < self.min_repeats"
        return {
            "decoding on a GPU": _build_model(),
            "decoding on a CPU": _build_model(gpu=None),
            "prefill": _build_model(queries=512),
            "prefill with a mask": _build_model(queries=512, mask=[1, 1, 512, 512]),
            "attention by hand": _build_model(by_hand=True),
            "repeat_interleave": _build_model(copy=INTERLEAVE),
            "tokens before heads": _build_model(tokens_first=True),
            "repeat": _build_model(copy=REPEAT),
            "a copy without a repeat": (_build_model(times=1), few),
            "keys as they are": (_build_model(copy=""), few),
            "repeated for the batch": (_build_model(copy=INTERLEAVE, dim=0), few),
            "other heads than the queries'": (_build_model(heads=16), few),
            "little of the step": (_build_model(other_us=200_000), "min_share"),
        }


def _sorted_rows(rows: Iterable[int]) -> Rows:
    return np.array(sorted(set(rows)), dtype=np.int64)


def _copy_rows(readers: Iterable[ReadingOperator]) -> Rows:
    return _sorted_rows(
        row for reader in readers for repeat in reader.repeats for row in repeat.rows
    )


def _remove_host_calls(a: Analysis, rows: Rows) -> Edit:
    """Remove these operators' share of the host time of all calls with their names."""
    cpu = a.trace.cpu
    names = exact_pattern(cpu["name"].gather(rows).cast(pl.String).unique())
    all_calls = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], names).to_numpy()))
    removed_ns, all_ns = (float(cpu["dur"].gather(calls).sum()) for calls in (rows, all_calls))
    left = 1 - removed_ns / max(1.0, all_ns)
    return scale_edit(Select(on="host", kind=("op",), name=names), left, left, 1.0)


def _find_readers(a: Analysis) -> Iterator[ReadingOperator]:
    """Yield operators of attention in the analysed steps that read repeated keys or values."""
    cpu = a.trace.cpu
    is_candidate = (
        name_matches(cpu["name"], f"{ATTENTION}|{OTHER_OPS}") & cpu["inputs"].is_not_null()
    ).to_numpy()
    rows = rows_in_steps(a, np.flatnonzero(is_candidate))[:_MAX_CALLS]
    table = cpu.select("name", "thread", "ts", "dur", "inputs")[rows].with_columns(row=rows)
    table = table.sort("ts", "dur", descending=[False, True], maintain_order=True)
    inputs: dict[int, OpInputs] = {}
    threads: dict[int, _ThreadState] = defaultdict(_ThreadState)
    on_device = a.device_id is not None
    # a loop, because what an operator reads depends on the operators before it
    for name, thread, ts, dur, index, row in table.iter_rows():
        state = threads[thread]
        if ts < state.end:  # it is nested in the previous one
            continue
        state.end = ts + dur
        if index not in inputs:
            inputs[index] = inputs_at(a, index)
        reader = state.add(row, str(name), inputs[index], on_device=on_device)
        if reader is not None:
            yield reader


@dataclass
class _ThreadState:
    """State of a thread: its operators so far, in order."""

    end: int = 0
    """End of the previous operator, ns."""
    count: int = 0
    views: list[tuple[int, Shape]] = field(default_factory=list)
    """Recent calls of ``expand``: row, and shape of the input."""
    repeats: list[tuple[int, Repeat]] = field(default_factory=list)
    """Copies that nothing has read yet, each with the count at its call."""

    def add(self, row: int, name: str, x: OpInputs, *, on_device: bool) -> ReadingOperator | None:
        """Process the next operator; return it if it is attention that reads repeated copies."""
        self.count += 1
        self.repeats = [item for item in self.repeats if self.count - item[0] <= MAX_BEHIND]
        if name == EXPAND:
            data = x.tensor(0)
            if data is not None and len(data.shape) == 5:
                self.views = [*self.views[-3:], (row, data.shape)]
        elif name in COPIES or name in (REPEAT, INTERLEAVE):
            repeat = self._parse_repeat(row, name, x)
            if repeat is not None:
                self.repeats.append((self.count, repeat))
        elif name in ATTENTION_PRODUCTS:
            return self._match_product(row, name, x)
        else:
            return self._match_attention(row, name, x, on_device)
        return None

    def _parse_repeat(self, row: int, name: str, x: OpInputs) -> Repeat | None:
        data = x.tensor(0)
        shape = () if data is None else data.shape
        if name in COPIES:
            for view in self.views[::-1]:
                axis = _find_changed_dim(view[1], shape)
                if axis is not None and view[1][axis] == 1:
                    self.views.remove(view)
                    return _merge_repeat((view[0], row), shape, axis, shape[axis])
        elif name == INTERLEAVE:
            times, dim = x.argument(1), x.argument(2)
            if len(shape) == 4 and isinstance(times, int) and isinstance(dim, int):
                expanded = (*shape[: dim % 4 + 1], times, *shape[dim % 4 + 1 :])
                return _merge_repeat((row,), expanded, dim % 4 + 1, times)
        else:
            counts = x.integers(1) or []
            repeated_axes = [axis for axis, count in enumerate(counts) if count > 1]
            if (
                len(counts) == len(shape) == 5
                and len(repeated_axes) == 1
                and shape[repeated_axes[0]] == 1
            ):
                expanded = tuple(a * b for a, b in zip(shape, counts, strict=True))
                return _merge_repeat((row,), expanded, repeated_axes[0], counts[repeated_axes[0]])
        return None

    def _match_product(self, row: int, name: str, x: OpInputs) -> ReadingOperator | None:
        """Match a product of hand-written attention: of queries and keys, or of weights and
        values."""
        tensors = x.tensors[1:] if name == "aten::baddbmm" else x.tensors
        if len(tensors) < 2 or not len(tensors[0].shape) == len(tensors[1].shape) in (3, 4):
            return None
        a, b = tensors[0].shape, tensors[1].shape
        for item in self.repeats if a[:-2] == b[:-2] else ():
            *outer, tokens, size = item[1].shape
            outer_shape = tuple(outer) if len(b) == 4 else (outer[0] * outer[1],)
            if b[:-2] == outer_shape and sorted(b[-2:]) == sorted((tokens, size)):
                self.repeats.remove(item)
                return ReadingOperator(row, [item[1]], a[-2], product=True, ungrouped=False)
        return None

    def _match_attention(
        self, row: int, name: str, x: OpInputs, on_device: bool
    ) -> ReadingOperator | None:
        operands = [x.tensor(at) for at in range(3)]
        if any(item is None or len(item.shape) != 4 for item in operands):
            return None
        query, *key_shapes = (_to_heads_first(item, name) for item in operands if item is not None)
        matched = [
            item
            for item in self.repeats
            if item[1].shape in key_shapes and query[1] == item[1].shape[1]
        ]
        if not matched:
            return None
        self.repeats = [item for item in self.repeats if item not in matched]
        is_wide = operands[0] is not None and (operands[0].width or 0) > 2
        has_mask = name not in HEADS_LAST and x.tensor(3) is not None
        ungrouped = on_device and (is_wide or has_mask or query[3] > MAX_HEAD_SIZE)
        return ReadingOperator(
            row,
            [item[1] for item in matched[-2:]],
            query[2],
            product=False,
            ungrouped=ungrouped and query[2] > 1,
        )


def _find_changed_dim(before: Shape, after: Shape) -> int | None:
    """Return the only dimension in which two shapes differ, or ``None``."""
    if len(before) != len(after):
        return None
    axes = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if len({*sizes}) > 1]
    return axes[0] if len(axes) == 1 else None


def _merge_repeat(rows: tuple[int, ...], expanded: Shape, axis: int, times: int) -> Repeat | None:
    """Merge the repeated dimension into the heads before it, dimension 1 or 2 of the result.
    ``None`` for any other dimension."""
    if axis not in (2, 3) or times < 2:
        return None
    shape = (*expanded[: axis - 1], expanded[axis - 1] * times, *expanded[axis + 1 :])
    if axis == 3:
        shape = (shape[0], shape[2], shape[1], shape[3])
    return Repeat(rows, shape, times)


def _to_heads_first(tensor: Tensor, name: str) -> Shape:
    batch, first, second, size = tensor.shape
    return (batch, second, first, size) if name in HEADS_LAST else tensor.shape


def _build_model(
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
    other_us: float = 500,
) -> TraceBuilder:
    """Build steps of two layers: 8 heads of 2048 keys, repeated to 32, on 4 sequences."""
    b = TraceBuilder(gpu)
    half, tokens = "c10::BFloat16", 2048
    grouped, repeated = [4, 8, tokens, 128], [4, 8 * times, tokens, 128]
    if tokens_first:
        grouped = [4, tokens, 8, 128]
    query = [4, heads, queries, 128]
    kernel = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>"

    def repeat() -> None:
        axis = 3 if tokens_first else 2
        before = [*grouped[:axis], 1, *grouped[axis:]]
        after = [*grouped[:axis], times, *grouped[axis:]]
        if copy == INTERLEAVE:
            arguments = ["", str(times), str(dim), ""]
            types = [half, "Scalar", "Scalar", ""]
            b.compute(copy, 150, [grouped, [], [], []], types, kernel=kernel, concrete=arguments)
        elif copy == REPEAT:
            arguments = ["", "[1, 1, 4, 1, 1]"]
            b.compute(copy, 150, [before, []], [half, ""], kernel=kernel, concrete=arguments)
        elif copy:
            b.on_host(EXPAND, 2, [before, [], []], [half, "", "Scalar"])
            b.compute(copy, 150, [after, []], [half, ""], kernel=kernel)

    for _ in b.steps():
        for _ in range(2):
            b.compute("aten::linear", other_us, [[4, queries, 4096], [4096, 4096]], half)
            repeat()
            repeat()
            keys = repeated if copy else grouped
            if by_hand:
                transposed = [*keys[:2], keys[3], keys[2]]
                b.compute("aten::matmul", 100, [query, transposed], half)
                b.compute("aten::softmax", 10, [[*query[:3], tokens]], half)
                b.compute("aten::matmul", 100, [[*query[:3], tokens], keys], half)
                continue
            types = [half, half, half, half if mask else "", "Scalar", "Scalar", "", "Scalar"]
            shapes = [query, keys, keys, list(mask), [], [], [], []]
            name = "aten::scaled_dot_product_attention"
            b.compute(name, 200, shapes, types, kernel="void pytorch_flash::flash_fwd_kernel")
        b.sync()
    return b
