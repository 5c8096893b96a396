"""Verdict of a report: what limits the step, in one or two sentences, and the first fix."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import polars as pl

from advisor.advise.auxiliary_report import auxiliary_verdict, flight_verdict
from advisor.advise.finding_text import (
    POSSIBLE,
    fixes_of_step,
    has_large_gain,
    is_large_note,
    is_unseen_code,
    is_unsure,
    share_of_note,
)
from advisor.advise.priority import is_vague
from advisor.advise.program_wording import (
    ACTIVITIES,
    analyze_command,
    ask_to_record,
    how_to_record_more,
    record_gpu_work,
)
from advisor.advise.recording_limits import (
    LATER_STEPS,
    call_before,
    count_events,
    count_launches,
    describe_lost_replays,
    describe_unseen_end,
    explain_lost_records,
    is_too_small,
    one_off_costs,
    part_of_step,
    record_whole_steps,
    schedule_of,
)
from advisor.advise.report_fields import MIN_APART_SHARE
from advisor.advise.report_text import find_slow_steps, format_speedup, name_phase
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import LAYER_TIMES, Finding
from advisor.core.intervals import covered_length
from advisor.core.report import Report
from advisor.core.report_steps import EQUAL_STEP_SHARE
from advisor.core.report_time import HostShare, IdleCause, OperatorTime
from advisor.core.rule import HostCheck, Rule, VerdictRole
from advisor.measure import Analysis
from advisor.measure.device.families import MATRIX
from advisor.measure.device.roofline import select_device_rows
from advisor.measure.host.gaps import queued_idle_ns
from advisor.measure.host.sampled_code import line_of_operator
from advisor.measure.host.stacks import hottest_in_modules
from advisor.measure.steps.periodic import OWN_PHASES
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
MIN_IDLE_SHARE = 0.2
"""Minimum share of the step at which the verdict names a second cause of idle time."""
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
MAX_HEALTHY_STEP_RATIO = 2.0
"""Maximum ratio of the longest step to the shortest or median one in a healthy verdict."""


def write_verdict(
    report: Report, a: Analysis, rules: Sequence[Rule]
) -> tuple[Literal["bottlenecks", "healthy", "limited"], str]:
    """Return the status, and a verdict of a sentence or two. A crash comes first."""
    roles: dict[str, VerdictRole] = {rule.id: rule.verdict_role for rule in rules}
    if a.only_input is not None:
        return auxiliary_verdict(report, a.only_input, roles)
    status, text = _write_main_verdict(report, a, rules)
    if (shortcoming := _explain_shortcoming(report, a)) is not None:
        status, text = "limited", shortcoming
    if report.flight is not None and report.flight.problems:
        status, text = "bottlenecks", f"{flight_verdict(report)[1]} {text}"
    elif status != "healthy":
        text += _name_largest_operator(report, a)
    if status == "bottlenecks":
        text += _name_larger_note(report, text)
    else:
        text += _name_facts_besides_findings(report, rules, text)
    if (slow := _describe_slow_steps(report)) and slow not in text:
        text += f" {slow}"
    if leak := _warn_of_memory_growth(report, roles):
        vague = bool(report.findings) and is_vague(report.findings[0])
        leak_is_last = status == "bottlenecks" and not vague
        text = f"{text} {leak}" if leak_is_last else f"{leak} {text}"
        status = "limited" if status == "healthy" else status
    text += _ask_for_typical_steps(report, status) + _describe_all_fixes(report, status)
    if part_of_step_text := part_of_step(a):
        status, text = "limited", f"{part_of_step_text} {text} {record_whole_steps(a.trace.meta)}"
    pauses, leads = _describe_time_between_steps(report, roles)
    if pauses:
        status = "limited" if status == "healthy" else status
        text = f"{pauses} {text}" if leads else f"{text} {pauses}"
    crash = t.describe_crashes(report.crashes)
    if not crash:
        return status, text
    return "limited" if status == "healthy" else status, f"{crash} {text}"


def _name_facts_besides_findings(report: Report, rules: Sequence[Rule], text: str) -> str:
    """Name a risk and long pauses in a verdict that leads with no fix, unless ``text`` does."""
    roles = {rule.id: rule.verdict_role for rule in rules}
    titles = [risk.title for risk in report.risks if roles.get(risk.rule) not in _ROLES_OF_OWN]
    result, pauses = "", _describe_pauses(report)
    if titles and titles[0].lower() not in text.lower():
        result += f" First: {_lower_title(titles[0])}."
    names_pauses = any(roles.get(risk.rule) == BETWEEN_STEPS for risk in report.risks)
    if pauses and pauses not in text and not names_pauses:
        result += f" {pauses}"
    return result


BETWEEN_STEPS: VerdictRole = "time between steps"
_ROLES_OF_OWN: tuple[VerdictRole, ...] = ("memory growth", BETWEEN_STEPS)
"""Roles of risks that every verdict names in sentences of their own."""


def _describe_pauses(report: Report) -> str:
    """Say how much of the run is in pauses between steps. Empty if that is little."""
    share = None if report.recorded is None else report.recorded.outside_share
    if share is None or share < MIN_PAUSE_SHARE:
        return ""
    return (
        f"Long pauses between steps take {t.format_share(share)} of the time after the first step."
    )


def _ask_for_typical_steps(report: Report, status: str) -> str:
    """Ask for other steps if the profiled ones take far longer than the run's, and not because of
    the profiler. Empty if they do not."""
    step = report.step
    excess = None if step is None or step.profiler_overhead is not None else step.window_excess
    if status != "bottlenecks" or excess is None or excess < MIN_UNTYPICAL_EXCESS:
        return ""
    if _describe_slow_steps(report):
        return ""  # any of the run's steps is untypical
    return f" The profiled steps take {1 + excess:.1f} times the run's: profile later ones."


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
    return f" With all fixes: {faster}."


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
    return (
        f"{t.format_share(share)} of the time after the first step is in long pauses between "
        "steps, perhaps evaluation or checkpoints."
    ), gain < share


def _explain_shortcoming(report: Report, a: Analysis) -> str | None:
    """Return the verdict on a recording that supports no advice, or else ``None``."""
    if a.record_only:
        return None
    if why := describe_lost_replays(a):
        return f"{why} No busy share, idle time or gain is given."
    if report.busy_share is None:
        return None
    busy = _name_busy(report, a.own_busy_share)
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
        lead = f". {_name_first_finding(report, part=True)}" if report.findings else ""
        return f"The file is cut off. In what is left, the GPU is busy at least {busy}{lead}."
    if is_too_small(a):
        return (
            f"GPU busy {busy}, but {count_events(a):,} operators, calls and kernels are too few "
            f"for advice. {record_whole_steps(a.trace.meta)}"
        )
    return None


def _write_main_verdict(
    report: Report, a: Analysis, rules: Sequence[Rule]
) -> tuple[Literal["bottlenecks", "healthy", "limited"], str]:
    of_step = _name_step(report)
    if report.scope.step_source == LAYER_TIMES:
        return _write_layers_verdict(report)
    if report.busy_share is None:
        return _write_host_verdict(report, a, of_step, rules)
    busy_share, run_share = report.busy_share, a.own_busy_share
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
        lead = _name_first_finding(report, part=bool(part_of_step(a)))
        text = f"{text}.{_warn_of_varying_kernels(a)} {lead}."
        return "bottlenecks", f"{text}{_explain_idle(report, a)}"
    small = _name_largest_gain(report)
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
        return "limited", (
            f"One-off costs take at least {t.format_share(one_off_share)} {of_time}, {most}. "
            f"{action} {text}.{small}"
        )
    return "limited", f"{text}{_explain_idle_without_fix(report, a)}{small}"


def _write_layers_verdict(report: Report) -> tuple[Literal["bottlenecks", "limited"], str]:
    """Return the status and verdict on layer times. They show neither idle time nor the host."""
    text = f"The layers of one inference take {t.format_duration(report.step_ns)}"
    if has_large_gain(report):
        return "bottlenecks", f"{text}. {_name_first_finding(report)}."
    profile = " Profile its kernels with hardware counters." * bool(report.profile_kernels)
    return "limited", (
        f"{text}; advisor has no rule for them.{profile}{_name_largest_gain(report)} Idle time is "
        "not in a layer profile."
    )


def _name_step(report: Report) -> str:
    """Name the step that the report leads with: ``a 77.5 ms step``."""
    step = f"{t.format_duration(report.step_ns)} {_name_unit(report)}"
    if report.step is not None and report.step.varies:
        step = f"mean {_name_unit(report)} of {t.format_duration(report.step_ns)}"
    return t.with_article(step) + _name_rank(report)


def _name_all_steps(report: Report) -> str:
    """Name what the recorder's phases are shares of: the time of all steps, with the step that the
    report leads with if their mean is another."""
    step = report.step
    if step is None or step.varies or abs(step.mean_ns / step.ns - 1) < EQUAL_STEP_SHARE:
        return _name_step(report)
    return f"all steps' time (median {t.format_duration(step.ns)}{_name_rank(report)})"


def _name_busy(report: Report, own_share: float | None = None) -> str:
    """Name the share of the step in which the GPU works: ``84% of a 77.5 ms step``. ``own_share``:
    the share in the run's median step, which no profiler slows down. If neither share belongs to
    the step that the report leads with, the profiled steps' share is named."""
    share, step = t.format_share(report.busy_share), report.step
    if step is None or not step.window_differs:
        return f"{share} of {_name_step(report)}"
    of_window = own_share is None or abs(own_share - (report.busy_share or 0.0)) < 1e-6
    if step.varies or of_window:
        takes = f"{'mean ' * step.varies}{_name_unit(report)} {t.format_duration(report.step_ns)}"
        return f"{share} while profiled ({takes} without the profiler)"
    profiled = f" ({share} while profiled)" * (t.format_share(own_share) != share)
    return f"{t.format_share(own_share)} of {_name_step(report)}{profiled}"


