"""Who is not like the others, by work of their own: nobody is blamed for waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from advisor.measure.ranks.chance import binomial_tail, chances, means, middles, residuals
from advisor.measure.ranks.job_report import numbers
from advisor.measure.ranks.join import Joined, Waits
from advisor.measure.ranks.kernels import device_slower, longer_families
from advisor.measure.ranks.members import Places, Who, find_who
from advisor.measure.ranks.profile import OWN, Profile
from advisor.measure.ranks.summary import Summary

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHANCE = 0.002
"""Of a false alarm by each of five searches: together one healthy job of a hundred."""
MIN_SHARE = 0.02
"""Of the step: what ranks have more of than those that are like them."""
MOVING_SHARE = 0.03
"""Of the step, that the last rank of each step is above the others, in the mean."""
BROAD_SHARE = 0.08
"""Of the step: where ranks differ all over, nothing tells the odd from the even but what it
costs."""
STAGE_SHARE = 0.05
"""Of the step, that the longest stage is above the mean of the stages."""
LATE_SHARE = 0.05
"""Of the step, that the others wait in the open for the rank that is late."""
MIN_LATE = 0.5
MAX_LATE_CHANCE = 0.01
MIN_STEPS = 4
"""Fewer do not tell what moves from what stays."""
NEW_EACH_STEP = 0.5
"""A rank that is the last of more of the steps than this does not move."""


@dataclass
class Seen:
    """Something odd, as measured; ``places`` index the list of summaries."""

    kind: str
    who: Who
    excess_ns: float
    """Own time (of ``network``: transfer) a step above the others'."""
    moves: bool = False
    more: dict[str, float] = field(default_factory=dict)
    """By class, ns a step above the others."""
    device: float | None = None
    """How much longer the same kernels take there."""
    families: list[tuple[str, float]] = field(default_factory=list)
    others_ns: float = 0.0
    """Own time of the others, ns a step."""
    note: str = ""


@dataclass(frozen=True)
class Fleet:
    """What the searches look at."""

    summaries: Sequence[Summary]
    own: Profile
    joined: Joined
    waits: Waits
    stage: Ints
    places: Places

    @property
    def step_ns(self) -> float:
        """Median of the ranks' mean steps."""
        known = self.own.step_ns[self.own.step_ns > 0]
        return float(np.median(known)) if len(known) else 0.0


def find_odd(fleet: Fleet) -> list[Seen]:
    """All searches; what one explains another does not tell again."""
    found = persistent(fleet)
    blamed = {place for seen in found for place in seen.who.places}
    found += stages(fleet)
    found += moving(fleet, blamed)
    if not found:
        found += late(fleet)
    return found


# -- the same ranks in every step -------------------------------------------------------------


def persistent(fleet: Fleet) -> list[Seen]:
    """Ranks, hosts and racks with more work of their own than those that have the same part."""
    own, step = fleet.own, fleet.step_ns
    if step <= 0:
        return []
    floor = MIN_SHARE * step
    # the middle of the steps: what a rank has in one of them is not what it always has
    total = _middle(own.own_by_step, fleet.stage)
    left = {"own": total}
    for name in ("compute", "input"):
        left[name] = _middle(own.by_step[name], fleet.stage)
    left["host"] = _middle(own.by_step["host"] + own.by_step["copies"], fleet.stage)
    found: list[Seen] = []
    for name, excess in left.items():
        limit, spreads = CHANCE / len(left), name in ("host", "input")
        for who in find_who(excess, floor, limit, fleet.places, spreads=spreads):
            # others wait for the whole of a rank's work, not for a class of it
            if float(np.nanmax(total[list(who.places)])) > floor:
                _add(found, _seen(fleet, who, total))
    return _together(fleet, found)


def _middle(by_step: Floats, stage: Ints) -> Floats:
    """By rank: median over the steps of how much it is above the ranks of its stage."""
    left = np.stack([residuals(column, stage) for column in by_step.T], axis=1)
    return middles(left, axis=1)


def _add(found: list[Seen], fresh: Seen) -> None:
    """A larger unit that has the same excess takes the place of its parts."""
    mine = set(fresh.who.places)
    for seen in list(found):
        theirs = set(seen.who.places)
        if mine <= theirs:
            return
        if theirs < mine:
            found.remove(seen)
    found.append(fresh)


