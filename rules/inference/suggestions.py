"""Suggestions for an engine whose gain its trace cannot show: questions to measure."""

from collections.abc import Iterator

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, impact_without_gain
from advisor.core.report_inference import InferenceByPhase, InferencePhase
from advisor.core.rule import Evidence, FrameworkAdvice, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.inference.annotations import DECODE, MIXED, PREFILL
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.framework_advice import SGLANG_ARGUMENTS, SGLANG_TUNING, VLLM_TUNING
from advisor.testing import Examples, TraceBuilder

Phases = dict[str, InferencePhase]
Occasions = Iterator[tuple[str, list[Evidence]]]


class _Suggestion(Rule):
    """Base of suggestions to change an engine's configuration, where the trace gives a reason."""

    confidence = 0.5
    references = (VLLM_TUNING.address, SGLANG_TUNING.address, SGLANG_ARGUMENTS.address)

    def check(self, a: Analysis) -> Outcomes:
        inference = a.inference
        if inference is None or inference.source != "engine":
            return
        phases = {phase.name: phase for phase in inference.phases}
        for summary, evidence in self.find_occasion(a, inference, phases):
            why = "the trace does not show how fast the other setting is"
            yield Finding(
                summary=summary,
                evidence=evidence,
                impact=impact_without_gain(why),
                informational=True,
            )

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        """Yield summary and evidence, if there is an occasion."""
        raise NotImplementedError


