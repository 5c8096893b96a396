"""Memory snapshots in a report: views, limits, and the verdict on a snapshot alone."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Literal

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Limit
from advisor.core.report import Report
from advisor.core.report_memory import (
    MemoryHolder,
    MemoryPool,
    MemorySample,
    MemorySaving,
    MemoryView,
)
from advisor.core.rule import VerdictRole
from advisor.measure import Analysis
from advisor.measure.memory.allocator_replay import Placement, explain_placement, measure_fragments
from advisor.measure.memory.memory_kinds import CATEGORIES, NOT_ATTRIBUTED
from advisor.measure.memory.memory_origin import held_by_module
from advisor.measure.memory.memory_savings import find_savings
from advisor.measure.memory.peak_memory import PeakMemory, fullest_devices, growing_lines

MAX_DEVICES = 16
MAX_MEMORY_LINES = 40
MAX_MODULES = 400
MIN_NAMED_SHARE = 0.1
"""Minimum share of the bytes in tensors at which the verdict names a category or saving."""
UNATTRIBUTED = CATEGORIES[NOT_ATTRIBUTED]
RECORD_HISTORY = "torch.cuda.memory._record_memory_history(max_entries=100_000)"
RECORD_PEAK = (
    f"call {RECORD_HISTORY} at the program's start, and torch.cuda.memory._dump_snapshot() after "
    "the peak"
)
MIN_UNUSED_SHARE = 0.25
"""Minimum share of the reserved bytes at which the verdict mentions unused memory."""

MAX_ROOMY_SHARE = 0.5
"""Share of the GPU's memory below which no advice halves the batch to free memory."""


def select_histories(a: Analysis) -> list[PeakMemory]:
    """Return the memory histories of the GPUs, or the host's if no GPU's is recorded."""
    return [peak for peak in a.gpu_and_host_peaks if peak.device >= 0] or a.gpu_and_host_peaks


def build_memory_views(a: Analysis) -> list[MemoryView]:
    """Return a view of each device, the fullest first. For a series, add what grows over it."""
    views = [_build_view(peak) for peak in select_histories(a)[:MAX_DEVICES]]
    capacity = a.memory["capacity"].max()
    for view, peak in zip(views, select_histories(a), strict=False):
        view.trains = does_train(a, peak)
        view.savings = [each for each in view.savings if is_new(each.change, a)]
        if isinstance(capacity, int) and view.reserved < MAX_ROOMY_SHARE * capacity:
            view.savings = [each for each in view.savings if each.change != "half the batch"]
    if a.snapshot_series and views:
        peaks = fullest_devices(a.snapshot_series)
        table, per = growing_lines(peaks)
        views[0].series = [sample_memory(peak, PurePath(peak.snapshot.path).name) for peak in peaks]
        views[0].grows_per = per
        views[0].grows = _list_holders(table, size="rate")
    return views


def does_train(a: Analysis | None, peak: PeakMemory) -> bool | None:
    """Return whether the program of a history trains, or ``None`` if that is unknown."""
    if peak.trains is None and a is not None and a.forward_only:
        return False
    return peak.trains


def is_new(change: str, a: Analysis | None) -> bool:
    """Return whether a change is new, as far as the trace shows what the program already does."""
    formats = [] if a is None or change != "BF16 autocast" else a.kernels["dtype"].to_list()
    return not {"bf16", "fp16"} & set(formats)


def memory_of_rank(a: Analysis, rank: int) -> MemorySample | None:
    """Return the memory of a rank's fullest device, or ``None`` if it has no snapshot."""
    return None if a.snapshot is None else sample_memory(a.peak_memories[0], f"rank {rank}")


def sample_memory(peak: PeakMemory, name: str) -> MemorySample:
    """Return what one device holds at the time of its snapshot or peak."""
    return MemorySample(
        name=name,
        allocated=peak.allocated,
        reserved=peak.reserved,
        categories=_list_categories(peak),
    )


def _list_holders(
    table: pl.DataFrame, *, blocks: str = "blocks", size: str = "bytes"
) -> list[MemoryHolder]:
    """Return the first lines of a table. ``blocks``, ``size``: names of these columns."""
    return [
        MemoryHolder(category=row.get("category", ""), file=row["file"], line=row["line"],
                     function=row["function"], label=row.get("label"),
                     blocks=round(row[blocks]), bytes=round(row[size]))
        for row in table.head(MAX_MEMORY_LINES).iter_rows(named=True)
    ]  # fmt: skip


def _list_category_sums(category_bytes: dict[str, int]) -> list[MemoryHolder]:
    return [
        MemoryHolder(category=name, file=None, line=None, function=None, blocks=0, bytes=size)
        for name, size in category_bytes.items()
    ]