def _name_unit(report: Report) -> str:
    """Return the unit of the report's times: step, inference step, or recording."""
    inference = report.recorded is not None and report.recorded.inference
    return "inference step" if report.per == "step" and inference else str(report.per)


def _name_rank(report: Report) -> str:
    """Name the rank of the step if the steps of the ranks differ. Empty otherwise."""
    spread = None if report.ranks is None else report.ranks.step
    if spread is None or spread.max < (1 + MIN_APART_SHARE) * spread.min:
        return ""
    shortest, longest = t.format_duration(spread.min), t.format_duration(spread.max)
    return f" of rank {report.scope.rank} (ranks: {shortest} to {longest})"


MIN_BUSY_DIFFERENCE = 0.05
"""Minimum difference between the busy shares of the run's own and of a profiled step at which the
verdict goes by the run's own."""


def _write_host_verdict(
    report: Report, a: Analysis, of_step: str, rules: Sequence[Rule]
) -> tuple[Literal["bottlenecks", "limited"], str]:
    """Return the status and verdict without recorded GPU work: what to record, and what the host
    does longest. ``of_step``: for example ``a 131 ms step``."""
    top = report.host[0] if report.host else None
    if top is None:
        if report.scope.step_source == "record":
            more = "Record more steps, and end each iteration with advisor.step()."
            return "limited", f"Nothing in this run can be measured. {more}"
        more = record_whole_steps(a.trace.meta)
        return "limited", f"Nothing in this trace can be measured. {more}"
    meta = a.trace.meta
    why = "No GPU work was recorded."
    action = record_gpu_work(meta)
    if meta.truncated:
        why, action = "The file is cut off before any GPU work.", "Copy it again, or record again."
    elif count_launches(a.trace) and a.trace.counters.height:
        why = "No GPU times were recorded, probably because hardware counters were."
        action = "Record without counters."
    elif count_launches(a.trace):
        calls = t.count_noun(count_launches(a.trace), "launch call")
        why = f"The recording has {calls} but no kernel: the profiler lost all GPU work."
        warm = schedule_of(meta, ": ", "wait=1, warmup=1, active=3")
        action = f"Record again after a warm-up{warm}."
    on_host = a.record is not None and a.trains_on_host and not meta.truncated
    if on_host:
        why = f"The program {_choose_verb(report)} on the CPU."
    elif report.scope.step_source == "record":
        why, action = "No window was profiled.", "GPU bottlenecks are unknown."
        unseen = "" if a.recorded is None else describe_unseen_end(a.recorded)
        if unseen:
            return "limited", f"{why} {unseen}"
    share, part = _name_longest_on_host(report, top)
    longest_part = f"The longest part on the host is {part}."
    if part.startswith(t.host_label("dispatch")):
        longest_part = _name_longest_operator(report)
    if has_large_gain(report):
        first = report.findings[0]
        own_share = 0.0 if first.impact is None else first.impact.share or 0.0
        is_own_code = part.startswith(tuple(map(name_phase, OWN_PHASES)))
        if is_unseen_code(first) and (share <= own_share or is_own_code):
            longest_part = ""  # a part of the finding, under another name
        lead = f"{_name_first_finding(report)}."
        return "bottlenecks", " ".join(filter(None, (why, longest_part, lead)))
    small = _name_largest_gain(report)
    if on_host:
        return "limited", f"{_describe_host_steps(report, a, of_step, rules)}{small}"
    return "limited", " ".join(part for part in (why, action, longest_part) if part) + small


