"""The typed shape of one trace event: what msgspec decodes, and nothing more."""

from __future__ import annotations

from msgspec import Raw, Struct, field

Number = int | float | str | None
"""Profilers write numbers as numbers; some tools that rewrite traces write them as strings."""

_EMPTY = Raw()


class Args(Struct, gc=False):
    """The arguments that analysis uses. Nested values stay undecoded: they repeat massively, so
    the distinct ones are decoded once, later."""

    external: Number = field(default=-1, name="External id")
    external_old: Number = field(default=-1, name="external id")
    correlation: Number = -1
    stream: Number = None
    device: Number = None
    bytes: Number = None
    gbps: Number = field(default=None, name="memory bandwidth (GB/s)")
    gbps_old: Number = field(default=None, name="Memory bandwidth (GB/s)")
    grid: Raw = _EMPTY
    block: Raw = _EMPTY
    registers: Number = field(default=None, name="registers per thread")
    shared: Number = field(default=None, name="shared memory")
    blocks_per_sm: Number = field(default=None, name="blocks per SM")
    warps_per_sm: Number = field(default=None, name="warps per SM")
    occupancy: Number = field(default=None, name="est. achieved occupancy %")
    occupancy_detail: Raw = field(default=_EMPTY, name="occupancy")
    graph: Number = field(default=None, name="graph id")
    dims: Raw = field(default=_EMPTY, name="Input Dims")
    dims_old: Raw = field(default=_EMPTY, name="Input dims")
    types: Raw = field(default=_EMPTY, name="Input type")
    strides: Raw = field(default=_EMPTY, name="Input Strides")
    concrete: Raw = field(default=_EMPTY, name="Concrete Inputs")
    sequence: Number = field(default=-1, name="Sequence number")
    collective: Raw = field(default=_EMPTY, name="Collective name")
    comm_in: Raw = field(default=_EMPTY, name="In msg nelems")
    comm_out: Raw = field(default=_EMPTY, name="Out msg nelems")
    comm_size: Raw = field(default=_EMPTY, name="Group size")
    comm_dtype: Raw = field(default=_EMPTY, name="dtype")
    comm_group: Raw = field(default=_EMPTY, name="Process Group Name")
    comm_description: Raw = field(default=_EMPTY, name="Process Group Description")
    comm_ranks: Raw = field(default=_EMPTY, name="Process Group Ranks")
    comm_in_split: Raw = field(default=_EMPTY, name="In split size")
    comm_out_split: Raw = field(default=_EMPTY, name="Out split size")
    comm_sequence: Raw = field(default=_EMPTY, name="Seq")
    wait_stream: Number = field(default=None, name="wait_on_stream")
    wait_correlation: Number = field(default=None, name="wait_on_cuda_event_record_corr_id")
    address: Number = field(default=None, name="Addr")
    alloc_bytes: Number = field(default=None, name="Bytes")
    allocated: Number = field(default=None, name="Total Allocated")
    reserved: Number = field(default=None, name="Total Reserved")
    device_type: Number = field(default=None, name="Device Type")
    device_id: Number = field(default=None, name="Device Id")
    name: str | None = None


class Event(Struct, gc=False):
    """One element of ``traceEvents``."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: Number = None
    tid: Number = None
    ts: Number = None
    dur: Number = None
    args: Args | None = None


NO_ARGS = Args()
