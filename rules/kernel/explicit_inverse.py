"""Matrices that are inverted to be multiplied."""

import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    row_numbers,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.testing import Examples, TraceBuilder

INVERSES = ("aten::inverse", "aten::linalg_inv", "aten::linalg_inv_ex")
DETERMINANTS = ("aten::logdet", "aten::slogdet", "aten::linalg_slogdet", "aten::det",
                "aten::linalg_det")  # fmt: skip


class ExplicitInverse(Rule):
    """A large matrix is inverted, usually to be multiplied by vectors or other matrices. A
    factorisation and a triangular solve give the product with a fraction of the operations, and
    with smaller rounding errors. A covariance or kernel matrix is symmetric and positive definite.
    Its Cholesky factor takes a sixth of the operations of an inverse. It gives the determinant too.

    The rule looks for inverses of matrices of 128 rows or more. Determinants of the same size count
    with them, as one factor serves both, and so do their backward passes. Small matrices are not
    reported: their time is that of the call."""

    id = "explicit-inverse"
    title = "A large matrix is inverted"
    sampled_part = "forward"
    found_in = ("recorded/gaussian_process.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "a CPU recording, torch 2.13, of a Gaussian process: 20.6 ms predicted, 62.5 to 48.5 ms "
        "measured"
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.linalg.inv.html",)
    needs_shapes = True

    min_rows = Threshold(128, "rows of the matrix; the time of smaller ones is the call", CHOSEN)
    min_share = Threshold(0.10, "of the step in these operators and their backward", XPROF)
    saved_share = Factor(0.45, "of the time is saved with a factor and its solve", CHOSEN)
    best_saved_share = Factor(0.7, "of the time, at best: a Cholesky factor of few columns", CHOSEN)
    worst_saved_share = Factor(0.15, "of the time, at worst: a solve for many columns", CHOSEN)

    fix = (
        "Solve in place of inverting: torch.cholesky_solve for covariances and kernel matrices, "
        "torch.linalg.solve for others. Take the logarithm of the determinant from the same factor."
    )
    code = (
        "L = torch.linalg.cholesky(k)          # k is symmetric, positive definite\n"
        "x = torch.cholesky_solve(b, L)        # not torch.inverse(k) @ b\n"
        "logdet = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)\n"
        "# other matrices: x = torch.linalg.solve(a, b)"
    )
    verify = "Record again: the step has no inverse. Compare the results."
    falsified_by = "code that needs the entries of the inverse themselves"
    assumptions = ("the inverse is only multiplied",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        inverses, determinants = (self._find_large(a, names) for names in (INVERSES, DETERMINANTS))
        if not len(inverses):
            return
        both, backward = with_backward(a, row_numbers(pl.concat([inverses, determinants])))
        ns = time_of_operators(a, both)
        if ns < self.min_share * a.span_ns:
            return
        matrix = inputs_at(a, a.trace.cpu["inputs"][int(inverses[0])]).tensor(0)
        shape = (0,) if matrix is None else matrix.shape
        size = " × ".join(f"{length:,}" for length in shape)
        yield Finding(
            summary=(
                f"Inverting matrices of {size}, with their determinants"
                f"{' and backward passes' * bool(len(backward))}, takes {of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "inverses and determinants", ns),
                self.compare("rows of the matrix", shape[-1], "min_rows", "count"),
                self.compare_share(a, "inverses and determinants", ns),
            ],
            where=costliest_places(a, row_numbers(inverses), top=1),
            edits=[
                scale_operators(
                    a, both, tuple(share * ns for share in self.range_of("saved_share"))
                )
            ],
        )

    def _find_large(self, a: Analysis, names: tuple[str, ...]) -> pl.Series:
        """Return the rows of these operators on matrices of ``min_rows`` rows or more."""
        table = outermost_in_steps(a).filter(
            pl.col("name").is_in(names) & pl.col("inputs").is_not_null()
        )
        sizes = [inputs_at(a, index).tensor(0) for index in table["inputs"]]
        large = [
            x is not None and len(x.shape) >= 2 and x.shape[-1] >= self.min_rows for x in sizes
        ]
        return table.filter(pl.Series(large, dtype=pl.Boolean))["row"]

    @staticmethod
    def examples() -> Examples:
        return {
            "a Gaussian process": _build_steps(),
            "on a GPU": _build_steps(gpu="A100"),
            "small matrices": (_build_steps(size=16), "not len(inverses)"),
            "a determinant alone": (_build_steps("aten::logdet"), "not len(inverses)"),
            "small compared with the step": (_build_steps(other_us=200_000), "min_share"),
        }


def _build_steps(
    name: str = "aten::inverse", *, size: int = 700, gpu: str | None = None, other_us: float = 3000
) -> TraceBuilder:
    b = TraceBuilder(gpu=gpu)
    for _ in b.steps():
        if gpu is None:
            b.on_host(name, 5000, [[size, size]])
            b.on_host("aten::mm", other_us, [[size, 64], [64, 64]])
        else:
            with b.op(name, [[size, size]]):
                b.launch("getrf_kernel", 5000)
            b.product(other_us)
    return b
