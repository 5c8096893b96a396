"""Readers of trace files, one per file format, and the code that they share."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.read.directory import open_run
    from advisor.read.reader import ReadOptions
    from advisor.read.registry import read_trace

__all__ = ["ReadOptions", "open_run", "read_trace"]

_MODULE_OF = {
    "ReadOptions": "advisor.read.reader",
    "open_run": "advisor.read.directory",
    "read_trace": "advisor.read.registry",
}


def __getattr__(name: str) -> Any:
    """Import an attribute on first use, so that decoding processes need not import polars."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