def _list_categories(peak: PeakMemory) -> list[MemoryHolder]:
    return [
        MemoryHolder(category=name, file=None, line=None, function=None,
                     blocks=_count_blocks(peak, name), bytes=size)
        for name, size in peak.by_category.items()
    ]  # fmt: skip


def _build_view(peak: PeakMemory) -> MemoryView:
    history = peak.history
    fragments = measure_fragments(peak)
    moment = (
        "out of memory"
        if history.failed_event is not None
        else "snapshot"
        if history.is_too_short
        else "peak"
    )
    placement = explain_placement(peak)
    return MemoryView(
        device=peak.device,
        source=peak.snapshot.source,
        file=PurePath(peak.snapshot.path).name if peak.snapshot.source == "allocator" else "",
        at=moment,
        allocated=peak.allocated,
        reserved=peak.reserved,
        peak=int(history.allocated.max()),
        request=peak.request,
        driver_free=peak.device_free,
        events=history.count,
        from_start=bool(history.count) and not history.began_before,
        categories=_list_categories(peak),
        bases=_list_category_sums(peak.bases),
        lifetimes=_list_category_sums(peak.lifetimes),
        held=[
            MemoryHolder(category=row["category"], file=row["file"], line=row["line"],
                         function=row["function"], label=row["label"], blocks=row["blocks"],
                         bytes=row["bytes"])
            for row in peak.by_line.head(MAX_MEMORY_LINES).iter_rows(named=True)
        ],
        modules=held_by_module(peak)[:MAX_MODULES],
        pools=[] if fragments is None else [
            MemoryPool(
                name=_name_pool(row), segments=row["segments"], reserved=row["reserved"],
                allocated=row["allocated"], free=row["free"], largest=row["largest"],
            )
            for row in fragments.table.head(MAX_MEMORY_LINES).iter_rows(named=True)
        ],
        end_allocated=None if fragments is None else int(history.allocated[-1]),
        end_reserved=None if fragments is None else int(history.reserved[-1]),
        end_free=None if fragments is None else fragments.free,
        end_largest=None if fragments is None else fragments.largest,
        returnable=None if fragments is None else fragments.returnable,
        placement="" if placement is None else why_not_placed(placement),
        step_source=peak.step_source,
        steps=max(0, len(peak.whole_steps) - 1),
        churn_bytes=peak.churn_bytes,
        churn=_list_holders(peak.churn, blocks="times"),
        growth=_list_holders(peak.growth, blocks="steps", size="step_bytes"),
        savings=[
            MemorySaving(change=each.name, bytes=each.bytes, assumes=each.assumes,
                         cost=COSTS.get(each.name, ("none", ""))[0], file=each.file, line=each.line)
            for each in find_savings(peak)
        ],
    )  # fmt: skip


def _count_blocks(peak: PeakMemory, category: str) -> int:
    return int(peak.by_line.filter(peak.by_line["category"] == category)["blocks"].sum())


def _name_pool(row: dict[str, object]) -> str:
    kind = {True: "large", False: "small"}.get(row["large"], "all sizes")  # type: ignore[call-overload]
    parts = [str(kind)]
    if row["expandable"]:
        parts.append("expandable")
    if row["pool"] is not None:
        parts.append(f"private pool {row['pool']}")
    if row["stream"]:
        parts.append(f"stream {row['stream']}")
    return ", ".join(parts)


def why_not_placed(placement: Placement) -> str:
    """Explain in one or two sentences why a request failed."""
    driver = ""
    if placement.driver is not None:
        missing = placement.request - max(placement.driver, placement.largest)
        driver = f", the driver {t.format_bytes(placement.driver)}"
        driver += f": {t.format_bytes(missing)} too little" * (missing > 0)
    if placement.scattered:
        return (
            f"The request needed {t.format_bytes(placement.request)}. Its pool and stream had "
            f"{t.format_bytes(placement.usable)} free, but not in one piece: the largest had "
            f"{t.format_bytes(placement.largest)}{driver}."
        )
    elsewhere = ""
    if placement.free_elsewhere >= placement.request:
        elsewhere = (
            f" {t.format_bytes(placement.free_elsewhere)} more were free in other pools or of "
            "other streams."
        )
    return (
        f"The request needed {t.format_bytes(placement.request)}. Its pool and stream had "
        f"{t.format_bytes(placement.usable)} free, in pieces of at most "
        f"{t.format_bytes(placement.largest)}{driver}."
        f"{elsewhere}"
    )