NO_STEP = "No step was seen, and most checks need steps: end each iteration with advisor.step()."


def _choose_verb(report: Report) -> str:
    """Return what the program does: ``trains`` or ``runs``."""
    recorded = report.recorded
    trains = recorded is None or (recorded.steps and not recorded.inference)
    return "trains" if trains else "runs"


def _describe_host_steps(report: Report, a: Analysis, of_step: str, rules: Sequence[Rule]) -> str:
    """Write the verdict on steps computed by the host, without a large gain: the facts that stand
    out, what takes the time, and what was checked."""
    step, facts = of_step.split(" ", 1)[-1], _list_host_facts(report, a, rules)
    parts = [f"The program {_choose_verb(report)} on the CPU.", *facts.values()]
    computes = _is_only_computation(report) and not facts
    other = "other " * bool(facts)
    found = f"No {other}fix with a large gain was found in its {step}."
    if not report.findings:
        found = f"Nothing {'else ' * bool(facts)}to fix was found in its {step}."
    largest = _name_largest_host_part(report, a, computes=computes)
    if computes:
        found = f"Its {step} is almost all the model's own computation: "
    parts += [found + largest] if computes else [found, largest]
    has_phases = report.recorded is not None and bool(report.recorded.phases)
    if report.recorded is not None and has_phases and not largest and "loading data" not in facts:
        phases = report.recorded.phases[:2]
        shown = t.list_names(f"{name_phase(p.name)} {t.format_share(p.share)}" for p in phases)
        of_run = " of the run's steps" * (report.scope.step_source != "record")
        parts.append(f"Longest phases{of_run}: {shown}.")
    line = None if a.recorded is None else hottest_in_modules(a.recorded.stacks)
    if line is not None:
        place = line.location
        parts.append(
            f"Of forward, {t.format_share(line.share)} is in {place.function} "
            f"({place.file}:{place.line}), by sampled stacks."
        )
    if computes:
        nothing = "No fix with a large gain" if report.findings else "Nothing to fix"
        parts.append(f"{nothing} was found, but {_NEEDED}.")
    elif report.recorded is not None and not report.recorded.steps:
        parts.append(NO_STEP)
    elif not facts:
        skipped = {rule for check in report.not_checked for rule in check.rule.split(", ")}
        done = {rule.host_check for rule in rules if rule.id not in skipped}
        checks = [check for check in get_args(HostCheck) if check and check in done]
        parts += [f"Looked at: {', '.join(checks)}."] * bool(checks)
    return " ".join(filter(None, parts))


