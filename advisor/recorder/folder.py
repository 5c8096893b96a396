"""Choice of the run directory: a new one for each run, one for all its ranks. Also the closing
lines: where the run is, and its first finding, worked out in another process.

``advisor record`` makes the directory and names it in ``ADVISOR_RUN_DIR``. Otherwise the first rank
makes it and leaves its name in a hidden file beside it, under a key that only the processes of one
launch share; the others wait for that file. All of this happens in the writer's thread."""

import errno
import hashlib
import multiprocessing
import os
import secrets
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from advisor.core.errors import AdvisorError

RUN_DIR = "ADVISOR_RUN_DIR"
"""Environment variable with the run directory, set by ``advisor record`` for its processes."""
WAIT_SECONDS = 60.0
"""Time that a rank waits for the first one to make the directory, s."""
STALE_SECONDS = 600.0
"""Age of a launch file, s, from which it is of another launch that had the same key."""
MAX_TRIES = 1000
PRIVATE = 0o700
"""Mode of a new run directory: command lines, paths and settings are private. An existing, empty
directory keeps the mode that its owner gave it."""


def new_run(out: str) -> Path:
    """Make a new run directory, or take one that is empty; return its path. Raises OSError."""
    wanted = Path(out) if out else Path("runs") / _name()
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, MAX_TRIES):
        path = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}_{attempt}")
        try:
            path.mkdir(PRIVATE)
            return path.absolute()
        except FileExistsError:
            if path.is_dir() and not any(path.iterdir()):
                return path.absolute()
    raise OSError(errno.EEXIST, "too many runs of this name", str(wanted))


def rank_folder(out: str, rank: int, world: int) -> Path:
    """Make this rank's folder in the run's directory and return it. Raises OSError."""
    given = os.environ.get(RUN_DIR)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if given:
        run = Path(given)
        if restart not in ("", "0"):
            run = run.with_name(f"{run.name}_restart{restart}")
        run.mkdir(PRIVATE, parents=True, exist_ok=True)
    elif world > 1:
        run = _shared_run_directory(out, rank)
    else:
        run = new_run(out)
    for attempt in range(1, MAX_TRIES):
        # a second training in a process tree that shares the variable: a run of its own
        sibling = run if attempt == 1 else run.with_name(f"{run.name}_{attempt}")
        sibling.mkdir(PRIVATE, exist_ok=True)
        folder = sibling / f"rank{rank}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise OSError(errno.EEXIST, "too many recordings of this rank", str(run))


def write_once(path: Path, record: msgspec.Struct) -> None:
    """Write a record atomically, unless the file exists. Raises OSError."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_bytes(msgspec.json.encode(record))
        with suppress(FileExistsError):
            try:
                os.link(hidden, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                if not path.exists():
                    hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def _name() -> str:
    return time.strftime("%Y-%m-%d_%H%M%S_") + secrets.token_hex(2)


def _shared_run_directory(out: str, rank: int) -> Path:
    """Return the directory that all ranks of this launch share. Raises OSError."""
    parent = Path(out).parent if out else Path("runs")
    note = parent / f".launch_{_launch()}"
    if rank == 0:
        run = new_run(out)
        hidden = note.with_name(f"{note.name}.{os.getpid()}")
        hidden.write_text(str(run), "utf-8")
        hidden.replace(note)
        return run
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            if time.time() - note.stat().st_mtime < STALE_SECONDS:
                run = Path(note.read_text("utf-8"))
                if run.is_dir() and not (run / f"rank{rank}").exists():
                    return run
        except OSError:
            pass
        time.sleep(0.05)
    raise OSError(errno.ETIMEDOUT, "rank 0 did not begin to record", str(note))


def _launch() -> str:
    """Return a key that the processes of one launch share, and no other launch has.

    On one machine: the process that started them. On several: what the launcher calls the job."""
    env = os.environ
    names = [
        "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID", "SLURM_STEP_ID",
    ]  # fmt: skip
    parts = [env.get(name, "") for name in names]
    if env.get("LOCAL_WORLD_SIZE", "") == env.get("WORLD_SIZE", ""):
        mother = multiprocessing.parent_process()
        pid = mother.pid if mother is not None and mother.pid else os.getppid()
        parts += [str(pid), _started(pid)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _started(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks, as text; empty if unknown."""
    if sys.platform != "linux":
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def missing_folders(out: str) -> list[Path]:
    """Return the missing folders of the run directory's path, the deepest first."""
    wanted = Path(out or "runs").absolute()
    return [path for path in (wanted, *wanted.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders, the deepest first, up to one that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


SECONDS = 60.0
"""Longest analysis at the end of a run, s; a longer one is left to the user."""
WIDTH = 80
NAME = "advisor: "
_INJECTED = str(Path(__file__).parent / "inject")
"""Folder that ``advisor record`` puts on PYTHONPATH."""


def print_message(*paragraphs: str) -> None:
    """Print on stderr, as one piece, wrapped at 80 columns. (stdout is the program's.)"""
    lines: list[str] = []
    for text in paragraphs:
        lines += textwrap.wrap(
            text, WIDTH - len(NAME), break_long_words=False, break_on_hyphens=False
        )
    text = "\n".join(f"{' ' * len(NAME) if i else NAME}{line}" for i, line in enumerate(lines))
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or None under pythonw
        return


def print_result(run: Path, *, analyse: bool) -> None:
    """Print where a run is, and its first finding."""
    shown = _shown(run)
    sentences = [f"recorded in {shown}"]
    result = summarise_findings(run) if analyse else None
    if result:
        sentences += result
    sentences.append(f"More: advisor analyze {shlex.quote(shown)}")
    print_message(*sentences)


def summarise_findings(run: Path) -> list[str] | None:
    """Return sentences on what was found, the most important first; ``None`` if it is unknown."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR")}
    env["ADVISOR"] = "0"
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p != _INJECTED)
    command = [sys.executable, "-P", "-m", "advisor", "analyze", str(run), "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--no-progress"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
            env=env,
        )
        return _outcome(done.stdout)
    except (OSError, subprocess.SubprocessError, AdvisorError):
        return None


def _outcome(text: bytes) -> list[str]:
    from advisor.core import labels
    from advisor.core import text as t
    from advisor.core.report import Report

    report = Report.from_json(text)
    sentences = []
    if report.recorded is not None:
        step = "" if report.step is None else f", {t.format_duration(report.step.ns)} each (median)"
        count = report.recorded.steps
        kind = "inference " if report.recorded.inference else ""
        seen = f"{t.format_count(count)} {kind}step{'' if count == 1 else 's'}{step}"
        sentences.append(seen if count else "no step was seen")
        if report.recorded.ended == "disk":
            sentences.append("the disk was full: later steps are not recorded")
    if report.crashes:
        sentences.append(t.describe_crashes(report.crashes))
    for finding in (*report.findings, *report.risks):
        return [*sentences, f"First finding: {labels.clean(finding.title)}"]
    if report.crashes:
        return sentences
    return [*sentences, labels.clean(report.verdict)]


def _shown(run: Path) -> str:
    try:
        return str(run.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(run)


def with_injected(paths: str) -> str:
    """Return a PYTHONPATH with the folder of the recorder's ``sitecustomize`` in front."""
    return os.pathsep.join([_INJECTED, *([paths] if paths else [])])
