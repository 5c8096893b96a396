"""Gradients are filled with zeros, and then added to."""

import numpy as np

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import climb_stack, parent_rows
from advisor.rules.support.citations import TRIED_ON_TRACES, public_traces
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    row_numbers,
    scale_edit,
)
from advisor.testing import Examples, TraceBuilder

ZERO_GRAD_RANGE = r"^Optimizer\.zero_grad"
"""Range of ``zero_grad()`` in a trace."""
ACCUMULATION_NODE = r"^torch::autograd::AccumulateGrad$"
"""Autograd's node that stores a gradient. It launches nothing if there is no gradient yet."""


class ZeroedGradients(Rule):
    """``zero_grad(set_to_none=False)`` fills each gradient with zeros, and the backward pass adds
    to it. With ``set_to_none=True``, the default since PyTorch 2.0, it frees the gradients. The
    backward pass then keeps its result: neither is launched.

    The rule counts launches inside the range ``Optimizer.zero_grad``, and launches of autograd's
    nodes that accumulate gradients. Where gradients are summed over several batches, there are more
    additions than fills, and only the fills count."""

    id = "zeroed-gradients"
    title = "Gradients are filled with zeros and added to"
    training_only = True
    found_in = public_traces(
        "linear_2080ti_launch_bound pairs/loader_autograd_workers0 pairs/loader_autograd_workers4 "
        "pairs/loader_profiler_workers0 pairs/loader_profiler_workers4"
    )
    silent_in = ("traces/nccl_collectives", "traces/mi250_train")
    validation_note = (
        "40 steps of linear layers and four runs of a ResNet: a fill and an addition for each "
        "parameter (fires)"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html",
    )

    min_share = Threshold(0.05, "of the launches, or of device time", TRIED_ON_TRACES)
    max_ratio = Threshold(
        1.1, "additions per fill: more are sums over several batches", TRIED_ON_TRACES
    )

    remaining_share = Factor(
        0.1, "of the host time of fills and additions remains", TRIED_ON_TRACES
    )
    best_remaining_share = Factor(0.0, "of it, at best", TRIED_ON_TRACES)
    worst_remaining_share = Factor(0.5, "of it, at worst", TRIED_ON_TRACES)

    fix = (
        "Free gradients instead of zeroing them: zero_grad(set_to_none=True). The backward pass "
        "then stores instead of adding."
    )
    code = "optimizer.zero_grad(set_to_none=True)"
    verify = "Profile again: no kernels inside Optimizer.zero_grad and AccumulateGrad."
    falsified_by = "code that needs a gradient of zero where a parameter got none"
    assumptions = ("nothing reads .grad between zero_grad() and the backward pass",)
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        names = a.trace.cpu["name"]
        if a.device_id is None or not name_matches(names, ZERO_GRAD_RANGE).any():
            return
        launch = row_numbers(a.trace.gpu["launch"])
        dur = a.trace.gpu["dur"].to_numpy()
        parent, rows = parent_rows(a.trace), {}
        for pattern in (ZERO_GRAD_RANGE, ACCUMULATION_NODE):
            enclosing_row = climb_stack(parent, name_matches(names, pattern).to_numpy(), launch)
            rows[pattern] = a.in_window & (launch >= 0) & (enclosing_row >= 0)
        fills, additions = (int(mask.sum()) for mask in rows.values())
        selected = [ZERO_GRAD_RANGE, ACCUMULATION_NODE]
        if additions > self.max_ratio * fills:
            selected.remove(ACCUMULATION_NODE)
        needless = np.logical_or.reduce([rows[pattern] for pattern in selected])
        total = int(a.in_window.sum())
        time_share = dur[needless].sum() / max(dur[a.in_window].sum(), 1)
        share = max(int(needless.sum()) / max(total, 1), float(time_share))
        if not fills or share < self.min_share:
            return
        steps = a.step_count
        yield Finding(
            summary=(
                f"zero_grad() launches {fills / steps:,.0f} fills per step, and the backward pass "
                f"{additions / steps:,.0f} additions to them, of {total / steps:,.0f} launches. "
                f"They take {of_step(a, int(dur[needless].sum()))} on the GPU."
            ),
            evidence=[
                amount_per_step(a, "fills of gradients", fills, "count"),
                amount_per_step(a, "additions to gradients", additions, "count"),
                amount_per_step(a, "device time of fills and additions", int(dur[needless].sum())),
                self.compare(
                    "fills and additions, share of launches or device time", share, "min_share"
                ),
                Evidence("additions per fill", additions / fills),
            ],
            where=costliest_places(a, launch[rows[ZERO_GRAD_RANGE]], dur[rows[ZERO_GRAD_RANGE]]),
            edits=[
                edit
                for pattern in selected
                for edit in (
                    Edit(op="remove", select=Select(on="gpu", under=pattern)),
                    scale_edit(
                        Select(on="host", kind=("op",), under=pattern),
                        *self.range_of("remaining_share"),
                    ),
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        few = "share < self.min_share"
        return {
            "a fill and an addition for each": _build_training(),
            "several batches": _build_training(batches=4),
            "set to None": (_build_training(zeros=False), "not fills"),
            "little next to the model": (_build_training(layers=1, other=60), few),
        }


def _build_training(
    *, zeros: bool = True, batches: int = 1, layers: int = 20, other: int = 2
) -> TraceBuilder:
    b = TraceBuilder()
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
    for _ in b.steps():
        with b.range("Optimizer.zero_grad#SGD.zero_grad"):
            if zeros:
                b.run("aten::zero_", kernel, 4, times=layers, host_us=10)
        for _ in range(batches):
            for _ in range(layers):
                b.run("aten::mm", "ampere_sgemm_128x64_nn", 5, times=other, host_us=10)
                with b.op("torch::autograd::AccumulateGrad"):
                    if zeros:
                        b.run("aten::add_", kernel, 4, host_us=10)
    return b
