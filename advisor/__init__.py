"""advisor: why a PyTorch training step is slow, what to change, and how much time each fix saves.

The public names, loaded when first used, so that ``import advisor`` stays cheap inside somebody
else's training process: no polars, dash or torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.advise.engine import analyze
    from advisor.advise.options import Options
    from advisor.core.errors import AdvisorError
    from advisor.core.finding import Edit, Finding, Impact, Select
    from advisor.core.rule import Rule
    from advisor.core.trace import Run, Trace
    from advisor.measure import Analysis
    from advisor.read import ReadOptions
    from advisor.read import open_run as open  # noqa: A004
    from advisor.recorder.api import phase, profile, record, step
    from advisor.replay.what_if import what_if as whatif

__version__ = "0.2.0"

_HOME = {
    "AdvisorError": ("advisor.core.errors", "AdvisorError"),
    "Analysis": ("advisor.measure", "Analysis"), "Edit": ("advisor.core.finding", "Edit"),
    "Finding": ("advisor.core.finding", "Finding"),
    "Options": ("advisor.advise.options", "Options"),
    "ReadOptions": ("advisor.read", "ReadOptions"), "Rule": ("advisor.core.rule", "Rule"),
    "Run": ("advisor.core.trace", "Run"), "Select": ("advisor.core.finding", "Select"),
    "Trace": ("advisor.core.trace", "Trace"), "Impact": ("advisor.core.finding", "Impact"),
    "analyze": ("advisor.advise.engine", "analyze"), "compare": ("advisor.compare", "compare"),
    "open": ("advisor.read", "open_run"), "phase": ("advisor.recorder.api", "phase"),
    "profile": ("advisor.recorder.api", "profile"), "record": ("advisor.recorder.api", "record"),
    "step": ("advisor.recorder.api", "step"), "whatif": ("advisor.replay.what_if", "what_if"),
}  # fmt: skip

__all__ = [
    "AdvisorError", "Analysis", "Edit", "Finding", "Impact", "Options", "ReadOptions", "Rule",
    "Run", "Select", "Trace", "__version__", "analyze", "compare", "open", "phase", "profile",
    "record", "step", "whatif",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name from its home module on first use (PEP 562)."""
    try:
        module, attribute = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'advisor' has no attribute {name!r}") from None
    home = import_module(module)
    value = home if callable(home) else getattr(home, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
