"""Flight-recorder dumps compared across ranks: which rank did not call the collective that others
wait in.

Collectives of a process group are numbered in the order in which a rank calls them, so equal
numbers belong together. Only numbers that are still in every rank's buffer are compared. Later
differences of a group are consequences of its first one and are left out."""

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
"""PyTorch's name of the group of all ranks."""
UNEVEN_COLLECTIVES = ("all_to_all", "coalesced", "_v")
"""Parts of the names of collectives whose sizes may differ between ranks."""
_MAX_PROBLEMS, _MAX_CALLS = 20, 8
Kind = Literal[
    "not called", "no dump", "operation", "order", "size", "dtype", "unknown members", "unfinished"
]


@dataclass
class _Group:
    """A process group, with calls by rank and number."""

    name: str
    members: tuple[int, ...]
    known: bool
    """Whether the members are recorded; otherwise they are the ranks with calls in the group."""
    collectives: dict[int, dict[int, FlightCall]] = field(default_factory=lambda: defaultdict(dict))
    pending: dict[tuple[int, int], dict[str, tuple[int, FlightCall]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """First unfinished send and first unfinished receive, by (source, target)."""


def compare_dumps(dumps: Iterable[FlightDump]) -> FlightRecord:
    """Compare the ranks' calls. Dumps without a rank get unused numbers."""
    by_rank: dict[int, FlightDump] = {}
    for dump in sorted(dumps, key=lambda item: (item.rank is None, item.rank or 0, item.path)):
        needs_number = dump.rank is None or dump.rank in by_rank
        by_rank[
            max(by_rank, default=-1) + 1 if needs_number or dump.rank is None else dump.rank
        ] = dump
    world = set(by_rank)
    for dump in by_rank.values():
        world.update(*dump.members.values())
    groups = _list_groups(by_rank, sorted(world))
    problems: list[CollectiveProblem] = []
    for group in groups:
        problems += _find_collective_problems(group, by_rank)
        problems += _find_pair_problems(group, by_rank)
    return FlightRecord(
        dumps=len(by_rank),
        ranks=sorted(by_rank),
        absent=sorted(world - set(by_rank)),
        groups=len(groups),
        calls=sum(len(dump.calls) for dump in by_rank.values()),
        problems=_sort_by_cause(problems)[:_MAX_PROBLEMS],
        damaged=sum(dump.damaged for dump in by_rank.values()),
    )


def _list_groups(by_rank: dict[int, FlightDump], world: list[int]) -> list[_Group]:
    ranks_of_group: dict[tuple[str, str, tuple[int, ...] | None], set[int]] = defaultdict(set)
    for rank, dump in by_rank.items():
        for call in dump.calls:
            ranks_of_group[call.group, call.description, dump.members.get(call.group)].add(rank)
    groups: dict[Any, _Group] = {}
    for (name, description, members), ranks in ranks_of_group.items():
        shown_name = description if description not in ("", "undefined") else f"group {name}"
        all_members = tuple(world) if description == DEFAULT_GROUP else tuple(sorted(ranks))
        is_known = members is not None or description == DEFAULT_GROUP
        groups[name, description, members] = _Group(shown_name, members or all_members, is_known)
    for rank, dump in by_rank.items():
        for call in dump.calls:
            group = groups[call.group, call.description, dump.members.get(call.group)]
            if not call.p2p:
                group.collectives[rank][call.sequence] = call
            elif call.state != "completed" and (pair := _parse_pair(call.operation, group.members)):
                group.pending[pair].setdefault(call.operation[:4], (rank, call))
    return list(groups.values())


def _parse_pair(operation: str, members: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the global ranks of source and target of ``send 0->1`` or ``recv 1<-0``."""
    kind, _, ends = operation.partition(" ")
    first, _, second = ends.partition("->" if kind == "send" else "<-")
    if kind not in ("send", "recv") or not (first.isdecimal() and second.isdecimal()):
        return None
    source, target = (first, second) if kind == "send" else (second, first)
    global_ranks = [
        members[number] if (number := int(end[:7])) < len(members) else number
        for end in (source, target)
    ]
    return global_ranks[0], global_ranks[1]


def _find_collective_problems(
    group: _Group, by_rank: dict[int, FlightDump]
) -> Iterator[CollectiveProblem]:
    """Yield a group's first call that differs, is missing on a rank, or has not ended."""
    calls = group.collectives
    if not calls:
        return
    # ranks can only be compared from the first number that every buffer has
    first_common = max(min(own_calls) for own_calls in calls.values())
    dumped = [rank for rank in group.members if rank in by_rank] or sorted(calls)
    absent = [rank for rank in group.members if rank not in by_rank]
    for sequence in sorted(
        {number for own_calls in calls.values() for number in own_calls if number >= first_common}
    ):
        entered = {
            rank: own_calls[sequence] for rank, own_calls in calls.items() if sequence in own_calls
        }
        missing = [rank for rank in dumped if rank not in entered]
        pending = [rank for rank, call in entered.items() if call.state != "completed"]
        if (difference := _find_difference(calls, entered, sequence)) is not None:
            kind, ranks = difference
        elif not pending:
            continue
        elif missing:
            kind, ranks = "not called", missing
        elif absent:
            kind, ranks = "no dump", absent
        else:
            kind, ranks = "unfinished" if group.known else "unknown members", pending
        yield _build_problem(kind, ranks, pending, list(entered.items()), group, by_rank)
        return


def _find_pair_problems(
    group: _Group, by_rank: dict[int, FlightDump]
) -> Iterator[CollectiveProblem]:
    """Yield unfinished sends without a receive, and unfinished receives without a send."""
    for (source, target), ends in sorted(group.pending.items()):
        calls = list(ends.values())
        waiting = sorted({rank for rank, _ in calls})
        if len(ends) == 2:
            sizes = [ends["send"][1].inputs, ends["recv"][1].outputs]
            kind: Kind = (
                "size" if _count_elements(sizes[0]) != _count_elements(sizes[1]) else "unfinished"
            )
            yield _build_problem(kind, [source, target], waiting, calls, group, by_rank)
            continue
        peer = target if "send" in ends else source
        yield _build_problem(
            "not called" if peer in by_rank else "no dump", [peer], waiting, calls, group, by_rank
        )


def _find_difference(
    calls: dict[int, dict[int, FlightCall]], entered: dict[int, FlightCall], sequence: int
) -> tuple[Kind, list[int]] | None:
    """Return how calls of one number differ and on which ranks, or ``None`` if all are equal."""
    for kind, get in (
        ("operation", _get_operation),
        ("size", _count_required_elements),
        ("dtype", _required_dtypes),
    ):
        counts = Counter(map(get, entered.values()))
        if len(counts) < 2:
            continue
        usual, usual_count = counts.most_common(1)[0]
        clear = list(counts.values()).count(usual_count) == 1
        others = sorted(rank for rank, call in entered.items() if not clear or get(call) != usual)
        if kind == "dtype" and all(get(call) for call in entered.values()):
            return "dtype", others
        if kind != "dtype":
            swapped = _is_swapped(calls, entered, sequence)
            return ("order" if swapped else "operation" if kind == "operation" else "size"), others
    return None


def _is_swapped(
    calls: dict[int, dict[int, FlightCall]], entered: dict[int, FlightCall], sequence: int
) -> bool:
    """Return whether two ranks swapped calls: each makes the other's call within its next few."""
    ranks = sorted(entered)
    first = entered[ranks[0]]
    other = next((r for r in ranks if _signature(entered[r]) != _signature(first)), ranks[0])

    def later(rank: int, call: FlightCall) -> bool:
        next_calls = (calls[rank].get(sequence + offset) for offset in range(1, 9))
        return any(
            later_call is not None and _signature(later_call) == _signature(call)
            for later_call in next_calls
        )

    return later(ranks[0], entered[other]) and later(other, first)


def _signature(call: FlightCall) -> Any:
    return _get_operation(call), _count_required_elements(call), _required_dtypes(call)


def _get_operation(call: FlightCall) -> str:
    return call.operation


def _count_required_elements(call: FlightCall) -> int:
    """Return the number of elements that must be equal on all ranks, or 0 if it may differ."""
    if any(part in call.operation for part in UNEVEN_COLLECTIVES):
        return 0
    return _count_elements(call.outputs if call.operation == "scatter" else call.inputs)


def _required_dtypes(call: FlightCall) -> tuple[str, ...]:
    uneven = call.operation in ("scatter", "gather") or _count_required_elements(call) == 0
    return () if uneven else tuple(sorted(set(call.dtypes)))


def _count_elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(size) for size in sizes)


def _build_problem(
    kind: Kind,
    ranks: list[int],
    waiting: list[int],
    rank_calls: list[tuple[int, FlightCall]],
    group: _Group,
    by_rank: dict[int, FlightDump],
) -> CollectiveProblem:
    calls_by_kind: dict[Any, list[tuple[int, FlightCall]]] = defaultdict(list)
    for rank, call in sorted(rank_calls, key=lambda item: (item[1].state == "completed", item[0])):
        where = call.where
        calls_by_kind[_signature(call), where and (where.file, where.line)].append((rank, call))
    most_frequent = sorted(calls_by_kind.values(), key=lambda calls: -len(calls))[:_MAX_CALLS]
    last_calls = [(rank, by_rank[rank].calls[-1]) for rank in ranks if rank in by_rank]
    return CollectiveProblem(
        kind=kind,
        ranks=sorted(ranks),
        waiting=sorted(waiting),
        calls=[_describe_member_call(rank, call, group.name) for (rank, call), *_ in most_frequent],
        last=[
            _describe_member_call(rank, call, call.description)
            for rank, call in last_calls[:_MAX_CALLS]
        ],
    )


def _describe_member_call(rank: int, call: FlightCall, group: str) -> CollectiveCall:
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


def _sort_by_cause(problems: list[CollectiveProblem]) -> list[CollectiveProblem]:
    """Sort causes first: ranks that wait in no other collective. If all ranks wait in other
    collectives, they wait for each other."""

    def caused_elsewhere(problem: CollectiveProblem) -> bool:
        return problem.kind == "not called" and any(
            set(problem.ranks) & set(other.waiting) for other in problems if other is not problem
        )

    has_cause_elsewhere = [caused_elsewhere(problem) for problem in problems]
    if problems and all(has_cause_elsewhere):
        return [replace(problem, kind="deadlock") for problem in problems]
    order = sorted(
        range(len(problems)),
        key=lambda index: (has_cause_elsewhere[index], problems[index].kind == UNENDED),
    )
    return [problems[index] for index in order]


UNENDED = "unfinished"


# -- text -----------------------------------------------------------------------------------


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
    ellipsis = "…" if len(call.sizes) > 3 else ""
    dtypes = "/".join(dict.fromkeys(map(labels.clean, call.dtypes)))
    arguments = f" with {sizes}{ellipsis} {dtypes}".rstrip() if sizes else ""
    location = call.where
    place = (
        f" at {t.shorten_path(location.file or '', 50)}:{location.line}"
        if location is not None
        else ""
    )
    return f"{labels.clean(call.operation)} {call.sequence}{arguments}{place}"


def of_ranks(ranks: list[int]) -> str:
    """Name ranks at the start of a sentence: ``Rank 3``, ``Ranks 0-2, 5``."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {labels.shorten(format_ranks(ranks), 80)}"
