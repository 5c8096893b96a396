"""Timeline of host threads: exclusive segments of each one's call tree, by class."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from advisor.core.intervals import Ints, union
from advisor.core.trace import CALLS, LOADER, PYTORCH, Trace
from advisor.measure.device.copies import copies_blocking_host
from advisor.measure.host.names import distinct_names
from advisor.measure.host.stacks import (
    innermost_ancestor,
    is_operator,
    outermost_ancestor,
    parent_rows,
)
from advisor.measure.host.syncs import profiler_syncs

if TYPE_CHECKING:
    from advisor.measure import Analysis

CLASSES = (
    "loader",  # in the DataLoader's __next__, including everything below it
    "sync",  # blocked in a synchronising call
    "copy",  # in a copy call that blocked the host
    "allocation",  # cudaMalloc, cudaFree, cudaHostAlloc, cudaFreeHost
    "compile",  # torch.compile compiling, a CUDA module being loaded, a graph being captured
    "profiler",  # the profiler's own code
    "drain",  # blocked until the queue is empty, after the last launch
    "launch",  # in a call that starts device work
    "dispatch",  # in an operator, outside the calls above
    "python",  # in a Python frame, outside operators
    "communication",  # in a call of MPI
    "other_thread",  # in a Python frame that waits for another thread
    "host_code",  # in no recorded event, while samples show that the thread ran
    "unknown",  # in nothing but annotations: no operator, no Python frame
    "unrecorded",  # in no recorded event
)
"""Classes of host time; each instant of a thread has one."""

CLASS_CODE = {name: code for code, name in enumerate(CLASSES)}

_CALL_CLASS = {
    "launch": "launch", "graph_launch": "launch", "memcpy": "launch", "memcpy_blocking": "launch",
    "memset": "launch", "sync_device": "sync", "sync_stream": "sync", "sync_event": "sync",
    "malloc": "allocation", "free": "allocation", "host_alloc": "allocation",
    "host_free": "allocation", "graph_capture": "compile", "module_load": "compile",
}  # fmt: skip
# Other calls (cudaEventRecord, cudaFuncSetAttribute, …) belong to the event around them.

COMPILE = (
    r"\(dynamo_timed\)|^torch/_dynamo/convert_frame\.py\("
    r"|^triton/compiler/compiler\.py\(\d+\): compile"
    r"|^torch/_inductor/compile_fx\.py\(\d+\): _?(?:compile_fx|fx_codegen_and_compile)"
    r"|(?:^|/)torch/_inductor/async_compile\.py\(\d+\): wait$"
    r"|(?:^|/)torch/_inductor/runtime/triton_heuristics\.py\(\d+\): (?:precompile|autotune_to_)"
    r"|(?:^|/)triton/runtime/(?:jit|autotuner)\.py\(\d+\): (?:_do_compile|_bench|warmup)"
    r"|^(?:triton|Triton)(?:\.|::|_)?[cC]ompile|^(?:async_compile|AsyncCompile)\.wait|(?i:\bnvrtc)"
    r"|^(?:cuda|hip)StreamCreate|^cuStreamCreate"
    # nvFuser: grouping into kernels, lowering, compiling
    r"|^(?:Fusion\w+|KernelExecutor|CompiledKernel|ExecutorDispatch)::(?:\w+::)?[cC]ompile"
    r"|^SegmentCandidateFinder::|^GpuLower::[lL]ower|^FusionKernelRuntime::FusionKernelRuntime$"
    # JAX and TensorFlow: their own ranges, and the frames of JAX around them
    r"|^(?:tf\.function-graph_building|XlaCompile\w*|backend_compile(?:_and_load)?)$"
    r"|^lower_sharding_computation$|(?:^|/)compiler\.py\(\d+\): (?:backend_compile|compile_or_get)"
    r"|(?:^|/)pxla\.py\(\d+\): (?:compile|from_hlo|_cached_compilation|lower_sharding_computation)$"
    r"|(?:^|/)pjit\.py\(\d+\): (?:_trace_for_jit|_create_pjit_jaxpr|_resolve_and_lower|_pjit_lower)"
)
"""Compiling, including tracing before it, and the set-up of a first call: a stream, the device
itself. ``Torch-Compiled Region``, ``TorchDynamo Cache Lookup`` and ``Call CompiledFxGraph`` are
around the *execution* of compiled code, so they are dispatch."""
PROFILER = r"(?:^|/)torch/profiler/\w+\.py\(|(?:^|/)profiler\.py\(\d+\): (?:start|stop)_trace$"
_THREAD_WAITS = (
    r"^<built-in method (?:run_backward|acquire|__enter__) of (?:torch\._C\._EngineBase|_thread\.)"
    r"|(?:^|/)threading\.py\(\d+\): (?:wait|wait_for|join|_wait_for_tstate_lock|acquire)$"
    r"|(?:^|/)concurrent/futures/_base\.py\(\d+\): (?:result|wait)$|(?:^|/)queue\.py\(\d+\): get$"
    r"|^ThunkExecutor::Execute \(wait for completion\)$"
)
_BLOCKING_BUILT_INS = (
    r"^<built-in (?:function|method) (?:_(?:cuda|xpu|hip|mps)_(?:synchronize|deviceSynchronize)\b"
    r"|synchronize of torch\.|(?:item|tolist|cpu|nonzero) of Tensor )"
)
"""Built-ins that return when the device has finished. Their self time is waiting, not Python that
could be improved."""
_JAX_WAITS = (
    r"(?:^|/)(?:api|array)\.py\(\d+\): (?:_?block_until_ready|_value)$|^np\.asarray\(jax\.Array\)$"
)
"""JAX's blocking functions. Without a device, the threads of XLA compute meanwhile."""
_COMPILED_CODE = (
    r"^Torch-Compiled Region|^TorchDynamo Cache Lookup|^## Call CompiledFxGraph|^Pregraph bytecode"
    r"|^AOTDispatcher Runtime|^CompiledFunction"
)
_COLLECTIVE = r"^(?:nccl|gloo|ucc|mpi|xccl):"
_MPI = r"^(?:MPI:)?MPI_[A-Z]\w*$"
LOADING = r"(?i)loading|driver compiler"


