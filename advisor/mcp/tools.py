"""Server over standard input and output, and its tools: they check the path, keep analyses and
bound the answer."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError, ToolError, UnexpectedToolError
from mcp.types import INVALID_PARAMS, ToolAnnotations
from pydantic import Field, ValidationError

import advisor
from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError, describe_failure
from advisor.mcp import SKILL, programs
from advisor.mcp import answers as b
from advisor.mcp.answers import (
    Analysed,
    ChangeLine,
    Compared,
    EditLine,
    FindingFull,
    FindingLine,
    Gained,
    GpuStep,
    OperatorAnswer,
    OperatorLine,
    Projected,
    Ran,
    Recordings,
    ReplayAnswer,
    SplitStep,
    Tried,
)

if TYPE_CHECKING:
    from advisor.advise.engine import AnalysisResult
    from advisor.compare.comparison import FindingChange
    from advisor.core.finding import Finding, Impact
    from advisor.core.report_kernels import OperatorRate
    from advisor.core.rule import Evidence, Rule
    from advisor.core.trace import Run
    from advisor.mcp.answers import AllowedFolders
    from advisor.replay.project.project import Projection, TargetGpu
    from advisor.replay.project.splits import Split


MAX_KEPT_ANALYSES = 4
"""Number of analyses kept, the last ones, so that a question on a finding reads no trace."""
MAX_BYTES = 4_000_000_000
"""Largest uncompressed size of what is read for one call, bytes."""
MAX_EDITS, LONGEST_EDIT = 20, 500

_F = TypeVar("_F", bound=Callable[..., Any])
log = logging.getLogger("advisor.mcp")

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


def with_one_line_errors(tool: _F) -> _F:
    """Give a tool one-line errors and description for the client. Unexpected errors go to the log
    in full, and not to the client."""

    @functools.wraps(tool)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except AdvisorError as error:
            raise ToolError(b.bound_text(error)) from None
        except MemoryError:
            raise ToolError("out of memory: give one rank or a smaller trace") from None
        except Exception as error:
            log.exception("%s failed", tool.__name__)
            raise ToolError(f"{tool.__name__} failed ({type(error).__name__})") from None

    wrapped.__doc__ = " ".join((tool.__doc__ or "").split())  # as the client reads it
    return wrapped  # type: ignore[return-value]


class Tools:
    """Tools for one client. One analysis runs at a time: it uses all cores by itself."""

    def __init__(self, allowed: AllowedFolders) -> None:
        self.allowed = allowed
        self._kept = functools.lru_cache(MAX_KEPT_ANALYSES)(_examine)
        self._lock = Lock()

    def recordings(
        self,
        folder: Annotated[
            str, Field(max_length=4096, description="Below those allowed; empty: all of them.")
        ] = "",
        top: Annotated[int, Field(ge=1, le=b.MAX_RECORDINGS)] = 20,
    ) -> Recordings:
        """List what there is to analyse: recorded runs, folders of ranks, traces, memory snapshots,
        the newest first. from_trace.path is what the other tools take."""
        from advisor.mcp.recordings import list_recordings

        return list_recordings(self.allowed, folder, top)

    def analyze(
        self, path: Place, rank: Rank = None, top: Annotated[int, Field(ge=0, le=20)] = 10
    ) -> Analysed:
        """Say what is slow in a profiler trace, a folder of one run's traces, or a recorded run:
        the findings with the largest gain first, and what each fix saves per step."""
        report = self._examined(path, rank).report
        named = report.by_id()
        # without a step nothing is ranked: what a snapshot, counters or a log show are notes
        listed = report.notes if report.scope.has_no_step_time else report.findings
        shown, more = b.take_first(
            [(key, f) for key, f in named.items() if f in listed], max(0, min(top, b.MAX_FINDINGS))
        )
        risks = [(key, f) for key, f in named.items() if f in report.risks]
        scope = report.scope
        return Analysed(
            path=b.bound_name(path),
            status=report.status,
            step_ns=report.step_ns,
            steps=scope.steps_used,
            step_source=scope.step_source,
            gpu_busy_share=report.busy_share,
            joules_per_step=None if report.energy is None else report.energy.joules,
            findings=[_line(key, f) for key, f in shown],
            more_findings=more,
            risks=[_line(key, f) for key, f in b.take_first(risks, b.MAX_FINDINGS)[0]],
            not_checked=len(report.not_checked),
            untrusted=b.UNTRUSTED,
            from_trace={
                "gpu": None if scope.device_name is None else b.bound_name(scope.device_name),
                "verdict": b.bound_text(report.verdict),
                "limits": [b.bound_text(line) for line in report.limits[:10]],
            },
        )

    def finding(
        self,
        path: Place,
        id: Annotated[str, Field(max_length=100, description="As analyze has it.")],  # noqa: A002
        rank: Rank = None,
    ) -> FindingFull:
        """Return one finding in full: what was measured, where in the code, the fix, how to verify
        it, what would prove it wrong."""
        named = self._examined(path, rank).report.by_id()
        result = named.get(id)
        if result is None:
            have = ", ".join(list(named)[: b.MAX_FINDINGS]) or "none"
            raise AdvisorError(f"no finding {b.bound_name(id)!r} in this run; there are: {have}")
        return _full(id, result)

    def what_if(self, path: Place, edits: Edits, rank: Rank = None) -> ReplayAnswer:
        """Predict what a step would take with changes, by replaying its dependency graph."""
        from advisor.replay.edit_language import parse_edit
        from advisor.replay.result import what_if

        if not 0 < len(edits) <= MAX_EDITS:
            raise AdvisorError(f"give 1 to {MAX_EDITS} edits")
        if any(len(line) > LONGEST_EDIT for line in edits):
            raise AdvisorError(f"an edit has at most {LONGEST_EDIT} characters")
        parsed = [parse_edit(line) for line in edits]
        run = self._all_ranks(path, rank)
        with self._lock:
            result = what_if(run, parsed, rank)
        for line, row in zip(edits, result.edits, strict=True):
            if row.selected == 0:
                raise AdvisorError(f"edit {b.bound_name(line)!r} selects nothing in these steps")
        return ReplayAnswer(
            path=b.bound_name(path),
            measured_step_ns=result.measured_step_ns,
            step_then_ns=result.edited_step_ns,
            replay_error=result.replay.step_error,
            upper_bound=bool(result.reason),
            reason=b.bound_text(result.reason),
            edits=[
                EditLine(
                    edit=b.bound_name(line, LONGEST_EDIT),
                    events=row.selected,
                    saves_ns=row.gain_ns,
                    low_ns=row.low_ns,
                    high_ns=row.high_ns,
                    step_then_ns=row.step_then_ns,
                )
                for line, row in zip(edits, result.edits, strict=True)
            ],
            critical_path_ns={} if result.reason else dict(result.critical_path),
        )

    def compare(self, before: Place, after: Place, rank: Rank = None) -> Compared:
        """Tell whether a change made the step faster, with a confidence interval; which findings it
        fixed; and whether they gained what was predicted."""
        from advisor.compare import compare_examined

        sides = [self._examined(path, rank) for path in (before, after)]
        with self._lock:
            c = compare_examined(*sides)
        changes, more = b.take_first(c.findings, b.MAX_FINDINGS)
        steps, r = c.steps, c.realised
        before_ns, after_ns = steps.centers()
        return b.copy_fields(
            Compared,
            steps,
            before_ns=before_ns,
            after_ns=after_ns,
            gained=b.copy_fields(Gained, r),
            findings=[_change(item) for item in changes],
            more_findings=more,
            untrusted=b.UNTRUSTED,
            from_trace={
                "verdict": b.bound_text(c.verdict),
                "limits": [b.bound_text(line) for line in c.limits[:10]],
            },
        )

    def operators(
        self, path: Place, rank: Rank = None, top: Annotated[int, Field(ge=1, le=50)] = 15
    ) -> OperatorAnswer:
        """List the operators with most device time, by shape: rates reached, what bounds them, and
        what the rates that such a GPU attains would save."""
        report = self._examined(path, rank).report
        shown, more = b.take_first(report.rooflines, max(0, min(top, 50)))
        device = report.scope.device_name
        return OperatorAnswer(
            path=b.bound_name(path),
            operators=[_operator(item) for item in shown],
            more_operators=more,
            untrusted=b.UNTRUSTED,
            from_trace={"gpu": None if device is None else b.bound_name(device)},
        )

    def project(
        self,
        path: Place,
        gpus: Annotated[
            list[Annotated[int, Field(ge=1, le=65_536)]],
            Field(max_length=b.MAX_PROJECTED, description="Numbers of GPUs as recorded."),
        ] = [],  # noqa: B006
        gpu: Annotated[
            list[Annotated[str, Field(max_length=100)]],
            Field(max_length=b.MAX_PROJECTED, description="Other GPUs, such as 'h200'."),
        ] = [],  # noqa: B006
        rank: Rank = None,
        recorded_gpu: Annotated[
            str, Field(max_length=100, description="The recorded GPU, if unknown.")
        ] = "",
        recorded_mesh: Annotated[
            str, Field(max_length=100, description="The recorded mesh, as 'dp=8,tp=2', if unknown.")
        ] = "",
        node_size: Annotated[int | None, Field(ge=1, le=65_536, description="GPUs of a node.")] = (
            None
        ),
        node_bandwidth: Annotated[
            float | None, Field(gt=0, le=1e6, description="GB/s of a GPU to other nodes.")
        ] = None,
    ) -> Projected:
        """Predict the step on another GPU (gpu), or with more or fewer GPUs (gpus), for each split
        of the job; of many ranks for the one with most work."""
        from advisor.advise.one_run import open_first_windows
        from advisor.core.gpus import find_gpu
        from advisor.measure.comm.links import NodeLinks
        from advisor.read import ReadOptions
        from advisor.replay.project.mesh import MeshProjector, parse_mesh
        from advisor.replay.project.project import Projector, choose_gpus
        from advisor.replay.project.splits import (
            SAME_BATCH,
            compare_splits,
            find_pacing_rank,
            read_rank,
        )

        if bool(gpus) == bool(gpu):
            raise AdvisorError("give gpus (numbers of the recorded GPU) or gpu (names of others)")
        matches = {name: find_gpu(name) for name in gpu}
        notes = [note for name, match in matches.items() if (note := match.note(name))]
        targets = {match.gpu.name: match.gpu for match in matches.values()}
        named = find_gpu(recorded_gpu).gpu.name if recorded_gpu else None
        mesh = parse_mesh(recorded_mesh) if recorded_mesh else None
        read = ReadOptions(max_bytes=MAX_BYTES, urls=False, recorded_gpu=named)
        choices: tuple[TargetGpu, ...] = ()
        splits: list[Split] = []
        with self._lock:
            run = open_first_windows(self.allowed.path(path), read, rank)
            pace = find_pacing_rank(run, rank)
            a = read_rank(run, pace.slowest, None)
            if gpus:
                projector = MeshProjector(a, mesh, NodeLinks(node_size, node_bandwidth))
                splits = compare_splits(projector, dict.fromkeys(gpus), None)
                notes.append(SAME_BATCH)
            else:
                choices = choose_gpus(Projector(a), [(each, None) for each in targets.values()])
        shown, more = b.take_first(splits, b.MAX_SPLITS)
        return Projected(
            path=b.bound_name(path),
            rank=None if pace.slowest < 0 else pace.slowest,
            measured_step_ns=a.step_ns,
            gpus=[_gpu_step(choice.projection) for choice in choices],
            splits=[
                b.copy_fields(SplitStep, row, refused=b.bound_text(row.refused)) for row in shown
            ],
            more_splits=more,
            notes=[b.bound_text(note) for note in [*notes, *pace.notes]],
        )

    def _all_ranks(self, given: str, rank: int | None) -> Run:
        """Return the run with all ranks of its report: of many, the analysis holds the first."""
        from advisor.advise.one_run import open_first_windows
        from advisor.read import ReadOptions

        found = self._examined(given, rank)
        ranks = found.report.ranks
        if ranks is None or len(found.run.ranks) >= len(ranks.lines):
            return found.run
        read = ReadOptions(max_bytes=MAX_BYTES, urls=False)
        return open_first_windows(self.allowed.path(given), read)

    def _examined(self, given: str, rank: int | None) -> AnalysisResult:
        path = self.allowed.path(given)
        with self._lock:
            return self._kept(path, rank, _changed(path))


def _examine(path: Path, rank: int | None, _written: int) -> AnalysisResult:
    """Analyse what was last written at a time: kept for that time only."""
    from advisor.advise.engine import Options, examine
    from advisor.core.prices import NO_PRICES
    from advisor.read import ReadOptions

    read = ReadOptions(max_bytes=MAX_BYTES, urls=False)
    # no settings from a folder that a client may write to
    return examine(path, Options(rank=rank, read=read, config={}, prices=NO_PRICES))


def _changed(path: Path) -> int:
    """Return when a file or folder was last written, ns: a run recorded again is read again."""
    latest = path.stat().st_mtime_ns
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                try:
                    latest = max(latest, Path(folder, name).stat().st_mtime_ns)
                except OSError:
                    continue
    return latest


def _gpu_step(p: Projection) -> GpuStep:
    figures = dict.fromkeys(("step_ns", "low_ns", "high_ns", "speedup") if p.refused else ())
    return b.copy_fields(
        GpuStep,
        p,
        **figures,
        memory=p.fit.verdict,
        notes=[b.bound_text(note) for note in p.notes],
    )


def _place(finding: Finding) -> str:
    return b.bound_name(" · ".join(t.location_names(finding.where[0])) if finding.where else "")


def _line(key: str, f: Finding) -> FindingLine:
    impact = f.impact
    timed = impact is not None and impact.currency in ("step_time", "run_time")
    return b.copy_fields(
        FindingLine,
        f,
        id=key,
        currency=None if impact is None else impact.currency,
        **_gain(impact if timed else None),
        share_of_step=None if impact is None else impact.share,
        from_trace={"title": b.bound_name(f.title), "place": _place(f)},
    )


def _gain(impact: Impact | None) -> dict[str, int | None]:
    return {name: getattr(impact, name, None) for name in ("gain_ns", "low_ns", "high_ns")}


def _full(key: str, f: Finding) -> FindingFull:
    impact = f.impact
    return b.copy_fields(
        FindingFull,
        f,
        id=key,
        **_gain(impact),
        method="" if impact is None else impact.method,
        proven_on=f.validation,
        untrusted=b.UNTRUSTED,
        from_trace={
            "title": b.bound_name(f.title),
            "summary": b.bound_text(f.summary),
            "fix": b.bound_text(f.fix),
            "code": labels.shorten(labels.clean(f.code, lines=True), 2 * b.LONGEST_TEXT),
            "verify": b.bound_text(f.verify),
            "wrong_if": b.bound_text(f.falsified_by),
            "assumes": [b.bound_text(line) for line in f.assumptions[:5]],
            "evidence": [
                {"label": b.bound_name(t.evidence_label(e)), "value": _value(e), "limit": _limit(e)}
                for e in f.evidence[: b.MAX_EVIDENCE]
            ],
            "places": [
                b.bound_name(" · ".join(t.location_names(place)))
                for place in f.where[: b.MAX_PLACES]
            ],
            "edits": _edits(f),
        },
    )


def _value(e: Evidence) -> str:
    return b.bound_name(t.format_value(e.value, e.unit))


def _limit(e: Evidence) -> str | None:
    return None if e.threshold is None else b.bound_name(t.format_value(e.threshold, e.unit))


def _edits(f: Finding) -> list[str]:
    from advisor.replay.edit_language import write_edit

    lines = []
    for edit in f.edits[:MAX_EDITS]:
        try:
            line = write_edit(edit)
        except AdvisorError:
            return []
        if len(line) > LONGEST_EDIT or line != labels.clean(line):
            return []  # cut or cleaned it would say something else
        lines.append(line)
    return lines


def _change(item: FindingChange) -> ChangeLine:
    titles = {"title": b.bound_name(item.title), "place": b.bound_name(item.place)}
    return b.copy_fields(ChangeLine, item, from_trace=titles)


def _operator(item: OperatorRate) -> OperatorLine:
    return b.copy_fields(
        OperatorLine,
        item,
        calls_per_step=item.calls,
        ns_per_step=item.ns,
        share_of_kernel_time=item.share,
        could_save_ns=item.saved_ns,
        from_trace={
            "operator": None if item.name is None else b.bound_name(item.name),
            "shapes": None if item.shapes is None else b.bound_name(item.shapes),
            "dtype": None if item.dtype is None else b.bound_name(item.dtype),
            "kernel": b.bound_name(item.kernel),
        },
    )


INSTRUCTIONS = f"""Says why a GPU program's training step is slow, what to change and what the
change saves. recordings lists traces and run directories. Call analyze on one, finding for the fix
with its code and evidence, what_if to estimate a change of your own, compare to verify what you
changed, project for other GPUs. The resources advisor://rules explain the rules. Times are
nanoseconds per step. Null means not measured, never zero. A finding's gain has a range (low_ns to
high_ns). {b.UNTRUSTED}""".replace("\n", " ")


class _OneLine(logging.Formatter):
    """Formatter of errors as a line on stderr, with the place that raised them. The client decides
    their texts, so nothing of them reaches the terminal as it is."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({describe_failure(record.exc_info[1])})"
        return f"advisor mcp: {b.bound_text(text)}"


