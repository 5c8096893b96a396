"""The sensitivity of rules to their thresholds: half and twice of each, on public traces.

python benchmarks/bench_thresholds.py [--rule ID ...]

For each threshold of the rules that read one trace: on how many traces of ``tests/corpus`` half and
twice the value change the rule's answer (fires or not). Writes the table of docs/thresholds.md.
With ``--rule`` only the rows of those rules are measured, other rows keep what they said.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from advisor.advise.rule_loading import load_rules
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.read import read_trace
from benchmarks.public_traces import CORPUS, REPO

PAGE = REPO / "docs" / "thresholds.md"
HEAD = """\
# How sensitive rules are to their thresholds

After this page you know how much the advice depends on each threshold. Each
threshold of the [rules](rules/README.md) names its source. For those that we chose,
`benchmarks/bench_thresholds.py` measures what the choice changes. It halves and doubles every
threshold of the rules that read one trace, on the traces of `tests/corpus`. It counts the traces on
which the rule changes its answer (fires instead of silent, or the reverse). A dash: no trace
changes. You set thresholds in `pyproject.toml`.

Rules that read the recorder's files, or several ranks, are not in the table: only their examples
and the recordings in `tests/data/recorded` check their thresholds.

| rule | threshold | value | half | double |
|---|---|---|---|---|
"""
FACTORS = (0.5, 2)


def thresholds(named: list[str] | None = None) -> list[tuple[str, str, float]]:
    """Rule, name and value of each number that the page lists; of all rules, or the named ones."""
    return [
        (rule.id, name, value)
        for rule in load_rules(config={})
        if not (rule.reads_record or rule.across_ranks) and (not named or rule.id in named)
        for name, value in rule.options().items()
        if not isinstance(value, str | bool)
    ]


def fires(rule: Rule, a: Analysis) -> bool:
    """Return whether it has a finding."""
    return any(isinstance(outcome, Finding) for outcome in rule.check(a))


def asked_for(rule: Rule, a: Analysis) -> tuple[bool, set[str]]:
    """Return whether the rule fires, and the options that it read: the others change nothing."""
    seen: set[str] = set()

    class WatchedRule(type(rule)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    rule.__class__ = WatchedRule
    try:
        return fires(rule, a), seen
    finally:
        rule.__class__ = WatchedRule.__base__


def changes(file: Path, named: list[str] | None) -> Counter[tuple[str, str, float]]:
    """Rule, threshold and factor of each change of an answer on one trace, once each."""
    try:
        a = Analysis(read_trace(str(file)))
    except AdvisorError:
        return Counter()  # no trace of one rank
    rules = {rule.id: rule for rule in load_rules(config={})}
    wanted = thresholds(named)
    before = {rule: asked_for(rules[rule], a) for rule in {rule for rule, _, _ in wanted}}
    result: Counter[tuple[str, str, float]] = Counter()
    for rule, name, value in wanted:
        fired, seen = before[rule]
        for factor in FACTORS if name in seen else ():
            setattr(rules[rule], name, type(value)(value * factor))
            result[rule, name, factor] += fires(rules[rule], a) != fired
            delattr(rules[rule], name)
    return result


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """Cells of the page's table, by rule and threshold."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if " | `" in line]
    return {
        (rule, name.strip("`")): [value, *cells_left] for rule, name, value, *cells_left in cells
    }


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", action="append", help="measure this rule only")
    named = parser.parse_args().rule
    files = sorted(CORPUS.rglob("*.json.gz"))
    result: Counter[tuple[str, str, float]] = Counter()
    with ProcessPoolExecutor() as pool:
        for one in pool.map(changes, files, [named] * len(files)):
            result.update(one)
    old = rows(PAGE.read_text(encoding="utf-8"))
    table = ""
    for rule, name, value in thresholds():
        results = [str(result[rule, name, factor] or "–") for factor in FACTORS]
        if named and rule not in named:
            results = old[rule, name][1:]
        table += f"| {' | '.join([rule, f'`{name}`', f'{value:g}', *results])} |\n"
    PAGE.write_text(HEAD + table, encoding="utf-8")


if __name__ == "__main__":
    main()
