"""Layers that compute all positions although only some results are used."""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import TAKES, dimension_taken, inputs_at, range_taken
from advisor.measure.device.shapes import OpInputs, Shape
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import (
    TRANSFORMERS,
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    runs_code_of,
)
from advisor.rules.support.dropped_columns import (
    INDEXED,
    POINTWISE,
    STFT,
    Dropped,
    find_dropped_columns,
    read_indexed_part,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.testing import Examples, TraceBuilder

WIDTH_DIMENSION = {"aten::linear": -2, "aten::matmul": -1, "aten::addmm": -1, "aten::mm": -1}
"""Product -> the dimension of its last operand that gives the width of the result."""
OVER_FEATURES = {"aten::log_softmax": 1, "aten::softmax": 1}
"""Operator over one dimension -> position of the argument with it. Over the last one, it works on
each position alone."""
NORMS = frozenset(("aten::layer_norm", "aten::rms_norm"))
"""Operators over the last dimensions, whose sizes are their second argument."""
NORMALIZING = NORMS | OVER_FEATURES.keys()
"""Operators that keep the shape, and may work on each position alone."""
TRANSFORMS = frozenset(("aten::fft_fft", "aten::fft_rfft"))
ON_LAST_DIMENSION = frozenset((*WIDTH_DIMENSION, *TRANSFORMS))
"""Operators on the features of each position, which may change their number."""
TAKERS = (*TAKES, *INDEXED)
OF_INDEX = frozenset(("aten::unsqueeze", "aten::expand", "aten::arange"))
"""Operators that make an index, between the layer and the operator that takes the part."""
_MAX_BETWEEN = 6
END = str(2**63 - 1)
"""End of a slice that has no end."""


class DroppedPositions(Rule):
    """A layer computes its result at every position, and the next line takes a part of it:
    ``model.head(hidden)[:, -1]``. Recommenders and classifiers of sequences do so, as does
    generation that computes logits for the whole prompt. At the other positions the forward product
    is wasted, and the backward pass multiplies zeros.

    The rule finds a product whose result has one reader in the step, which takes at most half of
    the rows. Features do not count as rows. Sequence numbers show which nodes of the backward pass
    belong to the product. If another operator reads the result, it is needed, and nothing is
    reported.

    Positions may be in the last dimension, as the frames of a spectrogram are. Products with such
    positions in their last operand, and convolutions of width 1, keep them apart.

    Operators between the two must work on each position alone, as activations, norms and a softmax
    over the features do. Operators right before the product belong to it if they work on each
    position alone and nothing else reads their results. Examples are arithmetic and Fourier
    transforms of frames: a spectrogram of a long recording, of which the last frames are used.

    The gain is the dropped share of this work. A smaller product runs at a lower rate, which the
    range allows for. Still earlier layers may be skipped too; the estimate does not include
    that."""

    id = "dropped-positions"
    title = "A layer computes positions that are then dropped"
    found_in = (
        "recorded/last_position.slow",
        "recorded/transcribe.slow",
        "recorded/clip_frames.slow",
    )
    silent_in = SILENT_INPUTS
    validation_note = (
        "CPU recordings, torch 2.13, and their cures: 10.1 ms predicted, 9.4 ms measured; 31 ms "
        "predicted, 35 ms measured. Another, not in the tests: 24.1 ms predicted, 22.6 ms measured"
    )
    references = ("https://docs.pytorch.org/docs/stable/tensor_view.html",)

    min_share = Threshold(0.05, "of the step in work on dropped positions", XPROF)
    max_kept_share = Threshold(0.5, "of the result is used: with more, little is dropped", CHOSEN)

    best_kept_x = Factor(0.5, "times as long per position that is kept, at best", CHOSEN)
    worst_kept_x = Factor(
        1.5, "times as long, at worst: a smaller product has a lower rate", CHOSEN
    )

    fix = (
        "Take the positions before the layer, not after it. It works on each position alone, so "
        "the results stay the same. Move the selection ahead of earlier layers of this kind too."
    )
    code = "result = layer(hidden[{part}])     # not layer(hidden)[{part}]"
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "Transformers": {
            "fix": "Tell the model to compute logits of the last position only. The results stay "
            "the same.",
            "code": "outputs = model(**inputs, logits_to_keep=1)\nlast = outputs.logits[:, -1]",
        },
        "operators before it": {
            "fix": "Take the positions before the first of these operators ({first}), not after "
            "the last. Each works on one position alone, so the results stay the same.",
            "code": "x = x[{part}]     # before {first}, not after the last operator",
        },
        "a spectrogram": {
            "fix": "Cut the part of the recording that has these frames before {first}. Each frame "
            "depends on its own samples only. With center=True, start size // 2 samples earlier.",
            "code": "# frames of size samples each, every hop samples (center=False)\n"
            "first = start * hop           # start, count: the frames that are used\n"
            "x = x[..., first : first + size + (count - 1) * hop]\n"
            "features = extract_features(x)     # not of the whole x",
        },
        "frames": {
            "fix": "Take the positions before the first of these operators ({first}), not after "
            "the last. Each works on one position alone, so the results stay the same. Of a "
            "recording, cut the end that has the frames.",
            "code": "# frames of size samples each, every hop samples; the last count are used\n"
            "x = x[..., -(size + (count - 1) * hop):]\n"
            "features = extract_features(x)     # not of the whole x",
        },
    }
    verify = "Record again: the product has fewer rows. Compare the results."
    falsified_by = "other code that reads the whole result, in steps that are not recorded"
    assumptions = ("only this part of the result is used",)
    needs_shapes = True
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        columns = find_dropped_columns(a, self.max_kept_share)
        for dropped in [*self._find_dropped(a), *columns]:
            layer_rows = np.array(dropped.rows)
            rows, backward_rows = with_backward(a, layer_rows, np.array(dropped.through))
            ns = time_of_operators(a, rows)
            times_as_long = (1, self.best_kept_x, self.worst_kept_x)
            saved = [ns * max(0.0, 1 - x * dropped.used_share) for x in times_as_long]
            if saved[0] < self.min_share * a.span_ns:
                continue
            sizes = " × ".join(f"{size:,}" for size in dropped.shape)
            backward = " With its backward pass this" if len(backward_rows) else " This"
            yield Finding(
                summary=(
                    f"A layer computes {'up to ' * (dropped.lengths > 1)}{sizes} results, and "
                    f"{dropped.used_share:.0%} of them are used: [{dropped.part}].{backward} takes "
                    f"{of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "time of the layer", ns),
                    amount_per_step(a, "calls of the layer", len(dropped.rows), "count"),
                    self.compare(
                        "part of the result that is used", dropped.used_share, "max_kept_share"
                    ),
                    self.compare_share(a, "work on dropped positions", saved[0]),
                ],
                where=costliest_places(a, layer_rows, top=1 if dropped.ahead else 3),
                edits=[scale_operators(a, rows, saved)],
                **self._choose_texts(a, dropped),
            )

    def _choose_texts(self, a: Analysis, dropped: Dropped) -> Mapping[str, Any]:
        if runs_code_of(a, TRANSFORMERS):
            return self.case("Transformers")
        if not dropped.ahead:
            return {"code": self.code.format(part=dropped.part)}
        first = dropped.ahead[0].partition("::")[2]
        if STFT in dropped.ahead:
            return self.case("a spectrogram", first=first)
        if TRANSFORMS.isdisjoint(dropped.ahead):
            return self.case("operators before it", first=first, part=dropped.part)
        return self.case("frames", first=first)

    def _find_dropped(self, a: Analysis) -> list[Dropped]:
        """Return layers whose result is dropped in part, by shape and part."""
        table = outermost_in_steps(a)
        taken = table.filter(pl.col("name").is_in(TAKERS)).drop_nulls("inputs")
        all_parts = {
            at: part
            for name, at in taken.select("name", "inputs").unique().iter_rows()
            if (part := _parse_part(name, inputs_at(a, at))) is not None
        }
        parts = {at: part for at, part in all_parts.items() if part[1] <= self.max_kept_share}
        if not parts:
            return []
        rows, names, inputs = (table[name].to_list() for name in ("row", "name", "inputs"))
        keeps = [
            name in POINTWISE
            or name in OF_INDEX
            or (at in all_parts and all_parts[at][1] == 1 and name in TAKERS)
            or (at is not None and name in NORMALIZING and _is_by_features(name, inputs_at(a, at)))
            for name, at in zip(names, inputs, strict=True)
        ]
        dropped_layers: dict[tuple[Shape, str], Dropped] = {}
        needed: set[Shape] = set()
        product_takers = [
            (first, at)
            for at, (name, each) in enumerate(zip(names, inputs, strict=True))
            if each in parts and name in TAKERS
            if (first := _find_product_before(names, keeps, at)) is not None
            if _find_product_shape(a, names[first], inputs[first]) == parts[each][0]
        ]
        if not product_takers:
            return []
        shapes = {
            at: [tensor.shape for tensor in inputs_at(a, at).tensors]
            for at in table["inputs"].drop_nulls().unique()
        }
        operands = [[] if at is None else shapes[at] for at in inputs]
        for first, at in product_takers:
            shape, kept, index = parts[inputs[at]]
            again = next(
                (
                    n
                    for n in range(at, len(rows))
                    if inputs[n] == inputs[first] and names[n] == names[first]
                ),
                len(rows),
            )
            readers = [
                n
                for n in range(first + 1, again)
                if shape in operands[n] and not (n < at and keeps[n] and names[n] not in OF_INDEX)
            ]
            if readers != [at]:
                needed.add(shape)
                continue
            begin = _find_chain_start(names, operands, first, at)
            dropped = dropped_layers.setdefault(
                (shape, index), Dropped(shape, kept, index, [], [], names[begin:first])
            )
            dropped.rows.extend(rows[begin:at])
            dropped.through.extend(rows[begin : at + 1])
            if again < len(rows) and all(keeps[again + 1 :]):
                # the recording ends before a part of the last call's result is taken
                dropped.rows.extend(rows[again - (first - begin) : again + at - first])
        return _merge_lengths(
            [dropped for dropped in dropped_layers.values() if dropped.shape not in needed]
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "logits of the last position": _build_model(),
            "on a GPU": _build_model(gpu="A100"),
            "in inference": _build_model(trains=False),
            "the first four positions": _build_model(
                taker="aten::slice", args=["1", "0", "4", "1"]
            ),
            "frames of a spectrogram": _build_model(before="aten::fft_rfft", us=20),
            "sequences of several lengths": _build_model(lengths=(32, 48)),
            "after slices of everything": _build_model(slices_all=True),
            "probabilities of the last position": _build_model(softmax_dim=-1),
            "a softmax over positions": (_build_model(softmax_dim=1), "not product_takers"),
            "all but the last": (
                _build_model(taker="aten::slice", args=["1", "0", "31", "1"]),
                "not parts",
            ),
            "some features": (_build_model(args=["2", "0"]), "not parts"),
            "read again": (_build_model(other_reader="aten::mean"), "readers != [at]"),
            "a part of something else": (_build_model(product="aten::tanh"), "not product_takers"),
            "hardly any time": (_build_model(us=20), "min_share"),
            "positions by an index": _build_model(
                taker="aten::index_select", args=["1", ""], index=[4]
            ),
            "most positions by an index": (
                _build_model(taker="aten::index_select", args=["1", ""], index=[24]),
                "not parts",
            ),
            "frames of each clip": _build_clips(),
            "frames of one clip after another": _build_clips(apart=True),
            "positions of a convolution": _build_clips(source="aten::conv1d"),
            "most frames": (_build_clips(kept=300), "max_kept_share"),
            "the mean of all frames too": (_build_clips(reader="aten::mean"), "not parts"),
            "scores of some classes": (_build_clips(source="aten::mm"), "not parts"),
        }


