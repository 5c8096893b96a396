"""Hardware counters and compiled kernels in a report: their views, the verdict on them alone, and
the command that collects them."""

from __future__ import annotations

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

MAX_KERNELS = 200
"""Number of kernels in a report, those with most time first."""
MAX_REPLAYED = 40
"""Number of kernels whose gain per step is replayed."""
MAX_STALLS = 5


def build_counter_views(a: Analysis, estimator: GainEstimator) -> list[KernelCounters]:
    """Return a view of each profiled kernel, by gain per step; without a trace, by duration, and
    without durations by the bytes of all launches."""
    gpu = a.trace.gpu["dur"].to_numpy()
    per_step = {
        id(k): float(gpu[k.rows].sum()) / a.step_count if len(k.rows) else None
        for k in a.profiled_kernels
    }
    kernels = sorted(a.profiled_kernels, key=lambda k: -(per_step[id(k)] or 0.0))
    views = []
    for place, k in enumerate(kernels[:MAX_KERNELS]):
        edit = None
        if k.busiest is not None and place < MAX_REPLAYED:
            edit = shorten_kernel(a, k, max(0.0, 1 - k.busiest / 100))
        gain = None if edit is None else round(max(0.0, estimator.gain_range([edit]).gain))
        views.append(_view(a, k, per_step[id(k)], gain))
    return sorted(
        views,
        key=lambda v: (
            -(v.gain_ns or 0),
            -(v.step_ns or 0),
            -(v.duration_ns or 0),
            -(v.dram_bytes or 0) * (v.profiled or 1),
        ),
    )


def _view(a: Analysis, k: ProfiledKernel, ns: float | None, gain: int | None) -> KernelCounters:
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
            labels.clean(said.text)
            + (f" (estimated: {said.saved:.0%} {said.scope})" if said.saved is not None else "")
            for said in profile.advice
        ],
        lines=[
            KernelLine(
                file=labels.clean(each.file),
                line=each.line,
                share=each.samples / (profile.samples or 1),
                stall=each.stall.replace("_", " "),
            )
            for each in profile.lines
        ],
    )


def build_triton_views(a: Analysis) -> list[TritonKernel]:
    """Return a view of each compiled kernel: those that spill and take time first, then by time and
    spilled bytes."""
    gpu = a.trace.gpu["dur"].to_numpy()
    views = [
        _compiled(k, len(k.rows) / a.step_count, float(gpu[k.rows].sum()) / a.step_count)
        if len(k.rows)
        else _compiled(k, None, None)
        for k in a.compiled_kernels
    ]

    def order(view: TritonKernel) -> tuple[bool, float, int, int, str]:
        spilled, ns = view.spilled_bytes or 0, view.step_ns or 0.0
        return not (spilled and ns), -ns, -spilled, -(view.registers or 0), view.name

    return sorted(views, key=order)[:MAX_KERNELS]


def _compiled(k: MatchedKernel, launches: float | None, ns: float | None) -> TritonKernel:
    own = k.kernel
    return TritonKernel(
        name=labels.clean(own.name),
        file=None if own.place is None else labels.clean(own.place[0]),
        line=None if own.place is None else own.place[1],
        target=labels.clean(own.target),
        num_warps=own.num_warps,
        num_stages=list(own.num_stages),
        registers=own.registers,
        shared_bytes=own.shared,
        local_bytes=own.local,
        spilled_bytes=own.spilled,
        occupancy=None if k.occupancy is None else k.occupancy / 100,
        occupancy_limiter=k.limiter,
        variants=own.variants,
        launches=launches,
        step_ns=ns,
    )


