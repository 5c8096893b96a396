"""Hardware counters and compiled kernels in a report: their views, the verdict on them alone, and
the command that collects them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from advisor.advise.program_wording import analyze_command
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import LAYER_TIMES
from advisor.core.report import Report, Status
from advisor.core.report_kernels import KernelCounters, KernelLine, TritonKernel
from advisor.core.trace import CUDA, KINETO, PYTORCH
from advisor.measure.device.kernel_names import library_of
from advisor.measure.device.kernel_profiles import (
    ONE_LAUNCH,
    MatchedKernel,
    ProfiledKernel,
    is_reference,
    kernel_key,
    label_kernels,
    shorten_kernel,
)
from advisor.measure.steps.steps import step_of
from advisor.read.registry import find_tool

if TYPE_CHECKING:
    from advisor.core.finding import Finding
    from advisor.measure import Analysis
    from advisor.replay.estimators import GainEstimator

MAX_PROFILED_KERNELS = 200
"""Maximum number of kernels in a report. Those with most time come first."""
MAX_REPLAYED = 40
"""Maximum number of kernels whose gain per step is replayed."""
MAX_STALLS = 5


def build_counter_views(a: Analysis, estimator: GainEstimator) -> list[KernelCounters]:
    """Return a view of each profiled kernel, sorted by gain per step. Without a trace they are
    sorted by duration, and without durations by the bytes of all launches."""
    gpu = a.trace.gpu["dur"].to_numpy()
    per_step = {
        id(k): float(gpu[k.rows].sum()) / a.step_count if len(k.rows) else None
        for k in a.profiled_kernels
    }
    kernels = sorted(a.profiled_kernels, key=lambda k: -(per_step[id(k)] or 0.0))
    views = []
    for index, k in enumerate(kernels[:MAX_PROFILED_KERNELS]):
        edit = None
        if k.busiest is not None and index < MAX_REPLAYED:
            edit = shorten_kernel(a, k, max(0.0, 1 - k.busiest / 100))
        gain = None if edit is None else round(max(0.0, estimator.gain_range([edit]).gain))
        views.append(_build_counter_view(a, k, per_step[id(k)], gain))
    return sorted(
        views,
        key=lambda v: (
            -(v.gain_ns or 0),
            -(v.step_ns or 0),
            -(v.duration_ns or 0),
            -(v.dram_bytes or 0) * (v.profiled or 1),
        ),
    )


def _build_counter_view(
    a: Analysis, k: ProfiledKernel, ns: float | None, gain: int | None
) -> KernelCounters:
    profile = k.profile
    return KernelCounters(
        name=labels.clean(profile.name),
        short=labels.clean(kernel_key(profile.name)),
        file=labels.clean(profile.file),
        grid=None if profile.grid is None else list(profile.grid),
        block=None if profile.block is None else list(profile.block),
        duration_ns=profile.duration_ns,
        profiled=profile.launches,
        limit=k.limit,
        use={unit: percent / 100 for unit, percent in k.use.items()},
        occupancy=None if k.occupancy is None else k.occupancy / 100,
        theoretical_occupancy=None if k.theoretical is None else k.theoretical / 100,
        occupancy_limiter=k.limiter,
        waves=k.waves,
        stalls=dict(list(k.stalls.items())[:MAX_STALLS]),
        dram_bytes=k.bytes,
        bandwidth=k.bandwidth,
        launches=len(k.rows) / a.step_count if len(k.rows) else None,
        step_ns=ns,
        gain_ns=gain,
        advice=[
            labels.clean(hint.text)
            + (f" (estimated: {hint.saved:.0%} {hint.scope})" if hint.saved is not None else "")
            for hint in profile.advice
        ],
        lines=[
            KernelLine(
                file=labels.clean(source_line.file),
                line=source_line.line,
                share=source_line.samples / (profile.samples or 1),
                stall=source_line.stall.replace("_", " "),
            )
            for source_line in profile.lines
        ],
    )


def build_triton_views(a: Analysis) -> list[TritonKernel]:
    """Return a view of each compiled kernel. Kernels that spill and take time come first, then the
    order is by time and spilled bytes."""
    gpu = a.trace.gpu["dur"].to_numpy()
    views = [
        _build_triton_view(k, len(k.rows) / a.step_count, float(gpu[k.rows].sum()) / a.step_count)
        if len(k.rows)
        else _build_triton_view(k, None, None)
        for k in a.compiled_kernels
    ]

    def order(view: TritonKernel) -> tuple[bool, float, int, int, str]:
        spilled, ns = view.spilled_bytes or 0, view.step_ns or 0.0
        return not (spilled and ns), -ns, -spilled, -(view.registers or 0), view.name

    return sorted(views, key=order)[:MAX_PROFILED_KERNELS]


def _build_triton_view(k: MatchedKernel, launches: float | None, ns: float | None) -> TritonKernel:
    kernel = k.kernel
    return TritonKernel(
        name=labels.clean(kernel.name),
        file=None if kernel.place is None else labels.clean(kernel.place[0]),
        line=None if kernel.place is None else kernel.place[1],
        target=labels.clean(kernel.target),
        num_warps=kernel.num_warps,
        num_stages=list(kernel.num_stages),
        registers=kernel.registers,
        shared_bytes=kernel.shared,
        local_bytes=kernel.local,
        spilled_bytes=kernel.spilled,
        occupancy=None if k.occupancy is None else k.occupancy / 100,
        occupancy_limiter=k.limiter,
        variants=kernel.variants,
        launches=launches,
        step_ns=ns,
    )


def counters_verdict(report: Report) -> tuple[Status, str]:
    """Return the status and verdict on counters alone: what limits most kernels, which kernel takes
    longest, and which fix saves most or what to collect."""
    views = [each for each in report.kernel_counters if not is_runtime(each.name)]
    views = views or report.kernel_counters
    left_out = len(report.kernel_counters) - len(views)
    own_views = without_references(views)
    checks, views = [view for view in views if view not in own_views], own_views
    limits = Counter(name for view in views if (name := limit_of(view).replace(", ", " and ")))
    program_label = " of a PyTorch program" if report.scope.framework == PYTORCH else ""
    text = f"{t.count_noun(len(views), 'kernel')}{program_label}{_describe_collection(views)}"
    if limits:
        parts = [f"{count} by {name}" for name, count in limits.most_common()]
        verb = "is" if parts[0].startswith("1 ") else "are"
        parts[0] = parts[0].replace(" by ", f" {verb} limited by ", 1)
        unlimited = len(views) - sum(limits.values())
        if len(limits) == 1 and not unlimited:
            subject = "all are" if len(views) > 1 else "it is"
            parts = [f"{subject} limited by {next(iter(limits))}"]
        text += f": {', '.join(parts)}"
        if unlimited:
            text += f". For {unlimited} it was not collected: add {_name_collector(report)}"
    if left_out:
        verb = "is" if left_out == 1 else "are"
        text += f". {t.count_noun(left_out, 'kernel')} of the runtime {verb} not counted"
    if checks:
        short = label_kernels(view.short for view in report.kernel_counters)
        names = t.list_names(dict.fromkeys(short[view.short] for view in checks))
        several = len({short[view.short] for view in checks}) > 1
        verbs = ("check", "are") if several else ("checks", "is")
        text += f". {names} only {verbs[0]} results and {verbs[1]} left out"
    amd = _is_amd(report)
    text += f". {_describe_longest(views, 'waves' if amd else 'warps')}"
    keys = {labels.clean(kernel_key(view.name)) for view in views}
    notes = [each for each in report.notes if _find_kernel_key(each) in keys]
    if notes:
        return "bottlenecks", f"{text}{_describe_first_fix(notes[0], views)}"
    if limits:
        text += _advise_on_occupancy(views) or _advise_on_unit(views)
    elif all(view.duration_ns is None for view in views):
        text += (
            "The bandwidth needs the file of their times too: "
            f"{analyze_command(report)} --kernel-profile TIMES"
        )
    else:
        text += f"What limits it is not recorded: collect it with {_name_collector(report)}."
    return ("bottlenecks" if report.findings else "limited"), text.rstrip()


MIN_PARTLY_BUSY_USE = 0.4
"""Minimum use of a unit at which it limits a waiting kernel too."""


def limit_of(view: KernelCounters) -> str:
    """Name what limits a kernel: a unit, ``latency``, or both if a unit is busy for much of the
    time but also waits. Empty if this was not collected."""
    if view.limit == "unknown":
        return ""
    unit = max(view.use, key=view.use.__getitem__, default="")
    if view.limit == "latency" and unit and view.use[unit] >= MIN_PARTLY_BUSY_USE:
        return f"latency, {unit}"
    return view.limit


def is_runtime(name: str) -> bool:
    """Return whether a kernel's name is one of the runtime's own: a copy, a fill, the heap."""
    return name.startswith("__amd_rocclr_")


def without_references(views: list[KernelCounters]) -> list[KernelCounters]:
    """Return the kernels without references that others are checked against, or all kernels if only
    references are left."""
    return [view for view in views if not is_reference(view.name)] or views


def _find_kernel_key(note: Finding) -> str:
    """Return the key of the first kernel that a note names. Empty if it names none."""
    return labels.clean(kernel_key(note.where[0].kernel or "")) if note.where else ""


def _name_collector(report: Report) -> str:
    """Name the tool that collects what limits a kernel, by the format of the file."""
    form = _get_format(report) or ""
    amd, nvidia = "rocprof-compute profile", "ncu --set full"
    if _is_amd(report):
        return amd
    return nvidia if form == "kernel-profiler" else f"{amd} (AMD) or {nvidia} (NVIDIA)"


def _is_amd(report: Report) -> bool:
    """Return whether the kernels ran on an AMD GPU, by their names or the file's format."""
    by_name = any(is_runtime(view.name) for view in report.kernel_counters)
    return by_name or "roc" in (_get_format(report) or "")


