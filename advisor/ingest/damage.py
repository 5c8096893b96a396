"""What can be saved of JSON text that a decoder refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPACE = b" \t\r\n"
_KEY = rb'"(?:ph|name|cat|args|id|pid|tid|ts|dur|bp|s)"'
EVENT_BOUNDARY = re.compile(rb"\}(\s{0,256}),\s{0,256}\{\s{0,256}" + _KEY)
"""Between two events: group 1 ends at the comma. It cannot match inside a string, whose quotes
would be escaped, but can between the objects of a nested list."""

_INTEREST = np.zeros(256, dtype=bool)
_INTEREST[list(b'"{}[],')] = True
_DELTA = np.zeros(256, dtype=np.int8)
_DELTA[list(b"{[")] = 1
_DELTA[list(b"}]")] = -1


def scan(text: bytes) -> tuple[NDArray[np.intp], int | None, int]:
    """Follow quotes and brackets over the inside of a JSON list.

    Returns the positions of its own commas, the position of the bracket that closes it (``None``:
    not in the text), and the depth at the end (0 when balanced, or at the closing bracket). A
    brace that closes nothing ends the scan: the text is damaged, and the depth is -1.
    """
    where, chars, depth, open_string = _follow(text)
    end: int | None = None
    closing = np.flatnonzero(depth < 0)
    if len(closing):
        first = int(closing[0])
        if chars[first] == ord("]"):
            end = int(where[first])
        else:
            return where[:first][_own_commas(chars[:first], depth[:first])], None, -1
        where, chars, depth = where[:first], chars[:first], depth[:first]
    commas = where[_own_commas(chars, depth)]
    last = int(depth[-1]) if len(depth) else 0
    return commas, end, 1 if open_string and end is None else last


def object_end(text: bytes) -> int | None:
    """Position of the brace that closes the object of which a text is the inside."""
    where, chars, depth, _ = _follow(text)
    closing = np.flatnonzero(depth < 0)
    return int(where[closing[0]]) if len(closing) and chars[closing[0]] == ord("}") else None


def _follow(text: bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], bool]:
    """Brackets, braces and commas outside strings: where, which, and the depth after each; and
    whether the text ends inside a string."""
    clean = text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text
    data = np.frombuffer(clean, dtype=np.uint8)
    where: NDArray[Any] = np.flatnonzero(_INTEREST[data])
    chars: NDArray[Any] = data[where]
    quote = chars == ord('"')
    inside = np.logical_xor.accumulate(quote) if len(quote) else quote
    keep = ~(quote | inside)
    where, chars = where[keep], chars[keep]
    return where, chars, np.cumsum(_DELTA[chars], dtype=np.int32), bool(inside[-1:].any())


def _own_commas(chars: NDArray[Any], depth: NDArray[Any]) -> NDArray[np.bool_]:
    own: NDArray[np.bool_] = (chars == ord(",")) & (depth == 0)
    return own


def segments(inside: bytes) -> Iterator[bytes]:
    """The events of the inside of a list as separate texts, whether or not it is sound."""
    commas, end, depth = scan(inside)
    if end is None and depth == 0:
        cuts = commas.tolist()
    else:
        cuts = [match.end(1) for match in EVENT_BOUNDARY.finditer(inside)]
    start = 0
    for cut in [*cuts, len(inside)]:
        text = inside[start:cut].strip()
        start = cut + 1
        if text:
            yield text


_CONTROL = bytes(b if b >= 0x20 else 0x20 for b in range(256))
_STRING = rb'"(?:[^"\\]|\\.)*"?'
_NOT_A_NUMBER = re.compile(_STRING + rb"|(-?\b(?:nan|inf(?:inity)?)\b)", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_SURROGATE = re.compile(
    rb"\\\\|(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def sanitise(text: bytes) -> bytes:
    """Repair what makes a decoder refuse: control characters, bad UTF-8, lone surrogates, NaN and
    Infinity, and backslashes that escape nothing (Windows paths)."""
    text = text.translate(_CONTROL)
    text = _NOT_A_NUMBER.sub(lambda m: b"null" if m.group(1) else m.group(0), text)
    if b"\\" in text:
        text = _BAD_ESCAPE.sub(lambda m: m.group(0) if m.group(1) else b"\\\\", text)
        text = _SURROGATE.sub(lambda m: b"\\ufffd" if m.group(2) else m.group(0), text)
    return text.decode("utf-8", "replace").encode()
