"""How wide an interval is: as wide as predictions of that kind have been wrong.

All of it is computed from one table (``predictions``). Errors are ratios of measured to predicted
gains; where the batch grows, of the step, for the gain is then near zero. An interval is such that
four of five past errors would have been inside it, the one to come counted in (split conformal: of
n errors the one in place ⌈0.8 (n + 1)⌉ by size). Kinds with too few of their own take all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from advisor.core.finding import Edit
from advisor.replay.predictions import (
    Prediction,
    all_trials,
    records_by_rule,
    shipped_experiments,
    shipped_predictions,
)

COVERAGE = 0.8
"""Share of the measured gains that an interval is to hold."""
JOB_COVERAGE = 0.85
"""The same of simulated jobs: more than is promised, since real jobs differ."""
MIN_ERRORS = round(COVERAGE / (1 - COVERAGE))
"""Fewer errors than this say nothing of that share: even the largest may be too small."""
OF_THE_STEP = ("batch",)
"""Kinds whose errors are of the step, not of the gain."""
MIN_SHARE = 0.01
"""Of the step, each way: two runs of one program differ by that much."""
OTHERS = "others"
"""What no kind of fault is like: all kinds together."""


class Band(NamedTuple):
    """Where a gain lies: ns per step; of a job, measured over predicted."""

    low: float
    high: float


def error_bound(errors: Sequence[float]) -> float:
    """The error that the next one stays below with ``COVERAGE``, given those before it."""
    ordered = sorted(errors)
    place = math.ceil(COVERAGE * (len(ordered) + 1))
    return ordered[min(place, len(ordered)) - 1]


# -- by kind of edit ----------------------------------------------------------------------------


def edit_kind(edit: Edit) -> str:
    """What kind of change an edit is, as far as its errors go."""
    if edit.op == "parallelize":
        return "loader"
    if edit.op == "resize":
        return "batch"
    if edit.op == "remove_skew":
        return "ranks"
    if edit.op == "make_async":
        return "waits"
    return "device" if edit.select.on == "gpu" and edit.op != "drop_launch" else "host"


def error_of(kinds: Iterable[str], known: Sequence[Prediction]) -> float:
    """How far off predictions of these kinds are, as a logarithm; the worst of them."""
    general = [row.error for row in known if row.kind not in OF_THE_STEP]
    bounds = []
    for name in set(kinds):
        own = [row.error for row in known if row.kind == name]
        # an error of a gain says little of one of the step: where only those are known, the worst
        few = max(general) if name in OF_THE_STEP else error_bound(general)
        bounds.append(error_bound(own) if len(own) >= MIN_ERRORS else few)
    return max(bounds, default=error_bound(general))


def widened_by_kind(
    gain: float, low: float, high: float, edits: Sequence[Edit], step_ns: float
) -> Band:
    """A band (``low`` to ``high``, from the assumptions of the edits) made as wide as predictions
    of these kinds are wrong. All ns per step."""
    kinds, known = {edit_kind(edit) for edit in edits}, shipped_experiments()
    floor = MIN_SHARE * step_ns
    of_step = kinds & set(OF_THE_STEP)
    if of_step:
        left = step_ns - gain
        floor += left * (math.exp(error_of(of_step, known)) - 1)
    factor = math.exp(error_of(kinds - of_step, known)) if kinds - of_step else 1.0
    ends = (gain * factor, gain / factor, gain - floor, gain + floor)
    return Band(min(low, *ends), min(max(high, *ends), step_ns))


def worst_case(low: float, high: float, step_ns: float) -> Band:
    """A band as wide as the worst prediction so far was wrong, ns per step."""
    factor = math.exp(max(row.error for row in shipped_experiments()))
    return Band(low / factor, min(high * factor, step_ns))


# -- by rule ------------------------------------------------------------------------------------


class Widened(NamedTuple):
    """A band, and what it comes from; empty: too little is known of the rule."""

    band: Band
    note: str


def widened_by_rule(rule: str, device: str, gain: float, band: Band, step_ns: float) -> Widened:
    """A band, ns per step, widened by what came of this rule's fixes: on the same hardware where
    there are enough of them, else on any. It never becomes narrower by this."""
    own = [row for row in all_trials() if row.rule == rule and row.predicted > 0]
    here = [row for row in own if row.device == device]
    used = here if len(here) >= MIN_ERRORS else own
    if len(used) < MIN_ERRORS:
        return Widened(band, "")
    factor = math.exp(error_bound([row.error for row in used]))
    wide = Band(
        min(band.low, gain / factor), min(max(band.high, gain * factor), max(step_ns, band.high))
    )
    return Widened(wide, str(records_by_rule(used)[rule]))


# -- jobs of many ranks -------------------------------------------------------------------------


def fault_kind(kind: str, *, moves: bool) -> str:
    """A kind of fault as the table has it (``imbalance that moves``: of another rank each step)."""
    return f"{kind} that moves" if moves else kind


def job_band(kind: str) -> Band:
    """Measured over predicted gains of faults of a kind (of all, where too few are known), on
    simulated jobs that were run again without their fault: that includes what the replay cannot
    know, such as what overlap hides and hosts that run ahead."""
    bands = job_bands()
    return bands.get(kind) or bands[OTHERS]


@cache
def job_bands() -> dict[str, Band]:
    """By kind. Split conformal, as many jobs left out below as above; to whole hundredths."""
    ratios: dict[str, list[float]] = {}
    for row in shipped_predictions():
        if row.source == "job":
            for name in (row.kind, OTHERS):
                ratios.setdefault(name, []).append(row.measured / row.predicted)
    bands = {}
    for name, values in ratios.items():
        outside = math.floor((1 - JOB_COVERAGE) / 2 * (len(values) + 1))
        if outside:
            values.sort()
            low, high = values[outside - 1], values[-outside]
            bands[name] = Band(math.floor(low * 100) / 100, math.ceil(high * 100) / 100)
    return bands


# -- another mesh -------------------------------------------------------------------------------


@cache
def mesh_error(*, assumed: bool) -> float:
    """Logarithm by which the step on another device mesh may be off: as on simulated jobs; where
    links or collectives there are ``assumed``, as for published steps of one model on two meshes,
    of which neither was recorded."""
    kinds = ("simulated", "published") if assumed else ("simulated",)
    rows = [row for row in shipped_predictions() if row.source == "mesh"]
    return max(
        error_bound([row.error for row in rows if row.kind == kind] or [0.0]) for kind in kinds
    )


# -- another GPU --------------------------------------------------------------------------------


@cache
def device_error(kind: str, *, other_vendor: bool) -> float:
    """Logarithm by which the time of device work of this kind (``compute``, ``memory``) may be off
    on another GPU: the largest error of the kind; of any, for kinds that nobody measured.

    Many layers on one pair of GPUs are one pair of GPUs, and so few of these allow nothing finer.
    They are of one vendor, which says little of another's kernels: there the spread is added of the
    efficiencies that kernels of one family reach on GPUs of both, in public traces.
    """
    of_work = {name: _gpu_errors(name) for name in ("compute", "memory")}
    within = max(of_work.get(kind) or [error for own in of_work.values() for error in own])
    return math.hypot(within, error_bound(_gpu_errors("vendor"))) if other_vendor else within


@cache
def host_error() -> float:
    """Logarithm by which the host time of one program differs between machines."""
    return error_bound(_gpu_errors("host"))


def count_comparisons() -> dict[str, int]:
    """How many comparisons of two GPUs these errors rest on: of the same work, of the efficiency of
    one family of kernels on two vendors, of one operator's time on two hosts."""
    work = {
        frozenset((row.program, row.device, row.target))
        for row in shipped_predictions()
        if row.source == "gpus" and row.kind in ("compute", "memory")
    }
    vendors, hosts = len(_gpu_errors("vendor")), len(_gpu_errors("host"))
    return {"crossings": len(work), "efficiencies": vendors, "hosts": hosts}


def _gpu_errors(kind: str) -> list[float]:
    return [row.error for row in shipped_predictions() if row.source == "gpus" and row.kind == kind]
