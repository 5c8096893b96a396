"""Sections of auxiliary inputs: logs of torch.compile, hardware counters and Triton's cache by
kernel, the network path that NCCL chose, and collectives that do not match or end."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from advisor.advise.kernel_counters import is_runtime, limit_of, without_references
from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import (
    CollectiveCall,
    CompileCause,
    CompileLog,
    FlightRecord,
    FusedKernel,
    GraphBreak,
    NetworkLog,
)
from advisor.core.report import Report
from advisor.core.report_kernels import KernelCounters, TritonKernel
from advisor.measure.comm.flight_recorder import describe_call, of_ranks
from advisor.measure.device.kernel_profiles import label_kernels
from advisor.render import document as d

_MAX_ROWS: Final = 12


def build_compilation(log: CompileLog | None, report: Report | None = None) -> Iterator[d.Block]:
    """Yield the contents of torch.compile's logs, by cause and line. Nothing without logs."""
    if log is None:
        return
    lists: list[d.Block] = [d.Paragraph(_summarize_log(log, report), indent=2)]
    for title, rows in (
        ("Graph breaks", [_describe_break(each) for each in log.breaks]),
        (
            "Recompilations",
            [_describe_recompilation(causes) for causes in _group_by_place(log.recompilations)],
        ),
        ("Not compiled", [_describe_cause(each) for each in log.not_compiled]),
        ("Without CUDA graphs", [_describe_cause(each) for each in log.without_cuda_graphs]),
        (
            "Generated kernels",
            [_describe_kernel(each) for each in log.kernels if each.ns is not None],
        ),
    ):
        if rows:
            more = len(rows) - _MAX_ROWS
            first_rows = rows[:_MAX_ROWS]
            if more > 0:
                first_rows.append(d.Span(f"{more:,} more; JSON has all", "soft"))
            lists.append(d.Items(first_rows, "∙", f"{title} ({len(rows)})"))
    yield d.Section("torch.compile", lists)


def _summarize_log(log: CompileLog, report: Report | None) -> str:
    """Write counts and time. With a trace, also give the time as a number of steps."""
    text = f"{t.count_noun(log.compilations, 'compilation')} took {t.format_duration(log.ns)}"
    if log.inductor_ns is not None:
        text += f", {t.format_duration(log.inductor_ns)} of it in inductor"
    if report is not None and report.per == "step" and report.step_ns > 0 < log.ns:
        text += f": as long as {t.count_noun(round(log.ns / report.step_ns), 'step')}"
    if log.logs > 1:
        text += f" (the longest of {log.logs:,} processes)"
    if not (log.breaks or log.recompilations or log.not_compiled or log.without_cuda_graphs):
        text += ". No graph breaks, no recompilations"
    damaged = f" {t.count_noun(log.damaged, 'record')} could not be read." if log.damaged else ""
    return f"{text}.{damaged}"


def _describe_break(item: GraphBreak) -> d.Inline:
    place = f"{t.shorten_path(item.file, 60)}:{item.line}"
    inside = f" in {labels.shorten(labels.clean(item.function), 40)}" if item.function else ""
    count = f", {item.count:,}×" if item.count > 1 else ""
    cost = ""
    if item.idle_ns is not None:
        cost = f", the GPU idles {t.format_duration(item.idle_ns)} per step"
    if item.gain_ns:
        cost += f" ({t.format_duration(item.gain_ns)} faster without it)"
    eager = " The whole function runs as plain PyTorch." if item.eager else ""
    hint = f" {item.hint or item.explanation}"
    return (
        d.Span(place, "code"),
        f"{inside}{count}{cost}: {item.reason}.{eager}",
        d.Span(hint, "soft"),
    )


def _describe_kernel(item: FusedKernel) -> d.Inline:
    """Describe a fused kernel: its name, its time, the operators in it, and their lines."""
    operators = ", ".join(labels.clean(name).removeprefix("aten.") for name in item.operators)
    places: dict[str, list[int]] = {}
    for each in item.lines:
        if each.file is not None and each.line is not None:
            places.setdefault(t.shorten_path(each.file, 40), []).append(each.line)
    at = "; ".join(f"{file}:{', '.join(map(str, lines))}" for file, lines in places.items())
    time = f", {t.format_duration(item.ns or 0.0)} per step"
    return (
        d.Span(labels.shorten(labels.clean(item.name), 50), "code"),
        f"{time}: {operators or 'operators not recorded'}",
        d.Span(f" {at}" if at else "", "soft"),
    )


