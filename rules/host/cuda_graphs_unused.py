"""Steps that launch the same kernels one by one while the GPU waits."""

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, SkippedCheck
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import GPU_IDLE, TRIED_ON_TRACES, XPROF_LAUNCH, public_traces
from advisor.rules.support.common import amount_per_step
from advisor.rules.support.framework_advice import (
    CAPTURE_CALLS,
    CAPTURE_CODE,
    COMPILE_STEP,
    GRAPHS_ON,
    in_any_language,
)
from advisor.rules.support.launch_gaps import (
    can_capture,
    capture_edits,
    find_capture_blockers,
    is_compiled,
    locate_gaps,
    measure_launch_gaps,
    repeats_kernels,
)
from advisor.testing import Examples, TraceBuilder


class CudaGraphsUnused(Rule):
    """Every step launches the same kernels in the same order, one call per kernel, and the GPU
    waits for the launches. A CUDA graph would launch them all with one call.

    The rule needs the same as launch-bound: GPU idle time caused by launches, and a GPU that is not
    busy. It also needs a window without a graph launch. In two or more steps the kernels must have
    the same names in the same order on each stream. Calls that wait for the GPU inside a step,
    which a capture does not allow, are counted and named. Data-dependent shapes appear as differing
    kernels or as waits. Both rules offer fixes for the same time: only one of them is ranked."""

    id = "cuda-graphs-unused"
    title = "Every step repeats the same launches without CUDA graphs"
    knobs = ("compile",)
    found_in = ("traces/linear_2080ti_launch_bound", "traces/nccl_collectives")
    silent_in = public_traces("a100_train_6steps v100_train_copy_heavy two_ranks_rank0 mi250_train")
    validation_note = (
        "fires on nccl_collectives (3 steps, 1,258 pieces of work each, the same kernels in the "
        "same order). Silent on A100 and V100 training"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs",
        "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/",
    )

    min_share = Threshold(0.10, "of the step, idle for launches", XPROF_LAUNCH)
    max_busy = Threshold(0.80, "of the step, the GPU is busy", GPU_IDLE)
    min_launches = Threshold(
        30, "launches per step; with fewer, launching is not the problem", TRIED_ON_TRACES
    )

    min_apart = Threshold(
        10,
        "launches between two waits for the GPU; with fewer, no capture is possible",
        TRIED_ON_TRACES,
    )

    code = (
        'model = torch.compile(model, mode="reduce-overhead")\n'
        "\n# or by hand, after some warm-up steps on a side stream:\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "optimizer.zero_grad(set_to_none=True)\n"
        "with torch.cuda.graph(graph):\n"
        "    loss = loss_fn(model(static_input), static_target)\n"
        "    loss.backward()\n"
        "    optimizer.step()          # an optimizer made with capturable=True\n"
        "for x, y in loader:\n"
        "    static_input.copy_(x, non_blocking=True)\n"
        "    static_target.copy_(y, non_blocking=True)\n"
        "    graph.replay()"
    )
    verify = "Profile again: one cudaGraphLaunch per step, and a GPU that is busy most of it."
    falsified_by = "an error during capture, which names the operation that it does not allow"
    assumptions = ("inputs have the same shape in every step", "no host code runs in between")
    confidence = 0.7
    sampled_part = "forward"
    alternatives = "launches"

    fix = (
        "Capture the step, or forward and backward, as a CUDA graph. Replay it after copying the "
        "inputs into fixed buffers."
    )
    cases = {
        "something waits for the GPU": {
            "fix": "Capture the step, or forward and backward, as a CUDA graph; first remove "
            "{waits} for the GPU per step ({names}). Replay it after copying the inputs into fixed "
            "buffers. A capture allows no waits."
        }
    }

    inference = {
        "fix": "Capture the forward pass as a CUDA graph. Replay it after copying the inputs into "
        "fixed buffers.",
        "code": 'model = torch.compile(model, mode="reduce-overhead")\n'
        "\n# or by hand, after some warm-up calls on a side stream:\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.inference_mode(), torch.cuda.graph(graph):\n"
        "    static_output = model(static_input)\n"
        "for x in loader:\n"
        "    static_input.copy_(x, non_blocking=True)\n"
        "    graph.replay()            # the result is in static_output",
        "cases": {
            "something waits for the GPU": {
                "fix": "Capture the forward pass as a CUDA graph; first remove {waits} for the GPU "
                "per step ({names}). Replay it after copying the inputs into fixed buffers. A "
                "capture allows no waits."
            }
        },
    }
    engine_advice = GRAPHS_ON
    framework_advice = {
        **in_any_language(
            "Capture the sequence of launches as a graph, and launch that: it is the same each "
            "time.",
            cuda=CAPTURE_CALLS,
            code=CAPTURE_CODE,
        ),
        **COMPILE_STEP,
    }

    def check(self, a: Analysis) -> Outcomes:
        gaps = measure_launch_gaps(a) if a.device_id is not None else None
        if gaps is None or gaps.graph_launches or gaps.busy_share > self.max_busy:
            return
        share = gaps.idle / a.span_ns
        if share < self.min_share or gaps.launches < self.min_launches or not gaps.at_launches:
            return
        is_static = repeats_kernels(a)
        if is_static is None:
            yield SkippedCheck(
                what="whether the same kernels repeat in every step, as CUDA graphs need",
                why="the trace marks fewer than two steps",
                record="schedule(wait=1, warmup=2, active=5) and profiler.step() in the loop",
            )
            return
        if not is_static:
            return
        waits = find_capture_blockers(a)
        if not can_capture(gaps.launches, waits, self.min_apart):
            return
        fix = self.fix
        if waits.own_per_step:
            count = t.count_noun(waits.own_per_step, "wait")
            fix = self.case("something waits for the GPU", waits=count, names=waits.names)["fix"]
        fix = f"{fix} {waits.others}".rstrip()
        if is_compiled(a):
            fix = f"The model is compiled already: change only the mode. {fix}"
        edits = capture_edits(is_static, waits)
        yield Finding(
            fix=fix,
            summary=(
                f"All {a.step_count} steps launch the same {gaps.launches:,.0f} kernels and copies "
                "in the same order. The GPU idles for "
                f"{t.format_duration(gaps.idle / a.step_count)} per step "
                f"({gaps.idle / a.span_ns:.0%}) "
                f"{'meanwhile' if a.rank_record is None else 'while profiled'}."
            ),
            evidence=[
                amount_per_step(a, "idle for launches", gaps.idle),
                self.compare("idle for launches, share", share, "min_share", per=a.per),
                self.compare("launch calls", gaps.calls, "min_launches", "count", per=a.per),
                Evidence("steps with the same kernels", a.step_count, "count"),
                Evidence("graph launches", 0, "count"),
                Evidence("waits for the GPU inside a step", waits.per_step, "count"),
            ],
            where=locate_gaps(a, edits),
            edits=edits,
            needs="sizes repeat",
        )

    @staticmethod
    def examples() -> Examples:
        b, changing, graph, busy, reads = (TraceBuilder() for _ in range(5))
        for _ in reads.steps():
            for _ in range(30):
                _add_launches(reads, 2)
                reads.item()
        for _ in b.steps():
            _add_launches(b, 60)
        for number in changing.steps():
            _add_launches(changing, 60 + number)
        for _ in graph.steps():
            graph.graph_launch([("elementwise_kernel", 2.0)] * 60)
            graph.host(300)
        for _ in busy.steps():
            _add_launches(busy, 60, us=60)
        return {
            "the same small kernels": b,
            "changing kernels": (changing, "not is_static"),
            "a graph": (graph, "gaps.graph_launches"),
            "busy GPU": (busy, "gaps.busy_share > self.max_busy"),
            "a read after every second kernel": (reads, "min_apart"),
        }


def _add_launches(b: TraceBuilder, count: int, us: float = 4) -> None:
    b.run("aten::add", "elementwise_kernel", us, times=count, host_us=20)
