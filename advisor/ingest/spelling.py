"""Old, new and AMD spellings, brought to one vocabulary here and nowhere else."""

from __future__ import annotations

import re

from advisor.trace import CALLS, COPIES, CPU_KINDS, GPU_KINDS, SYNC_KINDS

# Where an event goes, by its category. Categories are compared in lower case, which also covers
# the capitalised spelling that profilers wrote before 2022.
HOST_CATEGORIES: dict[str, int] = {
    "cpu_op": CPU_KINDS.index("op"),
    "operator": CPU_KINDS.index("op"),
    "cpu functions": CPU_KINDS.index("op"),  # the legacy autograd profiler's process name
    "user_annotation": CPU_KINDS.index("annotation"),
    "python_function": CPU_KINDS.index("python"),
    "cuda_runtime": CPU_KINDS.index("runtime"),
    "cuda_driver": CPU_KINDS.index("runtime"),
    "runtime": CPU_KINDS.index("runtime"),
    "hip_runtime": CPU_KINDS.index("runtime"),
    "hip_driver": CPU_KINDS.index("runtime"),
    "xpu_runtime": CPU_KINDS.index("runtime"),
    "mtia_runtime": CPU_KINDS.index("runtime"),
    "privateuse1_runtime": CPU_KINDS.index("runtime"),
    "privateuse1_driver": CPU_KINDS.index("runtime"),
    "overhead": CPU_KINDS.index("overhead"),
}
DEVICE_CATEGORIES: dict[str, int] = {
    "kernel": GPU_KINDS.index("kernel"),
    "concurrent_kernel": GPU_KINDS.index("kernel"),
    "cuda functions": GPU_KINDS.index("kernel"),
    "gpu_memcpy": GPU_KINDS.index("memcpy"),
    "memcpy": GPU_KINDS.index("memcpy"),
    "gpu_memset": GPU_KINDS.index("memset"),
    "memset": GPU_KINDS.index("memset"),
}
SYNC_CATEGORY = "cuda_sync"
COUNTER_CATEGORY = "cuda_profiler_range"
IGNORED_CATEGORIES = frozenset(
    {"gpu_user_annotation", "trace", "ac2g", "async_cpu_to_gpu", "fwdbwd", "async_gpu"}
)
"""Device-side copies of annotations, the profiler's own span, and flow arrows."""

_LAUNCH = re.compile(
    r"^(cuda|hip)(Ext)?Launch(Cooperative)?Kernel(ExC|Ex|MultiDevice)?(_ptsz|_v\d+)?$"
    r"|^cu(Launch(Cooperative)?Kernel(Ex)?|Launch)(_ptsz)?$"
    r"|^hip(Ext)?ModuleLaunchKernel$|^hipExtModuleLaunchKernel$|^hipHccModuleLaunchKernel$"
    r"|^hipLaunchByPtr$|^hipExtLaunchKernel$|^hipModuleLaunchCooperativeKernel"
)
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")
_MEMCPY = re.compile(r"^(cuda|hip|cu)Memcpy")
_MEMSET = re.compile(r"^(cuda|hip|cu)Memset")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (_LAUNCH, "launch"),
    (_GRAPH_LAUNCH, "graph_launch"),
    (re.compile(r"^(cuda|hip|cu)Memcpy.*Async|^hipMemcpyWithStream"), "memcpy"),
    (_MEMCPY, "memcpy_blocking"),
    (_MEMSET, "memset"),
    (re.compile(r"^(cuda|hip)(DeviceSynchronize|ThreadSynchronize)|^cuCtxSynchronize"), "sync_device"),
    (re.compile(r"^(cuda|hip|cu)StreamSynchronize"), "sync_stream"),
    (re.compile(r"^(cuda|hip|cu)EventSynchronize"), "sync_event"),
    (re.compile(r"^(cuda|hip|cu)EventRecord"), "event_record"),
    (re.compile(r"^(cuda|hip|cu)(EventQuery|StreamQuery)"), "event_query"),
    (re.compile(r"^(cuda|hip|cu)StreamWaitEvent"), "stream_wait"),
    (re.compile(r"^(cudaHostAlloc|cudaMallocHost|hipHostMalloc|hipMallocHost|cuMemHostAlloc|cuMemAllocHost|cudaHostRegister|hipHostRegister|cuMemHostRegister)"), "host_alloc"),
    (re.compile(r"^(cudaFreeHost|hipHostFree|hipFreeHost|cuMemFreeHost|cudaHostUnregister|hipHostUnregister)"), "host_free"),
    (re.compile(r"^(cudaMalloc|hipMalloc|hipExtMalloc|cuMemAlloc|cuMemCreate|cuMemMap|cuMemAddressReserve)"), "malloc"),
    (re.compile(r"^(cudaFree|hipFree|cuMemFree|cuMemUnmap|cuMemRelease|cuMemAddressFree)"), "free"),
    (re.compile(r"^(cuda|cu|hip)(Stream(Begin|End)Capture|GraphInstantiate)"), "graph_capture"),
    (re.compile(r"^(cuModuleLoad|cuLibraryLoad|cudaLibraryLoad|hipModuleLoad|cuLinkComplete)"), "module_load"),
)  # fmt: skip


