"""Compiled regions compile as if nobody looked: the same graphs, no break, no recompilation."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.core.run_directory import COMPILE_LOG
from advisor.recorder.api import Recorder
from advisor.recorder.framework_logs import LOGGER, CompileLogHandler, CompileRecord

torch = pytest.importorskip("torch")


@pytest.fixture
def counting_backend() -> Any:
    """A backend that counts graphs and operators, with dynamo as new."""
    import torch._dynamo
    import torch._dynamo.testing

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x.to("cpu").to(torch.float32)))


def regions(net: Any, backend: Any, what: str) -> Any:
    """The loss function, with the region compiled that the case names."""
    loss = torch.nn.functional.mse_loss
    if what == "module":
        compiled = torch.compile(net, backend=backend, fullgraph=True)
        return lambda x, y: loss(compiled(x), y)
    if what == "in place":
        net.compile(backend=backend, fullgraph=True)
        return lambda x, y: loss(net(x), y)
    if what == "submodule":
        net.first = torch.compile(net.first, backend=backend, fullgraph=True)
        return lambda x, y: loss(net(x), y)
    return torch.compile(lambda x, y: loss(net(x.to("cpu")), y), backend=backend, fullgraph=True)


def train(what: str, backend: Any, steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    net = Net()
    loss_of = regions(net, backend, what)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(torch.randn(3, 4), torch.randn(3, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("what", ["module", "in place", "submodule", "function"])
def test_program_of_one_graph_has_no_breaks(
    what: str, counting_backend: Any, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    plain = counting_backend()
    losses = train(what, plain)
    torch._dynamo.reset()
    counters.clear()
    recorded = counting_backend()
    # the profiler of two windows inside, and hooks put in and taken out around compiled code
    with Recorder(str(tmp_path / "run"), skip=2, warmup=1, active=2, report=False):
        assert train(what, recorded) == losses
    assert (recorded.frame_count, recorded.op_count) == (plain.frame_count, plain.op_count)
    assert recorded.frame_count == 1
    assert sum(counters["graph_break"].values()) == 0
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 6
    if what != "function":
        assert all(step.phases["forward"] > 0 for step in record.steps)


def test_hooks_that_come_and_go_cause_no_recompilation(
    counting_backend: Any, tmp_path: Path
) -> None:
    backend = counting_backend()
    net = Net()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(3, 4)).sum().backward()
            optimizer.step()

    steps()
    for _ in range(2):
        with Recorder(str(tmp_path / "run"), active=0, report=False):
            steps()
        steps()
    assert backend.frame_count == 1


@pytest.mark.parametrize("how", ["zero first", "zero last", "no loader", "accumulation"])
def test_compiled_optimizer_steps_are_counted(
    how: str, counting_backend: Any, record_run: Any, training: Any
) -> None:
    step = torch.compile(training.optimizer.step, backend="eager")

    def run() -> None:
        batches = training.loader(12)
        for number, batch in enumerate(list(batches) if how == "no loader" else batches):
            if how == "zero first":
                training.optimizer.zero_grad()
            training.loss(batch).backward()
            if how != "accumulation" or number % 4 == 3:
                step()
                if how != "zero first":
                    training.optimizer.zero_grad()

    record = record_run(run)
    expected = [4, 4, 4] if how == "accumulation" else [1] * 12
    assert [step.micro for step in record.steps] == expected
    assert all(step.phases.keys() >= {"forward", "backward"} for step in record.steps)
    if how != "no loader":
        assert [step.samples for step in record.steps] == [2 * n for n in expected]


def test_a_window_opens_though_the_optimizer_is_compiled(
    counting_backend: Any, tmp_path: Path, training: Any
) -> None:
    step = torch.compile(training.optimizer.step, backend="eager")
    options: dict[str, Any] = {"skip": 4, "warmup": 1, "active": 2, "report": False}
    with Recorder(str(tmp_path / "run"), telemetry=0.0, **options):
        for _ in range(2):
            for batch in training.loader(12):
                training.optimizer.zero_grad()
                training.loss(batch).backward()
                step()
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 24
    assert sum(step.window is not None for step in record.steps) >= 2
    assert list(tmp_path.glob("run/**/*.json*"))


def test_gradients_cleared_before_the_first_step_are_none(
    counting_backend: Any, record_run: Any, training: Any
) -> None:
    """A model that is compiled, and the gradients of each batch taken twice."""
    net = torch.compile(training.net, backend="eager")

    def run() -> None:
        for x, y in training.loader(6):
            for _ in range(3):
                training.optimizer.zero_grad()
                ((net(x) - y) ** 2).mean().backward()
            training.optimizer.step()

    assert len(record_run(run).steps) == 6


# -- what torch.compile says, kept in the run ------------------------------------------------------


class Breaking(Net):
    def forward(self, x: Any) -> Any:
        x = self.first(x)
        print(end="")  # the break
        return self.last(x)


def compile_and_train(rows: tuple[int, ...], note: str = "") -> list[float]:
    torch.manual_seed(0)
    net = Breaking()
    compiled = torch.compile(net, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for count in rows:
        optimizer.zero_grad()
        loss = compiled(torch.randn(count, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def record_training(folder: Path, **options: Any) -> list[float]:
    with Recorder(str(folder), active=0, telemetry=0, report=False, **options):
        return compile_and_train((3, 3, 3, 5, 5))


@pytest.fixture
def no_compile_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.delenv("TORCH_TRACE", raising=False)


def test_breaks_and_guards_are_in_the_run(no_compile_settings: None, tmp_path: Path) -> None:
    from advisor.advise.engine import analyze

    plain = compile_and_train((3, 3, 3, 5, 5))
    torch._dynamo.reset()
    before = list(logging.getLogger(LOGGER).handlers)
    assert record_training(tmp_path / "run") == plain
    assert not set(logging.getLogger(LOGGER).handlers) - set(before)
    log = analyze(tmp_path / "run").compilation
    assert log is not None and not log.damaged
    line = Path(__file__).read_text().split("# the break")[0].count("\n") + 1
    assert [(each.file, each.line, each.function) for each in log.breaks] == [
        (__file__, line, "forward")
    ]
    assert log.breaks[0].reason == "Failed to trace builtin operator" and log.breaks[0].frames
    assert any("expected 3, actual 5" in each.reason for each in log.recompilations)
    text = (tmp_path / "run" / "rank0" / COMPILE_LOG).read_text()
    assert "# File: " in text and "print(end=" not in text and "inductor_config" not in text
    assert len(text) < 30_000


def test_user_trace_is_unchanged(
    no_compile_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path / "theirs"))
    record_training(tmp_path / "run")
    assert not (tmp_path / "run" / "rank0" / COMPILE_LOG).exists()


def test_compile_logging_can_be_switched_off(no_compile_settings: None, tmp_path: Path) -> None:
    record_training(tmp_path / "run", compile_log=False)
    assert not (tmp_path / "run" / "rank0" / COMPILE_LOG).exists()


def test_unused_records_are_not_created(no_compile_settings: None) -> None:
    from torch._logging import trace_structured

    records: list[str] = []
    kept: list[CompileRecord] = []

    def metadata(name: str) -> dict[str, str]:
        return {"name": name, "encoding": "string"}

    def payload(name: str) -> str:
        records.append(name)
        return f"{name} password=hunter22 of you"

    def raise_runtime_error() -> dict[str, str]:
        raise RuntimeError("torch's own")

    handler = CompileLogHandler(kept.append)
    logger = logging.getLogger(LOGGER)
    before = logger.handlers
    logger.handlers = []
    try:
        handler.install()
        for name in ("fx_graph_runnable", "recompile_reasons"):
            trace_structured("artifact", partial(metadata, name), payload_fn=partial(payload, name))
        trace_structured("aot_joint_graph", payload_fn=lambda: payload("graph"))
        trace_structured("artifact", raise_runtime_error)
        handler.remove()
        late = partial(metadata, "recompile_reasons")
        trace_structured("artifact", late, payload_fn=partial(payload, "late"))
    finally:
        logger.handlers = before
    assert records == ["recompile_reasons"] and len(kept) == 1
    assert b"recompile_reasons" in kept[0].text and b"hunter22" not in kept[0].text


def test_a_log_is_bounded_and_no_error_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.recorder.framework_logs.MAX_LOG_BYTES", 1 << 20)
    kept: list[CompileRecord] = []
    handler = CompileLogHandler(kept.append)
    long = logging.makeLogRecord(
        {"metadata": {"dynamo_output_graph": {}}, "payload": "add = \n" * (1 << 17)}
    )
    for _ in range(9):
        handler.emit(long)
    assert max(len(each.text) for each in kept) <= 256 << 10
    assert sum(len(each.text) for each in kept) <= (1 << 20) + (256 << 10)
    other = CompileLogHandler(kept.append)
    other.emit(logging.makeLogRecord({"metadata": object()}))
    other.emit(long)  # after an error it is silent
    assert len(kept) < 9