MIN_LIMIT_USE, MIN_DOMINANT_SHARE = 0.8, 0.5
"""Minimum use of a unit at its limit, and share of all launches' time of a dominant kernel."""
RELIEVE: Final = {
    "L1": "Let neighbouring threads read neighbouring addresses, and keep tiles in registers",
    "L2": "Make blocks that run together share data, or keep tiles in shared memory",
    "DRAM": "Move fewer bytes: fuse it with its neighbours, or use a smaller type",
    "compute": "Its arithmetic is at the limit: use tensor cores, a smaller type or less work",
}


def _advise_on_unit(views: Sequence[KernelCounters]) -> str:
    """Return advice on the unit that limits the dominant kernel. Empty if none does."""
    longest = _find_longest(views)
    if longest is None or _sum_time(longest) < MIN_DOMINANT_SHARE * sum(map(_sum_time, views)):
        return ""
    at_limit = len(views) > 1 and max(longest.use.values(), default=0.0) >= MIN_LIMIT_USE
    if at_limit and (library := library_of(longest.name)) is not None:
        return f"It is a kernel of {library}: choose another algorithm, or move fewer bytes. "
    return f"{RELIEVE[longest.limit]}. " if at_limit and longest.limit in RELIEVE else ""


MAX_FEW_WAVES = 0.5
"""Waves of blocks below which a kernel has too few blocks, whatever its occupancy."""
MAX_LOW_OCCUPANCY = 0.25
"""Achieved occupancy below which a waiting kernel should get more resident warps."""


