"""Rules about the driver's reports on the GPU: errors, other processes, the PCIe link."""

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select, impact_risk, impact_without_gain
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.core.run_directory import GpuSample
from advisor.measure import Analysis
from advisor.measure.memory.trace_memory import gpu_capacity
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.common import link_speed, record_example, run_steps_of, under_load
from advisor.testing import Examples, TraceBuilder

XID_ERRORS = {
    13: "graphics engine exception: usually the program's fault",
    31: "memory page fault: usually the program's fault",
    43: "the program was stopped after its own error",
    45: "the program was cleaned up, often after another error",
    48: "double-bit ECC error: reset the GPU",
    61: "internal microcontroller breakpoint: reset, then replace",
    62: "internal microcontroller halt: reset, then replace",
    63: "a memory row was remapped: reset the GPU after the run",
    64: "remapping a memory row failed: replace the GPU",
    74: "NVLink error: check the bridge or the switch",
    79: "the GPU has fallen off the bus: power, seating, heat",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error: restart the program",
    95: "uncontained ECC error: reset the GPU",
    119: "the GPU's system processor does not answer: reset",
    120: "the GPU's system processor failed: reset",
}
"""Meanings of the XID errors in NVIDIA's list that programs meet, by number."""
PROGRAM_ERRORS = {13, 31, 43, 45}