def call_class(name: str) -> int:
    """Index in :data:`advisor.trace.CALLS` of a CUDA or HIP runtime or driver call."""
    for pattern, call in _RULES:
        if pattern.search(name):
            return CALLS.index(call)
    return CALLS.index("other")


_COPY_NAME = re.compile(
    r"(?:Memcpy|Copy)\s*(\w+)?\s*(?:\(\s*([\w ]+?)\s*->\s*([\w ]+?)\s*\))?", re.I
)
_HIP_DIRECTION = {
    "copyhosttodevice": "HtoD",
    "copydevicetohost": "DtoH",
    "copydevicetodevice": "DtoD",
    "copyhosttohost": "HtoH",
}
_MEMORY = {"pageable", "pinned", "device", "managed", "array", "device static", "managed static"}


def copy_parts(name: str) -> tuple[int, str | None, str | None]:
    """Direction (index in COPIES), source and destination memory of a copy, from its name.

    ``Memcpy HtoD (Pageable -> Device)`` -> HtoD, Pageable, Device. AMD's profiler writes
    ``CopyHostToDevice`` or ``Memcpy HtoD (Host -> Device)``: whether the host side was pinned is
    then not told and stays ``None``.
    """
    squeezed = name.replace(" ", "").lower()
    for word, direction in _HIP_DIRECTION.items():
        if word in squeezed:
            return COPIES.index(direction), None, None
    match = _COPY_NAME.search(name)
    if match is None:
        return COPIES.index("other"), None, None
    kind, src, dst = match.groups()
    direction = next((c for c in COPIES if kind and kind.lower() == c.lower()), "other")
    if kind and kind.lower() in {"p2p", "ptop"}:
        direction = "PtoP"
    if kind and kind.lower() in {"htoa", "atoh", "atod", "dtoa", "atoa"}:
        direction = {"htoa": "HtoD", "atoh": "DtoH"}.get(kind.lower(), "DtoD")
    known = [s if s is not None and s.lower() in _MEMORY else None for s in (src, dst)]
    return COPIES.index(direction), known[0], known[1]


_SYNC_NAMES = {
    "context sync": "context",
    "device sync": "context",
    "stream sync": "stream",
    "stream synchronize": "stream",
    "event sync": "event",
    "event synchronize": "event",
    "stream wait event": "stream_wait",
}


def sync_kind(name: str) -> int:
    """Index in SYNC_KINDS of a ``cuda_sync`` row, or -1."""
    kind = _SYNC_NAMES.get(name.strip().lower())
    return -1 if kind is None else SYNC_KINDS.index(kind)
