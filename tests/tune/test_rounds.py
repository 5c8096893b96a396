"""Programs that take turns: all of one stands still while another runs, whatever comes of them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.tune import rounds as round_
from advisor.tune.knob import KnobSetting
from advisor.tune.measured_gain import block_log_ratios, measure_gain
from advisor.tune.rounds import TrialLimits, TrialRounds
from advisor.tune.trial_process import RunningTrial, TrialProgram

pytest.importorskip("torch")

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux")
watched = pytest.mark.timed

TRAIN = """
import os, sys, threading, time
import torch
torch.set_num_threads(1)
STEPS = {steps}
gaps = []
def clock():
    last = time.monotonic()
    while True:
        time.sleep(0.01)
        now = time.monotonic()
        gaps.append(now - last)
        last = now
threading.Thread(target=clock, daemon=True).start()
def main():
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    try:
        for step in range(STEPS):
            time.sleep(0.02)
            optimizer.zero_grad()
            net(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            {each}
    finally:
        print("longest pause of a thread:", max(gaps), flush=True)
main()
"""
LIMITS = TrialLimits(warmup=4, steps=16, max_runs=16, seconds=60.0)


def program(folder: Path, each: str = "pass", steps: int = 10_000) -> TrialProgram:
    script = folder / "train.py"
    script.write_text(TRAIN.format(each=each, steps=steps))
    (folder / "root").mkdir()
    return TrialProgram([sys.executable, str(script)], (folder / "root").resolve())


def rounds(trial_program: TrialProgram, seconds: float = 600.0) -> TrialRounds:
    return TrialRounds(trial_program, LIMITS, time.monotonic() + seconds, lambda text: None)


OTHER = (KnobSetting("set-to-none"),)


@linux
@watched
def test_paused_program_stops_all_of_its_threads(
    tmp_path: Path,
) -> None:
    trial_program = program(tmp_path)
    results = rounds(trial_program).run([(), OTHER])
    assert set(results) == {(), OTHER}
    for result in results.values():
        assert result.ended
        assert not result.problem
        assert result.blocks == [2] * 8
        assert len(result.steps_ns) == 16
        # steps do not hold the time in which the other one ran
        assert max(result.steps_ns) < 10 * min(result.steps_ns)
    assert results[()].losses == results[OTHER].losses
    for number in (1, 2):  # a block of two steps is 40 ms and more, and so long stood the other
        output = (tmp_path / "root" / f"run{number}" / "output").read_text()
        assert float(output.split()[-1]) > 0.035, output


@linux
@watched
def test_process_ending_between_turns_keeps_the_other_result(
    tmp_path: Path,
) -> None:
    trial_program = program(tmp_path, steps=11)
    results = rounds(trial_program).run([(), OTHER])
    assert not results[()].problem
    assert len(results[()].steps_ns) >= 6
    assert len(results[OTHER].steps_ns) >= 6
    fails = "if step > 8 and __import__('os').environ.get('BROKEN'): raise RuntimeError('no more')"
    other = tmp_path / "fails"
    other.mkdir()
    trial_program = program(other, each=fails)
    usual = trial_program.environment

    def break_second_run(
        home: Path, scratch: Path, knob_settings: tuple[KnobSetting, ...]
    ) -> dict[str, str]:
        return usual(home, scratch, knob_settings) | ({"BROKEN": "1"} if knob_settings else {})

    trial_program.environment = break_second_run  # type: ignore[method-assign]
    results = rounds(trial_program).run([(), OTHER])
    assert results[OTHER].problem == "RuntimeError: no more"
    assert len(results[()].steps_ns) == 16


@linux
@watched
def test_out_of_memory_beside_others_is_retried_alone(tmp_path: Path) -> None:
    """The second process of the first round meets another that holds the whole memory."""
    each = "if step == 6 and os.environ.get('SECOND'): raise MemoryError('no room')"
    trial_program = program(tmp_path, each=each)
    usual = trial_program.environment

    def crowd_second_run(
        home: Path, scratch: Path, knob_settings: tuple[KnobSetting, ...]
    ) -> dict[str, str]:
        more = {"SECOND": "1"} if home.name == "run2" else {}
        return usual(home, scratch, knob_settings) | more

    trial_program.environment = crowd_second_run  # type: ignore[method-assign]
    run = rounds(trial_program)
    result = run.run([(), OTHER])
    assert run.one_at_a_time
    assert run.processes == 3
    assert not result[OTHER].problem
    assert not result[OTHER].blocks
    assert len(result[OTHER].steps_ns) == 16


@linux
@watched
def test_ranks_of_a_job_are_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = rounds(program(tmp_path))
    rounds_result = run.run([(), OTHER])
    assert run.one_at_a_time
    assert [len(result.steps_ns) for result in rounds_result.values()] == [16, 16]
    assert not any(result.blocks for result in rounds_result.values())


@linux
@watched
def test_programs_run_in_sequence_without_memory_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_, "_measure_memory", lambda pid: (1 << 20, 1 << 30))
    run = rounds(program(tmp_path))
    rounds_result = run.run([(), OTHER])
    assert run.one_at_a_time
    assert [len(result.steps_ns) for result in rounds_result.values()] == [16, 16]


@linux
@watched
def test_rounds_until_the_time_limit_count(tmp_path: Path) -> None:
    run = rounds(program(tmp_path, each="time.sleep(0.4)"), seconds=0.0)
    run.longest = 0.0
    run.has_budget_for = lambda runs=1: True  # type: ignore[method-assign]
    rounds_result = run.run([(), OTHER])
    assert [result.blocks for result in rounds_result.values()] == [[2, 2], [2, 2]]
    assert all(result.ended for result in rounds_result.values())


@linux
@watched
def test_ctrl_c_between_turns_keeps_finished_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_program = program(tmp_path)
    count, run_turn = 0, RunningTrial.run_turn

    def raise_interrupt(one: RunningTrial, steps: int = 0) -> bool:
        nonlocal count
        count += 1
        if count == 8:  # two starts, two turns of each, and a third of the first are over
            raise KeyboardInterrupt
        return run_turn(one, steps)

    monkeypatch.setattr(RunningTrial, "run_turn", raise_interrupt)
    run = rounds(trial_program)
    result = run.run([(), OTHER])
    assert run.interrupted
    assert result[()].blocks == [2, 2, 2]
    assert result[OTHER].blocks == [2, 2]


@linux
@watched
def test_paused_programs_resume_if_parent_dies(tmp_path: Path) -> None:
    """Loader workers neither: they are not this process's children."""
    each = (
        "step == 3 and os.fork() == 0 and (print('child', os.getpid(), flush=True), "
        "time.sleep(600))"
    )
    trial_program = program(tmp_path, each=each)
    driver = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from advisor.tune.trial_process import TrialProgram
        (Path({str(tmp_path)!r}) / "other").mkdir()
        root = (Path({str(tmp_path)!r}) / "other").resolve()
        made = TrialProgram({trial_program.words!r}, root)
        one = made.start((), warmup=6, steps=16, seconds=60, timeout=300, turns=4)
        assert one.run_turn()
        print(one.process.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        os.killpg(group, 0)  # it is there, stopped
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        os.killpg(group, signal.SIGKILL)
        pytest.fail("left behind, stopped")


def test_blocks_are_compared_one_by_one() -> None:
    """Blocks of 10 then 20 ms per step against 5 then 20, by hand: a half and the same."""
    result = block_log_ratios([10, 10, 20, 20], [5, 5, 5, 20], [2, 2], [3, 1])
    assert result == pytest.approx([math.log(0.5), 0.0])
    assert block_log_ratios([10], [5], [], []) == []
    # steps after the last whole block are of a program that ended in it
    assert block_log_ratios([10, 10, 30], [5, 5], [2], [2]) == pytest.approx(
        [math.log(5 / (50 / 3))]
    )


@pytest.mark.parametrize("drift", [0.02, 0.5])
def test_alternating_runs_are_accurate_on_a_shared_machine(drift: float) -> None:
    """The trial has one pair; the machine's speed changes from second to second, for both sides."""
    truth, hits, widths = 0.25, 0, []
    for seed in range(200):
        random = np.random.default_rng(seed)
        load = np.exp(np.cumsum(random.normal(0, drift, 8)))
        sides = []
        for mean in (10e6, 10e6 * (1 - truth)):
            noise = np.zeros(56)
            for i in range(1, 56):
                noise[i] = 0.5 * noise[i - 1] + random.normal(0, 0.05)
            sides.append([int(x) for x in mean * np.repeat(load, 7) * np.exp(noise)])
        turns = block_log_ratios(sides[0], sides[1], [7] * 8, [7] * 8)
        gain = measure_gain([sides[0]], [sides[1]], [turns])
        assert gain is not None
        hits += gain.low <= truth <= gain.high
        widths.append((gain.high - gain.low) / 2)
    assert hits >= 180
    assert np.median(widths) < 0.05, "of steps that differ by e times and more"


def test_interrupt_during_program_start_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python drops what a signal raises in its hooks around a fork."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def raise_interrupt(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        RunningTrial(["sleep", "100"], tmp_path, {}, [tmp_path], 10)
    assert started[0].wait(10) == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
