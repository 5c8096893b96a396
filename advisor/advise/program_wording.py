"""Choice of words that fit the program: rules speak of PyTorch, its profiler and CUDA.

If a trace says that the program does not use PyTorch, a bundled rule either has other words
(``Rule.framework_advice``) or does not run: a C++ program gets no advice about a DataLoader.
Third-party rules stay as they are. ``how_to_record`` does the same for recording options."""

import re
import shlex
from pathlib import PurePath

from msgspec.structs import replace

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding, SkippedCheck, impact_without_gain
from advisor.core.report import Report
from advisor.core.rule import Program, Rule
from advisor.core.trace import CUDA, JAX, PYTORCH, TENSORFLOW, TraceMeta
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.inference.annotations import FORWARD, TRANSFORMERS
from advisor.measure.steps.run_steps import RunSteps
from advisor.read.reader import Tool
from advisor.read.registry import find_tool

OTHER_FRAMEWORKS = (TENSORFLOW, JAX)
"""Frameworks whose programs get no advice about PyTorch."""


def for_program(rule: Rule, a: Analysis) -> Rule:
    """Return the rule with its texts for the analysed program."""
    meta = a.trace.meta
    trains = not (rule.inference and a.forward_only)
    engine = a.engine
    marks = () if a.inference_steps is None else a.inference_steps.marks
    if engine == TRANSFORMERS and all(mark.phase == FORWARD for mark in marks):
        engine = None  # its switches belong to generate(), and an encoder has no cache
    return rule.for_program(
        Program(meta.framework, meta.vendor, not meta.is_pytorch, trains, engine)
    )


def has_advice_for(rule: Rule, meta: TraceMeta) -> bool:
    """Return whether a rule has advice for the program of a trace."""
    has_own_advice = rule.advice_for(meta.framework) is not None
    return meta.is_pytorch or not rule.bundled or rule.reads_record or has_own_advice


def is_of_use(rule: Rule, a: Analysis) -> bool:
    """Return whether a rule has advice for the program, and can find anything in it."""
    return has_advice_for(rule, a.trace.meta) and not (rule.training_only and a.forward_only)


def skip_foreign_rules(rules: list[Rule], meta: TraceMeta) -> list[SkippedCheck]:
    """Return one skipped check for all rules that only know PyTorch. Empty if there are none."""
    names = [rule.id for rule in rules if not has_advice_for(rule, meta)]
    if not names:
        return []
    descriptions = {CUDA: "one without a framework", None: "of no known framework"}
    description = descriptions.get(meta.framework, f"one of {meta.framework}")
    return [
        SkippedCheck(
            what="PyTorch-specific checks: loaders, autograd, optimizers, compilation, allocator",
            why=f"they are for PyTorch, and this program is {description}",
            rule=", ".join(names),
        )
    ]


# -- what the program does not allow ---------------------------------------------------------------

DOUBLE_BACKWARD = "torch.compile does not support double backward, which this step does"
_DOUBLE_BACKWARD_PATTERN = r"BackwardBackward\d*$"
"""Nodes that differentiate a backward pass, as for a gradient penalty, or forces from energies."""
_COMPILE_PATTERN = re.compile(r"torch\.compile|\b[Cc]ompil(?:e|ing)\b")


def without_compilation(finding: Finding, a: Analysis) -> Finding:
    """Remove advice to compile a step that differentiates a backward pass. A finding without other
    advice becomes a note."""
    if not _COMPILE_PATTERN.search(f"{finding.fix} {finding.code}"):
        return finding
    if not name_matches(a.trace.cpu["name"], _DOUBLE_BACKWARD_PATTERN).any():
        return finding
    sentences = [
        part for part in re.split(r"(?<=\.)\s+", finding.fix) if not _COMPILE_PATTERN.search(part)
    ]
    blocks = []
    for block in finding.code.split("\n\n"):
        lines = [line for line in block.split("\n") if "torch.compile(" not in line]
        if "@torch.compile" not in block and any(not line.startswith("#") for line in lines):
            blocks.append("\n".join(lines))
    if sentences:
        return replace(finding, fix=" ".join(sentences), code="\n\n".join(blocks))
    return replace(
        finding,
        fix="Compile only functions that are differentiated once.",
        code="",
        edits=[],
        impact=impact_without_gain(DOUBLE_BACKWARD),
        informational=True,
        alternatives="",
    )


_SWITCH_PATTERN = re.compile(r"^torch\.backends\.([\w.]+) = (True|False)\b")
_PRECISION_PATTERN = re.compile(r"^torch\.set_float32_matmul_precision\(.(\w+).\)")
_VARIABLE_PATTERN = re.compile(r"^(?:# shell: )?export (\w+)=(\S+)")


def without_known_settings(finding: Finding, a: Analysis) -> Finding:
    """Remove lines of a finding's code whose settings the recorder already saw in the run."""
    if a.run_steps is None or not finding.code:
        return finding
    lines = finding.code.split("\n")
    code_lines = [line for line in lines if not _is_set(line, a.run_steps)]
    if len(code_lines) == len(lines):
        return finding
    has_code = any(line and not line.startswith("#") for line in code_lines)
    return replace(finding, code="\n".join(code_lines).strip("\n") if has_code else "")


