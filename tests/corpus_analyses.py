"""Analyses of recordings that no test changes, each made once for many tests.

An analysis of a real file takes seconds, and dozens of tests look at each file. ``conftest`` puts
tests of one file one after the other, so that a few results kept are enough; reports, which are
small, are kept for the whole run and all its processes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

from advisor.advise import engine
from advisor.advise.engine import AnalysisResult, Options
from advisor.advise.rule_loading import read_config
from advisor.core.prices import read_prices
from advisor.core.report import Report
from benchmarks.public_traces import CORPUS

SUFFIXES = (".json.gz", ".sqlite.gz", ".sqlite", ".gz", "")
RECORDED = [CORPUS, CORPUS.parent / "data"]
"""Folders whose files no test changes; fixtures that make a file for many tests add theirs."""
MAX_KEPT = 4
"""Results that a process keeps: some hold a gigabyte."""

reports: Path | None = None
"""Folder of the reports of this run."""
patched: Callable[[], bool] = lambda: False  # noqa: E731
"""True while a test has replaced something: what it analyses is analysed anew."""
_kept: OrderedDict[str, AnalysisResult] = OrderedDict()


def analyze_cached(path: str) -> AnalysisResult:
    """The result for a file or folder, under the settings as delivered."""
    return engine.analyze_in_full(path, Options(config={}))


def share() -> None:
    """Let an analysis of such a recording be the one that was made before."""
    analyze_in_full, analyze = engine.analyze_in_full, engine.analyze

    @wraps(analyze_in_full)
    def examine_once(source: Any, options: Any = None, on_read: Any = None) -> AnalysisResult:
        key = _cache_key(source, options)
        if key is None:
            return analyze_in_full(source, options, on_read)
        if key in _kept:
            _kept.move_to_end(key)
            if on_read is not None:
                on_read()
        else:
            _kept[key] = analyze_in_full(source, options, on_read)
            while len(_kept) > MAX_KEPT:
                _kept.popitem(last=False)
        return _kept[key]

    @wraps(analyze)
    def analyze_once(source: Any, options: Any = None) -> Report:
        key = _cache_key(source, options)
        if key is None or reports is None:
            return analyze(source, options)
        file = reports / hashlib.sha256(key.encode()).hexdigest()
        if not file.exists():
            part = file.with_suffix(f".{id(key)}")
            part.write_bytes(engine.analyze_in_full(source, options).report.to_json())
            part.replace(file)
        return Report.from_json(file.read_bytes())

    engine.analyze_in_full, engine.analyze = examine_once, analyze_once


def _cache_key(source: Any, options: Options | None) -> str | None:
    """All that a result depends on; None: it is of other files, or may differ."""
    options = options or Options()
    several = isinstance(source, Sequence) and not isinstance(source, str)
    sources = [str(each) for each in (source if several else (source,))]
    is_recorded = all(any(Path(each).is_relative_to(f) for f in RECORDED) for each in sources)
    if not is_recorded or options.workers or options.cluster or options.read.peek or patched():
        return None
    quiet = replace(options.read, progress=None)
    config = read_config() if options.config is None else options.config
    prices = read_prices() if options.prices is None else options.prices
    return repr(
        (sources, replace(options, read=quiet, on_progress=None, config=config, prices=prices))
    )


@cache
def _names() -> frozenset[str]:
    """Names of all files and folders, without the suffixes that tests leave out."""
    return frozenset(_without_suffix(p.relative_to(CORPUS).as_posix()) for p in CORPUS.rglob("*"))


def _without_suffix(name: str) -> str:
    return name.removesuffix(next(suffix for suffix in SUFFIXES if name.endswith(suffix)))


def find_corpus_file(values: Iterable[object]) -> str:
    """Find the corpus file among a test's parameters, and return its name; "" without one."""
    for value in values:
        if isinstance(value, str | Path) and str(value):
            name = _without_suffix(str(value).removeprefix(f"{CORPUS}/"))
            for each in (name, f"h100/{name}"):
                if each in _names():
                    return each
    return ""
