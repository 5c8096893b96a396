"""Reader of Triton's cache of compiled kernels: one folder per kernel, with its settings in a
``.json``, the module, the PTX and Triton's intermediate code.

The cache is in ``TRITON_CACHE_DIR``, else in ``~/.triton/cache``; that of ``torch.compile`` is in
``/tmp/torchinductor_<user>/triton``. Registers and local memory are read from the module. In a
cubin these are the attributes ``REGCOUNT`` and ``FRAME_SIZE`` in ``.nv.info``, as printed by
``cuobjdump --dump-resource-usage``. In a code object they are in the metadata of its note
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
_MAX_FOLDERS = 50_000
_MAX_KERNELS = 20_000
"""Maximum number of distinct kernels."""
MAX_JSON = 1 << 20
MAX_FILE = 64 << 20
_MAX_BYTES = 2 << 30
"""Maximum number of bytes read from all files together."""
MAX_SOURCE = 1 << 16
"""Maximum number of bytes read of Triton's code, which begins with the function's line."""
_KERNEL_SUFFIXES = (".cubin", ".hsaco", ".ttir", ".ttgir")
"""Suffixes, one of which must exist next to a kernel's ``.json``."""
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_FUNCTION_SYMBOL = 2
"""Symbol type of a function."""
_SOURCE_LOCATION = re.compile(rb'^#loc = loc\("([^"\n]{1,4096})":(\d{1,7}):\d+\)', re.MULTILINE)
_LOCAL_ARRAY = re.compile(rb"^\s*\.local\s+\.align\s+\d+\s+\.b8\s+\S+\[(\d{1,9})\]", re.MULTILINE)
"""Pattern of local memory that the program declares in PTX, which is not spilled."""


class _Metadata(msgspec.Struct):
    name: str
    num_warps: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_stages: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    shared: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    target: Any = None
    """Target of the compilation: an object since version 3, a list in 2.2."""
    device_type: Any = None
    arch: Any = None
    """Architecture. Together with ``device_type`` it is the target in version 2.1."""


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
    return [stem for stem in stems if any(stem + end in names for end in _KERNEL_SUFFIXES)]


def read_triton_cache(path: str) -> tuple[KernelProfiles, int]:
    """Return the kernels of a cache and the number of bytes read. Raises AdvisorError if there are
    none, or none can be read."""
    dropped: Counter[str] = Counter()
    compilations: dict[CompiledKernel, list[CompiledKernel]] = {}
    budget = _Budget()
    for folder, stem in find_entries(path):
        if budget.left <= 0 or len(compilations) == _MAX_KERNELS:
            dropped["kernels in too large a cache"] += 1
        elif (kernel := _read_kernel(folder, stem, budget)) is None:
            dropped["damaged kernels"] += 1
        else:
            compilations.setdefault(kernel._replace(num_stages=(), place=None), []).append(kernel)
    if not compilations:
        raise AdvisorError(f"{path}: a cache of Triton in which no kernel can be read")
    compiled = tuple(map(_merge_compilations, compilations.values()))
    return KernelProfiles(path, TRITON, (), dict(dropped), compiled), _MAX_BYTES - budget.left


def find_entries(path: str) -> Iterator[tuple[Path, str]]:
    """Yield the folder and name of each kernel in a cache. Links are not followed."""
    for folder, folders, names in islice(os.walk(path), _MAX_FOLDERS):
        folders.sort()
        for stem in kernels_in(names):
            yield Path(folder), stem


def _merge_compilations(compilations: list[CompiledKernel]) -> CompiledKernel:
    """Merge compilations that differ only in stages and place."""
    stages = {number for kernel in compilations for number in kernel.num_stages}
    places = {kernel.place for kernel in compilations}
    place = places.pop() if len(places) == 1 else None
    return compilations[0]._replace(
        num_stages=tuple(sorted(stages)), place=place, variants=len(compilations)
    )


class _Budget:
    """Reader of files that counts down the bytes left."""

    def __init__(self) -> None:
        self.left = _MAX_BYTES

    def read(self, file: Path, max_bytes: int) -> bytes:
        """Return the first bytes of a regular file. Empty if it is another kind, or unreadable."""
        try:
            if file.is_symlink():
                return b""
            with open_regular(file) as stream:
                data = stream.read(max_bytes)
        except (OSError, ValueError):
            return b""
        self.left -= len(data)
        return data


