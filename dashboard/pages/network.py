"""Network: the path that NCCL chose between GPUs, and mismatched or unfinished collectives."""

from collections.abc import Mapping
from typing import Any, Final

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import (
    CollectiveCall,
    CollectiveProblem,
    FlightRecord,
    NetworkLog,
)
from advisor.dashboard import components as ui
from advisor.dashboard import page_view
from advisor.dashboard.page_view import PageView
from advisor.measure.comm.flight_recorder import describe_problem, of_ranks
from advisor.render.document import FieldList
from advisor.render.documents import auxiliary_sections

TRANSPORTS: Final = {
    "P2P": "directly between GPUs", "SHM": "through host memory",
    "NVLS": "NVLink SHARP, in the switch", "NET/Socket": "between nodes, over TCP",
    "GDRDMA": "between nodes, the adapter reads GPU memory",
    "NET/": "between nodes, through host memory", "NV": "NVLink", "XGMI": "Infinity Fabric",
    "PIX": "one PCIe switch", "PXB": "several PCIe switches",
    "PHB": "through the CPU's PCIe bridge", "NODE": "through several PCIe bridges of one CPU",
    "SYS": "between CPU sockets",
}  # fmt: skip
"""Meaning of a transport or link, by a part of its name. The first match counts.

Sources: NCCL, and the legend of ``nvidia-smi topo -m``."""
_MAX_RANKS: Final = 200
"""Number of rows in a collective's table. Ranks that cause the problem come first."""


def has_content(view: PageView) -> bool:
    """Return whether an NCCL log, a topology or flight recorder dumps were read."""
    if view.entry.loaded is None:
        return False
    report = view.loaded.report
    return report.network is not None or report.flight is not None


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    return ui.page(ui.page_heading("Network", _lead_text(view)), *sections(view))


def _lead_text(view: PageView) -> str:
    """Write where the data come from."""
    report = view.loaded.report
    if report.flight is not None:
        return "Collectives as each rank called them, from PyTorch's flight recorder."
    if report.network is not None:
        return "The path between the GPUs, as NCCL reported it at startup."
    return "There is no NCCL log, no topology and no flight recorder dump."


def sections(view: PageView) -> list[Any]:
    """Build the cards of flight recorder dumps and network logs, none without both."""
    report = view.loaded.report
    parts: list[Any] = []
    if report.flight is not None:
        parts += _flight_recorder_cards(view, report.flight)
    if report.network is not None:
        parts += _path_cards(report.network)
    return parts


def _flight_recorder_cards(view: PageView, record: FlightRecord) -> list[Any]:
    """Build the tiles of the dumps, and a card for each mismatched or unfinished collective."""
    ranks_without_dump = of_ranks(record.absent) if record.absent else ""
    figure_tiles = ui.tiles(
        [
            (
                "Dumps",
                f"{record.dumps:,}",
                f"{ranks_without_dump} left no dump" if ranks_without_dump else "of all ranks",
            ),
            ("Calls", f"{record.calls:,}", f"in {t.count_noun(record.groups, 'process group')}"),
            ("Mismatches", f"{len(record.problems):,}", _mismatch_note(record)),
        ]
    )
    return [figure_tiles, *(_problem_card(view, problem) for problem in record.problems)]


def _mismatch_note(record: FlightRecord) -> str:
    """Write the note of the tile of mismatches."""
    if record.damaged:
        return f"{t.count_noun(record.damaged, 'entry')} could not be read"
    return "" if record.problems else "all calls match and have ended"


def _problem_card(view: PageView, problem: CollectiveProblem) -> Any:
    """Build the card of a problem: the ranks that cause it with their calls, and waiting ranks."""
    first = problem.calls[0]
    calls_by_rank = {call.rank: call for call in problem.calls}
    last_calls = {call.rank: call for call in problem.last}
    rows = [
        [
            f"rank {rank}",
            _rank_state(problem, rank),
            *_call_cells(
                view,
                calls_by_rank.get(rank, last_calls.get(rank)),
                is_last=rank not in calls_by_rank,
            ),
        ]
        for rank in problem.ranks[:_MAX_RANKS]
    ]
    waiting = [rank for rank in problem.waiting if rank not in problem.ranks]
    if waiting:
        rows.append(
            [of_ranks(waiting).lower(), "waiting", *_call_cells(view, first, is_last=False)]
        )
    title = f"{labels.clean(first.operation)} {first.sequence} of {labels.clean(first.group)}"
    return ui.card(
        f"{title}: {problem.kind}",
        ui.element("P", describe_problem(problem)),
        ui.table(
            ("Rank", "State", "Call", "Shapes", "Where"),
            rows,
            name_columns=(0, 2, 3, 4),
            stacked=True,
        ),
    )


