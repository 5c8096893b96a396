"""Reader of PyTorch profiler (Kineto) traces, and of the metadata next to their events, as
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
from advisor.read.build import UNIX_NS_RANGE
from advisor.read.event_columns import Piece
from advisor.read.formats.kineto.decode import decode_all, decode_piece
from advisor.read.formats.kineto.json_pieces import Splitter, without_mark
from advisor.read.reader import NO_ROOM, Reader, ReaderClaim, ReadOptions, memory_budget
from advisor.read.source import PROFILE, ByteSource

MAX_BYTES_WITHOUT_EVENT = 256 << 20
"""Uncompressed size in bytes after which a file without a single event is not a trace."""
MAX_UNUSABLE_EVENTS = 3_000_000
"""Number of events after which a file without a usable event is not a trace."""
MIN_CPU_SECONDS, CPU_SECONDS_PER_MB = 10.0, 4.0
"""CPU time in s that the reading thread may take: a minimum, and per megabyte on disk. Real traces
take 2% of that; a file that takes more is malicious (or packed a thousandfold)."""
_MAX_PROCESSES = 8
"""Maximum number of decoding processes. More would wait for the process that unpacks the file."""

_XLA_PLANE = re.compile(rb'"name"\s*:\s*"/(?:host:CPU|device:[GT]PU:\d+)')
_TABLE_HEADER = re.compile(rb"\[+ *[A-Za-z_][\w. -]*\]+ *\r?\n")
"""Pattern of a table's header in TOML or INI, which also begins with a bracket."""
_EVENT_KEYS = re.compile(rb'"(?:traceEvents|ph|deviceProperties|distributedInfo)"\s*:')
"""Pattern of events, or of keys before them: process groups of a large job fill many blocks."""


class KinetoReader(Reader):
    """Reader of PyTorch profiler traces, of any age: ``{"traceEvents": […], …}`` or a bare list."""

    name = KINETO
    description = "a PyTorch profiler trace (.json, .json.gz or .json.zst)"
    suffixes = (".json",)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise JSON. The claim is sure if events or their header are in the first block."""
        text = without_mark(head)
        if text[:1] not in (b"{", b"[", b"") or b"\0" in text[:4] or _TABLE_HEADER.match(text):
            return ReaderClaim.NO
        if _XLA_PLANE.search(head):  # a trace of another profiler in the same form
            return ReaderClaim.PERHAPS
        return ReaderClaim.SURE if _EVENT_KEYS.search(head) else ReaderClaim.PERHAPS

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read with quick cuts, and again with exact ones if the quick ones failed."""
        start_time = time.thread_time()
        splitter, assembler = _collect_pieces(source, options, start_time, exact=False)
        if assembler.unsound or splitter.skipped:
            second_source = source.reopen()
            if second_source is not None:
                exact_splitter, exact_assembler = _collect_pieces(
                    second_source, options, start_time, exact=True
                )
                is_better = _rate_reading(exact_splitter, exact_assembler) > _rate_reading(
                    splitter, assembler
                )
                if is_better or exact_splitter.followed:
                    splitter, assembler = exact_splitter, exact_assembler
        return _build_trace(splitter, assembler)


def _rate_reading(splitter: Splitter, assembler: Assembler) -> tuple[int, int]:
    """Return the rating of a reading of a damaged file: usable events, then fewer lost ones."""
    return assembler.rows, -assembler.unsound - splitter.skipped


