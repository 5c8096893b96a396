"""Parts that the verdicts share: names of the step, of the first fix and of the largest gain."""

import re

from advisor.advise.finding_text import POSSIBLE, is_conditional, is_unsure
from advisor.advise.report_fields import MIN_APART_SHARE
from advisor.advise.report_text import find_slow_steps, other_load
from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.core.report_steps import EQUAL_STEP_SHARE
from advisor.core.rule import VerdictRole

MAX_HEALTHY_STEP_RATIO = 2.0
"""Maximum ratio of the longest step to the shortest or median one in a healthy verdict."""
BETWEEN_STEPS: VerdictRole = "time between steps"
ROLES_WITH_OWN_SENTENCES: tuple[VerdictRole, ...] = ("memory growth", BETWEEN_STEPS)
"""Roles of risks that every verdict names in sentences of their own."""


def describe_pauses(report: Report) -> str:
    """Say how much of the run is in pauses between steps. Empty if that is little."""
    share = None if report.recorded is None else report.recorded.outside_share
    if share is None or share < MIN_PAUSE_SHARE:
        return ""
    return (
        f"Long pauses between steps take {t.format_share(share)} of the time after the first step."
    )


def name_step(report: Report) -> str:
    """Name the step that the report leads with: ``a 77.5 ms step``."""
    step = f"{t.format_duration(report.step_ns)} {name_unit(report)}"
    if report.step is not None and report.step.varies:
        step = f"mean {name_unit(report)} of {t.format_duration(report.step_ns)}"
    return t.with_article(step) + _name_rank(report)


def name_all_steps(report: Report) -> str:
    """Name what the recorder's phases are shares of: the time of all steps, with the step that the
    report leads with if their mean is another."""
    step = report.step
    if step is None or step.varies or abs(step.mean_ns / step.ns - 1) < EQUAL_STEP_SHARE:
        return name_step(report)
    return f"the time of all steps (median {t.format_duration(step.ns)}{_name_rank(report)})"


def name_unit(report: Report) -> str:
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


MIN_SLOW_SHARE = 0.25
"""Minimum share of slow steps in the time of the run's steps at which the verdict names them."""
MIN_PAUSE_SHARE = 0.15
"""Minimum share of pauses in the time after the first step at which the verdict names them."""


def describe_slow_steps(report: Report) -> str:
    """Say how many slow steps take how much of the time. Empty if they take little."""
    slow = find_slow_steps(report)
    if slow is None or slow.share < MIN_SLOW_SHARE:
        return ""
    verb = "takes" if len(slow.numbers) == 1 else "take"
    share = f" and {verb} {t.format_share(slow.share)} of the time"
    load = other_load(report).removesuffix(" in these steps")
    return slow.sentence_start + (f": {load}. Record again without them." if load else f"{share}.")


MAJORITY_SHARE, NEARLY_ALL_SHARE = 0.5, 0.95
"""Shares above which a part is called most, and from which it is called nearly all."""


def name_largest_gain(report: Report) -> str:
    """Name the largest gain if all are small. Empty if there is none."""
    gains = [(f.impact, f) for f in report.findings if f.impact is not None and f.impact.share]
    if not gains:
        return ""
    impact, finding = max(gains, key=lambda gain: gain[0].share or 0.0)
    return (
        f" The largest gain found is {t.format_saving(impact)}{_format_share_and_range(finding)}."
    )


def lower_title(title: str) -> str:
    """Return a title for use within a sentence. Names keep their capital: ``NCCL …``, ``DataLoader
    …``."""
    word = title.split(" ", 1)[0]
    is_name = word[1:] != word[1:].lower() or any(sign in word for sign in "._(")
    return title if is_name else t.lower_first(title)


def name_first_finding(report: Report, *, part: bool = False) -> str:
    """Name the first finding and its gain, with the range if that is wide. ``part``: only a part of
    a step is recorded, which says little about the whole step."""
    first = report.findings[0]
    opening = "In this part" if part else "First"
    if is_unsure(first):
        opening += f", {POSSIBLE.format(t.format_share(first.confidence))}"
    impact = first.impact
    title = lower_title(first.title)
    if impact is None or impact.gain_ns is None:
        unknown = ". What it costs is not recorded"
        return f"{opening}: {title}{unknown if first.costs_more_than_recorded else ''}"
    saving = t.format_saving(impact)
    about = "" if saving.startswith(("up to ", "at least ")) else "about "
    saving += "" if impact.currency == "step_time" else f" {t.format_per(impact.unit)}"
    if not impact.low_ns and not first.where:
        limit = saving.removeprefix("up to ")
        limit += "" if impact.share is None else f" ({t.format_share(impact.share)})"
        if first.code.startswith(RECORD_DEEP):
            code = _TAKES_MUCH.sub("", first.title)
            return (
                f"{code} takes {limit} of {name_step(report)}. Its lines are not recorded: run "
                f"{first.code}"
            )
        hint = f"; {RECORD_DEEP} shows the lines" if RECORD_DEEP in first.summary else ""
        return f"{opening}: {title}, at most {limit}{hint}"
    # the finding itself says what this depends on
    is_uncertain = part or is_conditional(first, report) or (about and impact.low_ns == 0)
    saves = "may save" if is_uncertain else "saves"
    fix = "A fix"
    if first.fix.startswith(_SEARCHES):
        fix, saves = "Removing its cause", "may save"
    return f"{opening}: {title}. {fix} {saves} {about}{saving}{_format_share_and_range(first)}"


RECORD_DEEP = "advisor record --deep"
"""Command that records the lines of Python code."""
_SEARCHES = ("Check ", "Compare ", "Find ")
"""First words of fixes that look for a cause."""
_TAKES_MUCH = re.compile(r" takes? much of (?:the|each) \w+$")


def _format_share_and_range(finding: Finding) -> str:
    """Format a gain's share and range: `` (24%; range 29.2 to 45.4 ms)``. May be empty."""
    share = None if finding.impact is None else finding.impact.share
    ends = t.format_gain_range(finding)
    if finding.impact is not None and not finding.impact.low_ns:
        ends = ends if not t.format_saving(finding.impact).startswith("up to ") else None
    parts = [t.format_share(share)] * (share is not None) + [f"range {ends}"] * bool(ends)
    return f" ({'; '.join(parts)})" * bool(parts)
