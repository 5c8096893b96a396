"""Operators and kernels that compute in double precision."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select, SkippedCheck
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import measure_inclusive_time, measure_self_time
from advisor.measure.host.stacks import is_operator
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import amount_per_step, costliest_places, of_step, scale_edit
from advisor.rules.support.kernel_work import (
    compute_mask,
    exact_pattern,
    family_mask,
    kernel_locations,
    select_kernels,
    summed_duration,
)
from advisor.testing import Examples, TraceBuilder


class DoublePrecision(Rule):
    """Operators take doubles (float64). NumPy's arrays are doubles by default, and
    ``model.double()`` or ``torch.set_default_dtype`` turn a model's weights into doubles. Memory
    moves twice the bytes. A CPU computes half as many doubles as floats at once. A GPU multiplies
    them as fast as floats (A100, H100), half as fast (V100) or far slower (GeForce).

    On a CPU the rule counts the self time of operators whose calls (nearly) all have double inputs.
    Matrix products among them must take enough of the step. On a GPU it counts the time of kernels
    whose largest input holds doubles. Where inputs are not recorded, the kernel's name gives the
    type of its elements. In float32 they take about half the time: 0.4 to 0.75, depending on how
    much is arithmetic, memory or overhead. Products on a GPU scale with the ratio of the peaks in
    float64 and float32. TF32 is a separate fix, and is left out."""

    id = "double-precision"
    title = "The step computes in double precision (float64)"
    validation_note = (
        "CPU recordings, torch 2.13: two layers on a NumPy array, steps of 21 ms in float64 and "
        "8.8 ms in float32; silent in float32. Mask generation in BF16 on an A100: masks are "
        "resized, compared and indexed as doubles, 87 of 499 ms"
    )
    found_in = (
        "recorded/float64.slow",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    silent_in = SILENT_INPUTS
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.set_default_dtype.html",)

    min_share = Threshold(
        0.10,
        "of the step in work on doubles (on a CPU in products); twice XProf's for input",
        XPROF,
    )
    min_double_share = Threshold(0.9, "of an operator's time with double inputs", CHOSEN)
    factor = Factor(0.5, "of the time in float32: half the bytes, twice the rate", CHOSEN)
    best_factor, worst_factor = (
        Factor(0.4, "of the time in float32, where caches hold twice as much", CHOSEN),
        Factor(0.75, "of the time in float32, where overhead is half of it", CHOSEN),
    )

    best_product_factor = Factor(0.75, "of a product's time in float32, on a GPU, at best", CHOSEN)
    worst_product_factor = Factor(
        1.5, "of that time, at worst, but no more than in float64", CHOSEN
    )

    fix = (
        "Convert data and model to float32; check that accuracy holds. NumPy's arrays are float64 "
        "by default. Keep float64 where the result needs it, such as sums over many values."
    )
    code = (
        "x = torch.as_tensor(array, dtype=torch.float32)  # where the array is made\n"
        "model = model.float()"
    )
    verify = "Record again: operators have inputs of type float."
    falsified_by = "the same step time in float32"
    assumptions = ("float32 is accurate enough for this model",)
    confidence = 0.85
    cases = {
        "tensors outside the model": {
            "title": "Tensors outside the model are doubles (float64)",
            "fix": "Convert these tensors, such as those that {op} takes, to float32 where they "
            "are made; check that accuracy holds. Leave the model as it is: its products use "
            "another type. NumPy's arrays are float64 by default.",
            "code": "# where the doubles are made; not the model\n"
            "x = torch.as_tensor(array, dtype=torch.float32)\n"
            "mask = mask.to(torch.float32)",
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is not None:
            yield from self._check_gpu(a)
            return
        if not a.trains_on_host or not a.span_ns:
            return
        if a.trace.inputs.is_empty():
            if a.trace.cpu["name"].cast(pl.String).is_in(_DOUBLE_PRODUCTS).any():
                yield SkippedCheck(
                    what="double precision",
                    why="no input shapes and types",
                    missing="no shapes",
                    record="record_shapes=True",
                )
            return
        table = _measure_operators(a)
        double = (
            table.group_by("name")
            .agg(pl.col("ns").sum(), pl.col("ns").filter("double").sum().alias("own"))
            .filter((pl.col("own") >= self.min_double_share * pl.col("ns")) & (pl.col("own") > 0))
        )
        products = table.filter(pl.col("double") & pl.col("name").is_in(_DOUBLE_PRODUCTS))
        ns = int(products["ns"].sum())
        if ns < self.min_share * a.span_ns:
            return
        rows = products["row"].to_numpy()
        yield Finding(
            summary=f"Matrix products and convolutions of doubles take {of_step(a, ns)}.",
            evidence=[
                amount_per_step(a, "products of doubles", ns),
                self.compare_share(a, "products of doubles", ns),
                amount_per_step(a, "all operators on doubles", int(double["own"].sum())),
            ],
            where=costliest_places(a, rows, products["ns"].to_numpy()),
            edits=[
                scale_edit(
                    Select(on="host", kind=("op",), name=exact_pattern(double["name"].to_list())),
                    *self.range_of("factor"),
                )
            ],
        )

    def _check_gpu(self, a: Analysis) -> Outcomes:
        """Report kernels on doubles: those of matrix products, and those of other operators."""
        if not a.span_ns:
            return
        double = compute_mask(a) & _find_double_kernels(a)
        products = double & family_mask(a, "gemm", "convolution")
        ns = summed_duration(a, double)
        if ns < self.min_share * a.span_ns:
            return
        gpu = a.hardware
        peaks = (None, None) if gpu is None else (gpu.peak("fp64"), gpu.peak("fp32"))
        ratio = min(1.0, peaks[0] / peaks[1]) if peaks[0] and peaks[1] else self.factor
        edits = []
        for rows, factors in (
            (
                products,
                (
                    ratio,
                    self.best_product_factor * ratio,
                    min(1.0, self.worst_product_factor * ratio),
                ),
            ),
            (double & ~products, self.range_of("factor")),
        ):
            names = a.trace.gpu["name"].gather(np.flatnonzero(rows)).cast(pl.String).unique()
            if names.len():
                edits.append(scale_edit(select_kernels(names.to_list()), *factors))
        product_evidence = [
            amount_per_step(a, "matrix products of doubles", summed_duration(a, products)),
            Evidence("peak in FP64", peaks[0], "FLOP/s"),
            Evidence("peak in FP32", peaks[1], "FLOP/s"),
        ] * bool(products.any())
        where = kernel_locations(a, double)
        op = where[0].op if where and where[0].op else ""
        longest = f", longest in {op}" if op else ""
        products_ns = summed_duration(a, products)
        if ratio == 1 and products_ns:
            longest += f"; {t.format_duration(products_ns / a.step_count)} of it are products, "
            longest += "as fast in float64 as in float32 on this GPU"
        all_products = compute_mask(a) & family_mask(a, "gemm", "convolution")
        is_model_double = summed_duration(a, products) >= MIN_MODEL_SHARE * summed_duration(
            a, all_products
        )
        is_outside_model = not is_model_double and all_products.any()
        yield Finding(
            summary=f"Kernels on doubles (float64) take {of_step(a, ns)}{longest}.",
            evidence=[
                amount_per_step(a, "kernels on doubles", ns),
                self.compare_share(a, "kernels on doubles", ns),
                *product_evidence,
            ],
            where=where,
            edits=edits,
            **(
                self.case("tensors outside the model", op=op or "these kernels")
                if is_outside_model
                else {}
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a model of doubles": _build_products("double"),
            "a model of floats": (_build_products("float"), "ns < self.min_share * a.span_ns"),
            "a few doubles": (_build_products("double", us=100, other_us=6000), "min_share"),
            "on a GPU": _build_products("double", gpu="A100"),
            "masks of doubles on a GPU": _build_masks(_DOUBLE_KERNEL, "double"),
            "doubles by the kernel's name": _build_masks(_DOUBLE_KERNEL, None),
            "a scalar that is a double": (
                _build_masks("void resize<float>(int, double, float const*)", None),
                "ns < self.min_share * a.span_ns",
            ),
            "floats on a GPU": (
                _build_products("float", gpu="A100"),
                "ns < self.min_share * a.span_ns",
            ),
        }


MIN_MODEL_SHARE = 0.5
"""Minimum share of the products' time on doubles at which the model itself counts as double."""
_DOUBLE_TEMPLATE = r"^[^(]*(?:\(anonymous namespace\)[^(]*)*<[^(]*\bdouble\b"
"""A kernel's template arguments with a double among them. Types after those may belong to
scalars."""
_DOUBLE_PRODUCTS = [
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_addmm_activation"),
        *("mkldnn_convolution", "_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv3d"),
        *("convolution_backward", "thnn_conv2d", "_thnn_fused_lstm_cell"),
    )
]


