"""Part of the loop builds an autograd graph that no backward pass uses."""

import numpy as np
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, impact_risk
from advisor.core.intervals import Intervals, covered_length, intersect, union
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.core.run_directory import MAX_VALUE
from advisor.measure import Analysis
from advisor.measure.device.families import find_layer_operators
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import (
    CURED_RECORDINGS,
    REAL_KERNEL,
    SILENT_TRACES,
    TRIED_ON_TRACES,
)
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    of_step,
    per_step,
    row_numbers,
    run_steps_of,
    steps_seen,
)
from advisor.testing import Examples, TraceBuilder

NODE = r"^autograd::engine::evaluate_function"
"""Pattern of a node of the graph in the backward pass."""
FORWARD = r"^aten::"


class EvalWithoutNoGrad(Rule):
    """Forward computation runs with gradients enabled, and no backward pass follows: validation or
    logging without ``torch.no_grad()``, or a second model whose output should be detached. Its
    activations are kept as long as anything refers to the result, which can take more memory than
    training itself. Building the graph takes time as well.

    PyTorch numbers the nodes of the graph as it makes them. A forward operator carries the next
    number, so its nodes have the numbers from there to that of the next operator. In the backward
    pass each node carries its own. The rule counts operators none of whose nodes is in any backward
    pass of the trace, in steps with a backward pass. A few are normal (an output that the loss does
    not use). Operators that make no node do not count, and under ``no_grad`` and ``inference_mode``
    none has a number.

    Among them must be the work of a layer (matrix product, convolution, attention, normalization,
    recurrence). Elementwise operators alone are not a model: distributions check their arguments
    and metrics are computed this way, and nothing of it is kept.

    A trace without any backward pass says nothing, because the pass may be outside it. Neither does
    a file whose end is missing."""

    id = "eval-without-no-grad"
    title = "Forward passes without a backward build an autograd graph"
    training_only = True
    knobs = ("no-grad-evaluation",)
    found_in = ("workloads/eval_with_grad",)
    silent_in = (*SILENT_TRACES, "workloads/eval_with_grad")
    validation_note = (
        "CPU recordings, torch 2.13: fires on validation with gradients enabled, silent on the "
        "same under inference_mode. Silent on A100, V100 and NCCL trainings (0 to 3% of the "
        "operators that make nodes). Silent on two_ranks (34%, but 1% of the step)"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disable-grad-doc",
        "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
    )

    min_numbers = Threshold(10, "graph nodes per step without a backward pass", TRIED_ON_TRACES)
    min_share = Threshold(
        0.10,
        "of the forward pass's host time: up to 3% of the outputs stay unused in real training",
        REAL_KERNEL,
    )
    min_step = Threshold(
        0.02, "of the step, host time: below it the graphs cannot be large", REAL_KERNEL
    )

    fix = (
        "Run validation under torch.inference_mode() or torch.no_grad(). Detach the outputs of a "
        "model that this loss does not train."
    )
    code = (
        "model.eval()\n"
        "with torch.inference_mode():\n"
        "    for batch in validation:\n"
        "        metric.update(model(batch))\n"
        "model.train()"
    )
    verify = "torch.cuda.max_memory_allocated() after validation is lower."
    falsified_by = "a backward pass over these results outside the recorded steps"
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.trace.meta.truncated:
            return  # the backward passes may be in the lost part
        cpu = a.trace.cpu
        number = row_numbers(cpu["sequence"])
        nodes = name_matches(cpu["name"], NODE).to_numpy() & (number >= 0)
        if not nodes.any():
            return
        forward = self._find_forward(a, number)
        if not len(forward):
            return
        forward, first, last = _keep_node_makers(forward, number)
        backward = np.sort(number[nodes])
        has_backward = np.searchsorted(backward, last) > np.searchsorted(backward, first)
        unmatched = forward[~has_backward]
        used = a.steps.used
        start, end = used["ts"].to_numpy(), used["end"].to_numpy()
        ts = cpu["ts"].to_numpy()
        has_training = covered_length(start, end, _union_spans(a, np.flatnonzero(nodes))) > 0
        by_step = [
            len(np.unique(number[unmatched[(ts[unmatched] >= b) & (ts[unmatched] < e)]]))
            for b, e, trains in zip(start, end, has_training, strict=True)  # a handful of steps
            if trains
        ]
        if not by_step or np.median(by_step) < self.min_numbers:
            return
        lost = intersect(_union_spans(a, unmatched), a.spans).total
        forward_ns = intersect(_union_spans(a, forward), a.spans).total
        share = lost / max(forward_ns, 1)
        if share < self.min_share or lost < self.min_step * a.span_ns:
            return
        rows_in_window = rows_in_steps(a, unmatched)
        if not find_layer_operators(cpu["name"].gather(rows_in_window)).any():
            return
        count = round(float(np.median(by_step)))
        yield Finding(
            summary=(
                f"Operators with gradients enabled and no backward pass take {of_step(a, lost)}. "
                f"They keep the activations of {t.count_noun(count, 'graph node')}{per_step(a)}."
            ),
            evidence=[
                self.compare(
                    "graph nodes without a backward pass", count, "min_numbers", "count", per=a.per
                ),
                amount_per_step(a, "host time in forward passes without a backward", lost),
                self.compare("unused graphs, share of the forward pass", share, "min_share"),
                self.compare_share(
                    a, "host time in forward passes without a backward", lost, "min_step"
                ),
            ],
            where=costliest_places(a, rows_in_window),
            impact=impact_risk("the graphs hold memory as long as the program keeps their results"),
        )

    @staticmethod
    def _find_forward(a: Analysis, number: Rows) -> Rows:
        """Return operators that have a number, on the thread that drives the step, outermost of
        their number, and outside the backward pass."""
        cpu = a.trace.cpu
        is_forward = (number >= 0) & (name_matches(cpu["name"], FORWARD)).to_numpy()
        if a.trace.main_thread is not None:
            is_forward &= (cpu["thread"] == a.trace.main_thread).to_numpy()
        operators = np.flatnonzero(is_forward)
        parent = row_numbers(cpu["parent"])[operators]
        is_outermost = (parent < 0) | (number[parent] < 0)
        operators = operators[is_outermost]
        backward = np.flatnonzero(name_matches(cpu["name"], NODE).to_numpy())
        thread = cpu["thread"].to_numpy()
        backward_here = backward[np.isin(thread[backward], np.unique(thread[operators]))]
        ts = cpu["ts"].to_numpy()[operators]
        in_backward = covered_length(ts, ts + 1, _union_spans(a, backward_here)) > 0
        return operators[~in_backward].astype(np.int64)

    @staticmethod
    def examples() -> Examples:
        return {
            "validation": _build_trace(24),
            "without a GPU": _build_trace(24, gpu=False),
            "no_grad": (_build_trace(24, graph=False), "np.median(by_step) < self.min_numbers"),
            "training alone": (_build_trace(0), "np.median(by_step) < self.min_numbers"),
            "an unused output": (_build_trace(2), "min_numbers"),
            "a distribution that checks its arguments": (
                _build_trace(24, name="aten::abs"),
                "find_layer_operators",
            ),
            "no backward pass in the trace": (_build_trace(24, backward=False), "not nodes.any()"),
        }


