"""Many small collectives in a row that could be one."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select, impact_without_gain
from advisor.core.rule import Evidence, FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.comm.gloo import COLLECTIVE_WAITS
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import COMMUNICATION, outermost_rows
from advisor.rules.support.citations import ENGINE_FLOOR, NCCL_TESTS, SILENT_TRACES, TRIED_ON_TRACES
from advisor.rules.support.common import (
    amount_per_step,
    device_places,
    example_steps,
    int_column,
    of_step,
    row_numbers,
    sum_column,
)
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import Examples, TraceBuilder


class _Runs(NamedTuple):
    member: NDArray[np.bool_]
    """Rows of ``Analysis.collectives`` that belong to a run."""
    number: NDArray[np.int64]
    """Number of the run that each of those rows belongs to."""


class SmallCollectives(Rule):
    """Many small collectives follow each other, each so short that latency is most of it. In one
    bucket they would pay that latency once.

    The rule looks for *runs*: three or more collectives of one kind and process group, each below 1
    MiB. One thread launches them, with hardly any compute launched in between. Small collectives
    between the layers of a model (tensor parallelism) are not a run. Each result is needed before
    the next can start, so they cannot be merged. The estimate of the merged duration is one latency
    (the shortest collective) and what each takes beyond it. Where ranks train on CPUs, the
    collectives are gloo's, and operators take the place of launches. Threads that have to be woken
    make the latency vary. So it is the median of the smaller messages, and what the largest take
    beyond it is their transfer."""

    id = "small-collectives"
    title = "Many small collectives that could be one bucket"
    knobs = ("ddp-bucket-size",)
    sampled_part = COMMUNICATION
    found_in = ("recorded/gloo_parameters.slow",)
    silent_in = SILENT_TRACES
    validation_note = "CPU recordings of two ranks that reduce each gradient alone, and all as one"
    references = (
        "https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    )

    min_count = Threshold(20.0, "collectives per step, in runs", TRIED_ON_TRACES)
    max_bytes = Threshold(1048576, "bytes: NCCL needs some MiB to reach its bandwidth", NCCL_TESTS)
    max_between = Threshold(
        2, "compute launches between two of a run (a division, a cast)", TRIED_ON_TRACES
    )
    min_share = Threshold(0.01, "of the step, exposed in runs", ENGINE_FLOOR)

    fix = (
        "Send them together: let DistributedDataParallel bucket gradients (bucket_cap_mb) instead "
        "of reducing each parameter. Or flatten tensors of one dtype into one buffer, or group "
        "calls with dist._coalescing_manager. Reduce metrics every N steps."
    )
    code = (
        "flat = torch._utils._flatten_dense_tensors(grads)\n"
        "dist.all_reduce(flat)    # a sum: divide it if your code does\n"
        "news = torch._utils._unflatten_dense_tensors(flat, grads)\n"
        "torch._foreach_copy_(grads, news)\n\n"
        "# or, with DDP; keep your other arguments\n"
        "model = DDP(model, bucket_cap_mb=50, gradient_as_bucket_view=True)"
    )
    verify = "Profile again: fewer collectives per step, each of some MiB."
    falsified_by = "code between them that uses each result"
    assumptions = ("no collective of a run needs the result of the one before",)
    confidence = 0.7

    inference = {
        "fix": "Send them together: flatten tensors of one dtype into one buffer, or group calls "
        "with dist._coalescing_manager. Gather metrics every N steps.",
        "code": "flat = torch._utils._flatten_dense_tensors(parts)\n"
        "dist.all_reduce(flat)\n"
        "parts = torch._utils._unflatten_dense_tensors(flat, parts)",
    }
    framework_advice = {
        **in_any_language(
            "Send many small messages as one: pack buffers, or group the calls.",
            cuda="ncclGroupStart and ncclGroupEnd around calls of NCCL.",
        ),
        TENSORFLOW: FrameworkAdvice(
            "Send gradients in larger packs.",
            "tf.distribute.experimental.CommunicationOptions(\n"
            "    bytes_per_pack=50 * 1024 * 1024)",
        ),
        JAX: FrameworkAdvice(
            "Let XLA send small messages together.",
            'os.environ["XLA_FLAGS"] = (\n'
            '    "--xla_gpu_all_reduce_combine_threshold_bytes=134217728")',
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        if not a.breakdown.all_communication.total:
            return
        table = a.collectives
        runs = self._find_runs(a, table)
        count = int(runs.member.sum()) / a.step_count
        cost = np.where(runs.member, int_column(table, "exposed"), 0)
        share = float(cost.sum()) / a.span_ns
        if count < self.min_count or share < self.min_share:
            return
        dur, size = (int_column(table, name)[runs.member] for name in ("dur", "bytes"))
        latency, longest = int(dur.min()), int(dur.max())
        run_count = len(np.unique(runs.number))
        merged = int((dur - latency).sum()) + latency * run_count
        # the edit selects short communication, and these collectives may be a part of it
        select = Select(on="gpu", family=("communication",), max_ns=longest)
        part = table.filter(pl.col("dur") <= longest)
        if a.device_id is None:
            select = Select(on="gpu", family=("communication",), max_bytes=int(size.max()))
            part = table.filter(pl.col("bytes") <= int(size.max()))
            latency, merged = _estimate_merged(dur, size, run_count, merged)
        keep = 1 - (int(dur.sum()) - merged) / max(1, sum_column(part["dur"]))
        median = float(np.median(size))
        groups = max(1, round(run_count / a.step_count))
        yield Finding(
            summary=(
                f"{count:.0f} collectives {t.format_per(a.per)} (median {t.format_bytes(median)}) "
                f"run back to back in {t.count_noun(groups, 'group')}. "
                f"{t.format_duration(latency)} of each is latency; nothing hides "
                f"{of_step(a, float(cost.sum()))}."
            ),
            evidence=[
                self.compare("small collectives in runs", count, "min_count", "count", per=a.per),
                self.compare("median message", median, "max_bytes", "bytes"),
                amount_per_step(a, "exposed small collectives", float(cost.sum())),
                self.compare("exposed small collectives, share", share, "min_share", per=a.per),
                Evidence("shortest small collective", latency, "ns"),
                amount_per_step(a, "time of the small collectives", int(dur.sum())),
                Evidence(
                    "time of the small collectives if merged (estimate)",
                    merged / a.step_count,
                    "ns",
                ),
            ],
            where=device_places(a, table, cost),
            edits=[Edit(op="merge", select=select, factor=max(0.0, min(1.0, keep)))],
        )

    def _find_runs(self, a: Analysis, table: pl.DataFrame) -> _Runs:
        """Find runs of three or more, in order of launch."""
        gpu, cpu = a.trace.gpu, a.trace.cpu
        on_host = a.device_id is None
        launch = row_numbers(table["op"] if on_host else gpu["launch"].gather(table["gpu"]))
        order = np.argsort(launch, kind="stable")
        has_size = table["bytes"].is_not_null().to_numpy()
        is_small = has_size & (int_column(table, "bytes") < self.max_bytes) & (launch >= 0)
        if on_host:
            launches = outermost_rows(a.trace)
            waits = name_matches(cpu["name"], COLLECTIVE_WAITS).to_numpy()
            launches = launches[~waits[launches]]
        else:
            compute = (gpu["kind"] == "kernel").to_numpy() & ~a.kernels["communication"].to_numpy()
            launches = np.sort(row_numbers(gpu["launch"])[compute])
        launches_before = np.searchsorted(launches, launch)
        thread = np.append(cpu["thread"].to_numpy(), -1)[launch]
        kind = (
            table.select(pl.struct("collective", "group", "stream").rank("dense")).to_series()
        ).to_numpy()
        is_linked = np.zeros(len(order), dtype=bool)  # to the one before it in order of launch
        current, previous = order[1:], order[:-1]
        is_linked[1:] = is_small[current] & is_small[previous] & (kind[current] == kind[previous])
        is_linked[1:] &= thread[current] == thread[previous]
        is_linked[1:] &= launches_before[current] - launches_before[previous] <= self.max_between
        run_number = np.cumsum(~is_linked) - 1
        length = np.bincount(run_number, minlength=1)
        in_run = np.zeros(len(order), dtype=bool)
        in_run[order] = length[run_number] >= 3
        run_of_row = np.zeros(len(order), dtype=np.int64)
        run_of_row[order] = run_number
        in_run &= is_small
        return _Runs(in_run, run_of_row[in_run])

    @staticmethod
    def examples() -> Examples:
        def add_gradients(b: TraceBuilder) -> None:
            b.product(300, 10)
            for _ in range(60):
                b.collective("allreduce", 40_000, 30)
            b.wait_stream(7, 20)

        def add_layers(b: TraceBuilder) -> None:
            for _ in range(40):
                b.product(60, 3)
                b.collective("allreduce", 40_000, 30, wait=True)

        def add_buckets(b: TraceBuilder) -> None:
            b.product(3000)
            for _ in range(4):
                b.collective("allreduce", 25 << 20, 400)

        def add_hidden_gradients(b: TraceBuilder) -> None:
            b.product(9000, stream=9)
            for _ in range(60):
                b.collective("allreduce", 40_000, 30)

        return {
            "each gradient alone": example_steps(add_gradients),
            "each gradient alone, on CPUs": _build_cpu_steps(60),
            "between layers": (example_steps(add_layers), "max_between"),
            "large buckets": (example_steps(add_buckets), "count < self.min_count"),
            "hidden": (example_steps(add_hidden_gradients), "share < self.min_share"),
        }


def _estimate_merged(
    dur: NDArray[np.int64], size: NDArray[np.int64], runs: int, max_ns: int
) -> tuple[int, int]:
    """Return (latency, time of one collective per run in place of all), ns, from the medians of the
    smaller messages and of the largest, and at most ``max_ns``."""
    smaller = size <= np.median(size)
    short, long = float(np.median(dur[smaller])), float(np.median(dur[size == size.max()]))
    rate = max(0.0, long - short) / max(1, int(size.max() - size[smaller].max()))
    return round(short), min(max_ns, round(short * runs + rate * float(size.sum())))


def _build_cpu_steps(count: int) -> TraceBuilder:
    b = TraceBuilder(None, rank=0, world_size=2)
    for _ in b.steps():
        b.on_host("aten::mm", 3000)
        for _ in range(count):
            b.host_collective("allreduce", 40_000, 200, wait=True)
            b.on_host("aten::div_", 3)
    return b


class UnbucketedGradients(Rule):
    """Each step makes many more all-reduces than buckets would take: one for each parameter, or
    buckets that are too small. Compute may hide them here; on more ranks or a slower network their
    latency adds up.

    Larger messages are as good as buckets. Where the all-reduces delay the step, small-collectives
    and exposed-communication report them with a gain."""

    id = "unbucketed-gradients"
    title = "Gradients are reduced one by one"
    knobs = ("ddp-bucket-size",)
    silent_in = SILENT_TRACES
    references = SmallCollectives.references

    min_count = Threshold(
        100,
        "all-reduces per step: as many buckets of 25 MB hold 2.5 GB of gradients",
        TRIED_ON_TRACES,
    )
    max_bytes = Threshold(
        1048576, "bytes on average: NCCL needs some MiB to reach its bandwidth", NCCL_TESTS
    )
    max_exposed = Threshold(
        0.5, "of their time exposed: above it another rule reports them", TRIED_ON_TRACES
    )

    fix = (
        "Let DistributedDataParallel send gradients in buckets (bucket_cap_mb), in place of a hook "
        "or a loop that reduces each parameter."
    )
    code = (
        "# keep your other arguments\n"
        "model = DDP(model, bucket_cap_mb=50, gradient_as_bucket_view=True)"
    )
    verify = "Profile again: fewer all-reduces per step, each of some MiB."
    falsified_by = SmallCollectives.falsified_by
    confidence = 0.7
    framework_advice = SmallCollectives.framework_advice

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        table = a.collectives.filter(
            pl.col("collective") == "all_reduce", ~pl.col("axis").is_in(["tensor", "context"])
        )
        count = table.height / a.step_count
        if count < self.min_count:
            return
        exposed = sum_column(table["exposed"]) / max(1, sum_column(table["dur"]))
        if exposed > self.max_exposed:
            return
        size = None if table["bytes"].null_count() else sum_column(table["bytes"]) / table.height
        if size is not None and size > self.max_bytes:
            return
        size_text = "" if size is None else f" of {t.format_bytes(size)} on average"
        yield Finding(
            title=f"{count:.0f} all-reduces {t.format_per(a.per)}, not in buckets",
            summary=(
                f"{count:.0f} all-reduces{size_text} run {t.format_per(a.per)}. Compute hides most "
                "of their time here; on more ranks or a slower network their latency adds up."
            ),
            evidence=[
                self.compare("all-reduces", count, "min_count", "count", per=a.per),
                self.compare("mean message", size, "max_bytes", "bytes"),
                self.compare("exposed part of the all-reduces", exposed, "max_exposed"),
                amount_per_step(a, "time of all-reduces", sum_column(table["dur"])),
            ],
            where=device_places(a, table, "dur"),
            impact=impact_without_gain("compute hides most of their time here"),
            severity="warning",
            informational=True,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "one per parameter": example_steps(_build_reductions(150, 40_000)),
            "buckets": (example_steps(_build_reductions(12, 40_000)), "min_count"),
            "large messages": (example_steps(_build_reductions(150, 25 << 20)), "max_bytes"),
            "exposed": (example_steps(_build_reductions(150, 40_000, compute=100)), "max_exposed"),
        }


def _build_reductions(
    count: int, size: int, compute: float = 20_000
) -> Callable[[TraceBuilder], None]:
    def body(b: TraceBuilder) -> None:
        b.product(compute, stream=9)
        with b.op("autograd::engine::evaluate_function: MmBackward0"):
            for _ in range(count):
                b.collective("allreduce", size, 30)

    return body
