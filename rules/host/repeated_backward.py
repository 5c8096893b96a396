"""Graphs that the backward pass goes through more than once."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Finding, Outcomes
from advisor.core.intervals import covered_length
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.host.repeated_passes import differentiated_nodes
from advisor.measure.host.stacks import ENGINE_NODE, NODE_PREFIX
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    measure_time_in,
    of_step,
    remove_at,
)
from advisor.testing import Examples, TraceBuilder

_NORM = r"^aten::(?:linalg_vector_)?norm$"


class RepeatedBackward(Rule):
    """The backward pass goes through the same graph more than once. Each loss has a ``backward()``
    of its own with ``retain_graph=True``. Or a tensor that should be detached leads into another
    network's graph: in a GAN, the discriminator's loss then goes back through the generator.

    A node of the graph is known by its name and the sequence number of its forward operator. The
    last run of a node in a step is needed; the fix saves the earlier ones. It also saves all runs
    in later steps: a recurrent state that is not detached keeps the graphs of earlier steps. Nodes
    that are differentiated themselves (``create_graph=True``, gradient penalties) do not count.

    Where norms are computed between the passes, as by GradNorm, a pass needs to reach the last
    shared layer only. If an optimizer steps between the runs of a node, its losses cannot be added,
    and the advice is ``detach()``.

    Two calls of ``autograd.grad(output, …, create_graph=True)`` on one output are the exception:
    both passes begin at the same node. The nodes that both run count once, with the derivatives of
    their operators in later passes."""

    id = "repeated-backward"
    title = "The backward pass goes through the same graph again"
    training_only = True
    sampled_part = "backward"
    found_in = ("traces/h100/face_gan",)
    silent_in = (*SILENT_INPUTS, "traces/h100/python_norms")
    validation_note = (
        "a GAN on an H100: 4.3 ms predicted, 4.4 measured; a detector with three backward passes, "
        "14 to 25 ms measured, inside the range"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html",
        "https://docs.pytorch.org/docs/stable/notes/autograd.html",
    )

    min_share = Threshold(0.05, "of the step in nodes that run again", XPROF)

    fix = (
        "Add the losses and call backward() once: the gradients are the same. If one network only "
        "judges the output of another, detach() that output first. Detach the state that one step "
        "passes to the next."
    )
    code = (
        "loss = loss_class + loss_box + loss_mask\n"
        "loss.backward()                        # once, without retain_graph=True\n"
        "# GAN, discriminator's step: score = discriminator(fake.detach())"
    )
    verify = "Record again: each node runs once per step; the loss of a fixed seed is the same."
    falsified_by = (
        "code that needs the gradient of each loss (PCGrad, GradNorm, split backward passes)"
    )
    assumptions = ("only the sum of the gradients is used",)
    confidence = 0.85
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "an update between": {
            "fix": "Use detach() on the output that one network passes to the loss of another, and "
            "on the state that one step passes to the next. An optimizer steps between these "
            "passes, so their losses cannot be added.",
            "code": "score = discriminator(fake.detach())    # GAN, discriminator's step\n"
            "d_loss.backward()                       # without retain_graph=True\n"
            "# a recurrent state, after each step: hidden = hidden.detach()",
            "falsified_by": "a first loss that must also train the network of the shared graph",
            "assumptions": ("the first pass's gradients of the shared graph are not used",),
        },
        "norms of gradients": {
            "fix": "Ask autograd.grad for the weights that you need: to balance losses, those of "
            "the last shared layer. Each pass then ends there, and does not go through the layers "
            "before it.",
            "code": "# GradNorm and its like\n"
            "grad, = torch.autograd.grad(loss, trunk.last.weight, retain_graph=True)\n"
            "norm = grad.norm()",
            "falsified_by": "code that needs the gradients of all weights (PCGrad)",
            "assumptions": ("the gradients of one shared layer are enough",),
        },
        "one output twice": {
            "title": "One output is differentiated several times",
            "fix": "Ask autograd.grad for all inputs in one call. If the calls differ in "
            "grad_outputs, pass these as one batch with is_grads_batched=True.",
            "code": "u_x, u_t = torch.autograd.grad(\n"
            "    u, (x, t), grad_outputs=torch.ones_like(u), create_graph=True)",
            "falsified_by": "the same step time with one call",
            "assumptions": (
                "the calls have the same grad_outputs, or can be combined into one batch",
            ),
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        repeats = a.repeated_backwards
        ns, time_evidence = measure_time_in(a, repeats)
        if ns < self.min_share * a.span_ns:
            return
        cpu = a.trace.cpu
        rows = np.flatnonzero(name_matches(cpu["name"], ENGINE_NODE).to_numpy())
        ts = cpu["ts"].to_numpy()[rows]
        in_steps = covered_length(ts, ts + 1, a.steps.host_spans) > 0
        repeated = in_steps & (covered_length(ts, ts + 1, repeats) > 0)
        if not repeated.any():
            return
        yield Finding(
            summary=(
                f"{repeated.sum() / in_steps.sum():.0%} of the nodes that the backward pass runs "
                f"are repeats: it goes through one graph several times. The repeats take "
                f"{of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "nodes of the backward pass", int(in_steps.sum()), "count"),
                amount_per_step(
                    a, "nodes of the backward pass that run again", int(repeated.sum()), "count"
                ),
                *time_evidence,
                self.compare_share(a, "nodes that run again", ns),
            ],
            where=costliest_places(a, rows[repeated], top=1),
            edits=remove_at("repeated_backward"),
            **self._choose_case(a, rows, repeated),
        )

    def _choose_case(
        self, a: Analysis, rows: Rows, repeated: NDArray[np.bool_]
    ) -> Mapping[str, Any]:
        """Return the texts of the case: one output used twice, norms of gradients or an update
        between passes."""
        if np.isin(rows[repeated], differentiated_nodes(a)).any():
            return self.case("one output twice")
        if _has_norms_between(a, rows, repeated):
            return self.case("norms of gradients")
        return self.case("an update between") if _is_updated_between(a, rows, repeated) else {}

    @staticmethod
    def examples() -> Examples:
        return {
            "two losses, each with its own backward pass": _build_training(2),
            "on a CPU": _build_training(2, gpu=None),
            "each loss updates a network of its own": _build_training(2, updates=True),
            "a state that is not detached": _build_training(1, kept=1),
            "one backward pass": (_build_training(1), "ns < self.min_share * a.span_ns"),
            "a gradient penalty": (
                _build_training(2, differentiated=True),
                "ns < self.min_share * a.span_ns",
            ),
            "the norm of each loss's gradients": _build_training(3, norms=True),
            "one output differentiated twice": _build_training(2, twice=True, gpu=None),
            "a small shared part": (_build_training(2, other_us=300_000), "min_share"),
        }


def _has_norms_between(a: Analysis, rows: Rows, repeated: NDArray[np.bool_]) -> bool:
    """Return whether norms are computed between the passes, and not only after the last one."""
    names, ts = a.trace.cpu["name"], a.trace.cpu["ts"].to_numpy()
    norms = rows_in_steps(a, np.flatnonzero(name_matches(names, _NORM).to_numpy()))
    starts = a.steps.used["ts"].to_numpy()
    again, last = ts[rows[repeated]], ts[rows]
    count = 0
    for start, end in zip(starts, [*starts[1:], np.inf], strict=True):
        first = again[(again >= start) & (again < end)]
        final = last[(last >= start) & (last < end)]
        if len(first):
            count += int(((ts[norms] > first[0]) & (ts[norms] < final[-1])).sum())
    return count >= 2 * a.step_count


def _is_updated_between(a: Analysis, rows: Rows, repeated: NDArray[np.bool_]) -> bool:
    """Return whether an optimizer steps between the first and the last run of most repeated nodes.
    ``rows`` has all runs of nodes."""
    cpu = a.trace.cpu
    steps = cpu["ts"].filter(name_matches(cpu["name"], OPTIMIZER_STEP)).sort().to_numpy()
    runs = pl.DataFrame(
        {
            "sequence": cpu["sequence"].gather(rows),
            "name": cpu["name"].gather(rows).to_physical(),
            "before": np.searchsorted(steps, cpu["ts"].to_numpy()[rows]),
        }
    )
    key = ("sequence", "name")
    between = pl.col("before").max().over(*key) > pl.col("before").min().over(*key)
    repeated_runs = runs.select("sequence", between=between).filter(pl.Series(repeated))
    share = repeated_runs.filter(pl.col("sequence").is_not_null())["between"].mean()
    return isinstance(share, float) and share > 0.5


def _build_training(
    passes: int,
    *,
    kept: int = 0,
    gpu: str | None = "A100",
    differentiated: bool = False,
    twice: bool = False,
    other_us: float = 500,
    updates: bool = False,
    norms: bool = False,
) -> TraceBuilder:
    """Build six layers, and backward passes through them and those of ``kept`` earlier steps.
    ``differentiated``: the first has derivatives; ``twice``: all have."""
    b = TraceBuilder(gpu=gpu)
    number, graphs = 0, list[range]()

    def run(name: str, sequence: int, inner: int | None = None) -> None:
        with b.op(name, [[32, 128], [128, 128]], sequence=sequence, host_us=20 if gpu else 200):
            if inner is not None:
                b.on_host("aten::mul", 2, [[32, 128]], sequence=inner)
            if gpu:
                b.launch("ampere_sgemm_128x64_nn", 200)

    for _ in b.steps():
        graphs = (
            [*graphs[-kept:], range(number, number + 6)] if kept else [range(number, number + 6)]
        )
        for sequence in graphs[-1]:
            run("aten::linear", sequence)
        number += 6
        for pass_number in range(passes):
            for graph in reversed(graphs):
                for sequence in reversed(graph):
                    inner = number if twice or (differentiated and not pass_number) else None
                    number += inner is not None
                    run(f"{NODE_PREFIX}AddmmBackward0", sequence, inner)
                    b.on_host(f"{NODE_PREFIX}torch::autograd::AccumulateGrad")
            if norms:
                b.on_host("aten::linalg_vector_norm")
            if updates:
                with b.range("Optimizer.step#Adam.step"):
                    b.on_host("aten::add_", 20)
        if differentiated or twice:
            for sequence in reversed(range(number - 6 * (passes if twice else 1), number)):
                run(f"{NODE_PREFIX}MulBackward0", sequence)
        b.on_host("aten::add_", other_us)
    return b
