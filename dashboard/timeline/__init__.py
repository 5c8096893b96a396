"""The timeline: every slice of a rank's window, drawn from binary answers to what is in view."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dash

    from advisor.dashboard.session import Session


def register(app: dash.Dash, session: Session) -> None:
    """Add the timeline's addresses (``/_advisor/timeline/…``) to the application, and make the
    first timeline beside serving, once the run is read."""
    from advisor.dashboard.timeline.routes import routes, warm

    app.server.register_blueprint(routes(session))
    threading.Thread(target=warm, args=[session], name="advisor-timeline", daemon=True).start()
