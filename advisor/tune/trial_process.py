"""Runs of the program, each confined to its scratch folder, and their measurements.

The kernel confines it there (Landlock, where Linux has it): native code too (C++, Rust), and every
process that is started, which nothing in Python does. Elsewhere only the audit hook in
``overlay.py`` does."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.labels import clean
from advisor.recorder.folder import RUN_DIR, with_injected
from advisor.tune.knob import (
    GROUP,
    MAX_RESULT_BYTES,
    MODULE,
    SO_FAR,
    SPEC,
    TURN,
    KnobSettings,
    TrialResult,
    TrialSpec,
    find_knob,
)

GRACE_SECONDS = 5.0
"""Seconds from the result until the program's remaining processes are ended."""
MAX_OUTPUT = 4000
"""Bytes of output that are searched for the error of a failed program …"""
MAX_LINES = 12
"""… and lines of it that are shown."""
BEGIN = "ADVISOR_BEGIN"
POLL_SECONDS = 0.01

QUIET_ENVIRONMENT: Mapping[str, str] = {
    # nobody hears of a run that is only tried
    "WANDB_MODE": "disabled", "CLEARML_OFFLINE_MODE": "1", "NEPTUNE_MODE": "debug",
    "COMET_MODE": "disabled", "SWANLAB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}  # fmt: skip


class TrialProgram:
    """A command, and the folder that its trials may fill."""

    def __init__(self, words: Sequence[str], root: Path, *, allowed: Sequence[str] = ()) -> None:
        self.words = list(words)
        self.allowed = tuple(allowed)
        self.root = root
        self.samples = False
        """Whether to count the samples of batches."""
        self.count = 0
        self.cache = root / "cache"
        self.cache.mkdir()

    def run(self, knob_settings: KnobSettings, **wanted: Any) -> TrialResult:
        """Run one process from its start to its end: see :meth:`start`. Raises AdvisorError: it
        cannot be started."""
        running = self.start(knob_settings, **wanted)
        try:
            running.run_turn()
        finally:
            running.end()
        return running.result()

    def start(
        self,
        knob_settings: KnobSettings,
        *,
        timeout: float,
        record: Path | None = None,
        **limits: Any,
    ) -> RunningTrial:
        """Start one process. ``timeout``: seconds until it is ended, whatever it does, counted anew
        for each of its ``turns``. ``limits``: fields of :class:`TrialSpec`. Raises AdvisorError: it
        cannot be started."""
        self.count += 1
        home = self.root / f"run{self.count}"
        scratch = home / "scratch"
        (scratch / "tmp").mkdir(parents=True)
        spec = TrialSpec(
            out=str(home / "result.json"),
            root=str(self.root),
            scratch=str(scratch),
            allowed=self.allowed,
            knob_settings=knob_settings,
            samples=self.samples,
            record=record is not None,
            **limits,
        )
        (home / "spec.json").write_bytes(msgspec.json.encode(spec))
        env = self.environment(home, scratch, knob_settings)
        if record is not None:
            env[RUN_DIR] = str(record)
            env["ADVISOR_REPORT"] = "0"
        return RunningTrial(self.words, home, env, [self.root, *map(Path, self.allowed)], timeout)

    def environment(self, home: Path, scratch: Path, knob_settings: KnobSettings) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR")}
        env |= {**QUIET_ENVIRONMENT, "MLFLOW_TRACKING_URI": f"file:{scratch}/mlflow"}
        env |= {"TMPDIR": str(scratch / "tmp"), SPEC: str(home / "spec.json"), BEGIN: MODULE}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache / "inductor")
        env["TRITON_CACHE_DIR"] = str(self.cache / "triton")
        env["PYTHONPATH"] = with_injected(env.get("PYTHONPATH", ""))
        for knob_setting in knob_settings:
            for name, value in find_knob(knob_setting.knob).environment(knob_setting.value).items():
                if value is None:
                    env.pop(name, None)
                else:
                    env[name] = value
        return env


@contextmanager
def _signals_held(trial: RunningTrial) -> Iterator[None]:
    """Interrupt after the program was started, and end it: within a fork, Python drops what a
    signal raises."""
    seen: list[int] = []
    held: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                held[number] = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        yield
    finally:
        for number, own in held.items():
            signal.signal(number, own)
        if seen:
            if hasattr(trial, "process"):
                _end(trial.process)
            signal.raise_signal(seen[0])


