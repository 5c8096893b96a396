"""Arguments of operators: calls by them, lengths that FFTs are fast for, the time per byte of
elementwise operators, and which part of a tensor is read next."""

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import outermost_rows, parent_rows

Rows = NDArray[np.int64]

ELEMENTWISE = (
    r"^aten::(?:add|sub|mul|div|neg|abs|square|sqrt|relu|clamp\w*|maximum|minimum"
    r"|threshold_backward)_?$"
)
TAKES = ("aten::slice", "aten::narrow", "aten::select")
MIN_BYTES = 1 << 16
"""Bytes of a tensor from which an operator's time is not that of its call."""
MIN_CALLS = 3
"""Calls from which their median time stands for others."""
MAX_LENGTH = 1 << 32
MAX_AFTER = 48
"""Operators behind one among which those that read its result are looked for."""


@lru_cache(maxsize=256)
def largest_factor(length: int) -> int:
    """Return the largest prime factor of a length; 1 of lengths that no FFT has."""
    factor, largest = 2, 1
    if length >= MAX_LENGTH:
        return largest
    while factor * factor <= length:
        while length % factor == 0:
            length, largest = length // factor, factor
        factor += 1
    return max(length, largest)


@lru_cache(maxsize=256)
def next_fast_length(length: int) -> int:
    """Return the next even length without a prime factor above 7."""
    good: int = min(
        product << max(1, (-(-length // product) - 1).bit_length())
        for product in (3**b * 5**c * 7**d for b in range(21) for c in range(15) for d in range(13))
    )
    return good


def inputs_at(a: Analysis, index: int) -> OpInputs:
    """Read a row of ``trace.inputs``."""
    row = a.trace.inputs.row(index, named=True)
    return OpInputs(*(row[name] or "" for name in ("dims", "types", "strides", "concrete")))


def calls_by_inputs(a: Analysis, pattern: str) -> Iterator[tuple[str, OpInputs, Rows]]:
    """Yield operators of the analysed steps by name and inputs, as rows of ``trace.cpu``. One right
    inside another of these is the same call."""
    cpu = a.trace.cpu
    named = (name_matches(cpu["name"], pattern) & cpu["inputs"].is_not_null()).to_numpy()
    parent = parent_rows(a.trace)
    ts = cpu["ts"].to_numpy()
    rows = np.flatnonzero(named & ~np.append(named, False)[parent])
    rows = rows[covered_length(ts[rows], ts[rows] + 1, a.steps.host_spans) > 0]
    names, inputs = cpu["name"].gather(rows).cast(pl.String), cpu["inputs"].gather(rows)
    table = pl.DataFrame({"row": rows, "name": names, "inputs": inputs})
    for own in table.partition_by("name", "inputs", maintain_order=True):
        yield own["name"][0], inputs_at(a, own["inputs"][0]), own["row"].to_numpy()


def readers_behind(
    a: Analysis,
    row: int,
    shape: tuple[int, ...],
    types: Collection[str] | None = None,
    *,
    count: int = MAX_AFTER,
) -> Iterator[tuple[int, str, OpInputs]]:
    """Yield those of the next ``count`` outermost operators that its thread gives a tensor of this
    shape: row, name and inputs. ``types``: of such a tensor; ``None``: any."""
    cpu, order = a.trace.cpu, outermost_rows(a.trace)
    following = order[np.searchsorted(order, row, side="right") :][:count]
    for after in following.tolist():
        index = cpu["inputs"][after]
        if index is None or cpu["thread"][after] != cpu["thread"][row]:
            continue
        x = inputs_at(a, index)
        if any(one.shape == shape and (types is None or one.dtype in types) for one in x.tensors):
            yield after, str(cpu["name"][after]), x


def elementwise_rate(a: Analysis) -> float | None:
    """Return the median time of elementwise operators per byte of their largest tensor, ns, where
    that is large; ``None``: there are too few."""
    rates: list[float] = []
    dur = a.trace.cpu["dur"].to_numpy()
    for _, x, rows in calls_by_inputs(a, ELEMENTWISE):
        size = max((tensor.bytes or 0 for tensor in x.tensors), default=0)
        if size >= MIN_BYTES:
            rates += (dur[rows] / size).tolist()
    return float(np.median(rates)) if len(rates) >= MIN_CALLS else None


def padded_lengths(a: Analysis) -> set[int]:
    """Return the sizes of last dimensions that something is padded to."""
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
    """Elements taken, from the first or to the last."""
    dim: int
    largest: bool
    """Whether they are the largest ones."""
    from_first: bool


def fft_lengths(name: str, x: OpInputs) -> list[tuple[int, bool]]:
    """Return the lengths of an FFT by dimension, and whether that is one of real numbers."""
    data, dims = x.tensor(0), x.integers(1)
    if data is None or not dims or not _are_of(data, dims):
        return []
    sizes = [data.shape[dim] for dim in dims]
    if name == TO_REAL:
        last = x.argument(3)
        sizes[-1] = last if isinstance(last, int) else 2 * (sizes[-1] - 1)
    return [(size, name != OF_COMPLEX and at == len(dims) - 1) for at, size in enumerate(sizes)]


def outer_dims(x: OpInputs, position: int) -> list[int]:
    """Return the dimensions given by an argument; none where one is the innermost in memory."""
    data, dims = x.tensor(0), x.argument(position)
    dims = dims if isinstance(dims, list) else [dims]
    if data is None or len(data.strides or ()) != len(data.shape) or not _are_of(data, dims):
        return []
    return [] if any((data.strides or ())[dim] <= 1 for dim in dims) else dims


def find_sorted_part(a: Analysis, name: str, x: OpInputs, rows: Rows) -> SortedPart | None:
    """Return the part that is taken of the results of sorts, right behind each; ``None``: all or
    none of it is read, parts from its middle, or the order of equal elements matters (stable)."""
    data, at = x.tensor(0), len(x) - 2
    dim, descending = x.argument(at), x.flag(at + 1)
    if data is None or descending is None or not _are_of(data, [dim]) or (at > 1 and x.flag(1)):
        return None
    types = {"long int"} if name == SORTS[1] else {"long int", data.dtype}
    size = data.shape[dim]
    begin, end = size, 0
    for row in rows[:MAX_AFTER].tolist():
        part = _taken(a, row, data, dim, types)
        if part is None:
            return None
        begin, end = min(begin, part[0]), max(end, part[1])
    if begin > 0 and end < size:
        return None
    return SortedPart(size, end - begin, dim, (begin == 0) == descending, begin == 0)


def _are_of(data: Tensor, dims: list[Any]) -> bool:
    of = range(-len(data.shape), len(data.shape))
    return bool(dims) and 0 not in data.shape and all(type(d) is int and d in of for d in dims)


def _taken(
    a: Analysis, row: int, data: Tensor, dim: int, types: set[str]
) -> tuple[int, int] | None:
    """Return the range of a dimension that is taken of an operator's result right behind it;
    ``None``: something else reads the result first, or nothing does. ``data``: its shape;
    ``types``: of the tensors that may be the result."""
    size = data.shape[dim]
    begin, end = size, 0
    for _, name, x in readers_behind(a, row, data.shape, types):
        part = range_taken(name, x, dim % len(data.shape), size)
        if part is None:
            if not end:
                return None
            continue
        begin, end = min(begin, part[0]), max(end, part[1])
    return (begin, end) if end else None


def range_taken(name: str, x: OpInputs, dim: int, size: int) -> tuple[int, int] | None:
    """Return the range that an operator takes of a dimension; ``None``: it does something else."""
    first, start, stop = (x.argument(at) for at in (1, 2, 3))
    if name not in TAKES or first != dim or not isinstance(start, int | None):
        return None
    begin = (start or 0) + (size if (start or 0) < 0 else 0)
    if name == "aten::select":
        return begin, begin + 1
    if name == "aten::narrow":
        return (begin, begin + stop) if isinstance(stop, int) else None
    end = stop if isinstance(stop, int) else size
    return begin, min(size, end + (size if end < 0 else 0))
