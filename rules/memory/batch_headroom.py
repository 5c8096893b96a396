"""Half of the GPU memory is free: a larger batch would fit."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, SkippedCheck, impact_without_gain
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.trace_memory import gpu_capacity
from advisor.rules.support.citations import CHOSEN, GPU_IDLE, SAGEMAKER, TRACEML
from advisor.rules.support.common import run_steps_of, steps_seen
from advisor.rules.support.device_memory import held_by_others, last_known
from advisor.rules.support.launch_gaps import measure_launch_gaps
from advisor.testing import Examples, TraceBuilder

MAX_FACTOR = 16
"""Maximum factor of the batch that is shown. Larger ones read ``16 or more``."""


class BatchHeadroom(Rule):
    """GPU memory is at most half used, other processes included, and the GPU is not kept busy. A
    larger batch spreads the fixed costs of a step (launches, the optimizer, the all-reduce of
    gradients) over more samples.

    The GPU counts as not busy where it idles for 20% of the run's own step or more, by the work of
    the profiled window. Without a window, it counts where GPM shows less than 70% of the
    multiprocessors active. It also counts where NVML shows less than 70% utilization at its 95th
    percentile (SageMaker's BatchSize rule). A high NVML utilization alone says nothing.

    A larger batch saves nothing where the host's work on each sample sets the pace: loading,
    pinning, preprocessing. So at least half of the GPU's idle time has to be between launches.
    Without a window, loading may take up to half of the step. A driver that frees memory in the
    loop shows that the allocator may not use the free memory. Then the note is left out.

    A larger batch changes the optimization, because there are fewer updates per epoch. The learning
    rate has to be scaled: linearly with SGD, by the square root with Adam, after a warm-up. The
    same quality may need more epochs. So this is a note, never a finding."""

    id = "batch-headroom"
    title = "GPU memory has room for a larger batch"
    reads_record = True
    references = ("https://arxiv.org/abs/1706.02677", "https://arxiv.org/abs/2205.10287")

    max_memory = Threshold(0.50, "of GPU memory, reserved at the peak", CHOSEN)
    max_busy = Threshold(0.80, "of the step, the GPU is busy", GPU_IDLE)
    max_active = Threshold(
        70.0,
        "% of the multiprocessors active, or NVML utilization at its 95th percentile",
        SAGEMAKER,
    )
    min_launch_gap_share = Threshold(
        0.5, "of the GPU's idle time is between launches, which more samples would share", CHOSEN
    )
    max_loading_share = Threshold(
        0.5, "of the step is loading, where no window was profiled", CHOSEN
    )
    target_share = Factor(
        0.85, "of GPU memory, with the larger batch: below what counts as near capacity", TRACEML
    )

    fix = (
        "Double the batch and compare samples per second. Continue while they rise. Scale the "
        "learning rate (linearly with SGD, by the square root with Adam) and warm it up. This "
        "changes the optimization: compare quality after the same number of samples."
    )
    code = (
        "scale = new_batch / old_batch\n"
        "lr = old_lr * scale            # SGD with momentum; Adam: scale ** 0.5"
    )
    verify = "Record again: samples per second rise."
    falsified_by = "the same samples per second with twice the batch"
    confidence = 0.6

    inference = {
        "fix": "Double the batch and compare samples per second. Continue while they rise.",
        "code": "model(torch.cat([batch, next_batch]))   # half as many calls",
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        total = gpu_capacity(a)
        peak = last_known(run_steps.column("peak"))
        reserved = run_steps.column("reserved")
        if not total or peak is None or not run_steps.count:
            return
        used_bytes = float(np.nanmax(reserved)) if (~np.isnan(reserved)).any() else peak
        others = held_by_others(a)
        if used_bytes + others > self.max_memory * total:
            return
        active = _measure_activity(a)
        if active is None:
            yield SkippedCheck(
                what="whether a larger batch would keep the GPU busier",
                why="neither a profiled window nor telemetry shows how busy the GPU is",
            )
            return
        label, value, limit = active
        if value >= (self.max_busy if limit == "busy" else self.max_active / 100):
            return
        if self._grows_with_batch(a) or _is_capped(a):
            return
        factor = int((self.target_share * total - others) / max(used_bytes, 1.0))
        factor_text = f"up to {factor}" if factor < MAX_FACTOR else f"{MAX_FACTOR} or more"
        others_text = f" Other processes hold {t.format_bytes(others)}." * bool(others)
        samples = run_steps.column("samples")[run_steps.used]
        samples = samples[~np.isnan(samples)]
        batch_size = float(np.median(samples)) if len(samples) else None
        yield Finding(
            summary=(
                f"The run holds {t.format_bytes(used_bytes)} of {t.format_bytes(total)} "
                f"({t.format_share(used_bytes / total)}), and the GPU is not kept busy ({label} "
                f"{value:.0%}).{others_text} A batch {factor_text} times as large may fit."
            ),
            evidence=[
                Evidence("GPU memory held", used_bytes, "bytes"),
                self.compare(
                    "share of the GPU's memory held, other processes included",
                    (used_bytes + others) / total,
                    "max_memory",
                ),
                Evidence(label, value, "share"),
                Evidence("samples per batch", batch_size, "count"),
                steps_seen(run_steps),
            ],
            impact=impact_without_gain("the recording does not show how fast a larger batch is"),
            informational=True,
        )

    def _grows_with_batch(self, a: Analysis) -> bool:
        """Return whether the GPU waits for work of the host that each sample adds."""
        gaps = measure_launch_gaps(a) if a.span_ns and a.device_id is not None else None
        if gaps is not None:
            return gaps.idle < self.min_launch_gap_share * (a.span_ns - a.breakdown.busy.total)
        run_steps = run_steps_of(a)
        loading = run_steps.phase("data")
        if loading is None or not len(loading) or not run_steps.median:
            return False
        return float(np.nanmedian(loading)) > self.max_loading_share * run_steps.median

    @staticmethod
    def examples() -> Examples:
        """Build runs with a tenth of the memory and 40% active, or an idle GPU in the window.
        Others are full, busy, at a utilization of 100%, or without a recording."""
        return {
            "40% of the multiprocessors": _build_run(8e9, gpm=40),
            "an idle GPU in the window": _build_run(8e9, window=True),
            "the host prepares each batch": (
                _build_run(8e9, window=True, prepares=True),
                "min_launch_gap_share",
            ),
            "an allocator with a limit": (
                _build_run(8e9, window=True, frees=True),
                "_is_capped(a)",
            ),
            "loading takes the step": (_build_run(8e9, gpm=40, data=9), "max_loading_share"),
            "full": (_build_run(70e9, gpm=40), "max_memory"),
            "busy": (_build_run(8e9, gpm=90), "max_active"),
            "utilization of 100%": (_build_run(8e9, utilisation=100), "max_active"),
            "GPU activity not recorded": (_build_run(8e9), "active is None"),
            "no GPU": (_build_run(None), "not total"),
            "other processes": (_build_run(8e9, gpm=40, others=40e9), "max_memory"),
        }


def _is_capped(a: Analysis) -> bool:
    """Return whether the allocator gave memory back to the driver in the loop, although half of the
    GPU's memory is free: it may not use more."""
    # inside an operator: outside it is torch.cuda.empty_cache()
    return a.allocations.filter((pl.col("call") == "free") & pl.col("op").is_not_null()).height > 0


def _measure_activity(a: Analysis) -> tuple[str, float, str] | None:
    """Return (label, share, kind) of the best measure of how busy the GPU is."""
    if a.unprofiled_busy_share is not None:
        return "GPU busy, share of the step", a.unprofiled_busy_share, "busy"
    run_steps = run_steps_of(a)
    active = [gpu.gpm["sm_util"] for gpu in run_steps.gpus if gpu.gpm and "sm_util" in gpu.gpm]
    if len(active) >= 5:
        return "multiprocessors active", float(np.mean(active)) / 100, "active"
    used = run_steps.gpu("utilisation")
    if len(used) >= 5:
        return "utilization, 95th percentile", float(np.quantile(used, 0.95)) / 100, "active"
    return None


def _build_run(
    held: float | None,
    *,
    gpm: float | None = None,
    utilisation: int | None = None,
    window: bool = False,
    prepares: bool = False,
    frees: bool = False,
    data: float = 0,
    others: float = 0,
) -> TraceBuilder:
    from advisor.core.run_directory import GpuSample, RecordedDevice

    b = TraceBuilder()
    for _ in b.steps(4 if window else 0):
        b.product(1000, wait=True)
        if prepares:
            b.host(4000)
        b.run("aten::add", "elementwise_kernel", 4, times=100, host_us=20)
        if frees:
            with b.op("aten::empty"):
                b.call("cudaFree", 50)
    devices = [] if held is None else [RecordedDevice(total_bytes=80 * 10**9)]
    r = b.record_of_run(devices=devices)
    fields = {} if held is None else {"peak": round(held), "reserved": round(held), "samples": 32}
    r.steps(60, 10, fields=fields, data=data)
    if gpm is not None or utilisation is not None:
        r.watch(
            gpu=GpuSample(
                uuid="GPU-x",
                utilisation=utilisation,
                gpm=None if gpm is None else {"sm_util": gpm},
                processes=1 if others else 0,
                processes_bytes=round(others),
            )
        )
    return b
