"""Plain pickles, read without running anything: containers, numbers and strings, and no more.

A pickle is a program. What this reads of it is checked opcode by opcode before Python's unpickler
sees it: only opcodes that push a number, a string or ``None``, make a list, a dict or a tuple, and
remember them. Those that import, call or build anything (GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ,
EXT, PERSID …) end the reading with one line, wherever they stand.

Dicts are read as lists of keys and values: no key of a stranger is ever hashed, so that neither
colliding numbers nor tuples of tuples of tuples can keep a reader busy. :class:`PickledFields`
reads such a list as the record that it was. Memory is bounded by the bytes that are read and the
containers by ``MAX_CONTAINERS``; nothing here recurses."""

import gc
import pickle
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from advisor.core.errors import AdvisorError
from advisor.core.files import at_most

MAX_STRING = 1 << 20
"""Longest string, bytes. File names, allocator settings and stacks of FX nodes are shorter."""
MAX_INT = 16
"""Longest integer, bytes: addresses and times have seven."""
MAX_CONTAINERS = 2_000_000
"""Most lists, dicts and tuples that any file may have …"""
BYTES_A_CONTAINER = 16
"""… and the bytes that allow one more in a large file: an event of the allocator is two, of 60
bytes or more."""
BLOCK = 1 << 20
"""Most bytes checked and passed on at once."""
MAX_FIELDS = 200
"""Most keys of one record."""

_SHORT = 24  # bytes of strings that are passed over at once; longer ones are taken one by one


def _sized(opcode: bytes, most: int) -> bytes:
    """Return a pattern for an opcode whose argument's length is one byte, at most ``most``."""
    lengths = (re.escape(bytes([size])) + b"." * size for size in range(most + 1))
    return opcode + b"(?:" + b"|".join(lengths) + b")"


