"""Work of the backward pass on gradients that no optimizer uses."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, covered_length, intersect, union
from advisor.core.run_directory import MAX_VALUE
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.device_reads import backward_nodes
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.host.stacks import ENGINE_NODE
from advisor.measure.steps.steps import step_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from advisor.measure import Analysis

Shape = tuple[int, ...]

ACCUMULATE = "torch::autograd::AccumulateGrad"
_BACKWARD = r"^advisor::backward$"
_COMPUTES = r"^aten::(?:mm|bmm|addmm|sum|embedding_dense_backward|convolution_backward)$"
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
_LOOKUP = "aten::embedding_dense_backward"
_CONVOLUTION = "aten::convolution_backward"
MAX_OF_NODE = 3
"""Most parameters whose gradients one node computes: a convolution's or product's, and its bias."""
MAX_PARAMETERS = 4096
MAX_PASSES = 4
MAX_EVENTS = 500_000
"""Most events of the backward pass looked at."""


class RecordedGradients(NamedTuple):
    """Parameters that get gradients, as the recorder found them: of all models, or of what is
    computed between two optimizer steps."""

    unused: int
    """Number of those whose gradient is unused …"""
    total: int
    """… of all …"""
    bytes: int
    """… and the size of their gradients."""
    modules: tuple[str, ...]
    """Modules with most of them."""
    models: tuple[str, ...]
    """Classes of the models that hold them, if nothing of these models is trained; else empty."""
    parameters: tuple[tuple[Shape, bool], ...]
    """Shape of each parameter, in the order of the model, and whether it is unused."""

    @property
    def flags(self) -> dict[Shape, list[bool]]:
        """Whether each parameter of a shape is unused, in the order of the model."""
        result: dict[Shape, list[bool]] = {}
        for shape, unused in self.parameters:
            result.setdefault(shape, []).append(unused)
        return result


class UnusedGradientWork(NamedTuple):
    """Work in the analysed steps that goes when such gradients are not computed."""

    spans: Intervals
    """Host time of operators and nodes that go as a whole."""
    convolutions: float
    """Share of the other convolutions' backward time that also computes such a gradient."""
    rest: Intervals = EMPTY
    """Part of ``spans`` after the last gradient of its backward pass that is used."""


NO_WORK = UnusedGradientWork(EMPTY, 0.0)


def recorded_gradients(a: Analysis) -> RecordedGradients | None:
    """Read what parameters no optimizer holds; ``None``: none were found, or it is damaged."""
    events = [] if a.record is None else a.record.events_of("gradients")
    return _read(events[-1]) if events else None


def dropped_gradients(a: Analysis) -> list[RecordedGradients]:
    """Read the passes between two optimizer steps that compute gradients of another optimizer's
    parameters, which are dropped before that one steps; empty: none were found."""
    events = [] if a.record is None else a.record.events_of("dropped_gradients")
    passes = events[-1].get("passes") if events else None
    read = [_read(each) for each in passes[:MAX_PASSES]] if isinstance(passes, list) else []
    return [each for each in read if each is not None]


def _read(data: Any) -> RecordedGradients | None:
    """Read what the recorder wrote of some parameters; ``None``: it is damaged."""
    data = data if isinstance(data, dict) else {}
    counts = [int(data[name]) for name in ("unused", "total", "bytes") if _is_count(data.get(name))]
    names, shapes, order = (data.get(name) for name in ("modules", "shapes", "order"))
    models = data.get("models")
    if not isinstance(names, list) or not isinstance(shapes, list) or not isinstance(order, list):
        return None
    if len(counts) != 3:
        return None
    sizes = [_shape(shape) for shape in shapes[:MAX_PARAMETERS]]
    parameters = tuple(
        (sizes[abs(n) - 1], n < 0)
        for n in order[:MAX_PARAMETERS]
        if type(n) is int and 0 < abs(n) <= len(sizes)
    )
    modules, classes = (
        tuple(name for name in each if isinstance(name, str))
        for each in (names, models if isinstance(models, list) else [])
    )
    return RecordedGradients(counts[0], counts[1], counts[2], modules, classes, parameters)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < MAX_VALUE


def _shape(shape: Any) -> Shape:
    valid = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return tuple(shape) if valid else ()


