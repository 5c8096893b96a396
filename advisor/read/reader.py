"""Base class of the readers of all formats, their options, and their common limits."""

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
"""Number of bytes of text decoded at a time. Larger pieces save no time and cost memory."""
PARALLEL_FROM = 96 << 20
"""Uncompressed size in bytes from which several processes decode."""
EVENT_BYTES = 400
"""Memory in bytes per event while it is read and measured: 10 million events take 4.1 GB."""
MEMORY_SHARE = 0.6
"""Maximum share of the free memory that one trace may take."""
NO_ROOM = "more events than the free memory has room for; read the first {:,}"


def memory_budget() -> int:
    """Return the memory in bytes that one trace may take. If the free memory is unknown, 16 GB are
    assumed."""
    free_bytes = available_memory()
    return int(MEMORY_SHARE * (16 << 30 if free_bytes is None else free_bytes))


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a trace."""

    max_bytes: int = DEFAULT_LIMIT
    """Uncompressed size at which reading stops with an error."""
    processes: int | None = None
    """Number of decoding processes. ``None``: one per usable core, or 1 for small traces."""
    progress: Callable[[str, int], None] | None = None
    """Function called repeatedly with (path, uncompressed bytes so far)."""
    peek: Callable[[bytes], None] | None = None
    """Function called with each block of uncompressed text, for data that the tables lack."""
    memory_snapshot: str | None = None
    """Path of a memory snapshot that belongs to the trace (``--memory-snapshot``)."""
    kernel_profile: str | None = None
    """Path of a kernel profiler's report of the same program, or a folder of reports
    (``--kernel-profile``)."""
    compile_log: str | None = None
    """Path of a torch.compile log of the same program, or a folder of logs (``--compile-log``)."""
    step_ranges: str | None = None
    """Regular expression for the names of ranges that are steps."""
    recorded_gpu: str | None = None
    """Name of the recorded GPU (``a100 sxm4 80gb``), used if the file does not name a known one."""
    ranks: str = ""
    """Ranks to keep, such as ``0-63,512``. Empty: all ranks."""
    urls: bool = True
    """Whether URLs are fetched. If false, every input is a path."""
    piece_bytes: int = PIECE
    """Number of bytes of text decoded at a time."""
    parallel_from: int = PARALLEL_FROM
    """Uncompressed size in bytes from which several processes decode."""


class ReaderClaim(IntEnum):
    """Certainty of a reader that a file is of its format."""

    NO = 0
    PERHAPS = 1
    """The file may be of this format, but a reader that is sure takes precedence."""
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
    """Program that ran, if the tool always runs the same one."""


class Reader(ABC):
    """Reader of one file format, which builds a :class:`~advisor.core.trace.Trace`.

    Readers are discovered like rules: in ``advisor/read/formats/``, and in installed packages that
    name a module or class under the entry point ``advisor.readers``. A reader is created without
    arguments and keeps no state between files."""

    name: ClassVar[str]
    """Name of the format, one word, for ``TraceMeta.format``."""
    description: ClassVar[str]
    """Description of the format, with an article and suffixes, for errors: ``a PyTorch profiler
    trace (.json, .json.gz or .json.zst)``."""
    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of its files, with the dot and in lower case, without ``.gz`` or ``.zst``."""
    shared_suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes, as in ``suffixes``, that files of other formats also have. In a folder, a file with
    such a suffix is read if its first bytes are of this format."""
    meta_field: ClassVar[str] = ""
    """Field of TraceMeta filled by files that hold no trace. If given with traces, they are
    joined with :meth:`merge`, and every trace gets the result (``core/auxiliary_inputs.py``)."""

    tool: ClassVar[Tool | None] = None
    """Tool that writes its files; reports advise how to record more with it. ``None``: PyTorch's
    profiler, or a tool with the same options."""
    layer_times: ClassVar[bool] = False
    """Whether its rows are the layers of one inference with mean times, so there are no steps."""

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
        """Return how sure the reader is that a file is of its format. ``head``: unpacked beginning,
        from one byte to about a megabyte. ``path``: as given, ``-`` for standard input. Do not rely
        on the name alone: the answer must be right for any file."""

    @abstractmethod
    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Return the trace. ``source.blocks()`` yields the unpacked bytes from the start, up to the
        limit. ``source.path`` is for formats that must open the file themselves.
        :func:`advisor.read.build.build_trace` makes tables from rows in nanoseconds.

        Raises AdvisorError, with one line, for a file that holds no trace. Lesser damage is left
        out, counted and recorded in ``Trace.meta``."""
