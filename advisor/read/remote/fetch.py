"""Temporary local copy of a remote file, while it is read: in blocks, never whole in memory.

What breaks off goes on where it was, where the other side can do that, and from the start where it
cannot. A file counts as read when as many bytes came as were promised and it is still the same."""

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
"""Bytes requested at once, and the only part of a file in memory."""
LIMIT = 64 << 30
"""Most bytes of one file."""


@contextmanager
def open_locally(
    source: RemoteFile,
    *,
    folder: str | Path | None = None,
    max_bytes: int = LIMIT,
    timeout: float | None = None,
    progress: Callable[[str, int], None] | None = None,
    check: Callable[[bytes, str], None] | None = None,
) -> Iterator[Path]:
    """Open a local path to a file, for the time of the ``with`` block: its own if it is local, else
    a copy of the same name in a temporary folder.

    ``folder``: for the copy; default: the system's for temporary files. ``max_bytes``: its
    size at most. ``timeout``: seconds that a block may take; default ``filesystem.TIMEOUT``.
    ``progress``: called with (shown URL, bytes so far) after each block. ``check``: called with the
    first block and the copy's path before more is fetched; what it raises ends that.

    Raises AdvisorError, with one line: missing, access denied, too large, no room on the disk, cut
    off or slow in spite of several attempts."""
    if source.problem:
        raise AdvisorError(source.problem)
    if not is_url(source.at):
        yield Path(source.at)
        return
    seconds = filesystem.TIMEOUT if timeout is None else timeout
    with scratch_folder(folder) as inside:
        copy = inside / file_name(source.at)
        _Copy(source, copy, max_bytes, seconds, progress, check).make()
        yield copy


@dataclass
class _Copy:
    _source: RemoteFile
    _path: Path
    _most: int
    _timeout: float
    _progress: Callable[[str, int], None] | None
    _check: Callable[[bytes, str], None] | None
    _stream_only: bool = False
    _goes_on: bool = False
    """True if the bytes already here stay for the next attempt."""
    _same: tuple[object, ...] | None = None

    def make(self) -> None:
        """Download the file, in several attempts if needed. Raises AdvisorError."""
        failures = 0
        with self._path.open("wb") as out:
            while True:
                before = out.tell()
                try:
                    self._attempt(out)
                    return
                except AdvisorError:
                    raise
                except Exception as error:  # a file system's library may raise anything
                    if self._goes_on and out.tell() > before:
                        failures = 0
                    failures += 1
                    give_up_or_wait(error, self._source.at, failures)

    def _attempt(self, out: BinaryIO) -> None:
        in_archive = archives.split_url(self._source.at)
        if in_archive is None:
            self._plain(self._source.at, out)
        elif self._source.offset is not None:
            self._plain(in_archive[2], out, self._source.offset, self._source.size)
        else:
            self._member(*in_archive, out)

    def _plain(self, url: str, out: BinaryIO, offset: int = 0, size: int | None = None) -> None:
        """Fetch a file, or ``size`` of its bytes from an offset on."""
        system, path = file_system(url)
        info = self._info(system, path)
        if info.get("type") == "directory":
            raise IsADirectoryError
        self._refuse_changed(info)
        web = is_web(url)
        if size is None and (not web or info.get("size")):  # some servers say 0 of what they make
            size = info.get("size")
        in_parts = info.get("partial", True) and not self._stream_only
        if size is not None and (in_parts or offset):
            self._ranged(system, path, offset, int(size), out)
        else:
            self._streamed(system, path, 0 if web else BLOCK, size, out)
        with suppress(OSError, TimeoutError):  # all of it came; only a change counts
            system.invalidate_cache()
            self._refuse_changed(self._info(system, path))

    def _info(self, system: Any, path: str) -> dict[str, Any]:
        result: dict[str, Any] = call_within(self._timeout, lambda: system.info(path))
        return result

    def _refuse_changed(self, info: dict[str, Any]) -> None:
        now = version_of(info)
        if self._same is not None and now != self._same:
            raise AdvisorError(f"{self._source.url}: changed while it was read; try again")
        self._same = now

    def _ranged(self, system: Any, path: str, offset: int, size: int, out: BinaryIO) -> None:
        """Fetch the missing bytes, block by block."""
        self._refuse_large(size, size - out.tell())
        self._goes_on = True
        file = call_within(
            self._timeout, lambda: system.open(path, "rb", block_size=BLOCK, cache_type="none")
        )
        try:
            if not can_seek(file, offset + out.tell()):
                self._stream_only = True
                raise CutOffError("it can only be read from its start")
            while (left := size - out.tell()) > 0:
                block = self._block(file, min(BLOCK, left))
                if not block:
                    raise CutOffError(f"after {out.tell():,} of {size:,} bytes")
                self._write(out, block)
        except ValueError:  # what fsspec says where a server has no ranges
            if self._stream_only:
                raise
            self._stream_only = True
            raise CutOffError("it can only be read from its start") from None
        finally:
            _close(file)

    def _streamed(
        self, system: Any, path: str, block_size: int, size: int | None, out: BinaryIO
    ) -> None:
        """Fetch a file from its start. ``block_size``: 0 reads a web server's answer directly."""
        self._from_start(out)
        if size is not None:
            self._refuse_large(size, size)
        file = call_within(self._timeout, lambda: system.open(path, "rb", block_size=block_size))
        try:
            self._drain(file, out)
        finally:
            _close(file)
        self._refuse_short(out, size)

    def _member(self, kind: str, name: str, archive: str, out: BinaryIO) -> None:
        self._from_start(out)
        member = archives.open_member(kind, archive, name)
        with ExitStack() as opened:  # which raises the archive's own words for damage
            file, size = call_within(
                max(self._timeout, LISTING), lambda: opened.enter_context(member)
            )
            self._refuse_large(size, size)
            self._drain(file, out)
        self._refuse_short(out, size)

    def _from_start(self, out: BinaryIO) -> None:
        self._goes_on = False
        out.seek(0)
        out.truncate()

    def _drain(self, file: Any, out: BinaryIO) -> None:
        while block := self._block(file, BLOCK):
            self._refuse_large(out.tell() + len(block), len(block))
            self._write(out, block)

    def _block(self, file: Any, size: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end, within the timeout for all of them: a file
        that comes byte by byte is as good as none."""

        def read() -> bytes:
            parts: list[bytes] = []
            left = size
            while left > 0 and (part := file.read(left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

        return call_within(self._timeout, read)

    def _refuse_short(self, out: BinaryIO, size: int | None) -> None:
        if size is not None and out.tell() != size:
            raise CutOffError(f"{out.tell():,} of {size:,} bytes came")

    def _refuse_large(self, size: int, coming: int) -> None:
        if size > self._most:
            raise AdvisorError(f"{self._source.url}: larger than {decimal_size(self._most)}")
        free = shutil.disk_usage(self._path.parent).free
        if coming > free - ROOM_LEFT:
            raise AdvisorError(
                f"{self._source.url}: {decimal_size(size)}, and {self._path.parent.parent} has "
                f"{decimal_size(free)} free; name a larger disk in TMPDIR"
            )

    def _write(self, out: BinaryIO, block: bytes) -> None:
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
