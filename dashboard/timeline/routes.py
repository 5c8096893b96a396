"""The timeline's addresses: ``/_advisor/timeline/…``. All read; all parameters are bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flask

from advisor.dashboard.timeline import focus as finding_of
from advisor.dashboard.timeline import params
from advisor.dashboard.timeline.categories import ALL, BASE, TITLES
from advisor.dashboard.timeline.details import describe, under
from advisor.dashboard.timeline.level import level_of_detail
from advisor.dashboard.timeline.ranges import statistics, table
from advisor.dashboard.timeline.search import starting, step_through
from advisor.dashboard.timeline.state import RankTimeline
from advisor.dashboard.timeline.wire import encode

if TYPE_CHECKING:
    from advisor.dashboard.session import Entry, Loaded, Session

PAGE = 4096
"""Names of one page of the name table."""
MOST_SHOWN = 300
"""Characters of a name in the table; details have it in full."""
TABLE_ROWS = 100

Answer = flask.Response


class NotReady(Exception):
    """The run is still being read, or could not be."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(why)
        self.state = state
        self.why = why


def routes(session: Session) -> flask.Blueprint:
    """The blueprint. Every address takes ``run`` and ``rank``, defaults the first ones."""
    blueprint = flask.Blueprint(
        "advisor_timeline", "advisor.dashboard.timeline", url_prefix="/_advisor/timeline"
    )

    def rule(name: str, answer: Callable[[RankTimeline, Any], Answer]) -> None:
        def respond() -> Answer:
            args = flask.request.args
            return answer(_chosen(session, args), args)

        blueprint.add_url_rule(f"/{name}", name, respond, methods=["GET"])

    for name, answer in _ANSWERS.items():
        rule(name, answer)

    @blueprint.errorhandler(params.Refused)
    def refused(error: params.Refused) -> tuple[Answer, int]:
        return flask.jsonify({"error": str(error)}), 400

    @blueprint.errorhandler(NotReady)
    def not_ready(error: NotReady) -> tuple[Answer, int]:
        code = 503 if error.state == "loading" else 409
        return flask.jsonify({"state": error.state, "error": error.why}), code

    return blueprint


def warm(session: Session) -> None:
    """Wait until the session is read, and make the timeline that is looked at first."""
    session.wait()
    entry = session.entries[0]
    if entry.loaded is not None:
        of(entry.loaded, next(iter(entry.loaded.analyses)), entry.version)


def of(loaded: Loaded, rank: int, version: int) -> RankTimeline:
    """The timeline of a rank, built once for each loaded run."""
    return loaded.view(
        ("timeline", rank),
        lambda: RankTimeline(loaded.analyses[rank], loaded.report, rank, version),
    )


def _chosen(session: Session, args: Any) -> RankTimeline:
    key = args.get("run", session.entries[0].key)
    entry: Entry | None = next((e for e in session.entries if e.key == key), None)
    if entry is None:
        raise params.Refused("there is no such run")
    loaded = entry.loaded
    if loaded is None:
        raise NotReady(entry.state, entry.why or entry.doing)
    first = next(iter(loaded.analyses))
    rank = params.number(args, "rank", -1, 10**6, default=first)
    if rank not in loaded.analyses:
        raise params.Refused("there is no such rank")
    return of(loaded, rank, entry.version)


def _ranks(session: Session, args: Any) -> list[int]:
    key = args.get("run", session.entries[0].key)
    entry = next(e for e in session.entries if e.key == key)
    return sorted(entry.loaded.analyses) if entry.loaded is not None else []


