"""Documents of ``advisor project`` and ``advisor fit``: a step on other GPUs or another number of
GPUs, and whether a program fits in a GPU's memory."""

from collections.abc import Sequence
from typing import Final

from advisor.advise.memory_fit import (
    CUDA_CONTEXT_BYTES,
    MARGIN_SHARE,
    CostedChange,
    MemoryFit,
    RepeatedLayer,
)
from advisor.advise.program_wording import how_to_record
from advisor.core import labels
from advisor.core import text as t
from advisor.core.memory_changes import advise_change
from advisor.core.prices import format_money
from advisor.render import document as d
from advisor.render.documents.whatif import notes
from advisor.replay.project.project import (
    RESTS_ON,
    ProjectedMemory,
    Projection,
    Projector,
    TargetGpu,
    describe_cheapest,
)
from advisor.replay.project.splits import Split

LIMITS: Final = {
    "compute": "bound by arithmetic", "memory": "bound by memory",
    "mixture": "matrix products, shapes not known", "unknown": "kernels of no known kind",
    "launch": "no longer than the shortest kernel", "copy": "copies from and to the host",
    "link": "between GPUs", "unchanged": "other, taken to stay",
}  # fmt: skip


def build(
    projector: Projector,
    targets: tuple[TargetGpu, ...],
    remarks: Sequence[str],
    currency: str,
    epoch: float | None,
) -> d.Document:
    """Build the step on each GPU. For a single GPU, also build its parts."""
    a = projector.a
    per = "of the recording" if a.per == "recording" else "per step"
    paid = any(choice.price is not None for choice in targets)
    fields = [
        d.TextField(
            "measured", [f"{t.format_duration(a.step_ns)} {per}", projector.recorded_gpu.name]
        )
    ]
    blocks: list[d.Block] = [_build_choices(targets, currency, epoch, paid=paid)]
    if len(targets) == 1:
        p, record = targets[0].projection, how_to_record("profile_memory=True", a.trace.meta)
        fields.append(d.TextField("memory", _describe_memory(p.fit, record)))
        blocks += _build_parts(p)
    remarks = [*remarks]
    if epoch is not None and paid:
        remarks.append(f"an epoch has {epoch:,.0f} recorded steps")
    if paid:
        small = [c for c in targets if c.projection.fit.verdict == "too small"]
        remarks += [f"{c.projection.gpu}: too little memory" for c in small]
        if all(c.projection.fit.verdict == "not measured" for c in targets):
            remarks.append("memory was not recorded, so whether the step fits is not known")
    remarks += _merge_notes(targets)
    refused = [choice.projection for choice in targets if choice.projection.refused]
    remarks += [f"{p.gpu}: {p.refused}" for p in refused]
    host = "hosts of other machines lie in it too (--same-host: this one)"
    if projector.same_host:
        host = "host time is taken as measured (--same-host)"
    remarks += [f"{RESTS_ON}; {host}"]
    blocks = [d.FieldList(fields, indent=0), *blocks, notes(remarks)]
    return d.Document(_write_headline(targets, per), blocks, name="project")


def _merge_notes(targets: tuple[TargetGpu, ...]) -> list[str]:
    """Return the notes of all GPUs. Notes that only differ in the GPU are merged."""
    named: dict[str, list[str]] = {}
    for p in (choice.projection for choice in targets):
        for note in p.notes:
            named.setdefault(note.replace(p.gpu, GPU), []).append(p.gpu)
    return [
        note.replace(GPU, t.list_names(of) if len(of) < MIN_EQUAL else f"{len(of)} of these GPUs")
        for note, of in named.items()
    ]


def _write_headline(targets: tuple[TargetGpu, ...], per: str) -> str:
    if best := describe_cheapest(targets):
        return f"{t.upper_first(best)}."
    if len(targets) > 1:
        return f"The step on each of {len(targets)} GPU models."
    p = targets[0].projection
    if p.refused:
        return f"{p.gpu} cannot run it: {p.refused}."
    return (
        f"{p.gpu}: {t.format_duration(p.step_ns)} {per} ({t.format_range(p.low_ns, p.high_ns)}), "
        f"{t.format_speedup(p.speedup)}."
    )


GPU = "\0"
"""Placeholder for a GPU's name in a note."""
MIN_EQUAL = 8
"""Minimum number of GPUs with the same figures or note that are counted instead of named."""


