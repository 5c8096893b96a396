"""The device waits for launches: too many small kernels for one host thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from advisor.core import text as t
from advisor.core.finding import (
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    PassedCheck,
    Rule,
    SkippedCheck,
    Source,
    Threshold,
)
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.rules.common import figure, of_step, per
from advisor.rules.elsewhere import JAX_JIT, JIT_STEP, TF_COMPILE, in_any_language
from advisor.rules.host.late import (
    Blockers,
    Late,
    blockers,
    edit,
    how_late,
    same_kernels,
    where,
)
from advisor.rules.sources import GPU_IDLE, OURS, XPROF_LAUNCH
from advisor.testing import TraceBuilder


class LaunchBound(Rule):
    """The device finishes its kernels faster than the host launches them, so it idles between
    them: the step is as slow as Python, the dispatcher and the launch calls.

    Counted is idle time of the device while the thread that launches the next kernel is inside
    operators, Python frames or the launch call itself, in pieces of at most 200 µs: a long piece
    is one slow thing, not many launches, and has rules of its own. So is a loop of many short calls
    before one launch, where most of that time is in gaps with more than 1 ms of it. Waits for
    data, copies, syncs, allocation, compilation and the profiler are not in it. Python without
    stacks is not either, for nothing shows that it is Python; the gain is rather larger than said
    then.

    Small kernels alone prove nothing: a busy device may have thousands of them in its queue (a
    public V100 trace: 45 % of the kernels below 10 µs at 96 % busy). So the rule is silent while
    the device is busy, and when there are too few launches to speak of.

    Profiling lengthens host time, with Python stacks most of all: the same step idles less without
    the profiler.
    """

    id = "launch-bound"
    title = "The device waits for kernel launches"
    category = "host"
    knobs = ("compile",)
    of_python = True
    found_in = (
        "traces/b200_eager",
        "traces/h100_bert_small_inference",
        "traces/linear_2080ti_launch_bound",
        "traces/nccl_collectives",
        "traces/pairs/particle_batch2",
        "traces/pairs/particle_batch32",
        "traces/pairs/particle_batch64",
        "traces/dlrm_8ranks",
        "traces/pairs/sam_1_fp32_many_syncs",
    )
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/mi250_train",
        "traces/pairs/particle_batch128",
        "traces/mi300_timesformer_inference",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    validated_on = (
        "fires on h100_bert_small_inference (7 % busy), b200_eager (13 %) and nccl_collectives "
        "(24 %), where idle time by HTA's definition of host wait bounds it from above, and on "
        "DLRM and SAM, where idle time before late launches does; silent on video inference on an "
        "MI300X, whose idle time lies before the first kernel, and on "
        "A100 and V100 training (84 and 96 % busy, half of the kernels below 10 µs)"
    )
    sources = (
        Source("pieces of at most 200 µs, gaps with 1 ms of them", "rules/host/late.py"),
        Source(
            "a public V100 trace: 45 % of the kernels below 10 µs at 96 % busy",
            "tests/rules/test_numbers.py",
        ),
    )
    references = (
        "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
        "https://pytorch.org/docs/stable/generated/torch.compile.html",
    )

    min_share = Threshold(0.10, "of the step, idle for this reason", XPROF_LAUNCH)
    max_busy = Threshold(
        0.80, "of the step: a device that is busier than this has no host problem", GPU_IDLE
    )
    min_launches = Threshold(30, "launches a step: fewer are no stream of launches", OURS)

    code = (
        "# fuses small kernels, then replays CUDA graphs\n"
        'model = torch.compile(model, mode="reduce-overhead")\n'
        "# or, without compiling, capture what has fixed shapes and never waits\n"
        "model = torch.cuda.make_graphed_callables(model, (example_input,))"
    )
    verify = (
        "Profile again: cudaGraphLaunch replaces most launches, device busy rises. A run "
        "with twice the batch that takes hardly longer confirms it at once."
    )
    falsified_by = "a batch twice as large takes twice as long without the profiler"
    assumptions = ("shapes repeat from step to step, or can be padded to a few sizes",)
    alternatives = "launches"

    fix = (
        "If shapes repeat: replay them as CUDA graphs, best by "
        'torch.compile(mode="reduce-overhead"), which fuses small kernels as well.'
    )
    cases: ClassVar = {
        "the same kernels in every step": {
            "fix": "The kernels are the same in every step: replay them as CUDA graphs, best by "
            'torch.compile(mode="reduce-overhead"), which fuses small kernels as well.'
        },
        "graphs are used already": {
            "fix": "Bring the launches that are still outside under CUDA graphs too, or fuse them "
            "with torch.compile."
        },
        "the kernels differ from step to step": {
            "fix": "The kernels differ from step to step, so pad inputs to a few fixed shapes "
            'first; then torch.compile(mode="reduce-overhead") or CUDA graphs take the launches '
            "off the host."
        },
        "something waits": {
            "fix": "A capture may not wait for the device: take out {waits} a step first: {names}."
        },
        "in every case": {
            "fix": "Else give each launch more work: a larger batch, fused optimizer and "
            "attention, fewer small operators."
        },
    }

    confidence = 0.85

    inference: ClassVar = {
        "cases": {
            "in every case": {
                "fix": "Else give each launch more work: a larger batch, fused attention, fewer "
                "small operators."
            }
        }
    }
    elsewhere: ClassVar = {
        **in_any_language(
            "Launch less: do more in one kernel (fuse kernels that follow each other, work on "
            "larger batches), or capture the sequence of launches as a graph and launch that.",
            cuda="cudaStreamBeginCapture, cudaGraphInstantiate, then cudaGraphLaunch in each "
            "iteration.",
            code="cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);\n"
            "iteration(stream);                            // launches only, no waiting\n"
            "cudaStreamEndCapture(stream, &graph);\n"
            "cudaGraphInstantiate(&run, graph, 0);\n"
            "for (int i = 0; i < iterations; ++i) cudaGraphLaunch(run, stream);",
        ),
        TENSORFLOW: FrameworkAdvice(JIT_STEP, TF_COMPILE),
        JAX: FrameworkAdvice(JIT_STEP, JAX_JIT),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the idle time that launching explains."""
        if a.device_id is None:
            return
        late = how_late(a)
        if late is None:
            yield SkippedCheck(
                what="whether the device waits for launches",
                why="the trace holds no launch calls",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
            return
        yield from self._queued(a)
        share = late.idle / a.span_ns
        if late.busy_share > self.max_busy:
            if share < self.min_share and late.launches >= self.min_launches:
                yield PassedCheck(
                    text=f"launches keep up: the device idles {share:.1%} {t.format_of(a.per)} "
                    "for them"
                )
            return
        if share < self.min_share or late.launches < self.min_launches:
            return
        if not late.at_launches:
            return  # one slow thing before a launch, in many calls
        static, waits = same_kernels(a), blockers(a)
        stacks = bool(a.trace.meta.with_stack)
        yield Finding(
            summary=(
                f"{of_step(a, late.idle)} the device idles "
                f"while the host prepares the next launch: {late.calls:,.0f} launches{per(a)}, "
                f"{t.format_duration(late.per_launch)} of idle time each, for kernels of "
                f"{t.format_duration(late.kernel_ns)} (median)."
            ),
            evidence=[
                figure(a, "idle for launches", late.idle),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("device busy", late.busy_share, "share", *self.limit("max_busy")),
                Evidence("launches", late.calls, "count", *self.limit("min_launches"), per=a.per),
                Evidence("median kernel", late.kernel_ns, "ns"),
                Evidence("kernels below 10 µs", late.short, "share", None, "TraceLens"),
                Evidence("the same kernels in every step", _told(static)),
                Evidence("graph launches", late.graph_launches, "count"),
            ],
            where=where(a),
            fix=self._fix(static, waits, late),
            edits=[edit()],
            confidence=0.75 if stacks else 0.85,
            confidence_notes=["Python stacks were recorded: they lengthen host time most of all"]
            if stacks
            else ["profiling itself lengthens host time"],
        )

    def _queued(self, a: Analysis) -> Iterator[Outcome]:
        """Idle time although work is queued: its cause is not in the trace."""
        gaps = a.gaps
        kind = a.trace.cpu["kind"].gather(gaps["host"])
        queued = (gaps["cause"] == "unknown") & (kind == "runtime").fill_null(False)
        idle = int(gaps["dur"].filter(queued).sum())
        if idle >= self.min_share * a.span_ns:
            yield SkippedCheck(
                what=f"why the device idles {of_step(a, idle)} while work is queued for it",
                why="what ran or held it then is not in the trace: events were filtered out, or "
                "another process uses the device",
                record="all activities, unfiltered, on a device of one's own",
            )

    def _fix(self, static: bool | None, waits: Blockers, late: Late) -> str:
        first = self.fix
        if late.graph_launches:
            first = self.case("graphs are used already")["fix"]
        elif static is False:
            first = self.case("the kernels differ from step to step")["fix"]
        elif static:
            first = self.case("the same kernels in every step")["fix"]
        remove = ""
        if waits.each_step and not late.graph_launches:
            told = t.count_noun(waits.each_step, "wait")
            remove = self.case("something waits", waits=told, names=waits.names)["fix"]
        return " ".join(filter(None, [first, remove, self.case("in every case")["fix"]]))

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Many small kernels; the same with Python between the operators."""
        eager, python = TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with eager.step():
                _small_kernels(eager, 100)
            with python.step(), python.python("train.py(10): step"):
                for _ in range(60):
                    with python.python("model.py(20): forward"):
                        python.host(25)
                        python.run("aten::add", "elementwise_kernel", 4)
        return {"eager, small kernels": eager, "Python between operators": python}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """A full queue of small kernels; few kernels; a loader; a slow function, in one call and in
        many; a graph."""
        queue, few, loader, slow, calls, later, graph = (TraceBuilder() for _ in range(7))
        for _ in range(4):
            with queue.step():
                queue.run("aten::add", "elementwise_kernel", 9, times=300, host_us=1)
            with few.step():
                _small_kernels(few, 4)
            with loader.step():
                loader.loader_wait(9000)
                _small_kernels(loader, 30)
            with slow.step(), slow.python("train.py(10): step"):
                with slow.python("data.py(5): tokenise"):
                    slow.host(9000)
                _small_kernels(slow, 30)
            with calls.step(), calls.python("train.py(10): step"):
                for _ in range(300):
                    with calls.python("data.py(5): lookup"):
                        calls.host(30)
                calls.run("aten::add", "elementwise_kernel", 30, times=60, host_us=1)
                calls.sync()
            with later.step(), later.python("train.py(10): step"):
                later.run("aten::add", "elementwise_kernel", 30, times=60, host_us=1)
                later.sync()
                for _ in range(300):
                    with later.python("data.py(5): lookup"):
                        later.host(30)
                _small_kernels(later, 1)
                later.sync()
            with graph.step():
                graph.graph_launch([("elementwise_kernel", 10.0)] * 100)
                graph.sync()
        return {
            "full queue of small kernels": (queue, "late.busy_share > self.max_busy"),
            "few kernels": (few, "min_launches"),
            "waiting for data": (loader, "min_share"),
            "one slow function": (slow, "min_share"),
            "many short calls before the first launch": (calls, "min_share"),
            "many short calls before a later one": (later, "late.at_launches"),
            "already a graph": (graph, "late.busy_share > self.max_busy"),
        }


def _small_kernels(b: TraceBuilder, count: int) -> None:
    b.run("aten::add", "elementwise_kernel", 4, times=count, host_us=20)


def _told(static: bool | None) -> str | None:
    return None if static is None else "yes" if static else "no"
