"""Safe reading of untrusted files, which can neither block nor fill the memory, and private folders
for temporary files.

A name in a folder from others may be a pipe without a writer, a link to ``/dev/zero``, a folder, or
a file of any size. Only regular files are opened, and only a limited size is read. Imports only the
standard library, because the recorder's files are read through it too.

Temporary folders are removed even if their process is killed. Each has a file that its process
keeps locked. The next process that creates a folder removes those whose lock is free."""

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
_FILE_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "a folder, not a file"),
    (stat.S_ISFIFO, errno.EINVAL, "a pipe, not a file"),
    (stat.S_ISSOCK, errno.EINVAL, "a socket, not a file"),
    (stat.S_ISCHR, errno.EINVAL, "a device, not a file"),
    (stat.S_ISBLK, errno.EINVAL, "a device, not a file"),
)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading, without blocking.

    Raises OSError if it is missing, unreadable, or not a regular file (see ``strerror``), and
    ValueError for an invalid name."""
    # a pipe without a writer would keep open() waiting; for regular files the flag does nothing
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    )
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            code, description = next(
                ((code, description) for is_one, code, description in _FILE_KINDS if is_one(mode)),
                (errno.EINVAL, "not a regular file"),
            )
            kind = IsADirectoryError if code == errno.EISDIR else OSError
            raise kind(code, description, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Return a regular file's bytes. Raises AdvisorError if it is longer than ``max_bytes``, and
    the errors of :func:`open_regular`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise AdvisorError(
            f"{path}: larger than {format_size(max_bytes)}, too large for such a file"
        )
    return data


def read_lines(file: BinaryIO, max_bytes: int, longest: int) -> Iterator[bytes | None]:
    """Yield the non-blank lines in the first ``max_bytes`` of a file. Yield ``None`` for a line
    longer than ``longest`` bytes, of which no more is kept in memory."""
    partial, skipping, remaining = b"", False, max_bytes
    while remaining > 0 and (block := file.read(min(BLOCK, remaining))):
        remaining -= len(block)
        *lines, partial = (partial + block).split(b"\n")
        if skipping and lines:
            skipping = False
            yield None
            del lines[0]
        for line in lines:
            if len(line) > longest:
                yield None
            elif line.strip():
                yield line
        if skipping or len(partial) > longest:
            partial, skipping = b"", True
    if skipping:
        yield None
    elif partial.strip():
        yield partial


def format_size(count: int) -> str:
    """Return a size limit as text, in MiB or KiB."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


MAX_CONFIG_BYTES = 256 << 10
"""Maximum size of a configuration file, bytes."""
MAX_DOTS = 1000
"""Maximum number of dots in a line of a configuration file. The parser's memory grows with the
square of a key's parts."""


def read_toml(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises AdvisorError if it cannot be read."""
    try:
        content = read_regular(file, MAX_CONFIG_BYTES)
        if any(line.count(b".") > MAX_DOTS for line in content.split(b"\n")):
            raise AdvisorError(f"{file}: cannot be read (a key with too many parts)")
        return tomllib.loads(content.decode())
    except RecursionError:
        raise AdvisorError(f"{file}: cannot be read (nested too deeply)") from None
    except (ValueError, OSError) as error:  # the decoders' errors are ValueErrors
        raise AdvisorError(f"{file}: cannot be read ({str(error)[:200]})") from None


def tool_section(name: str, start: Path | None = None) -> tuple[Path | None, Any]:
    """Return (file, ``[tool.advisor.<name>]``) of the nearest ``pyproject.toml`` at or above
    ``start``, or an empty table if there is none. Raises AdvisorError if the file cannot be
    read."""
    folder = (start or Path.cwd()).resolve()
    for parent in (folder, *folder.parents):
        file = parent / "pyproject.toml"
        if not file.is_file():
            continue
        tool = read_toml(file).get("tool", {})
        section = tool.get("advisor", {}) if isinstance(tool, dict) else {}
        return file, section.get(name, {}) if isinstance(section, dict) else {}
    return None, {}


PREFIX = "advisor-"
_LOCK_NAME = ".lock"
MIN_AGE_SECONDS = 60.0
"""Age below which a folder may not be locked yet, seconds."""
MAX_CHECKED_FOLDERS = 1000


@contextmanager
def scratch_folder(folder: str | Path | None = None) -> Iterator[Path]:
    """Yield a new folder (mode 0700), by default in the system's temporary folder, and remove it.
    Raises AdvisorError if it cannot be created."""
    parent = Path(folder if folder is not None else tempfile.gettempdir())
    try:
        _remove_abandoned(parent)
        temporary = tempfile.TemporaryDirectory(
            prefix=PREFIX, dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise AdvisorError(f"{parent}: cannot create temporary files ({error.strerror})") from None
    with temporary as created:
        lock = _lock_file(Path(created, _LOCK_NAME), os.O_CREAT)
        try:
            yield Path(created)
        finally:
            if lock is not None:
                os.close(lock)


def _lock_file(file: Path, flags: int = 0) -> int | None:
    """Open a file and lock it until the process ends or closes it. Return ``None`` if another
    process has locked it, or if the system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file in use is never removed
        return None
    descriptor = -1
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Remove folders whose process has ended."""
    with os.scandir(parent) as entries:
        candidates = (entry for entry in entries if entry.name.startswith(PREFIX))
        for entry in islice(candidates, MAX_CHECKED_FOLDERS):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime < MIN_AGE_SECONDS:
                    continue
                lock = _lock_file(Path(entry.path, _LOCK_NAME))
                if lock is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def at_most(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in blocks of at most ``size`` bytes."""
    for block in blocks:
        if len(block) <= size:
            yield block
        else:
            yield from (block[i : i + size] for i in range(0, len(block), size))


def cut_lines(blocks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Yield lines without their line ends, cut to ``longest`` bytes."""
    partial = b""
    for block in blocks:
        *lines, last = block.split(b"\n")
        for line in lines:
            yield (partial + line[:longest])[:longest]
            partial = b""
        partial = (partial + last[:longest])[:longest]
    if partial:
        yield partial
