"""Traces elsewhere: which files of a URL are traces, and a trace read from one."""

from __future__ import annotations

from dataclasses import replace

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import MANIFEST, RANK, SCALENE
from advisor.core.trace import Trace
from advisor.read.file import read_trace
from advisor.read.hosts import without_copies
from advisor.read.reader import ReadOptions
from advisor.read.registry import is_trace_name, refuse_unknown
from advisor.read.remote.urls import RemoteFile


def traces_at(url: str) -> list[RemoteFile]:
    """The trace files that a URL stands for. Raises AdvisorError as :func:`find` does."""
    from advisor.read.remote.places import find

    return find(url, _wanted)


def _wanted(names: list[str]) -> list[str]:
    """Those of a listing, relative to its folder, that are traces by their names. What the recorder
    writes besides them is left out."""
    traces = named_like_traces(names)
    if any(name.rpartition("/")[2] == MANIFEST for name in names):
        own = (MANIFEST, RANK, SCALENE)
        traces = [name for name in traces if name.rpartition("/")[2] not in own]
    return without_copies(traces)


def named_like_traces(names: list[str]) -> list[str]:
    """Files named like traces. Hidden ones are left out: what is there are editors' copies."""
    exported = {name.removesuffix(".sqlite") for name in names if name.endswith(".sqlite")}
    result = []
    for name in names:
        if name.endswith((".nsys-rep", ".qdrep")) and name.rpartition(".")[0] in exported:
            continue  # nsys leaves a report beside its export
        last = name.rpartition("/")[2]
        if is_trace_name(last) and not last.startswith("."):
            result.append(name)
    return result


def read_source(source: RemoteFile, options: ReadOptions) -> Trace:
    """A trace, wherever it is, under the name that its source is shown by.

    Raises AdvisorError as :func:`read_trace` and :func:`opened` do.
    """
    from advisor.read.remote.fetch import opened

    say = options.progress
    with opened(source, most=options.max_bytes, progress=say, check=refuse_unknown) as path:
        copy = str(path)
        if copy == source.at:
            return read_trace(copy, options)
        if say is not None:
            options = replace(options, progress=lambda _, size: say(source.url, size))
        try:
            trace = read_trace(copy, options)
        except AdvisorError as error:
            raise AdvisorError(str(error).replace(copy, source.url)) from None
    snapshot = trace.meta.snapshot
    if snapshot is not None and snapshot.path == copy:
        snapshot = replace(snapshot, path=source.url)
    return replace(trace, meta=replace(trace.meta, path=source.url, snapshot=snapshot))
