"""Variants of kernels side by side: their counters, and what explains the time."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from advisor.compare.compare import compare
from benchmarks.public_traces import path_of


def compare_amounts(
    before: str, after: str
) -> tuple[str, dict[str, tuple[float | None, float | None]]]:
    comparison = compare(str(path_of(before)), str(path_of(after)))
    return comparison.verdict, {
        a.name: (a.before, a.after) for a in comparison.amounts if a.group == "counters"
    }


def test_two_reports_of_nsight_compute_are_paired_by_base_name() -> None:
    verdict, amounts = compare_amounts(
        "ncu/cutlass_a100_s4.ncu-rep.gz", "ncu/cutlass_a100_s8.ncu-rep.gz"
    )
    assert amounts["ReferenceGemm_kernel: time"] == (322_592.0, 324_096.0)
    assert amounts["ReferenceGemm_kernel: waves"] == pytest.approx((1.0667, 0.8889), abs=1e-4)
    (gemm,) = (name for name in amounts if name.startswith("Kernel<") and name.endswith(": time"))
    assert amounts[gemm] == (10_400.0, 8_512.0)
    assert "18% faster: 10.4 µs → 8.51 µs" in verdict


def test_the_published_chain_of_the_laplacian() -> None:
    files = ("rocprof/laplacian/kernel1_results.csv.gz", "rocprof/laplacian/kernel2_results.csv.gz")
    verdict, amounts = compare_amounts(*files)
    assert amounts["laplacian_kernel: time"] == pytest.approx((2_643_734.8, 2_561_712.0), rel=1e-3)
    assert verdict == "laplacian_kernel is 3% faster: 2.64 ms → 2.56 ms."


def test_traffic_that_falls_as_the_time_does_explains_it(tmp_path: Path) -> None:
    text = gzip.decompress(path_of("ncu/deepseek_ocr_rtx5090.csv.gz").read_bytes()).decode()
    head, *rows = text.splitlines()
    kernel_rows = [row for row in rows if '"1740670"' in row]
    names = ("gpu__time_duration.sum", "dram__bytes_read.sum", '"Duration"')

    def halve(row: str) -> str:
        value = re.search(r'"([0-9.]+)"[,]*$', row)
        if value is None or not any(name in row for name in names):
            return row
        return row[: value.start(1)] + str(float(value[1]) / 2) + row[value.end(1) :]

    files = []
    for name, lines in (("before", kernel_rows), ("after", [halve(row) for row in kernel_rows])):
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n")
        files.append(str(tmp_path / f"{name}.csv"))
    comparison = compare(*files).verdict
    assert (
        "50% faster" in comparison
        and "Its DRAM traffic explains that: DRAM traffic 50% lower" in comparison
    )
