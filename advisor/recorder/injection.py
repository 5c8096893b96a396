"""Recording of a program without a change to its code: begins once it has imported torch.

``advisor record`` sets ``PYTHONPATH`` to a folder with a sitecustomize that notices it and calls
``begin``; so the processes that torchrun or a script starts are watched too. A directory is only
made by one that trains: helpers and DataLoader workers leave nothing but a note of what was seen.
Each process notes how far it came (``inject/sitecustomize.py``), and that is read here, for what is
said if nothing was recorded. Imports no torch."""

import atexit
import json
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from advisor.core.errors import AdvisorError, install_command
from advisor.core.files import scratch_folder
from advisor.recorder.options import explain_unsupported

log = logging.getLogger("advisor")

STOP_AFTER = "ADVISOR_STOP_AFTER"
"""Variable with the steps after which the process ends: Scalene's pass is too slow for all."""
Note = Callable[[str], None]
"""Function that writes a line for ``advisor record``."""


def begin(note: Note) -> None:
    """Begin to record; the directory is made when training starts. Never raises: the user's import
    of torch is around it."""
    try:
        _begin(note)
    except Exception as error:
        note(f"problem {type(error).__name__}: {error}")
        log.warning("advisor: not recording: %s: %s", type(error).__name__, error)


def _begin(note: Note) -> None:
    from advisor.recorder import api

    limit = os.environ.get(STOP_AFTER, "")
    if limit.isdecimal():
        _leave_after(int(limit))
        return
    session = api.open_session("command", {}, lazy=True)
    if session is None:
        import torch

        note(f"problem {explain_unsupported(torch.__version__) or 'it did not begin'}")
        return
    if multiprocessing.parent_process() is not None:
        _leave_workers_alone(session)
        # a forked one ends without the handlers of atexit
        from multiprocessing.util import Finalize

        Finalize(None, _end, (session, note, os.getpid()), exitpriority=0)
    atexit.register(_end, session, note, os.getpid())


def _end(session: Any, note: Note, process: int) -> None:
    """End the recording with the interpreter; an uncaught exception is its last one."""
    if os.getpid() != process:
        return
    from advisor.recorder import api

    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    session.finish(error if isinstance(error, BaseException) else None)
    api.restore_kineto_log()
    if session.problem is not None:
        note(f"problem {session.problem}")
    elif session.writer.folder is None:
        note(f"seen {json.dumps(session.steps.event_counts)}")


def _leave_workers_alone(session: Any) -> None:
    """Stop recording in a process that turns out to be a DataLoader worker."""
    from torch.utils.data import _utils

    original = _utils.worker._worker_loop

    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        session.finish()
        return original(*args, **kwargs)

    _utils.worker._worker_loop = _worker_loop


def _leave_after(limit: int) -> None:
    """End the process after ``limit`` steps. Nothing is recorded."""
    from advisor.recorder.tape_reader import CallCounter

    def ended(count: int) -> None:
        if count >= limit:
            counter.stop()
            raise SystemExit(0)  # no Exception: hooks let it through, and so do most programs

    counter = CallCounter(ended)
    counter.start()


NOTES: Final = "ADVISOR_NOTES"
"""Variable with the folder for notes, one file per process."""
MAX_FILES, MAX_BYTES = 10_000, 64_000
"""Most notes read, and bytes of each: a program may start any number of processes."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?", re.IGNORECASE)
_WITH_VALUE = "cmWX"
"""Options of the interpreter that take a value; after the first two, all words are the
program's."""
DECORATE = "Put @advisor.profile on the function that trains instead: it needs no start-up file."


