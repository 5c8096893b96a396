"""Conditions that every recording must satisfy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from advisor.core.run_directory import RankRecord, read_recording


def only_rank(run: Path) -> RankRecord:
    """The record of a run with one rank, undamaged."""
    recording = read_recording(run)
    assert recording.problems == []
    assert list(recording.ranks) == [0]
    return recording.ranks[0]


def check_sums(record: RankRecord) -> None:
    """Steps are numbered, do not overlap, and their phases add up to them."""
    assert [step.n for step in record.steps] == list(range(len(record.steps)))
    for step in record.steps:
        assert sum(step.phases.values()) == step.dur
        assert all(ns >= 0 for ns in step.phases.values())
    for before, after in pairwise(record.steps):
        assert before.t + before.dur <= after.t
