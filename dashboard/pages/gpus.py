"""Cost and GPUs: cost of the steps here, and their projected time and cost on other GPUs."""

from __future__ import annotations

from typing import Any

from advisor.advise.facts import cost, energy
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.prices import Prices, money, read_prices
from advisor.dashboard import current
from advisor.dashboard.current import PageView
from advisor.dashboard.parts import banner, card, el, empty, facts, fold, head, page, table
from advisor.replay.project.choice import ANY, RESTS_ON, Choice, cheapest, choose, offered
from advisor.replay.project.project import Projector

MAX_SHOWN = 12
"""GPUs in the first table."""
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
    costs = card(
        "This run",
        facts(
            [
                ("Cost", t.clean(" · ".join(paid)) if paid else unpaid),
                ("Energy", t.clean(" · ".join(used)) if used else f"{t.NOT_MEASURED}: {NO_ENERGY}"),
            ]
        ),
    )
    try:
        projector, choices = view.loaded.view(("gpus", view.rank), lambda: _projected(view, prices))
    except AdvisorError as error:
        why = empty("This step cannot be projected to another GPU", t.clean(str(error)))
        return page(head("Cost and GPUs"), costs, why)
    best = cheapest(choices)
    notes = dict.fromkeys(note for choice in choices for note in choice.projection.notes)
    return page(
        head("Cost and GPUs", t.clean(best[:1].upper() + best[1:])),
        banner([] if best else [_no_prices(prices)]),
        costs,
        _other_gpus(choices, prices),
        card(
            "How the ranges are estimated",
            el(
                "P",
                f"Measured on {t.clean(projector.source.name)}: "
                f"{t.format_duration(projector.a.step_ns)} per "
                f"step. {RESTS_ON}. Other hosts add to the range (docs/project.md).",
            ),
            fold(
                f"{t.count_noun(len(notes), 'note')} on single GPUs",
                el("Ul", *(el("Li", t.clean(note)) for note in notes)),
            )
            if notes
            else None,
        ),
    )


def _projected(view: PageView, prices: Prices) -> tuple[Projector, tuple[Choice, ...]]:
    projector = Projector(view.analysis)
    return projector, choose(projector, offered(prices))


def _no_prices(prices: Prices) -> str:
    if ANY in prices.table:
        return (
            "--price covers this GPU only. To compare costs, pass --prices FILE or set "
            "[tool.advisor.prices] in pyproject.toml."
        )
    return (
        "No GPU has a price, so costs are unknown. Pass --prices FILE or set "
        "[tool.advisor.prices] in pyproject.toml."
    )


def _other_gpus(choices: tuple[Choice, ...], prices: Prices) -> Any:
    """The first GPUs of the list; the others are folded."""
    with_costs = any(choice.price is not None for choice in choices)
    order = f"Projected, {'cheapest' if with_costs else 'fastest'} first"
    first, others = choices[:MAX_SHOWN], choices[MAX_SHOWN:]
    return card(
        "The step on other GPUs",
        _table(first, prices, order, with_costs=with_costs),
        fold(f"{len(others)} more GPUs", _table(others, prices, "More GPUs", with_costs=with_costs))
        if others
        else None,
    )


def _table(choices: tuple[Choice, ...], prices: Prices, caption: str, *, with_costs: bool) -> Any:
    header = [*HEAD, *(["per hour", "per million steps", "range"] if with_costs else [])]
    rows = [_row(choice, prices, with_costs=with_costs) for choice in choices]
    return table(header, rows, numbers=range(1, len(header)), caption=caption, stacked=True)


def _row(choice: Choice, prices: Prices, *, with_costs: bool) -> list[str]:
    projection = choice.projection
    row = [t.clean(projection.gpu)]
    if projection.refused:
        row += [t.clean(projection.refused), "–", "–"]
    else:
        row += [
            t.format_duration(projection.step_ns),
            t.format_range(projection.low_ns, projection.high_ns),
            f"{projection.speedup:.2f}×",
        ]
    row.append(projection.fit.verdict)
    if with_costs:
        low, high = _money(choice.low_cost, prices), _money(choice.high_cost, prices)
        row += [
            _money(choice.price, prices),
            _money(choice.cost, prices),
            "–" if "–" in (low, high) else f"{low} to {high}",
        ]
    return row


def _money(amount: float | None, prices: Prices) -> str:
    return "–" if amount is None else money(amount, prices.currency)
