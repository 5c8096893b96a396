"""Time and memory by module, and communication by axis of the device mesh, as data of a report."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Layer(Struct, frozen=True, kw_only=True):
    """Equal modules below the same ones: of one class, and with the same classes inside."""

    name: str
    """``layers.0–23``: as recorded; of several whose numbers are no range, their kind."""
    kind: str
    """The name without its number: of PyTorch's module events, the class."""
    parent: int | None
    """Place in ``Layers.layers`` of the modules around it; ``null``: outermost."""
    modules: int
    """How many modules these are."""
    calls: float | None
    """Per step, of all of them; ``null``: not recorded."""
    ns: float
    """Time of all of them with the modules inside, per step, ns."""
    own_ns: float
    """The part that is in none of the modules inside."""
    share: float
    """``ns`` of all work."""
    backward_ns: float | None
    """The part of ``ns`` in the backward pass; ``null``: none was recorded."""
    kernels: float
    """Pieces of work per step: kernels, copies and memsets; on the host operators."""
    flops: float | None
    """Per step; ``null``: known for less than 80% of the time of its matrix work, or it has
    none."""
    bytes: float | None
    """Read and written at least, per step; ``null``: known for less than 80% of the time."""
    flops_per_s: float | None
    """``flops`` over ``ns``."""
    bytes_per_s: float | None
    """``bytes`` over ``ns``."""
    allocated_bytes: float | None = None
    """What its calls allocate, per step, with the modules inside: the device's memory, without a
    device the host's. The backward pass is in no call. ``null``: not recorded."""
    kept_bytes: float | None = None
    """The same less what its calls release, per step: outputs, and activations for the backward
    pass. Negative: they release what others allocated."""
    peak_bytes: int | None = None
    """The most that one call adds to what was allocated when it began."""


class LayerKind(Struct, frozen=True, kw_only=True):
    """All modules of one kind, wherever they are."""

    kind: str
    """As in ``Layer``."""
    modules: int
    """How many."""
    calls: float | None
    """Per step; ``null``: not recorded."""
    ns: float
    """Time per step with the modules inside, ns; of one inside another of its kind, once."""
    own_ns: float
    """The part that is in none of the modules inside. Adds up over kinds."""
    share: float
    """``own_ns`` of all work."""
    kept_bytes: float | None = None
    """As in ``Layer``; of one inside another of its kind, once."""
    peak_bytes: int | None = None
    """As in ``Layer``."""


class LayerOutlier(Struct, frozen=True, kw_only=True):
    """A module that takes longer than its equals: it is further from the longest of the others
    than these are apart."""

    name: str
    """As recorded."""
    path: list[str]
    """The modules around it, outermost first."""
    equals: str
    """The group that it belongs to, as in ``Layer.name``."""
    ns: float
    """Median over the steps, ns."""
    usual_ns: float
    """Median of the others, ns."""
    part: str | None
    """Kind of the module inside it that has most of the difference; ``null``: none has half."""


class Layers(Struct, kw_only=True):
    """Whose time it is, by module."""

    source: Literal["module events", "ranges", "operator names", "FSDP", "Python frames"]
    """What recorded the modules."""
    on_device: bool
    """Times are of device work, summed; otherwise own host time of operators."""
    total_ns: float
    """All work per step, ns."""
    outside_ns: float
    """The part in no module, per step, ns: with it the outermost layers add up to all work."""
    outside_kernels: float
    """Pieces of work in no module, per step."""
    layers: list[Layer]
    """Equal modules as one, a module before those inside it, the longest first; at most 400."""
    more: int
    """Groups that are left out, the smallest; those around them contain their time."""
    kinds: list[LayerKind]
    """By own time, the longest first, at most 100."""
    outliers: list[LayerOutlier]
    """The longest first, at most 20."""

    def __post_init__(self) -> None:
        places = enumerate(self.layers)
        if any(layer.parent is not None and not 0 <= layer.parent < i for i, layer in places):
            raise ValueError("a layer comes before the one around it")


class MeshAxis(Struct, frozen=True, kw_only=True):
    """What the ranks of one process group send one another along an axis of the device mesh."""

    axis: Literal[
        "data", "sharded data", "tensor", "pipeline", "context", "expert", "all-to-all", "unknown"
    ]
    """``all-to-all``: of experts or of embeddings."""
    named: bool
    """The process group's description names the axis; otherwise its traffic does."""
    size: int | None
    """Ranks in the group; ``null``: not recorded."""
    ranks: list[int]
    """They; empty: not recorded, or cut short by the profiler."""
    collectives: dict[str, int]
    """How many of each kind, the most frequent first."""
    calls: float
    """Collectives per step."""
    bytes: float | None
    """Sum of the messages per step; ``null``: some were not recorded."""
    ns: float
    """Time of the kernels per step, waits for other ranks included."""
    exposed_ns: float
    """The part during which nothing computes."""
    waiting_ns: float | None = None
    """The part of ``ns`` before the last rank of the group arrives; ``null``: needs the traces of
    all its ranks."""
    bus_gb_per_s: float | None
    """Bus bandwidth of the messages of 1 MiB and more, as nccl-tests define it. Where waiting is
    known it is the median without it, else what a tenth of them exceed (waits lower it).
    ``null``: there are none, or their sizes were not recorded."""
    link: Literal["node", "network"] | None = None
    """All ranks of the group share a node, or it spans several; ``null``: unknown."""
    link_name: str | None = None
    """``NVLink 4``; ``null``: unknown."""
    link_gb_per_s: float | None = None
    """Of one GPU in one direction, by its datasheet or as given (``--network``)."""
    micro_batches: int | None = None
    """Of a pipeline: passes through this rank's stage per step (times the stages of the rank);
    ``null``: not a pipeline, or sends do not say between which ranks."""
    bubble: float | None = None
    """Of a pipeline by formula: (p - 1) / (micro_batches + p - 1), share of its time; arXiv
    2104.04473."""
    idle_ns: float | None = None
    """Of a pipeline: exposed time of sends and receives beyond the shortest of each size. That is
    the bubble, with stages that take longer, as this rank sees it."""
