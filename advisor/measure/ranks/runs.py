"""Which summaries are of one run, each rank once: folders hold what was left there before."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from advisor.core import text as t
from advisor.core.ranks import numbers
from advisor.measure.ranks.summary import Summary, Unread

MAX_CLOCK_DIFFERENCE_NS = 60 * 10**9
"""Hosts of one job keep Unix time to well under a second (NTP); traces whose collectives fall
together only when their clocks are moved by minutes are of different runs of one script."""
SHOWN = 3
"""Files that are known by name."""


class OneRun(NamedTuple):
    """What belongs together."""

    summaries: list[Summary]
    """By rank, each once."""
    others: list[Unread]
    """Of another run, with the reason."""
    notes: dict[str, str]
    """For ``Ranks.not_checked``."""


def one_run(summaries: Sequence[Summary]) -> OneRun:
    """The run of which most ranks are here."""
    kept, others = _at_one_time(summaries)
    kept, apart = _of_one_size(kept)
    notes: dict[str, str] = {}
    kept = _named(kept, notes)
    best: dict[int, Summary] = {}
    again: list[int] = []
    for summary in sorted(kept, key=lambda s: (-len(s.steps), s.path)):
        if summary.rank in best:
            again.append(summary.rank)
        else:
            best[summary.rank] = summary
    if again:
        notes["further files of the same ranks"] = f"of ranks {numbers(again)}"
    return OneRun([best[rank] for rank in sorted(best)], [*others, *apart], notes)


def _at_one_time(summaries: Sequence[Summary]) -> tuple[list[Summary], list[Unread]]:
    """Those whose steps lie where most ranks' do: further apart than clocks ever are, it is another
    run, or another part of it."""
    timed = [s for s in summaries if s.steps and s.clock == "unix"]
    if len(timed) < 2:
        return list(summaries), []
    timed.sort(key=lambda s: s.steps[0].start)
    runs, until = [[timed[0]]], timed[0].steps[-1].end
    for summary in timed[1:]:
        if summary.steps[0].start > until + MAX_CLOCK_DIFFERENCE_NS:
            runs.append([])
        runs[-1].append(summary)
        until = max(until, summary.steps[-1].end)
    most = max(runs, key=_size)
    kept: list[Summary] = list(summaries)
    others: list[Unread] = []
    for run in runs:
        if run is not most:
            kept, apart = _parted(kept, {id(s) for s in run}, _another(run, most))
            others += apart
    return kept, others


def _size(run: Sequence[Summary]) -> int:
    """Its ranks."""
    return len({(s.rank, s.rank < 0 and s.path) for s in run})


def _another(run: Sequence[Summary], most: Sequence[Summary]) -> str:
    """Why a run is left out beside the one that is analysed, and how to analyse it."""
    ns = run[0].steps[0].start - most[0].steps[0].start
    size = "with as many ranks" if _size(run) == _size(most) else "with fewer ranks"
    when = f"{t.format_duration(abs(ns))} {'after' if ns > 0 else 'before'} the one analysed"
    folder = _folder(run)
    alone = folder and not any(s.path.startswith(f"{folder}/") for s in most)
    how = f"advisor analyze {folder}" if alone else "give its files to analyse it"
    return f"another run {size}, recorded {when}: {how}"


def _folder(run: Sequence[Summary]) -> str:
    """What the paths of its files have in common, up to a slash."""
    folders = [f"{s.path.rpartition('/')[0]}/" for s in run]  # of URLs too, which are no paths
    return os.path.commonprefix(folders).rpartition("/")[0]  # noqa: RUF071


def _of_one_size(summaries: Sequence[Summary]) -> tuple[list[Summary], list[Unread]]:
    """Those that tell the world size that most tell, and those that tell none."""
    sizes = Counter(s.world for s in summaries if s.world)
    if len(sizes) < 2:
        return list(summaries), []
    world = sizes.most_common(1)[0][0]
    out = {id(s) for s in summaries if s.world not in (0, world)}
    return _parted(summaries, out, f"of a job that has not {world} ranks, as most say")


def _parted(
    summaries: Sequence[Summary], out: set[int], why: str
) -> tuple[list[Summary], list[Unread]]:
    kept = [s for s in summaries if id(s) not in out]
    return kept, [Unread(rank=s.rank, path=s.path, why=why) for s in summaries if id(s) in out]


def _named(summaries: Sequence[Summary], notes: dict[str, str]) -> list[Summary]:
    """Ranks that neither file nor name tells: the one that is missing where it is one, else numbers
    that no rank of the job has."""
    unknown = sorted((s for s in summaries if s.rank < 0), key=lambda s: s.path)
    if not unknown:
        return list(summaries)
    known = {s.rank for s in summaries if s.rank >= 0}
    world = max((s.world for s in summaries), default=0)
    missing = sorted(set(range(world)) - known)
    beyond = max([world, *(rank + 1 for rank in known)])
    given = missing if len(unknown) == len(missing) == 1 else range(beyond, beyond + len(unknown))
    numbers = dict(zip((id(s) for s in unknown), given, strict=True))
    if list(given) != missing:
        lines = [f"{rank} is {s.path}" for rank, s in zip(given, unknown, strict=True)]
        more = "" if len(lines) <= SHOWN else f" and {len(lines) - SHOWN} more"
        notes["which ranks some files are of"] = (
            f"neither they nor their names say it; here {', '.join(lines[:SHOWN])}{more}"
        )
    return [structs.replace(s, rank=numbers.get(id(s), s.rank)) for s in summaries]
