"""The Dash application: its pages, the frame around them, and the document that holds them.

The timeline's scripts are ES modules, which Dash would load as classic scripts: the document names
them, all at once, so that none waits for another that imports it. On the timeline the picture comes
first: its own small scripts run at once, and Dash's (3.6 MB) are requested after the first paint.
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
from advisor.dashboard.components import element, icon, link, register_rank_choice
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import KEY, PageView, clean_query
from advisor.dashboard.pages import job
from advisor.dashboard.server import Access, protect

ASSETS = Path(__file__).resolve().parent / "assets"


def create_app(session: DashboardSession, access: Access | None = None) -> dash.Dash:
    """Build the application of a session. ``access``: who may see it. By default a new token is
    needed. ``Access()`` admits everybody who reaches it by this machine's names.

    ``app.server`` is the WSGI application to serve."""
    app = Application(
        "advisor.dashboard",
        title="advisor",
        update_title="",
        assets_folder=str(ASSETS),
        # the document names these: the first before all others, modules as what they are
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
    app.server.config[KEY] = session
    for order, page in enumerate(PAGES):
        _add(app, session, page, order)
    dash.register_page(
        "advisor.dashboard.not_found_404", path="/not-found", title="advisor", layout=_not_found
    )
    app.layout = layout
    app.server.after_request(_unknown_path_is_404)
    app.server.register_error_handler(Exception, _refuse)
    app.server.register_blueprint(status_routes(session))
    register_rank_choice(app)
    protect(app, access or Access.for_host())
    return app


def _add(app: dash.Dash, session: DashboardSession, page: MenuPage, order: int) -> None:
    """Register a page. Dash keeps pages in one registry a process, and callbacks that belong to
    no application go to the first: so pages hold no session, and callbacks are the app's own."""
    name = _module(page)
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
    if hasattr(module, "warm"):
        session.warmers.append(module.warm)


class MenuPage(NamedTuple):
    """Page of the menu: its module in ``advisor.dashboard.pages`` has ``layout(**query)``; with
    callbacks ``register(app, session)``; with slow tables ``warm(loaded)``; if it may be empty,
    ``has_content(view)``, without which it is always in the navigation."""

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
    """Build the application's layout: the provider of the theme, and the place of the page."""
    return dmc.MantineProvider(
        id="theme",
        theme={"primaryColor": "indigo", "fontFamily": "inherit", "defaultRadius": "md"},
        children=dash.page_container,
    )


def on_error(error: Exception) -> Any:
    """Say in a page's place that it failed; the details are for the terminal, not the browser."""
    print(f"advisor dashboard: {labels.clean(describe_failure(error))}", file=sys.stderr)
    outputs = dash.ctx.outputs_list
    if isinstance(outputs, list) and outputs and outputs[0].get("id") == "_pages_content":
        return _broken(), {"title": "advisor"}
    return dash.no_update


def _refuse(error: Exception) -> Any:
    """Answer a request that Dash cannot handle: a body that no page sends, or an unknown script."""
    if isinstance(error, HTTPException):
        return error
    print(f"advisor dashboard: {labels.clean(describe_failure(error))}", file=sys.stderr)
    return flask.Response("not a request of this dashboard\n", 400, mimetype="text/plain")


def _broken() -> Any:
    text = "This is a bug in advisor. Its terminal shows the error."
    return element("Main", _message("This page failed", text, "/"), id="content")


def _not_found(**given: object) -> Any:
    view = page_view.view(**clean_query(given))
    text = "The dashboard has no page at this address."
    body = _message("Page not found", text, view.href("/"))
    return page_frame(MenuPage("not-found", "", ""), view, body)


def _message(title: str, text: str, overview: str) -> Any:
    """Build a card with one message; ``overview``: the address that it leads back to."""
    back = element("P", link("Back to the overview", href=overview))
    return element(
        "Section", element("H1", title), element("P", text, role="alert"), back, cls="card centred"
    )


def _unknown_path_is_404(response: flask.Response) -> flask.Response:
    """Set status 404 for addresses without a page: Dash answers every address with its document."""
    path = flask.request.path.rstrip("/") or "/"
    if response.mimetype == "text/html" and path not in {page.path for page in PAGES}:
        response.status_code = 404 if response.status_code == 200 else response.status_code
    return response


def with_frame(page: MenuPage, inner: Layout) -> Layout:
    """Put the frame around a page. While the run is being read there is only the frame."""

    def show(**given: object) -> Any:
        query: dict[str, Any] = clean_query(given)
        view = page_view.view(**query)
        if page.module in ("live", "runs") or view.entry.loaded is not None:
            body = inner(**query)
        elif view.entry.job is not None:
            body = job.layout(**query) if page.module in ("overview", "job") else job.choose(view)
        elif view.entry.state == "failed":
            body = _failed(view)
        else:
            body = _loading(view)
        if missing := page_view.describe_missing(view, **query):
            notice = element("P", missing, role="alert", cls="card")
            of_list = isinstance(body, list)
            parts = body if of_list else [body]
            body = element("Div", notice, *parts, cls="stack" if of_list else "")
        return page_frame(page, view, body)

    return show


