"""A zoo of public kernel names: each tells its family; real traces have little that tells none.

``tests/data/kernel_zoo.tsv`` has the names as profilers or published libraries have them (long
template lists cut), each with where it is from. ``half``: the patterns were written with the one
half in sight, the other (``blind``) was collected afterwards and showed what was missing. The
family is what the kernel does by its source, judged by a reader; ``other``: nothing in the name
says so.
"""

from __future__ import annotations

import csv
from pathlib import Path

import polars as pl
import pytest

from advisor.core.errors import AdvisorError
from advisor.measure import Analysis
from advisor.measure.comm.messages import kernel_kind
from advisor.measure.device.families import FAMILIES
from advisor.measure.device.kernel_names import describe_kernels
from advisor.read import read_trace
from benchmarks.public_traces import trace_names
from tests.conftest import public_file

ZOO = Path(__file__).resolve().parents[1] / "data" / "kernel_zoo.tsv"
with ZOO.open(encoding="utf-8", newline="") as _file:
    ROWS = list(csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))
AT_MOST = 0.05
"""Largest share of kernel time without a family."""


def family_of(name: str) -> str:
    """Family of a kernel by its name alone."""
    return str(describe_kernels(pl.Series([name]))["family"][0])


def test_the_zoo_is_large_public_and_of_many_kinds() -> None:
    assert len({row["name"] for row in ROWS}) == len(ROWS) >= 300
    assert {row["half"] for row in ROWS} == {"patterns", "blind"}
    assert all(row["source"].startswith("https://") for row in ROWS)
    assert len({row["source"] for row in ROWS}) >= 25
    by_rows_or_operators = {"memset", "indexing"}
    assert set(FAMILIES) - {row["family"] for row in ROWS} == by_rows_or_operators
    unknown = [row for row in ROWS if row["family"] == "other"]
    assert len(unknown) < AT_MOST * len(ROWS)


def test_every_name_in_the_zoo_tells_its_family() -> None:
    families = describe_kernels(pl.Series([row["name"] for row in ROWS]))["family"].cast(pl.String)
    wrong = [
        f"{row['name'][:80]}: {family}, is {row['family']}"
        for row, family in zip(ROWS, families, strict=True)
        if family != row["family"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*)", "all_to_all"),
        ("void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*)", "all_to_all"),
        ("EpCombineInterNodeV1Kernel", "all_to_all"),
        ("void ns::<unnamed>::twoshotAllreduceKernel<8>(x)", "all_reduce"),
        ("alltoall_on_stream_kernel<float>(x)", "all_to_all"),
    ],
)
def test_a_kernel_beyond_nccl_names_its_collective(name: str, collective: str) -> None:
    assert family_of(name) == "communication"
    assert kernel_kind(name) == collective


def test_inductor_kernel_named_after_a_collective_is_none() -> None:
    assert family_of("triton_poi_fused_all_reduce_add_wait_tensor_1") == "elementwise"


def test_a_gather_is_communication_only_between_devices() -> None:
    assert family_of("small_gather_kernel") == "embedding"
    assert family_of("mnnvl_lamport_all_gather") == "communication"


@pytest.mark.parametrize("name", trace_names())
def test_nearly_all_kernel_time_has_a_family(name: str) -> None:
    path = public_file(name)
    try:
        a = Analysis(read_trace(path))
    except AdvisorError:
        pytest.skip("no trace of kernels")
    rows = a.trace.gpu.select("name", "kind", "dur").with_columns(a.kernels["family"])
    # ``torch.cuda._sleep`` keeps a device busy with nothing: rightly of no family
    rows = rows.filter(
        (pl.col("kind") == "kernel") & ~pl.col("name").cast(pl.String).str.contains("spin_kernel")
    )
    unknown = rows.filter(pl.col("family") == "other")["dur"].sum()
    assert unknown <= AT_MOST * rows["dur"].sum()
