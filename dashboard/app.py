"""The Dash application: pages, their frame, and what protects them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import dash

from advisor.dashboard import ranks, shell, timeline
from advisor.dashboard.access import Access, protect
from advisor.dashboard.current import KEY
from advisor.dashboard.document import Application
from advisor.dashboard.routes import routes
from advisor.dashboard.session import Session

ASSETS = Path(__file__).resolve().parent / "assets"


class Page(NamedTuple):
    """One page: its module in ``advisor.dashboard.pages`` has ``layout(**query)``; if it has
    callbacks, ``register(app, session)``; if its tables take long, ``warm(loaded)``."""

    module: str
    path: str
    name: str


PAGES = (
    Page("overview", "/", "Overview"),
    Page("findings", "/findings", "Findings"),
    Page("timeline", "/timeline", "Timeline"),
    Page("kernels", "/kernels", "Kernels and ops"),
    Page("memory", "/memory", "Memory"),
    Page("distributed", "/distributed", "Distributed"),
    Page("run", "/run", "Run"),
    Page("compare", "/compare", "Compare"),
    Page("live", "/live", "Live"),
)


def create_app(session: Session, access: Access | None = None) -> dash.Dash:
    """The application that shows a session. ``access`` defaults to this machine only.

    ``app.server`` is the WSGI application to serve.
    """
    app = Application(
        "advisor.dashboard",
        title="advisor",
        update_title="",
        assets_folder=str(ASSETS),
        assets_ignore=r"^early\.js$",  # document.py puts it first
        use_pages=True,
        pages_folder="",
        suppress_callback_exceptions=True,
        include_assets_files=True,
        serve_locally=True,
        add_log_handler=False,
        include_pages_meta=False,
        enable_mcp=False,
        on_error=shell.on_error,
    )
    app.server.config[KEY] = session
    for order, page in enumerate(PAGES):
        _add(app, session, page, order)
    app.layout = shell.layout
    app.server.register_blueprint(routes(session))
    ranks.register(app)
    timeline.register(app, session)
    protect(app, access or Access())
    return app


def _add(app: dash.Dash, session: Session, page: Page, order: int) -> None:
    """Register a page. Dash keeps pages in one registry a process, and callbacks that belong to
    no application go to the first: so pages hold no session, and callbacks are the app's own."""
    name = f"advisor.dashboard.pages.{page.module}"
    module = import_module(name)
    dash.register_page(
        name,
        path=page.path,
        name=page.name,
        title=f"{page.name} · advisor",
        order=order,
        layout=shell.framed(page, module.layout),
    )
    if hasattr(module, "register"):
        module.register(app, session)
    if hasattr(module, "warm"):
        session.warmers.append(module.warm)