def page_frame(page: MenuPage, view: PageView, body: Any) -> Any:
    """Build header, navigation, and the body."""
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
    return element(
        "Header",
        link(
            icon("logo"),
            element("Span", "advisor"),
            href=view.href("/"),
            cls="brand",
            id={"keeps": "brand"},
        ),
        element("Div", *_runs(view), cls="runs"),
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


def _runs(view: PageView) -> list[Any]:
    """Build links to the runs to choose from; only the name when there is one."""
    entries = view.session.entries
    if len(entries) == 1 or view.session.folder:
        more = link(f"All {len(entries)} runs", href="/runs", cls="run-name")
        name = element("Span", labels.shorten(labels.clean(view.entry.name), 48), cls="run-name")
        return [name, more] if view.session.folder else [name]
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
    """Build links to the pages that have something to show."""
    links = []
    for item in PAGES:
        is_current = item.module == page.module
        if not is_current and not has_content(item, view):
            continue
        to = link(
            icon(item.module),
            element("Span", item.name),
            href=view.href(item.path),
            id={"keeps": item.module},
        )
        links.append(
            element("Li", to, cls=f"to-{item.module} here" if is_current else f"to-{item.module}")
        )
    return element("Nav", element("Ul", *links), cls="side", aria_label="Pages")


def has_content(page: MenuPage, view: PageView) -> bool:
    """Return whether a page has something to show of a run. While a run is read, or after that
    failed, only pages that need no report have."""
    check = getattr(import_module(_module(page)), "has_content", None)
    if view.entry.state in ("loading", "failed"):
        of_all = page.module in ("live", "runs", "compare") and bool(check and check(view))
        return of_all or (page.module in ("overview", "findings") and view.entry.state == "loading")
    return check is None or bool(check(view))


def _module(page: MenuPage) -> str:
    return f"advisor.dashboard.pages.{page.module}"


def _loading(view: PageView) -> Any:
    """Show progress until the run is read; assets/shell.js keeps it current and then reloads."""
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


def _failed(view: PageView) -> Any:
    return element(
        "Section",
        element("H1", "This run cannot be shown"),
        element("P", labels.clean(view.entry.failure_reason), role="alert"),
        element("P", "docs/getting-a-trace.md lists the supported files and how to record them."),
        cls="card centred",
    )


def status_routes(session: DashboardSession) -> flask.Blueprint:
    """Add ``/_advisor/status``: how far each path is, as JSON."""
    blueprint = flask.Blueprint("advisor_status", "advisor.dashboard", url_prefix="/_advisor")

    @blueprint.get("/status")
    def status() -> flask.Response:
        return flask.jsonify(session.status())

    return blueprint


TIMELINE = "/timeline"
MODULES: Final = "/assets/timeline"
FILES: Final = tuple(
    sorted(file.name for file in (Path(__file__).parent / "assets" / "timeline").glob("*.js"))
)

GRID: Final = re.compile(
    r'<script src="(?P<address>/_dash-component-suites/dash_ag_grid/[^"]+)"></script>\n?'
)
"""Script of the library that few pages use: assets/dashAgGridComponentFunctions.js asks for it."""

HEAD = """<!DOCTYPE html>
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
    """Dash application with this document around its pages."""

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
        """Build the document from the parts that Dash made."""
        parts = {"metas": metas, "title": title, "css": css, "config": config}
        parts |= {"scripts": scripts, "app_entry": app_entry, "renderer": renderer}
        timeline = flask.request.path.rstrip("/").endswith(TIMELINE)
        return build_document(parts, picture_first=timeline)


def build_document(parts: dict[str, str], *, picture_first: bool) -> str:
    """Build the HTML of ``parts`` that ``interpolate_index`` got. ``picture_first``: Dash's scripts
    lie in a template, from which ``timeline/last.js`` takes them when there is a picture."""
    fields = {key: parts[key] for key in ("metas", "title", "css", "app_entry", "config")}
    scripts = GRID.sub("", f"{parts['scripts']}{parts['renderer']}")
    if (grid := GRID.search(parts["scripts"])) is not None:
        fields["metas"] += f'\n<meta name="advisor-grid" content="{grid["address"]}">'
    if picture_first:
        scripts = f'<template id="dash-scripts">{scripts}</template>'
    return HEAD.format(modules=module_scripts(), last=scripts, **fields)


def module_scripts() -> str:
    """Link the timeline's scripts: run in import order, once the document is read."""
    ahead = [f'<link rel="modulepreload" href="{MODULES}/{name}">' for name in FILES]
    return "\n".join([*ahead, f'<script type="module" src="{MODULES}/main.js"></script>'])
