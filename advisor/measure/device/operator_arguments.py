"""Arguments of operators: calls grouped by arguments, lengths for which FFTs are fast, the time per
byte of elementwise operators, and the part of a tensor that is read next."""

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, Shape, Tensor, read_inputs
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import outermost_rows, parent_rows

Rows = NDArray[np.int64]

ELEMENTWISE = (
    r"^aten::(?:add|sub|mul|div|neg|abs|square|sqrt|relu|clamp\w*|maximum|minimum"
    r"|threshold_backward)_?$"
)
TAKES = ("aten::slice", "aten::narrow", "aten::select")
MIN_ARGUMENT_BYTES = 1 << 16
"""Minimum bytes of a tensor at which an operator's time is more than the overhead of its call."""
_MIN_CALLS = 3
"""Minimum number of calls whose median time is representative."""
_MAX_LENGTH = 1 << 32
MAX_AFTER = 48
"""Maximum number of operators after a call that are searched for readers of its result."""


@lru_cache(maxsize=256)
def largest_factor(length: int) -> int:
    """Return the largest prime factor of a length, or 1 if it is too long for any FFT."""
    factor, largest = 2, 1
    if length >= _MAX_LENGTH:
        return largest
    while factor * factor <= length:
        while length % factor == 0:
            length, largest = length // factor, factor
        factor += 1
    return max(length, largest)


