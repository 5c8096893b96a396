"""A stream of JSON cut between events, into pieces that can be decoded independently.

Two ways to find the cuts. The fast one looks backwards for ``}, {"ph"`` and trusts it; a cut
inside a string or a nested list leaves both pieces unbalanced, so a wrong one cannot go
unnoticed. The exact one follows quotes and brackets over the whole text; it is used when the
fast one was caught out, and to find the events of a piece that does not decode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from advisor.errors import AdvisorError
from advisor.ingest.source import Source

PIECE = 12 << 20
"""Bytes of JSON decoded at once. Larger pieces save nothing and cost memory."""
HEAD_LIMIT = 64 << 20
"""Bytes before ``traceEvents`` that are searched for it."""

_KEY = rb'"(?:ph|name|cat|args|id|pid|tid|ts|dur|bp|s)"'
_BOUNDARY = re.compile(rb"\}(\s*),(\s*)\{\s*" + _KEY)
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACE = b" \t\r\n"


@dataclass
class Splitter:
    """Cuts the ``traceEvents`` list of a source into pieces, each the inside of a JSON list."""

    source: Source
    exact: bool = False
    piece_bytes: int = PIECE
    head: dict[str, Any] = field(default_factory=dict)
    """The file's other top-level keys, complete once :meth:`pieces` is exhausted."""
    truncated: bool = False
    bare_list: bool = False
    cut_events: int = 0
    """Events lost at the cut of a truncated file (0 or 1)."""

    def pieces(self) -> Iterator[bytes]:
        """Yield pieces. Raises AdvisorError when there is no list of events at all."""
        blocks = self.source.blocks()
        buffer = self._find_list(blocks)
        for block in blocks:
            buffer += block
            if len(buffer) >= self.piece_bytes:
                cut = last_comma(buffer) if self.exact else last_boundary(buffer)
                if cut is None:
                    continue
                if self.exact and (end := scan(bytes(buffer))[1]) is not None:
                    yield bytes(buffer[:end])
                    self._finish_head(bytes(buffer[end + 1 :]) + b"".join(blocks))
                    return
                yield bytes(buffer[:cut])
                del buffer[: cut + 1]
        yield from self._last(bytes(buffer))

    def _find_list(self, blocks: Iterator[bytes]) -> bytearray:
        """Read up to the opening bracket of the events; return what follows it."""
        path = self.source.path
        buffer = bytearray()
        searched = 0
        for block in blocks:
            buffer += block
            start = buffer.lstrip(b"\xef\xbb\xbf" + _SPACE)
            if not start:
                if len(buffer) > HEAD_LIMIT:
                    raise AdvisorError(f"{path}: nothing but white space; not a trace")
                continue
            first = start[:1]
            if first == b"[":
                self.bare_list = True
                return start[1:]
            if first != b"{":
                raise AdvisorError(f"{path}: {self._not_json(bytes(start[:16]))}")
            for match in _EVENTS.finditer(buffer, max(0, searched - 64)):
                text = bytes(buffer[: match.start()]).lstrip(b"\xef\xbb\xbf" + _SPACE)
                if (head := _object(text + b'"traceEvents":[]}')) is not None:
                    head.pop("traceEvents", None)
                    self.head.update(head)
                    return buffer[match.end() :]
            searched = len(buffer)
            if len(buffer) > HEAD_LIMIT:
                break
        return self._no_list(buffer)

    def _no_list(self, buffer: bytearray) -> bytearray:
        path = self.source.path
        if not buffer.strip():
            raise AdvisorError(f"{path}: nothing but white space; not a trace")
        if match := _EVENTS.search(buffer):  # a damaged head: the events may still be there
            return buffer[match.end() :]
        whole = _object(bytes(buffer).lstrip(b"\xef\xbb\xbf" + _SPACE))
        if whole is None:
            if self.source.truncated or len(buffer) > 2:
                raise AdvisorError(
                    f"{path}: not a readable trace: no list of traceEvents, and "
                    + ("the file is cut off" if self.source.truncated else "not valid JSON")
                )
            raise AdvisorError(f"{path}: not valid JSON")
        if "traceEvents" in whole:
            kind = type(whole["traceEvents"]).__name__
            raise AdvisorError(f"{path}: traceEvents is not a list but a {kind}; not a trace")
        keys = ", ".join(sorted(map(str, whole))[:4]) or "no keys"
        raise AdvisorError(
            f"{path}: JSON without traceEvents (it has {keys[:80]}); give a trace written by "
            "export_chrome_trace or tensorboard_trace_handler"
        )

    @staticmethod
    def _not_json(start: bytes) -> str:
        if start.startswith((b"\xff\xfe", b"\xfe\xff")):
            return "UTF-16 text; convert it to UTF-8"
        if start.startswith(b"SQLite format 3"):
            return "an SQLite file (Nsight Systems export?); give a PyTorch profiler trace"
        if start.startswith(b"\x80"):
            return "a pickle (memory snapshot?); give a PyTorch profiler trace"
        return "not JSON; give a PyTorch profiler trace (.json, .json.gz or .json.zst)"

    def _last(self, rest: bytes) -> Iterator[bytes]:
        """The end of the text: close the list, or keep what a cut file still holds."""
        end = scan(rest)[1] if self.exact else _list_end(rest, bare=self.bare_list)
        if end is not None:
            events = rest[:end]
            self._finish_head(rest[end + 1 :])
            if events.strip():
                yield events
            return
        self.truncated = True
        rest = rest.rstrip(_SPACE + b",")
        cut = last_comma(rest) if self.exact else last_boundary(rest)
        last = rest if cut is None else rest[cut + 1 :]
        if last.strip() and _object(last) is None:
            self.cut_events = 1
            rest = b"" if cut is None else rest[:cut]
        if rest.strip():
            yield rest

    def _finish_head(self, tail: bytes) -> None:
        tail = tail.strip()
        if self.bare_list or tail in (b"", b"}"):
            return
        found = _object(b'{"_":[]' + tail)
        if found is None:
            self.truncated = True
            return
        found.pop("_", None)
        self.head.update(found)


