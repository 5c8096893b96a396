"""Forwards that a module already made with the same weights and the same input tensors.

Layers of equal shapes run twice in a step for several reasons: a forward for metrics computes again
what is known, while a teacher or a target network is another module. A trace does not tell them
apart, the module and the tensors do. Tensors are the same where their memory and its version are.
Those of ``torch.inference_mode`` have no version, and a program may make equal ones anew. So where
nothing is trained, values of tensors on the CPU are compared instead, those of a module's inputs
and of its outputs, by a checksum of a part of them. No device is asked for values."""

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
SAMPLE = 12
"""Consecutive outermost forwards looked at together."""
INTERVAL = 60
"""Forwards from the begin of one sample to that of the next."""
MAX_SAMPLES = 64
"""Most samples of a run."""
BLOCK, MAX_BLOCKS = 4_096, 16
"""Size of a block whose values are compared, bytes, and most of them in one tensor."""
PLAIN = (bool, int, float, str)
MAX_CALLERS = 6
"""Most frames of a module's callers."""


class _Forward(NamedTuple):
    """A forward that is compared with others."""

    key: Hashable
    """Module, its weights' versions and the inputs."""
    memory: list[Any] | None
    """Weak references to the inputs' memory, which another tensor may get; ``None``: values of
    inputs are compared, and those of outputs have to be equal too."""
    again: bool
    """Whether inputs are those of an earlier one."""


