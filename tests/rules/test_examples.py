"""Every rule's own examples: one generic test runs them all."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

import msgspec
import pytest

from advisor.advise.impact import MIN_GAIN_SHARE
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import RULE_FAILED, run_rules
from advisor.core.finding import Finding, Impact
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.testing import TraceBuilder
from tests.rules.guards import fires_without_threshold, guard_of
from tests.rules.rank_rules import comparison_of, estimated_findings

RULES = load_rules(config={})
IDS = [rule.id for rule in RULES]


Read = Analysis | dict[int, Analysis]
"""An example as a rule looks at it: a rule across ranks has a list of builders, one a rank."""


def read(example: TraceBuilder | list[TraceBuilder]) -> Read:
    if isinstance(example, TraceBuilder):
        return example.analysis()
    return {number: b.analysis() for number, b in enumerate(example)}


def findings_of_rule(rule: Rule, example: Read) -> list[Finding]:
    """The findings of this rule on an example, including those without a gain to show."""
    assert rule.across_ranks == isinstance(example, dict)
    if isinstance(example, dict):
        result = estimated_findings(example, [rule])
    else:
        result = run_rules(-1, example, [rule], estimate_gains=False)
        if result.findings:
            result = run_rules(-1, example, [rule])
    assert not [n.why for n in result.skipped if n.why.startswith(RULE_FAILED)]
    return result.findings


def has_gain_to_show(impact: Impact | None) -> bool:
    assert impact is not None
    return impact.currency != "step_time" or (impact.share or 0) >= MIN_GAIN_SHARE


EXAMPLES = {rule: rule.examples() for rule in RULES}


def examples(*, traps: bool) -> list[object]:
    return [
        pytest.param(rule, example, id=f"{rule.id}: {name}")
        for rule, rule_examples in EXAMPLES.items()
        for name, example in rule_examples.items()
        if isinstance(example, tuple) == traps
    ]


@pytest.mark.parametrize(("rule", "example"), examples(traps=False))
def test_rule_fires_on_its_example_with_an_actionable_finding(
    rule: Rule, example: TraceBuilder
) -> None:
    result = findings_of_rule(rule, read(example))
    assert any(has_gain_to_show(finding.impact) for finding in result)
    for finding in result:
        assert finding.summary and finding.fix and finding.verify and finding.evidence
        assert finding.edits or finding.impact is not None
        msgspec.json.encode(finding)  # plain numbers, no scalars of numpy
        assert 0 < finding.confidence <= 1
        for line in finding.code.split("\n"):  # the terminal report would fold it
            body = line.rpartition("  # ")[0].rstrip() or line
            assert len(body) <= 74, line


@pytest.mark.parametrize(("rule", "example"), examples(traps=True))
def test_a_rule_is_silent_on_its_traps_for_the_reason_it_names(
    rule: Rule, example: tuple[TraceBuilder | list[TraceBuilder], str]
) -> None:
    """A threshold that is named must be what holds the rule: without it, it fires. Else the text
    names the condition that ended the search; what else might hold it silent comes later."""
    trap, guard = example
    seen = read(trap)
    assert [f.title for f in findings_of_rule(rule, seen) if has_gain_to_show(f.impact)] == []
    subject: Any = comparison_of(seen) if isinstance(seen, dict) else seen
    if guard in rule.options():
        assert fires_without_threshold(rule, guard, subject), f"fires with no {guard} either"
    else:
        assert guard and guard in guard_of(rule, subject)


def test_wrong_guard_of_a_trap_is_detected() -> None:
    """A swap: the trap for the disks with the guard for the cores, and the other way round."""
    (rule,) = [rule for rule in RULES if rule.id == "cpu-bound-transforms"]
    traps = rule.examples()
    disk = traps["the disk delivers 2 GB/s"][0].analysis()
    workers = traps["no workers"][0].analysis()
    assert fires_without_threshold(rule, "max_disk", disk) and not fires_without_threshold(
        rule, "min_cpu", disk
    )
    assert guard_of(rule, workers) == "not workers_of(loader)"
    assert guard_of(rule, disk) == "(disk_rate or 0.0) >= self.max_disk"


def names_in(code: CodeType) -> set[str]:
    """Names and texts that a function's code uses, nested functions included."""
    used = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    for each in code.co_consts:
        used |= names_in(each) if isinstance(each, CodeType) else set()
    return used


def used_names(cls: type[Rule]) -> set[str]:
    """Names that a rule's methods use: not those of a method that the rule overrides."""
    used: set[str] = set()
    for name in {*dir(cls)} - {"examples"}:
        for base in cls.__mro__[: cls.__mro__.index(Rule)]:
            method = vars(base).get(name)
            method = getattr(method, "__func__", getattr(method, "fget", method))
            if isinstance(method, FunctionType):
                used |= (method_names := names_in(method.__code__))
                if "super" not in method_names:
                    break
    return used


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_every_option_of_a_rule_is_read(rule: Rule) -> None:
    """A setting that no method of the rule reads has no effect."""
    assert set(rule.options()) <= used_names(type(rule))


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_a_rule_is_complete(rule: Rule) -> None:
    assert rule.id == rule.id.lower().replace(" ", "-")
    assert rule.title and rule.__doc__ and rule.category
    assert len(rule.__doc__) > 80
    assert {type(example) is tuple for example in EXAMPLES[rule].values()} == {True, False}
    assert rule.validation == "synthetic" or rule.validation_note
