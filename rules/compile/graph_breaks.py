"""torch.compile: graph breaks, and functions that are compiled again."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import COMPILE_LOG, CompileCause, CompileLog, GraphBreak
from advisor.core.finding import (
    Edit,
    Finding,
    Location,
    Outcomes,
    PassedCheck,
    Select,
    SkippedCheck,
    impact_without_gain,
)
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.rule import Evidence, FrameworkAdvice, Rule, Threshold
from advisor.core.text import count_noun
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import parse_frame
from advisor.measure.steps.named_intervals import (
    GRAPH_BREAK_CAUSES,
    REGION,
    RESUME,
    broken_regions,
    graph_breaks,
    remove_breaks,
)
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import SILENT_TRACES, TRIED_ON_TRACES
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    example_steps,
    impact_over_run,
    int_column,
    of_step,
    per_step,
    row_numbers,
    scale_edit,
)
from advisor.rules.support.launch_gaps import REMOVE_LAUNCH_COST
from advisor.testing import Examples, TraceBuilder

_MAX_NAMED = 5
"""Maximum number of lines, or functions, that a finding names."""


class GraphBreaks(Rule):
    """torch.compile could not compile a function as a whole because of a ``print``, ``.item()`` or
    a call it does not know. So each step leaves one compiled graph, runs Python, checks guards and
    enters the next graph, while the device idles.

    The code after a break is compiled as a function of its own, which the first part calls. So its
    ``Torch-Compiled Region`` is inside the region of the first (seen with torch 2.13). Consecutive
    regions are not breaks: there, every block of a model is compiled by itself. With Python stacks
    the frame ``torch_dynamo_resume_in_…`` names the exact line of the break.

    The figure is the device's idle time between the end of one graph and the start of the next. The
    gain also includes the entries to and exits from the graphs, forward and backward: one graph has
    them once. Kernels that could have been fused across the break, and a CUDA graph that ends
    there, cost extra and are not included.

    A log of torch.compile next to the trace (``TORCH_TRACE``) has the line and the reason of each
    break. The number of the compiled function that follows connects it with the trace. A log alone
    names the breaks, and their cost stays unknown."""

    id = "graph-breaks"
    title = "Graph breaks split the compiled model"
    found_in = ("traces/h100/compiled_breaks",)
    silent_in = SILENT_TRACES
    validation_note = (
        "fires on an H100 with eight breaks per step: 7 to 8 ms, 2.9 without them. The estimate "
        "leaves out fusion across them"
    )
    references = (
        "https://pytorch.org/docs/stable/torch.compiler_faq.html#graph-breaks",
        "https://pytorch.org/tutorials/recipes/torch_compile_fullgraph_false_graph_breaks.html",
    )

    auxiliary_inputs = (COMPILE_LOG,)
    min_share = Threshold(0.02, "of the step, idle at the breaks", TRIED_ON_TRACES)

    fix = (
        "Remove what breaks the graph: prints and logging, .item() and .cpu(), conditions on "
        "tensor values (use torch.where or torch.cond). Call libraries that torch.compile cannot "
        "follow at the edge of the model, under torch.compiler.disable. The log names each reason."
    )
    code = (
        "# shell, before starting: names each break and its reason\n"
        "export TORCH_LOGS=graph_breaks\n\n"
        "model = torch.compile(model, fullgraph=True)   # an error at the first break\n\n"
        "# .item() stays in the graph, but not an `if` that tests its value\n"
        "torch._dynamo.config.capture_scalar_outputs = True"
    )
    verify = "Profile again: one Torch-Compiled Region per call, none inside another."
    falsified_by = "torch._dynamo.explain(model)(input) that counts no break"
    assumptions = ("the code at the break can move out of the compiled function",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        names = a.trace.cpu["name"]
        regions = int(name_matches(names, r"^Torch-Compiled Region").sum())
        broken_rows = broken_regions(a)
        log = a.trace.meta.compilation
        reasons = [] if log is None else log.breaks
        if not regions or a.device_id is None:
            yield from (_report_unmeasured(a, reasons) for _ in reasons[:1])
            return
        broken_rows = rows_in_steps(a, broken_rows)
        if not len(broken_rows):
            yield PassedCheck(text=f"no graph breaks in {count_noun(regions, 'compiled region')}")
            return
        gaps = a.gaps.filter(pl.col("cause").is_in(GRAPH_BREAK_CAUSES))
        start = int_column(gaps, "ts")
        end = start + int_column(gaps, "dur")
        break_intervals = graph_breaks(a)
        idle = intersect(union(start, end), break_intervals)
        share = idle.total / a.span_ns
        if share < self.min_share:
            return
        costs = [(intersect(idle, graph_breaks(a, tuple(item.frames))).total, item)
                 for item in reasons if item.frames]  # fmt: skip
        costs = sorted((cost for cost in costs if cost[0]), key=lambda cost: -cost[0])
        known = [item for _, item in costs] or reasons
        lines = [_locate(item) for item in known[:_MAX_NAMED]] or _locate_breaks(a)
        if not lines:
            yield SkippedCheck(
                what="the lines at which the graph breaks",
                why="neither Python stacks nor a log of torch.compile were recorded",
                missing="no stacks",
                record="with_stack=True, or TORCH_TRACE=FOLDER",
            )
        first = f" First: {_describe_break(known[0])}." if known else ""
        count = len(broken_rows) / a.step_count
        yield Finding(
            summary=(
                f"{count_noun(max(1, round(count)), 'graph break')}{per_step(a)} leave the device "
                f"idle for {of_step(a, idle.total)}, while Python runs between two compiled graphs."
                f"{first}"
            ),
            fix="" if known else _fix_for_reads(a),
            evidence=[
                Evidence("graph breaks", count, "count", per=a.per),
                amount_per_step(a, "idle at graph breaks", idle.total),
                self.compare("idle at graph breaks, share", share, "min_share", per=a.per),
                Evidence("idle time per break", idle.total / len(broken_rows), "ns"),
                *(
                    amount_per_step(a, f"idle at {_describe_break(item)}", ns)
                    for ns, item in costs[:_MAX_NAMED]
                ),
                Evidence(
                    "where the graph breaks",
                    ", ".join(f"{location.file}:{location.line}" for location in lines[:3]) or None,
                ),
            ],
            where=lines
            or costliest_places(
                a,
                row_numbers(gaps["host"]),
                covered_length(start, end, break_intervals),
                ts=start,
                dur=end - start,
                gap=int_column(gaps, "gap"),
            ),
            costs_more_than_recorded=True,  # fusion across the breaks is not included
            edits=[remove_breaks(), self._merge_graphs(a, broken_rows)],
        )

    @staticmethod
    def _merge_graphs(a: Analysis, broken: NDArray[np.int64]) -> Edit:
        """Scale entry into graphs: one entry replaces one per piece, in both passes. At worst this
        costs as much as before, and only the time at the breaks is saved."""
        regions = np.flatnonzero(name_matches(a.trace.cpu["name"], REGION).to_numpy())
        whole_count = len(rows_in_steps(a, np.setdiff1d(regions, broken_regions(a))))
        entry_share = max(1, whole_count) / (max(1, whole_count) + len(broken))
        entries = Select(on="gap", cause=GRAPH_BREAK_CAUSES, at="graph_entry")
        return scale_edit(entries, entry_share, entry_share, 1.0)

    @staticmethod
    def examples() -> Examples:
        logged, alone = _build_broken_graph(stacks=False), TraceBuilder()
        for b in (logged, alone):
            b.compile_log(breaks={("model.py", 17, "Data-dependent branching"): ["1", "2"]})

        def add_whole_graph(b: TraceBuilder) -> None:
            with b.op("Torch-Compiled Region: 0/0"):
                _add_graph(b, 30)

        def add_compiled_blocks(b: TraceBuilder) -> None:
            for _ in range(3):
                with b.op("Torch-Compiled Region: 0/0"):
                    _add_graph(b, 10)

        return {
            "two breaks": _build_broken_graph(stacks=False),
            "with stacks": _build_broken_graph(stacks=True),
            "with a log": logged,
            "a log alone": alone,
            "one graph": (example_steps(add_whole_graph), "not len(broken_rows)"),
            "blocks compiled by themselves": (
                example_steps(add_compiled_blocks),
                "not len(broken_rows)",
            ),
            "a log without breaks": (_build_log(), "not regions"),
            "behind a full queue": (
                _build_broken_graph(stacks=False, us=300),
                "share < self.min_share",
            ),
        }


def _describe_break(item: GraphBreak) -> str:
    return f"{t.shorten_path(labels.clean(item.file), 40)}:{item.line}, {labels.clean(item.reason)}"


def _locate(item: GraphBreak | CompileCause) -> Location:
    return Location(file=item.file, line=item.line, function=item.function, count=item.count)


def _fix_for_reads(a: Analysis) -> str:
    """Return the fix if a step reads GPU values, each of which can break a graph. Empty if it does
    not."""
    reads = a.syncs.filter(~pl.col("profiler"), pl.col("cause") == "aten::item")
    count = round(reads.height / a.step_count)
    if not count:
        return ""
    return (
        f"Remove what breaks the graph, perhaps {count_noun(count, 'call')} of .item(){per_step(a)}"
        ": compute with tensors (torch.where, torch.cond), and read values after the compiled "
        "part. The log names each reason."
    )


def _report_unmeasured(a: Analysis, breaks: list[GraphBreak]) -> Finding:
    """Report breaks that a log names, if no trace shows their cost."""
    why = "there is no trace with the log"
    if not a.record_only:
        no_device = a.device_id is None
        why = f"no {'GPU work' if no_device else 'compiled region'} is in the trace"
    names = "; ".join(_describe_break(item) for item in breaks[:_MAX_NAMED])
    unnamed = len(breaks) - _MAX_NAMED
    lines_text = t.count_noun(len(breaks), "line")
    return Finding(
        summary=f"{lines_text} {'breaks' if len(breaks) == 1 else 'break'} the graph: {names}"
        f"{f'; and {unnamed:,} more' if unnamed > 0 else ''}. Their cost is not measured: {why}.",
        evidence=[Evidence("lines that break the graph", len(breaks), "count")],
        where=[_locate(item) for item in breaks[:_MAX_NAMED]],
        impact=impact_without_gain(why),
    )


def _build_log(**causes: Any) -> TraceBuilder:
    b = TraceBuilder()
    b.compile_log(**causes)
    return b


def _locate_breaks(a: Analysis) -> list[Location]:
    """Return the lines at which the graph breaks, longest stretch after the break first."""
    cpu = a.trace.cpu
    rows = np.flatnonzero(
        (name_matches(cpu["name"], RESUME) & (cpu["kind"] == "python")).to_numpy()
    )
    rows = rows_in_steps(a, rows)
    if not len(rows):
        return []
    frames = pl.DataFrame({"row": rows, "name": cpu["name"].gather(rows).cast(pl.String)})
    frames = (
        frames.with_columns(ts=cpu["ts"].gather(rows), dur=cpu["dur"].gather(rows))
        .sort("dur", descending=True)
        .group_by("name", maintain_order=True)
        .agg(pl.col("ts", "dur").first(), pl.len())
        .head(_MAX_NAMED)
    )
    return [
        Location(**frame._asdict(), ts_ns=ts, dur_ns=dur, count=count)
        for name, ts, dur, count in frames.iter_rows()
        if (frame := parse_frame(name)) is not None
    ]


def _add_graph(b: TraceBuilder, kernels: int, us: float = 8) -> None:
    with b.op("CompiledFunction"):
        for _ in range(kernels):
            b.launch("triton_poi_fused_add_relu_0", us)


def _build_broken_graph(*, stacks: bool, us: float = 8) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("Torch-Compiled Region: 0/0"):
            _add_graph(b, 10, us)
            b.host(200)
            if stacks:
                with b.python("model.py(17): torch_dynamo_resume_in_forward_at_17"):
                    _add_resumed_graphs(b, us)
            else:
                _add_resumed_graphs(b, us)
    return b


def _add_resumed_graphs(b: TraceBuilder, us: float) -> None:
    b.on_host("TorchDynamo Cache Lookup", 15)
    with b.op("Torch-Compiled Region: 1/0"):
        _add_graph(b, 10, us)
        b.host(200)
        with b.op("Torch-Compiled Region: 2/0"):
            _add_graph(b, 10, us)


COMPILE_EVENTS = (
    r"^(?:_compile\.(?:<locals>\.)?compile_inner|entire_backward_compile)\b"
    r"|^(?:tf\.function-graph_building|backend_compile(?:_and_load)?|lower_sharding_computation)$"
)
"""Pattern of events that compile a function in Dynamo, and its backward pass in AOTAutograd. Also
of events that trace a function in TensorFlow, and lower and compile one in JAX."""

_TERMS = {"again": "Functions are traced and compiled again"}


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

    A log of torch.compile (``TORCH_TRACE``) has the guard that failed and the time of each
    compilation. Where the steps of the trace show none, or there is no trace, this time is counted
    once for the run. Some of it remains: code for any shape has to be compiled too."""

    id = "recompilation"
    title = "torch.compile recompiles in the loop"
    knobs = ("compile-dynamic",)
    found_in = ("workloads/recompilation",)
    silent_in = (*SILENT_TRACES, "workloads/recompilation")
    validation_note = (
        "CPU recordings, torch 2.13: a length that is new in every step, compiled with dynamic="
        "False, fires; with dynamic=True it is silent"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
        "https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html",
    )

    auxiliary_inputs = (COMPILE_LOG,)
    min_steps = Threshold(2, "steps with compilation: the first time is needed", TRIED_ON_TRACES)
    min_share = Threshold(0.02, "of the recorded steps, as for graph breaks", TRIED_ON_TRACES)

    fix = (
        "Mark what changes as dynamic: dynamic=True, or torch._dynamo.mark_dynamic for one "
        "dimension. Or keep it from changing: pad to a few lengths, set drop_last=True, pass "
        "tensors instead of Python numbers that count up. The log names what changed."
    )
    code = (
        "# shell, before starting: export TORCH_LOGS=recompiles names what changed\n"
        "model = torch.compile(model, dynamic=True)\n\n"
        "# or only for the dimension that varies\n"
        "torch._dynamo.mark_dynamic(batch, 1)"
    )
    verify = "Run with TORCH_LOGS=recompiles: it prints nothing after the first steps."
    falsified_by = "TORCH_LOGS=recompiles that prints nothing while these steps run"
    assumptions = ("code compiled for any shape is as fast as code for one shape",)
    confidence = 0.9

    terms: Mapping[str, str] = {"again": "torch.compile recompiles"}
    framework_advice = {
        TENSORFLOW: FrameworkAdvice(
            "Keep the kinds of a tf.function's arguments. Pass tensors in place of Python numbers, "
            "because each new number is a new graph. Put None in the signature for a dimension "
            "that varies. Create functions once, outside the loop.",
            "@tf.function(reduce_retracing=True)\n"
            "def train_step(x, rate): ...\n\n"
            "train_step(x, tf.constant(rate))   # not train_step(x, rate)",
            verify="Profile again: tf.function-graph_building is in the first steps only.",
            title="A function is traced again in the loop",
            falsified_by="a profile of these steps without tf.function-graph_building",
            terms=_TERMS,
        ),
        JAX: FrameworkAdvice(
            "Keep the shapes and types of a compiled function's arguments. Pad batches to a few "
            "lengths, and leave out the last short one. Pass what changes as an array, not as a "
            "static argument. Create compiled functions once, outside the loop: a lambda that is "
            "new in each step is compiled in each.",
            'jax.config.update("jax_log_compiles", True)          # names each\n'
            'jax.config.update("jax_explain_cache_misses", True)  # and says why',
            verify="Profile again: compilation is in the first steps only.",
            title="A function is compiled again in the loop",
            falsified_by="jax_log_compiles that prints nothing while these steps run",
            terms=_TERMS,
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        """Sum the compilation time inside the steps, else what the log has for the run."""
        finding = None
        for outcome in self._check_steps(a):
            finding = outcome if isinstance(outcome, Finding) else finding
            yield outcome
        log = a.trace.meta.compilation
        for compile_log in [log] if finding is None and log is not None else []:
            yield from self._check_log(a, compile_log)

    def _check_log(self, a: Analysis, log: CompileLog) -> Outcomes:
        """Build the finding on compilations of the whole run."""
        again, limited = log.recompilations, [c for c in log.not_compiled if LIMIT_TEXT in c.reason]
        if not again and not limited:
            return
        total = sum(cause.ns or 0.0 for cause in again)
        run_ns = None if a.run_steps is None else sum(step.dur for step in a.run_steps.steps)
        if run_ns and total / run_ns < self.min_share and not limited:
            return
        summary = ""
        if again:
            count = sum(cause.count for cause in again)
            summary = f"Functions were compiled again {count:,}×"
            summary += f", {t.format_duration(total)} in all. The longest: {_name_guard(again[0])}."
        if limited:
            summary += f" {labels.clean(limited[0].function or 'A function')} then runs without "
            summary += "torch.compile: it was compiled too often."
        yield Finding(
            title="torch.compile compiles functions again",
            summary=summary.strip(),
            fix=_find_fix(again),
            code=self._find_code(again),
            assumptions=["what changes can be kept from changing"],
            evidence=[
                Evidence("recompilations", sum(cause.count for cause in again), "count"),
                Evidence("time to recompile", total, "ns", per="run"),
                *_list_guards(again),
                Evidence("functions over the limit", len(limited), "count"),
            ],
            where=_locate_functions([*again, *limited]),
            impact=impact_over_run(total, method="time of the recompilations in the log"),
        )

    def _find_code(self, causes: list[CompileCause]) -> str:
        """Return code without dynamic shapes if something else changes. Empty if the rule's own
        fits."""
        fix = _find_fix(causes)
        return self.code.partition("\n")[0] if fix and "dynamic" not in fix else ""

    def _check_steps(self, a: Analysis) -> Outcomes:
        cpu = a.trace.cpu
        log = a.trace.meta.compilation
        recompilations = [] if log is None else log.recompilations
        compilations = np.flatnonzero(
            (
                name_matches(cpu["name"], COMPILE_EVENTS) & cpu["kind"].is_in(["op", "annotation"])
            ).to_numpy()
        )
        if not len(compilations):
            return
        steps = a.steps.used
        start, end = steps["ts"].to_numpy(), steps["end"].to_numpy()
        ts = cpu["ts"].to_numpy()[compilations]
        compile_intervals = intersect(union(ts, ts + cpu["dur"].to_numpy()[compilations]), a.spans)
        by_step = covered_length(start, end, compile_intervals)
        share = compile_intervals.total / max(a.span_ns, 1)
        if share < self.min_share:
            return
        compiling_steps = int((by_step > 0).sum())
        if compiling_steps < self.min_steps:
            yield SkippedCheck(
                what=f"whether {t.format_duration(compile_intervals.total)} of compilation recurs",
                why="it is in one step only, and every function is compiled once",
                record="more steps, after a longer warm-up",
            )
            return
        in_window = rows_in_steps(a, compilations)
        cost = cpu["dur"].to_numpy()[in_window].astype(np.int64)
        yield Finding(
            summary=(
                f"{self.terms['again']} in {t.count_noun(compiling_steps, 'step')} of "
                f"{steps.height}, for {of_step(a, compile_intervals.total)}."
                f"{f' What changed: {_name_guard(recompilations[0])}.' if recompilations else ''}"
            ),
            fix=_find_fix(recompilations),
            code=self._find_code(recompilations),
            evidence=[
                amount_per_step(a, "compilation", compile_intervals.total),
                self.compare("compilation, share", share, "min_share", per=a.per),
                self.compare("steps with compilation", compiling_steps, "min_steps", "count"),
                Evidence("compilations", len(in_window), "count"),
                Evidence("longest compilation", int(cost.max()) if len(cost) else None, "ns"),
                *_list_guards(recompilations),
            ],
            where=_locate_functions(recompilations) or costliest_places(a, in_window, cost),
            edits=[Edit(op="remove", select=Select(on="host", name=COMPILE_EVENTS))],
        )

    @staticmethod
    def examples() -> Examples:
        with_log = _build_recompiling(every=1)
        with_log.compile_log(recompilations={EXAMPLE_GUARD: 2e9})
        return {
            "every step": _build_recompiling(every=1),
            "every other step": _build_recompiling(every=2),
            "without a GPU": _build_recompiling(every=1, gpu=False),
            "the backward pass": _build_recompiling(every=1, name="entire_backward_compile"),
            "as torch 2.2 spells it": _build_recompiling(
                every=1, name="_compile.<locals>.compile_inner"
            ),
            "TensorFlow": _build_recompiling(every=1, name="tf.function-graph_building"),
            "JAX": _build_recompiling(every=1, name="backend_compile_and_load"),
            "a log with the trace": with_log,
            "a log alone": _build_log(recompilations={EXAMPLE_GUARD: 2e9}),
            "a log with a function over the limit": _build_log(
                not_compiled={("model.py", 9, "Dynamo recompile limit exceeded"): 1e8}
            ),
            "once": (_build_recompiling(every=8, us=900), "min_steps"),
            "never": (_build_recompiling(every=0), "not len(compilations)"),
            "never, by a log": (_build_log(), "not limited"),
            "hardly any": (_build_recompiling(every=1, us=20), "min_share"),
            "only looked up": (
                _build_recompiling(every=1, name="TorchDynamo Cache Lookup"),
                "not len(compilations)",
            ),
        }


LIMIT_TEXT = "recompile limit"
"""Text in the reason of a function that was compiled too often."""
EXAMPLE_GUARD = ("model.py", 9, "tensor 'x' size mismatch at index 0. expected 3, actual 4")
GUARD_FIXES: tuple[tuple[str, str], ...] = (
    (
        r"(?:size|stride|rank) mismatch|\.size\(\)|^Ne\(|^Eq\(|\bs\d+\b",
        "Mark the dimension that varies as dynamic (torch._dynamo.mark_dynamic, or dynamic=True), "
        "or pad to a few lengths and set drop_last=True.",
    ),
    (
        r"dtype mismatch|autocast|default_dtype",
        "Pass one dtype: cast inputs before the call, and keep autocast the same around each.",
    ),
    (
        r"requires_grad mismatch|grad_mode|inference_mode",
        "Compile the model twice, once for training and once for evaluation under no_grad.",
    ),
    (r"\.training\b", "Switch between train() and eval() less often, or compile a model for each."),
    (
        r"^G\[|__closure__|___check_global_state",
        "Keep the global from changing, or pass its value as a tensor argument.",
    ),
    (
        r"___check_obj_id|___check_type_id|id\(",
        "Create functions, modules and optimizers once, outside the loop.",
    ),
    (r"\blen\(", "Keep the number of items the same, or stack them in one tensor."),
    (
        r"[!=]= '|[!=]= \"",
        "Select the branch outside the compiled function, or compile one function for each.",
    ),
    (
        r"[!=]= -?\d",
        "Pass the number as a tensor, or set dynamic=True: it is part of the code otherwise.",
    ),
)
"""Patterns of guards as PyTorch writes them, each with what keeps the guard from failing."""


def _find_fix(causes: list[CompileCause]) -> str:
    """Return the fix for the costliest guard, or ``""`` if none is known but the rule's."""
    guard = causes[0].reason if causes else ""
    return next((fix for pattern, fix in GUARD_FIXES if guard and re.search(pattern, guard)), "")


def _name_guard(cause: CompileCause) -> str:
    """Return a function, its line and the guard, as text."""
    place = f"{labels.clean(cause.function or 'a function')}"
    if cause.file is not None:
        place += f" ({t.shorten_path(labels.clean(cause.file), 40)}:{cause.line})"
    return f"{place}, {labels.clean(cause.reason)}"


def _locate_functions(causes: list[CompileCause]) -> list[Location]:
    by_place: dict[tuple[str | None, int | None], Location] = {}
    for cause in causes:
        previous = by_place.get((cause.file, cause.line))
        count = cause.count + (0 if previous is None else previous.count or 0)
        by_place[cause.file, cause.line] = replace(_locate(cause), count=count)
    return list(by_place.values())[:_MAX_NAMED]


def _list_guards(causes: list[CompileCause]) -> Iterator[Evidence]:
    for cause in causes[:_MAX_NAMED]:
        yield Evidence(f"{cause.count:,}× {_name_guard(cause)}", cause.ns, "ns", per="run")


class CudaGraphsSkipped(Rule):
    """torch.compile was set to use CUDA graphs (``mode="reduce-overhead"``, ``"max-autotune"``) and
    did not for some graphs. Its log (``TORCH_TRACE``) gives the reason. Inputs are changed in
    place, some tensors are on the CPU, shapes are dynamic, or an operator cannot be captured. The
    kernels of these graphs are launched one by one.

    The figure is the device's idle time while kernels are launched, from the trace. A log alone has
    none. Graphs that do not wait for their launches gain nothing."""

    id = "cuda-graphs-skipped"
    title = "torch.compile skips CUDA graphs"
    auxiliary_inputs = (COMPILE_LOG,)
    references = (
        "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
        "https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html",
    )
    fix = (
        "Remove the causes in the log: changes of inputs in place, tensors on the CPU, dynamic "
        "shapes, operators that cannot be captured."
    )
    code = "# shell, before starting: names each reason\nexport TORCH_LOGS=perf_hints"
    verify = "Run with TORCH_LOGS=perf_hints: no line says 'skipping cudagraphs'."
    falsified_by = "a profile of these steps with one cudaGraphLaunch per compiled graph"
    assumptions = ("all launches that the GPU waits for belong to these graphs",)
    confidence = 0.7
    alternatives = "launches"
    kinds: ClassVar[Mapping[str, str]] = {
        "mutated inputs": "Do not change inputs of the compiled function in place: return the new "
        "value, or keep it in a parameter or buffer of the model.",
        "cpu device": "Move the tensors that are still on the CPU to the GPU before the call.",
        "dynamic shapes": "Keep shapes the same (pad, drop_last=True, dynamic=False), or set "
        "torch._inductor.config.triton.cudagraph_skip_dynamic_graphs for those that vary.",
        "incompatible op": "Replace the operator that the log names, or call it outside the "
        "compiled function.",
        "multiple devices": "Keep all tensors of a compiled function on one GPU.",
    }

    def check(self, a: Analysis) -> Outcomes:
        log = a.trace.meta.compilation
        causes = [] if log is None else log.without_cuda_graphs
        if not causes:
            return
        costliest = causes[0]
        reason = costliest.reason.lower().replace("-", " ")
        causes_text = "; ".join(_name_guard(cause) for cause in causes[:_MAX_NAMED])
        is_measured = not a.record_only and a.device_id is not None
        note = "" if is_measured else " Its cost is not measured: no GPU work was recorded."
        yield Finding(
            summary=f"The kernels of {t.count_noun(len(causes), 'graph')} are launched one by one: "
            f"{causes_text}.{note}",
            fix=next((fix for name, fix in self.kinds.items() if name in reason), ""),
            evidence=[Evidence("graphs without CUDA graphs", len(causes), "count")],
            where=[_locate(cause) for cause in causes[:_MAX_NAMED]],
            edits=[REMOVE_LAUNCH_COST] if is_measured else [],
            impact=None if is_measured else impact_without_gain("no GPU work was recorded"),
        )

    @staticmethod
    def examples() -> Examples:
        traced = TraceBuilder()
        for _ in range(4):
            with traced.step(), traced.op("Torch-Compiled Region: 0/0"):
                traced.run("aten::add", "elementwise_kernel", 4, times=60, host_us=20)
        traced.compile_log(without_cuda_graphs={EXAMPLE_SKIP: 1e9})
        return {
            "with a trace": traced,
            "a log alone": _build_log(without_cuda_graphs={EXAMPLE_SKIP: 1e9}),
            "no reason": (_build_log(recompilations={EXAMPLE_GUARD: 2e9}), "not causes"),
        }


EXAMPLE_SKIP = ("model.py", 9, "mutated inputs (1 instances). Found from")


def _build_recompiling(
    *,
    every: int,
    name: str = "_compile.compile_inner (dynamo_timed)",
    us: float = 30_000,
    gpu: bool = True,
) -> TraceBuilder:
    b = TraceBuilder() if gpu else TraceBuilder(gpu=None)
    for step in b.steps(6):
        if every and step % every == 0:
            b.on_host(name, us)
        with b.op("Torch-Compiled Region: 0/0"):
            for _ in range(10):
                if gpu:
                    b.launch("triton_poi_fused_add_relu_0", 200)
                else:
                    b.host(200)
        b.sync()
    return b
