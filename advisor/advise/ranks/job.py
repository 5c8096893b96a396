"""A job of many ranks, from where its files are to what is said of it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

import advisor
from advisor.advise.ranks.sources import RemoteFile, locate
from advisor.advise.ranks.task import Order, Wanted, reason
from advisor.advise.ranks.work import SECONDS, processes, results
from advisor.advise.select import read_config
from advisor.core.errors import AdvisorError
from advisor.measure.ranks.job_report import JobReport
from advisor.measure.ranks.summary import Summary, Unread
from advisor.read.directory import MAX_ELSEWHERE
from advisor.read.remote.urls import is_url, shown

if TYPE_CHECKING:
    from advisor.advise.ranks.cluster import Cluster
    from advisor.core.pool import ProcessPool

MANY: Final = 16
"""Ranks up to which all traces are held at once and compared in full. A trace of 20 MB takes some
0.15 GB while it is measured (benchmarks/bench_fleet.py), one of 100 MB some 0.8 GB: sixteen of them
are what a machine with 16 GB has room for."""


class Done(Struct):
    """How far the work is."""

    total: int
    read: int = 0
    unread: int = 0
    moved: int = 0
    """Bytes of answers."""
    dashboard: str = ""
    """Address of Dask's; empty: there is none."""

    @property
    def ranks(self) -> int:
        """That are done, one way or the other."""
        return self.read + self.unread


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def study(
    places: Sequence[str],
    *,
    ranks: str = "",
    workers: int | None = None,
    cluster: str | None = None,
    wanted: Wanted | None = None,
    seconds: float = SECONDS,
    told: Callable[[Done], object] | None = None,
    sources: Sequence[RemoteFile] | None = None,
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
        raise AdvisorError(f"{named(places)}: no traces there")
    chosen = wanted or Wanted()
    if not chosen.config:
        chosen = structs.replace(chosen, config=read_config())
    orders = [Order(source=source, wanted=chosen) for source in _unsure(found)]
    done = Done(total=len(orders))
    say = told or (lambda _: None)
    summaries: list[Summary] = []
    unread: list[Unread] = []

    def moved(size: int) -> None:
        done.moved += size

    with _workers(workers, cluster, len(orders)) as crew:
        done.dashboard = getattr(crew, "link", "")
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
        raise AdvisorError(
            f"{named(places)}: none of the {len(unread)} files can be read; first: "
            f"{unread[0].path}: {unread[0].why}"
        )
    from advisor.advise.ranks.diagnose import diagnose

    try:
        report = diagnose(summaries, unread, source=named(places))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of odd summaries
        why = reason(f"{type(error).__name__}: {error}")
        raise AdvisorError(
            f"{named(places)}: the ranks cannot be compared, a fault of advisor ({why})"
        ) from error
    report.version = report.version or advisor.__version__
    report.seconds = time.monotonic() - started
    return report


def _unsure(found: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Names that several files share may count the ranks of each host: then the traces say it."""
    names = Counter(source.rank for source in found)
    return [
        structs.replace(source, rank=None)
        if names[source.rank] > 1 and not is_url(source.at)
        else source
        for source in found
    ]


def is_many(places: Sequence[str]) -> bool:
    """Whether there are more ranks than are held at once, or more files elsewhere."""
    found = _located(places)
    return _ranks(found) > MANY or sum(is_url(source.at) for source in found) > MAX_ELSEWHERE


def count_ranks(places: Sequence[str]) -> int:
    """How many ranks there are, by the names of the files: numbers behind ``rank``, else processes
    as PyTorch names their files (``<host>_<pid>.<time>.pt.trace.json``). What has neither name may
    be one rank's windows and is not counted. 0: nothing there that can be read."""
    return _ranks(_located(places))


def _located(places: Sequence[str]) -> list[RemoteFile]:
    try:
        return locate(places)
    except AdvisorError:
        return []


def _ranks(found: Sequence[RemoteFile]) -> int:
    names = (Path(source.url).name for source in found if source.rank is None)
    processes = {name.partition(".")[0] for name in names if ".pt.trace.json" in name}
    return len({source.rank for source in found} - {None}) + len(processes)


def named(places: Sequence[str]) -> str:
    """What is analysed, without credentials."""
    first = shown(places[0]) if places else ""
    return f"{first} and {len(places) - 1} more" if len(places) > 1 else first


def _workers(
    count: int | None, cluster: str | None, orders: int
) -> AbstractContextManager[ProcessPool | Cluster]:
    if cluster is not None:
        from advisor.advise.ranks.cluster import Cluster

        return Cluster(cluster)
    return processes(min(count or cores(), orders))
