"""Source lines at which Nsight Compute sampled a kernel's warps.

A report holds the module of each kernel (an ELF file). If it was compiled with ``-lineinfo``, it
has a line table for each function: ``.debug_line`` in DWARF 2 to 4, whose addresses
``.rel.debug_line`` maps to ``.text.<function>``. Samples are counted by absolute address."""

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from advisor.core.kernel_profile import SampledLine
from advisor.read.protobuf import MalformedMessage, varint

_MAX_LINES = 12
"""Maximum number of lines per kernel; those with the most samples are kept."""
_MAX_ROWS = 1 << 20
"""Maximum number of rows in the line tables of a module."""
MAX_NAME = 8_192
"""Maximum length of a section's name, bytes. It contains the mangled name of a function."""
_RELOCATION_ENTRY = struct.Struct("<QQ")
SYMBOL = struct.Struct("<IBBHQQ")
"""Layout of a ``.symtab`` entry: name, kind, visibility, section, address, size."""
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


class LineRow(NamedTuple):
    """Row of a line table: the instructions of a function from this address on are of this line."""

    address: int
    file: str
    line: int


def sampled_lines(
    rows: Sequence[LineRow],
    first: int,
    samples: Mapping[int, int],
    stalls: Mapping[int, Mapping[str, int]],
) -> tuple[SampledLine, ...]:
    """Return the lines of a function with the most samples. ``rows``: its line table. ``first``:
    address of its first instruction. ``samples``: counts by address. ``stalls``: counts by address
    and reason."""
    start_addresses = [row.address for row in rows]
    counts: Counter[tuple[str, int]] = Counter()
    reasons: dict[tuple[str, int], Counter[str]] = {}
    for address, count in samples.items():
        row_index = bisect_right(start_addresses, address - first) - 1
        if row_index < 0 or not rows[row_index].line or count <= 0:
            continue
        source_line = rows[row_index].file, rows[row_index].line
        counts[source_line] += count
        reasons.setdefault(source_line, Counter()).update(stalls.get(address, {}))
    return tuple(
        SampledLine(file, line, count, max(reasons[file, line], key=reasons[file, line].__getitem__)
                    if reasons[file, line] else "")
        for (file, line), count in counts.most_common(_MAX_LINES)
    )  # fmt: skip


def lines_of_module(elf: bytes) -> dict[str, list[LineRow]]:
    """Return the line table of each function, in order of addresses. Empty if there are no lines or
    the layout is unknown."""
    try:
        return _read_line_tables(elf)
    except (
        struct.error,
        IndexError,
        ValueError,
        OverflowError,
        ZeroDivisionError,
        MalformedMessage,
    ):
        return {}


def _read_line_tables(elf: bytes) -> dict[str, list[LineRow]]:
    sections = list(sections_of(elf))
    bodies: dict[str, bytes] = {}
    for name, start, size in sections:
        if name in (".debug_line", ".rel.debug_line", ".symtab") and name not in bodies:
            bodies[name] = elf[start : start + size]
    if len(bodies) < 3:
        return {}
    function_at = {}
    for offset, info in _RELOCATION_ENTRY.iter_unpack(bodies[".rel.debug_line"]):
        section_index = SYMBOL.unpack_from(bodies[".symtab"], (info >> 32) * SYMBOL.size)[3]
        function_at[offset] = sections[section_index][0].removeprefix(".text.")
    result: dict[str, list[LineRow]] = {}
    rows_left = _MAX_ROWS
    for function, row in _iterate_programs(bodies[".debug_line"], function_at):
        result.setdefault(function, []).append(row)
        rows_left -= 1
        if not rows_left:
            break
    return {
        function: sorted(rows, key=lambda row: row.address) for function, rows in result.items()
    }


def sections_of(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the name, start and size of each section of an ELF file. Raises struct.error,
    IndexError or ValueError if it is damaged."""
    (table_offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(elf, table_offset + n * size) for n in range(count)]
    start = headers[names_index][4]
    for header in headers:
        end = elf.index(b"\0", start + header[0], start + header[0] + MAX_NAME)
        yield elf[start + header[0] : end].decode(), header[4], header[5]


def _iterate_programs(data: bytes, function_at: Mapping[int, str]) -> Iterator[tuple[str, LineRow]]:
    offset = 0
    while offset + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        end = offset + 4 + length
        version, header = struct.unpack_from("<HI", data, offset + 4)
        if end > len(data) or not 2 <= version <= 4:
            raise ValueError(version)
        yield from _LineProgram(data, offset + 10, version).rows(
            offset + 10 + header, end, function_at
        )
        offset = end


class _LineProgram:
    """Interpreter of one line-number program (DWARF 4, section 6.2)."""

    def __init__(self, data: bytes, at: int, version: int) -> None:
        self.data = data
        self.at = at
        self.shortest = self._byte()
        if version >= 4:
            self._byte()  # operations per instruction
        self._byte()  # default of is_stmt
        self.base, self.range, self.first = struct.unpack_from("<bBB", data, self.at)
        self.at += 3
        self.operands = [self._byte() for _ in range(self.first - 1)]
        folders = list(self._texts())
        self.files = [""]
        for name in self._texts():
            folder = self._number()
            self._number(), self._number()  # time, length
            parent = folders[folder - 1] if 0 < folder <= len(folders) else ""
            self.files.append(str(PurePosixPath(parent, name)))

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _number(self) -> int:
        value, self.at = varint(self.data, self.at, len(self.data))
        return value

    def _signed(self) -> int:
        start = self.at
        value = self._number()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def _texts(self) -> Iterator[str]:
        while True:
            end = self.data.index(b"\0", self.at)
            text, self.at = self.data[self.at : end].decode("utf-8", errors="replace"), end + 1
            if not text:
                return
            yield text

    def rows(
        self, at: int, end: int, function_at: Mapping[int, str]
    ) -> Iterator[tuple[str, LineRow]]:
        """Yield (function, row) where a line begins."""
        self.at, function = at, ""
        address, file, line = 0, 1, 1
        while self.at < end:
            code = self._byte()
            emits = code >= self.first or code == 1
            if code >= self.first:
                code -= self.first
                address += code // self.range * self.shortest
                line += self.base + code % self.range
            elif code == 0:
                size = self._number()
                after = self.at + size
                kind = self._byte()
                if kind == 1:  # the end of a sequence
                    address, file, line = 0, 1, 1
                elif kind == 2:
                    function = function_at.get(self.at, function)
                    address = int.from_bytes(self.data[self.at : after], "little")
                self.at = after
            elif code == 2:
                address += self._number() * self.shortest
            elif code == 3:
                line += self._signed()
            elif code == 4:
                file = self._number()
            elif code == 8:
                address += (255 - self.first) // self.range * self.shortest
            elif code == 9:
                address += struct.unpack_from("<H", self.data, self.at)[0]
                self.at += 2
            else:
                for _ in range(self.operands[code - 1] if code != 1 else 0):
                    self._number()
            if emits and 0 < file < len(self.files):
                yield function, LineRow(address, self.files[file], line)
