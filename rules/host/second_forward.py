"""Training steps that run their forward pass twice."""

import numpy as np

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.intervals import covered_length
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.families import find_layer_operators
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    scale_edit,
    sum_of_events,
    work_launched_in,
)
from advisor.testing import Examples, TraceBuilder


class SecondForward(Rule):
    """A training step runs the model a second time on the same batch. It computes a metric or logs
    an output, which the first pass already provides.

    The rule looks for layers that run again in the step, with inputs of the same shapes and without
    a backward pass. All trained layers must run again. In a trace, a teacher or a target network of
    the same architecture looks the same, so the low end of the gain is zero. The recorder compares
    the module, its weights and its input tensors in 12 of 60 forwards; if none repeats, the rule is
    silent. Validation on separate batches runs between steps, and does not count."""

    id = "second-forward"
    title = "The forward pass runs twice in each step"
    training_only = True
    sampled_part = "forward"
    found_in = ("recorded/second_forward.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording, torch 2.13: a second forward for accuracy, 29% of the step predicted, "
        "28% measured"
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.Tensor.detach.html",)

    min_share = Threshold(0.05, "of the step in layers that run again", XPROF)
    worst_factor = Factor(1.0, "of the time remains if the second model is a different one", CHOSEN)
    min_forwards = Threshold(12, "compared forwards of the record: one sample", CHOSEN)
    min_repeated_share = Threshold(0.2, "of them repeat an earlier one", CHOSEN)
    worst_confirmed_factor = Factor(0.2, "of the time remains if the recorder confirmed it", CHOSEN)

    fix = (
        "Keep the outputs of the first forward pass, and compute metrics from them. detach() takes "
        "them off the graph. If the second pass needs other settings (no dropout), run it every N "
        "steps."
    )
    code = (
        "logits = model(images)\n"
        "loss = criterion(logits, labels)\n"
        "correct = (logits.detach().argmax(-1) == labels).sum()   # not model(images) again"
    )
    verify = "Record again: forward is shorter, and each layer runs once per step."
    falsified_by = "a second pass with other weights, another batch or other settings"
    assumptions = ("it is the same model with the same batch, not a teacher",)
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        second_passes = a.second_forwards
        ns = work_launched_in(a, second_passes) if a.device_id is not None else second_passes.total
        if ns < self.min_share * a.span_ns:
            return
        repeated_share = self._read_repeated_share(a)
        if repeated_share is not None and repeated_share < self.min_repeated_share:
            return
        table = outermost_in_steps(a)
        ts = table["ts"].to_numpy()
        table = table.filter(covered_length(ts, ts + 1, second_passes) > 0)
        table = table.filter(find_layer_operators(table["name"]))
        selections = [Select(on=on, at="second_forward") for on in ("gpu", "host", "gap")]
        evidence = [
            amount_per_step(a, "layers that run again", len(table), "count"),
            amount_per_step(a, "time of the second pass", ns),
            self.compare_share(a, "time of the second pass", ns),
        ]
        worst = self.worst_factor
        if repeated_share is not None:
            worst = self.worst_confirmed_factor
            evidence.append(
                self.compare(
                    "forwards with the weights and input of an earlier one",
                    repeated_share,
                    "min_repeated_share",
                )
            )
        yield Finding(
            summary=(
                f"{len(table) // a.step_count} layers run a second time in each step with inputs "
                f"of the same shapes, and no backward pass follows. This takes {of_step(a, ns)}."
            ),
            evidence=evidence,
            where=costliest_places(
                a, table["row"].to_numpy(), table["ns"].to_numpy().astype(np.int64), top=1
            ),
            edits=[scale_edit(select, 0.0, 0.0, worst) for select in selections],
            assumptions=[] if repeated_share is not None else list(self.assumptions),
        )

    def _read_repeated_share(self, a: Analysis) -> float | None:
        """Return the share of compared forwards that repeat an earlier one, or ``None`` if too few
        were compared."""
        events = [] if a.run_steps is None else a.run_steps.rank_record.events_of("repeated_inputs")
        forwards, repeats = (sum_of_events(events, key) for key in ("forwards", "again"))
        return repeats / forwards if forwards >= self.min_forwards else None

    @staticmethod
    def examples() -> Examples:
        return {
            "a forward for metrics": _build_passes(),
            "the recorder saw it": _build_run(again=6),
            "the recorder saw other modules or batches": (
                _build_run(again=1),
                "min_repeated_share",
            ),
            "few forwards were compared": _build_run(again=0, forwards=2),
            "on a CPU": _build_passes(gpu=None),
            "with a graph": _build_passes(graph=True),
            "one forward": (_build_passes(times=1), "ns < self.min_share * a.span_ns"),
            "another batch size": (_build_passes(batch=48), "ns < self.min_share * a.span_ns"),
            "both are trained": (_build_passes(trained=True), "ns < self.min_share * a.span_ns"),
            "a small one": (_build_passes(other_us=200_000), "min_share"),
        }


def _build_run(*, again: int, forwards: int = 12) -> TraceBuilder:
    b = _build_passes(gpu=None)
    r = b.record_of_run()
    r.steps(60, 10, forward=4, backward=5)
    r.event("repeated_inputs", forwards=forwards, again=again)
    return b


def _build_passes(
    *,
    gpu: str | None = "A100",
    times: int = 2,
    batch: int = 32,
    graph: bool = False,
    trained: bool = False,
    other_us: float = 500,
) -> TraceBuilder:
    """Build a network of six layers that runs ``times`` times in each step."""
    b = TraceBuilder(gpu=gpu)
    number = 0

    def run(name: str, shapes: list[list[int]], sequence: int | None) -> None:
        with b.op(name, shapes, sequence=sequence, host_us=20 if gpu else 200):
            if gpu:
                b.launch("ampere_sgemm_128x64_nn", 200)

    for _ in b.steps():
        passes = []
        for index in range(times):
            rows = batch if index else 32
            passes.append(range(number, number + 6))
            for layer, sequence in enumerate(passes[-1]):
                shapes = [[rows, 128 + layer], [128, 128 + layer]]
                run("aten::linear", shapes, sequence if graph or trained or not index else None)
            number += 6
        for sequences in reversed(passes if trained else passes[:1]):
            for sequence in reversed(sequences):
                run("autograd::engine::evaluate_function: AddmmBackward0", [], sequence)
        b.on_host("aten::add_", other_us)
    return b
