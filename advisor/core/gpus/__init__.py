"""What each GPU can do: peaks and bandwidths from public documents, found by the device's name.

The figures are in ``gpus.json`` beside this file, one entry a GPU with its sources. A GPU that is
not in it is unknown: `lookup` returns None, and whoever asked says so by its name. There is no
default, because a roofline against another card's peak is worse than none.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.gpus.gpu import GpuSpec, GpuTable, Link, Pcie, PeakRates, canonical_dtype

__all__ = [
    "GpuMatch",
    "GpuSpec",
    "GpuTable",
    "Link",
    "Pcie",
    "PeakRates",
    "canonical_dtype",
    "find_gpu",
    "known_gpus",
    "lookup",
]

# Drivers keep some memory back, and ECC on GDDR takes another sixteenth: a T4 sold with 16 GiB
# reports 14.8 (0.92). The nearest different memory size of one chip is 10 of 12 GiB (0.83).
_MIN_MEMORY, _MAX_MEMORY = 0.88, 1.01
_SAME_RATES = 0.12
"""How far the rates of one model's variants may differ (a V100's SXM2 board and PCIe card: 10%) to
stand for each other where nothing says which it is; then the slowest is taken."""
_MAX_NAMES = 3
_NO_MODEL = frozenset("nvidia amd tesla geforce instinct gpu oam hbm2 hbm2e hbm3 hbm3e".split())
"""Words that do not tell one model from another."""
_FORM = re.compile(r"(sxm|pcie|nvl)\d?")
_MEMORY = re.compile(r"(\d+)gb?")


@cache
def known_gpus() -> tuple[GpuSpec, ...]:
    """All GPUs of the data file, in its order."""
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

    Returns None for whatever is not surely one known GPU.
    """
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
    """A GPU by a short name."""

    gpu: GpuSpec
    others: tuple[str, ...]
    """Others that the name fits as well."""


def find_gpu(name: str) -> GpuMatch:
    """The GPU that its driver calls so; else the first whose name has all the words: ``h200``,
    ``a100 pcie 80gb``.

    AdvisorError: none has.
    """
    wanted = _words(name)
    called = [
        gpu for gpu in known_gpus() if name.strip().casefold() in map(str.casefold, gpu.names)
    ]
    if len(called) == 1:
        return GpuMatch(called[0], ())
    fitting = [gpu for gpu in known_gpus() if wanted and wanted <= _words(gpu.name)]
    if not fitting:
        near = sorted(known_gpus(), key=lambda gpu: -_closeness(wanted, _words(gpu.name)))
        names = [gpu.name for gpu in near[:_MAX_NAMES]]
        raise AdvisorError(f"no GPU {name!r} is known; did you mean {', '.join(names)}?")
    exact = [gpu for gpu in fitting if _words(gpu.name) - {"nvidia", "amd"} == wanted]
    gpu = (exact or fitting)[0]
    return GpuMatch(gpu, tuple(other.name for other in fitting if other is not gpu))


def _closeness(wanted: set[str], words: set[str]) -> float:
    """How well each wanted word is met by its most similar one."""
    return sum(max(SequenceMatcher(None, word, w).ratio() for w in words) for word in wanted)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _fits(
    gpu: GpuSpec, sms: int | None, memory_bytes: int | None, compute: tuple[int, int] | None
) -> bool:
    """Whether what was reported of a device, as far as it was, is true of `gpu`."""
    if sms is not None and sms != gpu.sms:
        return False
    if compute is not None and tuple(compute) != gpu.compute:
        return False
    if memory_bytes is None:
        return True
    return _MIN_MEMORY <= memory_bytes / gpu.memory_bytes <= _MAX_MEMORY


def _of_model(name: str) -> tuple[GpuSpec, ...]:
    """GPUs of the model that a name's words say; a board or a memory size in it must be theirs."""
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
    """The words of a name that say the model, its board, and its memory in GiB."""
    forms = [match[1] for word in words if (match := _FORM.fullmatch(word))]
    sizes = [int(match[1]) for word in words if (match := _MEMORY.fullmatch(word)) and "g" in word]
    rest = (w for w in words - _NO_MODEL if not _FORM.fullmatch(w))
    model = frozenset(w for w in rest if not (_MEMORY.fullmatch(w) and "g" in w))
    return model, forms[0] if forms else None, sizes[0] if sizes else None


def _slowest(gpus: list[GpuSpec]) -> GpuSpec | None:
    """The one GPU, or of variants whose rates are nearly the same the slowest; else None."""
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
    """A device name without what drivers and versions of them spell differently."""
    words = name.casefold().split()
    return " ".join(words[1:] if words and words[0] in ("nvidia", "amd") else words)


@cache
def _index() -> tuple[dict[str, tuple[GpuSpec, ...]], dict[str, tuple[GpuSpec, ...]]]:
    """GPUs by their own names, and by the names they share with other devices."""
    by_name: dict[str, tuple[GpuSpec, ...]] = {}
    by_generic_name: dict[str, tuple[GpuSpec, ...]] = {}
    for gpu in known_gpus():
        for index, names in ((by_name, gpu.names), (by_generic_name, gpu.generic_names)):
            # The vendor is dropped from names, so two spellings may come to the same key.
            for key in {_key(name) for name in names}:
                index[key] = (*index.get(key, ()), gpu)
    return by_name, by_generic_name
