"""Files with more events than there is memory for: read up to there, and the report says so."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

from advisor.core.cgroup import Cgroup, available_memory
from advisor.core.errors import AdvisorError
from advisor.read import read_trace, reader
from benchmarks.public_traces import CORPUS, path_of

EVENT = b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":1},'


def set_free_memory(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(reader, "available_memory", lambda: count)


def test_memory_filling_tiny_events_are_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + EVENT * 300_000 + EVENT[:-1] + b"]}"))
    assert path.stat().st_size < 200_000
    set_free_memory(monkeypatch, 60_000_000)  # of which 36 MB may be taken: 90,000 events of 400 B
    trace = read_trace(str(path))
    assert 90_000 < trace.cpu.height < 180_000
    assert trace.meta.truncated
    assert (trace.meta.damage or "").startswith("more events than the free memory has room for")


def test_long_distinct_texts_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "x" * 2000
    events = ",".join(
        f'{{"ph":"X","cat":"cpu_op","name":"{i}{name}","pid":1,"tid":1,"ts":{i},"dur":1}}'
        for i in range(20_000)
    )
    path = tmp_path / "long.json"
    path.write_text(f'{{"traceEvents":[{events}]}}')
    set_free_memory(monkeypatch, 20_000_000)
    assert read_trace(str(path)).cpu.height < 10_000


@pytest.mark.parametrize(
    "name", ["nsys/mfu_2gpu_before.sqlite", "rocprof/matmul_result.rpd", "xla/{}"]
)
def test_other_profilers_files_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(name)
    if "{}" in name:
        path = max((CORPUS / "xla").glob("*.xplane.pb*"), key=lambda file: file.stat().st_size)
    trace = read_trace(str(path))
    rows = trace.cpu.height + trace.gpu.height
    set_free_memory(monkeypatch, int(rows / 4 * reader.EVENT_BYTES / reader.MEMORY_SHARE))
    part = read_trace(str(path))
    assert 0 < part.cpu.height + part.gpu.height < 0.6 * rows
    assert part.meta.damage or part.meta.events_dropped


def test_a_file_too_large_to_decode_at_once_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [{"action": "alloc", "addr": number, "size": 512} for number in range(2000)]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    set_free_memory(monkeypatch, 100_000)
    with pytest.raises(AdvisorError, match="a snapshot of more than"):
        read_trace(str(path))


def test_free_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100000 kB\nMemAvailable:   50000 kB\n")
    (tmp_path / "self").write_text("0::/job\n")
    job = tmp_path / "job"
    job.mkdir()
    group = Cgroup(tmp_path, tmp_path / "self")
    assert available_memory(group, meminfo) == 50_000 * 1024
    (job / "memory.max").write_text("30000000")
    (job / "memory.current").write_text("20000000")
    assert available_memory(group, meminfo) == 10_000_000
    assert available_memory(group, tmp_path / "none") is None
