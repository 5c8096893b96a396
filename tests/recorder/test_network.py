"""NCCL's log and the topology of the node are kept, and training notices none of it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from advisor.core.run_directory import NCCL_LOG, TOPOLOGY
from advisor.recorder import framework_logs
from advisor.recorder.api import Recorder
from tests.read.test_network_log import logs

pytest.importorskip("torch")

QUIET: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but what a test puts there, and a job of two processes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "sleep"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    return folder


def write_tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def record(training: Any, out: Path, until: str = "rank.json") -> Path:
    """A run that lasts until this file is there; the folder of its rank."""
    import torch

    with Recorder(str(out), **QUIET):
        for _ in range(3):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        deadline = time.monotonic() + 20
        while not list(out.glob(f"rank*/{until}")) and time.monotonic() < deadline:
            time.sleep(0.05)
    return next(out.glob("rank*"))


def test_the_log_and_the_topology_are_kept_and_analyzed(
    training: Any, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = tmp_path / "matrix"
    matrix.write_text(logs.matrix(4, "NV12", 2))
    write_tool(tools, "nvidia-smi", f'[ "$1 $2" = "topo -m" ] && cat {matrix}')
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "out.%h.%p"))
    secret = "node0:1:2 [0] NCCL INFO NCCL_X set by environment to https://bob:p4ssw0rd@h/x\n"
    log = tmp_path / f"out.{socket.gethostname()}.{os.getpid()}"
    log.write_text(logs.job(across="NET/IB/0") + secret + "my own line\n")
    folder = record(training, tmp_path / "run", until=TOPOLOGY)
    kept = (folder / NCCL_LOG).read_text()
    assert "via NET/IB/0" in kept and "p4ssw0rd" not in kept and "my own line" not in kept
    assert (folder / TOPOLOGY).read_text() == matrix.read_text()
    from advisor import analyze

    report = analyze(str(tmp_path / "run")).network
    assert report is not None and report.gpu_links == {"NV12": 6} and report.ranks == 8


def test_network_files_are_not_kept_for_a_single_process(
    training: Any, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    write_tool(tools, "nvidia-smi", "echo must not be run")
    folder = record(training, tmp_path / "run")
    assert not (folder / NCCL_LOG).exists() and not (folder / TOPOLOGY).exists()


@pytest.mark.parametrize("script", ["exit 3", "sleep 60"])
def test_failing_or_hanging_tool_does_not_delay_the_program(
    script: str, training: Any, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framework_logs, "TOPOLOGY_SECONDS", 1.0)
    write_tool(tools, "nvidia-smi", script)
    folder = record(training, tmp_path / "run")
    assert not (folder / TOPOLOGY).exists()


def test_unwritable_network_log_costs_only_the_log(
    training: Any, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path))  # a folder
    assert not (record(training, tmp_path / "run") / NCCL_LOG).exists()


def test_log_file_follows_nccl_debug_file() -> None:
    name = framework_logs.log_file({"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": "/x/%h-%p.%%.log"})
    assert name == Path(f"/x/{socket.gethostname()}-{os.getpid()}.%.log")
    for env in (
        {"NCCL_DEBUG": "INFO"},
        {"NCCL_DEBUG_FILE": "/x/log"},
        {"NCCL_DEBUG": "VERSION", "NCCL_DEBUG_FILE": "/x/log"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/dev/stderr"},
    ):
        assert framework_logs.log_file(env) is None
