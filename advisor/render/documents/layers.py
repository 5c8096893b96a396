"""Documents of ``advisor analyze --by layer``, time by module as a tree and by kind, and of ``--by
operator``, operators by shape."""

from dataclasses import replace
from typing import Final

from advisor.core import labels
from advisor.core import text as t
from advisor.core.layers import Layer, LayerOutlier, Layers
from advisor.core.report import Report
from advisor.core.report_kernels import AttainableRate, OperatorRate
from advisor.core.rule import Per
from advisor.core.trace import CUDA, JAX, TENSORFLOW
from advisor.render import document as d
from advisor.render.documents import memory

_MAX_ROWS: Final = 30
_MAX_KINDS: Final = 10
_MAX_DEPTH: Final = 6
"""Maximum depth of nested modules in the tree."""


def build(report: Report, options: d.RenderOptions = d.DEFAULT) -> d.Document:
    """Build a tree of the ``top`` longest groups of equal modules, then the kinds of modules."""
    layers = report.layers
    memory_blocks = _build_memory(report, options.top)
    if layers is None:
        what = "" if memory_blocks else _explain_missing_layers(report)
        return d.Document(what, memory_blocks, name="layers", style="")
    blocks = sections(layers, report.per, report.scope.steps_used, options.top)
    blocks += memory_blocks if report.memory and report.memory[0].source != "trace" else []
    return d.Document("", blocks, name="layers")


def _build_memory(report: Report, top: int | None) -> list[d.Section]:
    """Build the memory of the fullest device by module, from the stacks of a snapshot."""
    if not report.memory or not report.memory[0].modules:
        return []
    view = report.memory[0]
    when = "when it ran out" if view.at == "out of memory" else f"at its {view.at}"
    table = memory.modules(view, _MAX_ROWS if top is None else top)
    name = f"GPU {view.device}" if view.device >= 0 else "the host"
    note = "Modules that are called from the same line are one."
    return [
        d.Section(
            f"Memory of {name} by module, {when}",
            [replace(table, title=""), d.Paragraph(note, "soft", indent=0)],
        )
    ]


def sections(layers: Layers, per: Per, steps: int, top: int | None = None) -> list[d.Section]:
    """Build the tree, the kinds, and modules that take longer than equal ones. ``steps``: number of
    measured steps."""
    most = _MAX_ROWS if top is None else top
    what = "GPU time" if layers.on_device else "Host time of operators"
    outliers = [_describe_outlier(each, steps) for each in layers.outliers]
    blocks = [
        d.Section(f"{what} by layer, {t.format_per(per)}", _build_tree(layers, most)),
        d.Section(
            "By kind of module", [_build_kinds(layers, most)], "own: outside the modules inside it"
        ),
    ]
    if outliers:
        blocks.append(d.Section("Longer than their equals", [d.Items(outliers, "∙")]))
    return blocks


def _build_tree(layers: Layers, limit: int) -> list[d.Block]:
    depth: list[int] = []
    for layer in layers.layers:
        depth.append(0 if layer.parent is None else depth[layer.parent] + 1)
    order = sorted(range(len(depth)), key=lambda place: (-layers.layers[place].ns, place))
    positions = sorted([place for place in order if depth[place] < _MAX_DEPTH][:limit])
    rows = [_build_row(layers.layers[place], depth[place]) for place in positions]
    rows.append(_build_outside_row(layers))
    columns = range(len(_HEAD))
    used_columns = [n for n in columns if n < _FIXED or any(row[n] != t.EMPTY_CELL for row in rows)]
    table = d.Grid(
        [_HEAD[n] for n in used_columns],
        [[row[n] for n in used_columns] for row in rows],
        optional=[
            used_columns.index(n) for n in (_FLOPS, _BYTES, _BYTES_PER_S) if n in used_columns
        ],
    )
    notes = ["×: equal modules, summed. The time of a module contains those inside it."]
    if any(layer.flops_per_s or layer.bytes_per_s for layer in layers.layers):
        notes.append("Rates are over all time of a module.")
    notes.append(_explain_memory(layers))
    hidden = len(depth) - len(positions) + layers.more
    if hidden:
        notes.append(f"{t.count_noun(hidden, 'smaller or deeper group')} not shown.")
    return [table, d.Paragraph(" ".join(notes), "soft", indent=0)]


