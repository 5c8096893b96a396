"""The reader of PyTorch profiler (Kineto) traces: a file or stdin to a :class:`Trace`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from advisor.errors import AdvisorError
from advisor.ingest.assemble import Assembler
from advisor.ingest.columns import Piece
from advisor.ingest.decode import decode_piece
from advisor.ingest.meta import describe
from advisor.ingest.source import DEFAULT_LIMIT, Source
from advisor.ingest.split import PIECE, Splitter
from advisor.trace import Trace

PARALLEL_FROM = 96 << 20
"""From this many uncompressed bytes on, decoding is worth several processes."""
GIVE_UP = 256 << 20
"""Uncompressed bytes without a single event after which a file is no trace."""
MAX_PROCESSES = 8
"""More decoding processes wait for the one that unpacks the file."""


@dataclass(frozen=True)
class ReadOptions:
    """How to read a trace."""

    max_bytes: int = DEFAULT_LIMIT
    """Uncompressed size at which reading stops with an error."""
    processes: int | None = None
    """Decoding processes; ``None``: as many as cores that may be used, 1 for small traces."""
    progress: Callable[[str, int], None] | None = None
    """Called with (path, uncompressed bytes so far) now and then."""
    piece_bytes: int = PIECE
    """Bytes of JSON that are decoded at once."""
    parallel_from: int = PARALLEL_FROM
    """Uncompressed bytes from which on several processes are used."""


def read_trace(path: str, options: ReadOptions | None = None) -> Trace:
    """Read one trace file (``-``: standard input).

    Raises AdvisorError when the file holds no trace at all. Damage short of that (a truncated
    file, unreadable events) is repaired or left out, counted, and told in ``Trace.meta``.
    """
    return _read(Source(path, limit=_limit(options)), options or ReadOptions())


def read_bytes(text: bytes, name: str = "<memory>", options: ReadOptions | None = None) -> Trace:
    """Read a trace that is already in memory (packed or not)."""
    return _read(Source(name, limit=_limit(options), given=text), options or ReadOptions())


def _limit(options: ReadOptions | None) -> int:
    return DEFAULT_LIMIT if options is None else options.max_bytes


def _read(source: Source, options: ReadOptions) -> Trace:
    """Read with quick cuts; if they went wrong, once more with exact ones."""
    splitter, assembler = _collect(source, options, exact=False)
    if assembler.unsound or splitter.skipped:
        again = source.again()
        if again is not None:
            other_splitter, other = _collect(again, options, exact=True)
            if _worth(other_splitter, other) > _worth(splitter, assembler):
                splitter, assembler = other_splitter, other
    return _finish(splitter, assembler)


def _worth(splitter: Splitter, assembler: Assembler) -> tuple[int, int]:
    """How good a reading of a damaged file is: usable events first, then what was not lost."""
    return assembler.rows, -assembler.unsound - splitter.skipped


def _collect(source: Source, options: ReadOptions, *, exact: bool) -> tuple[Splitter, Assembler]:
    splitter = Splitter(source, exact=exact, piece_bytes=options.piece_bytes)
    assembler = Assembler()
    for piece in _decoded(splitter, options):
        assembler.add(piece)
        if assembler.events == 0 and source.bytes_read > GIVE_UP:
            raise AdvisorError(
                f"{source.path}: no trace event in its first {GIVE_UP >> 20} MB; "
                "give a PyTorch profiler trace"
            )
        if options.progress is not None:
            options.progress(source.path, source.bytes_read)
    return splitter, assembler


def _decoded(splitter: Splitter, options: ReadOptions) -> Iterator[Piece]:
    """Decode the pieces here, or in other processes once there is enough to do."""
    source = splitter.source
    pieces = splitter.pieces()
    processes = _processes(options)
    if processes == 1 or source.expected_bytes() < options.parallel_from:
        for piece in pieces:
            yield decode_piece(piece)
            if processes > 1 and source.bytes_read >= options.parallel_from:
                break  # standard input, or packed more tightly than expected
        else:
            return
    from advisor.ingest.pool import Pool

    with Pool(processes) as pool:
        yield from pool.map(pieces)


def _processes(options: ReadOptions) -> int:
    if options.processes is not None:
        return max(1, options.processes)
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return min(cores, MAX_PROCESSES)


def _finish(splitter: Splitter, assembler: Assembler) -> Trace:
    source = splitter.source
    frames, facts = assembler.build()
    if all(frames[key].is_empty() for key in ("cpu", "gpu", "sync", "memory", "counters")):
        raise AdvisorError(f"{source.path}: {_nothing(splitter, assembler)}")
    return Trace(**frames, meta=describe(splitter, assembler, frames, facts))


def _nothing(splitter: Splitter, assembler: Assembler) -> str:
    """Why there is no trace in a file that looked like one."""
    if splitter.truncated or splitter.source.truncated:
        return "cut off before its first usable event; copy or record it again"
    if assembler.events == 0 and assembler.unsound:
        return (
            "a list, but none of its elements is a trace event; give a trace written by "
            "export_chrome_trace or tensorboard_trace_handler"
        )
    if assembler.events == 0:
        return "the trace holds no events; was the profiler ever active?"
    return (
        f"none of the trace's {assembler.events} events can be used; "
        "record it with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
    )


def with_window(trace: Trace, rank: int | None, window: int) -> Trace:
    """The same trace, told which rank and window of a run it is."""
    return replace(trace, meta=replace(trace.meta, rank=rank, window=window))
