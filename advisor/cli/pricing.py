"""The options that say what an hour of a GPU costs, of all commands that measure steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.core.prices import Prices

Price = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        help="An hour of one GPU, such as 2.50/h or '2.50 EUR/h': steps and fixes have their cost.",
    ),
]
PriceTable = Annotated[
    Path | None,
    typer.Option(
        "--prices",
        metavar="FILE",
        help="Prices by the GPU's name, as TOML (else [tool.advisor.prices] of pyproject.toml).",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", min=1, help="GPUs that are paid for; default: one a rank."),
]


OPTIONS = "--price, --prices"
SAVED = "a saved report has the cost that it was made with; give the trace"


def chosen(price: str | None, table: Path | None) -> Prices | None:
    """What was given; ``None``: nothing, and pyproject.toml may say. Raises AdvisorError."""
    if price is None and table is None:
        return None
    from advisor.core.prices import parse_price, read_prices

    if price is not None and table is not None:
        raise AdvisorError("--price and --prices: give one of them")
    return parse_price(price) if price is not None else read_prices(table)
