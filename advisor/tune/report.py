"""The report of trials: plain data, which renderers and the dashboard show."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct, field

from advisor.core import text as t
from advisor.core.report_file import decode_json
from advisor.tune.knob import KnobSetting, Safety

SCHEMA = "advisor.trials/1"
FILE = "trials.json"
"""Name of its file in the run's folder."""
MAX_TRIALS_BYTES = 16 << 20
Outcome = Literal["gain", "no gain", "slower", "unclear", "dropped", "not run"]
"""Outcome of a trial. ``unclear``: the interval is too wide to say (``MAX_HALF_INTERVAL``)."""
MAX_HALF_INTERVAL = 0.1
"""Maximum half interval, as a share of the step, at which a gain counts as measured."""


class Trial(Struct, kw_only=True):
    """A knob at one setting. Shares are of the mean step (0 to 1)."""

    rule: str
    """Rule whose finding the knob should fix."""
    knob_setting: KnobSetting
    title: str
    safety: Safety
    memory: bool = False
    """Whether the finding is about memory, so that freed memory is a gain as well."""
    outcome: Outcome = "not run"
    why: str = ""
    """Reason for ``dropped`` and ``not run``."""
    predicted: float | None = None
    """Gain that the report predicts, or ``null`` without an estimate in step time."""
    predicted_low: float | None = None
    predicted_high: float | None = None
    gain: float | None = None
    """Measured gain: share of the step that is saved."""
    gain_low: float | None = None
    gain_high: float | None = None
    inside: bool | None = None
    """Whether the measured interval overlaps the predicted range, or ``null`` without a range or if
    the interval is too wide."""
    runs: int = 0
    """Number of runs with the knob."""
    step_ns: float | None = None
    losses: str = ""
    """Result of the check of the losses."""
    schedule: str = ""
    """Effect on the training's schedule. If not empty, shares are of the time per sample."""
    device_bytes: int | None = None
    host_bytes: int | None = None
    lines: str = ""
    """Lines to write into the program."""
    diff: str = ""
    """Unified diff with these lines, where the place is certain."""

    @property
    def is_known(self) -> bool:
        """Whether the gain is measured well enough to judge a prediction."""
        if self.gain_low is None or self.gain_high is None:
            return False
        return (self.gain_high - self.gain_low) / 2 <= MAX_HALF_INTERVAL

    @property
    def name(self) -> str:
        """Knob with its setting, ``workers=4``."""
        return str(self.knob_setting)


class CombinedTrial(Struct, kw_only=True):
    """Trial of all winners together."""

    knob_settings: list[KnobSetting]
    left_out: list[KnobSetting] = field(default_factory=list)
    """Winners that add no gain to these settings."""
    step_ns: float
    gain: float
    gain_low: float
    gain_high: float
    losses: str = ""


class TrialReport(Struct, kw_only=True):
    """Report of all trials. Read and written as JSON, schema ``SCHEMA``."""

    schema: str = SCHEMA
    version: str = ""
    program: list[str] = field(default_factory=list)
    """Command line, credentials replaced."""
    device: str = ""
    """Name of the GPU. Empty without one."""
    torch: str = ""
    verdict: str = ""
    dry: bool = False
    """Whether only the recording was run."""
    interrupted: bool = False
    out_of_budget: bool = False
    seconds: float = 0.0
    """Time spent, s."""
    processes: int = 0
    """Number of runs of the program."""
    step_ns: float | None = None
    """Mean step of the unchanged program, or ``null`` if not measured."""
    steps: int = 0
    """Number of steps timed in each run."""
    turns: bool = False
    """Whether runs took turns, block by block of steps, rather than one after the other."""
    device_bytes: int | None = None
    host_bytes: int | None = None
    repeats: bool | None = None
    """Whether losses of the unchanged program are the same in each run, or ``null`` if unknown."""
    confined: bool = False
    """Whether the kernel confined the program to its scratch folder."""
    moved: int = 0
    """Number of files of a run that were redirected to the scratch folder."""
    trials: list[Trial] = field(default_factory=list)
    together: CombinedTrial | None = None
    without: list[str] = field(default_factory=list)
    """Findings that no knob fixes and the user has to fix by hand."""
    titles: dict[str, str] = field(default_factory=dict)
    """Title of each rule's finding."""
    remembered: str = ""
    """Past accuracy of these rules' predictions. Empty if there are none yet."""

    @property
    def winners(self) -> list[Trial]:
        """Trials with a certain gain, the largest first."""
        result = [trial for trial in self.trials if trial.outcome == "gain"]
        return sorted(result, key=lambda trial: trial.gain or 0.0, reverse=True)

    def to_json(self) -> bytes:
        """Return the JSON text, indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> TrialReport:
        """Read what :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        return decode_json(text, cls, "report of trials", SCHEMA, MAX_TRIALS_BYTES)


