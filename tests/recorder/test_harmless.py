"""Training with a recorder is training without one: same numbers, same exceptions, same exit."""

from __future__ import annotations

import copy
import errno
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.core.run_directory import STEPS, read_recording
from advisor.recorder import loaders as batch_module
from advisor.recorder import session as sessions
from advisor.recorder.api import Recorder
from advisor.recorder.writer import END_BYTES

torch = pytest.importorskip("torch")

QUIET: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False}


def entry_points() -> dict[str, Any]:
    """The functions that hooks replace, as they are now."""
    from torch.utils.data import DataLoader, dataloader

    return {
        "next": dataloader._BaseDataLoaderIter.__next__,
        "iter": DataLoader.__iter__,
        "call": torch.nn.Module.__call__,
        "to": torch.Tensor.to,
        "cuda": torch.Tensor.cuda,
        "backward": torch.autograd._engine_run_backward,
        "scaler": torch.amp.GradScaler.step,
        "save": torch.save,
        "own to": "to" in vars(torch.Tensor),
    }


def test_everything_is_put_back(training: Any, tmp_path: Path) -> None:
    before = entry_points()
    with Recorder(str(tmp_path / "run"), **QUIET):
        assert entry_points() != before
        training.learn((torch.randn(2, 4), torch.randn(2, 1)))
    assert entry_points() == before


class TaggedTensor(torch.Tensor):
    """Stays what it is when it is moved, and only then: as torchvision's boxes and masks."""

    kept = frozenset((torch.Tensor.to, torch.Tensor.cuda))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        stays = func in cls.kept
        assert stays == (func is torch.Tensor.to or func is torch.Tensor.cuda)
        return result.as_subclass(cls if stays else torch.Tensor)


def test_overrides_see_the_original_method(training: Any, tmp_path: Path) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET):
        for _ in range(6):  # with the first hooks, and those that come after some steps
            marked = torch.zeros(2).as_subclass(TaggedTensor)
            assert type(marked.to("meta")) is type(marked.to(torch.float64)) is TaggedTensor
            assert type(marked + 1) is torch.Tensor
            torch.nn.LazyLinear(3).to("cpu").to("meta").to(torch.float64)
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))


def test_model_holding_patched_functions_can_be_saved(training: Any, tmp_path: Path) -> None:
    def model_with_replaced_functions() -> Any:
        model = torch.nn.Linear(1, 1)
        model.held = [  # type: ignore[assignment]
            functools.partial(torch.autograd.grad, create_graph=True),
            torch.autograd.backward,
            torch.Tensor.to,
            torch.Tensor.cuda,
        ]
        return model

    def check_saved(model: Any, name: str) -> None:
        x = torch.ones(1, requires_grad=True)
        torch.save(model, tmp_path / name)
        loaded = torch.load(tmp_path / name, weights_only=False)
        for twin in (model, copy.deepcopy(model), loaded):
            assert twin.held[0]((x * 3).sum(), x)[0].item() == 3
            assert twin.held[2](x, torch.float64).dtype == torch.float64
            assert twin.held[2] == torch.Tensor.to

    before = model_with_replaced_functions()
    with Recorder(str(tmp_path / "run"), **QUIET):
        early = model_with_replaced_functions()
        for _ in range(6):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
        late = model_with_replaced_functions()
        for number, model in enumerate((before, early, late)):
            check_saved(model, f"inside{number}")
        assert weakref.ref(torch.Tensor.to)() is torch.Tensor.to
    for number, model in enumerate((before, early, late)):
        check_saved(model, f"after{number}")


def test_losses_and_weights_are_bit_identical(training: Any, tmp_path: Path) -> None:
    def run() -> list[Any]:
        fresh = type(training)()
        losses = []
        torch.manual_seed(1)
        for _ in range(2):
            for batch in fresh.loader(15, shuffle=True):
                fresh.optimizer.zero_grad()
                loss = fresh.loss(batch) + 0.01 * torch.rand(())  # the generator's state counts
                loss.backward()
                fresh.optimizer.step()
                losses.append(loss.item())
            fresh.validate(fresh.loader(3))
        return [losses, [p.detach().clone() for p in fresh.net.parameters()], torch.rand(3)]

    plain = run()
    options = {"skip": 3, "warmup": 1, "active": 4, "deep": True, "guard": 1e9, "report": False}
    with Recorder(str(tmp_path / "run"), **options):
        recorded = run()
    assert (tmp_path / "run" / "rank0" / "trace_w0.json.gz").is_file()
    assert recorded[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(recorded[1], plain[1], strict=True))
    assert torch.equal(recorded[2], plain[2])