_NEEDED = "advisor cannot tell whether the model needs all this computation"


def _list_host_facts(report: Report, a: Analysis, rules: Sequence[Rule]) -> dict[str, str]:
    """List the facts that stand out of steps computed by the host, a sentence or two each. The keys
    are the checks that the facts belong to, or names of their own."""
    facts: dict[str, str] = {}
    by_id = {rule.id: rule for rule in rules}
    roles = {by_id[each.rule].verdict_role for each in report.risks if each.rule in by_id}
    for risk in report.risks:
        rule = by_id.get(risk.rule)
        if rule is not None and rule.verdict_role in _ROLES_OF_OWN:
            continue
        if rule is not None and rule.host_check == "slow steps":
            facts["slow steps"] = f"{risk.title}."
        else:
            facts["risk"] = f"First: {_lower_title(risk.title)}."
        break
    slow = " ".join(filter(None, (_describe_slow_steps(report), _name_slow_phase(report, a))))
    phase = _name_waiting_phase(report)
    if slow:
        facts["slow steps"] = f"{facts.get('slow steps', '')} {slow}".strip()
        facts["slow steps"] += f" {_ON_IDLE_MACHINE}" * (not phase)
    if (pauses := _describe_pauses(report)) and BETWEEN_STEPS not in roles:
        facts["pauses"] = pauses
    if phase:
        facts["loading data" if phase.startswith("Loading") else "the loop's own code"] = phase
    return facts


_ON_IDLE_MACHINE = "Record again on an idle machine: slow steps that remain are the program's own."
MIN_SLOW_SHARE = 0.25
"""Minimum share of slow steps in the time of the run's steps at which the verdict names them."""
MIN_PAUSE_SHARE = 0.15
"""Minimum share of pauses in the time after the first step at which the verdict names them."""
MIN_WAITING_SHARE = 0.25
"""Minimum share of the run's steps in a phase that computes nothing, at which the verdict names
it."""
_WAITING_PHASES = ("data", *OWN_PHASES)


def _describe_slow_steps(report: Report) -> str:
    """Say how many slow steps take how much of the time. Empty if they take little."""
    slow = find_slow_steps(report)
    if slow is None or slow.share < MIN_SLOW_SHARE:
        return ""
    verb = "takes" if len(slow.numbers) == 1 else "take"
    return f"{slow.sentence_start} and {verb} {t.format_share(slow.share)} of the time."


