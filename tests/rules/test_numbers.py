"""The numbers of the rules: docstrings and code agree, and each says where it comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from advisor.advise.rule_loading import load_rules
from advisor.core.rule import Citation, Rule, Threshold
from advisor.measure import Analysis
from advisor.read import read_trace
from advisor.rules.support.common import impact_per_step
from advisor.testing import TraceBuilder

ROOT = Path(__file__).parents[2]
RULES = load_rules(config={})
UNITS = {
    "%": 1e-2, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "s": 1, "MB": 1e6, "MB/s": 1e6, "GB/s": 1e9,
    "TB/s": 1e12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "bytes": 1, "times": 1,
    "steps": 1, "copies": 1, "kernels": 1, "waves": 1, "epochs": 1, "batches": 1, "samples": 1,
}  # fmt: skip
WORDS = {"twenty": 20, "fifty": 50, "hundred": 100}
NUMBER = re.compile(
    rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?|(?:{'|'.join(WORDS)})(?= ))(?: to (\d[\d.]*))?\s?"
    rf"({'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))})(?!\w)"
)


def numbers_in(text: str) -> list[tuple[str, float, str]]:
    """Numbers with a unit in a text: as written, the number, the unit. ``40 to 55%`` are two."""
    result = []
    for match in NUMBER.finditer(" ".join(text.split())):
        for number in match.group(1, 2):
            if number:
                value = float(WORDS.get(number) or number.replace(",", ""))
                unit = match.group(3)
                result.append((f"{number}{'' if unit == '%' else ' '}{unit}", value, unit))
    return result


def matches_threshold(value: float, unit: str, threshold: float) -> bool:
    """A threshold is that number, in the docstring's unit or its base unit, or what it leaves of
    the whole (idle for 20%: busy for 0.8)."""
    base = value * UNITS[unit]
    same = [value, base, 1 - base] if unit == "%" else [value, base]
    return any(math.isclose(threshold, number) for number in same)


def numbers_of(rule: Rule) -> dict[str, Any]:
    """Thresholds and factors of a rule, by name."""
    return rule.options() | rule.factors()


def source_text(rule: Rule) -> str:
    """The text of a rule's sources."""
    sources = [s for name in numbers_of(rule) for s in getattr(type(rule), name).sources]
    return " ".join(source.name for source in (*rule.sources, *sources))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_number_of_a_docstring_is_a_threshold_or_cited(rule: Rule) -> None:
    sources = {(value, unit) for _, value, unit in numbers_in(source_text(rule))}
    values = [float(v) for v in numbers_of(rule).values() if not isinstance(v, str)]
    unsourced = [
        text
        for text, value, unit in numbers_in(rule.__doc__ or "")
        if (value, unit) not in sources
        and not any(matches_threshold(value, unit, v) for v in values)
    ]
    assert unsourced == []


def test_number_differing_from_its_threshold_is_detected() -> None:
    """The docstring of memory-leak said 5% once, and its code 0.02."""
    ((text, value, unit),) = numbers_in("resident memory from 5% of what the machine has")
    assert text == "5%"
    assert not matches_threshold(value, unit, 0.02) and matches_threshold(2.0, "%", 0.02)
    assert [n for _, n, _ in numbers_in("1.5 ms for 8 KiB, 40 to 55%, of fifty steps")] == [
        1.5,
        8,
        40,
        55,
        50,
    ]


def sources() -> list[tuple[str, Citation]]:
    result = [(rule.id, source) for rule in RULES for source in rule.sources]
    for rule in RULES:
        for name in numbers_of(rule):
            number = getattr(type(rule), name)
            assert isinstance(number, Threshold), f"{rule.id}.{name} says not where it comes from"
            assert number.meaning and number.sources, f"{rule.id}.{name}"
            result += [(f"{rule.id}.{name}", source) for source in number.sources]
    return result


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_option_and_factor_names_have_conventional_prefixes(rule: Rule) -> None:
    """``min_…``, ``max_…``: whether it fires. ``x``, ``best_x``, ``worst_x``: what it saves."""
    assert [n for n in rule.options() if not n.startswith(("min_", "max_"))] == []
    ends = r"(?:min|max|least|most|fewest|longest)_|\w+_(?:best|worst|low|high)$"
    assert [name for name in rule.factors() if re.match(ends, name)] == []


def test_every_threshold_has_an_accessible_source() -> None:
    for where, source in sources():
        if source.address.startswith("https://") or source.name.startswith("arithmetic"):
            continue
        assert (ROOT / source.address).is_file(), (where, source)


def test_launch_bound_counts_short_kernels_of_the_v100(
    shared_trace: Callable[[str], str],
) -> None:
    a = Analysis(read_trace(shared_trace("v100_train_copy_heavy")))
    kernels = a.trace.gpu.filter(pl.col("kind") == "kernel")
    short = (kernels["dur"] < 10_000).mean()
    busy = a.breakdown.busy.total / a.span_ns
    assert (short, busy) == (pytest.approx(0.45, abs=0.005), pytest.approx(0.96, abs=0.005))


@pytest.mark.parametrize("of_median", [False, True])
def test_no_gain_from_a_record_exceeds_its_step(of_median: bool) -> None:
    """Steps of 10 ms, every fifth of 60: about 20 ms on average without the first ones, 10 in the
    middle. A pause of 25 ms per step, worked out from other steps, cannot go out of either."""
    b = TraceBuilder()
    record = b.record_of_run()
    for number in range(40):
        record.steps(1, 60.0 if number % 5 == 4 else 10.0)
    for _ in b.steps(4):
        b.product(100)
    step = pytest.approx(10e6 if of_median else 20e6, rel=0.05)
    impact = impact_per_step(b.analysis(), 25e6, low=22e6, high=40e6, of_median=of_median)
    assert impact.gain_ns == impact.high_ns == impact.low_ns == step
    assert impact.share == pytest.approx(1.0, abs=0.006)  # the device works for 0.1 ms of each
    within = impact_per_step(b.analysis(), 8e6, low=4e6, of_median=of_median)
    assert (within.low_ns, within.gain_ns, within.high_ns) == (4e6, 8e6, 8e6)
    assert within.share == pytest.approx(0.8 if of_median else 0.4, rel=0.05)