def unused_gradient_work(a: Analysis) -> UnusedGradientWork:
    """Find operators that compute gradients of unused parameters.

    A product, or an accumulation, is of such a parameter by its shape. Where parameters of one
    shape are used and unused, the backward pass computes them in reverse order of the model. After
    the last gradient that is used, all of the backward pass goes. A convolution computes gradients
    of its weight and of its input in one operator: it stays in part. Passes between two optimizer
    steps are known by the shapes of all parameters whose gradients they compute."""
    recorded, dropped, cpu = a.recorded_gradients, a.dropped_gradients, a.trace.cpu
    if (recorded is None and not dropped) or a.trace.inputs.is_empty():
        return NO_WORK
    node = backward_nodes(a)
    mask = (cpu["name"] == ACCUMULATE) | name_matches(cpu["name"], _COMPUTES)
    rows = np.flatnonzero(mask.to_numpy() & (node >= 0))
    table = _operators(a, rows, node[rows])
    if table.is_empty() or table.height > MAX_EVENTS:
        return NO_WORK
    flags = {} if recorded is None else dict.fromkeys(table["part"].unique(), recorded.flags)
    if recorded is None:
        steps = cpu["ts"].filter(name_matches(cpu["name"], OPTIMIZER_STEP)).sort().to_numpy()
        part = np.searchsorted(steps, table["ts"].to_numpy())
        table = table.with_columns(part=pl.Series(part, dtype=pl.Int64))
        flags = _flags_of_passes(table, [each.flags for each in dropped])
    accumulated = _of_shapes(table, ACCUMULATE, 0, flags)
    spans = [(ts, end) for ts, end, _, unused in accumulated if unused]
    used = np.array([end for _, end, _, unused in accumulated if not unused], dtype=np.int64)
    rest = _rest_of_passes(a, used, np.array([ts for ts, _ in spans], dtype=np.int64))
    spans += rest
    spans += _products(table, accumulated)
    whole = _union(spans)
    convolutions = _of_shapes(table, _CONVOLUTION, 2, flags)
    ts, end = (np.array([each[n] for each in convolutions], dtype=np.int64) for n in (0, 1))
    left = np.where(covered_length(ts, end, whole) > 0, 0, end - ts)
    share = left[[bool(each[3]) for each in convolutions]].sum() / max(left.sum(), 1)
    inside = a.steps.host_spans
    return UnusedGradientWork(intersect(whole, inside), share, intersect(_union(rest), inside))


def _flags_of_passes(
    table: pl.DataFrame, passes: list[dict[Shape, list[bool]]]
) -> dict[int, dict[Shape, list[bool]]]:
    """Return the recorded pass of each part of the trace, by the shapes that it accumulates; a part
    that may be two of them has none."""
    own = table.filter(pl.col("name") == ACCUMULATE)
    result: dict[int, dict[Shape, list[bool]]] = {}
    for part, operands in own.group_by("part").agg("dims").iter_rows():
        counts = Counter(_operand(dims, 0) for dims in operands)
        fits = [
            each
            for each in passes
            if each.keys() == counts.keys()
            and all(counts[shape] % len(flags) == 0 for shape, flags in each.items())
        ]
        if len(fits) == 1:
            result[part] = fits[0]
    return result


def _operators(a: Analysis, rows: Any, node: Any) -> pl.DataFrame:
    """List these operators in order of time: ``name, ts, end, node, part, dims``; ``part`` is the
    step."""
    cpu = a.trace.cpu
    table = pl.DataFrame(
        {
            "name": cpu["name"].gather(rows).cast(pl.String),
            "ts": cpu["ts"].gather(rows),
            "end": (cpu["ts"] + cpu["dur"]).gather(rows),
            "node": node,
            "part": step_of(a.steps, cpu["ts"].to_numpy()[rows]),
            "inputs": cpu["inputs"].gather(rows),
        }
    ).filter(pl.col("part").is_not_null() & pl.col("inputs").is_not_null())
    inputs = a.trace.inputs
    shapes = {
        row: [
            list(each.shape) for each in OpInputs(inputs["dims"][row], inputs["types"][row]).tensors
        ]
        for row in table["inputs"].unique().to_list()
    }
    own = pl.Series([shapes[row] for row in table["inputs"]], dtype=pl.List(pl.List(pl.Int64)))
    return table.with_columns(dims=own).sort("ts")


