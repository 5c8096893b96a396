"""Narrower number formats: estimates of matrix products compared with published measurements.

``python benchmarks/bench_precision.py --write docs/accuracy.md`` writes the table.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from advisor.core import gpus
from advisor.core.gpus import GpuSpec, find_gpu
from advisor.replay.project.device_scaling import FORMATS, Gemm, Role, estimate_product, memory_rate

FILE = Path(__file__).with_name("precision.json")
BEGIN, END = "<!-- precision begin -->", "<!-- precision end -->"
PASSES: dict[str, tuple[Role, ...]] = {
    "inference": ("inference",),
    "forward": ("forward",),
    "training": ("forward", "input gradient", "weight gradient"),
}


class Case(NamedTuple):
    """A published measurement, and what is estimated for it: ratios of times, old over new."""

    table: dict[str, Any]
    m: int
    n: int
    k: int
    measured: float
    best: float
    middle: float
    worst: float

    @property
    def inside(self) -> bool:
        return self.worst <= self.measured <= self.best


def shapes(role: Role, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Shapes of one of the three products of a layer from ``k`` to ``n`` features with ``m``
    rows."""
    return {"input gradient": (m, k, n), "weight gradient": (n, k, m)}.get(role, (m, n, k))


def usual_ns(gpu: GpuSpec, gemm: Gemm) -> float:
    """Time of a product in the recorded format at the attainable rates, ns: where a table gives
    a ratio only."""
    rate = gpus.attainable_matmul(gpu, gemm.dtype)
    assert rate is not None
    moved = gemm.width * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
    return max(2 * gemm.m * gemm.n * gemm.k / rate.rate, moved / memory_rate(gpu)) * 1e9 + 2_000


def cases() -> list[Case]:
    result = []
    for table in json.loads(FILE.read_text())["tables"]:
        gpu = find_gpu(table["gpu"]).gpu
        for m, n, k, before, after in table["rows"]:
            old, new = _times(table["unit"], m, n, k, before, after)
            if table["role"] == "decode":
                result.append(_decode(table, gpu, n, old, new))
                continue
            gemms = [
                Gemm(*shapes(role, m, n, k), "bf16", 2, role) for role in PASSES[table["role"]]
            ]
            took = [usual_ns(gpu, gemm) for gemm in gemms]
            if old is not None:
                took = [each * old / sum(took) for each in took]
            results = [
                estimate_product(gemm, table["format"], gpu, each)
                for gemm, each in zip(gemms, took, strict=True)
            ]
            totals = [each.total for each in results if each is not None]
            best, middle, worst = (sum(took) / sum(column) for column in zip(*totals, strict=True))
            measured = after if old is None or new is None else old / new
            result.append(Case(table, m, n, k, measured, best, middle, worst))
    return result


def _times(
    unit: str, m: int, n: int, k: int, before: float | None, after: float
) -> tuple[float | None, float | None]:
    """ns."""
    if before is None:
        return None, None
    if unit == "tflops":
        return 2e-3 * m * n * k / before, 2e-3 * m * n * k / after
    if unit == "tokens/s":
        return 1e9 / before, 1e9 / after
    scale = {"ms": 1e6, "us": 1e3}[unit]
    return before * scale, after * scale


def _decode(
    table: dict[str, Any], gpu: GpuSpec, weights: int, old: float | None, new: float | None
) -> Case:
    """A step of one request reads all weights once; what it takes beyond that stays."""
    assert old is not None and new is not None
    narrow = FORMATS[table["format"]]
    reads = min(weights * 2 / memory_rate(gpu) * 1e9, old)
    best, middle, worst = (
        old / (old - reads + reads * narrow.weight / 2 * slower) for slower in narrow.memory
    )
    return Case(table, 1, weights, 1, old / new, best, middle, worst)


def covered(compared_cases: list[Case]) -> str:
    inside = sum(case.inside for case in compared_cases)
    return f"{inside} of {len(compared_cases)}"


def lines() -> list[str]:
    compared_cases = cases()
    errors = sorted(abs(math.log(case.middle / case.measured)) for case in compared_cases)
    slower = [case for case in compared_cases if case.measured < 1]
    predicted_slower = sum(case.middle < 1 for case in slower)
    result = [
        f"{covered(compared_cases)} published speed-ups are in the range of the estimate; "
        f"the central estimate is off by {math.exp(errors[len(errors) // 2]):.2f} times (median). "
        f"{len(slower)} "
        f"were slower than before; the central estimate says so of {predicted_slower}.",
        "",
        "| format | GPU | source | measured | estimated | in the range |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for table in {id(case.table): case.table for case in compared_cases}.values():
        table_cases = [case for case in compared_cases if case.table is table]
        result.append(
            f"| {table['format']} | {find_gpu(table['gpu']).gpu.name} | "
            f"[{table['what']}]({table['source']}) | {_span([c.measured for c in table_cases])} | "
            f"{_span([c.middle for c in table_cases])} | {covered(table_cases)} |"
        )
    result += ["", "Outside of the range:", ""]
    for case in compared_cases:
        if not case.inside:
            shape = f"{case.m}x{case.n}x{case.k}"
            result.append(
                f"- {case.table['format']}, {find_gpu(case.table['gpu']).gpu.name}, {shape} "
                f"({case.table['what']}): {case.measured:.2f}x, estimated {case.middle:.2f}x "
                f"({case.worst:.2f} to {case.best:.2f})"
            )
    return result


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}x" if len(values) == 1 else f"{low:.2f}x to {high:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    text = "\n".join(lines())
    if args.write is None:
        print(text)
        return
    page = args.write.read_text()
    block = f"{BEGIN}\n{text}\n{END}"
    args.write.write_text(re.sub(f"(?s){BEGIN}.*{END}", lambda _: block, page))


if __name__ == "__main__":
    main()
