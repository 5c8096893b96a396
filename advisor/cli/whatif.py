"""``advisor whatif``: replay the measured steps with edits that a person writes."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from advisor.cli import options as o
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.core.trace import Run
    from advisor.replay.project.precision import PrecisionResult
    from advisor.replay.result import WhatIfResult

MAX_NAMES, LONGEST_NAME = 8, 60
"""Names that are listed in place of one that is not there, and characters of each."""
WIDTH = 80
"""Characters of a line: an edit that does not fit beside its figures stands below."""


@o.with_options("node_size", "network", "rank", "steps", "gpu")
def command(
    path: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace file, a folder of one run, or -.")
    ],
    edit: Annotated[
        list[str],
        typer.Option(
            "--edit",
            "-e",
            metavar="EDIT",
            help="VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER], for example "
            "'scale kernel:softmax 0.2' or 'remove sync:item'; repeat for more, they add up.",
        ),
    ] = [],  # noqa: B006
    number: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="FORMAT",
            help="The linear layers in fp8, mxfp8, nvfp4, int8, int8-weights, int4-weights or 2:4.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="MESH",
            help="Predict the step on another device mesh: dp=8,tp=4 (pp, cp, ep).",
        ),
    ] = None,
    from_mesh: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="The recorded mesh, where collectives do not show it."),
    ] = None,
    same_batch: Annotated[
        bool,
        typer.Option("--same-batch", help="Keep the job's batch; default: that of a replica."),
    ] = False,
    micro_batches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Micro-batches there; default: as here.")
    ] = None,
    *,
    options: o.Options,
    form: Annotated[
        Literal["terminal", "json"], typer.Option("--format", help="How to print it.")
    ] = "terminal",
) -> None:
    """What the step would take with edits applied, or on another device mesh, by replaying its
    dependency graph.

    The edit language is described in docs/whatif.md.
    """
    from advisor.replay.language import parse_edit
    from advisor.replay.result import what_if

    edits = [parse_edit(line) for line in edit]
    from advisor.read import open_run

    run = open_run(path, options.read, rank=options.rank, window="first")
    if number is not None:
        if edits or mesh is not None:
            raise AdvisorError("whatif: give --precision, --mesh or --edit, not two of them")
        _precision(run, number, options, form)
        return
    if mesh is not None:
        from advisor.cli.whatif_mesh import show_mesh

        there = what_if(
            run, edits, steps=options.steps, mesh=mesh, from_mesh=from_mesh,
            node_size=options.node_size, network=options.network,
            same_batch=same_batch, micro_batches=micro_batches,
        )  # fmt: skip
        show_mesh(there, sys.stdout, plain=form == "json")
        return
    result = what_if(run, edits, steps=options.steps)
    if missed := [i for i, row in enumerate(result.edits) if row.selected == 0]:
        raise AdvisorError(
            "; ".join(_nothing(run, result, edit[i], i, options.steps) for i in missed)
        )
    if form == "json":
        print(json.dumps(_plain(result, edit), indent=2))
    else:
        _show(_plain(result, edit), sys.stdout)


def _precision(run: Run, name: str, options: o.Options, form: str) -> None:
    """``--precision``: which layers to convert, and the step after it."""
    from advisor.measure import Analysis
    from advisor.measure.steps.steps import refuse_none
    from advisor.replay.project.precision import precision

    if not run.traces:
        raise AdvisorError(f"{run.path or 'run'}: no profiled window, so nothing to replay")
    number = run.ranks[0] if options.rank is None else options.rank
    a = Analysis(run.window(number), options.steps)
    refuse_none(a.steps, a.trace.meta.path, number, selected=options.steps is not None)
    result = precision(a, name)
    if form == "json":
        plain = result._asdict() | {"layers": [row._asdict() for row in result.layers]}
        print(json.dumps({"schema": 1, **plain}, indent=2, allow_nan=False))
        return
    _show_precision(result, sys.stdout)


def _show_precision(result: PrecisionResult, file: Any) -> None:
    from advisor.core.text import clean, count_noun, format_bytes

    what = "training" if result.training else "inference"
    print(f"{result.format} on {result.gpu}, {what}", file=file)
    if result.refused:
        print(textwrap.fill(f"Not estimated: {result.refused}.", WIDTH), file=file)
        return
    print(
        f"step    {_ms(result.measured_step_ns)} ms -> {_ms(result.step_ns)} ms "
        f"({_ms(result.low_ns)} to {_ms(result.high_ns)}); with all layers "
        f"{_ms(result.all_step_ns)} ms",
        file=file,
    )
    if result.freed_bytes:
        print(f"memory  {format_bytes(result.freed_bytes)} less for weights", file=file)
    if result.weight_bytes and result.weight_read_ns is not None:
        print(
            f"weights {format_bytes(result.weight_bytes)}: reading them once takes "
            f"{_ms(result.weight_read_ns)} ms of the step at the memory's attainable rate",
            file=file,
        )
    for title, wanted in (("convert", True), ("leave", False)):
        rows = [layer for layer in result.layers if layer.convert == wanted]
        if rows:
            print(f"\n{title:<8}{'ms':>8} {'then':>8} {'range':>17}   m x n x k, layers", file=file)
        for layer in rows[:MAX_NAMES]:
            band = f"{_ms(layer.low_ns)} to {_ms(layer.high_ns)}"
            print(
                f"{layer.calls:>6.4g}x {_ms(layer.ns):>8} {_ms(layer.after_ns):>8} {band:>17}   "
                f"{layer.shape} {clean(layer.where)}",
                file=file,
            )
            if layer.why:
                print(f"{'':>10}{layer.why}", file=file)
        if len(rows) > MAX_NAMES:
            print(f"{'':>10}and {count_noun(len(rows) - MAX_NAMES, 'more shape')}", file=file)
    print(file=file)
    for note in result.notes:
        print(textwrap.fill(f"{note[0].upper()}{note[1:]}.", WIDTH), file=file)
    print("\n" + textwrap.indent(result.snippet, "    "), file=file)


def _nothing(
    run: Run,
    result: WhatIfResult,
    line: str,
    index: int,
    steps: tuple[int | None, int | None] | None,
) -> str:
    """Why an edit selects nothing, and what could stand in its place."""
    from advisor.core.text import clean, kernel_label
    from advisor.measure import Analysis
    from advisor.replay.present import present

    made = result.edits[index].edit
    first = result.ranks[0] if result.ranks else run.ranks[0]
    window = run.window(first if made.rank is None else made.rank)
    there = present(Analysis(window, steps), made.select)
    said = f"edit {clean(line.strip())!r} selects nothing in these steps"
    if not there.names:
        return f"{said}: there are no {there.what}"
    shown = [kernel_label(name, LONGEST_NAME) for name in there.names[:MAX_NAMES]]
    more = len(there.names) - len(shown)
    order = "nearest first" if there.asked else "most time first"
    rest = f" and {more:,} more" if more else ""
    return f"{said}; {there.what} here, {order}: {', '.join(shown)}{rest}"


def _plain(result: WhatIfResult, lines: list[str]) -> dict[str, Any]:
    """The result as plain dicts, with the edits as they were written."""
    plain = result._asdict()
    plain["edits"] = [
        {**row._asdict(), "edit": line} for row, line in zip(result.edits, lines, strict=True)
    ]
    plain["replay"] = result.replay._asdict()
    plain["replay"]["hard"] = [part._asdict() for part in result.replay.hard]
    return plain


def _show(result: dict[str, Any], file: Any) -> None:
    """The table a person reads, within 80 columns."""
    from advisor.core.text import path_label

    replay = result["replay"]
    what, steps = "step", f"{replay['steps']} of {replay['of_steps']} steps replayed"
    if not result["marked"]:
        what, steps = "time", "no steps marked: the whole recording"
    print(f"measured {what}   {_ms(result['measured_step_ns']):>10} ms", file=file)
    explained, after = "no device work", ""
    if replay["explained"] is not None:
        explained = f"{replay['explained']:.1%} of {replay['starts']:,} device starts"
        after = "explained, "
    if result["reason"]:
        print(f"replayed        {'no':>10}      gains are upper bounds", file=file)
        print(
            textwrap.fill(
                f"{result['reason']}.", 80, initial_indent=" " * 32, subsequent_indent=" " * 32
            ),
            file=file,
        )
    else:
        print(
            f"replayed        {_ms(result['replayed_step_ns']):>10} ms   "
            f"error {replay['step_error']:.2%}, {explained}",
            file=file,
        )
    after = "" if result["reason"] else after
    print(f"                {'':>10}      {after}{steps}", file=file)
    if result["ranks"]:
        names = ", ".join(map(str, sorted(result["ranks"])))
        print(
            f"                {'':>10}      with others: ranks {names} replayed together", file=file
        )
    for who, of, share in (
        ("host waits for the device", replay["waits"], replay["waits_explained"]),
        ("device idles", replay["idle"], replay["idle_explained"]),
    ):
        if share is not None and of >= 0.01:
            print(f"                {'':>10}      {who} {of:.0%}, explained {share:.0%}", file=file)
    for part in replay["hard"]:
        print(
            f"                {'':>10}      {part['name']}: {part['cases']}, "
            f"{_ms(part['time_ns'])} ms, {part['explained']:.0%} explained",
            file=file,
        )
    _show_edits(result, what, file)
    if result["unseen_loader"] and result["edited_step_ns"] < 0.95 * result["measured_step_ns"]:
        note = (
            "The loader's workers keep up with these steps, so how fast they could be is not in "
            "the trace: the step cannot become shorter than their time per batch."
        )
        print("\n" + textwrap.fill(note, 80), file=file)
    for note in result["notes"]:
        print("\n" + textwrap.fill(f"{note[0].upper()}{note[1:]}.", 80), file=file)
    path = {} if result["reason"] else result["critical_path"]
    total = sum(path.values()) or 1.0
    parts = ", ".join(
        f"{path_label(name, result['framework'])} {ns / total:.0%}"
        for name, ns in path.items()
        if ns > 0.005 * total
    )
    print(f"\ncritical path   {parts or 'not known: the steps are not replayed'}", file=file)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f}" if abs(ns) < 1e7 else f"{ns / 1e6:,.1f}"


def _show_edits(result: dict[str, Any], what: str, file: Any) -> None:
    """A row an edit: what it saves, its range, alone, and the step after it."""
    from advisor.core.text import clean

    if result["edits"]:
        print(file=file)
        then = f"{what} then"
        print(f"{'saves':>10} {'range':>19} {'alone':>9} {then:>10}   edit  (ms)", file=file)
    for row in result["edits"]:
        band = f"{_ms(row['low_ns'])} to {_ms(row['high_ns'])}"
        band = f"up to {_ms(row['high_ns'])}" if result["reason"] else band
        shown = clean(row["edit"])
        figures = (
            f"{_ms(row['gain_ns']):>10} {band:>19} {_ms(row['alone_ns']):>9} "
            f"{_ms(row['step_then_ns']):>10}   "
        )
        beside = len(figures) + len(shown) <= WIDTH
        print(f"{figures}{shown if beside else ''}".rstrip(), file=file)
        if not beside:
            print(
                textwrap.fill(shown, 80, initial_indent=" " * 6, subsequent_indent=" " * 8),
                file=file,
            )
