"""SARIF 2.1.0: what the standard and GitHub's code scanning demand of a log.

tests/data/sarif holds the published schema, and where it is from.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from jsonschema import Draft202012Validator

import advisor
from advisor.core.finding import Finding, Location
from advisor.core.report import Report
from advisor.core.trace import Run
from advisor.render.formats import REPORTS
from advisor.rules.transfer.pageable_copies import PageableCopies

Make = Callable[..., Report]
MakeFinding = Callable[..., Finding]


SCHEMA = Path(__file__).parents[1] / "data" / "sarif" / "sarif-2.1.0.json"


@functools.cache
def schema() -> Draft202012Validator:
    """The published schema, ready to validate."""
    read = json.loads(SCHEMA.read_bytes())
    Draft202012Validator.check_schema(read)
    return Draft202012Validator(read)


def log(report: Report) -> dict[str, Any]:
    """The only run of the log, after what holds for every log has been checked."""
    document = json.loads(REPORTS.render("sarif", report))
    assert [error.message for error in schema().iter_errors(document)] == []
    assert document["$schema"].startswith("https://")
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))  # 3.19.23: unique
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]  # 3.27.6
        for location in result["locations"]:
            artifact = location["physicalLocation"]["artifactLocation"]
            assert re.fullmatch(
                r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", artifact["uri"]
            )  # RFC 3986
            if "uriBaseId" in artifact:
                assert not artifact["uri"].startswith("/")  # 3.4.3: relative to the base
                assert artifact["uriBaseId"] in run["originalUriBaseIds"]
    github(run)
    return dict(run)


def github(run: dict[str, Any]) -> None:
    """Assert what code scanning requires ("SARIF support for code scanning", docs.github.com)."""
    for rule in run["tool"]["driver"]["rules"]:
        for needed in ("shortDescription", "fullDescription", "help"):
            assert len(rule[needed]["text"]) > 0
        assert len(rule["shortDescription"]["text"]) <= 1024
        assert len(rule["properties"]["tags"]) <= 10
    prints = [
        (r["ruleId"], r["partialFingerprints"]["primaryLocationLineHash"]) for r in run["results"]
    ]
    assert len(prints) == len(set(prints))  # equal ones are one alert
    for result in run["results"]:
        assert result["message"]["text"]
        assert 1 <= len(result["locations"]) <= 1000
        for location in result["locations"]:  # "expected a physical location" refuses the file
            physical = location["physicalLocation"]
            assert physical["artifactLocation"]["uri"]
            assert physical["region"]["startLine"] >= 1


@pytest.mark.parametrize(
    "name",
    [
        "a100_train_6steps",
        "b200_eager",
        "h100_bert_small_inference",
        "mi250_train",
        "no_gpu_rank",
        "v100_train_copy_heavy",
    ],
)
def test_reports_on_real_traces_are_valid(
    name: str, shared_trace: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shared_trace(name))
    monkeypatch.chdir(path.parent)
    run = log(advisor.analyze(path.name))
    assert run["invocations"][0]["executionSuccessful"] is True


def test_a_log_that_is_not_sarif_is_not_valid() -> None:
    wrong = {"version": "2.1.0", "runs": [{"tool": {"driver": {}}, "results": [{"level": "bad"}]}]}
    assert len(list(schema().iter_errors(wrong))) >= 3  # no name, no message, no such level


def test_a_finding_without_a_line_of_code_lies_at_the_trace(
    report: Make, finding: MakeFinding
) -> None:
    where = [Location(kernel="k"), Location(file="train.py", line=9)]
    result = report(
        findings=[finding(1, where=where), finding(2, where=[]), finding(3, where=where[:1])]
    )
    first, second, third = log(result)["results"]
    at = [p["physicalLocation"]["artifactLocation"]["uri"] for p in first["locations"]]
    assert at == ["train.py", "file:///data/traces/rank0.json.gz"]
    assert second["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}
    assert third["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "k"


def test_two_findings_at_one_place_are_two_alerts(report: Make, finding: MakeFinding) -> None:
    run = log(report(findings=[finding(1), finding(1)]))
    first, second = (r["partialFingerprints"]["primaryLocationLineHash"] for r in run["results"])
    assert first.endswith(":1")
    assert second == f"{first[:-2]}:2"


def test_sarif_rule_matches_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is there for a report that was saved and read elsewhere too: the rules are not
    looked for there."""
    examples = PageableCopies.examples().values()
    example = next(each for each in examples if not isinstance(each, tuple))
    saved = advisor.analyze(Run(traces={(0, 0): example.trace()})).to_json()

    def raise_if_called(*_: object) -> None:
        raise AssertionError("a renderer loads rules")

    monkeypatch.setattr("advisor.advise.rule_loading.load_rules", raise_if_called)
    run = log(Report.from_json(saved))
    rules_by_id = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert set(rules_by_id) == {result["ruleId"] for result in run["results"]}
    rule = rules_by_id["pageable-copies"]
    assert rule["shortDescription"]["text"] == PageableCopies.title
    assert "pinned" in rule["fullDescription"]["text"]


def test_undescribed_rule_takes_the_text_of_its_finding(report: Make, finding: MakeFinding) -> None:
    (rule,) = log(report(findings=[finding(1, rule="of-somebody")]))["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] == finding(1).title


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
    assert "40 ms per step (20–40 ms)" in first["message"]["text"]


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
    assert second["region"] == {"startLine": 1}  # which GitHub demands


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


def test_brackets_and_braces_are_not_links_and_placeholders(
    report: Make, finding: MakeFinding
) -> None:
    run = log(report(findings=[finding(title="k<{lambda#1}> [x](0)", summary="s", fix="f")]))
    text = run["results"][0]["message"]["text"]
    assert "{{lambda#1}}" in text
    assert "\\[x\\](0)" in text


def test_skipped_checks_are_notifications(report: Make) -> None:
    run = log(report(0))
    notes = [n["message"]["text"] for n in run["invocations"][0]["toolExecutionNotifications"]]
    assert any("shapes were not recorded" in note for note in notes)
    assert run["results"] == []


def test_hostile_names_leave_a_sound_log(report: Make, hostile_name: str) -> None:
    log(report(2, hostile_name))
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]",
        REPORTS.render("sarif", report(2, hostile_name)),
    )