def _operand(dims: Any, number: int) -> Shape:
    return tuple(dims[number] or ()) if dims is not None and number < len(dims) else ()


def _of_shapes(
    table: pl.DataFrame, name: str, operand: int, flags: dict[int, dict[Shape, list[bool]]]
) -> list[tuple[int, int, Shape, bool | None]]:
    """List operators of this name in order of time: begin, end, shape of an operand, and whether
    it is an unused parameter of that part; ``None``: not known."""
    own = table.filter(pl.col("name") == name).select("part", "dims", "ts", "end")
    rows = [(part, _operand(dims, operand), *at) for part, dims, *at in own.iter_rows()]
    counts = Counter(row[:2] for row in rows)
    seen: Counter[tuple[int, Shape]] = Counter()
    result: list[tuple[int, int, Shape, bool | None]] = []
    for part, shape, ts, end in rows:
        of_shape = flags.get(part, {}).get(shape, [])
        unused: bool | None = None
        if len(set(of_shape)) == 1:
            unused = of_shape[0]
        elif of_shape and counts[part, shape] % len(of_shape) == 0:  # each once per pass
            unused = of_shape[::-1][seen[part, shape] % len(of_shape)]
        seen[part, shape] += 1
        result.append((ts, end, shape, unused))
    return result


def _products(
    table: pl.DataFrame, accumulated: list[tuple[int, int, Shape, bool | None]]
) -> list[tuple[int, int]]:
    """Return operators whose result is an unused gradient, by the accumulations that follow: the
    engine accumulates a gradient right after the nodes that computed it."""
    begins = np.array([ts for ts, *_ in accumulated], dtype=np.int64)
    result: list[tuple[int, int]] = []
    own = table.filter(~pl.col("name").is_in([ACCUMULATE, _CONVOLUTION]))
    for _, group in own.group_by("node", maintain_order=True):
        rows = list(group.select("name", "ts", "end", "dims").iter_rows())
        first = int(np.searchsorted(begins, rows[-1][2]))
        near = accumulated[first : first + MAX_OF_NODE]
        unused = {tuple(sorted(shape)) for _, _, shape, is_unused in near if is_unused}
        weights = [
            (end - ts, ts, end)
            for name, ts, end, dims in rows
            if name in _PRODUCTS and tuple(sorted(_result(name, dims))) in unused
        ]
        if weights:  # of two of the same shape one carries the gradient on
            result.append(min(weights)[1:])
            result += [(ts, end) for name, ts, end, _ in rows if name == "aten::sum"]
        elif rows[0][0] == _LOOKUP and near and near[0][3]:
            result.append(rows[0][1:3])
    return result


def _result(name: str, dims: Any) -> Shape:
    first = 1 if name == "aten::addmm" else 0
    left, right = _operand(dims, first), _operand(dims, first + 1)
    return (*left[:-1], right[-1]) if len(left) >= 2 and len(right) >= 2 else ()


def _rest_of_passes(a: Analysis, used: Any, unused: Any) -> list[tuple[int, int]]:
    """Return what follows the last used gradient in each backward pass, where unused ones do."""
    cpu = a.trace.cpu
    nodes = np.flatnonzero(name_matches(cpu["name"], ENGINE_NODE).to_numpy())
    ends = (cpu["ts"] + cpu["dur"]).to_numpy()
    begins, finish = cpu["ts"].to_numpy()[nodes], ends[nodes]
    result: list[tuple[int, int]] = []
    for row in np.flatnonzero(name_matches(cpu["name"], _BACKWARD).to_numpy()):
        begin, end = int(cpu["ts"][int(row)]), int(ends[row])
        own = used[(used > begin) & (used <= end)]
        if not len(own) or not ((unused > own.max()) & (unused < end)).any():
            continue
        rest = (begins >= own.max()) & (begins < end)
        result.append((int(own.max()), int(finish[rest].max())))
    return result


def _union(spans: Iterable[tuple[int, int]]) -> Intervals:
    both = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
    return union(both[:, 0], both[:, 1])
