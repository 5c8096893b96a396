"""Matching of device work to the runtime call that launched it and to the op around that call."""

import numpy as np
from numpy.typing import NDArray

from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.intervals import Array
from advisor.core.trace import CALLS
from advisor.read.event_columns import Columns
from advisor.read.trace_events import call_class

_OP, _RUNTIME = CPU_KINDS.index("op"), CPU_KINDS.index("runtime")
_MAX_CLOCK_ERROR_NS = 10_000  # error of device times after conversion to the host's clock
_OTHER = CALLS.index("other")
_MAX_PROCESSES = 64
"""Maximum number of processes whose calls are distinguished if they used the same ids."""
# Calls that have a correlation id but launch nothing.
_NO_LAUNCH_CALLS = [
    CALLS.index(call)
    for call in "sync_device sync_stream sync_event event_record event_query stream_wait".split()
]
# Kinds of device work, and the calls that can launch each kind.
_LAUNCHING_CALLS = (
    ("kernel", ("launch", "graph_launch")),
    ("memcpy", ("memcpy", "memcpy_blocking", "graph_launch")),
    ("memset", ("memset", "graph_launch")),
)
# Class of a call with an unknown name, by the kind of device work that it launched.
_CALL_OF_DEVICE_KIND = np.array(
    [CALLS.index({"kernel": "launch"}.get(kind, kind)) for kind in GPU_KINDS]
)


def classify_calls(
    column: Array, codes: Array, texts: list[str], classes: dict[str, str]
) -> NDArray[np.int8]:
    """Return the call class of each runtime row (index in CALLS); each name is classified once.

    ``codes``: the distinct values of ``column``, in order. ``texts``: their names. ``classes``:
    the classes of calls that cannot be classified by name."""
    if not len(codes):
        return np.zeros(0, dtype=np.int8)
    table = np.full(int(codes[-1]) + 1, -1, dtype=np.int8)
    table[codes] = [CALLS.index(classes.get(text) or call_class(text)) for text in texts]
    return table[column]


