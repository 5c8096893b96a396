"""Reader: what every format is read by; and how much is to be read of a file, for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from advisor.core.cgroup import available_memory
from advisor.read.source import DEFAULT_LIMIT, ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace

PIECE = 4 << 20
"""Bytes of text decoded at once. Larger pieces save nothing and cost memory."""
PARALLEL_FROM = 96 << 20
"""From this many uncompressed bytes on, several processes decode."""
EVENT_BYTES = 400
"""Memory that an event takes while it is read and measured: 10 million take 4.1 GB."""
MEMORY_SHARE = 0.6
"""Of the free memory that one trace may take."""
NO_ROOM = "more events than the free memory has room for; read the first {:,}"


def memory_budget() -> int:
    """Bytes that one trace may take in memory; where the system does not say, as if 16 GB were
    free."""
    free = available_memory()
    return int(MEMORY_SHARE * (16 << 30 if free is None else free))


@dataclass(frozen=True)
class ReadOptions:
    """How to read a trace."""

    max_bytes: int = DEFAULT_LIMIT
    """Uncompressed size at which reading stops with an error."""
    processes: int | None = None
    """Decoding processes; ``None``: as many as cores that may be used, 1 for small traces."""
    progress: Callable[[str, int], None] | None = None
    """Called with (path, uncompressed bytes so far) now and then."""
    peek: Callable[[bytes], None] | None = None
    """Called with each block of uncompressed text: for what tables do not hold."""
    memory: str | None = None
    """A memory snapshot that belongs to what is read (``--memory``)."""
    kernels: str | None = None
    """A kernel profiler's report, or a folder of them, of the same program (``--kernels``)."""
    compile_log: str | None = None
    """Logs of torch.compile, or a folder of them, of the same program (``--compile-log``)."""
    step_ranges: str | None = None
    """Regular expression of the names of the ranges that are steps."""
    gpu: str | None = None
    """The GPU that ran the work, where a file does not name one it knows (``a100 sxm4 80gb``)."""
    ranks: str = ""
    """Ranks to keep, such as ``0-63,512``; empty: all."""
    urls: bool = True
    """Whether a URL is fetched. False: what is given are paths, whatever they look like."""
    piece_bytes: int = PIECE
    """Bytes of text that are decoded at once."""
    parallel_from: int = PARALLEL_FROM
    """Uncompressed bytes from which on several processes are used."""


class ReaderClaim(IntEnum):
    """How sure a reader is that a file is its own."""

    NO = 0
    PERHAPS = 1
    """It looks like it; another reader that is sure comes first."""
    SURE = 2


class Reader(ABC):
    """One file format, to the tables of a :class:`~advisor.core.trace.Trace`.

    Readers are found like rules: those in ``advisor/read/readers/``, and those that installed
    packages name under the entry point ``advisor.readers`` (a module, or a class in it). A reader
    is made without arguments and keeps nothing between files.
    """

    name: ClassVar[str]
    """One word; what ``TraceMeta.format`` says."""
    description: ClassVar[str]
    """What it reads, with an article and suffixes, for whoever gave something else: ``a PyTorch
    profiler trace (.json, .json.gz or .json.zst)``."""
    suffixes: ClassVar[tuple[str, ...]]
    """Of its files, with the dot and in lower case, without ``.gz`` or ``.zst``."""
    meta_field: ClassVar[str] = ""
    """The field of TraceMeta that its files fill where they hold no trace: beside traces they are
    joined with :meth:`merge`, and every trace has the result (``core/auxiliary_inputs.py``)."""

    def merge(self, values: list[Any]) -> Any:
        """What several files say, two or more, as one."""
        raise NotImplementedError

    @property
    def patterns(self) -> tuple[str, ...]:
        """Which files of a folder are looked at, by their names without ``.gz`` or ``.zst``."""
        return tuple(f"*{suffix}" for suffix in self.suffixes)

    @abstractmethod
    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Whether a file is its own. ``head``: how it begins, unpacked, at least a byte and at
        most a megabyte or so; ``path``: as it was given, ``-`` for standard input. A name alone
        is no proof: what is said here must hold for any file that anybody gives."""

    @abstractmethod
    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """The trace. ``source.blocks()`` yields its bytes, unpacked and bounded, from their start;
        ``source.path`` is for formats that must open the file themselves. Rows in nanoseconds
        become tables by :func:`advisor.read.build.build_trace`.

        Raises AdvisorError, with one line, for a file that holds no trace. Damage short of that is
        left out, counted and recorded in ``Trace.meta``.
        """
