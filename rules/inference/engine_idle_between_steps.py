"""The GPU idles between the steps of an inference engine."""

from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.intervals import covered_length
from advisor.core.rule import FrameworkAdvice, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.steps.named_intervals import between_steps
from advisor.rules.support.citations import CHOSEN, TENSORBOARD
from advisor.rules.support.common import amount_per_step, of_step
from advisor.rules.support.framework_advice import SGLANG_ARGUMENTS, VLLM_TUNING
from advisor.testing import Examples, TraceBuilder


class EngineIdleBetweenSteps(Rule):
    """The GPU waits after each step while the engine schedules the next one on the host. The host
    chooses requests, turns tokens into text and prepares inputs. Engines can do that for the next
    step while the GPU still works on this one.

    The rule counts GPU idle time from the last work of a step to the first of the next. Pauses
    longer than half a period do not count: the engine has no requests then. It marks its steps.
    """

    id = "engine-idle-between-steps"
    title = "The GPU idles while the engine schedules the next step"
    is_python_time = True
    silent_in = ("traces/serving/vllm_decode_full/replay", "traces/serving/sglang_prefill/replay")

    min_share = Threshold(0.05, "of the steps, idle between two of them", TENSORBOARD)
    min_steps = Threshold(4, "steps of the engine", CHOSEN)

    fix = (
        "Schedule the next step while the GPU works on this one. Send tokens to the text side in "
        "groups, and give tokenization its own processes."
    )
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Let vLLM schedule ahead with --async-scheduling (0.10 and later). Send tokens in "
            "groups with --stream-interval 10, and start more API servers with --api-server-count.",
            "vllm serve MODEL --async-scheduling --stream-interval 10",
        ),
        "sglang": FrameworkAdvice(
            "Start SGLang without --disable-overlap-schedule. Send tokens in groups with "
            "--stream-interval 10, and use --tokenizer-worker-num 4 for text.",
            "python -m sglang.launch_server --model-path MODEL \\\n"
            "  --stream-interval 10 --tokenizer-worker-num 4",
        ),
        "tensorrt-llm": FrameworkAdvice(
            "Leave disable_overlap_scheduler at false. Send tokens in groups with stream_interval, "
            "and give text its own processes with num_postprocess_workers.",
            "disable_overlap_scheduler: false\nstream_interval: 10\nnum_postprocess_workers: 4",
        ),
    }
    verify = "Profile again: the gaps between two steps are shorter, tokens per second rise."
    falsified_by = "the same inter-token latency with the switch on"
    assumptions = ("scheduling does not need the tokens of the step before",)
    confidence = 0.7
    references = (VLLM_TUNING.address, SGLANG_ARGUMENTS.address)

    def check(self, a: Analysis) -> Outcomes:
        inference_steps = a.inference_steps
        if a.device_id is None or inference_steps is None or inference_steps.engine is None:
            return
        if len(inference_steps.marks) < self.min_steps:
            return
        gaps = a.gaps
        ts = gaps["ts"].to_numpy()
        idle = int(covered_length(ts, ts + gaps["dur"].to_numpy(), between_steps(a)).sum())
        if not idle:
            return
        share = idle / max(a.span_ns, 1)
        if share < self.min_share:
            return
        yield Finding(
            summary=f"The GPU idles for {of_step(a, idle)} between two steps of the engine.",
            evidence=[
                amount_per_step(a, "idle between steps", idle),
                self.compare("idle between steps, share", share, "min_share", per=a.per),
                self.compare(
                    "steps of the engine", len(inference_steps.marks), "min_steps", "count"
                ),
            ],
            edits=[Edit(op="remove", select=Select(on="gap", at="between_steps"))],
        )

    @staticmethod
    def examples() -> Examples:
        train = TraceBuilder("H100")
        for _ in train.steps(6):
            train.run("aten::mm", "nvjet_hsh_128x128", 500)
            train.sync()
            train.host(400)
        return {
            "scheduling between decode steps": _build_engine(8, host=500),
            "it schedules ahead": (_build_engine(8, host=20), "min_share"),
            "it waits for requests": (_build_engine(8, host=9000), "not idle"),
            "two steps": (_build_engine(2, host=500), "min_steps"),
            "no engine": (train, "inference_steps is None"),
        }


def _build_engine(steps: int, *, host: float) -> TraceBuilder:
    """Build decode steps of one graph each, with the host at work between them."""
    b = TraceBuilder("H100")
    for _ in range(steps):
        with b.range("execute_context_0(0)_generation_8(8)"):
            b.graph_launch([("nvjet_hsh_64x8", 20.0)] * 100)
            b.sync("cudaStreamSynchronize")
        b.host(host)
    return b
