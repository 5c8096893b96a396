"""The textbook CNN: its recording shows what it should, and its cure changes only the speed."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from advisor.sample_workloads import simple_cnn

torch = pytest.importorskip("torch")

TINY = 1 / 16  # 4 images a step
ACTIVE = 3


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums in one order, and no contention with tests beside this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False], ids=["with_stack", "without_stack"])
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "trace.json.gz"
    written = simple_cnn.record(
        path, device="cpu", steps=ACTIVE, scale=TINY, with_stack=request.param
    )
    assert written == path
    assert list(tmp_path.iterdir()) == [path]
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.load(file)
    trace["asked for stacks"] = request.param
    return trace


def test_a_recording_holds_the_steps_and_what_happens_in_them(recording: dict[str, Any]) -> None:
    events = recording["traceEvents"]
    annotations = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    skipped = simple_cnn.SKIPPED + simple_cnn.WARMUP
    for step in range(skipped, skipped + ACTIVE):
        assert annotations[f"ProfilerStep#{step}"] == 1
    assert annotations["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"] == ACTIVE
    assert annotations["Optimizer.step#SGD.step"] == ACTIVE

    syncs = [e for e in events if e.get("name") == "aten::item" and e.get("cat") == "cpu_op"]
    assert len(syncs) >= ACTIVE
    convolutions = [e for e in events if e.get("name") == "aten::convolution"]
    assert [[TINY * 64, 3, 32, 32], [6, 3, 5, 5]] in [
        e["args"]["Input Dims"][:2] for e in convolutions
    ]
    python = any(e.get("cat") == "python_function" for e in events)
    assert python == recording["asked for stacks"]


def test_a_cured_recording_loads_in_other_processes_and_reads_no_loss(tmp_path: Path) -> None:
    path = simple_cnn.record(
        tmp_path / "trace.json", variant="cured", device="cpu", steps=ACTIVE, scale=TINY
    )
    names = Counter(e.get("name") for e in json.loads(path.read_text())["traceEvents"])
    assert names["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"] == ACTIVE
    assert names["aten::item"] == 0


def test_losses_are_the_same_in_every_run() -> None:
    first = simple_cnn.train(device="cpu", steps=4, scale=TINY)
    torch.rand(3)  # the caller's random state plays no part
    assert simple_cnn.train(device="cpu", steps=4, scale=TINY) == first
    assert simple_cnn.train(device="cpu", steps=4, scale=TINY, seed=1) != first


def test_the_cure_does_not_change_the_losses() -> None:
    slow = simple_cnn.train("slow", device="cpu", steps=4, scale=TINY)
    cured = simple_cnn.train("cured", device="cpu", steps=4, scale=TINY)
    assert cured == pytest.approx(slow, rel=1e-5)


def test_the_network_learns() -> None:
    losses = simple_cnn.train(device="cpu", steps=60, scale=0.25)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    simple_cnn.train(device="cpu", steps=1, scale=TINY)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callback_is_called_once_a_step() -> None:
    calls: list[int] = []
    losses = simple_cnn.train(
        device="cpu", steps=5, scale=TINY, step_callback=lambda: calls.append(len(calls))
    )
    assert calls == [0, 1, 2, 3, 4]
    assert len(losses) == 5


@pytest.mark.parametrize("wrong", [{"variant": "fast"}, {"steps": 0}, {"scale": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown variant|nothing to train"):
        simple_cnn.train(**wrong, device="cpu")


def test_the_command_line_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json.gz"
    simple_cnn.main(["--out", str(out), "--device", "cpu", "--steps", "1", "--scale", "0.0625"])
    assert out.exists()
    assert "1 steps recorded" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_slow_copies_are_pageable_and_the_cured_ones_pinned(tmp_path: Path) -> None:
    for variant, memory in (("slow", "Pageable"), ("cured", "Pinned")):
        path = simple_cnn.record(tmp_path / f"{variant}.json", variant=variant, steps=ACTIVE)
        events = json.loads(path.read_text())["traceEvents"]
        copies = [e["name"] for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
        assert len(copies) == 2 * ACTIVE
        assert all(memory in name for name in copies)
