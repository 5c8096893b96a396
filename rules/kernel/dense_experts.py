"""Every expert of a mixture computes every token, and a router chose few of them."""

from collections import Counter
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, SILENT_TRACES, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    backward_operators,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

PRODUCTS = ("aten::linear", "aten::matmul", "aten::addmm", "aten::mm")


class Choice(NamedTuple):
    """Choice of a router among experts."""

    experts: int
    chosen: int
    """Experts for each token."""
    tokens: int


class Call(NamedTuple):
    """An outermost operator behind a choice."""

    row: int
    """Row of ``trace.cpu``."""
    name: str
    described: int
    """Row of ``trace.inputs``."""
    inputs: OpInputs


class Mixture(NamedTuple):
    """Experts behind the choices of one kind."""

    choice: Choice
    made: list[int]
    """Rows of ``trace.cpu``: products of the experts and what lies between them."""
    layers: list[int]
    """Rows of the choices, of all steps."""


class DenseExperts(Rule):
    """A mixture of experts runs each expert on all tokens, and multiplies the results by weights
    that are zero for all but the chosen experts. With two of eight chosen, three quarters of this
    work is for nothing, forward and backward. An expert can run on its own tokens alone.

    Found is a choice among as many entries as there are experts (``topk``). Behind it, before the
    next choice, products of one shape run once for each expert, on all tokens. Their results are
    multiplied by one weight for each token, or put together. Experts that run on their own tokens
    have fewer rows.

    The gain is the share of the experts that are not chosen, less what it takes to gather the rows
    and to add them back. Smaller products run at a lower rate, which the range allows for."""

    id = "dense-experts"
    title = "Each expert computes all tokens, and few experts are chosen"
    found_in: ClassVar[tuple[str, ...]] = ("recorded/experts.slow",)
    silent_in: ClassVar[tuple[str, ...]] = (
        "recorded/experts.cured",
        *SILENT_TRACES,
        *CURED_RECORDINGS,
    )
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 18.9 ms predicted, 21.3 ms measured. Another, "
        "in no test: 32.4 ms predicted, 38.8 ms measured"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html",
        "https://arxiv.org/abs/2211.15841",
    )

    min_share = Threshold(0.05, "of the step in work of experts that are not chosen", XPROF)
    min_experts = Threshold(3, "experts: of two, half of the work is chosen at least", CHOSEN)
    max_chosen = Threshold(0.5, "of the experts are chosen: with more, little is saved", CHOSEN)
    gathering = Factor(0.2, "of this work, to gather rows and add them back", CHOSEN)
    least = Factor(0.5, "of the saved share, where smaller products are slower", CHOSEN)

    fix = (
        "Run each expert on the tokens that chose it. On a GPU, reading how many these are makes "
        "the host wait: sort the tokens by expert there, and use one grouped product "
        "(torch.nn.functional.grouped_mm)."
    )
    code = (
        "# weight, chosen = scores.topk(k)\n"
        "for number, expert in enumerate(self.experts):\n"
        "    rows, place = (chosen == number).nonzero(as_tuple=True)\n"
        "    part = weight[rows, place, None] * expert(x[rows])\n"
        "    out = out.index_add(0, rows, part)"
    )
    verify = "Record again: the experts' products have fewer rows. Compare the results."
    falsified_by = "weights of experts that are not chosen and not zero"
    assumptions = (
        "the results of experts that are not chosen do not count",
        "tokens choose the experts about equally often",
    )
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or not a.step_count or a.trace.inputs.is_empty():
            return
        for found in self._find(a):
            experts, chosen, tokens = found.choice
            made = np.array(found.made)
            learnt = rows_in_steps(a, backward_operators(a, made))
            rows = np.concatenate([made, learnt])
            ns = time_of_operators(a, rows)
            idle = 1 - chosen / experts
            central = ns * max(0.0, idle - self.gathering)
            if central < self.min_share * a.span_ns:
                continue
            backward = " With its backward pass this" if len(learnt) else " This"
            yield Finding(
                summary=(
                    f"Each of {experts} experts computes all {tokens:,} tokens, and the router "
                    f"chooses {chosen} for a token.{backward} takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "time of the experts", ns),
                    amount_per_step(a, "choices", len(found.layers), "count"),
                    Evidence("experts", experts, "count"),
                    self.compare("chosen", chosen / experts, "max_chosen"),
                    self.compare("for nothing", central / a.span_ns, "min_share", per=a.per),
                ],
                where=costliest_places(a, made),
                edits=[scale_operators(a, rows, (central, idle * ns, self.least * central))],
            )

    def _find(self, a: Analysis) -> list[Mixture]:
        """Return mixtures by what is chosen."""
        table = outermost_in_steps(a)
        topk = table.filter(pl.col("name") == "aten::topk")["inputs"].drop_nulls().unique()
        choices = {
            at: choice for at in topk if (choice := self._choice(inputs_at(a, at))) is not None
        }
        if not choices:
            return []
        described = {at: inputs_at(a, at) for at in table["inputs"].drop_nulls().unique()}
        step = np.searchsorted(a.steps.used["ts"].to_numpy(), table["ts"].to_numpy(), side="right")
        table = table.with_columns(step=step, choice=(pl.col("name") == "aten::topk").cum_sum())
        found: dict[Choice, Mixture] = {}
        for own in table.partition_by("choice", "step", maintain_order=True):
            if own["name"][0] != "aten::topk" or own["inputs"][0] not in choices:
                continue
            choice = choices[own["inputs"][0]]
            known = own.drop_nulls("inputs").select("row", "name", "inputs").iter_rows()
            calls = [Call(row, name, at, described[at]) for row, name, at in known]
            products = _products_of(calls, choice)
            if not products or not _are_weighed(calls, choice):
                continue
            one = found.setdefault(choice, Mixture(choice, [], []))
            one.layers.append(own["row"][0])
            one.made.extend(own["row"].filter(own["row"].is_between(products[0], products[-1])))
        return list(found.values())

    def _choice(self, x: OpInputs) -> Choice | None:
        """Return what a call of ``topk`` chooses; ``None``: it is no choice of few experts."""
        scores, chosen = x.tensor(0), x.argument(1)
        if scores is None or not isinstance(chosen, int) or not scores.shape:
            return None
        experts = scores.shape[-1]
        few = 0 < chosen <= self.max_chosen * experts and experts >= self.min_experts
        last = x.argument(2) in (-1, len(scores.shape) - 1)
        return Choice(experts, chosen, prod(scores.shape[:-1])) if few and last else None

    @staticmethod
    def examples() -> Examples:
        return {
            "two of eight": _mixture(),
            "on a GPU": _mixture(gpu="A100"),
            "in inference": _mixture(trains=False),
            "six of eight": (_mixture(chosen=6), "not choices"),
            "experts of their own tokens": (_mixture(rows=80), "not products"),
            "layers behind a choice": (_mixture(weighs=False), "_are_weighed"),
            "hardly any time": (_mixture(us=8), "min_share"),
        }


