"""Arguments of each collective: its kind, message, dtype and group."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import Trace
from advisor.measure.device.shapes import OpInputs, bare_type_name, width_of
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import ancestor_chains, parent_rows

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv",
    "other",
)  # fmt: skip

_KINDS = (  # the longer words first: "allreduce" contains "reduce"
    (re.compile(r"reducescatter"), "reduce_scatter"),
    (re.compile(r"allreduce|crossdevicereduce"), "all_reduce"),
    (re.compile(r"allgather"), "all_gather"),
    (re.compile(r"alltoall|all2all"), "all_to_all"),
    (re.compile(r"broadcast"), "broadcast"),
    (re.compile(r"sendrecv|pointtopoint|^i?send\d*$|^i?recv\d*$"), "send_recv"),
    (re.compile(r"reduce"), "reduce"),
)
_BACKEND = r"^(nccl|rccl|gloo|mpi|ucc|xccl):"
"""Pattern of annotations that PyTorch itself puts around a collective."""
_NOT_ALPHANUMERIC = re.compile(r"[^a-z0-9]+")
# Older versions of NCCL ran all collectives without their own kernel under this one name: a real
# trace (NCCL 2.1x) has all-reduces, all-gathers and all-to-alls under it.
_GENERIC_KERNEL = re.compile(r"^nccl\w*Kernel_(SendRecv_RING_SIMPLE_Sum_int8_t|Generic)")
# Tokens sent to their experts and back, by DeepEP and libraries that copy its names.
_EXPERT_KERNEL = re.compile(r"(?i)(\bep|node(_ll)?)::|\bep_?(dispatch|combine)")


def kind_of(text: str) -> str | None:
    """Return the collective that an annotation, an op or an argument names, or ``None``.

    A barrier of PyTorch's NCCL backend is an all-reduce of one element, and is called one."""
    text = text.lower()
    word = _NOT_ALPHANUMERIC.sub("", re.sub(_BACKEND, "", text))
    if word == "barrier":
        return "all_reduce"
    return next((kind for pattern, kind in _KINDS if pattern.search(word)), None)


def kernel_kind(name: str) -> str | None:
    """Apply :func:`kind_of` to a kernel's name without template arguments and parameters."""
    if _GENERIC_KERNEL.search(name):
        return None
    name = name.removeprefix("void ")
    for unnamed in ("(anonymous namespace)", "<unnamed>"):
        name = name.replace(unnamed, "")
    function = re.split(r"[<(]", name, maxsplit=1)[0]
    if _EXPERT_KERNEL.search(function):
        return "all_to_all"
    return kind_of(function)


def message_elements(
    kind: str, input_size: int | None, out: int | None, group_size: int | None
) -> int | None:
    """Count the elements of the message, S of nccl-tests, from the input and output of one rank.

    All-gather: the gathered array (the input of one rank, times the ranks). Reduce-scatter: the
    array before it is scattered. All-to-all: the input of one rank, including its own part. Other
    kinds: the array that each rank holds."""
    if kind == "all_gather":
        if out is not None:
            return out
        return None if input_size is None or group_size is None else input_size * group_size
    if kind == "reduce_scatter":
        if input_size is not None:
            return input_size
        return None if out is None or group_size is None else out * group_size
    if kind in ("all_reduce", "all_to_all"):
        return input_size if input_size is not None else out
    # broadcast, reduce, send and receive: only some ranks have an input, only some an output
    return max((count for count in (input_size, out) if count is not None), default=None)


def bus_factor(kind: str, group_size: int | None) -> float | None:
    """Return bus bandwidth over algorithm bandwidth (S / t), as nccl-tests define it.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md: all-reduce 2(n-1)/n; reduce-scatter, all-gather
    and all-to-all (n-1)/n; broadcast and reduce 1, as for one transfer. ``None`` if n is unknown or
    1, or there is no factor for the kind."""
    if group_size is None or group_size < 2:
        return None
    share = (group_size - 1) / group_size
    return {
        "all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share,
        "broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0,
    }.get(kind)  # fmt: skip


_SOURCE_SCHEMA: dict[str, Any] = {
    "collective": pl.String,
    "given": pl.Int64,
    "out": pl.Int64,
    "group_size": pl.Int64,
    "dtype": pl.String,
    "group": pl.String,
    "description": pl.String,  # of the group
    "ranks": pl.String,
    "sequence": pl.Int64,
    "source": pl.Int64,
    "target": pl.Int64,
    "even": pl.Boolean,  # false for an all-to-all with parts of different sizes
}


