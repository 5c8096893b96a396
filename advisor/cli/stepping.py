"""The option that says what the steps of a trace are, of all commands that measure them."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from advisor.core.errors import AdvisorError

Steps = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="A:B|REGEX",
        help="Steps A up to, not including, B, counted from 0; or the names of the ranges "
        "that are steps.",
    ),
]

_NUMBERS = re.compile(r"\s*[-+]?\w{0,2}\s*:\s*[-+]?\w{0,2}\s*|[-+\d\s.:]*")


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """``A:B``, ``A:`` or ``:B`` to a half-open range; AdvisorError for what looks like one and is
    none. ``None``: names of ranges, for :func:`step_ranges`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text.strip())
    if match is None:
        if _NUMBERS.fullmatch(text) is None:
            return None
        raise AdvisorError(
            f"--steps {text}: give a range A:B of step numbers, such as 2:8 or 2:, or a regular "
            "expression of the names of the ranges that are steps"
        )
    first, last = (int(part) if part else None for part in match.groups())
    if last is not None and last <= (first or 0):
        raise AdvisorError(f"--steps {text}: that range is empty; B is not included")
    return first, last


def step_ranges(text: str | None) -> str | None:
    """A regular expression of the ranges that are steps; ``None``: steps by number, or all."""
    return text if text is not None and parse_steps(text) is None else None
