"""Mixtures of experts in which every expert computes every token, although a router chose few."""

from collections import Counter
from math import prod
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.testing import Examples, TraceBuilder

EXPERT_PRODUCTS = ("aten::linear", "aten::matmul", "aten::addmm", "aten::mm")


class ExpertRouting(NamedTuple):
    """Choice of a router among experts."""

    experts: int
    chosen: int
    """Number of experts per token."""
    tokens: int


class ExpertCall(NamedTuple):
    """An outermost operator that follows a choice."""

    row: int
    """Row of ``trace.cpu``."""
    name: str
    inputs_row: int
    """Row of ``trace.inputs``."""
    inputs: OpInputs


class ExpertMixture(NamedTuple):
    """Experts that follow choices of one kind."""

    choice: ExpertRouting
    rows: list[int]
    """Rows of ``trace.cpu``: products of the experts and the operators between them."""
    layers: list[int]
    """Rows of the choices in all steps."""


class DenseExperts(Rule):
    """A mixture of experts runs each expert on all tokens, and multiplies the results by weights
    that are zero for all but the chosen experts. If two of eight are chosen, three quarters of this
    work is wasted, forward and backward. An expert can run on its own tokens alone.

    The rule looks for a choice among as many entries as there are experts (``topk``). After it and
    before the next choice, products of one shape run once per expert, on all tokens. Their results
    are multiplied by one weight per token, or joined. Experts that run on their own tokens have
    fewer rows.

    The gain is the share of experts that are not chosen, minus the time to gather the rows and to
    add them back. Smaller products run at a lower rate, which the range allows for."""

    id = "dense-experts"
    title = "Each expert computes all tokens, and few experts are chosen"
    found_in = ("recorded/experts.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 18.9 ms predicted, 21.3 ms measured. Another, "
        "not in the tests: 32.4 ms predicted, 38.8 ms measured"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html",
        "https://arxiv.org/abs/2211.15841",
    )

    min_share = Threshold(0.05, "of the step in work of experts that are not chosen", XPROF)
    min_experts = Threshold(3, "experts: with two, at least half of the work is chosen", CHOSEN)
    max_chosen_share = Threshold(
        0.5, "of the experts are chosen: with more, little is saved", CHOSEN
    )
    added_share = Factor(0.2, "of this work, to gather rows and add them back", CHOSEN)
    worst_saved_share = Factor(0.5, "of the saved share, where smaller products are slower", CHOSEN)

    fix = (
        "Run each expert on the tokens that chose it. On a GPU, reading how many these are makes "
        "the host wait: sort the tokens by expert there, and use one grouped product "
        "(torch.nn.functional.grouped_mm)."
    )
    code = (
        "# weight, chosen = scores.topk(k)\n"
        "out = torch.zeros_like(x)\n"
        "for number, expert in enumerate(self.experts):\n"
        "    rows, place = (chosen == number).nonzero(as_tuple=True)\n"
        "    part = weight[rows, place, None] * expert(x[rows])\n"
        "    out = out.index_add(0, rows, part)"
    )
    verify = "Record again: the experts' products have fewer rows. Compare the results."
    falsified_by = "weights that are not zero for experts that are not chosen"
    assumptions = (
        "the results of experts that are not chosen are not used",
        "tokens choose the experts about equally often",
    )
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        for mixture in self._find_mixtures(a):
            experts, chosen, tokens = mixture.choice
            forward_rows = np.array(mixture.rows)
            rows, backward_rows = with_backward(a, forward_rows)
            ns = time_of_operators(a, rows)
            unchosen = 1 - chosen / experts
            central = ns * max(0.0, unchosen - self.added_share)
            if central < self.min_share * a.span_ns:
                continue
            backward = " With its backward pass this" if len(backward_rows) else " This"
            yield Finding(
                summary=(
                    f"Each of {experts} experts computes all {tokens:,} tokens, and the router "
                    f"chooses {chosen} for a token.{backward} takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "time of the experts", ns),
                    amount_per_step(a, "choices of experts", len(mixture.layers), "count"),
                    Evidence("experts", experts, "count"),
                    self.compare(
                        "part of the experts that is chosen", chosen / experts, "max_chosen_share"
                    ),
                    self.compare_share(a, "work of experts that are not chosen", central),
                ],
                where=costliest_places(a, forward_rows),
                edits=[
                    scale_operators(
                        a, rows, (central, unchosen * ns, self.worst_saved_share * central)
                    )
                ],
            )

    def _find_mixtures(self, a: Analysis) -> list[ExpertMixture]:
        """Return mixtures by choice."""
        table = outermost_in_steps(a)
        topk = table.filter(pl.col("name") == "aten::topk")["inputs"].drop_nulls().unique()
        choices = {
            index: choice
            for index in topk
            if (choice := self._parse_choice(inputs_at(a, index))) is not None
        }
        if not choices:
            return []
        inputs = {index: inputs_at(a, index) for index in table["inputs"].drop_nulls().unique()}
        step = np.searchsorted(a.steps.used["ts"].to_numpy(), table["ts"].to_numpy(), side="right")
        table = table.with_columns(step=step, choice=(pl.col("name") == "aten::topk").cum_sum())
        mixtures: dict[ExpertRouting, ExpertMixture] = {}
        for group in table.partition_by("choice", "step", maintain_order=True):
            if group["name"][0] != "aten::topk" or group["inputs"][0] not in choices:
                continue
            choice = choices[group["inputs"][0]]
            described = group.drop_nulls("inputs").select("row", "name", "inputs").iter_rows()
            calls = [ExpertCall(row, name, index, inputs[index]) for row, name, index in described]
            products = _find_products(calls, choice)
            if not products or not _are_weighted(calls, choice):
                continue
            mixture = mixtures.setdefault(choice, ExpertMixture(choice, [], []))
            mixture.layers.append(group["row"][0])
            mixture.rows.extend(
                group["row"].filter(group["row"].is_between(products[0], products[-1]))
            )
        return list(mixtures.values())

    def _parse_choice(self, x: OpInputs) -> ExpertRouting | None:
        """Return what a call of ``topk`` chooses, or ``None`` if it is not a choice of few
        experts."""
        scores, chosen = x.tensor(0), x.argument(1)
        if scores is None or not isinstance(chosen, int) or not scores.shape:
            return None
        experts = scores.shape[-1]
        is_few = 0 < chosen <= self.max_chosen_share * experts and experts >= self.min_experts
        is_last_dim = x.argument(2) in (-1, len(scores.shape) - 1)
        return (
            ExpertRouting(experts, chosen, prod(scores.shape[:-1]))
            if is_few and is_last_dim
            else None
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "two of eight": _build_mixture(),
            "on a GPU": _build_mixture(gpu="A100"),
            "in inference": _build_mixture(trains=False),
            "six of eight": (_build_mixture(chosen=6), "not choices"),
            "experts of their own tokens": (_build_mixture(rows=80), "not products"),
            "layers behind a choice": (_build_mixture(weighs=False), "_are_weighted"),
            "hardly any time": (_build_mixture(us=8), "min_share"),
        }