def collective_facts(
    trace: Trace, gpu: pl.DataFrame, by_name: pl.Series, group_size: int | None = None
) -> pl.DataFrame:
    """Collect kind, message and group of each collective kernel (rows ``gpu`` of ``trace.gpu``).

    The first of these sources counts: arguments on the kernel, arguments of a host row around its
    launch (``record_param_comms``), the backend's annotation with its tensors, an op that
    all-reduces by itself (``symm_mem::multimem_all_reduce_``), the kernel's name (``by_name`` has
    its kind). ``group_size`` is the default if none of them has one.

    Columns: ``collective`` (one of COLLECTIVES), ``bytes`` (null), ``factor`` (of
    :func:`bus_factor`; null, also for an all-to-all with uneven parts), ``group_size``, ``dtype``,
    ``group``, ``description`` (the group's), ``ranks``, ``sequence``, ``source``, ``target``,
    ``annotation``."""
    start = gpu["launch"].fill_null(-1).to_numpy().copy()
    start[start < 0] = gpu["op"].fill_null(-1).to_numpy()[start < 0]
    stacks = ancestor_chains(parent_rows(trace), start)
    hosts = np.unique(stacks[stacks >= 0])
    host_index = np.where(stacks >= 0, np.searchsorted(hosts, stacks), -1)
    host_rows = _HostRows(trace, hosts)
    comms = _read_arguments(trace)

    has_kind = np.append(comms["collective"].is_not_null().to_numpy(), False)  # -1 if not recorded
    kernel_comm = gpu["comm"].fill_null(-1).to_numpy()
    nearest = _find_innermost(host_index, has_kind[host_rows.comm])
    comm = np.where(has_kind[kernel_comm], kernel_comm, np.append(host_rows.comm, -1)[nearest])
    backend_call = _find_innermost(host_index, host_rows.call)
    reducing_op = _find_innermost(host_index, host_rows.reduces)
    reducing_op[(by_name != "all_reduce").fill_null(True).to_numpy()] = -1

    count = comms.height
    sources = pl.concat([comms, host_rows.sources(), pl.DataFrame([{}], schema=_SOURCE_SCHEMA)])
    host = np.where(backend_call >= 0, backend_call, reducing_op)
    source_row = np.where(comm >= 0, comm, np.where(host >= 0, count + host, sources.height - 1))
    result = sources[source_row]
    base_sizes = pl.Series(
        np.append(host_rows.base_size, 0)[_find_innermost(host_index, host_rows.base_size > 1)]
    )
    annotation = _find_innermost(host_index, host_rows.user)
    return _add_sizes(
        result.with_columns(
            collective=pl.coalesce("collective", by_name).fill_null("other"),
            group_size=pl.coalesce(
                "group_size",
                base_sizes.set(base_sizes == 0, None),
                pl.lit(group_size, dtype=pl.Int64),
            ),
            annotation=pl.Series([*host_rows.names, None], dtype=pl.String).gather(
                np.where(annotation >= 0, annotation, len(hosts))
            ),
        )
    )


def _add_sizes(result: pl.DataFrame) -> pl.DataFrame:
    """Add message size and bus factor, computed once for each distinct description."""
    keys = ["collective", "given", "out", "group_size", "dtype", "even"]
    distinct = result.select(keys).unique(maintain_order=True)
    size: list[int | None] = []
    factor: list[float | None] = []
    for kind, input_size, out, ranks, dtype, even in distinct.iter_rows():
        elements, width = (message_elements(kind, input_size, out, ranks), element_bytes(dtype))
        is_known = elements is not None and width is not None and elements < 1 << 56
        size.append(elements * width if is_known else None)  # type: ignore[operator]
        factor.append(None if even is False else bus_factor(kind, ranks))
    distinct = distinct.with_columns(
        bytes=pl.Series(size, dtype=pl.Int64), factor=pl.Series(factor, dtype=pl.Float64)
    )
    return result.join(distinct, on=keys, how="left", nulls_equal=True, maintain_order="left")


def element_bytes(dtype: str | None) -> int | None:
    """Return the bytes of a counted element, which holds two numbers for FP4."""
    packed = dtype is not None and bare_type_name(dtype) == "float4_e2m1fn_x2"
    return 1 if packed else width_of(dtype or "")


