"""Records of DataLoaders: their settings, the time that an epoch's workers take to start, and each
batch's shapes, dtypes, bytes and share of padding.

Only data that the host already has: no value of a GPU tensor is ever read."""

import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from advisor.recorder.stack_samples import without_search_path

TRAINER = "transformers"
"""Package whose Trainer creates a program's loaders from its own arguments."""
MAX_LOADERS = 64
MAX_ITERATORS = 4096


class Loaders:
    """Numbered loaders of a process and their epochs. ``write_event(kind, data)`` writes an
    event."""

    def __init__(self, write_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._write_event = write_event
        self._numbers_by_id: dict[int, int] = {}
        self._open_epochs: dict[int, dict[str, Any]] = {}
        self._end_durations: dict[int, int] = {}
        self._lengths: dict[int, int | None] = {}
        self.numbers: dict[int, int] = {}
        """Number of each loader, by the id of the iterator it returned last."""
        self.last: int | None = None
        """Number of the loader whose batch is in use, or ``None`` before the first."""

    def on_iterator(
        self, loader: Any, iterator: Any, start_ns: int, took_ns: int
    ) -> dict[str, Any] | None:
        """Number a loader that returned an iterator; ``start_ns`` is the time of the call,
        perf_counter_ns. Called in the training thread. Return the epoch's data, for ``on_epoch``,
        or ``None`` if there are too many loaders."""
        number = self._numbers_by_id.get(id(loader))
        if number is None:
            if len(self._numbers_by_id) >= MAX_LOADERS:
                return None
            number = self._numbers_by_id[id(loader)] = len(self._numbers_by_id)
            settings = loader_configuration(loader)
            self._lengths[number] = settings["length"]
            self._write_event("loader", {"id": number, **settings})
        if len(self.numbers) >= MAX_ITERATORS:
            self.numbers.clear()
        self.numbers[id(iterator)] = number
        return {
            "id": number,
            "began_ns": start_ns,
            "workers_started_ns": took_ns if getattr(loader, "num_workers", 0) else None,
            "evaluation": True,
        }

    def on_epoch(self, data: dict[str, Any]) -> None:
        self._write_epoch(data["id"])
        data["workers_ended_ns"] = self._end_durations.pop(data["id"], None)
        self._open_epochs[data["id"]] = data

    def on_fetch_from(self, number: int) -> None:
        """Note that batches now come from this loader."""
        self.last = number

    @property
    def length(self) -> int | None:
        """Number of batches of the current loader, or ``None`` if unknown."""
        return None if self.last is None else self._lengths.get(self.last)

    @property
    def is_undecided(self) -> bool:
        """True while it is unknown whether the current loader's batches are used in training."""
        return self.last is not None and self.last in self._open_epochs

    def on_training(self) -> None:
        """Note that the current loader's batches are used in training."""
        if self.last is not None and self.last in self._open_epochs:
            self._open_epochs[self.last]["evaluation"] = False
            self._write_epoch(self.last)

    def on_exhausted(self, took_ns: int) -> None:
        """End the current loader's epoch. ``took_ns``: time until the loader reported the end,
        which includes the shutdown of workers that do not outlive the epoch."""
        if self.last is not None:
            self._end_durations[self.last] = took_ns
            self._write_epoch(self.last)

    def finish(self) -> None:
        """Write the open epochs at the end of the recording."""
        for number in list(self._open_epochs):
            self._write_epoch(number)

    def _write_epoch(self, number: int) -> None:
        data = self._open_epochs.pop(number, None)
        if data is not None:
            self._write_event("loader_iter", data)


def loader_configuration(loader: Any) -> dict[str, Any]:
    """Return the settings of a DataLoader that rules use, by name; unknown ones are ``None``."""
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
        "item": _find_item_code(dataset),
        "length": epoch_length(loader),
        "trainer": TRAINER if f"{TRAINER}.trainer" in sys.modules else None,
        "multiprocessing_context": context.get_start_method() if context is not None else None,
    }


