"""What a batch is made of: shapes, dtypes, bytes, and how much of it is padding.

Only what the host knows anyway: no value of a GPU tensor is ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MAX_TENSORS = 64
MAX_DEPTH = 4
MAX_KINDS = 256
"""Distinct sets of shapes that are told apart; ones after that are recorded without."""
PADDING_EVERY = 50
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


class Batches:
    """Describes batches. ``tell(index, shapes, dtypes)`` is called once for each new set."""

    def __init__(self, tell: Callable[[int, list[list[int]], list[str]], None]) -> None:
        self._tell = tell
        self._kinds: dict[Any, tuple[int | None, int, int | None]] = {}
        self._seen = 0

    def describe(self, batch: Any) -> Batch | None:
        """The batch in figures; ``None``: it holds no tensor."""
        found: list[Any] = []
        _collect(batch, found, 0)
        if not found:
            return None
        key = tuple([(tensor.shape, tensor.dtype) for tensor in found])
        known = self._kinds.get(key)
        if known is None:
            known = self._new(key, found)
        kind, size, samples = known
        self._seen += 1
        padding = None
        if self._seen % PADDING_EVERY == 1:
            padding = padding_share(batch)
        return Batch(samples, size, kind, padding)

    def _new(self, key: Any, tensors: list[Any]) -> tuple[int | None, int, int | None]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        first = tensors[0]
        samples = int(first.shape[0]) if first.dim() else None
        kind = None
        if len(self._kinds) < MAX_KINDS:
            kind = len(self._kinds)
            self._tell(
                kind,
                [[int(n) for n in tensor.shape] for tensor in tensors],
                [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            )
            self._kinds[key] = kind, size, samples
        return kind, size, samples


def _collect(value: Any, found: list[Any], depth: int) -> None:
    """Tensors in the usual containers, in order. Others are not looked into: iterating over an
    object of somebody's could have an effect."""
    if len(found) >= MAX_TENSORS:
        return
    kind = type(value)
    if kind is list or kind is tuple or isinstance(value, tuple):
        if depth < MAX_DEPTH:
            for part in value[:MAX_TENSORS]:
                _collect(part, found, depth + 1)
    elif kind is dict or _is_mapping(value):
        if depth < MAX_DEPTH:
            for part in list(value.values())[:MAX_TENSORS]:
                _collect(part, found, depth + 1)
    elif hasattr(kind, "element_size") and hasattr(kind, "is_cuda"):
        found.append(value)


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
