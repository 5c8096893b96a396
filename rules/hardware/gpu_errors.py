"""The GPU reports errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Worth
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.recorded import record
from advisor.testing import TraceBuilder

_XID = {
    13: "graphics engine exception: mostly the program's fault",
    31: "memory page fault: mostly the program's fault",
    43: "the program was stopped after an error of its own",
    45: "the program was cleaned up, often after another error",
    48: "double-bit ECC error: reset the GPU",
    61: "internal microcontroller breakpoint: reset, then replace",
    62: "internal microcontroller halt: reset, then replace",
    63: "a memory row was remapped: reset the GPU when the run is over",
    64: "remapping a memory row failed: replace the GPU",
    74: "NVLink error: check the bridge or the switch",
    79: "the GPU has fallen off the bus: power, seating, heat",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error: restart the program",
    95: "uncontained ECC error: reset the GPU",
    119: "the GPU's system processor does not answer: reset",
    120: "the GPU's system processor failed: reset",
}
"""What the XID errors of NVIDIA's list mean that programs meet."""

_PROGRAMS = {13, 31, 43, 45}


class GpuErrors(Rule):
    """The GPU's memory had errors that could not be corrected, a memory row waits to be remapped,
    or the driver logged an XID error: results may be wrong, and the run may end at any time.

    Errors that were corrected cost nothing and are not reported. Counters are those since the
    driver was loaded, so that an error may be older than the run; XID errors are those during the
    run. Some XID errors are the program's own fault (an index out of range in a kernel) and are
    told apart.
    """

    id = "gpu-errors"
    title = "The GPU reports errors"
    category = "hardware"
    reads_record = True
    references = (
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
        "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",
    )

    verify = "Record again: no errors."
    falsified_by = "the vendor's diagnosis finds nothing"
    confidence = 0.9

    fix = (
        "End the run at the next checkpoint, reset the GPU, run the vendor's "
        "diagnosis, and have it replaced if errors come back."
    )
    code = (
        "dmesg | grep -i xid\nnvidia-smi -q -d ECC,ROW_REMAPPER\n"
        "dcgmi diag -r 3   # once nothing runs on it"
    )
    cases: ClassVar = {
        "an error of the program": {
            "title": "The driver logged an error of the program",
            "fix": "Look for an index out of range or a freed tensor in a kernel.",
            "code": "CUDA_LAUNCH_BLOCKING=1 compute-sanitizer python train.py",
        }
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for any of them on the rank's GPU, warm-up included."""
        recorded = record(a)
        samples = [
            gpu for s in recorded.record.samples for gpu in s.gpus if gpu.uuid == recorded.uuid
        ]
        errors = [g.ecc_uncorrected for g in samples if g.ecc_uncorrected is not None]
        pending = any(gpu.remap_pending for gpu in samples)
        xid = sorted({number for gpu in samples for number in gpu.xid})
        if not xid and not pending and not (errors and errors[-1] > 0):
            return
        parts = [f"XID {n} ({_XID.get(n, 'see the list')})" for n in xid[:5]]
        if errors and errors[-1] > 0:
            during = errors[-1] - errors[0]
            parts.append(
                f"{errors[-1]} uncorrectable memory errors"
                + (f", {during} of them during the run" if during else ", all before the run")
            )
        if pending:
            parts.append("a memory row waits to be remapped, or could not be")
        own = bool(xid) and set(xid) <= _PROGRAMS and len(parts) == len(xid[:5])
        yield Finding(
            summary=f"{'; '.join(parts)}.",
            evidence=[
                Evidence("XID errors", ", ".join(map(str, xid)) or None),
                Evidence("uncorrectable memory errors", errors[-1] if errors else None, "count", 0),
                Evidence("row remapping pending", str(pending)),
                Evidence("GPU", recorded.uuid),
            ],
            worth=Worth(currency="risk", reason="wrong results, or the end of the run"),
            **(self.case("an error of the program") if own else {}),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """An XID error; uncorrectable errors; a pending row."""
        return {
            "off the bus": _run(xid=[79]),
            "a page fault": _run(xid=[31]),
            "uncorrectable": _run(uncorrected=2),
            "a pending row": _run(pending=True),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Corrected errors; remapped rows; nothing told."""
        return {
            "corrected": (_run(corrected=100), "not (errors and errors[-1] > 0)"),
            "nothing told": (_run(), "not (errors and errors[-1] > 0)"),
        }


def _run(
    *,
    xid: list[int] | None = None,
    uncorrected: int | None = None,
    corrected: int | None = None,
    pending: bool | None = None,
) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(60, 10)
    r.watch(
        gpu=lambda share: Gpu(
            uuid="GPU-x",
            xid=xid or [] if share == 0 else [],
            ecc_uncorrected=uncorrected,
            ecc_corrected=corrected,
            remap_pending=pending,
            remapped_rows=3,
        )
    )
    return b