class LaunchTable:
    """Lookup of runtime calls by correlation id, and of ops by External id.

    ``host``: the ordered host columns with ``parent`` and ``call``. ``process``: number of the
    process of each thread."""

    def __init__(self, host: Columns, process: Array) -> None:
        self._process: Array = process[host["thread"]]
        self._parent: Array = host["parent"]
        self._call: Array = host["call"]
        self._is_op = host["kind"] == _OP
        runtime = np.flatnonzero((host["kind"] == _RUNTIME) & (host["correlation"] >= 0))
        runtime = runtime[~np.isin(self._call[runtime], _NO_LAUNCH_CALLS)]
        self._runtime = _LaunchLookup(host["correlation"][runtime], runtime)
        self._external: Array = host["external"]
        self._ts: Array = host["ts"]
        ops = np.flatnonzero(self._is_op & (host["external"] >= 0))
        self._ops = _LaunchLookup(host["external"][ops], ops)

    def find(self, device: Columns) -> NDArray[np.int32]:
        """Return the row of the call that launched each device row, or -1 if it was not recorded.

        Rows are matched by correlation id. Device rows without one are matched by External id. All
        calls inside an op and the work that they launch share the op's id, so the n-th call that
        can launch a kind of work is matched to the n-th row of that kind."""
        launch = self._runtime.find(device["correlation"])
        self._resolve_processes(launch, device)
        without_correlation = np.flatnonzero(
            (device["correlation"] < 0) & (device["external"] >= 0)
        )
        if len(without_correlation):
            launch[without_correlation] = self._find_by_external(device, without_correlation)
        return launch

    def _resolve_processes(self, launch: Array, device: Columns) -> None:
        """Resolve ids that several processes used (traces of several ranks put together by hand). A
        row belongs to the call of the process that owns its device. That is the process with the
        most unambiguous launches on the device, else the one whose calls precede most of its rows.
        Changes ``launch``."""
        calls, ids = self._runtime.rows, self._runtime.keys
        owner = self._process[calls]
        is_ambiguous = np.zeros(len(ids), dtype=np.bool_)
        is_ambiguous[1:] = (ids[1:] == ids[:-1]) & (owner[1:] != owner[:-1])
        rows = np.flatnonzero(np.isin(device["correlation"], ids[is_ambiguous]))
        if not len(rows):
            return
        single = np.setdiff1d(np.flatnonzero(launch >= 0), rows, assume_unique=True)
        devices = np.nan_to_num(np.asarray(device["device"], dtype=np.float64), nan=-1.0)
        numbers = np.unique(owner)[:_MAX_PROCESSES]
        tables = [_LaunchLookup(ids[owner == number], calls[owner == number]) for number in numbers]
        for index, number in enumerate(np.unique(devices[rows])):
            device_rows = rows[devices[rows] == number]
            owner_processes = self._process[launch[single[devices[single] == number]]]
            launch_candidates = [table.find(device["correlation"][device_rows]) for table in tables]
            if len(owner_processes):
                votes = [int((owner_processes == number).sum()) for number in numbers]
            else:
                is_late = (
                    self._ts[np.maximum(launch_candidates, 0)]
                    > device["ts"][device_rows] + _MAX_CLOCK_ERROR_NS
                )
                votes = ((np.array(launch_candidates) >= 0) & ~is_late).sum(axis=1).tolist()
            ties = np.flatnonzero(np.array(votes) == max(votes))
            best = launch_candidates[ties[index % len(ties)]]
            launch[device_rows] = np.where(best >= 0, best, launch[device_rows])

    def _find_by_external(self, device: Columns, device_rows: Array) -> NDArray[np.int32]:
        result = np.full(len(device_rows), -1, dtype=np.int32)
        for kind, names in _LAUNCHING_CALLS:
            calls = np.flatnonzero(
                np.isin(self._call, [CALLS.index(name) for name in names]) & (self._external >= 0)
            )
            rows = np.flatnonzero(device["kind"][device_rows] == GPU_KINDS.index(kind))
            if not len(calls) or not len(rows):
                continue
            calls = calls[np.lexsort((self._ts[calls], self._external[calls]))]
            ids = self._external[calls]
            wanted_ids = device["external"][device_rows[rows]]
            order = np.lexsort((device["ts"][device_rows[rows]], wanted_ids))
            first = np.searchsorted(ids, wanted_ids, side="left")
            count = np.searchsorted(ids, wanted_ids, side="right") - first
            nth = np.empty(len(rows), dtype=np.int64)
            ordered = wanted_ids[order]
            nth[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
            # more work than calls (a graph, or unrecorded calls): the last call gets the remainder
            index = first + np.minimum(nth, count - 1)
            call = calls[np.minimum(index, len(calls) - 1)]
            is_launch = (count > 0) & (
                self._ts[call] <= device["ts"][device_rows[rows]] + _MAX_CLOCK_ERROR_NS
            )
            result[rows] = np.where(is_launch, call, -1)
        return result

    def classify_unknown_calls(self, launch: Array, kind: Array) -> None:
        """Classify calls with unknown names ("INVALID" for an API newer than the profiler) by the
        device work that they launched. Changes the ``call`` column."""
        rows = launch[launch >= 0]
        unknown = self._call[rows] == _OTHER
        if not unknown.any():
            return
        rows, call_class_of_row = rows[unknown], _CALL_OF_DEVICE_KIND[kind[launch >= 0][unknown]]
        self._call[rows] = call_class_of_row
        row, count = np.unique(rows, return_counts=True)
        self._call[row[count > 1]] = CALLS.index("graph_launch")

    def op_around(self, launch: Array, device: Columns) -> NDArray[np.int32]:
        """Return the row of the innermost op around each launch, else the op with the same External
        id, or -1 if there is neither.

        An op that began after the work did not launch it. If calls are matched by correlation but
        the call of this work is missing, its External id is not used either. Profilers then write
        the correlation id in its place, which is the number of an unrelated op."""
        op = launch.astype(np.int32)
        unresolved = np.flatnonzero(op >= 0)
        while len(unresolved):  # one round per level, only for rows that have not reached an op
            unresolved = unresolved[~self._is_op[op[unresolved]]]
            op[unresolved] = self._parent[op[unresolved]]
            unresolved = unresolved[op[unresolved] >= 0]
        without_op = np.flatnonzero(op < 0)
        external, correlation = device["external"][without_op], device["correlation"][without_op]
        if (launch >= 0).any():
            is_correlation = (launch[without_op] < 0) & (external == correlation)
            without_op, external = without_op[~is_correlation], external[~is_correlation]
        op_by_id = self._ops.find(external)
        is_late = (
            (op_by_id >= 0)
            & (launch[without_op] < 0)
            & (self._ts[np.maximum(op_by_id, 0)] > device["ts"][without_op] + _MAX_CLOCK_ERROR_NS)
        )
        op[without_op] = np.where(is_late, -1, op_by_id)
        return op


class _LaunchLookup:
    """Lookup of the first row with an id."""

    def __init__(self, keys: Array, rows: Array) -> None:
        order = np.argsort(keys, kind="stable")
        self.keys, self.rows = keys[order], rows[order].astype(np.int32)

    def find(self, wanted: Array) -> NDArray[np.int32]:
        """Return the row of each wanted id, or -1 if there is none or the id is negative."""
        if not len(self.keys):
            return np.full(len(wanted), -1, dtype=np.int32)
        index = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where((self.keys[index] == wanted) & (wanted >= 0), self.rows[index], -1)
