"""Measuring a job on a Dask cluster: a real one of two processes, of which one is really killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from advisor.advise.ranks import worker_pool as home
from advisor.advise.ranks.job import RanksDone
from advisor.advise.ranks.worker_pool import Cluster
from advisor.core.errors import AdvisorError


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Any]:
    """Two workers of one thread, each replaced when it dies; whoever kills two is to blame."""
    distributed = pytest.importorskip("distributed", reason="the cluster extra is not installed")
    import dask

    settings = {
        "distributed.scheduler.allowed-failures": 1,
        "distributed.comm.timeouts.connect": "60s",
        "distributed.logging.distributed": "critical",
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
    ):
        yield cluster


def test_a_worker_killed_in_the_middle_changes_nothing(scheduler: Any, job_folder: Any) -> None:
    address = scheduler.scheduler_address
    local = job_folder.analyze(workers=1)
    assert len(local.ranks.lines) == job_folder.ranks
    links: set[str] = set()

    def progress(done: RanksDone) -> None:
        links.add(done.dashboard)

    undisturbed = job_folder.analyze(cluster=address, on_progress=progress)
    assert undisturbed == local
    assert links == {scheduler.dashboard_link}
    job_folder.inject_worker_fault(2, "once")
    after_kill = job_folder.analyze(cluster=address)
    assert not (job_folder.rules / "rank2.json.once").exists(), "nobody was killed"
    assert after_kill == undisturbed


def test_a_file_that_kills_workers_fails_alone(scheduler: Any, job_folder: Any) -> None:
    job_folder.inject_worker_fault(4, "always")
    (job_folder.folder / "rank1.json").write_text("{")
    ranks = job_folder.analyze(cluster=scheduler.scheduler_address).ranks
    assert len(ranks.lines) == job_folder.ranks - 2
    reasons = {item.ranks: item.why for item in ranks.missing}
    assert set(reasons) == {"1", "4"}
    assert "died" in reasons["4"]


def test_unreachable_cluster_address_is_one_line_error() -> None:
    pytest.importorskip("distributed", reason="the cluster extra is not installed")
    with pytest.raises(AdvisorError, match=r"--cluster tcp://127\.0\.0\.1:1: no scheduler answers"):
        Cluster("tcp://127.0.0.1:1", patience=1.0)


def test_missing_extra_error_shows_its_install_command(
    monkeypatch: pytest.MonkeyPatch, job_folder: Any
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(AdvisorError, match=r'--cluster needs distributed: pip install ".*cluster'):
        job_folder.analyze(cluster="tcp://127.0.0.1:8786")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("0.0.1", "the worker tcp://w:1 has advisor 0.0.1, this is "),
        (ModuleNotFoundError("no", name="advisor"), "the worker tcp://w:1 cannot import advisor"),
        (ValueError("failed"), r"does not run advisor \(failed\)"),
    ],
)
def test_worker_version_mismatch_is_one_line_error(
    monkeypatch: pytest.MonkeyPatch, answer: object, why: str
) -> None:
    fake_client = client(run=lambda *_, **__: {"tcp://w:1": answer})
    monkeypatch.setitem(
        sys.modules, "distributed", SimpleNamespace(Client=lambda *_, **__: fake_client)
    )
    with pytest.raises(AdvisorError, match=why):
        Cluster("tcp://s:1")
    assert fake_client.closed == [True]


def test_a_cluster_without_workers_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object, **__: object) -> None:
        raise TimeoutError

    fake_client = client(wait_for_workers=wait)
    monkeypatch.setitem(
        sys.modules, "distributed", SimpleNamespace(Client=lambda *_, **__: fake_client)
    )
    with pytest.raises(AdvisorError, match=r"no worker has joined .* dask worker tcp://s:1"):
        Cluster("tcp://s:1")


def test_workers_are_given_up_after_a_long_absence_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = {"a": 2, "b": 1}
    now = [0.0]
    fake_client = client(run=lambda *_, **__: {}, nthreads=lambda: threads)
    monkeypatch.setitem(
        sys.modules, "distributed", SimpleNamespace(Client=lambda *_, **__: fake_client)
    )
    monkeypatch.setattr(home, "time", SimpleNamespace(monotonic=lambda: now[0]))
    crew = Cluster("tcp://s:1", patience=60.0)
    assert crew.slots() == 3
    threads = {}
    now[0] = 10.0
    assert crew.slots() == 3
    now[0] = 65.0
    assert crew.slots() == 3
    threads = {"c": 4}
    now[0] = 69.0
    assert crew.slots() == 4
    threads = {}
    now[0] = 80.0
    assert crew.slots() == 4
    now[0] = 145.0
    assert crew.slots() == 0


def client(**acts: Any) -> Any:
    """A stand-in for Dask's client."""
    closed: list[bool] = []
    fields = {
        "closed": closed,
        "close": lambda: closed.append(True),
        "wait_for_workers": lambda *_, **__: None,
        "dashboard_link": "",
        **acts,
    }
    return SimpleNamespace(**fields)
