"""Weights and other constant tensors that every forward pass recomputes."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.rebuilt_weights import CAST, CONSTANT, NORM, OPERAND
from advisor.rules.support.citations import SILENT_INPUTS, XPROF, public_traces
from advisor.rules.support.common import (
    amount_per_step,
    find_places,
    measure_time_in,
    of_step,
    remove_at,
)
from advisor.testing import Examples, TraceBuilder

_NORM_FIX = (
    "Fold the normalisation into the weight once, after loading: remove_parametrizations() of each "
    "module that has one. Outputs stay the same up to rounding."
)
_NORM_CODE = (
    "from torch.nn.utils import parametrize\n"
    "for module in model.modules():\n"
    "    if parametrize.is_parametrized(module):\n"
    '        parametrize.remove_parametrizations(module, "weight")\n'
    "# after torch.nn.utils.weight_norm: remove_weight_norm(module)"
)
_NORM_VERIFY = (
    "Record again: no weight is normalised. Compare the outputs: they differ by rounding."
)

_OPERAND_FIX = (
    "Do this once, when the tensor is loaded or changes, and keep the result. Normalise a search "
    "index when it is built; then its scores are a plain product."
)
_OPERAND_CODE = (
    "index = torch.nn.functional.normalize(index, dim=1)   # once\n"
    "# for each batch of queries\n"
    "scores = torch.nn.functional.normalize(queries, dim=1) @ index.T"
)
_OPERAND_VERIFY = (
    "Record again: nothing comes before the product. Compare the outputs: they differ by rounding."
)

_CONSTANT_FIX = (
    "Compute it once and keep it: a buffer of the module, or a cache by shape where the shape "
    "varies. The results stay the same."
)
_CONSTANT_CODE = (
    "# in __init__\n"
    'self.register_buffer("kernel", make_kernel(), persistent=False)\n'
    "\n"
    "# or, where its shape depends on the input; call it with numbers\n"
    "@functools.lru_cache(maxsize=16)\n"
    "def make_mask(length, device): ..."
)
_CONSTANT_VERIFY = "Record again: these operators are gone, and the outputs are the same."


class RebuiltWeights(Rule):
    """Each forward pass recomputes tensors that do not change. Under autocast these are casts of
    float32 weights to 16 bits, in a frozen or served model. Autocast caches casts only for
    parameters that need a gradient, and only until its block ends. Weight normalisation recomputes
    direction times length. In a search, each query may normalise the whole index. A table of
    positions, a mask or a filter may be computed from plain numbers alone.

    A cast counts when it runs inside a layer and has the shape and type of its weight or bias. No
    backward pass may go through it, because trained weights need the cast. In inference, the large
    matrix of a product counts too, if operators of the same shape compute it right before. The gain
    is the time of these operators, of the work they launch, and of Python around parametrizations.

    The rule needs shapes, except for weight normalisation."""

    id = "rebuilt-weights"
    title = "Tensors that do not change are recomputed in each forward pass"
    found_in = (
        "traces/h100/doc_finder",
        "traces/h100/latent_sampler",
        "traces/h100/voice_stream",
        "recorded/constant_kernel.slow",
        *public_traces(
            "pairs/particle_batch2 pairs/particle_batch32 pairs/particle_batch64 "
            "pairs/particle_batch128"
        ),
    )
    silent_in = (*SILENT_INPUTS, "traces/h100/python_norms")
    validation_note = (
        "on an H100: a sampler's casts, 2.2 ms predicted, 2.5 measured; weight norm of a vocoder, "
        "4.6 ms (up to 9.1) predicted, 8.3 measured. On a CPU: a resampling filter, 66 ms "
        "predicted, 62 measured"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.parametrize.remove_parametrizations.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer",
    )

    min_share = Threshold(0.05, "of the step in operators that recompute weights", XPROF)

    fix = (
        "Store weights that are not trained in 16 bits, once after loading, in the type that "
        "autocast uses. Keep autocast on: it casts the inputs, and norm layers stay in float32."
    )
    code = (
        "for module in model.modules():\n"
        '    if "norm" in type(module).__name__.lower():    # batch norm needs float32\n'
        "        continue\n"
        "    for parameter in module.parameters(recurse=False):\n"
        "        if not parameter.requires_grad:            # when serving: all of them\n"
        "            parameter.data = parameter.data.to({dtype})"
    )
    inference: ClassVar[Mapping[str, Any]] = {
        "code": "for module in model.modules():\n"
        '    if "norm" not in type(module).__name__.lower():   # batch norm needs float32\n'
        "        for parameter in module.parameters(recurse=False):\n"
        "            parameter.data = parameter.data.to({dtype})"
    }
    verify = "Record again: the casts are gone. Compare the outputs: they differ by rounding."
    falsified_by = "weights that change between two forward passes"
    assumptions = ("the weights stay as they are between forward passes",)
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        intervals = a.rebuilt_weights_time
        ns, time_evidence = measure_time_in(a, intervals)
        if ns < self.min_share * a.span_ns:
            return
        table = a.rebuilt_weights
        rows = table["row"].to_numpy()
        dur = a.trace.cpu["dur"].to_numpy()[rows]
        kind = str(
            table.with_columns(ns=dur)
            .group_by("kind")
            .agg(pl.col("ns").sum())
            .sort("ns")["kind"][-1]
        )
        where = "in the recording" if a.per == "recording" else f"in each {a.per}"
        count = max(1, round(len(rows) / a.step_count))
        action = {
            CAST: "casts frozen weights to another type",
            NORM: "normalises weights that are not trained",
            OPERAND: "computes one side of a matrix product anew from the same stored tensors",
            CONSTANT: "computes this tensor from plain numbers",
        }[kind]
        operators = t.count_noun(count, "operator")
        summary = f"{of_step(a, ns)} {action}, in {operators}."
        title = {
            CAST: f"Autocast casts frozen weights again {where}",
            NORM: "weight_norm is computed again in each forward pass",
            CONSTANT: f"A tensor that depends on no input is computed {where}",
        }
        fix, code, verify, link = {
            CAST: (self.fix, self.code.format(dtype=_autocast_type(a)), self.verify, "amp"),
            NORM: (_NORM_FIX, _NORM_CODE, _NORM_VERIFY, "parametrize"),
            OPERAND: (_OPERAND_FIX, _OPERAND_CODE, _OPERAND_VERIFY, "normalize"),
            CONSTANT: (_CONSTANT_FIX, _CONSTANT_CODE, _CONSTANT_VERIFY, "register_buffer"),
        }[kind]
        yield Finding(
            title=title.get(kind, self.title),
            summary=summary,
            evidence=[
                amount_per_step(a, "operators that recompute weights", len(rows), "count"),
                *time_evidence,
                self.compare_share(a, "operators that recompute weights", ns),
            ],
            where=find_places(a, intervals, rows.astype(np.int64)),
            edits=remove_at("rebuilt_weights"),
            fix=fix,
            code=code,
            verify=verify,
            references=[reference for reference in self.references if link in reference],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "autocast over float32 weights": _build_network("cast"),
            "weight normalisation": _build_network("norm"),
            "on a CPU": _build_network("norm", gpu=None),
            "an index that each query normalises": _build_search(2_000_000),
            "a table of positions": _build_positions(),
            "positions on a CPU": _build_positions(gpu=None),
            "an embedding of positions": (
                _build_positions("aten::embedding"),
                "ns < self.min_share * a.span_ns",
            ),
            "lengths that vary": (
                _build_positions(varying=True),
                "ns < self.min_share * a.span_ns",
            ),
            "a small index": (_build_search(600), "ns < self.min_share * a.span_ns"),
            "weights of 16 bits": (_build_network("none"), "ns < self.min_share * a.span_ns"),
            "trained weights": (
                _build_network("cast", trained=True),
                "ns < self.min_share * a.span_ns",
            ),
            "only inputs are cast": (_build_network("input"), "ns < self.min_share * a.span_ns"),
            "little": (_build_network("cast", other_us=300_000), "min_share"),
        }


def _autocast_type(a: Analysis) -> str:
    """Return the 16-bit type of most operators' inputs, as PyTorch spells it."""
    types = a.trace.inputs["types"].gather(a.trace.cpu["inputs"].drop_nulls())
    half, bfloat = (int(types.str.contains(name).sum()) for name in ("(?i)half", "(?i)bfloat16"))
    return "torch.float16" if half > bfloat else "torch.bfloat16"


