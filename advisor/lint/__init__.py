"""Static hints: places in a training program's source that often cost time, found before a run.

A hint names the rule that shows on a recording whether the place costs anything. Nothing is
imported or run; the source is only parsed."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular
from advisor.lint.loader import check_loader
from advisor.lint.loop import check_loop, check_settings
from advisor.lint.model import (
    check_estimators,
    check_evaluation,
    check_parallel,
    check_single_evaluation,
)
from advisor.lint.script import Hint, parse

__all__ = ["Hint", "lint_paths", "lint_text"]

_MAX_BYTES = 4 << 20
_MAX_FILES = 2000
IGNORE = "advisor: ignore"
"""Text of a comment that removes the hints of its line."""
_SKIPPED_FOLDERS = {"node_modules", "site-packages", "build", "dist", "__pycache__", "venv", "env"}
_CHECKS = (
    check_loader, check_loop, check_evaluation, check_single_evaluation, check_parallel,
    check_settings, check_estimators,
)  # fmt: skip


def lint_paths(paths: list[str]) -> tuple[list[Hint], list[str]]:
    """Return the hints for Python files, also in folders, and one line per file that cannot be
    parsed. Raises AdvisorError if a path is missing, if there are no Python files, or if the only
    file cannot be parsed."""
    files = list(islice(_iterate_files(paths), _MAX_FILES + 1))
    if not files:
        raise AdvisorError(f"{paths[0]}: no Python files (*.py)")
    if len(files) > _MAX_FILES:
        raise AdvisorError(f"{paths[0]}: more than {_MAX_FILES} Python files; give fewer")
    hints: list[Hint] = []
    problems: list[str] = []
    for file in files:
        try:
            hints += lint_text(_read_text(file), str(file))
        except AdvisorError as error:
            if len(files) == 1:
                raise
            problems.append(str(error))
    return hints, problems


def _iterate_files(paths: list[str]) -> Iterator[Path]:
    for path_text in paths:
        if "\0" in path_text:
            raise AdvisorError(f"{path_text!r}: not a file name")
        path = Path(path_text)
        if path.is_dir():
            for file in sorted(path.rglob("*.py")):
                parts = file.relative_to(path).parts
                if file.is_file() and not any(
                    part in _SKIPPED_FOLDERS or part[0] == "." for part in parts
                ):
                    yield file
        elif path.exists():
            yield path
        else:
            raise AdvisorError(f"{path}: no such file or directory")


def _read_text(file: Path) -> str:
    try:
        return read_regular(file, _MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise AdvisorError(f"{file}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise AdvisorError(f"{file}: not UTF-8 ({error.reason})") from None


def lint_text(text: str, name: str = "<text>") -> list[Hint]:
    """Return the hints for one file, sorted by line. Raises AdvisorError if it is not Python."""
    source = parse(text, name)
    hints = []
    for check in _CHECKS:
        for hint in check(source):
            if IGNORE not in source.lines[hint.line - 1]:
                hint.file = source.name
                hints.append(hint)
    return sorted(hints, key=lambda hint: (hint.line, hint.column, hint.id))
