"""The exported trace: the original events as they were, and ours on tracks of their own."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard

from advisor.advise.engine import AnalysisResult, analyze, analyze_in_full
from advisor.core.errors import AdvisorError
from advisor.export import build_tracks, rewrite
from advisor.testing import TraceBuilder


def load(path: Path | str) -> dict[str, Any]:
    """A Chrome trace as ``json`` reads it."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    elif data[:4] == b"\x28\xb5\x2f\xfd":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    document: dict[str, Any] = json.loads(data)
    return document


def export(path: str | Path, target: Path) -> tuple[AnalysisResult, dict[str, Any], dict[str, Any]]:
    """Export a trace; return the analysis, the original and the exported events."""
    result = analyze_in_full(path)
    rewrite(str(path), target, lambda head: build_tracks(result.main, result.report, head))
    return result, load(path), load(target)


def own_events(original: dict[str, Any], exported: dict[str, Any]) -> list[dict[str, Any]]:
    """Our events, after the others have been found unchanged."""
    count = len(original["traceEvents"])
    assert exported["traceEvents"][:count] == original["traceEvents"]
    assert {k: v for k, v in exported.items() if k != "traceEvents"} == {
        k: v for k, v in original.items() if k != "traceEvents"
    }
    return list(exported["traceEvents"][count:])


