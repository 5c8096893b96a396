"""Peak memory: by hand, by a twin that counts, and on a simulated allocator."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from msgspec.structs import astuple
from polars.testing import assert_frame_equal

import advisor
from advisor.core.snapshot import SnapshotFrame
from advisor.measure import Analysis
from advisor.measure.memory.allocator_replay import (
    explain_placement,
    measure_fragments,
    measure_repacking,
)
from advisor.measure.memory.memory_origin import find_origin, held_by_module
from advisor.measure.memory.memory_savings import find_savings
from advisor.measure.memory.peak_memory import PeakMemory, peak_memories
from advisor.read.formats.memory_snapshot.tables import read_snapshot
from advisor.testing.allocator import (
    CALLED,
    GIB,
    LOOP,
    MIB,
    MODEL,
    TORCH,
    TRAIN,
    DeviceFull,
    FakeAllocator,
    Training,
    merged,
)


def measured(m: FakeAllocator, device: int = 0) -> PeakMemory:
    return PeakMemory(read_snapshot([m.pickled()], "x"), device)


def savings_by_name(peak: PeakMemory) -> dict[str, int]:
    return {each.name: each.bytes for each in find_savings(peak)}


# -- categories ---------------------------------------------------------------------------------


def test_categories_hold_the_planted_tensors() -> None:
    m = FakeAllocator()
    t = Training(m, layers=4, weights=24 * MIB, activation=12 * MIB, logits=64 * MIB)
    t.step()
    outputs = t.forward()  # the second forward pass: nothing is freed before it ends
    with m.at(*LOOP, (TRAIN, 48, "main"), (f"{TORCH}nn/functional.py", 1, "softmax")):
        m.alloc(3 * GIB)  # the peak
    peak = measured(m)
    assert peak.by_category == {
        "activations": 3 * GIB + 4 * (12 + 12 + 3) * MIB + 2 * 64 * MIB + 4,
        "optimizer state": 2 * 4 * 24 * MIB,
        "weights": 4 * 24 * MIB,
    }
    assert sum(peak.by_category.values()) == peak.allocated == int(peak.by_line["bytes"].sum())
    assert len(outputs) == 4 * 3 + 3


def test_gradients_are_made_by_backward_and_read_by_optimizer() -> None:
    m = FakeAllocator()
    t = Training(m, late_zero=True)
    for _ in range(3):
        t.step()
    with m.at(*LOOP, (TRAIN, 60, "main")):
        m.alloc(4 * GIB)
    assert measured(m).by_category["gradients"] == 4 * 24 * MIB


FRAMES: dict[str, tuple[str, list[tuple[str, int, str]]]] = {
    # innermost first
    "a linear layer": ("forward", [(f"{TORCH}nn/modules/linear.py", 125, "forward"),
                                   *CALLED[::-1], (TRAIN, 3, "main")]),
    "a reset of weights": ("parameter", [(f"{TORCH}nn/init.py", 5, "_no_grad_uniform_"),
                                         (f"{TORCH}nn/modules/linear.py", 9, "reset_parameters"),
                                         (TRAIN, 3, "main")]),
    "a parameter in the user's own __init__": ("parameter", [(MODEL, 9, "__init__"),
                                                             (TRAIN, 3, "main")]),
    "Adam's state": ("optimizer", [(f"{TORCH}optim/adam.py", 5, "_init_group"),
                                   (f"{TORCH}optim/adam.py", 9, "step"), (TRAIN, 3, "main")]),
    "somebody's optimizer": ("optimizer", [("/home/ada/project/my_optim.py", 5, "step"),
                                           (TRAIN, 3, "main")]),
    "a closure of an optimizer": ("forward", [(f"{TORCH}nn/modules/linear.py", 125, "forward"),
                                              *CALLED[::-1], (TRAIN, 30, "closure"),
                                              (f"{TORCH}optim/lbfgs.py", 320, "step")]),
    "a recomputed layer": ("recomputed", [(f"{TORCH}nn/modules/linear.py", 125, "forward"),
                                          *CALLED[::-1],
                                          (f"{TORCH}utils/checkpoint.py", 1500, "recompute_fn"),
                                          (f"{TORCH}utils/checkpoint.py", 1130, "unpack_hook")]),
    "autograd, by C++ frames": ("backward", [("??", 0, "at::empty_cuda"),
                                             ("??", 0, "MmBackward0::apply"),
                                             ("??", 0, "torch::autograd::Engine::thread_main")]),
    "accumulation": ("gradient", [("??", 0, "torch::autograd::AccumulateGrad::apply")]),
    "a cuBLAS workspace": ("workspace", [("??", 0, "at::cuda::getCUDABlasLtWorkspace"),
                                         *CALLED[::-1]]),
    "an all-gather of FSDP": ("communication", [
        (f"{TORCH}distributed/fsdp/_fully_shard/_fsdp_collectives.py", 5, "foreach_all_gather"),
        *CALLED[::-1], (TRAIN, 3, "main")]),
    "a layer inside FSDP": ("forward", [
        (f"{TORCH}nn/modules/linear.py", 125, "forward"), *CALLED[::-1],
        (f"{TORCH}distributed/fsdp/fully_sharded_data_parallel.py", 5, "forward"),
        *CALLED[::-1], (TRAIN, 3, "main")]),
    "a trainer's batch": ("input", [
        ("/opt/venv/lib/python3.12/site-packages/accelerate/utils/operations.py", 5,
         "send_to_device"), (TRAIN, 3, "main")]),
    "the user's own line": ("own", [(TRAIN, 3, "main")]),
    "nothing": ("nothing", []),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_stack_gives_the_category_of_an_allocation(name: str) -> None:
    role, frames = FRAMES[name]
    assert find_origin(tuple(SnapshotFrame(*frame) for frame in frames)).role == role


def test_allocation_line_is_the_innermost_user_line() -> None:
    _, frames = FRAMES["a trainer's batch"]
    origin = find_origin(tuple(SnapshotFrame(*frame) for frame in frames))
    assert (origin.file, origin.line, origin.function) == (TRAIN, 3, "main")


# -- a brute-force twin -------------------------------------------------------------------------


def replayed(snapshot: dict[str, Any]) -> tuple[int, int]:
    """(most bytes at once, bytes at the end), event by event, backwards from the state."""
    allocated = sum(
        b["requested_size"]
        for s in snapshot["segments"]
        for b in s["blocks"]
        if b["state"] == "active_allocated"
    )
    end, most = allocated, allocated
    for event in reversed(snapshot["device_traces"][0]):
        if event["action"] == "alloc":
            allocated -= event["size"]
        elif event["action"] == "free_requested":
            allocated += event["size"]
        most = max(most, allocated)
    return most, end


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("entries", [None, 150])
def test_memory_of_any_program_equals_a_backward_count(seed: int, entries: int | None) -> None:
    """Random programs, on two streams, with blocks that wait; with the whole history and with a
    ring that has lost its start."""
    chance = random.Random(seed)
    m = FakeAllocator(total=2 * GIB, max_entries=entries)
    totals: list[int] = []
    waiting: list[int] = []
    with m.at(*LOOP):
        for n in range(400):
            if waiting and chance.random() < 0.3:
                m.complete(waiting.pop())
            if totals and chance.random() < 0.45:
                address = totals.pop(chance.randrange(len(totals)))
                later = chance.random() < 0.1
                m.free(address, pending=later)
                if later:
                    waiting.append(address)
                continue
            with m.at((TRAIN, n % 7, "f")):
                size = chance.choice([7, 700, 70_000, 3 * MIB, 17 * MIB])
                try:
                    totals.append(m.alloc(size + chance.randrange(512), stream=chance.randrange(2)))
                except DeviceFull:
                    break
    peak = measured(m)
    most, end = replayed(m.snapshot())
    assert int(peak.history.allocated.max()) == most
    assert int(peak.history.allocated[-1]) == end
    assert int(peak.history.reserved[-1]) == sum(s.total for s in m.segments)
    assert sum(peak.by_category.values()) == peak.allocated
    timeline = peak.timeline(5000)
    summed = timeline.select(pl.sum_horizontal(pl.exclude("event", "time_us", "reserved")))
    assert summed.to_series().to_list() == peak.history.allocated.tolist()
    assert (peak.history.reserved >= peak.history.allocated).all() or entries is not None


def test_truncated_ring_is_reported_and_keeps_allocation_lines() -> None:
    complete, part = FakeAllocator(), FakeAllocator(max_entries=60)
    for m in (complete, part):
        t = Training(m)
        for _ in range(5):
            t.step()
    full, late = measured(complete), measured(part)
    assert not full.history.began_before and late.history.began_before
    assert late.allocated == int(full.history.allocated[-len(late.history.allocated) :].max())
    for name in ("weights", "optimizer state"):  # held to the end: the state has their stacks
        assert late.by_category[name] == full.by_category[name]


def test_a_snapshot_without_history_is_its_state() -> None:
    m = FakeAllocator(history=False)
    Training(m).step()
    peak = measured(m)
    assert peak.history.count == 0 and peak.event == -1
    assert peak.by_category == {"not attributed": 4 * 24 * MIB + 8 * 24 * MIB}
    assert peak.churn_bytes is None and peak.growth.is_empty()


def test_devices_do_not_mix() -> None:
    one, other = FakeAllocator(), FakeAllocator(device=1)
    Training(one).step()
    with other.at(*LOOP):
        other.alloc(5 * MIB)
    both = read_snapshot([pickle.dumps(merged([one, other]))], "x")
    first, second = peak_memories(both)
    assert (first.device, second.device) == (0, 1)
    assert_frame_equal(first.by_line, measured(one).by_line)
    assert second.allocated == 5 * MIB


# -- steps --------------------------------------------------------------------------------------


def test_leak_is_a_line_with_equal_growth_in_each_step() -> None:
    m = FakeAllocator()
    t = Training(m, leak=5 * MIB)
    for _ in range(12):
        t.step()
    peak = measured(m)
    row = peak.growth.row(0, named=True)
    assert peak.growth.height == 1
    assert (row["file"], row["line"], row["step_bytes"]) == (TRAIN, 49, 5 * MIB)
    assert savings_by_name(peak)["references"] == 11 * 5 * MIB  # the last step needs its own


def test_emptied_queue_is_not_a_leak() -> None:
    m, kept = FakeAllocator(), []
    t = Training(m)
    for _ in range(16):
        t.step()
        with m.at(*LOOP, (TRAIN, 70, "main")):
            kept.append(m.alloc(8 * MIB))
        if len(kept) > 3:
            m.free(kept.pop(0))
    assert measured(m).growth.is_empty()


@pytest.mark.parametrize("source", ["annotations", "optimizer", "backward passes"])
def test_churn_is_the_allocation_of_a_step(source: str) -> None:
    m = FakeAllocator()
    t = Training(m)
    if source == "backward passes":
        t.update = lambda: None  # type: ignore[method-assign]
    for n in range(7):
        if source == "annotations":
            m.annotate(f"ProfilerStep#{n}", "START")
        t.step()
    peak = measured(m)
    assert peak.step_source == source
    forward = 4 * 27 * MIB + 2 * 64 * MIB + 4
    backward = 4 + 4 * (12 + 24) * MIB
    update = 0 if source == "backward passes" else 2 * 24 * MIB
    assert peak.churn_bytes == 2 * MIB + forward + backward + update


# -- what could not be placed -------------------------------------------------------------------


def fragmented_memory(pieces: int, hole: int, total: int) -> FakeAllocator:
    """Segments of a hole, 4 MiB in use, and a hole; then a request that no hole holds."""
    m = FakeAllocator(total=total)
    with m.at(*LOOP):
        blocks = []
        for address in [m.alloc(2 * hole + 4 * MIB) for _ in range(pieces)]:
            m.free(address)
            blocks.append([m.alloc(size) for size in (hole, 4 * MIB, hole)])
        for left, _, right in blocks:
            m.free(left)
            m.free(right)
        with pytest.raises(DeviceFull), m.at((TRAIN, 77, "main")):
            m.alloc(hole * 2)
    return m


def test_request_failed_by_fragmentation_is_reported() -> None:
    m = fragmented_memory(8, 30 * MIB, 8 * 64 * MIB)
    peak = measured(m)
    fragments, placed, packed = (
        measure_fragments(peak),
        explain_placement(peak),
        measure_repacking(peak),
    )
    assert fragments is not None and placed is not None and peak.failed_at is not None
    assert (placed.request, placed.usable, placed.largest) == (60 * MIB, 480 * MIB, 30 * MIB)
    assert placed.scattered and placed.driver == 0
    assert peak.failed_at.line == 77
    assert fragments.split == 480 * MIB and fragments.free_segments == 0
    # holes of neighbours lie side by side in one segment: 60 MiB is one of them
    assert packed is not None and packed.helps
    assert savings_by_name(peak)["expandable segments"] == packed.freed


def test_holes_below_a_page_are_not_won_by_expandable_segments() -> None:
    """Neighbours' holes are 16 MiB, less than a page of 20 and than the request of 17."""
    m = FakeAllocator(total=8 * 20 * MIB)
    with m.at(*LOOP):
        kept = [m.alloc(size * MIB) for _ in range(8) for size in (8, 4, 8)]
        for address in [a for n, a in enumerate(kept) if n % 3 != 1]:
            m.free(address)
        with pytest.raises(DeviceFull):
            m.alloc(17 * MIB)
    peak = measured(m)
    placed, packed = explain_placement(peak), measure_repacking(peak)
    assert placed is not None and placed.scattered
    assert packed is not None and not packed.helps
    assert "expandable segments" not in savings_by_name(peak)