def _advise_on_occupancy(views: Sequence[KernelCounters]) -> str:
    """Return advice on the longest kernel if it waits with few resident warps. Empty otherwise."""
    longest = _find_longest(views)
    if longest is None or longest.limit != "latency" or longest.occupancy is None:
        return ""
    if longest.occupancy >= MAX_LOW_OCCUPANCY:
        return ""
    if longest.waves is not None and longest.waves < MAX_FEW_WAVES:
        count = f"{math.prod(longest.grid)} " if longest.grid else ""
        filled = t.format_share(longest.waves)
        return (
            f"Its {count}blocks fill {filled} of the GPU: give it more work per launch, or let "
            "more blocks share each sum (split-K)."
        )
    advice = (
        "Give it more work per launch, or use fewer registers and less shared memory per block."
    )
    if (library := library_of(longest.name)) is not None:
        advice = f"It is a kernel of {library}: give it more work, or call another algorithm."
    return (
        f"Its occupancy is {t.format_share(longest.occupancy)}: too little runs at once to hide "
        f"the waits. {advice}"
    )


def _describe_collection(views: Sequence[KernelCounters]) -> str:
    """Say what was collected about the kernels, to follow their number. May be empty."""
    if any(view.use or view.occupancy is not None or view.stalls for view in views):
        return " with hardware counters"
    traffic = any(view.dram_bytes is not None for view in views)
    timed = any(view.duration_ns is not None for view in views)
    if traffic:
        return f" with counters of memory traffic{'' if timed else ', without times'}"
    return " with times, without counters" if timed else ""


