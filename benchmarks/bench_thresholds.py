"""What halving and doubling each threshold changes on public traces: how much hangs on it.

python benchmarks/bench_thresholds.py ../shared/traces > docs/thresholds.md

For each rule that reads a trace, and each of its thresholds: on how many traces the rule has
another opinion (fires or not) with half and with twice the value. The traces are not part of the
repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

from advisor.advise.select import load_rules
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding, Rule
from advisor.measure import Analysis
from advisor.read import read_trace

HEAD = """\
# How much hangs on a threshold

Each threshold of the [rules](rules/README.md) says where it comes from. For those that are our
choice nobody else has a figure. So `benchmarks/bench_thresholds.py` halves and doubles every
threshold of the rules that read one trace, on {count} public traces, and counts on how many of them
the rule then has another opinion (fires and did not, or the other way round). A dash: the same
opinion on all of them. `pyproject.toml` changes a threshold.

Rules that read what the recorder wrote, or several ranks, are not in the table: their examples and
the recordings in `tests/data/recorded` are all that holds their thresholds.

| rule | threshold | value | half | double |
|---|---|---|---|---|"""


def fires(rule: Rule, a: Analysis) -> bool:
    """Whether it has a finding."""
    return any(isinstance(outcome, Finding) for outcome in rule.check(a))


def main(folder: Path) -> None:
    """Print the table."""
    analyses = []
    for file in sorted(folder.rglob("*.json.gz")):
        try:
            analyses.append(Analysis(read_trace(str(file))))
        except AdvisorError:
            continue  # no trace of one rank
    print(HEAD.format(count=len(analyses)))
    for rule in load_rules(config={}):
        if rule.reads_record or rule.across_ranks:
            continue
        before = [fires(rule, a) for a in analyses]
        for name, value in rule.options().items():
            if isinstance(value, str | bool):
                continue
            changed = []
            for factor in (0.5, 2):
                setattr(rule, name, type(value)(value * factor))
                after = [fires(rule, a) for a in analyses]
                delattr(rule, name)
                changed.append(sum(x != y for x, y in zip(before, after, strict=True)))
            told = " | ".join(str(n) if n else "–" for n in changed)
            print(f"| {rule.id} | `{name}` | {value:g} | {told} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
