"""``advisor whatif``: replay of the measured steps with the user's edits."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import RedactionNames
from advisor.core.errors import AdvisorError
from advisor.render.formats import PREDICTIONS

if TYPE_CHECKING:
    from advisor.core.finding import Edit
    from advisor.core.trace import Run
    from advisor.measure import Analysis
    from advisor.render.document import Document
    from advisor.replay.what_if import WhatIfResult

EDITS_HELP = (
    "VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER], for example 'scale kernel:softmax "
    "0.2' or 'remove sync:item'; several are made at once. Without any, the edits of the trace's "
    "findings are listed, to paste."
)
MAX_EDITS_LENGTH = 400
"""Maximum length of a finding's edits in the list, characters."""
MAX_TARGETS = 6
"""Maximum number of the trace's targets in the list."""
_MAX_NAMES, _MAX_NAME_LENGTH = 3, 40
"""Maximum number of names to list for an unknown one, and length of each, characters."""

EditLines = Annotated[
    list[str],
    typer.Option(
        "--edit",
        "-e",
        hidden=True,
        metavar="EDIT",
        help="As EDIT; repeatable.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Linear layers in fp8, mxfp8, nvfp4, int8, int8-weights, int4-weights or 2:4.",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="MESH",
        help="Predict the step on another device mesh: dp=8,tp=4 (pp, cp, ep).",
    ),
]


@o.with_options(
    "node_size", "node_bandwidth", "rank", "window", "steps", "max_size", "recorded_gpu"
)
def command(
    path: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace file, a folder of one run, or -.")
    ],
    changes: Annotated[
        list[str], typer.Argument(metavar="EDIT", help=EDITS_HELP, show_default=False)
    ] = [],  # noqa: B006
    edit: EditLines = [],  # noqa: B006
    precision: Precision = None,
    mesh: Mesh = None,
    recorded_mesh: o.RecordedMesh = None,
    same_batch: Annotated[
        bool,
        typer.Option("--same-batch", help="Keep the job's batch; default: the batch of a replica."),
    ] = False,
    micro_batches: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Micro-batches on the mesh; default: as recorded."),
    ] = None,
    *,
    options: o.Options,
    format_name: Annotated[str | None, o.format_option(PREDICTIONS)] = None,
    output: o.Output = None,
    details: Annotated[bool, o.details_option("Show how waits are replayed.")] = False,
    redact: o.Redact = False,
) -> None:
    """Predict the step with edits applied, or on another device mesh, by replaying its dependency
    graph.

    \b
    The verbs of edits, each with an example:
      remove sync:item              drop work, its host time and its wait
      scale kernel:softmax 0.2      multiply its time
      roofline family:gemm 0.75     bring kernels to a share of the GPU's limits
      resize work 2                 multiply the size of the batch
      overlap copy:HtoD             move GPU work to its own stream
      async sync                    let a blocking call return at once
      merge family:elementwise 0.5  merge neighbouring kernels
      graph work                    launch from a CUDA graph
      parallelize loader 4          load in this many worker processes
      remove_skew comm rank:3       let no other rank wait for a rank

    Targets, narrowed by a pattern after a colon: kernel, family, comm, copy, memset, work, layer,
    op, python, range, host, sync, loader, gap. More: docs/whatif.md
    of a checkout."""
    from advisor.replay.edit_language import parse_edit
    from advisor.replay.what_if import what_if

    edit = [*_join_words(path, changes), *edit]
    edits = [parse_edit(line) for line in edit]
    from advisor.advise.unrelated_inputs import open_windows
    from advisor.render.documents import whatif as documents

    renderer = out.choose_renderer(PREDICTIONS, format_name, output)
    if precision is not None and (edits or mesh is not None):
        raise AdvisorError("whatif: give only one of --precision, --mesh and edits")
    redaction = RedactionNames(redact)
    options = o.with_read_options(options, peek=redaction.peek)
    run = open_windows(path, options.read, None if edits else options.rank, options.window)
    if precision is not None:
        document = _project_precision(run, precision, options)
    elif mesh is not None:
        result = what_if(
            run, edits, steps=options.steps, mesh=mesh, recorded_mesh=recorded_mesh,
            node_size=options.node_size, node_bandwidth=options.node_bandwidth,
            same_batch=same_batch, micro_batches=micro_batches,
        )  # fmt: skip
        document = replace(documents.build_mesh(result), data={"schema": 1, **result._asdict()})
    elif not edits:
        if format_name is not None or output is not None:
            raise AdvisorError(f"no edit is given; advisor whatif {shlex.quote(path)} lists some")
        out.show(_list_edits(path, run, options, redaction.collect(run)))
        return
    else:
        document = _replay_edits(run, edit, edits, options)
    show_details = details or precision is not None or mesh is not None
    document = out.redact_document(document, redaction.collect(run))
    out.deliver(renderer, document, output, [path], details=show_details)


def _join_words(path: str, changes: list[str]) -> list[str]:
    """Return the edits, one of which may be without quotes. Raises AdvisorError if the ``path`` is
    the first of its words."""
    from advisor.replay.edit_language import VERBS

    if path.partition(" ")[0] in VERBS and not Path(path).exists():
        edit_text = shlex.quote(" ".join([path, *changes]))
        raise AdvisorError(f"no trace is given: advisor whatif TRACE {edit_text}")
    if any(" " in words for words in changes) or not changes:
        return changes
    return [" ".join(changes)]


