"""Reader of the pickle of a memory snapshot as tables, in the layouts of PyTorch since 2.0.

Blocks first had their stack in ``history``, later in ``frames``. Older segments have no pool and do
not say whether they are expandable. States, addresses of blocks, times, settings and annotations
were added over time. Values missing in a file are null."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.snapshot import (
    ACTIONS,
    ANNOTATION_SCHEMA,
    BLOCK_SCHEMA,
    EVENT_SCHEMA,
    SEGMENT_SCHEMA,
    MemorySnapshot,
    SnapshotFrame,
    Stack,
    typed_table,
)
from advisor.read.plain_pickle import PickledFields, read_plain
from advisor.read.reader import memory_budget

MAX_SNAPSHOT_BYTES = 2 << 30
"""Maximum size of a snapshot, bytes."""
MEMORY_PER_BYTE = 8
"""Memory in bytes of the decoded file per byte of the file."""
_MAX_DEVICES = 64
_MAX_DEPTH = 512
"""Maximum number of frames of a stack. The innermost ones are kept."""
_MAX_TEXT = 1024
"""Maximum number of characters of a label, a name or a setting."""
MAX_INTEGER = 1 << 62
_STATES = {
    "active_allocated": "allocated",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",
    "inactive": "inactive",
}
_ACTIONS = {action: action for action in ACTIONS} | {"free": "free_completed"}


def read_snapshot(
    blocks: Iterable[bytes], path: str, *, max_bytes: int = MAX_SNAPSHOT_BYTES
) -> MemorySnapshot:
    """Read a snapshot from its blocks of bytes.

    Raises AdvisorError, with one line, if it is not a snapshot, holds more than plain values, is
    cut off or damaged. Invalid entries are left out and counted."""
    size_limit = min(max_bytes, MAX_SNAPSHOT_BYTES, memory_budget() // MEMORY_PER_BYTE)
    content = read_plain(_limit_size(blocks, path, size_limit), path)
    builder = _SnapshotBuilder(path, content.containers)
    builder.take(content.value)
    return builder.snapshot()


def _limit_size(blocks: Iterable[bytes], path: str, max_bytes: int) -> Iterable[bytes]:
    bytes_seen = 0
    for block in blocks:
        bytes_seen += len(block)
        if bytes_seen > max_bytes:
            raise AdvisorError(
                f"{path}: a snapshot of more than {max_bytes >> 20:,} MiB; record one with a "
                "smaller max_entries"
            )
        yield block


class _TableBuilder:
    """Table built row by row."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.columns: dict[str, list[Any]] = {name: [] for name in schema}

    def add(self, *values: Any) -> None:
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def frame(self) -> pl.DataFrame:
        columns, self.columns = self.columns, {}
        return typed_table(self.schema, columns)


