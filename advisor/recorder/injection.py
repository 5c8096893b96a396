"""Recording of a program without changes to its code, from its import of torch on.

``advisor record`` sets ``PYTHONPATH`` to a folder with a sitecustomize that notices the import and
calls ``begin``, also in processes that torchrun or a script starts. Only a process that trains
creates a directory: other processes and DataLoader workers only leave a note. Each process notes
how far it came (``inject/sitecustomize.py``). If nothing was recorded, this module derives the
reason from these notes. It does not import torch."""

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
"""Variable with the number of steps after which the process ends, for the slow Scalene pass."""
Note = Callable[[str], None]
"""Function that writes a line for ``advisor record``."""


def begin(note: Note) -> None:
    """Begin to record. The directory is created when training starts. Never raises, because it runs
    within the user's import of torch."""
    try:
        _begin_recording(note)
    except Exception as error:
        note(f"problem {type(error).__name__}: {error}")
        log.warning("advisor: not recording: %s: %s", type(error).__name__, error)


def _begin_recording(note: Note) -> None:
    from advisor.recorder import api

    limit = os.environ.get(STOP_AFTER, "")
    if limit.isdecimal():
        _end_process_after(int(limit))
        return
    session = api.open_session("command", {}, lazy=True)
    if session is None:
        import torch

        note(f"problem {explain_unsupported(torch.__version__) or 'recording did not begin'}")
        return
    if multiprocessing.parent_process() is not None:
        _exclude_workers(session)
        # a forked worker ends without atexit handlers
        from multiprocessing.util import Finalize

        Finalize(None, _end_recording, (session, note, os.getpid()), exitpriority=0)
    atexit.register(_end_recording, session, note, os.getpid())


def _end_recording(session: Any, note: Note, process: int) -> None:
    """End the recording at interpreter exit, with the uncaught exception if there is one."""
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


def _exclude_workers(session: Any) -> None:
    """Stop recording in a process that turns out to be a DataLoader worker."""
    from torch.utils.data import _utils

    original = _utils.worker._worker_loop

    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        session.finish()
        return original(*args, **kwargs)

    _utils.worker._worker_loop = _worker_loop


def _end_process_after(limit: int) -> None:
    """End the process after ``limit`` steps. Nothing is recorded."""
    from advisor.recorder.tape_reader import CallCounter

    def end_process(count: int) -> None:
        if count >= limit:
            counter.stop()
            raise SystemExit(0)  # not an Exception, so hooks and most programs do not catch it

    counter = CallCounter(end_process)
    counter.start()


NOTES: Final = "ADVISOR_NOTES"
"""Variable with the folder for notes, which has one file per process."""
_MAX_FILES, _MAX_BYTES = 10_000, 64_000
"""Maximum number of notes to read, and bytes of each: a program may start many processes."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?", re.IGNORECASE)
_OPTIONS_WITH_VALUE = "cmWX"
"""Options of the interpreter that take a value. After the first two, all words belong to the
program."""
DECORATOR_ADVICE = (
    "Instead, put @advisor.profile on the training function: it needs no start-up file."
)


@contextmanager
def note_folder() -> Iterator[Path]:
    """Create a folder for the notes of a program's processes while it runs. Yields an empty path if
    that fails."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder())
        except AdvisorError:
            folder = Path()
        yield folder


def explain_unreachable(words: list[str]) -> str:
    """Return the reason why a command cannot be recorded, judging by its words, or an empty text.
    For a script with a ``#!`` line, its interpreter is checked."""
    for command in (words, _read_shebang(words[0])):
        option = _find_isolating_option(command)
        if option:
            return (
                f"python {option} skips the start-up file that begins the recording. Run it "
                f"without {option}, or put @advisor.profile on the training function."
            )
    return ""


def _read_shebang(file: str) -> list[str]:
    try:
        with Path(file).open("rb") as program:
            line = program.read(256).split(b"\n", 1)[0]
    except OSError:
        return []
    words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S" and "=" not in word]
    return words


def _find_isolating_option(words: list[str]) -> str:
    """Return the option of a Python command (``-I``, ``-E`` or ``-S``) that makes it ignore
    PYTHONPATH or start-up files, or an empty text."""
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return ""
    options = iter(words[1:])
    for word in options:
        if word == "--" or not word.startswith("-") or word == "-":
            return ""
        if word.startswith("--"):
            continue
        for position, letter in enumerate(word[1:], 1):
            if letter in "IES":
                return f"-{letter}"
            if letter in _OPTIONS_WITH_VALUE:
                if letter in "cm":
                    return ""
                if position == len(word) - 1:
                    next(options, None)
                break
    return ""


