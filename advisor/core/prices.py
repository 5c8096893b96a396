"""Prices of a GPU-hour, from an option or from a table by the GPU's name, and the cost of a run."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct, field

from advisor.core.errors import AdvisorError
from advisor.core.files import read_toml, tool_section

HOUR_NS = 3.6e12


class RankEnergy(Struct, frozen=True, kw_only=True):
    """Energy that the GPU of one rank uses."""

    rank: int
    """Number of the rank."""
    joules: float
    """Mean energy per step, J."""
    watts: float
    """Mean power over the steps, W."""
    method: Literal["counter", "power"]
    """Method: the driver's energy counter, or its power integrated over time."""
    steps: int
    """Number of steps that the energy is of."""


class EnergyUse(Struct, frozen=True, kw_only=True):
    """Energy of the GPUs while steps ran that no profiler slowed; of whole boards, whoever else
    used them included. Hosts are not in it."""

    joules: float | None
    """Energy per step, all ranks together, each GPU once, J; ``null``: some were not measured."""
    watts: float | None
    """Mean power of all ranks together, W; ``null``: as above."""
    ranks: list[RankEnergy]
    """Energy of each rank that was measured."""


class FixCost(Struct, frozen=True, kw_only=True):
    """Saving of a finding's fix in money, after those ranked before it."""

    rule: str
    """Rule of the finding."""
    priority: int
    """Priority of the finding."""
    step: float
    """Money saved per step, in the currency."""


class Cost(Struct, frozen=True, kw_only=True):
    """Cost in money: time of the step times the price of an hour; nothing else."""

    currency: str
    """Currency, three letters."""
    per_hour: float
    """Price of one GPU for an hour."""
    gpus: int
    """Number of GPUs that are paid for."""
    source: str
    """Source of the price."""
    step: float
    """Cost per step, all GPUs together."""
    run: float | None
    """Cost of the recorded run, first step to the end of the last; ``null``: a trace alone."""
    step_after: float | None
    """Cost per step once all ranked findings are fixed; ``null``: none has a gain."""
    bound: bool
    """Whether gains are upper bounds: ``step_after`` is at least this."""
    fixes: list[FixCost] = field(default_factory=list)
    """Savings of the fixes, by priority."""


SYMBOLS = {"$": "USD", "€": "EUR", "£": "GBP"}
DEFAULT_CURRENCY = "USD"
MAX_AN_HOUR = 1e6

_PRICE = re.compile(
    r"([$€£]?)\s*(\d{1,7}(?:\.\d{1,9})?)\s*([A-Za-z]{3})?\s*(?:/\s*(?:h|hr|hour))?", re.ASCII
)


class GpuPrice(NamedTuple):
    """Price of an hour of one GPU, or of the machine where there is none."""

    per_hour: float
    currency: str
    """Currency, three letters."""
    source: str
    """Source: ``--price``, or a file with the name in its table."""


class Prices(NamedTuple):
    """Prices per GPU-hour: by GPU name, or one for any GPU."""

    table: Mapping[str, float]
    """Price of an hour of one GPU, by its name or words of it."""
    currency: str
    source: str

    def price_of(self, device_name: str | None) -> GpuPrice | None:
        """Return the price of a GPU: that of the longest name all of whose words are in this one's,
        so that ``A100`` is no ``A1000``; ``None``: the table has none.

        Raises AdvisorError: two names fit equally well and have different prices."""
        if "" in self.table:
            return GpuPrice(self.table[""], self.currency, self.source)
        if device_name is None:
            return None
        words = _words(device_name)
        fits = [(len(_words(name)), name) for name in self.table if _words(name) <= words]
        if not fits:
            return None
        most = max(count for count, _ in fits)
        best = [name for count, name in fits if count == most]
        if len({self.table[name] for name in best}) > 1:
            raise AdvisorError(
                f"{self.source}: {' and '.join(map(repr, best[:3]))} both fit {device_name!r}: "
                "write the name in full"
            )
        return GpuPrice(self.table[best[0]], self.currency, f"{self.source}: {best[0]}")


NO_PRICES = Prices({}, DEFAULT_CURRENCY, "")
"""Empty table of prices."""


def parse_price(text: str) -> Prices:
    """Return the price in ``2.50/h``, ``$2.50`` or ``2.50 EUR/h``. Raises AdvisorError."""
    match = _PRICE.fullmatch(text.strip())
    if match is None or (match[1] and match[3]):
        raise AdvisorError(f"--price {text[:60]}: give what an hour of one GPU costs: 2.50/h")
    currency = (match[3] or SYMBOLS.get(match[1], DEFAULT_CURRENCY)).upper()
    return Prices({"": float(match[2])}, currency, "--price")


def read_prices(file: Path | None = None) -> Prices:
    """Read a table of prices: of a TOML file, else ``[tool.advisor.prices]`` of the nearest
    ``pyproject.toml``. Its keys are names of GPUs, but for ``currency``. Raises AdvisorError."""
    if file is None:
        result, table = tool_section("prices")
        where = "" if result is None else f"{result.name}: [tool.advisor.prices]"
    else:
        whole = read_toml(file)
        rest = {name: value for name, value in whole.items() if name != "instances"}
        table, where = whole.get("prices", rest), str(file)
    return _table(table, where)


def _table(table: object, where: str) -> Prices:
    if not isinstance(table, dict):
        raise AdvisorError(f"{where}: must be a table of names and prices")
    prices: dict[str, float] = {}
    currency = table.get("currency", DEFAULT_CURRENCY)
    if not isinstance(currency, str) or not re.fullmatch(r"[A-Za-z]{3}", currency):
        raise AdvisorError(f"{where}: currency must be three letters, such as USD")
    for name, value in table.items():
        if name == "currency":
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= MAX_AN_HOUR:
            raise AdvisorError(f"{where}: {name[:60]} must be what an hour costs, such as 2.50")
        if not _words(name):
            raise AdvisorError(f"{where}: {name[:60]!r} is no name of a GPU")
        prices[name] = float(value)
    return Prices(prices, currency.upper(), where)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.casefold()))


def format_money(amount: float, currency: str) -> str:
    """Return an amount with its currency, three digits at least: ``$0.00125``, ``12.40 CHF``."""
    decimals = 2
    if amount and abs(amount) < 1:
        decimals = min(12, 2 - math.floor(math.log10(abs(amount))))
    number = f"{amount:,.{decimals}f}"
    symbol = next((sign for sign, code in SYMBOLS.items() if code == currency), None)
    return f"{symbol}{number}" if symbol else f"{number} {currency}"
