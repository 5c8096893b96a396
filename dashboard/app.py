"""The Dash application: its pages, the frame around them, and the HTML document.

The timeline's scripts are ES modules, which Dash would load as classic scripts. The document lists
all of them, so that the browser requests them at once. The timeline page draws its picture first:
Dash's scripts (3.6 MB) are requested after the first paint.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import dash
import dash_mantine_components as dmc
import flask
from werkzeug.exceptions import HTTPException

from advisor.core import labels
from advisor.core.errors import describe_failure
from advisor.dashboard import page_view
from advisor.dashboard.components import element, icon, link, register_rank_selector
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import SESSION_KEY, PageView, clean_query
from advisor.dashboard.pages import job
from advisor.dashboard.server import Access, protect

ASSETS = Path(__file__).resolve().parent / "assets"


def create_app(session: DashboardSession, access: Access | None = None) -> dash.Dash:
    """Build the application of a session. ``app.server`` is the WSGI application to serve.

    ``access``: who may use it. By default a new token is needed. ``Access()`` admits everyone who
    can reach this machine by its names."""
    app = Application(
        "advisor.dashboard",
        title="advisor",
        update_title="",
        assets_folder=str(ASSETS),
        # the document lists these itself: the first one before all others, modules as modules
        assets_ignore=r"^early\.js$",
        assets_path_ignore=["timeline"],
        use_pages=True,
        pages_folder="",
        suppress_callback_exceptions=True,
        include_assets_files=True,
        serve_locally=True,
        add_log_handler=False,
        include_pages_meta=False,
        enable_mcp=False,
        on_error=on_error,
    )
    app.server.config[SESSION_KEY] = session
    for order, page in enumerate(PAGES):
        _register_page(app, session, page, order)
    dash.register_page(
        "advisor.dashboard.not_found_404",
        path="/not-found",
        title="advisor",
        layout=_not_found_page,
    )
    app.layout = layout
    app.server.after_request(_set_404_status)
    app.server.register_error_handler(Exception, _reject_request)
    app.server.register_blueprint(status_routes(session))
    register_rank_selector(app)
    protect(app, access or Access.for_host())
    return app


def _register_page(app: dash.Dash, session: DashboardSession, page: MenuPage, order: int) -> None:
    """Register a page and its callbacks.

    Dash has one registry of pages per process. Pages therefore keep no session, and callbacks are
    registered with their application."""
    name = _module_name(page)
    module = import_module(name)
    dash.register_page(
        name,
        path=page.path,
        name=page.name,
        title=f"{page.name} · advisor",
        order=order,
        layout=with_frame(page, module.layout),
    )
    if hasattr(module, "register"):
        module.register(app, session)
    if hasattr(module, "precompute"):
        session.precompute_callbacks.append(module.precompute)


class MenuPage(NamedTuple):
    """Page in the menu, with a module in ``advisor.dashboard.pages``.

    The module has ``layout(**query)``. It may have ``register(app, session)`` for callbacks,
    ``precompute(loaded)`` for slow tables, and ``has_content(view)``. A page without content is
    not in the menu."""

    module: str
    path: str
    name: str


PAGES = (
    MenuPage("runs", "/runs", "Runs"), MenuPage("overview", "/", "Overview"),
    MenuPage("job", "/job", "Job"), MenuPage("findings", "/findings", "Findings"),
    MenuPage("timeline", "/timeline", "Timeline"),
    MenuPage("kernels", "/kernels", "Kernels and ops"), MenuPage("memory", "/memory", "Memory"),
    MenuPage("distributed", "/distributed", "Distributed"),
    MenuPage("network", "/network", "Network"), MenuPage("run", "/run", "Run"),
    MenuPage("trials", "/trials", "Trials"), MenuPage("gpus", "/gpus", "Cost and GPUs"),
    MenuPage("compare", "/compare", "Compare"), MenuPage("live", "/live", "Live"),
)  # fmt: skip


Layout = Callable[..., Any]


def layout() -> Any:
    """Build the application's layout: the theme provider around the page's container."""
    return dmc.MantineProvider(
        id="theme",
        theme={"primaryColor": "indigo", "fontFamily": "inherit", "defaultRadius": "md"},
        children=dash.page_container,
    )


def on_error(error: Exception) -> Any:
    """Show a failure notice in place of a page. Only the terminal gets the details."""
    print(f"advisor dashboard: {labels.clean(describe_failure(error))}", file=sys.stderr)
    outputs = dash.ctx.outputs_list
    if isinstance(outputs, list) and outputs and outputs[0].get("id") == "_pages_content":
        return _failed_page(), {"title": "advisor"}
    return dash.no_update


def _reject_request(error: Exception) -> Any:
    """Answer status 400 to a request that Dash cannot handle, such as an invalid body."""
    if isinstance(error, HTTPException):
        return error
    print(f"advisor dashboard: {labels.clean(describe_failure(error))}", file=sys.stderr)
    return flask.Response("not a request of this dashboard\n", 400, mimetype="text/plain")


def _failed_page() -> Any:
    """Build the notice of a page that raised an exception."""
    text = "This is a bug in advisor. Its terminal shows the error."
    return element("Main", _message_card("This page failed", text, "/"), id="content")


def _not_found_page(**parameters: object) -> Any:
    """Build the page for an unknown address."""
    view = page_view.view(**clean_query(parameters))
    text = "The dashboard has no page at this address."
    body = _message_card("Page not found", text, view.href("/"))
    return page_frame(MenuPage("not-found", "", ""), view, body)


def _message_card(title: str, text: str, overview_address: str) -> Any:
    """Build a card with a message and a link back to the overview."""
    back_link = element("P", link("Back to the overview", href=overview_address))
    return element(
        "Section",
        element("H1", title),
        element("P", text, role="alert"),
        back_link,
        cls="card centred",
    )


def _set_404_status(response: flask.Response) -> flask.Response:
    """Set status 404 for unknown paths, because Dash answers every path with its document."""
    path = flask.request.path.rstrip("/") or "/"
    if response.mimetype == "text/html" and path not in {page.path for page in PAGES}:
        response.status_code = 404 if response.status_code == 200 else response.status_code
    return response


def with_frame(page: MenuPage, page_layout: Layout) -> Layout:
    """Wrap a page's layout in the frame. A run that is still being read has a progress card."""

    def framed_layout(**parameters: object) -> Any:
        query: dict[str, Any] = clean_query(parameters)
        view = page_view.view(**query)
        if page.module in ("live", "runs") or view.entry.loaded is not None:
            body = page_layout(**query)
        elif view.entry.job is not None:
            body = (
                job.layout(**query)
                if page.module in ("overview", "job")
                else job.rank_required_page(view)
            )
        elif view.entry.state == "failed":
            body = _failed_run_card(view)
        else:
            body = _progress_card(view)
        if missing := page_view.describe_missing(view, **query):
            notice = element("P", missing, role="alert", cls="card")
            is_list = isinstance(body, list)
            parts = body if is_list else [body]
            body = element("Div", notice, *parts, cls="stack" if is_list else "")
        return page_frame(page, view, body)

    return framed_layout


