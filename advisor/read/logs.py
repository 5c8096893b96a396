"""Auxiliary files beside traces: logs, dumps, kernel profiles (``core/auxiliary_inputs.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.core.trace import Trace
from advisor.read.reader import Reader, ReadOptions
from advisor.read.registry import all_readers, is_named_for, read_trace

MAX_FILES = 4096


@cache
def _source_readers() -> tuple[Reader, ...]:
    return tuple(reader for reader in all_readers() if reader.fills)


def is_named_log(path: str) -> bool:
    """The file is named as such files are: it is no rank's trace."""
    return any(is_named_for(reader, Path(path).name) for reader in _source_readers())


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


def merged_logs(traces: Iterable[Trace]) -> dict[str, Any]:
    """What all such files among traces say: fields of TraceMeta; empty: there are none."""
    metas = [trace.meta for trace in traces]
    result = {}
    for field, merge in {reader.fills: reader.merge for reader in _source_readers()}.items():
        values = [value for meta in metas if (value := getattr(meta, field))]
        if values:
            result[field] = values[0] if len(values) == 1 else merge(values)
    return result


def with_logs(traces: list[Trace], given: Iterable[Trace] = ()) -> list[Trace]:
    """Traces that know the logs among them, or those ``given`` beside them in their place; only
    logs: one trace that holds them all."""
    given = list(given)
    plain = [trace for trace in traces if not merged_logs([trace])]
    fields = merged_logs(traces) | merged_logs(given) if plain else merged_logs([*traces, *given])
    if not fields:
        return traces
    if not plain:
        path = traces[0].meta.path if len(traces) == 1 else str(Path(traces[0].meta.path).parent)
        plain = [replace(traces[0], meta=replace(traces[0].meta, rank=None, path=path))]
    return [replace(trace, meta=replace(trace.meta, **fields)) for trace in plain]
