"""Addresses of the dashboard that are not pages: how far loading is."""

from __future__ import annotations

import flask

from advisor.dashboard.session import Session


def routes(session: Session) -> flask.Blueprint:
    """``/_advisor/status``: how far each path is, as JSON."""
    blueprint = flask.Blueprint("advisor_status", "advisor.dashboard", url_prefix="/_advisor")

    @blueprint.get("/status")
    def status() -> flask.Response:
        return flask.jsonify(session.status())

    return blueprint
