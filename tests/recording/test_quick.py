"""The hooks in C do what those of Python do, in every situation, and keep nothing alive."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_checks import check_sums, only_rank

from advisor.recording.api import Recorder
from advisor.recording.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    H2D,
    ONLINE,
    OPTIMIZER,
    OTHER,
    PHASE,
    THREAD,
    WATCHED,
    Tape,
)
from advisor.recording.quick import Quick, available

torch = pytest.importorskip("torch")

from advisor.recording import hooks  # noqa: E402
from advisor.recording import quick as quick_module  # noqa: E402

if not available():
    pytest.skip("the hooks in C were not built", allow_module_level=True)

from advisor.recording import _quick  # noqa: E402


class Told:
    """A listener that notes what it is told, beside the tape."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.tape.here[THREAD] = threading.get_ident()
        self.looping: list[Any] = []
        self.loaders: Any = None
        self.told: list[Any] = []
        self.interrupts = False
        """Somebody presses ctrl-c when the tape is read, or when it is told that a phase ended."""

    def glance(self, batch: Any) -> Any:
        if batch == "bad":
            raise ValueError("no glance")
        if batch == "interrupted":
            raise KeyboardInterrupt
        return repr(batch)

    def entered(self, phase: int) -> None:
        self.told.append(("entered", phase))

    def left(self, phase: int) -> None:
        self.told.append(("left", phase))
        if self.interrupts:
            raise KeyboardInterrupt

    def stepped(self) -> None:
        self.told.append("stepped")

    def drain(self) -> None:
        self.told.append("drain")
        if self.interrupts:
            raise KeyboardInterrupt

    def look_again(self) -> None:
        self.told.append("look again")

    def broken(self, error: BaseException) -> None:
        self.told.append(repr(error))


MAKERS: dict[str, Callable[[Any], Any]] = {
    "__next__": hooks._next,
    "__call__": hooks._forward,
    "to": hooks._to,
    "cuda": hooks._cuda,
    "_engine_run_backward": hooks._backward,
}


class Moved:
    """What a tensor tells a hook that it is moved by."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Interrupted:
    """Somebody presses ctrl-c when a hook asks it for something."""

    def __getattr__(self, name: str) -> Any:
        if name in ("is_cpu", "is_cuda", "_advisor_loader"):
            raise KeyboardInterrupt
        raise AttributeError(name)


class Iterating:
    def __init__(self, loader: int | None) -> None:
        if loader is not None:
            self._advisor_loader = int(str(loader))  # no object that is shared


TENSOR = torch.zeros(2, 3)
BATCHES: list[Any] = [
    [TENSOR, TENSOR.long()],
    (TENSOR, TENSOR),
    [TENSOR],
    [TENSOR, 1],
    (1, TENSOR),
    [torch.nn.Parameter(TENSOR), TENSOR],
    {"x": TENSOR},
    TENSOR,
    "bad",
    "interrupted",
    None,
]
TARGETS: list[Any] = [
    *("cuda", "cuda:1", "cpu", "cpu:0", "c", "", "meta"),
    torch.device("cuda"),
    torch.device("cpu"),
    torch.float32,
    *(0, 1, True, None, 1.5),
]
MOVED: list[Any] = [
    torch.zeros(1),
    torch.zeros(1, device="meta"),
    torch.nn.Parameter(torch.zeros(1)),
    Moved(is_cpu=True, is_cuda=False),
    Moved(is_cpu=False, is_cuda=True),
    Moved(is_cpu=1, is_cuda=0),
    Moved(is_cpu=None, is_cuda=None),
    Interrupted(),
]
ERRORS = [None, StopIteration, ValueError, KeyboardInterrupt]


class World:
    """All hooks, of Python or in C, around functions that go through a given program."""

    def __init__(self, quick: bool) -> None:
        self.on = Told()
        self.seen: list[Any] = []
        self.optimizers = [object(), object()]
        made = Quick(self.on) if quick else None  # type: ignore[arg-type]
        self.hook = {}
        for name, make in MAKERS.items():
            original = self.original(name)
            slow = make(self.on)(original)
            self.hook[name] = slow if made is None else made.wrapper(name, original, slow)
        opened: list[Any] = []
        around = hooks._around_step(self.on, opened)  # type: ignore[arg-type]
        self.before, self.after = around if made is None else made.around_step(around, opened)
        if made is not None:
            found = {type(hook) for hook in (*self.hook.values(), self.before, self.after)}
            assert found == {_quick.Hook}

    def original(self, name: str) -> Callable[..., Any]:
        """What is wrapped: does what the program says, and returns or raises."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((name, len(args), sorted(kwargs)))
            inside, result, error = self.next.pop()
            self.run(inside)
            if error is not None:
                raise error(name)
            return result

        self.next: list[Any] = []
        return called

    def run(self, program: list[Any]) -> None:
        for name, *rest in program:
            try:
                self.seen.append(getattr(self, name)(*rest))
            except (Exception, KeyboardInterrupt) as error:
                self.seen.append(repr(error))
            self.seen.append(list(self.on.tape.here))

    def call(self, name: str, args: Any, kwargs: Any, then: Any) -> Any:
        self.next.append(then)
        try:
            return repr(self.hook[name](*args, **kwargs))
        finally:
            if self.next and self.next[-1] is then:  # it was not called
                self.next.pop()

    def optimize(self, number: int, inside: list[Any], raises: bool) -> Any:
        optimizer = self.optimizers[number]
        assert self.before(optimizer, (), {}) is None
        self.run(inside)
        return None if raises else self.after(optimizer, (), {})

    def interrupt(self, interrupts: bool) -> None:
        self.on.interrupts = interrupts

    def here(self, what: int, value: int) -> None:
        self.on.tape.here[what] = value

    def elsewhere(self, inside: list[Any]) -> None:
        thread = threading.Thread(target=self.run, args=(inside,))
        thread.start()
        thread.join()

    def no_grad(self, inside: list[Any]) -> None:
        with torch.no_grad():
            self.run(inside)

    def tape(self) -> list[Any]:
        """What was written; times, and what an object is known by, in order of their coming."""
        log = self.on.tape.log
        order = {id(one): f"optimizer {i}" for i, one in enumerate(self.optimizers)}
        found: list[Any] = []
        last = 0
        for code, value in zip(log[::2], log[1::2], strict=True):
            if isinstance(value, int) and value in order:
                value = order[value]
            elif isinstance(value, int) and value > 1 << 20:
                assert value >= last
                last = value
                value = "time"
            elif not isinstance(value, int | str | None):
                value = repr(value)
            found.append((code, value))
        return found