def test_free_memory_of_another_stream_or_pool_is_elsewhere() -> None:
    m = FakeAllocator(total=200 * MIB)
    with m.at(*LOOP):
        kept = [m.alloc(60 * MIB, stream=7), m.alloc(60 * MIB, pool=(0, 1))]
        tails = [m.alloc(2 * MIB, stream=7), m.alloc(2 * MIB, pool=(0, 1))]
        for address in kept:
            m.free(address)
        # 2 MiB of each are in other segments, which stay
        with pytest.raises(DeviceFull):
            m.alloc(190 * MIB)
    placed = explain_placement(measured(m))
    assert placed is not None and tails
    assert placed.usable == 0 and placed.free_elsewhere > 0 and not placed.scattered


def test_snapshot_after_releases_gives_no_placement() -> None:
    m = FakeAllocator(total=GIB)
    with m.at(*LOOP):
        first = m.alloc(900 * MIB)
        with pytest.raises(DeviceFull):
            m.alloc(400 * MIB)
        m.free(first)
    peak = measured(m)
    assert peak.allocated == 900 * MIB and peak.request == 400 * MIB
    assert explain_placement(peak) is None


# -- what a fix frees ---------------------------------------------------------------------------


def at_the_end_of_forward(**how: Any) -> tuple[FakeAllocator, Training]:
    m = FakeAllocator()
    t = Training(m, **how)
    for _ in range(3):
        t.step()
    t.forward()
    with m.at(*LOOP, *CALLED, (MODEL, 80, "forward")):
        m.alloc(2 * GIB)
    return m, t


