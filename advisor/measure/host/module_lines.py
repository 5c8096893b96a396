"""Lines of layers in recordings without Python stacks: the recorder's table of modules, matched
with operators by the shape of their weights."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Location
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.module_calls import rows_of_place
from advisor.measure.host.stacks import parse_frame

MIN_LAYER_SHARE = 0.5
"""Minimum share of an operator's time in a layer whose line is used for the operator."""
_MAX_CALLS = 200
"""Maximum number of distinct calls that are read, the longest first."""
WEIGHT_POSITION = {
    **dict.fromkeys(
        (
            *("aten::linear", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"),
            *("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d"),
            *("aten::batch_norm", "aten::instance_norm"),
        ),
        1,
    ),
    **dict.fromkeys(("aten::layer_norm", "aten::rms_norm", "aten::group_norm"), 2),
    "aten::embedding": 0,
}
"""Position of the weights among an operator's inputs."""


class LocatedModules(NamedTuple):
    """Modules of one name, class and shape, called from one line."""

    name: str
    place: Location
    shapes: tuple[tuple[int, ...], ...]


def located_modules(a: Analysis) -> list[LocatedModules]:
    """Read the recorder's tables of modules, without modules whose calling line is unknown."""
    events = [] if a.rank_record is None else a.rank_record.events_of("modules")
    tables = [event.get("modules") for event in events]
    rows = [row for table in tables if isinstance(table, list) for row in table]
    return [layer for row in rows if (layer := _read_modules(row)) is not None]


def _read_modules(row: Any) -> LocatedModules | None:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[3], list):
        return None
    name, kind, _, shapes, text = row
    frame = parse_frame(text) if isinstance(text, str) else None
    if frame is None or not all(isinstance(shape, list) for shape in shapes):
        return None
    return LocatedModules(
        f"{name} ({kind})", frame.location, tuple(tuple(shape) for shape in shapes)
    )


def line_of_layer(a: Analysis, place: Location) -> Location | None:
    """Find the line that calls the layer in which an operator of ``place`` takes most of its time.
    If several lines of one function call layers of that shape, return the function's first.
    ``None`` if no layer has matching weights, or layers of several functions do."""
    layers = located_modules(a)
    if not layers or place.op is None:
        return None
    times: Counter[tuple[str, str]] = Counter()
    layers_by_function: dict[tuple[str, str], list[LocatedModules]] = {}
    total = 0
    for call, ns in _list_calls(a, place):
        total += ns
        candidates = _find_layers(a, call, layers)
        functions = {(layer.place.file or "", layer.place.function or "") for layer in candidates}
        if len(functions) == 1:
            function = functions.pop()
            times[function] += ns
            layers_by_function.setdefault(function, []).extend(candidates)
    if not times:
        return None
    function, ns = times.most_common(1)[0]
    if ns < MIN_LAYER_SHARE * total:
        return None
    first_layer = min(layers_by_function[function], key=lambda layer: layer.place.line or 0)
    names = sorted({layer.name for layer in layers_by_function[function]})
    return Location(
        file=first_layer.place.file,
        line=first_layer.place.line,
        function=first_layer.place.function,
        layer=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
    )


def _list_calls(a: Analysis, location: Location) -> Iterator[tuple[int, int]]:
    """Yield (row of the outermost operator in forward, ns) of distinct calls, the longest first.
    With a device, the time is the time of the place's kernels."""
    cpu = a.trace.cpu
    rows, ns = rows_of_place(a, location)
    forward_row = a.forward_op[rows]  # of a gradient
    outermost = a.outermost_aten[np.where(forward_row >= 0, forward_row, rows)]
    table = pl.DataFrame({"row": outermost, "ns": ns}).filter(pl.col("row") >= 0)
    table = table.with_columns(
        name=cpu["name"].gather(table["row"]).to_physical(),
        inputs=cpu["inputs"].gather(table["row"]),
    )
    calls = table.group_by("name", "inputs").agg(pl.col("row").min(), pl.col("ns").sum())
    yield from calls.sort("ns", "row", descending=True).head(_MAX_CALLS).select("row", "ns").rows()


def _find_layers(a: Analysis, call: int, layers: list[LocatedModules]) -> list[LocatedModules]:
    """Return the layers whose weights have the same shape as the weights of a call."""
    cpu = a.trace.cpu
    position, inputs = WEIGHT_POSITION.get(str(cpu["name"][call])), cpu["inputs"][call]
    if position is None or inputs is None:
        return []
    weight = inputs_at(a, inputs).tensor(position)
    if weight is None:
        return []
    shape = tuple(weight.shape)  # a one-dimensional weight may be any bias
    return [
        layer for layer in layers if shape in (layer.shapes if len(shape) > 1 else layer.shapes[:1])
    ]
