"""Documents of ``advisor whatif``: a step with edits, in another number format, or on another
mesh."""

from collections.abc import Sequence
from typing import Final

from advisor.advise.report_text import describe_replayed_others, path_parts
from advisor.core import text as t
from advisor.core.ranks import format_ranks
from advisor.core.report_steps import StepTime
from advisor.render import document as d
from advisor.replay.project.mesh import MeshResult
from advisor.replay.project.precision import LinearLayerGroup, PrecisionResult
from advisor.replay.what_if import EditResult, WhatIfResult

MAX_EDIT: Final = 30
"""Maximum length of an edit in the table, characters. Longer ones are listed above it."""
MAX_SHAPES: Final = 8
"""Maximum number of rows in a terminal, for layers to convert and layers to leave."""
UNSEEN_LOADER: Final = (
    "The loader's workers keep up with these steps, so how fast they could be is not in the trace: "
    "the step cannot become shorter than their time per batch."
)
RANGES: Final = (
    "Ranges are those of the replay. Past errors of estimates of the same fix widen them in the "
    "report."
)
RANGES_OF_RUN: Final = (
    "Ranges are those of the replayed window. The report also uses the run's other steps, its free "
    "cores and past errors of estimates of the same fix."
)
NO_GAIN: Final = 0.001
"""Share of the step below which an edit gains almost nothing."""
_NOUNS: Final[dict[tuple[str, ...], str]] = {
    ("kernel",): "kernel", ("memcpy",): "copy", ("memset",): "memset", ("op",): "operator",
    ("python",): "Python frame", ("annotation",): "range",
}  # fmt: skip
AXES: Final = {
    "dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"
}  # fmt: skip


def notes(lines: Sequence[str]) -> d.Items:
    """List remarks, one sentence each. Names such as ``h200`` stay unchanged."""
    shown = [
        f"{t.upper_first(line)}." if line.split(" ", 1)[0].isalpha() else f"{line}."
        for line in lines
    ]
    return d.Items(shown, "-", "Notes")


# -- edits ----------------------------------------------------------------------------------------


def build(result: WhatIfResult, lines: Sequence[str]) -> d.Document:
    """Build the step with edits. ``lines``: the edits as written."""
    apart = result.step is not None and result.step.window_differs
    per = f"per {'profiled ' * apart}step" if result.marked else "of the recording"
    step = t.format_duration(result.measured_step_ns)
    edited = t.format_duration(result.edited_step_ns)
    least = "at least " * bool(result.reason)
    path = {} if result.reason else result.critical_path
    parts = path_parts(path, result.framework)
    fields = [
        d.TextField("measured", [f"{step} {per}", *_describe_steps(result)]),
        *(
            [d.TextField("run", _describe_run(result.step))]
            if result.step is not None and apart
            else []
        ),
        d.TextField("replayed", _describe_accuracy(result)),
        d.TextField("", _describe_waits(result), detail=True),
        d.TextField(
            "path",
            ["critical path with the edits", *parts]
            if parts
            else ["the critical path is unknown: the steps are not replayed"],
        ),
    ]
    remarks = [*_explain_no_gain(result, lines, ", ".join(parts)), *result.notes]
    if result.unseen_loader and result.edited_step_ns < 0.95 * result.measured_step_ns:
        remarks.insert(0, UNSEEN_LOADER.rstrip("."))
    if not result.reason:
        remarks += describe_replayed_others(result.replay.steps, result.replay.of_steps)
    share = 1 - result.edited_step_ns / max(result.measured_step_ns, 1)
    ranges = RANGES if result.step is None else RANGES_OF_RUN
    change = f"{t.format_share(abs(share))} {'less' if share >= 0 else 'more'} time"
    return d.Document(
        f"{step} → {least}{edited} {per} ({change}).",
        [
            *_build_edits(result, lines),
            *([] if result.reason else [d.Paragraph(ranges, "soft")]),
            *([notes(remarks)] if remarks else []),
            d.Section("How exact the replay is", [d.FieldList(fields)]),
        ],
        name="whatif",
    )


def _describe_run(step: StepTime) -> list[str]:
    """Name the step time that reports lead with, if the replayed steps differ from it."""
    own = t.format_duration(step.reference_ns)
    return [f"{own} per step without the profiler, {step.statistic}"]


