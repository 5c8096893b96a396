"""Detector of forwards that a module repeats with the same weights and the same input tensors.

Layers of equal shapes may run twice in a step for several reasons: a forward for metrics repeats a
computation, while a teacher or a target network is another module. A trace cannot distinguish them,
but the module and the tensors can. Tensors are the same if their memory and its version are the
same. Tensors of ``torch.inference_mode`` have no version, and a program may recreate equal ones. So
if nothing is trained, partial checksums of the values of a module's inputs and outputs on the CPU
are compared instead. No values are read from a device."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from itertools import chain
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from advisor.recorder.loaders import MAX_TENSORS
from advisor.recorder.padding import collect_tensors
from advisor.recorder.stack_samples import frame_text, is_own
from advisor.recorder.watchers import is_intercepted

_T = TypeVar("_T")
SAMPLE_FORWARDS = 12
"""Number of consecutive outermost forwards in a sample."""
SAMPLE_INTERVAL = 60
"""Number of forwards from the begin of a sample to the begin of the next."""
_MAX_SAMPLES = 64
"""Maximum number of samples per run."""
BLOCK_BYTES, MAX_BLOCKS = 4_096, 16
"""Size of a block of values to compare, bytes, and maximum number of blocks per tensor."""
PLAIN_TYPES = (bool, int, float, str)
MAX_CALLERS = 6
"""Maximum number of frames of a module's callers."""


class _Forward(NamedTuple):
    """Forward to compare with others."""

    key: Hashable
    """Module, its weights' versions and the inputs."""
    memory: list[Any] | None
    """Weak references to the inputs' memory, which another tensor may reuse, or ``None`` if values
    of inputs are compared; then the values of outputs must be equal too."""
    again: bool
    """Whether an earlier forward had the same inputs."""


class RepeatedInputs:
    """Sampler of forwards. ``write_event("repeated_inputs", data)`` gets the number of ``forwards``
    in a sample, and the number that repeat an earlier one (``again``). For each repeating module it
    gets its class (``name``), the callers' ``frames``, both numbers, and the number of forwards
    with the inputs of an earlier one, whatever their outputs (``same_input``). If nothing is
    trained, it also gets their host times, ns (``ns``, and ``again_ns`` of repeated forwards)."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._forwards = 0
        self._earlier: dict[Hashable, Any] = {}
        """Memory of each forward's inputs, or the checksum of its outputs."""
        self._sampled = self._again = self._ns = 0
        self._modules: dict[int, dict[str, Any]] = {}
        self._timed_forward: tuple[int, _Forward | None, int] | None = None
        """Forward being timed: id of its module, which is not kept alive, the ``_Forward`` to
        compare, and its begin, ns."""
        self._trained = False

    def on_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, trained: bool
    ) -> None:
        """Examine an outermost forward that begins, if it is part of a sample."""
        if trained != self._trained:
            self._clear()
            self._trained, self._forwards = trained, 0
        self._timed_forward = None
        number, at = divmod(self._forwards, SAMPLE_INTERVAL)
        self._forwards += 1
        if at == SAMPLE_FORWARDS:
            self._write_sample()
        if at >= SAMPLE_FORWARDS or number >= _MAX_SAMPLES:
            return
        forward = _unless_intercepted(lambda: self._describe_forward(module, args, kwargs))
        if forward is not None:
            self._sampled += 1
            if trained:
                self._again += forward.again
                self._count(module, forward, again=forward.again)
        if not trained:
            self._timed_forward = id(module), forward, perf_counter_ns()

    def on_end(self, module: Any, result: Any) -> None:
        """Time an outermost forward that ended, if nothing is trained."""
        begun, self._timed_forward = self._timed_forward, None
        if begun is None or begun[0] != id(module):
            return
        forward, ns = begun[1], perf_counter_ns() - begun[2]
        again = False
        if forward is not None and forward.memory is None:
            outputs = _unless_intercepted(lambda: _checksums(_list_tensors(result)))
            again = outputs is not None and self._earlier.get(forward.key) == outputs
            forward = forward._replace(again=forward.key in self._earlier)
            self._earlier[forward.key] = outputs
        elif forward is not None:
            again = forward.again
        self._ns += ns
        self._again += again
        entry = self._count(module, forward, again=again)
        entry["ns"] = entry.get("ns", 0) + ns
        entry["again_ns"] = entry.get("again_ns", 0) + again * ns

    def _count(self, module: Any, forward: _Forward | None, *, again: bool) -> dict[str, Any]:
        """Count a module's forward, and return the module's numbers."""
        entry = self._modules.get(id(module))
        if entry is None:
            entry = {"name": type(module).__name__, "frames": _caller_frames()}
            entry |= {"forwards": 0, "again": 0, "same_input": 0}
            self._modules[id(module)] = entry
        entry["forwards"] += 1
        entry["again"] += again
        entry["same_input"] += forward is not None and forward.again
        return entry

    def _write_sample(self) -> None:
        if self._sampled:
            modules = [entry for entry in self._modules.values() if entry["same_input"]]
            data = {"forwards": self._sampled, "again": self._again, "modules": modules}
            if not self._trained:
                data["ns"] = self._ns
            self._write_event("repeated_inputs", data)
        self._clear()

    def _clear(self) -> None:
        self._earlier.clear()
        self._modules.clear()
        self._sampled = self._again = self._ns = 0

    def _describe_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Forward | None:
        """Describe a forward by its inputs' memory or, if nothing is trained and they are on the
        CPU, by their values. Return ``None`` if it cannot be compared."""
        from torch import Tensor
        from torch.multiprocessing.reductions import StorageWeakRef

        tensors = _list_tensors((args, kwargs))
        weight = next(iter(module.parameters()), None)
        if not tensors or len(tensors) >= MAX_TENSORS or not isinstance(weight, Tensor):
            return None
        if weight.is_inference():
            return None  # it has no versions
        if not self._trained:
            if not all(map(_is_plain, (*args, *kwargs.values()))):
                return None  # a cache of keys and values, say
            if values := _checksums(tensors):
                settings = _plain_arguments(args, kwargs)
                return _Forward((id(module), weight._version, settings, values), None, False)
        if any(tensor.is_inference() for tensor in tensors):
            return None
        inputs = tuple((t.data_ptr(), t._version, t.shape, t.dtype) for t in tensors)
        if not all(pointer for pointer, *_ in inputs):
            return None  # empty, or on the meta device
        # functional_call gives a module other weights
        weights = weight.data_ptr(), weight._version
        key = id(module), weights, _plain_arguments(args, kwargs), inputs
        earlier = self._earlier.get(key)
        again = earlier is not None and not any(memory.expired() for memory in earlier)
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._earlier[key] = memory
        return _Forward(key, memory, again)


