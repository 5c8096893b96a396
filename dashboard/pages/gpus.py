"""Cost and GPUs: cost of the steps here, and their projected time and cost on other GPUs."""

from typing import Any

import dash

from advisor.advise.report_text import describe_cost, describe_energy
from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.prices import Prices, format_money, read_prices
from advisor.core.report import Report
from advisor.dashboard import components as ui
from advisor.dashboard import page_view
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

GRID_HEIGHT_PX = 480
"""Height of the grid, pixels. A dozen GPUs are visible without scrolling."""
PRICE_UNKNOWN = "unknown: pass --price 2.50/h, or --prices FILE with a price for each GPU"
GPU_NOT_LISTED = "unknown: the given prices do not list this GPU"
ENERGY_REMEDY = "advisor record samples it on NVIDIA GPUs"


def has_content(view: PageView) -> bool:
    """Return whether there is GPU work to project, a cost, or an energy."""
    if view.entry.loaded is None:
        return True
    report, a = view.loaded.report, view.analysis
    return a.hardware is not None or bool(describe_cost(report) or describe_energy(report))


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    report = view.loaded.report
    cost_parts, energy_parts = describe_cost(report), describe_energy(report)
    try:
        prices = view.session.options.prices or read_prices()
    except AdvisorError as error:
        return ui.empty_page("Cost and GPUs", "The prices cannot be read", labels.clean(str(error)))
    cost_unknown = GPU_NOT_LISTED if prices.table else PRICE_UNKNOWN
    costs = ui.card(
        "This run",
        ui.fact_list(
            [
                ("Cost", labels.clean(" · ".join(cost_parts)) if cost_parts else cost_unknown),
                (
                    "Energy",
                    labels.clean(" · ".join(energy_parts))
                    if energy_parts
                    else f"{t.NOT_MEASURED}: {ENERGY_REMEDY}",
                ),
            ]
        ),
    )
    try:
        projector, choices = view.loaded.get_or_compute(
            ("gpus", view.rank), lambda: _project(view, prices)
        )
    except AdvisorError as error:
        reason = labels.clean(str(error)).removeprefix(
            f"{labels.clean(view.analysis.trace.meta.path)}: "
        )
        reason = reason.replace("--recorded-gpu NAME", "advisor dashboard --recorded-gpu NAME")
        reason_notice = ui.empty_state(
            "This step cannot be projected to another GPU", t.upper_first(reason)
        )
        return ui.page(ui.page_heading("Cost and GPUs"), costs, reason_notice)
    headline = cheapest = describe_cheapest(choices)
    ratios = [
        f"{choice.projection.speedup:.2f}" for choice in choices if not choice.projection.refused
    ]
    if ratios.count("1.00") > 1 and max(map(float, ratios)) <= 1:  # no GPU is faster than this one
        no_gain = "No GPU is expected to make this step faster: the host limits it."
        headline = ". ".join(filter(None, (headline, no_gain)))
    notes = dict.fromkeys(note for choice in choices for note in choice.projection.notes)
    return ui.page(
        ui.page_heading("Cost and GPUs", labels.clean(t.upper_first(headline))),
        ui.banner([_explain_missing_costs(prices)] if not cheapest and prices.table else []),
        costs,
        _gpu_card(choices, prices, _step_name(report)),
        ui.card(
            "How the ranges are estimated",
            ui.element(
                "P",
                f"Measured on {labels.clean(projector.recorded_gpu.name)}: "
                f"{t.format_duration(projector.a.step_ns)} "
                f"per {_step_name(report)}. {RESTS_ON}. Other hosts add to the range "
                "(docs/project.md).",
            ),
            ui.expander(
                f"{t.count_noun(len(notes), 'note')} on single GPUs",
                ui.element("Ul", *(ui.element("Li", labels.clean(note)) for note in notes)),
            )
            if notes
            else None,
        ),
    )


def _project(view: PageView, prices: Prices) -> tuple[Projector, tuple[TargetGpu, ...]]:
    """Project the step to all GPUs that have data, with their costs."""
    projector = Projector(view.analysis)
    return projector, choose_gpus(projector, offered_gpus(prices))


def _explain_missing_costs(prices: Prices) -> str:
    """Write why costs are not compared."""
    if ANY in prices.table:
        return (
            "--price covers this GPU only. To compare costs, pass --prices FILE or set "
            "[tool.advisor.prices] in pyproject.toml."
        )
    return "None of these GPUs has a price in the given table, so costs are not compared."


GRID_ID = "gpu-grid"
COLUMNS = (
    Column("gpu", "GPU", 224),
    duration_column("step_ns", "Step", 96),
    duration_column("low_ns", "At best", 96),
    duration_column("high_ns", "At worst", 96),
    Column(
        "speedup",
        "Speedup",
        90,
        number_format=lambda ratio: t.EMPTY_CELL if ratio is None else f"{ratio:.2f}×",
    ),
    Column("runs", "Memory, or why it cannot run there", flex=2),
)


def _step_name(report: Report) -> str:
    """Name the projected step. It is the trace's step, which may differ from the report's."""
    differs = report.step is not None and report.step.window_differs
    return "profiled step" if differs else "step"


def _gpu_card(choices: tuple[TargetGpu, ...], prices: Prices, step: str) -> Any:
    """Build the card of the projected step on other GPUs."""
    with_costs = any(choice.price is not None for choice in choices)
    columns = (*COLUMNS[:-1], *(_cost_columns(prices) if with_costs else ()), COLUMNS[-1])
    return ui.card(
        f"The {step} on other GPUs",
        grid(
            GRID_ID,
            columns,
            grid_rows(columns, map(_grid_row, choices)),
            height=GRID_HEIGHT_PX,
            label="GPUs",
        ),
        aside=f"projected, {'cheapest' if with_costs else 'fastest'} first",
    )


def _cost_columns(prices: Prices) -> list[Column]:
    """Build the columns of cost: per hour, and per million steps with its range."""

    def format_amount(amount: float | None) -> str:
        return t.EMPTY_CELL if amount is None else format_money(amount, prices.currency)

    titles = {
        "price": "Per hour",
        "cost": "Million steps",
        "low_cost": "Cost at best",
        "high_cost": "Cost at worst",
    }
    return [
        Column(
            field, title, 104, number_format=format_amount, csv_title=f"{title}, {prices.currency}"
        )
        for field, title in titles.items()
    ]


def _grid_row(choice: TargetGpu) -> dict[str, Any]:
    """Build a row of the grid. A GPU that cannot run the step has no times."""
    projection, can_run = choice.projection, not choice.projection.refused
    return {
        **choice._asdict(),
        "gpu": projection.gpu,
        "runs": projection.refused or projection.fit.verdict,
        **{
            field: getattr(projection, field) if can_run else None
            for field in ("step_ns", "low_ns", "high_ns", "speedup")
        },
    }


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Register the search field of the grid."""
    register_search(app, GRID_ID)
