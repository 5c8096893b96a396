"""Large filters applied in one pass instead of one pass per dimension."""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from advisor.core.finding import Finding, Location, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_convolution
from advisor.measure.device.operator_arguments import calls_by_inputs
from advisor.measure.device.shapes import OpInputs, Shape
from advisor.measure.host.stacks import NODE_PREFIX, hottest_line
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, SLOW_ARGUMENTS, XPROF
from advisor.rules.support.common import amount_per_step, costliest_places, of_step
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

BACKWARD = "aten::convolution_backward"
CONVOLUTIONS = r"^aten::(?:conv[23]d|_convolution_mode|convolution(?:_backward)?)$"
TRAINING_OPS = r"backward|AccumulateGrad|^aten::_(?:fused|foreach)_"
"""Operators that take a trained weight or its gradient."""


class FilterUse(NamedTuple):
    """Calls with the same filter."""

    weight: Shape
    forward: list[int]
    """Rows of ``trace.cpu``."""
    backward: list[int]


class SeparableFilter(Rule):
    """A large filter per channel, which is not trained, is applied as a full 2-D or 3-D
    convolution. Structural similarity losses, elastic deformation and blurs do so. Gaussian, box
    and mean filters are products of 1-D filters. One pass per dimension gives the same result, with
    ``2 k`` products per pixel instead of ``k²``.

    The rule finds convolutions with one channel per group and as many groups as channels, whose
    weight no operator updates or computes a gradient for. Networks with large depthwise layers have
    many channels, so only weights with few channels count. In inference only weights with one
    channel count.

    The remaining time was measured on one CPU thread. There the library has fast kernels only for
    filters smaller than ``min_size_on_cpu``. The number of products suggests the same on GPUs."""

    id = "separable-filter"
    title = "A large fixed filter runs as one convolution, not one per dimension"
    found_in = ("recorded/plates.slow",)
    silent_in = SILENT_INPUTS
    validation_note = "a CPU recording of a loss of local contrast, torch 2.13, and its cure"
    references = (
        "https://docs.scipy.org/doc/scipy/reference/generated/scipy.ndimage.gaussian_filter.html",
    )

    min_share = Threshold(0.05, "of the step in these convolutions", XPROF)
    min_size = Threshold(11, "points of the filter along each dimension", CHOSEN)
    min_size_on_cpu = Threshold(15, "points along each dimension, on a CPU", SLOW_ARGUMENTS)
    max_channels = Threshold(4, "channels: images have few, layers of a network have more", CHOSEN)
    product_factor = Factor(1.3, "times the time of the remaining products", SLOW_ARGUMENTS)
    best_product_factor = Factor(0.7, "times that, at best", SLOW_ARGUMENTS)
    worst_product_factor = Factor(3.5, "times that, at worst", SLOW_ARGUMENTS)
    added_share = Factor(0.02, "of the time is added for the extra pass", SLOW_ARGUMENTS)
    best_added_share = Factor(0.0, "of that time, at best", SLOW_ARGUMENTS)
    worst_added_share = Factor(0.1, "of that time, at worst", SLOW_ARGUMENTS)

    fix = (
        "Apply a 1-D filter along each dimension, if the filter is their product, as Gaussian, box "
        "and mean filters are. Results differ by rounding. Apply a large filter that is "
        "not such a product by FFT: multiply torch.fft.rfft2 of image and filter, both padded "
        "with zeros."
    )
    code = (
        "c = x.shape[1]                          # line: the 1-D filter, k weights\n"
        "row = line.expand(c, 1, 1, k)\n"
        "x = F.conv2d(x, row, padding=(0, k // 2), groups=c)\n"
        "x = F.conv2d(x, row.mT, padding=(k // 2, 0), groups=c)   # in 3-D a third"
    )
    verify = "Record again: filters have one dimension. Compare the results."
    falsified_by = "a filter that is not a product of 1-D filters, such as a disk or a measured one"
    assumptions = ("the filter is separable, as Gaussian, box and mean filters are",)
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        for filter_ in self._find_filters(a):
            rows = np.array([*filter_.forward, *filter_.backward])
            ns = time_of_operators(a, rows)
            if ns < self.min_share * a.span_ns:
                continue
            sizes = filter_.weight[2:]
            product_share = sum(sizes) / prod(sizes)
            factors = (
                (self.added_share, self.product_factor),
                (self.best_added_share, self.best_product_factor),
                (self.worst_added_share, self.worst_product_factor),
            )
            saved = [
                ns * max(0.0, 1 - added_share - product_factor * product_share)
                for added_share, product_factor in factors
            ]
            size = " × ".join(map(str, sizes))
            backward = " With its backward pass this" if filter_.backward else " This"
            yield Finding(
                summary=(
                    f"A filter of {size} points that nothing trains is applied as one "
                    f"convolution.{backward} takes {of_step(a, ns)}. One pass per dimension "
                    f"computes {product_share:.0%} of the products."
                ),
                evidence=[
                    amount_per_step(a, "time of these convolutions", ns),
                    amount_per_step(
                        a, "calls of these convolutions", len(filter_.forward), "count"
                    ),
                    self.compare(
                        "points of the filter along a dimension", min(sizes), self._size_limit(a)
                    ),
                    self.compare_share(a, "time of these convolutions", ns),
                ],
                where=_find_places(a, filter_),
                edits=[scale_operators(a, rows, saved)],
            )

    @staticmethod
    def _size_limit(a: Analysis) -> str:
        return "min_size_on_cpu" if a.device_id is None else "min_size"

    def _find_filters(self, a: Analysis) -> list[FilterUse]:
        """Return the large filters that are not trained, by shape."""
        channels = self.max_channels if (a.forward_op >= 0).any() else 1
        min_size = getattr(self, self._size_limit(a))
        filters: dict[Shape, FilterUse] = {}
        for name, x, rows in calls_by_inputs(a, CONVOLUTIONS):
            weight = _parse_filter(name, x)
            if weight is None or weight[0] > channels:
                continue
            if min(weight[2:]) < min_size:
                continue
            filter_ = filters.setdefault(weight, FilterUse(weight, [], []))
            (filter_.backward if name == BACKWARD else filter_.forward).extend(rows.tolist())
        trained = _find_trained_shapes(a) if filters else set()
        return [one for one in filters.values() if one.forward and one.weight not in trained]

    @staticmethod
    def examples() -> Examples:
        return {
            "a displacement field": _build_filter(trains=False),
            "in a loss": _build_filter(mask="[True, False, False]"),
            "of three channels, on a GPU": _build_filter(
                3, 11, gpu="A100", mask="[True, False, False]"
            ),
            "trained": (_build_filter(mask="[True, True, False]"), "convolution.output_mask[1]"),
            "three channels without training": (
                _build_filter(3, trains=False),
                "weight[0] > channels",
            ),
            "a layer of a network": (_build_filter(64), "weight[0] > channels"),
            "a bank of filters": (_build_filter(1, outer=8), "weight is None"),
            "small": (_build_filter(size=13), "min_size_on_cpu"),
            "small, on a GPU": (_build_filter(size=7, gpu="A100"), "min_size"),
            "hardly any time": (_build_filter(us=20), "min_share"),
        }


