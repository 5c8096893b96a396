"""Snapshots of other people's programs: sums by independent arithmetic, what is true of each."""

from __future__ import annotations

import gzip
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import advisor
from advisor.advise.memory import is_new
from advisor.core import text as t
from advisor.core.memory_changes import advise_change
from advisor.measure import Analysis
from advisor.measure.memory.allocator_replay import replay_allocator
from advisor.measure.memory.memory_kinds import CATEGORIES
from advisor.measure.memory.memory_savings import count_needed_bytes, find_changes, find_savings
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.read.formats.memory_snapshot.tables import read_snapshot
from advisor.render.formats import REPORTS
from advisor.rules.support.device_memory import run_product
from advisor.testing import TraceBuilder

FOLDER = Path(__file__).parents[1] / "corpus" / "memory"
NAMES = sorted(path.name.split(".")[0] for path in FOLDER.glob("*.pickle.gz"))
MIB = 1 << 20


COUNTED = {
    "h100_training": (68157440, 1457520640),
    "h100_leak": (303038464, 1616904192),
    "h100_full": (60920654336, 67821895680),
    "h100_fragments": (5208276992, 80899735552),
}
"""``torch.cuda.memory_stats()["requested_bytes.all.current"]`` and ``memory_reserved()`` as each
snapshot was written, by the same process."""


def content(name: str) -> bytes:
    return gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes())


def measured(name: str) -> PeakMemory:
    return PeakMemory(read_snapshot([content(name)], name), 0)


def peak_from_state(snapshot: dict[str, Any]) -> tuple[int, set[int]]:
    """(most bytes in tensors, bytes reserved at each moment with so many), from the state
    backwards, event by event."""
    states = ("active_allocated",)
    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] in states]
    allocated = sum(b.get("requested_size", b["size"]) for b in blocks)
    reserved = sum(s["total_size"] for s in snapshot["segments"])
    events = snapshot["device_traces"][0]
    has_requests = any(e["action"] == "free_requested" for e in events)
    most, then = allocated, {reserved}
    for event in reversed(events):
        if event["action"] == "alloc":
            allocated -= event["size"]
        elif event["action"] == ("free_requested" if has_requests else "free_completed"):
            allocated += event["size"]
        elif event["action"] == "segment_alloc":
            reserved -= event["size"]
        elif event["action"] == "segment_free":
            reserved += event["size"]
        if allocated >= most:
            then = {reserved} if allocated > most else then | {reserved}
            most = allocated
    return most, then


@pytest.mark.parametrize("name", [n for n in NAMES if "synthetic" not in n])
def test_peaks_and_categories_are_the_sums_of_the_events(name: str) -> None:
    # our own file: read by Python, to have a second opinion
    most, then = peak_from_state(pickle.loads(content(name)))
    peak = measured(name)
    if peak.request is None:
        assert peak.allocated == most and peak.reserved in then
    else:  # when it ran out, which was not at the peak
        assert (peak.allocated, peak.reserved) == COUNTED[name]
        assert int(peak.history.allocated.max()) == most
        most = peak.allocated
    assert sum(peak.by_category.values()) == sum(peak.bases.values()) == most
    assert int(peak.by_line["bytes"].sum()) == most
    assert count_needed_bytes(peak) == most + (peak.request or 0)


@pytest.mark.parametrize("name", [n for n in NAMES if "synthetic" not in n])
def test_replayed_allocator_reserves_the_recorded_bytes(name: str) -> None:
    h = measured(name).history
    replayed = replay_allocator(h, expandable=False).reserved
    # the file has a segment before the tensor that it is for, and none for a request that failed
    events = pickle.loads(content(name))["device_traces"][0]
    settled = [
        0,
        *(i for i, e in enumerate(events, 1) if e["action"] not in ("segment_alloc", "oom")),
    ]
    assert np.abs(replayed - h.reserved)[settled].max() <= 0.02 * h.reserved.max()


def shares(name: str) -> dict[str, float]:
    peak = measured(name)
    return {kind: size / peak.allocated for kind, size in peak.by_category.items()}


