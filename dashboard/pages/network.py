"""Network: the path that NCCL chose between the GPUs, and collectives that do not match or end."""

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
from advisor.dashboard import page_view
from advisor.dashboard.components import (
    card,
    editor_href,
    element,
    fact_list,
    head,
    page,
    table,
    tiles,
)
from advisor.dashboard.page_view import PageView
from advisor.measure.comm.flight_recorder import describe_problem, of_ranks
from advisor.render.document import FieldList
from advisor.render.documents import auxiliary_sections

KINDS: Final = {
    "P2P": "directly between GPUs", "SHM": "through host memory",
    "NVLS": "NVLink SHARP, in the switch", "NET/Socket": "between nodes, over TCP",
    "GDRDMA": "between nodes, the adapter reads GPU memory",
    "NET/": "between nodes, through host memory", "NV": "NVLink", "XGMI": "Infinity Fabric",
    "PIX": "one PCIe switch", "PXB": "several PCIe switches",
    "PHB": "through the CPU's PCIe bridge", "NODE": "through several PCIe bridges of one CPU",
    "SYS": "between CPU sockets",
}  # fmt: skip
"""Meaning of a transport or link by a part of its name (NCCL; the legend of ``nvidia-smi topo
-m``). The first that fits counts."""
MAX_RANKS: Final = 200
"""Number of rows of a collective's table: the ranks that it is due to first."""


def has_content(view: PageView) -> bool:
    """Return whether a log of NCCL, a topology or dumps of the flight recorder were read."""
    if view.entry.loaded is None:
        return False
    report = view.loaded.report
    return report.network is not None or report.flight is not None


def layout(**query: object) -> Any:
    view = page_view.view(**query)
    return page(head("Network", _lead(view)), *sections(view))


def _lead(view: PageView) -> str:
    report = view.loaded.report
    if report.flight is not None:
        return "Collectives as each rank called them, from PyTorch's flight recorder."
    if report.network is not None:
        return "The path between the GPUs, as NCCL reported it at its start."
    return "No log of NCCL, no topology and no dump of the flight recorder was given."


def sections(view: PageView) -> list[Any]:
    """Build cards of the dumps and of the logs; empty without both."""
    report = view.loaded.report
    parts: list[Any] = []
    if report.flight is not None:
        parts += _flight(view, report.flight)
    if report.network is not None:
        parts += _path(report.network)
    return parts


def _flight(view: PageView, record: FlightRecord) -> list[Any]:
    """Build figures on the dumps, and one card for each collective that does not match or end."""
    absent = of_ranks(record.absent) if record.absent else ""
    read = tiles(
        [
            ("Dumps", f"{record.dumps:,}", f"{absent} left none" if absent else "of all ranks"),
            ("Calls", f"{record.calls:,}", f"in {t.count_noun(record.groups, 'process group')}"),
            ("Mismatches", f"{len(record.problems):,}", _healthy(record)),
        ]
    )
    return [read, *(_problem(view, problem) for problem in record.problems)]


def _healthy(record: FlightRecord) -> str:
    if record.damaged:
        return f"{t.count_noun(record.damaged, 'entry')} could not be read"
    return "" if record.problems else "all calls match and have ended"


def _problem(view: PageView, problem: CollectiveProblem) -> Any:
    """Show the ranks that it is due to with their last call, those that wait, and where."""
    first = problem.calls[0]
    own = {call.rank: call for call in problem.calls}
    last = {call.rank: call for call in problem.last}
    rows = [
        [
            f"rank {rank}",
            _role(problem, rank),
            *_call(view, own.get(rank, last.get(rank)), last=rank not in own),
        ]
        for rank in problem.ranks[:MAX_RANKS]
    ]
    waiting = [rank for rank in problem.waiting if rank not in problem.ranks]
    if waiting:
        rows.append([of_ranks(waiting).lower(), "waiting", *_call(view, first, last=False)])
    title = f"{labels.clean(first.operation)} {first.sequence} of {labels.clean(first.group)}"
    return card(
        f"{title}: {problem.kind}",
        element("P", describe_problem(problem)),
        table(("Rank", "State", "Call", "Shapes", "Where"), rows, names=(0, 2, 3, 4), stacked=True),
    )


def _role(problem: CollectiveProblem, rank: int) -> str:
    roles = {"not called": "not called", "deadlock": "not called", "no dump": "no dump"}
    return roles.get(problem.kind, "waiting" if rank in problem.waiting else "differs")


def _call(view: PageView, call: CollectiveCall | None, *, last: bool) -> list[Any]:
    """Write operation, shapes and line of a call; ``last``: it is the last one of its rank."""
    if call is None:
        return ["not recorded", t.EMPTY_CELL, t.EMPTY_CELL]
    dtypes = "/".join(dict.fromkeys(map(labels.clean, call.dtypes)))
    shapes = " ".join(map(str, call.sizes[:3])) + ("…" if len(call.sizes) > 3 else "")
    name = f"{labels.clean(call.operation)} {call.sequence}"
    return [
        [element("Span", "last call: ", cls="dim"), name] if last else name,
        f"{shapes} {dtypes}".strip() or t.EMPTY_CELL,
        _place(view, call),
    ]


def _place(view: PageView, call: CollectiveCall) -> Any:
    """Show ``train.py:29``, with a link that opens it in the editor."""
    where = call.where
    if where is None or not where.file:
        return "not recorded"
    text = f"{t.shorten_path(labels.clean(where.file), 50)}:{where.line}"
    source = editor_href(view.session.editor, where)
    return element("A", text, href=source, title="Open in the editor") if source else text


def _path(log: NetworkLog) -> list[Any]:
    """Show known figures, connections by transport, and the facts that the terminal lists."""
    size = f"{log.ranks:,}" if log.ranks else ""
    hosts = f"on {t.count_noun(log.hosts, 'host')}" if log.hosts else ""
    ring = f"{log.ring_gb_per_s:.0f} GB/s" if log.ring_gb_per_s else ""
    nics = f"{log.nic_gb_per_s:.0f} GB/s" if log.nic_gb_per_s else ""
    known = [
        ("Ranks", size, hosts),
        ("Network", labels.clean(", ".join(log.networks)), ""),
        ("Ring", ring, f"{labels.clean(log.ring)}, as NCCL expects" if log.ring else ""),
        ("Adapters", nics, "per node, one direction"),
    ]
    rows = [
        (field.label, labels.clean(" · ".join(map(str, field.parts))))
        for section in auxiliary_sections.build_network_path(log)
        for block in getattr(section, "blocks", ())
        if isinstance(block, FieldList)
        for field in block.rows
        if field.label not in ("paths", "links")  # tables of their own
    ]
    return [
        tiles([figure for figure in known if figure[1]]) if any(f[1] for f in known) else None,
        _counts("Connections between GPUs", "Transport", log.paths),
        _counts("Links of the topology", "Link", log.gpu_links),
        card("What the logs say", fact_list(rows)),
    ]


def _counts(title: str, name: str, counts: Mapping[str, int]) -> Any:
    """Build a table of the number of connections by kind, and what each kind is."""
    if not counts:
        return None
    rows = [
        [
            labels.clean(kind),
            next((text for part, text in KINDS.items() if part in kind), t.EMPTY_CELL),
            f"{count:,}",
        ]
        for kind, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return card(title, table((name, "What it is", "Count"), rows, numbers=(2,), names=(0, 1)))
