"""The documents of ``advisor project``: a step on other GPUs, and on other numbers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from advisor.advise.terms import how_to_record
from advisor.core import text as t
from advisor.core.prices import format_money
from advisor.render.document import Block, Document, FieldList, Grid, Items, TextField
from advisor.render.documents.whatif import notes
from advisor.replay.project.project import (
    RESTS_ON,
    Choice,
    ProjectedMemory,
    Projection,
    Projector,
    describe_cheapest,
)
from advisor.replay.project.splits import Split

LIMITS: Final = {
    "compute": "bound by arithmetic",
    "memory": "bound by memory",
    "mixture": "matrix products, shapes not known",
    "unknown": "kernels of no known kind",
    "launch": "no longer than the shortest kernel",
    "copy": "copies from and to the host",
    "link": "between GPUs",
    "unchanged": "other, taken to stay",
}


def build(
    projector: Projector,
    found: tuple[Choice, ...],
    remarks: Sequence[str],
    currency: str,
    epoch: float | None,
) -> Document:
    """The step on each GPU; of one, what its parts take there too."""
    a = projector.a
    per = "of the recording" if a.per == "recording" else "per step"
    paid = any(choice.price is not None for choice in found)
    fields = [
        TextField("measured", [f"{t.format_duration(a.step_ns)} {per}", projector.source.name])
    ]
    blocks: list[Block] = [_choices(found, currency, epoch, paid=paid)]
    if len(found) == 1:
        p, record = found[0].projection, how_to_record("profile_memory=True", a.trace.meta)
        fields.append(TextField("memory", _memory(p.fit, record)))
        blocks += _parts(p)
    remarks = [*remarks]
    if epoch is not None:
        remarks.append(f"an epoch has {epoch:,.0f} recorded steps")
    if paid:
        small = [c for c in found if c.projection.fit.verdict == "too small"]
        remarks += [f"{c.projection.gpu}: too little memory" for c in small]
        if all(c.projection.fit.verdict == "not measured" for c in found):
            remarks.append("memory was not recorded, so whether the step fits is not known")
    remarks += dict.fromkeys(note for choice in found for note in choice.projection.notes)
    refused = [choice.projection for choice in found if choice.projection.refused]
    remarks += [f"{p.gpu}: {p.refused}" for p in refused]
    host = "hosts of other machines lie in it too (--same-host: this one)"
    if projector.same_host:
        host = "host time is taken as measured (--same-host)"
    remarks += [f"{RESTS_ON}; {host}. See docs/project.md"]
    blocks = [FieldList(fields, indent=0), *blocks, notes(remarks)]
    return Document(_headline(found, per), blocks, name="project")


def _headline(found: tuple[Choice, ...], per: str) -> str:
    if best := describe_cheapest(found):
        return f"{best[:1].upper()}{best[1:]}."
    if len(found) > 1:
        return f"The step on {len(found)} GPUs."
    p = found[0].projection
    if p.refused:
        return f"{p.gpu} cannot run it: {p.refused}."
    return (
        f"{p.gpu}: {t.format_duration(p.step_ns)} {per} ({t.format_range(p.low_ns, p.high_ns)}), "
        f"{_times(p.speedup)} as fast."
    )


def _choices(found: tuple[Choice, ...], currency: str, epoch: float | None, *, paid: bool) -> Grid:
    """A row a GPU, with its cost where there are prices."""
    rows = []
    for choice in found:
        p = choice.projection
        times = ["–", "–", "–"]
        if not p.refused:
            spread = t.format_range(p.low_ns, p.high_ns)
            times = [t.format_duration(p.step_ns), spread, _times(p.speedup)]
        cost = choice.cost if epoch is None else choice.epoch_cost
        price = ["no price" if cost is None else f"{cost:,.2f}"] if paid else []
        rows.append([p.gpu, *times, *price, p.fit.verdict])
    what = f"{currency} {'a million' if epoch is None else 'an epoch'}"
    head = ["GPU", "step", "range", "speed", *([what] if paid else []), "memory"]
    optional = (len(head) - 1,) if paid else ()
    align = "l" + "r" * (len(head) - 2) + "l"
    return Grid(head, rows, "The step there", align, optional=optional)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def _parts(p: Projection) -> list[Block]:
    """What moves by what."""
    if p.refused:
        return []
    rows = [
        [LIMITS[part.kind], t.format_duration(part.ns), t.format_duration(part.then_ns)]
        for part in p.parts
    ]
    return [Grid(["limit", "here", "there"], rows, "Device work by what limits it")]


def _memory(fit: ProjectedMemory, record: str) -> list[str]:
    room = t.format_bytes(fit.capacity)
    if fit.verdict == "not measured":
        return ["not measured", f"the GPU has {room}", f"record with {record}" if record else ""]
    sizes = [
        f"{t.format_bytes(size)} {word}"
        for size, word in ((fit.allocated, "allocated"), (fit.reserved, "reserved"))
        if size is not None
    ]
    return [fit.verdict, f"{', '.join(sizes)} of {room}"]


def build_splits(
    measured: str, step_ns: float, rows: Sequence[Split], remarks: Sequence[str], currency: str
) -> Document:
    """Splits of the job over other numbers of GPUs. ``measured``: the recorded mesh."""
    able = [row for row in rows if row.step_ns is not None]
    cells = [
        [
            row.mesh,
            f"{row.gpus:,}",
            t.format_duration(row.step_ns),
            t.format_range(row.low_ns or 0.0, row.high_ns or 0.0),
            t.format_duration(row.exposed_ns),
            f"{row.speed or 0.0:.2f}×",
            "–" if row.cost is None else format_money(row.cost, currency),
        ]
        for row in able
    ]
    head = ["mesh", "GPUs", "step", "range", "exposed", "speed", "cost"]
    refused = [f"{row.mesh} on {row.gpus:,} GPUs: {row.refused}." for row in rows
               if row.step_ns is None]  # fmt: skip
    blocks: list[Block] = [Grid(head, cells, "Splits of the job", optional=(6,))] if cells else []
    blocks += [Items(refused, "∙", "Not projected")] if refused else []
    blocks.append(notes(remarks))
    recorded = f"Recorded: {measured}, {t.format_duration(step_ns)} per step."
    return Document(recorded, blocks, name="splits")