# Opcodes that need no look: BINGET, LONG_BINGET, BINPUT, MEMOIZE, MARK, NONE, NEWTRUE, NEWFALSE,
# APPEND, APPENDS, whole numbers, floats, short strings. Possessive: nothing is remembered for
# going back, however long the run is.
_RUN = re.compile(
    rb"(?:h.|K.|[\x94(N\x88\x89ae]|M..|J....|j....|q.|G........|"
    + _sized(rb"\x8a", MAX_INT)
    + b"|"
    + _sized(rb"\x8c", _SHORT)
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
_LENGTHS = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # strings: bytes of their length
_FIXED = {ord("h"): 1, ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("j"): 4, ord("q"): 1, ord("G"): 8}
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
    """Number of lists, dicts and tuples, each counted once however often it is referred to."""
    bytes: int
    """Number of bytes read."""


def looks_like_pickle(head: bytes) -> bool:
    """Return whether a file begins like a pickle of protocol 2 or later."""
    return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")


def read_plain(blocks: Iterable[bytes], path: str) -> PickleContent:
    """Read a pickle from its blocks of bytes. ``path``: what it is called in errors.

    Raises AdvisorError, with one line: it holds more than plain values, is cut off or damaged, or
    is larger than what such a file holds."""
    checked = _Checked(blocks, path)
    collecting = gc.isenabled()
    gc.disable()  # millions of containers, none of which is garbage
    try:
        value = _RestrictedUnpickler(_FrameReader(checked.frames())).load()
    except AdvisorError:
        raise
    except MemoryError:
        raise AdvisorError(f"{path}: too large for this machine's memory") from None
    except _DAMAGE as error:
        why = f"{type(error).__name__}: {error}"[:120]
        raise AdvisorError(f"{path}: a damaged pickle ({why}); save or copy it again") from None
    finally:
        if collecting:
            gc.enable()
    return PickleContent(value, checked.containers, checked.seen)


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that refuses all look-ups of names, as a second safeguard."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError("names are not looked up")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("names are not looked up")


class _FrameReader:
    """File object for the unpickler, made of frames fetched as needed."""

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self._now = b""
        self._at = 0

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer at the end."""
        while len(self._now) - self._at < size:
            more = next(self._frames, None)
            if more is None:
                break
            self._now, self._at = self._now[self._at :] + more, 0
        result = self._now[self._at : self._at + size]
        self._at += len(result)
        return result

    def readline(self) -> bytes:
        """Refuse to read a line: only text opcodes have lines, and none is allowed."""
        raise pickle.UnpicklingError("a line of text")


class _Checked:
    """Checker of opcodes, which passes on only the allowed ones."""

    def __init__(self, blocks: Iterable[bytes], path: str) -> None:
        self._blocks = blocks
        self._path = path
        self._puts = 0
        self.containers = 0
        self.seen = 0

    def frames(self) -> Iterator[bytes]:
        """Yield the same pickle in frames of whole opcodes, with dicts as lists."""
        yield b"\x80\x04"
        rest, first = b"", True
        for block in at_most(self._blocks, BLOCK):
            data = rest + block if rest else block
            start = self.seen
            at = 0
            if first:
                if len(data) < 2:
                    rest = data
                    continue
                first = False
                if not looks_like_pickle(data):
                    raise AdvisorError(
                        f"{self._path}: no pickle of protocol 2 or later, which torch writes"
                    )
                at = 2
            parts: list[bytes] = []
            end, over = self._walk(data, at, start, parts)
            self.seen += end
            rest = data[end:]
            if self.containers > max(MAX_CONTAINERS, (self.seen + len(rest)) // BYTES_A_CONTAINER):
                raise AdvisorError(
                    f"{self._path}: not a memory snapshot: {self.containers:,} containers"
                )
            body = b"".join(parts)
            if body:
                yield b"\x95" + len(body).to_bytes(8, "little") + body
            if over:
                return
        raise AdvisorError(f"{self._path}: cut off; it was not written to its end")

    def _walk(self, data: bytes, index: int, start: int, parts: list[bytes]) -> tuple[int, bool]:
        """Check whole opcodes from ``index`` on. Return where the first incomplete one begins, and
        whether the pickle ended."""
        size = len(data)
        run = _RUN.match
        while True:
            result = run(data, index)
            end = result.end() if result is not None else index
            if end > index:
                parts.append(data[index:end])
                index = end
            if index >= size:
                return index, False
            op = data[index]
            if (made := _CONTAINERS.get(op)) is not None:
                self.containers += 1
                parts.append(made)
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
                length = self._length(data, index, start)
                if index + length > size:
                    return index, False
                if op != _FRAME:
                    parts.append(data[index : index + length])
                index += length

    def _length(self, data: bytes, index: int, start: int) -> int:
        """Return the size of an opcode with its argument, bytes. Raises AdvisorError: forbidden."""
        op = data[index]
        if (wide := _LENGTHS.get(op)) is not None:
            said = data[index + 1 : index + 1 + wide]
            if len(said) < wide:
                return 1 + wide
            size = int.from_bytes(said, "little")
            if size > MAX_STRING:
                raise AdvisorError(f"{self._path}: a string of {size:,} bytes: no snapshot")
            return 1 + wide + size
        if op == _LONG1:
            size = data[index + 1] if index + 1 < len(data) else 0
            if size > MAX_INT:
                raise AdvisorError(f"{self._path}: a number of {size} bytes: no snapshot")
            return 2 + size
        if op == _FRAME:
            return 9
        if op == _LONG_BINPUT:
            if index + 5 <= len(data):
                number = int.from_bytes(data[index + 1 : index + 5], "little")
                self._puts += 1
                if number > 255 + self._puts:  # the pickler counts; a table of that size is made
                    raise AdvisorError(f"{self._path}: a damaged pickle (memo {number:,})")
            return 5
        if op in _FIXED:
            return 1 + _FIXED[op]
        raise AdvisorError(
            f"{self._path}: not only plain values ({_name(op)} at byte {start + index:,}); a "
            "pickle "
            "like that can run code, and is not read"
        )


def _name(op: int) -> str:
    import pickletools

    known: dict[str, Any] = pickletools.code2op  # type: ignore[attr-defined]
    result = known.get(chr(op))
    return f"opcode {result.name}" if result is not None else f"byte 0x{op:02x}"


class PickledFields:
    """Reader of former dicts as mappings. It is kept between records, because records of a kind
    have the same keys in the same order."""

    def __init__(self) -> None:
        self._keys: list[Any] | None = None
        self._places: dict[str, int] = {}

    def from_value(self, value: Any) -> dict[str, Any] | None:
        """Return the record as a dict; ``None`` if it is no dict with strings as keys."""
        if type(value) is not list or len(value) > 2 * MAX_FIELDS:
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
        """Return the index in ``value`` of each key's value; the same object for records of the
        same keys. ``None`` if it is no dict with strings as keys. Fast, for millions of records."""
        if type(value) is not list:
            return None
        keys = value[::2]
        if keys != self._keys or len(value) % 2:
            if len(value) % 2 or len(keys) > MAX_FIELDS or any(type(k) is not str for k in keys):
                return None
            self._keys = keys
            self._places = {key: 2 * n + 1 for n, key in enumerate(keys)}
        return self._places
