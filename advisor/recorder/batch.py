"""What a batch is made of: shapes, dtypes, bytes, and how much of it is padding.

Only what the host knows anyway: no value of a GPU tensor is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

MAX_TENSORS = 64
MAX_DEPTH = 4
MAX_KINDS = 256
"""Distinct sets of shapes that are distinguished; ones after that are recorded without."""
PADDING_EVERY = 10
"""Masks of every so many batches are looked at."""
MAX_MASK = 1 << 24
"""Larger masks are not, elements."""
_MASKS = {
    "attention_mask": True,
    "input_mask": True,
    "token_mask": True,
    "padding_mask": False,
    "key_padding_mask": False,
    "src_key_padding_mask": False,
}
"""Keys under which models expect a mask, and whether true means a token (else padding)."""


class Batch(NamedTuple):
    """One batch, described."""

    samples: int | None
    """First dimension of the first tensor."""
    bytes: int
    kind: int | None
    """Number of its shapes, see ``Batches.tell``."""
    padding: float | None


Glance = tuple[tuple[tuple[Any, Any], ...], float | None]
"""What the training thread notes of a batch: shape and dtype of each tensor, and the share of
padding where it was looked at. Everything else is worked out of it later."""


class Batches:
    """Describes batches: ``glance`` in the training thread, ``resolve`` in the writer's.
    ``tell(index, shapes, dtypes)`` is called once for each new set of shapes."""

    def __init__(self, tell: Callable[[int, list[list[int]], list[str]], None]) -> None:
        self._tell = tell
        self._kinds: dict[Any, tuple[int | None, int, int | None]] = {}
        self._seen = 0

    def glance(self, batch: Any) -> Glance | None:
        """Look at a batch; ``None``: it holds no tensor."""
        result: list[tuple[Any, Any]] = []
        _collect(batch, result, 0)
        if not result:
            return None
        self._seen += 1
        padding = padding_share(batch) if self._seen % PADDING_EVERY == 1 else None
        return tuple(result), padding

    def resolve(self, glance: Glance) -> Batch:
        """The batch in figures."""
        tensors, padding = glance
        known = self._kinds.get(tensors)
        if known is None:
            known = self._new(tensors)
        kind, size, samples = known
        return Batch(samples, size, kind, padding)

    def _new(self, tensors: tuple[tuple[Any, Any], ...]) -> tuple[int | None, int, int | None]:
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)
        first = tensors[0][0]
        samples = int(first[0]) if len(first) else None
        kind = None
        if len(self._kinds) < MAX_KINDS:
            kind = len(self._kinds)
            self._tell(
                kind,
                [[int(n) for n in shape] for shape, _ in tensors],
                [str(dtype).removeprefix("torch.") for _, dtype in tensors],
            )
            self._kinds[tensors] = kind, size, samples
        return kind, size, samples


def samples_of(batch: Any) -> int | None:
    """First dimension of the first tensor; ``None``: there is none."""
    result: list[tuple[Any, Any]] = []
    _collect(batch, result, 0)
    return int(result[0][0][0]) if result and len(result[0][0]) else None


def _collect(value: Any, result: list[tuple[Any, Any]], depth: int) -> None:
    """Tensors in the usual containers, in order. Others are not looked into: iterating over an
    object of somebody's could have an effect."""
    kind = type(value)
    if kind in _TENSORS:
        result.append((value.shape, value.dtype))
    elif kind is list or kind is tuple:
        if depth < MAX_DEPTH:
            for part in value if len(value) <= MAX_TENSORS else value[:MAX_TENSORS]:
                if len(result) < MAX_TENSORS:
                    _collect(part, result, depth + 1)
    elif kind in _PLAIN:
        return
    elif kind is dict or _is_mapping(value):
        _collect(list(value.values()), result, depth)
    elif isinstance(value, tuple):
        _collect(tuple(value), result, depth)
    elif hasattr(kind, "element_size") and hasattr(kind, "is_cuda"):
        _TENSORS.add(kind)
        result.append((value.shape, value.dtype))


_TENSORS: set[type] = set()
"""Types that turned out to be tensors."""
_PLAIN = {str, int, float, bool, bytes, type(None)}


def _is_mapping(value: Any) -> bool:
    """A dictionary in all but name, as transformers' BatchEncoding (a UserDict)."""
    data = getattr(value, "__dict__", {}).get("data")
    return isinstance(value, dict) or (isinstance(value, Mapping) and isinstance(data, dict))


def padding_share(batch: Any) -> float | None:
    """Share of padding in the batch's mask, 0 to 1; ``None``: there is no mask on the CPU."""
    if not (isinstance(batch, dict) or _is_mapping(batch)):
        return None
    for name, true_is_token in _MASKS.items():
        mask = batch.get(name)
        if mask is None or not hasattr(type(mask), "element_size"):
            continue
        whole = mask.device.type == "cpu" and mask.dim() == 2 and 0 < mask.numel() <= MAX_MASK
        if not whole or mask.is_floating_point():
            continue
        share: float = int(mask.count_nonzero()) / int(mask.numel())
        return 1 - share if true_is_token else share
    return None