def test_memory_is_found_with_and_without_modules_and_stacks() -> None:
    parameters = 24 * (4 * 1024 * 1024 + 3 * 1024 * 4096) + 2 * 10_000 * 1024 + 49 * 1024
    for name in ("transformer_training_ctx128", "transformer_training_ctx512"):
        by_category = measured(name).by_category
        assert by_category["weights"] == pytest.approx(4 * parameters, rel=0.01)
        assert by_category["optimizer state"] == pytest.approx(8 * parameters, rel=0.03)
        assert by_category.get("not attributed", 0) == 0
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


def test_remedy_frees_at_most_its_own_tensors() -> None:
    freed = {name: {s.name: s.bytes for s in find_savings(measured(name))} for name in NAMES}
    for name in ("opt13b_weights", "stable_diffusion_no_history", "forward_fp32"):
        assert "half the batch" not in freed[name]
    for name, changes in freed.items():
        by_category = measured(name).by_category
        touched = by_category.get("activations", 0) + by_category.get("inputs", 0)
        touched += by_category.get("backward temporaries", 0) + by_category.get("earlier steps", 0)
        assert changes.get("half the batch", 0) <= touched / 2 + 1
    # caches after the step are no fragments: 13.0 of 13.2 GiB are in tensors at the peak
    assert "expandable segments" not in freed["windows_training"]
    assert "expandable segments" not in freed["stable_diffusion_no_history"]
    assert freed["synthetic_allocated_over_reserved"] == {}


RISKS = {
    "h100_leak": ["memory-leak"],
    "h100_full": ["out-of-memory"],
    "h100_fragments": ["memory-fragmentation"],
    # logits of 2,048 × 16,000 in fp32, their softmax and its gradient: 375 MiB of 1.17 GiB
    "h100_training": ["huge-vocabulary"],
}
"""Risks by construction (benchmarks/record_snapshots.py)."""


@pytest.mark.parametrize("name", COUNTED)
def test_memory_state_equals_allocator_counters(name: str) -> None:
    h = measured(name).history
    assert (h.allocated[-1], h.reserved[-1]) == COUNTED[name]


@pytest.mark.parametrize("name", RISKS)
def test_a_planted_fault_is_found_at_its_line(name: str) -> None:
    report = advisor.analyze(str(FOLDER / f"{name}.pickle.gz"))
    assert [finding.rule for finding in report.risks] == RISKS[name]
    if name in ("h100_training", "h100_fragments"):
        return
    place = report.risks[0].where[0]
    assert Path(place.file or "").name == "record_snapshots.py" and place.function == "train"
    if name == "h100_leak":  # 16 MiB are kept in each of 14 steps; the first two are no steps yet
        assert report.memory[0].growth[0].line == place.line == 37
        assert report.memory[0].growth[0].bytes == 16 * MIB
        first = str(report).split("  fix ")[1]
        assert "Release" in first.splitlines()[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RISKS])
def test_a_healthy_snapshot_has_no_finding(name: str) -> None:
    report = advisor.analyze(str(FOLDER / f"{name}.pickle.gz"))
    assert [finding.rule for finding in report.risks + report.findings] == []


def test_fragmented_free_memory_leads_with_its_setting() -> None:
    """Counted from the file: 70.49 of 75.34 GiB is inactive, in pieces of at most 96 MiB."""
    snapshot = pickle.loads(content("h100_fragments"))
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    report = advisor.analyze(str(FOLDER / "h100_fragments.pickle.gz"))
    (view,) = report.memory
    assert (view.end_free, view.end_largest) == (sum(free), max(free))
    assert report.verdict.startswith(
        "When the snapshot was taken, 70.5 GiB of the 75.3 GiB reserved was free, but in pieces of "
        "at most 96 MiB"
    )
    assert "expandable_segments:True" in (report.risks[0].code or "")
    text = str(report)
    assert "By line, at its peak" in text
    assert "4.85 GiB in tensors when the snapshot was taken" in text


def test_leak_leads_the_verdict_with_dated_figures() -> None:
    """16 MiB stay of each of 14 steps; at the peak the last one has yet to add its own."""
    report = advisor.analyze(str(FOLDER / "h100_leak.pickle.gz"))
    assert report.verdict.startswith("record_snapshots.py:37 leaves 16 MiB behind in 11 of the 11")
    assert "it held 208 MiB at the peak, and 224 MiB at the end" in report.verdict
    (line,) = [each for each in report.memory[0].held if each.line == 37]
    assert line.bytes == 208 * MIB
    assert "176 MiB" not in str(report)


