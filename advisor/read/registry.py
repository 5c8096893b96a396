"""Registry of readers. Reads a file as a :class:`Trace` with the reader of its format."""

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
    """Return the readers of this package, in the order of their modules."""
    import advisor.read.formats

    module_infos = pkgutil.iter_modules(advisor.read.formats.__path__, "advisor.read.formats.")
    names = (info.name + ".reader" * info.ispkg for info in module_infos)
    modules = map(importlib.import_module, names)
    return tuple(cls() for module in modules for cls in classes_in(module, Reader))


@cache
def installed_readers() -> tuple[Reader, ...]:
    """Return the readers of other packages. Raises AdvisorError if one cannot be loaded."""
    readers: dict[type, Reader] = {}
    for point in entry_points(group=ENTRY_POINTS):
        with loading(point, "reader"):
            loaded = point.load()
            for cls in classes_in(loaded, Reader) if inspect.ismodule(loaded) else [loaded]:
                reader = cls()
                if not isinstance(reader, Reader):
                    raise TypeError(f"{cls.__name__} is not a Reader")
                readers[cls] = reader
    return tuple(readers.values())


def all_readers() -> tuple[Reader, ...]:
    """Return all readers, those of this package first."""
    return (*bundled_readers(), *installed_readers())


def list_formats() -> list[str]:
    """Return descriptions of all formats, starting with those of PyTorch's profiler."""
    descriptions = dict.fromkeys(reader.description for reader in all_readers())
    return sorted(descriptions, key=lambda text: "PyTorch profiler" not in text)


def reader_of(source: ByteSource) -> Reader:
    """Return the reader that is most sure of a file, the first one if several are. Raises
    AdvisorError if no reader knows the file."""
    head = source.head()
    bundled_claim = _find_best_claim(bundled_readers(), head, source.path)
    if bundled_claim is not None and bundled_claim[0] is ReaderClaim.SURE:
        return bundled_claim[1]  # skip entry points: loading them takes as long as a small trace
    claims = [
        claim
        for claim in (bundled_claim, _find_best_claim(installed_readers(), head, source.path))
        if claim is not None
    ]
    known_kind = kind_of(head, str(source.path))
    if not claims or (
        known_kind is not None
        and known_kind[1] is not None  # there is advice: the file belongs to another tool
        and max(claim for claim, _ in claims) is not ReaderClaim.SURE
    ):
        is_csv = str(source.path).lower().endswith(".csv")
        unknown = (f"unknown format ({source.beginning()})", _CSV_ADVICE if is_csv else None)
        kind, advice = known_kind or unknown
        raise AdvisorError(f"{source.path}: {kind}; {advice or SEE_FORMATS}")
    return max(claims, key=lambda claim: claim[0])[1]


_CSV_ADVICE = f"of CSV files, advisor reads those of ncu --csv --page raw; {SEE_FORMATS}"


def refuse_unknown(first: bytes, path: str) -> None:
    """Raise AdvisorError if no reader knows a file by its first bytes, packed or not."""
    if not first.startswith(b"SQLite format 3"):  # its tables may come after these bytes
        source = ByteSource(path, data=first)
        if source.head():
            reader_of(source)


def find_tool(trace_format: str | None, framework: str | None) -> Tool | None:
    """Return the tool that records a format, or ``None`` for PyTorch's profiler or similar."""
    for readers in (bundled_readers, installed_readers):
        for reader in readers():
            if reader.name == trace_format:
                return reader.find_tool(framework)
    return None


def is_trace_name(name: str) -> bool:
    return any(is_named_for(reader, name) for reader in all_readers())


def is_named_for(reader: Reader, name: str) -> bool:
    """Return whether a file's name matches a reader's patterns."""
    unpacked_name = _remove_packing(name)
    return any(fnmatchcase(unpacked_name, pattern) for pattern in reader.patterns)


def begins_like_trace(path: str, *, any_name: bool = False) -> bool:
    """Return whether a reader is sure of a file by its first bytes. Only readers with the file's
    suffix (``Reader.shared_suffixes``) are asked, or all readers if ``any_name``."""
    unpacked_name = _remove_packing(path)
    readers = [r for r in all_readers() if any_name or unpacked_name.endswith(r.shared_suffixes)]
    if not readers:
        return False
    try:
        claim = _find_best_claim(readers, ByteSource(path).head(), path)
    except AdvisorError:
        return False
    return claim is not None and claim[0] is ReaderClaim.SURE


def _remove_packing(name: str) -> str:
    name = name.lower()
    return next((name.removesuffix(end) for end in PACKINGS if name.endswith(end)), name)


def _find_best_claim(
    candidates: Iterable[Reader], head: bytes, path: str
) -> tuple[ReaderClaim, Reader] | None:
    claims = [
        (ReaderClaim(int(_call_reader(reader, path, reader.sniff, head, path))), reader)
        for reader in candidates
    ]
    best = max(claims, key=lambda claim: claim[0], default=None)
    return best if best is not None and best[0] else None


def _call_reader(
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

    Raises AdvisorError if the file holds no trace at all. Lesser damage (a truncated file,
    unreadable events) is repaired or left out, counted, and recorded in ``Trace.meta``."""
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
        trace = _call_reader(reader, source.path, reader.read, source, options)
    if not isinstance(trace, Trace):  # a reader of another package
        raise AdvisorError(
            f"{source.path}: the reader {reader.name!r} failed (it returned no Trace)"
        )
    format_name = trace.meta.format if reader.name == KINETO else reader.name
    if format_name != reader.name:  # advisor exported it from a file of another format
        reader = next((other for other in all_readers() if other.name == format_name), reader)
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
