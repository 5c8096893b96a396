"""Verdict of a report: what limits the step, in one or two sentences, and the first fix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from advisor.advise.auxiliary_report import auxiliary_verdict, flight_verdict
from advisor.advise.finding_text import (
    fixes_of_step,
    has_large_gain,
    is_large_note,
    is_unseen_code,
    share_of_note,
)
from advisor.advise.host_verdict import write_host_verdict
from advisor.advise.idle_verdict import MIN_IDLE_SHARE, explain_idle, explain_idle_without_fix
from advisor.advise.priority import is_vague
from advisor.advise.program_wording import analyze_command
from advisor.advise.recording_limits import (
    LATER_STEPS,
    call_before,
    count_events,
    describe_lost_replays,
    explain_lost_records,
    is_too_small,
    one_off_costs,
    part_of_step,
    record_whole_steps,
    schedule_of,
)
from advisor.advise.report_text import format_speedup, step_after_fixes
from advisor.advise.verdict_parts import (
    BETWEEN_STEPS,
    MAJORITY_SHARE,
    MAX_HEALTHY_STEP_RATIO,
    ROLES_WITH_OWN_SENTENCES,
    describe_pauses,
    describe_slow_steps,
    lower_title,
    name_first_finding,
    name_largest_gain,
    name_step,
    name_unit,
)
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import LAYER_TIMES, Finding
from advisor.core.report import Report
from advisor.core.rule import Rule, VerdictRole
from advisor.measure import Analysis
from advisor.measure.device.families import MATRIX
from advisor.measure.device.roofline import select_device_rows
from advisor.measure.steps.step_differences import CAPTURE
from advisor.replay.selection import selected_gpu

HEALTHY_BUSY_SHARE = 0.80
"""Minimum GPU-busy share at which a step without findings may be called healthy (gpu-idle: 80%)."""
MIN_EXPOSED_SHARE = 0.2
"""Minimum share of the step at which exposed communication or copies lead the verdict."""
MIN_NOTE_SHARE = 0.05
"""Minimum share of the step that a note may gain, to keep the step from being called healthy."""
MIN_FAMILY_SHARE, LOW_RATE = 0.10, 0.40
"""A kernel family with at least this share of kernel time, below this share of its attainable rate,
is not healthy. FlashAttention reaches half or more, matrix products three quarters."""
MIN_LEFT_SHARE = 0.05
"""Minimum share of the step lost to slow kernels at which a healthy verdict names them."""
MAX_HEALTHY_LEFT_SHARE = 0.2
"""Share of the step lost to slow kernels below which it may be called healthy."""
MIN_LEADING_ONE_OFF_SHARE = 0.5
"""Minimum share of the analysed time at which one-off costs lead a verdict without findings."""
MIN_OPERATOR_STEP_SHARE = 0.5
"""Minimum share of the step at which an operator's device work is named without a known fix."""
MIN_LATER_RATIO = 1.5
"""Minimum ratio of a later gain to the first at which the verdict gives the gain of all."""
MIN_NOTE_RATIO = 3.0
"""Minimum ratio of a note's share of the step to the share of the first gain, at which the verdict
names the note."""
BETWEEN_WORK = "from the first to the last kernel or copy"
"""Words for the analysed time of a recording without steps."""
MIN_STEPS = 3


Status = Literal["bottlenecks", "healthy", "limited"]


@dataclass
class _Draft:
    """A verdict in the making: its status, and its sentences."""

    status: Status
    text: str

    def lead(self, sentence: str) -> None:
        """Put a sentence first."""
        self.text = " ".join(filter(None, (sentence, self.text)))

    def add(self, sentence: str) -> None:
        """Put a sentence last, unless the verdict has it."""
        if sentence not in self.text:
            self.text = f"{self.text} {sentence}"

    def limit(self) -> None:
        """Call the step healthy no more."""
        self.status = "limited" if self.status == "healthy" else self.status