def programs(depth: int = 3) -> Any:
    if depth == 0:
        return st.just([])
    return st.lists(st.deferred(lambda: ops(depth - 1)), max_size=3)


def ops(depth: int) -> Any:
    inside = programs(depth)
    error = st.sampled_from(ERRORS)
    nothing = st.tuples(inside, st.none(), error)
    no_keywords = st.just({})
    return st.one_of(
        st.tuples(
            st.just("call"),
            st.just("__next__"),
            st.tuples(
                st.builds(Iterating, st.sampled_from([None, 0, 1, -1, 1000]))
                | st.builds(Interrupted)
            ),
            no_keywords,
            st.tuples(inside, st.sampled_from(BATCHES), error),
        ),
        st.tuples(
            st.just("call"),
            st.just("to"),
            st.one_of(
                st.tuples(st.sampled_from(MOVED), st.sampled_from(TARGETS)),
                st.tuples(st.sampled_from(MOVED)),
            ),
            st.sampled_from([{}, {"device": "cuda"}, {"device": "cpu"}, {"non_blocking": True}]),
            nothing,
        ),
        st.tuples(
            st.just("call"),
            st.just("cuda"),
            st.one_of(
                st.tuples(st.sampled_from(MOVED)), st.tuples(st.sampled_from(MOVED), st.just(0))
            ),
            no_keywords,
            nothing,
        ),
        st.tuples(
            st.just("call"),
            st.sampled_from(["__call__", "_engine_run_backward"]),
            st.sampled_from([(), (1,), (1, 2)]),
            st.sampled_from([{}, {"inputs": None}]),
            nothing,
        ),
        st.tuples(st.just("optimize"), st.sampled_from([0, 1]), inside, st.booleans()),
        st.tuples(st.just("here"), st.sampled_from([WATCHED, ONLINE]), st.sampled_from([0, 0, 1])),
        st.tuples(
            st.just("here"),
            st.just(PHASE),
            st.sampled_from([OTHER, DATA, H2D, FORWARD, BACKWARD, OPTIMIZER, 6, 63]),
        ),
        st.tuples(st.just("interrupt"), st.sampled_from([False, False, True])),
        st.tuples(st.just("elsewhere"), inside),
        st.tuples(st.just("no_grad"), inside),
    )


