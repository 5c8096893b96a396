"""Chains of operators that compute each position of the last dimension alone, before a few of the
positions are taken: the frames of a spectrogram, for example."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import dimension_taken, inputs_at, range_taken
from advisor.measure.device.shapes import OpInputs, Shape
from advisor.rules.support.common import outermost_in_steps

POINTWISE = frozenset(
    f"aten::{name}{end}"
    for name in (
        "_unsafe_view to dropout add sub mul div pow square sqrt rsqrt reciprocal abs neg exp log "
        "log2 log10 log1p clamp clamp_min clamp_max relu gelu silu sigmoid tanh"
    ).split()
    for end in ("", "_")
)
"""Operators that compute each element from the element at the same place."""
OF_COMPLEX = frozenset(("aten::real", "aten::imag", "aten::angle", "aten::resolve_conj"))
COLUMN_PRODUCTS = frozenset(("aten::matmul", "aten::bmm"))
"""Products: a column of the result needs one column of the last operand."""
CONVOLUTION, STFT = "aten::conv1d", "aten::stft"
INDEXED = {"aten::gather": (1, 2), "aten::index_select": (1, 2), "aten::take_along_dim": (2, 1)}
"""Operator that takes positions by an index -> positions of the arguments dimension and index."""
_MAX_BEFORE = 48
"""Maximum number of operators before the one that takes positions."""
MAX_OF_SAMPLE = 4
"""Maximum number of operators from the one that selects a sample to the one that takes its part."""
MIN_DIMS = 3
"""Minimum dimensions of a product's last operand: a matrix may be a weight, with features last."""


class Dropped(NamedTuple):
    """Calls of a layer whose result is used only in part."""

    shape: Shape
    """Shape of the result."""
    used_share: float
    """Share of the result that is used."""
    part: str
    """Index of the part in Python's syntax."""
    rows: list[int]
    """Rows of ``trace.cpu`` that compute the whole result."""
    through: list[int]
    """Rows of all operators from the layer to the one that takes the part."""
    ahead: list[str]
    """Names of the operators before the layer that work on each position alone."""
    lengths: int = 1
    """Number of shapes of the results."""


class _OperatorCall(NamedTuple):
    row: int
    name: str
    inputs: OpInputs | None
    shapes: list[Shape]


def read_indexed_part(name: str, x: OpInputs) -> tuple[Shape, int, float] | None:
    """Return the shape that positions are taken from by an index, the dimension, and the share of
    positions. ``None`` for other operators."""
    if name not in INDEXED:
        return None
    dim, index, tensor = x.argument(INDEXED[name][0]), x.tensor(INDEXED[name][1]), x.tensor(0)
    if tensor is None or index is None or not isinstance(dim, int) or not prod(tensor.shape):
        return None
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        return None
    dim %= len(tensor.shape)
    if name == "aten::index_select":
        count = prod(index.shape)
    elif len(index.shape) == len(tensor.shape):
        count = index.shape[dim]
    else:
        return None
    return tensor.shape, dim, count / tensor.shape[dim]


def find_dropped_columns(a: Analysis, max_kept: float) -> Iterator[Dropped]:
    """Yield chains with a product or a short-time Fourier transform, of whose positions in the last
    dimension at most ``max_kept`` are taken, if nothing else reads their results."""
    calls = [
        _OperatorCall(row, name, x, [tensor.shape for tensor in x.tensors] if x else [])
        for row, name, x in (
            (row, name, None if at is None else inputs_at(a, at))
            for row, name, at in outermost_in_steps(a).select("row", "name", "inputs").iter_rows()
        )
    ]
    dropped: dict[tuple[Shape, str], Dropped] = {}
    end = 0
    for at in range(len(calls)):
        part = _read_part(calls, at) if at >= end else None
        if part is None or (chain := _find_chain(calls, at, part[0])) is None:
            continue
        shape, text = part[0], part[2]
        computed = {s for i in chain[1:] for s in calls[i].shapes if s[-1:] == shape[-1:]} | {shape}
        end = _find_next_call(calls, at, chain[0])
        others = set(range(chain[0], end)) - set(chain)
        readers = [i for i in sorted(others) if computed & set(calls[i].shapes)]
        parts = [_read_part(calls, i) for i in readers]
        total = sum(part[1] for part in parts if part is not None and part[0] == shape)
        if None in parts or total > max_kept:
            continue
        if len(parts) > 1:
            text = text.rpartition(", ")[0] + ", positions"
        chain_rows = [calls[i].row for i in chain]
        entry = dropped.setdefault((shape, text), Dropped(shape, total, text, [], [], []))
        entry.rows.extend(chain_rows)
        entry.through.extend([*chain_rows, *_rows_of_takers(calls, readers)])
        if not entry.ahead:
            entry.ahead.extend(calls[i].name for i in chain)
    yield from dropped.values()


