"""How far true gains lay from predicted ones, on simulated jobs that were run again without their
fault: what the replay cannot know (what overlap hides, hosts that run ahead) is in it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import Struct, json

OTHERS = "others"
"""What no fault is like: all kinds together."""


class Band(Struct, frozen=True):
    """True over predicted gain."""

    jobs: int
    low: float
    high: float


class Bands(Struct, frozen=True):
    """By kind, as ``Odd.kind`` says it (``imbalance that moves``: it is another rank each step)."""

    written_by: str
    seeds: str
    inside: float
    """Share of such jobs whose true gain is between ``low`` and ``high`` (split conformal)."""
    kinds: dict[str, Band]

    def of(self, kind: str) -> Band:
        """Of a kind, or of all."""
        return self.kinds.get(kind) or self.kinds[OTHERS]


def band_name(kind: str, *, moves: bool) -> str:
    """As :class:`Bands` has it."""
    return f"{kind} that moves" if moves else kind


@cache
def bands() -> Bands:
    """The file beside this one, written by ``python -m benchmarks.bench_jobs --calibrate``."""
    return json.decode(Path(__file__).with_name("bands.json").read_bytes(), type=Bands)
