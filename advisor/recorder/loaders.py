"""How DataLoaders are set up, and how long an epoch's workers take to start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

TRAINER = "transformers"
"""Whose Trainer makes the loaders of a program by its own arguments."""
MAX_LOADERS = 64
MAX_ITERATORS = 4096


class Loaders:
    """Numbers the loaders of a process. ``tell(kind, data)`` writes an event."""

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._tell = tell
        self._ids: dict[int, int] = {}
        self._open: dict[int, dict[str, Any]] = {}
        self._ended: dict[int, int] = {}
        self._lengths: dict[int, int | None] = {}
        self.numbers: dict[int, int] = {}
        """Number of the loader, by id of the iterator that it handed out last."""
        self.last: int | None = None
        """The loader whose batch is being worked on."""

    def iterated(
        self, loader: Any, iterator: Any, began: int, took_ns: int
    ) -> dict[str, Any] | None:
        """A loader handed out an iterator, for which it was asked at ``began`` (clock of the steps,
        ns). Called in the training thread; what it returns is for ``began`` (``None``: there are
        too many loaders)."""
        number = self._ids.get(id(loader))
        if number is None:
            if len(self._ids) >= MAX_LOADERS:
                return None
            number = self._ids[id(loader)] = len(self._ids)
            settings = loader_configuration(loader)
            self._lengths[number] = settings["length"]
            self._tell("loader", {"id": number, **settings})
        if len(self.numbers) >= MAX_ITERATORS:
            self.numbers.clear()
        self.numbers[id(iterator)] = number
        return {
            "id": number,
            "began_ns": began,
            "workers_started_ns": took_ns if getattr(loader, "num_workers", 0) else None,
            "evaluation": True,
        }

    def began(self, data: dict[str, Any]) -> None:
        """An epoch of a loader began."""
        self._settle(data["id"])
        data["workers_ended_ns"] = self._ended.pop(data["id"], None)
        self._open[data["id"]] = data

    def fetching_from(self, number: int) -> None:
        """Batches come from this loader now."""
        self.last = number

    @property
    def length(self) -> int | None:
        """Batches of the loader that is being worked on; ``None``: unknown."""
        return None if self.last is None else self._lengths.get(self.last)

    @property
    def unsettled(self) -> bool:
        """Whether it is unknown what the batch that is being worked on is for."""
        return self.last is not None and self.last in self._open

    def trained(self) -> None:
        """Something was learnt from the batch."""
        if self.last is not None and self.last in self._open:
            self._open[self.last]["evaluation"] = False
            self._settle(self.last)

    def exhausted(self, took_ns: int) -> None:
        """The loader that is being worked on has no more batches. ``took_ns``: to find that out,
        which is when workers that do not outlive the epoch are ended."""
        if self.last is not None:
            self._ended[self.last] = took_ns
            self._settle(self.last)

    def finish(self) -> None:
        """Recording ends."""
        for number in list(self._open):
            self._settle(number)

    def _settle(self, number: int) -> None:
        data = self._open.pop(number, None)
        if data is not None:
            self._tell("loader_iter", data)


def loader_configuration(loader: Any) -> dict[str, Any]:
    """What advice asks of a DataLoader."""
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
        "length": epoch_length(loader),
        "trainer": TRAINER if f"{TRAINER}.trainer" in sys.modules else None,
        "multiprocessing_context": context.get_start_method() if context is not None else None,
    }


def epoch_length(loader: Any) -> int | None:
    """Batches of an epoch; ``None``: unknown. An iterable dataset is not asked: its length may be
    a guess, and torch warns when it is."""
    if type(loader).__name__ != "DataLoader" and not hasattr(loader, "_dataset_kind"):
        return None
    if getattr(loader, "_dataset_kind", 0) == 1:
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