def write_verdict(report: Report, a: Analysis, rules: Sequence[Rule]) -> tuple[Status, str]:
    """Return the status, and a verdict of a sentence or two. A crash comes first, then pauses or
    growing memory that cost more than the first fix gains, then what limits the step and the first
    fix, then what else a reader must know."""
    roles: dict[str, VerdictRole] = {rule.id: rule.verdict_role for rule in rules}
    if a.only_input is not None:
        return auxiliary_verdict(report, a.only_input, roles)
    draft = _Draft(*_write_main_verdict(report, a, rules))
    if (shortcoming := _explain_shortcoming(report, a)) is not None:
        draft = _Draft("limited", shortcoming)
    if report.flight is not None and report.flight.problems:
        draft.status = "bottlenecks"
        draft.lead(flight_verdict(report)[1])
    elif draft.status != "healthy":
        draft.add(_name_largest_operator(report, a))
    if draft.status == "bottlenecks":
        draft.add(_name_larger_note(report, draft.text))
    else:
        draft.add(_name_leading_risk(report, roles, draft.text))
        draft.add(_name_pauses(report, roles))
    draft.add(describe_slow_steps(report))
    if leak := _warn_of_memory_growth(report, roles):
        vague = bool(report.findings) and is_vague(report.findings[0])
        (draft.add if draft.status == "bottlenecks" and not vague else draft.lead)(leak)
        draft.limit()
    draft.add(_ask_for_typical_steps(report, draft.status))
    draft.add(_describe_all_fixes(report, draft.status))
    if part_of_step_text := part_of_step(a):
        draft.status = "limited"
        draft.lead(part_of_step_text)
        draft.add(record_whole_steps(a.trace.meta))
    pauses, leads = _describe_time_between_steps(report, roles)
    if pauses:
        (draft.lead if leads else draft.add)(pauses)
        draft.limit()
    if crash := t.describe_crashes(report.crashes):
        draft.lead(crash)
        draft.limit()
    return draft.status, draft.text


def _name_leading_risk(report: Report, roles: Mapping[str, VerdictRole], text: str) -> str:
    """Name the first risk in a verdict that leads with no fix, unless ``text`` does."""
    titles = [
        risk.title for risk in report.risks if roles.get(risk.rule) not in ROLES_WITH_OWN_SENTENCES
    ]
    is_new = bool(titles) and titles[0].lower() not in text.lower()
    return f"First: {lower_title(titles[0])}." if is_new else ""


def _name_pauses(report: Report, roles: Mapping[str, VerdictRole]) -> str:
    """Name long pauses between steps that no risk names."""
    is_risk = any(roles.get(risk.rule) == BETWEEN_STEPS for risk in report.risks)
    return "" if is_risk else describe_pauses(report)


def _ask_for_typical_steps(report: Report, status: str) -> str:
    """Ask for other steps if the profiled ones take far longer than the run's, and not because of
    the profiler. Empty if they do not."""
    step = report.step
    excess = None if step is None or step.profiler_overhead is not None else step.window_excess
    if status != "bottlenecks" or excess is None or excess < MIN_UNTYPICAL_EXCESS:
        return ""
    if describe_slow_steps(report):
        return ""  # any of the run's steps is untypical
    return f"The profiled steps take {1 + excess:.1f} times the run's: profile later ones."


MIN_UNTYPICAL_EXCESS = 1.0
"""Minimum excess of the profiled steps over the run's, as a share of these, at which the verdict
asks for other steps."""


def _describe_all_fixes(report: Report, status: str) -> str:
    """Say how much faster all fixes make the step, if a later one gains far more than the first.
    Return an empty string otherwise."""
    gains = [f.impact for f in fixes_of_step(report) if f.impact is not None]
    first, *later = [i.gain_ns or 0 for i in gains if i.currency == "step_time"] or [0]
    faster = format_speedup(report)
    if status != "bottlenecks" or max(later, default=0) < MIN_LATER_RATIO * first or not faster:
        return ""
    times = f"{t.format_duration(report.step_ns)} → {t.format_duration(step_after_fixes(report))}"
    return f"With all fixes: {times} ({faster})."


def _warn_of_memory_growth(report: Report, roles: Mapping[str, VerdictRole]) -> str:
    """Say that memory grows, and when it runs out. Empty if it does not."""
    for risk in report.risks:
        grows = roles.get(risk.rule) == "memory growth"
        if grows and risk.impact is not None and risk.impact.reason:
            return f"{risk.title}: {risk.impact.reason}."
    return ""


