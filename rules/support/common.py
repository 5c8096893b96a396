"""Functions that several rules need for a finding: amounts per step and the costliest places. For a
recorded run, also its record, its loader and the impact of a fix."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import polars as pl
from msgspec.structs import replace
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, GainKind, Impact, Instants, Location, Select
from advisor.core.intervals import Floats, Intervals, covered_length
from advisor.core.report_steps import EQUAL_STEP_SHARE
from advisor.core.rule import Evidence, Factor, Rule
from advisor.core.run_directory import MAX_VALUE, Event, GpuSample
from advisor.measure import Analysis
from advisor.measure.host.gaps import device_waits
from advisor.measure.host.layers import describe_nodes, modules_around
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    MIN_SAMPLES,
    climb_stack,
    is_operator,
    nullable_rows,
    outermost_rows,
    parent_rows,
    read_stacks,
    share_in,
)
from advisor.measure.steps.periodic import LOOP_PHASES
from advisor.measure.steps.run_steps import RunSteps
from advisor.measure.steps.steps import rows_in_steps
from advisor.rules.support.citations import SMT
from advisor.testing import TraceBuilder

Rows = NDArray[np.int64]

MAX_CORRELATIONS = 500
"""Maximum number of single calls or copies that an Edit names, to keep the report small."""

CONFUSION_MATRIX = (
    "# a confusion matrix that stays on the GPU; torch.bincount waits for it\n"
    "matrix = torch.zeros(classes * classes, dtype=torch.long, device=device)\n"
    "# for each batch\n"
    "pred = logits.argmax(dim=1)\n"
    "valid = (target >= 0) & (target < classes)    # not the ignored labels\n"
    "index = torch.where(valid, target * classes + pred, 0).flatten()\n"
    "matrix.index_add_(0, index, valid.flatten().to(matrix.dtype))"
)
"""Code that counts pairs of classes without a read of the largest index by the host."""
COPY_PREFETCH_CODE = (
    "uploads, compute = torch.cuda.Stream(), torch.cuda.current_stream()\n"
    "def prefetch(batch):  # of pinned tensors\n"
    "    uploads.wait_stream(compute)  # until compute is done with old blocks\n"
    "    with torch.cuda.stream(uploads):\n"
    "        return [t.to(device, non_blocking=True) for t in batch]\n"
    "batches = iter(loader)\n"
    "ready = prefetch(next(batches))\n"
    "while ready:\n"
    "    compute.wait_stream(uploads)\n"
    "    current, ready = ready, prefetch(next(batches, []))\n"
    "    train_step(*current)"
)
"""Code that copies the next batch on its own stream while a step computes."""


def sum_column(values: pl.Series) -> int:
    """Return the sum of a column of integers, without nulls."""
    return int(values.sum() or 0)


def amount_per_step(a: Analysis, label: str, amount: float, unit: str = "ns") -> Evidence:
    """Return an amount of the window per step, or of the whole recording if it has no steps."""
    return Evidence(label, amount / a.step_count, unit, per=a.per)


def of_step(a: Analysis, ns: float) -> str:
    """Return time in the analyzed window as text: ``3 ms of each step (12%)``, or ``of the
    recording`` when the trace has no steps."""
    return (
        f"{t.format_duration(ns / a.step_count)} {of_each_step(a)} ({ns / max(a.span_ns, 1):.0%})"
    )


def of_each_step(a: Analysis) -> str:
    """Return ``of each step``, ``of each profiled step`` where the run's own steps take another
    time, or ``of the recording`` when the trace has no steps."""
    if a.per != "step":
        return t.format_of(a.per)
    run_time = None if a.run_steps is None else a.run_steps.step_time
    is_equal = run_time is None or abs(a.step_ns / run_time.reference_ns - 1) < EQUAL_STEP_SHARE
    return "of each step" if is_equal else "of each profiled step"


def without_bf16(a: Analysis, advice: dict[str, Any]) -> dict[str, Any]:
    """Return advice with FP16 in place of BF16 where the GPU has no units for BF16 (V100)."""
    if a.hardware is None or a.hardware.peak("bf16") or not a.hardware.peak("fp16"):
        return advice
    texts = {key: value for key, value in advice.items() if isinstance(value, str)}
    for old, new in (("bfloat16", "float16"), ("BF16", "FP16"), ("bf16", "fp16")):
        texts = {key: text.replace(old, new) for key, text in texts.items()}
    return advice | texts


def is_share(value: object) -> TypeGuard[float]:
    """Return whether a value of the record is a share, 0 to 1."""
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= 1


def stacks_option(a: Analysis) -> str:
    """Return the option that records Python stacks as well."""
    return "with_stack=True" if a.rank_record is None else "advisor record --deep"


TRANSFORMERS = r"(?:^|/)transformers/models/"
"""Frames of a model of Hugging Face's transformers."""