class _SnapshotBuilder:
    def __init__(self, path: str, max_entries: int) -> None:
        self._path = path
        self._entries_left = max_entries
        """Number of entries that may still be read. Each entry is a container of the file, so one
        that is referenced a million times is not read a million times."""
        self._fields = PickledFields()
        self._segments = _TableBuilder(SEGMENT_SCHEMA)
        self._blocks = _TableBuilder(BLOCK_SCHEMA)
        self._events = _TableBuilder(EVENT_SCHEMA)
        self._annotations = _TableBuilder(ANNOTATION_SCHEMA)
        self._stacks: list[Stack] = []
        self._by_id: dict[int, int | None] = {}
        self._by_stack: dict[Stack, int] = {}
        self._frames: dict[int, SnapshotFrame | None] = {}
        self._settings: dict[str, str] = {}
        self._dropped = Counter[str]()
        self._pools: dict[tuple[int, int], str] = {}

    def snapshot(self) -> MemorySnapshot:
        """Return the snapshot. Raises AdvisorError if it contains no memory."""
        if not self._segments.columns["device"] and not self._events.columns["device"]:
            raise AdvisorError(
                f"{self._path}: a snapshot with no memory in it: nothing was on a GPU when it was "
                "taken"
            )
        return MemorySnapshot(
            path=self._path,
            segments=self._segments.frame(),
            blocks=self._blocks.frame(),
            events=self._events.frame(),
            annotations=self._annotations.frame(),
            stacks=tuple(self._stacks),
            settings=self._settings,
            dropped=self._dropped,
        )

    def take(self, value: Any) -> None:
        """Read the whole file. Raises AdvisorError if it is not a snapshot."""
        fields = PickledFields().from_value(value)
        if fields is None or "segments" not in fields:
            is_old_layout = type(value) is list and (
                not value or "blocks" in (PickledFields().from_value(value[0]) or {})
            )
            if not is_old_layout:
                raise AdvisorError(
                    f"{self._path}: a pickle, but no memory snapshot; give one that "
                    "torch.cuda.memory._dump_snapshot wrote"
                )
            fields = {"segments": value}  # the return value of memory_snapshot()
        for segment in _list_or_empty(fields["segments"]):
            self._add_segment(segment)
        traces = _list_or_empty(fields.get("device_traces"))
        for device, trace in enumerate(traces[:_MAX_DEVICES]):
            self._add_events(device, _list_or_empty(trace))
        for annotation in _list_or_empty(fields.get("external_annotations")):
            self._add_annotation(annotation)
        settings = PickledFields().from_value(fields.get("allocator_settings")) or {}
        for key, setting in settings.items():
            text = self._format_setting(setting)
            if text is not None:
                self._settings[key[:_MAX_TEXT]] = text

    # -- the state ------------------------------------------------------------------------------

    def _add_segment(self, value: Any) -> None:
        fields = self._read_record(value, "segment")
        if fields is None:
            return
        address, total = (
            _valid_integer(fields.get("address")),
            _valid_integer(fields.get("total_size")),
        )
        device = _valid_device(fields.get("device", 0))
        if address is None or total is None or device is None:
            self._count_dropped("segment without address, size or device")
            return
        kind, expandable = fields.get("segment_type"), fields.get("is_expandable")
        row = len(self._segments.columns["device"])
        self._segments.add(
            device,
            address,
            total,
            _valid_signed(fields.get("stream")),
            {"large": True, "small": False}.get(kind) if isinstance(kind, str) else None,
            self._format_pool(fields.get("segment_pool_id")),
            expandable if isinstance(expandable, bool) else None,
            self._get_stack(fields.get("frames")),
        )
        block_address = address
        for block in _list_or_empty(fields.get("blocks")):
            block_address += self._add_block(row, device, block_address, block)

    def _add_block(self, segment: int, device: int, next_address: int, value: Any) -> int:
        """Add a block. Return its size in bytes."""
        fields = self._read_record(value, "block")
        if fields is None:
            return 0
        size, state_name = _valid_integer(fields.get("size")), fields.get("state")
        state = _STATES.get(state_name) if isinstance(state_name, str) else None
        if size is None or state is None:
            self._count_dropped("block without size or state")
            return 0
        address = _valid_integer(fields.get("address"))
        frames, requested = fields.get("frames"), _valid_integer(fields.get("requested_size"))
        if "frames" not in fields:
            last_event = (
                PickledFields().from_value(next(iter(_list_or_empty(fields.get("history"))), None))
                or {}
            )
            frames = last_event.get("frames")
            requested = (
                _valid_integer(last_event.get("real_size")) if requested is None else requested
            )
        if requested is None or requested > size:
            requested = size
        self._blocks.add(
            segment,
            device,
            next_address if address is None else address,
            size,
            0 if state == "inactive" else requested,
            state,
            self._get_stack(frames),
            _valid_label(fields.get("user_metadata")),
        )
        return size

    # -- the history ----------------------------------------------------------------------------

    def _add_events(self, device: int, entries: list[Any]) -> None:
        """Add a device's events. There may be millions, so values are read by index."""
        names = ("action", "addr", "size", "stream", "time_us", "frames", "pool_id",
                 "user_metadata", "device_free")  # fmt: skip
        columns = self._events.columns
        appenders = [columns[name].append for name in EVENT_SCHEMA]
        last_places: dict[str, int] | None = None
        indices: list[int | None] = []
        for entry in entries:
            if self._entries_left <= 0:
                self._count_dropped("entry more than the file has room for")
                return
            self._entries_left -= 1
            places = self._fields.places(entry)
            if places is None:
                self._count_dropped("event that is not a record")
                continue
            if places is not last_places:
                last_places, indices = places, [places.get(name) for name in names]
            action, address, size, stream, time, frames, pool, label, free = (
                None if place is None else entry[place] for place in indices
            )
            known_action = _ACTIONS.get(action, "other") if type(action) is str else None
            if known_action is None:
                self._count_dropped("event without an action")
                continue
            address, size = _valid_integer(address), _valid_integer(size)
            if known_action not in ("snapshot", "other") and (
                size is None or (address is None and known_action != "oom")
            ):
                self._count_dropped("event without address or size")
                continue
            row = (
                device, known_action, None if known_action == "oom" else address, size,
                _valid_signed(stream), _valid_integer(time), self._format_pool(pool),
                self._get_stack(frames), _valid_label(label), _valid_integer(free),
            )  # fmt: skip
            for append, item in zip(appenders, row, strict=True):
                append(item)

    def _add_annotation(self, value: Any) -> None:
        fields = self._read_record(value, "annotation")
        if fields is None:
            return
        name, stage, time = (
            fields.get("name"),
            fields.get("stage"),
            _valid_integer(fields.get("time_us")),
        )
        if not isinstance(name, str) or time is None:
            self._count_dropped("annotation without name or time")
            return
        self._annotations.add(
            _valid_device(fields.get("device", 0)),
            time,
            name[:_MAX_TEXT],
            stage[:16] if isinstance(stage, str) else None,
        )

    # -- values ---------------------------------------------------------------------------------

    def _get_stack(self, frames: Any) -> int | None:
        """Return the row of a stack, or ``None`` if none was recorded. A list with the same id is
        the same stack, because a file holds each once."""
        if type(frames) is not list:
            return None
        key = id(frames)
        if key not in self._by_id:
            result = [self._get_frame(frame) for frame in frames[:_MAX_DEPTH]]
            stack = tuple(frame for frame in result if frame is not None)
            number = self._by_stack.setdefault(stack, len(self._stacks))
            if number == len(self._stacks):
                self._stacks.append(stack)
            self._by_id[key] = number
        return self._by_id[key]

    def _get_frame(self, value: Any) -> SnapshotFrame | None:
        key = id(value)
        if key not in self._frames:
            fields = PickledFields().from_value(value)
            frame = None
            if fields is not None:
                file, line, name = fields.get("filename"), fields.get("line"), fields.get("name")
                frame = SnapshotFrame(
                    file[:4096] if isinstance(file, str) else "",
                    _valid_integer(line) or 0,
                    name[:_MAX_TEXT] if isinstance(name, str) else "",
                )
            self._frames[key] = frame
        return self._frames[key]

    def _format_pool(self, value: Any) -> str | None:
        if type(value) is not tuple or len(value) != 2 or value == (0, 0):
            return None
        first, second = value
        if type(first) is not int or type(second) is not int:
            return None
        return f"{first}.{second}"[:64]

    def _format_setting(self, value: Any) -> str | None:
        if isinstance(value, str | bool | int | float):
            return str(value)[:_MAX_TEXT]
        return None

    def _read_record(self, value: Any, entry_kind: str) -> dict[str, Any] | None:
        if self._entries_left <= 0:
            self._count_dropped("entry more than the file has room for")
            return None
        self._entries_left -= 1
        fields = PickledFields().from_value(value)
        if fields is None:
            self._count_dropped(f"{entry_kind} that is not a record")
        return fields

    def _count_dropped(self, why: str) -> None:
        self._dropped[why] += 1


def _list_or_empty(value: Any) -> list[Any]:
    return value if type(value) is list else []


def _valid_integer(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_INTEGER else None


def _valid_signed(value: Any) -> int | None:
    return value if type(value) is int and -MAX_INTEGER < value < MAX_INTEGER else None


def _valid_device(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_DEVICES else None


def _valid_label(value: Any) -> str | None:
    return value[:_MAX_TEXT] if type(value) is str and value else None
