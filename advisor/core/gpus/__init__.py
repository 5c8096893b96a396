"""Peaks and bandwidths of GPUs from public documents, found by the device's name; and the rates
that kernels reach on them.

The figures are in ``gpus.json`` beside this file, one entry per GPU with its sources. A GPU that is
not in it is unknown: `lookup` returns None, and whoever asked says so by its name. There is no
default, because a roofline against another card's peak is worse than none.

A datasheet's peak is a ceiling that no kernel comes near: the fastest matrix product that anybody
measured reaches 51 to 108% of it, a STREAM triad 69 to 89% of the memory's. What a kernel could
save is therefore judged by what others reached."""

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
    """Name a number format as the tables of rates do, whoever spelled it.

    Takes torch's spellings ("torch.bfloat16", "half"), those of Kineto's ``Input type``
    ("c10::Half", "float", "signed char") and of collectives ("BFloat16", "Float8_e4m3fn").
    Returns None for a format that matrix units have no rate for ("long int", "bool", "")."""
    bare = dtype.strip().removeprefix("c10::").removeprefix("torch.").casefold()
    return _CANONICAL.get(bare)


class PeakRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense matrix-multiply peaks, by the format of the inputs; never with structured sparsity.

    The rate of the fastest unit that multiplies matrices in that format: tensor or matrix cores
    where the chip has them for it, the vector units otherwise. None where the chip has no unit for
    the format, or no published figure was found."""

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
    """The card's PCIe interface; the slot it sits in may be slower."""

    generation: int
    """PCIe generation."""
    lanes: int
    """Number of lanes."""
    gb_per_s: float
    """Rate in ONE direction, GB/s (1e9 bytes/s), after line encoding, before packet overhead."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The links from this GPU to its peers, all of them together."""

    name: str
    """Name of the links: "NVLink 4", "Infinity Fabric", ..."""
    gb_per_s: float
    """Bandwidth in ONE direction, GB/s (1e9 bytes/s); vendors usually print both summed."""


class PublishedSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public document that figures were taken from."""

    title: str
    url: str


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured rate and the document that has it."""

    rate: float
    """TFLOP/s of a matrix product, or GB/s (1e9 bytes/s) of memory, read and written together."""
    source: PublishedSource


class MeasuredRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates that public benchmarks reached on this GPU; what is not in it was not found."""

    matmul: dict[str, Rate] = {}
    """Rates of the fastest matrix product of a search over sizes, by the format of the inputs."""
    memory: Rate | None = None
    """Rate of a STREAM triad or copy over arrays much larger than the caches."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU as a framework sees it: a device of a trace, so one GCD of an MI250.

    Every rate is what the vendor publishes, a ceiling that no kernel reaches; None is "not known"
    or "does not have it", never a guess."""

    name: str
    """Canonical name, with the form factor and the memory where there are several."""
    vendor: Literal["nvidia", "amd"]
    """Vendor of the chip."""
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
    pcie: Pcie | None
    """Host interface; None where the host is reached by something else."""
    link: Link | None
    """Links to peer GPUs that come with the board; None where there are none, where they are an
    optional bridge, or where they differ from peer to peer."""
    note: str | None
    """Note on figures that were derived because they are not printed, and what to know of them."""
    sources: tuple[PublishedSource, ...]
    """Sources of the figures."""
    measured: MeasuredRates = MeasuredRates()
    """Rates that public benchmarks reached, where one was found."""

    def peak(self, dtype: str) -> float | None:
        """Return the dense peak of matrix multiplication in `dtype`, FLOP/s (OP/s for int8).

        `dtype` in any spelling `canonical_dtype` knows; None for others and for formats this GPU
        has no rate for. "float" is full fp32: ask for "tf32" where TF32 is allowed."""
        canonical = canonical_dtype(dtype)
        tflops: float | None = getattr(self.peak_tflops, canonical) if canonical else None
        return None if tflops is None else tflops * 1e12

    def measured_matmul(self, dtype: str) -> Rate | None:
        """Return the fastest matrix product measured in `dtype`, TFLOP/s; None: none was found.

        fp16 and bf16 stand for each other where the chip does both at one rate: the same units
        multiply them."""
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
        """Bandwidth to peer GPUs in one direction, all links together, bytes/s; None: no link."""
        return None if self.link is None else self.link.gb_per_s * 1e9


__all__ = [
    "GpuMatch", "GpuSpec", "Link", "Pcie", "PeakRates", "PublishedSource", "canonical_dtype",
    "find_gpu", "is_at_least_as_fast", "known_gpus", "lookup",
]  # fmt: skip

# Drivers keep some memory back, and ECC on GDDR takes another sixteenth: a T4 sold with 16 GiB
# reports 14.8 (0.92). The nearest different memory size of one chip is 10 of 12 GiB (0.83).
_MIN_MEMORY, _MAX_MEMORY = 0.88, 1.01
_SAME_RATES = 0.12
"""Difference of rates up to which one model's variants (a V100's SXM2 board and PCIe card: 10%)
stand for each other where nothing says which it is; then the slowest is taken."""
_NO_MODEL = frozenset("nvidia amd tesla geforce instinct gpu oam hbm2 hbm2e hbm3 hbm3e".split())
"""Words that do not tell one model from another."""
_FORM = re.compile(r"(sxm|pcie|nvl)\d?")
_MEMORY = re.compile(r"(\d+)gb?")


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

    Either a name of the table, up to case and a leading vendor, or the same model spelled another
    way: `A100-SXM-80GB` and `NVIDIA A100 80GB` have the words of a model, a board and a memory
    size. A word that the table does not know makes it another model ("RTX 3090" is not
    "RTX 3090 Ti", nor its laptop namesake). What else is known of the device must agree: the number
    of SMs or compute units, the memory in bytes, the compute capability. A MIG slice or a partition
    of a GPU has fewer SMs than the whole and is therefore not found. Neither is a name that fits
    several cards of different rates ("RTX 3080", with 10 or 12 GB) when nothing tells them apart.

    Returns None for whatever is not surely one known GPU."""
    by_name, by_generic_name = _index()
    key = _key(name or "")
    candidates = by_name.get(key, ())
    if None not in (sms, memory_bytes, compute):
        if key:
            candidates += by_generic_name.get(key, ())
        else:  # a driver that gives no name gives such a device none
            candidates = tuple(gpu for gpu in known_gpus() if gpu.generic_names and gpu.names)
    if key and not candidates:
        candidates = _of_model(key)
    return _slowest([gpu for gpu in candidates if _fits(gpu, sms, memory_bytes, compute)])