def _group_by_place(causes: list[CompileCause]) -> list[list[CompileCause]]:
    """Group recompilations of one function."""
    result: dict[tuple[str | None, int | None], list[CompileCause]] = {}
    for cause in causes:
        result.setdefault((cause.file, cause.line), []).append(cause)
    return sorted(result.values(), key=lambda group: -sum(each.ns or 0 for each in group))


def _describe_recompilation(causes: list[CompileCause]) -> d.Inline:
    """Describe recompilations of a function by their first guard."""
    others = len(causes) - 1
    more = f", and {t.count_noun(others, 'other guard')}" if others else ""
    known = [each.ns for each in causes if each.ns is not None]
    count = sum(each.count for each in causes)
    reason = f"{causes[0].reason}{more}"
    merged = {"reason": reason, "count": count, "ns": sum(known) if known else None}
    return _describe_cause(replace(causes[0], **merged))


def _describe_cause(item: CompileCause) -> d.Inline:
    known = item.file is not None
    place = f"{t.shorten_path(item.file or '', 60)}:{item.line}" if known else "unknown line"
    inside = f" in {labels.shorten(labels.clean(item.function), 40)}" if item.function else ""
    time = "" if item.ns is None else f", {t.format_duration(item.ns)}"
    count = f", {item.count:,}×" if item.count > 1 else ""
    return (d.Span(place, "code"), f"{inside}{count}{time}: {item.reason}")


_MAX_KERNELS: Final = 50
_MAX_SHORT: Final = 10
MAX_ADVICE: Final = 4
_MAX_MESSAGE: Final = 240
"""Maximum length of a profiler message, characters. Further sentences are left out."""
_MAX_LINES: Final = 3
"""Maximum number of hot lines listed for a kernel."""
_MIN_LISTED_SHARE: Final = 0.05
"""Minimum share of a kernel's samples at which a line is listed."""


def build_kernel_sections(report: Report) -> list[d.Section]:
    """Build the tables of kernels and the command that records their counters."""
    return kernel_tables(report) + counter_command(report)


def kernel_tables(report: Report) -> list[d.Section]:
    """Build the tables of kernels with their limits, and of kernels compiled by Triton."""
    views = without_references(report.kernel_counters)
    if not views:
        return _build_triton_table(report)
    traced = any(view.step_ns is not None for view in views)
    absent = sum(view.step_ns is None for view in views)
    views = [view for view in views if view.step_ns is not None] if traced else views
    short = label_kernels(view.short for view in report.kernel_counters)
    several = any(view.profiled > 1 for view in views)
    rows = [_build_row(view, short[view.short], traced, several) for view in views[:_MAX_KERNELS]]
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [[row[name] or t.NOT_MEASURED for name in head] for row in rows]
    last = (len(head) - 1,) if head[-1] == "occupancy" else ()
    grid = _build_grid(
        head, cells, "".join("lr"[name not in _TEXTS] for name in head), optional=last
    )
    aside = _describe_absence(report, absent, len(views) if not traced else absent + len(views))
    aside = aside if aside or traced else "per launch"
    counted = any(view.use or view.occupancy is not None or view.dram_bytes for view in views)
    title = "Kernels with hardware counters" if counted else "Profiled kernels"
    blocks = [d.Section(title, [grid], aside)]
    sampled = [
        [
            f"{t.shorten_path(each.file, 22)}:{each.line}",
            t.format_share(each.share),
            _name_stall(each.stall),
            labels.shorten(short[view.short], 16),
        ]
        for view in views[:_MAX_SHORT]
        for each in view.lines[:_MAX_LINES]
        if each.share >= _MIN_LISTED_SHARE
    ]
    if sampled:
        grid = d.Grid(["line", "samples", "most wait for", "kernel"], sampled, align="lrll")
        blocks.append(
            d.Section("Where warps were sampled", [grid], "share of the kernel's samples")
        )
    return [*blocks, *_build_triton_table(report)]


