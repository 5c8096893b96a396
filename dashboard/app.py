"""The Dash application: pages, their frame, and what protects them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import dash

from advisor.dashboard import ranks, shell, timeline, tracefile
from advisor.dashboard.access import Access, protect
from advisor.dashboard.current import KEY
from advisor.dashboard.document import Application
from advisor.dashboard.menu import PAGES, Page
from advisor.dashboard.routes import routes
from advisor.dashboard.session import Session

ASSETS = Path(__file__).resolve().parent / "assets"


def create_app(session: Session, access: Access | None = None) -> dash.Dash:
    """The application that shows a session. ``access``: who may see it; by default nobody who does
    not know a token that was just made, ``Access()`` is everybody who reaches it by this machine's
    names.

    ``app.server`` is the WSGI application to serve.
    """
    app = Application(
        "advisor.dashboard",
        title="advisor",
        update_title="",
        assets_folder=str(ASSETS),
        # document.py names these: the first before all others, modules as what they are
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
        on_error=shell.on_error,
    )
    app.server.config[KEY] = session
    for order, page in enumerate(PAGES):
        _add(app, session, page, order)
    app.layout = shell.layout
    app.server.register_blueprint(routes(session))
    app.server.register_blueprint(tracefile.routes(session))
    ranks.register(app)
    timeline.register(app, session)
    protect(app, access or Access.to())
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
