"""Reader of XSpace, TensorFlow's, JAX's and PyTorch/XLA's profile: planes, lines and events.

A space holds planes (a host's threads, a device), a plane lines (a thread, a stream), and those
events. Names of events and of their values ("stats") stand once a plane and are referred to by
number (``tsl/profiler/protobuf/xplane.proto``, whose field numbers are the constants here)."""

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

MAX_EVENTS = 30_000_000
"""Most events of one file; beyond, lines are left out and counted. A profiler keeps fewer."""
MAX_PLANES, MAX_LINES = 4_096, 100_000
"""Most planes (hosts and devices) and lines (threads and streams) of one file."""
CHUNK = 250_000
"""Events decoded at once: what is kept besides the columns is of these."""

_PLANES = 1
_NAME, _LINES, _EVENTS_META, _STATS_META, _PLANE_STATS = 2, 3, 4, 5, 6
_LINE_ID, _LINE_NAME, _LINE_TIME, _LINE_EVENTS, _DISPLAY_NAME = 1, 2, 3, 4, 11
_KEY, _VALUE = 1, 2
_META_NAME, _META_DISPLAY = 2, 4
_EVENT_META, _OFFSET, _DURATION, _EVENT_STATS = 1, 2, 3, 4
_STAT_META, _DOUBLE, _UNSIGNED, _SIGNED, _STRING, _REFERENCE = 1, 2, 3, 4, 5, 7