def page_frame(page: MenuPage, view: PageView, body: Any) -> Any:
    """Build the frame of a page: header, navigation and body."""
    return element(
        "Div",
        element("A", "Skip to the content", href="#content", cls="skip"),
        _header(view),
        element(
            "Div",
            _navigation(page, view),
            element("Main", body, id="content", tabIndex="-1"),
            cls="columns",
        ),
        cls=f"frame page-{page.module}",
    )


def _header(view: PageView) -> Any:
    """Build the header: logo, runs and theme switch."""
    return element(
        "Header",
        link(
            icon("logo"),
            element("Span", "advisor"),
            href=view.href("/"),
            cls="brand",
            id={"fix_link": "brand"},
        ),
        element("Div", *_run_links(view), cls="runs"),
        element(
            "Button",
            icon("sun"),
            icon("moon"),
            id="theme-switch",
            cls="quiet",
            title="Light or dark",
            aria_label="Switch between light and dark",
        ),
        cls="top",
    )


def _run_links(view: PageView) -> list[Any]:
    """Build links to the open runs, or the name of the only one."""
    entries = view.session.entries
    if len(entries) == 1 or view.session.folder:
        all_runs = link(f"All {len(entries)} runs", href="/runs", cls="run-name")
        name = element("Span", labels.shorten(labels.clean(view.entry.name), 48), cls="run-name")
        return [name, all_runs] if view.session.folder else [name]
    names = labels.distinct_labels((entry.name for entry in entries), 32)
    return [
        link(
            name,
            href=f"?run={entry.key}",
            cls="run-name chosen" if entry.key == view.entry.key else "run-name",
            title=labels.clean(entry.path),
        )
        for entry, name in zip(entries, names, strict=True)
    ]


def _navigation(page: MenuPage, view: PageView) -> Any:
    """Build the navigation: links to the pages that have content."""
    links = []
    for item in PAGES:
        is_current = item.module == page.module
        if not is_current and not has_content(item, view):
            continue
        page_link = link(
            icon(item.module),
            element("Span", item.name),
            href=view.href(item.path),
            id={"fix_link": item.module},
        )
        links.append(
            element(
                "Li", page_link, cls=f"to-{item.module} here" if is_current else f"to-{item.module}"
            )
        )
    return element("Nav", element("Ul", *links), cls="side", aria_label="Pages")


