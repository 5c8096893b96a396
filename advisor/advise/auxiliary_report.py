"""Scope and verdict of a report on an auxiliary input alone (``core/auxiliary_inputs.py``)."""

from collections.abc import Callable, Mapping
from typing import Final

from advisor.advise.kernel_counters import compiled_verdict, counters_verdict
from advisor.advise.memory import memory_verdict
from advisor.core import text as t
from advisor.core.auxiliary_inputs import (
    COMPILE_LOG,
    COUNTERS,
    FLIGHT_RECORDER,
    SNAPSHOT,
    TRITON_CACHE,
    AuxiliaryInput,
)
from advisor.core.report import Report, Scope, Status
from advisor.core.rule import VerdictRole
from advisor.measure import Analysis
from advisor.measure.comm.flight_recorder import UNENDED, describe_problem, of_ranks

Verdict = tuple[Status, str]


def source_scope(a: Analysis, kind: AuxiliaryInput) -> Scope:
    """Return the scope of an auxiliary input: its devices, if it names them."""
    devices = [peak.device for peak in a.peak_memories]
    profiles = a.trace.meta.kernel_profiles
    kernels = () if profiles is None else profiles.kernels
    names = {k.device for k in kernels if k.device}
    built = {k.compute for k in kernels if k.compute is not None}
    if not names and len(built) == 1:
        names = {"model not recorded, compute capability {}.{}".format(*built.pop())}
    return Scope(
        step_source=kind.name,
        rank=a.trace.meta.rank,
        device=next(iter(devices), 0 if names else None),
        device_name=min(names) if len(names) == 1 else None,
        devices_seen=len(devices) or 1,
        framework=a.trace.meta.framework,
    )


def auxiliary_verdict(
    report: Report, kind: AuxiliaryInput, roles: Mapping[str, VerdictRole]
) -> Verdict:
    """Return the status and verdict of an auxiliary input, or else its first finding."""
    if kind.name == SNAPSHOT.name:
        return memory_verdict(report, roles)
    if kind.name in VERDICTS:
        return VERDICTS[kind.name](report)
    titles = [note.title for note in report.notes]
    if not titles:
        return "limited", kind.clear
    others = f" {t.count_noun(len(titles) - 1, 'more finding')}." if len(titles) > 1 else ""
    return "bottlenecks", f"{titles[0]}.{others}"


def _compilation_verdict(report: Report) -> Verdict:
    """Return the status and verdict of torch.compile logs alone."""
    log = report.compilation
    if log is None:
        return "limited", ""
    parts = {
        "graph break": len(log.breaks),
        "recompilation": sum(each.count for each in log.recompilations),
        "uncompiled function": len(log.not_compiled),
        "skipped CUDA graph": len(log.without_cuda_graphs),
    }
    counted = [t.count_noun(count, noun) for noun, count in parts.items() if count]
    text = f"{t.count_noun(log.compilations, 'compilation')} in {t.format_duration(log.ns)}: "
    status: Status = "bottlenecks" if counted else "limited"
    return status, f"{text}{', '.join(counted) or 'no graph break, no recompilation'}."


def flight_verdict(report: Report) -> Verdict:
    """Return the status and verdict of flight-recorder dumps."""
    flight = report.flight
    if flight is None or not flight.calls:
        return "limited", "The flight-recorder dumps hold no collective."
    if flight.problems:
        first = flight.problems[0]
        status: Status = "limited" if first.kind == UNENDED else "bottlenecks"
        return status, describe_problem(first)
    amount = f"{t.count_noun(flight.calls, 'call')} of {t.count_noun(flight.dumps, 'rank')}"
    if flight.absent or flight.dumps < 2:
        missing_ranks = of_ranks(flight.absent) if flight.absent else "The other ranks"
        return "limited", f"No collective hangs in {amount}. {missing_ranks} left no dump."
    return "healthy", f"No collective hangs: {amount} match, and all have ended."


VERDICTS: Final[dict[str, Callable[[Report], Verdict]]] = {
    COUNTERS.name: counters_verdict,
    TRITON_CACHE.name: compiled_verdict,
    FLIGHT_RECORDER.name: flight_verdict,
    COMPILE_LOG.name: _compilation_verdict,
}
