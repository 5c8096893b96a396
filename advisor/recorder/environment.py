"""Facts recorded once about a run and its processes: command, versions, flags, limits, devices.

Nothing here raises or imports packages: torch and others are only looked up among the loaded
modules, CUDA is only queried after the process has initialised it, and unavailable facts are left
out. Only the listed environment variables are kept."""

import gc
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from advisor import __version__
from advisor.core.cgroup import Cgroup, count_cores
from advisor.core.credentials import HIDDEN, clean_command, clean_value, is_secret_name
from advisor.core.run_directory import Manifest, RankInfo, RecordedDevice

_T = TypeVar("_T")

GIT_SECONDS = 2.0
"""Timeout of a git command, s. A repository that takes longer is not described."""

PACKAGES = """
    torch torchvision torchaudio triton numpy transformers accelerate datasets tokenizers peft
    trl lightning pytorch_lightning deepspeed megatron torchtitan torchao torchdata flash_attn
    xformers bitsandbytes apex transformer_engine timm nvidia.dali webdataset kornia nvtx
    pynvml psutil
    """.split()
"""Packages whose version is recorded if the process has loaded them."""

ENV = set(
    """
        CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
        CUDA_DEVICE_MAX_CONNECTIONS CUDA_CACHE_DISABLE CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
        CUDA_AUTO_BOOST CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE
        NVIDIA_VISIBLE_DEVICES TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TEARDOWN_CUPTI
        PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF
        PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_JIT PYTORCH_NVML_BASED_CUDA_CHECK
        TORCH_SHOW_CPP_STACKTRACES TORCH_SHOW_DISPATCH_TRACE TORCH_DISTRIBUTED_DEBUG
        TORCH_CPP_LOG_LEVEL TORCH_LOGS TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE
        TORCHDYNAMO_VERBOSE TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_COMPILE_THREADS
        TORCHINDUCTOR_FX_GRAPH_CACHE TORCH_USE_CUDA_DSA TORCH_USE_RTLD_GLOBAL
        OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES OMP_WAIT_POLICY OMP_DYNAMIC
        MKL_NUM_THREADS MKL_DYNAMIC OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS
        NUMEXPR_MAX_THREADS VECLIB_MAXIMUM_THREADS KMP_AFFINITY KMP_BLOCKTIME
        GOMP_CPU_AFFINITY GOMP_SPINCOUNT RAYON_NUM_THREADS TOKENIZERS_PARALLELISM
        MALLOC_ARENA_MAX MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_
        PYTHONDEVMODE PYTHONMALLOC PYTHONTRACEMALLOC PYTHONASYNCIODEBUG
        PYTHONHASHSEED PYTHON_GIL UCX_TLS UCX_NET_DEVICES GLOO_SOCKET_IFNAME RANK
        LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK
        TORCHELASTIC_RESTART_COUNT SLURM_NNODES SLURM_NTASKS SLURM_NTASKS_PER_NODE
        SLURM_CPUS_PER_TASK SLURM_CPUS_ON_NODE SLURM_GPUS_ON_NODE SLURM_PROCID
        SLURM_LOCALID
        """.split()
)
"""Names of the environment variables that are recorded, without credentials. No others are."""
ENV_PREFIXES = ("NCCL_", "TORCH_NCCL_", "RCCL_")


def build_manifest(options: dict[str, Any], entry: str, run_id: str) -> Manifest:
    """Return the run's manifest. ``entry``: what began the recording, such as ``decorator``."""
    commit, dirty = _try(git_state) or (None, None)
    return Manifest(
        run_id=run_id,
        started_unix_ns=time.time_ns(),
        command=_try(lambda: clean_command(command_line())) or [],
        entry=entry,
        git_commit=commit,
        git_dirty=dirty,
        world_size=_try(lambda: _read_job_value("world_size")),
        versions=_try(list_versions) or {},
        options=options,
    )


