"""Verdict without recorded GPU work: what to record, and what the steps on the host do longest."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from advisor.advise.finding_text import has_large_gain, is_unseen_code
from advisor.advise.program_wording import record_gpu_work
from advisor.advise.recording_limits import (
    count_launches,
    describe_unseen_end,
    record_whole_steps,
    schedule_of,
)
from advisor.advise.report_fields import MIN_APART_SHARE
from advisor.advise.report_text import find_slow_steps
from advisor.advise.verdict_parts import (
    BETWEEN_STEPS,
    MAJORITY_SHARE,
    MIN_SLOW_SHARE,
    NEARLY_ALL_SHARE,
    RECORD_DEEP,
    ROLES_WITH_OWN_SENTENCES,
    describe_pauses,
    describe_slow_steps,
    lower_title,
    name_all_steps,
    name_first_finding,
    name_largest_gain,
    name_step,
    name_unit,
)
from advisor.core import labels
from advisor.core import text as t
from advisor.core.report import Report
from advisor.core.report_time import HostShare, OperatorTime
from advisor.core.rule import HostCheck, Rule
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import op_table
from advisor.measure.host.sampled_code import line_of_operator
from advisor.measure.host.stacks import BACKWARD, hottest_in_modules
from advisor.measure.steps.periodic import LOOP_PHASES


def write_host_verdict(
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
        warm = schedule_of(meta, ": ", "wait=1, warmup=1, active=5")
        action = f"Record again after a warm-up{warm}."
    on_host = a.rank_record is not None and a.trains_on_host and not meta.truncated
    if on_host:
        why = f"The program {_choose_verb(report)} on the CPU."
    elif report.scope.step_source == "record":
        why, action = "No window was profiled.", "GPU bottlenecks are unknown."
        unseen = "" if a.run_steps is None else describe_unseen_end(a.run_steps)
        if unseen:
            return "limited", f"{why} {unseen}"
    share, part = _name_longest_on_host(report, top)
    longest_part = f"The longest part on the host is {part}."
    if part.startswith(t.host_label("dispatch")):
        longest_part = _name_longest_operator(report)
    if part.startswith(t.host_label("autograd")):
        longest_part = f"The main thread is {part}. {_describe_backward_thread(a)}"
    if has_large_gain(report):
        first = report.findings[0]
        own_share = 0.0 if first.impact is None else first.impact.share or 0.0
        is_own_code = part.startswith(tuple(map(t.host_label, LOOP_PHASES)))
        if is_unseen_code(first) and (share <= own_share or is_own_code):
            longest_part = ""  # a part of the finding, under another name
        lead = f"{name_first_finding(report)}."
        return "bottlenecks", " ".join(filter(None, (why, longest_part, lead)))
    small = name_largest_gain(report)
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
        shown = t.list_names(f"{t.host_label(p.name)} {t.format_share(p.share)}" for p in phases)
        of_run = " of the run's steps" * (report.scope.step_source != "record")
        parts.append(f"Longest phases{of_run}: {shown}.")
    line = None if a.run_steps is None else hottest_in_modules(a.run_steps.stacks)
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
        parts += [f"{t.count_noun(len(checks), 'check')} of the host found no more."] * bool(checks)
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
        if rule is not None and rule.verdict_role in ROLES_WITH_OWN_SENTENCES:
            continue
        if rule is not None and rule.host_check == "slow steps":
            facts["slow steps"] = f"{risk.title}."
        else:
            facts["risk"] = f"First: {lower_title(risk.title)}."
        break
    slow = " ".join(filter(None, (describe_slow_steps(report), _name_slow_phase(report, a))))
    phase = _name_waiting_phase(report, a)
    if slow:
        facts["slow steps"] = f"{facts.get('slow steps', '')} {slow}".strip()
        facts["slow steps"] += f" {_ON_IDLE_MACHINE}" * (not phase)
    if (pauses := describe_pauses(report)) and BETWEEN_STEPS not in roles:
        facts["pauses"] = pauses
    if phase:
        facts["loading data" if phase.startswith("Loading") else "the loop's own code"] = phase
    return facts


_ON_IDLE_MACHINE = "Record again on an idle machine: slow steps that remain are the program's own."
MIN_WAITING_SHARE = 0.25
"""Minimum share of the run's steps in a phase that computes nothing, at which the verdict names
it."""
_WAITING_PHASES = ("data", *LOOP_PHASES)


def _name_slow_phase(report: Report, a: Analysis) -> str:
    """Name the phase that makes slow steps long, or say that none does. Empty if slow steps take
    little of the time, or if the phases do not show it."""
    slow, run_steps = find_slow_steps(report), a.run_steps
    if slow is None or slow.share < MIN_SLOW_SHARE or run_steps is None or run_steps.host_is_ahead:
        return ""
    rows = np.isin([step.n for step in run_steps.steps], slow.numbers)
    excess = {
        name: float(np.maximum(0.0, ns[rows] - np.median(ns[run_steps.used])).sum())
        for name, ns in run_steps.phases.items()
    }
    name, total = max(excess, key=lambda key: excess[key], default=""), sum(excess.values())
    if not total or excess[name] <= total / 2:
        return "No single phase explains their extra time."
    share = t.format_share(excess[name] / total)
    return f"Most of their extra time is in {t.host_label(name)} ({share})."


def _name_waiting_phase(report: Report, a: Analysis) -> str:
    """Name the longest phase of the run's steps if it computes nothing and takes much of the time,
    and say whether only the first steps have it. Empty otherwise."""
    phases = () if report.recorded is None else report.recorded.phases
    waiting = max(
        (p for p in phases if p.name in _WAITING_PHASES), key=lambda p: p.share, default=None
    )
    if waiting is None or waiting.share < MIN_WAITING_SHARE:
        return ""
    sentence = f"{t.upper_first(t.host_label(waiting.name))} takes {t.format_share(waiting.share)}"
    run_steps = a.run_steps
    if run_steps is not None and waiting.name in run_steps.phases:
        used = run_steps.used
        later = run_steps.later_half_mean(run_steps.phases[waiting.name][used])
        if later < MIN_WAITING_SHARE * waiting.ns:
            return (
                f"{sentence} of the run's steps, mostly in their first half: the program or the "
                "recorder starts. Record more steps."
            )
    has_stacks = any(each.with_stack for each in report.inputs)
    return f"{sentence} of the run's steps." + f" Run {RECORD_DEEP} to see why." * (not has_stacks)


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
    subject = f"a profiled {name_unit(report)}" if is_other_step else "it"
    part = "The largest part of"
    if top.share > MAJORITY_SHARE:
        part = "Nearly all of" if top.share >= NEARLY_ALL_SHARE else "Most of"
    return f"{part} {subject} is {label} ({share}){leading}."


def _name_longest_operator(report: Report) -> str:
    """Name the operator with most time in the profiled step. Empty if none has most of it."""
    if not report.operators or report.operators[0].share <= MAJORITY_SHARE:
        return ""
    is_other_step = report.step is not None and report.step.window_differs
    step = f"a profiled {name_unit(report)}" if is_other_step else name_step(report)
    operator, share = report.operators[0], t.format_share(report.operators[0].share)
    return (
        f"The longest operator of {step} is {labels.clean(operator.name)}: {share} {_OF_OPERATORS}."
    )


_OF_OPERATORS = "of operators' time"


def _describe_backward_thread(a: Analysis) -> str:
    """Name the operators with most time in the thread that runs the backward pass, or say that its
    events are not recorded."""
    threads = a.trace.cpu["thread"].to_numpy()
    is_node = name_matches(a.trace.cpu["name"], BACKWARD).to_numpy()
    others = threads[is_node & (threads != a.trace.main_thread)]
    table = op_table(a, np.isin(threads, others)).sort("host").reverse()
    longest = table.filter(table["host"] > 0).head(MAX_BACKWARD_OPERATORS)
    if longest.is_empty():
        return "The thread that computes it is not recorded."
    names = t.list_names(
        f"{labels.clean(name)} ({t.format_duration(ns / a.step_count)})"
        for name, ns in longest.select("name", "host").iter_rows()
    )
    return f"Longest in it: {names}."


MAX_BACKWARD_OPERATORS = 3
"""Maximum number of operators of the backward pass that a verdict names."""


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


def _name_longest_on_host(report: Report, top: HostShare) -> tuple[float, str]:
    """Return the share of what the host does longest, and its name with its share of the step. If
    the trace does not show it, name the longest recorded phase or range, or add the second
    class."""
    framework, addition, of_step = report.scope.framework, "", name_step(report)
    if report.step is not None and abs(report.step.window_excess or 0.0) >= MIN_APART_SHARE:
        of_step = f"a profiled {name_unit(report)}"
    label, share = t.host_label(top.name, framework), top.share
    recorded = report.recorded
    if report.scope.step_source == "record":
        label, of_step = t.host_label(top.name), name_all_steps(report)
    elif top.name != "unknown" and not _is_phase_clearer(report):
        pass
    elif recorded is not None and recorded.phases and report.step is not None:
        label, share = t.host_label(recorded.phases[0].name), recorded.phases[0].share
        of_step = name_all_steps(report)
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
