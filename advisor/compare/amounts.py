"""Figures of two runs side by side: time, memory snapshots, phases of a served model, and kernels
by hardware counters. It also has the verdicts for runs without steps."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from advisor.compare.comparison import Amount, Comparison
from advisor.core import labels
from advisor.core import text as t
from advisor.core.prices import HOUR_NS
from advisor.core.report import Report
from advisor.core.report_inference import InferencePhase
from advisor.core.report_kernels import KernelCounters
from advisor.core.report_memory import MemoryHolder


def compare_amounts(before: Report, after: Report) -> list[Amount]:
    """Return every figure of the two reports side by side. A name that one report lacks is 0 there
    if the list was measured, else ``None``."""
    result = []
    for group, attribute in (
        ("time", "time"),
        ("idle", "idle"),
        ("host", "host"),
        ("kernels", "families"),
    ):
        old_ns, new_ns = (
            {getattr(part, "name", getattr(part, "cause", "")): part.ns for part in items}
            for items in (getattr(before, attribute), getattr(after, attribute))
        )
        # an empty list of idle causes next to device time means that there was no idle time
        measured = [bool(old_ns), bool(new_ns)]
        if attribute == "idle":
            measured = [bool(before.time), bool(after.time)]
        for name in dict.fromkeys((*old_ns, *new_ns)):
            values = [
                side.get(name, 0.0 if is_measured else None)
                for side, is_measured in zip((old_ns, new_ns), measured, strict=True)
            ]
            result.append(_amount(name, "ns", values, group))
    unknown_idle = [part for r in (before, after) for part in r.idle if part.cause == "unknown"]
    is_outside = bool(unknown_idle) and all(part.outside_operators for part in unknown_idle)
    for amount in result:
        amount.outside_operators = is_outside and (amount.group, amount.name) == ("idle", "unknown")
    for name, unit, attribute in (
        ("GPU busy", "share", "busy_share"),
        ("communication", "ns", "communication_ns"),
        ("communication hidden", "share", "communication_overlap"),
        ("MFU", "share", "mfu"),
        ("memory peak", "bytes", "memory_peak_bytes"),
    ):
        result.append(_amount(name, unit, [getattr(r, attribute) for r in (before, after)]))
    joules = [None if r.energy is None else r.energy.joules for r in (before, after)]
    result += [_amount("energy per step", "J", joules), *_compare_cost(before, after)]
    result += counter_amounts(before, after)
    result += memory_amounts(before, after)
    result += phase_amounts(before, after)
    result += layer_amounts(before, after)
    return [amount for amount in result if (amount.before, amount.after) != (None, None)]


def layer_amounts(before: Report, after: Report) -> list[Amount]:
    """Return own time and kept memory by kind of module and of its parent, the largest change
    first. Empty unless both recorded modules, around work of the same processor."""
    sides = before.layers, after.layers
    if sides[0] is None or sides[1] is None or sides[0].on_device != sides[1].on_device:
        return []
    times, memory = ([Counter[str](), Counter[str]()] for _ in range(2))
    for layers, self_ns, kept_bytes in zip((sides[0], sides[1]), times, memory, strict=True):
        for layer in layers.layers:
            suffix = "" if layer.parent is None else f" in {layers.layers[layer.parent].kind}"
            self_ns[layer.kind + suffix] += layer.self_ns  # type: ignore[assignment]
            if layer.kept_bytes:
                kept_bytes[layer.kind + suffix] += layer.kept_bytes  # type: ignore[assignment]
        self_ns["outside modules"] += layers.outside_ns  # type: ignore[assignment]
    result = _sort_by_change(times, "ns", "layers")
    return result + (_sort_by_change(memory, "bytes", "memory by layer") if all(memory) else [])


def _sort_by_change(sides: Sequence[Counter[str]], unit: str, group: str) -> list[Amount]:
    change = {name: abs(sides[1][name] - sides[0][name]) for name in sides[0] | sides[1]}
    names = sorted(change, key=lambda name: (-change[name], name))
    return [_amount(name, unit, [totals.get(name) for totals in sides], group) for name in names]


def _compare_cost(before: Report, after: Report) -> list[Amount]:
    """Return the cost per step, or of a recording without steps; empty if currencies differ. If
    both sides ran on one GPU model, both use the later price: the program is compared."""
    reports = (before, after)
    prices = [report.cost for report in reports]
    devices = [report.scope.device_name for report in reports]
    if None not in devices and devices[0] == devices[1]:
        prices = [after.cost or before.cost] * 2
    currencies = {price.currency for price in prices if price is not None}
    totals = [report.per == "recording" for report in reports]
    if len(currencies) != 1 or totals[0] != totals[1]:
        return []
    count, name = (1, "cost") if totals[0] else (1000, "cost of 1,000 steps")
    costs = [
        None if price is None else count * report.step_ns * price.per_hour * price.gpus / HOUR_NS
        for price, report in zip(prices, reports, strict=True)
    ]
    return [_amount(name, currencies.pop(), costs)]


def _amount(name: str, unit: str, values: Sequence[float | None], group: str = "figures") -> Amount:
    return Amount(group=group, name=name, unit=unit, before=values[0], after=values[1])


# -- memory snapshots, by category, line and lifetime --------------------------------------------

MEMORY_GROUP, LINES_GROUP = "memory", "memory by line"
LIFETIMES = ("allocated before the history", "still allocated at its end", "allocated and freed")
MIN_MEMORY_CHANGE = 0.01
"""Smallest change of the memory peak that counts, as a share of the larger peak."""
GROWTH_EXPLANATIONS = {
    "autocast copies": "Autocast keeps a 16-bit copy of each weight until its region ends.",
    "earlier steps": "Outputs of the step before are still there.",
    "optimizer temporaries": "The peak is in the optimizer's step.",
    "gradients": "Gradients are there at the peak.",
}
"""Explanations for categories that grew, where the name alone does not explain it."""


def memory_amounts(before: Report, after: Report) -> list[Amount]:
    """Return peak, categories, lifetimes and lines of the fullest device of both, in bytes. What
    one side does not list counts as 0. Empty if one of them has no snapshot."""
    if not before.memory or not after.memory:
        return []
    old, new = before.memory[0], after.memory[0]
    amounts = [
        _amount("in tensors at the peak", "bytes", [old.allocated, new.allocated], MEMORY_GROUP),
        _amount("reserved then", "bytes", [old.reserved, new.reserved], MEMORY_GROUP),
    ]
    for group, attributes in (
        (MEMORY_GROUP, ("categories", "lifetimes")),
        (LINES_GROUP, ("held",)),
    ):
        for attribute in attributes:
            sums = [_sum_bytes(getattr(view, attribute)) for view in (old, new)]
            names = dict.fromkeys((*sums[0], *sums[1]))
            pairs = {name: (sums[0].get(name, 0), sums[1].get(name, 0)) for name in names}
            rows = [
                _amount(name, "bytes", pair, group) for name, pair in pairs.items() if any(pair)
            ]
            amounts += sorted(rows, key=lambda row: -abs(_get_change(row)))
    return amounts


def _sum_bytes(holders: Iterable[MemoryHolder]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for holder in holders:
        name = holder.category
        if holder.file is not None:
            path = labels.clean(holder.file).replace(chr(92), "/")
            name = f"{t.shorten_path(path, 24)}:{holder.line} {holder.category}"
        sums[name] = sums.get(name, 0) + holder.bytes
    return sums


def _get_change(row: Amount) -> float:
    return (row.after or 0) - (row.before or 0)


def memory_change_verdict(c: Comparison) -> str:
    """Say what changed at the memory peak, and why; empty if there are no snapshots."""
    rows = [row for row in c.amounts if row.group == MEMORY_GROUP]
    if not rows:
        return ""
    peak = rows[0]
    before, after = peak.before or 0.0, peak.after or 0.0
    pair = f"{t.format_bytes(before)} → {t.format_bytes(after)}"
    min_change = MIN_MEMORY_CHANGE * max(before, after, 1)
    parts = [
        row for row in rows[2:] if row.name not in LIFETIMES and abs(_get_change(row)) >= min_change
    ]
    listed = ", ".join(f"{row.name} {t.format_bytes_change(_get_change(row))}" for row in parts[:3])
    change = after - before
    if abs(change) < min_change:
        text = f"Memory at the peak stays the same: {pair}"
        return f"{text}. What differs: {listed}" if listed else text
    direction = "rises" if change > 0 else "falls"
    share = f"{abs(change) / max(before, 1):.0%}"
    explanations = [
        GROWTH_EXPLANATIONS[row.name]
        for row in parts
        if row.name in GROWTH_EXPLANATIONS and _get_change(row) > 0
    ][:1]
    text = f"Memory at the peak {direction} by {share}: {pair} ({listed})."
    return " ".join([text, *explanations]).removesuffix(".")


# -- a served model: per token, so that batches of different sizes compare, and by role, because
# engines and versions name kernels differently

PHASES_GROUP, PARTS_GROUP = "phases", "parts"
PER_TOKEN = ", per token"
PHASE_SOURCES = ("engine", "module calls", "vocabulary look-ups")
"""Step sources whose steps are prompts and tokens: a mean over both is meaningless."""
MAX_EQUAL_TIME_SHARE = 0.03
"""Relative difference below which two times per token count as equal."""


def phase_amounts(before: Report, after: Report) -> Iterator[Amount]:
    """Yield time per token and per step, and GPU busy share, of each phase that both have. Then
    yield device time by part of a layer, per token if both counts are known, else per step."""
    sides = [
        {} if report.inference is None else {phase.name: phase for phase in report.inference.phases}
        for report in (before, after)
    ]
    for name in [name for name in sides[0] if name in sides[1]]:
        pair = [side[name] for side in sides]
        yield _amount(
            f"{name}{PER_TOKEN}", "ns", [phase.ns_per_token for phase in pair], PHASES_GROUP
        )
        yield _amount(f"{name}, per step", "ns", [phase.ns for phase in pair], PHASES_GROUP)
        yield _amount(
            f"{name}, GPU busy", "share", [phase.busy_share for phase in pair], PHASES_GROUP
        )
        yield from _compare_parts(name, pair)


def _compare_parts(name: str, pair: list[InferencePhase]) -> Iterator[Amount]:
    tokens = [phase.tokens for phase in pair]
    per_token = all(tokens)
    divisors = [count if per_token and count else 1.0 for count in tokens]
    for role in dict.fromkeys(role for phase in pair for role in phase.roles):
        values = [phase.roles.get(role, 0.0) / n for phase, n in zip(pair, divisors, strict=True)]
        measured: list[float | None] = [
            value if phase.roles else None for value, phase in zip(values, pair, strict=True)
        ]
        unit = PER_TOKEN if per_token else ", per step"
        yield _amount(f"{name}: {role}{unit}", "ns", measured, PARTS_GROUP)


def phase_verdict(comparison: Comparison) -> str:
    """Say how each phase's time per token changed: ``Decode takes 12% less time per token: 336 →
    296 µs``. Empty if no phase has tokens on both sides, or the steps have another source."""
    sentences: list[str] = []
    if not {comparison.before.step_source, comparison.after.step_source} <= {*PHASE_SOURCES}:
        return ""
    for amount in comparison.amounts:
        if amount.group != PHASES_GROUP or not amount.name.endswith(PER_TOKEN):
            continue
        if not amount.before or amount.after is None:
            continue
        share = amount.after / amount.before - 1
        change = f"{t.format_share(abs(share))} {'more' if share > 0 else 'less'}"
        time_text = "the same time" if abs(share) < MAX_EQUAL_TIME_SHARE else f"{change} time"
        pair = f"{t.format_duration(amount.before)} → {t.format_duration(amount.after)}"
        sentences.append(
            f"{amount.name.removesuffix(PER_TOKEN)} takes {time_text} per token: {pair}"
        )
    text = "; ".join(sentences)
    return t.upper_first(text)


# -- variants of kernels by their hardware counters ------------------------------------------------

COUNTERS_GROUP = "counters"
MAX_RATIO_DIFFERENCE = 0.05
"""Largest difference between the ratios of traffic and of times for traffic to explain the time."""
MIN_MOVED_SHARE = 0.02
"""Relative change of a kernel's time below which nothing is explained."""
MIN_STALL_CHANGE = 0.05
"""Smallest change of a stall that is listed, as a share of a warp's cycles."""
MAX_LABEL_LENGTH = 24


