"""The SARIF renderer: findings as static-analysis results, for code scanning and editors.

SARIF 2.1.0 (OASIS standard, 27 March 2020). Times and confidences are in property bags.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from advisor.model import Finding, Location
from advisor.report import facts
from advisor.report import text as t
from advisor.report.data import Report
from advisor.report.json import harmless
from advisor.report.places import code_place, relative

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
HOME = "https://pypi.org/project/gpu-advisor/"
LEVELS = {"critical": "error", "warning": "warning", "info": "note"}
MOST_PLACES = 10


def render(report: Report) -> str:
    """The report as one SARIF run: a result for every finding, risk and note."""
    found = [*report.findings, *report.risks, *report.notes]
    rules = {finding.rule: finding for finding in reversed(found)}
    order = sorted(rules)
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "advisor",
                        "version": report.version or "0",
                        "informationUri": HOME,
                        "rules": [_rule(rules[name]) for name in order],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {
                    "SRCROOT": {"description": {"text": "The root of the profiled program."}}
                },
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [
                            {"level": "note", "message": {"text": text}}
                            for text in _notifications(report)
                        ],
                    }
                ],
                "results": [
                    _result(finding, order.index(finding.rule), report) for finding in found
                ],
                "properties": {
                    "status": report.status,
                    "verdict": _plain(report.verdict),
                    "step_ns": report.scope.step_ns,
                },
            }
        ],
    }
    return harmless(json.dumps(log, indent=2, ensure_ascii=False).encode("utf-8") + b"\n")


def _notifications(report: Report) -> Iterable[str]:
    """What is true of the run as a whole, and what could not be checked."""
    yield _plain(report.verdict)
    for what, why in facts.abstentions(report):
        yield _plain(f"Not checked: {what}: {why}")
    for limit in report.limits:
        yield _plain(limit)


def _rule(finding: Finding) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": t.clean(finding.rule) or "unknown",
        "shortDescription": {"text": _plain(finding.title) or "unknown"},
        "properties": {"category": finding.category, "tags": ["performance", finding.category]},
    }
    links = [item for item in finding.references if item.startswith("https://")]
    if links:
        rule["helpUri"] = quote(links[0], safe=":/?#[]@!$&'()*+,;=%~")
    return rule


def _result(finding: Finding, index: int, report: Report) -> dict[str, Any]:
    unit = t.loop_unit(report.scope.step_source)
    text = f"{finding.summary} {t.gain(finding, step=unit).capitalize()}. Fix: {finding.fix}"
    folded = finding.folded_under is not None
    result: dict[str, Any] = {
        "ruleId": t.clean(finding.rule) or "unknown",
        "ruleIndex": index,
        "level": "note" if folded or finding.informational else LEVELS[finding.severity],
        "message": {"text": _plain(f"{finding.title}: {text}")},
        "partialFingerprints": {"advisor/v1": _fingerprint(finding)},
        "properties": _properties(finding),
    }
    if finding.rank is not None:
        result["rank"] = round(max(0.0, min(100.0, _share(finding) * 100)), 3)
    places = [_location(place) for place in finding.where[:MOST_PLACES]]
    places = [place for place in places if place]
    if places:
        result["locations"] = places
    return result


def _share(finding: Finding) -> float:
    return (finding.worth.share or 0.0) if finding.worth is not None else 0.0


def _properties(finding: Finding) -> dict[str, Any]:
    worth = finding.worth
    found = {
        "category": finding.category,
        "confidence": finding.confidence,
        "order": finding.rank,
        "foldedUnder": finding.folded_under,
    }
    if worth is not None:
        found |= {
            "currency": worth.currency,
            "gainNs": worth.gain_ns,
            "lowNs": worth.low_ns,
            "highNs": worth.high_ns,
            "freedBytes": worth.freed_bytes,
            "method": worth.method,
        }
    return {name: value for name, value in found.items() if value is not None}


def _location(place: Location) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if place.file:
        path, inside = relative(place.file)
        uri = quote(path, safe="/") if inside else f"file:///{quote(path.lstrip('/'), safe='/')}"
        artifact = {"uri": uri, "uriBaseId": "SRCROOT"} if inside else {"uri": uri}
        found["physicalLocation"] = {"artifactLocation": artifact}
        if place.line is not None and place.line > 0:
            found["physicalLocation"]["region"] = {"startLine": place.line}
    logical = [
        {"fullyQualifiedName": t.shorten(t.clean(name), 1000), "kind": kind}
        for name, kind in (
            (place.function, "function"),
            (place.op, "member"),
            (place.kernel, "function"),
        )
        if name
    ]
    if logical:
        found["logicalLocations"] = logical
    return found


def _fingerprint(finding: Finding) -> str:
    """The same for a finding that only moved by some lines."""
    place = code_place(finding)
    where = [finding.rule]
    if place is not None and place.file is not None:
        where += [relative(place.file)[0], place.function or ""]
    elif finding.where:
        where += [finding.where[0].op or finding.where[0].kernel or ""]
    return hashlib.sha256("\0".join(map(t.clean, where)).encode("utf-8", "replace")).hexdigest()[
        :32
    ]


def _plain(text: object) -> str:
    """Plain text: SARIF reads brackets in messages as links and braces as placeholders."""
    safe = t.shorten(t.clean(text), 4000)
    return safe.replace("[", "\\[").replace("]", "\\]").replace("{", "{{").replace("}", "}}")
