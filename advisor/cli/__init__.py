"""The command line: one file a subcommand, each importing what it needs only when it runs. The help
has subcommands and options under headings, those that are used most first.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from advisor import __version__
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
    except PermissionError as error:
        place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return _complain(f"{place}{error.strerror or 'Permission denied'}", BAD_INPUT)
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


GROUPS: Final = {
    "Analyze": ("analyze", "dashboard", "compare", "report", "whatif", "fit", "project", "export"),
    "Record": ("record", "try", "window", "monitor", "lint"),
    "Teams, CI and agents": ("gate", "ledger", "mcp", "skill"),
    "Learn": ("demo", "rules", "workloads"),
}
"""The headings of the help of ``advisor``, with their subcommands."""

HARDWARE: Final = {
    "GPU and network": ("--gpu", "--node-size", "--network"),
    "Cost": ("--price", "--prices", "--gpus"),
}
READ: Final = ("--steps", "--rank", "--window", "--max-size")
OPTIONS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "analyze": {
        "Output": ("--output", "--format", "--csv", "--redact"),
        "What to show": ("--details", "--brief", "--top", "--by", "--rules"),
        "Input": (*READ, "--memory", "--kernels", "--compile-log", "--capture"),
        "CI and terminal": ("--fail-on", "--progress"),
        "Ranks and workers": ("--ranks", "--workers", "--cluster"),
        **HARDWARE,
    },
    "report": {
        "Output": ("--html", "--output", "--format", "--redact", "--progress"),
        "What to show": ("--details", "--brief"),
        "Input": READ,
        **HARDWARE,
    },
    "compare": {
        "Output": ("--output", "--format", "--redact", "--progress"),
        "CI": ("--fail-if-slower",),
        "Input": READ,
        **HARDWARE,
    },
    "gate": {
        "Baseline and bounds": ("--save", "--max-slower", "--max-memory", "--strict"),
        "Output": ("--output", "--format", "--progress"),
        "Input": READ,
        **HARDWARE,
    },
    "whatif": {
        "What to change": ("--edit", "--precision", "--mesh", "--same-batch", "--micro-batches"),
        "Output": ("--output", "--format"),
        "Input": (*READ, "--from-mesh"),
        **HARDWARE,
    },
    "project": {
        "Where to": ("--gpu", "--all", "--gpus", "--nodes", "--instance", "--same-host"),
        "Cost": ("--prices", "--epoch-steps", "--epoch-samples"),
        "Output": ("--output", "--format"),
        "Input": (*READ, "--from", "--from-mesh", "--node-size", "--network"),
    },
    "fit": {
        "Where to": ("--gpu", "--capacity", "--batch", "--batch-now", "--ranks"),
        "Output": ("--output", "--format"),
        "Input": ("--memory", *READ),
    },
    "export": {
        "Output": ("--perfetto", "--tracks", "--redact", "--progress"),
        "Input": READ,
    },
    "dashboard": {
        "Server": ("--port", "--host", "--browser", "--live"),
        "Access": ("--token-file", "--no-token"),
        "Links": ("--editor", "--perfetto-url"),
        "Input": (*READ, "--memory", "--rules"),
        **HARDWARE,
    },
    "record": {
        "Output": ("--output", "--report"),
        "When to profile": ("--skip", "--warmup", "--active", "--ranks", "--signal"),
        "What to record": ("--deep", "--scalene", "--scalene-steps"),
        "A running inference server": ("--attach", "--seconds", "--engine"),
    },
    "try": {
        "What to try": ("--only", "--dry-run", "--budget", "--steps", "--warmup", "--allow-write"),
        "Output": ("--output", "--format", "--out", "--remember", "--progress"),
    },
}
"""Subcommand: the headings of its options, in order."""
OTHER: Final = "Other"
_AT_LEAST = re.compile(r"  \[x>=[\d.]+\]$|; x>=[\d.]+(?=\]$)")
"""What typer says of a number without an upper end: that it is not negative goes without saying."""


class CommandHelp(TyperCommand):
    """A subcommand whose help has its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and each heading with its options."""
        arguments: list[tuple[str, str]] = []
        options: dict[str, tuple[str, str]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "argument":
                arguments.append(record)
            elif record is not None:
                line = (record[0], _AT_LEAST.sub("", record[1]))
                options.update(dict.fromkeys(parameter.opts, line))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        headings = OPTIONS.get(str(self.name), {})
        under: list[tuple[str, list[tuple[str, str] | None]]] = [
            (heading, [options.get(name) for name in names]) for heading, names in headings.items()
        ]
        listed = {line for _, lines in under for line in lines}
        rest = list(dict.fromkeys(line for line in options.values() if line not in listed))
        under.append((OTHER if under else "Options", [*rest]))
        for heading, lines in under:
            if shown := [line for line in lines if line is not None]:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        if self.name == "analyze":
            from advisor.read.registry import list_formats

            with formatter.section("Formats"):
                formatter.write("".join(f"  {each}\n" for each in list_formats()))


class GroupHelp(TyperGroup):
    """The subcommands under headings, where all are there."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its subcommands."""
        if set(self.commands) != {name for names in GROUPS.values() for name in names}:
            super().format_commands(ctx, formatter)
            return
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(width)) for name in names],
                    col_max=12,
                )
