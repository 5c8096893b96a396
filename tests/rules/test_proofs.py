"""Rules find something where they say they did, and are silent where they say they are."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from advisor.advise.engine import Options, analyze
from advisor.advise.rule_loading import load_rules
from advisor.advise.rule_runner import run_rules
from advisor.advise.window_choice import choose_windows
from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.measure import Analysis
from advisor.read import open_run
from advisor.sample_workloads import catalogue
from tests.conftest import public_file
from tests.corpus_analyses import analyze_cached
from tests.rules.rank_rules import estimated_findings

RULES = {rule.id: rule for rule in load_rules(config={})}
RECORDED = Path(__file__).parents[1] / "data" / "recorded"
CORPUS = Path(__file__).parents[1] / "corpus"
PUBLIC = tomllib.loads((CORPUS / "public_traces.toml").read_text())
PROOFS = {name for rule in RULES.values() for name in (*rule.found_in, *rule.silent_in)}
UNJUDGED = {
    # the products are FP32, and few: the device waits for launches, so a replay gains nothing
    ("fp32-matmul", "linear_2080ti_launch_bound"),
    # the rate is right by hand; but the library ran 64 tiles of 256 x 128, and the text says 128
    # of 128 x 128
    ("slow-gemm", "pairs/particle_batch64"),
    # 6% of kernel time at 35% of a rate that lies between those measured on other GPUs
    ("slow-gemm", "pairs/particle_batch128"),
    # the waves are right, by registers; whether the tail costs as long as they say is not in the
    # trace, for attention at an eighth of its rate and for attention without an operator
    ("wave-quantisation", "pairs/sam_2_fp32_few_syncs"),
    ("wave-quantisation", "pairs/sam_3_bf16_compiled_sdpa"),
}
"""Rule and trace: findings of which nobody can say that they are right as a whole, and why."""


@cache
def fired_rules(*paths: str) -> frozenset[str]:
    """Rules with a finding on a trace, or on the traces of several ranks together."""
    if len(paths) == 1:
        result = analyze_cached(paths[0])
        analyses, records = (
            result.analyses,
            {n for n, a in result.analyses.items() if a.rank_record},
        )
    else:
        run = open_run(paths)
        analyses = {n: Analysis(trace) for (n, _), trace in run.traces.items()}
        records = set()
    rules = [
        rule
        for rule in RULES.values()
        if records or not rule.reads_record or SNAPSHOT in rule.auxiliary_inputs
    ]
    results = {
        finding.rule
        for number, a in analyses.items()
        for finding in run_rules(number, a, rules, estimate_gains=False).findings
    }
    if len(analyses) > 1:
        results |= {finding.rule for finding in estimated_findings(analyses, rules).findings}
    return frozenset(results)


@cache
def fired_rules_on_recording(name: str) -> frozenset[str]:
    """Rules with a finding on the first rank of a recording, or on all its ranks together; on its
    record alone, where it has no window."""
    run = open_run(str(RECORDED / name))
    a = choose_windows(run, None, None)[0]
    fired = {finding.rule for finding in run_rules(0, a, list(RULES.values())).findings}
    if len(run.traces) > 1:
        together = analyze(RECORDED / name, Options(config={})).findings
        fired |= {each.rule for each in together if RULES[each.rule].across_ranks}
    return frozenset(fired)


def paths(shared_trace: Callable[[str], str], name: str) -> tuple[str, ...]:
    if name == "two_ranks":
        return shared_trace("two_ranks_rank0"), shared_trace("two_ranks_rank1")
    if name == "dlrm_8ranks":
        return (str(Path(shared_trace("dlrm_8ranks/worker0.pt.trace")).parent),)
    if name.startswith("ncu/"):
        end = "csv.gz" if name.endswith("rtx5090") else "ncu-rep.gz"
        return (public_file(f"{name}.{end}"),)
    if name.startswith("memory/"):
        return (public_file(f"{name}.pickle.gz"),)
    if name.startswith("h100/"):
        return (str(CORPUS / name),)
    return (shared_trace(name),)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_rules_meet_their_proofs_on_public_traces(
    shared_trace: Callable[[str], str], name: str
) -> None:
    result = fired_rules(*paths(shared_trace, name))
    trace_id = f"traces/{name}"
    assert {rule.id for rule in RULES.values() if trace_id in rule.found_in} - result == set()
    assert {rule.id for rule in RULES.values() if trace_id in rule.silent_in} & result == set()
    # each of the two ranks is looked at by itself; our own programs have one fault that is known
    if name != "two_ranks" and not name.startswith("h100/"):
        declared = {rule.id for rule in RULES.values() if trace_id in rule.found_in}
        unsaid = {(rule, name) for rule in result - declared}
        assert unsaid <= UNJUDGED, "judge it: found_in of the rule, or UNJUDGED here"


@pytest.mark.parametrize("name", sorted(p.name for p in RECORDED.iterdir()))
def test_rules_meet_their_proofs_on_recordings(name: str) -> None:
    fired, trace_id = fired_rules_on_recording(name), f"recorded/{name}"
    assert {rule.id for rule in RULES.values() if trace_id in rule.found_in} - fired == set()
    assert {rule.id for rule in RULES.values() if trace_id in rule.silent_in} & fired == set()


def test_workloads_named_by_rules_are_tested() -> None:
    """``tests/sample_workloads`` records those that a CPU can show, slow and cured."""
    for rule in RULES.values():
        for proof in (*rule.found_in, *rule.silent_in):
            if proof.startswith("workloads/"):
                workload = catalogue()[proof.removeprefix("workloads/")]
                assert workload.shown_on == "cpu" and rule.id in workload.finds, proof


def test_every_proof_names_an_existing_source() -> None:
    kinds = {
        "traces": set(PUBLIC),
        "recorded": {p.name for p in RECORDED.iterdir()},
        "workloads": set(catalogue()),
    }
    for proof in PROOFS:
        kind, _, name = proof.partition("/")
        assert name in kinds[kind], proof


def test_rule_validation_follows_from_its_proofs() -> None:
    for rule in RULES.values():
        public = any(name.startswith("traces/") for name in rule.found_in)
        expected = "real traces" if public else "recordings" if rule.found_in else "synthetic"
        assert rule.validation == expected, rule.id