def _read_kernel(folder: Path, stem: str, budget: _Budget) -> CompiledKernel | None:
    """Return a compiled kernel, or ``None`` if its files are damaged or of another program."""
    try:
        metadata = msgspec.json.decode(
            budget.read(folder / f"{stem}.json", MAX_JSON), type=_Metadata
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    target, warp_size = _parse_target(metadata.target or [metadata.device_type, metadata.arch])
    cubin = budget.read(folder / f"{stem}.cubin", MAX_FILE)
    if cubin:
        registers, local = _read_cubin(cubin, metadata.name)
        spilled = local
        if local:
            ptx = budget.read(folder / f"{stem}.ptx", MAX_FILE)
            arrays = sum(int(size) for size in _LOCAL_ARRAY.findall(ptx))
            spilled = max(0, local - arrays) if ptx else None
    else:
        registers, local, spilled = _read_code_object(
            budget.read(folder / f"{stem}.hsaco", MAX_FILE), metadata.name
        )
    location = _SOURCE_LOCATION.search(budget.read(folder / f"{stem}.ttir", MAX_SOURCE))
    return CompiledKernel(
        name=metadata.name[:MAX_NAME],
        target=target,
        threads=metadata.num_warps * warp_size,
        num_warps=metadata.num_warps,
        num_stages=(metadata.num_stages,),
        shared=metadata.shared,
        registers=registers,
        local=local,
        spilled=spilled,
        place=None
        if location is None
        else (location[1].decode(errors="replace"), int(location[2])),
    )


def _parse_target(target: object) -> tuple[str, int]:
    """Return the vendor's name of the architecture, and threads per warp, from ``{"backend":
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


def _read_cubin(elf: bytes, kernel: str) -> tuple[int | None, int | None]:
    """Return registers and bytes of local memory per thread, ``None`` if not in the cubin."""
    try:
        sections = list(sections_of(elf))
        parts = {name: elf[start : start + size] for name, start, size in sections}
        function_symbols = {
            index
            for index, symbol in enumerate(SYMBOL.iter_unpack(parts[".symtab"]))
            if symbol[1] & 15 == _FUNCTION_SYMBOL and sections[symbol[3]][0] == f".text.{kernel}"
        }
        attributes = {
            kind: value
            for kind, symbol_number, value in _iterate_attributes(parts[".nv.info"])
            if symbol_number in function_symbols
        }
    except (struct.error, LookupError, ValueError, OverflowError):
        return None, None
    return attributes.get(_REGCOUNT), attributes.get(_FRAME_SIZE)


def _iterate_attributes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield kind, symbol and value of the ``.nv.info`` attributes that are numbers of functions."""
    offset = 0
    while offset + 4 <= len(data):
        value_format, kind, size = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if value_format == 4:  # otherwise the value takes the place of the size
            if size == 8:
                yield kind, *struct.unpack_from("<II", data, offset)
            offset += size


def _read_code_object(elf: bytes, kernel: str) -> tuple[int | None, int | None, int | None]:
    """Return vector registers, bytes of private memory and bytes of spilled registers per thread.
    ``None``: not in the code object."""
    try:
        start, size = next(
            (offset, size) for name, offset, size in sections_of(elf) if name == ".note"
        )
        name_size, description_size, _ = struct.unpack_from("<III", elf, start)
        description_start = start + 12 + -(-name_size // 4) * 4
        note = msgspec.msgpack.decode(
            elf[description_start : min(description_start + description_size, start + size)],
            type=_AmdNote,
        )
        metadata = next(entry for entry in note.kernels if entry.name == kernel)
    except (struct.error, LookupError, ValueError, OverflowError, StopIteration, RecursionError):
        return None, None, None
    spilled = None
    if metadata.spilled is not None and metadata.private is not None:
        spilled = min(
            4 * metadata.spilled, metadata.private
        )  # others spill to accumulation registers
    return metadata.registers, metadata.private, spilled
