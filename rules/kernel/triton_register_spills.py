"""Kernels that Triton compiled with more values per thread than there are registers."""

from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import TRITON_CACHE
from advisor.core.finding import Finding, Location, Outcomes, impact_without_gain
from advisor.core.rule import ANY_FRAMEWORK, Citation, Evidence, FrameworkAdvice, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.kernel_profiles import MatchedKernel
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import INDUCTOR_SPILLS, TRIED_ON_TRACES
from advisor.testing import Examples, TraceBuilder

_MAX_PLACES = 5
REGISTER_BYTES = 4
"""Bytes of a register."""


class TritonRegisterSpills(Rule):
    """The values that a thread keeps at one time did not fit into its registers. The compiler
    stores some in local memory and loads them again, through L1 and L2. The rule reads registers
    and local memory from the module in Triton's cache.

    Arrays that the program declares, as sin and cos do for large arguments, are in local memory
    too. They are not spills, and are subtracted: their size is in the PTX next to the module.
    Triton's own ``n_spills`` counts them. With a trace, a kernel counts only if it takes a notable
    share of kernel time and its launches differ from those of other compilations."""

    id = "triton-register-spills"
    title = "Triton spills registers of a kernel"
    auxiliary_inputs = (TRITON_CACHE,)
    min_spilled_registers = Threshold(16, "registers per thread", INDUCTOR_SPILLS)
    min_spilled_registers_amd = Threshold(32, "registers per thread on AMD GPUs", INDUCTOR_SPILLS)
    min_share = Threshold(0.05, "of kernel time, where there is a trace", TRIED_ON_TRACES)
    confidence = 0.6
    fix = (
        "Let a thread keep fewer values: smaller block sizes, or more num_warps for the same "
        "block. Fewer num_stages help where a loop is pipelined. Add such configurations to "
        "triton.autotune."
    )
    code = (
        "configs = [triton.Config({'BLOCK_N': n}, num_warps=w, num_stages=s)\n"
        "           for n in (64, 128) for w in (4, 8) for s in (2, 3)]\n"
        "@triton.autotune(configs, key=['N'])"
    )
    verify = "The compiled kernel's n_spills is 0 in the variant that is faster."
    falsified_by = "a configuration without spills that is slower"
    assumptions = ("loads and stores of spilled registers slow the kernel down",)
    framework_advice = {ANY_FRAMEWORK: FrameworkAdvice(fix, code)}  # kernels belong to no framework
    references = (
        "https://triton-lang.org/main/python-api/generated/triton.Config.html",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#device-memory-accesses",
    )
    sources = (
        Citation("sin and cos are not spills", "https://github.com/triton-lang/triton/issues/1756"),
    )
    validation_note = "kernels compiled for sm_80 and sm_90; no trace of them was recorded"

    def check(self, a: Analysis) -> Outcomes:
        """Report the kernels that spill most; with a trace, those that take most time first."""
        has_trace = not a.record_only
        dur = a.trace.gpu["dur"].to_numpy()
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a)) if has_trace else 0
        spilling: list[tuple[float, MatchedKernel]] = []
        for k in a.compiled_kernels:
            if not k.kernel.spilled or (has_trace and not len(k.rows)):
                continue
            limit = (
                self.min_spilled_registers_amd
                if k.kernel.target.startswith("gfx")
                else self.min_spilled_registers
            )
            if k.kernel.spilled < limit * REGISTER_BYTES:
                continue
            ns = float(dur[k.rows].sum())
            if has_trace and ns < self.min_share * max(total, 1):
                continue
            spilling.append((ns, k))
        spilling.sort(key=lambda item: (-item[0], -(item[1].kernel.spilled or 0)))
        yield from (self._build_finding(spilling, total) for _ in spilling[:1])

    def _build_finding(self, spilling: list[tuple[float, MatchedKernel]], total: float) -> Finding:
        ns, worst = spilling[0][0], spilling[0][1].kernel
        size = t.format_bytes(worst.spilled or 0)
        summary = (
            f"{labels.shorten(labels.clean(worst.name), 48)} spills {size} of registers per thread"
        )
        evidence = [
            Evidence(
                "spilled registers per thread", (worst.spilled or 0) / REGISTER_BYTES, "count"
            ),
            Evidence("registers per thread", worst.registers, "count"),
            Evidence("num_warps", worst.num_warps, "count"),
        ]
        if total:
            summary += f" and takes {t.format_share(ns / total)} of kernel time"
            evidence.append(
                self.compare("time of the kernel, share of kernel time", ns / total, "min_share")
            )
        summary += f" (num_warps={worst.num_warps})."
        if len(spilling) > 1:
            summary += f" {t.count_noun(len(spilling) - 1, 'more kernel')} spill too."
        return Finding(
            summary=summary,
            evidence=evidence,
            where=[
                Location(
                    file=None if k.kernel.place is None else k.kernel.place[0],
                    line=None if k.kernel.place is None else k.kernel.place[1],
                    kernel=k.kernel.name,
                    count=len(k.rows) or None,
                    dur_ns=round(ns / len(k.rows)) if len(k.rows) else None,
                )
                for ns, k in spilling[:_MAX_PLACES]
            ],
            impact=impact_without_gain(
                "the module does not show what the spills cost; time both variants"
            ),
        )

    @staticmethod
    def examples() -> Examples:
        """Return a product that keeps a tile of 128 by 256 in four warps, and traps."""
        return {
            "a large tile": _build_example(spilled=1664),
            "a few registers": (_build_example(spilled=32), "min_spilled_registers"),
            "hardly runs": (_build_example(spilled=1664, us=1), "min_share"),
            "an array of sin": (_build_example(local=40, spilled=0), "not k.kernel.spilled"),
            "another compilation": (_build_example(spilled=1664, threads=256), "not len(k.rows)"),
        }


def _build_example(
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
