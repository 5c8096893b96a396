"""Which rank a page shows, as links."""

from __future__ import annotations

from typing import Any

from advisor.dashboard.current import View
from advisor.dashboard.parts import choices

MOST = 64


def rank_choice(view: View, path: str, **query: object) -> Any:
    """The ranks to choose from; ``None`` when there is one."""
    numbers = list(view.loaded.analyses)
    if len(numbers) < 2:
        return None
    here = view.rank if view.rank is not None else numbers[0]
    return choices(
        "Rank",
        [(str(n), view.href(path, rank=n, **query), n == here) for n in numbers[:MOST]],
    )
