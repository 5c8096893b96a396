"""Records of DataLoaders: their settings, the time an epoch's workers take to start, and each
batch's shapes, dtypes, bytes and share of padding.

Only what the host knows anyway: no value of a GPU tensor is ever read."""

import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from advisor.recorder.stack_samples import without_search_path

TRAINER = "transformers"
"""Package whose Trainer makes a program's loaders from its own arguments."""
MAX_LOADERS = 64
MAX_ITERATORS = 4096


class Loaders:
    """Numbered loaders of a process and their epochs. ``write_event(kind, data)`` writes an
    event."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._ids: dict[int, int] = {}
        self._open: dict[int, dict[str, Any]] = {}
        self._ended: dict[int, int] = {}
        self._lengths: dict[int, int | None] = {}
        self.numbers: dict[int, int] = {}
        """Number of each loader, by the id of the iterator it returned last."""
        self.last: int | None = None
        """Number of the loader whose batch is being worked on; ``None`` before the first."""

    def on_iterator(
        self, loader: Any, iterator: Any, began: int, took_ns: int
    ) -> dict[str, Any] | None:
        """Number a loader that returned an iterator; ``began`` is when it was asked,
        perf_counter_ns. Called in the training thread. Return the epoch's data, for ``on_epoch``,
        or ``None`` if there are too many loaders."""
        number = self._ids.get(id(loader))
        if number is None:
            if len(self._ids) >= MAX_LOADERS:
                return None
            number = self._ids[id(loader)] = len(self._ids)
            settings = loader_configuration(loader)
            self._lengths[number] = settings["length"]
            self._write_event("loader", {"id": number, **settings})
        if len(self.numbers) >= MAX_ITERATORS:
            self.numbers.clear()
        self.numbers[id(iterator)] = number
        return {
            "id": number,
            "began_ns": began,
            "workers_started_ns": took_ns if getattr(loader, "num_workers", 0) else None,
            "evaluation": True,
        }

    def on_epoch(self, data: dict[str, Any]) -> None:
        self._settle(data["id"])
        data["workers_ended_ns"] = self._ended.pop(data["id"], None)
        self._open[data["id"]] = data

    def on_fetch_from(self, number: int) -> None:
        """Note that batches now come from this loader."""
        self.last = number

    @property
    def length(self) -> int | None:
        """Number of batches of the current loader; ``None`` if unknown."""
        return None if self.last is None else self._lengths.get(self.last)

    @property
    def is_undecided(self) -> bool:
        """True while it is unknown whether the current loader's batches are trained with."""
        return self.last is not None and self.last in self._open

    def on_training(self) -> None:
        """Note that the current loader's batches are trained with."""
        if self.last is not None and self.last in self._open:
            self._open[self.last]["evaluation"] = False
            self._settle(self.last)

    def on_exhausted(self, took_ns: int) -> None:
        """End the current loader's epoch. ``took_ns``: time until it reported the end, in which
        workers that do not outlive the epoch are ended."""
        if self.last is not None:
            self._ended[self.last] = took_ns
            self._settle(self.last)

    def finish(self) -> None:
        """Write the open epochs, as recording ends."""
        for number in list(self._open):
            self._settle(number)

    def _settle(self, number: int) -> None:
        data = self._open.pop(number, None)
        if data is not None:
            self._write_event("loader_iter", data)


def loader_configuration(loader: Any) -> dict[str, Any]:
    """Return a DataLoader's settings that advice needs, by name; ``None`` where unknown."""
    dataset = getattr(loader, "dataset", None)
    sampler = getattr(loader, "batch_sampler", None)
    context = getattr(loader, "multiprocessing_context", None)
    size = getattr(loader, "batch_size", None)
    return {
        "workers": getattr(loader, "num_workers", None),
        "pin_memory": getattr(loader, "pin_memory", None),
        "prefetch_factor": getattr(loader, "prefetch_factor", None),
        "persistent_workers": getattr(loader, "persistent_workers", None),
        "batch_size": getattr(sampler, "batch_size", None) if size is None else size,
        "drop_last": getattr(loader, "drop_last", None),
        "dataset": type(dataset).__name__ if dataset is not None else None,
        "item": _place_of_item(dataset),
        "length": epoch_length(loader),
        "trainer": TRAINER if f"{TRAINER}.trainer" in sys.modules else None,
        "multiprocessing_context": context.get_start_method() if context is not None else None,
    }


