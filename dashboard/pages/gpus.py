"""Cost and GPUs: what the steps cost here, and what they would take and cost on another GPU."""

from __future__ import annotations

from typing import Any

from advisor.advise.facts import cost, energy
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.prices import Prices, money, read_prices
from advisor.dashboard import current
from advisor.dashboard.current import PageView
from advisor.dashboard.parts import banner, card, el, empty, facts, head, page, table
from advisor.replay.project.choice import ANY, RESTS_ON, Choice, cheapest, choose, offered
from advisor.replay.project.project import Projector

HEAD = ("GPU", "step", "band", "speed", "memory")
NO_PRICE = (
    "no price was given: advisor dashboard --price 2.50/h, or --prices FILE with a table by the "
    "GPU's name"
)
NOT_THIS_GPU = "the prices that were given have none of this GPU"
NO_ENERGY = "advisor record samples NVML, where there is an NVIDIA GPU"


def layout(**query: object) -> Any:
    """The page."""
    view = current.view(**query)
    report = view.loaded.report
    paid, used = cost(report), energy(report)
    try:
        prices = view.session.options.prices or read_prices()
    except AdvisorError as error:
        return page(head("Cost and GPUs"), empty("No price can be read", t.clean(str(error))))
    unpaid = NOT_THIS_GPU if prices.table else NO_PRICE
    told = card(
        "Here",
        facts(
            [
                ("Cost", t.clean(" · ".join(paid)) if paid else unpaid),
                ("Energy", t.clean(" · ".join(used)) if used else f"{t.NOT_MEASURED}: {NO_ENERGY}"),
            ]
        ),
    )
    try:
        projector, found = view.loaded.view(("gpus", view.rank), lambda: _projected(view, prices))
    except AdvisorError as error:
        why = empty("This step cannot be projected to another GPU", t.clean(str(error)))
        return page(head("Cost and GPUs"), told, why)
    best = cheapest(found)
    notes = dict.fromkeys(note for c in found for note in c.projection.notes)
    return page(
        head("Cost and GPUs", t.clean(best[:1].upper() + best[1:])),
        banner([] if best else [_unpriced(prices)]),
        told,
        _table(found, prices),
        card(
            "What the bands rest on",
            el(
                "P",
                f"Measured on {t.clean(projector.source.name)}: "
                f"{t.format_duration(projector.a.step_ns)} a "
                f"step. {RESTS_ON}; hosts of other machines lie in it too (docs/project.md).",
            ),
            el("Ul", *(el("Li", t.clean(note)) for note in notes)) if notes else None,
        ),
    )


def _projected(view: PageView, prices: Prices) -> tuple[Projector, tuple[Choice, ...]]:
    projector = Projector(view.analysis)
    return projector, choose(projector, offered(prices))


def _unpriced(prices: Prices) -> str:
    if ANY in prices.table:
        return (
            "--price is what this GPU costs. Which one is the cheapest takes a table: --prices "
            "FILE, or [tool.advisor.prices] of pyproject.toml."
        )
    return (
        "No GPU has a price, so which one is the cheapest is not told: --prices FILE with a table "
        "by the GPU's name, or [tool.advisor.prices] of pyproject.toml."
    )


def _table(found: tuple[Choice, ...], prices: Prices) -> Any:
    priced = any(c.price is not None for c in found)
    header = [*HEAD, *(["an hour", "a million steps", "band"] if priced else [])]
    rows = []
    for c in found:
        p = c.projection
        row = [t.clean(p.gpu)]
        if p.refused:
            row += [t.clean(p.refused), "–", "–", p.fit.verdict]
        else:
            row += [
                t.format_duration(p.step_ns),
                t.format_range(p.low_ns, p.high_ns),
                f"{p.speedup:.2f}×",
                p.fit.verdict,
            ]
        if priced:
            row += [
                _money(c.price, prices),
                _money(c.cost, prices),
                "–"
                if c.low_cost is None or c.high_cost is None
                else f"{_money(c.low_cost, prices)} to {_money(c.high_cost, prices)}",
            ]
        rows.append(row)
    return card(
        "The step on other GPUs",
        table(
            header,
            rows,
            numbers=range(1, len(header)),
            caption=f"By projection, the {'cheapest' if priced else 'fastest'} first",
            stacked=True,
        ),
    )


def _money(amount: float | None, prices: Prices) -> str:
    return "–" if amount is None else money(amount, prices.currency)
