"""Records a program that a client names: where the user allowed it, below the folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from advisor import text as t
from advisor.errors import AdvisorError
from advisor.mcp import bounds as b
from advisor.mcp.allowed import Allowed
from advisor.mcp.answers import Ran

MOST_SECONDS = 3600
MOST_ARGUMENTS, LONGEST_ARGUMENT = 100, 2000
TAIL = 2000
"""Characters of the program's output, the last ones."""
GRACE = 10.0
"""Seconds to end by itself after the time limit: the recorder writes what it has."""


def record(allowed: Allowed, script: str, arguments: list[str], out: str, timeout_s: float) -> Ran:
    """``advisor record`` of a script, in its own folder, into a new run directory.

    Raises AdvisorError: the script is outside, or the run directory is there already.
    """
    program, folder = allowed.path(script), allowed.new(out)
    if not program.is_file():
        raise AdvisorError(f"{script}: not a file; give a Python script")
    if len(arguments) > MOST_ARGUMENTS or any(len(a) > LONGEST_ARGUMENT for a in arguments):
        raise AdvisorError("too many arguments, or one that is too long")
    if any("\0" in argument for argument in arguments):
        raise AdvisorError("an argument holds a null character")
    seconds = min(max(1.0, timeout_s), MOST_SECONDS)
    command = [sys.executable, "-m", "advisor", "record", "--no-report", "--out", str(folder), "--"]
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # a group of its own: what the program started ends with it
        process = subprocess.Popen(
            [*command, str(program), *arguments],
            cwd=program.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        code = _wait(process, seconds)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4 * TAIL))
        tail = output.read().decode("utf-8", "replace")
    recorded = folder.is_dir() and any(folder.iterdir())
    return Ran(
        path=str(folder) if recorded else "",
        exit_code=code,
        seconds=round(time.monotonic() - started, 1),
        untrusted=b.UNTRUSTED,
        from_program=t.clean(tail, lines=True)[-TAIL:],
    )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit code; ``None``: it was ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    for end, patience in ((_terminate, GRACE), (_kill, GRACE)):
        end(process)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        break
    _kill(process)  # what it left behind
    return None


def _signal(
    process: subprocess.Popen[bytes], send: Callable[[int, int], None], number: int
) -> None:
    try:
        send(process.pid, number)
    except OSError:
        return


def _terminate(process: subprocess.Popen[bytes]) -> None:
    import signal

    if hasattr(os, "killpg"):
        _signal(process, os.killpg, signal.SIGTERM)
    else:
        process.terminate()


def _kill(process: subprocess.Popen[bytes]) -> None:
    import signal

    if hasattr(os, "killpg"):
        _signal(process, os.killpg, signal.SIGKILL)
    else:
        process.kill()
