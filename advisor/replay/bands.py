"""How wide a band is: as wide as predictions of that kind have been wrong.

``past.json`` holds predictions that were held against what really happened. Of each kind of edit
the band is such that four of five of those would have been inside it, the one to come counted in
(conformal: with n of them, the one in place ⌈0.8 (n + 1)⌉ by size). Kinds with too few of their own
take all of them. Errors are ratios, of the gain; where the batch grows, of the step, for the gain
is then near zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec

from advisor.core.finding import Edit

COVERAGE = 0.8
"""Share of the truths that a band is to hold."""
ENOUGH = round(COVERAGE / (1 - COVERAGE))
"""Fewer errors than this say nothing of that share: even the largest may be too small."""
OF_THE_STEP = ("batch",)
"""Kinds whose errors are of the step, not of the gain."""
FLOOR = 0.01
"""Of the step, each way: two runs of one program differ by that much."""


class Past(msgspec.Struct, frozen=True):
    """A prediction and what really happened, in one unit."""

    kind: str
    change: str
    predicted: float
    measured: float
    source: str
    of: str = ""
    """Name of the public pair; empty: of another table."""

    @property
    def error(self) -> float:
        """Logarithm of their ratio, without its sign."""
        return abs(math.log(self.predicted / self.measured))


class Band(NamedTuple):
    """A gain and where it lies, ns a step."""

    low: float
    high: float


def kind(edit: Edit) -> str:
    """What kind of change an edit is, as far as its errors go."""
    if edit.op == "spread":
        return "loader"
    if edit.op == "resize":
        return "batch"
    if edit.op == "punctual":
        return "ranks"
    if edit.op == "asynchronous":
        return "waits"
    return "device" if edit.select.on == "gpu" and edit.op != "drop_launch" else "host"


left_out: ContextVar[str] = ContextVar("left_out", default="")
"""The pair or workload whose own outcome no band may know of now."""


@contextmanager
def without(name: str) -> Iterator[None]:
    """Bands as if a pair or a workload had never been measured: what is predicted of it is then
    not held against a band that it has made itself."""
    token = left_out.set(name)
    try:
        yield
    finally:
        left_out.reset(token)


def past() -> tuple[Past, ...]:
    """What is known of predictions so far."""
    name = left_out.get()
    return tuple(p for p in _all() if p.of != name) if name else _all()


@cache
def _all() -> tuple[Past, ...]:
    text = resources.files("advisor.replay").joinpath("past.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=list[Past]))


def spread(errors: Sequence[float]) -> float:
    """The error that the next one stays below with ``COVERAGE``, given those before it."""
    ordered = sorted(errors)
    place = math.ceil(COVERAGE * (len(ordered) + 1))
    return ordered[min(place, len(ordered)) - 1]


def error_of(kinds: Iterable[str], known: Sequence[Past]) -> float:
    """How far off predictions of these kinds are, as a logarithm; the worst of them."""
    general = [p.error for p in known if p.kind not in OF_THE_STEP]
    found = []
    for name in set(kinds):
        own = [p.error for p in known if p.kind == name]
        found.append(spread(own if len(own) >= ENOUGH else general))
    return max(found, default=spread(general))


def widest(low: float, high: float, step_ns: float) -> Band:
    """A band as wide as the worst prediction so far was wrong, ns a step."""
    factor = math.exp(max(p.error for p in past()))
    return Band(low / factor, min(high * factor, step_ns))


def widened(gain: float, low: float, high: float, edits: Sequence[Edit], step_ns: float) -> Band:
    """A band (``low`` to ``high``, from the assumptions of the edits) made as wide as predictions
    of these kinds are wrong. All ns a step."""
    kinds = {kind(edit) for edit in edits}
    floor = FLOOR * step_ns
    of_step = kinds & set(OF_THE_STEP)
    if of_step:
        off = error_of(of_step, past())
        left = step_ns - gain
        floor += left * (math.exp(off) - 1)
    factor = math.exp(error_of(kinds - of_step, past())) if kinds - of_step else 1.0
    ends = (gain * factor, gain / factor, gain - floor, gain + floor)
    return Band(min(low, *ends), min(max(high, *ends), step_ns))
