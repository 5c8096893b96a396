"""``advisor project``: predicted step time and cost on other GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli.analyze import RedactionNames
from advisor.core.errors import AdvisorError
from advisor.core.text import format_duration
from advisor.render.formats import PREDICTIONS

if TYPE_CHECKING:
    from advisor.core.gpus import GpuSpec
    from advisor.core.prices import Prices
    from advisor.measure import Analysis
    from advisor.render.document import Document
    from advisor.replay.project.project import Projector, TargetGpu
    from advisor.replay.project.splits import Instance, PacingRank

_MAX_NAMED = 4
"""Maximum number of GPUs for which the median rank's step is listed."""


@o.with_options(
    "node_size", "node_bandwidth", "rank", "window", "steps", "max_size", "recorded_gpu"
)
def command(
    path: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace file, a folder of one run, or -.")
    ],
    gpu: Annotated[
        list[str],
        typer.Option(
            "--gpu", metavar="NAME", help="Such as 'h200' or 'a100 pcie 80gb'; repeatable."
        ),
    ] = [],  # noqa: B006
    all_gpus: Annotated[
        bool, typer.Option("--all", help="All known GPUs, or all with a price.")
    ] = False,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML with a [prices] table: GPU name = money per hour."),
    ] = None,
    gpus: Annotated[
        list[int],
        typer.Option(metavar="N", min=1, help="Number of GPUs of the recorded kind; repeatable."),
    ] = [],  # noqa: B006
    nodes: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="Machines that share --gpus.")
    ] = None,
    instance: Annotated[
        str | None, typer.Option(metavar="NAME", help="A machine in [instances] of the price file.")
    ] = None,
    recorded_mesh: o.RecordedMesh = None,
    *,
    options: o.Options,
    epoch_steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Recorded steps of an epoch, to show its cost."),
    ] = None,
    epoch_samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples of an epoch, of the whole job.")
    ] = None,
    same_host: Annotated[
        bool, typer.Option("--same-host", help="Put the GPU in this machine: host time stays.")
    ] = False,
    format_name: Annotated[str | None, o.format_option(PREDICTIONS)] = None,
    output: o.Output = None,
    redact: o.Redact = False,
) -> None:
    """Predict the step time on another GPU, and its cost there.

    A range is as wide as the largest known error of a projection. More: docs/project.md of a
    checkout."""
    if not gpu and not all_gpus and not gpus:
        raise AdvisorError("no GPU is given: add --gpu NAME, --all or --gpus N")
    if gpus and (gpu or all_gpus):
        raise AdvisorError("--gpus N is for the recorded GPU: give it without --gpu and --all")
    from advisor.advise.unrelated_inputs import open_windows
    from advisor.core.prices import read_prices
    from advisor.replay.project.project import Projector
    from advisor.replay.project.splits import find_epoch, find_pacing_rank, read_rank

    table = read_prices(prices)
    targets, notes = ([], []) if gpus else _choose_targets(gpu, table, all_gpus=all_gpus)
    redaction = RedactionNames(redact)
    options = o.with_read_options(options, peek=redaction.peek)
    run = open_windows(path, options.read, options.rank, options.window)
    pace = find_pacing_rank(run, options.rank, options.steps)
    measured = read_rank(run, pace.slowest, options.steps)
    notes += pace.notes
    epoch = find_epoch(measured, epoch_steps, epoch_samples)
    renderer = out.choose_renderer(PREDICTIONS, format_name, output)
    if gpus:
        machine = _read_machine(instance, prices)
        document = _compare_splits(
            measured, gpus, nodes, recorded_mesh, machine, table, options, epoch, notes
        )
    else:
        projector, median = Projector(measured, same_host=same_host), None
        if pace.median != pace.slowest:
            measured_median = read_rank(run, pace.median, options.steps)
            median = Projector(measured_median, same_host=same_host)
        document = _project_onto_gpus(projector, median, pace, targets, table, epoch, notes)
    document = out.redact_document(document, redaction.collect(run))
    out.deliver(renderer, document, output, [path], details=True)


def _read_machine(name: str | None, prices: Path | None) -> tuple[str, Instance] | None:
    """Return a machine in [instances] of the price file, with its name. ``None`` without a name."""
    from advisor.core.files import read_toml
    from advisor.replay.project.splits import read_instance

    if name is None:
        return None
    return name, read_instance({} if prices is None else read_toml(prices).get("instances"), name)


def _project_onto_gpus(
    projector: Projector,
    median: Projector | None,
    pace: PacingRank,
    targets: list[tuple[GpuSpec, float | None]],
    prices: Prices,
    epoch: float | None,
    notes: list[str],
) -> Document:
    """Project the steps of the slowest rank and of the ``median`` rank onto the ``targets``."""
    from advisor.render.documents.project import build
    from advisor.replay.project.project import choose_gpus

    result = choose_gpus(projector, targets, epoch)
    ranks = _MedianRankSteps(pace, median, result)
    data = _to_plain(projector, result, notes) | {"currency": prices.currency}
    data |= {"epoch_steps": epoch} | ranks.plain()
    notes = [*notes, *ranks.sentences()]
    document = build(projector, result, notes, prices.currency, epoch)
    return replace(document, data=data)