def _build_choices(
    targets: tuple[TargetGpu, ...], currency: str, epoch: float | None, *, paid: bool
) -> d.Grid:
    """Build a table with one row per GPU, and its cost if there are prices. Many GPUs with the same
    figures share a row."""
    equal: dict[tuple[str, ...], list[str]] = {}
    for choice in targets:
        p = choice.projection
        times = [t.EMPTY_CELL, t.EMPTY_CELL, t.EMPTY_CELL]
        if not p.refused:
            spread = t.format_range(p.low_ns, p.high_ns)
            times = [t.format_duration(p.step_ns), spread, _format_speedup(p.speedup)]
        cost = choice.cost if epoch is None else choice.epoch_cost
        price = ["no price" if cost is None else f"{cost:,.2f}"] if paid else []
        equal.setdefault((*times, *price, p.fit.verdict), []).append(p.gpu)
    rows = []
    for cells, names in equal.items():
        many = len(names) >= MIN_EQUAL
        model_names = [f"{len(names)} models, as {names[0]}"] if many else names
        rows += [[name, *cells] for name in model_names]
    what = f"{currency} {'a million' if epoch is None else 'an epoch'}"
    head = ["GPU", "step", "range", "speed", *([what] if paid else []), "memory"]
    optional = (len(head) - 1,) if paid else ()
    align = "l" + "r" * (len(head) - 2) + "l"
    return d.Grid(head, rows, "The step there", align, optional=optional)


def _format_speedup(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def _build_parts(p: Projection) -> list[d.Block]:
    """Build a table of device work by its limit, on both GPUs."""
    if p.refused:
        return []
    rows = [
        [LIMITS[part.kind], t.format_duration(part.ns), t.format_duration(part.then_ns)]
        for part in p.parts
    ]
    return [d.Grid(["limit", "here", "there"], rows, "Device work by what limits it")]


def _describe_memory(fit: ProjectedMemory, record: str) -> list[str]:
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
) -> d.Document:
    """Build splits of the job over other numbers of GPUs. ``measured``: the recorded mesh."""
    able = [row for row in rows if row.step_ns is not None]
    cells = [
        [
            row.mesh,
            f"{row.gpus:,}",
            t.format_duration(row.step_ns),
            t.format_range(row.low_ns or 0.0, row.high_ns or 0.0),
            t.format_duration(row.exposed_ns),
            f"{row.speed or 0.0:.2f}×",
            t.EMPTY_CELL if row.cost is None else format_money(row.cost, currency),
        ]
        for row in able
    ]
    head = ["mesh", "GPUs", "step", "range", "exposed", "speed", "cost"]
    refused = [f"{row.mesh} on {row.gpus:,} GPUs: {row.refused}." for row in rows
               if row.step_ns is None]  # fmt: skip
    blocks: list[d.Block] = (
        [d.Grid(head, cells, "Splits of the job", optional=(6,))] if cells else []
    )
    blocks += [d.Items(refused, "∙", "Not projected")] if refused else []
    blocks.append(notes(remarks))
    recorded = f"Recorded: {measured}, {t.format_duration(step_ns)} per step."
    return d.Document(recorded, blocks, name="splits")


_MAX_LAYERS = 12
SIMILAR_LAYER_SHARE = 0.05
"""Maximum relative difference of layers in one row of a table."""


def build_fit(fit: MemoryFit, *, gpu: str, batch: str, request: int = 0) -> d.Document:
    """Build the document of a fit. ``gpu``, ``batch``: as requested, or empty. ``request``: bytes
    of the failed request, which the peak includes, or 0."""
    name = gpu or t.format_bytes(fit.capacity)
    context = t.format_bytes(CUDA_CONTEXT_BYTES)
    reserved = fit.capacity - CUDA_CONTEXT_BYTES - fit.available
    rest = [f"{context} for the CUDA context"]
    if reserved > 0:
        rest.insert(0, f"up to {t.format_bytes(reserved)} for the driver")
    failed = f", the request of {t.format_bytes(request)} that failed included" if request else ""
    fields = [
        d.TextField("needs", [f"{t.format_bytes(fit.peak)} in tensors{failed}",
                            f"{t.format_bytes(fit.reserved)} reserved", batch]),
        d.TextField("there is", [t.format_bytes(fit.capacity), *rest]),
    ]  # fmt: skip
    if fit.phases is not None:
        fields.append(d.TextField("step", _describe_phases(fit)))
    blocks: list[d.Block] = [d.FieldList(fields)]
    if fit.chosen:
        known = all(way.ns is not None for way in fit.chosen)
        title = "Changes that add least time" if known else "Changes with which it fits"
        blocks.append(_fit_table(title, fit.chosen))
        for way in fit.chosen:
            text, code = advise_change(way.change.name, fit.trains)
            blocks += [
                d.Paragraph(f"{text}{_name_place(way)}: {way.change.assumes}."),
                d.Code(code),
            ]
    blocks += [_build_layers(way.layers) for way in fit.candidates if way.layers]
    names = {way.change.name for way in fit.chosen}
    least = _MIN_FREED_SHARE * fit.peak
    others = [way for way in fit.candidates if way.bytes > least and way.change.name not in names]
    if others:
        title = "Other changes, each alone" if fit.chosen else "Changes, each alone"
        blocks.append(_fit_table(title, others))
    choices = [*fit.chosen, *others]
    if fit.phases is None and any(way.ns is None for way in choices):
        rated = (
            "; others are by the GPU's rated bandwidths" if any(way.ns for way in choices) else ""
        )
        text = (
            f"Times that need a trace are unknown{rated}. Give a trace and "
            "--memory-snapshot SNAPSHOT."
        )
        blocks.append(d.Paragraph(text, indent=0))
    status = "bad" if not fit.fits else "limited" if fit.barely else "healthy"
    return d.Document(_write_fit_headline(fit, name), blocks, name="fit", status=status)