def runs_code_of(a: Analysis, pattern: str) -> bool:
    """Return whether a recorded or sampled Python frame (``file(line): function``) matches."""
    cpu = a.trace.cpu
    if ((cpu["kind"] == "python") & name_matches(cpu["name"], pattern)).any():
        return True
    stacks = [] if a.run_steps is None else a.run_steps.stacks
    return any(re.search(pattern, frame) for stack in stacks for frame in stack.frames)


def per_step(a: Analysis) -> str:
    """Return `` per step``, or nothing when the trace has no steps."""
    return " per step" if a.per == "step" else ""


def row_numbers(column: pl.Series) -> Rows:
    """Return a column of row numbers, -1 where it is null."""
    return column.fill_null(-1).to_numpy().astype(np.int64)


def int_column(frame: pl.DataFrame, name: str) -> Rows:
    """Return a column of integers, 0 where it is null."""
    return frame[name].fill_null(0).to_numpy().astype(np.int64)


def shapes_by_step(a: Analysis, operators: str) -> Floats:
    """Return a number for each analysed step, the same where these operators have the same input
    shapes. Empty if shapes are not recorded."""
    cpu = a.trace.cpu
    rows = rows_in_steps(a, np.flatnonzero(name_matches(cpu["name"], operators).to_numpy()))
    step_starts = a.steps.marks["ts"].to_numpy()
    table = pl.DataFrame(
        {
            "step": np.searchsorted(step_starts, cpu["ts"].gather(rows).to_numpy(), side="right"),
            "dims": a.trace.inputs["dims"].gather(cpu["inputs"].gather(rows)),
        }
    ).drop_nulls()
    by_step = table.group_by("step").agg(pl.col("dims").cast(pl.String).sort().str.join("\n"))
    return by_step.select(pl.col("dims").rank("dense")).to_series().cast(pl.Float64).to_numpy()


def outermost_in_steps(a: Analysis) -> pl.DataFrame:
    """Return the outermost operators of the analysed steps: ``row, name, ts, ns, inputs``."""
    cpu = a.trace.cpu
    rows = rows_in_steps(a, outermost_rows(a.trace))
    return pl.DataFrame(
        {
            "row": rows,
            "name": cpu["name"].gather(rows).cast(pl.String),
            "ts": cpu["ts"].gather(rows),
            "ns": cpu["dur"].gather(rows),
            "inputs": cpu["inputs"].gather(rows),
        }
    )


def layer_columns(a: Analysis, host: Rows) -> dict[str, Rows]:
    """Return columns of host rows: ``node``, the module around (-1: none), and ``layer``, equal for
    modules of the same kind where the user's line is outside of them, else -1."""
    around = modules_around(a, host)
    return {"node": around.node, "layer": around.group}


