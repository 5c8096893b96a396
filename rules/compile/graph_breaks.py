"""torch.compile: graph breaks, and functions that are compiled again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Location,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.text import count_noun
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import parse_frame
from advisor.measure.steps.instants import RESUME, broken_regions, graph_breaks
from advisor.rules.common import column, example_steps, figure, of_step, per, places, rows
from advisor.rules.sources import OURS, SILENT_TRACES
from advisor.testing import TraceBuilder

CAUSES = ("dispatch", "launch", "python", "unknown")


class GraphBreaks(Rule):
    """torch.compile could not compile a function as a whole because of a ``print``, ``.item()`` or
    a call it does not know. So each step leaves one compiled graph, runs Python, checks guards and
    enters the next graph, while the device idles.

    The code after a break is compiled as a function of its own, which the first part calls. So its
    ``Torch-Compiled Region`` lies inside that of the first (seen with torch 2.13). Regions one
    after the other are no breaks: every block of a model is compiled by itself there. With Python
    stacks the frame ``torch_dynamo_resume_in_…`` names the very line of the break.

    The figure is the device's idle time between the end of one graph and the start of the next.
    Kernels that could have been fused across the break, and a CUDA graph that ends there, cost
    extra and are not in it.
    """

    id = "graph-breaks"
    title = "Graph breaks split the compiled model"
    category = "compile"
    silent_in = SILENT_TRACES
    references = (
        "https://pytorch.org/docs/stable/torch.compiler_faq.html#graph-breaks",
        "https://pytorch.org/tutorials/recipes/torch_compile_fullgraph_false_graph_breaks.html",
    )

    min_share = Threshold(0.02, "of the step, idle at the breaks", OURS)

    fix = (
        "Remove what breaks the graph: prints and logging, .item() and .cpu(), conditions on "
        "tensor values (use torch.where or torch.cond). Call libraries that torch.compile cannot "
        "follow at the edge of the model, under torch.compiler.disable. The log names each reason."
    )
    code = (
        "# names each break and its reason\n"
        "# TORCH_LOGS=graph_breaks python train.py\n\n"
        "model = torch.compile(model, fullgraph=True)   # an error at the first break\n\n"
        "# .item() stays in the graph\n"
        "torch._dynamo.config.capture_scalar_outputs = True"
    )
    verify = "Profile again: one Torch-Compiled Region per call, none inside another."
    falsified_by = "torch._dynamo.explain(model)(input) that counts no break"
    assumptions = ("the code at the break can move out of the compiled function",)
    confidence = 0.8

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count regions inside regions, and the idle time between their graphs."""
        names = a.trace.cpu["name"]
        regions = int(name_matches(names, r"^Torch-Compiled Region").sum())
        broken = broken_regions(a)
        if not regions or a.device_id is None:
            return
        ts = a.trace.cpu["ts"].to_numpy()[broken]
        broken = broken[covered_length(ts, ts + 1, a.spans) > 0]
        if not len(broken):
            yield PassedCheck(text=f"no graph breaks in {count_noun(regions, 'compiled region')}")
            return
        gaps = a.gaps.filter(pl.col("cause").is_in(CAUSES))
        start = column(gaps, "ts")
        end = start + column(gaps, "dur")
        between = graph_breaks(a)
        idle = intersect(union(start, end), between)
        share = idle.total / a.span_ns
        if share < self.min_share:
            return
        lines = _lines(a)
        if not lines:
            yield SkippedCheck(
                what="the lines at which the graph breaks",
                why="no Python stacks were recorded",
                record="with_stack=True",
            )
        count = len(broken) / a.step_count
        yield Finding(
            summary=(
                f"{count_noun(max(1, round(count)), 'graph break')}{per(a)} leave the device idle "
                f"for {of_step(a, idle.total)}, while Python runs between two compiled graphs."
            ),
            evidence=[
                Evidence("graph breaks", count, "count", per=a.per),
                figure(a, "idle at graph breaks", idle.total),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("idle time per break", idle.total / len(broken), "ns"),
                Evidence(
                    "where the graph breaks",
                    ", ".join(f"{place.file}:{place.line}" for place in lines[:3]) or None,
                ),
            ],
            where=lines
            or places(
                a,
                rows(gaps["host"]),
                covered_length(start, end, between),
                ts=start,
                dur=end - start,
                instance=column(gaps, "gap"),
            ),
            edits=[Edit(op="remove", select=Select(on="gap", cause=CAUSES, at="graph_break"))],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        return {"two breaks": _trace(stacks=False), "with stacks": _trace(stacks=True)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        def whole(b: TraceBuilder) -> None:
            with b.op("Torch-Compiled Region: 0/0"):
                _graph(b, 30)

        def blocks(b: TraceBuilder) -> None:
            for _ in range(3):
                with b.op("Torch-Compiled Region: 0/0"):
                    _graph(b, 10)

        return {
            "one graph": (example_steps(whole), "not len(broken)"),
            "blocks compiled by themselves": (example_steps(blocks), "not len(broken)"),
            "behind a full queue": (_trace(stacks=False, us=300), "share < self.min_share"),
        }


def _lines(a: Analysis) -> list[Location]:
    """The lines at which the graph breaks, those before the longest stretch first."""
    cpu = a.trace.cpu
    named = np.flatnonzero(
        (name_matches(cpu["name"], RESUME) & (cpu["kind"] == "python")).to_numpy()
    )
    ts = cpu["ts"].to_numpy()[named]
    named = named[covered_length(ts, ts + 1, a.spans) > 0]
    if not len(named):
        return []
    frames = pl.DataFrame(
        {
            "name": cpu["name"].gather(named).cast(pl.String),
            "row": named,
            "dur": cpu["dur"].gather(named),
        }
    ).sort("dur", descending=True)
    lines = []
    for name, row, count in (
        frames.group_by("name", maintain_order=True)
        .agg(pl.col("row").first(), pl.len().alias("count"))
        .head(5)
        .iter_rows()
    ):
        frame = parse_frame(name)
        if frame is None:
            continue
        lines.append(
            Location(
                file=frame.file,
                line=frame.line,
                function=frame.function,
                ts_ns=int(cpu["ts"][row]),
                dur_ns=int(cpu["dur"][row]),
                count=count,
            )
        )
    return lines


def _graph(b: TraceBuilder, kernels: int, us: float = 8) -> None:
    with b.op("CompiledFunction"):
        for _ in range(kernels):
            b.launch("triton_poi_fused_add_relu_0", us)


def _trace(*, stacks: bool, us: float = 8) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("Torch-Compiled Region: 0/0"):
            _graph(b, 10, us)
            b.host(200)
            if stacks:
                with b.python("model.py(17): torch_dynamo_resume_in_forward_at_17"):
                    _rest(b, us)
            else:
                _rest(b, us)
    return b


def _rest(b: TraceBuilder, us: float) -> None:
    with b.op("TorchDynamo Cache Lookup", host_us=15):
        pass
    with b.op("Torch-Compiled Region: 1/0"):
        _graph(b, 10, us)
        b.host(200)
        with b.op("Torch-Compiled Region: 2/0"):
            _graph(b, 10, us)


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
        return {
            "every step": _recompiled(every=1),
            "every other step": _recompiled(every=2),
            "without a GPU": _recompiled(every=1, gpu=False),
            "the backward pass": _recompiled(every=1, name="entire_backward_compile"),
            "as torch 2.2 spells it": _recompiled(every=1, name="_compile.<locals>.compile_inner"),
            "TensorFlow": _recompiled(every=1, name="tf.function-graph_building"),
            "JAX": _recompiled(every=1, name="backend_compile_and_load"),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        return {
            "once": (_recompiled(every=8, us=900), "min_steps"),
            "never": (_recompiled(every=0), "not len(compilations)"),
            "hardly any": (_recompiled(every=1, us=20), "min_share"),
            "only looked up": (
                _recompiled(every=1, name="TorchDynamo Cache Lookup"),
                "not len(compilations)",
            ),
        }


def _recompiled(
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
