"""Puts the hot Python lines of Scalene's pass into the findings that they explain."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError
from advisor.core.finding import Evidence, Finding, Location
from advisor.core.run_directory import SCALENE

if TYPE_CHECKING:
    from advisor.core.finding import HotLine
    from advisor.measure import Analysis

LIMIT = 3
"""Lines that a finding gets."""
_DATA = re.compile(
    r"__getitems?__|__iter__|__next__|collate|transform|augment|decode|load_|read_|preprocess"
    r"|tokeniz|\bforward_data\b|[Dd]ata[Ss]et|[Dd]ata[Ll]oader"
)
"""Functions that prepare data: their lines explain waits for it."""


def hot_lines(a: Analysis) -> tuple[list[HotLine], list[str]]:
    """Lines from ``scalene.json`` of the rank's folder, and what was wrong with it."""
    if a.record is None or not a.record.folder:
        return [], []
    file = Path(a.record.folder) / SCALENE
    if not file.is_file():
        return [], []
    from advisor.read.scalene import read_scalene

    try:
        return read_scalene(file), []
    except AdvisorError as error:
        return [], [str(error)]


def explain(findings: Iterable[Finding], lines: list[HotLine], python: set[str]) -> None:
    """Add the hottest lines to findings about loading data and about Python in the loop.

    ``python``: rules whose time is that of Python in the loop, outside the loader. Findings that
    already name a line of the user's code keep it in front.
    """
    data = [line for line in lines if _DATA.search(line.function or "")]
    rest = [line for line in lines if line not in data]
    for finding in findings:
        if finding.category == "input":
            chosen = data[:LIMIT]
        elif finding.rule in python:
            chosen = rest[:LIMIT]
        else:
            continue
        known = {(place.file, place.line) for place in finding.where}
        places = [
            Location(file=line.file, line=line.line, function=line.function)
            for line in chosen
            if (line.file, line.line) not in known
        ]
        named = any(place.file is not None for place in finding.where)
        finding.where = [*finding.where, *places] if named else [*places, *finding.where]
        for line in chosen:
            finding.evidence.append(
                Evidence(
                    f"hot line {Path(line.file).name}:{line.line} (Scalene)",
                    line.share,
                    "share",
                    source="share of all CPU samples of a separate pass",
                )
            )
