"""What was found, as events of a Chrome trace: steps, idle time by cause, one track a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from advisor.advise import report_text
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Edit, Finding
from advisor.core.intervals import EMPTY, Intervals, intersect, join, union
from advisor.read.meta import whole_number
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.measure import Analysis

CATEGORY = "advisor"
MAX_SLICES = 20_000
"""On one track; the longest stay. A browser shows no more without effort."""
_NEAR_NS = 1_000
"""Instants of a finding that are closer than this are one slice."""
_FIRST_PID = 990_000_000


Shown = Callable[[str, int], str]
"""A text as it is shown, in so many characters."""


class Slice(NamedTuple):
    """One event of ours, ns from the trace's start."""

    ts: int
    dur: int
    name: str
    args: dict[str, Any]


def build_tracks(
    a: Analysis,
    report: Report,
    head: Mapping[str, Any] | None = None,
    clean: Callable[[str], str] = str,
) -> Iterator[bytes]:
    """The JSON text of every event, metadata first.

    They form a process of their own, "advisor", above the others: a track with the steps, one with
    the idle gaps of the analysed device, and one for each ranked finding with the instants that its
    fix would change. Slices of a track never overlap. ``head``: the file's other keys, of which
    ``baseTimeNanoseconds`` is what its times are relative to. ``clean``: applied to every text
    before it is shortened; the report is the whole one, because its edits are looked up.
    """

    def text(value: str, width: int) -> str:
        return labels.shorten(labels.clean(clean(value)), width)

    pid = _free_pid(a)
    origin = a.trace.meta.start_ns - (whole_number((head or {}).get("baseTimeNanoseconds")) or 0)
    yield _meta("process_name", pid, 0, name="advisor")
    yield _meta("process_labels", pid, 0, labels=text(report.verdict, 200))
    yield _meta("process_sort_index", pid, 0, sort_index=-1)
    result = [("steps", _steps(a)), ("idle gaps", _gaps(a, text))]
    for finding in report_text.ranked_findings(report):
        if not finding.other_rank:
            title = text(finding.title, 80)
            result.append((f"{finding.priority}. {title}", _finding(a, finding, text)))
    for number, (name, slices) in enumerate(result):
        yield _meta("thread_name", pid, number + 1, name=name)
        yield _meta("thread_sort_index", pid, number + 1, sort_index=number)
        for item in slices:
            yield _slice(item, pid, number + 1, origin, text)


def _free_pid(a: Analysis) -> int:
    used = set(a.trace.threads["pid"].to_list())
    pid = _FIRST_PID
    while str(pid) in used:
        pid += 1
    return pid


def _meta(kind: str, pid: int, tid: int, **args: Any) -> bytes:
    return msgspec.json.encode(
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
    )


def _slice(item: Slice, pid: int, tid: int, origin: int, text: Shown) -> bytes:
    return msgspec.json.encode(
        {
            "ph": "X",
            "cat": CATEGORY,
            "name": text(item.name, 200),
            "pid": pid,
            "tid": tid,
            "ts": to_microseconds(origin + item.ts),
            "dur": to_microseconds(item.dur),
            "args": item.args,
        }
    )


def to_microseconds(ns: int) -> Raw:
    """Microseconds with their decimals, exactly: a float would round Unix times."""
    whole, rest = divmod(abs(ns), 1000)
    sign = "-" if ns < 0 else ""
    return Raw(f"{sign}{whole}.{rest:03d}".encode())


# -- tracks -------------------------------------------------------------------------------------


def _steps(a: Analysis) -> list[Slice]:
    rows = []
    end = -(1 << 62)
    for name, ts, stop, dur, used, outlier in a.steps.table.select(
        "name", "ts", "end", "dur", "used", "outlier"
    ).iter_rows():
        if ts >= end:  # steps that overlap, in a damaged trace, cannot share a track
            state = "used" if used else "outlier" if outlier else "not used"
            rows.append(Slice(ts, dur, name, {"measured": state}))
            end = stop
    return rows[:MAX_SLICES]


def _gaps(a: Analysis, text: Shown) -> list[Slice]:
    gaps = a.gaps
    keep = _longest(gaps["dur"].to_numpy())
    chosen = gaps[keep].select("ts", "dur", "cause", "gap", "host")
    names = a.trace.cpu["name"]
    own = a.trace.meta.framework
    result = []
    for ts, dur, cause, gap, row in chosen.iter_rows():
        args = {"cause": cause, "gap": gap}
        if row is not None:
            args["while"] = text(names[row], 200)
        result.append(Slice(ts, dur, t.cause_label(cause, own), args))
    return result


def _finding(a: Analysis, finding: Finding, text: Shown) -> list[Slice]:
    """The instants that the fix would change, each once."""
    time = intersect(join(EMPTY, *(_touched(a, edit) for edit in finding.edits)), a.spans)
    start, end = _bridged(time)
    keep = _longest(end - start)
    args: dict[str, Any] = {"rule": finding.rule, "fix": text(finding.fix, 500)}
    if finding.impact is not None and finding.impact.gain_ns is not None:
        args["impact"] = t.format_gain(finding)
    title = finding.title
    return [
        Slice(ts, stop - ts, title, args if number == 0 else {"rule": finding.rule})
        for number, (ts, stop) in enumerate(
            zip(start[keep].tolist(), end[keep].tolist(), strict=True)
        )
    ]


def _touched(a: Analysis, edit: Edit) -> Intervals:
    select = edit.select
    if select.on == "gap":
        rows = selected_gaps(a, select)
        frame = a.gaps
    elif select.on == "gpu":
        rows, frame = selected_gpu(a, select), a.trace.gpu
    else:
        rows, frame = selected_host(a, select), a.trace.cpu
    ts = frame["ts"].to_numpy()[rows]
    return union(ts, ts + frame["dur"].to_numpy()[rows])


def _bridged(time: Intervals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Intervals with the short spaces between them closed."""
    if not len(time):
        return time.start, time.end
    apart = np.flatnonzero(time.start[1:] - time.end[:-1] >= _NEAR_NS)
    return time.start[np.append(0, apart + 1)], time.end[np.append(apart, len(time.end) - 1)]


def _longest(dur: NDArray[np.int64]) -> NDArray[np.intp]:
    """Places of the longest, in order of time."""
    if len(dur) <= MAX_SLICES:
        return np.arange(len(dur))
    return np.sort(np.argpartition(dur, -MAX_SLICES)[-MAX_SLICES:])
