"""Whether a program fits a GPU: the document of ``advisor fit``."""

from __future__ import annotations

from advisor.advise.memory_fit import CUDA_CONTEXT_BYTES, CostedChange, MemoryFit, RepeatedLayer
from advisor.core import labels
from advisor.core import text as t
from advisor.render.document import Block, Code, Document, FieldList, Grid, Paragraph, TextField
from advisor.rules.memory.out_of_memory import describe_change

MAX_LAYERS = 12
SIMILAR_LAYER_SHARE = 0.05
"""Share by which layers in one row of a table may differ."""


def build(fit: MemoryFit, *, gpu: str, batch: str) -> Document:
    """``gpu`` and ``batch``: what was asked for, in words; empty: nothing."""
    name = gpu or t.format_bytes(fit.capacity)
    context = t.format_bytes(CUDA_CONTEXT_BYTES)
    room = f"{t.format_bytes(fit.capacity)}, {context} of it for the CUDA context"
    fields = [
        TextField("needs", [f"{t.format_bytes(fit.peak)} in tensors",
                            f"{t.format_bytes(fit.reserved)} reserved", batch]),
        TextField("there is", [room]),
    ]  # fmt: skip
    if fit.phases is not None:
        fields.append(TextField("step", _phases(fit)))
    blocks: list[Block] = [FieldList(fields)]
    if fit.chosen:
        blocks.append(_table("The cheapest changes with which it fits", fit.chosen))
        for way in fit.chosen:
            text, code = describe_change(way.change.change)
            blocks += [Paragraph(f"{text}{_place(way)}: {way.change.assumes}."), Code(code)]
    blocks += [_layers(way.layers) for way in fit.ways if way.layers]
    names = {way.change.change for way in fit.chosen}
    others = [way for way in fit.ways if way.bytes > 0 and way.change.change not in names]
    if others:
        title = "Other changes, each alone" if fit.chosen else "Changes, each alone"
        blocks.append(_table(title, others))
    if fit.phases is None:
        blocks.append(Paragraph("No trace was given, so times are unknown.", indent=0))
    return Document(_headline(fit, name), blocks, name="fit",
                    status="healthy" if fit.fits else "bad")  # fmt: skip


def _table(title: str, ways: list[CostedChange]) -> Grid:
    head = ["change", "frees", "adds per step"]
    return Grid(head, [_row(way) for way in ways], title, below=[way.why for way in ways])


def _layers(layers: tuple[RepeatedLayer, ...]) -> Grid:
    """What each layer holds and costs; neighbours that are the same share a row."""
    rows: list[list[str]] = []
    begin = 0
    for number, layer in enumerate(layers, start=1):
        if number < len(layers) and _similar(layer, layers[number]):
            continue
        name = str(begin + 1) if number == begin + 1 else f"{begin + 1}-{number}, each"
        again = "unknown" if layer.ns is None else t.format_duration(layer.ns)
        rows.append([name, t.format_bytes(layer.bytes), again])
        begin = number
    head = ["call", "frees at the peak", "forward again"]
    more = t.count_noun(len(rows) - MAX_LAYERS, "more row")
    return Grid(head, rows, "Checkpointing, by layer", short=rows[:MAX_LAYERS],
                more=f"{more}: --format json has all")  # fmt: skip


def _similar(one: RepeatedLayer, other: RepeatedLayer) -> bool:
    if (one.ns is None) != (other.ns is None):
        return False
    ns = abs((one.ns or 0.0) - (other.ns or 0.0)) <= SIMILAR_LAYER_SHARE * max(
        one.ns or 0.0, other.ns or 0.0
    )
    return ns and abs(one.bytes - other.bytes) <= SIMILAR_LAYER_SHARE * max(one.bytes, other.bytes)


def _headline(fit: MemoryFit, name: str) -> str:
    left = t.format_bytes(abs(fit.available - fit.after))
    more = ""
    if fit.fits and fit.largest_batch > 0:
        times = f"{fit.largest_batch:.1f}" if fit.largest_batch < 60 else "more than 60"
        more = f" Up to {times} times the recorded batch fits."
    if fit.fits and not fit.chosen:
        return f"It fits {name}, with {left} left.{more}"
    if fit.fits:
        cost = sum(way.ns or 0.0 for way in fit.chosen)
        known = all(way.ns is not None for way in fit.chosen)
        price = f"about {t.format_duration(cost)} more per step" if known else "at unknown cost"
        count = t.count_noun(len(fit.chosen), "change")
        return f"It fits {name} with {count}, {price}: {left} left.{more}"
    return f"It does not fit {name}: with the best set of changes, {left} are missing."


def _phases(fit: MemoryFit) -> list[str]:
    phases = fit.phases
    assert phases is not None
    named = [("forward", phases.forward), ("backward", phases.backward),
             ("optimizer", phases.optimizer)]  # fmt: skip
    shown = [f"{name} {t.format_duration(ns)}" for name, ns in named if ns > 0]
    return [t.format_duration(phases.step), *shown]


def _row(way: CostedChange) -> list[str]:
    cost = "unknown" if way.ns is None else t.format_duration(way.ns) if way.ns else "nothing"
    return [way.change.change, t.format_bytes(way.bytes), cost]


def _place(way: CostedChange) -> str:
    where = way.change.where
    if where is None or where.file is None:
        return ""
    return f" ({t.shorten_path(labels.clean(where.file).replace(chr(92), '/'), 40)}:{where.line})"
