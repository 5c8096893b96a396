"""Products and distances of all pairs that are computed by broadcasting."""

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import calls_by_inputs, readers_behind
from advisor.measure.device.shapes import OpInputs, Shape, Tensor
from advisor.measure.host.stacks import parent_rows
from advisor.rules.support.citations import CHOSEN, SILENT_INPUTS, SLOW_ARGUMENTS, XPROF
from advisor.rules.support.common import Rows, amount_per_step, costliest_places, of_step
from advisor.rules.support.kernel_work import exact_pattern, scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

SUB, MUL, COSINE = "aten::sub", "aten::mul", "aten::cosine_similarity"
OPS_BETWEEN_DIFFERENCE_AND_SUM = {
    "aten::pow": "square",
    "aten::square": "square",
    MUL: "square",
    "aten::abs": "size",
}
"""Operator between a difference and its sum -> what it computes."""
REDUCTIONS = {
    "aten::sum": ("sum", 1),
    "aten::mean": ("sum", 1),
    "aten::linalg_vector_norm": ("norm", 2),
    "aten::norm": ("norm", 2),
}
"""Reduction -> its kind, and the position of its dimensions among the arguments."""
CASES = {
    (SUB, "square", "sum"): "squared distances",
    (SUB, "size", "sum"): "absolute differences",
    (SUB, "", "norm"): "distances",
    (MUL, "", "sum"): "products",
    (COSINE, "", ""): "cosine similarities",
}
"""Operator that combines the pairs, what follows it, kind of reduction -> what is computed."""
MAX_FOLLOWING = 24
"""Number of operators after the first one in which the rule looks for readers of its result."""
PRODUCT_LEFT = (0.01, 0.005, 0.03)
ABSOLUTE_LEFT = (0.1, 0.05, 0.2)
LEFT_OVER_WIDTH = (1.0, 0.25, 4.0)
"""Shares of the time that remain (expected, at best, at worst); ``LEFT_OVER_WIDTH`` is divided by
the width and added. Sums of absolute differences have their own, because their kernel has no
products."""


class Broadcast(NamedTuple):
    """Two tensors that are both broadcast: their stored sizes, with 1 in the dimensions of the
    other."""

    first: Shape
    second: Shape
    shape: Shape
    """Shape of the tensor of all pairs."""
    bytes: int
    """Size of that tensor."""

    @property
    def shared(self) -> set[int]:
        """Dimensions that both tensors have."""
        sizes = zip(self.first, self.second, self.shape, strict=True)
        return {at for at, (x, y, both) in enumerate(sizes) if 1 < both == x == y}


class Pairs(NamedTuple):
    """Calls that combine all pairs of rows of two tensors and reduce them."""

    case: str
    pair: Broadcast
    dims: set[int]
    """Dimensions that are reduced."""
    rows: list[int]
    """Rows of ``trace.cpu`` that compute the tensor of all pairs and its sums."""

    @property
    def depth(self) -> int:
        """Number of elements summed per pair."""
        return prod(self.pair.shape[dim] for dim in self.dims)


