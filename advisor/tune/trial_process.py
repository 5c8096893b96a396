"""Runs of the program, each confined to its scratch folder, and their measurements.

The kernel confines them (Landlock, where Linux has it), with their native code (C++, Rust) and
every process they start, which Python cannot do. Elsewhere only the audit hook in ``overlay.py``
confines them."""

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
MAX_OUTPUT_BYTES = 4000
"""Maximum bytes of output that are searched for the error of a failed program."""
_MAX_SHOWN_LINES = 12
"""Maximum number of lines of output that are shown."""
BEGIN = "ADVISOR_BEGIN"
POLL_SECONDS = 0.01

QUIET_ENVIRONMENT: Mapping[str, str] = {
    # trials report to no tracking service
    "WANDB_MODE": "disabled", "CLEARML_OFFLINE_MODE": "1", "NEPTUNE_MODE": "debug",
    "COMET_MODE": "disabled", "SWANLAB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}  # fmt: skip


class TrialProgram:
    """Command to try, and the folder for its trials."""

    def __init__(self, words: Sequence[str], root: Path, *, allowed: Sequence[str] = ()) -> None:
        self.words = list(words)
        self.allowed = tuple(allowed)
        self.root = root
        self.samples = False
        """Whether to count the samples of batches."""
        self.count = 0
        self.cache = root / "cache"
        self.cache.mkdir()

    def run(self, knob_settings: KnobSettings, **limits: Any) -> TrialResult:
        """Run one process from start to end, see :meth:`start`. Raises AdvisorError if it cannot be
        started."""
        trial = self.start(knob_settings, **limits)
        try:
            trial.run_turn()
        finally:
            trial.end()
        return trial.result()

    def start(
        self,
        knob_settings: KnobSettings,
        *,
        timeout: float,
        record: Path | None = None,
        **limits: Any,
    ) -> RunningTrial:
        """Start one process. ``timeout``: seconds until it is ended in any case, counted anew for
        each of its ``turns``. ``limits``: fields of :class:`TrialSpec`. Raises AdvisorError if it
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
def _delay_signals(trial: RunningTrial) -> Iterator[None]:
    """Delay signals until the program was started, and then end it: within a fork, Python drops
    exceptions raised by signals."""
    raised: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(
                    number, lambda number, frame: raised.append(number)
                )
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if raised:
            if hasattr(trial, "process"):
                _kill_processes(trial.process)
            signal.raise_signal(raised[0])


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
        """Seconds that it ran, without the time in which it was stopped."""
        with (home / "output").open("wb") as output, _delay_signals(self):
            try:
                self.process = subprocess.Popen(
                    words,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # to end all its processes together
                    # no other thread holds a lock: this command line has none
                    preexec_fn=confinement(folders),  # noqa: PLW1509
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise AdvisorError(f"{words[0]}: cannot be started ({error})") from None
            (home / GROUP).write_text(str(self.process.pid))

    def run_turn(self, steps: int = 0) -> bool:
        """Run until the program stops for its next turn (True) or has ended. ``steps`` is the
        number of steps in the turn, 0 for as many as before."""
        if self.paused:
            self.turn += 1
            temporary = self.home / f"{TURN}.new"
            temporary.write_text(f"{self.turn} {steps}")
            temporary.replace(self.home / TURN)
            self.paused = False
            os.killpg(self.process.pid, signal.SIGCONT)
        started = time.monotonic()
        try:
            return self._wait_for_stop(started + self.timeout)
        finally:
            self.spent += time.monotonic() - started

    def _wait_for_stop(self, end: float) -> bool:
        has_result = False
        while self.process.poll() is None:
            if self._is_stopped():
                self.paused = True
                return True
            if not has_result and self.out.exists():
                has_result, end = True, min(end, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > end:
                self.late = not has_result
                break
            time.sleep(POLL_SECONDS)
        return False

    def _is_stopped(self) -> bool:
        if not hasattr(os, "waitid") or not hasattr(os, "WSTOPPED"):
            return False
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None
        return False

    def end(self) -> None:
        """End all of its processes, and remove what they wrote except the results."""
        _kill_processes(self.process)
        shutil.rmtree(self.home / "scratch", ignore_errors=True)

    def partial_result(self) -> TrialResult:
        """Return the measurements before it stopped."""
        return self._load(Path(f"{self.out}{SO_FAR}")) or TrialResult()

    def _load(self, path: Path) -> TrialResult | None:
        try:
            return msgspec.json.decode(path.read_bytes()[:MAX_RESULT_BYTES], type=TrialResult)
        except (OSError, msgspec.MsgspecError):
            return None

    def result(self) -> TrialResult:
        """Return the measurements after it has been ended."""
        process = self.process
        result = self._load(self.out) or (self.partial_result() if self.paused else TrialResult())
        lines = _read_output(self.home / "output")
        error = _find_error(lines)
        if not result.ended and not result.problem:
            killed = process.returncode == -signal.SIGKILL and not self.late
            result.problem = (
                f"did not end within {self.timeout:.0f} s"
                if self.late
                else "killed, most likely because memory ran out"
                if killed
                else error or f"it ended with exit code {process.returncode}"
            )
            result.kind = "memory" if killed else "late" if self.late else "error"
            if process.returncode == 0 and not self.late and not error:
                result.problem = ""
        if result.problem or not result.steps_ns:
            result.output = "\n".join(clean(line)[:200] for line in lines[-_MAX_SHOWN_LINES:])
        return result


def _kill_processes(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the trial, even if they outlive the first one."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _read_output(path: Path) -> list[str]:
    """Return the last lines that the program printed, without blank ones."""
    try:
        text = path.read_bytes()[-MAX_OUTPUT_BYTES:].decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _find_error(lines: list[str]) -> str:
    """Return the last line of an error that the program printed. Empty if it printed none."""
    has_traceback = any("Traceback (most recent call last)" in line for line in lines)
    return lines[-1].strip()[:300] if has_traceback else ""


# -- Landlock -------------------------------------------------------------------------------------

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38
_VERSION = 1
# linux/landlock.h: rights that change a file system; the third version added truncating
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TRUNCATES_FROM = 3
WRITABLE_FOLDERS = ("/dev", "/proc")
"""Folders that stay writable: terminals, GPUs, workers' shared memory and processes' own state."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock in the running kernel, or 0 without it."""
    if not sys.platform.startswith("linux"):
        return 0
    arguments = (None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    try:
        return max(0, int(ctypes.CDLL(None).syscall(_CREATE, *arguments)))
    except (OSError, AttributeError):
        return 0


def confinement(folders: Iterable[Path]) -> Callable[[], None] | None:
    """Return what a child must run before its program, so that it and its children write only below
    ``folders`` and to devices, or ``None`` if this system has no Landlock."""
    version = landlock_version()
    if version < _TRUNCATES_FROM:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    access = _WRITE | _REFER | _TRUNCATE
    paths = [os.fsencode(path) for path in (*map(str, folders), *WRITABLE_FOLDERS)]

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
