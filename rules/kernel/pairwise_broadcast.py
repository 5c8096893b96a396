"""Products and distances of all pairs, computed by broadcasting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.intervals import union
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import calls_by_inputs, inputs_at
from advisor.measure.device.shapes import OpInputs, Tensor
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import outermost_rows, parent_rows
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import (
    CHOSEN,
    CURED_RECORDINGS,
    SILENT_TRACES,
    SLOW_ARGUMENTS,
    XPROF,
)
from advisor.rules.support.common import (
    Rows,
    amount_per_step,
    costliest_places,
    of_step,
    scale_edit,
    work_launched_in,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.testing import Examples, TraceBuilder

PAIRED = {"aten::sub": "difference", "aten::mul": "product", "aten::cosine_similarity": "cosine"}
"""Operators that combine all pairs of rows -> what they make of them."""
SQUARES, SIZES = ("aten::pow", "aten::square", "aten::mul"), ("aten::abs",)
SUMS = {"aten::sum": 1, "aten::mean": 1}
NORMS = {"aten::linalg_vector_norm": 2, "aten::norm": 2}
"""Reductions -> position of their dimensions among the arguments."""
MAX_AFTER = 24
"""Operators behind the first one among which those that read its result are looked for."""
SMALL = (0.1, 0.05, 0.2)
"""Shares that remain of sums of absolute differences, of a kernel without products, by the width's
share: expected, at best, at worst."""


class Pairs(NamedTuple):
    """Calls that combine all pairs of rows of two tensors and reduce them."""

    case: str
    shape: tuple[int, ...]
    """Shape of the tensor that holds all pairs."""
    depth: int
    """Number of elements that are summed for a pair."""
    code: str
    rows: list[int]
    """Rows of ``trace.cpu`` that make that tensor and its sums."""
    every: list[int]
    """Rows of these, and of all others that write or read it."""


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
    ``width``. On GPUs the same is expected from the bytes that the operators move.
    """

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
        by_case: dict[str, list[tuple[Pairs, int]]] = {}
        for pairs in self._all_pairs(a):
            by_case.setdefault(pairs.case, []).append((pairs, _time_of(a, np.array(pairs.every))))
        for case, found in by_case.items():
            rows = np.array([row for pairs, _ in found for row in pairs.every], dtype=np.int64)
            ns = sum(spent for _, spent in found)
            if ns < self.min_share * a.span_ns:
                continue
            left = [self._left(pairs) for pairs, _ in found]
            saved = [
                sum(spent * (1 - one[end]) for (_, spent), one in zip(found, left, strict=True))
                for end in range(3)
            ]
            if saved[0] < (1 - self.max_left) * ns:
                continue
            made = np.array([row for pairs, _ in found for row in pairs.rows], dtype=np.int64)
            most, _ = max(found, key=lambda one: one[1])
            sizes = " × ".join(f"{size:,}" for size in most.shape)
            size = t.format_bytes(4 * prod(most.shape))
            passes = t.count_noun(max(1, round(len(rows) / a.step_count)), "operator")
            names = exact_pattern(a.trace.cpu["name"].gather(rows).cast(str).unique().to_list())
            named = np.flatnonzero(name_matches(a.trace.cpu["name"], names).to_numpy())
            every = _time_of(a, rows_in_steps(a, named))
            select = (
                Select(on="host", kind=("op",), name=names)
                if a.device_id is None
                else Select(on="gpu", kind=("kernel",), under=names)
            )
            share = [float(1 - ns / max(every, 1)) for ns in saved]
            yield Finding(
                summary=(
                    f"{case.capitalize()} of all pairs come from a tensor of {sizes} ({size}), "
                    f"which {passes} per step write or read. This takes {of_step(a, ns)}."
                ),
                evidence=[
                    amount_per_step(a, "operators on it", len(rows), "count"),
                    amount_per_step(a, "time of these operators", ns),
                    self.compare("share", ns / a.span_ns, "min_share", per=a.per),
                ],
                where=costliest_places(a, made, a.trace.cpu["dur"].to_numpy()[made]),
                edits=[scale_edit(select, *share)],
                alternatives="fuse" if a.device_id is not None else "loss",
                **self.case(case, code=most.code),
            )

    def _all_pairs(self, a: Analysis) -> Iterator[Pairs]:
        """Find each tensor of all pairs with what reads it, by shape."""
        found: dict[tuple[int, ...], list[Pairs]] = {}
        for name, x, calls in calls_by_inputs(a, exact_pattern(PAIRED)):
            pair = self._broadcast(x)
            if pair is None:
                continue
            shape = np.broadcast_shapes(*pair)
            for row in calls.tolist():
                one = _reduced(a, name, pair, shape, row, x)
                found.setdefault(shape, []).extend([one] if one else [])
        for shape, pairs in found.items():
            if not pairs:
                continue
            readers = _readers(a, shape)
            if readers is not None:
                rows = sorted({*readers, *(row for one in pairs for row in one.rows)})
                yield pairs[0]._replace(rows=[r for p in pairs for r in p.rows], every=rows)

    def _broadcast(self, x: OpInputs) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the stored shapes of two tensors that are both broadcast; ``None``: they are not,
        or make no large tensor."""
        given = [x.tensor(0), x.tensor(1)]
        if given[0] is None or given[1] is None:
            return None
        first, second = (_stored(one) for one in given if one is not None)
        try:
            shape = np.broadcast_shapes(first, second)
        except ValueError:
            return None
        size = prod(shape)
        if size * (given[0].width or 0) < self.min_bytes:
            return None
        if size < self.min_growth * max(prod(first), prod(second)):
            return None
        return first, second

    def _left(self, pairs: Pairs) -> tuple[float, float, float]:
        """Return the share of the time that remains: expected, at best, at worst. It fits what the
        benchmark prints."""
        own = SMALL if pairs.case == "absolute differences" else (0.01, 0.005, 0.03)
        parts = zip(own, (1.0, 0.25, 4.0), strict=True)
        expected, best, worst = (min(1.0, part + times / pairs.depth) for part, times in parts)
        return expected, best, worst

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
            "a narrow one": (_pairs("aten::mul", total, width=1, rows=1100), "not pairs"),
            "absolute differences of a narrow one": (
                _pairs("aten::sub", ("aten::abs", []), total, width=2, rows=800),
                "max_left",
            ),
            "a kernel of each pair is needed": (
                _pairs("aten::sub", power, ("aten::exp", []), total),
                "not pairs",
            ),
            "the pairs are read again": (
                _pairs("aten::sub", power, total, read_by="aten::sigmoid"),
                "readers is not None",
            ),
            "a sum over the rows": (
                _pairs("aten::mul", ("aten::sum", ["", "[0]", "False"])),
                "not pairs",
            ),
        }


def _stored(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape with 1 for the dimensions that are expanded, where strides are recorded."""
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return tensor.shape
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return tuple(1 if stride == 0 else size for size, stride in pairs)