class _MedianRankSteps:
    """Projected steps of the median rank, next to the steps of the slowest rank."""

    def __init__(
        self, pace: PacingRank, median: Projector | None, targets: tuple[TargetGpu, ...]
    ) -> None:
        self.pace, self.found = pace, targets
        from advisor.core.gpus import known_gpus

        gpus = {gpu.name: gpu for gpu in known_gpus()}
        self.median = (
            ()
            if median is None
            else tuple(median.on(gpus[choice.projection.gpu]) for choice in targets)
        )
        self.measured = None if median is None else median.a.step_ns

    def plain(self) -> dict[str, Any]:
        """Return the values of the ranks for JSON. ``median`` is null if there is only one rank."""
        ranks = [{"gpu": p.gpu, "step_ns": None if p.refused else p.step_ns} for p in self.median]
        median = {"rank": self.pace.median, "measured_step_ns": self.measured, "gpus": ranks}
        return {"rank": self.pace.slowest, "median": median if self.median else None}

    def sentences(self) -> list[str]:
        """Return a line with the median rank's step on the first GPUs. Empty for one rank."""
        steps = [f"{format_duration(p.step_ns)} on {p.gpu}" for p in self.median if not p.refused]
        if not steps:
            return []
        ellipsis = " …" if len(steps) > _MAX_NAMED else ""
        return [f"the step of rank {self.pace.median}: {', '.join(steps[:_MAX_NAMED])}{ellipsis}"]


def _choose_targets(
    names: list[str], prices: Prices, *, all_gpus: bool
) -> tuple[list[tuple[GpuSpec, float | None]], list[str]]:
    """Return the GPUs with prices per hour (``None`` if unknown), and notes on inexact names."""
    from advisor.core.gpus import find_gpu, known_gpus
    from advisor.replay.project.project import hourly_prices

    hourly_by_name = hourly_prices(prices)
    matches = {name: find_gpu(name) for name in names}
    chosen = {match.gpu.name: match.gpu for match in matches.values()}
    notes = [note for name, match in matches.items() if (note := match.note(name))]
    if all_gpus:
        listed = [g for g in known_gpus() if not hourly_by_name or g.name in hourly_by_name]
        chosen |= {g.name: g for g in listed}
    return [(g, hourly_by_name.get(g.name)) for g in chosen.values()], notes


def _to_plain(
    projector: Projector, targets: tuple[TargetGpu, ...], notes: list[str]
) -> dict[str, Any]:
    """Return the projections as plain data for JSON. Null if it cannot run or has no price."""
    from advisor.replay.ledger import count_comparisons

    return {
        "schema": 1, "source": projector.recorded_gpu.name,
        "measured_step_ns": projector.a.step_ns, "replayed": projector.replayed,
        "same_host": projector.same_host, "notes": notes, "rests_on": count_comparisons(),
        "gpus": [_to_row(c) for c in targets],
    }  # fmt: skip


def _to_row(choice: TargetGpu) -> dict[str, Any]:
    p = choice.projection
    fields = {name: v for name, v in p._asdict().items() if name not in ("fit", "measured_ns")}
    return {
        **fields, "speedup": p.speedup, "price_per_hour": choice.price,
        "cost_per_million_steps": choice.cost, "low_cost": choice.low_cost,
        "high_cost": choice.high_cost, "cost_per_epoch": choice.epoch_cost, "memory": p.fit,
        "refused": p.refused or None,
    }  # fmt: skip


def _compare_splits(
    a: Analysis, gpus: list[int], nodes: int | None, recorded_mesh: str | None,
    machine: tuple[str, Instance] | None, prices: Prices, options: o.Options,
    epoch: float | None, notes: list[str],
) -> Document:  # fmt: skip
    """Compare splits of each number of GPUs. ``machine``: name and entry in the price file."""
    from advisor.core.gpus import find_gpu
    from advisor.measure.comm.links import NodeLinks
    from advisor.render.documents.project import build_splits
    from advisor.replay.project.mesh import MeshProjector, parse_mesh
    from advisor.replay.project.splits import SAME_BATCH, compare_splits

    network, gpu_spec = options.node_bandwidth, a.hardware
    price = None if gpu_spec is None else prices.price_of(gpu_spec.name)
    hourly = None if price is None else price.per_hour
    if nodes is not None and any(count % nodes for count in gpus):
        raise AdvisorError(f"--nodes {nodes}: does not divide --gpus")
    notes = [*notes, SAME_BATCH]
    if machine is not None:
        name, instance = machine
        if gpu_spec is None or find_gpu(instance.gpu).gpu.name != gpu_spec.name:
            raise AdvisorError(f"{name} has {instance.gpu}, which was not recorded: see --gpu")
        if nodes is not None and any(count != nodes * instance.gpus for count in gpus):
            raise AdvisorError(f"--nodes {nodes} of {name} have {nodes * instance.gpus} GPUs")
        network = instance.network if network is None else network
        hourly = hourly if instance.price is None else instance.price / instance.gpus
        if instance.cores is not None:
            notes.append(f"{name} has {instance.cores / instance.gpus:g} cores for each GPU")
    recorded = None if recorded_mesh is None else parse_mesh(recorded_mesh)
    projector = MeshProjector(a, recorded, NodeLinks(options.node_size, network))
    if machine is not None and nodes is None:
        projector = projector.with_node_size(machine[1].gpus)
    rows, measured = compare_splits(projector, gpus, hourly, nodes, epoch), str(projector.measured)
    data = {
        "schema": 1, "measured": measured, "currency": prices.currency, "epoch_steps": epoch,
        "splits": rows, "notes": [*notes],
    }  # fmt: skip
    notes.append("speed: samples of the job per second, over the recorded ones")
    if hourly is not None:
        cost_basis = (
            "a million recorded steps" if epoch is None else f"an epoch, {epoch:,.0f} steps"
        )
        notes.append(f"cost: of the samples of {cost_basis}")
    document = build_splits(measured, a.step_ns, rows, notes, prices.currency)
    return replace(document, data=data)
