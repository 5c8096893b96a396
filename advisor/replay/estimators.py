"""Estimators of what edits save in one window: replayed, or bounded by exposed time if the replay
does not reproduce the measured steps."""

from collections.abc import Sequence
from functools import cached_property
from math import inf

from advisor.core.finding import LAYER_TIMES, Edit, Finding, RangeCause
from advisor.core.report_replay import Replay
from advisor.measure import Analysis
from advisor.replay.exposed_time import ExposedTime, host_work_ns, leaves_host_work
from advisor.replay.ledger import widened_by_kind
from advisor.replay.window_replayer import (
    MAX_COST,
    GainRange,
    WindowReplayer,
    event_cost,
    launching_events,
)

REPLAY, BOUND = "replay", "upper bound (exposed time)"


class GainEstimator:
    """Estimator of what edits save in one window. All figures are ns per step."""

    method: str
    """Method of the estimates: REPLAY or BOUND."""
    reason: str = ""
    """Reason why the steps are not replayed. Empty if they are, or bounds were requested."""
    ranks: tuple[int, ...] = ()
    """Numbers of the ranks that are replayed together. Empty for this rank alone."""

    @cached_property
    def error(self) -> float:
        """Error of the method, ns per step: gains below it are meaningless."""
        return 0.0

    def reference_ns(self, edits: Sequence[Edit] = ()) -> float | None:
        """Return the step time from which edits save, ns, or ``None`` for the measured step."""
        return None

    @cached_property
    def unseen_loader(self) -> bool:
        """Whether the speed of the loader's workers is unknown, and gains ignore it."""
        return False

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate what edits save, alone or after the ``applied`` edits, with the range."""
        raise NotImplementedError

    def marginal(self, edits: Sequence[Edit], applied: Sequence[Edit]) -> float:
        """Estimate what edits save after the ``applied`` edits, ns per step."""
        return self.gain_range(edits, applied).gain

    def overlaps(self, finding: Finding) -> bool:
        """Return whether the overlap of a finding's edits with other findings' edits is known."""
        return bool(finding.edits) and not finding.other_rank

    def is_calibrated(self, edits: Sequence[Edit]) -> bool:
        """Return whether the range already is the measured error of predictions of this kind."""
        return False

    def critical_path(self) -> dict[str, float]:
        """Return what limits the step, ns per step by part, largest first. Empty if unknown."""
        return {}

    def describe_replay(self, edits: Sequence[Edit], left: float) -> Replay | None:
        """Describe the replay behind the gains, with and without the edits of all fixes, which
        leave the share ``left`` of the step. ``None`` without a replay."""
        return None


def estimator_for(a: Analysis, rank: int = 0) -> GainEstimator:
    """Return a replay estimator if it reproduces the measured steps, else a bound estimator."""
    if a.lost_records.reported:
        return BoundEstimator(a, "records of device work are lost")
    if a.steps.source == LAYER_TIMES:
        return BoundEstimator(a)  # layers run one after another: there is nothing to replay
    replay = ReplayEstimator(a, rank)
    reason = replay.replayer.unusable_reason
    return BoundEstimator(a, reason) if reason else replay


class ReplayEstimator(GainEstimator):
    """Estimator that replays the steps' dependency graph with the edits in it."""

    method = REPLAY

    def __init__(self, a: Analysis, rank: int = 0) -> None:
        self.replayer = WindowReplayer(a, rank)

    @cached_property
    def error(self) -> float:
        """Difference between the replayed and the measured step, ns."""
        return abs(self.replayer.unedited.period - self.replayer.measured.period)

    def reference_ns(self, edits: Sequence[Edit] = ()) -> float:
        return self.replayer.reference_ns

    @cached_property
    def unseen_loader(self) -> bool:
        return self.replayer.unseen_loader

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        return self.replayer.gain_range(edits, applied)

    def marginal(self, edits: Sequence[Edit], applied: Sequence[Edit]) -> float:
        return self.replayer.gain(edits, applied)

    def critical_path(self) -> dict[str, float]:
        return self.replayer.critical_path_parts()

    def describe_replay(self, edits: Sequence[Edit], left: float) -> Replay | None:
        replayer, quality = self.replayer, self.replayer.quality._asdict()
        return Replay(
            step_ns=replayer.a.step_ns * (1 + quality.pop("total_error")),
            measured_ns=replayer.a.step_ns,
            **quality,
            critical=replayer.critical_path_parts(),
            critical_after=replayer.critical_path_parts(edits),
            busy_after_ns=replayer.busy_after(edits),
            step_after_ns=replayer.a.step_ns * left,
            unprofiled=replayer.knows_unprofiled_steps,
        )


class BoundEstimator(GainEstimator):
    """Estimator of upper bounds, by exposed time."""

    method = BOUND

    def __init__(self, a: Analysis, reason: str = "") -> None:
        self.reason = reason
        self._exposed = ExposedTime(a)

    @cached_property
    def _max_device_gains(self) -> tuple[float, float]:
        """Maximum gains of fixes of device work, ns per step: the step beyond the host's own work;
        and at best, without the maximum that the profiler may add to this work."""
        a = self._exposed.a
        work = host_work_ns(a)
        if work is None:
            return inf, inf
        added = event_cost(a) * launching_events(a)
        work_ns, least_work = (max(0.0, work - times * added) for times in (1.0, MAX_COST))
        steps = max(a.step_count, 1)
        return max(0.0, a.step_ns - work_ns / steps), max(0.0, a.step_ns - least_work / steps)

    def _saved(self, edits: Sequence[Edit]) -> tuple[float, float, float]:
        """Return the exposed time that edits save, (central, low, high) in ns per step. If they
        keep the host's work, a step takes at least as long as this work."""
        gain, low, high = self._exposed.saved(edits)
        if leaves_host_work(edits):
            limit, best = self._max_device_gains
            gain, low, high = min(gain, limit), min(low, limit), min(high, best)
        return gain, low, high

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate what edits save in addition to the ``applied`` edits. The range is as wide as
        past errors of predictions of such edits."""
        all_edits = [*applied, *edits]
        saved, before = self._saved(all_edits), self._saved(applied)[0]
        gain, low, high = (max(0.0, value - before) for value in saved)
        bound = high
        if any(edit.op != "overlap" for edit in edits):  # hidden work saves its exposed part
            bound = max(high, self._exposed.max_saved(all_edits, optimistic=True) - before)
        if leaves_host_work(all_edits):
            bound = max(high, min(bound, self._max_device_gains[1] - before))
        wide = widened_by_kind(gain, low, high, edits, self._exposed.a.step_ns)
        ends = max(0.0, wide.low), max(gain, min(wide.high, bound))
        low_by: RangeCause = "past" if ends[0] < low else "assumption"
        return GainRange(gain, *ends, bound, low_by, "past" if ends[1] > high else "assumption")
