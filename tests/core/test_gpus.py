"""The table of GPUs says what their makers publish, and names find the right one or none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from advisor.core import gpus as hardware
from advisor.core.errors import AdvisorError
from advisor.core.gpus import GpuSpec, lookup

GPUS = hardware.known_gpus()
by_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
GiB = 2**30


def find(name: str, **seen: object) -> GpuSpec:
    gpu = lookup(name, **seen)  # type: ignore[arg-type]
    assert gpu is not None, name
    return gpu


# --- the table ---------------------------------------------------------------------------------


@by_gpu
def test_every_entry_names_its_sources(gpu: GpuSpec) -> None:
    assert gpu.sources
    for source in gpu.sources:
        assert source.title and source.url.startswith("https://")


def test_names_are_unique() -> None:
    names = [gpu.name for gpu in GPUS]
    assert len(set(names)) == len(names)
    assert all(gpu.names or gpu.generic_names for gpu in GPUS)


@by_gpu
def test_peaks_rise_as_formats_shrink(gpu: GpuSpec) -> None:
    order = [gpu.peak(dtype) for dtype in ("fp64", "fp32", "tf32", "bf16", "fp8")]
    present = [peak for peak in order if peak is not None]
    assert present == sorted(present)
    fp16, bf16, fp8, tf32 = (gpu.peak(dtype) for dtype in ("fp16", "bf16", "fp8", "tf32"))
    assert fp16 is not None
    if bf16 is not None:
        assert bf16 == fp16
        if tf32 is not None:
            assert tf32 * 2 == pytest.approx(bf16, rel=0.02)
        if fp8 is not None:
            assert fp8 == pytest.approx(bf16 * 2, rel=0.02)


# FLOP a clock of one SM or compute unit, a multiply-add counted as two: of the fp32 lanes (AMD:
# matrix cores), and of the dense fp16 matrix units with fp32 accumulation. From the architecture
# whitepapers; a figure with sparsity would come out at twice the value here.
PER_CLOCK = {
    "sm_70": (128, 1024),
    "sm_75": (128, 1024),
    "sm_80": (128, 2048),
    "sm_86": (256, 1024),
    "sm_89": (256, 1024),
    "sm_90": (256, 4096),
    "gfx90a": (256, 1024),
    "gfx942": (256, 2048),
    "gfx950": (256, 4096),
    "sm_120": (256, 1024),
}


@pytest.mark.parametrize(
    "gpu", [gpu for gpu in GPUS if gpu.boost_mhz is not None], ids=lambda gpu: gpu.name
)
def test_peaks_are_the_chips_dense_arithmetic(gpu: GpuSpec) -> None:
    assert gpu.boost_mhz is not None
    fp32, fp16 = PER_CLOCK[gpu.arch]
    if "GeForce" in gpu.name or gpu.name == "NVIDIA L40":
        fp16 //= (
            2  # with fp32 accumulation GeForce cards run at half the rate of the chip, L40s too
        )
    clocks = gpu.sms * gpu.boost_mhz * 1e6
    assert gpu.peak("fp32") == pytest.approx(fp32 * clocks, rel=0.02)
    dense = gpu.peak("fp16")
    assert dense is not None
    # Hopper's tensor cores are rated at a lower clock than its vector units: 1830 MHz to 1980 on
    # the SXM5, 1620 to 1755 on the PCIe card, about 1545 to 1785 on the NVL.
    assert (0.86 if gpu.arch == "sm_90" else 0.98) <= dense / (fp16 * clocks) <= 1.01


# Dense bf16 (fp16 for the first two) TFLOP/s and GB/s, as commonly cited for each card.
@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "gb_per_s"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125, 900),
        ("Tesla T4", "fp16", 65, 320),
        ("NVIDIA A10", "bf16", 125, 600),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312, 2039),
        ("NVIDIA L4", "bf16", 121, 300),
        ("NVIDIA L40S", "bf16", 362, 864),
        ("NVIDIA H100 80GB HBM3", "bf16", 989, 3350),
        ("NVIDIA H100 PCIe", "bf16", 756, 2039),
        ("NVIDIA H100 NVL", "bf16", 835, 3938),
        ("NVIDIA H200", "bf16", 989, 4800),
        ("NVIDIA B200", "bf16", 2250, 7700),
        ("NVIDIA GB200", "bf16", 2500, 8000),
        ("NVIDIA GeForce RTX 3090", "bf16", 71, 936),
        ("NVIDIA GeForce RTX 4090", "bf16", 165, 1008),
        ("NVIDIA GeForce RTX 5090", "bf16", 209, 1792),
        ("AMD Instinct MI210", "bf16", 181, 1638),
        ("AMD Instinct MI250X", "bf16", 191, 1638),
        ("AMD Instinct MI300X", "bf16", 1307, 5325),
        ("AMD Instinct MI325X", "bf16", 1307, 6000),
        ("Tesla V100S-PCIE-32GB", "fp16", 130, 1134),
        ("NVIDIA A30", "bf16", 165, 933),
        ("NVIDIA A40", "bf16", 149.7, 696),
        ("NVIDIA RTX A6000", "bf16", 154.8, 768),
        ("NVIDIA L40", "bf16", 181.05, 864),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2, 960),
        ("NVIDIA H200 NVL", "bf16", 835.5, 4800),
        ("NVIDIA GH200 480GB", "bf16", 989, 4000),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250, 8000),
        ("NVIDIA GB300", "bf16", 2500, 8000),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8, 616),
        ("NVIDIA TITAN RTX", "fp16", 130.5, 672),
        ("NVIDIA GeForce RTX 3070", "bf16", 40.6, 448),
        ("NVIDIA GeForce RTX 5070 Ti", "bf16", 87.9, 896),
        ("AMD Instinct MI300A", "bf16", 980.6, 5300),
        ("AMD Instinct MI350X", "bf16", 2307, 8000),
        ("AMD Instinct MI355X", "bf16", 2517, 8000),
    ],
)
def test_peaks_are_dense(name: str, dtype: str, tflops: float, gb_per_s: float) -> None:
    gpu = find(name)
    assert gpu.peak(dtype) == pytest.approx(tflops * 1e12, rel=0.005)
    assert gpu.bandwidth == pytest.approx(gb_per_s * 1e9, rel=0.001)


@by_gpu
def test_pcie_is_one_direction_after_line_encoding(gpu: GpuSpec) -> None:
    if gpu.pcie is None:
        assert gpu.pcie_bandwidth is None
        return
    transfers = {3: 8e9, 4: 16e9, 5: 32e9}[gpu.pcie.generation]
    by_hand = transfers * gpu.pcie.lanes / 8 * 128 / 130
    assert gpu.pcie_bandwidth == pytest.approx(by_hand, rel=0.001)


def test_links_are_one_direction() -> None:
    # NVIDIA prints 900 GB/s for NVLink 4, both directions together.
    assert find("NVIDIA H100 80GB HBM3").link_bandwidth == 450e9
    assert find("NVIDIA L4").link_bandwidth is None


# --- spellings of number formats ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("spellings", "tflops"),
    [
        (("double", "torch.float64", "fp64"), 66.9),
        (("float", "torch.float32", "Float"), 66.9),
        (("tf32", "TF32"), 494.7),
        (("c10::Half", "half", "torch.float16", "Half"), 989.4),
        (("c10::BFloat16", "bfloat16", "BFloat16"), 989.4),
        (("fp8", "Float8_e4m3fn", "c10::Float8_e5m2", "torch.float8_e4m3fnuz"), 1978.9),
        (("int8", "signed char", "torch.int8"), 1978.9),
    ],
)
def test_any_spelling_of_a_format_will_do(spellings: tuple[str, ...], tflops: float) -> None:
    h100 = find("NVIDIA H100 80GB HBM3")
    assert {h100.peak(spelling) for spelling in spellings} == {tflops * 1e12}


@pytest.mark.parametrize("dtype", ["", "long int", "bool", "c10::complex<float>", "sources"])
def test_a_format_without_matrix_units_has_no_peak(dtype: str) -> None:
    assert find("NVIDIA H100 80GB HBM3").peak(dtype) is None


def test_a_format_the_chip_lacks_has_no_peak() -> None:
    assert find("Tesla V100-SXM2-16GB").peak("c10::BFloat16") is None
    assert find("NVIDIA A100-SXM4-80GB").peak("fp8") is None


# --- lookup ------------------------------------------------------------------------------------


# Device properties of public traces: name, SMs, memory, compute capability.
@pytest.mark.parametrize(
    ("name", "sms", "memory_bytes", "compute", "expected"),
    [
        ("NVIDIA A100-PG509-200", 108, 42505273344, (8, 0), "NVIDIA A100 SXM4 40GB"),
        ("NVIDIA A100-PG509-200", 108, 42297524224, (8, 0), "NVIDIA A100 SXM4 40GB"),
        ("NVIDIA B200", 148, 191503138816, (10, 0), "NVIDIA B200"),
        ("NVIDIA H100 80GB HBM3", 132, 85018279936, (9, 0), "NVIDIA H100 SXM5 80GB"),
        ("AMD Instinct MI210", 104, 68702699520, (9, 0), "AMD Instinct MI210"),
        (
            "AMD Radeon Graphics",
            104,
            68702699520,
            (9, 0),
            "AMD Instinct MI210 or MI250 (one GCD)",
        ),
        ("AMD Instinct MI300X", 304, 206141652992, (9, 4), "AMD Instinct MI300X"),
        ("Tesla V100-SXM2-16GB", 80, 16945512448, (7, 0), "NVIDIA V100 SXM2 16GB"),
    ],
)
def test_devices_of_public_traces_are_found(
    name: str, sms: int, memory_bytes: int, compute: tuple[int, int], expected: str
) -> None:
    result = find(name, sms=sms, memory_bytes=memory_bytes, compute=compute)
    assert result.name == expected


@by_gpu
def test_every_name_finds_its_entry(gpu: GpuSpec) -> None:
    for name in (*gpu.names, *gpu.generic_names):
        seen = {"sms": gpu.sms, "memory_bytes": gpu.memory_bytes, "compute": gpu.compute}
        assert find(name, **seen) is gpu
        assert find(name.upper(), **seen) is gpu
        assert find(name.removeprefix("NVIDIA "), **seen) is gpu


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [("Tesla T4", 14914), ("NVIDIA A10", 22723), ("NVIDIA H200", 143771), ("NVIDIA L40S", 45467)],
)
def test_memory_held_back_by_driver_and_ecc_does_not_hide_a_gpu(name: str, mebibytes: int) -> None:
    assert find(name, memory_bytes=mebibytes * 2**20).names == (name,)


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        " ",
        "NVIDIA",
        "Some Future GPU",
        "NVIDIA GeForce RTX 3090 Ti Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA A10G",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H200 NVL-8",
        "NVIDIA GH200",
        "GRID A100-10C",
        "AMD Instinct MI308X",
        "AMD Radeon Graphics",
    ],
)
def test_other_devices_are_unknown(name: str | None) -> None:
    assert lookup(name) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 4080 SUPER", "NVIDIA GeForce RTX 4080"),
        ("NVIDIA H200 NVL", "NVIDIA H200"),
        ("AMD Instinct MI300A", "AMD Instinct MI300X"),
    ],
)
def test_a_longer_name_is_another_card(name: str, other: str) -> None:
    assert find(name) is not find(other)


@by_gpu
def test_measured_rates_have_a_source_and_are_possible(gpu: GpuSpec) -> None:
    """No benchmark moves more than the memory's pins do; GeForce cards clock above what is
    published, by some 10%, and an H200 NVL by 2%."""
    for dtype, rate in gpu.measured.matmul.items():
        assert rate.source.url.startswith("https://")
        peak = gpu.peak(dtype)
        assert peak is not None
        assert 0.5 * peak < rate.rate * 1e12 < 1.11 * peak
    memory = gpu.measured.memory
    if memory is not None:
        assert memory.source.url.startswith("https://")
        assert 0.65 * gpu.bandwidth < memory.rate * 1e9 < gpu.bandwidth


def test_16_bit_formats_of_equal_rate_are_interchangeable() -> None:
    a100 = find("NVIDIA A100-SXM4-80GB")
    assert a100.measured_matmul("c10::Half") == a100.measured_matmul("bf16")
    v100 = find("Tesla V100-SXM2-16GB")
    assert v100.measured_matmul("fp16") is not None
    assert v100.measured_matmul("bf16") is None  # it has no unit for it
    assert a100.measured_matmul("fp32") is None  # nobody's figure was found


def test_a_slice_of_a_gpu_is_unknown() -> None:
    full_gpu = {"memory_bytes": 42505273344, "compute": (8, 0)}
    assert lookup("NVIDIA A100-SXM4-40GB", sms=98, **full_gpu) is None  # type: ignore[arg-type]
    assert lookup("NVIDIA A100-SXM4-40GB", memory_bytes=5 * GiB) is None
    assert lookup("AMD Instinct MI300X", sms=38) is None


def test_gpu_with_contradictory_properties_is_unknown() -> None:
    assert lookup("NVIDIA A100-PG509-200", memory_bytes=80 * GiB) is None
    assert lookup("NVIDIA H100 PCIe", sms=132) is None
    assert lookup("Tesla T4", compute=(8, 0)) is None


def test_ambiguous_gpu_name_needs_further_properties() -> None:
    name = "NVIDIA GeForce RTX 3080"
    assert lookup(name) is None
    assert find(name, sms=68).name == "NVIDIA GeForce RTX 3080 10GB"
    assert find(name, memory_bytes=12 * GiB).name == "NVIDIA GeForce RTX 3080 12GB"
    assert find("AMD Instinct MI250X / MI250", sms=110).name == "AMD Instinct MI250X (one GCD)"


def test_a_generic_name_is_believed_only_with_all_properties() -> None:
    name = "AMD Radeon Graphics"
    mi250x = find(name, sms=110, memory_bytes=64 * GiB, compute=(9, 0))
    assert mi250x.name == "AMD Instinct MI250X (one GCD)"
    assert lookup(name, sms=110, memory_bytes=64 * GiB) is None
    assert lookup(name, sms=2, memory_bytes=512 * 2**20, compute=(10, 3)) is None


def test_the_unnamed_mi210_or_mi250_is_not_a_faster_than_either() -> None:
    seen = {"sms": 104, "memory_bytes": 64 * GiB, "compute": (9, 0)}
    unnamed = find("AMD Radeon Graphics", **seen)
    for either in (find("AMD Instinct MI210"), find("AMD Instinct MI250")):
        assert unnamed.bandwidth == either.bandwidth
        assert unnamed.peak("fp16") == pytest.approx(either.peak("fp16"), rel=0.001)


def test_importing_is_cheap_and_loads_nothing() -> None:
    code = (
        "import sys, advisor.core.gpus as h;"
        "heavy = {'polars', 'torch', 'numpy', 'dash'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "assert h.known_gpus.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- a model by its words, and by the user ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("A100-SXM-80GB", {}, "NVIDIA A100 SXM4 80GB"),
        ("NVIDIA A100 80GB", {"sms": 108}, "NVIDIA A100 PCIe 80GB"),  # of nearly equal ones, slower
        ("NVIDIA A100", {"memory_bytes": 40 * GiB}, "NVIDIA A100 SXM4 40GB"),
        ("NVIDIA H100 80GB HBM2e", {"sms": 114}, "NVIDIA H100 PCIe"),
        ("NVIDIA H100 SXM5 80GB", {}, "NVIDIA H100 SXM5 80GB"),
        ("Tesla V100-DGXS-32GB", {"sms": 80, "compute": (7, 0)}, "NVIDIA V100 SXM2 32GB"),
        ("V100 32GB", {}, "NVIDIA V100 PCIe 32GB"),
        ("NVIDIA PG509-210", {"memory_bytes": 85198045184}, "NVIDIA A100 SXM4 80GB"),
        ("NVIDIA A800-SXM4-80GB", {"sms": 108}, "NVIDIA A800 SXM4 80GB"),
        ("NVIDIA A800 80GB PCIe", {}, "NVIDIA A800 PCIe 80GB"),
        ("NVIDIA H800", {"sms": 132}, "NVIDIA H800 SXM5 80GB"),
        ("NVIDIA H20", {"sms": 78}, "NVIDIA H20 96GB"),
        ("NVIDIA T4", {}, "NVIDIA T4"),
        ("GeForce RTX 4090", {}, "NVIDIA GeForce RTX 4090"),
        ("MI300X", {"sms": 304}, "AMD Instinct MI300X"),
    ],
)
def test_a_model_is_identified_by_its_words(
    name: str, seen: dict[str, object], expected: str
) -> None:
    assert find(name, **seen).name == expected


@pytest.mark.parametrize("name", ["NVIDIA A100 SXM 64GB", "NVIDIA H100", "NVIDIA GH200", "80GB"])
def test_variants_of_different_rates_are_not_guessed_between(name: str) -> None:
    assert lookup(name) is None


def test_the_user_names_the_gpu_that_a_file_does_not() -> None:
    from advisor.measure import Analysis
    from advisor.read import ReadOptions
    from advisor.read.registry import read_bytes

    text = (
        b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2,"pid":0,"tid":7,'
        b'"args":{"device":0,"stream":7}}]}'
    )
    unnamed = Analysis(read_bytes(text))
    assert unnamed.hardware is None
    named = Analysis(read_bytes(text, options=ReadOptions(recorded_gpu="a100 sxm4 80gb")))
    assert named.hardware is find("NVIDIA A100-SXM4-80GB")
    assert named.device is not None and named.device.name == "NVIDIA A100 SXM4 80GB"
    with pytest.raises(AdvisorError, match="no GPU 'z9' is known"):
        read_bytes(text, options=ReadOptions(recorded_gpu="z9"))
