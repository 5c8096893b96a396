"""Operators that are slow because of the arguments they are called with."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from advisor.core.finding import Edit, Finding, Outcomes, Select, impact_without_gain
from advisor.core.intervals import union
from advisor.core.rule import Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device import operator_arguments as arguments
from advisor.measure.device.operator_arguments import FFTS, OF_COMPLEX, SORTS, TO_COMPLEX
from advisor.measure.device.shapes import OpInputs
from advisor.rules.support.citations import (
    CHOSEN,
    CUFFT,
    MKL_FFT,
    SILENT_INPUTS,
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

RemainingShares = tuple[float, float, float]
"""Shares of an operator's time that remain: expected, at best, at worst."""
EVEN_LENGTH: RemainingShares = (0.33, 0.13, 0.65)
REAL_LARGE_FACTOR: RemainingShares = (0.17, 0.07, 0.4)
COMPLEX_LARGE_FACTOR: RemainingShares = (0.33, 0.17, 0.55)
REAL_SMALL_FACTORS: RemainingShares = (0.4, 0.22, 0.7)
UNCHANGED: RemainingShares = (1.0, 1.0, 1.0)
"""Shares of an FFT's time that remain at the next good length. ``EVEN_LENGTH``: even lengths with a
large factor. ``REAL_LARGE_FACTOR``, ``COMPLEX_LARGE_FACTOR``: other lengths with one.
``REAL_SMALL_FACTORS``: other lengths with small factors, for real numbers."""
Reason = tuple[str, RemainingShares, str, dict[str, object]]
FRESH_MEMORY = 0.1
"""Maximum share of a reduction's time that the replacements need for memory of intermediate
results."""


class Reduction(NamedTuple):
    """An operator that is not vectorised over outer dimensions on a CPU, and its replacement."""

    dims: int
    """Position of the argument with the reduced dimensions."""
    keep: int
    """Position of ``keepdim``."""
    passes: float
    """Time of the replacement, in passes of an elementwise operator over the input."""
    code: str


NORM = "aten::linalg_vector_norm"
_ROOT = ".clamp_min(1e-24).sqrt()   # no infinite gradient at 0"
_VAR = "d = x - x.mean({of}, keepdim=True)\nvar = d.square().sum({of}{keep}) / {count}"
NORMS = {
    2.0: f"norm = x.square().sum({{of}}{{keep}}){_ROOT}",
    1.0: "norm = x.abs().sum({of}{keep})",
    float("inf"): "norm = x.abs().amax({of}{keep})",
}
"""Order of a norm -> code that computes it with other operators."""
REDUCTIONS = {
    NORM: Reduction(2, 3, 3, ""),
    "aten::var": Reduction(1, 3, 8, _VAR),
    "aten::std": Reduction(1, 3, 8, f"{_VAR}\nstd = var{_ROOT}"),
    "aten::argmax": Reduction(1, 2, 12, "index = x.max({of}{keep}).indices"),
    "aten::argmin": Reduction(1, 2, 12, "index = x.min({of}{keep}).indices"),
}


DISTANCES = ("aten::_cdist_forward", "aten::_cdist_backward")
"""Distances that are computed without a matrix product: Euclidean ones by request only."""
WITHOUT_PRODUCT = 2
"""Compute mode ``donot_use_mm_for_euclid_dist``."""
MIN_PAIRS, MIN_FEATURES = 1 << 16, 16
"""Minimum numbers of pairs and of features at which a matrix product is clearly faster."""


class SlowCall(NamedTuple):
    """Calls of one operator with slow arguments. ``texts`` has the values of the ``{…}`` in the
    texts of its case."""

    name: str
    rows: Rows
    ns: int
    case: str
    remaining: RemainingShares
    summary: str
    texts: dict[str, object]