def test_checkpointing_keeps_last_blocks_and_one_whole_call() -> None:
    m, _ = at_the_end_of_forward(layers=30, activation=96 * MIB, logits=MIB)
    each = next(s for s in find_savings(measured(m)) if s.name == "checkpointing")
    call, kept = (96 + 96 + 24) * MIB, 24 * MIB
    assert each.bytes == 30 * call - 30 * kept - (call - kept)
    assert (each.file, each.line) == (MODEL, 62)


def test_checkpointing_saving_matches_a_checkpointed_run() -> None:
    """The same program, layers recomputed: what it holds at the end of the forward pass."""
    layers, activation = 12, 96 * MIB
    m, _ = at_the_end_of_forward(layers=layers, activation=activation, logits=MIB)
    before = measured(m)
    kept = layers * activation // 4
    activation_bytes = activation * 2  # the two inner ones of the layer that is computed again
    weights = before.by_category["weights"] + before.by_category["optimizer state"]
    after = weights + kept + activation_bytes + 2 * MIB + 4 + 2 * GIB
    assert before.allocated - savings_by_name(before)["checkpointing"] == after


def test_smaller_logits_save_loss_copies() -> None:
    m, _ = at_the_end_of_forward(logits=1 * GIB)
    assert savings_by_name(measured(m))["smaller logits"] == 2 * GIB - 2 * GIB // 8


