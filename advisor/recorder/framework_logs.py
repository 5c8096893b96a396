"""Logs of torch.compile and NCCL kept in the run: graph breaks, guards, times, kernels, the path
between GPUs, and the topology of the node.

torch passes structured records to the handlers of one logger, as ``TORCH_TRACE=FOLDER`` writes them
(https://github.com/pytorch/tlparse). It makes them only if there is a handler, and some are slow to
make, such as whole graphs as text. So the logger's list of handlers claims to be empty except for
the few records to keep. If the user has set ``TORCH_TRACE``, only the user's log is written.

If the user has set ``NCCL_DEBUG`` and ``NCCL_DEBUG_FILE``, NCCL's lines of this process's file are
copied. The topology is queried once per node of a job, at the lowest priority. Both happen in a
thread that mostly sleeps, and training does not wait for it."""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from advisor.core.credentials import clean_value
from advisor.core.run_directory import NCCL_LOG, TOPOLOGY
from advisor.recorder.background import BackgroundThread

LOGGER = "torch.__trace"
CHOSEN_BY_USER = ("TORCH_TRACE", "TORCH_DTRACE")
MAX_LOG_BYTES, MAX_RECORD = 16 << 20, 256 << 10
"""Maximum number of bytes kept per process and per record."""
_ARTIFACTS = ("dynamo_graph_break_reason", "recompile_reasons")
_METRIC_FIELDS = frozenset(
    (
        "compile_id", "co_name", "co_filename", "co_firstlineno", "duration_us",
        "entire_frame_compile_time_s", "inductor_compile_time_s", "recompile_reason", "fail_reason",
        "cudagraph_skip_reason",
    )
)  # fmt: skip
"""Fields to keep of a compilation's metrics. The others are settings, which are long."""
_LINES_TO_KEEP = {
    # the line of the program that each node of the graph comes from, without the code
    "dynamo_output_graph": re.compile(r"^ *(# File: .+?:\d+ in [^,]+|\w+(?=:| =))", re.MULTILINE),
    # the nodes that each kernel consists of
    "inductor_output_code": re.compile(
        r"^( *# [\w ]*Source Nodes: .+| *(?:triton|cpp)_\w+(?:\.run)?(?=\()"
        r"|(?:triton|cpp)_\w+ = async_compile|.*extern_kernels\.\w+(?=\())",
        re.MULTILINE,
    ),
}


_STACK_LINE = re.compile(r'^ *File ".+", line \d+, in ')


class CompileRecord(Struct):
    """Record of ``TORCH_TRACE``, encoded with its payload."""

    text: bytes


class _Selective(list[Any]):
    """Handlers of the logger, false in ``trace_structured`` for records that are not kept."""

    def __bool__(self) -> bool:
        if len(self) != 1:
            return bool(len(self))
        caller = sys._getframe(1)
        if caller.f_code.co_name != "trace_structured":
            return True
        caller_locals = caller.f_locals
        kind = caller_locals.get("name")
        if kind == "artifact":
            try:
                return caller_locals["metadata_fn"]().get("name") in _ARTIFACTS
            except Exception:  # in the middle of the program's compilation
                return False
        return kind in _LINES_TO_KEEP or kind == "compilation_metrics"


class CompileLogHandler(logging.Handler):
    """Handler that passes on the records to keep in torch's own format. Never raises."""

    def __init__(self, put: Callable[[CompileRecord], None]) -> None:
        super().__init__()
        self._put = put
        self._pid = os.getpid()
        self._bytes = 0

    def install(self) -> None:
        """Add the handler, unless the user has one or torch has no such logger."""
        log = logging.root.manager.loggerDict.get(LOGGER)
        if isinstance(log, logging.Logger) and not any(map(os.environ.get, CHOSEN_BY_USER)):
            # torch's own handler removes itself on its first use without TORCH_TRACE
            log.handlers = _Selective([*log.handlers, self])

    def remove(self) -> None:
        log = logging.getLogger(LOGGER)
        if self in list(log.handlers):
            log.handlers = [handler for handler in log.handlers if handler is not self]

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record, cut to what the analysis reads."""
        if os.getpid() != self._pid or self._bytes > MAX_LOG_BYTES:
            return
        try:
            text = _encode_record(
                record, record.__dict__["metadata"], record.__dict__.get("payload")
            )
        except Exception:  # in the middle of the program's compilation
            self._bytes = MAX_LOG_BYTES + 1
            return
        if text is not None:
            self._bytes += len(text)
            self._put(CompileRecord(text))


def _encode_record(
    record: logging.LogRecord, metadata: dict[str, Any], payload: Any
) -> bytes | None:
    """Return a record's encoded lines, or ``None`` if it is not kept."""
    metrics = metadata.get("compilation_metrics")
    kind = next((kind for kind in _LINES_TO_KEEP if kind in metadata), "")
    lines: list[str] = []
    if isinstance(metrics, dict):
        kept_metrics = {
            name: clean_value(value) if isinstance(value, str) else value
            for name, value in metrics.items()
            if name in _METRIC_FIELDS and value is not None
        }
        metadata = {**metadata, "compilation_metrics": kept_metrics}
    elif kind:
        metadata = {**metadata, kind: {}}
        lines = [str(line_match[1]) for line_match in _LINES_TO_KEEP[kind].finditer(str(payload))]
    elif metadata.get("artifact", {}).get("name") in _ARTIFACTS:
        # torch's own stack follows the user's, of which only the places are kept
        message = str(payload).partition("\nTraceback (most recent call last)")[0]
        message, user, stack = message.partition("User code trace")
        places = [line for line in stack.split("\n") if _STACK_LINE.match(line)]
        lines = [*clean_value(message).split("\n"), *([f"{user}back:", *places] if user else [])]
    else:
        return None
    when = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
    source = f"{record.pathname.rpartition('/')[2]}:{record.lineno}"
    head = (
        f"V{when}.{int(record.msecs) * 1000:06} {record.process} {source}] {json.dumps(metadata)}"
    )
    text = "\n\t".join([head, *lines])
    return text[:MAX_RECORD].encode("utf-8", "replace")