def _describe_longest(views: Sequence[KernelCounters], waves: str) -> str:
    """Describe the kernel with most time in all profiled launches, or, without times, the kernel
    that moves most bytes. ``waves``: the vendor's word for warps."""
    short = label_kernels(view.short for view in views)
    longest = _find_longest(views)
    if longest is None:
        largest = max(views, key=lambda view: view.dram_bytes or 0.0)
        if not largest.dram_bytes:
            return ""
        return (
            f"{short[largest.short]} moves most, {t.format_bytes(largest.dram_bytes)} per launch. "
        )
    duration = t.format_duration(longest.duration_ns or 0.0)
    name = short[longest.short]
    text = (
        f"The longest, {name}, takes {duration}" if len(views) > 1 else f"{name} takes {duration}"
    )
    if longest.profiled > 1:
        same_file = [view for view in views if view.file == longest.file]  # each file is a run
        share = _sum_time(longest) / (sum(map(_sum_time, same_file)) or 1.0)
        subject = longest.file or "it"
        text = (
            f"{name} takes most time: {t.format_share(share)} of {subject}, in "
            f"{longest.profiled:,} launches of {duration}"
        )
    use = max(longest.use.values(), default=None)
    if longest.limit == "latency" and use is not None:
        text += f". Its {waves} mostly wait, and no unit is busier than {t.format_share(use)}"
    elif use is not None and longest.limit == "unknown":
        text += ", its limit not measured"
    elif use is not None:
        text += f", with {longest.limit} {t.format_share(use)} busy"
    elif longest.bandwidth is not None:
        text += f" at {t.format_rate(longest.bandwidth, 'B/s')} of DRAM"
    return f"{text}. {_compare_variants(longest, views)}"


def _contrast(number: float, other: float, less: str, more: str) -> str:
    """Say how much smaller or larger a number is than another: ``3% less``."""
    return f"{t.format_share(abs(number / other - 1))} {less if number < other else more}"


def _compare_variants(longest: KernelCounters, views: Sequence[KernelCounters]) -> str:
    """Compare a kernel with those of the same name in other files. Empty without any."""
    same = []
    for view in views:
        if view.file == longest.file or view.short != longest.short or not longest.duration_ns:
            continue
        duration = t.format_duration(view.duration_ns or 0.0)
        time = _contrast(view.duration_ns or 0.0, longest.duration_ns, "less", "more")
        moved = ""
        if view.dram_bytes and longest.dram_bytes:
            moved = _contrast(view.dram_bytes, longest.dram_bytes, "fewer", "more")
            moved = f", and moves {moved} bytes"
        same.append(f"in {view.file} each takes {duration}, {time}{moved}")
    return f"{t.upper_first('; '.join(same))}. " if same else ""


def _find_longest(views: Sequence[KernelCounters]) -> KernelCounters | None:
    """Find the kernel with most time in all launches, or ``None`` if none was timed."""
    timed = [view for view in views if view.duration_ns is not None]
    return max(timed, key=_sum_time, default=None)


def _sum_time(view: KernelCounters) -> float:
    """Return the time of all profiled launches of a kernel, ns."""
    return (view.duration_ns or 0.0) * view.profiled


MIN_FIRST_FIX_SHARE = 0.05
"""Minimum share of the time of all launches that a fix saves to be named first."""


def _describe_first_fix(note: Finding, views: Sequence[KernelCounters]) -> str:
    """Describe the first note: what it finds, in which kernel, and what its fix saves."""
    title = t.lower_first(note.title)
    saved = sum(float(each.value or 0) for each in note.evidence if each.label == ONE_LAUNCH)
    count = sum(int(e.value or 0) for e in note.evidence if e.label == "kernels with it")
    short = label_kernels(view.short for view in views)
    names = [short.get(labels.clean(kernel_key(place.kernel or ""))) for place in note.where[:1]]
    others = f" and {count - 1} more" if count > 1 else ""
    kernel_names = "".join(f" ({name}{others})" for name in names if name)
    when = "for a launch of each" if count > 1 else "per launch"
    gain = f" A fix saves up to {t.format_duration(saved)} {when}." if saved else ""
    if saved and saved < MIN_FIRST_FIX_SHARE * sum(map(_sum_time, views)):
        saves = f"at most {t.format_duration(saved)} {when}"
        found = f"The largest gain found is small: {title}{kernel_names}, {saves}."
        return f"{_advise_on_unit(views)}{found}"
    return f"First: {title}{kernel_names}.{gain}"


