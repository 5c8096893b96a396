"""Temporary local copy of a remote file while it is read, fetched in blocks.

An interrupted transfer resumes where it stopped if the server supports that, else from the start. A
transfer is complete if all announced bytes arrived and the file did not change meanwhile."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from advisor.core.errors import AdvisorError
from advisor.core.files import scratch_folder
from advisor.read.remote import archives, filesystem
from advisor.read.remote.filesystem import (
    ROOM_LEFT,
    CutOffError,
    call_within,
    can_seek,
    file_system,
    give_up_or_wait,
    version_of,
)
from advisor.read.remote.places import LISTING
from advisor.read.remote.urls import RemoteFile, file_name, is_url, is_web
from advisor.read.source import decimal_size

BLOCK = 4 << 20
"""Number of bytes requested at a time. Only one block of a file is in memory."""
_MAX_BYTES = 64 << 30
"""Maximum size of a file, bytes."""


@contextmanager
def open_locally(
    source: RemoteFile,
    *,
    folder: str | Path | None = None,
    max_bytes: int = _MAX_BYTES,
    timeout: float | None = None,
    progress: Callable[[str, int], None] | None = None,
    check: Callable[[bytes, str], None] | None = None,
) -> Iterator[Path]:
    """Yield a local path of a file for the ``with`` block: its own path if it is local, else the
    path of a copy with the same name in a temporary folder.

    ``folder``: for the copy; default: the system's temporary folder. ``max_bytes``: maximum size.
    ``timeout``: seconds that a block may take; default ``filesystem.TIMEOUT``. ``progress``: called
    with (displayed URL, bytes so far) after each block. ``check``: called with the first block and
    the copy's path before more is fetched; an error that it raises ends the transfer.

    Raises AdvisorError, with one line, if the file is missing, access is denied, it is too large,
    the disk is full, or it is cut off or slow after several attempts."""
    if source.problem:
        raise AdvisorError(source.problem)
    if not is_url(source.at):
        yield Path(source.at)
        return
    seconds = filesystem.TIMEOUT if timeout is None else timeout
    with scratch_folder(folder) as inside:
        copy = inside / file_name(source.at)
        _Transfer(source, copy, max_bytes, seconds, progress, check).make()
        yield copy


@dataclass
class _Transfer:
    _source: RemoteFile
    _path: Path
    _max_bytes: int
    _timeout: float
    _progress: Callable[[str, int], None] | None
    _check: Callable[[bytes, str], None] | None
    _stream_only: bool = False
    _keeps_bytes: bool = False
    """Whether the bytes fetched so far are kept for the next attempt."""
    _version: tuple[object, ...] | None = None

    def make(self) -> None:
        """Download the file, in several attempts if necessary. Raises AdvisorError."""
        failures = 0
        with self._path.open("wb") as out:
            while True:
                before = out.tell()
                try:
                    self._try_once(out)
                    return
                except AdvisorError:
                    raise
                except Exception as error:  # a file system's library may raise anything
                    if self._keeps_bytes and out.tell() > before:
                        failures = 0
                    failures += 1
                    give_up_or_wait(error, self._source.at, failures)

    def _try_once(self, out: BinaryIO) -> None:
        in_archive = archives.split_url(self._source.at)
        if in_archive is None:
            self._fetch_file(self._source.at, out)
        elif self._source.offset is not None:
            self._fetch_file(in_archive[2], out, self._source.offset, self._source.size)
        else:
            self._fetch_member(*in_archive, out)

    def _fetch_file(
        self, url: str, out: BinaryIO, offset: int = 0, size: int | None = None
    ) -> None:
        """Fetch a file, or ``size`` bytes of it from an offset on."""
        system, path = file_system(url)
        info = self._get_info(system, path)
        if info.get("type") == "directory":
            raise IsADirectoryError
        self._refuse_changed(info)
        web = is_web(url)
        if size is None and (
            not web or info.get("size")
        ):  # some servers report 0 for generated files
            size = info.get("size")
        in_parts = info.get("partial", True) and not self._stream_only
        if size is not None and (in_parts or offset):
            self._fetch_ranges(system, path, offset, int(size), out)
        else:
            self._fetch_stream(system, path, 0 if web else BLOCK, size, out)
        with suppress(OSError, TimeoutError):  # all bytes arrived, so only a change matters
            system.invalidate_cache()
            self._refuse_changed(self._get_info(system, path))

    def _get_info(self, system: Any, path: str) -> dict[str, Any]:
        result: dict[str, Any] = call_within(self._timeout, lambda: system.info(path))
        return result

    def _refuse_changed(self, info: dict[str, Any]) -> None:
        now = version_of(info)
        if self._version is not None and now != self._version:
            raise AdvisorError(f"{self._source.url}: changed while it was read; try again")
        self._version = now

    def _fetch_ranges(self, system: Any, path: str, offset: int, size: int, out: BinaryIO) -> None:
        """Fetch the missing bytes, block by block."""
        self._refuse_large(size, size - out.tell())
        self._keeps_bytes = True
        file = call_within(
            self._timeout, lambda: system.open(path, "rb", block_size=BLOCK, cache_type="none")
        )
        try:
            if not can_seek(file, offset + out.tell()):
                self._stream_only = True
                raise CutOffError("it can only be read from its start")
            while (missing := size - out.tell()) > 0:
                block = self._read_block(file, min(BLOCK, missing))
                if not block:
                    raise CutOffError(f"after {out.tell():,} of {size:,} bytes")
                self._write_block(out, block)
        except ValueError:  # fsspec raises it if a server does not support ranges
            if self._stream_only:
                raise
            self._stream_only = True
            raise CutOffError("it can only be read from its start") from None
        finally:
            _close(file)

    def _fetch_stream(
        self, system: Any, path: str, block_size: int, size: int | None, out: BinaryIO
    ) -> None:
        """Fetch a file from its start. ``block_size``: 0 reads a web server's response directly."""
        self._restart(out)
        if size is not None:
            self._refuse_large(size, size)
        file = call_within(self._timeout, lambda: system.open(path, "rb", block_size=block_size))
        try:
            self._copy_all(file, out)
        finally:
            _close(file)
        self._refuse_short(out, size)

    def _fetch_member(self, kind: str, name: str, archive: str, out: BinaryIO) -> None:
        self._restart(out)
        member = archives.open_member(kind, archive, name)
        with ExitStack() as opened:  # it raises the archive's message for damage
            file, size = call_within(
                max(self._timeout, LISTING), lambda: opened.enter_context(member)
            )
            self._refuse_large(size, size)
            self._copy_all(file, out)
        self._refuse_short(out, size)

    def _restart(self, out: BinaryIO) -> None:
        self._keeps_bytes = False
        out.seek(0)
        out.truncate()

    def _copy_all(self, file: Any, out: BinaryIO) -> None:
        while block := self._read_block(file, BLOCK):
            self._refuse_large(out.tell() + len(block), len(block))
            self._write_block(out, block)

    def _read_block(self, file: Any, size: int) -> bytes:
        """Read ``size`` bytes (fewer only at the end) within the timeout for the whole block, so
        that a file that arrives byte by byte fails."""

        def read() -> bytes:
            parts: list[bytes] = []
            remaining = size
            while remaining > 0 and (part := file.read(remaining)):
                parts.append(part)
                remaining -= len(part)
            return b"".join(parts)

        return call_within(self._timeout, read)

    def _refuse_short(self, out: BinaryIO, size: int | None) -> None:
        if size is not None and out.tell() != size:
            raise CutOffError(f"{out.tell():,} of {size:,} bytes came")

    def _refuse_large(self, size: int, coming: int) -> None:
        if size > self._max_bytes:
            raise AdvisorError(f"{self._source.url}: larger than {decimal_size(self._max_bytes)}")
        free = shutil.disk_usage(self._path.parent).free
        if coming > free - ROOM_LEFT:
            raise AdvisorError(
                f"{self._source.url}: {decimal_size(size)}, and {self._path.parent.parent} has "
                f"{decimal_size(free)} free; name a larger disk in TMPDIR"
            )

    def _write_block(self, out: BinaryIO, block: bytes) -> None:
        if self._check is not None and not out.tell():
            try:
                self._check(block, str(self._path))
            except AdvisorError as error:
                why = str(error).replace(str(self._path), self._source.url)
                raise AdvisorError(why) from None
        try:
            out.write(block)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "no room" if full else error.strerror or str(error)
            raise AdvisorError(
                f"{self._source.url}: {self._path.parent.parent} takes no copy ({why}); name "
                "another disk in TMPDIR"
            ) from None
        if self._progress is not None:
            self._progress(self._source.url, out.tell())


def _close(file: Any) -> None:
    """Close a file, without waiting for a server that does not answer."""
    with suppress(Exception):
        call_within(1.0, file.close)