def _describe_time_between_steps(
    report: Report, roles: Mapping[str, VerdictRole]
) -> tuple[str, bool]:
    """Say how much of the run is in pauses between its steps, if that is much. Also return whether
    it is more than the first fix gains."""
    share = None if report.recorded is None else report.recorded.outside_share
    shown = (*report.risks, *report.findings)
    if share is None or all(roles.get(finding.rule) != "time between steps" for finding in shown):
        return "", False
    first = report.findings[0] if report.findings else None
    gain = 0.0
    if first is not None and first.impact is not None and not is_unseen_code(first):
        gain = (first.impact.share or 0.0) * (1 - share)
    cause = ", perhaps evaluation or checkpoints"
    if first is not None and first.impact is not None and first.impact.currency == "run_time":
        line, *_ = t.location_names(first.where[0]) if first.where else [""]
        place, _, function = line.partition(" in ")
        place = f"{function} ({place})" if function else place
        cause = f", {t.format_share(first.impact.share)} in {place}" if place else cause
    return (
        f"{t.format_share(share)} of the time after the first step is in long pauses between "
        f"steps{cause}."
    ), gain < share


def _explain_shortcoming(report: Report, a: Analysis) -> str | None:
    """Return the verdict on a recording that supports no advice, or else ``None``."""
    if a.record_only:
        return None
    if why := describe_lost_replays(a):
        return f"{why} No busy share, idle time or gain is given."
    if report.busy_share is None:
        return None
    busy = _name_busy(report, a.unprofiled_busy_share)
    if a.lost_records.truncated:
        return (
            f"The file is cut off. In what is left, the GPU is busy at least {busy}. Idle "
            "time and gains are unknown. Copy or record it again."
        )
    if a.lost_records.reported:
        return (
            f"The profiler lost {a.lost_records.lost:,} of {a.lost_records.launches:,} kernels: "
            f"the GPU is busy at least {busy}. Idle time and gains are unknown."
        )
    if why := explain_lost_records(a):
        return f"{t.upper_first(why)}: GPU busy at least {busy}."
    if a.trace.meta.truncated:
        lead = f". {name_first_finding(report, part=True)}" if report.findings else ""
        return f"The file is cut off. In what is left, the GPU is busy at least {busy}{lead}."
    if is_too_small(a):
        return (
            f"GPU busy {busy}, but {t.count_noun(count_events(a), 'event')} (operators, calls and "
            f"kernels) are too few for advice. {record_whole_steps(a.trace.meta)}"
        )
    return None


def _write_main_verdict(report: Report, a: Analysis, rules: Sequence[Rule]) -> tuple[Status, str]:
    of_step = name_step(report)
    if report.scope.step_source == LAYER_TIMES:
        return _write_layers_verdict(report)
    if report.busy_share is None:
        return write_host_verdict(report, a, of_step, rules)
    busy_share, run_share = report.busy_share, a.unprofiled_busy_share
    busy_of = f"busy {_name_busy(report, run_share)}"
    if (
        run_share is not None
        and run_share >= busy_share + MIN_BUSY_DIFFERENCE
        and report.step is not None
    ):
        busy_share = run_share
    if report.scope.recorded_ns is not None:
        between = BETWEEN_WORK
        span = t.format_duration(report.step_ns)
        busy_of = f"busy {t.format_share(report.busy_share)} of the {span} {between}"
    text = f"GPU {busy_of}{_describe_exposed_time(report)}"
    if has_large_gain(report):
        lead = name_first_finding(report, part=bool(part_of_step(a)))
        text = f"{text}.{_warn_of_varying_kernels(a)} {lead}."
        return "bottlenecks", f"{text}{explain_idle(report, a)}"
    small = name_largest_gain(report)
    profile = " Profile kernels with hardware counters." * bool(report.profile_kernels)
    if busy_share >= HEALTHY_BUSY_SHARE and (reason := _explain_not_healthy(report, a)):
        profile *= bool(_name_slow_family(report))
        return "limited", f"{text}. No fix is certain to help. {reason}.{profile}{small}"
    if busy_share >= HEALTHY_BUSY_SHARE:
        rates, near = _compare_with_rates(report)
        if not near:
            left = "Its time is in kernels, not in waits."
            return "limited", f"{text}. {left}{rates}{profile}{small}"
        return "healthy", f"Healthy: the GPU is {busy_of}. No bottleneck stands out.{rates}{small}"
    one_off_share, longest, longest_share = one_off_costs(a)
    if one_off_share >= MIN_LEADING_ONE_OFF_SHARE:
        schedule = schedule_of(a.trace.meta, ": ", LATER_STEPS)
        action = f"Record after a few steps{schedule}."
        if longest == CAPTURE:
            file = analyze_command(report).removeprefix("advisor analyze ")
            action = "Record replays of the graph, whose kernels this file names: advisor analyze "
            action += f"REPLAYS --capture {file}."
        of_time = f"of the {report.per}"
        if report.per == "recording":  # less than the file, which the report shows too
            of_time = f"of the analysed {t.format_duration(a.span_ns)}"
        call, took = call_before(a) if report.per == "recording" else ("", 0)
        if call and took >= MIN_IDLE_SHARE * a.span_ns:
            text = text.removesuffix(f" {BETWEEN_WORK}")
            text += f". CUDA's start took {t.format_duration(took)} before that"
        most = f"led by {longest} ({t.format_share(longest_share)} of them)"
        if longest_share > MAJORITY_SHARE:
            most = f"mostly {longest}"
            delays = sum(part.share for part in report.idle if part.cause == "launch")
            if "Launch" in longest and delays >= MAJORITY_SHARE:
                most = f"mostly first calls of {longest} (launch delay)"
        return "limited", (
            f"One-off costs take at least {t.format_share(one_off_share)} {of_time}, {most}. "
            f"{action} {text}.{small}"
        )
    return "limited", f"{text}{explain_idle_without_fix(report, a)}{small}"