def _collect_pieces(
    source: ByteSource, options: ReadOptions, start_time: float, *, exact: bool
) -> tuple[Splitter, Assembler]:
    splitter = Splitter(source, exact=exact, piece_bytes=options.piece_bytes)
    assembler = Assembler()
    max_memory = memory_budget()
    for piece in _decode_pieces(splitter, options):
        assembler.add(piece)
        if assembler.memory() > max_memory:
            source.stop(NO_ROOM.format(assembler.events))
            break
        if assembler.events == 0 and source.bytes_read > MAX_BYTES_WITHOUT_EVENT:
            raise AdvisorError(
                f"{source.path}: no trace event in its first {MAX_BYTES_WITHOUT_EVENT >> 20} MB; "
                "give a PyTorch profiler trace"
            )
        if assembler.rows == 0 and assembler.events > MAX_UNUSABLE_EVENTS:
            raise AdvisorError(
                f"{source.path}: none of its first {assembler.events:,} events can be used; "
                "give a PyTorch profiler trace"
            )
        if (
            time.thread_time() - start_time
            > MIN_CPU_SECONDS + CPU_SECONDS_PER_MB * source.packed_read / 1e6
        ):
            source.stop(
                f"too much work for its size: read up to {source.bytes_read / 1e6:,.0f} MB of text"
            )
            break
        if options.progress is not None:
            options.progress(source.path, source.bytes_read)
    return splitter, assembler


def _decode_pieces(splitter: Splitter, options: ReadOptions) -> Iterator[Piece]:
    """Decode the pieces in this process, or in several processes if the file is large enough."""
    source = splitter.source
    pieces = splitter.pieces()
    processes = _count_processes(options)
    if processes == 1 or source.expected_bytes() < options.parallel_from:
        for piece in pieces:
            yield decode_piece(piece)
            if processes > 1 and source.bytes_read >= options.parallel_from:
                break  # standard input, or a better compression than expected
        else:
            return
    yield from decode_all(pieces, processes)


def _count_processes(options: ReadOptions) -> int:
    if options.processes is not None:
        return max(1, options.processes)
    return min(count_cores(), _MAX_PROCESSES)


def _build_trace(splitter: Splitter, assembler: Assembler) -> Trace:
    source = splitter.source
    frames, facts = assembler.build(read_call_classes(splitter.head))
    if all(frames[key].is_empty() for key in ("cpu", "gpu", "sync", "memory", "counters")):
        raise AdvisorError(f"{source.path}: {_explain_no_trace(splitter, assembler)}")
    return Trace(**frames, meta=describe_trace(splitter, assembler, frames, facts))


def _explain_no_trace(splitter: Splitter, assembler: Assembler) -> str:
    """Return the reason why a file that looked like a trace has none."""
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


ADVISOR_KEY = "advisor"
"""Key of a trace that ``advisor`` wrote from another profiler's file, for its format and facts."""
_MAX_NUMBER = 1 << 53  # maximum for a device's properties; larger floats are not exact
_AMD_NAME = re.compile(r"\bamd\b|radeon|instinct|\bgfx\d|\bmi\d{2,3}", re.IGNORECASE)
_NVIDIA_NAME = re.compile(
    r"nvidia|tesla|geforce|quadro|titan|\b[rg]tx\b|^[abghlptv]{1,2}\d{1,3}[a-z]?\b", re.IGNORECASE
)

MAX_CALL_NAMES = 10_000
"""Maximum number of calls whose class an exported file may give."""


def describe_trace(
    splitter: Splitter, assembler: Assembler, frames: dict[str, pl.DataFrame], facts: Facts
) -> TraceMeta:
    head = splitter.head
    recorded = head.get("distributedInfo")
    distributed: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    devices = tuple(_read_devices(head.get("deviceProperties")))
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
    exported = head.get(ADVISOR_KEY)
    return TraceMeta(
        path=splitter.source.path,
        **(
            _read_exported_facts(exported) if isinstance(exported, dict) else {"framework": PYTORCH}
        ),
        rank=whole_number(distributed.get("rank")),
        world_size=whole_number(distributed.get("world_size")),
        backend=_short_text(distributed.get("backend")),
        devices=devices,
        start_ns=start_ns,
        clock="unix" if start_ns in UNIX_NS_RANGE else "arbitrary",
        end_ns=facts.end_ns,
        record_shapes=_was_on(head.get("record_shapes"), not frames["inputs"].is_empty()),
        with_stack=_was_on(head.get("with_stack"), facts.python_frames),
        profile_memory=_was_on(head.get("profile_memory"), not frames["memory"].is_empty()),
        cuda_runtime=whole_number(head.get("cuda_runtime_version")),
        cuda_driver=whole_number(head.get("cuda_driver_version")),
        vendor=_get_known_value(exported, "vendor", ("amd", "nvidia"))
        or _find_vendor(head, devices, facts.runtime_calls),
        events_read=assembler.events,
        events_dropped=dropped,
        truncated=splitter.truncated or splitter.source.truncated,
        damage=splitter.source.damage,
        bytes_read=splitter.source.bytes_read,
        sync_events=not frames["sync"].is_empty(),
        nesting_repaired=facts.nesting_repaired,
    )


