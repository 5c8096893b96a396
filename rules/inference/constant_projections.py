"""A loop that decodes tokens projects the same input again for each token."""

import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.intervals import intervals_of, union
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import MatrixProduct, parse_product
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    scale_edit,
    work_launched_in,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.testing import Examples, TraceBuilder

EMBEDDING = "aten::embedding"
CHOICE_OPS = frozenset(
    f"aten::{name}" for name in "argmax max topk sort multinomial softmax log_softmax".split()
)
"""Operators that choose a token by the scores of the vocabulary."""
LINEAR_OPS = frozenset(("aten::linear", "aten::matmul", "aten::addmm"))
PRODUCT_OPS = re.compile(r"^aten::(?:bmm|baddbmm|matmul)$|attention|attn")
"""Products of activations. The first operand is what the pass computes on, or a query."""
ENCODER_OPS = re.compile(r"^aten::(?:conv\w*|lstm|gru|rnn_\w+)$")
CONSTANT_OPS = re.compile(
    r"^aten::_?(?:\w*view\w*|\w*reshape\w*|transpose|swap\w+|movedim|permute|numpy_T|mT|adjoint|t"
    r"|\w*squeeze|(?:un)?flatten|ravel|expand\w*|repeat\w*|slice|select|narrow|\w*split\w*|chunk"
    r"|unbind|unfold|alias|detach|resolve_\w+|lift\w*|contiguous|clone|copy_|to|to_copy|type_as"
    r"|dropout|layer_norm|rms_norm)_?$"
)
"""Names of views, copies and normalisations, whose results are as constant as their input."""
COPIES = re.compile(r"^aten::(?:contiguous|clone|copy_|to|(?:layer|rms)_norm)$")
"""Names of those that take time."""
_MAX_CALLS = 200_000


Layers = list[tuple[int, tuple[int, ...]]]
"""Linear layers: rows of ``trace.cpu`` and sizes m, k, n."""


