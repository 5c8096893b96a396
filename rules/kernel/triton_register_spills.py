"""Kernels that Triton compiled with more values per thread than registers."""

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import TRITON_CACHE
from advisor.core.finding import Finding, Location, Outcomes, impact_without_gain
from advisor.core.rule import ANY_FRAMEWORK, Citation, Evidence, FrameworkAdvice, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.kernel_profiles import MatchedKernel
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import INDUCTOR_SPILLS, OURS
from advisor.testing import Examples, TraceBuilder

MAX_PLACES = 5
REGISTER = 4
"""Bytes of a register."""


class TritonRegisterSpills(Rule):
    """The values that a thread keeps at one time did not fit into its registers. The compiler
    stores some in local memory and loads them again, through L1 and L2. Registers and local memory
    are read from the module in Triton's cache.

    Arrays that the program declares, as sin and cos do for large arguments, are in local memory
    too. They are no spills, and are subtracted: their size is in the PTX beside the module.
    Triton's own ``n_spills`` counts them. Beside a trace only kernels count that take part of its
    kernel time, and whose launches differ from those of other compilations."""

    id = "triton-register-spills"
    title = "Triton spills registers of a kernel"
    auxiliary_inputs = (TRITON_CACHE,)
    min_spilled = Threshold(16, "registers per thread", INDUCTOR_SPILLS)
    min_spilled_amd = Threshold(32, "registers per thread on AMD GPUs", INDUCTOR_SPILLS)
    min_share = Threshold(0.05, "of kernel time, where there is a trace", OURS)
    confidence = 0.6
    fix = (
        "Let a thread keep less: smaller block sizes, or more num_warps for the same block. Fewer "
        "num_stages help where a loop is pipelined. Add such configurations to triton.autotune."
    )
    code = (
        "configs = [triton.Config({'BLOCK_N': n}, num_warps=w, num_stages=s)\n"
        "           for n in (64, 128) for w in (4, 8) for s in (2, 3)]\n"
        "@triton.autotune(configs, key=['N'])"
    )
    verify = "The compiled kernel's n_spills is 0 in the variant that is faster."
    falsified_by = "a configuration without spills that is slower"
    assumptions = ("loads and stores of spilled registers slow the kernel down",)
    framework_advice = {ANY_FRAMEWORK: FrameworkAdvice(fix, code)}  # kernels are of no framework
    references = (
        "https://triton-lang.org/main/python-api/generated/triton.Config.html",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#device-memory-accesses",
    )
    sources = (
        Citation("sin and cos: no spills", "https://github.com/triton-lang/triton/issues/1756"),
    )
    validation_note = "kernels compiled for sm_80 and sm_90; no trace of theirs was recorded"

    def check(self, a: Analysis) -> Outcomes:
        """Find kernels that spill most, weighed by their time where there is a trace."""
        traced = not a.record_only
        dur = a.trace.gpu["dur"].to_numpy()
        total = kernel_work.summed_duration(a, kernel_work.kernel_rows(a)) if traced else 0
        found: list[tuple[float, MatchedKernel]] = []
        for k in a.compiled_kernels:
            if not k.kernel.spilled or (traced and not len(k.rows)):
                continue
            limit = self.min_spilled_amd if k.kernel.target.startswith("gfx") else self.min_spilled
            if k.kernel.spilled < limit * REGISTER:
                continue
            ns = float(dur[k.rows].sum())
            if traced and ns < self.min_share * max(total, 1):
                continue
            found.append((ns, k))
        found.sort(key=lambda each: (-each[0], -(each[1].kernel.spilled or 0)))
        yield from (self._finding(found, total) for _ in found[:1])

    def _finding(self, found: list[tuple[float, MatchedKernel]], total: float) -> Finding:
        ns, worst = found[0][0], found[0][1].kernel
        size = t.format_bytes(worst.spilled or 0)
        text = (
            f"{labels.shorten(labels.clean(worst.name), 48)} spills {size} of registers per thread"
        )
        evidence = [
            Evidence("spilled registers per thread", (worst.spilled or 0) / REGISTER, "count"),
            Evidence("registers per thread", worst.registers, "count"),
            Evidence("num_warps", worst.num_warps, "count"),
        ]
        if total:
            text += f" and takes {t.format_share(ns / total)} of kernel time"
            evidence.append(self.compare("of kernel time", ns / total, "min_share"))
        text += f" (num_warps={worst.num_warps})."
        if len(found) > 1:
            text += f" {t.count_noun(len(found) - 1, 'more kernel')} spill too."
        return Finding(
            summary=text,
            evidence=evidence,
            where=[
                Location(
                    file=None if k.kernel.place is None else k.kernel.place[0],
                    line=None if k.kernel.place is None else k.kernel.place[1],
                    kernel=k.kernel.name,
                    count=len(k.rows) or None,
                    dur_ns=round(ns / len(k.rows)) if len(k.rows) else None,
                )
                for ns, k in found[:MAX_PLACES]
            ],
            impact=impact_without_gain(
                "the module does not show what the spills cost; time both variants"
            ),
        )

    @staticmethod
    def examples() -> Examples:
        """A product that keeps a tile of 128 by 256 in four warps."""
        return {
            "a large tile": _example(spilled=1664),
            "a few registers": (_example(spilled=32), "min_spilled"),
            "hardly runs": (_example(spilled=1664, us=1), "min_share"),
            "an array of sin": (_example(local=40, spilled=0), "not k.kernel.spilled"),
            "another compilation": (_example(spilled=1664, threads=256), "not len(k.rows)"),
        }


def _example(
    *, us: float = 900, local: int = 1664, spilled: int, threads: int = 128
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps():
        with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch("matmul_kernel", us, blocks=1280, threads=128, registers=255, shared=49152)
            b.launch("other_kernel", 400, blocks=1280, threads=128)
        b.sync()
    b.compiled_kernel("matmul_kernel", shared=49152, local=local, spilled=spilled, threads=threads)
    return b
