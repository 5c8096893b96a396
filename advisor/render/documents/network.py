"""Between the ranks: what flight-recorder dumps say of calls that do not match or end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from advisor.core import text as t
from advisor.core.report import CollectiveCall, FlightRecord
from advisor.measure.comm.flight import describe_call, of_ranks
from advisor.render.document import Block, Inline, Items, Paragraph, Section, Span

MAX_ROWS: Final = 12


def flight(record: FlightRecord | None) -> Iterator[Block]:
    """The calls that hang, with the line of each rank; nothing without dumps."""
    if record is None:
        return
    counted = f"{t.count_noun(record.calls, 'call')} in {t.count_noun(record.groups, 'group')}, "
    counted += t.count_noun(record.dumps, "dump")
    missing = f". {of_ranks(record.absent)} left none" if record.absent else ""
    damaged = t.count_noun(record.damaged, "entry")
    damage = f". {damaged} could not be read" if record.damaged else ""
    blocks: list[Block] = [Paragraph(f"{counted}{missing}{damage}", indent=2)]
    for problem in record.problems:
        rows = [_call(each, "") for each in problem.calls]
        rows += [_call(each, "last call of ") for each in problem.last]
        first = problem.calls[0]
        title = f"{t.clean(first.operation)} {first.sequence} of {t.clean(first.group)}"
        blocks.append(Items(rows[:MAX_ROWS], "∙", f"{title}: {problem.kind}"))
    yield Section("Collectives (flight recorder)", blocks)


def _call(call: CollectiveCall, prefix: str) -> Inline:
    """Who, what, in which state, where."""
    function = call.where.function if call.where is not None else None
    inside = f" in {t.shorten(t.clean(function), 40)}" if function else ""
    group = t.shorten(t.clean(call.group), 40)
    return (
        f"{prefix}rank {call.rank}: ",
        Span(describe_call(call), "code"),
        Span(f"{inside}, {group}, {t.clean(call.state)}", "soft"),
    )
