"""Logs beside traces: of torch.compile, of NCCL, and dumps of the flight recorder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.core.report import CompileLog
from advisor.core.trace import Trace
from advisor.read.reader import ReadOptions
from advisor.read.readers.compile_log import CompileLogReader, merged
from advisor.read.readers.flight_recorder import FlightRecorderReader
from advisor.read.readers.network_log import NetworkLogReader, merged_networks
from advisor.read.registry import is_named_for, read_trace

READERS = (CompileLogReader(), FlightRecorderReader(), NetworkLogReader())
MAX_FILES = 4096


def is_named_log(path: str) -> bool:
    """The file is named as such logs are: it is no rank's trace."""
    return any(is_named_for(reader, Path(path).name) for reader in READERS)


def logs_in(folders: Iterable[Path], options: ReadOptions | None = None) -> list[Trace | str]:
    """The logs in these folders themselves; a line for each that cannot be read."""
    result: list[Trace | str] = []
    for folder in folders:
        try:
            files = sorted(islice(folder.iterdir(), 4 * MAX_FILES))
        except OSError:
            continue
        for file in [each for each in files if is_named_log(each.name)][:MAX_FILES]:
            try:
                result.append(read_trace(str(file), options))
            except AdvisorError as error:
                result.append(str(error))
    return result


def merged_logs(traces: Iterable[Trace], given: CompileLog | None = None) -> dict[str, Any]:
    """What all logs among traces, and ``given`` beside them, say: fields of TraceMeta; empty: there
    are none."""
    metas = [trace.meta for trace in traces]
    compiled = [meta.compilation for meta in metas if meta.compilation is not None]
    compiled += [] if given is None else [given]
    dumps = tuple(dump for meta in metas for dump in meta.flight)
    fields: dict[str, Any] = {"compilation": merged(compiled)} if compiled else {}
    if dumps:
        fields["flight"] = dumps
    networks = [meta.network for meta in metas if meta.network is not None]
    if networks:
        fields["network"] = merged_networks(networks)
    return fields


def with_logs(traces: list[Trace], given: CompileLog | None = None) -> list[Trace]:
    """Traces that know the logs among them, or ``given`` beside them; only logs: one trace that
    holds them all."""
    fields = merged_logs(traces, given)
    if not fields:
        return traces
    plain = [trace for trace in traces if not _is_log(trace)]
    if not plain:
        path = traces[0].meta.path if len(traces) == 1 else str(Path(traces[0].meta.path).parent)
        plain = [replace(traces[0], meta=replace(traces[0].meta, rank=None, path=path))]
    return [replace(trace, meta=replace(trace.meta, **fields)) for trace in plain]


def _is_log(trace: Trace) -> bool:
    meta = trace.meta
    return any((meta.compilation, meta.flight, meta.network))
