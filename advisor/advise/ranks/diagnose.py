"""The summaries of all ranks to what is said of the job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

import advisor
from advisor.advise.ranks import words
from advisor.advise.ranks.merged import merge
from advisor.core.text import count_noun, format_count, format_duration, format_share
from advisor.measure.ranks.alike import find_alike
from advisor.measure.ranks.job_report import JobReport, Missing, Row, Spread, WhatIf, numbers
from advisor.measure.ranks.join import Joined, Waits, join, waits
from advisor.measure.ranks.members import Places
from advisor.measure.ranks.network import slow_links
from advisor.measure.ranks.odd import MIN_SHARE, Fleet, Seen, find_odd, together
from advisor.measure.ranks.profile import CLASSES, Profile, profile
from advisor.measure.ranks.runs import one_run
from advisor.measure.ranks.stages import find_stages
from advisor.measure.ranks.summary import Summary, Unread
from advisor.replay.ranks.price import no_stragglers, no_transfers, price
from advisor.replay.ranks.replay import Gain, Replay

Floats = NDArray[np.float64]

MAX_ODD = 20
ALONE_SHARE = 0.5
"""Of what several are worth together: ranks that are worth less one by one are told as one."""
MIN_GAIN_SHARE = 0.005
"""Of the step: what is worth less by replay holds nobody up."""


def diagnose(
    summaries: Sequence[Summary], unread: Sequence[Unread] = (), *, source: str = ""
) -> JobReport:
    """What many ranks say together. Ranks that say nothing are told as missing.

    Raises AdvisorError: a summary's columns do not belong together.
    """
    ordered, others, notes = one_run(summaries)
    report = JobReport(
        version=advisor.__version__,
        source=source,
        world=max((s.world for s in ordered), default=0),
        read=len(ordered),
        device=_most(s.device for s in ordered),
        hosts=len({s.host for s in ordered if s.host}),
        classes=[*CLASSES, "waiting"],
        bytes_read=sum(s.bytes_read for s in ordered),
        missing=_missing([*unread, *others]),
    )
    if not ordered:
        report.verdict = "No rank could be read."
        return report
    joined = join(ordered)
    own = profile(ordered)
    found = waits(joined)
    stage = find_stages(joined, len(ordered), len(own.steps))
    fleet = Fleet(ordered, own, joined, found, stage, Places(ordered))
    values = _values(own, found, joined)
    report.step = _spread(own)
    report.rows = _rows(ordered, values)
    report.alike = find_alike(ordered, values, report.classes, stage)
    _clocks(report, joined)
    replay = Replay(ordered, own, joined)
    report.replay_error = replay.error
    _odd(report, fleet, replay)
    report.findings, report.not_checked = merge(ordered, replay, fleet.step_ns)
    _communication(report, fleet, values)
    _not_checked(report, fleet, replay)
    report.not_checked |= notes
    return report


def _most(names: Iterable[str]) -> str:
    counts = Counter(name for name in names if name)
    return counts.most_common(1)[0][0] if counts else ""


def _missing(unread: Sequence[Unread]) -> list[Missing]:
    by_reason: dict[str, list[Unread]] = defaultdict(list)
    for each in unread:
        by_reason[each.why].append(each)
    return [
        Missing(
            ranks=numbers([each.rank for each in those if each.rank >= 0]),
            count=len(those),
            why=why,
            path=those[0].path,
        )
        for why, those in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]


def _spread(own: Profile) -> Spread | None:
    known = own.step_ns[own.step_ns > 0]
    if not len(known):
        return None
    least, low, median, high, most = np.quantile(known, [0, 0.1, 0.5, 0.9, 1]).tolist()
    return Spread(least=least, low=low, median=median, high=high, most=most)


def _values(own: Profile, found: Waits, joined: Joined) -> Floats:
    """ns a step by class, with what a rank waits for others apart from transfers."""
    open_wait = np.bincount(
        joined.rank[found.cells], weights=found.exposed, minlength=len(own.step_ns)
    )
    steps = np.maximum(np.array([np.isfinite(row).sum() for row in own.own_by_step]), 1)
    communication = own.values[:, -1]
    waiting = np.minimum(open_wait / steps, communication)
    return np.column_stack([own.values[:, :-1], communication - waiting, waiting])


def _rows(summaries: Sequence[Summary], values: Floats) -> list[Row]:
    return [
        Row(
            s.rank,
            s.host,
            s.path,
            s.step_ns,
            [round(ns) if np.isfinite(ns) else None for ns in values[place].tolist()],
        )
        for place, s in enumerate(summaries)
    ]


def _clocks(report: JobReport, joined: Joined) -> None:
    clocks = joined.clocks
    report.aligned = int(np.isfinite(clocks.shift).sum())
    report.error_ns = clocks.error_ns
    report.not_aligned = clocks.reason


def _odd(report: JobReport, fleet: Fleet, replay: Replay) -> None:
    """Who is odd, what that costs, and what the job would gain without."""
    step, priced = fleet.step_ns, not replay.reason
    told: list[tuple[Seen, Gain | None]] = []
    found = [*find_odd(fleet), *slow_links(fleet)]
    for seen in _joined(fleet, replay, found) if priced else found:
        # a rank that is not replayed (its file is cut off) has no price
        there = priced and replay.whole[list(seen.who.places)].any()
        gain = price(fleet, replay, seen) if there else None
        if gain is None or gain.gain >= MIN_GAIN_SHARE * step:
            told.append((seen, gain))
    told.sort(key=lambda item: -(item[0].excess_ns if item[1] is None else item[1].gain))
    steps = len(fleet.own.steps)
    report.odd = [words.odd(fleet, seen, gain, steps) for seen, gain in told[:MAX_ODD]]
    changes = [(words.what_if(fleet, seen), gain) for seen, gain in told[:MAX_ODD] if gain]
    if priced:
        changes.append(
            ("no stragglers: every rank at the median in every step", no_stragglers(fleet, replay))
        )
        for kind in sorted({key.kind for key in fleet.joined.keys}):
            name = kind.replace("_", "-")
            changes.append(
                (f"all {name} transfers hidden under compute", no_transfers(replay, kind))
            )
    report.what_if = [
        WhatIf(text=text, gain_ns=gain.gain, low_ns=gain.low, high_ns=gain.high)
        for text, gain in sorted(changes, key=lambda item: -item[1].gain)
        if gain.gain >= MIN_GAIN_SHARE * step
    ]
    report.verdict = _verdict(report, fleet, told)


def _communication(report: JobReport, fleet: Fleet, values: Floats) -> None:
    """What the rule about single ranks cannot say: of the whole job, and what of it is waiting."""
    text = words.in_the_open(fleet, values[:, -2] + values[:, -1], values[:, -1])
    report.findings = [
        structs.replace(found, summary=f"{text} {found.summary}".strip())
        if found.rule == "exposed-communication"
        else found
        for found in report.findings
    ]


def _joined(fleet: Fleet, replay: Replay, found: list[Seen]) -> list[Seen]:
    """Ranks that are odd in the same way as one, where only all of them together hold the job up:
    each alone is worth little while the next one is as late."""
    told: list[Seen] = []
    for kind in dict.fromkeys(seen.kind for seen in found):
        same = [seen for seen in found if seen.kind == kind]
        single = [seen for seen in same if seen.who.what == "rank" and not seen.moves]
        if kind != "network" and len(single) > 1 and all(seen.note != "late" for seen in single):
            joint = together(fleet, single)
            alone = sum(max(0.0, price(fleet, replay, seen).gain) for seen in single)
            if alone < ALONE_SHARE * price(fleet, replay, joint).gain:
                same = [joint, *(seen for seen in same if seen not in single)]
        told += same
    return told


def _verdict(report: JobReport, fleet: Fleet, told: list[tuple[Seen, Gain | None]]) -> str:
    """The job in one sentence, a second where nobody is odd."""
    who = count_noun(report.read, "rank")
    if report.missing:
        who += f" of {format_count(report.read + sum(m.count for m in report.missing))}"
    if report.step is None:
        return f"{who}: no step was measured."
    begin = f"{who}, {format_duration(report.step.median)} a step"
    if told:
        text = f"{begin}: {words.headline(fleet, *told[0])}"
        if len(told) > 1:
            text += f"; {count_noun(len(told) - 1, 'more odd one')}"
        return f"{text}."
    table = np.array([row.values for row in report.rows], dtype=np.float64)
    column = dict(zip(report.classes, np.nan_to_num(table).T, strict=True))
    step = fleet.own.step_ns
    share = (column["communication"] + column["waiting"]).sum() / max(step.sum(), 1.0)
    waiting = column["waiting"].sum() / max(step.sum(), 1.0)
    text = f"{begin}: no rank is told from the others"
    if share >= MIN_SHARE:
        text += f"; {format_share(share)} of it is communication that nothing hides"
        if waiting >= MIN_SHARE:
            text += f", {format_share(waiting)} waiting for whoever is last"
    return f"{text}."


def _not_checked(report: JobReport, fleet: Fleet, replay: Replay) -> None:
    """What could not be looked at."""
    if replay.reason:
        report.not_checked["gains for the job"] = replay.reason
    damaged = [s.rank for s in fleet.summaries if s.damage]
    if damaged:
        report.not_checked["the work of damaged files"] = (
            f"ranks {numbers(damaged)} are compared by the steps before the damage alone"
        )
    if fleet.joined.dropped:
        report.not_checked["all collectives"] = (
            f"{format_count(fleet.joined.dropped)} of later steps are left out to keep summaries "
            "small"
        )
