"""Device times of phases from CUDA events, with a device that is played."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.recorder import watchers
from advisor.recorder.api import Recorder

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timed


class Device:
    """Counts what is done with events, in which threads, and when it must not be."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.created = self.recorded = 0
        self.capturing = False
        self.on_internal_error = False
        self.lag_ns = 3_000_000
        self.slower = 1.0
        """Times as long as the host that it takes between two events."""

    def note_use(self) -> None:
        assert not self.capturing, "an event was touched while a graph is captured"
        self.threads.add(threading.get_ident())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    played = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            played.created += 1
            self.at: int | None = None

        def record(self) -> None:
            played.note_use()
            played.recorded += 1
            self.at = time.perf_counter_ns()

        def query(self) -> bool:
            played.note_use()
            if played.on_internal_error:
                raise RuntimeError("CUDA error: device-side assert triggered")
            assert self.at is not None
            return time.perf_counter_ns() > self.at + played.lag_ns

        def elapsed_time(self, end: Event) -> float:
            played.note_use()
            assert self.at is not None and end.at is not None
            return played.slower * (end.at - self.at) / 1e6

    monkeypatch.setattr(watchers, "MARKS_EVERY_NS", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: played.capturing, raising=False
    )
    return played


QUIET: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False}


def test_device_times_of_phases_add_up_to_the_step(
    training: Any, tmp_path: Path, device: Device
) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET):
        for _ in range(3):
            for batch in training.loader(30):
                training.learn(batch)
                time.sleep(0.001)
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 90
    timed = [step for step in record.steps if step.gpu]
    assert 15 <= len(timed) <= 30  # one in four
    for step in timed:
        assert step.gpu is not None
        # the played device works off each event at once, so its time is the host's
        assert sum(step.gpu.values()) == pytest.approx(step.dur, rel=0.2, abs=200_000)
        assert {"forward", "backward", "optimizer"} <= set(step.gpu)


def test_short_steps_are_timed_a_few_times_per_second(
    training: Any, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events cost some microseconds each: what is spent on them a second has a bound."""
    monkeypatch.setattr(watchers, "MARKS_EVERY_NS", 100_000_000)
    begin = time.monotonic()
    with Recorder(str(tmp_path / "run"), **QUIET):
        while time.monotonic() < begin + 1:
            for batch in training.loader(100):
                training.learn(batch)
    seconds = time.monotonic() - begin
    timed = [step for step in only_rank(tmp_path / "run").steps if step.gpu]
    assert 1 <= len(timed) <= 10 * seconds + 1
    assert device.recorded <= 20 * (10 * seconds + 1)  # of two steps, each with four phases


def test_every_long_step_is_timed(
    training: Any, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "LONG_STEP_NS", 20_000_000)
    with Recorder(str(tmp_path / "run"), **QUIET):
        for batch in training.loader(30):
            training.learn(batch)
            time.sleep(0.03)
    steps = only_rank(tmp_path / "run").steps
    # the first ones lie before a pause, and the last one has no end
    assert sum(step.gpu is not None for step in steps) >= len(steps) - 6


def test_steps_of_several_optimizers_are_timed(
    training: Any, tmp_path: Path, device: Device
) -> None:
    """The embedding has an optimizer of its own: one step holds two optimizer steps."""
    first, second = (torch.nn.Linear(8, 8) for _ in range(2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, second)]
    data = torch.utils.data.DataLoader(torch.randn(640, 8), batch_size=4)
    with Recorder(str(tmp_path / "run"), **QUIET):
        for batch in data:
            second(first(batch)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(0.01)
    steps = only_rank(tmp_path / "run").steps
    assert len(steps) == 160
    assert 8 <= sum(step.gpu is not None for step in steps) <= 80


@pytest.mark.parametrize("loader", [True, False])
def test_steps_of_inference_are_timed(tmp_path: Path, device: Device, loader: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    data: Any = torch.randn(160, 8)
    data = torch.utils.data.DataLoader(data, batch_size=4) if loader else data.split(4)
    with Recorder(str(tmp_path / "run"), **QUIET), torch.no_grad():
        for batch in data:
            model(batch)
            time.sleep(0.02)
    record = only_rank(tmp_path / "run")
    assert record.inference and len(record.steps) >= 38
    timed = [step for step in record.steps if step.gpu]
    assert 6 <= len(timed) <= 20
    for step in timed:
        assert sum((step.gpu or {}).values()) == pytest.approx(step.dur, rel=0.2, abs=300_000)


@pytest.mark.parametrize(("slower", "state"), [(1.0, "stopped"), (20.0, "done")])
def test_host_running_ahead_does_not_mark_a_window_as_slow(
    training: Any, tmp_path: Path, device: Device, slower: float, state: str
) -> None:
    """The host's steps differ where the device is behind, profiled or not, for the host waits in
    some and not in others."""
    device.slower = slower
    with Recorder(
        str(tmp_path / "run"), skip=8, warmup=1, active=6, telemetry=0.0, report=False
    ) as recorder:
        for _ in range(30):
            training.learn((training.x, training.y))
            time.sleep(0.05 if torch.autograd._profiler_enabled() else 0.01)
        session = recorder._session
        assert session is not None and session.event_timer is not None
        assert session.event_timer.host_is_ahead == (slower > 1)
    windows = only_rank(tmp_path / "run").events_of("window")
    assert [event["state"] for event in windows] == ["open", state]


def test_cuda_events_are_used_in_the_training_thread_only(
    training: Any, tmp_path: Path, device: Device
) -> None:
    """A query in another thread would end a graph's capture with an error."""
    with Recorder(str(tmp_path / "run"), **QUIET):
        for _ in range(2):
            for batch in training.loader(32):
                training.learn(batch)
                time.sleep(0.05)  # the writer's thread has its rounds in between
    assert device.threads == {threading.get_ident()}
    assert device.created < 0.8 * device.recorded  # events that were read are used again
    assert any(step.gpu for step in only_rank(tmp_path / "run").steps)


def test_device_is_not_queried_during_graph_capture(
    training: Any, tmp_path: Path, device: Device
) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET):
        for number, batch in enumerate(training.loader(32)):
            device.capturing = 10 <= number < 20
            training.learn(batch)
            time.sleep(0.002)
        device.capturing = False
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 32
    assert not any(step.gpu for step in record.steps[11:19])


def test_a_device_that_fails_is_left_to_the_program(
    training: Any, tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.on_internal_error = True
    with Recorder(str(tmp_path / "run"), **QUIET):
        for batch in training.loader(32):
            training.learn(batch)
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 32 and not any(step.gpu for step in record.steps)
    assert caplog.messages == []