def counters_verdict(report: Report) -> tuple[Status, str]:
    """Return status and verdict on counters alone: what limits most kernels, which takes longest,
    and which fix saves most or what to collect."""
    views = [each for each in report.kernel_counters if not is_runtime(each.name)]
    views = views or report.kernel_counters
    left_out = len(report.kernel_counters) - len(views)
    own = without_references(views)
    checks, views = [view for view in views if view not in own], own
    limits = Counter(name for view in views if (name := limit_of(view).replace(", ", " and ")))
    whose = " of a PyTorch program" if report.scope.framework == PYTORCH else ""
    text = f"{t.count_noun(len(views), 'kernel')}{whose}{_counters_of(views)}"
    if limits:
        parts = [f"{count} by {name}" for name, count in limits.most_common()]
        verb = "is" if parts[0].startswith("1 ") else "are"
        parts[0] = parts[0].replace(" by ", f" {verb} limited by ", 1)
        left = len(views) - sum(limits.values())
        parts += [f"the limit of {left} was not collected"] if left else []
        if len(limits) == 1 and not left:
            who = "all are" if len(views) > 1 else "it is"
            parts = [f"{who} limited by {next(iter(limits))}"]
        text += f": {', '.join(parts)}"
    if left_out:
        verb = "is" if left_out == 1 else "are"
        text += f". {t.count_noun(left_out, 'kernel')} of the runtime {verb} not counted"
    if checks:
        short = label_kernels(view.short for view in report.kernel_counters)
        names = t.list_names(dict.fromkeys(short[view.short] for view in checks))
        text += f". {names}, a reference for results, is left out"
    text += f". {_longest(views)}"
    keys = {labels.clean(kernel_key(view.name)) for view in views}
    notes = [each for each in report.notes if _kernel_of(each) in keys]
    if notes:
        return "bottlenecks", f"{text}{_first_fix(notes[0], views)}"
    if limits:
        text += _raise_occupancy(views) or _relieve(views)
    elif all(view.duration_ns is None for view in views):
        text += (
            "The bandwidth needs the file of their times too: "
            f"{analyze_command(report)} --kernel-profile TIMES"
        )
    else:
        text += f"What limits it is not recorded: collect it with {_collector(report)}."
    return ("bottlenecks" if report.findings else "limited"), text.rstrip()


PARTLY_BUSY = 0.4
"""Use from which a unit limits a kernel too that waits."""


def limit_of(view: KernelCounters) -> str:
    """Name what limits a kernel: a unit, ``latency``, or both where a unit is busy for a good part
    of the time and still waits; empty: not collected."""
    if view.limit == "unknown":
        return ""
    unit = max(view.use, key=view.use.__getitem__, default="")
    if view.limit == "latency" and unit and view.use[unit] >= PARTLY_BUSY:
        return f"latency, {unit}"
    return view.limit


def is_runtime(name: str) -> bool:
    """Return whether a kernel is by its name the runtime's own: a copy, a fill, the heap."""
    return name.startswith("__amd_rocclr_")


def without_references(views: list[KernelCounters]) -> list[KernelCounters]:
    """Return the kernels without those that others are checked against; all, if there are no
    others."""
    return [view for view in views if not is_reference(view.name)] or views


def _kernel_of(note: Finding) -> str:
    """Return the key of the kernel that a note is about first; empty: it names none."""
    return labels.clean(kernel_key(note.where[0].kernel or "")) if note.where else ""


def _collector(report: Report) -> str:
    """Name the tool that collects what limits a kernel, by the format of the file."""
    form = _format(report) or ""
    amd, nvidia = "rocprof-compute profile", "ncu --set full"
    if any(view.name.startswith("__amd_") for view in report.kernel_counters) or "roc" in form:
        return amd
    return f"{amd} (AMD) or {nvidia} (NVIDIA)"


AT_LIMIT, MIN_DOMINANT_SHARE = 0.8, 0.5
"""Use of a unit at its limit; share of all launches' time of a kernel that dominates."""
RELIEVE: Final = {
    "L1": "Let neighbouring threads read neighbouring addresses, and keep tiles in registers",
    "L2": "Make blocks that run together share data, or keep tiles in shared memory",
    "DRAM": "Move fewer bytes: fuse it with its neighbours, or use a smaller type",
    "compute": "Its arithmetic is at the limit: use tensor cores, a smaller type or less work",
}


