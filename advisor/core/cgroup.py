"""Resources of the process and the limits of its container: cores, CPU quota, memory, time spent
throttled."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
UNLIMITED = 1 << 60
"""Limit from which cgroup v1 has none: it writes "no limit" as about 2^63 bytes."""


class Throttled(NamedTuple):
    """Number of periods in which the CPU quota stopped the group so far, and for how long."""

    periods: int
    us: int
    """Time stopped, of all CPUs of the group together, µs."""


class Cgroup:
    """Control group of the process, version 1 or 2, with the groups around it.

    What cannot be read is ``None``: no cgroups, or none that this process may see. ``mount`` and
    ``self_file`` are for tests."""

    def __init__(self, mount: Path = MOUNT, self_file: Path = SELF) -> None:
        self.mount = mount
        self._paths = _controllers(self_file)

    def cpu_quota(self) -> float | None:
        """Return the CPUs that the quota allows: the least of the group and those around it."""
        result = []
        for folder in self._folders("cpu"):
            limit = _read(folder / "cpu.max").split()
            if len(limit) == 2 and limit[0] != "max":
                result.append(_ratio(limit[0], limit[1]))
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            if quota and not quota.startswith("-"):
                result.append(_ratio(quota, period))
        return min((value for value in result if value is not None), default=None)

    def memory_limit(self) -> int | None:
        """Return the bytes that the group may use: the least limit of it and those around it."""
        result = []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                value = _read(folder / name)
                if value.isdecimal() and int(value) < UNLIMITED:
                    result.append(int(value))
        return min(result, default=None)

    def memory_used(self) -> int | None:
        """Return the bytes that the group uses, without files that the kernel can drop."""
        for folder in self._folders("memory"):
            for name in ("memory.current", "memory.usage_in_bytes"):
                value = _read(folder / name)
                if value.isdecimal():
                    stat = _pairs(_read(folder / "memory.stat"))
                    cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
                    return max(0, int(value) - cache)
        return None

    def throttled(self) -> Throttled | None:
        """Return for how long the CPU quota stopped the group so far; ``None``: no quota."""
        for folder in self._folders("cpu"):
            stat = _pairs(_read(folder / "cpu.stat"))
            if "nr_throttled" not in stat:
                continue
            us = stat.get("throttled_usec", stat.get("throttled_time", 0) // 1000)
            return Throttled(stat["nr_throttled"], us)
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the group's folder and those around it, innermost first. In a container the path
        that the kernel gives may not exist under the mount: then only the mount is looked at."""
        for root, path in (
            (self.mount, self._paths.get("")),
            (self.mount / controller, self._paths.get(controller)),
        ):
            if path is None or ".." in path.split("/"):
                continue
            parts = [part for part in path.split("/") if part]
            for length in range(len(parts), -1, -1):
                folder = root.joinpath(*parts[:length])
                if folder.is_dir():
                    yield folder


def available_memory(cgroup: Cgroup | None = None, meminfo: Path = MEMINFO) -> int | None:
    """Return the bytes that this process may still take: what the machine has free, or what is left
    of the container's limit if that is less. ``None``: not Linux. Arguments are for tests."""
    free = re.search(r"^MemAvailable:\s+(\d+) kB", _read(meminfo), re.MULTILINE)
    if free is None:
        return None
    cgroup = cgroup or Cgroup()
    limit, used = cgroup.memory_limit(), cgroup.memory_used()
    left = [int(free[1]) * 1024]
    if limit is not None and used is not None:
        left.append(max(0, limit - used))
    return min(left)


def count_cores() -> int:
    """Return the number of cores that this process may use, by its affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_memory() -> int | None:
    """Return the memory that this process holds now, bytes; ``None``: the system does not say. The
    maximum of ``getrusage`` differs: it starts with the parent's."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _controllers(file: Path) -> dict[str, str]:
    """Return the path of the group by controller; ``""``: version 2."""
    result = {}
    for line in _read(file).splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                result[name] = parts[2]
    return result


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _ratio(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


def _pairs(text: str) -> dict[str, int]:
    result = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            result[name] = int(value)
    return result
