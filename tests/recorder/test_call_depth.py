"""A profiler starts and stops at the outermost level of the training thread, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recording_checks import check_sums, only_rank

from advisor.recorder.api import Recorder
from advisor.recorder.call_depth import is_outermost

torch = pytest.importorskip("torch")

FUSED = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(60)]
optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}


def optimizer_hook(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(optimizer_hook)
losses = []
for x, y in batches:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    losses.append(loss.item().hex())
print("\\n".join(losses))
"""


def test_an_optimizer_fused_into_the_backward(program: Any, tmp_path: Path) -> None:
    """PyTorch's tutorial on saving memory: every step of an optimizer ends inside a backward."""
    plain = program(FUSED)
    assert plain.returncode == 0 and len(plain.stdout.split()) == 60
    command = ("-m", "advisor", "record", "--no-report", "--out", str(tmp_path / "run"))
    recorded = program(FUSED, before=command)
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout == plain.stdout
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 60
    assert all(step.phases.keys() >= {"forward", "backward"} for step in record.steps)


def test_loop_ending_steps_inside_has_a_reported_lack_of_window(
    training: Any, tmp_path: Path
) -> None:
    """A whole training inside the call of a module."""

    class TrainingModule(torch.nn.Module):
        def forward(self) -> None:
            for batch in training.loader(30):
                training.learn(batch)
                assert not torch.autograd._profiler_enabled()

    with Recorder(str(tmp_path / "run"), skip=2, warmup=1, active=2, report=False):
        TrainingModule()()
    record = only_rank(tmp_path / "run")
    assert len(record.steps) == 30
    (never,) = record.events_of("window")
    assert never["state"] == "never" and "every step" in never["why"]


def places(ask: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """Places of a program where ``ask`` may be called."""
    leaf = torch.ones(2, requires_grad=True)
    net = torch.nn.Linear(2, 2)

    def in_a_hook() -> None:
        out = leaf * 2
        out.register_hook(lambda grad: ask())
        out.sum().backward()

    def after_accumulation() -> None:
        handle = leaf.register_post_accumulate_grad_hook(lambda _: ask())
        (leaf * 2).sum().backward()
        handle.remove()

    def in_a_forward_hook() -> None:
        handle = net.register_forward_hook(lambda *_: ask())
        net(torch.ones(2))
        handle.remove()

    class AskingFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ask()
            return x

    def in_a_trace() -> None:
        torch.jit.trace(lambda x: (ask(), x + 1)[1], torch.ones(1), check_trace=False)

    def in_a_transform() -> None:
        torch.vmap(lambda x: (ask(), x + 1)[1])(torch.ones(2))

    def in_a_profiler() -> None:
        with torch.profiler.profile():
            ask()

    def in_a_closure() -> None:
        def closure() -> Any:
            ask()
            return (leaf * 2).sum()

        torch.optim.LBFGS([leaf], max_iter=1).step(closure)

    def in_compiled_code() -> None:
        torch.compile(lambda x: (torch.compiler.disable(ask)(), x + 1)[1], backend="eager")(
            torch.ones(1)
        )

    class DispatchingTensor(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ask()
            return super().__torch_function__(func, types, args, kwargs or {})

    return {
        "tensor hook": in_a_hook,
        "peak accumulate": after_accumulation,
        "forward hook": in_a_forward_hook,
        "function": lambda: AskingFunction.apply(leaf),
        "trace": in_a_trace,
        "transform": in_a_transform,
        "profiler": in_a_profiler,
        "closure": in_a_closure,
        "compiled": in_compiled_code,
        "override": lambda: torch.ones(1).as_subclass(DispatchingTensor) + 1,
    }


@pytest.mark.parametrize("place", sorted(places(lambda: None)))
def test_inside_of_torch_is_not_outermost(place: str) -> None:
    answers: list[bool] = []
    places(lambda: answers.append(is_outermost(torch)))[place]()
    assert answers and not any(answers)
    assert is_outermost(torch)


def test_users_code_of_any_kind_is_outermost() -> None:
    class Loop:
        def __call__(self) -> bool:
            return next(is_outermost(torch) for _ in range(1))

    answers = [Loop()(), torch.no_grad()(Loop())(), all(Loop()() for _ in range(2))]
    thread = threading.Thread(target=lambda: answers.append(Loop()()))
    thread.start()
    thread.join()
    with torch.profiler.record_function("mine"), torch.device("cpu"):
        answers.append(Loop()())
    assert answers == [True] * 5


def test_a_profiler_in_another_thread_gets_its_way(training: Any, tmp_path: Path) -> None:
    """The process would crash without a wait for the window's end."""
    seen: list[int] = []

    def profile_in_thread() -> None:
        with torch.profiler.profile() as profiler:
            torch.ones(2) + 1
        seen.append(sum(e.key == "aten::add" for e in profiler.key_averages()))

    thread = threading.Thread(target=profile_in_thread)
    options = {"skip": 2, "warmup": 1, "active": 10**6, "guard": 1e9}
    with Recorder(str(tmp_path / "run"), report=False, **options):
        for number in range(4000):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))
            if number == 8:
                assert torch.autograd._profiler_enabled()
                thread.start()
            elif number > 8 and not thread.is_alive():
                break
        thread.join()
    assert seen == [1]
    (stopped,) = [
        w for w in only_rank(tmp_path / "run").events_of("window") if w["state"] != "open"
    ]
    assert stopped["state"] == "stopped" and "another profiler" in stopped["why"]
