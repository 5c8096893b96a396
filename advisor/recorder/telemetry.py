"""Sampler of GPU and host in a thread, a few times a second. Host samples have CPU, memory, swap,
disk, and throttling by the CPU quota."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from advisor.core.cgroup import Cgroup
from advisor.core.run_directory import GpuSample, HostSample, Sample
from advisor.recorder.background import BackgroundThread
from advisor.recorder.nvml import Nvml, NvmlDevice, open_nvml

if sys.platform == "linux":
    import resource

MAX_HZ = 20.0
"""Maximum number of samples per second: faster sampling slowed the training thread (by a third at
100 Hz) and held the driver's lock."""


class Sampler(BackgroundThread):
    """Daemon thread that calls ``write`` with a ``run_directory.Sample`` ``hz`` times a second,
    until ``stop``.

    Each sample has the cheap queries. The costly ones (processes, ECC, PCIe, children, disk) run
    every ``slow_every_s``."""

    name = "telemetry"
    stop_seconds = 2.0

    def __init__(
        self, write: Callable[[Sample], None], *, hz: float = 2.0, slow_every_s: float = 7.0
    ) -> None:
        super().__init__()
        self.write = write
        self.interval = 1 / min(max(hz, 1e-3), MAX_HZ)
        self.slow_every_s = slow_every_s
        self.without_gpu: str | None = None
        """Reason why there are no GPU samples, or ``None`` if there are or sampling has not
        begun."""

    def work(self) -> None:
        with SampleSource() as source:
            self.without_gpu = source.without_gpu
            self._loop(source)

    def _loop(self, source: SampleSource) -> None:
        begun = time.monotonic()
        slow_at = begun
        ticks = 0
        while True:
            now = time.monotonic()
            slow = now >= slow_at
            if slow:
                slow_at = now + self.slow_every_s
            self.write(source.sample(slow=slow))
            # late ticks are dropped, not made up for
            ticks = max(ticks + 1, int((time.monotonic() - begun) / self.interval) + 1)
            if self.stop_event.wait(max(0.0, begun + ticks * self.interval - time.monotonic())):
                return


class SampleSource:
    """Context manager that samples the host, and the GPUs through NVML. By default, it samples the
    GPUs that this process sees, and does not count it and its children as other processes. With
    ``every``, it samples all GPUs of the machine and counts all processes."""

    def __init__(self, *, every: bool = False) -> None:
        self.host = HostSampler()
        self._every = every
        opened = open_nvml()
        self.nvml: Nvml | None = None if isinstance(opened, str) else opened
        self.without_gpu: str | None = opened if isinstance(opened, str) else None
        self.devices: list[NvmlDevice] = []
        if self.nvml is not None:
            self.devices = self.nvml.devices(every=every)
            if not self.devices:
                self.without_gpu = "no GPU is visible to this process"

    def sample(self, *, slow: bool) -> Sample:
        """Return one sample of GPUs and host. ``slow``: include the costly queries."""
        now = time.perf_counter_ns()
        host = self.host.sample(slow=slow)
        gpus: list[GpuSample] = []
        for device in list(self.devices):
            gpu = device.sample(slow=slow, own=() if self._every else self.host.pids)
            if gpu is not None:
                gpus.append(gpu)
            if device.lost:
                self.devices.remove(device)
                self.without_gpu = f"the driver has lost GPU {device.uuid or 'of unknown UUID'}"
        return Sample(t=now, gpus=gpus, host=host)

    def close(self) -> None:
        """Release the driver's resources."""
        for device in self.devices:
            device.close()
        if self.nvml is not None:
            self.nvml.close()

    def __enter__(self) -> SampleSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostSampler:
    """Sampler of the host and of this process with its children. psutil is optional: without it,
    samples only have the container's figures.

    If the kernel keeps no list of children, finding them means examining every process of the
    machine, so only slow samples do it."""

    def __init__(self) -> None:
        self.psutil = _import_psutil()
        self.cgroup = Cgroup()
        self.limit = self.cgroup.memory_limit()
        self._process = self.psutil.Process() if self.psutil is not None else None
        self._children: dict[int, Any] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._sampled_at: float | None = None
        self._cpu_times: tuple[float, float] | None = None

    @property
    def pids(self) -> set[int]:
        """Process ids of this process and its children, as of the last slow sample."""
        return {os.getpid(), *self._children}

    def sample(self, *, slow: bool) -> HostSample:
        """Return the host's state. CPU shares are since the previous sample."""
        host = HostSample()
        throttled = self.cgroup.throttled()
        if throttled is not None:
            host.throttled_periods, host.throttled = throttled
        host.run_delay = _read_run_delay()
        counters = read_memory_counters()
        host.minor_faults = None if counters is None else counters.minor_faults
        psutil, process = self.psutil, self._process
        if psutil is None or process is None:
            return host
        try:
            if slow:
                self._children = self._find_children()
                host.children_rss = self._children_memory()
                host.swap_used = int(psutil.swap_memory().used)
                disk = psutil.disk_io_counters()
                if disk is not None:
                    host.disk_read, host.disk_write = int(disk.read_bytes), int(disk.write_bytes)
            host.cpu = self._machine_use()
            self._add_workers()
            host.process_cpu, host.children_cpu = self._process_use()
            host.rss = int(process.memory_info().rss)
            host.memory_available = self._available_memory()
        except (OSError, RuntimeError, ValueError, psutil.Error):
            return host  # keep what was read so far; containers hide much of /proc
        return host

    def _machine_use(self) -> float | None:
        """Return the use of all CPUs since the last sample, %, or ``None`` for the first sample."""
        times = self.psutil.cpu_times()  # type: ignore[union-attr]
        # user time already includes guest time
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        before, self._cpu_times = self._cpu_times, (total, idle)
        if before is None or total <= before[0]:
            return None
        share = float(1 - (idle - before[1]) / (total - before[0]))
        return round(100 * min(1.0, max(0.0, share)), 1)

    def _process_use(self) -> tuple[float | None, float | None]:
        """Return the CPU use of the process with its children, and of the children alone, % of one
        CPU, or ``None`` for the first sample."""
        now = time.perf_counter()
        total = children = 0.0
        spent: dict[int, float] = {}
        for pid, process in {os.getpid(): self._process, **self._children}.items():
            try:
                times = process.cpu_times()
            except (OSError, self.psutil.Error):  # type: ignore[union-attr]
                continue  # a worker that has ended
            spent[pid] = times.user + times.system
            increment = max(0.0, spent[pid] - self._cpu_seconds.get(pid, spent[pid]))
            total += increment
            children += increment * (pid in self._children)
        before, self._sampled_at, self._cpu_seconds = self._sampled_at, now, spent
        if before is None or now <= before:
            return None, None
        return round(100 * total / (now - before), 1), round(100 * children / (now - before), 1)

    def _add_workers(self) -> None:
        """Add processes that ``multiprocessing`` has started since children were last listed."""
        workers = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
        for worker in list(workers):
            pid = getattr(getattr(worker, "_popen", None), "pid", None)
            if isinstance(pid, int) and pid not in self._children:
                try:
                    self._children[pid] = self.psutil.Process(pid)  # type: ignore[union-attr]
                except self.psutil.Error:  # type: ignore[union-attr]
                    continue  # it has ended

    def _children_memory(self) -> int | None:
        """Return the resident memory of the children, bytes, or ``None`` without children."""
        sizes = []
        for child in self._children.values():
            try:
                sizes.append(int(child.memory_info().rss))
            except (OSError, self.psutil.Error):  # type: ignore[union-attr]
                continue
        return sum(sizes) if sizes else None

    def _available_memory(self) -> int:
        """Return the bytes available without swapping, within the container's limit."""
        free = int(self.psutil.virtual_memory().available)  # type: ignore[union-attr]
        used = self.cgroup.memory_used() if self.limit is not None else None
        if self.limit is None or used is None:
            return free
        return max(0, min(free, self.limit - used))

    def _find_children(self) -> dict[int, Any]:
        """Return all descendants by process id, from the kernel's own lists if it keeps them."""
        psutil = self.psutil
        assert psutil is not None
        result: dict[int, Any] = {}
        pending = [os.getpid()]
        while pending:
            pid = pending.pop()
            children = _list_children(pid)
            if children is None:
                descendants = self._process.children(recursive=True)  # type: ignore[union-attr]
                return {child.pid: self._children.get(child.pid, child) for child in descendants}
            for child in children:
                if child not in result:
                    pending.append(child)
                    try:
                        result[child] = self._children.get(child) or psutil.Process(child)
                    except psutil.Error:
                        continue
        return result


