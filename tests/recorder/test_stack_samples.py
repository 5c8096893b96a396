"""Stacks that the recorder samples: the lines of host time in a recording without stacks."""

from __future__ import annotations

import collections
import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from advisor.core.run_directory import Event, RankInfo, RankRecord, read_recording
from advisor.measure.host.stacks import (
    MIN_SAMPLES,
    hottest_line,
    read_membership_tests,
    read_stacks,
)
from advisor.measure.steps.run_steps import RunSteps
from advisor.recorder import stack_samples
from advisor.recorder.built_in_calls import find_in_file, membership_tests, operator_function
from advisor.recorder.stack_samples import MAX_STACKS, StackSampler

pytestmark = pytest.mark.timed

PROGRAM = """
import json, time, torch
from torch import nn

def write_log(step, net):
    json.dumps([p.flatten()[:4000].tolist() for p in net.parameters()])
    time.sleep(0.02)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32 * 60

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.randn(64)

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step, rows in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=32)):
    net(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    write_log(step, net)
"""


def record_program(folder: Path, *options: str, **env: str) -> RunSteps:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    run = folder / "run"
    subprocess.run(
        [sys.executable, "-m", "advisor", "record", "--no-report", "-o", run, *options, program],
        check=True,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
    )
    return RunSteps(read_recording(run).ranks[0])


def test_lines_of_loading_and_of_the_loop_are_named(tmp_path: Path) -> None:
    record = record_program(tmp_path)
    data, loop = record.hottest_line("data"), record.hottest_line("loop")
    assert data is not None and loop is not None
    lines = PROGRAM.splitlines()
    assert data.location.function == "Rows.__getitem__"
    assert "sleep" in lines[(data.location.line or 0) - 1]
    assert data.location.file == loop.location.file == "train.py"
    assert loop.location.function == "write_log"
    assert not any("advisor/" in frame for stack in record.stacks for frame in stack.frames)


def test_compile_logging_can_be_switched_off(tmp_path: Path) -> None:
    record = record_program(tmp_path, ADVISOR_STACK_SAMPLES="0")
    assert not record.rank_record.events_of("stacks") and record.hottest_line("data") is None


