"""What an edit that selects nothing could have selected: names of its kind, nearest first."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

if TYPE_CHECKING:
    from advisor.core.finding import Select
    from advisor.measure import Analysis
    from advisor.measure.host.layers import LayerTable

MAX_COMPARED = 3_000
"""Names that are compared with the pattern, those with most time first."""
MAX_WORDS = 8
LONGEST = 60
"""Characters of a word that are compared."""

_KINDS = {
    "kernel": "kernels",
    "memcpy": "copies",
    "memset": "memsets",
    "op": "operators",
    "python": "Python frames",
    "annotation": "ranges",
    "runtime": "runtime calls",
}


class Present(NamedTuple):
    """Names of one kind."""

    what: str
    """``kernels``, ``operators``, ``idle causes`` …"""
    names: tuple[str, ...]
    """Each once, the nearest to what was asked for first, among equals the most time first."""
    asked: str
    """The part of the selector that nothing fits; empty: there is nothing of the kind."""


def find_present(a: Analysis, select: Select) -> Present:
    """What the steps have of the kind that a selector is about.

    One part of the selector at a time is left out, from ``under`` on: what then selects something
    was what nothing fits, and the names are of what could stand in its place.
    """
    if select.under and _weights(a, wide := replace(select, under="")):
        around = _around(a, wide)
        what = "operators, ranges and Python frames around it"
        return Present(what, _nearest(around, select.under), f"under:{select.under}")
    select = replace(select, under="")
    if select.layer:
        layers = a.layers
        times = (
            {}
            if layers is None
            else {**dict(layers.nodes.select("name", "ns").iter_rows()), **_kinds(layers)}
        )
        return Present("modules", _nearest(times, select.layer), f"layer:{select.layer}")
    what = _what(select)
    if select.on == "gap":
        return Present(what, _nearest(_causes(a), " ".join(select.cause)), " ".join(select.cause))
    if select.copy:
        return Present("copy directions", _nearest(_copies(a), select.copy[0]), select.copy[0])
    if select.family and not select.name:
        name = " ".join(select.family)
        return Present("kernel families", _nearest(_families(a), name), name)
    return Present(what, _nearest(_weights(a, replace(select, name="")), select.name), select.name)


def _kinds(layers: LayerTable) -> dict[str, float]:
    return dict(layers.nodes.group_by("kind").agg(pl.col("ns").sum().cast(pl.Float64)).iter_rows())


def _what(select: Select) -> str:
    if select.on == "gap":
        return "idle causes"
    if select.call:
        return "blocking calls"
    if select.family:
        return "collectives" if select.family == ("communication",) else "kernels"
    kinds = [_KINDS.get(kind, kind) for kind in select.kind]
    return " and ".join(kinds) or ("device work" if select.on == "gpu" else "host events")


def _weights(a: Analysis, select: Select) -> dict[str, float]:
    """Time by name of what is selected."""
    if select.on == "gap":
        return _causes(a) if selected_gaps(a, select).any() else {}
    if select.on == "gpu":
        rows, table = selected_gpu(a, select, anywhere=True), a.trace.gpu
    else:
        rows, table = selected_host(a, select), a.trace.cpu
    return _summed(table["name"], table["dur"], rows)


def _summed(names: pl.Series, dur: pl.Series, rows: np.ndarray) -> dict[str, float]:
    table = pl.DataFrame({"name": names, "dur": dur}).filter(pl.Series(rows))
    table = table.group_by("name").agg(pl.col("dur").sum()).drop_nulls()
    result = table.with_columns(pl.col("name").cast(pl.String)).sort(
        ["dur", "name"], descending=[True, False]
    )
    return dict(zip(result["name"], result["dur"], strict=True))


def _around(a: Analysis, select: Select) -> dict[str, float]:
    """Names of the host events of the threads that the selected ones begin on."""
    kinds = pl.Series(["op", "annotation", "python"])
    cpu = a.trace.cpu
    rows = cpu["kind"].cast(pl.String).is_in(kinds.implode()).to_numpy()
    if select.on == "host":
        threads = cpu["thread"].filter(pl.Series(selected_host(a, select))).unique()
        rows = rows & cpu["thread"].is_in(threads.implode()).to_numpy()
    return _summed(cpu["name"], cpu["dur"], rows)


def _causes(a: Analysis) -> dict[str, float]:
    gaps = a.gaps
    return _summed(gaps["cause"].cast(pl.String), gaps["dur"], np.ones(gaps.height, dtype=bool))


def _copies(a: Analysis) -> dict[str, float]:
    gpu = a.trace.gpu
    return _summed(gpu["copy"].cast(pl.String), gpu["dur"], a.in_window)


def _families(a: Analysis) -> dict[str, float]:
    if a.device_id is None:
        return {}
    return dict(zip(a.families["family"].cast(pl.String), a.families["dur"], strict=True))


def _nearest(weights: dict[str, float], pattern: str) -> tuple[str, ...]:
    """Names by how like their words are to each of the pattern's, on average."""
    wanted = [word.lower()[:LONGEST] for word in re.findall(r"\w+", pattern)][:MAX_WORDS]
    names = sorted(weights, key=lambda name: (-weights[name], name))

    @cache
    def like(one: str, word: str) -> float:
        return SequenceMatcher(None, one, word).ratio()

    def score(name: str) -> float:
        words = re.findall(r"[A-Za-z]+\d*|\w+", name[: 10 * LONGEST].lower())
        best = [max((like(item, word[:LONGEST]) for word in words), default=0.0) for item in wanted]
        return sum(best) / len(best)

    if not wanted:
        return tuple(names)
    compared = sorted(names[:MAX_COMPARED], key=lambda name: -round(score(name), 2))
    return (*compared, *names[MAX_COMPARED:])