def _build_network(
    made: str, *, gpu: str | None = "A100", trained: bool = False, other_us: float = 500
) -> TraceBuilder:
    """Build six linear layers under autocast; ``made`` is what each recomputes first."""
    b = TraceBuilder(gpu=gpu)
    number = 0
    host_us = 5 if gpu else 300

    def work(us: float) -> None:
        if gpu:
            b.launch("elementwise_kernel", us)

    for _ in b.steps():
        for _layer in range(6):
            shapes, types = [[64, 512], [2048, 512]], ["c10::BFloat16", "float"]
            if made == "norm":
                with b.op("aten::_weight_norm", [[2048, 512], [2048, 1]], host_us=host_us):
                    work(60)
            if made == "input":
                types = ["float", "c10::BFloat16"]
            with b.op("aten::linear", shapes, types, sequence=number if trained else None):
                if made in ("cast", "input"):
                    cast = shapes[made == "cast"]
                    with (
                        b.op("aten::to", [cast], sequence=number if trained else None),
                        b.op("aten::_to_copy", [cast], host_us=host_us),
                    ):
                        work(60)
                b.run("aten::linear", "ampere_bf16_s16816gemm", 100, shapes, "c10::BFloat16")
            number += 1
        if trained:
            for sequence in reversed(range(number - 6, number)):
                node = "autograd::engine::evaluate_function: ToCopyBackward0"
                with b.op(node, sequence=sequence):
                    work(20)
        b.on_host("aten::add_", other_us)
    return b


