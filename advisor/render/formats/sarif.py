"""The SARIF renderer: findings as static-analysis results, for code scanning and editors.

SARIF 2.1.0 (OASIS standard, 27 March 2020). Times and confidences are in property bags. GitHub's
code scanning rejects a file if one result has no location, and only shows a result's first
location. So lines of code come first, and results without one point to the trace."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import msgspec

from advisor.advise import finding_text, report_text
from advisor.core import labels
from advisor.core.finding import Finding, Location
from advisor.core.report import Report, RuleText
from advisor.render.documents import memory
from advisor.render.formats.github import code_place, make_relative_path
from advisor.render.renderer import DEFAULT, Renderer, RenderOptions

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
LEVELS = {"critical": "error", "warning": "warning", "info": "note"}
_MAX_PLACES = 10
MAX_RESULTS = 5000
"""Maximum number of results. GitHub keeps the first 5,000 of a run."""


class Sarif(Renderer[Report]):
    """Renderer of a report as one SARIF run."""

    suffixes = (".sarif",)

    def render(self, subject: Report, options: RenderOptions = DEFAULT) -> str:
        """Write a result for every finding, risk and note."""
        log = json.dumps(_build_log(subject), indent=2, ensure_ascii=False)
        return labels.escape_terminal_controls(log.encode("utf-8") + b"\n")


def _build_log(report: Report) -> dict[str, Any]:
    findings = [*report.findings, *report.risks, *report.notes][:MAX_RESULTS]
    rules = {finding.rule: finding for finding in reversed(findings)}
    order = sorted(rules)
    known = {rule.id: rule for rule in report.rules}
    marks = _number_fingerprints(findings)
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "advisor",
                        "version": report.version or "0",
                        "rules": [_describe_rule(rules[name], known.get(name)) for name in order],
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
                            for text in _list_notifications(report)
                        ],
                    }
                ],
                "results": [
                    _build_result(finding, order.index(finding.rule), mark, report)
                    for finding, mark in zip(findings, marks, strict=True)
                ],
                "properties": {
                    "status": report.status,
                    "verdict": _escape(report.verdict),
                    "step_ns": report.step_ns,
                },
            }
        ],
    }


def _list_notifications(report: Report) -> Iterable[str]:
    """Yield sentences on the whole run, and skipped checks."""
    yield _escape(report.verdict)
    for device in memory.describe_devices(report):
        for sentence in memory.sentences(device):
            yield _escape(f"{device.title} {device.aside}: {sentence}")
    for what, why in report_text.describe_skipped_checks(report):
        yield _escape(f"Not checked: {what}: {why}")
    for limit in report.limits:
        yield _escape(limit)


def _describe_rule(finding: Finding, known_rule: RuleText | None) -> dict[str, Any]:
    """Describe a rule by its own texts, or by its finding's if the report lacks them."""
    title = known_rule.title if known_rule is not None else finding.title
    paragraphs = known_rule.paragraphs if known_rule is not None else []
    about = " ".join(paragraphs) or title
    links = [item for item in finding.references if item.startswith("https://")]
    uris = [quote(link, safe=":/?#[]@!$&'()*+,;=%~") for link in links]
    rule: dict[str, Any] = {
        "id": labels.clean(finding.rule) or "unknown",
        "shortDescription": {"text": _escape(title) or "unknown"},
        "fullDescription": {"text": _escape(about) or "unknown"},
        "help": {"text": _escape("\n\n".join([about, *uris]), lines=True) or "unknown"},
        "properties": {"category": finding.category, "tags": ["performance", finding.category]},
    }
    if uris:
        rule["helpUri"] = uris[0]
    return rule


