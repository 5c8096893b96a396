"""A report of trials as an answer: bounded, with what the program chose apart."""

from __future__ import annotations

from advisor.core import text as t
from advisor.mcp import bounds as b
from advisor.mcp.answers import TogetherLine, TrialLine, TrialText, Tried
from advisor.tune.report import Together, Trial, TrialReport


def tried(
    report: TrialReport | None, path: str, exit_code: int | None, seconds: float, said: str
) -> Tried:
    """``None``: there is no report, and ``said`` tells why."""
    shown, more = b.first([] if report is None else report.trials, b.MAX_TRIALS)
    cut = report is None or report.interrupted or report.out_of_budget
    return Tried(
        path=path,
        exit_code=exit_code,
        seconds=seconds,
        complete=not cut and exit_code == 0,
        step_ns=None if report is None else report.step_ns,
        repeats_its_losses=None if report is None else report.repeats,
        trials=[_line(trial) for trial in shown],
        more_trials=more,
        together=None if report is None else _together(report.together),
        by_hand=[] if report is None else [b.name(one) for one in report.without[: b.MAX_TRIALS]],
        untrusted=b.UNTRUSTED,
        from_program=said,
    )


def _line(trial: Trial) -> TrialLine:
    return TrialLine(
        knob=b.name(trial.name),
        rule=b.name(trial.rule),
        safety=trial.safety,
        outcome=trial.outcome,
        predicted_low=trial.predicted_low,
        predicted_high=trial.predicted_high,
        gain=trial.gain,
        gain_low=trial.gain_low,
        gain_high=trial.gain_high,
        inside=trial.inside,
        runs=trial.runs,
        losses=b.name(trial.losses),
        schedule=b.said(trial.schedule),
        device_bytes=trial.device_bytes,
        host_bytes=trial.host_bytes,
        from_program=TrialText(
            why=b.said(trial.why),
            lines=_code(trial.lines),
            diff=_code(trial.diff) if trial.outcome == "gain" else "",
        ),
    )


def _code(text: str) -> str:
    return t.shorten(t.clean(text, lines=True), 2 * b.LONGEST_TEXT)


def _together(both: Together | None) -> TogetherLine | None:
    if both is None:
        return None
    return TogetherLine(
        knobs=[b.name(pull) for pull in both.pulls],
        adds_nothing=[b.name(pull) for pull in both.left_out],
        step_ns=both.step_ns,
        gain=both.gain,
        gain_low=both.gain_low,
        gain_high=both.gain_high,
    )
