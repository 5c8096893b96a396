"""Measurements of public traces (``benchmarks/measure_jobs.py``), to draw from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from msgspec import Struct, json
from numpy.random import Generator


class Messages(Struct, frozen=True):
    """Collectives of one kind; quantiles over them."""

    count: int
    bytes: list[float]
    dur_ns: list[float]
    gb_per_s: list[float]
    """Message bytes a ns: waits of the measured ranks are in it."""


class Measured(Struct, frozen=True):
    """Quantiles of what was measured, ns."""

    sources: dict[str, str]
    """File -> project and licence."""
    written_by: str
    quantiles: list[float]
    kernel_ns: dict[str, list[float]]
    """Kernel times by family."""
    host_ns: dict[str, list[float]]
    """``between`` launches of a thread, in the ``call``, and from call to kernel (``latency``)."""
    collectives: dict[str, Messages]

    def kernel(self, rng: Generator, family: str, low: float = 0.4, high: float = 0.95) -> float:
        """Length of one kernel of a family, ns, between two quantiles."""
        return self._between(rng, self.kernel_ns[family], low, high)

    def rate(self, rng: Generator, kind: str, low: float, high: float) -> float:
        """Message bytes a ns of a kind of collective."""
        return self._between(rng, self.collectives[kind].gb_per_s, low, high)

    def host(self, rng: Generator, what: str, low: float, high: float) -> float:
        """A host time, ns."""
        return self._between(rng, self.host_ns[what], low, high)

    def _between(self, rng: Generator, values: list[float], low: float, high: float) -> float:
        return float(np.interp(rng.uniform(low, high), self.quantiles, values))


@cache
def measured() -> Measured:
    """The file beside this one."""
    text = Path(__file__).with_name("measured.json").read_bytes()
    return json.decode(text, type=Measured)
