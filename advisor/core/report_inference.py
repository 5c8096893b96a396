"""Inference: a report's steps by phase of a model that is served, as plain data."""

from __future__ import annotations

from msgspec import Struct, field


class Quantiles(Struct, frozen=True):
    """Quantiles of durations, ns. ``null``: too few, below 10 for the 90th and 100 for the 99th."""

    median_ns: float
    """50th percentile, ns."""
    p90_ns: float | None
    """90th percentile, ns."""
    p99_ns: float | None
    """99th percentile, ns."""
    max_ns: float
    """Longest duration, ns."""


class InferencePhase(Struct, frozen=True, kw_only=True):
    """Steps of one kind (prefill, decode …) of a model that is served."""

    name: str
    """Kind: ``prefill``, ``decode``, ``mixed`` (prompts and decoding together), ``draft``, or the
    class of the model that is called."""
    steps: int
    """Number of steps."""
    requests: float | None
    """Mean number of requests per step; ``null``: not recorded."""
    tokens: float | None
    """Mean number of new tokens that a step computes; ``null``: not recorded."""
    ns: float
    """Mean duration of a step, ns: from its first device work to its last, and from the host's
    start where the device waited for it. Without device work it is the host's time."""
    quantiles: Quantiles
    """Quantiles of the steps' durations."""
    ns_per_token: float | None
    """Time of the steps over the tokens that they compute, ns; ``null``: not recorded."""
    tokens_per_s: float | None
    """Tokens per second while such steps run; ``null``: not recorded."""
    busy_share: float | None
    """Share of the steps' time in which the device works; ``null``: no device work, or its records
    are incomplete."""
    limit: str | None
    """Limit that takes most of the steps' time, without the host time that the profiler adds where
    that is known: ``host`` (the device waits), ``memory``, ``compute``, ``communication``;
    ``null``: unknown."""
    limit_share: float | None
    """Share of this time that the limit takes; ``null``: unknown."""
    limit_inferred: bool = False
    """Whether the limit is inferred from the number of tokens and the kinds of kernels. Then FLOPs
    and bytes of most of the kernel time are unknown."""
    attainable_ns: float | None
    """Duration of a step if each kernel ran at the rates measured on such a device, ns. Kernels
    whose work is unknown keep their time. ``null``: less than half of the kernel time is known."""
    known_share: float | None
    """Share of kernel time whose FLOPs or bytes are known; ``null``: no device work."""
    jitter: str = ""
    """Main difference of the longest steps from the rest; empty: they are similar, or too few."""
    roles: dict[str, float] = field(default_factory=dict)
    """Device time by part of a layer (``attention``, ``dense gemm``, ``moe experts`` …), mean per
    step, ns, the longest first."""


class GraphReplays(Struct, frozen=True, kw_only=True):
    """CUDA or HIP graphs that were replayed."""

    launches: int
    """Number of calls that launch a graph."""
    kernels: int
    """Number of recorded pieces of device work of all graphs."""
    per_step: float
    """Launches per step: 1 is a full graph, more are pieces."""
    matched: float | None = None
    """Share of the work that a capture trace names; ``null``: none was given."""
    missing: int = 0
    """Number of pieces of device work that must have run and are not in the recording."""


class InferenceByPhase(Struct, kw_only=True):
    """Steps by phase of a model that is used and not trained."""

    engine: str | None
    """Inference engine: ``vllm``, ``sglang`` …; ``null``: none, or unknown."""
    source: str
    """Marks of the steps: ``engine``, ``module calls``, ``ProfilerStep`` or ``vocabulary
    look-ups``."""
    phases: list[InferencePhase]
    """Phases by total time, the longest first."""
    between: Quantiles | None
    """Quantiles of the gaps between two steps; ``null``: there is one step, or none has a gap."""
    between_share: float | None
    """Share of the time from the first step to the end of the last that lies between steps;
    ``null``: one step."""
    output_tokens_per_s: float | None
    """Tokens that are put out, over the time from the first step to the end of the last; ``null``:
    not recorded, or drafts are verified."""
    graphs: GraphReplays | None = None
    """Replays of CUDA or HIP graphs; ``null``: none was replayed."""