def write_trial_headline(report: TrialReport) -> str:
    """Summarise the trials in one sentence."""
    count = len(report.trials)
    if not count:
        return f"Nothing to try. {report.verdict}"
    if report.dry:
        return f"Dry run: {t.count_noun(count, 'trial')} planned, none run."
    note = (
        "Interrupted; results so far. "
        if report.interrupted
        else "The time budget ran out before every trial finished. "
        if report.out_of_budget
        else ""
    )
    joint = report.together
    if joint is None:
        if report.winners:
            return note + _describe_winners(report)
        if all(trial.outcome == "not run" for trial in report.trials):
            if report.interrupted:
                return "Interrupted before anything was tried."
            spent = t.format_duration(report.seconds * 1e9)
            return f"Nothing was tried: recording used {spent}. Try again with a larger --budget."
        text = f"{note}No gain is shown in {t.count_noun(count, 'trial')}."
        if unclear := sum(trial.outcome == "unclear" for trial in report.trials):
            text += (
                f" The runs of {'it' if count == unclear == 1 else unclear} differ too much to "
                "tell: try again on a machine without other programs, or with a larger --budget."
            )
        return text
    names = t.list_names(map(str, joint.knob_settings))
    interval = format_gain_interval(joint.gain_low, joint.gain_high)
    return (
        f"{note}{names}: {t.format_duration(report.step_ns)} → {t.format_duration(joint.step_ns)} "
        f"per step ({t.format_share(joint.gain)} less; {interval} with 95% confidence)."
    )


def _describe_winners(report: TrialReport) -> str:
    """Describe the gains of single trials, where no trial of all winners was finished."""
    best, *others = report.winners
    saving = f"{format_gain_interval(best.gain_low, best.gain_high)} less time"
    if best.schedule:
        return (
            f"{best.name}: a sample takes {saving}. "
            "This is another training: check what it does to the schedule."
        )
    text = f"{best.name}: a step takes {saving}."
    if not others:
        return text
    return f"{text} {t.count_noun(len(others), 'other gain')} below; not tried together."


def format_gain_interval(low: float | None, high: float | None) -> str:
    """Format an interval of shares of the step."""
    if low is None or high is None:
        return t.NOT_MEASURED
    lowest = "−100% or less" if low < -1 else _format_percent(low)  # more than twice as long
    return f"{lowest} to {_format_percent(high)}%"


def _format_percent(share: float) -> str:
    return f"{'−' if share <= -0.005 else ''}{abs(100 * share):.0f}"


def describe_runs(report: TrialReport) -> list[str]:
    """Describe how much was run."""
    result = [f"{t.count_noun(report.processes, 'process')}, {report.seconds:.0f} s"]
    if report.steps:
        result.append(f"{report.steps} steps timed in each")
    if report.moved:
        result.append(f"{t.count_noun(report.moved, 'file')} written to the scratch folder instead")
    if report.processes and not report.confined:
        result.append("writes by native code are not redirected on this system")
    return result


def describe_losses(report: TrialReport) -> str:
    """Describe whether the program repeats its losses. Empty if unknown."""
    if report.repeats is None:
        return ""
    return (
        "the unchanged program repeats its losses exactly"
        if report.repeats
        else "losses of the unchanged program vary between runs: knobs may differ as much"
    )


def describe_prediction(trial: Trial) -> str:
    """Describe whether the measured gain is within the predicted range."""
    return {True: "in range", False: "outside", None: t.EMPTY_CELL}[trial.inside]
