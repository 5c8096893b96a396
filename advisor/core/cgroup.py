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
"""Minimum value that cgroup v1 writes for "no limit", which is about 2^63 bytes."""


class Throttled(NamedTuple):
    """Number of periods so far in which the CPU quota stopped the group, and the time stopped."""

    periods: int
    us: int
    """Time stopped, over all CPUs of the group, µs."""


class Cgroup:
    """Control group of the process, version 1 or 2, with the groups around it.

    Unreadable values are ``None``: without cgroups, or without access to them. ``mount`` and
    ``self_file`` are for tests."""

    def __init__(self, mount: Path = MOUNT, self_file: Path = SELF) -> None:
        self.mount = mount
        self._paths = _read_controllers(self_file)

    def cpu_quota(self) -> float | None:
        """Return the CPUs that the quota allows: the minimum of the group and the groups around
        it."""
        result = []
        for folder in self._folders("cpu"):
            limit = _read_text(folder / "cpu.max").split()
            if len(limit) == 2 and limit[0] != "max":
                result.append(_divide(limit[0], limit[1]))
            quota, period = (
                _read_text(folder / "cpu.cfs_quota_us"),
                _read_text(folder / "cpu.cfs_period_us"),
            )
            if quota and not quota.startswith("-"):
                result.append(_divide(quota, period))
        return min((value for value in result if value is not None), default=None)

    def memory_limit(self) -> int | None:
        """Return the bytes that the group may use: its lowest limit or one of the groups around
        it."""
        result = []
        for folder in self._folders("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                value = _read_text(folder / name)
                if value.isdecimal() and int(value) < UNLIMITED:
                    result.append(int(value))
        return min(result, default=None)

    def memory_used(self) -> int | None:
        """Return the bytes that the group uses, without file caches that the kernel can drop."""
        for folder in self._folders("memory"):
            for name in ("memory.current", "memory.usage_in_bytes"):
                value = _read_text(folder / name)
                if value.isdecimal():
                    stat = _parse_pairs(_read_text(folder / "memory.stat"))
                    cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
                    return max(0, int(value) - cache)
        return None

    def throttled(self) -> Throttled | None:
        """Return how long the CPU quota has stopped the group so far, or ``None`` without a
        quota."""
        for folder in self._folders("cpu"):
            stat = _parse_pairs(_read_text(folder / "cpu.stat"))
            if "nr_throttled" not in stat:
                continue
            us = stat.get("throttled_usec", stat.get("throttled_time", 0) // 1000)
            return Throttled(stat["nr_throttled"], us)
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the group and the groups around it, innermost first. In a container,
        the kernel's path may not exist under the mount. Then, only the mount is used."""
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
    """Return the bytes that this process may still use: the machine's free memory, or the rest of
    the container's limit if that is less. ``None`` on other systems than Linux. Arguments are for
    tests."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text(meminfo), re.MULTILINE)
    if match is None:
        return None
    cgroup = cgroup or Cgroup()
    limit, used = cgroup.memory_limit(), cgroup.memory_used()
    candidates = [int(match[1]) * 1024]
    if limit is not None and used is not None:
        candidates.append(max(0, limit - used))
    return min(candidates)


def count_cores() -> int:
    """Return the number of cores that this process may use, by its affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_memory() -> int | None:
    """Return the memory that this process uses now, bytes, or ``None`` if unknown. The maximum of
    ``getrusage`` is not used, as it starts with the parent's."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read_controllers(file: Path) -> dict[str, str]:
    """Return the path of the group by controller, with ``""`` for version 2."""
    result = {}
    for line in _read_text(file).splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                result[name] = parts[2]
    return result


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _divide(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


def _parse_pairs(text: str) -> dict[str, int]:
    result = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            result[name] = int(value)
    return result