class HostClasses(NamedTuple):
    """Class of each host row, aligned with ``trace.cpu``. ``row`` is the event that classifies its
    innermost instants (itself or an ancestor, or -1), ``code`` the index of CLASSES."""

    row: NDArray[np.int32]
    code: NDArray[np.int8]
    annotation: NDArray[np.int32]
    """Innermost annotation at or around the row, or -1."""


class HostPieces(NamedTuple):
    """Pieces of given intervals, consecutive and complete: ``interval`` (its index), ``start`` and
    ``end`` (ns), ``row`` of ``trace.cpu`` that explains it (or -1), ``code`` of CLASSES."""

    interval: NDArray[np.int64]
    start: Ints
    end: Ints
    row: NDArray[np.int32]
    code: NDArray[np.int8]


class HostTimeline(NamedTuple):
    """Exclusive segments of all threads, without gaps from the first to the last event.

    ``key`` is thread x stride + time since ``origin``, one sorted axis for all threads."""

    key: Ints
    row: NDArray[np.int32]
    code: NDArray[np.int8]
    origin: int
    stride: int
    threads: int

    @property
    def thread(self) -> Ints:
        """Thread of each segment."""
        return self.key // self.stride

    @property
    def start(self) -> Ints:
        """Start of each segment, ns."""
        return self.key % self.stride + self.origin

    @property
    def end(self) -> Ints:
        """End of each segment, ns."""
        following = np.append(self.key[1:], self.threads * self.stride)
        return following - self.thread * self.stride + self.origin

    def pieces_within(self, thread: ArrayLike, start: ArrayLike, end: ArrayLike) -> HostPieces:
        """Return the activity of the given threads in the given intervals. Empty intervals give no
        piece; an unknown thread (-1) is unrecorded."""
        start_ns = np.asarray(start, dtype=np.int64)
        end_ns = np.asarray(end, dtype=np.int64)
        owner = np.broadcast_to(np.asarray(thread, dtype=np.int64), start_ns.shape)
        is_known = (owner >= 0) & (owner < self.threads) & (end_ns > start_ns)
        asked = np.flatnonzero(is_known)
        base = owner[asked] * self.stride - self.origin
        piece, index, piece_start, piece_end = cut_at_points(
            self.key, start_ns[asked] + base, end_ns[asked] + base
        )
        unknown = np.flatnonzero(~is_known & (end_ns > start_ns))
        pieces = HostPieces(
            np.concatenate([asked[piece], unknown]),
            np.concatenate([piece_start - base[piece], start_ns[unknown]]),
            np.concatenate([piece_end - base[piece], end_ns[unknown]]),
            np.concatenate([self.row[index], np.full(len(unknown), -1, dtype=np.int32)]),
            np.concatenate(
                [self.code[index], np.full(len(unknown), CLASS_CODE["unrecorded"], np.int8)]
            ),
        )
        if not len(unknown):
            return pieces
        order = np.argsort(pieces.interval, kind="stable")
        return HostPieces._make(column[order] for column in pieces)