def pair_kernels(before: Report, after: Report) -> list[tuple[KernelCounters, KernelCounters]]:
    """Pair the kernels of both by name, then by base name, then the only two that remain. Kernels
    of one name are paired in order. The longest kernel comes first."""
    pairs: list[tuple[KernelCounters, KernelCounters]] = []
    left, right = list(before.kernel_counters), list(after.kernel_counters)
    for key in (attrgetter("short"), _base_name):
        for old in list(left):
            new = next((k for k in right if key(k) == key(old)), None)
            if new is not None:
                pairs.append((old, new))
                left.remove(old)
                right.remove(new)
    if len(left) == len(right) == 1:
        pairs.append((left[0], right[0]))
    return sorted(pairs, key=lambda pair: -(pair[0].duration_ns or 0.0))


def _base_name(k: KernelCounters) -> str:
    return k.short.partition("<")[0]


def counter_amounts(before: Report, after: Report) -> list[Amount]:
    """Return time, traffic, use of units, occupancy and stalls of each kernel that both have."""
    result = []
    for old, new in pair_kernels(before, after):
        name = labels.shorten(new.short, MAX_LABEL_LENGTH)
        figures = _list_quantities(old, new)
        figures += [
            (f"{unit} use", "share", old.use.get(unit), new.use.get(unit))
            for unit in dict.fromkeys((*old.use, *new.use))
        ]
        figures += [
            ("occupancy", "share", old.occupancy, new.occupancy),
            ("waves", "", old.waves, new.waves),
        ]
        figures += [
            (
                f"stalled: {reason.replace('_', ' ')}",
                "share",
                old.stalls.get(reason),
                new.stalls.get(reason),
            )
            for reason in dict.fromkeys((*old.stalls, *new.stalls))
            if abs(old.stalls.get(reason, 0.0) - new.stalls.get(reason, 0.0)) >= MIN_STALL_CHANGE
        ]
        result += [
            _amount(f"{name}: {quantity}", unit, [x, y], COUNTERS_GROUP)
            for quantity, unit, x, y in figures
            if (x, y) != (None, None)
        ]
    return result


