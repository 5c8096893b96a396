"""Options of a recording, from keywords, ``ADVISOR_*`` variables and pyproject.toml.

Later sources win: defaults, ``[tool.advisor.record]`` of the nearest pyproject.toml, environment
variables, keywords. An invalid value is reported once and ignored: a typo in a setting must not
stop a training run."""

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
"""Oldest torch that has everything the hooks need, as pyproject.toml declares. ``.ci/weekly`` runs
the recorder's tests on it."""
_FALSE_WORDS = {"0", "false", "no", "off"}
_TRUE_WORDS = {"1", "true", "yes", "on"}
SWITCH = "ADVISOR"
"""Variable that controls recording: ``ADVISOR=0`` makes all recording in the code a no-op."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of a recording.

    Each field can also be given as an environment variable (``skip``: ``ADVISOR_SKIP=20``) and
    under ``[tool.advisor.record]`` in pyproject.toml."""

    out: str = ""
    """Run directory. Default: a new one, ``runs/<date>_<time>_<random>``. If the directory is not
    empty, ``_2`` is appended to its name."""
    skip: int = 10
    """Steps before the first profiled window, because start-up steps are not typical. If the
    default would take over 2 s more after the second step, the window opens then."""
    warmup: int = 3
    """Steps in which the profiler runs but keeps nothing, before the steps that a window keeps."""
    active: int = 5
    """Steps that a window keeps. 0 means no windows."""
    windows: int = 3
    """Maximum number of automatic windows per rank, including the first one. As many windows again
    may open on request."""
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
    """Maximum number of events of PyTorch's allocator, with stacks, in the snapshot that is written
    when memory runs out. 100000 events cover some steps of most programs, and cost some hundred MB
    of host memory and 2 µs per allocation. 0 means none. A history that the program itself has
    switched on is in the snapshot anyway."""
    compile_log: bool = True
    """Keep torch.compile's log: graph breaks, guards, times. Nothing is kept if ``TORCH_TRACE`` is
    set."""
    network: bool = True
    """Keep NCCL's log, if ``NCCL_DEBUG`` and ``NCCL_DEBUG_FILE`` are set, and the links between the
    GPUs of each node (``nvidia-smi topo -m``), queried once in a job of several processes."""
    deep: bool = False
    """Switch on ``stacks`` and ``memory``."""
    ranks: str = "0-7"
    """Ranks that record windows: ``0``, ``0-7``, ``0,8,16`` or ``all``. All ranks record steps."""
    max_bytes: int = 1 << 30
    """Total size of a rank's traces, bytes, from which it records no more windows."""
    guard: float = 1.5
    """Ratio of the step time in a window to the usual step time from which the window is
    stopped."""
    nvtx: bool = True
    """Mark phases as ranges of the domain ``advisor`` for Nsight Systems, if nvtx is installed."""
    cuda_events: int = 4
    """Interval, in steps, at which CUDA events measure device time by phase, without waiting. At
    most ten times a second for short steps, and every step from 50 ms on. 0 means none."""
    telemetry: float = 2.0
    """Samples of GPU and host per second. 0 means none."""
    stack_samples: bool = True
    """Sample the training thread's Python stack outside windows: 50 times a second in the first
    seconds, then 10 times, up to 1,500 samples. They show which lines take host time."""
    signal: str = ""
    """Signal that opens a window, such as ``SIGUSR2``. Default: none."""
    report: bool = True
    """Analyse the run in another process at the end, and print the first finding."""

    def with_changes(self, **changes: Any) -> RecordOptions:
        """Return a copy with changes. Raises TypeError if an option does not exist."""
        unknown = changes.keys() - {field.name for field in fields(self)}
        if unknown:
            known = ", ".join(field.name for field in fields(self))
            raise TypeError(f"no such option: {', '.join(sorted(unknown))} (available: {known})")
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
    """Return a line on why a version of torch cannot be recorded. Empty if it can."""
    numbers = re.findall(r"\d+", version)[:2]
    if len(numbers) < 2 or tuple(map(int, numbers)) >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"torch {version} is too old to be recorded: {oldest} is the oldest"


def switched_off() -> bool:
    """Return whether ``ADVISOR`` says not to record."""
    return os.environ.get(SWITCH, "").strip().lower() in _FALSE_WORDS


def resolve_options(**keywords: Any) -> RecordOptions:
    """Return the options that apply here. Raises TypeError if a keyword is not an option."""
    options = RecordOptions()
    for name, value in (*_read_pyproject().items(), *_read_environment().items()):
        options = _apply_option(options, name, value)
    return options.with_changes(**{k: v for k, v in keywords.items() if v is not None})


def _read_environment() -> dict[str, str]:
    result = {}
    for field in fields(RecordOptions):
        value = os.environ.get(f"ADVISOR_{field.name.upper()}")
        if value is not None:
            result[field.name] = value
    return result


def _read_pyproject() -> dict[str, Any]:
    try:
        section = tool_section("record")[1]
    except (OSError, AdvisorError) as error:  # OSError: the working folder was deleted
        log.warning("advisor: pyproject.toml was not read (%s)", error)
        return {}
    return section if isinstance(section, dict) else {}


def _apply_option(options: RecordOptions, name: str, value: Any) -> RecordOptions:
    default = getattr(RecordOptions(), name, None)
    if default is None:
        log.warning("advisor: %r is not a recording option and was ignored", name)
        return options
    try:
        return replace(options, **{name: _parse_value(value, type(default))})
    except ValueError:
        kind = {bool: "yes or no", int: "an integer", float: "a number"}.get(type(default), "")
        log.warning("advisor: option %s must be %s, not %r; ignored", name, kind or "text", value)
        return options


def _parse_value(value: Any, kind: type) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _TRUE_WORDS | _FALSE_WORDS:
            return text in _TRUE_WORDS
        raise ValueError(value)
    if kind is str:
        return str(value)
    if isinstance(value, bool):
        raise ValueError(value)
    number = kind(value)
    if not 0 <= number < 1 << 62:  # also rejects nan
        raise ValueError(value)
    return number
