"""Decoder of Protocol Buffers' wire format, a column at a time.

A message is a run of fields, each a key (number and wire type) and a value, and its fields may come
in any order. Messages that enclose others are walked field by field; of very many small messages
the first fields are decoded together, then the second ones, and so on, so that the work is done by
a few operations on whole columns (https://protobuf.dev/programming-guides/encoding).

The protobuf library was tried (7.36, BSD licence): of 57 MB with 460,000 events it holds 340 MB,
this 20 MB; it takes half as long; and of a file that is cut off it reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Ints

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_FIELDS = 512
"""Most fields of one small message; what profilers write has a tenth of that."""
PADDING = 16
"""Number of zero bytes that must follow the messages in their buffer."""

_WORD = np.dtype("<u8")
Words = NDArray[np.uint64]


class MalformedMessage(Exception):
    """Error for bytes that are no message."""


class Field(NamedTuple):
    """Field of a message. ``value``: of a number; ``start`` and ``end``: of bytes."""

    number: int
    wire: int
    value: int
    start: int
    end: int


class Fields(NamedTuple):
    """Fields of many messages, in aligned columns; those of one message in order."""

    row: Ints
    """Index of the message."""
    number: NDArray[np.int32]
    wire: NDArray[np.uint8]
    value: Words
    """Bits of a number, or length of bytes."""
    start: Ints
    """Offset of the first byte."""

    def take(self, chosen: NDArray[Any]) -> Fields:
        return Fields(*(column[chosen] for column in self))

    def select(self, number: int, wire: int) -> Fields:
        return self.take(np.flatnonzero((self.number == number) & (self.wire == wire)))

    def column(self, number: int, messages: int) -> Ints:
        """Return a number field's value in each message; 0 if it has none."""
        found = self.select(number, VARINT)
        result = np.zeros(messages, dtype=np.int64)
        result[found.row] = found.value.astype(np.int64)
        return result


def varint(data: bytes | bytearray, at: int, end: int) -> tuple[int, int]:
    """Return a varint and the offset after it. Raises MalformedMessage."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise MalformedMessage


def iterate_fields(data: bytes | bytearray, at: int, end: int) -> Iterator[Field]:
    """Yield the fields of one message, in order. Raises MalformedMessage where it is damaged."""
    while at < end:
        key, at = varint(data, at, end)
        wire = key & 7
        value, start = 0, at
        if wire == VARINT:
            value, at = varint(data, at, end)
        elif wire == BYTES:
            value, start = varint(data, at, end)
            at = start + value
        elif wire in (FIXED64, FIXED32):
            at += 8 if wire == FIXED64 else 4
            value = int.from_bytes(data[start:at], "little")
        else:
            raise MalformedMessage
        if at > end or key < 8:
            raise MalformedMessage
        yield Field(key >> 3, wire, value, start, at)


def split_messages(
    data: bytes | bytearray, at: int, end: int, number: int
) -> tuple[list[int], list[int], list[Field], bool]:
    """Return starts and ends of the messages in one repeated field, the other fields, and whether
    all were sound. A loop, because one's end tells where the next begins."""
    starts: list[int] = []
    ends: list[int] = []
    others: list[Field] = []
    key = number << 3 | BYTES
    last = end - 1
    try:
        while at < end:
            if data[at] == key and at < last:
                size = data[at + 1]
                start = at + 2
                if size >= 0x80 and start < end and data[start] < 0x80:
                    size = size & 0x7F | data[start] << 7
                    start += 1
                if size < 0x80 or start == at + 3:
                    at = start + size
                    if at > end:
                        return starts, ends, others, False
                    starts.append(start)
                    ends.append(at)
                    continue
            item = next(iterate_fields(data, at, end))
            at = item.end
            if item.number == number and item.wire == BYTES:
                starts.append(item.start)
                ends.append(item.end)
            else:
                others.append(item)
    except MalformedMessage:
        return starts, ends, others, False
    return starts, ends, others, True