def cut_at_points(
    key: Ints, start: Ints, end: Ints
) -> tuple[NDArray[np.int64], NDArray[np.int64], Ints, Ints]:
    """Cut intervals at the sorted points ``key``: (interval, point before, start, end) per piece.

    ``key[0]`` must not be after any start. Only for intervals of positive length."""
    first = np.searchsorted(key, start, side="right") - 1
    count = np.maximum(np.searchsorted(key, end, side="left") - first, 0)
    interval = np.repeat(np.arange(len(start)), count)
    index = np.arange(len(interval)) - np.repeat(np.cumsum(count) - count, count) + first[interval]
    upper = np.append(key[1:], np.iinfo(np.int64).max)
    return (
        interval,
        index,
        np.maximum(start[interval], key[index]),
        np.minimum(end[interval], upper[index]),
    )


def classify(trace: Trace) -> HostClasses:
    """Classify each host row.

    The innermost classified event decides, except that the DataLoader's ``__next__``, a compilation
    and the profiler's own code also decide for everything below them."""
    cpu = trace.cpu
    kind = cpu["kind"]
    is_op = (kind == "op").to_numpy()
    is_python = (kind == "python").to_numpy()
    is_annotation = (kind == "annotation").to_numpy()
    patterns = (
        LOADER, COMPILE, PROFILER, _THREAD_WAITS, _BLOCKING_BUILT_INS, _JAX_WAITS, _COMPILED_CODE,
        _COLLECTIVE, LOADING, _MPI,
    )  # fmt: skip
    loader, compiling, profiling, waiting, blocking, awaits, compiled, collective, loading, mpi = (
        _match_names(cpu["name"], *patterns)
    )
    code = np.full(cpu.height, -1, dtype=np.int8)
    named = is_operator(trace)
    code[named] = CLASS_CODE["dispatch"]
    code[(is_annotation | is_op) & (compiled | collective)] = CLASS_CODE["dispatch"]
    code[is_annotation & mpi] = CLASS_CODE["communication"]
    code[is_python] = CLASS_CODE["python"]
    code[(is_python | is_op) & waiting] = CLASS_CODE["other_thread"]
    code[is_python & blocking] = CLASS_CODE["sync"]
    wait_code = CLASS_CODE["sync" if trace.gpu.height else "other_thread"]
    if trace.meta.framework != PYTORCH:  # PyTorch programs may have their own ``array.py``
        code[(is_python | is_annotation) & awaits] = wait_code
    calls = np.array([CLASS_CODE[_CALL_CLASS[c]] if c in _CALL_CLASS else -1 for c in CALLS] + [-1])
    call = cpu["call"].to_physical().fill_null(len(CALLS)).to_numpy()
    runtime = calls[call]
    code = np.where(runtime >= 0, runtime, code).astype(np.int8)
    blocked = trace.gpu["launch"].gather(np.flatnonzero(copies_blocking_host(trace))).to_numpy()
    code[blocked] = CLASS_CODE["copy"]
    overhead = (kind == "overhead").to_numpy()
    code[overhead] = CLASS_CODE["profiler"]
    code[overhead & loading] = CLASS_CODE["compile"]
    includes_children = (is_annotation | is_op) & loader
    code[includes_children] = CLASS_CODE["loader"]
    compiling &= is_annotation | is_op | is_python | (call == CALLS.index("other"))
    code[compiling] = CLASS_CODE["compile"]
    profiling &= is_python
    code[profiling] = CLASS_CODE["profiler"]
    parent = parent_rows(trace)
    row = innermost_ancestor(parent, code >= 0)
    includes_children |= compiling | profiling
    if includes_children.any():
        including_row = outermost_ancestor(parent, includes_children)
        row = np.where(including_row >= 0, including_row, row)
    drains = profiler_syncs(trace)  # they wait for queued work, whoever calls them
    code[drains], row[drains] = CLASS_CODE["drain"], drains
    row_code = np.where(row >= 0, code[np.maximum(row, 0)], CLASS_CODE["unknown"]).astype(np.int8)
    return HostClasses(row, row_code, innermost_ancestor(parent, is_annotation | (is_op & ~named)))


