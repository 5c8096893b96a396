"""PyTorch profiler (Kineto) traces."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from advisor.core.cgroup import count_cores
from advisor.core.errors import AdvisorError
from advisor.core.trace import KINETO, Trace
from advisor.read.assemble import Assembler
from advisor.read.columns import Piece
from advisor.read.decode import decode_all, decode_piece
from advisor.read.meta import describe_trace, given_calls
from advisor.read.reader import NO_ROOM, Reader, ReaderClaim, ReadOptions, memory_budget
from advisor.read.source import ByteSource
from advisor.read.split import Splitter, without_mark
from advisor.read.unknown_format import PROFILE

GIVE_UP = 256 << 20
"""Uncompressed bytes without a single event after which a file is no trace."""
USELESS = 3_000_000
"""Events without one that can be used after which a file is no trace."""
WORK_SECONDS, WORK_SECONDS_PER_MB = 10.0, 4.0
"""CPU time that the reading thread may take, at least and for each megabyte as it is on disk: fifty
times what traces take. A file that asks for more was made for that (or packed a thousandfold)."""
MAX_PROCESSES = 8
"""More decoding processes wait for the one that unpacks the file."""

_XLA = re.compile(rb'"name"\s*:\s*"/(?:host:CPU|device:[GT]PU:\d+)')
_EVENTS = re.compile(rb'"(?:traceEvents|ph)"\s*:')


class Kineto(Reader):
    """Traces of PyTorch's profiler, of any age: ``{"traceEvents": […], …}``, or the bare list."""

    name = KINETO
    reads = "a PyTorch profiler trace (.json, .json.gz or .json.zst)"
    suffixes = (".json",)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """JSON; for sure, if events are in sight."""
        text = without_mark(head)
        if text[:1] not in (b"{", b"[", b"") or b"\0" in text[:4]:
            return ReaderClaim.NO
        if _XLA.search(head):  # another profiler's, of the same form
            return ReaderClaim.PERHAPS
        return ReaderClaim.SURE if _EVENTS.search(head) else ReaderClaim.PERHAPS

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read with quick cuts; if they went wrong, once more with exact ones."""
        began = time.thread_time()
        splitter, assembler = _collect(source, options, began, exact=False)
        if assembler.unsound or splitter.skipped:
            again = source.again()
            if again is not None:
                other_splitter, other = _collect(again, options, began, exact=True)
                better = _quality(other_splitter, other) > _quality(splitter, assembler)
                if better or other_splitter.followed:
                    splitter, assembler = other_splitter, other
        return _finish(splitter, assembler)


def _quality(splitter: Splitter, assembler: Assembler) -> tuple[int, int]:
    """How good a reading of a damaged file is: usable events first, then what was not lost."""
    return assembler.rows, -assembler.unsound - splitter.skipped


def _collect(
    source: ByteSource, options: ReadOptions, began: float, *, exact: bool
) -> tuple[Splitter, Assembler]:
    splitter = Splitter(source, exact=exact, piece_bytes=options.piece_bytes)
    assembler = Assembler()
    room = memory_budget()
    for piece in _decoded(splitter, options):
        assembler.add(piece)
        if assembler.memory() > room:
            source.stop(NO_ROOM.format(assembler.events))
            break
        if assembler.events == 0 and source.bytes_read > GIVE_UP:
            raise AdvisorError(
                f"{source.path}: no trace event in its first {GIVE_UP >> 20} MB; "
                "give a PyTorch profiler trace"
            )
        if assembler.rows == 0 and assembler.events > USELESS:
            raise AdvisorError(
                f"{source.path}: none of its first {assembler.events:,} events can be used; "
                "give a PyTorch profiler trace"
            )
        if (
            time.thread_time() - began
            > WORK_SECONDS + WORK_SECONDS_PER_MB * source.packed_read / 1e6
        ):
            source.stop(
                f"too much work for its size: read up to {source.bytes_read / 1e6:,.0f} MB of text"
            )
            break
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
    yield from decode_all(pieces, processes)


def _processes(options: ReadOptions) -> int:
    if options.processes is not None:
        return max(1, options.processes)
    return min(count_cores(), MAX_PROCESSES)


def _finish(splitter: Splitter, assembler: Assembler) -> Trace:
    source = splitter.source
    frames, facts = assembler.build(given_calls(splitter.head))
    if all(frames[key].is_empty() for key in ("cpu", "gpu", "sync", "memory", "counters")):
        raise AdvisorError(f"{source.path}: {_nothing(splitter, assembler)}")
    return Trace(**frames, meta=describe_trace(splitter, assembler, frames, facts))


def _nothing(splitter: Splitter, assembler: Assembler) -> str:
    """Why there is no trace in a file that looked like one."""
    if splitter.truncated or splitter.source.truncated:
        return "cut off before its first usable event; copy or record it again"
    if "viztracer_metadata" in splitter.head:
        return f"a trace of viztracer, Python calls without GPU work; {PROFILE}"
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
