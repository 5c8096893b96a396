"""Forwards that a module already made with the same weights and the same input tensors.

Layers of equal shapes run twice in a step for several reasons: a forward for metrics computes again
what is known, while a teacher or a target network is another module. A trace does not tell them
apart, the module and the tensors do. No value of a tensor is read."""

from collections.abc import Callable, Hashable
from typing import Any

from advisor.recorder.loaders import MAX_TENSORS
from advisor.recorder.padding import collect_tensors
from advisor.recorder.watchers import is_intercepted

SAMPLE = 12
"""Consecutive outermost forwards looked at together."""
INTERVAL = 60
"""Forwards from the begin of one sample to that of the next."""
MAX_SAMPLES = 64
"""Most samples of a run."""


class RepeatedInputs:
    """Sampler of forwards. ``write_event("repeated_inputs", data)`` gets the number of forwards of
    a sample, and of those among them that repeat an earlier one (``again``)."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._forwards = 0
        self._seen: dict[Hashable, list[Any]] = {}
        """Weak references to the memory of each forward's inputs, which another tensor may get."""
        self._looked_at = self._again = 0

    def on_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at an outermost forward that begins, if it is part of a sample."""
        number, at = divmod(self._forwards, INTERVAL)
        self._forwards += 1
        if at >= SAMPLE or number >= MAX_SAMPLES:
            return
        import torch

        if not is_intercepted(torch):
            try:
                with torch._C.DisableTorchFunction():
                    self._look(module, args, kwargs)
            except (RuntimeError, AttributeError, TypeError):
                pass  # a tensor without memory of its own: sparse, or of functorch
        if at == SAMPLE - 1:
            if self._looked_at:
                counts = {"forwards": self._looked_at, "again": self._again}
                self._write_event("repeated_inputs", counts)
            self._seen.clear()
            self._looked_at = self._again = 0

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from torch import Tensor
        from torch.multiprocessing.reductions import StorageWeakRef

        given: list[tuple[str | None, Any]] = []
        collect_tensors((args, kwargs), None, given, 0)
        tensors = [tensor for _, tensor in given]
        weight = next(iter(module.parameters()), None)
        if not tensors or len(tensors) >= MAX_TENSORS or not isinstance(weight, Tensor):
            return
        if any(tensor.is_inference() for tensor in (weight, *tensors)):
            return  # their versions are not counted
        inputs = tuple((t.data_ptr(), t._version, t.shape, t.dtype) for t in tensors)
        if not all(pointer for pointer, *_ in inputs):
            return  # empty, or on the meta device
        key = id(module), weight._version, inputs
        self._looked_at += 1
        earlier = self._seen.get(key)
        self._again += earlier is not None and not any(memory.expired() for memory in earlier)
        self._seen[key] = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