def _is_set(line: str, run_steps: RunSteps) -> bool:
    if switch := _SWITCH_PATTERN.match(line):
        return str(run_steps.flag(switch[1])) == switch[2]
    if precision := _PRECISION_PATTERN.match(line):
        return bool(run_steps.flag("float32_matmul_precision") == precision[1])
    variable = _VARIABLE_PATTERN.match(line)
    return variable is not None and run_steps.rank_record.rank.env.get(variable[1]) == variable[2]


# -- what would have to be recorded ----------------------------------------------------------------


MEMORY_SNAPSHOT = (
    "a memory snapshot (torch.cuda.memory._dump_snapshot), read with --memory-snapshot"
)
"""Recording of the allocator's memory in addition to a trace of any tool."""


ACTIVITIES = "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"

_DEEP_OPTIONS = frozenset(("with_stack", "profile_memory"))
"""Profiler options that ``advisor record --deep`` switches on."""


def tool_of(meta: TraceMeta) -> Tool | None:
    """Return the tool that recorded a trace, or ``None`` for PyTorch's and similar ones."""
    return find_tool(meta.format, meta.framework)


def how_to_record_more(option: str, a: Analysis) -> str:
    """Translate a PyTorch profiler option for the tool of an analysed trace. If the trace has
    ranges, ask for ranges where they are missing."""
    instruction = how_to_record(option, a.trace.meta, recorder=a.rank_record is not None)
    has_ranges = tool_of(a.trace.meta) is not None and (a.trace.cpu["kind"] == "annotation").any()
    return instruction.replace(_RANGES, "more NVTX ranges", 1) if has_ranges else instruction


_RANGES = "NVTX ranges around the host's work"
"""Way to see the host in the trace of a tool that records no stacks."""


def how_to_record(option: str, meta: TraceMeta, *, recorder: bool = False) -> str:
    """Translate a PyTorch profiler option (``record_shapes=True``) for the tool of a trace.
    ``recorder``: advisor recorded the trace. Return ``""`` if the tool cannot record it. A text
    that is not an option is returned unchanged."""
    tool = tool_of(meta)
    if tool is None:
        name = option.replace("(", "=").partition("=")[0]
        return "advisor record --deep" if recorder and name in _DEEP_OPTIONS else option
    is_pytorch = meta.framework == PYTORCH
    if option.startswith("a profiler that writes"):
        return tool.command if tool.records_device else ""
    match option.replace("(", "=").partition("=")[0]:
        case "record_shapes":
            return "torch.autograd.profiler.emit_nvtx(record_shapes=True)" if is_pytorch else ""
        case "with_stack" if is_pytorch:
            return f"{tool.host.partition(' (')[0]}, or {option} in PyTorch's profiler"
        case "with_stack":
            return tool.host
        case "profile_memory":
            return MEMORY_SNAPSHOT if is_pytorch else ""
        case "activities":
            return tool.command
        case "schedule":
            return tool.step
    return option


def record_with(option: str, meta: TraceMeta, ending: str = "") -> str:
    """Write a sentence that asks to record with an option, with ``ending`` at its end. ``""`` if
    the tool cannot."""
    instruction = how_to_record(option, meta)
    return f"{ask_to_record(instruction)}{ending}." if instruction else ""


def record_gpu_work(meta: TraceMeta) -> str:
    """Write what to record if no GPU work was recorded. Name the machine's GPU if the file does."""
    names = list(dict.fromkeys(device.name for device in meta.devices if device.name))
    if not names:
        return record_with(ACTIVITIES, meta, " where the program uses a GPU")
    gpu_note = (
        f"The machine has {t.with_article(labels.clean(names[0]))}, but the program did not use "
        "it, or its work was not recorded."
    )
    return f"{gpu_note} {record_with(ACTIVITIES, meta)}"


_THING_PATTERN = re.compile(r"(?:an? (?!profiler that)|the |more |all |stacks )")


def ask_to_record(how: str) -> str:
    """Write a request to record something (``more steps``) or with an option
    (``profile_memory=True``), without a full stop."""
    if how.startswith("with_stack"):
        return f"Record stacks ({how})"
    return f"Record {how}" if _THING_PATTERN.match(how) else f"Record with {how}"


def analyze_command(report: Report) -> str:
    """Return the command that analyses a report's file. ``TRACE`` replaces several files."""
    paths = [PurePath(each.path).name for each in report.inputs]
    return f"advisor analyze {shlex.quote(labels.clean(paths[0])) if len(paths) == 1 else 'TRACE'}"


def mark_steps(trace_format: str | None, framework: str | None) -> str:
    """Say how to mark steps: ``call profiler.step() once per iteration``."""
    tool = find_tool(trace_format, framework)
    if tool is None:
        return "call profiler.step() once per iteration"
    return f"put {tool.step}, or name a range with --steps"


def mark_steps_of(report: Report) -> str:
    """Say how to mark steps in the program of a report."""
    trace_format = report.inputs[0].format if report.inputs else None
    return mark_steps(trace_format, report.scope.framework)