def _relieve(views: Sequence[KernelCounters]) -> str:
    """Return advice for the unit that limits the dominant kernel; empty if none is at its limit."""
    longest = _find_longest(views)
    if longest is None or _total(longest) < MIN_DOMINANT_SHARE * sum(map(_total, views)):
        return ""
    at_limit = len(views) > 1 and max(longest.use.values(), default=0.0) >= AT_LIMIT
    if at_limit and (library := library_of(longest.name)) is not None:
        return f"It is a kernel of {library}: choose another algorithm, or move fewer bytes. "
    return f"{RELIEVE[longest.limit]}. " if at_limit and longest.limit in RELIEVE else ""


FEW_BLOCKS = 0.5
"""Waves of blocks below which a kernel has too few of them, whatever its occupancy."""
LOW_OCCUPANCY = 0.25
"""Achieved occupancy below which a kernel that waits is advised more resident warps."""


def _raise_occupancy(views: Sequence[KernelCounters]) -> str:
    """Return advice for the longest kernel if it waits with few resident warps; empty if it does
    not."""
    longest = _find_longest(views)
    if longest is None or longest.limit != "latency" or longest.occupancy is None:
        return ""
    if longest.occupancy >= LOW_OCCUPANCY:
        return ""
    if longest.waves is not None and longest.waves < FEW_BLOCKS:
        filled = t.format_share(longest.waves)
        return (
            f"Its blocks are {filled} of those that the GPU holds at once: give it more work per "
            "launch, or let more blocks share each sum (split-K)."
        )
    cure = "Give it more work per launch, or use fewer registers and less shared memory per block."
    if (library := library_of(longest.name)) is not None:
        cure = f"It is a kernel of {library}: give it more work, or call another algorithm."
    return (
        f"Its occupancy is {t.format_share(longest.occupancy)}: too little runs at once to hide "
        f"the waits. {cure}"
    )


def _counters_of(views: Sequence[KernelCounters]) -> str:
    """Say what was collected of the kernels, to follow their number; empty: only names."""
    if any(view.use or view.occupancy is not None or view.stalls for view in views):
        return " with hardware counters"
    traffic = any(view.dram_bytes is not None for view in views)
    timed = any(view.duration_ns is not None for view in views)
    if traffic:
        return f" with counters of memory traffic{'' if timed else ', without times'}"
    return " with times, without counters" if timed else ""


def _longest(views: Sequence[KernelCounters]) -> str:
    """Write a sentence on the kernel with most time in all profiled launches, or without times on
    the one that moves most bytes."""
    short = label_kernels(view.short for view in views)
    longest = _find_longest(views)
    if longest is None:
        moved = max(views, key=lambda view: view.dram_bytes or 0.0)
        if not moved.dram_bytes:
            return ""
        return f"{short[moved.short]} moves most, {t.format_bytes(moved.dram_bytes)} per launch. "
    took = t.format_duration(longest.duration_ns or 0.0)
    name = short[longest.short] + f" of {longest.file}" * bool(longest.file)
    text = f"The longest, {name}, takes {took}" if len(views) > 1 else f"{name} takes {took}"
    if longest.profiled > 1:
        run = [view for view in views if view.file == longest.file]  # of several, each is a run
        share = _total(longest) / (sum(map(_total, run)) or 1.0)
        launches = f"{longest.profiled:,} launches of {took}"
        text = f"{name} takes most time ({t.format_share(share)}, {launches})"
    use = max(longest.use.values(), default=None)
    if longest.limit == "latency" and use is not None:
        text += f": it waits, and no unit is busier than {t.format_share(use)}"
    elif use is not None and longest.limit == "unknown":
        text += "; its tensor cores were not measured"
    elif use is not None:
        text += f", with {longest.limit} {t.format_share(use)} busy"
    elif longest.bandwidth is not None:
        text += f" at {t.format_rate(longest.bandwidth, 'B/s')} of DRAM"
    return f"{text}. {_variants(longest, views)}"


def _variants(longest: KernelCounters, views: Sequence[KernelCounters]) -> str:
    """Compare a kernel with the one of its name in each other file; empty: there is none."""
    same = [
        f"{view.file} takes {t.format_duration(view.duration_ns or 0.0)} for it "
        f"({(view.duration_ns or 0.0) / longest.duration_ns - 1:+.0%})"
        for view in views
        if view.file != longest.file and view.short == longest.short and longest.duration_ns
    ]
    return f"{', '.join(same)}. " if same else ""


