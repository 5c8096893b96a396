"""Snapshots of other people's programs: sums by independent arithmetic, what is true of each."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import advisor
from advisor.measure.memory.allocator_replay import replay_allocator
from advisor.measure.memory.memory_savings import count_needed_bytes, find_savings
from advisor.measure.memory.post_mortem import PostMortem
from advisor.read.snapshot import read_snapshot

FOLDER = Path(__file__).parents[1] / "corpus" / "memory"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.pickle.gz"))
MIB = 1 << 20


def content(name: str) -> bytes:
    return gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes())


def measured(name: str) -> PostMortem:
    return PostMortem(read_snapshot([content(name)], name), 0)


def counted_back(snapshot: dict[str, Any]) -> tuple[int, int]:
    """(most bytes in tensors, bytes reserved then), from the state backwards, event by event."""
    states = ("active_allocated",)
    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] in states]
    held = sum(b.get("requested_size", b["size"]) for b in blocks)
    reserved = sum(s["total_size"] for s in snapshot["segments"])
    events = snapshot["device_traces"][0]
    asked = any(e["action"] == "free_requested" for e in events)
    most, then = held, reserved
    for event in reversed(events):
        if event["action"] == "alloc":
            held -= event["size"]
        elif event["action"] == ("free_requested" if asked else "free_completed"):
            held += event["size"]
        elif event["action"] == "segment_alloc":
            reserved -= event["size"]
        if held > most:
            most, then = held, reserved
    return most, then


@pytest.mark.parametrize("name", [n for n in NAMES if "synthetic" not in n])
def test_peaks_and_categories_are_the_sums_of_the_events(name: str) -> None:
    # our own file: read by Python, to have a second opinion
    most, then = counted_back(pickle.loads(content(name)))
    post = measured(name)
    assert (post.allocated, post.reserved) == (most, then)
    assert sum(post.by_category.values()) == sum(post.bases.values()) == most
    assert int(post.held["bytes"].sum()) == count_needed_bytes(post) == most


@pytest.mark.parametrize("name", [n for n in NAMES if "synthetic" not in n])
def test_the_replayed_allocator_reserves_what_was_recorded(name: str) -> None:
    h = measured(name).history
    replayed = replay_allocator(h, expandable=False).reserved
    assert np.abs(replayed - h.reserved).max() <= 0.02 * h.reserved.max()


def shares(name: str) -> dict[str, float]:
    post = measured(name)
    return {kind: size / post.allocated for kind, size in post.by_category.items()}


def test_what_each_program_held_is_found_with_and_without_modules_and_stacks() -> None:
    parameters = 24 * (4 * 1024 * 1024 + 3 * 1024 * 4096) + 2 * 10_000 * 1024 + 49 * 1024
    for name in ("transformer_training_ctx128", "transformer_training_ctx512"):
        held = measured(name).by_category
        assert held["weights"] == pytest.approx(4 * parameters, rel=0.01)
        assert held["optimizer state"] == pytest.approx(8 * parameters, rel=0.03)
        assert held.get("not attributed", 0) == 0
    assert measured("transformer_training_ctx128").by_category["gradients"] == pytest.approx(
        4 * parameters, rel=0.01
    )
    small = 12 * (4 * 768 * 768 + 3 * 768 * 3072) + 2 * 10_000 * 768 + 25 * 768
    for name in ("forward_fp32", "forward_bf16_autocast", "windows_training"):
        assert measured(name).by_category["weights"] == pytest.approx(4 * small, rel=0.01)
    # of those that take part in a product: not the embedding's
    copies = measured("forward_bf16_autocast").by_category["autocast copies"]
    assert copies == 2 * (small - 25 * 768 - 10_000 * 768)
    assert measured("windows_training").by_category["gradients"] == pytest.approx(
        4 * small, rel=0.01
    )
    assert shares("opt13b_weights")["weights"] > 0.99
    assert shares("stable_diffusion_no_history")["not attributed"] > 0.99


def test_a_remedy_frees_no_more_than_what_it_touches() -> None:
    freed = {name: {s.change: s.bytes for s in find_savings(measured(name))} for name in NAMES}
    for name in ("opt13b_weights", "stable_diffusion_no_history", "forward_fp32"):
        assert "half the batch" not in freed[name]
    for name, changes in freed.items():
        held = measured(name).by_category
        touched = held.get("activations", 0) + held.get("inputs", 0)
        touched += held.get("backward temporaries", 0) + held.get("earlier steps", 0)
        assert changes.get("half the batch", 0) <= touched / 2 + 1
    # caches after the step are no fragments: 13.0 of 13.2 GiB are in tensors at the peak
    assert "expandable segments" not in freed["windows_training"]
    assert "expandable segments" not in freed["stable_diffusion_no_history"]
    assert freed["synthetic_allocated_over_reserved"] == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_snapshot_has_no_finding(name: str) -> None:
    report = advisor.analyze(str(FOLDER / f"{name}.pickle.gz"))
    assert [finding.rule for finding in report.risks + report.findings] == []


def test_impossible_figures_are_said_to_be_so() -> None:
    report = advisor.analyze(str(FOLDER / "synthetic_allocated_over_reserved.pickle.gz"))
    assert "cannot both be true" in report.verdict


def test_a_history_of_one_event_is_said_to_be_one() -> None:
    report = advisor.analyze(str(FOLDER / "opt13b_weights.pickle.gz"))
    assert report.memory[0].at == "snapshot"
    assert any("1 event" in limit for limit in report.limits)


def test_layers_are_no_steps() -> None:
    """One forward pass of 24 layers, in each of which memory rises and falls."""
    assert measured("transformer_inference_ctx1024").step_source == ""


def test_ranks_that_are_measured_by_workers_have_their_memory_side_by_side(tmp_path: Path) -> None:
    from advisor.advise.options import Options

    names = ("forward_fp32", "forward_bf16_autocast")
    for number, name in enumerate(names):
        (tmp_path / f"rank{number}.pickle").write_bytes(content(name))
    here = advisor.analyze(tmp_path)
    apart = advisor.analyze(tmp_path, Options(workers=2))
    assert here.memory_ranks == apart.memory_ranks
    held = [each.allocated for each in apart.memory_ranks]
    assert held == [measured(name).allocated for name in names]
    assert here.ranks is None and apart.ranks is None  # a snapshot has no steps to compare


def test_weights_in_16_bit_halve_and_leave_autocast_nothing_to_copy() -> None:
    """The verdict names it as what frees most, to within what the peak moves."""
    held = measured("forward_bf16_autocast").by_category
    freed = held["weights"] / 2 + held["autocast copies"]
    report = advisor.analyze(str(FOLDER / "forward_bf16_autocast.pickle.gz"))
    (saving,) = report.memory[0].savings
    assert saving.change == "16-bit weights"
    assert 0.95 * freed <= saving.bytes <= freed
    assert "Largest saving: 16-bit weights, 471 MiB (63%)." in report.verdict
