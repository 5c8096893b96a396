"""Rewrites a trace file into another one that says the same, or a known part of it.

``load`` and ``save`` a Kineto trace; in between, any of these, each a function of the decoded file
that returns a new one and leaves the given one alone:

- ``permuted``: the same events in another order in the file;
- ``renumber_processes``: other process, thread and stream numbers;
- ``repeat_recording``: the whole recording several times, one after the other;
- ``stretch_times``: all times multiplied;
- ``drop_device_work``: part of the device's work left out.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

Event = dict[str, Any]
Data = dict[str, Any]

WORK = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
"""Categories of device work, in lower case."""
CALLS = ("cuda_runtime", "runtime", "hip_runtime")
"""Categories of calls that launch or wait, in lower case."""
ON_DEVICE = (*WORK, "gpu_user_annotation", "cuda_sync")
STREAMS = ("stream", "wait_on_stream")
"""Arguments that name a stream."""
IDS = (
    "correlation",
    "External id",
    "external id",
    "Ev Idx",
    "Python id",
    "Python parent id",
    "Record function id",
    "Sequence number",
    "wait_on_cuda_event_id",
    "wait_on_cuda_event_record_corr_id",
)
"""Arguments that identify an occurrence."""
WAIT = "cudaDeviceSynchronize"
NO_STREAM = (-1, 0xFFFFFFFF)


def load(path: str | Path) -> Data:
    """The decoded file; a bare list of events becomes its ``traceEvents``."""
    raw = Path(path).read_bytes()
    data = msgspec.json.decode(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    return data if isinstance(data, dict) else {"traceEvents": data}


def save(data: Data, path: Path) -> str:
    """Write the file without compression; return its path as a string."""
    path.write_bytes(msgspec.json.encode(data))
    return str(path)


def events(data: Data) -> list[Event]:
    """All events of a file."""
    result: list[Event] = data["traceEvents"]
    return result


def on_device(event: Event) -> bool:
    """Return whether the event lies on a stream of a device."""
    return str(event.get("cat")).lower() in ON_DEVICE


def span(data: Data) -> tuple[float, float]:
    """Start of the first event and end of the last, µs; frames of Python and the profiler's own
    line, which reach beyond the recording, do not count."""
    real = [e for e in events(data) if e.get("ph") == "X" and e.get("cat") not in ("Trace", None)]
    lasting = [e for e in real if e["cat"] != "python_function"] or real
    return min(e["ts"] for e in lasting), max(e["ts"] + e.get("dur", 0) for e in lasting)


def permuted(data: Data, seed: int = 0) -> Data:
    """Shuffle the events."""
    order = list(events(data))
    random.Random(seed).shuffle(order)
    return {**data, "traceEvents": order}


def renumber_processes(data: Data, seed: int = 0) -> Data:
    """Other numbers for processes, threads and streams. The main thread keeps the number of its
    process, as on Linux; devices keep theirs, which other parts of the file refer to."""
    rng = random.Random(seed)
    device = {e["pid"] for e in events(data) if on_device(e)}
    lanes = {(e["pid"], e["tid"]) for e in events(data) if on_device(e)}
    streams = sorted({s for e in events(data) if on_device(e) for s in _streams(e)})
    numbers = sorted(
        {
            n
            for e in events(data)
            if e.get("ph") == "X" and not on_device(e)
            for n in (_parse_number(e.get("pid")), _parse_number(e.get("tid")))
            if n is not None
        }
    )
    new_stream = dict(zip(streams, _shuffled(range(1000, 1000 + len(streams)), rng), strict=True))
    new_number = dict(
        zip(numbers, _shuffled(range(500_000, 500_000 + len(numbers)), rng), strict=True)
    )

    def host(value: Any) -> Any:
        return _format_like(value, new_number.get(_parse_number(value)))

    def stream(value: Any) -> Any:
        result = _parse_stream(value)
        return value if result not in new_stream else _format_like(value, new_stream[result])

    changed = []
    for e in events(data):
        new = dict(e)
        if (e.get("pid"), e.get("tid")) in lanes or (e.get("pid") in device and e["ph"] == "M"):
            new["tid"] = stream(e.get("tid"))
        else:
            new |= {k: host(e[k]) for k in ("pid", "tid") if k in e}
        args = e.get("args")
        if isinstance(args, dict) and any(k in args for k in STREAMS):
            new["args"] = {k: stream(v) if k in STREAMS else v for k, v in args.items()}
        changed.append(new)
    return {**data, "traceEvents": changed}


PAUSE = 1.0
"""Pause between two repetitions, µs."""
LATENCY = 10.0
"""About what lies between a launch and its work, µs."""


def own_span(data: Data) -> Data:
    """Span from the launch of the device's first work to the end of its last. Events outside are
    left out; those that reach beyond are cut, but for calls that may wait for that work."""
    work = [e for e in events(data) if e.get("ph") == "X" and str(e.get("cat")).lower() in WORK]
    begin, end = min(e["ts"] for e in work) - LATENCY, max(e["ts"] + e["dur"] for e in work)
    kept = []
    for e in events(data):
        start, until = e.get("ts", begin), e.get("ts", begin) + e.get("dur", 0)
        if e.get("ph") != "X":
            kept.append(e)
        elif start < end and until > begin:
            start, until = max(start, begin), until if _is_call(e) else min(until, end)
            kept.append({**e, "ts": start, "dur": until - start})
    return {**data, "traceEvents": kept}


def repeat_recording(data: Data, times: int = 4, *, drained: bool = False) -> Data:
    """The recording ``times`` times, ``PAUSE`` apart: times are shifted, identities offset,
    steps numbered on. Names of threads and the like stay as they are. ``drained``: each time ends
    with the host waiting for the whole device, so that nothing reaches into the next. Frames of
    Python that reach beyond the recording are cut to it: a reader would cut those of the next time,
    which begin before they end."""
    data = with_final_wait(data) if drained else data
    begin, end = span(data)
    length = end - begin + PAUSE
    lasting = [
        _clip_frame(e, begin, end)
        for e in events(data)
        if e.get("ph") != "M" and e.get("cat") != "Trace"
    ]
    steps = len({e["name"] for e in lasting if _is_step(e)})
    largest = max((n for e in lasting for n in _identities(e)), default=0) + 1
    changed = [e for e in events(data) if e.get("ph") == "M" or e.get("cat") == "Trace"]
    for number in range(times):
        for e in lasting:
            new = dict(e)
            if "ts" in e:
                new["ts"] = _shift_time(e["ts"], number * length)
            if isinstance(e.get("id"), int) and e.get("ph") in ("s", "f", "t"):
                new["id"] = e["id"] + number * largest
            if isinstance(e.get("args"), dict):
                new["args"] = {
                    k: v + number * largest if k in IDS and isinstance(v, int) and v > 0 else v
                    for k, v in e["args"].items()
                }
            if _is_step(e):
                first, _, rest = e["name"].partition("#")
                new["name"] = f"{first}#{int(rest) + number * steps}"
            changed.append(new)
    return {**data, "traceEvents": changed}


def _clip_frame(e: Event, begin: float, end: float) -> Event:
    if e.get("cat") != "python_function" or e.get("ph") != "X":
        return e
    start, until = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
    return {**e, "ts": start, "dur": max(until - start, 0)}


def with_final_wait(data: Data, latency: float = 5.0) -> Data:
    """The host's last act is a wait for the whole device: on the thread that was busy last, from
    its last event until the device is done, and ``latency`` µs more."""
    _, end = span(data)
    calls = [e for e in events(data) if _is_call(e) and "correlation" in (e.get("args") or {})]
    if not calls:
        return data
    model = max(calls, key=lambda e: e["ts"] + e.get("dur", 0))
    starts = [
        e["ts"] + e.get("dur", 0)
        for e in events(data)
        if e.get("ph") == "X" and (e.get("pid"), e.get("tid")) == (model["pid"], model["tid"])
    ]
    begin = min(max(starts), end)
    wait = {
        **model,
        "name": "hipDeviceSynchronize" if model["name"].startswith("hip") else WAIT,
        "ts": begin,
        "dur": end - begin + latency,
        "args": {"correlation": max(n for e in events(data) for n in _identities(e)) + 1},
    }
    return {**data, "traceEvents": [*events(data), wait]}


def stretch_times(data: Data, factor: float) -> Data:
    """All times and durations multiplied, from the first event on."""
    begin, _ = span(data)

    def stretch_event(e: Event) -> Event:
        new = dict(e)
        if isinstance(e.get("ts"), int | float):
            new["ts"] = begin + (e["ts"] - begin) * factor
        if isinstance(e.get("dur"), int | float):
            new["dur"] = e["dur"] * factor
        return new

    return {**data, "traceEvents": [stretch_event(e) for e in events(data)]}


def drop_device_work(data: Data, share: float = 0.4, seed: int = 0) -> Data:
    """``share`` of the device's work left out, with the arrows that lead to it: what a profiler
    leaves that ran out of buffers."""
    rng = random.Random(seed)
    dropped: set[int] = set()
    kept = []
    for number, e in enumerate(events(data)):
        if str(e.get("cat")).lower() in WORK and e.get("ph") == "X" and rng.random() < share:
            dropped.add((e.get("args") or {}).get("correlation", -number))
        else:
            kept.append(e)
    arrows = [e for e in kept if not (e.get("ph") == "f" and e.get("id") in dropped)]
    return {**data, "traceEvents": arrows}


def _is_call(e: Event) -> bool:
    """Return whether an event is a call of the CUDA or HIP runtime."""
    return e.get("ph") == "X" and str(e.get("cat")).lower() in CALLS


def _is_step(e: Event) -> bool:
    return e.get("ph") == "X" and re.fullmatch(r"ProfilerStep#\d+", str(e.get("name"))) is not None


def _identities(e: Event) -> Iterator[int]:
    if isinstance(e.get("id"), int):
        yield e["id"]
    args = e.get("args")
    if isinstance(args, dict):
        yield from (v for k, v in args.items() if k in IDS and isinstance(v, int))


def _shift_time(ts: Any, by: float) -> Any:
    # whole microseconds stay whole: no digits that the file did not have
    return ts + round(by) + 1 if isinstance(ts, int) and by else ts + by


def _shuffled(values: range, rng: random.Random) -> list[int]:
    items = list(values)
    rng.shuffle(items)
    return items


def _parse_number(value: Any) -> int | None:
    """A process or thread number, however it is written; ``None``: a name."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _parse_stream(value: Any) -> int | None:
    """Parse a stream: ``7``, ``"7"`` or ``"stream 7"``."""
    if isinstance(value, str):
        value = value.removeprefix("stream ")
    return _parse_number(value)


def _streams(e: Event) -> Iterator[int]:
    result = [e.get("tid"), *((e.get("args") or {}).get(k) for k in STREAMS)]
    yield from (n for n in map(_parse_stream, result) if n is not None and n not in NO_STREAM)


def _format_like(old: Any, new: int | None) -> Any:
    """Format a new number as the old one was written."""
    if new is None:
        return old
    if isinstance(old, str):
        return re.sub(r"\d+$", str(new), old)
    return new
