"""SARIF 2.1.0: what the standard demands of a log, checked by its structure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from advisor.model import Finding, Location
from advisor.report import Report, sarif

Make = Callable[..., Report]
MakeFinding = Callable[..., Finding]


def log(report: Report) -> dict[str, Any]:
    """The only run of the log, after what holds for every log has been checked."""
    text = sarif.render(report)
    whole = json.loads(text)
    assert whole["version"] == "2.1.0"
    assert whole["$schema"].startswith("https://")
    (run,) = whole["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))  # 3.19.23: unique
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]  # 3.27.6
        assert result["level"] in ("none", "note", "warning", "error")  # 3.27.10
        assert result["message"]["text"]
        assert 0 <= result.get("rank", 0) <= 100  # 3.27.25
        for location in result.get("locations", []):
            physical = location.get("physicalLocation")
            if physical is not None:
                uri = physical["artifactLocation"]["uri"]
                assert re.fullmatch(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", uri)  # RFC 3986
                if "uriBaseId" in physical["artifactLocation"]:
                    assert not uri.startswith("/")  # 3.4.3: relative to the base
                    assert physical["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
                assert physical.get("region", {"startLine": 1})["startLine"] >= 1  # 3.30.5
            assert physical is not None or location["logicalLocations"]
    return dict(run)


def test_every_finding_is_a_result_at_its_line(
    report: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    run = log(report(3))
    assert [result["ruleId"] for result in run["results"]] == ["rule-1", "rule-2", "rule-3"]
    first = run["results"][0]
    assert first["level"] == "warning"
    assert first["properties"]["gainNs"] == 40_000_000
    assert first["properties"]["confidence"] == 0.8
    assert first["rank"] == 10.0  # 40 of 400 ms
    (place,) = first["locations"]
    assert place["physicalLocation"]["region"]["startLine"] == 42
    assert place["physicalLocation"]["artifactLocation"] == {
        "uri": "home/me/project/train.py",
        "uriBaseId": "SRCROOT",
    }
    assert "40.0 ms a step" in first["message"]["text"]


def test_a_file_below_the_working_folder_is_relative_to_it(
    report: Make, finding: MakeFinding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = [Location(file=str(tmp_path / "src" / "my train.py"), line=7)]
    run = log(report(findings=[finding(where=where)]))
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/my%20train.py", "uriBaseId": "SRCROOT"}


def test_a_file_elsewhere_is_absolute(report: Make, finding: MakeFinding, tmp_path: Path) -> None:
    where = [Location(file="/srv/x/träin.py", line=7), Location(file="../up.py", line=None)]
    run = log(report(findings=[finding(where=where)]))
    first, second = (p["physicalLocation"] for p in run["results"][0]["locations"])
    assert unquote(first["artifactLocation"]["uri"]) == "file:///srv/x/träin.py"
    assert "region" not in second


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"severity": "critical"}, "error"),
        ({"severity": "info"}, "note"),
        ({"severity": "critical", "folded_under": "other"}, "note"),
        ({"severity": "critical", "informational": True}, "note"),
    ],
)
def test_levels_follow_the_severity(
    report: Make, finding: MakeFinding, changes: dict[str, Any], level: str
) -> None:
    run = log(report(findings=[finding(**changes)]))
    assert run["results"][0]["level"] == level


def test_a_finding_that_moved_by_a_line_is_the_same(report: Make, finding: MakeFinding) -> None:
    def fingerprint(line: int, function: str) -> str:
        where = [Location(file="a.py", line=line, function=function)]
        run = log(report(findings=[finding(where=where)]))
        return str(run["results"][0]["partialFingerprints"]["advisor/v1"])

    assert fingerprint(3, "f") == fingerprint(9, "f")
    assert fingerprint(3, "f") != fingerprint(3, "g")


def test_brackets_and_braces_are_no_links_and_placeholders(
    report: Make, finding: MakeFinding
) -> None:
    run = log(report(findings=[finding(title="k<{lambda#1}> [x](0)", summary="s", fix="f")]))
    text = run["results"][0]["message"]["text"]
    assert "{{lambda#1}}" in text
    assert "\\[x\\](0)" in text


def test_what_was_not_checked_is_a_notification(report: Make) -> None:
    run = log(report(0))
    notes = [n["message"]["text"] for n in run["invocations"][0]["toolExecutionNotifications"]]
    assert any("shapes were not recorded" in note for note in notes)
    assert run["results"] == []


def test_hostile_names_leave_a_sound_log(report: Make, hostile: str) -> None:
    log(report(2, hostile))
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", sarif.render(report(2, hostile))
    )
