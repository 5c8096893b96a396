"""Reader of plain pickles that runs nothing: it reads only containers, numbers and strings.

A pickle is a program. Its opcodes are checked before Python's unpickler sees them. Allowed are
opcodes that push a number, a string or ``None``, make a list, a dict or a tuple, and store these in
the memo. Opcodes that import, call or build anything (GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ,
EXT, PERSID …) stop the reading with a one-line error, wherever they are.

Dicts are read as lists of keys and values. Untrusted keys are never hashed, so neither colliding
numbers nor deeply nested tuples can keep a reader busy. :class:`PickledFields` reads such a list
as the record that it was. Memory is bounded by the number of bytes read, and the number of
containers by ``MAX_CONTAINERS``. Nothing here recurses."""

import gc
import pickle
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from advisor.core.errors import AdvisorError
from advisor.core.files import at_most

MAX_STRING = 1 << 20
"""Maximum length of a string, bytes. File names and stacks of FX nodes are shorter."""
MAX_INT = 16
"""Maximum length of an integer, bytes. Addresses and times have seven."""
MAX_CONTAINERS = 2_000_000
"""Number of lists, dicts and tuples that any file may have. Large files may have more."""
MIN_BYTES_PER_CONTAINER = 16
"""Minimum number of bytes per container in a file with over ``MAX_CONTAINERS``. An event of the
allocator has two containers in 60 bytes or more."""
BLOCK = 1 << 20
"""Maximum number of bytes checked and passed on at a time."""
_MAX_FIELDS = 200
"""Maximum number of keys of a record."""

_SHORT_STRING = (
    24  # maximum length of strings skipped by the pattern; longer ones are read one by one
)


def _sized_opcode_pattern(opcode: bytes, max_length: int) -> bytes:
    """Return a pattern for an opcode whose argument's length is one byte, at most ``most``."""
    lengths = (re.escape(bytes([size])) + b"." * size for size in range(max_length + 1))
    return opcode + b"(?:" + b"|".join(lengths) + b")"


# Opcodes that need no check: BINGET, LONG_BINGET, BINPUT, MEMOIZE, MARK, NONE, NEWTRUE, NEWFALSE,
# APPEND, APPENDS, whole numbers, floats, short strings. Possessive, so that no positions are kept
# for backtracking, however long the run is.
_PLAIN_OPCODES = re.compile(
    rb"(?:h.|K.|[\x94(N\x88\x89ae]|M..|J....|j....|q.|G........|"
    + _sized_opcode_pattern(rb"\x8a", MAX_INT)
    + b"|"
    + _sized_opcode_pattern(rb"\x8c", _SHORT_STRING)
    + rb")*+",
    re.DOTALL,
)
_CONTAINERS = {
    ord("]"): b"]",  # EMPTY_LIST
    ord("}"): b"]",  # EMPTY_DICT: a list of keys and values
    ord(")"): b")",  # EMPTY_TUPLE
    ord("t"): b"t",  # TUPLE
    0x85: b"\x85",
    0x86: b"\x86",
    0x87: b"\x87",
}
_SETITEMS, _SETITEM = ord("u"), ord("s")
_LENGTH_BYTES = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # strings: bytes of their length
_ARGUMENT_BYTES = {
    ord("h"): 1,
    ord("K"): 1,
    ord("M"): 2,
    ord("J"): 4,
    ord("j"): 4,
    ord("q"): 1,
    ord("G"): 8,
}
_LONG1, _LONG_BINPUT, _FRAME, _STOP = 0x8A, ord("r"), 0x95, ord(".")


_DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError,
    OverflowError,
)  # fmt: skip
"""Exceptions that a damaged pickle makes the unpickler raise."""


class PickleContent(NamedTuple):
    """Content of a pickle of plain values, and its size."""

    value: Any
    """Lists (former dicts as keys and values in turn), tuples, numbers and strings."""
    containers: int
    """Number of lists, dicts and tuples. Each counts once, however many references it has."""
    bytes: int
    """Number of bytes read."""


