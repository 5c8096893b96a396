"""The one error that the command line turns into a line of text and an exit code."""

from __future__ import annotations


class AdvisorError(Exception):
    """Something the user can act on: says what is wrong with which file, and what to do.

    The command line prints the message as one line and exits with ``exit_code`` (2: bad input).
    """

    exit_code = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().split())