def _name_slow_phase(report: Report, a: Analysis) -> str:
    """Name the phase that makes slow steps long, or say that none does. Empty if slow steps take
    little of the time, or if the phases do not show it."""
    slow, recorded = find_slow_steps(report), a.recorded
    if slow is None or slow.share < MIN_SLOW_SHARE or recorded is None or recorded.host_is_ahead:
        return ""
    rows = np.isin([step.n for step in recorded.steps], slow.numbers)
    excess = {
        name: float(np.maximum(0.0, ns[rows] - np.median(ns[recorded.used])).sum())
        for name, ns in recorded.phases.items()
    }
    name, total = max(excess, key=lambda key: excess[key], default=""), sum(excess.values())
    if not total or excess[name] <= total / 2:
        return "No single phase explains their extra time."
    share = t.format_share(excess[name] / total)
    return f"Most of their extra time is in {name_phase(name)} ({share})."


def _name_waiting_phase(report: Report) -> str:
    """Name the longest phase of the run's steps if it computes nothing and takes much of the time.
    Empty otherwise."""
    phases = () if report.recorded is None else report.recorded.phases
    waiting = max(
        (p for p in phases if p.name in _WAITING_PHASES), key=lambda p: p.share, default=None
    )
    if waiting is None or waiting.share < MIN_WAITING_SHARE:
        return ""
    has_stacks = any(each.with_stack for each in report.inputs)
    return (
        f"{t.upper_first(name_phase(waiting.name))} takes {t.format_share(waiting.share)} of the "
        "run's steps." + f" Run {RECORD_DEEP} to see why." * (not has_stacks)
    )


def _name_largest_host_part(report: Report, a: Analysis, *, computes: bool) -> str:
    """Name what takes most of a step on the host, and the operator that leads it. Empty if the
    trace does not show it. ``computes``: as the end of a sentence on the step."""
    top, framework = report.host[0], report.scope.framework
    if report.scope.step_source == "record" or top.name == "unknown":
        return ""
    label, share = t.host_label(top.name, framework), t.format_share(top.share)
    operator = report.operators[0] if report.operators and top.name == "dispatch" else None
    leading = "" if operator is None else f", {_name_leading_operator(a, operator)}"
    if computes:
        return f"{label} take {share}{leading}."
    is_other_step = report.step is not None and report.step.window_differs
    whole = f"a profiled {_name_unit(report)}" if is_other_step else "it"
    part = "The largest part of"
    if top.share > MAJORITY_SHARE:
        part = "Nearly all of" if top.share >= NEARLY_ALL_SHARE else "Most of"
    return f"{part} {whole} is {label} ({share}){leading}."


MAJORITY_SHARE, NEARLY_ALL_SHARE = 0.5, 0.95
"""Shares above which a part is called most, and from which it is called nearly all."""


def _name_longest_operator(report: Report) -> str:
    """Name the operator with most time in the profiled step. Empty if none has most of it."""
    if not report.operators or report.operators[0].share <= MAJORITY_SHARE:
        return ""
    is_other_step = report.step is not None and report.step.window_differs
    step = f"a profiled {_name_unit(report)}" if is_other_step else _name_step(report)
    operator, share = report.operators[0], t.format_share(report.operators[0].share)
    return (
        f"The longest operator of {step} is {labels.clean(operator.name)}: {share} {_OF_OPERATORS}."
    )


_OF_OPERATORS = "of operators' time"


def _name_leading_operator(a: Analysis, operator: OperatorTime) -> str:
    """Name the operator with most time: ``led by aten::mm (38% of operators' time)``."""
    led = "mostly" if operator.share > MAJORITY_SHARE else "led by"
    sampled = line_of_operator(a, operator.name)
    place = "" if sampled is None else f", {sampled.location.file}:{sampled.location.line}"
    share = t.format_share(operator.share)
    return f"{led} {labels.clean(operator.name)} ({share} {_OF_OPERATORS}{place})"


MIN_OPERATORS_SHARE = 0.9
"""Minimum share of operators in a step that counts as the model's own computation."""
MAX_OTHER_PHASES_SHARE = 0.05
"""Maximum share of loading and other phases in a step that only computes."""


def _is_only_computation(report: Report) -> bool:
    """Return whether a step on the CPU consists almost only of the model's operators."""
    recorded, top = report.recorded, report.host[0]
    if recorded is None or not recorded.phases or top.name != "dispatch":
        return False
    computing = ("forward", "backward", "optimizer")
    other_share = sum(p.share for p in recorded.phases if p.name not in computing)
    return top.share >= MIN_OPERATORS_SHARE and other_share <= MAX_OTHER_PHASES_SHARE


