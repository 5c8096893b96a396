"""Projected against measured: the same work on two GPUs.

    python benchmarks/bench_project.py [--write docs/project.md] [--ledger]

The measurements are in ``benchmarks/gpu_pairs.json``, with their sources; the projection is made
from one GPU's time alone, by the same arithmetic as that of a trace, so an error in the one shows
in the other. Layers are shown one by one, shapes of one operator by range. ``--ledger`` writes
them into the shipped ledger, from which the ranges of ``advisor project`` come.
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from itertools import combinations, groupby
from pathlib import Path
from statistics import median

import msgspec
from shipped_ledger import replace

from advisor.core.gpus import GpuSpec, known_gpus
from advisor.replay.ledger import SHIPPED, Prediction
from advisor.replay.project.device_scaling import SHORTEST_NS, matmul_rate, memory_rate

BEGIN, END = "<!-- crossings begin -->", "<!-- crossings end -->"
PAIRS = Path(__file__).with_name("gpu_pairs.json")


class WorkOnTwoGpus(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work on two GPUs."""

    kind: str
    """``compute`` or ``memory``: what bounds it on the first."""
    what: str
    dtype: str
    half_sums: bool = False
    flops: float
    moved: float
    """Bytes, each tensor once."""
    source: str
    source_ns: float
    target: str
    target_ns: float
    reference: str

    @property
    def projected_ns(self) -> float:
        """Time on the second GPU, projected from the first."""
        return projected(self, _gpu(self.source), _gpu(self.target), self.source_ns)

    @property
    def error(self) -> float:
        """Logarithm of projected over measured, of both ways the one that is farther off."""
        return max(row.error for row in self.predictions())

    def predictions(self) -> list[Prediction]:
        """Lines of the table, one each way."""
        back = projected(self, _gpu(self.target), _gpu(self.source), self.target_ns)
        ways = (
            (self.source, self.target, self.projected_ns, self.target_ns),
            (self.target, self.source, back, self.source_ns),
        )
        return [
            Prediction(
                source="gpus",
                program=f"{self.what}, {self.dtype}",
                kind=self.kind,
                device=device,
                target=target,
                unit="ns",
                predicted=predicted,
                measured=measured,
            )
            for device, target, predicted, measured in ways
        ]


class Efficiency(msgspec.Struct, frozen=True):
    """The share of the attainable rates that kernels of one family reach in a public trace."""

    family: str
    bound: str
    vendor: str
    share: float
    trace: str


class HostTime(msgspec.Struct, frozen=True):
    """The host time of one operator, the median of a public trace, ns."""

    op: str
    ns: float
    trace: str


class _File(msgspec.Struct, frozen=True):
    crossings: tuple[WorkOnTwoGpus, ...]
    efficiencies: tuple[Efficiency, ...]
    hosts: tuple[HostTime, ...]


def projected(work: WorkOnTwoGpus, source: GpuSpec, target: GpuSpec, source_ns: float) -> float:
    """ns on ``target`` of what takes ``source_ns`` on ``source``."""
    ideal = []
    for gpu in (source, target):
        rate = matmul_rate(gpu, work.dtype, half_sums=work.half_sums) or math.inf
        ideal.append(max(work.flops / rate, work.moved / memory_rate(gpu)))
    fixed = min(SHORTEST_NS[source.vendor], source_ns)
    return SHORTEST_NS[target.vendor] + (source_ns - fixed) * ideal[1] / ideal[0]


@cache
def _gpu(name: str) -> GpuSpec:
    return next(gpu for gpu in known_gpus() if gpu.name == name)


@cache
def measurements() -> _File:
    """Measurements that are known."""
    return msgspec.json.decode(PAIRS.read_bytes(), type=_File)


def predictions() -> list[Prediction]:
    """All that is known of two GPUs, as lines of the table: what kernels of a family reach on one
    vendor's GPU predicts the other's, and an operator's time on one host that on another."""
    rows = [row for pair in measurements().crossings for row in pair.predictions()]
    rows += [
        Prediction(
            source="gpus",
            program=f"efficiency of {one.family}, {one.bound}",
            kind="vendor",
            device=one.trace,
            target=other.trace,
            predicted=one.share,
            measured=other.share,
        )
        for one, other in combinations(measurements().efficiencies, 2)
        if (one.family, one.bound) == (other.family, other.bound) and one.vendor != other.vendor
    ]
    rows += [
        Prediction(
            source="gpus",
            program=f"host time of {one.op}",
            kind="host",
            device=one.trace,
            target=other.trace,
            unit="ns",
            predicted=one.ns,
            measured=other.ns,
        )
        for one, other in combinations(measurements().hosts, 2)
        if one.op == other.op and one.trace != other.trace
    ]
    return rows


def key(pair: WorkOnTwoGpus) -> tuple[str, str, str]:
    """Key of a group of pairs."""
    return pair.source, pair.target, pair.what.split()[0]


def table() -> str:
    """All pairs as Markdown."""
    lines = [
        "| work | from → to | measured there | projected | projected / measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (source, target, what), group in groupby(measurements().crossings, key):
        pairs = list(group)
        gpus = f"{source.removeprefix('NVIDIA ')} → {target.removeprefix('NVIDIA ')}"
        if what == "convolution":
            lines += [
                f"| {p.what}, {p.dtype} | {gpus} | {p.target_ns / 1e3:,.0f} µs | "
                f"{p.projected_ns / 1e3:,.0f} µs | {p.projected_ns / p.target_ns:.2f} |"
                for p in pairs
            ]
            continue
        ratios = sorted(p.projected_ns / p.target_ns for p in pairs)
        lines.append(
            f"| {what}, {len(pairs)} shapes | {gpus} | | | {median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table; write it into a document if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ledger", type=Path, nargs="?", const=SHIPPED)
    arguments = parser.parse_args()
    text = f"{BEGIN}\n{table()}\n{END}"
    print(text)
    if arguments.ledger:
        replace(arguments.ledger, "gpus", predictions())
    if arguments.write:
        head, _, rest = arguments.write.read_text(encoding="utf-8").partition(BEGIN)
        arguments.write.write_text(f"{head}{text}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
