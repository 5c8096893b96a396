"""Convolutions that run far below the attainable rate, and cuDNN's search when it is off."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes, impact_without_gain
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.matmuls import parse_convolution
from advisor.measure.device.shapes import OpInputs
from advisor.measure.host.operators import operator_mask
from advisor.rules.support import kernel_work
from advisor.rules.support.below_rate import ON_ROCM, BelowRate, SlowCause
from advisor.rules.support.citations import CHOSEN, RATES, TRACELENS, TRIED_ON_TRACES
from advisor.rules.support.common import example_steps, run_steps_of, shapes_by_step
from advisor.testing import Examples, TraceBuilder

SEARCH = "a search in the library"
_ORDER_FIX = "Keep model and inputs in channels-last order"
_ORDER_CODE = (
    "model = model.to(memory_format=torch.channels_last)\n"
    "x = x.to(memory_format=torch.channels_last)"
)
_TIMED = "torch.backends.cudnn.benchmark = True   # before the first step"
BENCHMARK = "cudnn.benchmark"
"""Name of the setting, which a report mentions only once."""
SETTINGS = {
    (False, False): "neither is set",
    (True, False): "algorithms are already timed",
    (False, True): "already in channels-last order",
    (True, True): "both are set",
}
"""Case by whether cudnn.benchmark is on and whether tensors are in channels-last order."""
VECTOR_KERNELS = re.compile(r"_dot2_|naive_conv|implicit_convolve_sgemm|Sp3AsmConv")
"""Kernels of MIOpen and cuDNN that multiply on the vector units."""


class SlowConvolution(BelowRate):
    """A convolution reaches only a small part of the device's rate. The kernel does not use matrix
    units, channels do not fill a tile, or groups have few channels. Or the library picked the
    algorithm by heuristics instead of timing.

    The rule compares each operator's time, transposes inside it included, with the longer of two
    times. One is for its FLOPs (as a direct convolution) at the rate measured for matrix products
    on such a GPU. The other is for its bytes at the memory's rate. Good convolutions reach half of
    that or more. Depthwise convolutions are memory-bound and compared with the memory's rate.
    Another rule reports convolutions in full FP32 that tensor cores could do."""

    id = "slow-convolution"
    title = "Convolutions run far below the GPU's rate"
    found_in = ("traces/mi300x_kernels_after_steps",)
    silent_in = ("traces/pairs/sam_2_fp32_few_syncs",)
    knobs = ("cudnn-benchmark", "channels-last")
    validation_note = (
        "MI300X training: fires on a gradient of a 1 x 1 convolution in FP16 on a kernel without "
        "matrix cores. It takes 29 times 1 ms for work of microseconds"
    )
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/",
        "https://pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        "https://rocm.docs.amd.com/projects/MIOpen/en/latest/how-to/find-and-immediate.html",
    )

    max_efficiency = Threshold(
        0.25, "of the attainable rate: half of what products reach", RATES, TRIED_ON_TRACES
    )
    attained_share = Factor(
        0.45, "of the attainable rate, that another algorithm reaches", TRIED_ON_TRACES
    )
    best_attained_share = Factor(0.7, "of the attainable rate, at best", TRIED_ON_TRACES)
    worst_attained_share = Factor(
        0.25, "of the attainable rate, at worst: no more than what counts as slow", TRIED_ON_TRACES
    )

    max_transpose_share = Threshold(
        0.10,
        "of convolution time in transposes; another rule fixes those with the order of tensors",
        TRACELENS,
    )

    families = ("convolution",)
    _work = "convolutions"
    _matrix_work = True

    fix = f"{_ORDER_FIX}, and let the library time its algorithms once per shape."
    code = f"{_ORDER_CODE}\n{_TIMED}"
    verify = "Profile again: another kernel, and more of the attainable rate."
    falsified_by = "no faster algorithm among those that the library times at this shape"
    cases = {
        SEARCH: {
            "assumptions": (
                "the library has a faster algorithm for these shapes. The estimate is the "
                "geometric mean of what {worst_attained_share:.0%} and {best_attained_share:.0%} "
                "of the attainable rate save",
            )
        },
        "channels are not multiples of 8": {
            "fix": "Pad channels to a multiple of 8 (an image's 3 to 4 or 8), with the layers that "
            "read or produce them.",
            "code": "# an image's 3 channels, and the first layer\n"
            "x = F.pad(x, (0, 0, 0, 0, 0, 8 - x.shape[1]))\n"
            "self.first = nn.Conv2d(8, width, kernel_size=3, padding=1)",
        },
        ON_ROCM: {
            "code": "# shell: export MIOPEN_FIND_MODE=1 MIOPEN_FIND_ENFORCE=3   # searches, slow "
            "once\n# shell: export PYTORCH_MIOPEN_SUGGEST_NHWC=1"
        },
        "neither is set": {"fix": fix, "code": code},
        "algorithms are already timed": {"fix": f"{_ORDER_FIX}.", "code": _ORDER_CODE},
        "already in channels-last order": {
            "fix": "Let the library time its algorithms once per shape.",
            "code": _TIMED,
        },
        "both are set": {"fix": "", "code": ""},
    }

    def _name_other(self, a: Analysis, slow: pl.DataFrame) -> str:
        transposes, _ = kernel_work.transposes_and_convolutions(a)
        return ", with the transposes in them," * bool((operator_mask(a, slow) & transposes).any())

    def _advise(self, cases: Sequence[str]) -> dict[str, Any]:
        advice = super()._advise(cases)
        return {**advice, "alternatives": BENCHMARK} if _TIMED in advice["code"] else advice

    def _find_causes(
        self, a: Analysis, worst: dict[str, Any], inputs: OpInputs | None
    ) -> list[SlowCause]:
        shape = None if inputs is None else parse_convolution(worst["op"], inputs)
        amd = a.trace.meta.vendor == "amd"
        causes = []
        on_vector_units = (
            worst["tensor_core"] is False or VECTOR_KERNELS.search(str(worst["kernel"])) is not None
        )
        if on_vector_units and worst["dtype"] in ("fp16", "bf16", "tf32"):
            units = "matrix cores" if amd else "tensor cores"
            causes.append(
                SlowCause(f"its {worst['dtype'].upper()} kernel does not use the {units}")
            )
        if shape is not None:
            channels, group_channels = shape.input.shape[1], shape.weight.shape[1]
            out_channels = shape.weight.shape[0]
            if channels > group_channels and out_channels != channels:
                causes.append(
                    SlowCause(
                        f"{channels // max(group_channels, 1)} groups of {group_channels} channels"
                    )
                )
            elif channels > group_channels:
                causes.append(SlowCause(f"depthwise over {channels} channels"))
            elif channels % 8 or out_channels % 8:
                unaligned = [size for size in (channels, out_channels) if size % 8]
                verb = "is not a multiple" if len(unaligned) == 1 else "are not multiples"
                text = f"channels: {' and '.join(map(str, unaligned))} {verb} of 8"
                causes.append(SlowCause(text, "channels are not multiples of 8"))
        is_timed = a.run_steps is not None and a.run_steps.flag("cudnn.benchmark") is True
        constant, _, _ = _constant_shapes(a)
        is_searched = is_timed or (constant is not None and constant < MIN_CONSTANT_SHARE)
        is_ordered = inputs is not None and any(map(kernel_work.is_channels_last, inputs.tensors))
        rows = kernel_work.transposes_and_convolutions(a)
        transpose_ns, convolution_ns = (kernel_work.summed_duration(a, mask) for mask in rows)
        # another rule advises a different order for transposes
        is_ordered = is_ordered or (
            not is_timed and transpose_ns > self.max_transpose_share * convolution_ns
        )
        if not causes and not is_timed:
            text = "the library's choice of algorithm does not suit the shape"
            causes = [SlowCause(text, SEARCH, True)]
        causes = causes or [
            SlowCause("the fastest kernel that the library timed is slow", "", True)
        ]
        causes.append(SlowCause("", SETTINGS[is_searched, is_ordered]))
        return [*causes, SlowCause("", ON_ROCM)] if amd else causes

    @staticmethod
    def examples() -> Examples:
        """Return slow convolutions, and traps: at half the rate, in FP32, without arguments,
        short."""
        fast = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
        return {
            # 3.7 GFLOP: 14 us at the rate; 51 MB: 30 us
            "no tensor cores": _build_network(
                [64, 256, 28, 28], [64, 256, 1, 1], 900, "implicit_convolve_sgemm<__half, 128>"
            ),
            "a few channels": _build_network([64, 6, 224, 224], [6, 6, 3, 3], 2000),
            # 59 GFLOP: 0.22 ms
            "at half the rate": (
                _build_network([64, 256, 28, 28], [256, 256, 3, 3], 440, fast),
                "max_efficiency",
            ),
            "full FP32": (
                _build_network(
                    [64, 256, 28, 28],
                    [64, 256, 1, 1],
                    900,
                    "implicit_convolve_sgemm<float, 128>",
                    dtype="float",
                ),
                "slow.is_empty()",
            ),
            "no arguments": (
                _build_network([64, 256, 28, 28], [64, 256, 1, 1], 900, arguments=False),
                "slow.is_empty()",
            ),
            "bound by launches": (
                _build_network([1, 64, 7, 7], [64, 64, 3, 3], 12),
                "slow.is_empty()",
            ),
        }


def _build_network(
    data: list[int],
    weight: list[int],
    us: float,
    kernel: str = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x32x64",
    *,
    dtype: str = "c10::Half",
    arguments: bool = True,
) -> TraceBuilder:
    b = TraceBuilder()
    pad = weight[2] // 2
    concrete = ["", "", "", "[1, 1]", f"[{pad}, {pad}]", "[1, 1]", "False", "[0, 0]", "1"]
    for _ in b.steps():
        for _ in range(6):
            with b.op(
                "aten::convolution",
                [data, weight, [], [], [], [], [], [], []],
                [dtype, dtype, "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"],
                concrete=concrete if arguments else None,
            ):
                b.launch(kernel, us)
        b.sync()
    return b


_MIN_BATCHES, _MIN_STEPS = 10, 3
"""Minimum numbers of batches and of profiled steps that show whether shapes stay the same."""
MIN_CONSTANT_SHARE = 0.5
"""Minimum share of the steps with the most frequent shape at which cudnn.benchmark is advised.
Below it, a search for each shape costs more time."""
_CONVOLUTIONS = r"^aten::(?:cudnn_convolution|convolution_backward)"


def _constant_shapes(a: Analysis) -> tuple[float | None, str, int]:
    """Return the share with the most frequent shape, what it is a share of (recorded batches, or
    else profiled steps), and their number. The share is ``None`` if too few are known."""
    shapes, unit = np.zeros(0), "batches"
    if a.run_steps is not None:
        shapes = a.run_steps.column("shapes")
        shapes = shapes[~np.isnan(shapes)]
    if len(shapes) < _MIN_BATCHES:
        shapes, unit = shapes_by_step(a, _CONVOLUTIONS), "profiled steps"
    if len(shapes) < _MIN_STEPS:
        return None, unit, len(shapes)
    return float(np.unique(shapes, return_counts=True)[1].max() / len(shapes)), unit, len(shapes)


class CudnnBenchmarkOff(Rule):
    """Heuristics choose each convolution's algorithm while ``torch.backends.cudnn.benchmark`` is
    off (the default). When it is on, cuDNN times the candidates once for every new shape and keeps
    the fastest. That pays off if shapes stay the same and convolutions matter, and costs time if
    every batch has another shape.

    The rule fires when the switch is off and convolutions take at least 20% of the kernel time of
    the profiled window. At least 95% of the recorded batches must have one shape. If the loop has
    no DataLoader, the convolutions of the profiled steps must be the same. Only a trial shows the
    gain. Deterministic runs keep the switch off on purpose."""

    id = "cudnn-benchmark-off"
    title = "cudnn.benchmark is off"
    knobs = ("cudnn-benchmark",)
    reads_record = True
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#enable-cudnn-auto-tuner",
    )

    min_share = Threshold(0.20, "of kernel time in convolutions", CHOSEN)
    min_constant = Threshold(0.95, "of the batches have the most frequent shape", CHOSEN)

    fix = "Set cudnn.benchmark before the first step, and drop a last batch of a different size."
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "all have one shape": {
            "fix": "Set cudnn.benchmark before the first step.",
            "code": "torch.backends.cudnn.benchmark = True",
        }
    }
    alternatives = BENCHMARK
    code = (
        "torch.backends.cudnn.benchmark = True\n"
        "loader = DataLoader(..., drop_last=True)   # keep your other arguments"
    )
    verify = "Compare the median step, without the slower first steps."
    falsified_by = "a median step that is no shorter with cudnn.benchmark"
    confidence = 0.6

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if run_steps.flag("cudnn.benchmark") is not False or a.device_id is None:
            return
        if run_steps.flag("cudnn.deterministic") or run_steps.flag("deterministic_algorithms"):
            return
        kernels = kernel_work.kernel_mask(a)
        total = kernel_work.summed_duration(a, kernels)
        share = kernel_work.summed_duration(
            a, kernels & kernel_work.family_mask(a, "convolution")
        ) / max(total, 1)
        constant_share, unit, count = _constant_shapes(a)
        if share < self.min_share or constant_share is None:
            return
        if constant_share < self.min_constant:
            return
        yield Finding(
            summary=(
                f"Convolutions take {share:.0%} of kernel time. cudnn.benchmark is off although "
                f"{constant_share:.0%} of the {unit} have one shape."
            ),
            evidence=[
                self.compare("convolutions, share of kernel time", share, "min_share"),
                self.compare(f"{unit} of one shape", constant_share, "min_constant"),
                Evidence("cudnn.benchmark", "False"),
                Evidence(unit, count, "count"),
            ],
            impact=impact_without_gain("only a trial shows the fastest algorithm"),
            **(self.case("all have one shape") if constant_share == 1 else {}),
        )

    @staticmethod
    def examples() -> Examples:
        switch = "run_steps.flag('cudnn.benchmark') is not False"
        deterministic: dict[str, object] = {"cudnn.benchmark": False, "cudnn.deterministic": True}
        return {
            "one shape": _build_run(),
            "on": (_build_run({"cudnn.benchmark": True}), switch),
            "shapes that change": (_build_run(kinds=5), "min_constant"),
            "no convolutions": (
                _build_run(kernel="ampere_sgemm_128x64_nn", op="aten::mm"),
                "share < self.min_share",
            ),
            "deterministic": (_build_run(deterministic), "run_steps.flag('cudnn.deterministic')"),
            "not recorded": (_build_run({}), switch),
        }


def _build_run(
    flags: dict[str, object] | None = None,
    *,
    kinds: int = 1,
    kernel: str = "cudnn_ampere_scudnn_128x64_relu_medium_nn_v1",
    op: str = "aten::cudnn_convolution",
) -> TraceBuilder:
    shapes = [[32, 64, 56, 56], [64, 64, 3, 3]]
    b = example_steps(lambda b: b.run(op, kernel, 3000, shapes))
    r = b.record_of_run(flags={"cudnn.benchmark": False} if flags is None else flags)
    for n in range(60):
        r.step(10, fields={"shapes": n % kinds})
    return b