def _build_search(rows: int) -> TraceBuilder:
    """Build queries against an index of ``rows`` rows, which is normalised before each product."""
    b = TraceBuilder(gpu="A100")
    for _ in b.steps():
        b.run(
            "aten::linear", "ampere_bf16_s16816gemm", 500, [[64, 768], [768, 768]], "c10::BFloat16"
        )
        for op, us in (("aten::linalg_vector_norm", 300), ("aten::div", 600)):
            b.run(op, "elementwise_kernel", us, [[rows, 768]], "c10::BFloat16")
        shapes = [[64, 768], [768, rows]]
        b.run("aten::matmul", "ampere_bf16_s16816gemm", 400, shapes, "c10::BFloat16")
    return b


def _build_positions(
    made_by: str = "aten::mul", *, gpu: str | None = "A100", varying: bool = False
) -> TraceBuilder:
    """A table of sines for each position, or what an operator with a weight makes of positions."""
    b = TraceBuilder(gpu=gpu)
    for number in b.steps():
        length = 2048 + 8 * number * varying
        options = ["4", "", "", "False"]
        b.compute("aten::linear", 3_000, [[64, 512], [2048, 512]])
        with b.op("aten::arange", [[]] * 5, "Scalar", concrete=[str(length), *options]):
            pass
        with b.op("aten::unsqueeze", [[length], []], concrete=["", "1"]):
            pass
        with b.op("aten::linspace", [[]] * 7, "Scalar", concrete=["0", "1", "512", *options]):
            pass
        other = [512] if made_by == "aten::mul" else [9000, 512]
        b.compute(made_by, 400, [[length, 1], other])
        b.compute("aten::sin", 400, [[length, 512]])
        b.compute("aten::add", 200, [[64, length, 512], [length, 512], []])
    return b
