"""Products and distances of all pairs, computed by broadcasting."""

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
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.stacks import parent_rows
from advisor.rules.support.citations import (
    CHOSEN,
    CURED_RECORDINGS,
    SILENT_TRACES,
    SLOW_ARGUMENTS,
    XPROF,
)
from advisor.rules.support.common import Rows, amount_per_step, costliest_places, of_step
from advisor.rules.support.kernel_work import exact_pattern, scale_operators, time_of_operators
from advisor.testing import Examples, TraceBuilder

Shape = tuple[int, ...]
SUB, MUL, COSINE = "aten::sub", "aten::mul", "aten::cosine_similarity"
BETWEEN = {"aten::pow": "square", "aten::square": "square", MUL: "square", "aten::abs": "size"}
"""Operators between a difference and its sum -> what they make of it."""
REDUCTIONS = {
    "aten::sum": ("sum", 1),
    "aten::mean": ("sum", 1),
    "aten::linalg_vector_norm": ("norm", 2),
    "aten::norm": ("norm", 2),
}
"""Reductions -> their kind, and the position of their dimensions among the arguments."""
CASES = {
    (SUB, "square", "sum"): "squared distances",
    (SUB, "size", "sum"): "absolute differences",
    (SUB, "", "norm"): "distances",
    (MUL, "", "sum"): "products",
    (COSINE, "", ""): "cosine similarities",
}
"""Operator that combines the pairs, what follows it, kind of reduction -> what is computed."""
MAX_AFTER = 24
"""Operators behind the first one among which those that read its result are looked for."""
USUAL = (0.01, 0.005, 0.03)
SMALL = (0.1, 0.05, 0.2)
BY_WIDTH = (1.0, 0.25, 4.0)
"""Shares of the time that remain (expected, at best, at worst), and what is added to them over the
width; the second for sums of absolute differences, whose kernel has no products."""


class Broadcast(NamedTuple):
    """Two tensors that are both broadcast: their stored sizes, with 1 in the other's dimensions."""

    first: Shape
    second: Shape
    shape: Shape
    """Shape of the tensor that holds all pairs."""
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
    """Rows of ``trace.cpu`` that make the tensor of all pairs and its sums."""

    @property
    def depth(self) -> int:
        """Number of elements that are summed for a pair."""
        return prod(self.pair.shape[dim] for dim in self.dims)


