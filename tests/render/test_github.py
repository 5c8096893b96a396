"""Workflow commands: one a line, whatever a name holds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from advisor.core.finding import Finding, Location
from advisor.core.report import Report
from advisor.render.formats import REPORTS, github

Make = Callable[..., Report]
MakeFinding = Callable[..., Finding]
COMMAND = re.compile(
    r"::(error|warning|notice) ((?:[a-z]+=[^,:\r\n]*)(?:,[a-z]+=[^,:\r\n]*)*)::(.*)"
)


def parse_commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Level, properties and message of every line, unescaped as the runner does it."""
    result = []
    for line in text.splitlines():
        match = COMMAND.fullmatch(line)
        assert match is not None, line
        properties = dict(part.split("=", 1) for part in match[2].split(","))
        for name, value in properties.items():
            for code, char in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n")):
                value = value.replace(code, char)
            properties[name] = value.replace("%25", "%")
        message = match[3].replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")
        result.append((match[1], properties, message))
    return result


def test_a_finding_is_an_annotation_of_its_line(report: Make) -> None:
    result = report(1)
    place = Location(file="src/train.py", line=42)
    result.findings[0] = replace(result.findings[0], where=[place])
    verdict, first = parse_commands(REPORTS.render("github", result))
    assert verdict[0] == "notice"
    assert verdict[2] == result.verdict
    level, properties, message = first
    assert level == "warning"
    assert properties["file"] == "src/train.py"
    assert properties["line"] == "42"
    assert "40 ms per step (20–40 ms)" in properties["title"]
    assert message.startswith(result.findings[0].summary)
    assert "\nFix: " in message


@pytest.mark.parametrize(
    ("severity", "level"), [("critical", "error"), ("warning", "warning"), ("info", "notice")]
)
def test_levels_follow_the_severity(
    report: Make, finding: MakeFinding, severity: str, level: str
) -> None:
    assert (
        parse_commands(REPORTS.render("github", report(findings=[finding(severity=severity)])))[1][
            0
        ]
        == level
    )


def test_escapes_match_the_github_runner() -> None:
    assert github.escape_data("50%\r\n::error::x") == "50%25%0D%0A::error::x"
    assert github.escape_property("a:b,c 5%") == "a%3Ab%2Cc 5%25"


def test_a_file_outside_the_repository_is_reported_in_the_message(
    report: Make, finding: MakeFinding
) -> None:
    where = [Location(file="/srv/elsewhere/train.py", line=3)]
    _, properties, message = parse_commands(
        REPORTS.render("github", report(findings=[finding(where=where)]))
    )[1]
    assert "file" not in properties
    assert "/srv/elsewhere/train.py:3" in message


def test_symptoms_are_not_annotated_twice(report: Make, finding: MakeFinding) -> None:
    result = report(findings=[finding(1), finding(2, folded_under="rule-1")])
    assert len(parse_commands(REPORTS.render("github", result))) == 2


def test_hostile_names_start_no_command(report: Make, hostile_name: str) -> None:
    text = REPORTS.render("github", report(2, hostile_name))
    assert len(parse_commands(text)) == 3
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_a_name_that_is_a_command_is_text(report: Make) -> None:
    text = REPORTS.render("github", report(1, "x\n::error file=a::boo\r::set-output name=x::y"))
    assert [level for level, _, _ in parse_commands(text)] == ["notice", "warning"]
