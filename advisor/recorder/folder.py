"""Choice of the run directory, a new one per run that all its ranks share. Also the closing lines:
where the run is, and its first finding, which another process computes.

``advisor record`` creates the directory and names it in ``ADVISOR_RUN_DIR``. Otherwise, the first
rank creates it and writes its name to a hidden sibling file, under a key that only the processes of
one launch share. The other ranks wait for that file. All this happens in the writer's thread."""

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
"""Maximum time that a rank waits for the first rank to create the directory, s."""
STALE_SECONDS = 600.0
"""Age of a launch file, s, from which it belongs to another launch with the same key."""
_MAX_TRIES = 1000
PRIVATE = 0o700
"""Mode of a new run directory: command lines, paths and settings are private. An existing, empty
directory keeps its mode."""


def new_run(out: str) -> Path:
    """Create a run directory or take an empty one, and return its path. Raises OSError."""
    target = Path(out) if out else Path("runs") / _generate_name()
    target.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _MAX_TRIES):
        path = target if attempt == 1 else target.with_name(f"{target.name}_{attempt}")
        try:
            path.mkdir(PRIVATE)
            return path.absolute()
        except FileExistsError:
            if path.is_dir() and not any(path.iterdir()):
                return path.absolute()
    raise OSError(errno.EEXIST, "too many runs of this name", str(target))


def rank_folder(out: str, rank: int, world: int) -> Path:
    """Create this rank's folder in the run's directory, and return it. Raises OSError."""
    run_dir = os.environ.get(RUN_DIR)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if run_dir:
        run = Path(run_dir)
        if restart not in ("", "0"):
            run = run.with_name(f"{run.name}_restart{restart}")
        run.mkdir(PRIVATE, parents=True, exist_ok=True)
    elif world > 1:
        run = _shared_run_directory(out, rank)
    else:
        run = new_run(out)
    for attempt in range(1, _MAX_TRIES):
        # a second training in a process tree that shares the variable gets its own run
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


def _generate_name() -> str:
    return time.strftime("%Y-%m-%d_%H%M%S_") + secrets.token_hex(2)


def _shared_run_directory(out: str, rank: int) -> Path:
    """Return the directory that all ranks of this launch share. Raises OSError."""
    parent = Path(out).parent if out else Path("runs")
    note = parent / f".launch_{_launch_key()}"
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
    raise OSError(errno.ETIMEDOUT, "rank 0 did not start recording", str(note))


def _launch_key() -> str:
    """Return a key that only the processes of one launch share.

    On one machine, it is the process that started them; on several, the launcher's job name."""
    env = os.environ
    variables = [
        "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID", "SLURM_STEP_ID",
    ]  # fmt: skip
    parts = [env.get(name, "") for name in variables]
    if env.get("LOCAL_WORLD_SIZE", "") == env.get("WORLD_SIZE", ""):
        parent = multiprocessing.parent_process()
        pid = parent.pid if parent is not None and parent.pid else os.getppid()
        parts += [str(pid), _start_time(pid)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _start_time(pid: int) -> str:
    """Return the start time of a process in kernel ticks, as text. Empty if unknown."""
    if sys.platform != "linux":
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def missing_folders(out: str) -> list[Path]:
    """Return the missing folders of the run directory's path, deepest first."""
    target = Path(out or "runs").absolute()
    return [path for path in (target, *target.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders, deepest first, up to the first one that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


ANALYSIS_SECONDS = 60.0
"""Maximum duration of the analysis at the end of a run, s. A longer one is left to the user."""
_MAX_COLUMNS = 80
PREFIX = "advisor: "
_INJECTED_FOLDER = str(Path(__file__).parent / "inject")
"""Folder that ``advisor record`` adds to PYTHONPATH."""


def print_message(*paragraphs: str) -> None:
    """Print to stderr in one piece, wrapped at 80 columns. stdout belongs to the program."""
    lines: list[str] = []
    for text in paragraphs:
        lines += textwrap.wrap(
            text, _MAX_COLUMNS - len(PREFIX), break_long_words=False, break_on_hyphens=False
        )
    text = "\n".join(f"{' ' * len(PREFIX) if i else PREFIX}{line}" for i, line in enumerate(lines))
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or None under pythonw
        return


def print_result(run: Path, *, analyse: bool) -> None:
    """Print where a run is, and its first finding."""
    path = _short_path(run)
    sentences = [f"recorded in {path}"]
    result = summarize_findings(run) if analyse else None
    if result:
        sentences += result
    sentences.append(f"More: advisor analyze {shlex.quote(path)}")
    print_message(*sentences)


def summarize_findings(run: Path) -> list[str] | None:
    """Return sentences on the findings, the most important first, or ``None`` if unknown."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ADVISOR")}
    env["ADVISOR"] = "0"
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p != _INJECTED_FOLDER)
    command = [sys.executable, "-P", "-m", "advisor", "analyze", str(run), "--format", "json"]
    try:
        process = subprocess.run(
            [*command, "--no-progress"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=ANALYSIS_SECONDS,
            check=False,
            env=env,
        )
        return _summarize_report(process.stdout)
    except (OSError, subprocess.SubprocessError, AdvisorError):
        return None


def _summarize_report(text: bytes) -> list[str]:
    from advisor.core import labels
    from advisor.core import text as t
    from advisor.core.report import Report

    report = Report.from_json(text)
    sentences = []
    if report.recorded is not None:
        step = ""
        if report.step is not None:
            step_ns, statistic = report.step.reference_ns, report.step.statistic
            step = f", {t.format_duration(step_ns)} each ({statistic})"
        count = report.recorded.steps
        kind = "inference " if report.recorded.inference else ""
        step_text = f"{t.format_count(count)} {kind}step{'' if count == 1 else 's'}{step}"
        sentences.append(step_text if count else "no step was seen")
        if report.recorded.ended == "disk":
            sentences.append("the disk was full: later steps are not recorded")
    if report.crashes:
        sentences.append(t.describe_crashes(report.crashes))
    for finding in (*report.findings, *report.risks):
        return [*sentences, f"First finding: {labels.clean(finding.title)}"]
    if report.crashes:
        return sentences
    return [*sentences, labels.clean(report.verdict)]


def _short_path(run: Path) -> str:
    try:
        return str(run.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(run)


def with_injected(paths: str) -> str:
    """Return a PYTHONPATH with the folder of the recorder's ``sitecustomize`` in front."""
    return os.pathsep.join([_INJECTED_FOLDER, *([paths] if paths else [])])