class RunningTrial:
    """A started program of a trial."""

    def __init__(
        self, words: list[str], home: Path, env: dict[str, str], folders: list[Path], timeout: float
    ) -> None:
        self.home, self.timeout = home, timeout
        self.out = home / "result.json"
        self.turn = 0
        self.late = self.paused = False
        self.spent = 0.0
        """Seconds that it ran, without those in which it stood still."""
        with (home / "output").open("wb") as output, _signals_held(self):
            try:
                self.process = subprocess.Popen(
                    words,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # to end all of them together
                    # no thread of ours holds a lock then: this command line has none
                    preexec_fn=confinement(folders),  # noqa: PLW1509
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise AdvisorError(f"{words[0]}: cannot be started ({error})") from None
            (home / GROUP).write_text(str(self.process.pid))

    def run_turn(self, steps: int = 0) -> bool:
        """Run until the program stops for its next turn (True) or has ended. ``steps``: number of
        the turn's steps; 0: as many as before."""
        if self.paused:
            self.turn += 1
            beside = self.home / f"{TURN}.new"
            beside.write_text(f"{self.turn} {steps}")
            beside.replace(self.home / TURN)
            self.paused = False
            os.killpg(self.process.pid, signal.SIGCONT)
        begun = time.monotonic()
        try:
            return self._wait(begun + self.timeout)
        finally:
            self.spent += time.monotonic() - begun

    def _wait(self, end: float) -> bool:
        result = False
        while self.process.poll() is None:
            if self._stopped():
                self.paused = True
                return True
            if not result and self.out.exists():
                result, end = True, min(end, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > end:
                self.late = not result
                break
            time.sleep(POLL_SECONDS)
        return False

    def _stopped(self) -> bool:
        if not hasattr(os, "waitid") or not hasattr(os, "WSTOPPED"):
            return False
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None
        return False

    def end(self) -> None:
        """End all of its processes, and remove what they wrote but the results."""
        _end(self.process)
        shutil.rmtree(self.home / "scratch", ignore_errors=True)

    def partial_result(self) -> TrialResult:
        """Return what it measured before it stopped."""
        return self._read(Path(f"{self.out}{SO_FAR}")) or TrialResult()

    def _read(self, path: Path) -> TrialResult | None:
        try:
            return msgspec.json.decode(path.read_bytes()[:MAX_RESULT_BYTES], type=TrialResult)
        except (OSError, msgspec.MsgspecError):
            return None

    def result(self) -> TrialResult:
        """Return what it measured, once it has been ended."""
        process = self.process
        result = self._read(self.out) or (self.partial_result() if self.paused else TrialResult())
        lines = _output(self.home / "output")
        said = _error(lines)
        if not result.ended and not result.problem:
            killed = process.returncode == -signal.SIGKILL and not self.late
            result.problem = (
                f"no end after {self.timeout:.0f} s"
                if self.late
                else "killed, most likely for want of memory"
                if killed
                else said or f"it left with exit code {process.returncode}"
            )
            result.kind = "memory" if killed else "late" if self.late else "error"
            if process.returncode == 0 and not self.late and not said:
                result.problem = ""
        if result.problem or not result.steps_ns:
            result.output = "\n".join(clean(line)[:200] for line in lines[-MAX_LINES:])
        return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the trial, those that outlive the first one too."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _output(path: Path) -> list[str]:
    """Return the last lines that the program printed, without blank ones."""
    try:
        text = path.read_bytes()[-MAX_OUTPUT:].decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _error(lines: list[str]) -> str:
    """Return the last line of an error that the program printed; empty: it printed none."""
    traced = any("Traceback (most recent call last)" in line for line in lines)
    return lines[-1].strip()[:300] if traced else ""


# -- Landlock -------------------------------------------------------------------------------------

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38
_VERSION = 1
# linux/landlock.h: all that changes a file system; truncating came with the third version
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TRUNCATES_FROM = 3
DEVICES = ("/dev", "/proc")
"""Folders that stay writable: terminals, GPUs, workers' shared memory; processes' own state."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock in the running kernel; 0: there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    nothing = (None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    try:
        return max(0, int(ctypes.CDLL(None).syscall(_CREATE, *nothing)))
    except (OSError, AttributeError):
        return 0


def confinement(folders: Iterable[Path]) -> Callable[[], None] | None:
    """Return what a child must run before its program, so that it and its children write only below
    ``folders`` and to devices; ``None``: this system has no Landlock."""
    result = landlock_version()
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
            beneath = _PathBeneathAttr(access, os.open(path, os.O_PATH | os.O_CLOEXEC))
            if libc.syscall(_ADD, ruleset, 1, ctypes.byref(beneath), ctypes.c_uint32(0)) < 0:
                raise OSError(ctypes.get_errno(), "Landlock")
            os.close(beneath.parent_fd)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        if libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)) < 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        os.close(ruleset)

    return confine
