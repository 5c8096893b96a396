"""The recorder's API: decorator with and without options, context manager, explicit steps."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

import advisor
from advisor.recorder import session as sessions
from advisor.recorder.api import Recorder
from advisor.recorder.options import RecordOptions, resolve_options

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timed

QUIET: dict[str, Any] = {"active": 0, "telemetry": 0.0, "report": False}
BATCH = (torch.ones(2, 4), torch.ones(2, 1))


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    profile = advisor.profile(str(tmp_path / "run"), **QUIET)
    assert isinstance(profile, Recorder)
    yield profile
    profile.close()


def steps(tmp_path: Path, recorder: Recorder) -> int:
    recorder.close()
    record = only_rank(tmp_path / "run")
    check_sums(record)
    return len(record.steps)


def test_a_train_function_is_identified_by_the_loop_in_it(
    recorder: Recorder, training: Any, tmp_path: Path
) -> None:
    @recorder
    def train(epochs: int, *, sign: int = 1) -> int:
        """Trains."""
        for _ in range(epochs):
            for batch in training.loader(5):
                training.learn(batch)
        return epochs * sign

    assert train.__doc__ == "Trains."
    assert train(2, sign=-1) == -2
    # its loop is over: what follows is not recorded
    assert sessions.current_session() is not None
    assert not sessions.current_session().listening
    for _ in range(3):
        training.learn(BATCH)
    assert train(1) == 1
    assert steps(tmp_path, recorder) == 15
    assert only_rank(tmp_path / "run").events_of("end")[-1] == {"steps": 15, "reason": "finished"}


@pytest.mark.parametrize("loader", [True, False])
@pytest.mark.parametrize("step", [True, None])
def test_a_train_step_is_identified_by_being_called_again(
    training: Any, tmp_path: Path, loader: bool, step: bool | None
) -> None:
    recorder = Recorder(str(tmp_path / "run"), step=step, **QUIET)

    @recorder
    def train_step(batch: Any) -> None:
        training.learn(batch)

    for batch in training.loader(8) if loader else [BATCH] * 8:
        train_step(batch)
    assert steps(tmp_path, recorder) == 8


def test_a_train_step_without_any_optimizer(training: Any, tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "run"), step=True, **QUIET)

    @recorder
    def run_inference(batch: Any) -> None:
        with torch.no_grad():
            training.net(batch[0])

    for _ in range(4):
        run_inference(BATCH)
    assert steps(tmp_path, recorder) == 4


def test_a_train_step_that_raises_may_be_called_again(
    recorder: Recorder, training: Any, tmp_path: Path
) -> None:
    @recorder
    def train_step(number: int) -> None:
        if number == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        training.learn(BATCH)

    for number in range(6):
        with contextlib.suppress(torch.OutOfMemoryError):
            train_step(number)
    assert steps(tmp_path, recorder) == 5
    record = only_rank(tmp_path / "run")
    assert len(record.events_of("oom")) == 1
    assert record.events_of("end")[-1]["reason"] == "finished"


def test_decorated_generators_are_recorded_while_running(
    recorder: Recorder, training: Any, tmp_path: Path
) -> None:
    @recorder
    def losses(count: int) -> Any:
        got = None
        for _ in range(count):
            training.learn(BATCH)
            got = yield got
        return "done"

    generator = losses(4)
    assert sessions.current_session() is None  # nothing has run yet
    assert next(generator) is None
    assert generator.send("a") == "a"
    assert generator.send("b") == "b"
    assert next(generator) is None
    with pytest.raises(StopIteration) as stopped:
        next(generator)
    assert stopped.value.value == "done"
    assert steps(tmp_path, recorder) == 4


def test_coroutines_and_asynchronous_generators(
    recorder: Recorder, training: Any, tmp_path: Path
) -> None:
    @recorder
    async def train(count: int) -> str:
        for _ in range(count):
            await asyncio.sleep(0)
            training.learn(BATCH)
        return "done"

    @recorder
    async def stream(count: int) -> Any:
        for number in range(count):
            training.learn(BATCH)
            try:
                yield number
            except ValueError:
                yield "caught"

    async def main() -> None:
        assert await train(3) == "done"
        assert [value async for value in stream(3)] == [0, 1, 2]
        generator = stream(2)
        assert await anext(generator) == 0
        assert await generator.athrow(ValueError()) == "caught"
        assert await anext(generator) == 1
        await generator.aclose()

    with ThreadPoolExecutor(1) as pool:  # Playwright's loop may still be open in this thread
        pool.submit(asyncio.run, main()).result()
    assert steps(tmp_path, recorder) == 8


def test_steps_of_a_loader_are_its_batches(tmp_path: Path, training: Any) -> None:
    with advisor.record(str(tmp_path / "run"), **QUIET) as rec:
        for batch in rec.steps(training.loader(5)):
            training.learn(batch)
        training.validate(training.loader(3))
        for number, batch in enumerate(rec.steps([BATCH] * 6)):  # any iterable
            training.learn(batch)
            if number == 3:
                break
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 9
    assert all("data" in step.phases for step in record.steps)
    assert record.steps[5].evaluation > 0
    assert record.steps[0].samples == 2


def test_steps_without_training_are_recorded(tmp_path: Path, training: Any) -> None:
    with advisor.record(str(tmp_path / "run"), **QUIET) as rec:
        for _ in rec.steps(training.loader(5)):
            time.sleep(0.001)
    assert len(only_rank(tmp_path / "run").steps) == 5


@pytest.mark.parametrize("loader", [True, False])
def test_explicit_steps(tmp_path: Path, training: Any, loader: bool) -> None:
    with advisor.record(str(tmp_path / "run"), **QUIET):
        for batch in training.loader(7) if loader else [BATCH] * 7:
            with advisor.phase("augment"):
                time.sleep(0.003)
            training.learn(batch)
            advisor.step()
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 7
    assert all(step.phases["augment"] >= 3e6 for step in record.steps[1:])


def test_a_phase_of_a_known_name_is_that_phase(tmp_path: Path, training: Any) -> None:
    with advisor.record(str(tmp_path / "run"), **QUIET) as rec:
        for batch in rec.steps(training.loader(3)):
            with rec.phase("forward"):
                time.sleep(0.003)
                training.loss(batch)
    for step in only_rank(tmp_path / "run").steps:
        assert step.phases["forward"] >= 3e6
        assert set(step.phases) <= {"forward", "data", "other"}


def test_names_made_up_for_each_step_do_not_grow_without_end(tmp_path: Path, training: Any) -> None:
    with advisor.record(str(tmp_path / "run"), **QUIET) as rec:
        for number, batch in enumerate(rec.steps(training.loader(32))):
            for part in range(4):
                with rec.phase(f"{number}/{part}"):
                    pass
            training.learn(batch)
        session = rec._session
        assert session is not None
        assert len(session.tape.names) == 64
    check_sums(only_rank(tmp_path / "run"))


def test_api_does_nothing_outside_a_recording(training: Any) -> None:
    advisor.step()
    with advisor.phase("forward"):
        training.learn(BATCH)
    assert list(Recorder().steps([1, 2])) == [1, 2]


def test_another_thread_can_train(tmp_path: Path, training: Any) -> None:
    def work() -> None:
        with advisor.record(str(tmp_path / "run"), **QUIET):
            for batch in training.loader(4):
                training.learn(batch)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(only_rank(tmp_path / "run").steps) == 4


def test_wrong_option_is_reported_at_the_callers_line() -> None:
    with pytest.raises(TypeError, match="no such option: activ"):
        advisor.record(activ=3)


def test_options_come_from_keywords_environment_and_pyproject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.advisor.record]\nskip = 20\nactive = 7\nshapes = false\nwarmup = "many"\nfoo = 1\n'
    )
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    monkeypatch.setenv("ADVISOR_ACTIVE", "8")
    monkeypatch.setenv("ADVISOR_DEEP", "yes")
    monkeypatch.setenv("ADVISOR_WINDOWS", "-1")
    options = resolve_options(ranks="all", skip=None)
    default = RecordOptions()
    assert (options.skip, options.active, options.shapes) == (20, 8, False)
    assert (options.deep, options.ranks) == (True, "all")
    assert (options.warmup, options.windows) == (default.warmup, default.windows)
    assert len(caplog.messages) == 3  # many, foo and -1


def test_every_option_is_documented() -> None:
    source = Path(sys.modules[RecordOptions.__module__].__file__ or "").read_text("utf-8")
    for name in RecordOptions.__dataclass_fields__:
        after = source.split(f"\n    {name}: ", 1)[1].split("\n", 1)[1]
        assert after.startswith('    """'), name


