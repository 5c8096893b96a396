"""Details of a slice: facts, and the slices that it is linked to."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.text import cause_label
from advisor.dashboard.timeline.index import TimelineIndex
from advisor.dashboard.timeline.queries import locate_slice
from advisor.measure import Analysis

MAX_LINKS = 24
MAX_TEXT_LENGTH = 4000
MAX_RELATED = 12

Row = dict[str, Any]


def describe_slice(a: Analysis, index: TimelineIndex, position: int) -> dict[str, Any]:
    """Return a slice with its facts (label, value, unit) and links (related slices), as JSON.

    Facts that were not recorded are left out."""
    number = index.lane_of(position)
    lane = index.lanes[number]
    row = int(index.row[position])
    group = index.groups[lane.group]
    details: dict[str, Any] = {
        **locate_slice(index, position),
        "name": index.names[int(index.name[position])][:MAX_TEXT_LENGTH],
        "group": group.label, "category": index.category_name(position), "facts": [], "links": [],
        "line": None,
    }  # fmt: skip
    if row < 0:
        return details
    if lane.source == "cpu":
        _add_host_details(a, index, row, details)
    elif lane.source == "gpu":
        _add_device_details(a, index, row, details)
    elif lane.source == "gaps":
        _add_gap_details(a, index, row, details)
    elif lane.source == "steps":
        _add_step_details(a, row, details)
    elif lane.source == "recorded":
        _add_recorded_details(a, row, details)
    elif lane.source == "sync":
        _add_sync_details(a, row, details)
    elif lane.source == "activity":
        details["links"] += _link_rows(index, "cpu", "caused by", [row])
        details["line"] = _source_line(a, row)
    details["facts"] = [fact for fact in details["facts"] if fact[1] not in (None, "", "[]")]
    return details


def _named_row(table: pl.DataFrame, row: int) -> Row:
    """Return a row of a table by column name."""
    return table.row(row, named=True)


def _clip_text(value: Any) -> Any:
    """Clip a text to MAX_TEXT_LENGTH characters."""
    return str(value)[:MAX_TEXT_LENGTH] if isinstance(value, str) else value


def _link_rows(
    index: TimelineIndex, table: str, kind: str, rows: list[int]
) -> list[dict[str, Any]]:
    """Return links to the slices of rows of a table. ``kind``: relation to them."""
    slices = index.slice_of_row[table]
    positions = [int(slices[row]) for row in rows if 0 <= row < len(slices)]
    return [
        {"kind": kind, **locate_slice(index, position)} for position in positions if position >= 0
    ][:MAX_LINKS]


def _source_line(a: Analysis, host_row: int | None) -> dict[str, Any] | None:
    """Return the user's source line of a host row, or ``None`` without stacks."""
    file, line, function = a.location(host_row)
    if file is None:
        return None
    return {"file": file[:500], "line": line, "function": (function or "")[:300]}