def _time_of(a: Analysis, rows: Rows) -> int:
    """Return the time of operators, ns: on the device what they launch, else their own."""
    ts, dur = (a.trace.cpu[name].to_numpy()[rows] for name in ("ts", "dur"))
    whole = union(ts, ts + dur)
    return int(whole.total) if a.device_id is None else work_launched_in(a, whole)


def _reduced(
    a: Analysis,
    name: str,
    pair: tuple[tuple[int, ...], tuple[int, ...]],
    shape: tuple[int, ...],
    row: int,
    x: OpInputs,
) -> Pairs | None:
    """Return the pairs if what follows sums them over a dimension that both tensors have; ``None``:
    something else is done with them."""
    first, second = (tuple([1] * (len(shape) - len(one)) + list(one)) for one in pair)
    both = [at for at, size in enumerate(shape) if size > 1 and first[at] == second[at] == size]
    if PAIRED[name] == "cosine":
        dim = x.argument(2)
        if not isinstance(dim, int) or dim % len(shape) not in both:
            return None
        return Pairs("cosine similarities", shape, shape[dim], "", [row], [])
    rows, squared, sizes = [row], False, False
    for after, own, given in _next_readers(a, row, shape):
        rows.append(after)
        if own in SUMS or own in NORMS:
            dims = given.integers(SUMS.get(own) or NORMS[own])
            if not dims or any(dim % len(shape) not in both for dim in dims):
                return None
            return _named(name, own, squared, sizes, shape, dims, pair, rows)
        if squared or sizes or name != "aten::sub":
            return None
        squared, sizes = own in SQUARES, own in SIZES
        if own == "aten::pow" and given.argument(1) != 2:
            return None
        if not (squared or sizes):
            return None
    return None


