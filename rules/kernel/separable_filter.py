"""Large filters that smooth in one pass instead of one per dimension."""

from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from advisor.core.finding import Finding, Location, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_convolution
from advisor.measure.device.operator_arguments import calls_by_inputs
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import NODE_PREFIX, hottest_line
from advisor.rules.support.citations import (
    CHOSEN,
    CURED_RECORDINGS,
    SILENT_TRACES,
    SLOW_ARGUMENTS,
    XPROF,
)
from advisor.rules.support.common import amount_per_step, costliest_places, of_step
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

Shape = tuple[int, ...]
BACKWARD = "aten::convolution_backward"
CONVOLUTIONS = r"^aten::(?:conv[23]d|_convolution_mode|convolution(?:_backward)?)$"
LEARNS = r"backward|AccumulateGrad|^aten::_(?:fused|foreach)_"
"""Operators that get a trained weight's gradient, or the weight."""


class Filter(NamedTuple):
    """Calls with one filter."""

    weight: Shape
    forward: list[int]
    """Rows of ``trace.cpu``."""
    backward: list[int]


class SeparableFilter(Rule):
    """A large filter that nothing trains, one for each channel, is applied as a full 2-D or 3-D
    convolution. Losses of structural similarity, elastic deformation and blurs do so. Gaussian, box
    and mean filters are products of 1-D filters. One pass per dimension gives the same: ``2 k``
    products for each pixel, where the full filter takes ``k²``.

    Found are convolutions with a weight of one channel per group, and as many groups as channels.
    No operator computes the weight's gradient or updates it. Networks with large depthwise layers
    have many channels, so only weights of few channels count. In inference only weights of one
    channel count.

    What remains was measured on one thread of a CPU. There the library's fast kernels end at
    filters smaller than ``min_size_on_cpu``. On GPUs the same is expected from the number of
    products."""

    id = "separable-filter"
    title = "A large fixed filter runs as one convolution, not one per dimension"
    found_in: ClassVar[tuple[str, ...]] = ("recorded/plates.slow",)
    silent_in: ClassVar[tuple[str, ...]] = (
        "recorded/plates.cured",
        *SILENT_TRACES,
        *CURED_RECORDINGS,
    )
    validation_note = "a CPU recording of a loss of local contrast, torch 2.13, and its cure"
    references = (
        "https://docs.scipy.org/doc/scipy/reference/generated/scipy.ndimage.gaussian_filter.html",
    )

    min_share = Threshold(0.05, "of the step in these convolutions", XPROF)
    min_size = Threshold(11, "points of the filter along each dimension", CHOSEN)
    min_size_on_cpu = Threshold(15, "of them on a CPU", SLOW_ARGUMENTS)
    max_channels = Threshold(4, "channels: images have few, layers of a network more", CHOSEN)
    cost = Factor(1.3, "times the time that the fewer products take", SLOW_ARGUMENTS)
    best_cost = Factor(0.7, "times that, at best", SLOW_ARGUMENTS)
    worst_cost = Factor(3.5, "times that, at worst", SLOW_ARGUMENTS)
    more = Factor(0.02, "of the time stays besides: a pass more", SLOW_ARGUMENTS)
    best_more = Factor(0.0, "of it, at best", SLOW_ARGUMENTS)
    worst_more = Factor(0.1, "of it, at worst", SLOW_ARGUMENTS)

    fix = (
        "Apply a 1-D filter along each dimension: a Gaussian, box or mean filter is their product. "
        "Results differ by rounding. A large filter that is no such product is faster by FFT: "
        "multiply torch.fft.rfft2 of image and filter, both padded with zeros."
    )
    code = (
        "c = x.shape[1]                          # line: the 1-D filter, k weights\n"
        "row = line.expand(c, 1, 1, k)\n"
        "x = F.conv2d(x, row, padding=(0, k // 2), groups=c)\n"
        "x = F.conv2d(x, row.mT, padding=(k // 2, 0), groups=c)   # in 3-D a third"
    )
    verify = "Record again: filters have one dimension. Compare the results."
    falsified_by = "a filter that is no product of 1-D filters, such as a disk or a measured one"
    assumptions = ("the filter is separable, as Gaussian, box and mean filters are",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns or not a.step_count or a.trace.inputs.is_empty():
            return
        for found in self._find(a):
            rows = np.array([*found.forward, *found.backward])
            ns = time_of_operators(a, rows)
            if ns < self.min_share * a.span_ns:
                continue
            sizes = found.weight[2:]
            fewer = sum(sizes) / prod(sizes)
            ends = (
                (self.more, self.cost),
                (self.best_more, self.best_cost),
                (self.worst_more, self.worst_cost),
            )
            saved = [ns * max(0.0, 1 - more - cost * fewer) for more, cost in ends]
            size = " × ".join(map(str, sizes))
            backward = " With its backward pass this" if found.backward else " This"
            yield Finding(
                summary=(
                    f"A filter of {size} points that nothing trains is applied as one "
                    f"convolution.{backward} takes {of_step(a, ns)}. One pass per dimension "
                    f"computes {fewer:.0%} of the products."
                ),
                evidence=[
                    amount_per_step(a, "time of these convolutions", ns),
                    amount_per_step(a, "calls", len(found.forward), "count"),
                    self.compare("points along a dimension", min(sizes), self._size_limit(a)),
                    self.compare("share", ns / a.span_ns, "min_share", per=a.per),
                ],
                where=_places(a, found),
                edits=[scale_operators(a, rows, saved)],
            )

    @staticmethod
    def _size_limit(a: Analysis) -> str:
        return "min_size_on_cpu" if a.device_id is None else "min_size"

    def _find(self, a: Analysis) -> list[Filter]:
        """Return the filters that are large and that nothing trains, by shape."""
        channels = self.max_channels if (a.forward_op >= 0).any() else 1
        least = getattr(self, self._size_limit(a))
        found: dict[Shape, Filter] = {}
        for name, x, rows in calls_by_inputs(a, CONVOLUTIONS):
            weight = _weight(name, x)
            if weight is None or weight[0] > channels:
                continue
            if min(weight[2:]) < least:
                continue
            own = found.setdefault(weight, Filter(weight, [], []))
            (own.backward if name == BACKWARD else own.forward).extend(rows.tolist())
        trained = _trained(a) if found else set()
        return [one for one in found.values() if one.forward and one.weight not in trained]

    @staticmethod
    def examples() -> Examples:
        return {
            "a displacement field": _smoothing(trains=False),
            "in a loss": _smoothing(mask="[True, False, False]"),
            "of three channels, on a GPU": _smoothing(
                3, 11, gpu="A100", mask="[True, False, False]"
            ),
            "trained": (_smoothing(mask="[True, True, False]"), "known.output_mask[1]"),
            "three channels without training": (
                _smoothing(3, trains=False),
                "weight[0] > channels",
            ),
            "a layer of a network": (_smoothing(64), "weight[0] > channels"),
            "a bank of filters": (_smoothing(1, outer=8), "weight is None"),
            "small": (_smoothing(size=13), "min_size_on_cpu"),
            "small, on a GPU": (_smoothing(size=7, gpu="A100"), "min_size"),
            "hardly any time": (_smoothing(us=20), "min_share"),
        }


def _weight(name: str, x: OpInputs) -> Shape | None:
    """Return the shape of a filter for each channel; ``None``: something else, or with strides."""
    data, weight = (x.tensor(at + (name == BACKWARD)) for at in (0, 1))
    if data is None or weight is None:
        return None
    rank = len(weight.shape) - 2
    if rank < 2 or weight.shape[1] != 1 or len(data.shape) <= rank:
        return None
    stride = x.integers(4 if name == BACKWARD else 3)
    each = weight.shape[0] == data.shape[-rank - 1]
    return weight.shape if each and set(stride or [1]) == {1} else None


def _trained(a: Analysis) -> set[Shape]:
    """Return shapes of what is trained, or may be."""
    shapes: set[Shape] = set()
    for name, x, _ in calls_by_inputs(a, LEARNS):
        known = parse_convolution(name, x) if name == BACKWARD else None
        if known is None or known.output_mask[1]:
            shapes.update(one.shape for one in x.tensors)
    return shapes


def _places(a: Analysis, found: Filter) -> list[Location]:
    """Return the places of the calls; the first is by samples that are in no ``nn.Conv2d``, where
    the window has no stacks."""
    places = costliest_places(a, np.array(found.forward))
    if a.recorded is None or any(place.file for place in places):
        return places
    called = f"conv{len(found.weight) - 2}d"
    line = hottest_line(
        [
            stack
            for stack in a.recorded.stacks
            if stack.called.endswith(called) and "_conv_forward" not in stack.frames[-1]
        ]
    )
    return places if line is None else [line.location, *places]


def _smoothing(
    channels: int = 1,
    size: int = 21,
    *,
    outer: int = 0,
    gpu: str | None = None,
    mask: str = "",
    trains: bool = True,
    us: float = 3000,
) -> TraceBuilder:
    """A filter on images, beside a layer of a network."""
    b = TraceBuilder(gpu=gpu)
    data, weight = [8, channels, 128, 128], [outer or channels, 1, size, size]
    pad = f"[{size // 2}, {size // 2}]"

    for number in b.steps():
        given: list[list[int]] = [[]] * 5
        concrete = ["", "", "", "[1, 1]", pad, "[1, 1]", "1"]
        b.compute("aten::conv2d", us, [data, weight, *given], concrete=concrete)
        sequence: dict[str, Any] = {"sequence": 10 * number} if trains else {}
        b.compute("aten::linear", 9000, [[64, 512], [512, 512], []], **sequence)
        if mask:
            concrete = ["", "", "", "[0]", "[1, 1]", pad, "[1, 1]", "False", "[0, 0]", "1", mask]
            b.compute(BACKWARD, 2 * us, [data, data, weight, *([[]] * 8)], concrete=concrete)
        if trains:
            b.compute(f"{NODE_PREFIX}AddmmBackward0", 9000, [], **sequence)
        b.sync()
    return b
