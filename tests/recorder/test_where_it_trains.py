"""Training is found wherever it runs: threads, executors, processes, compiled or by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums

from advisor.core.run_directory import read_recording
from advisor.recorder.api import Recorder

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timed

PROGRAM = """
import sys, threading, multiprocessing
from concurrent.futures import ThreadPoolExecutor
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

def loop(steps=30):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in DataLoader(TensorDataset(torch.randn(2 * steps, 4), torch.randn(2 * steps, 1)), 2):
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        optimizer.step()

if __name__ == "__main__":
    where = sys.argv[1]
    if where == "thread":
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    elif where == "executor":
        with ThreadPoolExecutor(1) as executor:
            executor.submit(loop).result()
    else:
        child = multiprocessing.get_context(where).Process(target=loop)
        child.start()
        child.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "executor",
        "spawn",
        *(pytest.param(w, marks=pytest.mark.thorough) for w in ("thread", "fork")),
    ],
)
def test_training_elsewhere_under_the_command(where: str, program: Any, tmp_path: Path) -> None:
    command = ("-m", "advisor", "record", "--no-report", "-o", "run")
    result = program(PROGRAM, where, before=command)
    assert result.returncode == 0, result.stderr
    (record,) = read_recording(tmp_path / "run").ranks.values()
    check_sums(record)
    assert len(record.steps) == 30


SERVICE = """
import queue, sys, threading
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        for _ in range(4):  # one of its modules is called more often than itself
            x = self.first(x).relu()
        return self.second(x)

net, flip, inbox, outbox = Net(), nn.Sequential(nn.Flatten()), queue.Queue(), queue.Queue()

def serve():
    while (x := inbox.get()) is not None:
        with torch.no_grad():
            outbox.put((net if how != "transforms" else flip)(x).sum().item())

def ask(count):
    for _ in range(count):
        inbox.put(torch.randn(8, 64))
        outbox.get()

how = sys.argv[1]
thread = threading.Thread(target=serve, daemon=True)
thread.start()
if how == "warm up first":
    [net(torch.randn(8, 64)) for _ in range(2)]
if how == "the main thread trains":
    ask(6)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(50):
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        ask(1)
elif how == "the main thread serves too":
    for _ in range(50):
        with torch.no_grad():
            net(torch.randn(8, 64))
        ask(1)
else:
    ask(50)
inbox.put(None)
thread.join()
print(float(net(torch.ones(8, 64)).sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("ask alone", 48),
        ("the main thread trains", 50),
        pytest.param("warm up first", 50, marks=pytest.mark.thorough),
        pytest.param("transforms", 0, marks=pytest.mark.thorough),
        pytest.param("the main thread serves too", 51, marks=pytest.mark.thorough),
    ],
)
def test_a_model_that_serves_in_another_thread(
    how: str, steps: int, program: Any, tmp_path: Path
) -> None:
    """The model is watched from its third call, and steps are those of the model, not of its
    modules."""
    plain = program(SERVICE, how)
    result = program(SERVICE, how, before=("-m", "advisor", "record", "--no-report", "-o", "run"))
    assert (result.returncode, result.stdout) == (0, plain.stdout), result.stderr
    recorded = tmp_path / "run"
    results = [] if not recorded.exists() else list(read_recording(recorded).ranks.values())
    assert sum(len(record.steps) for record in results) == steps
    assert all(record.inference == (how != "the main thread trains") for record in results)


@pytest.mark.parametrize("how", ["loader", "list", "data", "replaced"])
def test_updates_by_hand_are_steps_all_of_them(how: str, record_run: Any, training: Any) -> None:
    """More of them than are kept while nothing is known."""
    steps = 1500 if how == "data" else 30

    def run() -> None:
        weight = torch.randn(4, 1, requires_grad=True)
        batches: Any = (
            training.loader(30) if how == "loader" else [(torch.ones(2, 4), None)] * steps
        )
        for x, _ in batches:
            ((x @ weight) ** 2).mean().backward()
            if how == "data":
                weight.data -= 0.01 * weight.grad
                weight.grad.zero_()
            elif how == "replaced":
                weight = (weight - 0.01 * weight.grad).detach().requires_grad_()
            else:
                with torch.no_grad():
                    weight -= 0.01 * weight.grad
                weight.grad = None

    assert len(record_run(run).steps) == steps


def test_accumulating_by_hand_is_not_a_step_each(record_run: Any, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(training.loader(12), 1):
            training.loss(batch).backward()
            if number % 3 == 0:
                with torch.no_grad():
                    for p in training.net.parameters():
                        p -= 0.01 * p.grad
                        p.grad = None

    record = record_run(run)
    assert [step.micro for step in record.steps] == [3] * 4
    assert [step.samples for step in record.steps] == [6] * 4


def test_fully_compiled_step_is_recorded(record_run: Any, training: Any) -> None:
    @torch.compile(backend="eager")
    def step(x: Any, y: Any) -> Any:
        loss = ((training.net(x) - y) ** 2).mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss

    def run() -> None:
        for _ in range(2):
            for batch in training.loader(20):
                step(*batch)

    try:
        assert len(record_run(run).steps) == 40
    finally:
        torch._dynamo.reset()


def test_samples_count_the_actual_batch_sizes(record_run: Any, training: Any) -> None:
    """The last batch is smaller, and several are one step."""
    data = torch.utils.data.TensorDataset(training.x[:11], training.y[:11])

    def run() -> None:
        for batch in torch.utils.data.DataLoader(data, batch_size=3):
            training.loss(batch).backward()
        training.optimizer.step()

    (step,) = record_run(run).steps
    assert (step.micro, step.samples, step.bytes) == (4, 11, 11 * 5 * 4)


def test_a_helper_thread_does_not_take_over(record_run: Any, training: Any) -> None:

    other = type(training)()

    def run() -> None:
        for number, batch in enumerate(training.loader(12)):
            training.learn(batch)
            if number % 3 == 1:
                thread = threading.Thread(target=other.learn, args=(batch,))
                thread.start()
                thread.join()

    assert len(record_run(run).steps) == 12


def test_main_thread_collects_garbage_while_another_trains(record_run: Any, training: Any) -> None:
    import gc

    batches = list(training.loader(30))

    def run() -> None:
        gc.collect()  # a pause of the watched thread is no training of its own
        thread = threading.Thread(target=lambda: [training.learn(batch) for batch in batches])
        thread.start()
        thread.join()

    assert len(record_run(run).steps) == 30


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors are Linux's")
def test_thread_training_before_the_main_one_leaves_start(record_run: Any, training: Any) -> None:
    """The main thread gets its processor late: others use the only one as well."""
    batches = list(training.loader(30))
    for batch in training.loader(40):
        training.learn(batch)  # what is slow in a first step is over

    def run() -> None:
        thread = threading.Thread(target=lambda: [training.learn(batch) for batch in batches])
        thread.start()
        thread.join()

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    command = (sys.executable, "-c", "while True: pass")
    busy = [subprocess.Popen(command) for _ in range(3)]
    try:
        assert len(record_run(run).steps) == 30
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("how", ["executor", "to_thread", "threads", "polled", "after"])
def test_training_in_other_threads(how: str, record_run: Any, training: Any) -> None:
    """Model and optimizer are the main thread's, which waits in one way or another."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    def loop() -> None:
        for batch in training.loader(20):
            training.learn(batch)
            if how in ("polled", "after"):
                time.sleep(0.01)

    def run() -> None:
        if how == "executor":
            with ThreadPoolExecutor(3) as executor:
                for _ in range(5):
                    executor.submit(loop).result()
        elif how == "to_thread":

            async def main() -> None:
                for _ in range(5):
                    await asyncio.to_thread(loop)

            other = asyncio._get_running_loop()  # Playwright's, after tests in a browser
            asyncio._set_running_loop(None)
            try:
                asyncio.run(main())
            finally:
                asyncio._set_running_loop(other)
        elif how == "threads":
            for _ in range(5):
                thread = threading.Thread(target=loop)
                thread.start()
                thread.join()
        else:
            if how == "after":
                loop()
            thread = threading.Thread(target=lambda: [loop() for _ in range(4 + (how != "after"))])
            thread.start()
            while thread.is_alive():
                time.sleep(0.002)

    # of a main thread that does not wait, or has trained, it takes a moment to know
    assert (50 if how in ("polled", "after") else 90) <= len(record_run(run).steps) <= 100