def memory_verdict(
    report: Report, roles: Mapping[str, VerdictRole]
) -> tuple[Literal["bottlenecks", "healthy", "limited"], str]:
    """Return the status and verdict on a snapshot. ``roles``: ``Rule.verdict_role`` by id."""
    view = report.memory[0]
    largest = [
        item
        for item in view.categories[:2]
        if item.category != UNATTRIBUTED and item.bytes >= MIN_NAMED_SHARE * view.allocated
    ]
    categories = [f"{t.format_bytes(item.bytes)} of {item.category}" for item in largest]
    usage = f"{t.format_bytes(view.allocated)} in tensors"
    if view.reserved:
        usage += f" of {t.format_bytes(view.reserved)} reserved"
    unused = view.reserved - view.allocated
    if view.reserved and unused >= MIN_UNUSED_SHARE * view.reserved:
        usage += f" ({t.format_bytes(unused)} free since an earlier peak"
        usage += f"; {_describe_returned_memory(view)})" if view.at == "snapshot" else ")"
    are_most = 2 * sum(item.bytes for item in largest) > view.allocated
    most = "mainly" if are_most else "the largest part"
    mainly = f", {most} {' and '.join(categories)}" if categories else ""
    named = view.categories[: len(categories) + 1]
    sizes = [t.format_bytes(item.bytes) for item in named]
    if len(categories) == 2 and len(named) == 3 and sizes[1] == sizes[2]:
        names = [item.category for item in named]
        mainly = f", {most} {categories[0]} and {sizes[1]} each of {names[1]} and {names[2]}"
    if view.reserved and view.allocated > view.reserved:
        return "limited", (
            f"GPU {view.device}: {t.format_bytes(view.allocated)} in tensors and "
            f"{t.format_bytes(view.reserved)} reserved cannot both be true. Take a new snapshot: "
            f"{RECORD_PEAK}."
        )
    if view.request is not None:
        text = (
            f"GPU {view.device} ran out of memory at a request of {t.format_bytes(view.request)}: "
        )
    else:
        text = f"GPU {view.device} {'at its peak' if view.at == 'peak' else 'in the snapshot'}: "
    text += f"{usage}{mainly}."
    if report.risks:
        by_role = {roles.get(item.rule, ""): item for item in reversed(report.risks)}
        leading_risk = by_role.get("memory growth") or by_role.get("memory state")
        if view.request is not None:
            failed = by_role.get("out of memory")
            explanation = "" if failed is None else failed.summary.partition("). ")[2]
            fix = "" if failed is None else t.split_sentences(failed.fix, 0)[0]
            action = f"First: {t.lower_first(fix)}" if fix else ""
            return "bottlenecks", " ".join(part for part in (text, explanation, action) if part)
        if leading_risk is None:
            return "bottlenecks", f"{text} {_advise_on_memory(view, report)}".rstrip()
        return "bottlenecks", f"{leading_risk.summary} {text}"
    return "limited", f"{text} {_describe_end(view)} {_advise_on_memory(view, report)}".replace(
        "  ", " "
    ).rstrip()


def _describe_end(view: MemoryView) -> str:
    """Say how much memory is free, in which pieces, when the snapshot was taken. Empty if emptying
    the cache would return it."""
    if view.at != "peak" or view.end_free is None or not view.end_reserved:
        return ""
    stuck = view.end_free - (view.returnable or 0)
    if stuck < MIN_UNUSED_SHARE * view.end_reserved:
        return ""
    return f"{_describe_free_memory(view)}; {_describe_returned_memory(view)}."


def _describe_free_memory(view: MemoryView) -> str:
    return (
        f"When the snapshot was taken, {t.format_bytes(view.end_free or 0)} of the "
        f"{t.format_bytes(view.end_reserved or 0)} reserved was free, in pieces of at most "
        f"{t.format_bytes(view.end_largest or 0)}"
    )


COSTS = {
    "checkpointing": ("2nd forward pass", "it runs the forward pass twice"),
    "offload activations": ("copies both ways", "it copies activations both ways"),
    "offload optimizer state": ("update on host", "it updates weights on the host"),
    "half the batch": ("2× the launches", "it launches twice as many kernels"),
    "8-bit optimizer": ("lower precision", "check that accuracy holds"),
    "16-bit optimizer state": ("lower precision", "check that accuracy holds"),
    "16-bit weights": ("lower precision", "check that accuracy holds"),
    "BF16 autocast": ("lower precision", "check that accuracy holds"),
    "autocast without cache": ("more casts", "it casts weights more often"),
}
"""Costs per step of changes to memory, in up to 16 characters and as a clause. Others add no
work."""


MAX_NEGLIGIBLE_SHARE = 0.05
"""Maximum share of the unused memory that counts as "almost none"."""