def _measure_operators(a: Analysis) -> pl.DataFrame:
    """Return operators that run in the analysed steps: ``row``, ``name``, self time ``ns``,
    ``double`` (whether an input holds doubles)."""
    cpu, inclusive = a.trace.cpu, measure_inclusive_time(a)
    rows = np.flatnonzero(is_operator(a.trace) & (inclusive > 0))
    doubles = a.trace.inputs["types"].str.contains('"double"', literal=True)
    inputs = cpu["inputs"].gather(rows)
    return pl.DataFrame(
        {
            "row": rows,
            "name": cpu["name"].gather(rows).cast(pl.String),
            "ns": np.maximum(measure_self_time(a, inclusive)[rows], 0).astype(np.int64),
            "double": doubles.gather(inputs).fill_null(False),
        }
    )


def _find_double_kernels(a: Analysis) -> np.ndarray:
    """Return a mask of ``trace.gpu``: kernels of operators whose largest input holds doubles.
    Without recorded inputs, the type in their names decides."""
    inputs = a.trace.cpu["inputs"].gather(a.kernels["op_row"])
    double = np.zeros(a.trace.inputs.height + 1, dtype=bool)
    # a loop over distinct input descriptions, not over events
    for row in inputs.drop_nulls().unique().to_list():
        tensors = inputs_at(a, row).tensors
        if tensors:
            largest = max(tensors, key=lambda tensor: tensor.elements)
            double[row] = largest.elements > 1 and largest.dtype == "double"
    result: np.ndarray = double[inputs.fill_null(-1).to_numpy()]
    is_named_double = (
        inputs.is_null() & (a.kernels["dtype"] == "fp64").fill_null(False)
    ).to_numpy()
    is_named_double &= (
        family_mask(a, "gemm", "convolution")
        | name_matches(a.trace.gpu["name"], _DOUBLE_TEMPLATE).to_numpy()
    )
    return np.asarray(result | is_named_double, dtype=bool)


_DOUBLE_KERNEL = "void (anonymous namespace)::upsample_bilinear2d_out_frame<double>(int, double)"


def _build_masks(kernel: str, dtype: str | None) -> TraceBuilder:
    b = TraceBuilder("A100")
    shape = None if dtype is None else [[64, 1, 256, 256]]
    for _ in b.steps():
        b.run("aten::upsample_bilinear2d", kernel, 3000, shape, dtype or "float")
        b.product(3000, wait=True)
    return b


def _build_products(
    dtype: str, *, us: float = 3000, other_us: float = 2000, gpu: str | None = None
) -> TraceBuilder:
    b = TraceBuilder(gpu)
    for _ in b.steps():
        with b.op("aten::mm", [[128, 600], [600, 1200]], dtype, host_us=us):
            if gpu is not None:
                b.launch(f"ampere_{dtype[0]}gemm_128x64_nn", us)
        if gpu is not None:
            with b.op("aten::tanh", [[128, 1200]], dtype):
                b.launch("void at::native::vectorized_elementwise_kernel<2>", us)
            b.sync()
        b.on_host("aten::relu", other_us)
    return b
