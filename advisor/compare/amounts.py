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
        item, other = (
            {getattr(part, "name", getattr(part, "cause", "")): part.ns for part in items}
            for items in (getattr(before, attribute), getattr(after, attribute))
        )
        # an empty list of idle causes beside device time means that there was no idle time
        measured = [bool(item), bool(other)]
        if attribute == "idle":
            measured = [bool(before.time), bool(after.time)]
        for name in dict.fromkeys((*item, *other)):
            values = [
                side.get(name, 0.0 if there else None)
                for side, there in zip((item, other), measured, strict=True)
            ]
            result.append(_amount(name, "ns", values, group))
    unknown = [part for r in (before, after) for part in r.idle if part.cause == "unknown"]
    outside = bool(unknown) and all(part.outside_operators for part in unknown)
    for amount in result:
        amount.outside_operators = outside and (amount.group, amount.name) == ("idle", "unknown")
    for name, unit, attribute in (
        ("GPU busy", "share", "busy_share"),
        ("communication", "ns", "communication_ns"),
        ("communication hidden", "share", "communication_overlap"),
        ("MFU", "share", "mfu"),
        ("memory peak", "bytes", "memory_peak_bytes"),
    ):
        result.append(_amount(name, unit, [getattr(r, attribute) for r in (before, after)]))
    joules = [None if r.energy is None else r.energy.joules for r in (before, after)]
    result += [_amount("energy per step", "J", joules), *_cost(before, after)]
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
    times, kept = ([Counter[str](), Counter[str]()] for _ in range(2))
    for layers, own, bytes_of in zip((sides[0], sides[1]), times, kept, strict=True):
        for layer in layers.layers:
            place = "" if layer.parent is None else f" in {layers.layers[layer.parent].kind}"
            own[layer.kind + place] += layer.own_ns  # type: ignore[assignment]
            if layer.kept_bytes:
                bytes_of[layer.kind + place] += layer.kept_bytes  # type: ignore[assignment]
        own["in no module"] += layers.outside_ns  # type: ignore[assignment]
    result = _most_changed(times, "ns", "layers")
    return result + (_most_changed(kept, "bytes", "memory by layer") if all(kept) else [])


def _most_changed(sides: Sequence[Counter[str]], unit: str, group: str) -> list[Amount]:
    change = {name: abs(sides[1][name] - sides[0][name]) for name in sides[0] | sides[1]}
    order = sorted(change, key=lambda name: (-change[name], name))
    return [_amount(name, unit, [own.get(name) for own in sides], group) for name in order]


def _cost(before: Report, after: Report) -> list[Amount]:
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

MEMORY, LINES = "memory", "memory by line"
LIFETIMES = ("allocated before the history", "still allocated at its end", "allocated and freed")
MIN_CHANGE = 0.01
"""Smallest change of the memory peak that counts, as a share of the larger peak."""
GROWTH_EXPLANATIONS = {
    "autocast copies": "Autocast keeps a 16-bit copy of each weight until its region ends.",
    "earlier steps": "Outputs of the step before are still there.",
    "optimizer temporaries": "The peak is in the optimizer's step.",
    "gradients": "Gradients are there at the peak.",
}
"""Explanations of a category that grew, where its name alone does not tell."""


def memory_amounts(before: Report, after: Report) -> list[Amount]:
    """Return peak, categories, lifetimes and lines of the fullest device of both, in bytes. What
    one side does not list is 0 there. Empty if one of them has no snapshot."""
    if not before.memory or not after.memory:
        return []
    one, other = before.memory[0], after.memory[0]
    made = [
        _amount("in tensors at the peak", "bytes", [one.allocated, other.allocated], MEMORY),
        _amount("reserved then", "bytes", [one.reserved, other.reserved], MEMORY),
    ]
    for group, items in ((MEMORY, ("categories", "lifetimes")), (LINES, ("held",))):
        for attribute in items:
            sums = [_sums(getattr(view, attribute)) for view in (one, other)]
            names = dict.fromkeys((*sums[0], *sums[1]))
            pairs = {name: (sums[0].get(name, 0), sums[1].get(name, 0)) for name in names}
            rows = [
                _amount(name, "bytes", pair, group) for name, pair in pairs.items() if any(pair)
            ]
            made += sorted(rows, key=lambda row: -abs(_difference(row)))
    return made


