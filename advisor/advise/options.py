"""What to analyse and how, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from advisor.core.prices import Prices
from advisor.read import ReadOptions

RANK_TIMEOUT_SECONDS: Final = 1800.0
"""What one file may take where ranks are measured one by one. A trace of 4 GB takes some 300 s on
one core, without the network."""


class RanksDone(Struct):
    """Progress of measuring the ranks of a job: counts of ranks."""

    total: int
    read: int = 0
    unread: int = 0
    moved: int = 0
    """Bytes of answers."""
    dashboard: str = ""
    """Address of Dask's; empty: there is none."""

    @property
    def ranks(self) -> int:
        """That are done, one way or the other."""
        return self.read + self.unread


@dataclass(frozen=True)
class Options:
    """What to analyse and how."""

    rank: int | None = None
    window: int | None = None
    steps: tuple[int | None, int | None] | None = None
    rules_folder: Path | None = None
    config: dict[str, dict[str, Any]] | None = None
    """``None``: from the nearest pyproject.toml."""
    read: ReadOptions = field(default_factory=ReadOptions)
    executor: Executor | None = None
    """Where the per-rank stage runs; ``None``: threads of this process."""
    workers: int | None = None
    """Processes that measure a job rank by rank, each with one trace at once; ``None``: up to
    MAX_RANKS_IN_MEMORY ranks in this process, more in a process a core."""
    cluster: str | None = None
    """Address of a Dask scheduler whose workers do that instead (``tcp://host:8786``)."""
    seconds: float = RANK_TIMEOUT_SECONDS
    """What one rank may take there."""
    on_progress: Callable[[RanksDone], object] | None = None
    """Called when that begins, and after each rank."""
    prices: Prices | None = None
    """What an hour of a GPU costs; ``None``: from the nearest pyproject.toml."""
    gpus: int | None = None
    """GPUs that are paid for; ``None``: one a rank."""

    node_size: int | None = None
    """GPUs of a node; ``None``: from the ranks' hosts, or the devices that a trace lists."""
    network: float | None = None
    """GB/s of a GPU across nodes in one direction; ``None``: unknown."""

    capture: str | None = None
    """A trace of the capture of the CUDA or HIP graphs that are replayed; ``None``: not given."""

    @property
    def window_to_read(self) -> int | Literal["first"]:
        """The windows that need to be read."""
        return "first" if self.window is None else self.window
