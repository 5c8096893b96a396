"""Entry point of the command line and its help. Each subcommand has its own file, which is imported
only when it runs."""

import gc
import os
import re
import shlex
import shutil
import sys
import textwrap
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
"""Exception that typer raises for any misuse of the command line, but does not export."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"advisor {__version__}")
        raise typer.Exit


def _advisor(
    ctx: typer.Context,
    _show: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
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
    "try": ("try_", "command", "Try fixes for a program, and measure each."),
    "lint": ("lint", "command", "Check a program's source for common causes of slow steps."),
    "gate": ("gate", "command", "Fail CI when a run is slower than its baseline."),
    "ledger": ("ledger", "command", "Compare past predictions with measurements."),
    "skill": ("agents", "skill", "Teach a coding agent to use advisor (SKILL.md)."),
    "mcp": ("agents", "mcp", "Serve tools to a coding agent (Model Context Protocol)."),
    "demo": ("demo", "command", "Show a report of a bundled recording, and what its fix saved."),
    "rules": ("rules", "app", ""),
    "workloads": ("workloads", "app", ""),
}
"""Subcommands: module, attribute to run (``app`` is a group with its own commands), help line."""

ANALYZING = ("analyze", "compare", "export", "fit", "gate", "project", "report", "whatif")
"""Commands that read, report their result, and end. They do not run the user's programs."""
GC_THRESHOLD = 100_000
"""Number of new objects between two searches for cycles; Python's default is 700. Objects here are
freed by reference counts or live to the end. The searches took an eighth of a small trace's
time."""

ALLOCATOR_SETTING = ("_RJEM_MALLOC_CONF", "dirty_decay_ms:50,muzzy_decay_ms:0")
"""Environment variable of the columns' allocator, with a value that returns freed pages soon. By
default, it keeps freed pages forever, and a large file takes half as much memory again."""


COMPLETION_OPTIONS = ("--install-completion", "--show-completion")
NAMED_SHELL = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""Environment variable with which typer takes a shell's name instead of detecting the shell."""


