"""The path between GPUs, kept in the run: NCCL's log, and the topology of the node.

Where the user has set ``NCCL_DEBUG`` and ``NCCL_DEBUG_FILE``, this process's file is copied, NCCL's
lines alone. The topology is asked for once on each node of a job, at the lowest priority. Both are
the work of a thread that sleeps; training waits for none of it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from advisor.core.credentials import clean_value
from advisor.core.run_directory import NCCL_LOG, TOPOLOGY
from advisor.recorder.background import Background

MAX_BYTES = 4 << 20
"""Of the log: what NCCL says of its path stands at the beginning."""
EVERY_SECONDS, ASK_SECONDS = 30.0, 30.0
COMMANDS = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"))
MAX_LINE = 4096
_OF_NCCL = re.compile(rb"CCL (?:INFO|WARN|version)")


class NetworkKeeper(Background):
    """Copies into a rank's folder until ``stop``."""

    name = "network"
    stop_seconds = 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._source = log_file(os.environ)
        self._size = -1
        self._asks = is_first_of_several(os.environ)

    def start(self) -> None:
        """Begin, where there is anything to keep."""
        if self._source is not None or self._asks:
            super().start()

    def work(self) -> None:
        """Ask once, and copy the log now and then, at last at the end."""
        with suppress(Exception):
            topology = ask_topology() if self._asks else None
            if topology is not None:
                (self._folder / TOPOLOGY).write_bytes(topology)
        while self._source is not None:
            over = self.over.wait(EVERY_SECONDS)
            self._copy(self._source)
            if over:
                return

    def _copy(self, source: Path) -> None:
        """What the log holds now, if it has grown."""
        if not source.is_file() or source.stat().st_size == self._size or self._size >= MAX_BYTES:
            return
        with source.open("rb") as file:
            data = file.read(MAX_BYTES)
        self._size = len(data)
        kept = [
            clean_value(line[:MAX_LINE].decode("utf-8", "replace"))
            for line in data.split(b"\n")
            if _OF_NCCL.search(line[:MAX_LINE])
        ]
        hidden = self._folder / f".{NCCL_LOG}"
        hidden.write_text("\n".join([*kept, ""]), encoding="utf-8")
        hidden.replace(self._folder / NCCL_LOG)


def log_file(env: os._Environ[str] | dict[str, str]) -> Path | None:
    """Where NCCL writes its log in this process; ``None``: nowhere, or to the terminal. ``%h`` and
    ``%p`` stand for host and process, as NCCL's documentation of ``NCCL_DEBUG_FILE`` says."""
    name = env.get("NCCL_DEBUG_FILE", "")
    if not name or env.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE", "WARN"):
        return None
    host = socket.gethostname()
    known = {"%h": host, "%p": str(os.getpid()), "%%": "%"}
    path = Path(re.sub("%[hp%]", lambda found: known[found[0]], name))
    return None if str(path).startswith("/dev/") else path


def is_first_of_several(env: os._Environ[str] | dict[str, str]) -> bool:
    """The process is one of a job, and the first on its node."""
    return env.get("WORLD_SIZE", "1") not in ("", "0", "1") and env.get("LOCAL_RANK", "0") == "0"


def ask_topology() -> bytes | None:
    """What the first tool that is here prints; ``None``: there is none, or it failed. Without a
    pipe, for the reason that ``environment._git`` gives."""
    import tempfile

    found = next((c for c in COMMANDS if shutil.which(c[0]) is not None), None)
    if found is None:
        return None
    command = [str(shutil.which(found[0])), *found[1:]]
    if (nice := shutil.which("nice")) is not None:
        command = [nice, "-n", "19", *command]
    try:
        with tempfile.TemporaryFile() as out:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL,
                close_fds=False, timeout=ASK_SECONDS, check=False,
            )  # fmt: skip
            out.seek(0)
            return out.read(MAX_BYTES) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError):
        return None
