"""Server over standard input and output, and its tools. The tools check paths, keep analyses and
limit the size of answers."""

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
from advisor.mcp import SKILL, answers, programs
from advisor.mcp.answers import (
    Analyzed,
    ChangeLine,
    ComparisonResult,
    EditLine,
    FindingFull,
    FindingLine,
    GpuStep,
    MeasuredSaving,
    OperatorAnswer,
    OperatorLine,
    ProgramResult,
    Projected,
    Recordings,
    ReplayAnswer,
    SplitStep,
    TrialsResult,
)

if TYPE_CHECKING:
    from advisor.advise.engine import AnalysisResult
    from advisor.compare.comparison import FindingChange
    from advisor.core.finding import Finding, Impact
    from advisor.core.report_kernels import OperatorRate
    from advisor.core.rule import Rule
    from advisor.core.trace import Run
    from advisor.mcp.answers import AllowedFolders
    from advisor.replay.project.project import Projection, TargetGpu
    from advisor.replay.project.splits import Split


MAX_KEPT_ANALYSES = 4
"""Number of recent analyses kept, so that a question about a finding reads no trace."""
_MAX_BYTES = 4_000_000_000
"""Maximum uncompressed size of the data that one call reads, in bytes."""
_MAX_EDITS, LONGEST_EDIT = 20, 500

_F = TypeVar("_F", bound=Callable[..., Any])
log = logging.getLogger("advisor.mcp")

Place = Annotated[str, Field(max_length=4096, description="File or folder, below those allowed.")]
Rank = Annotated[int | None, Field(ge=0, le=1_000_000, description="Rank; null: the first.")]
Edits = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_EDIT)]],
    Field(
        min_length=1,
        max_length=_MAX_EDITS,
        description="VERB TARGET[:PATTERN] [under:PATTERN] [rank:N] [NUMBER], such as 'scale "
        "kernel:softmax 0.2', 'remove sync:item', 'overlap comm', 'parallelize loader 4'. They "
        "add up. A finding's from_trace.edits are such lines.",
    ),
]


def with_one_line_errors(tool: _F) -> _F:
    """Give a tool one-line errors and a one-line description for the client. Unexpected errors go
    in full to the log, not to the client."""

    @functools.wraps(tool)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except AdvisorError as error:
            raise ToolError(answers.bound_text(error)) from None
        except MemoryError:
            raise ToolError("out of memory: give one rank or a smaller trace") from None
        except Exception as error:
            log.exception("%s failed", tool.__name__)
            raise ToolError(f"{tool.__name__} failed ({type(error).__name__})") from None

    wrapped.__doc__ = " ".join((tool.__doc__ or "").split())  # as the client reads it
    return wrapped  # type: ignore[return-value]


