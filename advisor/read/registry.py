"""Which readers there are, and which of them a file is for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from advisor.core.errors import AdvisorError
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import PACKINGS, ByteSource
from advisor.read.unknown import kind_of

if TYPE_CHECKING:
    from advisor.core.trace import Trace

ENTRY_POINTS = "advisor.readers"
P = ParamSpec("P")
Result = TypeVar("Result")


@cache
def bundled() -> tuple[Reader, ...]:
    """Our own, by their files' names."""
    import advisor.read.readers

    result = pkgutil.iter_modules(advisor.read.readers.__path__, "advisor.read.readers.")
    modules = (importlib.import_module(item.name) for item in result)
    return tuple(cls() for module in modules for cls in _readers_in(module))


@cache
def installed() -> tuple[Reader, ...]:
    """Those of other packages. Raises AdvisorError for one that cannot be loaded."""
    result: dict[type, Reader] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            loaded = point.load()
            for cls in _readers_in(loaded) if inspect.ismodule(loaded) else [loaded]:
                reader = cls()
                if not isinstance(reader, Reader):
                    raise TypeError(f"{cls.__name__} is no Reader")
                result[cls] = reader
        except Exception as error:  # somebody else's code may raise anything
            why = f"{type(error).__name__}: {error}"[:200]
            raise AdvisorError(
                f"reader package {point.value}: cannot be loaded ({why}); mend or uninstall it"
            ) from None
    return tuple(result.values())


def readers() -> tuple[Reader, ...]:
    """All of them, our own first."""
    return (*bundled(), *installed())


def reader_of(source: ByteSource) -> Reader:
    """The reader that is most certain of a file; of equals the first. Raises AdvisorError: none
    knows it, and then the line says what is read."""
    head = source.head()
    own = _most_certain(bundled(), head, source.path)
    if own is not None and own[0] is ReaderClaim.SURE:
        return own[1]  # without a look at what is installed: that takes as long as a small trace
    result = [
        claim for claim in (own, _most_certain(installed(), head, source.path)) if claim is not None
    ]
    other = kind_of(head, str(source.path))
    if not result or (
        other is not None
        and other[1] is not None  # a cure: it is another tool's file, and no reader's after all
        and max(claim for claim, _ in result) is not ReaderClaim.SURE
    ):
        what, cure = other or ("of no format that is known", None)
        *most, last = dict.fromkeys(reader.reads for reader in readers())
        give = f"give {', '.join(most)}, or {last}" if most else f"give {last}"
        raise AdvisorError(f"{source.path}: {what}; {cure or give}")
    return max(result, key=lambda claim: claim[0])[1]


def refuse_unknown(first: bytes, path: str) -> None:
    """Raise AdvisorError if no reader knows a file by its first bytes, packed or not."""
    if not first.startswith(b"SQLite format 3"):  # judged by tables that may stand further behind
        source = ByteSource(path, given=first)
        if source.head():
            reader_of(source)


def read_by(reader: Reader, source: ByteSource, options: ReadOptions) -> Trace:
    """What a reader reads. Raises AdvisorError, also for whatever one of somebody else raises."""
    if reader in bundled():
        return reader.read(source, options)
    return _contained(reader, source.path, reader.read, source, options)


def is_trace_name(name: str) -> bool:
    """Whether a file of a folder is named like a trace."""
    name = name.lower()
    bare = next((name.removesuffix(end) for end in PACKINGS if name.endswith(end)), name)
    return bare.endswith(tuple(end for reader in readers() for end in reader.suffixes))


def trace_names() -> str:
    """The names that are looked for in a folder, as patterns."""
    ends = [end for reader in readers() for end in reader.suffixes]
    return ", ".join(f"*{end}{packed}" for end in ends for packed in ("", ".gz", ".zst"))


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


def _readers_in(module: ModuleType) -> Iterator[type[Reader]]:
    for value in vars(module).values():
        if (
            inspect.isclass(value)
            and issubclass(value, Reader)
            and not inspect.isabstract(value)
            and value.__module__ == module.__name__
        ):
            yield value
