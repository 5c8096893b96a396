"""Traces on disk and a command line to run on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from advisor import cli
from advisor.testing import TraceBuilder
from tests.corpus_analyses import RECORDED


class CommandResult(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def advisor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., CommandResult]:
    """``advisor("analyze", path)``: the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # it wraps long errors

    def run(*arguments: object) -> CommandResult:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return CommandResult(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of traces that all tests share: they may copy them, but not change them."""
    folder = tmp_path_factory.mktemp("traces")
    RECORDED.append(folder)
    return folder


@pytest.fixture(scope="session")
def slow_trace(traces: Path) -> Path:
    """Four steps of 11 ms, of which the device waits 10 ms for a data loader without workers."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            b.loader_wait(10_000, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("ampere_sgemm_128x64_nn", 900)
            b.sync()
    (traces / "slow").mkdir()
    return b.write(traces / "slow" / "slow.json")


@pytest.fixture(scope="session")
def busy_trace(traces: Path) -> Path:
    """Four steps during which the device works all the time, and at 81% of the rate that matrix
    products reach: 4.4 TFLOP in 20 ms."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("aten::mm", [[16384, 16384], [16384, 8192]], "c10::BFloat16"):
            b.launch("ampere_bf16_s16816gemm_bf16_128x128", 20_000, blocks=1080)
            b.sync()
    (traces / "busy").mkdir()
    return b.write(traces / "busy" / "busy.json")
