"""The help: subcommands and options under headings, those that are used most first."""

from __future__ import annotations

import re
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

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
