"""Source of a trace's bytes, packed or not, as a bounded stream that tolerates damage. Also
descriptions of files that no reader knows, with advice."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice
from typing import BinaryIO, cast

from advisor.core.errors import AdvisorError, suggest
from advisor.core.files import open_regular
from advisor.core.labels import clean
from advisor.read.plain_pickle import looks_like_pickle

BLOCK = 1 << 20
"""Maximum number of uncompressed bytes in a block."""
PACKED_BLOCK = 1 << 16
"""Number of compressed bytes unpacked at a time. Unused input is copied, so small is fast."""
DEFAULT_LIMIT = 16 << 30
"""Maximum number of uncompressed bytes of one trace before reading stops (``--max-size``)."""
REMEMBER = 64 << 20
"""Maximum number of packed bytes of standard input that are kept for a second reading."""
MAX_GZIP_MEMBERS = 1_000_000
"""Maximum number of members in a gzip file. bgzip writes one per 64 KiB; more is an attack."""

PACKINGS = (".gz", ".zst", ".zstd")
"""Suffixes of the packings that are unpacked here."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_WINDOW = 1 << 27  # what the zstd tool accepts without options for more memory
_FIRST_NAME = 512
"""Number of bytes of a zip archive that contain its first member's name."""
_GIVE_TRACE = "give a PyTorch profiler trace"
_OTHER_PACKINGS = (
    (b"PK\x03\x04", "a zip archive; unpack it and give the file or folder in it"),
    (b"PK\x05\x06", f"an empty zip archive; {_GIVE_TRACE}"),
    (b"\xfd7zXZ\x00", "packed with xz; unpack it first (xz -d)"),
    (b"BZh", "packed with bzip2; unpack it first (bzip2 -d)"),
    (b"\x04\x22\x4d\x18", "packed with lz4; unpack it first (lz4 -d)"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it and give the file or folder in it"),
)


SEE_FORMATS = "'advisor analyze --help' lists the formats"
MAX_NEIGHBORS = 1000
"""Maximum number of files in a folder that are compared with a mistyped name."""


def _suggest_similar(path: str) -> str:
    """Return a suggestion of files in the same folder with names similar to a missing one."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            listed = [entry.name for entry in islice(entries, MAX_NEIGHBORS)]
    except OSError:
        return "check the path"
    # ignore suffixes, because most files have the same ones
    return clean(suggest(name, listed, "check the path", part=lambda text: text.partition(".")[0]))


@dataclass
class ByteSource:
    """Source of a trace's uncompressed bytes, in blocks of at most a megabyte.

    ``truncated`` and ``damage`` are set while iterating. A stream that ends early or is corrupt
    does not raise: it yields what could be unpacked."""

    path: str
    limit: int = DEFAULT_LIMIT
    truncated: bool = False
    damage: str | None = None
    bytes_read: int = 0
    packed_read: int = 0
    """Number of packed bytes read."""
    data: bytes | None = field(default=None, repr=False)
    """Packed bytes in memory, used in place of a file."""
    peek: Callable[[bytes], None] | None = field(default=None, repr=False)
    """Function called with each block before it is yielded."""
    _seen: list[bytes] | None = field(default=None, repr=False)
    _started: tuple[bytes, Iterator[bytes]] | None = field(default=None, repr=False)

    def head(self) -> bytes:
        """Return the first block, which :meth:`blocks` yields again. Empty if nothing could be
        unpacked. Raises AdvisorError like :meth:`blocks`."""
        if self._started is None:
            blocks = self._blocks()
            self._started = next(blocks, b""), blocks
        return self._started[0]

    def beginning(self) -> str:
        """Return the beginning of the file for a message."""
        head = self.head().lstrip()[:24]
        text = head.decode(errors="replace").split("\n")[0].strip()
        if "\ufffd" in text or not text.isprintable():
            return f"it begins with the bytes {head[:8].hex(' ')}"
        return f"it begins with {text!a}"

    def blocks(self) -> Iterator[bytes]:
        """Yield uncompressed blocks. Raises AdvisorError if the file is unreadable or too large."""
        if self._started is None:
            return self._blocks()
        (first, remaining), self._started = self._started, None
        return chain([first] if first else [], remaining)

    def read_all(self, max_bytes: int, advice: str) -> bytes:
        """Return all bytes. Raises AdvisorError with ``advice`` if there are over ``max_bytes``."""
        data = bytearray()
        for block in self.blocks():
            data += block
            if len(data) > max_bytes:
                raise AdvisorError(f"{self.path}: {advice}")
        return bytes(data)

    def _blocks(self) -> Iterator[bytes]:
        file = self._open_file()
        try:
            head = self._read_packed(file, PACKED_BLOCK)
            if not head:
                raise AdvisorError(f"{self.path}: the file is empty; record the trace again")
            if head.startswith(b"PK\x03\x04") and b"/data.pkl" in head[:_FIRST_NAME]:
                raise AdvisorError(f"{self.path}: a checkpoint (torch.save); {_GIVE_TRACE}")
            for magic, advice in _OTHER_PACKINGS:
                if head.startswith(magic):
                    raise AdvisorError(f"{self.path}: {advice}")
            if head.startswith(_GZIP):
                stream = self._unpack_gzip(head, file)
            elif head.startswith(_ZSTD) or _is_zstd_skippable(head):
                stream = self._unpack_zstd(head, file)
            else:
                stream = self._read_plain(head, file)
            for block in _join_small_blocks(stream):
                self.bytes_read += len(block)
                if self.bytes_read > self.limit:
                    raise AdvisorError(
                        f"{self.path}: unpacks to more than {decimal_size(self.limit)}; "
                        "if that is expected, raise the limit with --max-size"
                    )
                if self.peek is not None:
                    self.peek(block)
                yield block
        except OSError as error:
            raise AdvisorError(
                f"{self.path}: cannot be read ({error.strerror or error}); "
                "copy it to a local disk and try again"
            ) from None
        finally:
            if self.path != "-" or self.data is not None:
                file.close()

    def reopen(self) -> ByteSource | None:
        """Return a source from the start, or ``None`` for standard input too long to be kept."""
        if self.data is not None or self.path != "-":
            return ByteSource(self.path, limit=self.limit, data=self.data)
        if self._seen is None:
            return None
        return ByteSource(self.path, limit=self.limit, data=b"".join(self._seen))

    def expected_bytes(self) -> int:
        """Estimate the number of uncompressed bytes without reading them. 0 if unknown."""
        if self.data is not None:
            return len(self.data)
        try:
            with open_regular(self.path) as file:
                packed = os.fstat(file.fileno()).st_size
                head = file.read(18)
                if head.startswith(_GZIP) and packed > 18:
                    file.seek(-4, os.SEEK_END)  # ISIZE: the length of the last member mod 2^32
                    return max(packed * 4, int.from_bytes(file.read(4), "little"))
                return packed * 4 if head.startswith(_ZSTD) else packed
        except (OSError, ValueError):
            return 0

    def _open_file(self) -> BinaryIO:
        if self.data is not None:
            return BytesIO(self.data)
        if self.path == "-":
            stdin: BinaryIO | None = getattr(sys.stdin, "buffer", None)
            if stdin is None or stdin.closed:
                raise AdvisorError("-: there is no standard input; pipe a trace into the command")
            self._seen = []
            return stdin
        try:
            return open_regular(self.path)
        except FileNotFoundError:
            raise AdvisorError(
                f"{self.path}: no such file or directory; {_suggest_similar(self.path)}"
            ) from None
        except IsADirectoryError:
            raise AdvisorError(
                f"{self.path}: a directory, not a file; give a trace in it"
            ) from None
        except PermissionError:
            raise AdvisorError(f"{self.path}: permission denied; check its permissions") from None
        except OSError as error:
            reason = error.strerror or error
            advice = "check the path"
            if reason == "a pipe, not a file":
                advice = "pipe it into the command and give - as the path"
            raise AdvisorError(f"{self.path}: cannot be opened ({reason}); {advice}") from None
        except ValueError as error:
            raise AdvisorError(f"{self.path!r}: not a file name ({error})") from None

    def _read_packed(self, file: BinaryIO, size: int) -> bytes:
        data = file.read(size)
        self.packed_read += len(data)
        if self._seen is not None:
            self._seen.append(data)
            if len(self._seen) * PACKED_BLOCK > REMEMBER:
                self._seen = None
        return data

    def _read_plain(self, head: bytes, file: BinaryIO) -> Iterator[bytes]:
        size = PACKED_BLOCK if self.path == "-" else BLOCK
        while head:
            yield head
            head = self._read_packed(file, size)

    def _unpack_gzip(self, head: bytes, file: BinaryIO) -> Iterator[bytes]:
        from isal import isal_zlib

        failure = cast(type[Exception], isal_zlib.error)  # the stubs call it an instance

        unpack = isal_zlib.decompressobj(wbits=31)
        data = head
        members = 1
        try:
            while True:
                block = unpack.decompress(data, BLOCK)
                if block:
                    yield block
                data = unpack.unconsumed_tail
                if unpack.eof:
                    data = unpack.unused_data.lstrip(b"\0")
                    if len(data) < 2:
                        data += self._read_packed(file, PACKED_BLOCK)
                        data = data.lstrip(b"\0")
                    if not data.startswith(_GZIP):
                        return  # padding or other trailing bytes, which gunzip ignores too
                    members += 1
                    if members > MAX_GZIP_MEMBERS:
                        self._mark_damaged(f"damaged gzip (more than {MAX_GZIP_MEMBERS} members)")
                        return
                    unpack = isal_zlib.decompressobj(wbits=31)
                elif not data and len(block) < BLOCK:
                    data = self._read_packed(file, PACKED_BLOCK)
                    if not data:
                        self._mark_damaged("gzip that is cut off")
                        return
        except failure as error:
            self._mark_damaged(f"damaged gzip ({error})")

    def _unpack_zstd(self, head: bytes, file: BinaryIO) -> Iterator[bytes]:
        import zstandard

        unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        packed = _PrefixedFile(head, lambda size: self._read_packed(file, size))
        reader = unpacker.stream_reader(packed, read_size=PACKED_BLOCK, read_across_frames=True)  # type: ignore[arg-type]
        try:
            while block := reader.read(BLOCK):
                yield block
        except zstandard.ZstdError as error:
            self._mark_damaged(f"damaged zstd ({error})")

    def stop(self, why: str) -> None:
        """Stop reading and leave out the remaining bytes. ``why`` becomes the recorded damage."""
        self._mark_damaged(why)

    def _mark_damaged(self, reason: str) -> None:
        self.truncated = True
        self.damage = reason


def _join_small_blocks(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Join small blocks into blocks of about a megabyte. A packed file may come byte by byte, and
    readers examine each block."""
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        if not parts and len(block) >= PACKED_BLOCK:
            yield block
            continue
        parts.append(block)
        size += len(block)
        if size >= BLOCK:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


class _PrefixedFile:
    """File object that returns the bytes already read, and then the remaining file."""

    def __init__(self, head: bytes, read: Callable[[int], bytes]) -> None:
        self._head = head
        self._read_file = read

    def read(self, size: int) -> bytes:
        if self._head:
            part, self._head = self._head[:size], self._head[size:]
            return part
        return self._read_file(size)


def _is_zstd_skippable(head: bytes) -> bool:
    """Return whether zstd data begins with a skippable frame, as pzstd writes."""
    return head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F


def decimal_size(count: int) -> str:
    """Format a size in decimal units, as disks are sold: ``1.2 GB``, ``3.4 MB``."""
    if count < 10**5:
        return f"{count:,} bytes" if count != 1 else "1 byte"
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.3g} MB"