@contextmanager
def note_folder() -> Iterator[Path]:
    """Make a folder for the notes of a program's processes, while it runs. Yields an empty path if
    none can be made."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder())
        except AdvisorError:
            folder = Path()
        yield folder


def explain_unreachable(words: list[str]) -> str:
    """Return the reason why a command cannot be recorded, judging by its words; empty if there is
    none. A script with a first line (``#!``) is taken for its interpreter."""
    for command in (words, _shebang(words[0])):
        option = _isolating(command)
        if option:
            return (
                f"python {option} skips the start-up file by which recording begins: run it "
                f"without {option}, or put @advisor.profile on the function that trains."
            )
    return ""


def _shebang(file: str) -> list[str]:
    try:
        with Path(file).open("rb") as program:
            first = program.read(256).split(b"\n", 1)[0]
    except OSError:
        return []
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S" and "=" not in word]
    return words


def _isolating(words: list[str]) -> str:
    """Return the option of a Python command that keeps it from reading PYTHONPATH or start-up
    files: ``-I``, ``-E``, ``-S``; empty if it has none."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return ""
    rest = iter(words[1:])
    for word in rest:
        if word == "--" or not word.startswith("-") or word == "-":
            return ""
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in "IES":
                return f"-{letter}"
            if letter in _WITH_VALUE:
                if letter in "cm":
                    return ""
                if place == len(word) - 1:
                    next(rest, None)
                break
    return ""


def explain_nothing_recorded(folder: Path, code: int = 0) -> str:
    """Return some sentences on why nothing was recorded, from the notes, and what to do about it.
    ``code``: the program's exit code."""
    lines = _read(folder)
    if failed := list_problems(folder):
        return f"recording stopped by itself: {failed[0]}."
    seen = [
        result
        for result in map(_counts, _lines_with_prefix(lines, "seen "))
        if any(result.values())
    ]
    most = max(seen, key=lambda result: sum(result.values()), default=None)
    if code and not any(result["optimized"] for result in seen):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        ended = f"the program ended with {how} before a training step was seen"
        if not most:
            return f"{ended}."
        crashed = code < 0 or code == 1 or code > 128  # 1: an exception that nobody caught
        return f"{ended}, only {_describe_counts(most)}" + ("" if crashed else f" {_advice(most)}")
    if most:
        return f"no training step was seen, only {_describe_counts(most)} {_advice(most)}"
    without = _lines_with_prefix(lines, "without ")
    if without:
        return (
            f"torch was imported by a Python that has no advisor, {without[0]}. Install it there: "
            f"{install_command('record')}."
        )
    if "torch" in lines:
        return (
            "torch was imported, but no batch, forward, backward or optimizer's step was seen. "
            "End each step with advisor.step() where that happens in a way of its own."
        )
    if lines:
        count = sum(line.startswith("python ") for line in lines)
        return (
            f"none of the program's Python processes imported torch ({count:,} ran). One that is "
            "started without the program's environment is not seen."
        )
    return (
        "no Python of the program read the start-up file by which recording begins. That is so "
        "with python -I, -E or -S, where the environment is emptied (env -i, sudo) or PYTHONPATH "
        f"is set anew, and in containers and on other machines. {DECORATE}"
    )


def list_problems(folder: Path) -> list[str]:
    """Return the reasons why recording stopped early, in any of the processes."""
    return _lines_with_prefix(_read(folder), "problem ")


def _describe_counts(seen: dict[str, int]) -> str:
    names = (
        ("fetched", "a DataLoader's batch", "batches of a DataLoader"),
        ("forwards", "forward", "forwards"),
        ("backwards", "backward", "backwards"),
        ("optimized", "optimizer's step", "optimizer's steps"),
    )
    there = [
        f"{seen[key]:,} {item if seen[key] == 1 else many}"
        for key, item, many in names
        if seen[key]
    ]
    missing = [item for key, item, _ in names[1:] if not seen[key]]
    text = ", ".join(there).replace("1 a ", "1 ")
    return f"{text} (no {', no '.join(missing)})." if missing else f"{text}."


def _advice(seen: dict[str, int]) -> str:
    if seen["backwards"]:
        return (
            "If the weights are updated by hand, say where a step ends: advisor.step() after the "
            "update."
        )
    if seen["fetched"] or seen["forwards"]:
        return (
            "A loop that does not train (inference, generate) is found from three forwards of a "
            "model on; where they are not seen (in another thread, compiled whole), say where a "
            "step ends: 'import advisor', and advisor.step() at the end of each iteration."
        )
    return "End each step with advisor.step()."


def _read(folder: Path) -> list[str]:
    lines: list[str] = []
    if folder == Path():
        return lines
    try:
        files = sorted(folder.glob("[!.]*"))[:MAX_FILES]
    except OSError:
        return lines
    for note in files:
        try:
            with note.open("rb") as file:
                lines += file.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
    return [line.rstrip(".") if line.startswith("problem ") else line for line in lines]


def _lines_with_prefix(lines: list[str], word: str) -> list[str]:
    return [line[len(word) :][:300] for line in lines if line.startswith(word)]


def _counts(text: str) -> dict[str, int]:
    try:
        result: Any = json.loads(text)
    except ValueError:
        result = {}
    result = result if isinstance(result, dict) else {}
    keys = ("fetched", "forwards", "backwards", "optimized")
    return {key: result[key] if isinstance(result.get(key), int) else 0 for key in keys}
