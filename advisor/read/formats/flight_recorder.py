"""Reader of PyTorch's flight recorder dumps: the last collectives of a rank before a timeout.

``TORCH_FR_BUFFER_SIZE`` (before 2.9 ``TORCH_NCCL_TRACE_BUFFER_SIZE``) turns the recorder on. The
pickle is read without running anything (``plain_pickle.py``). The JSON form has no stacks.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from advisor.core.auxiliary_inputs import FlightCall, FlightDump
from advisor.core.errors import AdvisorError
from advisor.core.finding import Location
from advisor.read.formats.compile_log import LIBRARY
from advisor.read.plain_pickle import PickledFields, looks_like_pickle, read_plain
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.remote.urls import rank_in
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace

_MAX_BYTES = 256 << 20
_MAX_CALLS, _MAX_FRAMES, _MAX_TENSORS, _MAX_GROUPS = 100_000, 256, 64, 4_096
_MAX_TEXT, MAX_RANK = 300, 1 << 20
_JSON_START = re.compile(
    rb'\s*\{\s*"(?:comm_lib_version|entries|nccl_comm_state|pg_config|version)"\s*:'
)
_DUMP_KEYS = (b"pg_config", b"collective_seq_id", b"nccl_comm_state")
_FINAL_NUMBER = re.compile(r"(\d{1,7})$")


class FlightRecorderReader(Reader):
    """Reader of one rank's flight-recorder dump."""

    name = "flight-recorder"
    description = "a flight-recorder dump"
    meta_field = "flight"
    suffixes = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Pattern of torch's own names. Other pickles and JSON files may be of other formats."""
        return ("*trace_rank_*",)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a pickle or JSON with names that no other format has."""
        has_form = looks_like_pickle(head) or _JSON_START.match(head) is not None
        return (
            ReaderClaim.SURE
            if has_form and any(key in head for key in _DUMP_KEYS)
            else ReaderClaim.NO
        )

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.core.trace import blank_trace

        dump = _read_dump(source, min(_MAX_BYTES, options.max_bytes))
        return blank_trace(
            source.path,
            dump.rank,
            bytes_read=source.bytes_read,
            events_read=len(dump.calls),
            flight=(dump,),
        )

    def merge(self, values: list[tuple[FlightDump, ...]]) -> tuple[FlightDump, ...]:
        return tuple(dump for dumps in values for dump in dumps)


def _read_dump(source: ByteSource, limit: int) -> FlightDump:
    path = source.path
    data = source.read_all(limit, f"a flight-recorder dump of more than {limit >> 20} MiB")
    try:
        value = (
            read_plain([data], path).value
            if looks_like_pickle(data[:2])
            else msgspec.json.decode(data)
        )
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:120]
        raise AdvisorError(f"{path}: a damaged flight-recorder dump ({why})") from None
    top = _to_dict(value)
    entries = top.get("entries", [])
    if not isinstance(entries, list) or not ("entries" in top or "pg_config" in top):
        raise AdvisorError(f"{path}: not a flight-recorder dump, which has 'entries'")
    members = {
        _bounded_text(name): _parse_ranks(_to_dict(group).get("ranks"))
        for name, group in islice(_to_dict(top.get("pg_config")).items(), _MAX_GROUPS)
    }
    calls = [_read_call(_to_dict(entry)) for entry in entries[-_MAX_CALLS:]]
    number = _FINAL_NUMBER.search(Path(path).name.partition(".")[0])
    rank = rank_in(Path(path).name)
    if rank is None and number is not None:
        rank = int(number[1])
    return FlightDump(
        path=path,
        rank=rank,
        calls=tuple(call for call in calls if call is not None),
        members={name: ranks for name, ranks in members.items() if ranks},
        damaged=calls.count(None),
    )


def _read_call(entry: dict[str, Any]) -> FlightCall | None:
    """Return the call of an entry, or ``None`` if it is damaged."""
    name, group = entry.get("profiling_name"), entry.get("process_group")
    p2p = entry.get("is_p2p") is True
    sequence = _valid_integer(entry.get("p2p_seq_id" if p2p else "collective_seq_id"))
    if not isinstance(name, str) or not isinstance(group, list | tuple) or sequence is None:
        return None
    # gloo leaves the state unchanged and marks ended calls as retired
    state = "completed" if entry.get("retired") is True else _bounded_text(entry.get("state"))
    return FlightCall(
        group=_bounded_text(group[0]) if group else "",
        description=_bounded_text(group[1]) if len(group) > 1 else "",
        operation=_bounded_text(name.partition(":")[2] or name),
        sequence=sequence,
        p2p=p2p,
        inputs=_read_sizes(entry.get("input_sizes")),
        outputs=_read_sizes(entry.get("output_sizes")),
        dtypes=tuple(_bounded_text(item) for item in _bounded_list(entry.get("input_dtypes"))),
        state=state,
        where=_find_location(entry.get("frames")),
    )


def _find_location(frames: Any) -> Location | None:
    """Return the innermost frame outside of libraries, else the innermost frame."""
    innermost = None
    for value in frames[:_MAX_FRAMES] if isinstance(frames, list) else ():
        frame = _to_dict(value)
        file = _bounded_text(frame.get("filename"))
        if not file:
            continue
        location = Location(
            file=file,
            line=_valid_integer(frame.get("line")),
            function=_bounded_text(frame.get("name")),
        )
        if not LIBRARY.search(file):
            return location
        innermost = innermost or location
    return innermost


def _to_dict(value: Any) -> dict[str, Any]:
    """Return a dict from JSON or a plain pickle. Empty if it is not a dict."""
    if isinstance(value, dict):
        return value
    return PickledFields().from_value(value) or {}


def _read_sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(size for size in map(_valid_integer, _bounded_list(item)) if size is not None)
        for item in _bounded_list(value)
    )


def _parse_ranks(value: Any) -> tuple[int, ...]:
    """Parse ranks as torch writes them: ``"[0, 1]"``."""
    numbers = re.findall(r"\d{1,7}", value[: 1 << 20]) if isinstance(value, str) else []
    return tuple(sorted({int(number) for number in numbers if int(number) < MAX_RANK}))


def _bounded_list(value: Any) -> list[Any]:
    return list(value[:_MAX_TENSORS]) if isinstance(value, list | tuple) else []


def _valid_integer(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _bounded_text(value: Any) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""
