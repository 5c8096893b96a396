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
    not in the text), and the depth at the end (0 when balanced, or at the closing bracket).
    """
    clean = text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text
    data = np.frombuffer(clean, dtype=np.uint8)
    where: NDArray[Any] = np.flatnonzero(_INTEREST[data])
    chars: NDArray[Any] = data[where]
    quote = chars == ord('"')
    inside = np.logical_xor.accumulate(quote) if len(quote) else quote
    open_string = bool(len(inside) and inside[-1])
    keep = ~(quote | inside)
    where, chars = where[keep], chars[keep]
    depth: NDArray[Any] = np.cumsum(_DELTA[chars], dtype=np.int32)
    closing = np.flatnonzero(depth < 0)
    end: int | None = None
    if len(closing):
        end = int(where[closing[0]])
        where, chars, depth = (a[: closing[0]] for a in (where, chars, depth))
    commas = where[(chars == ord(",")) & (depth == 0)]
    last = int(depth[-1]) if len(depth) else 0
    return commas, end, 1 if open_string and end is None else last


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
