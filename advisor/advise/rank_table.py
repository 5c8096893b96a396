"""The ranks of a run side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.advise.headline import step_time
from advisor.core.report import RankLine, Ranks

if TYPE_CHECKING:
    from advisor.measure import Analysis


def ranks_view(analyses: dict[int, Analysis]) -> Ranks | None:
    """Ranks side by side; ``None`` for one rank."""
    if len(analyses) < 2:
        return None
    from advisor.measure.ranks.ranks import align, skew

    lines = {}
    for number, a in analyses.items():
        device = a.device_id is not None
        totals = a.breakdown.totals() if device else {}
        lines[number] = RankLine(
            rank=number,
            step_ns=own.ns if (own := step_time(a)) is not None else a.step_ns,
            busy_share=a.breakdown.busy.total / max(a.span_ns, 1) if device else None,
            communication_ns=totals["communication"] / a.step_count if device else None,
            idle_ns=totals["idle"] / a.step_count if device else None,
        )
    traced = {number: a for number, a in analyses.items() if not a.record_only}
    if len(traced) < 2:
        note = "Skew between ranks is not measured: fewer than two of them were profiled."
        return Ranks(lines=list(lines.values()), aligned=False, alignment_error_ns=None, note=note)
    alignment = align(traced)
    if alignment.error_ns is None:
        note = f"Skew between ranks is not measured: {alignment.reason}."
        return Ranks(lines=list(lines.values()), aligned=False, alignment_error_ns=None, note=note)
    table = skew(traced, alignment).stragglers
    for number, last, wait in table.select("rank", "last_share", "caused_wait_ns").iter_rows():
        lines[number].last_share = last
        lines[number].caused_wait_ns = wait
    note = (
        f"Ranks put on one clock by the ends of {alignment.matched} matched collectives, "
        f"to within {alignment.error_ns / 1e3:.0f} µs. 'Comes last': share of them; 'others wait': "
        "mean wait that it causes a peer in them a step, hidden under compute or not."
    )
    return Ranks(
        lines=list(lines.values()), aligned=True, alignment_error_ns=alignment.error_ns, note=note
    )
