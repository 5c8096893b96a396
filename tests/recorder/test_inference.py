"""Loops that do not train are found: steps recorded are steps run, and nothing else changes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.recorder import session

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timed
Recorded = Callable[..., Any]
MAX_UNREAD = 200
"""Entries of the tape: some fifteen iterations."""


@pytest.fixture
def record(record_run: Recorded, training: Any) -> Callable[..., Any]:
    """``record(loop)``: what was recorded of ``loop(training)``."""
    training.net.eval()
    return lambda loop, **options: record_run(lambda: loop(training), **options)


def infer_plainly(t: Any) -> None:
    with torch.no_grad():
        for x, _ in t.loader(20):
            t.net(x)


def in_inference_mode_with_workers(t: Any) -> None:
    with torch.inference_mode():
        for x, _ in t.loader(20, num_workers=1):
            t.net(x).argmax(-1)


def without_no_grad(t: Any) -> None:
    for _ in range(20):
        t.net(t.x)


def without_a_loader(t: Any) -> None:
    with torch.no_grad():
        for _ in range(20):
            t.net(t.x)


def batches_fetched_ahead(t: Any) -> None:
    with torch.no_grad():
        batches = iter(t.loader(20))
        ahead = next(batches)
        for batch in batches:
            t.net(ahead[0])
            ahead = batch
        t.net(ahead[0])


def one_batch_again_and_again(t: Any) -> None:
    x, _ = next(iter(t.loader(20)))
    with torch.no_grad():
        for _ in range(20):
            t.net(x)


def two_models_taking_turns(t: Any) -> None:
    encoder = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for _ in range(20):
            t.net(encoder(t.x))


def infer_five_times_per_batch(t: Any) -> None:
    with torch.no_grad():
        for x, _ in t.loader(20):
            torch.stack([t.net(x) for _ in range(5)]).mean(0)


def a_transform_before_each_forward(t: Any) -> None:
    class Scale(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    scale = Scale()
    with torch.no_grad():
        for _ in range(20):
            t.net(scale(t.x))


@pytest.mark.parametrize(
    "loop",
    [
        infer_plainly,
        in_inference_mode_with_workers,
        without_no_grad,
        without_a_loader,
        batches_fetched_ahead,
        one_batch_again_and_again,
        two_models_taking_turns,
        infer_five_times_per_batch,
        a_transform_before_each_forward,
    ],
)
def test_each_iteration_is_a_step(loop: Any, record: Any) -> None:
    rank_record = record(loop)
    assert rank_record.inference
    assert len(rank_record.steps) == 20
    assert all(step.phases.get("forward", 0) > 0 for step in rank_record.steps)
    assert not any(step.phases.keys() & {"backward", "optimizer"} for step in rank_record.steps)
    assert rank_record.events_of("end") == [{"steps": 20, "reason": "finished"}]


def warm_up(t: Any) -> None:
    """Loads the libraries' kernels, as some programs do first: backwards without an optimizer."""
    for _ in range(5):
        t.loss((t.x, t.y)).backward()


def train_briefly(t: Any) -> None:
    for batch in t.loader(4):
        t.learn(batch)
    t.net.eval()


def pause() -> None:
    """Sleep as long as an iteration may take. The recorder checks five times a second, on a busy
    machine less often: then the loop waits for that."""
    time.sleep(0.01)
    own_session = session.current_session()
    late = time.monotonic() + 5
    while (
        own_session is not None
        and len(own_session.tape.log) > MAX_UNREAD
        and time.monotonic() < late
    ):
        time.sleep(0.01)


def functions_between_activations(t: Any) -> None:
    """A model's weights used by functions: only its activations are called."""
    layers = [*torch.nn.Sequential(*(torch.nn.GELU() for _ in range(3)))]
    with torch.no_grad():
        for _ in range(60):
            h = t.x
            for layer in layers:
                h = layer(torch.nn.functional.linear(h, torch.eye(4)))
            pause()


def layers_of_no_root(t: Any) -> None:
    with torch.no_grad():
        for _ in range(60):
            h = t.x
            for layer in t.net:
                h = layer(h)
            pause()