_HEAD: Final = (
    "layer", "calls", "time", "share", "FLOPs", "bytes", "TFLOP/s", "GB/s", "kept", "peak",
)  # fmt: skip
_FIXED, _FLOPS, _BYTES, _BYTES_PER_S = 4, 4, 5, 7


def _build_row(layer: Layer, depth: int) -> list[d.Inline]:
    name = "  " * depth + layer.name
    if layer.modules > 1 and "–" not in layer.name:
        name += f" ×{layer.modules}"
    return [
        name, t.format_cell(layer.calls, t.format_count), t.format_duration(layer.ns),
        t.format_share(layer.share), t.format_cell(layer.flops, _format_flops),
        t.format_cell(layer.bytes, t.format_bytes), _format_rate(layer.flops_per_s, 1e12),
        _format_rate(layer.bytes_per_s, 1e9), t.format_cell(layer.kept_bytes, t.format_bytes),
        t.format_cell(layer.peak_bytes, t.format_bytes),
    ]  # fmt: skip


def _format_rate(per_second: float | None, unit: float) -> str:
    if per_second is None:
        return t.EMPTY_CELL
    return "<0.01" if per_second < 0.01 * unit else t.format_number(per_second / unit)


def _build_outside_row(layers: Layers) -> list[d.Inline]:
    share = layers.outside_ns / layers.total_ns if layers.total_ns else 0.0
    cells = [t.format_duration(layers.outside_ns), t.format_share(share)]
    rest = [t.EMPTY_CELL] * (len(_HEAD) - 2 - len(cells))
    return [d.Span("outside modules", "soft"), t.EMPTY_CELL, *cells, *rest]


def _format_flops(flops: float) -> str:
    for letter, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= 0.1 * scale:
            return f"{t.format_number(flops / scale)} {letter}"
    return f"{t.format_number(flops / 1e6)} M"


def _explain_memory(layers: Layers) -> str:
    """Explain the columns of memory, or say that memory was not recorded."""
    if all(layer.kept_bytes is None for layer in layers.layers):
        return "Memory by layer was not recorded."
    peak = any(layer.peak_bytes is not None for layer in layers.layers)
    most = "; peak: the most that one call adds" if peak else ""
    return f"kept: memory that the calls allocate and do not release{most}."


def _build_kinds(layers: Layers, limit: int) -> d.Grid:
    rows: list[list[d.Inline]] = [
        [
            row.kind,
            t.format_count(row.modules),
            t.format_cell(row.calls, t.format_count),
            t.format_duration(row.ns),
            t.format_duration(row.self_ns),
            t.format_share(row.share),
            t.format_cell(row.kept_bytes, t.format_bytes),
            t.format_cell(row.peak_bytes, t.format_bytes),
        ]
        for row in layers.kinds[: min(limit, _MAX_KINDS)]
    ]
    head = ["kind", "modules", "calls", "time", "own time", "own share", "kept", "peak"]
    known = len(head) if any(row.kept_bytes is not None for row in layers.kinds) else -2
    return d.Grid(head[:known], [row[:known] for row in rows], optional=[1])


def _describe_outlier(outlier: LayerOutlier, steps: int) -> str:
    more = t.format_share(outlier.ns / outlier.usual_ns - 1)
    time = f"{t.format_duration(outlier.ns)}, {more} longer than its equals"
    part = f"; most of it in {labels.clean(outlier.part)}" if outlier.part else ""
    seen = "in the one step that was measured" if steps <= 1 else f"median of {steps} steps"
    return (
        f"{labels.clean(outlier.name)} takes {time} in {labels.clean(outlier.equals)} "
        f"({t.format_duration(outlier.usual_ns)}){part}: {seen}."
    )


