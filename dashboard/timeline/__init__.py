"""The timeline: every slice of a rank's window, drawn from binary answers to what is in view."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dash

    from advisor.dashboard.session import Session


def register(app: dash.Dash, session: Session) -> None:
    """Add the timeline's addresses (``/_advisor/timeline/…``) to the application."""
    from advisor.dashboard.timeline.routes import routes

    app.server.register_blueprint(routes(session))