def _build_result(finding: Finding, index: int, mark: str, report: Report) -> dict[str, Any]:
    gain = finding_text.describe_gain(finding, alone=True).capitalize()
    text = f"{finding.summary} {gain}. Fix: {finding.fix}"
    folded = finding.folded_under is not None
    result: dict[str, Any] = {
        "ruleId": labels.clean(finding.rule) or "unknown",
        "ruleIndex": index,
        "level": "note" if folded or finding.informational else LEVELS[finding.severity],
        "message": {"text": _escape(f"{finding.title}: {text}")},
        # GitHub's code scanning only reads the second one
        "partialFingerprints": {
            "advisor/v1": mark.partition(":")[0],
            "primaryLocationLineHash": mark,
        },
        "properties": _list_properties(finding),
        "locations": _list_locations(finding, report),
    }
    if finding.priority is not None:
        result["rank"] = round(max(0.0, min(100.0, finding.share_of_step * 100)), 3)
    return result


def _list_locations(finding: Finding, report: Report) -> list[dict[str, Any]]:
    """Return a finding's places, lines of code first. Others point to the trace's first line."""
    read = report.inputs[0].path if report.inputs else "-"
    trace = read if read != "-" else "trace"
    places = sorted(finding.where, key=lambda place: not place.file)[:_MAX_PLACES] or [Location()]
    return [
        _build_location(place if place.file else msgspec.structs.replace(place, file=trace, line=1))
        for place in places
    ]


def _list_properties(finding: Finding) -> dict[str, Any]:
    impact = finding.impact
    properties = {
        "category": finding.category,
        "confidence": finding.confidence,
        "order": finding.priority,
        "foldedUnder": finding.folded_under,
    }
    if impact is not None:
        properties |= {
            "currency": impact.currency, "gainNs": impact.gain_ns, "lowNs": impact.low_ns,
            "highNs": impact.high_ns, "freedBytes": impact.freed_bytes, "method": impact.method,
        }  # fmt: skip
    return {name: value for name, value in properties.items() if value is not None}


def _build_location(place: Location) -> dict[str, Any]:
    path, inside = make_relative_path(place.file or "")
    uri = quote(path, safe="/") if inside else f"file:///{quote(path.lstrip('/'), safe='/')}"
    artifact = {"uri": uri, "uriBaseId": "SRCROOT"} if inside else {"uri": uri}
    line = place.line if place.line is not None and place.line > 0 else 1
    result: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}
    }
    logical = [
        {"fullyQualifiedName": labels.shorten(labels.clean(name), 1000), "kind": kind}
        for name, kind in (
            (place.function, "function"),
            (place.op, "member"),
            (place.kernel, "function"),
        )
        if name
    ]
    if logical:  # the schema requires unique names, but an operator may have the name of its kernel
        result["logicalLocations"] = [x for i, x in enumerate(logical) if x not in logical[:i]]
    return result


def _number_fingerprints(findings: Iterable[Finding]) -> list[str]:
    """Return a fingerprint per finding, with a number for equal ones: ``3f…:1``."""
    seen: Counter[str] = Counter()
    marks = []
    for finding in findings:
        mark = _compute_fingerprint(finding)
        seen[mark] += 1
        marks.append(f"{mark}:{seen[mark]}")
    return marks


def _compute_fingerprint(finding: Finding) -> str:
    """Return a fingerprint that stays the same if a finding only moves by some lines."""
    place = code_place(finding)
    where = [finding.rule]
    if place is not None and place.file is not None:
        where += [make_relative_path(place.file)[0], place.function or ""]
    elif finding.where:
        where += [finding.where[0].op or finding.where[0].kernel or ""]
    return hashlib.sha256(
        "\0".join(map(labels.clean, where)).encode("utf-8", "replace")
    ).hexdigest()[:32]


def _escape(text: object, *, lines: bool = False) -> str:
    """Escape text: SARIF reads brackets in messages as links and braces as placeholders."""
    safe = labels.shorten(labels.clean(text, lines=lines), 4000)
    return safe.replace("[", "\\[").replace("]", "\\]").replace("{", "{{").replace("}", "}}")