def keep_busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def sample_stacks(run: Any, **options: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    me = threading.get_ident()
    fields = {"thread": lambda: me, "busy": lambda: False, **options}
    sampler = StackSampler(fields["thread"], fields["busy"], lambda _, data: records.append(data))
    sampler.start()
    sampler.start()
    run()
    sampler.stop()
    sampler.stop()
    assert not any(thread.name == "advisor stacks" for thread in threading.enumerate())
    return records


def total_samples(records: list[dict[str, Any]]) -> int:
    return sum(count for data in records for count, _ in data["stacks"])


def test_pure_python_holding_the_gil_is_sampled() -> None:
    records = sample_stacks(lambda: keep_busy(1.0))
    stacks = read_stacks(record_of(*records))
    assert total_samples(records) >= 10
    assert sum(
        s.samples for s in stacks if any("busy" in f for f in s.frames)
    ) >= 0.9 * total_samples(records)


class Clock:
    sleep = staticmethod(time.sleep)


def sleep_often() -> None:
    for _ in range(30):
        time.sleep(0.01)


def slept_by_a_method() -> None:
    clock = [Clock()]
    for _ in range(30):
        clock[0].sleep(0.01)


def slept_by_its_name() -> None:
    from time import sleep as pause

    def rest() -> None:
        pause(0.01)

    for _ in range(30):
        rest()


@pytest.mark.parametrize(
    ("run", "called"),
    [
        (sleep_often, {"time.sleep"}),
        (slept_by_a_method, {".sleep"}),
        (slept_by_its_name, {"", "pause"}),
    ],
)
def test_functions_called_in_c_are_named(run: Any, called: set[str]) -> None:
    stacks = read_stacks(record_of(*sample_stacks(run)))
    assert total_samples(sample_stacks(run)) > 5
    matching = [stack for stack in stacks if any(run.__name__ in frame for frame in stack.frames)]
    assert matching and {stack.called for stack in matching} <= called
    assert not any("built-in" in frame for stack in stacks for frame in stack.frames)


def name_of_operator(*_: Any) -> str:
    return operator_function(sys._getframe(1))


Symbols = type(
    "Symbols",
    (),
    {
        f"__{name}__": name_of_operator
        for name in "add sub mul truediv floordiv mod pow matmul and or xor getitem neg invert "
        "lt gt eq ne".split()
    },
)
"""Operators that return how they are named in the line that uses them."""


def test_symbols_are_named_as_in_the_operator_module() -> None:
    a: Any = Symbols()
    assert [a + a, a - a, a * a, a / a, a // a] == [
        f"operator.{name}" for name in ("add", "sub", "mul", "truediv", "floordiv")
    ]
    assert [a % a, a**a, a @ a, a & a, a | a, a ^ a, -a, ~a, a[0]] == [
        f"operator.{name}"
        for name in ("mod", "pow", "matmul", "and_", "or_", "xor", "neg", "invert", "getitem")
    ]
    assert [a < a, a > a, a == a, a != a] == [f"operator.{n}" for n in ("lt", "gt", "eq", "ne")]
    assert name_of_operator() == ""


def powers_of_numbers() -> None:
    value, end = 1.5, time.monotonic() + 0.6
    while time.monotonic() < end:
        for _ in range(1000):
            value = value**0.6 + 1


def test_symbols_in_a_loop_over_numbers_are_the_lines_own_python() -> None:
    stacks = read_stacks(record_of(*sample_stacks(powers_of_numbers)))
    matching = [stack for stack in stacks if powers_of_numbers.__name__ in stack.frames[-1]]
    symbols = [stack for stack in matching if stack.called.startswith("operator.")]
    assert total_of(matching) > 5 and total_of(symbols) < 0.2 * total_of(matching)


def test_call_holding_the_gil_counts_for_its_whole_duration() -> None:
    """Sorting holds the interpreter for some tenth of a second, and sleeping does not."""
    numbers = [float(n * 7919 % 1_000_003) for n in range(600_000)]
    spent = {"sort": 0.0, "sleep": 0.0}

    def run() -> None:
        while sum(spent.values()) < 3:
            begin = time.monotonic()
            sorted(numbers)
            middle = time.monotonic()
            time.sleep(middle - begin)
            spent["sort"] += middle - begin
            spent["sleep"] += time.monotonic() - middle

    stacks = read_stacks(record_of(*sample_stacks(run)))
    share = sum(s.samples for s in stacks if s.called == "builtins.sorted") / total_of(stacks)
    assert share == pytest.approx(spent["sort"] / sum(spent.values()), abs=0.2)


def total_of(stacks: Any) -> int:
    return sum(stack.samples for stack in stacks)


def test_the_interpreters_switch_interval_is_the_programs() -> None:
    seen: set[float] = set()

    def run() -> None:
        for _ in range(3000):
            seen.add(sys.getswitchinterval())
            time.sleep(0.0001)

    sample_stacks(run)
    assert seen == {sys.getswitchinterval()}


def test_stacks_are_not_sampled_without_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert total_samples(sample_stacks(lambda: keep_busy(0.3))) > 0
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert sample_stacks(lambda: keep_busy(0.3)) == []


def test_stacks_are_sampled_only_in_unprofiled_training() -> None:
    assert not sample_stacks(lambda: keep_busy(0.2), busy=lambda: True)
    assert not sample_stacks(lambda: keep_busy(0.2), thread=lambda: -1)


def test_an_exception_in_the_sampler_stays_there() -> None:
    def raise_runtime_error() -> int:
        raise RuntimeError

    assert not sample_stacks(lambda: keep_busy(0.1), thread=raise_runtime_error)


def test_recorder_thread_start_is_not_program_time() -> None:
    def work(file: str) -> int:
        wait = "def wait(): threading.Event().wait(0.3)"
        exec(compile(wait, file, "exec"), space := {"threading": threading})
        return total_samples(sample_stacks(space["wait"]))

    assert work("train.py") > 0
    assert work(str(Path(stack_samples.__file__).with_name("background.py"))) == 0


def test_no_frame_is_kept() -> None:
    class LargeObject:
        alive = 0

        def __init__(self) -> None:
            LargeObject.alive += 1

        def __del__(self) -> None:
            LargeObject.alive -= 1

    def work() -> None:
        for _ in range(20):
            big = LargeObject()
            time.sleep(0.01)
            assert LargeObject.alive == 1
            del big

    gc.disable()
    try:
        assert sample_stacks(work)
        assert LargeObject.alive == 0
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_in_a_forked_child_stop_returns() -> None:
    me = threading.get_ident()
    sampler = StackSampler(lambda: me, lambda: False, lambda *_: None)
    sampler.start()
    pid = os.fork()
    if pid == 0:
        sampler.stop()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    sampler.stop()


class Seen:
    """Containers of a program: lists, sets and dictionaries."""

    def __init__(self) -> None:
        self.list_by_user = collections.defaultdict(list)
        self.set_by_user = collections.defaultdict(set)
        self.items = [1, 2]
        self.table = {1: 2}

    def in_list_of_user(self, user: int) -> bool:
        return 3 in self.list_by_user or user in self.list_by_user[user]

    def in_quick_ones(self, user: int) -> bool:
        chosen = {each + 1 for each in self.items}
        return user in self.set_by_user[user] or user in self.table or user in chosen

    def in_constants(self, user: int) -> bool:
        return user in (1, 2) or user in {3, 4}

    def call_all(self, user: int) -> list[bool]:
        own = [self.in_list_of_user(user) for _ in range(3)]
        return [*own, self.in_quick_ones(user), self.in_constants(user), user in self.items]


def test_tests_that_may_search_a_list_are_found() -> None:
    first = Seen.call_all.__code__.co_firstlineno
    found = membership_tests(Seen.call_all.__code__, globals())
    assert {(code.co_name, line - first) for code, line in found} == {
        ("in_list_of_user", Seen.in_list_of_user.__code__.co_firstlineno + 1 - first),
        ("call_all", 2),
    }
    assert membership_tests(Seen.in_quick_ones.__code__, globals()) == []
    assert membership_tests(Seen.in_constants.__code__, {}) == []


def search_a_list() -> None:
    items, end = list(range(3000)), time.monotonic() + 0.6
    while time.monotonic() < end:
        for value in range(500):
            assert value + 2000 in items


def test_sampled_functions_are_written_with_their_tests() -> None:
    record = record_of(*sample_stacks(search_a_list))
    tests = read_membership_tests(record)
    (key,) = (key for key in tests if key[1] == "search_a_list")
    assert [each.line for each in tests[key]] == [search_a_list.__code__.co_firstlineno + 4]


@pytest.mark.parametrize("tests", [3, [1], [[0]], [[0, 5]], [[0, -1]], [[0, True]], [["0", 0]]])
def test_damaged_tests_are_left_out(tests: Any) -> None:
    good = {"frames": ["a.py(1): f", "a.py(3): f"], "stacks": [], "tests": [[0, 1]]}
    damaged = {"frames": ["b.py(1): f", "b.py(3): f"], "stacks": [], "tests": tests}
    assert list(read_membership_tests(record_of(damaged, good))) == [("a.py", "f")]


def record_of(*records: dict[str, Any]) -> RankRecord:
    return RankRecord(
        rank=RankInfo(), events=[Event(t=0, kind="stacks", data=data) for data in records]
    )


DAMAGED: list[Any] = [
    {},
    {"frames": 3, "stacks": []},
    {"frames": ["a.py(1): f"], "stacks": [[1]]},
    {"frames": ["a.py(1): f"], "stacks": [[1, [1]], [1, [-1]], [1, [True]], [1, []]]},
    {"frames": ["a.py(1): f"], "stacks": [[0, [0]], [-5, [0]], [1 << 40, [0]], ["1", [0]]]},
    {"frames": [7, None], "stacks": [[1, [0]], [1, [1]]]},
    {"frames": ["a.py(1): f"], "stacks": [5, None, "x", {"0": [0]}]},
]


@pytest.mark.parametrize("data", DAMAGED, ids=[json.dumps(d)[:40] for d in DAMAGED])
def test_damaged_stacks_are_left_out(data: Any) -> None:
    good = {"frames": ["a.py(1): f"], "stacks": [[3, [0]]]}
    assert [s.samples for s in read_stacks(record_of(data, good))] == [3]


def line(*stacks: tuple[int, str]) -> Any:
    frames = sorted({frame for _, text in stacks for frame in text.split("; ")})
    lines = [[n, [frames.index(f) for f in text.split("; ")]] for n, text in stacks]
    return hottest_line(read_stacks(record_of({"frames": frames, "stacks": lines})))


def test_innermost_user_function_covering_half_is_named() -> None:
    main, log = "train.py(9): main", "train.py(4): log"
    result = line(
        (6, f"{main}; {log}; json/__init__.py(231): dumps"), (3, f"{main}; {log}"), (1, main)
    )
    assert (result.location.line, result.location.function, result.share) == (4, "log", 0.9)
    assert result.library_function == "dumps (json/__init__.py:231)"
    assert line((MIN_SAMPLES - 1, main)) is None
    assert line((20, "torch/functional.py(3): norm")) is None
    # several lines of the loop itself are no culprit, one is
    assert line((10, "train.py(9): main"), (10, "train.py(12): main")) is None
    assert line((18, "train.py(9): main"), (2, "train.py(12): main")).location.line == 9


def test_number_of_written_stacks_is_limited() -> None:
    def work() -> None:
        code = "def f{0}():\n import time; time.sleep(0.021)\n"
        space: dict[str, Any] = {}
        for n in range(30):
            exec(code.format(n), space)
            space[f"f{n}"]()

    records = sample_stacks(work)
    assert all(len(data["stacks"]) <= MAX_STACKS for data in records) and total_samples(records) > 5


def test_looking_for_a_function_runs_no_code_of_a_metaclass() -> None:
    read_names: list[str] = []

    class Watching(type):
        def __getattribute__(cls, name: str) -> Any:
            read_names.append(name)
            return super().__getattribute__(name)

    class Watched(metaclass=Watching):
        def search(self, item: int, items: list[int]) -> bool:
            return item in items

    names = {"__name__": __name__, "Watched": Watched}
    read_names.clear()
    found = find_in_file(names, "search")
    assert [line for _, line in membership_tests(found.__code__, names)]
    assert read_names == []