def _named(
    name: str,
    reduction: str,
    squared: bool,
    sizes: bool,
    shape: tuple[int, ...],
    dims: Sequence[int],
    pair: tuple[tuple[int, ...], tuple[int, ...]],
    rows: list[int],
) -> Pairs | None:
    """Return the pairs with the name of what is computed; ``None``: it is no known one."""
    depth = prod(shape[dim] for dim in dims)
    if name == "aten::mul":
        if reduction in NORMS:
            return None
        summed = {dim % len(shape) for dim in dims}
        return Pairs("products", shape, depth, _einsum(shape, pair, summed), rows, [])
    if reduction in NORMS:
        return None if squared or sizes else Pairs("distances", shape, depth, "", rows, [])
    if not (squared or sizes):
        return None
    case = "squared distances" if squared else "absolute differences"
    return Pairs(case, shape, depth, "", rows, [])


def _einsum(
    shape: tuple[int, ...], pair: tuple[tuple[int, ...], tuple[int, ...]], summed: set[int]
) -> str:
    """Return the call of einsum on both tensors without their dimensions of one element."""
    letters = "abcdefghijklmnopqrstuvwxyz"[: len(shape)]
    terms, sizes = [], []
    for one in pair:
        own = [1] * (len(shape) - len(one)) + list(one)
        kept = [at for at, size in enumerate(own) if size > 1]
        terms.append("".join(letters[at] for at in kept))
        sizes.append(", ".join(str(own[at]) for at in kept))
    result = "".join(letter for at, letter in enumerate(letters) if at not in summed)
    return (
        f"# x: [{sizes[0]}], y: [{sizes[1]}]\n"
        f'result = torch.einsum("{terms[0]},{terms[1]}->{result}", x, y)'
    )


def _next_readers(
    a: Analysis, row: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, str, OpInputs]]:
    """Yield the next outermost operators of the thread that are given a tensor of a shape."""
    cpu, order = a.trace.cpu, outermost_rows(a.trace)
    following = order[np.searchsorted(order, row, side="right") :][:MAX_AFTER]
    for after in following.tolist():
        index = cpu["inputs"][after]
        if index is None or cpu["thread"][after] != cpu["thread"][row]:
            continue
        given = inputs_at(a, index)
        if any(one.shape == shape for one in given.tensors):
            yield after, str(cpu["name"][after]), given


OF_PAIRS = frozenset(
    f"aten::{name}"
    for name in "sub pow square mul abs neg sum mean copy_ clone expand div sgn sign to _to_copy "
    "result_type linalg_vector_norm norm empty_like fill_ zero_ detach masked_fill_ masked_fill "
    "where eq add add_ mul_ neg_ sqrt cosine_similarity".split()
)
"""Operators that pairs and their backward pass consist of."""
NODE = re.compile(r"(?:Sub|Pow|Mul|Abs|Neg|Sum|Mean|Div|\w*Norm|Expand|Clone|Where)Backward\d+")
"""Nodes of that backward pass. Memory of a tensor of all pairs is freed in them, too."""


def _readers(a: Analysis, shape: tuple[int, ...]) -> list[int] | None:
    """List all operators with a tensor of this shape, and nodes of the backward pass around them;
    ``None``: some do something else with it."""
    result: list[int] = []
    parent = parent_rows(a.trace)
    for name, x, rows in calls_by_inputs(a, r"^aten::|Backward\d+$"):
        if any(one.shape == shape for one in x.tensors):
            node = NODE.fullmatch(name)
            if not node and name not in OF_PAIRS:
                return None
            result += (parent[rows] if node else rows).tolist()
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
        if gpu:
            b.sync()
    return b
