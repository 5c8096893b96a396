"""The timeline's addresses: ``/_advisor/timeline/…``. All read; all parameters are bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flask

from advisor.core.labels import distinct
from advisor.dashboard.query import texts
from advisor.dashboard.timeline import focus as finding_of
from advisor.dashboard.timeline import params
from advisor.dashboard.timeline.beside import shift
from advisor.dashboard.timeline.categories import ALL, BASE, TITLES, called
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
LINK, ROW, WIDE_ROW = 60, 20, 52
"""Characters of a name in the lists of the panel, in its table, in the table of what is in view."""
RUN = 24
"""Characters of a run's name beside its picture."""

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
            args = texts(flask.request.args.to_dict(flat=False))
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


def of(loaded: Loaded, rank: int, version: int, *, libraries: bool = True) -> RankTimeline:
    """The timeline of a rank, built once for each loaded run, and once more without the frames of
    libraries when those are hidden."""
    return loaded.view(
        ("timeline", rank, libraries),
        lambda: RankTimeline(
            loaded.analyses[rank], loaded.report, rank, version, libraries=libraries
        ),
    )


def _chosen(session: Session, args: Any) -> RankTimeline:
    loaded, rank = _loaded(session, args, "run", "rank")
    libraries = params.number(args, "libraries", 0, 1, default=1)
    entry = _entry(session, args, "run")
    return of(loaded, rank, entry.version, libraries=bool(libraries))


def _entry(session: Session, args: Any, key: str) -> Entry:
    wanted = args.get(key, session.entries[0].key)
    entry = next((e for e in session.entries if e.key == wanted), None)
    if entry is None:
        raise params.Refused("there is no such run")
    return entry


def _loaded(session: Session, args: Any, run: str, rank: str) -> tuple[Loaded, int]:
    """The run and the rank that two parameters name."""
    entry = _entry(session, args, run)
    loaded = entry.loaded
    if loaded is None:
        raise NotReady(entry.state, entry.why or entry.doing)
    number = params.number(args, rank, -1, 10**6, default=next(iter(loaded.analyses)))
    if number not in loaded.analyses:
        raise params.Refused("there is no such rank")
    return loaded, number


def _ranks(session: Session, args: Any) -> list[int]:
    key = args.get("run", session.entries[0].key)
    entry = next(e for e in session.entries if e.key == key)
    return sorted(entry.loaded.analyses) if entry.loaded is not None else []


def _runs(session: Session) -> list[dict[str, Any]]:
    """The runs that are read, to put one beside another."""
    ready = [(e, e.loaded) for e in session.entries if e.loaded is not None]
    names = distinct((e.name for e, _ in ready), RUN)
    return [
        {"key": e.key, "name": name, "ranks": sorted(loaded.analyses)}
        for (e, loaded), name in zip(ready, names, strict=True)
    ]


def _beside(line: RankTimeline, args: Any) -> Answer:
    """How far the times of another rank or run (``other_run``, ``other_rank``) are apart."""
    session = flask.current_app.config["ADVISOR_SESSION"]
    one, other = (
        _loaded(session, args, f"{prefix}run", f"{prefix}rank") for prefix in ("", "other_")
    )
    found = shift(one, other)
    return flask.jsonify({"ns": found.ns, "how": found.how})


def _info(line: RankTimeline, args: Any) -> Answer:
    """What the picture is made of: groups, lanes, categories, counters, findings, steps."""
    index, a = line.index, line.analysis
    session = flask.current_app.config.get("ADVISOR_SESSION")
    device = a.device
    own = a.trace.meta.framework
    steps = a.steps
    return flask.jsonify(
        {
            "version": line.version,
            "rank": line.rank,
            "ranks": _ranks(session, args) if session is not None else [line.rank],
            "runs": _runs(session) if session is not None else [],
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
            "categories": [[c.key, called(c, own), c.colour] for c in ALL],
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
    """One page of the name table: ``names``, and a label for each that fits into a slice."""
    page = params.number(args, "page", 0, 10**6, default=0)
    names = line.index.names[page * PAGE : (page + 1) * PAGE]
    return flask.jsonify(
        {"names": [name[:MOST_SHOWN] for name in names], "labels": line.labels(page, PAGE)}
    )


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
    found = describe(line.analysis, line.index, at)
    _label(found["links"], LINK)
    return flask.jsonify(found)


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
    found = statistics(line.analysis, line.index, x0, x1)
    for part in ("kernels", "operators", "calls"):
        _label(found[part]["rows"], ROW)
    return flask.jsonify(found)


def _table(line: RankTimeline, args: Any) -> Answer:
    """The longest slices in view as rows of text."""
    x0, x1 = params.span(args, line.index)
    lanes = params.numbers(args, "lanes", len(line.index.lanes))
    found = table(line.index, lanes, x0, x1, TABLE_ROWS)
    _label(found["rows"], WIDE_ROW)
    return flask.jsonify(found)


def _label(rows: list[dict[str, Any]], width: int) -> None:
    """A label beside each name of a table."""
    for row, label in zip(rows, distinct((row["name"] for row in rows), width), strict=True):
        row["label"] = label


_ANSWERS: dict[str, Callable[[RankTimeline, Any], Answer]] = {
    "info": _info,
    "beside": _beside,
    "names": _names,
    "view": _view,
    "slice": _slice,
    "at": _at,
    "search": _search,
    "find": _find,
    "range": _range,
    "table": _table,
}