class EvaluationGraphs(EvalWithoutNoGrad):
    """Evaluation without ``torch.no_grad()`` keeps activations that no backward pass uses. This
    rule reads the recorder's own count, for evaluation that no profiled window contains, such as
    one every thousand steps. It counts forwards between two backward passes whose results have a
    graph, and that no backward pass follows."""

    id = "evaluation-graphs"
    title = "Evaluation builds autograd graphs that no backward pass uses"
    training_only = False  # a run that only evaluates needs no graph either
    reads_record = True
    found_in = ("recorded/evaluation_graphs.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "a CPU recording with a validation loop every twenty steps; silent with no_grad"
    )

    min_numbers = Threshold(
        10, "forwards in the run: fewer may be a look at one output", TRIED_ON_TRACES
    )
    min_step = Threshold(
        0.02, "of the run, between the steps: below it the graphs cannot be large", REAL_KERNEL
    )

    inference = {
        "title": "Forward passes build autograd graphs that nothing uses",
        "fix": "Run the model under torch.inference_mode() or torch.no_grad().",
        "code": "model.eval()\nwith torch.inference_mode():\n    result = model(batch)",
        "verify": "torch.cuda.max_memory_allocated() is lower.",
        "falsified_by": "a gradient that is computed outside the recorded steps",
    }

    def check(self, a: Analysis) -> Outcomes:
        """Sum up the counts after the first step. Between a loader's batches, forward passes over
        data in memory belong to the step before."""
        run_steps = run_steps_of(a)
        infers = run_steps.inference  # then the whole run is the evaluation
        next_steps = zip(run_steps.steps, run_steps.steps[0 if infers else 1 :], strict=False)
        pairs = [(before, step) for before, step in next_steps if step.unused_graphs > 0]
        count = sum(step.unused_graphs for _, step in pairs)
        if count < self.min_numbers:
            return
        forward = run_steps.phase("forward")
        usual = 0.0 if forward is None or infers else float(np.median(forward))
        spent = sum(
            min(max(step.evaluation or before.phases.get("forward", 0) - usual, 0), MAX_VALUE)
            for before, step in pairs
        )
        run_ns = run_steps.outside_steps_ns + float(run_steps.dur.sum())
        if spent < self.min_step * run_ns:
            return
        if not a.record_only and any(super().check(a)):
            return  # the window shows where
        yield Finding(
            summary=(
                f"{t.count_noun(count, 'forward pass', 'forward passes')} "
                + (
                    "ran with gradients enabled, and the run learns nothing. "
                    if infers
                    else "between the training steps ran with gradients enabled, in "
                    f"{t.count_noun(len(pairs), 'pause')} of "
                    f"{t.format_duration(spent / len(pairs))} on average. "
                )
                + "Each keeps its activations as long as its result is referred to."
            ),
            evidence=[
                self.compare("forward passes", count, "min_numbers", "count"),
                Evidence("time of the pauses with such passes", spent, "ns"),
                self.compare("time of these pauses, share of the run", spent / run_ns, "min_step"),
                steps_seen(run_steps),
            ],
            impact=impact_risk("the graphs hold memory as long as the program keeps their results"),
        )

    @staticmethod
    def examples() -> Examples:
        b = TraceBuilder()
        run = b.record_of_run()
        for _ in range(80):
            run.step(10, forward=8, fields={"unused_graphs": 1})
        return {
            "validation": _build_validation(10, 60),
            "a run that never trains": b,
            "no_grad": (_build_validation(0, 60), "count < self.min_numbers"),
            "one output": (_build_validation(1, 60), "min_numbers"),
            "a short validation": (_build_validation(10, 1), "min_step"),
        }


