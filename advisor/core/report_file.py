"""JSON files of reports: write them, recognise them by their first bytes, read them within
limits."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.files import open_regular, read_regular

HEAD_BYTES = 200
"""Number of bytes at the beginning of a file that show its kind."""
_NUMBER_LIST = re.compile(rb"\[\n +-?\d+(?:,\n +-?\d+)*\n +\]")


class SavedStruct(Protocol):
    """A Struct that is saved in its own file."""

    schema: str

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read a struct from JSON. Raises AdvisorError for anything else."""


AnySaved = TypeVar("AnySaved", bound=SavedStruct)


def encode_json(value: msgspec.Struct) -> bytes:
    """Return JSON indented by two, with each list of whole numbers on one line."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return _NUMBER_LIST.sub(lambda result: b" ".join(result[0].split()), text)


class _Head(msgspec.Struct):
    schema: str = ""


def decode_json(
    text: bytes | str,
    kind: type[AnySaved],
    name: str,
    schema: str,
    max_bytes: int | None = None,
    *,
    older: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> AnySaved:
    """Return the struct in JSON of this schema. ``name``: its name in messages. ``older``:
    converters of earlier JSON, by schema. Raises AdvisorError for another kind or version, or if
    the JSON is larger than ``max_bytes``."""
    if max_bytes is not None and len(text) > max_bytes:
        raise AdvisorError(f"not a {name}: larger than {max_bytes >> 20} MiB")
    try:
        converter = (older or {}).get(msgspec.json.decode(text, type=_Head).schema)
        if converter is None:
            result = msgspec.json.decode(text, type=kind)
        else:
            result = msgspec.convert(converter(msgspec.json.decode(text)), type=kind)
    except RecursionError:
        raise AdvisorError(f"not a {name}: nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise AdvisorError(f"not a {name}: {str(error)[:200]}") from None
    if result.schema != schema:
        raise AdvisorError(f"{name} schema {result.schema[:60]!r} is not {schema!r}")
    return result


def has_schema(path: str | Path, schema: str) -> bool:
    """Return whether a file begins like JSON of this schema, in any version."""
    if str(path) == "-":
        return False
    try:
        with open_regular(path) as opened:
            return f'"{schema.rpartition("/")[0]}/'.encode() in opened.read(HEAD_BYTES)
    except (OSError, ValueError):
        return False


def read_saved(
    path: str | Path, kind: type[AnySaved], schema: str, max_bytes: int
) -> AnySaved | None:
    """Read a file of a kind, in any version of its schema. Return ``None`` if it is of another kind
    or cannot be read. Raises AdvisorError if it is damaged or larger than ``max_bytes``."""
    if not has_schema(path, schema):
        return None
    try:
        text = read_regular(path, max_bytes)
    except (OSError, ValueError):
        return None  # the trace reader reports the error
    try:
        return kind.from_json(text)
    except AdvisorError as error:
        raise AdvisorError(f"{path}: {error}") from None