@dataclass
class Pass:
    """Work from one choice of a token to the next."""

    tokens: list[int] = field(default_factory=list)
    """Number of tokens that each embedding looks up."""
    computed: set[int] = field(default_factory=set)
    """Numbers of elements of the tensors that the pass computes on."""
    encoded: int = 0
    """Maximum rows of a convolution, a recurrent layer, or a linear layer on the pass's own
    activations."""
    layers: Layers = field(default_factory=list)
    """Linear layers on tensors that the pass does not compute."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Copies and normalisations: rows of ``trace.cpu`` and numbers of elements."""

    def constant_copies(self, layers: Layers) -> list[int]:
        """Return the rows of copies of what such layers read or make, keys beside values."""
        sizes = {part for _, (m, k, n) in layers for part in (m * k, m * n, m * n // 2)}
        return [row for row, elements in self.copies if elements in sizes - self.computed]


def _count_sizes(layers: Layers | None) -> Counter[tuple[int, ...]]:
    return Counter(size for _, size in layers or ())


class ConstantProjections(Rule):
    """A loop that decodes one token at a time projects an input that stays the same again for each
    token. Most often it is the encoder's output: text, sound or image, from which cross-attention
    makes keys and values. They do not change while a sequence is decoded. Made once for each
    sequence, they can be kept next to the cache of the decoder's own keys and values.

    A pass is the work between two choices of tokens: ``argmax``, ``topk`` or softmax over the
    vocabulary. It embeds one token per sequence with a table of that vocabulary. The rule counts
    linear layers with at least 8 times as many rows, in consecutive passes with the same layers.
    Their input must come from outside the pass: before them, nothing in it computes on a tensor of
    that size. So an encoder that runs for each token does not count. Nor does attention over data
    that comes with each step, where no token is chosen.

    The gain is their time except for the first of each sequence. Longer inputs than in the window
    gain more."""

    id = "constant-projections"
    title = "Each token projects an input again that does not change"
    found_in = ("recorded/picture_answers.slow",)
    silent_in = ("recorded/no_cache.cured", "recorded/embedded_prefix.cured", *CURED_RECORDINGS)
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://huggingface.co/docs/transformers/kv_cache",
        "https://huggingface.co/docs/transformers/internal/generation_utils",
    )

    min_share = Threshold(0.05, "of the step in these layers", XPROF)
    min_passes = Threshold(2, "passes in a row with the same layers", CHOSEN)
    min_rows = Threshold(8, "times as many rows as the pass has tokens", CHOSEN)
    remaining_share = Factor(
        0.05, "of the time remains: once per sequence of some 20 tokens", CHOSEN
    )
    worst_remaining_share = Factor(0.35, "of it, for sequences of three tokens", CHOSEN)

    fix = (
        "Project the input once, before the loop, and keep the results for all tokens: in "
        "cross-attention, keys and values of each layer. Where beams or sequences change, select "
        "them like the cache."
    )
    code = (
        "# before the loop, for each layer:\n"
        "cross = layer.cross_attn.k(memory), layer.cross_attn.v(memory)\n"
        "# in the loop, not k(memory), v(memory):\n"
        "x = x + layer.cross_attn(x, *cross)"
    )
    verify = "Record again: passes of one token have linear layers of few rows only."
    falsified_by = "an input that changes from token to token, such as a stream"
    assumptions = (
        "the input stays the same while a sequence is decoded",
        "inputs are as long as in the window: longer ones gain more",
    )
    needs_shapes = True
    confidence = 0.85
    sampled_part = "forward"

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or not a.forward_only:
            return
        passes = _split_passes(a)
        if not passes:
            return
        runs = self._find_runs(passes)
        longest_run = max((len(run) for run in runs), default=0)
        if longest_run < self.min_passes:
            return
        layers = [layer for run in runs for pass_layers in run for layer in pass_layers]
        layer_rows = {row for row, _ in layers}
        copies = [
            row
            for item in passes
            if not layer_rows.isdisjoint(row for row, _ in item.layers)
            for row in item.constant_copies([x for x in item.layers if x[0] in layer_rows])
        ]
        rows = np.array(sorted([*layer_rows, *copies]), dtype=np.int64)
        ts, dur = (a.trace.cpu[name].to_numpy()[rows] for name in ("ts", "dur"))
        ns = int(dur.sum()) if a.device_id is None else work_launched_in(a, union(ts, ts + dur))
        if ns < self.min_share * a.span_ns:
            return
        longest_pass = max((pass_layers for run in runs for pass_layers in run), key=len)
        yield Finding(
            summary=(
                f"For each token, {t.count_noun(len(longest_pass), 'linear layer')} on up to "
                f"{max(size[0] for _, size in layers):,} rows that stay the same"
                f"{', with norms and copies of these rows,' if copies else ''} take "
                f"{of_step(a, ns)}."
            ),
            evidence=[
                self.compare(
                    "passes in a row with the same layers", longest_run, "min_passes", "count"
                ),
                amount_per_step(a, "layers on constant rows", len(layers), "count"),
                amount_per_step(a, "time of the layers on constant rows", ns),
                self.compare_share(a, "time of the layers on constant rows", ns),
            ],
            where=costliest_places(a, rows, top=1),
            edits=self._build_edits(a, rows, ns),
        )

    def _list_layers(self, item: Pass, tokens: int) -> Layers | None:
        """Return a pass's layers on many rows, or ``None`` if it embeds or encodes more."""
        min_rows = self.min_rows * tokens
        if item.encoded >= min_rows or item.tokens not in ([], [tokens]):
            return None
        return [layer for layer in item.layers if layer[1][0] >= min_rows]

    def _find_runs(self, passes: list[Pass]) -> list[list[Layers]]:
        """Return the layers of passes in a row that embed equally many tokens, and have the same
        layers on many rows. At both ends of the window are parts of a pass, with some of the same
        layers."""
        runs: list[list[Layers]] = []
        signatures: list[tuple[int, Counter[tuple[int, ...]]]] = []
        previous: tuple[int, Counter[tuple[int, ...]]] | None = None
        for item in passes[1:-1]:
            layers = self._list_layers(item, sum(item.tokens))
            signature = (sum(item.tokens), _count_sizes(layers)) if layers and item.tokens else None
            if signature is not None:
                if signature != previous:
                    runs.append([])
                    signatures.append(signature)
                runs[-1].append(layers or [])
            previous = signature
        # in a sequence that is cut off, one pass is enough where others have the same layers
        proven = [s for s, run in zip(signatures, runs, strict=True) if len(run) >= self.min_passes]
        runs = [run for s, run in zip(signatures, runs, strict=True) if s in proven]
        for run, partial in zip((runs[:1], runs[-1:]), (passes[0], passes[-1]), strict=True):
            for pass_layers in run:
                tokens = next(item.tokens[0] for item in passes if pass_layers[0][0] in item.layers)
                layers = self._list_layers(partial, tokens)
                if layers and not _count_sizes(layers) - _count_sizes(pass_layers[0]):
                    pass_layers.append(layers)
        return runs

    def _build_edits(self, a: Analysis, rows: Rows, ns: int) -> list[Edit]:
        """Return edits that scale the operators of these names. Other rows keep their time."""
        cpu = a.trace.cpu
        pattern = exact_pattern(cpu["name"].gather(rows).cast(pl.String).unique())
        all_rows = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], pattern).to_numpy()))
        spans = intervals_of(cpu, all_rows)
        shares = {"host": int(cpu["dur"].to_numpy()[rows].sum()) / spans.total}
        if a.device_id is not None:
            shares["gpu"] = ns / max(1, work_launched_in(a, spans))
        edits = []
        for side, share in shares.items():
            select = (
                Select(on="gpu", under=pattern)
                if side == "gpu"
                else Select(on="host", kind=("op",), name=pattern)
            )
            factors = (self.remaining_share, 0.0, self.worst_remaining_share)
            edits.append(scale_edit(select, *(1 - share * (1 - factor) for factor in factors)))
        return edits

    @staticmethod
    def examples() -> Examples:
        few = "longest_run < self.min_passes"
        return {
            "cross-attention": _build_decoding(),
            "on a GPU": _build_decoding(gpu="A100"),
            "a recurrent decoder": _build_decoding(layers=1, scores="aten::tanh"),
            "whole sequences in one step": _build_decoding(passes=6),
            "keys and values that are kept": (_build_decoding(rows=0), few),
            "few rows": (_build_decoding(rows=64), few),
            "little of the step": (_build_decoding(rest=90_000), "min_share"),
            "one pass": (_build_decoding(steps=2), "min_passes"),
            "training": (_build_decoding(trains=True), "not a.forward_only"),
            "no token is chosen": (_build_decoding(chooses="aten::mean"), "not passes"),
            "ids of users": (_build_decoding(classes=12), "not passes"),
            "an encoder for each token": (_build_decoding(encoder="aten::gelu"), few),
            "attention among the rows": (_build_decoding(encoder=ATTENTION), few),
            "images for each token": (_build_decoding(encoder="aten::conv2d"), few),
            "a sequence without a cache": (_build_decoding(grows=True), few),
        }


