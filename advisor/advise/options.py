"""Options of an analysis, and its progress."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from advisor.core.prices import Prices
from advisor.read import ReadOptions

RANK_TIMEOUT_SECONDS: Final = 1800.0
"""Time limit for one file if ranks are measured one by one, s. A trace of 4 GB takes about 300 s on
one core, without the network."""


class RanksDone(Struct):
    """Progress of measuring the ranks of a job, as numbers of ranks."""

    total: int
    read: int = 0
    unread: int = 0
    dashboard: str = ""
    """Address of Dask's dashboard. Empty if there is none."""

    @property
    def ranks(self) -> int:
        """Number of finished ranks, read or not."""
        return self.read + self.unread


@dataclass(frozen=True)
class Options:
    """Options of an analysis: what to analyse and how."""

    rank: int | None = None
    """Rank that the report is about, or ``None`` for the first. All ranks are read and compared."""
    window: int | None = None
    """Window of each rank, or ``None`` for the first."""
    steps: tuple[int | None, int | None] | None = None
    """Range of step indices, without the end, or ``None`` for all steps."""
    rules_folder: Path | None = None
    """Folder with additional rules, in every ``*.py`` file."""
    config: dict[str, dict[str, Any]] | None = None
    """Options of rules by id, or ``None`` to read the nearest pyproject.toml."""
    read: ReadOptions = field(default_factory=ReadOptions)
    """Options for reading the files."""
    workers: int | None = None
    """Number of processes that measure a job rank by rank, one trace at a time each. With ``None``,
    this process measures up to MAX_RANKS_IN_MEMORY ranks, and one process per core measures
    more."""
    cluster: str | None = None
    """Address of a Dask scheduler whose workers measure the ranks instead (``tcp://host:8786``)."""
    seconds: float = RANK_TIMEOUT_SECONDS
    """Time limit for one rank measured by a worker, s."""
    on_progress: Callable[[RanksDone], object] | None = None
    """Callback when workers start to measure the ranks, and after each rank."""
    prices: Prices | None = None
    """Prices of a GPU hour, or ``None`` to read the nearest pyproject.toml."""
    paid_gpus: int | None = None
    """Number of GPUs that are paid for, or ``None`` for one per rank."""

    node_size: int | None = None
    """Number of GPUs per node, or ``None`` to infer it from the hosts or a trace's devices."""
    node_bandwidth: float | None = None
    """Bandwidth of a GPU across nodes in one direction, GB/s, or ``None`` if unknown."""

    capture: str | None = None
    """Path of a trace that captures the replayed CUDA or HIP graphs, or ``None``."""

    @property
    def window_to_read(self) -> int | Literal["first"]:
        """Window that needs to be read: a number, or ``first``."""
        return "first" if self.window is None else self.window
