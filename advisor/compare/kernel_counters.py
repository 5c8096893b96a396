"""Variants of kernels by their hardware counters: what moved, and which of it explains the time."""

from __future__ import annotations

from advisor.compare.comparison import Amount
from advisor.core import text as t
from advisor.core.report import KernelCounters, Report

GROUP = "counters"
EXPLAINS = 0.05
"""How far a quantity's ratio may be from that of the times and still explain them."""
MOVED = 0.02
"""Change of time below which there is nothing to explain."""
STALL = 0.05
"""Share of a warp's cycles by which a stall must differ to be listed."""
SHORT = 24


def paired(before: Report, after: Report) -> list[tuple[KernelCounters, KernelCounters]]:
    """Kernels of both by name, else by base name, else the only two that are left; of several of
    one name in their order."""
    pairs: list[tuple[KernelCounters, KernelCounters]] = []
    left, right = list(before.kernel_counters), list(after.kernel_counters)
    for same in (_name, _base):
        for old in list(left):
            new = next((k for k in right if same(k) == same(old)), None)
            if new is not None:
                pairs.append((old, new))
                left.remove(old)
                right.remove(new)
    if len(left) == len(right) == 1:
        pairs.append((left[0], right[0]))
    return sorted(pairs, key=lambda pair: -(pair[0].duration_ns or 0.0))


def _name(k: KernelCounters) -> str:
    return k.short


def _base(k: KernelCounters) -> str:
    return k.short.partition("<")[0]


def counter_amounts(before: Report, after: Report) -> list[Amount]:
    """Time, traffic, use of each unit, occupancy and stalls of each kernel that both have."""
    result = []
    for old, new in paired(before, after):
        name = t.shorten(new.short, SHORT)
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
            (f"stalled: {_words(reason)}", "share", old.stalls.get(reason), new.stalls.get(reason))
            for reason in dict.fromkeys((*old.stalls, *new.stalls))
            if abs(old.stalls.get(reason, 0.0) - new.stalls.get(reason, 0.0)) >= STALL
        ]
        result += [
            Amount(group=GROUP, name=f"{name}: {quantity}", unit=unit, before=x, after=y)
            for quantity, unit, x, y in figures
            if (x, y) != (None, None)
        ]
    return result


def _words(reason: str) -> str:
    return reason.replace("_", " ")


def _quantities(
    old: KernelCounters, new: KernelCounters
) -> list[tuple[str, str, float | None, float | None]]:
    return [
        ("time", "ns", old.duration_ns, new.duration_ns),
        ("DRAM traffic", "bytes", old.dram_bytes, new.dram_bytes),
        ("DRAM bandwidth", "B/s", old.bandwidth, new.bandwidth),
    ]


def counters_verdict(before: Report, after: Report) -> str:
    """What became of the kernel whose time changed most, and what explains it."""
    pairs = [
        (abs(y.duration_ns - x.duration_ns), x.duration_ns, y.duration_ns, x, y)
        for x, y in paired(before, after)
        if x.duration_ns and y.duration_ns
    ]
    if not pairs:
        if before.triton_kernels and after.triton_kernels:
            return (
                "Triton's caches have no times. Compare traces, each with its cache as --kernels."
            )
        return "No kernel with a time is in both reports."
    _, first, second, old, new = max(pairs, key=lambda pair: pair[0])
    ratio = second / first
    times = f"{t.format_duration(first)} → {t.format_duration(second)}"
    name = t.shorten(new.short, SHORT)
    if abs(ratio - 1) < MOVED:
        return f"{name} takes as long: {times}."
    how = "slower" if ratio > 1 else "faster"
    text = f"{name} is {t.format_share(abs(ratio - 1))} {how}: {times}"
    moved = [
        f"{quantity} {t.format_share(abs(y / x - 1))} {'higher' if y > x else 'lower'}"
        for quantity, _, x, y in _quantities(old, new)[1:]
        if x and y and abs(y / x - 1) >= MOVED
    ]
    traffic = old.dram_bytes and new.dram_bytes and new.dram_bytes / old.dram_bytes
    if traffic and abs(traffic - ratio) <= EXPLAINS:
        return f"{text}. Its DRAM traffic explains that: {moved[0]}." if moved else f"{text}."
    return f"{text}; {', '.join(moved)}." if moved else f"{text}."
