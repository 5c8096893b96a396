"""An optimizer that updates one parameter at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Location,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    Threshold,
)
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.replay.selection import under_names
from advisor.rules.common import per
from advisor.rules.kernel import facts
from advisor.rules.sources import FOREACH, OURS, SILENT_TRACES
from advisor.testing import TraceBuilder

STEP = r"^Optimizer\.step#"
FUSED = r"(?i)multi_tensor_|fused_?(adam|sgd|adagrad|lamb|lion)|foreach|_fused_|^triton_"
"""Kernels that update many parameters at once: foreach and fused optimizers, Apex, Inductor."""
FRAME = r"\b_single_tensor_\w+"


class SingleTensorOptimizer(Rule):
    """The optimizer launches its kernels for one parameter after the other: several tiny kernels
    for each of hundreds of tensors. The foreach and the fused implementations do all parameters in
    a few kernels.

    Seen by kernels inside ``Optimizer.step#…``: many, short, and none that works on many tensors
    (``multi_tensor_apply``, fused Adam, compiled). PyTorch picks foreach by itself for parameters
    on the GPU; it does not when ``foreach=False`` or ``differentiable=True`` is given, for tensor
    subclasses, before version 2.0, and in optimizers written by hand. With Python stacks the frame
    ``_single_tensor_…`` names the reason.

    The price has two parts: the device idles between the tiny kernels (gaps blamed on what runs
    inside the optimizer), and the kernels move each tensor several times. A foreach step launches
    a kernel for some tens of tensors, so the host needs a tenth or so of the launches.
    """

    id = "single-tensor-optimizer"
    title = "The optimizer updates one parameter at a time"
    category = "optimizer"
    knobs = ("fused-optimizer",)
    silent_in = SILENT_TRACES
    validated_on = (
        "frames as PyTorch 2.13 records them; silent on Apex and foreach optimizers (A100, V100); "
        "never seen to fire"
    )
    references = (
        "https://pytorch.org/docs/stable/optim.html#algorithms",
        "https://dev-discuss.pytorch.org/t/torch-optim-happenings-more-ws-2023-h2/1775",
    )

    min_kernels = Threshold(
        100, "kernels a step: some tens of parameters times several kernels each", OURS
    )
    max_median_ns = Threshold(20_000, "ns: longer kernels are bandwidth, not launches", OURS)
    min_share = Threshold(0.02, "of the step between first and last kernel of the optimizer", OURS)
    praise_share = Threshold(
        0.01, "of kernel time in the optimizer, from which it is worth saying", OURS
    )
    gap_factor = Threshold(
        0.15, "idle time that stays: foreach launches about a tenth as often", FOREACH
    )
    gap_best = Threshold(0.05, "idle time that stays, at best", FOREACH)
    gap_worst = Threshold(0.4, "idle time that stays, at worst", FOREACH)
    kernel_factor = Threshold(
        0.5, "device time that stays: fewer passes over parameters and state", FOREACH
    )
    kernel_best = Threshold(0.25, "device time that stays, at best", FOREACH)
    kernel_worst = Threshold(1.0, "device time that stays, at worst", FOREACH)

    fix = (
        "Use the fused implementation (one kernel for tens of tensors, one pass over "
        "parameters and state), or foreach where there is none; for an optimizer written "
        "by hand use torch._foreach_… operators or compile its step."
    )
    verify = "Profile again: multi_tensor_apply or fused kernels inside Optimizer.step."
    falsified_by = "parameters that are sparse, complex or on different devices"

    code = (
        "optimizer = torch.optim.{optimizer}(model.parameters(), lr=lr, fused=True)\n"
        "# or foreach=True; remove foreach=False and differentiable=True\n"
        "# by hand: torch.compile(optimizer.step)"
    )
    assumptions = (
        "{gap_factor:.0%} of the idle time and {kernel_factor:.0%} of the kernel time stay with "
        "a fused implementation",
    )
    confidence = 0.9
    cases: ClassVar = {"told by the kernels alone": {"confidence": 0.75}}

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Kernels launched inside the optimizer's step."""
        if a.device_id is None:
            return
        gpu = a.trace.gpu
        under = under_names(a, STEP)
        rows = facts.compute_rows(a) & facts.launched_under(a, STEP)
        count = int(rows.sum())
        if not count:
            return
        many = rows & name_matches(gpu["name"], FUSED).to_numpy()
        a_step = count / a.step_count
        if many.any():
            of_optimizer = facts.duration(a, rows)
            held = facts.duration(a, many) / max(1, of_optimizer)
            large = of_optimizer >= self.praise_share * facts.duration(a, facts.kernel_rows(a))
            if held >= 0.5 and large:
                yield PassedCheck(
                    text=f"the optimizer updates many parameters at once ({a_step:.0f} kernels a "
                    "step)"
                )
            return
        dur = gpu["dur"].to_numpy()[rows]
        if a_step < self.min_kernels or np.median(dur) > self.max_median_ns:
            return
        gaps = a.gaps
        inside = under[gaps["host"].fill_null(-1).to_numpy()]
        idle = int(gaps["dur"].to_numpy()[inside].sum())
        share = (int(dur.sum()) + idle) / a.span_ns
        if share < self.min_share:
            return
        where, optimizer, told = self._where(a)
        yield Finding(
            summary=(
                f"{optimizer}.step launches {a_step:.0f} kernels{per(a)}, of "
                f"{np.median(dur) / 1e3:.1f} µs each; with the gaps between them it takes "
                f"{share:.0%} {t.format_of(a.per)}."
            ),
            evidence=[
                Evidence(
                    "kernels inside Optimizer.step", a_step, "count", *self.limit("min_kernels")
                ),
                Evidence(
                    "median kernel", float(np.median(dur)), "ns", *self.limit("max_median_ns")
                ),
                Evidence("kernels on many tensors", 0, "count"),
                Evidence("device idle inside Optimizer.step", idle / a.step_count, "ns"),
                Evidence("optimizer, share", share, "share", *self.limit("min_share"), per=a.per),
            ],
            where=where,
            edits=[
                Edit(
                    op="scale",
                    select=Select(on="gap", under=STEP),
                    factor=self.gap_factor,
                    factor_low=self.gap_best,
                    factor_high=self.gap_worst,
                ),
                Edit(
                    op="scale",
                    select=Select(on="gpu", kind=("kernel",), under=STEP),
                    factor=self.kernel_factor,
                    factor_low=self.kernel_best,
                    factor_high=self.kernel_worst,
                ),
            ],
            confidence_notes=[] if told else ["told by kernels alone: no Python stacks"],
            code=self.code.format(optimizer=optimizer),
            **({} if told else self.case("told by the kernels alone")),
        )

    def _where(self, a: Analysis) -> tuple[list[Location], str, bool]:
        """The longest optimizer step, the class's name, and whether stacks name the reason."""
        cpu = a.trace.cpu
        steps = np.flatnonzero(name_matches(cpu["name"], STEP).to_numpy())
        dur = cpu["dur"].to_numpy()[steps]
        at = int(steps[dur.argmax()])
        name = str(cpu["name"][at])
        match = re.match(r"Optimizer\.step#(\w+)\.step", name)
        frames = np.flatnonzero(
            (cpu["kind"] == "python").to_numpy() & name_matches(cpu["name"], FRAME).to_numpy()
        )
        told = int(frames[0]) if len(frames) else None
        file, line, function = a.location(at if told is None else told)
        place = Location(
            file=file,
            line=line,
            function=function,
            op=name,
            ts_ns=cpu["ts"][at],
            dur_ns=cpu["dur"][at],
            count=len(steps),
        )
        return [place], match.group(1) if match else "AdamW", told is not None

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Adam over 40 parameters, nine kernels each; with the frame that says so."""
        return {"without stacks": _step("loop"), "with stacks": _step("loop", stacks=True)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Foreach, fused, Apex; a few large parameters; small kernels outside the optimizer."""
        return {
            "foreach": (_step("foreach"), "many.any()"),
            "fused": (_step("fused"), "many.any()"),
            "a few large parameters": (_step("large"), "a_step < self.min_kernels"),
            "small kernels elsewhere": (_step("elsewhere"), "many.any()"),
        }


POINTWISE = "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"
MULTI = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "


def _step(kind: str, *, stacks: bool = False) -> TraceBuilder:
    b = TraceBuilder()

    def loop(count: int, us: float) -> None:
        b.run("aten::addcmul_", POINTWISE, us, times=count, host_us=4)

    for _ in range(4):
        with b.step():
            with b.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                b.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", 4000)
            b.sync()
            if kind == "elsewhere":
                loop(360, 3)
            with b.range("Optimizer.step#AdamW.step"):
                if kind == "loop" and stacks:
                    with b.python("torch/optim/adamw.py(347): _single_tensor_adamw"):
                        loop(360, 3)
                elif kind == "loop":
                    loop(360, 3)
                elif kind == "large":
                    loop(18, 400)
                elif kind == "foreach":
                    for _ in range(12):
                        with b.op("aten::_foreach_add_"):
                            b.launch(MULTI + "BinaryOpListAlphaFunctor<float>>", 60)
                else:
                    b.run("aten::_fused_adamw_", MULTI + "FusedAdamMathFunctor<float>>", 200)
            b.sync()
    return b
