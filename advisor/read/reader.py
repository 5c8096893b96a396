"""Base class of the readers of all formats, their options, and the limits they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from advisor.core.cgroup import available_memory
from advisor.read.source import DEFAULT_LIMIT, ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace

PIECE = 4 << 20
"""Bytes of text decoded at once. Larger pieces save nothing and cost memory."""
PARALLEL_FROM = 96 << 20
"""Uncompressed size from which several processes decode, bytes."""
EVENT_BYTES = 400
"""Memory that an event takes while it is read and measured, bytes: 10 million take 4.1 GB."""
MEMORY_SHARE = 0.6
"""Share of the free memory that one trace may take."""
NO_ROOM = "more events than the free memory has room for; read the first {:,}"


def memory_budget() -> int:
    """Return the memory that one trace may take, bytes. If the free memory is unknown, 16 GB are
    assumed."""
    free = available_memory()
    return int(MEMORY_SHARE * (16 << 30 if free is None else free))


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a trace."""

    max_bytes: int = DEFAULT_LIMIT
    """Uncompressed size at which reading stops with an error."""
    processes: int | None = None
    """Decoding processes; ``None``: as many as cores that may be used, 1 for small traces."""
    progress: Callable[[str, int], None] | None = None
    """Function called now and then with (path, uncompressed bytes so far)."""
    peek: Callable[[bytes], None] | None = None
    """Function called with each block of uncompressed text: for what the tables do not hold."""
    memory_snapshot: str | None = None
    """Path of a memory snapshot that belongs to the trace (``--memory-snapshot``)."""
    kernel_profile: str | None = None
    """Path of the same program's kernel profiler report, or a folder of them
    (``--kernel-profile``)."""
    compile_log: str | None = None
    """Path of the same program's torch.compile log, or a folder of them (``--compile-log``)."""
    step_ranges: str | None = None
    """Regular expression for the names of ranges that are steps."""
    recorded_gpu: str | None = None
    """Name of the GPU that did the work (``a100 sxm4 80gb``), if the file names no known one."""
    ranks: str = ""
    """Ranks to keep, such as ``0-63,512``; empty: all."""
    urls: bool = True
    """True if URLs are fetched; false: everything given is a path."""
    piece_bytes: int = PIECE
    """Bytes of text decoded at once."""
    parallel_from: int = PARALLEL_FROM
    """Uncompressed size from which several processes decode, bytes."""


class ReaderClaim(IntEnum):
    """Certainty of a reader that a file is of its format."""

    NO = 0
    PERHAPS = 1
    """The file looks like it; a reader that is sure comes first."""
    SURE = 2


class Tool(NamedTuple):
    """Recording tool other than PyTorch's profiler, and how to use it."""

    command: str
    """Command or profiler that records everything."""
    step: str
    """Call or range that marks a step."""
    host: str
    """Option or range that shows the host's work in a program without PyTorch."""
    records_device: bool = False
    """Whether the command also records grids, blocks and the device's properties."""
    program: str = ""
    """Program that ran, where it is always the same one."""


class Reader(ABC):
    """Reader of one file format, which makes the tables of a :class:`~advisor.core.trace.Trace`.

    Readers are found like rules: those in ``advisor/read/formats/``, and those that installed
    packages name under the entry point ``advisor.readers`` (a module, or a class in it). A reader
    is made without arguments and keeps nothing between files."""

    name: ClassVar[str]
    """Name of the format, one word, for ``TraceMeta.format``."""
    description: ClassVar[str]
    """Description of the format, with an article and suffixes, for errors: ``a PyTorch profiler
    trace (.json, .json.gz or .json.zst)``."""
    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of its files, with the dot and in lower case, without ``.gz`` or ``.zst``."""
    shared_suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes, as in ``suffixes``, that any other file may have too: in a folder such a file is
    read if it begins as one of this format."""
    meta_field: ClassVar[str] = ""
    """Field of TraceMeta filled by files that hold no trace. Given beside traces, they are joined
    with :meth:`merge`, and every trace gets the result (``core/auxiliary_inputs.py``)."""

    tool: ClassVar[Tool | None] = None
    """Tool that writes its files; reports advise how to record more with it. ``None``: PyTorch's
    profiler, or one with its options."""
    layer_times: ClassVar[bool] = False
    """Whether its rows are the layers of one inference, with mean times: no step begins or ends."""

    def find_tool(self, framework: str | None) -> Tool | None:  # noqa: ARG002
        """Return the tool for a program of a framework (``TraceMeta.framework``)."""
        return self.tool

    def merge(self, values: list[Any]) -> Any:
        """Merge the ``meta_field`` values of two or more files."""
        raise NotImplementedError

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns for the names of its files in a folder, without ``.gz`` or ``.zst``."""
        return tuple(f"*{suffix}" for suffix in self.suffixes)

    @abstractmethod
    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Return how sure it is that a file is of its format. ``head``: its start, unpacked, from a
        byte to about a megabyte; ``path``: as given, ``-`` for standard input. A name alone is no
        proof: the answer must hold for any file."""

    @abstractmethod
    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return the trace. ``source.blocks()`` yields its bytes, unpacked and bounded, from their
        start; ``source.path`` is for formats that must open the file themselves. Rows in
        nanoseconds become tables by :func:`advisor.read.build.build_trace`.

        Raises AdvisorError, with one line, for a file that holds no trace. Damage short of that is
        left out, counted and recorded in ``Trace.meta``."""
