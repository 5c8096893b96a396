"""What each GPU can do: peaks and bandwidths from public documents, found by the device's name.

The figures are in ``gpus.json`` beside this file, one entry a GPU with its sources. A GPU that is
not in it is unknown: `lookup` returns None, and whoever asked says "not measured". There is no
default, because a roofline against another card's peak is worse than none.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from advisor.core.gpus.gpu import GpuSpec, GpuTable, Link, Pcie, PeakRates, canonical_dtype

__all__ = ["GpuSpec", "GpuTable", "Link", "Pcie", "PeakRates", "canonical_dtype", "known", "lookup"]

# Drivers keep some memory back, and ECC on GDDR takes another sixteenth: a T4 sold with 16 GiB
# reports 14.8 (0.92). The nearest different memory size of one chip is 10 of 12 GiB (0.83).
_MIN_MEMORY, _MAX_MEMORY = 0.88, 1.01


@cache
def known() -> tuple[GpuSpec, ...]:
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

    The whole name has to match ("RTX 3090" is not "RTX 3090 Ti", nor its laptop namesake), up to
    case and a leading vendor. What else is known of the device must agree: the number of SMs or
    compute units, the memory in bytes, the compute capability. A MIG slice or a partition of a GPU
    has fewer SMs than the whole and is therefore not found. Neither is a name that fits
    several cards ("RTX 3080", with 10 or 12 GB) when nothing tells them apart.

    Returns None for whatever is not surely one known GPU.
    """
    if not name:
        return None
    by_name, by_generic_name = _index()
    key = _key(name)
    candidates = by_name.get(key, ())
    if None not in (sms, memory_bytes, compute):
        candidates += by_generic_name.get(key, ())
    fitting = [gpu for gpu in candidates if _fits(gpu, sms, memory_bytes, compute)]
    return fitting[0] if len(fitting) == 1 else None


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


def _key(name: str) -> str:
    """A device name without what drivers and versions of them spell differently."""
    words = name.casefold().split()
    return " ".join(words[1:] if words and words[0] in ("nvidia", "amd") else words)


@cache
def _index() -> tuple[dict[str, tuple[GpuSpec, ...]], dict[str, tuple[GpuSpec, ...]]]:
    """GPUs by their own names, and by the names they share with other devices."""
    by_name: dict[str, tuple[GpuSpec, ...]] = {}
    by_generic_name: dict[str, tuple[GpuSpec, ...]] = {}
    for gpu in known():
        for index, names in ((by_name, gpu.names), (by_generic_name, gpu.generic_names)):
            # The vendor is dropped from names, so two spellings may come to the same key.
            for key in {_key(name) for name in names}:
                index[key] = (*index.get(key, ()), gpu)
    return by_name, by_generic_name
