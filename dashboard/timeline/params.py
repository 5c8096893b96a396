"""What a request may ask for: every parameter looked at, bounded, or refused with 400."""

from __future__ import annotations

import re
from collections.abc import Mapping

from advisor.dashboard.timeline.index import Index

MOST_NS = 1 << 60
MOST_QUERY = 200
MOST_RANGES = 512
MOST_ASKED = 1024
"""Lanes of one answer: more do not fit on a screen."""
LEAST_SPAN, MOST_PX, LEAST_PX = 16, 8192, 16

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


class Refused(ValueError):
    """The request makes no sense; the text says which part of it."""


def number(
    args: Mapping[str, str], key: str, low: int, high: int, default: int | None = None
) -> int:
    """A whole number between two bounds."""
    text = args.get(key)
    if text is None:
        if default is None:
            raise Refused(f"{key} is missing")
        return default
    if not _NUMBER.fullmatch(text):
        raise Refused(f"{key} is not a whole number")
    value = int(text)
    if not low <= value <= high:
        raise Refused(f"{key} is not between {low} and {high}")
    return value


def span(args: Mapping[str, str], index: Index) -> tuple[int, int]:
    """``x0`` and ``x1``, ns: somewhere near what there is, and some length."""
    length = index.finish - index.begin
    low, high = index.begin - length - 10**9, index.finish + length + 10**9
    x0, x1 = (number(args, key, -MOST_NS, MOST_NS) for key in ("x0", "x1"))
    if x1 - x0 < LEAST_SPAN:
        raise Refused(f"x1 is not {LEAST_SPAN} ns after x0")
    if x0 < low or x1 > high:
        raise Refused("x0 and x1 are far outside the trace")
    return x0, x1


def numbers(args: Mapping[str, str], key: str, most: int) -> list[int]:
    """``0-3,7``: numbers below ``most``, in order, each once; absent or empty: none."""
    text = args.get(key, "")
    found: set[int] = set()
    parts = text.split(",") if text else []
    if len(parts) > MOST_RANGES:
        raise Refused(f"{key} has too many parts")
    for part in parts:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise Refused(f"{key} is not a list of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < most:
            raise Refused(f"{key}: there is no {part}")
        if last - first > MOST_ASKED:
            raise Refused(f"{key} asks for too many")
        found.update(range(first, last + 1))
    if len(found) > MOST_ASKED:
        raise Refused(f"{key} asks for too many")
    return sorted(found)


def words(args: Mapping[str, str], key: str) -> str:
    """Free text, at most MOST_QUERY characters."""
    text = args.get(key, "")
    if len(text) > MOST_QUERY:
        raise Refused(f"{key} is longer than {MOST_QUERY} characters")
    return text