def _parse_filter(name: str, x: OpInputs) -> Shape | None:
    """Return the shape of a per-channel filter, or ``None`` for other convolutions and for strides
    above 1."""
    data, weight = (x.tensor(position + (name == BACKWARD)) for position in (0, 1))
    if data is None or weight is None:
        return None
    dimensions = len(weight.shape) - 2
    if dimensions < 2 or weight.shape[1] != 1 or len(data.shape) <= dimensions:
        return None
    stride = x.integers(4 if name == BACKWARD else 3)
    is_per_channel = weight.shape[0] == data.shape[-dimensions - 1]
    return weight.shape if is_per_channel and set(stride or [1]) == {1} else None


def _find_trained_shapes(a: Analysis) -> set[Shape]:
    """Return shapes of tensors that are or may be trained."""
    shapes: set[Shape] = set()
    for name, x, _ in calls_by_inputs(a, TRAINING_OPS):
        convolution = parse_convolution(name, x) if name == BACKWARD else None
        if convolution is None or convolution.output_mask[1]:
            shapes.update(tensor.shape for tensor in x.tensors)
    return shapes


def _find_places(a: Analysis, filter_: FilterUse) -> list[Location]:
    """Return the places of the calls. If the window has no stacks, sampled stacks outside
    ``nn.Conv2d`` give the first place."""
    places = costliest_places(a, np.array(filter_.forward))
    if a.run_steps is None or any(place.file for place in places):
        return places
    called = f"conv{len(filter_.weight) - 2}d"
    line = hottest_line(
        [
            stack
            for stack in a.run_steps.stacks
            if stack.called.endswith(called) and "_conv_forward" not in stack.frames[-1]
        ]
    )
    return places if line is None else [line.location, *places]


def _build_filter(
    channels: int = 1,
    size: int = 21,
    *,
    outer: int = 0,
    gpu: str | None = None,
    mask: str = "",
    trains: bool = True,
    us: float = 3000,
) -> TraceBuilder:
    """Build steps with a filter on images and a layer of a network."""
    b = TraceBuilder(gpu=gpu)
    data, weight = [8, channels, 128, 128], [outer or channels, 1, size, size]
    pad = f"[{size // 2}, {size // 2}]"

    for number in b.steps():
        scalars: list[list[int]] = [[]] * 5
        concrete = ["", "", "", "[1, 1]", pad, "[1, 1]", "1"]
        b.compute("aten::conv2d", us, [data, weight, *scalars], concrete=concrete)
        sequence: dict[str, Any] = {"sequence": 10 * number} if trains else {}
        b.compute("aten::linear", 9000, [[64, 512], [512, 512], []], **sequence)
        if mask:
            concrete = ["", "", "", "[0]", "[1, 1]", pad, "[1, 1]", "False", "[0, 0]", "1", mask]
            b.compute(BACKWARD, 2 * us, [data, data, weight, *([[]] * 8)], concrete=concrete)
        if trains:
            b.compute(f"{NODE_PREFIX}AddmmBackward0", 9000, [], **sequence)
        b.sync()
    return b
