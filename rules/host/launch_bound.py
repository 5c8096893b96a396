"""The GPU waits for launches: too many small kernels for one host thread."""

from typing import Any

from advisor.core import text as t
from advisor.core.finding import (
    LATER_STEPS_FIRST,
    Finding,
    Outcomes,
    PassedCheck,
    SkippedCheck,
)
from advisor.core.rule import Citation, Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.gaps import queued_idle_ns
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.inference.annotations import FORWARD
from advisor.replay.selection import mask_launched_under
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    GPU_IDLE,
    TRIED_ON_TRACES,
    XPROF,
    XPROF_LAUNCH,
    public_traces,
)
from advisor.rules.support.common import amount_per_step, of_step, per_step, shapes_by_step
from advisor.rules.support.framework_advice import (
    CAPTURE_CALLS,
    CAPTURE_CODE,
    COMPILE_STEP,
    GRAPHS_ON,
    in_any_language,
)
from advisor.rules.support.launch_gaps import (
    DDP_TIMERS,
    CaptureBlockers,
    LaunchGaps,
    can_capture,
    capture_edits,
    find_capture_blockers,
    idle_in_dense_layers,
    is_compiled,
    locate_gaps,
    measure_launch_gaps,
    repeats_kernels,
)
from advisor.testing import Examples, TraceBuilder

MIN_NAMED_PART = 0.15
"""Minimum ratio of a part of the idle time to all of it, to be named."""


def _name_parts(a: Analysis, gaps: LaunchGaps) -> str:
    """Name notable parts: idle time in Python code, and idle time in slow calls that comes on
    top. Empty if there are none."""
    parts = []
    if gaps.python >= MIN_NAMED_PART * gaps.idle:
        python = t.format_duration(gaps.python / a.step_count)
        parts.append(f", {python} of it in Python code between operators")
    if gaps.longer >= MIN_NAMED_PART * gaps.idle:
        longer = t.format_duration(gaps.longer / a.step_count)
        parts.append(f", and {longer} more in slow calls")
    return "".join(parts)