def _object(text: bytes) -> dict[str, Any] | None:
    """Decode a JSON object, or None; control characters and bad UTF-8 are replaced first."""
    for attempt in (text, sanitise(text)):
        try:
            value = msgspec.json.decode(attempt)
        except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _list_end(rest: bytes, *, bare: bool) -> int | None:
    """Position of the bracket that closes the event list, looked for from the end."""
    position = len(rest)
    for _ in range(4096):
        position = rest.rfind(b"]", 0, position)
        if position < 0:
            return None
        before = rest[max(0, position - 256) : position].rstrip(_SPACE)
        if before and not before.endswith((b"}", b"},")):
            continue
        tail = rest[position + 1 :].strip()
        if bare:
            if tail in (b"", b",", b";"):
                return position
        elif tail == b"}" or _object(b'{"_":[]' + tail) is not None:
            return position
    return None


def last_boundary(buffer: bytes | bytearray) -> int | None:
    """Position of the last comma that looks like one between two events."""
    position = len(buffer)
    for _ in range(100_000):
        position = buffer.rfind(b"}", 0, position)
        if position < 0:
            return None
        if match := _BOUNDARY.match(buffer, position):
            return match.end(1)
    return None


_INTEREST = np.zeros(256, dtype=bool)
_INTEREST[list(b'"{}[],')] = True
_DELTA = np.zeros(256, dtype=np.int8)
_DELTA[list(b"{[")] = 1
_DELTA[list(b"}]")] = -1


def scan(text: bytes) -> tuple[NDArray[np.intp], int | None, int]:
    """Follow quotes and brackets over the inside of a JSON list.

    Returns the positions of its own commas, the position of the bracket that closes it (``None``:
    not in the text), and the depth at the end (0 when balanced, or at the closing bracket).
    """
    clean = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    data = np.frombuffer(clean, dtype=np.uint8)
    where = np.flatnonzero(_INTEREST[data])
    chars = data[where]
    quote = chars == ord('"')
    inside = np.cumsum(quote, dtype=np.int64) & 1
    keep = ~quote & (inside == 0)
    where, chars = where[keep], chars[keep]
    depth = np.cumsum(_DELTA[chars], dtype=np.int64)
    closing = np.flatnonzero(depth < 0)
    end: int | None = None
    if len(closing):
        end = int(where[closing[0]])
        where, chars, depth = (a[: closing[0]] for a in (where, chars, depth))
    open_string = bool(len(inside) and quote.sum() % 2)
    commas = where[(chars == ord(",")) & (depth == 0)]
    last = int(depth[-1]) if len(depth) else 0
    return commas, end, 1 if open_string and end is None else last


def last_comma(buffer: bytes | bytearray) -> int | None:
    """Position of the last comma between two elements of the list, found exactly."""
    commas, _, _ = scan(bytes(buffer))
    return int(commas[-1]) if len(commas) else None


def segments(piece: bytes) -> Iterator[bytes]:
    """The events of a piece as separate texts, whether or not the piece is sound."""
    commas, end, depth = scan(piece)
    if end is None and depth == 0:
        cuts = commas.tolist()
    else:
        cuts = [match.end(1) for match in _BOUNDARY.finditer(piece)]
    start = 0
    for cut in [*cuts, len(piece)]:
        text = piece[start:cut].strip()
        start = cut + 1
        if text:
            yield text


_CONTROL = bytes(b if b >= 0x20 else 0x20 for b in range(256))
_BARE_NUMBER = re.compile(rb"(:\s*)-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')


def sanitise(text: bytes) -> bytes:
    """Repair what makes a decoder refuse: control characters, bad UTF-8, NaN and Infinity,
    and backslashes that escape nothing (Windows paths)."""
    text = text.translate(_CONTROL)
    text = _BARE_NUMBER.sub(rb"\1null", text)
    text = _BAD_ESCAPE.sub(lambda m: m.group(0) if m.group(1) else b"\\\\", text)
    return text.decode("utf-8", "replace").encode()
