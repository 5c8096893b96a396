"""Memory: a report's views of device memory, as plain data."""

from msgspec import Struct, field


class MemoryHolder(Struct, frozen=True, kw_only=True):
    """Memory of a device that one line of the program holds or leaves behind."""

    category: str
    """Category, one of ``measure.memory.memory_kinds.CATEGORIES``."""
    file: str | None
    """Source file of the user's line, or ``null`` if the stack has no frame of the user's code."""
    line: int | None
    """Line in ``file``."""
    function: str | None
    """Function around the line."""
    blocks: int
    """Number of blocks. For growth, number of steps that left memory behind."""
    bytes: int
    """Requested bytes. For churn and growth, per step."""
    label: str | None = None
    """Label of the blocks in the user's metadata, or ``null`` if there is none."""


class ModuleMemory(Struct, frozen=True, kw_only=True):
    """Memory held by allocations inside one module's ``forward``, by their stacks. Modules called
    from the same line count as one."""

    file: str
    """Source file of the ``forward``."""
    line: int | None
    """Line of the call, in the file of the module around it, or ``null`` if there is none."""
    parent: int | None
    """Index in ``MemoryView.modules`` of the module around it, or ``null`` for the outermost."""
    blocks: int
    """Number of blocks, including blocks of the modules inside."""
    bytes: int
    """Requested bytes, including those of the modules inside."""
    own_bytes: int
    """Requested bytes without those of the modules inside."""


class MemorySaving(Struct, frozen=True, kw_only=True):
    """Memory that a change would have freed. Savings of different changes overlap."""

    change: str
    """Name of the change, from ``measure.memory.memory_savings``."""
    bytes: int
    """Bytes by which the change lowers the peak of the history."""
    assumes: str
    """Assumption behind the figure."""
    cost: str = ""
    """Cost of the change in each step, or ``none`` if it adds no work."""
    file: str | None = None
    """Source file of the line to change, or ``null`` if it is not a single line."""
    line: int | None = None
    """Line in ``file``."""


class MemoryPool(Struct, frozen=True, kw_only=True):
    """Segments of one pool, stream and kind when the snapshot was taken. Sizes are in bytes."""

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
    """Memory of the fullest device in one snapshot of a rank, or of a series over a run. Sizes are
    in bytes."""

    name: str
    """Name of the file, or of the rank."""
    allocated: int
    """Bytes in tensors."""
    reserved: int
    """Bytes in segments."""
    categories: list[MemoryHolder]
    """Parts of ``allocated`` by category, without lines."""


class MemoryView(Struct, kw_only=True):
    """Memory of a device when it ran out, or else at its peak, from a snapshot. Sizes are requested
    bytes, unless stated otherwise."""

    device: int
    """Number of the GPU, or -1 for the host, as far as the profiler saw its allocators."""
    source: str = "allocator"
    """Origin of the figures: the ``allocator``'s snapshot, the profiler's memory ``timeline``, or
    the allocator events of a ``trace``."""
    file: str = ""
    """Name of the snapshot's file. Empty for the trace itself."""
    at: str
    """Moment shown: ``out of memory``, ``peak``, or ``snapshot`` if no history was recorded."""
    allocated: int
    """Bytes in tensors at the moment shown."""
    reserved: int
    """Bytes in segments at the moment shown, or 0 if not recorded."""
    trains: bool | None = None
    """Whether the program trains, or ``null`` if unknown."""
    end_allocated: int | None = None
    """Bytes in tensors when the snapshot was taken, or ``null`` if its segments are not
    recorded."""
    end_reserved: int | None = None
    """Bytes in segments when the snapshot was taken, or ``null`` as for ``end_allocated``."""
    end_free: int | None = None
    """Free bytes in these segments, or ``null`` as for ``end_allocated``."""
    end_largest: int | None = None
    """Size of the largest free block, bytes, or ``null`` as for ``end_allocated``."""
    returnable: int | None = None
    """Part of ``end_free`` that ``torch.cuda.empty_cache()`` would return to the driver: segments
    without tensors and outside CUDA graphs. ``null`` if unknown."""
    peak: int
    """Peak of bytes in tensors over the history."""
    request: int | None
    """Bytes of the failed request, or ``null`` if none failed."""
    driver_free: int | None
    """Free bytes of the driver at the moment shown, or ``null`` if unknown."""
    events: int
    """Number of events in the history, or 0 if none was recorded."""
    from_start: bool
    """Whether the history contains the allocation of every block."""
    categories: list[MemoryHolder]
    """Parts of ``allocated`` by category, without lines. They add up to ``allocated``."""
    bases: list[MemoryHolder] = field(default_factory=list)
    """Parts of ``allocated`` by the evidence for their category: ``call path``, ``lifetime``,
    ``size pattern`` or ``none``."""
    lifetimes: list[MemoryHolder] = field(default_factory=list)
    """Parts of ``allocated`` by lifetime: older than the history, kept to its end, or freed."""
    held: list[MemoryHolder]
    """Parts of ``allocated`` by line, largest first."""
    modules: list[ModuleMemory] = field(default_factory=list)
    """Parts of ``allocated`` by module, outer modules first, at most 400. Empty if no stacks were
    recorded, or if modules held no memory."""
    pools: list[MemoryPool]
    """Segments by pool when the snapshot was taken."""
    placement: str
    """Reason why the request could not be placed. Empty if none failed or the reason is unknown."""
    step_source: str
    """Marks of the steps. Empty if there are none; churn and growth are then not measured."""
    steps: int
    """Number of whole steps in the history."""
    churn_bytes: float | None
    """Bytes allocated per step, or ``null`` if not measured."""
    churn: list[MemoryHolder]
    """Memory that is allocated and freed within a step, by line, most bytes first."""
    growth: list[MemoryHolder]
    """Memory that each step leaves behind until the end, by line."""
    savings: list[MemorySaving]
    """Changes that would have freed most, largest first."""
    series: list[MemorySample] = field(default_factory=list)
    """Snapshots of the same rank over a run, in order of time. Empty for a single snapshot."""
    grows: list[MemoryHolder] = field(default_factory=list)
    """Lines that hold more memory in each snapshot of the series. Bytes are per ``grows_per``."""
    grows_per: str = ""
    """Unit of ``grows``: ``step`` if the file names contain step numbers, else ``snapshot``."""
