"""The device waits for launches: too many small kernels for one host thread."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.analysis import Analysis
from advisor.model import Evidence, Finding, Good, NotMeasured, Outcome, Rule
from advisor.rules.common import counted, duration, of_step, per
from advisor.rules.host.late import (
    Blockers,
    Late,
    blockers,
    edit,
    how_late,
    same_kernels,
    where,
)
from advisor.testing import TraceBuilder


class LaunchBound(Rule):
    """The device finishes its kernels faster than the host launches them, so it idles between
    them: the step is as slow as Python, the dispatcher and the launch calls.

    Counted is idle time of the device while the thread that launches the next kernel is inside
    operators, Python frames or the launch call itself, in pieces of at most 200 µs: a long piece
    is one slow thing, not many launches, and has rules of its own. Waits for data, copies, syncs,
    allocation, compilation and the profiler are not in it. Python without stacks is not either,
    for nothing shows that it is Python; the gain is rather larger than said then.

    Small kernels alone prove nothing: a busy device may have thousands of them in its queue
    (public traces: 10 % of kernels below 10 µs at 99 % busy, but also 45 % at 96 % busy). So the
    rule is silent while the device is busy, and when there are too few launches to speak of.

    Profiling lengthens host time, with Python stacks most of all: the same step idles less without
    the profiler.
    """

    id = "launch-bound"
    title = "The device waits for kernel launches"
    category = "host"
    validated = "real traces"
    validated_on = (
        "fires on h100_bert_small_inference (7 % busy), b200_eager (13 %) and nccl_collectives "
        "(24 %), where idle time by HTA's definition of host wait bounds it from above; silent on "
        "A100 and V100 training (84 and 96 % busy, half of the kernels below 10 µs)"
    )
    references = (
        "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
        "https://pytorch.org/docs/stable/generated/torch.compile.html",
    )

    min_share = 0.10  # of the step, idle for this reason; XProf: kernel launch 3 % and 15 %
    max_busy = 0.80  # gpu-idle: a device that is busier than this has no host problem
    min_launches = 30  # a step: fewer are no stream of launches

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the idle time that launching explains."""
        if a.device_id is None:
            return
        late = how_late(a)
        if late is None:
            yield NotMeasured(
                what="whether the device waits for launches",
                why="the trace holds no launch calls",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
            )
            return
        yield from self._queued(a)
        share = late.idle / a.span_ns
        if late.busy_share > self.max_busy:
            if share < self.min_share and late.launches >= self.min_launches:
                yield Good(
                    text=f"launches keep up: the device idles {share:.1%} of the step for them"
                )
            return
        if share < self.min_share or late.launches < self.min_launches:
            return
        static, waits = same_kernels(a), blockers(a)
        stacks = bool(a.trace.meta.with_stack)
        yield Finding(
            rule=self.id,
            title=self.title,
            summary=(
                f"{of_step(a, late.idle)} the device idles "
                f"while the host prepares the next launch: {late.calls:,.0f} launches{per(a)}, "
                f"{duration(late.per_launch)} of idle time each, for kernels of "
                f"{duration(late.kernel_ns)} (median)."
            ),
            evidence=[
                Evidence(f"idle for launches{per(a)}", late.idle / a.step_count, "ns"),
                Evidence("share of the step", share, "share", self.min_share, "XProf (3 to 15 %)"),
                Evidence("device busy", late.busy_share, "share", self.max_busy, "gpu-idle (80 %)"),
                Evidence(f"launches{per(a)}", late.calls, "count", self.min_launches),
                Evidence("median kernel", late.kernel_ns, "ns"),
                Evidence("kernels below 10 µs", late.short, "share", None, "TraceLens"),
                Evidence("the same kernels in every step", _told(static)),
                Evidence("graph launches", late.graph_launches, "count"),
            ],
            where=where(a),
            fix=self._fix(static, waits, late),
            code=(
                "# fuses small kernels, then replays CUDA graphs\n"
                'model = torch.compile(model, mode="reduce-overhead")\n'
                "# or, without compiling, capture what has fixed shapes and never waits\n"
                "model = torch.cuda.make_graphed_callables(model, (example_input,))"
            ),
            check=(
                "Profile again: cudaGraphLaunch replaces most launches, device busy rises. A run "
                "with twice the batch that takes hardly longer confirms it at once."
            ),
            edits=[edit()],
            confidence=0.75 if stacks else 0.85,
            confidence_notes=["Python stacks were recorded: they lengthen host time most of all"]
            if stacks
            else ["profiling itself lengthens host time"],
            assumptions=["shapes repeat from step to step, or can be padded to a few sizes"],
            falsified_by="a batch twice as large takes twice as long without the profiler",
            alternatives="launches",
        )

    def _queued(self, a: Analysis) -> Iterator[Outcome]:
        """Idle time although work is queued: its cause is not in the trace."""
        gaps = a.gaps
        kind = a.trace.cpu["kind"].gather(gaps["host"])
        queued = (gaps["cause"] == "unknown") & (kind == "runtime").fill_null(False)
        idle = int(gaps["dur"].filter(queued).sum())
        if idle >= self.min_share * a.span_ns:
            yield NotMeasured(
                what=f"why the device idles {of_step(a, idle)} while work is queued for it",
                why="what ran or held it then is not in the trace: events were filtered out, or "
                "another process uses the device",
                record="all activities, unfiltered, on a device of one's own",
            )

    @staticmethod
    def _fix(static: bool | None, waits: Blockers, late: Late) -> str:
        if late.graph_launches:
            first = (
                "Bring the launches that are still outside under CUDA graphs too, or fuse them "
                "with torch.compile."
            )
        elif static is False:
            first = (
                "The kernels differ from step to step, so pad inputs to a few fixed shapes first; "
                'then torch.compile(mode="reduce-overhead") or CUDA graphs take the launches off '
                "the host."
            )
        else:
            same = "The kernels are the same in every step" if static else "If shapes repeat"
            first = (
                f"{same}: replay them as CUDA graphs, best by "
                'torch.compile(mode="reduce-overhead"), which fuses small kernels as well.'
            )
        remove = (
            " A capture may not wait for the device: take out "
            f"{counted(waits.each_step, 'wait')} a step first: {waits.names}."
            if waits.each_step and not late.graph_launches
            else ""
        )
        return (
            f"{first}{remove} Else give each launch more work: a larger batch, fused optimizer and "
            "attention, fewer small operators."
        )

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
                        with python.op("aten::add"):
                            python.launch("elementwise_kernel", 4)
        return {"eager, small kernels": eager, "Python between operators": python}

    @staticmethod
    def silent_on() -> dict[str, TraceBuilder]:
        """A full queue of small kernels; few kernels; a loader; one slow function; a graph."""
        queue, few, loader, slow, graph = (TraceBuilder() for _ in range(5))
        for _ in range(4):
            with queue.step():
                for _ in range(300):  # the device needs longer for each than the host
                    with queue.op("aten::add", host_us=1):
                        queue.launch("elementwise_kernel", 9)
            with few.step():
                _small_kernels(few, 4)
            with loader.step():
                loader.loader_wait(9000)
                _small_kernels(loader, 30)
            with slow.step(), slow.python("train.py(10): step"):
                with slow.python("data.py(5): tokenise"):
                    slow.host(9000)
                _small_kernels(slow, 30)
            with graph.step():
                graph.graph_launch([("elementwise_kernel", 10.0)] * 100)
                graph.sync()
        return {
            "full queue of small kernels": queue,
            "few kernels": few,
            "waiting for data": loader,
            "one slow function": slow,
            "already a graph": graph,
        }


def _small_kernels(b: TraceBuilder, count: int) -> None:
    for _ in range(count):
        with b.op("aten::add", host_us=20):
            b.launch("elementwise_kernel", 4)


def _told(static: bool | None) -> str | None:
    return None if static is None else "yes" if static else "no"
