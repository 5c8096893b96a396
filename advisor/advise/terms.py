"""Advice in the terms of the program that is looked at.

Rules speak of PyTorch. Where a trace says that the program is none, a rule of ours either has other
words (``Rule.elsewhere``) or does not run: nobody who writes C++ is told to set a switch of a
DataLoader. Rules of others are left as they are. ``how_to_record`` does the same for what would
have to be recorded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from advisor.core.finding import Finding, PassedCheck, SkippedCheck
from advisor.core.trace import CUDA, JAX, KINETO, PYTORCH, TENSORFLOW

if TYPE_CHECKING:
    from advisor.core.finding import FrameworkAdvice, Outcome, Rule
    from advisor.core.trace import TraceMeta


FRAMEWORKS = (TENSORFLOW, JAX)
"""Whose programs are told nothing of PyTorch at all."""
_TORCH = re.compile(
    r"torch|DataLoader|num_workers|pin_memory|persistent_workers|aten::|autograd|non_blocking"
    r"|\.item\(\)|set_to_none|no_grad|cudnn\.benchmark|\bDDP\b|profiler\.step|with_stack|schedule\(",
    re.IGNORECASE,
)
"""Words of PyTorch's, for texts that would mislead others."""
_HIP = (
    ("cudaHostAllocDefault", "hipHostMallocDefault"), ("cudaHostAlloc", "hipHostMalloc"),
    ("cudaMallocAsync", "hipMallocAsync"), ("CUDA", "HIP"), ("NCCL", "RCCL"), ("cuda", "hip"),
    ("cublas", "hipblas"), ("CUBLAS", "HIPBLAS"),
)  # fmt: skip
_LOOP = re.compile(r"\b(?:the|a) training loop\b")
_TRAINING = re.compile(r"\btraining loop\b")


def foreign(meta: TraceMeta) -> bool:
    """The trace is surely of no PyTorch program, or of none that is known to be one."""
    return meta.framework != PYTORCH and (meta.framework is not None or meta.format != KINETO)


def advises(rule: Rule, meta: TraceMeta) -> bool:
    """Whether what the rule says is of use for such a program."""
    ours = type(rule).__module__.startswith("advisor.rules.")
    known = rule.advice_for(meta.framework) is not None
    return not foreign(meta) or not ours or rule.reads_record or known


def left_out(rules: list[Rule], meta: TraceMeta) -> list[SkippedCheck]:
    """One line for all rules that only know PyTorch."""
    names = [rule.id for rule in rules if not advises(rule, meta)]
    if not names:
        return []
    what = {CUDA: "a program without a framework", None: "of no framework that is known"}
    is_one = what.get(meta.framework, f"one of {meta.framework}")
    return [
        SkippedCheck(
            what="what is PyTorch's own: loaders, autograd, optimizers, compilation, its allocator",
            why=f"{len(names)} checks advise PyTorch programs, and this is {is_one}",
            rule=", ".join(names),
        )
    ]


def not_recorded(outcome: SkippedCheck, meta: TraceMeta) -> SkippedCheck:
    """What only our recorder measures: it records PyTorch programs."""
    if meta.framework not in FRAMEWORKS:
        return outcome
    return replace(outcome, why=f"{outcome.why}, which records PyTorch programs", record="")


def worded(finding: Finding, rule: Rule, meta: TraceMeta) -> Finding:
    """What a rule said, in the program's terms and in those of what recorded it."""
    advice = rule.advice_for(meta.framework)
    if meta.framework in FRAMEWORKS:
        return _without_torch(_advise(finding, advice))
    if advice is None or not foreign(meta):
        return finding
    plain = {"title": _plain(finding.title), "summary": _plain(finding.summary)}
    advised = _advise(replace(finding, **plain), advice)
    if meta.vendor == "amd":
        return replace(advised, fix=_as_hip(advised.fix), code=_as_hip(advised.code))
    return advised


def good_worded(good: PassedCheck, rule: Rule, meta: TraceMeta) -> PassedCheck:
    """The same of what the program does well."""
    advice = rule.advice_for(meta.framework)
    if advice is None:
        return good
    if meta.framework in FRAMEWORKS:
        return replace(good, text=_said(_plain(good.text), advice))
    if not foreign(meta):
        return good
    text = _plain(good.text)
    return replace(good, text=_as_hip(text) if meta.vendor == "amd" else text)


def skipped_worded(skipped: SkippedCheck, rule: Rule, meta: TraceMeta) -> SkippedCheck:
    """The same of what could not be checked."""
    advice = rule.advice_for(meta.framework)
    what = skipped.what
    if advice is not None and meta.framework in FRAMEWORKS:
        what = _said(what, advice)
    return replace(skipped, what=what, record=how_to_record(skipped.record, meta))


def _advise(finding: Finding, advice: FrameworkAdvice | None) -> Finding:
    """With what the rule advises there in the place of what it said."""
    if advice is None:
        return finding
    return replace(
        finding,
        fix=advice.fix,
        code=advice.code,
        check=advice.verify or finding.check,
        title=advice.title or finding.title,
        summary=_said(finding.summary, advice),
        references=[link for link in finding.references if not _TORCH.search(link)],
    )


