"""The error that the command line turns into one line; how advisor is installed."""

from __future__ import annotations


class AdvisorError(Exception):
    """Something the user can act on: says what is wrong with which file, and what to do.

    The command line prints the message as one line and exits with ``exit_code`` (2: bad input).
    """

    exit_code = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


def describe_failure(error: BaseException) -> str:
    """An error that nobody foresaw, in one line with the place that raised it:
    ``KeyError: 'x' at tools.py:12``."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if frame is None:
        return text
    file = frame.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{text} at {file}:{frame.tb_lineno}"


SOURCE = "."
"""What pip is given: the folder of the source, until a package index has ``gpu-advisor``."""


def install(extra: str) -> str:
    """The command that installs an extra: ``pip install ".[record]"``."""
    where = " in the folder of advisor's source" if SOURCE == "." else ""
    return f'pip install "{SOURCE}[{extra}]"{where}'