def _name_largest_gain(report: Report) -> str:
    """Name the largest gain if all are small. Empty if there is none."""
    gains = [(f.impact, f) for f in report.findings if f.impact is not None and f.impact.share]
    if not gains:
        return ""
    impact, finding = max(gains, key=lambda gain: gain[0].share or 0.0)
    return (
        f" The largest gain found is {t.format_saving(impact)}{_format_share_and_range(finding)}."
    )


def _explain_idle_without_fix(report: Report, a: Analysis) -> str:
    """Say why the GPU idles without a known fix, and how to record more about it."""
    causes = [part for part in report.idle if part.share >= MIN_IDLE_SHARE][:2]
    causes = causes or list(report.idle[:1])
    if not causes:
        return "."
    if [part.cause for part in causes] == ["unknown"]:
        return f". {_explain_unknown_idle(report, a, causes[0].share)}"
    framework, meta = report.scope.framework, a.trace.meta
    named = [
        f"{t.idle_label(part, framework)}{_name_sampled(part)} ({t.format_share(part.share)}"
        for part in causes
    ]
    named[0] += f" of the {report.per}"
    shown = {part.cause for part in causes}
    recording = how_to_record_more("with_stack=True", a)
    later = f" after a few steps{schedule_of(meta, ': ', LATER_STEPS)}" * ("compile" in shown)
    more = (
        f" with {recording}, to see what the host does" if "unknown" in shown and recording else ""
    )
    advice = "No rule of advisor finds a fix with a significant gain."
    if later or more:
        advice = f"Record{later}{',' * bool(later and more)}{more}."
    scope = report.scope
    if "compile" in shown and scope.step_max_ns > MAX_HEALTHY_STEP_RATIO * scope.step_min_ns > 0:
        shortest, steps = (
            t.format_duration(scope.step_min_ns),
            t.count_noun(scope.steps_used, "step"),
        )
        advice = f"Some of the {steps} compile: the shortest takes {shortest}. {advice}"
    idle_share = sum(part.share for part in report.idle)
    are_most = sum(part.share for part in causes) > MAJORITY_SHARE * idle_share
    most = "Most" if are_most else "The largest part"
    return f". {most} of its idle time: {') and '.join(named)}). {advice}"


def _explain_idle(report: Report, a: Analysis) -> str:
    """Say why the GPU idles, or what to record if that is unknown. Only if this idle time is longer
    than what all fixes gain, and than any work, and if identical kernels do not vary."""
    if a.varying_kernels.are_most:
        return ""
    gain = sum(map(_compute_marginal_share, report.findings))
    largest = max([gain, *(part.share for part in report.time if part.name != "idle")])
    share = sum(part.share for part in report.idle if part.cause == "unknown")
    if share > largest:
        return f" {_explain_unknown_idle(report, a, share)}"
    on_cpu = [part for part in report.idle if part.cause in _ON_CPU]
    if sum(part.share for part in on_cpu) <= largest:
        waits = sum(part.share for part in report.idle if part.cause == "dispatch")
        operators = _name_longest_operators(a) if waits >= max(gain, MIN_IDLE_SHARE) else ""
        return f" {operators}" * bool(operators)
    named = [part for part in on_cpu if part.share >= MIN_ON_CPU_SHARE]
    causes = t.list_names(
        f"{t.format_share(part.share)}{f' of the {report.per}' * (part is named[0])} during "
        f"{_ON_CPU[part.cause]}{_name_sampled(part)}"
        for part in named
    )
    return f" The GPU idles for {causes}."


def _warn_of_varying_kernels(a: Analysis) -> str:
    """Say that identical kernels vary, so that their times prove little. Empty if they do not."""
    if not a.varying_kernels.are_most:
        return ""
    return (
        f" Identical kernels differ {a.varying_kernels.ratio:.0f}-fold in duration. Record again "
        "first: another process may use the GPU, or its clock dropped."
    )


def _compute_marginal_share(finding: Finding) -> float:
    """Return what a ranked fix saves after the fixes before it, as a share of the step."""
    impact = finding.impact
    if finding.priority is None or impact is None or not impact.gain_ns:
        return 0.0
    after = impact.gain_ns if finding.marginal_gain_ns is None else finding.marginal_gain_ns
    return (impact.share or 0.0) * after / impact.gain_ns


_ON_CPU = {"host_code": "the program's CPU code", "communication": "MPI calls"}
"""Causes of idle time for which no rule has a fix."""
MIN_ON_CPU_SHARE = 0.05
"""Minimum share of the step at which a cause of ``_ON_CPU`` is named."""