class _Server(MCPServer[Any]):
    """Server that answers wrong arguments, and requests for prompts, of which it has none, in one
    line."""

    async def call_tool(self, name: str, *given: Any, **named: Any) -> Any:
        try:
            return await super().call_tool(name, *given, **named)
        except ToolError as error:
            wrong = error.__cause__
            if isinstance(error, UnexpectedToolError) or not isinstance(wrong, ValidationError):
                raise
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong.errors()]
            raise ToolError(b.bound_text(f"{name}: {'; '.join(lines)}")) from wrong

    async def get_prompt(self, name: str, *_: Any, **__: Any) -> Any:
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {b.bound_name(name)}")


def serve(allowed: AllowedFolders, *, allow_run: bool) -> None:
    """Answer a client over standard input and output until it ends."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # before the SDK's own
    build(allowed, allow_run=allow_run).run("stdio")


def build(allowed: AllowedFolders, *, allow_run: bool = False) -> MCPServer[Any]:
    """Return a server whose tools read the allowed folders; ``allow_run``: and run programs."""
    server = _Server(
        "advisor", version=advisor.__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    tools = Tools(allowed)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False, idempotent_hint=True)

    for tool in (
        tools.recordings,
        tools.analyze,
        tools.finding,
        tools.what_if,
        tools.compare,
        tools.operators,
        tools.project,
    ):
        server.tool(annotations=reads)(with_one_line_errors(tool))
    _add_resources(server)
    if allow_run:
        _add_running(server, allowed)
    return server


def _add_resources(server: MCPServer[Any]) -> None:
    """Add what a client reads without a call: the rules, and how to use advisor."""

    @functools.cache
    def rules() -> dict[str, Rule]:
        from advisor.advise.rule_loading import load_rules

        return {rule.id: rule for rule in load_rules(None, config={})}

    @server.resource("advisor://rules", description="All rules: id and title, a line each.")
    def rule_list() -> str:
        return "\n".join(f"{name}: {rule.title}" for name, rule in sorted(rules().items()))

    @server.resource(
        "advisor://rules/{id}", description="What a rule looks for, its thresholds and its fix."
    )
    def rule_page(id: str) -> str:  # noqa: A002
        from advisor.render.document import RenderOptions
        from advisor.render.documents.rule import build
        from advisor.render.formats.terminal import Terminal

        if id not in rules():
            raise ResourceNotFoundError(f"no rule {b.bound_name(id)!r}; advisor://rules lists them")
        return Terminal().render(build(rules()[id]), RenderOptions(width=80, details=True))

    @server.resource(
        "advisor://guide", description="How to use advisor.", mime_type="text/markdown"
    )
    def guide() -> str:
        return SKILL.read_text(encoding="utf-8")


def _add_running(server: MCPServer[Any], allowed: AllowedFolders) -> None:
    """Add the tools that run programs."""

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))
    @with_one_line_errors
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
    @with_one_line_errors
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