def test_recorder_imports_neither_polars_nor_dash(tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import advisor\n"
        "with advisor.record('run', report=False): pass\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new & {'polars', 'dash', 'plotly', 'typer', 'rich', 'scalene'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout.strip() == "[]"


def test_a_recording_after_a_decorated_function_has_returned(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The decorator's recording steps aside: both are whole."""

    @Recorder(str(tmp_path / "first"), **QUIET)
    def train() -> None:
        for batch in training.loader(9):
            training.learn(batch)

    train()
    with Recorder(str(tmp_path / "second"), **QUIET):
        for batch in training.loader(7):
            training.learn(batch)
    assert not caplog.text
    assert len(only_rank(tmp_path / "first").steps) == 9
    assert len(only_rank(tmp_path / "second").steps) == 7


def test_a_decorated_step_steps_aside_and_comes_back(training: Any, tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "steps"), **QUIET)
    train_step = recorder(training.learn)
    for batch in training.loader(6):
        train_step(batch)
    with Recorder(str(tmp_path / "loop"), **QUIET):
        for batch in training.loader(5):
            training.learn(batch)
    for batch in training.loader(4):
        train_step(batch)
    recorder.close()
    assert len(only_rank(tmp_path / "steps").steps) == 6
    assert len(only_rank(tmp_path / "loop").steps) == 5
    assert len(only_rank(tmp_path / "steps_2").steps) == 4


def test_a_decorated_loop_at_a_prompt_ends_its_recording(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)

    @Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False)
    def train() -> None:
        for batch in training.loader(9):
            training.learn(batch)

    train()
    assert "recorded in" in capfd.readouterr().err
    train()
    assert len(only_rank(tmp_path / "run").steps) == 9
    assert len(only_rank(tmp_path / "run_2").steps) == 9


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.2.1", False),
        ("1.13.1+cu117", False),
        ("2.4.0", True),
        ("2.13.0+cpu", True),
        ("from source", True),
    ],
)
def test_too_old_torch_is_one_line_error(
    version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with Recorder(str(tmp_path / "run"), **QUIET) as recorder:
        assert (recorder._session is not None) is fits
    assert fits or caplog.messages == [
        f"advisor: not recording: torch {version} is too old to be recorded: 2.4 is the oldest"
    ]


def test_oldest_supported_torch_matches_the_metadata() -> None:
    from advisor.recorder.options import OLDEST_TORCH

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, OLDEST_TORCH))}"' in text


def test_an_inner_failure_is_repeated_at_the_end(
    training: Any, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(str(tmp_path / "run"), **QUIET) as recorder:
        for number, batch in enumerate(training.loader(9)):
            training.learn(batch)
            if number == 4:
                recorder._session.on_internal_error(RuntimeError("on purpose"))
    error = " ".join(capfd.readouterr().err.split())
    assert "recording stopped early: RuntimeError: on purpose. Recorded until then" in error
