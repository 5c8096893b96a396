"""The timeline's addresses: ``/_advisor/timeline/…``. All read; all parameters are bounded."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import flask

from advisor.core.labels import distinct_labels
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun, OpenedPath
from advisor.dashboard.page_view import clean_query
from advisor.dashboard.page_view import session as page_session
from advisor.dashboard.timeline.detail_levels import (
    ALL,
    BASE,
    TITLES,
    category_label,
    level_of_detail,
)
from advisor.dashboard.timeline.details import describe_slice, slice_near
from advisor.dashboard.timeline.encoding import encode_view
from advisor.dashboard.timeline.index import TimelineIndex
from advisor.dashboard.timeline.search import (
    finding_summary,
    keyed_findings,
    longest_slices,
    range_statistics,
    slice_starting,
    step_through,
)
from advisor.dashboard.timeline.state import RankTimeline, time_offset

NAMES_PER_PAGE = 4096
"""Number of names on one page of the name table."""
MAX_SHOWN = 300
"""Length of a name in the table, characters; details have it in full."""
TABLE_ROWS = 100
LINK, ROW, WIDE_ROW = 60, 20, 52
"""Lengths of a name, characters: in the panel's lists, its table, the table of the view."""
MAX_RUN_NAME = 24
"""Length of a run's name beside its picture, characters."""

Reply = flask.Response