def _find_item_code(dataset: Any) -> str | None:
    """Return where a dataset's class reads a sample, as ``file(line): function``, or ``None`` if
    unknown or in a package."""
    for name in ("__getitems__", "__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None and "site-packages" not in code.co_filename:
            file = without_search_path(code.co_filename)
            return f"{file}({code.co_firstlineno}): {code.co_qualname}"
    return None


def epoch_length(loader: Any) -> int | None:
    """Return the number of batches of an epoch, or ``None`` if unknown. An iterable dataset is not
    asked: its length may be a guess, and then torch warns."""
    if type(loader).__name__ != "DataLoader" and not hasattr(loader, "_dataset_kind"):
        return None
    if getattr(loader, "_dataset_kind", 0) == 1:
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


MAX_TENSORS = 64
MAX_BATCH_DEPTH = 4
_MAX_KINDS = 256
"""Maximum number of distinct sets of shapes. Later ones are recorded without shapes."""
PADDING_EVERY = 10
"""Interval, in batches, at which masks are examined."""
MAX_MASK = 1 << 24
"""Maximum size of a mask to examine, elements."""
MASKS = {
    "attention_mask": True, "input_mask": True, "token_mask": True, "padding_mask": False,
    "key_padding_mask": False, "src_key_padding_mask": False,
}  # fmt: skip
"""Keys under which models expect a mask, each with whether true means a token (else padding)."""


class Batch(NamedTuple):
    samples: int | None
    """First dimension of the first tensor."""
    bytes: int
    kind: int | None
    """Number of the batch's set of shapes in ``Batches``, or ``None`` if there are too many."""
    padding: float | None


BatchSummary = tuple[tuple[tuple[Any, Any], ...], float | None]
"""Note on a batch, made in the training thread: shape and dtype of each tensor, and the share of
padding if it was measured. ``Batches.resolve`` derives the remaining fields later."""


class Batches:
    """Descriptions of batches: ``inspect_batch`` in the training thread, ``resolve`` in the
    writer's. ``write_event(index, shapes, dtypes)`` is called once for each new set of shapes."""

    def __init__(self, write_event: Callable[[int, list[list[int]], list[str]], None]) -> None:
        self._write_event = write_event
        self._kinds: dict[Any, tuple[int | None, int, int | None]] = {}
        self._batch_count = 0

    def inspect_batch(self, batch: Any) -> BatchSummary | None:
        """Return the note on a batch, or ``None`` if it contains no tensor."""
        result: list[tuple[Any, Any]] = []
        _collect_tensors(batch, result, 0)
        if not result:
            return None
        self._batch_count += 1
        padding = padding_share(batch) if self._batch_count % PADDING_EVERY == 1 else None
        return tuple(result), padding

    def resolve(self, batch_summary: BatchSummary) -> Batch:
        tensors, padding = batch_summary
        shape_set = self._kinds.get(tensors)
        if shape_set is None:
            shape_set = self._add_shape_set(tensors)
        kind, size, samples = shape_set
        return Batch(samples, size, kind, padding)

    def _add_shape_set(
        self, tensors: tuple[tuple[Any, Any], ...]
    ) -> tuple[int | None, int, int | None]:
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)
        first = tensors[0][0]
        samples = int(first[0]) if len(first) else None
        kind = None
        if len(self._kinds) < _MAX_KINDS:
            kind = len(self._kinds)
            self._write_event(
                kind,
                [[int(n) for n in shape] for shape, _ in tensors],
                [str(dtype).removeprefix("torch.") for _, dtype in tensors],
            )
            self._kinds[tensors] = kind, size, samples
        return kind, size, samples


def samples_of(batch: Any) -> int | None:
    """Return the first dimension of a batch's first tensor, or ``None`` if there is none."""
    result: list[tuple[Any, Any]] = []
    _collect_tensors(batch, result, 0)
    return int(result[0][0][0]) if result and len(result[0][0]) else None


def _collect_tensors(value: Any, result: list[tuple[Any, Any]], depth: int) -> None:
    """Collect tensors from the usual containers, in order. Other objects are skipped, because
    iterating over them could have side effects."""
    kind = type(value)
    if kind in _TENSOR_TYPES:
        result.append((value.shape, value.dtype))
    elif kind is list or kind is tuple:
        if depth < MAX_BATCH_DEPTH:
            for part in value if len(value) <= MAX_TENSORS else value[:MAX_TENSORS]:
                if len(result) < MAX_TENSORS:
                    _collect_tensors(part, result, depth + 1)
    elif kind in _PLAIN_TYPES:
        return
    elif kind is dict or is_mapping(value):
        _collect_tensors(list(value.values()), result, depth)
    elif isinstance(value, tuple):
        _collect_tensors(tuple(value), result, depth)
    elif hasattr(kind, "element_size") and hasattr(kind, "is_cuda"):
        _TENSOR_TYPES.add(kind)
        result.append((value.shape, value.dtype))


_TENSOR_TYPES: set[type] = set()
"""Types that turned out to be tensors."""
_PLAIN_TYPES = {str, int, float, bool, bytes, type(None)}


def is_mapping(value: Any) -> bool:
    """Return whether a value is a dictionary or acts like one, such as a BatchEncoding."""
    data = getattr(value, "__dict__", {}).get("data")
    return isinstance(value, dict) or (isinstance(value, Mapping) and isinstance(data, dict))


def padding_share(batch: Any) -> float | None:
    """Return the share of padding in a batch's mask, 0 to 1, or ``None`` without a mask on the
    CPU."""
    if not (isinstance(batch, dict) or is_mapping(batch)):
        return None
    for name, true_is_token in MASKS.items():
        mask = batch.get(name)
        if mask is None or not hasattr(type(mask), "element_size"):
            continue
        is_readable = mask.device.type == "cpu" and mask.dim() == 2 and 0 < mask.numel() <= MAX_MASK
        if not is_readable or mask.is_floating_point():
            continue
        share: float = int(mask.count_nonzero()) / int(mask.numel())
        return 1 - share if true_is_token else share
    return None
