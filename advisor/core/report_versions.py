"""Conversion of reports of earlier versions to the current fields."""

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


def from_version_1(report: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON of ``advisor.report/1`` to version 2, in which some fields have other names."""
    report["schema"] = "advisor.report/2"
    for position, names in _NAMES_SINCE_VERSION_1.items():
        result: Any = report
        for key in position.split(".") if position else ():
            result = result.get(key) if isinstance(result, dict) else None
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, dict):
                for old in names.keys() & item.keys():
                    item[names[old]] = item.pop(old)
                for edit in item.get("edits") or ():
                    if isinstance(edit, dict) and isinstance(op := edit.get("op"), str):
                        edit["op"] = _OPERATIONS_SINCE_VERSION_1.get(op, op)
    return report
