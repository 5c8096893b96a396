"""The reader of PyTorch profiler (Kineto) traces: a file or stdin to a :class:`Trace`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from advisor.errors import AdvisorError
from advisor.ingest.assemble import Assembler
from advisor.ingest.decode import decode_piece
from advisor.ingest.source import DEFAULT_LIMIT, Source
from advisor.ingest.split import Splitter
from advisor.trace import Device, Trace, TraceMeta

PARALLEL_PIECES = 8
"""From this many pieces on (about 100 MB) decoding is worth several processes."""


@dataclass(frozen=True)
class ReadOptions:
    """How to read a trace."""

    max_bytes: int = DEFAULT_LIMIT
    """Uncompressed size at which reading stops with an error."""
    processes: int | None = None
    """Decoding processes; ``None``: as many as cores that may be used, 1 for small traces."""
    progress: Callable[[str, int], None] | None = None
    """Called with (path, uncompressed bytes so far) now and then."""


def read_trace(path: str, options: ReadOptions | None = None) -> Trace:
    """Read one trace file (``-``: standard input).

    Raises AdvisorError when the file holds no trace at all. Damage short of that (a truncated
    file, unreadable events) is repaired or left out, counted, and told in ``Trace.meta``.
    """
    options = options or ReadOptions()
    trace, unsound = _read(path, options, exact=False)
    if unsound and path != "-":
        again, still = _read(path, options, exact=True)
        if still < unsound:
            return again
    return trace


def read_bytes(text: bytes, name: str = "<memory>", options: ReadOptions | None = None) -> Trace:
    """Read a trace that is already in memory (packed or not)."""
    return _read(name, options or ReadOptions(), exact=False, text=text)[0]


def _read(
    path: str, options: ReadOptions, *, exact: bool, text: bytes | None = None
) -> tuple[Trace, int]:
    source = Source(path, limit=options.max_bytes, given=text)
    splitter = Splitter(source, exact=exact)
    assembler = Assembler()
    pieces = splitter.pieces()
    first = list(islice(pieces, PARALLEL_PIECES))
    processes = _processes(options) if len(first) == PARALLEL_PIECES else 1
    stream = chain(_drain(first), pieces)
    if processes > 1:
        from advisor.ingest.pool import Pool

        with Pool(processes) as pool:
            _collect(pool.map(stream), assembler, source, options)
    else:
        _collect(map(decode_piece, stream), assembler, source, options)
    frames, facts = assembler.build()
    meta = _meta(path, splitter, assembler, frames, facts)
    if all(frames[key].is_empty() for key in ("cpu", "gpu", "sync", "memory", "counters")):
        if assembler.unsound and splitter.bare_list:
            raise AdvisorError(
                f"{path}: a JSON list, but not of trace events (a memory timeline?); give a trace "
                "written by export_chrome_trace or tensorboard_trace_handler"
            )
        what = "no events" if assembler.events == 0 else "no profiler events that can be used"
        raise AdvisorError(f"{path}: the trace holds {what}; was the profiler ever active?")
    return Trace(**frames, meta=meta), assembler.unsound


def _drain(first: list[bytes]) -> Iterator[bytes]:
    """Hand over the pieces read ahead without keeping them alive."""
    first.reverse()
    while first:
        yield first.pop()


def _collect(
    decoded: Iterable[Any], assembler: Assembler, source: Source, options: ReadOptions
) -> None:
    for piece in decoded:
        assembler.add(piece)
        if options.progress is not None:
            options.progress(source.path, source.bytes_read)


def _processes(options: ReadOptions) -> int:
    if options.processes is not None:
        return max(1, options.processes)
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return min(cores, 8)


def _meta(
    path: str,
    splitter: Splitter,
    assembler: Assembler,
    frames: dict[str, Any],
    facts: dict[str, Any],
) -> TraceMeta:
    head = splitter.head
    distributed = head.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    devices = tuple(_devices(head.get("deviceProperties")))
    base = _whole(head.get("baseTimeNanoseconds"))
    origin_us = facts["origin_us"]
    unix = base is not None or 1e15 < origin_us < 4e15
    dropped = dict(assembler.dropped)
    if splitter.cut_events:
        dropped["cut off at the end of a truncated file"] = splitter.cut_events
    for label, count in assembler.ignored.items():
        dropped[f"not used: {label}"] = count
    cpu = frames["cpu"]
    return TraceMeta(
        path=path,
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        backend=_text(distributed.get("backend")),
        devices=devices,
        start_ns=(base or 0) + round(origin_us * 1000),
        clock="unix" if unix else "arbitrary",
        end_ns=facts["end_ns"],
        record_shapes=_flag(head.get("record_shapes"), len(frames["inputs"]) > 0),
        with_stack=_flag(head.get("with_stack"), bool((cpu["kind"] == "python").any())),
        profile_memory=_flag(head.get("profile_memory"), len(frames["memory"]) > 0),
        cuda_runtime=_whole(head.get("cuda_runtime_version")),
        cuda_driver=_whole(head.get("cuda_driver_version")),
        vendor=_vendor(head, devices, cpu),
        events_read=assembler.events,
        events_dropped=dropped,
        truncated=splitter.truncated or splitter.source.truncated,
        damage=splitter.source.damage,
        bytes_read=splitter.source.bytes_read,
        sync_events=facts["sync_events"],
        nesting_repaired=facts.get("nesting_repaired", 0),
    )


def _flag(told: Any, seen: bool) -> bool:
    """A recording option: what was recorded decides; the file's word counts only as a yes."""
    return seen or told in (1, True)


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None


def _devices(properties: Any) -> Iterator[Device]:
    for entry in properties[:1024] if isinstance(properties, list) else ():
        if not isinstance(entry, dict) or (number := _whole(entry.get("id"))) is None:
            continue
        major, minor = _whole(entry.get("computeMajor")), _whole(entry.get("computeMinor"))
        yield Device(
            id=number,
            name=_text(entry.get("name")),
            memory_bytes=_positive(entry.get("totalGlobalMem")),
            sms=_positive(entry.get("numSms")),
            compute=(major, minor) if major is not None and minor is not None else None,
            max_threads_per_sm=_positive(entry.get("maxThreadsPerMultiprocessor")),
            registers_per_sm=_positive(entry.get("regsPerMultiprocessor")),
            shared_per_sm=_positive(
                entry.get("sharedMemPerMultiprocessor", entry.get("maxSharedMemoryPerMultiProcessor"))
            ),
            shared_per_block_optin=_positive(entry.get("sharedMemPerBlockOptin")),
            warp_size=_positive(entry.get("warpSize")),
        )  # fmt: skip


def _positive(value: Any) -> int | None:
    number = _whole(value)
    return number if number is not None and number > 0 else None


def _vendor(head: dict[str, Any], devices: tuple[Device, ...], cpu: Any) -> str | None:
    if any(key.startswith(("hip_", "roctracer")) for key in head):
        return "amd"
    if any(key.startswith(("cuda_", "cupti_")) for key in head):
        return "nvidia"
    for device in devices:
        if device.name and "amd" in device.name.lower():
            return "amd"
        if device.name:
            return "nvidia"
    runtime = cpu.filter(cpu["kind"] == "runtime")["name"].unique().cast(str).to_list()
    if any(name.startswith("hip") for name in runtime):
        return "amd"
    if any(name.startswith("cu") for name in runtime):
        return "nvidia"
    return None


def with_window(trace: Trace, rank: int | None, window: int) -> Trace:
    """The same trace, told which rank and window of a run it is."""
    return replace(trace, meta=replace(trace.meta, rank=rank, window=window))
