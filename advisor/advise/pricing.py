"""What a finding's edits are worth: by replaying the step, or bounded by exposed time.

The replay is the price. Where a window cannot be replayed well (see ``WhatIf.unusable``), a bound
stands in for it and says so: the exposed time of the events the edits touch, that is device work
that nothing else covers, or host time during which the device is idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from advisor.core.report import HardPart, Replay
from advisor.replay.exposed import Claim, claim, gain, touched
from advisor.replay.price import EditGain

if TYPE_CHECKING:
    from advisor.core.finding import Finding
    from advisor.measure import Analysis

REPLAY, BOUND = "replay", "upper bound (exposed time)"


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

    @property
    def reason(self) -> str:
        """Why the steps are not replayed; empty: they are."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are replayed together; empty: this one alone."""

    @property
    def unseen_loader(self) -> bool:
        """How fast the loader's workers could be is not known, and prices do not allow for it."""

    def price(self, finding: Finding) -> Price:
        """What a finding is worth alone, with its band."""

    def marginal(self, finding: Finding, given: Sequence[Finding]) -> float:
        """What it is worth once others are done."""

    def critical_path(self) -> dict[str, float]:
        """What the step hangs on, ns a step, largest first; empty: not known."""

    def view(self, findings: Sequence[Finding]) -> Replay | None:
        """The replay behind the prices, without and with these findings; ``None``: there is no
        replay."""


def pricer(a: Analysis, rank: int = 0, ranks: Mapping[int, Analysis] | None = None) -> Pricer:
    """The replay where it reproduces the measured steps, else the bound. ``ranks``: the same
    window of all ranks of the run, to replay ``rank`` with those it waits for."""
    if a.lost.told:
        return BoundPricer(a, "records of device work are lost")
    replay = ReplayPricer(a, rank, ranks)
    why = replay.whatif.unusable
    return BoundPricer(a, why) if why else replay


class ReplayPricer:
    """Prices by replaying the steps' dependency graph with the edits in it."""

    method = REPLAY
    reason = ""

    def __init__(
        self, a: Analysis, rank: int = 0, ranks: Mapping[int, Analysis] | None = None
    ) -> None:
        self.whatif = EditGain(a, rank, ranks)

    @property
    def error(self) -> float:
        """How far the replayed step is from the measured one, ns."""
        return abs(self.whatif.base.period - self.whatif.measured.period)

    @property
    def ranks(self) -> tuple[int, ...]:
        """See :class:`Pricer`."""
        return self.whatif.ranks

    @property
    def unseen_loader(self) -> bool:
        """See :class:`Pricer`."""
        return self.whatif.unseen_loader

    def price(self, finding: Finding) -> Price:
        """See :class:`Pricer`."""
        low, high = self.whatif.band(finding.edits)
        return Price(self.whatif.gain(finding.edits), max(0.0, low), high)

    def marginal(self, finding: Finding, given: Sequence[Finding]) -> float:
        """See :class:`Pricer`."""
        return self.whatif.gain(finding.edits, [e for f in given for e in f.edits])

    def critical_path(self) -> dict[str, float]:
        """See :class:`Pricer`."""
        return self.whatif.critical()

    def view(self, findings: Sequence[Finding]) -> Replay | None:
        """See :class:`Pricer`."""
        whatif, quality = self.whatif, self.whatif.quality
        edits = [e for f in findings for e in f.edits]
        return Replay(
            step_ns=whatif.a.step_ns * (1 + quality.total_error),
            measured_ns=whatif.a.step_ns,
            step_error=quality.step_error,
            starts=quality.starts,
            explained=quality.explained,
            hard=[HardPart(*part) for part in quality.hard],
            waits=quality.waits,
            waits_explained=quality.waits_explained,
            idle=quality.idle,
            idle_explained=quality.idle_explained,
            steps=quality.steps,
            of_steps=quality.of_steps,
            critical=whatif.critical(),
            critical_after=whatif.critical(edits),
            step_after_ns=whatif.step_after(edits),
        )


class BoundPricer:
    """Prices by exposed time: what can be saved at most."""

    method = BOUND
    error = 0.0
    ranks: tuple[int, ...] = ()
    unseen_loader = False

    def __init__(self, a: Analysis, reason: str = "") -> None:
        self.a = a
        self.reason = reason
        """See :class:`Pricer`; also empty where bounds were asked for."""
        self._claims: dict[int, list[Claim]] = {}

    def claims(self, finding: Finding) -> list[Claim]:
        """The instants that each edit of a finding touches."""
        if id(finding) not in self._claims:
            self._claims[id(finding)] = [claim(self.a, edit) for edit in finding.edits]
        return self._claims[id(finding)]

    def price(self, finding: Finding) -> Price:
        """See :class:`Pricer`."""
        return Price(*(value / self.a.step_count for value in gain(self.claims(finding))))

    def marginal(self, finding: Finding, given: Sequence[Finding]) -> float:
        """See :class:`Pricer`: instants that others have claimed do not count again."""
        taken = touched([part for f in given for part in self.claims(f)])
        return gain(self.claims(finding), taken)[0] / self.a.step_count

    def critical_path(self) -> dict[str, float]:
        """See :class:`Pricer`."""
        return {}

    def view(self, findings: Sequence[Finding]) -> Replay | None:
        """See :class:`Pricer`."""
        return None