def _sums(holders: Iterable[MemoryHolder]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in holders:
        name = each.category
        if each.file is not None:
            path = labels.clean(each.file).replace(chr(92), "/")
            name = f"{t.shorten_path(path, 24)}:{each.line} {each.category}"
        sums[name] = sums.get(name, 0) + each.bytes
    return sums


def _difference(row: Amount) -> float:
    return (row.after or 0) - (row.before or 0)


def memory_verdict(c: Comparison) -> str:
    """Say what changed at the memory peak, and why; empty if there are no snapshots."""
    rows = [row for row in c.amounts if row.group == MEMORY]
    if not rows:
        return ""
    peak = rows[0]
    before, after = peak.before or 0.0, peak.after or 0.0
    pair = f"{t.format_bytes(before)} → {t.format_bytes(after)}"
    least = MIN_CHANGE * max(before, after, 1)
    parts = [
        row for row in rows[2:] if row.name not in LIFETIMES and abs(_difference(row)) >= least
    ]
    listed = ", ".join(f"{row.name} {t.format_bytes_change(_difference(row))}" for row in parts[:3])
    change = after - before
    if abs(change) < least:
        text = f"Memory at the peak stays the same: {pair}"
        return f"{text}. What differs: {listed}" if listed else text
    rises = "rises" if change > 0 else "falls"
    share = f"{abs(change) / max(before, 1):.0%}"
    why = [
        GROWTH_EXPLANATIONS[row.name]
        for row in parts
        if row.name in GROWTH_EXPLANATIONS and _difference(row) > 0
    ][:1]
    text = f"Memory at the peak {rises} by {share}: {pair} ({listed})."
    return " ".join([text, *why]).removesuffix(".")


# -- a model that is served: per token, so that batches of different size compare, and by role,
# because engines and versions name kernels differently

PHASES, PARTS = "phases", "parts"
PER_TOKEN = ", per token"
PHASE_SOURCES = ("engine", "module calls", "vocabulary look-ups")
"""Step sources whose steps are prompts and tokens: a mean over both says nothing."""
EQUAL_TIME_SHARE = 0.03
"""Relative difference below which two times per token are called the same."""


def phase_amounts(before: Report, after: Report) -> Iterator[Amount]:
    """Yield time per token and per step, and GPU busy share, of each phase that both have. Then
    comes device time by part of a layer, per token if both counts are known, else per step."""
    sides = [
        {} if report.inference is None else {phase.name: phase for phase in report.inference.phases}
        for report in (before, after)
    ]
    for name in [name for name in sides[0] if name in sides[1]]:
        pair = [side[name] for side in sides]
        yield _amount(f"{name}{PER_TOKEN}", "ns", [phase.ns_per_token for phase in pair], PHASES)
        yield _amount(f"{name}, per step", "ns", [phase.ns for phase in pair], PHASES)
        yield _amount(f"{name}, GPU busy", "share", [phase.busy_share for phase in pair], PHASES)
        yield from _parts(name, pair)


def _parts(name: str, pair: list[InferencePhase]) -> Iterator[Amount]:
    tokens = [phase.tokens for phase in pair]
    known = all(tokens)
    each = [count if known and count else 1.0 for count in tokens]
    for role in dict.fromkeys(role for phase in pair for role in phase.roles):
        values = [phase.roles.get(role, 0.0) / n for phase, n in zip(pair, each, strict=True)]
        measured: list[float | None] = [
            value if phase.roles else None for value, phase in zip(values, pair, strict=True)
        ]
        unit = PER_TOKEN if known else ", per step"
        yield _amount(f"{name}: {role}{unit}", "ns", measured, PARTS)


def phase_verdict(comparison: Comparison) -> str:
    """Say how each phase's time per token changed: ``Decode takes 12% less time per token: 336 →
    296 µs``. Empty if no phase has tokens on both sides, or steps are from elsewhere."""
    sentences: list[str] = []
    if not {comparison.before.step_source, comparison.after.step_source} <= {*PHASE_SOURCES}:
        return ""
    for amount in comparison.amounts:
        if amount.group != PHASES or not amount.name.endswith(PER_TOKEN):
            continue
        if not amount.before or amount.after is None:
            continue
        share = amount.after / amount.before - 1
        change = f"{t.format_share(abs(share))} {'more' if share > 0 else 'less'}"
        how = "the same time" if abs(share) < EQUAL_TIME_SHARE else f"{change} time"
        pair = f"{t.format_duration(amount.before)} → {t.format_duration(amount.after)}"
        sentences.append(f"{amount.name.removesuffix(PER_TOKEN)} takes {how} per token: {pair}")
    text = "; ".join(sentences)
    return text[:1].upper() + text[1:]


# -- variants of kernels by their hardware counters ------------------------------------------------

COUNTERS = "counters"
EXPLAINED_RATIO = 0.05
"""Largest difference between the ratios of traffic and of times for traffic to explain the time."""
MIN_MOVED_SHARE = 0.02
"""Relative change of a kernel's time below which nothing is explained."""
MIN_STALL_CHANGE = 0.05
"""Smallest change of a stall that is listed, as a share of a warp's cycles."""
MAX_LABEL = 24


def pair_kernels(before: Report, after: Report) -> list[tuple[KernelCounters, KernelCounters]]:
    """Pair the kernels of both by name, then by base name, then the only two that are left. Kernels
    of one name pair in their order; the longest comes first."""
    pairs: list[tuple[KernelCounters, KernelCounters]] = []
    left, right = list(before.kernel_counters), list(after.kernel_counters)
    for same in (attrgetter("short"), _base):
        for old in list(left):
            new = next((k for k in right if same(k) == same(old)), None)
            if new is not None:
                pairs.append((old, new))
                left.remove(old)
                right.remove(new)
    if len(left) == len(right) == 1:
        pairs.append((left[0], right[0]))
    return sorted(pairs, key=lambda pair: -(pair[0].duration_ns or 0.0))


def _base(k: KernelCounters) -> str:
    return k.short.partition("<")[0]


def counter_amounts(before: Report, after: Report) -> list[Amount]:
    """Return time, traffic, use of units, occupancy and stalls of each kernel that both have."""
    result = []
    for old, new in pair_kernels(before, after):
        name = labels.shorten(new.short, MAX_LABEL)
        figures = _quantities(old, new)
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
            _amount(f"{name}: {quantity}", unit, [x, y], COUNTERS)
            for quantity, unit, x, y in figures
            if (x, y) != (None, None)
        ]
    return result


