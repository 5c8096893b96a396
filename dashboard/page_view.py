"""View of a page: the entry and the rank that its address names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import flask

from advisor.core import labels
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun, OpenedPath
from advisor.measure import Analysis

KEY = "ADVISOR_SESSION"


def session() -> DashboardSession:
    """Return the session of the application that answers this request."""
    session_: DashboardSession = flask.current_app.config[KEY]
    return session_


@dataclass(frozen=True)
class PageView:
    """Entry, rank, and the query they came from. Nothing in it was taken from a request without
    being looked up among what there is."""

    session: DashboardSession
    entry: OpenedPath
    rank: int | None
    """Number of an existing rank, or ``None`` for the reported one."""
    without: str = ""
    """Numbers of the fixes that are not ticked, with commas between them."""

    @property
    def loaded(self) -> LoadedRun:
        """Loaded run; only for entries that are ready."""
        if self.entry.loaded is None:
            raise LookupError(self.entry.key)
        return self.entry.loaded

    @property
    def analysis(self) -> Analysis:
        return self.loaded.analysis(self.rank)

    def href(self, path: str, **query: object) -> str:
        """Return an address within the dashboard that keeps the run, the ticks (and a given
        rank)."""
        arguments = {key: str(value) for key, value in query.items() if value not in (None, "")}
        if self.without:
            arguments["without"] = self.without
        if self.entry.key != "0":
            arguments.setdefault("run", self.entry.key)
        return f"{path}?{urlencode(arguments, safe=',')}" if arguments else path


def view(run: object = None, rank: object = None, without: object = None, **_: object) -> PageView:
    """Return the run and rank that a query names; the first ones if they do not exist. Of the fixes
    that are not ticked, those that exist."""
    current_session = session()
    entry = current_session.entry(str(run) if run is not None else None)
    findings = entry.loaded.report.findings if entry.loaded is not None else []
    known = [str(f.priority) for f in findings if f.priority is not None]
    unticked = ",".join(number for number in str(without).split(",") if number in known)
    return PageView(current_session, entry, _rank(entry, rank), unticked)


def describe_missing(
    view: PageView, /, run: object = None, rank: object = None, **_: object
) -> str:
    """Say which run or rank of a query is not there; ``""`` if both are."""
    if run is not None and view.entry.key != str(run):
        return (
            f"There is no run {str(run)[:MAX_NAME]} here. This is {labels.clean(view.entry.name)}."
        )
    several = view.entry.loaded is not None and len(view.entry.loaded.analyses) > 1
    if several and rank not in (None, "") and view.rank is None:
        return f"There is no rank {str(rank)[:MAX_NAME]} here. This is the first one."
    return ""


def _rank(entry: OpenedPath, rank: object) -> int | None:
    text = str(rank)
    if entry.loaded is None or len(text) > 7 or not text.removeprefix("-").isdecimal():
        return None
    number = int(text)
    return number if number in entry.loaded.analyses else None


MAX_NAMES = 40
MAX_NAME = 40
MAX_TEXT = 64 << 10
"""Length of a value, and of a query string, that is read, characters."""


def clean_query(given: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments as a server or Dash parsed them: of a repeated one the first that is text;
    what is no text or too long is left out, as if it had not been sent."""
    arguments: dict[str, str] = {}
    for name, value in given.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        if not isinstance(first, str) or not name.isidentifier() or len(name) > MAX_NAME:
            continue
        if len(first) > MAX_TEXT:
            continue
        if len(arguments) == MAX_NAMES:
            break
        arguments[name] = first
    return arguments


def parse_query(search: object) -> dict[str, str]:
    """Return the arguments in the query of an address: ``?run=1&rank=0``."""
    if not isinstance(search, str):
        return {}
    given: dict[str, list[str]] = {}
    text = search[:MAX_TEXT].removeprefix("?")
    for name, value in parse_qsl(text, keep_blank_values=True, errors="replace"):
        given.setdefault(name, []).append(value)
    return clean_query(given)
