"""Splitter of a JSON stream, between events, into pieces that can be decoded independently.

There are two ways to find the cuts. The fast one searches backwards for ``}, {"ph"``. A wrong cut,
inside a nested list, leaves both pieces unbalanced, so it is always noticed. The exact one scans
quotes and brackets of the whole text, and is used when the fast one failed."""

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
    repair_json,
    scan_list,
)
from advisor.read.reader import PIECE
from advisor.read.source import ByteSource, kind_of

HEAD_LIMIT = 64 << 20
"""Maximum number of bytes searched for ``traceEvents``."""
TAIL_LIMIT = 16 << 20
"""Maximum number of bytes read after the events. A longer tail is left out."""
EVENT_LIMIT = 8 << 20
"""Maximum size of an event, bytes. After that, the next event is searched for."""
MAX_HEADS = 16
"""Maximum number of places tried that look like the beginning of the events."""
VALUE_LIMIT = 1 << 20
"""Maximum size of a top-level value that is kept, bytes."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST_KEY = "advisor::events"  # our name for the list while the other keys are decoded
_OPEN_LIST = b'{"advisor::events":['
_EMPTY_LIST = _OPEN_LIST + b"]"
_GIVE_TRACE = "give a PyTorch profiler trace"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_dict_decoder = msgspec.json.Decoder(dict[str, Raw])


@dataclass
class Splitter:
    """Splitter of a source's ``traceEvents`` list into pieces that are JSON lists."""

    source: ByteSource
    exact: bool = False
    piece_bytes: int = PIECE
    head: dict[str, Any] = field(default_factory=dict)
    """Other top-level keys of the file, complete once :meth:`pieces` is exhausted."""
    truncated: bool = False
    bare_list: bool = False
    cut_events: int = 0
    """Number of events lost at the cut of a truncated file (0 or 1)."""
    skipped: int = 0
    """Number of parts of the text that were left out because they have no event."""
    followed: bool = False
    """Whether another trace follows in the same file (``cat a.json b.json``). It is left out."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the pieces. Raises AdvisorError if there is no list of events."""
        blocks = at_most(self.source.blocks(), self.piece_bytes)
        parts = [self._find_event_list(blocks)]
        size = len(parts[0])
        for block in blocks:
            parts.append(block)
            size += len(block)
            if size < self.piece_bytes:
                continue
            if self.exact:
                parts = [b"".join(parts)]
                commas, end, _ = scan_list(parts[0])
                if end is not None:
                    yield _join_list([memoryview(parts[0])[:end]])
                    self._read_tail(parts[0][end + 1 :], blocks)
                    return
                cut = int(commas[-1]) if len(commas) else None
            else:
                cut = last_boundary(parts[-1])
            too_long = size > self.piece_bytes + EVENT_LIMIT
            if cut is None and (too_long or (size >= 2 * self.piece_bytes and not self.exact)):
                parts = [b"".join(parts)]
                end = None if self.exact else _find_end_by_scan(parts[0], self.bare_list)
                if end is not None:
                    yield _join_list([memoryview(parts[0])[:end]])
                    self._read_tail(parts[0][end + 1 :], blocks)
                    return
                cut = last_boundary(parts[-1])
            if cut is not None:
                last_block = parts.pop()
                yield _join_list([*parts, memoryview(last_block)[:cut]])
                parts = [last_block[cut + 1 :]]
            elif too_long:
                parts = [self._skip_damage(parts, blocks)]
            size = sum(map(len, parts))
        yield from self._yield_last(b"".join(parts))

    def _skip_damage(self, parts: list[bytes], blocks: Iterator[bytes]) -> bytes:
        """Drop text without events up to the next text that looks like an event."""
        self.skipped += 1
        overlap = parts[-1][-64:]
        parts.clear()
        for block in blocks:
            text = overlap + block
            if match := EVENT_BOUNDARY.search(text):
                return text[match.end(1) + 1 :]
            overlap = text[-64:]
        return b""

    # -- the beginning ----------------------------------------------------------------------

    def _find_event_list(self, blocks: Iterator[bytes]) -> bytes:
        """Read up to the opening bracket of the events. Return the text after it."""
        buffer = b""
        searched = tries = blank_bytes = 0
        for block in blocks:
            buffer = buffer + block if buffer else block
            if not searched:
                blank_bytes += len(block)
                buffer = without_mark(buffer)
                if _BYTE_ORDER_MARK.startswith(buffer):  # empty, or part of a byte order mark
                    if blank_bytes < HEAD_LIMIT:
                        continue
                    break
                if buffer[:1] == b"[":
                    self._check_list(buffer[1:])
                    self.bare_list = True
                    return buffer[1:]
                if buffer[:1] != b"{" or b"\0" in buffer[:4]:
                    raise AdvisorError(f"{self.source.path}: {_describe_other(buffer)}")
            for list_start in _EVENTS_KEY.finditer(buffer, max(0, searched - 64)):
                tries += 1
                if self._read_fields(buffer[: list_start.start()], b'"traceEvents":[]}'):
                    return buffer[list_start.end() :]
                if tries == MAX_HEADS:
                    break
            searched = len(buffer)
            if searched > HEAD_LIMIT or tries == MAX_HEADS:
                break
        if match := _EVENTS_KEY.search(buffer):  # the head is damaged, but there may be events
            return buffer[match.end() :]
        raise AdvisorError(f"{self.source.path}: {self._explain_no_list(buffer)}")

    def _check_list(self, inside: bytes) -> None:
        """Check that a bare list contains objects. Raises AdvisorError otherwise."""
        first = inside.lstrip(SPACE)[:1]
        if first in (b"{", b"]", b""):
            return
        raise AdvisorError(
            f"{self.source.path}: a JSON list that begins with "
            f"{_escape_key(inside[:20].decode(errors='replace').strip())}, not with a trace event; "
            "give a trace written by export_chrome_trace or tensorboard_trace_handler"
        )

    def _explain_no_list(self, buffer: bytes) -> str:
        """Return the reason why a text has no list of events."""
        advice = "copy or record it again"
        if not buffer:
            if self.source.damage:
                return f"{self.source.damage}, nothing could be unpacked; {advice}"
            return "nothing but white space; give a PyTorch profiler trace"
        try:
            members = _dict_decoder.decode(buffer)
        except DECODE_ERRORS:
            if self.source.damage:
                return f"{self.source.damage}, no event could be unpacked; {advice}"
            if len(buffer) > HEAD_LIMIT:
                return (
                    f"no traceEvents in its first {HEAD_LIMIT >> 20} MB; "
                    "give a PyTorch profiler trace"
                )
            if object_end(buffer[1:]) is None:
                return f"cut off before its first event; {advice}"
            return f"not valid JSON; {advice}"
        if "traceEvents" in members:
            kind = {b"{": "an object", b'"': "a string", b"n": "null"}.get(
                bytes(members["traceEvents"])[:1], "a number"
            )
            return f"traceEvents is not a list but {kind}; give a PyTorch profiler trace"
        if {"schema", "nodes"} <= members.keys():
            return (
                "an execution trace (ExecutionTraceObserver), which says what ran and not how "
                "long; give a trace written by export_chrome_trace or tensorboard_trace_handler"
            )
        if "child_paths" in members or {"num_warps", "num_stages"} <= members.keys():
            return (
                "a file of Triton's cache of compiled kernels, not a trace; give the cache's "
                "folder, alone or together with a trace as --kernel-profile"
            )
        if re.fullmatch(rb'"advisor\.[a-z_]+/\d+"', bytes(members.get("schema", b""))):
            return "a file that advisor wrote, not a trace; open a saved report with advisor report"
        keys = ", ".join(_escape_key(key) for key in sorted(members)[:4]) or "none"
        return (
            f"JSON without traceEvents (its keys: {keys}); give a trace written by "
            "export_chrome_trace or tensorboard_trace_handler"
        )

    # -- the end ----------------------------------------------------------------------------

    def _yield_last(self, text: bytes) -> Iterator[bytes]:
        """Yield the last piece: close the list, or keep the events that a cut file still has."""
        if not self.bare_list:
            members = _decode_fields(_OPEN_LIST + text)
            if members is not None and _LIST_KEY in members:  # undamaged: no search is needed
                self._keep_fields(members)
                yield bytes(members[_LIST_KEY])
                return
        searches = (
            (_find_end_by_scan, _find_end_backwards)
            if self.exact
            else (_find_end_backwards, _find_end_by_scan)
        )
        end = next(
            (
                position
                for search in searches
                if (position := search(text, self.bare_list)) is not None
            ),
            None,
        )
        if end is not None:
            self._read_tail(text[end + 1 :], iter(()))
            yield _join_list([text[:end]])
            return
        self.truncated = True
        text = text.rstrip(SPACE + b",")
        cut = _find_last_comma(text)
        last_event = text[cut + 1 :]
        if last_event.strip() and not _is_json(last_event):
            self.cut_events = 1
            text = text[: max(cut, 0)]
        if text.strip():
            yield _join_list([text])

    def _read_tail(self, tail: bytes, blocks: Iterator[bytes]) -> None:
        """Read the keys after the list of events."""
        parts = [tail]
        size = len(tail)
        for block in blocks:
            size += len(block)
            if size <= TAIL_LIMIT:
                parts.append(block)
        tail = b"".join(parts).strip()
        if not self.bare_list and _EVENTS_KEY.search(tail):
            self.followed = True
        elif size > TAIL_LIMIT:
            return
        if self.bare_list or tail == b"}" or self._read_fields(_EMPTY_LIST, tail):
            return
        end = object_end(tail)  # there is text after the closing brace, or no closing brace
        if end is None or not self._read_fields(_EMPTY_LIST, tail[: end + 1]):
            self.truncated = True

    def _read_fields(self, first_part: bytes, second_part: bytes) -> bool:
        """Keep the keys of an object given in two parts. Return false if it is not an object."""
        members = _decode_fields(first_part + second_part)
        if members is None:
            return False
        self._keep_fields(members)
        return True

    def _keep_fields(self, fields: dict[str, Raw]) -> None:
        for key, raw in fields.items():
            if key not in (_LIST_KEY, "traceEvents") and len(self.head) < 1000:
                self.head[key[:200]] = _decode_value(raw)


