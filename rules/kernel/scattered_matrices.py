"""Batched products that copy matrices whose elements are scattered in memory."""

import numpy as np

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import calls_by_inputs
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, XPROF
from advisor.rules.support.common import amount_per_step, costliest_places, of_step
from advisor.rules.support.kernel_work import scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

OPERAND_POSITIONS = {"aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
"""Batched product -> positions of its two operands."""


class ScatteredMatrices(Rule):
    """A batched product has a matrix for each element of a batch, such as a frequency or a position
    with weights of its own: ``einsum("bixy,ioxy->boxy", x, weight)``. If the batch is innermost in
    memory, neighbouring elements of a matrix lie far apart. The CPU then copies each matrix before
    it multiplies, forward and backward.

    The rule finds batched products in the steps whose larger operand, usually a weight, has strides
    in rows and columns. A transposed operand is no such case, as one of its dimensions is
    contiguous.

    The gain is a share of these products' time, by measurements."""

    id = "scattered-matrices"
    title = "A batched product copies matrices that are scattered in memory"
    found_in = ("recorded/modes.slow",)
    silent_in = SILENT_INPUTS
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 1.0 ms predicted, 0.8 ms measured. Others, not "
        "in the tests: 16 ms predicted, 18 ms measured; 2.4 ms predicted, 4.0 ms measured"
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.einsum.html",)

    min_share = Threshold(0.05, "of the step that another layout saves", XPROF)
    min_batch = Threshold(16, "matrices: with fewer, copies take little time", CHOSEN)
    remaining_x = Factor(0.35, "of the time remains: 38% or less in three programs", CHOSEN)
    best_remaining_x = Factor(
        0.0, "of the time remains, at best: the gradient's layout costs less too", CHOSEN
    )
    worst_remaining_x = Factor(0.8, "of the time, at worst: the products take most of it", CHOSEN)

    fix = (
        "Store the operand with the dimensions of the batch first, and those of the matrices last. "
        "Of a weight, change the parameter's own layout, and permute it when old checkpoints are "
        "loaded."
    )
    code = (
        "# a matrix for each x, y: (x, y, in, out), not (in, out, x, y)\n"
        "weight = nn.Parameter(weight.permute(2, 3, 0, 1).contiguous())\n"
        'y = torch.einsum("bixy,xyio->boxy", x, weight)'
    )
    verify = "Record again: aten::bmm copies less, and the results are the same up to rounding."
    falsified_by = "other operators that need the present layout, and would copy instead"
    assumptions = ("the operand can be stored in the other order",)
    needs_shapes = True
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is not None or not a.span_ns:
            return
        pattern = "^(?:" + "|".join(OPERAND_POSITIONS) + ")$"
        matrices = [
            (operand, rows)
            for name, x, rows in calls_by_inputs(a, pattern)
            if (operand := _find_scattered(name, x)) is not None
            if operand.shape[0] >= self.min_batch
        ]
        if not matrices:
            return
        rows = np.concatenate([rows for _, rows in matrices])
        ns = time_of_operators(a, rows)
        saved = [ns * (1 - x) for x in (self.remaining_x, self.best_remaining_x)]
        if saved[0] < self.min_share * a.span_ns:
            return
        operand, largest = max(matrices, key=lambda each: each[0].elements)
        shape = " × ".join(f"{size:,}" for size in operand.shape)
        apart = min((operand.strides or ())[1:])
        yield Finding(
            summary=(
                f"Batched products read {shape} elements whose matrices are scattered: neighbours "
                f"lie {apart:,} elements apart. These products take {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "time of these products", ns),
                Evidence("distance of neighbours in a matrix, elements", apart, "count"),
                self.compare("matrices of a product", operand.shape[0], "min_batch", "count"),
                self.compare_share(a, "saved by another layout", saved[0]),
            ],
            where=costliest_places(a, largest, top=1),
            edits=[scale_operators(a, rows, (*saved, ns * (1 - self.worst_remaining_x)))],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a matrix for each frequency": _build_products([1, 9408, 196]),
            "contiguous matrices": (_build_products([2304, 48, 1]), "not matrices"),
            "transposed matrices": (_build_products([2304, 1, 48]), "not matrices"),
            "the smaller operand": (_build_products([1, 9408, 196], left=400), "not matrices"),
            "a few heads": (_build_products([1, 384, 8], batch=8), "min_batch"),
            "a vector for each": (_build_products([1, 196, 196], rows=1), "not matrices"),
            "on a GPU": (_build_products([1, 9408, 196], gpu="A100"), "a.device_id is not None"),
            "hardly any time": (_build_products([1, 9408, 196], us=100), "min_share"),
        }


def _find_scattered(name: str, x: OpInputs) -> Tensor | None:
    """Return the larger operand of a batched product if its matrices have no contiguous dimension.
    The smaller one may come from other operators, in whichever order they compute it."""
    operands = [operand for at in OPERAND_POSITIONS[name] if (operand := x.tensor(at)) is not None]
    if len(operands) != 2 or operands[0].elements == operands[1].elements:
        return None
    tensor = max(operands, key=lambda operand: operand.elements)
    if len(tensor.shape) != 3 or len(tensor.strides or ()) != 3 or min(tensor.shape) < 2:
        return None
    return tensor if min((tensor.strides or ())[1:]) > 1 else None


def _build_products(
    strides: list[int],
    *,
    batch: int = 196,
    left: int = 4,
    rows: int = 48,
    us: float = 3000,
    gpu: str | None = None,
) -> TraceBuilder:
    """Build steps with a batched product of ``batch`` matrices and other work."""
    b = TraceBuilder(gpu=gpu)
    shapes = [[batch, left, rows], [batch, rows, 48]]
    for _ in b.steps():
        with b.op("aten::bmm", shapes, strides=[[left * rows, rows, 1], strides]):
            b.host(us)
            if gpu:
                b.launch("gemmSN_NN_kernel", us)
        b.on_host("aten::gelu", 5000)
        b.sync()
    return b