def _write_layers_verdict(report: Report) -> tuple[Literal["bottlenecks", "limited"], str]:
    """Return the status and verdict on layer times. They show neither idle time nor the host."""
    text = f"The layers of one inference take {t.format_duration(report.step_ns)}"
    if has_large_gain(report):
        return "bottlenecks", f"{text}. {name_first_finding(report)}."
    profile = " Profile its kernels with hardware counters." * bool(report.profile_kernels)
    return "limited", (
        f"{text}; advisor has no rule for them.{profile}{name_largest_gain(report)} Idle time is "
        "not in a layer profile."
    )


def _name_busy(report: Report, own_share: float | None = None) -> str:
    """Name the share of the step in which the GPU works: ``84% of a 77.5 ms step``. ``own_share``:
    the share in the run's median step, which no profiler slows down. If neither share belongs to
    the step that the report leads with, the profiled steps' share is named."""
    share, step = t.format_share(report.busy_share), report.step
    if step is None or not step.window_differs:
        return f"{share} of {name_step(report)}"
    of_window = own_share is None or abs(own_share - (report.busy_share or 0.0)) < 1e-6
    if step.varies or of_window:
        takes = f"{'mean ' * step.varies}{name_unit(report)} {t.format_duration(report.step_ns)}"
        return f"{share} while profiled ({takes} without the profiler)"
    profiled = f" ({share} while profiled)" * (t.format_share(own_share) != share)
    return f"{t.format_share(own_share)} of {name_step(report)}{profiled}"


MIN_BUSY_DIFFERENCE = 0.05
"""Minimum difference between the busy shares of the run's own and of a profiled step at which the
verdict goes by the run's own."""


def _warn_of_varying_kernels(a: Analysis) -> str:
    """Say that identical kernels vary, so that their times prove little. Empty if they do not."""
    if not a.varying_kernels.are_most:
        return ""
    return (
        f" Identical kernels differ {a.varying_kernels.ratio:.0f}-fold in duration. Record again "
        "first: another process may use the GPU, or its clock dropped."
    )


def _describe_exposed_time(report: Report) -> str:
    """Say how much of the step is exposed communication or copies. Empty if little."""
    for name, label in (("communication", "communication"), ("copies", "copy time")):
        share = sum(part.share for part in report.time if part.name == name)
        if share >= MIN_EXPOSED_SHARE:
            return f"; {t.format_share(share)} is exposed {label}"
    return ""


