"""A loop that generates tokens runs the whole sequence through the model for each new token."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.support.common import (
    TRANSFORMERS,
    amount_per_step,
    example_steps,
    of_step,
    runs_code_of,
)
from advisor.rules.support.kernel_work import time_of_operators
from advisor.testing import Examples, TraceBuilder

EMBEDDING, PRODUCT = "aten::embedding", "aten::bmm"
_TOKENS = rf"^(?:{EMBEDDING}|{PRODUCT}|aten::scaled_dot_product_attention)$"
_MAX_CALLS = 100_000
_HOST_WORK = (
    r"^aten::(?:addmm|mm|bmm|baddbmm|_scaled_dot_product_\w+|native_layer_norm|gelu|silu|mul|add)$"
)


class PrefixRecomputed(Rule):
    """A loop that generates text passes the whole sequence to the model for each new token. Keys
    and values of earlier tokens do not change. A KV cache keeps them, and each pass computes one
    token.

    The inputs of the token embedding show it, or the queries of attention: the number of tokens
    grows by one from pass to pass. With a cache each pass has one token, after the prompt's. A
    training whose sequences grow, or inputs of any length, do not grow by exactly one each time.

    The gain is that of a pass of one token in place of all. Weights are still read, kernels
    launched."""

    id = "prefix-recomputed"
    title = "Each new token computes the whole sequence again: no KV cache"
    found_in = (
        "recorded/no_cache.slow",
        "recorded/embedded_prefix.slow",
    )
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://huggingface.co/docs/transformers/kv_cache",
        "https://huggingface.co/docs/transformers/cache_explanation",
    )

    min_passes = Threshold(3, "passes in a row that grow by one token: fewer may be chance", CHOSEN)
    min_tokens = Threshold(
        8, "tokens of the first pass: with fewer, little is computed again", CHOSEN
    )
    token_x = Factor(
        6.0, "times as long per token on a CPU, as one token reads all weights too", CHOSEN
    )
    worst_token_x = Factor(15.0, "times as long, at worst", CHOSEN)

    fix = (
        "Keep the keys and values of earlier tokens, and pass only the new token to the model. "
        "Transformers does it with use_cache=True (model.generate). In your own model, append each "
        "layer's k and v to the cache, and give the new token its position."
    )
    code = (
        "# in each attention layer; cache: a dict of the layer, empty at first\n"
        "if cache:\n"
        "    k = torch.cat([cache['k'], k], dim=-2)\n"
        "    v = torch.cat([cache['v'], v], dim=-2)\n"
        "cache.update(k=k, v=v)\n"
        "prompt = q.shape[-2] > 1   # a new token may see all earlier ones\n"
        "out = F.scaled_dot_product_attention(q, k, v, is_causal=prompt)\n"
        "# after the prompt: only the new token, with its own position\n"
        "logits = model(tokens[:, -1:], position=tokens.shape[1] - 1)"
    )
    cases = {
        "transformers' own model": {
            "fix": "Keep the keys and values of earlier tokens (use_cache=True), and pass only the "
            "new token to the model. model.generate does both.",
            "code": "out = model(prompt, use_cache=True)\n"
            "for _ in range(new_tokens):\n"
            "    token = out.logits[:, -1:].argmax(-1)\n"
            "    cache = out.past_key_values\n"
            "    out = model(token, past_key_values=cache, use_cache=True)",
        },
    }
    verify = "Profile again: embedding and attention get one token in each pass after the first."
    falsified_by = "a model whose earlier tokens change with later ones (not causal)"
    confidence = 0.85
    sampled_part = "forward"
    assumptions = ("the model is causal: earlier tokens do not depend on later ones",)

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or not a.forward_only:
            return
        lengths, calls = _find_growing_passes(a)
        if len(lengths) < self.min_passes or lengths[0] < self.min_tokens:
            return
        tokens = float(np.mean(lengths))
        rows = np.flatnonzero(name_matches(a.trace.cpu["name"], _HOST_WORK).to_numpy())
        ns = time_of_operators(a, rows_in_steps(a, rows))
        yield Finding(
            summary=(
                f"Each pass runs the whole sequence: {lengths[0]:,} tokens, then one more each "
                f"time, {lengths[-1]:,} in the last. All but one were computed before. The model's "
                f"operators take {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "time of the model's operators", ns),
                self.compare("passes that grow by one token", len(lengths), "min_passes", "count"),
                self.compare("tokens of the first pass", lengths[0], "min_tokens", "count"),
                amount_per_step(a, "passes of the model", calls, "count"),
                Evidence("tokens per pass, mean", tokens, "count"),
            ],
            edits=[self._build_edit(a, tokens)],
            **(self.case("transformers' own model") if runs_code_of(a, TRANSFORMERS) else {}),
        )

    def _build_edit(self, a: Analysis, tokens: float) -> Edit:
        if a.device_id is not None:
            return Edit(op="resize", select=Select(on="gpu"), factor=1 / tokens)
        remaining, best, worst = (
            min(1.0, x / tokens) for x in (self.token_x, 1.0, self.worst_token_x)
        )
        return Edit(
            op="scale",
            select=Select(on="host", kind=("op",), name=_HOST_WORK),
            factor=remaining,
            best_factor=best,
            worst_factor=worst,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a sequence that grows": _build_generation(range(100, 108)),
            "on a CPU": _build_generation(range(100, 108), gpu=None),
            "embeddings that come from elsewhere": _build_generation(
                range(100, 108), embedded=False
            ),
            "queries of one token": (
                _build_generation([100, *[1] * 7], embedded=False),
                "len(lengths) < self.min_passes",
            ),
            "with a cache": (_build_generation([100, *[1] * 7]), "len(lengths) < self.min_passes"),
            "prompts of any length": (
                _build_generation([100, 117, 64, 99, 100, 210]),
                "min_passes",
            ),
            "the same length": (_build_generation([128] * 8), "min_passes"),
            "the first tokens": (_build_generation(range(1, 8)), "min_tokens"),
            "training on growing sequences": (
                _build_generation(range(100, 108), trains=True),
                "not a.forward_only",
            ),
        }


def _find_growing_passes(a: Analysis) -> tuple[list[int], int]:
    """Return the tokens of the longest run of passes that grow by one, and the number of passes:
    calls of the embedding of the largest vocabulary in the analysed window. If embeddings show
    none, the queries of attention do: with a cache they are of one token. Layers follow each other
    with queries of one length."""
    embedded: dict[tuple[int, ...], list[int]] = {}
    attended: dict[tuple[object, ...], list[int]] = {}
    for name, tensors in _read_calls(a):
        operand, other = tensors
        if operand is None or other is None:
            continue
        if name == EMBEDDING:
            if len(operand.shape) == 2 and other.shape:
                embedded.setdefault(operand.shape, []).append(other.shape[-1])
        elif len(operand.shape) >= 3 and operand.shape[:-2] == other.shape[:-2]:
            *around, tokens, width = operand.shape
            keys = other.shape[-1] if name == PRODUCT else other.shape[-2]
            lengths = attended.setdefault((name, *around, width), [])
            if tokens == keys and (not lengths or lengths[-1] != tokens):
                lengths.append(tokens)
    of_vocabulary = max(embedded.items())[1] if embedded else []
    runs = [(_longest_run(passes), len(passes)) for passes in (of_vocabulary, *attended.values())]
    return max(runs, key=lambda run: len(run[0]), default=([], 0))


def _read_calls(a: Analysis) -> Iterator[tuple[str, tuple[Tensor | None, Tensor | None]]]:
    """Yield calls of embeddings, attention and batched products in the analysed window in order of
    time, each with its first two tensors."""
    cpu = a.trace.cpu
    is_call = (
        (cpu["kind"] == "op") & name_matches(cpu["name"], _TOKENS) & cpu["inputs"].is_not_null()
    )
    rows = np.flatnonzero(is_call.to_numpy())
    ts = cpu["ts"].to_numpy()[rows]
    start, end = a.spans.start.min(), a.spans.end.max()
    in_window = (ts >= start) & (ts < end)
    rows = rows[in_window][np.argsort(ts[in_window], kind="stable")][:_MAX_CALLS]
    shapes: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    names = cpu["name"].gather(rows).cast(str).to_list()
    for name, index in zip(names, cpu["inputs"].gather(rows).to_list(), strict=True):
        if index not in shapes:
            row = a.trace.inputs.row(index, named=True)
            inputs = OpInputs(row["dims"], row["types"], row["strides"] or "")
            shapes[index] = inputs.tensor(0), inputs.tensor(1)
        yield name, shapes[index]


def _longest_run(passes: list[int]) -> list[int]:
    longest: list[int] = []
    run = passes[:1]
    for previous, length in pairwise(passes):
        run = [*run, length] if length == previous + 1 else [length]
        longest = max(longest, run, key=len)
    return longest


def _build_generation(
    lengths: Any, *, gpu: str | None = "A100", trains: bool = False, embedded: bool = True
) -> TraceBuilder:
    """Build a trace with one pass per step over these numbers of tokens."""
    remaining = list(lengths)
    total = 0

    def body(b: TraceBuilder) -> None:
        nonlocal total
        tokens = remaining.pop(0)
        total = max(tokens, total + 1)
        if embedded:
            with b.op(EMBEDDING, [[50_000, 512], [1, tokens]], ["float", "long int"]):
                b.host(5)
        else:
            queries, keys = [1, 8, tokens, 64], [1, 8, total, 64]
            for _ in range(2):
                with b.op("aten::scaled_dot_product_attention", [queries, keys, keys]):
                    b.host(5)
        shapes = [[1, tokens, 512], [512, 512]]
        b.compute("aten::mm", 10.0 * tokens, shapes)
        if trains:
            with b.range("Optimizer.step#SGD.step"), b.op("aten::add_"):
                b.host(5)

    return example_steps(body, gpu, len(remaining))