def _describe_steps(result: WhatIfResult) -> list[str]:
    """List the replayed steps, and the other ranks in the replay."""
    replay = result.replay
    steps = "no steps are marked"
    if result.marked:
        steps = f"{replay.steps} of {replay.of_steps} steps{' are replayed' * (not result.reason)}"
    if replay.steps > replay.of_steps:
        steps = f"{t.count_noun(replay.of_steps, 'step')}, {replay.steps} are replayed"
    if not result.ranks:
        return [steps]
    error = f", error {abs(result.ranks_error or 0.0):.2%}" * (result.ranks_error is not None)
    return [steps, f"ranks {format_ranks(list(result.ranks))} together{error}"]


def _describe_accuracy(result: WhatIfResult) -> list[str]:
    """Describe the accuracy of the replay, or why it is not reliable."""
    replay = result.replay
    if result.reason:
        return ["no: gains are upper bounds", result.reason]
    explained = "no device work"
    if replay.explained is not None:
        explained = f"{replay.explained:.1%} of {replay.starts:,} starts of GPU work explained"
    error = f"error {replay.step_error:.2%}"
    return [t.format_duration(result.replayed_step_ns), error, explained]


def _describe_waits(result: WhatIfResult) -> list[str]:
    """Describe how much of the waits and of the idle time the replay explains."""
    replay = result.replay
    if result.reason:
        return []
    return [
        *(
            f"{who} {of:.0%} of the time, {share:.0%} of it explained"
            for who, of, share in (
                ("the host waits for the GPU for", replay.waits, replay.waits_explained),
                ("the GPU idles for", replay.idle, replay.idle_explained),
            )
            if share is not None and of >= 0.01
        ),
        *(
            f"{part.name}: {part.cases}, {t.format_duration(part.time_ns)}, "
            f"{part.explained:.0%} explained"
            for part in replay.hard
        ),
    ]


def _describe_selection(row: EditResult, result: WhatIfResult) -> str:
    """Write what an edit selects: ``36 kernels per step, 1.2 ms``."""
    select = row.edit.select
    noun = {"gpu": "GPU operation", "gap": "idle gap"}.get(select.on, "host event")
    noun = _NOUNS.get(select.kind, noun)
    count = row.selected_per_step
    amount = t.count_noun(round(count), noun) if count >= 1 else f"fewer than one {noun}"
    per = " per step" if result.marked else ""
    return f"{amount}{per}, {t.format_duration(row.selected_ns)}"


def _explain_no_gain(result: WhatIfResult, lines: Sequence[str], path: str) -> list[str]:
    """Explain why edits that remove time do not shorten the step."""
    hidden = [
        line
        for row, line in zip(result.edits, lines, strict=True)
        if abs(row.gain_ns) < NO_GAIN * result.measured_step_ns
        and row.selected_ns > 0
        and not (row.edit.op in ("scale", "merge") and (row.edit.factor or 0) >= 1)
    ]
    if not hidden or not path:
        return []
    names = t.list_names(f"'{line}'" for line in hidden)
    return [
        f"{names} {'gains' if len(hidden) == 1 else 'gain'} next to nothing: this time is not on "
        f"the step's critical path: {path}"
    ]


def _build_edits(result: WhatIfResult, lines: Sequence[str]) -> list[d.Block]:
    """Build a table of each edit's gain, its range, its gain alone, and the step after it."""
    short = all(len(line) <= MAX_EDIT for line in lines)
    rows = [
        [
            line if short else str(number),
            t.format_duration(row.gain_ns),
            f"up to {t.format_duration(row.high_ns)}"
            if result.reason
            else t.format_range(row.low_ns, row.high_ns),
            t.format_duration(row.alone_ns),
            t.format_duration(row.step_then_ns),
        ]
        for number, (row, line) in enumerate(zip(result.edits, lines, strict=True), start=1)
    ]
    chosen = [
        f"{'' if short else f'{n}. '}{line}: {_describe_selection(row, result)}"
        for n, (row, line) in enumerate(zip(result.edits, lines, strict=True), start=1)
    ]
    what = "step" if result.marked else "time"
    return [
        d.Grid(["edit", "saves", "range", "alone", f"{what} after it"], rows),
        d.Items(chosen, "", "Selected"),
    ]


# -- number formats -------------------------------------------------------------------------------


