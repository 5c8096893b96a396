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
from advisor.measure.host.stacks import parse_frame

MIN_SHARE = 0.5
"""Share of an operator's time from which a layer's line is that of the operator."""
MAX_CALLS = 200
"""Most different calls looked at, the longest ones."""
WEIGHT_AT = {
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


class Layer(NamedTuple):
    """Modules of one name, class and shape, called in one place."""

    name: str
    place: Location
    shapes: tuple[tuple[int, ...], ...]


def recorded_layers(a: Analysis) -> list[Layer]:
    """Read the recorder's tables of modules; those whose call is not known are left out."""
    events = [] if a.record is None else a.record.events_of("modules")
    tables = [event.get("modules") for event in events]
    rows = [row for table in tables if isinstance(table, list) for row in table]
    return [layer for row in rows if (layer := _read_layer(row)) is not None]


def _read_layer(row: Any) -> Layer | None:
    if not isinstance(row, list) or len(row) != 5 or not isinstance(row[3], list):
        return None
    name, kind, _, shapes, text = row
    frame = parse_frame(text) if isinstance(text, str) else None
    if frame is None or not all(isinstance(shape, list) for shape in shapes):
        return None
    return Layer(f"{name} ({kind})", frame.location, tuple(tuple(shape) for shape in shapes))


def line_of_layer(a: Analysis, place: Location) -> Location | None:
    """Find the line that calls the layer in which an operator of ``place`` takes most of its time.
    Where several lines of one function call layers of that shape, it is the function's first.
    ``None``: no layer has such weights, or layers of several functions have."""
    layers = recorded_layers(a)
    if not layers or place.op is None:
        return None
    times: Counter[tuple[str, str]] = Counter()
    known: dict[tuple[str, str], list[Layer]] = {}
    total = 0
    for call, ns in _calls(a, place):
        total += ns
        found = _layers_of(a, call, layers)
        functions = {(layer.place.file or "", layer.place.function or "") for layer in found}
        if len(functions) == 1:
            function = functions.pop()
            times[function] += ns
            known.setdefault(function, []).extend(found)
    if not times:
        return None
    function, ns = times.most_common(1)[0]
    if ns < MIN_SHARE * total:
        return None
    own = min(known[function], key=lambda layer: layer.place.line or 0)
    names = sorted({layer.name for layer in known[function]})
    return Location(
        file=own.place.file,
        line=own.place.line,
        function=own.place.function,
        layer=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
    )


def _calls(a: Analysis, place: Location) -> Iterator[tuple[int, int]]:
    """Yield (row of the outermost operator in forward, ns) of different calls, the longest first.
    On a device the time is that of the place's kernels."""
    cpu = a.trace.cpu
    if a.device_id is None:
        rows = np.flatnonzero((cpu["name"] == place.op).to_numpy())
        ns = cpu["dur"].to_numpy()[rows]
    else:
        own = a.kernels["op_name"] == place.op
        if place.kernel is not None:
            own &= a.trace.gpu["name"] == place.kernel
        device = np.flatnonzero(own.fill_null(value=False).to_numpy())
        op = a.trace.gpu["op"].fill_null(-1).to_numpy()[device]
        rows, ns = op[op >= 0], a.trace.gpu["dur"].to_numpy()[device][op >= 0]
    maker = a.forward_op[rows]  # of a gradient
    top = a.outermost_aten[np.where(maker >= 0, maker, rows)]
    table = pl.DataFrame({"row": top, "ns": ns}).filter(pl.col("row") >= 0)
    table = table.with_columns(
        name=cpu["name"].gather(table["row"]).to_physical(),
        inputs=cpu["inputs"].gather(table["row"]),
    )
    calls = table.group_by("name", "inputs").agg(pl.col("row").min(), pl.col("ns").sum())
    yield from calls.sort("ns", "row", descending=True).head(MAX_CALLS).select("row", "ns").rows()


def _layers_of(a: Analysis, call: int, layers: list[Layer]) -> list[Layer]:
    """Return the layers whose weights have the shape of a call's."""
    cpu = a.trace.cpu
    at, inputs = WEIGHT_AT.get(str(cpu["name"][call])), cpu["inputs"][call]
    if at is None or inputs is None:
        return []
    weight = inputs_at(a, inputs).tensor(at)
    if weight is None:
        return []
    shape = tuple(weight.shape)  # one of one dimension may be any bias
    return [
        layer for layer in layers if shape in (layer.shapes if len(shape) > 1 else layer.shapes[:1])
    ]