def _input_facts(a: Analysis, row: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield facts about an operator's inputs."""
    if row is not None:
        inputs = _named_row(a.trace.inputs, row)
        yield "shapes", _clip_text(inputs["dims"]), ""
        yield "types", _clip_text(inputs["types"]), ""
        yield "strides", _clip_text(inputs["strides"]), ""
        yield "arguments", _clip_text(inputs["concrete"]), ""


def _collective_facts(a: Analysis, row: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield facts about a collective."""
    if row is not None:
        comm = _named_row(a.trace.comms, row)
        yield "collective", _clip_text(comm["collective"]), ""
        yield "elements in", comm["in_elements"], "count"
        yield "elements out", comm["out_elements"], "count"
        yield "element type", _clip_text(comm["dtype"]), ""
        yield "group", _clip_text(comm["group_description"] or comm["group"]), ""
        yield "group size", comm["group_size"], "count"
        yield "ranks", _clip_text(comm["ranks"]), ""


def _add_host_details(a: Analysis, index: TimelineIndex, row: int, details: dict[str, Any]) -> None:
    """Add details of a host event: inputs, callers, children and launched GPU work."""
    cpu, gpu = a.trace.cpu, a.trace.gpu
    event = _named_row(cpu, row)
    details["ts"], details["dur"] = event["ts"], event["dur"]
    details["facts"] += [
        ("thread", _clip_text(a.trace.threads["name"][event["thread"]]), ""),
        *_input_facts(a, event["inputs"]),
        *_collective_facts(a, event["comm"]),
        ("correlation", event["correlation"], "id"),
        ("external id", event["external"], "id"),
        ("autograd sequence", event["sequence"], "id"),
    ]
    details["line"] = _source_line(a, row)
    ancestors: list[int] = []
    parent = event["parent"]
    while parent is not None and len(ancestors) < MAX_RELATED:
        ancestors.append(parent)
        parent = cpu["parent"][parent]
    launched = _launched_rows(a, row)
    details["links"] += _link_rows(index, "gpu", "launched", launched[:MAX_LINKS].tolist())
    if len(launched):
        total = int(gpu["dur"].gather(launched).sum())
        details["facts"] += [("GPU launches", len(launched), "count"), ("GPU time", total, "ns")]
    details["links"] += _link_rows(index, "cpu", "called from", ancestors)
    details["links"] += _link_rows(index, "cpu", "contains", _longest_children(a, row))


def _longest_children(a: Analysis, row: int) -> list[int]:
    """Return the longest host events directly below a host event, by start."""
    children = a.trace.cpu["parent"].eq(row).arg_true()
    longest = a.trace.cpu["dur"].gather(children).arg_sort(descending=True).head(MAX_RELATED)
    return children.gather(longest).sort().to_list()


def _launched_rows(a: Analysis, row: int) -> NDArray[np.int64]:
    """Return the rows of ``trace.gpu`` launched by a host event or by events below it."""
    cpu = a.trace.cpu
    thread = cpu["thread"].to_numpy()
    ts = cpu["ts"].to_numpy()
    # events below an event follow it and start before it ends
    last = int(np.searchsorted(thread, thread[row], side="right"))
    end = ts[row] + int(cpu["dur"][row])
    stop = row + max(int(np.searchsorted(ts[row:last], end, side="left")), 1)
    launch = a.trace.gpu["launch"].fill_null(-1).to_numpy()
    launched: NDArray[np.int64] = np.flatnonzero((launch >= row) & (launch < stop))
    return launched


def _add_device_details(
    a: Analysis, index: TimelineIndex, row: int, details: dict[str, Any]
) -> None:
    """Add details of a kernel, copy or memset: rates, launch configuration, operator."""
    gpu = a.trace.gpu
    event, measured = _named_row(gpu, row), _named_row(a.kernels, row)
    details["ts"], details["dur"] = event["ts"], event["dur"]
    launch = event["launch"]
    delay = None
    if launch is not None:
        delay = event["ts"] - a.trace.cpu["ts"][launch]
    flops, moved, dur = measured["flops"], measured["moved"], event["dur"]
    details["facts"] += [
        ("device", event["device"], "id"), ("stream", event["stream"], "id"),
        ("launch to start", delay, "ns"), ("operator", _clip_text(measured["op_name"]), ""),
        ("family", measured["family"] if event["kind"] == "kernel" else None, ""),
        ("input type", _clip_text(measured["dtype"]), ""),
        ("tensor cores",
         _yes_or_no(measured["tensor_core"]) if event["kind"] == "kernel" else None, ""),
        ("FLOP rate", flops / dur * 1e9 if flops and dur else None, "FLOP/s"),
        ("memory traffic, at least", moved / dur * 1e9 if moved and dur else None, "B/s"),
        ("bytes", event["bytes"], "bytes"),
        ("rate", None if event["gbps"] is None else event["gbps"] * 1e9, "B/s"),
        ("direction", event["copy"], ""), ("from", _clip_text(event["src"]), ""),
        ("to", _clip_text(event["dst"]), ""), ("blocks", event["blocks"], "count"),
        ("threads per block", event["threads"], "count"),
        ("registers per thread", event["registers"], "count"),
        ("shared memory per block", event["shared"], "bytes"),
        ("occupancy", measured["occupancy"], "%"), ("waves", measured["waves"], "count"),
        ("CUDA graph", event["graph"], "id"), *_collective_facts(a, event["comm"]),
        ("correlation", event["correlation"], "id"),
    ]  # fmt: skip
    op = event["op"]
    if op is not None:
        details["facts"] += list(_input_facts(a, a.trace.cpu["inputs"][op]))
    details["line"] = _source_line(a, launch if launch is not None else op)
    if launch is not None:
        details["links"] += _link_rows(index, "cpu", "launched by", [launch])
    if op is not None:
        details["links"] += _link_rows(index, "cpu", "operator", [op])


def _yes_or_no(value: bool | None) -> str | None:
    """Write a boolean, or ``None`` if unknown."""
    return None if value is None else "yes" if value else "no"


def _add_gap_details(a: Analysis, index: TimelineIndex, row: int, details: dict[str, Any]) -> None:
    """Add details of idle time: cause, and the work that ended it."""
    gap = _named_row(a.gaps, row)
    details["ts"], details["dur"] = gap["ts"], gap["dur"]
    pieces = a.gaps.filter(pl.col("gap") == gap["gap"])
    total = int(pieces["dur"].sum())
    cause = cause_label(gap["cause"], index.framework, outside=index.idle_outside_operators)
    details["name"] = f"GPU idle: {cause}"
    details["facts"] += [
        ("complete gap", total if pieces.height > 1 else None, "ns"),
        ("step", gap["step"], "id"),
    ]
    if gap["host"] is not None:
        details["links"] += _link_rows(index, "cpu", "caused by", [gap["host"]])
        details["line"] = _source_line(a, gap["host"])
    if gap["next"] is not None:
        details["links"] += _link_rows(index, "gpu", "ended by", [gap["next"]])


def _add_step_details(a: Analysis, row: int, details: dict[str, Any]) -> None:
    """Add details of a profiled step: its time by class."""
    step = _named_row(a.steps.table, row)
    durations = a.steps.used["dur"]
    details["ts"], details["dur"] = step["ts"], step["dur"]
    counted = "yes" if step["used"] else "no: outlier" if step["outlier"] else "no"
    details["facts"] += [
        ("counted", counted, ""),
        ("median of the profiled steps", int(durations.median() or 0) or None, "ns"),  # type: ignore[arg-type]
    ]
    per_step = a.breakdown.per_step.filter(pl.col("step") == step["index"])
    if per_step.height:
        for name, value in per_step.row(0, named=True).items():
            if name != "step" and value is not None:
                details["facts"].append((name, value, "ns"))


def _add_recorded_details(a: Analysis, row: int, details: dict[str, Any]) -> None:
    """Add details of a recorded step: its time by phase."""
    if a.run_steps is None:
        return
    step = a.run_steps.steps[row]
    details["facts"] += [
        ("counted", _yes_or_no(bool(a.run_steps.used[row])), ""),
        ("median of unprofiled steps", a.run_steps.median, "ns"),
        *((f"{name} (host)", ns, "ns") for name, ns in step.phases.items()),
        *((f"{name} (device)", ns, "ns") for name, ns in (step.gpu or {}).items()),
        ("garbage collector", step.gc or None, "ns"),
        ("samples", step.samples, "count"),
        ("peak memory so far", step.peak, "bytes"),
    ]


def _add_sync_details(a: Analysis, row: int, details: dict[str, Any]) -> None:
    """Add details of a synchronization."""
    event = _named_row(a.trace.sync, row)
    details["ts"], details["dur"] = event["ts"], event["dur"]
    details["facts"] += [
        ("stream", event["stream"], "id"),
        ("waits for stream", event["wait_stream"], "id"),
        ("correlation", event["correlation"], "id"),
    ]


def find_slice_near(
    index: TimelineIndex, lane: int, instant_ns: int, reach_ns: int
) -> dict[str, Any] | None:
    """Find a lane's longest slice within ``reach_ns`` of an instant, as JSON.

    ``count``: number of slices there."""
    lo, hi = index.slice_range(lane, instant_ns - reach_ns, instant_ns + reach_ns)
    if hi <= lo:
        # widen the range for a slice without duration
        lo, hi = index.slice_range(lane, instant_ns - reach_ns - 1, instant_ns + reach_ns + 1)
    if hi <= lo:
        return None
    position = lo + int(np.argmax(index.end[lo:hi] - index.start[lo:hi]))
    return {
        **locate_slice(index, position),
        "count": hi - lo,
        "category": index.category_name(position),
    }
