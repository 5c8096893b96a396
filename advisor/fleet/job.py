"""A job of many ranks, from where its files are to what is said of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

import advisor
from advisor.advice.registry import read_config
from advisor.errors import AdvisorError
from advisor.fleet.report import JobReport
from advisor.fleet.sources import Source, locate
from advisor.fleet.summary import Summary, Unread
from advisor.fleet.task import Order, Wanted
from advisor.fleet.work import SECONDS, results

if TYPE_CHECKING:
    from advisor.fleet.cluster import Cluster
    from advisor.fleet.processes import Processes

MANY: Final = 16
"""Ranks up to which all traces are held at once and compared in full. A trace of 100 MB takes some
1.5 GB of memory while it is measured: 16 of them are what a machine with 32 GB has room for."""


class Done(Struct):
    """How far the work is."""

    total: int
    read: int = 0
    unread: int = 0
    moved: int = 0
    """Bytes of answers."""
    waiting_for: str = ""
    """Dask's dashboard."""

    @property
    def ranks(self) -> int:
        """That are done, one way or the other."""
        return self.read + self.unread


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_url(place: str) -> bool:
    """``s3://bucket/run`` and the like; ``zip://`` and others without a host too."""
    scheme, found, _ = place.partition("://")
    return bool(found) and scheme.replace("+", "").replace("::", "").isalnum()


def study(
    places: Sequence[str],
    *,
    ranks: str = "",
    workers: int | None = None,
    cluster: str | None = None,
    wanted: Wanted | None = None,
    seconds: float = SECONDS,
    told: Callable[[Done], object] | None = None,
    sources: Sequence[Source] | None = None,
) -> JobReport:
    """Measure each rank where its file is, and say what the job as a whole is about.

    ``places``: folders, files, patterns, URLs. ``ranks``: of them only these, ``0-63,512``.
    ``workers``: processes of this machine, by default one a core; ``cluster``: the address of a
    Dask scheduler instead. ``seconds``: for one file. ``told`` is called when it begins and after
    each rank. ``sources``: what ``places`` hold, where that is known already.

    Raises AdvisorError: nothing there, no cluster, or not one rank could be read.
    """
    started = time.monotonic()
    found = list(locate(places, ranks) if sources is None else sources)
    if not found:
        raise AdvisorError(f"{places[0]}: no traces there")
    chosen = wanted or Wanted()
    if not chosen.config:
        chosen = structs.replace(chosen, config=read_config())
    orders = [Order(source=source, wanted=chosen) for source in found]
    done = Done(total=len(orders))
    say = told or (lambda _: None)
    summaries: list[Summary] = []
    unread: list[Unread] = []

    def moved(size: int) -> None:
        done.moved += size

    with _workers(workers, cluster, len(orders)) as crew:
        done.waiting_for = getattr(crew, "link", "")
        say(done)
        for result in results(orders, crew, seconds=seconds, said=moved):
            if isinstance(result, Unread):
                unread.append(result)
                done.unread += 1
            else:
                summaries.append(result)
                done.read += 1
            say(done)
    summaries.sort(key=lambda one: (one.rank, one.path))
    unread.sort(key=lambda one: (one.rank, one.path))
    if not summaries:
        first = unread[0]
        raise AdvisorError(
            f"{places[0]}: none of the {len(unread)} ranks can be read; first: {first.why}"
        )
    from advisor.fleet.diagnose import diagnose

    report = diagnose(summaries, unread, source=places[0])
    report.version = report.version or advisor.__version__
    report.seconds = time.monotonic() - started
    return report


def _workers(
    count: int | None, cluster: str | None, orders: int
) -> AbstractContextManager[Processes | Cluster]:
    if cluster is not None:
        from advisor.fleet.cluster import Cluster

        return Cluster(cluster)
    from advisor.fleet.processes import Processes

    return Processes(min(count or cores(), orders))