def _name_sampled(part: IdleCause) -> str:
    """Name the functions sampled during this idle time. Empty without samples."""
    names = [
        f"{labels.shorten(each.name, 40)} {t.format_share(each.share)}" for each in part.functions
    ]
    return f" ({', '.join(names)})" if names else ""


def _explain_unknown_idle(report: Report, a: Analysis, share: float) -> str:
    """Say that the trace does not show why the GPU idles for this share, and what to record. Stacks
    cannot explain idle time while work is queued for the GPU."""
    idle = f"The trace does not show why the GPU idles for {t.format_share(share)}"
    idle += f" of the {report.per}"
    recording = how_to_record_more("with_stack=True" if report.host else ACTIVITIES, a)
    recording = f"{ask_to_record(recording)}." if recording else ""
    recording = " ".join(filter(None, [_name_longest_operators(a), recording]))
    queued = queued_idle_ns(a) / max(a.span_ns, 1)
    if queued < MIN_QUEUED_SHARE:
        return " ".join(part for part in (f"{idle}.", recording) if part)
    why = "events were filtered out, or another process uses the GPU"
    if share - queued < MIN_QUEUED_SHARE:
        return f"{idle} while work is queued for it: {why}. {UNFILTERED}"
    return (
        f"{idle} ({t.format_share(queued)} with kernels queued). "
        f"{UNFILTERED_WITH_STACKS if 'with_stack' in recording else UNFILTERED}"
    )


def _name_longest_operators(a: Analysis) -> str:
    """Name operators that block the host for long in a call or two per step, with little recorded
    inside. Calls that prepare for new shapes do not count. Empty if there are none."""
    cpu = a.trace.cpu.with_row_index("row")
    inside = cpu.group_by("parent").agg(pl.col("dur").sum().alias("inside"))
    ts = cpu["ts"].to_numpy()
    ops = cpu.filter(
        (pl.col("kind") == "op") & (pl.col("thread") == a.trace.main_thread),
        pl.Series(covered_length(ts, ts + 1, a.steps.host_spans) > 0),
        ~pl.col("row").is_in(a.new_shape_calls["host"].implode()),
    ).join(inside, left_on="row", right_on="parent", how="left")
    self_time = pl.col("dur") - pl.col("inside").fill_null(0)
    long_calls = ops.with_columns(own=self_time).filter(
        pl.col("own") >= MIN_QUEUED_SHARE * a.step_ns
    )
    table = long_calls.group_by(pl.col("name").cast(pl.String)).agg(pl.col("own").sum()).sort("own")
    named = [
        f"{labels.shorten(labels.clean(name), 40)} ({t.format_duration(ns / a.step_count)} per "
        f"{a.per})"
        for name, ns in table.reverse().head(2).iter_rows()
        if ns >= MIN_IDLE_SHARE / 2 * a.span_ns
    ]
    return f"A few calls block the host: {' and '.join(named)}." if named else ""


MIN_QUEUED_SHARE = 0.05
"""Minimum share of the step at which idle time with queued work is reported on its own."""
UNFILTERED = "Record all activities on an unshared GPU."
UNFILTERED_WITH_STACKS = "Record stacks on an unshared GPU."


def _name_longest_on_host(report: Report, top: HostShare) -> tuple[float, str]:
    """Return the share of what the host does longest, and its name with its share of the step. If
    the trace does not show it, name the longest recorded phase or range, or add the second
    class."""
    framework, addition, of_step = report.scope.framework, "", _name_step(report)
    if report.step is not None and abs(report.step.window_excess or 0.0) >= MIN_APART_SHARE:
        of_step = f"a profiled {_name_unit(report)}"
    label, share = t.host_label(top.name, framework), top.share
    recorded = report.recorded
    if report.scope.step_source == "record":
        label, of_step = name_phase(top.name), _name_all_steps(report)
    elif top.name != "unknown" and not _is_phase_clearer(report):
        pass
    elif recorded is not None and recorded.phases and report.step is not None:
        label, share = name_phase(recorded.phases[0].name), recorded.phases[0].share
        of_step = _name_all_steps(report)
    elif report.ranges:
        label, share = (
            labels.shorten(labels.clean(report.ranges[0].name), 40),
            report.ranges[0].share,
        )
    else:
        stacks = "with_stack=True" if recorded is None else "advisor record --deep"
        addition = f" ({stacks} shows what)"
        for part in report.host[1:2]:
            addition += f"; {t.host_label(part.name, framework)} {t.format_share(part.share)}"
    return share, f"{label}: {t.format_share(share)} of {of_step}{addition}"


