"""Splitter of a JSON stream, between events, into pieces that can be decoded independently.

Two ways to find the cuts. The fast one looks backwards for ``}, {"ph"`` and trusts it; a cut
inside a nested list leaves both pieces unbalanced, so a wrong one cannot go unnoticed. The exact
one follows quotes and brackets over the whole text; it is used when the fast one was caught out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from advisor.core.errors import AdvisorError
from advisor.core.files import at_most
from advisor.read.json_repair import (
    DECODE_ERRORS,
    EVENT_BOUNDARY,
    SPACE,
    object_end,
    sanitise,
    scan_list,
)
from advisor.read.reader import PIECE
from advisor.read.source import ByteSource, kind_of

HEAD_LIMIT = 64 << 20
"""Most bytes searched for ``traceEvents``."""
TAIL_LIMIT = 16 << 20
"""Most bytes looked at after the events; a longer tail is left out."""
EVENT_LIMIT = 8 << 20
"""Most bytes of one event; in a longer one the next event is searched for."""
MAX_HEADS = 16
"""Most places tried that look like the beginning of the events."""
VALUE_LIMIT = 1 << 20
"""Most bytes kept of one top-level value."""

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_OWN = "advisor::events"  # our name for the list while the rest of the object is decoded
_OPEN_LIST = b'{"advisor::events":['
_EMPTY_LIST = _OPEN_LIST + b"]"
_GIVE = "give a PyTorch profiler trace"
_BOM = b"\xef\xbb\xbf"
_fields = msgspec.json.Decoder(dict[str, Raw])


@dataclass
class Splitter:
    """Splitter of a source's ``traceEvents`` list into pieces, each a JSON list of its own."""

    source: ByteSource
    exact: bool = False
    piece_bytes: int = PIECE
    head: dict[str, Any] = field(default_factory=dict)
    """The file's other top-level keys, complete once :meth:`pieces` is exhausted."""
    truncated: bool = False
    bare_list: bool = False
    cut_events: int = 0
    """Events lost at the cut of a truncated file (0 or 1)."""
    skipped: int = 0
    """Number of stretches of text without a single event in them, left out."""
    followed: bool = False
    """True if another trace follows in the same file (``cat a.json b.json``), which is left out."""

    def pieces(self) -> Iterator[bytes]:
        """Yield pieces. Raises AdvisorError when there is no list of events at all."""
        blocks = at_most(self.source.blocks(), self.piece_bytes)
        held = [self._find_list(blocks)]
        size = len(held[0])
        for block in blocks:
            held.append(block)
            size += len(block)
            if size < self.piece_bytes:
                continue
            if self.exact:
                held = [b"".join(held)]
                commas, end, _ = scan_list(held[0])
                if end is not None:
                    yield _listed([memoryview(held[0])[:end]])
                    self._read_tail(held[0][end + 1 :], blocks)
                    return
                cut = int(commas[-1]) if len(commas) else None
            else:
                cut = last_boundary(held[-1])
            too_long = size > self.piece_bytes + EVENT_LIMIT
            if cut is None and (too_long or (size >= 2 * self.piece_bytes and not self.exact)):
                held = [b"".join(held)]
                end = None if self.exact else _scanned_end(held[0], self.bare_list)
                if end is not None:
                    yield _listed([memoryview(held[0])[:end]])
                    self._read_tail(held[0][end + 1 :], blocks)
                    return
                cut = last_boundary(held[-1])
            if cut is not None:
                last = held.pop()
                yield _listed([*held, memoryview(last)[:cut]])
                held = [last[cut + 1 :]]
            elif too_long:
                held = [self._skip(held, blocks)]
            size = sum(map(len, held))
        yield from self._last(b"".join(held))

    def _skip(self, held: list[bytes], blocks: Iterator[bytes]) -> bytes:
        """Drop text that holds no event up to the next thing that looks like one."""
        self.skipped += 1
        carry = held[-1][-64:]
        held.clear()
        for block in blocks:
            text = carry + block
            if match := EVENT_BOUNDARY.search(text):
                return text[match.end(1) + 1 :]
            carry = text[-64:]
        return b""

    # -- the beginning ----------------------------------------------------------------------

    def _find_list(self, blocks: Iterator[bytes]) -> bytes:
        """Read up to the opening bracket of the events; return the text after it."""
        buffer = b""
        searched = tries = blank = 0
        for block in blocks:
            buffer = buffer + block if buffer else block
            if not searched:
                blank += len(block)
                buffer = without_mark(buffer)
                if _BOM.startswith(buffer):  # nothing yet, or perhaps the beginning of a mark
                    if blank < HEAD_LIMIT:
                        continue
                    break
                if buffer[:1] == b"[":
                    self._check_list(buffer[1:])
                    self.bare_list = True
                    return buffer[1:]
                if buffer[:1] != b"{" or b"\0" in buffer[:4]:
                    raise AdvisorError(f"{self.source.path}: {_what_else(buffer)}")
            for result in _EVENTS.finditer(buffer, max(0, searched - 64)):
                tries += 1
                if self._read_fields(buffer[: result.start()], b'"traceEvents":[]}'):
                    return buffer[result.end() :]
                if tries == MAX_HEADS:
                    break
            searched = len(buffer)
            if searched > HEAD_LIMIT or tries == MAX_HEADS:
                break
        if match := _EVENTS.search(buffer):  # a damaged head: the events may still be there
            return buffer[match.end() :]
        raise AdvisorError(f"{self.source.path}: {self._no_list(buffer)}")

    def _check_list(self, inside: bytes) -> None:
        """Check that a bare list is one of objects; raises AdvisorError otherwise."""
        first = inside.lstrip(SPACE)[:1]
        if first in (b"{", b"]", b""):
            return
        raise AdvisorError(
            f"{self.source.path}: a JSON list that begins with "
            f"{_shown(inside[:20].decode(errors='replace').strip())}, not with a trace event; "
            "give a trace written by export_chrome_trace or tensorboard_trace_handler"
        )

    def _no_list(self, buffer: bytes) -> str:
        """Return what is wrong with a text that has no list of events."""
        again = "copy or record it again"
        if not buffer:
            if self.source.damage:
                return f"{self.source.damage}, nothing could be unpacked; {again}"
            return "nothing but white space; give a PyTorch profiler trace"
        try:
            whole = _fields.decode(buffer)
        except DECODE_ERRORS:
            if self.source.damage:
                return f"{self.source.damage}, no event could be unpacked; {again}"
            if len(buffer) > HEAD_LIMIT:
                return (
                    f"no traceEvents in its first {HEAD_LIMIT >> 20} MB; "
                    "give a PyTorch profiler trace"
                )
            if object_end(buffer[1:]) is None:
                return f"cut off before its first event; {again}"
            return f"not valid JSON; {again}"
        if "traceEvents" in whole:
            kind = {b"{": "an object", b'"': "a string", b"n": "null"}.get(
                bytes(whole["traceEvents"])[:1], "a number"
            )
            return f"traceEvents is not a list but {kind}; give a PyTorch profiler trace"
        if {"schema", "nodes"} <= whole.keys():
            return (
                "an execution trace (ExecutionTraceObserver), which says what ran and not how "
                "long; give a trace written by export_chrome_trace or tensorboard_trace_handler"
            )
        if "child_paths" in whole or {"num_warps", "num_stages"} <= whole.keys():
            return (
                "a file of Triton's cache of compiled kernels, no trace; give the cache's folder, "
                "alone or beside a trace with --kernel-profile"
            )
        keys = ", ".join(_shown(key) for key in sorted(whole)[:4]) or "none"
        return (
            f"JSON without traceEvents (its keys: {keys}); give a trace written by "
            "export_chrome_trace or tensorboard_trace_handler"
        )

    # -- the end ----------------------------------------------------------------------------

    def _last(self, rest: bytes) -> Iterator[bytes]:
        """Yield the last piece: close the list, or keep what a cut file still holds."""
        if not self.bare_list:
            whole = _decode_fields(_OPEN_LIST + rest)
            if whole is not None and _OWN in whole:  # the undamaged case: no search is needed
                self._keep(whole)
                yield bytes(whole[_OWN])
                return
        looks = (_scanned_end, _list_end) if self.exact else (_list_end, _scanned_end)
        end = next((at for look in looks if (at := look(rest, self.bare_list)) is not None), None)
        if end is not None:
            self._read_tail(rest[end + 1 :], iter(()))
            yield _listed([rest[:end]])
            return
        self.truncated = True
        rest = rest.rstrip(SPACE + b",")
        cut = _last_cut(rest)
        last = rest[cut + 1 :]
        if last.strip() and not _is_json(last):
            self.cut_events = 1
            rest = rest[: max(cut, 0)]
        if rest.strip():
            yield _listed([rest])

    def _read_tail(self, tail: bytes, blocks: Iterator[bytes]) -> None:
        """Read the keys after the list of events."""
        parts = [tail]
        size = len(tail)
        for block in blocks:
            size += len(block)
            if size <= TAIL_LIMIT:
                parts.append(block)
        tail = b"".join(parts).strip()
        if not self.bare_list and _EVENTS.search(tail):
            self.followed = True
        elif size > TAIL_LIMIT:
            return
        if self.bare_list or tail == b"}" or self._read_fields(_EMPTY_LIST, tail):
            return
        end = object_end(tail)  # something after the closing brace, or no closing brace
        if end is None or not self._read_fields(_EMPTY_LIST, tail[: end + 1]):
            self.truncated = True

    def _read_fields(self, before: bytes, after: bytes) -> bool:
        """Keep the keys of an object given in two parts; return false if it is none."""
        whole = _decode_fields(before + after)
        if whole is None:
            return False
        self._keep(whole)
        return True

    def _keep(self, fields: dict[str, Raw]) -> None:
        for key, raw in fields.items():
            if key not in (_OWN, "traceEvents") and len(self.head) < 1000:
                self.head[key[:200]] = _value(raw)