def test_fused_attention_also_saves_16_bit_score_copies() -> None:
    """Autocast: 24 layers keep the softmax, 4 × 16 heads × 512² in fp32, and its copy in bf16."""
    report = advisor.analyze(str(FOLDER / "transformer_training_ctx512.pickle.gz"))
    saving = next(each for each in report.memory[0].savings if each.change == "fused attention")
    assert (saving.line, saving.cost) == (432, "none")
    assert saving.bytes == 24 * (64 + 32) * MIB


def test_autocast_without_cache_keeps_copies_for_backward() -> None:
    """Each of 169 copies of a training step lives into its backward pass. In a forward pass
    alone the end of autocast frees all 85 copies, 231 MiB at its peak."""
    trained, forward_only = (
        {each.name: each.bytes for each in find_savings(measured(name))}
        for name in ("transformer_training_ctx512", "forward_bf16_autocast")
    )
    assert "autocast without cache" not in trained
    assert 0.9 * 231 * MIB <= forward_only["autocast without cache"] < 231 * MIB


def test_bf16_autocast_halves_products_and_adds_weight_copies() -> None:
    """Six layers of 8 × 256 tokens. Of each, autocast has in 16 bits: the input of attention,
    queries with keys and values, two outputs of attention, 4 + 12 + 4 + 4 MiB, then what relu and
    dropout make of 2,048 channels, 2 × 16 MiB. 103 MiB of weights get copies of half that."""
    saved = {each.name: each for each in find_savings(measured("h100_training"))}
    freed = 6 * (4 + 12 + 4 + 4 + 2 * 16) * MIB / 2 - 103 * MIB / 2
    assert saved["BF16 autocast"].bytes == pytest.approx(freed, rel=0.01)
    assert "BF16 autocast" in {each.name for each in find_savings(measured("windows_training"))}
    for name in ("transformer_training_ctx512", "forward_fp32", "transformer_inference_ctx1024"):
        assert "BF16 autocast" not in {each.name for each in find_savings(measured(name))}


def test_bf16_autocast_estimate_matches_a_measured_recording() -> None:
    """The same model without autocast at 128 tokens, and with it at 512. Memory that grows with
    tokens shrinks to a fourth at 128 tokens, and what grows with their square to a sixteenth."""
    full, half = (measured(f"transformer_training_ctx{tokens}") for tokens in (128, 512))

    def at_most_activations(peak: PeakMemory) -> tuple[int, np.ndarray]:
        lives = peak.history.block_lifetimes
        is_activation = (peak.category_codes == CATEGORIES.index("activations")) & (
            lives.start_event >= 0
        )
        activation_bytes = np.zeros(peak.history.count + 2)
        np.add.at(activation_bytes, lives.start_event[is_activation] + 1, lives.size[is_activation])
        np.add.at(activation_bytes, lives.end_event[is_activation] + 1, -lives.size[is_activation])
        event = int(np.argmax(np.cumsum(activation_bytes))) - 1
        return event, np.flatnonzero(is_activation & lives.at(event))

    event, rows = at_most_activations(full)
    lives = half.history.block_lifetimes
    _, others = at_most_activations(half)
    line = np.array([origin.line or 0 for origin in half.history.origins])[lives.stack[others]]
    scores = np.isin(line, [6, 516]) | ((line == 434) & (lives.size[others] == 16 * MIB * 2))
    expected = (lives.size[others] / np.where(scores, 16, 4)).sum()
    (change,) = [each for each in find_changes(full) if each.name == "BF16 autocast"]
    is_live = np.isin(change.rows, rows) & (change.start <= event) & (change.end > event)
    lost = (full.history.block_lifetimes.size[change.rows] * (1 - change.kept_share))[is_live].sum()
    measured_loss = full.history.block_lifetimes.size[rows].sum() - expected
    assert lost == pytest.approx(measured_loss, rel=0.2)


def test_a_trace_with_products_in_16_bits_rules_out_autocast() -> None:
    b, single = TraceBuilder(), TraceBuilder()
    run_product(b)
    with single.op("aten::mm", [[4096, 4096], [4096, 4096]], "float"):
        single.launch("ampere_sgemm_128x64_tn", 900)
    assert not is_new("BF16 autocast", Analysis(b.trace()))
    assert is_new("BF16 autocast", Analysis(single.trace()))
    assert is_new("half the batch", Analysis(b.trace()))


