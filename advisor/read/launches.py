"""Matching of device work to the runtime call that launched it, and to the op around that call."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.trace import CALLS
from advisor.read.event_columns import Columns
from advisor.read.trace_events import DEVICE_KINDS, HOST_KINDS, call_class

Array = NDArray[Any]

_OP, _RUNTIME = HOST_KINDS.index("op"), HOST_KINDS.index("runtime")
_SLACK_NS = 10_000  # device times are converted to the host's clock
_OTHER = CALLS.index("other")
MAX_PROCESSES = 64
"""Most processes whose calls are distinguished when they used the same ids."""
# Calls that carry a correlation id of their own, but launch nothing.
_WAITS = [
    CALLS.index(call)
    for call in "sync_device sync_stream sync_event event_record event_query stream_wait".split()
]
# Calls that put work on a device, and the kinds of work that each may be.
_LAUNCHES = (
    ("kernel", ("launch", "graph_launch")),
    ("memcpy", ("memcpy", "memcpy_blocking", "graph_launch")),
    ("memset", ("memset", "graph_launch")),
)
# What a call of unknown name was, by the device work that it caused.
_CAUSED = np.array([CALLS.index({"kernel": "launch"}.get(kind, kind)) for kind in DEVICE_KINDS])


def classify_calls(
    column: Array, codes: Array, texts: list[str], classes: dict[str, str]
) -> NDArray[np.int8]:
    """Return the call class of each runtime row (index in CALLS), looking at each name once.

    ``codes``: the distinct values of ``column``, in order; ``texts``: their names. ``classes``:
    the class of those whose name does not tell."""
    if not len(codes):
        return np.zeros(0, dtype=np.int8)
    table = np.full(int(codes[-1]) + 1, -1, dtype=np.int8)
    table[codes] = [CALLS.index(classes.get(text) or call_class(text)) for text in texts]
    return table[column]


class LaunchTable:
    """Lookup of runtime calls by correlation id, and of ops by External id.

    ``host`` holds the ordered host columns with ``parent`` and ``call``; ``process``: a number of
    the process of each thread."""

    def __init__(self, host: Columns, process: Array) -> None:
        self._process: Array = process[host["thread"]]
        self._parent: Array = host["parent"]
        self._call: Array = host["call"]
        self._is_op = host["kind"] == _OP
        runtime = np.flatnonzero((host["kind"] == _RUNTIME) & (host["correlation"] >= 0))
        runtime = runtime[~np.isin(self._call[runtime], _WAITS)]
        self._runtime = _LaunchLookup(host["correlation"][runtime], runtime)
        self._external: Array = host["external"]
        self._ts: Array = host["ts"]
        ops = np.flatnonzero(self._is_op & (host["external"] >= 0))
        self._ops = _LaunchLookup(host["external"][ops], ops)

    def find(self, device: Columns) -> NDArray[np.int32]:
        """Return the row of the call that launched each device row; -1: outside the window.

        By correlation. Device rows that have none are tied by External id, call by call: the op
        around a call gives its id to it, so that several calls and rows share one, and the n-th
        call that can have launched such work launched the n-th of it."""
        launch = self._runtime.find(device["correlation"])
        self._among_processes(launch, device)
        bare = np.flatnonzero((device["correlation"] < 0) & (device["external"] >= 0))
        if len(bare):
            launch[bare] = self._by_external(device, bare)
        return launch

    def _among_processes(self, launch: Array, device: Columns) -> None:
        """Resolve ids that several processes used (traces of several ranks put together by hand): a
        row belongs to the call of the process that its device belongs to. That is the process with
        most unambiguous launches on the device, else the one whose calls precede most of its rows.
        Changes ``launch``."""
        calls, ids = self._runtime.rows, self._runtime.keys
        owner = self._process[calls]
        several = np.zeros(len(ids), dtype=np.bool_)
        several[1:] = (ids[1:] == ids[:-1]) & (owner[1:] != owner[:-1])
        rows = np.flatnonzero(np.isin(device["correlation"], ids[several]))
        if not len(rows):
            return
        single = np.setdiff1d(np.flatnonzero(launch >= 0), rows, assume_unique=True)
        devices = np.nan_to_num(np.asarray(device["device"], dtype=np.float64), nan=-1.0)
        numbers = np.unique(owner)[:MAX_PROCESSES]
        tables = [_LaunchLookup(ids[owner == number], calls[owner == number]) for number in numbers]
        for index, number in enumerate(np.unique(devices[rows])):
            own = rows[devices[rows] == number]
            tied = self._process[launch[single[devices[single] == number]]]
            found = [table.find(device["correlation"][own]) for table in tables]
            if len(tied):
                votes = [int((tied == number).sum()) for number in numbers]
            else:
                late = self._ts[np.maximum(found, 0)] > device["ts"][own] + _SLACK_NS
                votes = ((np.array(found) >= 0) & ~late).sum(axis=1).tolist()
            ties = np.flatnonzero(np.array(votes) == max(votes))
            best = found[ties[index % len(ties)]]
            launch[own] = np.where(best >= 0, best, launch[own])

    def _by_external(self, device: Columns, bare: Array) -> NDArray[np.int32]:
        result = np.full(len(bare), -1, dtype=np.int32)
        for kind, names in _LAUNCHES:
            calls = np.flatnonzero(
                np.isin(self._call, [CALLS.index(name) for name in names]) & (self._external >= 0)
            )
            rows = np.flatnonzero(device["kind"][bare] == DEVICE_KINDS.index(kind))
            if not len(calls) or not len(rows):
                continue
            calls = calls[np.lexsort((self._ts[calls], self._external[calls]))]
            ids = self._external[calls]
            wanted = device["external"][bare[rows]]
            order = np.lexsort((device["ts"][bare[rows]], wanted))
            first = np.searchsorted(ids, wanted, side="left")
            count = np.searchsorted(ids, wanted, side="right") - first
            nth = np.empty(len(rows), dtype=np.int64)
            ordered = wanted[order]
            nth[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
            # more work than calls: a graph, or calls that were not recorded: the last has the rest
            place = first + np.minimum(nth, count - 1)
            call = calls[np.minimum(place, len(calls) - 1)]
            real = (count > 0) & (self._ts[call] <= device["ts"][bare[rows]] + _SLACK_NS)
            result[rows] = np.where(real, call, -1)
        return result

    def classify_unknown_calls(self, launch: Array, kind: Array) -> None:
        """Classify calls with unknown names ("INVALID" for an API newer than the profiler) by the
        device work that they caused. Changes the ``call`` column."""
        rows = launch[launch >= 0]
        unknown = self._call[rows] == _OTHER
        if not unknown.any():
            return
        rows, caused = rows[unknown], _CAUSED[kind[launch >= 0][unknown]]
        self._call[rows] = caused
        row, count = np.unique(rows, return_counts=True)
        self._call[row[count > 1]] = CALLS.index("graph_launch")

    def op_around(self, launch: Array, device: Columns) -> NDArray[np.int32]:
        """Return the row of the innermost op around each launch; else the op with the same External
        id; -1: neither.

        Work without a call was not launched by an op that began after it. Nor does an id tell
        where calls are tied by correlation and this work's call is not here: profilers then write
        the correlation in its place, which is the number of some other op."""
        op = launch.astype(np.int32)
        climbing = np.flatnonzero(op >= 0)
        while len(climbing):  # one round a level: only those that have not met an op go on
            climbing = climbing[~self._is_op[op[climbing]]]
            op[climbing] = self._parent[op[climbing]]
            climbing = climbing[op[climbing] >= 0]
        lost = np.flatnonzero(op < 0)
        external, correlation = device["external"][lost], device["correlation"][lost]
        if (launch >= 0).any():
            stand_in = (launch[lost] < 0) & (external == correlation)
            lost, external = lost[~stand_in], external[~stand_in]
        named = self._ops.find(external)
        late = (
            (named >= 0)
            & (launch[lost] < 0)
            & (self._ts[np.maximum(named, 0)] > device["ts"][lost] + _SLACK_NS)
        )
        op[lost] = np.where(late, -1, named)
        return op


class _LaunchLookup:
    """Lookup of rows by id: the first row that has it."""

    def __init__(self, keys: Array, rows: Array) -> None:
        order = np.argsort(keys, kind="stable")
        self.keys, self.rows = keys[order], rows[order].astype(np.int32)

    def find(self, wanted: Array) -> NDArray[np.int32]:
        """Return the row of each wanted id, else -1. Negative ids mean none."""
        if not len(self.keys):
            return np.full(len(wanted), -1, dtype=np.int32)
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where((self.keys[place] == wanted) & (wanted >= 0), self.rows[place], -1)