def test_gradients_kept_during_a_forward_pass_can_be_freed() -> None:
    m = FakeAllocator()
    t = Training(m, layers=8, weights=64 * MIB, logits=MIB, late_zero=True)
    for _ in range(3):
        t.step()
    t.forward()
    with m.at(*LOOP, *CALLED, (MODEL, 80, "forward")):
        m.alloc(GIB)
    assert savings_by_name(measured(m))["set_to_none"] == 8 * 64 * MIB


def test_outputs_of_the_step_before_can_be_freed() -> None:
    m = FakeAllocator()
    t = Training(m, kept_outputs=True, logits=256 * MIB)
    for _ in range(5):
        t.step()
    assert savings_by_name(measured(m))["references"] == 256 * MIB


# -- by module ------------------------------------------------------------------------------------


def test_memory_by_module_is_a_tree_of_the_calls_of_forward() -> None:
    """Two blocks from one line are one; a line of its own is a module of its own."""
    m = FakeAllocator()
    m.alloc(7 * MIB)
    top, inner = (*CALLED, (MODEL, 20, "forward")), "/app/block.py"
    for _ in range(2):
        with m.at((TRAIN, 3, "main"), *top, *CALLED, (inner, 5, "forward")):
            m.alloc(3 * MIB)
            with m.at(*CALLED, (f"{TORCH}nn/modules/linear.py", 125, "forward")):
                m.alloc(2 * MIB)
    with m.at((TRAIN, 3, "main"), *CALLED, (MODEL, 21, "forward"), *CALLED, (inner, 5, "forward")):
        m.alloc(4 * MIB)
    linear = f"{TORCH}nn/modules/linear.py"
    assert [astuple(each) for each in held_by_module(measured(m))] == [
        (MODEL, None, None, 5, 14 * MIB, 0),
        (inner, 20, 0, 4, 10 * MIB, 6 * MIB),
        (linear, 5, 1, 2, 4 * MIB, 4 * MIB),
        (inner, 21, 0, 1, 4 * MIB, 4 * MIB),
    ]