def long_plain(t: Any) -> None:
    with torch.no_grad():
        for _ in range(3):
            for x, _ in t.loader(20):
                t.net(x)
                pause()


def long_with_graphs(t: Any) -> None:
    for _ in range(3):
        for x, _ in t.loader(20):
            t.net(x)
            pause()


@pytest.mark.parametrize("before", [None, warm_up, train_briefly])
@pytest.mark.parametrize(
    "loop", [long_plain, long_with_graphs, functions_between_activations, layers_of_no_root]
)
def test_a_loop_that_follows_little_training_is_found(before: Any, loop: Any, record: Any) -> None:
    def program(t: Any) -> None:
        if before is not None:
            before(t)
        loop(t)

    rank_record = record(program)
    assert rank_record.inference
    # after training, forwards are looked at again once there were many
    assert (15 if before else 57) <= len(rank_record.steps) <= 61
    assert not any(step.phases.keys() & {"backward", "optimizer"} for step in rank_record.steps)


def test_a_loop_that_follows_little_training_is_profiled(record: Any) -> None:
    def program(t: Any) -> None:
        warm_up(t)
        long_plain(t)

    rank_record = record(program, active=3, shapes=False)
    windows = [event for event in rank_record.events_of("window") if event["state"] == "done"]
    assert [event["reason"] for event in windows] == ["schedule"]
    assert sum(step.window is not None for step in rank_record.steps) >= 3


def test_training_continued_after_validation_is_training(record: Any) -> None:
    def program(t: Any) -> None:
        train_briefly(t)
        long_plain(t)
        t.net.train()
        for batch in t.loader(20):
            t.learn(batch)

    rank_record = record(program)
    assert not rank_record.inference
    assert len(rank_record.steps) >= 20 and all(
        "optimizer" in step.phases for step in rank_record.steps
    )


def test_a_training_keeps_its_steps_whatever_follows(record: Any) -> None:
    def program(t: Any) -> None:
        for batch in t.loader(30):
            t.learn(batch)
        for _ in range(5):
            long_plain(t)

    rank_record = record(program)
    assert not rank_record.inference and len(rank_record.steps) == 30


def test_transforms_before_a_model_are_not_steps(record: Any) -> None:
    def program(t: Any) -> None:
        scale = torch.nn.Identity()
        batches = [scale(t.x) for _ in range(40)]
        with torch.no_grad():
            for x in batches[:20]:
                t.net(x)

    rank_record = record(program)
    assert rank_record.inference and len(rank_record.steps) == 20


def test_graphs_of_a_loop_that_never_trains_are_counted(record: Any) -> None:
    rank_record = record(without_no_grad)
    assert [step.unused_graphs for step in rank_record.steps] == [1] * 20
    assert not any(step.unused_graphs for step in record(without_a_loader).steps)


def test_a_step_holds_the_wait_for_its_batch(record: Any) -> None:
    rank_record = record(infer_plainly)
    assert all(step.phases["data"] > 0 and step.samples == 2 for step in rank_record.steps)


def test_several_loops_follow_each_other(record: Any) -> None:
    def loops(t: Any) -> None:
        infer_plainly(t)
        without_a_loader(t)
        infer_plainly(t)

    assert len(record(loops).steps) == 60


def call_once(t: Any) -> None:
    t.net(t.x)


def only_transforms(t: Any) -> None:
    for _ in range(20):
        torch.nn.ReLU()(t.x)


def infer_without_the_model(t: Any) -> None:
    with torch.no_grad():
        for x, _ in t.loader(30):
            _ = x @ x.T
        for x, _ in t.loader(5):
            t.net(x)


@pytest.mark.parametrize("program", [call_once, only_transforms, infer_without_the_model])
def test_calls_outside_a_loop_of_a_model_are_no_steps(program: Any, record: Any) -> None:
    rank_record = record(program)
    assert rank_record.steps == []
    assert not rank_record.inference


def validated_first(t: Any) -> None:
    for _ in range(2):
        t.validate(t.loader(20))
        own_session = session.current_session()
        assert own_session is not None
        if own_session.windows._export is not None:
            # one trace is written at a time; these steps are short
            own_session.windows._export.join()
        for batch in t.loader(10):
            t.learn(batch)