def _tokens(x: OpInputs) -> int:
    """Return the rows of an operator's first tensor of features, 0: none."""
    shape = next((t.shape for t in x.tensors if len(t.shape) >= 2), ())
    return prod(shape[:-1])


def _products_of(calls: list[Call], choice: Choice) -> list[int]:
    """Return the rows of products that run once for each expert, on all tokens."""
    products = [c for c in calls if c.name in PRODUCTS and _tokens(c.inputs) == choice.tokens]
    often = Counter((call.name, call.described) for call in products)
    return [c.row for c in products if often[c.name, c.described] % choice.experts == 0]


def _are_weighed(calls: list[Call], choice: Choice) -> bool:
    """Return whether results are multiplied by one weight for each token, or put together, once for
    each expert."""
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


def _mixture(
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
            more: dict[str, Any] = {"sequence": node + 4 * expert} if trains else {}
            b.compute("aten::linear", us, [[rows, 192], [384, 192], [384]], **more)
            b.compute("aten::gelu", us / 10, [[rows, 384]])
            b.compute("aten::linear", us, [[rows, 384], [192, 384], [192]], **more)
            if weighs:
                b.compute("aten::mul", 9, [[rows, 1], [rows, 192]])
        for expert in reversed(range(8 if trains else 0)):
            b.compute(f"{NODE_PREFIX}AddmmBackward0", 2 * us, [], sequence=node + 4 * expert)
        b.on_host("aten::gelu", 300)
        b.sync()
    return b
