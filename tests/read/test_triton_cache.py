"""Triton's cache: figures of each kernel equal to those of the compilers' own tools."""

from __future__ import annotations

import json
import random
import shutil
import tarfile
from pathlib import Path

import pytest

from advisor import cli
from advisor.advise.engine import Options, analyze
from advisor.core.errors import AdvisorError
from advisor.core.kernel_profile import CompiledKernel
from advisor.core.report import Report
from advisor.measure.device.kernel_profiles import compiled_kernels
from advisor.read import ReadOptions
from advisor.read.formats.kernel_profiles.triton_cache import read_triton_cache
from advisor.testing import TraceBuilder
from benchmarks.public_traces import path_of

PUBLISHED = {
    ("add_kernel", "sm_80", 4, (3,), 0, 26, 0, 0),
    ("add_kernel", "sm_90", 4, (3,), 0, 26, 0, 0),
    ("add_kernel", "gfx942", 4, (3,), 0, 10, 0, 0),
    ("sine_kernel", "sm_80", 4, (3,), 0, 32, 40, 0),
    ("softmax_kernel", "sm_80", 8, (2, 3), 32, 34, 0, 0),
    ("matmul_kernel", "sm_80", 2, (2,), 10240, 255, 616, 616),
    ("matmul_kernel", "sm_80", 4, (3,), 20480, 192, 0, 0),
    ("matmul_kernel", "sm_80", 4, (4,), 24576, 96, 0, 0),
    ("matmul_kernel", "sm_90", 2, (2,), 10240, 255, 480, 480),
    ("matmul_kernel", "gfx942", 2, (2,), 24576, 512, 360, 360),
}
"""Name, target, warps, stages, shared memory (the ``.json``); registers and local memory (REG and
STACK of ``cuobjdump --dump-resource-usage``, the ``.amdgcn`` assembly of LLVM); spills (``ptxas
-v`` has ``40 bytes stack frame, 0 bytes spill stores`` for the sine)."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    with tarfile.open(path_of("triton/cache.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "cache"


def kernels_of(cache: Path) -> tuple[CompiledKernel, ...]:
    return read_triton_cache(str(cache))[0].compiled


def write_entry(cache: Path, suffix: str, warps: int = 2) -> Path:
    """The matmul of so many warps in a module of a kind."""
    for file in sorted(cache.glob(f"*/matmul_kernel{suffix}")):
        if json.loads(file.with_suffix(".json").read_text())["num_warps"] == warps:
            return file
    raise AssertionError(suffix)


def test_every_figure_is_that_of_the_compilers_own_tools(cache: Path) -> None:
    kernels = kernels_of(cache)
    assert {
        (k.name, k.target, k.num_warps, k.num_stages, k.shared, k.registers, k.local, k.spilled)
        for k in kernels
    } == PUBLISHED
    assert {k.threads for k in kernels if k.target == "gfx942"} == {128, 256}  # warps of 64
    source = (cache.parent / "kernels.py").read_text().splitlines()
    for kernel in kernels:
        assert kernel.place is not None and kernel.place[0] == "/tmp/example/kernels.py"
        assert source[kernel.place[1] - 1].startswith(f"def {kernel.name}(")
    (twice,) = (k for k in kernels if k.name == "softmax_kernel")
    assert twice.variants == 2


def test_a_kernel_without_a_cache_entry_is_unknown_and_not_zero(cache: Path) -> None:
    spilling = write_entry(cache, ".cubin")
    spilling.with_suffix(".ptx").unlink()
    write_entry(cache, ".hsaco").unlink()
    for file in cache.glob("*/sine_kernel.*"):
        if file.suffix != ".json":
            file.write_bytes(b"")
    result = {(k.name, k.target): k for k in kernels_of(cache) if k.num_warps == 2}
    target = json.loads(spilling.with_suffix(".json").read_text())["target"]["arch"]
    kernel = result["matmul_kernel", f"sm_{target}"]
    assert kernel.registers == 255 and kernel.local and kernel.spilled is None
    assert result["matmul_kernel", "gfx942"][6:9] == (None, None, None)
    (sine,) = (k for k in kernels_of(cache) if k.name == "sine_kernel")
    assert sine.registers is sine.spilled is sine.place is None


def test_metadata_of_older_versions_is_read(cache: Path) -> None:
    file = write_entry(cache, ".cubin").with_suffix(".json")
    old = {"name": "matmul_kernel", "num_warps": 2, "num_stages": 2, "shared": 10240}
    for how, name in (
        ({"target": ["cuda", 80]}, "sm_80"),  # 2.2
        ({"device_type": "cuda", "arch": 80, "constants": {"4": 1024}}, "sm_80"),  # 2.1
        ({}, ""),
        ({"target": "cuda:80:32"}, ""),
        ({"target": {"backend": "cuda", "arch": [80]}}, ""),
    ):
        file.write_text(json.dumps({**old, **how}))
        kernel = next(k for k in kernels_of(file.parent) if k.num_warps == 2)
        assert (kernel.target, kernel.threads, kernel.registers) == (name, 64, 255)


def test_links_out_of_the_folder_are_not_followed(cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    folder = write_entry(cache, ".cubin").parent
    (other / "linked").symlink_to(folder)
    with pytest.raises(AdvisorError, match="no kernel can be read"):
        read_triton_cache(str(other))
    kernel_folder = other / "mine"
    shutil.copytree(folder, kernel_folder)
    (kernel_folder / "matmul_kernel.cubin").unlink()
    (kernel_folder / "matmul_kernel.cubin").symlink_to(folder / "matmul_kernel.cubin")
    assert kernels_of(other)[0].registers is None


@pytest.mark.parametrize("suffix", [".cubin", ".hsaco", ".json", ".ttir", ".ptx"])
def test_a_damaged_file_costs_its_figures_and_no_more(cache: Path, suffix: str) -> None:
    file = write_entry(cache, suffix)
    sound, draw = file.read_bytes(), random.Random(11)
    for _ in range(60):
        broken = bytearray(sound[: draw.choice([len(sound), draw.randrange(len(sound))])])
        for _ in range(draw.randrange(0, 40)):
            ends = draw.choice(
                [(0, 80), (0, len(broken)), (max(0, len(broken) - 2000), len(broken))]
            )
            place = draw.randrange(*ends) if ends[0] < ends[1] else 0
            broken[place : place + 1] = bytes([draw.randrange(256)])
        file.write_bytes(broken)
        try:
            kernels = kernels_of(file.parent)
        except AdvisorError as error:
            assert "\n" not in str(error) and suffix == ".json"
            continue
        assert [k.registers is None or k.registers >= 0 for k in kernels] == [True]


def test_a_folder_without_a_sound_kernel_is_refused_in_a_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in cache.glob("*/*.json"):
        file.write_text("[" * 100_000 if file.name.startswith("a") else '{"name": 3}')
    trace = TraceBuilder().write(tmp_path / "trace.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments in ([str(cache)], [str(empty)], [str(trace), "--kernel-profile", str(empty)]):
        assert cli.run(["analyze", *arguments]) == 2
        text = capsys.readouterr().err.strip()
        assert text.count("\n") == 0 and "Traceback" not in text
    assert cli.run(["analyze", "--kernel-profile", str(cache)]) == 2
    assert "no kernel can be read" in capsys.readouterr().err


def test_one_damaged_kernel_is_counted_and_the_others_are_shown(cache: Path) -> None:
    write_entry(cache, ".cubin").with_suffix(".json").write_text("{")
    report = analyze(str(cache))
    assert len(report.triton_kernels) == len(PUBLISHED) - 1
    assert "Left out of the kernels of Triton: damaged kernels." in report.limits


def test_a_cache_alone_is_a_report(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["analyze", str(cache)]) == 0
    text = capsys.readouterr().out
    assert "10 kernels compiled by Triton: 3 spill registers" in text
    assert "kernels.py:34" in text and "hardware counters" not in text
    assert max(map(len, text.splitlines())) <= 80
    report = analyze(str(cache))
    assert [note.rule for note in report.notes] == ["triton-register-spills"]
    assert report.triton_kernels[0].spilled_bytes == 616


def analyze_with_cache(trace: Path, cache: Path) -> Report:
    return analyze(str(trace), Options(read=ReadOptions(kernel_profile=str(cache))))


def steps(
    us: float, *, threads: int = 64, registers: int = 255, shared: int = 10240
) -> TraceBuilder:
    """Four steps of the spilling product and of another one with the same name."""
    b = TraceBuilder()
    for _ in range(4):
        with b.step():
            with b.op("aten::mm"):
                sizes = {"registers": registers, "shared": shared}
                b.launch("matmul_kernel", us, blocks=64, threads=threads, **sizes)
                b.launch("matmul_kernel", 2000, threads=128, registers=96, shared=24576)
                b.launch("add_kernel", 500, threads=128, registers=26, shared=0)
            b.sync()
    return b


def test_slow_spilling_kernel_is_first_with_a_trace(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = steps(900).write(tmp_path / "trace.json")
    report = analyze_with_cache(trace, cache)
    views = [view for view in report.triton_kernels if view.step_ns is not None]
    assert [(view.registers, view.launches, view.step_ns) for view in views] == [
        (255, 1.0, pytest.approx(900_000)),
        (96, 1.0, pytest.approx(2_000_000)),
        (26, 1.0, pytest.approx(500_000)),
    ]
    note = next(n for n in [*report.findings, *report.notes] if n.rule == "triton-register-spills")
    assert "616 B" in note.summary and "26%" in note.summary  # 0.9 of 3.4 ms
    assert note.where[0].file == "/tmp/example/kernels.py" and note.where[0].line == 34
    assert cli.run(["analyze", str(trace), "--kernel-profile", str(cache), "--details"]) == 0
    assert "Kernels compiled by Triton · 7 more are not in this trace" in capsys.readouterr().out


@pytest.mark.parametrize("size", [{"threads": 256}, {"registers": 254}, {"shared": 4096}])
def test_a_launch_of_another_size_is_of_another_compilation(
    cache: Path, tmp_path: Path, size: dict[str, int]
) -> None:
    trace = steps(900, **size).write(tmp_path / "trace.json")
    report = analyze_with_cache(trace, cache)
    assert [v.registers for v in report.triton_kernels if v.step_ns] == [96, 26]
    assert not [n for n in report.notes if n.rule == "triton-register-spills"]


def test_a_trace_of_another_program_has_none_of_the_kernels(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(path_of("triton_example.json.gz"))
    assert cli.run(["analyze", trace, "--kernel-profile", str(cache)]) == 0
    text = capsys.readouterr().out
    assert "Kernels compiled by Triton · none is in this trace" in text
    assert "spills 616 B" not in text  # no advice on what the program does not run


def test_launches_shared_by_two_compilations_belong_to_neither() -> None:
    b = steps(900)
    for local in (0, 616):
        b.compiled_kernel("matmul_kernel", threads=64, shared=10240, local=local, spilled=local)
    assert [len(k.rows) for k in compiled_kernels(b.analysis())] == [0, 0]


def test_occupancy_is_that_of_the_occupancy_calculator(cache: Path) -> None:
    """Occupancy by hand for an A100: 65,536 registers in four parts. A warp of 255 registers
    takes 8,192, so two fit into each part: 8 of 64 warps. With 26 registers 2,048 threads fit."""
    report = analyze(str(cache))
    result = {(v.name, v.target, v.num_warps, v.shared_bytes): v for v in report.triton_kernels}
    spilling = result["matmul_kernel", "sm_80", 2, 10240]
    assert (spilling.occupancy, spilling.occupancy_limiter) == (0.125, "registers")
    full = result["add_kernel", "sm_80", 4, 0]
    assert (full.occupancy, full.occupancy_limiter) == (1.0, None)
    # 24,576 + 1,024 bytes: 6 blocks of 164 KiB; 96 registers: 5 blocks of 4 warps
    assert result["matmul_kernel", "sm_80", 4, 24576].occupancy == 5 * 4 / 64
    assert result["add_kernel", "gfx942", 4, 0].occupancy is None
