"""Long one-dimensional filters that are applied directly, without a Fourier transform."""

from math import log2, prod
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at, next_fast_length
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.stacks import NODE_PREFIX
from advisor.rules.support.citations import CHOSEN, PEAKS, SILENT_INPUTS, SLOW_ARGUMENTS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.testing import Examples, TraceBuilder

CONVOLUTION = "aten::conv1d"
TRANSFORM_BYTES = 48
"""Bytes that a transform moves per value on a GPU: a value is read and written in three passes."""


class FilterCall(NamedTuple):
    """A call of ``conv1d`` in which each channel has filters of its own."""

    taps: int
    length: int
    """Number of values of the input, padding included."""
    transforms: int
    """Number of sequences to transform: inputs, filters and outputs."""

    @property
    def padded_length(self) -> int:
        """Length of the transforms: no value wraps around to another."""
        return next_fast_length(self.length)


class LongFilter(Rule):
    """A one-dimensional convolution with a long filter for each channel takes time in proportion to
    the product of both lengths. Examples are reverberation by a room's response, matched filters,
    smoothing over long windows, and long convolutions of sequence models. By Fourier transforms it
    takes time in proportion to the input's length and its logarithm.

    The rule looks for ``conv1d`` with a stride of one and one input channel per group. The result
    is the same to rounding, in FP32 at least. Several channels per group need products of all pairs
    of channels in the frequency domain, and gain less; they are left out.

    The time that remains is estimated from the number and length of the transforms."""

    id = "long-filter"
    title = "A convolution applies long filters directly"
    found_in = ("recorded/reverb.slow",)
    silent_in = SILENT_INPUTS
    validation_note = "a CPU recording, torch 2.13, and its cure"
    references = (
        "https://docs.pytorch.org/audio/stable/generated/torchaudio.functional.fftconvolve.html",
    )

    min_taps = Threshold(256, "taps: shorter filters are as fast directly", SLOW_ARGUMENTS)
    min_share = Threshold(0.05, "of the step that transforms would save", XPROF)
    transform_ns = Factor(0.1, "ns times n log2 n per transform, on a CPU", SLOW_ARGUMENTS)
    best_transform_ns = Factor(0.05, "ns, at best", SLOW_ARGUMENTS)
    worst_transform_ns = Factor(0.4, "ns, at worst", SLOW_ARGUMENTS)
    bandwidth_share = Factor(0.5, "of the memory bandwidth for transforms on a GPU", PEAKS)
    worst_bandwidth_share = Factor(0.15, "of it, at worst", CHOSEN)

    fix = (
        "Convolve by Fourier transforms: torchaudio.functional.fftconvolve, or the product of both "
        "spectra."
    )
    code = (
        "# taps: the weight of conv1d, flipped: weight.flip(-1)\n"
        "# With n values or more, no value wraps around.\n"
        "n = x.shape[-1] + taps.shape[-1] - 1\n"
        "spectrum = torch.fft.rfft(x, n) * torch.fft.rfft(taps, n)\n"
        "# The slice stands for padding of conv1d on the left only.\n"
        "y = torch.fft.irfft(spectrum, n)[..., :x.shape[-1]]"
    )
    verify = "Record again: the convolution is gone, and the result is the same to rounding."
    falsified_by = "filters that are short in fact: most of their taps are zero"
    assumptions = ("rounding errors of FP32 transforms do not matter",)
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        table = outermost_in_steps(a).filter(pl.col("name") == CONVOLUTION).drop_nulls("inputs")
        filters: dict[int, FilterCall] = {}
        for row, inputs in table.select("row", "inputs").iter_rows():
            call = _parse_filter(inputs_at(a, inputs))
            if call is not None and call.taps >= self.min_taps:
                filters[row] = call
        if not filters:
            return
        forward_rows = np.array(sorted(filters))
        rows, backward_rows = with_backward(a, forward_rows)
        ns = time_of_operators(a, rows)
        passes = 1 + 2 * len(backward_rows) / len(forward_rows)
        left = self._estimate_transforms(a, list(filters.values()), passes)
        if left is None:
            return
        saved = tuple(max(0.0, ns - each) for each in left)
        if saved[0] < self.min_share * a.span_ns:
            return
        longest = max(filters.values(), key=lambda each: each.taps)
        yield Finding(
            summary=(
                f"conv1d applies filters of {longest.taps:,} taps to {longest.length:,} values, "
                f"which takes {of_step(a, ns)}."
            ),
            evidence=[
                self.compare("taps of the longest filter", longest.taps, "min_taps", "count"),
                amount_per_step(a, "convolutions with long filters", len(forward_rows), "count"),
                amount_per_step(a, "time of the convolutions", ns),
                self.compare_share(a, "time that transforms would save", saved[0]),
            ],
            where=costliest_places(a, forward_rows),
            edits=[scale_operators(a, rows, saved)],
        )

    def _estimate_transforms(
        self, a: Analysis, filters: list[FilterCall], passes: float
    ) -> tuple[float, float, float] | None:
        """Return the time of the transforms instead, expected, at best and at worst, ns. ``None``
        on a GPU of unknown bandwidth."""
        if a.device_id is None:
            work = sum(f.transforms * f.padded_length * log2(f.padded_length) for f in filters)
            factors = self.transform_ns, self.best_transform_ns, self.worst_transform_ns
            expected, best, worst = (passes * work * factor for factor in factors)
            return expected, best, worst
        if a.hardware is None or not a.hardware.bandwidth:
            return None
        moved = sum(f.transforms * f.padded_length * TRANSFORM_BYTES for f in filters)
        ns = passes * moved / a.hardware.bandwidth * 1e9
        return ns / self.bandwidth_share, ns, ns / self.worst_bandwidth_share

    @staticmethod
    def examples() -> Examples:
        return {
            "reverberation": _build_training(),
            "on a GPU": _build_training(gpu="A100"),
            "a long convolution of a model": _build_training(trains=True),
            "short filters": (_build_training(taps=64), "not filters"),
            "filters of many channels": (_build_training(channels=8), "not filters"),
            "a stride": (_build_training(stride=64), "not filters"),
            "hardly any time": (_build_training(us=3_200), "min_share"),
        }