def _decode_fields(text: bytes, *, repair: bool = True) -> dict[str, Raw] | None:
    """Return an object's members, undecoded, repaired if need be; ``None`` if it is none."""
    try:
        return _fields.decode(text)
    except DECODE_ERRORS:
        if not repair or len(text) > HEAD_LIMIT:
            return None
    try:
        return _fields.decode(sanitise(text))
    except DECODE_ERRORS:
        return None


def _value(raw: Raw) -> Any:
    text = bytes(raw)
    if len(text) > VALUE_LIMIT:
        return None
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS:
        return None


def _last_cut(rest: bytes) -> int:
    """Return the position of the comma before the last event of a cut-off list; -1: none."""
    commas, _, _ = scan_list(rest)
    cut = int(commas[-1]) if len(commas) else -1
    boundary = _at(last_boundary(rest))
    if boundary > cut:  # inside the last event; or quotes are damaged, and the scan was misled
        before = max(cut, _at(last_boundary(rest[:boundary])))
        if _is_event(rest[before + 1 : boundary]) or _is_event(rest[boundary + 1 :]):
            return boundary
    return cut


class _Anything(msgspec.Struct):
    ph: str
    ts: Raw


def _is_event(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=_Anything)
    except DECODE_ERRORS:
        return False
    return True


