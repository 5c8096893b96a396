"""Orders to answers: how often, how many at once, and what becomes of those who do not answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from advisor.advise.ranks.task import MeasureTask, run_task
from advisor.advise.ranks.worker_pool import RETRIES, iterate_results
from advisor.core.pool import WorkerDied
from advisor.measure.ranks.summary_schema import RankSummary, UnreadRank, encode
from advisor.read.remote.urls import RemoteFile

Act = Callable[[int, int], bytes]


def orders(count: int) -> list[MeasureTask]:
    return [
        MeasureTask(source=RemoteFile(url=f"rank{n}", at=f"rank{n}", rank=n)) for n in range(count)
    ]


def encode_summary(rank: int) -> bytes:
    return encode(RankSummary(rank=rank, path=f"rank{rank}"))


class FakeWorkers:
    """Workers in this process: ``perform(rank, number of the attempt)`` answers for them."""

    def __init__(self, perform: Act, slots: int = 3) -> None:
        self.perform = perform
        self.count = slots
        self.times: Counter[int] = Counter()
        self.busy = self.max_busy = 0
        self.others_at_start: dict[tuple[int, int], int] = {}
        """(rank, time) -> how many others were being performed when it began."""
        self.abandoned: list[Any] = []
        self.lock = threading.Lock()

    def slots(self) -> int:
        return self.count

    def submit(self, fn: Any, order: bytes, /) -> Future[bytes]:
        rank = msgspec.msgpack.decode(order)["source"]["rank"]
        future: Future[bytes] = Future()
        with self.lock:
            self.times[rank] += 1
            self.others_at_start[rank, self.times[rank]] = self.busy
            self.busy += 1
            self.max_busy = max(self.max_busy, self.busy)
            now = self.times[rank]
        threading.Thread(target=self._perform, args=(future, rank, now), daemon=True).start()
        return future

    def _perform(self, future: Future[bytes], rank: int, now: int) -> None:
        try:
            data = self.perform(rank, now)
        except BaseException as error:
            with self.lock:
                self.busy -= 1
            future.set_exception(error)
        else:
            with self.lock:
                self.busy -= 1
            future.set_result(data)

    def cancel(self, answer: Any) -> None:
        self.abandoned.append(answer)


def test_every_task_is_answered_once_within_the_slot_limit() -> None:
    crew = FakeWorkers(lambda rank, _: encode_summary(rank))
    items = list(iterate_results(orders(20), crew))
    assert sorted(one.rank for one in items) == list(range(20))
    assert all(isinstance(one, RankSummary) for one in items)
    assert set(crew.times.values()) == {1}
    assert crew.max_busy <= 3


def test_task_of_a_dead_worker_is_retried_alone() -> None:
    def perform(rank: int, now: int) -> bytes:
        if rank == 4 and now == 1:
            raise WorkerDied("killed")
        return encode_summary(rank)

    crew = FakeWorkers(perform)
    items = list(iterate_results(orders(8), crew))
    assert sorted(one.rank for one in items if isinstance(one, RankSummary)) == list(range(8))
    assert crew.times[4] == 2
    assert crew.others_at_start[4, 2] == 0


def test_killing_task_is_given_up_without_other_tasks() -> None:
    def perform(rank: int, now: int) -> bytes:
        if rank == 2:
            raise WorkerDied("its process was killed by signal 9")
        return encode_summary(rank)

    crew = FakeWorkers(perform)
    items = list(iterate_results(orders(6), crew))
    (lost,) = [one for one in items if isinstance(one, UnreadRank)]
    assert (lost.rank, lost.path) == (2, "rank2")
    assert "signal 9, 3 times" in lost.why
    assert crew.times[2] == 1 + RETRIES
    assert len(items) == 6


def test_only_the_guilty_of_several_blamed_tasks_is_given_up() -> None:
    """Dask blames whatever waited at a worker that died."""

    def perform(rank: int, now: int) -> bytes:
        if rank == 1 or (rank == 3 and now == 1):
            raise WorkerDied("the workers that read it died", count=RETRIES)
        return encode_summary(rank)

    crew = FakeWorkers(perform)
    items = list(iterate_results(orders(5), crew))
    assert [one.rank for one in items if isinstance(one, UnreadRank)] == [1]
    assert crew.times[3] == 2


def test_task_blamed_by_a_cluster_kills_no_more_workers() -> None:
    def perform(rank: int, now: int) -> bytes:
        if rank == 1:
            raise WorkerDied("the workers that read it died", count=RETRIES)
        return encode_summary(rank)

    crew = FakeWorkers(perform)
    items = list(iterate_results(orders(5), crew))
    assert [one.rank for one in items if isinstance(one, UnreadRank)] == [1]
    assert crew.times[1] == 1


def test_only_the_timed_out_task_is_given_up() -> None:
    over = threading.Event()

    def perform(rank: int, now: int) -> bytes:
        if rank == 0:
            over.wait(60)
        return encode_summary(rank)

    crew = FakeWorkers(perform)
    began = time.monotonic()
    items = list(iterate_results(orders(4), crew, seconds=0.5))
    assert time.monotonic() - began < 50
    over.set()
    (lost,) = [one for one in items if isinstance(one, UnreadRank)]
    assert lost.rank == 0
    assert "not done within" in lost.why
    assert len(crew.abandoned) == 1
    assert len(items) == 4


def test_without_any_worker_left_the_rest_is_reported_as_unread() -> None:
    crew = FakeWorkers(lambda rank, _: encode_summary(rank))

    def perform(rank: int, now: int) -> bytes:
        crew.count = 0
        return encode_summary(rank)

    crew.perform = perform
    items = list(iterate_results(orders(9), crew))
    assert sorted(one.rank for one in items) == list(range(9))
    assert any(isinstance(one, UnreadRank) and "no worker is left" in one.why for one in items)


def test_invalid_summary_fails_its_rank_only() -> None:
    crew = FakeWorkers(lambda rank, _: b"\xff" if rank == 1 else encode_summary(rank))
    items = list(iterate_results(orders(3), crew))
    assert [one.rank for one in items if isinstance(one, UnreadRank)] == [1]


def test_an_order_of_another_version_is_refused_by_the_worker() -> None:
    order = MeasureTask(source=RemoteFile(url="rank3", at="rank3", rank=3), version="0.0.0")
    unread = msgspec.msgpack.decode(run_task(order.encoded()))["unread"]
    assert unread["rank"] == 3
    assert "install the same" in unread["why"]
    unread = msgspec.msgpack.decode(run_task(b"nonsense"))["unread"]
    assert "does not know this task" in unread["why"]
