"""Meaning of the host events of TensorFlow, JAX and XLA: calls, operators, input waits, steps."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Intervals, Ints, union
from advisor.core.trace import CALLS, CPU_KINDS, DEVICE_STEPS, JAX, PYTORCH, TENSORFLOW, TF_DATA
from advisor.read.formats.xplane.xspace import Events, Plane, XLine
from advisor.read.trace_events import call_class

STATS = frozenset(
    """
        addr allocation_bytes allocator_name bytes_allocated correlation_id hlo_module hlo_op
        kernel_details memcpy_details memset_details step_num""".split()
)
"""Names of the stats read of host events, besides their names and times."""

_WAIT = re.compile(r"^(?:MultiDevice)?IteratorGetNext\w*(?:Op)?::DoCompute$|^OwnedIterator::Get")
_FRAME = re.compile(r"^\$(\S+):(\d+) (.+)$", re.DOTALL)
_TF_OP = re.compile(r"^[\w.][\w.\-/>]*:[A-Z_]\w*$")
_MARK = re.compile(r"^ThreadpoolListener::")
"""Pattern for instants of the profiler's own bookkeeping."""
_RUNTIME_RANGES = re.compile(
    r"^(?:ExecutorState::Process$|Eager|TFE_|KernelAndDeviceFunc|PjitFunction\(|ParseArguments"
    r"|DevicePut|\w*PjRt\w*::Execute|\w*Executable::Execute|XlaCompile|Thunk)"
)
"""Pattern for ranges of the framework's own work on the way to a launch."""
_BLOCKED = re.compile(r"Buffer::Await|BlockHostUntilDone|BlockUntilReady|SynchronizeAllActivity")
_API = re.compile(r"^(?:cu|cuda|hip)[A-Z]\w*$")
_PROGRAM = re.compile(r"^(?:PjitFunction\(.+\)|FunctionRun|SessionRun|RunGraph|TfrtModelRun|"
                      r"EagerExecute: __inference_\w+)$")  # fmt: skip
"""Pattern for calls of a whole program: if no step is marked, its period is taken as one."""
_OP, _RUNTIME = CPU_KINDS.index("op"), CPU_KINDS.index("runtime")
MIN_CALLS = 3
REGULAR = 2 / 3
"""Least share of similar periods: a first one may compile, an epoch may end."""
_TENSORFLOW = re.compile(
    r"^(?:ExecutorState::|FunctionRun$|EagerExecute|SessionRun$|TFE_|Iterator::)"
)
_PYTHON = re.compile(r"^(?:python[\d.]*|main|MainThread)$")
_JIT = re.compile(r"^(?:jit|pjit|pmap)_")


@dataclass
class XlaHost:
    """Rows of a host's planes, for :func:`advisor.read.build.build_trace`."""

    rows: list[pl.DataFrame] = field(default_factory=list)
    memory: list[pl.DataFrame] = field(default_factory=list)
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)
    waits: list[pl.DataFrame] = field(default_factory=list)
    """Waits for the input pipeline: ``thread``, ``ts``, ``dur``."""
    marks: list[pl.DataFrame] = field(default_factory=list)
    """Steps marked by the program: ``thread``, ``ts``, ``dur``, ``number``."""
    calls: list[pl.DataFrame] = field(default_factory=list)
    """Calls of whole programs: ``thread``, ``name``, ``ts``, ``dur``."""
    modules: dict[str, int] = field(default_factory=dict)
    """Time of XLA's modules by name, on the device or, without one, on the host; ns."""
    signs: set[str] = field(default_factory=set)
    """Frameworks whose names occur."""
    step_marks: str | None = None
    """Origin of the steps, as in ``TraceMeta``; ``None``: no steps are known."""

    def thread_names_by_id(self, main: str | None) -> dict[tuple[str, str], str]:
        """Return names of threads by process and thread, as in :func:`list_host_rows`."""
        return {(p, p if t == main else t): name for (p, t), name in self.thread_names.items()}

    def framework(self) -> str | None:
        """Return the program's framework, as far as names tell; ``None`` if unknown."""
        return next((item for item in (PYTORCH, JAX, TENSORFLOW) if item in self.signs), None)


def read_names(host: XlaHost, plane: Plane) -> None:
    """Look for signs of a framework among a plane's names."""
    for name in plane.names.values():
        if name.startswith("PjitFunction("):
            host.signs.add(JAX)
        elif _TENSORFLOW.match(name):
            host.signs.add(TENSORFLOW)
    read_modules(host, plane.stat_names.values())


