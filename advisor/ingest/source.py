"""Bytes of a trace, whatever they are packed in: a bounded, damage-tolerant stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from advisor.errors import AdvisorError

READ = 1 << 20
DEFAULT_LIMIT = 16 << 30
"""Uncompressed bytes that one trace may have before reading stops (``--max-size``)."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZIP = b"PK\x03\x04"


@dataclass
class Source:
    """A trace's uncompressed bytes in blocks of about a megabyte.

    ``truncated`` and ``damage`` are set while iterating: a stream that ends early or is corrupt
    yields what could be unpacked and says so, it does not raise.
    """

    path: str
    limit: int = DEFAULT_LIMIT
    truncated: bool = False
    damage: str | None = None
    bytes_read: int = 0
    given: bytes | None = field(default=None, repr=False)
    """The packed bytes themselves, instead of a file of that name."""

    def blocks(self) -> Iterator[bytes]:
        """Yield uncompressed blocks. Raises AdvisorError: unreadable file, or over the limit."""
        file = self._open()
        try:
            head = file.read(READ)
            if not head:
                raise AdvisorError(f"{self.path}: the file is empty; record the trace again")
            if head.startswith(_GZIP):
                stream = self._gunzip(head, file)
            elif head.startswith(_ZSTD):
                stream = self._unzstd(head, file)
            elif head.startswith(_ZIP):
                raise AdvisorError(f"{self.path}: a zip archive; unpack it and give the JSON in it")
            else:
                stream = self._plain(head, file)
            for block in stream:
                self.bytes_read += len(block)
                if self.bytes_read > self.limit:
                    raise AdvisorError(
                        f"{self.path}: unpacks to more than {self.limit / 1e9:.1f} GB; "
                        "if that is expected, raise the limit with --max-size"
                    )
                yield block
        except OSError as error:
            raise AdvisorError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        finally:
            if self.path != "-":
                file.close()

    def _open(self) -> BinaryIO:
        if self.given is not None:
            return BytesIO(self.given)
        if self.path == "-":
            return sys.stdin.buffer
        try:
            return Path(self.path).open("rb")
        except FileNotFoundError:
            raise AdvisorError(f"{self.path}: no such file or directory") from None
        except OSError as error:
            raise AdvisorError(
                f"{self.path}: cannot be opened ({error.strerror or error})"
            ) from None
        except ValueError as error:
            raise AdvisorError(f"{self.path!r}: not a file name ({error})") from None

    @staticmethod
    def _plain(head: bytes, file: BinaryIO) -> Iterator[bytes]:
        while head:
            yield head
            head = file.read(READ)

    def _gunzip(self, head: bytes, file: BinaryIO) -> Iterator[bytes]:
        from isal import isal_zlib

        unpack = isal_zlib.decompressobj(wbits=31)
        data = head
        try:
            while True:
                block = unpack.decompress(data, READ)
                if block:
                    yield block
                data = unpack.unconsumed_tail
                if unpack.eof:
                    data = unpack.unused_data.lstrip(b"\0") or file.read(READ).lstrip(b"\0")
                    if not data.startswith(_GZIP):
                        return  # padding or other trailing bytes, which gunzip ignores too
                    unpack = isal_zlib.decompressobj(wbits=31)
                elif not data and len(block) < READ:
                    data = file.read(READ)
                    if not data:
                        self.truncated = True
                        return
        except isal_zlib.error as error:
            self.truncated = True
            self.damage = f"damaged gzip ({error})"

    def _unzstd(self, head: bytes, file: BinaryIO) -> Iterator[bytes]:
        import zstandard

        joined = _Joined(head, file)
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(
            joined, read_across_frames=True
        )
        try:
            while block := reader.read(READ):
                yield block
        except zstandard.ZstdError as error:
            self.truncated = True
            self.damage = f"damaged zstd ({error})"


class _Joined:
    """The bytes already read, then the rest of the file, as one readable object."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self._head = head
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if self._head:
            part = self._head if size < 0 else self._head[:size]
            self._head = self._head[len(part) :]
            return part
        return self._file.read(size)
