"""Reports of earlier versions, brought to the fields of the next one."""

from typing import Any

_ORDER = {"rank": "priority"}
_OF_FINDINGS = {"worth": "impact", "rank_gain_ns": "marginal_gain_ns", "check": "verify", **_ORDER}
_NAMES_SINCE_VERSION_1 = {
    "step": {
        "longer": "window_slowdown",
        "cost": "profiler_overhead",
        "around_ns": "nearby_ns",
        "as_far": "share_beyond",
        "first": "in_warm_up",
        "unlike": "atypical",
    },
    "findings": _OF_FINDINGS,
    "risks": _OF_FINDINGS,
    "notes": _OF_FINDINGS,
    "cost.fixes": _ORDER,
    "views.stairs.measured": _ORDER,
    "views.stairs.fixes": _ORDER,
    "views": {"stairs": "fix_sequence"},
    "": {"good": "passed", "uneven": "step_variation", "views": "charts"},
}
"""Old and new names of fields, by place in the report, the innermost first."""
_OPERATIONS_SINCE_VERSION_1 = {
    "asynchronous": "make_async",
    "spread": "parallelize",
    "punctual": "remove_skew",
}


def from_version_1(report: dict[str, Any]) -> dict[str, Any]:
    """Return JSON of ``advisor.report/1`` as JSON of version 2: fields have other names."""
    report["schema"] = "advisor.report/2"
    for place, names in _NAMES_SINCE_VERSION_1.items():
        result: Any = report
        for key in place.split(".") if place else ():
            result = result.get(key) if isinstance(result, dict) else None
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, dict):
                for old in names.keys() & item.keys():
                    item[names[old]] = item.pop(old)
                for edit in item.get("edits") or ():
                    if isinstance(edit, dict) and isinstance(op := edit.get("op"), str):
                        edit["op"] = _OPERATIONS_SINCE_VERSION_1.get(op, op)
    return report
