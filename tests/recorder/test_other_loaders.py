"""Waits for batches of loaders that are not torch's are recorded, with their kind."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from advisor.core.run_directory import RankRecord
from advisor.recorder.hooks import THIRD_PARTY_ITERATORS

pytestmark = pytest.mark.timed

Recorded = Callable[..., RankRecord]
WAIT = 0.004
STEPS = 12


def test_the_wait_for_a_generator_is_between_steps(record_run: Recorded, training: Any) -> None:
    def batches() -> Iterator[Any]:
        for _ in range(STEPS):
            time.sleep(WAIT)
            yield training.x[:2], training.y[:2]

    def run() -> None:
        for batch in batches():
            training.learn(batch)

    record = record_run(run)
    assert len(record.steps) == STEPS
    assert all(step.phases["between steps"] >= WAIT * 1e9 for step in record.steps[1:])
    # the machine may hold up any one of them
    assert median(s.phases.get("other", 0) for s in record.steps[2:]) < WAIT * 1e9 / 2


def test_a_loop_over_torchs_loader_has_no_time_between_steps(
    record_run: Recorded, training: Any
) -> None:
    def run() -> None:
        for batch in training.loader(STEPS):
            training.learn(batch)
            time.sleep(WAIT)

    record = record_run(run)
    assert len(record.steps) == STEPS
    assert not any("between steps" in step.phases for step in record.steps[:-1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("module", "kind"), THIRD_PARTY_ITERATORS)
def test_waits_for_a_known_loader_are_data(
    module: str,
    kind: str,
    late: bool,
    record_run: Recorded,
    training: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeLoader:
        """Stands for a package that is not installed."""

        left = 2 * STEPS

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if not self.left:
                raise StopIteration
            self.left -= 1
            time.sleep(WAIT)
            return [{"data": training.x[:2], "label": training.y[:2]}]

    original = FakeLoader.__next__
    stand_in = ModuleType(module)
    setattr(stand_in, kind, FakeLoader)

    def run() -> None:
        if late:
            monkeypatch.setitem(sys.modules, module, stand_in)
            for _ in range(1000):  # the recorder looks about once a second
                if FakeLoader.__next__ is not original:
                    break
                time.sleep(0.01)
        for (batch,) in FakeLoader():
            training.learn((batch["data"], batch["label"]))

    if not late:
        monkeypatch.setitem(sys.modules, module, stand_in)
    record = record_run(run)
    assert len(record.steps) == 2 * STEPS
    assert all(step.phases["data"] >= WAIT * 1e9 for step in record.steps)
    assert {step.samples for step in record.steps} == {2}
    assert FakeLoader.__next__ is original


def test_a_loader_of_hugging_faces_trainer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    from advisor.recorder.loaders import loader_configuration

    loader = pytest.importorskip("torch.utils.data").DataLoader([1, 2, 3])
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    assert loader_configuration(loader)["trainer"] is None
    monkeypatch.setitem(sys.modules, "transformers.trainer", types.ModuleType("trainer"))
    assert loader_configuration(loader)["trainer"] == "transformers"
