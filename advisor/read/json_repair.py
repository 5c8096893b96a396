"""Recovery of events from JSON text that a decoder refuses."""

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
"""Boundary between two events: group 1 ends at the comma. It cannot match inside a string, whose
quotes would be escaped, but can between the objects of a nested list."""

_INTEREST = np.zeros(256, dtype=bool)
_INTEREST[list(b'"{}[],')] = True
_DELTA = np.zeros(256, dtype=np.int8)
_DELTA[list(b"{[")] = 1
_DELTA[list(b"}]")] = -1
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(SPACE)] = True
_STRETCH = 1 << 20


def scan_list(text: bytes) -> tuple[NDArray[np.intp], int | None, int]:
    """Follow quotes and brackets over the inside of a JSON list.

    Returns the positions of its own commas, the position of the bracket that closes it (``None``:
    not in the text), and the depth at the end (0 when balanced, or at the closing bracket). A
    brace that closes nothing ends the scan: the text is damaged, and the depth is -1."""
    result = [np.zeros(0, dtype=np.intp)]
    last = 0
    follower = _BracketScanner()
    for where, chars, depth in follower.scan(text):
        closing = np.flatnonzero(depth < 0)
        upto = int(closing[0]) if len(closing) else len(depth)
        result.append(where[:upto][(chars[:upto] == ord(",")) & (depth[:upto] == 0)])
        if len(closing):
            sound = chars[upto] == ord("]")
            return np.concatenate(result), int(where[upto]) if sound else None, 0 if sound else -1
        last = int(depth[-1])
    return np.concatenate(result), None, 1 if follower.in_string else last


def object_end(text: bytes) -> int | None:
    """Return the position of the brace that closes an object, from its inside; or ``None``."""
    for where, chars, depth in _BracketScanner().scan(text):
        closing = np.flatnonzero(depth < 0)
        if len(closing):
            return int(where[closing[0]]) if chars[closing[0]] == ord("}") else None
    return None


class _BracketScanner:
    """Scanner of quotes and brackets, a stretch at a time: memory does not grow with the text."""

    def __init__(self) -> None:
        self.in_string = False
        self._depth = 0

    def scan(self, text: bytes) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Yield, for brackets, braces and commas outside strings: where, which, depth after."""
        if b"\\" in text:
            text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        whole = np.frombuffer(text, dtype=np.uint8)
        for start in range(0, len(whole), _STRETCH):
            data = whole[start : start + _STRETCH]
            where = np.flatnonzero(_INTEREST[data])
            chars = data[where]
            quote = chars == ord('"')
            inside = np.logical_xor.accumulate(quote) ^ self.in_string
            keep = ~(quote | inside)
            if len(inside):
                self.in_string = bool(inside[-1])
            where, chars = where[keep] + start, chars[keep]
            if len(where):
                depth = np.cumsum(_DELTA[chars], dtype=np.int64) + self._depth
                self._depth = int(depth[-1])
                yield where, chars, depth


def split_objects(inside: bytes) -> tuple[Iterator[bytes], int]:
    """Split the inside of a list, sound or not, into the texts of its objects. Return them and the
    number of other elements."""
    commas, end, depth = scan_list(inside)
    if end is not None or depth != 0:
        result = [match.end(1) for match in EVENT_BOUNDARY.finditer(inside)]
        commas = np.array(result, dtype=np.intp)
    edges = np.concatenate([[-1], commas, [len(inside)]])
    del commas
    data = np.frombuffer(inside, dtype=np.uint8)
    gaps = np.diff(edges)
    short = edges[:-1][gaps == 2] + 1  # one character: no object, nothing if it is a space
    others = int((~_IS_SPACE[data[short]]).sum())
    long = np.flatnonzero(gaps > 2)
    starts, ends = edges[long] + 1, edges[long + 1]
    del edges, gaps, short, long
    solid = np.append(np.flatnonzero(~_IS_SPACE[data]), len(inside)) if len(starts) else starts
    first = solid[np.searchsorted(solid, starts)]
    del solid
    objects = (first < ends) & (data[np.minimum(first, len(data) - 1)] == ord("{"))
    others += int(((first < ends) & ~objects).sum())
    texts = (
        inside[start:stop]
        for start, stop in zip(starts[objects].tolist(), ends[objects].tolist(), strict=True)
    )
    return texts, others


_LOOK_BACK = 256
_CONTROL = bytes(b if b >= 0x20 else 0x20 for b in range(256))
_STRING = rb'"(?:[^"\\]|\\.)*"?'
_NOT_A_NUMBER = re.compile(_STRING + rb"|(-?\b(?:nan|inf(?:inity)?)\b)", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_SURROGATE = re.compile(
    rb"\\\\|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def sanitise(text: bytes) -> bytes:
    """Repair text that a decoder refuses: control characters, bad UTF-8, lone surrogates, NaN and
    Infinity, and backslashes that escape nothing (Windows paths)."""
    text = text.translate(_CONTROL)
    if _perhaps_not_a_number(text):
        text = _NOT_A_NUMBER.sub(lambda m: b"null" if m.group(1) else m.group(0), text)
    if b"\\" in text:
        text = _BAD_ESCAPE.sub(lambda m: m.group(0) if m.group(1) else b"\\\\", text)
        text = _SURROGATE.sub(lambda m: b"\\ufffd" if m.group(2) else m.group(0), text)
    return text.decode("utf-8", "replace").encode()


def _perhaps_not_a_number(text: bytes) -> bool:
    """Return whether NaN or Infinity stands where a value begins; most texts have them only in
    names. Python's pattern search is slow if no literal leads it."""
    lower = text.lower()
    for word in (b"nan", b"inf"):
        at = lower.find(word)
        while at >= 0:
            before = lower[max(0, at - _LOOK_BACK) : at].rstrip(b" -")
            if not before or before[-1:] in b":,[":
                return True
            at = lower.find(word, at + 1)
    return False