@dataclass
class Events:
    """Events of one plane, line by line, without nameless ones."""

    line: Ints
    """Index of the event's line in the plane."""
    meta: Ints
    """Number of the event's name."""
    ts: Ints
    """Start, ns, on the clock of the file."""
    dur: Ints
    """Duration, ns."""
    numbers: dict[str, tuple[Ints, Ints]] = field(default_factory=dict)
    """Rows and values of the wanted stats with an integer."""
    texts: dict[str, tuple[Ints, list[str]]] = field(default_factory=dict)
    """Rows and values of the wanted stats with a text."""

    def number(self, name: str, missing: int = -1) -> Ints:
        result = np.full(len(self.ts), missing, dtype=np.int64)
        if name in self.numbers:
            rows, values = self.numbers[name]
            result[rows] = values
        return result

    def has_stat(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the events that have this stat."""
        result = np.zeros(len(self.ts), dtype=bool)
        for kept in (self.numbers, self.texts):
            if name in kept:
                result[kept[name][0]] = True
        return result


@dataclass
class XLine:
    """Line of a plane: a thread, a stream, or something derived from them."""

    id: int
    name: str


@dataclass
class Plane:
    """Plane of a host or device. :meth:`XSpace.read` reads its lines."""

    name: str
    names: dict[int, str]
    """Names of events by number."""
    shown: dict[int, str]
    """Display names of events by number, if they have one."""
    stat_names: dict[int, str]
    stats: dict[str, int | float | str]
    spans: list[tuple[int, int]] = field(repr=False)


class XSpace:
    """Decoded file. ``data`` ends with ``protobuf.PADDING`` zero bytes beyond its ``size``."""

    def __init__(self, data: bytes | bytearray, size: int) -> None:
        self._buffer = Buffer(data)
        self._room = min(MAX_EVENTS, memory_budget() // EVENT_BYTES)
        """Number of events that may still be read."""
        self._lines = 0
        self.broken = 0
        """Number of messages that could not be read completely."""
        self.left_out = 0
        """Number of events, lines and planes beyond the limits."""
        self.nameless = 0
        """Number of events that refer to no name."""
        starts, ends, others, sound = split_messages(data, 0, size, _PLANES)
        self.truncated = not sound
        spans = list(zip(starts, ends, strict=True))
        self.left_out += max(len(spans) - MAX_PLANES, 0)
        self.planes = [self._plane(*span) for span in spans[:MAX_PLANES]]
        last = max([*ends, *(other.end for other in others), 0])
        if not sound and (cut := _cut_off(data, last, size, _PLANES)):
            self.planes.append(self._plane(*cut))

    def _plane(self, start: int, end: int) -> Plane:
        buffer = self._buffer
        starts, ends, others, sound = split_messages(buffer.data, start, end, _LINES)
        spans = [span for span in zip(starts, ends, strict=True) if span[0] < span[1]]
        self.broken += not sound
        if not sound:  # what is left of a line that was cut off
            last = max([*ends, *(other.end for other in others), start])
            if cut := _cut_off(buffer.data, last, end, _LINES):
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
        names, shown = self._names(maps[_EVENTS_META])
        stat_names, _ = self._names(maps[_STATS_META])
        plane = Plane(name, names, shown, stat_names, {}, spans)
        for owner, stat in self._stats(maps[_PLANE_STATS], plane):
            plane.stats[owner] = stat
        return plane

    def _names(self, entries: list[tuple[int, int]]) -> tuple[dict[int, str], dict[int, str]]:
        """Return names and display names of a map's entries, by key."""
        start, end = _pair(entries)
        outer = self._fields(start, end)
        keys = outer.column(_KEY, len(start))
        value = outer.select(_VALUE, BYTES)
        inner = self._inside(value)
        values: list[dict[int, str]] = []
        for number in (_META_NAME, _META_DISPLAY):
            text = inner.select(number, BYTES)
            at = text.start.tolist()
            stop = (text.start + np.minimum(text.value.astype(np.int64), NAME_LIMIT)).tolist()
            key = keys[value.row[text.row]].tolist()
            values.append(
                {k: self._buffer.text(a, b) for k, a, b in zip(key, at, stop, strict=True) if b > a}
            )
        return values[0], values[1]

    def _fields(self, start: Ints, end: Ints) -> Fields:
        """Return the fields of messages; damaged ones are counted."""
        result, broken = self._buffer.fields(start, end)
        self.broken += broken
        return result

    def _inside(self, messages: Fields) -> Fields:
        return self._fields(messages.start, messages.start + messages.value.astype(np.int64))

    def _stats(
        self, entries: list[tuple[int, int]], plane: Plane
    ) -> Iterator[tuple[str, int | float | str]]:
        """Yield name and value of a plane's own stats."""
        for start, end in entries:
            name: str | None = None
            value: int | float | str | None = None
            try:
                for item in iterate_fields(self._buffer.data, start, end):
                    if item.number == _STAT_META:
                        name = plane.stat_names.get(_signed(item.value))
                    elif item.number == _DOUBLE and item.wire == FIXED64:
                        value = struct.unpack("<d", struct.pack("<Q", item.value))[0]
                    elif item.number in (_UNSIGNED, _SIGNED) and item.wire == VARINT:
                        value = item.value if item.number == _UNSIGNED else _signed(item.value)
                    elif item.number == _STRING and item.wire == BYTES:
                        value = self._buffer.text(
                            item.start, min(item.end, item.start + NAME_LIMIT)
                        )
                    elif item.number == _REFERENCE:
                        value = plane.stat_names.get(_signed(item.value))
            except MalformedMessage:
                self.broken += 1
            if name is not None and value is not None:
                yield name, value

    def read(self, plane: Plane, wanted: frozenset[str]) -> tuple[list[XLine], Events]:
        """Return the lines of a plane, and their events with the wanted stats."""
        ids = {number: name for number, name in plane.stat_names.items() if name in wanted}
        room = MAX_LINES - self._lines
        self.left_out += max(len(plane.spans) - room, 0)
        lines: list[XLine] = []
        bases: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        counts: list[int] = []
        for span in plane.spans[:room]:
            line, base, begin, finish = self._line(*span)
            lines.append(line)
            bases.append(base)
            counts.append(len(begin))
            starts += begin
            ends += finish
        self._lines += len(lines)
        owner = np.repeat(np.arange(len(lines)), counts)
        base_of = np.array(bases, dtype=np.int64)
        begin_at, end_at = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        del starts, ends
        parts = []
        for i in range(0, max(len(owner), 1), CHUNK):
            part = slice(i, i + CHUNK)
            parts.append(
                self._events(begin_at[part], end_at[part], owner[part], base_of, plane, ids)
            )
        return lines, _joined(parts)

    def _line(self, start: int, end: int) -> tuple[XLine, int, list[int], list[int]]:
        """Return a line, its start in ns, and where its events begin and end."""
        starts, ends, others, sound = split_messages(self._buffer.data, start, end, _LINE_EVENTS)
        self.broken += not sound
        values: dict[int, int] = {}
        texts: dict[int, str] = {}
        for other in others:
            if other.wire == VARINT:
                values[other.number] = _signed(other.value)
            elif other.wire == BYTES and other.number in (_LINE_NAME, _DISPLAY_NAME):
                stop = min(other.end, other.start + NAME_LIMIT)
                texts[other.number] = self._buffer.text(other.start, stop)
        room = self._room
        self._room -= min(len(starts), room)
        self.left_out += max(len(starts) - room, 0)
        base = values.get(_LINE_TIME, 0)
        name = texts.get(_DISPLAY_NAME) or texts.get(_LINE_NAME, "")
        line = XLine(values.get(_LINE_ID, 0), name)
        return line, base if abs(base) < 1 << 61 else 0, starts[:room], ends[:room]

    def _events(
        self, start: Ints, end: Ints, owner: Ints, bases: Ints, plane: Plane, ids: dict[int, str]
    ) -> Events:
        result = self._fields(start, end)
        meta, offset, duration = (
            result.column(number, len(start)) for number in (_EVENT_META, _OFFSET, _DURATION)
        )
        known = np.isin(meta, np.fromiter(plane.names, np.int64, len(plane.names)))
        self.nameless += int((~known).sum())
        place = np.cumsum(known) - 1
        base = bases[owner]
        begin = base + offset // 1000
        sane = np.abs(duration) < 1 << 62
        finish = base + (offset + np.where(sane, duration, 0)) // 1000
        length = np.where(sane, finish - begin, -1)
        events = Events(owner[known], meta[known], begin[known], length[known])
        if ids:
            stats = result.select(_EVENT_STATS, BYTES)
            stats = stats.take(np.flatnonzero(known[stats.row]))
            self._event_stats(stats, place[stats.row], plane, ids, events)
        return events

    def _event_stats(
        self, stats: Fields, row: Ints, plane: Plane, ids: dict[int, str], events: Events
    ) -> None:
        """Fill in the stats of events; ``row``: the event of each."""
        wanted = np.fromiter(ids, np.int64, len(ids))
        # nearly always the name comes first: most stats need not be looked at any further
        first, _, _ = self._buffer.numbers(stats.start + 1)
        keep = (self._buffer.bytes[stats.start] != _STAT_META << 3) | np.isin(first, wanted)
        stats, row = stats.take(np.flatnonzero(keep)), row[keep]
        result = self._inside(stats)
        of_field = result.column(_STAT_META, len(row))[result.row]
        for number, name in ids.items():
            own = result.take(np.flatnonzero((of_field == number) & (result.number > _STAT_META)))
            if not len(own.row):
                continue
            whole = np.isin(own.number, (_UNSIGNED, _SIGNED)) & (own.wire == VARINT)
            if whole.any():
                events.numbers[name] = _appended(
                    events.numbers.get(name), row[own.row[whole]],
                    own.value[whole].astype(np.int64),
                )  # fmt: skip
            texts = self._texts(own, plane)
            index = [place for place, text in enumerate(texts) if text is not None]
            if index:
                values = [text for text in texts if text is not None]
                rows = row[own.row[index]]
                if name in events.texts:
                    before, earlier = events.texts[name]
                    rows, values = np.concatenate([before, rows]), earlier + values
                events.texts[name] = rows, values

    def _texts(self, own: Fields, plane: Plane) -> list[str | None]:
        """Return texts of stats, given or referred to; each distinct one is decoded once."""
        data, seen = self._buffer.data, {}
        values: list[str | None] = []
        for number, wire, value, start in zip(
            own.number.tolist(), own.wire.tolist(), own.value.tolist(), own.start.tolist(),
            strict=True,
        ):  # fmt: skip
            if number == _REFERENCE and wire == VARINT:
                values.append(plane.stat_names.get(value))
            elif number == _STRING and wire == BYTES:
                raw = bytes(data[start : start + min(value, NAME_LIMIT)])
                if raw not in seen:
                    seen[raw] = raw.decode("utf-8", "replace")
                values.append(seen[raw])
            else:
                values.append(None)
        return values


def _cut_off(data: bytes | bytearray, at: int, end: int, number: int) -> tuple[int, int] | None:
    """Return the span of a repeated field's message that is cut off; ``None`` if there is none."""
    try:
        key, at = varint(data, at, end)
        if key != number << 3 | BYTES:
            return None
        _, at = varint(data, at, end)
    except MalformedMessage:
        return None
    return (at, end) if at < end else None


def _pair(spans: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    both = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _appended(before: tuple[Ints, Ints] | None, rows: Ints, values: Ints) -> tuple[Ints, Ints]:
    if before is None:
        return rows, values
    return np.concatenate([before[0], rows]), np.concatenate([before[1], values])


def _joined(parts: list[Events]) -> Events:
    if len(parts) == 1:
        return parts[0]
    whole = Events(
        np.concatenate([part.line for part in parts]),
        np.concatenate([part.meta for part in parts]),
        np.concatenate([part.ts for part in parts]),
        np.concatenate([part.dur for part in parts]),
    )
    offset = 0
    for part in parts:
        for name, (rows, values) in part.numbers.items():
            whole.numbers[name] = _appended(whole.numbers.get(name), rows + offset, values)
        for name, (rows, texts) in part.texts.items():
            before, earlier = whole.texts.get(name, (np.zeros(0, dtype=np.int64), []))
            whole.texts[name] = np.concatenate([before, rows + offset]), earlier + texts
        offset += len(part.ts)
    return whole