_UTF16 = (b"{\0", b"[\0", b"\0{", b"\0[")
_SEARCHED_BYTES = 1 << 16
"""Number of bytes that are searched for the patterns of a format."""
PROFILE = "record with torch.profiler or nsys profile, and give that file"

_FORMAT_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (
        r'^\s*\{.{0,2000}"\$schema"\s*:\s*"[^"]*speedscope|"exporter"\s*:\s*"speedscope',
        "a speedscope profile, samples of stacks without GPU work",
        PROFILE,
    ),
    (
        r'^\s*\[\s*\{\s*"(?:frame|children|metrics)"\s*:',
        "a profile of Triton's Proton (.hatchet), sums of kernels without times",
        PROFILE,
    ),
    (
        r'^\s*\[\s*\{\s*"start(?:In|Compute|H2d)?Ms"|^[fp]trt',
        "a file of TensorRT (an engine, or times of whole inferences)",
        "give the layer times: trtexec --exportProfile=run.profile.json "
        "--exportLayerInfo=run.graph.json --profilingVerbosity=detailed --separateProfileRun",
    ),
    (
        r'^\s*\{.*?"(?:CudaEvent|NvtxEvent|TraceProcessEvent|OsrtEvent|StringTable)"\s*:'
        r'|^\s*\{\s*"Type"\s*:\s*(?:\d|"String")',
        "JSON lines of nsys export",
        "export with nsys export --type sqlite, and give the .sqlite file",
    ),
    (
        r"^==\d+== .{0,200}(?:NVPROF|Profiling)|^==\d+==.{0,2000}\"Start\",\"Duration\"",
        "text of nvprof",
        "record with nsys profile, export with nsys export --type sqlite, and give the .sqlite "
        "file",
    ),
    (
        r'^"?(?:Index|Kind|Domain|Name|Correlation_Id)"?,.{0,400}'
        r'"?(?:Start_Timestamp|BeginNs|TotalDurationNs|DurationNs)"?',
        "a CSV table of rocprof",
        "record with rocprofv3 --output-format rocpd (or json), and give that file",
    ),
    (
        r"^.{0,40}brain\.Event:\d",
        "an event file of TensorBoard, which holds scalars",
        "give the profile next to it: plugins/profile/*/*.xplane.pb or *.pt.trace.json.gz",
    ),
    (
        r"^\s{0,999}<(?:!doctype html|html)",
        "a web page",
        "give the address of the file itself; you may need to log in first",
    ),
    (
        r"^version https://git-lfs\.github\.com/",
        "a pointer of Git LFS in place of the file",
        "fetch the file itself: git lfs pull",
    ),
)
"""Pattern of how a file begins, description of its format, and advice, per format."""
_PLUGIN_PAGE = re.compile(
    r"[._](?:input_pipeline(?:_analyzer)?|overview_page|tensorflow_stats|framework_op_stats"
    r"|kernel_stats|op_stats|memory_profile|pod_viewer|hlo_stats|roofline_model)\.pb$"
)
"""Pattern of the pages that the plugin computes from a profile (``<host>.input_pipeline.pb``)."""
_FORMATS = tuple(
    (re.compile(pattern.encode(), re.DOTALL | re.I), kind, advice)
    for pattern, kind, advice in _FORMAT_PATTERNS
)