@settings(max_examples=400, deadline=None)
@given(programs())
def test_any_program_is_written_as_the_hooks_of_python_write_it(program: list[Any]) -> None:
    expected, found = World(quick=False), World(quick=True)
    expected.run(program)
    found.run(program)
    assert found.seen == expected.seen
    assert found.tape() == expected.tape()
    assert found.on.told == expected.on.told


def test_a_tape_that_is_not_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hooks, quick_module):
        monkeypatch.setattr(module, "MAX_TAPE", 10)
    for quick in (False, True):
        world = World(quick)
        world.optimize(0, [], False)
        assert world.on.told == []
        world.on.tape.log.extend([0] * 10)
        world.optimize(0, [], False)
        assert world.on.told == ["stepped", "drain"]


USUAL: list[Any] = [
    ("call", "__next__", (Iterating(0),), {}, ([], BATCHES[0], None)),
    ("call", "__next__", (Iterating(1),), {}, ([], BATCHES[1], None)),
    ("call", "__next__", (Iterating(None),), {}, ([], {"x": TENSOR}, None)),
    ("call", "__next__", (Iterating(0),), {}, ([], None, StopIteration)),
    ("call", "to", (MOVED[0], "cuda"), {}, ([], None, None)),
    ("call", "to", (MOVED[0], torch.device("cuda")), {"non_blocking": True}, ([], None, None)),
    ("call", "to", (MOVED[3], "cuda"), {}, ([], None, None)),
    ("call", "cuda", (MOVED[0],), {}, ([], None, ValueError)),
    ("call", "__call__", (1,), {}, ([], None, None)),
    ("call", "_engine_run_backward", (), {}, ([], None, ValueError)),
    ("optimize", 0, [], False),
    ("here", ONLINE, 1),
    ("call", "__next__", (Iterating(0),), {}, ([], BATCHES[0], None)),
    ("optimize", 0, [], False),
    ("here", ONLINE, 0),
]


def test_nothing_is_leaked() -> None:
    world = World(quick=True)

    def objects(rounds: int) -> tuple[int, int]:
        for _ in range(rounds):
            world.run(USUAL)
            world.seen.clear()
            world.on.tape.log.clear()
            world.on.told.clear()
        gc.collect()
        return sys.getallocatedblocks(), sum(
            map(sys.getrefcount, (None, TENSOR, *world.on.tape.here))
        )

    objects(20)
    (blocks, references), (blocks_after, references_after) = objects(20), objects(500)
    # 500 rounds of 12 calls: one object or reference lost in any of them is 500
    assert abs(blocks_after - blocks) < 250
    assert abs(references_after - references) < 250


def test_a_hook_is_collected_with_what_it_is_part_of() -> None:
    world = World(quick=True)
    world.hook["to"].world = world
    gone = weakref.ref(world)
    del world
    gc.collect()
    assert gone() is None


def test_it_looks_like_what_it_wraps() -> None:
    world = World(quick=True)
    assert world.hook["to"].__name__ == "called"
    assert world.hook["to"].__wrapped__ is not None

    class Owner:
        to = world.hook["to"]
        is_cpu = True

    world.next.append(([], 7, None))
    assert Owner().to("cuda") == 7
    assert world.seen[-1] == ("to", 2, [])


TOLD = (len, len, len)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (99, len, len, [], [0] * 5, 0, (1, 2, 3, 4), TOLD, None),
        (-1, len, len, [], [0] * 5, 0, (1, 2, 3, 4), TOLD, None),
        (0, len, len, [], [0] * 4, 0, (1, 2, 3, 4), TOLD, None),
        (0, len, len, [], [0] * 5, 0, (1, 2, 3), TOLD, None),
        (0, len, len, [], [0] * 5, 0, (1, 2, 3, "4"), TOLD, None),
        (0, len, len, [], [None] * 5, 0, (1, 2, 3, 4), TOLD, None),
        (0, len, len, [], [0] * 5, 0, (1, 2, 3, 4), (len, len), None),
        (0, len, len, [], [0] * 5, 0, (1, 2, 3, 4), (1, len, len), None),
        (0, len, len, [], [0] * 5, 0, (1, 2, 3, 4), (len, 1, len), None),
        (0, len, len, [], [0] * 5, 0, (1, 2, 3, 4), (len, len, 1), None),
        (0, len, 1, [], [0] * 5, 0, (1, 2, 3, 4), TOLD, None),
        (0, 1, len, [], [0] * 5, 0, (1, 2, 3, 4), TOLD, None),
        (4, len, len, [], [0] * 5, 0, (1, 2, 3, 4), TOLD, None),
        (5, None, len, [], [0] * 5, 0, (1, 2, 3, 4), TOLD, ()),
        (0, len, len, (), [0] * 5, 0, (1, 2, 3, 4), TOLD, None),
    ],
)
def test_nonsense_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        _quick.Hook(*arguments)