def _decode_fields(text: bytes, *, repair: bool = True) -> dict[str, Raw] | None:
    """Return an object's undecoded members, repaired if necessary, or ``None`` if it is invalid."""
    try:
        return _dict_decoder.decode(text)
    except DECODE_ERRORS:
        if not repair or len(text) > HEAD_LIMIT:
            return None
    try:
        return _dict_decoder.decode(repair_json(text))
    except DECODE_ERRORS:
        return None


def _decode_value(raw: Raw) -> Any:
    text = bytes(raw)
    if len(text) > VALUE_LIMIT:
        return None
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS:
        return None


def _find_last_comma(text: bytes) -> int:
    """Return the position of the comma before the last event of a cut-off list, -1 if none."""
    commas, _, _ = scan_list(text)
    comma = int(commas[-1]) if len(commas) else -1
    boundary = _position_or_minus_one(last_boundary(text))
    if boundary > comma:  # inside the last event, or damaged quotes misled the scan
        previous = max(comma, _position_or_minus_one(last_boundary(text[:boundary])))
        if _is_event(text[previous + 1 : boundary]) or _is_event(text[boundary + 1 :]):
            return boundary
    return comma


class _AnyEvent(msgspec.Struct):
    ph: str
    ts: Raw


def _is_event(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=_AnyEvent)
    except DECODE_ERRORS:
        return False
    return True


