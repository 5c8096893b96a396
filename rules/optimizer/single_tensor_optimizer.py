"""An optimizer updates one parameter at a time."""

import re

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Location, Outcomes, PassedCheck, Select
from advisor.core.intervals import covered_length, intersect, intervals_of
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.embedding_tables import find_tables
from advisor.measure.device.group_rounds import updates_few_tensors
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.steps.steps import rows_in_steps
from advisor.replay.selection import mask_launched_under, mask_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import FOREACH, SILENT_TRACES, TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    example_steps,
    of_step,
    outermost_in_steps,
    per_step,
    scale_edit,
)
from advisor.rules.support.kernel_work import FUSED
from advisor.testing import Examples, TraceBuilder

SINGLE_TENSOR = r"\b_single_tensor_\w+"
NO_STACKS = "no Python stacks"
ON_HOST = "a CPU trains"
WITH_TABLES = "with embeddings"
MIN_TABLE_RATIO = 10
"""Minimum number of table rows per looked-up row to consider a sparse gradient."""
FUSED_ON_HOST = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers with a single-operator implementation on a CPU (PyTorch 2.13)."""


class SingleTensorOptimizer(Rule):
    """The optimizer launches its kernels for one parameter after the other: several tiny kernels
    for each of hundreds of tensors. The foreach and fused implementations update all parameters in
    a few kernels.

    The sign is many short kernels inside ``Optimizer.step#…``, none of which works on many tensors
    (``multi_tensor_apply``, fused Adam, compiled). PyTorch picks foreach by itself for parameters
    on the GPU. It does not with ``foreach=False`` or ``differentiable=True``, for tensor
    subclasses, before version 2.0, and in hand-written optimizers. With Python stacks the frame
    ``_single_tensor_…`` names the reason.

    Where a CPU trains, PyTorch picks neither by itself. There many short operators inside the step
    are the sign. For long operators, on large tensors, a fused step keeps more of the time.

    The gain has two parts. The host spends its time in the loop over the parameters, in Python,
    operators and launches. The kernels move each tensor several times. A foreach step launches a
    kernel for some tens of tensors, so the host needs about a tenth of the launches. While the
    device is behind, host time costs nothing, and the replay says so."""

    id = "single-tensor-optimizer"
    title = "The optimizer updates one parameter at a time"
    training_only = True
    knobs = ("fused-optimizer",)
    found_in = ("recorded/single_tensor.slow",)
    silent_in = SILENT_TRACES
    validation_note = (
        "a CPU recording, torch 2.13: 63% of the step predicted, 62% measured. Silent on Apex and "
        "foreach optimizers (A100, V100). It has never fired on a real GPU trace"
    )
    references = (
        "https://pytorch.org/docs/stable/optim.html#algorithms",
        "https://dev-discuss.pytorch.org/t/torch-optim-happenings-more-ws-2023-h2/1775",
    )

    min_kernels = Threshold(
        100, "kernels per step: some tens of parameters times several kernels each", TRIED_ON_TRACES
    )
    max_median_ns = Threshold(
        20_000, "ns: longer kernels are bound by bandwidth, not by launches", TRIED_ON_TRACES
    )
    min_share = Threshold(
        0.02, "of the step between first and last kernel of the optimizer", TRIED_ON_TRACES
    )
    min_host_share = Threshold(0.10, "of the step in the optimizer, where a CPU trains", XPROF)
    min_praised_share = Threshold(
        0.01, "of kernel time in the optimizer, at which the report says so", TRIED_ON_TRACES
    )
    host_factor = Factor(
        0.15, "host time that remains: foreach launches about a tenth as often", FOREACH
    )
    best_host_factor = Factor(0.05, "host time that remains, at best", FOREACH)
    worst_host_factor = Factor(0.4, "host time that remains, at worst", FOREACH)
    kernel_factor = Factor(
        0.5, "device time that remains: fewer passes over parameters and state", FOREACH
    )
    best_kernel_factor = Factor(0.25, "device time that remains, at best", FOREACH)
    worst_kernel_factor = Factor(1.0, "device time that remains, at worst", FOREACH)

    fix = (
        "Use the fused implementation: one kernel for tens of tensors, one pass over parameters "
        "and state. Use foreach where no fused one exists. For a hand-written optimizer, use "
        "torch._foreach_… operators or compile its step."
    )
    code = (
        "# keep your other arguments\n"
        "optimizer = torch.optim.{optimizer}(model.parameters(), lr=lr, fused=True)\n\n"
        "# or foreach=True; remove foreach=False and differentiable=True\n\n"
        "# or, if it is hand-written: torch.compile(optimizer.step)"
    )
    verify = "Profile again: multi_tensor_apply or fused kernels inside Optimizer.step."
    falsified_by = "parameters that are sparse, complex or on different devices"
    assumptions = (
        "{host_factor:.0%} of the host time and {kernel_factor:.0%} of the kernel time remain "
        "with a fused implementation",
    )
    confidence = 0.9
    cases = {
        NO_STACKS: {"confidence": 0.75},
        WITH_TABLES: {
            "code": "# sparse gradients need an optimizer that is not fused\n"
            "tables = {{m.weight for m in model.modules() if getattr(m, 'sparse', 0)}}\n"
            "others = [p for p in model.parameters() if p not in tables]\n"
            "optimizer = torch.optim.{optimizer}(others, lr=lr, fused=True)\n"
            "# with sparse=True: torch.optim.{sparse}(list(tables), lr=lr)"
        },
        ON_HOST: {
            "fix": "Use the fused implementation: one operator updates all parameters. On a CPU "
            "PyTorch does not choose it by itself.",
            "verify": "Record again: one aten::_fused_ operator inside Optimizer.step.",
            "assumptions": (
                "{host_factor:.0%} of the host time remains with a fused implementation, and "
                "{kernel_factor:.0%} of operators on large tensors",
            ),
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            yield from self._check_host(a)
            return
        gpu = a.trace.gpu
        in_optimizer = mask_under(a, OPTIMIZER_STEP)
        rows = kernel_work.compute_mask(a) & mask_launched_under(a, OPTIMIZER_STEP)
        count = int(rows.sum())
        if not count:
            return
        multi_tensor = rows & name_matches(gpu["name"], FUSED).to_numpy()
        count_per_step = count / a.step_count
        if multi_tensor.any():
            optimizer_ns = kernel_work.summed_duration(a, rows)
            share = kernel_work.summed_duration(a, multi_tensor) / max(1, optimizer_ns)
            is_large = optimizer_ns >= self.min_praised_share * kernel_work.summed_duration(
                a, kernel_work.kernel_mask(a)
            )
            if share >= 0.5 and is_large and not updates_few_tensors(a):
                yield PassedCheck(
                    text=f"the optimizer updates many parameters per kernel ("
                    f"{t.count_noun(round(count_per_step), 'kernel')}{per_step(a)})"
                )
            return
        dur = gpu["dur"].to_numpy()[rows]
        if count_per_step < self.min_kernels or np.median(dur) > self.max_median_ns:
            return
        gaps = a.gaps
        is_inside = in_optimizer[gaps["host"].fill_null(-1).to_numpy()]
        idle = int(gaps["dur"].to_numpy()[is_inside].sum())
        share = (int(dur.sum()) + idle) / a.span_ns
        if share < self.min_share:
            return
        where, optimizer, in_stacks = self._locate_step(a)
        yield Finding(
            summary=(
                f"{optimizer}.step launches {t.count_noun(round(count_per_step), 'kernel')}"
                f"{per_step(a)} of {np.median(dur) / 1e3:.1f} µs each. With the gaps between them "
                f"it takes {share:.0%} {t.format_of(a.per)}."
            ),
            evidence=[
                self.compare(
                    "kernels inside Optimizer.step", count_per_step, "min_kernels", "count"
                ),
                self.compare("median kernel", float(np.median(dur)), "max_median_ns", "ns"),
                Evidence("multi-tensor kernels", 0, "count"),
                Evidence("device idle inside Optimizer.step", idle / a.step_count, "ns"),
                self.compare("optimizer, share", share, "min_share", per=a.per),
            ],
            where=where,
            edits=[
                scale_edit(
                    Select(on="host", kind=("annotation",), name=OPTIMIZER_STEP),
                    *self.range_of("host_factor"),
                ),
                scale_edit(
                    Select(on="gpu", kind=("kernel",), under=OPTIMIZER_STEP),
                    *self.range_of("kernel_factor"),
                ),
            ],
            confidence_notes=[] if in_stacks else ["judged by kernels alone: no Python stacks"],
            code=self._build_code(a, optimizer),
            **({} if in_stacks else self.case(NO_STACKS)),
        )

    def _check_host(self, a: Analysis) -> Outcomes:
        """Count operators inside the optimizer's step, of a training on the CPU."""
        if not a.span_ns or not a.trains_on_host:
            return
        table = outermost_in_steps(a)
        table = table.filter(pl.Series(mask_under(a, OPTIMIZER_STEP)[table["row"].to_numpy()]))
        count = len(table) / max(a.step_count, 1)
        if (
            count < self.min_kernels
            or table["name"].str.contains(r"^aten::_f(?:used|oreach)_").any()
        ):
            return
        durations = table["ns"].to_numpy()
        median = float(np.median(durations))
        if median > self.max_median_ns:
            return
        where, optimizer, _ = self._locate_step(a)
        steps = a.trace.cpu.filter(name_matches(a.trace.cpu["name"], OPTIMIZER_STEP))
        ns = intersect(intervals_of(steps), a.spans).total
        long_share = float(durations[durations > self.max_median_ns].sum()) / max(ns, 1)
        if optimizer not in FUSED_ON_HOST or ns < self.min_host_share * a.span_ns:
            return
        yield Finding(
            summary=(
                f"{optimizer}.step takes {of_step(a, ns)}, in "
                f"{t.count_noun(round(count), 'operator')}, half of them shorter than "
                f"{t.format_duration(median)}."
            ),
            evidence=[
                amount_per_step(a, "time of Optimizer.step", ns),
                self.compare("operators inside Optimizer.step", count, "min_kernels", "count"),
                self.compare("median operator", median, "max_median_ns", "ns"),
                self.compare_share(a, "optimizer", ns, "min_host_share"),
            ],
            where=where,
            edits=[
                scale_edit(
                    Select(on="host", kind=("annotation",), name=OPTIMIZER_STEP),
                    *(
                        short + min(1.0, long_share) * (large - short)
                        for short, large in (
                            (self.host_factor, self.kernel_factor),
                            (self.best_host_factor, self.best_kernel_factor),
                            (self.worst_host_factor, self.worst_kernel_factor),
                        )
                    ),
                )
            ],
            **self.case(ON_HOST),
            code=self._build_code(a, optimizer).partition("\n\n")[0],
        )

    def _build_code(self, a: Analysis, optimizer: str) -> str:
        """Return the code. Next to a large embedding, it leaves room for sparse gradients."""
        code = self.code.format(optimizer=optimizer)
        if not any(table.rows >= MIN_TABLE_RATIO * table.used for table in find_tables(a)):
            return code
        sparse = optimizer if optimizer in ("Adagrad", "SGD") else "SparseAdam"
        table_code = self.case(WITH_TABLES, optimizer=optimizer, sparse=sparse)["code"]
        return f"{table_code}\n\n{code.partition(chr(10) * 2)[2]}"

    def _locate_step(self, a: Analysis) -> tuple[list[Location], str, bool]:
        """Find the longest optimizer step of the analysed steps, its class, and whether stacks name
        the reason."""
        cpu = a.trace.cpu
        steps = np.flatnonzero(name_matches(cpu["name"], OPTIMIZER_STEP).to_numpy())
        analysed = rows_in_steps(a, steps)
        steps = analysed if len(analysed) else steps
        ts = cpu["ts"].to_numpy()[steps]
        end = ts + cpu["dur"].to_numpy()[steps]
        if len(analysed):  # the last call may end after the window, when the file is written
            durations = covered_length(ts, end, a.steps.host_spans)
        else:
            durations = end - ts
        longest = int(steps[durations.argmax()])
        name = str(cpu["name"][longest])
        match = re.match(r"Optimizer\.step#(\w+)\.step", name)
        is_frame = (cpu["kind"] == "python").to_numpy()
        frames = np.flatnonzero(is_frame & name_matches(cpu["name"], SINGLE_TENSOR).to_numpy())
        file, line, function = a.location(int(frames[0]) if len(frames) else longest)
        place = Location(
            file=file,
            line=line,
            function=function,
            op=name,
            ts_ns=cpu["ts"][longest],
            dur_ns=int(durations.max()),
            count=len(steps),
        )
        return [place], match.group(1) if match else "AdamW", bool(len(frames))

    @staticmethod
    def examples() -> Examples:
        return {
            "without stacks": _build_step("loop"),
            "with stacks": _build_step("loop", stacks=True),
            "foreach": (_build_step("foreach"), "multi_tensor.any()"),
            "fused": (_build_step("fused"), "multi_tensor.any()"),
            "a few large parameters": (_build_step("large"), "count_per_step < self.min_kernels"),
            "small kernels elsewhere": (_build_step("elsewhere"), "multi_tensor.any()"),
            "on a CPU": _build_cpu_training(360),
            "on a CPU, fused": (
                _build_cpu_training(1, "aten::_fused_adamw_"),
                "count < self.min_kernels",
            ),
            "on a CPU, small next to the rest": (
                _build_cpu_training(360, rest=40_000),
                "min_host_share",
            ),
            "on a CPU, a few large parameters": (_build_cpu_training(360, us=100), "max_median_ns"),
            "on a CPU, hand-written": (
                _build_cpu_training(360, optimizer="Lion"),
                "optimizer not in FUSED_ON_HOST",
            ),
        }


