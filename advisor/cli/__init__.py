"""The command line: one file a subcommand, each importing what it needs only when it runs."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any, cast

import typer

from advisor import __version__
from advisor.cli.help import CommandHelp, GroupHelp
from advisor.core.errors import AdvisorError

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What typer raises for any misuse of the command line; exported under no name of its own."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"advisor {__version__}")
        raise typer.Exit


def _advisor(
    ctx: typer.Context,
    _show: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Why a PyTorch training step is slow, what to change, and how much time each fix saves."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


COMMANDS = {
    "analyze": ("analyze", "command", "Say what is slow in a trace, and what to do."),
    "whatif": ("whatif", "command", "Replay a trace with your own edits applied."),
    "fit": ("fit", "command", "Check whether a program fits a GPU, and what makes it fit."),
    "project": ("project", "command", "Predict the step time and its cost on another GPU."),
    "compare": ("compare", "command", "Compare two runs: what became faster or slower."),
    "report": ("report", "command", "Write a report as one HTML file, or for other tools."),
    "export": ("export", "command", "Write a trace again, with the findings as extra tracks."),
    "dashboard": ("dashboard", "command", "Show traces and runs in the browser."),
    "record": ("record", "command", "Run a training program and record it."),
    "window": ("record", "window", "Profile the next steps of a run in progress."),
    "monitor": ("monitor", "command", "Watch the GPUs and the host live."),
    "try": ("try_", "command", "Try the fixes of a program, and measure each."),
    "lint": ("lint", "command", "Check a program's source for what often costs time."),
    "gate": ("gate", "command", "Fail CI when a run is slower than its baseline."),
    "ledger": ("ledger", "command", "Compare past predictions with what was measured."),
    "skill": ("agents", "skill", "Teach a coding agent to use advisor (SKILL.md)."),
    "mcp": ("agents", "mcp", "Serve tools to a coding agent (Model Context Protocol)."),
    "demo": ("demo", "command", "Show a report of a bundled recording, and what its fix brought."),
    "rules": ("rules", "app", ""),
    "workloads": ("workloads", "app", ""),
}
"""Subcommand: its module, what of it runs (``app``: commands of its own), its line in the help."""
RETIRED = {("analyze", "--operators"): ("--by", "operator")}
"""Subcommand and option of an earlier version -> what it is called now."""

ANALYSING = ("analyze", "compare", "export", "fit", "gate", "project", "report", "whatif")
"""Commands that read, say what they found, and end. No program of somebody else runs in them."""
GC_THRESHOLD = 100_000
"""New objects between two searches for cycles, not 700. What these commands make is freed by
its counts, or lasts until they end; searching took an eighth of the time of a small trace."""

ALLOCATOR = ("_RJEM_MALLOC_CONF", "dirty_decay_ms:50,muzzy_decay_ms:0")
"""Where the columns' allocator looks for what to do, and that is: give back soon what was freed. By
itself it keeps such pages for good, and a large file takes half as much memory more."""


def main() -> None:
    """Run the command line and leave the process with its exit code.

    0: done. 1: ``--fail-on`` hit. 2: bad input or usage, reported in one line on stderr. 130:
    interrupted. 141: the reader of a pipe went away, as for a program that SIGPIPE ends.
    """
    if sys.argv[1:2] and sys.argv[1] in ANALYSING:
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        os.environ.setdefault(*ALLOCATOR)  # read when polars is imported
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    command = arguments[0] if arguments else ""
    arguments = [now for each in arguments for now in RETIRED.get((command, each), (each,))]
    try:
        code = _command(command).main(args=arguments, prog_name="advisor", standalone_mode=False)
        sys.stdout.flush()
    except AdvisorError as error:
        code = _complain(_said(error, arguments), error.exit_code)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return code
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
def _command(name: str) -> Any:
    """The command line as far as it is needed: with this subcommand, else with all of them."""
    app = typer.Typer(
        name="advisor",
        cls=GroupHelp,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_advisor)
    for command in [name] if name in COMMANDS else COMMANDS:
        module, attribute, line = COMMANDS[command]
        home = import_module(f"advisor.cli.{module}")
        if attribute == "app":
            app.add_typer(home.app, name=command)
        else:
            settings = getattr(home, "SETTINGS", None) if attribute == "command" else None
            add = app.command(command, cls=CommandHelp, short_help=line, context_settings=settings)
            add(getattr(home, attribute))
    return typer.main.get_command(app)


def _said(error: AdvisorError, arguments: list[str]) -> str:
    """The message; with what there is to choose from printed before it."""
    result = sys.modules.get("advisor.read.runs")
    if result is None or not isinstance(error, result.SeveralRuns):
        return str(error)
    from advisor.cli.output import offer

    return offer(error, arguments)


def _usage(error: Exception) -> str:
    """The message of a usage error in one line, with the way to the help."""
    describe = getattr(error, "format_message", None)
    message = " ".join((describe() if describe is not None else str(error)).split())
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "advisor"
    end = message.rstrip(".")
    return f"{end}{'' if end.endswith('?') else '.'} See '{command} --help'."


def _complain(message: str, code: int) -> int:
    from advisor.core.labels import clean

    try:
        print(f"advisor: {clean(message)}", file=sys.stderr)
    except BrokenPipeError:
        return BROKEN_PIPE
    return code


def _forget_stdout() -> None:
    """Let the interpreter flush its buffer at exit without complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
