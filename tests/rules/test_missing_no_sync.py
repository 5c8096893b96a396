"""missing-no-sync on a real training: as it was recorded, and with every second optimizer gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from advisor.core.finding import Finding, SkippedCheck
from advisor.core.trace import Trace
from advisor.measure import Analysis
from advisor.read import read_trace
from advisor.rules.distributed.missing_no_sync import MissingNoSync

GRADIENTS = 181_240_752 + 1_068_160 + 17_728_292
"""Bytes of the three messages of each backward pass, as the file's shapes give them."""


def without_every_second_optimizer(trace: Trace) -> Trace:
    """The same work, with two passes for each optimizer step: as a loop that accumulates."""
    name = pl.col("name").cast(pl.String)
    is_step = name.str.starts_with("Optimizer.step#")
    first = is_step & (is_step.cum_sum() % 2 == 1)
    other = pl.when(first).then(pl.lit("something else")).otherwise(name)
    return replace(trace, cpu=trace.cpu.with_columns(name=other.cast(pl.Categorical)))


@pytest.mark.parametrize(
    "name", ["a100_train_6steps", "v100_train_copy_heavy", "nccl_collectives", "two_ranks_rank0"]
)
def test_silent_where_each_pass_has_its_optimizer_step(
    shared_trace: Callable[[str], Path], name: str
) -> None:
    a = Analysis(read_trace(shared_trace(name)))
    assert list(MissingNoSync().check(a)) == []


def test_two_passes_of_a_real_training_send_the_gradients_twice(
    shared_trace: Callable[[str], Path],
) -> None:
    trace = without_every_second_optimizer(read_trace(shared_trace("a100_train_6steps")))
    a = Analysis(trace)
    (finding,) = MissingNoSync().check(a)
    assert isinstance(finding, Finding)
    facts = {e.label: e.value for e in finding.evidence}
    assert facts["passes per optimizer step"] == 2
    assert facts["gradients of one pass"] == GRADIENTS
    assert facts["gradients reduced per optimizer step"] == 2 * GRADIENTS
    # six passes in the window, the first, third and fifth are needless: three messages each
    assert len(finding.edits[0].select.correlation) == 9


def test_the_rule_abstains_without_sizes() -> None:
    b = MissingNoSync.examples()["sizes are not recorded"][0]
    (outcome,) = MissingNoSync().check(b.analysis())
    assert isinstance(outcome, SkippedCheck)
