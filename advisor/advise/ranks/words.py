"""What was seen, in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from advisor.core.text import format_duration, format_share
from advisor.measure.ranks.job_report import Odd, numbers
from advisor.measure.ranks.odd import Fleet, Seen
from advisor.replay.ranks.replay import Gain

Floats = NDArray[np.float64]
FEW_RANKS = 16
"""Up to which each is told by itself."""
MAX_SURE = 0.9999
"""A model of chance is not known better than this."""

FIX = {
    "compute": "Look at the device: SM clock, power and temperature limits, ECC errors, other "
    "processes on it (nvidia-smi -q -d PERFORMANCE,CLOCK,ECC). Swap it or leave it out if it stays "
    "slow with the same kernels.",
    "input": "Look at its input: loader workers, CPU cores bound to the process, the storage it "
    "reads from, larger samples in its shard.",
    "host": "Look at its host: CPU clock and cores bound to the process, NUMA node, garbage "
    "collection, logging or checkpoints of one rank only, other jobs on the machine.",
    "network": "Look at its links: NVLink or PCIe errors, the adapter's counters and firmware, the "
    "switch port, NCCL's choice of network (NCCL_DEBUG=INFO); test it with nccl-tests.",
    "imbalance": "Give the ranks equal work: {what}.",
    "pipeline": "Move layers from this stage to the others, or split it; embeddings and the loss "
    "count as layers.",
}
_EVEN = {
    True: "batches by tokens and not by samples, sorted or packed sequences",
    False: "balance experts (auxiliary loss, capacity) or embedding tables over the ranks by cost",
}
_MORE = {
    "compute": "compute",
    "input": "waiting for input",
    "host": "host time",
    "imbalance": "work",
}


def subject(fleet: Fleet, seen: Seen) -> str:
    """``rank 7``, ``host node-03 (ranks 24-31)``, ``another rank in each step``."""
    ranks = numbers([fleet.places.ranks[place] for place in seen.who.places])
    if seen.moves:
        return "another rank in each step"
    if seen.who.what == "rank":
        return f"{'rank' if len(seen.who.places) == 1 else 'ranks'} {ranks}"
    return f"{seen.who.what} {seen.who.name} (ranks {ranks})"


def why(fleet: Fleet, seen: Seen) -> str:
    """The measurement."""
    more, excess = seen.more, format_duration(seen.excess_ns)
    share = format_share(seen.excess_ns / fleet.step_ns) if fleet.step_ns else ""
    if seen.kind == "network":
        return (
            f"its collectives take {excess} a step ({share}) longer after the last rank has come "
            "than the same ones of other groups"
        )
    if seen.note == "late":
        place = seen.who.places[0]
        taken, last = int(fleet.waits.taken[place]), int(fleet.waits.late[place])
        own = sum(more.values())
        begins = "no more work of its own than the others in these steps: it begins late"
        if own > 0.02 * fleet.step_ns:
            begins = f"{format_duration(own)} more work of its own than the others in these steps"
        return (
            f"it comes last to {last} of {taken} collectives, and the others wait {excess} a step "
            f"({share}) for it with nothing else to do; it has {begins}"
        )
    parts = {"compute": "compute", "input": "waiting for input", "host": "host time"}
    told = {
        "compute": more.get("compute", 0.0),
        "input": more.get("input", 0.0),
        "host": more.get("host", 0.0) + more.get("copies", 0.0),
    }
    each = [
        f"{format_duration(ns)} {parts[name]}"
        for name, ns in told.items()
        if ns > 0.1 * seen.excess_ns
    ]
    of = f" of {format_duration(seen.others_ns)}" if seen.others_ns else ""
    text = f"{excess}{of} a step ({share} of the step) more work of its own than the others"
    if each:
        text += ", of it " + " and ".join(each)
    if seen.device is not None:
        text += f"; the same kernels take {seen.device:.2f} times as long"
    if seen.families:
        text += "; more " + " and ".join(
            f"{name} ({format_duration(ns)})" for name, ns in seen.families
        )
    if seen.note:
        text += f"; {seen.note}"
    return text


def odd(fleet: Fleet, seen: Seen, gain: Gain | None, steps: int) -> Odd:
    """For the report."""
    at = list(seen.who.places)
    waits = fleet.waits
    taken, last = int(waits.taken[at].sum()), int(waits.late[at].sum())
    waited = float(waits.caused[at].sum()) / max(1, steps) if len(waits.row) else None
    fix = FIX[seen.kind]
    if seen.kind == "imbalance":
        fix = fix.format(what=_EVEN[seen.moves])
    return Odd(
        what=seen.who.what,
        name=seen.who.name,
        ranks=numbers([fleet.places.ranks[place] for place in at]),
        kind=seen.kind,
        moves=seen.moves,
        waited_ns=waited,
        last_share=last / taken if taken else None,
        sure=None if seen.who.chance >= 1 else min(MAX_SURE, 1 - seen.who.chance),
        why=why(fleet, seen),
        fix=fix,
        gain_ns=None if gain is None else gain.gain,
        low_ns=None if gain is None else gain.low,
        high_ns=None if gain is None else gain.high,
    )


def what_if(fleet: Fleet, seen: Seen) -> str:
    """The change that is replayed."""
    who = subject(fleet, seen)
    if seen.kind == "network":
        return f"collectives of {who} as fast as the others'"
    if seen.kind == "pipeline":
        return "the pipeline's stages with equal work"
    if seen.moves:
        return "no rank that holds a step up"
    if seen.kind == "imbalance":
        return "the work spread evenly over the ranks"
    if seen.note == "late":
        return f"{who} there with the others"
    return f"{who} as fast as the median"


def headline(fleet: Fleet, seen: Seen, gain: Gain | None) -> str:
    """One sentence."""
    who, more = subject(fleet, seen), format_duration(seen.excess_ns)
    if seen.kind == "network":
        text = f"the collectives of {who} take {more} longer"
    elif seen.note == "late":
        text = f"the others wait {more} for {who}"
    elif seen.kind == "pipeline":
        text = f"{who} works {more} longer than the others"
    else:
        text = f"{who}: {more} more {_MORE[seen.kind]} than the others"
    if gain is not None and gain.gain > 0:
        text += f"; without that the step is {format_duration(gain.gain)} shorter"
        if fleet.step_ns:
            text += f" ({format_share(gain.gain / fleet.step_ns)})"
    return text


def in_the_open(fleet: Fleet, exposed: Floats, waiting: Floats) -> str:
    """How much of the job's steps is communication that nothing hides, by kind of collective.
    ``exposed``, ``waiting``: by rank, ns a step; the second is the part that is for others."""
    step = fleet.own.step_ns
    known = np.isfinite(exposed) & (step > 0)
    if not known.any():
        return ""
    share = exposed[known] / step[known]
    whole = float(step[known].sum())
    joined = fleet.joined
    of_rank = known[joined.rank]
    steps = np.array([max(1, len(summary.steps)) for summary in fleet.summaries])
    ns = joined.exposed / steps[joined.rank]
    kind = joined.key[joined.row]
    kinds: dict[str, float] = {}
    for number, total in enumerate(
        np.bincount(kind[of_rank], ns[of_rank], len(joined.keys)).tolist()
    ):
        name = joined.keys[number].kind.replace("_", "-")
        kinds[name] = kinds.get(name, 0.0) + total
    parts = [
        f"{name} {format_share(total / whole)}"
        for name, total in sorted(kinds.items(), key=lambda item: -item[1])
        if total >= 0.01 * whole
    ]
    text = (
        f"{format_share(float(exposed[known].sum()) / whole)} of the ranks' steps is communication "
    )
    text += (
        f"that nothing hides ({format_share(float(share.min()))} to "
        f"{format_share(float(share.max()))}"
    )
    if len(share) <= FEW_RANKS:
        ranks = [rank for rank, there in zip(fleet.places.ranks, known, strict=True) if there]
        each = [
            f"{rank} {format_share(own)}" for rank, own in zip(ranks, share.tolist(), strict=True)
        ]
        text += f"; by rank: {', '.join(each)}"
    text += ")"
    if parts:
        text += f": {', '.join(parts)}"
    late = float(np.nansum(waiting[known])) / whole
    if late >= 0.01:
        text += f"; {format_share(late)} is waiting for the last rank, which no overlap mends"
    return text + "."