class Patched:
    """Where hooks are put, as they are now."""

    @staticmethod
    def kinds() -> set[str]:
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        places = [
            vars(dataloader._BaseDataLoaderIter)["__next__"],
            torch.autograd._engine_run_backward,
            *optimizer._global_optimizer_pre_hooks.values(),
            *optimizer._global_optimizer_post_hooks.values(),
        ]
        assert len(places) == 4
        return {type(place).__name__ for place in places}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> Iterator[None]:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()
    yield


def learn(training: Any, steps: int) -> None:
    for batch in training.loader(steps):
        training.learn(batch)


def test_they_come_after_the_first_steps_and_go_when_something_is_compiled(
    tmp_path: Path, training: Any
) -> None:
    before = torch.Tensor.to, torch.autograd._engine_run_backward
    with Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False):
        learn(training, 2)
        assert Patched.kinds() == {"function"}
        learn(training, 4)
        assert Patched.kinds() == {"Hook"}
        torch.compile(training.net, backend="eager")
        assert Patched.kinds() == {"function"}
        learn(training, 6)
        assert Patched.kinds() == {"function"}
    assert (torch.Tensor.to, torch.autograd._engine_run_backward) == before
    record = only_rank(tmp_path / "run")
    check_sums(record)
    assert len(record.steps) == 12


def test_an_option_leaves_them_out(tmp_path: Path, training: Any) -> None:
    with Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False, native=False):
        learn(training, 6)
        assert Patched.kinds() == {"function"}
    assert len(only_rank(tmp_path / "run").steps) == 6


def test_recordings_are_the_same_with_and_without(tmp_path: Path, training: Any) -> None:
    found = []
    for native in (True, False):
        folder = tmp_path / f"run {native}"
        with Recorder(str(folder), active=0, telemetry=0.0, report=False, native=native):
            for _ in range(3):
                learn(training, 8)
                training.validate(training.loader(3))
        record = only_rank(folder)
        check_sums(record)
        found.append(
            [(s.n, sorted(s.phases), s.micro, s.samples, s.bytes, s.shapes) for s in record.steps]
        )
    assert found[0] == found[1]
    assert len(found[0]) == 24


def test_a_wrapper_of_somebody_elses_in_between_stays(tmp_path: Path, training: Any) -> None:
    original = torch.Tensor.to
    with Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False):
        learn(training, 1)
        ours = torch.Tensor.to

        def theirs(*args: Any, **kwargs: Any) -> Any:
            return ours(*args, **kwargs)

        torch.Tensor.to = theirs
        try:
            learn(training, 6)
            assert torch.Tensor.to is theirs
        finally:
            torch.Tensor.to = ours
    assert torch.Tensor.to is original


def test_compiled_behind_our_back_it_still_computes(tmp_path: Path, training: Any) -> None:
    import torch._dynamo

    compile_ = torch.compile  # bound before the recorder came
    with Recorder(str(tmp_path / "run"), active=0, telemetry=0.0, report=False):
        learn(training, 6)
        assert Patched.kinds() == {"Hook"}

        def scaled(x: Any) -> Any:
            return training.net(x.to("cpu").to(torch.float32)) * 2

        x = torch.ones(2, 4)
        plain = scaled(x)
        compiled = compile_(scaled, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), plain)
        step = compile_(training.optimizer.step, backend="eager")
        training.loss((x, torch.ones(2, 1))).backward()
        before = training.net[0].weight.clone()
        step()
        assert not torch.equal(training.net[0].weight, before)
    torch._dynamo.reset()