def _explain_missing_layers(report: Report) -> str:
    framework = report.scope.framework
    first = report.inputs[0] if report.inputs else None
    lead = "No layers were recorded. "
    if framework in (JAX, TENSORFLOW):
        return f"{lead}Name scopes (jax.named_scope, tf.name_scope), and record the operators too."
    if first is not None and first.format not in (None, "kineto"):
        torch = "" if framework == CUDA else ", or use PyTorch's profiler with with_stack=True"
        return f"{lead}Put an NVTX or ROCTX range named layers.<number> around each layer{torch}."
    if first is not None and first.with_stack:
        return "No layers were recorded: the stacks show no call of a torch.nn.Module."
    return f"{lead}Record stacks (with_stack=True): the profiler then records the calls of modules."


MAX_OPERATOR_ROWS: Final = 20
_COLUMNS: Final = ("operator", "time", "calls", "reached", "attains", "of it", "saves", "bound")
_LEGEND: Final = (
    "reached, attains: of the rate that limits it. of it: time at that rate over time taken "
    "(above 100% from caches). saves: what the attainable rate would save. launch: starting "
    "the kernel takes longer than its work. –: unknown."
)


def build_operators(report: Report, options: d.RenderOptions = d.DEFAULT) -> d.Document:
    """Build a table of ``top`` operators, each with its shapes below it."""
    result = report.rooflines
    rows = result[: MAX_OPERATOR_ROWS if options.top is None else options.top]
    if not rows:
        text = "No kernels were recorded: what operators attain is not measured."
        return d.Document(text, [], name="operators", style="")
    which = "all" if len(rows) == len(result) else f"the {len(rows)} longest"
    below = [f"{row.dtype or ''} {row.shapes or 'shapes not recorded'}".strip() for row in rows]
    table = d.Grid(_COLUMNS, [_build_cells(row) for row in rows], below=below)
    notes = [d.Paragraph(line, "soft", indent=0) for line in _list_notes(report, rows)]
    title = f"Operators by shape, {which}, {t.format_per(report.per)}"
    return d.Document("", [d.Section(title, [table, *notes])], name="operators")


def _build_cells(row: OperatorRate) -> list[d.Inline]:
    reached, attains = _get_rates(row)
    low = row.efficiency is not None and row.efficiency < 0.5
    cells = [
        t.format_duration(row.ns),
        t.format_count(row.calls),
        reached,
        attains,
        t.format_cell(row.efficiency, t.format_share),
        t.format_cell(row.saved_ns, lambda ns: t.format_duration(ns) if ns else "0"),
        t.EMPTY_CELL if row.bound == "unknown" else row.bound,
    ]
    return [row.name or row.kernel, *(d.Span(cell, "warn" if low else "") for cell in cells)]


def _get_rates(row: OperatorRate) -> tuple[str, str]:
    """Return the reached and the attainable rate, in FLOP/s if compute-bound, else in bytes/s."""
    if row.bound == "compute":
        return _shorten_rate(row.flops_per_s, "T"), _shorten_rate(row.attainable_flops_per_s, "T")
    attains = None if row.bytes_per_s is None else row.attainable_bytes_per_s
    return _shorten_rate(row.bytes_per_s, "G"), _shorten_rate(attains, "G")


def _shorten_rate(rate: float | None, letter: str) -> str:
    if rate is None:
        return t.EMPTY_CELL
    scale, unit = (1e12, "TFLOP/s") if letter == "T" else (1e9, "GB/s")
    return f"{t.format_number(rate / scale)} {unit}"


def _list_notes(report: Report, rows: list[OperatorRate]) -> list[str]:
    notes = [_LEGEND]
    if not report.attainable:
        name = report.scope.device_name
        notes.append(
            f"advisor has no attainable rates of {labels.clean(name)}."
            if name
            else "The GPU's model was not recorded."
        )
    elif all(row.bound == "unknown" for row in rows):
        notes.append("Record with record_shapes=True: FLOPs and bytes come from the shapes.")
    return [*notes, *map(_describe_source, report.attainable)]


def _describe_source(rate: AttainableRate) -> str:
    what = "memory" if rate.of == "memory" else f"matrix products in {rate.of}"
    text = _shorten_rate(rate.rate, "G" if rate.of == "memory" else "T")
    if rate.source is None:
        return f"{what}: {text}, estimated: the peak times what other GPUs of its maker attain"
    where = f", {labels.clean(rate.url)}" if rate.url else ""
    return f"{what}: {text}, measured: {labels.clean(rate.source)}{where}"