class Tools:
    """Tools for one client. One analysis runs at a time, because it uses all cores."""

    def __init__(self, allowed: AllowedFolders) -> None:
        self.allowed = allowed
        self._analyses = functools.lru_cache(MAX_KEPT_ANALYSES)(_examine)
        self._lock = Lock()

    def recordings(
        self,
        folder: Annotated[
            str, Field(max_length=4096, description="Below those allowed; empty: all of them.")
        ] = "",
        top: Annotated[int, Field(ge=1, le=answers.MAX_RECORDINGS)] = 20,
    ) -> Recordings:
        """List what can be analysed, newest first: recorded runs, folders of ranks, traces, memory
        snapshots. from_trace.path is the path to give to the other tools."""
        from advisor.mcp.recordings import list_recordings

        return list_recordings(self.allowed, folder, top)

    def analyze(
        self, path: Place, rank: Rank = None, top: Annotated[int, Field(ge=0, le=20)] = 10
    ) -> Analyzed:
        """Say what is slow in a profiler trace, a folder of one run's traces, or a recorded run:
        the findings with the largest gain first, and what each fix saves per step."""
        report = self._examine_path(path, rank).report
        findings_by_id = report.by_id()
        # without steps nothing is ranked: findings of a snapshot, counters or a log are notes
        listed = report.notes if report.scope.has_no_step_time else report.findings
        shown, remaining = answers.take_first(
            [(key, f) for key, f in findings_by_id.items() if f in listed],
            max(0, min(top, answers.MAX_FINDINGS)),
        )
        risks = [(key, f) for key, f in findings_by_id.items() if f in report.risks]
        scope = report.scope
        return Analyzed(
            path=answers.bound_name(path),
            status=report.status,
            step_ns=report.step_ns,
            steps=scope.steps_used,
            step_source=scope.step_source,
            gpu_busy_share=report.busy_share,
            joules_per_step=None if report.energy is None else report.energy.joules,
            findings=[_build_finding_line(key, f) for key, f in shown],
            more_findings=remaining,
            risks=[
                _build_finding_line(key, f)
                for key, f in answers.take_first(risks, answers.MAX_FINDINGS)[0]
            ],
            not_checked=len(report.not_checked),
            untrusted=answers.UNTRUSTED,
            from_trace={
                "gpu": None if scope.device_name is None else answers.bound_name(scope.device_name),
                "verdict": answers.bound_text(report.verdict),
                "limits": [answers.bound_text(line) for line in report.limits[:10]],
            },
        )

    def finding(
        self,
        path: Place,
        id: Annotated[str, Field(max_length=100, description="As analyze has it.")],  # noqa: A002
        rank: Rank = None,
    ) -> FindingFull:
        """Return one finding in full: the evidence, the place in the code, the fix, how to verify
        it, and what would prove it wrong."""
        findings_by_id = self._examine_path(path, rank).report.by_id()
        finding = findings_by_id.get(id)
        if finding is None:
            ids = ", ".join(list(findings_by_id)[: answers.MAX_FINDINGS]) or "none"
            raise AdvisorError(
                f"no finding {answers.bound_name(id)!r} in this run; there are: {ids}"
            )
        return _build_full_finding(id, finding)

    def what_if(self, path: Place, edits: Edits, rank: Rank = None) -> ReplayAnswer:
        """Predict how long a step would take with changes, by replaying its dependency graph."""
        from advisor.replay.edit_language import parse_edit
        from advisor.replay.what_if import what_if

        if not 0 < len(edits) <= _MAX_EDITS:
            raise AdvisorError(f"give 1 to {_MAX_EDITS} edits")
        if any(len(line) > LONGEST_EDIT for line in edits):
            raise AdvisorError(f"an edit has at most {LONGEST_EDIT} characters")
        parsed_edits = [parse_edit(line) for line in edits]
        run = self._all_ranks(path, rank)
        with self._lock:
            result = what_if(run, parsed_edits, rank)
        for line, row in zip(edits, result.edits, strict=True):
            if row.selected == 0:
                raise AdvisorError(
                    f"edit {answers.bound_name(line)!r} selects nothing in these steps"
                )
        return ReplayAnswer(
            path=answers.bound_name(path),
            measured_step_ns=result.measured_step_ns,
            step_then_ns=result.edited_step_ns,
            replay_error=result.replay.step_error,
            upper_bound=bool(result.reason),
            reason=answers.bound_text(result.reason),
            edits=[
                EditLine(
                    edit=answers.bound_name(line, LONGEST_EDIT),
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

    def compare(self, before: Place, after: Place, rank: Rank = None) -> ComparisonResult:
        """Report whether a change made the step faster, with a confidence interval. Also report
        which findings it fixed, and whether they gained what was predicted."""
        from advisor.compare import compare_examined

        sides = [self._examine_path(path, rank) for path in (before, after)]
        with self._lock:
            comparison = compare_examined(*sides)
        changes, remaining = answers.take_first(comparison.findings, answers.MAX_FINDINGS)
        steps, realised = comparison.steps, comparison.realised
        before_ns, after_ns = steps.centers()
        return answers.copy_fields(
            ComparisonResult,
            steps,
            before_ns=before_ns,
            after_ns=after_ns,
            gained=answers.copy_fields(MeasuredSaving, realised),
            findings=[_build_change_line(item) for item in changes],
            more_findings=remaining,
            untrusted=answers.UNTRUSTED,
            from_trace={
                "verdict": answers.bound_text(comparison.verdict),
                "limits": [answers.bound_text(line) for line in comparison.limits[:10]],
            },
        )

    def operators(
        self, path: Place, rank: Rank = None, top: Annotated[int, Field(ge=1, le=50)] = 15
    ) -> OperatorAnswer:
        """List the operators with the most device time, by shape: the rates they reach, their
        limit, and what they would save at the rates that this GPU model can attain."""
        report = self._examine_path(path, rank).report
        first_rooflines, remaining = answers.take_first(report.rooflines, max(0, min(top, 50)))
        device = report.scope.device_name
        return OperatorAnswer(
            path=answers.bound_name(path),
            operators=[_build_operator_line(item) for item in first_rooflines],
            more_operators=remaining,
            untrusted=answers.UNTRUSTED,
            from_trace={"gpu": None if device is None else answers.bound_name(device)},
        )

    def project(
        self,
        path: Place,
        gpus: Annotated[
            list[Annotated[int, Field(ge=1, le=65_536)]],
            Field(max_length=answers.MAX_PROJECTED, description="Numbers of the recorded GPU."),
        ] = [],  # noqa: B006
        gpu: Annotated[
            list[Annotated[str, Field(max_length=100)]],
            Field(max_length=answers.MAX_PROJECTED, description="Other GPUs, such as 'h200'."),
        ] = [],  # noqa: B006
        rank: Rank = None,
        recorded_gpu: Annotated[
            str, Field(max_length=100, description="The recorded GPU, if unknown.")
        ] = "",
        recorded_mesh: Annotated[
            str, Field(max_length=100, description="The recorded mesh if unknown, as 'dp=8,tp=2'.")
        ] = "",
        node_size: Annotated[int | None, Field(ge=1, le=65_536, description="GPUs per node.")] = (
            None
        ),
        node_bandwidth: Annotated[
            float | None, Field(gt=0, le=1e6, description="GB/s per GPU to other nodes.")
        ] = None,
    ) -> Projected:
        """Predict the step on another GPU (gpu), or with more or fewer GPUs (gpus) for each split
        of the job. With many ranks it is predicted for the rank with the most work."""
        from advisor.advise.unrelated_inputs import open_windows
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
        gpu_name = find_gpu(recorded_gpu).gpu.name if recorded_gpu else None
        mesh = parse_mesh(recorded_mesh) if recorded_mesh else None
        options = ReadOptions(max_bytes=_MAX_BYTES, urls=False, recorded_gpu=gpu_name)
        gpu_choices: tuple[TargetGpu, ...] = ()
        splits: list[Split] = []
        with self._lock:
            run = open_windows(self.allowed.path(path), options, rank)
            pacing = find_pacing_rank(run, rank)
            a = read_rank(run, pacing.slowest, None)
            if gpus:
                projector = MeshProjector(a, mesh, NodeLinks(node_size, node_bandwidth))
                splits = compare_splits(projector, dict.fromkeys(gpus), None)
                notes.append(SAME_BATCH)
            else:
                gpu_choices = choose_gpus(
                    Projector(a), [(target, None) for target in targets.values()]
                )
        first_splits, remaining = answers.take_first(splits, answers.MAX_SPLITS)
        return Projected(
            path=answers.bound_name(path),
            rank=None if pacing.slowest < 0 else pacing.slowest,
            measured_step_ns=a.step_ns,
            gpus=[_build_gpu_step(choice.projection) for choice in gpu_choices],
            splits=[
                answers.copy_fields(SplitStep, row, refused=answers.bound_text(row.refused))
                for row in first_splits
            ],
            more_splits=remaining,
            notes=[answers.bound_text(note) for note in [*notes, *pacing.notes]],
        )

    def _all_ranks(self, requested: str, rank: int | None) -> Run:
        """Return the run with all ranks of its report. An analysis holds only the first of many."""
        from advisor.advise.unrelated_inputs import open_windows
        from advisor.read import ReadOptions

        analysis = self._examine_path(requested, rank)
        ranks = analysis.report.ranks
        if ranks is None or len(analysis.run.ranks) >= len(ranks.lines):
            return analysis.run
        options = ReadOptions(max_bytes=_MAX_BYTES, urls=False)
        return open_windows(self.allowed.path(requested), options)

    def _examine_path(self, requested: str, rank: int | None) -> AnalysisResult:
        path = self.allowed.path(requested)
        with self._lock:
            return self._analyses(path, rank, _last_write_ns(path))


def _examine(path: Path, rank: int | None, _written_ns: int) -> AnalysisResult:
    """Analyse a path. The time of its last write is a part of the cache key."""
    from advisor.advise.engine import Options, analyze_in_full
    from advisor.core.prices import NO_PRICES
    from advisor.read import ReadOptions

    options = ReadOptions(max_bytes=_MAX_BYTES, urls=False)
    # no settings from a folder that a client may write to
    return analyze_in_full(path, Options(rank=rank, read=options, config={}, prices=NO_PRICES))


def _last_write_ns(path: Path) -> int:
    """Return the time of the last write below a path, in ns, so that new recordings are read."""
    latest = path.stat().st_mtime_ns
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                try:
                    latest = max(latest, Path(folder, name).stat().st_mtime_ns)
                except OSError:
                    continue
    return latest


def _build_gpu_step(projection: Projection) -> GpuStep:
    figures = dict.fromkeys(
        ("step_ns", "low_ns", "high_ns", "speedup") if projection.refused else ()
    )
    return answers.copy_fields(
        GpuStep,
        projection,
        **figures,
        memory=projection.fit.verdict,
        notes=[answers.bound_text(note) for note in projection.notes],
    )


def _build_finding_line(key: str, f: Finding) -> FindingLine:
    impact = f.impact
    timed = impact is not None and impact.currency in ("step_time", "run_time")
    return answers.copy_fields(
        FindingLine,
        f,
        id=key,
        currency=None if impact is None else impact.currency,
        **_gain_fields(impact if timed else None),
        share_of_step=None if impact is None else impact.share,
        from_trace={
            "title": answers.bound_name(f.title),
            "place": answers.bound_name(
                " · ".join(t.location_names(f.where[0])) if f.where else ""
            ),
        },
    )


def _gain_fields(impact: Impact | None) -> dict[str, int | None]:
    return {name: getattr(impact, name, None) for name in ("gain_ns", "low_ns", "high_ns")}


def _build_full_finding(key: str, f: Finding) -> FindingFull:
    impact = f.impact
    return answers.copy_fields(
        FindingFull,
        f,
        id=key,
        **_gain_fields(impact),
        method="" if impact is None else impact.method,
        proven_on=f.validation,
        untrusted=answers.UNTRUSTED,
        from_trace={
            "title": answers.bound_name(f.title),
            "summary": answers.bound_text(f.summary),
            "fix": answers.bound_text(f.fix),
            "code": labels.shorten(labels.clean(f.code, lines=True), 2 * answers.LONGEST_TEXT),
            "verify": answers.bound_text(f.verify),
            "falsified_by": answers.bound_text(f.falsified_by),
            "assumes": [answers.bound_text(line) for line in f.assumptions[:5]],
            "evidence": [
                {
                    "label": answers.bound_name(t.evidence_label(e)),
                    "value": answers.bound_name(t.format_value(e.value, e.unit)),
                    "limit": (
                        None
                        if e.threshold is None
                        else answers.bound_name(t.format_value(e.threshold, e.unit))
                    ),
                }
                for e in f.evidence[: answers.MAX_EVIDENCE]
            ],
            "places": [
                answers.bound_name(" · ".join(t.location_names(place)))
                for place in f.where[: answers.MAX_PLACES]
            ],
            "edits": _write_edits(f),
        },
    )


def _write_edits(f: Finding) -> list[str]:
    from advisor.replay.edit_language import write_edit

    lines = []
    for edit in f.edits[:_MAX_EDITS]:
        try:
            line = write_edit(edit)
        except AdvisorError:
            return []
        if len(line) > LONGEST_EDIT or line != labels.clean(line):
            return []  # cutting or cleaning it would change its meaning
        lines.append(line)
    return lines


def _build_change_line(item: FindingChange) -> ChangeLine:
    titles = {"title": answers.bound_name(item.title), "place": answers.bound_name(item.place)}
    return answers.copy_fields(ChangeLine, item, from_trace=titles)


def _build_operator_line(item: OperatorRate) -> OperatorLine:
    return answers.copy_fields(
        OperatorLine,
        item,
        calls_per_step=item.calls,
        ns_per_step=item.ns,
        share_of_kernel_time=item.share,
        could_save_ns=item.saved_ns,
        from_trace={
            "operator": None if item.name is None else answers.bound_name(item.name),
            "shapes": None if item.shapes is None else answers.bound_name(item.shapes),
            "dtype": None if item.dtype is None else answers.bound_name(item.dtype),
            "kernel": answers.bound_name(item.kernel),
        },
    )


INSTRUCTIONS = f"""Reports why a GPU program's training step is slow, what to change and what the
change saves. recordings lists traces and run directories. Call analyze on one, finding for the fix
with its code and evidence, what_if to estimate a change of your own, compare to verify what you
changed, project for other GPUs. The resources advisor://rules explain the rules. Times are
nanoseconds per step. Null means not measured, never zero. A finding's gain has a range (low_ns to
high_ns). {answers.UNTRUSTED}""".replace("\n", " ")


class _OneLineFormatter(logging.Formatter):
    """Formatter that writes errors as one line on stderr, with the place that raised them. Clients
    control the texts, so they are cleaned before they reach the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({describe_failure(record.exc_info[1])})"
        return f"advisor mcp: {answers.bound_text(text)}"


class _Server(MCPServer[Any]):
    """Server that answers wrong arguments in one line, and refuses requests for prompts, because
    it has none."""

    async def call_tool(self, name: str, *given: Any, **named: Any) -> Any:
        try:
            return await super().call_tool(name, *given, **named)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(error, UnexpectedToolError) or not isinstance(cause, ValidationError):
                raise
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in cause.errors()]
            raise ToolError(answers.bound_text(f"{name}: {'; '.join(lines)}")) from cause

    async def get_prompt(self, name: str, *_: Any, **__: Any) -> Any:
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {answers.bound_name(name)}")


def serve(allowed: AllowedFolders, *, allow_run: bool) -> None:
    """Answer a client over standard input and output until it ends."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # before the SDK configures it
    build(allowed, allow_run=allow_run).run("stdio")


def build(allowed: AllowedFolders, *, allow_run: bool = False) -> MCPServer[Any]:
    """Return a server whose tools read the allowed folders, and run programs if ``allow_run``."""
    server = _Server(
        "advisor", version=advisor.__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    tools = Tools(allowed)
    read_only = ToolAnnotations(read_only_hint=True, open_world_hint=False, idempotent_hint=True)

    for tool in (
        tools.recordings,
        tools.analyze,
        tools.finding,
        tools.what_if,
        tools.compare,
        tools.operators,
        tools.project,
    ):
        server.tool(annotations=read_only)(with_one_line_errors(tool))
    _add_resources(server)
    if allow_run:
        _add_run_tools(server, allowed)
    return server


def _add_resources(server: MCPServer[Any]) -> None:
    """Add the resources that a client reads without a tool call: the rules and a guide."""

    @functools.cache
    def rules() -> dict[str, Rule]:
        from advisor.advise.rule_loading import load_rules

        return {rule.id: rule for rule in load_rules(None, config={})}

    @server.resource("advisor://rules", description="All rules: id and title, one per line.")
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
            raise ResourceNotFoundError(
                f"no rule {answers.bound_name(id)!r}; advisor://rules lists them"
            )
        return Terminal().render(build(rules()[id]), RenderOptions(width=80, details=True))

    @server.resource(
        "advisor://guide", description="How to use advisor.", mime_type="text/markdown"
    )
    def guide() -> str:
        return SKILL.read_text(encoding="utf-8")


def _add_run_tools(server: MCPServer[Any], allowed: AllowedFolders) -> None:
    """Add the tools that run programs."""

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True))
    @with_one_line_errors
    def record(
        script: Place,
        out: Place,
        arguments: Annotated[list[str], Field(max_length=programs.MAX_ARGUMENTS)] = [],  # noqa: B006
        timeout_s: Annotated[float, Field(ge=1, le=programs.MAX_SECONDS)] = 600,
    ) -> ProgramResult:
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
                description="Knobs, such as 'workers' or 'workers=2'; empty: those that the "
                "findings name.",
            ),
        ] = [],  # noqa: B006
        budget_s: Annotated[float, Field(ge=programs.MIN_BUDGET, le=programs.MAX_SECONDS)] = 300,
    ) -> TrialsResult:
        """Run a Python training script several times for some steps, as it is and with each fix
        that needs no edit (loader workers, precision, compiling, ...). Measure the gain of each
        fix and check the losses. Files that the script writes go to a scratch folder; otherwise
        it runs with the user's rights."""
        return programs.try_knobs(allowed, script, list(arguments), out, list(only), budget_s)
