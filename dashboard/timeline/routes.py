"""Endpoints of the timeline: ``/_advisor/timeline/…``. They only read, and bound all parameters."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import flask

from advisor.core.labels import distinct_labels
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun, OpenedPath
from advisor.dashboard.page_view import clean_query
from advisor.dashboard.page_view import current_session as page_session
from advisor.dashboard.timeline.detail_levels import (
    ALL_CATEGORIES,
    FIRST_CATEGORY,
    SET_TITLES,
    category_label,
    select_visible,
)
from advisor.dashboard.timeline.details import describe_slice, find_slice_near
from advisor.dashboard.timeline.encoding import encode_view
from advisor.dashboard.timeline.index import TimelineIndex
from advisor.dashboard.timeline.queries import (
    find_longest_slices,
    find_next_match,
    find_slice_starting,
    findings_by_key,
    measure_range,
    summarize_finding,
)
from advisor.dashboard.timeline.state import RankTimeline, compared_offset

NAMES_PER_PAGE = 4096
"""Number of names per page of the name table."""
_MAX_NAME_LENGTH = 300
"""Length limit of a name in the table, characters. Details have the full name."""
TABLE_ROWS = 100
LINK_LABEL_LENGTH, ROW_LABEL_LENGTH, WIDE_ROW_LABEL_LENGTH = 60, 20, 52
"""Lengths of a label, characters: in the panel's lists, its tables, and the table of slices."""
MAX_RUN_NAME_LENGTH = 24
"""Length limit of a run's name above its timeline, characters."""

Reply = flask.Response


class NotReady(Exception):
    """Raised if the run is still being read, or could not be read."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


def routes(session: DashboardSession) -> flask.Blueprint:
    """Build the blueprint. All endpoints accept ``run`` and ``rank``; the first are the default."""
    blueprint = flask.Blueprint(
        "advisor_timeline", "advisor.dashboard.timeline", url_prefix="/_advisor/timeline"
    )

    def add_route(name: str, answer: Callable[[RankTimeline, Any], Reply]) -> None:
        def respond() -> Reply:
            args = clean_query(flask.request.args.to_dict(flat=False))
            return answer(_requested_timeline(session, args), args)

        blueprint.add_url_rule(f"/{name}", name, respond, methods=["GET"])

    for name, answer in _ANSWERS.items():
        add_route(name, answer)

    @blueprint.errorhandler(BadParameter)
    def bad_parameter(error: BadParameter) -> tuple[Reply, int]:
        return flask.jsonify({"error": str(error)}), 400

    @blueprint.errorhandler(NotReady)
    def not_ready(error: NotReady) -> tuple[Reply, int]:
        code = 503 if error.state == "loading" else 409
        return flask.jsonify({"state": error.state, "error": error.reason}), code

    return blueprint


def build_first_timeline(session: DashboardSession) -> None:
    """Wait until the session is read, and build the timeline of its first rank."""
    session.wait()
    entry = session.entries[0]
    if entry.loaded is not None:
        get_rank_timeline(
            entry.loaded, next(iter(entry.loaded.analyses)), entry.version, libraries=False
        )


def get_rank_timeline(
    loaded: LoadedRun, rank: int, version: int, *, libraries: bool = True
) -> RankTimeline:
    """Return the timeline of a rank. It is built once, and once more without library frames."""
    return loaded.get_or_compute(
        ("timeline", rank, libraries),
        lambda: RankTimeline(
            loaded.analyses[rank], loaded.report, rank, version, libraries=libraries
        ),
    )


def _requested_timeline(session: DashboardSession, args: Any) -> RankTimeline:
    """Return the timeline that a request names."""
    loaded, rank = _requested_rank(session, args, "run", "rank")
    libraries = read_number(args, "libraries", 0, 1, default=1)
    entry = _requested_entry(session, args, "run")
    return get_rank_timeline(loaded, rank, entry.version, libraries=bool(libraries))


def _requested_entry(session: DashboardSession, args: Any, key: str) -> OpenedPath:
    """Return the entry that the parameter ``key`` names. Raises BadParameter."""
    run_key = args.get(key, session.entries[0].key)
    entry = next((candidate for candidate in session.entries if candidate.key == run_key), None)
    if entry is None:
        raise BadParameter("there is no such run")
    return entry


def _requested_rank(
    session: DashboardSession, args: Any, run: str, rank: str
) -> tuple[LoadedRun, int]:
    """Return the run and the rank that two parameters name."""
    entry = _requested_entry(session, args, run)
    loaded = entry.loaded
    if loaded is None:
        raise NotReady(entry.state, entry.failure_reason or entry.progress)
    number = read_number(args, rank, -1, 10**6, default=next(iter(loaded.analyses)))
    if number not in loaded.analyses:
        raise BadParameter("there is no such rank")
    return loaded, number


def _list_runs(session: DashboardSession) -> list[dict[str, Any]]:
    """List the runs that are read, for a comparison."""
    ready = [(entry, entry.loaded) for entry in session.entries if entry.loaded is not None]
    names = distinct_labels((entry.name for entry, _ in ready), MAX_RUN_NAME_LENGTH)
    return [
        {"key": entry.key, "name": name, "ranks": sorted(loaded.analyses)}
        for (entry, loaded), name in zip(ready, names, strict=True)
    ]


def _answer_compared_offset(_timeline: RankTimeline, args: Any) -> Reply:
    """Answer the time offset to another rank or run (``other_run``, ``other_rank``), ns."""
    session = page_session()
    this, other = (
        _requested_rank(session, args, f"{prefix}run", f"{prefix}rank") for prefix in ("", "other_")
    )
    offset = compared_offset(this, other)
    return flask.jsonify({"ns": offset.ns, "alignment": offset.alignment})


def _answer_info(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the structure of a timeline: groups, categories, counters, findings, steps."""
    index, a = timeline.index, timeline.analysis
    session = page_session()
    loaded, _ = _requested_rank(session, args, "run", "rank")
    device = a.device
    steps = a.steps
    return flask.jsonify(
        {
            "version": timeline.version,
            "rank": timeline.rank,
            "ranks": sorted(loaded.analyses),
            "runs": _list_runs(session),
            "libraries": timeline.libraries,
            "frames": bool((a.trace.cpu["kind"] == "python").any()),
            "first_ns": index.first_ns,
            "last_ns": index.last_ns,
            "slices": len(index),
            "device": None if device is None else device.name,
            "steps": {
                "source": steps.source,
                "used": steps.used.height,
                "found": steps.table.height,
                "median": steps.used["dur"].median(),
            },
            "span": [int(a.spans.start[0]), int(a.spans.end[-1])] if len(a.spans) else None,
            "categories": [
                [item.key, category_label(item, index), item.color] for item in ALL_CATEGORIES
            ],
            "sets": [
                [title, FIRST_CATEGORY[categories], len(categories)]
                for categories, title in SET_TITLES
            ],
            "groups": [
                {
                    "key": group.key,
                    "label": group.label,
                    "kind": group.kind,
                    "first": group.first_lane,
                    "count": group.count,
                    "folded": group.folded,
                    "sets": [index.lanes[group.first_lane + i].base for i in range(group.count)],
                    "slices": index.lanes[group.first_lane + group.count - 1].end_slice
                    - index.lanes[group.first_lane].first_slice,
                }
                for group in index.groups
            ],
            "counters": [
                {
                    "key": item.key,
                    "label": item.label,
                    "unit": item.unit,
                    "low": float(item.value.min()),
                    "high": float(item.value.max()),
                }
                for item in index.counters
            ],
            "names": len(index.names),
            "page": NAMES_PER_PAGE,
            "notes": list(index.notes),
            "findings": [
                summarize_finding(key, finding)
                for key, finding in findings_by_key(timeline.report).items()
            ],
        }
    )


