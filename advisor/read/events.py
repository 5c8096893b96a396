"""The typed shape of one trace event: what msgspec decodes, and nothing more."""

from __future__ import annotations

import math

from msgspec import Raw, Struct, field

Whole = int | float | str | None
"""An id. Profilers write numbers as numbers; some tools that rewrite traces, as strings."""
Real = float | str | None
"""A quantity. msgspec makes floats of integers here, which become columns fastest."""

ABSENT = Raw()
"""The default of nested values, known by identity: ``args.dims is ABSENT``."""
_NAN = math.nan  # absent numbers become NaN in float columns without a look at each


class Args(Struct, gc=False):
    """The arguments that analysis uses. Nested values stay undecoded: they repeat massively, so
    the distinct ones are decoded once, later."""

    external: Whole = field(default=-1, name="External id")
    external_old: Whole = field(default=-1, name="external id")
    correlation: Whole = -1
    stream: Real = _NAN
    device: Real = _NAN
    bytes: Real = _NAN
    gbps: Real = field(default=_NAN, name="memory bandwidth (GB/s)")
    gbps_old: Real = field(default=_NAN, name="Memory bandwidth (GB/s)")
    grid: Raw = ABSENT
    block: Raw = ABSENT
    registers: Real = field(default=_NAN, name="registers per thread")
    shared: Real = field(default=_NAN, name="shared memory")
    blocks_per_sm: Real = field(default=_NAN, name="blocks per SM")
    warps_per_sm: Real = field(default=_NAN, name="warps per SM")
    occupancy: Real = field(default=_NAN, name="est. achieved occupancy %")
    occupancy_detail: Raw = field(default=ABSENT, name="occupancy")
    graph: Real = field(default=_NAN, name="graph id")
    dims: Raw = field(default=ABSENT, name="Input Dims")
    dims_old: Raw = field(default=ABSENT, name="Input dims")
    types: Raw = field(default=ABSENT, name="Input type")
    strides: Raw = field(default=ABSENT, name="Input Strides")
    concrete: Raw = field(default=ABSENT, name="Concrete Inputs")
    sequence: Whole = field(default=-1, name="Sequence number")
    collective: Raw = field(default=ABSENT, name="Collective name")
    comm_in: Raw = field(default=ABSENT, name="In msg nelems")
    comm_out: Raw = field(default=ABSENT, name="Out msg nelems")
    comm_size: Raw = field(default=ABSENT, name="Group size")
    comm_dtype: Raw = field(default=ABSENT, name="dtype")
    comm_group: Raw = field(default=ABSENT, name="Process Group Name")
    comm_description: Raw = field(default=ABSENT, name="Process Group Description")
    comm_ranks: Raw = field(default=ABSENT, name="Process Group Ranks")
    comm_in_split: Raw = field(default=ABSENT, name="In split size")
    comm_out_split: Raw = field(default=ABSENT, name="Out split size")
    comm_sequence: Raw = field(default=ABSENT, name="Seq")
    comm_source: Raw = field(default=ABSENT, name="Src Rank")
    comm_target: Raw = field(default=ABSENT, name="Dst Rank")
    wait_stream: Real = field(default=_NAN, name="wait_on_stream")
    wait_correlation: Real = field(default=_NAN, name="wait_on_cuda_event_record_corr_id")
    address: Whole = field(default=_NAN, name="Addr")
    alloc_bytes: Whole = field(default=_NAN, name="Bytes")
    allocated: Whole = field(default=None, name="Total Allocated")
    reserved: Whole = field(default=_NAN, name="Total Reserved")
    device_type: Real = field(default=_NAN, name="Device Type")
    device_id: Real = field(default=_NAN, name="Device Id")
    name: str | None = None


class TraceEvent(Struct, gc=False):
    """One element of ``traceEvents``."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: Whole = None
    tid: Whole = None
    ts: Real = _NAN
    dur: Real = _NAN
    args: Args | None = None


NO_ARGS = Args()