def _parse_filter(x: OpInputs) -> FilterCall | None:
    """Return the filter of a call, or ``None`` if channels are mixed or the stride is not one."""
    signal, weight = x.tensor(0), x.tensor(1)
    if signal is None or weight is None or len(weight.shape) != 3 or not signal.shape:
        return None
    if weight.shape[1] != 1 or x.integers(3) != [1] or x.integers(5) != [1]:
        return None
    outputs, _, taps = weight.shape
    padding = x.integers(4)
    length = signal.shape[-1] + 2 * (padding[0] if padding else 0)
    sequences = prod(signal.shape[:-1])
    batch = signal.shape[0] if len(signal.shape) > 2 else 1
    return FilterCall(taps, length, sequences + outputs + batch * outputs)


def _build_training(
    *,
    gpu: str | None = None,
    taps: int = 4000,
    channels: int = 1,
    stride: int = 1,
    us: float = 20_000,
    trains: bool = False,
) -> TraceBuilder:
    """Build steps that convolve 32 waveforms of a second with filters of their own."""
    b = TraceBuilder(gpu=gpu)
    for number in b.steps():
        options: dict[str, Any] = {"sequence": number} if trains else {}
        shapes = [[1, 32, 20_000], [32, channels, taps], [], [], [], [], []]
        concrete = ["", "", "", f"[{stride}]", "[0]", "[1]", "32"]
        b.compute(CONVOLUTION, us, shapes, concrete=concrete, **options)
        b.compute("aten::conv2d", 10_000, [[32, 1, 40, 100], [16, 1, 3, 3]])
        if trains:
            b.compute(f"{NODE_PREFIX}ConvolutionBackward0", 2 * us, [], sequence=number)
        b.on_host("aten::gelu", 300)
        b.sync()
    return b