def main() -> None:
    """Run the command line and leave the process with its exit code.

    0: success. 1: ``--fail-on`` applied. 2: bad input or usage, reported in one line on stderr.
    130: interrupted. 141: the reader of a pipe closed it, as for a program that SIGPIPE ends."""
    if sys.argv[1:2] and sys.argv[1] in ANALYZING:
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        os.environ.setdefault(*ALLOCATOR_SETTING)  # read when polars is imported
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    command = arguments[0] if arguments else ""
    arguments = [_translate_option(command, argument) for argument in arguments]
    try:
        if command == "explain":
            rule = shlex.join(arguments[1:]) or "ID"
            raise AdvisorError(f"no command 'explain'; for a rule: advisor rules show {rule}")
        if command and command not in COMMANDS and Path(command).exists():
            raise AdvisorError(
                f"{command} is not a command: advisor analyze {shlex.quote(command)}"
            )
        if command in COMPLETION_OPTIONS and len(arguments) == 2:
            os.environ[NAMED_SHELL] = "1"
        code = _build_command(command).main(
            args=arguments, prog_name="advisor", standalone_mode=False
        )
        sys.stdout.flush()
    except AdvisorError as error:
        code = _print_error(_read_message(error, arguments), error.exit_code)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return code
    except _UsageError as error:
        return _print_error(_describe_usage_error(error, command), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except PermissionError as error:
        file = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return _print_error(f"{file}{error.strerror or 'Permission denied'}", BAD_INPUT)
    except MemoryError:
        return _print_error("out of memory; analyse one rank or fewer steps at a time", BAD_INPUT)
    return code if isinstance(code, int) else 0


def _translate_option(command: str, argument: str) -> str:
    """Return an argument with the current name of its option."""
    option, equals, value = argument.partition("=")
    return f"{FORMER_NAMES.get(command, {}).get(option, option)}{equals}{value}"


@cache
def _build_command(name: str) -> Any:
    """Build the command line with this subcommand only, or with all if none has this name."""
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
        module_object = import_module(f"advisor.cli.{module}")
        if attribute == "app":
            for subcommand in module_object.app.registered_commands:
                subcommand.cls = CommandHelp
            app.add_typer(module_object.app, name=command)
        else:
            settings = getattr(module_object, "SETTINGS", None) if attribute == "command" else None
            add = app.command(command, cls=CommandHelp, short_help=line, context_settings=settings)
            add(getattr(module_object, attribute))
    return typer.main.get_command(app)


def _read_message(error: AdvisorError, arguments: list[str]) -> str:
    """Return an error's message. If there are several runs to choose from, first print them."""
    result = sys.modules.get("advisor.read.runs")
    if result is None or not isinstance(error, result.SeveralRuns):
        return str(error)
    from advisor.cli.output import offer_runs

    return offer_runs(error, arguments)


def _describe_usage_error(error: Exception, name: str) -> str:
    """Return the message of a usage error of a subcommand in one line, with the command that shows
    the help."""
    names = getattr(error, "possibilities", None) or ()
    describe = getattr(error, "format_message", None)
    message = " ".join((describe() if describe is not None else str(error)).split())
    context = getattr(error, "ctx", None)
    command = f"advisor {name}" if name in COMMANDS else "advisor"
    command = command if context is None else context.command_path
    parameter = getattr(error, "param", None)
    if message.startswith("Missing argument") and parameter is not None:
        name = parameter.metavar.removeprefix("[--] ").split()[0]
        return (
            f"no {name} is given: {command} {_describe_arguments(context)} (see '{command} --help')"
        )
    extra = re.fullmatch(r"Got unexpected extra argument\S* \((.*)\)", message)
    if extra is not None and context is not None:
        usage = " ".join(context.command.collect_usage_pieces(context)[1:])
        return f"too many arguments ({extra[1]}): {command} {usage} (see '{command} --help')"
    if message.startswith("Missing option") and parameter is not None:
        option = f"{parameter.opts[0]} {parameter.metavar or ''}".rstrip()
        return f"no {parameter.opts[0]} is given: add {option} (see '{command} --help')"
    if "(Possible options" in message:  # for --details and --no-details, only the first
        suggestions = [n for n in names if n.replace("--no-", "--") not in {*names} - {n}]
        message = f"{message.partition(' (')[0]}. Did you mean {' or '.join(suggestions)}?"
    sentence = message.replace("is not a valid int range", "must be an integer").rstrip(".")
    return f"{sentence}{'' if sentence.endswith('?') else '.'} See '{command} --help'."


def _describe_arguments(context: Any) -> str:
    """Return a command's arguments: the given values, and the names of the missing ones."""
    parts = []
    for parameter in context.command.params:
        if parameter.param_type_name == "argument":
            value = context.params.get(parameter.name)
            parts.append(shlex.quote(value) if isinstance(value, str) else _format_usage(parameter))
    return " ".join(parts)


def _format_usage(argument: Any) -> str:
    """Return an argument as in a usage line: ``PATH``, ``PATH...`` or ``[PATH]...``."""
    name = str(argument.metavar)
    if " " in name:
        return name
    dots = "..." if argument.nargs == -1 else ""
    return f"{name}{dots}" if argument.required else f"[{name}]{dots}"


def _wrap(message: str) -> str:
    """Wrap a message of more than two lines for a terminal. A program that reads it gets one line,
    as does a log."""
    width = max(40, shutil.get_terminal_size().columns)
    if not sys.stderr.isatty() or len(message) <= 2 * width:
        return message
    return textwrap.fill(message, width, break_long_words=False, break_on_hyphens=False)


def _print_error(message: str, code: int) -> int:
    from advisor.core.labels import clean

    try:
        print(_wrap(f"advisor: {clean(message)}"), file=sys.stderr)
    except BrokenPipeError:
        return BROKEN_PIPE
    return code


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


GROUPS: Final = {
    "Analyze": ("analyze", "dashboard", "compare", "report", "whatif", "fit", "project", "export"),
    "Record": ("record", "try", "window", "monitor", "lint"),
    "Teams, CI and agents": ("gate", "ledger", "mcp", "skill"),
    "Learn": ("demo", "rules", "workloads"),
}
"""Headings in the help of ``advisor``, with their subcommands."""

HEADINGS: Final = {
    "What to try": "--only --dry-run --budget --allow-write",
    "Baseline and bounds": "--save --max-slower --max-memory --strict",
    "What to change": "--edit --precision --mesh --same-batch --micro-batches",
    "Target GPU": "--gpu --capacity --all --gpus --nodes --instance --same-host --batch-size "
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
"""Headings for the options of all subcommands, in order."""
MAX_UNGROUPED = 6
"""Maximum number of options that the help lists without headings."""
_RECORDED: Final = {"--gpu": "--recorded-gpu"}
_PAID: Final = {"--gpus": "--paid-gpus"}
_NODES: Final = {"--network": "--node-bandwidth"}
_MESH: Final = {"--from-mesh": "--recorded-mesh"}
_SNAPSHOT: Final = {"--memory": "--memory-snapshot"}
_JSON: Final = {"--json": "--format=json"}
FORMER_NAMES: Final[dict[str, dict[str, str]]] = {
    "report": {**_RECORDED, **_PAID},
    "gate": {**_RECORDED, **_PAID, "--fail-if-slower": "--max-slower"},
    "dashboard": {**_RECORDED, **_PAID, **_SNAPSHOT},
    "compare": {**_PAID, "--max-slower": "--fail-if-slower"},
    "lint": _JSON,
    "monitor": _JSON,
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
"""Options by subcommand that had another name in an earlier version, or have another one in another
subcommand, with the name that is documented here."""
OTHER_HEADING: Final = "Other"
_MINIMUM_NOTE = re.compile(r"  \[x>=[\d.]+\]$|; x>=[\d.]+(?=\]$)")
"""Pattern of typer's note on a number with only a minimum (``x>=0``), removed from the help."""


class CommandHelp(TyperCommand):
    """Subcommand whose help lists its options under headings."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line: options, then arguments."""
        arguments = [
            parameter
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "argument"
        ]
        return ["[OPTIONS]", *map(_format_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and each heading with its options."""
        arguments: list[tuple[str, str]] = []
        options: dict[str, tuple[str, str]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "argument":
                arguments.append(record)
            elif record is not None:
                line = (record[0], _MINIMUM_NOTE.sub("", record[1]))
                options.update(dict.fromkeys(parameter.opts, line))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        all_lines = list(dict.fromkeys(options.values()))
        lines_by_heading = {"Options": all_lines}
        if len(all_lines) > MAX_UNGROUPED + 1:  # and --help
            headings = {heading: names.split() for heading, names in HEADINGS.items()}
            lines_by_heading = {
                heading: list(dict.fromkeys(options[name] for name in names if name in options))
                for heading, names in headings.items()
            }
            listed = [line for lines in lines_by_heading.values() for line in lines]
            lines_by_heading[OTHER_HEADING] = [line for line in all_lines if line not in listed]
        for heading, lines in lines_by_heading.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)
        if self.name == "analyze":
            from advisor.read.registry import list_formats

            with formatter.section("Formats"):
                formatter.write("".join(f"  {line}\n" for line in list_formats()))


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
