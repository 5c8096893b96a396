"""The command line: one file a subcommand, each importing what it needs only when it runs."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Annotated, Any, cast

import typer

from advisor import __version__
from advisor.cli import (
    analyze,
    compare,
    dashboard,
    demo,
    export,
    lint,
    monitor,
    record,
    report,
    rules,
    whatif,
    workloads,
)
from advisor.errors import AdvisorError

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What typer raises for any misuse of the command line; exported under no name of its own."""

app = typer.Typer(
    name="advisor",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"advisor {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _advisor(
    ctx: typer.Context,
    _show: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Why a PyTorch training step is slow, what to change, and what the change is worth."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


app.command("analyze", short_help="Say what is slow in a trace, and what to do.")(analyze.command)
app.command("demo", short_help="Record a small training run and analyse it.")(demo.command)
app.command("compare", short_help="What differs between two runs.")(compare.command)
app.command("dashboard", short_help="Show traces and runs in the browser.")(dashboard.command)
app.command("export", short_help="A trace with what was found as extra tracks.")(export.command)
app.command("lint", short_help="Static hints about a training program.")(lint.command)
app.command("monitor", short_help="What GPUs and host do now, live.")(monitor.command)
app.command("report", short_help="A report as one HTML file, or for other tools.")(report.command)
app.add_typer(rules.app, name="rules")
app.command(
    "record", short_help="Run a training program and record it.", context_settings=record.SETTINGS
)(record.command)
app.command("window", short_help="Profile the next steps of a run that is going on.")(record.window)
app.command("whatif", short_help="Replay a trace with edits that you write.")(whatif.command)
app.add_typer(workloads.app, name="workloads")


def main() -> None:
    """Run the command line and leave the process with its exit code.

    0: done. 1: ``--fail-on`` hit. 2: bad input or usage, told in one line on stderr. 130:
    interrupted. 141: the reader of a pipe went away, as for a program that SIGPIPE ends.
    """
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    try:
        code = _command().main(args=arguments, prog_name="advisor", standalone_mode=False)
        sys.stdout.flush()
    except AdvisorError as error:
        return _complain(str(error), error.exit_code)
    except _UsageError as error:
        return _complain(_usage(error), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE
    except MemoryError:
        return _complain("out of memory; analyse one rank or fewer steps at a time", BAD_INPUT)
    return code if isinstance(code, int) else 0


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def _usage(error: Exception) -> str:
    """The message of a usage error in one line, with the way to the help."""
    describe = getattr(error, "format_message", None)
    message = " ".join((describe() if describe is not None else str(error)).split())
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "advisor"
    message = message.replace("Value error, ", "")  # pydantic's, inside typer's
    return f"{message.rstrip('.')}. See '{command} --help'."


def _complain(message: str, code: int) -> int:
    from advisor.report.text import clean

    try:
        print(f"advisor: {clean(message)}", file=sys.stderr)
    except BrokenPipeError:
        return BROKEN_PIPE
    return code


def _forget_stdout() -> None:
    """Let the interpreter flush its buffer at exit without complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
