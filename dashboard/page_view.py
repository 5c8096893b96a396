"""View of a page: the run and the rank that its address names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import flask

from advisor.core import labels
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun, OpenedPath
from advisor.measure import Analysis

SESSION_KEY = "ADVISOR_SESSION"


def current_session() -> DashboardSession:
    """Return the session of the application that answers this request."""
    session: DashboardSession = flask.current_app.config[SESSION_KEY]
    return session


@dataclass(frozen=True)
class PageView:
    """Run and rank that a page shows. Both exist: the request only names them."""

    session: DashboardSession
    entry: OpenedPath
    rank: int | None
    """Number of an existing rank, or ``None`` for the reported one."""
    unticked_fixes: str = ""
    """Numbers of the fixes whose boxes are not ticked, separated by commas."""

    @property
    def loaded(self) -> LoadedRun:
        """Loaded run. Raises LookupError unless the entry is ready."""
        if self.entry.loaded is None:
            raise LookupError(self.entry.key)
        return self.entry.loaded

    @property
    def analysis(self) -> Analysis:
        """Analysis of the rank."""
        return self.loaded.analysis(self.rank)

    def href(self, path: str, **query: object) -> str:
        """Return an address within the dashboard. It keeps the run and the ticked fixes.

        ``query``: further parameters; ``None`` and empty ones are left out."""
        arguments = {key: str(value) for key, value in query.items() if value not in (None, "")}
        if self.unticked_fixes:
            arguments["without"] = self.unticked_fixes
        if self.entry.key != "0":
            arguments.setdefault("run", self.entry.key)
        return f"{path}?{urlencode(arguments, safe=',')}" if arguments else path


def view(run: object = None, rank: object = None, without: object = None, **_: object) -> PageView:
    """Return the view of the run and rank that a query names, or of the first ones.

    ``without``: numbers of the fixes that are not ticked; unknown numbers are dropped."""
    page_session = current_session()
    entry = page_session.entry(str(run) if run is not None else None)
    findings = entry.loaded.report.findings if entry.loaded is not None else []
    fix_numbers = [str(f.priority) for f in findings if f.priority is not None]
    unticked_fixes = ",".join(number for number in str(without).split(",") if number in fix_numbers)
    return PageView(page_session, entry, _parse_rank(entry, rank), unticked_fixes)


def describe_missing(
    view: PageView, /, run: object = None, rank: object = None, **_: object
) -> str:
    """Write which run or rank of a query does not exist; ``""`` if both do."""
    if run is not None and view.entry.key != str(run):
        return (
            f"There is no run {str(run)[:_MAX_NAME_LENGTH]} here. "
            f"This is {labels.clean(view.entry.name)}."
        )
    has_several_ranks = view.entry.loaded is not None and len(view.entry.loaded.analyses) > 1
    if has_several_ranks and rank not in (None, "") and view.rank is None:
        return f"There is no rank {str(rank)[:_MAX_NAME_LENGTH]} here. This is the first one."
    return ""


def _parse_rank(entry: OpenedPath, rank: object) -> int | None:
    """Return the rank that a query names, or ``None`` if it does not exist."""
    text = str(rank)
    if entry.loaded is None or len(text) > 7 or not text.removeprefix("-").isdecimal():
        return None
    number = int(text)
    return number if number in entry.loaded.analyses else None


_MAX_PARAMETERS = 40
_MAX_NAME_LENGTH = 40
_MAX_QUERY_LENGTH = 64 << 10
"""Length limit of a query string and of a value, characters."""


def clean_query(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the valid parameters of a query that Flask or Dash parsed.

    The first value of a repeated parameter counts. Values that are not text or too long are
    dropped."""
    cleaned: dict[str, str] = {}
    for name, value in parameters.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        if not isinstance(first, str) or not name.isidentifier() or len(name) > _MAX_NAME_LENGTH:
            continue
        if len(first) > _MAX_QUERY_LENGTH:
            continue
        if len(cleaned) == _MAX_PARAMETERS:
            break
        cleaned[name] = first
    return cleaned


def parse_query(search: object) -> dict[str, str]:
    """Return the parameters in the query of an address such as ``?run=1&rank=0``."""
    if not isinstance(search, str):
        return {}
    parameters: dict[str, list[str]] = {}
    query = search[:_MAX_QUERY_LENGTH].removeprefix("?")
    for name, value in parse_qsl(query, keep_blank_values=True, errors="replace"):
        parameters.setdefault(name, []).append(value)
    return clean_query(parameters)
