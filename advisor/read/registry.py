"""Registry of readers, and reading of a file to a :class:`Trace` by the right one."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from typing import ParamSpec, TypeVar

from advisor.core.discovery import classes_in, loading
from advisor.core.errors import AdvisorError
from advisor.core.gpus import find_gpu
from advisor.core.trace import KINETO, Trace
from advisor.read.reader import Reader, ReaderClaim, ReadOptions, Tool
from advisor.read.source import PACKINGS, SEE_FORMATS, ByteSource, kind_of

ENTRY_POINTS = "advisor.readers"
P = ParamSpec("P")
Result = TypeVar("Result")


@cache
def bundled_readers() -> tuple[Reader, ...]:
    """Return the readers of this package, by their files' names."""
    import advisor.read.formats

    result = pkgutil.iter_modules(advisor.read.formats.__path__, "advisor.read.formats.")
    names = (item.name + ".reader" * item.ispkg for item in result)
    modules = map(importlib.import_module, names)
    return tuple(cls() for module in modules for cls in classes_in(module, Reader))


@cache
def installed_readers() -> tuple[Reader, ...]:
    """Return the readers of other packages. Raises AdvisorError if one cannot be loaded."""
    result: dict[type, Reader] = {}
    for point in entry_points(group=ENTRY_POINTS):
        with loading(point, "reader"):
            loaded = point.load()
            for cls in classes_in(loaded, Reader) if inspect.ismodule(loaded) else [loaded]:
                reader = cls()
                if not isinstance(reader, Reader):
                    raise TypeError(f"{cls.__name__} is no Reader")
                result[cls] = reader
    return tuple(result.values())


def all_readers() -> tuple[Reader, ...]:
    """Return all readers, those of this package first."""
    return (*bundled_readers(), *installed_readers())


def list_formats() -> list[str]:
    """Return descriptions of all formats; those of PyTorch's own profiler come first."""
    known = dict.fromkeys(reader.description for reader in all_readers())
    return sorted(known, key=lambda text: "PyTorch profiler" not in text)


def reader_of(source: ByteSource) -> Reader:
    """Return the reader that is most sure of a file; of equals the first. Raises AdvisorError if
    none knows it."""
    head = source.head()
    own = _most_certain(bundled_readers(), head, source.path)
    if own is not None and own[0] is ReaderClaim.SURE:
        return own[1]  # without a look at what is installed: that takes as long as a small trace
    result = [
        claim
        for claim in (own, _most_certain(installed_readers(), head, source.path))
        if claim is not None
    ]
    other = kind_of(head, str(source.path))
    if not result or (
        other is not None
        and other[1] is not None  # a cure: it is another tool's file, and no reader's after all
        and max(claim for claim, _ in result) is not ReaderClaim.SURE
    ):
        what, cure = other or (f"unknown format ({source.beginning()})", None)
        raise AdvisorError(f"{source.path}: {what}; {cure or SEE_FORMATS}")
    return max(result, key=lambda claim: claim[0])[1]


def refuse_unknown(first: bytes, path: str) -> None:
    """Raise AdvisorError if no reader knows a file by its first bytes, packed or not."""
    if not first.startswith(b"SQLite format 3"):  # judged by tables that may stand further behind
        source = ByteSource(path, data=first)
        if source.head():
            reader_of(source)


def find_tool(trace_format: str | None, framework: str | None) -> Tool | None:
    """Return the tool that records a format; ``None``: PyTorch's profiler or one like it."""
    for readers in (bundled_readers, installed_readers):
        for reader in readers():
            if reader.name == trace_format:
                return reader.find_tool(framework)
    return None


def is_trace_name(name: str) -> bool:
    return any(is_named_for(reader, name) for reader in all_readers())


def is_named_for(reader: Reader, name: str) -> bool:
    """Return whether a file's name matches a reader's patterns."""
    bare = _bare(name)
    return any(fnmatchcase(bare, each) for each in reader.patterns)


def begins_like_trace(path: str, *, any_name: bool = False) -> bool:
    """Return whether a reader is sure of a file by its start: one whose suffix the file has
    (``Reader.shared_suffixes``), or of ``any_name``."""
    bare = _bare(path)
    readers = [each for each in all_readers() if any_name or bare.endswith(each.shared_suffixes)]
    if not readers:
        return False
    try:
        claim = _most_certain(readers, ByteSource(path).head(), path)
    except AdvisorError:
        return False
    return claim is not None and claim[0] is ReaderClaim.SURE


def _bare(name: str) -> str:
    name = name.lower()
    return next((name.removesuffix(end) for end in PACKINGS if name.endswith(end)), name)


def _most_certain(
    candidates: Iterable[Reader], head: bytes, path: str
) -> tuple[ReaderClaim, Reader] | None:
    claims = [
        (ReaderClaim(int(_contained(reader, path, reader.sniff, head, path))), reader)
        for reader in candidates
    ]
    best = max(claims, key=lambda claim: claim[0], default=None)
    return best if best is not None and best[0] else None


def _contained(
    reader: Reader, path: str, call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs
) -> Result:
    try:
        return call(*args, **kwargs)
    except AdvisorError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise AdvisorError(f"{path}: the reader {reader.name!r} failed ({why})") from None


# -- a file to a trace -----------------------------------------------------------------------------


def read_trace(path: str, options: ReadOptions | None = None) -> Trace:
    """Read one trace file (``-``: standard input), packed or not.

    Raises AdvisorError when the file holds no trace at all. Damage short of that (a truncated
    file, unreadable events) is repaired or left out, counted, and recorded in ``Trace.meta``."""
    options = options or ReadOptions()
    return _read(ByteSource(str(path), limit=options.max_bytes, peek=options.peek), options)


def read_bytes(text: bytes, name: str = "<memory>", options: ReadOptions | None = None) -> Trace:
    """Read a trace from memory, packed or not. Raises AdvisorError like :func:`read_trace`."""
    options = options or ReadOptions()
    return _read(ByteSource(name, limit=options.max_bytes, data=text), options)


def _read(source: ByteSource, options: ReadOptions) -> Trace:
    reader = reader_of(source)
    if reader in bundled_readers():
        trace: object = reader.read(source, options)
    else:
        trace = _contained(reader, source.path, reader.read, source, options)
    if not isinstance(trace, Trace):  # somebody else's
        raise AdvisorError(f"{source.path}: the reader {reader.name!r} failed (it gave no Trace)")
    form = trace.meta.format if reader.name == KINETO else reader.name
    if form != reader.name:  # it says that we wrote it, from a file of another format
        reader = next((each for each in all_readers() if each.name == form), reader)
    gpu = None if options.recorded_gpu is None else find_gpu(options.recorded_gpu).gpu.name
    meta = replace(
        trace.meta,
        format=reader.name,
        layer_times=reader.layer_times,
        step_ranges=options.step_ranges,
        gpu=gpu,
    )
    return replace(trace, meta=meta)


def with_window(trace: Trace, rank: int | None, window: int) -> Trace:
    return replace(trace, meta=replace(trace.meta, rank=rank, window=window))