def _merge_lengths(layers: list[Dropped]) -> list[Dropped]:
    """Return the layers with results of several lengths as one: equal but for the dimensions before
    the last, with the same part taken. The shape is the largest."""
    merged: dict[tuple[int, int, str], Dropped] = {}
    for layer in sorted(layers, key=lambda layer: -prod(layer.shape)):
        key = (len(layer.shape), layer.shape[-1], layer.part)
        largest = merged.setdefault(key, layer)
        if largest is not layer:
            count, more = len(largest.rows), len(layer.rows)
            kept = (largest.used_share * count + layer.used_share * more) / (count + more)
            merged[key] = largest._replace(
                used_share=kept,
                lengths=largest.lengths + 1,
                rows=largest.rows + layer.rows,
                through=largest.through + layer.through,
            )
    return list(merged.values())


def _parse_part(name: str, x: OpInputs) -> tuple[Shape, float, str] | None:
    """Return the shape that a part is taken from, the part's share and its index. ``None`` if it is
    not recorded, or selects features."""
    if (indexed := read_indexed_part(name, x)) is not None:
        shape, dim, share = indexed
        return (shape, share, ":, " * dim + "positions") if dim < len(shape) - 1 else None
    dimension = dimension_taken(name, x)
    if dimension is None or not prod(dimension[0]):
        return None
    shape, leading_dims = dimension
    size = shape[leading_dims]
    taken = range_taken(name, x, x.argument(1), size)
    stride = x.argument(4) if name == "aten::slice" else 1
    if taken is None or not isinstance(stride, int) or stride < 1:
        return None
    start, end = max(0, taken[0]), taken[1]
    kept = len(range(start, end, stride))
    if not kept or (leading_dims == len(shape) - 1 and kept < size):
        return None
    is_select = name == "aten::select"
    index = f"{x.argument(2)}" if is_select else f"{start}:{end}" + f":{stride}" * (stride > 1)
    return shape, kept / size, ":, " * leading_dims + index


