"""The figures of two reports side by side."""

from __future__ import annotations

from advisor.compare.data import Amount
from advisor.core.report import Report


def amounts(before: Report, after: Report) -> list[Amount]:
    """Every figure of the two reports, side by side. What one report lists and the other does not
    is 0 there when the whole list was measured, else not measured."""
    found = []
    for group, attribute in (
        ("time", "time"),
        ("idle", "idle"),
        ("host", "host"),
        ("kernels", "families"),
    ):
        one, other = (
            {getattr(part, "name", getattr(part, "cause", "")): part.ns for part in items}
            for items in (getattr(before, attribute), getattr(after, attribute))
        )
        # an empty list of idle causes beside device time means that there was no idle time
        measured = [bool(one), bool(other)]
        if attribute == "idle":
            measured = [bool(before.time), bool(after.time)]
        for name in dict.fromkeys((*one, *other)):
            values = [
                side.get(name, 0.0 if there else None)
                for side, there in zip((one, other), measured, strict=True)
            ]
            found.append(
                Amount(group=group, name=name, unit="ns", before=values[0], after=values[1])
            )
    figures = (
        ("GPU busy", "share", "busy_share"),
        ("communication", "ns", "communication_ns"),
        ("communication hidden", "share", "communication_overlap"),
        ("MFU", "share", "mfu"),
        ("memory peak", "bytes", "memory_peak_bytes"),
    )
    for name, unit, field in figures:
        values = [getattr(before, field), getattr(after, field)]
        if values != [None, None]:
            found.append(
                Amount(group="figures", name=name, unit=unit, before=values[0], after=values[1])
            )
    return [*found, *_resources(before, after)]


def _resources(before: Report, after: Report) -> list[Amount]:
    """Energy and money a step, where either side has them in one currency."""
    reports = (before, after)
    found = []
    joules = [None if r.energy is None else r.energy.joules for r in reports]
    if joules != [None, None]:
        found.append(_amount("energy a step", "J", joules))
    currencies = {r.cost.currency for r in reports if r.cost is not None}
    whole = [r.per == "recording" for r in reports]
    if len(currencies) == 1 and whole[0] == whole[1]:
        many, name = (1, "cost") if whole[0] else (1000, "cost of 1,000 steps")
        costs = [None if r.cost is None else many * r.cost.step for r in reports]
        found.append(_amount(name, currencies.pop(), costs))
    return found


def _amount(name: str, unit: str, values: list[float | None]) -> Amount:
    return Amount(group="figures", name=name, unit=unit, before=values[0], after=values[1])


# -- predicted and realised ---------------------------------------------------------------------