def test_a_training_is_recorded_as_if_it_had_not_been_validated(record: Any, training: Any) -> None:
    """The training keeps its steps, its windows and their traces; the first validation is not
    kept as a loop."""
    rank_record = record(validated_first, skip=2, warmup=1, active=2)
    assert not rank_record.inference
    assert [step.n for step in rank_record.steps] == list(range(20))
    assert all(step.phases["backward"] > 0 for step in rank_record.steps)
    assert [bool(step.evaluation) for step in rank_record.steps] == [True, *[False] * 9] * 2
    (window,) = [w for w in rank_record.events_of("window") if w["state"] == "done"]
    assert window["steps"] == [3, 4]
    traces = sorted(path.name for path in Path(rank_record.folder).iterdir())
    assert [name for name in traces if "trace" in name] == [window["file"]]
    assert "inference.jsonl" not in traces


@pytest.mark.parametrize("options", [{}, {"deep": True}])
@pytest.mark.parametrize("loop", [infer_plainly, without_a_loader])
def test_a_window_holds_whole_steps(loop: Any, options: Any, record: Any) -> None:
    """The windows are whole with Python stacks too, during which a forward cannot be seen."""
    rank_record = record(loop, skip=3, warmup=1, active=3, **options)
    assert len(rank_record.steps) == 20
    (window,) = [w for w in rank_record.events_of("window") if w["state"] == "done"]
    assert window["steps"] == [4, 6]
    from advisor.read import open_run

    trace = open_run(rank_record.folder).traces[0, 0]
    names = [str(name) for name in trace.cpu["name"]]
    steps = {name for name in names if name.startswith("ProfilerStep")}
    assert sorted(steps) == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
    assert names.count("aten::addmm") == 3 * 2


PROGRAM = """
import hashlib, sys
import torch
torch.set_num_threads(1)
digest = hashlib.sha256()
def tell(tensor):
    digest.update(tensor.detach().contiguous().numpy().tobytes())
def run(what):
    torch.manual_seed(0)
    if what in ("generate", "pipeline", "evaluate"):
        from transformers import GPT2Config, GPT2LMHeadModel
        config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=32,
                            bos_token_id=0, eos_token_id=None)
        model = GPT2LMHeadModel(config).eval()
        ids = torch.ones(1, 3, dtype=torch.long)
    if what == "generate":
        for n in range(7):
            tell(model.generate(ids, max_new_tokens=4, do_sample=True, pad_token_id=0))
    elif what == "pipeline":
        class Pipeline:
            def __call__(self, texts):
                for text in texts:
                    with torch.inference_mode():
                        ids = torch.tensor([[ord(c) % 32 for c in text]])
                        yield model(ids).logits[:, -1].argmax(-1)
        for answer in Pipeline()(["some text"] * 9):
            tell(answer)
    elif what == "evaluate":  # generates before, and while, it trains
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for n in range(5):
                tell(model.generate(ids, max_new_tokens=2, do_sample=True, pad_token_id=0))
            for n in range(6):
                optimizer.zero_grad()
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                tell(loss)
    elif what == "once":
        tell(torch.nn.Linear(4, 4)(torch.ones(2, 4)))
for what in sys.argv[1:]:
    digest = hashlib.sha256()
    run(what)
    print(what, digest.hexdigest())
raise SystemExit(5)
"""


KINDS = [
    ("generate", 7),
    pytest.param("pipeline", 9, marks=pytest.mark.thorough),
    ("evaluate", 12),
    ("once", 0),
]


def ends_with_5(folder: Path, *words: str) -> Any:
    result = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert result.returncode == 5, result.stderr
    return result