class PrefillStallsDecode(_Suggestion):
    """Steps with prompts in them take several times as long as steps that only decode. All running
    requests wait for their next token meanwhile. These are the longest gaps between tokens. Smaller
    chunks of prompts shorten them, and the first token of a new request comes later."""

    id = "prefill-stalls-decode"
    title = "Steps with prompts hold up the decoding of others"
    min_ratio = Threshold(3.0, "times as long as a decode step", CHOSEN)
    fix = (
        "Split prompts into smaller chunks, and compare p99 between tokens with time to the first."
    )
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Lower --max-num-batched-tokens (to 2048, for example): chunked prefill is on by "
            "default in V1. Compare p99 between tokens with the time to the first token.",
            "vllm serve MODEL --max-num-batched-tokens 2048",
        ),
        "sglang": FrameworkAdvice(
            "Lower --chunked-prefill-size (to 2048, for example) and try --enable-mixed-chunk. "
            "Compare p99 between tokens with the time to the first token.",
            "python -m sglang.launch_server --model-path MODEL \\\n"
            "  --chunked-prefill-size 2048 --enable-mixed-chunk",
        ),
    }
    verify = "The 99th percentile of the time between tokens falls under the same load."
    falsified_by = "the same percentile with chunks half as large"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        decode = phases.get(DECODE)
        long = max((p for n, p in phases.items() if n in (PREFILL, MIXED)), default=None, key=_ns)
        if decode is None or long is None:
            return
        ratio = long.ns / decode.ns
        if ratio < self.min_ratio:
            return
        yield (
            f"A {long.name} step takes {t.format_duration(long.ns)}, {ratio:.1f} times a decode "
            "step. Running requests wait for their next token.",
            [
                Evidence(f"{long.name} step", long.ns, "ns"),
                Evidence("decode step", decode.ns, "ns"),
                self.compare("the longer step over the decode step", ratio, "min_ratio", "ratio"),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        """Build decode steps with a prompt of 8,192 tokens between them."""
        return {
            "a long prompt": _build_engine(prefill=20_000),
            "a short chunk": (_build_engine(prefill=3_000), "min_ratio"),
            "decode alone": (_build_engine(), "long is None"),
        }


class SmallDecodeBatch(_Suggestion):
    """A decode step reads all weights once, whatever the number of tokens. While memory limits it,
    twice the tokens cost little more time: the same step, more tokens per second. With few
    requests, speculative decoding uses drafts in place of the missing tokens."""

    id = "small-decode-batch"
    title = "Decode is limited by memory with a small batch"
    max_batch = Threshold(16, "requests per decode step, mean", CHOSEN)
    min_share = Threshold(0.5, "of a decode step, limited by memory", CHOSEN)
    fix = "Let more requests decode together, or decode speculatively where there are none."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Raise --max-num-seqs if requests wait, or try --speculative-config where few come. "
            "Compare tokens per second and the time between tokens.",
            "vllm serve MODEL --max-num-seqs 256",
        ),
        "sglang": FrameworkAdvice(
            "Raise --max-running-requests if requests wait, or try --speculative-algorithm where "
            "few come. Compare tokens per second and the time between tokens.",
            "python -m sglang.launch_server --model-path MODEL \\\n  --max-running-requests 256",
        ),
    }
    verify = "Tokens per second rise, and a decode step takes hardly longer."
    falsified_by = "a decode step that takes twice as long with twice the batch"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        decode = phases.get(DECODE)
        if decode is None or decode.requests is None or decode.limit != "memory":
            return
        if decode.requests > self.max_batch or (decode.limit_share or 0) < self.min_share:
            return
        yield (
            f"A decode step of {t.format_duration(decode.ns)} serves {decode.requests:.1f} "
            "requests and is limited by memory.",
            [
                self.compare("requests per step", decode.requests, "max_batch", "count"),
                self.compare(
                    "part of a decode step limited by memory", decode.limit_share, "min_share"
                ),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "four requests": _build_engine(batch=4),
            "a full batch": (_build_engine(batch=128), "decode.limit != 'memory'"),
            "twenty requests": (_build_engine(batch=20), "max_batch"),
            "the host is slower": (_build_engine(batch=4, eager=True), "decode.limit != 'memory'"),
        }


class PrefixCacheUnused(_Suggestion):
    """All prompts were computed from their first token: no request began with a prefix of an
    earlier one. Where prompts share a beginning (a system prompt, a conversation), a prefix cache
    saves that part. The rule needs marks with sums (``sk``), which equal the new tokens."""

    id = "prefix-cache-unused"
    title = "No prompt reused a cached prefix"
    found_in = ("traces/serving/sglang_prefill/replay",)
    silent_in = ("traces/serving/vllm_decode_full/replay", "traces/b200_eager")
    validation_note = "15 prompts of SGLang on an MI300X, whose keys are all new"
    min_prompts = Threshold(8, "prompts in the recording", CHOSEN)
    min_share = Threshold(0.2, "of the steps' time, in steps with prompts", CHOSEN)
    fix = "If prompts share a beginning, put it first, word for word, and cache prefixes."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "If prompts share a beginning, put it first, word for word. Prefix caching is on in V1 "
            "unless --no-enable-prefix-caching is set.",
            "vllm serve MODEL --enable-prefix-caching",
        ),
        "sglang": FrameworkAdvice(
            "If prompts share a beginning, put it first, word for word. The radix cache is on "
            "unless --disable-radix-cache is set."
        ),
    }
    verify = "The engine's log shows a prefix cache hit rate above zero."
    falsified_by = "prompts that have nothing in common"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        marks = (
            []
            if a.inference_steps is None
            else [m for m in a.inference_steps.marks if m.prefill is not None]
        )
        prompts = sum(m.requests or 0 for m in marks if m.phase == PREFILL)
        if prompts < self.min_prompts:
            return
        if any(m.prefill.k != m.prefill.q for m in marks if m.prefill is not None):
            return
        total = sum(phase.ns * phase.steps for phase in inference.phases)
        prompt_ns = sum(p.ns * p.steps for n, p in phases.items() if n in (PREFILL, MIXED))
        if prompt_ns < self.min_share * total:
            return
        yield (
            f"All {prompts} prompts were computed from their first token, in "
            f"{t.format_duration(prompt_ns)} ({prompt_ns / total:.0%} of the steps' time).",
            [
                self.compare("prompts in the recording", prompts, "min_prompts", "count"),
                self.compare(
                    "steps with prompts, share of all steps' time", prompt_ns / total, "min_share"
                ),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "new prompts": _build_engine(prefill=20_000, prompts=9),
            "a cached prefix": (_build_engine(prefill=20_000, prompts=9, cached=4000), "any("),
            "one prompt": (_build_engine(prefill=20_000), "min_prompts"),
            "hardly any time": (_build_engine(prefill=300, prompts=9), "min_share"),
        }


class CollectivesOfTensorParallel(_Suggestion):
    """Tensor parallelism sums partial results over GPUs twice per layer. In a decode step these
    sums are small, so latency dominates. Fewer GPUs per copy of the model, more copies, or another
    all-reduce may be faster."""

    id = "collectives-of-tensor-parallel"
    title = "Collectives take much of a decode step"
    min_share = Threshold(0.20, "of a step's device time, in collectives", CHOSEN)
    fix = "Try fewer GPUs per copy of the model and more copies, or another all-reduce."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Try half --tensor-parallel-size with --data-parallel-size 2, and for experts "
            "--enable-expert-parallel. Check the log for 'Custom allreduce is disabled'.",
            "vllm serve MODEL --tensor-parallel-size 4 --data-parallel-size 2",
        ),
        "sglang": FrameworkAdvice(
            "Try half --tp with --dp 2, for experts --ep, and --enable-torch-symm-mem. Leave "
            "--disable-custom-all-reduce off.",
            "python -m sglang.launch_server --model-path MODEL --tp 4 --dp 2",
        ),
    }
    verify = "Tokens per second per GPU rise under the same load."
    falsified_by = "fewer tokens per second per GPU with fewer GPUs per copy"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        decode = phases.get(DECODE)
        if decode is None or not decode.roles:
            return
        share = decode.roles.get("collectives", 0.0) / sum(decode.roles.values())
        if share < self.min_share:
            return
        ns = decode.roles["collectives"]
        yield (
            f"Collectives take {t.format_duration(ns)} of device time per decode step "
            f"({share:.0%}).",
            [self.compare("collectives, share of the step's device time", share, "min_share")],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "all-reduce after each product": _build_engine(collective=15),
            "a short all-reduce": (_build_engine(collective=2), "min_share"),
            "prompts alone": (
                _build_engine(prefill=2_000, collective=15, decodes=0),
                "decode is None",
            ),
        }


