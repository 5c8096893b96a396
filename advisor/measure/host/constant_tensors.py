"""Operators that compute a tensor from plain arguments alone, so that it is the same each time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cache
from math import ceil, prod
from typing import TYPE_CHECKING

import numpy as np

from advisor.measure.device.matmuls import broadcast_shapes
from advisor.measure.device.shapes import OpInputs, Shape, read_inputs
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import outermost_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from advisor.measure import Analysis


MIN_COMPUTING = 2
"""Minimum number of operators that compute: filling a buffer with zeros is not a result."""
_CREATING = re.compile(
    r"^aten::(?:arange|linspace|logspace|eye|ones|zeros|full|(?:hann|hamming|bartlett|blackman|kaiser)"
    r"_window)$"
)
_OPTIONS = 4
"""Number of arguments of a creating operator that follow its sizes: type, layout, device, pinned
memory."""
_ELEMENTWISE = re.compile(
    r"^aten::(?:abs|add|atan2?|bitwise_\w+|ceil|clamp(?:_min|_max)?|clone|contiguous|copy|cos|cumsum|"
    r"detach|div|eq|erf|exp|expm1|flip|floor|floor_divide|fmod|ge|gt|i0|i0e|le|lift_fresh|log|log10|"
    r"log1p|log2|logical_\w+|lt|maximum|minimum|mul|ne|neg|pow|reciprocal|remainder|round|rsqrt|rsub|"
    r"sigmoid|sign|sin|sinc|sqrt|square|sub|tan|tanh|to|_to_copy|tril|triu|trunc|where)_?$"
)
_VIEWS = re.compile(
    r"^aten::(?:unsqueeze|squeeze|t|numpy_T|transpose|permute|view|_unsafe_view|reshape|expand)$"
)
_CONSTANT_PRODUCTS = re.compile(r"^aten::(?:mm|matmul|outer)$")
_COMPUTING = re.compile(f"{_ELEMENTWISE.pattern}|{_CONSTANT_PRODUCTS.pattern}")
_OF_LISTS = re.compile(r"^aten::(?:cat|stack)$")
_OF_NUMBERS = re.compile(r"^aten::(?:empty|scalar_tensor)$")


def constant_tensors(a: Analysis) -> NDArray[np.int64]:
    """Return the outermost operators of the main thread that compute a tensor from plain arguments
    alone, with the same arguments once per step or more: rows of ``trace.cpu``. Examples are tables
    of positions, masks, windows and filters.

    The trace does not tell which tensor an operator was given, only its shape. So a chain begins
    with a tensor of known shape that has no input, such as ``aten::arange``. It goes on while each
    input has the shape of an earlier result. One that an operator used already counts again only
    for a view, or where it is broadcast. Needs shapes and plain arguments (``Concrete Inputs``)."""
    cpu, main = a.trace.cpu, a.trace.main_thread
    outer = outermost_rows(a.trace)
    outer = outer[cpu["thread"].gather(outer).to_numpy() == main] if main is not None else outer[:0]
    creating = np.flatnonzero(name_matches(cpu["name"].gather(outer), _CREATING.pattern).to_numpy())
    if a.trace.inputs.is_empty() or not len(creating):
        return outer[:0].astype(np.int64)
    names = cpu["name"].gather(outer).to_list()
    inputs = cpu["inputs"].gather(outer).fill_null(-1).to_list()
    calls = cache(lambda row: read_inputs(a.trace.inputs, row) if row >= 0 else OpInputs("", ""))
    by_arguments: defaultdict[tuple[tuple[str, int], ...], list[list[int]]] = defaultdict(list)
    end = 0
    for start in creating.tolist():
        if start < end:  # in the chain before
            continue
        chain = _follow_chain(names, inputs, start, calls)
        computing = sum(bool(_COMPUTING.match(names[n])) for n in chain)
        if computing >= MIN_COMPUTING:
            by_arguments[tuple((names[n], inputs[n]) for n in chain)].append(chain)
        end = start + len(chain)
    repeated = max(2, a.step_count)
    rows = [
        row
        for chains in by_arguments.values()
        if len(chains) >= repeated
        for chain in chains
        for row in chain
    ]
    return outer[sorted(rows)].astype(np.int64)


def _follow_chain(
    names: list[str], inputs: list[int], start: int, calls: Callable[[int], OpInputs]
) -> list[int]:
    """Return the positions from ``start`` on of operators that use nothing but earlier results,
    until the first one is called again."""
    unused: Counter[Shape] = Counter()
    used: set[Shape] = set()
    chain: list[int] = []
    for place in range(start, len(names)):
        name, call = names[place], calls(inputs[place])
        if chain and (name, inputs[place]) == (names[start], inputs[start]):
            break
        input_shapes = [tensor.shape for tensor in call.tensors if tensor.shape]
        if _OF_LISTS.match(name):
            input_shapes = call.shapes(0)
        if not input_shapes:
            shape = _created_shape(name, call) if _CREATING.match(name) else ()
            if shape is None or not (shape or _OF_NUMBERS.match(name) or _ELEMENTWISE.match(name)):
                break
        else:
            shape = _result_shape(name, input_shapes, call)
            again = Counter(input_shapes) - unused
            reusable = used if _VIEWS.match(name) else used - {shape}
            if shape is None or not reusable.issuperset(again):
                break
            unused -= Counter(input_shapes)
            used.update(input_shapes)
        if shape:
            unused[shape] += 1
        chain.append(place)
    return chain


def _created_shape(name: str, call: OpInputs) -> Shape | None:
    """Return the shape of a tensor that is made from plain arguments; ``None`` if unknown."""
    kind = name.removeprefix("aten::")
    if kind == "arange":
        numbers = [call.argument(n) for n in range(max(0, len(call) - _OPTIONS))]
        if not 1 <= len(numbers) <= 3 or not all(type(n) in (int, float) for n in numbers):
            return None
        start, end, by = {1: (0, *numbers, 1), 2: (*numbers, 1)}.get(len(numbers), tuple(numbers))
        return (max(0, ceil((end - start) / by)),) if by else None
    if kind in ("ones", "zeros", "full"):
        sizes = call.integers(0)
    elif kind == "eye":
        columns = call.argument(1) if len(call) > _OPTIONS + 1 else call.argument(0)
        sizes = [call.argument(0), columns]
    else:
        sizes = [call.argument(2 if kind in ("linspace", "logspace") else 0)]
    if sizes is None or not all(type(size) is int and size >= 0 for size in sizes):
        return None
    return tuple(sizes)


def _result_shape(name: str, shapes: list[Shape], call: OpInputs) -> Shape | None:
    """Return the shape of the result; ``None`` if it is unknown."""
    if _ELEMENTWISE.match(name):
        return broadcast_shapes(*shapes)
    first, *others = shapes
    if _VIEWS.match(name):
        return _view_shape(name.removeprefix("aten::"), first, call)
    if _CONSTANT_PRODUCTS.match(name) and len(others) == 1:
        if name == "aten::outer":
            return (*first, *others[0]) if len(first) == len(others[0]) == 1 else None
        fits = len(first) == len(others[0]) == 2 and first[1] == others[0][0]
        return (first[0], others[0][1]) if fits else None
    if _OF_LISTS.match(name):
        at = call.argument(1)
        if type(at) is not int or len({len(shape) for shape in shapes}) != 1:
            return None
        sizes = list(first)
        if name == "aten::stack":
            sizes.insert(at % (len(first) + 1), len(shapes))
        else:
            sizes[at % len(first)] = sum(shape[at % len(first)] for shape in shapes)
        return tuple(sizes)
    return None


def _view_shape(kind: str, shape: Shape, call: OpInputs) -> Shape | None:
    """Return the shape of a view; ``None`` if its arguments are unknown."""
    rank, sizes = len(shape), list(shape)
    if kind in ("t", "numpy_T"):
        return shape[::-1]
    if kind in ("unsqueeze", "squeeze", "transpose"):
        axes = [call.argument(1), call.argument(2)] if kind == "transpose" else [call.argument(1)]
        if not all(type(axis) is int for axis in axes):
            return tuple(size for size in shape if size != 1) if kind == "squeeze" else None
        first = axes[0] % (rank + (kind == "unsqueeze"))
        if kind == "unsqueeze":
            sizes.insert(first, 1)
        elif kind == "squeeze":
            del sizes[first : first + (sizes[first] == 1)]
        else:
            second = axes[1] % rank
            sizes[first], sizes[second] = sizes[second], sizes[first]
        return tuple(sizes)
    wanted = call.integers(1)
    if not wanted:
        return None
    if kind == "permute":
        return tuple(shape[axis % rank] for axis in wanted) if len(wanted) == rank else None
    if kind == "expand":
        aligned = [*[1] * (len(wanted) - rank), *shape]
        pairs = zip(wanted, aligned, strict=False)
        return tuple(own if size == -1 else size for size, own in pairs)
    known = prod(size for size in wanted if size != -1)
    return tuple(prod(shape) // max(known, 1) if size == -1 else size for size in wanted)