def _answer_names(timeline: RankTimeline, args: Any) -> Reply:
    """Answer a page of the name table: ``names``, and ``labels`` that fit into a slice."""
    page = read_number(args, "page", 0, 10**6, default=0)
    names = timeline.index.names[page * NAMES_PER_PAGE : (page + 1) * NAMES_PER_PAGE]
    return flask.jsonify(
        {
            "names": [name[:_MAX_NAME_LENGTH] for name in names],
            "labels": timeline.labels(page, NAMES_PER_PAGE),
        }
    )


def _answer_view(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the slices, cells and counters of a view, as ``encoding.py`` encodes them."""
    started = time.perf_counter()
    index = timeline.index
    x0, x1 = read_span(args, index)
    px = read_number(args, "px", MIN_PX, MAX_PX)
    lanes = read_numbers(args, "lanes", len(index.lanes))
    counters = read_numbers(args, "counters", len(index.counters))
    flags = timeline.flags(read_text(args, "focus"), read_text(args, "q"))
    view = select_visible(index, lanes, x0, x1, px, flags)
    duration_ms = (time.perf_counter() - started) * 1e3
    data = encode_view(index, view, (x0, x1), px, counters, flags, duration_ms, timeline.version)
    response = flask.Response(data, mimetype="application/octet-stream")
    total_ms = (time.perf_counter() - started) * 1e3
    response.headers["Server-Timing"] = f"view;dur={total_ms:.2f}"
    return response


def _answer_slice(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the details of a slice."""
    position = read_number(args, "id", 0, 2**32 - 1)
    if position >= len(timeline.index):
        raise BadParameter("there is no such slice")
    details = describe_slice(timeline.analysis, timeline.index, position)
    _add_labels(details["links"], LINK_LABEL_LENGTH)
    return flask.jsonify(details)


def _answer_at(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the longest slice of a lane near an instant, for a cell."""
    lane = read_number(args, "lane", 0, 10**6)
    if lane >= len(timeline.index.lanes):
        raise BadParameter("there is no such lane")
    instant_ns = read_number(args, "t", -MAX_NS, MAX_NS)
    reach_ns = read_number(args, "reach", 1, MAX_NS)
    return flask.jsonify(find_slice_near(timeline.index, lane, instant_ns, reach_ns))


def _answer_search(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the next or previous slice whose name contains a text."""
    query = read_text(args, "q")
    position = read_number(args, "id", -1, 2**32 - 1, default=-1)
    since = read_number(args, "t", -MAX_NS, MAX_NS, default=timeline.index.first_ns)
    is_backward = read_number(args, "back", 0, 1, default=0)
    match = find_next_match(
        timeline.index,
        timeline.search(query),
        None if position < 0 else position,
        since,
        is_backward=bool(is_backward),
    )
    return flask.jsonify(match)


def _answer_find(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the slice that starts at an instant."""
    instant_ns = read_number(args, "t", -MAX_NS, MAX_NS)
    duration_ns = read_number(args, "dur", -1, MAX_NS, default=-1)
    return flask.jsonify(
        find_slice_starting(timeline.index, instant_ns, None if duration_ns < 0 else duration_ns)
    )


def _answer_range(timeline: RankTimeline, args: Any) -> Reply:
    """Answer statistics of a range of time."""
    x0, x1 = read_span(args, timeline.index)
    statistics = measure_range(timeline.analysis, timeline.index, x0, x1)
    for part in ("kernels", "operators", "calls"):
        _add_labels(statistics[part]["rows"], ROW_LABEL_LENGTH)
    return flask.jsonify(statistics)


def _answer_table(timeline: RankTimeline, args: Any) -> Reply:
    """Answer the longest slices of a view, for a table."""
    x0, x1 = read_span(args, timeline.index)
    lanes = read_numbers(args, "lanes", len(timeline.index.lanes))
    slices = find_longest_slices(timeline.index, lanes, x0, x1, TABLE_ROWS)
    _add_labels(slices["rows"], WIDE_ROW_LABEL_LENGTH)
    return flask.jsonify(slices)


def _add_labels(rows: list[dict[str, Any]], width: int) -> None:
    """Add a ``label`` to each row, a short form of its ``name``."""
    for row, label in zip(rows, distinct_labels((row["name"] for row in rows), width), strict=True):
        row["label"] = label


_ANSWERS: dict[str, Callable[[RankTimeline, Any], Reply]] = {
    "info": _answer_info,
    "beside": _answer_compared_offset,
    "names": _answer_names,
    "view": _answer_view,
    "slice": _answer_slice,
    "at": _answer_at,
    "search": _answer_search,
    "find": _answer_find,
    "range": _answer_range,
    "table": _answer_table,
}


MAX_NS = 1 << 60
_MAX_QUERY_LENGTH = 200
_MAX_RANGES = 512
_MAX_LANES = 1024
"""Number of lanes in one answer. More do not fit on a screen."""
MIN_SPAN_NS, MAX_PX, MIN_PX = 16, 8192, 16

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


class BadParameter(ValueError):
    """Raised for an invalid parameter. The text names it."""


def read_number(
    args: Mapping[str, str], key: str, low: int, high: int, default: int | None = None
) -> int:
    """Read a whole number from ``low`` to ``high``. Raises BadParameter."""
    text = args.get(key)
    if text is None:
        if default is None:
            raise BadParameter(f"{key} is missing")
        return default
    if not _NUMBER.fullmatch(text):
        raise BadParameter(f"{key} is not a whole number")
    value = int(text)
    if not low <= value <= high:
        raise BadParameter(f"{key} is not between {low} and {high}")
    return value


def read_span(args: Mapping[str, str], index: TimelineIndex) -> tuple[int, int]:
    """Read ``x0`` and ``x1``, ns, which must be near the trace. Raises BadParameter."""
    length = index.last_ns - index.first_ns
    low, high = index.first_ns - length - 10**9, index.last_ns + length + 10**9
    x0, x1 = (read_number(args, key, -MAX_NS, MAX_NS) for key in ("x0", "x1"))
    if x1 - x0 < MIN_SPAN_NS:
        raise BadParameter(f"x1 is not {MIN_SPAN_NS} ns after x0")
    if x0 < low or x1 > high:
        raise BadParameter("x0 and x1 are far outside the trace")
    return x0, x1


def read_numbers(args: Mapping[str, str], key: str, limit: int) -> list[int]:
    """Read numbers below ``limit`` such as ``0-3,7``, sorted. Raises BadParameter."""
    text = args.get(key, "")
    values: set[int] = set()
    parts = text.split(",") if text else []
    if len(parts) > _MAX_RANGES:
        raise BadParameter(f"{key} has too many parts")
    for part in parts:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise BadParameter(f"{key} is not a list of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < limit:
            raise BadParameter(f"{key}: there is no {part}")
        if last - first > _MAX_LANES:
            raise BadParameter(f"{key} asks for too many")
        values.update(range(first, last + 1))
    if len(values) > _MAX_LANES:
        raise BadParameter(f"{key} asks for too many")
    return sorted(values)


def read_text(args: Mapping[str, str], key: str) -> str:
    """Read free text of at most _MAX_QUERY_LENGTH characters. Raises BadParameter."""
    text = args.get(key, "")
    if len(text) > _MAX_QUERY_LENGTH:
        raise BadParameter(f"{key} is longer than {_MAX_QUERY_LENGTH} characters")
    return text
