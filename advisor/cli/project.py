"""``advisor project``: the measured step on another GPU, and which GPU is the cheapest for it."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from advisor.cli import options as o
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec
    from advisor.core.prices import Prices
    from advisor.replay.project.pace import Pace
    from advisor.replay.project.project import Choice, Projection, Projector

WIDTH = 80
MAX_NAMED = 4
"""GPUs for which the median rank's step is given."""
WORDS = {
    "compute": "bound by arithmetic",
    "memory": "bound by memory",
    "mixture": "matrix products, shapes not known",
    "unknown": "kernels of no known kind",
    "launch": "no longer than the shortest kernel",
    "copy": "copies from and to the host",
    "link": "between GPUs",
    "unchanged": "other, taken to stay",
}


@o.with_options("node_size", "network", "rank", "steps")
def command(
    path: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace file, a folder of one run, or -.")
    ],
    gpu: Annotated[
        list[str],
        typer.Option("--gpu", metavar="NAME", help="As 'h200' or 'a100 pcie 80gb'; repeatable."),
    ] = [],  # noqa: B006
    every: Annotated[
        bool, typer.Option("--all", help="All GPUs that are known, or all that have a price.")
    ] = False,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML with a [prices] table: GPU name = money an hour."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="The recorded GPU, where the file names none."),
    ] = None,
    gpus: Annotated[
        list[int],
        typer.Option(metavar="N", min=1, help="That many GPUs as recorded; repeatable."),
    ] = [],  # noqa: B006
    nodes: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="Machines that share --gpus.")
    ] = None,
    instance: Annotated[
        str | None, typer.Option(metavar="NAME", help="A machine of the price file's [instances].")
    ] = None,
    from_mesh: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="The recorded mesh, where collectives do not show it."),
    ] = None,
    *,
    options: o.Options,
    epoch_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Recorded steps of an epoch, to cost one."),
    ] = None,
    epoch_samples: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples of an epoch, of the whole job."),
    ] = None,
    same_host: Annotated[
        bool, typer.Option("--same-host", help="The GPU goes into this machine: host time stays.")
    ] = False,
    form: Annotated[
        Literal["terminal", "json"], typer.Option("--format", help="How to print it.")
    ] = "terminal",
) -> None:
    """What the step would take on another GPU, and what it would cost there.

    docs/project.md explains the method and the range.
    """
    if not gpu and not every and not gpus:
        raise AdvisorError("project: say which GPU with --gpu NAME, or --all; or --gpus N")
    if gpus and (gpu or every):
        raise AdvisorError("--gpus N is of the recorded GPU: give it without --gpu and --all")
    from advisor.core.gpus import find_gpu
    from advisor.core.prices import read_prices
    from advisor.read import open_run
    from advisor.replay.project.pace import find_epoch, find_pace, read_rank
    from advisor.replay.project.project import Projector, choose

    table = read_prices(prices)
    targets, notes = ([], []) if gpus else _targets(gpu, table, every=every)
    run = open_run(path, options.read, rank=options.rank, window="first")
    if not run.traces:
        raise AdvisorError(f"{path}: no profiled window, so nothing to project")
    pace = find_pace(run, options.rank, options.steps)
    measured = read_rank(run, pace.slowest, options.steps)
    if len(pace.work) > 1:
        notes.append(pace.sentence)
    epoch = find_epoch(measured, epoch_steps, epoch_samples)
    if gpus:
        from advisor.cli.project_splits import show_splits

        show_splits(
            measured, gpus, nodes, from_mesh, instance, prices, table, options,
            sys.stdout, plain=form == "json", epoch=epoch, notes=notes,
        )  # fmt: skip
        return
    origin = None if source is None else find_gpu(source).gpu
    projector = Projector(measured, same_host=same_host, source=origin)
    result = choose(projector, targets, epoch)
    median = None
    if pace.median != pace.slowest:
        median = Projector(
            read_rank(run, pace.median, options.steps), same_host=same_host, source=origin
        )
    ranks = _RankSteps(pace, median, result)
    if form == "json":
        plain = _plain(projector, result, notes) | {"currency": table.currency}
        plain |= {"epoch_steps": epoch} | ranks.plain()
        print(json.dumps(plain, indent=2, allow_nan=False))
    else:
        notes += ranks.sentences()
        _show(projector, result, notes, table.currency, epoch, sys.stdout)


