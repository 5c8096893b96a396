"""The timeline page: an element that ``assets/timeline/`` fills, and the trace file to save.

The trace file has advisor's tracks added. It is written when it is requested."""

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
from advisor.dashboard.timeline.routes import build_first_timeline, routes


def has_content(view: PageView) -> bool:
    """Return whether a trace was recorded."""
    return view.entry.loaded is None or not view.analysis.record_only


def layout(**query: object) -> Any:
    """Build the page. The script reads the view from the address, and keeps the address current.

    Its parameters are ``x0`` and ``x1``, ns, ``rank``, ``focus`` and others."""
    view = page_view.view(**query)
    return element(
        "Div",
        element("H1", "Timeline", cls="visually-hidden"),
        element("Div", id="timeline", data_run=view.entry.key, data_advisor_timeline="1"),
        trace_buttons(view),
        cls="wide timeline-page",
    )


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Register the script's endpoints, and build the first timeline in a thread."""
    app.server.register_blueprint(routes(session))
    app.server.register_blueprint(trace_routes(session))
    threading.Thread(
        target=build_first_timeline, args=[session], name="advisor-timeline", daemon=True
    ).start()


TRACE_ADDRESS = "/_advisor/trace"
MAX_KEPT_FILES = 2
"""Number of trace files kept. The last one is likely to be requested again."""


class TraceFiles:
    """Trace files, in a private folder that is removed when the session is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exit_stack = ExitStack()
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._files: dict[tuple[str, int, int], Path] = {}

    def get_file(self, view: PageView) -> Path:
        """Return the trace file of a view, and write it if needed, which takes as long as reading.

        Raises AdvisorError if there is no trace to write."""
        from advisor.export import build_tracks, write_trace

        a, report = view.analysis, view.loaded.report
        key = (view.entry.key, -1 if view.rank is None else view.rank, view.entry.version)
        with self._lock:
            if key in self._files:
                return self._files[key]
            if a.record_only:
                raise AdvisorError("no window was profiled, so there is no trace")
            if a.trace.meta.path == "-":
                raise AdvisorError(
                    "a trace from standard input is not kept; save it to a file first"
                )
            if self._folder is None:
                self._folder = self._exit_stack.enter_context(scratch_folder())
            target = self._folder / f"{next(self._numbers)}.json.gz"
            limit = view.session.options.read.max_bytes
            write_trace(a.trace, target, lambda head: build_tracks(a, report, head), limit=limit)
            while len(self._files) >= MAX_KEPT_FILES:
                self._files.pop(next(iter(self._files))).unlink(missing_ok=True)
            self._files[key] = target
            return target

    def close(self) -> None:
        """Remove all files."""
        with self._lock:
            self._exit_stack.close()
            self._folder = None
            self._files.clear()


def trace_routes(session: DashboardSession) -> flask.Blueprint:
    """Build the blueprint of ``/_advisor/trace?run=…&rank=…``: the trace, compressed by gzip."""
    blueprint = flask.Blueprint("advisor_trace", "advisor.dashboard", url_prefix=TRACE_ADDRESS)
    files = TraceFiles()
    session.close_callbacks.append(files.close)

    @blueprint.get("")
    def trace() -> flask.typing.ResponseReturnValue:
        parameters: dict[str, Any] = clean_query(flask.request.args.to_dict(flat=False))
        view = page_view.view(**parameters)
        if view.entry.loaded is None:
            return flask.Response(f"{view.entry.failure_reason or 'Not read yet.'}\n", 409)
        try:
            file = files.get_file(view)
        except AdvisorError as error:
            return flask.Response(f"{labels.clean(str(error))}\n", 409, mimetype="text/plain")
        return flask.send_file(
            file, mimetype="application/gzip", as_attachment=True, download_name=file_name(view)
        )

    return blueprint


def file_name(view: PageView) -> str:
    """Return the file name of a saved trace, such as ``train.advisor.json.gz``."""
    stem = view.entry.name.split(".json")[0]
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in stem)
    rank = "" if view.rank is None else f".rank{view.rank}"
    return f"{safe.strip('.')[:80] or 'trace'}{rank}.advisor.json.gz"


def trace_buttons(view: PageView) -> Any:
    """Build the buttons that save the trace and open it in Perfetto, or ``None`` without a trace.

    The Perfetto button first shows what it will do."""
    a = view.analysis
    if a.record_only or a.trace.meta.path == "-":
        return None
    address = view.href(TRACE_ADDRESS, rank=view.rank)
    save_link = element(
        "A",
        "Save the trace with advisor's tracks",
        href=address,
        download=file_name(view),
        cls="button",
    )
    viewer = view.session.perfetto
    if viewer is None:
        return element("Div", save_link, cls="actions trace-file")
    return element(
        "Div",
        save_link,
        element("Button", icon("show"), "Open in Perfetto …", id="perfetto-ask", cls="button"),
        _perfetto_notice(viewer, address, file_name(view)),
        cls="actions trace-file",
    )


def _perfetto_notice(viewer: str, address: str, title: str) -> Any:
    """Build the notice that the first click shows; the second click opens the trace."""
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