def _seen(fleet: Fleet, who: Who, total: Floats) -> Seen:
    at = list(who.places)
    inside = set(at)
    like = [
        place
        for place in range(len(fleet.summaries))
        if place not in inside and fleet.stage[place] in set(fleet.stage[at].tolist())
    ] or [place for place in range(len(fleet.summaries)) if place not in inside]
    values = fleet.own.values
    usual = middles(values[like], axis=0)
    more = dict(zip(OWN, means(values[at], axis=0) - usual, strict=False))
    kind, device, families = _kind(fleet, at, like, more)
    return Seen(
        kind=kind,
        who=who,
        excess_ns=float(np.nanmean(total[at])),
        more={name: float(ns) for name, ns in more.items()},
        device=device,
        families=families,
        others_ns=float(middles(fleet.own.own[like][None, :], axis=1)[0]),
    )


def _kind(
    fleet: Fleet, at: list[int], like: list[int], more: dict[str, float]
) -> tuple[str, float | None, list[tuple[str, float]]]:
    host = more["host"] + more["copies"]
    most = max(more["compute"], more["input"], host)
    if most == more["input"]:
        return "input", None, []
    if most == host:
        return "host", None, []
    odd = [_of_whole_steps(fleet, place) for place in at]
    others = [_of_whole_steps(fleet, place) for place in like]
    device = device_slower(odd, others)
    if device is None or device[0]:
        return "compute", None if device is None else device[1], []
    return "imbalance", None, longer_families(odd, others)


def _of_whole_steps(fleet: Fleet, place: int) -> Summary:
    """What a rank spends on families of kernels; of a file that is cut off, of the steps before the
    cut, as far as their compute tells."""
    summary = fleet.summaries[place]
    compute, own = summary.time.get("compute", 0.0), float(fleet.own.values[place, 0])
    if not summary.damage or compute <= 0 or not np.isfinite(own):
        return summary
    return structs.replace(
        summary,
        time={name: ns * own / compute for name, ns in summary.time.items()},
        families={name: ns * own / compute for name, ns in summary.families.items()},
    )


def _together(fleet: Fleet, found: list[Seen]) -> list[Seen]:
    """Ranks that have more of the work are one imbalance."""
    uneven = [seen for seen in found if seen.kind == "imbalance"]
    if len(uneven) < 2:
        return found
    return [*(seen for seen in found if seen.kind != "imbalance"), together(fleet, uneven)]


def together(fleet: Fleet, found: Sequence[Seen]) -> Seen:
    """Several that are odd in the same way, as one: the figures are of the largest."""
    places = tuple(sorted({place for seen in found for place in seen.who.places}))
    name = numbers([fleet.places.ranks[place] for place in places])
    who = Who("rank", name, places, min(seen.who.chance for seen in found))
    return replace(max(found, key=lambda seen: seen.excess_ns), who=who)


# -- parts of a pipeline ----------------------------------------------------------------------


def stages(fleet: Fleet) -> list[Seen]:
    """The longest stage of a pipeline, where the others wait for it."""
    names = np.unique(fleet.stage)
    if len(names) < 2 or fleet.step_ns <= 0:
        return []
    own = fleet.own.own
    middle = np.array([np.nanmedian(own[fleet.stage == name]) for name in names])
    if not np.isfinite(middle).all():
        return []
    top = int(np.argmax(middle))
    rest = np.delete(middle, top)
    excess = float(middle[top] - rest.mean())
    if excess < STAGE_SHARE * fleet.step_ns or middle[top] - rest.max() < MIN_SHARE * fleet.step_ns:
        return []
    at = np.flatnonzero(fleet.stage == names[top])
    like = np.flatnonzero(fleet.stage != names[top])
    # against the scatter of the ranks inside of the stages
    inside = np.concatenate([own[fleet.stage == n] - m for n, m in zip(names, middle, strict=True)])
    p = float(chances(np.append(inside, middle[top] - np.median(rest)))[-1])
    values = fleet.own.values
    above = middles(values[at], axis=0) - middles(values[like], axis=0)
    more = dict(zip(OWN, above, strict=False))
    odd = [fleet.summaries[place] for place in at.tolist()]
    others = [fleet.summaries[place] for place in like.tolist()]
    return [
        Seen(
            kind="pipeline",
            who=Who("stage", str(top), tuple(at.tolist()), p),
            excess_ns=excess,
            more={name: float(ns) for name, ns in more.items()},
            families=longer_families(odd, others),
            others_ns=float(rest.mean()),
            note=f"{len(names)} stages",
        )
    ]


