"""What torch.compile says while it compiles, kept in the run: graph breaks, guards, times, kernels.

torch hands structured records to the handlers of one logger, as ``TORCH_TRACE=FOLDER`` writes them
(https://github.com/pytorch/tlparse). It makes them only where there is a handler, and some take it
long: whole graphs as text. So the logger's list of handlers says that it is empty for all records
but the few that are kept. Where the user has set ``TORCH_TRACE``, theirs is the log.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from advisor.core.credentials import clean_value

LOGGER = "torch.__trace"
CHOSEN_BY_USER = ("TORCH_TRACE", "TORCH_DTRACE")
MAX_BYTES, MAX_RECORD = 16 << 20, 256 << 10
"""Of a process, and of one record."""
_ARTIFACTS = ("dynamo_graph_break_reason", "recompile_reasons")
_METRICS = frozenset(
    (
        "compile_id", "co_name", "co_filename", "co_firstlineno", "duration_us",
        "entire_frame_compile_time_s", "inductor_compile_time_s", "recompile_reason", "fail_reason",
        "cudagraph_skip_reason",
    )
)  # fmt: skip
"""Of a compilation: others are settings, which are long."""
_KEPT = {
    # which line of the program each node of the graph is of, without the code
    "dynamo_output_graph": re.compile(r"^ *(# File: .+?:\d+ in [^,]+|\w+(?=:| =))", re.MULTILINE),
    # which nodes each kernel is made of
    "inductor_output_code": re.compile(
        r"^( *# [\w ]*Source Nodes: .+| *(?:triton|cpp)_\w+(?:\.run)?(?=\()"
        r"|(?:triton|cpp)_\w+ = async_compile|.*extern_kernels\.\w+(?=\())",
        re.MULTILINE,
    ),
}


_PLACE = re.compile(r'^ *File ".+", line \d+, in ')


class CompileRecord(Struct):
    """A record as it is written, with its payload."""

    text: bytes


class _Selective(list[Any]):
    """The logger's handlers; empty, as far as ``trace_structured`` asks for what is not kept."""

    def __bool__(self) -> bool:
        if len(self) != 1:
            return bool(len(self))
        asks = sys._getframe(1)
        if asks.f_code.co_name != "trace_structured":
            return True
        known = asks.f_locals
        kind = known.get("name")
        if kind == "artifact":
            try:
                return known["metadata_fn"]().get("name") in _ARTIFACTS
            except Exception:  # in the middle of somebody's compilation
                return False
        return kind in _KEPT or kind == "compilation_metrics"


class CompileLogHandler(logging.Handler):
    """Hands on what is kept, in the form of torch's own files. Never raises."""

    def __init__(self, put: Callable[[CompileRecord], None]) -> None:
        super().__init__()
        self._put = put
        self._pid = os.getpid()
        self._bytes = 0

    def install(self) -> None:
        """Listen, unless the user does, or torch has no such logger."""
        log = logging.root.manager.loggerDict.get(LOGGER)
        if isinstance(log, logging.Logger) and not any(map(os.environ.get, CHOSEN_BY_USER)):
            # torch's own handler takes itself away when it is used first without TORCH_TRACE
            log.handlers = _Selective([*log.handlers, self])

    def remove(self) -> None:
        """Listen no more."""
        log = logging.getLogger(LOGGER)
        if self in list(log.handlers):
            log.handlers = [handler for handler in log.handlers if handler is not self]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, cut to what is read of it."""
        if os.getpid() != self._pid or self._bytes > MAX_BYTES:
            return
        try:
            text = _text(record, record.__dict__["metadata"], record.__dict__.get("payload"))
        except Exception:  # in the middle of somebody's compilation
            self._bytes = MAX_BYTES + 1
            return
        if text is not None:
            self._bytes += len(text)
            self._put(CompileRecord(text))


def _text(record: logging.LogRecord, metadata: dict[str, Any], payload: Any) -> bytes | None:
    """A record's lines; ``None``: it is not kept."""
    metrics = metadata.get("compilation_metrics")
    kind = next((kind for kind in _KEPT if kind in metadata), "")
    lines: list[str] = []
    if isinstance(metrics, dict):
        kept = {
            name: clean_value(value) if isinstance(value, str) else value
            for name, value in metrics.items()
            if name in _METRICS and value is not None
        }
        metadata = {**metadata, "compilation_metrics": kept}
    elif kind:
        metadata = {**metadata, kind: {}}
        lines = [str(found[1]) for found in _KEPT[kind].finditer(str(payload))]
    elif metadata.get("artifact", {}).get("name") in _ARTIFACTS:
        # torch's own stack stands behind the user's, of which only places are kept
        what = str(payload).partition("\nTraceback (most recent call last)")[0]
        what, user, stack = what.partition("User code trace")
        places = [line for line in stack.split("\n") if _PLACE.match(line)]
        lines = [
            *clean_value(what).split("\n"),
            *([f"{user}back:", *places] if user else []),
        ]
    else:
        return None
    at = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
    place = f"{record.pathname.rpartition('/')[2]}:{record.lineno}"
    head = f"V{at}.{int(record.msecs) * 1000:06} {record.process} {place}] {json.dumps(metadata)}"
    text = "\n\t".join([head, *lines])
    return text[:MAX_RECORD].encode("utf-8", "replace")
