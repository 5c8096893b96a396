"""Facts about a slice and the slices linked to it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.text import cause_label
from advisor.dashboard.timeline.index import TimelineIndex
from advisor.dashboard.timeline.search import locate_slice
from advisor.measure import Analysis

MAX_LINKS = 24
MAX_TEXT = 4000
MAX_AROUND = 12

Row = dict[str, Any]


def describe_slice(a: Analysis, index: TimelineIndex, position: int) -> dict[str, Any]:
    """Return facts (label, value, unit) and links (slices tied to it) of a slice. Only what was
    recorded: a fact that is not there is left out."""
    number = index.lane_of(position)
    lane = index.lanes[number]
    row = int(index.row[position])
    group = index.groups[lane.group]
    details: dict[str, Any] = {
        **locate_slice(index, position), "name": index.names[int(index.name[position])][:MAX_TEXT],
        "group": group.label, "category": index.category(position), "facts": [], "links": [],
        "line": None,
    }  # fmt: skip
    if row < 0:
        return details
    if lane.source == "cpu":
        _host(a, index, row, details)
    elif lane.source == "gpu":
        _device(a, index, row, details)
    elif lane.source == "gaps":
        _gap(a, index, row, details)
    elif lane.source == "steps":
        _step(a, row, details)
    elif lane.source == "recorded":
        _recorded(a, row, details)
    elif lane.source == "sync":
        _sync(a, row, details)
    elif lane.source == "activity":
        details["links"] += _links(index, "cpu", "caused by", [row])
        details["line"] = _line(a, row)
    details["facts"] = [fact for fact in details["facts"] if fact[1] not in (None, "", "[]")]
    return details


def _row(table: pl.DataFrame, row: int) -> Row:
    return table.row(row, named=True)


def _text(value: Any) -> Any:
    return str(value)[:MAX_TEXT] if isinstance(value, str) else value


def _links(index: TimelineIndex, table: str, kind: str, rows: list[int]) -> list[dict[str, Any]]:
    places = index.slice_of_row[table]
    positions = [int(places[row]) for row in rows if 0 <= row < len(places)]
    return [
        {"kind": kind, **locate_slice(index, position)} for position in positions if position >= 0
    ][:MAX_LINKS]


def _line(a: Analysis, host_row: int | None) -> dict[str, Any] | None:
    """Return the user's line around a host row, or ``None`` without stacks."""
    file, line, function = a.location(host_row)
    if file is None:
        return None
    return {"file": file[:500], "line": line, "function": (function or "")[:300]}


def _inputs(a: Analysis, row: Any) -> Iterator[tuple[str, Any, str]]:
    if row is not None:
        inputs = _row(a.trace.inputs, row)
        yield "shapes", _text(inputs["dims"]), ""
        yield "types", _text(inputs["types"]), ""
        yield "strides", _text(inputs["strides"]), ""
        yield "arguments", _text(inputs["concrete"]), ""


def _comm(a: Analysis, row: Any) -> Iterator[tuple[str, Any, str]]:
    if row is not None:
        comm = _row(a.trace.comms, row)
        yield "collective", _text(comm["collective"]), ""
        yield "elements in", comm["in_elements"], "count"
        yield "elements out", comm["out_elements"], "count"
        yield "element type", _text(comm["dtype"]), ""
        yield "group", _text(comm["group_description"] or comm["group"]), ""
        yield "group size", comm["group_size"], "count"
        yield "ranks", _text(comm["ranks"]), ""


def _host(a: Analysis, index: TimelineIndex, row: int, details: dict[str, Any]) -> None:
    cpu, gpu = a.trace.cpu, a.trace.gpu
    event = _row(cpu, row)
    details["ts"], details["dur"] = event["ts"], event["dur"]
    details["facts"] += [
        ("thread", _text(a.trace.threads["name"][event["thread"]]), ""),
        *_inputs(a, event["inputs"]),
        *_comm(a, event["comm"]),
        ("correlation", event["correlation"], "id"),
        ("external id", event["external"], "id"),
        ("autograd sequence", event["sequence"], "id"),
    ]
    details["line"] = _line(a, row)
    above: list[int] = []
    parent = event["parent"]
    while parent is not None and len(above) < MAX_AROUND:
        above.append(parent)
        parent = cpu["parent"][parent]
    launched = _launched(a, row)
    details["links"] += _links(index, "gpu", "launched", launched[:MAX_LINKS].tolist())
    if len(launched):
        total = int(gpu["dur"].gather(launched).sum())
        details["facts"] += [("GPU launches", len(launched), "count"), ("GPU time", total, "ns")]
    details["links"] += _links(index, "cpu", "called from", above)
    details["links"] += _links(index, "cpu", "contains", _children(a, row))


def _children(a: Analysis, row: int) -> list[int]:
    """Return the longest host events directly below one, in order of start."""
    children = a.trace.cpu["parent"].eq(row).arg_true()
    longest = a.trace.cpu["dur"].gather(children).arg_sort(descending=True).head(MAX_AROUND)
    return children.gather(longest).sort().to_list()


def _launched(a: Analysis, row: int) -> NDArray[np.int64]:
    """Return rows of gpu that a host event, or anything below it on its thread, launched."""
    cpu = a.trace.cpu
    thread = cpu["thread"].to_numpy()
    ts = cpu["ts"].to_numpy()
    # what is below an event follows it, and begins before it ends
    last = int(np.searchsorted(thread, thread[row], side="right"))
    end = ts[row] + int(cpu["dur"][row])
    stop = row + max(int(np.searchsorted(ts[row:last], end, side="left")), 1)
    launch = a.trace.gpu["launch"].fill_null(-1).to_numpy()
    launched: NDArray[np.int64] = np.flatnonzero((launch >= row) & (launch < stop))
    return launched


