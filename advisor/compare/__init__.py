"""Comparison of two runs: what became faster or slower, whether fixes did it, and a gate for CI.

The package is called like its function: ``advisor.compare("before.json.gz", "after.json.gz")``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from advisor.compare.compare import compare, compare_examined
from advisor.compare.comparison import SCHEMA, Comparison

if TYPE_CHECKING:
    from advisor.advise.options import Options
    from advisor.compare.compare import RunOrFiles
    from advisor.core.report import Report

__all__ = ["SCHEMA", "Comparison", "compare", "compare_examined"]


class _CallablePackage(ModuleType):
    def __call__(
        self,
        before: RunOrFiles | Report,
        after: RunOrFiles | Report,
        options: Options | None = None,
    ) -> Comparison:
        return compare(before, after, options)


sys.modules[__name__].__class__ = _CallablePackage
