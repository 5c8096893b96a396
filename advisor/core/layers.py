"""Layers: a report's time and memory by module, and communication by mesh axis, as plain data."""

from typing import Literal

from msgspec import Struct


class Layer(Struct, frozen=True, kw_only=True):
    """Equal modules within equal modules: the same class, with the same classes inside."""

    name: str
    """Name as recorded, such as ``layers.0–23``, or the kind if the numbers are not a range."""
    kind: str
    """Name without its number. For PyTorch's module events, the class."""
    parent: int | None
    """Index in ``Layers.layers`` of the modules around it, or ``null`` for the outermost."""
    modules: int
    """Number of modules."""
    calls: float | None
    """Calls of all modules per step, or ``null`` if not recorded."""
    ns: float
    """Inclusive time of all modules per step, ns."""
    self_ns: float
    """Self time per step, ns, outside the modules inside."""
    share: float
    """Share of ``ns`` in all work."""
    backward_ns: float | None
    """Part of ``ns`` in the backward pass, or ``null`` if none was recorded."""
    kernels: float
    """Number of kernels, copies and memsets per step, or of operators on the host."""
    flops: float | None
    """FLOPs per step. ``null`` if known for less than 80% of its matrix work's time, or without
    matrix work."""
    bytes: float | None
    """Minimum bytes read and written per step, or ``null`` if known for less than 80% of the
    time."""
    flops_per_s: float | None
    """FLOP/s: ``flops`` over ``ns``, or ``null`` if ``flops`` is."""
    bytes_per_s: float | None
    """Bytes/s: ``bytes`` over ``ns``, or ``null`` if ``bytes`` is."""
    allocated_bytes: float | None = None
    """Bytes that its calls allocate per step, including modules inside, on the device, or on the
    host without a device. Calls do not include the backward pass. ``null`` if not recorded."""
    kept_bytes: float | None = None
    """Bytes allocated minus bytes released by its calls, per step: outputs, and activations for the
    backward pass. Negative if the calls release other memory."""
    peak_bytes: int | None = None
    """Peak of one call above the memory at its start, bytes, or ``null`` if not recorded."""


class LayerKind(Struct, frozen=True, kw_only=True):
    """All modules of one kind, anywhere in the model."""

    kind: str
    """Kind, as in ``Layer``."""
    modules: int
    """Number of modules."""
    calls: float | None
    """Calls per step, or ``null`` if not recorded."""
    ns: float
    """Inclusive time per step, ns. A module inside another of its kind counts once."""
    self_ns: float
    """Self time per step, ns, outside the modules inside. It adds up over kinds."""
    share: float
    """Share of ``self_ns`` in all work."""
    kept_bytes: float | None = None
    """Bytes kept, as in ``Layer``. A module inside another of its kind counts once."""
    peak_bytes: int | None = None
    """Peak of one call, as in ``Layer``."""


class LayerOutlier(Struct, frozen=True, kw_only=True):
    """A module that takes longer than equal modules: its distance to the longest of them is larger
    than their range."""

    name: str
    """Name as recorded."""
    path: list[str]
    """Names of the modules around it, outermost first."""
    equals: str
    """Group of equal modules that it belongs to, as in ``Layer.name``."""
    ns: float
    """Median over the steps, ns."""
    usual_ns: float
    """Median of the others, ns."""
    part: str | None
    """Kind of the inner module with most of the difference, or ``null`` if none has half of it."""


class Layers(Struct, kw_only=True):
    """Time and memory by module."""

    source: Literal[
        "module events", "logged calls", "ranges", "operator names", "FSDP", "Python frames"
    ]
    """Source of the module names."""
    on_device: bool
    """Whether times are total device work. Otherwise, they are operators' self time on the host."""
    total_ns: float
    """All work per step, ns."""
    outside_ns: float
    """Work outside modules per step, ns. Together with the outermost layers, it adds up to all
    work."""
    outside_kernels: float
    """Number of kernels, copies and memsets outside modules, per step."""
    layers: list[Layer]
    """Groups of equal modules, outer groups first, then longest first, at most 400."""
    more: int
    """Number of smallest groups left out. The groups around them contain their time."""
    kinds: list[LayerKind]
    """Kinds by self time, the longest first, at most 100."""
    outliers: list[LayerOutlier]
    """Outliers, the longest first, at most 20."""

    def __post_init__(self) -> None:
        indexed = enumerate(self.layers)
        if any(layer.parent is not None and not 0 <= layer.parent < i for i, layer in indexed):
            raise ValueError("a layer comes before the layer around it")


class MeshAxis(Struct, frozen=True, kw_only=True):
    """Communication of one process group along an axis of the device mesh."""

    axis: Literal[
        "data", "sharded data", "tensor", "pipeline", "context", "expert", "all-to-all", "unknown"
    ]
    """Axis of the mesh. ``all-to-all`` is between experts or embeddings."""
    named: bool
    """Whether the process group's description names the axis. Otherwise, its traffic shows it."""
    size: int | None
    """Number of ranks in the group, or ``null`` if not recorded."""
    ranks: list[int]
    """Ranks in the group. Empty if not recorded or if the profiler cut the list short."""
    collectives: dict[str, int]
    """Number of collectives of each kind, the most frequent first."""
    calls: float
    """Collectives per step."""
    bytes: float | None
    """Bytes of the messages per step; ``null``: some were not recorded."""
    ns: float
    """Time of the kernels per step, ns, including waits for other ranks."""
    exposed_ns: float
    """Exposed time per step, ns: the part of ``ns`` without compute."""
    waiting_ns: float | None = None
    """Part of ``ns`` before the last rank of the group arrives, ns. ``null`` without the traces of
    all its ranks."""
    waited_here_ns: float | None = None
    """Part of ``ns`` before the last rank with a trace arrives, ns. A rank without one may come
    later. ``null`` if not measured, or if ``waiting_ns`` is known."""
    bus_gb_per_s: float | None
    """Bus bandwidth of messages of at least 1 MiB, as nccl-tests define it. If waits are known, it
    is the median without them, else the 90th percentile, as waits lower it. ``null`` without such
    messages or their sizes."""
    link: Literal["node", "network"] | None = None
    """Whether the group's ranks share a ``node`` or span the ``network``, or ``null`` if
    unknown."""
    link_name: str | None = None
    """Name of the link, such as ``NVLink 4``, or ``null`` if unknown."""
    link_gb_per_s: float | None = None
    """Bandwidth of one GPU in one direction, GB/s, from its datasheet or ``--node-bandwidth``."""
    micro_batches: int | None = None
    """Passes through this rank's pipeline stage per step, times the stages of the rank. ``null`` if
    it is not a pipeline, or if sends do not name their ranks."""
    bubble: float | None = None
    """Bubble of a pipeline by formula, as a share of its time: (p - 1) / (micro_batches + p - 1);
    arXiv 2104.04473. ``null`` as for ``micro_batches``."""
    idle_ns: float | None = None
    """Idle time of a pipeline, ns: exposed time of sends and receives beyond the shortest of each
    size. This rank sees the bubble and slower stages in it."""
