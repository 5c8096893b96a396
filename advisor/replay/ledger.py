"""The ledger: what was promised of a fix and what it brought, one line a trial. Holds no source
code, no names of programs, files or hosts.

JSON lines, appended under a lock, each with the number of its form: lines of another form, torn or
damaged ones are passed over and counted. A run's own is ``ledger.jsonl`` in its folder; one for the
user is written only where they agreed. Imports neither torch nor polars.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular

SCHEMA = "advisor.ledger/1"
FILE = "ledger.jsonl"
VARIABLE = "ADVISOR_LEDGER"
"""Where the user's ledger is, in place of ``~/.local/share/advisor/ledger.jsonl``."""
MAX_BYTES = 8 << 20
MIN_RATIO = 0.05
"""A fix that brought nothing, or less, counts as this share of what was promised."""


class Entry(Struct, kw_only=True, omit_defaults=True):
    """A prediction and its measurement. Gains are shares of the mean step (0 to 1)."""

    schema: str = SCHEMA
    unix: int = 0
    """When, s since 1970."""
    source: Literal["try", "compare", "workload", "pair"] = "try"
    """A trial; a comparison of two runs; ours: a bundled workload, a public pair of traces."""
    of: str = ""
    """Ours: which pair or workload, as docs/accuracy.md names it; empty: the user's."""
    rule: str = ""
    knob: str = ""
    """With its setting; empty: done by hand."""
    device: str = ""
    """Name of the GPU; empty: none."""
    torch: str = ""
    predicted: float = 0.0
    low: float = 0.0
    high: float = 0.0
    measured: float = 0.0
    measured_low: float = 0.0
    measured_high: float = 0.0

    @property
    def ratio(self) -> float:
        """What it brought, over what was promised."""
        return max(self.measured / self.predicted, MIN_RATIO) if self.predicted > 0 else 1.0

    @property
    def inside(self) -> bool:
        """Whether the measured interval meets the band."""
        return self.measured_low <= self.high and self.measured_high >= self.low


class Read(NamedTuple):
    """What a ledger holds."""

    entries: list[Entry]
    passed_over: int
    """Lines that could not be read."""


class Record(NamedTuple):
    """How predictions of one rule did."""

    trials: int
    inside: int
    low: float
    high: float
    """The smallest and the largest ratio of truth to prediction."""

    def __str__(self) -> str:
        trials = "trial" if self.trials == 1 else "trials"
        return (
            f"over {self.trials} {trials} the truth was {self.low:.1f} to {self.high:.1f} of the "
            "prediction"
        )


def user_file() -> Path:
    """The user's ledger, whether it exists or not."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(base) / "advisor" / FILE


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Add lines, all or none of them between those of others. Raises AdvisorError."""
    lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    if not lines:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with _locked(descriptor):
                os.write(descriptor, lines)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be written ({error.strerror or error})") from None


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """While nobody else appends. Where there is no such lock, an append of this size is whole."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def read(path: Path) -> Read:
    """A ledger that may not be there, or hold lines of others."""
    if not path.is_file():
        return Read([], 0)
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    return decode(data)


def decode(data: bytes) -> Read:
    """Lines of a ledger."""
    found, bad = [], 0
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            bad += 1
            continue
        numbers = (entry.predicted, entry.low, entry.high, entry.measured)
        if entry.schema != SCHEMA or not all(map(math.isfinite, numbers)):
            bad += 1
            continue
        found.append(entry)
    return Read(found, bad)


def records(entries: Iterable[Entry]) -> dict[str, Record]:
    """By rule, in the order of their names."""
    by_rule: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.predicted > 0:
            by_rule.setdefault(entry.rule, []).append(entry)
    return {
        rule: Record(
            len(found),
            sum(one.inside for one in found),
            min(one.ratio for one in found),
            max(one.ratio for one in found),
        )
        for rule, found in sorted(by_rule.items())
    }


def plain(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """For JSON."""
    return [msgspec.to_builtins(entry) for entry in entries]