def slices_by_track(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Slices of each track by its name."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            result[names[event["tid"]]].append(event)
    return result


@pytest.fixture
def slow_trace(tmp_path: Path) -> Path:
    """Four steps of about 6 ms, of which the device waits 5 for a data loader."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(5000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("ampere_sgemm_128x64_nn", 900)
            b.sync()
    return b.write(tmp_path / "slow.json")


@pytest.mark.parametrize("name", ["out.json", "out.json.gz", "out.json.zst"])
def test_events_are_unchanged_and_ours_come_after_them(
    slow_trace: Path, tmp_path: Path, name: str
) -> None:
    report, original, exported = export(slow_trace, tmp_path / name)
    added_events = own_events(original, exported)
    pids = {e["pid"] for e in original["traceEvents"]}
    (pid,) = {e["pid"] for e in added_events}
    assert pid not in pids
    meta = {e["name"]: e["args"] for e in added_events if e["ph"] == "M" and e["tid"] == 0}
    assert meta["process_name"] == {"name": "advisor"}
    assert meta["process_sort_index"] == {"sort_index": -1}
    slices = slices_by_track(added_events)
    assert list(slices)[:2] == ["steps", "idle gaps"]
    assert list(slices)[2:] == [
        f"{f.priority}. {f.title}" for f in report.report.findings if f.priority
    ]


def test_exported_tracks_match_the_analysis(slow_trace: Path, tmp_path: Path) -> None:
    report, original, exported = export(slow_trace, tmp_path / "out.json")
    slices = slices_by_track(own_events(original, exported))
    marks = [e for e in original["traceEvents"] if e["name"].startswith("ProfilerStep")]
    assert [(e["name"], e["ts"]) for e in slices["steps"]] == [(e["name"], e["ts"]) for e in marks]
    # the idle time of the track is that of the report
    idle = next(part.ns for part in report.report.time if part.name == "idle")
    assert sum(e["dur"] for e in slices["idle gaps"]) == pytest.approx(4 * idle / 1e3)
    loader = [e for e in slices["idle gaps"] if e["args"]["cause"] == "loader"]
    assert sum(e["dur"] for e in loader) == pytest.approx(4 * 5000, rel=0.01)
    waits = [e for e in original["traceEvents"] if e["name"].startswith("enumerate(DataLoader)")]
    for gap, wait in zip(loader, waits, strict=True):
        assert wait["ts"] - 1 <= gap["ts"]
        assert gap["ts"] + gap["dur"] <= wait["ts"] + wait["dur"] + 1
    assert all(slices[name] for name in slices)


@pytest.mark.parametrize(
    "name", ["a100_train_6steps", "h100_bert_small_inference", "two_ranks_rank0", "alexnet"]
)
def test_a_real_trace_is_analyzed_the_same_after_its_export(
    shared_trace: Callable[[str], str], tmp_path: Path, name: str
) -> None:
    path = shared_trace(name)
    report, original, exported = export(path, tmp_path / "out.json.gz")
    added_events = own_events(original, exported)
    for slices in slices_by_track(added_events).values():
        for before, after in pairwise(sorted(slices, key=lambda e: float(e["ts"]))):
            # times of 2022's profilers are Unix microseconds, of which floats hold quarters
            assert before["ts"] + before["dur"] <= after["ts"] + 0.5
    report_of_export = analyze(str(tmp_path / "out.json.gz"))
    assert report_of_export.verdict == report.report.verdict
    assert report_of_export.limits == report.report.limits
    assert report_of_export.findings == report.report.findings
    assert report_of_export.time == report.report.time


def test_times_are_exact_where_floats_are_not(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    base = 1_700_000_000_000_000_123
    b = TraceBuilder()
    with b.step(), b.op("aten::mm"):
        b.launch("k", 10)
    trace = json.loads(b.json())
    for event in trace["traceEvents"]:
        event["ts"] += 0.007
    trace["baseTimeNanoseconds"] = base
    source.write_text(json.dumps(trace))
    export(source, target)
    step = next(e for e in trace["traceEvents"] if e["name"] == "ProfilerStep#0")
    findings = [e for e in load(target)["traceEvents"] if e.get("cat") == "advisor"]
    assert next(e for e in findings if e["name"] == "ProfilerStep#0")["ts"] == step["ts"]


def test_a_truncated_trace_is_exported_up_to_the_cut_and_whole(
    slow_trace: Path, tmp_path: Path
) -> None:
    text = slow_trace.read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(text[: len(text) * 3 // 4])
    result = analyze_in_full(str(cut))
    written = rewrite(
        str(cut), tmp_path / "out.json", lambda head: build_tracks(result.main, result.report, head)
    )
    assert written.truncated
    exported = load(tmp_path / "out.json")["traceEvents"]
    assert exported[: written.events] == load(slow_trace)["traceEvents"][: written.events]
    assert written.events > 0.6 * len(load(slow_trace)["traceEvents"])


def test_damaged_events_are_left_out_and_counted(tmp_path: Path) -> None:
    good = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":%d,"dur":1}'
    texts = [good % n for n in range(50)]
    texts[20] = '{"ph":"X","cat":"cpu_op","name":"b", oops}'
    source = tmp_path / "in.json"
    source.write_text('{"traceEvents":[' + ",".join(texts) + "]}")
    written = rewrite(str(source), tmp_path / "out.json")
    assert (written.events, written.lost) == (49, 1)
    assert len(load(tmp_path / "out.json")["traceEvents"]) == 49


def test_bare_and_empty_event_lists_are_written_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text('[{"ph":"X","name":"a","ts":1,"dur":1}]')
    assert rewrite(str(source), target).events == 1
    assert load(target) == {"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}]}
    source.write_text('{"traceEvents": [], "a": {"b": [1.5, null]}}')
    assert rewrite(str(source), target, lambda head: [b'{"ph":"M"}']).added == 1
    assert load(target) == {"traceEvents": [{"ph": "M"}], "a": {"b": [1.5, None]}}


def test_failed_export_keeps_the_old_file_only(tmp_path: Path) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    target.write_text("old")
    source.write_text("no trace")
    with pytest.raises(AdvisorError):
        rewrite(str(source), target)
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.json", "out.json"]
    with pytest.raises(AdvisorError, match="cannot be written"):
        rewrite(str(source), tmp_path / "nowhere" / "out.json")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    event = (
        '{"ph":"X","cat":"cpu_op","name":"aten::op_%d","pid":1,"tid":1,"ts":%d,"dur":1,"args":{"x":"'
        + "y" * 400
        + '"}}'
    )

    def peak(count: int) -> int:
        source = tmp_path / "in.json"
        source.write_text(
            '{"traceEvents":[' + ",\n".join(event % (n % 50, n) for n in range(count)) + "]}"
        )
        tracemalloc.start()
        rewrite(str(source), tmp_path / "out.json.gz")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    small, large = peak(30_000), peak(120_000)  # 15 and 60 MB
    assert large < 1.3 * small
    assert large < 45e6


def test_hostile_names_stay_inside_their_strings(tmp_path: Path) -> None:
    name = 'x"},{"ph":"X"\u2028</script>\x1b[31m'
    b = TraceBuilder()
    for _ in range(3):
        with b.step(), b.op(name):
            b.host(500)
            b.launch(name, 100)
            b.sync()
    _, original, exported = export(b.write(tmp_path / "in.json"), tmp_path / "out.json")
    assert own_events(original, exported)
