"""What a deviation is, in sentences: who it is, and the measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.core.ranks import format_ranks
from advisor.core.text import format_duration, format_share

if TYPE_CHECKING:
    from advisor.measure.ranks.outliers import Deviation, Job

_PARTS = {"compute": "compute", "input": "waiting for input", "host": "host time"}


def describe_subject(job: Job, deviation: Deviation) -> str:
    """``rank 7``, ``host node-03 (ranks 24-31)``, ``a different rank in each step``."""
    ranks = format_ranks([job.places.ranks[place] for place in deviation.who.places])
    if deviation.moves:
        return "a different rank in each step"
    if deviation.who.unit == "rank":
        return f"{'rank' if len(deviation.who.places) == 1 else 'ranks'} {ranks}"
    return f"{deviation.who.unit} {deviation.who.name} (ranks {ranks})"


def describe_reason(job: Job, deviation: Deviation) -> str:
    """The measurement, without its subject: ``5.1 ms more own work per step than the others …``."""
    more, excess = deviation.more, format_duration(deviation.excess_ns)
    share = format_share(deviation.excess_ns / job.step_ns) if job.step_ns else ""
    if deviation.kind == "network":
        return (
            f"once all ranks have arrived, its collectives take {excess} ({share}) longer per step "
            "than the same ones of other groups"
        )
    amounts = {
        "compute": more.get("compute", 0.0),
        "input": more.get("input", 0.0),
        "host": more.get("host", 0.0) + more.get("copies", 0.0),
    }
    if deviation.late:
        place = deviation.who.places[0]
        taken, last = int(job.waits.taken[place]), int(job.waits.late[place])
        own = sum(more.values())
        text = (
            f"it arrives last at {last} of {taken} collectives, and the others wait {excess} "
            f"({share}) per step for it with nothing to compute"
        )
        if own > 0.02 * job.step_ns:
            text += f"; it has {format_duration(own)} more own work per step than the others"
        else:
            text += "; it has no more own work than the others in these steps: it starts late"
    else:
        of = f" (the others: {format_duration(deviation.others_ns)})" if deviation.others_ns else ""
        text = f"{excess} more own work per step than the others{of}, {share} of the step"
    least = 0.1 * deviation.excess_ns
    each = [
        f"{format_duration(ns)} more {_PARTS[name]}" for name, ns in amounts.items() if ns > least
    ]
    if each:
        text += f": {' and '.join(each)}"
    if deviation.device is not None:
        text += f"; the same kernels take {deviation.device:.2f} times as long"
    if deviation.families:
        named = " and ".join(f"{name} ({format_duration(ns)})" for name, ns in deviation.families)
        text += f"; more time in {named}"
    return f"{text}; {deviation.note}" if deviation.note else text


def describe_change(job: Job, deviation: Deviation) -> str:
    """What the replay changes to estimate the gain."""
    who = describe_subject(job, deviation)
    if deviation.kind == "network":
        return f"collectives of {who} as fast as the others'"
    if deviation.kind == "pipeline":
        return "the pipeline's stages with equal work"
    if deviation.moves:
        return "no rank that holds a step up"
    if deviation.kind == "imbalance":
        return "the work spread evenly over the ranks"
    if deviation.late:
        return f"{who} arriving with the others"
    return f"{who} as fast as the median"
