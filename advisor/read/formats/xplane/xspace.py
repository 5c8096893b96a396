"""Reader of XSpace, the profile of TensorFlow, JAX and PyTorch/XLA: planes, lines and events.

A space has planes (a host's threads, a device), a plane has lines (a thread, a stream), and a line
has events. Names of events and of their values ("stats") are stored once per plane and referenced
by number (``tsl/profiler/protobuf/xplane.proto``, whose field numbers are the constants here)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.read.event_columns import NAME_LIMIT
from advisor.read.protobuf import (
    BYTES,
    FIXED64,
    VARINT,
    Buffer,
    Fields,
    MalformedMessage,
    iterate_fields,
    split_messages,
    varint,
)
from advisor.read.reader import EVENT_BYTES, memory_budget

_MAX_EVENTS = 30_000_000
"""Maximum number of events of one file. Further lines are counted only. Profilers keep fewer."""
MAX_PLANES, _MAX_LINES = 4_096, 100_000
"""Maximum number of planes (hosts and devices) and lines (threads and streams) of one file."""
CHUNK = 250_000
"""Number of events decoded at a time, which bounds the temporary memory."""

_PLANES = 1
_NAME, _LINES, _EVENTS_META, _STATS_META, _PLANE_STATS = 2, 3, 4, 5, 6
_LINE_ID, _LINE_NAME, _LINE_TIME, _LINE_EVENTS, _DISPLAY_NAME = 1, 2, 3, 4, 11
_KEY, _VALUE = 1, 2
_META_NAME, _META_DISPLAY = 2, 4
_EVENT_META, _OFFSET, _DURATION, _EVENT_STATS = 1, 2, 3, 4
_STAT_META, _DOUBLE, _UNSIGNED, _SIGNED, _STRING, _REFERENCE = 1, 2, 3, 4, 5, 7


@dataclass
class Events:
    """Events of one plane, line by line, without events that have no name."""

    line: Ints
    """Index of the event's line in the plane."""
    meta: Ints
    """Number of the event's name."""
    ts: Ints
    """Start in ns on the clock of the file."""
    dur: Ints
    """Duration in ns."""
    numbers: dict[str, tuple[Ints, Ints]] = field(default_factory=dict)
    """Rows and values of the requested stats with integers."""
    texts: dict[str, tuple[Ints, list[str]]] = field(default_factory=dict)
    """Rows and values of the requested stats with texts."""

    def number(self, name: str, missing: int = -1) -> Ints:
        result = np.full(len(self.ts), missing, dtype=np.int64)
        if name in self.numbers:
            rows, values = self.numbers[name]
            result[rows] = values
        return result

    def has_stat(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the events that have this stat."""
        result = np.zeros(len(self.ts), dtype=bool)
        for stats_by_name in (self.numbers, self.texts):
            if name in stats_by_name:
                result[stats_by_name[name][0]] = True
        return result


@dataclass
class XLine:
    """Line of a plane: a thread, a stream, or events derived from these."""

    id: int
    name: str


@dataclass
class Plane:
    """Plane of a host or device. :meth:`XSpace.read` reads its lines."""

    name: str
    names: dict[int, str]
    """Names of events by number."""
    display_names: dict[int, str]
    """Display names of events by number, for events that have one."""
    stat_names: dict[int, str]
    stats: dict[str, int | float | str]
    spans: list[tuple[int, int]] = field(repr=False)


class XSpace:
    """Decoded file. ``data`` ends with ``protobuf.PADDING`` zero bytes after its ``size``."""

    def __init__(self, data: bytes | bytearray, size: int) -> None:
        self._buffer = Buffer(data)
        self._events_left = min(_MAX_EVENTS, memory_budget() // EVENT_BYTES)
        """Number of events that may still be read."""
        self._lines = 0
        self.broken = 0
        """Number of messages that could not be read completely."""
        self.left_out = 0
        """Number of events, lines and planes beyond the limits."""
        self.nameless = 0
        """Number of events without a known name."""
        starts, ends, others, sound = split_messages(data, 0, size, _PLANES)
        self.truncated = not sound
        spans = list(zip(starts, ends, strict=True))
        self.left_out += max(len(spans) - MAX_PLANES, 0)
        self.planes = [self._read_plane(*span) for span in spans[:MAX_PLANES]]
        last = max([*ends, *(other.end for other in others), 0])
        if not sound and (cut := _find_cut_off(data, last, size, _PLANES)):
            self.planes.append(self._read_plane(*cut))

    def _read_plane(self, start: int, end: int) -> Plane:
        buffer = self._buffer
        starts, ends, others, sound = split_messages(buffer.data, start, end, _LINES)
        spans = [span for span in zip(starts, ends, strict=True) if span[0] < span[1]]
        self.broken += not sound
        if not sound:  # read the beginning of a line that was cut off
            last = max([*ends, *(other.end for other in others), start])
            if cut := _find_cut_off(buffer.data, last, end, _LINES):
                spans.append(cut)
        name = ""
        maps: dict[int, list[tuple[int, int]]] = {
            _EVENTS_META: [],
            _STATS_META: [],
            _PLANE_STATS: [],
        }
        for other in others:
            if other.wire != BYTES:
                continue
            if other.number == _NAME:
                name = buffer.text(other.start, other.end)[:NAME_LIMIT]
            elif other.number in maps:
                maps[other.number].append((other.start, other.end))
        names, display_names = self._read_names(maps[_EVENTS_META])
        stat_names, _ = self._read_names(maps[_STATS_META])
        plane = Plane(name, names, display_names, stat_names, {}, spans)
        for owner, stat in self._iterate_stats(maps[_PLANE_STATS], plane):
            plane.stats[owner] = stat
        return plane

    def _read_names(self, entries: list[tuple[int, int]]) -> tuple[dict[int, str], dict[int, str]]:
        """Return the names and display names of a map's entries, by key."""
        both = np.array(entries, dtype=np.int64).reshape(-1, 2)
        start, end = both[:, 0], both[:, 1]
        outer = self._read_fields(start, end)
        keys = outer.column(_KEY, len(start))
        value = outer.select(_VALUE, BYTES)
        inner = self._read_inner_fields(value)
        values: list[dict[int, str]] = []
        for number in (_META_NAME, _META_DISPLAY):
            text = inner.select(number, BYTES)
            text_starts = text.start.tolist()
            stop = (text.start + np.minimum(text.value.astype(np.int64), NAME_LIMIT)).tolist()
            key = keys[value.row[text.row]].tolist()
            values.append(
                {
                    k: self._buffer.text(a, b)
                    for k, a, b in zip(key, text_starts, stop, strict=True)
                    if b > a
                }
            )
        return values[0], values[1]

    def _read_fields(self, start: Ints, end: Ints) -> Fields:
        """Return the fields of messages, counting damaged ones."""
        result, broken = self._buffer.fields(start, end)
        self.broken += broken
        return result

    def _read_inner_fields(self, messages: Fields) -> Fields:
        return self._read_fields(messages.start, messages.start + messages.value.astype(np.int64))

    def _iterate_stats(
        self, entries: list[tuple[int, int]], plane: Plane
    ) -> Iterator[tuple[str, int | float | str]]:
        """Yield the name and value of a plane's own stats."""
        for start, end in entries:
            name: str | None = None
            value: int | float | str | None = None
            try:
                for item in iterate_fields(self._buffer.data, start, end):
                    if item.number == _STAT_META:
                        name = plane.stat_names.get(_to_signed(item.value))
                    elif item.number == _DOUBLE and item.wire == FIXED64:
                        value = struct.unpack("<d", struct.pack("<Q", item.value))[0]
                    elif item.number in (_UNSIGNED, _SIGNED) and item.wire == VARINT:
                        value = item.value if item.number == _UNSIGNED else _to_signed(item.value)
                    elif item.number == _STRING and item.wire == BYTES:
                        value = self._buffer.text(
                            item.start, min(item.end, item.start + NAME_LIMIT)
                        )
                    elif item.number == _REFERENCE:
                        value = plane.stat_names.get(_to_signed(item.value))
            except MalformedMessage:
                self.broken += 1
            if name is not None and value is not None:
                yield name, value

    def read(self, plane: Plane, wanted: frozenset[str]) -> tuple[list[XLine], Events]:
        """Return the lines of a plane, and their events with the requested stats."""
        ids = {number: name for number, name in plane.stat_names.items() if name in wanted}
        lines_left = _MAX_LINES - self._lines
        self.left_out += max(len(plane.spans) - lines_left, 0)
        lines: list[XLine] = []
        bases: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        counts: list[int] = []
        for span in plane.spans[:lines_left]:
            line, base_ns, event_starts, event_ends = self._read_line(*span)
            lines.append(line)
            bases.append(base_ns)
            counts.append(len(event_starts))
            starts += event_starts
            ends += event_ends
        self._lines += len(lines)
        line_of_event = np.repeat(np.arange(len(lines)), counts)
        base_of = np.array(bases, dtype=np.int64)
        begin_at, end_at = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        del starts, ends
        parts = []
        for i in range(0, max(len(line_of_event), 1), CHUNK):
            part = slice(i, i + CHUNK)
            parts.append(
                self._read_events(
                    begin_at[part], end_at[part], line_of_event[part], base_of, plane, ids
                )
            )
        return lines, _join_events(parts)

    def _read_line(self, start: int, end: int) -> tuple[XLine, int, list[int], list[int]]:
        """Return a line, its start in ns, and the offsets where its events begin and end."""
        starts, ends, others, sound = split_messages(self._buffer.data, start, end, _LINE_EVENTS)
        self.broken += not sound
        values: dict[int, int] = {}
        texts: dict[int, str] = {}
        for other in others:
            if other.wire == VARINT:
                values[other.number] = _to_signed(other.value)
            elif other.wire == BYTES and other.number in (_LINE_NAME, _DISPLAY_NAME):
                stop = min(other.end, other.start + NAME_LIMIT)
                texts[other.number] = self._buffer.text(other.start, stop)
        events_left = self._events_left
        self._events_left -= min(len(starts), events_left)
        self.left_out += max(len(starts) - events_left, 0)
        base_ns = values.get(_LINE_TIME, 0)
        name = texts.get(_DISPLAY_NAME) or texts.get(_LINE_NAME, "")
        line = XLine(values.get(_LINE_ID, 0), name)
        return (
            line,
            base_ns if abs(base_ns) < 1 << 61 else 0,
            starts[:events_left],
            ends[:events_left],
        )

    def _read_events(
        self,
        start: Ints,
        end: Ints,
        line_of_event: Ints,
        bases: Ints,
        plane: Plane,
        ids: dict[int, str],
    ) -> Events:
        result = self._read_fields(start, end)
        meta, offset, duration = (
            result.column(number, len(start)) for number in (_EVENT_META, _OFFSET, _DURATION)
        )
        has_name = np.isin(meta, np.fromiter(plane.names, np.int64, len(plane.names)))
        self.nameless += int((~has_name).sum())
        event_index = np.cumsum(has_name) - 1
        base_ns = bases[line_of_event]
        start_ns = base_ns + offset // 1000
        is_valid = np.abs(duration) < 1 << 62
        end_ns = base_ns + (offset + np.where(is_valid, duration, 0)) // 1000
        length = np.where(is_valid, end_ns - start_ns, -1)
        events = Events(
            line_of_event[has_name], meta[has_name], start_ns[has_name], length[has_name]
        )
        if ids:
            stats = result.select(_EVENT_STATS, BYTES)
            stats = stats.take(np.flatnonzero(has_name[stats.row]))
            self._add_event_stats(stats, event_index[stats.row], plane, ids, events)
        return events

    def _add_event_stats(
        self, stats: Fields, row: Ints, plane: Plane, ids: dict[int, str], events: Events
    ) -> None:
        """Add the stats of events. ``row``: the event of each stat."""
        wanted_ids = np.fromiter(ids, np.int64, len(ids))
        # the name nearly always comes first, so most stats need not be decoded further
        first, _, _ = self._buffer.numbers(stats.start + 1)
        keep = (self._buffer.bytes[stats.start] != _STAT_META << 3) | np.isin(first, wanted_ids)
        stats, row = stats.take(np.flatnonzero(keep)), row[keep]
        result = self._read_inner_fields(stats)
        stat_of_field = result.column(_STAT_META, len(row))[result.row]
        for number, name in ids.items():
            stat_fields = result.take(
                np.flatnonzero((stat_of_field == number) & (result.number > _STAT_META))
            )
            if not len(stat_fields.row):
                continue
            is_integer = np.isin(stat_fields.number, (_UNSIGNED, _SIGNED)) & (
                stat_fields.wire == VARINT
            )
            if is_integer.any():
                events.numbers[name] = _append_stat(
                    events.numbers.get(name), row[stat_fields.row[is_integer]],
                    stat_fields.value[is_integer].astype(np.int64),
                )  # fmt: skip
            texts = self._read_texts(stat_fields, plane)
            index = [position for position, text in enumerate(texts) if text is not None]
            if index:
                values = [text for text in texts if text is not None]
                rows = row[stat_fields.row[index]]
                if name in events.texts:
                    previous_rows, previous_values = events.texts[name]
                    rows, values = np.concatenate([previous_rows, rows]), previous_values + values
                events.texts[name] = rows, values

    def _read_texts(self, stat_fields: Fields, plane: Plane) -> list[str | None]:
        """Return texts of stats, given or referenced. Each distinct one is decoded once."""
        data, decoded = self._buffer.data, {}
        values: list[str | None] = []
        for number, wire, value, start in zip(
            stat_fields.number.tolist(), stat_fields.wire.tolist(), stat_fields.value.tolist(),
            stat_fields.start.tolist(), strict=True,
        ):  # fmt: skip
            if number == _REFERENCE and wire == VARINT:
                values.append(plane.stat_names.get(value))
            elif number == _STRING and wire == BYTES:
                raw = bytes(data[start : start + min(value, NAME_LIMIT)])
                if raw not in decoded:
                    decoded[raw] = raw.decode("utf-8", "replace")
                values.append(decoded[raw])
            else:
                values.append(None)
        return values


def _find_cut_off(
    data: bytes | bytearray, offset: int, end: int, number: int
) -> tuple[int, int] | None:
    """Return the span of a repeated field's message that is cut off, or ``None`` if there is
    none."""
    try:
        key, offset = varint(data, offset, end)
        if key != number << 3 | BYTES:
            return None
        _, offset = varint(data, offset, end)
    except MalformedMessage:
        return None
    return (offset, end) if offset < end else None


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _append_stat(
    earlier_stat: tuple[Ints, Ints] | None, rows: Ints, values: Ints
) -> tuple[Ints, Ints]:
    if earlier_stat is None:
        return rows, values
    return np.concatenate([earlier_stat[0], rows]), np.concatenate([earlier_stat[1], values])


def _join_events(parts: list[Events]) -> Events:
    if len(parts) == 1:
        return parts[0]
    joined = Events(
        np.concatenate([part.line for part in parts]),
        np.concatenate([part.meta for part in parts]),
        np.concatenate([part.ts for part in parts]),
        np.concatenate([part.dur for part in parts]),
    )
    offset = 0
    for part in parts:
        for name, (rows, values) in part.numbers.items():
            joined.numbers[name] = _append_stat(joined.numbers.get(name), rows + offset, values)
        for name, (rows, texts) in part.texts.items():
            previous_rows, previous_texts = joined.texts.get(
                name, (np.zeros(0, dtype=np.int64), [])
            )
            joined.texts[name] = (
                np.concatenate([previous_rows, rows + offset]),
                previous_texts + texts,
            )
        offset += len(part.ts)
    return joined
