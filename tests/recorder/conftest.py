"""Small training programs to record, and what was recorded of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from advisor.core.run_directory import RankRecord

sys.path.insert(0, str(Path(__file__).parent))
from recording_checks import check_sums, only_rank

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


class Training:
    """A tiny net with an optimizer and loaders."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.x = torch.randn(64, 4)
        self.y = torch.randn(64, 1)

    def loader(self, batches: int, **options: Any) -> Any:
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(self.x[: batches * 2], self.y[: batches * 2])
        return DataLoader(data, batch_size=2, **options)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return ((self.net(x) - y) ** 2).mean()

    def learn(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def validate(self, batches: Any) -> None:
        self.net.eval()
        with torch.no_grad():
            for batch in batches:
                self.loss(batch)
        self.net.train()


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def record_run(tmp_path: Path) -> Iterator[Callable[..., RankRecord]]:
    """``record_run(function, **options)``: run the function and return what was recorded of it."""
    from advisor.recorder import session
    from advisor.recorder.api import Recorder

    def run(function: Callable[..., Any], **options: Any) -> RankRecord:
        wanted: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False, **options}
        number = len(list(tmp_path.glob("run*")))
        with Recorder(str(tmp_path / f"run{number}"), **wanted) as recorder:
            function()
            own_session = recorder._session
        assert own_session is not None
        assert own_session.problem is None
        record = only_rank(tmp_path / f"run{number}")
        check_sums(record)
        return record

    yield run
    leftover = session.current_session()
    if leftover is not None:
        leftover.finish()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in list(os.environ):
        if name.startswith("ADVISOR") and name != "ADVISOR_SHARED_TRACES":
            monkeypatch.delenv(name)
    caplog.set_level(logging.WARNING, "advisor")


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``program(source, *args, before=("-m", "advisor", "record"), …)``: run a script in a
    process of its own, in ``tmp_path``."""

    def run(
        source: str,
        *args: str,
        before: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        timeout: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "train.py"
        script.write_text(source, "utf-8")
        return subprocess.run(
            [sys.executable, *before, *(after or (str(script),)), *args],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})},
        )

    return run