def compiled_verdict(report: Report) -> tuple[Status, str]:
    """Return status and verdict on a Triton cache without a trace."""
    views = report.triton_kernels
    text = f"{t.count_noun(len(views), 'kernel')} compiled by Triton"
    with_module = [view for view in views if view.spilled_bytes is not None]
    spilling = [view for view in with_module if view.spilled_bytes]
    if spilling:
        worst = max(spilling, key=lambda view: view.spilled_bytes or 0)
        name, size = labels.shorten(worst.name, 40), t.format_bytes(worst.spilled_bytes or 0)
        if len(spilling) > 1:
            text += f": {len(spilling)} spill registers. {name} spills most, {size} per thread."
        else:
            text += f". {name} spills {size} of registers per thread."
    elif len(with_module) == len(views):
        text += ": none spills registers."
    else:
        text += f": none of the {len(with_module)} whose module was found spills registers."
    return ("bottlenecks" if report.notes or report.findings else "limited"), text


# -- what to profile -------------------------------------------------------------------------------

MIN_PROFILED_SHARE = 0.05
"""Minimum share of kernel time at which a kernel is profiled."""
FAST_KERNEL_SHARE = 0.8
"""Share of the attainable rate above which a kernel is not profiled."""
MAX_NAMED_KERNELS = 2
"""Maximum number of kernel names in the command, so that it fits on a terminal line."""
MAX_LAUNCHES = 20
NCU_SECTIONS = (
    "SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis", "SchedulerStats",
    "WarpStateStats",
    "SourceCounters",
)  # fmt: skip


ENGINE_BENCHMARKS = {
    "vllm": "vllm bench latency --model MODEL",
    "sglang": "python -m sglang.bench_one_batch \\\n     --model-path MODEL",
}
"""Benchmark commands that repeat the same work and then end, by engine:
https://docs.vllm.ai/en/stable/cli/bench/latency.html,
https://docs.sglang.io/developer_guide/benchmark_and_profiling.html."""


def _get_format(report: Report) -> str | None:
    """Return the format of the first input, or ``None`` without inputs."""
    return report.inputs[0].format if report.inputs else None


ANY_PROGRAM = "python PROGRAM.py"
"""Command of a program whose own command is not recorded."""
PLACEHOLDER = "PROGRAM.py stands for your program, whose command is not recorded."
ONE_OF_SEVERAL = "In a job, let the launcher start one rank this way and the others as before."


def _get_program_command(report: Report) -> str:
    """Return the command of the program, by the format and framework of its recording."""
    file_format, framework = _get_format(report), report.scope.framework
    tool = find_tool(file_format, framework)
    if tool is not None and tool.program:
        return tool.program
    if framework == CUDA:
        return "./program"
    if file_format != KINETO and file_format is not None and report.inference is None:
        return "PROGRAM" if framework is None else "python program.py"
    if report.inference is None:
        return ANY_PROGRAM
    command = ENGINE_BENCHMARKS.get(report.inference.engine or "")
    if command is None:
        return "python infer.py"
    phase = report.inference.phases[0]
    if phase.requests and phase.requests >= 1:
        command += f" --batch-size {round(phase.requests)}"
        if phase.name == "prefill" and phase.tokens:  # of a decode step the context is not known
            command += f" --input-len {round(phase.tokens / phase.requests)}"
    return command


