"""A loop that generates tokens runs the whole sequence through the model for each new one."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.names import name_matches
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.support.common import (
    TRANSFORMERS,
    amount_per_step,
    example_steps,
    runs_code_of,
)
from advisor.testing import Examples, TraceBuilder

EMBEDDING, PRODUCT = "aten::embedding", "aten::bmm"
_SHOWING = rf"^(?:{EMBEDDING}|{PRODUCT}|aten::scaled_dot_product_attention)$"
MAX_CALLS = 100_000
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

    The gain is a pass of one token in place of all. Weights are still read, kernels launched."""

    id = "prefix-recomputed"
    title = "Each new token computes the whole sequence again: no KV cache"
    found_in: ClassVar[tuple[str, ...]] = (
        "recorded/no_cache.slow",
        "recorded/embedded_prefix.slow",
    )
    silent_in: ClassVar[tuple[str, ...]] = (
        "recorded/no_cache.cured",
        "recorded/embedded_prefix.cured",
        *CURED_RECORDINGS,
    )
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://huggingface.co/docs/transformers/kv_cache",
        "https://huggingface.co/docs/transformers/cache_explanation",
    )

    min_passes = Threshold(3, "passes in a row that grow by one token: fewer may be chance", CHOSEN)
    min_tokens = Threshold(
        8, "tokens of the first of them: of fewer little is computed again", CHOSEN
    )
    on_host = Factor(
        0.25, "of the operators' time on a CPU remains: weights are read all the same", CHOSEN
    )
    worst_on_host = Factor(0.6, "of it remains, at most", CHOSEN)

    fix = (
        "Keep the keys and values of earlier tokens, and pass only the new token to the model. "
        "Transformers does it with use_cache=True (model.generate). In your own model, append each "
        "layer's k and v to those kept, and give the new token its position."
    )
    code = (
        "# in each attention layer; cache: a dict of the layer, empty at first\n"
        "if cache:\n"
        "    k = torch.cat([cache['k'], k], dim=-2)\n"
        "    v = torch.cat([cache['v'], v], dim=-2)\n"
        "cache.update(k=k, v=v)\n"
        "prompt = q.shape[-2] > 1   # a new token may see all before it\n"
        "out = F.scaled_dot_product_attention(q, k, v, is_causal=prompt)"
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
        lengths, calls = _growing(a)
        if len(lengths) < self.min_passes or lengths[0] < self.min_tokens:
            return
        tokens = float(np.mean(lengths))
        yield Finding(
            summary=(
                f"Each pass runs the whole sequence: {lengths[0]:,} tokens, then one more each "
                f"time, {lengths[-1]:,} in the last. All but one were computed before."
            ),
            evidence=[
                self.compare("passes that grow by one token", len(lengths), "min_passes", "count"),
                self.compare("tokens of the first", lengths[0], "min_tokens", "count"),
                amount_per_step(a, "passes", calls, "count"),
                Evidence("tokens per pass, mean", tokens, "count"),
            ],
            edits=[self._edit(a, tokens)],
            **(self.case("transformers' own model") if runs_code_of(a, TRANSFORMERS) else {}),
        )

    def _edit(self, a: Analysis, tokens: float) -> Edit:
        if a.device_id is not None:
            return Edit(op="resize", select=Select(on="gpu"), factor=1 / tokens)
        best = 1 / tokens
        return Edit(
            op="scale",
            select=Select(on="host", kind=("op",), name=_HOST_WORK),
            factor=max(best, self.on_host),
            factor_low=best,
            factor_high=max(best, self.worst_on_host),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a sequence that grows": _generation(range(100, 108)),
            "on a CPU": _generation(range(100, 108), gpu=None),
            "embeddings that come from elsewhere": _generation(range(100, 108), embedded=False),
            "queries of one token": (
                _generation([100, *[1] * 7], embedded=False),
                "len(lengths) < self.min_passes",
            ),
            "with a cache": (_generation([100, *[1] * 7]), "len(lengths) < self.min_passes"),
            "prompts of any length": (_generation([100, 117, 64, 99, 100, 210]), "min_passes"),
            "the same length": (_generation([128] * 8), "min_passes"),
            "the first tokens": (_generation(range(1, 8)), "min_tokens"),
            "training on growing sequences": (
                _generation(range(100, 108), trains=True),
                "not a.forward_only",
            ),
        }


def _growing(a: Analysis) -> tuple[list[int], int]:
    """Tokens of the longest run of passes that grow by one, and how many passes there are: calls of
    the embedding of the largest vocabulary in the analysed window. Where embeddings show none, the
    queries of attention do: with a cache they are of one token. Layers follow each other with
    queries of one length."""
    embedded: dict[tuple[int, ...], list[int]] = {}
    attended: dict[tuple[object, ...], list[int]] = {}
    for name, tensors in _calls(a):
        first, second = tensors
        if first is None or second is None:
            continue
        if name == EMBEDDING:
            if len(first.shape) == 2 and second.shape:
                embedded.setdefault(first.shape, []).append(second.shape[-1])
        elif len(first.shape) >= 3 and first.shape[:-2] == second.shape[:-2]:
            *around, tokens, width = first.shape
            other = second.shape[-1] if name == PRODUCT else second.shape[-2]
            lengths = attended.setdefault((name, *around, width), [])
            if tokens == other and (not lengths or lengths[-1] != tokens):
                lengths.append(tokens)
    of_vocabulary = max(embedded.items())[1] if embedded else []
    found = [(_longest_run(passes), len(passes)) for passes in (of_vocabulary, *attended.values())]
    return max(found, key=lambda each: len(each[0]), default=([], 0))


def _calls(a: Analysis) -> Iterator[tuple[str, tuple[Tensor | None, Tensor | None]]]:
    """Yield calls of embeddings, attention and batched products in the analysed window in order of
    time, each with its first two tensors."""
    cpu = a.trace.cpu
    own = (cpu["kind"] == "op") & name_matches(cpu["name"], _SHOWING) & cpu["inputs"].is_not_null()
    rows = np.flatnonzero(own.to_numpy())
    ts = cpu["ts"].to_numpy()[rows]
    begin, end = a.spans.start.min(), a.spans.end.max()
    inside = (ts >= begin) & (ts < end)
    rows = rows[inside][np.argsort(ts[inside], kind="stable")][:MAX_CALLS]
    shapes: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    names = cpu["name"].gather(rows).cast(str).to_list()
    for name, index in zip(names, cpu["inputs"].gather(rows).to_list(), strict=True):
        if index not in shapes:
            row = a.trace.inputs.row(index, named=True)
            given = OpInputs(row["dims"], row["types"], row["strides"] or "")
            shapes[index] = given.tensor(0), given.tensor(1)
        yield name, shapes[index]


def _longest_run(passes: list[int]) -> list[int]:
    best: list[int] = []
    run = passes[:1]
    for before, after in pairwise(passes):
        run = [*run, after] if after == before + 1 else [after]
        best = max(best, run, key=len)
    return best


def _generation(
    lengths: Any, *, gpu: str | None = "A100", trains: bool = False, embedded: bool = True
) -> TraceBuilder:
    """Return a trace with one pass per step over so many tokens."""
    left = list(lengths)
    all_of_them = 0

    def body(b: TraceBuilder) -> None:
        nonlocal all_of_them
        tokens = left.pop(0)
        all_of_them = max(tokens, all_of_them + 1)
        if embedded:
            with b.op(EMBEDDING, [[50_000, 512], [1, tokens]], ["float", "long int"]):
                b.host(5)
        else:
            queries, keys = [1, 8, tokens, 64], [1, 8, all_of_them, 64]
            for _ in range(2):
                with b.op("aten::scaled_dot_product_attention", [queries, keys, keys]):
                    b.host(5)
        shapes = [[1, tokens, 512], [512, 512]]
        b.compute("aten::mm", 10.0 * tokens, shapes)
        if trains:
            with b.range("Optimizer.step#SGD.step"), b.op("aten::add_"):
                b.host(5)

    return example_steps(body, gpu, len(left))
