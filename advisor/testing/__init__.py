"""Small traces written as code, for rule authors and tests."""

from __future__ import annotations

from advisor.testing.builder import TraceBuilder

__all__ = ["TraceBuilder"]
