"""Steps are found where a reader of the loop would count them, to the last one."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.core.run_directory import RankRecord

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timed
Recorded = Callable[..., RankRecord]


def test_epochs_with_validation_between(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for _ in range(3):
            for batch in training.loader(7):
                training.learn(batch)
            training.validate(training.loader(4))

    record = record_run(run)
    assert len(record.steps) == 21
    assert all(
        step.phases.keys() >= {"data", "forward", "backward", "optimizer"} for step in record.steps
    )
    # validation is recorded with the step that follows it, and is in no step
    assert [step.n for step in record.steps if step.evaluation > 0] == [0, 7, 14]


def test_validation_time_is_in_no_step(record_run: Recorded, training: Any) -> None:
    def slow_batches(batches: Any) -> Any:
        for batch in batches:
            time.sleep(0.02)
            yield batch

    def run() -> None:
        for _ in range(2):
            for batch in training.loader(3):
                training.learn(batch)
            training.validate(slow_batches(training.loader(5)))

    record = record_run(run)
    assert len(record.steps) == 6
    assert record.steps[3].evaluation >= 5 * 20e6
    assert all(step.dur < 5 * 20e6 for step in record.steps[1:])


def test_validation_in_the_middle_of_the_loop_body(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(training.loader(10)):
            if number % 4 == 0:
                training.validate(training.loader(3))
            training.learn(batch)
            if number % 5 == 0:
                training.validate(training.loader(2))

    assert len(record_run(run).steps) == 10


def test_a_loop_left_by_break(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(training.loader(10)):
            training.learn(batch)
            if number == 5:
                break
        training.validate(training.loader(3))

    assert len(record_run(run).steps) == 6


def test_work_after_a_loop_left_by_break_is_in_no_step(record_run: Recorded, training: Any) -> None:
    """The program fetches no batch any more after the break."""

    def run() -> None:
        for number, batch in enumerate(training.loader(10)):
            training.learn(batch)
            if number == 5:
                break
        time.sleep(0.3)
        with torch.no_grad():
            training.net(training.x)

    record = record_run(run)
    assert len(record.steps) == 6
    assert record.steps[-1].dur < 0.3e9
    assert record.steps[-1].phases.keys() >= {"data", "forward", "backward", "optimizer"}


def test_unused_batch_is_counted_as_fetched(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(training.loader(10)):
            if number >= 4:
                break
            training.learn(batch)

    assert len(record_run(run).steps) == 4


def test_skipped_batches_are_recorded(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(training.loader(9)):
            if number % 3 == 0:
                continue
            training.learn(batch)

    assert len(record_run(run).steps) == 6


def test_accumulation_groups_by_optimizer_step(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(training.loader(10), 1):
            training.loss(batch).backward()
            if number % 4 == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()

    record = record_run(run)
    assert [step.micro for step in record.steps] == [4, 4]  # the last two batches end no step
    assert [step.samples for step in record.steps] == [8, 8]


def test_steps_without_a_loader(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for _ in range(12):
            training.learn((torch.randn(2, 4), torch.randn(2, 1)))

    record = record_run(run)
    assert len(record.steps) == 12
    # steps join: what is between two optimizer steps belongs to the second
    for before, after in itertools.pairwise(record.steps):
        assert after.t == before.t + before.dur


def test_without_a_loader_and_with_validation(record_run: Recorded, training: Any) -> None:
    batches = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(5)]

    def slow_batches() -> Any:
        for batch in batches:
            time.sleep(0.02)
            yield batch

    def run() -> None:
        for _ in range(2):
            for batch in batches:
                training.learn(batch)
            training.validate(slow_batches())

    record = record_run(run)
    assert len(record.steps) == 10
    assert record.steps[5].evaluation >= 4 * 20e6
    assert record.steps[5].dur < 4 * 20e6


def test_teacher_forward_before_backward_is_in_the_step(
    record_run: Recorded, training: Any
) -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 1)
    teacher = torch.nn.Linear(4, 1)

    def run() -> None:
        for _ in range(8):
            training.optimizer.zero_grad()
            output = training.net(x)
            time.sleep(0.01)
            with torch.no_grad():
                wanted = teacher(x)
            ((output - y) ** 2 + (output - wanted) ** 2).mean().backward()
            training.optimizer.step()

    record = record_run(run)
    assert len(record.steps) == 8
    # the time before the first step is recorded separately too
    assert [step.n for step in record.steps[1:] if step.evaluation] == []
    assert all(step.phases["forward"] > 0 and step.dur > 10e6 for step in record.steps)


def test_two_optimizers_for_each_batch(record_run: Recorded, training: Any) -> None:
    other = torch.optim.Adam(training.net.parameters())

    def run() -> None:
        for batch in training.loader(6):
            training.learn(batch)
            other.zero_grad()
            training.loss(batch).backward()
            other.step()

    assert len(record_run(run).steps) == 6


def test_two_optimizers_without_a_loader(record_run: Recorded, training: Any) -> None:
    other = torch.optim.Adam(training.net.parameters())
    batch = (torch.randn(2, 4), torch.randn(2, 1))

    def run() -> None:
        for _ in range(6):
            training.learn(batch)
            training.loss(batch).backward()
            other.step()

    assert len(record_run(run).steps) == 6


def test_a_second_optimizer_takes_over(record_run: Recorded, training: Any) -> None:
    batch = (torch.randn(2, 4), torch.randn(2, 1))

    def run() -> None:
        for _ in range(4):
            training.learn(batch)
        training.optimizer = torch.optim.Adam(training.net.parameters())
        for _ in range(5):
            training.learn(batch)

    # the first step of the new one looks like a second optimizer's; it joins the next
    assert len(record_run(run).steps) == 8


def test_batches_taken_before_training(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        batches = list(training.loader(5))
        for _ in range(2):
            for batch in batches:
                training.learn(batch)

    assert len(record_run(run).steps) == 10


def test_an_endless_iterator(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        batches = iter(training.loader(4))
        for _ in range(9):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(training.loader(4))
                batch = next(batches)
            training.learn(batch)

    assert len(record_run(run).steps) == 9


def test_steps_of_a_loader_that_prefetches_one_batch(record_run: Recorded, training: Any) -> None:
    """Accelerate and Lightning do this."""

    def look_ahead(loader: Any) -> Any:
        batches = iter(loader)
        kept = next(batches)
        for batch in batches:
            yield kept
            kept = batch
        yield kept

    def run() -> None:
        for _ in range(2):
            for batch in look_ahead(training.loader(6)):
                training.learn(batch)
            training.validate(look_ahead(training.loader(3)))

    record = record_run(run)
    assert len(record.steps) == 12
    assert [step.micro for step in record.steps] == [1] * 12


def test_groups_of_batches_fetched_ahead(record_run: Recorded, training: Any) -> None:
    """Transformers' Trainer does this for gradient accumulation."""

    def run() -> None:
        batches = iter(training.loader(10))
        while group := list(itertools.islice(batches, 4)):
            for batch in group:
                training.loss(batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert [step.micro for step in record_run(run).steps] == [4, 4, 2]


def test_weights_updated_by_hand(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for batch in training.loader(5):
            training.net.zero_grad()
            training.loss(batch).backward()
            with torch.no_grad():
                for weight in training.net.parameters():
                    weight -= 0.01 * weight.grad

    assert len(record_run(run).steps) == 5


def test_step_skipped_by_the_scaler_counts(record_run: Recorded, training: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def run() -> None:
        for number, batch in enumerate(training.loader(8)):
            training.optimizer.zero_grad()
            loss = training.loss(batch) * (float("inf") if number % 3 == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()

    record = record_run(run)
    assert len(record.steps) == 8
    assert [step.micro for step in record.steps] == [1] * 8


def test_an_optimizer_with_a_closure(record_run: Recorded, training: Any) -> None:
    training.optimizer = torch.optim.LBFGS(training.net.parameters(), max_iter=3)

    def run() -> None:
        for batch in training.loader(4):

            def closure(batch: Any = batch) -> Any:
                training.optimizer.zero_grad()
                loss = training.loss(batch)
                loss.backward()
                return loss

            training.optimizer.step(closure)

    record = record_run(run)
    assert len(record.steps) == 4
    assert all(step.phases["forward"] > 0 for step in record.steps)


def test_raising_optimizer_does_not_disturb_other_steps(
    record_run: Recorded, training: Any
) -> None:
    real = training.optimizer

    class RaisingSgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no")

    bad = RaisingSgd(training.net.parameters(), lr=0.1)

    def run() -> None:
        for number, batch in enumerate(training.loader(6)):
            training.optimizer = bad if number == 2 else real
            with contextlib.suppress(ValueError):
                training.learn(batch)

    record = record_run(run)
    assert len(record.steps) == 5
    assert all("optimizer" in step.phases for step in record.steps)


def test_a_checkpoint_is_in_no_step(record_run: Recorded, training: Any, tmp_path: Any) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            time.sleep(0.3)  # a busy machine may stop a step for 0.1
            return (int, ())

    def run() -> None:
        for batch in training.loader(4):
            training.learn(batch)
            torch.save({"slow": Slow()}, tmp_path / "checkpoint")

    record = record_run(run)
    assert len(record.steps) == 4
    assert all(step.dur < 300e6 for step in record.steps[1:])
    assert all(step.evaluation >= 300e6 for step in record.steps[1:])


def test_a_copy_to_a_device_is_a_phase(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        for batch in training.loader(3):
            batch[0].to("meta")  # a device that every machine has
            batch[0].to("cpu")
            batch[0].to(torch.float64)
            training.learn(batch)

    record = record_run(run)
    assert all(step.phases["h2d"] > 0 for step in record.steps)

    def copy_batches() -> None:
        for batch in training.loader(3):
            batch[0].to("cpu")
            batch[0].to(torch.float64)
            training.learn(batch)

    assert all("h2d" not in step.phases for step in record_run(copy_batches).steps)


def test_phases_hold_their_time(record_run: Recorded, training: Any) -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            time.sleep(0.02)
            return x

    training.net.append(Slow())

    def collate(rows: Any) -> Any:
        time.sleep(0.03)
        return torch.utils.data.default_collate(rows)

    def run() -> None:
        for batch in training.loader(4, collate_fn=collate):
            training.learn(batch)
            time.sleep(0.01)

    record = record_run(run)
    for step in record.steps:
        assert 20e6 <= step.phases["forward"] < step.dur - 40e6
        assert 30e6 <= step.phases["data"] < step.dur - 30e6
        assert step.phases["other"] >= 10e6


def test_other_threads_do_not_count(record_run: Recorded, training: Any) -> None:
    import threading

    def train_in_thread() -> None:
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    def run() -> None:
        thread = threading.Thread(target=train_in_thread)
        thread.start()
        for batch in training.loader(5):
            training.learn(batch)
        thread.join()

    assert len(record_run(run).steps) == 5


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),  # batches
            st.integers(1, 3),  # accumulation
            st.integers(0, 3),  # validation batches after the epoch
            st.booleans(),  # through a loader
            st.booleans(),  # one batch ahead
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_mix_of_epochs_is_counted(record_run: Recorded, training: Any, epochs: Any) -> None:
    expected: list[int] = []

    def run() -> None:
        waiting = 0
        for batches, every, validation, loaded, ahead in epochs:
            source: Any = training.loader(batches)
            if not loaded:
                source = [(training.x[:2], training.y[:2])] * batches
            elif ahead:
                first, source = itertools.tee(source)
                next(first, None)
                source = zip(source, itertools.chain(first, [None]), strict=False)
                source = (pair[0] for pair in source)
            for number, batch in enumerate(source, 1):
                training.loss(batch).backward()
                waiting += 1
                if number % every == 0:
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                    expected.append(waiting)
                    waiting = 0
            training.validate(training.loader(validation) if validation else [])

    expected.clear()
    record = record_run(run)
    if expected:
        assert len(record.steps) == len(expected)


def _buffered(training: Any, batches: int, size: int) -> Any:
    """Batches of a loader, fetched some at a time."""
    fetched = iter(training.loader(batches))
    while True:
        kept = [batch for _, batch in zip(range(size), fetched, strict=False)]
        if not kept:
            return
        yield from kept


def test_batches_that_a_plain_buffer_fetches_ahead(record_run: Any, training: Any) -> None:
    """Several rounds between two fetches are several steps, each with one batch."""

    def run() -> None:
        for batch in _buffered(training, 32, 4):
            training.learn(batch)

    steps = record_run(run).steps
    assert len(steps) == 32
    assert {(step.micro, step.samples) for step in steps} == {(1, 2)}


def test_a_buffer_and_gradient_accumulation(record_run: Any, training: Any) -> None:
    def run() -> None:
        for number, batch in enumerate(_buffered(training, 32, 8), 1):
            training.loss(batch).backward()
            if number % 4 == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()

    steps = record_run(run).steps
    assert [(step.micro, step.samples) for step in steps] == [(4, 8)] * 8


def test_several_updates_of_one_batch(record_run: Any, training: Any) -> None:
    def run() -> None:
        for batch in training.loader(8):
            for _ in range(3):
                training.learn(batch)

    assert len(record_run(run).steps) == 24


class _Gan:
    """A critic and a generator, with the given number of updates of each in a step."""

    def __init__(self) -> None:
        self.nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in self.nets]

    def step(self, critic: int, generator: int) -> None:
        for which, times in enumerate((critic, generator)):
            for _ in range(times):
                self.optimizers[which].zero_grad()
                self.nets[which](torch.ones(2, 4)).mean().backward()
                self.optimizers[which].step()


@pytest.mark.parametrize("updates", [(5, 1), (2, 1), (1, 1), (1, 3), (2, 2)])
def test_rarest_optimizer_ends_steps_without_a_loader(
    updates: tuple[int, int], record_run: Any
) -> None:
    gan = _Gan()

    def run() -> None:
        for _ in range(30):
            gan.step(*updates)

    steps = record_run(run).steps
    if updates == (2, 2):  # no telling which of the two ends it
        assert len(steps) in range(29, 63)
        return
    # the generator's first update is the first of its step: what precedes it begins the record
    assert len(steps) in (29, 30)
    assert {step.micro for step in steps[1:-1]} == {sum(updates)}


def test_a_critic_in_a_buffer(record_run: Any, training: Any) -> None:
    gan = _Gan()

    def run() -> None:
        for _ in _buffered(training, 32, 4):
            gan.step(5, 1)

    assert len(record_run(run).steps) == 32


def test_an_optimizer_that_ends_steps_is_replaced(record_run: Any) -> None:
    """A generator's first, then one of its own that steps alone."""
    gan, later = _Gan(), _Gan()

    def run() -> None:
        for _ in range(20):
            gan.step(5, 1)
        for _ in range(40):
            later.step(1, 0)

    assert 20 + 40 - 24 <= len(record_run(run).steps) <= 61


def test_optimizer_stepping_once_an_epoch_ends_no_step(record_run: Any) -> None:
    gan = _Gan()

    def run() -> None:
        for _ in range(4):
            gan.step(50, 1)

    assert len(record_run(run).steps) == 200


def test_windows_know_steps_that_a_buffer_hides(record_run: Any, training: Any) -> None:
    def run() -> None:
        for batch in _buffered(training, 32, 4):
            training.learn(batch)

    record = record_run(run, active=3, skip=9, warmup=1, guard=1000.0)
    (window,) = [e.data for e in record.events if e.kind == "window" and "file" in e.data]
    assert window["steps"] == [10, 12]


def test_optimizers_that_step_in_backwards_and_a_buffer(record_run: Any, training: Any) -> None:
    """Each parameter has one optimizer, as where gradients are freed at once."""
    for parameter in training.net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)

        def hook(p: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)

    def run() -> None:
        for batch in _buffered(training, 32, 4):
            training.loss(batch).backward()

    assert len(record_run(run).steps) == 32


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("trained", ["loader", "memory"])
def test_evaluation_that_builds_a_graph_is_counted(
    record_run: Recorded, training: Any, loaded: bool, trained: str
) -> None:
    """Six forwards with gradients enabled after every fifth step; a frozen model builds none."""
    teacher = torch.nn.Linear(4, 1).requires_grad_(requires_grad=False).eval()

    def evaluate() -> None:
        training.net.eval()
        for x, y in training.loader(3) if loaded else [(training.x, training.y)] * 3:
            training.loss((x, y))
            with torch.no_grad():
                training.loss((x, y))
            teacher(x)
        training.net.train()

    def run() -> None:
        batches = training.loader(20) if trained == "loader" else [(training.x, training.y)] * 20
        for number, batch in enumerate(batches, 1):
            teacher(training.x)
            training.learn(batch)
            if number % 5 == 0:
                evaluate()
                evaluate()

    steps = record_run(run).steps
    assert len(steps) == 20
    counted = {step.n: step.unused_graphs for step in steps if step.unused_graphs}
    assert counted == {5: 6, 10: 6, 15: 6}


@pytest.mark.parametrize("trained", ["loader", "memory"])
def test_evaluation_in_memory_is_not_a_part_of_a_step(
    record_run: Recorded, training: Any, trained: str
) -> None:
    """The model is in evaluation mode, with gradients enabled and no loader; then it trains
    again. The steps keep their own time, and the pause is recorded separately."""

    def run() -> None:
        memory = [(training.x, training.y)] * 20
        for number, item in enumerate(training.loader(20) if trained == "loader" else memory, 1):
            training.learn(item)
            if number % 5 == 0:
                training.net.eval()
                for x, _ in memory[:4]:
                    training.net(x)
                    time.sleep(0.05)
                training.net.train()

    steps = record_run(run).steps
    assert len(steps) == 20
    assert {step.n: step.unused_graphs for step in steps if step.unused_graphs} == {
        5: 4, 10: 4, 15: 4,
    }  # fmt: skip
    if trained == "memory":
        # before the first step lies what else the program does, however long
        assert {s.n for s in steps if s.n and s.evaluation >= 150_000_000} == {5, 10, 15}
        assert sum(step.dur > 150_000_000 for step in steps) == 0


@pytest.mark.parametrize("actor", [False, True])
def test_targets_before_each_step_are_part_of_it(
    record_run: Recorded, training: Any, actor: bool
) -> None:
    """Targets without gradients come before each loss, as in Q-learning, with or without an actor
    of its own optimizer; every 50 steps a validation, which is in no step."""
    steps = 150
    second = torch.optim.SGD(training.net.parameters(), 1e-4) if actor else None

    def run() -> None:
        for number in range(steps):
            with torch.no_grad():
                training.net(training.x)
                time.sleep(0.003)
            training.learn((training.x, training.y))
            if second is not None:
                training.loss((training.x, training.y)).backward()
                second.step()
            if number % 50 == 49 and not actor:
                with torch.no_grad():
                    for _ in range(6):
                        training.net(training.x)
                        time.sleep(0.02)

    result = record_run(run).steps
    assert len(result) in (steps - 1, steps)
    regular = [each for each in result[4:-1] if each.n % 50 > 1]
    assert all(each.dur >= 3_000_000 and not each.evaluation for each in regular)
    if not actor:
        assert [each.n for each in result[4:] if each.evaluation >= 90_000_000] == [50, 100]
        assert all(each.dur < each.evaluation for each in result if each.n in (50, 100))


def test_several_forwards_of_one_step_are_not_evaluation(
    record_run: Recorded, training: Any
) -> None:
    """The model is fine-tuned in evaluation mode; two views of a batch; one call in evaluation
    mode per step."""

    def two_views() -> None:
        for _ in range(12):
            loss = training.loss((training.x, training.y))
            loss = loss + training.loss((training.x, training.y))
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()

    def train_with_evaluation() -> None:
        for _ in range(12):
            training.net.eval()
            target = training.net(training.x)
            training.net.train()
            loss = (training.net(training.x) - target).square().mean()
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()

    def in_evaluation_mode() -> None:
        training.net.eval()
        two_views()

    for run in (two_views, train_with_evaluation, in_evaluation_mode):
        steps = record_run(run).steps
        assert len(steps) == 12
        assert sum(step.unused_graphs for step in steps) == 0
        assert sum(step.evaluation for step in steps[1:]) == 0


def test_delayed_backward_leaves_no_unused_graph(record_run: Recorded, training: Any) -> None:
    def run() -> None:
        loss = None
        for batch in training.loader(20):
            if loss is not None:
                training.optimizer.zero_grad()
                loss.backward()
                training.optimizer.step()
            loss = training.loss(batch)

    steps = record_run(run).steps
    assert sum(step.unused_graphs for step in steps) == 0