def _is_by_features(name: str, x: OpInputs) -> bool:
    """Return whether one of ``NORMALIZING`` works on the features of each position alone."""
    tensor = x.tensor(0)
    if tensor is None:
        return False
    if name in NORMS:
        sizes = x.integers(1)
        return sizes is not None and len(sizes) == 1
    dim = x.argument(OVER_FEATURES[name])
    return isinstance(dim, int) and dim in (-1, len(tensor.shape) - 1)


def _find_product_before(names: list[str], keeps: list[bool], at: int) -> int | None:
    """Return the index of the product right before an operator; operators in between must keep its
    shape."""
    for index in range(at - 1, max(-1, at - 1 - _MAX_BETWEEN), -1):
        if names[index] in WIDTH_DIMENSION:
            return index
        if not keeps[index]:
            return None
    return None


def _find_chain_start(names: list[str], operands: list[list[Shape]], first: int, at: int) -> int:
    """Return the index of the first of the operators that lead to the product ``first``, work on
    each position alone, and have no other reader before the part is taken at ``at``."""
    read_later = {shape for shapes in operands[first + 1 : at] for shape in shapes}
    chain = first
    while chain and operands[chain]:
        wanted, before = operands[chain][0], operands[chain - 1]
        if names[chain - 1] in POINTWISE:
            fits = wanted in before
        else:
            fits = names[chain - 1] in ON_LAST_DIMENSION and bool(before)
            fits = fits and before[0][:-1] == wanted[:-1]
        if not fits or len(wanted) < 2 or wanted in read_later:
            break
        chain -= 1
    return chain


