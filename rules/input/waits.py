"""How long the step waits for the DataLoader, and how much of that the device stands idle."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Evidence, Location, SkippedCheck
from advisor.core.intervals import covered_length, intersect, union
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import parse_frame
from advisor.measure.steps.contents import contents
from advisor.rules.common import per, rows

if TYPE_CHECKING:
    from advisor.measure import Analysis

SINGLE = r"^enumerate\(Data(?:Loader|Pipe)\)#_SingleProcessDataLoaderIter\b"
"""The iterator PyTorch names when ``num_workers=0``."""
OTHERS = r"^enumerate\(Data(?:Loader|Pipe)\)#(?:[^_]|_[^S]|_S[^i])|^tf\.data::"
"""Every other iterator: worker processes, a DataPipe, or tf.data."""


class Waits(NamedTuple):
    """Waits of the thread that drives the step, inside the used steps."""

    host: NDArray[np.int64]
    """Rows of ``trace.cpu``: the ``__next__`` ranges, outermost only."""
    total: int
    """Their union, ns."""
    exposed: int
    """The part that keeps the step from going on: the device is idle and its next work is held up
    by the wait. Without device work in the trace, all of it. ns."""
    each: NDArray[np.int64]
    """Exposed part of each row of ``host``, ns."""
    by_step: NDArray[np.int64]
    """Exposed part in each used step, ns."""


def find_waits(a: Analysis, pattern: str) -> Waits | None:
    """Waits whose range matches ``pattern``; ``None``: there are none in the used steps."""
    cpu = a.trace.cpu
    named = name_matches(cpu["name"], pattern) & cpu["kind"].is_in(["annotation", "op"])
    if a.device_id is None and a.trace.main_thread is not None:
        named &= cpu["thread"] == a.trace.main_thread
    found = np.flatnonzero(named.to_numpy())
    if not len(found):
        return None
    # a nested loader's range lies inside another one's: the outer one has its time already
    inner = np.isin(rows(cpu["parent"])[found], found)
    found = found[~inner]
    ts = cpu["ts"].to_numpy()[found]
    end = ts + cpu["dur"].to_numpy()[found]
    inside = covered_length(ts, end, a.spans) > 0
    found, ts, end = found[inside], ts[inside], end[inside]
    if not len(found):
        return None
    wait = intersect(union(ts, end), a.spans)
    exposed = wait
    if a.device_id is not None:
        gaps = a.gaps.filter(pl.col("cause") == "loader")
        blamed = np.isin(rows(gaps["host"]), found)
        start = gaps["ts"].to_numpy()[blamed]
        exposed = intersect(union(start, start + gaps["dur"].to_numpy()[blamed]), a.spans)
    used = a.steps.used
    by_step = covered_length(used["ts"].to_numpy(), used["end"].to_numpy(), exposed)
    return Waits(found, wait.total, exposed.total, covered_length(ts, end, exposed), by_step)


def recurs(waits: Waits, minimum: float) -> bool:
    """The wait is more than one step's accident: without the worst step, the others still lose
    ``minimum`` ns on average. With fewer than three steps there is nothing to compare."""
    if len(waits.by_step) < 3:
        return True
    rest = waits.by_step.sum() - waits.by_step.max()
    return bool(rest / (len(waits.by_step) - 1) >= minimum)


def in_one_step(waits: Waits) -> SkippedCheck:
    """What is said of a wait that does not recur."""
    return SkippedCheck(
        what=f"whether the DataLoader's wait of {t.format_duration(waits.by_step.max())} recurs",
        why=f"one of {len(waits.by_step)} steps holds nearly all of it, as at the start of "
        "an epoch",
        record="more steps: schedule(wait=1, warmup=2, active=8)",
    )


class Culprits(NamedTuple):
    """What the loading consists of, where that was recorded."""

    evidence: list[Evidence]
    where: list[Location]
    summary: str
    """A sentence about the call that holds most of it, or nothing."""


BUILT_IN = re.compile(r"^<built-in (?:method|function) (\S+?)(?: of (\S+) object.*)?>$")
"""``<built-in method std of Tensor object at 0x7f…>``, which is shown as ``Tensor.std``."""
NAMED_SHARE = 0.05
"""Part of the loading from which a call inside it is listed: smaller ones change nothing."""
MAX_SHARE = 0.3
"""Part of the loading from which one call is what the loading is about, and is said first."""


def culprits(a: Analysis, waits: Waits) -> Culprits:
    """The calls inside the loading that take its time, with the user's lines that make them."""
    found = Culprits([], [], "")
    inside = contents(a, waits.host)
    table = inside.filter(pl.col("ns") >= NAMED_SHARE * waits.total).head(3)
    summary = ""
    for row in table.iter_rows(named=True):
        text = _told(a, row)
        per_step = row["ns"] / a.step_count
        found.evidence.append(Evidence(f"of the loading{per(a)}: {text}", per_step, "ns"))
        share = row["ns"] / waits.total
        if not summary and share >= MAX_SHARE:
            summary = f" {share:.0%} of the loading is {text}."
        if row["frame"] is not None:
            file, line, function = a.location(row["frame"])
            op = _short(a, row["callee"])
            ts, dur = (int(a.trace.cpu[c][row["callee"]]) for c in ("ts", "dur"))
            found.where.append(
                Location(
                    file=file,
                    line=line,
                    function=function,
                    op=op,
                    ts_ns=ts,
                    dur_ns=dur,
                    count=row["count"],
                )
            )
    dark = waits.total - int(inside["ns"].sum())
    stacks = bool((a.trace.cpu["kind"] == "python").any())
    if not stacks and not inside.is_empty() and dark >= NAMED_SHARE * waits.total:
        label = f"of the loading{per(a)}: outside operators (with_stack=True would tell)"
        found.evidence.append(Evidence(label, dark / a.step_count, "ns"))
    return found._replace(summary=summary)


def _told(a: Analysis, row: dict[str, int | None]) -> str:
    """``zoom (scipy/ndimage/interpolation.py:700), called by __getitem__ (data.py:41)``."""
    callee, leaf, frame = row["callee"], row["leaf"], row["frame"]
    assert callee is not None
    text = _full(a, callee)
    if leaf is not None and _short(a, leaf) != _short(a, callee):
        text += f", in it {_short(a, leaf)}"
    if frame is not None and frame != callee:
        text += f", called by {_full(a, frame)}"
    return text


def _full(a: Analysis, row: int) -> str:
    parsed = parse_frame(str(a.trace.cpu["name"][row]))
    if parsed is None:
        return _short(a, row)
    return f"{parsed.function} ({PurePath(parsed.file).name}:{parsed.line})"


def _short(a: Analysis, row: int) -> str:
    name = str(a.trace.cpu["name"][row])
    parsed = parse_frame(name)
    if parsed is not None:
        return parsed.function
    built_in = BUILT_IN.match(name)
    if built_in is None:
        return name
    owner = built_in[2]
    return built_in[1] if owner in (None, "module", "type") else f"{owner}.{built_in[1]}"
