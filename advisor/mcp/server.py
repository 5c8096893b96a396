"""The server: the tools with their types, over standard input and output."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import INVALID_PARAMS, ToolAnnotations
from pydantic import Field

import advisor
from advisor.core.errors import AdvisorError, describe_failure
from advisor.mcp import bounds as b
from advisor.mcp import running
from advisor.mcp.answers import (
    Analysed,
    Compared,
    FindingFull,
    OperatorAnswer,
    Ran,
    ReplayAnswer,
    Tried,
)
from advisor.mcp.bounds import Allowed
from advisor.mcp.tools import LONGEST_EDIT, MAX_EDITS, Tools

_F = TypeVar("_F", bound=Callable[..., Any])

log = logging.getLogger("advisor.mcp")

INSTRUCTIONS = f"""Says why a GPU program's training step is slow, what to change and what the
change saves. Call analyze on a trace or a run directory, finding for the fix with its code and
evidence, what_if to estimate a change of your own, compare to verify what you changed. Times are
nanoseconds per step. Null means not measured, never zero. A finding's gain has a band (low_ns to
high_ns). {b.UNTRUSTED}""".replace("\n", " ")

Place = Annotated[str, Field(max_length=4096, description="File or folder, below those allowed.")]
Rank = Annotated[int | None, Field(ge=0, le=1_000_000, description="Rank; null: the first.")]
Edits = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_EDIT)]],
    Field(
        min_length=1,
        max_length=MAX_EDITS,
        description="VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER], such as 'scale "
        "kernel:softmax 0.2', 'remove sync:item', 'overlap comm', 'parallelize loader 4'. They "
        "add up. A finding's from_trace.edits are such lines.",
    ),
]


class _OneLine(logging.Formatter):
    """Errors in a line on stderr, with the place that raised them; the client decides their texts,
    so nothing of them reaches the terminal as it is."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({describe_failure(record.exc_info[1])})"
        return f"advisor mcp: {b.said(text)}"


class _Server(MCPServer[Any]):
    """There are no prompts: whoever asks for one is answered in a line."""

    async def get_prompt(self, name: str, *_: Any, **__: Any) -> Any:
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {b.name(name)}")


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

    @server.tool(annotations=reads)
    @_one_line
    def analyze(
        path: Place, rank: Rank = None, top: Annotated[int, Field(ge=0, le=20)] = 10
    ) -> Analysed:
        """What is slow in a profiler trace, a folder of one run's traces, or a recorded run: the
        findings with the largest gain first, and what each fix saves per step."""
        return tools.analyze(path, rank, top)

    @server.tool(annotations=reads)
    @_one_line
    def finding(
        path: Place,
        id: Annotated[str, Field(max_length=100, description="As analyze has it.")],  # noqa: A002
        rank: Rank = None,
    ) -> FindingFull:
        """One finding in full: what was measured, where in the code, the fix, how to verify it,
        what would prove it wrong."""
        return tools.finding(path, id, rank)

    @server.tool(annotations=reads)
    @_one_line
    def what_if(path: Place, edits: Edits, rank: Rank = None) -> ReplayAnswer:
        """What a step would take with changes, by replaying its dependency graph."""
        return tools.what_if(path, list(edits), rank)

    @server.tool(annotations=reads)
    @_one_line
    def compare(before: Place, after: Place, rank: Rank = None) -> Compared:
        """Whether a change made the step faster, with a confidence interval; which findings it
        fixed; and whether they gained what was predicted."""
        return tools.compare(before, after, rank)

    @server.tool(annotations=reads)
    @_one_line
    def operators(
        path: Place, rank: Rank = None, top: Annotated[int, Field(ge=1, le=50)] = 15
    ) -> OperatorAnswer:
        """The operators with most device time, by shape: rates reached, what bounds them, what the
        rates that such a GPU attains would save."""
        return tools.operators(path, rank, top)

    if allow_run:
        _add_running(server, allowed)
    return server


def _add_running(server: MCPServer[Any], allowed: Allowed) -> None:
    """The tools that run programs."""

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))
    @_one_line
    def record(
        script: Place,
        out: Place,
        arguments: Annotated[list[str], Field(max_length=running.MAX_ARGUMENTS)] = [],  # noqa: B006
        timeout_s: Annotated[float, Field(ge=1, le=running.MAX_SECONDS)] = 600,
    ) -> Ran:
        """Run a Python training script in its folder and record it into a new run directory,
        for analyze and compare. The script runs with the user's rights."""
        return running.record(allowed, script, list(arguments), out, timeout_s)

    @server.tool(
        name="try", annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True)
    )
    @_one_line
    def try_knobs(
        script: Place,
        out: Place,
        arguments: Annotated[list[str], Field(max_length=running.MAX_ARGUMENTS)] = [],  # noqa: B006
        only: Annotated[
            list[Annotated[str, Field(max_length=running.LONGEST_KNOB)]],
            Field(
                max_length=running.MAX_KNOBS,
                description="Knobs, such as 'workers' or 'workers=2'; none: those that the "
                "findings name.",
            ),
        ] = [],  # noqa: B006
        budget_s: Annotated[float, Field(ge=running.MIN_BUDGET, le=running.MAX_SECONDS)] = 300,
    ) -> Tried:
        """Run a Python training script again and again for some steps, as it is and with each
        fix that needs no edit (loader workers, precision, compiling, ...), and measure what
        each brings, with a check of the losses. What the script writes goes to a scratch
        folder; else it runs with the user's rights."""
        return running.try_knobs(allowed, script, list(arguments), out, list(only), budget_s)


def _one_line(tool: _F) -> _F:
    """Errors as one line for the client; what nobody foresaw goes to the log, not to the client."""

    @functools.wraps(tool)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except AdvisorError as error:
            raise ToolError(b.said(error)) from None
        except MemoryError:
            raise ToolError("out of memory: give one rank or a smaller trace") from None
        except Exception as error:
            log.exception("%s failed", tool.__name__)
            raise ToolError(f"{tool.__name__} failed ({type(error).__name__})") from None

    return wrapped  # type: ignore[return-value]