class MemoryCounters(NamedTuple):
    """Counters of this process."""

    minor_faults: int
    """Number of page faults so far that needed no disk."""
    max_resident: int
    """Largest resident memory so far, bytes."""


def read_memory_counters() -> MemoryCounters | None:
    """Return the counters of this process so far, or ``None`` except on Linux."""
    if sys.platform != "linux":
        return None
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return MemoryCounters(usage.ru_minflt, usage.ru_maxrss << 10)


FAULT_PAGES, FAULT_REPEATS = 256, 5
"""Number of pages that :func:`measure_page_fault` touches at once, and how often."""


def measure_page_fault() -> float | None:
    """Return how long this machine takes to map a page and to take it back, ns: the median of a few
    tries of 1 MiB, which last 1 to 4 ms in all. ``None`` except on Linux, or if memory is full."""
    if sys.platform != "linux":
        return None
    size, tries = FAULT_PAGES * mmap.PAGESIZE, []
    try:
        for _ in range(FAULT_REPEATS):
            start = time.perf_counter_ns()
            with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                memory.madvise(mmap.MADV_NOHUGEPAGE)
                memory[:: mmap.PAGESIZE] = bytes(FAULT_PAGES)
            tries.append(time.perf_counter_ns() - start)
    except (OSError, ValueError):
        return None
    return sorted(tries)[FAULT_REPEATS // 2] / FAULT_PAGES


def _read_run_delay() -> int | None:
    """Return the time that the main thread has waited for a core so far, ns, or ``None`` if the
    kernel does not count it. ``schedstat`` has the time on a core, this, and the turns."""
    pid = os.getpid()
    try:
        counters = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()
        return int(counters[1]) if any(map(int, counters)) else None
    except (OSError, ValueError, IndexError):
        return None


def _list_children(pid: int) -> list[int] | None:
    """Return a process's children from ``/proc``, or ``None`` if the kernel keeps no list."""
    tasks = Path(f"/proc/{pid}/task")
    result = []
    try:
        for task in tasks.iterdir():
            result += [int(x) for x in (task / "children").read_text(encoding="ascii").split()]
    except FileNotFoundError:
        return None if tasks.is_dir() else []  # the kernel has no list, or the process has ended
    except OSError:
        return []
    return result


def _import_psutil() -> ModuleType | None:
    try:
        import psutil
    except ImportError:
        return None
    return psutil  # type: ignore[no-any-return]