def build_profiler_advice(report: Report) -> list[d.Section]:
    """Build the section with messages of the kernel profiler's own rules."""
    views = report.kernel_counters
    traced = any(view.step_ns is not None for view in views)
    views = [view for view in views if view.step_ns is not None] if traced else views
    short = label_kernels(view.short for view in report.kernel_counters)
    advice = _list_advice(without_references(views), short)
    if not advice:
        return []
    count = t.count_noun(len(advice), "note") + " of the profiler"
    items = d.Items(advice[:MAX_ADVICE])
    return [d.Section("The kernel profiler's own advice", [items], folded=True, summary=count)]


STALLS: Final = {
    "selected": "issuing", "not selected": "its turn", "long scoreboard": "memory",
    "short scoreboard": "shared memory", "lg throttle": "memory queue",
    "mio throttle": "shared-memory queue", "tex throttle": "texture queue",
    "math pipe throttle": "arithmetic unit", "barrier": "other warps", "membar": "visible writes",
    "wait": "last instruction", "imc miss": "constants", "no instruction": "code",
    "branch resolving": "branch", "dispatch stall": "dispatcher", "drain": "last writes",
    "sleeping": "sleep",
}  # fmt: skip
"""Plain names of stalls, by Nsight Compute's name
(https://docs.nvidia.com/nsight-compute/ProfilingGuide/#statistical-sampler)."""


def _name_stall(name: str) -> str:
    words = STALLS.get(name)
    return name if words is None else f"{words} ({name})" if name != "selected" else words


BOILERPLATE: Final = re.compile(
    r" *See the CUDA Best Practices Guide [^.]*\.| *See the [\w ]+ (?:description|model)[^.]*\."
    r"| *Look at [\w ]+ for more details\.",
    re.IGNORECASE,
)


NO_ADVICE: Final = re.compile(r"^The ratio of peak float \(fp32\) to double \(fp64\)(?!.*consider)")
"""Message on a roofline of FP32 and FP64 without advice. Most kernels do neither kind of work."""


def _list_advice(views: Sequence[KernelCounters], short: dict[str, str]) -> list[str]:
    """List messages of the profiler's own rules, one per rule: the first sentences on the first
    kernel, and the number of other kernels. Occupancy only matters if the kernel waits."""
    sentences: dict[str, tuple[str, str, set[str]]] = {}
    for view in views:
        for text in view.advice:
            waits = view.limit == "latency" or not view.use
            if NO_ADVICE.search(text) or ("theoretical occupancy" in text and not waits):
                continue
            rule = " ".join(re.sub(r"\d[\d.,]*", "", text).split()[:12])
            own = sentences.setdefault(rule, (short[view.short], text, set()))
            own[2].add(short[view.short])
    return [
        f"{name}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {_first_sentences(text)}"
        for name, text, names in sentences.values()
    ]


def _first_sentences(text: str) -> str:
    """Return the first sentences of a message, and its estimate."""
    plain, estimate, number = BOILERPLATE.sub("", text).partition(" (estimated:")
    kept = ""
    for sentence in re.split(r"(?<=[.!])\s+(?=[A-Z])", plain):
        if kept and len(kept) + len(sentence) > _MAX_MESSAGE:
            break
        kept += f" {sentence}" if kept else sentence
    return f"{kept}{estimate}{number}"


def _build_triton_table(report: Report) -> list[d.Section]:
    """Build the table of Triton's cached kernels with their functions. With a trace, only show its
    kernels."""
    views = report.triton_kernels
    if not views:
        return []
    timed = [view for view in views if view.step_ns is not None]
    shown = timed or views
    targets = sorted({view.target for view in shown if view.target})
    head = ["kernel", "spills", "registers", "shared", "warps", "stages"]
    head[1:1] = ["per step"] if timed else []
    head += ["target"] if len(targets) > 1 else []
    head += ["occupancy"]
    rows = [_triton_row(view, head) for view in shown[:_MAX_KERNELS]]
    absence = _describe_absence(report, len(views) - len(timed), len(views))
    aside = " · ".join(filter(None, [absence, *(targets if len(targets) == 1 else [])]))
    grid = _build_grid(head, rows, "l" + "r" * (len(head) - 2) + "l", optional=(len(head) - 1,))
    places = {
        (view.name, view.file, view.line): [
            labels.shorten(view.name, 34),
            f"{t.shorten_path(view.file, 42)}:{view.line}",
        ]
        for view in shown[:_MAX_KERNELS]
        if view.file is not None
    }
    blocks: list[d.Block] = [grid]
    if places:
        blocks.append(_build_grid(["function", "source"], list(places.values()), "ll"))
    text = "Spills: registers of a thread that are kept in local memory, in bytes."
    return [d.Section("Kernels compiled by Triton", [*blocks, d.Paragraph(text, "soft")], aside)]