class PairwiseBroadcast(Rule):
    """Distances or products of all pairs of rows, ``(a[:, None] - b[None]).pow(2).sum(-1)``, make a
    tensor of rows × rows × width. Each elementwise operator writes and reads all of it, and so does
    the backward pass. A matrix product gives the same sums without that tensor. Squared distances
    are ``|a|² + |b|² - 2 a·b``.

    The rule finds a difference, product or cosine similarity of two tensors that are both
    broadcast, along different dimensions. The next operators that read its result square it or take
    its absolute value, and sum over a dimension that both tensors have. Operators of the backward
    pass with a tensor of that shape count too. If anything else reads that tensor, it is needed,
    and nothing is reported.

    The remaining time was measured on one CPU thread, forward and backward: about ``1 / width`` of
    it. The bytes that the operators move suggest the same on GPUs."""

    id = "pairwise-broadcast"
    title = "All pairs are computed by broadcasting, not by a matrix product"
    found_in = ("recorded/pairs.slow",)
    silent_in = SILENT_INPUTS
    validation_note = "a CPU recording of distances to 512 codes, torch 2.13, and its cure"
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.cdist.html",)

    min_share = Threshold(0.05, "of the step in operators on that tensor", XPROF)
    min_growth = Threshold(8, "times as large as the larger of its two inputs", CHOSEN)
    min_bytes = Threshold(
        4 << 20,
        "bytes of that tensor: with smaller ones, the calls dominate the cost",
        SLOW_ARGUMENTS,
    )
    max_remaining_share = Threshold(
        0.5, "of the time remains; with more, the gain is uncertain", CHOSEN
    )

    fix = (
        "Compute the distances from a matrix product: |a|² + |b|² - 2 a·b. Results differ by "
        "rounding; keep float32, because close points lose digits."
    )
    code = (
        "# a: [..., n, d], b: [..., m, d]\n"
        "ab = a @ b.mT\n"
        "aa = a.square().sum(-1)[..., :, None]\n"
        "bb = b.square().sum(-1)[..., None, :]\n"
        "squared = (aa + bb - 2 * ab).clamp_min(0)"
    )
    verify = "Record again: no operator has a tensor of this shape. Compare the results."
    falsified_by = "other code that needs the tensor of all pairs"
    assumptions = ("nothing else reads the tensor of all pairs",)
    sampled_part = "forward"
    needs_shapes = True
    confidence = 0.85
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "squared distances": {},
        "distances": {
            "fix": "Call torch.cdist: it computes them from a matrix product. Results differ by "
            "rounding; keep float32, because close points lose digits.",
            "code": "distances = torch.cdist(a, b)   # a: [..., n, d], b: [..., m, d]",
        },
        "absolute differences": {
            "fix": "Call torch.cdist with p=1: one kernel adds up the absolute differences. For a "
            "mean, divide by the width.",
            "code": "distances = torch.cdist(a, b, p=1)   # a: [..., n, d], b: [..., m, d]",
        },
        "products": {
            "fix": "Compute them as a matrix product, with einsum over the tensors without their "
            "added dimensions. For a mean, divide by the width. Results differ by rounding.",
            "code": "{code}",
        },
        "cosine similarities": {
            "fix": "Normalise both tensors once, then compute a matrix product. Results differ by "
            "rounding.",
            "code": "# a: [..., n, d], b: [..., m, d]\n"
            "a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)\n"
            "similarity = a @ b.mT",
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        """Report the operators on each tensor of all pairs."""
        if not a.span_ns:
            return
        by_case: dict[str, list[tuple[list[Pairs], Rows, int]]] = {}
        for pairs, rows in self._find_pairs(a):
            by_case.setdefault(pairs[0].case, []).append((pairs, rows, time_of_operators(a, rows)))
        for case, group in by_case.items():
            ns = sum(spent for _, _, spent in group)
            if ns < self.min_share * a.span_ns:
                continue
            saved = [
                sum(spent * (1 - self._remaining_share(pairs[0], end)) for pairs, _, spent in group)
                for end in range(3)
            ]
            if saved[0] < (1 - self.max_remaining_share) * ns:
                continue
            rows = np.concatenate([group_rows for _, group_rows, _ in group])
            all_rows = np.array(
                [row for pairs, _, _ in group for item in pairs for row in item.rows]
            )
            costliest = max(group, key=lambda item: item[2])[0][0]
            sizes = " × ".join(f"{size:,}" for size in costliest.pair.shape)
            operators = t.count_noun(max(1, round(len(rows) / a.step_count)), "operator")
            yield Finding(
                summary=(
                    f"{case.capitalize()} of all pairs come from a tensor of {sizes} "
                    f"({t.format_bytes(costliest.pair.bytes)}), which {operators} per step write "
                    f"or read. This takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "operators on the broadcast tensor", len(rows), "count"),
                    amount_per_step(a, "time of operators on the broadcast tensor", ns),
                    self.compare_share(a, "time of operators on the broadcast tensor", ns),
                ],
                where=costliest_places(a, all_rows),
                edits=[scale_operators(a, rows, saved)],
                alternatives="fuse" if a.device_id is not None else "loss",
                **self.case(case, code=_write_einsum(costliest)),
            )

    def _find_pairs(self, a: Analysis) -> Iterator[tuple[list[Pairs], Rows]]:
        """Yield the pairs of each shape, and all rows that write or read their tensor."""
        by_shape: dict[Shape, list[Pairs]] = {}
        for name, x, calls in calls_by_inputs(a, exact_pattern((SUB, MUL, COSINE))):
            if (pair := self._parse_broadcast(x)) is None:
                continue
            for row in calls.tolist():
                if (one := _match_reduction(a, name, x, row, pair)) is not None:
                    by_shape.setdefault(pair.shape, []).append(one)
        if not by_shape:
            return
        for shape, readers in _find_readers(a, by_shape.keys()).items():
            if readers is not None:
                shape_rows = [row for one in by_shape[shape] for row in one.rows]
                yield by_shape[shape], np.unique([*readers, *shape_rows])

    def _parse_broadcast(self, x: OpInputs) -> Broadcast | None:
        """Return two tensors that are both broadcast. ``None`` if they are not, or if the result is
        not large."""
        operands = [x.tensor(0), x.tensor(1)]
        if operands[0] is None or operands[1] is None:
            return None
        first, second = (_stored_shape(operand) for operand in operands if operand is not None)
        try:
            shape = np.broadcast_shapes(first, second)
        except ValueError:
            return None
        size = prod(shape)
        size_bytes = size * (operands[0].width or 0)
        if size_bytes < self.min_bytes:
            return None
        if size < self.min_growth * max(prod(first), prod(second)):
            return None
        first, second = (
            (1,) * (len(shape) - len(operand)) + operand for operand in (first, second)
        )
        return Broadcast(first, second, shape, size_bytes)

    @staticmethod
    def _remaining_share(pairs: Pairs, end: int) -> float:
        """Return the share of the time that remains; ``end`` is 0 (expected), 1 (best) or 2
        (worst). The formula fits the benchmark's results."""
        shares = ABSOLUTE_LEFT if pairs.case == "absolute differences" else PRODUCT_LEFT
        return min(1.0, shares[end] + LEFT_OVER_WIDTH[end] / pairs.depth)

    @staticmethod
    def examples() -> Examples:
        power, total = ("aten::pow", ["", "2"]), ("aten::sum", ["", "[-1]", "False"])
        norm = ("aten::linalg_vector_norm", ["", "2", "[-1]", "False"])
        return {
            "squared distances": _build_pairs("aten::sub", power, total),
            "on a GPU": _build_pairs("aten::sub", power, total, gpu="A100"),
            "distances": _build_pairs("aten::sub", norm),
            "absolute differences": _build_pairs("aten::sub", ("aten::abs", []), total),
            "products": _build_pairs("aten::mul", total),
            "cosine similarities": _build_pairs("aten::cosine_similarity", dim="-1"),
            "forward and backward": _build_pairs("aten::sub", power, total, backward=True),
            "little of the step": (_build_pairs("aten::mul", total, other_us=900_000), "min_share"),
            "one of both is as large": (
                _build_pairs("aten::mul", total, full_operand=True),
                "min_growth",
            ),
            "a small tensor": (_build_pairs("aten::mul", total, width=16, rows=128), "min_bytes"),
            "a narrow one": (_build_pairs("aten::mul", total, width=1, rows=1100), "not by_shape"),
            "absolute differences of a narrow one": (
                _build_pairs("aten::sub", ("aten::abs", []), total, width=2, rows=800),
                "max_remaining_share",
            ),
            "a kernel of each pair is needed": (
                _build_pairs("aten::sub", power, ("aten::exp", []), total),
                "not by_shape",
            ),
            "the pairs are read again": (
                _build_pairs("aten::sub", power, total, read_by="aten::sigmoid"),
                "readers is not None",
            ),
            "a sum over the rows": (
                _build_pairs("aten::mul", ("aten::sum", ["", "[0]", "False"])),
                "not by_shape",
            ),
        }


def _stored_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape with 1 for expanded dimensions, if strides are recorded."""
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return tensor.shape
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return tuple(1 if stride == 0 else size for size, stride in pairs)


def _match_reduction(
    a: Analysis, name: str, x: OpInputs, row: int, pair: Broadcast
) -> Pairs | None:
    """Return the pairs if this operator or the following ones sum them over dimensions of both
    tensors. ``None`` if they are used in another way."""
    rows, between, kind = [row], "", ""
    dims = x.integers(2) if name == COSINE else None
    following = [] if name == COSINE else readers_behind(a, row, pair.shape, count=MAX_FOLLOWING)
    for op_row, op, op_inputs in following:
        rows.append(op_row)
        if op in REDUCTIONS:
            kind, position = REDUCTIONS[op]
            dims = op_inputs.integers(position)
            break
        if (
            between
            or op not in OPS_BETWEEN_DIFFERENCE_AND_SUM
            or (op == "aten::pow" and op_inputs.argument(1) != 2)
        ):
            return None
        between = OPS_BETWEEN_DIFFERENCE_AND_SUM[op]
    case = CASES.get((name, between, kind))
    reduced = {dim % len(pair.shape) for dim in dims or ()}
    if case is None or not reduced or not reduced <= pair.shared:
        return None
    return Pairs(case, pair, reduced, rows)


def _write_einsum(pairs: Pairs) -> str:
    """Return the einsum call on both tensors without their dimensions of size 1."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    terms, sizes = [], []
    for shape in (pairs.pair.first, pairs.pair.second):
        axes = [axis for axis, size in enumerate(shape) if size > 1]
        terms.append("".join(letters[axis] for axis in axes))
        sizes.append(", ".join(str(shape[axis]) for axis in axes))
    result = (letters[axis] for axis in range(len(pairs.pair.shape)) if axis not in pairs.dims)
    return (
        f"# x: [{sizes[0]}], y: [{sizes[1]}]\n"
        f'result = torch.einsum("{terms[0]},{terms[1]}->{"".join(result)}", x, y)'
    )


PAIR_OPS = frozenset(
    f"aten::{name}"
    for name in "sub pow square mul abs neg sum mean copy_ clone expand div sgn sign to _to_copy "
    "result_type linalg_vector_norm norm empty_like fill_ zero_ detach masked_fill_ masked_fill "
    "where eq add add_ mul_ neg_ sqrt cosine_similarity".split()
)
"""Operators that occur in pairs and their backward pass."""
PAIR_NODE = re.compile(
    r"(?:Sub|Pow|Mul|Abs|Neg|Sum|Mean|Div|\w*Norm|Expand|Clone|Where)Backward\d+"
)
"""Nodes of that backward pass, in which memory of a tensor of all pairs is also freed."""


def _find_readers(a: Analysis, shapes: Collection[Shape]) -> dict[Shape, list[int] | None]:
    """Return by shape all operators with a tensor of it, and the backward nodes around them.
    ``None`` if an operator uses the tensor in another way."""
    result: dict[Shape, list[int] | None] = {shape: [] for shape in shapes}
    parent = parent_rows(a.trace)
    for name, x, rows in calls_by_inputs(a, r"^aten::|Backward\d+$"):
        node = PAIR_NODE.fullmatch(name)
        for shape in {one.shape for one in x.tensors} & result.keys():
            if not node and name not in PAIR_OPS:
                result[shape] = None
            elif (readers := result[shape]) is not None:
                readers += (parent[rows] if node else rows).tolist()
    return result


def _build_pairs(
    first: str,
    *following: tuple[str, list[str]],
    gpu: str | None = None,
    rows: int = 384,
    width: int = 64,
    full_operand: bool = False,
    backward: bool = False,
    dim: str = "",
    other_us: float = 2000,
    read_by: str = "",
) -> TraceBuilder:
    """Build steps that combine all pairs of ``rows`` rows."""
    b = TraceBuilder(gpu)
    operands, result = [[rows, 1, width], [1, rows, width]], [rows, rows, width]

    def run(op: str, shapes: list[list[int]], concrete: list[str]) -> None:
        scalars: list[list[int]] = [[]] * max(0, len(concrete) - len(shapes))
        with b.op(op, [*shapes, *scalars], concrete=concrete, host_us=9 if gpu else 3000):
            if gpu:
                b.launch("vectorized_elementwise_kernel", 900)

    for _ in b.steps():
        run(first, [result if full_operand else operands[0], operands[1]], ["", "", dim or "1"])
        for op, concrete in following:
            run(op, [result], concrete or [""])
        if read_by:
            run(read_by, [result], [""])
        if backward:
            with b.op("autograd::engine::evaluate_function: SubBackward0", sequence=1):
                run("aten::neg", [result], [""])
        b.on_host("aten::gelu", other_us)
        b.sync()
    return b