def read_modules(host: XlaHost, names: object) -> None:
    """Look for signs of a framework among the names of XLA's modules."""
    for name in names:  # type: ignore[attr-defined]
        if _JIT.match(name):
            host.signs.add(JAX)
        elif name.startswith("SyncTensorsGraph"):
            host.signs.add(PYTORCH)


def add_plane(
    host: XlaHost, plane: Plane, lines: list[XLine], events: Events, process: str
) -> None:
    if not len(events.ts):
        return
    threads = [f"{process}:{line.id}" for line in lines]
    for thread, line in zip(threads, lines, strict=True):
        host.thread_names[process, thread] = line.name
    of_line = pl.Series(threads, dtype=pl.String)
    codes, which = np.unique(events.meta, return_inverse=True)
    names = [plane.names[code] for code in codes.tolist()]

    def named(pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        return np.array([pattern.search(name) is not None for name in names])[which]

    given = events.number("correlation_id")
    launch = events.has_stat("kernel_details")
    copy, fill = events.has_stat("memcpy_details"), events.has_stat("memset_details")
    allocation, blocked = events.has_stat("allocation_bytes"), named(_BLOCKED)
    kinds = [_kind(name, code in plane.shown) for name, code in zip(names, codes, strict=True)]
    kind = np.array([CPU_KINDS.index(item) for item in kinds], dtype=np.int8)[which]
    kind[((launch | copy | fill) & (given >= 0)) | blocked] = _RUNTIME
    kind[events.has_stat("hlo_op")] = _OP
    calls = [
        CALLS.index(call_class(name)) if item == "runtime" else -1
        for name, item in zip(names, kinds, strict=True)
    ]
    call = np.array(calls, dtype=np.int8)[which]
    shown = list(map(_shown, names))
    name = which.astype(np.int64)
    # calls that bear the name of what they launched: it is the device's to have
    nameless = ~named(_API) & (given >= 0)
    for mask, text, what in ((launch, "kernel launch", "launch"), (copy, "copy call", "memcpy"),
                             (fill, "memset call", "memset")):  # fmt: skip
        call[mask] = CALLS.index(what)
        name[mask & nameless] = len(shown)
        shown.append(text)
    if "memcpy_details" in events.texts:
        rows, texts = events.texts["memcpy_details"]
        call[rows[["async:0" in text for text in texts]]] = CALLS.index("memcpy_blocking")
    call[blocked] = CALLS.index("sync_stream")
    call[kind != _RUNTIME] = -1
    table = pl.DataFrame(
        {
            "ts": events.ts, "dur": events.dur, "kind": _decoded(CPU_KINDS, kind),
            "name": _decoded(tuple(shown), name), "process": process,
            "thread": of_line.gather(events.line), "call": _decoded(CALLS, call),
            "correlation": np.where(kind == _RUNTIME, given, -1),
        }
    )  # fmt: skip
    number = events.number("step_num")
    steps = (number >= 0) & (events.dur > 0)
    mark = table.select("thread", "ts", "dur").with_columns(number=pl.Series(number))
    host.marks.append(mark.filter(steps))
    waits = named(_WAIT)
    host.waits.append(table.filter(waits).select("thread", "ts", "dur"))
    # the pipeline's own functions are no steps
    outside = np.array([not line.name.startswith("tf_data") for line in lines])[events.line]
    program = named(_PROGRAM) & outside
    host.calls.append(table.filter(program).select("thread", "name", "ts", "dur"))
    count_modules(host, events)
    host.memory.append(_memory(events, allocation, plane))
    host.rows.append(table.filter(~(allocation | named(_MARK) | waits)))


def _decoded(values: tuple[str, ...], codes: NDArray[Any]) -> pl.Series:
    """Return texts by index; below 0: null."""
    table = pl.Series([*values, None], dtype=pl.String)
    return table.gather(np.where(codes < 0, len(values), codes).astype(np.uint32))


def _kind(name: str, has_display: bool) -> str:
    if name.startswith("$"):
        return "python"
    if _API.match(name) or _BLOCKED.search(name):
        return "runtime"
    if (has_display and not name.startswith("Iterator::")) or _TF_OP.match(name):
        return "op"
    return "op" if _RUNTIME_RANGES.match(name) else "annotation"


def _shown(name: str) -> str:
    """Return a Python frame as other profilers write it: ``$train.py:31 step`` is ``train.py(31):
    step``, and ``$time sleep``, which has no line, is built in."""
    if not name.startswith("$"):
        return name
    result = _FRAME.match(name)
    if result:
        return f"{result[1]}({result[2]}): {result[3]}"
    module, _, function = name[1:].partition(" ")
    return f"<built-in method {function or module} of {module}>"


def count_modules(host: XlaHost, events: Events) -> None:
    """Add the time of XLA's modules."""
    if "hlo_module" not in events.texts:
        return
    rows, names = events.texts["hlo_module"]
    spent = pl.DataFrame({"name": names, "dur": np.maximum(events.dur[rows], 0)})
    for name, ns in spent.group_by("name").agg(pl.col("dur").sum()).iter_rows():
        host.modules[name] = host.modules.get(name, 0) + ns
    read_modules(host, set(names))


_GPU_ALLOCATOR = re.compile(r"^(?:GPU|gpu)_(\d+)_")


def _memory(events: Events, allocation: NDArray[np.bool_], plane: Plane) -> pl.DataFrame:
    """Return allocations and frees of the framework's allocators."""
    index = np.flatnonzero(allocation)
    if not len(index):
        return pl.DataFrame()
    owner = np.full(len(allocation), "", dtype=object)
    if "allocator_name" in events.texts:
        rows, texts = events.texts["allocator_name"]
        owner[rows] = texts
    device = [
        int(found[1]) if (found := _GPU_ALLOCATOR.match(name)) else -1 for name in owner[index]
    ]
    freed = np.array(["Dealloc" in plane.names[code] for code in events.meta[index].tolist()])
    size = events.number("allocation_bytes", 0)[index]
    return pl.DataFrame(
        {
            "ts": events.ts[index],
            "bytes": np.where(freed, -size, size),
            "address": events.number("addr", 0)[index],
            "allocated": events.number("bytes_allocated", 0)[index],
            "device": device,
        }
    )


_CALLS_SCHEMA = {"thread": pl.String, "name": pl.String, "ts": pl.Int64, "dur": pl.Int64}


def step_rows(
    host: XlaHost, derived: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, str | None]:
    """Return steps as annotations, and the thread that drives the loop. Steps are the program's
    marks (JAX's ``StepTraceAnnotation``, TensorFlow's ``Trace`` and Keras, with a ``step_num``),
    else the periods of the program that runs longest of those called at least MIN_CALLS times,
    else those that the profiler ``derived`` on the device (``number``, ``ts``, ``dur``). Their
    origin is in ``XlaHost.step_marks``."""
    marks = pl.concat(host.marks) if host.marks else pl.DataFrame()
    if marks.height:
        spent = marks.group_by("thread", maintain_order=True).agg(pl.col("dur").sum())
        thread = str(spent.sort("dur", descending=True)["thread"][0])
        own = _outermost(marks.filter(pl.col("thread") == thread))
        ts, dur = own["ts"].to_numpy(), own["dur"].to_numpy()
        host.step_marks = "StepTraceAnnotation" if host.framework() == JAX else "step_num"
        return _as_steps(ts, dur, own["number"].to_list(), thread), thread
    calls, main = _longest_program(host)
    if calls is None or main is None:
        main = main or _python_thread(host)
        if derived is None or main is None:
            return pl.DataFrame(), main
        host.step_marks = DEVICE_STEPS
        ts, dur = derived["ts"].to_numpy(), derived["dur"].to_numpy()
        return _as_steps(ts, dur, derived["number"].to_list(), main), main
    ts = calls["ts"].to_numpy()
    dur = np.append(np.diff(ts), calls["dur"].to_numpy()[-1])
    host.step_marks = "program"
    return _as_steps(ts, dur, list(range(len(ts))), main), main


def _longest_program(host: XlaHost) -> tuple[pl.DataFrame | None, str | None]:
    """Return the evenly spaced calls whose program runs longest, and their thread; without such
    calls, ``None`` and the thread that spends most time in one program."""
    best: tuple[float, str, pl.DataFrame] | None = None
    busiest: tuple[float, str | None] = 0, None
    modules: dict[str, int] = {}
    for name, ns in host.modules.items():
        inner = _JIT.sub("", name).split(".")[0]
        modules[inner] = modules.get(inner, 0) + ns
    calls = pl.concat(host.calls) if host.calls else pl.DataFrame(schema=_CALLS_SCHEMA)
    for (where, name), group in calls.group_by("thread", "name", maintain_order=True):
        own = _outermost(group)
        spent = float(own["dur"].sum())
        if spent > busiest[0]:
            busiest = spent, str(where)
        impact = spent + modules.get(str(name).removeprefix("PjitFunction(").removesuffix(")"), 0)
        if _regular(own["ts"].to_numpy()) and (best is None or impact > best[0]):
            best = impact, str(where), own
    return (None, busiest[1]) if best is None else (best[2], best[1])


def _python_thread(host: XlaHost) -> str | None:
    named = (thread for (_, thread), name in host.thread_names.items() if _PYTHON.match(name))
    return next(named, None)


def _regular(ts: Ints) -> bool:
    """Return whether calls come often and evenly enough for their period to be a loop's: nearly all
    distances are within a factor of two of the median. One name may stand for calls of very
    different programs."""
    if len(ts) < MIN_CALLS:
        return False
    apart = np.diff(ts)
    middle = float(np.median(apart))
    similar = (apart >= middle / 2) & (apart <= middle * 2)
    return middle > 0 and float(similar.mean()) >= REGULAR


def _outermost(frame: pl.DataFrame) -> pl.DataFrame:
    """Drop ranges inside an earlier one; sort by start, longest first."""
    frame = frame.sort("ts", "dur", descending=[False, True])
    ts = frame["ts"].to_numpy()
    end = ts + frame["dur"].to_numpy()
    before = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end)[:-1])
    return frame.filter(pl.Series(ts >= before))


