"""Options of a recording, from keywords, ``ADVISOR_*`` variables and pyproject.toml.

Later ones win: defaults, ``[tool.advisor.record]`` of the nearest pyproject.toml, environment
variables, keywords. A value that makes no sense is reported once and left out: a typing error in a
setting must not stop a training run."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.core.files import tool_section

log = logging.getLogger("advisor")

OLDEST_TORCH = (2, 4)
"""Oldest torch with all that the hooks need, as pyproject.toml declares; ``.ci/weekly`` runs the
recorder's tests on it."""
_OFF = {"0", "false", "no", "off"}
_ON = {"1", "true", "yes", "on"}
SWITCH = "ADVISOR"
"""Variable that controls recording: ``ADVISOR=0`` makes it a no-op, wherever it is in the code."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of a recording.

    Each field can also be given as an environment variable (``skip``: ``ADVISOR_SKIP=20``) and
    under ``[tool.advisor.record]`` in pyproject.toml."""

    out: str = ""
    """Run directory. Default: a new one, ``runs/<date>_<time>_<random>``. One that already holds
    something is left alone: ``_2`` is appended."""
    skip: int = 10
    """Steps before the first profiled window: start-up is not what training costs. If the default
    would take over 2 s more after the second step, the window opens then."""
    warmup: int = 3
    """Steps in which the profiler runs and nothing is kept, before those that a window keeps."""
    active: int = 5
    """Steps that a window keeps. 0: no windows."""
    windows: int = 3
    """Most windows that a rank records by itself, the first one included. Windows that you ask for
    come on top, up to as many again."""
    on_trouble: bool = True
    """Open a window when the median step is 25% slower for a second, or a step takes 3 times the
    median and loses 0.1 s."""
    shapes: bool = True
    """Record the input shapes of operators in windows."""
    stacks: bool = False
    """Record Python stacks in windows: the line of code behind a kernel, at twice the cost."""
    memory: bool = False
    """Record every allocation in windows."""
    memory_history: int = 0
    """Most events of PyTorch's allocator, with stacks, that are kept: the snapshot written when
    memory runs out has them. 100000 is some steps of most programs, some hundred MB of host memory,
    and 2 µs an allocation. 0: none. A history that the program switched on itself is in the
    snapshot all the same."""
    compile_log: bool = True
    """Keep torch.compile's log: graph breaks, guards, times. Nothing is kept if ``TORCH_TRACE`` is
    set."""
    network: bool = True
    """Keep NCCL's log, if ``NCCL_DEBUG`` and ``NCCL_DEBUG_FILE`` are set, and the links between the
    GPUs of each node (``nvidia-smi topo -m``), asked once in a job of several processes."""
    deep: bool = False
    """Switch on ``stacks`` and ``memory``."""
    ranks: str = "0-7"
    """Ranks that record windows: ``0``, ``0-7``, ``0,8,16`` or ``all``. All ranks record steps."""
    max_bytes: int = 1 << 30
    """Size of a rank's traces from which it records no more windows, bytes."""
    guard: float = 1.5
    """Ratio of a window's step time to the usual one from which the window is stopped."""
    nvtx: bool = True
    """Mark phases as ranges of the domain ``advisor`` for Nsight Systems, if nvtx is installed."""
    cuda_events: int = 4
    """Interval, in steps, at which CUDA events measure device time by phase; they are never waited
    for. At most ten times a second for short steps, and every step from 50 ms on. 0: none."""
    telemetry: float = 2.0
    """Samples of GPU and host per second. 0: none."""
    stack_samples: bool = True
    """Sample the training thread's Python stack outside windows: 50 times a second in the first
    seconds, then 10 times, up to 1,500 times. It names the lines behind the time of the host."""
    signal: str = ""
    """Signal that opens a window, such as ``SIGUSR2``. Default: none."""
    report: bool = True
    """Analyse the run in another process at the end, and print the first finding."""

    def with_changes(self, **changes: Any) -> RecordOptions:
        """Return a copy with changes. Raises TypeError if an option does not exist."""
        unknown = changes.keys() - {field.name for field in fields(self)}
        if unknown:
            known = ", ".join(field.name for field in fields(self))
            raise TypeError(f"no such option: {', '.join(sorted(unknown))} (there are: {known})")
        return replace(self, **changes)

    def traces(self, rank: int) -> bool:
        if self.active < 1:
            return False
        if self.ranks.strip() == "all":
            return True
        for part in self.ranks.split(","):
            low, _, high = part.strip().partition("-")
            if low.isdecimal() and int(low) <= rank <= int(high if high.isdecimal() else low):
                return True
        return False


def explain_unsupported(version: str) -> str:
    """Return the reason why a version of torch cannot be recorded, in a line; empty if it can."""
    numbers = re.findall(r"\d+", version)[:2]
    if len(numbers) < 2 or tuple(map(int, numbers)) >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {version} is too old to be recorded: {oldest} is the oldest"


def switched_off() -> bool:
    """Return whether ``ADVISOR`` says not to record."""
    return os.environ.get(SWITCH, "").strip().lower() in _OFF


def resolve_options(**keywords: Any) -> RecordOptions:
    """Return the options that apply here. Raises TypeError if a keyword is no option."""
    options = RecordOptions()
    for name, value in (*_from_pyproject().items(), *_from_environment().items()):
        options = _with(options, name, value)
    return options.with_changes(**{k: v for k, v in keywords.items() if v is not None})


def _from_environment() -> dict[str, str]:
    result = {}
    for field in fields(RecordOptions):
        value = os.environ.get(f"ADVISOR_{field.name.upper()}")
        if value is not None:
            result[field.name] = value
    return result


def _from_pyproject() -> dict[str, Any]:
    try:
        section = tool_section("record")[1]
    except (OSError, AdvisorError) as error:  # OSError: the working folder was deleted
        log.warning("advisor: pyproject.toml was not read (%s)", error)
        return {}
    return section if isinstance(section, dict) else {}


def _with(options: RecordOptions, name: str, value: Any) -> RecordOptions:
    default = getattr(RecordOptions(), name, None)
    if default is None:
        log.warning("advisor: %r is no option of a recording and was left out", name)
        return options
    try:
        return replace(options, **{name: _parse(value, type(default))})
    except ValueError:
        kind = {bool: "yes or no", int: "a whole number", float: "a number"}.get(type(default), "")
        log.warning("advisor: option %s must be %s, not %r; left out", name, kind or "text", value)
        return options


def _parse(value: Any, kind: type) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _ON | _OFF:
            return text in _ON
        raise ValueError(value)
    if kind is str:
        return str(value)
    if isinstance(value, bool):
        raise ValueError(value)
    number = kind(value)
    if not 0 <= number < 1 << 62:  # also leaves out nan
        raise ValueError(value)
    return number
