"""Reader of the text of PyTorch's out-of-memory exception, alone or in a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from advisor.core.errors import AdvisorError
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import SEE_FORMATS, ByteSource

if TYPE_CHECKING:
    from advisor.core.snapshot import MemorySnapshot, OutOfMemoryText
    from advisor.core.trace import Trace

_MAX_BYTES = 256 << 20
_EXCEPTION_START = re.compile(r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate ")
_SIZE = r"(\d{1,12}(?:\.\d{1,6})?) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_FIGURE_PATTERNS = {
    "request": rf"Tried to allocate {_SIZE}",
    "capacity": rf"total capacity of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free",
    "process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_DEVICE = re.compile(r"GPU (\d{1,2})\b")


class OutOfMemoryTextReader(Reader):
    """Reader of the last out-of-memory exception in a log: its figures, without a history."""

    name = "out-of-memory-text"
    description = "a log with an out-of-memory exception (.txt, .log)"
    suffixes = ()  # must be given by name: the logs in a folder are not traces

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise the words of the exception, which may be only at the end of a log."""
        text = head.decode("utf-8", "replace")
        if _EXCEPTION_START.search(text):
            return ReaderClaim.SURE
        is_log = path.lower().endswith((".txt", ".log", ".out", ".err"))
        is_text = b"\0" not in head and head.lstrip()[:1] not in (b"{", b"[", b"")
        return ReaderClaim.PERHAPS if is_log and is_text else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return a blank trace with the exception's figures. Raises AdvisorError if it has none."""
        from advisor.core.trace import blank_trace

        bytes_seen, text, beginning = 0, "", source.beginning()
        for block in source.blocks():
            bytes_seen += len(block)
            if bytes_seen > min(options.max_bytes, _MAX_BYTES):
                raise AdvisorError(f"{source.path}: a log of more than {_MAX_BYTES >> 20} MiB")
            text = (text + block.decode("utf-8", "replace"))[-(1 << 22) :]
        snapshot = of_exception(text, source.path)
        if snapshot is None:
            raise AdvisorError(
                f"{source.path}: unknown format ({beginning}), and no log with an out-of-memory "
                f"exception of PyTorch; {SEE_FORMATS}"
            )
        bytes_read = source.bytes_read
        return blank_trace(source.path, bytes_read=bytes_read, events_read=1, snapshot=snapshot)


def of_exception(
    text: str, path: str, known: Mapping[str, Any] | None = None
) -> MemorySnapshot | None:
    """Return the figures of the last exception in a text, or ``None`` if there is none. ``known``:
    numbers of bytes that the recorder noted with it, by name, for figures missing in the text."""
    from advisor.core.snapshot import OutOfMemoryText

    starts = [match.start() for match in _EXCEPTION_START.finditer(text)]
    if not starts:
        return None
    message = " ".join(text[starts[-1] : starts[-1] + 2000].split("\n\n", maxsplit=1)[0].split())
    sizes = {name: _find_size(pattern, message) for name, pattern in _FIGURE_PATTERNS.items()}
    allocated, reserved = sizes["allocated"], sizes["reserved"]
    if reserved is None and allocated is not None and sizes["unallocated"] is not None:
        reserved = allocated + sizes["unallocated"]
    noted_bytes = {name: (known or {}).get(name) for name in ("allocated", "reserved")}
    if all(type(size) is int and 0 <= size < 1 << 62 for size in noted_bytes.values()):
        allocated = noted_bytes["allocated"] if allocated is None else allocated
        reserved = noted_bytes["reserved"] if reserved is None else reserved
    device = _DEVICE.search(message)
    noted = OutOfMemoryText(
        message[:600], sizes["request"] or 0, sizes["capacity"], sizes["free"], sizes["process"],
        allocated, reserved,
    )  # fmt: skip
    return _build_snapshot(noted, int(device[1]) if device else 0, path)


def _find_size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = [part for part in match.groups() if part is not None][:2]
    return round(float(number) * (1 << _UNITS[unit]))


def _build_snapshot(noted: OutOfMemoryText, device: int, path: str) -> MemorySnapshot:
    from advisor.core import snapshot as s

    segment: dict[str, list[object]] = {}
    block: dict[str, list[object]] = {}
    if noted.reserved is not None or noted.allocated is not None:
        total = noted.reserved if noted.reserved is not None else noted.allocated
        segment = {"device": [device], "address": [0], "total": [total], "stream": [0]}
    if noted.allocated:
        block = {"segment": [0], "device": [device], "address": [0], "size": [noted.allocated],
                 "requested": [noted.allocated], "state": ["allocated"]}  # fmt: skip
    event: dict[str, list[object]] = {"device": [device], "action": ["oom"]}
    event |= {"size": [noted.request], "device_free": [noted.free]}
    return s.MemorySnapshot(
        path=path,
        segments=s.typed_table(s.SEGMENT_SCHEMA, segment),
        blocks=s.typed_table(s.BLOCK_SCHEMA, block),
        events=s.typed_table(s.EVENT_SCHEMA, event),
        annotations=s.typed_table(s.ANNOTATION_SCHEMA, {}),
        stacks=(),
        exception=noted,
    )