def test_no_memory_belongs_to_modules_without_stacks() -> None:
    m = FakeAllocator()
    m.alloc(7 * MIB)
    assert held_by_module(measured(m)) == []


@pytest.mark.parametrize("name", ["transformer_training_ctx512", "forward_bf16_autocast"])
def test_memory_by_module_is_counted_from_stacks(
    name: str, shared_file: Callable[[str], str]
) -> None:
    """Each module against all blocks whose frames contain its ``forward``."""
    run = advisor.open(shared_file(f"memory/{name}.pickle"))
    peak = Analysis(next(iter(run.traces.values()))).peak_memories[0]
    result = held_by_module(peak)
    lives = peak.history.block_lifetimes
    by_file: Counter[str] = Counter()
    for row in peak.allocated_rows.tolist():
        stack = int(lives.stack[row])
        frames = peak.snapshot.stacks[stack] if stack >= 0 else ()
        for file in {frame.file for frame in frames if frame.name == "forward"}:
            by_file[file] += int(lives.size[row])
    outermost: Counter[str] = Counter()
    for place, each in enumerate(result):
        inside = [other for other in result if other.parent == place]
        assert each.own_bytes + sum(other.bytes for other in inside) == each.bytes
        above = each.parent
        while above is not None and result[above].file != each.file:
            above = result[above].parent
        if above is None:
            outermost[each.file] += each.bytes
    assert outermost == by_file and len(result) > 5
