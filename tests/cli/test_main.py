"""The command as a whole: version, help, streams, signals."""

from __future__ import annotations

import ast
import builtins
import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

import advisor as package
from advisor import cli
from advisor import cli as groups
from advisor.cli import options as o
from advisor.cli import output as out
from advisor.cli import output as progress_module
from advisor.cli.output import Progress

ROOT = Path(__file__).resolve().parents[2]
WITH_HEADINGS = "analyze compare dashboard export fit gate project record report try whatif"
Run = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_the_version(advisor: Run) -> None:
    assert advisor("--version") == (0, f"advisor {package.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_help_names_the_commands(
    advisor: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = advisor(*arguments)
    assert (code, err) == (0, "")
    for command in ("analyze", "demo", "rules"):
        assert command in out
    assert max(map(len, out.splitlines())) <= 80
    assert "advisor analyze trace.json.gz" in out and f"Docs: {cli.DOCS}" in out


def test_help_is_a_command_too(advisor: Run) -> None:
    assert advisor("help") == advisor("--help")
    assert advisor("help", "analyze") == advisor("analyze", "--help")


def test_the_help_has_every_command_under_one_heading(advisor: Run) -> None:
    output = advisor("--help").out
    for heading, names in groups.GROUPS.items():
        assert f"\n{heading}:\n  {names[0]} " in output
    assert sorted(cli.COMMANDS) == sorted(n for names in groups.GROUPS.values() for n in names)


@pytest.mark.parametrize("command", WITH_HEADINGS.split())
def test_the_help_has_every_option_under_one_heading(
    advisor: Run, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = advisor(command, "--help").out
    sections = dict(re.findall(r"^([A-Z][^\n:]*):\n((?:  .*\n)+)", output, re.MULTILINE))
    assert sections["Other"].split() == "-h, --help Show this message and exit.".split()
    (only,) = cli._build_command(command).commands.values()
    options = [option for option in only.params if option.param_type_name == "option"]
    listed = [name for names in groups.HEADINGS.values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert all(set(option.opts) & set(listed) for option in options)
    assert set(sections) - {"Arguments", "Formats"} <= {*groups.HEADINGS, groups.OTHER_HEADING}
    assert [line for line in output.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("advisor an", "analyze"),
        ("advisor analyze --det", "--details"),
        ("advisor analyze --format mark", "markdown"),
        ("advisor rules show single-pro", "single-process-loader"),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    result = subprocess.run(
        [sys.executable, "-m", "advisor"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **words, "_ADVISOR_COMPLETE": "complete_bash"},
    )
    assert (result.stdout.split(), result.stderr) == ([completed], "")


def test_misspelled_command_gets_a_suggestion(
    advisor: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["analyse", "x"]) == 2
    error = capsys.readouterr().err
    assert "'analyze'? See" in error and error.count("\n") == 1


def test_help_loads_no_heavy_modules() -> None:
    code = (
        "import sys\n"
        "from advisor import cli\n"
        "cli.run(['--help'])\n"
        "heavy = {'polars', 'torch', 'dash', 'scalene', 'numpy'}\n"
        "loaded = heavy & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "advisor", "--version"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"advisor {package.__version__}\n"


def test_color_is_for_terminals_and_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert out.can_use_color(Terminal())
    assert not out.can_use_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not out.can_use_color(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not out.can_use_color(Terminal())


@pytest.mark.parametrize(("columns", "width"), [("20", 40), ("80", 80), ("97", 97), ("300", 120)])
def test_the_report_is_as_wide_as_the_terminal_within_reason(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert out.find_report_width(Terminal()) == width
    assert out.find_report_width(io.StringIO()) == width
    monkeypatch.delenv("COLUMNS")
    assert out.find_report_width(io.StringIO()) == 80


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_unicode_gets_a_bar_it_can_show(
    advisor: Run, slow_trace: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.run(["analyze", str(slow_trace)]) == 0
    stream.flush()
    text = buffer.getvalue().decode(encoding)
    assert "####" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


class BrokenPipe(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


def test_a_reader_that_goes_away_is_not_an_error(
    advisor: Run,
    slow_trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", BrokenPipe())
    assert cli.run(["analyze", str(slow_trace)]) == cli.BROKEN_PIPE
    assert capsys.readouterr().err == ""


def test_a_full_disk_behind_stdout_is_one_line_error(
    advisor: Run,
    slow_trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()

    def raise_disk_full(_: str) -> int:
        raise OSError(28, "No space left on device")

    stream.write = raise_disk_full  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.run(["analyze", str(slow_trace)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def _unread_bytes(pipe: IO[bytes]) -> int:
    """Number of bytes in a pipe that nobody has read."""
    buffer = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, buffer)
    return int.from_bytes(buffer, sys.byteorder)


def test_an_interrupt_is_exit_code_130_and_no_traceback() -> None:
    command = [sys.executable, "-m", "advisor", "analyze", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"traceEvents": [')  # and then it waits for more
        process.stdin.flush()
        deadline = time.monotonic() + 300
        while _unread_bytes(process.stdin) and time.monotonic() < deadline:  # past the imports
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.returncode == 130


# -- progress -----------------------------------------------------------------------------------


def test_no_progress_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 0.0)
    with Progress() as progress:
        progress.show("reading")
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_progress_waits_a_second_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress() as progress:
        progress.show("reading")
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress_module, "DELAY_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "UPDATE_SECONDS", 0.01)
    with Progress() as progress:
        progress.report_bytes("/somewhere/\x1b[31mtrace.json", 120_000_000)
        time.sleep(0.2)
    written = terminal.getvalue()
    assert "trace.json: 120 MB" in written
    assert "\x1b[31m" not in written
    assert written.endswith("\r\x1b[K")


def test_no_progress_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert not Progress(enabled=False).enabled


def test_every_command_uses_each_of_its_options() -> None:
    """An option that a command takes and never reads does nothing."""
    seen = 0
    for file in (ROOT / "advisor" / "cli").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and "command" in node.name:
                arguments = {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]}
                names = [each for line in node.body for each in ast.walk(line)]
                read = {each.id for each in names if isinstance(each, ast.Name)}
                assert arguments <= read, f"{file.name}: {node.name}: {arguments - read}"
                seen += 1
    assert seen > 10


def test_every_shared_option_arrives_in_the_analysis() -> None:
    """Each of ANALYSIS is a field of Options or ReadOptions, or changes one."""
    fields: dict[str, Any] = dict.fromkeys(o.ANALYSIS, 3)
    fields |= {"steps": "1:2", "max_size": "1G", "price": "2/h", "rules": Path("rules")}
    fields["recorded_gpu"] = "h100"
    for name in o.ANALYSIS:
        if name == "prices":  # a file, in place of --price
            continue
        assert o.build_options(**{name: fields[name]}) != o.build_options(), name


@pytest.mark.parametrize(("names", "declared"), [(("rank", "step"), {}), ((), {"step": o.Steps})])
def test_misspelt_option_raises(names: tuple[str, ...], declared: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^no options of an analysis: step$"):
        o.with_options(*names, **declared)


@pytest.mark.parametrize("command", ["whatif", "project", "fit"])
def test_analyzing_command_uses_each_shared_option(command: str) -> None:
    folder = ROOT / "advisor" / "cli"
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob(f"{command}*.py"))
    names = re.findall(r'"(\w+)"', text[text.index("@o.with_options(") :].partition(")")[0])
    fields = dict.fromkeys(("recorded_gpu", "memory_snapshot", "max_size"), "read")
    unused = [name for name in names if f"options.{fields.get(name, name)}" not in text]
    assert len(names) > 1 and not unused


@pytest.mark.parametrize("name", ["/root/x.html", None])
def test_a_file_without_permission_is_one_line_error(
    name: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``Path.is_dir`` raises in a folder that one may not enter."""

    def raise_permission_error(_: str) -> None:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(cli, "_build_command", raise_permission_error)
    assert cli.run(["analyze"]) == 2
    error = capsys.readouterr().err
    assert error == f"advisor: {name + ': ' if name else ''}Permission denied\n"


def test_former_options_name_their_current_option() -> None:
    for command, names in cli.FORMER_NAMES.items():
        (subcommand,) = cli._build_command(command).commands.values()
        options = {option for param in subcommand.params for option in param.opts}
        assert {new.partition("=")[0] for new in names.values()} <= options, command


def test_a_parameter_has_the_name_of_its_option() -> None:
    """A parameter has a longer name where Python or the file has its option's name:
    ``format_name``, ``all_gpus``."""
    commands = cli._build_command("").commands
    leaves = {(name, leaf) for name, each in commands.items() for leaf in _leaf_commands(each)}
    other = set()
    for name, command in leaves:
        for param in command.params:
            names = {each[2:].replace("-", "_") for each in param.opts if each[:2] == "--"}
            longer = any(hasattr(builtins, each) and each in param.name for each in names)
            if names and param.name not in names and not longer:
                other.add((name, param.name, *names))
    assert len(leaves) > 20 and other == set()


def _leaf_commands(command: Any) -> list[Any]:
    below = getattr(command, "commands", {}).values()
    return [leaf for each in below for leaf in _leaf_commands(each)] if below else [command]


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef advisor"), ("bash", "COMPREPLY=")])
def test_the_completion_shown_is_that_of_the_named_shell(shell: str, words: str) -> None:
    command = [sys.executable, "-m", "advisor", "--show-completion", shell]
    assert words in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_an_unknown_shell_is_an_error(advisor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.NAMED_SHELL, "1")  # undone after the test
    code, out, err = advisor("--show-completion", "none")
    assert (code, out) == (2, "") and "'none' is not one of 'bash', 'zsh', " in err
