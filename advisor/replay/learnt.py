"""Bands made as wide as the promises of a rule were wrong: what the ledgers hold of it.

Ours (``trials.jsonl``) is of public pairs of traces and of the bundled workloads; so with the
user's own.
Errors of the same hardware are taken where there are enough of them, else all. As in ``bands``:
with n errors, the one in place ⌈0.8 (n + 1)⌉ by size. A band never becomes narrower by this.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from advisor.core.errors import AdvisorError
from advisor.replay import ledger
from advisor.replay.bands import ENOUGH, Band, left_out, spread

OURS = "trials.jsonl"


class Learnt(NamedTuple):
    """A band, and in words what it comes from; empty: too little is known of the rule."""

    band: Band
    told: str


def known() -> tuple[ledger.Entry, ...]:
    """All past trials: ours, and those of the user."""
    name = left_out.get()
    return tuple(one for one in _known() if one.of != name) if name else _known()


def _known() -> tuple[ledger.Entry, ...]:
    path = ledger.user_file()
    try:
        state = path.stat()
    except OSError:
        return shipped()
    return (*shipped(), *_theirs(path, state.st_mtime_ns, state.st_size))


@cache
def shipped() -> tuple[ledger.Entry, ...]:
    """Ours, as the benchmarks wrote them."""
    file = resources.files("advisor.replay").joinpath(OURS)
    return tuple(ledger.decode(file.read_bytes()).entries) if file.is_file() else ()


@cache
def _theirs(path: Path, changed: int, size: int) -> tuple[ledger.Entry, ...]:
    try:
        return tuple(ledger.read(path).entries)
    except AdvisorError:  # too large, or not to be read: as if there were none
        return ()


def learnt(rule: str, device: str, gain: float, band: Band, step_ns: float) -> Learnt:
    """A band, ns a step, widened by what came of this rule's promises."""
    mine = [one for one in known() if one.rule == rule and one.predicted > 0]
    here = [one for one in mine if one.device == device]
    used = here if len(here) >= ENOUGH else mine
    if len(used) < ENOUGH:
        return Learnt(band, "")
    factor = math.exp(spread([abs(math.log(one.ratio)) for one in used]))
    wide = Band(
        min(band.low, gain / factor), min(max(band.high, gain * factor), max(step_ns, band.high))
    )
    return Learnt(wide, str(ledger.records(used)[rule]))
