"""Copying of a trace file event by event, unchanged or redacted, with added events at the end.

The file is streamed: a few megabytes are in memory at a time, whatever its size."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from msgspec import Raw

from advisor.core.errors import AdvisorError
from advisor.export.redact import HEAD_KEYS, NameMap, Redactor
from advisor.read.formats.kineto.json_pieces import Splitter
from advisor.read.json_repair import DECODE_ERRORS, repair_json, split_objects
from advisor.read.source import DEFAULT_LIMIT, ByteSource

_event_decoder = msgspec.json.Decoder(list[Raw])
Progress = Callable[[str, int], None]
Extra = Callable[[dict[str, Any]], Iterable[bytes]]
"""Function that takes the file's other keys and yields added events, each as JSON text."""


@dataclass
class RewriteCounts:
    """Counts of the events in a written trace, and the state of its source."""

    events: int = 0
    """Number of the trace's events."""
    added: int = 0
    """Number of added events."""
    lost: int = 0
    """Number of elements in the list of events that are not JSON and were left out."""
    repaired: bool = False
    """Whether bytes that are not UTF-8 were written as replacement characters."""
    truncated: bool = False
    """Whether the source trace ends early. The written file is complete."""


class _SplitFailed(Exception):
    """Raised when the quick splitting fails and the exact one is needed."""


def rewrite(
    path: str,
    target: Path,
    extra: Extra | None = None,
    *,
    redacted: bool = False,
    names: Iterable[str] = (),
    limit: int = DEFAULT_LIMIT,
    progress: Progress | None = None,
) -> RewriteCounts:
    """Write a trace to ``target`` (packed when it ends in .gz or .zst), completely or not at all.

    The events come first, unchanged unless ``redacted``. Then come the events of ``extra``,
    redacted as well, and the file's other keys, up to 1 MB each. ``names``: users and hosts to
    redact in addition to those named in the trace. Raises AdvisorError if the file cannot be read
    or has no list of events, or if the target cannot be written."""
    redactor = Redactor({*names, *names_of(path, limit)}) if redacted else None
    for exact in (False, True):
        splitter = Splitter(ByteSource(path, limit=limit), exact=exact)
        try:
            with replace_when_complete(target) as file:
                written = _write_trace(splitter, file, extra, redactor, progress)
        except _SplitFailed:
            continue
        return written
    raise AssertionError("exact splitting always succeeds")


def names_of(path: str, limit: int) -> set[str]:
    """Return the users and hosts named anywhere in the trace, to remove them everywhere."""
    names = NameMap()
    for block in ByteSource(path, limit=limit).blocks():
        names.scan(block)
    return names.found


def _write_trace(
    splitter: Splitter,
    file: BinaryIO,
    extra: Extra | None,
    redactor: Redactor | None,
    progress: Progress | None,
) -> RewriteCounts:
    written = RewriteCounts()

    def texts() -> Iterator[tuple[bytes, int]]:
        for piece in splitter.pieces():
            yield from _event_texts(piece, splitter.exact, written, redactor)
            if progress is not None:
                progress(splitter.source.path, splitter.source.bytes_read)
        if splitter.skipped and not splitter.exact:
            raise _SplitFailed

    write_events(file, texts(), lambda: splitter.head, extra, redactor, written)
    file.write(rewrite_head(splitter.head, redactor))
    written.truncated = splitter.truncated or splitter.source.truncated
    return written


def write_events(
    file: BinaryIO,
    texts: Iterable[tuple[bytes, int]],
    head: Callable[[], dict[str, Any]],
    extra: Extra | None,
    redactor: Redactor | None,
    written: RewriteCounts,
) -> None:
    """Write the list of events: texts of several events each, then the events of ``extra``. It is
    called with ``head()`` after the others are written."""
    file.write(b'{"traceEvents":[')
    separator = b"\n"
    for text, count in texts:
        file.write(separator)
        file.write(text)
        separator = b",\n"
        written.events += count
    for event in extra(head()) if extra is not None else ():
        file.write(separator)
        file.write(event if redactor is None else redactor.json(event))
        separator = b",\n"
        written.added += 1
    file.write(b"\n]")


def rewrite_head(head: dict[str, Any], redactor: Redactor | None) -> bytes:
    """Return the text of the other keys and the end of the file."""
    parts = [
        b",\n" + msgspec.json.encode(key) + b":" + msgspec.json.encode(value)
        for key, value in _redact_head(head, redactor).items()
    ]
    return b"".join([*parts, b"}\n"])


def _event_texts(
    piece: bytes, exact: bool, written: RewriteCounts, redactor: Redactor | None
) -> Iterator[tuple[bytes, int]]:
    """Yield the text of a piece's events, and the number of events in it."""
    if not piece.isascii():  # JSON must be UTF-8, and undecoded texts may be invalid
        try:
            piece.decode()
        except UnicodeDecodeError:
            piece = piece.decode("utf-8", "replace").encode()
            written.repaired = True
    try:
        events = _event_decoder.decode(piece)
    except DECODE_ERRORS:
        if not exact:
            raise _SplitFailed from None
        events = _salvage_events(piece, written)
    if not events:
        return
    text = b",\n".join(bytes(event).strip() for event in events)
    if redactor is not None:
        text = redactor.json(b"[" + text + b"]")[1:-1]
    yield text, len(events)


def _salvage_events(piece: bytes, written: RewriteCounts) -> list[Raw]:
    """Return the elements of a damaged piece that are JSON, repaired if necessary."""
    texts, others = split_objects(repair_json(piece)[1:-1])
    written.lost += others
    events = []
    for text in texts:
        try:
            msgspec.json.decode(text, type=Raw)
        except DECODE_ERRORS:
            written.lost += 1
            continue
        events.append(Raw(text))
    return events


def _redact_head(head: dict[str, Any], redactor: Redactor | None) -> dict[str, Any]:
    if redactor is None:
        return head
    result = {key: redactor.value(value) for key, value in head.items() if key in HEAD_KEYS}
    if isinstance(result.get("distributedInfo"), dict):
        names = ("backend", "rank", "world_size", "pg_count", "nccl_version")
        distributed = result["distributedInfo"]
        result["distributedInfo"] = {key: distributed[key] for key in names if key in distributed}
    return result


@contextmanager
def replace_when_complete(target: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces the target once it is complete. After an error nothing remains."""
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            with _open_packed(file, target.suffix.lower()) as packed:
                yield packed
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise AdvisorError(f"{target}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _open_packed(file: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    if suffix == ".gz":
        from isal import igzip

        pack = igzip.IGzipFile(filename="", fileobj=file, mode="wb", compresslevel=2, mtime=0)  # type: ignore[no-untyped-call]
        with pack:
            yield cast(BinaryIO, pack)
    elif suffix in (".zst", ".zstd"):
        import zstandard

        with zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as zst:
            yield cast(BinaryIO, zst)
    else:
        yield file
