"""The replay of a job against the job run again with the change in it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from advisor.core.finding import Edit, Select
from advisor.measure.ranks.join import match_collectives
from advisor.measure.ranks.rank_work import profile_ranks
from advisor.replay.ranks.gains import without_collectives
from advisor.replay.ranks.ranks_replay import JobChange, RanksReplay

sys.path.insert(0, str(Path(__file__).parent))
from job_by_hand import MS, Collective, Item, Program, Work, run


def uneven_job(seed: int, barriers: int) -> Program:
    """A job of three ranks with six pieces of uneven work per step; barriers after so many of
    them, and the gradients' all-reduce at the end."""
    work = np.random.default_rng(seed).uniform(0.2, 2.0, (3, 5, 6))

    def program(rank: int, step: int) -> list[Item]:
        items: list[Item] = []
        for n in range(6):
            items.append(Work(MS * work[rank, step, n]))
            if n < barriers:
                items.append(Collective("world", (0, 1, 2), 0.05 * MS, message=1))
        return [*items, Collective("world", (0, 1, 2), 0.4 * MS)]

    return program


@pytest.mark.parametrize("seed", range(5))
def test_ranks_without_barriers_wait_only_at_the_end(seed: int) -> None:
    """The sum of the slowest pieces becomes the slowest sum: less than the waits at barriers."""
    ran, without = run(3, 5, uneven_job(seed, 5)), run(3, 5, uneven_job(seed, 0))
    replay = RanksReplay(
        ran.summaries, profile_ranks(ran.summaries), match_collectives(ran.summaries)
    )
    barriers = Select(on="gpu", family=("communication",), name="^gloo:barrier$", max_bytes=1)
    change = without_collectives(replay, Edit(op="scale", select=barriers, factor=0.0))
    assert change is not None and change.removed is not None
    assert change.removed.sum() == 3 * 5 * 5
    gain = replay.replayed_ns - replay.step(change)
    assert gain == pytest.approx(ran.step_ns - without.step_ns, rel=0.01)
    # edits that say nothing of a message are of transfers alone
    assert without_collectives(replay, Edit(op="remove", select=Select(on="gpu"))) is None


def random_job(seed: int, *, factor: float = 1.0, link: float = 1.0) -> Program:
    """Twelve ranks in groups of four and of three, own work and transfers drawn at random."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.2, 2.0, (12, 4, 10))
    transfer = rng.uniform(0.01, 0.3, (4, 10))

    def program(rank: int, step: int) -> list[Item]:
        items: list[Item] = []
        for n in range(10):
            scale = factor if rank == 5 else 1.0
            items.append(Work(MS * work[rank, step, n] * scale))
            took = transfer[step, n] * MS * link
            if n % 3:
                members = tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
                items.append(Collective(f"a{rank // 4}", members, took))
            else:
                items.append(Collective(f"b{rank % 4}", tuple(range(rank % 4, 12, 4)), took))
        return [*items, Work(0.3 * MS)]

    return program


@pytest.mark.parametrize("seed", range(5))
def test_replay_without_changes_is_the_measured_step(seed: int) -> None:
    ran = run(12, 4, random_job(seed), shift=lambda rank: 2.0 * MS * (rank % 3))
    replay = RanksReplay(
        ran.summaries, profile_ranks(ran.summaries), match_collectives(ran.summaries)
    )
    assert replay.reason == ""
    assert replay.error == pytest.approx(0, abs=1e-4)
    assert replay.replayed_ns == pytest.approx(ran.step_ns, rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_gain_of_a_faster_rank_matches_a_simulated_job(seed: int) -> None:
    ran = run(12, 4, random_job(seed, factor=2.0))
    replay = RanksReplay(
        ran.summaries, profile_ranks(ran.summaries), match_collectives(ran.summaries)
    )
    factor = np.ones((12, 4))
    factor[5] = 0.5
    new_step_ns = run(12, 4, random_job(seed, factor=1.0)).step_ns
    # the last 0.3 ms of a step are halved here and not in the job
    gain = replay.gain(replay.scaled_work(factor))
    assert gain.gain == pytest.approx(ran.step_ns - new_step_ns, abs=0.15 * MS + 0.02 * gain.gain)
    assert gain.low <= gain.gain <= gain.high


@pytest.mark.parametrize("seed", range(5))
def test_gain_of_faster_links_matches_a_simulated_job(seed: int) -> None:
    ran = run(12, 4, random_job(seed, link=3.0))
    replay = RanksReplay(
        ran.summaries, profile_ranks(ran.summaries), match_collectives(ran.summaries)
    )
    new_step_ns = run(12, 4, random_job(seed)).step_ns
    gain = replay.gain(JobChange(transfer=replay.transfer / 3))
    assert gain.gain == pytest.approx(ran.step_ns - new_step_ns, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "cut", "steps", "replayed"),
    [(2, 1, 3, 2), (12, 1, 4, 11), (12, 8, 3, 12)],
    ids=["of two", "one of many", "most of many"],
)
def test_replay_keeps_most_steps_when_ranks_end_early(
    ranks: int, cut: int, steps: int, replayed: int
) -> None:
    """The last step of some ranks is not in their recordings. The replay keeps the most rank steps:
    2 x 3 of two ranks; 11 x 4 rather than 12 x 3; and 12 x 3 rather than 4 x 4."""

    def program(rank: int, step: int) -> list[Item]:
        return [Work(MS * (1 + rank)), Collective("world", tuple(range(ranks)), 0.1 * MS)] * 3

    summaries = list(run(ranks, 4, program).summaries)
    for place in range(cut):
        lines = summaries[place].steps
        other = replace(lines[-1], name="cut off")
        summaries[place] = replace(summaries[place], steps=[*lines[:-1], other])
    replay = RanksReplay(summaries, profile_ranks(summaries), match_collectives(summaries))
    assert replay.reason == ""
    assert (len(replay.columns), int(replay.complete_ranks.sum())) == (steps, replayed)
    assert replay.replayed_ns == pytest.approx(3 * (ranks + 0.1) * MS, rel=0.01)


def test_ranks_without_a_common_clock_are_not_replayed() -> None:
    def program(rank: int, step: int) -> list[Item]:
        return [Work(MS), Collective("world", (0, 1), 10_000)] * 5

    ran = run(2, 1, program, shift=lambda rank: rank * 300e9)
    replay = RanksReplay(
        ran.summaries, profile_ranks(ran.summaries), match_collectives(ran.summaries)
    )
    assert "apart" in replay.reason
    with pytest.raises(ValueError, match="apart"):
        replay.gain(JobChange())