_MIN_FREED_SHARE: Final = 0.01
"""Minimum share of the peak that a listed change frees."""


def _fit_table(title: str, ways: list[CostedChange]) -> d.Grid:
    head = ["change", "frees", "adds per step"]
    return d.Grid(
        head, [_build_row(way) for way in ways], title, below=[way.cost_reason for way in ways]
    )


def _build_layers(layers: tuple[RepeatedLayer, ...]) -> d.Grid:
    """Build a table of the bytes and the cost of each layer. Equal adjacent layers share a row."""
    rows: list[list[str]] = []
    start = 0
    for number, layer in enumerate(layers, start=1):
        if number < len(layers) and _is_similar(layer, layers[number]):
            continue
        name = str(start + 1) if number == start + 1 else f"{start + 1}-{number}, each"
        again = "unknown" if layer.ns is None else t.format_duration(layer.ns)
        rows.append([name, t.format_bytes(layer.bytes), again])
        start = number
    head = ["call", "frees at the peak", "forward again"]
    more = t.count_noun(len(rows) - _MAX_LAYERS, "more row")
    return d.Grid(head, rows, "Checkpointing, by layer", short=rows[:_MAX_LAYERS],
                omitted_note=f"{more}: --format json has all")  # fmt: skip


def _is_similar(one: RepeatedLayer, other: RepeatedLayer) -> bool:
    if (one.ns is None) != (other.ns is None):
        return False
    ns = abs((one.ns or 0.0) - (other.ns or 0.0)) <= SIMILAR_LAYER_SHARE * max(
        one.ns or 0.0, other.ns or 0.0
    )
    return ns and abs(one.bytes - other.bytes) <= SIMILAR_LAYER_SHARE * max(one.bytes, other.bytes)


def _write_fit_headline(fit: MemoryFit, name: str) -> str:
    left = t.format_bytes(abs(fit.available - fit.reserved_after))
    if not fit.fits:
        return f"It does not fit {name}: with the best set of changes, {left} are missing."
    how = f"It fits {name}"
    if fit.barely:
        share = t.format_share((fit.available - fit.reserved_after) / fit.reserved_after)
        margin = t.format_bytes(MARGIN_SHARE * fit.reserved_after)
        left += (
            f" left ({share}), and fragmentation can take {margin} ({t.format_share(MARGIN_SHARE)})"
        )
    else:
        left += " left"
    risk = ", but may run out of memory" if fit.barely else ""
    more = "" if fit.barely else _describe_largest_batch(fit)
    if not fit.chosen:
        return f"{how}, with {left}.{more}" if not fit.barely else f"{how}{risk}: {left}."
    how += f" with {t.count_noun(len(fit.chosen), 'change')}"
    known = all(way.ns is not None for way in fit.chosen)
    cost = sum(way.ns or 0.0 for way in fit.chosen)
    price = "" if known else " The time that they add is not measured."
    if known and cost:
        how += f", about {t.format_duration(cost)} more per step"
    unchanged = ""
    if fit.reserved <= fit.available and not fit.barely:
        short = t.format_bytes(fit.available - fit.reserved)
        unchanged = f" Without changes, {short} is left."
    return f"{how}{risk}: {left}.{price}{unchanged}{more}"


def _describe_largest_batch(fit: MemoryFit) -> str:
    """Say how large a batch fits with a margin. Never rounded up."""
    if fit.largest_batch <= 0:
        return ""
    if any(way.change.name == "half the batch" for way in fit.chosen):
        part = int(fit.largest_batch * 100) / 100
        if part < 1:
            return f" Without accumulation, at most {part:.0%} of the recorded batch fits."
    if fit.largest_batch >= MAX_SHOWN_FACTOR:
        return f" More than {MAX_SHOWN_FACTOR} times the recorded batch fits."
    times = int(fit.largest_batch * 10) / 10
    if times <= 1:
        return " No larger batch fits."
    return f" Up to {times:g} times the recorded batch fits."


MAX_SHOWN_FACTOR: Final = 60
"""Maximum factor of the batch that is shown."""


def _describe_phases(fit: MemoryFit) -> list[str]:
    phases = fit.phases
    assert phases is not None
    named = [("forward", phases.forward), ("backward", phases.backward),
             ("optimizer", phases.optimizer)]  # fmt: skip
    parts = [f"{name} {t.format_duration(ns)}" for name, ns in named if ns > 0]
    return [t.format_duration(phases.step), *parts]


def _build_row(way: CostedChange) -> list[str]:
    cost = "unknown" if way.ns is None else t.format_duration(way.ns) if way.ns else "nothing"
    return [way.change.name, t.format_bytes(way.bytes), cost]


def _name_place(way: CostedChange) -> str:
    where = way.change.where
    if where is None or where.file is None:
        return ""
    return f" ({t.shorten_path(labels.clean(where.file).replace(chr(92), '/'), 40)}:{where.line})"