def _split_passes(a: Analysis) -> list[Pass]:
    """Split the operators of the window into passes. Empty if no vocabulary is embedded and chosen
    from. The first and the last may be parts of a pass."""
    table = outermost_in_steps(a).drop_nulls("inputs").sort("ts").head(_MAX_CALLS)
    if not table["name"].is_in([EMBEDDING]).any():
        return []
    inputs_by_row = {at: inputs_at(a, at) for at in table["inputs"].unique().to_list()}
    calls = [
        (row, name, inputs_by_row[at])
        for row, name, at in table["row", "name", "inputs"].iter_rows()
    ]
    embedded = {_shape(x)[0] for _, op, x in calls if op == EMBEDDING and len(_shape(x)) == 2}
    scored = {_shape(x)[-1] for _, name, x in calls if name in CHOICE_OPS and _shape(x)}
    vocabulary = max(embedded & scored, default=0)
    passes, current = list[Pass](), Pass()
    for row, name, x in calls if vocabulary else ():
        if name not in CHOICE_OPS or _shape(x)[-1:] != (vocabulary,):
            _add_operator(current, row, name, x, vocabulary)
        elif current.tokens or not passes:
            passes.append(current)
            current = Pass()
    return [*passes, current] if passes else []


def _shape(x: OpInputs) -> tuple[int, ...]:
    tensor = x.tensor(0)
    return () if tensor is None else tensor.shape


