"""Large files of other profilers: what reading takes beside the trace that comes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from advisor.cli import ALLOCATOR_SETTING

MEGABYTES = 60
MAX_MB = 112
"""Batches, their texts, one stretch that is put in order, imports. Measured: 65 to 98 (Linux, two
threads); with tables joined as a whole 118 to 172, and more in larger files."""
READ = """
import resource, sys
import numpy, polars, sqlite3
from advisor.read import read_trace
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
trace = read_trace(sys.argv[1])
held = sum(
    frame[name].estimated_size()
    for frame in (trace.cpu, trace.gpu)
    for name in frame.columns
    if frame[name].null_count() < frame.height
)
print(trace.cpu.height, trace.gpu.height, (peak() - before - held) / 1e6)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are counted otherwise there")
@pytest.mark.parametrize(
    "form",
    [
        "nsys",
        "rocpd",
        *(pytest.param(form, marks=pytest.mark.thorough) for form in ("rpd", "rocpd4")),
    ],
)
def test_reading_takes_little_beside_the_trace(form: str, tmp_path: Path) -> None:
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_databases.py"
    spec = util.spec_from_file_location("bench_databases", file)
    assert spec is not None and spec.loader is not None
    bench = util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    path = tmp_path / "large.sqlite"
    bench.FORMATS[form][0](path, MEGABYTES)
    env = {**os.environ, "POLARS_MAX_THREADS": "2", ALLOCATOR_SETTING[0]: ALLOCATOR_SETTING[1]}
    result = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True, env=env
    )
    host, device, additional = map(float, result.stdout.split())
    assert host > 50_000 and device > 50_000  # else nothing was read
    assert additional < MAX_MB
