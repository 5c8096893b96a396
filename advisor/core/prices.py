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
    """Number of measured steps."""


class EnergyUse(Struct, frozen=True, kw_only=True):
    """Energy of the GPUs during unprofiled steps. It is of whole boards, including other users of
    them, without hosts."""

    joules: float | None
    """Energy per step of all ranks, each GPU once, J, or ``null`` if some were not measured."""
    watts: float | None
    """Mean power of all ranks, W, or ``null`` if some were not measured."""
    ranks: list[RankEnergy]
    """Energy of each measured rank."""


class FixCost(Struct, frozen=True, kw_only=True):
    """Saving of a finding's fix in money, after the fixes ranked before it."""

    rule: str
    """Rule of the finding."""
    priority: int
    """Priority of the finding."""
    step: float
    """Money saved per step, in the currency."""


class Cost(Struct, frozen=True, kw_only=True):
    """Cost in money: only the step time times the price of an hour."""

    currency: str
    """Currency, three letters."""
    per_hour: float
    """Price of one GPU per hour."""
    gpus: int
    """Number of GPUs that are paid for."""
    source: str
    """Source of the price."""
    step: float
    """Cost per step of all GPUs."""
    run: float | None
    """Cost of the recorded run, from the first to the last step, or ``null`` for a trace alone."""
    step_after: float | None
    """Cost per step after all ranked fixes, or ``null`` if none has a gain."""
    bound: bool
    """Whether gains are upper bounds, so that ``step_after`` is a lower bound."""
    fixes: list[FixCost] = field(default_factory=list)
    """Savings of the fixes, by priority."""


SYMBOLS = {"$": "USD", "€": "EUR", "£": "GBP"}
DEFAULT_CURRENCY = "USD"
MAX_PER_HOUR = 1e6

_PRICE_PATTERN = re.compile(
    r"([$€£]?)\s*(\d{1,7}(?:\.\d{1,9})?)\s*([A-Za-z]{3})?\s*(?:/\s*(?:h|hr|hour))?", re.ASCII
)


class GpuPrice(NamedTuple):
    """Price per hour of one GPU, or of a machine without GPUs."""

    per_hour: float
    currency: str
    """Currency, three letters."""
    source: str
    """Source: ``--price``, or a file with the name in its table."""


class Prices(NamedTuple):
    """Prices per GPU-hour: by GPU name, or one for any GPU."""

    table: Mapping[str, float]
    """Price per hour of one GPU, by its name or some words of it."""
    currency: str
    source: str

    def price_of(self, device_name: str | None) -> GpuPrice | None:
        """Return the price of a GPU, or ``None`` if the table has none. Of all names whose words
        are in the device name, the longest counts. So ``A100`` does not match ``A1000``.

        Raises AdvisorError if two names match equally well and have different prices."""
        if "" in self.table:
            return GpuPrice(self.table[""], self.currency, self.source)
        if device_name is None:
            return None
        words = _split_words(device_name)
        matches = [
            (len(_split_words(name)), name) for name in self.table if _split_words(name) <= words
        ]
        if not matches:
            return None
        max_words = max(count for count, _ in matches)
        best = [name for count, name in matches if count == max_words]
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
    match = _PRICE_PATTERN.fullmatch(text.strip())
    if match is None or (match[1] and match[3]):
        raise AdvisorError(f"--price {text[:60]}: expected a price per GPU-hour, such as 2.50/h")
    currency = (match[3] or SYMBOLS.get(match[1], DEFAULT_CURRENCY)).upper()
    return Prices({"": float(match[2])}, currency, "--price")


def read_prices(file: Path | None = None) -> Prices:
    """Read a table of prices from a TOML file, or ``[tool.advisor.prices]`` of the nearest
    ``pyproject.toml``. Its keys are GPU names, except ``currency``. Raises AdvisorError."""
    if file is None:
        result, table = tool_section("prices")
        where = "" if result is None else f"{result.name}: [tool.advisor.prices]"
    else:
        content = read_toml(file)
        entries = {name: value for name, value in content.items() if name != "instances"}
        table, where = content.get("prices", entries), str(file)
    return _parse_table(table, where)


def _parse_table(table: object, where: str) -> Prices:
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
        if not number or not math.isfinite(value) or not 0 <= value <= MAX_PER_HOUR:
            raise AdvisorError(f"{where}: {name[:60]} must be what an hour costs, such as 2.50")
        if not _split_words(name):
            raise AdvisorError(f"{where}: {name[:60]!r} is not the name of a GPU")
        prices[name] = float(value)
    return Prices(prices, currency.upper(), where)


def _split_words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.casefold()))


def format_money(amount: float, currency: str) -> str:
    """Return an amount with its currency and at least three digits: ``$0.00125``, ``12.40 CHF``."""
    decimals = 2
    if amount and abs(amount) < 1:
        decimals = min(12, 2 - math.floor(math.log10(abs(amount))))
    number = f"{amount:,.{decimals}f}"
    symbol = next((sign for sign, code in SYMBOLS.items() if code == currency), None)
    return f"{symbol}{number}" if symbol else f"{number} {currency}"