def build_precision(result: PrecisionResult) -> d.Document:
    """Build the layers to convert, the layers to leave, and the step after the conversion."""
    what = f"{result.format} on {result.gpu}, {'training' if result.training else 'inference'}"
    if result.refused:
        return d.Document(f"{what}: not estimated. {result.refused}.", [], name="precision")
    fields = [
        d.TextField("step", [f"{t.format_duration(result.all_step_ns)} with all layers converted"])
    ]
    if result.freed_bytes:
        freed = f"{t.format_bytes(result.freed_bytes)} less for weights"
        fields.append(d.TextField("memory", [freed]))
    if result.weight_bytes and result.weight_read_ns is not None:
        read = (
            f"reading them once takes {t.format_duration(result.weight_read_ns)} of the step at "
            "the memory's attainable rate"
        )
        fields.append(d.TextField("weights", [t.format_bytes(result.weight_bytes), read]))
    tables = [
        _build_layers(title, [layer for layer in result.layers if layer.convert == wanted])
        for title, wanted in (("Convert", True), ("Leave", False))
    ]
    return d.Document(
        f"{what}: {t.format_duration(result.measured_step_ns)} → "
        f"{t.format_duration(result.step_ns)} per step "
        f"({t.format_range(result.low_ns, result.high_ns)}).",
        [
            d.FieldList(fields, indent=0),
            *(table for table in tables if table is not None),
            notes(result.notes),
            d.Section("How to convert them", [d.Code(result.snippet)]),
        ],
        name="precision",
    )


def _build_layers(title: str, layers: Sequence[LinearLayerGroup]) -> d.Section | None:
    """Build a table of products by shape and module kind, with the reason why they stay."""
    if not layers:
        return None
    rows = [
        [
            layer.where,
            layer.shape.replace(" ", ""),
            f"{layer.calls:.4g}",
            t.format_duration(layer.ns),
            t.format_duration(layer.after_ns),
            t.format_range(layer.low_ns, layer.high_ns),
        ]
        for layer in layers
    ]
    reasons = dict.fromkeys(f"{layer.shape}: {layer.why}" for layer in layers if layer.why)
    head = ["layers", "m × n × k", "calls", "now", "then", "range"]
    more = f"{t.count_noun(len(rows) - MAX_SHAPES, 'more shape')}; JSON has all"
    grid = d.Grid(head, rows, align="llrrrr", short=rows[:MAX_SHAPES], omitted_note=more,
                optional=(2,))  # fmt: skip
    return d.Section(
        title, [grid, *([d.Items(list(reasons)[:MAX_SHAPES], "∙")] if reasons else [])]
    )


# -- meshes ---------------------------------------------------------------------------------------


def build_mesh(result: MeshResult) -> d.Document:
    """Build the step on another device mesh."""
    old, new, median = result.measured, result.mesh, result.median
    rows = [
        ["mesh", str(old), str(new), ""],
        ["GPUs", f"{old.world:,}", f"{new.world:,}", ""],
        ["batch of the job", "1×", f"{result.batch:.3g}×", ""],
        _build_times(
            "step", result.measured_step_ns, result.step_ns, (result.low_ns, result.high_ns)
        ),
    ]
    if median is not None:
        name, step_range = f"  of rank {median.rank}", (median.low_ns, median.high_ns)
        rows.append(_build_times(name, median.measured_step_ns, median.step_ns, step_range))
    rows += [
        ["samples per second and GPU", "1×", f"{result.throughput:.3g}×", ""],
        _build_times("compute", result.compute_ns, result.then_compute_ns),
    ]
    for axis in result.axes:
        rows.append(_build_times(f"{AXES[axis.axis]}, transfers", axis.ns, axis.then_ns))
        rows.append(_build_times("  exposed", axis.exposed_ns, axis.then_exposed_ns))
    if old.pp > 1 or new.pp > 1:
        rows.append(_build_times("pipeline's bubble", result.bubble_ns, result.then_bubble_ns))
    allocated = "not recorded (profile_memory=True)"
    if result.memory is not None:
        allocated = f"{' to '.join(map(t.format_bytes, result.memory))} allocated"
    return d.Document(
        f"{old} → {new}: {t.format_duration(result.measured_step_ns)} → "
        f"{t.format_duration(result.step_ns)} per step.",
        [
            d.Grid(["per step", "recorded", "there", "range"], rows, "The step there"),
            d.Paragraph(f"Memory of a GPU: {allocated}."),
            notes(result.notes),
        ],
        name="mesh",
    )


def _build_times(
    name: str, here: float, there: float, step_range: tuple[float, float] | None = None
) -> list[str]:
    range_text = "" if step_range is None else t.format_range(*step_range)
    return [name, t.format_duration(here), t.format_duration(there), range_text]