class _RankSteps:
    """The steps of the median rank, beside those of the slowest."""

    def __init__(self, pace: Pace, median: Projector | None, found: tuple[Choice, ...]) -> None:
        self.pace, self.found = pace, found
        from advisor.core.gpus import known

        gpus = {gpu.name: gpu for gpu in known()}
        self.median = (
            ()
            if median is None
            else tuple(median.on(gpus[choice.projection.gpu]) for choice in found)
        )
        self.measured = None if median is None else median.a.step_ns

    def plain(self) -> dict[str, Any]:
        """The rank of the figures; null: of the median: there is one rank."""
        ranks = [{"gpu": p.gpu, "step_ns": None if p.refused else p.step_ns} for p in self.median]
        other = {"rank": self.pace.median, "measured_step_ns": self.measured, "gpus": ranks}
        return {"rank": self.pace.slowest, "median": other if self.median else None}

    def sentences(self) -> list[str]:
        """A line for the first GPUs of the table."""
        steps = [f"{_ms(p.step_ns)} ms on {p.gpu}" for p in self.median if not p.refused]
        if not steps:
            return []
        more = " …" if len(steps) > MAX_NAMED else ""
        return [f"the step of rank {self.pace.median}: {', '.join(steps[:MAX_NAMED])}{more}"]


def _targets(
    names: list[str], prices: Prices, *, every: bool
) -> tuple[list[tuple[GpuSpec, float | None]], list[str]]:
    """The GPUs with their prices, and what a short name was taken for."""
    from advisor.core.gpus import find_gpu, known
    from advisor.replay.project.project import hourly_prices

    money = hourly_prices(prices)
    chosen = {result.gpu.name: result.gpu for result in map(find_gpu, names)}
    notes = []
    for name in dict.fromkeys(names):
        result = find_gpu(name)
        if result.others:
            more = ", ".join(result.others[:4]) + (" …" if len(result.others) > 4 else "")
            notes.append(f"{name} is taken for {result.gpu.name}; it could be {more}")
    if every:
        wanted = [g for g in known() if not money or g.name in money]
        chosen |= {g.name: g for g in wanted}
    return [(g, money.get(g.name)) for g in chosen.values()], notes


def _plain(projector: Projector, found: tuple[Choice, ...], notes: list[str]) -> dict[str, Any]:
    """As plain data; null: the step cannot run there, or no price."""
    from advisor.replay.calibration import compared

    return {
        "schema": 1,
        "source": projector.source.name,
        "measured_step_ns": projector.a.step_ns,
        "replayed": projector.replayed,
        "same_host": projector.same_host,
        "notes": notes,
        "rests_on": compared(),
        "gpus": [_row(c) for c in found],
    }


def _row(choice: Choice) -> dict[str, Any]:
    p = choice.projection

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "gpu": p.gpu,
        "step_ns": number(p.step_ns),
        "low_ns": number(p.low_ns),
        "high_ns": number(p.high_ns),
        "speedup": number(p.speedup),
        "price_per_hour": choice.price,
        "cost_per_million_steps": choice.cost,
        "low_cost": choice.low_cost,
        "high_cost": choice.high_cost,
        "cost_per_epoch": choice.epoch_cost,
        "memory": p.fit._asdict(),
        "parts": [part._asdict() for part in p.parts],
        "notes": list(p.notes),
        "refused": p.refused or None,
    }


def _ms(ns: float) -> str:
    if not math.isfinite(ns):
        return "-"
    return f"{ns / 1e6:,.3f}" if ns < 1e7 else f"{ns / 1e6:,.1f}"