def _find_product_shape(a: Analysis, name: str, index: int | None) -> Shape | None:
    """Return the shape of a product's result, or ``None`` if it is not recorded or has vectors as
    inputs."""
    shapes = [] if index is None else [tensor.shape for tensor in inputs_at(a, index).tensors]
    if name == "aten::addmm":
        shapes = shapes[1:]
    if len(shapes) < 2 or min(map(len, shapes[:2])) < 2:
        return None
    return (*shapes[0][:-1], shapes[1][WIDTH_DIMENSION[name]])


def _build_model(
    *,
    gpu: str | None = None,
    product: str = "aten::linear",
    before: str = "aten::layer_norm",
    taker: str = "aten::select",
    args: list[str] | None = None,
    other_reader: str = "",
    softmax_dim: int | None = None,
    slices_all: bool = False,
    trains: bool = True,
    us: float = 3000,
    lengths: tuple[int, ...] = (32,),
    index: list[int] | None = None,
) -> TraceBuilder:
    """Build steps on sequences of 32 positions, with logits over 6,000 classes."""
    b = TraceBuilder(gpu=gpu)
    args = ["1", "-1"] if args is None else args

    for number in b.steps():
        length = lengths[number % len(lengths)]
        logits, hidden = [16, length, 6000], [16, length, 96]
        sequence = 10 * number if trains else None
        b.compute(before, 5000, [hidden])
        b.compute(product, us, [hidden, [6000, 96], [6000]], sequence=sequence)
        part: dict[str, Any] = {} if sequence is None else {"sequence": sequence + 1}
        if softmax_dim is not None:
            dim = ["", str(softmax_dim), ""]
            b.compute("aten::log_softmax", us / 2, [logits, [], []], concrete=dim)
        if slices_all:
            sizes = [logits, [], [], [], []]
            b.on_host("aten::slice", 2, sizes, concrete=["", "0", "0", END, "1"])
        shapes = [logits, *([[]] * len(args))] if index is None else [logits, [], index]
        b.on_host(taker, 5, shapes, concrete=["", *args], **part)
        if other_reader:
            b.compute(other_reader, 100, [logits])
        for at, node in enumerate(("SelectBackward0", "AddmmBackward0") if trains else ()):
            name = f"{NODE_PREFIX}{node}"
            b.compute(name, (us / 8, 2 * us)[at], [], sequence=10 * number + 1 - at)
        b.on_host("aten::gelu", 300)
        b.sync()
    return b


