"""Output of reports: width and colour of the terminal, files written atomically, and progress."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterable
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

PIPED_WIDTH, WIDEST = 80, 120
"""Width of a report that goes to no terminal, and the largest one, in columns."""

_ASCII: dict[int, int | str] = {
    **str.maketrans("█▓▒▚░╱╲┄∙╳◇□◌≡‡┆┈▪◈▞─│µ×–—−·…≈", "#=+%./\\-:xcmost!_*Mw-|ux----~~"),
    ord("≥"): ">=",
    ord("≤"): "<=",
    ord("→"): "->",
}
"""ASCII substitutes for a report's characters, for encodings that lack them."""


PLAIN = (".txt", ".text", ".log", ".out")
"""Suffixes of files that get the terminal's report."""


def choose_renderer(formats: Formats, given: str | None, output: Path | None) -> Renderer[Any]:
    """Return the renderer that ``--format`` names, else the one of ``--output``'s suffix, else the
    terminal's. Raises AdvisorError for an unknown format."""
    if given is None and output is not None:
        given = formats.by_suffix(output)
        suffix = output.suffix.lower()
        if given is None and suffix[1:].isalpha() and suffix not in PLAIN:
            known = ", ".join(formats)
            raise AdvisorError(f"{output.name}: no format has this suffix; --format: {known}")
    return formats.renderer(given or "terminal")


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
    """Render a subject and show it, or write it to a file that is none of ``inputs``. ``options``:
    fields of :class:`~advisor.render.document.RenderOptions`."""
    from advisor.render.document import RenderOptions

    if output is not None:
        write(renderer.render(subject, RenderOptions(width=PIPED_WIDTH, **options)), output, inputs)
        if sys.stderr.isatty():
            print(f"wrote {output}", file=sys.stderr)
        return
    width, colour = find_report_width(sys.stdout), can_use_colour(sys.stdout)
    show(renderer.render(subject, RenderOptions(width=width, colour=colour, **options)))


def show_document(document: Document, **options: Any) -> None:
    """Show a document that has no other format than the terminal's, in full."""
    from advisor.render.formats.terminal import Terminal

    deliver(Terminal(), document, details=True, **options)


def can_use_colour(stream: TextIO) -> bool:
    """Tell whether to use colour: only on a terminal, and not with NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def find_report_width(stream: TextIO) -> int:
    """Return the width of a report on this stream: the terminal's, from 40 to 120 (longer lines are
    hard to read), or 80. It is 78 where the encoding lacks arrows, which become two
    characters."""
    try:
        "→".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PIPED_WIDTH - 2
    if not stream.isatty():
        return PIPED_WIDTH
    return max(40, min(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, WIDEST))


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
        raise AdvisorError(f"the report cannot be written to stdout: {error.strerror}") from None


def show_json(data: Any) -> None:
    """Show data as JSON, without control characters that a terminal would obey."""
    import msgspec

    from advisor.core.labels import sanitize

    show(sanitize(msgspec.json.format(msgspec.json.encode(data), indent=2)) + "\n")


def check_output(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise AdvisorError for an output that cannot be written or is an input, before any work."""
    for given in inputs:
        if str(given) != "-" and _same(Path(given), output):
            raise AdvisorError(f"--output {output}: that is an input; choose another file")
    if output.is_dir():
        raise AdvisorError(f"--output {output}: that is a folder; give a file name")
    if _special(output):
        return
    target = _target(output)
    if not target.parent.is_dir():
        raise AdvisorError(f"--output {output}: no folder {target.parent}; create it first")
    if not os.access(target.parent, os.W_OK):
        raise AdvisorError(f"--output {output}: no permission to write to {target.parent}")


