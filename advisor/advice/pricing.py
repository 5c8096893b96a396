"""What a finding's edits are worth: by replaying the step, or bounded by exposed time.

The replay is the price. Where a window cannot be replayed well (see ``MAX_STEP_ERROR``), a bound
stands in for it and says so: the exposed time of the events the edits touch, that is device work
that nothing else covers, or host time during which the device is idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from advisor.analysis.moments import MOMENTS
from advisor.intervals import EMPTY, Intervals, intersect, join, subtract, union
from advisor.select import selected_gaps, selected_gpu, selected_host
from advisor.whatif.price import WhatIf

if TYPE_CHECKING:
    from advisor.analysis import Analysis
    from advisor.model import Edit, Finding
    from advisor.select import Mask

REPLAY, BOUND = "replay", "upper bound (exposed time)"
MAX_STEP_ERROR = 0.10
"""A replay that misses the measured steps by more than this prices nothing. Lumos, a replay of
the same kind of traces, reports 3 % on average."""

MIN_EXPLAINED = 0.70
"""Nor does one whose graph explains fewer starts of device work than this: then what the work
waited for is not in the trace (public traces: 0.75 to 1.0; 0.4 where synchronising calls and part
of the kernels were filtered out)."""


class Price(NamedTuple):
    """Time saved a step, ns."""

    gain: float
    low: float
    high: float


class Pricer(Protocol):
    """Prices findings of one window. All figures are ns a step."""

    @property
    def method(self) -> str:
        """How prices are got: REPLAY or BOUND."""

    @property
    def error(self) -> float:
        """Gains below this cannot be told from the method's own error, ns a step."""

    def price(self, finding: Finding) -> Price:
        """What a finding is worth alone, with its band."""

    def marginal(self, finding: Finding, given: Sequence[Finding]) -> float:
        """What it is worth once others are done."""


def pricer(a: Analysis, rank: int = 0, ranks: Mapping[int, Analysis] | None = None) -> Pricer:
    """The replay where it reproduces the measured steps, else the bound. ``ranks``: the same
    window of all ranks of the run, to replay ``rank`` with those it waits for."""
    replay = ReplayPricer(a, rank, ranks)
    why = replay.unusable
    return BoundPricer(a, why) if why else replay


class ReplayPricer:
    """Prices by replaying the steps' dependency graph with the edits in it."""

    method = REPLAY

    def __init__(
        self, a: Analysis, rank: int = 0, ranks: Mapping[int, Analysis] | None = None
    ) -> None:
        self.whatif = WhatIf(a, rank, ranks)

    @property
    def unusable(self) -> str:
        """Why it prices nothing; empty: there are steps, and the replay without edits reproduces
        them."""
        if self.whatif.a.steps.used.is_empty() or self.whatif.a.span_ns <= 0:
            return "there is no step to replay"
        quality = self.whatif.quality
        if not quality.step_error <= MAX_STEP_ERROR:
            return (
                f"a replay misses the measured steps by {quality.step_error:.0%} (at most "
                f"{MAX_STEP_ERROR:.0%} is accepted)"
            )
        if quality.explained is not None and quality.explained < MIN_EXPLAINED:
            return (
                f"what {1 - quality.explained:.0%} of the {quality.starts:,} pieces of device "
                f"work waited for is not in the trace (at most {1 - MIN_EXPLAINED:.0%} is accepted)"
            )
        return ""

    @property
    def error(self) -> float:
        """How far the replayed step is from the measured one, ns."""
        return abs(self.whatif.base.period - self.whatif.measured.period)

    def price(self, finding: Finding) -> Price:
        """See :class:`Pricer`."""
        low, high = self.whatif.band(finding.edits)
        return Price(self.whatif.gain(finding.edits), max(0.0, low), high)

    def marginal(self, finding: Finding, given: Sequence[Finding]) -> float:
        """See :class:`Pricer`."""
        return self.whatif.gain(finding.edits, [e for f in given for e in f.edits])


