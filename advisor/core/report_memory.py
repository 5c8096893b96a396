"""Memory: a report's views of device memory, as plain data."""

from __future__ import annotations

from msgspec import Struct, field


class MemoryHolder(Struct, frozen=True, kw_only=True):
    """Memory of a device that one line of the program held, or leaves behind."""

    category: str
    """Category, one of ``measure.memory.memory_kinds.CATEGORIES``."""
    file: str | None
    """Source file of the user's line; ``null``: no frame of the user's is in the stack."""
    line: int | None
    """Line in ``file``."""
    function: str | None
    """Function around the line."""
    blocks: int
    """Number of blocks; of growth: of steps that left something behind."""
    bytes: int
    """Bytes that were asked for; of churn and growth: per step."""
    label: str | None = None
    """Label that the user's metadata gives the blocks; ``null``: none."""


class ModuleMemory(Struct, frozen=True, kw_only=True):
    """Memory that allocations inside one module's ``forward`` held, by their stacks. Modules that
    are called from the same line are one."""

    file: str
    """Source file of the ``forward``."""
    line: int | None
    """Line of the call, in the file of the module around it; ``null``: there is none."""
    parent: int | None
    """Index in ``MemoryView.modules`` of the module around it; ``null``: outermost."""
    blocks: int
    """Number of blocks, those of the modules inside included."""
    bytes: int
    """Bytes that were asked for, by the modules inside too."""
    own_bytes: int
    """Bytes of the module alone, without the modules inside."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Memory that a change would have freed. Savings overlap."""

    change: str
    """Name of the change, from ``measure.memory.memory_savings``."""
    bytes: int
    """Bytes by which the change lowers the peak of the history."""
    assumes: str
    """Assumption that the figure rests on."""
    cost: str = ""
    """Cost of the change in each step; ``none``: no work is added."""
    file: str | None = None
    """Source file of the line that would change; ``null``: no one line."""
    line: int | None = None
    """Line in ``file``."""


class MemoryPool(Struct, frozen=True, kw_only=True):
    """Segments of one pool, stream and kind, when the snapshot was taken. Bytes."""

    name: str
    """Name: ``large``, ``small``, with the private pool's id, ``expandable`` and the stream."""
    segments: int
    """Number of segments."""
    reserved: int
    """Bytes taken from the driver."""
    allocated: int
    """Bytes in tensors, rounded up."""
    free: int
    """Bytes free for the next request of this pool and stream."""
    largest: int
    """Size of the largest free block, bytes."""


class MemorySample(Struct, frozen=True, kw_only=True):
    """Memory of the fullest device of one snapshot, at its own moment: of a rank, or of a series
    over a run. Bytes."""

    name: str
    """Name of the file, or of the rank."""
    allocated: int
    """Bytes in tensors."""
    reserved: int
    """Bytes in segments."""
    categories: list[MemoryHolder]
    """Parts of ``allocated`` by category, without lines."""


class MemoryView(Struct, kw_only=True):
    """Memory of a device when it ran out, else at its peak, from a snapshot. Bytes are those that
    were asked for, unless stated otherwise."""

    device: int
    """Number of the GPU; -1: the host, as far as the profiler saw its allocators."""
    source: str = "allocator"
    """Origin of the figures: the ``allocator``'s snapshot, the profiler's memory ``timeline``, the
    allocator events of a ``trace``."""
    file: str = ""
    """Name of the snapshot's file; empty: it is the trace itself."""
    at: str
    """Moment shown: ``out of memory``, ``peak``, or ``snapshot`` where no history was recorded."""
    allocated: int
    """Bytes in tensors at that moment."""
    reserved: int
    """Bytes in segments at that moment; 0: not recorded."""
    trains: bool | None = None
    """Whether the program trains; ``null``: unknown."""
    end_allocated: int | None = None
    """Bytes in tensors when the snapshot was taken; ``null``: its segments are not recorded."""
    end_reserved: int | None = None
    """Bytes in segments when the snapshot was taken; ``null``: as above."""
    end_free: int | None = None
    """Free bytes in these segments; ``null``: as above."""
    end_largest: int | None = None
    """Largest free piece of them, bytes; ``null``: as above."""
    returnable: int | None = None
    """Part of ``end_free`` that ``torch.cuda.empty_cache()`` would give back to the driver:
    segments that hold no tensor and are of no CUDA graph. ``null``: unknown."""
    peak: int
    """Largest number of bytes in tensors over the history."""
    request: int | None
    """Bytes of the request that failed; ``null``: none did."""
    driver_free: int | None
    """Bytes that the driver still had free at that moment; ``null``: unknown."""
    events: int
    """Number of events in the history; 0: none was recorded."""
    from_start: bool
    """Whether the history has the allocation of every block."""
    categories: list[MemoryHolder]
    """Parts of ``allocated`` by category, without lines; their sum is ``allocated``."""
    bases: list[MemoryHolder] = field(default_factory=list)
    """Parts of ``allocated`` by the evidence for their category: ``call path``, ``lifetime``,
    ``size pattern`` or ``none``."""
    lifetimes: list[MemoryHolder] = field(default_factory=list)
    """Parts of ``allocated`` by lifetime: older than the history, kept to its end, or freed."""
    held: list[MemoryHolder]
    """Parts of ``allocated`` by line, largest first."""
    modules: list[ModuleMemory] = field(default_factory=list)
    """Parts of ``allocated`` by module, each before those inside it; at most 400. Empty: no stacks
    were recorded, or nothing was held of what modules allocated."""
    pools: list[MemoryPool]
    """Segments by pool when the snapshot was taken."""
    placement: str
    """Reason why the request could not be placed; empty: none failed, or unknown."""
    step_source: str
    """Marks of the steps; empty: there are none, and churn and growth are not measured."""
    steps: int
    """Number of whole steps in the history."""
    churn_bytes: float | None
    """Bytes allocated per step; ``null``: not measured."""
    churn: list[MemoryHolder]
    """Memory that is allocated and freed again within a step, by line, most bytes first."""
    growth: list[MemoryHolder]
    """Memory that each step leaves behind and that is held to the end, by line."""
    savings: list[MemorySaving]
    """Changes that would have freed most, largest first."""
    series: list[MemorySample] = field(default_factory=list)
    """Snapshots of the same rank over a run, in order of time. Empty: there is one."""
    grows: list[MemoryHolder] = field(default_factory=list)
    """Lines that hold more in each snapshot of the series; bytes are per ``grows_per``."""
    grows_per: str = ""
    """Unit of ``grows``: ``step`` where the names of the files number steps, else ``snapshot``."""