def _build_validation(forwards: int, ms: float) -> TraceBuilder:
    b = TraceBuilder()
    run = b.record_of_run()
    for n in range(80):
        pause = n > 0 and n % 10 == 0
        fields = {"unused_graphs": forwards} if pause else {}
        run.step(10, forward=3, backward=6, evaluation=ms if pause else 0, fields=fields)
    return b


def _keep_node_makers(forward: Rows, number: Rows) -> tuple[Rows, Rows, Rows]:
    """Return the operators that made nodes, in order of time, with the first number of each and the
    one after its last. The last operator of all counts as one node, as its end is unknown."""
    first = number[forward]
    end = np.append(first[1:], first[-1] + 1)
    makes_node = end > first
    return forward[makes_node], first[makes_node], end[makes_node]


def _union_spans(a: Analysis, rows: NDArray[np.intp] | Rows) -> Intervals:
    ts = a.trace.cpu["ts"].to_numpy()[rows]
    return union(ts, ts + a.trace.cpu["dur"].to_numpy()[rows])


def _build_trace(
    unused_count: int,
    *,
    graph: bool = True,
    backward: bool = True,
    gpu: bool = True,
    name: str = "aten::linear",
) -> TraceBuilder:
    b = TraceBuilder() if gpu else TraceBuilder(gpu=None)
    first = 0

    for _ in b.steps(5):
        numbers = range(first, first + 12)
        for number in numbers:
            b.compute("aten::linear", 50, sequence=number, host_us=60)
        if backward:
            for number in reversed(numbers):
                node = "autograd::engine::evaluate_function: AddmmBackward0"
                b.compute(node, 50, sequence=number, host_us=60)
        first += 12
        for _ in range(unused_count):
            b.compute(name, 50, sequence=first if graph else None, host_us=60)
            first += 1
    return b
