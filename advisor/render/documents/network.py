"""Between the ranks: the path that NCCL chose, and calls that do not match or end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import CollectiveCall, FlightRecord, NetworkLog
from advisor.measure.comm.flight import describe_call, of_ranks
from advisor.render.document import (
    Block,
    FieldList,
    Inline,
    Items,
    Paragraph,
    Section,
    Span,
    TextField,
)

MAX_ROWS: Final = 12


def build_flight_record(record: FlightRecord | None) -> Iterator[Block]:
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
        title = f"{labels.clean(first.operation)} {first.sequence} of {labels.clean(first.group)}"
        blocks.append(Items(rows[:MAX_ROWS], "∙", f"{title}: {problem.kind}"))
    yield Section("Collectives (flight recorder)", blocks)


def _call(call: CollectiveCall, prefix: str) -> Inline:
    """Who, what, in which state, where."""
    function = call.where.function if call.where is not None else None
    inside = f" in {labels.shorten(labels.clean(function), 40)}" if function else ""
    group = labels.shorten(labels.clean(call.group), 40)
    return (
        f"{prefix}rank {call.rank}: ",
        Span(describe_call(call), "code"),
        Span(f"{inside}, {group}, {labels.clean(call.state)}", "soft"),
    )


def build_network_path(log: NetworkLog | None) -> Iterator[Block]:
    """What logs of NCCL and topologies say, a line per fact; nothing without."""
    if log is None:
        return
    across = ", ".join(f"{name} ({count})" for name, count in log.networks.items())
    rate = f"{log.nic_gb_per_s:.0f} GB/s per node" if log.nic_gb_per_s else ""
    nvls = {None: "", True: "NVLS available", False: "NVLS not available"}[log.nvls]
    on = f"on {t.count_noun(log.hosts, 'host')}"
    size = f"{t.count_noun(log.ranks, 'rank')} {on}" if log.ranks else ""
    ring = f"{log.ring}, {log.ring_gb_per_s:.0f} GB/s expected" if log.ring_gb_per_s else ""
    channels = "" if log.channels is None else f"{log.channels} for collectives"
    channels += "" if log.nvls_channels is None else f", {log.nvls_channels} for NVLS"
    gdr = [f"{log.gdr_enabled} enabled"] if log.gdr_enabled else []
    near = [f"{t.count_noun(count, 'GPU')} {link}" for link, count in log.nic_links.items()]
    facts = {
        "library": [*log.versions, size],
        "network": [across, ", ".join(log.devices or log.interfaces), rate],
        "paths": _counted(log.paths),
        "GDR": gdr + [f"{n} disabled ({why})" for why, n in log.gdr_disabled.items()],
        "ring": [ring],
        "channels": [channels, nvls],
        "chosen": _counted(log.algorithms),
        "links": _counted(log.gpu_links),
        "adapters": [", ".join(log.nics), *near],
        "settings": [f"{name}={value}" for name, value in log.settings.items()][:MAX_ROWS],
        "warnings": [f"{text} ({count}×)" for text, count in log.warnings.items()][:3],
    }
    rows = [
        TextField(label, [labels.clean(part) for part in parts if part])
        for label, parts in facts.items()
        if any(parts)
    ]
    yield Section("Network path (NCCL)", [FieldList(rows)])


def _counted(counts: dict[str, int]) -> list[str]:
    return [f"{name} {count:,}" for name, count in list(counts.items())[:MAX_ROWS]]
