"""Time and memory by module, and communication by axis of the device mesh, as data of a report."""

from typing import Literal

from msgspec import Struct


class Layer(Struct, frozen=True, kw_only=True):
    """Equal modules inside the same ones: of one class, and with the same classes inside."""

    name: str
    """Name as recorded: ``layers.0–23``; of several whose numbers are no range, their kind."""
    kind: str
    """Name without its number: of PyTorch's module events, the class."""
    parent: int | None
    """Index in ``Layers.layers`` of the modules around it; ``null``: outermost."""
    modules: int
    """Number of modules."""
    calls: float | None
    """Calls per step, of all of them; ``null``: not recorded."""
    ns: float
    """Inclusive time of all of them per step, ns."""
    own_ns: float
    """Self time per step, ns: in none of the modules inside."""
    share: float
    """Share of ``ns`` in all work."""
    backward_ns: float | None
    """Part of ``ns`` in the backward pass; ``null``: none was recorded."""
    kernels: float
    """Number of pieces of work per step: kernels, copies and memsets; on the host operators."""
    flops: float | None
    """FLOPs per step; ``null``: known for less than 80% of the time of its matrix work, or it has
    none."""
    bytes: float | None
    """Bytes read and written at least, per step; ``null``: known for less than 80% of the time."""
    flops_per_s: float | None
    """FLOP/s: ``flops`` over ``ns``; ``null``: ``flops`` is."""
    bytes_per_s: float | None
    """Bytes/s: ``bytes`` over ``ns``; ``null``: ``bytes`` is."""
    allocated_bytes: float | None = None
    """Bytes that its calls allocate per step, with the modules inside: the device's memory, without
    a device the host's. The backward pass is in no call. ``null``: not recorded."""
    kept_bytes: float | None = None
    """Bytes allocated less those that its calls release, per step: outputs, and activations for the
    backward pass. Negative: they release what others allocated."""
    peak_bytes: int | None = None
    """Peak of one call, bytes above what was allocated when it began; ``null``: not recorded."""


class LayerKind(Struct, frozen=True, kw_only=True):
    """All modules of one kind, wherever they are."""

    kind: str
    """Kind, as in ``Layer``."""
    modules: int
    """Number of modules."""
    calls: float | None
    """Calls per step; ``null``: not recorded."""
    ns: float
    """Inclusive time per step, ns; a module inside another of its kind counts once."""
    own_ns: float
    """Self time per step, ns: in none of the modules inside. Adds up over kinds."""
    share: float
    """Share of ``own_ns`` in all work."""
    kept_bytes: float | None = None
    """Bytes kept, as in ``Layer``; a module inside another of its kind counts once."""
    peak_bytes: int | None = None
    """Peak of one call, as in ``Layer``."""


class LayerOutlier(Struct, frozen=True, kw_only=True):
    """A module that takes longer than its equals: its distance to the longest of the others is
    larger than the range of those."""

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
    """Kind of the module inside it that has most of the difference; ``null``: none has half."""


class Layers(Struct, kw_only=True):
    """Time and memory by module."""

    source: Literal["module events", "ranges", "operator names", "FSDP", "Python frames"]
    """Source of the module names."""
    on_device: bool
    """Whether times are of device work, summed; else they are operators' self time on the host."""
    total_ns: float
    """All work per step, ns."""
    outside_ns: float
    """Work in no module per step, ns: with it the outermost layers add up to all work."""
    outside_kernels: float
    """Number of pieces of work in no module, per step."""
    layers: list[Layer]
    """Groups of equal modules, each before those inside it, the longest first; at most 400."""
    more: int
    """Number of groups left out, the smallest; those around them contain their time."""
    kinds: list[LayerKind]
    """Kinds by self time, the longest first, at most 100."""
    outliers: list[LayerOutlier]
    """Outliers, the longest first, at most 20."""

    def __post_init__(self) -> None:
        places = enumerate(self.layers)
        if any(layer.parent is not None and not 0 <= layer.parent < i for i, layer in places):
            raise ValueError("a layer comes before the one around it")


class MeshAxis(Struct, frozen=True, kw_only=True):
    """Communication of one process group along an axis of the device mesh."""

    axis: Literal[
        "data", "sharded data", "tensor", "pipeline", "context", "expert", "all-to-all", "unknown"
    ]
    """Axis of the mesh; ``all-to-all``: of experts or of embeddings."""
    named: bool
    """Whether the process group's description names the axis; otherwise its traffic does."""
    size: int | None
    """Number of ranks in the group; ``null``: not recorded."""
    ranks: list[int]
    """Ranks in the group; empty: not recorded, or cut short by the profiler."""
    collectives: dict[str, int]
    """Number of collectives of each kind, the most frequent first."""
    calls: float
    """Collectives per step."""
    bytes: float | None
    """Bytes of the messages per step; ``null``: some were not recorded."""
    ns: float
    """Time of the kernels per step, ns, waits for other ranks included."""
    exposed_ns: float
    """Exposed time per step, ns: the part of ``ns`` during which nothing computes."""
    waiting_ns: float | None = None
    """Part of ``ns`` before the last rank of the group arrives, ns; ``null``: needs the traces of
    all its ranks."""
    waited_here_ns: float | None = None
    """Part of ``ns`` before the last of the ranks here arrives, ns, where a rank that is not
    here may come later; ``null``: not measured, or ``waiting_ns`` is known."""
    bus_gb_per_s: float | None
    """Bus bandwidth of the messages of 1 MiB and more, as nccl-tests define it. Where waiting is
    known it is the median without it, else what a tenth of them exceed (waits lower it).
    ``null``: there are none, or their sizes were not recorded."""
    link: Literal["node", "network"] | None = None
    """Whether the group's ranks share a ``node`` or span the ``network``; ``null``: unknown."""
    link_name: str | None = None
    """Name of the link, ``NVLink 4``; ``null``: unknown."""
    link_gb_per_s: float | None = None
    """Bandwidth of one GPU in one direction, GB/s, by its datasheet or as given
    (``--node-bandwidth``)."""
    micro_batches: int | None = None
    """Passes through this rank's pipeline stage per step (times the stages of the rank); ``null``:
    not a pipeline, or sends do not say between which ranks."""
    bubble: float | None = None
    """Bubble of a pipeline by formula, as a share of its time: (p - 1) / (micro_batches + p - 1);
    arXiv 2104.04473. ``null``: as above."""
    idle_ns: float | None = None
    """Idle time of a pipeline, ns: exposed time of sends and receives beyond the shortest of each
    size. That is the bubble, with stages that take longer, as this rank sees it."""