def _replay_edits(run: Run, lines: list[str], edits: list[Edit], options: o.Options) -> Document:
    """Replay the steps with edits, which were written as ``lines``. Raises AdvisorError if an edit
    selects nothing."""
    from advisor.render.documents import whatif as documents
    from advisor.replay.what_if import what_if

    result = what_if(run, edits, options.rank, steps=options.steps)
    if missed := [i for i, row in enumerate(result.edits) if row.selected == 0]:
        raise AdvisorError(
            "; ".join(
                _explain_empty_selection(run, result, lines[i], i, options.steps) for i in missed
            )
        )
    rows = [row._asdict() | {"edit": e} for row, e in zip(result.edits, lines, strict=True)]
    data = result._asdict() | {"edits": rows}
    return replace(documents.build(result, lines), data=data)


def _list_edits(path: str, run: Run, options: o.Options, redact: set[str] | None) -> str:
    """Return the longest targets of the trace, with the report's names of idle causes, and the
    edits of its findings to paste."""
    from advisor.advise.engine import analyze_in_full
    from advisor.advise.finding_text import ranked_findings
    from advisor.core.labels import clean
    from advisor.core.text import count_noun, format_duration, idle_label
    from advisor.replay.edit_language import write_edit
    from advisor.replay.selection import largest_targets, selects_anything

    examined = analyze_in_full(run, options)
    targets, steps = largest_targets(examined.main, MAX_TARGETS), examined.main.step_count
    framework = examined.report.scope.framework
    causes = {f"gap:{part.cause}": idle_label(part, framework) for part in examined.report.idle}
    edit_lines: list[str] = []
    missing_lines: list[str] = []
    example = f"'remove {targets[0][0]}'" if targets else ""
    for finding in ranked_findings(examined.report):
        lines = [
            _shorten_edit(write_edit(edit), examined.main)
            for edit in finding.edits
            if edit.rank is not None or selects_anything(examined.main, edit.select)
        ]
        edits, title = " ".join(map(_quote_edit, lines)), f"{finding.priority:>2}  {finding.title}"
        if not edits:
            missing_lines += [title, "    No edit describes this fix."]
        elif len(edits) > MAX_EDITS_LENGTH:
            missing_lines += [title, f"    {count_noun(len(lines), 'edit')}, too long to paste."]
        else:
            edit_lines += [title, f"    {edits}"]
            example = example or edits
    if not example and not missing_lines:
        raise AdvisorError(f"{path}: nothing in it has a time that an edit could change")
    target_lines = [
        f"    {name:<28} {format_duration(ns / steps):<9} {causes.get(name, '')}".rstrip()
        for name, ns in targets
    ]
    result = ["Write an edit: advisor whatif --help has an example of each verb."]
    if example:
        result = [f"Give an edit, such as: advisor whatif {shlex.quote(path)} {example}"]
    sections = {
        "Targets of this trace, per step:": target_lines,
        "What this trace's fixes change, to paste:": edit_lines,
        "Fixes whose edits are not listed:": missing_lines,
    }
    if any(re.search(r"\d\.\.\d", line) for line in edit_lines):
        edit_lines.append("    (a..b..c: the optimistic, the central and the pessimistic value)")
    for title, listed in sections.items():
        result += ["", title, *listed] if listed else []
    if redact is not None:
        from advisor.export.redact import redact_with

        result = [*map(redact_with(examined.report, redact)[1].text, result)]
    return "".join(f"{clean(line)}\n" for line in result)


def _shorten_edit(line: str, a: Analysis) -> str:
    """Leave out the pattern of a loader if all waits for loaders are selected without it."""
    from advisor.replay.edit_language import parse_edit
    from advisor.replay.selection import selected_host

    short = re.sub(r"'loader:[^']*'|\bloader:\S+", "loader", line)
    selected = [selected_host(a, parse_edit(each).select) for each in dict.fromkeys((line, short))]
    return short if (selected[0] == selected[-1]).all() else line


def _quote_edit(line: str) -> str:
    """Quote an edit for a shell, with rounded numbers."""
    line = re.sub(r"\d\.\d{4,}", lambda number: f"{float(number[0]):.3g}", line)
    return shlex.quote(line) if re.search(r'["`!]|\$[\w({]|\\\\', line) else f'"{line}"'


def _project_precision(run: Run, name: str, options: o.Options) -> Document:
    """Predict the step in another number format, and which layers to convert (``--precision``)."""
    from advisor.measure import Analysis
    from advisor.measure.steps.steps import require_used_steps, require_window
    from advisor.render.documents.whatif import build_precision
    from advisor.replay.project.precision import project_precision

    require_window(run, "nothing to replay")
    number = run.ranks[0] if options.rank is None else options.rank
    a = Analysis(run.window(number), options.steps)
    require_used_steps(a.steps, a.trace.meta.path, number, selected=options.steps is not None)
    result = project_precision(a, name)
    data = {"schema": 1, **result._asdict()}
    return replace(build_precision(result), data=data)


def _explain_empty_selection(
    run: Run,
    result: WhatIfResult,
    line: str,
    index: int,
    steps: tuple[int | None, int | None] | None,
) -> str:
    """Explain why an edit selects nothing, and list names that it could select instead."""
    from advisor.core.labels import clean, kernel_label
    from advisor.core.text import list_names
    from advisor.measure import Analysis
    from advisor.replay.selection import find_near_matches

    edit = result.edits[index].edit
    first_rank = result.ranks[0] if result.ranks else run.ranks[0]
    window = run.window(first_rank if edit.rank is None else edit.rank)
    near = find_near_matches(Analysis(window, steps), edit.select)
    message = f"edit {clean(line.strip())!r} selects nothing in these steps"
    if not near.names:
        return f"{message}: there are no {near.kind}"
    names = list_names((kernel_label(name, _MAX_NAME_LENGTH) for name in near.names), _MAX_NAMES)
    order = "nearest first" if near.unmatched else "most time first"
    return f"{message}; {near.kind} here, {order}: {names}"
