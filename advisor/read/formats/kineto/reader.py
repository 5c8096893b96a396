"""Reader of PyTorch profiler (Kineto) traces, and of the metadata beside their events, as
TraceMeta."""

import re
import time
from collections.abc import Iterator
from typing import Any

import polars as pl

from advisor.core.cgroup import count_cores
from advisor.core.errors import AdvisorError
from advisor.core.trace import (
    ANOTHER_TRACE,
    CALLS,
    CUDA,
    JAX,
    KINETO,
    PYTORCH,
    STEP_MARKS,
    TENSORFLOW,
    Device,
    Trace,
    TraceMeta,
)
from advisor.read.assemble import Assembler, Facts
from advisor.read.event_columns import Piece
from advisor.read.formats.kineto.decode import decode_all, decode_piece
from advisor.read.formats.kineto.json_pieces import Splitter, without_mark
from advisor.read.reader import NO_ROOM, Reader, ReaderClaim, ReadOptions, memory_budget
from advisor.read.source import PROFILE, ByteSource

GIVE_UP = 256 << 20
"""Uncompressed size without a single event from which a file is no trace, bytes."""
USELESS = 3_000_000
"""Number of events without a usable one from which a file is no trace."""
WORK_SECONDS, WORK_SECONDS_PER_MB = 10.0, 4.0
"""CPU time that the reading thread may take, s: at least, and per megabyte on disk; fifty times
what traces take. A file that asks for more was made for that (or packed a thousandfold)."""
MAX_PROCESSES = 8
"""Most decoding processes; more would wait for the one that unpacks the file."""

_XLA = re.compile(rb'"name"\s*:\s*"/(?:host:CPU|device:[GT]PU:\d+)')
_TABLE = re.compile(rb"\[+ *[A-Za-z_][\w. -]*\]+ *\r?\n")
"""Head of a table in TOML or INI, which also opens with a bracket."""
_EVENTS = re.compile(rb'"(?:traceEvents|ph|deviceProperties|distributedInfo)"\s*:')
"""Events, or keys that precede them: the process groups of a large job fill many blocks."""


class KinetoReader(Reader):
    """Reader of PyTorch profiler traces, of any age: ``{"traceEvents": […], …}`` or a bare list."""

    name = KINETO
    description = "a PyTorch profiler trace (.json, .json.gz or .json.zst)"
    suffixes = (".json",)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise JSON; surely, if events or their header are in the first block."""
        text = without_mark(head)
        if text[:1] not in (b"{", b"[", b"") or b"\0" in text[:4] or _TABLE.match(text):
            return ReaderClaim.NO
        if _XLA.search(head):  # another profiler's, of the same form
            return ReaderClaim.PERHAPS
        return ReaderClaim.SURE if _EVENTS.search(head) else ReaderClaim.PERHAPS

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read with quick cuts; if they went wrong, again with exact ones."""
        began = time.thread_time()
        splitter, assembler = _collect(source, options, began, exact=False)
        if assembler.unsound or splitter.skipped:
            again = source.reopen()
            if again is not None:
                other_splitter, other = _collect(again, options, began, exact=True)
                better = _quality(other_splitter, other) > _quality(splitter, assembler)
                if better or other_splitter.followed:
                    splitter, assembler = other_splitter, other
        return _finish(splitter, assembler)


def _quality(splitter: Splitter, assembler: Assembler) -> tuple[int, int]:
    """Rate a reading of a damaged file: usable events first, then fewer lost ones."""
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
    frames, facts = assembler.build(read_call_classes(splitter.head))
    if all(frames[key].is_empty() for key in ("cpu", "gpu", "sync", "memory", "counters")):
        raise AdvisorError(f"{source.path}: {_nothing(splitter, assembler)}")
    return Trace(**frames, meta=describe_trace(splitter, assembler, frames, facts))


def _nothing(splitter: Splitter, assembler: Assembler) -> str:
    """Return why there is no trace in a file that looked like one."""
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


OURS = "advisor"
"""Key of a trace that ``advisor`` wrote from another profiler's file: its format and facts."""
_UNIX = range(10**18, 4 * 10**18)  # 2001 to 2096
_MAX_NUMBER = 1 << 53  # of anything that a device has: beyond that floats are not exact
_AMD = re.compile(r"\bamd\b|radeon|instinct|\bgfx\d|\bmi\d{2,3}", re.IGNORECASE)
_NVIDIA = re.compile(
    r"nvidia|tesla|geforce|quadro|titan|\b[rg]tx\b|^[abghlptv]{1,2}\d{1,3}[a-z]?\b", re.IGNORECASE
)

MAX_CALLS = 10_000
"""Most calls whose class such a file may give."""


