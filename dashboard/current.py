"""What a page is about: the entry and the rank that its address names."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

import flask

from advisor.dashboard.session import Entry, Loaded, Session
from advisor.measure import Analysis

KEY = "ADVISOR_SESSION"


def session() -> Session:
    """The session of the application that answers this request."""
    found: Session = flask.current_app.config[KEY]
    return found


@dataclass(frozen=True)
class View:
    """An entry, a rank, and the query they came from. Nothing in it was taken from a request
    without being looked up among what there is."""

    session: Session
    entry: Entry
    rank: int | None
    """A rank that is there; ``None``: the reported one."""

    @property
    def loaded(self) -> Loaded:
        """The loaded run; only for entries that are ready."""
        if self.entry.loaded is None:
            raise LookupError(self.entry.key)
        return self.entry.loaded

    @property
    def analysis(self) -> Analysis:
        """The measurements of the rank."""
        return self.loaded.analysis(self.rank)

    def href(self, path: str, **query: object) -> str:
        """An address within the dashboard that keeps the run (and the rank, if it is given)."""
        found = {key: str(value) for key, value in query.items() if value not in (None, "")}
        if self.entry.key != "0":
            found.setdefault("run", self.entry.key)
        return f"{path}?{urlencode(found)}" if found else path


def view(run: object = None, rank: object = None, **_: object) -> View:
    """What the query of a request asks for; what is not there becomes the default."""
    here = session()
    entry = here.entry(str(run) if run is not None else None)
    return View(here, entry, _rank(entry, rank))


def _rank(entry: Entry, rank: object) -> int | None:
    text = str(rank)
    if entry.loaded is None or len(text) > 7 or not text.removeprefix("-").isdecimal():
        return None
    number = int(text)
    return number if number in entry.loaded.analyses else None