def _unless_intercepted(look: Callable[[], _T]) -> _T | None:
    """Return the result of ``look``, or ``None`` if others would see its tensor operators."""
    import torch

    if is_intercepted(torch):
        return None
    # a tensor may have no memory of its own (sparse, or of functorch), and examining a class of the
    # program may do anything
    with suppress(Exception), torch._C.DisableTorchFunction():
        return look()
    return None


def _list_tensors(arguments: Any) -> list[Any]:
    named: list[tuple[str | None, Any]] = []
    collect_tensors(arguments, None, named, 0)
    return [tensor for _, tensor in named]


def _is_plain(value: Any) -> bool:
    """Return whether an argument consists only of tensors and plain values."""
    from torch import Tensor, device, dtype

    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return (
        value is None or type(value) is Tensor or isinstance(value, (*PLAIN_TYPES, device, dtype))
    )


def _checksums(tensors: list[Any]) -> tuple[Hashable, ...] | None:
    """Return the checksum of each tensor, or ``None`` if there are none or one is missing."""
    sums = tuple(map(_checksum, tensors))
    return None if not sums or None in sums else sums


def _plain_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the plain numbers, booleans and strings among a call's arguments."""
    named: Iterator[tuple[Any, Any]] = chain(enumerate(args), sorted(kwargs.items()))
    return tuple((key, value) for key, value in named if isinstance(value, PLAIN_TYPES))


def _checksum(tensor: Any) -> Hashable | None:
    """Return shape, dtype and a checksum of the values, of blocks across a large tensor, or
    ``None`` for a tensor on a device or without contiguous values."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.data_ptr():
        return None
    size = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    if start + size > tensor.untyped_storage().nbytes():
        return None  # its memory was freed
    values = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
    blocks = min(MAX_BLOCKS, -(-size // BLOCK_BYTES))
    result = 0
    for index in range(blocks):
        start = index * (size - BLOCK_BYTES) // max(1, blocks - 1) if size > BLOCK_BYTES else 0
        result = crc32(values[start : start + BLOCK_BYTES], result)
    return tensor.shape, tensor.dtype, result


def _caller_frames() -> list[str]:
    """Return the frames outside PyTorch and this package, innermost first."""
    result: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(result) < MAX_CALLERS:
        if not is_own(frame.f_code):
            text = frame_text(frame.f_code, frame.f_lineno or 0)
            if not text.startswith("torch/"):
                result.append(text)
        frame = frame.f_back
    return result
