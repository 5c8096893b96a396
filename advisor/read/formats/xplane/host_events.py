"""Meaning of the host events of TensorFlow, JAX and XLA: calls, operators, input waits, steps."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.event_kinds import CPU_KINDS
from advisor.core.intervals import Intervals, Ints, union
from advisor.core.trace import CALLS, DEVICE_STEPS, JAX, PYTORCH, TENSORFLOW, TF_DATA
from advisor.read.formats.xplane.xspace import Events, Plane, XLine
from advisor.read.trace_events import call_class

STATS = frozenset(
    """
        addr allocation_bytes allocator_name bytes_allocated correlation_id hlo_module hlo_op
        kernel_details memcpy_details memset_details step_num""".split()
)
"""Names of the stats that are read for host events, in addition to names and times."""

_INPUT_WAIT = re.compile(
    r"^(?:MultiDevice)?IteratorGetNext\w*(?:Op)?::DoCompute$|^OwnedIterator::Get"
)
_PYTHON_FRAME = re.compile(r"^\$(\S+):(\d+) (.+)$", re.DOTALL)
_TF_OP = re.compile(r"^[\w.][\w.\-/>]*:[A-Z_]\w*$")
_BOOKKEEPING = re.compile(r"^ThreadpoolListener::")
"""Pattern of instants from the profiler's own bookkeeping."""
_RUNTIME_RANGES = re.compile(
    r"^(?:ExecutorState::Process$|Eager|TFE_|KernelAndDeviceFunc|PjitFunction\(|ParseArguments"
    r"|DevicePut|\w*PjRt\w*::Execute|\w*Executable::Execute|XlaCompile|Thunk)"
)
"""Pattern of ranges of the framework's own work before a launch."""
_BLOCKING_CALL = re.compile(
    r"Buffer::Await|BlockHostUntilDone|BlockUntilReady|SynchronizeAllActivity"
)
_API_CALL = re.compile(r"^(?:cu|cuda|hip)[A-Z]\w*$")
_PROGRAM_CALL = re.compile(r"^(?:PjitFunction\(.+\)|FunctionRun|SessionRun|RunGraph|TfrtModelRun|"
                      r"EagerExecute: __inference_\w+)$")  # fmt: skip
"""Pattern of calls of a whole program. If no steps are marked, its period is taken as a step."""
_OP, _RUNTIME = CPU_KINDS.index("op"), CPU_KINDS.index("runtime")
_MIN_CALLS = 3
_MIN_REGULAR_SHARE = 2 / 3
"""Minimum share of similar periods. The first one may compile, and an epoch may end."""
_TENSORFLOW_NAME = re.compile(
    r"^(?:ExecutorState::|FunctionRun$|EagerExecute|SessionRun$|TFE_|Iterator::)"
)
_PYTHON_THREAD = re.compile(r"^(?:python[\d.]*|main|MainThread)$")
_JIT_PREFIX = re.compile(r"^(?:jit|pjit|pmap)_")


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
    """Time of XLA's modules in ns by name, on the device, or on the host if there is no device."""
    signs: set[str] = field(default_factory=set)
    """Frameworks whose names occur in events."""
    step_marks: str | None = None
    """Origin of the steps, as in ``TraceMeta``, or ``None`` if no steps are known."""

    def thread_names_by_id(self, main: str | None) -> dict[tuple[str, str], str]:
        """Return names of threads by process and thread, as in :func:`list_host_rows`."""
        return {(p, p if t == main else t): name for (p, t), name in self.thread_names.items()}

    def framework(self) -> str | None:
        """Return the program's framework according to names, or ``None`` if unknown."""
        return next((item for item in (PYTORCH, JAX, TENSORFLOW) if item in self.signs), None)


def read_names(host: XlaHost, plane: Plane) -> None:
    """Find the framework from a plane's names."""
    for name in plane.names.values():
        if name.startswith("PjitFunction("):
            host.signs.add(JAX)
        elif _TENSORFLOW_NAME.match(name):
            host.signs.add(TENSORFLOW)
    read_modules(host, plane.stat_names.values())


