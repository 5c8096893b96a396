"""Cost and GPUs: cost of the steps here, and their projected time and cost on other GPUs."""

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

HEAD = ("GPU", "step", "range", "speedup", "memory")
NO_PRICE = "unknown: pass --price 2.50/h, or --prices FILE with a price for each GPU"
NOT_THIS_GPU = "unknown: the given prices do not list this GPU"
NO_ENERGY = "advisor record samples it on NVIDIA GPUs"


def layout(**query: object) -> Any:
    """The page."""
    view = current.view(**query)
    report = view.loaded.report
    paid, used = cost(report), energy(report)
    try:
        prices = view.session.options.prices or read_prices()
    except AdvisorError as error:
        return page(head("Cost and GPUs"), empty("The prices cannot be read", t.clean(str(error))))
    unpaid = NOT_THIS_GPU if prices.table else NO_PRICE
    told = card(
        "This run",
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
            "How the ranges are estimated",
            el(
                "P",
                f"Measured on {t.clean(projector.source.name)}: "
                f"{t.format_duration(projector.a.step_ns)} per "
                f"step. {RESTS_ON}. Other hosts add to the range (docs/project.md).",
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
            "--price covers this GPU only. To compare costs, pass --prices FILE or set "
            "[tool.advisor.prices] in pyproject.toml."
        )
    return (
        "No GPU has a price, so costs are unknown. Pass --prices FILE or set "
        "[tool.advisor.prices] in pyproject.toml."
    )


def _table(found: tuple[Choice, ...], prices: Prices) -> Any:
    priced = any(c.price is not None for c in found)
    header = [*HEAD, *(["per hour", "per million steps", "range"] if priced else [])]
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
            caption=f"Projected, {'cheapest' if priced else 'fastest'} first",
            stacked=True,
        ),
    )


def _money(amount: float | None, prices: Prices) -> str:
    return "–" if amount is None else money(amount, prices.currency)
