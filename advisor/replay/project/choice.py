"""Which GPU is the cheapest for a step: projections of several, with prices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from advisor.core.errors import AdvisorError
from advisor.core.gpus import known

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec
    from advisor.core.prices import Prices
    from advisor.replay.project.project import Projection, Projector

HOUR_NS = 3.6e12
MAX_NAMES = 4
RESTS_ON = (
    "The band is as wide as the same work, measured on two GPUs, differed most from its "
    "projection; it was not compared with a whole step on two GPUs"
)
ANY = ""
"""The name under which one price for any GPU stands in a table."""


class Choice(NamedTuple):
    """A GPU, the step on it, and what a million steps cost."""

    projection: Projection
    price: float | None
    """Money an hour; null: not given."""
    cost: float | None
    """Money for a million steps."""
    low_cost: float | None
    high_cost: float | None

    @property
    def possible(self) -> bool:
        """It has the units and, as far as is known, the memory."""
        return not self.projection.refused and self.projection.fit.verdict != "too small"

    def beats(self, other: Choice) -> bool:
        """Whether it could cost less, by the bands of both."""
        low, high = self.low_cost, other.high_cost
        return low is not None and high is not None and low <= high


def cost(price: float | None, step_ns: float) -> float | None:
    """Money for a million steps at ``price`` an hour."""
    return None if price is None else price * step_ns / HOUR_NS * 1e6


def hourly_prices(prices: Prices) -> dict[str, float]:
    """What an hour of each known GPU costs, by its name in ours. AdvisorError: the table has names,
    and none of them is that of a GPU that is known."""
    result = {}
    for gpu in known():
        price = next(filter(None, map(prices.of, (gpu.name, *gpu.names))), None)
        if price is not None:
            result[gpu.name] = price.per_hour
    if prices.table and not result:
        raise AdvisorError(f"{prices.source}: none of its names is that of a GPU that is known")
    return result


def choose(
    projector: Projector, gpus: Iterable[tuple[GpuSpec, float | None]]
) -> tuple[Choice, ...]:
    """All of them: the cheapest first, then those without a price, the fastest first, then those on
    which the step cannot run."""
    result = []
    for gpu, price in gpus:
        p = projector.on(gpu)
        costs = (
            (None, None, None)
            if p.refused
            else (cost(price, p.step_ns), cost(price, p.low_ns), cost(price, p.high_ns))
        )
        result.append(Choice(p, price, *costs))

    def order(c: Choice) -> tuple[bool, bool, float]:
        figure = c.projection.step_ns if c.cost is None else c.cost
        return (not c.possible, c.cost is None, figure if not c.projection.refused else 0.0)

    return tuple(sorted(result, key=order))


def offered(prices: Prices) -> list[tuple[GpuSpec, float | None]]:
    """All known GPUs that have a price, with it; all that are known where no price is
    given by name. Raises AdvisorError as ``hourly_prices``."""
    money = {} if ANY in prices.table else hourly_prices(prices)
    return [(gpu, money.get(gpu.name)) for gpu in known() if not money or gpu.name in money]


def cheapest(result: tuple[Choice, ...]) -> str:
    """In words, with those that could be it as well by the bands; empty: no GPU has a price."""
    if all(c.price is None for c in result):
        return ""
    able = [c for c in result if c.possible and c.cost is not None]
    if not able:
        return "no GPU with a price can run this step"
    best = able[0]
    also = [c for c in able[1:] if c.beats(best)]
    text = f"cheapest: {best.projection.gpu}"
    if also:
        names = ", ".join(c.projection.gpu for c in also[:MAX_NAMES])
        more = " …" if len(also) > MAX_NAMES else ""
        text += f"; within the bands it could be {names}{more}"
    return text
