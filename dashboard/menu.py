"""The pages of the dashboard, in the order of its navigation."""

from __future__ import annotations

from typing import NamedTuple


class Page(NamedTuple):
    """One page: its module in ``advisor.dashboard.pages`` has ``layout(**query)``; if it has
    callbacks, ``register(app, session)``; if its tables take long, ``warm(loaded)``."""

    module: str
    path: str
    name: str


PAGES = (
    Page("overview", "/", "Overview"),
    Page("job", "/job", "Job"),
    Page("findings", "/findings", "Findings"),
    Page("timeline", "/timeline", "Timeline"),
    Page("kernels", "/kernels", "Kernels and ops"),
    Page("memory", "/memory", "Memory"),
    Page("distributed", "/distributed", "Distributed"),
    Page("run", "/run", "Run"),
    Page("trials", "/trials", "Trials"),
    Page("gpus", "/gpus", "Cost and GPUs"),
    Page("compare", "/compare", "Compare"),
    Page("live", "/live", "Live"),
)
