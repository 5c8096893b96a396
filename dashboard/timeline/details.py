"""The facts about a slice and the slices linked to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.text import cause_label
from advisor.dashboard.timeline.categories import ALL, category_label
from advisor.dashboard.timeline.search import locate

if TYPE_CHECKING:
    from advisor.dashboard.timeline.index import TimelineIndex, TimelineLane
    from advisor.measure import Analysis

MAX_LINKS = 24
MAX_TEXT = 4000
MAX_AROUND = 12

Row = dict[str, Any]


def describe_slice(a: Analysis, index: TimelineIndex, position: int) -> dict[str, Any]:
    """Facts (label, value, unit) and links (slices tied to it) of a slice. Only what was
    recorded: a fact that is not there is left out."""
    number = index.lane_of(position)
    lane = index.lanes[number]
    row = int(index.row[position])
    group = index.groups[lane.group]
    found: dict[str, Any] = {
        **locate(index, position),
        "name": index.names[int(index.name[position])][:MAX_TEXT],
        "group": group.label,
        "category": category_label(ALL[lane.base + int(index.slot[position])], index.framework),
        "facts": [],
        "links": [],
        "line": None,
    }
    if row < 0:
        return found
    if lane.source == "cpu":
        _host(a, index, row, found)
    elif lane.source == "gpu":
        _device(a, index, row, found)
    elif lane.source == "gaps":
        _gap(a, index, row, found)
    elif lane.source == "steps":
        _step(a, row, found)
    elif lane.source == "recorded":
        _recorded(a, row, found)
    elif lane.source == "sync":
        _sync(a, row, found)
    elif lane.source == "activity":
        found["links"] += _links(index, "cpu", "caused by", [row])
        found["line"] = _line(a, row)
    found["facts"] = [fact for fact in found["facts"] if fact[1] not in (None, "", "[]")]
    return found


def _row(table: pl.DataFrame, row: int) -> Row:
    return table.row(row, named=True)


def _text(value: Any) -> Any:
    return str(value)[:MAX_TEXT] if isinstance(value, str) else value


def _links(index: TimelineIndex, table: str, kind: str, rows: list[int]) -> list[dict[str, Any]]:
    places = index.place[table]
    found = [int(places[row]) for row in rows if 0 <= row < len(places)]
    return [{"kind": kind, **locate(index, at)} for at in found if at >= 0][:MAX_LINKS]


def _line(a: Analysis, host_row: int | None) -> dict[str, Any] | None:
    """The user's line around a host row; ``None``: no stacks."""
    file, line, function = a.location(host_row)
    if file is None:
        return None
    return {"file": file[:500], "line": line, "function": (function or "")[:300]}


def _inputs(a: Analysis, row: Any) -> Iterator[tuple[str, Any, str]]:
    if row is not None:
        of = _row(a.trace.inputs, row)
        yield "shapes", _text(of["dims"]), ""
        yield "types", _text(of["types"]), ""
        yield "strides", _text(of["strides"]), ""
        yield "arguments", _text(of["concrete"]), ""


def _comm(a: Analysis, row: Any) -> Iterator[tuple[str, Any, str]]:
    if row is not None:
        of = _row(a.trace.comms, row)
        yield "collective", _text(of["collective"]), ""
        yield "elements in", of["in_elements"], "count"
        yield "elements out", of["out_elements"], "count"
        yield "element type", _text(of["dtype"]), ""
        yield "group", _text(of["group_description"] or of["group"]), ""
        yield "group size", of["group_size"], "count"
        yield "ranks", _text(of["ranks"]), ""


def _host(a: Analysis, index: TimelineIndex, row: int, found: dict[str, Any]) -> None:
    cpu, gpu = a.trace.cpu, a.trace.gpu
    of = _row(cpu, row)
    found["ts"], found["dur"] = of["ts"], of["dur"]
    found["facts"] += [
        ("thread", _text(a.trace.threads["name"][of["thread"]]), ""),
        *_inputs(a, of["inputs"]),
        *_comm(a, of["comm"]),
        ("correlation", of["correlation"], "id"),
        ("external id", of["external"], "id"),
        ("autograd sequence", of["sequence"], "id"),
    ]
    found["line"] = _line(a, row)
    above: list[int] = []
    parent = of["parent"]
    while parent is not None and len(above) < MAX_AROUND:
        above.append(parent)
        parent = cpu["parent"][parent]
    launched = _launched(a, row)
    found["links"] += _links(index, "gpu", "launched", launched[:MAX_LINKS].tolist())
    if len(launched):
        total = int(gpu["dur"].gather(launched).sum())
        found["facts"] += [("GPU launches", len(launched), "count"), ("GPU time", total, "ns")]
    found["links"] += _links(index, "cpu", "called from", above)
    found["links"] += _links(index, "cpu", "contains", _children(a, row))


def _children(a: Analysis, row: int) -> list[int]:
    """The longest host events directly below one, in order of start."""
    children = a.trace.cpu["parent"].eq(row).arg_true()
    longest = a.trace.cpu["dur"].gather(children).arg_sort(descending=True).head(MAX_AROUND)
    return children.gather(longest).sort().to_list()


def _launched(a: Analysis, row: int) -> NDArray[np.int64]:
    """Rows of gpu that a host event, or anything below it on its thread, launched."""
    cpu = a.trace.cpu
    thread = cpu["thread"].to_numpy()
    ts = cpu["ts"].to_numpy()
    # what is below an event follows it, and begins before it ends
    last = int(np.searchsorted(thread, thread[row], side="right"))
    end = ts[row] + int(cpu["dur"][row])
    stop = row + max(int(np.searchsorted(ts[row:last], end, side="left")), 1)
    launch = a.trace.gpu["launch"].fill_null(-1).to_numpy()
    found: NDArray[np.int64] = np.flatnonzero((launch >= row) & (launch < stop))
    return found


