"""The recorder notes the lines that ask for full garbage collections, and none that Python runs."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from advisor.recorder.slowdown import MAX_GC_LINES, GcPauseHook
from advisor.recorder.tape import THREAD, Tape


@pytest.fixture
def pauses_and_events() -> Any:
    tape, result = Tape(), []
    tape.hook_state[THREAD] = threading.get_ident()
    pauses = GcPauseHook(tape, lambda kind, data: result.append((kind, data)))
    pauses.install()
    yield result
    pauses.remove()


def test_a_line_that_collects_is_noted_with_its_calls(
    pauses_and_events: list[tuple[str, dict[str, Any]]],
) -> None:
    for _ in range(5):
        gc.collect()
    assert [(kind, data["times"]) for kind, data in pauses_and_events] == [
        ("collect", n) for n in (1, 2, 4)
    ]
    assert len({data["line"] for _, data in pauses_and_events}) == 1
    assert {data["file"] for _, data in pauses_and_events} == {__file__}
    assert pauses_and_events[0][1]["function"].endswith(
        "test_a_line_that_collects_is_noted_with_its_calls"
    )


def test_young_generations_and_other_threads_are_not(pauses_and_events: list[Any]) -> None:
    gc.collect(0)
    gc.collect(1)
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join()
    assert pauses_and_events == []


def test_a_program_with_many_such_lines_is_noted_within_bounds(
    pauses_and_events: list[Any],
) -> None:
    exec("\n".join(["gc.collect()"] * (2 * MAX_GC_LINES)), {"gc": gc})
    assert len(pauses_and_events) == MAX_GC_LINES