def looks_like_pickle(head: bytes) -> bool:
    """Return whether a file begins like a pickle of protocol 2 or later."""
    return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")


def read_plain(blocks: Iterable[bytes], path: str) -> PickleContent:
    """Read a pickle from its blocks of bytes. ``path``: its name in errors.

    Raises AdvisorError, with one line, if the pickle holds more than plain values, is cut off or
    damaged, or exceeds the limits."""
    checker = _OpcodeChecker(blocks, path)
    gc_enabled = gc.isenabled()
    gc.disable()  # there are millions of containers, and none of them is garbage
    try:
        value = _RestrictedUnpickler(_FrameReader(checker.frames())).load()
    except AdvisorError:
        raise
    except MemoryError:
        raise AdvisorError(f"{path}: too large for this machine's memory") from None
    except _DAMAGE as error:
        why = f"{type(error).__name__}: {error}"[:120]
        raise AdvisorError(f"{path}: a damaged pickle ({why}); save or copy it again") from None
    finally:
        if gc_enabled:
            gc.enable()
    return PickleContent(value, checker.containers, checker.seen)


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that refuses all name lookups, as a second safeguard."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError("names are not looked up")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("names are not looked up")


class _FrameReader:
    """File object for the unpickler, made of frames fetched as needed."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self._frame = b""
        self._offset = 0

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end."""
        while len(self._frame) - self._offset < size:
            next_frame = next(self._frames, None)
            if next_frame is None:
                break
            self._frame, self._offset = self._frame[self._offset :] + next_frame, 0
        result = self._frame[self._offset : self._offset + size]
        self._offset += len(result)
        return result

    def readline(self) -> bytes:
        """Refuse to read a line: only text opcodes have lines, and they are not allowed."""
        raise pickle.UnpicklingError("a line of text")


