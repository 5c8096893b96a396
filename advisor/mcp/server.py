"""The server: the tools with their types, over standard input and output."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from mcp import MCPError
from mcp.server import MCPServer
from mcp.types import INVALID_PARAMS, ToolAnnotations
from pydantic import Field

import advisor
from advisor.core.errors import describe_failure
from advisor.mcp import bounds as b
from advisor.mcp import programs
from advisor.mcp.answers import Ran, Tried
from advisor.mcp.bounds import Allowed
from advisor.mcp.tools import Place, Tools, one_line

INSTRUCTIONS = f"""Says why a GPU program's training step is slow, what to change and what the
change saves. Call analyze on a trace or a run directory, finding for the fix with its code and
evidence, what_if to estimate a change of your own, compare to verify what you changed. Times are
nanoseconds per step. Null means not measured, never zero. A finding's gain has a band (low_ns to
high_ns). {b.UNTRUSTED}""".replace("\n", " ")


class _OneLine(logging.Formatter):
    """Errors in a line on stderr, with the place that raised them; the client decides their texts,
    so nothing of them reaches the terminal as it is."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({describe_failure(record.exc_info[1])})"
        return f"advisor mcp: {b.bound_text(text)}"


class _Server(MCPServer[Any]):
    """There are no prompts: whoever asks for one is answered in a line."""

    async def get_prompt(self, name: str, *_: Any, **__: Any) -> Any:
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {b.bound_name(name)}")


def serve(allowed: Allowed, *, allow_run: bool) -> None:
    """Answer a client over standard input and output until it ends."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # before the SDK's own
    build(allowed, allow_run=allow_run).run("stdio")


def build(allowed: Allowed, *, allow_run: bool = False) -> MCPServer[Any]:
    """A server whose tools read below the allowed folders; ``allow_run``: and run programs."""
    server = _Server(
        "advisor",
        version=advisor.__version__,
        instructions=INSTRUCTIONS,
        log_level="WARNING",
    )
    tools = Tools(allowed)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False, idempotent_hint=True)

    for tool in (tools.analyze, tools.finding, tools.what_if, tools.compare, tools.operators):
        server.tool(annotations=reads)(one_line(tool))
    if allow_run:
        _add_running(server, allowed)
    return server


def _add_running(server: MCPServer[Any], allowed: Allowed) -> None:
    """The tools that run programs."""

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))
    @one_line
    def record(
        script: Place,
        out: Place,
        arguments: Annotated[list[str], Field(max_length=programs.MAX_ARGUMENTS)] = [],  # noqa: B006
        timeout_s: Annotated[float, Field(ge=1, le=programs.MAX_SECONDS)] = 600,
    ) -> Ran:
        """Run a Python training script in its folder and record it into a new run directory,
        for analyze and compare. The script runs with the user's rights."""
        return programs.record(allowed, script, list(arguments), out, timeout_s)

    @server.tool(
        name="try", annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True)
    )
    @one_line
    def try_knobs(
        script: Place,
        out: Place,
        arguments: Annotated[list[str], Field(max_length=programs.MAX_ARGUMENTS)] = [],  # noqa: B006
        only: Annotated[
            list[Annotated[str, Field(max_length=programs.LONGEST_KNOB)]],
            Field(
                max_length=programs.MAX_KNOBS,
                description="Knobs, such as 'workers' or 'workers=2'; none: those that the "
                "findings name.",
            ),
        ] = [],  # noqa: B006
        budget_s: Annotated[float, Field(ge=programs.MIN_BUDGET, le=programs.MAX_SECONDS)] = 300,
    ) -> Tried:
        """Run a Python training script again and again for some steps, as it is and with each
        fix that needs no edit (loader workers, precision, compiling, ...), and measure what
        each brings, with a check of the losses. What the script writes goes to a scratch
        folder; else it runs with the user's rights."""
        return programs.try_knobs(allowed, script, list(arguments), out, list(only), budget_s)