def test_a_change_that_the_verdict_names_has_code() -> None:
    page = str(advisor.analyze(str(FOLDER / "transformer_training_ctx512.pickle.gz")))
    assert "usually faster is 'checkpointing'" in " ".join(page.split())
    assert "x = checkpoint(block, x, use_reentrant=False)" in page


def test_inference_gets_no_advice_of_training() -> None:
    """Nothing of 52.8 GiB of activations is left at the end, and there is no backward pass. At the
    peak attention holds four blocks of 256 MiB: 4 × 16 heads × 1,024² scores in fp32."""
    peak = measured("transformer_inference_ctx1024")
    assert peak.trains is False
    report = advisor.analyze(str(FOLDER / "transformer_inference_ctx1024.pickle.gz"))
    changes = [each.change for each in report.memory[0].savings]
    assert changes[0] == "fused attention"
    assert "half the batch" in changes
    assert report.memory[0].savings[0].bytes <= 4 * 256 * MIB
    text = REPORTS.render("markdown", report).lower()
    for word in ("accumulat", "gradient", "optimizer", "backward"):
        assert word not in text, word


@pytest.mark.parametrize("name", NAMES)
def test_changes_of_training_are_for_programs_that_train(name: str) -> None:
    peak = measured(name)
    if peak.trains is False:
        names = {change.name for change in find_changes(peak)}
        of_training = {"checkpointing", "offload activations", "set_to_none", "8-bit optimizer"}
        assert not names & of_training
        for change in names:
            text = " ".join(advise_change(change, False)).lower()
            assert "accumulat" not in text and "optimizer" not in text
    trains = {"h100_training": True, "h100_leak": True, "h100_full": True, "forward_fp32": False,
              "windows_training": True, "stable_diffusion_no_history": None}  # fmt: skip
    assert peak.trains is trains.get(name, peak.trains)


def test_impossible_figures_are_reported() -> None:
    report = advisor.analyze(str(FOLDER / "synthetic_allocated_over_reserved.pickle.gz"))
    assert "cannot both be true" in report.verdict


def test_history_of_one_event_is_reported() -> None:
    report = advisor.analyze(str(FOLDER / "opt13b_weights.pickle.gz"))
    assert report.memory[0].at == "snapshot"
    assert any("1 event" in limit for limit in report.limits)


def test_layers_are_not_steps() -> None:
    """The recording is one forward pass of 24 layers, in each of which memory rises and falls."""
    assert measured("transformer_inference_ctx1024").step_source == ""


def test_ranks_measured_by_workers_show_their_memory(tmp_path: Path) -> None:
    from advisor.advise.options import Options

    names = ("forward_fp32", "forward_bf16_autocast")
    for number, name in enumerate(names):
        (tmp_path / f"rank{number}.pickle").write_bytes(content(name))
    in_memory_report = advisor.analyze(tmp_path)
    worker_report = advisor.analyze(tmp_path, Options(workers=2))
    assert in_memory_report.memory_ranks == worker_report.memory_ranks
    allocated = [each.allocated for each in worker_report.memory_ranks]
    assert allocated == [measured(name).allocated for name in names]
    assert (
        in_memory_report.ranks is None and worker_report.ranks is None
    )  # a snapshot has no steps to compare


def test_16_bit_weights_halve_and_need_no_autocast_copies() -> None:
    """The verdict names it as what frees most, to within what the peak moves."""
    by_category = measured("forward_bf16_autocast").by_category
    freed = by_category["weights"] / 2 + by_category["autocast copies"]
    report = advisor.analyze(str(FOLDER / "forward_bf16_autocast.pickle.gz"))
    saving, _ = report.memory[0].savings
    assert saving.change == "16-bit weights"
    assert 0.95 * freed <= saving.bytes <= freed
    assert (
        "If memory is short, first '16-bit weights': 471 MiB (63%); check that accuracy holds."
        in report.verdict
    )


@pytest.mark.parametrize("name", ["transformer_training_ctx512", "windows_training"])
def test_the_remedy_that_costs_no_time_is_named_first(name: str) -> None:
    """Offloaded activations free most, and cross the bus twice in each step: checkpointing, which
    frees nearly as much, is named beside them."""
    report = advisor.analyze(str(FOLDER / f"{name}.pickle.gz"))
    savings = report.memory[0].savings
    assert (savings[0].change, savings[0].cost) == ("fused attention", "none")
    assert max(savings, key=lambda each: each.bytes).change == "offload activations"
    assert "If memory is short, first 'fused attention': 2.25 GiB" in report.verdict
    assert "Most is freed by 'offload activations': " in report.verdict
    assert "; usually faster is 'checkpointing': " in report.verdict
    assert savings == sorted(savings, key=lambda each: CHEAPEST.index(each.cost))


