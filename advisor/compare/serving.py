"""Two runs of a model that is served, by phase and by part of a layer: per token, so that batches
of different size compare, and by role, because engines and versions name kernels differently."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.compare.comparison import Amount, Comparison
from advisor.core import text as t
from advisor.core.report import Report, ServingPhase

PHASES, PARTS = "phases", "parts"
PER_TOKEN = ", per token"
SOURCES = ("engine", "module calls", "vocabulary look-ups")
"""Steps that are prompts and tokens: a mean over both says nothing."""
SAME = 0.03
"""Two times per token that differ by less are called the same."""


def phase_amounts(before: Report, after: Report) -> Iterator[Amount]:
    """Time per token, per step and busy share of each phase that both have; then device time of
    each part of a layer, per token where both sides know how many there are, else per step."""
    sides = [
        {} if report.serving is None else {phase.name: phase for phase in report.serving.phases}
        for report in (before, after)
    ]
    for name in [name for name in sides[0] if name in sides[1]]:
        pair = [side[name] for side in sides]
        yield _amount(f"{name}{PER_TOKEN}", "ns", [phase.ns_per_token for phase in pair])
        yield _amount(f"{name}, per step", "ns", [phase.ns for phase in pair])
        yield _amount(f"{name}, GPU busy", "share", [phase.busy_share for phase in pair])
        yield from _parts(name, pair)


def _parts(name: str, pair: list[ServingPhase]) -> Iterator[Amount]:
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


def _amount(name: str, unit: str, values: list[float | None], group: str = PHASES) -> Amount:
    return Amount(group=group, name=name, unit=unit, before=values[0], after=values[1])


def phase_verdict(comparison: Comparison) -> str:
    """``decode takes 12% less time per token: 336 → 296 µs``, for each phase; empty: none is on
    both sides with its tokens, or others than these are the steps."""
    sentences: list[str] = []
    if not {comparison.before.step_source, comparison.after.step_source} <= {*SOURCES}:
        return ""
    for amount in comparison.amounts:
        if amount.group != PHASES or not amount.name.endswith(PER_TOKEN):
            continue
        if not amount.before or amount.after is None:
            continue
        share = amount.after / amount.before - 1
        change = f"{t.format_share(abs(share))} {'more' if share > 0 else 'less'}"
        how = "the same time" if abs(share) < SAME else f"{change} time"
        pair = f"{t.format_duration(amount.before)} → {t.format_duration(amount.after)}"
        sentences.append(f"{amount.name.removesuffix(PER_TOKEN)} takes {how} per token: {pair}")
    text = "; ".join(sentences)
    return text[:1].upper() + text[1:]