def read_modules(host: XlaHost, names: object) -> None:
    """Find the framework from the names of XLA's modules."""
    for name in names:  # type: ignore[attr-defined]
        if _JIT_PREFIX.match(name):
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
    thread_of_line = pl.Series(threads, dtype=pl.String)
    codes, code_index = np.unique(events.meta, return_inverse=True)
    names = [plane.names[code] for code in codes.tolist()]

    def matches(pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        return np.array([pattern.search(name) is not None for name in names])[code_index]

    correlation = events.number("correlation_id")
    is_launch = events.has_stat("kernel_details")
    is_copy, is_fill = events.has_stat("memcpy_details"), events.has_stat("memset_details")
    is_allocation, is_blocked = events.has_stat("allocation_bytes"), matches(_BLOCKING_CALL)
    kinds = [
        _event_kind(name, code in plane.display_names)
        for name, code in zip(names, codes, strict=True)
    ]
    kind = np.array([CPU_KINDS.index(kind_name) for kind_name in kinds], dtype=np.int8)[code_index]
    kind[((is_launch | is_copy | is_fill) & (correlation >= 0)) | is_blocked] = _RUNTIME
    kind[events.has_stat("hlo_op")] = _OP
    calls = [
        CALLS.index(call_class(name)) if kind_name == "runtime" else -1
        for name, kind_name in zip(names, kinds, strict=True)
    ]
    call = np.array(calls, dtype=np.int8)[code_index]
    display_names = list(map(_display_name, names))
    name = code_index.astype(np.int64)
    # calls with the name of the launched work, which belongs to the device
    is_unnamed = ~matches(_API_CALL) & (correlation >= 0)
    for kind_mask, call_name, kind_of_call in (
        (is_launch, "kernel launch", "launch"),
        (is_copy, "copy call", "memcpy"),
        (is_fill, "memset call", "memset"),
    ):
        call[kind_mask] = CALLS.index(kind_of_call)
        name[kind_mask & is_unnamed] = len(display_names)
        display_names.append(call_name)
    if "memcpy_details" in events.texts:
        rows, texts = events.texts["memcpy_details"]
        call[rows[["async:0" in call_name for call_name in texts]]] = CALLS.index("memcpy_blocking")
    call[is_blocked] = CALLS.index("sync_stream")
    call[kind != _RUNTIME] = -1
    table = pl.DataFrame(
        {
            "ts": events.ts, "dur": events.dur, "kind": _texts_by_index(CPU_KINDS, kind),
            "name": _texts_by_index(tuple(display_names), name), "process": process,
            "thread": thread_of_line.gather(events.line), "call": _texts_by_index(CALLS, call),
            "correlation": np.where(kind == _RUNTIME, correlation, -1),
        }
    )  # fmt: skip
    step_number = events.number("step_num")
    is_step = (step_number >= 0) & (events.dur > 0)
    marks = table.select("thread", "ts", "dur").with_columns(number=pl.Series(step_number))
    host.marks.append(marks.filter(is_step))
    is_wait = matches(_INPUT_WAIT)
    host.waits.append(table.filter(is_wait).select("thread", "ts", "dur"))
    # functions of the input pipeline are not steps
    not_input_pipeline = np.array([not line.name.startswith("tf_data") for line in lines])[
        events.line
    ]
    is_program = matches(_PROGRAM_CALL) & not_input_pipeline
    host.calls.append(table.filter(is_program).select("thread", "name", "ts", "dur"))
    count_modules(host, events)
    host.memory.append(_memory_rows(events, is_allocation, plane))
    host.rows.append(table.filter(~(is_allocation | matches(_BOOKKEEPING) | is_wait)))


def _texts_by_index(values: tuple[str, ...], codes: NDArray[Any]) -> pl.Series:
    """Return texts by index, with null for negative ones."""
    table = pl.Series([*values, None], dtype=pl.String)
    return table.gather(np.where(codes < 0, len(values), codes).astype(np.uint32))


def _event_kind(name: str, has_display: bool) -> str:
    if name.startswith("$"):
        return "python"
    if _API_CALL.match(name) or _BLOCKING_CALL.search(name):
        return "runtime"
    if (has_display and not name.startswith("Iterator::")) or _TF_OP.match(name):
        return "op"
    return "op" if _RUNTIME_RANGES.match(name) else "annotation"


def _display_name(name: str) -> str:
    """Return a Python frame as other profilers write it: ``$train.py:31 step`` as ``train.py(31):
    step``, and ``$time sleep``, which has no line, as a built-in method."""
    if not name.startswith("$"):
        return name
    result = _PYTHON_FRAME.match(name)
    if result:
        return f"{result[1]}({result[2]}): {result[3]}"
    module, _, function = name[1:].partition(" ")
    return f"<built-in method {function or module} of {module}>"


def count_modules(host: XlaHost, events: Events) -> None:
    """Add the time of XLA's modules."""
    if "hlo_module" not in events.texts:
        return
    rows, names = events.texts["hlo_module"]
    time_by_name = pl.DataFrame({"name": names, "dur": np.maximum(events.dur[rows], 0)})
    for name, ns in time_by_name.group_by("name").agg(pl.col("dur").sum()).iter_rows():
        host.modules[name] = host.modules.get(name, 0) + ns
    read_modules(host, set(names))


_GPU_ALLOCATOR = re.compile(r"^(?:GPU|gpu)_(\d+)_")


def _memory_rows(events: Events, allocation: NDArray[np.bool_], plane: Plane) -> pl.DataFrame:
    """Return allocations and frees of the framework's allocators."""
    index = np.flatnonzero(allocation)
    if not len(index):
        return pl.DataFrame()
    allocator = np.full(len(allocation), "", dtype=object)
    if "allocator_name" in events.texts:
        rows, texts = events.texts["allocator_name"]
        allocator[rows] = texts
    device = [
        int(match[1]) if (match := _GPU_ALLOCATOR.match(name)) else -1 for name in allocator[index]
    ]
    is_free = np.array(["Dealloc" in plane.names[code] for code in events.meta[index].tolist()])
    size = events.number("allocation_bytes", 0)[index]
    return pl.DataFrame(
        {
            "ts": events.ts[index],
            "bytes": np.where(is_free, -size, size),
            "address": events.number("addr", 0)[index],
            "allocated": events.number("bytes_allocated", 0)[index],
            "device": device,
        }
    )


_CALLS_SCHEMA = {"thread": pl.String, "name": pl.String, "ts": pl.Int64, "dur": pl.Int64}


def step_rows(
    host: XlaHost, derived: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, str | None]:
    """Return steps as annotations, and the thread that drives the loop. Steps are the marks of the
    program (JAX's ``StepTraceAnnotation``, TensorFlow's ``Trace`` and Keras, with a ``step_num``).
    Without marks, they are the periods of the longest-running program among those with at least
    _MIN_CALLS calls. Otherwise they are the steps that the profiler ``derived`` on the device
    (``number``, ``ts``, ``dur``). The origin is in ``XlaHost.step_marks``."""
    marks = pl.concat(host.marks) if host.marks else pl.DataFrame()
    if marks.height:
        time_by_thread = marks.group_by("thread", maintain_order=True).agg(pl.col("dur").sum())
        thread = str(time_by_thread.sort("dur", descending=True)["thread"][0])
        thread_marks = _drop_nested(marks.filter(pl.col("thread") == thread))
        ts, dur = thread_marks["ts"].to_numpy(), thread_marks["dur"].to_numpy()
        host.step_marks = "StepTraceAnnotation" if host.framework() == JAX else "step_num"
        return _build_steps(ts, dur, thread_marks["number"].to_list(), thread), thread
    calls, main_thread = _find_longest_program(host)
    if calls is None or main_thread is None:
        main_thread = main_thread or _find_python_thread(host)
        if derived is None or main_thread is None:
            return pl.DataFrame(), main_thread
        host.step_marks = DEVICE_STEPS
        ts, dur = derived["ts"].to_numpy(), derived["dur"].to_numpy()
        return _build_steps(ts, dur, derived["number"].to_list(), main_thread), main_thread
    ts = calls["ts"].to_numpy()
    dur = np.append(np.diff(ts), calls["dur"].to_numpy()[-1])
    host.step_marks = "program"
    return _build_steps(ts, dur, list(range(len(ts))), main_thread), main_thread


def _find_longest_program(host: XlaHost) -> tuple[pl.DataFrame | None, str | None]:
    """Return the evenly spaced calls of the program that runs longest, and their thread. If there
    are none, return ``None`` and the thread that spends the most time in one program."""
    best: tuple[float, str, pl.DataFrame] | None = None
    busiest: tuple[float, str | None] = 0, None
    modules: dict[str, int] = {}
    for name, ns in host.modules.items():
        module_name = _JIT_PREFIX.sub("", name).split(".")[0]
        modules[module_name] = modules.get(module_name, 0) + ns
    calls = pl.concat(host.calls) if host.calls else pl.DataFrame(schema=_CALLS_SCHEMA)
    for (thread, name), group in calls.group_by("thread", "name", maintain_order=True):
        outer_calls = _drop_nested(group)
        host_time = float(outer_calls["dur"].sum())
        if host_time > busiest[0]:
            busiest = host_time, str(thread)
        total_time = host_time + modules.get(
            str(name).removeprefix("PjitFunction(").removesuffix(")"), 0
        )
        if _is_regular(outer_calls["ts"].to_numpy()) and (best is None or total_time > best[0]):
            best = total_time, str(thread), outer_calls
    return (None, busiest[1]) if best is None else (best[2], best[1])


def _find_python_thread(host: XlaHost) -> str | None:
    python_threads = (
        thread for (_, thread), name in host.thread_names.items() if _PYTHON_THREAD.match(name)
    )
    return next(python_threads, None)


def _is_regular(ts: Ints) -> bool:
    """Return whether calls are frequent and regular enough for their period to be that of a loop:
    most distances are within a factor of two of the median. Calls of very different programs may
    have the same name."""
    if len(ts) < _MIN_CALLS:
        return False
    distances = np.diff(ts)
    median_distance = float(np.median(distances))
    is_similar = (distances >= median_distance / 2) & (distances <= median_distance * 2)
    return median_distance > 0 and float(is_similar.mean()) >= _MIN_REGULAR_SHARE


def _drop_nested(frame: pl.DataFrame) -> pl.DataFrame:
    """Drop ranges inside an earlier range. Sort by start, longest first."""
    frame = frame.sort("ts", "dur", descending=[False, True])
    ts = frame["ts"].to_numpy()
    end = ts + frame["dur"].to_numpy()
    previous_end = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end)[:-1])
    return frame.filter(pl.Series(ts >= previous_end))