def has_content(page: MenuPage, view: PageView) -> bool:
    """Return whether a page has content for a run.

    While a run is being read, or if that failed, only pages without a report have content."""
    page_has_content = getattr(import_module(_module_name(page)), "has_content", None)
    if view.entry.state in ("loading", "failed"):
        needs_no_report = page.module in ("live", "runs", "compare") and bool(
            page_has_content and page_has_content(view)
        )
        return needs_no_report or (
            page.module in ("overview", "findings") and view.entry.state == "loading"
        )
    return page_has_content is None or bool(page_has_content(view))


def _module_name(page: MenuPage) -> str:
    """Return the full name of a page's module."""
    return f"advisor.dashboard.pages.{page.module}"


def _progress_card(view: PageView) -> Any:
    """Build the progress card of a run. assets/shell.js updates it until the run is read."""
    return element(
        "Section",
        element("H1", "Reading the trace"),
        element("P", labels.clean(view.entry.path), cls="path"),
        element("P", labels.clean(view.entry.progress), id="progress-doing", role="status"),
        element("Div", element("Div", cls="sweep"), cls="progress"),
        cls="card centred",
        id="progress",
        data_advisor_progress=view.entry.key,
    )


def _failed_run_card(view: PageView) -> Any:
    """Build the card of a run that could not be read."""
    return element(
        "Section",
        element("H1", "This run cannot be shown"),
        element("P", labels.clean(view.entry.failure_reason), role="alert"),
        element("P", "docs/getting-a-trace.md lists the supported files and how to record them."),
        cls="card centred",
    )


def status_routes(session: DashboardSession) -> flask.Blueprint:
    """Build the blueprint of ``/_advisor/status``: state and progress of each path, as JSON."""
    blueprint = flask.Blueprint("advisor_status", "advisor.dashboard", url_prefix="/_advisor")

    @blueprint.get("/status")
    def status() -> flask.Response:
        return flask.jsonify(session.status())

    return blueprint


TIMELINE_PATH = "/timeline"
MODULES_ADDRESS: Final = "/assets/timeline"
MODULE_FILES: Final = tuple(
    sorted(file.name for file in (Path(__file__).parent / "assets" / "timeline").glob("*.js"))
)

GRID_SCRIPT: Final = re.compile(
    r'<script src="(?P<address>/_dash-component-suites/dash_ag_grid/[^"]+)"></script>\n?'
)
"""Script of AG Grid. assets/dashAgGridComponentFunctions.js loads it on pages with a grid."""

DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
{metas}
<title>{title}</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/early.js"></script>
{css}
{modules}
</head>
<body>
{app_entry}
<footer>{config}{last}</footer>
</body>
</html>"""


class Application(dash.Dash):
    """Dash application with the dashboard's own HTML document."""

    def interpolate_index(
        self,
        metas: str = "",
        title: str = "",
        css: str = "",
        config: str = "",
        scripts: str = "",
        app_entry: str = "",
        favicon: str = "",
        renderer: str = "",
    ) -> str:
        """Build the document from Dash's parts."""
        parts = {"metas": metas, "title": title, "css": css, "config": config}
        parts |= {"scripts": scripts, "app_entry": app_entry, "renderer": renderer}
        is_timeline = flask.request.path.rstrip("/").endswith(TIMELINE_PATH)
        return build_document(parts, picture_first=is_timeline)


def build_document(parts: dict[str, str], *, picture_first: bool) -> str:
    """Build the HTML document from the parts that ``interpolate_index`` received.

    ``picture_first``: Dash's scripts are in a template. ``timeline/deferred_scripts.js`` runs them
    after the first paint."""
    fields = {key: parts[key] for key in ("metas", "title", "css", "app_entry", "config")}
    scripts = GRID_SCRIPT.sub("", f"{parts['scripts']}{parts['renderer']}")
    if (grid_script := GRID_SCRIPT.search(parts["scripts"])) is not None:
        fields["metas"] += f'\n<meta name="advisor-grid" content="{grid_script["address"]}">'
    if picture_first:
        scripts = f'<template id="dash-scripts">{scripts}</template>'
    return DOCUMENT.format(modules=module_scripts(), last=scripts, **fields)


def module_scripts() -> str:
    """Return the tags that load the timeline's modules after the document is parsed."""
    preloads = [
        f'<link rel="modulepreload" href="{MODULES_ADDRESS}/{name}">' for name in MODULE_FILES
    ]
    return "\n".join(
        [*preloads, f'<script type="module" src="{MODULES_ADDRESS}/main.js"></script>']
    )