def _describe_absence(report: Report, absent: int, count: int) -> str:
    """Say how many kernels a trace lacks. Empty without a trace, or if it has all."""
    if report.scope.has_no_step_time or not absent:
        return ""
    if absent == count:
        return "none is in this trace"
    return f"{absent} more {'is' if absent == 1 else 'are'} not in this trace"


def _build_grid(
    head: list[str], rows: list[list[str]], align: str, optional: tuple[int, ...] = ()
) -> d.Grid:
    """Build a table that keeps its first rows if space is short."""
    more = t.count_noun(len(rows) - _MAX_SHORT, f"more {head[0]}")
    return d.Grid(
        head, rows, short=rows[:_MAX_SHORT], omitted_note=more, align=align, optional=optional
    )


def _triton_row(view: TritonKernel, head: list[str]) -> list[str]:
    spilled, occupancy = view.spilled_bytes, view.occupancy
    by = f", {view.occupancy_limiter}" if view.occupancy_limiter else ""
    cells = {
        "kernel": labels.shorten(view.name, 26),
        "per step": t.format_duration(view.step_ns or 0.0),
        "spills": t.NOT_MEASURED if spilled is None else _format_size(spilled),
        "registers": t.NOT_MEASURED if view.registers is None else str(view.registers),
        "shared": _format_size(view.shared_bytes),
        "warps": str(view.num_warps),
        "stages": ", ".join(map(str, view.num_stages)),
        "target": view.target,
        "occupancy": t.NOT_MEASURED if occupancy is None else f"{t.format_share(occupancy)}{by}",
    }
    return [cells[name] for name in head]


def _format_size(size: int) -> str:
    return t.format_bytes(size) if size else "none"


_TEXTS: Final = ("kernel", "file")
"""Columns that are not numbers."""


def _build_row(view: KernelCounters, name: str, traced: bool, several: bool) -> dict[str, str]:
    """Return cells by column. Empty if not collected. ``several``: some are means of launches."""
    busiest = max(view.use.values(), default=None)
    limit = limit_of(view)
    rate = "" if view.bandwidth is None else t.format_rate(view.bandwidth, "B/s")
    times = {
        "launches": f"{view.profiled:,}" if several else "",
        "time": _format_or_empty(view.duration_ns, t.format_duration),
    }
    if traced:
        times = {
            "per step": t.format_duration(view.step_ns),
            "gain at most": t.format_duration(view.gain_ns),
        }
    return {
        "kernel": name,
        "file": labels.shorten(view.file, 24),
        **times,
        "limited by": "(the runtime's)" if limit and is_runtime(view.name) else limit,
        "busy": _format_or_empty(busiest, t.format_share) + _name_unit(view),
        "DRAM bytes": _format_or_empty(view.dram_bytes, t.format_bytes) if busiest is None else "",
        "DRAM rate": rate if busiest is None else "",
        "occupancy": _format_or_empty(view.occupancy, t.format_share),
    }


def _name_unit(view: KernelCounters) -> str:
    """Name the busiest unit if the limit does not. Empty otherwise."""
    if limit_of(view) not in ("latency", "") or not view.use:
        return ""
    return f" {max(view.use, key=view.use.__getitem__)}"


def _format_or_empty(value: float | None, written: Callable[[float], str]) -> str:
    return "" if value is None else written(value)


def counter_command(report: Report) -> list[d.Section]:
    """Build the section with the command for counters of the slow kernels."""
    if not report.profile_kernels:
        return []
    command, cost = report.profile_kernels
    blocks: list[d.Block] = [d.Code(command, "console", "run"), d.Paragraph(cost, "soft")]
    title = "Hardware counters of the slow kernels"
    return [
        d.Section(
            title,
            blocks,
            "what limits each of them",
            folded="hardware counters" not in report.verdict,  # otherwise, it is the only advice
            summary="command for hardware counters",
        )
    ]


