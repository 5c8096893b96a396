"""Files that somebody else wrote, opened so that they can neither block nor fill the memory; and
private folders for temporary files.

A name in a folder that was sent to us may be a pipe that nobody writes to, a link to ``/dev/zero``,
a folder, or a file of any size. Only regular files are opened, and no more than a bound is read.
Imports the standard library alone: the recorder's files are read through it too.

A temporary folder is gone afterwards, that of a killed process too: each has a file that its
process keeps locked. Whoever makes the next one removes those whose lock is free."""

import errno
import os
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from advisor.core.errors import AdvisorError

BLOCK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "a folder, not a file"),
    (stat.S_ISFIFO, errno.EINVAL, "a pipe, not a file"),
    (stat.S_ISSOCK, errno.EINVAL, "a socket, not a file"),
    (stat.S_ISCHR, errno.EINVAL, "a device, not a file"),
    (stat.S_ISBLK, errno.EINVAL, "a device, not a file"),
)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading, without waiting for anybody.

    Raises OSError: it is not there, may not be read, or is something else (``strerror`` says what);
    ValueError: no file can have that name."""
    # a pipe without a writer would keep open() waiting; for regular files the flag does nothing
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            code, what = next(
                ((code, what) for is_one, code, what in _KINDS if is_one(mode)),
                (errno.EINVAL, "not a regular file"),
            )
            kind = IsADirectoryError if code == errno.EISDIR else OSError
            raise kind(code, what, str(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Return a regular file's bytes. Raises AdvisorError if it is longer than ``max_bytes``; and
    what :func:`open_regular` raises."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise AdvisorError(
            f"{path}: larger than {format_size(max_bytes)}, too large for such a file"
        )
    return data


def read_lines(file: BinaryIO, max_bytes: int, longest: int) -> Iterator[bytes | None]:
    """Yield the lines of a file that are not blank, in its first ``max_bytes``; ``None`` for each
    that is longer than ``longest`` bytes, of which no more than that is held."""
    rest, skipping, left = b"", False, max_bytes
    while left > 0 and (block := file.read(min(BLOCK, left))):
        left -= len(block)
        *whole, rest = (rest + block).split(b"\n")
        if skipping and whole:
            skipping = False
            yield None
            del whole[0]
        for line in whole:
            if len(line) > longest:
                yield None
            elif line.strip():
                yield line
        if skipping or len(rest) > longest:
            rest, skipping = b"", True
    if skipping:
        yield None
    elif rest.strip():
        yield rest


def format_size(count: int) -> str:
    """Return a size limit as text, in MiB or KiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


MAX_CONFIG_BYTES = 256 << 10
"""Size limit of a configuration file, bytes."""
MAX_DOTS = 1000
"""Limit of dots in one of its lines: the parser's memory grows with the square of a key's parts."""


def read_toml(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises AdvisorError if it cannot be read."""
    try:
        content = read_regular(file, MAX_CONFIG_BYTES)
        if any(line.count(b".") > MAX_DOTS for line in content.split(b"\n")):
            raise AdvisorError(f"{file}: cannot be read (a key of too many parts)")
        return tomllib.loads(content.decode())
    except RecursionError:
        raise AdvisorError(f"{file}: cannot be read (nested too deeply)") from None
    except (ValueError, OSError) as error:  # the decoders' errors are ValueErrors
        raise AdvisorError(f"{file}: cannot be read ({str(error)[:200]})") from None


def tool_section(name: str, start: Path | None = None) -> tuple[Path | None, Any]:
    """Return (file, ``[tool.advisor.<name>]``) of the nearest ``pyproject.toml`` at or above
    ``start``; an empty table if there is none. Raises AdvisorError if the file cannot be read."""
    folder = (start or Path.cwd()).resolve()
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if not file.is_file():
            continue
        tool = read_toml(file).get("tool", {})
        section = tool.get("advisor", {}) if isinstance(tool, dict) else {}
        return file, section.get(name, {}) if isinstance(section, dict) else {}
    return None, {}


PREFIX = "advisor-"
_LOCK = ".lock"
MIN_AGE_SECONDS = 60.0
"""Age below which a folder may not be locked yet, seconds."""
MAX_SWEPT = 1000


@contextmanager
def scratch_folder(folder: str | Path | None = None) -> Iterator[Path]:
    """Yield a new folder (mode 0700), by default in the system's for temporary files, and remove
    it. Raises AdvisorError if there is no place for one."""
    parent = Path(folder if folder is not None else tempfile.gettempdir())
    try:
        _sweep(parent)
        inside = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise AdvisorError(f"{parent}: no temporary files there ({error.strerror})") from None
    with inside as made:
        number = _locked(Path(made, _LOCK), os.O_CREAT)
        try:
            yield Path(made)
        finally:
            if number is not None:
                os.close(number)


def _locked(file: Path, flags: int = 0) -> int | None:
    """Open a file and lock it until the process ends or closes it; ``None``: somebody else holds
    it, or this system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file in use stays in any case
        return None
    number = -1
    try:
        number = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if number >= 0:
            os.close(number)
        return None
    return number


def _sweep(parent: Path) -> None:
    """Remove folders whose process is gone."""
    with os.scandir(parent) as entries:
        ours = (entry for entry in entries if entry.name.startswith(PREFIX))
        for entry in islice(ours, MAX_SWEPT):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime < MIN_AGE_SECONDS:
                    continue
                number = _locked(Path(entry.path, _LOCK))
                if number is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(number)


def at_most(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in blocks of at most ``size``."""
    for block in blocks:
        if len(block) <= size:
            yield block
        else:
            yield from (block[i : i + size] for i in range(0, len(block), size))


def cut_lines(blocks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Yield lines without their ends, cut to so many bytes."""
    rest = b""
    for block in blocks:
        *lines, last = block.split(b"\n")
        for line in lines:
            yield (rest + line[:longest])[:longest]
            rest = b""
        rest = (rest + last[:longest])[:longest]
    if rest:
        yield rest