def write(text: str, output: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Write the file whole or leave the old one: a temporary file beside it is renamed over it.

    ``inputs``: files that were read, which are never written over."""
    check_output(output, inputs)
    try:
        if _special(output):  # a device or a pipe cannot be replaced, only written to
            with output.open("w", encoding="utf-8") as file:
                file.write(text)
        else:
            _replace(text, _target(output))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AdvisorError(f"--output {output}: cannot be written: {error.strerror}") from None


def _replace(text: str, target: Path) -> None:
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _target(output: Path) -> Path:
    """Return the file to write: a symbolic link is followed, not replaced."""
    try:
        return output.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise AdvisorError(f"--output {output}: cannot be resolved ({error})") from None


def _special(output: Path) -> bool:
    try:
        mode = output.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


PATIENCE, PAUSE = 1.0, 0.2
"""Seconds before the first progress line, and between two updates."""


class Progress:
    """Progress line on stderr: what is being done, for how long. It is wiped at the end.

    A thread writes it, so that work which reports nothing in between (one long measurement)
    still shows that it is alive."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._what = ""
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = False

    def show(self, what: str) -> None:
        """Set the text of the progress line."""
        self._what = what

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
        if self._done.wait(PATIENCE):
            return
        while not self._done.wait(PAUSE):
            if self._what:
                seconds = time.monotonic() - self._started
                room = shutil.get_terminal_size().columns - 1
                self._shown = True
                self._write(f"\r\x1b[K{f'{self._what} ({seconds:.0f} s)'[:room]}")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, UnicodeEncodeError):
            self._what = ""  # nobody to show it to


MAX_RUNS = 20
PROGRAM = 34
"""Length at which a program's command line is cut, characters."""


def offer_runs(error: SeveralRuns, arguments: list[str]) -> str:
    """List the runs on stderr, newest first; return the message with the command for the newest."""
    from advisor.core.labels import clean
    from advisor.core.text import count_noun
    from advisor.read.runs import describe_run

    lines = [describe_run(path) for path in error.found[:MAX_RUNS]]
    lines.sort(key=lambda line: line.started_unix_ns, reverse=True)
    wide = max(len(clean(line.path)) for line in lines)
    for line in lines:
        print(f"  {clean(line.path):<{wide}}  {_about(line)}".rstrip(), file=sys.stderr)
    more = len(error.found) - len(lines)
    if more:
        print(f"  and {count_noun(more, 'older run')}", file=sys.stderr)
    chosen = str(lines[0].path)
    words = [chosen if word == error.given else word for word in arguments]
    if chosen not in words:
        return str(error)
    return f"{error.given} holds runs, listed above; give one: {_typed(words)}"


def newest_run(paths: list[str]) -> list[str]:
    """Replace a folder of several runs by the newest that can be analysed. Stderr names it, why a
    newer one is skipped, and the command for another. Other paths are returned unchanged."""
    from advisor.core.labels import clean
    from advisor.read.directory import refuse_several
    from advisor.read.runs import SeveralRuns, describe_run

    try:
        if len(paths) == 1:
            refuse_several(paths[0])
    except (OSError, SeveralRuns) as error:
        found = error.found[:MAX_RUNS] if isinstance(error, SeveralRuns) else []
        lines = sorted(map(describe_run, found), key=lambda line: -line.started_unix_ns)
        chosen = next((n for n, line in enumerate(lines) if not _why_skipped(line)), None)
        if chosen is not None and len(lines) > 1:
            run, *older = lines[chosen:]
            total = len(error.found) if isinstance(error, SeveralRuns) else len(found)
            print(
                f"{clean(run.path)}, the newest of {total} runs"
                f"{' that can be analysed' * bool(chosen)}: {_about(run)}",
                *(f"skipped: {clean(new.path)}, {_why_skipped(new)}" for new in lines[:chosen]),
                f"another: {clean(_typed(['analyze', str((older or lines)[0].path)]))}",
                sep="\n",
                file=sys.stderr,
            )
            return [str(run.path)]
    return paths


def _why_skipped(run: RunLine) -> str:
    """Say why a run is not the one to analyse; empty if it can be."""
    from advisor.tune.report import FILE

    if (run.path / FILE).exists():
        return "a trial of advisor try"
    return "" if run.windows or run.steps != 0 else "no steps recorded"


def _typed(words: list[str]) -> str:
    return shlex.join(["advisor", *words])


def _about(line: RunLine) -> str:
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
        head, *rest = line.command
        name = PurePath(head).name
        words = rest if rest and name.startswith("python") else [name, *rest]
        parts.append(labels.shorten(labels.clean(shlex.join(words)), PROGRAM))
    return "  ".join(parts)
