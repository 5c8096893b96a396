"""Calls that hold the host until the device has got somewhere, by when they return.

A call need not say by its name that it waits: ``cudaFree`` does, so does a copy whose memory turns
out to be pageable, a prefetch of unified memory, or a launch with ``CUDA_LAUNCH_BLOCKING=1``. What
tells is its end: it returns as the work that was launched before it ends.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import Trace

CLOCKS_NS = 1_500
"""Timestamps of one trace may be rounded to whole µs and disagree by that much."""
MAX_CLOCKS_NS = 20_000
"""A call cannot have waited for work that ends this long after it, whatever the clocks say."""
LONG_CALL_NS = 50_000
"""Shorter calls did not wait for long, or for nothing."""
RETURN_NS = 20_000
"""A call that waited returns this soon after (public A100, V100, H100 and MI300 traces: 3 to
12 µs)."""
LATE_SHARE = 0.02
"""Longer ones may take this share of their length more: the host is busy waking up."""
MIN_SIMILAR, SIMILAR = 3, 0.6
"""Where one call was long so often, this share of them must be tied, or it was chance."""
ALONE_NS = 1_000_000
"""A call that was long less often than that counts from this length on: within it, the last work of
a stream ends near its return by chance one time in fifty."""
NAMED = ("sync_device", "sync_stream", "sync_event", "memcpy", "memcpy_blocking")


def clocks_apart(trace: Trace) -> int:
    """How long after the return of a call the trace may say that the work ended which it waited
    for, ns: as seen in copies that cannot return before they are done (95 of 100 of them), and
    ``CLOCKS_NS`` at least. AMD's profiler ends copies up to 4 µs after their call."""
    gpu, cpu = trace.gpu, trace.cpu
    copies = gpu.filter((pl.col("copy") == "DtoH") & pl.col("launch").is_not_null())
    if copies.is_empty():
        return CLOCKS_NS
    call = cpu.select("ts", "dur", "call")[copies["launch"].to_numpy()]
    over = (copies["ts"] + copies["dur"] - call["ts"] - call["dur"]).to_numpy()
    sure = (call["call"] == "memcpy_blocking").fill_null(False).to_numpy()
    over = over[sure & (over > 0) & (over < MAX_CLOCKS_NS)]
    return max(CLOCKS_NS, int(np.quantile(over, 0.95))) if len(over) else CLOCKS_NS


def tied_calls(trace: Trace) -> NDArray[np.int64]:
    """Rows of ``trace.cpu``: long runtime calls that do not wait by their name and yet returned as
    the last work of a stream ended that had been launched before them."""
    cpu, gpu = trace.cpu, trace.gpu
    long = (cpu["kind"] == "runtime") & (cpu["dur"] >= LONG_CALL_NS)
    long &= ~cpu["call"].is_in(NAMED).fill_null(False)
    rows = np.flatnonzero(long.to_numpy())
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    known = launch >= 0
    if not len(rows) or not known.any():
        return rows[:0]
    begin = cpu["ts"].to_numpy()[rows]
    dur = cpu["dur"].to_numpy()[rows]
    tied = np.zeros(len(rows), dtype=bool)
    late = np.maximum(RETURN_NS, LATE_SHARE * dur)
    apart = clocks_apart(trace)
    launched, ends = cpu["ts"].to_numpy(), (gpu["ts"] + gpu["dur"]).to_numpy()
    streams = gpu.select(pl.struct("device", "stream").rank("dense"))["device"].to_numpy()
    for stream in np.unique(streams[known]):  # a handful of streams
        own_part = np.flatnonzero(known & (streams == stream))
        own_part = own_part[np.argsort(launched[launch[own_part]], kind="stable")]
        last = np.maximum.accumulate(ends[own_part])
        place = np.searchsorted(launched[launch[own_part]], begin, side="left") - 1
        ended = np.where(place >= 0, last[np.maximum(place, 0)], -1)
        # with CUDA_LAUNCH_BLOCKING a launch waits for what it launches, which is most of its time
        own = np.minimum(place + 1, len(own_part) - 1)
        work = gpu["dur"].to_numpy()[own_part[own]]
        ended = np.where((launch[own_part[own]] == rows) & (2 * work > dur), last[own], ended)
        after = begin + dur - ended
        tied |= (ended > begin + dur // 2) & (after >= -apart) & (after <= late)
    names = cpu["name"].gather(rows).to_physical().to_numpy()
    _, of, count = np.unique(names, return_inverse=True, return_counts=True)
    share = np.bincount(of, weights=tied)[of] / count[of]
    sure = np.where(count[of] >= MIN_SIMILAR, share >= SIMILAR, dur >= ALONE_NS)
    return rows[tied & sure]