def _build_steps(ts: Ints, dur: Ints, numbers: list[int], thread: str) -> pl.DataFrame:
    process = thread.rpartition(":")[0]
    return pl.DataFrame(
        {
            "ts": ts, "dur": dur, "kind": "annotation",
            "name": [f"step #{number}" for number in numbers],
            "process": process, "thread": thread, "call": None, "correlation": -1,
        },
        schema_overrides={"call": pl.String, "correlation": pl.Int64},
    )  # fmt: skip


def wait_rows(host: XlaHost, main_thread: str | None) -> pl.DataFrame:
    """Return waits for tf.data as ranges of the thread that drives the loop. It is blocked,
    whichever of TensorFlow's threads asks for the batch. Overlapping waits are merged."""
    waits = pl.concat(host.waits).sort("ts") if host.waits else pl.DataFrame()
    if not waits.height:
        return waits
    spans = union(waits["ts"].to_numpy(), (waits["ts"] + waits["dur"].clip(0)).to_numpy())
    if not len(spans):
        return pl.DataFrame()
    thread = main_thread or str(waits["thread"][0])
    start = _find_wait_starts(host, thread, spans)
    frame = _build_steps(start, spans.end - start, [0] * len(spans), thread)
    return frame.with_columns(name=pl.lit(f"{TF_DATA}IteratorGetNext"))