_MAX_CALLS: Final = 12


def build_flight_record(record: FlightRecord | None) -> Iterator[d.Block]:
    """Yield the calls that hang, with the line of each rank. Nothing without dumps."""
    if record is None:
        return
    counted = f"{t.count_noun(record.calls, 'call')} in {t.count_noun(record.groups, 'group')}, "
    counted += t.count_noun(record.dumps, "dump")
    missing = f". {of_ranks(record.absent)} left none" if record.absent else ""
    damaged = t.count_noun(record.damaged, "entry")
    damage = f". {damaged} could not be read" if record.damaged else ""
    blocks: list[d.Block] = [d.Paragraph(f"{counted}{missing}{damage}", indent=2)]
    for problem in record.problems:
        rows = [_describe_call(each, "") for each in problem.calls]
        rows += [_describe_call(each, "last call of ") for each in problem.last]
        first = problem.calls[0]
        title = f"{labels.clean(first.operation)} {first.sequence} of {labels.clean(first.group)}"
        blocks.append(d.Items(rows[:_MAX_CALLS], "∙", f"{title}: {problem.kind}"))
    yield d.Section("Collectives (flight recorder)", blocks)


def _describe_call(call: CollectiveCall, prefix: str) -> d.Inline:
    """Describe a call: its rank, the call, the line, its group and state."""
    function = call.where.function if call.where is not None else None
    inside = f" in {labels.shorten(labels.clean(function), 40)}" if function else ""
    group = labels.shorten(labels.clean(call.group), 40)
    return (
        f"{prefix}rank {call.rank}: ",
        d.Span(describe_call(call), "code"),
        d.Span(f"{inside}, {group}, {labels.clean(call.state)}", "soft"),
    )


def build_network_path(log: NetworkLog | None) -> Iterator[d.Block]:
    """Yield facts from NCCL's logs and topologies, one line per fact. Nothing without them."""
    if log is None:
        return
    across = ", ".join(f"{name} ({count})" for name, count in log.networks.items())
    rate = f"{log.nic_gb_per_s:.0f} GB/s per node" if log.nic_gb_per_s else ""
    nvls = {None: "", True: "NVLS available", False: "NVLS not available"}[log.nvls]
    on = f"on {t.count_noun(log.hosts, 'host')}"
    size = f"{t.count_noun(log.ranks, 'rank')} {on}" if log.ranks else ""
    ring = f"{log.ring}, {log.ring_gb_per_s:.0f} GB/s expected" if log.ring_gb_per_s else ""
    channels = "" if log.channels is None else f"{log.channels} for collectives"
    channels += "" if log.nvls_channels is None else f", {log.nvls_channels} for NVLS"
    gdr = [f"{log.gdr_enabled} enabled"] if log.gdr_enabled else []
    near = [f"{t.count_noun(count, 'GPU')} {link}" for link, count in log.nic_links.items()]
    facts = {
        "library": [*log.versions, size],
        "network": [across, ", ".join(log.devices or log.interfaces), rate],
        "paths": _count_items(log.paths),
        "GDR": gdr + [f"{n} disabled ({why})" for why, n in log.gdr_disabled.items()],
        "ring": [ring],
        "channels": [channels, nvls],
        "chosen": _count_items(log.algorithms),
        "links": _count_items(log.gpu_links),
        "adapters": [", ".join(log.nics), *near],
        "settings": [f"{name}={value}" for name, value in log.settings.items()][:_MAX_CALLS],
        "warnings": [f"{text} ({count}×)" for text, count in log.warnings.items()][:3],
    }
    rows = [
        d.TextField(label, [labels.clean(part) for part in parts if part])
        for label, parts in facts.items()
        if any(parts)
    ]
    yield d.Section("Network path (NCCL)", [d.FieldList(rows)])


def _count_items(counts: dict[str, int]) -> list[str]:
    return [f"{name} {count:,}" for name, count in list(counts.items())[:_MAX_CALLS]]
