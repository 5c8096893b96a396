"""Log directories of TensorFlow and JAX: a file a host, several forms of one recording."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from advisor.core.trace import Trace
from advisor.read.source import PACKINGS

XPLANE = ".xplane.pb"
_TIMELINE = ".trace.json"
_PERFETTO = "perfetto_trace.json"


def without_copies(files: list[str]) -> list[str]:
    """Without the timelines of folders in which XPlane files lie: TensorFlow and JAX write
    ``<host>.trace.json.gz`` and ``perfetto_trace.json.gz`` from those, and leave out what would
    make them long. PyTorch's own (``.pt.trace.json``) stay."""
    recorded = {Path(file).parent for file in files if _bare(file).endswith(XPLANE)}

    def is_copy(file: str) -> bool:
        bare = _bare(file)
        timeline = bare.endswith(_TIMELINE) and not bare.endswith(".pt.trace.json")
        return Path(file).parent in recorded and (timeline or Path(bare).name == _PERFETTO)

    return [file for file in files if not is_copy(file)]


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