class PairwiseBroadcast(Rule):
    """Distances or products of all pairs of rows, ``(a[:, None] - b[None]).pow(2).sum(-1)``, make a
    tensor of rows × rows × width. Each elementwise operator writes and reads it whole, and so does
    the backward pass. A matrix product gives the same sums and never holds that tensor. Squared
    distances are ``|a|² + |b|² - 2 a·b``.

    Found is a difference, a product or a cosine similarity of two tensors that are both broadcast,
    along different dimensions. The next operators that read its result square it or take its size,
    and sum over a dimension that both tensors have. Operators of the backward pass with a tensor of
    that shape belong to it. Where anything else reads that tensor, it is needed, and nothing is
    reported.

    What remains was measured on one thread of a CPU, forward and backward: about one part in
    ``width``. On GPUs the same is expected from the bytes that the operators move."""

    id = "pairwise-broadcast"
    title = "All pairs are computed by broadcasting, not by a matrix product"
    found_in: ClassVar[tuple[str, ...]] = ("recorded/pairs.slow",)
    silent_in: ClassVar[tuple[str, ...]] = (
        "recorded/pairs.cured",
        *SILENT_TRACES,
        *CURED_RECORDINGS,
    )
    validation_note = "a CPU recording of distances to 512 codes, torch 2.13, and its cure"
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.cdist.html",)

    min_share = Threshold(0.05, "of the step in operators on that tensor", XPROF)
    min_growth = Threshold(8, "times as large as both tensors that it is made of", CHOSEN)
    min_bytes = Threshold(
        4 << 20, "bytes of that tensor: smaller ones cost their calls", SLOW_ARGUMENTS
    )
    max_left = Threshold(0.5, "of the time remains: with more, the gain is uncertain", CHOSEN)

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
    confidence = 0.85
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "squared distances": {},
        "distances": {
            "fix": "Call torch.cdist: it computes them from a matrix product. Results differ by "
            "rounding; keep float32, because close points lose digits.",
            "code": "distances = torch.cdist(a, b)   # a: [..., n, d], b: [..., m, d]",
        },
        "absolute differences": {
            "fix": "Call torch.cdist with p=1: one kernel adds up the absolute differences. A mean "
            "is that, divided by the width.",
            "code": "distances = torch.cdist(a, b, p=1)   # a: [..., n, d], b: [..., m, d]",
        },
        "products": {
            "fix": "Compute them as a matrix product, with einsum over the tensors without their "
            "added dimensions. A mean is that, divided by the width. Results differ by rounding.",
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
        """Measure the operators on each tensor of all pairs."""
        if not a.span_ns or a.trace.inputs.is_empty():
            return
        by_case: dict[str, list[tuple[list[Pairs], Rows, int]]] = {}
        for pairs, rows in self._all_pairs(a):
            by_case.setdefault(pairs[0].case, []).append((pairs, rows, time_of_operators(a, rows)))
        for case, found in by_case.items():
            ns = sum(spent for _, _, spent in found)
            if ns < self.min_share * a.span_ns:
                continue
            saved = [
                sum(spent * (1 - self._left(pairs[0], end)) for pairs, _, spent in found)
                for end in range(3)
            ]
            if saved[0] < (1 - self.max_left) * ns:
                continue
            rows = np.concatenate([each for _, each, _ in found])
            made = np.array([row for pairs, _, _ in found for one in pairs for row in one.rows])
            most = max(found, key=lambda one: one[2])[0][0]
            sizes = " × ".join(f"{size:,}" for size in most.pair.shape)
            operators = t.count_noun(max(1, round(len(rows) / a.step_count)), "operator")
            yield Finding(
                summary=(
                    f"{case.capitalize()} of all pairs come from a tensor of {sizes} "
                    f"({t.format_bytes(most.pair.bytes)}), which {operators} per step write or "
                    f"read. This takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "operators on it", len(rows), "count"),
                    amount_per_step(a, "time of these operators", ns),
                    self.compare("share", ns / a.span_ns, "min_share", per=a.per),
                ],
                where=costliest_places(a, made),
                edits=[scale_operators(a, rows, saved)],
                alternatives="fuse" if a.device_id is not None else "loss",
                **self.case(case, code=_einsum(most)),
            )

    def _all_pairs(self, a: Analysis) -> Iterator[tuple[list[Pairs], Rows]]:
        """Yield the pairs of each shape, and all rows that write or read their tensor."""
        found: dict[Shape, list[Pairs]] = {}
        for name, x, calls in calls_by_inputs(a, exact_pattern((SUB, MUL, COSINE))):
            if (pair := self._broadcast(x)) is None:
                continue
            for row in calls.tolist():
                if (one := _reduced(a, name, x, row, pair)) is not None:
                    found.setdefault(pair.shape, []).append(one)
        if not found:
            return
        for shape, readers in _readers(a, found.keys()).items():
            if readers is not None:
                made = [row for one in found[shape] for row in one.rows]
                yield found[shape], np.unique([*readers, *made])

    def _broadcast(self, x: OpInputs) -> Broadcast | None:
        """Return two tensors that are both broadcast; ``None``: they are not, or make no large
        tensor."""
        given = [x.tensor(0), x.tensor(1)]
        if given[0] is None or given[1] is None:
            return None
        first, second = (_stored(one) for one in given if one is not None)
        try:
            shape = np.broadcast_shapes(first, second)
        except ValueError:
            return None
        size = prod(shape)
        width = size * (given[0].width or 0)
        if width < self.min_bytes:
            return None
        if size < self.min_growth * max(prod(first), prod(second)):
            return None
        first, second = ((1,) * (len(shape) - len(one)) + one for one in (first, second))
        return Broadcast(first, second, shape, width)

    @staticmethod
    def _left(pairs: Pairs, end: int) -> float:
        """Return the share of the time that remains; ``end``: 0 expected, 1 at best, 2 at worst. It
        fits what the benchmark prints."""
        own = SMALL if pairs.case == "absolute differences" else USUAL
        return min(1.0, own[end] + BY_WIDTH[end] / pairs.depth)

    @staticmethod
    def examples() -> Examples:
        power, total = ("aten::pow", ["", "2"]), ("aten::sum", ["", "[-1]", "False"])
        norm = ("aten::linalg_vector_norm", ["", "2", "[-1]", "False"])
        return {
            "squared distances": _pairs("aten::sub", power, total),
            "on a GPU": _pairs("aten::sub", power, total, gpu="A100"),
            "distances": _pairs("aten::sub", norm),
            "absolute differences": _pairs("aten::sub", ("aten::abs", []), total),
            "products": _pairs("aten::mul", total),
            "cosine similarities": _pairs("aten::cosine_similarity", dim="-1"),
            "forward and backward": _pairs("aten::sub", power, total, backward=True),
            "little of the step": (_pairs("aten::mul", total, rest=900_000), "min_share"),
            "one of both is as large": (_pairs("aten::mul", total, whole=True), "min_growth"),
            "a small tensor": (_pairs("aten::mul", total, width=16, rows=128), "min_bytes"),
            "a narrow one": (_pairs("aten::mul", total, width=1, rows=1100), "not found"),
            "absolute differences of a narrow one": (
                _pairs("aten::sub", ("aten::abs", []), total, width=2, rows=800),
                "max_left",
            ),
            "a kernel of each pair is needed": (
                _pairs("aten::sub", power, ("aten::exp", []), total),
                "not found",
            ),
            "the pairs are read again": (
                _pairs("aten::sub", power, total, read_by="aten::sigmoid"),
                "readers is not None",
            ),
            "a sum over the rows": (
                _pairs("aten::mul", ("aten::sum", ["", "[0]", "False"])),
                "not found",
            ),
        }


def _stored(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape with 1 for the dimensions that are expanded, where strides are recorded."""
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return tensor.shape
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return tuple(1 if stride == 0 else size for size, stride in pairs)


def _reduced(a: Analysis, name: str, x: OpInputs, row: int, pair: Broadcast) -> Pairs | None:
    """Return the pairs if they are summed over dimensions that both tensors have, by this operator
    or what follows; ``None``: something else is done with them."""
    rows, between, kind = [row], "", ""
    dims = x.integers(2) if name == COSINE else None
    following = [] if name == COSINE else readers_behind(a, row, pair.shape, count=MAX_AFTER)
    for after, own, given in following:
        rows.append(after)
        if own in REDUCTIONS:
            kind, position = REDUCTIONS[own]
            dims = given.integers(position)
            break
        if between or own not in BETWEEN or (own == "aten::pow" and given.argument(1) != 2):
            return None
        between = BETWEEN[own]
    case = CASES.get((name, between, kind))
    reduced = {dim % len(pair.shape) for dim in dims or ()}
    if case is None or not reduced or not reduced <= pair.shared:
        return None
    return Pairs(case, pair, reduced, rows)


def _einsum(pairs: Pairs) -> str:
    """Return the call of einsum on both tensors without their dimensions of one element."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    terms, sizes = [], []
    for own in (pairs.pair.first, pairs.pair.second):
        kept = [at for at, size in enumerate(own) if size > 1]
        terms.append("".join(letters[at] for at in kept))
        sizes.append(", ".join(str(own[at]) for at in kept))
    result = (letters[at] for at in range(len(pairs.pair.shape)) if at not in pairs.dims)
    return (
        f"# x: [{sizes[0]}], y: [{sizes[1]}]\n"
        f'result = torch.einsum("{terms[0]},{terms[1]}->{"".join(result)}", x, y)'
    )


OF_PAIRS = frozenset(
    f"aten::{name}"
    for name in "sub pow square mul abs neg sum mean copy_ clone expand div sgn sign to _to_copy "
    "result_type linalg_vector_norm norm empty_like fill_ zero_ detach masked_fill_ masked_fill "
    "where eq add add_ mul_ neg_ sqrt cosine_similarity".split()
)
"""Operators that pairs and their backward pass consist of."""
NODE = re.compile(r"(?:Sub|Pow|Mul|Abs|Neg|Sum|Mean|Div|\w*Norm|Expand|Clone|Where)Backward\d+")
"""Nodes of that backward pass. Memory of a tensor of all pairs is freed in them, too."""


def _readers(a: Analysis, shapes: Collection[Shape]) -> dict[Shape, list[int] | None]:
    """List by shape all operators with a tensor of it, and nodes of the backward pass around them;
    ``None``: some do something else with it."""
    result: dict[Shape, list[int] | None] = {shape: [] for shape in shapes}
    parent = parent_rows(a.trace)
    for name, x, rows in calls_by_inputs(a, r"^aten::|Backward\d+$"):
        node = NODE.fullmatch(name)
        for shape in {one.shape for one in x.tensors} & result.keys():
            if not node and name not in OF_PAIRS:
                result[shape] = None
            elif (known := result[shape]) is not None:
                known += (parent[rows] if node else rows).tolist()
    return result


def _pairs(
    first: str,
    *then: tuple[str, list[str]],
    gpu: str | None = None,
    rows: int = 384,
    width: int = 64,
    whole: bool = False,
    backward: bool = False,
    dim: str = "",
    rest: float = 2000,
    read_by: str = "",
) -> TraceBuilder:
    """A step that combines all pairs of ``rows`` rows."""
    b = TraceBuilder(gpu)
    given, result = [[rows, 1, width], [1, rows, width]], [rows, rows, width]

    def run(op: str, shapes: list[list[int]], concrete: list[str]) -> None:
        more: list[list[int]] = [[]] * max(0, len(concrete) - len(shapes))
        with b.op(op, [*shapes, *more], concrete=concrete, host_us=9 if gpu else 3000):
            if gpu:
                b.launch("vectorized_elementwise_kernel", 900)

    for _ in b.steps():
        run(first, [result if whole else given[0], given[1]], ["", "", dim or "1"])
        for op, concrete in then:
            run(op, [result], concrete or [""])
        if read_by:
            run(read_by, [result], [""])
        if backward:
            with b.op("autograd::engine::evaluate_function: SubBackward0", sequence=1):
                run("aten::neg", [result], [""])
        b.on_host("aten::gelu", rest)
        b.sync()
    return b