class RepeatedInputs:
    """Sampler of forwards. ``write_event("repeated_inputs", data)`` gets the number of forwards of
    a sample, and of those among them that repeat an earlier one (``again``). Where nothing is
    trained it gets their host time, ns, and of each module that repeats: its class (``name``), the
    callers' ``frames``, numbers and time (``ns``, and ``again_ns`` of repeated forwards)."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._forwards = 0
        self._seen: dict[Hashable, Any] = {}
        """Memory of each forward's inputs, or the checksum of its outputs."""
        self._looked_at = self._again = self._ns = 0
        self._modules: dict[int, dict[str, Any]] = {}
        self._begun: tuple[int, _Forward | None, int] | None = None
        """The timed forward: identity of its module, which is not kept alive, what it is compared
        by, and its begin, ns."""
        self._trained = False

    def on_forward(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, trained: bool
    ) -> None:
        """Look at an outermost forward that begins, if it is part of a sample."""
        if trained != self._trained:
            self._clear()
            self._trained, self._forwards = trained, 0
        self._begun = None
        number, at = divmod(self._forwards, INTERVAL)
        self._forwards += 1
        if at == SAMPLE:
            self._write()
        if at >= SAMPLE or number >= MAX_SAMPLES:
            return
        forward = _unless_intercepted(lambda: self._look(module, args, kwargs))
        if forward is not None:
            self._looked_at += 1
            if trained:
                self._again += forward.again
        if not trained:
            self._begun = id(module), forward, perf_counter_ns()

    def on_end(self, module: Any, result: Any) -> None:
        """Time an outermost forward that ended, where nothing is trained."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != id(module):
            return
        forward, ns = begun[1], perf_counter_ns() - begun[2]
        again = False
        if forward is not None and forward.memory is None:
            outputs = _unless_intercepted(lambda: _checksums(_tensors(result)))
            again = outputs is not None and self._seen.get(forward.key) == outputs
            self._seen[forward.key] = outputs
        elif forward is not None:
            again = forward.again
        self._ns += ns
        entry = self._modules.get(id(module))
        if entry is None:
            entry = {"name": type(module).__name__, "frames": _callers()}
            entry |= {"forwards": 0, "again": 0, "ns": 0, "again_ns": 0}
            self._modules[id(module)] = entry
        entry["forwards"] += 1
        entry["ns"] += ns
        if again:
            self._again += 1
            entry["again"] += 1
            entry["again_ns"] += ns

    def _write(self) -> None:
        if self._looked_at:
            data: dict[str, Any] = {"forwards": self._looked_at, "again": self._again}
            if not self._trained:
                modules = [entry for entry in self._modules.values() if entry["again"]]
                data |= {"ns": self._ns, "modules": modules}
            self._write_event("repeated_inputs", data)
        self._clear()

    def _clear(self) -> None:
        self._seen.clear()
        self._modules.clear()
        self._looked_at = self._again = self._ns = 0

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Forward | None:
        """Compare a forward by its inputs' memory. Where nothing is trained, compare it by their
        values if they are on the CPU. ``None``: nothing is known of it."""
        from torch import Tensor
        from torch.multiprocessing.reductions import StorageWeakRef

        tensors = _tensors((args, kwargs))
        weight = next(iter(module.parameters()), None)
        if not tensors or len(tensors) >= MAX_TENSORS or not isinstance(weight, Tensor):
            return None
        if weight.is_inference():
            return None  # its versions are not counted
        if not self._trained:
            if not all(map(_is_known, (*args, *kwargs.values()))):
                return None  # a cache of keys and values, say
            if values := _checksums(tensors):
                settings = _settings(args, kwargs)
                return _Forward((id(module), weight._version, settings, values), None, False)
        if any(tensor.is_inference() for tensor in tensors):
            return None
        inputs = tuple((t.data_ptr(), t._version, t.shape, t.dtype) for t in tensors)
        if not all(pointer for pointer, *_ in inputs):
            return None  # empty, or on the meta device
        key = id(module), weight._version, inputs
        earlier = self._seen.get(key)
        again = earlier is not None and not any(memory.expired() for memory in earlier)
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._seen[key] = memory
        return _Forward(key, memory, again)


def _unless_intercepted(look: Callable[[], _T]) -> _T | None:
    """Return what ``look`` finds; ``None`` where operators on tensors would be seen by others."""
    import torch

    if is_intercepted(torch):
        return None
    # a tensor may have no memory of its own (sparse, or of functorch); a class of the program's may
    # do anything when it is looked at
    with suppress(Exception), torch._C.DisableTorchFunction():
        return look()
    return None


def _tensors(given: Any) -> list[Any]:
    named: list[tuple[str | None, Any]] = []
    collect_tensors(given, None, named, 0)
    return [tensor for _, tensor in named]


def _is_known(value: Any) -> bool:
    """Return whether an argument has no state but tensors and plain values."""
    from torch import Tensor, device, dtype

    if isinstance(value, list | tuple):
        return all(map(_is_known, value))
    if isinstance(value, dict):
        return all(map(_is_known, value.values()))
    return value is None or type(value) is Tensor or isinstance(value, (*PLAIN, device, dtype))


def _checksums(tensors: list[Any]) -> tuple[Hashable, ...] | None:
    """Return checksums of values; ``None`` if there are none to compare, or not of each."""
    sums = tuple(map(_checksum, tensors))
    return None if not sums or None in sums else sums


def _settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the plain numbers, truth values and texts among a call's arguments."""
    named: Iterator[tuple[Any, Any]] = chain(enumerate(args), sorted(kwargs.items()))
    return tuple((key, value) for key, value in named if isinstance(value, PLAIN))


def _checksum(tensor: Any) -> Hashable | None:
    """Return shape, type and a checksum of values, of blocks all over a large tensor; ``None`` for
    one on a device, or whose values are not in one piece of memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.data_ptr():
        return None
    size = tensor.numel() * tensor.element_size()
    begin = tensor.storage_offset() * tensor.element_size()
    if begin + size > tensor.untyped_storage().nbytes():
        return None  # its memory was given back
    values = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
    blocks = min(MAX_BLOCKS, -(-size // BLOCK))
    result = 0
    for index in range(blocks):
        begin = index * (size - BLOCK) // max(1, blocks - 1) if size > BLOCK else 0
        result = crc32(values[begin : begin + BLOCK], result)
    return tensor.shape, tensor.dtype, result


def _callers() -> list[str]:
    """Return frames outside PyTorch and this package, the innermost first."""
    result: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(result) < MAX_CALLERS:
        if not is_own(frame.f_code):
            text = frame_text(frame.f_code, frame.f_lineno or 0)
            if not text.startswith("torch/"):
                result.append(text)
        frame = frame.f_back
    return result
