"""torch.compile recompiles a function again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.common import figure, of_step, places
from advisor.rules.sources import OURS, SILENT_TRACES
from advisor.testing import TraceBuilder

COMPILING = (
    r"^(?:_compile\.(?:<locals>\.)?compile_inner|entire_backward_compile)\b"
    r"|^(?:tf\.function-graph_building|backend_compile(?:_and_load)?|lower_sharding_computation)$"
)
"""The names of compiling a function in Dynamo, and of its backward pass in AOTAutograd; of tracing
a function in TensorFlow; of lowering and compiling one in JAX."""

_AGAIN = {"again": "Functions are traced and compiled again"}
Rows = NDArray[np.int64]


class Recompilation(Rule):
    """torch.compile compiles a function again because something that it was compiled for changed: a
    shape, a Python number, a flag. That takes hundreds of milliseconds to minutes where a step
    takes milliseconds. After eight times PyTorch gives up and runs the function eagerly.

    The figure is the time in which the thread that drives the step, or the backward pass, compiles
    (``_compile.compile_inner``, ``entire_backward_compile``; TensorFlow's
    ``tf.function-graph_building``; JAX's ``lower_sharding_computation`` and
    ``backend_compile_and_load``). Every function is compiled once, so it must happen in at least
    two steps. Where it happens in one, the rule only says that this may be the first time.

    A GPU keeps working while the host compiles, as long as its queue lasts: milliseconds at most.
    """

    id = "recompilation"
    title = "torch.compile recompiles in the loop"
    category = "compile"
    knobs = ("compile-dynamic",)
    found_in = ("workloads/recompilation",)
    silent_in = (
        *SILENT_TRACES,
        "workloads/recompilation",
    )
    validated_on = (
        "CPU recordings, torch 2.13: a length that is new in every step, compiled with dynamic="
        "False, fires; with dynamic=True it is silent"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
        "https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html",
    )

    min_steps = Threshold(2, "steps with compilation: the first time is needed", OURS)
    min_share = Threshold(0.02, "of the recorded steps; as for graph breaks", OURS)

    fix = (
        "Mark what changes as dynamic: dynamic=True, or torch._dynamo.mark_dynamic for one "
        "dimension. Or keep it from changing: pad to a few lengths, set drop_last=True, pass "
        "tensors instead of Python numbers that count up. The log names what changed."
    )
    code = (
        "# TORCH_LOGS=recompiles python train.py     names what changed each time\n"
        "model = torch.compile(model, dynamic=True)\n\n"
        "# or only for the dimension that varies\n"
        "torch._dynamo.mark_dynamic(batch, 1)"
    )
    verify = "Run with TORCH_LOGS=recompiles: it prints nothing after the first steps."
    falsified_by = "TORCH_LOGS=recompiles that prints nothing while these steps run"
    assumptions = ("code compiled for any shape is as fast as code for one shape",)
    confidence = 0.9

    terms: Mapping[str, str] = {"again": "torch.compile recompiles"}
    elsewhere: ClassVar = {
        TENSORFLOW: FrameworkAdvice(
            "Keep the kinds of a tf.function's arguments: tensors in place of Python numbers (each "
            "new number is a new graph), None in the signature for a dimension that varies. "
            "Create functions once, outside of the loop.",
            "@tf.function(reduce_retracing=True)\n"
            "def train_step(x, rate): ...\n\n"
            "train_step(x, tf.constant(rate))   # not train_step(x, rate)",
            verify="Profile again: tf.function-graph_building is in the first steps only.",
            title="A function is traced again in the loop",
            falsified_by="a profile of these steps without tf.function-graph_building",
            terms=_AGAIN,
        ),
        JAX: FrameworkAdvice(
            "Keep the shapes and types of a compiled function's arguments: pad batches to a few "
            "lengths, leave out the last short one, pass what changes as an array and not as a "
            "static argument. Create compiled functions once, outside of the loop: a lambda that "
            "is new in each step is compiled in each.",
            'jax.config.update("jax_log_compiles", True)          # names each\n'
            'jax.config.update("jax_explain_cache_misses", True)  # and says why',
            verify="Profile again: compilation is in the first steps only.",
            title="A function is compiled again in the loop",
            falsified_by="jax_log_compiles that prints nothing while these steps run",
            terms=_AGAIN,
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the compilation time inside the steps."""
        cpu = a.trace.cpu
        compilations = np.flatnonzero(
            (
                name_matches(cpu["name"], COMPILING) & cpu["kind"].is_in(["op", "annotation"])
            ).to_numpy()
        )
        if not len(compilations):
            return
        steps = a.steps.used
        begin, end = steps["ts"].to_numpy(), steps["end"].to_numpy()
        ts = cpu["ts"].to_numpy()[compilations]
        compiling = intersect(union(ts, ts + cpu["dur"].to_numpy()[compilations]), a.spans)
        by_step = covered_length(begin, end, compiling)
        share = compiling.total / max(a.span_ns, 1)
        if share < self.min_share:
            return
        compiling_steps = int((by_step > 0).sum())
        if compiling_steps < self.min_steps:
            yield SkippedCheck(
                what=f"whether {t.format_duration(compiling.total)} of compilation recurs",
                why="it is in one step only, and every function is compiled once",
                record="more steps, after a longer warm-up",
            )
            return
        in_window = compilations[covered_length(ts, ts + 1, a.spans) > 0]
        cost = cpu["dur"].to_numpy()[in_window].astype(np.int64)
        yield Finding(
            summary=(
                f"{self.terms['again']} in {t.count_noun(compiling_steps, 'step')} of "
                f"{steps.height}, for {of_step(a, compiling.total)}."
            ),
            evidence=[
                figure(a, "compilation", compiling.total),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence(
                    "steps with compilation", compiling_steps, "count", *self.limit("min_steps")
                ),
                Evidence("compilations", len(in_window), "count"),
                Evidence("longest compilation", int(cost.max()) if len(cost) else None, "ns"),
            ],
            where=places(a, in_window, cost),
            edits=[Edit(op="remove", select=Select(on="host", name=COMPILING))],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """In every step; in every other; on the CPU alone; the backward pass."""
        return {
            "every step": _trace(every=1),
            "every other step": _trace(every=2),
            "without a GPU": _trace(every=1, gpu=False),
            "the backward pass": _trace(every=1, name="entire_backward_compile"),
            "as torch 2.2 spells it": _trace(every=1, name="_compile.<locals>.compile_inner"),
            "TensorFlow": _trace(every=1, name="tf.function-graph_building"),
            "JAX": _trace(every=1, name="backend_compile_and_load"),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Compiled once, in the first step; nothing compiled; very little of it."""
        return {
            "once": (_trace(every=8, us=900), "min_steps"),
            "never": (_trace(every=0), "not len(compilations)"),
            "hardly any": (_trace(every=1, us=20), "min_share"),
            "only looked up": (
                _trace(every=1, name="TorchDynamo Cache Lookup"),
                "not len(compilations)",
            ),
        }


def _trace(
    *,
    every: int,
    name: str = "_compile.compile_inner (dynamo_timed)",
    us: float = 30_000,
    gpu: bool = True,
) -> TraceBuilder:
    b = TraceBuilder() if gpu else TraceBuilder(gpu=None)
    for step in range(6):
        with b.step():
            if every and step % every == 0:
                with b.op(name, host_us=us):
                    pass
            with b.op("Torch-Compiled Region: 0/0"):
                for _ in range(10):
                    if gpu:
                        b.launch("triton_poi_fused_add_relu_0", 200)
                    else:
                        b.host(200)
            if gpu:
                b.sync()
    return b
