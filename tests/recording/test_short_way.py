"""What the short way puts on the tape is what the long way does, in order of time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.recording import clock
from advisor.recording.clock import DUE, FREE, HOME, NOBODY, OTHER, PHASE, THREAD, Tape
from advisor.recording.hooks import Hooks
from advisor.recording.loaders import Loaders
from advisor.recording.session import Session

torch = pytest.importorskip("torch")

MINE = 7
"""A phase of the user's."""
NO_TIME = (clock.BATCH, clock.LOADER, clock.ITERATED, clock.OPTIMIZED_BY)


class Listener:
    """Keeps the tape."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.loaders = Loaders(lambda kind, data: None)
        self.looping: list[Any] = []
        self.hooks = Hooks(self)

    def glance(self, batch: Any) -> Any:
        return None

    def entered(self, phase: int) -> None:
        raise AssertionError("nobody watches")

    left = entered

    def stepped(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def look_again(self) -> None:
        pass

    def broken(self, error: BaseException) -> None:
        raise error


class Boom(Exception):
    pass


class Program:
    """Runs what is drawn: (kind, what happens inside)."""

    def __init__(self, on: Listener) -> None:
        self.on = on
        self.inside: Sequence[Any] = ()
        outer = self

        class Net(torch.nn.Module):
            def forward(self, inside: Any) -> None:
                outer.run(inside)

        class Learner(torch.optim.Optimizer):
            def __init__(self) -> None:
                super().__init__([torch.nn.Parameter(torch.ones(1))], {})

            def step(self, closure: Any = None) -> None:
                closure()

        class Data(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> Any:
                inside, outer.inside = outer.inside, ()
                outer.run(inside)
                return torch.ones(1)

        self.net = Net()
        self.learners = [Learner(), Learner()]
        self.loader = torch.utils.data.DataLoader(Data())
        self.batches = iter(self.loader)
        self.weight = torch.ones(1, requires_grad=True)

    def run(self, nodes: Sequence[Any]) -> None:
        for kind, inside in nodes:
            getattr(self, kind)(inside)

    def forward(self, inside: Any) -> None:
        self.net(inside)

    def fetch(self, inside: Any) -> None:
        self.inside = inside
        try:
            next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)

    def step(self, inside: Any) -> None:
        self.learners[0].step(lambda: self.run(inside))

    def other_step(self, inside: Any) -> None:
        self.learners[1].step(lambda: self.run(inside))

    def phase(self, inside: Any) -> None:
        before = Session.enter(self.on, MINE)  # type: ignore[arg-type]
        try:
            self.run(inside)
        finally:
            Session.leave(self.on, before)  # type: ignore[arg-type]

    def backward(self, inside: Any) -> None:
        (self.weight * 2).backward()

    def copy(self, inside: Any) -> None:
        torch.ones(1).to("meta")

    def save(self, inside: Any) -> None:
        torch.save({}, io.BytesIO())

    def fail(self, inside: Any) -> None:
        raise Boom

    def attempt(self, inside: Any) -> None:
        with suppress(Boom):
            self.run(inside)


LEAVES = st.sampled_from(["backward", "copy", "save", "fail"]).map(lambda kind: (kind, ()))
AROUND = st.sampled_from(["forward", "fetch", "step", "other_step", "phase", "attempt"])
PROGRAMS = st.lists(
    st.recursive(
        LEAVES, lambda inner: st.tuples(AROUND, st.lists(inner, max_size=3)), max_leaves=8
    ),
    min_size=1,
    max_size=6,
)


@contextmanager
def listening(on: Listener) -> Iterator[None]:
    on.hooks.install()
    on.tape.start(get_ident())
    try:
        yield
    finally:
        on.tape.stop()
        on.hooks.remove()


def tape_of(nodes: Sequence[Any], *, long: bool) -> list[tuple[int, Any]]:
    on = Listener()
    on.tape.here[DUE] = int(long)
    with listening(on):
        program = Program(on)
        numbers = {id(learner): n for n, learner in enumerate(program.learners)}
        assert on.tape.here[FREE] == (NOBODY if long else get_ident())
        for node in nodes:
            program.attempt([node])
        on.tape.flush()  # an optimizer that raised last
        entries = iter(on.tape.take())
    return [
        (code, numbers[value] if code == clock.OPTIMIZED_BY else value)
        for code, value in zip(entries, entries, strict=True)
    ]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS)
def test_both_ways_write_the_same(nodes: Sequence[Any]) -> None:
    short, long = tape_of(nodes, long=False), tape_of(nodes, long=True)
    assert [code for code, _ in short] == [code for code, _ in long]
    assert [v for c, v in short if c == clock.OPTIMIZED_BY] == [
        v for c, v in long if c == clock.OPTIMIZED_BY
    ]
    for tape in (short, long):
        times = [value for code, value in tape if code not in NO_TIME]
        assert times == sorted(times)


def test_the_short_way_is_taken_and_open_again() -> None:
    on = Listener()
    with listening(on):
        program = Program(on)
        here = on.tape.here
        within: list[list[int]] = []
        on.tape.take()
        program.net.register_forward_pre_hook(lambda *_: within.append(list(here)))
        program.forward(())
        assert (within[0][FREE], within[0][PHASE]) == (NOBODY, clock.FORWARD)
        assert len(on.tape.log) == 4
        assert (here[FREE], here[PHASE]) == (get_ident(), OTHER)
        on.tape.watch(None)
        assert here[HOME] == here[FREE] == NOBODY
        on.tape.unwatch(None)
        assert here[HOME] == get_ident()
    assert here[THREAD] == here[HOME] == here[FREE] == NOBODY
    on.tape.settle()
    assert here[HOME] == NOBODY
