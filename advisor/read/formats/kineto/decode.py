"""Decoding of one piece of JSON, damaged or not, to typed events and then to plain columns.

It runs in the decoding processes and needs only msgspec and numpy."""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from advisor.core.pool import ProcessPool, WorkerDied
from advisor.read.event_columns import Piece, build_columns
from advisor.read.json_repair import DECODE_ERRORS, repair_json, split_objects
from advisor.read.trace_events import EventArgs, TraceEvent

event_list = msgspec.json.Decoder(list[TraceEvent])
"""Decoder of a piece of JSON to a list of events. This is most of the work."""
_event_decoder = msgspec.json.Decoder(TraceEvent)

# Profilers of early 2024 wrote Unix time in microseconds with decimals. A float cannot hold so many
# digits (it rounds to 0.25 us), so the leading digits are cut off before decoding.
_LONG_TIME = re.compile(rb'"ts"\s*:\s*(\d{4})\d{12}\.\d')
_SEARCHED_BYTES = 1 << 16
_CUT_UNIT_US = 10**12


def decode_piece(piece: bytes) -> Piece:
    """Decode a JSON list of events into columns. Never raises for invalid content."""
    epoch = 0
    if match := _LONG_TIME.search(piece, 0, _SEARCHED_BYTES):
        digits = match.group(1)
        epoch = int(digits) * _CUT_UNIT_US - _CUT_UNIT_US
        piece = re.sub(rb'("ts"\s*:\s*)' + digits + rb"(\d{12}\.\d)", rb"\g<1>1\2", piece)
    events, unsound, lenient = _decode_events(piece)
    return build_columns(events, piece, unsound=unsound, lenient=lenient, epoch=epoch)


def _decode_events(piece: bytes) -> tuple[list[TraceEvent], int, int]:
    """Return the events, the number of undecodable ones, and the number decoded leniently."""
    try:
        return event_list.decode(piece), 0, 0
    except DECODE_ERRORS:
        pass
    piece = repair_json(piece)
    try:
        return event_list.decode(piece), 0, 0
    except DECODE_ERRORS:
        pass
    events: list[TraceEvent] = []
    lenient = 0
    texts, unsound = split_objects(piece[1:-1])
    for text in texts:
        try:
            events.append(_event_decoder.decode(text))
            continue
        except DECODE_ERRORS:
            pass
        try:
            event = _coerce_event(msgspec.json.decode(text))
        except DECODE_ERRORS:
            event = None
        if event is None:
            unsound += 1
        else:
            lenient += 1
            events.append(event)
    return events, unsound, lenient


_cached_fields = cache(msgspec.structs.fields)
"""Cached function for the fields of a struct. Finding them takes longer than decoding an event."""


def _coerce_event(value: Any) -> TraceEvent | None:
    """Return an event with those of its fields that have usable types, or ``None``."""
    if not isinstance(value, dict):
        return None
    fields: dict[str, Any] = {
        spec.name: _get_if_valid(value[spec.encode_name], spec.name)
        for spec in _cached_fields(TraceEvent)
        if spec.encode_name in value and spec.name != "args"
    }
    fields = {name: item for name, item in fields.items() if item is not None}
    if isinstance(value.get("args"), dict):
        fields["args"] = _coerce_args(value["args"])
    return TraceEvent(**fields)


def _coerce_args(value: dict[str, Any]) -> EventArgs:
    arguments: dict[str, Any] = {}
    for spec in _cached_fields(EventArgs):
        if spec.encode_name not in value:
            continue
        item = value[spec.encode_name]
        if spec.type is Raw:
            arguments[spec.name] = Raw(msgspec.json.encode(item))
        elif (valid_value := _get_if_valid(item, spec.name)) is not None:
            arguments[spec.name] = valid_value
    return EventArgs(**arguments)


def _get_if_valid(item: Any, name: str) -> str | int | float | None:
    if name in ("ph", "cat"):
        return item if isinstance(item, str) else None
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        return None
    if isinstance(item, int) and abs(item) > 1 << 200:
        return None
    return item


# -- several processes -----------------------------------------------------------------------------

MAX_PIECES_AHEAD = 3
"""Maximum number of pieces that wait for one worker."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, np.ascontiguousarray(value).data]
    raise TypeError(type(value).__name__)


def _decode_array(_kind: type, value: Any) -> Any:
    dtype, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype))


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(Piece, dec_hook=_decode_array)


def decode_in_worker(piece: bytes) -> bytes:
    """Decode a piece in a worker. Return its encoded columns."""
    import gc

    gc.disable()  # the decoded structs have no cycles, so collection only costs time
    return _encoder.encode(decode_piece(piece))


def decode_all(pieces: Iterable[bytes], processes: int) -> Iterator[Piece]:
    """Decode pieces in this process and up to ``processes - 1`` workers. Yield results in order. A
    worker that dies only makes decoding slower."""
    workers = processes - 1 if os.name == "posix" else 0
    if not workers:
        yield from map(decode_piece, pieces)
        return
    waiting: deque[tuple[bytes, Future[bytes] | Piece]] = deque()
    dead_workers = 0

    def decode_answer(piece: bytes, answer: Future[bytes] | Piece) -> Piece:
        nonlocal dead_workers
        if isinstance(answer, Piece):
            return answer
        try:
            return _decoder.decode(answer.result())
        except (WorkerDied, msgspec.DecodeError):
            dead_workers += 1
            return decode_piece(piece)

    with ProcessPool(workers, depth=MAX_PIECES_AHEAD) as pool:
        for piece in pieces:
            busy = sum(
                isinstance(answer_or_future, Future) and not answer_or_future.done()
                for _, answer_or_future in waiting
            )
            if dead_workers < workers and busy < workers * MAX_PIECES_AHEAD:
                waiting.append((piece, pool.submit(decode_in_worker, piece)))
            else:
                waiting.append((b"", decode_piece(piece)))
            while waiting and (not isinstance(waiting[0][1], Future) or waiting[0][1].done()):
                yield decode_answer(*waiting.popleft())
        while waiting:
            yield decode_answer(*waiting.popleft())
