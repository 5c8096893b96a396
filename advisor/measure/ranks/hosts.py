"""Names of hosts and racks: from where traces lie and what their files are called."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

_OF_TENSORBOARD = re.compile(r"^(?P<host>[A-Za-z][\w.-]*?)_\d+(?:\.\d+)?\.pt\.trace\.json")
"""``<host>_<pid>.<time>.pt.trace.json``, as ``tensorboard_trace_handler`` names files."""
_NAMED = re.compile(
    r"^(?:node|host|nid|hgx|dgx|gpu|ip|compute|machine|server|rack|cn|r\d+)[\w.-]*?\d+$", re.I
)
_RANK = re.compile(r"[-_.]?rank[-_. =]?\d+.*$", re.I)
_LAST = re.compile(r"^(?P<rack>.*\d)\D+\d+$")


def host_of(path: str) -> str:
    """The host that a trace was written on, as its file's name or a folder around it says; empty:
    neither does."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if not parts:
        return ""
    if found := _OF_TENSORBOARD.match(parts[-1]):
        return found["host"][:80]
    own = _RANK.sub("", parts[-1])
    for part in (own, *reversed(parts[:-1])):
        if part and _NAMED.match(part):
            return part[:80]
    return ""


def racks(hosts: Iterable[str]) -> dict[str, str]:
    """Host -> rack, where the names tell racks: what ends with the number before the last. Empty:
    there are not several racks of several hosts."""
    result: dict[str, list[str]] = defaultdict(list)
    for host in sorted(set(hosts)):
        match = _LAST.match(host.split(".", 1)[0])
        if match is None:
            return {}
        result[match["rack"]].append(host)
    if len(result) < 2 or max(map(len, result.values())) < 2:
        return {}
    return {host: rack for rack, members in result.items() for host in members}