_MAX_COPIED = 4 << 20
"""Maximum number of bytes read of NCCL's log, whose start describes the path."""
COPY_SECONDS, TOPOLOGY_SECONDS = 30.0, 30.0
COMMANDS = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"))
_MAX_LINE = 4096
_NCCL_LINE = re.compile(rb"CCL (?:INFO|WARN|version)")


class NetworkKeeper(BackgroundThread):
    """Thread that keeps NCCL's log and the topology in a rank's folder until ``stop``."""

    name = "network"
    stop_seconds = 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._source = log_file(os.environ)
        self._size = -1
        self._asks_topology = is_first_of_several(os.environ)

    def start(self) -> None:
        """Start the thread, if there is anything to keep."""
        if self._source is not None or self._asks_topology:
            super().start()

    def work(self) -> None:
        """Query the topology once. Copy the log at intervals and at the end."""
        with suppress(Exception):
            topology = ask_topology() if self._asks_topology else None
            if topology is not None:
                (self._folder / TOPOLOGY).write_bytes(topology)
        while self._source is not None:
            stopped = self.stop_event.wait(COPY_SECONDS)
            self._copy_log(self._source)
            if stopped:
                return

    def _copy_log(self, source: Path) -> None:
        """Copy NCCL's lines of the log, if it has grown."""
        if not source.is_file() or source.stat().st_size == self._size or self._size >= _MAX_COPIED:
            return
        with source.open("rb") as file:
            data = file.read(_MAX_COPIED)
        self._size = len(data)
        lines = [
            clean_value(line[:_MAX_LINE].decode("utf-8", "replace"))
            for line in data.split(b"\n")
            if _NCCL_LINE.search(line[:_MAX_LINE])
        ]
        hidden = self._folder / f".{NCCL_LOG}"
        hidden.write_text("\n".join([*lines, ""]), encoding="utf-8")
        hidden.replace(self._folder / NCCL_LOG)


def log_file(env: os._Environ[str] | dict[str, str]) -> Path | None:
    """Return the path of NCCL's log for this process, or ``None`` if it writes none or to the
    terminal. ``%h`` and ``%p`` are host and process, as in NCCL's docs of ``NCCL_DEBUG_FILE``."""
    name = env.get("NCCL_DEBUG_FILE", "")
    if not name or env.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE", "WARN"):
        return None
    host = socket.gethostname()
    values = {"%h": host, "%p": str(os.getpid()), "%%": "%"}
    path = Path(re.sub("%[hp%]", lambda match: values[match[0]], name))
    return None if str(path).startswith("/dev/") else path


def is_first_of_several(env: os._Environ[str] | dict[str, str]) -> bool:
    """Return whether the process is the first on its node, in a job of several processes."""
    return env.get("WORLD_SIZE", "1") not in ("", "0", "1") and env.get("LOCAL_RANK", "0") == "0"


def ask_topology() -> bytes | None:
    """Return the output of the first installed tool of ``COMMANDS``, or ``None`` if none is
    installed or it fails. Uses no pipe, for the reason given in ``environment._run_git``."""
    import tempfile

    tool = next((c for c in COMMANDS if shutil.which(c[0]) is not None), None)
    if tool is None:
        return None
    command = [str(shutil.which(tool[0])), *tool[1:]]
    if (nice := shutil.which("nice")) is not None:
        command = [nice, "-n", "19", *command]
    try:
        with tempfile.TemporaryFile() as out:
            process = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL,
                close_fds=False, timeout=TOPOLOGY_SECONDS, check=False,
            )  # fmt: skip
            out.seek(0)
            return out.read(_MAX_COPIED) if process.returncode == 0 else None
    except (OSError, subprocess.SubprocessError):
        return None