def _list_quantities(
    old: KernelCounters, new: KernelCounters
) -> list[tuple[str, str, float | None, float | None]]:
    return [
        ("time", "ns", old.duration_ns, new.duration_ns),
        ("DRAM traffic", "bytes", old.dram_bytes, new.dram_bytes),
        ("DRAM bandwidth", "B/s", old.bandwidth, new.bandwidth),
    ]


def counters_change_verdict(before: Report, after: Report) -> str:
    """Say how the kernel whose time changed most changed, and what explains it."""
    pairs = [
        (abs(y.duration_ns - x.duration_ns), x.duration_ns, y.duration_ns, x, y)
        for x, y in pair_kernels(before, after)
        if x.duration_ns and y.duration_ns
    ]
    if not pairs:
        if before.triton_kernels and after.triton_kernels:
            return (
                "Triton's caches have no times. Compare traces, each with its cache as "
                "--kernel-profile."
            )
        return "No kernel with a time is in both reports."
    _, old_ns, new_ns, old, new = max(pairs, key=lambda pair: pair[0])
    ratio = new_ns / old_ns
    times = f"{t.format_duration(old_ns)} → {t.format_duration(new_ns)}"
    name = labels.shorten(new.short, MAX_LABEL_LENGTH)
    if abs(ratio - 1) < MIN_MOVED_SHARE:
        return f"{name} takes as long: {times}."
    direction = "slower" if ratio > 1 else "faster"
    text = f"{name} is {t.format_share(abs(ratio - 1))} {direction}: {times}"
    changes = [
        f"{quantity} {t.format_share(abs(y / x - 1))} {'higher' if y > x else 'lower'}"
        for quantity, _, x, y in _list_quantities(old, new)[1:]
        if x and y and abs(y / x - 1) >= MIN_MOVED_SHARE
    ]
    traffic_ratio = old.dram_bytes and new.dram_bytes and new.dram_bytes / old.dram_bytes
    if traffic_ratio and abs(traffic_ratio - ratio) <= MAX_RATIO_DIFFERENCE:
        return f"{text}. Its DRAM traffic explains that: {changes[0]}." if changes else f"{text}."
    return f"{text}; {', '.join(changes)}." if changes else f"{text}."