def _device(a: Analysis, index: TimelineIndex, row: int, details: dict[str, Any]) -> None:
    gpu = a.trace.gpu
    event, measured = _row(gpu, row), _row(a.kernels, row)
    details["ts"], details["dur"] = event["ts"], event["dur"]
    launch = event["launch"]
    delay = None
    if launch is not None:
        delay = event["ts"] - a.trace.cpu["ts"][launch]
    flops, moved, dur = measured["flops"], measured["moved"], event["dur"]
    details["facts"] += [
        ("device", event["device"], "id"), ("stream", event["stream"], "id"),
        ("launch to start", delay, "ns"), ("operator", _text(measured["op_name"]), ""),
        ("family", measured["family"] if event["kind"] == "kernel" else None, ""),
        ("input type", _text(measured["dtype"]), ""),
        ("tensor cores", _yes(measured["tensor_core"]) if event["kind"] == "kernel" else None, ""),
        ("FLOP rate", flops / dur * 1e9 if flops and dur else None, "FLOP/s"),
        ("memory traffic, at least", moved / dur * 1e9 if moved and dur else None, "B/s"),
        ("bytes", event["bytes"], "bytes"),
        ("rate", None if event["gbps"] is None else event["gbps"] * 1e9, "B/s"),
        ("direction", event["copy"], ""), ("from", _text(event["src"]), ""),
        ("to", _text(event["dst"]), ""), ("blocks", event["blocks"], "count"),
        ("threads per block", event["threads"], "count"),
        ("registers per thread", event["registers"], "count"),
        ("shared memory per block", event["shared"], "bytes"),
        ("occupancy", measured["occupancy"], "%"), ("waves", measured["waves"], "count"),
        ("CUDA graph", event["graph"], "id"), *_comm(a, event["comm"]),
        ("correlation", event["correlation"], "id"),
    ]  # fmt: skip
    op = event["op"]
    if op is not None:
        details["facts"] += list(_inputs(a, a.trace.cpu["inputs"][op]))
    details["line"] = _line(a, launch if launch is not None else op)
    if launch is not None:
        details["links"] += _links(index, "cpu", "launched by", [launch])
    if op is not None:
        details["links"] += _links(index, "cpu", "operator", [op])


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _gap(a: Analysis, index: TimelineIndex, row: int, details: dict[str, Any]) -> None:
    gap = _row(a.gaps, row)
    details["ts"], details["dur"] = gap["ts"], gap["dur"]
    pieces = a.gaps.filter(pl.col("gap") == gap["gap"])
    total = int(pieces["dur"].sum())
    cause = cause_label(gap["cause"], index.framework, outside=index.outside)
    details["name"] = f"GPU idle: {cause}"
    details["facts"] += [
        ("complete gap", total if pieces.height > 1 else None, "ns"),
        ("step", gap["step"], "id"),
    ]
    if gap["host"] is not None:
        details["links"] += _links(index, "cpu", "caused by", [gap["host"]])
        details["line"] = _line(a, gap["host"])
    if gap["next"] is not None:
        details["links"] += _links(index, "gpu", "ended by", [gap["next"]])


def _step(a: Analysis, row: int, details: dict[str, Any]) -> None:
    step = _row(a.steps.table, row)
    used = a.steps.used["dur"]
    details["ts"], details["dur"] = step["ts"], step["dur"]
    why = "yes" if step["used"] else "no: outlier" if step["outlier"] else "no"
    details["facts"] += [
        ("counted", why, ""),
        ("median of the profiled steps", int(used.median() or 0) or None, "ns"),  # type: ignore[arg-type]
    ]
    per_step = a.breakdown.per_step.filter(pl.col("step") == step["index"])
    if per_step.height:
        for name, value in per_step.row(0, named=True).items():
            if name != "step" and value is not None:
                details["facts"].append((name, value, "ns"))


def _recorded(a: Analysis, row: int, details: dict[str, Any]) -> None:
    if a.recorded is None:
        return
    step = a.recorded.steps[row]
    details["facts"] += [
        ("counted", _yes(bool(a.recorded.used[row])), ""),
        ("median of unprofiled steps", a.recorded.median, "ns"),
        *((f"{name} (host)", ns, "ns") for name, ns in step.phases.items()),
        *((f"{name} (device)", ns, "ns") for name, ns in (step.gpu or {}).items()),
        ("garbage collector", step.gc or None, "ns"),
        ("samples", step.samples, "count"),
        ("peak memory so far", step.peak, "bytes"),
    ]


def _sync(a: Analysis, row: int, details: dict[str, Any]) -> None:
    event = _row(a.trace.sync, row)
    details["ts"], details["dur"] = event["ts"], event["dur"]
    details["facts"] += [
        ("stream", event["stream"], "id"),
        ("waits for stream", event["wait_stream"], "id"),
        ("correlation", event["correlation"], "id"),
    ]


def slice_near(index: TimelineIndex, lane: int, t: int, reach: int) -> dict[str, Any] | None:
    """Find a lane's longest slice within ``reach`` of an instant, and how many there are."""
    lo, hi = index.within(lane, t - reach, t + reach)
    if hi <= lo:
        # a slice of no duration is at an instant
        lo, hi = index.within(lane, t - reach - 1, t + reach + 1)
    if hi <= lo:
        return None
    position = lo + int(np.argmax(index.end[lo:hi] - index.start[lo:hi]))
    return {**locate_slice(index, position), "count": hi - lo, "category": index.category(position)}
