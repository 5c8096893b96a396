"""Runs the program once, held to its scratch folder, and returns what was measured."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from advisor.errors import AdvisorError
from advisor.recording.finish import injected
from advisor.recording.folder import RUN_DIR
from advisor.trial.catalogue import lever
from advisor.trial.confine import confinement
from advisor.trial.spec import MODULE, SPEC, Pull, Result, Spec, encode, read_result

GRACE_SECONDS = 5.0
"""From the result to the end of the program's processes, which are ended then."""
MOST_OUTPUT = 4000
"""Bytes of what the program printed that are looked at when it failed."""
BEGIN = "ADVISOR_BEGIN"

QUIET: Mapping[str, str] = {
    # nobody hears of a run that is only tried
    "WANDB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "COMET_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


class Program:
    """A command, and the folder that its trials may fill."""

    def __init__(self, words: Sequence[str], root: Path, *, seed: int = 0) -> None:
        self.words = list(words)
        self.root = root
        self.seed = seed
        self.samples = False
        """Count the samples of batches."""
        self.count = 0
        self.cache = root / "cache"
        self.cache.mkdir()

    def run(
        self,
        pulls: tuple[Pull, ...],
        *,
        warmup: int,
        steps: int,
        seconds: float,
        timeout: float,
        least: int = 12,
        record: Path | None = None,
    ) -> Result:
        """One process. ``timeout``: seconds until it is ended, whatever it does. Raises
        AdvisorError: it cannot be started."""
        self.count += 1
        home = self.root / f"run{self.count}"
        scratch = home / "scratch"
        (scratch / "tmp").mkdir(parents=True)
        spec = Spec(
            out=str(home / "result.json"),
            root=str(self.root),
            scratch=str(scratch),
            pulls=pulls,
            warmup=warmup,
            steps=steps,
            seconds=seconds,
            least=least,
            seed=self.seed,
            samples=self.samples,
            record=record is not None,
        )
        (home / "spec.json").write_bytes(encode(spec))
        env = self.environment(home, scratch, pulls)
        if record is not None:
            env[RUN_DIR] = str(record)
            env["ADVISOR_REPORT"] = "0"
        try:
            return self._run(home, env, timeout)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def environment(self, home: Path, scratch: Path, pulls: tuple[Pull, ...]) -> dict[str, str]:
        """Variables of the process."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR")}
        env |= {**QUIET, "MLFLOW_TRACKING_URI": f"file:{scratch}/mlflow"}
        env |= {"TMPDIR": str(scratch / "tmp"), SPEC: str(home / "spec.json"), BEGIN: MODULE}
        env["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache / "inductor")
        env["TRITON_CACHE_DIR"] = str(self.cache / "triton")
        before = env.get("PYTHONPATH", "")
        env["PYTHONPATH"] = os.pathsep.join([str(injected()), *([before] if before else [])])
        for pull in pulls:
            for name, value in lever(pull.lever).environment(pull.value).items():
                if value is None:
                    env.pop(name, None)
                else:
                    env[name] = value
        return env

    def _run(self, home: Path, env: dict[str, str], timeout: float) -> Result:
        out = home / "result.json"
        with (home / "output").open("wb") as output:
            try:
                process = subprocess.Popen(
                    self.words,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # to end all of them together
                    # no thread of ours holds a lock then: this command line has none
                    preexec_fn=confinement([self.root]),  # noqa: PLW1509
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise AdvisorError(f"{self.words[0]}: cannot be started ({error})") from None
            try:
                late = self._wait(process, out, timeout)
            finally:
                _end(process)
        try:
            result = read_result(out.read_bytes())
        except (OSError, msgspec.MsgspecError):
            result = Result()
        said = _tail(home / "output")
        if not result.ended and not result.problem:
            killed = process.returncode == -signal.SIGKILL and not late
            result.problem = (
                f"no end after {timeout:.0f} s"
                if late
                else "killed, most likely for want of memory"
                if killed
                else said or f"it left with exit code {process.returncode}"
            )
            result.kind = "memory" if killed else "late" if late else "error"
            if process.returncode == 0 and not late and not said:
                result.problem = ""
        return result

    def _wait(self, process: subprocess.Popen[bytes], out: Path, timeout: float) -> bool:
        """Until it ends, with patience once there is a result. Whether it took too long."""
        end = time.monotonic() + timeout
        found = False
        while process.poll() is None:
            if not found and out.exists():
                found, end = True, min(end, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > end:
                return not found
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """All processes of the trial, those that outlive the first one too."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _tail(path: Path) -> str:
    """The last line of an error that the program printed."""
    try:
        text = path.read_bytes()[-MOST_OUTPUT:].decode("utf-8", "replace")
    except OSError:
        return ""
    if "Traceback (most recent call last)" not in text:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