def _count_tokens(x: OpInputs) -> int:
    """Return the number of rows of an operator's first tensor of features; 0 if there is none."""
    shape = next((t.shape for t in x.tensors if len(t.shape) >= 2), ())
    return prod(shape[:-1])


def _find_products(calls: list[ExpertCall], choice: ExpertRouting) -> list[int]:
    """Return the rows of products that run once per expert, on all tokens."""
    products = [
        c for c in calls if c.name in EXPERT_PRODUCTS and _count_tokens(c.inputs) == choice.tokens
    ]
    counts = Counter((call.name, call.inputs_row) for call in products)
    return [c.row for c in products if counts[c.name, c.inputs_row] % choice.experts == 0]


def _are_weighted(calls: list[ExpertCall], choice: ExpertRouting) -> bool:
    """Return whether results are multiplied by one weight per token, or joined, once per expert."""
    weights = 0
    for call in calls:
        if call.name in ("aten::mul", "aten::mul_"):
            shapes = [tensor.shape for tensor in call.inputs.tensors]
            weights += any(s[-1:] == (1,) and prod(s) == choice.tokens for s in shapes)
        elif call.name in ("aten::stack", "aten::cat"):
            joined = call.inputs.shapes(0)
            if len(joined) == choice.experts and all(prod(s[:-1]) == choice.tokens for s in joined):
                return True
    return weights >= choice.experts


def _build_mixture(
    *, gpu: str | None = None, chosen: int = 2, rows: int = 320, weighs: bool = True,
    trains: bool = True, us: float = 500,
) -> TraceBuilder:  # fmt: skip
    """Eight experts of two layers, 320 tokens."""
    b = TraceBuilder(gpu=gpu)

    for number in b.steps():
        node = 100 * number
        b.compute("aten::tanh", 5000, [[320, 192]])
        arguments = ["", str(chosen), "-1", "True", "True"]
        b.compute("aten::topk", 9, [[320, 8], [], [], [], []], concrete=arguments)
        for expert in range(8):
            options: dict[str, Any] = {"sequence": node + 4 * expert} if trains else {}
            b.compute("aten::linear", us, [[rows, 192], [384, 192], [384]], **options)
            b.compute("aten::gelu", us / 10, [[rows, 384]])
            b.compute("aten::linear", us, [[rows, 384], [192, 384], [192]], **options)
            if weighs:
                b.compute("aten::mul", 9, [[rows, 1], [rows, 192]])
        for expert in reversed(range(8 if trains else 0)):
            b.compute(f"{NODE_PREFIX}AddmmBackward0", 2 * us, [], sequence=node + 4 * expert)
        b.on_host("aten::gelu", 300)
        b.sync()
    return b