def _is_phase_clearer(report: Report) -> bool:
    """Return whether the recorded phases say more than the trace: the profiler slows its steps, and
    the run's own are mostly in one part of training."""
    step, recorded = report.step, report.recorded
    if step is None or recorded is None or not recorded.phases:
        return False
    slowed = (step.window_slowdown or 0.0) >= MIN_APART_SHARE
    return slowed and recorded.phases[0].name not in ("other", "between steps")


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
        f" {labels.shorten(labels.clean(name), 40)} takes most device time: {share} of the "
        f"{report.per}{reached}{fix}."
    )


def _name_possible_fix(report: Report, note: Finding) -> str:
    """Name the fix of a note, and the share of the step that the note is about if that is large."""
    about = ""
    if is_large_note(note, report):
        about = f", for {t.format_share(share_of_note(note, report))} of the {report.per}"
    return f"Unproven{about}: {_lower_title(t.first_clause(note.fix))}"


def _name_larger_note(report: Report, text: str) -> str:
    """Name a note about several times the share of the step that the first fix gains. Empty if
    there is none, or if ``text`` already names its fix."""
    first = report.findings[0].share_of_step if report.findings else 0.0
    large = [n for n in report.notes if is_large_note(n, report)]
    note = max(large, key=lambda n: share_of_note(n, report), default=None)
    if note is None or not first or share_of_note(note, report) < MIN_NOTE_RATIO * first:
        return ""
    possible_fix = _name_possible_fix(report, note)
    return "" if possible_fix in text else f" {possible_fix}."


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
    parts = [
        f"{family} {t.format_duration(ns)} (now at {t.format_share(1 - ns / times[family])})"
        for family, ns in sorted(lost.items(), key=lambda item: -item[1])[:2]
        if ns >= MIN_FAMILY_SHARE * total_lost
    ]
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
                f"{t.format_share(share * (1 - rate))} of it. The trace does not show why"
            )
    return ""


def _lower_title(title: str) -> str:
    """Return a title for use within a sentence. Names keep their capital: ``NCCL …``, ``DataLoader
    …``."""
    word = title.split(" ", 1)[0]
    is_name = word[1:] != word[1:].lower() or any(sign in word for sign in "._(")
    return title if is_name else t.lower_first(title)


def _name_first_finding(report: Report, *, part: bool = False) -> str:
    """Name the first finding and its gain, with the range if that is wide. ``part``: only a part of
    a step is recorded, which says little about the whole step."""
    first = report.findings[0]
    opening = "In this part" if part else "First"
    if is_unsure(first):
        opening += f", {POSSIBLE.format(t.format_share(first.confidence))}"
    impact = first.impact
    title = _lower_title(first.title)
    if impact is None or impact.gain_ns is None:
        unknown = ". It slows each step, but by how much is not recorded"
        return f"{opening}: {title}{unknown if first.known_cost else ''}"
    saving = t.format_saving(impact)
    about = "" if saving.startswith(("up to ", "at least ")) else "about "
    saving += "" if impact.currency == "step_time" else f" {t.format_per(impact.unit)}"
    if not impact.low_ns and not first.where:
        limit = saving.removeprefix("up to ")
        limit += "" if impact.share is None else f" ({t.format_share(impact.share)})"
        if first.code.startswith(RECORD_DEEP):
            code = _TAKES_MUCH.sub("", first.title)
            return (
                f"{code} takes {limit} of {_name_step(report)}. Its lines are not recorded: run "
                f"{first.code}"
            )
        hint = f"; {RECORD_DEEP} shows the lines" if RECORD_DEEP in first.summary else ""
        return f"{opening}: {title}, at most {limit}{hint}"
    # the finding itself says what this depends on
    is_uncertain = part or is_unsure(first) or (about and impact.low_ns == 0)
    saves = "may save" if is_uncertain else "saves"
    fix = "A fix"
    if first.fix.startswith(_SEARCHES):
        fix, saves = "Removing its cause", "may save"
    return f"{opening}: {title}. {fix} {saves} {about}{saving}{_format_share_and_range(first)}"


RECORD_DEEP = "advisor record --deep"
"""Command that records the lines of Python code."""
_SEARCHES = ("Check ", "Compare ", "Find ")
"""First words of fixes that look for a cause."""
_TAKES_MUCH = re.compile(r" takes much of the step$")


def _format_share_and_range(finding: Finding) -> str:
    """Format a gain's share and range: `` (24%; range 29.2 to 45.4 ms)``. May be empty."""
    share = None if finding.impact is None else finding.impact.share
    ends = t.format_gain_range(finding)
    parts = [t.format_share(share)] * (share is not None) + [f"range {ends}"] * bool(ends)
    return f" ({'; '.join(parts)})" * bool(parts)
