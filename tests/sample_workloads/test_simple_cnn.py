"""The textbook CNN: its recording shows what it should, and its cure changes only the speed."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from advisor.sample_workloads import Setup, running  # noqa: E402

pytestmark = pytest.mark.timed

TINY = 1 / 16  # 4 images a step
ACTIVE = 3


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums in one order, and no contention with tests beside this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        result: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return result


@pytest.mark.parametrize("stacks", [True, False], ids=["with_stack", "without_stack"])
def test_recording_holds_steps_and_their_events(stacks: bool, tmp_path: Path) -> None:
    (path,) = running.record(
        "simple_cnn", Setup(scale=TINY), tmp_path / "new", steps=ACTIVE, stacks=stacks
    )
    assert list((tmp_path / "new").iterdir()) == [path]
    events = events_of(path)
    annotations = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    for step in range(running.WARMUP, running.WARMUP + ACTIVE):
        assert annotations[f"ProfilerStep#{step}"] == 1
    assert annotations["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"] == ACTIVE
    assert annotations["Optimizer.step#SGD.step"] == ACTIVE

    syncs = [e for e in events if e.get("name") == "aten::item" and e.get("cat") == "cpu_op"]
    assert len(syncs) >= ACTIVE
    convolutions = [e for e in events if e.get("name") == "aten::convolution"]
    assert [[TINY * 64, 3, 32, 32], [6, 3, 5, 5]] in [
        e["args"]["Input Dims"][:2] for e in convolutions
    ]
    assert any(e.get("cat") == "python_function" for e in events) == stacks


def test_cured_recording_uses_workers_and_reads_no_loss(tmp_path: Path) -> None:
    (path,) = running.record(
        "simple_cnn", Setup(variant="cured", scale=TINY), tmp_path, steps=ACTIVE
    )
    names = Counter(e.get("name") for e in events_of(path))
    assert names["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"] == ACTIVE
    assert names["aten::item"] == 0


def test_the_network_learns() -> None:
    losses = running.drive("simple_cnn", Setup(scale=0.25), 60)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slow_gpu_copies_are_pageable_and_cured_ones_pinned(tmp_path: Path) -> None:
    for variant, memory in (("slow", "Pageable"), ("cured", "Pinned")):
        run = Setup(variant=variant, device="cuda")
        (path,) = running.record("simple_cnn", run, tmp_path / variant, steps=ACTIVE)
        copies = [e["name"] for e in events_of(path) if e.get("cat") == "gpu_memcpy"]
        uploads = [name for name in copies if "HtoD" in name]
        assert len(uploads) == 2 * ACTIVE
        assert all(memory in name for name in uploads)