def explain_nothing_recorded(folder: Path, code: int = 0) -> str:
    """Return sentences that explain, from the notes, why nothing was recorded and what to do about
    it. ``code``: the program's exit code."""
    lines = _read_notes(folder)
    if problems := list_problems(folder):
        return f"recording stopped early: {problems[0]}."
    counts = [
        result
        for result in map(_parse_counts, _lines_with_prefix(lines, "seen "))
        if any(result.values())
    ]
    best = max(counts, key=lambda result: sum(result.values()), default=None)
    if code and not any(result["optimized"] for result in counts):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        ended = f"the program ended with {how} before a training step was seen"
        if not best:
            return f"{ended}."
        crashed = code < 0 or code == 1 or code > 128  # 1: an exception that nobody caught
        return f"{ended}, only {_describe_counts(best)}" + ("" if crashed else f" {_advise(best)}")
    if best:
        return f"no training step was seen, only {_describe_counts(best)} {_advise(best)}"
    pythons = _lines_with_prefix(lines, "without ")
    if pythons:
        return (
            f"torch was imported by a Python without advisor, {pythons[0]}. Install it there: "
            f"{install_command('record')}."
        )
    if "torch" in lines:
        return (
            "torch was imported, but no batch, forward, backward or optimizer step was seen. "
            "If the program trains in another way, end each step with advisor.step()."
        )
    if lines:
        count = sum(line.startswith("python ") for line in lines)
        return (
            f"none of the program's Python processes imported torch ({count:,} ran). Processes "
            "started without the program's environment are not seen."
        )
    return (
        "no Python process of the program read the start-up file that begins the recording. Causes "
        "are python -I, -E or -S, an emptied environment (env -i, sudo), a replaced PYTHONPATH, "
        f"a container or another machine. {DECORATOR_ADVICE}"
    )


def list_problems(folder: Path) -> list[str]:
    """Return the reasons why recording stopped early in any of the processes."""
    return _lines_with_prefix(_read_notes(folder), "problem ")


def _describe_counts(counts: dict[str, int]) -> str:
    names = (
        ("fetched", "DataLoader batch", "DataLoader batches"),
        ("forwards", "forward", "forwards"),
        ("backwards", "backward", "backwards"),
        ("optimized", "optimizer step", "optimizer steps"),
    )
    present = [
        f"{counts[key]:,} {singular if counts[key] == 1 else plural}"
        for key, singular, plural in names
        if counts[key]
    ]
    missing = [singular for key, singular, _ in names[1:] if not counts[key]]
    joined = ", ".join(present)
    return f"{joined} (no {', no '.join(missing)})." if missing else f"{joined}."


def _advise(seen: dict[str, int]) -> str:
    if seen["backwards"]:
        return (
            "If the program updates weights by hand, mark the end of each step: advisor.step() "
            "after the update."
        )
    if seen["fetched"] or seen["forwards"]:
        return (
            "A loop that does not train (inference, generate) is found after three forwards of a "
            "model. If they are not seen (in another thread, or compiled as a whole), mark where a "
            "step ends: 'import advisor', and advisor.step() at the end of each iteration."
        )
    return "End each step with advisor.step()."


def _read_notes(folder: Path) -> list[str]:
    lines: list[str] = []
    if folder == Path():
        return lines
    try:
        files = sorted(folder.glob("[!.]*"))[:_MAX_FILES]
    except OSError:
        return lines
    for note in files:
        try:
            with note.open("rb") as file:
                lines += file.read(_MAX_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
    return [line.rstrip(".") if line.startswith("problem ") else line for line in lines]


def _lines_with_prefix(lines: list[str], word: str) -> list[str]:
    return [line[len(word) :][:300] for line in lines if line.startswith(word)]


def _parse_counts(text: str) -> dict[str, int]:
    try:
        result: Any = json.loads(text)
    except ValueError:
        result = {}
    result = result if isinstance(result, dict) else {}
    keys = ("fetched", "forwards", "backwards", "optimized")
    return {key: result[key] if isinstance(result.get(key), int) else 0 for key in keys}