def _is_projection(name: str, product: MatrixProduct) -> bool:
    """Return whether a product is of data and weights. A table of weights times a vector, or two
    matrices of weights (LoRA), are not."""
    if len(product.b.shape) != 2 or (name == "aten::matmul" and len(product.a.shape) < 3):
        return False
    return product.added is None or len(product.added.shape) == 1


def _add_operator(part: Pass, row: int, name: str, inputs: OpInputs, vocabulary: int) -> None:
    tensors = inputs.tensors
    product = parse_product(name, inputs) if name in LINEAR_OPS else None
    if name == EMBEDDING and len(tensors) > 1:
        if tensors[0].shape[:1] == (vocabulary,):
            part.tokens.append(tensors[1].elements)
        part.computed.add(tensors[1].elements * prod(tensors[0].shape[1:]))
    elif product is not None and _is_projection(name, product):
        rows = product.m * product.batch
        if product.a.elements not in part.computed:
            part.layers.append((row, (rows, product.k, product.n)))
        elif product.n > 1:  # one output is a score for each row
            part.encoded = max(part.encoded, rows)
    elif ENCODER_OPS.match(name) and tensors:
        part.encoded = max(part.encoded, tensors[0].elements // max(tensors[0].shape[-1:] or (1,)))
    elif CONSTANT_OPS.match(name):
        if tensors and COPIES.match(name):
            part.copies.append((row, tensors[0].elements))
    else:
        operands = tensors[:1] if PRODUCT_OPS.search(name) else tensors
        part.computed.update(tensor.elements for tensor in operands)


ATTENTION = "aten::scaled_dot_product_attention"


def _build_decoding(
    *,
    rows: int = 640,
    layers: int = 3,
    passes: int = 1,
    steps: int = 4,
    gpu: str | None = None,
    rest: float = 200,
    trains: bool = False,
    chooses: str = "aten::argmax",
    classes: int = 6000,
    encoder: str = "",
    scores: str = ATTENTION,
    grows: bool = False,
) -> TraceBuilder:
    """Build steps that each decode tokens of 16 sequences, with layers on this many constant
    rows."""
    b = TraceBuilder(gpu)
    tokens = 16

    for _ in b.steps(steps):
        for _ in range(passes):
            b.compute(EMBEDDING, 5, [[6000, 256], [tokens, 1]])
            if encoder:
                b.compute("aten::linear", 900, [[tokens, rows // 16, 256], [256, 256]])
                b.compute(encoder, 100, [[tokens, rows // 16, 256]] * 3)
                b.compute("aten::linear", 900, [[tokens, rows // 16, 256], [256, 256]])
            for _ in range(layers):
                b.compute("aten::linear", 20, [[tokens, 1, 256], [256, 256]])
                if rows:
                    for _ in range(2):
                        b.compute("aten::linear", 300, [[tokens, rows // 16, 256], [256, 256]])
                b.compute(scores, 20, [[tokens, 4, 1, 64], [tokens, 4, max(rows, 16) // 16, 64]])
            b.compute("aten::linear", 100, [[tokens, 256], [classes, 256]])
            b.compute(chooses, 5, [[tokens, classes]])
            b.on_host("aten::copy_", rest)
            tokens += 16 * grows
        if trains:
            with b.range("Optimizer.step#SGD.step"), b.op("aten::add_"):
                b.host(5)
        b.sync()
    return b
