"""Reader of a memory snapshot's pickle, as tables: the layouts that PyTorch has written since 2.0.

Blocks carried their stack in ``history`` first, then in ``frames``; segments had neither pool nor
whether they are expandable; states, addresses of blocks, times, settings and annotations came one
by one. What a file does not tell is null."""

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

MAX_BYTES = 2 << 30
"""Largest snapshot, bytes."""
MEMORY = 8
"""Memory per byte of the file, decoded, bytes."""
MAX_DEVICES = 64
MAX_DEPTH = 512
"""Most frames of a stack, the innermost ones."""
MAX_TEXT = 1024
"""Most characters of a label, a name or a setting."""
LARGEST = 1 << 62
_STATES = {
    "active_allocated": "allocated",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",
    "inactive": "inactive",
}
_ACTIONS = {action: action for action in ACTIONS} | {"free": "free_completed"}


def read_snapshot(
    blocks: Iterable[bytes], path: str, *, max_bytes: int = MAX_BYTES
) -> MemorySnapshot:
    """Read a snapshot from its blocks of bytes.

    Raises AdvisorError, with one line: it is no snapshot, holds more than plain values, is cut off
    or damaged. Entries of it that make no sense are left out and counted."""
    most = min(max_bytes, MAX_BYTES, memory_budget() // MEMORY)
    plain = read_plain(_bounded(blocks, path, most), path)
    made = _Tables(path, plain.containers)
    made.take(plain.value)
    return made.snapshot()


def _bounded(blocks: Iterable[bytes], path: str, max_bytes: int) -> Iterable[bytes]:
    seen = 0
    for block in blocks:
        seen += len(block)
        if seen > max_bytes:
            raise AdvisorError(
                f"{path}: a snapshot of more than {max_bytes >> 20:,} MiB; record one with a "
                "smaller max_entries"
            )
        yield block


class _Columns:
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


class _Tables:
    def __init__(self, path: str, most: int) -> None:
        self._path = path
        self._left = most
        """Number of entries that may still be read. Each has a container of its own in the file, so
        one that refers to itself a million times is not read a million times."""
        self._fields = PickledFields()
        self._segments = _Columns(SEGMENT_SCHEMA)
        self._blocks = _Columns(BLOCK_SCHEMA)
        self._events = _Columns(EVENT_SCHEMA)
        self._annotations = _Columns(ANNOTATION_SCHEMA)
        self._stacks: list[Stack] = []
        self._by_id: dict[int, int | None] = {}
        self._by_stack: dict[Stack, int] = {}
        self._frames: dict[int, SnapshotFrame | None] = {}
        self._settings: dict[str, str] = {}
        self._dropped = Counter[str]()
        self._pools: dict[tuple[int, int], str] = {}

    def snapshot(self) -> MemorySnapshot:
        """Return the snapshot. Raises AdvisorError if no memory is in it."""
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
        """Read the whole file. Raises AdvisorError if it is no snapshot."""
        whole = PickledFields().from_value(value)
        if whole is None or "segments" not in whole:
            old = type(value) is list and (
                not value or "blocks" in (PickledFields().from_value(value[0]) or {})
            )
            if not old:
                raise AdvisorError(
                    f"{self._path}: a pickle, but no memory snapshot; give one that "
                    "torch.cuda.memory._dump_snapshot wrote"
                )
            whole = {"segments": value}  # what memory_snapshot() itself returns
        for segment in _items(whole["segments"]):
            self._segment(segment)
        traces = _items(whole.get("device_traces"))
        for device, trace in enumerate(traces[:MAX_DEVICES]):
            self._trace(device, _items(trace))
        for annotation in _items(whole.get("external_annotations")):
            self._annotation(annotation)
        settings = PickledFields().from_value(whole.get("allocator_settings")) or {}
        for key, setting in settings.items():
            text = self._setting(setting)
            if text is not None:
                self._settings[key[:MAX_TEXT]] = text

    # -- the state ------------------------------------------------------------------------------

    def _segment(self, value: Any) -> None:
        fields = self._record(value, "segment")
        if fields is None:
            return
        address, total = _whole(fields.get("address")), _whole(fields.get("total_size"))
        device = _device(fields.get("device", 0))
        if address is None or total is None or device is None:
            self._drop("segment without address, size or device")
            return
        kind, expandable = fields.get("segment_type"), fields.get("is_expandable")
        row = len(self._segments.columns["device"])
        self._segments.add(
            device,
            address,
            total,
            _signed(fields.get("stream")),
            {"large": True, "small": False}.get(kind) if isinstance(kind, str) else None,
            self._pool(fields.get("segment_pool_id")),
            expandable if isinstance(expandable, bool) else None,
            self._stack(fields.get("frames")),
        )
        at = address
        for block in _items(fields.get("blocks")):
            at += self._block(row, device, at, block)

    def _block(self, segment: int, device: int, at: int, value: Any) -> int:
        """Add a block; return its size, bytes."""
        fields = self._record(value, "block")
        if fields is None:
            return 0
        size, said = _whole(fields.get("size")), fields.get("state")
        state = _STATES.get(said) if isinstance(said, str) else None
        if size is None or state is None:
            self._drop("block without size or state")
            return 0
        address = _whole(fields.get("address"))
        frames, requested = fields.get("frames"), _whole(fields.get("requested_size"))
        if "frames" not in fields:
            last = PickledFields().from_value(next(iter(_items(fields.get("history"))), None)) or {}
            frames = last.get("frames")
            requested = _whole(last.get("real_size")) if requested is None else requested
        if requested is None or requested > size:
            requested = size
        self._blocks.add(
            segment,
            device,
            at if address is None else address,
            size,
            0 if state == "inactive" else requested,
            state,
            self._stack(frames),
            _label(fields.get("user_metadata")),
        )
        return size

    # -- the history ----------------------------------------------------------------------------

    def _trace(self, device: int, entries: list[Any]) -> None:
        """Add a device's events. A loop over millions, so values are read by index."""
        names = ("action", "addr", "size", "stream", "time_us", "frames", "pool_id",
                 "user_metadata", "device_free")  # fmt: skip
        columns = self._events.columns
        put = [columns[name].append for name in EVENT_SCHEMA]
        seen: dict[str, int] | None = None
        at: list[int | None] = []
        for entry in entries:
            if self._left <= 0:
                self._drop("entry more than the file has room for")
                return
            self._left -= 1
            places = self._fields.places(entry)
            if places is None:
                self._drop("event that is no record")
                continue
            if places is not seen:
                seen, at = places, [places.get(name) for name in names]
            action, address, size, stream, time, frames, pool, label, free = (
                None if place is None else entry[place] for place in at
            )
            known = _ACTIONS.get(action, "other") if type(action) is str else None
            if known is None:
                self._drop("event without an action")
                continue
            address, size = _whole(address), _whole(size)
            if known not in ("snapshot", "other") and (
                size is None or (address is None and known != "oom")
            ):
                self._drop("event without address or size")
                continue
            row = (
                device, known, None if known == "oom" else address, size, _signed(stream),
                _whole(time), self._pool(pool), self._stack(frames), _label(label), _whole(free),
            )  # fmt: skip
            for add, item in zip(put, row, strict=True):
                add(item)

    def _annotation(self, value: Any) -> None:
        fields = self._record(value, "annotation")
        if fields is None:
            return
        name, stage, time = fields.get("name"), fields.get("stage"), _whole(fields.get("time_us"))
        if not isinstance(name, str) or time is None:
            self._drop("annotation without name or time")
            return
        self._annotations.add(
            _device(fields.get("device", 0)),
            time,
            name[:MAX_TEXT],
            stage[:16] if isinstance(stage, str) else None,
        )

    # -- values ---------------------------------------------------------------------------------

    def _stack(self, frames: Any) -> int | None:
        """Return the row of a stack; ``None``: none recorded. The same list is the same stack: a
        file holds each once."""
        if type(frames) is not list:
            return None
        key = id(frames)
        if key not in self._by_id:
            result = [self._frame(frame) for frame in frames[:MAX_DEPTH]]
            stack = tuple(frame for frame in result if frame is not None)
            number = self._by_stack.setdefault(stack, len(self._stacks))
            if number == len(self._stacks):
                self._stacks.append(stack)
            self._by_id[key] = number
        return self._by_id[key]

    def _frame(self, value: Any) -> SnapshotFrame | None:
        key = id(value)
        if key not in self._frames:
            fields = PickledFields().from_value(value)
            made = None
            if fields is not None:
                file, line, name = fields.get("filename"), fields.get("line"), fields.get("name")
                made = SnapshotFrame(
                    file[:4096] if isinstance(file, str) else "",
                    _whole(line) or 0,
                    name[:MAX_TEXT] if isinstance(name, str) else "",
                )
            self._frames[key] = made
        return self._frames[key]

    def _pool(self, value: Any) -> str | None:
        if type(value) is not tuple or len(value) != 2 or value == (0, 0):
            return None
        first, second = value
        if type(first) is not int or type(second) is not int:
            return None
        return f"{first}.{second}"[:64]

    def _setting(self, value: Any) -> str | None:
        if isinstance(value, str | bool | int | float):
            return str(value)[:MAX_TEXT]
        return None

    def _record(self, value: Any, what: str) -> dict[str, Any] | None:
        if self._left <= 0:
            self._drop("entry more than the file has room for")
            return None
        self._left -= 1
        fields = PickledFields().from_value(value)
        if fields is None:
            self._drop(f"{what} that is no record")
        return fields

    def _drop(self, why: str) -> None:
        self._dropped[why] += 1


def _items(value: Any) -> list[Any]:
    return value if type(value) is list else []


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < LARGEST else None


def _signed(value: Any) -> int | None:
    return value if type(value) is int and -LARGEST < value < LARGEST else None


def _device(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_DEVICES else None


def _label(value: Any) -> str | None:
    return value[:MAX_TEXT] if type(value) is str and value else None
