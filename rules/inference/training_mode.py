"""A model that does not train runs in training mode, with active dropout layers."""

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host import stacks
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.support.common import Rows, amount_per_step, costliest_places, of_step
from advisor.rules.support.repeated_inputs import read_repeats
from advisor.testing import Examples, TraceBuilder

DROPOUT = r"^aten::(?:feature_|alpha_|feature_alpha_)?dropout_?$"
"""Operator of a dropout layer. In evaluation mode it returns its input and calls nothing."""
_DRAWING_OPS = r"^aten::(?:bernoulli_|native_dropout|_fused_dropout)$"
"""Operators that a dropout layer calls in training mode."""


class TrainingMode(Rule):
    """Dropout layers are active in a program that learns nothing: no backward pass and no optimizer
    in the whole recording. ``model.eval()`` is missing. Results change from call to call, and
    random numbers are drawn for each activation. Some modules also take a fused path in evaluation
    mode only (``nn.TransformerEncoderLayer``).

    In evaluation mode ``aten::dropout`` calls no other operator. In training mode it draws numbers
    (``aten::native_dropout``, ``aten::bernoulli_``).

    The rule is silent if the recorder saw a module get the same inputs again, with other outputs
    each time. Then dropout is meant to be active (Monte Carlo estimates).

    The gain is the time of these operators. Further savings of a fused path, and of a graph that is
    not built, are not recorded."""

    id = "training-mode"
    title = "The model runs in training mode, and nothing trains"
    found_in = ("recorded/training_mode.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.eval",
        "https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval",
    )

    min_steps = Threshold(3, "steps or passes: fewer may be a part of a training", CHOSEN)

    fix = (
        "Call model.eval() once before the loop, unless dropout is meant, and run the loop under "
        "torch.inference_mode(). Dropout then returns its input, and no graph is built."
    )
    code = "model.eval()\nwith torch.inference_mode():\n    output = model(batch)"
    verify = "Two calls with equal inputs give equal outputs. aten::dropout calls nothing."
    falsified_by = "dropout that is meant to be active, as for Monte Carlo estimates"
    confidence = 0.9
    assumptions = ("dropout is not meant to be active (Monte Carlo estimates)",)

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or not a.forward_only or a.steps.source == "whole trace":
            return
        if _are_outputs_sampled(a):
            return
        layers = _find_active_layers(a)
        if not len(layers) or a.step_count < self.min_steps:
            return
        ns = int(a.trace.cpu["dur"].gather(layers).sum())
        on_gpu = a.device_id is not None
        calls = round(len(layers) / a.step_count)
        yield Finding(
            summary=(
                f"{t.count_noun(calls, 'dropout layer')} per step drop values at random"
                + ("" if on_gpu else f" and take {of_step(a, ns)}")
                + ", but no backward pass or optimizer was recorded. Equal inputs give different "
                "results."
            ),
            evidence=[
                amount_per_step(a, "active dropout layers", len(layers), "count"),
                amount_per_step(a, "host time in active dropout layers", ns),
                self.compare("steps or passes", a.step_count, "min_steps", "count"),
            ],
            where=costliest_places(a, layers),
            costs_more_than_recorded=True,
            edits=[
                Edit(op="remove", select=Select(on="host", kind=("op",), name=DROPOUT)),
                *([Edit(op="remove", select=Select(on="gpu", under=DROPOUT))] if on_gpu else []),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "on a GPU": _build_model(),
            "on a CPU": _build_model(gpu=None),
            "evaluation mode": (_build_model(active=False), "not len(layers)"),
            "a training": (_build_model(trains=True), "not a.forward_only"),
            "a single pass": (_build_model(steps=2), "min_steps"),
            "a benchmark on one input": _build_model(same_input=11),
            "Monte Carlo estimates": (_build_model(same_input=9), "_are_outputs_sampled"),
        }


def _are_outputs_sampled(a: Analysis) -> bool:
    """Return whether a module gets most of its inputs again, with other outputs each time."""
    events = [] if a.rank_record is None else a.rank_record.events_of("repeated_inputs")
    return any(
        2 * (module.same_input - module.again) > module.forwards and not module.has_one_input
        for module in read_repeats(events)
    )


def _find_active_layers(a: Analysis) -> Rows:
    """Find dropout layers in the analysed window that draw numbers: rows of ``trace.cpu``."""
    cpu = a.trace.cpu
    is_layer = name_matches(cpu["name"], DROPOUT).to_numpy()
    if not is_layer.any():
        return np.empty(0, dtype=np.int64)
    drawing_rows = np.flatnonzero(name_matches(cpu["name"], _DRAWING_OPS).to_numpy())
    layer_above = np.append(stacks.innermost_ancestor(stacks.parent_rows(a.trace), is_layer), -1)
    rows = np.unique(layer_above[stacks.parent_rows(a.trace)[drawing_rows]])
    return rows_in_steps(a, rows[rows >= 0].astype(np.int64))


def _build_model(
    *,
    gpu: str | None = "A100",
    active: bool = True,
    trains: bool = False,
    steps: int = 5,
    same_input: int = 0,
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)

    for _ in b.steps(steps):
        for _ in range(6):
            b.compute("aten::linear", 400)
            with b.op("aten::dropout", host_us=2):
                if active:
                    b.compute("aten::native_dropout", 200, kernel="fused_dropout_kernel_vec")
        if trains:
            b.compute("autograd::engine::evaluate_function: AddmmBackward0", 800)
    if same_input:
        run = b.record_of_run()
        run.steps(60, 5, forward=4)
        module = {"name": "Net", "frames": [], "forwards": 12, "same_input": same_input}
        run.event("repeated_inputs", forwards=12, again=0, modules=[module])
    return b