def rank_info() -> RankInfo:
    """Return the facts about this process: its placement, devices, limits and flags."""
    unix, perf = clock_anchors()
    cgroup = _try(Cgroup)
    return RankInfo(
        rank=_try(lambda: _read_job_value("rank")),
        local_rank=_parse_int(os.environ.get("LOCAL_RANK")),
        pid=os.getpid(),
        anchor_unix_ns=unix,
        anchor_perf_ns=perf,
        devices=_try(list_devices) or [],
        cpus=_try(lambda: usable_cpus(cgroup)),
        cpus_total=os.cpu_count(),
        memory_bytes=_try(lambda: _usable_memory(cgroup)),
        flags=_try(read_flags) or {},
        env=_try(environment) or {},
        ulimits=_try(ulimits) or {},
        shm_bytes=_try(_shm_bytes),
    )


def clock_anchors() -> tuple[int, int]:
    """Return one instant as (Unix time, ``perf_counter_ns``), ns, the most exact of five tries."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        if best is None or after - before < best[0]:
            best = (after - before, unix, (before + after) // 2)
    assert best is not None
    return best[1], best[2]


# -- the process --------------------------------------------------------------------------------


def command_line() -> list[str]:
    """Return the command as it was typed, as far as the interpreter knows it. A process that
    ``multiprocessing`` spawned has its parent's arguments."""
    words = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])
    if "--multiprocessing-fork" in words:
        words = [sys.executable, *sys.argv]
    if words:
        words[0] = Path(words[0]).name
    return words


def environment() -> dict[str, str]:
    """Return the recorded environment variables that are set, with secrets hidden."""
    return {
        name: HIDDEN if is_secret_name(name) else clean_value(value)
        for name, value in sorted(os.environ.items())
        if name in ENV or name.startswith(ENV_PREFIXES)
    }


def git_state(folder: Path | None = None) -> tuple[str | None, bool | None]:
    """Return (commit, uncommitted changes in tracked files) of the repository around a folder."""
    folder = folder or Path.cwd()
    options = "--porcelain=v2 --branch --untracked-files=no --ignore-submodules"
    status = _run_git(folder, "status", *options.split())
    if status is None:
        return _read_head(folder), None
    lines = status.decode("utf-8", "replace").splitlines()
    oid = next((x.split()[-1] for x in lines if x.startswith("# branch.oid ")), None)
    commit = oid if oid is not None and _is_commit(oid) else None
    return commit, any(not line.startswith("#") for line in lines)


def _run_git(folder: Path, *words: str) -> bytes | None:
    """Return git's output, or ``None`` if it failed or is not installed.

    Uses no pipe: loader workers that are forked meanwhile would inherit its other end, and the
    reader would wait until they end, perhaps when training ends. Popen creates no pipe, not even
    its own, with a full path, an open file and ``close_fds=False``."""
    program = shutil.which("git")
    if program is None:
        return None
    command = [program, "-C", str(folder), "-c", "core.fsmonitor=false", *words]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        with tempfile.TemporaryFile() as out:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                close_fds=False,
                timeout=GIT_SECONDS,
                env=env,
                check=False,
            )
            out.seek(0)
            return out.read() if process.returncode == 0 else None
    except (OSError, subprocess.SubprocessError):
        return None


def _read_head(folder: Path) -> str | None:
    """Return the commit from the files of .git, without running git, or ``None`` if unknown."""
    for place in (folder.resolve(), *folder.resolve().parents):
        git = place / ".git"
        if git.is_file():
            git = place / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        if not (git / "HEAD").is_file():
            continue
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if _is_commit(head):
            return head
        name = head.removeprefix("ref:").strip()
        common = git / "commondir"
        home = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
        if (home / name).is_file():
            value = (home / name).read_text(encoding="utf-8").strip()
            return value if _is_commit(value) else None
        packed = home / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
            if line.endswith(f" {name}") and _is_commit(line.split()[0]):
                return line.split()[0]
        return None
    return None


def _is_commit(text: str) -> bool:
    return len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text)