class _OpcodeChecker:
    """Checker of opcodes that passes on only allowed opcodes."""

    def __init__(self, blocks: Iterable[bytes], path: str) -> None:
        self._blocks = blocks
        self._path = path
        self._memo_count = 0
        self.containers = 0
        self.seen = 0

    def frames(self) -> Iterator[bytes]:
        """Yield the same pickle in frames of whole opcodes, with dicts as lists."""
        yield b"\x80\x04"
        unchecked, at_start = b"", True
        for block in at_most(self._blocks, BLOCK):
            data = unchecked + block if unchecked else block
            start = self.seen
            index = 0
            if at_start:
                if len(data) < 2:
                    unchecked = data
                    continue
                at_start = False
                if not looks_like_pickle(data):
                    raise AdvisorError(
                        f"{self._path}: not a pickle of protocol 2 or later, as torch writes"
                    )
                index = 2
            parts: list[bytes] = []
            end, ended = self._walk(data, index, start, parts)
            self.seen += end
            unchecked = data[end:]
            if self.containers > max(
                MAX_CONTAINERS, (self.seen + len(unchecked)) // MIN_BYTES_PER_CONTAINER
            ):
                raise AdvisorError(
                    f"{self._path}: not a memory snapshot: {self.containers:,} containers"
                )
            body = b"".join(parts)
            if body:
                yield b"\x95" + len(body).to_bytes(8, "little") + body
            if ended:
                return
        raise AdvisorError(f"{self._path}: cut off before its end")

    def _walk(self, data: bytes, index: int, start: int, parts: list[bytes]) -> tuple[int, bool]:
        """Check whole opcodes from ``index`` on. Return the index of the first incomplete one, and
        whether the pickle ended."""
        size = len(data)
        match_plain = _PLAIN_OPCODES.match
        while True:
            match = match_plain(data, index)
            end = match.end() if match is not None else index
            if end > index:
                parts.append(data[index:end])
                index = end
            if index >= size:
                return index, False
            op = data[index]
            if (container := _CONTAINERS.get(op)) is not None:
                self.containers += 1
                parts.append(container)
                index += 1
            elif op == _SETITEMS:
                parts.append(b"e")
                index += 1
            elif op == _SETITEM:
                parts.append(b"\x86a")  # a pair of key and value
                self.containers += 1
                index += 1
            elif op == _STOP:
                parts.append(b".")
                return index + 1, True
            else:
                length = self._opcode_length(data, index, start)
                if index + length > size:
                    return index, False
                if op != _FRAME:
                    parts.append(data[index : index + length])
                index += length

    def _opcode_length(self, data: bytes, index: int, start: int) -> int:
        """Return the size of an opcode with its argument, bytes. Raises AdvisorError if unsafe."""
        op = data[index]
        if (width := _LENGTH_BYTES.get(op)) is not None:
            length_field = data[index + 1 : index + 1 + width]
            if len(length_field) < width:
                return 1 + width
            size = int.from_bytes(length_field, "little")
            if size > MAX_STRING:
                raise AdvisorError(f"{self._path}: a string of {size:,} bytes: not a snapshot")
            return 1 + width + size
        if op == _LONG1:
            size = data[index + 1] if index + 1 < len(data) else 0
            if size > MAX_INT:
                raise AdvisorError(f"{self._path}: a number of {size} bytes: not a snapshot")
            return 2 + size
        if op == _FRAME:
            return 9
        if op == _LONG_BINPUT:
            if index + 5 <= len(data):
                memo_index = int.from_bytes(data[index + 1 : index + 5], "little")
                self._memo_count += 1
                if memo_index > 255 + self._memo_count:  # the unpickler allocates a table this long
                    raise AdvisorError(f"{self._path}: a damaged pickle (memo {memo_index:,})")
            return 5
        if op in _ARGUMENT_BYTES:
            return 1 + _ARGUMENT_BYTES[op]
        raise AdvisorError(
            f"{self._path}: not only plain values ({_opcode_name(op)} at byte {start + index:,}); "
            "a pickle "
            "like that can run code, and is not read"
        )


def _opcode_name(op: int) -> str:
    import pickletools

    opcodes: dict[str, Any] = pickletools.code2op  # type: ignore[attr-defined]
    opcode = opcodes.get(chr(op))
    return f"opcode {opcode.name}" if opcode is not None else f"byte 0x{op:02x}"


class PickledFields:
    """Reader of former dicts as mappings. It is reused for many records, because records of a kind
    have the same keys in the same order."""

    def __init__(self) -> None:
        self._keys: list[Any] | None = None
        self._value_indices: dict[str, int] = {}

    def from_value(self, value: Any) -> dict[str, Any] | None:
        """Return the record as a dict, or ``None`` if it was not a dict with string keys."""
        if type(value) is not list or len(value) > 2 * _MAX_FIELDS:
            return None
        if any(type(item) is tuple for item in value[::2]):  # some were set one by one
            flat: list[Any] = []
            for item in value:
                if len(flat) % 2 == 0 and type(item) is tuple and len(item) == 2:
                    flat += item
                else:
                    flat.append(item)
            value = flat
        if len(value) % 2 or any(type(key) is not str for key in value[::2]):
            return None
        return dict(zip(value[::2], value[1::2], strict=True))

    def places(self, value: Any) -> dict[str, int] | None:
        """Return the index in ``value`` of each key's value: one object for records of the same
        keys. ``None`` if it was not a dict with string keys. Fast, for millions of records."""
        if type(value) is not list:
            return None
        keys = value[::2]
        if keys != self._keys or len(value) % 2:
            if len(value) % 2 or len(keys) > _MAX_FIELDS or any(type(k) is not str for k in keys):
                return None
            self._keys = keys
            self._value_indices = {key: 2 * n + 1 for n, key in enumerate(keys)}
        return self._value_indices
