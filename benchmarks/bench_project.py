"""Projected against measured: the same work on two GPUs.

    python benchmarks/bench_project.py [--write docs/project.md]

The measurements are in ``advisor/replay/project/crossings.json``, with their sources; the
projection is made from the first GPU's time alone. Layers are shown one by one, shapes of one
operator by their range.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from statistics import median

from advisor.replay.project.crossings import Crossing, measurements

BEGIN, END = "<!-- crossings begin -->", "<!-- crossings end -->"


def key(pair: Crossing) -> tuple[str, str, str]:
    """What a group of pairs shares."""
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
    """Print the table; write it into a document if told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text = f"{BEGIN}\n{table()}\n{END}"
    print(text)
    if arguments.write:
        head, _, rest = arguments.write.read_text(encoding="utf-8").partition(BEGIN)
        arguments.write.write_text(f"{head}{text}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