def _info(line: RankTimeline, args: Any) -> Answer:
    """What the picture is made of: groups, lanes, categories, counters, findings, steps."""
    index, a = line.index, line.analysis
    session = flask.current_app.config.get("ADVISOR_SESSION")
    device = a.device
    steps = a.steps
    return flask.jsonify(
        {
            "version": line.version,
            "rank": line.rank,
            "ranks": _ranks(session, args) if session is not None else [line.rank],
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
            "categories": [[c.key, c.label, c.colour] for c in ALL],
            "sets": [[title, BASE[part], len(part)] for part, title in TITLES],
            "groups": [
                {
                    "key": g.key,
                    "label": g.label,
                    "kind": g.kind,
                    "first": g.first,
                    "count": g.count,
                    "folded": g.folded,
                    "sets": [index.lanes[g.first + i].base for i in range(g.count)],
                    "slices": index.lanes[g.first + g.count - 1].hi - index.lanes[g.first].lo,
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
            "page": PAGE,
            "notes": list(index.notes),
            "findings": [finding_of.brief(k, f) for k, f in finding_of.findings(line.report)],
        }
    )


def _names(line: RankTimeline, args: Any) -> Answer:
    """One page of the name table, as a JSON list."""
    page = params.number(args, "page", 0, 10**6, default=0)
    names = line.index.names[page * PAGE : (page + 1) * PAGE]
    return flask.jsonify([name[:MOST_SHOWN] for name in names])


def _view(line: RankTimeline, args: Any) -> Answer:
    """Slices, cells and counters of a view: see ``wire.py``."""
    began = time.perf_counter()
    index = line.index
    x0, x1 = params.span(args, index)
    px = params.number(args, "px", params.LEAST_PX, params.MOST_PX)
    lanes = params.numbers(args, "lanes", len(index.lanes))
    counters = params.numbers(args, "counters", len(index.counters))
    flags = line.flags(params.words(args, "focus"), params.words(args, "q"))
    view = level_of_detail(index, lanes, x0, x1, px, flags)
    ms = (time.perf_counter() - began) * 1e3
    data = encode(index, view, (x0, x1), px, counters, flags, ms, line.version)
    response = flask.Response(data, mimetype="application/octet-stream")
    spent = (time.perf_counter() - began) * 1e3
    response.headers["Server-Timing"] = f"view;dur={spent:.2f}"
    return response


def _slice(line: RankTimeline, args: Any) -> Answer:
    """All that is known of a slice."""
    at = params.number(args, "id", 0, 2**32 - 1)
    if at >= len(line.index):
        raise params.Refused("there is no such slice")
    return flask.jsonify(describe(line.analysis, line.index, at))


def _at(line: RankTimeline, args: Any) -> Answer:
    """The longest slice of a lane near an instant: what a cell stands for."""
    lane = params.number(args, "lane", 0, 10**6)
    if lane >= len(line.index.lanes):
        raise params.Refused("there is no such lane")
    t = params.number(args, "t", -params.MOST_NS, params.MOST_NS)
    reach = params.number(args, "reach", 1, params.MOST_NS)
    return flask.jsonify(under(line.index, lane, t, reach))


def _search(line: RankTimeline, args: Any) -> Answer:
    """The next or previous slice whose name has the text."""
    query = params.words(args, "q")
    at = params.number(args, "id", -1, 2**32 - 1, default=-1)
    since = params.number(args, "t", -params.MOST_NS, params.MOST_NS, default=line.index.begin)
    back = params.number(args, "back", 0, 1, default=0)
    found = step_through(
        line.index, line.hits(query), None if at < 0 else at, since, back=bool(back)
    )
    return flask.jsonify(found)


def _find(line: RankTimeline, args: Any) -> Answer:
    """The slice that begins at an instant."""
    t = params.number(args, "t", -params.MOST_NS, params.MOST_NS)
    dur = params.number(args, "dur", -1, params.MOST_NS, default=-1)
    return flask.jsonify(starting(line.index, t, None if dur < 0 else dur))


def _range(line: RankTimeline, args: Any) -> Answer:
    """Statistics of a range."""
    x0, x1 = params.span(args, line.index)
    return flask.jsonify(statistics(line.analysis, line.index, x0, x1))


def _table(line: RankTimeline, args: Any) -> Answer:
    """The longest slices in view as rows of text."""
    x0, x1 = params.span(args, line.index)
    lanes = params.numbers(args, "lanes", len(line.index.lanes))
    return flask.jsonify(table(line.index, lanes, x0, x1, TABLE_ROWS))


_ANSWERS: dict[str, Callable[[RankTimeline, Any], Answer]] = {
    "info": _info,
    "names": _names,
    "view": _view,
    "slice": _slice,
    "at": _at,
    "search": _search,
    "find": _find,
    "range": _range,
    "table": _table,
}