def _explain_not_healthy(report: Report, a: Analysis) -> str:
    """Say why a busy GPU is not called healthy. Empty if it may be called healthy."""
    scope = report.scope
    if slow_family := _name_slow_family(report):
        return slow_family
    if host_bound := _name_host_bound_phases(report):
        return host_bound
    for note in report.notes:
        impact = note.impact
        if impact is not None and impact.currency == "step_time" and impact.share is not None:
            high = impact.share * (impact.high_ns or 0) / max(impact.gain_ns or 1, 1)
            if max(impact.share, high) >= MIN_NOTE_SHARE:
                title = t.lower_first(note.title)
                return f"One may gain up to {t.format_share(max(impact.share, high))}: {title}"
        if note.severity != "info":
            return note.title
    table = a.steps.table
    steps = table["dur"].filter(table["used"] | table["outlier"]).to_numpy()
    if len(steps) > MIN_STEPS and steps.max() > MAX_HEALTHY_STEP_RATIO * np.median(steps):
        longest, median = (t.format_duration(float(ns)) for ns in (steps.max(), np.median(steps)))
        return f"One step takes {longest}, the median {median}"
    if not scope.device_known:
        name = scope.device_name
        unknown_rates = (
            "The GPU model is not recorded" if name is None else f"The rates of {name} are unknown"
        )
        return (
            f"{unknown_rates}, so slow kernels are not recognised: --recorded-gpu NAME gives the "
            "model"
        )
    if scope.steps_used > 1 and scope.step_max_ns > MAX_HEALTHY_STEP_RATIO * max(
        scope.step_min_ns, 1
    ):
        return f"Steps vary: {t.format_range(scope.step_min_ns, scope.step_max_ns)}"
    return ""


def _name_host_bound_phases(report: Report) -> str:
    """Name a served model's phases in which the GPU mostly waits for the host. Empty if they take a
    small share of the step."""
    if report.inference is None:
        return ""
    waits = {
        phase.name: (1 - phase.busy_share) * phase.ns * phase.steps
        for phase in report.inference.phases
        if phase.limit == "host" and phase.busy_share is not None
    }
    total = sum(waits.values()) / report.scope.steps_used
    if total < MIN_NOTE_SHARE * report.step_ns:
        return ""
    names = t.list_names((labels.shorten(labels.clean(name), 30) for name in waits), 2)
    share = t.format_share(total / report.step_ns)
    return (
        f"CUDA graphs or torch.compile may help in {names}, where the GPU waits for the host: "
        f"{t.format_duration(total)} {t.format_per(report.per)} ({share})"
    )


def _name_largest_operator(report: Report, a: Analysis) -> str:
    """Name the operator whose device work takes more than half of the step, at a low or unknown
    rate, if no finding changes that work. Empty if there is none. Of nested scopes, as in XLA's
    operator names, take the innermost one with that much work."""
    if a.device_id is None or not a.span_ns:
        return ""
    work = select_device_rows(a).filter(pl.col("kind") == "kernel", pl.col("op_name").is_not_null())
    work = work.with_columns(op_name=pl.col("op_name").cast(pl.String))
    parts = work.with_columns(name=pl.col("op_name").str.split("/")).with_columns(
        place=pl.int_ranges(pl.col("name").list.len())
    )
    parts = parts.explode("name", "place").with_columns(
        name=pl.col("name").str.replace(r"(_\d+)?(:\w+)?$", "")
    )
    parts = parts.unique(["row", "name"]).filter(pl.col("name").str.len_chars() > 1)
    named = work["op_name"].str.contains("/")
    table = (
        (parts if named.any() else parts.with_columns(name="op_name"))
        .group_by("name")
        .agg(pl.col("ns").sum(), pl.col("place").mean(), pl.col("row"))
    )
    table = table.filter(pl.col("ns") > MIN_OPERATOR_STEP_SHARE * a.span_ns).sort("place", "ns")
    if table.is_empty():
        return ""
    name, ns, _, rows = table.row(-1)
    rated = a.rooflines.filter(
        pl.col("op").cast(pl.String) == name, pl.col("efficiency").is_not_null()
    )
    rate = float((rated["efficiency"] * rated["dur"]).sum()) / max(float(rated["dur"].sum()), 1.0)
    if rate >= LOW_RATE:
        return ""
    dur = a.trace.gpu["dur"].to_numpy()
    is_own_work = np.isin(np.arange(len(dur)), rows)
    edits = [edit for f in report.findings for edit in f.edits if edit.select.on == "gpu"]
    if any(2 * dur[is_own_work & selected_gpu(a, edit.select)].sum() >= ns for edit in edits):
        return ""
    which = "the memory's rate" if (rated["bound"] == "memory").all() else "its attainable rate"
    reached = f", at {t.format_share(rate)} of {which}" if rate else ""
    share = t.format_share(ns / a.span_ns)
    own_notes = [n for n in report.notes if any(place.op == name for place in n.where)]
    fix = ", and advisor has no rule for it"
    if own_notes:
        fix = f". {_name_possible_fix(report, own_notes[0])}"
    return (
        f"{labels.shorten(labels.clean(name), 40)} takes most device time: {share} of the "
        f"{report.per}{reached}{fix}."
    )


