"""Reader of the members of a remote zip or tar archive, in place and never unpacked to a folder.

Archives are untrusted. The table of contents is limited in size, a member is a stream of bytes
whose name never becomes part of a path, and links are ignored."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, cast

from advisor.core.errors import AdvisorError
from advisor.read.remote.filesystem import ROOM_LEFT, can_seek, file_system, version_of
from advisor.read.remote.urls import redact_url

KINDS = ("zip", "tar")
MAX_ARCHIVE_MEMBERS = 100_000
MAX_REQUEST_BYTES = 16 << 20
"""Maximum number of bytes that an archive's reader may request at once, for its table of
contents."""
_OTHER_METHODS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
MAX_OFFSET = 1 << 40
"""Maximum number of bytes in an archive before a member."""
_ZIP_BLOCK, _TAR_BLOCK, _UNPACK_BLOCK = 1 << 20, 1 << 16, 4 << 20


class Member(NamedTuple):
    name: str
    size: int
    offset: int | None
    """Offset of its bytes in the archive, if they are stored uncompressed."""


def split_url(url: str) -> tuple[str, str, str] | None:
    """Split ``zip://a/*.json::s3://b/c.zip`` into ``("zip", "a/*.json", "s3://b/c.zip")``. ``None``
    if the URL is not in an archive."""
    member_url, chain_mark, archive = url.partition("::")
    kind, scheme_mark, path = member_url.partition("://")
    if not chain_mark or not scheme_mark or kind.lower() not in KINDS:
        return None
    return kind.lower(), path, archive


def list_members(kind: str, archive: str) -> list[Member]:
    """Return the regular files of an archive. Raises AdvisorError if there are too many or the
    archive cannot be read, and the errors of its file system."""
    with _open_archive(kind, archive) as open_archive:
        return list(open_archive.members.values())


@contextmanager
def open_member(kind: str, archive: str, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a member: yield a stream of its unpacked bytes, and their number. Raises
    FileNotFoundError, and the errors of :func:`list_members`."""
    with _open_archive(kind, archive) as open_archive:
        if name not in open_archive.members:
            raise FileNotFoundError(name)
        with open_archive.stream(name) as stream:
            yield stream, open_archive.members[name].size


class _Archive:
    """Open archive. Its table of contents is read once, and a packed tar is unpacked once."""

    def __init__(self, kind: str, archive: str) -> None:
        self._archive = archive
        self._exit_stack = ExitStack()
        self.version = _archive_version(archive)
        self._infos: dict[str, zipfile.ZipInfo | tarfile.TarInfo] = {}
        self.members: dict[str, Member] = {}
        """Regular files by name. Of equal names, the first one in a tar and the last one in a
        zip."""
        try:
            file = _LimitedFile(self._exit_stack.enter_context(_open_file(archive, kind)), archive)
            if kind == "zip":
                self._zip = zipfile.ZipFile(cast(BinaryIO, file))
                self._add_zip(self._zip.infolist())
            else:
                self._add_tar(file)
        except BaseException:
            self.close()
            raise

    def _add_zip(self, infos: list[zipfile.ZipInfo]) -> None:
        _refuse_many(len(infos), self._archive)
        for info in infos:
            if not info.is_dir():
                self._infos[info.filename] = info
                self.members[info.filename] = Member(info.filename, info.file_size, None)

    def _add_tar(self, file: _LimitedFile) -> None:
        first_bytes = file.read(6)
        file.seek(0)
        opener = next(
            (opener for magic, opener in _UNPACKERS.items() if first_bytes.startswith(magic)), None
        )
        tar_file: Any = file
        if opener is not None:
            tar_file = self._exit_stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            _unpack(opener(file, "rb"), tar_file, self._archive)
            tar_file = _LimitedFile(tar_file, self._archive)
        self._tar = tarfile.open(fileobj=cast(BinaryIO, tar_file), mode="r:")  # noqa: SIM115
        for count, header in enumerate(self._tar):
            _refuse_many(count, self._archive)
            if header.isreg() and not header.issparse() and header.name not in self.members:
                offset = header.offset_data if opener is None else None
                self._infos[header.name] = header
                self.members[header.name] = Member(header.name, header.size, offset)

    def stream(self, name: str) -> BinaryIO:
        """Open a member. Raises AdvisorError if it cannot be unpacked in small parts."""
        info = self._infos[name]
        if isinstance(info, tarfile.TarInfo):
            return cast(BinaryIO, self._tar.extractfile(info))
        if info.flag_bits & 1:
            raise AdvisorError(f"{redact_url(self._archive)}: needs a password; unpack it first")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile unpacks whole blocks of these methods: kilobytes may become gigabytes
            method = _OTHER_METHODS.get(info.compress_type, "an unknown method")
            raise AdvisorError(
                f"{redact_url(self._archive)}: a member packed with {method}; pack it with deflate"
            )
        return cast(BinaryIO, self._zip.open(info))

    def close(self) -> None:
        self._exit_stack.close()


