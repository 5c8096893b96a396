"""Builders of small traces in code, for rule authors and tests."""

from advisor.testing.builder import TraceBuilder

Examples = dict[str, TraceBuilder | tuple[TraceBuilder, str]]
"""Example traces by name, as in ``Rule.examples``."""

__all__ = ["Examples", "TraceBuilder"]
