"""Conversion of reports of earlier versions to the current fields."""

from collections.abc import Mapping
from typing import Any

_PRIORITY_NAMES = {"rank": "priority"}
_FINDING_NAMES = {
    "worth": "impact",
    "rank_gain_ns": "marginal_gain_ns",
    "check": "verify",
    **_PRIORITY_NAMES,
}
_NAMES_SINCE_VERSION_1 = {
    "step": {
        "longer": "window_slowdown",
        "cost": "profiler_overhead",
        "around_ns": "nearby_ns",
        "as_far": "share_beyond",
        "first": "in_warm_up",
        "unlike": "atypical",
    },
    "findings": _FINDING_NAMES,
    "risks": _FINDING_NAMES,
    "notes": _FINDING_NAMES,
    "cost.fixes": _PRIORITY_NAMES,
    "views.stairs.measured": _PRIORITY_NAMES,
    "views.stairs.fixes": _PRIORITY_NAMES,
    "views": {"stairs": "fix_sequence"},
    "": {"good": "passed", "uneven": "step_variation", "views": "charts"},
}
"""Old and new names of fields, by position in the report, innermost first."""
_OPERATIONS_SINCE_VERSION_1 = {
    "asynchronous": "make_async",
    "spread": "parallelize",
    "punctual": "remove_skew",
}


_KINDS = ("findings", "risks", "notes")
_FINDING_NAMES_2 = {
    "moved_ns": "offloaded_ns",
    "pays_after": "after_fix",
    "known_cost": "costs_more_than_recorded",
}
_IMPACT_NAMES_2 = {
    "most_ns": "bound_ns",
    "of_run": "is_run_gain",
    "of_job": "is_job_gain",
}
_EDIT_NAMES_2 = {"factor_low": "best_factor", "factor_high": "worst_factor"}
_NAMES_SINCE_VERSION_2 = {
    "scope": {"earlier_ns": "launched_before_ns", "behind_ns": "queue_delay_ns"},
    "recorded": {"observer_effect": "profiler_overhead"},
    **{f"{kind}.impact": _IMPACT_NAMES_2 for kind in _KINDS},
    **{f"{kind}.edits": _EDIT_NAMES_2 for kind in _KINDS},
    **dict.fromkeys(_KINDS, _FINDING_NAMES_2),
    **{f"layers.{part}": {"own_ns": "self_ns"} for part in ("layers", "kinds")},
    "": {"serving": "inference"},
}


def from_version_1(report: dict[str, Any]) -> dict[str, Any]:
    """Return JSON of ``advisor.report/1`` as JSON of the current version."""
    _rename(report, _NAMES_SINCE_VERSION_1)
    for kind in _KINDS:
        for edit in _find(report, [kind, "edits"]):
            if isinstance(operation := edit.get("op"), str):
                edit["op"] = _OPERATIONS_SINCE_VERSION_1.get(operation, operation)
    return from_version_2(report)


def from_version_2(report: dict[str, Any]) -> dict[str, Any]:
    """Return JSON of ``advisor.report/2`` as JSON of the current version."""
    report["schema"] = "advisor.report/3"
    _rename(report, _NAMES_SINCE_VERSION_2)
    for kind in _KINDS:
        for impact in _find(report, [kind, "impact"]):
            if impact.get("currency") == "unpriced":
                impact["currency"] = "unknown"
    return report


def _rename(report: dict[str, Any], names_by_place: Mapping[str, Mapping[str, str]]) -> None:
    for place, names in names_by_place.items():
        for item in _find(report, place.split(".") if place else []):
            for old in names.keys() & item.keys():
                item[names[old]] = item.pop(old)


def _find(value: Any, keys: list[str]) -> list[dict[str, Any]]:
    """Return the objects at a place in the report, through lists."""
    if isinstance(value, list):
        return [found for item in value for found in _find(item, keys)]
    if not isinstance(value, dict):
        return []
    return _find(value.get(keys[0]), keys[1:]) if keys else [value]
