"""Log directories of TensorFlow and JAX: a file a host, several forms of one recording."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from advisor.core.trace import Trace
from advisor.read.source import PACKINGS

XPLANE = ".xplane.pb"
_TIMELINE = ".trace.json"


def without_copies(files: list[str]) -> list[str]:
    """Without ``<host>.trace.json.gz`` where ``<host>.xplane.pb`` lies beside it: the profiler
    writes the first from the second, and leaves out what would make it long."""
    whole = {bare.removesuffix(XPLANE) for file in files if (bare := _bare(file)).endswith(XPLANE)}
    copies = {f"{name}{_TIMELINE}" for name in whole}
    return [file for file in files if _bare(file) not in copies]


def as_ranks(traces: list[Trace]) -> list[Trace]:
    """Each host of one recording (files beside each other, which none gives a rank) as a rank, in
    the order of their names. A second recording of the same hosts has the same ranks again."""
    beside: dict[Path, list[Trace]] = defaultdict(list)
    for trace in traces:
        beside[Path(trace.meta.path).parent].append(trace)
    numbers: dict[str, int] = {}
    for group in beside.values():
        hosts = [trace for trace in group if _is_host(trace)]
        if len(hosts) > 1:
            for name in sorted(Path(trace.meta.path).name for trace in hosts):
                numbers.setdefault(name, len(numbers))
    ranked = []
    for trace in traces:
        number = numbers.get(Path(trace.meta.path).name) if _is_host(trace) else None
        ranked.append(
            trace if number is None else replace(trace, meta=replace(trace.meta, rank=number))
        )
    return ranked


def _is_host(trace: Trace) -> bool:
    return trace.meta.format == "xplane" and trace.meta.rank is None


def _bare(file: str) -> str:
    return next((file.removesuffix(end) for end in PACKINGS if file.endswith(end)), file)
