"""Parameter groups of an optimizer are updated one by one."""

import re
from typing import Any, ClassVar

from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.measure.device.group_rounds import GroupRounds, optimizer_steps, rounds_of_a_step
from advisor.measure.host.names import OPTIMIZER_STEP
from advisor.rules.support.citations import CHOSEN, SILENT_TRACES, TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import amount_per_step, costliest_places, of_step, scale_edit
from advisor.testing import Examples, TraceBuilder

FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of PyTorch with ``fused=True``."""


class ManyParameterGroups(Rule):
    """PyTorch's optimizers work group by group. The foreach implementation updates a group in some
    ten operators, and the fused one in a single operator. With a group for each parameter there is
    nothing left to combine. The host runs these operators hundreds of times, and the GPU waits for
    it. These groups come from code that gives each parameter its learning rate or weight decay by
    name.

    The rule counts calls of the rarest operator on lists of tensors inside one ``Optimizer.step#…``
    that works on all parameters. Parameters of two types or devices count as two groups, because
    PyTorch splits a group that way. Plain arguments of the operators show how many groups differ in
    their settings. The others can be merged. Where all of them differ, the fused implementation
    still replaces some ten operators of each group by one.

    The gain is host time. Work for each parameter stays: its gradient and state are looked up one
    by one. While the device is behind, host time costs nothing, and the replay says so."""

    id = "many-parameter-groups"
    title = "The optimizer updates many small parameter groups one by one"
    needs_shapes = True
    training_only = True
    knobs = ("fused-optimizer",)
    sampled_part = "optimizer"
    found_in = ("traces/h100/essay_scorer",)
    silent_in = ("recorded/single_tensor.cured", *SILENT_TRACES)
    validation_note = (
        "on an H100: AdamW over 198 groups of one parameter each, 27 ms predicted (15 to 60), 17 "
        "to 43 ms measured in two runs"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/optim.html#per-parameter-options",
        "https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
    )

    min_groups = Threshold(30, "groups in a step of the optimizer", TRIED_ON_TRACES)
    max_tensors = Threshold(10, "tensors in a group, on average", TRIED_ON_TRACES)
    min_share = Threshold(0.05, "of the step in the optimizer, on the host", XPROF)
    min_mergeable_share = Threshold(
        0.5, "of the groups share their settings with another one", CHOSEN
    )
    host_factor = Factor(0.2, "of a merged group's host time remains", CHOSEN)
    best_host_factor = Factor(0.1, "of it, at best", CHOSEN)
    worst_host_factor = Factor(0.4, "of it, at worst", CHOSEN)
    fused_factor = Factor(0.4, "of the host time remains with fused groups", CHOSEN)
    best_fused_factor = Factor(0.25, "of it, at best", CHOSEN)
    worst_fused_factor = Factor(0.7, "of it, at worst", CHOSEN)

    fix = (
        "Merge parameters with the same settings into one group, where the optimizer is made: "
        "{groups} groups have {settings} different settings. The update of each parameter stays "
        "the same.{fused}"
    )
    code = (
        "merged = {{}}\n"
        "for group in groups:  # as they are now\n"
        "    settings = [each for each in group.items()\n"
        '                if each[0] not in ("params", "fused", "foreach")]\n'
        '    merged.setdefault(tuple(settings), []).extend(group["params"])\n'
        "groups = []\n"
        "for settings, own in merged.items():\n"
        '    groups.append({{"params": own, **dict(settings)}})\n'
        "# and its other arguments as they are now\n"
        "optimizer = torch.optim.{optimizer}(groups{arguments})"
    )
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "the settings differ": {
            "fix": "Use the fused implementation: one operator for each of the {groups} groups, "
            "in place of some ten. Merge groups whose settings are the same.",
            "code": "# and its other arguments as they are now\n"
            "optimizer = torch.optim.{optimizer}(groups, fused=True)",
            "falsified_by": "parameters that are sparse, complex or on different devices",
            "assumptions": ("all parameters are on the GPU",),
        }
    }
    verify = "Record again: Optimizer.step is shorter and runs fewer operators."
    falsified_by = "code that changes the settings of single groups while training"
    assumptions = ("checkpoints of the optimizer with the old groups need not be loaded",)
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.span_ns:
            return
        steps = optimizer_steps(a)
        if not len(steps):
            return
        rounds_by_step = rounds_of_a_step(a, steps)
        split = {
            row: rounds
            for row, rounds in rounds_by_step.items()
            if rounds.groups >= self.min_groups and rounds.tensors <= self.max_tensors
        }
        if not split:
            return
        dur = a.trace.cpu["dur"].to_numpy()
        ns = int(dur[steps].sum())
        if ns < self.min_share * a.span_ns:
            return
        largest = max(split, key=lambda row: split[row].groups)
        rounds = split[largest]
        name = str(a.trace.cpu["name"][largest])
        match = re.match(r"Optimizer\.step#(\w+)\.step", name)
        optimizer = match.group(1) if match else "AdamW"
        mergeable = self._is_mergeable(rounds)
        if not mergeable and (rounds.fused or optimizer not in FUSED_OPTIMIZERS):
            return
        counted_ns = float(dur[list(rounds_by_step)].sum())
        factors = [
            1
            - sum(float(dur[row]) * (1 - self._kept_share(r, index)) for row, r in split.items())
            / counted_ns
            for index in range(3)
        ]
        yield Finding(
            summary=(
                f"{optimizer}.step runs for each of {rounds.groups:,} parameter groups on its own, "
                f"with {count_noun(round(rounds.tensors, 1), 'tensor')} each. It takes "
                f"{of_step(a, ns)} on the host."
            ),
            evidence=[
                amount_per_step(a, "time of Optimizer.step", ns),
                self.compare("groups in a step", rounds.groups, "min_groups", "count"),
                Evidence("different settings of the groups", rounds.settings, "count"),
                self.compare("tensors in a group", rounds.tensors, "max_tensors", ""),
                self.compare_share(a, "optimizer", ns),
            ],
            where=costliest_places(a, steps, top=1),
            edits=[
                scale_edit(Select(on="host", kind=("annotation",), name=OPTIMIZER_STEP), *factors)
            ],
            **self._advise(rounds, optimizer, mergeable),
        )

    def _is_mergeable(self, rounds: GroupRounds) -> bool:
        """Return whether enough groups have the settings of another one."""
        settings = rounds.settings
        return settings is not None and settings <= self.min_mergeable_share * rounds.groups

    def _kept_share(self, rounds: GroupRounds, case: int) -> float:
        """Return the share of a step's host time that stays: expected, at best, at worst."""
        fused = self.range_of("fused_factor")[case]
        if not self._is_mergeable(rounds):
            return fused
        merged = self.range_of("host_factor")[case]
        group_share = (rounds.settings or 0) / rounds.groups
        return group_share + (1 - group_share) * merged

    def _advise(self, rounds: GroupRounds, optimizer: str, mergeable: bool) -> dict[str, Any]:
        if not mergeable:
            return self.case("the settings differ", groups=rounds.groups, optimizer=optimizer)
        use_fused = optimizer in FUSED_OPTIMIZERS and not rounds.fused
        fused_text = " fused=True saves more: one operator for each group, in place of some ten."
        return {
            "fix": self.fix.format(
                groups=f"{rounds.groups:,}",
                settings=f"{rounds.settings:,}",
                fused=fused_text if use_fused else "",
            ),
            "code": self.code.format(
                optimizer=optimizer, arguments=", fused=True" if use_fused or rounds.fused else ""
            ),
        }

    @staticmethod
    def examples() -> Examples:
        return {
            "a group for each parameter": _build_training(120, settings=4),
            "60 groups of three tensors": _build_training(60, 3, settings=2),
            "all settings differ": _build_training(60, settings=60),
            "fused groups": _build_training(120, settings=4, fused=True),
            "fused groups that all differ": (
                _build_training(120, settings=120, fused=True),
                "rounds.fused",
            ),
            "two groups": (_build_training(2, 60, settings=2), "not split"),
            "large groups": (_build_training(40, 40, settings=2), "not split"),
            "hardly any time": (_build_training(40, settings=2, rest=400_000), "min_share"),
            "no optimizer": (_build_training(0, settings=1), "not split"),
        }


def _build_training(
    groups: int, tensors: int = 1, *, settings: int, fused: bool = False, rest: float = 500
) -> TraceBuilder:
    """Build AdamW with ``groups`` groups of some tensors, and ``settings`` different learning
    rates."""
    kernel = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Adam>"
    operators = ["aten::_foreach_lerp_", "aten::_foreach_sqrt", "aten::_foreach_addcdiv_"]
    b = TraceBuilder()
    shapes = [[[64, 64]] * tensors, []]
    for _ in b.steps():
        b.product(rest)
        with b.range("Optimizer.step#AdamW.step"):
            for group in range(groups):
                rate = f"{-1e-4 * (1 + group % settings)}"
                for name in ["aten::_fused_adamw_"] if fused else operators:
                    with b.op(name, shapes, ["TensorList", "Scalar"], concrete=["", rate]):
                        b.launch(kernel, 2)
                b.host(10)
        b.sync()
    return b
