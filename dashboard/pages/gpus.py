"""Cost and GPUs: cost of the steps here, and their projected time and cost on other GPUs."""

from typing import Any

import dash

from advisor.advise.report_text import describe_cost, describe_energy
from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.prices import Prices, format_money, read_prices
from advisor.core.report import Report
from advisor.dashboard import page_view
from advisor.dashboard.components import (
    banner,
    card,
    element,
    empty_page,
    empty_state,
    fact_list,
    foldable,
    head,
    page,
)
from advisor.dashboard.grid import Column, duration_column, grid, grid_rows, register_search
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import PageView
from advisor.replay.project.project import (
    ANY,
    RESTS_ON,
    Projector,
    TargetGpu,
    choose_gpus,
    describe_cheapest,
    offered_gpus,
)

SHOWN_PX = 480
"""Height of the table, pixels: a dozen GPUs, the others by scrolling or searching."""
NO_PRICE = "unknown: pass --price 2.50/h, or --prices FILE with a price for each GPU"
NOT_THIS_GPU = "unknown: the given prices do not list this GPU"
NO_ENERGY = "advisor record samples it on NVIDIA GPUs"


def has_content(view: PageView) -> bool:
    """Return whether there is GPU work to project, or a cost or energy."""
    if view.entry.loaded is None:
        return True
    report, a = view.loaded.report, view.analysis
    return a.hardware is not None or bool(describe_cost(report) or describe_energy(report))


def layout(**query: object) -> Any:
    view = page_view.view(**query)
    report = view.loaded.report
    paid, used = describe_cost(report), describe_energy(report)
    try:
        prices = view.session.options.prices or read_prices()
    except AdvisorError as error:
        return empty_page("Cost and GPUs", "The prices cannot be read", labels.clean(str(error)))
    unpaid = NOT_THIS_GPU if prices.table else NO_PRICE
    costs = card(
        "This run",
        fact_list(
            [
                ("Cost", labels.clean(" · ".join(paid)) if paid else unpaid),
                (
                    "Energy",
                    labels.clean(" · ".join(used)) if used else f"{t.NOT_MEASURED}: {NO_ENERGY}",
                ),
            ]
        ),
    )
    try:
        projector, choices = view.loaded.cached(
            ("gpus", view.rank), lambda: _projected(view, prices)
        )
    except AdvisorError as error:
        reason = labels.clean(str(error)).removeprefix(
            f"{labels.clean(view.analysis.trace.meta.path)}: "
        )
        reason = reason.replace("--recorded-gpu NAME", "advisor dashboard --recorded-gpu NAME")
        why = empty_state("This step cannot be projected to another GPU", t.upper_first(reason))
        return page(head("Cost and GPUs"), costs, why)
    best = cheapest = describe_cheapest(choices)
    ratios = [f"{each.projection.speedup:.2f}" for each in choices if not each.projection.refused]
    if ratios.count("1.00") > 1 and max(map(float, ratios)) <= 1:  # others, as fast as this one
        none = "No GPU is expected to make this step faster: the host limits it."
        best = ". ".join(filter(None, (best, none)))
    notes = dict.fromkeys(note for choice in choices for note in choice.projection.notes)
    return page(
        head("Cost and GPUs", labels.clean(t.upper_first(best))),
        banner([_no_other(prices)] if not cheapest and prices.table else []),
        costs,
        _other_gpus(choices, prices, _step(report)),
        card(
            "How the ranges are estimated",
            element(
                "P",
                f"Measured on {labels.clean(projector.recorded_gpu.name)}: "
                f"{t.format_duration(projector.a.step_ns)} "
                f"per {_step(report)}. {RESTS_ON}. Other hosts add to the range "
                "(docs/project.md).",
            ),
            foldable(
                f"{t.count_noun(len(notes), 'note')} on single GPUs",
                element("Ul", *(element("Li", labels.clean(note)) for note in notes)),
            )
            if notes
            else None,
        ),
    )


def _projected(view: PageView, prices: Prices) -> tuple[Projector, tuple[TargetGpu, ...]]:
    projector = Projector(view.analysis)
    return projector, choose_gpus(projector, offered_gpus(prices))


def _no_other(prices: Prices) -> str:
    if ANY in prices.table:
        return (
            "--price covers this GPU only. To compare costs, pass --prices FILE or set "
            "[tool.advisor.prices] in pyproject.toml."
        )
    return "None of these GPUs has a price in the given table, so costs are not compared."


GRID = "gpu-grid"
COLUMNS = (
    Column("gpu", "GPU", 224),
    duration_column("step_ns", "Step", 96),
    duration_column("low_ns", "At best", 96),
    duration_column("high_ns", "At worst", 96),
    Column(
        "speedup",
        "Speedup",
        90,
        number=lambda ratio: t.EMPTY_CELL if ratio is None else f"{ratio:.2f}×",
    ),
    Column("runs", "Memory, or why it cannot run there", flex=2),
)


def _step(report: Report) -> str:
    """Name the step that is projected: the trace's, which need not be the one that leads."""
    differs = report.step is not None and report.step.window_differs
    return "profiled step" if differs else "step"


def _other_gpus(choices: tuple[TargetGpu, ...], prices: Prices, step: str) -> Any:
    with_costs = any(choice.price is not None for choice in choices)
    columns = (*COLUMNS[:-1], *(_cost_columns(prices) if with_costs else ()), COLUMNS[-1])
    return card(
        f"The {step} on other GPUs",
        grid(
            GRID, columns, grid_rows(columns, map(_values, choices)), height=SHOWN_PX, label="GPUs"
        ),
        aside=f"projected, {'cheapest' if with_costs else 'fastest'} first",
    )


def _cost_columns(prices: Prices) -> list[Column]:
    """Return columns of money: an hour, and a million steps with their range."""

    def write(amount: float | None) -> str:
        return t.EMPTY_CELL if amount is None else format_money(amount, prices.currency)

    titles = {
        "price": "Per hour",
        "cost": "Million steps",
        "low_cost": "Cost at best",
        "high_cost": "Cost at worst",
    }
    return [
        Column(field, title, 104, number=write, csv=f"{title}, {prices.currency}")
        for field, title in titles.items()
    ]


def _values(choice: TargetGpu) -> dict[str, Any]:
    """Return a row of the grid; a GPU that cannot run the step has no times."""
    projection, runs = choice.projection, not choice.projection.refused
    return {
        **choice._asdict(),
        "gpu": projection.gpu,
        "runs": projection.refused or projection.fit.verdict,
        **{
            field: getattr(projection, field) if runs else None
            for field in ("step_ns", "low_ns", "high_ns", "speedup")
        },
    }


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Let the field above the grid search it."""
    register_search(app, GRID)