class PiecewiseGraphs(_Suggestion):
    """A decode step replays several CUDA graphs, with attention launched between them (piecewise
    graphs), and the GPU waits in the step. One graph of the whole step needs an attention backend
    that can be captured."""

    id = "piecewise-graphs"
    title = "A decode step is many graphs, and the GPU waits between them"
    silent_in = ("traces/serving/vllm_decode_full/replay",)
    min_graphs = Threshold(4, "graph launches per step", CHOSEN)
    max_busy = Threshold(0.9, "of a decode step, busy share of the GPU", CHOSEN)
    fix = "Capture the whole decode step in one graph."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Try full graphs for decode: cudagraph_mode FULL_AND_PIECEWISE, the default since "
            "0.11, or FULL_DECODE_ONLY. The log names a backend that cannot be captured.",
            "vllm serve MODEL \\\n"
            '  --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
        ),
        "sglang": FrameworkAdvice(
            "Leave --disable-cuda-graph off, and raise --cuda-graph-max-bs to the batch that "
            "decodes: larger batches run without the graph.",
            "python -m sglang.launch_server --model-path MODEL --cuda-graph-max-bs 256",
        ),
    }
    verify = "Profile again: one graph launch per decode step, and shorter steps."
    falsified_by = "steps that are as long with one graph"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        decode, graphs = phases.get(DECODE), inference.graphs
        if decode is None or graphs is None or decode.busy_share is None:
            return
        if graphs.per_step < self.min_graphs or decode.busy_share > self.max_busy:
            return
        yield (
            f"A step launches {graphs.per_step:.0f} graphs, and the GPU works "
            f"{decode.busy_share:.0%} of a decode step of {t.format_duration(decode.ns)}.",
            [
                self.compare("graph launches per step", graphs.per_step, "min_graphs", "count"),
                self.compare("GPU busy in a decode step", decode.busy_share, "max_busy"),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a graph per layer": _build_engine(pieces=25),
            "two graphs": (_build_engine(pieces=2), "min_graphs"),
            "short gaps": (_build_engine(pieces=25, kernel=400), "max_busy"),
            "prompts alone": (_build_engine(prefill=2_000, decodes=0), "decode is None"),
        }


class SlowDecodeAttention(_Suggestion):
    """Attention in decode steps reads keys and values far below the memory's rate. Kernels differ
    by backend: how they split long contexts, page size, heads that share keys.

    Bytes are the engine's sums of context lengths (``sk``) times the size of a token's cache."""

    id = "slow-decode-attention"
    title = "Attention in decode reads far below the memory's rate"
    silent_in = ("traces/serving/vllm_decode_full/replay",)
    min_share = Threshold(0.25, "of a decode step's device time, in attention", CHOSEN)
    max_rate = Threshold(0.4, "of the GPU's memory bandwidth", CHOSEN)
    fix = "Try another attention backend under the same load."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Try another --attention-backend: FLASHINFER, FLASH_ATTN or TRITON_ATTN, on AMD "
            "ROCM_AITER_FA. Before 0.12 it is the variable VLLM_ATTENTION_BACKEND.",
            "vllm serve MODEL --attention-backend FLASHINFER",
        ),
        "sglang": FrameworkAdvice(
            "Try another --attention-backend: flashinfer, fa3 or triton, on AMD aiter.",
            "python -m sglang.launch_server --model-path MODEL --attention-backend flashinfer",
        ),
    }
    verify = "Compare the traces: attention per token takes less."
    falsified_by = "another backend that is as slow"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        decode = phases.get(DECODE)
        if decode is None or not decode.roles or a.inference_steps is None or a.hardware is None:
            return
        share = decode.roles.get("attention", 0.0) / sum(decode.roles.values())
        if share < self.min_share:
            return
        is_decode = np.array([*(mark.phase == DECODE for mark in a.inference_steps.marks), False])
        is_attention = (a.kernels["family"] == "attention") & a.kernels["moved"].is_not_null()
        rows = is_decode[a.inference_steps.owner] & is_attention.fill_null(False).to_numpy()
        ns = float(a.trace.gpu["dur"].to_numpy()[rows].sum())
        if not ns:
            return
        rate = float(a.kernels["moved"].to_numpy()[rows].sum()) / ns * 1e9 / a.hardware.bandwidth
        if rate > self.max_rate:
            return
        yield (
            f"Attention takes {share:.0%} of a decode step's device time, and reads at "
            f"{rate:.0%} of the memory's bandwidth.",
            [
                self.compare(
                    "attention, share of the decode step's device time", share, "min_share"
                ),
                self.compare(
                    "bandwidth of the attention, share of the memory bandwidth", rate, "max_rate"
                ),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        """Build decode steps that read 64 MB of keys and values in 400 µs."""
        return {
            "a slow backend": _build_attention(400),
            "near the rate": (_build_attention(60), "max_rate"),
            "hardly any": (_build_attention(400, product=4_000), "min_share"),
            "no shapes": (_build_attention(400, shapes=False), "not ns"),
        }


class UnevenExperts(_Suggestion):
    """Exchanges between experts on several GPUs take very different times from one layer or step to
    the next. All GPUs wait for the one whose experts got most tokens. One rank's trace shows the
    wait, but not which experts are popular."""

    id = "uneven-experts"
    title = "Exchanges between experts take uneven times"
    min_share = Threshold(0.10, "of a step's device time, in collectives", CHOSEN)
    min_ratio = Threshold(2.0, "the 90th percentile of an exchange over its median", CHOSEN)
    min_count = Threshold(20, "exchanges in the recording", CHOSEN)
    fix = "Rebalance the experts, and compare the steps of all ranks."
    engine_advice = {
        "vllm": FrameworkAdvice(
            "Copy popular experts with --enable-eplb (expert parallelism), and compare the steps "
            "of all ranks.",
            "vllm serve MODEL --enable-expert-parallel --enable-eplb",
        ),
        "sglang": FrameworkAdvice(
            "Copy popular experts with --enable-eplb, and look at the ratio that "
            "--enable-expert-distribution-metrics prints.",
            "python -m sglang.launch_server --model-path MODEL --ep 8 --enable-eplb",
        ),
    }
    verify = "The longest exchange comes close to the median one."
    falsified_by = "ranks whose experts get the same tokens"

    def find_occasion(self, a: Analysis, inference: InferenceByPhase, phases: Phases) -> Occasions:
        roles: dict[str, float] = {}
        for phase in phases.values():
            for name, ns in phase.roles.items():
                roles[name] = roles.get(name, 0.0) + ns * phase.steps
        if not roles.get("moe experts"):
            return
        share = roles.get("collectives", 0.0) / sum(roles.values())
        if share < self.min_share:
            return
        names = a.trace.gpu["name"].cast(pl.String)
        rows = names.str.contains(EXCHANGES).to_numpy() & a.in_window
        dur = a.trace.gpu["dur"].to_numpy()[rows]
        if len(dur) < self.min_count:
            return
        median, high = (float(np.percentile(dur, q)) for q in (50, 90))
        if high < self.min_ratio * max(median, 1.0):
            return
        yield (
            f"Exchanges between experts take {t.format_duration(median)} in the median and "
            f"{t.format_duration(high)} at the 90th percentile.",
            [
                self.compare("collectives, share of the step's device time", share, "min_share"),
                self.compare(
                    "90th percentile of an exchange over its median",
                    high / max(median, 1.0),
                    "min_ratio",
                    "ratio",
                ),
                self.compare("exchanges in the recording", len(dur), "min_count", "count"),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "every fifth": _build_exchange((40, 40, 40, 40, 200)),
            "even": (_build_exchange((40,) * 5), "min_ratio"),
            "short": (_build_exchange((2, 2, 2, 2, 10)), "min_share"),
            "a dense model": (_build_engine(collective=15), "roles.get"),
        }


EXCHANGES = r"(?i)deep_?ep|(?:^|[:_])(?:dispatch|combine)(?:_|<|\b)|all_?to_?all|SendRecv"
"""Pattern of kernels that send tokens to their experts and back."""


def _build_attention(us: float, *, product: float = 20, shapes: bool = True) -> TraceBuilder:
    """Build decode steps of 32 requests of 1,000 tokens each, and one attention of 8 heads of
    128."""
    b = TraceBuilder("H100")
    dims = [[32, 8, 128]] * 3 if shapes else []
    for _ in range(6):
        sums = "sq32sk32000sqsq32sqsk32000"
        with b.range(f"execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32({sums})"):
            b.run("vllm::unified_attention", "flash_fwd_splitkv_kernel", us, dims, "c10::BFloat16")
            b.launch("nvjet_hsh_64x8", product)
            b.sync("cudaStreamSynchronize")
    return b


def _build_exchange(lengths: tuple[float, ...]) -> TraceBuilder:
    """Build decode steps whose layers send tokens to experts on other GPUs."""
    b = TraceBuilder("H100")
    for _ in range(6):
        kernels = []
        for us in lengths:
            kernels += [("deep_ep::internode_ll::dispatch<true>", us), ("fused_moe_kernel", 100.0)]
        with b.range("execute_context_0(0)_generation_8(8)"):
            b.graph_launch(kernels)
            b.sync("cudaStreamSynchronize")
    return b


def _ns(phase: InferencePhase) -> float:
    return phase.ns


def _build_engine(
    *,
    batch: int = 8,
    prefill: float = 0,
    prompts: int = 1,
    cached: int = 0,
    collective: float = 0,
    decodes: int = 6,
    eager: bool = False,
    pieces: int = 1,
    kernel: float = 20,
) -> TraceBuilder:
    """Build decode steps of 2 ms and steps with prompts, as vLLM marks them."""
    b = TraceBuilder("H100")
    product = [("nvjet_hsh_64x8", kernel)] * (1 if collective else 2)
    reduced = [("void vllm::cross_device_reduce_1stage<half, 8>", collective)] * bool(collective)
    for step in range(max(decodes, prompts if prefill else 0)):
        if step < prompts and prefill:
            sums = f"sq1000sk{1000 + cached}sqsq1000000sqsk{1000 * (1000 + cached)}"
            with b.range(f"execute_1000_context_1({sums})_generation_0(sq0sk0sqsq0sqsk0)"):
                b.graph_launch([("nvjet_hsh_256x128", prefill), *reduced])
                b.sync("cudaStreamSynchronize")
        if step < decodes:
            with b.range(f"execute_context_0(0)_generation_{batch}({batch})"):
                if eager:
                    b.run("aten::mm", "nvjet_hsh_64x8", 5, times=50, host_us=40)
                else:
                    for _ in range(pieces):
                        b.graph_launch([*product, *reduced] * (50 // pieces))
                        b.host(5_000 / pieces if pieces > 1 else 0)
                b.sync("cudaStreamSynchronize")
    return b
