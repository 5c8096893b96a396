"""FakeAllocator: a simulation of PyTorch's caching allocator that writes its snapshots.

It follows ``c10/cuda/CUDACachingAllocator.cpp``. Requests are rounded up to 512 bytes. Up to 1 MiB,
they come from segments of 2 MiB; below 10 MiB, from segments of 20 MiB; above, from their own
segments, a multiple of 2 MiB. The smallest sufficient free block of the pool and stream is used and
split, in the large pool only if more than 1 MiB remains. Free neighbours are merged. Before a
request fails, empty segments are freed. The layout is the one of ``torch/csrc/cuda/Module.cpp``,
which tests compare with the functions of ``torch/cuda/_memory_viz.py``."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROUND, SMALL, SMALL_BUFFER = 512, MIB, 2 * MIB
LARGE_BUFFER, _MIN_LARGE, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB
TORCH = "/opt/venv/lib/python3.12/site-packages/torch/"
TRAIN, MODEL = "/home/ada/project/train.py", "/home/ada/project/model.py"

Frames = tuple[tuple[str, int, str], ...]
"""Stack of (file, line, function), outermost first, as in a traceback."""

LOOP: Frames = ((TRAIN, 90, "<module>"), (TRAIN, 40, "main"))
CALLED: Frames = (
    (f"{TORCH}nn/modules/module.py", 1773, "_wrapped_call_impl"),
    (f"{TORCH}nn/modules/module.py", 1784, "_call_impl"),
)
OPTIMIZER: Frames = (
    (TRAIN, 52, "main"),
    (f"{TORCH}optim/optimizer.py", 485, "wrapper"),
    (f"{TORCH}optim/adamw.py", 220, "step"),
)
BACKWARD: Frames = (
    (TRAIN, 50, "main"),
    (f"{TORCH}_tensor.py", 626, "backward"),
    (f"{TORCH}autograd/__init__.py", 347, "backward"),
    (f"{TORCH}autograd/__init__.py", 199, "_make_grads"),
)
MOVED: Frames = (
    (TRAIN, 20, "main"),
    (f"{TORCH}nn/modules/module.py", 1370, "to"),
    (f"{TORCH}nn/modules/module.py", 930, "_apply"),
    (f"{TORCH}nn/modules/module.py", 1356, "convert"),
)


class DeviceFull(Exception):
    """Error for a request that cannot be fulfilled."""


@dataclass
class _Block:
    address: int
    size: int
    state: str = "inactive"
    requested: int = 0
    frames: list[dict[str, Any]] | None = None
    label: str = ""


@dataclass
class _Segment:
    address: int
    total: int
    stream: int
    large: bool
    pool: tuple[int, int]
    frames: list[dict[str, Any]] | None
    blocks: list[_Block] = field(default_factory=list)


class FakeAllocator:
    """Caching allocator of a device.

    >>> m = FakeAllocator(total=80 * GIB)
    >>> with m.at((TRAIN, 12, "main")):
    ...     x = m.alloc(100 * MIB)
    >>> m.free(x)
    >>> m.write(path)"""

    def __init__(
        self,
        total: int = 80 * GIB,
        *,
        device: int = 0,
        max_entries: int | None = None,
        history: bool = True,
    ) -> None:
        self.total = total
        self.device = device
        self.max_entries = max_entries
        self.history = history
        self.label = ""
        """User metadata of the next allocations."""
        self.segments: list[_Segment] = []
        self.events: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.now = 1_760_000_000_000_000
        self._next_address = 0x7F00_0000_0000 + device * (1 << 40)
        self._stack: Frames = ()
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._stacks: dict[Frames, list[dict[str, Any]]] = {}

    # -- calls of the program ---------------------------------------------------------------

    @contextmanager
    def at(self, *frames: tuple[str, int, str]) -> Iterator[None]:
        """Add frames to the stack of all calls inside."""
        outer, self._stack = self._stack, (*self._stack, *frames)
        try:
            yield
        finally:
            self._stack = outer

    @contextmanager
    def alone(self, *frames: tuple[str, int, str]) -> Iterator[None]:
        """Replace the stack of all calls inside with these frames, as in another thread, such as
        autograd's, which has no Python frames."""
        outer, self._stack = self._stack, frames
        try:
            yield
        finally:
            self._stack = outer

    def alloc(self, size: int, *, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> int:
        """Allocate a tensor's memory, and return its address. Raises DeviceFull."""
        rounded = max(ROUND, -(-size // ROUND) * ROUND)
        large = rounded > SMALL
        fit = self._find_fit(rounded, stream, large, pool)
        if fit is None and not self._add_segment(rounded, stream, large, pool):
            self._free_empty_segments()
            if not self._add_segment(rounded, stream, large, pool):
                self._add_event("oom", self._driver_free(), size, stream, pool)
                raise DeviceFull(size)
        segment, block = fit or self._find_fit(rounded, stream, large, pool) or _raise_full()
        remaining = block.size - rounded
        if remaining > SMALL if large else remaining >= ROUND:
            index = segment.blocks.index(block)
            segment.blocks.insert(index + 1, _Block(block.address + rounded, remaining))
            block.size = rounded
        block.state, block.requested = "active_allocated", size
        block.frames, block.label = self._current_frames(), self.label
        self._add_event("alloc", block.address, size, stream, pool)
        return block.address

    def free(self, address: int, *, pending: bool = False) -> None:
        """Free a block. ``pending``: another stream still uses it until ``complete``."""
        segment, block = self._find_block(address)
        self._add_event("free_requested", address, block.requested, segment.stream, segment.pool)
        block.state = "active_pending_free"
        if not pending:
            self.complete(address)

    def complete(self, address: int) -> None:
        """Complete a pending free, because the other stream has finished with the block."""
        segment, block = self._find_block(address)
        self._add_event("free_completed", address, block.requested, segment.stream, segment.pool)
        block.state, block.requested, block.frames, block.label = "inactive", 0, None, ""
        index = segment.blocks.index(block)
        for neighbor in (index + 1, index - 1):
            if 0 <= neighbor < len(segment.blocks) and segment.blocks[neighbor].state == "inactive":
                other = segment.blocks[neighbor]
                first = min(index, neighbor)
                merged = _Block(min(block.address, other.address), block.size + other.size)
                segment.blocks[first : first + 2] = [merged]
                block, index = merged, first

    def annotate(self, name: str, stage: str) -> None:
        """Add an annotation, like ``record_function`` with ``global_record_annotations``."""
        self.now += 5
        self.annotations.append(
            {"name": name, "stage": stage, "device": self.device, "time_us": self.now}
        )

    # -- allocation rules -------------------------------------------------------------------

    def _find_fit(
        self, size: int, stream: int, large: bool, pool: tuple[int, int]
    ) -> tuple[_Segment, _Block] | None:
        fitting = [
            (block.size, block.address, segment, block)
            for segment in self.segments
            if (segment.stream, segment.large, segment.pool) == (stream, large, pool)
            for block in segment.blocks
            if block.state == "inactive" and block.size >= size
        ]
        if not fitting:
            return None
        return min(fitting, key=lambda candidate: candidate[:2])[2:]

    def _add_segment(self, size: int, stream: int, large: bool, pool: tuple[int, int]) -> bool:
        segment_size = SMALL_BUFFER if not large else LARGE_BUFFER
        if size >= _MIN_LARGE:
            segment_size = -(-size // ROUND_LARGE) * ROUND_LARGE
        if segment_size > self._driver_free():
            return False
        block = _Block(self._next_address, segment_size)
        frames = self._current_frames()
        self.segments.append(
            _Segment(self._next_address, segment_size, stream, large, pool, frames, [block])
        )
        self._add_event("segment_alloc", self._next_address, segment_size, stream, pool)
        self._next_address += segment_size + LARGE_BUFFER
        return True

    def _free_empty_segments(self) -> None:
        for segment in [s for s in self.segments if len(s.blocks) == 1]:
            if segment.blocks[0].state == "inactive":
                self.segments.remove(segment)
                self._add_event(
                    "segment_free", segment.address, segment.total, segment.stream, segment.pool
                )

    def _driver_free(self) -> int:
        return self.total - sum(segment.total for segment in self.segments)

    def _find_block(self, address: int) -> tuple[_Segment, _Block]:
        for segment in self.segments:
            for block in segment.blocks:
                if block.address == address and block.state != "inactive":
                    return segment, block
        raise KeyError(address)

    # -- output -----------------------------------------------------------------------------

    def _current_frames(self) -> list[dict[str, Any]] | None:
        """Return the stack, innermost first. Equal stacks are the same list, as in PyTorch."""
        if not self.history:
            return None
        if self._stack not in self._stacks:
            self._stacks[self._stack] = [
                self._frames.setdefault(f, {"filename": f[0], "line": f[1], "name": f[2]})
                for f in reversed(self._stack)
            ]
        return self._stacks[self._stack]

    def _add_event(
        self, action: str, address: int, size: int, stream: int, pool: tuple[int, int]
    ) -> None:
        if not self.history:
            return
        self.now += 7
        self.events.append(
            {
                "action": action, "device_free" if action == "oom" else "addr": address,
                "size": size, "stream": stream, "time_us": self.now, "compile_context": "N/A",
                "user_metadata": self.label, "pool_id": tuple(pool),
                "frames": self._current_frames(),
            }
        )  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot()`` of PyTorch 2.10 returns."""
        return merged([self])

    def pickled(self) -> bytes:
        """Return the bytes that ``_dump_snapshot`` writes."""
        return pickle.dumps(self.snapshot(), 4)

    def write(self, path: Path) -> Path:
        """Write the snapshot to a file, and return its path."""
        path.write_bytes(self.pickled())
        return path

    def segment_dicts(self) -> list[dict[str, Any]]:
        """Return the segments and their blocks."""
        result = []
        for s in self.segments:
            blocks = []
            for b in s.blocks:
                entry: dict[str, Any] = {
                    "address": b.address,
                    "size": b.size,
                    "requested_size": b.requested,
                    "state": b.state,
                }
                if b.label:
                    entry["user_metadata"] = b.label
                entry["frames"] = b.frames or []
                blocks.append(entry)
            in_use = sum(b.size for b in s.blocks if b.state == "active_allocated")
            active = sum(b.size for b in s.blocks if b.state != "inactive")
            result.append(
                {
                    "device": self.device, "address": s.address, "total_size": s.total,
                    "allocated_size": in_use, "active_size": active,
                    "requested_size": sum(b.requested for b in s.blocks),
                    "stream": s.stream, "segment_type": "large" if s.large else "small",
                    "segment_pool_id": s.pool, "is_expandable": False,
                    "frames": s.frames or [], "blocks": blocks,
                }
            )  # fmt: skip
        return result

    def trace(self) -> list[dict[str, Any]]:
        """Return the history: the events that are still in the ring buffer."""
        return self.events if self.max_entries is None else self.events[-self.max_entries :]


def merged(devices: Sequence[FakeAllocator]) -> dict[str, Any]:
    """Merge the snapshots of several devices, in the order of their numbers."""
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(d.device for d in devices) + 1)]
    for item in devices:
        traces[item.device] = item.trace()
    return {
        "segments": [segment for item in devices for segment in item.segment_dicts()],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {"256": 0, "512": 0, "1024": 0},
        },
        "external_annotations": [mark for item in devices for mark in item.annotations],
    }


def _raise_full() -> tuple[_Segment, _Block]:
    raise DeviceFull(0)


LINEAR = (f"{TORCH}nn/modules/linear.py", 125, "forward")


class Training:
    """Training of a small transformer in a :class:`FakeAllocator`, with the allocations, stacks and
    lifetimes of PyTorch's eager mode.

    ``leak``: each step keeps its loss with the last ``leak`` bytes of its graph. ``kept_outputs``:
    the logits of a step are kept until the next step ends. ``late_zero``: gradients are freed
    after the next forward pass, not before."""

    def __init__(
        self,
        m: FakeAllocator,
        *,
        layers: int = 4,
        weights: int = 24 * MIB,
        activation: int = 12 * MIB,
        logits: int = 64 * MIB,
        leak: int = 0,
        kept_outputs: bool = False,
        late_zero: bool = False,
    ) -> None:
        self.m = m
        self.layers, self.weights, self.activation = layers, weights, activation
        self.logits, self.leak = logits, leak
        self.kept_outputs, self.late_zero = kept_outputs, late_zero
        with m.at(*LOOP, *MOVED):
            self.parameters = [m.alloc(weights) for _ in range(layers)]
        self.gradients: list[int] = []
        self.state: list[int] = []
        self._old_logits: int | None = None
        self._new_logits: int | None = None
        self.steps = 0

    def step(self) -> None:
        """Run one step. Raises DeviceFull if memory runs out, and keeps the allocations."""
        m = self.m
        with m.at(*LOOP, (TRAIN, 45, "main")):
            batch = m.alloc(2 * MIB)
        activations = self.forward()
        if self.late_zero:
            self.zero()
        with m.at(*LOOP[:1], *BACKWARD):
            seed = m.alloc(4)
        self.backward(activations)
        m.free(seed)
        self.update()
        if not self.late_zero:
            self.zero()
        m.free(batch)
        if self._old_logits is not None:
            m.free(self._old_logits)
        self._old_logits = self._new_logits
        self.steps += 1

    def layer(self) -> list[int]:
        """Allocate the three activations that the forward pass of a layer keeps."""
        with self.m.at((MODEL, 62, "forward"), *CALLED):
            return [self.block(line, share) for line, share in ((20, 4), (22, 4), (25, 1))]

    def block(self, line: int, quarters: int) -> int:
        """Allocate an activation of a linear layer, ``quarters`` of the largest one."""
        with self.m.at((MODEL, line, "forward"), *CALLED, LINEAR):
            return self.m.alloc(self.activation * quarters // 4)

    def forward(self) -> list[int]:
        """Allocate activations. Return them in order, with the logits and the loss last."""
        m = self.m
        with m.at(*LOOP, (TRAIN, 47, "main"), *CALLED, (MODEL, 60, "forward")):
            activations = [address for _ in range(self.layers) for address in self.layer()]
            with m.at((MODEL, 66, "forward"), *CALLED, LINEAR):
                logits = m.alloc(self.logits)
        if self.kept_outputs:
            self._new_logits = logits
        else:
            activations.append(logits)
        with m.at(*LOOP, (TRAIN, 48, "main"), (f"{TORCH}nn/functional.py", 3458, "cross_entropy")):
            activations += [m.alloc(self.logits), m.alloc(4)]
        if self.leak:
            with m.at(*LOOP, (TRAIN, 49, "main")):
                m.alloc(self.leak)
        return activations

    def backward(self, activations: list[int]) -> None:
        """Allocate gradients in autograd's thread, and free the activations meanwhile."""
        m = self.m
        with m.alone():
            upstream = None
            is_first = not self.gradients
            for number in reversed(range(self.layers)):
                gradient_flow = m.alloc(self.activation)
                if upstream is not None:
                    m.free(upstream)
                upstream = gradient_flow
                grad = m.alloc(self.weights)
                if is_first:
                    self.gradients.append(grad)
                else:
                    m.free(grad)  # it was added to the existing gradient
                layer_activations = activations[number * 3 : number * 3 + 3]
                for address in reversed(layer_activations):
                    m.free(address)
            for address in activations[3 * self.layers :]:
                m.free(address)
            if upstream is not None:
                m.free(upstream)

    def update(self) -> None:
        """Run the optimizer, which allocates its state in the first step and temporaries in
        each."""
        m = self.m
        with m.at(*LOOP[:1], *OPTIMIZER):
            if not self.state:
                with m.at((f"{TORCH}optim/adamw.py", 150, "_init_group")):
                    self.state = [m.alloc(self.weights) for _ in range(2 * self.layers)]
            with m.at((f"{TORCH}optim/adamw.py", 420, "_multi_tensor_adamw")):
                for address in [m.alloc(self.weights) for _ in range(2)]:
                    m.free(address)

    def zero(self) -> None:
        """Free the gradients, like ``zero_grad(set_to_none=True)``."""
        with self.m.at(
            *LOOP[:1], (TRAIN, 54, "main"), (f"{TORCH}optim/optimizer.py", 1009, "zero_grad")
        ):
            for address in self.gradients:
                self.m.free(address)
        self.gradients = []
