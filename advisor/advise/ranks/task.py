"""Task of a worker: fetch and measure one file, and return its summary or an error."""

import gc
import time
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Final

import msgspec
from msgspec import Struct, field, structs

from advisor import __version__
from advisor.advise.options import Options
from advisor.core.errors import AdvisorError
from advisor.core.run_directory import is_run
from advisor.core.trace import Run
from advisor.measure.ranks.summary_schema import MAX_DECODED, RankSummary, UnreadRank, encode
from advisor.read.remote.urls import RemoteFile, location_of_url

RETRY_PAUSES_S: Final = (0.5, 2.0)
"""Pauses before each retry of a possibly transient failure, s, such as a hanging file system, or
memory in use by another task."""
MAX_REASON_CHARS: Final = 300
"""Maximum length of a reason, characters."""


def for_workers(options: Options, config: dict[str, dict[str, Any]]) -> Options:
    """Return the options for a worker, which measures each rank alone. One process reads, since
    there is one worker per core. ``config`` comes from the user, because a worker's folder may have
    another pyproject.toml. Every worker must see the folder of rules."""
    rules = options.rules_folder
    read = replace(
        options.read, processes=1, progress=None, peek=None, ranks="",
        memory_snapshot=None, kernel_profile=None, compile_log=None,
    )  # fmt: skip
    return replace(
        options, read=read, config=config, rules_folder=None if rules is None else rules.resolve(),
        rank=None, workers=None, cluster=None, on_progress=None, capture=None,
        prices=None,
    )  # fmt: skip


class MeasureTask(Struct, frozen=True, kw_only=True):
    """Order to measure one file."""

    source: RemoteFile
    wanted: Options = field(default_factory=Options)
    version: str = __version__
    """Version of the advisor that sends the task."""

    @property
    def rank(self) -> int:
        """Rank in the file's name, or -1 if there is none."""
        return -1 if self.source.rank is None else self.source.rank

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self, enc_hook=_encode_path)

    def failure(self, why: str) -> UnreadRank:
        """Return the answer for a file that could not be measured, with the reason."""
        return UnreadRank(rank=self.rank, path=self.source.url, why=shorten_reason(why))


def _encode_path(value: object) -> str:
    if not isinstance(value, PurePath):
        raise TypeError(f"{type(value).__name__} cannot be sent to a worker")
    return str(value)


def _decode_path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"{kind} is not sent to workers")
    return Path(value)


def shorten_reason(why: object) -> str:
    """Return a reason as one line of limited length."""
    return " ".join(str(why).split())[:MAX_REASON_CHARS]


def run_task(encoded: bytes) -> bytes:
    """Measure the file of an encoded MeasureTask. Return an encoded RankSummary or UnreadRank.
    Raises only exceptions that end a process."""
    try:
        task = msgspec.msgpack.decode(encoded, type=MeasureTask, dec_hook=_decode_path)
    except ValueError:
        return encode(
            UnreadRank(
                rank=-1,
                path="",
                why=f"advisor {__version__} does not know this task: install the same",
            )
        )
    if task.version != __version__:
        why = f"the worker has advisor {__version__}, this is {task.version}: install the same"
        return encode(task.failure(why))
    for pause in (*RETRY_PAUSES_S, None):
        try:
            return _measure_file(task)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # native code raises panics that are not an Exception
            if pause is None or not is_transient(error):
                return encode(task.failure(describe_error(error)))
        gc.collect()
        time.sleep(pause)
    raise AssertionError("the last try returns")


def is_transient(error: BaseException) -> bool:
    """Return whether an error may not happen again."""
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return False
    return isinstance(error, OSError | MemoryError)


def describe_error(error: BaseException) -> str:
    if isinstance(error, AdvisorError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory on the worker"
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return f"not measured, a bug in advisor ({type(error).__name__}: {error})"


def _measure_file(task: MeasureTask) -> bytes:
    from advisor.measure.ranks.topology import host_of
    from advisor.read.registry import refuse_unknown
    from advisor.read.remote.fetch import open_locally

    source = task.source
    with open_locally(source, check=refuse_unknown) as path:
        try:
            summary = summarize_file(str(path), source.rank, task.wanted)
        except AdvisorError as error:
            why = str(error).removeprefix(f"{path}: ").replace(str(path), source.url)
            raise AdvisorError(why) from None  # the same reason then counts once for many files
    if str(path) != source.url:  # a copy, whose folder does not show its origin
        summary = structs.replace(
            summary, path=source.url, host=host_of(location_of_url(source.url))
        )
    data = encode(summary)
    if len(data) > MAX_DECODED:
        raise AdvisorError("its summary is too large to be sent")
    return data


def summarize_file(
    path: str, rank: int | None = None, options: Options | None = None
) -> RankSummary:
    """Read and measure one rank. ``rank``: its number. With ``None``, it is taken from the trace or
    its name, or else it is -1. A file with several merged ranks needs the number.

    Raises AdvisorError if there is no trace, if the rank is missing, or if it has to be chosen."""
    from advisor.advise.memory import memory_of_rank
    from advisor.advise.options import Options
    from advisor.advise.rule_loading import load_rules, read_config
    from advisor.advise.rule_runner import run_rules
    from advisor.advise.window_choice import choose_windows
    from advisor.measure.ranks.rank_summary import summarize_rank
    from advisor.read import open_run

    options = options or Options()
    config = read_config() if options.config is None else options.config
    opened = open_run(
        path, options.read, rank=rank if is_run(path) else None, window=options.window_to_read
    )
    run = select_rank(opened, path, rank)
    number, a = next(iter(choose_windows(run, options.window, options.steps).items()))
    findings = run_rules(number, a, load_rules(options.rules_folder, config)).findings
    known_rank = number if rank is None else rank
    return summarize_rank(a, known_rank, findings, path, memory_of_rank(a, known_rank))


def select_rank(run: Run, path: str, rank: int | None) -> Run:
    """Return the run with one rank: the requested one if there are several.

    Raises AdvisorError if there are several ranks without the requested one."""
    present = run.ranks or sorted(run.recording.ranks if run.recording is not None else ())
    if len(present) <= 1:
        return run
    if rank not in present:
        raise AdvisorError(f"{path}: {len(present)} ranks in one file; say which")
    recording = run.recording
    if recording is not None:
        recording.ranks = {rank: recording.ranks[rank]}
    return replace(
        run,
        traces={key: trace for key, trace in run.traces.items() if key[0] == rank},
        snapshots={key: each for key, each in run.snapshots.items() if key == rank},
    )
