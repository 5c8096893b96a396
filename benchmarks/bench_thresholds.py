"""How sensitive rules are to their thresholds: half and twice of each, on public traces.

python benchmarks/bench_thresholds.py [FOLDER] > docs/thresholds.md

For each threshold of the rules that read one trace: on how many traces half and twice the value
change the rule's answer (fires or not). Without FOLDER: the traces in tests/corpus.
"""

from __future__ import annotations

import sys
from pathlib import Path

from public_traces import CORPUS

from advisor.advise.select import load_rules
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.rule import Rule
from advisor.measure import Analysis
from advisor.read import read_trace

HEAD = """\
# How sensitive rules are to their thresholds

After this page you know how much the advice depends on each threshold. Each
threshold of the [rules](rules/README.md) names its source. For those that we chose,
`benchmarks/bench_thresholds.py` measures what the choice changes. It halves and doubles every
threshold of the rules that read one trace, on {count} public traces. It counts the traces on which
the rule changes its answer (fires instead of silent, or the reverse). A dash: no trace changes.
You set thresholds in `pyproject.toml`.

Rules that read the recorder's files, or several ranks, are not in the table: only their examples
and the recordings in `tests/data/recorded` check their thresholds.

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
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CORPUS)