def _as_steps(ts: Ints, dur: Ints, numbers: list[int], thread: str) -> pl.DataFrame:
    process = thread.rpartition(":")[0]
    return pl.DataFrame(
        {
            "ts": ts, "dur": dur, "kind": "annotation",
            "name": [f"step #{number}" for number in numbers],
            "process": process, "thread": thread, "call": None, "correlation": -1,
        },
        schema_overrides={"call": pl.String, "correlation": pl.Int64},
    )  # fmt: skip


def wait_rows(host: XlaHost, main: str | None) -> pl.DataFrame:
    """Return waits for tf.data, as ranges of the thread that drives the loop: it is blocked,
    whichever of TensorFlow's threads asks for the batch. Overlapping ones are merged."""
    asked = pl.concat(host.waits).sort("ts") if host.waits else pl.DataFrame()
    if not asked.height:
        return asked
    spans = union(asked["ts"].to_numpy(), (asked["ts"] + asked["dur"].clip(0)).to_numpy())
    if not len(spans):
        return pl.DataFrame()
    thread = main or str(asked["thread"][0])
    start = _once_free(host, thread, spans)
    frame = _as_steps(start, spans.end - start, [0] * len(spans), thread)
    return frame.with_columns(name=pl.lit(f"{TF_DATA}IteratorGetNext"))