def _read_part(calls: list[_OperatorCall], at: int) -> tuple[Shape, float, str] | None:
    """Return the shape that positions of the last dimension are taken from, their share and the
    index. One sample may be selected just before: then it is the shape of all samples."""
    name, x = calls[at].name, calls[at].inputs
    if x is None or (tensor := x.tensor(0)) is None or len(tensor.shape) < 2:
        return None
    last = len(tensor.shape) - 1
    if (indexed := read_indexed_part(name, x)) is not None:
        shape, dim, kept = indexed
        return (shape, kept, ":, " * last + "positions") if dim == last else None
    if (dimension := dimension_taken(name, x)) is None:
        return None
    shape, dim = dimension
    if dim != last:
        return _read_part_of_sample(calls, at, shape, dim)
    taken = range_taken(name, x, x.argument(1), shape[-1])
    if taken is None or (name == "aten::slice" and x.argument(4) != 1):
        return None
    start, end = max(0, taken[0]), min(taken[1], shape[-1])
    if end <= start or end - start == shape[-1]:
        return None
    text = f"{start}" if name == "aten::select" else f"{start}:{end}"
    return shape, (end - start) / shape[-1], ":, " * last + text


def _rows_of_takers(calls: list[_OperatorCall], readers: list[int]) -> Iterator[int]:
    """Yield the rows of operators that take positions, with those that take them of one sample."""
    for at in readers:
        yield calls[at].row
        x = calls[at].inputs
        tensor, dim = (None, None) if x is None else (x.tensor(0), x.argument(1))
        if calls[at].name == "aten::select" and tensor is not None and isinstance(dim, int):
            rest = tensor.shape[:dim] + tensor.shape[dim + 1 :]
            following = range(at + 1, min(at + MAX_OF_SAMPLE, len(calls)))
            yield from (calls[i].row for i in following if calls[i].shapes[:1] == [rest])


def _read_part_of_sample(
    calls: list[_OperatorCall], at: int, shape: Shape, dim: int
) -> tuple[Shape, float, str] | None:
    """Return the part that is taken of one sample, which ``calls[at]`` selects of all."""
    rest = (*shape[:dim], *shape[dim + 1 :])
    if calls[at].name != "aten::select" or len(rest) < 2:
        return None
    for index in range(at + 1, min(at + MAX_OF_SAMPLE, len(calls))):
        x = calls[index].inputs
        if calls[index].shapes[:1] != [rest] or x is None:
            return None
        part = _read_part(calls, index)
        if part is not None:
            return shape, part[1] / shape[dim], ":, " * (len(shape) - 1) + "positions"
        if not _takes_all(calls[index].name, x, rest):
            return None
    return None


def _takes_all(name: str, x: OpInputs, shape: Shape) -> bool:
    """Return whether an operator is a slice of everything, as Python makes for ``:``."""
    dimension = dimension_taken(name, x)
    if name != "aten::slice" or dimension is None:
        return False
    size = shape[dimension[1]]
    return range_taken(name, x, x.argument(1), size) == (0, size)


def _find_chain(calls: list[_OperatorCall], at: int, shape: Shape) -> list[int] | None:
    """Return the positions of the operators that lead to a tensor of ``shape`` at ``at``, and work
    on each position of its last dimension alone. ``None`` without a product or transform."""
    size = shape[-1]
    chain: list[int] = []
    has_product = False
    for index in range(at - 1, max(-1, at - 1 - _MAX_BEFORE), -1):
        name, x, shapes = calls[index].name, calls[index].inputs, calls[index].shapes
        if x is not None and name == STFT and _count_frames(x) == size:
            return [index, *reversed(chain)]
        if all(s[-1:] != (size,) or len(s) < 2 for s in shapes):
            continue
        is_product = name in COLUMN_PRODUCTS and shapes[-1][-1] == size
        is_product |= name == CONVOLUTION and [s[-1] for s in shapes[:2]] == [size, 1]
        if not (is_product or name in POINTWISE or name in OF_COMPLEX):
            break
        if name in COLUMN_PRODUCTS and len(shapes[-1]) < MIN_DIMS:
            break
        has_product |= is_product
        chain.append(index)
    return list(reversed(chain)) if has_product else None


def _count_frames(x: OpInputs) -> int | None:
    """Return the number of frames of a short-time Fourier transform, without padding."""
    data, size, hop = x.tensor(0), x.argument(1), x.argument(2)
    if data is None or not isinstance(size, int) or not isinstance(hop, int) or hop < 1:
        return None
    return (data.shape[-1] - size) // hop + 1


def _find_next_call(calls: list[_OperatorCall], at: int, first: int) -> int:
    """Return the position after ``at`` where the operator ``first`` runs again, or the end."""
    name, shapes = calls[first].name, calls[first].shapes
    following = range(at + 1, len(calls))
    again = (i for i in following if calls[i].name == name and calls[i].shapes == shapes)
    return next(again, len(calls))
