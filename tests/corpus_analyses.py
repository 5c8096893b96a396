"""Analyses of the files of ``tests/corpus``, for all tests of a process.

An analysis of a real file takes seconds, and dozens of tests look at each file. ``conftest`` puts
tests of one file one after the other, so that a few results kept are enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from benchmarks.public_traces import CORPUS

SUFFIXES = (".json.gz", ".sqlite.gz", ".sqlite", ".gz", "")


@lru_cache(maxsize=3)
def examined(path: str) -> Any:
    """The ``AnalysisResult`` of a file or folder, under the settings as delivered."""
    from advisor.advise.engine import Options, examine

    return examine(path, Options(config={}))


@cache
def _names() -> frozenset[str]:
    """Names of all files and folders, without the suffixes that tests leave out."""
    return frozenset(_without_suffix(p.relative_to(CORPUS).as_posix()) for p in CORPUS.rglob("*"))


def _without_suffix(name: str) -> str:
    return name.removesuffix(next(suffix for suffix in SUFFIXES if name.endswith(suffix)))


def file_among(values: Iterable[object]) -> str:
    """Name of the file of the corpus that is one of a test's parameters; "" if none is."""
    for value in values:
        if isinstance(value, str | Path) and str(value):
            name = _without_suffix(str(value).removeprefix(f"{CORPUS}/"))
            for each in (name, f"h100/{name}"):
                if each in _names():
                    return each
    return ""