def _build_clips(
    *, source: str = "aten::stft", kept: int = 64, apart: bool = False, reader: str = ""
) -> TraceBuilder:
    """Build steps on features of four clips with 497 frames each, of which some are used."""
    b = TraceBuilder(gpu=None)
    power, features = [4, 257, 497], [4, 64, 497]
    for _ in b.steps():
        if source == "aten::stft":
            arguments = ["", "512", "160", "", "", "False", "", "True"]
            shapes = [[4, 80000], [], [], [], [512], [], [], []]
            b.compute(source, 3000, shapes, concrete=arguments)
            b.compute("aten::square", 200, [power])
            b.compute("aten::matmul", 900, [[64, 257], power])
        elif source == "aten::conv1d":
            b.compute(source, 3000, [power, [64, 257, 1], [64]])
        else:
            b.compute("aten::matmul", 3000, [[4, 64, 257], [257, 497]])
        b.compute("aten::log", 200, [features])
        if reader:
            b.compute(reader, 100, [features])
        for number in range(4 if apart else 0):
            one = ["", "0", str(number)]
            b.on_host("aten::select", 2, [features, [], []], concrete=one)
            part = ["", "1", "7", str(7 + kept), "1"]
            b.on_host("aten::slice", 2, [features[1:], [], [], [], []], concrete=part)
        if not apart:
            index = [features, [], [4, 64, kept]]
            b.on_host("aten::gather", 20, index, concrete=["", "2", "", "False"])
        b.compute("aten::conv2d", 3000, [[4, 1, 64, kept], [12, 1, 3, 3]])
    return b