def list_versions() -> dict[str, str]:
    """Return the versions of loaded packages, CUDA, HIP, cuDNN, NCCL and the system, by name."""
    result = {"advisor": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        version = _try(lambda name=name: getattr(sys.modules.get(name), "__version__", None))  # type: ignore[misc]
        if isinstance(version, str):
            result[name] = str(version)[:100]
    torch = sys.modules.get("torch")
    if torch is not None:
        result |= _read_texts(
            {
                "cuda": lambda: torch.version.cuda,
                "hip": lambda: torch.version.hip,
                "cudnn": lambda: _get_attribute(torch, "backends.cudnn.version"),
                "nccl": lambda: _nccl_version(torch),
            }
        )
    result["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    return result


def _nccl_version(torch: Any) -> str | None:
    """Return NCCL's version, or ``None`` without initialised CUDA, where torch complains."""
    if torch.version.cuda is None or not torch.cuda.is_initialized():
        return None
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _read_texts(getters: dict[str, Callable[[], Any]]) -> dict[str, str]:
    values = {name: _try(get) for name, get in getters.items()}
    return {name: str(value) for name, value in values.items() if value is not None}


def _read_job_value(name: str) -> int | None:
    """Return ``rank`` or ``world_size`` from torch or the launcher, or ``None`` if unknown."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(getattr(distributed, f"get_{name}")())
    return _parse_int(os.environ.get(name.upper()))


def _parse_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


# -- limits -------------------------------------------------------------------------------------


def usable_cpus(cgroup: Cgroup | None = None) -> int:
    """Return the number of usable CPUs: the affinity, or the container's quota if lower."""
    cores = count_cores()
    quota = cgroup.cpu_quota() if cgroup is not None else None
    return cores if quota is None else max(1, min(cores, int(quota)))


def _usable_memory(cgroup: Cgroup | None) -> int | None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit() if cgroup is not None else None
    return total if limit is None else min(total, limit)


def ulimits() -> dict[str, int]:
    """Return the soft resource limits by name, -1 if unlimited."""
    import resource

    result = {}
    for name in ("nofile", "memlock", "nproc", "stack", "core"):
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is not None:
            soft = resource.getrlimit(number)[0]
            result[name] = -1 if soft == resource.RLIM_INFINITY else soft
    return result


def _shm_bytes() -> int | None:
    stat = os.statvfs("/dev/shm")
    return stat.f_blocks * stat.f_frsize


# -- NUMA ---------------------------------------------------------------------------------------

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def cpu_list(text: str) -> set[int]:
    """Parse a set of CPUs in the kernel's format, such as ``0-3,8,10-11``."""
    result: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            result.update(range(int(first), int(last or first) + 1))
    return result


def numa_nodes(folder: Path = NODES) -> tuple[int | None, list[int] | None]:
    """Return the number of NUMA nodes with CPUs, and the nodes in the process's affinity."""
    nodes = {}
    for path in sorted(folder.glob("node[0-9]*")):
        cpus = cpu_list((path / "cpulist").read_text(encoding="ascii"))
        if cpus:
            nodes[int(path.name.removeprefix("node"))] = cpus
    if not nodes or not hasattr(os, "sched_getaffinity"):
        return None, None
    affinity = os.sched_getaffinity(0)
    return len(nodes), sorted(number for number, cpus in nodes.items() if cpus & affinity)


def gpu_node(bus: str, folder: Path = PCI) -> int | None:
    """Return the NUMA node of a PCI device (``0000:3b:00.0``), or ``None`` if unknown."""
    node = int((folder / bus.lower() / "numa_node").read_text(encoding="ascii"))
    return node if node >= 0 else None


# -- torch --------------------------------------------------------------------------------------


def read_flags() -> dict[str, Any]:
    """Return the flags that rules use, by their name in torch, without unknown ones."""
    nodes, own_nodes = _try(numa_nodes) or (None, None)
    result: dict[str, Any] = {
        "gc_enabled": gc.isenabled(),
        "gc_threshold": list(gc.get_threshold()),
        "gc_frozen": gc.get_freeze_count(),
        "start_method": _try(lambda: multiprocessing.get_start_method(allow_none=True)),
        "numa_nodes": nodes,
        "numa_node_cpus": own_nodes,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        result |= {name: _try(get) for name, get in _torch_flags(torch).items()}
    return {name: value for name, value in result.items() if value is not None}


_FLAGS = {
    "float32_matmul_precision": "get_float32_matmul_precision",
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
    ),
    "cudnn.enabled": "backends.cudnn.enabled",
    "cudnn.benchmark": "backends.cudnn.benchmark",
    "cudnn.deterministic": "backends.cudnn.deterministic",
    "deterministic_algorithms": "are_deterministic_algorithms_enabled",
    "anomaly_mode": "is_anomaly_enabled",
    "grad_enabled": "is_grad_enabled",
    "num_threads": "get_num_threads",
    "interop_threads": "get_num_interop_threads",
    "flash_sdp": "backends.cuda.flash_sdp_enabled",
    "mem_efficient_sdp": "backends.cuda.mem_efficient_sdp_enabled",
    "math_sdp": "backends.cuda.math_sdp_enabled",
}
"""Flags by name, each with the attribute or function of torch that returns it."""


def _torch_flags(torch: Any) -> dict[str, Callable[[], Any]]:
    result: dict[str, Callable[[], Any]] = {
        name: lambda path=path: _get_attribute(torch, path)  # type: ignore[misc]
        for name, path in _FLAGS.items()
    }
    return result | {
        "cuda.matmul.allow_tf32": lambda: _allows_tf32(torch.backends.cuda.matmul),
        "cudnn.allow_tf32": lambda: _allows_tf32(torch.backends.cudnn),
        "autocast": lambda: _autocast_dtype(torch),
        "compile": _count_graphs,
        "arch_list": lambda: torch.cuda.get_arch_list() or None,
        "sync_debug_mode": lambda: _if_cuda(torch, torch.cuda.get_sync_debug_mode),
        "numa_node_gpu": lambda: _if_cuda(torch, lambda: gpu_node(_bus_id(torch))),
    }


def _get_attribute(torch: Any, path: str) -> Any:
    for name in path.split("."):
        torch = getattr(torch, name)
    return torch() if callable(torch) else torch


def _allows_tf32(backend: Any) -> bool | None:
    """Return whether TF32 is allowed, by the newer setting if mixed settings make torch raise."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return str(backend.fp32_precision) == "tf32"


def _autocast_dtype(torch: Any) -> str | None:
    """Return the dtype of the open autocast region, or ``None`` if none is open here. Other places
    of the program may still use autocast."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return None


def _count_graphs() -> int | None:
    """Return the number of graphs that torch.compile has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    return int(utils.counters["stats"].get("unique_graphs", 0))


def _if_cuda(torch: Any, get: Callable[[], _T]) -> _T | None:
    """Call ``get`` only in a process that already uses the GPU, else return ``None``. The call
    would initialise CUDA, after which forked DataLoader workers cannot do so."""
    return get() if torch.cuda.is_initialized() else None


def _bus_id(torch: Any) -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        f":{properties.pci_device_id:02x}.0"
    )


def list_devices() -> list[RecordedDevice]:
    """Return the visible GPUs, the current one first. Empty before CUDA is initialised."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    order = [current, *(i for i in range(torch.cuda.device_count()) if i != current)]
    driver = _try(_driver_version)
    result = []
    for index in order:
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        result.append(
            RecordedDevice(
                index=index,
                name=str(properties.name),
                uuid=None if uuid is None else _prefix_uuid(str(uuid)),
                total_bytes=int(properties.total_memory),
                capability=f"{properties.major}.{properties.minor}",
                driver=driver,
            )
        )
    return result


def _prefix_uuid(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _driver_version() -> str | None:
    from advisor.recorder.nvml import open_nvml

    nvml = open_nvml()
    if isinstance(nvml, str):
        return None
    try:
        return nvml.driver
    finally:
        nvml.close()


def _try(get: Callable[[], _T]) -> _T | None:
    """Return a value, or ``None`` whatever goes wrong: these facts never justify a failure of
    training, and torch or the system may raise any error."""
    try:
        return get()
    except Exception:  # torch, a driver or the system may raise anything
        return None