class SlowOperatorArguments(Rule):
    """A library computes an operator slowly for some arguments, and another call gives the same
    result. Names, shapes and arguments in the trace show which.

    **FFTs.** A length with small prime factors is split into short FFTs. On a CPU (MKL), even
    lengths with a prime factor above 40 are slow, and other lengths with one above 13. For real
    numbers, all lengths that are not even are slow. A linear convolution has such a length,
    ``2 L - 1``. cuFFT uses another algorithm for factors above 127, of unmeasured cost.

    **A sort of which only the first or last elements are used.** ``topk`` sorts no others. The
    shape identifies the sort's result. The next operator that reads it must take a part with a
    known end. Only on a CPU.

    **Norms, variances and argmax over a dimension that is not the innermost.** Their CPU kernels
    are not vectorised there, but those of sum and max are. The rule counts calls that take at least
    8 times as long per byte as the elementwise operators of the same trace.

    **Distances of all pairs without a matrix product** (``cdist`` with a compute mode). Only on a
    CPU.

    The remaining time of FFTs, sorts and distances was measured on one CPU thread. That of the
    others is a number of passes over the input at the rate of elementwise operators."""

    id = "slow-operator-arguments"
    title = "An operator is slow for the arguments it is called with"
    found_in = ("recorded/quadrature.slow", "recorded/memory_bank.slow")
    silent_in = SILENT_INPUTS
    validation_note = (
        "CPU recordings, torch 2.13, and their cures: FFTs, a norm and a sort; distances (24.5 ms "
        "predicted, 24.3 ms measured)"
    )
    references = (
        "https://docs.scipy.org/doc/scipy/reference/generated/scipy.fft.next_fast_len.html",
        CUFFT.address,
        MKL_FFT.address,
        "https://docs.pytorch.org/docs/stable/generated/torch.topk.html",
        "https://github.com/pytorch/pytorch/pull/91502",
    )

    min_share = Threshold(0.05, "of the step in such calls of one kind", XPROF)
    max_even_factor = Threshold(40, "largest prime factor of an even length", SLOW_ARGUMENTS)
    max_other_factor = Threshold(
        13, "largest prime factor of other lengths", SLOW_ARGUMENTS, MKL_FFT
    )
    max_gpu_factor = Threshold(127, "largest prime factor of a length on a GPU", CUFFT)
    min_length = Threshold(
        128, "elements of an FFT; shorter ones were not measured", SLOW_ARGUMENTS
    )
    min_slowdown = Threshold(8.0, "times the time of elementwise operators, per byte", CHOSEN)
    max_remaining_share = Threshold(
        0.5, "of the time remains; with more, the gain is uncertain", CHOSEN
    )

    fix = "Call the operator with arguments that are fast in its library, or call another operator."
    verify = "Record again: these operators take less of the step, and the results are the same."
    falsified_by = "the same time with the other call, in a test of this operator alone"
    needs_shapes = True
    confidence = 0.85
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "convolution": {
            "title": "The length of an FFT is slow",
            "fix": "Pad to {good} in place of {length}, forward and back, if the convolution is "
            "linear, and cut the result as before. A linear convolution is the "
            "same for any length of at least the sum of both input lengths minus one.",
            "code": "n = {good}   # not {length}: even, no prime factor above 7\n"
            "y = torch.fft.irfft(torch.fft.rfft(x, n=n) * torch.fft.rfft(k, n=n), n=n)",
            "falsified_by": "results that change: a circular convolution needs its own length",
            "assumptions": ("on a CPU, FFTs are MKL's, as in PyTorch's builds for x86",),
        },
        "spectrum": {
            "title": "The length of an FFT is slow",
            "fix": "Pad to {good} in place of {length} where FFTs only compute a linear "
            "convolution or a correlation. Where the spectrum is the result, padding changes its "
            "frequencies: choose a window of such a length if you can.",
            "code": "n = {good}   # not {length}: even, no prime factor above 7\n"
            "spectrum = torch.fft.rfft(x, n=n)   # not where its frequencies matter",
            "falsified_by": "code that needs frequencies or a period of exactly this length",
            "assumptions": ("the length may be changed", "on a CPU, FFTs are MKL's"),
            "confidence": 0.6,
        },
        "sort": {
            "title": "All elements are sorted, but few are used",
            "fix": "Take them with topk, which sorts no others. The results are the same except "
            "for the order of equal elements.",
            "code": "values, index = x.topk({taken}, dim={dim}, largest={largest}){note}",
            "falsified_by": "other code that reads the rest of the sorted elements",
            "assumptions": ("nothing else reads the rest of the sorted elements",),
            "alternatives": "sort",
        },
        "reduction": {
            "title": "A reduction over an outer dimension is not vectorised",
            "fix": "Write it with operators that are vectorised over outer dimensions: elementwise "
            "ones, sum, mean and max. The results are equal to rounding.",
            "code": "{code}",
            "falsified_by": "values so large that their squares overflow",
        },
        "distances": {
            "title": "Distances are computed without a matrix product",
            "fix": "Leave compute_mode out: for more than 25 rows, cdist then uses a matrix "
            "product. Distances of nearly equal points are less exact.",
            "code": "distance = torch.cdist(x, y)",
            "falsified_by": "results that depend on distances of nearly equal points",
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        on_gpu = a.device_id is not None
        by_case: dict[str, list[SlowCall]] = {}
        for slow in self._slow_calls(a, on_gpu=on_gpu):
            by_case.setdefault(slow.case, []).append(slow)
        for case, slow_calls in by_case.items():
            rows = np.concatenate([slow.rows for slow in slow_calls])
            ts, dur = (a.trace.cpu[name].to_numpy()[rows] for name in ("ts", "dur"))
            ns = work_launched_in(a, union(ts, ts + dur)) if on_gpu else int(dur.sum())
            if ns < self.min_share * a.span_ns:
                continue
            costliest = max(slow_calls, key=lambda slow: slow.ns)
            reason = "the cost of such a length on a GPU was not measured"
            yield Finding(
                summary=f"{costliest.summary} Such calls take {of_step(a, ns)}.",
                evidence=[
                    amount_per_step(a, "calls with slow arguments", len(rows), "count"),
                    amount_per_step(a, "time of calls with slow arguments", ns),
                    self.compare_share(a, "time of calls with slow arguments", ns),
                ],
                where=costliest_places(a, rows, dur),
                edits=[] if on_gpu else _build_edits(a, slow_calls),
                impact=impact_without_gain(reason) if on_gpu else None,
                informational=on_gpu,
                **self.case(case, **costliest.texts),
            )

    def _slow_calls(self, a: Analysis, *, on_gpu: bool) -> Iterator[SlowCall]:
        names = FFTS if on_gpu else (*FFTS, *SORTS, *REDUCTIONS, *DISTANCES)
        rate = None if on_gpu else arguments.elementwise_rate(a)
        for name, x, rows in arguments.calls_by_inputs(a, exact_pattern(names)):
            dur = a.trace.cpu["dur"].to_numpy()[rows]
            if name in FFTS:
                reasons = self._check_fft(a, name, x)
            elif name in SORTS:
                reasons = self._check_sort(arguments.find_sorted_part(a, name, x, rows))
            elif name in DISTANCES:
                reasons = self._check_distances(name, x)
            else:
                reasons = self._check_reduction(name, x, float(np.median(dur)), rate)
            for reason in reasons:
                yield SlowCall(name, rows, int(dur.sum()), *reason)

    def _check_fft(self, a: Analysis, name: str, x: OpInputs) -> Iterator[Reason]:
        lengths = arguments.fft_lengths(name, x)
        shares = [
            self._remaining_of_fft(*length_and_kind, a.device_id is not None)
            for length_and_kind in lengths
        ]
        slow_lengths = [
            length for (length, _), share in zip(lengths, shares, strict=True) if share != UNCHANGED
        ]
        if not slow_lengths:
            return
        length = slow_lengths[-1]
        good, factor = arguments.next_fast_length(length), arguments.largest_factor(length)
        cause = "is prime" if factor == length else f"has the prime factor {factor:,}"
        cause = cause if factor > self.max_other_factor else "is not even"
        is_padded = length in arguments.padded_lengths(a)
        mean, best, worst = (sum(ends) / len(shares) for ends in zip(*shares, strict=True))
        yield (
            "convolution" if is_padded else "spectrum",
            (mean, best, worst if is_padded else 1.0),
            f"{name} has the length {length:,}, which {cause}; {good:,} is a fast one.",
            {"length": length, "good": good},
        )

    def _remaining_of_fft(self, length: int, real: bool, on_gpu: bool) -> RemainingShares:
        """Return the shares of an FFT's time that remain at the next good length."""
        factor = arguments.largest_factor(length)
        if length < self.min_length:
            return UNCHANGED
        if on_gpu or length % 2 == 0:
            return (
                EVEN_LENGTH
                if factor > (self.max_gpu_factor if on_gpu else self.max_even_factor)
                else UNCHANGED
            )
        if factor > self.max_other_factor:
            return REAL_LARGE_FACTOR if real else COMPLEX_LARGE_FACTOR
        return REAL_SMALL_FACTORS if real else UNCHANGED

    def _check_sort(self, part: arguments.SortedPart | None) -> Iterator[Reason]:
        if part is None:
            return
        size, taken = part.size, part.taken
        remaining = 0.03 + 0.75 * (taken / size) ** 0.5 + 12 / size  # fits the benchmark's results
        if remaining > self.max_remaining_share:
            return
        yield (
            "sort",
            (remaining, remaining / 2, min(1.0, 1.7 * remaining)),
            f"Rows of {size:,} elements are sorted, and {taken:,} are taken.",
            part._asdict() | {"note": "" if part.from_first else "   # in reverse order"},
        )

    def _check_distances(self, name: str, x: OpInputs) -> Iterator[Reason]:
        is_forward = name == DISTANCES[0]
        first = 0 if is_forward else 1  # the backward pass begins with the gradient
        points, others = x.tensor(first), x.tensor(first + 1)
        if points is None or others is None or min(len(points.shape), len(others.shape)) < 2:
            return
        mode = x.argument(3) if is_forward else WITHOUT_PRODUCT
        if x.argument(first + 2) != 2 or mode != WITHOUT_PRODUCT:
            return
        features, pairs = points.shape[-1], prod(points.shape[:-1]) * others.shape[-2]
        if features < MIN_FEATURES or pairs < MIN_PAIRS:
            return
        remaining = (0.05 + 4 / features) * (1 if is_forward else 2)  # fits the benchmark's results
        yield (
            "distances",
            (remaining, remaining / 2, min(1.0, 2 * remaining)),
            f"cdist computes {'' if is_forward else 'gradients of '}distances of "
            f"{points.shape[-2]:,} and {others.shape[-2]:,} points of {features:,} features "
            "without a matrix product.",
            {},
        )

    def _check_reduction(
        self, name: str, x: OpInputs, ns: float, rate: float | None
    ) -> Iterator[Reason]:
        reduction, data = REDUCTIONS[name], x.tensor(0)
        dims = arguments.outer_dims(x, reduction.dims)
        if data is None or not dims:
            return
        if (
            data.dtype not in ("float", "double")
            or (size := data.bytes or 0) < arguments.MIN_ARGUMENT_BYTES
        ):
            return
        if rate is None:
            return
        slowdown = ns / (size * rate)
        if slowdown < self.min_slowdown:
            return
        remaining, parameter = reduction.passes / slowdown, x.argument(1 if name == NORM else 2)
        code = NORMS.get(parameter) if name == NORM else reduction.code
        if code is None or remaining > self.max_remaining_share:
            return
        code = code.format(
            of=dims[0] if len(dims) == 1 else tuple(dims),
            keep=", keepdim=True" if x.flag(reduction.keep) else "",
            count=prod(data.shape[dim] for dim in dims) - (parameter not in (False, 0)),
        )
        sizes = " × ".join(f"{size:,}" for size in data.shape)
        yield (
            "reduction",
            (remaining, remaining / 2, min(1.0, 2 * remaining + FRESH_MEMORY)),
            f"{name} over an outer dimension of {sizes} takes {slowdown:.0f} times as long per "
            "byte as elementwise operators.",
            {"code": code},
        )

    @staticmethod
    def examples() -> Examples:
        norm, std = ["2", "[0]", "False"], ["[0]", "1", "False"]
        return {
            "a convolution of length 2 L - 1": _build_fft(2999),
            "a spectrum of prime length": _build_fft(1021, pad=False),
            "real, 3^4 times 5^2": _build_fft(2025),
            "the factor 61": _build_fft(1952),
            "on a GPU": _build_fft(2999, gpu="A100"),
            "a good length": (_build_fft(3000), "not slow_lengths"),
            "a complex one of 3^7": (_build_fft(2187, OF_COMPLEX), "not slow_lengths"),
            "the factor 37": (_build_fft(1184), "max_even_factor"),
            "complex, 11^3": (_build_fft(1331, OF_COMPLEX), "max_other_factor"),
            "the factor 97 on a GPU": (_build_fft(1940, gpu="A100"), "max_gpu_factor"),
            "short ones": (_build_fft(125), "min_length"),
            "little of the step": (_build_fft(2999, other_us=200_000), "min_share"),
            "the first of a sort": _build_sort("0", "16"),
            "the last of an argsort": _build_sort("-16", str(2**63 - 1), SORTS[1]),
            "half of the elements": (_build_sort("0", "512"), "max_remaining_share"),
            "a median": (_build_sort("511", "513"), "part is None"),
            "a whole ranking": (_build_sort("0", "16", then="aten::cumsum"), "part is None"),
            "a stable sort": (_build_sort("0", "16", stable=True), "part is None"),
            "a norm over the first dimension": _build_reduction(NORM, norm),
            "a standard deviation": _build_reduction("aten::std", std),
            "argmax over classes": _build_reduction("aten::argmax", ["0", "False"]),
            "distances without a product": _build_distances(128, "2"),
            "distances in other norms": (
                _build_distances(128, "2", p="1."),
                "x.argument(first + 2) != 2",
            ),
            "distances of few features": (_build_distances(4, "2"), "features < MIN_FEATURES"),
            "over the innermost": (_build_reduction(NORM, ["2", "[1]", "False"]), "not dims"),
            "in 16 bits": (
                _build_reduction(NORM, norm, "c10::Half"),
                "data.dtype not in ('float', 'double')",
            ),
            "fast in this library": (_build_reduction(NORM, norm, us=1400), "min_slowdown"),
            "elementwise operators are as slow": (
                _build_reduction(NORM, norm, add=6000),
                "min_slowdown",
            ),
            "nothing to compare with": (_build_reduction(NORM, norm, add=0), "rate is None"),
            "a norm of order 3": (_build_reduction(NORM, ["3", "[0]", "False"]), "code is None"),
        }


def _build_edits(a: Analysis, slow_calls: list[SlowCall]) -> list[Edit]:
    """Scale each operator. An edit selects all of its calls. Calls that are not slow keep their
    time."""
    result = []
    dur = a.trace.cpu["dur"].to_numpy()
    for name in sorted({slow.name for slow in slow_calls}):
        pattern, calls = exact_pattern([name]), [slow for slow in slow_calls if slow.name == name]
        all_ns = sum(dur[rows].sum() for _, _, rows in arguments.calls_by_inputs(a, pattern))
        saved = [sum(slow.ns * (1 - slow.remaining[end]) for slow in calls) for end in range(3)]
        select = Select(on="host", kind=("op",), name=pattern)
        result.append(scale_edit(select, *(float(1 - ns / all_ns) for ns in saved)))
    return result


def _add_call(
    b: TraceBuilder, name: str, shape: list[int], given: Sequence[str], **op: Any
) -> None:
    """Add a call of an operator on a contiguous tensor, with arguments."""
    strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
    scalars: list[list[int]] = [[]] * len(given)
    with b.op(name, [shape, *scalars], strides=[strides, *scalars], concrete=["", *given], **op):
        if b.head["deviceProperties"]:
            b.launch("regular_bluestein_fft", op["host_us"])


def _build_fft(
    length: int,
    name: str = TO_COMPLEX,
    *,
    pad: bool = True,
    gpu: str | None = None,
    other_us: float = 2000,
) -> TraceBuilder:
    b = TraceBuilder(gpu)
    for _ in b.steps():
        if pad:
            _add_call(b, "aten::constant_pad_nd", [64, 100], [f"[0, {length - 100}]"], host_us=9)
        _add_call(b, name, [64, length], ["[1]"], host_us=3000)
        b.on_host("aten::gelu", other_us)
        b.sync()
    return b


def _build_sort(
    start: str, end: str, name: str = SORTS[0], *, then: str = "aten::slice", stable: bool = False
) -> TraceBuilder:
    b = TraceBuilder(None)
    for _ in b.steps():
        _add_call(b, name, [256, 1024], [*["True"] * stable, "-1", "True"], host_us=6000)
        _add_call(b, then, [256, 1024], ["1", start, end, "1"], dtypes="long int", host_us=9)
        b.on_host("aten::gelu", 2000)
    return b


def _build_reduction(
    name: str, given: list[str], dtype: str = "float", *, us: float = 40_000, add: float = 200
) -> TraceBuilder:
    b = TraceBuilder(None)
    for _ in b.steps():
        if add:
            _add_call(b, "aten::add", [2, 400_000], [], host_us=add)
        _add_call(b, name, [2, 400_000], given, dtypes=dtype, host_us=us)
        b.on_host("aten::gelu", 2000)
    return b


def _build_distances(features: int, mode: str, p: str = "2.") -> TraceBuilder:
    b = TraceBuilder(None)
    for _ in b.steps():
        sizes: list[list[int]] = [[128, features], [6000, features], [], []]
        strides = [[features, 1], [features, 1], [], []]
        concrete = ["", "", p, mode]
        with b.op(DISTANCES[0], sizes, strides=strides, concrete=concrete, host_us=26_000):
            pass
        b.on_host("aten::gelu", 2000)
    return b
