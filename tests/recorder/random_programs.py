"""Random small training programs, each run without a recorder and with one, and compared.

    python random_programs.py FOLDER FIRST LAST

Each program is drawn from its number: the source of its batches, and what happens around and inside
its steps. Each batch of programs runs in a child process. If that process dies, its programs run
one by one, to name those that end a process. Prints a line of JSON for each program that differs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, and not in each child: its optimizer would import it
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from advisor.core.run_directory import read_recording
from advisor.recorder import environment
from advisor.recorder.api import Recorder

ITERATIONS = 12
BATCH = 12
"""Programs per process."""


class StopProgram(Exception):
    """An exception that programs raise and catch."""


class NestedBackward(torch.autograd.Function):
    """A backward inside a backward, and one inside a forward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with torch.enable_grad():
            detached = x.detach().requires_grad_()
            (detached * detached).sum().backward()
        ctx.save_for_backward(detached.grad)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = saved.detach().requires_grad_()
            (inner * 3).sum().backward()
        return grads[0] + 0.0 * inner.grad


class EndlessDataset(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(4, generator=generator), torch.randn(1, generator=generator)


class Program:
    """A random program. ``losses`` and ``messages`` are what it sees of itself; ``steps`` is how
    many a reader would count, ``None``: readers would not agree."""

    def __init__(self, number: int, compiling: bool = False) -> None:
        self.rng = random.Random(number)
        self.compiling = compiling
        self.losses: list[float] = []
        self.messages: list[str] = []
        self.step_count = 0
        self.steps: int | None = 0
        torch.manual_seed(number)
        self.net: Any = self._net()
        self.other: Any = self._net()
        self.optimizer = self._optimizer(self.net)
        self.second = self._optimizer(self.other)
        self.inner: Any = nn.Linear(4, 1)
        self.inner_optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.01)
        self.handles: list[Any] = []
        self.profiler: Any = None
        self.elsewhere: Any = nn.Linear(4, 1)
        kinds = [name for name in dir(self) if name.startswith("learn_")]
        self.kind = self.rng.choice(kinds)
        extras = [name for name in dir(self) if name.startswith("add_")]
        self.extras = self.rng.sample(extras, self.rng.choice((0, 0, 1, 1, 2, 3)))
        for profiler in [name for name in self.extras if "profiler" in name][1:]:
            self.extras.remove(profiler)  # two at once crash by themselves
        self.source = self.rng.choice(("list", "generator", "loader", "endless", "range", "buffer"))
        if "loader" not in self.source and self.source != "endless" and self.extras:
            self.steps = None
        if self.source == "buffer" and self.kind == "learn_by_hand":
            self.steps = None  # only optimizers tell rounds between two fetches
        if "thread" in self.kind:
            self.steps = None  # the first ones may be missed
        inner = any("_a_step_" in name for name in self.extras)
        if inner and self.kind in ("learn_by_hand", "learn_accumulating"):
            self.steps = None  # the step of another optimizer inside of a hook is one, or is not

        if "add_an_exception" in self.extras and self.kind == "learn_by_hand":
            self.steps = None  # the first backward may be the one that raises: two steps are one

    def __str__(self) -> str:
        return " ".join((self.source, self.kind, *self.extras))

    def run(self) -> None:
        for number, (x, y) in enumerate(self._batches()):
            if number >= ITERATIONS:
                break
            for extra in self.extras:
                getattr(self, extra)(number, x, y)
            getattr(self, self.kind)(number, x, y)
        for handle in self.handles:
            handle.remove()
        weights = [p.detach().double().sum().item() for p in self.net.parameters()]
        self.losses += [*weights, torch.rand(()).item()]

    # -- parts ----------------------------------------------------------------------------------

    def _net(self) -> Any:
        rng = self.rng
        layers: list[Any] = [nn.Linear(4, 8), rng.choice((nn.ReLU(), nn.Tanh(), nn.Dropout(0.1)))]
        for _ in range(rng.randrange(3)):
            layers += [nn.Linear(8, 8), nn.LayerNorm(8)]
        return nn.Sequential(*layers, nn.Linear(8, 1))

    def _optimizer(self, net: Any) -> Any:
        kind = self.rng.choice((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
        return kind(net.parameters(), lr=0.01)

    def _batches(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(2 * ITERATIONS, 4, generator=generator)
        y = torch.randn(2 * ITERATIONS, 1, generator=generator)
        pairs = list(zip(x.split(2), y.split(2), strict=True))
        if self.source == "list":
            return iter(pairs)
        if self.source == "buffer":
            loader = iter(DataLoader(TensorDataset(x, y), batch_size=2))
            return chain.from_iterable(iter(lambda: list(islice(loader, 4)), []))
        if self.source == "generator":
            return (pair for pair in pairs)
        if self.source == "loader":
            return iter(DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True))
        if self.source == "endless":
            return iter(DataLoader(EndlessDataset(), batch_size=2))
        return ((torch.randn(2, 4), torch.randn(2, 1)) for _ in range(ITERATIONS))

    def _loss(self, net: Any, x: Any, y: Any) -> Any:
        loss = ((net(x) - y) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def _count(self) -> None:
        self.step_count += 1
        if self.steps is not None:
            self.steps += 1

    def _inner_step(self) -> None:
        with torch.enable_grad():
            self.inner_optimizer.zero_grad()
            self.inner(torch.ones(1, 4)).sum().backward()
            self.inner_optimizer.step()

    def _learn_elsewhere(self) -> None:
        self.elsewhere(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(self.elsewhere.parameters(), lr=0.01).step()

    # -- what a step is -------------------------------------------------------------------------

    def learn_plain(self, number: int, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        self._loss(self.net, x, y).backward()
        self.optimizer.step()
        self._count()

    def learn_accumulating(self, number: int, x: Any, y: Any) -> None:
        (self._loss(self.net, x, y) / 3).backward()
        if number % 3 == 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._count()

    def learn_in_a_closure(self, number: int, x: Any, y: Any) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self._loss(self.net, x, y)
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self._count()

    def learn_by_lbfgs(self, number: int, x: Any, y: Any) -> None:
        if number == 0:
            self.optimizer = torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)
        self.learn_in_a_closure(number, x, y)

    def learn_two(self, number: int, x: Any, y: Any) -> None:
        fake = self.other(x)
        self.second.zero_grad()
        (fake**2).mean().backward()
        self.second.step()
        self.learn_plain(number, x, y)
        if number == 0 and self.source not in ("loader", "endless"):
            self.steps = None

    def learn_by_a_critic(self, number: int, x: Any, y: Any) -> None:
        """Train like a WGAN: the other optimizer steps more often, by the same batch."""
        for net, optimizer, times in (
            (self.other, self.second, 3),
            (self.net, self.optimizer, 1),
        ):
            for _ in range(times):
                optimizer.zero_grad()
                loss = self._loss(net, x, y)
                loss.backward()
                optimizer.step()
        self._count()

    def learn_in_a_thread(self, number: int, x: Any, y: Any) -> None:
        thread = threading.Thread(target=self.learn_plain, args=(number, x, y))
        thread.start()
        thread.join()

    def learn_in_threads_of_a_pool(self, number: int, x: Any, y: Any) -> None:
        if number == 0:
            self.pool = ThreadPoolExecutor(2)
        self.pool.submit(self.learn_two, number, x, y).result()
        if number == ITERATIONS - 1:
            self.pool.shutdown()

    def learn_in_backward(self, number: int, x: Any, y: Any) -> None:
        if number == 0:
            for p in self.net.parameters():
                optimizer = torch.optim.SGD([p], lr=0.01)

                def hook(p: Any, optimizer: Any = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                self.handles.append(p.register_post_accumulate_grad_hook(hook))
        self._loss(self.net, x, y).backward()
        self._count()

    def learn_by_hand(self, number: int, x: Any, y: Any) -> None:
        self._loss(self.net, x, y).backward()
        with torch.no_grad():
            for p in self.net.parameters():
                p -= 0.01 * p.grad
                p.grad = None
        self._count()

    def learn_by_grad(self, number: int, x: Any, y: Any) -> None:
        """A penalty on the gradient, as in WGAN-GP: a backward through a backward."""
        x = x.clone().requires_grad_()
        out = self.net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = (out - y).pow(2).mean() + g.norm() * 0.1
        self.losses.append(loss.item())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._count()

    def learn_checkpointed(self, number: int, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        reentrant = self.rng.random() < 0.5
        hidden = checkpoint(self.net[:-1], x.requires_grad_(), use_reentrant=reentrant)
        loss = (self.net[-1](hidden) - y).pow(2).mean()
        self.losses.append(loss.item())
        loss.backward()
        self.optimizer.step()
        self._count()

    def learn_through_a_function(self, number: int, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        loss = (NestedBackward.apply(self.net(x)) - y).pow(2).mean()
        self.losses.append(loss.item())
        loss.backward()
        self.optimizer.step()
        self._count()

    def learn_in_a_module(self, number: int, x: Any, y: Any) -> None:
        """Train in the call of a module: the whole step is inside."""

        class Step(nn.Module):
            def forward(_, x: Any, y: Any) -> Any:
                self.learn_plain(number, x, y)

        Step()(x, y)
        if self.source not in ("loader", "endless"):
            self.steps = None

    def learn_decorated(self, number: int, x: Any, y: Any) -> None:
        torch.enable_grad()(lambda: self.learn_plain(number, x, y))()

    def learn_scaled(self, number: int, x: Any, y: Any) -> None:
        if number == 0:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._loss(self.net, x, y)
        if self.rng.random() < 0.2:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self._count()

    # -- what else happens ----------------------------------------------------------------------

    def add_an_exception(self, number: int, x: Any, y: Any) -> None:
        if self.rng.random() < 0.5:
            return
        place = self.rng.choice(("forward", "backward", "optimizer", "wrong"))
        try:
            if place == "forward":
                self.net(torch.zeros(2, 7))
            elif place == "backward":
                leaf = torch.ones(2, requires_grad=True)
                out = leaf * 2
                out.register_hook(_raise_stop)
                out.sum().backward()
            elif place == "optimizer":
                bad = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
                bad.register_step_pre_hook(_raise_stop)
                bad.step()
            else:
                torch.Tensor.to()  # type: ignore[call-arg]
        except Exception as error:
            self.messages.append(f"{type(error).__name__}: {error}"[:200])

    def add_validation(self, number: int, x: Any, y: Any) -> None:
        if number % 4 == 3:
            self.net.eval()
            with torch.no_grad():
                self._loss(self.net, x, y)
            self.net.train()

    def add_a_step_in_a_forward_hook(self, number: int, x: Any, y: Any) -> None:
        if number == 1:
            hook = lambda *_: self._inner_step()  # noqa: E731
            self.handles.append(self.net[0].register_forward_hook(hook))

    def add_a_step_in_a_tensor_hook(self, number: int, x: Any, y: Any) -> None:
        if number == 1:
            weight = next(self.net.parameters())
            self.handles.append(weight.register_hook(lambda grad: self._inner_step()))

    def add_a_step_in_a_backward_hook(self, number: int, x: Any, y: Any) -> None:
        if number == 1:
            hook = lambda *_: self._inner_step()  # noqa: E731
            self.handles.append(self.net[-1].register_full_backward_hook(hook))

    def add_a_step_in_an_optimizer_hook(self, number: int, x: Any, y: Any) -> None:
        if number == 1:
            hook = lambda *_: self._inner_step()  # noqa: E731
            register = self.rng.choice(("register_step_pre_hook", "register_step_post_hook"))
            self.handles.append(getattr(self.optimizer, register)(hook))

    def add_a_thread(self, number: int, x: Any, y: Any) -> None:
        if number % 3 == 0:
            thread = threading.Thread(target=self._learn_elsewhere)
            thread.start()
            if self.rng.random() < 0.5:
                self.net(x)
            thread.join()

    def add_a_profiler(self, number: int, x: Any, y: Any) -> None:
        if number == self.rng.randrange(ITERATIONS):
            stacks = self.rng.random() < 0.3
            with torch.profiler.profile(with_stack=stacks) as seen:
                torch.ones(2, 2) @ torch.ones(2, 2)
                self.net(x)
            names = sorted(e.key for e in seen.key_averages() if e.key.startswith("aten"))
            self.messages.append(" ".join(names))

    def add_a_long_profiler(self, number: int, x: Any, y: Any) -> None:
        if number == 2:
            self.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(
                    wait=self.rng.randrange(3), warmup=1, active=2, repeat=1
                )
            )
            self.profiler.start()
        elif 2 < number < 10 and self.profiler is not None:
            self.profiler.step()
        elif number == 10:
            self.profiler.stop()
            self.profiler = None

    def add_a_profiler_in_a_hook(self, number: int, x: Any, y: Any) -> None:
        if number == self.rng.randrange(ITERATIONS):

            def hook(*_: Any) -> None:
                with torch.profiler.profile() as seen:
                    torch.ones(2) + 1
                self.messages.append(str(any(e.key == "aten::add" for e in seen.key_averages())))

            handle = self.net[0].register_forward_hook(hook)
            self.net(x)
            handle.remove()

    def add_a_trace(self, number: int, x: Any, y: Any) -> None:
        if number == self.rng.randrange(ITERATIONS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                traced = torch.jit.trace(self.net.eval(), x.detach())
            self.net.train()
            self.losses.append(traced(x).sum().item())

    def add_a_transform(self, number: int, x: Any, y: Any) -> None:
        if number % 4 == 1:
            slope = torch.func.vmap(torch.func.grad(lambda v: self.inner(v).sum()))
            self.losses.append(slope(x.detach()).sum().item())

    def add_ranges(self, number: int, x: Any, y: Any) -> None:
        with torch.profiler.record_function("outer"):
            self.losses.append(float(x.sum()))

    def add_a_checkpoint(self, number: int, x: Any, y: Any) -> None:
        if number % 5 == 4:
            torch.save(self.net.state_dict(), os.devnull)

    def add_a_compiled_step(self, number: int, x: Any, y: Any) -> None:
        if self.compiling and number == 3:
            before = self.net
            torch._dynamo.reset()
            compiled = torch.compile(before, backend="eager")
            for _ in range(3):
                self.losses.append(compiled(x).sum().item())
            torch.compile(self._inner_step, backend="eager")()


def _raise_stop(*_: Any) -> None:
    raise StopProgram("on purpose")


# -- running them -------------------------------------------------------------------------------


def run_program(make: Callable[[], Program]) -> tuple[Program, list[Any]]:
    program = make()
    try:
        program.run()
    except Exception as error:
        program.messages.append("".join(traceback.format_exception_only(error))[:500])
        program.steps = None
    finally:
        if program.profiler is not None:
            program.profiler.stop()
    return program, [[loss.hex() for loss in program.losses], program.messages, program.step_count]


def compare(number: int, folder: Path, compiling: bool) -> str | None:
    """Describe the differences with a recorder."""
    make = lambda: Program(number, compiling)  # noqa: E731
    plain, expected = run_program(make)
    rng = random.Random(number)
    options: dict[str, Any] = {
        "skip": rng.randrange(1, 6),
        "warmup": rng.randrange(3),
        "active": rng.randrange(1, 5),
        "guard": 1e9,
        "deep": rng.random() < 0.1,
    }
    out = folder / f"run{number}"
    with Recorder(str(out), telemetry=0.0, report=False, **options) as recorder:
        _, outcome = run_program(make)
        own_session = recorder._session
    about = f"{plain} {options}"
    if own_session is None or own_session.problem is not None:
        return f"{about}: stopped: {own_session and own_session.problem}"
    if torch.autograd._profiler_enabled():
        return f"{about}: a profiler was left on"
    if outcome != expected:
        pairs = list(zip(expected, outcome, strict=True))
        return f"{about}: {[pair for pair in pairs if pair[0] != pair[1]]}"
    steps = own_session.steps.count
    if plain.steps is not None and steps != plain.steps:
        return f"{about}: {plain.steps} steps, {steps} recorded"
    if steps:
        recording = read_recording(out)
        if recording.problems or len(recording.ranks[0].steps) != steps:
            return f"{about}: {recording.problems} {len(recording.ranks[0].steps)} of {steps}"
    return None


def batch(numbers: range, folder: Path, compiling: bool) -> int:
    """Run programs in a child and return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        # torch's own lines on stderr are of no interest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for number in numbers:
            difference = compare(number, folder, compiling)
            if difference:
                print(json.dumps({"program": number, "difference": difference[:1500]}), flush=True)
        code = 0
    except BaseException:
        print(
            json.dumps({"program": list(numbers), "difference": traceback.format_exc()}), flush=True
        )
    finally:
        os._exit(code)


def main() -> None:
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    described = environment.build_manifest(
        {}, "context", "run"
    )  # git and versions once, not each time
    environment.build_manifest = lambda *_: described
    for begin in range(first, last, BATCH):
        numbers = range(begin, min(begin + BATCH, last))
        compiling = (begin // BATCH) % 8 == 7
        code = batch(numbers, folder, compiling)
        if code:
            for number in numbers:
                exit_code = batch(range(number, number + 1), folder, compiling)
                if exit_code:
                    failure = f"exit code {exit_code}: {Program(number)}"
                    print(json.dumps({"program": number, "difference": failure}), flush=True)
            print(
                json.dumps({"program": list(numbers), "difference": f"exit code {code}"}),
                flush=True,
            )
    print("ran", last - first, flush=True)


if __name__ == "__main__":
    main()
