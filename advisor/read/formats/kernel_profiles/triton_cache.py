"""Reader of Triton's cache of compiled kernels: a folder per kernel, with its settings in a
``.json``, and the module, the PTX and Triton's own code beside it.

``TRITON_CACHE_DIR`` says where the cache is, else it is ``~/.triton/cache``; ``torch.compile`` has
its own in ``/tmp/torchinductor_<user>/triton``. Registers and local memory are those of the module:
of a cubin the attributes ``REGCOUNT`` and ``FRAME_SIZE`` in ``.nv.info``, which ``cuobjdump
--dump-resource-usage`` prints; of a code object the metadata in its note
(https://llvm.org/docs/AMDGPUUsage.html#code-object-metadata)."""

import os
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.files import open_regular
from advisor.core.kernel_profile import CompiledKernel, KernelProfiles
from advisor.read.formats.kernel_profiles.sampled_lines import MAX_NAME, SYMBOL, sections_of

TRITON = "Triton"
MAX_FOLDERS = 50_000
MAX_KERNELS = 20_000
"""Most distinct kernels."""
MAX_JSON = 1 << 20
MAX_FILE = 64 << 20
MAX_BYTES = 2 << 30
"""Most bytes read of all files."""
MAX_SOURCE = 1 << 16
"""Most bytes read of Triton's own code, whose beginning has the function's line."""
_BESIDE = (".cubin", ".hsaco", ".ttir", ".ttgir")
"""Suffixes of which one stands beside a kernel's ``.json``."""
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_FUNCTION = 2
"""Kind of a symbol that is a function."""
_PLACE = re.compile(rb'^#loc = loc\("([^"\n]{1,4096})":(\d{1,7}):\d+\)', re.MULTILINE)
_ARRAY = re.compile(rb"^\s*\.local\s+\.align\s+\d+\s+\.b8\s+\S+\[(\d{1,9})\]", re.MULTILINE)
"""Pattern for local memory that the program declares in PTX, which is no spill."""


class _Metadata(msgspec.Struct):
    name: str
    num_warps: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_stages: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    shared: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    target: Any = None
    """Target: an object since version 3, a list in 2.2."""
    device_type: Any = None
    arch: Any = None
    """Architecture, with ``device_type`` the target in version 2.1."""


class _AmdKernel(msgspec.Struct):
    name: str = msgspec.field(name=".name", default="")
    registers: int | None = msgspec.field(name=".vgpr_count", default=None)
    spilled: int | None = msgspec.field(name=".vgpr_spill_count", default=None)
    private: int | None = msgspec.field(name=".private_segment_fixed_size", default=None)


class _AmdNote(msgspec.Struct):
    kernels: list[_AmdKernel] = msgspec.field(name="amdhsa.kernels", default_factory=list)


def kernels_in(files: Collection[str]) -> list[str]:
    """Return the names of Triton's kernels among the files of one folder."""
    names = set(files)
    stems = (name[:-5] for name in sorted(names) if name.endswith(".json"))
    return [stem for stem in stems if any(stem + end in names for end in _BESIDE)]


def read_triton_cache(path: str) -> tuple[KernelProfiles, int]:
    """Return the kernels of a cache, and the number of bytes read. Raises AdvisorError if it holds
    none, or none can be read."""
    dropped: Counter[str] = Counter()
    found: dict[CompiledKernel, list[CompiledKernel]] = {}
    budget = _Budget()
    for folder, stem in find_entries(path):
        if budget.left <= 0 or len(found) == MAX_KERNELS:
            dropped["kernels in too large a cache"] += 1
        elif (kernel := _kernel(folder, stem, budget)) is None:
            dropped["damaged kernels"] += 1
        else:
            found.setdefault(kernel._replace(num_stages=(), place=None), []).append(kernel)
    if not found:
        raise AdvisorError(f"{path}: a cache of Triton in which no kernel can be read")
    compiled = tuple(map(_merged, found.values()))
    return KernelProfiles(path, TRITON, (), dict(dropped), compiled), MAX_BYTES - budget.left


def find_entries(path: str) -> Iterator[tuple[Path, str]]:
    """Yield folder and name of each kernel in a cache. Links are not followed."""
    for folder, folders, names in islice(os.walk(path), MAX_FOLDERS):
        folders.sort()
        for stem in kernels_in(names):
            yield Path(folder), stem


def _merged(same: list[CompiledKernel]) -> CompiledKernel:
    """Merge compilations that differ only in stages and place."""
    stages = {number for kernel in same for number in kernel.num_stages}
    places = {kernel.place for kernel in same}
    place = places.pop() if len(places) == 1 else None
    return same[0]._replace(num_stages=tuple(sorted(stages)), place=place, variants=len(same))


