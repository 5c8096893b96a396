"""The timeline page: a place for the canvas, which ``assets/timeline/`` fills; and the trace with
advisor's tracks, written when somebody asks for it."""

import itertools
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dash
import flask

from advisor.core import labels
from advisor.core.errors import AdvisorError
from advisor.core.files import scratch_folder
from advisor.dashboard import page_view
from advisor.dashboard.components import element, icon
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import PageView, clean_query
from advisor.dashboard.timeline.routes import routes, warm_first


def has_content(view: PageView) -> bool:
    """Return whether a trace was recorded."""
    return view.entry.loaded is None or not view.analysis.record_only


def layout(**query: object) -> Any:
    """Build the page. What it shows is in the address (``x0``, ``x1``, ns; ``rank``; ``focus``),
    which the script reads and keeps up to date."""
    view = page_view.view(**query)
    return element(
        "Div",
        element("H1", "Timeline", cls="visually-hidden"),
        element("Div", id="timeline", data_run=view.entry.key, data_advisor_timeline="1"),
        trace_buttons(view),
        cls="wide timeline-page",
    )


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Add the addresses that the script asks, and build the first timeline beside serving."""
    app.server.register_blueprint(routes(session))
    app.server.register_blueprint(trace_routes(session))
    threading.Thread(
        target=warm_first, args=[session], name="advisor-timeline", daemon=True
    ).start()


ADDRESS = "/_advisor/trace"
MAX_KEPT = 2
"""Number of files that are kept: the one asked for last is likely asked for again."""


class TraceFiles:
    """Files made so far, in a private folder that goes when the session is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closing = ExitStack()
        self._folder: Path | None = None
        self._number = itertools.count()
        self._made: dict[tuple[str, int, int], Path] = {}

    def file(self, view: PageView) -> Path:
        """Return the file of a view. One is made at a time: it takes as long as reading did."""
        from advisor.export import build_tracks, write_trace

        a, report = view.analysis, view.loaded.report
        key = (view.entry.key, -1 if view.rank is None else view.rank, view.entry.version)
        with self._lock:
            if key in self._made:
                return self._made[key]
            if a.record_only:
                raise AdvisorError("no window was profiled, so there is no trace")
            if a.trace.meta.path == "-":
                raise AdvisorError(
                    "a trace from standard input is not kept; save it to a file first"
                )
            if self._folder is None:
                self._folder = self._closing.enter_context(scratch_folder())
            target = self._folder / f"{next(self._number)}.json.gz"
            limit = view.session.options.read.max_bytes
            write_trace(a.trace, target, lambda head: build_tracks(a, report, head), limit=limit)
            while len(self._made) >= MAX_KEPT:
                self._made.pop(next(iter(self._made))).unlink(missing_ok=True)
            self._made[key] = target
            return target

    def close(self) -> None:
        with self._lock:
            self._closing.close()
            self._folder = None
            self._made.clear()


def trace_routes(session: DashboardSession) -> flask.Blueprint:
    """Add ``/_advisor/trace?run=…&rank=…``: the file, packed with gzip."""
    blueprint = flask.Blueprint("advisor_trace", "advisor.dashboard", url_prefix=ADDRESS)
    files = TraceFiles()
    session.closers.append(files.close)

    @blueprint.get("")
    def trace() -> flask.typing.ResponseReturnValue:
        given: dict[str, Any] = clean_query(flask.request.args.to_dict(flat=False))
        view = page_view.view(**given)
        if view.entry.loaded is None:
            return flask.Response(f"{view.entry.failure_reason or 'Not read yet.'}\n", 409)
        try:
            file = files.file(view)
        except AdvisorError as error:
            return flask.Response(f"{labels.clean(str(error))}\n", 409, mimetype="text/plain")
        return flask.send_file(
            file, mimetype="application/gzip", as_attachment=True, download_name=file_name(view)
        )

    return blueprint


def file_name(view: PageView) -> str:
    """Return the file's name where it is saved: ``train.advisor.json.gz``."""
    stem = view.entry.name.split(".json")[0]
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in stem)
    rank = "" if view.rank is None else f".rank{view.rank}"
    return f"{safe.strip('.')[:80] or 'trace'}{rank}.advisor.json.gz"


def trace_buttons(view: PageView) -> Any:
    """Build buttons that save the trace, and open it in Perfetto; what that does is said before it
    is done. ``None`` without a trace."""
    a = view.analysis
    if a.record_only or a.trace.meta.path == "-":
        return None
    address = view.href(ADDRESS, rank=view.rank)
    save = element(
        "A",
        "Save the trace with advisor's tracks",
        href=address,
        download=file_name(view),
        cls="button",
    )
    viewer = view.session.perfetto
    if viewer is None:
        return element("Div", save, cls="actions trace-file")
    return element(
        "Div",
        save,
        element("Button", icon("show"), "Open in Perfetto …", id="perfetto-ask", cls="button"),
        _explanation(viewer, address, file_name(view)),
        cls="actions trace-file",
    )


def _explanation(viewer: str, address: str, title: str) -> Any:
    """Build the text that the first click shows; assets/perfetto.js opens it at the second."""
    return element(
        "Section",
        element("H2", "Open in Perfetto"),
        element(
            "P",
            "This opens ",
            element("Code", viewer),
            " in a new tab, which is a request to that site, and passes the trace to it inside "
            "your browser. Nothing was sent there before. It states that it uploads a trace only "
            "when you share it; advisor cannot check that. A trace contains names of your code, "
            "files and machines.",
        ),
        element(
            "Div",
            element(
                "Button",
                "Open",
                id="perfetto-open",
                cls="button main",
                data_viewer=viewer,
                data_trace=address,
                data_title=title,
            ),
            element("Button", "Cancel", id="perfetto-leave", cls="button"),
            cls="actions",
        ),
        element("P", "", id="perfetto-state", role="status", cls="note-line"),
        id="perfetto",
        cls="card",
        hidden=True,
        tabIndex="-1",
        aria_label="Open in Perfetto",
    )