def _name_possible_fix(report: Report, note: Finding) -> str:
    """Name the fix of a note, and the share of the step that the note is about if that is large."""
    about = ""
    if is_large_note(note, report):
        about = f", for {t.format_share(share_of_note(note, report))} of the {report.per}"
    return f"Unproven{about}: {lower_title(t.first_clause(note.fix))}"


def _name_larger_note(report: Report, text: str) -> str:
    """Name a note about several times the share of the step that the first fix gains. Empty if
    there is none, or if ``text`` already names its fix."""
    first = report.findings[0].share_of_step if report.findings else 0.0
    large = [n for n in report.notes if is_large_note(n, report)]
    note = max(large, key=lambda n: share_of_note(n, report), default=None)
    if note is None or not first or share_of_note(note, report) < MIN_NOTE_RATIO * first:
        return ""
    possible_fix = _name_possible_fix(report, note)
    return "" if possible_fix in text else f"{possible_fix}."


def _compare_with_rates(report: Report) -> tuple[str, bool]:
    """Say how close a busy GPU's kernels come to its rates, and where the lost time is. Also return
    whether they are known to be close."""
    rated = [operator for operator in report.rooflines if operator.efficiency is not None]
    rated_share = sum(operator.share for operator in rated)
    if rated_share < MIN_LEADING_ONE_OFF_SHARE:
        graphs = None if report.inference is None else report.inference.graphs
        shapes = (
            f" Their shapes are in the graph's capture: {analyze_command(report)} --capture FILE."
        )
        shapes *= graphs is not None and graphs.matched is None
        return f" How close most kernels come to the limits of this GPU is unknown.{shapes}", False
    lost: dict[str, float] = {}
    times: dict[str, float] = {}
    for operator in rated:
        times[operator.family] = times.get(operator.family, 0.0) + operator.ns
        lost_ns = operator.ns * (1 - (operator.efficiency or 0.0))
        lost[operator.family] = lost.get(operator.family, 0.0) + lost_ns
    total_lost = sum(lost.values())
    if total_lost < MIN_LEFT_SHARE * report.step_ns:
        return "", True
    largest = sorted(lost.items(), key=lambda item: -item[1])[:2]
    shown = [(family, ns) for family, ns in largest if ns >= MIN_FAMILY_SHARE * total_lost]
    shown_lost = sum(ns for _, ns in shown)
    parts = [
        f"{family} {t.format_duration(ns)} (now at {t.format_share(1 - ns / times[family])})"
        for family, ns in shown
    ]
    if parts and (rest := total_lost - shown_lost) >= MIN_FAMILY_SHARE * total_lost / 2:
        parts.append(f"others {t.format_duration(rest)}")
    return (
        " At the rates that this GPU reaches in benchmarks, its kernels would take "
        f"{t.format_duration(total_lost)} ({t.format_share(total_lost / report.step_ns)}) less: "
        f"{', '.join(parts)}."
    ), total_lost < MAX_HEALTHY_LEFT_SHARE * report.step_ns


def _name_slow_family(report: Report) -> str:
    """Name a kernel family with much time far below its attainable rate. Empty if there is none."""
    times: dict[str, list[tuple[float, float]]] = {}
    for operator in report.rooflines:
        if operator.family in MATRIX and operator.efficiency is not None:
            times.setdefault(operator.family, []).append((operator.share, operator.efficiency))
    for family, operators in times.items():
        share = sum(part for part, _ in operators)
        rate = sum(part * reached for part, reached in operators) / max(share, 1e-9)
        if share >= MIN_FAMILY_SHARE and rate < LOW_RATE:
            return (
                f"The {family} kernels ({t.format_share(share)} of kernel time) reach "
                f"{t.format_share(rate)} of their attainable rate, which costs up to "
                f"{t.format_share(share * (1 - rate))} of kernel time. The trace does not show why"
            )
    return ""
