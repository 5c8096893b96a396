"""What ``advisor project --gpus`` prints."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, TextIO

from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from pathlib import Path

    from advisor.advise.options import Options
    from advisor.core.prices import Prices
    from advisor.measure import Analysis


def show_splits(
    a: Analysis, gpus: list[int], nodes: int | None, from_mesh: str | None,
    instance: str | None, file: Path | None, prices: Prices, options: Options,
    out: TextIO, *, plain: bool, epoch: float | None, notes: list[str],
) -> None:  # fmt: skip
    """Splits of each number of GPUs, as a table or as JSON."""
    from advisor.core.files import read_toml
    from advisor.core.gpus import find_gpu
    from advisor.core.prices import money
    from advisor.measure.comm.links import NodeLinks
    from advisor.replay.project.mesh import MeshProjector, parse_mesh
    from advisor.replay.project.splits import compare, read_instance

    node_size, network = options.node_size, options.network
    found = a.hardware
    price = None if found is None else prices.of(found.name)
    hourly = None if price is None else price.per_hour
    if nodes is not None and any(count % nodes for count in gpus):
        raise AdvisorError(f"--nodes {nodes}: does not divide --gpus")
    notes = [*notes, "each replica keeps its batch: the job's grows with the data-parallel ranks"]
    if instance is not None:
        machine = read_instance({} if file is None else read_toml(file).get("instances"), instance)
        if found is None or find_gpu(machine.gpu).gpu.name != found.name:
            raise AdvisorError(f"{instance} has {machine.gpu}, which was not recorded: see --gpu")
        if nodes is not None and any(count != nodes * machine.gpus for count in gpus):
            raise AdvisorError(f"--nodes {nodes} of {instance} have {nodes * machine.gpus} GPUs")
        network = machine.network if network is None else network
        hourly = hourly if machine.price is None else machine.price / machine.gpus
        if machine.cores is not None:
            notes.append(f"{instance} has {machine.cores / machine.gpus:g} cores for each GPU")
    recorded = None if from_mesh is None else parse_mesh(from_mesh)
    projector = MeshProjector(a, recorded, NodeLinks(node_size, network))
    if instance is not None and nodes is None:
        projector = projector.on_nodes_of(machine.gpus)
    rows = compare(projector, gpus, hourly, nodes, epoch)
    if plain:
        table = {"schema": 1, "measured": str(projector.measured), "currency": prices.currency}
        table |= {"epoch_steps": epoch}
        table |= {"splits": [row._asdict() for row in rows], "notes": notes}
        print(json.dumps(table, indent=2, allow_nan=False), file=out)
        return
    print(f"recorded: {projector.measured}, {a.step_ns / 1e6:,.3f} ms per step\n", file=out)
    print(
        f"{'GPUs':>6} {'mesh':14} {'ms':>10} {'range':>21} {'exposed':>9} {'speed':>7}  cost",
        file=out,
    )
    for row in rows:
        if row.step_ns is None or row.low_ns is None or row.high_ns is None:
            start = f"{row.gpus:>6} {row.mesh:14} "
            print(
                textwrap.fill(row.refused, 80, initial_indent=start, subsequent_indent=" " * 22),
                file=out,
            )
            continue
        band = f"{row.low_ns / 1e6:,.3f} - {row.high_ns / 1e6:,.3f}"
        paid = "" if row.cost is None else money(row.cost, prices.currency)
        print(
            f"{row.gpus:>6} {row.mesh:14} {row.step_ns / 1e6:>10,.3f} {band:>21} "
            f"{(row.exposed_ns or 0.0) / 1e6:>9,.3f} {row.speed or 0.0:>6.2f}x  {paid}".rstrip(),
            file=out,
        )
    notes.append("speed: samples of the job per second, over the recorded ones")
    if hourly is not None:
        many = "a million recorded steps" if epoch is None else f"an epoch, {epoch:,.0f} steps"
        notes.append(f"cost: of the samples of {many}")
    print(file=out)
    for note in notes:
        print(textwrap.fill(f"{note}.", 80, initial_indent="- ", subsequent_indent="  "), file=out)