def _device(a: Analysis, index: TimelineIndex, row: int, found: dict[str, Any]) -> None:
    gpu = a.trace.gpu
    of, measured = _row(gpu, row), _row(a.kernels, row)
    found["ts"], found["dur"] = of["ts"], of["dur"]
    launch = of["launch"]
    delay = None
    if launch is not None:
        delay = of["ts"] - a.trace.cpu["ts"][launch]
    flops, moved, dur = measured["flops"], measured["moved"], of["dur"]
    found["facts"] += [
        ("device", of["device"], "id"),
        ("stream", of["stream"], "id"),
        ("launch to start", delay, "ns"),
        ("operator", _text(measured["op_name"]), ""),
        ("family", measured["family"] if of["kind"] == "kernel" else None, ""),
        ("input type", _text(measured["dtype"]), ""),
        ("tensor cores", _yes(measured["tensor_core"]) if of["kind"] == "kernel" else None, ""),
        ("FLOP rate", flops / dur * 1e9 if flops and dur else None, "FLOP/s"),
        ("memory traffic, at least", moved / dur * 1e9 if moved and dur else None, "B/s"),
        ("bytes", of["bytes"], "bytes"),
        ("rate", None if of["gbps"] is None else of["gbps"] * 1e9, "B/s"),
        ("direction", of["copy"], ""),
        ("from", _text(of["src"]), ""),
        ("to", _text(of["dst"]), ""),
        ("blocks", of["blocks"], "count"),
        ("threads per block", of["threads"], "count"),
        ("registers per thread", of["registers"], "count"),
        ("shared memory per block", of["shared"], "bytes"),
        ("occupancy", measured["occupancy"], "%"),
        ("waves", measured["waves"], "count"),
        ("CUDA graph", of["graph"], "id"),
        *_comm(a, of["comm"]),
        ("correlation", of["correlation"], "id"),
    ]
    op = of["op"]
    if op is not None:
        found["facts"] += list(_inputs(a, a.trace.cpu["inputs"][op]))
    found["line"] = _line(a, launch if launch is not None else op)
    if launch is not None:
        found["links"] += _links(index, "cpu", "launched by", [launch])
    if op is not None:
        found["links"] += _links(index, "cpu", "operator", [op])


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _gap(a: Analysis, index: TimelineIndex, row: int, found: dict[str, Any]) -> None:
    of = _row(a.gaps, row)
    found["ts"], found["dur"] = of["ts"], of["dur"]
    pieces = a.gaps.filter(pl.col("gap") == of["gap"])
    whole = int(pieces["dur"].sum())
    found["name"] = f"GPU idle: {cause_label(of['cause'], a.trace.meta.framework)}"
    found["facts"] += [
        ("complete gap", whole if pieces.height > 1 else None, "ns"),
        ("step", of["step"], "id"),
    ]
    if of["host"] is not None:
        found["links"] += _links(index, "cpu", "caused by", [of["host"]])
        found["line"] = _line(a, of["host"])
    if of["next"] is not None:
        found["links"] += _links(index, "gpu", "ended by", [of["next"]])


def _step(a: Analysis, row: int, found: dict[str, Any]) -> None:
    of = _row(a.steps.table, row)
    used = a.steps.used["dur"]
    found["ts"], found["dur"] = of["ts"], of["dur"]
    why = "yes" if of["used"] else "no: outlier" if of["outlier"] else "no"
    found["facts"] += [
        ("counted", why, ""),
        ("median step", int(used.median() or 0) or None, "ns"),  # type: ignore[arg-type]
    ]
    per_step = a.breakdown.per_step.filter(pl.col("step") == of["index"])
    if per_step.height:
        for name, value in per_step.row(0, named=True).items():
            if name != "step" and value is not None:
                found["facts"].append((name, value, "ns"))


def _recorded(a: Analysis, row: int, found: dict[str, Any]) -> None:
    if a.recorded is None:
        return
    step = a.recorded.steps[row]
    found["facts"] += [
        ("counted", _yes(bool(a.recorded.used[row])), ""),
        ("median step", a.recorded.median, "ns"),
        *((f"{name} (host)", ns, "ns") for name, ns in step.phases.items()),
        *((f"{name} (device)", ns, "ns") for name, ns in (step.gpu or {}).items()),
        ("garbage collector", step.gc or None, "ns"),
        ("samples", step.samples, "count"),
        ("peak memory so far", step.peak, "bytes"),
    ]


def _sync(a: Analysis, row: int, found: dict[str, Any]) -> None:
    of = _row(a.trace.sync, row)
    found["ts"], found["dur"] = of["ts"], of["dur"]
    found["facts"] += [
        ("stream", of["stream"], "id"),
        ("waits for stream", of["wait_stream"], "id"),
        ("correlation", of["correlation"], "id"),
    ]


def slice_near(index: TimelineIndex, lane: int, t: int, reach: int) -> dict[str, Any] | None:
    """The longest slice of a lane within ``reach`` of an instant, and how many there are."""
    of: TimelineLane = index.lanes[lane]
    lo, hi = index.within(lane, t - reach, t + reach)
    if hi <= lo:
        # a slice of no duration is at an instant
        lo, hi = index.within(lane, t - reach - 1, t + reach + 1)
    if hi <= lo:
        return None
    at = lo + int(np.argmax(index.end[lo:hi] - index.start[lo:hi]))
    label = category_label(ALL[of.base + int(index.slot[at])], index.framework)
    return {**locate(index, at), "count": hi - lo, "category": label}