_cached_archives: dict[tuple[str, str], _Archive] = {}
"""Archive that was read last, kept while it is not in use."""


@contextmanager
def _open_archive(kind: str, archive: str) -> Iterator[_Archive]:
    """Open an archive, reusing the one read last if it is the same and unchanged."""
    with _explain_damage(archive):
        open_archive = _cached_archives.pop((kind, archive), None)
        if open_archive is not None and open_archive.version != _archive_version(archive):
            open_archive.close()
            open_archive = None
        if open_archive is None:
            open_archive = _Archive(kind, archive)
        try:
            yield open_archive
        except BaseException:
            open_archive.close()  # its position in the file is unknown
            raise
        while _cached_archives:
            with suppress(KeyError):
                _cached_archives.popitem()[1].close()
        _cached_archives[kind, archive] = open_archive


def _archive_version(archive: str) -> tuple[object, ...]:
    system, path = file_system(archive)
    with suppress(Exception):  # not all file systems cache listings
        system.invalidate_cache()
    return version_of(system.info(path))


def _unpack(packed: Any, plain: Any, archive: str) -> None:
    """Unpack a tar to disk, so that members are found without unpacking all earlier members again.
    Raises AdvisorError if there is not enough space."""
    folder = tempfile.gettempdir()
    while block := packed.read(_UNPACK_BLOCK):
        if shutil.disk_usage(folder).free < ROOM_LEFT:
            raise AdvisorError(
                f"{redact_url(archive)}: {folder} has no room to unpack it; "
                "name a larger disk in TMPDIR"
            )
        plain.write(block)
    plain.seek(0)


class _LimitedFile:
    """File that limits how much a reader may request at once, because lengths stated in an archive
    are not trusted."""

    def __init__(self, file: Any, archive: str) -> None:
        self._open_file = file
        self._archive = archive

    def read(self, size: int = -1) -> bytes:
        request_size = MAX_REQUEST_BYTES + 1 if size < 0 else size
        data = (
            cast(bytes, self._open_file.read(request_size)) if size <= MAX_REQUEST_BYTES else None
        )
        if data is None or len(data) > MAX_REQUEST_BYTES:
            raise AdvisorError(f"{redact_url(self._archive)}: its table of contents is too long")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset > MAX_OFFSET:
            raise AdvisorError(f"{redact_url(self._archive)}: its members are too long")
        return cast(int, self._open_file.seek(offset, whence))

    def tell(self) -> int:
        return cast(int, self._open_file.tell())

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._open_file.close()


@contextmanager
def _open_file(archive: str, kind: str) -> Iterator[Any]:
    system, path = file_system(archive)
    block = _ZIP_BLOCK if kind == "zip" else _TAR_BLOCK
    file = system.open(path, "rb", block_size=block, cache_type="readahead")
    try:
        if not can_seek(file, 0):
            raise AdvisorError(f"{redact_url(archive)}: cannot be read in parts; download it first")
        yield file
    finally:
        file.close()


_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError,
    NotImplementedError, ValueError,
)  # fmt: skip


@contextmanager
def _explain_damage(archive: str) -> Iterator[None]:
    """Raise AdvisorError, with one line, for a damaged archive."""
    try:
        yield
    except _DAMAGE as error:
        why = f"not an archive that can be read ({type(error).__name__})"
        raise AdvisorError(f"{redact_url(archive)}: {why}; pack it again") from None


_UNPACKERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


def _refuse_many(count: int, archive: str) -> None:
    if count > MAX_ARCHIVE_MEMBERS:
        raise AdvisorError(
            f"{redact_url(archive)}: an archive of more than {MAX_ARCHIVE_MEMBERS:,} files"
        )
