"""Attention over slots of a key-value cache that hold no tokens yet."""

from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs, Shape
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

SLICE, COPY = "aten::slice", "aten::copy_"
ATTENTION = "aten::scaled_dot_product_attention"
CACHE_PRODUCTS = ("aten::matmul", "aten::bmm")


class PartlyFilled(NamedTuple):
    """Operators of attention that read a cache whose last slots hold no tokens."""

    rows: list[int]
    """Rows of ``trace.cpu``."""
    filled: list[int]
    """Number of tokens in the cache at each."""


class UnfilledCache(Rule):
    """A cache of keys and values has a fixed number of slots, of which a request fills a part.
    Attention reads all slots, and a mask removes those without tokens. Each token then costs as
    much as at the end of the longest request.

    The rule finds writes of new tokens: a slice of the cache that a copy fills. The end of the
    slice is the number of tokens. Then it finds attention that reads a tensor of the cache's whole
    shape: ``scaled_dot_product_attention`` with a mask, or the products of hand-written attention.
    Writes by an index of positions are not seen, as a trace has no values of tensors.

    The gain is the share of empty slots in the time of these operators. Later steps of a request
    have fewer empty slots, so it is smaller over the run. A request of a recorded run adds
    no more tokens to its prompt than the run has steps."""

    id = "unfilled-cache"
    title = "Attention reads slots of the cache that hold no tokens"
    found_in = ("recorded/static_cache.slow",)
    silent_in = SILENT_INPUTS
    validation_note = "a CPU recording, torch 2.13, and its cure: 10 ms predicted, 11 ms measured"
    references = ("https://docs.pytorch.org/blog/accelerating-generative-ai-2/",)

    min_share = Threshold(0.05, "of the step in attention to empty slots", XPROF)
    max_filled_share = Threshold(
        0.8, "of the slots hold tokens: with more, little is saved", CHOSEN
    )
    min_slots = Threshold(64, "slots of the cache", CHOSEN)
    run_x = Factor(0.85, "times the gain in the window, over the run", CHOSEN)
    worst_run_x = Factor(0.4, "times it, if requests fill most of the cache", CHOSEN)

    fix = (
        "Give attention the filled part of the cache only, and the mask of that part. Where shapes "
        "must repeat (CUDA graphs, torch.compile), round its length up to one of a few."
    )
    code = (
        "end = length + new_tokens     # not all slots of k and v\n"
        "y = F.scaled_dot_product_attention(\n"
        "    q, k[:, :, :end], v[:, :, :end], attn_mask=mask[..., :end])"
    )
    verify = "Record again: attention's keys are as long as the request."
    falsified_by = "slots behind the written ones that hold tokens of another request"
    assumptions = ("the slots behind the last written one hold no tokens that are used",)
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        caches = self._find_partly_filled(a)
        if not caches:
            return
        for cache, cache_calls in caches.items():
            slots = cache[-2]
            shares = np.array(cache_calls.filled) / slots
            if shares.mean() > self.max_filled_share:
                continue
            rows = np.array(cache_calls.rows)
            ns = time_of_operators(a, rows)
            values = np.unique(shares)
            times = [max(1, time_of_operators(a, rows[shares == share])) for share in values]
            empty_ns = ns * float(np.average(1 - values, weights=times))
            if empty_ns < self.min_share * a.span_ns:
                continue
            most = max(cache_calls.filled)
            yield Finding(
                summary=(
                    f"The cache has {slots:,} slots, and at most {most:,} hold tokens in these "
                    f"steps. Attention to all of them takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "time of attention to the cache", ns),
                    Evidence("slots of the cache", slots, "count"),
                    self.compare(
                        "slots that hold tokens, share", float(shares.mean()), "max_filled_share"
                    ),
                    self.compare_share(a, "attention to empty slots", empty_ns),
                ],
                where=costliest_places(a, rows),
                edits=[
                    scale_operators(
                        a, rows, self._save_over_run(a, ns, empty_ns, most / slots, slots)
                    )
                ],
            )

    def _save_over_run(
        self, a: Analysis, ns: float, empty_ns: float, filled: float, slots: int
    ) -> tuple[float, float, float]:
        """Return what the filled part saves over the run: expected, at best, at worst, ns."""
        expected = self.run_x * empty_ns
        if a.run_steps is not None:
            # from its prompt on, a request adds a token per step at most
            added = len(a.run_steps.steps) / slots
            expected = max(expected, ns * (1 - filled - added / 2))
        return min(expected, empty_ns), empty_ns, self.worst_run_x * empty_ns

    def _find_partly_filled(self, a: Analysis) -> dict[Shape, PartlyFilled]:
        """Return the operators that read a whole cache, by its shape."""
        table = outermost_in_steps(a).filter(
            pl.col("name").is_in([SLICE, COPY, ATTENTION, *CACHE_PRODUCTS])
        )
        result: dict[Shape, PartlyFilled] = {}
        filled: dict[Shape, int] = {}
        slice_before: tuple[Shape, Shape, int] | None = None
        rows = table.drop_nulls("inputs").sort("ts").select("row", "name", "inputs")
        for row, name, inputs in rows.iter_rows():
            x = inputs_at(a, inputs)
            if name == SLICE:
                slice_before = self._parse_slice(x)
                continue
            if name == COPY and slice_before is not None:
                cache, part, end = slice_before
                target = x.tensor(0)
                if target is not None and target.shape == part:
                    filled[cache] = end
            slice_before = None
            for cache in _list_caches(name, x) if filled and name != COPY else ():
                if cache in filled:
                    cache_calls = result.setdefault(cache, PartlyFilled([], []))
                    cache_calls.rows.append(row)
                    cache_calls.filled.append(filled[cache])
                    break
        return result

    def _parse_slice(self, x: OpInputs) -> tuple[Shape, Shape, int] | None:
        """Return the shape of the cache, that of the slice, and its end, if it is a slice of slots
        of [batch, heads, slots, size]."""
        tensor, dim, start, end = x.tensor(0), x.argument(1), x.argument(2), x.argument(3)
        if tensor is None or len(tensor.shape) != 4 or dim not in (2, -2):
            return None
        slots = tensor.shape[2]
        if not (isinstance(start, int) and isinstance(end, int)) or slots < self.min_slots:
            return None
        if not 0 <= start < end <= slots:
            return None
        batch, heads, _, size = tensor.shape
        return tensor.shape, (batch, heads, end - start, size), end

    @staticmethod
    def examples() -> Examples:
        return {
            "the first tokens": _build_decoding(),
            "on a GPU": _build_decoding(gpu="A100"),
            "attention by hand": _build_decoding(by_hand=True),
            "a full cache": (_build_decoding(first=900), "max_filled_share"),
            "a small cache": (_build_decoding(first=10, slots=48), "not caches"),
            "the filled part": (_build_decoding(cut=True), "not caches"),
            "without a mask": (_build_decoding(masked=False), "not caches"),
            "little of the step": (_build_decoding(us=10), "min_share"),
        }