def _show(
    projector: Projector,
    found: tuple[Choice, ...],
    notes: list[str],
    currency: str,
    epoch: float | None,
    file: TextIO,
) -> None:
    """What a person reads, within 80 columns."""
    from advisor.core.text import clean

    def paragraph(text: str, first: str = "", then: str = "") -> None:
        wrapped = textwrap.fill(
            clean(text), WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False
        )
        print(wrapped, file=file)

    for line in notes:
        paragraph(f"{line}.")
    a = projector.a
    per = "of the recording" if a.per == "recording" else "per step"
    print(f"measured on {projector.source.name}: {_ms(a.step_ns)} ms {per}", file=file)
    unit = "ms" if a.per == "recording" else "ms per step"
    _table(found, unit, currency, epoch, file)
    if len(found) == 1:
        from advisor.advise.terms import how_to_record

        _detail(found[0].projection, unit, how_to_record("profile_memory=True", a.trace.meta), file)
    about_gpus = dict.fromkeys(note for c in found for note in c.projection.notes)
    print(file=file)
    for note in about_gpus:
        paragraph(f"{note}.", "- ", "  ")
    for choice in found:
        if choice.projection.refused:
            paragraph(f"{choice.projection.gpu}: {choice.projection.refused}.", "- ", "  ")
    host = (
        "host time is taken as measured (--same-host)"
        if projector.same_host
        else "hosts of other machines lie in it too (--same-host: this one)"
    )
    from advisor.replay.project.project import RESTS_ON

    paragraph(f"{RESTS_ON}; {host}. See docs/project.md.")


def _table(
    found: tuple[Choice, ...], unit: str, currency: str, epoch: float | None, file: TextIO
) -> None:
    money = any(c.price is not None for c in found)
    name = max(12, min(25 if money else 30, max(len(c.projection.gpu) for c in found)))
    head = f"{'GPU':<{name}} {unit:>9} {'band':>17} {'speed':>7}"
    cost = f"{currency} a million" if epoch is None else f"{currency} an epoch"
    print(f"\n{head} {cost:>13}" if money else f"\n{head}  memory", file=file)
    for c in found:
        p = c.projection
        band = "" if p.refused else f"{_ms(p.low_ns)} - {_ms(p.high_ns)}"
        speed = "" if p.refused else _times(p.speedup)
        line = f"{p.gpu[:name]:<{name}} {_ms(p.step_ns):>9} {band:>17} {speed:>7}"
        if not money:
            print(f"{line}  {p.fit.verdict}".rstrip(), file=file)
            continue
        paid = c.cost if epoch is None else c.epoch_cost
        sum_ = "no price" if paid is None else f"{paid:,.2f}"
        mark = "  !" if not c.possible else ""
        print(f"{line} {sum_:>13}{mark}".rstrip(), file=file)
    if epoch is not None:
        print(f"an epoch has {epoch:,.0f} recorded steps", file=file)
    if money:
        _cheapest(found, file)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def _cheapest(found: tuple[Choice, ...], file: TextIO) -> None:
    """The cheapest, and which could be it as well by the bands."""
    from advisor.replay.project.project import cheapest

    print("\n" + textwrap.fill(cheapest(found), WIDTH), file=file)
    if not any(c.possible and c.cost is not None for c in found):
        return
    for c in found:
        if c.projection.fit.verdict == "too small":
            print(f"! {c.projection.gpu}: too little memory", file=file)
    if all(c.projection.fit.verdict == "not measured" for c in found):
        print("memory was not recorded, so whether the step fits is not known", file=file)


def _detail(p: Projection, unit: str, record: str, file: TextIO) -> None:
    """What moves by what, and the memory."""
    if not p.refused:
        print(f"\n{'device work by what bounds it':<36} {unit:>9} {'there':>9}", file=file)
        for part in p.parts:
            print(f"{WORDS[part.kind]:<36} {_ms(part.ns):>9} {_ms(part.then_ns):>9}", file=file)
    fit = p.fit
    gib = 1 << 30
    if fit.verdict == "not measured":
        hint = f"; record with {record}" if record else ""
        capacity = f"the GPU has {fit.capacity / gib:.0f} GiB"
        print("\n" + textwrap.fill(f"memory: not measured ({capacity}{hint})", WIDTH), file=file)
        return
    sizes = [
        f"{size / gib:.1f} GiB {word}"
        for size, word in ((fit.allocated, "allocated"), (fit.reserved, "reserved"))
        if size is not None
    ]
    print(f"\nmemory: {fit.verdict}: {', '.join(sizes)} of {fit.capacity / gib:.0f} GiB", file=file)