def _find_wait_starts(host: XlaHost, thread: str, spans: Intervals) -> Ints:
    """Return when the thread starts waiting in each span: at its start, or at the end of the call
    that the thread was in, if that is inside the span (``FunctionRun`` hands the request to another
    thread and returns)."""
    thread_rows = [
        rows.filter(pl.col("thread") == thread).select("ts", "dur") for rows in host.rows
    ]
    rows = (
        pl.concat(thread_rows)
        if thread_rows
        else pl.DataFrame(schema={"ts": pl.Int64, "dur": pl.Int64})
    )
    start, end = rows["ts"].to_numpy(), (rows["ts"] + rows["dur"]).to_numpy()
    span = np.searchsorted(spans.start, end) - 1
    inside = (span >= 0) & (end < spans.end[span]) & (start <= spans.start[span])
    wait_starts = spans.start.copy()
    np.maximum.at(wait_starts, span[inside], end[inside])
    return wait_starts


def list_host_rows(
    host: XlaHost, steps: pl.DataFrame, waits: pl.DataFrame, main: str | None
) -> pl.DataFrame:
    """Return host rows of every kind. The thread that drives the loop gets its process's name, by
    which a trace knows it (``Trace.main_thread``)."""
    frames = [frame for frame in (*host.rows, steps, waits) if frame.height]
    if not frames:
        return pl.DataFrame(schema={"ts": pl.Int64})
    rows = pl.concat([frame.select(frames[0].columns) for frame in frames])
    shown_thread = pl.when(pl.col("thread") == (main or "")).then("process").otherwise("thread")
    return rows.with_columns(thread=shown_thread)
