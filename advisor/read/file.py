"""A file to a :class:`Trace`, whatever its format."""

from __future__ import annotations

from dataclasses import replace

from advisor.core.errors import AdvisorError
from advisor.core.gpus import find_gpu
from advisor.core.trace import KINETO, Trace
from advisor.read.reader import ReadOptions
from advisor.read.registry import read_by, reader_of, readers
from advisor.read.source import ByteSource


def read_trace(path: str, options: ReadOptions | None = None) -> Trace:
    """Read one trace file (``-``: standard input), packed or not.

    Raises AdvisorError when the file holds no trace at all. Damage short of that (a truncated
    file, unreadable events) is repaired or left out, counted, and recorded in ``Trace.meta``.
    """
    options = options or ReadOptions()
    return _read(ByteSource(path, limit=options.max_bytes, peek=options.peek), options)


def read_bytes(text: bytes, name: str = "<memory>", options: ReadOptions | None = None) -> Trace:
    """Read a trace that is already in memory (packed or not)."""
    options = options or ReadOptions()
    return _read(ByteSource(name, limit=options.max_bytes, given=text), options)


def _read(source: ByteSource, options: ReadOptions) -> Trace:
    reader = reader_of(source)
    trace: object = read_by(reader, source, options)
    if not isinstance(trace, Trace):  # somebody else's
        raise AdvisorError(f"{source.path}: the reader {reader.name!r} failed (it gave no Trace)")
    form = trace.meta.format if reader.name == KINETO else reader.name
    if form != reader.name and form not in {item.name for item in readers()}:
        form = reader.name  # it says that we wrote it, from a file of a format that nobody knows
    gpu = None if options.gpu is None else find_gpu(options.gpu).gpu.name
    meta = replace(trace.meta, format=form, step_ranges=options.step_ranges, gpu=gpu)
    return replace(trace, meta=meta)


def with_window(trace: Trace, rank: int | None, window: int) -> Trace:
    """The same trace, with its rank and window of a run it is."""
    return replace(trace, meta=replace(trace.meta, rank=rank, window=window))