def test_the_main_thread_trains_after_another_one(record_run: Any, training: Any) -> None:

    def run() -> None:
        thread = threading.Thread(target=lambda: [training.learn(b) for b in training.loader(8)])
        thread.start()
        thread.join()
        for batch in training.loader(8):
            training.learn(batch)

    assert len(record_run(run).steps) == 16


def test_forwards_outside_a_loop_get_advice_on_marking_steps(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False):
        training.validate(training.loader(2))
    assert "2 forward passes" in caplog.text and "advisor.step()" in caplog.text


def test_a_decorated_generator_keeps_its_steps(training: Any, tmp_path: Path) -> None:
    @Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False)
    def losses() -> Any:
        for batch in training.loader(9):
            training.learn(batch)
            yield 1

    assert sum(losses()) == 9
    first = losses()
    for _ in range(4):
        next(first)
    first.close()
    from advisor.recorder.session import current_session

    session = current_session()
    assert session is not None
    session.finish()
    steps = read_recording(tmp_path / "run").ranks[0].steps
    assert len(steps) == 13


def test_thread_with_training_target_is_not_waiting(training: Any, record_run: Any) -> None:
    """The thread stands in its own function, which ``threading`` called; another makes updates."""
    turn, other = threading.Lock(), type(training)()
    turn.acquire()
    ready = threading.Event()

    def trains() -> None:
        time.sleep(0.3)  # until the main thread waits
        for number in range(30):
            training.learn((training.x, training.y))
            if number == 9:
                ready.set()
                turn.acquire()

    def updates() -> None:
        ready.wait()
        for _ in range(5):
            other.learn((other.x, other.y))
        turn.release()

    def run() -> None:
        threads = [threading.Thread(target=target) for target in (trains, updates)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(record_run(run).steps) == 30