class GpuErrors(Rule):
    """The GPU's memory had uncorrectable errors, a memory row waits to be remapped, or the driver
    logged an XID error. Results may be wrong, and the run may end at any time.

    Corrected errors cost nothing and are not reported. ECC counters start when the driver is
    loaded, so an error may be older than the run. XID errors are from the run itself. Some XID
    errors are the program's own fault, such as an index out of range in a kernel. They have
    separate advice."""

    id = "gpu-errors"
    title = "The GPU reports errors"
    reads_record = True
    references = (
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
        "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",
    )

    fix = (
        "End the run at the next checkpoint, reset the GPU and run the vendor's diagnosis. Have "
        "the GPU replaced if errors come back."
    )
    code = (
        "dmesg | grep -i xid\nnvidia-smi -q -d ECC,ROW_REMAPPER\n"
        "dcgmi diag -r 3   # once nothing runs on it"
    )
    verify = "Record again: no errors."
    falsified_by = "a vendor diagnosis that finds nothing"
    confidence = 0.9
    cases = {
        "an error of the program": {
            "title": "The driver logged an error of the program",
            "fix": "Look for an index out of range or a freed tensor in a kernel.",
            "code": "CUDA_LAUNCH_BLOCKING=1 compute-sanitizer python PROGRAM.py",
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        """Look for errors on the rank's GPU, warm-up included."""
        run_steps = run_steps_of(a)
        samples = [
            gpu
            for s in run_steps.rank_record.samples
            for gpu in s.gpus
            if gpu.uuid == run_steps.uuid
        ]
        errors = [gpu.ecc_uncorrected for gpu in samples if gpu.ecc_uncorrected is not None]
        pending = any(gpu.remap_pending for gpu in samples)
        xid = sorted({number for gpu in samples for number in gpu.xid})
        if not xid and not pending and not (errors and errors[-1] > 0):
            return
        parts = [f"XID {n} ({XID_ERRORS.get(n, 'see the list')})" for n in xid[:5]]
        if errors and errors[-1] > 0:
            during = errors[-1] - errors[0]
            parts.append(
                f"{errors[-1]} uncorrectable memory errors"
                + (f", {during} of them during the run" if during else ", all before the run")
            )
        if pending:
            parts.append("a memory row waits to be remapped, or remapping failed")
        is_program_error = bool(xid) and set(xid) <= PROGRAM_ERRORS and len(parts) == len(xid[:5])
        text = "; ".join(parts)
        yield Finding(
            summary=f"{t.upper_first(text)}.",
            evidence=[
                Evidence("XID errors", ", ".join(map(str, xid)) or None),
                Evidence("uncorrectable memory errors", errors[-1] if errors else None, "count", 0),
                Evidence("row remapping pending", str(pending)),
                Evidence("GPU with the errors", run_steps.uuid),
            ],
            impact=impact_risk("wrong results, or the end of the run"),
            **(self.case("an error of the program") if is_program_error else {}),
        )

    @staticmethod
    def examples() -> Examples:
        guard = "not (errors and errors[-1] > 0)"
        return {
            "off the bus": record_example(
                lambda share: _build_gpu_sample(xid=[] if share else [79])
            ),
            "a page fault": record_example(
                lambda share: _build_gpu_sample(xid=[] if share else [31])
            ),
            "uncorrectable": record_example(_build_gpu_sample(ecc_uncorrected=2)),
            "a pending row": record_example(_build_gpu_sample(remap_pending=True)),
            "corrected": (record_example(_build_gpu_sample(ecc_corrected=100)), guard),
            "not recorded": (record_example(_build_gpu_sample()), guard),
        }


class GpuShared(Rule):
    """Other processes have a context on the GPU. They take memory, and while they compute, this
    process waits, because kernels of different processes take turns.

    The recorder asks the driver for the processes on the GPU and leaves out its own and its
    children. In a container process ids may belong to another namespace. Then nothing is known. A
    context with little memory, such as a display or a monitor, does not count. The other processes
    together must use 5% of the device memory."""

    id = "gpu-shared"
    title = "Other processes use the GPU"
    verdict_role = "shared GPU"
    reads_record = True
    references = ("https://docs.nvidia.com/deploy/mps/index.html",)

    min_memory = Threshold(
        0.05, "of the device memory, used by others: contexts of monitors take less", CHOSEN
    )
    min_samples = Threshold(0.20, "of the samples that list processes", CHOSEN)

    fix = (
        "Let the scheduler give the GPU to one job (exclusive mode), end processes left over from "
        "earlier runs, or split the GPU on purpose (MIG)."
    )
    code = "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv"
    verify = "Record again, alone on the GPU: step times are shorter and vary less."
    falsified_by = "the same median step alone on the GPU"
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        samples = [gpu for gpu in run_steps_of(a).gpus if gpu.processes is not None]
        total = gpu_capacity(a)
        if not samples or not total:
            return
        used = np.array([gpu.processes_bytes or 0 for gpu in samples], dtype=np.float64)
        share = float(np.mean(used >= self.min_memory * total))
        if share < self.min_samples:
            return
        count = max(gpu.processes or 0 for gpu in samples)
        subject = "other process uses" if count == 1 else "other processes use"
        yield Finding(
            summary=(
                f"Up to {count} {subject} {t.format_bytes(float(used.max()))} of the device's "
                f"{t.format_bytes(total)} during {share:.0%} of the run."
            ),
            evidence=[
                Evidence("other processes, peak", count, "count"),
                self.compare(
                    "memory of other processes, peak",
                    float(used.max()),
                    "min_memory",
                    "bytes",
                    times=total,
                ),
                self.compare("samples with other processes", share, "min_samples"),
            ],
            impact=impact_without_gain("how long the other processes computed is not recorded"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "another training run": record_example(
                _build_gpu_sample(processes=1, processes_bytes=20 * 10**9)
            ),
            "alone": (
                record_example(_build_gpu_sample(processes=0, processes_bytes=0)),
                "share < self.min_samples",
            ),
            "a monitor": (
                record_example(_build_gpu_sample(processes=1, processes_bytes=300 * 10**6)),
                "min_memory",
            ),
            "not recorded": (record_example(_build_gpu_sample()), "not samples"),
        }


class PcieDowngraded(Rule):
    """The PCIe link runs with fewer lanes, or at an older generation, than GPU and slot allow. So
    copies between host and device take longer in proportion. Usual causes are a badly seated card,
    a riser, or a BIOS setting.

    Only samples under load count, because an idle GPU lowers its link speed to save power. The link
    must be slower in most of them. The driver reports the maximum of the slot."""

    id = "pcie-downgraded"
    title = "The GPU's PCIe link is downgraded"
    reads_record = True
    references = ("https://docs.nvidia.com/deploy/nvidia-smi/index.html",)

    min_samples = Threshold(2, "samples: the link is read every few seconds only", CHOSEN)
    min_share = Threshold(0.50, "of the samples under load that have the link", CHOSEN)

    fix = "Reseat the card, try another slot or riser, and check the link settings in the BIOS."
    code = (
        "nvidia-smi --format=csv --query-gpu=pcie.link.gen.current\n"
        "nvidia-smi --format=csv --query-gpu=pcie.link.width.current"
    )
    verify = "Record again: the link runs at its maximum under load."
    falsified_by = "the same copy bandwidth with the faster link"
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        links = [
            (gpu.pcie_gen, gpu.pcie_width, gpu.pcie_gen_max, gpu.pcie_width_max)
            for gpu in under_load(run_steps_of(a))
            if gpu.pcie_gen and gpu.pcie_width and gpu.pcie_gen_max and gpu.pcie_width_max
        ]
        if len(links) < self.min_samples:
            return
        speeds = [
            link_speed(gen, width) / link_speed(max_gen, max_width)
            for gen, width, max_gen, max_width in links
        ]
        is_slower = [speed < 0.99 for speed in speeds]
        share = float(np.mean(is_slower))
        if share < self.min_share:
            return
        ratio = float(np.median([speed for speed in speeds if speed < 0.99]))
        gen, width, max_gen, max_width = links[is_slower.index(True)]
        copies = Select(on="gpu", kind=("memcpy",), copy=("HtoD", "DtoH"))
        traced = a.device_id is not None
        yield Finding(
            summary=(
                f"Under load the link is PCIe {gen} x{width} where PCIe {max_gen} x{max_width} is "
                f"possible: copies between host and device run at {ratio:.0%} of the speed."
            ),
            evidence=[
                Evidence("PCIe link in use", f"PCIe {gen} x{width}"),
                Evidence("PCIe link that GPU and slot allow", f"PCIe {max_gen} x{max_width}"),
                Evidence("speed of the link in use, share of the possible", ratio, "share"),
                self.compare("samples under load with the slower link", share, "min_share"),
            ],
            edits=[Edit(op="scale", select=copies, factor=ratio)] if traced else [],
            impact=None if traced else impact_without_gain("how long copies take is not recorded"),
        )

    @staticmethod
    def examples() -> Examples:
        b = TraceBuilder()
        for _ in b.steps():
            b.copy("HtoD", 60_000_000, blocking=True)
            b.product(2000, wait=True)
        few = "len(links) < self.min_samples"
        return {
            "eight lanes": record_example(_build_link_sample(4, 8)),
            "generation 3": record_example(_build_link_sample(3, 16), b),
            "at its maximum": (record_example(_build_link_sample(4, 16)), "share < self.min_share"),
            "idle": (record_example(_build_link_sample(1, 16, utilisation=2)), few),
            "not recorded": (record_example(_build_link_sample(None, None)), few),
        }


def _build_gpu_sample(**sensors: object) -> GpuSample:
    return GpuSample(uuid="GPU-x", memory_total=80 * 10**9, remapped_rows=3, **sensors)  # type: ignore[arg-type]


def _build_link_sample(
    generation: int | None, width: int | None, utilisation: int = 98
) -> GpuSample:
    return _build_gpu_sample(
        utilisation=utilisation,
        pcie_gen=generation,
        pcie_width=width,
        pcie_gen_max=4,
        pcie_width_max=16,
    )
