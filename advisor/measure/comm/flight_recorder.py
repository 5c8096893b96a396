"""Flight-recorder dumps compared across ranks: which rank did not call what the others wait in.

Collectives of a process group are numbered in the order in which a rank calls them, so equal
numbers belong together. Only numbers that are still in every rank's buffer are compared.
Differences of a group after its first are consequences of it, and left out."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from msgspec.structs import replace

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import (
    CollectiveCall,
    CollectiveProblem,
    FlightCall,
    FlightDump,
    FlightRecord,
)
from advisor.core.ranks import format_ranks

DEFAULT_GROUP = "default_pg"
"""Torch's name of the group of all ranks."""
UNEVEN_COLLECTIVES = ("all_to_all", "coalesced", "_v")
"""Parts of the names of collectives whose sizes may differ between ranks."""
MAX_PROBLEMS, MAX_CALLS = 20, 8
Kind = Literal[
    "not called", "no dump", "operation", "order", "size", "dtype", "unknown members", "unfinished"
]


@dataclass
class _Group:
    """A process group: calls by rank, and by their number."""

    name: str
    members: tuple[int, ...]
    known: bool
    """Whether the members are recorded; else they are the ranks that called anything in it."""
    collectives: dict[int, dict[int, FlightCall]] = field(default_factory=lambda: defaultdict(dict))
    pending: dict[tuple[int, int], dict[str, tuple[int, FlightCall]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """First unfinished send and first unfinished receive, by (source, target)."""


def compare_dumps(dumps: Iterable[FlightDump]) -> FlightRecord:
    """Compare the ranks' calls. Dumps without a rank get numbers that are not used."""
    by_rank: dict[int, FlightDump] = {}
    for dump in sorted(dumps, key=lambda each: (each.rank is None, each.rank or 0, each.path)):
        taken = dump.rank is None or dump.rank in by_rank
        by_rank[max(by_rank, default=-1) + 1 if taken or dump.rank is None else dump.rank] = dump
    world = set(by_rank)
    for dump in by_rank.values():
        world.update(*dump.members.values())
    groups = _groups(by_rank, sorted(world))
    problems: list[CollectiveProblem] = []
    for group in groups:
        problems += _of_collectives(group, by_rank)
        problems += _of_pairs(group, by_rank)
    return FlightRecord(
        dumps=len(by_rank),
        ranks=sorted(by_rank),
        absent=sorted(world - set(by_rank)),
        groups=len(groups),
        calls=sum(len(dump.calls) for dump in by_rank.values()),
        problems=_ordered(problems)[:MAX_PROBLEMS],
        damaged=sum(dump.damaged for dump in by_rank.values()),
    )


def _groups(by_rank: dict[int, FlightDump], world: list[int]) -> list[_Group]:
    seen: dict[tuple[str, str, tuple[int, ...] | None], set[int]] = defaultdict(set)
    for rank, dump in by_rank.items():
        for call in dump.calls:
            seen[call.group, call.description, dump.members.get(call.group)].add(rank)
    groups: dict[Any, _Group] = {}
    for (name, description, members), ranks in seen.items():
        shown = description if description not in ("", "undefined") else f"group {name}"
        everyone = tuple(world) if description == DEFAULT_GROUP else tuple(sorted(ranks))
        known = members is not None or description == DEFAULT_GROUP
        groups[name, description, members] = _Group(shown, members or everyone, known)
    for rank, dump in by_rank.items():
        for call in dump.calls:
            group = groups[call.group, call.description, dump.members.get(call.group)]
            if not call.p2p:
                group.collectives[rank][call.sequence] = call
            elif call.state != "completed" and (pair := _pair(call.operation, group.members)):
                group.pending[pair].setdefault(call.operation[:4], (rank, call))
    return list(groups.values())


def _pair(operation: str, members: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the global ranks of source and target of ``send 0->1`` or ``recv 1<-0``."""
    kind, _, ends = operation.partition(" ")
    one, _, other = ends.partition("->" if kind == "send" else "<-")
    if kind not in ("send", "recv") or not (one.isdecimal() and other.isdecimal()):
        return None
    source, target = (one, other) if kind == "send" else (other, one)
    found = [members[n] if (n := int(end[:7])) < len(members) else n for end in (source, target)]
    return found[0], found[1]


def _of_collectives(group: _Group, by_rank: dict[int, FlightDump]) -> Iterator[CollectiveProblem]:
    """Yield a group's first call that differs, that a rank has not made, or that has not ended."""
    calls = group.collectives
    if not calls:
        return
    # before the number from which every buffer has them all, ranks cannot be compared
    first = max(min(own) for own in calls.values())
    here = [rank for rank in group.members if rank in by_rank] or sorted(calls)
    absent = [rank for rank in group.members if rank not in by_rank]
    for sequence in sorted({n for own in calls.values() for n in own if n >= first}):
        at = {rank: own[sequence] for rank, own in calls.items() if sequence in own}
        missing = [rank for rank in here if rank not in at]
        pending = [rank for rank, call in at.items() if call.state != "completed"]
        if (found := _difference(calls, at, sequence)) is not None:
            kind, ranks = found
        elif not pending:
            continue
        elif missing:
            kind, ranks = "not called", missing
        elif absent:
            kind, ranks = "no dump", absent
        else:
            kind, ranks = "unfinished" if group.known else "unknown members", pending
        yield _problem(kind, ranks, pending, list(at.items()), group, by_rank)
        return


def _of_pairs(group: _Group, by_rank: dict[int, FlightDump]) -> Iterator[CollectiveProblem]:
    """Yield unfinished sends without their receive, and unfinished receives without their send."""
    for (source, target), ends in sorted(group.pending.items()):
        found = list(ends.values())
        waiting = sorted({rank for rank, _ in found})
        if len(ends) == 2:
            sizes = [ends["send"][1].inputs, ends["recv"][1].outputs]
            kind: Kind = "size" if _numel(sizes[0]) != _numel(sizes[1]) else "unfinished"
            yield _problem(kind, [source, target], waiting, found, group, by_rank)
            continue
        peer = target if "send" in ends else source
        yield _problem(
            "not called" if peer in by_rank else "no dump", [peer], waiting, found, group, by_rank
        )


def _difference(
    calls: dict[int, dict[int, FlightCall]], at: dict[int, FlightCall], sequence: int
) -> tuple[Kind, list[int]] | None:
    """Return how calls of one number differ, and the ranks that do; ``None``: all are equal."""
    for kind, of in (("operation", _operation), ("size", _size), ("dtype", _dtypes)):
        ways = Counter(map(of, at.values()))
        if len(ways) < 2:
            continue
        usual, most = ways.most_common(1)[0]
        majority = list(ways.values()).count(most) == 1
        others = sorted(rank for rank, call in at.items() if not majority or of(call) != usual)
        if kind == "dtype" and all(of(call) for call in at.values()):
            return "dtype", others
        if kind != "dtype":
            swapped = _is_swapped(calls, at, sequence)
            return ("order" if swapped else "operation" if kind == "operation" else "size"), others
    return None


def _is_swapped(
    calls: dict[int, dict[int, FlightCall]], at: dict[int, FlightCall], sequence: int
) -> bool:
    """Return whether two ranks swapped calls: each makes the other's call within its next few."""
    ranks = sorted(at)
    one = at[ranks[0]]
    other = next((r for r in ranks if _signature(at[r]) != _signature(one)), ranks[0])

    def later(rank: int, call: FlightCall) -> bool:
        following = (calls[rank].get(sequence + n) for n in range(1, 9))
        return any(each is not None and _signature(each) == _signature(call) for each in following)

    return later(ranks[0], at[other]) and later(other, one)


def _signature(call: FlightCall) -> Any:
    return _operation(call), _size(call), _dtypes(call)


def _operation(call: FlightCall) -> str:
    return call.operation


def _size(call: FlightCall) -> int:
    """Return the elements that must be the same on all ranks; 0: none must."""
    if any(part in call.operation for part in UNEVEN_COLLECTIVES):
        return 0
    return _numel(call.outputs if call.operation == "scatter" else call.inputs)


def _dtypes(call: FlightCall) -> tuple[str, ...]:
    uneven = call.operation in ("scatter", "gather") or _size(call) == 0
    return () if uneven else tuple(sorted(set(call.dtypes)))


def _numel(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(size) for size in sizes)


def _problem(
    kind: Kind,
    ranks: list[int],
    waiting: list[int],
    at: list[tuple[int, FlightCall]],
    group: _Group,
    by_rank: dict[int, FlightDump],
) -> CollectiveProblem:
    ways: dict[Any, list[tuple[int, FlightCall]]] = defaultdict(list)
    for rank, call in sorted(at, key=lambda each: (each[1].state == "completed", each[0])):
        where = call.where
        ways[_signature(call), where and (where.file, where.line)].append((rank, call))
    several = sorted(ways.values(), key=lambda way: -len(way))[:MAX_CALLS]
    own = [(rank, by_rank[rank].calls[-1]) for rank in ranks if rank in by_rank]
    return CollectiveProblem(
        kind=kind,
        ranks=sorted(ranks),
        waiting=sorted(waiting),
        calls=[_called(rank, call, group.name) for (rank, call), *_ in several],
        last=[_called(rank, call, call.description) for rank, call in own[:MAX_CALLS]],
    )


def _called(rank: int, call: FlightCall, group: str) -> CollectiveCall:
    name = group if group not in ("", "undefined") else f"group {call.group}"
    return CollectiveCall(
        rank=rank,
        group=name,
        operation=call.operation,
        sequence=call.sequence,
        sizes=[list(size) for size in call.inputs],
        dtypes=list(call.dtypes),
        state=call.state,
        where=call.where,
    )


def _ordered(problems: list[CollectiveProblem]) -> list[CollectiveProblem]:
    """Sort causes first: ranks that wait in no other collective. If several problems have no such
    rank, the ranks wait for each other."""

    def caused_elsewhere(problem: CollectiveProblem) -> bool:
        return problem.kind == "not called" and any(
            set(problem.ranks) & set(other.waiting) for other in problems if other is not problem
        )

    elsewhere = [caused_elsewhere(problem) for problem in problems]
    if problems and all(elsewhere):
        return [replace(problem, kind="deadlock") for problem in problems]
    order = sorted(range(len(problems)), key=lambda n: (elsewhere[n], problems[n].kind == UNENDED))
    return [problems[n] for n in order]


UNENDED = "unfinished"


# -- in words -----------------------------------------------------------------------------------


def describe_problem(problem: CollectiveProblem) -> str:
    first = problem.calls[0]
    ranks = of_ranks(problem.ranks)
    call = f"{describe_call(first)} of {labels.clean(first.group)}"
    waiting = [rank for rank in problem.waiting if rank not in problem.ranks]
    waits = f"{of_ranks(waiting).lower()} {'wait' if len(waiting) > 1 else 'waits'} in it"
    has = "have" if len(problem.ranks) > 1 else "has"
    if problem.kind in ("not called", "deadlock"):
        text = f"{ranks} {has} not called {call}; {waits}."
        return f"{text} Ranks wait for each other." if problem.kind == "deadlock" else text
    if problem.kind == "no dump":
        return f"{ranks} left no dump; {waits}: {call}."
    if problem.kind == "unknown members":
        waits = f"{ranks} {'wait' if len(problem.ranks) > 1 else 'waits'} in {call}"
        return f"{waits}. Which other ranks belong to that group is not recorded."
    if problem.kind == "unfinished":
        return f"{ranks} {has} called {call}, as all others, and {has} not finished it."
    calls = "; ".join(f"rank {each.rank} calls {describe_call(each)}" for each in problem.calls)
    return f"{ranks} {'differ' if has == 'have' else 'differs'} in {problem.kind}: {calls}."


def describe_call(call: CollectiveCall) -> str:
    """Describe a call: ``all_reduce 7 with [1024, 8] Float at train.py:12``."""
    sizes = ", ".join(map(str, call.sizes[:3]))
    more = "…" if len(call.sizes) > 3 else ""
    dtypes = "/".join(dict.fromkeys(map(labels.clean, call.dtypes)))
    what = f" with {sizes}{more} {dtypes}".rstrip() if sizes else ""
    at = call.where
    place = f" at {t.shorten_path(at.file or '', 50)}:{at.line}" if at is not None else ""
    return f"{labels.clean(call.operation)} {call.sequence}{what}{place}"


def of_ranks(ranks: list[int]) -> str:
    """Name ranks at the start of a sentence: ``Rank 3``, ``Ranks 0-2, 5``."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {labels.shorten(format_ranks(ranks), 80)}"