# -- another rank from step to step -----------------------------------------------------------


def moving(fleet: Fleet, blamed: set[int]) -> list[Seen]:
    """Steps that are held up by one rank each, and not by the same."""
    own = fleet.own.own_by_step
    if own.shape[1] < MIN_STEPS or fleet.step_ns <= 0:
        return []
    own = own.copy()
    own[sorted(blamed)] = np.nan
    # what a rank has in every step is no part of what moves
    usual = middles(own, axis=1)[:, None]
    left = np.stack([residuals(column, fleet.stage) for column in (own - usual).T], axis=1)
    steps = np.flatnonzero(np.isfinite(left).sum(axis=0) >= 4)
    if len(steps) < MIN_STEPS:
        return []
    left = left[:, steps]
    last = np.nanargmax(np.where(np.isfinite(left), left, -np.inf), axis=0)
    above = left[last, np.arange(len(steps))]
    counts = np.bincount(last, minlength=len(fleet.summaries))
    excess = float(above.mean())
    single = np.array([float(chances(column).min()) for column in left.T])
    hits = int((single < 0.05).sum())
    p = binomial_tail(hits, len(steps), 0.05)
    extreme = p < CHANCE and hits * 2 >= len(steps) and excess > MOVING_SHARE * fleet.step_ns
    # in most of the steps, not in one that was long
    if not extreme and float(np.median(above)) < BROAD_SHARE * fleet.step_ns:
        return []
    if counts.max() > max(1.0, NEW_EACH_STEP * len(steps)):
        return []
    more = {}
    for name in OWN:
        each = fleet.own.by_step[name][:, steps]
        each = each - middles(each, axis=0)
        more[name] = float(np.nanmean(each[last, np.arange(len(steps))]))
    host = more["host"] + more["copies"]
    most = max(more["compute"], more["input"], host)
    kind = "input" if most == more["input"] else "host" if most == host else "imbalance"
    ranks = np.flatnonzero(counts)
    who = Who("rank", "another in each step", tuple(ranks.tolist()), p if extreme else 1.0)
    return [
        Seen(
            kind=kind,
            who=who,
            excess_ns=excess,
            moves=True,
            more=more,
            others_ns=float(np.nanmedian(own)),
            note=f"{len(ranks)} ranks are the last of {len(steps)} steps",
        )
    ]


# -- late, and nothing of its own says why ----------------------------------------------------


def late(fleet: Fleet) -> list[Seen]:
    """The rank that comes last to most collectives, where own work in these steps does not say why:
    a window of a step or two shows a delay that began before it."""
    waits, step = fleet.waits, fleet.step_ns
    steps = max(1, len(fleet.own.steps))
    if not len(waits.row) or step <= 0:
        return []
    place = int(np.argmax(waits.caused_exposed))
    taken, last = int(waits.taken[place]), int(waits.late[place])
    if taken < 4 or last < MIN_LATE * taken:
        return []
    if waits.caused_exposed[place] / steps < LATE_SHARE * step:
        return []
    like = np.flatnonzero(np.arange(len(fleet.summaries)) != place)
    values = fleet.own.values
    more = dict(zip(OWN, values[place] - middles(values[like], axis=0), strict=False))
    if steps > 2 and sum(more.values()) <= 0:
        return []
    sizes = fleet.joined.seen[waits.row]
    alike = len(waits.taken[waits.taken > 0])
    p = min(1.0, alike * binomial_tail(last, taken, 1 / float(np.median(sizes))))
    if p >= MAX_LATE_CHANCE:
        return []
    name = str(fleet.places.ranks[place])
    return [
        Seen(
            kind="host",
            who=Who("rank", name, (place,), p),
            excess_ns=float(waits.caused_exposed[place]) / steps,
            more={key: float(ns) for key, ns in more.items()},
            others_ns=float(np.nanmedian(fleet.own.own[like])),
            note="late",
        )
    ]
