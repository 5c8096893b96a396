"""Reader of Scalene's JSON: the hot lines of Python code, from a separate run.

The file is untrusted, and Scalene is not imported (it takes two seconds). Of a line only its costs
are read. Unknown fields are ignored."""

import re
from pathlib import Path

import msgspec
from msgspec import Struct, field

from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular
from advisor.core.finding import HotLine

MAX_SCALENE_BYTES = 16 << 20
"""Maximum size of a profile, bytes. Without stacks it has about 60 KB, with stacks some MB. A
malicious file takes thirty times its size once decoded."""
_MAX_LINES = 20
_MIN_LINE_SHARE = 0.01
"""Minimum share of the samples for a line. Lines below it have only a few samples."""
_MAX_TEXT = 200

_TRAINING_LOOP = re.compile(r"\.backward\(|\.step\(\s*\)|\bfor\b.+\bin\b.+(?:loader|enumerate\()")


class _Line(Struct):
    lineno: int = 0
    line: str = ""
    n_cpu_percent_python: float = 0.0
    n_cpu_percent_c: float = 0.0
    n_sys_percent: float = 0.0
    start_region_line: int = 0
    start_function_line: int = 0


class _Function(Struct):
    lineno: int = 0
    line: str = ""


class _ScaleneFile(Struct):
    lines: list[_Line] = field(default_factory=list)
    functions: list[_Function] = field(default_factory=list)


class _Profile(Struct):
    files: dict[str, _ScaleneFile]


def read_scalene(path: str | Path) -> list[HotLine]:
    """Return the lines with the most samples, highest first.

    Lines that run once are left out, because Scalene's samples cover the whole program. These are
    lines at the top level of a module outside a loop, and lines outside a loop in the function with
    the training loop (building the model, the optimizer's first use).

    Raises AdvisorError if the file cannot be read, is too large, or is not a Scalene profile."""
    file = Path(path)
    try:
        data = read_regular(file, MAX_SCALENE_BYTES)
    except (OSError, ValueError) as error:
        strerror = getattr(error, "strerror", None)
        raise AdvisorError(f"{file}: cannot be read ({strerror or error})") from None
    try:
        profile = msgspec.json.decode(data, type=_Profile)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise AdvisorError(f"{file}: not a Scalene profile ({error})") from None
    result = [
        line for name, file_ in profile.files.items() for line in _find_hot_lines(name, file_)
    ]
    return sorted(result, key=lambda line: -line.share)[:_MAX_LINES]


def _find_hot_lines(name: str, file: _ScaleneFile) -> list[HotLine]:
    function_names = {function.lineno: function.line for function in file.functions}
    training_functions = {
        line.start_function_line
        for line in file.lines
        if line.start_function_line and _TRAINING_LOOP.search(line.line[:1000])
    }
    result = []
    for line in file.lines:
        python, native, system = (
            _share(line.n_cpu_percent_python),
            _share(line.n_cpu_percent_c),
            _share(line.n_sys_percent),
        )
        in_loop = line.start_region_line not in (0, line.start_function_line, line.lineno) or (
            line.line.lstrip().startswith(("for ", "while "))
        )
        runs_once = not in_loop and (
            not line.start_function_line or line.start_function_line in training_functions
        )
        if python + native + system < _MIN_LINE_SHARE or runs_once or line.lineno < 1:
            continue
        result.append(
            HotLine(
                file=name[:4096],
                line=line.lineno,
                text=line.line.strip()[:_MAX_TEXT],
                function=function_names.get(line.start_function_line, "")[:_MAX_TEXT] or None,
                share=python + native + system,
                python=python,
                native=native,
                system=system,
            )
        )
    return result


def _share(percent: float) -> float:
    """Convert a percentage to a share from 0 to 1, or to 0 if it is out of range."""
    return percent / 100 if 0 <= percent <= 100 else 0.0