class BoundPricer:
    """Prices by exposed time: what can be saved at most."""

    method = BOUND
    error = 0.0

    def __init__(self, a: Analysis, reason: str = "") -> None:
        self.a = a
        self.reason = reason
        """Why the steps are not replayed."""
        self._claims: dict[int, list[Claim]] = {}

    def claims(self, finding: Finding) -> list[Claim]:
        """The instants that each edit of a finding touches."""
        if id(finding) not in self._claims:
            self._claims[id(finding)] = [_claim(self.a, edit) for edit in finding.edits]
        return self._claims[id(finding)]

    def price(self, finding: Finding) -> Price:
        """See :class:`Pricer`."""
        return Price(*(value / self.a.step_count for value in gain(self.claims(finding))))

    def marginal(self, finding: Finding, given: Sequence[Finding]) -> float:
        """See :class:`Pricer`: instants that others have claimed do not count again."""
        taken = join(EMPTY, *(touched(self.claims(f)) for f in given))
        return gain(self.claims(finding), taken)[0] / self.a.step_count


class Claim(NamedTuple):
    """Instants of the window that a fix would save, and which share of them."""

    time: Intervals
    share: float
    share_low: float
    """Of the time, under the pessimistic assumption (smaller gain)."""
    share_high: float


def _claim(a: Analysis, edit: Edit) -> Claim:
    time = exposed(a, edit)
    if edit.op in ("scale", "merge", "punctual") and edit.factor is not None:
        middle = 1 - edit.factor
        low = 1 - (edit.factor_high if edit.factor_high is not None else edit.factor)
        high = 1 - (edit.factor_low if edit.factor_low is not None else edit.factor)
        return Claim(time, max(0.0, middle), max(0.0, low), max(0.0, high))
    return Claim(time, 1.0, 1.0, 1.0)


def exposed(a: Analysis, edit: Edit) -> Intervals:
    """The instants at which only the selected events keep the step from going on."""
    select = edit.select
    if select.on == "gpu":
        mask = selected_gpu(a, select)
        rest = a.device_busy(a.in_window & ~mask)
        return subtract(a.device_busy(mask), rest)
    if select.on == "gap":
        rows = selected_gaps(a, select)
        ts = a.gaps["ts"].to_numpy()[rows]
        found = union(ts, ts + a.gaps["dur"].to_numpy()[rows])
        return intersect(found, MOMENTS[select.at](a)) if select.at else found
    mask = selected_host(a, select)
    if edit.op == "asynchronous":
        return _bubbles(a, mask)
    cpu = a.trace.cpu
    ts = cpu["ts"].to_numpy()[mask]
    held = union(ts, ts + cpu["dur"].to_numpy()[mask])
    idle = a.breakdown.idle if a.device_id is not None else a.spans
    return intersect(held, idle)


def _bubbles(a: Analysis, mask: Mask) -> Intervals:
    """Idle time that the selected synchronising calls leave behind them."""
    syncs = a.syncs
    if syncs.is_empty():
        return EMPTY
    rows = mask[syncs["host"].to_numpy()]
    start = syncs["bubble_ts"].fill_null(0).to_numpy()[rows]
    end = syncs["bubble_end"].fill_null(0).to_numpy()[rows]
    # without the call the host would be ahead by what it waited in it, and by no more
    ahead = syncs["waited"].to_numpy()[rows]
    return intersect(union(np.maximum(start, end - ahead), end), a.breakdown.idle)


def gain(parts: list[Claim], claimed: Intervals = EMPTY) -> tuple[float, float, float]:
    """Time saved inside the window beyond what is claimed already: (central, low, high), ns.

    Edits of one finding that touch the same instants count them once, for the first edit.
    """
    central = low = high = 0.0
    taken = claimed
    for part in parts:
        fresh = subtract(part.time, taken).total
        central += fresh * part.share
        low += fresh * part.share_low
        high += fresh * part.share_high
        taken = join(taken, part.time)
    return central, low, high


def touched(parts: list[Claim]) -> Intervals:
    """All instants that the claims touch."""
    return join(EMPTY, *(part.time for part in parts))