def _find_longest(views: Sequence[KernelCounters]) -> KernelCounters | None:
    """Find the kernel that takes most time in all profiled launches; ``None`` if none was timed."""
    timed = [view for view in views if view.duration_ns is not None]
    return max(timed, key=_total, default=None)


def _total(view: KernelCounters) -> float:
    """Return the time of all profiled launches of a kernel, ns."""
    return (view.duration_ns or 0.0) * view.profiled


SMALL_FIX = 0.05
"""Share of the time of all launches below which a fix is not named first."""


def _first_fix(note: Finding, views: Sequence[KernelCounters]) -> str:
    """Say what the first note finds, in which kernel, and what its fix saves."""
    title = t.lower_first(note.title)
    saved = sum(float(each.value or 0) for each in note.evidence if each.label == ONE_LAUNCH)
    count = sum(int(e.value or 0) for e in note.evidence if e.label == "kernels with it")
    short = label_kernels(view.short for view in views)
    names = [short.get(labels.clean(kernel_key(place.kernel or ""))) for place in note.where[:1]]
    more = f" and {count - 1} more" if count > 1 else ""
    which = "".join(f" ({name}{more})" for name in names if name)
    when = f"if each of the {count} is launched once" if count > 1 else "per launch"
    gain = f" A fix saves up to {t.format_duration(saved)} {when}." if saved else ""
    if saved and saved < SMALL_FIX * sum(map(_total, views)):
        small = f"The largest estimated gain, {t.format_duration(saved)} {when}"
        return f"{_relieve(views)}{small}: {title}{which}."
    return f"First: {title}{which}.{gain}"


def compiled_verdict(report: Report) -> tuple[Status, str]:
    """Return status and verdict on a Triton cache without a trace."""
    views = report.triton_kernels
    text = f"{t.count_noun(len(views), 'kernel')} compiled by Triton"
    known = [view for view in views if view.spilled_bytes is not None]
    spills = [view for view in known if view.spilled_bytes]
    if spills:
        most = max(spills, key=lambda view: view.spilled_bytes or 0)
        name, size = labels.shorten(most.name, 40), t.format_bytes(most.spilled_bytes or 0)
        if len(spills) > 1:
            text += f": {len(spills)} spill registers. {name} spills most, {size} per thread."
        else:
            text += f". {name} spills {size} of registers per thread."
    elif len(known) == len(views):
        text += ": none spills registers."
    else:
        text += f": none of the {len(known)} whose module is there spills registers."
    return ("bottlenecks" if report.notes or report.findings else "limited"), text


# -- what to profile -------------------------------------------------------------------------------

MIN_SHARE = 0.05
"""Share of kernel time from which a kernel is profiled."""
FAST_KERNEL_SHARE = 0.8
"""Share of the attainable rate above which a kernel is not profiled."""
MAX_NAMES = 2
"""Number of kernel names in the command, so that it fits a terminal line to paste."""
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
"""Benchmark commands of engines, which end and repeat the same work, by engine:
https://docs.vllm.ai/en/stable/cli/bench/latency.html,
https://docs.sglang.io/developer_guide/benchmark_and_profiling.html."""


def _format(report: Report) -> str | None:
    return report.inputs[0].format if report.inputs else None


ANY_PROGRAM = "python PROGRAM.py"
"""Command of a program whose own is not recorded."""
PLACEHOLDER = "PROGRAM.py stands for your program, whose command is not recorded."
ONE_OF_SEVERAL = "Of a job, the launcher starts one rank so, and the others as before."