def _said(text: str, advice: FrameworkAdvice) -> str:
    """The sentence with what is called otherwise there."""
    for old, new in advice.says:
        text = text.replace(old, new)
    return text


def _without_torch(finding: Finding) -> Finding:
    """Without what is said in PyTorch's terms alone."""
    return replace(
        finding,
        check=_other_than_torch(finding.check) or "Profile again: the figures above change.",
        alternatives=_other_than_torch(finding.alternatives),
        falsified_by=_other_than_torch(finding.falsified_by),
        assumptions=[text for text in finding.assumptions if not _TORCH.search(text)],
        evidence=[each for each in finding.evidence if not _TORCH.search(each.label)],
    )


def _other_than_torch(text: str) -> str:
    return " ".join(part for part in re.split(r"(?<=[.;])\s+", text) if not _TORCH.search(part))


def unsuited(outcome: Outcome, rule: Rule, meta: TraceMeta) -> SkippedCheck | None:
    """An abstention in the place of a finding that can only be told in PyTorch's terms."""
    if meta.framework not in FRAMEWORKS or not isinstance(outcome, Finding):
        return None
    texts = (outcome.title, outcome.summary, outcome.fix, outcome.code)
    if not any(_TORCH.search(text) for text in texts):
        return None
    return SkippedCheck(
        what=f"what {rule.id} looks for",
        why=f"its advice is for PyTorch programs, and this is one of {meta.framework}",
        rule=rule.id,
    )


def _plain(text: str) -> str:
    return _TRAINING.sub("loop", _LOOP.sub("the loop", text))


def _as_hip(text: str) -> str:
    for name, other in _HIP:
        text = text.replace(name, other)
    return text


# -- what would have to be recorded ----------------------------------------------------------------

_MARKED = "jax.profiler.StepTraceAnnotation (or tf.profiler.experimental.Trace) around each step"
_TOOLS = {
    "nsys": ("nsys profile --trace=cuda,nvtx,osrt", "an NVTX range around each iteration"),
    "rocpd": ("rocprofv3 --sys-trace", "a ROCTX range around each iteration"),
    "rpd": ("runTracer.sh", "a ROCTX range around each iteration"),
    "rocprofv3": ("rocprofv3 --sys-trace", "a ROCTX range around each iteration"),
    "xplane": ("TensorFlow's or JAX's profiler", _MARKED),
}
_TOOLS["xla-timeline"] = _TOOLS["xplane"]
_SHAPES = "torch.autograd.profiler.emit_nvtx(record_shapes=True)"
_STEPS = re.compile(r"schedule\([^()]*\)(?: and profiler\.step\(\) in the loop)?")
_SCHEDULE = re.compile(r"(?: Record [^.:]*:)? ?schedule\([^()]*\)\.?")


def how_to_record(text: str, meta: TraceMeta) -> str:
    """What PyTorch's profiler is to be told, as the tool that recorded this is told it; ``""``
    where it cannot record such a thing."""
    tool = _TOOLS.get(meta.format)
    if tool is None or not text:
        return text
    command, steps = tool
    torch = meta.framework == PYTORCH
    if "record_shapes" in text:
        return _SHAPES if torch else ""
    if meta.framework in FRAMEWORKS and "with_stack" in text:
        return "ProfilerOptions(python_tracer_level=1)"
    if "with_stack" in text or "profile_memory" in text:
        return f"PyTorch's own profiler, with {text}" if torch else ""
    if "activities" in text:
        return command
    return _STEPS.sub(steps, text)


def record_with(option: str, meta: TraceMeta, more: str = "") -> str:
    """A sentence that asks to record so, ``more`` at its end; ``""`` where that cannot be."""
    told = how_to_record(option, meta)
    return f"Record with {told}{more}." if told else ""


def mark_steps(trace_format: str | None) -> str:
    """How to have steps marked: ``call profiler.step() once an iteration``."""
    tool = _TOOLS.get(trace_format or "")
    if tool is None:
        return "call profiler.step() once an iteration"
    return f"put {tool[1]}, or name a range with --steps"


def limit_worded(text: str, meta: TraceMeta) -> str:
    """A sentence on the trace's limits, in the same way."""
    tool = _TOOLS.get(meta.format)
    if tool is None:
        return text
    command, steps = tool
    text = text.replace("Record with activities=[CPU, CUDA]", f"Record with {command}")
    text = text.replace(
        "Call profiler.step() once an iteration to have them a step.",
        f"Put {steps}, or name a range with --steps, to have them a step.",
    )
    text = text.replace(
        "No operators in the trace, only runtime calls: kernels cannot be tied to the code that "
        f"launched them. Record with {command}.",
        "No operators in the trace: kernels are tied to the calls and ranges that launched them.",
    )
    text = text.replace(
        "No operators in the trace: nothing ran between its start and its end, or the profiler "
        "was restarted before the file was written (schedule(..., repeat=1)).",
        f"No calls in the trace, only ranges. Record with {command}.",
    )
    return _SCHEDULE.sub("", text)
