"""What one GPU can do: a plain record with its units, and the names of number formats."""

from __future__ import annotations

from typing import Literal

import msgspec

_FORMATS = {
    "fp64": ("fp64", "float64", "double"),
    "fp32": ("fp32", "float32", "float"),
    "tf32": ("tf32", "tensorfloat32"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
    "fp8": (
        "fp8",
        "float8",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ),
    "fp4": ("fp4", "float4_e2m1fn_x2"),
    "int8": ("int8", "signed char", "char"),
}
_CANONICAL = {spelling: name for name, spellings in _FORMATS.items() for spelling in spellings}


def canonical_dtype(dtype: str) -> str | None:
    """Name a number format as `Peaks` does, whoever spelled it.

    Takes torch's spellings ("torch.bfloat16", "half"), those of Kineto's ``Input type``
    ("c10::Half", "float", "signed char") and of collectives ("BFloat16", "Float8_e4m3fn").
    Returns None for a format that matrix units have no rate for ("long int", "bool", "").
    """
    bare = dtype.strip().removeprefix("c10::").removeprefix("torch.").casefold()
    return _CANONICAL.get(bare)


class PeakRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense matrix-multiply peaks, by the format of the inputs; never with structured sparsity.

    The rate of the fastest unit that multiplies matrices in that format: tensor or matrix cores
    where the chip has them for it, the vector units otherwise. None where the chip has no unit for
    the format, or no published figure was found.
    """

    fp64: float | None
    """TFLOP/s."""
    fp32: float | None
    """TFLOP/s, in full fp32: on NVIDIA the CUDA cores (TF32 is `tf32`), on AMD the matrix cores."""
    tf32: float | None
    """TFLOP/s."""
    fp16: float | None
    """TFLOP/s, accumulated in fp32 (GeForce cards are twice as fast accumulating in fp16)."""
    bf16: float | None
    """TFLOP/s, accumulated in fp32."""
    fp8: float | None
    """TFLOP/s, accumulated in fp32."""
    int8: float | None
    """TOP/s (integer operations), accumulated in int32."""
    fp4: float | None = None
    """TFLOP/s, NVFP4 or MXFP4, accumulated in fp32."""


class Pcie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's PCIe interface; the slot it sits in may be slower."""

    generation: int
    """PCIe generation."""
    lanes: int
    """Number of lanes."""
    gb_per_s: float
    """GB/s (1e9 bytes/s) in ONE direction, after line encoding and before packet overhead."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links from this GPU to its peers, all of them together."""

    name: str
    """"NVLink 4", "Infinity Fabric", ..."""
    gb_per_s: float
    """GB/s (1e9 bytes/s) in ONE direction; vendors usually print both directions summed."""


class GpuTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public document that figures were taken from."""

    title: str
    url: str


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody measured, and where it can be read."""

    rate: float
    """TFLOP/s of a matrix product, or GB/s (1e9 bytes/s) of memory, read and written together."""
    source: GpuTable


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that public benchmarks reached on this GPU; what is not in it was not found."""

    matmul: dict[str, Rate] = {}
    """Fastest matrix product of a search over sizes, by the format of the inputs."""
    memory: Rate | None = None
    """STREAM triad or copy over arrays much larger than the caches."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU as a framework sees it: a device of a trace, so one GCD of an MI250.

    Every rate is what the vendor publishes, a ceiling that no kernel reaches; None is "not known"
    or "does not have it", never a guess.
    """

    name: str
    """Canonical name, with the form factor and the memory where there are several."""
    vendor: Literal["nvidia", "amd"]
    """Who makes the chip."""
    names: tuple[str, ...]
    """Device names as drivers report them."""
    generic_names: tuple[str, ...]
    """Names that other devices bear too: believed only where every reported property agrees."""
    arch: str
    """Compilation target: "sm_90", "gfx942"."""
    compute: tuple[int, int]
    """Compute capability (major, minor) as `deviceProperties` gives it; for AMD the gfx digits."""
    sms: int
    """Streaming multiprocessors (NVIDIA) or compute units (AMD) of the whole device."""
    max_threads_per_sm: int
    """Threads resident on one SM or compute unit, at most."""
    boost_mhz: int | None
    """Boost clock of the vector units, MHz (Hopper's tensor cores are rated at a lower one)."""
    peak_tflops: PeakRates
    """Dense matrix-multiply peaks, TFLOP/s. See `peak` for FLOP/s by any spelling."""
    memory_bytes: int
    """Memory as sold, bytes; the driver reports somewhat less."""
    memory_gb_per_s: float
    """Memory bandwidth, GB/s (1e9 bytes/s). See `bandwidth` for bytes/s."""
    l2_bytes: int | None
    """L2 cache, bytes, summed over the chip's partitions."""
    pcie: Pcie | None
    """Host interface; None where the host is reached by something else."""
    link: Link | None
    """Links to peer GPUs that come with the board; None where there are none, where they are an
    optional bridge, or where they differ from peer to peer."""
    note: str | None
    """How the figures were derived where they are not printed as such, and what to know of them."""
    sources: tuple[GpuTable, ...]
    """Where the figures come from."""
    measured: Measured = Measured()
    """What benchmarks reached, where one was found."""

    def peak(self, dtype: str) -> float | None:
        """Dense peak of matrix multiplication in `dtype`, FLOP/s (OP/s for int8).

        `dtype` in any spelling `canonical_dtype` knows; None for others and for formats this GPU
        has no rate for. "float" is full fp32: ask for "tf32" where TF32 is allowed.
        """
        canonical = canonical_dtype(dtype)
        tflops: float | None = getattr(self.peak_tflops, canonical) if canonical else None
        return None if tflops is None else tflops * 1e12

    def measured_matmul(self, dtype: str) -> Rate | None:
        """The fastest matrix product that was measured in `dtype`, TFLOP/s; None: none was found.

        fp16 and bf16 stand for each other where the chip does both at one rate: the same units
        multiply them.
        """
        canonical = canonical_dtype(dtype)
        if canonical is None:
            return None
        result = self.measured.matmul.get(canonical)
        twin = {"fp16": "bf16", "bf16": "fp16"}.get(canonical)
        if result is None and twin is not None and self.peak(twin) == self.peak(canonical):
            result = self.measured.matmul.get(twin)
        return result

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth, bytes/s."""
        return self.memory_gb_per_s * 1e9

    @property
    def pcie_bandwidth(self) -> float | None:
        """PCIe bandwidth in one direction, bytes/s; None where the host link is not PCIe."""
        return None if self.pcie is None else self.pcie.gb_per_s * 1e9

    @property
    def link_bandwidth(self) -> float | None:
        """Bandwidth to peer GPUs in one direction, all links together, bytes/s."""
        return None if self.link is None else self.link.gb_per_s * 1e9