def _describe_returned_memory(view: MemoryView) -> str:
    """Say whether memory that was free when the snapshot was taken can be returned."""
    unused = (view.end_reserved or 0) - (view.end_allocated or 0)
    call = "torch.cuda.empty_cache()"
    if view.returnable is None:
        return f"whether {call} returns it is unknown"
    if view.returnable >= (1 - MAX_NEGLIGIBLE_SHARE) * unused:
        return f"{call} returns it"
    if view.returnable <= MAX_NEGLIGIBLE_SHARE * unused:
        return f"{call} returns almost none of it: tensors are in the same segments"
    return f"{call} returns {t.format_bytes(view.returnable)} of it"


MIN_CHEAPER_SHARE = 0.9
"""Minimum share of the largest saving at which a cheaper change is named in addition."""


def large_savings(view: MemoryView) -> tuple[MemorySaving, MemorySaving, MemorySaving] | None:
    """Return the cheapest change that frees much, the cheapest that frees nearly the most, and the
    one that frees most. ``None`` if no change frees much."""
    large = [each for each in view.savings if each.bytes >= MIN_NAMED_SHARE * view.allocated]
    if not large:
        return None
    largest = max(large, key=lambda each: each.bytes)
    cheaper = next(each for each in large if each.bytes >= MIN_CHEAPER_SHARE * largest.bytes)
    return large[0], cheaper, largest


def _advise_on_memory(view: MemoryView, report: Report) -> str:
    """Name the cheapest change that frees much, and the one that frees most. Without a history, say
    how to record one."""
    snapshot_hint = ""
    if view.source == "timeline":
        largest_category = max(view.categories, key=lambda each: each.bytes, default=None)
        if (
            largest_category is not None
            and largest_category.category == "activations"
            and view.trains is not False
        ):
            snapshot_hint = (
                " To see what autocast and checkpointing free, record a snapshot with its history."
            )
    if changes := large_savings(view):
        first, cheaper, largest = changes
        cost = COSTS.get(first.change, ("", "it adds no work to a step"))[1]
        other_changes = (
            "" if cheaper is first else f" Most is freed by {_describe_saving(largest, view)}."
        )
        if cheaper not in (first, largest):
            other_changes = (
                f"{other_changes[:-1]}; usually faster is {_describe_saving(cheaper, view)}."
            )
        is_limit_unknown = view.request is None and report.memory_capacity_bytes is None
        opening = "If memory is short, first" if is_limit_unknown else "First"
        saving = _describe_saving(first, view)
        return f"{opening} {saving}; {cost}.{other_changes}{snapshot_hint}"
    if view.at != "peak" and view.source != "timeline":
        return f"To see its peak, {RECORD_PEAK}."
    return snapshot_hint.strip()


def _describe_saving(saving: MemorySaving, view: MemoryView) -> str:
    share = t.format_share(saving.bytes / view.allocated)
    return f"'{saving.change}': {t.format_bytes(saving.bytes)} ({share})"


def memory_limits(a: Analysis) -> list[Limit]:
    """List what a snapshot does not show."""
    if a.snapshot is None:
        return []
    result = []
    if a.snapshot.events.is_empty():
        result.append(
            Limit(
                "The memory snapshot has no history: peak, churn and growth are unknown. Switch it "
                f"on before the first allocation: {RECORD_HISTORY}.",
                "no history",
            )
        )
    elif all(peak.history.is_too_short for peak in a.peak_memories):
        count = a.snapshot.events.height
        result.append(
            Limit(
                f"The memory snapshot has a history of {t.count_noun(count, 'event')}: peak, churn "
                "and growth are unknown.",
                "short history",
            )
        )
    elif any(peak.history.began_before and peak.history.count for peak in a.peak_memories):
        result.append(
            Limit(
                "The memory history starts in the middle: blocks that existed before it have no "
                "line unless they are held to the end. Switch it on earlier, or raise max_entries.",
                "history starts late",
            )
        )
    if a.snapshot.source == "timeline":
        result.append(
            Limit(
                "A memory timeline has neither lines nor segments: record a snapshot for them "
                "(torch.cuda.memory._dump_snapshot).",
                "no lines",
            )
        )
    elif not any(a.snapshot.stacks):
        result.append(
            Limit(
                "The memory snapshot has no stacks: categories and lines are unknown "
                "(context='all' in _record_memory_history).",
                "no stacks",
            )
        )
    unmatched = sum(peak.history.unmatched for peak in a.peak_memories)
    if unmatched:
        result.append(
            Limit(
                f"Not in the memory history's state: {t.count_noun(unmatched, 'allocation')} "
                "without an end. History was switched off, or frees were not recorded."
            )
        )
    result += [
        Limit(f"Memory snapshot: {count:,} left out: {why}.")
        for why, count in a.snapshot.dropped.items()
    ]
    return result