class GpuMatch(NamedTuple):
    """A GPU that a short name stands for."""

    gpu: GpuSpec
    others: tuple[str, ...]
    """Names of other GPUs that the short name fits as well."""

    def note(self, name: str) -> str:
        """Return what a short name was taken for; empty: it fits no other."""
        if not self.others:
            return ""
        more = ", ".join(self.others[:4]) + (" …" if len(self.others) > 4 else "")
        return f"{name} is taken for {self.gpu.name}; it could be {more}"


def find_gpu(name: str) -> GpuMatch:
    """Return the GPU that its driver calls so; else the first whose name has all the words:
    ``h200``, ``a100 pcie 80gb``, ``h100 sxm``, ``rtx4090``.

    Raises AdvisorError if none has."""
    wanted = _words(name)
    called = [
        gpu for gpu in known_gpus() if name.strip().casefold() in map(str.casefold, gpu.names)
    ]
    if len(called) == 1:
        return GpuMatch(called[0], ())
    fitting = [gpu for gpu in known_gpus() if wanted and wanted <= _spellings(gpu.name)]
    if not fitting:
        some = "give a name such as 'h100 sxm', 'a100 80gb' or 'rtx 4090'"
        near = suggest(name, (gpu.name for gpu in known_gpus()), some)
        raise AdvisorError(f"no GPU {name!r} is known; {near}")
    gpu = min(fitting, key=lambda gpu: len(_model(_words(gpu.name))[0]))  # not "Ti" where unsaid
    return GpuMatch(gpu, tuple(other.name for other in fitting if other is not gpu))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _spellings(name: str) -> set[str]:
    """Return the words of a name, boards also without their generation, and neighbours also written
    as one: ``sxm`` of SXM5, ``rtx4090``."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    short = [match[1] if (match := _FORM.fullmatch(word)) else word for word in words]
    ends = [(i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    return {"".join(each[i:j]) for each in (words, short) for i, j in ends}


def _fits(
    gpu: GpuSpec, sms: int | None, memory_bytes: int | None, compute: tuple[int, int] | None
) -> bool:
    """Return whether the properties reported of a device, if any, are those of `gpu`."""
    if sms is not None and sms != gpu.sms:
        return False
    if compute is not None and tuple(compute) != gpu.compute:
        return False
    if memory_bytes is None:
        return True
    return _MIN_MEMORY <= memory_bytes / gpu.memory_bytes <= _MAX_MEMORY


def _of_model(name: str) -> tuple[GpuSpec, ...]:
    """Return the GPUs of the model in a name; a board or memory size in it must be theirs."""
    words = _words(name)
    model, form, memory = _model(words)
    result = [
        gpu for gpu in known_gpus() if model and any(model == _model(n)[0] for n in _named(gpu))
    ]
    if memory is not None:
        result = [gpu for gpu in result if round(gpu.memory_bytes / 2**30) == memory]
    forms = [(gpu, {_model(n)[1] for n in _named(gpu)} - {None}) for gpu in result]
    return tuple(gpu for gpu, own in forms if form is None or not own or form in own)


def _named(gpu: GpuSpec) -> list[set[str]]:
    return [_words(name) for name in (gpu.name, *gpu.names)]


def _model(words: set[str]) -> tuple[frozenset[str], str | None, int | None]:
    """Return the words of a name for the model, its board, and its memory in GiB."""
    forms = [match[1] for word in words if (match := _FORM.fullmatch(word))]
    sizes = [int(match[1]) for word in words if (match := _MEMORY.fullmatch(word)) and "g" in word]
    rest = (w for w in words - _NO_MODEL if not _FORM.fullmatch(w))
    model = frozenset(w for w in rest if not (_MEMORY.fullmatch(w) and "g" in w))
    return model, forms[0] if forms else None, sizes[0] if sizes else None


def _slowest(gpus: list[GpuSpec]) -> GpuSpec | None:
    """Return the one GPU, or of variants with nearly the same rates the slowest; else None."""
    if len(gpus) < 2:
        return gpus[0] if gpus else None
    rates = [(*msgspec.structs.astuple(gpu.peak_tflops), gpu.memory_gb_per_s) for gpu in gpus]
    for column in zip(*rates, strict=True):
        given = [rate for rate in column if rate is not None]
        if len(given) not in (0, len(column)):
            return None
        if given and min(given) < (1 - _SAME_RATES) * max(given):
            return None
    return min(gpus, key=lambda gpu: (gpu.peak("fp16") or 0.0, gpu.bandwidth))


def _key(name: str) -> str:
    """Return a device name without what drivers and versions of them spell differently."""
    words = name.casefold().split()
    return " ".join(words[1:] if words and words[0] in ("nvidia", "amd") else words)


@cache
def _index() -> tuple[dict[str, tuple[GpuSpec, ...]], dict[str, tuple[GpuSpec, ...]]]:
    """Return GPUs by their own names, and by the names they share with other devices."""
    by_name: dict[str, tuple[GpuSpec, ...]] = {}
    by_generic_name: dict[str, tuple[GpuSpec, ...]] = {}
    for gpu in known_gpus():
        for index, names in ((by_name, gpu.names), (by_generic_name, gpu.generic_names)):
            # The vendor is dropped from names, so two spellings may come to the same key.
            for key in {_key(name) for name in names}:
                index[key] = (*index.get(key, ()), gpu)
    return by_name, by_generic_name


class Attainable(NamedTuple):
    """A rate that kernels reach, FLOP/s or bytes/s."""

    rate: float
    source: PublishedSource | None
    """Document of the measurement; ``None``: none was found, and the rate is the peak times what
    the vendor's other GPUs reach of theirs (the lower median). It is no less than was measured on
    one of them with lower peaks, and no more than was on one with higher peaks."""


def attainable_matmul(gpu: GpuSpec, dtype: str) -> Attainable | None:
    """Return the rate of matrix products in ``dtype``; ``None``: the GPU has no peak for it."""
    measured = gpu.measured_matmul(dtype)
    if measured is not None:
        return Attainable(measured.rate * 1e12, measured.source)
    peak = gpu.peak(dtype)
    share = _usual(gpu.vendor)[0]
    if peak is None or share is None:
        return None
    return Attainable(_between(gpu, peak * share, _measured_matmuls(dtype), 1e12), None)


def attainable_bandwidth(gpu: GpuSpec) -> Attainable | None:
    """Return the rate of the GPU's own memory, read and written together."""
    measured = gpu.measured.memory
    if measured is not None:
        return Attainable(measured.rate * 1e9, measured.source)
    share = _usual(gpu.vendor)[1]
    if share is None:
        return None
    return Attainable(_between(gpu, gpu.bandwidth * share, _measured_memories(), 1e9), None)


