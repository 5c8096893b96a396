"""Output of reports: width and colour of the terminal, files written atomically, and progress."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import stat
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.read.runs import RunLine, SeveralRuns
    from advisor.render.document import Document
    from advisor.render.formats import Formats
    from advisor.render.renderer import Renderer

PIPED_WIDTH, _MAX_WIDTH = 80, 120
"""Width of a report without a terminal, and maximum width, in columns."""

_ASCII: dict[int, int | str] = {
    **str.maketrans("█▓▒▚░╱╲┄∙╳◇□◌≡≣‡┆┈▪◈▞─│µ×–—−·…≈", "#=+%./\\-:xcmosgt!_*Mw-|ux----~~"),
    ord("≥"): ">=",
    ord("≤"): "<=",
    ord("→"): "->",
}
"""ASCII substitutes for a report's characters, for encodings that lack them."""


PLAIN_SUFFIXES = (".txt", ".text", ".log", ".out")
"""Suffixes of files that get the same report as the terminal."""


def choose_renderer(
    formats: Formats, format_name: str | None, output: Path | None
) -> Renderer[Any]:
    """Return the renderer for ``--format``, else for the suffix of ``--output``, else the
    terminal's. Raises AdvisorError for an unknown format."""
    if format_name is None and output is not None:
        format_name = formats.by_suffix(output)
        suffix = output.suffix.lower()
        if format_name is None and suffix[1:].isalpha() and suffix not in PLAIN_SUFFIXES:
            known = ", ".join(formats)
            raise AdvisorError(f"{output.name}: no format has this suffix; --format: {known}")
    return formats.renderer(format_name or "terminal")


def format_names(formats: Formats) -> str:
    """List the bundled formats for ``--help``, without a search for installed plugins."""
    *first, last = formats.bundled
    return f"{', '.join(first)} or {last}"


def deliver(
    renderer: Renderer[Any],
    subject: Any,
    output: Path | None = None,
    inputs: Iterable[str | Path] = (),
    **options: Any,
) -> None:
    """Render a subject and show it, or write it to a file that is not an input. ``options``:
    fields of :class:`~advisor.render.document.RenderOptions`."""
    from advisor.render.document import RenderOptions

    if output is not None:
        verb = "replaced" if output.exists() and not _is_special(output) else "wrote"
        write(renderer.render(subject, RenderOptions(width=PIPED_WIDTH, **options)), output, inputs)
        if sys.stderr.isatty():
            print(f"{verb} {output}", file=sys.stderr)
        return
    width, colour = find_report_width(sys.stdout), can_use_color(sys.stdout)
    show(renderer.render(subject, RenderOptions(width=width, colour=colour, **options)))


def show_document(document: Document, **options: Any) -> None:
    """Show a document in full. It has only the terminal's format."""
    from advisor.render.formats.terminal import Terminal

    deliver(Terminal(), document, details=True, **options)


def redact_document(document: Document, names: Iterable[str] | None) -> Document:
    """Return a document and its data without private texts. ``names``: users and hosts that the
    input names; ``None`` removes nothing."""
    if names is None:
        return document
    import msgspec

    from advisor.export.redact import Redactor, names_in, redact_fields
    from advisor.render.document import convert_tuples, map_texts

    data = msgspec.to_builtins(convert_tuples(document.data))
    redactor = Redactor({*names, *names_in(msgspec.json.encode(data))})
    cleaned: Document = map_texts(document, redactor.text)
    return replace(cleaned, data=redact_fields(data, redactor))


def can_use_color(stream: TextIO) -> bool:
    """Return whether to use colour: only on a terminal, and not with NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def find_report_width(stream: TextIO) -> int:
    """Return the width of a report on this stream: that of ``COLUMNS`` or of the terminal, from 40
    to 120 (longer lines are hard to read), or 80. It is 78 if the encoding lacks arrows, which then
    become two characters."""
    try:
        "→".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PIPED_WIDTH - 2
    if not stream.isatty() and not os.environ.get("COLUMNS"):
        return PIPED_WIDTH
    return max(40, min(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, _MAX_WIDTH))


def show(text: str) -> None:
    """Write to stdout in its encoding. Raises AdvisorError if that fails, as on a full disk."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AdvisorError(f"cannot write the report to stdout: {error.strerror}") from None


def show_json(data: Any) -> None:
    """Show data as JSON, without control characters that a terminal would interpret."""
    import msgspec

    from advisor.core.labels import escape_terminal_controls

    show(escape_terminal_controls(msgspec.json.format(msgspec.json.encode(data), indent=2)) + "\n")