def _rank_state(problem: CollectiveProblem, rank: int) -> str:
    """Write a rank's state in a problem, such as ``waiting``."""
    roles = {"not called": "not called", "deadlock": "not called", "no dump": "no dump"}
    return roles.get(problem.kind, "waiting" if rank in problem.waiting else "differs")


def _call_cells(view: PageView, call: CollectiveCall | None, *, is_last: bool) -> list[Any]:
    """Build the cells of a call: operation, shapes and source line.

    ``is_last``: mark it as the last call of its rank."""
    if call is None:
        return ["not recorded", t.EMPTY_CELL, t.EMPTY_CELL]
    dtypes = "/".join(dict.fromkeys(map(labels.clean, call.dtypes)))
    shapes = " ".join(map(str, call.sizes[:3])) + ("…" if len(call.sizes) > 3 else "")
    name = f"{labels.clean(call.operation)} {call.sequence}"
    return [
        [ui.element("Span", "last call: ", cls="dim"), name] if is_last else name,
        f"{shapes} {dtypes}".strip() or t.EMPTY_CELL,
        _source_cell(view, call),
    ]


def _source_cell(view: PageView, call: CollectiveCall) -> Any:
    """Build the cell of a source line such as ``train.py:29``, with a link to the editor."""
    location = call.where
    if location is None or not location.file:
        return "not recorded"
    text = f"{t.shorten_path(labels.clean(location.file), 50)}:{location.line}"
    editor_address = ui.editor_href(view.session.editor, location)
    return (
        ui.element("A", text, href=editor_address, title="Open in the editor")
        if editor_address
        else text
    )


def _path_cards(log: NetworkLog) -> list[Any]:
    """Build the cards of a network log: key figures, connections by transport, and facts."""
    size = f"{log.ranks:,}" if log.ranks else ""
    hosts = f"on {t.count_noun(log.hosts, 'host')}" if log.hosts else ""
    ring = f"{log.ring_gb_per_s:.0f} GB/s" if log.ring_gb_per_s else ""
    adapters = f"{log.nic_gb_per_s:.0f} GB/s" if log.nic_gb_per_s else ""
    figures = [
        ("Ranks", size, hosts),
        ("Network", labels.clean(", ".join(log.networks)), ""),
        ("Ring", ring, f"{labels.clean(log.ring)}, as NCCL expects" if log.ring else ""),
        ("Adapters", adapters, "per node, one direction"),
    ]
    rows = [
        (field.label, labels.clean(" · ".join(map(str, field.parts))))
        for section in auxiliary_sections.build_network_path(log)
        for block in getattr(section, "blocks", ())
        if isinstance(block, FieldList)
        for field in block.rows
        if field.label not in ("paths", "links")  # these have tables
    ]
    return [
        ui.tiles([figure for figure in figures if figure[1]])
        if any(figure[1] for figure in figures)
        else None,
        _count_card("Connections between GPUs", "Transport", log.paths),
        _count_card("Links of the topology", "Link", log.gpu_links),
        ui.card("What the logs say", ui.fact_list(rows)),
    ]


def _count_card(title: str, name: str, counts: Mapping[str, int]) -> Any:
    """Build a card with the number of connections by kind, and what each kind is."""
    if not counts:
        return None
    rows = [
        [
            labels.clean(kind),
            next((text for part, text in TRANSPORTS.items() if part in kind), t.EMPTY_CELL),
            f"{count:,}",
        ]
        for kind, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return ui.card(
        title,
        ui.table((name, "What it is", "Count"), rows, number_columns=(2,), name_columns=(0, 1)),
    )