def _quantities(
    old: KernelCounters, new: KernelCounters
) -> list[tuple[str, str, float | None, float | None]]:
    return [
        ("time", "ns", old.duration_ns, new.duration_ns),
        ("DRAM traffic", "bytes", old.dram_bytes, new.dram_bytes),
        ("DRAM bandwidth", "B/s", old.bandwidth, new.bandwidth),
    ]


def counters_verdict(before: Report, after: Report) -> str:
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
    _, first, second, old, new = max(pairs, key=lambda pair: pair[0])
    ratio = second / first
    times = f"{t.format_duration(first)} → {t.format_duration(second)}"
    name = labels.shorten(new.short, MAX_LABEL)
    if abs(ratio - 1) < MIN_MOVED_SHARE:
        return f"{name} takes as long: {times}."
    how = "slower" if ratio > 1 else "faster"
    text = f"{name} is {t.format_share(abs(ratio - 1))} {how}: {times}"
    moved = [
        f"{quantity} {t.format_share(abs(y / x - 1))} {'higher' if y > x else 'lower'}"
        for quantity, _, x, y in _quantities(old, new)[1:]
        if x and y and abs(y / x - 1) >= MIN_MOVED_SHARE
    ]
    traffic = old.dram_bytes and new.dram_bytes and new.dram_bytes / old.dram_bytes
    if traffic and abs(traffic - ratio) <= EXPLAINED_RATIO:
        return f"{text}. Its DRAM traffic explains that: {moved[0]}." if moved else f"{text}."
    return f"{text}; {', '.join(moved)}." if moved else f"{text}."
