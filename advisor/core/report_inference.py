"""Inference: a report's steps by phase of a served model, as plain data."""

from msgspec import Struct, field


class Quantiles(Struct, frozen=True):
    """Quantiles of durations, ns. ``null`` for the 90th below 10 durations, for the 99th below
    100."""

    median_ns: float
    """50th percentile, ns."""
    p90_ns: float | None
    """90th percentile, ns."""
    p99_ns: float | None
    """99th percentile, ns."""
    max_ns: float
    """Longest duration, ns."""


class InferencePhase(Struct, frozen=True, kw_only=True):
    """Steps of one kind (prefill, decode …) of a served model."""

    name: str
    """Kind: ``prefill``, ``decode``, ``mixed`` (prompts and decoding together), ``draft``, or the
    class of the called model."""
    steps: int
    """Number of steps."""
    requests: float | None
    """Mean number of requests per step, or ``null`` if not recorded."""
    tokens: float | None
    """Mean number of new tokens per step, or ``null`` if not recorded."""
    ns: float
    """Mean duration of a step, ns, from its first device work to its last. It begins with the host
    if the device waited for it. Without device work, the host's time."""
    quantiles: Quantiles
    """Quantiles of the steps' durations."""
    ns_per_token: float | None
    """Time of the steps over their new tokens, ns, or ``null`` if not recorded."""
    tokens_per_s: float | None
    """Tokens per second while these steps run, or ``null`` if not recorded."""
    busy_share: float | None
    """Share of the steps' time in which the device works, or ``null`` without device work or if its
    records are incomplete."""
    limit: str | None
    """Limit that takes most of the steps' time, without the profiler's host time if that is known:
    ``host`` (the device waits), ``memory``, ``compute`` or ``communication``. ``null`` if
    unknown."""
    limit_share: float | None
    """Share of the steps' time that the limit takes, or ``null`` if unknown."""
    limit_inferred: bool = False
    """Whether the limit is inferred from the number of tokens and the kinds of kernels. FLOPs and
    bytes of most of the kernel time are then unknown."""
    attainable_ns: float | None
    """Duration of a step if each kernel ran at the rates measured on this GPU model, ns. Kernels of
    unknown work keep their time. ``null`` if less than half of the kernel time is known."""
    known_share: float | None
    """Share of kernel time whose FLOPs or bytes are known, or ``null`` if there is no device
    work."""
    jitter: str = ""
    """Main difference of the longest steps from the others. Empty if they are similar or too
    few."""
    roles: dict[str, float] = field(default_factory=dict)
    """Device time by part of a layer (``attention``, ``dense gemm``, ``moe experts`` …), mean per
    step, ns, the longest first."""


class GraphReplays(Struct, frozen=True, kw_only=True):
    """CUDA or HIP graphs that were replayed."""

    launches: int
    """Number of calls that launch a graph."""
    kernels: int
    """Number of recorded kernels, copies and memsets of all graphs."""
    per_step: float
    """Launches per step: 1 for a full graph, more for partial graphs."""
    matched: float | None = None
    """Share of the work that a capture trace names, or ``null`` without one."""
    missing: int = 0
    """Number of kernels, copies and memsets that must have run but are not in the recording."""


class InferenceByPhase(Struct, kw_only=True):
    """Steps by phase of a model that runs inference."""

    engine: str | None
    """Inference engine: ``vllm``, ``sglang`` …, or ``null`` if there is none or if it is
    unknown."""
    source: str
    """Marks of the steps: ``engine``, ``module calls``, ``ProfilerStep`` or ``vocabulary
    look-ups``."""
    phases: list[InferencePhase]
    """Phases by total time, the longest first."""
    between: Quantiles | None
    """Quantiles of the gaps between steps, or ``null`` for a single step or without gaps."""
    between_share: float | None
    """Share of the time between steps, from the first step to the end of the last, or ``null`` for
    a single step."""
    output_tokens_per_s: float | None
    """Output tokens over the time from the first step to the end of the last. ``null`` if not
    recorded or if drafts are verified."""
    graphs: GraphReplays | None = None
    """Replays of CUDA or HIP graphs, or ``null`` if there were none."""
