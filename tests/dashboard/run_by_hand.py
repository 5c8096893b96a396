"""Run directory as the recorder writes it, with chosen steps, telemetry, events and trace."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec

from advisor.core.run_directory import (
    EVENTS,
    MANIFEST,
    RANK,
    SCALENE,
    STEPS,
    TELEMETRY,
    Event,
    GpuSample,
    HostSample,
    Manifest,
    RankInfo,
    RecordedDevice,
    Sample,
    StepRow,
    trace_name,
)
from advisor.testing import TraceBuilder

SECOND, MS = 1_000_000_000, 1_000_000
GIB = 1 << 30


def slow_loader(name: str = "ampere_sgemm_128x64_nn") -> TraceBuilder:
    """Build four steps of 11 ms, in which the GPU waits 10 ms for a data loader without workers."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(10_000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch(name, 900)
            b.sync()
    return b


def write_run(folder: Path, *, steps: int = 240, trace: bool = True, end: bool = True) -> Path:
    """Write a run: steps of 12 ms, a window at step 60, and lower clocks in the last third."""
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    manifest = Manifest(
        run_id="abc",
        started_unix_ns=1_700_000_000 * SECOND,
        command=["python", "train.py", "--lr", "1e-3"],
        entry="command",
        git_commit="0123abcd",
        git_dirty=True,
        world_size=1,
        versions={"python": "3.11.7", "torch": "2.13.0", "cuda": "13.0"},
    )
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    uuid = "GPU-1"
    rank_info = RankInfo(
        rank=0,
        pid=77,
        anchor_unix_ns=1_700_000_000 * SECOND,
        anchor_perf_ns=0,
        cpus=8,
        cpus_total=64,
        memory_bytes=128 * GIB,
        shm_bytes=64 << 20,
        devices=[
            RecordedDevice(
                index=0,
                name="NVIDIA A100-SXM4-40GB",
                uuid=uuid,
                total_bytes=40 * GIB,
                driver="580.1",
            )
        ],
        flags={"cudnn.benchmark": False, "float32_matmul_precision": "highest", "autocast": None},
        env={"OMP_NUM_THREADS": "8"},
        ulimits={"nofile": 1024},
    )
    (rank / RANK).write_bytes(msgspec.json.encode(rank_info))
    lines = []
    time_ns = 0
    for n in range(steps):
        window = 0 if 60 <= n < 64 else None
        dur = 16 * MS if window == 0 else 12 * MS + int(MS * math.sin(n))
        data, forward, backward, optimizer = 5 * MS, 2 * MS, 3 * MS, MS
        rest = dur - data - forward - backward - optimizer
        phases = {
            "data": data,
            "forward": forward,
            "backward": backward,
            "optimizer": optimizer,
            "other": rest,
        }
        lines.append(
            StepRow(
                n=n,
                t=time_ns,
                dur=dur,
                phases=phases,
                window=window,
                samples=32,
                allocated=3 * GIB + n * (1 << 20),
                reserved=5 * GIB,
                peak=4 * GIB,
                rss=2 * GIB + n * (1 << 19),
            )
        )
        time_ns += dur
    (rank / STEPS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    samples = []
    for i in range(time_ns // (100 * MS)):
        is_hot = i > 2 * time_ns // (300 * MS)
        gpu = GpuSample(
            uuid=uuid,
            utilisation=60,
            memory_utilisation=20,
            memory_used=6 * GIB,
            memory_total=40 * GIB,
            sm_clock=1000 if is_hot else 1410,
            sm_clock_max=1410,
            throttle=0x20 if is_hot else 0,
            power=250_000 + 1000 * (i % 7),
            power_limit=400_000,
            temperature=88 if is_hot else 60,
            temperature_slowdown=92,
        )
        host = HostSample(cpu=35.0, process_cpu=140.0, rss=2 * GIB, memory_available=90 * GIB)
        samples.append(Sample(t=i * 100 * MS, gpus=[gpu], host=host))
    (rank / TELEMETRY).write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in samples))
    events = [
        Event(
            t=0,
            kind="loader",
            data={
                "id": 1,
                "workers": 0,
                "batch_size": 32,
                "pin_memory": False,
                "dataset": "Images",
                "length": 50_000,
                "prefetch_factor": None,
                "persistent_workers": False,
            },
        ),
        Event(t=0, kind="loader_iter", data={"id": 1, "evaluation": False}),
        Event(t=1, kind="warning", data={"text": "<img src=x onerror=alert(1)> is slow"}),
    ]
    if trace:
        events.append(Event(t=2, kind="window", data={"window": 0, "state": "done", "steps": 4}))
        slow_loader().write(rank / trace_name(0))
    if end:
        events.append(Event(t=time_ns, kind="end", data={"steps": steps, "reason": "finished"}))
    (rank / EVENTS).write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in events))
    line = {
        "lineno": 8,
        "line": "    return decode(path)\n",
        "n_cpu_percent_python": 40.0,
        "n_cpu_percent_c": 12.5,
        "n_sys_percent": 3.0,
        "start_region_line": 7,
        "start_function_line": 6,
    }
    profile = {"files": {"/home/someone/train.py": {"lines": [line]}}}
    (rank / SCALENE).write_text(json.dumps(profile))
    return folder
