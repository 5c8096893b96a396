"""Which rank a page shows: links for a few, a list to search for many."""

from __future__ import annotations

from typing import Any

import dash
import dash_mantine_components as dmc
from dash import ClientsideFunction, Input, Output, State

from advisor.dashboard.current import View
from advisor.dashboard.dom import el
from advisor.dashboard.parts import choices

MOST_LINKS = 8
SELECT = "rank-select"


def rank_choice(view: View, path: str) -> Any:
    """The ranks to choose from; ``None`` when there is one."""
    numbers = list(view.loaded.analyses)
    if len(numbers) < 2:
        return None
    here = view.rank if view.rank is not None else numbers[0]
    if len(numbers) <= MOST_LINKS:
        return choices("Rank", [(str(n), view.href(path, rank=n), n == here) for n in numbers])
    make: Any = dmc.Select
    chosen = make(
        id=SELECT,
        data=[{"value": str(n), "label": f"rank {n}"} for n in numbers],
        value=str(here),
        searchable=True,
        allowDeselect=False,
        nothingFoundMessage="No such rank",
        w=180,
        size="sm",
        **{"aria-label": "Rank"},
    )
    return el("Div", chosen, cls="choices")


def register(app: dash.Dash) -> None:
    """A rank that is chosen from the list goes into the address, in the browser."""
    app.clientside_callback(
        ClientsideFunction("advisor", "chooseRank"),
        Output("_pages_location", "search"),
        Input(SELECT, "value"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