def _find_innermost(
    host_index: NDArray[np.int64], is_wanted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Find the innermost wanted host row of each chain (its index among the hosts), or -1."""
    is_hit = np.append(is_wanted, False)[host_index]
    level = is_hit.argmax(axis=1)
    chains = np.arange(len(host_index))
    return np.where(is_hit[chains, level], host_index[chains, level], -1)


class _HostRows:
    """Collective arguments found in host rows around collectives, as columns over those rows."""

    def __init__(self, trace: Trace, hosts: NDArray[np.int64]) -> None:
        rows = trace.cpu.select("kind", "name", "inputs", "comm")[hosts]
        name = rows["name"]
        is_annotation = (rows["kind"] == "annotation").to_numpy()
        is_op = (rows["kind"] == "op").to_numpy()
        is_backend = is_annotation & name_matches(name, _BACKEND).to_numpy()
        self.kind = map_names(name, kind_of, pl.String)
        self.comm = rows["comm"].fill_null(-1).to_numpy()
        self.call = is_backend & self.kind.is_not_null().to_numpy()
        self.user = (
            is_annotation & ~is_backend & ~name_matches(name, trace.meta.step_names).to_numpy()
        )
        self.reduces = is_op & name_matches(name, "(?i)all_?reduce").to_numpy()
        self.reduces &= ~name_matches(name, "^c10d::").to_numpy()
        is_base = (
            is_op & name_matches(name, r"^c10d::_(allgather|reduce_scatter)_base_$").to_numpy()
        )
        self.names = [
            text if is_user else None
            for text, is_user in zip(name.cast(pl.String).to_list(), self.user, strict=True)
        ]
        inputs = rows["inputs"].fill_null(-1).to_numpy()
        codes = np.unique(inputs[(self.call | self.reduces | is_base) & (inputs >= 0)])
        tensors = {int(code): _list_tensors(trace, int(code)) for code in codes}
        self._tensors = [tensors.get(int(code), []) for code in inputs]
        self.base_size = np.array(
            [
                _size_ratio(operands) if b else 0
                for operands, b in zip(self._tensors, is_base, strict=True)
            ],
            dtype=np.int64,
        )
        """Group size by an op that gathers into, or scatters from, one tensor; else 0."""

    def sources(self) -> pl.DataFrame:
        """Return rows with the columns of _SOURCE_SCHEMA, one per host row."""
        split_sizes: list[int | None] = []
        dtype: list[str | None] = []
        for tensors, call in zip(self._tensors, self.call, strict=True):
            # the annotation has all sent tensors, an op also has other tensors
            sent = tensors if call else tensors[:1]
            types = {name for _, name in sent}
            split_sizes.append(sum(elements for elements, _ in sent) if len(types) == 1 else None)
            dtype.append(next(iter(types)) if len(types) == 1 else None)
        nulls = {key: pl.lit(None, dtype=dtype) for key, dtype in _SOURCE_SCHEMA.items()}
        return pl.DataFrame(
            {
                "collective": self.kind,
                "given": pl.Series(split_sizes, dtype=pl.Int64),
                "dtype": pl.Series(dtype, dtype=pl.String),
            }
        ).select(
            pl.col(key) if key in ("collective", "given", "dtype") else nulls[key].alias(key)
            for key in _SOURCE_SCHEMA
        )


def _size_ratio(tensors: Sequence[tuple[int, str]]) -> int:
    if len(tensors) < 2:
        return 0
    small, large = sorted((tensors[0][0], tensors[1][0]))
    return large // small if small and large % small == 0 else 0


def _list_tensors(trace: Trace, code: int) -> list[tuple[int, str]]:
    """List elements and dtype of each tensor of an input description, in order."""
    inputs = OpInputs(trace.inputs["dims"][code] or "", trace.inputs["types"][code] or "")
    return [(tensor.elements, tensor.dtype) for tensor in inputs.tensors]


def bytes_of(trace: Trace, code: int) -> int | None:
    """Sum the bytes of all tensors of an input description. ``None`` if a dtype is unknown, or no
    tensors are recorded."""
    sizes = [(count, element_bytes(dtype)) for count, dtype in _list_tensors(trace, code)]
    if not sizes or any(width is None for _, width in sizes):
        return None
    total = sum(count * (width or 0) for count, width in sizes)
    return total if total < 1 << 56 else None


def _read_arguments(trace: Trace) -> pl.DataFrame:
    """Return one row of _SOURCE_SCHEMA per row of ``trace.comms``; no ``collective`` for
    ``wait`` …"""
    comms = trace.comms
    kinds = {name: kind_of(name) for name in comms["collective"].drop_nulls().unique()}
    rows = []
    for name, input_size, out, size, ranks, *splits in comms.select(
        "collective", "in_elements", "out_elements", "group_size", "ranks", "in_split", "out_split"
    ).iter_rows():  # a loop over distinct descriptions, with texts inside
        kind = kinds.get(name)
        members = _count_members(ranks)
        even = None
        if kind == "all_to_all":
            even = input_size == out and all(_has_equal_parts(split) for split in splits)
        rows.append(
            (
                kind,
                input_size if input_size is None or input_size >= 0 else None,
                out if out is None or out >= 0 else None,
                size if size is not None and size > 0 else members,
                even,
            )
        )
    table = pl.DataFrame(
        rows,
        schema={
            key: _SOURCE_SCHEMA[key] for key in ("collective", "given", "out", "group_size", "even")
        },
        orient="row",
    )
    described = comms.select(
        "dtype", "group", "ranks", "sequence", "source", "target", description="group_description"
    )
    return table.hstack(described).select(*_SOURCE_SCHEMA)


def _count_members(ranks: str | None) -> int | None:
    """Count the ranks in a JSON list, or return ``None`` if it is not a complete list."""
    try:
        members = msgspec.json.decode(ranks or "null")
    except (msgspec.DecodeError, RecursionError):
        return None
    is_complete = isinstance(members, list) and all(isinstance(rank, int) for rank in members)
    return len(members) if is_complete and members else None


def _has_equal_parts(split: str | None) -> bool:
    """Return whether a split is absent or has parts of one size (long lists end in an ellipsis)."""
    return len(set(re.findall(r"\d+", split or ""))) <= 1