def layer_fields(a: Analysis, place: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a Location: the modules in ``node``, and whether the line is around them
    (``layer``)."""
    layer = describe_nodes(a, place["node"])
    return {"layer": layer, "around_layer": layer is not None and place["layer"] >= 0}


def locate_row(a: Analysis, row: int | None, **fields: Any) -> Location:
    """Return the user's line around a row of ``trace.cpu``, with other fields of the location."""
    file, line, function = a.location(row)
    return Location(file=file, line=line, function=function, **fields)


def costliest_places(
    a: Analysis,
    host: Rows,
    cost: Rows | None = None,
    *,
    ts: Rows | None = None,
    dur: Rows | None = None,
    kernel: Rows | None = None,
    instance: Rows | None = None,
    gap: Rows | None = None,
    whole: float | None = None,
    top: int = 3,
) -> list[Location]:
    """Return the places of the program that cost most, the most expensive first.

    ``host`` are rows of ``trace.cpu`` (-1: none). ``cost`` is what each of them costs, ns, by
    default its duration. Rows belong to one place when they share the innermost frame of user code
    around them. Without stacks they share the innermost op, else their own name. ``ts`` and ``dur``
    describe each instance (by default the host row itself). ``kernel`` is a row of ``trace.gpu`` to
    name. Rows of one ``instance`` count once (by default each row is one). ``gap`` is the gap of
    the device that each row is a piece of, if gaps are to be counted. Count, share and worst
    instance are of the op and kernel of the most expensive row, which are named. Shares are of
    ``whole``, ns, by default of all costs."""
    cpu = a.trace.cpu
    cost = cpu["dur"].to_numpy()[host] if cost is None else cost
    costly_rows = np.flatnonzero((host >= 0) & (cost > 0))
    if not len(costly_rows):
        return []
    host_rows = host[costly_rows]
    frame = a.user_frame[host_rows].astype(np.int64)
    op_rows = climb_stack(parent_rows(a.trace), is_operator(a.trace), host_rows)
    op_of = dict(zip(costly_rows.tolist(), op_rows.tolist(), strict=True))
    named = np.where(frame >= 0, frame, np.where(op_rows >= 0, op_rows, host_rows))
    layers = layer_columns(a, host_rows)
    instance = instance if gap is None else gap
    names = {"op": cpu["name"].to_physical().gather(np.where(op_rows >= 0, op_rows, host_rows))}
    if kernel is not None:
        launched = nullable_rows(kernel[costly_rows])
        names["kernel"] = a.trace.gpu["name"].to_physical().gather(launched)
    rows = pl.DataFrame(
        {
            "key": cpu["name"].to_physical().gather(named).set(pl.Series(layers["layer"] >= 0), 0),
            **layers,
            **names,
            "row": costly_rows,
            "cost": cost[costly_rows],
            "instance": costly_rows if instance is None else instance[costly_rows],
        }
    )
    table = _sum_by_place(rows, list(names))
    whole = whole or float(table["cost"].sum())
    locations: list[Location] = []
    for place in table.head(top).iter_rows(named=True):
        row, count = place["row"], place["count"]
        host_row = int(host[row])
        op_row = op_of[row]
        locations.append(
            locate_row(
                a,
                host_row,
                **layer_fields(a, place),
                share=place["named"] / whole,
                op=str(cpu["name"][op_row if op_row >= 0 else host_row]),
                kernel=None
                if kernel is None or kernel[row] < 0
                else str(a.trace.gpu["name"][int(kernel[row])]),
                ts_ns=int(cpu["ts"][host_row] if ts is None else ts[row]),
                dur_ns=int(
                    place["of_gap"]
                    if gap is not None
                    else cpu["dur"][host_row]
                    if dur is None
                    else dur[row]
                ),
                count=count,
                counted="" if gap is None else "gap",
            )
        )
    return locations


def _sum_by_place(rows: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """Return one row per place (``key``, ``layer``), the most expensive first, for rows of a cost.
    ``named``, ``of_gap`` and ``count`` cover only rows with the ``names`` of the costliest row."""
    has_first_names = [pl.col(name).eq_missing(pl.col(name).first()) for name in names]
    return (
        rows.with_columns(of_gap=pl.col("cost").sum().over("key", "layer", "instance", *names))
        .sort("cost", descending=True)
        .group_by("key", "layer", maintain_order=True)
        .agg(
            pl.col("cost").sum(),
            pl.col("cost").filter(*has_first_names).sum().alias("named"),
            pl.col("of_gap").filter(*has_first_names).max(),
            pl.col("row").first(),
            pl.col("instance").filter(*has_first_names).n_unique().alias("count"),
            pl.col("node").unique(),
        )
        .sort("cost", descending=True, maintain_order=True)
    )


def device_places(
    a: Analysis, work: pl.DataFrame, cost: str | Rows = "exposed", host: str | Rows = "op"
) -> list[Location]:
    """Return the costliest places of device work, with columns ``gpu``, ``ts`` and ``dur``.
    ``cost`` and ``host`` are names of its columns, or numbers."""
    return costliest_places(
        a,
        row_numbers(work[host]) if isinstance(host, str) else host,
        int_column(work, cost) if isinstance(cost, str) else cost,
        ts=int_column(work, "ts"),
        dur=int_column(work, "dur"),
        kernel=row_numbers(work["gpu"]),
    )


def example_steps(
    body: Callable[[TraceBuilder], None], gpu: str | None = "A100", count: int = 4
) -> TraceBuilder:
    """Return an example of ``count`` steps that each run ``body`` and wait for the device."""
    b = TraceBuilder(gpu)
    for _ in b.steps(count):
        body(b)
        b.sync()
    return b


MOSTLY_OFFLOADED = 0.8
"""Minimum share of the exposed copies in tensors that live on the host for advice on these."""


def are_mostly_offloaded(a: Analysis) -> bool:
    """Return whether most of the exposed copies are of weights or activations on the host."""
    return a.offloaded is not None and a.offloaded.share >= MOSTLY_OFFLOADED


def busy_intervals(a: Analysis, work: pl.DataFrame) -> Intervals:
    """Return when any row of the device work runs. Its column ``gpu`` has rows of ``trace.gpu``."""
    mask = np.zeros(a.trace.gpu.height, dtype=bool)
    mask[row_numbers(work["gpu"])] = True
    return a.device_busy(mask)


def work_launched_in(a: Analysis, instants: Intervals) -> int:
    """Return the device time of the work that the host launches in some intervals, ns."""
    return int(a.trace.gpu["dur"].to_numpy()[mask_launched_in(a, instants)].sum())


def mask_launched_in(a: Analysis, instants: Intervals) -> NDArray[np.bool_]:
    """Return which rows of ``trace.gpu`` the host launches in some intervals."""
    launch, ts = row_numbers(a.trace.gpu["launch"]), a.trace.cpu["ts"].to_numpy()
    rows: NDArray[np.bool_] = (launch >= 0) & a.in_window
    rows[rows] = covered_length(ts[launch[rows]], ts[launch[rows]] + 1, instants) > 0
    return rows


def find_places(a: Analysis, stretches: Intervals, rows: Rows) -> list[Location]:
    """Return the costliest place of these operators of the host, or of the device work launched in
    the ``stretches``, with its kernel, where that work takes longer."""
    gpu = a.trace.gpu
    work = np.flatnonzero(mask_launched_in(a, stretches)) if a.device_id is not None else rows[:0]
    if int(gpu["dur"].gather(work).sum() or 0) <= stretches.total:
        return costliest_places(a, rows, top=1)
    table = gpu.select("ts", "dur", "op")[work].with_columns(gpu=pl.Series(work))
    return device_places(a, table, "dur")[:1]


def measure_time_in(a: Analysis, stretches: Intervals) -> tuple[int, list[Evidence]]:
    """Return the time, ns, that the host spends in some stretches, or the device with the work
    launched in them, whichever is longer. The evidence has both."""
    device = 0 if a.device_id is None else work_launched_in(a, stretches)
    evidence = [
        amount_per_step(a, "host time of this work", stretches.total),
        amount_per_step(a, "device time of this work", device),
    ]
    longest_first = evidence[::-1] if device > stretches.total else evidence
    return max(device, stretches.total), longest_first


def remove_at(instants: Instants, *, gaps: bool = False) -> list[Edit]:
    """Remove the host's work in the instants that ``Select.at`` names, and the work it launches.
    ``gaps`` also removes the device's idle time in them."""
    edits = [Edit(op="remove", select=Select(on=on, at=instants)) for on in ("gpu", "host")]
    return edits + gaps * [Edit(op="remove", select=Select(on="gap", at=instants))]


def backward_operators(a: Analysis, rows: Rows) -> Rows:
    """Return the outermost operators of the backward pass of these outermost operators."""
    parent, operator = parent_rows(a.trace), is_operator(a.trace)
    nodes = np.flatnonzero(a.forward_op >= 0)
    forward = climb_stack(parent, operator, a.forward_op[nodes], top=True)
    return np.unique(climb_stack(parent, operator, nodes[np.isin(forward, rows)], top=True))


def scale_edit(select: Select, factor: float, best: float, worst: float) -> Edit:
    """Scale the selected work to a share of its time: expected, at best and at worst."""
    return Edit(op="scale", select=select, factor=factor, best_factor=best, worst_factor=worst)


def remove_collectives(a: Analysis, needless: pl.DataFrame, whole_ns: int, under: str = "") -> Edit:
    """Remove these rows of ``Analysis.collectives``. Where they are too many to name, scale the
    communication ``under`` these operators down by their share of ``whole_ns``."""
    ids = a.trace.gpu["correlation"].gather(needless["gpu"]).drop_nulls().unique().sort()
    if a.device_id is not None and len(ids) <= MAX_CORRELATIONS:
        select = Select(on="gpu", kind=("kernel",), correlation=tuple(ids.to_list()))
        return Edit(op="remove", select=select)
    select = Select(on="gpu", kind=("kernel",), family=("communication",), under=under)
    keep = 1 - sum_column(needless["dur"]) / max(1, whole_ns)
    return Edit(op="scale", select=select, factor=max(0.0, keep))


def select_copies(a: Analysis, gpu: pl.Series) -> Select:
    """Select single copies, given as rows of ``trace.gpu``, up to ``MAX_CORRELATIONS``."""
    ids = a.trace.gpu["correlation"].gather(gpu).drop_nulls().unique().sort()
    return Select(on="gpu", kind=("memcpy",), correlation=tuple(ids[:MAX_CORRELATIONS]))


BUSY_PERCENT = 50
"""Minimum NVML utilisation of a sample under load. Idle GPUs lower clocks and links to save
power."""
LOOP_SHARE = 0.20
"""Minimum share of the step at which the loop's own code is reported."""
SAVING_AND_LOGGING = {
    "a checkpoint is written": (
        r"^torch/serialization\.py\(\d+\): _?save$"
        r"|^torch/distributed/checkpoint/.*: save$"
        r"|safetensors.*: save_file$|save_checkpoint|save_pretrained|ModelCheckpoint"
    ),
    "metrics are logged": (
        r"tensorboard.*: (?:add_\w+|flush)$|^wandb/.*: (?:log|_log)$|^mlflow/.*: log_\w+$"
    ),
}
"""Patterns of frames and ranges that save or log, by cause."""
METHOD = "upper bound (recorded host time)"


def run_steps_of(a: Analysis) -> RunSteps:
    """Return the record, which every rule with ``reads_record`` has."""
    if a.run_steps is None:
        raise ValueError("this rule needs a recorded run")
    return a.run_steps


def sum_of_events(events: Iterable[Mapping[str, Any]], key: str) -> int:
    """Return the sum of a count in the recorder's events, without values that are not integers."""
    return sum(value for event in events if isinstance(value := event.get(key), int))


def loop_phase_times(run_steps: RunSteps) -> dict[str, Floats]:
    """Return times of the loop's own code in each counted step, by phase, ns."""
    times = {name: run_steps.phase(name) for name in LOOP_PHASES}
    return {name: phase_times for name, phase_times in times.items() if phase_times is not None}


COMPILERS = (
    r"torch/_dynamo/convert_frame\.py\(|torch/_inductor/compile_fx\.py\(\d+\): \w*compile"
    r"|triton/.*: compile$|CachingAutotuner"
)
"""Pattern of frames of a compiler at work. A compiled function that only runs has none of them."""
COMPILING = {
    "fix": "Compile before the loop, with every shape that comes: run each once, or pad to a few. "
    "Mark a dimension that varies as dynamic (torch._dynamo.mark_dynamic). If the step compiles "
    "once for all, leave it out of what you measure.",
    "falsified_by": "a recording of later steps in which one of them takes as long",
}
"""Advice for steps that are long because they compile."""
MOSTLY_COMPILING = 0.5
"""Minimum share of the time lost in long steps at which compiling is their cause."""


def time_compiling(run_steps: RunSteps) -> float:
    """Return the time after the warm-up in which the training thread compiled, ns, by the stacks
    that the recorder sampled then. It is 0 if too few samples show it."""
    settled_steps = np.flatnonzero(run_steps.after_warmup)
    if not len(settled_steps):
        return 0.0
    stacks = read_stacks(run_steps.rank_record, since=run_steps.steps[settled_steps[0]].t)
    share, compiling_stacks = share_in(stacks, COMPILERS)
    if sum(stack.samples for stack in compiling_stacks) < MIN_SAMPLES:
        return 0.0
    return share * float(run_steps.dur[run_steps.used].sum())


def local_ranks(a: Analysis) -> int:
    """Return the number of training processes on this machine, as the launcher says, else 1."""
    text = run_steps_of(a).rank_record.rank.env.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and 0 < int(text) < 1024 else 1


def cores_per_process(a: Analysis, cpus: int) -> float:
    """Return the cores of each training process that shares them, at least 1."""
    return max(1.0, cpus / local_ranks(a))


class SharedCoresRule(Rule):
    """Base of the rules about cores that the step shares with other computing processes."""

    shared_speed = Factor(0.8, "of its speed alone, a thread whose neighbor cores are busy", SMT)
    best_shared_speed = Factor(0.5, "of it, on the other half of a busy physical core", SMT)
    worst_shared_speed = Factor(1.0, "of it, on a core of its own", SMT)

    @staticmethod
    def saving_alone(saving: float, busy_share: float, shared_speed: float) -> float:
        """Return the share of the step that it saves without the other processes: ``saving`` by
        getting their cores, and what is left runs faster. ``busy_share`` of the other cores
        compute, beside which a thread has ``shared_speed`` of its speed alone."""
        return 1 - (1 - saving) * (1 - (1 - shared_speed) * busy_share)


def impact_per_step(
    a: Analysis,
    gain: float,
    *,
    low: float = 0.0,
    high: float | None = None,
    method: str = METHOD,
    kind: GainKind = "recorded",
    of_median: bool = False,
    of_host: bool = True,
    outside: float = 0.0,
) -> Impact:
    """Return an impact in time per step, from recorded times, ns: of the mean step, or
    ``of_median``. No fix saves more than that step, whatever other steps take. A fix of host time
    (``of_host``) saves no more than a GPU waits, in the step and ``outside`` of it."""
    run_steps = run_steps_of(a)
    step = (run_steps.median if of_median else run_steps.mean) or 0.0
    max_gain = step
    device_wait = device_waits(a) if of_host else None
    if device_wait is not None:
        max_gain = min(step, device_wait + outside)
    if step:
        gain, high = min(gain, max_gain), min(gain if high is None else high, max_gain)
    kind = "upper bound" if method == METHOD else kind
    impact = impact_over_run(gain, low=min(low, gain), high=high, method=method, total=step)
    return replace(impact, currency="step_time", is_run_gain=True, kind=kind)


def impact_over_run(
    gain: float, *, low: float = 0.0, high: float | None = None, method: str, total: float = 0.0
) -> Impact:
    """Return an impact in time over the recorded run, ns. It is a share of the time ``total``."""
    return Impact(
        currency="run_time",
        gain_ns=round(gain),
        low_ns=round(low),
        high_ns=round(gain if high is None else high),
        method=method,
        kind="recorded",
        share=gain / total if total else None,
    )


def estimate_contended_loading(a: Analysis, loading: float, *, alone: bool = False) -> float | None:
    """Return the part of the main thread's loading that a step computing on the CPU would take from
    cores it needs itself (see ``RunSteps.remaining_loading_share``), if all work that can
    computes. ``loading`` is its share of the step. ``alone`` is without other programs. The result
    is ``None`` if a GPU trains, or CPU use was not recorded."""
    if a.run_steps is None or not a.trains_on_host:
        return None
    computing_share = a.run_steps.computing_share(loading, on_host=True)
    if computing_share is None:
        return None
    return a.run_steps.remaining_loading_share(loading, computing_share, alone=alone)


def workers_needed(batch: float, rest: float) -> int:
    """Return how many workers, each loading a batch in ``batch`` ns, keep up with steps of ``rest``
    ns. One more worker also keeps up with slower batches."""
    return max(1, math.ceil(batch / max(rest, 1.0)))


def under_load(run_steps: RunSteps) -> list[GpuSample]:
    """Return the GPU's samples with a utilisation of at least ``BUSY_PERCENT``."""
    return [
        gpu
        for gpu in run_steps.gpus
        if gpu.utilisation is not None and gpu.utilisation >= BUSY_PERCENT
    ]


def link_speed(generation: int, width: int) -> float:
    """Return the relative speed of a link: every generation doubles it."""
    return float(2.0 ** min(generation, 12) * width)


def host_link_rate(a: Analysis) -> float | None:
    """Return the peak rate of the PCIe link in one direction, GB/s, that card and slot allow, or
    ``None`` if it or the GPU is unknown. An idle link runs slower, so its present speed does not
    count."""
    pcie = None if a.hardware is None else a.hardware.pcie
    if pcie is None or a.run_steps is None:
        return None
    max_speeds = [
        link_speed(gpu.pcie_gen_max, gpu.pcie_width_max)
        for gpu in a.run_steps.gpus
        if gpu.pcie_gen_max and gpu.pcie_width_max
    ]
    card_speed = link_speed(pcie.generation, pcie.lanes)
    return pcie.gb_per_s * min(1.0, max(max_speeds) / card_speed) if max_speeds else None


def record_example(
    gpu: GpuSample | Callable[[float], GpuSample], b: TraceBuilder | None = None
) -> TraceBuilder:
    """Return an example of 60 recorded steps of 10 ms and what was read of the GPU meanwhile (by
    share of the run). ``b`` is a trace that belongs to it."""
    b = b or TraceBuilder()
    run = b.record_of_run()
    run.steps(60, 10)
    run.watch(gpu=gpu)
    return b


def find_loader(a: Analysis) -> dict[str, Any] | None:
    """Return the loader that feeds the steps: the one iterated most often in training."""
    run_steps = run_steps_of(a)
    if not run_steps.loaders:
        return None
    iterations = [event.get("id") for event in run_steps.rank_record.events_of("loader_iter")]
    return max(run_steps.loaders, key=lambda loader: iterations.count(loader.get("id")))


def has_trainer(a: Analysis) -> bool:
    """Return whether Hugging Face's Trainer made a loader of the run."""
    loaders = [] if a.run_steps is None else a.run_steps.loaders
    return any(loader.get("trainer") == "transformers" for loader in loaders)


def find_iterator_start(event: Event) -> int:
    """Return the time at which a loader's iterator was requested, ns. The event is written once its
    purpose is known, perhaps steps later. Records of older versions have only the event's time."""
    start_ns = event.data.get("began_ns")
    is_recorded = (
        isinstance(start_ns, int) and not isinstance(start_ns, bool) and abs(start_ns) < MAX_VALUE
    )
    return start_ns if is_recorded and isinstance(start_ns, int) else event.t


def time_of_restart(event: Event) -> float:
    """Return the time in which a loader's old workers ended and its new ones started, ns."""
    values = (event.data.get(name) for name in ("workers_ended_ns", "workers_started_ns"))
    return sum(map(_read_duration, values))


def _read_duration(value: object) -> float:
    """Return a measured duration, ns, or 0 for anything else."""
    is_valid = isinstance(value, int | float) and 0 <= value < MAX_VALUE
    return float(value) if is_valid and isinstance(value, int | float) else 0.0


def workers_of(event: dict[str, Any]) -> int | None:
    """Return the number of worker processes of a loader, or ``None`` if it was not recorded."""
    value = event.get("workers")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def steps_seen(run_steps: RunSteps) -> Evidence:
    """Return the number of steps that the figures cover, as evidence."""
    return Evidence("steps measured", run_steps.count, "count")
