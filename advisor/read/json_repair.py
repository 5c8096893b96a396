"""Recovery of events from JSON text that a decoder rejects."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

SPACE = b" \t\r\n"
DECODE_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError, ValueError, OverflowError)
"""Exceptions that decoding damaged text raises."""
_KEY = rb'"(?:ph|name|cat|args|id|pid|tid|ts|dur|bp|s)"'
EVENT_BOUNDARY = re.compile(rb"\}(\s{0,256}),\s{0,256}\{\s{0,256}" + _KEY)
"""Boundary between two events. Group 1 ends at the comma. It cannot match inside a string, where
quotes are escaped, but it can match between the objects of a nested list."""

_IS_STRUCTURE = np.zeros(256, dtype=bool)
_IS_STRUCTURE[list(b'"{}[],')] = True
_DEPTH_CHANGE = np.zeros(256, dtype=np.int8)
_DEPTH_CHANGE[list(b"{[")] = 1
_DEPTH_CHANGE[list(b"}]")] = -1
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(SPACE)] = True
_CHUNK = 1 << 20


def scan_list(text: bytes) -> tuple[NDArray[np.intp], int | None, int]:
    """Scan quotes and brackets inside a JSON list.

    Return the positions of the list's own commas, the position of its closing bracket (``None`` if
    it is not in the text), and the depth at the end (0 if balanced, or at the closing bracket). A
    brace that closes nothing ends the scan: the text is damaged, and the depth is -1."""
    comma_parts = [np.zeros(0, dtype=np.intp)]
    last_depth = 0
    scanner = _BracketScanner()
    for positions, chars, depth in scanner.scan(text):
        closing = np.flatnonzero(depth < 0)
        stop = int(closing[0]) if len(closing) else len(depth)
        comma_parts.append(positions[:stop][(chars[:stop] == ord(",")) & (depth[:stop] == 0)])
        if len(closing):
            is_list_end = chars[stop] == ord("]")
            return (
                np.concatenate(comma_parts),
                int(positions[stop]) if is_list_end else None,
                0 if is_list_end else -1,
            )
        last_depth = int(depth[-1])
    return np.concatenate(comma_parts), None, 1 if scanner.in_string else last_depth


def object_end(text: bytes) -> int | None:
    """Return the position of the brace that closes an object whose inside is given, or ``None``."""
    for positions, chars, depth in _BracketScanner().scan(text):
        closing = np.flatnonzero(depth < 0)
        if len(closing):
            return int(positions[closing[0]]) if chars[closing[0]] == ord("}") else None
    return None


class _BracketScanner:
    """Scanner of quotes and brackets in chunks, so that memory does not grow with the text."""

    def __init__(self) -> None:
        self.in_string = False
        self._depth = 0

    def scan(self, text: bytes) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Yield positions, characters and depths of brackets, braces and commas outside strings."""
        if b"\\" in text:
            text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        all_bytes = np.frombuffer(text, dtype=np.uint8)
        for start in range(0, len(all_bytes), _CHUNK):
            data = all_bytes[start : start + _CHUNK]
            positions = np.flatnonzero(_IS_STRUCTURE[data])
            chars = data[positions]
            is_quote = chars == ord('"')
            inside = np.logical_xor.accumulate(is_quote) ^ self.in_string
            keep = ~(is_quote | inside)
            if len(inside):
                self.in_string = bool(inside[-1])
            positions, chars = positions[keep] + start, chars[keep]
            if len(positions):
                depth = np.cumsum(_DEPTH_CHANGE[chars], dtype=np.int64) + self._depth
                self._depth = int(depth[-1])
                yield positions, chars, depth


def split_objects(inside: bytes) -> tuple[Iterator[bytes], int]:
    """Split the inside of a list, valid or not, into the texts of its objects. Return the texts and
    the number of other elements."""
    commas, end, depth = scan_list(inside)
    if end is not None or depth != 0:
        boundaries = [match.end(1) for match in EVENT_BOUNDARY.finditer(inside)]
        commas = np.array(boundaries, dtype=np.intp)
    edges = np.concatenate([[-1], commas, [len(inside)]])
    del commas
    data = np.frombuffer(inside, dtype=np.uint8)
    gaps = np.diff(edges)
    single_characters = (
        edges[:-1][gaps == 2] + 1
    )  # one character is not an object, and a space is no element
    other_count = int((~_IS_SPACE[data[single_characters]]).sum())
    candidates = np.flatnonzero(gaps > 2)
    starts, ends = edges[candidates] + 1, edges[candidates + 1]
    del edges, gaps, single_characters, candidates
    non_space = np.append(np.flatnonzero(~_IS_SPACE[data]), len(inside)) if len(starts) else starts
    first = non_space[np.searchsorted(non_space, starts)]
    del non_space
    is_object = (first < ends) & (data[np.minimum(first, len(data) - 1)] == ord("{"))
    other_count += int(((first < ends) & ~is_object).sum())
    texts = (
        inside[start:stop]
        for start, stop in zip(starts[is_object].tolist(), ends[is_object].tolist(), strict=True)
    )
    return texts, other_count


_MAX_SPACES_BEFORE = 256
_CONTROL = bytes(b if b >= 0x20 else 0x20 for b in range(256))
_STRING = rb'"(?:[^"\\]|\\.)*"?'
_NOT_A_NUMBER = re.compile(_STRING + rb"|(-?\b(?:nan|inf(?:inity)?)\b)", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_SURROGATE = re.compile(
    rb"\\\\|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def repair_json(text: bytes) -> bytes:
    """Repair text that a decoder rejects: control characters, bad UTF-8, lone surrogates, NaN and
    Infinity, and backslashes that escape nothing (Windows paths)."""
    text = text.translate(_CONTROL)
    if _may_have_nan(text):
        text = _NOT_A_NUMBER.sub(lambda m: b"null" if m.group(1) else m.group(0), text)
    if b"\\" in text:
        text = _BAD_ESCAPE.sub(lambda m: m.group(0) if m.group(1) else b"\\\\", text)
        text = _SURROGATE.sub(lambda m: b"\\ufffd" if m.group(2) else m.group(0), text)
    return text.decode("utf-8", "replace").encode()


def _may_have_nan(text: bytes) -> bool:
    """Return whether NaN or Infinity is at the beginning of a value. Most texts have them only in
    names, and a pattern search is slow if the pattern does not begin with a literal."""
    lower = text.lower()
    for word in (b"nan", b"inf"):
        index = lower.find(word)
        while index >= 0:
            preceding = lower[max(0, index - _MAX_SPACES_BEFORE) : index].rstrip(b" -")
            if not preceding or preceding[-1:] in b":,[":
                return True
            index = lower.find(word, index + 1)
    return False