CHEAPEST = [
    "none", "lower precision", "more casts", "2× the launches", "2nd forward pass",
    "copies both ways", "update on host",
]  # fmt: skip


def test_16_bit_weights_are_advised_before_expandable_segments() -> None:
    report = advisor.analyze(str(FOLDER / "forward_fp32.pickle.gz"))
    changes = [each.change for each in report.memory[0].savings]
    assert changes == ["16-bit weights", "expandable segments"]


def test_request_fitting_into_driver_memory_is_reported() -> None:
    """15.6 GiB fail beside 12.3 free and 6.4 in pieces: 18.7 GiB once the pieces lie together. The
    softmax of these logits then needs as much again."""
    report = advisor.analyze(str(FOLDER / "h100_full.pickle.gz"))
    (risk,) = report.risks
    assert measured("h100_full").needed_after == pytest.approx(1024 * 256 * 16_000 * 4)
    segments = next(s for s in risk.fix.split(". ") if "Let segments grow" in s)
    assert "this frees 6.39 GiB; with the 12.3 GiB that the driver had, this request" in segments
    assert segments.endswith("12.6 GiB are missing")
    pieces = next(s for s in risk.fix.split(". ") if "Compute the loss" in s)
    assert pieces.endswith("it fits")
    # 1024 x 256 positions x 16,000 classes x 4 bytes are asked for; an eighth of it is left
    assert report.memory[0].request == 1024 * 256 * 16_000 * 4
    logits = next(each for each in report.memory[0].savings if each.change == "smaller logits")
    assert logits.bytes == pytest.approx(1024 * 256 * 16_000 * 4 * 7 / 8, rel=0.01)
    # the program doubles its batch in each step, from 8 x 256 x 512 x 4 bytes
    assert "record_snapshots.py:30 made 4 MiB, then 512 MiB" in report.verdict


def test_inputs_of_one_size_do_not_grow() -> None:
    assert measured("h100_training").larger_inputs is None


def test_table_omits_rows_without_a_line() -> None:
    """A timeline has categories and no lines: the line above the table has the same figures."""
    path = FOLDER.parent / "memory_timeline.raw.gz"
    page = REPORTS.render("terminal", advisor.analyze(str(path)), details=True)
    assert "line not recorded" not in page and "First: half the batch" not in page


@pytest.mark.parametrize("name", ["h100_leak", "h100_training", "windows_training"])
def test_names_of_changes_are_whole(name: str) -> None:
    page = REPORTS.render("terminal", advisor.analyze(str(FOLDER / f"{name}.pickle.gz")))
    assert "…ller" not in page and "…rlier" not in page
    assert re.search(
        r"smaller logits \(loss in parts\) +\d|earlier steps' outputs +\d|fused attention +\d", page
    )


def test_saving_below_the_freed_peak_bytes_is_explained() -> None:
    """Seven eighths of 375 MiB are 328: once they are gone, the optimizer's moment is the peak."""
    savings = {each.name: each for each in find_savings(measured("h100_training"))}
    assert "this frees 328 MiB at that moment, and another" in savings["smaller logits"].assumes
    assert "at that moment" not in savings["8-bit optimizer"].assumes


def test_failed_request_reports_its_missing_bytes() -> None:
    """The driver had 12.3 GiB for a request of 15.6 GiB."""
    report = advisor.analyze(str(FOLDER / "h100_full.pickle.gz"))
    lacking = t.format_bytes((report.memory[0].request or 0) - (report.memory[0].driver_free or 0))
    assert lacking == "3.36 GiB"
    assert f"{lacking} more than the driver had" in report.risks[0].summary
    assert f"{lacking} too little" in report.memory[0].placement


def test_tensors_of_unknown_kind_are_not_a_category() -> None:
    page = REPORTS.render("terminal", advisor.analyze(str(FOLDER / "h100_fragments.pickle.gz")))
    assert "by       nothing in the snapshot shows" in page
    assert not re.search(r"by +not attributed .*100%", page)
