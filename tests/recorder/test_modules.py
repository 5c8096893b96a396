"""Forwards are timed, and neither models nor the function that calls them look any different."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.recorder.api import Recorder

pytestmark = pytest.mark.timed

torch = pytest.importorskip("torch")

QUIET: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False}


class NestedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)])
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.layers(x))


class Job:
    """A deep net that learns a batch at a time, and says how long each call of it took, ns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = NestedModel()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.forward: list[int] = []

    def learn(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            begin = perf_counter_ns()
            y = self.net(torch.ones(2, 4))
            self.forward.append(perf_counter_ns() - begin)
            loss = y.pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_forwards_are_timed_without_model_attributes(tmp_path: Path) -> None:
    plain, job = Job().learn(30), Job()
    call, code = torch.nn.Module.__call__, torch.nn.Module.__call__.__code__
    before = [sorted(vars(module)) for module in job.net.modules()]
    with Recorder(str(tmp_path / "run"), **QUIET):
        assert torch.nn.Module.__call__ is call and call.__code__ is not code
        assert (call.__code__.co_filename, call.__code__.co_firstlineno, call.__code__.co_name) == (
            code.co_filename,
            code.co_firstlineno,
            code.co_name,
        )
        assert job.learn(30) == plain
        assert [sorted(vars(module)) for module in job.net.modules()] == before
    assert call.__code__ is code
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 30
    shares = [s.phases["forward"] / ns for s, ns in zip(record.steps, job.forward, strict=True)]
    assert min(shares) > 0 and max(shares) <= 1
    assert median(shares) > 0.7


def test_the_model_can_still_be_freed_at_once(tmp_path: Path) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET):
        job = Job()
        job.learn(10)
        reference = weakref.ref(job.net)
        gc.disable()
        try:
            del job
            assert reference() is None
        finally:
            gc.enable()


def test_every_model_is_seen_from_its_first_call(tmp_path: Path, training: Any) -> None:
    first, second = Job(), Job()
    with Recorder(str(tmp_path / "run"), **QUIET):
        first.learn(10)
        second.learn(3)
        second.learn(10)
    steps = only_rank(tmp_path / "run").steps
    assert len(steps) == 22  # the optimizer that takes over is known by its second step
    assert all(step.phases.get("forward") for step in steps)


def test_modules_inside_a_forward_run_torchs_own_code(tmp_path: Path) -> None:
    call = torch.nn.Module.__call__
    original_code = call.__code__
    seen: list[Any] = []

    class ModelThatReads(torch.nn.Module):
        def __init__(self, raising: bool) -> None:
            super().__init__()
            self.raising = raising

        def forward(self, x: Any) -> Any:
            seen.append(call.__code__)
            if self.raising:
                raise KeyError("mine")
            return x

    class ModelThatStops(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            recorder._session.finish()
            return x

    with Recorder(str(tmp_path / "run"), **QUIET) as recorder:
        recorded_code = call.__code__
        outer = torch.nn.Sequential(
            ModelThatReads(False), torch.nn.Sequential(ModelThatReads(True))
        )
        with pytest.raises(KeyError, match="mine"):
            outer(torch.ones(1))
        assert seen == [original_code, original_code]
        assert call.__code__ is recorded_code is not original_code
        torch.nn.Sequential(ModelThatStops(), ModelThatReads(False))(torch.ones(1))
        assert call.__code__ is original_code, (
            "a recording that ended inside a forward stays taken out"
        )
    assert call.__code__ is original_code