def _read_exported_facts(exported: dict[str, Any]) -> dict[str, str | None]:
    """Return the facts about the original that are in an exported file."""
    return {
        "format": (_short_text(exported.get("format")) or KINETO)[:40],
        "framework": _get_known_value(exported, "framework", (PYTORCH, TENSORFLOW, JAX, CUDA)),
        "step_marks": _get_known_value(exported, "step_marks", STEP_MARKS),
    }


def read_call_classes(head: dict[str, Any]) -> dict[str, str]:
    """Return the class (one of CALLS) by name, for calls whose name does not give the class, from a
    file that ``advisor`` wrote."""
    exported = head.get(ADVISOR_KEY)
    recorded = exported.get("calls") if isinstance(exported, dict) else None
    pairs = recorded[:MAX_CALL_NAMES] if isinstance(recorded, list) else []
    return {
        pair[0]: pair[1]
        for pair in pairs
        if isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and pair[1] in CALLS
    }


def _get_known_value(recorded: Any, key: str, known: tuple[str, ...]) -> str | None:
    value = recorded.get(key) if isinstance(recorded, dict) else None
    return next((item for item in known if item == value), None)


def _was_on(recorded: Any, has_data: bool) -> bool:
    """Return whether an option was on: there is data of it, or the file says that it was on."""
    return has_data or recorded in (1, True)


def whole_number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


def _positive_number(value: Any) -> int | None:
    number = whole_number(value)
    return number if number is not None and 0 < number < _MAX_NUMBER else None


def _short_text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _read_devices(properties: Any) -> Iterator[Device]:
    for entry in properties[:1024] if isinstance(properties, list) else ():
        device_id = whole_number(entry.get("id")) if isinstance(entry, dict) else None
        if device_id is None or not 0 <= device_id < 1 << 31:
            continue
        major, minor = (
            whole_number(entry.get("computeMajor")),
            whole_number(entry.get("computeMinor")),
        )
        shared = entry.get("sharedMemPerMultiprocessor")
        yield Device(
            id=device_id,
            name=_short_text(entry.get("name")) or None,
            memory_bytes=_positive_number(entry.get("totalGlobalMem")),
            sms=_positive_number(entry.get("numSms")),
            compute=(major, minor) if major is not None and minor is not None else None,
            max_threads_per_sm=_positive_number(entry.get("maxThreadsPerMultiprocessor")),
            registers_per_sm=_positive_number(entry.get("regsPerMultiprocessor")),
            shared_per_sm=_positive_number(
                entry.get("maxSharedMemoryPerMultiProcessor") if shared is None else shared
            ),
            shared_per_block_optin=_positive_number(entry.get("sharedMemPerBlockOptin")),
            warp_size=_positive_number(entry.get("warpSize")),
        )


def _find_vendor(
    head: dict[str, Any], devices: tuple[Device, ...], runtime_calls: list[str]
) -> str | None:
    """Return ``amd``, ``nvidia`` or ``None``, by the profiler's keys, device names or API calls."""
    if any(key.startswith(("hip_", "roctracer", "rocprofiler")) for key in head):
        return "amd"
    for device in devices:
        if device.name and _AMD_NAME.search(device.name):
            return "amd"
        if device.name and _NVIDIA_NAME.search(device.name):
            return "nvidia"
    if any(name.startswith("hip") for name in runtime_calls):
        return "amd"
    if any(key.startswith(("cuda_", "cupti_")) for key in head):
        return "nvidia"
    return "nvidia" if any(name.startswith("cu") for name in runtime_calls) else None
