"""Layers of a TensorRT engine: conversions between formats, and layers in high precision."""

from typing import ClassVar

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, TENSORRT
from advisor.rules.support.common import amount_per_step, example_steps, of_step
from advisor.rules.support.framework_advice import in_any_language
from advisor.rules.support.kernel_work import (
    kernel_locations,
    kernel_mask,
    scale_kernels,
    summed_duration,
)
from advisor.testing import Examples, TraceBuilder


class EngineLayers(Rule):
    """Base of rules about layers of an engine, found by name, that another build option
    shortens."""

    references = ("https://docs.nvidia.com/deeplearning/tensorrt/latest/performance/"
                  "best-practices.html",)  # fmt: skip
    verify = "Compare the engines: advisor compare before.profile.json after.profile.json"
    _pattern: ClassVar[str]
    _layer: ClassVar[str]
    """Name of such a layer in reports."""
    min_share: Threshold[float]
    factor: Factor[float]
    """Share of their time after the change. ``best_factor`` and ``worst_factor`` are the ends of
    the range."""
    best_factor: Factor[float]
    worst_factor: Factor[float]

    def check(self, a: Analysis) -> Outcomes:
        names = a.trace.gpu["name"].cast(pl.String)
        rows = kernel_mask(a) & names.str.contains(self._pattern).to_numpy()
        ns = summed_duration(a, rows)
        if not rows.any():
            return
        if ns < self.min_share * a.span_ns:
            return
        factors = self.range_of("factor")
        yield Finding(
            summary=f"{t.count_noun(int(rows.sum()), self._layer)} take {of_step(a, ns)}.",
            evidence=[
                amount_per_step(a, f"{self._layer}s", ns),
                self.compare_share(a, f"{self._layer}s", ns),
            ],
            where=kernel_locations(a, rows),
            edits=[
                scale_kernels(
                    a, rows, ((1 - factor) * ns for factor in factors),
                    Select(on="gpu", kind=("kernel",), name=self._pattern),
                )
            ],
        )  # fmt: skip


class TensorRTReformat(EngineLayers):
    """TensorRT inserts reformat layers where neighbours need different layouts or precisions. They
    copy a tensor and compute nothing. In an int8 engine, most are next to layers that stayed in a
    higher precision.

    The rule reads layer times of ``trtexec --exportProfile``. It works best with the layer
    information, which names quantize layers that TensorRT runs as reformats. In a public pair of
    engines of one network, quantizing the residual additions left 42% of the reformat time."""

    id = "tensorrt-reformat"
    title = "Reformat layers of the TensorRT engine copy tensors"

    min_share = Threshold(0.05, "of the inference", CHOSEN)
    factor = Factor(0.42, "of the reformat time, after the additions were quantized", TENSORRT)
    best_factor = Factor(0.0, "of the reformat time, where all neighbours agree", CHOSEN)
    worst_factor = Factor(0.8, "of the reformat time, where layers keep their precision", CHOSEN)
    _layer = "reformat layer"
    _pattern = r"^Reformat(?:_\w+)? "

    fix = (
        "Let neighbours agree: quantize residual additions and pooling too (Q/DQ before them), and "
        "take inputs and outputs in the engine's format (--inputIOFormats, --outputIOFormats)."
    )
    code = (
        "trtexec --onnx=model.onnx --int8 --fp16 \\\n"
        "  --inputIOFormats=int8:chw4 --outputIOFormats=fp16:chw \\\n"
        "  --exportProfile=after.profile.json --exportLayerInfo=after.graph.json \\\n"
        "  --profilingVerbosity=detailed --separateProfileRun"
    )
    falsified_by = "an engine with fewer reformats that is as slow"
    assumptions = ("layers keep their times in the other format",)
    confidence = 0.6
    framework_advice = in_any_language(fix, code=code)

    @staticmethod
    def examples() -> Examples:
        """Return an int8 engine with a sixth of its time in reformats, and traps."""
        other = example_steps(lambda b: b.run("aten::copy_", "reformat_kernel", 4000))
        return {
            "around additions": example_steps(lambda b: _add_engine(b, "int8", 400)),
            "the input's": (example_steps(lambda b: _add_engine(b, "int8", 40)), "min_share"),
            "another program": (other, "rows.any()"),
        }


class TensorrtFp32Layers(EngineLayers):
    """Convolutions and products of a TensorRT engine run in fp32, where tensor cores do not work
    at their 16-bit or 8-bit rates.

    The rule reads the layer information of ``trtexec --exportLayerInfo`` and the layer times. The
    precision of a layer is that of its weights, or else of its first input. In public engines of
    ResNet-50 the convolutions took 0.43 (A100) and 0.34 (RTX 3090) of their time in fp16."""

    id = "tensorrt-fp32-layers"
    title = "Layers of the TensorRT engine run in fp32"

    min_share = Threshold(0.10, "of the inference", CHOSEN)
    factor = Factor(0.43, "of the time, convolutions in fp16 on an A100", TENSORRT)
    best_factor = Factor(0.34, "of the time, convolutions in fp16 on an RTX 3090", TENSORRT)
    worst_factor = Factor(0.7, "of the time, where layers are bound by memory", CHOSEN)
    _layer = "fp32 layer"
    _pattern = r"^\w*(?:Convolution|Conv|Gemm|MatrixMultiply|FullyConnected)\w*_fp32 "

    fix = "Build the engine with --fp16 (or --best, with int8 where the model is quantized)."
    code = (
        "trtexec --onnx=model.onnx --fp16 --saveEngine=fp16.engine \\\n"
        "  --exportProfile=fp16.profile.json --exportLayerInfo=fp16.graph.json \\\n"
        "  --profilingVerbosity=detailed --separateProfileRun"
    )
    falsified_by = "results outside the accuracy that the application allows"
    assumptions = ("fp16 keeps the accuracy that is needed: compare results",)
    confidence = 0.8
    framework_advice = in_any_language(fix, code=code)

    @staticmethod
    def examples() -> Examples:
        """Return an fp32 engine, and traps."""
        other = example_steps(lambda b: b.run("aten::conv2d", "implicit_convolve_sgemm", 4000))
        return {
            "no flags": example_steps(lambda b: _add_engine(b, "fp32", 0)),
            "fp16": (example_steps(lambda b: _add_engine(b, "fp16", 0)), "rows.any()"),
            "another program": (other, "rows.any()"),
        }


def _add_engine(b: TraceBuilder, precision: str, reformats: float) -> None:
    for layer in range(4):
        b.launch(f"CaskConvolution_{precision} layer{layer}.conv + relu", 500)
        if reformats:
            name = f"Reformatting CopyNode for Input Tensor 0 to layer{layer}"
            b.launch(f"Reformat_{precision} {name}", reformats / 4)