def _is_json(text: bytes) -> bool:
    """Return whether a text is one complete JSON value, repaired if necessary."""
    for attempt in (text, repair_json(text)):
        try:
            msgspec.json.decode(attempt, type=Raw)
        except DECODE_ERRORS:
            continue
        return True
    return False


def _join_list(parts: list[bytes | memoryview]) -> bytes:
    return b"".join([b"[", *parts, b"]"])


def without_mark(text: bytes) -> bytes:
    """Remove a leading byte order mark and white space."""
    text = text.removeprefix(_BYTE_ORDER_MARK)
    return text.lstrip(SPACE) if text[:1] in (b" ", b"\t", b"\r", b"\n") else text


def _position_or_minus_one(position: int | None) -> int:
    return -1 if position is None else position


def _escape_key(key: str) -> str:
    return key[:20].encode("unicode_escape").decode()


def _describe_other(start: bytes) -> str:
    """Return a description of a text that is not a JSON trace, and advice."""
    kind, advice = kind_of(start) or ("not JSON", f"{_GIVE_TRACE} (.json, .json.gz or .json.zst)")
    return f"{kind}; {advice or _GIVE_TRACE}"


def _find_end_by_scan(text: bytes, _bare: bool) -> int | None:
    """Return the position of the bracket that closes the event list, by scanning all brackets.
    Damaged quotes mislead the scan: then more events follow the apparent end."""
    end = scan_list(text)[1]
    if end is None or not EVENT_BOUNDARY.search(text, end):
        return end
    return end if _is_json(b"[" + text[:end] + b"]") else None


def _find_end_backwards(text: bytes, is_bare_list: bool) -> int | None:
    """Return the position of the bracket that closes the event list, searched from the end. For
    damaged texts."""
    position = len(text)
    for attempt in range(64):
        position = text.rfind(b"]", 0, position)
        if position < 0:
            return None
        text_before = text[max(0, position - 256) : position].rstrip(SPACE)
        if text_before and not text_before.endswith((b"}", b"},")):
            continue
        tail = text[position + 1 :].rstrip(SPACE + b"\0")
        if is_bare_list:
            is_end = not tail.strip(SPACE + b",;")
        else:
            is_end = _decode_fields(_EMPTY_LIST + tail, repair=attempt < 2) is not None
        if is_end and _EVENTS_KEY.search(text, 0, position):  # the end of another trace
            return None
        if is_end:  # in a cut-off text it may be a bracket inside the last event
            last_event = text[_find_last_comma(text[:position]) + 1 : position]
            return position if not last_event.strip() or _is_json(last_event) else None
        if is_bare_list:
            return None
    return None


def last_boundary(text: bytes) -> int | None:
    """Return the position of the last comma that seems to be between two events."""
    position = len(text)
    for _ in range(100_000):
        position = text.rfind(b"}", 0, position)
        if position < 0:
            return None
        if match := EVENT_BOUNDARY.match(text, position):
            return match.end(1)
    return None