def kind_of(start: bytes, path: str = "") -> tuple[str, str | None] | None:
    """Return a description of a file and advice (``None``: give another file). ``None`` if the
    format is unknown. ``path``: used for formats that are not clear from the first bytes."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or start[:2] in _UTF16:
        return "not UTF-8 text (UTF-16?)", "convert it to UTF-8"
    if start.startswith(b"SQLite format 3"):
        if b"CUPTI_ACTIVITY_KIND" in start and b"StringIds" not in start:
            return "a profile of nvprof (.nvvp, .nvprof)", (
                "record with nsys profile, export with nsys export --type sqlite, and give the "
                ".sqlite file"
            )
        return "an SQLite file without the tables of a known profiler", None
    if looks_like_pickle(start):
        return "a pickle (a memory snapshot?)", None
    if start[257:262] == b"ustar":
        return "a tar archive", "unpack it and give the file or folder in it"
    if start[:1] == b"\n" and path.lower().endswith((".pftrace", ".perfetto-trace")):
        return "a Perfetto trace (protobuf)", (
            "give the profiler's own file: rocprofv3 --output-format rocpd (or json), or the JSON "
            "of torch.profiler"
        )
    if _PLUGIN_PAGE.search(path):
        return "a page of TensorBoard's profile plugin, with sums and no timeline", (
            "analyse the profile that it was made from (*.xplane.pb)"
        )
    if path.endswith((".py", ".ipynb")):
        return "a program, not a recording", "run it with advisor record, or advisor lint"
    head = start[:_SEARCHED_BYTES].removeprefix(b"\xef\xbb\xbf")
    return next(
        ((kind, advice) for pattern, kind, advice in _FORMATS if pattern.search(head)), None
    )
