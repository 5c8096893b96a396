"""Entry point of the command line and its help. Each subcommand has its own file, which is imported
only when it runs."""

import gc
import os
import re
import shlex
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from advisor import __version__
from advisor.core.errors import AdvisorError

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
DOCS = "docs/index.md of a checkout of the project"

_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Exception that typer raises for any misuse of the command line; it exports it under no name."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"advisor {__version__}")
        raise typer.Exit


def _advisor(
    ctx: typer.Context,
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Why a PyTorch training step is slow, what to change, and how much time each fix saves.

    \b
    Start:
      advisor demo                    the report of a bundled recording
      advisor analyze trace.json.gz   what is slow, and what to change
      advisor record train.py         record a run; then: advisor analyze runs/
    """
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
"""Subcommands: module, attribute to run (``app``: a group with its own commands), help line."""

ANALYSING = ("analyze", "compare", "export", "fit", "gate", "project", "report", "whatif")
"""Commands that read, say what they found, and end. They run no program of the user's."""
GC_THRESHOLD = 100_000
"""Number of new objects between two searches for cycles; Python's default is 700. Objects here are
freed by reference counts or last to the end. Searching took an eighth of a small trace's time."""

ALLOCATOR = ("_RJEM_MALLOC_CONF", "dirty_decay_ms:50,muzzy_decay_ms:0")
"""Environment variable of the columns' allocator, and its value: return freed pages soon. By
default it keeps such pages for good, and a large file takes half as much memory again."""


def main() -> None:
    """Run the command line and leave the process with its exit code.

    0: done. 1: ``--fail-on`` hit. 2: bad input or usage, reported in one line on stderr. 130:
    interrupted. 141: the reader of a pipe went away, as for a program that SIGPIPE ends."""
    if sys.argv[1:2] and sys.argv[1] in ANALYSING:
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        os.environ.setdefault(*ALLOCATOR)  # read when polars is imported
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    command = arguments[0] if arguments else ""
    arguments = [_renamed(command, each) for each in arguments]
    try:
        if command == "explain":
            rule = shlex.join(arguments[1:]) or "ID"
            raise AdvisorError(f"no command 'explain'; of a rule: advisor rules show {rule}")
        if command and command not in COMMANDS and Path(command).exists():
            raise AdvisorError(f"{command} is no command: advisor analyze {shlex.quote(command)}")
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


def _renamed(command: str, argument: str) -> str:
    """Return an argument with its option's name of today."""
    option, equals, value = argument.partition("=")
    return f"{FORMER.get(command, {}).get(option, option)}{equals}{value}"


@cache
def _command(name: str) -> Any:
    """Build the command line with this subcommand alone, or with all if none has this name."""
    app = typer.Typer(
        name="advisor",
        cls=GroupHelp,
        epilog=f"Docs: {DOCS}",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_advisor)
    for command in [name] if name in COMMANDS else COMMANDS:
        module, attribute, line = COMMANDS[command]
        home = import_module(f"advisor.cli.{module}")
        if attribute == "app":
            for each in home.app.registered_commands:
                each.cls = CommandHelp
            app.add_typer(home.app, name=command)
        else:
            settings = getattr(home, "SETTINGS", None) if attribute == "command" else None
            add = app.command(command, cls=CommandHelp, short_help=line, context_settings=settings)
            add(getattr(home, attribute))
    return typer.main.get_command(app)


def _said(error: AdvisorError, arguments: list[str]) -> str:
    """Return the message of an error; first print the runs to choose from, if there are several."""
    result = sys.modules.get("advisor.read.runs")
    if result is None or not isinstance(error, result.SeveralRuns):
        return str(error)
    from advisor.cli.output import offer_runs

    return offer_runs(error, arguments)


def _usage(error: Exception) -> str:
    """Return the message of a usage error in one line, with the command that shows the help."""
    names = getattr(error, "possibilities", None) or ()
    describe = getattr(error, "format_message", None)
    message = " ".join((describe() if describe is not None else str(error)).split())
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "advisor"
    missing = getattr(error, "param", None)
    if message.startswith("Missing argument") and missing is not None:
        name = missing.metavar.removeprefix("[--] ").split()[0]
        return f"no {name} is given: {command} {_arguments(context)} (see '{command} --help')"
    if "(Possible options" in message:  # of --details and --no-details the first
        near = [n for n in names if n.replace("--no-", "--") not in {*names} - {n}]
        message = f"{message.partition(' (')[0]}. Did you mean {' or '.join(near)}?"
    end = message.replace("is not a valid int range", "is no whole number").rstrip(".")
    return f"{end}{'' if end.endswith('?') else '.'} See '{command} --help'."


def _arguments(context: Any) -> str:
    """Return a command's arguments: what was typed, and the names of what is missing."""
    parts = []
    for each in context.command.params:
        if each.param_type_name == "argument":
            given = context.params.get(each.name)
            parts.append(shlex.quote(given) if isinstance(given, str) else _usage_of(each))
    return " ".join(parts)


def _usage_of(argument: Any) -> str:
    """Return an argument as a usage line has it: ``PATH``, ``PATH...`` or ``[PATH]...``."""
    name = str(argument.metavar)
    if " " in name:
        return name
    dots = "..." if argument.nargs == -1 else ""
    return f"{name}{dots}" if argument.required else f"[{name}]{dots}"


def _complain(message: str, code: int) -> int:
    from advisor.core.labels import clean

    try:
        print(f"advisor: {clean(message)}", file=sys.stderr)
    except BrokenPipeError:
        return BROKEN_PIPE
    return code


def _forget_stdout() -> None:
    """Redirect stdout to the null device, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


GROUPS: Final = {
    "Analyze": ("analyze", "dashboard", "compare", "report", "whatif", "fit", "project", "export"),
    "Record": ("record", "try", "window", "monitor", "lint"),
    "Teams, CI and agents": ("gate", "ledger", "mcp", "skill"),
    "Learn": ("demo", "rules", "workloads"),
}
"""Headings of the help of ``advisor``, with their subcommands."""

HEADINGS: Final = {
    "What to try": "--only --dry-run --budget --allow-write",
    "Baseline and bounds": "--save --max-slower --max-memory --strict",
    "What to change": "--edit --precision --mesh --same-batch --micro-batches",
    "Where to": "--gpu --capacity --all --gpus --nodes --instance --same-host --batch-size "
    "--recorded-batch-size",
    "Server": "--port --host --browser --live",
    "Access": "--token-file --no-token",
    "Links": "--editor --perfetto-url",
    "Output": "--perfetto --html --output --format --csv --tracks --redact --out --remember "
    "--report --progress",
    "What to show": "--details --brief --top --by --rules",
    "What to record": "--deep --scalene --scalene-steps",
    "A running inference server": "--attach --seconds --engine",
    "Steps, windows and ranks": "--steps --skip --warmup --active --window --signal --rank --ranks "
    "--recorded-mesh",
    "Input": "--max-size --memory-snapshot --kernel-profile --compile-log --capture",
    "CI": "--fail-on --fail-if-slower",
    "Workers": "--workers --cluster",
    "GPU and network": "--recorded-gpu --node-size --node-bandwidth",
    "Cost": "--price --prices --paid-gpus --epoch-steps --epoch-samples",
}
"""Headings of the options of all subcommands, in order."""
MAX_PLAIN = 6
"""Number of options up to which the help lists them without headings."""
_RECORDED: Final = {"--gpu": "--recorded-gpu"}
_PAID: Final = {"--gpus": "--paid-gpus"}
_NODES: Final = {"--network": "--node-bandwidth"}
_MESH: Final = {"--from-mesh": "--recorded-mesh"}
_SNAPSHOT: Final = {"--memory": "--memory-snapshot"}
FORMER: Final[dict[str, dict[str, str]]] = {
    **{name: {**_RECORDED, **_PAID} for name in ("report", "gate")},
    "dashboard": {**_RECORDED, **_PAID, **_SNAPSHOT},
    "compare": _PAID,
    "whatif": {**_RECORDED, **_NODES, **_MESH},
    "analyze": {
        **_RECORDED,
        **_PAID,
        **_NODES,
        **_SNAPSHOT,
        "--kernels": "--kernel-profile",
        "--operators": "--by=operator",
    },
    "project": {"--from": "--recorded-gpu", "--to": "--gpu", **_NODES, **_MESH},
    "fit": {
        **_SNAPSHOT,
        "--ranks": "--gpus",
        "--batch": "--batch-size",
        "--batch-now": "--recorded-batch-size",
    },
}
"""Options by subcommand that had another name in an earlier version, and their name now."""
OTHER: Final = "Other"
_AT_LEAST = re.compile(r"  \[x>=[\d.]+\]$|; x>=[\d.]+(?=\]$)")
"""Pattern of typer's note on a number without an upper end (``x>=0``), removed from the help."""


class CommandHelp(TyperCommand):
    """Subcommand whose help lists its options under headings."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line: options, then arguments."""
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage_of, arguments)]

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
        own = list(dict.fromkeys(options.values()))
        under = {"Options": own}
        if len(own) > MAX_PLAIN + 1:  # and --help
            headings = {heading: names.split() for heading, names in HEADINGS.items()}
            under = {
                heading: list(dict.fromkeys(options[name] for name in names if name in options))
                for heading, names in headings.items()
            }
            listed = [line for lines in under.values() for line in lines]
            under[OTHER] = [line for line in own if line not in listed]
        for heading, lines in under.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)
        if self.name == "analyze":
            from advisor.read.registry import list_formats

            with formatter.section("Formats"):
                formatter.write("".join(f"  {each}\n" for each in list_formats()))


class GroupHelp(TyperGroup):
    """Command group whose help lists subcommands under headings, if all of them are loaded."""

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
