"""Memory over time and at its peak, against a plain replay of the allocator's events."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import advisor
from advisor.core.errors import AdvisorError
from advisor.core.trace import blank_trace
from advisor.measure import Analysis
from advisor.measure.memory.memory_savings import find_savings
from advisor.measure.memory.trace_memory import memory_devices
from advisor.read import read_trace
from advisor.testing import TraceBuilder
from tests.read import profiler_files

MIB = 1 << 20
TIMELINE = Path(__file__).parents[1] / "corpus" / "memory_timeline.raw.gz"


def allocating_trace() -> TraceBuilder:
    """40 MiB by aten::mm, 10 more by aten::cat, which the peak has; then 40 are freed."""
    b = TraceBuilder()
    with b.step():
        with b.op("aten::mm", [[8]], "float"):
            b.memory(40 * MIB, address=1, allocated=140 * MIB, reserved=200 * MIB)
        with b.op("aten::cat", [[8]], "float"):
            b.memory(10 * MIB, address=2, allocated=150 * MIB, reserved=200 * MIB)
        with b.op("aten::mm", [[8]], "float"):
            b.memory(-40 * MIB, address=1, allocated=110 * MIB, reserved=200 * MIB)
            b.launch("k", 10)
        b.sync()
    return b


def test_peak_lists_its_allocating_operators() -> None:
    a = allocating_trace().analysis()
    assert memory_devices(a) == [0]
    (peak,) = a.gpu_and_host_peaks
    assert (peak.allocated, peak.reserved) == (150 * MIB, 200 * MIB)
    assert sorted(
        peak.by_line.select("function", "bytes", "blocks").rows(), key=lambda r: -r[1]
    ) == [
        (None, 100 * MIB, 1),  # from before the recording
        ("aten::mm", 40 * MIB, 1),
        ("aten::cat", 10 * MIB, 1),
    ]


def test_without_events_there_is_no_peak() -> None:
    a = Analysis(blank_trace("nothing"))
    assert memory_devices(a) == []
    assert a.gpu_and_host_peaks == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=60))
def test_held_memory_equals_that_of_a_plain_replay(events: list[tuple[int, int]]) -> None:
    b = TraceBuilder()
    live: dict[int, int] = {}
    total = 7 * MIB  # there before
    best, held_then = total, 0
    with b.step():
        for address, size in events:
            if address in live:
                change = -live.pop(address)
            else:
                live[address] = change = size * MIB
            total += change
            if total > best:
                best, held_then = total, sum(live.values())
            b.memory(change, address=100 + address, allocated=total, reserved=512 * MIB)
            b.host(1)
    (peak,) = b.analysis().gpu_and_host_peaks
    assert peak.allocated == best == int(peak.history.allocated.max())
    lives, moment = peak.history.block_lifetimes, peak.event
    then = (lives.start_event >= 0) & (lives.start_event <= moment) & (lives.end_event > moment)
    assert lives.size[then].sum() == held_then


def test_peak_of_a_real_trace_is_its_highest_recorded_total(
    shared_trace: Callable[[str], str],
) -> None:
    a = Analysis(read_trace(shared_trace("h100_bert_small_inference")))
    peak = a.gpu_and_host_peaks[0]  # the host has a few bytes too
    events = a.trace.memory.filter(pl.col("device") == 0)
    assert peak.allocated == events["allocated"].max() == peak.by_line["bytes"].sum()
    thin = peak.timeline(40)
    assert (
        thin.select(pl.sum_horizontal(pl.exclude("event", "time_us", "reserved"))).max().item()
        == peak.allocated
    )


# -- a trace's allocator events as a history --------------------------------------------------


def trained_on_cpu(path: Path, *, stacks: bool) -> int:
    """A recorded training whose memory events say that they are a GPU's; bytes of its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"profile_memory": True, "with_stack": stacks, "record_shapes": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as recorded:  # type: ignore[arg-type]
        for _ in range(5):
            model(torch.randn(512, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.step()
    recorded.export_chrome_trace(str(path))
    written = json.loads(path.read_bytes())
    events = [e for e in written["traceEvents"] if e.get("name") == "[memory]"]
    first = min(events, key=lambda event: event["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]  # by other tests in this process
    for event in events:
        total = event["args"]["Total Allocated"] - before
        event["args"] |= {"Device Type": 1, "Device Id": 0, "Total Allocated": total}
    path.write_text(json.dumps(written))
    return sum(weight.numel() * 4 for weight in model.parameters())


@pytest.mark.parametrize("stacks", [True, False])
def test_a_trace_with_memory_events_has_the_tables_of_a_snapshot(
    tmp_path: Path, stacks: bool
) -> None:
    weights = trained_on_cpu(tmp_path / "trace.json", stacks=stacks)
    a = Analysis(read_trace(str(tmp_path / "trace.json")))
    (peak,) = a.gpu_and_host_peaks
    written = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    totals = [e["args"]["Total Allocated"] for e in written if e.get("name") == "[memory]"]
    assert peak.allocated == max(totals) == sum(peak.by_category.values())
    # AdamW: two moments of each weight, and a counter in fp32 of each of the 12 tensors
    assert peak.by_category["optimizer state"] == 2 * weights + 12 * 4
    assert peak.by_category["activations"] >= 6 * 2 * 512 * 64 * 4
    assert peak.step_source == "annotations"
    changes = {saving.name for saving in find_savings(peak)}
    assert {"half the batch", "offload optimizer state"} <= changes
    assert "expandable segments" not in changes  # a trace does not show segments
    assert not a.peak_memories  # rules read snapshots


def test_nsight_memory_is_counted_by_device_without_pinned(
    tmp_path: Path,
) -> None:
    path = profiler_files.nsys(tmp_path / "a.sqlite")
    columns = "start, globalPid, deviceId, contextId, address, pc, bytes, memKind, "
    columns += "memoryOperationType, name, correlationId"  # as NVIDIA's schema reference has them
    pid = profiler_files.GLOBAL_PID
    rows = [
        (5_000_100, pid, 0, 1, 10, 0, 64 * MIB, 2, 0, None, 1),
        (5_000_200, pid, 0, 1, 20, 0, 16 * MIB, 2, 0, None, 2),
        (5_000_300, pid, 0, 1, 30, 0, 8 * MIB, 1, 0, None, 3),
        (5_000_400, pid, 0, 1, 10, 0, 64 * MIB, 2, 1, None, 4),
    ]
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS ({columns})")
        db.executemany(f"INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES ({'?, ' * 10}?)", rows)
    gpu, host = Analysis(read_trace(str(path))).gpu_and_host_peaks
    assert (gpu.device, gpu.allocated, gpu.reserved) == (0, 80 * MIB, 0)
    assert (host.device, host.allocated) == (-1, 8 * MIB)
    assert int(gpu.history.allocated[-1]) == 16 * MIB


def test_memory_timeline_keeps_its_categories(tmp_path: Path) -> None:
    raw = json.loads(gzip.decompress(TIMELINE.read_bytes()))
    allocated, most, then = [0] * 8, 0, [0] * 8
    for time, _, size, category in sorted(raw, key=lambda event: event[0]):
        allocated[category] += size
        if sum(allocated) > most and time >= 0:
            most, then = sum(allocated), allocated.copy()
    (view,) = advisor.analyze(TIMELINE).memory
    assert view.allocated == pytest.approx(most, rel=0.002)  # a version changes in two events
    by_category = {each.category: each.bytes for each in view.categories}
    for name, index in {"weights": 0, "optimizer state": 1, "activations": 4}.items():
        assert by_category[name] == pytest.approx(then[index], rel=0.01)
    assert (view.reserved, view.source) == (0, "timeline")
    # the other layout: times, and bytes by category
    times, rows = [0], [[0] * 9]
    for time, _, size, category in sorted(raw, key=lambda event: event[0]):
        if time // 1000 != times[-1]:
            times.append(time // 1000)
            rows.append(rows[-1].copy())
        rows[-1][category + 1] += size
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([[max(time, 0) for time in times], rows]))
    (sampled,) = advisor.analyze(path).memory
    assert sampled.allocated == max(map(sum, rows))


@pytest.mark.parametrize(
    "text",
    [
        "[[1]]",
        "[[1,2,3,9]]",
        "[[-1, 1, 5, 0], [1]]",
        "[[1,2],[[0,0],[0]]]",
        "[[1,2,0,0]]",
        "[[1e27, 1, 512, 0]]".replace("1e27", "9" * 27),
        "[[T],[[0,0,0,0,0,0,0,0,1]]]".replace("T", "9" * 27),
    ],
)
def test_invalid_memory_timeline_is_one_line_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(AdvisorError, match="memory timeline"):
        read_trace(str(path))