@lru_cache(maxsize=256)
def next_fast_length(length: int) -> int:
    """Return the next even length without a prime factor above 7."""
    shortest: int = min(
        product << max(1, (-(-length // product) - 1).bit_length())
        for product in (3**b * 5**c * 7**d for b in range(21) for c in range(15) for d in range(13))
    )
    return shortest


def inputs_at(a: Analysis, index: int) -> OpInputs:
    """Read a row of ``trace.inputs``."""
    return read_inputs(a.trace.inputs, index)


def calls_by_inputs(a: Analysis, pattern: str) -> Iterator[tuple[str, OpInputs, Rows]]:
    """Yield operators of the analysed steps by name and inputs, as rows of ``trace.cpu``. One
    directly inside another that matches is the same call."""
    cpu = a.trace.cpu
    is_match = (name_matches(cpu["name"], pattern) & cpu["inputs"].is_not_null()).to_numpy()
    parent = parent_rows(a.trace)
    ts = cpu["ts"].to_numpy()
    rows = np.flatnonzero(is_match & ~np.append(is_match, False)[parent])
    rows = rows[covered_length(ts[rows], ts[rows] + 1, a.steps.host_spans) > 0]
    names, inputs = cpu["name"].gather(rows).cast(pl.String), cpu["inputs"].gather(rows)
    table = pl.DataFrame({"row": rows, "name": names, "inputs": inputs})
    for calls in table.partition_by("name", "inputs", maintain_order=True):
        yield calls["name"][0], inputs_at(a, calls["inputs"][0]), calls["row"].to_numpy()


def readers_behind(
    a: Analysis,
    row: int,
    shape: tuple[int, ...],
    types: Collection[str] | None = None,
    *,
    count: int = MAX_AFTER,
) -> Iterator[tuple[int, str, OpInputs]]:
    """Yield row, name and inputs of readers of a tensor of this shape: the operators among the next
    ``count`` outermost ones on the same thread. ``types`` of the tensor, or ``None`` for any."""
    cpu, order = a.trace.cpu, outermost_rows(a.trace)
    following = order[np.searchsorted(order, row, side="right") :][:count]
    for next_row in following.tolist():
        index = cpu["inputs"][next_row]
        if index is None or cpu["thread"][next_row] != cpu["thread"][row]:
            continue
        inputs = inputs_at(a, index)
        if any(
            tensor.shape == shape and (types is None or tensor.dtype in types)
            for tensor in inputs.tensors
        ):
            yield next_row, str(cpu["name"][next_row]), inputs


def elementwise_rate(a: Analysis) -> float | None:
    """Return the median time of elementwise operators per byte of their largest tensor, ns, if that
    is large. ``None`` if there are too few."""
    rates: list[float] = []
    dur = a.trace.cpu["dur"].to_numpy()
    for _, x, rows in calls_by_inputs(a, ELEMENTWISE):
        size = max((tensor.bytes or 0 for tensor in x.tensors), default=0)
        if size >= MIN_ARGUMENT_BYTES:
            rates += (dur[rows] / size).tolist()
    return float(np.median(rates)) if len(rates) >= _MIN_CALLS else None


def padded_lengths(a: Analysis) -> set[int]:
    """Return the sizes to which last dimensions are padded."""
    result = set()
    for _, x, _ in calls_by_inputs(a, r"^aten::constant_pad_nd$"):
        data, pad = x.tensor(0), x.integers(1)
        if data is not None and data.shape and pad and len(pad) > 1:
            result.add(data.shape[-1] + pad[0] + pad[1])
    return result


# -- FFTs, sorts and reductions --------------------------------------------------------------------

FFTS = TO_COMPLEX, TO_REAL, OF_COMPLEX = "aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c"
SORTS = "aten::sort", "aten::argsort"


class SortedPart(NamedTuple):
    size: int
    """Elements of a row."""
    taken: int
    """Number of elements taken, from the first or up to the last."""
    dim: int
    largest: bool
    """Whether the largest elements are taken."""
    from_first: bool


def fft_lengths(name: str, x: OpInputs) -> list[tuple[int, bool]]:
    """Return the lengths of an FFT by dimension, and whether that dimension has real numbers."""
    data, dims = x.tensor(0), x.integers(1)
    if data is None or not dims or not _are_dims(data, dims):
        return []
    sizes = [data.shape[dim] for dim in dims]
    if name == TO_REAL:
        last = x.argument(3)
        sizes[-1] = last if isinstance(last, int) else 2 * (sizes[-1] - 1)
    return [(size, name != OF_COMPLEX and i == len(dims) - 1) for i, size in enumerate(sizes)]


def outer_dims(x: OpInputs, position: int) -> list[int]:
    """Return the dimensions given by an argument, or none if one is the innermost in memory."""
    data, dims = x.tensor(0), x.argument(position)
    dims = dims if isinstance(dims, list) else [dims]
    if data is None or len(data.strides or ()) != len(data.shape) or not _are_dims(data, dims):
        return []
    return [] if any((data.strides or ())[dim] <= 1 for dim in dims) else dims


def find_sorted_part(a: Analysis, name: str, x: OpInputs, rows: Rows) -> SortedPart | None:
    """Return the part of a sort's result that is taken directly after each sort. ``None`` if all,
    none, or parts from its middle are read, or equal elements have an order (stable).
    """
    data, position = x.tensor(0), len(x) - 2
    dim, descending = x.argument(position), x.flag(position + 1)
    if (
        data is None
        or descending is None
        or not _are_dims(data, [dim])
        or (position > 1 and x.flag(1))
    ):
        return None
    types = {"long int"} if name == SORTS[1] else {"long int", data.dtype}
    size = data.shape[dim]
    start, end = size, 0
    for row in rows[:MAX_AFTER].tolist():
        part = _find_taken_range(a, row, data, dim, types)
        if part is None:
            return None
        start, end = min(start, part[0]), max(end, part[1])
    if start > 0 and end < size:
        return None
    return SortedPart(size, end - start, dim, (start == 0) == descending, start == 0)


def _are_dims(data: Tensor, dims: list[Any]) -> bool:
    valid = range(-len(data.shape), len(data.shape))
    return (
        bool(dims)
        and 0 not in data.shape
        and all(type(dim) is int and dim in valid for dim in dims)
    )


def _find_taken_range(
    a: Analysis, row: int, data: Tensor, dim: int, types: set[str]
) -> tuple[int, int] | None:
    """Return the range of a dimension that is taken of an operator's result directly after it.
    ``None`` if something else reads the result first, or nothing does. ``data`` has the result's
    shape; ``types`` are the types of tensors that may be the result."""
    size = data.shape[dim]
    start, end = size, 0
    for _, name, x in readers_behind(a, row, data.shape, types):
        part = range_taken(name, x, dim % len(data.shape), size)
        if part is None:
            if not end:
                return None
            continue
        start, end = min(start, part[0]), max(end, part[1])
    return (start, end) if end else None


def dimension_taken(name: str, x: OpInputs) -> tuple[Shape, int] | None:
    """Return the shape of the tensor that one of ``TAKES`` takes a range of, and the dimension from
    0. ``None`` for other operators, or if they are not recorded."""
    tensor, dim = x.tensor(0), x.argument(1)
    if name not in TAKES or tensor is None or not isinstance(dim, int):
        return None
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        return None
    return tensor.shape, dim % len(tensor.shape)


def range_taken(name: str, x: OpInputs, dim: int, size: int) -> tuple[int, int] | None:
    """Return the range that an operator takes of a dimension, or ``None`` for other operators."""
    first, start, stop = (x.argument(at) for at in (1, 2, 3))
    if name not in TAKES or first != dim or not isinstance(start, int | None):
        return None
    start_index = (start or 0) + (size if (start or 0) < 0 else 0)
    if name == "aten::select":
        return start_index, start_index + 1
    if name == "aten::narrow":
        return (start_index, start_index + stop) if isinstance(stop, int) else None
    end = stop if isinstance(stop, int) else size
    return start_index, min(size, end + (size if end < 0 else 0))