def describe_trace(
    splitter: Splitter, assembler: Assembler, frames: dict[str, pl.DataFrame], facts: Facts
) -> TraceMeta:
    head = splitter.head
    stated = head.get("distributedInfo")
    distributed: dict[str, Any] = stated if isinstance(stated, dict) else {}
    devices = tuple(_devices(head.get("deviceProperties")))
    start_ns = (whole_number(head.get("baseTimeNanoseconds")) or 0) + facts.origin_ns
    dropped = dict(assembler.dropped)
    if splitter.cut_events:
        dropped["cut off at the end of a truncated file"] = splitter.cut_events
    if splitter.followed:
        dropped[ANOTHER_TRACE] = 1
    if splitter.skipped:
        dropped["stretches without events"] = splitter.skipped
    for label, count in assembler.ignored.items():
        dropped[f"not used: {label}"] = count
    ours = head.get(OURS)
    return TraceMeta(
        path=splitter.source.path,
        **(_written(ours) if isinstance(ours, dict) else {"framework": PYTORCH}),
        rank=whole_number(distributed.get("rank")),
        world_size=whole_number(distributed.get("world_size")),
        backend=_text(distributed.get("backend")),
        devices=devices,
        start_ns=start_ns,
        clock="unix" if start_ns in _UNIX else "arbitrary",
        end_ns=facts.end_ns,
        record_shapes=_flag(head.get("record_shapes"), not frames["inputs"].is_empty()),
        with_stack=_flag(head.get("with_stack"), facts.python_frames),
        profile_memory=_flag(head.get("profile_memory"), not frames["memory"].is_empty()),
        cuda_runtime=whole_number(head.get("cuda_runtime_version")),
        cuda_driver=whole_number(head.get("cuda_driver_version")),
        vendor=_one_of(ours, "vendor", ("amd", "nvidia"))
        or _vendor(head, devices, facts.runtime_calls),
        events_read=assembler.events,
        events_dropped=dropped,
        truncated=splitter.truncated or splitter.source.truncated,
        damage=splitter.source.damage,
        bytes_read=splitter.source.bytes_read,
        sync_events=not frames["sync"].is_empty(),
        nesting_repaired=facts.nesting_repaired,
    )


def _written(ours: dict[str, Any]) -> dict[str, str | None]:
    """Return the facts that an exported file gives of its original."""
    return {
        "format": (_text(ours.get("format")) or KINETO)[:40],
        "framework": _one_of(ours, "framework", (PYTORCH, TENSORFLOW, JAX, CUDA)),
        "step_marks": _one_of(ours, "step_marks", STEP_MARKS),
    }


def read_call_classes(head: dict[str, Any]) -> dict[str, str]:
    """Return the class (one of CALLS) by name of calls that their names do not classify, from a
    file that ``advisor`` wrote."""
    ours = head.get(OURS)
    stated = ours.get("calls") if isinstance(ours, dict) else None
    pairs = stated[:MAX_CALLS] if isinstance(stated, list) else []
    return {
        pair[0]: pair[1]
        for pair in pairs
        if isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and pair[1] in CALLS
    }


def _one_of(stated: Any, key: str, known: tuple[str, ...]) -> str | None:
    value = stated.get(key) if isinstance(stated, dict) else None
    return next((item for item in known if item == value), None)


def _flag(stated: Any, seen: bool) -> bool:
    """Return whether an option was on: by recorded data; the file's word counts only as yes."""
    return seen or stated in (1, True)


def whole_number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


def _positive(value: Any) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 < number < _MAX_NUMBER else None


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _devices(properties: Any) -> Iterator[Device]:
    for entry in properties[:1024] if isinstance(properties, list) else ():
        number = whole_number(entry.get("id")) if isinstance(entry, dict) else None
        if number is None or not 0 <= number < 1 << 31:
            continue
        major, minor = (
            whole_number(entry.get("computeMajor")),
            whole_number(entry.get("computeMinor")),
        )
        shared = entry.get("sharedMemPerMultiprocessor")
        yield Device(
            id=number,
            name=_text(entry.get("name")) or None,
            memory_bytes=_positive(entry.get("totalGlobalMem")),
            sms=_positive(entry.get("numSms")),
            compute=(major, minor) if major is not None and minor is not None else None,
            max_threads_per_sm=_positive(entry.get("maxThreadsPerMultiprocessor")),
            registers_per_sm=_positive(entry.get("regsPerMultiprocessor")),
            shared_per_sm=_positive(
                entry.get("maxSharedMemoryPerMultiProcessor") if shared is None else shared
            ),
            shared_per_block_optin=_positive(entry.get("sharedMemPerBlockOptin")),
            warp_size=_positive(entry.get("warpSize")),
        )


def _vendor(
    head: dict[str, Any], devices: tuple[Device, ...], runtime_calls: list[str]
) -> str | None:
    """Return ``amd``, ``nvidia`` or ``None``, by the profiler's keys, device names or API calls."""
    if any(key.startswith(("hip_", "roctracer", "rocprofiler")) for key in head):
        return "amd"
    for device in devices:
        if device.name and _AMD.search(device.name):
            return "amd"
        if device.name and _NVIDIA.search(device.name):
            return "nvidia"
    if any(name.startswith("hip") for name in runtime_calls):
        return "amd"
    if any(key.startswith(("cuda_", "cupti_")) for key in head):
        return "nvidia"
    return "nvidia" if any(name.startswith("cu") for name in runtime_calls) else None
