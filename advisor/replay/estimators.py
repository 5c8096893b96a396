"""Estimators of what edits save in one window: replayed, or bounded by exposed time where the
replay does not reproduce the measured steps."""

from collections.abc import Sequence
from functools import cached_property
from math import inf

from advisor.core.finding import LAYER_TIMES, Edit, Finding, RangeCause
from advisor.core.report_replay import Replay
from advisor.measure import Analysis
from advisor.replay.exposed_time import ExposedTime, host_work, leaves_host_work
from advisor.replay.predictions import widened_by_kind
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
    """Reason why the steps are not replayed; empty: they are, or bounds were asked for."""
    ranks: tuple[int, ...] = ()
    """Numbers of the ranks that are replayed together; empty: this rank alone."""

    @cached_property
    def error(self) -> float:
        """Error of the method, ns per step: gains below it are meaningless."""
        return 0.0

    def reference_ns(self, edits: Sequence[Edit] = ()) -> float | None:
        """Return the step that the gain of edits is a saving of, ns; ``None``: the measured one."""
        return None

    @cached_property
    def unseen_loader(self) -> bool:
        """Whether the pace of the loader's workers is unknown, and gains do not allow for it."""
        return False

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate what edits save, alone or after the ``applied`` ones, with the range."""
        raise NotImplementedError

    def marginal(self, edits: Sequence[Edit], applied: Sequence[Edit]) -> float:
        """Estimate what edits save after the ``applied`` ones, ns per step."""
        return self.gain_range(edits, applied).gain

    def overlaps(self, finding: Finding) -> bool:
        """Tell whether it is known what a finding's edits leave to others', or others' to them."""
        return bool(finding.edits) and not finding.other_rank

    def is_calibrated(self, edits: Sequence[Edit]) -> bool:
        """Tell whether the range already is the measured error of predictions of this kind."""
        return False

    def critical_path(self) -> dict[str, float]:
        """Return what limits the step, ns per step by part, largest first; empty: unknown."""
        return {}

    def describe_replay(self, edits: Sequence[Edit], left: float) -> Replay | None:
        """Describe the replay behind the gains, with and without the edits of all fixes, which
        leave the share ``left`` of the step; ``None``: no replay."""
        return None


def estimator_for(a: Analysis, rank: int = 0) -> GainEstimator:
    """Return a replay estimator if it reproduces the measured steps, else a bound estimator."""
    if a.lost_records.reported:
        return BoundEstimator(a, "records of device work are lost")
    if a.steps.source == LAYER_TIMES:
        return BoundEstimator(a)  # layers follow one another: there is nothing to replay
    replay = ReplayEstimator(a, rank)
    why = replay.replayer.unusable_reason
    return BoundEstimator(a, why) if why else replay


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
            unprofiled=replayer.knows_own_steps,
        )


class BoundEstimator(GainEstimator):
    """Estimator of upper bounds, by exposed time."""

    method = BOUND

    def __init__(self, a: Analysis, reason: str = "") -> None:
        self.reason = reason
        self._exposed = ExposedTime(a)

    @cached_property
    def _most_on_device(self) -> tuple[float, float]:
        """Most that fixes of device work save, ns per step: what the step takes beyond the host's
        own work; at best, without the most that the profiler may add to that."""
        a = self._exposed.a
        work = host_work(a)
        if work is None:
            return inf, inf
        added = event_cost(a) * launching_events(a)
        usual, least = (max(0.0, work - times * added) for times in (1.0, MAX_COST))
        steps = max(a.step_count, 1)
        return max(0.0, a.step_ns - usual / steps), max(0.0, a.step_ns - least / steps)

    def _saved(self, edits: Sequence[Edit]) -> tuple[float, float, float]:
        """Return the exposed time that edits save, (central, low, high) in ns per step. Where they
        leave the host's work, a step takes no less than that."""
        gain, low, high = self._exposed.saved(edits)
        if leaves_host_work(edits):
            usual, best = self._most_on_device
            gain, low, high = min(gain, usual), min(low, usual), min(high, best)
        return gain, low, high

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Estimate what edits save, without the time that ``applied`` edits take. The range is as
        wide as predictions of such edits have been wrong."""
        both = [*applied, *edits]
        saved, before = self._saved(both), self._saved(applied)[0]
        gain, low, high = (max(0.0, value - before) for value in saved)
        max_gain = high
        if any(edit.op != "overlap" for edit in edits):  # hidden work saves what is exposed of it
            max_gain = max(high, self._exposed.max_saved(both, optimistic=True) - before)
        if leaves_host_work(both):
            max_gain = max(high, min(max_gain, self._most_on_device[1] - before))
        wide = widened_by_kind(gain, low, high, edits, self._exposed.a.step_ns)
        ends = max(0.0, wide.low), max(gain, min(wide.high, max_gain))
        low_by: RangeCause = "past" if ends[0] < low else "assumption"
        return GainRange(gain, *ends, max_gain, low_by, "past" if ends[1] > high else "assumption")