def profiling_command(
    report: Report, a: Analysis, line: str | None = None
) -> tuple[str, str] | None:
    """Return the commands that collect counters of the longest kernels below their attainable rate
    and read them, and their cost, or ``None`` if there is nothing to profile. ``line``: the run's
    own command."""
    program = line or _get_program_command(report)
    hint = f" {PLACEHOLDER}" * (program == ANY_PROGRAM)
    has_ranks = (a.trace.meta.world_size or 1) > 1 or (a.trace.meta.rank or 0) > 0
    has_ranks = has_ranks or len(report.inputs) > 1 or not a.collectives.is_empty()
    hint += f" {ONE_OF_SEVERAL}" * has_ranks
    chosen: dict[str, str] = {}
    for row in report.rooflines:
        slow = row.efficiency is None or row.efficiency < FAST_KERNEL_SHARE
        if (
            slow
            and row.share >= MIN_PROFILED_SHARE
            and row.family != "communication"
            and row.kernel
        ):
            name = re.match(r"[\w$]{1,24}", base_name(row.kernel))
            chosen_names = set(chosen.values())
            if name is not None and (
                name[0] in chosen_names or len(chosen_names) < MAX_NAMED_KERNELS
            ):
                chosen[row.kernel] = name[0]
    if not chosen or report.kernel_counters:
        return None
    names = list(dict.fromkeys(chosen.values()))
    read_counters = f"{analyze_command(report)} \\\n  --kernel-profile "
    if a.trace.meta.vendor == "amd":
        return (
            "rocprof-compute profile -n run \\\n"
            + f"  -k {' '.join(names)} \\\n"
            + f"  -- {program}\n"
            + "rocprof-compute analyze -p workloads/run/* --output-format db\n"
            + f"{read_counters}DATABASE",
            "The program runs some ten times, once per group of counters. DATABASE is the file "
            f"that the second command writes.{hint}",
        )
    sections = "".join(f"  --section {name} \\\n" for name in NCU_SECTIONS)
    pattern = f"^({'|'.join(names)})"
    selection = f"ncu -k 'regex:{pattern}'"
    if report.scope.step_source == LAYER_TIMES:  # its names are of layers, not of kernels
        layers = round(sum(row.calls for row in report.rooflines))
        selection, skip, count, where = "ncu", layers, layers, " after one inference"
    else:
        skip, count = _launches_to_profile(a, pattern, chosen.keys())
        where = "" if report.per == "recording" else f" of the third {report.per}"
    return (
        f"{selection} \\\n"
        f"  --launch-skip {skip} --launch-count {count} \\\n{sections}"
        f"  -o kernels {program}\n"
        f"{read_counters}kernels.ncu-rep",
        f"{t.count_noun(count, 'launch')}{where}, each repeated some ten times with "
        f"memory saved and restored.{hint}",
    )


def _launches_to_profile(a: Analysis, pattern: str, chosen: Set[str]) -> tuple[int, int]:
    """Return how many launches that match the pattern to skip, and how many to profile.

    ``ncu`` counts every kernel whose base name matches, including siblings of the ``chosen``
    kernels, so both numbers count them too. Two steps are skipped. In the third, the run of
    :data:`MAX_LAUNCHES` consecutive launches with most of the chosen kernels is profiled."""
    gpu = a.trace.gpu
    index = np.flatnonzero(a.in_window & (gpu["kind"] == "kernel").to_numpy())
    rows = gpu.select("name", "ts", "launch")[index]
    kernel_names = rows["name"].unique().cast(pl.String)
    matching = [name for name in kernel_names if re.match(pattern, base_name(name))]
    step = step_of(a.steps, rows["ts"].to_numpy())
    rows = rows.with_columns(
        pl.col("name").cast(pl.String),
        step=step,
        called=a.trace.cpu["ts"].gather(rows["launch"]).fill_null(rows["ts"]),
    ).filter(pl.col("name").is_in(matching) & pl.col("step").is_not_null())
    if rows.is_empty():
        return 0, 1
    steps = rows.sort("called").group_by("step").agg("name").sort(pl.col("name").list.len(), "step")
    typical = steps["name"][steps.height // 2].to_list()
    count = min(len(typical), MAX_LAUNCHES)
    ranges = [typical[start : start + count] for start in range(len(typical) - count + 1)]
    scores = [(len(chosen & set(part)), sum(n in chosen for n in part)) for part in ranges]
    skipped = 0 if a.per == "recording" else round(2 * rows.height / a.step_count)
    return skipped + scores.index(max(scores)), count


def base_name(kernel: str) -> str:
    """Return a kernel's name as ``ncu`` matches it: demangled, without return type, namespaces,
    templates and arguments."""
    text = kernel[:4096]
    if text.startswith("_Z"):
        parts, remaining = list[str](), re.sub(r"^_ZN?", "", text)
        while length := re.match(r"\d{1,4}", remaining):
            end = length.end() + int(length[0])
            parts.append(remaining[length.end() : end])
            remaining = remaining[end:]
        return parts[-1] if parts else text
    text = re.sub(r"\(anonymous namespace\)::|<unnamed>::|_GLOBAL__N__\w+::", "", text)
    text = labels.RETURN_TYPE.sub("", text)
    text = re.sub(r"^\s*(?:(?:void|static|__global__)\s+)*", "", text)
    return re.split(r"[<(\s]", text)[0].rpartition("::")[2]