def test_an_exception_goes_on_untouched(training: Any, tmp_path: Path) -> None:
    error = KeyError("mine")
    recorder = Recorder(str(tmp_path / "run"), **QUIET)
    with pytest.raises(KeyError) as raised, recorder as rec:
        for number, batch in enumerate(rec.steps(training.loader(6))):
            with rec.phase("augment"):
                if number == 3:
                    raise error
            training.learn(batch)
    assert raised.value is error
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 3
    (end,) = record.events_of("end")
    expected = {"steps": 3, "reason": "exception", "exception": "KeyError", "message": "'mine'"}
    assert end == expected


def test_a_phase_that_raises_and_is_caught_is_closed(training: Any, tmp_path: Path) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET) as rec:
        for batch in rec.steps(training.loader(4)):
            try:
                with rec.phase("outer"), rec.phase("inner"):
                    raise ValueError
            except ValueError:
                time.sleep(0.005)
            training.learn(batch)
    for step in only_rank(tmp_path / "run").steps:
        assert step.phases["other"] >= 5e6


def test_out_of_memory_is_reported_and_goes_on(training: Any, tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
    with pytest.raises(torch.OutOfMemoryError) as raised, Recorder(str(tmp_path / "run"), **QUIET):
        for number, batch in enumerate(training.loader(6)):
            if number == 4:
                raise error
            training.learn(batch)
    assert raised.value is error
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 4
    (oom,) = record.events_of("oom")
    assert oom["message"] == str(error)
    assert oom["snapshot"] is None  # no GPU, no allocator


def test_second_recorder_warns_and_does_nothing(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Recorder(str(tmp_path / "inner"), **QUIET)
    with Recorder(str(tmp_path / "outer"), **QUIET):
        for _ in range(3):
            with inner as rec:
                for batch in training.loader(2):
                    with rec.phase("mine"):
                        training.learn(batch)
    assert not (tmp_path / "inner").exists()
    assert len(only_rank(tmp_path / "outer").steps) == 6
    assert [r for r in caplog.messages if "already recording" in r] == [caplog.messages[0]]


def test_two_runs_never_share_a_directory(training: Any, tmp_path: Path) -> None:
    for _ in range(3):
        with Recorder(str(tmp_path / "run"), **QUIET):
            for batch in training.loader(2):
                training.learn(batch)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run_2", "run_3"]
    for path in tmp_path.iterdir():
        assert len(only_rank(path).steps) == 2


def test_unwritable_directory_gives_one_warning(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with Recorder(str(tmp_path / "file" / "run"), **QUIET):
        for batch in training.loader(20):
            training.learn(batch)
            time.sleep(0.01)
    assert len(caplog.messages) == 1
    assert "training goes on" in caplog.messages[0]
    assert sessions.current_session() is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_gives_one_warning_and_keeps_written_data(
    training: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    real, is_full, pieces = os.write, threading.Event(), [0]
    steps = tmp_path / "run" / "rank0" / STEPS

    def write_until_full(descriptor: int, data: Any) -> int:
        if threading.current_thread().name != "advisor writer":
            return real(descriptor, data)
        pieces[0] += is_full.is_set()
        if pieces[0] > 1:
            raise OSError(code, os.strerror(code))
        return real(descriptor, bytes(data)[:700])  # the disk takes a part, then nothing

    monkeypatch.setattr("advisor.recorder.writer.os.write", write_until_full)
    seen, until = 0, time.monotonic() + 60
    with Recorder(str(tmp_path / "run"), **QUIET):
        for epoch in range(10):
            for batch in training.loader(20):
                training.learn(batch)
                seen += 1
            while epoch == 4 and time.monotonic() < until and not is_full.is_set():
                time.sleep(0.01)
                if steps.exists() and steps.stat().st_size > 2 * END_BYTES:  # more than is dropped
                    is_full.set()
    monkeypatch.undo()
    assert seen == 200
    assert [m for m in caplog.messages if "training goes on" in m] == caplog.messages
    assert len(caplog.messages) == 1
    recording = read_recording(tmp_path / "run")
    check_sums(recording.ranks[0])
    assert 0 < len(recording.ranks[0].steps) < 200
    assert all("1 damaged line" in problem for problem in recording.problems)


def in_a_dictionary(samples: list[Any]) -> dict[str, Any]:
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def test_failing_hook_ends_only_the_recording(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(str(tmp_path / "run"), **QUIET)
    with recorder:
        session = recorder._session
        assert session is not None
        for number, batch in enumerate(training.loader(20, collate_fn=in_a_dictionary)):
            if number == 5:
                monkeypatch.setattr(batch_module, "_collect_tensors", lambda *_: 1 / 0)
            training.learn((batch["x"], batch["y"]))
    assert len(caplog.messages) == 1
    assert "ZeroDivisionError" in caplog.messages[0]
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 6
    assert record.events_of("error")


def test_disabled_recorder_patches_nothing(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISOR", "0")
    before = entry_points()
    with Recorder(str(tmp_path / "run"), **QUIET) as rec:
        assert entry_points() == before
        assert rec.path is None
        for batch in rec.steps(training.loader(3)):
            with rec.phase("mine"):
                training.learn(batch)
            rec.step()
    assert list(tmp_path.iterdir()) == []


def test_a_child_forked_in_a_window_is_not_recorded(training: Any, tmp_path: Path) -> None:
    with Recorder(
        str(tmp_path / "run"), skip=2, warmup=1, active=6, report=False, guard=1e9
    ) as rec:
        recorder = rec
        for number, batch in enumerate(training.loader(20)):
            training.learn(batch)
            if number < 3:
                while recorder.path is None:
                    time.sleep(0.01)
            if number == 5:
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        training.learn(batch)
                        code = 0 if sessions.current_session() is None else 2
                    finally:
                        os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 20
    assert record.events_of("window")[-1]["state"] == "done"


def test_loader_worker_processes_are_not_recorded(training: Any, record_run: Any) -> None:
    record = record_run(
        lambda: [training.learn(batch) for batch in training.loader(6, num_workers=2)]
    )
    assert len(record.steps) == 6
    (loader,) = record.events_of("loader")
    assert (loader["workers"], loader["batch_size"], loader["length"]) == (2, 2, 6)
    (iterated,) = record.events_of("loader_iter")
    assert iterated["workers_started_ns"] > 0
    assert iterated["evaluation"] is False


KILLED = """
import os, random, signal, sys, time
import torch
import torch._dynamo  # the first step would load it, in every child anew
import advisor
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
run, rng = sys.argv[1], random.Random(7)

def train(first_step):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    with advisor.record(run, skip=50, active=20, warmup=1, report=False):
        while True:
            for x, y in DataLoader(data, batch_size=2):
                optimizer.zero_grad()
                ((net(x) - y) ** 2).mean().backward()
                optimizer.step()
                os.write(first_step, b".")
                time.sleep(0.002)

for _ in range(5):
    together = []
    for _ in range(4):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            train(write)
        os.close(write)
        os.read(read, 1)
        together.append((time.monotonic() + rng.uniform(0.0, 3.0), child, read))
    for at, child, read in sorted(together):
        time.sleep(max(0.0, at - time.monotonic()))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_can_be_read(program: Any, tmp_path: Path) -> None:
    """Twenty runs, each killed with SIGKILL at a random time since its first step."""
    result = program(KILLED, str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    runs = sorted(tmp_path.glob("run*"))
    assert len(runs) == 20
    read = 0
    for run in runs:
        if not (run / "manifest.json").exists():
            continue  # killed while the run was being described, in its first moments
        recording = read_recording(run)
        assert all("damaged line" in p or "rank.json" in p for p in recording.problems)
        for record in recording.ranks.values():
            check_sums(record)
            assert not record.has_ended
            read += bool(record.steps)
    assert read >= 10
    with_trace = [run for run in runs if list(run.glob("rank0/trace_w*.json.gz"))]
    without = [run for run in runs if run not in with_trace and (run / "manifest.json").exists()]
    assert with_trace
    for run in (with_trace[0], *without[:1]):
        result = program(
            "", before=("-m", "advisor", "analyze", str(run)), after=("--format=json",)
        )
        assert "Traceback" not in result.stderr
        assert result.stdout


def test_warnings_name_the_same_lines_as_without_recording(training: Any, tmp_path: Path) -> None:
    """Whatever their stack level: our wrappers are no frames of the program."""

    def warn_at_all_levels(text: str) -> None:
        for level in range(1, 9):
            warnings.warn(f"{text} {level}", stacklevel=level)

    def collate(rows: list[Any]) -> Any:
        warn_at_all_levels("collate")
        return torch.utils.data.default_collate(rows)

    def train() -> None:
        warn_at_all_levels("train")
        hook = training.net.register_forward_hook(lambda *_: warn_at_all_levels("forward"))
        tensor = training.net[0].weight.register_hook(lambda _: warn_at_all_levels("backward"))
        for batch in training.loader(4, collate_fn=collate):
            training.learn(batch)
        hook.remove()
        tensor.remove()

    def lines(function: Callable[[], None]) -> list[tuple[str, str, int]]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            function()
        return [(str(w.message), w.filename, w.lineno) for w in seen if "Deprecat" not in str(w)]

    recorded = Recorder(out=str(tmp_path / "run"), report=False, active=0)(train)
    assert lines(recorded) == lines(train)