def _place_of_item(dataset: Any) -> str | None:
    """Return where a dataset's class reads a sample, ``file(line): function``; ``None``: unknown,
    or in a package."""
    for name in ("__getitems__", "__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None and "site-packages" not in code.co_filename:
            file = without_search_path(code.co_filename)
            return f"{file}({code.co_firstlineno}): {code.co_qualname}"
    return None


def epoch_length(loader: Any) -> int | None:
    """Return the batches of an epoch; ``None`` if unknown. An iterable dataset is not asked: its
    length may be a guess, and torch warns when it is."""
    if type(loader).__name__ != "DataLoader" and not hasattr(loader, "_dataset_kind"):
        return None
    if getattr(loader, "_dataset_kind", 0) == 1:
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


MAX_TENSORS = 64
MAX_DEPTH = 4
MAX_KINDS = 256
"""Most distinct sets of shapes; later ones are recorded without shapes."""
PADDING_EVERY = 10
"""Interval, in batches, at which masks are looked at."""
MAX_MASK = 1 << 24
"""Largest mask that is looked at, elements."""
MASKS = {
    "attention_mask": True, "input_mask": True, "token_mask": True, "padding_mask": False,
    "key_padding_mask": False, "src_key_padding_mask": False,
}  # fmt: skip
"""Keys under which models expect a mask, and whether true means a token (else padding)."""


class Batch(NamedTuple):
    samples: int | None
    """First dimension of the first tensor."""
    bytes: int
    kind: int | None
    """Number of its set of shapes in ``Batches``; ``None``: too many sets."""
    padding: float | None


BatchSummary = tuple[tuple[tuple[Any, Any], ...], float | None]
"""Note on a batch made in the training thread: shape and dtype of each tensor, and the share of
padding if it was looked at. ``Batches.resolve`` derives the rest later."""


class Batches:
    """Descriptions of batches: ``inspect_batch`` in the training thread, ``resolve`` in the
    writer's. ``write_event(index, shapes, dtypes)`` is called once for each new set of shapes."""

    def __init__(self, write_event: Callable[[int, list[list[int]], list[str]], None]) -> None:
        self._write_event = write_event
        self._kinds: dict[Any, tuple[int | None, int, int | None]] = {}
        self._seen = 0

    def inspect_batch(self, batch: Any) -> BatchSummary | None:
        """Return the note on a batch; ``None`` if it holds no tensor."""
        result: list[tuple[Any, Any]] = []
        _collect(batch, result, 0)
        if not result:
            return None
        self._seen += 1
        padding = padding_share(batch) if self._seen % PADDING_EVERY == 1 else None
        return tuple(result), padding

    def resolve(self, batch_summary: BatchSummary) -> Batch:
        tensors, padding = batch_summary
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
            self._write_event(
                kind,
                [[int(n) for n in shape] for shape, _ in tensors],
                [str(dtype).removeprefix("torch.") for _, dtype in tensors],
            )
            self._kinds[tensors] = kind, size, samples
        return kind, size, samples


def samples_of(batch: Any) -> int | None:
    """Return the first dimension of a batch's first tensor; ``None`` if there is none."""
    result: list[tuple[Any, Any]] = []
    _collect(batch, result, 0)
    return int(result[0][0][0]) if result and len(result[0][0]) else None


def _collect(value: Any, result: list[tuple[Any, Any]], depth: int) -> None:
    """Collect tensors from the usual containers, in order. Other objects are not looked into:
    iterating over one could have an effect."""
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
    elif kind is dict or is_mapping(value):
        _collect(list(value.values()), result, depth)
    elif isinstance(value, tuple):
        _collect(tuple(value), result, depth)
    elif hasattr(kind, "element_size") and hasattr(kind, "is_cuda"):
        _TENSORS.add(kind)
        result.append((value.shape, value.dtype))


_TENSORS: set[type] = set()
"""Types found to be tensors."""
_PLAIN = {str, int, float, bool, bytes, type(None)}


def is_mapping(value: Any) -> bool:
    """Return whether a value is a dictionary, or acts as one, like transformers' BatchEncoding."""
    data = getattr(value, "__dict__", {}).get("data")
    return isinstance(value, dict) or (isinstance(value, Mapping) and isinstance(data, dict))


def padding_share(batch: Any) -> float | None:
    """Return the share of padding in a batch's mask, 0 to 1; ``None`` without a mask on the CPU."""
    if not (isinstance(batch, dict) or is_mapping(batch)):
        return None
    for name, true_is_token in MASKS.items():
        mask = batch.get(name)
        if mask is None or not hasattr(type(mask), "element_size"):
            continue
        whole = mask.device.type == "cpu" and mask.dim() == 2 and 0 < mask.numel() <= MAX_MASK
        if not whole or mask.is_floating_point():
            continue
        share: float = int(mask.count_nonzero()) / int(mask.numel())
        return 1 - share if true_is_token else share
    return None
