"""Lets a process write below some folders only: the Linux kernel's Landlock, where there is one.

It holds native code too (C++, Rust), and every process that is started, which nothing in Python
does. Elsewhere the audit hook in ``overlay.py`` is what there is.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38
_VERSION = 1
# linux/landlock.h: all that changes a file system; truncating came with the third version
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TRUNCATES_FROM = 3
DEVICES = ("/dev", "/proc")
"""Terminals, GPUs, shared memory of loader workers; what a process says of itself."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """Of Landlock in the running kernel; 0: there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    nothing = (None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    try:
        return max(0, int(ctypes.CDLL(None).syscall(_CREATE, *nothing)))
    except (OSError, AttributeError):
        return 0


def confinement(folders: Iterable[Path]) -> Callable[[], None] | None:
    """What a child is to run before its program, so that it and its children write nowhere but
    below ``folders`` and to devices; ``None``: this system has no Landlock."""
    result = version()
    if result < _TRUNCATES_FROM:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    access = _WRITE | _REFER | _TRUNCATE
    paths = [os.fsencode(path) for path in (*map(str, folders), *DEVICES)]

    def confine() -> None:
        rules = _Ruleset(access)
        size = ctypes.c_size_t(ctypes.sizeof(rules))
        ruleset = libc.syscall(_CREATE, ctypes.byref(rules), size, ctypes.c_uint32(0))
        if ruleset < 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        for path in paths:
            beneath = _Beneath(access, os.open(path, os.O_PATH | os.O_CLOEXEC))
            if libc.syscall(_ADD, ruleset, 1, ctypes.byref(beneath), ctypes.c_uint32(0)) < 0:
                raise OSError(ctypes.get_errno(), "Landlock")
            os.close(beneath.parent_fd)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        if libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)) < 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        os.close(ruleset)

    return confine