def _is_json(text: bytes) -> bool:
    """Return whether a text is one complete JSON value, repaired if need be."""
    for attempt in (text, sanitise(text)):
        try:
            msgspec.json.decode(attempt, type=Raw)
        except DECODE_ERRORS:
            continue
        return True
    return False


def _listed(parts: list[bytes | memoryview]) -> bytes:
    return b"".join([b"[", *parts, b"]"])


def without_mark(text: bytes) -> bytes:
    """Remove a leading byte order mark and white space."""
    text = text.removeprefix(_BOM)
    return text.lstrip(SPACE) if text[:1] in (b" ", b"\t", b"\r", b"\n") else text


def _at(position: int | None) -> int:
    return -1 if position is None else position


def _shown(key: str) -> str:
    return key[:20].encode("unicode_escape").decode()


def _what_else(start: bytes) -> str:
    """Return what a text that is no JSON trace is, and what to do."""
    what, cure = kind_of(start) or ("not JSON", f"{_GIVE} (.json, .json.gz or .json.zst)")
    return f"{what}; {cure or _GIVE}"


def _scanned_end(rest: bytes, _bare: bool) -> int | None:
    """Return the position of the bracket that closes the event list, by following all others.
    Damaged quotes mislead the scan: then more events follow the apparent end."""
    end = scan_list(rest)[1]
    if end is None or not EVENT_BOUNDARY.search(rest, end):
        return end
    return end if _is_json(b"[" + rest[:end] + b"]") else None


def _list_end(rest: bytes, bare: bool) -> int | None:
    """Return the same position, searched from the end, for a text that is damaged somewhere."""
    position = len(rest)
    for attempt in range(64):
        position = rest.rfind(b"]", 0, position)
        if position < 0:
            return None
        before = rest[max(0, position - 256) : position].rstrip(SPACE)
        if before and not before.endswith((b"}", b"},")):
            continue
        tail = rest[position + 1 :].rstrip(SPACE + b"\0")
        if bare:
            follows = not tail.strip(SPACE + b",;")
        else:
            follows = _decode_fields(_EMPTY_LIST + tail, repair=attempt < 2) is not None
        if follows and _EVENTS.search(rest, 0, position):  # the end of another trace, behind ours
            return None
        if follows:  # in a text that is cut off it may be a bracket inside the last event
            last = rest[_last_cut(rest[:position]) + 1 : position]
            return position if not last.strip() or _is_json(last) else None
        if bare:
            return None
    return None


def last_boundary(text: bytes) -> int | None:
    """Return the position of the last comma that looks like one between two events."""
    position = len(text)
    for _ in range(100_000):
        position = text.rfind(b"}", 0, position)
        if position < 0:
            return None
        if match := EVENT_BOUNDARY.match(text, position):
            return match.end(1)
    return None