POINTWISE_KERNEL = "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"
MULTI = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, "


def _build_step(kind: str, *, stacks: bool = False) -> TraceBuilder:
    def loop(b: TraceBuilder, count: int = 360, us: float = 3) -> None:
        b.run("aten::addcmul_", POINTWISE_KERNEL, us, times=count, host_us=4)

    def body(b: TraceBuilder) -> None:
        gemm = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn"
        b.run("aten::mm", gemm, 4000, [[4096, 4096], [4096, 4096]], "c10::BFloat16")
        b.sync()
        if kind == "elsewhere":
            loop(b)
        with b.range("Optimizer.step#AdamW.step"):
            if kind == "loop" and stacks:
                with b.python("torch/optim/adamw.py(347): _single_tensor_adamw"):
                    loop(b)
            elif kind == "loop":
                loop(b)
            elif kind == "large":
                loop(b, 18, 400)
            elif kind == "foreach":
                kernel = MULTI + "BinaryOpListAlphaFunctor<float>>"
                b.run("aten::_foreach_add_", kernel, 60, times=12)
            else:
                b.run("aten::_fused_adamw_", MULTI + "FusedAdamMathFunctor<float>>", 200)

    return example_steps(body)


def _build_cpu_training(
    count: int,
    name: str = "aten::mul_",
    *,
    us: float = 4,
    rest: float = 2_000,
    optimizer: str = "AdamW",
) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    for _ in b.steps():
        b.on_host("aten::mm", rest)
        b.on_host("autograd::engine::evaluate_function: MmBackward0", rest)
        with b.range(f"Optimizer.step#{optimizer}.step"):
            for _ in range(count):
                b.on_host(name, us)
    return b