class Buffer:
    """Buffer of bytes with its columns. ``data`` must end with PADDING zero bytes."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.bytes: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        count = max(len(data) - 7, 0)
        # each position as the eight bytes from there on
        self.words: Words = np.ndarray((count,), _WORD, data, 0, (1,))

    def numbers(self, at: Ints) -> tuple[Words, Ints, NDArray[np.bool_]]:
        """Return the varints at the positions: value, length, and validity (within ten bytes)."""
        word = self.words[at]
        stops = ~word & np.uint64(0x8080808080808080)
        low = stops & (np.uint64(0) - stops)
        below = low - np.uint64(1)
        length = (np.bitwise_count(below).astype(np.int64) + 1) >> 3
        word &= (low | below) & np.uint64(0x7F7F7F7F7F7F7F7F)
        value = _packed(word)
        sound = np.ones(len(at), dtype=bool)
        long = np.flatnonzero(stops == 0)
        if len(long):
            ninth = self.bytes[at[long] + 8].astype(np.uint64)
            tenth = self.bytes[at[long] + 9].astype(np.uint64)
            more = ninth >= 0x80
            value[long] |= (ninth & np.uint64(0x7F)) << np.uint64(56)
            value[long[more]] |= (tenth[more] & np.uint64(1)) << np.uint64(63)
            length[long] = np.where(more, 10, 9)
            sound[long] = ~more | (tenth < 0x80)
        return value, length, sound

    def fields(self, start: Ints, end: Ints) -> tuple[Fields, int]:
        """Return all fields of the messages in [start, end), and the number of damaged messages."""
        parts: list[Fields] = []
        row = np.flatnonzero(end > start)
        index, stop = start[row], end[row]
        broken = 0
        for _ in range(MAX_FIELDS):
            if not len(row):
                break
            key = self.bytes[index].astype(np.uint64)
            step = np.ones(len(index), dtype=np.int64)
            sound = np.ones(len(index), dtype=bool)
            wide = np.flatnonzero(key >= 0x80)
            if len(wide):
                key[wide], step[wide], sound[wide] = self.numbers(index[wide])
            index = index + step
            wire = (key & np.uint64(7)).astype(np.uint8)
            sound &= (key >= 8) & (key < 1 << 32) & (index < stop)
            value, begin, after, fine = self._values(np.minimum(index, stop), wire)
            sound &= fine & (after <= stop)
            if not sound.all():
                broken += int((~sound).sum())
                row, stop, key, wire = row[sound], stop[sound], key[sound], wire[sound]
                value, begin, after = value[sound], begin[sound], after[sound]
            parts.append(Fields(row, (key >> np.uint64(3)).astype(np.int32), wire, value, begin))
            going = after < stop
            row, index, stop = row[going], after[going], stop[going]
        broken += len(row)
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return Fields(none, none.astype(np.int32), none.astype(np.uint8),
                          none.astype(np.uint64), none), broken  # fmt: skip
        return Fields(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), broken

    def _values(
        self, index: Ints, wire: NDArray[np.uint8]
    ) -> tuple[Words, Ints, Ints, NDArray[np.bool_]]:
        """Return value, first byte, end and validity of the values at the positions."""
        value, length, fine = self.numbers(index)
        begin = index + length
        after = begin
        if wire.any():
            fixed = (wire == FIXED64) | (wire == FIXED32)
            if fixed.any():
                word = self.words[index]
                word = np.where(wire == FIXED32, word & np.uint64(0xFFFFFFFF), word)
                value = np.where(fixed, word, value)
                begin = np.where(fixed, index, begin)
                after = np.where(fixed, index + np.where(wire == FIXED64, 8, 4), after)
                fine = fine | fixed
            packed = wire == BYTES
            small = value < len(self.data)
            after = np.where(packed & small, begin + value.astype(np.int64), after)
            fine = fine & (small | ~packed) & (fixed | packed | (wire == VARINT))
        return value, begin, after, fine

    def text(self, start: int, end: int) -> str:
        """Return bytes as text; invalid UTF-8 is replaced."""
        return self.data[start:end].decode("utf-8", "replace")


def _packed(word: Words) -> Words:
    """Join eight groups of seven bits, one in each byte, to one number."""
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    ):
        word = (word & np.uint64(low)) | ((word & np.uint64(high)) >> np.uint64(shift))
    return word
