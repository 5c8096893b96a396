"""advisor: why a PyTorch training step is slow, what to change, and what the change is worth.

The public names, loaded when first used, so that ``import advisor`` stays cheap inside somebody
else's training process: no polars, dash or torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.advice.engine import analyze
    from advisor.analysis import Analysis
    from advisor.errors import AdvisorError
    from advisor.fleet.job import study as analyze_job
    from advisor.ingest import open_run as open  # noqa: A004
    from advisor.model import Edit, Finding, Select, Worth
    from advisor.recording.api import phase, profile, record, step
    from advisor.rule import Rule
    from advisor.trace import Run, Trace
    from advisor.whatif.result import what_if as whatif

__version__ = "0.1.0"

_HOME = {
    "AdvisorError": ("advisor.errors", "AdvisorError"),
    "Analysis": ("advisor.analysis", "Analysis"),
    "Edit": ("advisor.model", "Edit"),
    "Finding": ("advisor.model", "Finding"),
    "Rule": ("advisor.rule", "Rule"),
    "Run": ("advisor.trace", "Run"),
    "Select": ("advisor.model", "Select"),
    "Trace": ("advisor.trace", "Trace"),
    "Worth": ("advisor.model", "Worth"),
    "analyze": ("advisor.advice.engine", "analyze"),
    "analyze_job": ("advisor.fleet.job", "study"),
    "open": ("advisor.ingest", "open_run"),
    "phase": ("advisor.recording.api", "phase"),
    "profile": ("advisor.recording.api", "profile"),
    "record": ("advisor.recording.api", "record"),
    "step": ("advisor.recording.api", "step"),
    "whatif": ("advisor.whatif", ""),  # the package itself: it can be called
}

__all__ = [
    "AdvisorError",
    "Analysis",
    "Edit",
    "Finding",
    "Rule",
    "Run",
    "Select",
    "Trace",
    "Worth",
    "__version__",
    "analyze",
    "analyze_job",
    "open",
    "phase",
    "profile",
    "record",
    "step",
    "whatif",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module on first use (PEP 562)."""
    try:
        module, attribute = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'advisor' has no attribute {name!r}") from None
    home = import_module(module)
    value = getattr(home, attribute) if attribute else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