def check_output(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise AdvisorError, before any work, for an output that is an input or not writable."""
    for path in inputs:
        if str(path) != "-" and _is_same_file(Path(path), output):
            raise AdvisorError(f"--output {output}: that is an input; choose another file")
    if output.is_dir():
        raise AdvisorError(f"--output {output}: that is a folder; give a file name")
    if _is_special(output):
        return
    target = _resolve_target(output)
    if not target.parent.is_dir():
        raise AdvisorError(f"--output {output}: no folder {target.parent}; create it first")
    if not os.access(target.parent, os.W_OK):
        raise AdvisorError(f"--output {output}: no permission to write to {target.parent}")


def write(text: str, output: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Write a complete file or keep the old one, by renaming a temporary sibling file.

    ``inputs``: files that were read, which are never overwritten."""
    check_output(output, inputs)
    try:
        if _is_special(output):  # a device or a pipe cannot be replaced, only written to
            with output.open("w", encoding="utf-8") as file:
                file.write(text)
        else:
            _replace(text, _resolve_target(output))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AdvisorError(f"--output {output}: cannot be written: {error.strerror}") from None


def _replace(text: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _resolve_target(output: Path) -> Path:
    """Return the file to write. A symbolic link is followed, not replaced."""
    try:
        return output.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise AdvisorError(f"--output {output}: cannot be resolved ({error})") from None


def _is_special(output: Path) -> bool:
    try:
        mode = output.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


DELAY_SECONDS, UPDATE_SECONDS = 1.0, 0.2
"""Delay before the first progress line, and interval between updates, s."""


class Progress:
    """Progress line on stderr with the current work and its duration. It is erased at the end.

    A thread writes it, so that long work without reports of its own (one long measurement) still
    shows activity."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._text = ""
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = False

    def show(self, what: str) -> None:
        """Set the text of the progress line."""
        self._text = what

    def report_bytes(self, path: str, size: int) -> None:
        """Show a file and the uncompressed bytes read of it (for ``ReadOptions.progress``)."""
        from advisor.core.text import shorten_path

        name = "standard input" if path == "-" else shorten_path(path, 40)
        self.show(f"reading {name}: {size / 1e6:,.0f} MB")

    def __enter__(self) -> Self:
        if self.enabled:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._shown:
            self._write("\r\x1b[K")

    def _run(self) -> None:
        if self._done.wait(DELAY_SECONDS):
            return
        while not self._done.wait(UPDATE_SECONDS):
            if self._text:
                seconds = time.monotonic() - self._started
                room = shutil.get_terminal_size().columns - 1
                self._shown = True
                self._write(f"\r\x1b[K{f'{self._text} ({seconds:.0f} s)'[:room]}")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, UnicodeEncodeError):
            self._text = ""  # stderr is closed


MAX_RUNS = 20
MAX_PROGRAM = 34
"""Maximum length of a program's command line, characters."""


def offer_runs(error: SeveralRuns, arguments: list[str]) -> str:
    """List the runs on stderr, newest first. Return the message with the command for the newest."""
    from advisor.core.labels import clean
    from advisor.core.text import count_noun
    from advisor.read.runs import describe_run

    lines = [describe_run(path) for path in error.runs[:MAX_RUNS]]
    lines.sort(key=lambda line: line.started_unix_ns, reverse=True)
    width = max(len(clean(line.path)) for line in lines)
    for line in lines:
        print(f"  {clean(line.path):<{width}}  {_describe_run(line)}".rstrip(), file=sys.stderr)
    hidden = len(error.runs) - len(lines)
    if hidden:
        print(f"  and {count_noun(hidden, 'older run')}", file=sys.stderr)
    chosen = str(lines[0].path)
    words = [chosen if word == error.path else word for word in arguments]
    if chosen not in words:
        return str(error)
    return f"{error.path} contains several runs, listed above; choose one: {_format_command(words)}"


def newest_run(paths: list[str]) -> list[str]:
    """Replace a folder of several runs with the newest one that can be analysed. Print it on
    stderr, with why newer ones are skipped, and the command for another. Return other paths
    unchanged."""
    from advisor.core.labels import clean
    from advisor.read.directory import refuse_several
    from advisor.read.runs import SeveralRuns, describe_run

    try:
        if len(paths) == 1:
            refuse_several(paths[0])
    except (OSError, SeveralRuns) as error:
        run_folders = error.runs[:MAX_RUNS] if isinstance(error, SeveralRuns) else []
        lines = sorted(map(describe_run, run_folders), key=lambda line: -line.started_unix_ns)
        chosen = next((n for n, line in enumerate(lines) if not _why_skipped(line)), None)
        if chosen is not None and len(lines) > 1:
            run, *older = lines[chosen:]
            total = len(error.runs) if isinstance(error, SeveralRuns) else len(run_folders)
            chosen_run = (
                f"{clean(run.path)}, the newest of {total} runs"
                f"{' that can be analysed' * bool(chosen)}: "
                + re.sub(" {2,}", ", ", _describe_run(run))
            )
            print(
                *textwrap.wrap(
                    chosen_run, find_report_width(sys.stderr), subsequent_indent="  ",
                    break_long_words=False, break_on_hyphens=False,
                ),
                *(f"skipped: {clean(new.path)}, {_why_skipped(new)}" for new in lines[:chosen]),
                f"another: {clean(_format_command(['analyze', str((older or lines)[0].path)]))}",
                "",
                sep="\n",
                file=sys.stderr,
            )  # fmt: skip
            return [str(run.path)]
    return paths


def _why_skipped(run: RunLine) -> str:
    """Return the reason why a run cannot be analysed, or an empty text if it can."""
    from advisor.tune.report import FILE

    if (run.path / FILE).exists():
        return "a trial of advisor try"
    return "" if run.windows or run.steps != 0 else "no steps recorded"


def _format_command(words: list[str]) -> str:
    return shlex.join(["advisor", *words])


def _describe_run(line: RunLine) -> str:
    """Describe a run in a line: ``2026-11-21 16:00  1,024 steps  2 ranks  train.py --epochs 1``."""
    from advisor.core import labels
    from advisor.core import text as t

    parts = []
    if 0 < line.started_unix_ns < 4 << 60:
        started = datetime.fromtimestamp(line.started_unix_ns / 1e9)
        parts.append(started.strftime("%Y-%m-%d %H:%M"))
    steps = "many" if line.steps is None else t.format_count(line.steps)
    parts.append(f"{steps:>7} step{' ' if line.steps == 1 else 's'}")
    if line.ranks > 1:
        parts.append(f"{line.ranks} ranks")
    if not line.windows:
        parts.append("no window")
    if line.command:
        head, *arguments = line.command
        name = PurePath(head).name
        words = arguments if arguments and name.startswith("python") else [name, *arguments]
        parts.append(labels.shorten(labels.clean(shlex.join(words)), MAX_PROGRAM))
    return "  ".join(parts)