def build_timeline(a: Analysis) -> HostTimeline:
    """Build the exclusive segments of all host threads, classified. See :class:`HostTimeline`.

    An unexplained instant inside annotations has the innermost annotation as its row."""
    trace = a.trace
    classified = classify(trace)
    explained = np.where(classified.row >= 0, classified.row, classified.annotation)
    # the last entry, which -1 selects, means no event
    explained = np.append(explained, np.int32(-1)).astype(np.int32)
    codes = np.append(classified.code, np.int8(CLASS_CODE["unrecorded"])).astype(np.int8)
    ts, end, thread = _nest_ends(trace)
    times = [ts, end, trace.gpu["ts"].to_numpy(), a.spans.start, a.spans.end]
    times.append((trace.gpu["ts"] + trace.gpu["dur"]).to_numpy())
    origin = min((int(column.min()) for column in times if len(column)), default=0)
    latest = max((int(column.max()) for column in times if len(column)), default=0)
    stride = latest - origin + 2
    # threads are ordered busiest first; beyond this many the one axis would overflow
    threads = min(trace.threads.height, (1 << 62) // stride)
    rows = np.flatnonzero((end > ts) & (thread < threads))
    base = thread[rows].astype(np.int64) * stride - origin
    starts, ends = ts[rows] + base, end[rows] + base
    # At equal times: a thread's beginning, then ends (inner ones first), then starts (outer ones
    # first); the last of them determines the segment. Rows are in the order (thread, start, outer
    # first), so reversing them puts inner ends first.
    backwards = np.argsort(ends[::-1], kind="stable")
    closing = rows[::-1][backwards]
    key = np.concatenate([np.arange(threads) * stride, ends[::-1][backwards], starts])
    label = np.concatenate([np.full(threads, -1), parent_rows(trace)[closing], rows])
    order = np.argsort(key, kind="stable")
    key = key[order]
    is_last = np.ones(len(key), dtype=bool)
    is_last[:-1] = key[1:] != key[:-1]
    key, label = key[is_last], label[order[is_last]]
    row, code = explained[label], codes[label]
    is_first = np.ones(len(key), dtype=bool)
    is_first[1:] = (row[1:] != row[:-1]) | (code[1:] != code[:-1])
    is_first[np.searchsorted(key, np.arange(threads) * stride)] = True
    timeline = HostTimeline(key[is_first], row[is_first], code[is_first], origin, stride, threads)
    return _add_samples(timeline, trace.meta.cpu_samples)


def _add_samples(timeline: HostTimeline, samples: pl.DataFrame | None) -> HostTimeline:
    """Return the timeline with the time in which samples show that a thread ran while nothing else
    was recorded."""
    if samples is None or samples.is_empty():
        return timeline
    latest = timeline.origin + timeline.stride - 1
    sampled = samples.filter(pl.col("thread") < timeline.threads).with_columns(
        pl.col("ts", "end").clip(timeline.origin, latest)
    )
    base = sampled["thread"].to_numpy().astype(np.int64) * timeline.stride - timeline.origin
    sampled_time = union(sampled["ts"].to_numpy() + base, sampled["end"].to_numpy() + base)
    if not len(sampled_time):
        return timeline
    key = np.unique(np.concatenate([timeline.key, sampled_time.start, sampled_time.end]))
    before = np.searchsorted(timeline.key, key, side="right") - 1
    sample_index = np.maximum(np.searchsorted(sampled_time.start, key, side="right") - 1, 0)
    is_sampled = (key >= sampled_time.start[sample_index]) & (key < sampled_time.end[sample_index])
    row, code = timeline.row[before], timeline.code[before]
    is_unexplained = np.isin(code, [CLASS_CODE["unknown"], CLASS_CODE["unrecorded"]])
    code = np.where(is_sampled & is_unexplained, CLASS_CODE["host_code"], code).astype(np.int8)
    is_first = np.ones(len(key), dtype=bool)
    is_first[1:] = (row[1:] != row[:-1]) | (code[1:] != code[:-1])
    is_first |= key % timeline.stride == 0
    return timeline._replace(key=key[is_first], row=row[is_first], code=code[is_first])


def _nest_ends(trace: Trace) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Return starts, ends and threads of host rows. An annotation that outlasts its parent is cut
    at the parent's end, so that the ends nest."""
    cpu = trace.cpu
    ts = cpu["ts"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    parent = parent_rows(trace)
    inner = np.flatnonzero(parent >= 0)
    for _ in range(1000):  # MAX_NESTING_DEPTH; one round settles nearly every trace
        overlong = inner[end[inner] > end[parent[inner]]]
        if not len(overlong):
            break
        end[overlong] = end[parent[overlong]]
    return ts, end, cpu["thread"].to_numpy()


def _match_names(names: pl.Series, *patterns: str) -> list[NDArray[np.bool_]]:
    """Match each pattern and return one mask per pattern. The distinct names are collected once."""
    texts, which = distinct_names(names)
    return [np.append(texts.str.contains(pattern).to_numpy(), False)[which] for pattern in patterns]