class LaunchBound(Rule):
    """The GPU finishes its kernels faster than the host launches them, so it idles between them.
    The step is as slow as Python, the dispatcher and the launch calls.

    The rule counts GPU idle time in pieces of at most 200 µs. During them, the thread that launches
    the next kernel is in operators, Python frames or the launch call itself. Longer pieces come
    from one slow call, not from many launches, and have their own rules. So has a loop of many
    short calls before one launch: most of its time is in gaps with more than 1 ms of it. Waits for
    data, copies, syncs, allocation, compilation and the profiler are not counted. Without stacks,
    Python is not counted either, because nothing identifies it; the gain is then larger than
    estimated.

    Small kernels alone prove nothing: a busy GPU may have thousands of them in its queue (a public
    V100 trace: 45% of the kernels below 10 µs at 96% busy). So the rule is silent while the GPU
    is busy, and where launches are few.

    Profiling lengthens host time, with Python stacks most of all: the same step idles less without
    the profiler."""

    id = "launch-bound"
    title = "The GPU waits for kernel launches"
    knobs = ("compile",)
    is_python_time = True
    found_in = public_traces(
        "b200_eager h100_bert_small_inference linear_2080ti_launch_bound nccl_collectives "
        "pairs/particle_batch2 pairs/particle_batch32 pairs/particle_batch64 dlrm_8ranks"
    )
    silent_in = public_traces(
        "pairs/sam_1_fp32_many_syncs a100_train_6steps v100_train_copy_heavy mi250_train "
        "pairs/particle_batch128 mi300_timesformer_inference pairs/sam_3_bf16_compiled_sdpa"
    )
    validation_note = (
        "fires on h100_bert_small_inference (7% busy), b200_eager (13%) and nccl_collectives "
        "(24%). There HTA's host wait is an upper bound of this idle time. Fires on DLRM and SAM, "
        "where idle time before late launches is the bound. Silent on video inference on an "
        "MI300X, which idles before the first kernel. Silent on A100 and V100 training (84 and 96% "
        "busy, half of the kernels below 10 µs)"
    )
    sources = (
        Citation(
            "pieces of at most 200 µs, gaps with 1 ms of them", "rules/support/launch_gaps.py"
        ),
        Citation(
            "a public V100 trace: 45% of the kernels below 10 µs at 96% busy",
            "tests/rules/test_numbers.py",
        ),
    )
    references = (
        "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
        "https://pytorch.org/docs/stable/generated/torch.compile.html",
    )

    min_share = Threshold(0.10, "of the step, idle for this reason", XPROF_LAUNCH)
    max_healthy_share = Threshold(
        0.05, "of the step, idle for this reason; below it, launches keep up", XPROF
    )
    max_busy = Threshold(
        0.80, "of the step, the GPU is busy; above it, the host is not the problem", GPU_IDLE
    )
    min_launches = Threshold(
        30, "launches per step; with fewer, launching is not the problem", TRIED_ON_TRACES
    )

    min_apart = Threshold(
        10,
        "launches between two waits for the GPU; with fewer, no capture is possible",
        TRIED_ON_TRACES,
    )

    max_used_share = Threshold(
        0.5,
        "of the step busy, and of memory in use: twice the batch fits into both",
        TRIED_ON_TRACES,
    )

    code = (
        "# fuses small kernels, then replays CUDA graphs\n"
        'model = torch.compile(model, mode="reduce-overhead")'
    )
    verify = (
        "Profile again: cudaGraphLaunch replaces most launches, and the GPU is busier. For a quick "
        "check, double the batch: the step hardly gets longer."
    )
    falsified_by = "a step that takes twice as long with twice the batch, without the profiler"
    assumptions = ("shapes repeat from step to step, or can be padded to a few sizes",)
    alternatives = "launches"
    looks_at = dict.fromkeys(
        ("dispatch", "launch", "python"),
        "little to gain if the GPU is busy over {max_busy:.0%}, such waits take under "
        "{min_share:.0%}, or launches are under {min_launches}",
    )

    fix = (
        "If shapes repeat, replay the kernels as CUDA graphs. "
        'torch.compile(mode="reduce-overhead") does so and fuses small kernels as well; '
        "torch.cuda.make_graphed_callables captures modules without compiling."
    )
    cases = {
        "the same kernels in every step": {
            "fix": "Replay the kernels as CUDA graphs: they are the same in each step. "
            'torch.compile(mode="reduce-overhead") does so and fuses small kernels as well.'
        },
        "graphs are already used": {
            "fix": "Capture the launches that are still outside CUDA graphs too, or fuse them with "
            "torch.compile."
        },
        "the kernels differ from step to step": {
            "fix": "Pad inputs to a few fixed shapes and replay CUDA graphs, because the kernels "
            'differ from step to step. With torch.compile(mode="reduce-overhead"), each shape gets '
            "a graph."
        },
        "the kernels differ at the same shapes": {
            "fix": 'Capture the model alone, with torch.compile(mode="reduce-overhead") or CUDA '
            "graphs. Its shapes are the same in every step, but the kernels are not: a branch "
            "outside the model changes them."
        },
        "something waits": {
            "fix": "First remove {waits} for the GPU: {names}. A capture allows no waits."
        },
        "a larger batch fits": {
            "fix": "Double the batch, then measure: that raises throughput, and needs a different "
            "learning rate.",
            "code": "{code}\n\n"
            "# or twice the batch, for throughput, with a different learning rate\n"
            "# keep your other arguments\n"
            "loader = DataLoader(..., batch_size=2 * batch_size)",
        },
        "sizes vary outside the dense layers": {
            "fix": "Replay only the dense layers as CUDA graphs{without}. "
            'torch.compile(mode="reduce-overhead") does so and fuses small kernels as well.',
            "code": "# the dense layers alone: sizes of other layers vary between batches\n"
            "# model.dense: your name for these layers\n"
            'model.dense = torch.compile(model.dense, mode="reduce-overhead")',
        },
        "in every case": {
            "fix": "Otherwise give each launch more work: {ways}fewer small operators."
        },
        "the model is already compiled": {
            "fix": 'Compile with mode="reduce-overhead" if shapes repeat: it replays the kernels '
            "of the compiled model as CUDA graphs."
        },
    }

    confidence = 0.85
    sampled_part = "forward"

    inference = {
        "cases": {
            "a larger batch fits": {
                "fix": "Double the batch, then measure: that raises throughput.",
                "code": "{code}\n\n# or twice the batch, for throughput\n"
                "model(torch.cat([batch, next_batch]))",
            }
        }
    }
    engine_advice = GRAPHS_ON
    framework_advice = {
        **in_any_language(
            "Launch less: fuse kernels that follow each other, or work on larger batches. Or "
            "capture the sequence of launches as a graph and launch that.",
            cuda=CAPTURE_CALLS,
            code=CAPTURE_CODE,
        ),
        **COMPILE_STEP,
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            return
        gaps = measure_launch_gaps(a)
        if gaps is None:
            yield SkippedCheck(
                what="whether the GPU waits for launches",
                why="the trace has no launch calls",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
            return
        yield from self._check_queued(a)
        share = gaps.idle / a.span_ns
        if gaps.busy_share > self.max_busy:
            if share < self.max_healthy_share and gaps.launches >= self.min_launches:
                yield PassedCheck(
                    text=f"launches keep up: the GPU idles {share:.1%} {t.format_of(a.per)} "
                    "for them"
                )
            return
        if share < self.min_share or gaps.launches < self.min_launches:
            return
        if not gaps.at_launches:
            return  # slow code before a launch, in many calls
        is_static, waits = repeats_kernels(a), find_capture_blockers(a)
        if not can_capture(gaps.launches, waits, self.min_apart):
            return  # no graph can contain them: the waits must go first
        has_stacks = bool(a.trace.meta.with_stack)
        edits = capture_edits(is_static, waits)
        dense_idle = idle_in_dense_layers(a) if waits.dense_only else 0
        yield Finding(
            summary=(
                f"The GPU idles for {of_step(a, gaps.idle)} until the host launches "
                f"more{_name_parts(a, gaps)}. Each "
                f"of {gaps.calls:,.0f} launches{per_step(a)} costs "
                f"{t.format_duration(gaps.per_launch)} of idle time; the median kernel takes "
                f"{t.format_duration(gaps.kernel_ns)}."
            ),
            evidence=[
                amount_per_step(a, "idle for launches", gaps.idle),
                *([amount_per_step(a, "of it, in dense layers", dense_idle)] if dense_idle else []),
                self.compare("idle for launches, share", share, "min_share", per=a.per),
                amount_per_step(a, "idle in slower calls, or before the first launch", gaps.longer),
                self.compare("GPU busy", gaps.busy_share, "max_busy"),
                self.compare("launches", gaps.calls, "min_launches", "count", per=a.per),
                Evidence("median kernel", gaps.kernel_ns, "ns"),
                Evidence("kernels below 10 µs", gaps.short, "share", None, "TraceLens"),
                Evidence("the same kernels in every step", YES_OR_NO[is_static]),
                Evidence("graph launches", gaps.graph_launches, "count"),
            ],
            where=locate_gaps(a, edits),
            **self._advice(a, is_static, waits, gaps),
            edits=edits,
            needs="" if waits.dense_only else "sizes repeat",
            confidence=0.75 if has_stacks else 0.85,
            confidence_notes=["recording Python stacks lengthens host time most"]
            if has_stacks
            else ["profiling itself lengthens host time"],
        )

    def _check_queued(self, a: Analysis) -> Outcomes:
        """Report GPU idle time while work is queued. Its cause is not in the trace."""
        idle = queued_idle_ns(a)
        if idle >= self.min_share * a.span_ns:
            yield SkippedCheck(
                what=f"why the GPU idles for {of_step(a, idle)} while work is queued for it",
                why="the cause is not in the trace: events were filtered out, or another process "
                "uses the GPU",
                record="all activities, unfiltered, on a GPU without other processes",
            )

    def _advice(
        self, a: Analysis, is_static: bool | None, waits: CaptureBlockers, gaps: LaunchGaps
    ) -> dict[str, Any]:
        fix, code = self.fix, self.code
        count = t.count_noun(waits.own_per_step, "wait") + per_step(a)
        if gaps.graph_launches:
            fix = self.case("graphs are already used")["fix"]
        elif waits.dense_only:
            without = f"; leave the {count} for the GPU outside: {waits.names}" * bool(
                waits.own_per_step
            )
            fix, code = self.case("sizes vary outside the dense layers", without=without).values()
        elif is_static is not False and is_compiled(a):
            fix = self.case("the model is already compiled")["fix"]
        elif is_static is False:
            shapes = shapes_by_step(a, _MODEL_OPS)
            same_shapes = len(shapes) > 1 and len(set(shapes.tolist())) == 1
            condition = "at the same shapes" if same_shapes else "from step to step"
            fix = self.case(f"the kernels differ {condition}")["fix"]
        elif is_static:
            fix = self.case("the same kernels in every step")["fix"]
        graphs, _, remaining = fix.partition(". ")
        others = "" if gaps.graph_launches else waits.others
        # in one sentence, because a short report shows only the first
        if waits.own_per_step and not gaps.graph_launches and not waits.dense_only:
            remove = self.case("something waits", waits=count, names=waits.names)["fix"]
            graphs = f"{graphs}; {t.lower_first(remove)}"
            code = f"{waits.cures}{code}"
        elif DDP_TIMERS in others:
            why = "as DDP adds waits to its first ones"
            graphs = f"{LATER_STEPS_FIRST}, {why}; then {t.lower_first(graphs)}"
        if self._can_double_batch(a, gaps):
            double, code = self.case("a larger batch fits", code=code).values()
            graphs = f"{graphs.removesuffix('.')}. Or {t.lower_first(double)}"
        ways = "".join(f"{way}, " for way in _list_remedies(a))
        otherwise = self.case("in every case", ways=ways)["fix"]
        fix = " ".join(filter(None, [f"{graphs.removesuffix('.')}.", others, remaining, otherwise]))
        return {"fix": fix, "code": code}

    def _can_double_batch(self, a: Analysis, gaps: LaunchGaps) -> bool:
        """Return whether twice the batch fits into memory and idle time, and can be chosen. In a
        server or a generating model, requests determine the batch."""
        memory, inference_steps = a.memory, a.inference_steps
        is_served = inference_steps is not None and any(
            mark.phase != FORWARD for mark in inference_steps.marks
        )
        if is_served or gaps.graph_launches or memory.is_empty():
            return False
        used, capacity = (memory[name].to_numpy() for name in ("peak_reserved", "capacity"))
        return gaps.busy_share <= self.max_used_share and bool(
            (used <= self.max_used_share * capacity).all()
        )

    @staticmethod
    def examples() -> Examples:
        eager, python = TraceBuilder(), TraceBuilder()
        for _ in eager.steps():
            _add_small_kernels(eager, 100)
        for _ in python.steps():
            with python.python("train.py(10): step"):
                for _ in range(60):
                    with python.python("model.py(20): forward"):
                        python.host(25)
                        python.run("aten::add", "elementwise_kernel", 4)
        queue, few, loader, slow, calls, later, graph = (TraceBuilder() for _ in range(7))
        for _ in queue.steps():
            queue.run("aten::add", "elementwise_kernel", 9, times=300, host_us=1)
        for _ in few.steps():
            _add_small_kernels(few, 4)
        for _ in loader.steps():
            loader.loader_wait(9000)
            _add_small_kernels(loader, 30)
        for _ in slow.steps():
            with slow.python("train.py(10): step"):
                with slow.python("data.py(5): tokenise"):
                    slow.host(9000)
                _add_small_kernels(slow, 30)
        for _ in calls.steps():
            with calls.python("train.py(10): step"):
                for _ in range(300):
                    with calls.python("data.py(5): lookup"):
                        calls.host(30)
                calls.run("aten::add", "elementwise_kernel", 30, times=60, host_us=1)
                calls.sync()
        for _ in later.steps():
            with later.python("train.py(10): step"):
                later.run("aten::add", "elementwise_kernel", 30, times=60, host_us=1)
                later.sync()
                for _ in range(300):
                    with later.python("data.py(5): lookup"):
                        later.host(30)
                _add_small_kernels(later, 1)
                later.sync()
        for _ in graph.steps():
            graph.graph_launch([("elementwise_kernel", 10.0)] * 100)
            graph.sync()
        return {
            "eager, small kernels": eager,
            "Python between operators": python,
            "full queue of small kernels": (queue, "gaps.busy_share > self.max_busy"),
            "few kernels": (few, "min_launches"),
            "waiting for data": (loader, "min_share"),
            "one slow function": (slow, "min_share"),
            "many short calls before the first launch": (calls, "min_share"),
            "many short calls before a later one": (later, "gaps.at_launches"),
            "already a graph": (graph, "gaps.busy_share > self.max_busy"),
        }


def _list_remedies(a: Analysis) -> list[str]:
    """Return ways to make launches larger, except those already in use or not applicable."""
    ways = ["a larger batch"]
    updates = mask_launched_under(a, OPTIMIZER_STEP)
    fused = name_matches(a.trace.gpu["name"], kernel_work.FUSED).to_numpy()
    if updates.any() and not (updates & fused).any():
        ways.append("a fused optimizer")
    if kernel_work.find_blocks(a).rows.any():
        ways.append("fused attention")
    return ways


def _add_small_kernels(b: TraceBuilder, count: int) -> None:
    b.run("aten::add", "elementwise_kernel", 4, times=count, host_us=20)


_MODEL_OPS = (
    r"^aten::(?:addmm|mm|bmm|baddbmm|cudnn_convolution|miopen_convolution|convolution"
    r"|scaled_dot_product_attention|_scaled_dot_product_\w+_attention)$"
)
"""Operators that show the model's shapes, including keys and values of a growing cache."""
YES_OR_NO = {None: None, True: "yes", False: "no"}