class NotReady(Exception):
    """The run is still being read, or could not be."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(why)
        self.state = state
        self.why = why


def routes(session: DashboardSession) -> flask.Blueprint:
    """Build the blueprint. Every address takes ``run`` and ``rank``, defaults the first ones."""
    blueprint = flask.Blueprint(
        "advisor_timeline", "advisor.dashboard.timeline", url_prefix="/_advisor/timeline"
    )

    def rule(name: str, answer: Callable[[RankTimeline, Any], Reply]) -> None:
        def respond() -> Reply:
            args = clean_query(flask.request.args.to_dict(flat=False))
            return answer(_chosen(session, args), args)

        blueprint.add_url_rule(f"/{name}", name, respond, methods=["GET"])

    for name, answer in _ANSWERS.items():
        rule(name, answer)

    @blueprint.errorhandler(BadParameter)
    def refused(error: BadParameter) -> tuple[Reply, int]:
        return flask.jsonify({"error": str(error)}), 400

    @blueprint.errorhandler(NotReady)
    def not_ready(error: NotReady) -> tuple[Reply, int]:
        code = 503 if error.state == "loading" else 409
        return flask.jsonify({"state": error.state, "error": error.why}), code

    return blueprint


def warm_first(session: DashboardSession) -> None:
    """Wait until the session is read, and make the timeline that is looked at first."""
    session.wait()
    entry = session.entries[0]
    if entry.loaded is not None:
        rank_timeline(
            entry.loaded, next(iter(entry.loaded.analyses)), entry.version, libraries=False
        )


def rank_timeline(
    loaded: LoadedRun, rank: int, version: int, *, libraries: bool = True
) -> RankTimeline:
    """Return the timeline of a rank, built once for each loaded run, and once more without the
    frames of libraries when those are hidden."""
    return loaded.cached(
        ("timeline", rank, libraries),
        lambda: RankTimeline(
            loaded.analyses[rank], loaded.report, rank, version, libraries=libraries
        ),
    )


def _chosen(session: DashboardSession, args: Any) -> RankTimeline:
    loaded, rank = _loaded(session, args, "run", "rank")
    libraries = read_number(args, "libraries", 0, 1, default=1)
    entry = _entry(session, args, "run")
    return rank_timeline(loaded, rank, entry.version, libraries=bool(libraries))


def _entry(session: DashboardSession, args: Any, key: str) -> OpenedPath:
    wanted = args.get(key, session.entries[0].key)
    entry = next((e for e in session.entries if e.key == wanted), None)
    if entry is None:
        raise BadParameter("there is no such run")
    return entry


def _loaded(session: DashboardSession, args: Any, run: str, rank: str) -> tuple[LoadedRun, int]:
    """Return the run and the rank that two parameters name."""
    entry = _entry(session, args, run)
    loaded = entry.loaded
    if loaded is None:
        raise NotReady(entry.state, entry.failure_reason or entry.progress)
    number = read_number(args, rank, -1, 10**6, default=next(iter(loaded.analyses)))
    if number not in loaded.analyses:
        raise BadParameter("there is no such rank")
    return loaded, number


def _runs(session: DashboardSession) -> list[dict[str, Any]]:
    """List the runs that are read, to put one beside another."""
    ready = [(e, e.loaded) for e in session.entries if e.loaded is not None]
    names = distinct_labels((e.name for e, _ in ready), MAX_RUN_NAME)
    return [
        {"key": e.key, "name": name, "ranks": sorted(loaded.analyses)}
        for (e, loaded), name in zip(ready, names, strict=True)
    ]


def _beside(_line: RankTimeline, args: Any) -> Reply:
    """Answer the time offset to another rank or run (``other_run``, ``other_rank``), ns."""
    session = page_session()
    here, there = (
        _loaded(session, args, f"{prefix}run", f"{prefix}rank") for prefix in ("", "other_")
    )
    offset = time_offset(here, there)
    return flask.jsonify({"ns": offset.ns, "how": offset.alignment})


def _info(line: RankTimeline, args: Any) -> Reply:
    """Answer the parts of the picture: groups, lanes, categories, counters, findings, steps."""
    index, a = line.index, line.analysis
    session = page_session()
    loaded, _ = _loaded(session, args, "run", "rank")
    device = a.device
    steps = a.steps
    return flask.jsonify(
        {
            "version": line.version,
            "rank": line.rank,
            "ranks": sorted(loaded.analyses),
            "runs": _runs(session),
            "libraries": line.libraries,
            "frames": bool((a.trace.cpu["kind"] == "python").any()),
            "begin": index.begin,
            "finish": index.finish,
            "slices": len(index),
            "device": None if device is None else device.name,
            "steps": {
                "source": steps.source,
                "used": steps.used.height,
                "found": steps.table.height,
                "median": steps.used["dur"].median(),
            },
            "span": [int(a.spans.start[0]), int(a.spans.end[-1])] if len(a.spans) else None,
            "categories": [[c.key, category_label(c, index), c.colour] for c in ALL],
            "sets": [[title, BASE[part], len(part)] for part, title in TITLES],
            "groups": [
                {
                    "key": g.key,
                    "label": g.label,
                    "kind": g.kind,
                    "first": g.first_lane,
                    "count": g.count,
                    "folded": g.folded,
                    "sets": [index.lanes[g.first_lane + i].base for i in range(g.count)],
                    "slices": index.lanes[g.first_lane + g.count - 1].hi
                    - index.lanes[g.first_lane].lo,
                }
                for g in index.groups
            ],
            "counters": [
                {
                    "key": c.key,
                    "label": c.label,
                    "unit": c.unit,
                    "low": float(c.value.min()),
                    "high": float(c.value.max()),
                }
                for c in index.counters
            ],
            "names": len(index.names),
            "page": NAMES_PER_PAGE,
            "notes": list(index.notes),
            "findings": [finding_summary(k, f) for k, f in keyed_findings(line.report).items()],
        }
    )


def _names(line: RankTimeline, args: Any) -> Reply:
    """Answer a page of the name table: ``names``, and a label for each that fits into a slice."""
    page = read_number(args, "page", 0, 10**6, default=0)
    names = line.index.names[page * NAMES_PER_PAGE : (page + 1) * NAMES_PER_PAGE]
    return flask.jsonify(
        {"names": [name[:MAX_SHOWN] for name in names], "labels": line.labels(page, NAMES_PER_PAGE)}
    )


def _view(line: RankTimeline, args: Any) -> Reply:
    """Answer slices, cells and counters of a view: see ``encoding.py``."""
    began = time.perf_counter()
    index = line.index
    x0, x1 = read_span(args, index)
    px = read_number(args, "px", MIN_PX, MAX_PX)
    lanes = read_numbers(args, "lanes", len(index.lanes))
    counters = read_numbers(args, "counters", len(index.counters))
    flags = line.flags(read_text(args, "focus"), read_text(args, "q"))
    view = level_of_detail(index, lanes, x0, x1, px, flags)
    ms = (time.perf_counter() - began) * 1e3
    data = encode_view(index, view, (x0, x1), px, counters, flags, ms, line.version)
    response = flask.Response(data, mimetype="application/octet-stream")
    spent = (time.perf_counter() - began) * 1e3
    response.headers["Server-Timing"] = f"view;dur={spent:.2f}"
    return response


def _slice(line: RankTimeline, args: Any) -> Reply:
    position = read_number(args, "id", 0, 2**32 - 1)
    if position >= len(line.index):
        raise BadParameter("there is no such slice")
    details = describe_slice(line.analysis, line.index, position)
    _label(details["links"], LINK)
    return flask.jsonify(details)


def _at(line: RankTimeline, args: Any) -> Reply:
    """Answer the longest slice of a lane near an instant: what a cell stands for."""
    lane = read_number(args, "lane", 0, 10**6)
    if lane >= len(line.index.lanes):
        raise BadParameter("there is no such lane")
    t = read_number(args, "t", -MAX_NS, MAX_NS)
    reach = read_number(args, "reach", 1, MAX_NS)
    return flask.jsonify(slice_near(line.index, lane, t, reach))


def _search(line: RankTimeline, args: Any) -> Reply:
    """Answer the next or previous slice whose name has the text."""
    query = read_text(args, "q")
    position = read_number(args, "id", -1, 2**32 - 1, default=-1)
    since = read_number(args, "t", -MAX_NS, MAX_NS, default=line.index.begin)
    back = read_number(args, "back", 0, 1, default=0)
    match = step_through(
        line.index, line.search(query), None if position < 0 else position, since, back=bool(back)
    )
    return flask.jsonify(match)


def _find(line: RankTimeline, args: Any) -> Reply:
    """Answer the slice that begins at an instant."""
    t = read_number(args, "t", -MAX_NS, MAX_NS)
    dur = read_number(args, "dur", -1, MAX_NS, default=-1)
    return flask.jsonify(slice_starting(line.index, t, None if dur < 0 else dur))


def _range(line: RankTimeline, args: Any) -> Reply:
    x0, x1 = read_span(args, line.index)
    statistics = range_statistics(line.analysis, line.index, x0, x1)
    for part in ("kernels", "operators", "calls"):
        _label(statistics[part]["rows"], ROW)
    return flask.jsonify(statistics)


def _table(line: RankTimeline, args: Any) -> Reply:
    """Answer the longest slices in view as rows of text."""
    x0, x1 = read_span(args, line.index)
    lanes = read_numbers(args, "lanes", len(line.index.lanes))
    slices = longest_slices(line.index, lanes, x0, x1, TABLE_ROWS)
    _label(slices["rows"], WIDE_ROW)
    return flask.jsonify(slices)


def _label(rows: list[dict[str, Any]], width: int) -> None:
    """Add a label beside each name of a table."""
    for row, label in zip(rows, distinct_labels((row["name"] for row in rows), width), strict=True):
        row["label"] = label


_ANSWERS: dict[str, Callable[[RankTimeline, Any], Reply]] = {
    "info": _info, "beside": _beside, "names": _names, "view": _view, "slice": _slice, "at": _at,
    "search": _search, "find": _find, "range": _range, "table": _table,
}  # fmt: skip


MAX_NS = 1 << 60
MAX_QUERY = 200
MAX_RANGES = 512
MAX_ASKED = 1024
"""Number of lanes in one answer: more do not fit on a screen."""
MIN_SPAN, MAX_PX, MIN_PX = 16, 8192, 16

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


class BadParameter(ValueError):
    """The request makes no sense; the text says which part of it."""


def read_number(
    args: Mapping[str, str], key: str, low: int, high: int, default: int | None = None
) -> int:
    """Read a whole number between two bounds."""
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
    """Read ``x0`` and ``x1``, ns: somewhere near what there is, and some length."""
    length = index.finish - index.begin
    low, high = index.begin - length - 10**9, index.finish + length + 10**9
    x0, x1 = (read_number(args, key, -MAX_NS, MAX_NS) for key in ("x0", "x1"))
    if x1 - x0 < MIN_SPAN:
        raise BadParameter(f"x1 is not {MIN_SPAN} ns after x0")
    if x0 < low or x1 > high:
        raise BadParameter("x0 and x1 are far outside the trace")
    return x0, x1


def read_numbers(args: Mapping[str, str], key: str, limit: int) -> list[int]:
    """Read ``0-3,7``: numbers below ``limit``, in order, each once; absent or empty: none."""
    text = args.get(key, "")
    values: set[int] = set()
    parts = text.split(",") if text else []
    if len(parts) > MAX_RANGES:
        raise BadParameter(f"{key} has too many parts")
    for part in parts:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise BadParameter(f"{key} is not a list of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < limit:
            raise BadParameter(f"{key}: there is no {part}")
        if last - first > MAX_ASKED:
            raise BadParameter(f"{key} asks for too many")
        values.update(range(first, last + 1))
    if len(values) > MAX_ASKED:
        raise BadParameter(f"{key} asks for too many")
    return sorted(values)


def read_text(args: Mapping[str, str], key: str) -> str:
    """Read free text, at most MAX_QUERY characters."""
    text = args.get(key, "")
    if len(text) > MAX_QUERY:
        raise BadParameter(f"{key} is longer than {MAX_QUERY} characters")
    return text
