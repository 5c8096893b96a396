"""Peaks and bandwidths of GPUs from public documents, by device name, and the rates that kernels
reach on them.

The figures are in ``gpus.json`` next to this file, one entry per GPU with its sources. Other GPUs
are unknown: `lookup` returns None, and the report says so. There is no default, because a roofline
with another card's peak is worse than none.

Kernels rarely reach a datasheet's peak. The fastest measured matrix products reach 51 to 108% of
it, and a STREAM triad 69 to 89% of the memory's. So the possible saving of a kernel is judged by
the rates that others reached."""

import re
from functools import cache
from importlib.resources import files
from statistics import median_low
from typing import Literal, NamedTuple

import msgspec

from advisor.core.errors import AdvisorError, suggest

_FORMATS = {
    "fp64": ("fp64", "float64", "double"),
    "fp32": ("fp32", "float32", "float"),
    "tf32": ("tf32", "tensorfloat32"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
    "fp8": ("fp8", "float8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "fp4": ("fp4", "float4_e2m1fn_x2"),
    "int8": ("int8", "signed char", "char"),
}
_CANONICAL = {spelling: name for name, spellings in _FORMATS.items() for spelling in spellings}


def canonical_dtype(dtype: str) -> str | None:
    """Return the name of a number format in the tables of rates, for any spelling.

    Takes torch's spellings ("torch.bfloat16", "half"), those of Kineto's ``Input type``
    ("c10::Half", "float", "signed char") and of collectives ("BFloat16", "Float8_e4m3fn"). Returns
    None for formats without a rate of matrix units ("long int", "bool", "")."""
    bare = dtype.strip().removeprefix("c10::").removeprefix("torch.").casefold()
    return _CANONICAL.get(bare)


class PeakRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense matrix-multiply peaks, by the format of the inputs, without structured sparsity.

    A peak is the rate of the fastest unit that multiplies matrices in the format: tensor or matrix
    cores if the chip has them for it, the vector units otherwise. None if the chip has no unit for
    the format, or if no published figure was found."""

    fp64: float | None
    """Peak in fp64, TFLOP/s."""
    fp32: float | None
    """Peak in full fp32, TFLOP/s: NVIDIA's CUDA cores (TF32 is `tf32`), AMD's matrix cores."""
    tf32: float | None
    """Peak in TF32, TFLOP/s."""
    fp16: float | None
    """Peak in fp16, TFLOP/s, accumulated in fp32 (GeForce: twice as fast accumulating in fp16)."""
    bf16: float | None
    """Peak in bf16, TFLOP/s, accumulated in fp32."""
    fp8: float | None
    """Peak in fp8, TFLOP/s, accumulated in fp32."""
    int8: float | None
    """Peak in int8, TOP/s (integer operations), accumulated in int32."""
    fp4: float | None = None
    """Peak in NVFP4 or MXFP4, TFLOP/s, accumulated in fp32."""


class Pcie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's PCIe interface. Its slot may be slower."""

    generation: int
    """PCIe generation."""
    lanes: int
    """Number of lanes."""
    gb_per_s: float
    """Rate in ONE direction, GB/s (1e9 bytes/s), after line encoding, before packet overhead."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All links from this GPU to its peers together."""

    name: str
    """Name of the links: "NVLink 4", "Infinity Fabric", ..."""
    gb_per_s: float
    """Bandwidth in ONE direction, GB/s (1e9 bytes/s). Vendors usually print the sum of both."""


class PublishedSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public document with figures."""

    title: str
    url: str


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured rate and its source."""

    rate: float
    """TFLOP/s of a matrix product, or GB/s (1e9 bytes/s) of memory reads and writes together."""
    source: PublishedSource


class MeasuredRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that public benchmarks reached on this GPU. Missing ones were not found."""

    matmul: dict[str, Rate] = {}
    """Rates of the fastest matrix products in a search over sizes, by the format of the inputs."""
    memory: Rate | None = None
    """Rate of a STREAM triad or copy over arrays much larger than the caches."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU as a framework sees it: a device of a trace, such as one GCD of an MI250.

    Every rate is the vendor's published peak, which no kernel reaches. None means that it is
    unknown or does not exist, never a guess."""

    name: str
    """Canonical name, with the form factor and memory size if there are several."""
    vendor: Literal["nvidia", "amd"]
    """Vendor of the chip."""
    names: tuple[str, ...]
    """Device names as drivers report them."""
    generic_names: tuple[str, ...]
    """Names that other devices share. They only count if every reported property agrees."""
    arch: str
    """Compilation target: "sm_90", "gfx942"."""
    compute: tuple[int, int]
    """Compute capability (major, minor) as in `deviceProperties`. For AMD, the gfx digits."""
    sms: int
    """Streaming multiprocessors (NVIDIA) or compute units (AMD) of the whole device."""
    max_threads_per_sm: int
    """Maximum number of resident threads of one SM or compute unit."""
    boost_mhz: int | None
    """Boost clock of the vector units, MHz (Hopper's tensor cores are rated at a lower one)."""
    peak_tflops: PeakRates
    """Dense matrix-multiply peaks, TFLOP/s. See `peak` for FLOP/s by any spelling."""
    memory_bytes: int
    """Memory as sold, bytes. The driver reports slightly less."""
    memory_gb_per_s: float
    """Memory bandwidth, GB/s (1e9 bytes/s). See `bandwidth` for bytes/s."""
    pcie: Pcie | None
    """Host interface, or None if the host link is not PCIe."""
    link: Link | None
    """Links to peer GPUs that come with the board. None if there are none, if they are an optional
    bridge, or if they differ between peers."""
    note: str | None
    """Note on figures that were derived because they are not published, and other remarks."""
    sources: tuple[PublishedSource, ...]
    """Sources of the figures."""
    measured: MeasuredRates = MeasuredRates()
    """Rates that public benchmarks reached, if any were found."""

    def peak(self, dtype: str) -> float | None:
        """Return the dense peak of matrix multiplication in `dtype`, FLOP/s (OP/s for int8).

        `dtype` is in any spelling that `canonical_dtype` knows. Returns None for others and for
        formats without a rate on this GPU. "float" is full fp32. Use "tf32" if TF32 is allowed."""
        canonical = canonical_dtype(dtype)
        tflops: float | None = getattr(self.peak_tflops, canonical) if canonical else None
        return None if tflops is None else tflops * 1e12

    def measured_matmul(self, dtype: str) -> Rate | None:
        """Return the fastest matrix product measured in `dtype`, TFLOP/s, or None if none was
        found.

        If the chip has the same peak for fp16 and bf16, either measurement counts for both, as the
        same units multiply them."""
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
        """PCIe bandwidth in one direction, bytes/s, or None if the host link is not PCIe."""
        return None if self.pcie is None else self.pcie.gb_per_s * 1e9

    @property
    def link_bandwidth(self) -> float | None:
        """Bandwidth of all links to peer GPUs in one direction, bytes/s, or None without links."""
        return None if self.link is None else self.link.gb_per_s * 1e9


__all__ = [
    "GpuMatch", "GpuSpec", "Link", "Pcie", "PeakRates", "PublishedSource", "canonical_dtype",
    "find_gpu", "is_at_least_as_fast", "known_gpus", "lookup",
]  # fmt: skip

# Drivers keep some memory back, and ECC on GDDR takes another sixteenth: a T4 sold with 16 GiB
# reports 14.8 (0.92). The nearest different memory size of one chip is 10 of 12 GiB (0.83).
_MIN_MEMORY, _MAX_MEMORY = 0.88, 1.01
_MAX_RATE_DIFFERENCE = 0.12
"""Maximum difference of rates between variants of a model (a V100's SXM2 board and PCIe card: 10%)
at which the slowest variant is taken if the variant is unknown."""
_COMMON_WORDS = frozenset("nvidia amd tesla geforce instinct gpu oam hbm2 hbm2e hbm3 hbm3e".split())
"""Words that do not distinguish models."""
_BOARD_PATTERN = re.compile(r"(sxm|pcie|nvl)\d?")
_MEMORY_PATTERN = re.compile(r"(\d+)gb?")


@cache
def known_gpus() -> tuple[GpuSpec, ...]:
    """Return all GPUs of the data file, in its order."""
    data = files(__name__).joinpath("gpus.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[GpuSpec, ...])


def lookup(
    name: str | None,
    *,
    sms: int | None = None,
    memory_bytes: int | None = None,
    compute: tuple[int, int] | None = None,
) -> GpuSpec | None:
    """Find a GPU by the name its driver reports, as in `deviceProperties[].name` of a trace.

    The name is one in the table, ignoring case and a leading vendor, or another spelling of the
    same model: `A100-SXM-80GB` and `NVIDIA A100 80GB` have the words of a model, a board and a
    memory size. An unknown word makes it another model ("RTX 3090" is neither "RTX 3090 Ti" nor the
    laptop GPU). Other known properties must agree: the number of SMs or compute units, the memory
    in bytes, the compute capability. A MIG slice or a partition has fewer SMs than the whole GPU
    and is therefore not found. Neither is a name that fits several cards of different rates ("RTX
    3080", with 10 or 12 GB) without other properties.

    Returns None if the device is not certainly one known GPU."""
    by_name, by_generic_name = _index_names()
    key = _normalize_name(name or "")
    candidates = by_name.get(key, ())
    if None not in (sms, memory_bytes, compute):
        if key:
            candidates += by_generic_name.get(key, ())
        else:  # a driver that reports no names
            candidates = tuple(gpu for gpu in known_gpus() if gpu.generic_names and gpu.names)
    if key and not candidates:
        candidates = _find_model(key)
    return _choose_slowest(
        [gpu for gpu in candidates if _matches_properties(gpu, sms, memory_bytes, compute)]
    )


class GpuMatch(NamedTuple):
    """A GPU that a short name refers to."""

    gpu: GpuSpec
    others: tuple[str, ...]
    """Names of other GPUs that also match the short name."""

    def note(self, name: str) -> str:
        """Say which GPU a short name was taken for. Empty if it matches no other GPU."""
        if not self.others:
            return ""
        alternatives = ", ".join(self.others[:4]) + (" …" if len(self.others) > 4 else "")
        return f"{name} is taken for {self.gpu.name}; it could be {alternatives}"


def find_gpu(name: str) -> GpuMatch:
    """Return the GPU with this driver name, or else the first whose name has all the words:
    ``h200``, ``a100 pcie 80gb``, ``h100 sxm``, ``rtx4090``.

    Raises AdvisorError if none matches."""
    wanted = _split_words(name)
    exact = [gpu for gpu in known_gpus() if name.strip().casefold() in map(str.casefold, gpu.names)]
    if len(exact) == 1:
        return GpuMatch(exact[0], ())
    matches = [gpu for gpu in known_gpus() if wanted and wanted <= _list_spellings(gpu.name)]
    if not matches:
        hint = "give a name such as 'h100 sxm', 'a100 80gb' or 'rtx 4090'"
        suggestion = suggest(name, (gpu.name for gpu in known_gpus()), hint)
        raise AdvisorError(f"no GPU {name!r} is known; {suggestion}")
    gpu = min(
        matches, key=lambda gpu: len(_parse_name(_split_words(gpu.name))[0])
    )  # not "Ti" unless given
    return GpuMatch(gpu, tuple(other.name for other in matches if other is not gpu))


def _split_words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _list_spellings(name: str) -> set[str]:
    """Return the words of a name. Boards are also included without their generation (``sxm`` for
    SXM5), and adjacent words also joined (``rtx4090``)."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    short = [match[1] if (match := _BOARD_PATTERN.fullmatch(word)) else word for word in words]
    ends = [(i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    return {"".join(each[i:j]) for each in (words, short) for i, j in ends}


def _matches_properties(
    gpu: GpuSpec, sms: int | None, memory_bytes: int | None, compute: tuple[int, int] | None
) -> bool:
    """Return whether the reported properties of a device, if any, match `gpu`."""
    if sms is not None and sms != gpu.sms:
        return False
    if compute is not None and tuple(compute) != gpu.compute:
        return False
    if memory_bytes is None:
        return True
    return _MIN_MEMORY <= memory_bytes / gpu.memory_bytes <= _MAX_MEMORY


def _find_model(name: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs of the model in a name. A board or memory size in the name must match."""
    words = _split_words(name)
    model, form, memory = _parse_name(words)
    result = [
        gpu
        for gpu in known_gpus()
        if model and any(model == _parse_name(n)[0] for n in _list_name_words(gpu))
    ]
    if memory is not None:
        result = [gpu for gpu in result if round(gpu.memory_bytes / 2**30) == memory]
    forms = [(gpu, {_parse_name(n)[1] for n in _list_name_words(gpu)} - {None}) for gpu in result]
    return tuple(gpu for gpu, boards in forms if form is None or not boards or form in boards)


def _list_name_words(gpu: GpuSpec) -> list[set[str]]:
    return [_split_words(name) for name in (gpu.name, *gpu.names)]


def _parse_name(words: set[str]) -> tuple[frozenset[str], str | None, int | None]:
    """Return the model's words in a name, its board, and its memory in GiB."""
    forms = [match[1] for word in words if (match := _BOARD_PATTERN.fullmatch(word))]
    sizes = [
        int(match[1])
        for word in words
        if (match := _MEMORY_PATTERN.fullmatch(word)) and "g" in word
    ]
    other_words = (w for w in words - _COMMON_WORDS if not _BOARD_PATTERN.fullmatch(w))
    model = frozenset(w for w in other_words if not (_MEMORY_PATTERN.fullmatch(w) and "g" in w))
    return model, forms[0] if forms else None, sizes[0] if sizes else None


def _choose_slowest(gpus: list[GpuSpec]) -> GpuSpec | None:
    """Return the only GPU, or the slowest of variants with nearly the same rates, or else None."""
    if len(gpus) < 2:
        return gpus[0] if gpus else None
    rates = [(*msgspec.structs.astuple(gpu.peak_tflops), gpu.memory_gb_per_s) for gpu in gpus]
    for column in zip(*rates, strict=True):
        known_rates = [rate for rate in column if rate is not None]
        if len(known_rates) not in (0, len(column)):
            return None
        if known_rates and min(known_rates) < (1 - _MAX_RATE_DIFFERENCE) * max(known_rates):
            return None
    return min(gpus, key=lambda gpu: (gpu.peak("fp16") or 0.0, gpu.bandwidth))


def _normalize_name(name: str) -> str:
    """Return a device name without differences between drivers and their versions."""
    words = name.casefold().split()
    return " ".join(words[1:] if words and words[0] in ("nvidia", "amd") else words)


@cache
def _index_names() -> tuple[dict[str, tuple[GpuSpec, ...]], dict[str, tuple[GpuSpec, ...]]]:
    """Return GPUs by their own names, and by names that they share with other devices."""
    by_name: dict[str, tuple[GpuSpec, ...]] = {}
    by_generic_name: dict[str, tuple[GpuSpec, ...]] = {}
    for gpu in known_gpus():
        for index, names in ((by_name, gpu.names), (by_generic_name, gpu.generic_names)):
            # The vendor is dropped from names, so two spellings may come to the same key.
            for key in {_normalize_name(name) for name in names}:
                index[key] = (*index.get(key, ()), gpu)
    return by_name, by_generic_name


class Attainable(NamedTuple):
    """A rate that kernels reach, FLOP/s or bytes/s."""

    rate: float
    source: PublishedSource | None
    """Document of the measurement, or ``None`` if none was found. The rate is then the peak times
    the share that the vendor's other GPUs reach (the lower median). It is limited to the rates
    measured on GPUs with lower and higher peaks."""


def attainable_matmul(gpu: GpuSpec, dtype: str) -> Attainable | None:
    """Return the rate of matrix products in ``dtype``, or ``None`` if the GPU has no peak for
    it."""
    measured = gpu.measured_matmul(dtype)
    if measured is not None:
        return Attainable(measured.rate * 1e12, measured.source)
    peak = gpu.peak(dtype)
    share = _find_usual_shares(gpu.vendor)[0]
    if peak is None or share is None:
        return None
    return Attainable(_limit_rate(gpu, peak * share, _list_matmul_rates(dtype), 1e12), None)


def attainable_bandwidth(gpu: GpuSpec) -> Attainable | None:
    """Return the rate of the GPU's memory, reads and writes together."""
    measured = gpu.measured.memory
    if measured is not None:
        return Attainable(measured.rate * 1e9, measured.source)
    share = _find_usual_shares(gpu.vendor)[1]
    if share is None:
        return None
    return Attainable(_limit_rate(gpu, gpu.bandwidth * share, _list_memory_rates(), 1e9), None)


Measured = tuple[tuple[GpuSpec, Rate], ...]


@cache
def _list_matmul_rates(dtype: str) -> Measured:
    rates = ((gpu, gpu.measured_matmul(dtype)) for gpu in known_gpus())
    return tuple((gpu, rate) for gpu, rate in rates if rate is not None)


@cache
def _list_memory_rates() -> Measured:
    rates = ((gpu, gpu.measured.memory) for gpu in known_gpus())
    return tuple((gpu, rate) for gpu, rate in rates if rate is not None)


def _limit_rate(gpu: GpuSpec, rate: float, measured: Measured, unit: float) -> float:
    """Return an estimated rate, limited to the rates measured on GPUs with lower and higher
    peaks."""
    lower = [r.rate * unit for other, r in measured if is_at_least_as_fast(gpu, other)]
    upper = [r.rate * unit for other, r in measured if is_at_least_as_fast(other, gpu)]
    return min([max([rate, *lower]), *upper])


def is_at_least_as_fast(gpu: GpuSpec, other: GpuSpec) -> bool:
    """Return whether a GPU is at least as fast as another of its vendor by its datasheet: in matrix
    products of each of the other's formats, and in memory."""
    peaks = zip(
        msgspec.structs.astuple(gpu.peak_tflops),
        msgspec.structs.astuple(other.peak_tflops),
        strict=True,
    )
    return (
        gpu.vendor == other.vendor
        and gpu.memory_gb_per_s >= other.memory_gb_per_s
        and all(
            other_peak is None or (peak is not None and peak >= other_peak)
            for peak, other_peak in peaks
        )
    )


@cache
def _find_usual_shares(vendor: str) -> tuple[float | None, float | None]:
    """Return the shares of their peaks that a vendor's GPUs reach, for matrix products and
    memory."""
    products, memories = set(), set()
    for gpu in known_gpus():
        if gpu.vendor != vendor:
            continue
        for dtype, rate in gpu.measured.matmul.items():
            peak = gpu.peak(dtype)
            if peak is not None:
                products.add(rate.rate * 1e12 / peak)
        if gpu.measured.memory is not None:
            memories.add(gpu.measured.memory.rate / gpu.memory_gb_per_s)
    return tuple(median_low(sorted(s)) if s else None for s in (products, memories))  # type: ignore[return-value]