class _Budget:
    """Reader of files that counts down the bytes left."""

    def __init__(self) -> None:
        self.left = MAX_BYTES

    def read(self, file: Path, max_bytes: int) -> bytes:
        """Return the first bytes of a regular file; empty if it is none, a link, or unreadable."""
        try:
            if file.is_symlink():
                return b""
            with open_regular(file) as opened:
                data = opened.read(max_bytes)
        except (OSError, ValueError):
            return b""
        self.left -= len(data)
        return data


def _kernel(folder: Path, stem: str, budget: _Budget) -> CompiledKernel | None:
    """Return a compiled kernel; ``None`` if its files are damaged, or another program's."""
    try:
        found = msgspec.json.decode(budget.read(folder / f"{stem}.json", MAX_JSON), type=_Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    target, warp = _target(found.target or [found.device_type, found.arch])
    cubin = budget.read(folder / f"{stem}.cubin", MAX_FILE)
    if cubin:
        registers, local = _of_cubin(cubin, found.name)
        spilled = local
        if local:
            ptx = budget.read(folder / f"{stem}.ptx", MAX_FILE)
            arrays = sum(int(size) for size in _ARRAY.findall(ptx))
            spilled = max(0, local - arrays) if ptx else None
    else:
        registers, local, spilled = _of_code_object(
            budget.read(folder / f"{stem}.hsaco", MAX_FILE), found.name
        )
    place = _PLACE.search(budget.read(folder / f"{stem}.ttir", MAX_SOURCE))
    return CompiledKernel(
        name=found.name[:MAX_NAME],
        target=target,
        threads=found.num_warps * warp,
        num_warps=found.num_warps,
        num_stages=(found.num_stages,),
        shared=found.shared,
        registers=registers,
        local=local,
        spilled=spilled,
        place=None if place is None else (place[1].decode(errors="replace"), int(place[2])),
    )


def _target(target: object) -> tuple[str, int]:
    """Return the architecture by its vendor's name, and threads per warp, from ``{"backend":
    "cuda", "arch": 90, "warp_size": 32}`` or ``["cuda", 90]``."""
    if isinstance(target, dict):
        backend, arch, warp = (target.get(key) for key in ("backend", "arch", "warp_size"))
    elif isinstance(target, list) and len(target) >= 2:
        backend, arch, warp = target[0], target[1], None
    else:
        return "", 32
    if not isinstance(arch, int | str) or not backend:
        return "", 32
    name = f"sm_{arch}" if backend == "cuda" else str(arch)
    if warp not in (32, 64):
        warp = 64 if name.startswith("gfx9") else 32
    return name[:32], warp


def _of_cubin(elf: bytes, kernel: str) -> tuple[int | None, int | None]:
    """Return registers, and bytes of local memory, per thread; ``None``: not in the cubin."""
    try:
        sections = list(sections_of(elf))
        parts = {name: elf[start : start + size] for name, start, size in sections}
        own = {
            number
            for number, symbol in enumerate(SYMBOL.iter_unpack(parts[".symtab"]))
            if symbol[1] & 15 == _FUNCTION and sections[symbol[3]][0] == f".text.{kernel}"
        }
        known = {kind: value for kind, of, value in _attributes(parts[".nv.info"]) if of in own}
    except (struct.error, LookupError, ValueError, OverflowError):
        return None, None
    return known.get(_REGCOUNT), known.get(_FRAME_SIZE)


def _attributes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield kind, symbol and value of ``.nv.info`` attributes that are a function's number."""
    at = 0
    while at + 4 <= len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:  # else the value is in place of the size
            if size == 8:
                yield kind, *struct.unpack_from("<II", data, at)
            at += size


def _of_code_object(elf: bytes, kernel: str) -> tuple[int | None, int | None, int | None]:
    """Return vector registers, bytes of private memory and bytes of spilled registers per thread;
    ``None``: not in the code object."""
    try:
        start, size = next((at, size) for name, at, size in sections_of(elf) if name == ".note")
        named, described, _ = struct.unpack_from("<III", elf, start)
        begin = start + 12 + -(-named // 4) * 4
        note = msgspec.msgpack.decode(
            elf[begin : min(begin + described, start + size)], type=_AmdNote
        )
        own = next(each for each in note.kernels if each.name == kernel)
    except (struct.error, LookupError, ValueError, OverflowError, StopIteration, RecursionError):
        return None, None, None
    spilled = None
    if own.spilled is not None and own.private is not None:
        spilled = min(4 * own.spilled, own.private)  # the others are in accumulation registers
    return own.registers, own.private, spilled