@pytest.fixture(scope="module")
def expected_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines that the programs print by themselves: all in one process, which starts in seconds."""
    folder = tmp_path_factory.mktemp("unrecorded")
    (folder / "infer.py").write_text(PROGRAM)
    kinds = ["once"]
    if importlib.util.find_spec("transformers") is not None:
        kinds += ["generate", "evaluate", *["pipeline"] * bool(os.environ.get("ADVISOR_THOROUGH"))]
    lines: list[str] = ends_with_5(folder, "infer.py", *kinds).stdout.splitlines()
    assert len(lines) == len(kinds)
    return lines


@pytest.mark.parametrize(("what", "steps"), KINDS)
def test_programs_under_the_command(
    what: str, steps: int, tmp_path: Path, expected_lines: list[str]
) -> None:
    if what != "once":
        pytest.importorskip("transformers")
    (tmp_path / "infer.py").write_text(PROGRAM)
    before = ("-m", "advisor", "record", "--no-report", "-o", "run")
    result = ends_with_5(tmp_path, *before, "infer.py", what)
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{what} ") and line in expected_lines
    if not steps:
        assert "only 1 forward" in " ".join(result.stderr.split())
        assert not (tmp_path / "run").exists()
        return
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == steps
    assert record.inference == (what != "evaluate")


LONG_CALLS = """
import time, torch
from transformers import GPT2Config, GPT2LMHeadModel, StoppingCriteria, StoppingCriteriaList

config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=64,
                    bos_token_id=0, eos_token_id=None)
model = GPT2LMHeadModel(config).eval()

class Slow(StoppingCriteria):
    def __call__(self, input_ids, scores, **others):
        time.sleep(0.06)
        return torch.zeros(1, dtype=torch.bool)

for tokens in (4, 50, 20):
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=tokens, do_sample=False,
                   pad_token_id=0, stopping_criteria=StoppingCriteriaList([Slow()]))
"""


def _record_program(folder: Path, source: str) -> Any:
    """Record a program in a process of its own, and return what its only rank recorded."""
    (folder / "infer.py").write_text(source)
    subprocess.run(
        [sys.executable, "-m", "advisor", "record", "--no-report", "-o", "run", "infer.py"],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return only_rank(folder / "run")


def test_tokens_are_the_steps_of_long_calls_of_generate(tmp_path: Path) -> None:
    """The steps run from a second into the second call on."""
    pytest.importorskip("transformers")
    record = _record_program(tmp_path, LONG_CALLS)
    check_sums(record)
    assert record.inference and 35 <= len(record.steps) <= 60
    lengths = sorted(step.dur for step in record.steps)
    assert 60e6 <= lengths[len(lengths) // 2] < 120e6
    assert record.events_of("window")[-1]["state"] in ("done", "stopped")


def test_replays_of_a_cuda_graph_are_steps(record: Recorded, monkeypatch: Any) -> None:
    """The model itself is called while the graph is captured, and never again."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: time.sleep(0.002))
    graph = object.__new__(torch.cuda.CUDAGraph)

    def replayed(t: Any) -> None:
        with torch.no_grad():
            for _ in range(4):
                t.net(t.x)
            for _ in range(30):
                graph.replay()

    rank_record = record(replayed, skip=10, warmup=1, active=3)
    assert rank_record.inference and 30 <= len(rank_record.steps) <= 34
    assert all(step.phases["forward"] >= 2e6 for step in rank_record.steps[-25:])
    (window,) = [w for w in rank_record.events_of("window") if w["state"] == "done"]
    assert window["steps"][0] >= 11
    assert torch.cuda.CUDAGraph.replay.__name__ == "<lambda>"


WARMED_UP = """
import time
import torch

weights = torch.randn(8, 8, requires_grad=True)
for _ in range(5):  # loads the kernels' libraries
    torch.nn.functional.linear(weights, weights).square().mean().backward()
layers = [torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.GELU()]
with torch.no_grad():
    for _ in range(80):
        h = torch.randn(4, 8)
        for layer in layers:
            h = layer(h)
        time.sleep(0.02)
"""


def test_layers_called_singly_after_warm_up_are_profiled(tmp_path: Path) -> None:
    record = _record_program(tmp_path, WARMED_UP)
    assert record.inference and 65 <= len(record.steps) <= 80
    first = next(event for event in record.events_of("window") if event["state"] != "open")
    assert (
        first["state"] in ("done", "stopped") and (tmp_path / "run/rank0/trace_w0.json.gz").exists()
    )
