"""From device work to the runtime call that launched it, and the op around that."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.ingest.columns import Columns
from advisor.ingest.spelling import DEVICE_KINDS, HOST_KINDS, call_class
from advisor.trace import CALLS

Array = NDArray[Any]

_OP, _RUNTIME = HOST_KINDS.index("op"), HOST_KINDS.index("runtime")
_OTHER = CALLS.index("other")
# Calls that carry a correlation id of their own, but launch nothing.
_WAITS = [CALLS.index(call) for call in (
    "sync_device", "sync_stream", "sync_event", "event_record", "event_query", "stream_wait",
)]  # fmt: skip
# What a call of unknown name was, told by the device work it caused.
_CAUSED = np.array([CALLS.index({"kernel": "launch"}.get(kind, kind)) for kind in DEVICE_KINDS])


def classify_calls(column: Array, codes: Array, texts: list[str]) -> NDArray[np.int8]:
    """Call class (index in CALLS) of each runtime row; each distinct name is looked at once.

    ``codes``: the distinct values of ``column``, in order; ``texts``: their names.
    """
    if not len(codes):
        return np.zeros(0, dtype=np.int8)
    table = np.full(int(codes[-1]) + 1, -1, dtype=np.int8)
    table[codes] = [CALLS.index(call_class(text)) for text in texts]
    return table[column]


class Launches:
    """Runtime calls by correlation id, and ops by External id.

    ``host`` holds the ordered host columns with ``parent`` and ``call``.
    """

    def __init__(self, host: Columns) -> None:
        self._parent: Array = host["parent"]
        self._call: Array = host["call"]
        self._is_op = host["kind"] == _OP
        runtime = np.flatnonzero((host["kind"] == _RUNTIME) & (host["correlation"] >= 0))
        runtime = runtime[~np.isin(self._call[runtime], _WAITS)]
        self._runtime = _Lookup(host["correlation"][runtime], runtime)
        ops = np.flatnonzero(self._is_op & (host["external"] >= 0))
        self._ops = _Lookup(host["external"][ops], ops)

    def find(self, correlation: Array) -> NDArray[np.int32]:
        """Row of the call that launched each device row; -1: outside the window."""
        return self._runtime.find(correlation)

    def name_unknown(self, launch: Array, kind: Array) -> None:
        """Calls whose name is unknown ("INVALID" for an API newer than the profiler) but that
        caused device work are what they caused. Changes the ``call`` column."""
        rows = launch[launch >= 0]
        unknown = self._call[rows] == _OTHER
        if not unknown.any():
            return
        rows, caused = rows[unknown], _CAUSED[kind[launch >= 0][unknown]]
        self._call[rows] = caused
        row, count = np.unique(rows, return_counts=True)
        self._call[row[count > 1]] = CALLS.index("graph_launch")

    def op_around(self, launch: Array, external: Array) -> NDArray[np.int32]:
        """Row of the innermost op around each launch; where there is none, the op with the same
        External id; -1: neither."""
        op = launch.astype(np.int32)
        climbing = np.flatnonzero(op >= 0)
        while len(climbing):  # one round a level: only those that have not met an op go on
            climbing = climbing[~self._is_op[op[climbing]]]
            op[climbing] = self._parent[op[climbing]]
            climbing = climbing[op[climbing] >= 0]
        lost = op < 0
        op[lost] = self._ops.find(external[lost])
        return op


class _Lookup:
    """Id -> row, the first one that has it."""

    def __init__(self, keys: Array, rows: Array) -> None:
        order = np.argsort(keys, kind="stable")
        self._keys, self._rows = keys[order], rows[order].astype(np.int32)

    def find(self, wanted: Array) -> NDArray[np.int32]:
        """Row of each wanted id, else -1. Negative ids mean none."""
        if not len(self._keys):
            return np.full(len(wanted), -1, dtype=np.int32)
        place = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where((self._keys[place] == wanted) & (wanted >= 0), self._rows[place], -1)
