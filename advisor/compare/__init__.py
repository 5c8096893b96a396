"""Comparison of two runs: what became faster or slower, whether fixes did it, and a gate for CI."""

from __future__ import annotations

from advisor.compare.compare import compare, compare_examined
from advisor.compare.comparison import SCHEMA, Comparison

__all__ = ["SCHEMA", "Comparison", "compare", "compare_examined"]