Measured = tuple[tuple[GpuSpec, Rate], ...]


@cache
def _measured_matmuls(dtype: str) -> Measured:
    found = ((gpu, gpu.measured_matmul(dtype)) for gpu in known_gpus())
    return tuple((gpu, rate) for gpu, rate in found if rate is not None)


@cache
def _measured_memories() -> Measured:
    found = ((gpu, gpu.measured.memory) for gpu in known_gpus())
    return tuple((gpu, rate) for gpu, rate in found if rate is not None)


def _between(gpu: GpuSpec, rate: float, measured: Measured, unit: float) -> float:
    """Return an estimated rate, limited to those measured on GPUs with lower and higher peaks."""
    least = [r.rate * unit for other, r in measured if is_at_least_as_fast(gpu, other)]
    most = [r.rate * unit for other, r in measured if is_at_least_as_fast(other, gpu)]
    return min([max([rate, *least]), *most])


def is_at_least_as_fast(gpu: GpuSpec, other: GpuSpec) -> bool:
    """Return whether a GPU's datasheet has no lower rate than another's of its vendor: matrix
    products in each of the other's formats, and memory."""
    peaks = zip(
        msgspec.structs.astuple(gpu.peak_tflops),
        msgspec.structs.astuple(other.peak_tflops),
        strict=True,
    )
    return (
        gpu.vendor == other.vendor
        and gpu.memory_gb_per_s >= other.memory_gb_per_s
        and all(theirs is None or (own is not None and own >= theirs) for own, theirs in peaks)
    )


@cache
def _usual(vendor: str) -> tuple[float | None, float | None]:
    """Return which shares of their peaks a vendor's GPUs reach: matrix products, memory."""
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