def _list_caches(name: str, x: OpInputs) -> list[Shape]:
    """Return shapes of caches that an operator of attention may read."""
    if name == ATTENTION:
        keys = x.tensor(1)
        return [] if keys is None or x.tensor(3) is None else [keys.shape]
    operand = x.tensor(1)
    if operand is None or len(operand.shape) < 3:
        return []
    *leading, last, size = operand.shape
    return [operand.shape, (*leading, size, last)]


def _build_decoding(
    *,
    gpu: str | None = None,
    first: int = 50,
    slots: int = 1024,
    by_hand: bool = False,
    cut: bool = False,
    masked: bool = True,
    us: float = 3000,
) -> TraceBuilder:
    """Build steps of decoding that write one token of keys and attend to a cache of ``slots``."""
    b = TraceBuilder(gpu=gpu)
    for number in b.steps():
        end = first + number
        cache, query = [24, 8, slots, 32], [24, 8, 1, 32]
        for _ in range(2):
            slice_arguments = ["", "2", str(end - 1), str(end), "1"]
            b.on_host(SLICE, 3, [cache, [], [], [], []], concrete=slice_arguments)
            b.compute(COPY, 5, [query, query, []])
        keys = [24, 8, end, 32] if cut else cache
        if by_hand:
            b.compute(CACHE_PRODUCTS[0], us / 2, [query, [24, 8, 32, keys[2]]])
            b.compute("aten::softmax", 20, [[24, 8, 1, keys[2]], [], []])
            b.compute(CACHE_PRODUCTS[0], us / 2, [[24, 8, 1, keys[2]], keys])
        else:
            mask = [[1, keys[2]], [], [], [], []] if masked else []
            b.compute(ATTENTION, us, [query, keys, keys, *mask])
        b.compute("aten::linear", 4000, [[24, 1, 256], [768, 256]])
        b.sync()
    return b
