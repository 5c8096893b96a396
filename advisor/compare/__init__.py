"""Two runs side by side: what became faster or slower, and whether what was advised did it."""

from __future__ import annotations

from advisor.compare.compare import compare, compare_examined
from advisor.compare.data import SCHEMA, Comparison

__all__ = ["SCHEMA", "Comparison", "compare", "compare_examined"]
