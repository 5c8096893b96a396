"""Models are called directly after a few steps, and nobody can tell."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.recording.api import Recorder
from advisor.recording.outermost import PLACE, Direct

torch = pytest.importorskip("torch")

QUIET: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> None:
    """Whatever other tests compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)])
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.layers(x))


class Job:
    """A deep net that learns a batch at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Deep()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.forward: list[int] = []
        """How long each call of the net took, ns."""

    def learn(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.ones(2, 4)
            begin = perf_counter_ns()
            y = self.net(x)
            self.forward.append(perf_counter_ns() - begin)
            loss = y.pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def is_direct(module: Any) -> bool:
    return type(vars(module).get(PLACE)) is Direct


def wrapped(before: Any) -> bool:
    return torch.nn.Module.__call__ is not before


def test_forwards_are_timed_with_the_wrapper_and_without(tmp_path: Path) -> None:
    plain, job = Job().learn(30), Job()
    call = torch.nn.Module.__call__
    with Recorder(str(tmp_path / "run"), **QUIET):
        assert wrapped(call)
        losses = job.learn(2)
        assert wrapped(call) and not is_direct(job.net)
        losses += job.learn(28)
        assert is_direct(job.net) and not wrapped(call)
    assert losses == plain
    assert not is_direct(job.net) and not wrapped(call)
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 30
    shares = [s.phases["forward"] / ns for s, ns in zip(record.steps, job.forward, strict=True)]
    assert min(shares) > 0 and max(shares) <= 1
    assert median(shares[:3]) > 0.7 and median(shares[3:]) > 0.7


def test_copies_and_pickles_are_as_if_nothing_were_there(tmp_path: Path) -> None:
    job = Job()
    with Recorder(str(tmp_path / "run"), **QUIET):
        job.learn(10)
        assert is_direct(job.net)
        x = torch.ones(1, 4)
        raw = pickle.loads(pickle.dumps(vars(job.net)))  # as DistributedDataParallel does
        assert raw[PLACE] is None
        saved = io.BytesIO()
        torch.save(job.net, saved)
        saved.seek(0)
        for twin in (
            copy.deepcopy(job.net),
            copy.copy(job.net),
            torch.load(saved, weights_only=False),
            job.net._replicate_for_data_parallel(),
        ):
            assert vars(twin).get(PLACE) is None
        twin = copy.deepcopy(job.net)
        with torch.no_grad():
            twin.last.weight.zero_()
            twin.last.bias.fill_(7.0)
        assert twin(x).item() == 7.0  # its own weights
        assert job.net(x).item() != 7.0


def test_the_model_can_still_be_freed_at_once(tmp_path: Path) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET):
        job = Job()
        job.learn(10)
        assert is_direct(job.net)
        gone = weakref.ref(job.net)
        gc.disable()
        try:
            del job
            assert gone() is None
        finally:
            gc.enable()


def test_another_model_is_found_with_its_loader(tmp_path: Path, training: Any) -> None:
    job, judge = Job(), Deep()
    with Recorder(str(tmp_path / "run"), **QUIET):
        for _ in range(3):
            for x, _y in training.loader(12):
                job.net(x).pow(2).mean().backward()
                job.optimizer.step()
            assert is_direct(job.net)
            judge.eval()
            with torch.no_grad():
                for x, _y in training.loader(5):
                    judge(x)
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 36  # batches of the judge are none
    assert sum(step.evaluation > 0 for step in record.steps) >= 2


def test_another_model_without_a_loader_is_found_by_the_missing_forward(tmp_path: Path) -> None:
    call = torch.nn.Module.__call__
    first, second = Job(), Job()
    with Recorder(str(tmp_path / "run"), **QUIET) as recorder:
        first.learn(10)
        assert not wrapped(call)
        second.learn(3)
        assert recorder._session is not None
        recorder._session.count()  # the tape is read
        assert wrapped(call)
        second.learn(10)
        assert is_direct(first.net) and is_direct(second.net)
    steps = only_rank(tmp_path / "run").steps
    assert len(steps) == 22  # the optimizer that takes over is known by its second step
    assert all(step.phases.get("forward") for step in (*steps[:10], *steps[14:]))


class Bare(torch.nn.Module):
    """Nothing inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def test_single_modules_and_compiled_ones_are_left_alone(tmp_path: Path) -> None:
    call = torch.nn.Module.__call__
    job = Job()
    with Recorder(str(tmp_path / "run"), **QUIET):
        single = Job()
        single.net = Bare()
        single.optimizer = torch.optim.SGD(single.net.parameters(), lr=0.01)
        single.learn(10)
        assert wrapped(call) and not is_direct(single.net)
    with Recorder(str(tmp_path / "run2"), **QUIET):
        job.learn(10)
        assert is_direct(job.net)
        torch.compile(job.net, backend="eager")
        assert wrapped(call) and not is_direct(job.net)
        job.learn(10)
        assert wrapped(call)