def _once_free(host: XlaHost, thread: str, spans: Intervals) -> Ints:
    """Return when the thread starts waiting in each span: at its start, or at the end of the call
    the thread was in then, if inside the span (``FunctionRun`` hands the request to another thread,
    and returns)."""
    own = [rows.filter(pl.col("thread") == thread).select("ts", "dur") for rows in host.rows]
    rows = pl.concat(own) if own else pl.DataFrame(schema={"ts": pl.Int64, "dur": pl.Int64})
    begin, end = rows["ts"].to_numpy(), (rows["ts"] + rows["dur"]).to_numpy()
    span = np.searchsorted(spans.start, end) - 1
    inside = (span >= 0) & (end < spans.end[span]) & (begin <= spans.start[span])
    free = spans.start.copy()
    np.maximum.at(free, span[inside], end[inside])
    return free


def list_host_rows(
    host: XlaHost, steps: pl.DataFrame, waits: pl.DataFrame, main: str | None
) -> pl.DataFrame:
    """Return host rows of every kind. The thread that drives the loop gets its process's name, by
    which a trace knows it (``Trace.main_thread``)."""
    frames = [frame for frame in (*host.rows, steps, waits) if frame.height]
    if not frames:
        return pl.DataFrame(schema={"ts": pl.Int64})
    rows = pl.concat([frame.select(frames[0].columns) for frame in frames])
    own = pl.when(pl.col("thread") == (main or "")).then("process").otherwise("thread")
    return rows.with_columns(thread=own)