def _program(report: Report) -> str:
    """Return the command of the program, by the format and framework of its recording."""
    form, framework = _format(report), report.scope.framework
    tool = find_tool(form, framework)
    if tool is not None and tool.program:
        return tool.program
    if framework == CUDA:
        return "./program"
    if form != KINETO and form is not None and report.inference is None:
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
    """Return the command that collects counters of the longest kernels below their attainable rate,
    and its cost. ``None`` if there is nothing to profile. ``line``: the run's own command."""
    program = line or _program(report)
    hint = f" {PLACEHOLDER}" * (program == ANY_PROGRAM)
    several = (a.trace.meta.world_size or 1) > 1 or (a.trace.meta.rank or 0) > 0
    several = several or len(report.inputs) > 1 or not a.collectives.is_empty()
    hint += f" {ONE_OF_SEVERAL}" * several
    chosen: dict[str, str] = {}
    for row in report.rooflines:
        slow = row.efficiency is None or row.efficiency < FAST_KERNEL_SHARE
        if slow and row.share >= MIN_SHARE and row.family != "communication" and row.kernel:
            name = re.match(r"[\w$]{1,24}", base_name(row.kernel))
            known = set(chosen.values())
            if name is not None and (name[0] in known or len(known) < MAX_NAMES):
                chosen[row.kernel] = name[0]
    if not chosen or report.kernel_counters:
        return None
    names = list(dict.fromkeys(chosen.values()))
    if a.trace.meta.vendor == "amd":
        return (
            "rocprof-compute profile -n run \\\n"
            + f"  -k {' '.join(names)} \\\n"
            + f"  -- {program}",
            "The program runs some ten times, once per group of counters. Then: rocprof-compute "
            "analyze -p workloads/run/* --output-format db, and "
            f"{analyze_command(report)} --kernel-profile DATABASE{'.' * bool(hint)}{hint}",
        )
    sections = "".join(f"  --section {name} \\\n" for name in NCU_SECTIONS)
    pattern = f"^({'|'.join(names)})"
    which = f"ncu -k 'regex:{pattern}'"
    if report.scope.step_source == LAYER_TIMES:  # its names are of layers, not of kernels
        layers = round(sum(row.calls for row in report.rooflines))
        which, skip, count, after = "ncu", layers, layers, " after one inference"
    else:
        skip, count = _launches_to_profile(a, pattern, chosen.keys())
        after = "" if report.per == "recording" else f" of the third {report.per}"
    return (
        f"{which} \\\n"
        f"  --launch-skip {skip} --launch-count {count} \\\n{sections}"
        f"  -o kernels {program}",
        f"{t.count_noun(count, 'launch')}{after}, each repeated some ten times with "
        f"memory saved and restored. Then: {analyze_command(report)} --kernel-profile "
        f"kernels.ncu-rep{'.' * bool(hint)}{hint}",
    )


def _launches_to_profile(a: Analysis, pattern: str, chosen: Set[str]) -> tuple[int, int]:
    """Return how many launches that match the pattern to skip, and how many to profile.

    ``ncu`` counts every kernel whose base name matches, also siblings of the ``chosen`` kernels. So
    both numbers are of all these: two steps are skipped, and of the third the
    :data:`MAX_LAUNCHES` launches in a row that have most of the chosen kernels."""
    gpu = a.trace.gpu
    index = np.flatnonzero(a.in_window & (gpu["kind"] == "kernel").to_numpy())
    rows = gpu.select("name", "ts", "launch")[index]
    every = rows["name"].unique().cast(pl.String)
    matching = [name for name in every if re.match(pattern, base_name(name))]
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
    parts = [typical[start : start + count] for start in range(len(typical) - count + 1)]
    seen = [(len(chosen & set(part)), sum(n in chosen for n in part)) for part in parts]
    before = 0 if a.per == "recording" else round(2 * rows.height / a.step_count)
    return before + seen.index(max(seen)), count


def base_name(kernel: str) -> str:
    """Return a kernel's name as ``ncu`` matches it: without return type, namespaces, templates and
    arguments, and not mangled."""
    text = kernel[:4096]
    if text.startswith("_Z"):
        parts, rest = list[str](), re.sub(r"^_ZN?", "", text)
        while length := re.match(r"\d{1,4}", rest):
            end = length.end() + int(length[0])
            parts.append(rest[length.end() : end])
            rest = rest[end:]
        return parts[-1] if parts else text
    text = re.sub(r"\(anonymous namespace\)::|<unnamed>::|_GLOBAL__N__\w+::", "", text)
    text = labels.RETURN_TYPE.sub("", text)
    text = re.sub(r"^\s*(?:(?:void|static|__global__)\s+)*", "", text)
    return re.split(r"[<(\s]", text)[0].rpartition("::")[2]
